"""Keys and values as their pages keep them: in the model's dtype, or as float8 e4m3 numbers, with a scale of 1, which
torch moves as bytes and converts, and little else."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
_LARGEST = 448.0


def as_bytes(x: Tensor) -> Tensor:
    """A view whose numbers torch can move; x itself, where those of x are."""
    return x.view(torch.uint8) if x.dtype == FP8 else x


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As pages of this dtype keep it. There is no infinity in float8: what is too large becomes the largest number,
    448, which not every version of torch sees to by itself."""
    return (x.clamp(-_LARGEST, _LARGEST) if dtype == FP8 else x).to(dtype)


def store(pool: Tensor, places: Tensor, x: Tensor) -> None:
    """Write x [T, kv_heads, head_dim] to these places, page * PAGE + offset, of pages [P, PAGE, kv_heads, head_dim]."""
    as_bytes(pool).flatten(0, 1).index_copy_(0, places, as_bytes(rounded(x, pool.dtype)))


def take(pool: Tensor, dim: int, index: Tensor) -> Tensor:
    """As `index_select`."""
    return as_bytes(pool).index_select(dim, index).view(pool.dtype)


def is_finite(x: Tensor) -> bool:
    """Whether all numbers are: in one or two passes and without a tensor of their size, unlike `isfinite`."""
    if not x.numel():
        return True
    if x.dtype == FP8:  # what is no number has all bits but the sign's
        return int(x.view(torch.int8).max()) < 0x7f and int(x.view(torch.uint8).max()) < 0xff
    return all(bool(bound.isfinite()) for bound in torch.aminmax(x))
