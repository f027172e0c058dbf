"""Storing keys and values alone leaves the bits that attention leaves, and nothing else."""

from __future__ import annotations

from ctypes import byref
from dataclasses import replace

import pytest
import torch
from native_pools import at_every_level, native_ops, pool, using
from op_cases import (
    ATTENTION,
    Case,
    Row,
    attention_weights,
    build_batch,
    hidden_states,
    kv_errors,
    kv_view,
    rope_table,
    same_bits,
)
from torch import Tensor

from deltic.ops import Ops, backends, reference
from deltic.ops.cpu import kernels
from deltic.ops.cpu.library import AttentionLayer, address, library, step_batch
from deltic.ops.types import PAGE, AttentionWeights, KvView, Layout

CASE = build_batch([Row(1, 5), Row(1, 0), Row(1, 33), Row(3, 14), Row(40, 7)], 8)
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16],
                                   ids=["float32", "float16", "bfloat16"])
by_gate = pytest.mark.parametrize("gate", [True, False], ids=["gate", "no gate"])


def stored(ops: Ops, weights: AttentionWeights, x: Tensor, case: Case, alone: bool) -> KvView:
    kv, rope, spec = kv_view(case, x.dtype), rope_table(reference.OPS, case), weights.spec
    batch = case.fresh()
    if not alone:
        ops.attention_mixer(x, weights, kv, batch, rope)
        return kv
    assert isinstance(weights.qkv, tuple)
    ops.store_kv(x, weights.qkv[1], weights.k_norm, spec, kv, batch, rope)
    return kv


def in_blocks(ops: Ops, dtype: torch.dtype, gate: bool, packs: bool = True) -> AttentionWeights:
    """qkv in two row blocks: those of the queries, those of keys and values."""
    weights = attention_weights(3, dtype, replace(ATTENTION, gate=gate))
    assert isinstance(weights.qkv, Tensor)
    queries, others = weights.qkv.split([len(weights.qkv) - 2 * weights.spec.kv, 2 * weights.spec.kv])
    pack = ops.pack if packs else reference.pack
    return replace(weights, qkv=(pack(queries.contiguous(), False), pack(others.contiguous(), False)))


def check(ops: Ops, weights: AttentionWeights, dtype: torch.dtype) -> None:
    x, before = hidden_states(CASE, dtype), kv_view(CASE, dtype)
    wanted, found = (stored(ops, weights, x, CASE, alone) for alone in (False, True))
    assert same_bits(found.keys, wanted.keys) and same_bits(found.values, wanted.values)
    assert kv_errors(CASE, found, stored(reference.OPS, weights, x, CASE, False), before) <= 2e-2


@by_gate
@by_dtype
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_in_torch(backend: str, dtype: torch.dtype, gate: bool) -> None:
    ops = backends()[backend]
    check(ops, in_blocks(ops, dtype, gate), dtype)


@pytest.mark.covering
@by_gate
@by_dtype
@pytest.mark.parametrize("packs", [True, False], ids=["packed", "plain"])
@at_every_level
def test_on_the_kernels(packs: bool, dtype: torch.dtype, gate: bool) -> None:
    for count in (1, 3):
        with using(threads=count):
            ops = native_ops()
            check(ops, in_blocks(ops, dtype, gate, packs), dtype)


def test_in_float64() -> None:
    """A dtype that the kernels leave to torch."""
    ops = backends()["cpu"]
    check(ops, in_blocks(ops, torch.float64, True, packs=False), torch.float64)


@pytest.mark.parametrize("dim", [32, 80, 7])
@at_every_level
def test_float16_rounding_equals_torch(dim: int) -> None:
    """All its numbers, and numbers between them: subnormal ones, ties, those that become infinite, NaN."""
    every = torch.arange(1 << 16).to(torch.int16).view(torch.float16).float()
    between = torch.cat([every, every * (1 + 2**-11), every * (1 + 2**-12), torch.tensor([65519.9, 65520.0, 1e9])])
    values = between[: len(between) // dim * dim].view(-1, dim)
    tokens, ones = len(values), torch.ones(dim)
    view = KvView(*(torch.zeros(tokens, PAGE, 1, dim, dtype=torch.float16) for _ in range(2)))
    count = torch.arange(tokens + 1)
    batch = replace(CASE.batch, layout=Layout((1,) * tokens, (1,) * tokens, tokens, 0), starts=count,
                    pages=count[:tokens, None], store=count[:tokens] * PAGE, done=count[:tokens] * 0, memo={})
    cosines, sines = torch.ones(tokens, 2), torch.zeros(tokens, 2)
    layer = AttentionLayer(q_norm=address(ones), k_norm=address(ones), heads=1, kv_heads=1, head_dim=dim, rotary_dim=2,
                           eps=1e-6)
    common = byref(kernels.kv_pages(view)), step_batch(batch), address(cosines), address(sines)
    given = torch.cat([torch.zeros_like(values), values], 1)
    pool().call(library().deltic_store_kv, byref(layer), None, *common, address(given))
    stored, wanted = view.values[:, 0, 0], values.half()
    sick = wanted.isnan()
    assert torch.equal(stored.isnan(), sick) and same_bits(stored[~sick], wanted[~sick])
    # the average of one value is that value
    values = wanted.nan_to_num(posinf=1.0, neginf=-1.0).float()
    out, proj = torch.empty(tokens, dim), torch.cat([torch.ones(tokens, 2 * dim), values], 1)
    pool().call(library().deltic_attention, byref(layer), *common, address(proj), address(out))
    assert torch.equal(out, values)
