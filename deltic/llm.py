"""`LLM`: the Python API. Text in, text out, over the engine."""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack

from deltic.chat.choices import AnswerAssembler, ChatOutput, Choice, answer_end
from deltic.chat.json_schema import Bounds
from deltic.chat.output_router import Delta
from deltic.chat.processor import ChatConfig, ChatProcessor, PreparedRequest, bare_job, prompt_bound, read_template
from deltic.chat.response_format import OutputFormat, as_format
from deltic.chat.tokenizer import Tokenizer, TokenizerFiles
from deltic.chat.tool_grammar import AnswerForm, ToolChoice
from deltic.config import EngineConfig
from deltic.engine.adapters import open_adapters
from deltic.engine.arguments import (
    as_messages,
    as_params,
    as_processors,
    as_prompt,
    as_prompts,
    as_salt,
    as_sampling,
    as_variables,
    check_callback,
    check_options,
    check_tools,
    engine_config,
)
from deltic.engine.engine import Engine
from deltic.engine.loading import LoadProgress, ModelOverrides, RandomModel, load_any, with_ends
from deltic.engine.warm_up import warm_up
from deltic.engine.worker import EventMailbox, Worker
from deltic.errors import ConfigError, ModelError, RequestError, of_prompt, show
from deltic.export.backend import ProgramModel
from deltic.params import EngineRequest, Event, LogitsProcessor, Prompt, SamplingParams
from deltic.runner.model_runner import ModelRunner
from deltic.runner.operator_profile import Profile, profiling

if TYPE_CHECKING:
    from deltic.cache.offload.state_manifest import SavedState
    from deltic.engine.states import StateFiles

__all__ = ["LLM", "ChatOptions", "ChatOutput", "Choice", "Stream", "TokenCallback"]

log = logging.getLogger("deltic")

TokenCallback = Callable[[int, int], bool]
"""Called with (row, token id) for each token of a batch. Returning False stops that row only."""

_GATHERED = 64  # tokens that are buffered before they are decoded for a caller that waits for whole answers
_CLOSING = 60.0  # seconds that `close` waits for the running step


class FormatOptions(TypedDict, total=False):
    """Options for the format of answers, for changes of the model's logits, and for cache sharing.

    response_format: OpenAI's field: {"type": "json_object"}, or {"type": "json_schema", "json_schema": {"name": ...,
        "schema": ...}}.
    structured_outputs: vLLM's field: one of json (a schema), regex, choice (a list of texts), grammar.
    logits_processors: functions of (token ids, logits [V]) that return the new logits, see `EngineRequest`.
    cache_salt: calls share cached prefixes and answer records only if their salts are equal.
    lora: the name of the loaded adapter to use for the answers.
    """

    response_format: Mapping[str, Any] | None
    structured_outputs: Mapping[str, Any] | None
    logits_processors: Sequence[LogitsProcessor] | None
    cache_salt: str | None
    lora: str | None


class ChatOptions(FormatOptions, total=False):
    """Options of a chat request besides its messages.

    thinking: the template variable enable_thinking.
    thinking_budget: number of tokens after which the engine closes an open think block; 0 closes it at once.
    tool_choice: "none", "auto", "required", or OpenAI's object that names a function.
    fork_from: an earlier output or one of its choices. `messages` then contains only the messages that follow it. The
        engine continues its exact tokens and prefills only the new messages. Any number of branches may start from one
        output. Pass `tools` again if there are any.
    """

    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    thinking: bool | None
    variables: Mapping[str, Any] | None
    thinking_budget: int | None
    fork_from: ChatOutput | Choice | None


_CHAT = ("messages", "sampling", *ChatOptions.__annotations__)
_FORK = ("output", "branches", *_CHAT[1:-1])
_GENERATE = ("prompts", "sampling", "on_token", *FormatOptions.__annotations__)
_GENERATE_STREAM = ("prompt", "sampling", *FormatOptions.__annotations__)


class _Generation:
    """A group of requests that are submitted together, and their answers. on_token: as in `generate`."""

    def __init__(self, worker: Worker, jobs: Sequence[PreparedRequest], on_token: TokenCallback | None = None,
                 patience: int = _GATHERED) -> None:
        self.mailbox = EventMailbox(1 if on_token else patience)
        self.answers = AnswerAssembler(jobs)
        self._requests = [job.request for job in jobs]
        self._worker, self._on_token, self._started = worker, on_token, False

    def start(self) -> None:
        """Submits the requests, once. Raises UnavailableError in a forked process."""
        if self._started:
            self._worker.start()
        elif self._requests:
            self._started = True
            self._worker.submit(self._requests, self.mailbox, self.mailbox.on_reply)

    @property
    def outputs(self) -> list[ChatOutput]:
        """The complete answers."""
        return [output for output in self.answers.outputs if output]

    @property
    def done(self) -> bool:
        return all(self.answers.outputs)

    def take(self, events: Sequence[Event]) -> list[Delta]:
        if self._on_token:
            return [delta for event in events for delta in self._take_one(event, self._on_token)]
        return self._take(events)

    def close(self) -> None:
        """Aborts the requests that are still running."""
        running = [request.id for request, output in zip(self._requests, self.answers.outputs) if not output]
        if self._started and running and not self._worker.forked:
            self._worker.abort(running)

    def _take(self, events: Sequence[Event]) -> list[Delta]:
        pieces = self.answers.take(events)
        for piece in pieces:
            if piece.remember:
                self.answers.set_end(piece.number, piece.remember())
        return [delta._replace(index=piece.number) if piece.number else delta
                for piece in pieces for delta in piece.deltas]

    def _take_one(self, event: Event, on_token: TokenCallback) -> list[Delta]:
        row = self.answers.row(event)
        wanted = event.token is not None and not self.answers.stopped(row)
        deltas = self._take([event])
        if wanted and event.token is not None and not on_token(row, event.token):
            self.answers.stop(row)
            self._worker.abort([event.request])
        return deltas


class Stream:
    """An iterator over the deltas of one answer, for `for`, `next` and `async for`. `output` is set at the end.

    The deltas of several choices (n) are interleaved; `Delta.index` is the choice. The first `next` starts the request.
    `close`, leaving the loop and dropping the stream abort it. Only one thread or task may read at a time; a second
    reader gets RequestError. Any thread may call `close`. Raises GenerationError at the end if the engine failed.
    """

    def __init__(self, llm: LLM, job: PreparedRequest) -> None:
        self._llm = llm  # keeps the model alive while its answer is read
        self._call = _Generation(llm.worker, [job], patience=1)
        self._deltas: deque[Delta] = deque()
        self._closed, self._turn = False, threading.Lock()

    @property
    def output(self) -> ChatOutput | None:
        return self._call.answers.outputs[0]

    @property
    def prompt_tokens(self) -> int:
        return len(self._call.answers.jobs[0].request.prompt)

    @property
    def generated_tokens(self) -> int:
        """Number of tokens of all choices so far."""
        return self._call.answers.tokens

    def read(self, timeout: float | None = None) -> list[Delta]:
        """Returns the deltas since the last call. If there are none, waits up to `timeout` seconds. Returns [] at the
        end; `output` is set then and has the error, if any."""
        if self._closed or self.output:
            return []
        with self._reading():
            self._call.start()
            return self._call.take(self._call.mailbox.get(timeout))

    def close(self) -> None:
        """Aborts the requests that are still running."""
        if not self._closed:
            self._closed = True
            self._deltas.clear()
            self._call.close()

    def __iter__(self) -> Iterator[Delta]:
        try:
            yield from iter(self._next, None)
        finally:
            self.close()

    def __next__(self) -> Delta:
        delta = self._next()
        if delta is None:
            raise StopIteration
        return delta

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self._all()

    async def __anext__(self) -> Delta:
        while not self._deltas and not self._over():
            with self._reading():
                self._call.start()
                self._deltas.extend(self._call.take(await self._call.mailbox.aget()))
        if not self._deltas:
            raise StopAsyncIteration
        return self._deltas.popleft()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Guards against a second reader, which would wait forever."""
        if not self._turn.acquire(blocking=False):
            raise RequestError("this stream is being read by another thread or task: give each a stream of its own",
                               "stream")
        try:
            yield
        finally:
            self._turn.release()

    async def _all(self) -> AsyncIterator[Delta]:
        try:
            with suppress(StopAsyncIteration):
                while True:
                    yield await self.__anext__()
        finally:
            self.close()

    def _next(self) -> Delta | None:
        while not self._deltas and not self._over():
            self._deltas.extend(self.read())
        return self._deltas.popleft() if self._deltas else None

    def _over(self) -> bool:
        """Returns True at the end of the answer. Raises GenerationError once if the engine failed."""
        if not self._closed and self.output:
            self._closed = True
            self.output.sound()
        return self._closed

    def __del__(self) -> None:
        with suppress(Exception):  # partly constructed, in a forked process, or at interpreter shutdown
            self.close()


class LLM:
    """A loaded model.

        llm = LLM()                                       # the embedded demo model
        llm = LLM("org/name", dtype="bfloat16", threads=8)  # a hub name, directory or GGUF file; fields of EngineConfig
        llm.chat([{"role": "user", "content": "Hi"}]).text
        for delta in llm.stream(messages): print(delta.text, end="")
        llm.generate(["Once upon", "In the year"], SamplingParams(max_tokens=20))

        await llm.achat(messages)                         # the asyncio variants
        async for delta in llm.stream(messages): ...

    `chat`, `achat` and `stream` take conversations. `generate`, `agenerate` and `generate_stream` take raw prompts
    (text or token ids). Any thread or task may call them, even while the model is being served: one thread, `worker`,
    runs the model and batches concurrent calls.

    lora: maps adapter names to directories. `adapters` loads and unloads more adapters at any time.
    config: replaces the model's config.json: a path, its content, or a `deltic.config.ModelConfig`.
    weights: replaces the model's tensors, by Hugging Face name, including the vision tower's and draft head's tensors.
    options: fields of ChatConfig (how conversations are read) and EngineConfig (how the model runs). ChatConfig has:
    history: "preserve" or "template": how prompts treat earlier answers, see `deltic.chat.history`.
    strip_billing_header: remove the billing header that coding agents put before the system message.
    thinking: default for requests; None: the chat template decides.
    thinking_budget: default for requests: maximum number of thinking tokens per answer.
    tool_call_parser: the format of tool calls: "qwen", "json", "minimax", or "auto" for the chat template's format.
    parse_special: parse control tokens such as <|im_end|> in messages; otherwise they are ordinary text.

    Raises ConfigError for unknown options, ModelError for unusable models, RequestError for requests that cannot be
    served, UnavailableError for calls after `close` or in a forked process.
    """

    def __init__(self, model: str | Path | RandomModel | None = None, *, revision: str | None = None,
                 chat_template: str | Path | None = None, progress: LoadProgress | None = None, config: Any = None,
                 weights: Mapping[str, Any] | None = None, lora: Mapping[str, str | Path] | None = None,
                 **options: Any) -> None:
        names = [field.name for field in fields(ChatConfig)]
        chat = {name: options.pop(name) for name in names if name in options}
        ChatConfig(**chat)
        if not isinstance(chat_template, str | Path | None):
            raise ConfigError(f"chat_template must be the path of a file, not {show(chat_template)}", "chat_template")
        check_callback(progress, "progress", "(bytes read, bytes in all)", ConfigError)
        chosen = engine_config(options, ["revision", "chat_template", "config", "weights", "lora", *names])
        tokenizers = list[Tokenizer]()
        runtime = load_any(model, chosen, revision, progress, given=ModelOverrides(config, weights),
                           on_tokenizer=lambda path, texts: tokenizers.append(_tokenizer(path, texts, chosen)))
        self._chat_processor = _chat_processor(runtime, tokenizers[0], chat_template, **chat) if tokenizers else None
        self.runtime = with_ends(runtime, self._chat_processor.tokenizer if self._chat_processor else None)
        self.adapters = open_adapters(self.runtime, lora)
        self.worker = Worker(Engine(self.runtime))
        self._closing = threading.Lock()
        weakref.finalize(self, self.worker.stop, 0.0).atexit = False  # the worker handles interpreter shutdown itself

    @cached_property
    def states(self) -> StateFiles:
        """Saves and loads prefixes; see `save_state` and `load_state`."""
        from deltic.engine.states import StateFiles  # imports pydantic
        return StateFiles(self.runtime, self._chat_processor)

    @property
    def engine(self) -> Engine:
        """The worker's engine. Callers may read its statistics; all other access needs `Worker.hold`."""
        return self.worker.engine

    @property
    def chat_processor(self) -> ChatProcessor:
        """The tokenizer and chat template. Raises ModelError if the model has none (random weights)."""
        if self._chat_processor is None:
            raise ModelError(f"{self.runtime.name} has no tokenizer: give token ids, or load a model with one")
        return self._chat_processor

    def chat(self, messages: Any, sampling: SamplingParams = SamplingParams(),
             **options: Unpack[ChatOptions]) -> ChatOutput:
        """Returns the answer to a conversation: OpenAI-style messages, or the text of one user message. Raises
        GenerationError with the partial answer if the engine fails. For the options see `ChatOptions`."""
        check_options("chat", options, _CHAT)
        output, = self._gather([self._turn(messages, sampling, **options)])
        return output.sound()

    def fork(self, output: ChatOutput | Choice, branches: Sequence[Any], sampling: SamplingParams = SamplingParams(),
             **options: Unpack[ChatOptions]) -> list[ChatOutput]:
        """Continues an earlier output in several branches at once. Each branch is the `messages` argument of a `chat`
        call with `fork_from=output`. The branches share the conversation's K/V; each has its own state."""
        check_options("fork", options, _FORK)
        if isinstance(branches, str) or not isinstance(branches, Sequence) or not branches:
            raise RequestError(f"branches must be a list of messages or texts, one for each, not {show(branches)}",
                               "branches")
        jobs = [self._turn(branch, sampling, **{**options, "fork_from": output}) for branch in branches]
        return [found.sound() for found in self._gather(jobs)]

    async def achat(self, messages: Any, sampling: SamplingParams = SamplingParams(),
                    **options: Unpack[ChatOptions]) -> ChatOutput:
        """Runs `chat` for asyncio. Cancelling it aborts the request."""
        check_options("achat", options, _CHAT)
        job = await asyncio.to_thread(self._turn, messages, sampling, **options)
        output, = await self._agather([job])
        return output.sound()

    def stream(self, messages: Any, sampling: SamplingParams = SamplingParams(),
               **options: Unpack[ChatOptions]) -> Stream:
        """Streams the answer of `chat`, for threads and asyncio. Prepares the prompt now; the first read starts it."""
        check_options("stream", options, _CHAT)
        return Stream(self, self._turn(messages, sampling, **options))

    def generate(self, prompts: Sequence[str] | Sequence[Sequence[int]] | Sequence[Prompt],
                 sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
                 on_token: TokenCallback | None = None, **options: Unpack[FormatOptions]) -> list[ChatOutput]:
        """Continues each prompt (text or token ids). sampling: one for all, or one per prompt.

        Raises RequestError before anything runs if a prompt is invalid. If the engine fails on a choice, its finish is
        "error" and its `error` has the reason; the other choices are not affected."""
        check_options("generate", options, _GENERATE)
        return self._gather(self._jobs(prompts, sampling, on_token, **options), on_token)

    async def agenerate(self, prompts: Sequence[str] | Sequence[Sequence[int]] | Sequence[Prompt],
                        sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
                        on_token: TokenCallback | None = None, **options: Unpack[FormatOptions]) -> list[ChatOutput]:
        """Runs `generate` for asyncio. Cancelling it aborts the requests."""
        check_options("agenerate", options, _GENERATE)
        jobs = await asyncio.to_thread(self._jobs, prompts, sampling, on_token, **options)
        return await self._agather(jobs, on_token)

    def generate_stream(self, prompt: str | Sequence[int] | Prompt, sampling: SamplingParams = SamplingParams(),
                        **options: Unpack[FormatOptions]) -> Stream:
        """Streams the continuation of one prompt (text or token ids), for threads and asyncio."""
        check_options("generate_stream", options, _GENERATE_STREAM)
        wanted = as_format(options.get("response_format"), options.get("structured_outputs"))
        job = self._job(as_prompt(prompt), as_params(sampling), wanted)
        return Stream(self, self._with(job, as_salt(options.get("cache_salt")), options.get("logits_processors"),
                                       options.get("lora")))

    def prompt(self, text: str, images: Sequence[Any] = ()) -> Prompt:
        """Returns a raw prompt with images for `generate` and `Session.prefill`. Each marker <__media__> in the text
        stands for one image. images: uint8 arrays [height, width, 3], Pillow images, or paths or bytes of files."""
        return self.chat_processor.prompt(text, images)

    def pin(self, messages: Any, *, tools: Any = None, variables: Mapping[str, Any] | None = None) -> int:
        """Prefills the prefix that all conversations with these system messages and tools share, and pins it in the
        prefix cache. Returns its number of tokens. Raises RequestError if there is no common prefix."""
        check_tools(tools)
        prompt = self.chat_processor.system_prefix(as_messages(messages, 0), tools=tools,
                                             variables=as_variables(variables, None))
        if not prompt:
            raise RequestError("there is nothing to pin: conversations share no beginning without a system message or "
                               "tools", "messages")
        request = EngineRequest(uuid.uuid4().hex, prompt, SamplingParams(max_tokens=0), (len(prompt),))
        output, = self._gather([replace(bare_job(prompt), request=request)])
        output.sound()
        if not self.worker.call(lambda engine: engine.pin(prompt)):
            log.warning("the prompt of %d tokens is not pinned: the prefix cache is off, or has no room for it",
                        len(prompt))
        return len(prompt)

    def save_state(self, prompt: Any, directory: str | Path, name: str = "", **options: Unpack[ChatOptions]
                   ) -> SavedState:
        """Saves the state of a prompt's prefix as files in a directory. Prefills the uncached part of the prompt first.
        prompt: messages, or a raw prompt (text or token ids). For system messages alone, saves the prefix that all
        conversations with them and with `tools` share. Returns the saved state with its id."""
        check_options("save_state", options, {"prompt", "directory", "name", *ChatOptions.__annotations__} - {"lora"})
        job, answer = self._saved_prefix(prompt, **options)
        if not self.states.keeps(self.worker, job.request):
            self._gather([job])[0].sound()
        return self.states.save(self.worker, job.request, directory, name, answer)

    def load_state(self, directory: str | Path, state: str | None = None, cache_salt: str | None = None) -> SavedState:
        """Puts a saved state into the prefix cache; prompts that begin with its tokens resume from it. state: its id or
        a prefix of the id; None: the only state in the directory. Raises RequestError if it is unusable."""
        return self.states.load(self.worker, directory, state, as_salt(cache_salt))

    def warm_up(self) -> None:
        """Prepares the tiers and, on a GPU, everything that steps use, so that the first request is as fast as later
        ones. A server does this before it is ready. Call it before any request."""
        def prepare(_: Engine) -> None:
            for tier in self.runtime.cache.tiers:
                tier.prepare()
            if isinstance(self.runtime, ModelRunner):  # an exported program is compiled already
                warm_up(self.runtime)
        self.worker.execute(prepare)

    def profile(self) -> AbstractContextManager[Profile]:
        """Returns a context manager that measures all steps in its `with` block, by phase and operator."""
        return profiling(self.runtime, self.worker.hold)

    def close(self) -> None:
        """Ends running requests and waits until all data that outlives the process is on disk. The model cannot be used
        afterwards. Closing twice is allowed. Process exit also ends running requests."""
        with self._closing:
            if not self.worker.stop(_CLOSING, "the model has been closed: load it anew"):
                log.error("the engine is stuck and is left behind")
            elif not self.worker.forked:
                self.engine.close()
                if self._chat_processor:
                    self._chat_processor.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def _gather(self, jobs: Sequence[PreparedRequest], on_token: TokenCallback | None = None) -> list[ChatOutput]:
        call = _Generation(self.worker, jobs, on_token)
        try:
            call.start()
            while not call.done:
                call.take(call.mailbox.get())
            return call.outputs
        finally:
            call.close()

    async def _agather(
        self, jobs: Sequence[PreparedRequest], on_token: TokenCallback | None = None
    ) -> list[ChatOutput]:
        call = _Generation(self.worker, jobs, on_token)
        try:
            call.start()
            while not call.done:
                call.take(await call.mailbox.aget())
            return call.outputs
        finally:
            call.close()

    def _saved_prefix(self, prompt: Any, **options: Unpack[ChatOptions]) -> tuple[PreparedRequest, Any]:
        """Prepares a request that prefills the common prefix of following prompts and generates no tokens. Also returns
        the record of the last answer."""
        nothing, salt, tools = SamplingParams(max_tokens=0), as_salt(options.get("cache_salt")), options.get("tools")
        if not (isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], Mapping)):
            return self._with(self._job(as_prompt(prompt), nothing, None), salt, None), None
        check_tools(tools)
        found = self.chat_processor.of(salt).saved_prefix(
            as_messages(prompt), tools=tools, variables=as_variables(options.get("variables"), options.get("thinking")))
        job = self._with(bare_job(found.ids, nothing), salt, None)
        return replace(job, request=replace(job.request, stable_prefixes=found.stable_prefixes)), found.answer

    def _turn(self, messages: Any, sampling: Any, *, tools: Any = None, thinking: Any = None, variables: Any = None,
              thinking_budget: Any = None, tool_choice: Any = None, **more: Any) -> PreparedRequest:
        check_tools(tools)
        salt, processors = as_salt(more.pop("cache_salt", None)), more.pop("logits_processors", None)
        fork, lora = more.pop("fork_from", None), more.pop("lora", None)
        job = self.chat_processor.of(salt).chat(as_messages(messages), as_params(sampling),
                                                tools=None if tool_choice == "none" else tools,
                                                answer=AnswerForm(ToolChoice.read(tool_choice), as_format(**more)),
                                                variables=as_variables(variables, thinking),
                                                thinking_budget=thinking_budget,
                                                history=None if fork is None else answer_end(fork))
        return self._with(job.compiled(), salt, processors, lora)

    def _jobs(self, prompts: Any, sampling: Any, on_token: Any, cache_salt: Any = None, logits_processors: Any = None,
              lora: Any = None, **form: Any) -> list[PreparedRequest]:
        check_callback(on_token)
        salt, rows = as_salt(cache_salt), as_prompts(prompts)
        params = as_sampling(sampling, len(rows))
        wanted = as_format(**form)
        jobs = list[PreparedRequest]()
        for place, (prompt, each) in enumerate(zip(rows, params, strict=True)):
            with of_prompt(f"prompts[{place}]"):
                jobs.append(self._with(self._job(prompt, each, wanted), salt, logits_processors, lora))
                self.engine.keys_of(jobs[-1].request)
        return jobs

    def _job(
        self, prompt: str | list[int] | Prompt, sampling: SamplingParams, wanted: OutputFormat | None
    ) -> PreparedRequest:
        if not isinstance(prompt, str) and self._chat_processor is None and wanted is None:
            prompt = list(prompt.ids) if isinstance(prompt, Prompt) else prompt
            return bare_job(prompt, sampling, prompt_bound(self.engine.max_context, self.runtime.options.limits))
        return self.chat_processor.complete(prompt, sampling, wanted).compiled()

    def _with(self, job: PreparedRequest, salt: str, processors: Any, lora: Any = None) -> PreparedRequest:
        adapter = None if lora is None else self.adapters.find(lora)
        request = replace(job.request, cache_salt=salt, logits_processors=as_processors(processors), adapter=adapter)
        return replace(job, request=request)


def _tokenizer(path: Path, texts: Any, options: EngineConfig) -> Tokenizer:
    if texts:
        return Tokenizer.from_files(TokenizerFiles(texts.tokenizer, texts.special_tokens, texts.templates), path)
    given = [Path(name) if name else None for name in (options.tokenizer, options.tokenizer_config)]
    return Tokenizer.from_directory(path, *given)


def _chat_processor(runtime: ModelRunner | ProgramModel, tokenizer: Tokenizer, template: str | Path | None,
                    **options: Any) -> ChatProcessor:
    processor = ChatProcessor(tokenizer, read_template(Path(template)) if template else None, notes=runtime.notes,
                              longest=runtime.memory.max_context, limits=runtime.options.limits, vision=runtime.vision,
                              image_urls=runtime.options.allow_image_urls, **options)
    processor.grammars.bounds = Bounds.of(runtime.generation)
    return processor
