"""What every wire needs to serve a model: its names, its words, and the engine behind the bridge."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from starlette.requests import Request

from deltic.chat.choices import ChoiceDelta
from deltic.chat.processor import ChatProcessor, PreparedRequest, bare_job, counting_bound, prompt_bound
from deltic.chat.response_format import OutputFormat
from deltic.chat.tokenizer import Tokenizer, TokenLimit
from deltic.config import Limits
from deltic.engine.fair_executor import FairExecutor
from deltic.errors import RequestError
from deltic.llm import LLM
from deltic.params import SamplingParams
from deltic.server.async_engine import AsyncEngine
from deltic.server.body import renamed, sent_name
from deltic.server.collect import GenerationStream
from deltic.server.documents import DocumentTexts, TextOf
from deltic.server.http import while_connected
from deltic.server.records import ActiveRequests, RequestRecord, record_of, salt_of
from deltic.vision.prompt import Shown


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model behind HTTP.

    name: what clients see and ask for.
    memory: one thread, in which each client's answers are remembered in their order.
    records: all requests of the server, also for other models.
    pictures: what the parts of a request show, by their fields, or why that cannot be had.
    documents: texts of those that requests had lately.
    text_of: gives those of a request.
    bounded: whether prompts have to fit the context; those that are only counted, or cut, do not.
    owner: of the request's API key.
    """

    llm: LLM
    bridge: AsyncEngine
    name: str
    memory: FairExecutor
    records: ActiveRequests
    pictures: Shown | RequestError = field(default_factory=dict)
    documents: DocumentTexts = field(default_factory=DocumentTexts)
    text_of: TextOf = lambda _: None
    bounded: bool = True
    owner: str | None = None

    @property
    def limits(self) -> Limits:
        """What one client may ask for."""
        return self.llm.runtime.options.limits

    @property
    def processor(self) -> ChatProcessor:
        """What makes jobs of messages and texts."""
        processor = self.llm.chat_processor
        return processor if self.bounded else processor.within(self._bound)

    @property
    def _bound(self) -> TokenLimit:
        """Of prompts."""
        return (prompt_bound if self.bounded else counting_bound)(self.llm.engine.max_context, self.limits)

    async def stop(self) -> None:
        """End what runs, and wait until all answers are remembered."""
        await self.bridge.stop()
        await asyncio.to_thread(self.memory.shutdown)

    async def start(self, request: Request, jobs: Sequence[PreparedRequest], prompt_field: str, whole: bool,
                    names: Mapping[str, str] = MappingProxyType({})) -> GenerationStream:
        """Hand jobs to the engine, unless the client goes away meanwhile. prompt_field: where the prompts came from.
        whole: the answers are wanted whole. names: what the client calls the fields of its request, see `renamed`."""
        record = record_of(request)
        self.records.take(record, sum(job.request.choices for job in jobs))
        jobs = [replace(job, request=replace(job.request, client=record.client_id, cache_salt=salt_of(
            record.prefix_owner, job.request.cache_salt))) for job in jobs]
        try:
            with renamed(names):
                await while_connected(request.receive, self._compile(record, jobs))
            ignored = (sent_name(name, names) for job in jobs for name in job.ignored)
            record.ignored = tuple(dict.fromkeys((*record.ignored, *ignored)))
            run = record.run = await while_connected(
                request.receive, GenerationStream.start(self.bridge, jobs, self.memory, whole)
            )
            run.names = names
            if self.records.texts:
                run.keep_tokens()
                record.spell = self.text
            if record.cancelled:  # before it began
                run.cut_short()
            return run
        except RequestError as error:
            if error.field == "prompt":
                raise RequestError(str(error), prompt_field) from error
            raise

    async def _compile(self, record: RequestRecord, jobs: Sequence[PreparedRequest]) -> None:
        """Have the jobs' grammars compiled, in the client's turn."""
        if any(job.grammar for job in jobs):
            await record.executors.grammars.run(record.client_id, lambda: [job.compiled() for job in jobs])

    async def wholes(self, request: Request, run: GenerationStream) -> list[ChoiceDelta]:
        """All choices of a run, when they are done, unless the client goes away meanwhile."""
        try:
            return await while_connected(request.receive, run.wholes(self.limits.max_answer_values))
        finally:
            run.close()

    def complete(self, prompt: str | Sequence[int], sampling: SamplingParams,
                 output_format: OutputFormat | None = None, add_special: bool | None = None) -> PreparedRequest:
        """A raw continuation; a model without tokenizer takes token ids."""
        if self._has_words or isinstance(prompt, str) or output_format:
            return self.processor.complete(prompt, sampling, output_format, add_special is not False)
        return bare_job(prompt, sampling, self._bound)

    @property
    def tokenizer(self) -> Tokenizer:
        """That of the model; RequestError if it has none."""
        return self.llm.chat_processor.tokenizer

    def token_bytes(self, token: int) -> bytes:
        """What a token looks like; without tokenizer they can be told apart all the same."""
        return self.llm.chat_processor.tokenizer.token_bytes(token) if self._has_words else f"token_id:{token}".encode()

    def text(self, prompt: str | Sequence[int]) -> str:
        """A prompt as text."""
        if isinstance(prompt, str):
            return prompt
        return self.llm.chat_processor.tokenizer.decode(prompt, skip_special=False) if self._has_words else ""

    @property
    def _has_words(self) -> bool:
        return self.llm.runtime.path is not None


def public_name(llm: LLM) -> str:
    """The name of a model as clients should see it: not where it lies on this machine's disk."""
    return short_name(llm.runtime.name)


def short_name(model: str) -> str:
    """The same of one that is not loaded."""
    path = Path(model)
    return path.resolve().name if path.is_absolute() or path.exists() else model


def names_of(llm: LLM) -> tuple[str, ...]:
    """Other names by which clients may ask for it."""
    return llm.runtime.name, Path(llm.runtime.name).name
