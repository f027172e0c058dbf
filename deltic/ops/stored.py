"""Where weights lie that stay in their files."""

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
