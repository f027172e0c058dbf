"""Priorities of threads."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress


def lower_priority(niceness: int) -> None:
    """Let the calling thread have less of a busy processor, by `nice` levels: 0 as before, 19 only what others leave.
    Without effect except on Linux, where threads have a priority of their own."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, min(os.getpriority(os.PRIO_PROCESS, thread) + niceness, 19))
