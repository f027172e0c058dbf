"""What the server's tests share: the embedded model, a scripted engine, and a real server in a thread."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from inspect import Signature, signature
from ssl import SSLContext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import httpx
from openai import DefaultHttpxClient, OpenAI
from starlette.applications import Starlette

from deltic import LLM
from deltic.chat.processor import ChatProcessor
from deltic.config import Limits
from deltic.engine.adapters import AdapterSet
from deltic.engine.stats import RequestProgress
from deltic.engine.worker import Worker
from deltic.errors import RequestError
from deltic.params import EngineRequest, TokenEvent, TokenLogprobs, Usage
from deltic.server.app import create_app
from deltic.server.async_engine import AsyncEngine
from deltic.server.run import Server, listen, url_of

USER = [{"role": "user", "content": "Hi"}]
# What models write: a call of a tool, and a think block
CALL = ("<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>")
THOUGHT = "<think>\nLet me see.\n</think>\n\n"


@cache
def tiny() -> LLM:
    # float32: that equal requests get equal words in any batch is promised for it alone (L6)
    return LLM(max_context=2048, memory="64MiB", max_batch=16, threads=1, dtype="float32")


def each(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs all cases in one test, where a set-up for each would cost more than the case; a failure names its case."""
    words = (names,) if isinstance(names, str) else names

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def run(**fixtures: Any) -> None:
            for case in cases:
                values = (case,) if isinstance(names, str) else case
                try:
                    test(**dict(zip(words, values, strict=True)), **fixtures)
                except BaseException as error:
                    error.add_note(f"case: {case!r:.200}")
                    raise

        rest = [each for name, each in signature(test).parameters.items() if name not in words]
        run.__signature__ = Signature(rest)  # type: ignore[attr-defined]
        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        return run

    return decorate


def limited(model: Any, **limits: Any) -> Any:
    """The model with these fields of Limits; closing it closes nothing."""
    runtime = replace(model.runtime, options=replace(model.runtime.options, limits=Limits(**limits)))
    processor = model.chat_processor
    if limits.get("max_prompt_tokens"):
        processor = ChatProcessor(processor.tokenizer, longest=runtime.memory.max_context, limits=Limits(**limits))
    return SimpleNamespace(engine=model.engine, worker=model.worker, chat_processor=processor, runtime=runtime,
                           adapters=AdapterSet(runtime), warm_up=lambda: None, close=lambda: None)


class Scripted:
    """An engine that says the same to everybody, a token per step. text None: it never ends."""

    max_context = 2048
    alternative = 1
    """The other token in logprobs."""

    def __init__(self, text: str | None = None, *, error: str | None = None, pause: float = 0.0) -> None:
        self.play(text, error=error, pause=pause)

    def play(self, text: str | None, *, error: str | None = None, pause: float = 0.0) -> None:
        """Another script, for an engine at rest."""
        tokenizer = tiny().chat_processor.tokenizer
        self.script = [*tokenizer.encode(text), tokenizer.eos_id] if text is not None else tokenizer.encode("na")[:1]
        self.endless, self.error, self.delay = text is None, error, pause
        self.stats = SimpleNamespace(steps=0)
        self.running: dict[str, list[list[Any]]] = {}
        self.paused: set[str] = set()
        self.seen: list[EngineRequest] = []
        self.events: list[TokenEvent] = []
        self.before_step: Callable[[], Any] = lambda: None
        self.check: Callable[[], None] = lambda: None

    @property
    def has_work(self) -> bool:
        return bool(self.running.keys() - self.paused or self.events)

    def keys_of(self, request: EngineRequest) -> tuple[int, ...]:
        if len(request.prompt) >= self.max_context:
            raise RequestError("the prompt is too long", "prompt")
        return request.ids

    def add(self, request: EngineRequest) -> None:
        self.keys_of(request)
        self.seen.append(request)
        matchers = [request.matcher() if request.matcher else None for _ in range(request.output.n)]
        self.running[request.id] = [[choice, 0, matcher] for choice, matcher in enumerate(matchers)]

    def abort(self, request: str) -> None:
        for choice, count, _ in self.running.pop(request, ()):
            self.events.append(TokenEvent(request, choice, None, finish="abort", usage=Usage(1, 0, count)))

    def progress(self, request: EngineRequest) -> RequestProgress:
        if request.id not in self.running:
            return RequestProgress("finished", len(request.prompt))
        begun = any(count for _, count, _ in self.running[request.id])
        return RequestProgress("decoding", len(request.prompt)) if begun else RequestProgress("waiting", 0)

    def pause(self, request: str) -> None:
        self.paused.add(request)

    def resume(self, request: str) -> None:
        self.paused.discard(request)

    def step(self) -> list[TokenEvent]:
        time.sleep(self.delay)
        self.before_step()
        self.stats.steps += 1
        events, self.events = self.events, []
        for request in [r for r in self.seen if r.id in self.running and r.id not in self.paused]:
            events += [event for choice in self.running[request.id][:] for event in self._advance(request, choice)]
        return events

    def close(self) -> None:
        """Nothing is kept anywhere."""

    def _advance(self, request: EngineRequest, choice: list[Any]) -> list[TokenEvent]:
        index, at, matcher = choice
        choice[1] += 1
        if request.output.max_tokens == 0:
            self._end(request, choice)
            return [TokenEvent(request.id, index, None, finish="length", usage=Usage(len(request.prompt), 5, 0))]
        if self.error and at == 3:
            self._end(request, choice)
            return [TokenEvent(request.id, index, None, finish="error", usage=Usage(1, 0, at), error=self.error)]
        token = self.script[at % len(self.script)]
        limit = request.output.max_tokens or 1 << 30
        over = (matcher and matcher.push(token)) or (not self.endless and at + 1 == len(self.script))
        finish = "stop" if over else "length" if at + 1 == limit else None
        if finish:
            self._end(request, choice)
        scored = request.output.logprobs is not None
        scores = TokenLogprobs(-0.5, ((token, -0.5), (self.alternative, float("-inf")))) if scored else None
        usage = Usage(len(request.prompt), 5, at + 1) if finish else None
        return [TokenEvent(request.id, index, token, scores, finish, usage)]

    def _end(self, request: EngineRequest, choice: list[Any]) -> None:
        self.running[request.id].remove(choice)
        if not self.running[request.id]:
            del self.running[request.id]

    def model(self, **limits: Any) -> Any:
        """What create_app takes for a model. limits: fields of Limits."""
        worker = Worker(self)  # type: ignore[arg-type]
        model = limited(SimpleNamespace(engine=self, worker=worker, chat_processor=tiny().chat_processor,
                                        runtime=tiny().runtime), **limits)
        model.close = lambda: worker.stop(5)
        return model


@cache
def authorities() -> SSLContext:
    """The certificates that clients trust. Reading them takes longer than starting a server."""
    return httpx.create_ssl_context()


class Served:
    """A running server."""

    def __init__(self, url: str, server: Server, app: Starlette, thread: threading.Thread) -> None:
        self.url, self.server, self.app, self.thread = url, server, app, thread
        self.bridge: AsyncEngine = app.state.engine  # of an only model
        self.http = httpx.Client(base_url=url, timeout=30, verify=authorities())
        transport = DefaultHttpxClient(verify=authorities())
        self.client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30, http_client=transport)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def health(self) -> tuple[int, dict[str, Any]]:
        response = self.http.get("/health")
        return response.status_code, response.json()

    def wait_idle(self, seconds: float = 10.0) -> float:
        """Wait until nothing runs; returns how long it took."""
        return wait_until(lambda: self.health()[1]["requests"] == 0, seconds)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The server's event loop."""
        return self.bridge.loop

    @contextmanager
    def clock(self) -> Iterator[Callable[[float], None]]:
        """Stops the event loop's clock; yields a function that advances it. The clock continues from there at the
        end, because a jump would delay timers or make clients seem late."""
        loop, real = self.loop, self.loop.time
        now = real()

        def advance(seconds: float) -> None:
            nonlocal now
            now += seconds
            loop.call_soon_threadsafe(lambda: None)

        with patch.object(loop, "time", lambda: now):
            now = real()  # the loop may have set timers since, by its own clock
            yield advance
            ahead = now - real()
        loop.time = lambda: real() + ahead  # type: ignore[method-assign]
        loop.call_soon_threadsafe(lambda: None)

    @contextmanager
    def lateness(self, clock: Callable[[], float] = time.monotonic) -> Iterator[list[float]]:
        """Seconds between two turns of the event loop, of which there is one every 10 ms where nothing holds it up.
        clock: time.process_time where the loop could be held up by computing, as other processes do not count then."""
        late: list[float] = []

        async def beat() -> None:
            while True:
                before = clock()
                await asyncio.sleep(0.01)
                late.append(clock() - before)

        beating = asyncio.run_coroutine_threadsafe(beat(), self.loop)
        try:
            yield late
        finally:
            beating.cancel()

    def connect(self, buffer: int | None = None) -> socket.socket:
        """A bare connection. buffer: bytes that this machine keeps of what is not read."""
        host, port = self.url.partition("://")[2].split(":")
        raw = socket.socket()
        if buffer:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        raw.settimeout(20)
        raw.connect((host, int(port)))
        return raw

    def send(self, path: str, buffer: int | None = None, **body: Any) -> socket.socket:
        """A request, whose answer is not read."""
        raw, data = self.connect(buffer), json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
        raw.sendall(head.encode() + data)
        return raw

    def stop(self, seconds: float = 60.0) -> None:
        self.http.close()
        self.client.close()
        self.server.should_exit = True
        self.thread.join(seconds)
        assert not self.thread.is_alive(), "the server does not end"


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> float:
    """Wait, in turns rather than by the clock: a machine that stands still for a while must not fail a test."""
    turns = 0
    while not condition():
        turns += 1
        assert turns < seconds * 100, "this takes too long"
        time.sleep(0.01)
    return turns / 100


def read_all(raw: socket.socket) -> str:
    """What comes until the other side closes."""
    with raw:
        return b"".join(iter(lambda: raw.recv(1 << 16), b"")).decode()


@contextmanager
def serving(model: Any, drain_seconds: float = 0.2, *, listener: socket.socket | None = None,
            tls: SSLContext | None = None, **options: Any) -> Iterator[Served]:
    app = create_app(model, **options)
    listener, ready = listener or listen("127.0.0.1", 0), threading.Event()
    server = Server(app, app.state.work, drain_seconds, ready.set, app.state.models.limits, tls)
    thread = threading.Thread(target=server.run_on, args=(listener,))
    thread.start()
    assert ready.wait(20)
    served = Served(url_of(listener, tls is not None), server, app, thread)
    try:
        yield served
    finally:
        served.stop()
        listener.close()
        if isinstance(model, SimpleNamespace):
            model.close()


_PLAYING: list[tuple[Served, Scripted]] = []


@contextmanager
def script_server() -> Iterator[None]:
    """The server that `scripted` plays on."""
    engine = Scripted("")
    with serving(engine.model()) as served:
        _PLAYING[:] = [(served, engine)]
        yield


@contextmanager
def scripted(text: str | None, **options: Any) -> Iterator[tuple[Served, Scripted]]:
    """The script server, at rest, and its engine, which plays this from now on."""
    served, engine = _PLAYING[0]
    served.wait_idle()
    engine.play(text, **options)
    yield served, engine


def play_turns(engine: Scripted, *texts: str) -> None:
    """Have the first request answered with the first text, the next with the next: for requests one after another."""
    tokenizer = tiny().chat_processor.tokenizer
    scripts = [[*tokenizer.encode(text), tokenizer.eos_id] for text in texts]

    def turn() -> None:
        if engine.seen:
            engine.script = scripts[min(len(engine.seen), len(scripts)) - 1]
    engine.before_step = turn
