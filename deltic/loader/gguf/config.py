"""Reads the shape of a model and its sampling defaults from GGUF metadata.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and llama.cpp (conversion/base.py, qwen.py, llama.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch

from deltic.config import GenerationDefaults, ModelConfig
from deltic.config.families import FAMILIES, MIXTURES, Family, architecture
from deltic.config.reading import integer, number
from deltic.config.rope import mscale
from deltic.errors import ModelError, show
from deltic.loader.gguf.blocks import fill
from deltic.loader.gguf.file import GgufFile
from deltic.loader.gguf.names import ROPE_FACTORS
from deltic.loader.gguf.tokenizer import end_tokens

_INTEGERS: Final[tuple[tuple[str, str, int], ...]] = (
    ("embedding_length", "hidden_size", 1 << 17),
    ("attention.head_count", "num_attention_heads", 4096),
    ("context_length", "max_position_embeddings", 1 << 31),
)
"""GGUF key after the architecture, key of config.json, maximum value."""
_LINEAR: Final[tuple[tuple[str, str, int], ...]] = (
    ("ssm.group_count", "linear_num_key_heads", 4096),
    ("ssm.time_step_rank", "linear_num_value_heads", 4096),
    ("ssm.state_size", "linear_key_head_dim", 4096),
    ("ssm.conv_kernel", "linear_conv_kernel_dim", 32),
)
_YARN_NUMBERS: Final = (
    ("attn_factor", 1e-3, 1e3), ("yarn_log_multiplier", 0.0, 100.0), ("yarn_ext_factor", -1.0, 1.0),
    ("yarn_beta_fast", 1e-3, 1e6), ("yarn_beta_slow", 1e-3, 1e6))
"""Keys of YaRN after rope.scaling, with the range of each."""
_DTYPES: Final[Mapping[str, str]] = {"F32": "float32", "F16": "float16"}
"""Type of the embedding tensor -> dtype of the model; other types mean bfloat16."""
SAMPLING_KEYS: Final[Mapping[str, str]] = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty"}
"""Keys after general.sampling -> keys of generation_config.json."""


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """Returns the ModelConfig of a GGUF file.

    The vocabulary size is the number of rows of the embedding, which may exceed the number of tokens. A file without
    output.weight has a tied head. Blocks of a multi-token-prediction head (nextn) are not counted as layers.
    Raises ModelError naming the file, and the key that is absent, of the wrong type, absurd or unsupported.
    """
    try:
        config = ModelConfig.from_hf(_mapping(file))
        factors = _rope_factors(file)
        if not factors:
            return config
        if config.rope.yarn:
            raise ModelError(f"tensor {ROPE_FACTORS!r} with rope.scaling.type yarn is not supported")
        linear = next(iter(config.rope.factors), 1.0)
        return replace(config, rope=replace(config.rope, factors=tuple(linear * factor for factor in factors)))
    except ModelError as error:
        raise ModelError(f"{file.paths[0]}: {error}") from error


def generation_from_gguf(file: GgufFile, config: ModelConfig) -> GenerationDefaults:
    """Returns the sampling defaults (general.sampling.*), with the end tokens of the config.

    Raises ModelError naming the file and the value that is out of range.
    """
    given = {hf_key: file.metadata.get(f"general.sampling.{key}") for key, hf_key in SAMPLING_KEYS.items()}
    decimal = {key: _decimal(value) if type(value) is float else value for key, value in given.items()}
    try:
        return GenerationDefaults.from_hf(decimal, config.eos_token_ids)
    except ModelError as error:
        raise ModelError(f"{file.paths[0]}: general.sampling: {error}") from error


def model_name(file: GgufFile) -> str:
    """Returns general.name, else the file's name without its suffix."""
    name = file.metadata.get("general.name")
    return name if isinstance(name, str) and name.strip() else file.paths[0].stem


def _decimal(value: float) -> float:
    """Rounds to the shortest decimal number with the same float32 value, as in a config.json."""
    with np.errstate(over="ignore"):
        return float(str(np.float32(value)))


def _mapping(file: GgufFile) -> dict[str, Any]:
    """Converts the metadata to the contents of a config.json."""
    metadata, name = file.metadata, file.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise ModelError(f"general.architecture must be a string, not {show(name)}")
    if name == "clip":
        raise ModelError("this is a vision tower: name the GGUF file of the text model, and this one as mmproj")
    kind = architecture(name)
    family = FAMILIES.get(kind)
    keys = _Keys(metadata, name)
    if family is None or (keys.get("expert_count") and not family.experts):
        raise ModelError(f"general.architecture {name} is a mixture-of-experts model of a kind that is not supported, "
                         f"only {' and '.join(FAMILIES[each].gguf for each in MIXTURES)}; choose one of these or a "
                         "dense model")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError("tensor 'token_embd.weight' is absent or no matrix; is this a complete model?")
    layers = _layer_types(keys, family)
    found = {
        "model_type": kind,
        "vocab_size": embedding.shape[0],
        "layer_types": layers,
        "num_hidden_layers": len(layers),
        "head_dim": _head_dim(keys),
        "dtype": _DTYPES.get(embedding.type.name, "bfloat16"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "sliding_window": keys.get("attention.sliding_window") or None,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon", 1e-12, 0.1),
        "mtp_num_hidden_layers": keys.integer_or("nextn_predict_layers", _bundled_heads(file.tensors), 0, 64),
        "rope_parameters": _rope(keys, family),
    }
    found |= keys.integers(_INTEGERS) | _kv_heads(keys, family) | _tokens(metadata)
    if family.experts:
        found |= _experts(keys, family)
    else:
        found["intermediate_size"] = keys.uniform("feed_forward_length", 1 << 20)
    if "linear_attention" in layers:
        found |= _linear(keys)
    return found


class _Keys:
    """The keys of one architecture. Errors name the whole key."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self.metadata, self.prefix = metadata, architecture + "."

    def get(self, key: str) -> Any:
        """Returns a single value, or None."""
        value = self.metadata.get(self.prefix + key)
        if isinstance(value, np.ndarray | list):
            raise ModelError(f"{self.prefix + key} must be a single value, not {show(value)}")
        return value

    def required(self, key: str) -> Any:
        """Returns a value or an array."""
        if self.prefix + key not in self.metadata:
            raise ModelError(f"{self.prefix + key} is absent from the metadata; convert the model again with a current "
                             "converter, or take another file")
        return self.metadata[self.prefix + key]

    def integer_or(self, key: str, default: int, low: int, high: int) -> int:
        return default if self.get(key) is None else self.integer(key, low, high)

    def integer(self, key: str, low: int, high: int) -> int:
        self.required(key)
        return integer(self.metadata, self.prefix + key, low, high)

    def integers(self, table: tuple[tuple[str, str, int], ...]) -> dict[str, int]:
        return {hf_key: self.integer(key, 1, high) for key, hf_key, high in table}

    def number(self, key: str, low: float, high: float) -> float:
        self.required(key)
        return _decimal(number(self.metadata, self.prefix + key, low, high))

    def uniform(self, key: str, high: int) -> int:
        """Returns a number that may also be an array over layers, 0 for layers where it does not apply."""
        value = self.required(key)
        if not isinstance(value, np.ndarray):
            return self.integer(key, 1, high)
        found = set(value.tolist()) - {0}
        if len(found) != 1:
            raise ModelError(f"{self.prefix + key} differs between layers, which is not supported: {show(found)}")
        return integer({self.prefix + key: found.pop()}, self.prefix + key, 1, high)


def _layer_types(keys: _Keys, family: Family) -> list[str]:
    """Returns the kinds of the trunk's layers, without the blocks of the draft head, which come last in the file."""
    blocks = keys.integer("block_count", 1, 1024)
    drafts = keys.integer_or("nextn_predict_layers", 0, 0, blocks - 1)
    recurrent = keys.metadata.get(keys.prefix + "attention.recurrent_layers")
    if recurrent is None:
        interval = keys.integer_or("full_attention_interval", family.interval, 1, 1024)
        recurrent = [(index + 1) % interval != 0 for index in range(blocks)]
    if not isinstance(recurrent, list) or len(recurrent) != blocks or not all(type(one) is bool for one in recurrent):
        raise ModelError(f"{keys.prefix}attention.recurrent_layers must be {blocks} booleans, not {show(recurrent)}")
    return ["linear_attention" if one else "full_attention" for one in recurrent[:blocks - drafts]]


def _experts(keys: _Keys, family: Family) -> dict[str, Any]:
    """Converts the shape of the experts. Routing weights are normalised unless the file states otherwise."""
    found: dict[str, Any] = {
        "num_experts": keys.integer("expert_count", 1, 4096),
        "num_experts_per_tok": keys.integer("expert_used_count", 1, 4096),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length", 1, 1 << 20),
        "norm_topk_prob": all(keys.get(key) is not False for key in ("expert_weights_norm", "norm_top_k_prob"))}
    if family.shared:
        found["shared_expert_intermediate_size"] = keys.integer("expert_shared_feed_forward_length", 1, 1 << 20)
    return found


def _kv_heads(keys: _Keys, family: Family) -> dict[str, int]:
    key = "attention.head_count_kv"
    given = keys.prefix + key in keys.metadata or not family.sparse
    return {"num_key_value_heads": keys.uniform(key, 4096)} if given else {}


def _head_dim(keys: _Keys) -> int:
    if keys.get("attention.key_length") is None:
        return keys.integer("embedding_length", 1, 1 << 17) // keys.integer("attention.head_count", 1, 4096)
    dim = keys.integer("attention.key_length", 1, 4096)
    if keys.get("attention.value_length") not in (None, dim):
        raise ModelError(f"{keys.prefix}attention.value_length must be {dim} as attention.key_length is, "
                         f"not {show(keys.get('attention.value_length'))}")
    return dim


def _rope(keys: _Keys, family: Family) -> dict[str, Any]:
    """Converts the rotary embedding. As in llama.cpp, a factor without a type is linear; `rope.scale_linear` is the
    older key of the factor."""
    factor = next((key for key in ("rope.scaling.factor", "rope.scale_linear") if keys.get(key)), None)
    scaling = keys.get("rope.scaling.type") or ("linear" if factor else "none")
    rope: dict[str, Any] = {"rope_type": "default" if scaling == "none" else scaling}
    if scaling == "linear":
        rope["factor"] = keys.number(factor or "rope.scaling.factor", 1.0, 1e6)
    if scaling == "yarn":
        rope |= _yarn(keys)
    if not family.sparse or keys.get("rope.freq_base") is not None:
        rope["rope_theta"] = keys.number("rope.freq_base", 1.0, 1e12)
    head_dim = _head_dim(keys)
    if family.mrope or keys.get("rope.dimension_count") is not None:
        rotated = keys.integer("rope.dimension_count", 2, head_dim)
        # rounded up, so that multiplying by the head's dims returns the same number
        rope["partial_rotary_factor"] = math.nextafter(rotated / head_dim, 1.0)
    if family.mrope:
        rope["mrope_section"] = _sections(keys)
    return rope


def _yarn(keys: _Keys) -> dict[str, Any]:
    """Converts YaRN as llama.cpp reads it: `attn_factor` multiplies the attention factor that follows from the scaling
    factor, and `yarn_attn_factor` has no effect."""
    factor = keys.number("rope.scaling.factor", 1.0, 1e6)
    given = {key: keys.number(f"rope.scaling.{key}", low, high) for key, low, high in _YARN_NUMBERS
             if keys.get(f"rope.scaling.{key}") is not None}
    if given.get("yarn_ext_factor", 1.0) not in (-1.0, 1.0):
        raise ModelError(f"{keys.prefix}rope.scaling.yarn_ext_factor {given['yarn_ext_factor']:g} is not supported, "
                         "only 1")
    attention = mscale(factor) * given.get("attn_factor", 1.0)
    if of_all := given.get("yarn_log_multiplier"):
        attention /= mscale(factor, of_all)
    return {"factor": factor, "attention_factor": attention, "beta_fast": given.get("yarn_beta_fast"),
            "beta_slow": given.get("yarn_beta_slow"), "original_max_position_embeddings": keys.integer_or(
                "rope.scaling.original_context_length", keys.integer("context_length", 1, 1 << 31), 1, 1 << 31)}


def _rope_factors(file: GgufFile) -> tuple[float, ...]:
    """Returns the divisors of the rotary frequencies: GGUF's form of `llama3` scaling."""
    stored = file.tensors.get(ROPE_FACTORS)
    if stored is None:
        return ()
    factors = torch.empty(stored.shape)
    fill(factors, stored.type, stored.read)
    if not bool((factors.isfinite() & (factors > 0)).all()):
        raise ModelError(f"tensor {ROPE_FACTORS!r} has values that are not positive")
    return tuple(factors.flatten().tolist())


def _sections(keys: _Keys) -> list[int]:
    """Returns three counts; the fourth count in the file is for other models."""
    value = keys.required("rope.dimension_sections")
    counts: list[Any] = value.tolist() if isinstance(value, np.ndarray) else []
    if len(counts) not in (3, 4) or any(type(count) is not int or not 0 <= count < 1 << 16 for count in counts) or (
            any(counts[3:])):
        raise ModelError(f"{keys.prefix}rope.dimension_sections must be three counts and a zero, not {show(value)}")
    return counts[:3]


def _linear(keys: _Keys) -> dict[str, int]:
    if keys.get("ssm.v_head_reordered") is False:
        raise ModelError(f"{keys.prefix}ssm.v_head_reordered false is not supported: convert the model again with a "
                         "current converter, or take another file")
    found = keys.integers(_LINEAR)
    heads = found["linear_num_value_heads"]
    inner = keys.integer("ssm.inner_size", 1, 1 << 24)
    if inner % heads:
        raise ModelError(f"{keys.prefix}ssm.inner_size ({inner}) must be a multiple of ssm.time_step_rank ({heads})")
    return {**found, "linear_value_head_dim": inner // heads}


def _tokens(metadata: Mapping[str, Any]) -> dict[str, Any]:
    kinds = {"bos_token_id": "bos", "pad_token_id": "padding"}
    return {"eos_token_id": list(end_tokens(metadata)),
            **{hf_key: metadata.get(f"tokenizer.ggml.{kind}_token_id") for hf_key, kind in kinds.items()}}


def _bundled_heads(names: Iterable[str]) -> int:
    """Counts the layers of a multi-token-prediction head among the tensors of Ollama's converter."""
    heads = [name for name in names if name.startswith("mtp.")]
    layers = [int(found[1]) + 1 for name in heads if (found := re.match(r"mtp\.layers\.(\d{1,4})\.", name))]
    return max(layers, default=1 if heads else 0)
