"""The engine's worker for one event loop: requests go to its inbox, the events of a step come back in one call.

The engine belongs to the worker's thread, handles belong to the loop; nothing else is shared. Others may use the worker
at the same time, and it outlives the bridge.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

from deltic.engine.policy import to_give_up
from deltic.engine.stats import RequestProgress
from deltic.engine.worker import Worker
from deltic.errors import BusyError, UnavailableError
from deltic.params import EngineRequest, Event
from deltic.server.request_handle import RequestHandle, UnreadLimits

log = logging.getLogger("deltic")

STUCK_AFTER = 60.0
"""Seconds without a finished step after which the engine counts as stuck: the first big step may well be slow."""

_PACES = 32
"""Answers that waited by which it is judged how long others will: seconds for each that was before them."""
_SHARED = ("max_waiting", "max_live_tokens")
_REST = 8  # so many times as long as writing has taken, none is written
_LONGEST_REST = 0.02  # seconds


@dataclass(frozen=True, slots=True)
class Health:
    """fault: why the engine makes no progress, or None if it does. draining: whether it takes no more requests, as the
    server is about to end. requests: how many are not finished."""

    fault: str | None
    draining: bool
    requests: int


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """answers: how many run at once. waiting: how many more may wait. tokens: of the prompts of both. unread: events of
    a handle that may wait for its reader, and unread_seconds: for how long it may pause then. wait: seconds for which
    one may have to wait."""

    answers: int
    waiting: int
    tokens: int
    unread: int
    unread_seconds: float
    wait: float | None = None


class _WakeupBatch:
    """Wakes the readers who have news, all in one round, after which it rests for some times as long as that took.

    Where steps come faster than what they bring can be written, several tokens go out at once: the interpreter is the
    engine's, too. Whoever has waited for a first token, or has the last one, is woken at once.
    """

    def __init__(self) -> None:
        self._waiting: dict[RequestHandle, None] = {}
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, handle: RequestHandle, urgent: bool) -> None:
        """One with news."""
        if urgent:
            self._waiting.pop(handle, None)
            handle.wake()
        else:
            self._waiting[handle] = None

    def begin(self) -> None:
        """Wake them, or see to it that they are when the rest is over."""
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
        loop.call_soon(self._rest, loop.time())

    def _rest(self, began: float) -> None:
        """The readers have had their turn."""
        now = asyncio.get_running_loop().time()
        self._due = now + min(_REST * (now - began), _LONGEST_REST)


class AsyncEngine:
    """Brings a worker's events to an event loop. Its methods are for the loop that called `start`."""

    def __init__(self, worker: Worker, room: QueueLimits, stuck_after: float = STUCK_AFTER) -> None:
        self._worker, self._room, self._stuck_after = worker, room, stuck_after
        self._handles: dict[str, RequestHandle] = {}
        self._closed: str | None = "the engine has not been started"
        self._draining, self._empty, self._round = False, asyncio.Event(), _WakeupBatch()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._paces: deque[float] = deque(maxlen=_PACES)
        self._unread = UnreadLimits(room.unread, room.unread_seconds, self._count_unread)
        self.displaced = self.unread = 0  # requests that ended for other clients, and as they were not read

    def start(self) -> None:
        """Take requests."""
        self._loop, self._closed = asyncio.get_running_loop(), None
        self._worker.start()

    async def submit(self, requests: Sequence[EngineRequest]) -> RequestHandle:
        """Queue requests that belong together; RequestError, and none is queued, if the engine refuses one, BusyError
        if too many answers wait already, or these would for too long. Where the room is full, the client that holds
        most of it gives up a request for another client's."""
        answers, client = sum(request.choices for request in requests), requests[0].client
        going = self._check_room(client, answers, sum(len(request.prompt) for request in requests))
        self._check_wait(before := self._before(answers, client))
        self.displaced += len(going)
        for other in going:
            other.fail(BusyError("the server is full, and this client has most of the requests in it: this one has "
                                 f"given its place to another client's ({' or '.join(_SHARED)}): try again later"))
        requests = [replace(request, group=requests[0].id) for request in requests]
        handle = RequestHandle(requests, before, self._unread, self._withdraw, self._hold)
        self._handles |= dict.fromkeys(handle.requests, handle)
        self._worker.submit(requests, self, partial(self._post, handle.admit))
        try:
            await handle.admitted
        except BaseException:
            handle.close()
            raise
        return handle

    def check_room(self, client: str) -> None:
        """BusyError if there is no room for one more answer of a client, UnavailableError if there is for nothing."""
        self._check_room(client, 1, 1)

    def _check_room(self, client: str, answers: int, prompt_tokens: int) -> list[RequestHandle]:
        """The requests of clients with more that have to end so that there is room for so much more; BusyError if there
        is not even then. A request for more than there may be at all is taken if nothing else is there."""
        if self._closed:
            raise UnavailableError(self._closed)
        if self._draining:
            raise BusyError("the server is shutting down: try again later, or elsewhere")
        handles = list(dict.fromkeys(self._handles.values()))
        places = self._room.answers + self._room.waiting
        going = to_give_up([(handle, handle.answers) for handle in handles], client, answers, places)
        if going is None:
            live = sum(handle.answers for handle in handles)
            raise BusyError(f"{live} answers run or wait, and at most {self._room.waiting} may wait (max_waiting): try "
                            "again later")
        left = [(handle, handle.prompt_tokens) for handle in handles if handle not in going]
        more = to_give_up(left, client, prompt_tokens, self._room.tokens)
        if more is None:
            tokens = sum(handle.prompt_tokens for handle in handles)
            raise BusyError(f"the prompts that run or wait have {tokens} tokens, and may have {self._room.tokens} "
                            "together (max_live_tokens): try again later")
        return [*going, *more]

    def _before(self, answers: int, client: str) -> int:
        """Behind how many, once all places are taken, so many more answers of the client would wait: one of each other
        client that waits, as they take turns, and all of its own. Counted only if there is a bound to it."""
        handles = dict.fromkeys(self._handles.values())
        if self._room.wait is None or sum(handle.answers for handle in handles) + answers <= self._room.answers:
            return 0
        waiting = Counter(handle.client for handle in handles if handle.first_token is None)
        return len(waiting) + max(waiting[client] - 1, 0)

    def _check_wait(self, before: int) -> None:
        """BusyError if who would wait behind so many would probably do so for too long."""
        most = self._room.wait
        if most is None or not self._paces or (wait := before * median(self._paces)) <= most:
            return
        raise BusyError(f"an answer would wait for about {wait:.0f} seconds, and may for {most:g} (max_wait_seconds): "
                        "try again later")

    def cut_short(self, handle: RequestHandle) -> None:
        """End the answers where they are; their reader gets what there is."""
        if handle.open and handle.cut_short():
            self._worker.abort(handle.requests)

    def progress(self, handle: RequestHandle) -> list[RequestProgress]:
        """How far each of its requests is."""
        return [self._worker.engine.progress(request) for request in handle.asked]

    def health(self) -> Health:
        """How the engine is now; cheap."""
        return Health(self._closed or self._worker.fault(self._stuck_after), self._draining, len(self._handles))

    async def drain(self, grace: float) -> None:
        """Take no more requests, give the running ones `grace` seconds, then end them."""
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
        """Drain, and wait until the engine has dropped what was running; `patience` seconds for one that is stuck."""
        await self.drain(grace)
        dropped = asyncio.Event()
        self._worker.ask(partial(self._post, dropped.set), lambda _: self._post(dropped.set))
        try:
            await asyncio.wait_for(dropped.wait(), patience)
        except TimeoutError:
            log.error("the engine is stuck and is left behind")

    def _count_unread(self) -> None:
        self.unread += 1

    def _withdraw(self, handle: RequestHandle) -> None:
        """A reader wants no more."""
        if handle.open:
            self._worker.abort(handle.requests)
            self._forget(handle)

    def _hold(self, handle: RequestHandle, held: bool) -> None:
        """A reader has fallen behind, or has caught up."""
        engine = self._worker.engine
        for request in handle.requests:
            self._worker.ask(partial(engine.pause if held else engine.resume, request))

    def on_events(self, events: list[Event]) -> None:
        """The worker has news."""
        self._post(self._deliver, events)

    def on_end(self, error: UnavailableError) -> None:
        """The worker has ended."""
        self._post(self._close)

    def _post(self, call: Callable[..., None], *values: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(call, *values)
        except RuntimeError:  # the loop is closed, so nobody listens any more
            log.debug("the event loop ended before the engine's thread")

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            handle = self._handles.get(event.request)
            if handle is not None:
                waited = handle.first_token is None and handle.before
                self._round.add(handle, urgent=handle.take(event))
                if waited and handle.first_token:
                    self._paces.append((handle.first_token - handle.began) / waited)
                if not handle.open:
                    self._forget(handle)
        self._round.begin()

    def _forget(self, handle: RequestHandle) -> None:
        for request in handle.requests:
            self._handles.pop(request, None)
        if not self._handles:
            self._empty.set()

    def _close(self) -> None:
        self._closed = self._closed or self._worker.fault(self._stuck_after) or "the engine has stopped"
        self._fail_all()

    def _fail_all(self) -> None:
        for handle in list(dict.fromkeys(self._handles.values())):
            handle.fail(UnavailableError(self._closed or "the engine has stopped"))
