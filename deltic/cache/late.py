"""What a directory keeps for a model before it is known which model that is: writing waits, and nothing is found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from threading import Lock

from torch import Tensor

from deltic.cache.disk import Disk, DiskNotes
from deltic.cache.medium import Item

Opening = Future[tuple[Disk, DiskNotes]]
_WAITING = 8 << 20
"""Bytes of notes that may wait."""


class LateDisk:
    """A `Medium` that is not there yet. What is called in threads of its own waits for it, and raises what opening it
    raises."""

    name = "disk"
    writable = True

    def __init__(self, opening: Opening, budget: int, abandon: Callable[[], None]) -> None:
        """abandon: ends the opening."""
        self.budget, self._opening, self.abandon = budget, opening, abandon

    def scan(self) -> Iterable[Item]:
        disk = self._opening.result()[0]
        self.writable = disk.writable
        return disk.scan()

    def others(self) -> Iterable[Item]:
        return self._opening.result()[0].others()

    def write(self, item: Item, tensors: Mapping[str, Tensor]) -> int:
        return self._opening.result()[0].write(item, tensors)

    def read(self, item: Item, most: int | None = None) -> dict[str, Tensor]:
        return self._opening.result()[0].read(item, most)

    def delete(self, item: Item) -> None:
        """Before it is there, nothing of it can have been found or written."""
        if self._is_there():
            self._opening.result()[0].delete(item)

    def touch(self, item: Item) -> None:
        if self._is_there():
            self._opening.result()[0].touch(item)

    def _is_there(self) -> bool:
        return self._opening.done() and self._opening.exception() is None


class LateNotes:
    """`DiskNotes` that are not there yet: until then notes wait in memory, the last ones."""

    def __init__(self, opening: Opening) -> None:
        self._opening, self._waiting, self._lock = opening, dict[str, bytes](), Lock()
        opening.add_done_callback(self._flush)

    def get(self, key: str) -> bytes | None:
        """What was put there last; None if nothing, or if it is damaged."""
        with self._lock:
            waiting = self._waiting.get(key)
        notes = self._notes()
        return notes.get(key) if notes and waiting is None else waiting

    def put(self, key: str, data: bytes) -> None:
        """Keep a value."""
        with self._lock:
            self._waiting.pop(key, None)
            if not self._opening.done():
                self._waiting[key] = data
                while sum(map(len, self._waiting.values())) > _WAITING:
                    del self._waiting[next(iter(self._waiting))]
                return
        if notes := self._notes():
            notes.put(key, data)

    def _notes(self) -> DiskNotes | None:
        """Those on disk, if they are there and can be used."""
        with suppress(Exception):
            return self._opening.result(0)[1]
        return None

    def _flush(self, _: Opening) -> None:
        notes = self._notes()
        with self._lock:
            for key, data in self._waiting.items() if notes else ():
                assert notes
                notes.put(key, data)
            self._waiting.clear()
