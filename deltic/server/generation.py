"""Serves a loaded model over HTTP and streams the answers to a request. Independent of any particular API."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from starlette.requests import Request

from deltic.chat.choices import AnswerAssembler, ChoiceDelta, TokenScore
from deltic.chat.history import AnswerEnd
from deltic.chat.processor import ChatProcessor, PreparedRequest, bare_job, counting_bound, prompt_bound
from deltic.chat.response_format import OutputFormat
from deltic.chat.tokenizer import Tokenizer, TokenLimit
from deltic.config import Limits
from deltic.engine.fair_executor import FairExecutor
from deltic.errors import GenerationError, RequestError
from deltic.llm import LLM
from deltic.params import EngineRequest, Event, Lineage, LoadedAdapter, SamplingParams, Usage
from deltic.server.async_engine import AsyncEngine, RequestHandle
from deltic.server.content import DocumentTexts, TextOf
from deltic.server.fields import renamed, sent_name
from deltic.server.forks import ForkStore
from deltic.server.http import while_connected
from deltic.server.records import ActiveRequests, RequestRecord, record_of, salt_of
from deltic.vision.prompt import Shown


class GenerationStream:
    """The answers to one or more prepared requests, with their choices numbered consecutively.

    usage: complete at the end of `deltas`. size: tokens and logprobs so far. names: maps field names to the client's
    names. keep_end: called with the number and the end of each choice that can be forked. Close the stream when it is
    no longer needed.
    """

    def __init__(self, engine: AsyncEngine, handle: RequestHandle, prepared: Sequence[PreparedRequest],
                 memory: FairExecutor, whole: bool, names: Mapping[str, str]) -> None:
        """memory: the thread that records answers for later prompts. whole: the answers are not streamed."""
        self.usage = Usage(0, 0, 0)
        self.size = 0
        self.names = names
        self.keep_end: Callable[[int, AnswerEnd], None] | None = None
        self._engine = engine
        self._handle = handle
        self._memory = memory
        self._answers = AnswerAssembler(prepared, whole)
        self._generated = 0
        self._finishes: list[str] = []
        self._tokens: dict[tuple[str, int], list[int]] | None = None

    @property
    def tokens(self) -> tuple[int, int]:
        """Returns the counts of prompt tokens and of generated tokens so far."""
        return self._handle.prompt_tokens, self._generated

    @property
    def seconds(self) -> tuple[float, float]:
        """Returns the seconds until the first token, and the seconds since then."""
        now = time.perf_counter()
        first = self._handle.first_token or now
        return first - self._handle.began, now - first

    async def deltas(self) -> AsyncIterator[list[ChoiceDelta]]:
        """Yields the deltas that have arrived, at most one per choice at a time. The last delta of a choice is yielded
        after the choice is recorded, so that the next prompt can continue it.

        Raises GenerationError if the engine gives up, RequestError if the request is at fault.
        """
        async for events in self._handle:
            for event in events:
                self._count(event)
            deltas = self._answers.take(events)
            for delta in deltas:
                if delta.remember:
                    end = await self._memory.run(self._handle.client, delta.remember)
                    if end and self.keep_end:
                        self.keep_end(delta.number, end)
                if delta.done:
                    self._add_usage(delta.done.usage, first=delta.done.index == 0)
                    self._finishes.append(delta.done.finish)
            yield deltas

    async def gather(self, most: int) -> list[ChoiceDelta]:
        """Returns all finished choices with their scores. Raises RequestError if they have more than `most` tokens and
        logprobs."""
        scores: dict[int, list[TokenScore]] = {}
        done: dict[int, ChoiceDelta] = {}
        async for deltas in self.deltas():
            if self.size > most:
                raise RequestError(f"the answer has more than {most} tokens and probabilities of tokens, and is not "
                                   "streamed (max_answer_values): set stream to true, or ask for less", "stream")
            for delta in deltas:
                scores.setdefault(delta.number, []).extend(delta.scores)
                if delta.done:
                    done[delta.number] = replace(delta, scores=scores.pop(delta.number))
        return [done[number] for number in sorted(done)]

    def figures(self, began: float) -> dict[str, Any]:
        """Returns the figures for the request log. began: time of the request, by time.perf_counter. Figures that are
        known only at the end are None if the client disconnected before."""
        handle, usage = self._handle, self.usage
        first, ended = handle.first_token, bool(self._finishes)
        return {"queue_ms": _ms(usage.queued_seconds) if ended else None,
                "first_token_ms": _ms(first - began) if first else None,
                "prompt_tokens": handle.prompt_tokens, "cached_tokens": usage.cached_tokens if ended else None,
                "output_tokens": handle.tokens, "reasoning_tokens": usage.reasoning_tokens if ended else None,
                "finish_reasons": self._finishes}

    def keep_tokens(self) -> None:
        """Keeps the tokens from now on, for `texts`."""
        self._tokens = {}

    def texts(self, spell: Callable[[Sequence[int]], str]) -> dict[str, Iterator[str]]:
        """Returns iterators over the prompts and answers as text. Tokens are decoded when the iterators are read."""
        return {"prompts": (spell(request.ids) for request in self._handle.asked),
                "answers": (spell(tokens) for tokens in (self._tokens or {}).values())}

    def sequences(self) -> Iterator[tuple[EngineRequest, list[int]]]:
        """Yields each request of the engine with the tokens of its first answer since `keep_tokens`."""
        for request in self._handle.asked:
            yield request, (self._tokens or {}).get((request.id, 0), [])

    def progress(self) -> dict[str, Any]:
        """Returns the progress of the request, for `/v1/requests`."""
        handle, parts = self._handle, self._engine.progress(self._handle)
        found = {part.status for part in parts}
        status = next((each for each in ("decoding", "prefill", "waiting") if each in found), "finished")
        return {"status": "paused" if handle.held and status != "finished" else status,
                "prompt_tokens": handle.prompt_tokens, "prompt_tokens_read": sum(part.read for part in parts),
                "output_tokens": handle.tokens}

    def cut_short(self) -> None:
        """Ends the answers where they are, with the reason "length"."""
        self._engine.cut_short(self._handle)

    def cancel(self, reason: str) -> None:
        """Ends the stream with a GenerationError for its reader."""
        self._handle.fail(GenerationError(reason))

    def close(self) -> None:
        """Frees the engine's resources for this stream. The tokens that were generated are recorded."""
        self._handle.close()
        with suppress(RuntimeError):  # the server is shutting down
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
        self._generated += event.token is not None
        self.size += 1 + (len(event.logprobs.top) if event.logprobs else 0)
        self.size += sum(1 + len(score.top) for score in event.prompt or ())

    def _add_usage(self, usage: Usage, first: bool) -> None:
        """Adds the usage of a choice. The prompt counts once, with its first choice."""
        total = self.usage
        self.usage = Usage(
            total.prompt_tokens + usage.prompt_tokens * first,
            total.cached_tokens + usage.cached_tokens * first,
            total.completion_tokens + usage.completion_tokens,
            total.drafted_tokens + usage.drafted_tokens,
            total.accepted_tokens + usage.accepted_tokens,
            total.reasoning_tokens + usage.reasoning_tokens,
            max(total.queued_seconds, usage.queued_seconds if first else 0.0))


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A loaded model that is served over HTTP."""

    llm: LLM
    engine: AsyncEngine
    name: str
    """The model's name for clients."""
    memory: FairExecutor
    """One thread, which records each client's answers in their order."""
    records: ActiveRequests
    documents: DocumentTexts = field(default_factory=DocumentTexts)
    """Texts of the most recently used documents."""
    forks: ForkStore = field(default_factory=lambda: ForkStore(Limits()))

    # the fields below belong to one request
    pictures: Shown | RequestError = field(default_factory=dict)
    """The images of the request's messages, keyed by their fields, or the error if they cannot be read."""
    text_of: TextOf = lambda _: None
    """Returns the text of a document by its digest."""
    bounded: bool = True
    """False if prompts may exceed the context, because they are only counted or are truncated."""
    owner: str | None = None
    """The owner of the request's API key."""
    adapter: LoadedAdapter | None = None
    """The adapter that computes the answers."""

    @property
    def limits(self) -> Limits:
        return self.llm.runtime.options.limits

    @property
    def processor(self) -> ChatProcessor:
        processor = self.llm.chat_processor
        return processor if self.bounded else processor.within(self._bound)

    @property
    def tokenizer(self) -> Tokenizer:
        """Returns the model's tokenizer. Raises RequestError if there is none."""
        return self.llm.chat_processor.tokenizer

    @property
    def _bound(self) -> TokenLimit:
        return (prompt_bound if self.bounded else counting_bound)(self.llm.engine.max_context, self.limits)

    @property
    def _has_words(self) -> bool:
        return self.llm.runtime.path is not None

    async def stop(self) -> None:
        """Ends all running requests, and waits until all answers are recorded."""
        await self.engine.stop()
        await asyncio.to_thread(self.memory.shutdown)

    async def start(self, request: Request, prepared: Sequence[PreparedRequest], prompt_field: str, whole: bool,
                    names: Mapping[str, str] = MappingProxyType({}), response: str = "") -> GenerationStream:
        """Submits prepared requests to the engine. prompt_field: the field that holds the prompts. whole: the answers
        are not streamed. names: maps field names to the client's names. response: the id under which other requests may
        fork the answers."""
        record = record_of(request)
        self.records.take(record, sum(each.request.choices for each in prepared))
        prepared = [_charged(each, record, self.adapter) for each in prepared]
        try:
            with renamed(names):
                await while_connected(request.receive, _compile(record, prepared))
            ignored = (sent_name(name, names) for each in prepared for name in each.ignored)
            record.ignored = tuple(dict.fromkeys((*record.ignored, *ignored)))
            handle = await while_connected(request.receive, self.engine.submit([each.request for each in prepared]))
        except RequestError as error:
            if error.field == "prompt":
                raise RequestError(str(error), prompt_field) from error
            raise
        run = record.run = GenerationStream(self.engine, handle, prepared, self.memory, whole, names)
        if response:
            run.keep_end = partial(self.forks.put, response, self.name, self.owner)
        if self.records.texts or self.records.observe:
            run.keep_tokens()
        if self.records.texts:
            record.spell = self.text
        if record.cancelled:  # cancelled while it was prepared
            run.cut_short()
        return run

    async def gather(self, request: Request, run: GenerationStream) -> list[ChoiceDelta]:
        """Returns all finished choices, unless the client disconnects first."""
        try:
            return await while_connected(request.receive, run.gather(self.limits.max_answer_values))
        finally:
            run.close()

    def complete(self, prompt: str | Sequence[int], sampling: SamplingParams,
                 output_format: OutputFormat | None = None, add_special: bool | None = None) -> PreparedRequest:
        """Prepares a raw prompt. A model without a tokenizer takes token ids."""
        if self._has_words or isinstance(prompt, str) or output_format:
            return self.processor.complete(prompt, sampling, output_format, add_special is not False)
        return bare_job(prompt, sampling, self._bound)

    def token_bytes(self, token: int) -> bytes:
        """Returns the bytes of a token, or a placeholder with its id if there is no tokenizer."""
        return self.tokenizer.token_bytes(token) if self._has_words else id_name(token).encode()

    def text(self, prompt: str | Sequence[int]) -> str:
        """Returns a prompt as text."""
        if isinstance(prompt, str):
            return prompt
        return self.tokenizer.decode(prompt, skip_special=False) if self._has_words else ""


def _charged(prepared: PreparedRequest, record: RequestRecord, adapter: LoadedAdapter | None) -> PreparedRequest:
    """Returns the request, charged to a client, with the key's owner added to its salt and to its session names."""
    salt = salt_of(record.prefix_owner, prepared.request.cache_salt)
    name, parent = (each and f"{record.owner} {salt} {each}" for each in (record.lineage.name, record.lineage.parent))
    lineage = Lineage(name, parent, prepared.request.lineage.forks)
    request = replace(prepared.request, client=record.client_id, cache_salt=salt, lineage=lineage, adapter=adapter)
    return replace(prepared, request=request)


async def _compile(record: RequestRecord, prepared: Sequence[PreparedRequest]) -> None:
    """Compiles the grammars of the requests, in the client's turn."""
    if any(each.grammar for each in prepared):
        await record.executors.grammars.run(record.client_id, lambda: [each.compiled() for each in prepared])


def id_name(token: int) -> str:
    """Returns a name for a token that does not depend on its text, as in vLLM."""
    return f"token_id:{token}"


def public_name(llm: LLM) -> str:
    """Returns the name of a model without its path on this machine."""
    return short_name(llm.runtime.name)


def short_name(model: str) -> str:
    path = Path(model)
    return path.resolve().name if path.is_absolute() or path.exists() else model


def names_of(llm: LLM) -> tuple[str, ...]:
    """Returns other names by which clients may call a model."""
    return llm.runtime.name, Path(llm.runtime.name).name
