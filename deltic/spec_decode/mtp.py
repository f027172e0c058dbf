"""The draft head beside a running model: its K/V grows with every step, and it drafts on from the last hidden
state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from deltic.model.mtp_head import MtpHead
from deltic.ops.mtp import Drafted, MtpStep
from deltic.ops.types import (
    PAGE,
    Batch,
    CacheViews,
    Layout,
    Sampling,
)


def draft_sizes(limit: int) -> list[int]:
    """How many drafts are made at once there, if so many are made at most."""
    return sorted({min(limit, size) for size in (1, 2, 3, 4, 6, 8, limit)})


_PUT_OFF = 16
"""Tokens of a row at most that the head has not been told of."""


@dataclass(frozen=True, slots=True)
class _Backlog:
    """Single tokens of some rows, step by step, that the head has not been told of yet: while nothing is drafted nobody
    needs its K/V, and its weights are read once for all of them. first: the step that they begin with. The lists have a
    tensor for each step: ids [R], positions [3, R], places [R] in the K/V, hidden [R, H]."""

    first: Batch
    ids: list[Tensor] = field(default_factory=list)
    positions: list[Tensor] = field(default_factory=list)
    places: list[Tensor] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, batch: Batch) -> _Backlog:
        """Empty; what the batch's memory holds may change."""
        kept = {name: getattr(batch, name).clone() for name in ("done", "source", "target", "delta_log")}
        return cls(replace(batch, **kept))

    def goes_on(self, batch: Batch) -> bool:
        """Whether a step has the next tokens of these rows, and finds and leaves all where they were left: as one step
        they are read from where the first one begins and written to where it ends."""
        return (batch.layout.rows == self.first.layout.rows and len(self.ids) < _PUT_OFF
                and torch.equal(batch.done, self.first.done + len(self.ids))
                and torch.equal(batch.source, self.first.target) and torch.equal(batch.target, self.first.target))

    def add(self, batch: Batch, hidden: Tensor) -> None:
        for kept, given in ((self.ids, batch.ids), (self.positions, batch.positions), (self.places, batch.store),
                            (self.hidden, hidden)):
            kept.append(given.clone())

    def batch(self) -> tuple[Batch, Tensor]:
        """All of them as one step, and its hidden states. Its pages are none, as all K/V goes to its places."""
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

    Row i of its K/V is made of token i and of the model's own hidden state at position i - 1, never of a drafted one,
    so that prefixes can be shared; the rows of drafts lie past the cursor and are overwritten. A state slot holds
    the hidden state of its last committed token.
    """

    def __init__(self, mtp: MtpHead, views: CacheViews, hidden: Tensor) -> None:
        """hidden [1, slots, H] float32: those of the state slots."""
        self._mtp, self._views, self._slots = mtp, views, hidden[0]
        self._last = hidden[0, :0]
        self._backlog: _Backlog | None = None
        self._step = mtp.ops.mtp_step(mtp.ops, mtp, views, hidden[0])

    def follow(self, batch: Batch, hidden: Tensor) -> None:
        """Take note of a step. hidden [T, H] float32: of all its tokens, after the model's final norm. Which tokens of
        appended rows are committed is told by `settle`. Steps of single tokens may be put off until `catch_up`."""
        self._last = hidden
        if self._step and self._step.last is None and _single(batch):
            return self._put_off(batch, hidden)
        self.catch_up()
        if self._step:
            self._last = hidden if self._step.last is None else self._step.last
            return self._step.follow(batch, hidden)
        before = hidden.roll(1, 0)
        firsts, ends = batch.starts[:-1], batch.starts[1:] - 1
        before[firsts] = torch.where((batch.done > 0)[:, None], self._slots[batch.source], 0.0)
        self._mtp.keep(batch.ids, before, batch, self._views)
        if batch.layout.checkpoints:
            rows = batch.emit_row
            self._slots[batch.emit_slot] = hidden[batch.starts[rows] + batch.emit_length - batch.done[rows] - 1]
        targets = batch.target
        if batch.layout.appends:
            targets, ends = targets[~batch.append], ends[~batch.append]
        self._slots[targets] = hidden[ends]

    def see(self, tokens: Iterable[int]) -> None:
        """A shortened head shall be able to draft these tokens, which occurred."""
        if self._mtp.vocabulary:
            self._mtp.vocabulary.see(tokens)

    def _put_off(self, batch: Batch, hidden: Tensor) -> None:
        if self._backlog is None or not self._backlog.goes_on(batch):
            self.catch_up()
            self._backlog = _Backlog.of(batch)
        self._backlog.add(batch, hidden)

    def catch_up(self) -> None:
        """Do what was put off, before somebody looks at what it writes, or owns where it is written."""
        backlog, self._backlog = self._backlog, None
        if backlog and self._step:
            self._step.follow(*backlog.batch())

    def hidden(self, tokens: int) -> Tensor:
        """A copy of the hidden states [T, H] of the last step's tokens, for `settle` when another step has followed."""
        return self._last[:tokens].clone()

    def settle(self, slot: int, token: int, hidden: Tensor | None = None) -> None:
        """The last committed token of a slot is this one of the last step's batch, or of the one that these are the
        hidden states of."""
        self.catch_up()
        self._slots[slot] = (self._last if hidden is None else hidden)[token]

    @property
    def serving(self) -> tuple[MtpHead, MtpStep | None]:
        """What the head is computed by: its ops one by one, or calls of a backend's own."""
        return self._mtp, self._step

    @serving.setter
    def serving(self, parts: tuple[MtpHead, MtpStep | None]) -> None:
        self._mtp, self._step = parts

    @property
    def ahead(self) -> bool:
        """Whether the drafts that follow a step can be made before the host has seen what it has drawn."""
        return self._step is not None and self._step.draft_ahead is not None

    def record(self, rows: int, pages: int, most: int) -> None:
        """Make ready for drafts of a bucket, as `MtpStep.record` says."""
        if self._step and self._step.record:
            self._step.record(rows, pages, most)

    def draft_ahead(self, batch: Batch, most: int, chosen: Tensor, keys: Tensor, temperature: Tensor) -> Drafted:
        """As `MtpStep.draft_ahead`."""
        assert self._step and self._step.draft_ahead
        return self._step.draft_ahead(batch, most, chosen, keys, temperature)

    def draft_all(self, batch: Batch, counts: Tensor, sampling: Sampling) -> Tensor | None:
        """All drafts of single-token rows at once, as `MtpStep.draft` says; None where they have to be made one after
        another, with `draft`."""
        self.catch_up()
        plain = self.ahead or sampling.adjust is None
        return self._step.draft(batch, counts, sampling) if self._step and plain else None

    def draft(self, batch: Batch, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
        """Draft from single-token rows. hidden [R, H]: what the last draft gave; None: start from the model's own.
        Returns hidden [R, H] and logits [R, V] float32, -inf of tokens that a shortened head cannot draft."""
        self.catch_up()
        if hidden is None:
            hidden = torch.where((batch.done > 0)[:, None], self._slots[batch.source], 0.0)
        return self._mtp.draft(batch.ids, hidden, batch, self._views)


def _single(batch: Batch) -> bool:
    """Whether a step has one token of each row, whose states go nowhere else."""
    layout = batch.layout
    return layout.tokens == layout.rows and not layout.appends and not layout.checkpoints
