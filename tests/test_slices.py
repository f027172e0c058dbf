"""The order in which products over split columns are summed: bits that do not depend on the number of shards."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

import op_cases
import pytest
import torch
from op_cases import same_bits
from torch import Tensor

from deltic.ops import Ops, backends, reference
from deltic.ops.slices import (
    SLICES,
    column_slices,
    expert_slices,
    slice_ends,
    slice_products,
    slice_unit,
    tree_sum,
)
from deltic.ops.torch import OPS as TORCH
from deltic.ops.torch.basic import row_parallel
from deltic.ops.types import (
    AttentionSpec,
    AttentionWeights,
    DeltaLogView,
    GdnSpec,
    GdnWeights,
    KvView,
    MlpWeights,
    MoeWeights,
    StateView,
)

BACKENDS = {"reference": reference.OPS, "torch": TORCH, "cpu": backends()["cpu"]}
SHARDS = (2, 4, 8)
Weights = TypeVar("Weights", MlpWeights, MoeWeights, GdnWeights, AttentionWeights)


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


def packed(ops: Ops, weights: Weights) -> Weights:
    """The weights in the form in which the compiled kernels multiply with them; those of torch stay plain."""
    if ops is not BACKENDS["cpu"]:
        return weights
    changes: dict[str, Any] = {}
    for name in ("in_proj", "out_proj", "qkv", "o_proj", "gate_up", "down", "router", "experts", "shared"):
        part = getattr(weights, name, None)
        if isinstance(part, Tensor):
            changes[name] = ops.pack(part, False)
        elif isinstance(part, MlpWeights):
            changes[name] = packed(ops, part)
        elif isinstance(part, tuple):
            changes[name] = tuple(packed(ops, each) if isinstance(each, MlpWeights) else ops.pack(each, False)
                                  for each in part)
    return replace(weights, **changes)  # type: ignore[type-var]


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
    """One shard. It has no shared expert if all columns of that belong to others."""
    assert isinstance(weights.experts, tuple) and isinstance(weights.router, Tensor)
    ends, each = [0, *slice_ends(len(weights.experts), 1)], SLICES // shards
    first, end = ends[shard * each], ends[shard * each + each]
    shared = None if weights.shared is None else mlp_shard(weights.shared, shard, shards)
    router = weights.router
    if shared is not None and not len(shared.gate_up):
        shared, router = None, router[:-1]
    own = weights.experts[first:end]
    return replace(weights, router=router, experts=own, shared=shared, shards=shards, first=first)


def feed_forward(inner: int, hidden: int, dtype: torch.dtype) -> MlpWeights:
    return MlpWeights(torch.randn(2 * inner, hidden).to(dtype), torch.randn(hidden, inner).to(dtype))


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize(("columns", "runs"), [(512, 1), (208, 1), (16, 1), (192, 3), (256, 2)])
def test_a_product_has_the_same_bits_with_every_number_of_shards(
    backend: str, dtype: torch.dtype, columns: int, runs: int
) -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(5, columns).to(dtype), torch.randn(48, columns).to(dtype)
    multiply = {"reference": reference.row_parallel, "torch": row_parallel}[backend]
    whole = multiply(x, weight, 1, runs)
    assert whole.dtype == dtype
    for shards in SHARDS:
        parts = [multiply(shard_of(x, shard, shards, runs), shard_of(weight, shard, shards, runs), shards, runs)
                 for shard in range(shards)]
        assert all(part.dtype == reference.wide(x) for part in parts)
        assert torch.equal(tree_sum(parts).to(dtype), whole), shards


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("inner", [512, 208])
@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_a_feed_forward_has_the_same_bits_with_every_number_of_shards(
    backend: str, dtype: torch.dtype, inner: int, tokens: int
) -> None:
    torch.manual_seed(2)
    x, weights, ops = torch.randn(tokens, 64).to(dtype), feed_forward(inner, 64, dtype), BACKENDS[backend]
    whole = ops.mlp(x, packed(ops, weights))
    for shards in SHARDS:
        parts = [ops.mlp(x, packed(ops, mlp_shard(weights, shard, shards))) for shard in range(shards)]
        assert torch.equal(tree_sum(parts).to(dtype), whole), shards


@pytest.mark.covering(2)
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
    whole = ops.moe(x, packed(ops, weights))
    for shards in SHARDS:
        parts = [ops.moe(x, packed(ops, moe_shard(weights, shard, shards))) for shard in range(shards)]
        assert all(part.dtype == reference.wide(x) for part in parts)
        found = tree_sum(parts).to(dtype)
        # in float64 torch serves the backend "cpu", and its sums depend on shapes on some processors
        assert torch.equal(found, whole) or (dtype == torch.float64 and torch.allclose(found, whole, 1e-13)), shards


def test_slices_of_row_blocks_are_those_of_each_block() -> None:
    x, blocks = torch.randn(3, 128), (torch.randn(8, 128), torch.randn(24, 128))
    apart = slice_products(reference.project, x, blocks)
    assert len(apart) == SLICES
    for part, one, other in zip(apart, *(slice_products(reference.project, x, block) for block in blocks), strict=True):
        assert torch.equal(part, torch.cat([one, other], -1))


def take(pool: Tensor, axis: int, index: list[int]) -> Tensor:
    return pool.index_select(axis, torch.tensor(index)).contiguous()


def of_heads(heads: list[int], size: int, first: int = 0) -> list[int]:
    """Rows of these heads, where the first head's rows begin at `first`."""
    return [first + head * size + row for head in heads for row in range(size)]


@dataclass(frozen=True)
class GdnShard:
    """One shard of a Gated DeltaNet layer: its heads and its channels of the convolution."""

    spec: GdnSpec
    index: int
    count: int

    @property
    def keys(self) -> list[int]:
        each = self.spec.key_heads // self.count
        return list(range(self.index * each, (self.index + 1) * each))

    @property
    def values(self) -> list[int]:
        groups = self.spec.value_heads // self.spec.key_heads
        if self.spec.tiled:
            return [run * self.spec.key_heads + key for run in range(groups) for key in self.keys]
        return [key * groups + group for key in self.keys for group in range(groups)]

    @property
    def channels(self) -> list[int]:
        spec = self.spec
        return [*of_heads(self.keys, spec.key_dim), *of_heads(self.keys, spec.key_dim, spec.keys),
                *of_heads(self.values, spec.value_dim, 2 * spec.keys)]

    @property
    def own(self) -> GdnSpec:
        return replace(self.spec, key_heads=len(self.keys), value_heads=len(self.values))

    def weights(self, whole: GdnWeights) -> GdnWeights:
        rows = torch.cat(whole.in_proj) if isinstance(whole.in_proj, tuple) else whole.in_proj
        assert isinstance(rows, Tensor) and isinstance(whole.out_proj, Tensor)
        spec, values = self.spec, self.values
        z = spec.channels + spec.values
        index = [*self.channels, *of_heads(values, spec.value_dim, spec.channels), *of_heads(values, 1, z),
                 *of_heads(values, 1, z + spec.value_heads)]
        return GdnWeights(self.own, take(rows, 0, index), take(whole.conv, 0, self.channels),
                          take(whole.decay, 0, values), take(whole.dt_bias, 0, values), whole.norm,
                          take(whole.out_proj, 1, of_heads(values, spec.value_dim)), self.count)

    def state(self, whole: StateView) -> StateView:
        log = whole.delta_log
        if log is not None:
            log = DeltaLogView(take(log.inputs, 2, self.channels), take(log.keys, 2, self.keys),
                               take(log.updates, 2, self.values), take(log.decays, 2, self.values), log.tiled)
        return StateView(take(whole.recurrent, 1, self.values), take(whole.conv, 2, self.channels), log)


def attention_shard(whole: AttentionWeights, kv: KvView, index: int, count: int) -> tuple[AttentionWeights, KvView]:
    """One shard of an attention layer and of its K/V. There may be more shards than K/V heads."""
    spec = whole.spec
    assert isinstance(whole.qkv, Tensor) and isinstance(whole.o_proj, Tensor)
    each, own_kv = spec.heads // count, max(1, spec.kv_heads // count)
    heads = list(range(index * each, (index + 1) * each))
    first = index * each * spec.kv_heads // spec.heads
    shared = list(range(first, first + own_kv))
    wide = spec.head_dim * (2 if spec.gate else 1)
    rows = [*of_heads(heads, wide), *of_heads(shared, spec.head_dim, spec.heads * wide),
            *of_heads(shared, spec.head_dim, spec.heads * wide + spec.kv)]
    weights = AttentionWeights(
        replace(spec, heads=each, kv_heads=own_kv), take(whole.qkv, 0, rows), whole.q_norm, whole.k_norm,
        take(whole.o_proj, 1, of_heads(heads, spec.head_dim)), None if whole.bias is None else whole.bias[rows], count)
    return weights, KvView(take(kv.keys, 2, shared), take(kv.values, 2, shared))


GDN = GdnSpec(key_heads=8, value_heads=16, key_dim=8, value_dim=16, conv_kernel=4, eps=1e-6)
ATTENTION = AttentionSpec(heads=16, kv_heads=4, head_dim=16, rotary_dim=6, gate=True, eps=1e-6)
CASES = [case for case in op_cases.cases() if case.name in (
    "first token", "decode in a span", "decode and prefill", "append among others", "fold a ring")]
by_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tiled", "groups"), [(False, 2), (True, 2), (False, 1)])
@pytest.mark.parametrize("backend", BACKENDS)
@by_case
def test_a_gated_delta_net_layer_has_the_same_bits_with_every_number_of_shards(
    backend: str, dtype: torch.dtype, tiled: bool, groups: int, case: op_cases.Case
) -> None:
    ops, spec = BACKENDS[backend], replace(GDN, tiled=tiled, value_heads=8 * groups)
    weights = op_cases.gdn_weights(4, dtype, spec, 48)
    x, before = op_cases.hidden_states(case, dtype, 48), op_cases.state_view(case, dtype, spec, 4)
    after = op_cases.clone_state(before)
    whole = ops.gdn_mixer(x, packed(ops, weights), after, case.fresh())
    for shards in SHARDS:
        parts = []
        for index in range(shards):
            shard = GdnShard(spec, index, shards)
            own = shard.state(before)
            parts.append(ops.gdn_mixer(x, packed(ops, shard.weights(weights)), own, case.fresh()))
            wanted = shard.state(after)
            assert same_bits(own.recurrent, wanted.recurrent) and same_bits(own.conv, wanted.conv)
            assert own.delta_log is not None and wanted.delta_log is not None
            assert all(same_bits(getattr(own.delta_log, name), getattr(wanted.delta_log, name))
                       for name in op_cases.RING_POOLS)
        assert all(part.dtype == torch.float32 for part in parts)
        assert same_bits(tree_sum(parts).to(dtype), whole), shards


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@by_case
def test_an_attention_layer_has_the_same_bits_with_every_number_of_shards(
    backend: str, dtype: torch.dtype, gate: bool, case: op_cases.Case
) -> None:
    ops, spec = BACKENDS[backend], replace(ATTENTION, gate=gate)
    weights, before = op_cases.attention_weights(5, dtype, spec, 48), op_cases.kv_view(case, dtype, spec)
    x, rope = op_cases.hidden_states(case, dtype, 48), op_cases.rope_table(ops, case)
    after = KvView(before.keys.clone(), before.values.clone())
    whole = ops.attention_mixer(x, packed(ops, weights), after, case.fresh(), rope)
    for shards in SHARDS:
        parts = []
        for index in range(shards):
            own, kv = attention_shard(weights, before, index, shards)
            parts.append(ops.attention_mixer(x, packed(ops, own), kv, case.fresh(), rope))
            wanted = attention_shard(weights, after, index, shards)[1]
            assert same_bits(kv.keys, wanted.keys) and same_bits(kv.values, wanted.values)
        assert all(part.dtype == torch.float32 for part in parts)
        assert same_bits(tree_sum(parts).to(dtype), whole), shards
