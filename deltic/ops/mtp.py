"""The calls of a draft head (multi-token prediction), and the drafts that a device makes ahead of the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from deltic.ops.types import Batch, Sampling


@dataclass(frozen=True, slots=True)
class Drafted:
    """Drafts that follow a step, in the device's memory until the next ones. rows: the first ones are the step's.

    numbers [2 * rows * (drafts + 1)] int64: [drafts, 2, rows], tokens and whether their logits were healthy; then
        [rows, 2], the token that a row's drafts follow, after the step's own drafts were verified, and its position.
    """

    numbers: Tensor
    rows: int
    drafts: int

    def draft_at(self, row: int, draft: int) -> int:
        """The index of a drafted token."""
        return 2 * self.rows * draft + row

    def token_at(self, row: int) -> int:
        """The index of the token that the row's drafts follow; its position comes next."""
        return 2 * (self.rows * self.drafts + row)


@dataclass(frozen=True, slots=True)
class MtpStep:
    """A draft head in calls of its own, over one cache.

    follow(batch, hidden [T, H] float32): call it after a step of the decoder with its hidden states. Stores the head's
        K/V of all tokens; the slots' hidden states become those of the last tokens of rows that do not append.
    draft(batch, counts [R] int64, sampling) -> tokens [R, most] int64: drafts after a batch of single-token rows,
        counts[r] <= most each. sampling: of R * most rows, without changes of logits.

    On devices that run beside the host:

    draft_ahead(batch, most, chosen [T] int64, keys [R, n] int64, temperature [T] float32) -> Drafted: `most` drafts of
        what follows a step that was just launched. chosen: the token drawn after each token. keys: of the draws after a
        row's first token and the following ones, n >= most + tokens of a row. The slots' hidden states become those of
        the last accepted tokens.
    record(rows, pages, most): record the graph for drafts of so many rows and pages.
    last [N, H] float32: the hidden states of the last step's tokens, at most N.
    """

    follow: Callable[[Batch, Tensor], None]
    draft: Callable[[Batch, Tensor, Sampling], Tensor]
    draft_ahead: Callable[[Batch, int, Tensor, Tensor, Tensor], Drafted] | None = None
    record: Callable[[int, int, int], None] | None = None
    last: Tensor | None = None
