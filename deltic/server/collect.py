"""From the engine's events to what came for each choice; knows no wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate

from deltic.errors import GenerationError, RequestError
from deltic.server.bridge import Bridge
from deltic.server.ticket import Ticket
from deltic.text.deltas import Answer, Delta, join, merge
from deltic.text.front import Job, Remember
from deltic.text.stream import Router
from deltic.types import Finish, TokenLogprobs, TokenOut, Usage

Score = tuple[int, TokenLogprobs]
"""A token of an answer and its probabilities."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What has come for one choice; `finish` is set on its last piece."""

    choice: int
    deltas: tuple[Delta, ...] = ()
    scores: tuple[Score, ...] = ()
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class Whole:
    """One finished choice."""

    choice: int
    answer: Answer
    scores: tuple[Score, ...]
    finish: Finish


@dataclass(slots=True)
class _Growing:
    """One choice while it grows. remember: as in Job."""

    choice: int
    router: Router
    silent: frozenset[int]
    remember: Remember | None = None
    tokens: list[int] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    finish: Finish | None = None

    def take(self, event: TokenOut) -> None:
        self.finish = event.finish
        if event.token is not None:
            self.tokens.append(event.token)
        if event.token is not None and not (event.finish == "stop" and event.token in self.silent):
            self.deltas += self.router.feed(event.token)
            ends_text = event.finish == "stop" and not self.router.stopped
            if event.logprobs is not None and not ends_text:
                self.scores.append((event.token, event.logprobs))
        if event.finish:
            self.deltas += self.router.finish()

    def take_out(self) -> Piece:
        piece = Piece(self.choice, tuple(merge(self.deltas)), tuple(self.scores), self.finish)
        self.deltas, self.scores = [], []
        return piece


class Run:
    """Some jobs as one answer, with their choices numbered through: those of the first job, of the second ...

    `usage` is complete when `pieces` is exhausted. size: tokens that have come, and probabilities of tokens. Close it
    when it is not wanted any more.
    """

    def __init__(self, ticket: Ticket, jobs: Sequence[Job], memory: Executor) -> None:
        """memory: where answers are remembered, one after another: that takes its time."""
        self._ticket, self._memory = ticket, memory
        firsts = accumulate((job.request.sampling.n for job in jobs), initial=0)
        self._jobs = {job.request.id: (first, job) for first, job in zip(firsts, jobs, strict=False)}
        self._growing: dict[int, _Growing] = {}
        self.usage, self.size = Usage(0, 0, 0), 0

    @classmethod
    async def start(cls, bridge: Bridge, jobs: Sequence[Job], memory: Executor) -> Run:
        """Hand the jobs to the engine; RequestError if it refuses one, BusyError if there is no room for them."""
        return cls(await bridge.submit([job.request for job in jobs]), jobs, memory)

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """What comes, at most one piece per choice at a time; nothing at all after a long silence. The last piece of
        a choice comes when the choice is remembered, so that the next prompt may build on it.

        GenerationError if the engine gives up.
        """
        async for events in self._ticket:
            touched: dict[int, _Growing] = {}
            for event in events:
                growing = self._take(event)
                touched[growing.choice] = growing
                if event.finish:
                    await self._remember(event, growing)
            yield [growing.take_out() for growing in touched.values()]

    async def parts(self, most: int) -> list[list[Piece]]:
        """The pieces of all choices, when they are finished. RequestError if they have more than `most` tokens and
        probabilities of tokens."""
        parts: dict[int, list[Piece]] = {}
        async for pieces in self.pieces():
            if self.size > most:
                raise RequestError(f"the answer has more than {most} tokens and probabilities of tokens, and is not "
                                   "streamed (max_answer_values): set stream to true, or ask for less", "stream")
            for piece in pieces:
                parts.setdefault(piece.choice, []).append(piece)
        return [parts[choice] for choice in sorted(parts)]

    def close(self) -> None:
        """Free what the engine holds for it. What a client has seen of an answer is remembered, whole or not: another
        conversation may have had the same words, and other thinking."""
        self._ticket.close()
        for growing in self._growing.values():
            if growing.remember:
                with suppress(RuntimeError):  # the server is about to end
                    self._memory.submit(growing.remember, growing.tokens, "abort")
        self._growing.clear()

    def _take(self, event: TokenOut) -> _Growing:
        if event.finish in ("error", "abort"):
            raise GenerationError(event.error or "the request was aborted")
        growing = self._choice(event)
        growing.take(event)
        self.size += 1 + (len(event.logprobs.top) if event.logprobs else 0)
        if event.usage:
            self._add_usage(event.usage, first=event.choice == 0)
        return growing

    def _choice(self, event: TokenOut) -> _Growing:
        """The event's choice, made when its first event comes and given up with its last: there may be many."""
        first, job = self._jobs[event.request]
        number = first + event.choice
        if number not in self._growing:
            hidden = frozenset(job.request.sampling.stop_token_ids)
            self._growing[number] = _Growing(number, job.router.copy(), hidden, job.remember)
        return self._growing.pop(number) if event.finish else self._growing[number]

    async def _remember(self, event: TokenOut, growing: _Growing) -> None:
        if growing.remember and event.finish:
            await asyncio.get_running_loop().run_in_executor(self._memory, growing.remember, growing.tokens,
                                                             event.finish)

    def _add_usage(self, usage: Usage, first: bool) -> None:
        """The prompt counts once, however many choices continue it."""
        total = self.usage
        self.usage = Usage(total.prompt_tokens + usage.prompt_tokens * first,
                           total.cached_tokens + usage.cached_tokens * first,
                           total.completion_tokens + usage.completion_tokens,
                           total.drafted_tokens + usage.drafted_tokens, total.accepted_tokens + usage.accepted_tokens)


def whole(pieces: Sequence[Piece]) -> Whole:
    """A finished choice of all its pieces."""
    finish = pieces[-1].finish
    assert finish
    return Whole(pieces[0].choice, join(delta for piece in pieces for delta in piece.deltas),
                 tuple(score for piece in pieces for score in piece.scores), finish)
