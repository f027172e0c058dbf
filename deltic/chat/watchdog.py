"""Ends Python code that exceeds its time limit.

A watchdog thread raises an exception in the working thread. The interpreter delivers it between two instructions: a
native operation runs to its end, so `deltic.chat.template_sandbox` bounds the operands of those.
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
"""Seconds until the exception is raised again: callbacks of the interpreter swallow it."""


class _Expired(BaseException):
    """Not an Exception, which libraries catch."""


@dataclass(slots=True, eq=False)
class _Watched:
    """Work of one thread, and its deadline by the monotonic clock."""

    thread: int
    due: float
    expired: bool = False


class Watchdog:
    """Runs work under a time limit. The thread starts with the first work, and sleeps until the next deadline."""

    def __init__(self) -> None:
        # a bare lock: the exception may arrive while a thread acquires it
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._watched: dict[_Watched, None] = {}
        self._wakes = 0.0
        self._thread: threading.Thread | None = None

    def run(self, work: Callable[[], Result], seconds: float) -> Result:
        """Runs `work` in this thread; TimeoutError after so many seconds. The work must not hold locks."""
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
            if self._thread is None or not self._thread.is_alive():  # after a fork
                self._wakes = watched.due
                self._thread = threading.Thread(target=self._look, name="deltic-watchdog", daemon=True)
                self._thread.start()
            elif watched.due < self._wakes:
                self._changed.notify()

    def _forget(self, watched: _Watched) -> None:
        """Ends the watch: no exception arrives afterwards."""
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
    """Raises an exception in a thread before its next instruction; None cancels a pending one."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind) if kind else None)
