"""Matrices in float8 (e4m3: a sign, four bits of exponent, three more significant ones) with scales: of checkpoints one
for each block of 128 rows and columns, in memory one for each 128 columns of a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from deltic.errors import ModelError

GROUP: Final = 128
"""Columns that share a scale, and rows, in checkpoints."""
LARGEST: Final = 448.0
"""Of the numbers that float8 has."""
BLOCK_BYTES: Final = 4 + GROUP
"""Of a group of a row, in memory: its scale, then codes."""


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


@dataclass(frozen=True, slots=True, eq=False)
class Float8:
    """A matrix, or a stack of some, as a checkpoint has it: codes [..., rows, columns] uint8, scales
    [..., rows / GROUP, columns / GROUP] float32, both rounded up."""

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def numbers(self) -> Tensor:
        """[..., rows, columns] float32."""
        scales = self._of_rows().repeat_interleave(GROUP, -1)[..., :self.shape[-1]]
        return self.codes.view(torch.float8_e4m3fn).float().mul_(scales)

    def blocks(self) -> Tensor:
        """As `quantize_fp8`, of all matrices one behind the other; nothing is rounded."""
        scales = self._of_rows().flatten(0, -2).contiguous().view(torch.uint8).unflatten(1, (-1, 4))
        codes = self.codes.flatten(0, -2).unflatten(1, (-1, GROUP))
        return torch.cat((scales, codes), -1).flatten(1)

    def halves(self) -> tuple[Float8, Float8]:
        """The upper and the lower half of the rows, of which no block has some of both."""
        codes, scales = self.codes.chunk(2, -2), self.scales.chunk(2, -2)
        return Float8(codes[0], scales[0]), Float8(codes[1], scales[1])

    def _of_rows(self) -> Tensor:
        """[..., rows, columns / GROUP]"""
        found: Tensor = self.scales.repeat_interleave(GROUP, -2)[..., :self.shape[-2], :]
        return found
