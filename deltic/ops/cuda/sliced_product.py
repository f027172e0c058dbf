"""How products sum columns that may be split over devices: the shape of a slot of the ring (kernels/sliced.cuh)."""

from __future__ import annotations

from dataclasses import dataclass

from deltic.ops.cuda.layout import PLAIN_MMA_TOKENS, WARPS
from deltic.ops.slices import PLAIN_UNIT, SLICES
from deltic.ops.types import GdnSpec

_GROUP = 32
"""Columns that one tensor core instruction multiplies."""
_WIDEST = 1024
"""Columns of a slot, at most."""
_THREADS = WARPS * 32


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
    """The struct of this name in kernels/sliced.cuh. columns: of the device."""

    columns: int
    split: ColumnSlices
    tokens: int

    @property
    def most(self) -> int:
        """Slices of a slot, at most: their sums are made by the threads of a block at once."""
        return SLICES if self.tokens <= PLAIN_MMA_TOKENS else 2

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
        return -(-self.range // _WIDEST)

    @property
    def piece(self) -> int:
        return -(-self.range // (self.pieces * _GROUP)) * _GROUP

    @property
    def joined(self) -> int:
        """Slices of a slot."""
        equal = self.columns % (self.split.runs * self.split.slices * _GROUP) == 0
        count = 1
        while (equal and self.split.runs * self.pieces == 1 and 2 * count <= min(self.most, self.split.slices)
               and 2 * count * self.range <= _WIDEST):
            count *= 2
        return count

    @property
    def line(self) -> int:
        """Bytes of a row in a slot."""
        size = self.joined * self.piece * 2
        return size if size % 128 else size + 64

    @property
    def steps(self) -> int:
        """Slots of a unit."""
        return self.split.slices // self.joined * self.split.runs * self.pieces

    @property
    def template(self) -> str:
        return f"{self.split.slices}, {self.split.runs}"

    @property
    def check(self) -> str:
        """Source that does not compile if the kernels' shape is another one."""
        shape = f"SliceShape<{self.columns}, {self.template}, {self.most}>"
        return f"static_assert({shape}::LINE == {self.line} && {shape}::JOINED == {self.joined});\n"

    def group(self, unit: int, units: int, room: int) -> int:
        """Returns the slices whose sums over the warps are made at once: all of some units, or a power of two. unit:
        rows of one. units: of a block. room: bytes for these sums."""
        most = min(_THREADS // (self.tokens * unit), room // self.bytes(unit))
        if most >= self.split.slices:
            return self.split.slices * min(most // self.split.slices, units)
        return max(self.joined, 1 << max(most, 1).bit_length() - 1)

    def bytes(self, unit: int) -> int:
        """Of the sums of a slice over each warp."""
        return WARPS * self.tokens * unit * 4
