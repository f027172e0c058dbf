"""Memory of the host that a GPU copies from and to by itself. Pinning holds up all else that is asked of the GPU for as
long as it takes (5 ms for 64 MiB), so that regions are small, pinned when there is something to put into them, and
then given to one tensor after another."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from deltic.ops.memory import is_shortage, reserve

_LINE = 4096
"""Bytes of which parts are multiples."""
_REGION = 64 << 20
"""Bytes of a region, but for larger tensors."""
_SAMPLE = 512 << 20
"""Bytes of the first region, which says how long others take."""
_PATIENCE = 3.0
"""Seconds for which regions are pinned where nobody waits yet."""

Pin = Callable[[Tensor], Callable[[], object] | None]


def pin(memory: Tensor) -> Callable[[], object] | None:
    """Pin memory that was written to; returns what lets go of it, None where that is refused."""
    runtime, address = torch.cuda.cudart(), memory.data_ptr()
    if int(runtime.cudaHostRegister(address, memory.nbytes, 1)):
        return None
    return lambda: runtime.cudaHostUnregister(address)


class PinnedMemory:
    """Up to so many bytes, pinned as they are asked for. For one thread, which waits for that."""

    def __init__(self, most: int, pin: Pin = pin) -> None:
        self._left, self._pin = most // _LINE * _LINE, pin
        self._regions = list[Tensor]()
        self._free, self._returned = list[tuple[int, int, int]](), deque[tuple[int, int, int]]()

    def tensor(self, like: Tensor) -> Tensor | None:
        """A tensor on the host of this shape and dtype; its memory is used again when the tensor is gone. None where
        there is no room."""
        size = -(-like.nbytes // _LINE) * _LINE
        while self._returned:
            self._give_back(*self._returned.popleft())
        found = self._part(size, like)
        return self._part(size, like) if found is None and self._grow(size) else found

    def prepare(self) -> None:
        """Pin most of it before anybody waits for the GPU."""
        if self._regions:
            return
        began, size = time.perf_counter(), min(self._left, _SAMPLE)
        if self._grow(size):
            rate = size / (time.perf_counter() - began)
            # in one piece, which the longest contexts need
            self._grow(min(self._left, int(_PATIENCE * rate) // _LINE * _LINE))

    def _part(self, size: int, like: Tensor) -> Tensor | None:
        for place, (region, start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[place:place + 1] = [(region, start + size, end)] * (end - start > size)
                found = self._regions[region][start:start + like.nbytes].view(like.dtype).view(like.shape)
                weakref.finalize(found, self._returned.append, (region, start, start + size)).atexit = False
                return found
        return None

    def _grow(self, wanted: int) -> bool:
        """Whether there is a region more, in which so many bytes have room."""
        size = min(self._left, max(_REGION, wanted))
        if not size or size < wanted:
            return False
        self._left -= size
        try:
            region = reserve((size,), torch.uint8).fill_(0)
            release = self._pin(region)
        except (MemoryError, RuntimeError) as error:
            if not is_shortage(error):
                raise
            release = None
        if release is None:
            self._left = 0  # it would be refused again
            return False
        weakref.finalize(self, release).atexit = False
        self._free.append((len(self._regions), 0, size))
        self._regions.append(region)
        return True

    def _give_back(self, region: int, start: int, end: int) -> None:
        for other in [other for other in self._free if other[0] == region and (start == other[2] or end == other[1])]:
            self._free.remove(other)
            start, end = min(start, other[1]), max(end, other[2])
        self._free = sorted([*self._free, (region, start, end)])
