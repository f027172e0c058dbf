"""Facts about the machine and the code, for measurements."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from deltic.config import available_cores


def machine_facts() -> dict[str, Any]:
    import torch

    return {"cpu": cpu_name(), "cores": available_cores(), "memory_mib": memory_mib(),
            "python": platform.python_version(), "torch": torch.__version__}


def cpu_name() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", read_system("/proc/cpuinfo"), re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def memory_mib() -> int:
    return (os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) >> 20


def peak_memory_mib() -> float:
    """The peak memory of this process. getrusage on Linux may return the peak of its parent."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", read_system("/proc/self/status"), re.MULTILINE)
    if found:
        return int(found[1]) / 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def commit() -> str | None:
    """The commit of this checkout, with `+` if tracked files differ from it; None outside of a checkout."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    return None


def read_system(path: str) -> str:
    """A file of the operating system; empty if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
