"""Proposers of draft tokens. A draft costs or saves time; it never changes an answer."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from deltic.engine.sequence import Sequence
from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.runner.input_batch import InputBatch, build, verifying
from deltic.runner.launch import InFlight, ScheduledSequence
from deltic.runner.model_runner import Model
from deltic.runner.sampling import AnswerKeys, SampleRow, SamplingTable, sampling_of
from deltic.spec_decode.mtp import MtpRunner, PendingDrafts, Wants


class Proposer(Protocol):
    """Makes draft tokens. limit: the largest number of drafts of a sequence."""

    limit: int

    def draft(self, wants: Wants) -> list[list[int]]:
        """Returns drafts of the next tokens of each sequence, at most as many as wanted."""

    def forget(self, sequence: Sequence) -> None:
        """Forgets a finished sequence."""


@runtime_checkable
class AsyncProposer(Protocol):
    """A proposer that can start to draft before `draft` is called."""

    def draft_ahead(self, flight: InFlight) -> None:
        """Starts the drafts after a step that was just launched, if the device can make them without the host. In that
        case it sets `ScheduledSequence.drafted_next`."""

    def take_pending(self, wants: Wants) -> PendingDrafts | None:
        """Returns the started drafts, only once; None if some of these sequences have none."""

    def drop_pending(self, sequence: Sequence) -> None:
        """Drops the drafts of a sequence, because they follow tokens that it did not take."""


_MAX_INDEXED = 16384
"""Maximum number of prompt tokens that are indexed in one step; this takes some milliseconds."""
_MAX_SEEN = 2048
"""Maximum number of tokens that are added to a draft head's vocabulary in one step: a millisecond, if all are new."""
_MAX_PLACES = 128
"""Maximum number of earlier places of a sequence's last two tokens that are examined."""


class NgramProposer:
    """Drafts the tokens that followed an earlier occurrence of the last few tokens (arXiv 2304.04487)."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._known: dict[Sequence, _Ngrams] = {}

    def draft(self, wants: Wants) -> list[list[int]]:
        return [self._of(sequence).draft(sequence.tokens, count) for sequence, count in wants]

    def forget(self, sequence: Sequence) -> None:
        self._known.pop(sequence, None)

    def _of(self, sequence: Sequence) -> _Ngrams:
        if sequence not in self._known:
            self._known[sequence] = _Ngrams(len(sequence.tokens))
        return self._known[sequence]


class _Ngrams:
    """An index of a sequence's token pairs, in about 12 bytes a token. Pairs with the same hash are a chain: `_last` [a
    power of two] has the place of the newest pair, `_earlier` [places] the place of the previous pair, or 0. A pair's
    place is the position after it."""

    def __init__(self, tokens: int) -> None:
        """tokens: the current length of the sequence."""
        self._last = array("i", bytes(4 << max(12, tokens.bit_length())))
        self._earlier = array("i", (0, 0))

    def draft(self, tokens: List[int], count: int) -> list[int]:
        self._note(tokens)
        if not len(self._earlier) == len(tokens) > 2:
            return []
        second, first = tokens[-2:]
        place, found, most = self._last[self._number(second, first)], 0, 1
        for _ in range(_MAX_PLACES):
            if not place or most == 4:
                break
            if tokens[place - 1] == first and tokens[place - 2] == second:
                same = 2 + (place > 2 and tokens[place - 3] == tokens[-3])
                same += same == 3 and place > 3 and tokens[place - 4] == tokens[-4]
                if same > most:
                    found, most = place, same
            place = self._earlier[place]
        return _repeated(tokens[found:], count) if found else []

    def _note(self, tokens: List[int]) -> None:
        """Adds the next pairs, except for the last one, because no token follows it yet."""
        begin = len(self._earlier)
        for place in range(begin, min(len(tokens), begin + _MAX_INDEXED)):
            number = self._number(tokens[place - 2], tokens[place - 1])
            self._earlier.append(self._last[number])
            self._last[number] = place

    def _number(self, first: int, second: int) -> int:
        return (first * 0x9E3779B1 + second * 0x85EBCA6B >> 7) & len(self._last) - 1


def _repeated(tokens: List[int], count: int) -> list[int]:
    """Returns the first `count` tokens of an endless repetition of `tokens`."""
    return [tokens[index % len(tokens)] for index in range(count)]


@dataclass(frozen=True, slots=True)
class _Aside:
    """A side stream that copies drafts to the host. made: the drafts are computed. arrived: the last copy to each of
    the two buffers is complete."""

    stream: torch.cuda.Stream
    made: torch.cuda.Event
    arrived: list[torch.cuda.Event]


class MtpProposer:
    """Drafts with the model's own draft head. Samples with the same noise that the model will use."""

    def __init__(self, runtime: Model, head: MtpRunner, limit: int) -> None:
        self.limit, self._runtime, self._head = limit, runtime, head
        self._memory, self._params = InputBatch(), SamplingTable()
        self._pending: PendingDrafts | None = None
        self._turn, self._keys, self._answers = 0, torch.empty(0), AnswerKeys()
        self._landings = [torch.empty(0)] * 2
        self._aside: _Aside | None = None
        self._seen: dict[Sequence, int] = {}

    @torch.inference_mode()
    def draft_ahead(self, flight: InFlight) -> None:
        self._pending = None  # drafts that were started before follow a step that is no longer the last one
        rows, batch, sampling = flight.plan.rows, flight.batch, flight.sampling
        most = max((row.drafts for row in rows), default=0)
        if (
            not self._head.drafts_on_device
            or not most
            or len(rows) < len(flight.scheduled)
            or batch is None
            or batch.padded is None
            or flight.drawn is None
            or sampling is None
            or not all(map(_has_room, flight.scheduled))
        ):
            return
        self._see([each.sequence for each in flight.scheduled if each.live])
        device, keys = self._runtime.device, self._keys
        if keys.shape != (len(rows), 2 * most + 1):
            keys = self._keys = torch.zeros(len(rows), 2 * most + 1, dtype=torch.int64, device=device)
        if not sampling.greedy:
            self._answers.write_keys([each.sequence for each in flight.scheduled], batch.done, keys)
        stream = torch.cuda.current_stream(device)
        if self._aside is None:
            self._aside = _Aside(torch.cuda.Stream(device), torch.cuda.Event(), [torch.cuda.Event() for _ in range(2)])
        else:
            stream.wait_event(self._aside.arrived[self._turn])  # before new drafts overwrite the buffer
        drafted = self._head.draft_ahead(batch, most, flight.drawn, keys, sampling.temperature)
        self._turn ^= 1
        found, arrived = self._landing(len(drafted.numbers)), self._aside.arrived[self._turn]
        self._aside.made.record(stream)
        with torch.cuda.stream(self._aside.stream):
            self._aside.stream.wait_event(self._aside.made)
            found.copy_(drafted.numbers, non_blocking=True)
            arrived.record()
        places = {each.sequence: (each.cache, place) for place, each in enumerate(flight.scheduled)}
        self._pending = PendingDrafts(places, drafted, found, arrived)
        for each in flight.scheduled:
            each.drafted_next = True

    def _landing(self, count: int) -> Tensor:
        """Returns one of two pinned buffers. They alternate, because the other one may still be unread."""
        if len(self._landings[self._turn]) < count:
            self._landings[self._turn] = torch.empty(count, dtype=torch.int64, pin_memory=True)
        return self._landings[self._turn][:count]

    def take_pending(self, wants: Wants) -> PendingDrafts | None:
        if self._pending is None or not self._pending.covers(sequence for sequence, _ in wants):
            return None
        ahead, self._pending = self._pending, None
        return ahead

    def drop_pending(self, sequence: Sequence) -> None:
        if self._pending:
            self._pending.places.pop(sequence, None)

    @torch.inference_mode()
    def draft(self, wants: Wants) -> list[list[int]]:
        ahead, self._pending = self._pending, None
        sequences = [sequence for sequence, _ in wants]
        if ahead and ahead.covers(sequences) and all(map(ahead.follows, sequences)):
            return [[*ahead.drafts(sequence, count)] for sequence, count in wants]
        self._see(sequences)
        self._runtime.cache.operations.flush()  # the head writes to pages at once
        device, most = self._runtime.device, max(count for _, count in wants)
        plan = StepPlan(tuple([_next_row(sequence, sequence.tokens[-1], 0) for sequence, _ in wants]))
        batch = (verifying if self._head.drafts_on_device else build)(plan, device, memory=self._memory)
        # earlier drafts matter for penalties only
        draws = [SampleRow(sequence, (0,) * depth) for sequence, _ in wants for depth in range(most)]
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
                draws.append(SampleRow(sequence, tuple(ahead)))
            places = [place for place, index in enumerate(before) if index in active]
            hidden, logits = self._head.draft(build(StepPlan(tuple(rows)), device), hidden[places] if depth else None)
            tokens = self._runtime.sample(logits, sampling_of(draws, device, logits.shape[1])).tokens.tolist()
            for index, token in zip(active, tokens, strict=True):
                drafts[index].append(token)
            before = active
        return drafts

    def _see(self, sequences: List[Sequence]) -> None:
        """Adds the sequences' new tokens to the head's vocabulary. Long prompts are added over several steps."""
        each = -(-_MAX_SEEN // max(len(sequences), 1))
        for sequence in sequences:
            begin = self._seen.get(sequence, 0)
            end = self._seen[sequence] = min(begin + each, len(sequence.tokens))
            self._head.see(sequence.tokens[begin:end])

    def forget(self, sequence: Sequence) -> None:
        self._seen.pop(sequence, None)


def _has_room(each: ScheduledSequence) -> bool:
    """True if there are pages for all drafts after a row with drafts."""
    row = each.row
    return row is not None and row.drafts > 0 and each.cache.covered >= row.done + 2 * len(row.tokens) - 1


def _next_row(sequence: Sequence, token: int, depth: int) -> PlannedRow:
    """Returns the row of a token that follows the committed tokens and `depth` drafts."""
    cache = sequence.cache
    assert cache is not None
    return PlannedRow((token,), cache.done + depth, cache.pages, cache.slot, 1, rotary=sequence.images.offset)
