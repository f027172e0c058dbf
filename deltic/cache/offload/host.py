"""A tier in the host's memory: what does not fit beside the weights on a GPU, and comes back in milliseconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from deltic.cache.offload.types import StoredItem, TierStoreError


class HostStore:
    """A `TierStore` of plain tensors."""

    name = "host"
    ready, writable, trusted = True, True, True

    def __init__(self, budget: int) -> None:
        self.budget, self._items = budget, dict[tuple[str, str], dict[str, Tensor]]()

    def scan(self) -> Iterable[StoredItem]:
        """Nothing: memory begins empty."""
        return ()

    def others(self) -> Iterable[StoredItem]:
        """Nobody else writes here."""
        return ()

    def write(self, item: StoredItem, tensors: Mapping[str, Tensor]) -> int:
        """Keep the tensors themselves, which must not change any more."""
        self._items[item.kind, item.key] = dict(tensors)
        return item.size

    def read(self, item: StoredItem, most: int | None = None) -> dict[str, Tensor]:
        """The tensors that were written."""
        tensors = self._items.get((item.kind, item.key))
        if tensors is None:
            raise TierStoreError("it is not there")
        return dict(tensors)

    def delete(self, item: StoredItem) -> None:
        """Free the memory."""
        self._items.pop((item.kind, item.key), None)

    def touch(self, item: StoredItem) -> None:
        """Nothing: the order of use is the index's."""

    def abandon(self) -> None:
        """Nothing: it is always there."""

    def close(self) -> None:
        """Nothing is left to do."""
