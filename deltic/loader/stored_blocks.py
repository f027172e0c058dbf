"""Quantized weights of safetensors that keep their stored quantization, for kernels that multiply them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from deltic.loader.gguf.blocks import BlockType
from deltic.loader.tensors import PackedRows, PackedTensor, Source
from deltic.ops.parts import Part, Shape
from deltic.ops.quantized import PackedForm

_PIECE = 4 << 20
"""Number of weights that are dequantized at once."""
_MOST_SHARED = 128
"""Maximum number of columns that share a scale in blocks."""


def block_type(source: Source, form: PackedForm) -> BlockType | None:
    """Returns the type of the blocks in which this form keeps a weight quantized; None if the weight is dequantized."""
    types = {part.format.blocks(part) if isinstance(part, PackedTensor) else None for part in source.parts}
    found, columns = types.pop(), source.shape[-1]
    fits = found is not None and not types and columns % found.weights == 0 and form.serves(found.name, columns)
    return found if fits else None


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """A device's part of a weight that stays quantized.

    sources: the matrix, or the matrices of a stack, all of one format.
    stacked: True if the weight is a stack.
    type: type of the blocks.
    dtype: dtype of the weight if it is dequantized after all.
    rows: row indices of the part within each matrix, in order, int64. columns: ranges of its columns; None: all.
    """

    sources: tuple[PackedTensor, ...]
    stacked: bool
    type: BlockType
    dtype: torch.dtype
    rows: Tensor
    columns: tuple[slice, ...] | None = None

    @property
    def shape(self) -> Shape:
        matrix = len(self.rows), sum(own.stop - own.start for own in self.columns or (slice(0, self._width),))
        return (len(self.sources), *matrix) if self.stacked else matrix

    @property
    def _width(self) -> int:
        return self.sources[0].shape[-1]

    def read(self, start: int, count: int) -> Tensor:
        """Returns bytes of whole rows of blocks, one matrix after another, uint8 [count]. Raises InexactError
        with the reason if the blocks cannot hold the weight without rounding."""
        size, found = self.type.size(self.shape[-1]), list[Tensor]()
        first, end = start // size, (start + count) // size
        while first < end:
            index, row = divmod(first, len(self.rows))
            stop = min(row + end - first, len(self.rows))
            found.append(self._records(index, row, stop).blocks())
            first += stop - row
        return torch.cat(found).flatten()

    def numbers(self) -> Tensor:
        """Returns the weight, dequantized."""
        result = torch.empty(self.shape, dtype=self.dtype)
        step = max(1, _PIECE // self.shape[-1])
        for index, matrix in enumerate(result.view(-1, *self.shape[-2:])):
            for first in range(0, len(matrix), step):
                piece = matrix[first:first + step]
                piece.copy_(self._records(index, first, first + len(piece)).numbers())
        return result

    def _records(self, index: int, first: int, end: int) -> PackedRows:
        rows = self.rows[first:end]
        low, high = int(rows.min()), int(rows.max()) + 1
        found = self.sources[index].read(low, high)
        own = None if high - low == len(rows) and bool((rows.diff() == 1).all()) else rows - low
        if own is None and self.columns is None:
            return found
        matrices = {each.name: value for each in fields(found)
                    if isinstance(value := getattr(found, each.name), Tensor) and value.dim() == 2}
        return replace(found, **{name: self._cut(value, own) for name, value in matrices.items()})

    def _cut(self, matrix: Tensor, rows: Tensor | None) -> Tensor:
        """Returns these rows and the part's columns of a matrix of codes, or of a matrix of scales of column groups."""
        if rows is not None:
            matrix = matrix[rows]
        if self.columns is None:
            return matrix
        each = self._width / matrix.shape[1]
        if each > _MOST_SHARED:
            matrix, each = matrix.repeat_interleave(int(each) // _MOST_SHARED, 1), _MOST_SHARED
        return torch.cat([matrix[:, int(own.start / each):int(own.stop / each)] for own in self.columns], 1)


def stored_blocks(sources: Sequence[PackedTensor], stacked: bool, type: BlockType, dtype: torch.dtype, part: Part,
                  rows: Tensor) -> StoredBlocks:
    """Returns a part of a weight: some matrices of a stack, or some rows or columns of a matrix."""
    if part.ranges is not None and stacked:
        sources = [source for own in part.ranges for source in sources[own]]
    elif part.ranges is not None and not part.columns:
        rows = torch.cat([rows[own] for own in part.ranges])
    columns = part.ranges if part.columns else None
    return StoredBlocks(tuple(source.loaded() for source in sources), stacked, type, dtype, rows, columns)
