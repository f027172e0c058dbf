"""Writes GGUF files: metadata (the inverse of `config` and `tokenizer`), then one tensor at a time.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, version 3, little endian. Keys and types are those
that llama.cpp's converter writes (conversion/base.py, conversion/qwen.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from deltic.config import ExpertsConfig, GenerationDefaults, LinearConfig, ModelConfig, Yarn
from deltic.config.families import FAMILIES, SPLITTERS
from deltic.config.rope import mscale
from deltic.errors import ModelError
from deltic.loader.disk import check_room, replacing
from deltic.loader.gguf.blocks import BlockType, Bytes
from deltic.loader.gguf.config import SAMPLING_KEYS
from deltic.loader.gguf.tokenizer import (
    CONTROL,
    END_TEXTS,
    ENDS,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    VARIABLES,
    TokenizerTexts,
)

_DEFAULT_TEMPLATE: Final = "default"


def config_to_gguf(config: ModelConfig) -> dict[str, Any]:
    """Returns the metadata of a model's shape for `config_from_gguf`. Rotary divisors that differ from each other are a
    tensor (`names.ROPE_FACTORS`)."""
    architecture = FAMILIES[config.architecture].gguf
    heads = config.num_mtp_layers
    keys: dict[str, Any] = {
        "block_count": config.num_hidden_layers + heads, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps), "rope.freq_base": float(config.rope.theta),
        "rope.dimension_count": config.rope.rotary_dim,
    }
    if config.experts is None:
        keys["feed_forward_length"] = config.intermediate_size
    else:
        keys |= _experts(config.experts)
    if config.rope.mrope_section:
        keys["rope.dimension_sections"] = [*config.rope.mrope_section, 0]
    if config.rope.yarn is not None:
        keys |= _yarn(config.rope.yarn)
    elif len({*config.rope.factors}) == 1:
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(config.rope.factors[0])}
    if "linear_attention" in FAMILIES[config.architecture].mixers:
        keys |= _layer_kinds(config.layer_types, heads)
    if config.linear is not None:
        keys |= _linear(config.linear)
    if heads:
        keys["nextn_predict_layers"] = heads
    return {"general.architecture": architecture, **{f"{architecture}.{key}": keys[key] for key in keys}}


def _yarn(yarn: Yarn) -> dict[str, Any]:
    """llama.cpp multiplies the attention factor derived from the scaling factor by the factor in its key."""
    if not yarn.truncate:
        raise ModelError("GGUF files cannot store YaRN without whole dimensions (truncate false)")
    more = {"attn_factor": yarn.attention_factor / mscale(yarn.factor), "yarn_beta_fast": yarn.beta_fast,
            "yarn_beta_slow": yarn.beta_slow}
    defaults = {"attn_factor": 1.0, "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0}
    return {"rope.scaling.type": "yarn", "rope.scaling.factor": float(yarn.factor),
            "rope.scaling.original_context_length": yarn.original_context,
            **{f"rope.scaling.{key}": value for key, value in more.items() if value != defaults[key]}}


def _experts(experts: ExpertsConfig) -> dict[str, Any]:
    if not experts.normalised:
        raise ModelError("GGUF files cannot store experts whose weights are not normalised (norm_topk_prob false)")
    shared = {"expert_shared_feed_forward_length": experts.shared_size} if experts.shared_size else {}
    return {"expert_count": experts.count, "expert_used_count": experts.per_token,
            "expert_feed_forward_length": experts.size, **shared}


def _layer_kinds(kinds: Sequence[str], heads: int) -> dict[str, Any]:
    """Returns the kinds of layers, and their interval if the pattern is regular. Blocks of the `heads` come last."""
    recurrent = [kind == "linear_attention" for kind in kinds]
    interval = recurrent.index(False) + 1 if False in recurrent else len(kinds) + 1
    regular = recurrent == [(index + 1) % interval != 0 for index in range(len(kinds))]
    return {"attention.recurrent_layers": recurrent + [False] * heads,
            **({"full_attention_interval": interval} if regular else {})}


def _linear(linear: LinearConfig) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": linear.conv_kernel, "ssm.state_size": linear.key_head_dim,
        "ssm.group_count": linear.num_key_heads, "ssm.time_step_rank": linear.num_value_heads,
        "ssm.inner_size": linear.value_dim}


def generation_to_gguf(generation: GenerationDefaults) -> dict[str, Any]:
    """Returns the sampling defaults for `generation_from_gguf`."""
    given = {key: getattr(generation, hf_key) for key, hf_key in SAMPLING_KEYS.items()}
    return {f"general.sampling.{key}": value if type(value) is int else float(value)
            for key, value in given.items() if value is not None}


# The tokenizer


def tokenizer_to_gguf(texts: TokenizerTexts, config: ModelConfig, ends: Sequence[int]) -> dict[str, Any]:
    """Returns the metadata of a tokenizer for `tokenizer_from_gguf`; `ends` are the tokens that end an answer.

    The list of tokens is padded to the vocabulary's size. The complete tokenizer.json is added, because the format's
    own keys do not cover it. Raises ModelError for a tokenizer that is no byte-level BPE.
    """
    tokenizer = _parsed(texts.tokenizer)
    added = {token["id"]: token for token in tokenizer.get("added_tokens", [])}
    names = {id: text for text, id in tokenizer["model"]["vocab"].items()}
    names |= {id: token["content"] for id, token in added.items()}
    ids = range(max(config.vocab_size, max(names, default=-1) + 1))
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": _pre_tokenizer_name(tokenizer, config),
        "tokenizer.ggml.tokens": [names.get(id, f"[PAD{id}]") for id in ids],
        "tokenizer.ggml.token_type": [_token_type(id, names, added) for id in ids],
        "tokenizer.ggml.merges": [merge if isinstance(merge, str) else " ".join(merge)
                                  for merge in tokenizer["model"]["merges"]],
        **_special_ids(texts, names, config, ends), **_added_tokens(tokenizer, texts), **_templates(texts.templates),
        "tokenizer.huggingface.json": texts.tokenizer,
    }


def _parsed(text: str) -> dict[str, Any]:
    try:
        tokenizer = json.loads(text)
    except ValueError as error:
        raise ModelError(f"tokenizer.json is not valid JSON ({error}); download the file again") from error
    model = tokenizer.get("model") if isinstance(tokenizer, dict) else None
    if (not isinstance(model, dict) or not isinstance(model.get("vocab"), dict) or not model.get("merges")
            or model.get("byte_fallback")):
        raise ModelError("tokenizer.json is no byte-level BPE, the only kind that can be written to a GGUF file")
    found: dict[str, Any] = tokenizer
    return found


def _pre_tokenizer_name(tokenizer: Mapping[str, Any], config: ModelConfig) -> str:
    """Returns the name of the pre-tokenizer."""
    given = tokenizer.get("pre_tokenizer") or {}
    cuts = _relevant_keys(given.get("pretokenizers", [given]))
    named = next((name for name, splitter in SPLITTERS.items() if _relevant_keys(splitter.cuts) == cuts), None)
    found = named or FAMILIES[config.architecture].splitter
    if found is None:
        raise ModelError("the pre_tokenizer of tokenizer.json has no name in GGUF files "
                         f"({', '.join(SPLITTERS)})")
    return found


def _relevant_keys(cuts: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    """Returns the relevant keys of pre-tokenizers, for comparison."""
    keys = ("type", "pattern", "individual_digits", "use_regex")
    return [tuple(json.dumps(cut.get(key)) for key in keys) for cut in cuts]


def _token_type(id: int, names: Mapping[int, str], added: Mapping[int, Mapping[str, Any]]) -> int:
    if id in added:
        return CONTROL if added[id].get("special") else USER_DEFINED
    return NORMAL if id in names else UNUSED


def _special_ids(texts: TokenizerTexts, names: Mapping[int, str], config: ModelConfig,
                 ends: Sequence[int]) -> dict[str, int]:
    """Returns the ids of special tokens: the tokenizer's, or else the config's. Among end tokens that readers recognise
    by their text, only `eos` is named."""
    by_text = {text: id for id, text in names.items()}
    fallback = {"bos": config.bos_token_id, "padding": config.pad_token_id, "eos": next(iter(ends), None)}
    found = {kind: by_text.get(texts.special_tokens.get(name, ""), fallback.get(kind))
             for kind, name in VARIABLES.items()}
    others = [id for id in ends if id != found["eos"] and names.get(id) not in END_TEXTS]
    found |= zip(ENDS[1:], others, strict=False)
    return {f"tokenizer.ggml.{kind}_token_id": id for kind, id in found.items() if id is not None}


def _added_tokens(tokenizer: Mapping[str, Any], texts: TokenizerTexts) -> dict[str, bool]:
    """Returns two flags: True if the tokenizer adds bos, or eos, tokens around a raw prompt."""
    processor = tokenizer.get("post_processor") or {}
    parts: list[Mapping[str, Any]] = [processor, *processor.get("processors", ())]
    steps: list[Mapping[str, Any]] = next((part["single"] for part in parts if part.get("single")), [{}])
    put = {kind: step.get("SpecialToken", {}).get("id") for kind, step in (("bos", steps[0]), ("eos", steps[-1]))}
    found = {kind: id is not None and id == texts.special_tokens.get(f"{kind}_token") for kind, id in put.items()}
    return {"tokenizer.ggml.add_bos_token": found["bos"],
            **({"tokenizer.ggml.add_eos_token": True} if found["eos"] else {})}


def _templates(templates: Mapping[str, str]) -> dict[str, Any]:
    others = {name: text for name, text in templates.items() if name != _DEFAULT_TEMPLATE}
    default = {"tokenizer.chat_template": templates[_DEFAULT_TEMPLATE]} if _DEFAULT_TEMPLATE in templates else {}
    names = {"tokenizer.chat_templates": list(others)} if others else {}
    return {**default, **names, **{f"tokenizer.chat_template.{name}": text for name, text in others.items()}}


# The file


_VERSION, _ALIGNMENT = 3, 32
_ARRAY: Final = 9
_NUMBERS: Final[Mapping[str, int]] = {
    "uint8": 0, "int8": 1, "uint16": 2, "int16": 3, "uint32": 4, "int32": 5, "float32": 6, "uint64": 10, "int64": 11,
    "float64": 12}
"""numpy type -> type number in files."""


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor to be written. The shape has rows first, as in torch."""

    name: str
    type: BlockType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.type.size(math.prod(self.shape))


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Sequence[NewTensor],
               data: Iterable[Iterable[Bytes]]) -> int:
    """Writes a file and returns its size. `data` yields the bytes of each tensor in pieces (uint8).

    Metadata may be booleans, integers (stored as uint32, larger ones as int64), floats (float32), strings, lists of one
    of these types (integers as int32), and numpy arrays of numbers.
    The file is temporary until it is complete. Raises DelticError if it cannot be written or the disk is full, errors
    of `data`, and ModelError if `data` does not fit the tensors.
    """
    header = _header(metadata, tensors)
    size = len(header) + sum(_aligned(tensor.nbytes) for tensor in tensors)
    check_room(path, size, "make room, or choose a smaller type or another place")
    with replacing(path) as file:
        file.write(header)
        for tensor, pieces in zip(tensors, data, strict=True):
            _write_tensor(file, tensor, pieces)
    return size


def _write_tensor(file: BinaryIO, tensor: NewTensor, pieces: Iterable[Bytes]) -> None:
    written = 0
    for piece in pieces:
        file.write(np.ascontiguousarray(piece).data)
        written += piece.size
    if written != tensor.nbytes:
        raise ModelError(f"tensor {tensor.name!r} has {written} bytes, not the {tensor.nbytes} of its shape")
    file.write(bytes(_aligned(written) - written))


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


# The header


def _header(metadata: Mapping[str, Any], tensors: Sequence[NewTensor]) -> bytes:
    """Returns the padded bytes before the data."""
    parts = [b"GGUF", _u32(_VERSION), _u64(len(tensors)), _u64(len(metadata))]
    for key, value in metadata.items():
        kind, data = _value(value)
        parts += [_string(key), _u32(kind), data]
    offset = 0
    for tensor in tensors:
        parts.append(_entry(tensor, offset))
        offset += _aligned(tensor.nbytes)
    header = b"".join(parts)
    return header.ljust(_aligned(len(header)), b"\0")


def _entry(tensor: NewTensor, offset: int) -> bytes:
    """Returns a tensor's entry in the header. Files list the length of rows first."""
    dimensions = b"".join(map(_u64, reversed(tensor.shape)))
    return _string(tensor.name) + _u32(len(tensor.shape)) + dimensions + _u32(tensor.type.id) + _u64(offset)


def _u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def _u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


def _string(text: str) -> bytes:
    data = text.encode()
    return _u64(len(data)) + data


def _integer(value: int) -> tuple[int, bytes]:
    return (4, _u32(value)) if 0 <= value < 1 << 32 else (11, value.to_bytes(8, "little", signed=True))


_SINGLE: Final[Mapping[type, Callable[[Any], tuple[int, bytes]]]] = {
    bool: lambda value: (7, bytes([value])),
    int: _integer,
    float: lambda value: (6, np.float32(value).tobytes()),
    str: lambda value: (8, _string(value)),
}
"""Python type -> encoder that returns type and bytes."""


def _value(value: Any) -> tuple[int, bytes]:
    if isinstance(value, np.ndarray):
        numbers = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
        return _ARRAY, _u32(_NUMBERS[value.dtype.name]) + _u64(value.size) + numbers.tobytes()
    if not isinstance(value, list):
        return _SINGLE[type(value)](value)
    if not value or type(value[0]) is int:
        return _value(np.array(value, np.int32))
    encode = _SINGLE[type(value[0])]
    parts = [encode(one) for one in value]
    return _ARRAY, _u32(parts[0][0]) + _u64(len(parts)) + b"".join(data for _, data in parts)
