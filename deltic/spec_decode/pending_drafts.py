"""Drafts that are made on the device, so that the step that verifies them can be launched before the host has them."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deltic.cache.handles import SequenceCache
from deltic.engine.sequence import Sequence
from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.ops.types import Drafted
from deltic.runner.input_batch import DeviceTokens

Wants = List[tuple[Sequence, int]]
"""Sequences that decode next, each with the number of drafts wanted, at least 1."""


@dataclass(frozen=True, slots=True)
class PendingDrafts:
    """Drafts that the device makes behind a step.

    places: the sequences, with the cache that they had at launch and the index of their row.
    drafted: the drafts on the device.
    found: the same numbers on the host, once `arrived`.
    """

    places: dict[Sequence, tuple[SequenceCache, int]]
    drafted: Drafted
    found: Tensor
    arrived: torch.cuda.Event

    def covers(self, sequences: Iterable[Sequence]) -> bool:
        """True if it has drafts for all of these sequences, as far as the host knows."""
        return all(sequence in self.places and self.places[sequence][0] is sequence.cache for sequence in sequences)

    def resolve(self, plan: StepPlan, sequences: List[Sequence]) -> StepPlan:
        """Waits for the drafts. Returns the plan with them; it has one row for each sequence."""
        return replace(plan, rows=tuple([replace(row, tokens=(row.tokens[0], *self.drafts(sequence, row.drafts)))
                                         if row.drafts else row
                                         for row, sequence in zip(plan.rows, sequences, strict=True)]))

    def on_device(self, rows: List[PlannedRow], sequences: List[Sequence]) -> DeviceTokens:
        """The places of the tokens of rows with these drafts."""
        drafted, places = self.drafted, list[int]()
        for row, sequence in zip(rows, sequences, strict=True):
            place = self.places[sequence][1]
            places.append(drafted.token_at(place))
            places += [drafted.draft_at(place, draft) for draft in range(row.drafts)]
        return DeviceTokens(drafted.numbers, places)

    def drafts(self, sequence: Sequence, count: int) -> tuple[int, ...]:
        """Waits for the drafts. Returns the first `count` of a sequence, which must follow its last token."""
        assert self.follows(sequence), "drafts were verified that follow other tokens"
        drafted, place = self.drafted, self.places[sequence][1]
        return tuple([int(self.found[drafted.draft_at(place, draft)]) for draft in range(min(count, drafted.drafts))])

    def follows(self, sequence: Sequence) -> bool:
        """Waits for the drafts. True if they follow the sequence's last token."""
        self.arrived.synchronize()
        at = self.drafted.token_at(self.places[sequence][1])
        return self.found[at:at + 2].tolist() == [sequence.tokens[-1], sequence.done]
