"""Quantized matrices in MLX's packed format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
import torch

from deltic.ops.mlx.linear import MlxMatrix, Packed, together
from deltic.ops.mlx.memory import dtype_of
from deltic.ops.quantized import PLAIN_TYPES, PackedForm

GROUP = 32
"""Columns per group, as in most GGUF types."""
_BITS = 8
"""Bits for types that are not codes with scale and bias; the loss of requantizing them is small."""
_PIECE_BYTES = 16 << 20
_PLAIN = {name for name, _ in PLAIN_TYPES.values()}


class AffineCodes(Protocol):
    """Numbers code * scale + bias: codes [rows, columns] uint8, scales and biases [rows, columns / GROUP] float32."""

    codes: Any
    scales: Any
    biases: Any
    bits: int


Read = Callable[[int, int], Any]
Rows = Callable[[str, Any, int], Any]
"""(type, bytes, rows) -> the rows as `AffineCodes`, or as float32 [rows, columns]."""


def packed_form(dtype: torch.dtype, rows_of: Rows) -> PackedForm:
    """Returns the format. dtype: of activations, scales and biases. rows_of: reads rows of a GGUF type."""
    packer = _Packer(dtype_of(dtype), rows_of)
    return PackedForm(packer.pack, _serves, dtype, torch.device("cpu"), packer.stack)


def _serves(type: str, columns: int) -> bool:
    return columns % GROUP == 0 and type not in _PLAIN


@dataclass(frozen=True, slots=True)
class _Packer:
    """Packs matrices. dtype: of scales and biases. rows_of: as in `packed_form`."""

    dtype: Any
    rows_of: Rows

    def pack(self, type: str, number: int, rows: int, columns: int, row_bytes: int, read: Read) -> MlxMatrix:
        return MlxMatrix.of(type, self._packed(type, rows, row_bytes, read))

    def stack(self, type: str, number: int, count: int, rows: int, columns: int, row_bytes: int, read: Read
              ) -> tuple[MlxMatrix, ...]:
        stack = self._packed(type, count * rows, row_bytes, read).map(lambda part: part.reshape(count, rows, -1))
        mx.eval(*stack.arrays)
        return tuple(MlxMatrix.of(type, stack.entry(index), stack) for index in range(count))

    def _packed(self, type: str, rows: int, row_bytes: int, read: Read) -> Packed:
        step, pieces = max(1, _PIECE_BYTES // row_bytes), list[Packed]()
        for first in range(0, rows, step):
            count = min(step, rows - first)
            raw = np.asarray(read(first * row_bytes, count * row_bytes))
            piece = _piece(self.rows_of(type, raw, count), self.dtype)
            mx.eval(*piece.arrays)
            pieces.append(piece)
        found = pieces[0] if len(pieces) == 1 else together(pieces, mx.concatenate)
        mx.eval(*found.arrays)
        return found


def _piece(rows: Any, dtype: Any) -> Packed:
    if isinstance(rows, np.ndarray):
        codes, scales, biases = mx.quantize(mx.array(rows).astype(dtype), GROUP, _BITS)
        return Packed(codes, scales, biases, GROUP, _BITS)
    codes = rows.codes if rows.bits == 8 else rows.codes[:, ::2] | rows.codes[:, 1::2] << np.uint8(4)
    words = np.ascontiguousarray(codes).view(np.uint32)
    return Packed(mx.array(words), mx.array(rows.scales).astype(dtype), mx.array(rows.biases).astype(dtype), GROUP,
                  rows.bits)
