"""Processes with less memory than the machine has: memory cgroups of their own, of version 1 or 2; and files that are
forgotten by the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def memory_cgroup(name: str, limit: int) -> Iterator[Path]:
    """A cgroup below this process's own, empty, for `limit` bytes of memory and page cache. `join` puts a process in.

    SystemExit where this user may not make one.
    """
    directory, file = _parent(), ""
    path = directory / f"deltic-{os.getpid()}-{name}"
    try:
        path.mkdir()
        file = "memory.limit_in_bytes" if (path / "memory.limit_in_bytes").exists() else "memory.max"
        (path / file).write_text(str(limit))
    except OSError as error:
        if path.exists():
            path.rmdir()
        raise SystemExit(f"no memory cgroup can be made in {directory} ({error.strerror}): run this as root, where the "
                         "controller `memory` is there for the children of this process's cgroup") from error
    try:
        yield path
    finally:
        path.rmdir()


def join(path: str) -> None:
    """Move this process into a cgroup. What it takes from now on counts there; also what it reads of a file that nobody
    has read before, so have the page cache forget it first."""
    (Path(path) / "cgroup.procs").write_text(str(os.getpid()))


def forget(path: Path) -> float:
    """Have the page cache forget a file; returns how many MiB of it are still there, because somebody maps them."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return _cached(file.fileno())


def _cached(descriptor: int) -> float:
    size, libc = os.fstat(descriptor).st_size, ctypes.CDLL(None, use_errno=True)
    pages = (size + mmap.PAGESIZE - 1) // mmap.PAGESIZE
    found = (ctypes.c_ubyte * pages)()
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    at = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    libc.mincore(ctypes.c_void_p(at), ctypes.c_size_t(size), found)
    libc.munmap(ctypes.c_void_p(at), ctypes.c_size_t(size))
    return sum(map((1).__and__, bytes(found))) * mmap.PAGESIZE / 2**20


def _parent() -> Path:
    """The directory of this process's own memory cgroup."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, place = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory") / place.lstrip("/")
        if not controllers and (Path("/sys/fs/cgroup") / "cgroup.controllers").exists():
            return Path("/sys/fs/cgroup") / place.lstrip("/")
    raise SystemExit("there are no memory cgroups on this machine")
