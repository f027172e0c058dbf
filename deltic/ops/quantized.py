"""Matrices that stay packed: quantized blocks, or plain numbers in the order that the compiled kernels read."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deltic.ops.memory import Arena

PLAIN_TYPES = {torch.float32: ("F32", 0), torch.float16: ("F16", 1), torch.bfloat16: ("BF16", 30)}
"""Name and number of the GGUF type that a dtype is."""
PANEL = 16
"""Rows that are packed together."""
_PIECE = 16 << 20
"""Bytes that are read and packed at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class QTensor:
    """A matrix [rows, columns] packed as csrc/matrix.hpp says.

    type: name of its GGUF type.
    data: uint8, aligned.
    matrix: the struct by which the kernels know it.
    """

    type: str
    rows: int
    columns: int
    data: Tensor
    matrix: Any

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    def __len__(self) -> int:
        return self.rows

    @property
    def nbytes(self) -> int:
        return self.data.numel()

    def room_for(self, rows: int) -> QTensor:
        """A matrix of this form with so many rows, a multiple of PANEL, for `put` to fill."""
        data = Arena().take(self.nbytes // -(-self.rows // PANEL) * (rows // PANEL))
        matrix = self.matrix.__class__(self.matrix.type, rows, self.columns, data.data_ptr())
        return replace(self, rows=rows, data=data, matrix=matrix)

    def put(self, places: Tensor, source: QTensor, rows: Tensor) -> None:
        """Overwrite the rows `places` [N] with the rows `rows` [N] of a matrix of the same form, all int64."""
        from deltic.ops.cpu.library import library

        places, rows = places.contiguous(), rows.contiguous()
        library().deltic_copy_rows(byref(source.matrix), rows.data_ptr(), len(rows), byref(self.matrix),
                                   places.data_ptr())

    def joined(self, other: QTensor) -> QTensor | None:
        """One matrix of the rows of both, where that is worth a copy."""
        return None

    def lookup(self, ids: Tensor) -> Tensor:
        """The rows `ids` [N] int64 as float32 [N, columns]."""
        from deltic.ops.cpu.library import library

        out = torch.empty(len(ids), self.columns)
        wanted = ids.contiguous()
        library().deltic_unpack_rows(byref(self.matrix), wanted.data_ptr(), len(ids), out.data_ptr())
        return out

    def dequantize(self) -> Tensor:
        """The whole matrix in float32."""
        return self.lookup(torch.arange(self.rows))


@dataclass(frozen=True, slots=True)
class PackedForm:
    """How a device has quantized matrices.

    pack: of (type, its number, rows, columns, bytes of a row, read) makes the matrix, as `pack_rows` does.
    serves(type, columns): whether such a matrix can stay packed.
    dtype: of what cannot, and of convolutions.
    device: where all tensors lie.
    stack: of (type, its number, count, rows, columns, bytes of a row, read) makes so many matrices [rows, columns] that
        lie one behind the other; None: they are made one by one.
    """

    pack: Callable[[str, int, int, int, int, Callable[[int, int], Any]], QTensor]
    serves: Callable[[str, int], bool]
    dtype: torch.dtype
    device: torch.device
    stack: Callable[[str, int, int, int, int, int, Callable[[int, int], Any]], tuple[QTensor, ...]] | None = None


def read_from(read: Callable[[int, int], Any], first: int, start: int, count: int) -> Any:
    """What `read` gives of bytes that are counted from `first` on."""
    return read(first + start, count)


def host_form(arena: Arena | None = None) -> PackedForm:
    """Of the CPU's compiled kernels; matrices of one form lie beside each other, in the arena if one is given."""
    return PackedForm(partial(pack_rows, arena=arena or Arena()), lambda type, columns: True, torch.float32,
                torch.device("cpu"))


def pack_rows(type: str, number: int, rows: int, columns: int, row_bytes: int, read: Callable[[int, int], Any],
              arena: Arena) -> QTensor:
    """Pack a matrix whose rows take `row_bytes` in a file or tensor; `read(start, count)` gives its bytes as a
    contiguous uint8 array or tensor. Piece by piece, so that memory stays near the size of the result, which lies in
    the arena, beside the model's other matrices."""
    from deltic.ops.cpu.library import MatrixStruct, library

    size = library().deltic_packed_bytes(number, rows, columns)
    if size < 0:
        raise ValueError(f"a matrix of {columns} columns cannot be packed as {type}")
    data = arena.take(size)
    step = max(PANEL, _PIECE // row_bytes // PANEL * PANEL)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        piece = torch.as_tensor(read(first * row_bytes, count * row_bytes))
        library().deltic_pack(number, piece.data_ptr(), first, count, columns, data.data_ptr())
    return QTensor(type, rows, columns, data, MatrixStruct(number, rows, columns, data.data_ptr()))


def pack_tensor(weight: Tensor, arena: Arena) -> QTensor:
    """Pack a matrix [rows, columns] of float32, float16 or bfloat16."""
    name, number = PLAIN_TYPES[weight.dtype]
    raw = weight.contiguous().view(-1).view(torch.uint8)
    rows, columns = weight.shape
    return pack_rows(name, number, rows, columns, columns * weight.itemsize,
                     lambda start, count: raw[start:start + count], arena)
