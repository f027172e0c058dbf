"""Stores responses in memory, and on disk if there is a disk tier."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b
from typing import Any

from deltic.chat.history_store import AnswerStore, OwnedEntries
from deltic.config import Limits
from deltic.server.responses_schema import response_of

_MOST_WAITING = 64 << 20
"""Bytes that may wait for a slow disk. Beyond this, further responses are not written to disk."""

Record = dict[str, Any]
"""A `response`, the items of its `input`, and the `owner` of the API key."""


class ResponseStore:
    """Keeps the most recently used responses, separately for each owner; without API keys the owner is None. Beyond the
    limits, the owner with the most loses its oldest. Methods may read files: call them in threads.

    notes: keeps responses across restarts, within its own budget.
    """

    def __init__(self, limits: Limits, notes: AnswerStore | None) -> None:
        self._notes = notes
        self._kept: OwnedEntries[bytes] = OwnedEntries(limits.max_stored_mib << 20, limits.max_stored_responses)
        self.unwritten: dict[str, bytes] = {}  # waits to be written; b"": waits to be deleted
        self._waiting = self._deleted = 0
        self._lock = threading.Lock()
        self._writer = ThreadPoolExecutor(1, "responses")

    def put(self, id: str, data: bytes, owner: str | None = None) -> None:
        """Stores a record that is encoded as JSON."""
        self._keep(id, data, owner)
        self._write_later(id, data)

    def get(self, id: str, owner: str | None = None) -> Record | None:
        """Returns a record; None if it is gone, damaged, or belongs to another owner."""
        with self._lock:
            data, deleted = self._kept.get(owner, id), self._deleted
            data = self.unwritten.get(id) if data is None else data
        if data is None and self._notes is not None:
            data = self._notes.get(_key(id))
        record = _read(id, owner, data) if data else None
        if record and data:
            self._keep(id, data, owner, deleted)
        return record

    def delete(self, id: str, owner: str | None = None) -> bool:
        """Deletes a record; returns False if there is none."""
        if self.get(id, owner) is None:
            return False
        with self._lock:
            self._kept.pop(owner, id)
            self._deleted += 1
            if self._notes is not None:
                self.unwritten[id] = b""
        self._write_later(id, b"")
        return True

    def items(self, id: str | None, most: int, owner: str | None = None) -> list[Any] | None:
        """Returns the items of a conversation up to and including a response's output; None if a part is gone. most:
        number of items after which reading ends."""
        chain: list[Record] = []
        count = 0
        while id is not None and count <= most:
            record = self.get(id, owner)
            if record is None:
                return None
            chain.append(record)
            count += len(record["input"]) + len(record["response"]["output"])
            id = record["response"].get("previous_response_id")
        return [item for record in reversed(chain) for item in (*record["input"], *record["response"]["output"])]

    def finder(self, owner: str | None = None) -> Callable[[str], Any]:
        """Returns a function that finds stored items by their ids and reads each response once."""
        known: dict[str, dict[str, Any]] = {}

        def find(item: str) -> Any:
            response = response_of(item)
            if response is None:
                return None
            if response not in known:
                record = self.get(response, owner)
                items = (*record["input"], *record["response"]["output"]) if record else ()
                known[response] = {each["id"]: each for each in items}
            return known[response].get(item)
        return find

    def close(self) -> None:
        """Waits until all records are written."""
        self._writer.shutdown()

    def _keep(self, id: str, data: bytes, owner: str | None, deleted: int | None = None) -> None:
        """Caches a record unless a record was deleted since it was read. deleted: the deletion count at that time."""
        with self._lock:
            if deleted in (None, self._deleted):
                self._kept.put(owner, id, data, len(data))

    def _write_later(self, id: str, data: bytes) -> None:
        if self._notes is None:
            return
        with self._lock:
            if self._waiting + len(data) > _MOST_WAITING:
                return
            self._waiting += len(data)
            self.unwritten[id] = data
        with suppress(RuntimeError):  # the interpreter is shutting down
            self._writer.submit(self._write, id, data)

    def _write(self, id: str, data: bytes) -> None:
        assert self._notes is not None
        try:
            self._notes.put(_key(id), data)
        finally:
            with self._lock:
                self._waiting -= len(data)
                if self.unwritten.get(id) is data:
                    del self.unwritten[id]


def _key(id: str) -> str:
    return blake2b(b"response " + id.encode("utf-8", "replace"), digest_size=16).hexdigest()


def _read(id: str, owner: str | None, data: bytes) -> Record | None:
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        record = json.loads(data)
        sound = record["response"]["id"] == id and isinstance(record["response"]["output"], list)
        own = record.get("owner") == owner
        return record if sound and own and isinstance(record["input"], list) else None
    return None
