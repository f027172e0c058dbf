"""Where a worker puts its news for one caller, a thread or a task of an event loop."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable
from functools import partial

from deltic.errors import UnavailableError
from deltic.params import Event


class EventMailbox:
    """The events of some requests: a `Listener` on the worker's side, `get` or `aget` on the other.

    patience: events that may gather before the reader is woken; the end of a choice wakes him in any case. For one
    reader at a time.
    """

    def __init__(self, patience: int = 1) -> None:
        self._patience = patience
        self._gathered: list[Event] = []  # the worker's alone
        self._queue: queue.SimpleQueue[list[Event] | Exception] = queue.SimpleQueue()
        self._wake: Callable[[], object] | None = None

    def get(self, timeout: float | None = None) -> list[Event]:
        """What has come next; nothing if so many seconds pass. Raises what keeps the worker from answering."""
        try:
            return self._opened(self._queue.get(timeout=timeout))
        except queue.Empty:
            return []

    async def aget(self) -> list[Event]:
        """As `get`, for a task."""
        loop = asyncio.get_running_loop()
        while True:
            woken = loop.create_future()
            self._wake = partial(loop.call_soon_threadsafe, _set, woken)  # first this, then a look: no news is missed
            try:
                return self._opened(self._queue.get_nowait())
            except queue.Empty:
                await woken
            finally:
                self._wake = None

    def on_reply(self, error: Exception | None) -> None:
        """The worker has taken the requests, or not."""
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
            except RuntimeError:  # the event loop is closed, so nobody waits any more
                self._wake = None

    def _opened(self, news: list[Event] | Exception) -> list[Event]:
        if isinstance(news, Exception):
            self._queue.put(news)  # nothing else comes, however often somebody looks
            raise news
        return news


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
