"""Threads that compute end before the interpreter does.

A daemon thread that wants the interpreter's lock once it shuts down is ended where it stands; within a destructor of
torch or of a GPU's driver that aborts the process.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import Any

EXIT_SECONDS = 5.0
"""How long the end of the process waits for a thread."""


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
    """A thread that has done its work may still be giving memory back."""
    for thread in threading.enumerate():
        if isinstance(thread, ComputeThread):
            thread.join(EXIT_SECONDS)


atexit.register(_join)  # now, before each thread's `leave`, so that it runs after them
