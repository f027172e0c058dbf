"""Connects the engine's worker to an event loop: requests enter its inbox, and a step's events return in one call.

The engine belongs to the worker's thread and handles belong to the loop; nothing else is shared. The worker may serve
other callers at the same time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, Final, Protocol

from deltic.config import Limits
from deltic.engine.policy import to_give_up
from deltic.engine.stats import RequestProgress
from deltic.engine.worker import Worker
from deltic.errors import BusyError, GenerationError, UnavailableError
from deltic.params import EngineRequest, Event, TokenEvent

log = logging.getLogger("deltic")

STUCK_AFTER: Final = 60.0
"""Seconds without a finished step after which the engine counts as stuck. The first large step may be slow."""
TURN: Final = 32
"""Number of events that a reader gets at once; more would hold up the event loop."""
_PACES: Final = 32
"""Number of recent waits from which the wait of a new request is estimated."""
_REST: Final = 8
"""Readers rest for this multiple of the time that writing took."""
_LONGEST_REST: Final = 0.02


@dataclass(frozen=True, slots=True)
class Health:
    """fault: why the engine makes no progress. draining: it accepts no more requests. requests: unfinished requests."""

    fault: str | None
    draining: bool
    requests: int


class RemotePrefill(Protocol):
    """Lets other processes compute prompts, which return through a tier of the cache. outcomes: counts by outcome."""

    outcomes: Mapping[str, int]

    def order(self, request: EngineRequest) -> Any:
        """Returns the input of `compute`, or None to compute the prompt here. Called in the worker's thread."""

    async def compute(self, order: Any) -> None:
        """Returns once the prompt is in the tier or has failed to get there. Cancelled if the request ends before."""


class RequestHandle:
    """Iterates over the events of one or more requests. Close it when they are no longer needed.

    If the reader stops because its client does not read, the requests pause at `max_unread_tokens` events and free
    their state slots. They resume when the reader has read half of the events. After `unread_seconds` they end.
    """

    def __init__(self, requests: Sequence[EngineRequest], limits: Limits, *, before: int = 0,
                 abort: Callable[[RequestHandle], None], pause: Callable[[RequestHandle, bool], None],
                 on_unread: Callable[[], None] = lambda: None) -> None:
        """before: waiting requests that go first. abort: drops the unfinished requests. pause: pauses or resumes the
        requests in the engine. on_unread: called if the requests end because they are not read."""
        self.asked = tuple(requests)
        self.requests = tuple(request.id for request in requests)
        self.client, self.before = requests[0].client, before
        self.began = time.perf_counter()
        self.prompt_tokens = sum(len(request.prompt) for request in requests)
        self.tokens = 0
        self.first_token: float | None = None
        """Time of the first token, by time.perf_counter."""
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.held = False
        """True while the requests are paused."""
        self.remote: set[asyncio.Task[None]] = set()
        """Tasks in which other processes compute prompts. The requests of these prompts pause meanwhile."""
        self._left = {request.id: request.choices for request in requests}
        self._begun: set[tuple[str, int]] = set()
        self._limits = limits
        self._abort = abort
        self._pause = pause
        self._on_unread = on_unread
        self._timer: asyncio.TimerHandle | None = None
        self._away = self._cut = False
        self._events: deque[Event] = deque()
        self._news = asyncio.Event()
        self._error: Exception | None = None

    @property
    def open(self) -> bool:
        """Returns True while any of the requests is unfinished."""
        return bool(self._left)

    @property
    def unread(self) -> int:
        """Returns the number of events that wait for the reader."""
        return len(self._events)

    @property
    def answers(self) -> int:
        """Returns the number of unfinished answers."""
        return sum(self._left.values())

    @property
    def begun(self) -> int:
        """Returns the number of unfinished answers that have a token and are not paused."""
        return 0 if self.held else len(self._begun)

    @property
    def waiting(self) -> int:
        """Returns the number of unfinished answers that have no token yet or are paused."""
        return self.answers - self.begun

    def __aiter__(self) -> RequestHandle:
        return self

    async def __anext__(self) -> list[Event]:
        self._away = False
        if self._events:
            await asyncio.sleep(0)  # gives other readers a turn
        elif not self._error and self._left:
            self._news.clear()
            await self._news.wait()
        if self._error:
            raise self._error
        if not self._events and not self._left:
            raise StopAsyncIteration
        events = [self._events.popleft() for _ in range(min(TURN, len(self._events)))]
        if len(self._events) <= self._limits.max_unread_tokens // 2:
            self._hold(False)
        self._away = True
        return events

    def close(self) -> None:
        """Drops the unfinished requests."""
        if self._timer:
            self._timer.cancel()
        for task in self.remote:
            task.cancel()
        self._abort(self)
        self._left.clear()

    def admit(self, error: Exception | None) -> None:
        """Records that the engine has accepted the requests, or has refused one with `error`."""
        if self.admitted.done():
            return
        if error:
            self.admitted.set_exception(error)
        else:
            self.admitted.set_result(None)

    def take(self, event: Event) -> bool:
        """Adds an event. Returns True if the reader should wake up at once: for a first token and for an end."""
        first = self.first_token is None
        if self._cut and event.finish == "abort":
            assert isinstance(event, TokenEvent)
            event = replace(event, finish="length")
        self._events.append(event)
        if event.token is not None:
            self.tokens += 1
            self.first_token = self.first_token or time.perf_counter()
            self._begun.add((event.request, event.choice))
        if event.finish and event.request in self._left:
            self._finish(event)
        if self._away and len(self._events) > self._limits.max_unread_tokens:
            self._hold(True)
        return first or event.finish is not None

    def _finish(self, event: Event) -> None:
        """Ends a choice. An error or abort ends its whole request, even if other choices have not begun."""
        self._begun.discard((event.request, event.choice))
        self._left[event.request] -= 1
        if event.finish in ("abort", "error") or not self._left[event.request]:
            del self._left[event.request]
            self._begun = {answer for answer in self._begun if answer[0] != event.request}

    def wake(self) -> None:
        """Makes the new events available to the reader."""
        self._news.set()

    def cut_short(self) -> bool:
        """Makes an abort end the answers with the reason "length". Returns False if this was called before."""
        before, self._cut = self._cut, True
        return not before

    def fail(self, error: Exception) -> None:
        """Ends the requests with this error for the reader."""
        self._error = error
        self.admit(error)
        self.close()
        self._news.set()

    def _hold(self, held: bool) -> None:
        if not self._left or held == self.held:
            return
        self.held = held
        self._pause(self, held)
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if held:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._limits.unread_seconds, self._end_unread)

    def _end_unread(self) -> None:
        if self.held and self._left:
            self._on_unread()
            self.fail(GenerationError(f"the client has not read for {self._limits.unread_seconds:g} seconds, so that "
                                      "its answers have ended (unread_seconds)"))


class _Wakeups:
    """Wakes all readers that have new events together, and then rests for a multiple of the time that this took.

    If steps come faster than their tokens can be written, several tokens go out at once, and the interpreter is free
    for the engine. A first token and an end wake their reader at once.
    """

    def __init__(self) -> None:
        self._waiting: dict[RequestHandle, None] = {}
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, handle: RequestHandle, urgent: bool) -> None:
        if urgent:
            self._waiting.pop(handle, None)
            handle.wake()
        else:
            self._waiting[handle] = None

    def begin(self) -> None:
        """Wakes the readers, now or after the rest."""
        loop = asyncio.get_running_loop()
        if not self._waiting or self._timer:
            return
        if loop.time() < self._due:
            self._timer = loop.call_at(self._due, self._wake)
        else:
            self._wake()

    def _wake(self) -> None:
        loop, waiting = asyncio.get_running_loop(), self._waiting
        self._timer, self._waiting = None, {}
        for handle in waiting:
            handle.wake()
        loop.call_soon(self._rest, loop.time())  # runs after the readers

    def _rest(self, began: float) -> None:
        now = asyncio.get_running_loop().time()
        self._due = now + min(_REST * (now - began), _LONGEST_REST)


class AsyncEngine:
    """Connects a worker to the event loop in which `start` is called.

    places: number of answers that can run at once. displaced: number of requests that ended to make room for other
    clients. unread: number of requests that ended because they were not read. remote: computes long prompts elsewhere.
    """

    def __init__(self, worker: Worker, places: int, limits: Limits, stuck_after: float = STUCK_AFTER) -> None:
        self.displaced = self.unread = 0
        self.remote: RemotePrefill | None = None
        self._worker = worker
        self._places, self._limits = places, limits
        self._stuck_after = stuck_after
        self._handles: dict[str, RequestHandle] = {}
        self._closed: str | None = "the engine has not been started"
        self._draining = False
        self._empty = asyncio.Event()
        self._wakeups = _Wakeups()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._paces: deque[float] = deque(maxlen=_PACES)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        assert self._loop
        return self._loop

    @property
    def handles(self) -> list[RequestHandle]:
        """Returns the handles of the unfinished requests."""
        return list(dict.fromkeys(self._handles.values()))

    def start(self) -> None:
        """Starts accepting requests."""
        self._loop, self._closed = asyncio.get_running_loop(), None
        self._worker.start()

    async def submit(self, requests: Sequence[EngineRequest]) -> RequestHandle:
        """Queues requests that belong together.

        If the queue is full, the client with the largest share of it gives up a request for another client's. Raises
        RequestError if the engine refuses a request, BusyError if too many answers wait or these would wait too long.
        """
        answers, client = sum(request.choices for request in requests), requests[0].client
        displaced = self._check_room(client, answers, sum(len(request.prompt) for request in requests))
        before = self._before(answers, client)
        self._check_wait(before)
        self.displaced += len(displaced)
        for other in displaced:
            other.fail(BusyError("the server is full, and this client has most of the requests in it: this one has "
                                 "given its place to another client's (max_waiting or max_live_tokens): try again "
                                 "later"))
        requests = [replace(request, group=requests[0].id) for request in requests]
        handle = RequestHandle(requests, self._limits, before=before, abort=self._abort, pause=self._pause,
                               on_unread=self._count_unread)
        self._handles |= dict.fromkeys(handle.requests, handle)
        self._worker.submit(requests, self, partial(self._admit, handle))
        try:
            await handle.admitted
        except BaseException:
            handle.close()
            raise
        return handle

    def _admit(self, handle: RequestHandle, error: Exception | None) -> None:
        """Posts the verdict and orders remote prompts. Called by the worker before the requests' first step."""
        orders = dict[str, Any]()
        for request in handle.asked if self.remote and not error else ():
            order = self._order(request)
            if order is not None:
                orders[request.id] = order
                self._worker.engine.pause(request.id)
        self._post(self._admitted, handle, error, orders)

    def _order(self, request: EngineRequest) -> Any:
        try:
            return self.remote.order(request) if self.remote else None
        except Exception:
            log.exception("a prompt is computed here, because it cannot be handed over")
            return None

    def _admitted(self, handle: RequestHandle, error: Exception | None, orders: Mapping[str, Any]) -> None:
        handle.admit(error)
        for request, order in orders.items() if handle.open else ():
            task = self.loop.create_task(self._compute(request, order))
            handle.remote.add(task)
            task.add_done_callback(handle.remote.discard)

    async def _compute(self, request: str, order: Any) -> None:
        """Resumes a request when another process has computed its prompt or cannot do so."""
        try:
            assert self.remote
            await self.remote.compute(order)
        except Exception:
            log.exception("a prompt is computed here, because it could not be handed over")
        finally:
            self._worker.ask(partial(self._worker.engine.resume, request))

    def check_room(self, client: str) -> None:
        """Raises BusyError if a client's next answer has no room, UnavailableError if the engine has ended."""
        self._check_room(client, 1, 1)

    def _check_room(self, client: str, answers: int, prompt_tokens: int) -> list[RequestHandle]:
        """Returns the requests of other clients that must end to make room. Raises BusyError if that is not enough. A
        request larger than the limit is accepted if it is alone."""
        if self._closed:
            raise UnavailableError(self._closed)
        if self._draining:
            raise BusyError("the server is shutting down: try again later, or elsewhere")
        handles, limits = self.handles, self._limits
        places = self._places + limits.max_waiting
        displaced = to_give_up([(handle, handle.answers) for handle in handles], client, answers, places)
        if displaced is None:
            live = sum(handle.answers for handle in handles)
            raise BusyError(f"{live} answers run or wait, and at most {limits.max_waiting} may wait (max_waiting): "
                            "try again later")
        left = [(handle, handle.prompt_tokens) for handle in handles if handle not in displaced]
        more = to_give_up(left, client, prompt_tokens, limits.max_live_tokens)
        if more is None:
            tokens = sum(handle.prompt_tokens for handle in handles)
            raise BusyError(f"the prompts that run or wait have {tokens} tokens, and may have "
                            f"{limits.max_live_tokens} together (max_live_tokens): try again later")
        return [*displaced, *more]

    def _before(self, answers: int, client: str) -> int:
        """Returns how many waiting requests go before new answers of a client: one of each other client, as clients
        take turns, and all of its own. Returns 0 if there is a free place, or no bound."""
        handles, bounded = self.handles, self._limits.max_wait_seconds is not None
        if not bounded or sum(handle.answers for handle in handles) + answers <= self._places:
            return 0
        waiting = Counter(handle.client for handle in handles if handle.first_token is None)
        return len(waiting) + max(waiting[client] - 1, 0)

    def _check_wait(self, before: int) -> None:
        """Raises BusyError if a request behind `before` others would probably wait too long."""
        most = self._limits.max_wait_seconds
        if most is None or not self._paces or (wait := before * median(self._paces)) <= most:
            return
        raise BusyError(f"an answer would wait for about {wait:.0f} seconds, and may for {most:g} (max_wait_seconds): "
                        "try again later")

    def cut_short(self, handle: RequestHandle) -> None:
        """Ends the answers at their current position. The reader gets the tokens so far."""
        if handle.open and handle.cut_short():
            self._worker.abort(handle.requests)

    def progress(self, handle: RequestHandle) -> list[RequestProgress]:
        """Returns the progress of each request of the handle."""
        return [self._worker.engine.progress(request) for request in handle.asked]

    def health(self) -> Health:
        fault = self._closed or self._worker.fault(self._stuck_after)
        return Health(fault, self._draining, len(self._handles))

    async def drain(self, grace: float) -> None:
        """Stops accepting requests, and ends the running ones after `grace` seconds."""
        self._draining = True
        if self._handles and grace:
            log.warning("shutting down: %d running requests have up to %g seconds; a second signal ends them at once",
                        len(self._handles), grace)
            self._empty.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), grace)
        if self._handles:
            log.warning("ending %d requests: the server is shutting down", len(self._handles))
        self._closed = self._closed or "the server is shutting down"
        self._fail_all()

    async def stop(self, grace: float = 0.0, patience: float = 5.0) -> None:
        """Drains, and waits until the engine has dropped all requests; at most `patience` seconds if stuck."""
        await self.drain(grace)
        dropped = asyncio.Event()
        self._worker.ask(partial(self._post, dropped.set), lambda _: self._post(dropped.set))
        try:
            await asyncio.wait_for(dropped.wait(), patience)
        except TimeoutError:
            log.error("the engine is stuck and is left behind")

    def _count_unread(self) -> None:
        self.unread += 1

    def _abort(self, handle: RequestHandle) -> None:
        if handle.open:
            self._worker.abort(handle.requests)
            self._forget(handle)

    def _pause(self, handle: RequestHandle, held: bool) -> None:
        engine = self._worker.engine
        for request in handle.requests:
            self._worker.ask(partial(engine.pause if held else engine.resume, request))

    def on_events(self, events: list[Event]) -> None:
        """Receives the events of a step. Called by the worker."""
        self._post(self._deliver, events)

    def on_end(self, error: UnavailableError) -> None:
        """Ends all requests with an error. Called by the worker when it has ended."""
        self._post(self._close)

    def _post(self, call: Callable[..., None], *values: Any) -> None:
        try:
            self.loop.call_soon_threadsafe(call, *values)
        except RuntimeError:  # the loop is closed
            log.debug("the event loop ended before the engine's thread")

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            handle = self._handles.get(event.request)
            if handle is None:
                continue
            waited = handle.first_token is None and handle.before
            self._wakeups.add(handle, urgent=handle.take(event))
            if waited and handle.first_token:
                self._paces.append((handle.first_token - handle.began) / waited)
            if not handle.open:
                self._forget(handle)
        self._wakeups.begin()

    def _forget(self, handle: RequestHandle) -> None:
        for request in handle.requests:
            self._handles.pop(request, None)
        if not self._handles:
            self._empty.set()

    def _close(self) -> None:
        self._closed = self._closed or self._worker.fault(self._stuck_after) or "the engine has stopped"
        self._fail_all()

    def _fail_all(self) -> None:
        for handle in self.handles:
            handle.fail(UnavailableError(self._closed or "the engine has stopped"))
