"""A tier in the host's memory: what does not fit beside the weights on a GPU, and comes back in milliseconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

import torch
from torch import Tensor

from deltic.cache.pinned import PinnedMemory
from deltic.cache.tier_store import Item, TierStoreError


class Host:
    """A `TierStore` of plain tensors. What comes from a GPU is kept in pinned memory, as long as there is room, from
    and to which its own engines copy beside what it computes."""

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
        kept = self._pinned.tensor(tensor) if self._pinned else None
        if kept is None:
            return tensor.cpu()
        stream = _copying(tensor.device)
        stream.wait_stream(torch.cuda.default_stream(tensor.device))
        with torch.cuda.stream(stream):
            kept.copy_(tensor, non_blocking=True)
        stream.synchronize()
        return kept


@cache
def _copying(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
