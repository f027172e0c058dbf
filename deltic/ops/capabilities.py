"""What the backend of a loaded model can do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Declared by a model's backend. The engine goes by these and never by the name of a device.

    overlaps: the device computes while the host schedules the next step.
    max_verify_rows: steps with drafts have buckets of up to so many rows, in which prompts have no place; None: steps
        of any shape may have drafts.
    defer_from: the number of rows from which on decode steps leave state writes in delta logs; None: they never do.
    """

    overlaps: bool = False
    max_verify_rows: int | None = None
    defer_from: int | None = None

    @property
    def verifies(self) -> bool:
        """True if steps with drafts have buckets."""
        return self.max_verify_rows is not None

    @property
    def defers_state_writes(self) -> bool:
        return self.defer_from is not None
