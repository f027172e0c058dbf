"""Who drafts the tokens that come next. A draft costs or saves time; it never changes an answer."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from deltic.cache.lease import Lease
from deltic.engine.batch import BatchMemory, build, upload, verifying
from deltic.engine.launch import InFlight, Share
from deltic.engine.model import Model
from deltic.engine.mtp import MtpRunner
from deltic.engine.sampler import Draw, SamplingTable, sampling_of
from deltic.engine.scheduler import Plan, Row
from deltic.engine.sequence import Sequence
from deltic.ops.noise import sample_key

Wants = List[tuple[Sequence, int]]
"""Sequences that are about to answer, each with the number of drafts that are wanted, at least 1."""


class Drafter(Protocol):
    """limit: the most drafts that it is ever asked for."""

    limit: int

    def draft(self, wants: Wants) -> list[list[int]]:
        """At most so many drafts of what follows in each sequence."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over."""


@runtime_checkable
class DraftsAhead(Protocol):
    """A drafter that can begin before it is asked."""

    def draft_ahead(self, flight: InFlight) -> None:
        """Draft what follows a step that was just launched, where a device knows by itself what the step draws. The
        shares of the step say whether that was done."""


_LONGEST, _SHORTEST = 4, 2
"""Tokens at the end of a sequence that are looked for in what came before."""


class NgramDrafter:
    """Drafts that what followed the last few tokens before will follow them again (arXiv 2304.04487)."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._known: dict[Sequence, _Ngrams] = {}

    def draft(self, wants: Wants) -> list[list[int]]:
        return [self._known.setdefault(sequence, _Ngrams()).draft(sequence.tokens, count) for sequence, count in wants]

    def forget(self, sequence: Sequence) -> None:
        self._known.pop(sequence, None)


class _Ngrams:
    """Where each group of consecutive tokens of a sequence was seen last."""

    def __init__(self) -> None:
        self._read = 0
        self._after: dict[tuple[int, ...], int] = {}

    def draft(self, tokens: List[int], count: int) -> list[int]:
        for end in range(self._read + 1, len(tokens)):  # the last token has nothing after it yet
            for length in range(_SHORTEST, min(_LONGEST, end) + 1):
                self._after[tuple(tokens[end - length:end])] = end
        self._read = max(len(tokens) - 1, self._read)
        for length in range(min(_LONGEST, len(tokens)), _SHORTEST - 1, -1):
            after = self._after.get(tuple(tokens[-length:]))
            if after is not None:
                return _repeated(tokens[after:], count)
        return []


def _repeated(tokens: List[int], count: int) -> list[int]:
    """The first `count` tokens of these, again and again."""
    return [tokens[index % len(tokens)] for index in range(count)]


class MtpDrafter:
    """Drafts with the model's own draft head; draws as the model itself will, with the same noise."""

    def __init__(self, runtime: Model, head: MtpRunner, limit: int) -> None:
        self.limit, self._runtime, self._head = limit, runtime, head
        self._memory, self._params = BatchMemory(), SamplingTable()
        self._ahead: _Ahead | None = None

    @torch.inference_mode()
    def draft_ahead(self, flight: InFlight) -> None:
        rows, batch, sampling = flight.plan.rows, flight.batch, flight.sampling
        most = max((row.drafts for row in rows), default=0)
        if (not self._head.ahead or not most or len(rows) < len(flight.shares) or batch is None or batch.padded is None
                or flight.drawn is None or sampling is None or not all(map(_has_room, flight.shares))):
            return
        device, width = self._runtime.device, 2 * most + 1
        if sampling.greedy:
            keys = torch.zeros(len(rows), width, dtype=torch.int64, device=device)
        else:
            numbers = array("q", [key for share in flight.shares for key in _keys(share, width)])
            keys = upload(numbers, torch.int64, device).view(-1, width)
        tokens, accepted = self._head.draft_ahead(batch, most, flight.drawn, keys, sampling.temperature)
        found = torch.cat((accepted, tokens), 1).to("cpu", non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(device))
        self._ahead = _Ahead({share.sequence: (share.lease, place) for place, share in enumerate(flight.shares)}, found,
                             arrived)
        for share in flight.shares:
            share.ahead = True

    @torch.inference_mode()
    def draft(self, wants: Wants) -> list[list[int]]:
        ahead, self._ahead = self._ahead, None
        drafts = ahead.drafts(wants) if ahead else None
        if drafts is not None:
            return drafts
        self._runtime.cache.flush()  # the head writes to pages right away
        device, most = self._runtime.device, max(count for _, count in wants)
        plan = Plan(tuple([_next_row(sequence, sequence.tokens[-1], 0) for sequence, _ in wants]))
        batch = (verifying if self._head.ahead else build)(plan, device, memory=self._memory)
        # what is drafted before matters for penalties alone
        draws = [Draw(sequence, (0,) * depth) for sequence, _ in wants for depth in range(most)]
        counts = torch.tensor([count for _, count in wants])
        tokens = self._head.draft_all(batch, counts, self._params.of(draws, device, self._runtime.config.vocab_size))
        if tokens is None:
            return self._one_by_one(wants, most)
        return [row[:count] for row, (_, count) in zip(tokens.tolist(), wants, strict=True)]

    def _one_by_one(self, wants: Wants, most: int) -> list[list[int]]:
        device = self._runtime.device
        drafts: list[list[int]] = [[] for _ in wants]
        hidden = torch.empty(0)
        before: list[int] = []
        for depth in range(most):
            active = [index for index, (_, count) in enumerate(wants) if count > depth]
            rows, draws = [], []
            for index in active:
                sequence, ahead = wants[index][0], drafts[index]
                rows.append(_next_row(sequence, ahead[-1] if ahead else sequence.tokens[-1], depth))
                draws.append(Draw(sequence, tuple(ahead)))
            places = [place for place, index in enumerate(before) if index in active]
            hidden, logits = self._head.draft(build(Plan(tuple(rows)), device), hidden[places] if depth else None)
            tokens = self._runtime.sample(logits, sampling_of(draws, device, logits.shape[1])).tokens.tolist()
            for index, token in zip(active, tokens, strict=True):
                drafts[index].append(token)
            before = active
        return drafts

    def forget(self, sequence: Sequence) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Ahead:
    """Drafts that were made before they were asked for.

    places: of which sequences, on the lease that they had then.
    found [R, 2 + drafts] int64, on the host as soon as `arrived`: the token that the drafts follow, its position, the
        drafts.
    """

    places: dict[Sequence, tuple[Lease, int]]
    found: Tensor
    arrived: torch.cuda.Event

    def drafts(self, wants: Wants) -> list[list[int]] | None:
        """None where others are wanted."""
        if not all(sequence in self.places and self.places[sequence][0] is sequence.lease for sequence, _ in wants):
            return None
        self.arrived.synchronize()
        known, drafts = self.found.tolist(), list[list[int]]()
        for sequence, count in wants:
            token, done, *follow = known[self.places[sequence][1]]
            if (token, done) != (sequence.tokens[-1], sequence.done):
                return None
            drafts.append(follow[:count])
        return drafts


def _has_room(share: Share) -> bool:
    """Whether there are pages for all that may be drafted after a row with drafts."""
    row = share.row
    return row is not None and row.drafts > 0 and share.lease.covered >= row.done + 2 * len(row.tokens) - 1


def _keys(share: Share, count: int) -> list[int]:
    """Of so many draws, the first one after the row's first token."""
    sequence, row = share.sequence, share.row
    assert row is not None
    if sequence.sampling.temperature == 0:
        return [0] * count
    return [sample_key(sequence.seed, sequence.choice, row.done + 1 + place) for place in range(count)]


def _next_row(sequence: Sequence, token: int, depth: int) -> Row:
    """The row of a token that follows the committed ones after so many drafts."""
    lease = sequence.lease
    assert lease is not None
    return Row((token,), lease.done + depth, lease.pages, lease.slot, 1, rotary=sequence.offset)
