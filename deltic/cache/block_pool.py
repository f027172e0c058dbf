"""Who owns which of N equal units (K/V pages, state slots): pure accounting, no tensors."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

_MANY = 64
"""One in so many of those that are free, from which on it is quicker to put all in order than to take one after the
other."""


class BlockPool:
    """Units 0 .. size - 1 with reference counts. The lowest free unit is taken first, so that units in use stay
    dense and often consecutive. Nothing takes longer because there are many that were never taken."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size
        self._owners = list[int]()
        """Of those that were taken once, which are the first ones."""
        self._free = list[int]()
        """Of those the free ones: a heap."""

    @property
    def free(self) -> int:
        """Units that can be taken now."""
        return len(self._free) + self.size - len(self._owners)

    def take(self, count: int = 1) -> list[int] | None:
        """Own `count` units, or none at all if there are not so many."""
        if count > self.free:
            return None
        known, first = min(count, len(self._free)), len(self._owners)
        if known * _MANY < len(self._free) + _MANY:
            units = [heapq.heappop(self._free) for _ in range(known)]
        else:
            self._free.sort()  # which is a heap, too
            units, self._free = self._free[:known], self._free[known:]
        for unit in units:
            self._owners[unit] = 1
        self._owners += [1] * (count - known)
        return [*units, *range(first, first + count - known)]

    def share(self, units: Iterable[int]) -> None:
        """Add an owner to each unit."""
        for unit in units:
            assert self.owned(unit), f"{self.name} {unit} is shared but nobody owns it"
            self._owners[unit] += 1

    def release(self, units: Iterable[int]) -> None:
        """Remove an owner from each unit; units without owners are free."""
        for unit in units:
            assert self.owned(unit), f"{self.name} {unit} is released but nobody owns it"
            self._owners[unit] -= 1
            if not self._owners[unit]:
                heapq.heappush(self._free, unit)

    def owned(self, unit: int) -> bool:
        """Whether somebody has the unit."""
        return unit < len(self._owners) and self._owners[unit] > 0

    def alone(self, units: Iterable[int]) -> bool:
        """Whether each unit has one owner."""
        return all(self.owned(unit) and self._owners[unit] == 1 for unit in units)

    def check(self, owned: Iterable[int]) -> None:
        """Assert that `owned` (a unit once per owner) and the free units are all there is."""
        counts = [0] * len(self._owners)
        for unit in owned:
            assert unit < len(counts), f"{self.name} {unit} is owned, but was never taken"
            counts[unit] += 1
        assert len(counts) <= self.size
        assert counts == self._owners, f"{self.name}: owners do not add up: {_differences(counts, self._owners)}"
        unowned = [unit for unit, count in enumerate(counts) if not count]
        assert sorted(self._free) == unowned, f"{self.name}: free list is {sorted(self._free)}, unowned {unowned}"


def _differences(found: list[int], booked: list[int]) -> str:
    wrong = [f"{unit}: {a} found, {b} booked" for unit, (a, b) in enumerate(zip(found, booked, strict=True)) if a != b]
    return "; ".join(wrong[:8])
