"""SIGTERM ends a command in order; SIGINT can end an answer without ending the program."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(BaseException):
    """SIGTERM has come."""


@contextmanager
def termination() -> Iterator[None]:
    """Let SIGTERM raise Terminated where the program is, so that everything is closed on the way out."""
    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
