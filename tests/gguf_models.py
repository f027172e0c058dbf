"""Writes small models as GGUF files, with gguf-py and the names and keys that llama.cpp's converter uses."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
from gguf import GGMLQuantizationType, quants
from support import moe_shape, odd_shape, qwen2_shape

from deltic.config import ExpertsConfig, LinearConfig, ModelConfig, RopeConfig
from deltic.loader.gguf.names import gguf_name

QWEN3 = ModelConfig(
    architecture="qwen3", vocab_size=101, hidden_size=24, intermediate_size=20, num_hidden_layers=3,
    layer_types=("full_attention",) * 3, num_attention_heads=4, num_key_value_heads=2, head_dim=10,
    attention_output_gate=False, rope=RopeConfig(1e6, 10, ()), linear=None, rms_norm_eps=1e-6,
    tie_word_embeddings=True, max_position_embeddings=512, dtype="float32")
# rows of every matrix are multiples of 256 weights long
BLOCKY = odd_shape(hidden_size=256, intermediate_size=512, num_attention_heads=4, head_dim=64,
                   rope=RopeConfig(1e4, 6, (1, 1, 1)), linear=LinearConfig(2, 4, 10, 64, 4))
LLAMA = replace(QWEN3, architecture="llama", qk_norm=False, rope=RopeConfig(1e4, 10, ()))
SHAPES = {"odd": odd_shape(), "tied": odd_shape(tie_word_embeddings=True), "qwen3": QWEN3, "llama": LLAMA,
          "llama, linear scaling": replace(LLAMA, rope=RopeConfig(1e4, 10, (), (4.0,) * 5), tie_word_embeddings=False),
          "qwen2": qwen2_shape(rope=RopeConfig(1e6, 14, ())),
          "equal heads": odd_shape(linear=LinearConfig(3, 3, 10, 12, 4)),
          "experts": moe_shape(),
          "qwen3, experts": replace(QWEN3, architecture="qwen3_moe", intermediate_size=0,
                                    experts=ExpertsConfig(5, 2, 12)),
          "qwen3 next": moe_shape(architecture="qwen3_next", rope=RopeConfig(1e4, 6, ())),
          "one key head": odd_shape(linear=LinearConfig(1, 5, 6, 7, 3)), "blocky": BLOCKY}
GGUF_NAMES = {"qwen3_5": "qwen35", "qwen3": "qwen3", "qwen2": "qwen2", "llama": "llama",
              "qwen3_5_moe": "qwen35moe", "qwen3_moe": "qwen3moe", "qwen3_next": "qwen3next"}


# Writing a model


def metadata_of(config):
    """What llama.cpp's converter writes about a model."""
    arch, linear, heads = GGUF_NAMES[config.architecture], config.linear, config.num_mtp_layers
    keys = {
        "block_count": config.num_hidden_layers + heads, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "rope.freq_base": config.rope.theta}
    if linear is not None:
        keys |= {
            "rope.dimension_count": config.rope.rotary_dim, "full_attention_interval": 4,
            "attention.recurrent_layers": [kind == "linear_attention" for kind in config.layer_types] + [False] * heads,
            "ssm.conv_kernel": linear.conv_kernel, "ssm.state_size": linear.key_head_dim,
            "ssm.group_count": linear.num_key_heads, "ssm.time_step_rank": linear.num_value_heads,
            "ssm.inner_size": linear.value_dim}
        if config.rope.mrope_section:
            keys["rope.dimension_sections"] = [*config.rope.mrope_section, 0]
    if config.experts is not None:
        del keys["feed_forward_length"]
        keys |= {"expert_count": config.experts.count, "expert_used_count": config.experts.per_token,
                 "expert_feed_forward_length": config.experts.size}
        if config.experts.shared_size:
            keys["expert_shared_feed_forward_length"] = config.experts.shared_size
    if config.rope.factors:
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": config.rope.factors[0]}
    if heads:
        keys["nextn_predict_layers"] = heads
    return {"general.architecture": arch, **{f"{arch}.{key}": value for key, value in keys.items()}}


def gguf_tensors(config, weights):
    """The tensors of a GGUF file of these weights, float32."""
    found = {}
    for name, tensor in weights.items():
        if config.architecture == "qwen3_next" and name.endswith((".in_proj_a.weight", ".in_proj_b.weight")):
            if name.endswith("b.weight"):
                other = weights[name.replace("in_proj_b", "in_proj_a")]
                heads = [part.unflatten(0, (config.linear.num_key_heads, -1)) for part in (tensor, other)]
                found[f"blk.{name.split('.')[2]}.ssm_ba.weight"] = np.concatenate(heads, 1).reshape(
                    -1, config.hidden_size)
            continue
        theirs, form = gguf_name(name, config.architecture, config.layer_types)
        found[theirs] = form.from_ours(tensor, config).numpy()
    return found


def add_value(writer, key, value):
    if isinstance(value, list | np.ndarray):
        return writer.add_array(key, list(value))
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    return add[type(value)](key, value)


def write(path, metadata, tensors, kinds=None):
    """Write a file; `kinds` names the type of a tensor whose bytes are given."""
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if key != "general.architecture":
            add_value(writer, key, value)
    for name, array in tensors.items():
        writer.add_tensor(name, array, raw_dtype=(kinds or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_model(path, config, weights, kind="F32"):
    """Matrices of the given type, all else float32."""
    tensors, type = gguf_tensors(config, weights), GGMLQuantizationType[kind]
    matrices = [name for name, array in tensors.items() if array.ndim == 2 and "conv1d" not in name]
    quantized = {name: quants.quantize(tensors[name], type) for name in matrices}
    return write(path, metadata_of(config), {**tensors, **quantized},
                 dict.fromkeys(matrices, type) if kind not in ("F32", "F16") else None)
