"""Notes about finished answers: what was generated, kept in memory and, where there is a store, beyond it."""

from __future__ import annotations

import json
import struct
import sys
import threading
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

LIMIT = 4_000_000
"""Token ids that notes in memory may hold."""

_MAGIC = b"deltic-note-1\n"
_HEADER = struct.Struct("<I")
_SUM = 16
# What a note weighs besides its ids, in ids: its texts and Python's own share.
_OVERHEAD = 256
# No conversation has more answers; a chain that is longer bites its own tail.
_LONGEST_CHAIN = 100_000


class NoteStore(Protocol):
    """Keeps notes beyond the process. Keys are hexadecimal; neither method raises."""

    def get(self, key: str) -> bytes | None: ...

    def put(self, key: str, data: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class Note:
    """One finished answer.

    ids: prompt and answer without the token that ended it, as int32, after the first `kept` ids of the note
        `parent` (a key; "" if there is none). digest: of all ids together.
    opening: position up to which conversations with the same system message and tools share the ids.
    calls: name and arguments of each call, as a JSON object whose values are the text that the model wrote.
    """

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    ids: array[int]
    digest: str
    parent: str = ""
    kept: int = 0
    opening: int = 0


class Notebook:
    """Notes by key, the least recently used of which are dropped from memory. Threads may share it.

    limit: token ids to hold in memory. vocab_size: notes with other ids are foreign.
    """

    def __init__(self, store: NoteStore | None, vocab_size: int, limit: int = LIMIT) -> None:
        self._store, self._vocab_size, self._limit = store, vocab_size, limit
        self._notes: OrderedDict[str, Note] = OrderedDict()
        self._weight = 0
        self._lock = threading.Lock()

    def get(self, key: str) -> Note | None:
        """The note; None if there is none, or only a damaged one."""
        with self._lock:
            note = self._notes.get(key)
            if note:
                self._notes.move_to_end(key)
        if note or not self._store:
            return note
        note = unpack(key, self._store.get(key) or b"", self._vocab_size)
        if note:
            self._keep(key, note)
        return note

    def put(self, key: str, note: Note) -> None:
        """Keep a note, in place of an older one."""
        self._keep(key, note)
        if self._store:
            self._store.put(key, pack(key, note))

    def all_ids(self, note: Note) -> tuple[int, ...] | None:
        """Prompt and answer from the first id; None if a note that this one builds on is gone or has changed."""
        chain: list[Note] = [note]
        while chain[-1].parent:
            parent = self.get(chain[-1].parent) if len(chain) < _LONGEST_CHAIN else None
            if not parent:
                return None
            chain.append(parent)
        ids = array("i")
        for link in reversed(chain):
            del ids[link.kept:]
            ids.extend(link.ids)
        return tuple(ids) if digest_of(ids) == note.digest else None

    def _keep(self, key: str, note: Note) -> None:
        with self._lock:
            self._weight += _weight(note) - (_weight(self._notes.pop(key)) if key in self._notes else 0)
            self._notes[key] = note
            while self._weight > self._limit and self._notes:
                self._weight -= _weight(self._notes.popitem(last=False)[1])


def digest_of(ids: array[int]) -> str:
    """A fingerprint of token ids, the same on all machines."""
    return blake2b(_little_endian(ids).tobytes(), digest_size=_SUM).hexdigest()


def pack(key: str, note: Note) -> bytes:
    """A note as bytes: a checksum, a header in JSON, the ids as little-endian int32."""
    header = json.dumps({"key": key, "content": note.content, "reasoning": note.reasoning, "calls": note.calls,
                         "digest": note.digest, "parent": note.parent, "kept": note.kept,
                         "opening": note.opening}).encode()
    body = _HEADER.pack(len(header)) + header + _little_endian(note.ids).tobytes()
    return _MAGIC + blake2b(body, digest_size=_SUM).digest() + body


def unpack(key: str, data: bytes, vocab_size: int) -> Note | None:
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
        return Note(calls=calls, ids=ids, **header) if sound else None
    except (struct.error, ValueError, TypeError, KeyError, AttributeError):
        return None


def _little_endian(ids: array[int]) -> array[int]:
    if sys.byteorder == "big":
        ids = ids[:]
        ids.byteswap()
    return ids


def _weight(note: Note) -> int:
    return len(note.ids) + _OVERHEAD
