"""Notes about answers: written and read, bounded, and worth nothing when damaged."""

from __future__ import annotations

import json
import struct
from array import array
from hashlib import blake2b

from deltic.text.notes import Note, Notebook, digest_of, pack, unpack

IDS = array("i", [1, 2, 3000])
NOTE = Note("é", "", (("f", '{"a": "\\ud800"}'),), IDS, digest_of(IDS), "ab", 2, 1)


def test_notes_survive_being_written() -> None:
    assert unpack("cd", pack("cd", NOTE), 3001) == NOTE
    assert unpack("ce", pack("cd", NOTE), 3001) is None
    assert unpack("cd", pack("cd", NOTE), 3000) is None


def test_every_damaged_byte_is_noticed() -> None:
    data = pack("cd", NOTE)
    for at in range(len(data)):
        assert unpack("cd", data[:at] + bytes([data[at] ^ 1]) + data[at + 1:], 3001) is None
        assert unpack("cd", data[:at], 3001) is None


def test_sound_bytes_of_another_kind_are_absent() -> None:
    for change in ({"calls": 5}, {"calls": [5]}, {"more": 1}):
        header = {"key": "cd", "content": "", "reasoning": "", "calls": [], "digest": ""}
        body = json.dumps(header | change).encode()
        body = struct.pack("<I", len(body)) + body
        data = pack("cd", NOTE)[:14] + blake2b(body, digest_size=16).digest() + body
        assert unpack("cd", data, 3001) is None


def test_memory_is_bounded_and_the_least_used_goes_first() -> None:
    ids = array("i", range(1000))
    note = Note("a", "", (), ids, digest_of(ids))
    book = Notebook(None, 5000, limit=4000)
    for key in "abc":
        book.put(key, note)
        book.get("a")
    book.put("d", note)
    assert [bool(book.get(key)) for key in "abcd"] == [True, False, True, True]
    for _ in range(10):
        book.put("d", note)
    assert book.get("a"), "replacing a note makes nothing heavier"
