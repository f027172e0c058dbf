"""The compiled attention: every shape at every processor level, and the same bits in any company."""

from __future__ import annotations

from ctypes import byref
from dataclasses import replace

import pytest
import torch
from native_pools import at_every_level, native_ops, pool, using
from op_cases import (
    NAN,
    Case,
    Row,
    assert_close,
    attention_weights,
    build_batch,
    generator,
    hidden_states,
    kv_errors,
    kv_view,
    randn,
)
from support import every
from test_ops_torch import TOLERANCE
from torch import Tensor
from torch.nn import functional

from deltic.ops import backends, reference
from deltic.ops.cpu import library, missing
from deltic.ops.cpu.kernels import attention_layer, kv_pages
from deltic.ops.types import PAGE, AttentionSpec, AttentionWeights, KvView, Rope, RopeSpec

pytestmark = pytest.mark.skipif(bool(missing()), reason=str(missing()))

LARGE = AttentionSpec(heads=8, kv_heads=2, head_dim=64, rotary_dim=32, gate=True, eps=1e-6)
SHAPES_OF_ATTENTION = {
    "one head each": AttentionSpec(3, 3, 12, 12, True, 1e-6),
    "one key head": AttentionSpec(5, 1, 7, 4, False, 1e-5),
    "wide groups": AttentionSpec(18, 2, 32, 8, True, 1e-6),
    "large": LARGE,
    "large without a gate": replace(LARGE, heads=4, head_dim=128, rotary_dim=128, gate=False),
    "odd width": replace(LARGE, head_dim=80, rotary_dim=34),
    "wide heads": AttentionSpec(8, 2, 256, 64, True, 1e-6),
}
ROTARY = {spec.rotary_dim: RopeSpec(1e4, spec.rotary_dim) for spec in SHAPES_OF_ATTENTION.values()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES_OF_ATTENTION)
@pytest.mark.covering
@at_every_level
def test_attention_shapes(name: str, dtype: torch.dtype) -> None:
    """Contexts of one and of several parts, chunks of a few and of many tokens, at every level."""
    spec = SHAPES_OF_ATTENTION[name]
    case = build_batch([Row(1, 5), Row(1, 511), Row(1, 1100), Row(3, 1022), Row(5, 3), Row(40, 490), Row(70, 0)], 8)
    x, weights, before = hidden_states(case, dtype), attention_weights(3, dtype, spec), kv_view(case, dtype, spec)
    slow_view, fast_view = (KvView(before.keys.clone(), before.values.clone()) for _ in range(2))
    rope = reference.OPS.rope(case.batch.positions, ROTARY[spec.rotary_dim])
    wanted = backends()["torch"].attention_mixer(x, weights, slow_view, case.fresh(), rope)
    output = native_ops().attention_mixer(x, weights, fast_view, case.fresh(), rope)
    assert_close(output, wanted, TOLERANCE.get(dtype, 4e-3))
    assert kv_errors(case, fast_view, slow_view, before) <= TOLERANCE.get(dtype, 4e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@at_every_level
def test_heads_without_norms_and_with_biases(dtype: torch.dtype) -> None:
    spec = replace(LARGE, heads=4, head_dim=24, rotary_dim=24, gate=False)
    case = build_batch([Row(1, 5), Row(1, 30), Row(9, 3), Row(20, 0)], 8)
    x, before = hidden_states(case, dtype), kv_view(case, dtype, spec)
    bias = 0.3 * randn(generator(9), spec.queries + 2 * spec.kv)
    weights = replace(attention_weights(3, dtype, spec), q_norm=None, k_norm=None, bias=bias)
    rope = reference.OPS.rope(case.batch.positions, RopeSpec(1e4, 24, (), tuple(1 + i / 4 for i in range(12))))
    views, found = [], []
    for ops in (reference.OPS, backends()["torch"], native_ops()):
        views.append(KvView(before.keys.clone(), before.values.clone()))
        found.append(ops.attention_mixer(x, weights, views[-1], case.fresh(), rope))
    for output, view in zip(found[1:], views[1:], strict=True):
        assert_close(output, found[0], TOLERANCE.get(dtype, 4e-3))
        assert kv_errors(case, view, views[0], before) <= TOLERANCE.get(dtype, 4e-3)


def attend(spec: AttentionSpec, proj: Tensor, rope: Rope, case: Case, view: KvView) -> Tensor:
    """The kernel alone: proj [T, rows of qkv] -> [T, queries]."""
    weights, out = attention_weights(3, torch.float32, spec), torch.empty(len(proj), spec.queries)
    tables = library.address(rope.cos), library.address(rope.sin)
    rows = library.address(proj.contiguous())
    pool().call(library.library().deltic_attention, byref(attention_layer(weights)), byref(kv_pages(view)),
                library.step_batch(case.batch), *tables, rows, library.address(out))
    return out


def in_chunks(spec: AttentionSpec, proj: Tensor, chunks: list[int], dtype: torch.dtype, others: list[int]) -> Tensor:
    """One sequence of len(proj) tokens in chunks; each comes with rows of one NaN token at these rotary positions."""
    rope = reference.OPS.rope(torch.arange(len(proj)).expand(3, -1), ROTARY[spec.rotary_dim])
    pages = -(-len(proj) // PAGE)
    shape = (8 + pages, PAGE, spec.kv_heads, spec.head_dim)
    view, outputs, done = KvView(torch.full(shape, NAN, dtype=dtype), torch.full(shape, NAN, dtype=dtype)), [], 0
    table = 8 + torch.randperm(pages, generator=generator(len(chunks)))
    for chunk in chunks:
        case = build_batch([*(Row(1, 0) for _ in others), Row(chunk, done)], 4)
        places = torch.arange(done, done + chunk)
        own = table[places // PAGE] * PAGE + places % PAGE
        sheet = torch.zeros(len(others) + 1, pages, dtype=torch.int64)
        sheet[-1] = table
        sheet[:-1, 0] = torch.arange(1, 1 + len(others))
        batch = replace(case.batch, pages=sheet, store=torch.cat([sheet[:-1, 0] * PAGE, own]), memo={})
        noise = torch.full((len(others), proj.shape[1]), NAN)
        turns = torch.tensor([*others, *places.tolist()])
        output = attend(spec, torch.cat([noise, proj[done : done + chunk]]), Rope(rope.cos[turns], rope.sin[turns]),
                        replace(case, batch=batch), view)
        outputs.append(output[len(others) :])
        done += chunk
    return torch.cat(outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", every(3, SHAPES_OF_ATTENTION))
@pytest.mark.covering
@at_every_level
def test_attention_does_not_depend_on_batch(name: str, dtype: torch.dtype) -> None:
    """A token's bits are the same in all chunkings, beside rows of NaN, and with other numbers of threads."""
    spec, tokens = SHAPES_OF_ATTENTION[name], 1100
    rows = spec.queries * (2 if spec.gate else 1) + 2 * spec.kv
    proj = randn(generator(6), tokens, rows).float()
    whole = in_chunks(spec, proj, [tokens], dtype, [])
    assert not whole.isnan().any()
    ragged = [1, 2, 500, 7, 1, 1, 1, 3, 24, 25, 1, 8, 9, 400, 13]
    ragged.append(tokens - sum(ragged) - 40)
    assert torch.equal(in_chunks(spec, proj, [*ragged, *[1] * 40], dtype, [0, 3]), whole)
    for threads in (1, 5):
        with using(threads=threads):
            for tail in ([tokens - 610], [tokens - 620, *[1] * 10]):
                assert torch.equal(in_chunks(spec, proj, [600, 4, *[1] * 6, *tail], dtype, [1]), whole)


@pytest.mark.parametrize("bad", [NAN, float("inf")])
@at_every_level
def test_later_nan_does_not_reach_earlier_tokens(bad: float) -> None:
    """Not even within one chunk. A value that is not finite reaches the tokens behind it in every chunking."""
    proj = randn(generator(6), 40, LARGE.queries * 2 + 2 * LARGE.kv).float()
    whole = in_chunks(LARGE, proj, [40], torch.bfloat16, [])
    proj[21, -LARGE.kv :] = bad
    sick = in_chunks(LARGE, proj, [40], torch.bfloat16, [])
    assert torch.equal(sick[:21], whole[:21]) and not sick[21:].isfinite().any()
    single = in_chunks(LARGE, proj, [1] * 40, torch.bfloat16, [])
    assert torch.equal(single.nan_to_num(), sick.nan_to_num())
    proj[21] = NAN
    assert in_chunks(LARGE, proj, [40], torch.bfloat16, [])[21:].isnan().all()


@at_every_level
def test_bfloat16_keys_and_values_lose_no_more_than_float32_sums() -> None:
    """Queries and weights are not rounded to bfloat16, even where the products of a level are."""
    spec, tokens = SHAPES_OF_ATTENTION["wide heads"], 700
    proj = randn(generator(8), tokens, spec.queries * 2 + 2 * spec.kv).float()
    proj[:, spec.queries * 2 :] = proj[:, spec.queries * 2 :].bfloat16().float()
    plain = replace(spec, gate=False, rotary_dim=64)
    proj = torch.cat([proj[:, : spec.queries], proj[:, spec.queries * 2 :]], 1)
    weights = replace(attention_weights(3, torch.float32, plain), q_norm=None, k_norm=None)
    found = attend_once(plain, weights, proj)
    queries, keys, values = (part.unflatten(1, (-1, spec.head_dim)).transpose(0, 1).double() for part in proj.split(
        [spec.queries, spec.kv, spec.kv], 1))
    wanted = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
    assert (found - wanted.transpose(0, 1).flatten(1)).abs().max() < 2e-5  # 2e-3 if they were


def attend_once(spec: AttentionSpec, weights: AttentionWeights, proj: Tensor) -> Tensor:
    """Attention of one sequence to itself, over bfloat16 pages; positions do not turn."""
    case = build_batch([Row(len(proj), 0)], 4)
    view, out = kv_view(case, torch.bfloat16, spec), torch.empty(len(proj), spec.queries)
    cosines, sines = torch.ones(len(proj), spec.rotary_dim), torch.zeros(len(proj), spec.rotary_dim)
    pool().call(library.library().deltic_attention, byref(attention_layer(weights)), byref(kv_pages(view)),
                library.step_batch(case.batch), library.address(cosines), library.address(sines),
                library.address(proj.contiguous()), library.address(out))
    return out
