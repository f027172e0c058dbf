"""Memory of the host that a GPU copies from and to by itself. Pinning takes long and holds up all else that is asked of
the GPU, so that large regions are pinned at a time, beside other work, and then given to tensors."""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Callable
from threading import Thread

import torch
from torch import Tensor

from deltic.ops.memory import is_shortage

_LINE = 4096
"""Bytes of which parts are multiples."""
_FIRST = 64 << 20
"""Bytes of the first region. Each further one is at least as large as all before."""
_AHEAD = 4
"""A region has room for so many tensors like the one for which it is made."""

Pin = Callable[[Tensor], Callable[[], object] | None]


def pin(memory: Tensor) -> Callable[[], object] | None:
    """Pin memory that was written to; returns what lets go of it, None where that is refused."""
    runtime, address = torch.cuda.cudart(), memory.data_ptr()
    if int(runtime.cudaHostRegister(address, memory.nbytes, 1)):
        return None
    return lambda: runtime.cudaHostUnregister(address)


class PinnedMemory:
    """Up to so many bytes, pinned as they are asked for. For one thread."""

    def __init__(self, most: int, pin: Pin = pin) -> None:
        self._left, self._size, self._pin = most // _LINE * _LINE, 0, pin
        self._regions, self._made = list[Tensor](), deque[Tensor]()
        self._free, self._returned = list[tuple[int, int, int]](), deque[tuple[int, int, int]]()
        self._growing: Thread | None = None

    def tensor(self, like: Tensor) -> Tensor | None:
        """A tensor on the host of this shape and dtype; its memory is used again when the tensor is gone. None where
        there is no room; then some more is made in a thread of its own, if there may be."""
        size = -(-like.nbytes // _LINE) * _LINE
        while self._returned:
            self._give_back(*self._returned.popleft())
        while self._made:
            made = self._made.popleft()
            self._free.append((len(self._regions), 0, made.nbytes))
            self._regions.append(made)
        for place, (region, start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[place:place + 1] = [(region, start + size, end)] * (end - start > size)
                found = self._regions[region][start:start + like.nbytes].view(like.dtype).view(like.shape)
                weakref.finalize(found, self._returned.append, (region, start, start + size)).atexit = False
                return found
        self._grow(size)
        return None

    def wait(self) -> None:
        """Until what is being made is there."""
        if self._growing:
            self._growing.join()

    def _grow(self, wanted: int) -> None:
        size = min(self._left, max(_FIRST, self._size, _AHEAD * wanted))
        if size < wanted or (self._growing and self._growing.is_alive()):
            return
        self._left, self._size = self._left - size, self._size + size
        self._growing = Thread(target=self._make, args=(size,), name="deltic-pin", daemon=True)
        self._growing.start()

    def _make(self, size: int) -> None:
        try:
            room = mmap.mmap(-1, size)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                room.madvise(mmap.MADV_HUGEPAGE)
            region = torch.frombuffer(room, dtype=torch.uint8).fill_(0)
            release = self._pin(region)
        except (OSError, ValueError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not is_shortage(error):
                raise
            return  # then there is none
        if release:
            weakref.finalize(self, release).atexit = False
            self._made.append(region)

    def _give_back(self, region: int, start: int, end: int) -> None:
        for other in [other for other in self._free if other[0] == region and (start == other[2] or end == other[1])]:
            self._free.remove(other)
            start, end = min(start, other[1]), max(end, other[2])
        self._free = sorted([*self._free, (region, start, end)])
