"""A tier in the host's memory: what does not fit beside the weights on a GPU, and comes back in milliseconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

import torch
from torch import Tensor

from deltic.cache.pinned import PinnedMemory
from deltic.cache.tier_store import Item, TierStoreError

_PIECE = 8 << 20
"""Bytes that are copied at a time to memory that is not pinned."""


class Host:
    """A `TierStore` of plain tensors. What comes from a GPU is copied beside what that computes, and is kept in pinned
    memory as long as there is room, from which it comes back in the same way."""

    name = "host"
    writable, trusted = True, True

    def __init__(self, budget: int, pinned: PinnedMemory | None = None) -> None:
        self.budget, self._pinned = budget, pinned
        self._items: dict[tuple[str, str], dict[str, Tensor]] = {}

    def scan(self) -> Iterable[Item]:
        """Nothing: memory begins empty."""
        return ()

    def others(self) -> Iterable[Item]:
        """Nobody else writes here."""
        return ()

    def write(self, item: Item, tensors: Mapping[str, Tensor]) -> int:
        """Keep the tensors themselves, which must not change any more, or copies of those on a GPU."""
        self._items[item.kind, item.key] = {name: self._on_host(tensor) for name, tensor in tensors.items()}
        return item.size

    def read(self, item: Item, most: int | None = None) -> dict[str, Tensor]:
        """The tensors that were written."""
        tensors = self._items.get((item.kind, item.key))
        if tensors is None:
            raise TierStoreError("it is not there")
        return dict(tensors)

    def delete(self, item: Item) -> None:
        """Free the memory."""
        self._items.pop((item.kind, item.key), None)

    def touch(self, item: Item) -> None:
        """Nothing: the order of use is the index's."""

    def abandon(self) -> None:
        """Nothing: it is always there."""

    def _on_host(self, tensor: Tensor) -> Tensor:
        """Itself, or, of one on a GPU, a copy; waits for what the GPU was to do before."""
        if not tensor.is_cuda:
            return tensor
        stream = _copying(tensor.device)
        stream.wait_stream(torch.cuda.default_stream(tensor.device))
        kept = self._pinned.tensor(tensor) if self._pinned else None
        with torch.cuda.stream(stream):
            if kept is None:
                return _by_pieces(tensor, _staging(tensor.device), stream)
            kept.copy_(tensor, non_blocking=True)
        stream.synchronize()
        return kept


def _by_pieces(tensor: Tensor, staging: Tensor, stream: torch.cuda.Stream) -> Tensor:
    """A copy in memory that is not pinned. The GPU's engines would have all else that it does wait while that memory is
    made; so they copy a piece, which is copied on by the processor."""
    kept = torch.empty(tensor.shape, dtype=tensor.dtype)
    source, target = (x.contiguous().view(-1).view(torch.uint8) for x in (tensor, kept))
    for piece, into in zip(source.split(len(staging)), target.split(len(staging)), strict=True):
        staging[:len(piece)].copy_(piece, non_blocking=True)
        stream.synchronize()
        into.copy_(staging[:len(piece)])
    return kept


@cache
def _staging(device: torch.device) -> Tensor:
    return torch.empty(_PIECE, dtype=torch.uint8, pin_memory=True)


@cache
def _copying(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
