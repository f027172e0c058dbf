"""Where weights lie that stay in their files, and what became of experts that are not all in memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix [rows, columns] in a file: rows of blocks one after another from byte `offset` on, as in GGUF files.

    type: its GGUF type by number. (Plain numbers are types too.)
    """

    path: Path
    offset: int
    type: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class StoredExpert:
    """gate, up [F, hidden]. down [hidden, F]."""

    gate: StoredMatrix
    up: StoredMatrix
    down: StoredMatrix

    @property
    def matrices(self) -> tuple[StoredMatrix, StoredMatrix, StoredMatrix]:
        return self.gate, self.up, self.down


@dataclass(frozen=True, slots=True)
class ExpertStatistics:
    """What a store has done since it was made.

    hits, misses: by layer, experts that a step wanted and that were or were not in memory, on a GPU: in the card's.
    bytes: read from files, on a GPU from the host's memory.
    promotions: experts that took the place of another one in memory.
    refreshes: times that those of a layer might.
    predicted, useful: experts that were read ahead of their layer, and those of them that it wanted.
    waited: seconds that steps waited for what was being read. reading: seconds in which something was.
    computed, computed_bytes: misses that the host computed beside a GPU, each once for a request, and what they take.
    computing: seconds in which it did.
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
