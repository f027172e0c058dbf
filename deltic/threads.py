"""Priorities of threads."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress


def lower_priority(niceness: int) -> None:
    """Lowers the calling thread's priority by `niceness` levels (19: lowest). Does nothing except on Linux, where
    threads have priorities."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, min(os.getpriority(os.PRIO_PROCESS, thread) + niceness, 19))
