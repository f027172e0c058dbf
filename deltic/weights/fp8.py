"""Matrices in float8 (e4m3: a sign, four bits of exponent, three more significant ones), whose rows have a float32
scale for each 128 columns."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from deltic.errors import ModelError
from deltic.weights.gguf.blocks import BlockType

GROUP: Final = 128
"""Columns that share a scale."""
LARGEST: Final = 448.0
"""Of the numbers that float8 has."""
TYPE: Final = BlockType("FP8", -1, GROUP, 4 + GROUP, True)
"""In memory only: GGUF files know no such type. A block is a scale, then codes."""


def quantize_fp8(name: str, matrix: Tensor) -> Tensor:
    """The blocks of a matrix [rows, columns] of any float type, uint8 [rows, bytes], where it lies. columns: a multiple
    of GROUP. Numbers are rounded to the nearest, the largest of a group becomes LARGEST. Raises ModelError with the
    tensor's name where it has values that are not finite."""
    groups = matrix.float().unflatten(1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    if not bool(largest.isfinite().all()):
        raise ModelError(f"tensor {name!r}: it has values that are not finite")
    scales = torch.where(largest > 0, largest / LARGEST, 1.0)
    codes = (groups / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return torch.cat((scales.view(torch.uint8), codes.view(torch.uint8)), -1).flatten(1)
