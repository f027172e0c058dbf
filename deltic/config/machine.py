"""Detects the cores and memory that cgroups, affinity and ulimits leave to this process."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from deltic.errors import ConfigError

_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_UNLIMITED: Final = 1 << 60
_MEMORY_FILES: Final = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Files for limit, use and droppable file cache of a cgroup, in version 2 and version 1."""


def parse_bytes(text: str, option: str = "memory") -> int:
    """Parses `4GiB`, `512M`, `1.5g` or `1048576`; every unit is a power of 1024. Raises ConfigError naming `option`."""
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([kmgt]?)(?:i?b)?\s*", str(text), re.IGNORECASE)
    size = int(float(found[1]) * _UNITS[found[2].lower()]) if found else 0
    if not 0 < size < _UNLIMITED:
        raise ConfigError(f"{option} must be a size such as 4GiB or 512MiB, not {str(text)[:40]!r}", option)
    return size


def available_cores(root: Path = Path("/")) -> int:
    """Returns the physical cores within affinity and CPU quota, at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)
    threads = affinity(0) if affinity else range(os.cpu_count() or 1)
    cores = len({_core(root, thread) for thread in threads})
    quotas = [_quota(group) for group in _cgroups(root, "cpu")]
    return max(1, min([cores, *(int(quota) for quota in quotas if quota is not None)]))


def available_memory(root: Path = Path("/")) -> int:
    """Returns the bytes that can still be allocated: the least of kernel, cgroups and `ulimit -v`."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    free = int(found[1]) << 10 if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    bounds = [_free_in_cgroup(group) for group in _cgroups(root, "memory")]
    bounds.append(_free_address_space(root))
    return max(0, min([free, *(bound for bound in bounds if bound is not None)]))


def _free_address_space(root: Path) -> int | None:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    used = _read(root / "proc/self/statm").split()
    if limit == resource.RLIM_INFINITY or not used:
        return None
    return limit - int(used[0]) * resource.getpagesize()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _core(root: Path, thread: int) -> tuple[str, str]:
    """Returns a key shared by the hardware threads of one core."""
    topology = root / f"sys/devices/system/cpu/cpu{thread}/topology"
    return _read(topology / "physical_package_id"), _read(topology / "core_id") or f"cpu{thread}"


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Yields the directories of this process's cgroup and its ancestors, for version 2 and for the hierarchy of
    `controller` in version 1."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controllers and controller)
        # Without a cgroup namespace, the listed path may not exist inside the container; the base exists then.
        group = base / path.lstrip("/")
        yield from (place for place in (group, *group.parents) if place == base or base in place.parents)


def _quota(group: Path) -> float | None:
    """Returns the CPU quota of a cgroup in cores."""
    quota, _, period = _read(group / "cpu.max").strip().partition(" ")
    if not quota:
        quota = _read(group / "cpu.cfs_quota_us").strip()
        period = _read(group / "cpu.cfs_period_us").strip()
    limited = quota.isdigit() and period.isdigit() and int(period) > 0
    return int(quota) / int(period) if limited else None


def _free_in_cgroup(group: Path) -> int | None:
    """Returns the bytes below a cgroup's limit; file cache that the kernel can drop counts as free."""
    for limit_file, used_file, cache in _MEMORY_FILES:
        limit = _read(group / limit_file).strip()
        if limit.isdigit() and int(limit) < _UNLIMITED:
            used = _read(group / used_file).strip()
            droppable = re.search(rf"^{cache} (\d+)$", _read(group / "memory.stat"), re.MULTILINE)
            return int(limit) - (int(used) if used.isdigit() else 0) + (int(droppable[1]) if droppable else 0)
    return None
