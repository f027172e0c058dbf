"""Runs the multi-token-prediction head of a model: extends its K/V in each step, and drafts from the last hidden
state."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from deltic.cache.handles import SequenceCache
from deltic.engine.sequence import Sequence
from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.errors import RequestError
from deltic.model.mtp_head import MtpHead
from deltic.ops.torch.draft_head import hidden_before, keep_hidden, last_hidden
from deltic.ops.types import (
    PAGE,
    Batch,
    CacheViews,
    Drafted,
    Layout,
    MtpStep,
    Sampling,
)
from deltic.runner.input_batch import DeviceTokens


def draft_sizes(limit: int) -> list[int]:
    """Returns the draft counts for which CUDA graphs are recorded."""
    return sorted({min(limit, size) for size in (1, 2, 3, 4, 6, 8, limit)})


_PUT_OFF = 16
"""Maximum number of deferred tokens of a row."""


@dataclass(frozen=True, slots=True)
class _Backlog:
    """Decode steps that the head has not processed yet. Its K/V is not needed while nothing is drafted, and deferred
    steps read its weights only once. first: the first of these steps. The lists have a tensor for each step: ids [R],
    positions [3, R], places [R] in the K/V, hidden [R, H]."""

    first: Batch
    ids: list[Tensor] = field(default_factory=list)
    positions: list[Tensor] = field(default_factory=list)
    places: list[Tensor] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, batch: Batch) -> _Backlog:
        """Returns an empty backlog with copies of the batch's tensors."""
        kept = {name: getattr(batch, name).clone() for name in ("done", "source", "target", "delta_log")}
        return cls(replace(batch, **kept))

    def goes_on(self, batch: Batch) -> bool:
        """True if a step has the next tokens of the same rows and slots, so that all steps can be processed as one."""
        return (batch.layout.rows == self.first.layout.rows and len(self.ids) < _PUT_OFF
                and torch.equal(batch.done, self.first.done + len(self.ids))
                and torch.equal(batch.source, self.first.target) and torch.equal(batch.target, self.first.target))

    def add(self, batch: Batch, hidden: Tensor) -> None:
        for kept, given in ((self.ids, batch.ids), (self.positions, batch.positions), (self.places, batch.store),
                            (self.hidden, hidden)):
            kept.append(given.clone())

    def batch(self) -> tuple[Batch, Tensor]:
        """Returns all steps as one batch, and its hidden states. It has no page table: all K/V goes to `places`."""
        steps, rows, done = len(self.ids), self.first.layout.rows, self.first.done
        end = -(-(int(done.max()) + steps) // PAGE)
        layout = Layout((steps,) * rows, (end * PAGE,) * rows, rows * (steps == 1), 0)
        none = done[:0]
        return Batch(
            layout=layout, ids=torch.stack(self.ids, 1).flatten(), positions=torch.stack(self.positions, 2).flatten(1),
            starts=torch.arange(rows + 1) * steps, done=done, pages=done.new_zeros(rows, end),
            store=torch.stack(self.places, 1).flatten(), source=self.first.source, target=self.first.target, base=done,
            delta_log=self.first.delta_log, append=torch.zeros(rows, dtype=torch.bool), emit_row=none, emit_length=none,
            emit_slot=none, logit_tokens=none), torch.stack(self.hidden, 1).flatten(0, 1)


class MtpRunner:
    """A multi-token-prediction head over one cache.

    Row i of the head's K/V is computed from token i and from the model's own hidden state at position i - 1, never from
    a drafted one, so that prefixes can be shared. Rows of drafts lie past the cursor and are overwritten. A state slot
    holds the hidden state of its last committed token.
    """

    def __init__(self, mtp: MtpHead, views: tuple[CacheViews, ...], slots: List[Tensor], step: MtpStep | None) -> None:
        """views: by device. slots [slots, H] float32: the hidden states of the state slots, equal on each device that
        has them. step: the native implementation. The one for several GPUs follows their steps by itself."""
        self._mtp, self._views, self._slots, self._copies = mtp, views, slots[0], slots
        self._last = slots[0][:0] if step is None or step.last is None else step.last
        self._backlog: _Backlog | None = None
        self._step = step

    def follow(self, batch: Batch, hidden: Tensor) -> None:
        """Processes a step. hidden [T, H] float32: of all its tokens, after the model's final norm. For rows with
        drafts, `settle` then sets the last committed token. Decode steps may be deferred until `catch_up`."""
        self._last = hidden
        if self._step and self._step.last is None and _single(batch):
            return self._defer(batch, hidden)
        self.catch_up()
        if self._step:
            self._last = hidden if self._step.last is None else self._step.last
            return self._step.follow(batch, hidden)
        self._mtp.keep(batch.ids, hidden_before(self._slots, batch, hidden), batch, *self._views)
        keep_hidden(self._slots, batch, hidden)

    def see(self, tokens: Iterable[int]) -> None:
        """Adds tokens to the vocabulary of a head, if it has a shortened one."""
        if self._mtp.vocabulary:
            self._mtp.vocabulary.see(tokens)

    def _defer(self, batch: Batch, hidden: Tensor) -> None:
        if self._backlog is None or not self._backlog.goes_on(batch):
            self.catch_up()
            self._backlog = _Backlog.of(batch)
        self._backlog.add(batch, hidden)

    def catch_up(self) -> None:
        """Processes deferred steps. Must be called before their K/V is used, and before its pages get other owners."""
        backlog, self._backlog = self._backlog, None
        if backlog and self._step:
            self._step.follow(*backlog.batch())

    def hidden(self, tokens: int) -> Tensor:
        """Returns a copy of the last step's hidden states [T, H], for a call of `settle` after the next step."""
        return self._last[:tokens].clone()

    def settle(self, slot: int, token: int, hidden: Tensor | None = None) -> None:
        """Sets the last committed token of a slot. token: index in `hidden`, or without it in the last step's batch."""
        self.catch_up()
        last = (self._last if hidden is None else hidden)[token]
        for slots in self._copies:
            slots[slot] = last

    @property
    def serving(self) -> tuple[MtpHead, MtpStep | None]:
        """The head, and its native implementation if there is one."""
        return self._mtp, self._step

    @serving.setter
    def serving(self, parts: tuple[MtpHead, MtpStep | None]) -> None:
        self._mtp, self._step = parts

    @property
    def drafts_on_device(self) -> bool:
        """True if the device can draft after a step before the host has the step's tokens."""
        return self._step is not None and self._step.draft_ahead is not None

    def record(self, rows: int, pages: int, most: int) -> None:
        """Calls `MtpStep.record`, if there is one."""
        if self._step and self._step.record:
            self._step.record(rows, pages, most)

    def draft_ahead(self, batch: Batch, most: int, chosen: Tensor, keys: Tensor, temperature: Tensor) -> Drafted:
        """Calls `MtpStep.draft_ahead`."""
        assert self._step and self._step.draft_ahead
        return self._step.draft_ahead(batch, most, chosen, keys, temperature)

    def draft_all(self, batch: Batch, counts: Tensor, sampling: Sampling) -> Tensor | None:
        """Returns all drafts of single-token rows, as `MtpStep.draft` does; None if they must be made one by one, with
        `draft`."""
        self.catch_up()
        plain = self.drafts_on_device or sampling.adjust is None
        return self._step.draft(batch, counts, sampling) if self._step and plain else None

    def draft(self, batch: Batch, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
        """Makes one draft for each single-token row. hidden [R, H]: hidden states of the last draft; None: the model's
        own. Returns hidden [R, H] and logits [R, V] float32, -inf for tokens that a shortened head cannot draft. Raises
        RequestError on several GPUs."""
        if len(self._copies) > 1:
            raise RequestError("the draft head of a model over several GPUs drafts for requests only: use tp=1", "tp")
        self.catch_up()
        if hidden is None:
            hidden = last_hidden(self._slots, batch)
        return self._mtp.draft(batch.ids, hidden, batch, *self._views)


def _single(batch: Batch) -> bool:
    """True if each row of a step has one token and no checkpoint."""
    layout = batch.layout
    return layout.tokens == layout.rows and not layout.appends and not layout.checkpoints


Wants = List[tuple[Sequence, int]]
"""Sequences that decode next, each with the wanted number of drafts, at least 1."""


@dataclass(frozen=True, slots=True)
class PendingDrafts:
    """Drafts that the device makes after a step.

    places: by sequence, its cache at launch and the index of its row.
    drafted: the drafts on the device.
    found: the same numbers on the host, valid once `arrived` has completed.
    """

    places: dict[Sequence, tuple[SequenceCache, int]]
    drafted: Drafted
    found: Tensor
    arrived: torch.cuda.Event

    @property
    def most(self) -> int:
        """The number of drafts of each sequence."""
        return self.drafted.drafts

    def covers(self, sequences: Iterable[Sequence]) -> bool:
        """True if it has drafts for all of these sequences, as far as the host knows."""
        return all(sequence in self.places and self.places[sequence][0] is sequence.cache for sequence in sequences)

    def resolve(self, plan: StepPlan, sequences: list[Sequence]) -> tuple[StepPlan, list[Sequence]]:
        """Waits for the drafts. Returns the plan with them, and the sequence of each row."""
        rows = [replace(row, tokens=(row.tokens[0], *self.drafts(sequence, row.drafts))) if row.drafts else row
                for row, sequence in zip(plan.rows, sequences, strict=True)]
        return replace(plan, rows=tuple(rows)), sequences

    def on_device(self, rows: List[PlannedRow], sequences: List[Sequence]) -> DeviceTokens:
        """Returns the places on the device of the tokens of rows with these drafts."""
        drafted, places = self.drafted, list[int]()
        for row, sequence in zip(rows, sequences, strict=True):
            place = self.places[sequence][1]
            places.append(drafted.token_at(place))
            places += [drafted.draft_at(place, draft) for draft in range(row.drafts)]
        return DeviceTokens(drafted.numbers, places)

    def drafts(self, sequence: Sequence, count: int) -> tuple[int, ...]:
        """Waits for the drafts. Returns a sequence's first `count` drafts, which must follow its last token."""
        assert self.follows(sequence), "drafts were verified that follow other tokens"
        drafted, place = self.drafted, self.places[sequence][1]
        return tuple([int(self.found[drafted.draft_at(place, draft)]) for draft in range(min(count, drafted.drafts))])

    def follows(self, sequence: Sequence) -> bool:
        """Waits for the drafts. Returns True if they follow the sequence's last token."""
        self.arrived.synchronize()
        at = self.drafted.token_at(self.places[sequence][1])
        return self.found[at:at + 2].tolist() == [sequence.tokens[-1], sequence.done]
