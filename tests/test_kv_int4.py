"""Keys and values in four bits: the format, its kernels against the reference, and what of an answer it keeps. What a
GPU's kernels make of them is in test_cuda_kv_int4.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from op_cases import ROPE, Case, Row, attention_weights, build_batch, generator, hidden_states, relative_rms, rope_table
from op_cases import same_bits
from torch import Tensor

from deltic.config import EngineConfig, ModelConfig
from deltic.errors import ConfigError
from deltic.ops import Ops, backends, reference
from deltic.ops.kv import INT4, KEY_BITS, VALUE_BITS, is_finite, pack, rotated, rotated_back, store, unpack, width
from deltic.ops.types import AttentionSpec, KvView, Rope, RopeSpec
from deltic.params import PAGE
from deltic.runner.memory import plan_memory

SIZES = (16, 32, 64, 128, 256)
BITS = {KEY_BITS: 0.057, VALUE_BITS: 0.112}
"""The error of normally distributed numbers at most."""

# The format


@pytest.mark.parametrize("dim", SIZES)
def test_rotation(dim: int) -> None:
    x = torch.randn(4, 3, dim, generator=generator(1), dtype=torch.float64)
    matrix = reference.hadamard(dim)
    assert torch.allclose(matrix @ matrix.T, torch.eye(dim, dtype=torch.float64))
    assert torch.allclose(rotated(x), x @ matrix) and torch.allclose(rotated_back(rotated(x)), x)
    assert rotated(torch.ones(dim)).abs().max() < 1.5, "equal numbers do not add up"
    assert rotated(x.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", SIZES)
def test_bytes_are_those_of_the_reference(dim: int, bits: int) -> None:
    x = torch.randn(50, 3, dim, generator=generator(2), dtype=torch.float64) * torch.logspace(-6, 6, 50)[:, None, None]
    stored = pack(rotated(x), bits)
    assert stored.shape == (50, 3, width(dim, bits, INT4)) == (50, 3, dim * bits // 8 + 2)
    assert torch.equal(stored, torch.stack([reference.write_int4(token, bits) for token in x]))
    back = rotated_back(unpack(stored, dim, torch.float64))
    assert relative_rms(back, torch.stack([reference.read_int4(token) for token in stored])) < 1e-12
    assert 0.02 < (back - x).norm(dim=-1).div(x.norm(dim=-1)).mean() < BITS[bits]


@pytest.mark.parametrize("bits", BITS)
def test_unusual_numbers(bits: int) -> None:
    x = torch.randn(5, 2, 32, generator=generator(3))
    x[0], x[1] = 0, 1e-38
    stored = pack(rotated(x), bits)
    assert not unpack(stored, 32, torch.float32)[:2].any() and is_finite(stored) and is_finite(stored[:0])
    for bad in (float("nan"), float("inf"), -float("inf")):
        x[3, 1, 7] = bad
        stored = pack(rotated(x), bits)
        assert is_finite(stored[:3]) and not is_finite(stored[3]) and not is_finite(stored)
        assert not is_finite(reference.write_int4(x[3], bits))


def test_it_is_three_and_a_half_times_smaller() -> None:
    for dim, least in ((64, 3.3), (128, 3.4), (256, 3.5)):
        assert 4 * dim / (width(dim, KEY_BITS, INT4) + width(dim, VALUE_BITS, INT4)) > least


# Options


def test_what_it_cannot_be() -> None:
    config = replace(ModelConfig.preset("qwen3.5-4b"), head_dim=80)
    with pytest.raises(ConfigError, match="a power of two; this model's have 80") as caught:
        plan_memory(config, EngineConfig(device="cpu", kv_dtype="int4"), torch.bfloat16, False, False)
    assert caught.value.option == "kv_dtype"


def test_smaller_pages_are_more_of_them() -> None:
    config, pages = ModelConfig.preset("qwen3.5-4b"), []
    for kv in ("auto", "int4"):
        options = EngineConfig(device="cpu", kv_dtype=kv, memory="16GiB", max_batch=4)
        pages.append(plan_memory(config, options, torch.bfloat16, False, drafts=False)[0].pages)
    assert pages[1] > 1.6 * pages[0], "the rest are states"


# Attention

CASE = build_batch([Row(1, 5), Row(1, 0), Row(1, 33), Row(1, 530), Row(3, 14), Row(20, 7), Row(17, 0)], 8)
SPECS = {dim: AttentionSpec(heads=6, kv_heads=heads, head_dim=dim, rotary_dim=rotary, gate=gate, eps=1e-6)
         for dim, heads, rotary, gate in ((16, 2, 8, True), (64, 3, 64, False), (128, 1, 32, True), (256, 2, 64, True))}


def view_of(case: Case, spec: AttentionSpec) -> KvView:
    """Pages whose scales are NaN but for the entries before each row's cursor."""
    rng, views = generator(4), list[Tensor]()
    for bits in (KEY_BITS, VALUE_BITS):
        pool = torch.full((case.pages, PAGE, spec.kv_heads, width(spec.head_dim, bits, INT4)), 0xff, dtype=INT4)
        for row, table in zip(case.rows, case.batch.pages, strict=True):
            if row.done:
                places = torch.tensor([int(table[place // PAGE]) * PAGE + place % PAGE for place in range(row.done)])
                store(pool, places, torch.randn(row.done, spec.kv_heads, spec.head_dim, generator=rng))
        views.append(pool)
    return KvView(*views)


def rope_of(spec: AttentionSpec) -> Rope:
    return reference.OPS.rope(CASE.batch.positions, RopeSpec(ROPE.theta, spec.rotary_dim))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", SPECS)
@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_attention(backend: str, dim: int, dtype: torch.dtype) -> None:
    ops: Ops | None = backends().get(backend)
    if ops is None:
        pytest.skip("the kernels are not compiled")
    spec = SPECS[dim]
    x, weights, view = hidden_states(CASE, dtype), attention_weights(3, dtype, spec), view_of(CASE, spec)
    slow = KvView(view.keys.clone(), view.values.clone())
    found = ops.attention_mixer(x, weights, view, CASE.fresh(), rope_of(spec))
    wanted = reference.attention_mixer(x.double(), attention_weights(3, dtype, spec), slow, CASE.fresh(), rope_of(spec))
    assert found.dtype == dtype and relative_rms(found, wanted) < {torch.float32: 5e-3, torch.bfloat16: 5e-2}[dtype]
    stored = torch.zeros(CASE.pages * PAGE, dtype=torch.bool)
    stored[CASE.batch.store] = True
    for mine, theirs in ((view.keys, slow.keys), (view.values, slow.values)):
        mine, theirs = mine.flatten(0, 1), theirs.flatten(0, 1)
        assert same_bits(mine[~stored], theirs[~stored]), "an entry of no token was written"
        assert is_finite(mine[stored])
        if dtype == torch.float32:
            assert (mine[stored] != theirs[stored]).float().mean() < 2e-3
