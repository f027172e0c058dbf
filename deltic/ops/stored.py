"""Weights that stay in their files, and statistics of experts that only partly fit in memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix [rows, columns] in a file: rows of blocks from byte `offset` on, as in GGUF files. type: number of its
    GGUF type, which may be unquantized."""

    path: Path
    offset: int
    type: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class StoredExpert:
    """The matrices of one expert. gate, up [F, hidden]. down [hidden, F]."""

    gate: StoredMatrix
    up: StoredMatrix
    down: StoredMatrix

    @property
    def matrices(self) -> tuple[StoredMatrix, StoredMatrix, StoredMatrix]:
        return self.gate, self.up, self.down


@dataclass(frozen=True, slots=True)
class ExpertStatistics:
    """Counters of an expert store since its creation.

    hits, misses: uses of experts that were, or were not, in memory (on a GPU: in GPU memory), by layer.
    bytes: bytes read from files, or by a GPU from host memory.
    promotions: experts that replaced another one in memory. refreshes: times that a layer's experts could be replaced.
    predicted, useful: experts read ahead of their layer, and the number of them that the layer used.
    waited: seconds that steps waited for reads. reading: seconds during which reads were in progress.
    computed, computed_bytes: misses that the host computed for a GPU, counted once per request, and their bytes.
    computing: seconds that the host spent on them.
    """

    hits: tuple[int, ...]
    misses: tuple[int, ...]
    bytes: int
    promotions: int
    refreshes: int
    predicted: int
    useful: int
    waited: float
    reading: float
    computed: int = 0
    computed_bytes: int = 0
    computing: float = 0.0
