"""The order in which products over split columns are summed: bits that do not depend on the number of shards."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from deltic.ops import reference
from deltic.ops import torch as torch_ops
from deltic.ops.slices import (
    SLICES,
    column_slices,
    expert_slices,
    slice_ends,
    slice_products,
    slice_unit,
    tree_sum,
)
from deltic.ops.types import MlpWeights, MoeWeights

BACKENDS = {"reference": reference.OPS, "torch": torch_ops.OPS}
SHARDS = (2, 4, 8)


@pytest.mark.parametrize("unit", [1, 16, 32, 256])
@pytest.mark.parametrize("units", [1, 2, 3, 5, 8, 13, 16, 17, 64, 100])
def test_slices_cover_all_columns_and_a_shard_slices_its_own_alone(units: int, unit: int) -> None:
    columns = units * unit
    ends = slice_ends(columns, unit)
    assert ends == sorted(ends) and ends[-1] == columns and all(end % unit == 0 for end in ends)
    sizes = [end - start for start, end in pairwise([0, *ends])]
    assert max(sizes) - min(sizes) <= (unit if units % SLICES else 0)
    for shards in SHARDS:
        each = SLICES // shards
        for shard in range(shards):
            start, end = (0, *ends)[shard * each], ends[shard * each + each - 1]
            assert [start + own for own in slice_ends(end - start, unit, each)] == ends[shard * each:][:each]


def test_runs_have_a_range_each_or_are_not_sliced() -> None:
    assert column_slices(96, 16, runs=2)[0] == [slice(0, 16), slice(48, 64)]
    assert [c for ranges in column_slices(96, 16, 2) for c in ranges if c.start != c.stop] == [
        slice(0, 16), slice(48, 64), slice(16, 32), slice(64, 80), slice(32, 48), slice(80, 96)]
    # a run of 384 columns does not end where a block of 256 ends
    assert column_slices(768, 256, runs=2) == [[slice(0, 768)], *[[slice(768, 768)]] * 7]
    assert expert_slices(16) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7] and expert_slices(3) == [0, 2, 4]
    assert expert_slices(8, shards=4) == [0, 0, 0, 0, 1, 1, 1, 1] and expert_slices(0, shards=8) == []
    assert [slice_unit(*each) for each in (("BF16", 512), ("Q8_0", 512), ("Q8_0", 96), ("Q4_K", 768))] == [
        16, 256, 32, 256]


def test_parts_are_added_in_pairs() -> None:
    parts = [torch.tensor([x]) for x in (1e8, 1.0, -1e8, 1.0, 1.0, 1.0, 1.0, 1.0)]
    a, b, c, d, e, f, g, h = parts
    assert torch.equal(tree_sum(parts), ((a + b) + (c + d)) + ((e + f) + (g + h)))
    assert not torch.equal(tree_sum(parts), sum(parts[1:], parts[0]))


def shard_of(matrix: Tensor, shard: int, shards: int, runs: int = 1) -> Tensor:
    """The columns of one shard of a plain matrix [out, in]."""
    slices, each = column_slices(matrix.shape[1], 16, runs), SLICES // shards
    own = slices[shard * each:(shard + 1) * each]
    return torch.cat([matrix[:, ranges[run]] for run in range(runs) for ranges in own], dim=1)


def mlp_shard(weights: MlpWeights, shard: int, shards: int) -> MlpWeights:
    """One shard of plain weights."""
    assert isinstance(weights.gate_up, Tensor) and isinstance(weights.down, Tensor)
    gate, up = (shard_of(half.T, shard, shards).T for half in weights.gate_up.chunk(2))
    return MlpWeights(torch.cat([gate, up]), shard_of(weights.down, shard, shards), shards=shards)


def moe_shard(weights: MoeWeights, shard: int, shards: int) -> MoeWeights:
    assert isinstance(weights.experts, tuple)
    ends, each = [0, *slice_ends(len(weights.experts), 1)], SLICES // shards
    first, end = ends[shard * each], ends[shard * each + each]
    shared = None if weights.shared is None else mlp_shard(weights.shared, shard, shards)
    return replace(weights, experts=weights.experts[first:end], shared=shared, shards=shards, first=first)


def feed_forward(inner: int, hidden: int, dtype: torch.dtype) -> MlpWeights:
    return MlpWeights(torch.randn(2 * inner, hidden).to(dtype), torch.randn(hidden, inner).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("columns", "runs"), [(512, 1), (208, 1), (16, 1), (192, 3), (256, 2)])
def test_a_product_has_the_same_bits_with_every_number_of_shards(
    backend: str, dtype: torch.dtype, columns: int, runs: int
) -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(5, columns).to(dtype), torch.randn(48, columns).to(dtype)
    multiply = {"reference": reference.row_parallel, "torch": torch_ops.basic.row_parallel}[backend]
    whole = multiply(x, weight, 1, runs)
    assert whole.dtype == dtype
    for shards in SHARDS:
        parts = [multiply(shard_of(x, shard, shards, runs), shard_of(weight, shard, shards, runs), shards, runs)
                 for shard in range(shards)]
        assert all(part.dtype == reference.wide(x) for part in parts)
        assert torch.equal(tree_sum(parts).to(dtype), whole), shards


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("inner", [512, 80])
@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_a_feed_forward_has_the_same_bits_with_every_number_of_shards(
    backend: str, dtype: torch.dtype, inner: int, tokens: int
) -> None:
    torch.manual_seed(2)
    x, weights, ops = torch.randn(tokens, 64).to(dtype), feed_forward(inner, 64, dtype), BACKENDS[backend]
    whole = ops.mlp(x, weights)
    for shards in SHARDS:
        parts = [ops.mlp(x, mlp_shard(weights, shard, shards)) for shard in range(shards)]
        assert torch.equal(tree_sum(parts).to(dtype), whole), shards


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("experts", [16, 11, 3])
@pytest.mark.parametrize("shared", [True, False])
def test_a_mixture_has_the_same_bits_with_every_number_of_shards(
    backend: str, dtype: torch.dtype, experts: int, shared: bool
) -> None:
    torch.manual_seed(3)
    ops, x = BACKENDS[backend], torch.randn(9, 64).to(dtype)
    weights = MoeWeights(torch.randn(experts + shared, 64).to(dtype),
                         tuple(feed_forward(48, 64, dtype) for _ in range(experts)),
                         feed_forward(80, 64, dtype) if shared else None, 3, True)
    whole = ops.moe(x, weights)
    for shards in SHARDS:
        parts = [ops.moe(x, moe_shard(weights, shard, shards)) for shard in range(shards)]
        assert all(part.dtype == reference.wide(x) for part in parts)
        assert torch.equal(tree_sum(parts).to(dtype), whole), shards


def test_slices_of_row_blocks_are_those_of_each_block() -> None:
    x, blocks = torch.randn(3, 128), (torch.randn(8, 128), torch.randn(24, 128))
    apart = slice_products(reference.project, x, blocks)
    assert len(apart) == SLICES
    for part, one, other in zip(apart, *(slice_products(reference.project, x, block) for block in blocks), strict=True):
        assert torch.equal(part, torch.cat([one, other], -1))
