"""Memory of a GPU that is one model's alone.

torch ends the process (an assertion that fails in a destructor) if such memory is given back while any thread takes
some from where it is kept apart, or records a graph. When an object goes, nobody can say, least of all where it is
collected as garbage: so its memory waits until nobody does.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock

import torch


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
