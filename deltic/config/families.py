"""Architectures that deltic runs, and their properties that a config.json does not state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from deltic.config.aliases import ARCHITECTURES, find
from deltic.errors import ModelError, show

LayerType = Literal["linear_attention", "full_attention"]


def architecture(name: str) -> str:
    """Returns the canonical architecture of a model type, class name or GGUF architecture.

    Raises ModelError for an unknown family.
    """
    found = find(ARCHITECTURES, name)
    if found is None:
        raise ModelError(f"architecture {show(name)} is not supported: deltic runs the Qwen3.5 family "
                         "(model_type qwen3_5, qwen3_5_text, qwen3_5_moe, qwen3_6, qwen3_8 or a Qwen3_5For... class), "
                         "Qwen3 with and without experts (qwen3, qwen3_moe), and dense Qwen2, Llama and Mistral "
                         "(qwen2, llama, mistral or a ...ForCausalLM class)")
    return found


@dataclass(frozen=True, slots=True)
class Family:
    """Properties of an architecture that its config.json does not state.

    mixers: allowed kinds of layers.
    interval: every interval-th layer has full attention.
    gate: attention has an output gate.
    rotary: rotated share of a head.
    mrope: positions have three axes; else RopeConfig has no sections.
    norm_offset: added to the norm weights of a checkpoint to get the factor (not to the norm inside Gated DeltaNet
        layers, whose weight is the factor in every family).
    rope_types: supported scalings of the rotary frequencies.
    qk_norm: queries and keys are normalised per head.
    qkv_bias: the projections of queries, keys and values have biases.
    sparse: configs may omit head_dim and num_key_value_heads (derived from other sizes) and a rope_theta of 10000.
    window: a sliding_window is in effect unless it is null.
    experts: feed-forward layers are mixtures of experts.
    shared: with one expert that every token passes.
    normalised: the weights of a token's experts always add up to 1; else only with norm_topk_prob.
    """

    mixers: tuple[LayerType, ...]
    interval: int
    gate: bool
    rotary: float
    mrope: bool
    norm_offset: float
    rope_types: tuple[str, ...] = ("default",)
    qk_norm: bool = True
    qkv_bias: bool = False
    sparse: bool = False
    window: bool = False
    experts: bool = False
    shared: bool = False
    normalised: bool = False


_QWEN3_5: Final = Family(("linear_attention", "full_attention"), interval=4, gate=True, rotary=0.25, mrope=True,
                         norm_offset=1.0, rope_types=("default", "mrope"))
_QWEN3: Final = Family(("full_attention",), interval=1, gate=False, rotary=1.0, mrope=False, norm_offset=0.0)
_QWEN2: Final = replace(_QWEN3, rope_types=("default", "linear", "llama3"), qk_norm=False, qkv_bias=True, sparse=True)
FAMILIES: Final[Mapping[str, Family]] = {
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": replace(_QWEN3_5, experts=True, shared=True, normalised=True),
    "qwen3": _QWEN3,
    "qwen3_moe": replace(_QWEN3, experts=True),
    "qwen2": _QWEN2,
    "llama": replace(_QWEN2, qkv_bias=False, window=True),
}
MIXTURES: Final = tuple(name for name, family in FAMILIES.items() if family.experts)
