"""Records of finished answers, in memory and in an optional store that outlives the process.

Two conversations may look alike and differ in their hidden reasoning, so one key may have several records. A record
never replaces another one: a lookup finds all records of a key or none, also if several processes share the store.
"""

from __future__ import annotations

import json
import struct
import sys
import threading
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import Any, Generic, Protocol, TypeVar

Value = TypeVar("Value")
Owner = str | None


@dataclass(slots=True)
class _Own(Generic[Value]):
    """The entries of one owner with their weights, least recently used first, and the sum of the weights."""

    entries: OrderedDict[str | bytes, tuple[Value, int]] = field(default_factory=OrderedDict)
    weight: int = 0


class OwnedEntries(Generic[Value]):
    """Entries by owner and key, limited in weight and number.

    Beyond a limit, the owner with the most loses its least recently used entry. Not thread-safe.
    """

    def __init__(self, weight: int, count: int = sys.maxsize) -> None:
        self._most, self._most_entries = weight, count
        self._owners: dict[Owner, _Own[Value]] = {}
        self._weight = self._count = 0

    def get(self, owner: Owner, key: str | bytes) -> Value | None:
        """Returns an entry, or None, and marks it as used."""
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


MAX_RECORD_IDS = 4_000_000
"""Limit on the token ids in memory."""
MAX_ALTERNATIVES = 4
"""Limit on the records of one key. Beyond it the oldest is dropped, and the key stays ambiguous."""

_MAGIC = b"deltic-note-2\n"
_HEADER = struct.Struct("<I")
_DIGEST_BYTES = 16
_RECORD_OVERHEAD = 256  # weight of a record in addition to its ids, in ids
_MAX_CHAIN = 100_000  # a longer chain of parents is a cycle
_MAX_EVICTED = 100_000  # keys known to have had records, so that a later record is not taken for the only one
_MAX_QUEUED_BYTES = 64 << 20  # records beyond this queue size are not written


class AnswerStore(Protocol):
    """Stores records outside the process. Keys are hexadecimal; no method raises."""

    @property
    def ready(self) -> bool:
        """False while the store is being opened; other methods block until then."""

    def get(self, key: str) -> bytes | None: ...

    def put(self, key: str, data: bytes) -> None: ...

    def claim(self, key: str) -> bool:
        """Reserves an unused key. Returns False if this or another process has reserved it."""


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    """One finished answer.

    ids: int32 ids of prompt and answer, without the token that ended it. They follow the first `kept` ids of the record
        named `parent`. Empty if the answer cannot be continued.
    digest: digest of all ids together; "" stands for any number of lost records.
    system_prefix_len: number of ids shared by conversations with the same system message and tools.
    calls: name and arguments of each call, as a JSON object with the values as the model wrote them.
    thoughts: `reasoning_hash` of each answer of the conversation, this one last; "" for an answer without reasoning.
    ambiguous: the key has or had other records.
    """

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    ids: array[int]
    digest: str
    parent: str = ""
    kept: int = 0
    system_prefix_len: int = 0
    thoughts: tuple[str, ...] = ()
    ambiguous: bool = False

    def matches(self, thoughts: Sequence[str | None]) -> bool:
        """Returns True if the record may belong to a conversation with these thoughts; None means unknown."""
        own = (*self.thoughts, *[""] * len(thoughts))
        return not self.digest or all(given in (None, thought) for given, thought in zip(thoughts, own))


_LOST_RECORD = AnswerRecord("", "", (), array("i"), "")


def record_name(key: str, record: AnswerRecord) -> str:
    return key + record.digest


def reasoning_hash(reasoning: str) -> str:
    """Returns a hash of an answer's reasoning; "" if there is none."""
    return blake2b(reasoning.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest() if reasoning else ""


class AnswerLog:
    """Records by owner and key. Beyond `limit` token ids, the owner with the most ids loses its least recently used.

    Thread-safe. A separate thread writes to the store. Stored ids must be below vocab_size.
    """

    def __init__(self, store: AnswerStore | None, vocab_size: int, limit: int = MAX_RECORD_IDS) -> None:
        self._store, self._vocab_size = store, vocab_size
        self._records: OwnedEntries[dict[str, AnswerRecord]] = OwnedEntries(limit)
        self._evicted: OwnedEntries[str] = OwnedEntries(_MAX_EVICTED)  # a digest, or "" if there were several
        self._queued_bytes = Counter[str]()
        self._lock = threading.Lock()
        self._writing_key: str | None = None
        self._writer = ThreadPoolExecutor(1, "records")

    def find(self, key: str, owner: str = "") -> list[AnswerRecord]:
        """Returns all valid records of the key, from all processes; none while the store is not ready."""
        if self._store and not self._store.ready:
            return []
        stored = self._stored(key) if self._store else []
        with self._lock:
            found = self._insert(owner, key, stored, replaces=False) if stored else self._records.get(owner, key) or {}
            return list(found.values())

    def put(self, key: str, record: AnswerRecord, owner: str = "") -> None:
        """Adds a record to those of its key."""
        with self._lock:
            lost = [_LOST_RECORD] if self._evicted.get(owner, key) not in (None, record.digest) else []
            self._insert(owner, key, [*lost, record])
        if self._store:
            self._write_later(key, record, owner)

    def chain(self, key: str, record: AnswerRecord, owner: str = "") -> list[tuple[str, AnswerRecord]] | None:
        """Returns the record and its ancestors with their keys, oldest first; None if one of them is gone."""
        chain, length = [(key, record)], len(key)
        while parent := chain[-1][1].parent:
            found = self.find_digest(parent[:length], parent[length:], owner) if len(chain) < _MAX_CHAIN else None
            if not found:
                return None
            chain.append((parent[:length], found))
        return chain[::-1]

    def flush(self) -> None:
        if self._store:
            self._writer.submit(lambda: None).result()

    def find_digest(self, key: str, digest: str, owner: str) -> AnswerRecord | None:
        """Returns the record of a key with this digest."""
        with self._lock:
            record = (self._records.get(owner, key) or {}).get(digest)
        return record or next((found for found in self.find(key, owner) if found.digest == digest), None)

    # In memory, under the lock

    def _insert(
        self, owner: str, key: str, records: Sequence[AnswerRecord], replaces: bool = True
    ) -> dict[str, AnswerRecord]:
        """Adds records to a key and returns all of its records. Eviction drops whole keys, because a single remaining
        record would look unique."""
        found = dict(self._records.get(owner, key) or {})
        for record in records:
            if record.digest in found and not (replaces and record.ids):
                continue
            found.pop(record.digest, None)
            found[record.digest] = record
            if len(found) > MAX_ALTERNATIVES:
                del found[next(iter(found))]
        weight = sum(map(_record_weight, found.values()))
        for other, evicted, lost in self._records.put(owner, key, found, weight):
            self._evicted.put(other, evicted, next(iter(lost)) if len(lost) == 1 else "")
        return found

    # In the store, the records of a key have numbered store keys, which processes claim and fill in order.
    # A key that is claimed and empty has lost its record, unless this process is writing it.

    def _stored(self, key: str) -> list[AnswerRecord]:
        assert self._store
        found: list[AnswerRecord] = []
        for store_key in map(partial(_store_key, key), range(MAX_ALTERNATIVES)):
            data = self._store.get(store_key)
            if data is None:
                break
            record = unpack(store_key, data, self._vocab_size)
            if not record and store_key == self._writing_key:
                continue  # the record is in memory
            found.append(record or self._read(store_key) or _LOST_RECORD)  # another process may have just written it
        missed = len({record.digest for record in found}) == 1 and found[0].ambiguous
        return [*found, _LOST_RECORD] if missed else found

    def _read(self, store_key: str) -> AnswerRecord | None:
        assert self._store
        return unpack(store_key, self._store.get(store_key) or b"", self._vocab_size)

    def _write_later(self, key: str, record: AnswerRecord, owner: str) -> None:
        """Queues a record. An owner may use at most as much of the queue as the others leave free."""
        size = _record_weight(record) * record.ids.itemsize
        with self._lock:
            if self._queued_bytes.total() + self._queued_bytes[owner] + size > _MAX_QUEUED_BYTES:
                return
            self._queued_bytes[owner] += size
        with suppress(RuntimeError):  # the interpreter is shutting down
            self._writer.submit(self._write, key, record, size, owner)

    def _write(self, key: str, record: AnswerRecord, size: int, owner: str) -> None:
        try:
            self._add_to_store(key, record)
        finally:
            self._writing_key = None
            with self._lock:
                self._queued_bytes[owner] -= size
                self._queued_bytes = +self._queued_bytes  # drops owners without queued bytes

    def _add_to_store(self, key: str, record: AnswerRecord) -> None:
        assert self._store
        for number, store_key in enumerate(map(partial(_store_key, key), range(MAX_ALTERNATIVES))):
            self._writing_key = store_key
            if self._store.claim(store_key):
                self._store.put(store_key, pack(store_key, record))
                if number:
                    first = self._read(key) or record
                    self._store.put(key, pack(key, replace(first, ambiguous=True)))
                return
            known = self._read(store_key)
            if known and known.digest == record.digest:
                if record.ids:
                    self._store.put(store_key, pack(store_key, replace(record, ambiguous=known.ambiguous)))
                return


def chain_ids(chain: Sequence[tuple[str, AnswerRecord]]) -> tuple[int, ...] | None:
    """Returns the ids of a chain, prompt and answer; None if an ancestor has changed."""
    ids = array("i")
    for _, record in chain:
        del ids[record.kept:]
        ids.extend(record.ids)
    return tuple(ids) if ids_digest(ids) == chain[-1][1].digest else None


def ids_digest(ids: array[int]) -> str:
    """Returns a hash of token ids that is the same on all machines."""
    return blake2b(_little_endian(ids).tobytes(), digest_size=_DIGEST_BYTES).hexdigest()


def pack(key: str, record: AnswerRecord) -> bytes:
    """Encodes a record as a checksum, a JSON header and the ids in little-endian int32."""
    fields = {"key": key, "content": record.content, "reasoning": record.reasoning, "calls": record.calls,
              "digest": record.digest, "parent": record.parent, "kept": record.kept, "thoughts": record.thoughts,
              "opening": record.system_prefix_len, "rivals": record.ambiguous}
    header = json.dumps(fields).encode()
    body = _HEADER.pack(len(header)) + header + _little_endian(record.ids).tobytes()
    return _MAGIC + blake2b(body, digest_size=_DIGEST_BYTES).digest() + body


def unpack(key: str, data: bytes, vocab_size: int) -> AnswerRecord | None:
    """Decodes the record of this key. Returns None if the bytes are damaged or not a record of this key."""
    start = len(_MAGIC) + _DIGEST_BYTES
    body = data[start:]
    if data[:start] != _MAGIC + blake2b(body, digest_size=_DIGEST_BYTES).digest():
        return None
    try:
        (length,) = _HEADER.unpack_from(body)
        header: dict[str, Any] = json.loads(body[_HEADER.size:_HEADER.size + length])
        calls = tuple((str(name), str(arguments)) for name, arguments in header.pop("calls"))
        ids = array("i")
        ids.frombytes(body[_HEADER.size + length:])
        ids = _little_endian(ids)
        sound = header.pop("key") == key and (not ids or (min(ids) >= 0 and max(ids) < vocab_size))
        thoughts = tuple(map(str, header.pop("thoughts")))
        return AnswerRecord(calls=calls, ids=ids, thoughts=thoughts, system_prefix_len=header.pop("opening"),
                            ambiguous=header.pop("rivals"), **header) if sound else None
    except (struct.error, ValueError, TypeError, KeyError, AttributeError):
        return None


def _little_endian(ids: array[int]) -> array[int]:
    if sys.byteorder == "big":
        ids = ids[:]
        ids.byteswap()
    return ids


def _store_key(key: str, number: int) -> str:
    """Returns the store key of one record of a key."""
    return blake2b(f"{key} {number}".encode(), digest_size=_DIGEST_BYTES).hexdigest() if number else key


def _record_weight(record: AnswerRecord) -> int:
    return len(record.ids) + len(record.thoughts) + _RECORD_OVERHEAD
