"""Ends work in Python whose time is over, from outside.

A template spends time in any filter, test, method or operator, and none of them looks at a clock. So a thread raises an
exception in the one that works. The interpreter raises it between two steps: a single step in native code runs to its
end, and its size has to be bounded (`deltic.chat.template_budget`).
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

Result = TypeVar("Result")

_AGAIN: Final = 0.1
"""Seconds after which the exception is raised again, if it was lost: in a callback of the interpreter's, it is."""


class _Expired(BaseException):
    """Not an Exception, which libraries catch."""


@dataclass(slots=True, eq=False)
class _Watched:
    """Work of a thread. due: when its time is over, by the monotonic clock."""

    thread: int
    due: float
    expired: bool = False


class Watchdog:
    """Bounds the time of work. Its thread starts with the first work, and wakes only when a time may be over."""

    def __init__(self) -> None:
        # the exception may come while a thread takes the lock: only a bare one is released then
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._watched: dict[_Watched, None] = {}
        self._wakes = 0.0
        self._thread: threading.Thread | None = None

    def run(self, work: Callable[[], Result], seconds: float) -> Result:
        """The result of some work in this thread. TimeoutError if it takes longer; it must hold no lock then."""
        watched = _Watched(threading.get_ident(), time.monotonic() + seconds)
        try:
            try:
                self._watch(watched)
                return work()
            finally:
                while True:
                    try:
                        self._forget(watched)
                        break
                    except _Expired:
                        continue
        except _Expired:
            raise TimeoutError from None

    def _watch(self, watched: _Watched) -> None:
        with self._lock:
            self._watched[watched] = None
            if self._thread is None or not self._thread.is_alive():  # as in a process that was forked
                self._wakes = watched.due
                self._thread = threading.Thread(target=self._look, name="deltic-watchdog", daemon=True)
                self._thread.start()
            elif watched.due < self._wakes:
                self._changed.notify()

    def _forget(self, watched: _Watched) -> None:
        """From here on nothing is raised for this work."""
        with self._lock:
            self._watched.pop(watched, None)
        if watched.expired:
            _raise(watched.thread, None)

    def _look(self) -> None:
        with self._lock:
            while True:
                now = time.monotonic()
                for watched in self._watched:
                    if watched.due <= now:
                        watched.expired, watched.due = True, now + _AGAIN
                        _raise(watched.thread, _Expired)
                self._wakes = min((watched.due for watched in self._watched), default=float("inf"))
                self._changed.wait(self._wakes - now if self._watched else None)


def _raise(thread: int, kind: type[BaseException] | None) -> None:
    """Raises an exception in a thread before its next step; None: takes back one that was not raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind) if kind else None)
