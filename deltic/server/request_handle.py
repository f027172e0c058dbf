"""What a reader holds while the engine works for it: the events of its requests, in the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from deltic.errors import GenerationError
from deltic.params import EngineRequest, Event, TokenEvent

_TURN = 32
"""Events that a reader gets at once: what it makes of them must not hold up the event loop."""


@dataclass(frozen=True, slots=True)
class UnreadLimits:
    """events: that may wait for a reader. seconds: for which its requests may pause then. ended: called when they end,
    as these are over."""

    events: int
    seconds: float
    ended: Callable[[], None]


class RequestHandle:
    """Iterate for the events of some requests, as they come; close it when they are not wanted.

    A reader that stays away, as its client does not read, may have so many events waiting: then its requests pause,
    so that they hold no state slots, the scarce good, until it is back and has read half of them. If it stays away for
    too long, they end, so that they do not hold places that others wait for either.
    """

    def __init__(self, requests: Sequence[EngineRequest], before: int, unread: UnreadLimits,
                 withdraw: Callable[[RequestHandle], None], hold: Callable[[RequestHandle, bool], None]) -> None:
        """before: how many wait that will have their turn first. withdraw: has the engine drop what is not finished.
        hold: has it pause the requests, or go on with them."""
        self.asked, self.requests = tuple(requests), tuple(request.id for request in requests)
        self.client, self.before, self.began = requests[0].client, before, time.perf_counter()
        self.prompt_tokens = sum(len(request.prompt) for request in requests)
        self.tokens = 0
        self.first_token: float | None = None  # when it came, by time.perf_counter
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._left = {request.id: request.choices for request in requests}
        self._begun: set[tuple[str, int]] = set()
        self._unread, self._withdraw, self._have_held = unread, withdraw, hold
        self._timer: asyncio.TimerHandle | None = None
        self._away = self._held = self._cut = False
        self._events: deque[Event] = deque()
        self._news = asyncio.Event()
        self._error: Exception | None = None

    @property
    def open(self) -> bool:
        """Whether the engine has more to say."""
        return bool(self._left)

    @property
    def held(self) -> bool:
        """Whether it pauses until its reader is back."""
        return self._held

    @property
    def answers(self) -> int:
        """How many are not finished."""
        return sum(self._left.values())

    @property
    def begun(self) -> int:
        """How many of these have a token, and do not pause."""
        return 0 if self._held else len(self._begun)

    @property
    def waiting(self) -> int:
        """How many have none yet, or pause."""
        return self.answers - self.begun

    def __aiter__(self) -> RequestHandle:
        return self

    async def __anext__(self) -> list[Event]:
        self._away = False
        if self._events:  # there are more than one turn's: let others have theirs
            await asyncio.sleep(0)
        elif not self._error and self._left:
            self._news.clear()
            await self._news.wait()
        if self._error:
            raise self._error
        if not self._events and not self._left:
            raise StopAsyncIteration
        events = [self._events.popleft() for _ in range(min(_TURN, len(self._events)))]
        if len(self._events) <= self._unread.events // 2:
            self._hold(False)
        self._away = True
        return events

    def close(self) -> None:
        """Have the engine drop what is not finished."""
        if self._timer:
            self._timer.cancel()
        self._withdraw(self)
        self._left.clear()

    def admit(self, error: Exception | None) -> None:
        """The engine has taken the requests, or refused one."""
        if self.admitted.done():
            return
        if error:
            self.admitted.set_exception(error)
        else:
            self.admitted.set_result(None)

    def take(self, event: Event) -> bool:
        """One more event; an error or abort ends its request, whose other choices may not even have begun. Returns
        whether its reader should be woken at once: it is the first, or an end."""
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
            self._begun.discard((event.request, event.choice))
            self._left[event.request] -= 1
            if event.finish in ("abort", "error") or not self._left[event.request]:
                del self._left[event.request]
                self._begun = {answer for answer in self._begun if answer[0] != event.request}
        if self._away and len(self._events) > self._unread.events:
            self._hold(True)
        return first or event.finish is not None

    def wake(self) -> None:
        """Let the reader have what there is."""
        self._news.set()

    def cut_short(self) -> bool:
        """Have the answers end where they are, as at a length that was asked for: whoever then aborts the requests ends
        them so. False if that has been done."""
        before, self._cut = self._cut, True
        return not before

    def fail(self, error: Exception) -> None:
        """End it: the reader gets this error."""
        self._error = error
        self.admit(error)
        self.close()
        self._news.set()

    def _hold(self, held: bool) -> None:
        if self._left and held != self._held:
            self._held = held
            self._have_held(self, held)
            if self._timer:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(self._unread.seconds, self._abandon) if held else None

    def _abandon(self) -> None:
        if self._held and self._left:
            self._unread.ended()
            self.fail(GenerationError(f"the client has not read for {self._unread.seconds:g} seconds, so that its "
                                      "answers have ended (unread_seconds)"))
