"""Defines a fixed order of summation for products over split columns, so that their bits do not depend on the number of
devices.

Output projections and `down` of feed-forwards have their columns split over devices. Such a weight is always multiplied
in SLICES slices of its columns, even on one device. Each slice is summed in float32 from its first to its last column.
Slices are added in pairs, then these sums in pairs, and so on. Each of N devices has SLICES / N neighbouring slices, so
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
"""Number of slices of a layer's columns, and maximum number of devices."""
PLAIN_UNIT: Final = 16
"""The width of a slice of unquantized columns is a multiple of this number."""


def slice_ends(columns: int, unit: int, count: int = SLICES) -> list[int]:
    """Returns the ends of `count` slices; count is a power of two. Slices are multiples of `unit` columns and equal if
    possible; otherwise the first half of each split is the longer one. A slice may be empty."""
    if count == 1:
        return [columns]
    units = -(-columns // unit)
    first = min((units + 1) // 2 * unit, columns)
    return [*slice_ends(first, unit, count // 2),
            *(first + end for end in slice_ends(columns - first, unit, count // 2))]


def column_slices(columns: int, unit: int, runs: int = 1, shards: int = 1) -> list[list[slice]]:
    """Returns the columns of each of SLICES / shards slices, in the order in which they are summed.

    columns: number of columns of one shard.
    runs: number of equal runs of columns. Each run is sliced separately, and a slice has one range in each run. A Gated
    DeltaNet layer with `tiled` value heads has one run for each value head of a key head, so that the value heads of a
    slice belong to neighbouring key heads. If a run is not a multiple of the unit, slices would end within units; then
    the first slice has all columns.
    """
    width = columns // runs
    if runs > 1 and width % unit:
        runs, width, unit = 1, columns, max(unit, columns)
    ends = [0, *slice_ends(width, unit, SLICES // shards)]
    return [[slice(run * width + ends[index], run * width + ends[index + 1]) for run in range(runs)]
            for index in range(SLICES // shards)]


def slice_unit(type: str, columns: int) -> int:
    """Returns the unit of slices: the columns of each slice are a multiple of it. type: GGUF type of its blocks, or of
    unquantized numbers (F32, F16, BF16)."""
    if type in ("F32", "F16", "BF16"):
        return PLAIN_UNIT
    return 256 if columns % 256 == 0 else 32


def slice_products(multiply: Callable[[Tensor, Block], Tensor], x: Tensor, weight: Weight, shards: int = 1,
                   runs: int = 1) -> list[Tensor]:
    """Returns the products of x [T, in] with each slice of one shard's weight [out, in], [T, out] each.

    multiply(x, weight): multiplies the columns of one slice. Blocks of different formats are sliced in their own units.
    """
    if isinstance(weight, tuple):
        blocks = [slice_products(multiply, x, block, shards, runs) for block in weight]
        return [torch.cat(parts, dim=-1) for parts in zip(*blocks, strict=True)]
    unit = slice_unit(weight.type, weight.columns) if isinstance(weight, QTensor) else PLAIN_UNIT
    plain = unpacked(weight)
    return [multiply(_columns(x, ranges), _columns(plain, ranges))
            for ranges in column_slices(plain.shape[1], unit, runs, shards)]


def _columns(matrix: Tensor, ranges: list[slice]) -> Tensor:
    """Returns the columns in `ranges`. On a CPU this is a copy: the library's order of additions depends on strides."""
    if len(ranges) == 1 and matrix.device.type != "cpu":
        return matrix[:, ranges[0]]
    return torch.cat([matrix[:, columns] for columns in ranges], dim=-1)


def unpacked(weight: Block) -> Tensor:
    """Returns the plain matrix of a weight that a backend may have packed."""
    if isinstance(weight, QTensor):
        return weight.dequantize()
    return weight.to_dense() if weight.is_mkldnn else weight


def expert_slices(count: int, shards: int = 1) -> list[int]:
    """Returns the slice index of each expert of one shard, counted from the shard's first slice."""
    ends = slice_ends(count, 1, SLICES // shards)
    return [bisect_right(ends, expert) for expert in range(count)]


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """Returns the sum of the parts, added in pairs. Their number is a power of two."""
    while len(parts) > 1:
        parts = [one + other for one, other in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]
