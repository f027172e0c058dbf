"""Drafts as a device leaves them in its memory."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Drafted:
    """Drafts of what follows a step, on the device, until the next ones. numbers [2 * rows * (drafts + 1)] int64:
    [drafts, 2, rows], the tokens and whether they are sound, then [rows, 2], the token that a row's drafts follow, as
    far as the step's own drafts turned out to be right, and its position. rows: the first ones are the step's."""

    numbers: Tensor
    rows: int
    drafts: int

    def draft_at(self, row: int, draft: int) -> int:
        """Where the token is that was drafted."""
        return 2 * self.rows * draft + row

    def token_at(self, row: int) -> int:
        """Where the token is that the row's drafts follow; after it comes its position."""
        return 2 * (self.rows * self.drafts + row)
