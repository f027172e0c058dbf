"""Pads the rows of cuBLAS products, so that cuBLAS sees few different numbers of rows."""

from __future__ import annotations

import torch
from torch import Tensor

_EXACT_ROWS, PRODUCT_ROWS = 256, 128
"""Products of more tokens than _EXACT_ROWS have a multiple of PRODUCT_ROWS rows."""


def padded_rows(tokens: int) -> int:
    """Returns the number of rows that cuBLAS multiplies for `tokens` tokens. cuBLAS chooses a kernel by this number,
    which takes milliseconds at first use. Long prompts therefore share few numbers, which the warm-up tries."""
    return tokens if tokens <= _EXACT_ROWS else -(-tokens // PRODUCT_ROWS) * PRODUCT_ROWS


def empty_rows(tokens: int, width: int, device: torch.device) -> Tensor:
    """Returns a tensor [tokens, width] bf16 with memory for `padded_rows(tokens)` rows."""
    return torch.empty(padded_rows(tokens), width, dtype=torch.bfloat16, device=device)[:tokens]


def padded(x: Tensor) -> Tensor:
    """Returns x [T, columns] with `padded_rows(T)` rows if its memory has them. Added rows have undefined values."""
    rows, columns = padded_rows(len(x)), x.shape[1]
    needed = (x.storage_offset() + rows * columns) * x.element_size()
    fits = x.is_contiguous() and needed <= x.untyped_storage().nbytes()
    return x.as_strided((rows, columns), (columns, 1)) if fits else x
