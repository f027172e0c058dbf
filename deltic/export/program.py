"""What a compiled model has to offer. Without torch: a program that runs through its own runtime starts without it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from deltic.config import GenerationDefaults, ModelConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ProgramInfo:
    """What an artifact says of itself.

    config: the model's shape.
    generation: what is taken where a request leaves something open.
    sidecar: the directory with the config and the tokenizer's files; None if there is no tokenizer.
    max_context: tokens that one sequence may have.
    slot_bytes: of one state, with K/V if each slot has its own.
    token_bytes: of a token's K/V, where sequences share it by pages; else 0.
    max_batch: sequences that may run at the same time, one after another in each step; None: any number.
    """

    config: ModelConfig
    generation: GenerationDefaults
    sidecar: Path | None
    max_context: int
    slot_bytes: int
    token_bytes: int = 0
    max_batch: int | None = None


class Program(Protocol):
    """A compiled model with the sequences that it holds, each in a numbered slot. One call serves one sequence, and one
    thread calls."""

    @property
    def info(self) -> ProgramInfo:
        """What the artifact says of itself."""

    @property
    def slots(self) -> Collection[int]:
        """Those that have a sequence."""

    def reserve(self, slots: int, tokens: int) -> None:
        """Make room for so many slots and, where sequences share it, so many tokens of K/V; once, before all else."""

    def start(self, slot: int) -> None:
        """Make the slot's sequence empty: position 0, state zero, whatever it was before."""

    def copy(self, source: int, target: int) -> None:
        """Make the target's sequence a copy of the source's, whatever it was before."""

    def drop(self, slot: int) -> None:
        """Forget the slot's sequence, if it has one."""

    def position(self, slot: int) -> int:
        """Tokens of the slot's sequence."""

    def feed(self, slot: int, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Append tokens, in such chunks as the program takes. Returns the logits [V] of the last one, valid until the
        next call."""


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a shape, which `ModelConfig.from_hf` reads back as it is."""
    rope = {"rope_type": "default", "rope_theta": config.rope.theta,
            "partial_rotary_factor": config.rope.rotary_dim / config.head_dim}
    if config.rope.mrope_section:
        rope |= {"mrope_section": [*config.rope.mrope_section], "mrope_interleaved": True}
    linear = config.linear
    kinds = {} if linear is None else {
        "linear_num_key_heads": linear.num_key_heads, "linear_num_value_heads": linear.num_value_heads,
        "linear_key_head_dim": linear.key_head_dim, "linear_value_head_dim": linear.value_head_dim,
        "linear_conv_kernel_dim": linear.conv_kernel}
    experts = config.experts
    mixture = {} if experts is None else {
        "num_experts": experts.count, "num_experts_per_tok": experts.per_token, "moe_intermediate_size": experts.size,
        "shared_expert_intermediate_size": experts.shared_size, "norm_topk_prob": experts.normalised}
    return {
        "model_type": config.architecture, "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": config.num_hidden_layers,
        "layer_types": [*config.layer_types], "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads, "head_dim": config.head_dim,
        "attn_output_gate": config.attention_output_gate, "rope_parameters": rope, **kinds, **mixture,
        "rms_norm_eps": config.rms_norm_eps, "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings, "dtype": config.dtype,
        "eos_token_id": [*config.eos_token_ids], "bos_token_id": config.bos_token_id,
        "pad_token_id": config.pad_token_id, "mtp_num_hidden_layers": config.num_mtp_layers}


def generation_config(generation: GenerationDefaults) -> dict[str, Any]:
    """The generation_config.json, which `GenerationDefaults.from_hf` reads back as it is."""
    bounds = {"json_max_length": generation.json_max_length, "json_max_items": generation.json_max_items}
    return {**generation.sampling(), "eos_token_id": [*generation.eos_token_ids],
            **{name: bound for name, bound in bounds.items() if bound is not None}}
