"""What a reader holds while the engine works for it: the events of its requests, in the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from deltic.types import Request, TokenOut

QUIET = 15.0
"""Seconds of silence after which a reader is woken without events, to show its client that it lives."""


class Ticket:
    """Iterate for the events of some requests, all that have come at once; close it when they are not wanted.

    It has no bound of its own: unread events are at most max_tokens per choice. The engine does not wait for
    readers, as a waiting choice would hold its state slot, the scarce good, and slow down what it is batched with.
    """

    def __init__(self, requests: Sequence[Request], on_close: Callable[[Ticket], None]) -> None:
        self.requests = tuple(request.id for request in requests)
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._left = {request.id: request.sampling.n for request in requests}
        self._on_close = on_close
        self._events: deque[TokenOut] = deque()
        self._news = asyncio.Event()
        self._error: Exception | None = None

    @property
    def open(self) -> bool:
        """Whether the engine has more to say."""
        return bool(self._left)

    def __aiter__(self) -> Ticket:
        return self

    async def __anext__(self) -> list[TokenOut]:
        if not self._events and not self._error and self._left:
            await self._wait()
        if self._error:
            raise self._error
        if not self._events and not self._left:
            raise StopAsyncIteration
        events = list(self._events)
        self._events.clear()
        return events

    def close(self) -> None:
        """Have the engine drop what is not finished."""
        self._on_close(self)
        self._left.clear()

    def admit(self, error: Exception | None) -> None:
        """The engine has taken the requests, or refused one."""
        if self.admitted.done():
            return
        if error:
            self.admitted.set_exception(error)
        else:
            self.admitted.set_result(None)

    def take(self, event: TokenOut) -> None:
        """One more event; an error or abort ends its request, whose other choices may not even have begun."""
        self._events.append(event)
        if event.finish and event.request in self._left:
            self._left[event.request] -= 1
            if event.finish in ("abort", "error") or not self._left[event.request]:
                del self._left[event.request]
        self._news.set()

    def fail(self, error: Exception) -> None:
        """End it: the reader gets this error."""
        self._error = error
        self.admit(error)
        self.close()
        self._news.set()

    async def _wait(self) -> None:
        self._news.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), QUIET)
