"""K/V in pages: the model's dtype, or float8 e4m3 with a scale of 1, which torch can only move as bytes and convert."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
_LARGEST = 448.0


def as_bytes(x: Tensor) -> Tensor:
    """Returns a view that torch can index; x itself unless it is float8."""
    return x.view(torch.uint8) if x.dtype == FP8 else x


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds to the dtype of pages. float8 has no infinity: what is too large becomes 448, in every version of
    torch."""
    return (x.clamp(-_LARGEST, _LARGEST) if dtype == FP8 else x).to(dtype)


def store(pool: Tensor, places: Tensor, x: Tensor) -> None:
    """Writes x [T, kv_heads, head_dim] to places page * PAGE + offset of pages [P, PAGE, kv_heads, head_dim]."""
    as_bytes(pool).flatten(0, 1).index_copy_(0, places, as_bytes(rounded(x, pool.dtype)))


def take(pool: Tensor, dim: int, index: Tensor) -> Tensor:
    """Returns `index_select`, also of float8."""
    return as_bytes(pool).index_select(dim, index).view(pool.dtype)


def is_finite(x: Tensor) -> bool:
    """True if all numbers are finite. Takes one or two passes and, unlike `isfinite`, no tensor of their size."""
    if not x.numel():
        return True
    if x.dtype == FP8:  # NaN has all bits but the sign set
        return int(x.view(torch.int8).max()) < 0x7f and int(x.view(torch.uint8).max()) < 0xff
    return all(bool(bound.isfinite()) for bound in torch.aminmax(x))
