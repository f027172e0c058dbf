"""Memory: host memory in pages of 2 MiB, and GPU memory that belongs to one model."""

from __future__ import annotations

import ctypes
import math
import mmap
import re
import sys
import weakref
from collections.abc import Iterator
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
_WORTH = 64 << 10
"""Smaller tensors would fill large pages badly, and are not streamed."""
_ALIGNMENT = 64


def large_pages() -> bool:
    """Whether this system takes the advice."""
    return sys.platform == "linux" and hasattr(mmap, "MADV_HUGEPAGE")


def reserve(shape: tuple[int, ...], dtype: torch.dtype, device: str | torch.device = "cpu") -> Tensor:
    """A tensor whose memory comes into being where it is written to, in large pages if it is large; not initialised."""
    size = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or size < 2 * _LARGE_PAGE or not large_pages():
        return torch.empty(shape, dtype=dtype, device=device)
    return _map(size)[:size].view(dtype).view(shape)


def is_shortage(error: BaseException) -> bool:
    """Whether it says that memory ran out; torch has no class of its own for that on a CPU, and cuBLAS and the driver
    have names."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and re.search("allocate memory|out of memory|OUT_OF_MEMORY|ALLOC_FAILED", str(error)) is not None)


@contextmanager
def memory_for(purpose: str, remedy: str, option: str | None = None) -> Iterator[None]:
    """Where memory runs out in this block, ConfigError says for what, how much was asked for, and what to do."""
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
    """Tensors of bytes, one behind another in large pages. A chunk is given back when the last tensor in it dies."""

    def __init__(self) -> None:
        self._chunk, self._used, self._lock = torch.empty(0, dtype=torch.uint8), 0, Lock()

    def take(self, size: int) -> Tensor:
        """uint8 [size], aligned to 64 bytes; not initialised. Any thread may call it."""
        if size < _WORTH or not large_pages():
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
    """uint8 of at least `size` bytes, from a border of large pages on, that take memory only once they are written."""
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
    """Who takes memory that is kept apart, or records, and what is given back when nobody does."""

    def __init__(self) -> None:
        self._lock, self._inside = Lock(), 0
        self._left: list[torch.cuda.MemPool] = []

    @contextmanager
    def inside(self) -> Iterator[None]:
        """For as long as memory is taken or recorded."""
        with self._lock:
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
            self._clear()

    def leave(self, pool: list[torch.cuda.MemPool]) -> None:
        """Give back the pool in this list, which nothing else holds, once nobody is inside. It never waits: garbage is
        collected anywhere, also where this thread has the lock."""
        self._left.append(pool.pop())
        self._clear()

    def _clear(self) -> None:
        while self._left and self._lock.acquire(blocking=False):  # who has it looks behind that
            try:
                if self._inside:
                    return
                self._left.clear()
            finally:
                self._lock.release()


@cache
def guard() -> Guard:
    """The process's, as torch's memory is."""
    return Guard()


class Workspace:
    """Memory that is taken inside of `use` is kept for it, and given back some time after this object has gone."""

    def __init__(self) -> None:
        self._guard, self._pool = guard(), [torch.cuda.MemPool()]
        weakref.finalize(self, self._guard.leave, self._pool).atexit = False

    @contextmanager
    def use(self, device: torch.device) -> Iterator[None]:
        with self._guard.inside(), torch.cuda.use_mem_pool(self._pool[0], device.index):
            yield
