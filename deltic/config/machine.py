"""What this process may use of the machine: cores and memory, as cgroups and affinity leave them."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from deltic.errors import ConfigError

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_UNLIMITED = 1 << 60
_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def parse_bytes(text: str, option: str = "memory") -> int:
    """Bytes in `4GiB`, `512M`, `1.5g` or `1048576`; every unit is a power of 1024.

    Raises ConfigError naming `option`.
    """
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,9})?)\s*([kmgt]?)(?:i?b)?\s*", str(text), re.IGNORECASE)
    size = int(float(found[1]) * _UNITS[found[2].lower()]) if found else 0
    if not 0 < size < _UNLIMITED:
        raise ConfigError(f"{option} must be a size such as 4GiB or 512MiB, not {str(text)[:40]!r}", option)
    return size


def available_cores(root: Path = Path("/")) -> int:
    """Physical cores that affinity and CPU quota leave to this process, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        logical = sorted(os.sched_getaffinity(0))
    else:
        logical = list(range(os.cpu_count() or 1))
    quotas = [quota for group in _groups(root, "cpu") if (quota := _quota(group)) is not None]
    physical = len({_core(root, cpu) for cpu in logical})
    return max(1, min([physical, *map(int, quotas)]))


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can still be allocated: the least of what the kernel, each cgroup above us and `ulimit -v` leave."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    free = int(found[1]) << 10 if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    left = [room for group in _groups(root, "memory") if (room := _room(group)) is not None]
    return max(0, min([free, *left, *_address_space(root)]))


def _address_space(root: Path) -> list[int]:
    """Bytes that the limit of this process's address space leaves; nothing where it has none."""
    limit, used = resource.getrlimit(resource.RLIMIT_AS)[0], _read(root / "proc/self/statm").split()
    if limit == resource.RLIM_INFINITY or not used:
        return []
    return [limit - int(used[0]) * resource.getpagesize()]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _core(root: Path, cpu: int) -> tuple[str, str]:
    """A key that two hardware threads of one core share."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    return _read(topology / "physical_package_id"), _read(topology / "core_id") or f"cpu{cpu}"


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Directories of our cgroup and its ancestors: version 2, and version 1's hierarchy of `controller`."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controllers and controller)
        # Without a cgroup namespace the listed path may not exist inside the container; the base then does.
        group = base / path.lstrip("/")
        yield from (place for place in (group, *group.parents) if place == base or base in place.parents)


def _quota(group: Path) -> float | None:
    """Cores' worth of time per period."""
    quota, _, period = _read(group / "cpu.max").strip().partition(" ")
    if not quota:
        quota, period = _read(group / "cpu.cfs_quota_us").strip(), _read(group / "cpu.cfs_period_us").strip()
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _room(group: Path) -> int | None:
    """Bytes below the group's limit; file cache that the kernel can drop counts as free."""
    for limit_file, used_file, cache in _MEMORY_FILES:
        limit, used = _read(group / limit_file).strip(), _read(group / used_file).strip()
        if limit.isdigit() and int(limit) < _UNLIMITED:
            found = re.search(rf"^{cache} (\d+)$", _read(group / "memory.stat"), re.MULTILINE)
            return int(limit) - (int(used) if used.isdigit() else 0) + (int(found[1]) if found else 0)
    return None
