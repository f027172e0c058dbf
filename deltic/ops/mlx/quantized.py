"""Quantized matrices in MLX's packed form."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
import torch

from deltic.ops.mlx.linear import MlxMatrix, Packed, together
from deltic.ops.mlx.memory import dtype_of
from deltic.ops.quantized import PackedForm

GROUP = 32
"""Columns of a group, as in most types of GGUF."""
_BITS = 8
"""Bits of matrices of types that are no codes with scale and bias: what they lose is small."""
_PIECE_BYTES = 16 << 20


class Affine(Protocol):
    """code * scale + bias: codes [rows, columns] uint8, scales and biases [rows, columns / GROUP] float32."""

    codes: Any
    scales: Any
    biases: Any
    bits: int


Rows = Callable[[str, Any, int], Any]
"""(type, bytes, rows) -> the rows as `Affine`, or as float32 [rows, columns]."""


def packed_form(dtype: torch.dtype, rows_of: Rows) -> PackedForm:
    """Returns the form. dtype: of activations, and so of scales and biases. rows_of: reads rows of a type of GGUF."""
    return PackedForm(partial(_pack, dtype=dtype, rows_of=rows_of), lambda type, columns: columns % GROUP == 0, dtype,
                      torch.device("cpu"), partial(_stack, dtype=dtype, rows_of=rows_of))


def _pack(type: str, number: int, rows: int, columns: int, row_bytes: int, read: Callable[[int, int], Any],
          dtype: torch.dtype, rows_of: Rows) -> MlxMatrix:
    return MlxMatrix.of(type, _packed(type, rows, row_bytes, read, dtype, rows_of))


def _stack(type: str, number: int, count: int, rows: int, columns: int, row_bytes: int,
           read: Callable[[int, int], Any], dtype: torch.dtype, rows_of: Rows) -> tuple[MlxMatrix, ...]:
    whole = _packed(type, count * rows, row_bytes, read, dtype, rows_of)
    stack = whole.map(lambda part: part.reshape(count, rows, -1))
    mx.eval(*stack.arrays)
    return tuple(MlxMatrix.of(type, stack.map(lambda part, index=index: part[index]), stack)
                 for index in range(count))


def _packed(type: str, rows: int, row_bytes: int, read: Callable[[int, int], Any], dtype: torch.dtype, rows_of: Rows
            ) -> Packed:
    step, pieces = max(1, _PIECE_BYTES // row_bytes), list[Packed]()
    for first in range(0, rows, step):
        count = min(step, rows - first)
        raw = np.asarray(read(first * row_bytes, count * row_bytes))
        piece = _piece(rows_of(type, raw, count), dtype_of(dtype))
        mx.eval(*piece.arrays)
        pieces.append(piece)
    if len(pieces) == 1:
        return pieces[0]
    found = together(pieces, mx.concatenate)
    mx.eval(*found.arrays)
    return found


def _piece(rows: Any, dtype: mx.Dtype) -> Packed:
    if isinstance(rows, np.ndarray):
        return Packed(*mx.quantize(mx.array(rows).astype(dtype), GROUP, _BITS), GROUP, _BITS)
    codes = rows.codes if rows.bits == 8 else rows.codes[:, ::2] | rows.codes[:, 1::2] << np.uint8(4)
    words = np.ascontiguousarray(codes).view(np.uint32)
    return Packed(mx.array(words), mx.array(rows.scales).astype(dtype), mx.array(rows.biases).astype(dtype), GROUP,
                  rows.bits)
