"""Threads that clients share by processor time, so that no client makes another one wait for long."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from deltic.threads import lower_priority

Result = TypeVar("Result")
Clock = Callable[[], float]

HALF_LIFE: Final = 10.0
"""Seconds after which half of the processor time of a client is forgotten."""
_NICENESS: Final = 4
"""Niceness of the threads relative to the engine's thread. The engine takes Python's lock many times in a step, and
gets it late if several threads of the same priority compute."""
_FORGOTTEN: Final = 10 * HALF_LIFE
_MOST_CLIENTS: Final = 10_000
"""Maximum number of clients without work that are remembered."""


@dataclass(slots=True, eq=False)
class _Task:
    """Work of one client, and the future of its result. started: monotonic time at which a thread took it."""

    work: Callable[[], Any]
    future: Future[Any]
    started: float = 0.0


@dataclass(slots=True, eq=False)
class _Client:
    """The work of one client. used: processor time in seconds, decayed to the time `at`."""

    waiting: deque[_Task] = field(default_factory=deque)
    running: dict[_Task, None] = field(default_factory=dict)
    used: float = 0.0
    at: float = 0.0

    def decayed(self, now: float) -> float:
        return self.used * float(0.5 ** ((now - self.at) / HALF_LIFE))

    def use(self, now: float) -> float:
        """Returns recent use. A running task counts by the wall clock: its processor time is known only at its end."""
        return self.decayed(now) + sum(now - task.started for task in self.running)


class FairExecutor:
    """Runs the work of many clients in a few threads. The waiting client with the least recent use goes next.

    The tasks of one client run in order. A client starts another task only while more threads are free than it holds,
    so that a new client finds a thread even while others run long tasks. Work that waits (for a network, another
    executor) does not belong here: it occupies a thread without using processor time.
    """

    def __init__(self, threads: int, name: str, *, clock: Clock = time.monotonic,
                 processor: Clock = time.thread_time) -> None:
        """name: prefix of the threads' names. processor: returns the processor time in seconds of the calling
        thread."""
        self._threads, self._clock, self._processor = threads, clock, processor
        self._pool = ThreadPoolExecutor(threads, name, lower_priority, (_NICENESS,))
        self._lock = threading.Lock()
        self._busy: OrderedDict[str, _Client] = OrderedDict()  # clients with work
        self._idle: OrderedDict[str, _Client] = OrderedDict()  # clients without work, by the end of their last task
        self._running = 0

    def submit(self, client: str, work: Callable[[], Result]) -> Future[Result]:
        """Queues work of a client. Raises RuntimeError after `shutdown`. Cancelling the future drops work that has not
        begun."""
        task = _Task(work, Future())
        with self._lock:
            self._pool.submit(self._drain)
            known = self._busy.get(client) or self._idle.pop(client, None) or _Client(at=self._clock())
            self._busy[client] = known
            known.waiting.append(task)
        task.future.add_done_callback(partial(self._drop, client))
        return task.future

    async def run(self, client: str, work: Callable[[], Result]) -> Result:
        """Returns the result of a client's work. Drops work that has not begun if the caller is cancelled."""
        return await asyncio.wrap_future(self.submit(client, work))

    def used(self, client: str) -> float:
        """Returns the recent processor time of a client in seconds."""
        with self._lock:
            known, now = self._busy.get(client) or self._idle.get(client), self._clock()
            return known.use(now) if known else 0.0

    def waiting(self) -> int:
        """Returns the number of tasks that no thread has taken yet."""
        with self._lock:
            return sum(len(client.waiting) for client in self._busy.values())

    def shutdown(self, wait: bool = True) -> None:
        """Takes no more work, and finishes queued tasks. wait: return only when they are finished."""
        self._pool.shutdown(wait)

    def _drain(self) -> None:
        """Runs tasks until none may start."""
        while (found := self._take()) is not None:
            name, task = found
            began = self._processor()
            try:
                result = task.work()
            except BaseException as error:
                self._end(name, task, self._processor() - began)
                task.future.set_exception(error)
            else:
                self._end(name, task, self._processor() - began)
                task.future.set_result(result)
                del result
            del found, task  # an idle thread would keep the last task's data

    def _take(self) -> tuple[str, _Task] | None:
        with self._lock:
            now = self._clock()
            while names := [name for name, client in self._busy.items() if self._may_start(client)]:
                name = min(names, key=lambda name: self._busy[name].use(now))
                client = self._busy[name]
                task = client.waiting.popleft()
                if task.future.set_running_or_notify_cancel():
                    task.started = now
                    client.running[task] = None
                    self._running += 1
                    return name, task
                self._rest(name)
            return None

    def _drop(self, name: str, future: Future[Any]) -> None:
        """Drops a task that was cancelled before it began, so that its data is freed."""
        if not future.cancelled():
            return
        with self._lock:
            client = self._busy.get(name)
            if client:
                client.waiting = deque(task for task in client.waiting if task.future is not future)
                self._rest(name)

    def _may_start(self, client: _Client) -> bool:
        held = len(client.running)
        return bool(client.waiting) and (held == 0 or self._threads - self._running > held)

    def _end(self, name: str, task: _Task, seconds: float) -> None:
        """Charges its client for a task that has ended."""
        with self._lock:
            client, now = self._busy[name], self._clock()
            del client.running[task]
            client.used, client.at = client.decayed(now) + seconds, now
            self._running -= 1
            self._rest(name)

    def _rest(self, name: str) -> None:
        """Moves a client without work to the idle clients, and forgets the oldest of these."""
        client = self._busy[name]
        if client.waiting or client.running:
            return
        self._idle[name] = self._busy.pop(name)
        oldest = self._clock() - _FORGOTTEN
        while self._idle and (len(self._idle) > _MOST_CLIENTS or next(iter(self._idle.values())).at < oldest):
            self._idle.popitem(last=False)
