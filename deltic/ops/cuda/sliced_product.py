"""How products sum columns that may be split over devices: the shape of a slot of the ring (kernels/sliced.cuh)."""

from __future__ import annotations

from dataclasses import dataclass

from deltic.ops.cuda.layout import WARPS
from deltic.ops.slices import PLAIN_UNIT, SLICES
from deltic.ops.types import GdnSpec

_WEIGHTS, _PIECE_UNIT = 3072, 64
"""Weights of a slot, at most; of what its columns are a multiple."""


@dataclass(frozen=True, slots=True)
class ColumnSlices:
    """slices: neighbouring slices of a weight's columns that the device has. runs: as in `ops.slices.column_slices`."""

    slices: int = SLICES
    runs: int = 1

    @property
    def suffix(self) -> str:
        """Of a kernel's name."""
        return f"_s{self.slices}" * (self.slices < SLICES) + f"_r{self.runs}" * (self.runs > 1)


WHOLE = ColumnSlices()


def split_of(shards: int, spec: GdnSpec | None = None) -> ColumnSlices:
    """Returns the split of a weight on one of `shards` devices. spec: of the layer whose output projection it is."""
    runs = spec.value_heads // spec.key_heads if spec and spec.tiled else 1
    return ColumnSlices(SLICES // shards, runs)


@dataclass(frozen=True, slots=True)
class SliceShape:
    """The struct of this name in kernels/sliced.cuh. columns: of the device. rows: of a unit."""

    columns: int
    split: ColumnSlices
    rows: int

    @property
    def range(self) -> int:
        """Columns of a slice in each run, at most."""
        units, count = self.columns // (self.split.runs * PLAIN_UNIT), self.split.slices
        while count > 1:  # the first half is the longer one
            units, count = (units + 1) // 2, count // 2
        return units * PLAIN_UNIT

    @property
    def pieces(self) -> int:
        """Slots that a range takes."""
        return -(-self.range // (_WEIGHTS // self.rows))

    @property
    def line(self) -> int:
        """Bytes of a row in a slot."""
        return -(-self.range // (self.pieces * _PIECE_UNIT)) * _PIECE_UNIT * 2 + 64

    @property
    def steps(self) -> int:
        """Slots of a unit."""
        return self.split.slices * self.split.runs * self.pieces

    @property
    def units(self) -> int:
        """Units that a block multiplies at once."""
        return WARPS // self.split.slices

    @property
    def template(self) -> str:
        return f"{self.split.slices}, {self.split.runs}, {self.rows}"

    @property
    def check(self) -> str:
        """Source that does not compile if the kernels' shape is another one."""
        shape = f"SliceShape<{self.columns}, {self.template}>"
        return f"static_assert({shape}::LINE == {self.line} && {shape}::PARTS * {self.split.slices} == {self.steps});\n"
