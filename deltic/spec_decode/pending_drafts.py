"""Drafts that a device is at work on, and that the host need not have seen to launch the step that verifies them."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deltic.cache.handles import SequenceCache
from deltic.engine.sequence import Sequence
from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.ops.mtp import Drafted
from deltic.runner.input_batch import Promised

Wants = List[tuple[Sequence, int]]
"""Sequences that are about to answer, each with the number of drafts that are wanted, at least 1."""


@dataclass(frozen=True, slots=True)
class PendingDrafts:
    """Drafts that a device makes on its own of what follows a step.

    places: of which sequences, on the lease that they had then, and which row is whose.
    drafted: the drafts, on the device.
    found: the same numbers, on the host as soon as `arrived`.
    """

    places: dict[Sequence, tuple[SequenceCache, int]]
    drafted: Drafted
    found: Tensor
    arrived: torch.cuda.Event

    def covers(self, sequences: Iterable[Sequence]) -> bool:
        """Whether it has drafts for all of them, as far as is known without looking."""
        return all(sequence in self.places and self.places[sequence][0] is sequence.cache for sequence in sequences)

    def fulfil(self, plan: StepPlan, sequences: List[Sequence]) -> StepPlan:
        """The plan, one row for each of these sequences, with the drafts; waits for them."""
        return replace(plan, rows=tuple([replace(row, tokens=(row.tokens[0], *self.drafts(sequence, row.drafts)))
                                         if row.drafts else row
                                         for row, sequence in zip(plan.rows, sequences, strict=True)]))

    def on_device(self, rows: List[PlannedRow], sequences: List[Sequence]) -> Promised:
        """Where the tokens of rows with these drafts are."""
        drafted, places = self.drafted, list[int]()
        for row, sequence in zip(rows, sequences, strict=True):
            place = self.places[sequence][1]
            places.append(drafted.token_at(place))
            places += [drafted.draft_at(place, draft) for draft in range(row.drafts)]
        return Promised(drafted.numbers, places)

    def drafts(self, sequence: Sequence, count: int) -> tuple[int, ...]:
        """The first ones for a sequence, as many as there are, which must follow its last token; waits for them."""
        assert self.follows(sequence), "drafts were verified that follow other tokens"
        drafted, place = self.drafted, self.places[sequence][1]
        return tuple([int(self.found[drafted.draft_at(place, draft)]) for draft in range(min(count, drafted.drafts))])

    def follows(self, sequence: Sequence) -> bool:
        """Whether they follow the sequence's last token; waits for them."""
        self.arrived.synchronize()
        at = self.drafted.token_at(self.places[sequence][1])
        return self.found[at:at + 2].tolist() == [sequence.tokens[-1], sequence.done]
