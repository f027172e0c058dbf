"""The fixed order in which products over split columns are summed, so that their bits do not depend on the number of
devices.

A weight whose columns are spread over devices (an output projection, `down` of a feed-forward) is always multiplied in
SLICES slices of its columns, on one device too. A slice is summed in float32 from its first column to its last one.
Slices are added in pairs, then these sums in pairs, and so on. A device of N has SLICES / N neighbouring slices, so
that its sum is one subtree.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from deltic.ops.quantized import QTensor
from deltic.ops.types import Block, Weight

SLICES: Final = 8
"""Slices of a layer's columns; also the largest number of devices."""
PLAIN_UNIT: Final = 16
"""Columns that a slice of plain numbers is a multiple of."""
def slice_ends(columns: int, unit: int, count: int = SLICES) -> list[int]:
    """Returns the ends of `count` slices, a power of two. They are multiples of `unit` columns, and equal if they can
    be; otherwise the first half of what is split is the longer one. A slice may be empty."""
    if count == 1:
        return [columns]
    units = -(-columns // unit)
    first = min((units + 1) // 2 * unit, columns)
    return [*slice_ends(first, unit, count // 2),
            *(first + end for end in slice_ends(columns - first, unit, count // 2))]


def column_slices(columns: int, unit: int, runs: int = 1, shards: int = 1) -> list[list[slice]]:
    """Returns the columns of each of SLICES / shards slices, in the order in which they are summed.

    columns: of one of the shards.
    runs: equal runs of columns, each of which is sliced by itself, so that a slice has a range of each. A Gated
    DeltaNet layer whose value heads are `tiled` has one run for each value head of a key head: then the value heads of
    a slice belong to neighbouring key heads. If such a run is no multiple of the unit, slices would end within units:
    the first slice has all columns.
    """
    width = columns // runs
    if runs > 1 and width % unit:
        runs, width, unit = 1, columns, max(unit, columns)
    ends = [0, *slice_ends(width, unit, SLICES // shards)]
    return [[slice(run * width + ends[index], run * width + ends[index + 1]) for run in range(runs)]
            for index in range(SLICES // shards)]


def slice_unit(type: str, columns: int) -> int:
    """Returns the columns that slices of a matrix are multiples of. type: of its blocks in GGUF files, or of plain
    numbers (F32, F16, BF16)."""
    if type in ("F32", "F16", "BF16"):
        return PLAIN_UNIT
    return 256 if columns % 256 == 0 else 32


def slice_products(multiply: Callable[[Tensor, Block], Tensor], x: Tensor, weight: Weight, shards: int = 1,
                   runs: int = 1) -> list[Tensor]:
    """Returns the products of x [T, in] with each slice of a weight [out, in] of one of the shards, [T, out] each.

    multiply(x, weight): of contiguous memory, so that the library's order of additions cannot depend on the columns
    that lie beside a slice. Blocks of different formats are sliced each in its own units.
    """
    if isinstance(weight, tuple):
        blocks = [slice_products(multiply, x, block, shards, runs) for block in weight]
        return [torch.cat(parts, dim=-1) for parts in zip(*blocks, strict=True)]
    unit = slice_unit(weight.type, weight.columns) if isinstance(weight, QTensor) else PLAIN_UNIT
    plain = unpacked(weight)
    return [multiply(_copied(x, ranges), _copied(plain, ranges))
            for ranges in column_slices(plain.shape[1], unit, runs, shards)]


def _copied(matrix: Tensor, ranges: list[slice]) -> Tensor:
    return torch.cat([matrix[:, columns] for columns in ranges], dim=-1)


def unpacked(weight: Block) -> Tensor:
    """Returns the matrix that a backend may have packed."""
    if isinstance(weight, QTensor):
        return weight.dequantize()
    return weight.to_dense() if weight.is_mkldnn else weight


def expert_slices(count: int, shards: int = 1) -> list[int]:
    """Returns the slice to which each expert of one of the shards belongs, counted from the shard's first slice."""
    ends = slice_ends(count, 1, SLICES // shards)
    return [bisect_right(ends, expert) for expert in range(count)]


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """Returns the sum of a power of two of parts, added in pairs."""
    while len(parts) > 1:
        parts = [one + other for one, other in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]
