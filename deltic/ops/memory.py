"""Allocates host memory in pages of 2 MiB, and GPU memory that belongs to one model.

Steps stream weights and states from end to end. Translating the address of a 4 KiB page takes as long as reading it;
with pages of 2 MiB the same loop reads up to twice as fast.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import re
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock

import torch
from torch import Tensor

from deltic.errors import ConfigError

_LARGE_PAGE = 2 << 20
_CHUNK = 64 << 20
_NO_RESERVE = 0x4000
"""MAP_NORESERVE of Linux."""
_MIN_SIZE = 64 << 10
"""Minimum size for large pages. Smaller tensors would waste them, and are not streamed."""
_ALIGNMENT = 64


def large_pages() -> bool:
    """Returns True if this system supports the advice to use large pages."""
    return sys.platform == "linux" and hasattr(mmap, "MADV_HUGEPAGE")


def empty_cache(devices: Iterable[torch.device]) -> None:
    """Releases GPU memory that torch caches but does not use. Synchronizes all given devices first, because torch
    unmaps pages of all devices but synchronizes only the current one."""
    for device in devices:
        torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


def reserve(shape: tuple[int, ...], dtype: torch.dtype, device: str | torch.device = "cpu") -> Tensor:
    """Returns an uninitialised tensor. Large tensors are in large pages, which take memory on first write."""
    size = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or size < 2 * _LARGE_PAGE or not large_pages():
        return torch.empty(shape, dtype=dtype, device=device)
    return _map(size)[:size].view(dtype).view(shape)


def is_shortage(error: BaseException) -> bool:
    """Returns True if the error reports that memory ran out. torch has no error class for that on a CPU; cuBLAS and the
    driver have error names."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and re.search("allocate memory|out of memory|OUT_OF_MEMORY|ALLOC_FAILED", str(error)) is not None)


@contextmanager
def memory_for(purpose: str, remedy: str, option: str | None = None) -> Iterator[None]:
    """Converts a memory shortage in its block into a ConfigError with purpose, size and remedy."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_shortage(error):
            raise
        asked = re.search(r"allocate (\d+) bytes", str(error))
        more = f" (the last {int(asked[1]) / (1 << 20):,.1f} MiB of it were refused)" if asked else ""
        raise ConfigError(f"there is no memory for {purpose}{more}: {remedy}, or let the process have more (ulimit -v, "
                          "the container's limit)", option) from error


class Arena:
    """Allocates consecutive byte tensors in chunks of large pages. A chunk is freed with the last tensor in it."""

    def __init__(self) -> None:
        self._chunk, self._used, self._lock = torch.empty(0, dtype=torch.uint8), 0, Lock()

    def take(self, size: int) -> Tensor:
        """Returns an uninitialised tensor uint8 [size], aligned to 64 bytes. Thread-safe."""
        if size < _MIN_SIZE or not large_pages():
            raw = torch.empty(size + _ALIGNMENT, dtype=torch.uint8)
            skip = -raw.data_ptr() % _ALIGNMENT
            return raw[skip:skip + size]
        if size >= _CHUNK // 2:
            return _map(size)[:size]
        with self._lock:
            if self._used + size > len(self._chunk):
                self._chunk, self._used = _map(_CHUNK), 0
            start = self._used
            self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
            return self._chunk[start:start + size]


def _map(size: int) -> Tensor:
    """Returns a uint8 tensor of at least `size` bytes, aligned to large pages. Pages take memory on first write."""
    whole = -(-size // _LARGE_PAGE) * _LARGE_PAGE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    try:
        memory = mmap.mmap(-1, whole + _LARGE_PAGE, flags=flags)
    except OSError as error:
        raise MemoryError(f"tried to allocate {whole + _LARGE_PAGE} bytes: {error.strerror}") from error
    start = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _LARGE_PAGE
    memory.madvise(mmap.MADV_HUGEPAGE, start, whole)
    return torch.frombuffer(memory, dtype=torch.uint8, count=whole, offset=start)


class Guard:
    """Delays the release of private GPU memory pools.

    torch ends the process (a failed assertion in a destructor) if such a pool is released while any thread allocates
    from a pool or records a graph. Objects die at unpredictable times, so their pools wait until no thread is `inside`.
    """

    def __init__(self) -> None:
        self._lock, self._inside = Lock(), 0
        self._released: list[torch.cuda.MemPool] = []

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Marks a block that allocates from a private pool or records a graph."""
        with self._lock:
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
            self._clear()

    def leave(self, pool: list[torch.cuda.MemPool]) -> None:
        """Releases the pool in this list, which must be its last reference, when no thread is `inside`. Never blocks,
        because garbage collection may call it in a thread that holds the lock."""
        self._released.append(pool.pop())
        self._clear()

    def _clear(self) -> None:
        while self._released and self._lock.acquire(blocking=False):  # the lock's owner checks again afterwards
            try:
                if self._inside:
                    return
                self._released.clear()
            finally:
                self._lock.release()


@cache
def guard() -> Guard:
    """Returns the guard of this process. There is one, because torch's memory also belongs to the process."""
    return Guard()


class Workspace:
    """A private memory pool for allocations within `use`. It is released some time after this object dies."""

    def __init__(self) -> None:
        self._guard, self._pool = guard(), [torch.cuda.MemPool()]
        weakref.finalize(self, self._guard.leave, self._pool).atexit = False

    @contextmanager
    def use(self, device: torch.device) -> Iterator[None]:
        with self._guard.inside(), torch.cuda.use_mem_pool(self._pool[0], device.index):
            yield
