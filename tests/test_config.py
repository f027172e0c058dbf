"""Configs: what transformers writes is read alike; what cannot run is refused by name."""

import json
import math
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import examples
from transformers import Qwen3_5Config, Qwen3_5TextConfig, Qwen3Config
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from deltic.config import (
    PRESETS,
    EngineConfig,
    ExpertsConfig,
    GenerationDefaults,
    ModelConfig,
    architecture,
    available_cores,
    available_memory,
    parse_bytes,
)
from deltic.errors import ConfigError, ModelError
from deltic.loader.names import expected_tensors

ODD = {"vocab_size": 97, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 5, "num_attention_heads": 6,
           "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
           "linear_key_head_dim": 8, "linear_value_head_dim": 4, "linear_conv_kernel_dim": 3,
           "max_position_embeddings": 777, "rms_norm_eps": 1e-5, "eos_token_id": [5, 7], "bos_token_id": 1,
           "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}}


def plain(**changes):
    """A flat config as a dictionary, with keys replaced, or removed where the value is `...`."""
    layers = ["linear_attention"] * 3 + ["full_attention", "linear_attention"]
    mapping = {"model_type": "qwen3_5_text", "attn_output_gate": True, **ODD, "layer_types": layers, **changes}
    return {key: value for key, value in mapping.items() if value is not ...}


def qwen3(**changes):
    """A flat Qwen3 config as older versions of transformers wrote it, keys replaced or removed likewise."""
    mapping = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 97, "hidden_size": 24,
        "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
        "head_dim": 14, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "rope_scaling": None, "attention_bias": False,
        "attention_dropout": 0.0, "hidden_act": "silu", "max_position_embeddings": 40960, "max_window_layers": 3,
        "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "bos_token_id": 1, "eos_token_id": 5, **changes}
    return {key: value for key, value in mapping.items() if value is not ...}


def saved(config, path):
    config.save_pretrained(path)
    return json.loads((path / "config.json").read_text())


def assert_same(ours, theirs):
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                 "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "bos_token_id"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.layer_types == tuple(theirs.layer_types)
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.rope.rotary_dim == int(theirs.head_dim * theirs.rope_parameters["partial_rotary_factor"])
    linear = ours.linear
    for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"):
        assert getattr(linear, name) == getattr(theirs, f"linear_{name}"), name
    assert linear.conv_kernel == theirs.linear_conv_kernel_dim


@pytest.mark.parametrize("keys", [ODD, {**ODD, "num_hidden_layers": 9}, {}], ids=["odd", "nine", "defaults"])
def test_flat_config_reads_as_transformers_wrote_it(tmp_path, keys):
    theirs = Qwen3_5TextConfig(**keys)
    ours = ModelConfig.from_hf(saved(theirs, tmp_path))
    assert_same(ours, theirs)
    assert ours.tie_word_embeddings is theirs.tie_word_embeddings


@pytest.mark.parametrize("tied", [True, False])
def test_nested_config_reads_its_text_part(tmp_path, tied):
    theirs = Qwen3_5Config(text_config={**ODD, "tie_word_embeddings": not tied}, tie_word_embeddings=tied)
    ours = ModelConfig.from_hf(saved(theirs, tmp_path))
    assert_same(ours, theirs.text_config)
    assert ours.tie_word_embeddings is tied
    assert ours.eos_token_ids == (5, 7)


def test_derived_values():
    config = ModelConfig.from_hf(plain())
    assert config.attention_layers == (3,)
    assert config.linear_layers == (0, 1, 2, 4)
    assert (config.key_dim, config.value_dim, config.conv_dim) == (16, 24, 56)
    assert config.dtype == "float32"


@pytest.mark.parametrize("config", [*PRESETS.values(), ModelConfig.from_hf(plain()),
                                    ModelConfig.from_hf(plain(attn_output_gate=False)),
                                    ModelConfig.from_hf(qwen3()),
                                    ModelConfig.from_hf(qwen3(tie_word_embeddings=False))])
def test_parameter_count_is_the_sum_of_the_tensors(config):
    assert config.parameter_count == sum(math.prod(shape) for shape in expected_tensors(config).values())


def test_presets_have_the_published_sizes():
    billions = {name: round(config.parameter_count / 1e9, 1) for name, config in PRESETS.items()}
    assert billions == {"qwen3.5-0.8b": 0.8, "qwen3.5-2b": 1.9, "qwen3.5-4b": 4.2, "qwen3.5-9b": 9.0,
                        "qwen3.5-27b": 26.9, "qwen3.5-35b-a3b": 34.7, "qwen3.5-122b-a10b": 122.1,
                        "qwen3.5-397b-a17b": 396.3, "qwen3-0.6b": 0.6, "qwen3-8b": 8.2, "qwen3-next-80b-a3b": 79.7,
                        "qwen3-30b-a3b": 30.5}
    active = {name: round(config.active_parameter_count / 1e9, 1) for name, config in PRESETS.items() if config.experts}
    assert active == {"qwen3.5-35b-a3b": 3.5, "qwen3.5-122b-a10b": 9.8, "qwen3.5-397b-a17b": 17.3,
                      "qwen3-next-80b-a3b": 3.9, "qwen3-30b-a3b": 3.4}
    assert ModelConfig.preset("Qwen/Qwen3.5-0.8B") == ModelConfig.preset("0.8b") == PRESETS["qwen3.5-0.8b"]
    assert ModelConfig.preset("qwen3.5:0.8b") == PRESETS["qwen3.5-0.8b"]
    cut = ModelConfig.preset("4b", layers=5)
    assert cut.layer_types == PRESETS["qwen3.5-4b"].layer_types[:5]
    for name, layers in (("3b", None), ("4b", 0), ("4b", 33)):
        with pytest.raises(ModelError, match="preset"):
            ModelConfig.preset(name, layers)


@pytest.mark.parametrize("name", [
    "qwen35", "qwen3_5", "qwen3.5", "Qwen3-5", "qwen36", "qwen3_6", "qwen3.6", "qwen3_8", "qwen38", "qwen3_5_text",
    "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3_5TextModel"])
def test_every_spelling_of_the_architecture_is_known_at_every_site(name):
    assert architecture(name) == "qwen3_5"
    expected = ModelConfig.from_hf(plain())
    assert ModelConfig.from_hf(plain(model_type=name)) == expected
    assert ModelConfig.from_hf(plain(model_type=..., architectures=[name])) == expected
    text = plain(model_type=name)
    assert ModelConfig.from_hf({"model_type": "qwen3_5", "text_config": text}) == expected


@pytest.mark.parametrize("name", ["qwen3", "Qwen3ForCausalLM", "Qwen3Model"])
def test_every_spelling_of_qwen3_is_known(name):
    assert architecture(name) == "qwen3"
    expected = ModelConfig.from_hf(qwen3())
    assert ModelConfig.from_hf(qwen3(model_type=name)) == expected
    assert ModelConfig.from_hf(qwen3(model_type=..., architectures=[name])) == expected


@pytest.mark.parametrize("tied", [True, False])
def test_qwen3_reads_as_transformers_wrote_it(tmp_path, tied):
    keys = qwen3(tie_word_embeddings=tied, model_type=..., architectures=..., rope_theta=..., rope_scaling=...,
                 torch_dtype=..., rope_parameters={"rope_type": "default", "rope_theta": 1e6}, dtype="bfloat16")
    newer = ModelConfig.from_hf(saved(Qwen3Config(**keys), tmp_path))
    older = ModelConfig.from_hf(qwen3(tie_word_embeddings=tied))
    assert newer == older
    assert (older.architecture, older.linear, older.attention_output_gate) == ("qwen3", None, False)
    assert (older.layer_types, older.linear_layers) == (("full_attention",) * 3, ())
    assert (older.rope.theta, older.rope.rotary_dim, older.rope.mrope_section) == (1e6, 14, ())
    assert (older.norm_offset, older.tie_word_embeddings, older.dtype) == (0.0, tied, "bfloat16")


def test_qwen3_presets_are_the_published_configs():
    shared = {"vocab_size": 151936, "head_dim": 128, "eos_token_id": [151645, 151643], "bos_token_id": ...}
    small = qwen3(**shared, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
                  num_key_value_heads=8)
    large = qwen3(**shared, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
                  num_key_value_heads=8, tie_word_embeddings=False)
    assert ModelConfig.preset("Qwen/Qwen3-0.6B") == ModelConfig.from_hf(small)
    assert ModelConfig.preset("qwen3-8b") == ModelConfig.from_hf(large)
    assert ModelConfig.preset("qwen3-8b", layers=2).layer_types == ("full_attention",) * 2


@pytest.mark.parametrize("key,change", [
    ("attention_bias", {"attention_bias": True}), ("use_sliding_window", {"use_sliding_window": True}),
    ("rope_type 'dynamic'", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    ("rope_type 'longrope'", {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "longrope"}}),
    ("rope_type 'linear'", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("rope_type 'mrope'", {"rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 3]}}),
    ("partial_rotary_factor", {"partial_rotary_factor": 0.5}), ("rope_theta", {"rope_theta": ...}),
    ("layer_types", {"layer_types": ["full_attention", "full_attention", "sliding_attention"]}),
    ("layer_types", {"layer_types": ["full_attention", "full_attention", "linear_attention"]}),
    ("head_dim", {"head_dim": ...}), ("several architectures", {"model_type": "qwen3_5"}),
])
def test_unsupported_qwen3_keys_refused_by_name(key, change):
    with pytest.raises(ModelError, match=key):
        ModelConfig.from_hf(qwen3(**change))


def test_unknown_architectures_refused():
    with pytest.raises(ModelError, match="architecture 'gpt2'"):
        replace(PRESETS["qwen3-0.6b"], architecture="gpt2")


EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "intermediate_size": ...}


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3moe", "Qwen3MoeForCausalLM"])
def test_qwen3_mixtures_of_experts(name):
    assert architecture(name) == "qwen3_moe"
    for spelling in ({"model_type": name, "architectures": ...}, {"architectures": [name], "model_type": ...}):
        config = ModelConfig.from_hf(qwen3(**EXPERTS, **spelling))
        assert (config.architecture, config.intermediate_size) == ("qwen3_moe", 0)
        assert config.experts == ExpertsConfig(6, 2, 12, 0, normalised=False)
    mixture = {**EXPERTS, "model_type": name, "architectures": ...}
    assert ModelConfig.from_hf(qwen3(**mixture, norm_topk_prob=True)).experts.normalised
    assert not ModelConfig.from_hf(qwen3(**mixture, norm_topk_prob=None)).experts.normalised
    assert ModelConfig.from_hf(qwen3(**{**mixture, "num_experts": ...}, num_local_experts=6)).experts.count == 6


@pytest.mark.parametrize("name", ["qwen35moe", "qwen3_5_moe", "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM",
                                  "Qwen3_6MoeForConditionalGeneration"])
def test_mixtures_of_experts(name):
    assert architecture(name) == "qwen3_5_moe"
    text = plain(**EXPERTS, model_type=name, shared_expert_intermediate_size=14)
    for mapping in (text, {"model_type": name, "text_config": text}):
        config = ModelConfig.from_hf(mapping)
        assert config.experts == ExpertsConfig(6, 2, 12, 14) and config.norm_offset == 1
        shapes = expected_tensors(config)
        assert shapes["model.layers.0.mlp.experts.down_proj.weight"] == (6, 24, 12)
        assert config.parameter_count == sum(math.prod(shape) for shape in shapes.values())
        idle = 4 * 3 * 12 * 24 * config.num_hidden_layers
        assert config.active_parameter_count == config.parameter_count - idle


@pytest.mark.parametrize("said", [None, False, True])
def test_qwen3_5_router_ignores_norm_topk_prob(said):
    """As in transformers, where every token's shares of experts add up to 1."""
    text = plain(**EXPERTS, model_type="qwen3_5_moe", shared_expert_intermediate_size=14, norm_topk_prob=said)
    assert ModelConfig.from_hf(text).experts == ExpertsConfig(6, 2, 12, 14, normalised=True)


@pytest.mark.parametrize(("change", "message"), [
    ({"num_experts_per_tok": 7}, r"num_experts_per_tok \(7\) must be between 1 and num_experts \(6\)"),
    ({"num_experts": ...}, "num_experts"), ({"num_experts": 0}, "num_experts"), ({"num_experts": "6"}, "num_experts"),
    ({"num_experts_per_tok": ...}, "num_experts_per_tok"), ({"moe_intermediate_size": ...}, "moe_intermediate_size"),
    ({"shared_expert_intermediate_size": ...}, "shared_expert_intermediate_size"), ({"norm_topk_prob": 1}, "norm_topk"),
    ({"mlp_only_layers": [1]}, "mlp_only_layers"), ({"decoder_sparse_step": 2}, "decoder_sparse_step"),
    ({"model_type": "qwen3_5"}, "qwen3_5 is a dense model"), ({"model_type": "qwen2_moe"}, "not supported, only qwen3"),
])
def test_invalid_expert_counts_refused(change, message):
    whole = {**EXPERTS, "model_type": "qwen3_5_moe", "shared_expert_intermediate_size": 14, "intermediate_size": 40}
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_hf(plain(**{**whole, **change}))


@pytest.mark.parametrize("name", ["gemma3", "qwen4_next", "qwen4exp", "", "LlamaForSequenceClassification", "qwen3_vl",
                                  "Qwen3ForSequenceClassification"])
def test_other_families_refused(name):
    for mapping in (plain(model_type=name), plain(architectures=[name])):
        with pytest.raises(ModelError, match="architecture"):
            ModelConfig.from_hf(mapping)


def test_layer_types_follow_the_interval_when_absent():
    config = ModelConfig.from_hf(plain(layer_types=..., full_attention_interval=2))
    assert config.attention_layers == (1, 3)
    assert ModelConfig.from_hf(plain(layer_types=...)).attention_layers == (3,)


@pytest.mark.parametrize("rope", [
    {"rope_parameters": ..., "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    {"rope_parameters": ..., "rope_theta": 5e5, "partial_rotary_factor": 0.5, "rope_scaling": None},
    {"rope_parameters": ..., "rope_theta": 5e5, "partial_rotary_factor": 0.5, "rope_scaling": {"type": "default"}},
    {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "partial_rotary_factor": 0.5},
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}, "rope_scaling": ODD["rope_parameters"]},
    {"rope_scaling": {}},
])
def test_older_rope_keys(rope):
    assert ModelConfig.from_hf(plain(**rope)) == ModelConfig.from_hf(plain())


@pytest.mark.parametrize("dim,factor,section", [(256, 0.25, [11, 11, 10]), (16, 0.5, [11, 11, 10]),
                                                (64, 0.5, [4, 6, 6]), (64, 0.5, [6, 3, 2])])
def test_mrope_sections_as_in_transformers(dim, factor, section):
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": factor, "mrope_section": section}
    theirs = Qwen3_5TextConfig(**{**ODD, "head_dim": dim, "rope_parameters": rope})
    frequencies = int(dim * factor) // 2
    axes = torch.arange(3.0)[:, None, None, None].expand(3, 1, 1, frequencies).clone()
    chosen = Qwen3_5TextRotaryEmbedding(theirs).recomposition_frequencies(axes)[..., :frequencies]
    expected = tuple(int((chosen == axis).sum()) for axis in range(3))
    assert ModelConfig.from_hf(theirs.to_dict()).rope.mrope_section == expected


@pytest.mark.parametrize("keys,dtype", [
    ({"dtype": "bfloat16"}, "bfloat16"), ({"torch_dtype": "float16"}, "float16"),
    ({"dtype": "torch.bfloat16"}, "bfloat16"), ({"dtype": None, "torch_dtype": "fp16"}, "float16")])
def test_dtype(keys, dtype):
    assert ModelConfig.from_hf(plain(**keys)).dtype == dtype
    assert ModelConfig.from_hf({"model_type": "qwen3_5", **keys, "text_config": plain()}).dtype == dtype


def test_null_text_keys_fall_back_to_outer_config():
    nested = plain(dtype=None, eos_token_id=None, pad_token_id=3)
    found = ModelConfig.from_hf({"model_type": "qwen3_5", "dtype": "float16", "eos_token_id": [7, 8], "pad_token_id": 9,
                                 "text_config": nested})
    assert (found.dtype, found.eos_token_ids, found.pad_token_id) == ("float16", (7, 8), 3)


@pytest.mark.parametrize("key,value", [
    ("attention_bias", True), ("hidden_act", "gelu"), ("quantization_config", {"quant_method": "hqq"}),
    ("rope_type", {"rope_type": "linear", "rope_theta": 1e4}), ("rope_type", {"type": ["x"], "rope_theta": 1e4}),
    ("rope_theta", {"rope_type": "default"}), ("rope_theta", {"rope_theta": math.nan}),
    ("rope_parameters", [1]), ("rope_parameters that differs", {"full_attention": {"rope_theta": 1e4}}),
    ("mrope_interleaved", {"rope_theta": 1e4, "mrope_interleaved": False}),
    ("mrope_section", {"rope_theta": 1e4, "mrope_section": [1, 2]}),
    ("mrope_section", {"rope_theta": 1e4, "mrope_section": [1, 2, -3]}),
    ("mrope_section", {"rope_theta": 1e4, "mrope_section": "abc"}),
    ("partial_rotary_factor", {"rope_theta": 1e4, "partial_rotary_factor": 0.2}),
    ("partial_rotary_factor", {"rope_theta": 1e4, "partial_rotary_factor": 2}),
    ("linear_num_value_heads", 5), ("num_key_value_heads", 4), ("num_hidden_layers", 4),
    ("layer_types", ["linear_attention"] * 4), ("layer_types", ["mamba"] * 5), ("layer_types", "linear_attention"),
    ("layer_types", [{}] * 5), ("hidden_size", ...), ("hidden_size", None), ("hidden_size", "24"),
    ("hidden_size", 24.0), ("hidden_size", True), ("hidden_size", -24), ("hidden_size", 0), ("hidden_size", 1 << 40),
    pytest.param("hidden_size", 10**5000, id="huge"),
    ("vocab_size", 1), ("vocab_size", [97]), ("num_hidden_layers", 10**9),
    ("linear_conv_kernel_dim", 1), ("linear_key_head_dim", ...), ("rms_norm_eps", 0), ("rms_norm_eps", math.inf),
    ("rms_norm_eps", "1e-6"), ("tie_word_embeddings", "yes"), ("attn_output_gate", 1), ("dtype", "float8_e4m3fn"),
    ("dtype", {}), ("dtype", {"a": 1}), ("eos_token_id", -1), ("eos_token_id", ["x"]), ("eos_token_id", True),
    ("model_type", ...), ("architectures", "Qwen3_5ForCausalLM"), ("text_config", [1]), ("mlp_only_layers", [1]),
    ("max_position_embeddings", 0), ("head_dim", 15), ("architectures", [1]),
])
def test_unsupported_keys_refused_by_name(key, value):
    rope_keys = ("rope_type", "rope_theta", "mrope_interleaved", "mrope_section", "partial_rotary_factor")
    changes = {"rope_parameters" if key in rope_keys or key.startswith("rope_parameters") else key: value}
    if key == "dtype" and value == {}:
        assert ModelConfig.from_hf(plain(**changes)).dtype == "float32"
        return
    named = "partial_rotary_factor" if key == "head_dim" else "architecture" if key == "architectures" else key
    with pytest.raises(ModelError, match=named) as caught:
        ModelConfig.from_hf(plain(**changes))
    assert len(str(caught.value)) < 300


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3), max_leaves=5)


@settings(deadline=None, max_examples=examples(100))
@given(changes=st.dictionaries(st.sampled_from(sorted({*plain(), "rope_scaling", "text_config", "torch_dtype",
                                                       "architectures", "full_attention_interval"})),
                               json_values, max_size=3))
def test_any_json_value_is_read_or_refused(changes):
    try:
        config = ModelConfig.from_hf(plain(**changes))
    except ModelError:
        return
    assert config.parameter_count > 0


def test_generation_defaults():
    full = GenerationDefaults.from_hf(
        {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05,
             "eos_token_id": [9, 8], "transformers_version": "5"}, eos_token_ids=(8, 7)).with_eos([7, 6])
    assert full.eos_token_ids == (9, 8, 7, 6)
    assert full.sampling() == {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05}
    assert GenerationDefaults.from_hf({"eos_token_id": 3}).eos_token_ids == (3,)
    assert GenerationDefaults.from_hf({"temperature": None}) == GenerationDefaults()
    assert GenerationDefaults.from_hf({"do_sample": False, "temperature": 0.7}).temperature == 0.0


@pytest.mark.parametrize("key,value", [("temperature", -1), ("temperature", "hot"), ("top_k", 1.5), ("top_p", 1.1),
                                       ("min_p", math.nan), ("repetition_penalty", 0), ("eos_token_id", "x"),
                                       ("do_sample", 1)])
def test_generation_values_out_of_range_are_refused(key, value):
    with pytest.raises(ModelError, match=key):
        GenerationDefaults.from_hf({key: value})


def test_engine_options_document_themselves():
    for option in fields(EngineConfig):
        assert option.metadata["help"], option.name
    assert EngineConfig().memory_bytes is None
    assert EngineConfig(memory="1.5GiB").memory_bytes == 3 << 29
    assert EngineConfig(host_memory="1GiB").host_memory_bytes == 1 << 30
    assert EngineConfig(host_memory="0").host_memory_bytes == 0 and EngineConfig().host_memory_bytes is None
    with pytest.raises(ConfigError, match="host_memory must be a size"):
        EngineConfig(host_memory="none")
    assert EngineConfig(threads=3).threads_for(1) == EngineConfig(threads=3).threads_for(10**9) == 3
    assert EngineConfig().threads_for(1_000_000) == 1
    assert EngineConfig().threads_for(10**9) == available_cores()
    assert EngineConfig(ops=["rope=reference", "mlp=torch"]).ops == ("rope=reference", "mlp=torch")


@pytest.mark.parametrize("option,value", [
    ("device", "tpu"), ("device", "cuda:x"), ("device", None), ("dtype", "int8"), ("threads", 0), ("threads", 2.0),
    ("threads", 5000), ("memory", "lots"), ("memory", "0"), ("memory", 4), ("memory", "9" * 18 + "TiB"),
    ("max_context", 0), ("max_batch", 0), ("max_batch", None), ("max_batch", True), ("token_budget", 0),
    ("max_stall_ms", 0), ("max_stall_ms", 1.5),
    ("token_budget", 1 << 30), pytest.param("max_context", 10**5000, id="huge"),
    ("ops", "mlp=reference"), ("ops", ("mlp=",)),
    ("ops", ("mlp=reference", "mlp=torch")), ("ops", (3,)), ("ops", 5), ("ops", None), ("ops", {"mlp": "reference"}),
    ("debug_layers", "yes"), ("vision", "no"), ("allow_image_urls", 1), ("dtype", torch.float32), ("quant", []),
    ("speculate", None), ("mmproj", b"x")])
def test_engine_option_out_of_range_is_refused_by_name(option, value):
    with pytest.raises(ConfigError, match=option) as caught:
        EngineConfig(**{option: value})
    assert caught.value.option == option


@pytest.mark.parametrize("options,missing", [
    ({"expert_refresh": 5}, {"expert_memory": "1GiB"}), ({"expert_predict": True}, {"expert_cap": 2}),
    ({"expert_profile": "p"}, {"expert_memory": "auto"}), ({"expert_reserve": "2GiB"}, {"expert_memory": "auto"}),
    ({"expert_reserve": "2GiB", "expert_memory": "1GiB"}, {"expert_memory": "auto"}),
    ({"cache_disk_gb": 1.0}, {"cache_dir": "c"}), ({"aot_dir": "a"}, {"quant": "q8_0"})], ids=str)
def test_dependent_options_require_their_option(options, missing):
    with pytest.raises(ConfigError, match=r"give \S+, or leave it out$") as caught:
        EngineConfig(**options)
    assert caught.value.option == next(iter(options))
    EngineConfig(**{**options, **missing})


def test_dependent_options_at_defaults_need_nothing():
    default = EngineConfig()
    names = [option.name for option in fields(EngineConfig)]
    assert EngineConfig(**{name: getattr(default, name) for name in names if name != "token_budget"}) == default


def test_options_that_name_files_may_be_paths():
    for name in ("cache_dir", "aot_dir", "mmproj", "expert_profile", "params"):
        options = {name: Path("/some/where"), "expert_memory": "1GiB", "quant": "q8_0"}
        assert getattr(EngineConfig(**options), name) == "/some/where"


@pytest.mark.parametrize("text,size", [("4GiB", 4 << 30), ("512M", 512 << 20), ("1.5g", 3 << 29), ("10", 10),
                                       (" 7 kB ", 7 << 10), ("2TiB", 2 << 40)])
def test_parse_bytes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1G", "1e9", "4 GiBs", "1.2.3G", "nan", "0"])
def test_parse_bytes_refuses(text):
    with pytest.raises(ConfigError, match="budget"):
        parse_bytes(text, "budget")


def fake_root(path, **contents):
    """A root file system; keys are paths with `__` for `/` and `_` kept."""
    for key, text in contents.items():
        file = path / key.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return path


@pytest.fixture
def eight_threads(monkeypatch, tmp_path):
    """Eight hardware threads on four cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    for cpu in range(8):
        topology = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "core_id").write_text(f"{cpu % 4}\n")
        (topology / "physical_package_id").write_text("0\n")
    return tmp_path


@pytest.mark.parametrize("contents,cores", [
    ({}, 4),
    ({"proc__self__cgroup": "0::/\n", "sys__fs__cgroup__cpu.max": "max 100000\n"}, 4),
    ({"proc__self__cgroup": "0::/\n", "sys__fs__cgroup__cpu.max": "250000 100000\n"}, 2),
    ({"proc__self__cgroup": "0::/a/b\n", "sys__fs__cgroup__a__cpu.max": "150000 100000\n",
      "sys__fs__cgroup__a__b__cpu.max": "300000 100000\n"}, 1),
    ({"proc__self__cgroup": "0::/\n", "sys__fs__cgroup__cpu.max": "50000 100000\n"}, 1),
    ({"proc__self__cgroup": "4:cpu,cpuacct:/docker/x\n", "sys__fs__cgroup__cpu__cpu.cfs_quota_us": "300000\n",
      "sys__fs__cgroup__cpu__cpu.cfs_period_us": "100000\n"}, 3),
    ({"proc__self__cgroup": "4:cpu,cpuacct:/\n", "sys__fs__cgroup__cpu__cpu.cfs_quota_us": "-1\n",
      "sys__fs__cgroup__cpu__cpu.cfs_period_us": "100000\n"}, 4),
])
def test_available_cores(eight_threads, contents, cores):
    assert available_cores(fake_root(eight_threads, **contents)) == cores


def test_threads_without_topology_count_as_cores(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 5, 6}, raising=False)
    assert available_cores(tmp_path) == 3


MEMINFO = "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n"


@pytest.mark.parametrize("contents,kilobytes", [
    ({}, 8000),
    ({"proc__self__cgroup": "0::/\n", "sys__fs__cgroup__memory.max": "max\n"}, 8000),
    ({"proc__self__cgroup": "0::/\n", "sys__fs__cgroup__memory.max": str(5000 << 10),
      "sys__fs__cgroup__memory.current": str(3000 << 10),
      "sys__fs__cgroup__memory.stat": f"anon 1\ninactive_file {1000 << 10}\n"}, 3000),
    ({"proc__self__cgroup": "0::/a\n", "sys__fs__cgroup__memory.max": str(2000 << 10),
      "sys__fs__cgroup__a__memory.max": str(5000 << 10)}, 2000),
    ({"proc__self__cgroup": "9:memory:/a\n", "sys__fs__cgroup__memory__a__memory.limit_in_bytes": str(4000 << 10),
      "sys__fs__cgroup__memory__a__memory.usage_in_bytes": str(1000 << 10),
      "sys__fs__cgroup__memory__memory.limit_in_bytes": str(1 << 63)}, 3000),
    ({"proc__self__cgroup": "0::/\n", "sys__fs__cgroup__memory.max": "1000",
      "sys__fs__cgroup__memory.current": "2000"}, 0),
])
def test_available_memory(tmp_path, contents, kilobytes):
    root = fake_root(tmp_path, proc__meminfo=MEMINFO, **contents)
    assert available_memory(root) == kilobytes << 10


def test_this_machine_has_cores_and_memory(tmp_path):
    assert available_cores() >= 1
    assert available_memory() > 1 << 20
    assert available_memory(tmp_path) > 1 << 20


def test_config_does_not_import_torch():
    code = "import sys, deltic.config; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])
