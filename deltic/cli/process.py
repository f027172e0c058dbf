"""Standard streams and signals of a command's process."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_IMPORT_FILE = "<frozen importlib._bootstrap>"
_RETRY_SECONDS = 0.02


class Terminated(BaseException):
    """Raised by SIGTERM."""


@contextmanager
def signals_raise() -> Iterator[None]:
    """Makes SIGINT raise KeyboardInterrupt and SIGTERM raise Terminated, so that everything is closed on the way out.

    A signal during an import waits until the module is loaded, unless a second signal arrives: some libraries report
    that they are broken when an exception interrupts their import, others swallow the exception.
    """
    waiting: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if _is_importing(frame) and not waiting:
            waiting.append(number)
            signal.setitimer(signal.ITIMER_REAL, _RETRY_SECONDS, _RETRY_SECONDS)
        else:
            end(number)

    def retry(_: int, frame: FrameType | None) -> None:
        if waiting and not _is_importing(frame):
            end(waiting[0])

    def end(number: int) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        waiting.clear()
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    handlers = {signal.SIGINT: handle, signal.SIGTERM: handle, signal.SIGALRM: retry}
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # true in a shell's background job
        del handlers[signal.SIGINT]
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != _IMPORT_FILE:
        frame = frame.f_back
    return frame is not None


class Interruption:
    """A context in which the first SIGINT only sets `requested`; a second one raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Interruption:
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True


def open_closed_streams() -> None:
    """Opens closed standard streams as /dev/null; otherwise the next opened file would get their number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # opens with the lowest free number
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]


def discard_stdout() -> None:
    """Sends the buffered rest of stdout to /dev/null, also at the interpreter's exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
