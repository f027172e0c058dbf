"""Thread priorities, and threads that end before the interpreter does.

When the interpreter shuts down, it kills daemon threads that wait for its lock. If such a thread is inside a
destructor of torch or of a GPU driver, this aborts the process.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def lower_priority(niceness: int) -> None:
    """Lowers the calling thread's priority by `niceness` levels (19: lowest). Works only on Linux, where each thread
    has a priority; elsewhere it does nothing."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, min(os.getpriority(os.PRIO_PROCESS, thread) + niceness, 19))


EXIT_SECONDS = 5.0
"""Seconds that the process waits for each thread at exit."""


class ComputeThread(threading.Thread):
    """A daemon thread that the process waits for at exit. leave: called at exit to make `run` return."""

    def __init__(self, run: Callable[[], None], name: str, leave: Callable[[], Any]) -> None:
        super().__init__(name=name, daemon=True)
        self._work, self._leave = run, leave

    def start(self) -> None:
        atexit.register(self._leave)
        super().start()

    def run(self) -> None:
        work, leave = self._work, self._leave
        del self._work, self._leave  # they hold the model
        try:
            work()
        finally:
            atexit.unregister(leave)


def _join() -> None:
    """Waits for threads that are still releasing memory."""
    for thread in threading.enumerate():
        if isinstance(thread, ComputeThread):
            thread.join(EXIT_SECONDS)


atexit.register(_join)  # registered before every thread's `leave`, so that it runs after them
