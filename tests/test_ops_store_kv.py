"""Storing keys and values alone leaves the bits that attention leaves, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from native_pools import by_level, each_level, native_ops, using
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

from deltic.ops import Ops, backends, ref
from deltic.ops.records import AttentionWeights, KvView

CASE = build_batch([Row(1, 5), Row(1, 0), Row(1, 33), Row(3, 14), Row(40, 7)], 8)
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
by_gate = pytest.mark.parametrize("gate", [True, False], ids=["gate", "no gate"])


_level = by_level(each_level)


def stored(ops: Ops, weights: AttentionWeights, x: Tensor, case: Case, alone: bool) -> KvView:
    kv, rope, spec = kv_view(case, x.dtype), rope_table(ref.OPS, case), weights.spec
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
    pack = ops.pack if packs else ref.pack
    return replace(weights, qkv=(pack(queries.contiguous(), False), pack(others.contiguous(), False)))


def check(ops: Ops, weights: AttentionWeights, dtype: torch.dtype) -> None:
    x, before = hidden_states(CASE, dtype), kv_view(CASE, dtype)
    wanted, found = (stored(ops, weights, x, CASE, alone) for alone in (False, True))
    assert same_bits(found.keys, wanted.keys) and same_bits(found.values, wanted.values)
    assert kv_errors(CASE, found, stored(ref.OPS, weights, x, CASE, False), before) <= 2e-2


@by_gate
@by_dtype
@pytest.mark.parametrize("backend", ["ref", "torch"])
def test_in_torch(backend: str, dtype: torch.dtype, gate: bool) -> None:
    ops = backends()[backend]
    check(ops, in_blocks(ops, dtype, gate), dtype)


@pytest.mark.usefixtures("_level")
@by_gate
@by_dtype
@pytest.mark.parametrize("packs", [True, False], ids=["packed", "plain"])
def test_on_the_kernels(packs: bool, dtype: torch.dtype, gate: bool) -> None:
    for count in (1, 3):
        with using(threads=count):
            ops = native_ops()
            check(ops, in_blocks(ops, dtype, gate, packs), dtype)


def test_in_float16() -> None:
    """A dtype that the kernels leave to torch."""
    ops = backends()["cpu"]
    check(ops, in_blocks(ops, torch.float16, True, packs=False), torch.float16)
