"""Matrices in float8 (e4m3) with scales: in checkpoints one for each block of 128 rows and columns, in memory one for
128 columns of a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from deltic.errors import ModelError

GROUP: Final = 128
"""Columns that share a scale; in checkpoints rows, too."""
LARGEST: Final = 448.0
"""Largest finite float8 value."""
BLOCK_BYTES: Final = 4 + GROUP
"""Bytes of a group in memory: its scale, then codes."""


def quantize_fp8(name: str, matrix: Tensor) -> Tensor:
    """Quantizes a float matrix [rows, columns], columns a multiple of GROUP, to blocks, uint8 [rows, bytes], on its
    device. The largest value of a group becomes LARGEST. Raises ModelError for values that are not finite."""
    groups = matrix.float().unflatten(1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    if not bool(largest.isfinite().all()):
        raise ModelError(f"tensor {name!r}: it has values that are not finite")
    scales = torch.where(largest > 0, largest / LARGEST, 1.0)
    codes = (groups / scales).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return torch.cat((scales.view(torch.uint8), codes.view(torch.uint8)), -1).flatten(1)


@dataclass(frozen=True, slots=True, eq=False)
class Float8:
    """A matrix or a stack in the format of checkpoints.

    codes: uint8 [..., rows, columns].
    scales: float32 [..., rows / GROUP, columns / GROUP], rounded up.
    """

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def numbers(self) -> Tensor:
        """Returns the values, float32 [..., rows, columns]."""
        scales = self._row_scales().repeat_interleave(GROUP, -1)[..., :self.shape[-1]]
        return self.codes.view(torch.float8_e4m3fn).float().mul_(scales)

    def blocks(self) -> Tensor:
        """Returns the blocks of `quantize_fp8` for all matrices, one after another, without rounding."""
        scales = self._row_scales().flatten(0, -2).contiguous().view(torch.uint8).unflatten(1, (-1, 4))
        codes = self.codes.flatten(0, -2).unflatten(1, (-1, GROUP))
        return torch.cat((scales, codes), -1).flatten(1)

    def halves(self) -> tuple[Float8, Float8]:
        """Splits the rows in two halves. No block may extend over both."""
        codes, scales = self.codes.chunk(2, -2), self.scales.chunk(2, -2)
        return Float8(codes[0], scales[0]), Float8(codes[1], scales[1])

    def _row_scales(self) -> Tensor:
        """Returns the scales of each row, [..., rows, columns / GROUP]."""
        found: Tensor = self.scales.repeat_interleave(GROUP, -2)[..., :self.shape[-2], :]
        return found
