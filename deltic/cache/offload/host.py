"""A tier in the host's memory, and the copies that a GPU makes there.

A GPU copies quickly only from and to pinned memory. Pinning stops all other work of the GPU while it lasts (5 ms for
64 MiB). Therefore memory is pinned in regions, on demand, and reused by one tensor after another.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from functools import cache, partial
from threading import get_ident

import torch
from torch import Tensor

from deltic.cache.offload.types import StoredItem, TierStore, TierStoreError
from deltic.ops.memory import is_shortage, reserve

_STAGING_BYTES = 8 << 20
_ALIGNMENT = 4096
_REGION_BYTES = 64 << 20
_FIRST_REGION_BYTES = 512 << 20
"""Size of the first region, which measures how fast pinning is."""
_PREPARE_SECONDS = 3.0
"""Time to spend on pinning a second region before the first request."""

Pin = Callable[[Tensor], Callable[[], object] | None]


class HostStore(TierStore):
    """Keeps items as tensors in the memory of this process."""

    name, trusted = "host", True

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._items = dict[tuple[str, str], dict[str, Tensor]]()

    def write(self, item: StoredItem, tensors: Mapping[str, Tensor]) -> int:
        self._items[item.kind, item.key] = dict(tensors)
        return item.size

    def read(self, item: StoredItem, most: int | None = None) -> dict[str, Tensor]:
        tensors = self._items.get((item.kind, item.key))
        if tensors is None:
            raise TierStoreError("it is not there")
        return dict(tensors)

    def delete(self, item: StoredItem) -> None:
        self._items.pop((item.kind, item.key), None)


class DeviceToHostCopy:
    """Copies tensors from a GPU to the host while the GPU does other work. Uses pinned memory if there is room."""

    def __init__(self, pinned: PinnedMemory | None = None) -> None:
        self._pinned = pinned

    def prepare(self) -> None:
        """Pins memory in advance, because pinning would delay requests."""
        if self._pinned:
            self._pinned.prepare()

    def __call__(self, tensors: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
        """Returns a function that waits for the tensors and returns copies on the host; another thread may call it. The
        kernels that compute the tensors must have been launched."""
        device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
        made = None if device is None else torch.cuda.current_stream(device).record_event()
        return partial(_on_host, tensors, made, self._pinned)


def _on_host(tensors: Mapping[str, Tensor], made: torch.cuda.Event | None,
             pinned: PinnedMemory | None) -> dict[str, Tensor]:
    return {name: _copy(tensor, made, pinned) if tensor.is_cuda and made else tensor
            for name, tensor in tensors.items()}


def _copy(tensor: Tensor, made: torch.cuda.Event, pinned: PinnedMemory | None) -> Tensor:
    target = pinned.tensor(tensor) if pinned else None
    stream = _copy_stream(tensor.device)
    stream.wait_event(made)
    with torch.cuda.stream(stream):
        if target is None:
            return _copy_in_pieces(tensor, stream)
        target.copy_(tensor, non_blocking=True)
    stream.synchronize()
    return target


def _copy_in_pieces(tensor: Tensor, stream: torch.cuda.Stream) -> Tensor:
    """Copies to unpinned memory through a pinned buffer, because a direct copy would stop the GPU's other work."""
    target = torch.empty(tensor.shape, dtype=tensor.dtype)
    staging = _staging(get_ident())
    source_bytes, target_bytes = (x.contiguous().view(-1).view(torch.uint8) for x in (tensor, target))
    for piece, into in zip(source_bytes.split(len(staging)), target_bytes.split(len(staging)), strict=True):
        staging[:len(piece)].copy_(piece, non_blocking=True)
        stream.synchronize()
        into.copy_(staging[:len(piece)])
    return target


@cache
def _staging(thread: int) -> Tensor:
    return torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=True)


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def pin(memory: Tensor) -> Callable[[], object] | None:
    """Pins memory whose pages were touched. Returns a function that unpins it, or None if pinning is refused."""
    runtime, address = torch.cuda.cudart(), memory.data_ptr()
    if int(runtime.cudaHostRegister(address, memory.nbytes, 1)):
        return None
    return lambda: runtime.cudaHostUnregister(address)


class PinnedMemory:
    """Allocates tensors in at most `most` bytes of pinned memory. For one thread."""

    def __init__(self, most: int, pin: Pin = pin) -> None:
        self._left, self._pin = most // _ALIGNMENT * _ALIGNMENT, pin
        self._regions = list[Tensor]()
        self._free = list[tuple[int, int, int]]()  # region, start, end
        self._returned = deque[tuple[int, int, int]]()

    def tensor(self, like: Tensor) -> Tensor | None:
        """Returns a host tensor with the shape and dtype of `like`, or None if there is no room. Its memory is reused
        after the tensor is deleted."""
        size = -(-like.nbytes // _ALIGNMENT) * _ALIGNMENT
        while self._returned:
            self._merge(*self._returned.popleft())
        found = self._part(size, like)
        return self._part(size, like) if found is None and self._grow(size) else found

    def prepare(self) -> None:
        """Pins as much memory as takes a few seconds, unless a region exists already."""
        if self._regions:
            return
        began = time.perf_counter()
        size = min(self._left, _FIRST_REGION_BYTES)
        if self._grow(size):
            rate = size / (time.perf_counter() - began)
            more = int(_PREPARE_SECONDS * rate) // _ALIGNMENT * _ALIGNMENT
            self._grow(min(self._left, more))  # in one piece, for the longest contexts

    def _part(self, size: int, like: Tensor) -> Tensor | None:
        for place, (region, start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[place:place + 1] = [(region, start + size, end)] * (end - start > size)
                found = self._regions[region][start:start + like.nbytes].view(like.dtype).view(like.shape)
                weakref.finalize(found, self._returned.append, (region, start, start + size)).atexit = False
                return found
        return None

    def _grow(self, wanted: int) -> bool:
        """Pins another region. Returns True if `wanted` bytes fit into it."""
        size = min(self._left, max(_REGION_BYTES, wanted))
        if not size or size < wanted:
            return False
        self._left -= size
        try:
            region = reserve((size,), torch.uint8).fill_(0)
            unpin = self._pin(region)
        except (MemoryError, RuntimeError) as error:
            if not is_shortage(error):
                raise
            unpin = None
        if unpin is None:
            self._left = 0  # it would be refused again
            return False
        weakref.finalize(self, unpin).atexit = False
        self._free.append((len(self._regions), 0, size))
        self._regions.append(region)
        return True

    def _merge(self, region: int, start: int, end: int) -> None:
        """Marks a part of a region as free and merges it with free neighbours."""
        for other in [other for other in self._free if other[0] == region and (start == other[2] or end == other[1])]:
            self._free.remove(other)
            start, end = min(start, other[1]), max(end, other[2])
        self._free = sorted([*self._free, (region, start, end)])
