"""Linear layers and norms on MLX arrays, with plain or packed weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import torch
from torch import Tensor

from deltic.ops.mlx.memory import Array, array_of, copied, seen, share
from deltic.ops.quantized import QTensor
from deltic.ops.types import Block, Weight


@dataclass(frozen=True, slots=True)
class Packed:
    """A quantized matrix, or a stack of them, in the format of `mx.quantized_matmul`.

    codes [.., out, in * bits / 32] uint32. scales, biases [.., out, in / group]; biases are None in modes without them.
    mode: MLX's name of the format.
    """

    codes: Array
    scales: Array
    biases: Array | None
    group: int
    bits: int
    mode: str = "affine"

    @property
    def form(self) -> tuple[int, int, str]:
        return self.group, self.bits, self.mode

    @property
    def arrays(self) -> list[Array]:
        return [part for part in (self.codes, self.scales, self.biases) if part is not None]

    def map(self, function: Callable[[Array], Array]) -> Packed:
        """Returns a matrix with the function applied to each array."""
        biases = None if self.biases is None else function(self.biases)
        return replace(self, codes=function(self.codes), scales=function(self.scales), biases=biases)

    def entry(self, index: int) -> Packed:
        """Returns one matrix of a stack, on the stack's memory."""
        return self.map(lambda part: part[index:index + 1].squeeze(0))

    def plain(self) -> Array:
        """Returns the dequantized matrix in the dtype of the scales."""
        found: Array = mx.dequantize(self.codes, self.scales, self.biases, self.group, self.bits, self.mode)
        return found


Matrix = Array | Packed | tuple[Array | Packed, ...]


@dataclass(frozen=True, slots=True, eq=False)
class MlxMatrix(QTensor):
    """A matrix in MLX's packed format. data: the codes. matrix: `Packed`. stack: the stack of all experts' matrices, if
    this matrix is part of one."""

    stack: Packed | None = None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.matrix.arrays)

    @classmethod
    def of(cls, type: str, packed: Packed, stack: Packed | None = None) -> MlxMatrix:
        """Wraps a packed matrix. type: the name of its format."""
        mx.eval(*packed.arrays)
        rows, words = packed.codes.shape
        return cls(type, rows, words * 32 // packed.bits, seen(packed.codes), packed, stack)

    def joined(self, other: QTensor) -> QTensor | None:
        if not isinstance(other, MlxMatrix) or other.matrix.form != self.matrix.form:
            return None
        return MlxMatrix.of(self.type, together([self.matrix, other.matrix], mx.concatenate))

    def row_view(self, first: int, end: int) -> QTensor:
        return MlxMatrix.of(self.type, self.matrix.map(lambda part: part[first:end]))

    def room_for(self, rows: int) -> QTensor:
        def empty(part: Array) -> Array:
            return mx.zeros((rows, part.shape[1]), part.dtype)

        return MlxMatrix.of(self.type, self.matrix.map(empty))

    def put(self, places: Tensor, source: QTensor, rows: Tensor) -> None:
        assert isinstance(source, MlxMatrix)
        for own, other in zip(self.matrix.arrays, source.matrix.arrays, strict=True):
            seen(own)[places] = seen(other)[rows]

    def lookup(self, ids: Tensor) -> Tensor:
        wanted = copied(ids)
        return seen(self.matrix.map(lambda part: part[wanted]).plain().astype(mx.float32))


def together(parts: Sequence[Packed], function: Callable[[list[Array]], Array]) -> Packed:
    biases = [part.biases for part in parts if part.biases is not None]
    return replace(parts[0], codes=function([part.codes for part in parts]),
                   scales=function([part.scales for part in parts]), biases=function(biases) if biases else None)


def stack_of(type: str, parts: Sequence[Packed]) -> tuple[MlxMatrix, ...]:
    """Returns matrices of one format in common memory. type: the name of their format."""
    stack = together(parts, mx.stack)
    mx.eval(*stack.arrays)
    return tuple(MlxMatrix.of(type, stack.entry(index), stack) for index in range(len(parts)))


def pack(weight: Tensor, table: bool) -> Block:
    """Moves a weight to MLX memory."""
    return share(copied(weight))


def matrix_of(weight: Weight) -> Matrix:
    """Returns a weight as arrays, without a copy if it is in MLX memory."""
    if isinstance(weight, tuple):
        return tuple(_block(block) for block in weight)
    return _block(weight)


def _block(block: Block) -> Array | Packed:
    if isinstance(block, MlxMatrix):
        packed: Packed = block.matrix
        return packed
    if isinstance(block, QTensor):
        return copied(block.dequantize())
    return array_of(block if block.dtype != torch.float64 else block.float())


def product(x: Array, matrix: Matrix) -> Array:
    """Returns x weightᵀ: x [T, in] -> [T, out] in x's dtype."""
    if isinstance(matrix, tuple):
        return mx.concatenate([product(x, block) for block in matrix], axis=-1)
    if isinstance(matrix, Packed):
        scales, biases = matrix.scales, matrix.biases
        if biases is not None:  # scales without biases keep their own dtypes
            scales, biases = scales.astype(x.dtype), biases.astype(x.dtype)
        return mx.quantized_matmul(x, matrix.codes, scales, biases, True, matrix.group, matrix.bits, matrix.mode)
    return x @ matrix.astype(x.dtype).T


def rows_of(matrix: Matrix, ids: Array) -> Array:
    """Returns the rows `ids` of a matrix."""
    assert not isinstance(matrix, tuple)
    if isinstance(matrix, Packed):
        return matrix.map(lambda part: part[ids]).plain()
    return matrix[ids]


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """Returns the scaled RMS norm over the last axis. Computes in float32 and rounds once to x's dtype."""
    return mx.fast.rms_norm(x.astype(mx.float32), scale, eps).astype(x.dtype)


def vector(tensor: Tensor | None) -> Any:
    """Returns a small weight in float32, or None."""
    return None if tensor is None else copied(tensor.float())

