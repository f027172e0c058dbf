"""`LLM`: a model behind a few calls. Text in, text out, over the engine."""

from __future__ import annotations

import logging
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deltic.engine.engine import Engine
from deltic.engine.options import engine_config
from deltic.engine.runtime import LoadProgress, RandomModel, Runtime, load
from deltic.errors import ModelError, RequestError
from deltic.text.deltas import AnswerCall, Delta, join
from deltic.text.files import TokenizerFiles
from deltic.text.front import Front, Job, Remember, bare_job, read_template
from deltic.text.stream import Router
from deltic.text.tokenizer import Tokenizer
from deltic.types import Finish, Request, SamplingParams, TokenLogprobs, TokenOut, Usage

log = logging.getLogger("deltic")

ENDS = ("<|im_end|>", "<|endoftext|>")
"""Tokens of this family's vocabularies that end an answer, if they are there."""

TokenCallback = Callable[[int, int], bool]
"""Called with (row, token id) for each token of a batch; False stops that row alone."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished answer. error: what went wrong, if finish is "error". logprobs: one per token, if asked for."""

    index: int
    text: str
    reasoning: str
    calls: tuple[AnswerCall, ...]
    tokens: tuple[int, ...]
    finish: Finish
    usage: Usage
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """The choices of one request. `text`, `reasoning`, `calls` are those of the first."""

    choices: tuple[Choice, ...]

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def reasoning(self) -> str:
        return self.choices[0].reasoning

    @property
    def calls(self) -> tuple[AnswerCall, ...]:
        return self.choices[0].calls


@dataclass(slots=True)
class _Answer:
    """One choice while it grows. hidden: the request's stop ids. remember: as in Job."""

    router: Router
    hidden: frozenset[int] = frozenset()
    remember: Remember | None = None
    deltas: list[Delta] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def take(self, event: TokenOut) -> list[Delta]:
        fresh: list[Delta] = []
        if event.token is not None:
            self.tokens.append(event.token)
            # a stop id ends the answer and, like a stop string, is no part of its text
            if not (event.finish == "stop" and event.token in self.hidden):
                fresh = self.router.feed(event.token)
        if event.logprobs is not None:
            self.logprobs.append(event.logprobs)
        if event.finish:
            fresh = fresh + self.router.finish()
        self.deltas += fresh
        return fresh

    def finished(self, event: TokenOut) -> Choice:
        answer = join(self.deltas)
        assert event.finish and event.usage
        if self.remember:
            self.remember(self.tokens, event.finish)
        return Choice(event.choice, answer.content, answer.reasoning, answer.calls, tuple(self.tokens), event.finish,
                      event.usage, tuple(self.logprobs), event.error)


class Stream:
    """Deltas of one request as they come; `output` is there once it is exhausted. Closing it aborts the request.

    stopped: a callback has ended the request early.
    """

    def __init__(self, llm: LLM, job: Job) -> None:
        self._llm, self._job = llm, job
        params = job.request.sampling
        self._answers = [_Answer(job.router.copy(), frozenset(params.stop_token_ids), job.remember)
                         for _ in range(params.n)]
        self._choices: list[Choice] = []
        self.output: Output | None = None
        self.stopped = False
        self._closed = False
        self._events = llm._submit(job)

    def __iter__(self) -> Iterator[Delta]:
        try:
            while self.output is None and not self._closed:
                yield from self.step()
        finally:
            self.close()

    @property
    def prompt_tokens(self) -> int:
        return len(self._job.request.prompt)

    @property
    def generated_tokens(self) -> int:
        """Tokens so far, of all choices."""
        return sum(len(answer.tokens) for answer in self._answers)

    def step(self) -> list[Delta]:
        """Run one step of the engine; returns what it brought: nothing while the prompt is still being read."""
        if not self._events:
            self._llm._advance()
        events = list(self._events)
        self._events.clear()
        return [delta for event in events for delta in self._take(event)]

    def close(self) -> None:
        """Abort what is still running."""
        self._closed = True
        self._llm._withdraw(self._job.request.id)

    def _take(self, event: TokenOut) -> list[Delta]:
        answer = self._answers[event.choice]
        deltas = answer.take(event)
        if event.finish:
            self._choices.append(answer.finished(event))
            if len(self._choices) == len(self._answers):
                self.output = Output(tuple(sorted(self._choices, key=lambda choice: choice.index)))
        return deltas


class LLM:
    """A model ready to answer.

        llm = LLM()                                       # the embedded demo model
        llm = LLM("org/name", dtype="bfloat16", threads=8)  # a hub name, directory or GGUF file; fields of EngineConfig
        llm.chat([{"role": "user", "content": "Hi"}]).text
        for delta in llm.stream(messages): print(delta.text, end="")
        llm.generate(["Once upon", "In the year"], SamplingParams(max_tokens=20))

    history: "template", "preserve" or "auto", how prompts treat earlier answers: see `deltic.text.history`.
    strip_billing_header: remove the billing header that coding agents put before the system message.
    thinking_budget: tokens that an answer may spend on thinking, where its request says nothing else.
    One thread at a time. Unknown options raise ConfigError, unusable models ModelError.
    """

    def __init__(self, model: str | RandomModel | None = None, *, revision: str | None = None,
                 chat_template: Path | None = None, progress: LoadProgress | None = None, history: str = "auto",
                 strip_billing_header: bool = False, thinking_budget: int | None = None, **options: Any) -> None:
        runtime = load(model, engine_config(options), revision, progress)
        self._front = _front(runtime, chat_template, history=history, strip_billing_header=strip_billing_header,
                             thinking_budget=thinking_budget)
        self.runtime = _with_words(runtime, self._front.tokenizer) if self._front else runtime
        self.engine = Engine(self.runtime)
        self._inboxes: dict[str, deque[TokenOut]] = {}

    @property
    def front(self) -> Front:
        """The tokenizer and chat template; ModelError if the model has none (random weights)."""
        if self._front is None:
            raise ModelError(f"{self.runtime.name} has no tokenizer: give token ids, or load a model with one")
        return self._front

    def chat(self, messages: Any, sampling: SamplingParams = SamplingParams(), *, tools: Any = None,
             thinking: bool | None = None, variables: Mapping[str, Any] | None = None,
             thinking_budget: int | None = None) -> Output:
        """Answer a conversation: OpenAI-style messages, or one user message as text. thinking_budget: tokens after
        which an open think block is closed for the model; 0 closes it at once."""
        stream = self.stream(_messages(messages), sampling, tools=tools, thinking=thinking, variables=variables,
                             thinking_budget=thinking_budget)
        return _exhaust(stream)

    def stream(self, prompt: Any, sampling: SamplingParams = SamplingParams(), *, tools: Any = None,
               thinking: bool | None = None, variables: Mapping[str, Any] | None = None,
               thinking_budget: int | None = None) -> Stream:
        """Like `chat` for messages, like `generate` for one text or list of ids, but piece by piece."""
        if isinstance(prompt, str) or not _are_messages(prompt):
            if thinking_budget is not None:
                raise RequestError("thinking_budget needs messages: a raw prompt has no think block", "thinking_budget")
            return Stream(self, self._job(prompt, sampling))
        given = dict(variables or {})
        if thinking is not None:
            given["enable_thinking"] = thinking
        return Stream(self, self.front.chat(prompt, sampling, tools=tools, variables=given,
                                            thinking_budget=thinking_budget))

    def generate(self, prompts: Sequence[str] | Sequence[Sequence[int]],
                 sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
                 on_token: TokenCallback | None = None) -> list[Output]:
        """Continue each prompt (text or token ids). sampling: one for all, or one per prompt."""
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            raise RequestError("generate takes a list of prompts: put the prompt into a list", "prompts")
        params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        if len(params) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts need as many SamplingParams, not {len(params)}", "sampling")
        jobs = [self._job(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
        return self._gather(jobs, on_token)

    def pin(self, messages: Any, *, tools: Any = None, variables: Mapping[str, Any] | None = None) -> int:
        """Read the beginning that all conversations with these system messages and tools share, and keep it for as
        long as anything is kept; returns its tokens. RequestError if they share none."""
        prompt = self.front.opening(messages, tools=tools, variables=variables)
        if not prompt:
            raise RequestError("there is nothing to pin: conversations share no beginning without a system message or "
                               "tools", "messages")
        request = Request(uuid.uuid4().hex, prompt, SamplingParams(max_tokens=0), (len(prompt),))
        _exhaust(Stream(self, Job(request, bare_job(prompt).router)))
        if not self.runtime.cache.pin(prompt):
            log.warning("the prompt of %d tokens is not pinned: the prefix cache is off, or has no room for it",
                        len(prompt))
        return len(prompt)

    def close(self) -> None:
        """Wait until everything that shall outlive the process is on disk; the model must not be used afterwards."""
        self.engine.close()
        if self._front:
            self._front.flush()

    def _gather(self, jobs: list[Job], on_token: TokenCallback | None) -> list[Output]:
        streams: list[Stream] = []
        try:
            for job in jobs:
                streams.append(Stream(self, job))
            while any(stream.output is None for stream in streams):
                self._advance()
                for row, stream in enumerate(streams):
                    self._pump(row, stream, on_token)
        finally:
            for stream in streams:
                stream.close()
        return [stream.output for stream in streams if stream.output]

    def _pump(self, row: int, stream: Stream, on_token: TokenCallback | None) -> None:
        while stream._events:
            event = stream._events.popleft()
            if stream.stopped:  # what else the last step brought is not wanted
                if not event.finish:
                    continue
                event = _aborted(event, len(stream._answers[event.choice].tokens))
            stream._take(event)
            if on_token is None or event.token is None:
                continue
            stream.stopped = not on_token(row, event.token)
            if stream.stopped:
                self.engine.abort(event.request)

    def _job(self, prompt: Any, sampling: SamplingParams) -> Job:
        if not isinstance(prompt, str) and self._front is None:
            return bare_job(prompt, sampling)
        return self.front.complete(prompt, sampling)

    def _submit(self, job: Job) -> deque[TokenOut]:
        self.engine.add(job.request)
        return self._inboxes.setdefault(job.request.id, deque())

    def _withdraw(self, request: str) -> None:
        self.engine.abort(request)
        self._inboxes.pop(request, None)

    def _advance(self) -> None:
        self._collect(self.engine.step())

    def _collect(self, events: Sequence[TokenOut]) -> None:
        for event in events:
            inbox = self._inboxes.get(event.request)
            if inbox is not None:
                inbox.append(event)


def _aborted(event: TokenOut, tokens: int) -> TokenOut:
    """The end of an answer that was stopped after so many tokens."""
    assert event.usage
    return replace(event, token=None, logprobs=None, finish="abort",
                   usage=replace(event.usage, completion_tokens=tokens))


def _front(runtime: Runtime, template: Path | None, **options: Any) -> Front | None:
    if runtime.path is None:
        return None
    texts = runtime.tokenizer
    files = TokenizerFiles(texts.tokenizer, texts.special_tokens, texts.templates) if texts else None
    tokenizer = Tokenizer.from_files(files, runtime.path) if files else Tokenizer.from_directory(runtime.path)
    return Front(tokenizer, read_template(template) if template else None, notes=runtime.notes,
                 longest=runtime.memory.max_context, limits=runtime.options.limits, **options)


def _with_words(runtime: Runtime, tokenizer: Tokenizer) -> Runtime:
    """Let the tokenizer's ends of text end answers too: some configs name only one of them."""
    if tokenizer.vocab_size > runtime.config.vocab_size:
        log.warning("the tokenizer has %d tokens, the model only %d: are they of one checkpoint?",
                    tokenizer.vocab_size, runtime.config.vocab_size)
    ends = [tokenizer.eos_id, *map(tokenizer.token_to_id, ENDS)]
    found = [end for end in ends if end is not None and end in tokenizer.special]
    return replace(runtime, generation=runtime.generation.with_eos(found), tokenizer=None)


def _exhaust(stream: Stream) -> Output:
    for _ in stream:
        pass
    assert stream.output is not None
    return stream.output


def _messages(messages: Any) -> Any:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


def _are_messages(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)
