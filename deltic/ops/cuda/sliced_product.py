"""Shapes of ring slots of products that sum their columns in slices, on any number of devices (kernels/sliced.cuh)."""

from __future__ import annotations

from dataclasses import dataclass

from deltic.ops.cuda.layout import WARPS
from deltic.ops.slices import PLAIN_UNIT, SLICES
from deltic.ops.types import GdnSpec

_PIECE_UNIT = 64
"""The columns of a slot are a multiple of this number."""
_ONE_TOKEN_BYTES, _COPY_BYTES = 101 << 10, 2304
"""Largest sizes in bytes: of input and ring in a block with one token, and of a copy of several slices."""
_LANES = 16
"""Largest number of copies for a short slot, made at once, if a copy covers one slice."""


@dataclass(frozen=True, slots=True)
class ColumnSlices:
    """A device's `slices` neighbouring slices of a weight's columns. runs: as in `ops.slices.column_slices`."""

    slices: int = SLICES
    runs: int = 1

    @property
    def suffix(self) -> str:
        """Suffix of the kernel's name."""
        return f"_s{self.slices}" * (self.slices < SLICES) + f"_r{self.runs}" * (self.runs > 1)


WHOLE = ColumnSlices()


def split_of(shards: int, spec: GdnSpec | None = None) -> ColumnSlices:
    """Returns the split of a weight on one of `shards` devices. spec: the GDN layer's, for its output projection."""
    runs = spec.value_heads // spec.key_heads if spec and spec.tiled else 1
    return ColumnSlices(SLICES // shards, runs)


@dataclass(frozen=True, slots=True)
class SliceShape:
    """The shape of a slot, as the struct of this name in kernels/sliced.cuh. columns: columns on the device. rows: rows
    of a unit. short: slots are short, because a small card leaves little room."""

    columns: int
    split: ColumnSlices
    rows: int
    short: bool

    @property
    def range(self) -> int:
        """Largest number of columns of a slice in one run."""
        units, count = self.columns // (self.split.runs * PLAIN_UNIT), self.split.slices
        while count > 1:  # the first half is the longer one
            units, count = (units + 1) // 2, count // 2
        return units * PLAIN_UNIT

    @property
    def pieces(self) -> int:
        """Number of slots per range."""
        fit = ((_ONE_TOKEN_BYTES - 2 * self.columns) // (WARPS * self.rows) - 64) // 128 * _PIECE_UNIT
        return -(-self.range // ((768 if self.rows < 8 else 448) if self.short else max(fit, _PIECE_UNIT)))

    @property
    def piece(self) -> int:
        return -(-self.range // (self.pieces * _PIECE_UNIT)) * _PIECE_UNIT

    @property
    def span(self) -> int:
        """Number of slices per copy."""
        count, slices = 1, self.split.slices
        whole = self.columns == slices * self.piece
        while whole and 2 * count <= slices and 4 * count * self.range <= _COPY_BYTES:
            count *= 2
        return count

    @property
    def joined(self) -> int:
        """Number of slices per slot, which equals the number of warps that multiply a slot."""
        return self.span if self.span > 1 or not self.short else min(self.split.slices, _LANES // self.rows)

    @property
    def _bytes(self) -> int:  # per copy
        return self.span * self.piece * 2

    @property
    def slot(self) -> int:
        """Bytes of a slot."""
        return self.joined // self.span * self.rows * (self._bytes + 64)

    @property
    def copying(self) -> int:
        """Number of warps that copy."""
        return 1 if self.short or self._bytes >= 1536 else 2 if self._bytes >= 1024 else 4

    @property
    def teams(self) -> int:
        return WARPS // self.joined

    @property
    def rounds(self) -> int:
        """Number of slots that each team takes for the units that a block multiplies at once."""
        return self.split.runs * self.pieces

    @property
    def units(self) -> int:
        """Number of units that a block multiplies at once."""
        return WARPS // self.split.slices

    @property
    def check(self) -> str:
        """CUDA source that fails to compile if the kernels' shape differs from this one."""
        shape = f"SliceShape<{self.columns}, {self.split.slices}, {self.split.runs}, {self.rows}, {int(self.short)}>"
        return (f"static_assert({shape}::SLOT == {self.slot} && {shape}::PARTS == {self.rounds} && "
                f"{shape}::COPYING == {self.copying});\n")
