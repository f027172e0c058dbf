"""Models whose experts stay in their files."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from support import moe_shape
from torch import Tensor

from deltic.config import EngineConfig, ModelConfig
from deltic.engine.loading import load
from deltic.loader.dummy import random_weights
from deltic.runner.model_runner import ModelRunner

FEW = 2
"""Experts of a layer that `pooled_runtime` has in memory, of 11."""


def text_of(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a qwen3_5_moe."""
    experts, linear = config.experts, config.linear
    assert experts and linear
    return {
        "model_type": "qwen3_5_moe_text", "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers, "layer_types": list(config.layer_types),
        "num_attention_heads": config.num_attention_heads, "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim, "linear_num_key_heads": linear.num_key_heads,
        "linear_num_value_heads": linear.num_value_heads, "linear_key_head_dim": linear.key_head_dim,
        "linear_value_head_dim": linear.value_head_dim, "linear_conv_kernel_dim": linear.conv_kernel,
        "rms_norm_eps": config.rms_norm_eps, "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings, "num_experts": experts.count, "dtype": config.dtype,
        "num_experts_per_tok": experts.per_token, "moe_intermediate_size": experts.size,
        "shared_expert_intermediate_size": experts.shared_size, "mtp_num_hidden_layers": config.num_mtp_layers,
        "rope_parameters": {"rope_theta": config.rope.theta, "mrope_section": list(config.rope.mrope_section),
                            "partial_rotary_factor": config.rope.rotary_dim / config.head_dim}}


def saved(directory: Path, config: ModelConfig, tensors: Mapping[str, Tensor]) -> Path:
    directory.mkdir(exist_ok=True, parents=True)
    save_file(dict(tensors), directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(text_of(config)))
    return directory


def options_of(**changes: Any) -> EngineConfig:
    return EngineConfig(**{"memory": "8MiB", "max_batch": 8, "threads": 1, **changes})


@lru_cache(maxsize=1)
def _directory() -> tempfile.TemporaryDirectory[str]:
    made = tempfile.TemporaryDirectory()
    config = moe_shape()
    saved(Path(made.name), config, random_weights(config, "float32", initializer_range=0.1))
    return made


@lru_cache(maxsize=4)
def pooled_runtime(refresh: int = 1, cap: int = FEW) -> ModelRunner:
    """The same model as `moe_runtime`, with `cap` of a layer's experts in memory, and the next layer's read ahead."""
    return load(_directory().name, options_of(dtype="float32", expert_cap=cap, expert_predict=True,
                                              expert_refresh=refresh))
