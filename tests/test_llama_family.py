"""Llama, Mistral and Qwen2: what their configs and files say otherwise than those of our own family."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from gguf_models import LLAMA, SHAPES, gguf_tensors, metadata_of, write, write_model
from safetensors.torch import save_file
from support import load_gguf, tiny_texts
from tokenizers import Tokenizer as Backend
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from deltic.chat.tokenizer import Tokenizer
from deltic.config import GenerationDefaults, ModelConfig, RopeConfig, architecture
from deltic.errors import ModelError
from deltic.loader.dummy import random_weights
from deltic.loader.gguf.config import config_from_gguf
from deltic.loader.gguf.convert import convert
from deltic.loader.gguf.file import GgufFile
from deltic.loader.gguf.load import load_packed
from deltic.loader.gguf.names import ROPE_FACTORS
from deltic.loader.gguf.tokenizer import tokenizer_from_gguf
from deltic.loader.model_files import ModelFiles
from deltic.loader.names import expected_tensors
from deltic.ops.cpu import missing
from deltic.ops.torch.basic import frequencies
from deltic.ops.types import RopeSpec

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}


def llama(**changes: Any) -> dict[str, Any]:
    """A config as Llama 2 has it; `...` removes a key."""
    mapping = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 24,
        "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 6, "rms_norm_eps": 1e-5,
        "rope_scaling": None, "attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "pretraining_tp": 1,
        "max_position_embeddings": 4096, "tie_word_embeddings": False, "torch_dtype": "float16", "bos_token_id": 1,
        "eos_token_id": 2, **changes}
    return {key: value for key, value in mapping.items() if value is not ...}


# Configs


def test_defaults_of_old_configs() -> None:
    config = ModelConfig.from_hf(llama())
    assert (config.architecture, config.head_dim, config.num_key_value_heads) == ("llama", 4, 6)
    assert config.rope == RopeConfig(1e4, 4, ()) and (config.qk_norm, config.qkv_bias) == (False, False)
    assert ModelConfig.from_hf(llama(num_key_value_heads=None, head_dim=None, rope_theta=10000.0)) == config
    newer = llama(rope_scaling=..., rope_parameters={"rope_type": "default", "rope_theta": 1e4}, head_dim=4)
    assert ModelConfig.from_hf(newer) == config
    wide = ModelConfig.from_hf(llama(head_dim=16, num_key_value_heads=2, rope_theta=5e5))
    assert (wide.head_dim, wide.num_key_value_heads, wide.rope.theta) == (16, 2, 5e5)


@pytest.mark.parametrize(("name", "family"), [
    ("llama", "llama"), ("LlamaForCausalLM", "llama"), ("mistral", "llama"), ("MistralForCausalLM", "llama"),
    ("qwen2", "qwen2"), ("Qwen2ForCausalLM", "qwen2"), ("MixtralForCausalLM", "mixtral"), ("qwen2_moe", "qwen2_moe")])
def test_names(name: str, family: str) -> None:
    assert architecture(name) == family


def test_only_qwen2_has_biases() -> None:
    plain, biased = (ModelConfig.from_hf(llama(model_type=kind, architectures=...)) for kind in ("llama", "qwen2"))
    assert not plain.qkv_bias and biased.qkv_bias and not biased.qk_norm
    assert set(expected_tensors(biased)) - set(expected_tensors(plain)) == {
        f"model.layers.{layer}.self_attn.{part}_proj.bias" for layer in range(3) for part in "qkv"}
    assert biased.parameter_count - plain.parameter_count == 3 * 3 * 24


@pytest.mark.parametrize(("message", "changes"), [
    ("sliding_window 4096 is not supported", {"model_type": "mistral", "architectures": ..., "sliding_window": 4096}),
    ("sliding_window is absent", {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}),
    ("attention_bias", {"attention_bias": True}), ("mlp_bias", {"mlp_bias": True}),
    ("hidden_act", {"hidden_act": "gelu"}), ("mixtures of experts", {"num_local_experts": 8}),
    ("mixture-of-experts", {"model_type": "mixtral", "architectures": ...}),
    ("use_sliding_window", {"model_type": "qwen2", "architectures": ..., "use_sliding_window": True}),
    ("rope_type 'dynamic' is not supported", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    ("rope_type 'longrope' is not supported", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}),
    ("factor", {"rope_scaling": {"type": "linear"}}), ("factor", {"rope_scaling": {"type": "linear", "factor": 0.5}}),
    ("low_freq_factor", {"rope_scaling": {**LLAMA3, "low_freq_factor": None}}),
    ("low_freq_factor", {"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}),
    ("original_max_position_embeddings", {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 0}}),
    ("partial_rotary_factor", {"partial_rotary_factor": 0.5}),
    ("architecture 'smollm3' is not supported", {"model_type": "smollm3", "architectures": ...}),
])
def test_unsupported_keys_refused_by_name(message: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_hf(llama(**changes))


def test_unused_sliding_window_of_qwen2() -> None:
    config = llama(model_type="qwen2", architectures=..., sliding_window=4096, use_sliding_window=False)
    assert ModelConfig.from_hf(config).architecture == "qwen2"


@pytest.mark.parametrize("scaling", [LLAMA3, {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 1024},
                                     {"rope_type": "linear", "factor": 4.0}, {"type": "linear", "factor": 2.5}])
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_scaled_frequencies_equal_transformers(scaling: dict[str, Any], spelling: str) -> None:
    keys = llama(head_dim=64, rope_scaling=..., rope_theta=500000.0, max_position_embeddings=131072)
    nested = scaling if spelling == "rope_scaling" else {**scaling, "rope_theta": 500000.0}
    rope = ModelConfig.from_hf({**keys, spelling: nested}).rope
    name = scaling.get("rope_type", "linear")
    theirs = LlamaConfig(**{**keys, "rope_parameters": {**scaling, "rope_type": name, "rope_theta": 500000.0}})
    expected, factor = ROPE_INIT_FUNCTIONS[name](theirs, torch.device("cpu"))
    assert factor == 1.0 and len(set(rope.factors)) == (1 if name == "linear" else len(set(rope.factors)))
    found = frequencies(RopeSpec(rope.theta, rope.rotary_dim, (), rope.factors), torch.device("cpu"))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("newer", "older", "top"), [
    ({"rope_type": "linear", "factor": 2.0}, {"type": "linear", "factor": 4.0}, {}),
    (LLAMA3, {"type": "linear", "factor": 4.0}, {"rope_theta": 7e4}),
    ({"rope_type": "linear", "factor": 2.0}, {"type": "default"}, {}), ({"rope_type": "linear", "factor": 2.0}, {}, {}),
    ({"rope_type": "dynamic"}, LLAMA3, {}),
    ({"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4},
     {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4}, {}),
])
def test_rope_scaling_replaces_rope_parameters(newer: dict[str, Any], older: dict[str, Any],
                                                      top: dict[str, Any]) -> None:
    keys = {**llama(head_dim=16), **top, "rope_parameters": newer, "rope_scaling": older}
    theirs = LlamaConfig(**json.loads(json.dumps(keys))).rope_parameters
    assert ModelConfig.from_hf(keys).rope == ModelConfig.from_hf(
        {**keys, "rope_scaling": None, "rope_parameters": theirs}).rope


@pytest.mark.parametrize(("key", "newer", "top"), [
    ("rope_theta", {"rope_theta": 5e5}, {}), ("rope_theta", {"rope_theta": 5e5}, {"rope_theta": 1e4}),
    ("mrope_section", {"mrope_section": [1, 1, 0]}, {})])
def test_contradicting_rope_objects_refused(key: str, newer: dict[str, Any], top: dict[str, Any]) -> None:
    keys = llama(**top, rope_parameters=newer, rope_scaling={"type": "linear", "factor": 4.0})
    with pytest.raises(ModelError, match=f"{key} of rope_parameters differs from that of rope_scaling"):
        ModelConfig.from_hf(keys)


# GGUF files


def as_llama_cpp_permutes(weights: np.ndarray, heads: int) -> np.ndarray:
    """What its converter does to the rows of queries and keys: the halves of a head are interleaved."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


BLOCKY = replace(LLAMA, hidden_size=64, intermediate_size=96, num_attention_heads=6, num_key_value_heads=2,
                 head_dim=16, rope=RopeConfig(1e4, 16, ()))


def permuted_file(path: Path, config: ModelConfig, kind: str) -> dict[str, np.ndarray]:
    """A file of random weights as llama.cpp's converter would write it; gives its queries and keys as it reads them
    back, in our order."""
    weights = {name: tensor.numpy() for name, tensor in random_weights(config, "float32").items()}
    tensors, type, expected = gguf_tensors(config, random_weights(config, "float32")), GGMLQuantizationType[kind], {}
    for block in range(config.num_hidden_layers):
        for part, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
            ours = f"model.layers.{block}.self_attn.{part}_proj.weight"
            tensors[f"blk.{block}.attn_{part}.weight"] = as_llama_cpp_permutes(weights[ours], heads)
            expected[ours] = quants.dequantize(quants.quantize(weights[ours], type), type)
    matrices = [name for name, array in tensors.items() if array.ndim == 2]
    write(path, metadata_of(config), {**tensors, **{name: quants.quantize(tensors[name], type) for name in matrices}},
          dict.fromkeys(matrices, type))
    return expected


@pytest.mark.parametrize("kind", ["F32", "Q4_1", "Q8_0"])
def test_interleaved_rows_reordered(tmp_path: Path, kind: str) -> None:
    """Their blocks with them: each row is as it would be had it never moved."""
    expected = permuted_file(tmp_path / "m.gguf", BLOCKY, kind)
    file = GgufFile.open(tmp_path / "m.gguf")
    assert replace(config_from_gguf(file), dtype="float32") == BLOCKY
    plain = load_gguf(file, BLOCKY, "float32")
    assert all(np.array_equal(plain[name].numpy(), rows) for name, rows in expected.items())
    if not missing():
        packed = load_packed(file, BLOCKY)
        assert all(np.array_equal(packed[name].dequantize().numpy(), rows)  # type: ignore[union-attr]
                   for name, rows in expected.items())


def test_rope_factors_round_trip(tmp_path: Path) -> None:
    rope = ModelConfig.from_hf(llama(head_dim=10, rope_scaling={**LLAMA3, "original_max_position_embeddings": 64})).rope
    assert len(set(rope.factors)) > 2
    config = replace(LLAMA, rope=rope, vocab_size=3072)
    (tmp_path / "model").mkdir()
    save_file(random_weights(config, "float32"), tmp_path / "model" / "model.safetensors")
    files = ModelFiles(tmp_path / "model", config, GenerationDefaults())
    convert(files, tiny_texts(), "scaled", tmp_path / "m.gguf", "F32")
    file = GgufFile.open(tmp_path / "m.gguf")
    assert file.tensors[ROPE_FACTORS].shape == (5,) and "llama.rope.scaling.type" not in file.metadata
    found = config_from_gguf(file)
    assert found.rope.factors == pytest.approx(rope.factors, rel=1e-7)
    weights = load_gguf(file, found)
    assert all(torch.equal(weights[name], tensor) for name, tensor in random_weights(config, "float32").items())
    convert(ModelFiles(tmp_path / "m.gguf", found, GenerationDefaults(), file), tiny_texts(), "again",
            tmp_path / "again.gguf", "F32")
    assert config_from_gguf(GgufFile.open(tmp_path / "again.gguf")) == found
    scaled = config_from_gguf(replace(file, metadata={**file.metadata, "llama.rope.scaling.factor": 2.0}))
    assert scaled.rope.factors == tuple(2 * factor for factor in found.rope.factors), "as llama.cpp has both"
    with pytest.raises(ModelError, match="cannot store this scaling"):
        convert(replace(files, config=replace(config, architecture="qwen2")), tiny_texts(), "x", tmp_path / "x.gguf",
                "F32")


def test_derived_metadata_keys_may_be_absent(tmp_path: Path) -> None:
    config = replace(LLAMA, head_dim=6, num_key_value_heads=4, rope=RopeConfig(1e4, 6, ()))
    metadata = {key: value for key, value in metadata_of(config).items()
                if not key.endswith(("key_length", "value_length", "head_count_kv", "freq_base"))}
    weights = gguf_tensors(config, random_weights(config, "float32"))
    file = GgufFile.open(write(tmp_path / "m.gguf", metadata, weights))
    assert config_from_gguf(file) == config
    with pytest.raises(ModelError, match="sliding_window 64"):
        config_from_gguf(replace(file, metadata={**file.metadata, "llama.attention.sliding_window": 64}))
    with pytest.raises(ModelError, match="mixture-of-experts"):
        config_from_gguf(replace(file, metadata={**file.metadata, "llama.expert_count": 8}))


@pytest.mark.parametrize("said", [{"rope.scaling.factor": 4.0}, {"rope.scale_linear": 4.0}, {
    "rope.scaling.type": "linear", "rope.scale_linear": 4.0}, {"rope.scaling.factor": 4.0, "rope.scale_linear": 2.0}])
def test_rope_factor_without_type_is_linear(tmp_path: Path, said: dict[str, Any]) -> None:
    """As llama.cpp reads files of before there were types."""
    file = GgufFile.open(write_model(tmp_path / "m.gguf", LLAMA, random_weights(LLAMA, "float32")))

    def factors(keys: dict[str, Any]) -> tuple[float, ...]:
        metadata = {**file.metadata, **{f"llama.{key}": value for key, value in keys.items()}}
        return config_from_gguf(replace(file, metadata=metadata)).rope.factors

    assert factors(said) == (4.0,) * 5
    assert factors({**said, "rope.scaling.type": "none"}) == () == factors({"rope.scaling.factor": 0.0})


def test_fused_projections_of_llama_refused(tmp_path: Path) -> None:
    tensors = gguf_tensors(LLAMA, random_weights(LLAMA, "float32"))
    parts = [tensors.pop(f"blk.0.attn_{part}.weight") for part in "qkv"]
    tensors["blk.0.attn_qkv.weight"] = np.concatenate(parts)
    write(tmp_path / "m.gguf", metadata_of(LLAMA), tensors)
    with pytest.raises(ModelError, match=r"blk\.0\.attn_qkv\.weight"):
        load_gguf(tmp_path / "m.gguf", LLAMA)


def test_biases_stay_float32(tmp_path: Path) -> None:
    config = SHAPES["qwen2"]
    found = load_gguf(write_model(tmp_path / "m.gguf", config, random_weights(config, "float32"), "F16"), config)
    assert found["model.layers.0.self_attn.q_proj.bias"].dtype == torch.float32


# SentencePiece


PIECES = ["▁", "a", "b", "n", "▁b", "an", "na", "▁ba", "ana", "▁ban", "▁bana", "nan", "▁▁", "é"]


def sentencepiece_metadata(seed: int) -> dict[str, Any]:
    """Pieces with scores in a random order, as converters write them: bytes and control tokens come first."""
    pieces = PIECES.copy()
    random.Random(seed).shuffle(pieces)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<|tool|>"]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces), 4]
    return {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": np.array(types), "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.scores": np.array([0.0] * 259 + [-float(i) for i in range(len(pieces) + 1)], np.float32),
            "tokenizer.ggml.eos_token_id": 2}


def merged_by_hand(text: str, tokens: list[str]) -> list[int]:
    """The best pair first, the leftmost of equals; characters that are no pieces become bytes."""
    parts, rank = list("▁" + text.replace(" ", "▁")), {piece: i for i, piece in enumerate(tokens) if i >= 259}
    while pairs := [(rank[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in rank]:
        _, place = min(pairs)
        parts[place:place + 2] = ["".join(parts[place:place + 2])]
    return [id for part in parts for id in ([rank[part]] if part in rank else [3 + byte for byte in part.encode()])]


@pytest.mark.parametrize("seed", range(6))
def test_sentencepiece_merges_by_score(seed: int) -> None:
    metadata = sentencepiece_metadata(seed)
    texts = tokenizer_from_gguf(metadata)
    tokenizer = Tokenizer(Backend.from_str(texts.tokenizer), texts.special_tokens, texts.templates)
    draw = random.Random(seed)
    for _ in range(200):
        text = "".join(draw.choice("aabbn  éñ漢\n") for _ in range(draw.randrange(1, 30)))
        ids = tokenizer.encode(text)
        assert ids == merged_by_hand(text, metadata["tokenizer.ggml.tokens"]), text
        assert tokenizer.decode(ids) == " " + text
    assert tokenizer.encode("ban", add_special=True) == [1, *tokenizer.encode("ban")]
    tool = len(metadata["tokenizer.ggml.tokens"]) - 1
    assert tokenizer.encode("a<|tool|></s>") == [*tokenizer.encode("a"), tool, 2]
    bare = tokenizer_from_gguf({**metadata, "tokenizer.ggml.add_space_prefix": False})
    tokenizer = Tokenizer(Backend.from_str(bare.tokenizer))
    assert tokenizer.decode(tokenizer.encode("b a")) == "b a"


def test_writing_sentencepiece_refused(tmp_path: Path) -> None:
    from deltic.loader.gguf.write import tokenizer_to_gguf

    texts = tokenizer_from_gguf(sentencepiece_metadata(0))
    with pytest.raises(ModelError, match="no byte-level BPE"):
        tokenizer_to_gguf(texts, replace(LLAMA, vocab_size=300), ())
