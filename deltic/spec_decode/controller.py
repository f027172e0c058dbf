"""Speculative decoding of an engine: selects the sequences that get drafts, and keeps statistics of acceptance.

`proposers` makes the drafts; `draft_length` chooses their number.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as List
from contextlib import suppress
from dataclasses import dataclass, field

from deltic.engine.scheduler import Scheduler
from deltic.engine.sequence import Sequence
from deltic.engine.step_plan import UNKNOWN, StepPlan
from deltic.model.partial_head import PART
from deltic.params import MAX_DRAFTS, Draft, Head, Mtp, Ngram
from deltic.runner.launch import InFlight
from deltic.runner.model_runner import Model
from deltic.runner.sampling import changes_logits, slow
from deltic.spec_decode.draft_length import (
    LONGEST,
    Acceptance,
    AdaptiveDraftLength,
    DraftLength,
    Growth,
    HeadGrowth,
)
from deltic.spec_decode.draft_model import DraftModelProposer
from deltic.spec_decode.mtp import PendingDrafts, Wants
from deltic.spec_decode.partial_head import MAX_ROWS, HeadProposer, TokenGroups
from deltic.spec_decode.proposers import AsyncProposer, MtpProposer, NgramProposer, Proposer

log = logging.getLogger("deltic")


@dataclass(slots=True)
class SpeculationStats:
    """Counters since the start.

    drafted_at, accepted_at: numbers of verified drafts, and of the right ones among them, by position in the row.
    saved_seconds: time saved compared to decoding the same tokens one by one; negative if drafts took more time.
    """

    drafted_at: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)
    accepted_at: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)
    saved_seconds: float = 0.0


def drafter_of(runtime: Model) -> Proposer | None:
    """Returns the proposer that a model's options name; None if they name none, or a draft head that the cache has no
    room for."""
    speculation = runtime.options.speculation
    if isinstance(speculation, Ngram):
        return NgramProposer(speculation.tokens)
    if isinstance(speculation, Draft):
        assert runtime.draft is not None
        return DraftModelProposer(runtime.draft, runtime.config.vocab_size, speculation.tokens)
    if runtime.partial_head is not None and isinstance(speculation, Head):
        return HeadProposer(runtime, runtime.partial_head, speculation.tokens)
    if runtime.mtp_runner is None or speculation is None:
        return None
    return MtpProposer(
        runtime, runtime.mtp_runner, speculation.tokens if isinstance(speculation, Mtp) else Mtp().tokens
    )


def depth_of(drafter: Proposer | None, runtime: Model) -> DraftLength:
    """Returns the default rule for the number of a proposer's drafts."""
    if isinstance(drafter, HeadProposer):
        head = drafter.head
        # the acceptance is known without drafts, so only times have to be measured again
        return AdaptiveDraftLength(drafter.limit, HeadGrowth(head.share, 1 / PART), LONGEST)
    return AdaptiveDraftLength(drafter.limit if drafter else 0, Growth.of(runtime.config))


class SpeculationController:
    """Drafts tokens for the sequences that decode in the next step. drafter: None if speculation is off, or after the
    drafter has failed. pending: the drafts of the next step that the host does not know yet (UNKNOWN)."""

    def __init__(
        self, runtime: Model, scheduler: Scheduler, drafter: Proposer | None, depth: DraftLength | None
    ) -> None:
        self.drafter = drafter_of(runtime) if drafter is None else drafter
        self.depth = depth or depth_of(self.drafter, runtime)
        self.stats = SpeculationStats()
        self._runtime, self._scheduler = runtime, scheduler
        self._usual = Acceptance.hopeful(self.depth.limit)
        self._next: int | None = None
        self.pending: PendingDrafts | TokenGroups | None = None
        self._max_rows = runtime.capabilities.max_verify_rows or 1 << 30
        if isinstance(self.drafter, HeadProposer):
            self._max_rows = MAX_ROWS

    def draft(self) -> list[Sequence]:
        """Sets the drafts of the sequences that decode in the next step. Returns these sequences; an empty list if
        speculation is off."""
        answering = [sequence for sequence in self._scheduler.running if sequence.answering]
        ready = [sequence for sequence in answering if not slow(sequence)]
        self.pending = None
        for sequence in answering:
            sequence.drafts.tokens = ()
        if self.drafter is None:
            return []
        granted = self._grants(ready)
        try:
            if granted and len(granted) == len(self._scheduler.running):
                self.pending = (self.drafter.take_groups(granted) if isinstance(self.drafter, HeadProposer)
                                else self._take_pending(granted))
            if self.pending:
                for sequence, count in granted:
                    sequence.drafts.tokens = (UNKNOWN,) * min(count, self.pending.most)
                return ready
            found = self.drafter.draft(granted) if granted else []
            checked = [self._checked(tokens[:count]) for (_, count), tokens in zip(granted, found, strict=True)]
        except Exception:
            self._disable()
            return []
        for (sequence, _), tokens in zip(granted, checked, strict=True):
            sequence.drafts.tokens = _fitting(sequence, tokens)
        return ready

    def wants_drafts(self, sequences: List[Sequence]) -> bool:
        """True if the next step of these sequences, which are all running ones, should have drafts. Called once for
        each step that could be launched without drafts."""
        if not self._drafts_for(len(sequences)):
            return False
        wants = [sequence for sequence in sequences if sequence.request.speculate]
        known = [self._acceptance(sequence) for sequence in wants]
        self._next = (self.depth.choose(known, len(sequences)) if wants else 0) or None
        return self._next is not None

    def drafts_behind(self, flight: InFlight) -> int:
        """Returns the number of drafts of each sequence after a step in flight in which all sequences have drafts.
        Called once for each step that could be launched."""
        if self.drafter is None:
            return 0
        sequences = [each.sequence for each in flight.scheduled]
        self._next = self.depth.choose([self._acceptance(sequence) for sequence in sequences], len(sequences))
        return min(self._next, max(row.drafts for row in flight.plan.rows))

    def pending_behind(self, flight: InFlight, drafts: int) -> PendingDrafts | None:
        """Returns the drafts that follow a step in flight; None if there are none."""
        try:
            pending = self._take_pending([(each.sequence, drafts) for each in flight.scheduled])
        except Exception:
            self._disable()
            return None
        if pending:
            self._next = None
        return pending

    def _apart(self) -> bool:
        """True if rows with adapters are computed apart from the others: a device that verifies drafts in buckets has
        no bucket for such steps."""
        return self._runtime.capabilities.verifies and any(sequence.adapter for sequence in self._scheduler.running)

    def _drafts_for(self, rows: int) -> bool:
        """True if a step with this number of rows may have drafts."""
        return self.drafter is not None and rows <= self._max_rows and not self._apart()

    def draft_ahead(self, flight: InFlight) -> None:
        """Starts the drafts after a step that was just launched, if the device can make them without the host."""
        if not isinstance(self.drafter, AsyncProposer):
            return
        try:
            self.drafter.draft_ahead(flight)
        except Exception:
            self._disable()

    def _take_pending(self, wants: Wants) -> PendingDrafts | None:
        """Returns the drafts that the device makes on its own; None if the host must know them before verification."""
        if not isinstance(self.drafter, AsyncProposer) or any(
                sequence.guide or sequence.constraint or changes_logits(sequence) for sequence, _ in wants):
            return None
        return self.drafter.take_pending(wants)

    def drop_pending(self, sequence: Sequence) -> None:
        """Drops the pending drafts of a sequence, because they follow tokens that it did not take."""
        if isinstance(self.drafter, AsyncProposer):
            self.drafter.drop_pending(sequence)

    def learn(self, sequence: Sequence, drafted: int, right: int) -> None:
        """Records the acceptance of verified drafts."""
        if not isinstance(self.drafter, HeadProposer):  # HeadProposer learns from all tokens
            for acceptance in (self._acceptance(sequence), self._usual):
                acceptance.learn(drafted, right)
        for position in range(drafted):
            self.stats.drafted_at[position] += 1
            self.stats.accepted_at[position] += position < right

    def timed(self, plan: StepPlan, seconds: float, tokens: int) -> None:
        """Records the duration of a decode step, including drafting, and the number of its tokens."""
        rows, drafts = len(plan.rows), max(row.drafts for row in plan.rows)
        self.depth.timed(rows, drafts, seconds)
        plain = self.depth.plain_seconds(rows)
        if drafts and plain is not None:
            self.stats.saved_seconds += plain * tokens / rows - seconds

    def forget(self, sequence: Sequence) -> None:
        """Forgets a finished sequence."""
        try:
            if self.drafter:
                self.drafter.forget(sequence)
        except Exception:
            self._disable()

    def _grants(self, ready: List[Sequence]) -> list[tuple[Sequence, int]]:
        """Returns the sequences that get drafts, and the number of drafts that have room."""
        if not self._drafts_for(len(ready)):
            return []
        wants = [(sequence, room) for sequence in ready if (room := _room(sequence)) > 0]
        depth, self._next = self._next, None
        if depth is None:
            depth = self.depth.choose([self._acceptance(sequence) for sequence, _ in wants], len(ready)) if wants else 0
        left = max(self._scheduler.token_budget - len(ready), 0)
        if self._scheduler.waiting or len(ready) < len(self._scheduler.running):
            left //= 2  # drafts must not delay prompts
        granted = list[tuple[Sequence, int]]()
        for sequence, room in wants:
            if count := self._grant(sequence, min(depth, room, left)):
                granted.append((sequence, count))
                left -= count
        return granted

    def _grant(self, sequence: Sequence, count: int) -> int:
        """Reserves pages for drafts after the next token. Returns the number of drafts that have room."""
        cache, sequence_cache = self._runtime.cache, sequence.cache
        if not count or sequence_cache is None or not cache.states.attach_delta_log(sequence_cache):
            return 0
        # also reserves pages for the drafts after these
        more = count if self._runtime.capabilities.verifies else 0
        return min(max(cache.reserve(sequence_cache, count + 1 + more) - 1, 0), count)

    def _checked(self, drafts: List[int]) -> tuple[int, ...]:
        if not all(0 <= draft < self._runtime.config.vocab_size for draft in drafts):
            raise ValueError("a draft is no token")
        return tuple(drafts)

    def _disable(self) -> None:
        """Switches the drafter off after it has failed."""
        log.exception("drafting tokens failed and is switched off; answers go on without")
        self.drafter = None

    def _acceptance(self, sequence: Sequence) -> Acceptance:
        """Returns the acceptance statistics of a sequence, which start from the statistics of all sequences."""
        if sequence.drafts.acceptance is None:
            sequence.drafts.acceptance = Acceptance.like(self._usual)
        if isinstance(self.drafter, HeadProposer):
            self.drafter.observe(sequence, sequence.drafts.acceptance)
        return sequence.drafts.acceptance


def _room(sequence: Sequence) -> int:
    """Returns the maximum number of a sequence's drafts. The token after them is not drafted."""
    drafts = sequence.request.speculate and not sequence.request.logits_processors
    return sequence.limit - len(sequence.tokens) - 1 if drafts else 0


def _fitting(sequence: Sequence, drafts: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the drafts before the first one that the constraint forbids."""
    if not drafts or sequence.constraint is None:
        return drafts
    with suppress(Exception):  # a constraint that fails here fails again at the next token
        return drafts[:sequence.constraint.fitting(drafts)]
    return ()
