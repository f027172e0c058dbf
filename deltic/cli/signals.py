"""SIGINT and SIGTERM end a command in order; SIGINT can end an answer without ending the program."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(BaseException):
    """SIGTERM has come."""


_SOON = 0.02  # seconds
_IMPORT = "<frozen importlib._bootstrap>"


@contextmanager
def orderly_ends() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt and SIGTERM Terminated where the program is, so that everything is closed on
    the way out.

    A library that is just being loaded comes first, unless the signal comes twice: some that are stopped on the way
    say that they are broken, others swallow what stopped them.
    """
    waiting: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        if _is_importing(frame) and not waiting:
            waiting.append(number)
            signal.setitimer(signal.ITIMER_REAL, _SOON, _SOON)
        else:
            leave(number)

    def look_again(_: int, frame: FrameType | None) -> None:
        if waiting and not _is_importing(frame):
            leave(waiting[0])

    def leave(number: int) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        waiting.clear()
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    handlers = {signal.SIGINT: end, signal.SIGTERM: end, signal.SIGALRM: look_again}
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as that of what a shell runs in the background
        del handlers[signal.SIGINT]
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != _IMPORT:
        frame = frame.f_back
    return frame is not None


class Interruption:
    """While entered, the first SIGINT only sets `requested`; a second one is a KeyboardInterrupt again."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Interruption:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
