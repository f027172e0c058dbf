"""From a GPU to the host's memory, beside all that the GPU computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from threading import get_ident

import torch
from torch import Tensor

from deltic.cache.offload.pinned_memory import PinnedMemory

_PIECE = 8 << 20
"""Bytes that are copied at a time to memory that is not pinned."""


class DeviceToHostCopy:
    """What takes tensors to the host. Those of a GPU are copied to pinned memory as long as there is room, from which
    they come back as fast."""

    def __init__(self, pinned: PinnedMemory | None = None) -> None:
        self._pinned = pinned

    def prepare(self) -> None:
        """Do before what would hold up the GPU later."""
        if self._pinned:
            self._pinned.prepare()

    def __call__(self, tensors: Mapping[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
        """To be called when the GPU has just been told to make them. Returns what gives them on the host, for another
        thread, which waits there."""
        device = next((tensor.device for tensor in tensors.values() if tensor.is_cuda), None)
        made = None if device is None else torch.cuda.current_stream(device).record_event()
        return partial(_on_host, tensors, made, self._pinned)


def _on_host(tensors: Mapping[str, Tensor], made: torch.cuda.Event | None,
             pinned: PinnedMemory | None) -> dict[str, Tensor]:
    return {name: _copy(tensor, made, pinned) if tensor.is_cuda and made else tensor
            for name, tensor in tensors.items()}


def _copy(tensor: Tensor, made: torch.cuda.Event, pinned: PinnedMemory | None) -> Tensor:
    kept, stream = pinned.tensor(tensor) if pinned else None, _beside(tensor.device)
    stream.wait_event(made)
    with torch.cuda.stream(stream):
        if kept is None:
            return _by_pieces(tensor, stream)
        kept.copy_(tensor, non_blocking=True)
    stream.synchronize()
    return kept


def _by_pieces(tensor: Tensor, stream: torch.cuda.Stream) -> Tensor:
    """A copy in memory that is not pinned. All that a GPU does waits while its own engines copy there; so they copy
    pieces to pinned memory, and the processor from there."""
    kept, staging = torch.empty(tensor.shape, dtype=tensor.dtype), _staging(get_ident())
    source, target = (x.contiguous().view(-1).view(torch.uint8) for x in (tensor, kept))
    for piece, into in zip(source.split(len(staging)), target.split(len(staging)), strict=True):
        staging[:len(piece)].copy_(piece, non_blocking=True)
        stream.synchronize()
        into.copy_(staging[:len(piece)])
    return kept


@cache
def _staging(thread: int) -> Tensor:
    return torch.empty(_PIECE, dtype=torch.uint8, pin_memory=True)


@cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
