"""Packed matrices: quantized blocks, or unquantized numbers, in the memory order of the compiled kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ctypes import byref
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deltic.ops.memory import Arena

PLAIN_TYPES = {torch.float32: ("F32", 0), torch.float16: ("F16", 1), torch.bfloat16: ("BF16", 30)}
"""Name and number of the GGUF type for each dtype."""
PANEL = 16
"""Number of rows that are packed together."""
_PIECE_BYTES = 1 << 19
"""Bytes that are read and packed at once. Checkpoint formats may unpack to several times this size."""


@dataclass(frozen=True, slots=True, eq=False)
class QTensor:
    """A matrix [rows, columns] packed as in csrc/matrix.hpp. type: name of its GGUF type. data: uint8, aligned. matrix:
    the kernels' struct."""

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
        """Returns an empty matrix of this format for `put` to fill. rows: a multiple of PANEL."""
        return self._with(rows, self.columns, Arena().take(self.nbytes // -(-self.rows // PANEL) * (rows // PANEL)))

    def put(self, places: Tensor, source: QTensor, rows: Tensor) -> None:
        """Overwrites rows `places` [N] with rows `rows` [N] of a matrix of the same format. Both are int64."""
        from deltic.ops.cpu.library import library

        places, rows = places.contiguous(), rows.contiguous()
        library().deltic_copy_rows(byref(source.matrix), rows.data_ptr(), len(rows), byref(self.matrix),
                                   places.data_ptr())

    def row_view(self, first: int, end: int) -> QTensor:
        """Returns a view of rows first .. end - 1. Both are multiples of PANEL, or end is the number of rows."""
        assert first % PANEL == 0 and (end % PANEL == 0 or end == self.rows)
        size = self.nbytes // -(-self.rows // PANEL)
        return self._with(end - first, self.columns, self.data[first // PANEL * size:-(-end // PANEL) * size])

    def _with(self, rows: int, columns: int, data: Tensor) -> QTensor:
        return replace(self, rows=rows, columns=columns, data=data,
                       matrix=self.matrix.__class__(self.matrix.type, rows, columns, data.data_ptr()))

    def joined(self, other: QTensor) -> QTensor | None:
        """Returns one matrix with the rows of both if a copy is worthwhile, else None."""
        return None

    def lookup(self, ids: Tensor) -> Tensor:
        """Returns the rows `ids` [N] int64 as float32 [N, columns]."""
        from deltic.ops.cpu.library import library

        out = torch.empty(len(ids), self.columns)
        wanted = ids.contiguous()
        library().deltic_unpack_rows(byref(self.matrix), wanted.data_ptr(), len(ids), out.data_ptr())
        return out

    def dequantize(self) -> Tensor:
        """Returns the whole matrix in float32."""
        return self.lookup(torch.arange(self.rows))


@dataclass(frozen=True, slots=True)
class PackedForm:
    """The packed format of matrices on a device.

    pack(type, number, rows, columns, bytes of a row, read) -> matrix, as `pack_rows`.
    serves(type, columns): True if such a matrix can stay packed.
    dtype: of other matrices and of convolutions. device: of all tensors.
    stack(type, number, count, rows, columns, bytes of a row, read) -> `count` consecutive matrices. None: matrices
    are packed one by one.
    placed: different formats for single tensors, by tensor name.
    """

    pack: Callable[[str, int, int, int, int, Callable[[int, int], Any]], QTensor]
    serves: Callable[[str, int], bool]
    dtype: torch.dtype
    device: torch.device
    stack: Callable[[str, int, int, int, int, int, Callable[[int, int], Any]], tuple[QTensor, ...]] | None = None
    placed: Mapping[str, PackedForm] = field(default_factory=dict)

    def of(self, name: str) -> PackedForm:
        """Returns the format of the tensor `name`."""
        return self.placed.get(name, self)

    def put(self, name: str, tensor: Tensor) -> Tensor:
        """Moves an unquantized tensor to the device of its format."""
        return tensor.to(self.placed[name].device) if name in self.placed else tensor


def read_from(read: Callable[[int, int], Any], first: int, start: int, count: int) -> Any:
    """Calls `read` with `start` relative to `first`."""
    return read(first + start, count)


def host_form(arena: Arena | None = None) -> PackedForm:
    """Returns the format of the CPU kernels, with all matrices in one arena."""
    return PackedForm(partial(pack_rows, arena=arena or Arena()), lambda type, columns: type != "FP8", torch.float32,
                torch.device("cpu"))


def pack_rows(type: str, number: int, rows: int, columns: int, row_bytes: int, read: Callable[[int, int], Any],
              arena: Arena) -> QTensor:
    """Packs a matrix with rows of `row_bytes` bytes in a file or tensor into the arena. read(start, count): returns its
    bytes as a contiguous uint8 array or tensor. Packs piece by piece, so that it needs little memory besides the
    result."""
    from deltic.ops.cpu.library import MatrixStruct, library

    size = library().deltic_packed_bytes(number, rows, columns)
    if size < 0:
        raise ValueError(f"a matrix of {columns} columns cannot be packed as {type}")
    data = arena.take(size)
    step = max(PANEL, _PIECE_BYTES // row_bytes // PANEL * PANEL)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        piece = torch.as_tensor(read(first * row_bytes, count * row_bytes))
        library().deltic_pack(number, piece.data_ptr(), first, count, columns, data.data_ptr())
    return QTensor(type, rows, columns, data, MatrixStruct(number, rows, columns, data.data_ptr()))


def pack_tensor(weight: Tensor, arena: Arena) -> QTensor:
    """Packs a matrix [rows, columns] of float32, float16 or bfloat16."""
    name, number = PLAIN_TYPES[weight.dtype]
    raw = weight.contiguous().view(-1).view(torch.uint8)
    rows, columns = weight.shape
    return pack_rows(name, number, rows, columns, columns * weight.itemsize,
                     lambda start, count: raw[start:start + count], arena)
