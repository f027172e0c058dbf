"""From the engine's events to what came for each choice; knows no wire."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from deltic.errors import GenerationError
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
            if self.remember:
                self.remember(self.tokens, event.finish)

    def take_out(self) -> Piece:
        piece = Piece(self.choice, tuple(merge(self.deltas)), tuple(self.scores), self.finish)
        self.deltas, self.scores = [], []
        return piece


class Run:
    """Some jobs as one answer, with their choices numbered through: those of the first job, of the second ...

    `usage` is complete when `pieces` is exhausted. Close it when it is not wanted any more.
    """

    def __init__(self, ticket: Ticket, jobs: Sequence[Job]) -> None:
        self._ticket = ticket
        self._choices: dict[tuple[str, int], _Growing] = {}
        for job in jobs:
            for choice in range(job.request.sampling.n):
                self._choices[job.request.id, choice] = _Growing(
                    len(self._choices), job.router.copy(), frozenset(job.request.sampling.stop_token_ids),
                    job.remember)
        self.usage = Usage(0, 0, 0)

    @classmethod
    async def start(cls, bridge: Bridge, jobs: Sequence[Job]) -> Run:
        """Hand the jobs to the engine; RequestError if it refuses one."""
        return cls(await bridge.submit([job.request for job in jobs]), jobs)

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """All that has come, at most one piece per choice; nothing at all after a long silence.

        GenerationError if the engine gives up.
        """
        async for events in self._ticket:
            touched: dict[int, _Growing] = {}
            for event in events:
                growing = self._take(event)
                touched[growing.choice] = growing
            yield [growing.take_out() for growing in touched.values()]

    async def whole(self) -> list[Whole]:
        """All choices, when they are finished."""
        parts: dict[int, list[Piece]] = {}
        async for pieces in self.pieces():
            for piece in pieces:
                parts.setdefault(piece.choice, []).append(piece)
        return [_whole(parts[choice]) for choice in sorted(parts)]

    def close(self) -> None:
        """Free what the engine holds for it."""
        self._ticket.close()

    def _take(self, event: TokenOut) -> _Growing:
        if event.finish in ("error", "abort"):
            raise GenerationError(event.error or "the request was aborted")
        growing = self._choices[event.request, event.choice]
        growing.take(event)
        if event.usage:
            self._add_usage(event.usage, first=event.choice == 0)
        return growing

    def _add_usage(self, usage: Usage, first: bool) -> None:
        """The prompt counts once, however many choices continue it."""
        total = self.usage
        self.usage = Usage(total.prompt_tokens + usage.prompt_tokens * first,
                           total.cached_tokens + usage.cached_tokens * first,
                           total.completion_tokens + usage.completion_tokens,
                           total.drafted_tokens + usage.drafted_tokens, total.accepted_tokens + usage.accepted_tokens)


def _whole(pieces: Sequence[Piece]) -> Whole:
    finish = pieces[-1].finish
    assert finish
    return Whole(pieces[0].choice, join(delta for piece in pieces for delta in piece.deltas),
                 tuple(score for piece in pieces for score in piece.scores), finish)
