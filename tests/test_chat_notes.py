"""Notes about answers: written and read, bounded, and worth nothing when damaged."""

from __future__ import annotations

import json
import struct
from array import array
from dataclasses import replace
from hashlib import blake2b
from threading import Event

from deltic.chat.history_store import MAX_ALTERNATIVES, AnswerLog, AnswerRecord, OwnedEntries, ids_digest, pack, unpack

IDS = array("i", [1, 2, 3000])
NOTE = AnswerRecord("é", "", (("f", '{"a": "\\ud800"}'),), IDS, ids_digest(IDS), "ab", 2, 1, ("", "12"), True)


def test_record_round_trips() -> None:
    assert unpack("cd", pack("cd", NOTE), 3001) == NOTE
    assert unpack("ce", pack("cd", NOTE), 3001) is None
    assert unpack("cd", pack("cd", NOTE), 3000) is None


def test_damaged_record_is_rejected() -> None:
    data = pack("cd", NOTE)
    for at in range(len(data)):
        assert unpack("cd", data[:at] + bytes([data[at] ^ 1]) + data[at + 1:], 3001) is None
        assert unpack("cd", data[:at], 3001) is None


def test_valid_bytes_of_other_kind_are_rejected() -> None:
    for change in ({"calls": 5}, {"calls": [5]}, {"more": 1}):
        header = {"key": "cd", "content": "", "reasoning": "", "calls": [], "digest": ""}
        body = json.dumps(header | change).encode()
        body = struct.pack("<I", len(body)) + body
        data = pack("cd", NOTE)[:14] + blake2b(body, digest_size=16).digest() + body
        assert unpack("cd", data, 3001) is None


def note(*numbers: int) -> AnswerRecord:
    ids = array("i", numbers)
    return AnswerRecord("a", "", (), ids, ids_digest(ids))


def test_memory_is_bounded_and_the_least_used_goes_first() -> None:
    long = note(*range(1000))
    book = AnswerLog(None, 5000, limit=4000)
    for key in "abc":
        book.put(key, long)
        book.find("a")
    book.put("d", long)
    assert [bool(book.find(key)) for key in "abcd"] == [True, False, True, True]
    for _ in range(10):
        book.put("d", long)
    assert book.find("a"), "putting a note again makes nothing heavier"


def test_owner_does_not_evict_records_of_others() -> None:
    book, long = AnswerLog(None, 5000, limit=8000), note(*range(1000))
    for key in "ab":
        book.put(key, long, "quiet")
    for number in range(50):
        book.put(f"flood {number}", long, "flood")
    assert all(book.find(key, "quiet") for key in "ab") and not book.find("a") and not book.find("flood 3", "flood")
    assert book.find("flood 49", "flood") and not book.find("flood 49", "quiet")


def test_entries_within_a_weight_and_a_count() -> None:
    kept = OwnedEntries[str](10, 4)
    assert kept.put("a", "x", "1", 3) == [] and kept.put("a", "y", "2", 3) == []
    assert kept.get("a", "x") == "1", "used last from now on"
    assert kept.put("b", "z", "3", 5) == [("a", "y", "2")]
    assert kept.put("b", "z", "4", 6) == [] and kept.get("b", "z") == "4"
    assert kept.put("c", "big", "5", 11) == [("c", "big", "5")], "alone too heavy"
    for key in "123":
        kept.put("c", key, key, 0)
    assert kept.get("c", "1") is None and kept.get("a", "x") == "1" and kept.get("b", "z") == "4"
    assert kept.pop("b", "z") == "4" and kept.pop("b", "z") is None and kept.get("b", "z") is None


def test_ambiguous_records_are_evicted_together() -> None:
    book = AnswerLog(None, 5000, limit=4000)
    book.put("a", note(1))
    book.put("a", note(2))
    book.put("b", note(1))
    for key in range(20):
        book.put(str(key), note(3))
    assert not book.find("a") and not book.find("b")
    for key, found in (("a", note(1)), ("b", note(2))):
        book.put(key, found)
        assert len(book.find(key)) == 2, "it may be taken for one that is gone"
    book.put("b", note(4))
    assert len(book.find("b")) == 3
    for number in range(5, 20):
        book.put("b", note(number))
        assert 1 < len(book.find("b")) <= MAX_ALTERNATIVES


class Store:
    """Notes in a dictionary, for two notebooks that do not know each other."""

    def __init__(self) -> None:
        self.notes: dict[str, bytes] = {}

    ready = True

    def get(self, key: str) -> bytes | None:
        return self.notes.get(key)

    def put(self, key: str, data: bytes) -> None:
        self.notes[key] = data

    def claim(self, key: str) -> bool:
        return key not in self.notes and not self.notes.update({key: b""})


def test_records_of_other_processes_are_found() -> None:
    store = Store()
    one, two = AnswerLog(store, 5000), AnswerLog(store, 5000)
    for book, found in ((one, note(1)), (two, note(2)), (one, note(1)), (two, note(1))):
        book.put("aa", found)
        book.flush()
    for book in (one, two, AnswerLog(store, 5000)):
        assert {found.digest for found in book.find("aa")} == {note(1).digest, note(2).digest}
    assert len(store.notes) == 2


def test_lost_record_keeps_key_ambiguous() -> None:
    store = Store()
    for number in (1, 2):
        book = AnswerLog(store, 5000)
        book.put("aa", note(number))
        book.flush()
    first, second = store.notes
    for lost, left in ((first, 0), (second, 2)):
        rest = Store()
        rest.notes = {key: data for key, data in store.notes.items() if key != lost}
        assert len(AnswerLog(rest, 5000).find("aa")) == left
        rest.notes = store.notes | {lost: b""}
        assert len(AnswerLog(rest, 5000).find("aa")) == 2


def test_slow_store_does_not_block_callers() -> None:
    class Slow(Store):
        def __init__(self) -> None:
            super().__init__()
            self.free = Event()

        def claim(self, key: str) -> bool:
            assert self.free.wait(60)
            return super().claim(key)
    store = Slow()
    book = AnswerLog(store, 5000)
    for key in range(50):
        book.put(f"{key:x}", note(*range(1000)))
    assert not store.notes
    store.free.set()
    book.flush()
    assert len(store.notes) == 50


def test_record_being_written_is_not_lost() -> None:
    class Halting(Store):
        def __init__(self) -> None:
            super().__init__()
            self.claimed, self.free = Event(), Event()

        def put(self, key: str, data: bytes) -> None:
            self.claimed.set()
            assert self.free.wait(60)
            super().put(key, data)
    store = Halting()
    book = AnswerLog(store, 5000)
    book.put("aa", note(1))
    assert store.claimed.wait(60) and store.notes == {"aa": b""}
    assert [found.digest for found in book.find("aa")] == [note(1).digest]
    store.free.set()
    book.flush()
    assert [found.digest for found in book.find("aa")] == [note(1).digest]


def test_unusable_record_does_not_replace_usable_one() -> None:
    book, sound = AnswerLog(None, 5000), note(1)
    for found in (replace(sound, ids=array("i")), sound, replace(sound, ids=array("i"))):
        book.put("a", found)
    assert book.find("a") == [sound]
