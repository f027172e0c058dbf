"""Keys and values in eight bits: the format, its kernels against the reference at every level, and what of an answer it
keeps."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from op_cases import attention_weights, generator, hidden_states, relative_rms, same_bits
from support import fresh_pools, odd_runtime, small_runtime
from test_kv_int4 import (
    CASE,
    SPECS,
    check_prefix_of_tier,
    compiled_ops,
    cost_of,
    equal_greedy_tokens,
    rope_of,
    view_of,
)
from torch import Tensor

from deltic.cache.manager import HybridCache
from deltic.cache.offload.index import TierIndex
from deltic.cache.offload.types import StoredItem
from deltic.cache.tensors import page_bytes
from deltic.config import EngineConfig, ModelConfig
from deltic.errors import ConfigError
from deltic.ops import Ops, reference
from deltic.ops.kv import INT8, is_finite, pack_int8, unpack_int8, width
from deltic.ops.torch import OPS as TORCH
from deltic.ops.types import AttentionSpec, KvView
from deltic.params import PAGE
from deltic.runner.memory import plan_memory
from deltic.runner.model_runner import ModelRunner

# The format


@pytest.mark.covering
@pytest.mark.parametrize("dim", [4, 10, 64, 80, 256])
def test_bytes_are_those_of_the_reference(dim: int) -> None:
    x = torch.randn(50, 3, dim, generator=generator(2), dtype=torch.float64) * torch.logspace(-6, 6, 50)[:, None, None]
    stored = pack_int8(x)
    assert stored.shape == (50, 3, width(dim, 8, INT8)) == (50, 3, dim + 4)
    assert torch.equal(stored, torch.stack([reference.write_int8(token) for token in x]))
    back = unpack_int8(stored, dim, torch.float64)
    assert torch.equal(back, torch.stack([reference.read_int8(token) for token in stored]))
    assert bool(((back - x).abs() < 0.5001 / 127 * x.abs().amax(-1, keepdim=True)).all())


def test_unusual_numbers() -> None:
    x = torch.randn(5, 2, 32, generator=generator(3))
    x[0], x[1] = 0, 1e-38
    stored = pack_int8(x)
    assert not unpack_int8(stored, 32, torch.float32)[:2].any() and is_finite(stored) and is_finite(stored[:0])
    for bad in (float("nan"), float("inf"), -float("inf")):
        x[3, 1, 7] = bad
        stored = pack_int8(x)
        assert is_finite(stored[:3]) and not is_finite(stored[3]) and not is_finite(stored)
        assert not is_finite(reference.write_int8(x[3]))


# Options


def test_large_heads_are_refused() -> None:
    config = replace(ModelConfig.preset("qwen3.5-4b"), head_dim=1040)
    with pytest.raises(ConfigError, match="heads of up to 1024 dimensions; this model's have 1040") as caught:
        plan_memory(config, EngineConfig(device="cpu", kv_dtype="int8"), torch.bfloat16, False, False)
    assert caught.value.option == "kv_dtype"


# Attention

SHAPES = SPECS | {10: AttentionSpec(heads=6, kv_heads=2, head_dim=10, rotary_dim=4, gate=True, eps=1e-6),
                  80: AttentionSpec(heads=3, kv_heads=3, head_dim=80, rotary_dim=80, gate=False, eps=1e-6),
                  288: AttentionSpec(heads=28, kv_heads=2, head_dim=288, rotary_dim=32, gate=True, eps=1e-6)}
EQUAL = ("avx2", "avx512", "vnni", "bf16")
"""Levels with fused multiply-add."""
TORCH_ERROR = {torch.float32: 5e-4, torch.bfloat16: 1e-2}
KERNEL_ERROR = {torch.float32: 1.2e-2, torch.bfloat16: 1.5e-2}
"""The kernels round queries and weights to eight bits, too."""


@cache
def exact_attention(dim: int, dtype: torch.dtype) -> tuple[Tensor, KvView]:
    """The reference's result and its pages."""
    view, weights = view_of(CASE, SHAPES[dim], INT8), attention_weights(3, dtype, SHAPES[dim])
    x = hidden_states(CASE, dtype).double()
    return reference.attention_mixer(x, weights, view, CASE.fresh(), rope_of(SHAPES[dim])), view


def attention_of(ops: Ops, dim: int, dtype: torch.dtype) -> tuple[Tensor, KvView]:
    spec, view = SHAPES[dim], view_of(CASE, SHAPES[dim], INT8)
    weights = attention_weights(3, dtype, spec)
    return ops.attention_mixer(hidden_states(CASE, dtype), weights, view, CASE.fresh(), rope_of(spec)), view


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", SHAPES)
@pytest.mark.parametrize("backend", ["torch", "portable", *EQUAL])
def test_attention(backend: str, dim: int, dtype: torch.dtype) -> None:
    found, view = attention_of(TORCH if backend == "torch" else compiled_ops(backend), dim, dtype)
    wanted, slow = exact_attention(dim, dtype)
    most = (TORCH_ERROR if backend == "torch" else KERNEL_ERROR)[dtype]
    assert found.dtype == dtype and relative_rms(found, wanted) < most
    stored = torch.zeros(CASE.pages * PAGE, dtype=torch.bool)
    stored[CASE.batch.store] = True
    for mine, theirs in ((view.keys, slow.keys), (view.values, slow.values)):
        mine, theirs = mine.flatten(0, 1), theirs.flatten(0, 1)
        assert same_bits(mine[~stored], theirs[~stored]), "an entry of no token was written"
        assert is_finite(mine[stored])
        if dtype == torch.float32:  # the last bits of scales differ, and codes between two levels
            codes = mine[stored].flatten(1)[:, :-4 * mine.shape[1]], theirs[stored].flatten(1)[:, :-4 * mine.shape[1]]
            assert (codes[0] != codes[1]).float().mean() < 2e-3


@pytest.mark.parametrize("dim", SHAPES)
def test_levels_give_the_same_bits(dim: int) -> None:
    found = [attention_of(compiled_ops(level), dim, torch.float32) for level in EQUAL]
    for mixed, view in found[1:]:
        assert same_bits(mixed, found[0][0])
        assert same_bits(view.keys, found[0][1].keys) and same_bits(view.values, found[0][1].values)


# Pools and tiers


def over_int8(*tiers: TierIndex, reuse: bool = True) -> ModelRunner:
    small = small_runtime(odd_runtime(), batch=4)
    pools = fresh_pools(small, 384, 24, kv=INT8)
    config = small.config
    assert pools.sizes.token_bytes == page_bytes(config, INT8) // PAGE
    assert pools.keys.shape[-2:] == (config.num_key_value_heads, config.head_dim + 4)
    return replace(small, cache=HybridCache(pools, reuse, tiers))


def test_only_what_these_pools_could_hold_is_let_in() -> None:
    pools = over_int8().pools
    item = StoredItem("kv", "key", "", 0, 3)
    kept = {name: torch.ones(len(pool), 3, *pool.shape[3:], dtype=INT8)
            for name, pool in zip(("keys", "values"), pools.page_tensors, strict=True)}
    kept["tokens"] = torch.tensor([1, 2, 3])
    assert pools.item_validator.refuse(item, kept) == ""
    assert "its keys are torch.float32" in pools.item_validator.refuse(item, {**kept, "keys": kept["keys"].float()})
    kept["values"][1, 2, -1, -4:] = -1
    assert pools.item_validator.refuse(item, kept) == "its values are not all finite"


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_prefix_comes_back_byte_by_byte(kind: str, tmp_path: Path) -> None:
    check_prefix_of_tier(over_int8, kind, tmp_path)


# What it costs


@pytest.mark.slow
def test_greedy_tokens_of_the_embedded_model() -> None:
    same, before = equal_greedy_tokens("cpu", "int8")
    assert same >= 0.99 and before >= 0.99


@pytest.mark.slow
def test_perplexity_of_a_real_model() -> None:
    rise, divergence = cost_of("int8")
    assert abs(rise) < 0.005 and divergence < 0.002
