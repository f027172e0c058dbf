"""The threads of a server for work that is not generation."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from deltic.engine.fair_executor import FairExecutor

LARGE = 1 << 15
"""Bytes of a body from which on its work goes to the threads for large ones."""


@dataclass(frozen=True, slots=True)
class Executors:
    """By kind of work, each with turns by client: one kind never waits for another.

    small: bodies are parsed, prompts rendered and encoded, answers written. large: the same where there is much of it:
    a client's large bodies do not hold up its small ones. grammars: grammars are compiled.
    """

    small: FairExecutor = field(default_factory=partial(FairExecutor, 2, "deltic-small"))
    large: FairExecutor = field(default_factory=partial(FairExecutor, 2, "deltic-large"))
    grammars: FairExecutor = field(default_factory=partial(FairExecutor, 4, "deltic-grammars"))

    def sized(self, size: int) -> FairExecutor:
        """Those for work with so many bytes."""
        return self.small if size <= LARGE else self.large

    def shutdown(self) -> None:
        """Finish what is queued; take no more."""
        for executor in (self.small, self.large, self.grammars):
            executor.shutdown()
