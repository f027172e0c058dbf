"""A bounded LRU store shared by owners: an owner that holds more than another cannot evict the other's entries."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Value = TypeVar("Value")
Owner = str | None


@dataclass(slots=True)
class _Own(Generic[Value]):
    """The entries of one owner with their weights, least recently used first, and the sum of the weights."""

    entries: OrderedDict[str | bytes, tuple[Value, int]] = field(default_factory=OrderedDict)
    weight: int = 0


class OwnedEntries(Generic[Value]):
    """Entries by owner and key, limited in weight and number.

    Beyond a limit, the owner that holds the most loses its least recently used entry. Not thread-safe.
    """

    def __init__(self, weight: int, count: int = sys.maxsize) -> None:
        self._most, self._most_entries = weight, count
        self._owners: dict[Owner, _Own[Value]] = {}
        self._weight = self._count = 0

    def get(self, owner: Owner, key: str | bytes) -> Value | None:
        """Returns an entry and marks it as used."""
        own = self._owners.get(owner)
        if own is None or key not in own.entries:
            return None
        own.entries.move_to_end(key)
        return own.entries[key][0]

    def put(self, owner: Owner, key: str | bytes, value: Value, weight: int = 1
            ) -> list[tuple[Owner, str | bytes, Value]]:
        """Sets an entry and returns the evicted ones, with owner and key."""
        self.pop(owner, key)
        own = self._owners.setdefault(owner, _Own())
        own.entries[key] = value, weight
        own.weight += weight
        self._weight += weight
        self._count += 1
        gone = []
        while self._weight > self._most:
            gone.append(self._drop(lambda own: own.weight))
        while self._count > self._most_entries:
            gone.append(self._drop(lambda own: len(own.entries)))
        return gone

    def pop(self, owner: Owner, key: str | bytes) -> Value | None:
        """Removes an entry."""
        own = self._owners.get(owner)
        if own is None or key not in own.entries:
            return None
        value, weight = own.entries.pop(key)
        own.weight -= weight
        self._weight -= weight
        self._count -= 1
        if not own.entries:
            del self._owners[owner]
        return value

    def _drop(self, held: Callable[[_Own[Value]], int]) -> tuple[Owner, str | bytes, Value]:
        owner = max(self._owners, key=lambda owner: held(self._owners[owner]))
        key = next(iter(self._owners[owner].entries))
        value = self._owners[owner].entries[key][0]
        self.pop(owner, key)
        return owner, key, value
