"""Notes about finished answers: what was generated, kept in memory and, where there is a store, beyond it.

Two conversations may look alike and hide different thinking, so a key may have several notes: rivals. None of them is
ever put in place of another, in memory or in a store that several processes share: who asks learns of all, or of none.
"""

from __future__ import annotations

import json
import struct
import sys
import threading
from array import array
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any, Protocol

from deltic.chat.owned_entries import OwnedEntries

LIMIT = 4_000_000
"""Token ids that notes in memory may hold."""
RIVALS = 4
"""Notes that one key may have; more stay ambiguous, but the oldest cannot be told from a stranger's any more."""

_MAGIC = b"deltic-note-2\n"
_HEADER = struct.Struct("<I")
_SUM = 16
# What a note weighs besides its ids, in ids: its texts and Python's own share.
_OVERHEAD = 256
# No conversation has more answers; a chain that is longer bites its own tail.
_LONGEST_CHAIN = 100_000
# Keys whose notes left the memory: what comes in their place must not be taken for them.
_MOST_GONE = 100_000
# Bytes of notes that may wait for a slow disk; beyond that they are not written.
_MOST_WAITING = 64 << 20


class AnswerStore(Protocol):
    """Keeps notes beyond the process. Keys are hexadecimal; no method raises."""

    @property
    def ready(self) -> bool:
        """Whether it is known what there is; until then the other methods wait."""

    def get(self, key: str) -> bytes | None: ...

    def put(self, key: str, data: bytes) -> None: ...

    def claim(self, key: str) -> bool:
        """Take a key that nothing was put under; False if somebody has it, of all processes."""


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    """One finished answer.

    ids: prompt and answer without the token that ended it, as int32, after the first `kept` ids of the note `parent` (a
        name; "" if there is none).
    digest: of all ids together. A note without ids stands for an answer that cannot be continued; one without a digest
        for any number of notes that were lost.
    opening: position up to which conversations with the same system message and tools share the ids.
    calls: name and arguments of each call, as a JSON object whose values are the text that the model wrote.
    thoughts: `thought_of` the reasoning of each answer of the conversation, this one last; "" where there is none.
    rivals: there are or were other notes with its key.
    """

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    ids: array[int]
    digest: str
    parent: str = ""
    kept: int = 0
    opening: int = 0
    thoughts: tuple[str, ...] = ()
    rivals: bool = False

    def fits(self, thoughts: Sequence[str | None]) -> bool:
        """Whether this may be an answer of a conversation that is known to have had these thoughts."""
        own = (*self.thoughts, *[""] * len(thoughts))
        return not self.digest or all(given in (None, thought) for given, thought in zip(thoughts, own))


_LOST = AnswerRecord("", "", (), array("i"), "")


def name_of(key: str, note: AnswerRecord) -> str:
    """What tells the note from its rivals, too."""
    return key + note.digest


def thought_of(reasoning: str) -> str:
    """What is compared of an answer's reasoning; "" if there is none."""
    return blake2b(reasoning.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest() if reasoning else ""


class AnswerLog:
    """Notes by owner and key, the least recently used of which are dropped from memory: those of the owner that holds
    most. Threads may share it.

    limit: token ids to hold in memory. vocab_size: notes with other ids are foreign. Writing to the store happens in a
    thread of its own.
    """

    def __init__(self, store: AnswerStore | None, vocab_size: int, limit: int = LIMIT) -> None:
        self._store, self._vocab_size = store, vocab_size
        self._notes: OwnedEntries[dict[str, AnswerRecord]] = OwnedEntries(limit)
        self._gone: OwnedEntries[str] = OwnedEntries(_MOST_GONE)  # a digest, or "" if there were several
        self._waiting = Counter[str]()
        self._lock = threading.Lock()
        self._filling: str | None = None
        self._writer = ThreadPoolExecutor(1, "notes")

    def find(self, key: str, owner: str = "") -> list[AnswerRecord]:
        """All notes with this key, also those of other processes; damaged ones are not there. None as long as those of
        other processes are not known."""
        if self._store and not self._store.ready:
            return []
        stored = self._stored(key) if self._store else []
        with self._lock:
            found = self._added(owner, key, stored, replaces=False) if stored else self._notes.get(owner, key) or {}
            return list(found.values())

    def put(self, key: str, note: AnswerRecord, owner: str = "") -> None:
        """Keep a note, beside its rivals."""
        with self._lock:
            lost = [_LOST] if self._gone.get(owner, key) not in (None, note.digest) else []
            self._added(owner, key, [*lost, note])
        if self._store:
            self._write_later(key, note, owner)

    def chain(self, key: str, note: AnswerRecord, owner: str = "") -> list[tuple[str, AnswerRecord]] | None:
        """The note and those it builds on with their keys, the first one first; None if one of them is gone."""
        chain, length = [(key, note)], len(key)
        while parent := chain[-1][1].parent:
            found = self._named(parent[:length], parent[length:], owner) if len(chain) < _LONGEST_CHAIN else None
            if not found:
                return None
            chain.append((parent[:length], found))
        return chain[::-1]

    def flush(self) -> None:
        """Wait until all that was put is in the store."""
        if self._store:
            self._writer.submit(lambda: None).result()

    def _named(self, key: str, digest: str, owner: str) -> AnswerRecord | None:
        with self._lock:
            note = (self._notes.get(owner, key) or {}).get(digest)
        return note or next((found for found in self.find(key, owner) if found.digest == digest), None)

    # In memory, under the lock

    def _added(
        self, owner: str, key: str, notes: Sequence[AnswerRecord], replaces: bool = True
    ) -> dict[str, AnswerRecord]:
        """The notes of a key with these among them. What leaves the memory does so with all notes of its key: one that
        is left alone would look like the only one."""
        rivals = dict(self._notes.get(owner, key) or {})
        for note in notes:
            if note.digest in rivals and not (replaces and note.ids):
                continue
            rivals.pop(note.digest, None)
            rivals[note.digest] = note
            if len(rivals) > RIVALS:
                del rivals[next(iter(rivals))]
        for other, left, lost in self._notes.put(owner, key, rivals, sum(map(_weight, rivals.values()))):
            self._gone.put(other, left, next(iter(lost)) if len(lost) == 1 else "")
        return rivals

    # In the store: rivals lie in numbered places, which processes claim; they are only ever filled in order. A place
    # that is claimed and not filled has lost its note, but for the one that this process is filling

    def _stored(self, key: str) -> list[AnswerRecord]:
        assert self._store
        found: list[AnswerRecord] = []
        for place in map(partial(_place, key), range(RIVALS)):
            data = self._store.get(place)
            if data is None:
                break
            sound = unpack(place, data, self._vocab_size)
            if not sound:
                if place == self._filling:
                    continue  # memory has what will be there
                sound = unpack(place, self._store.get(place) or b"", self._vocab_size)  # filled by now?
            found.append(sound or _LOST)
        missed = len({note.digest for note in found}) == 1 and found[0].rivals
        return [*found, _LOST] if missed else found

    def _write_later(self, key: str, note: AnswerRecord, owner: str) -> None:
        """An owner may have as much waiting as stays free besides."""
        size = _weight(note) * note.ids.itemsize
        with self._lock:
            if self._waiting.total() + self._waiting[owner] + size > _MOST_WAITING:
                return
            self._waiting[owner] += size
        with suppress(RuntimeError):  # Python is about to end
            self._writer.submit(self._write, key, note, size, owner)

    def _write(self, key: str, note: AnswerRecord, size: int, owner: str) -> None:
        try:
            self._store_beside(key, note)
        finally:
            self._filling = None
            with self._lock:
                self._waiting[owner] -= size
                self._waiting = +self._waiting  # without owners that have nothing there

    def _store_beside(self, key: str, note: AnswerRecord) -> None:
        assert self._store
        for number, place in enumerate(map(partial(_place, key), range(RIVALS))):
            self._filling = place
            if self._store.claim(place):
                self._store.put(place, pack(place, note))
                if number:
                    first = unpack(key, self._store.get(key) or b"", self._vocab_size) or note
                    self._store.put(key, pack(key, replace(first, rivals=True)))
                return
            known = unpack(place, self._store.get(place) or b"", self._vocab_size)
            if known and known.digest == note.digest:
                if note.ids:
                    self._store.put(place, pack(place, replace(note, rivals=known.rivals)))
                return


def ids_of(chain: Sequence[tuple[str, AnswerRecord]]) -> tuple[int, ...] | None:
    """All ids of the last note of a chain, prompt and answer; None if a note that it builds on has changed."""
    ids = array("i")
    for _, note in chain:
        del ids[note.kept:]
        ids.extend(note.ids)
    return tuple(ids) if digest_of(ids) == chain[-1][1].digest else None


def digest_of(ids: array[int]) -> str:
    """A fingerprint of token ids, the same on all machines."""
    return blake2b(_little_endian(ids).tobytes(), digest_size=_SUM).hexdigest()


def pack(key: str, note: AnswerRecord) -> bytes:
    """A note as bytes: a checksum, a header in JSON, the ids as little-endian int32."""
    header = json.dumps({"key": key, "content": note.content, "reasoning": note.reasoning, "calls": note.calls,
                         "digest": note.digest, "parent": note.parent, "kept": note.kept,
                         "opening": note.opening, "thoughts": note.thoughts, "rivals": note.rivals}).encode()
    body = _HEADER.pack(len(header)) + header + _little_endian(note.ids).tobytes()
    return _MAGIC + blake2b(body, digest_size=_SUM).digest() + body


def unpack(key: str, data: bytes, vocab_size: int) -> AnswerRecord | None:
    """The note with this key; None if the bytes are damaged or are something else."""
    start = len(_MAGIC) + _SUM
    body = data[start:]
    if data[:start] != _MAGIC + blake2b(body, digest_size=_SUM).digest():
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
        return AnswerRecord(calls=calls, ids=ids, thoughts=thoughts, **header) if sound else None
    except (struct.error, ValueError, TypeError, KeyError, AttributeError):
        return None


def _little_endian(ids: array[int]) -> array[int]:
    if sys.byteorder == "big":
        ids = ids[:]
        ids.byteswap()
    return ids


def _place(key: str, number: int) -> str:
    """Where a key's notes lie in a store."""
    return blake2b(f"{key} {number}".encode(), digest_size=_SUM).hexdigest() if number else key


def _weight(note: AnswerRecord) -> int:
    return len(note.ids) + len(note.thoughts) + _OVERHEAD
