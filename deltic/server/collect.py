"""From the engine's events to what came for each choice; knows no wire."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from deltic.chat.choices import AnswerAssembler, ChoiceDelta, TokenScore
from deltic.chat.processor import PreparedRequest
from deltic.engine.fair_executor import FairExecutor
from deltic.errors import GenerationError, RequestError
from deltic.params import Event, Usage
from deltic.server.async_engine import AsyncEngine
from deltic.server.body import renamed
from deltic.server.request_handle import RequestHandle


class GenerationStream:
    """Some jobs as one answer, with their choices numbered through: those of the first job, of the second ...

    `usage` is complete when `pieces` is exhausted. size: tokens that have come, and probabilities of tokens. names:
    what the client calls the fields of its request, see `renamed`. Close it when it is not wanted any more.
    """

    def __init__(
        self,
        bridge: AsyncEngine,
        handle: RequestHandle,
        jobs: Sequence[PreparedRequest],
        memory: FairExecutor,
        whole: bool,
    ) -> None:
        """memory: where answers are remembered, one after another: that takes its time. whole: as in Answers."""
        self.names: Mapping[str, str] = {}
        self._bridge, self._handle, self._answers, self._memory = bridge, handle, AnswerAssembler(jobs, whole), memory
        self.usage, self.size, self._came = Usage(0, 0, 0), 0, 0
        self._finishes: list[str] = []
        self._tokens: dict[tuple[str, int], list[int]] | None = None

    @classmethod
    async def start(
        cls, bridge: AsyncEngine, jobs: Sequence[PreparedRequest], memory: FairExecutor, whole: bool
    ) -> GenerationStream:
        """Hand the jobs to the engine; RequestError if it refuses one, BusyError if there is no room for them."""
        return cls(bridge, await bridge.submit([job.request for job in jobs]), jobs, memory, whole)

    @property
    def tokens(self) -> tuple[int, int]:
        """Of the prompts, and those of the answers that have come."""
        return self._handle.prompt_tokens, self._came

    @property
    def seconds(self) -> tuple[float, float]:
        """Until the first token came, and since then."""
        now, began = time.perf_counter(), self._handle.began
        first = self._handle.first_token or now
        return first - began, now - first

    async def pieces(self) -> AsyncIterator[list[ChoiceDelta]]:
        """What comes, at most one piece per choice at a time. The last piece of a choice comes when the choice is
        remembered, so that the next prompt may build on it.

        GenerationError if the engine gives up, RequestError where what was asked for is to blame.
        """
        async for events in self._handle:
            for event in events:
                self._count(event)
            pieces = self._answers.take(events)
            for piece in pieces:
                if piece.remember:
                    await self._memory.run(self._handle.client, piece.remember)
                if piece.done:
                    self._add_usage(piece.done.usage, first=piece.done.index == 0)
                    self._finishes.append(piece.done.finish)
            yield pieces

    async def wholes(self, most: int) -> list[ChoiceDelta]:
        """All choices, when they are done, with all of their scores. RequestError if they have more than `most` tokens
        and probabilities of tokens."""
        scores: dict[int, list[TokenScore]] = {}
        done: dict[int, ChoiceDelta] = {}
        async for pieces in self.pieces():
            if self.size > most:
                raise RequestError(f"the answer has more than {most} tokens and probabilities of tokens, and is not "
                                   "streamed (max_answer_values): set stream to true, or ask for less", "stream")
            for piece in pieces:
                scores.setdefault(piece.number, []).extend(piece.scores)
                if piece.done:
                    done[piece.number] = replace(piece, scores=scores.pop(piece.number))
        return [done[number] for number in sorted(done)]

    def figures(self, began: float) -> dict[str, Any]:
        """What the log says of it. began: when the client asked, by time.perf_counter. What was made for a client that
        did not wait for the end is counted, but for what only the end would have told."""
        handle, usage = self._handle, self.usage
        first = handle.first_token
        ended = bool(self._finishes)
        return {"queue_ms": _ms(usage.queued_seconds) if ended else None,
                "first_token_ms": _ms(first - began) if first else None,
                "prompt_tokens": handle.prompt_tokens, "cached_tokens": usage.cached_tokens if ended else None,
                "output_tokens": handle.tokens, "reasoning_tokens": usage.reasoning_tokens if ended else None,
                "finish_reasons": self._finishes}

    def keep_tokens(self) -> None:
        """From now on, for `texts`."""
        self._tokens = {}

    def texts(self, spell: Callable[[Sequence[int]], str]) -> dict[str, Iterator[str]]:
        """What was asked and answered, spelled when it is read. Nothing was answered before `keep_tokens`."""
        return {"prompts": (spell(request.ids) for request in self._handle.asked),
                "answers": (spell(tokens) for tokens in (self._tokens or {}).values())}

    def progress(self) -> dict[str, Any]:
        """How far it is, for who looks on."""
        handle, parts = self._handle, self._bridge.progress(self._handle)
        found = {part.status for part in parts}
        status = next((each for each in ("decoding", "prefill", "waiting") if each in found), "finished")
        return {"status": "paused" if handle.held and status != "finished" else status,
                "prompt_tokens": handle.prompt_tokens, "prompt_tokens_read": sum(part.read for part in parts),
                "output_tokens": handle.tokens}

    def cut_short(self) -> None:
        """Have the answers end where they are, with the reason "length"."""
        self._bridge.cut_short(self._handle)

    def cancel(self, reason: str) -> None:
        """Have its reader get a GenerationError."""
        self._handle.fail(GenerationError(reason))

    def close(self) -> None:
        """Free what the engine holds for it; what was seen of its answers is remembered."""
        self._handle.close()
        with suppress(RuntimeError):  # the server is about to end
            for remember in self._answers.close():
                self._memory.submit(self._handle.client, remember)

    def _count(self, event: Event) -> None:
        if event.refused:
            with renamed(self.names):
                raise event.refused
        if event.finish in ("error", "abort"):
            raise GenerationError(event.error or "the request was aborted")
        if self._tokens is not None and event.token is not None:
            self._tokens.setdefault((event.request, event.choice), []).append(event.token)
        self._came += event.token is not None
        self.size += 1 + (len(event.logprobs.top) if event.logprobs else 0)
        self.size += sum(1 + len(score.top) for score in event.prompt or ())

    def _add_usage(self, usage: Usage, first: bool) -> None:
        """The prompt counts once, however many choices continue it."""
        total = self.usage
        self.usage = Usage(total.prompt_tokens + usage.prompt_tokens * first,
                           total.cached_tokens + usage.cached_tokens * first,
                           total.completion_tokens + usage.completion_tokens,
                           total.drafted_tokens + usage.drafted_tokens, total.accepted_tokens + usage.accepted_tokens,
                           total.reasoning_tokens + usage.reasoning_tokens,
                           max(total.queued_seconds, usage.queued_seconds if first else 0.0))


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
