"""What a measurement needs to say about where it was made."""

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
    """Processor, cores, memory and the versions below us."""
    import torch

    return {"cpu": cpu_name(), "cores": available_cores(), "memory_mib": memory_mib(),
            "python": platform.python_version(), "torch": torch.__version__}


def cpu_name() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def memory_mib() -> int:
    return (os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) >> 20


def peak_memory_mib() -> float:
    """The most memory that this process has had at once.

    Linux lets getrusage's figure survive from the parent of a process, so its own status is asked first.
    """
    found = re.search(r"^VmHWM:\s+(\d+) kB", _read("/proc/self/status"), re.MULTILINE)
    if found:
        return int(found[1]) / 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def commit() -> str | None:
    """The commit that runs, with `+` if files differ from it; None outside of a checkout."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    with suppress(OSError, subprocess.SubprocessError):
        head = _git(root, "rev-parse", "--short=12", "HEAD").strip()
        return head + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")
    return None


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True,
                          timeout=10).stdout


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
