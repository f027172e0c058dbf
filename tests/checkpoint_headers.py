"""Checkpoints of true shapes that consist of headers alone: names, shapes and dtypes as published tools write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from deltic.config import ModelConfig
from deltic.loader.names import expected_head, expected_tensors, is_stack
from deltic.loader.tensors import ITEM_BYTES

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Name -> dtype and shape."""
Stored = Callable[[str], str]
"""Returns the form of a matrix: BF16, FP8 or NVFP4."""

DENSE: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 5120, "intermediate_size": 17408,
        "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
        "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144, "eos_token_id": 248046, "mtp_num_hidden_layers": 1, "dtype": "bfloat16",
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}}}
"""config.json of a 27B."""
SMALL: dict[str, Any] = {**DENSE, "text_config": {
    **DENSE["text_config"], "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.5, "mrope_section": [6, 5, 5]}}}
MIXTURE: dict[str, Any] = {**SMALL, "architectures": ["Qwen3_5MoeForConditionalGeneration"],
                           "model_type": "qwen3_5_moe", "text_config": {
    **SMALL["text_config"], "model_type": "qwen3_5_moe_text", "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}}
del MIXTURE["text_config"]["intermediate_size"]
MODELOPT = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
BLOCK_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
PREFIX = "model.language_model."


def tensors_of(mapping: Mapping[str, Any], stored: Stored, head: bool = True) -> Tensors:
    """The tensors of a text model and its draft head. stored: called with the canonical name of each matrix."""
    config = ModelConfig.from_hf({key: value for key, value in mapping.items() if key != "quantization_config"})
    shapes = {**expected_tensors(config), **(expected_head(config) if head else {})}
    found: Tensors = {}
    for name, shape in shapes.items():
        is_matrix = (len(shape) == 2 and name.endswith("_proj.weight")) or ".in_proj_" in name
        own = name if name.startswith(("mtp.", "lm_head.")) else name.replace("model.", PREFIX, 1)
        form = stored(name) if is_matrix or name == "lm_head.weight" else "BF16"
        if is_stack(name):
            for expert in range(shape[0]):
                found |= _forms(own.replace(".experts.", f".experts.{expert}."), shape[1:], stored(name))
        else:
            found |= _forms(own, shape, form)
    return found


def _forms(name: str, shape: tuple[int, ...], form: str) -> Tensors:
    if form == "BF16":
        return {name: (form, shape)}
    module, (rows, columns) = name.removesuffix(".weight"), shape
    if form == "FP8":
        blocks = (-(-rows // 128), -(-columns // 128))
        return {name: ("F8_E4M3", shape), f"{module}.weight_scale_inv": ("F32", blocks)}
    assert form == "NVFP4"
    return {name: ("U8", (rows, columns // 2)), f"{module}.weight_scale": ("F8_E4M3", (rows, columns // 16)),
            f"{module}.weight_scale_2": ("F32", ()), f"{module}.input_scale": ("F32", ())}


def header_of(tensors: Tensors) -> tuple[bytes, int]:
    """A safetensors file up to its data, and the bytes of the data."""
    entries, end = dict[str, Any](), 0
    for name, (dtype, shape) in tensors.items():
        size = ITEM_BYTES[dtype] * prod(shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end


def files_of(mapping: Mapping[str, Any], tensors: Tensors, shards: int = 1) -> tuple[dict[str, bytes], dict[str, int]]:
    """The files of a checkpoint, and how many bytes of data would follow in each."""
    names = [*tensors]
    files, data = dict[str, bytes](), dict[str, int]()
    files["config.json"] = json.dumps(mapping).encode()
    files["tokenizer.json"] = b"{}"
    files["chat_template.jinja"] = b"{{ messages }}"
    weight_map = {}
    for shard in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        own = names[shard * len(names) // shards:(shard + 1) * len(names) // shards]
        files[file], data[file] = header_of({name: tensors[name] for name in own})
        weight_map |= dict.fromkeys(own, file)
    if shards > 1:
        files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    return files, data
