"""What a directory keeps for a model before it is known which model that is: writing waits, and nothing is found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import suppress

from torch import Tensor

from deltic.cache.offload.disk import DiskRecords, DiskStore
from deltic.cache.offload.types import StoredItem

Opening = Future[tuple[DiskStore, DiskRecords]]

class DeferredDisk:
    """A `TierStore` that is not there yet. What is called in threads of its own waits for it, and raises what opening
    it raises."""

    name, trusted = "disk", False
    writable = True

    def __init__(self, opening: Opening, budget: int, abandon: Callable[[], None]) -> None:
        """abandon: ends the opening."""
        self.budget, self._opening, self.abandon = budget, opening, abandon

    def scan(self) -> Iterable[StoredItem]:
        disk = self._opening.result()[0]
        self.writable = disk.writable
        return disk.scan()

    def others(self) -> Iterable[StoredItem]:
        return self._opening.result()[0].others()

    def write(self, item: StoredItem, tensors: Mapping[str, Tensor]) -> int:
        return self._opening.result()[0].write(item, tensors)

    def read(self, item: StoredItem, most: int | None = None) -> dict[str, Tensor]:
        return self._opening.result()[0].read(item, most)

    def delete(self, item: StoredItem) -> None:
        """Before it is there, nothing of it can have been found or written."""
        if self._is_there():
            self._opening.result()[0].delete(item)

    def touch(self, item: StoredItem) -> None:
        if self._is_there():
            self._opening.result()[0].touch(item)

    def _is_there(self) -> bool:
        return self._opening.done() and self._opening.exception() is None


class DeferredRecords:
    """`DiskRecords` that are not there yet. Writing waits for them, in a thread of its own."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening

    @property
    def ready(self) -> bool:
        """Whether those on disk are there, or never will be."""
        return self._opening.done()

    def get(self, key: str) -> bytes | None:
        """What was put there last; None if nothing, or if it is damaged."""
        notes = self._notes()
        return notes.get(key) if notes else None

    def put(self, key: str, data: bytes) -> None:
        """Keep a value."""
        if notes := self._notes():
            notes.put(key, data)

    def claim(self, key: str) -> bool:
        """Take a key that nothing was put under yet; False if somebody has it, of all processes, or nobody can."""
        notes = self._notes()
        return notes is not None and notes.claim(key)

    def _notes(self) -> DiskRecords | None:
        """Those on disk, when they are there; None if they cannot be used."""
        with suppress(CancelledError, Exception):
            return self._opening.result()[1]
        return None
