"""Priorities of threads, and threads that end before the interpreter does.

When the interpreter shuts down, a daemon thread that waits for its lock is ended at once. Inside a destructor of torch
or of a GPU driver that aborts the process.
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
    """Lowers the calling thread's priority by `niceness` levels (19: lowest). Does nothing except on Linux, where
    threads have priorities."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, min(os.getpriority(os.PRIO_PROCESS, thread) + niceness, 19))


EXIT_SECONDS = 5.0
"""Time that the end of the process waits for a thread."""


class ComputeThread(threading.Thread):
    """A daemon thread that the end of the process waits for. leave: asks it to end; called at the process's end."""

    def __init__(self, run: Callable[[], None], name: str, leave: Callable[[], Any]) -> None:
        super().__init__(name=name, daemon=True)
        self._work, self._leave = run, leave

    def start(self) -> None:
        atexit.register(self._leave)
        super().start()

    def run(self) -> None:
        work, leave = self._work, self._leave
        del self._work, self._leave  # which hold the model
        try:
            work()
        finally:
            atexit.unregister(leave)


def _join() -> None:
    """Waits for threads that still release memory."""
    for thread in threading.enumerate():
        if isinstance(thread, ComputeThread):
            thread.join(EXIT_SECONDS)


atexit.register(_join)  # now, before each thread's `leave`, so that it runs after them
