"""Host memory in pages of 2 MiB, and GPU memory that belongs to one model.

Weights and states are streamed from end to end, and translating the address of each 4 KiB page takes as long as reading
it: with pages of 2 MiB the same loop reads up to twice as fast.
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
"""Linux's MAP_NORESERVE."""
_MIN_SIZE = 64 << 10
"""Smaller tensors would waste large pages, and are not streamed."""
_ALIGNMENT = 64


def large_pages() -> bool:
    """True if this system supports the advice to use large pages."""
    return sys.platform == "linux" and hasattr(mmap, "MADV_HUGEPAGE")


def empty_cache(devices: Iterable[torch.device]) -> None:
    """Gives back GPU memory that torch keeps but does not use. Waits for these devices: torch unmaps pages of all
    devices, and waits for the current one alone."""
    for device in devices:
        torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


def reserve(shape: tuple[int, ...], dtype: torch.dtype, device: str | torch.device = "cpu") -> Tensor:
    """Returns an uninitialised tensor; large ones take memory only where they are written to, in large pages."""
    size = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or size < 2 * _LARGE_PAGE or not large_pages():
        return torch.empty(shape, dtype=dtype, device=device)
    return _map(size)[:size].view(dtype).view(shape)


def is_shortage(error: BaseException) -> bool:
    """True if the error reports that memory ran out. torch has no class for that on a CPU; cuBLAS and the driver have
    names."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and re.search("allocate memory|out of memory|OUT_OF_MEMORY|ALLOC_FAILED", str(error)) is not None)


@contextmanager
def memory_for(purpose: str, remedy: str, option: str | None = None) -> Iterator[None]:
    """Turns a memory shortage in this block into a ConfigError with purpose, size and remedy."""
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
    """Byte tensors, one behind another in large pages. A chunk is freed when the last tensor in it dies."""

    def __init__(self) -> None:
        self._chunk, self._used, self._lock = torch.empty(0, dtype=torch.uint8), 0, Lock()

    def take(self, size: int) -> Tensor:
        """Returns uint8 [size], aligned to 64 bytes, not initialised. Thread-safe."""
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
    """Returns uint8 of at least `size` bytes, aligned to large pages, that take memory only once they are written."""
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
    from one or records a graph. When an object dies is unpredictable, so its pool waits until no thread is inside.
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
        """Releases the pool in this list, which must be the last reference, once no thread is inside. Never waits:
        garbage collection may call it in a thread that has the lock."""
        self._released.append(pool.pop())
        self._clear()

    def _clear(self) -> None:
        while self._released and self._lock.acquire(blocking=False):  # the owner checks again afterwards
            try:
                if self._inside:
                    return
                self._released.clear()
            finally:
                self._lock.release()


@cache
def guard() -> Guard:
    """The process's guard; torch's memory is the process's too."""
    return Guard()


class Workspace:
    """Allocations inside of `use` come from a pool of its own, which is released some time after this object died."""

    def __init__(self) -> None:
        self._guard, self._pool = guard(), [torch.cuda.MemPool()]
        weakref.finalize(self, self._guard.leave, self._pool).atexit = False

    @contextmanager
    def use(self, device: torch.device) -> Iterator[None]:
        with self._guard.inside(), torch.cuda.use_mem_pool(self._pool[0], device.index):
            yield
