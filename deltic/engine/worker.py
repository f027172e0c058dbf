"""The thread that owns an engine. Any thread may submit requests, so that concurrent ones are batched.

    callers, in any thread                         the engine's thread
    submit, abort  -- inbox ------------------->   between two steps: add, abort
    Listener       <----------------------------   the events of a step, in one call per listener
    hold, call     -- inbox ------------------->   waits between two steps while the caller has the engine

The worker handles no text and no clients: a listener passes the events to its own thread or event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from deltic.engine.engine import Engine
from deltic.errors import UnavailableError, forked_from
from deltic.params import EngineRequest, Event, TokenEvent
from deltic.threads import EXIT_SECONDS, ComputeThread

log = logging.getLogger("deltic")

_SETTLE = 0.2  # idle seconds before the accounts are checked: the check must not delay the next request
_PAUSE = 0.002  # seconds to sleep if a step could do nothing
_MAX_FAILURES = 3

Command = Callable[[], None]
Refusal = Callable[[UnavailableError], None]
Task = tuple[Command, Refusal]
Result = TypeVar("Result")


class Listener(Protocol):
    """Receives the events of its requests. Called in the worker's thread, so it must return at once."""

    def on_events(self, events: list[Event]) -> None:
        """Takes events of its requests, in order. An error without usage ends all choices of its request."""

    def on_end(self, error: UnavailableError) -> None:
        """Called if the worker has ended before the listener's requests."""


@dataclass(slots=True)
class _LiveRequest:
    """An unfinished request. left: number of its unfinished choices."""

    listener: Listener
    left: int


class _CallerTurn:
    """The time in which a caller has the engine (`Worker.hold`)."""

    def __init__(self) -> None:
        self.begun, self.over = threading.Event(), threading.Event()
        self.error: UnavailableError | None = None

    def give(self) -> None:
        self.begun.set()
        self.over.wait()

    def refuse(self, error: UnavailableError) -> None:
        self.error = error
        self.begun.set()


class Worker:
    """Owns an engine from the first request until `stop` or the end of the process.

    Its methods are thread-safe and return at once, except for `hold`, `call`, `execute` and `stop`. They raise
    UnavailableError in a forked process, which does not have the worker's thread.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._inbox: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread = ComputeThread(self._run, "deltic-engine", self._leave)
        self._starting, self._started, self._process = threading.Lock(), False, os.getpid()
        self._live: dict[str, _LiveRequest] = {}
        self._since: float | None = None
        self._checked, self._failures = True, 0
        self._fault: str | None = None
        self._reason, self._ended, self._leaving = "the engine has stopped", False, False

    @property
    def forked(self) -> bool:
        """True in a process that was forked from the worker's."""
        return os.getpid() != self._process

    def start(self) -> None:
        """Starts the thread if it does not run yet. The first request does the same."""
        if self.forked:
            raise forked_from(self._process)
        if self._started:
            return
        with self._starting:
            if not self._started:
                self._thread.start()
                self._started = True

    def submit(self, requests: Sequence[EngineRequest], listener: Listener,
               reply: Callable[[Exception | None], None]) -> None:
        """Queues requests that belong together: either all, or none if the engine refuses one of them. reply: called in
        the worker's thread, before any event, with None, a RequestError or an UnavailableError."""
        self.ask(partial(self._add, requests, listener, reply), reply)

    def abort(self, requests: Sequence[str]) -> None:
        """Ends unfinished requests. Their listener gets the usual last events."""
        self.ask(partial(self._abort, requests))

    @contextmanager
    def hold(self) -> Iterator[Engine]:
        """Lends the engine to the caller's thread, while the worker waits between two steps. A caller that calls `step`
        gets the events of all requests. Must not be nested."""
        turn = _CallerTurn()
        self.ask(turn.give, turn.refuse)
        try:
            turn.begun.wait()
            if turn.error:
                raise turn.error
            yield self.engine
        finally:
            turn.over.set()

    def call(self, function: Callable[[Engine], Result]) -> Result:
        """Calls a function between two steps, in the caller's thread. Returns its result or raises its error."""
        with self.hold() as engine:
            return function(engine)

    def execute(self, function: Callable[[Engine], Result]) -> Result:
        """Works like `call`, but in the worker's thread, because CUDA's libraries prepare resources for each thread."""
        done = Future[Result]()

        def command() -> None:
            try:
                done.set_result(function(self.engine))
            except BaseException as error:  # else the caller would wait forever
                done.set_exception(error)
        self.ask(command, done.set_exception)
        return done.result()

    def ask(self, command: Command, refuse: Refusal = lambda error: None) -> None:
        """Queues a command that the worker's thread runs between two steps. refuse: called instead if the worker has
        ended, perhaps in the caller's thread."""
        self.start()
        self._inbox.put((command, refuse))
        if self._ended:  # perhaps the worker has read the inbox for the last time
            self._refuse_all()

    def fault(self, stuck_after: float) -> str | None:
        """Returns the reason why the engine makes no progress or cannot be trusted; None if there is none."""
        since = self._since
        if self._fault or self._ended:
            return self._fault or self._reason
        if since is not None and (waited := time.monotonic() - since) > stuck_after:
            return f"the engine has finished no step for {waited:.0f} seconds"
        return None

    def stop(self, patience: float, reason: str = "the engine has stopped") -> bool:
        """Ends all requests and the thread. Returns False if that takes more than `patience` seconds."""
        if self.forked:
            return True
        with self._starting:
            if not self._ended:
                self._reason = reason
            if not self._started:  # and never will be
                self._started = self._ended = True
        self._inbox.put(None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(patience)
        return not self._thread.is_alive()

    def _leave(self) -> None:
        self._leaving = True
        self.stop(EXIT_SECONDS)

    # In the worker's thread

    def _run(self) -> None:
        try:
            while self._obey():
                if self.engine.has_work:
                    self._step()
            self._finish()
        except BaseException as error:
            self._fault = self._fault or f"the engine's thread has ended: {error!r}"
            log.critical("the engine's thread has ended", exc_info=True)
        finally:
            self._end()

    def _obey(self) -> bool:
        """Runs all queued commands; waits for one if the engine has no work. Returns False if the worker must end."""
        task = self._wait() if not self.engine.has_work else _NOTHING
        while task is not None:
            self._carry_out(task[0])
            try:
                task = self._inbox.get_nowait()
            except queue.Empty:
                return True
        return False

    def _carry_out(self, command: Command) -> None:
        self._checked = False
        try:
            command()
        except Exception as error:
            self._fault = f"the engine failed outside of a step: {error!r}"
            log.exception("the engine failed outside of a step")

    def _add(
        self, requests: Sequence[EngineRequest], listener: Listener, reply: Callable[[Exception | None], None]
    ) -> None:
        added = []
        try:
            for request in requests:
                self.engine.add(request)
                added.append(request.id)
        except Exception as error:  # a refusal by the engine, or a bug: only this caller gets it
            reply(error)
            for name in added:
                self.engine.abort(name)
        else:
            self._live |= {request.id: _LiveRequest(listener, request.choices) for request in requests}
            reply(None)

    def _abort(self, requests: Sequence[str]) -> None:
        for request in requests:
            if request in self._live:
                self.engine.abort(request)

    def _wait(self) -> Task | None:
        self._since = None
        task = self._settle() if not self._checked else self._inbox.get()
        self._since = time.monotonic()
        return task

    def _settle(self) -> Task | None:
        try:
            return self._inbox.get(timeout=_SETTLE)
        except queue.Empty:
            self._check()
            return self._inbox.get()

    def _check(self) -> None:
        self._checked = True
        try:
            self.engine.check()
            self._fault = None
        except Exception as error:
            self._fault = f"the engine's accounts are wrong: {error}"
            log.critical("the engine's accounts are wrong; load the model anew", exc_info=True)

    def _step(self) -> None:
        steps = self.engine.stats.steps
        self._since = self._since or time.monotonic()
        try:
            events = self.engine.step()
        except Exception as error:
            log.exception("the engine failed outside of a request; all requests end with an error")
            events = self._recover(f"internal error: {error}")
        else:
            self._failures = 0
        if events or self.engine.stats.steps != steps:
            self._since = time.monotonic()
            self._tell(events)
        else:
            time.sleep(_PAUSE)

    def _recover(self, message: str) -> list[Event]:
        self._failures += 1
        if self._failures >= _MAX_FAILURES:
            raise RuntimeError(f"{_MAX_FAILURES} steps in a row failed, the last with {message}")
        for request in self._live:
            self.engine.abort(request)  # its own last events would come too late
        return [TokenEvent(request, 0, None, finish="error", error=message) for request in self._live]

    def _tell(self, events: Sequence[Event]) -> None:
        news: dict[Listener, list[Event]] = {}
        for event in events:
            live = self._live.get(event.request)
            if live is None:
                continue
            news.setdefault(live.listener, []).append(event)
            if event.finish:
                live.left -= 1
                if not live.left or event.usage is None:
                    del self._live[event.request]
        for listener, found in news.items():
            try:
                listener.on_events(found)
            except Exception:
                log.exception("a listener failed; its request ends")
                self._abort([event.request for event in found])

    def _finish(self) -> None:
        """Aborts all requests, so that the engine is empty."""
        self._abort(list(self._live))
        if self.engine.has_work:
            self.engine.step()

    def _end(self) -> None:
        self._ended = True
        reason = self._fault or self._reason
        # at the end of the process only daemon threads still wait, and would die with a traceback
        waiting = [] if self._leaving else [live.listener for live in self._live.values()]
        for listener in dict.fromkeys(waiting):
            listener.on_end(UnavailableError(reason))
        self._live.clear()
        self._refuse_all()

    def _refuse_all(self) -> None:
        """Refuses all commands, once the worker has ended."""
        while True:
            try:
                task = self._inbox.get_nowait()
            except queue.Empty:
                return
            if task is not None:
                task[1](UnavailableError(self._fault or self._reason))


def _nothing(*_: object) -> None:
    pass


_NOTHING: Task = (_nothing, _nothing)


class EventMailbox:
    """A `Listener` that keeps events until another thread or task reads them with `get` or `aget`. For one reader.

    patience: number of events to gather before the reader is woken; the end of a choice always wakes it.
    """

    def __init__(self, patience: int = 1) -> None:
        self._patience = patience
        self._gathered: list[Event] = []  # used by the worker only
        self._queue: queue.SimpleQueue[list[Event] | Exception] = queue.SimpleQueue()
        self._wake: Callable[[], object] | None = None

    def get(self, timeout: float | None = None) -> list[Event]:
        """Returns the next events; an empty list after `timeout` seconds. Raises the worker's error."""
        try:
            return self._opened(self._queue.get(timeout=timeout))
        except queue.Empty:
            return []

    async def aget(self) -> list[Event]:
        """Works like `get` without a timeout, for asyncio."""
        loop = asyncio.get_running_loop()
        while True:
            woken = loop.create_future()
            # set before the queue is read, so that no event is missed
            self._wake = partial(loop.call_soon_threadsafe, _set, woken)
            try:
                return self._opened(self._queue.get_nowait())
            except queue.Empty:
                await woken
            finally:
                self._wake = None

    def on_reply(self, error: Exception | None) -> None:
        """Called when the worker has accepted or refused the requests: the `reply` of `Worker.submit`."""
        if error:
            self._put(error)

    def on_events(self, events: list[Event]) -> None:
        self._gathered += events
        if len(self._gathered) >= self._patience or any(event.finish for event in events):
            gathered, self._gathered = self._gathered, []
            self._put(gathered)

    def on_end(self, error: UnavailableError) -> None:
        self._put(error)

    def _put(self, news: list[Event] | Exception) -> None:
        self._queue.put(news)
        wake = self._wake
        if wake:
            try:
                wake()
            except RuntimeError:  # the event loop is closed
                self._wake = None

    def _opened(self, news: list[Event] | Exception) -> list[Event]:
        if isinstance(news, Exception):
            self._queue.put(news)  # later calls raise it again
            raise news
        return news


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
