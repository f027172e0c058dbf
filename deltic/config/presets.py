"""The shapes of public models, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from deltic.config.families import LayerType
from deltic.config.model import ExpertsConfig, LinearConfig, ModelConfig, RopeConfig


def _qwen3_5(
    hidden: int, ffn: int, layers: int, heads: tuple[int, int], value_heads: int, tied: bool
) -> ModelConfig:
    pattern: tuple[LayerType, ...] = ("linear_attention",) * 3 + ("full_attention",)
    return ModelConfig(
        architecture="qwen3_5", vocab_size=248320, hidden_size=hidden, intermediate_size=ffn,
        num_hidden_layers=layers, layer_types=pattern * (layers // 4), num_attention_heads=heads[0],
        num_key_value_heads=heads[1], head_dim=256, attention_output_gate=True,
        rope=RopeConfig(1e7, 64, (11, 11, 10)), linear=LinearConfig(16, value_heads, 128, 128, 4),
        rms_norm_eps=1e-6, tie_word_embeddings=tied, max_position_embeddings=262144, dtype="bfloat16",
        eos_token_ids=(248046, 248044), num_mtp_layers=1)


def _qwen3(hidden: int, ffn: int, layers: int, heads: tuple[int, int], tied: bool) -> ModelConfig:
    pattern: tuple[LayerType, ...] = ("full_attention",)
    return ModelConfig(
        architecture="qwen3", vocab_size=151936, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers,
        layer_types=pattern * layers, num_attention_heads=heads[0], num_key_value_heads=heads[1],
        head_dim=128, attention_output_gate=False, rope=RopeConfig(1e6, 128, ()), linear=None, rms_norm_eps=1e-6,
        tie_word_embeddings=tied, max_position_embeddings=40960, dtype="bfloat16", eos_token_ids=(151645, 151643))


def _with_experts(dense: ModelConfig, experts: ExpertsConfig) -> ModelConfig:
    return replace(dense, architecture=dense.architecture + "_moe", intermediate_size=0, experts=experts)


PRESETS: Final[Mapping[str, ModelConfig]] = {
    "qwen3.5-0.8b": _qwen3_5(1024, 3584, 24, (8, 2), 16, tied=True),
    "qwen3.5-2b": _qwen3_5(2048, 6144, 24, (8, 2), 16, tied=True),
    "qwen3.5-4b": _qwen3_5(2560, 9216, 32, (16, 4), 32, tied=True),
    "qwen3.5-9b": _qwen3_5(4096, 12288, 32, (16, 4), 32, tied=False),
    "qwen3.5-27b": _qwen3_5(5120, 17408, 64, (24, 4), 48, tied=False),
    "qwen3.5-35b-a3b": _with_experts(_qwen3_5(2048, 0, 40, (16, 2), 32, tied=False), ExpertsConfig(256, 8, 512, 512)),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, (16, 8), tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, (32, 8), tied=False),
    "qwen3-30b-a3b": _with_experts(_qwen3(2048, 0, 48, (32, 4), tied=False), ExpertsConfig(128, 8, 768)),
}
