"""Drafts beside a running engine: for whom they are made, and what is learned of them.

Who makes them is in `drafters`, how many pay in `depth`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as List
from contextlib import suppress
from dataclasses import dataclass, field

from deltic.engine.scheduler import Scheduler
from deltic.engine.sequence import Sequence
from deltic.engine.step_plan import UNKNOWN, StepPlan
from deltic.params import MAX_DRAFTS, Draft, Mtp, Ngram
from deltic.runner.input_batch import FEW_ROWS
from deltic.runner.launch import InFlight
from deltic.runner.logit_masks import slow
from deltic.runner.model import Model
from deltic.runner.penalties import wanted
from deltic.spec_decode.draft_length import Acceptance, AdaptiveDraftLength, DraftLength, Growth
from deltic.spec_decode.draft_model import DraftModelProposer
from deltic.spec_decode.pending_drafts import PendingDrafts, Wants
from deltic.spec_decode.proposers import AsyncProposer, MtpProposer, NgramProposer, Proposer

log = logging.getLogger("deltic")


@dataclass(slots=True)
class SpeculationStats:
    """Counters since the start.

    drafted_at, accepted_at: drafts that were verified, and the right ones among them, by their place in a step.
    saved_seconds: by how much steps with drafts were faster than as many tokens one by one; negative where slower.
    """

    drafted_at: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)
    accepted_at: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)
    saved_seconds: float = 0.0


def drafter_of(runtime: Model) -> Proposer | None:
    """The drafter that the options of a loaded model ask for; None if they ask for none, or for the head of a model
    whose cache was not made for it."""
    speculation = runtime.options.speculation
    if isinstance(speculation, Ngram):
        return NgramProposer(speculation.tokens)
    if isinstance(speculation, Draft):
        assert runtime.draft is not None
        return DraftModelProposer(runtime.draft, runtime.config.vocab_size, speculation.tokens)
    if runtime.mtp_runner is None or speculation is None:
        return None
    return MtpProposer(
        runtime, runtime.mtp_runner, speculation.tokens if isinstance(speculation, Mtp) else Mtp().tokens
    )


class SpeculationController:
    """Has tokens drafted for the sequences that are about to answer. drafter: None where nobody drafts, or once it has
    failed. promise: has the drafts for the next step, which are UNKNOWN."""

    def __init__(
        self, runtime: Model, scheduler: Scheduler, drafter: Proposer | None, depth: DraftLength | None
    ) -> None:
        self.drafter = drafter_of(runtime) if drafter is None else drafter
        self.depth = depth or AdaptiveDraftLength(self.drafter.limit if self.drafter else 0, Growth.of(runtime.config))
        self.stats = SpeculationStats()
        self._runtime, self._scheduler = runtime, scheduler
        self._usual = Acceptance.hopeful(self.depth.limit)
        self._next: int | None = None
        self.promise: PendingDrafts | None = None
        self._most_rows = FEW_ROWS if runtime.verifies else 1 << 30

    def draft(self) -> list[Sequence]:
        """Give the sequences that are about to answer their drafts for the next step; returns these sequences, none
        where nobody drafts."""
        answering = [sequence for sequence in self._scheduler.running if sequence.answering]
        ready = [sequence for sequence in answering if not slow(sequence)]
        self.promise = None
        for sequence in answering:
            sequence.draft_tokens = ()
        if self.drafter is None:
            return []
        granted = self._grants(ready)
        try:
            if granted and len(granted) == len(self._scheduler.running):
                self.promise = self._promised(granted)
            if self.promise:
                for sequence, count in granted:
                    sequence.draft_tokens = (UNKNOWN,) * min(count, self.promise.drafted.drafts)
                return ready
            found = self.drafter.draft(granted) if granted else []
            checked = [self._checked(tokens[:count]) for (_, count), tokens in zip(granted, found, strict=True)]
        except Exception:
            self._switch_off()
            return []
        for (sequence, _), tokens in zip(granted, checked, strict=True):
            sequence.draft_tokens = _fitting(sequence, tokens)
        return ready

    def drafts_next(self, sequences: List[Sequence]) -> bool:
        """Whether drafts are wanted for the next step of these sequences, which are all that run; asked once for each
        step that could be launched without."""
        if not self._drafts_for(len(sequences)):
            return False
        wants = [sequence for sequence in sequences if sequence.request.speculate]
        known = [self._acceptance(sequence) for sequence in wants]
        self._next = (self.depth.choose(known, len(sequences)) if wants else 0) or None
        return self._next is not None

    def drafts_behind(self, flight: InFlight) -> int:
        """How many drafts each sequence shall have behind a step with drafts, which all sequences that run have had
        drafted ahead; asked once for each step that could be launched."""
        if self.drafter is None:
            return 0
        sequences = [share.sequence for share in flight.scheduled]
        self._next = self.depth.choose([self._acceptance(sequence) for sequence in sequences], len(sequences))
        return min(self._next, max(row.drafts for row in flight.plan.rows))

    def promised_behind(self, flight: InFlight, drafts: int) -> PendingDrafts | None:
        """The drafts that follow a step in flight."""
        try:
            promise = self._promised([(share.sequence, drafts) for share in flight.scheduled])
        except Exception:
            self._switch_off()
            return None
        if promise:
            self._next = None
        return promise

    def _drafts_for(self, rows: int) -> bool:
        """Whether drafts may be made while so many sequences run."""
        return self.drafter is not None and rows <= self._most_rows

    def draft_ahead(self, flight: InFlight) -> None:
        """Have what follows a step drafted that was just launched, where nobody has to see before what it has drawn."""
        if not isinstance(self.drafter, AsyncProposer):
            return
        try:
            self.drafter.draft_ahead(flight)
        except Exception:
            self._switch_off()

    def _promised(self, wants: Wants) -> PendingDrafts | None:
        """Where nobody has to see the drafts before they are verified."""
        if not isinstance(self.drafter, AsyncProposer) or any(
                sequence.guide or sequence.constraint or wanted(sequence) for sequence, _ in wants):
            return None
        return self.drafter.promise(wants)

    def disagree(self, sequence: Sequence) -> None:
        """What a sequence took of the last step is not what was taken for granted, where that was."""
        if isinstance(self.drafter, AsyncProposer):
            self.drafter.disagree(sequence)

    def learn(self, sequence: Sequence, drafted: int, right: int) -> None:
        """Of so many drafts that were verified so many were right."""
        for acceptance in (self._acceptance(sequence), self._usual):
            acceptance.learn(drafted, right)
        for position in range(drafted):
            self.stats.drafted_at[position] += 1
            self.stats.accepted_at[position] += position < right

    def timed(self, plan: StepPlan, seconds: float, tokens: int) -> None:
        """A step that did nothing but answer took so long, drafting included, and gave so many tokens."""
        rows, drafts = len(plan.rows), max(row.drafts for row in plan.rows)
        self.depth.timed(rows, drafts, seconds)
        plain = self.depth.plain_seconds(rows)
        if drafts and plain is not None:
            self.stats.saved_seconds += plain * tokens / rows - seconds

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over."""
        try:
            if self.drafter:
                self.drafter.forget(sequence)
        except Exception:
            self._switch_off()

    def _grants(self, ready: List[Sequence]) -> list[tuple[Sequence, int]]:
        """Who may have drafts, and how many there is room for."""
        if not self._drafts_for(len(ready)):
            return []
        wants = [(sequence, room) for sequence in ready if (room := _room(sequence)) > 0]
        depth, self._next = self._next, None
        if depth is None:
            depth = self.depth.choose([self._acceptance(sequence) for sequence, _ in wants], len(ready)) if wants else 0
        left = max(self._scheduler.token_budget - len(ready), 0)
        if self._scheduler.waiting or len(ready) < len(self._scheduler.running):
            left //= 2  # prompts are not to wait for drafts
        granted = list[tuple[Sequence, int]]()
        for sequence, room in wants:
            if count := self._grant(sequence, min(depth, room, left)):
                granted.append((sequence, count))
                left -= count
        return granted

    def _grant(self, sequence: Sequence, count: int) -> int:
        """Room in the cache for so many drafts after the next token; for how many there is."""
        cache, lease = self._runtime.cache, sequence.cache
        if not count or lease is None or not cache.states.attach_delta_log(lease):
            return 0
        # and for what is drafted next before this is seen, if there is any
        more = count if self._runtime.verifies else 0
        return min(max(cache.reserve(lease, count + 1 + more) - 1, 0), count)

    def _checked(self, drafts: List[int]) -> tuple[int, ...]:
        if not all(0 <= draft < self._runtime.config.vocab_size for draft in drafts):
            raise ValueError("a draft is no token")
        return tuple(drafts)

    def _switch_off(self) -> None:
        """Go on without the drafter, which has just failed."""
        log.exception("drafting tokens failed and is switched off; answers go on without")
        self.drafter = None

    def _acceptance(self, sequence: Sequence) -> Acceptance:
        """What is known of the sequence's drafts, or, as long as there were none, of all drafts."""
        if sequence.acceptance is None:
            sequence.acceptance = Acceptance.like(self._usual)
        return sequence.acceptance


def _room(sequence: Sequence) -> int:
    """How many drafts a sequence can use: the token after them is not drafted."""
    drafts = sequence.request.speculate and not sequence.request.logits_processors
    return sequence.limit - len(sequence.tokens) - 1 if drafts else 0


def _fitting(sequence: Sequence, drafts: tuple[int, ...]) -> tuple[int, ...]:
    """The drafts before the first one that may not come."""
    if not drafts or sequence.constraint is None:
        return drafts
    with suppress(Exception):  # a constraint that fails says so again when it is asked for the next token
        return drafts[:sequence.constraint.fitting(drafts)]
    return ()
