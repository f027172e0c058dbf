"""Who owns which of N equal units (K/V pages, state slots): pure accounting, no tensors."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

_MANY = 64
"""Units from which on it is quicker to put all in order than to take one after the other."""


class Ledger:
    """Units 0 .. size - 1 with reference counts. The lowest free unit is taken first, so that units in use stay
    dense and often consecutive."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size
        self._free = list(range(size))
        self._owners = [0] * size

    @property
    def free(self) -> int:
        """Units that can be taken now."""
        return len(self._free)

    def take(self, count: int = 1) -> list[int] | None:
        """Own `count` units, or none at all if there are not so many."""
        if count > len(self._free):
            return None
        if count < _MANY:
            units = [heapq.heappop(self._free) for _ in range(count)]
        else:
            self._free.sort()  # which is a heap, too
            units, self._free = self._free[:count], self._free[count:]
        for unit in units:
            self._owners[unit] = 1
        return units

    def share(self, units: Iterable[int]) -> None:
        """Add an owner to each unit."""
        for unit in units:
            assert self._owners[unit] > 0, f"{self.name} {unit} is shared but nobody owns it"
            self._owners[unit] += 1

    def release(self, units: Iterable[int]) -> None:
        """Remove an owner from each unit; units without owners are free."""
        for unit in units:
            assert self._owners[unit] > 0, f"{self.name} {unit} is released but nobody owns it"
            self._owners[unit] -= 1
            if not self._owners[unit]:
                heapq.heappush(self._free, unit)

    def owned(self, unit: int) -> bool:
        """Whether somebody has the unit."""
        return self._owners[unit] > 0

    def alone(self, units: Iterable[int]) -> bool:
        """Whether each unit has one owner."""
        return all(self._owners[unit] == 1 for unit in units)

    def check(self, owned: Iterable[int]) -> None:
        """Assert that `owned` (a unit once per owner) and the free units are all there is."""
        counts = [0] * self.size
        for unit in owned:
            counts[unit] += 1
        assert counts == self._owners, f"{self.name}: owners do not add up: {_differences(counts, self._owners)}"
        unowned = [unit for unit, count in enumerate(counts) if not count]
        assert sorted(self._free) == unowned, f"{self.name}: free list is {sorted(self._free)}, unowned {unowned}"


def _differences(found: list[int], booked: list[int]) -> str:
    wrong = [f"{unit}: {a} found, {b} booked" for unit, (a, b) in enumerate(zip(found, booked, strict=True)) if a != b]
    return "; ".join(wrong[:8])
