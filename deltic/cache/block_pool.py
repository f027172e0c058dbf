"""Reference counts of N equal units, such as K/V pages or state slots."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

_SORT_FACTOR = 64
"""Sorting all free units is faster than popping more than one in this many of them from the heap."""


class BlockPool:
    """Counts the owners of units 0 .. size - 1. Takes the lowest free unit first, so that units in use stay dense and
    often consecutive. Units that were never taken cost no time."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size
        self._owners = list[int]()  # numbers of owners of the units that were ever taken, which are the first ones
        self._free = list[int]()  # a heap of released units

    @property
    def free(self) -> int:
        """Number of units that can be taken now."""
        return len(self._free) + self.size - len(self._owners)

    @property
    def used(self) -> int:
        """Number of units that have owners."""
        return self.size - self.free

    def take(self, count: int = 1) -> list[int] | None:
        """Takes `count` units. Returns None, and changes nothing, if fewer are free."""
        if count > self.free:
            return None
        released, first = min(count, len(self._free)), len(self._owners)
        if released * _SORT_FACTOR < len(self._free) + _SORT_FACTOR:
            units = [heapq.heappop(self._free) for _ in range(released)]
        else:
            self._free.sort()  # a sorted list is a heap, too
            units, self._free = self._free[:released], self._free[released:]
        for unit in units:
            self._owners[unit] = 1
        new = count - released
        self._owners += [1] * new
        return [*units, *range(first, first + new)]

    def share(self, units: Iterable[int], more: int = 1) -> None:
        """Adds `more` owners to each unit."""
        owners = self._owners
        for unit in units:
            assert unit < len(owners) and owners[unit], f"{self.name} {unit} is shared but has no owner"
            owners[unit] += more

    def release(self, units: Iterable[int]) -> None:
        """Removes an owner from each unit; a unit without owners becomes free."""
        for unit in units:
            assert self.owned(unit), f"{self.name} {unit} is released but has no owner"
            self._owners[unit] -= 1
            if not self._owners[unit]:
                heapq.heappush(self._free, unit)

    def owned(self, unit: int) -> bool:
        return unit < len(self._owners) and self._owners[unit] > 0

    def alone(self, units: Iterable[int]) -> bool:
        """Returns True if each unit has exactly one owner."""
        return all(self.owned(unit) and self._owners[unit] == 1 for unit in units)

    def check(self, owned: Iterable[int]) -> None:
        """Asserts that `owned` (each unit once per owner) and the free units add up to the whole pool."""
        counts = [0] * len(self._owners)
        for unit in owned:
            assert unit < len(counts), f"{self.name} {unit} is owned, but was never taken"
            counts[unit] += 1
        assert len(counts) <= self.size
        wrong = [f"{unit}: {found} found, {known} known"
                 for unit, (found, known) in enumerate(zip(counts, self._owners, strict=True)) if found != known]
        assert not wrong, f"{self.name}: owners do not add up: {'; '.join(wrong[:8])}"
        unowned = [unit for unit, count in enumerate(counts) if not count]
        assert sorted(self._free) == unowned, f"{self.name}: free list is {sorted(self._free)}, unowned {unowned}"
