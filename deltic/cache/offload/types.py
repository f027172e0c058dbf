"""What a tier below the pools keeps prefixes in: host memory, or a directory.

A prefix lies there in items. An item of kind "kv" has the K/V of a run of tokens, those of positions `start` to
`done`; an item of kind "state" the recurrent state after `done` tokens; one of kind "final" also the logits of the
last of them. `key` is a hash of all tokens up to `done`, `parent` the key of the prefix up to `start` (empty for
0), whose own items hold what comes before. Items never change: equal names have equal content, whoever wrote them.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["kv", "state", "final"]
KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class StoredItem:
    """One stored piece.

    key, parent: hexadecimal.
    size: bytes that it takes.
    used: time of the last use in seconds since the epoch. Both come with what is found in a store, and are no part of
        the item's name.
    path: where a store finds what is among its `others`.
    """

    kind: Kind
    key: str
    parent: str
    start: int
    done: int
    size: int = 0
    used: float = 0.0
    path: str = ""


class TierStore(Protocol):
    """Holds items. `scan`, `others`, `read` and `write` are also called from threads of their own.

    Errors that harm one item only are TierStoreError; OSError means that the store itself takes or gives no more at
    present, and FullError that it would take more if something went. writable: False: it only gives. trusted: what it
    gives is what was written, as it lies in this process.
    """

    name: str
    budget: int
    writable: bool
    trusted: bool

    @property
    def ready(self) -> bool:
        """False while the other methods would wait."""

    def scan(self) -> Iterable[StoredItem]:
        """All items that are there, with size and last use."""

    def others(self) -> Iterable[StoredItem]:
        """What else lies in the budget (of other models or versions): only `delete` may be called with these."""

    def write(self, item: StoredItem, tensors: Mapping[str, Tensor]) -> int:
        """Keep an item, whole or not at all; returns its size in bytes. The tensors are on the host."""

    def read(self, item: StoredItem, most: int | None = None) -> dict[str, Tensor]:
        """The tensors of an item; TierStoreError if it is missing, damaged, not what its name says or, in all, larger
        than `most` bytes."""

    def delete(self, item: StoredItem) -> None:
        """Forget an item; it is no error if it is gone already."""

    def touch(self, item: StoredItem) -> None:
        """Note that an item was used now; never fails."""

    def abandon(self) -> None:
        """Nothing more is wanted; who still waits for the store need not."""

    def close(self) -> None:
        """Finish what `touch` and `delete` have left to do."""


class FullError(OSError):
    """There is no room. missing: so many bytes have to go for the item to fit."""

    def __init__(self, code: int, reason: str, path: str, missing: int) -> None:
        super().__init__(code, reason, path)
        self.missing = missing


class TierStoreError(Exception):
    """An item cannot be read."""


class PrefixHash:
    """Keys of ever longer prefixes of one token sequence."""

    def __init__(self, tokens: Sequence[int]) -> None:
        numbers = array("q", tokens)  # of an array a plain copy
        if sys.byteorder == "big":
            numbers.byteswap()
        self._bytes = numbers.tobytes()
        self._hash, self._done = blake2b(digest_size=KEY_BYTES), 0

    def key(self, done: int) -> str:
        """The key of the first `done` tokens; `done` must not fall."""
        assert done >= self._done
        self._hash.update(self._bytes[8 * self._done:8 * done])
        self._done = done
        return self._hash.hexdigest()
