"""Decode products and mixtures that several devices have parts of: the tree of their sums has the bits of one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import test_cuda_experts
import test_cuda_packed_experts
import torch
import torch.nn.functional as F
from test_cuda_kernels import HEADS, error, in_slices, launch, normed, randn
from test_cuda_packed import Modules, packed
from test_cuda_packed import multiply as multiply_whole
from torch import Tensor

from deltic.ops.cuda import quantized_product
from deltic.ops.cuda.driver import Module
from deltic.ops.cuda.kernel_config import ADD, PART, Multiply, Shapes, gdn_slice, heads_product, heads_stride
from deltic.ops.cuda.moe import ALL_REAL, ExpertsShape, MoeOp, shape_of
from deltic.ops.cuda.quantized import KINDS, TILE_COLUMNS, Tiles
from deltic.ops.cuda.quantized_moe import QuantizedMoeOp
from deltic.ops.cuda.quantized_product import PackedMultiply, product_of
from deltic.ops.cuda.sliced_product import ColumnSlices
from deltic.ops.slices import PLAIN_UNIT, SLICES, column_slices, slice_ends, tree_sum
from deltic.ops.types import GdnSpec, MlpWeights, MoeWeights

UNITS_APART = True
__test__ = torch.cuda.is_available()
SHARDS = (1, 2, 4, 8)
COLUMNS = ((1024, 1), (1152, 1), (2048, 1), (3584, 1), (6144, 3), (9216, 1), (17408, 1))
"""Columns of a weight, and runs. 1,152: slices end in the middle of what an instruction multiplies."""
TILES = (("Q4_K", 2048, 1), ("Q6_K", 3584, 1), ("Q8_0", 6144, 3), ("FP8", 3584, 1), ("Q4_K", 9216, 1),
         ("FP8", 9216, 1), ("Q4_K", 17408, 1))
BLOCKS, ROWS = 24, 1003


def own_columns(columns: int, unit: int, runs: int, shards: int) -> list[Tensor]:
    """The columns that each device has, in its order; none if a device's are not whole units of the kernels."""
    slices, each = column_slices(columns, unit, runs), SLICES // shards
    found = [torch.cat([torch.arange(columns)[one[run]] for run in range(runs) for one in slices[first:first + each]])
             for first in range(0, SLICES, each)]
    return found if all(len(own) and len(own) % (64 if unit == PLAIN_UNIT else unit) == 0 for own in found) else []


def out_of(shards: int) -> int:
    return ADD if shards == 1 else PART


def split_of(shards: int, runs: int) -> ColumnSlices:
    return ColumnSlices(SLICES // shards, runs)


# bfloat16


@pytest.fixture(scope="module")
def plain() -> Module:
    found: dict[Multiply, None] = {}
    for columns, runs in COLUMNS:
        for shards in SHARDS:
            for own in own_columns(columns, PLAIN_UNIT, runs, shards)[:1]:
                for unit in (8, 4):
                    found[Multiply(len(own), False, out_of(shards), unit, split=split_of(shards, runs))] = None
    for spec in HEADS[1:]:
        for shards in SHARDS:
            found[heads_product(shard_of(spec, shards), 8, None, shards)] = None
    sources = [Shapes((product,), None, None).source() for product in found]
    modules: Any = Modules(sources)
    return modules  # type: ignore[no-any-return]


def shard_of(spec: GdnSpec, shards: int) -> GdnSpec:
    return replace(spec, key_heads=spec.key_heads // shards, value_heads=spec.value_heads // shards)


def heads_of(core: Tensor, gates: Tensor, spec: GdnSpec, norm: Tensor, shards: int) -> Tensor:
    """As heads in slices leave it on one of several devices: see `in_slices`."""
    heads = core * norm.repeat(spec.value_heads) * gates * gates.sigmoid()
    squares = core.unflatten(1, (-1, gdn_slice(spec, "few", shards))).square().sum(-1)
    return F.pad(torch.cat((heads, squares), 1), (0, heads_stride(spec, shards) - spec.values - squares.shape[1]))


@pytest.mark.parametrize("unit", [8, 4])
@pytest.mark.parametrize(("columns", "runs"), COLUMNS)
def test_products(plain: Module, columns: int, runs: int, unit: int) -> None:
    weight = randn(ROWS, columns, seed=1, dtype=torch.bfloat16) * columns**-0.5
    x, old = randn(16, columns, seed=2, dtype=torch.bfloat16), randn(16, ROWS, seed=3)
    alone = old.clone()
    for token in range(16):
        product = Multiply(columns, False, ADD, unit, split=split_of(1, runs))
        launch(plain, product, weight, x[token:token + 1], alone[token:token + 1], None)
    assert error(alone, old.double() + x.double() @ weight.double().t()) < 1e-5
    for shards in SHARDS:
        devices = own_columns(columns, PLAIN_UNIT, runs, shards)
        own = [(weight[:, index.cuda()].contiguous(), x[:, index.cuda()].contiguous()) for index in devices]
        for tokens in range(1, 17) if own else ():
            product = Multiply(own[0][0].shape[1], False, out_of(shards), unit, split=split_of(shards, runs))
            if tokens > product.most:
                continue
            parts = [old[:tokens].clone() for _ in own]
            for (part, columns_of_x), y in zip(own, parts, strict=True):
                launch(plain, product, part, columns_of_x[:tokens].contiguous(), y, None)
            found = parts[0] if shards == 1 else old[:tokens] + tree_sum(parts)
            assert torch.equal(found, alone[:tokens]), f"{shards} devices, {tokens} tokens"


@pytest.mark.parametrize("spec", HEADS[1:], ids=lambda spec: str(spec.values))
def test_products_of_heads(plain: Module, spec: GdnSpec) -> None:
    weight = randn(ROWS, spec.values, seed=1, dtype=torch.bfloat16) * spec.values**-0.5
    core, gates = randn(2, spec.values, seed=1), randn(2, spec.values, seed=2)
    norm, old = randn(spec.value_dim, seed=3) * 0.1 + 1, randn(2, ROWS, seed=5)
    whole = old.clone()
    launch(plain, heads_product(spec, 8), weight, in_slices(core, gates, spec, norm), whole, None)
    x = normed(core.double(), gates.double(), spec, norm.double())
    assert error(whole, old.double() + x @ weight.double().t()) < 4e-3
    for shards in SHARDS[1:]:
        own, parts = shard_of(spec, shards), list[Tensor]()
        for first in range(0, spec.values, own.values):
            part = slice(first, first + own.values)
            left = heads_of(core[:, part], gates[:, part], own, norm, shards)
            parts.append(torch.empty_like(old))
            launch(plain, heads_product(own, 8, None, shards), weight[:, part].contiguous(), left, parts[-1], None)
        assert torch.equal(old + tree_sum(parts), whole), shards


# Tiles



def part_of(tiles: Tiles, columns: Tensor) -> Tiles:
    size, own = KINDS[tiles.type].nbytes, (columns[::TILE_COLUMNS] // TILE_COLUMNS).cuda()
    data = tiles.data.view(len(tiles.data), -1, size)[:, own].reshape(len(tiles.data), -1)
    return replace(tiles, data=data, columns=len(columns))


def known() -> list[PackedMultiply]:
    found: dict[PackedMultiply, None] = {}
    for kind, columns, runs in TILES:
        for shards in SHARDS:
            for own in own_columns(columns, TILE_COLUMNS, runs, shards):
                for high in (1, 2):
                    found[PackedMultiply(len(own), False, out_of(shards), frozenset({kind}), 1, high,
                                         split=split_of(shards, runs))] = None
    for shards in SHARDS:
        own = shard_of(HEADS[1], shards)
        for high in (1, 2):
            found[PackedMultiply(own.values, False, out_of(shards), frozenset({"Q4_K"}), 1, high, own.value_dim,
                                 gdn_slice(own, "few", shards), split_of(shards, 1))] = None
    return list(found)


@pytest.fixture(scope="module")
def packed_products() -> Module:
    found, count = known(), 12
    modules: Any = Modules([Shapes(tuple(found[index::count]), None, None, frozenset(KINDS)).source()
                            for index in range(count)])
    return modules  # type: ignore[no-any-return]


def multiply(module: Module, tiles: Tiles, x: Tensor, y: Tensor, shards: int, runs: int) -> bool:
    """Returns False if so many tokens are too many for the card."""
    product = product_of((tiles,), False, out_of(shards), BLOCKS, split=split_of(shards, runs))
    if len(x) > product.most:
        return False
    quantized_product.launch(module, product, (tiles,), len(x), BLOCKS, x=x, scale=None, y=y, eps=1e-6)
    torch.cuda.synchronize()
    return True


@pytest.mark.parametrize("rows", [1003, 150])
@pytest.mark.parametrize(("kind", "columns", "runs"), TILES)
def test_products_of_tiles(packed_products: Module, kind: str, columns: int, runs: int, rows: int) -> None:
    tiles, numbers = packed(kind, rows, columns, 7, "cuda")
    x, old = randn(16, columns, seed=2, dtype=torch.bfloat16), randn(16, rows, seed=3)
    alone = old.clone()
    for token in range(16):
        assert multiply(packed_products, tiles, x[token:token + 1], alone[token:token + 1], 1, runs)
    assert error(alone, old.double() + x.double() @ numbers.cuda().t()) < 5e-5
    for shards in SHARDS:
        devices = own_columns(columns, TILE_COLUMNS, runs, shards)
        own = [(part_of(tiles, index), x[:, index.cuda()].contiguous()) for index in devices]
        for tokens in range(1, 17) if own else ():
            parts = [old[:tokens].clone() for _ in own]
            served = [multiply(packed_products, part, columns_of_x[:tokens].contiguous(), y, shards, runs)
                      for (part, columns_of_x), y in zip(own, parts, strict=True)]
            if all(served):
                found = parts[0] if shards == 1 else old[:tokens] + tree_sum(parts)
                assert torch.equal(found, alone[:tokens]), f"{shards} devices, {tokens} tokens"


def test_products_of_tiles_of_heads(packed_products: Module) -> None:
    spec = HEADS[1]
    tiles, _ = packed("Q4_K", ROWS, spec.values, 7, "cuda")
    core, gates = randn(2, spec.values, seed=1), randn(2, spec.values, seed=2)
    norm, old = randn(spec.value_dim, seed=3) * 0.1 + 1, randn(2, ROWS, seed=5)
    whole = old.clone()
    multiply_whole(packed_products, (tiles,), in_slices(core, gates, spec, norm), None, whole, ADD, spec)
    for shards in SHARDS[1:]:
        own, parts = shard_of(spec, shards), list[Tensor]()
        for first in range(0, spec.values, own.values):
            columns = torch.arange(first, first + own.values)
            part, left = part_of(tiles, columns), heads_of(core[:, columns], gates[:, columns], own,
                                                                    norm, shards)
            parts.append(torch.empty_like(old))
            product = product_of((part,), False, PART, BLOCKS, own.value_dim, gdn_slice(own, "few", shards),
                                 split_of(shards, 1))
            quantized_product.launch(packed_products, product, (part,), 2, BLOCKS, x=left, scale=None, y=parts[-1],
                                     eps=1e-6)
        torch.cuda.synchronize()
        assert torch.equal(old + tree_sum(parts), whole), shards


# Mixtures


def device_of(weights: MoeWeights, shape: ExpertsShape, shards: int, rank: int) -> MoeWeights | None:
    """What one of several devices has of a mixture; None if its columns of the shared expert are no whole units."""
    each = SLICES // shards
    experts = [0, *slice_ends(shape.count, 1)]
    first, end = experts[rank * each], experts[(rank + 1) * each]
    own = replace(weights, experts=tuple(weights.experts[first:end]), shards=shards, first=first)
    if weights.shared is None:
        return own
    columns = [0, *slice_ends(shape.size, PLAIN_UNIT)]
    begin, stop = columns[rank * each], columns[(rank + 1) * each]
    if begin == stop or (stop - begin) % 8:
        return None
    gate_up, down = weights.shared.gate_up, weights.shared.down
    assert isinstance(gate_up, Tensor) and isinstance(down, Tensor)
    gate, up = gate_up.chunk(2)
    part = MlpWeights(torch.cat((gate[begin:stop], up[begin:stop])), down[:, begin:stop].contiguous(), shards=shards)
    return replace(own, shared=part)


@pytest.mark.parametrize("shape", [test_cuda_experts.TRUE, ExpertsShape(128, 88, 60, 9, True, True),
                                   ExpertsShape(64, 24, 20, 5, False, False)], ids=str)
def test_mixtures(shape: ExpertsShape) -> None:
    whole, device = test_cuda_experts.Mixture(shape), torch.device("cuda", torch.cuda.current_device())
    for shards in SHARDS[1:]:
        weights = [device_of(whole.weights, shape, shards, rank) for rank in range(shards)]
        if None in weights:
            continue
        shapes = {found for own in weights if own and (found := shape_of(own))}
        assert shapes == {replace(shape, shards=shards)}
        module = Module(test_cuda_experts.source(replace(shape, shards=shards)), device)
        ops = [(own, MoeOp(module, replace(shape, shards=shards), [own], BLOCKS)) for own in weights if own]
        for tokens in (1, 2, 3, 5, 8, 9, 16):
            residual, _, logits = whole.input(tokens)
            parts = [torch.full_like(residual, float("nan")) for _ in ops]
            for (own, op), part in zip(ops, parts, strict=True):
                op.gemv_rows(own, residual, whole.scale, 1e-6, logits.contiguous(), ALL_REAL, part)
            found = residual + tree_sum(parts)
            assert torch.equal(found, whole.few(residual, logits)), f"{shards} devices, {tokens} tokens"


@pytest.mark.parametrize("tokens", [17, 300, 1500])
@pytest.mark.parametrize("shape", [test_cuda_experts.TRUE, ExpertsShape(64, 24, 20, 5, False, False)], ids=str)
def test_mixtures_of_many_tokens(shape: ExpertsShape, tokens: int) -> None:
    """Each device has the sum over its experts, whatever the others have, and the share of what it is given."""
    whole, device = test_cuda_experts.Mixture(shape), torch.device("cuda", torch.cuda.current_device())
    x = whole.input(tokens)[1].bfloat16()
    wanted = whole.experts.gemm_rows(whole.weights, x).double()
    if shared := whole.wide.shared:
        assert isinstance(shared.gate_up, Tensor) and isinstance(shared.down, Tensor)
        assert isinstance(whole.wide.router, Tensor)
        gate, up = (x.double() @ shared.gate_up.t()).chunk(2, -1)
        share = (x.double() @ whole.wide.router[-1:].t()).sigmoid()
        wanted -= share * ((F.silu(gate) * up) @ shared.down.t())
    for shards in SHARDS[1:]:
        weights = [own for rank in range(shards) if (own := device_of(whole.weights, shape, shards, rank))]
        module = Module(test_cuda_experts.source(replace(shape, shards=shards)), device)
        total = torch.zeros_like(wanted)
        for own in weights:
            op = MoeOp(module, replace(shape, shards=shards), [own], BLOCKS)
            part = op.gemm_rows(own, x)
            assert torch.equal(op.gemm_rows(own, x), part) and not bool(op._counts.any())
            total += part
            if shared:
                more = randn(*x.shape, seed=shards).bfloat16()
                assert error(op.gemm_rows(own, x, shared=more), part + share * more.double()) < 8e-3
        assert len(weights) == shards and error(total, wanted) < 8e-3, shards


@pytest.mark.parametrize("name", ["Q5_K", "Q6_K", "none shared, halves of two kinds"])
def test_mixtures_of_tiles(name: str) -> None:
    """The sum is the tree of its parts: of each all that is not its own is made zero."""
    shape, device = test_cuda_packed_experts.SHAPES[name], torch.device("cuda", torch.cuda.current_device())
    weights = test_cuda_packed_experts.weights_of(shape)
    op = QuantizedMoeOp(Module(test_cuda_packed_experts.source(shape), device), shape, [weights], BLOCKS)
    scale = randn(shape.hidden, seed=3) * 0.1 + 1
    downs = [part.down for part in weights.parts]
    saved = [down.data.clone() for down in downs if isinstance(down, Tiles)]
    assert len(saved) == len(downs)
    experts, tiles = ([0, *slice_ends(count, 1)] for count in (shape.count, shape.size // TILE_COLUMNS))
    residual = randn(16, shape.hidden, seed=1)
    logits = randn(16, shape.count + shape.shared, seed=2)

    def mixture() -> Tensor:
        y = torch.zeros_like(residual)
        op.gemv_rows(weights, residual, scale, 1e-6, logits, ALL_REAL, y)
        return y

    whole, parts = mixture(), list[Tensor]()
    for index in range(SLICES):
        for number, (down, data) in enumerate(zip(downs, saved, strict=True)):
            assert isinstance(down, Tiles)
            own = data.view(len(data), -1, KINDS[down.type].nbytes)
            keep = torch.zeros(own.shape[1], dtype=torch.bool, device=device)
            if number < shape.count:
                keep[:] = experts[index] <= number < experts[index + 1]
            else:
                keep[tiles[index]:tiles[index + 1]] = True
            down.data.copy_((own * keep[:, None]).view_as(data))
        parts.append(mixture())
    assert bool(whole.isfinite().all()) and float(whole.norm()) > 0
    assert torch.equal(tree_sum(parts), whole)
