"""The compiled kernels sum products over split columns in the order of `ops.slices`, at every processor level."""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from native_pools import at_every_level, native_ops, pool
from op_cases import same_bits
from support import every
from test_gguf_blocks import READABLE
from test_ops_linear_cpu import WORDS, activations, file_rows, layer, multiply, packed
from torch import Tensor
from torch.nn.functional import pad

from deltic.loader.gguf.blocks import BY_NAME
from deltic.ops import reference
from deltic.ops.cpu import missing
from deltic.ops.cpu.kernels import sliced_weight
from deltic.ops.cpu.library import LEVELS, library
from deltic.ops.quantized import QTensor
from deltic.ops.slices import SLICES, column_slices, slice_ends, slice_unit, tree_sum
from deltic.ops.types import MlpWeights, MoeWeights, Weight

pytestmark = pytest.mark.skipif(bool(missing()), reason=str(missing()))

TOKENS = (1, 2, 3, 8, 13)
SHARDS = (2, 4, 8)
Columns = list[slice]


def widths(name: str) -> tuple[int, ...]:
    """Columns of which slices are equal, unequal and empty; those of blocks of 32 are and are not multiples of 256."""
    if name in WORDS:
        return (7, 96, 208, 1280)
    return (768, 2048) if BY_NAME[name].weights == 256 else (416, 768, 2048)


def cut(name: str, rows: int, columns: int, ranges: Columns, own: slice = slice(None), tile: int = 1) -> QTensor:
    """These columns of the rows `own` of `layer`; behind each range zeros, up to a multiple of `tile` columns."""
    weights = BY_NAME[name].weights
    blocks = file_rows(name, rows, columns).reshape(rows, columns // weights, -1)[own]
    parts = [np.pad(blocks[:, part.start // weights:part.stop // weights],
                    ((0, 0), (0, missing_of(part, tile)), (0, 0))) for part in ranges]
    raw = np.ascontiguousarray(np.concatenate(parts, 1).reshape(len(blocks), -1))
    return packed(name, raw, sum(part.stop - part.start + missing_of(part, tile) for part in ranges))


def taken(x: Tensor, ranges: Columns, tile: int = 1) -> Tensor:
    return torch.cat([pad(x[:, own], (0, missing_of(own, tile))) for own in ranges], 1)


def missing_of(part: slice, tile: int) -> int:
    """Columns that a range lacks to a multiple of `tile`."""
    return -(part.stop - part.start) % tile


def multiply_sliced(x: Tensor, weight: Weight, shards: int = 1, runs: int = 1) -> Tensor:
    given, rows = x.contiguous(), sum(map(len, weight)) if isinstance(weight, tuple) else len(weight)
    y, struct = torch.full((len(x), rows), torch.nan), sliced_weight(weight, shards, runs)
    pool().call(library().deltic_linear, given.data_ptr(), len(x), byref(struct), y.data_ptr())
    return y


def shards_of(slices: list[Columns], shards: int, runs: int) -> list[Columns]:
    """The ranges of each shard, run by run."""
    each = SLICES // shards
    groups = [slices[shard * each:(shard + 1) * each] for shard in range(shards)]
    return [[own[run] for run in range(runs) for own in group] for group in groups]


@pytest.mark.covering
@pytest.mark.parametrize("runs", [1, 2])
@pytest.mark.parametrize("name", READABLE)
@at_every_level
def test_a_product_is_the_sum_of_its_slices_and_of_its_shards(name: str, runs: int) -> None:
    for columns in widths(name):
        unit, rows = slice_unit(name, columns), 37
        if runs > 1 and columns // runs % unit:
            continue
        slices = column_slices(columns, unit, runs)
        x, weight = activations(TOKENS[-1], columns), layer(name, rows, columns)[0]
        # a tile of AMX has 32 columns of one run
        tile = 32 if name == "BF16" and LEVELS[pool().level] == "amx" else 1
        parts = [multiply(taken(x, own, tile), cut(name, rows, columns, own, tile=tile))
                 if own[0].start < own[0].stop else torch.zeros(len(x), rows) for own in slices]
        whole = multiply_sliced(x, weight, 1, runs)
        assert same_bits(whole, tree_sum(parts)), columns
        for tokens in TOKENS:
            assert same_bits(multiply_sliced(x[-tokens:], weight, 1, runs), whole[-tokens:]), (columns, tokens)
        for shards in SHARDS:
            sums = []
            for own in shards_of(slices, shards, runs):
                size = sum(part.stop - part.start for part in own)
                assert not size or slice_unit(name, size) == unit, "the case would round activations in other blocks"
                sums.append(multiply_sliced(taken(x, own), cut(name, rows, columns, own), shards, runs) if size
                            else torch.zeros(len(x), rows))
            assert same_bits(tree_sum(sums), whole), (columns, shards)


@at_every_level
def test_runs_that_end_within_blocks_are_not_sliced() -> None:
    x, weight = activations(3, 1280), layer("Q8_0", 37, 1280)[0]
    assert same_bits(multiply_sliced(x, weight, 1, 2), multiply(x, weight))
    assert not same_bits(multiply_sliced(x, weight), multiply(x, weight))


@at_every_level
def test_row_blocks_have_slices_of_their_own() -> None:
    blocks = tuple(layer(name, rows, 768)[0] for name, rows in (("Q4_K", 17), ("F32", 1), ("Q8_0", 37)))
    x = activations(5, 768)
    assert same_bits(multiply_sliced(x, blocks), torch.cat([multiply_sliced(x, block) for block in blocks], 1))


@dataclass(frozen=True)
class FeedForward:
    """A quantized feed-forward of 256 numbers, of which parts are taken. types: of gate and up, and of down."""

    types: tuple[str, str]
    inner: int

    def shard(self, index: int = 0, shards: int = 1) -> MlpWeights:
        ends = [0, *slice_ends(self.inner, slice_unit(self.types[1], self.inner), shards)]
        return self.part(slice(ends[index], ends[index + 1]), shards)

    def part(self, own: slice, shards: int = 1) -> MlpWeights:
        up = cut(self.types[0], self.inner, 256, [slice(0, 256)], own)
        return MlpWeights((up, up), cut(self.types[1], 256, self.inner, [own]), shards=shards)


@pytest.mark.parametrize("types", every(3, [("Q4_K", "Q6_K"), ("Q8_0", "Q4_0"), ("BF16", "F16")]))
@at_every_level
def test_quantized_feed_forwards_and_mixtures_are_the_sums_of_their_shards(types: tuple[str, str]) -> None:
    ops, x = native_ops(), activations(9, 256)
    dense = FeedForward(types, 2048)
    whole, router = ops.mlp(x, dense.shard()), layer("F32", 12, 256)[0]
    many = FeedForward(types, 11 * 256)
    experts = tuple(many.part(slice(256 * expert, 256 * expert + 256)) for expert in range(11))
    mixture = MoeWeights(router, experts, dense.shard(), 4, True)
    mixed = ops.moe(x, mixture)
    for shards in SHARDS:
        own = [dense.shard(index, shards) for index in range(shards)]
        assert same_bits(tree_sum([ops.mlp(x, shard) for shard in own]), whole), shards
        ends = [0, *slice_ends(11, 1, shards)]
        parts = [replace(mixture, experts=experts[ends[index]:ends[index + 1]], shared=own[index], shards=shards,
                         first=ends[index]) for index in range(shards)]
        assert same_bits(tree_sum([ops.moe(x, part) for part in parts]), mixed), shards
    assert reference.moe(x, mixture).sub(mixed).norm() < 0.05 * mixed.norm()
