"""Records of the offload tiers: stored items, prefixes that go to and come from a tier, and the stores' interface.

A tier stores a prefix as items. A "kv" item has the K/V of the tokens [start, done); a "state" item the recurrent state
after `done` tokens; a "final" item also the logits after the last of them. `key` is a hash of all tokens up to `done`,
`parent` the key of the prefix up to `start` (empty for 0), whose items hold the earlier tokens. Items never change:
equal names have equal content, whichever process wrote them.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["kv", "state", "final"]
Tensors = Mapping[str, "Tensor"]
KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class StoredItem:
    """key, parent: hexadecimal. size: in bytes. used: last use, seconds since the epoch. path: location in the store;
    empty if the store finds the item by its other fields."""

    kind: Kind
    key: str
    parent: str
    start: int
    done: int
    size: int = 0
    used: float = 0.0
    path: str = ""


@dataclass(slots=True, eq=False)
class PrefixEntry:
    """A prefix of `done` tokens.

    kv, state: its items, if there are any.
    lengths: keys of the entries that continue it, grouped by their `done`.
    writing: futures of items that are not written yet.
    held: True while the entry is about to get a state, which keeps it from being removed.
    """

    key: str
    done: int
    parent: PrefixEntry | None
    kv: StoredItem | None = None
    state: StoredItem | None = None
    used: float = 0.0
    lengths: dict[int, set[str]] = field(default_factory=dict)
    writing: list[Future[int]] = field(default_factory=list)
    held: bool = False

    @property
    def needed(self) -> bool:
        return self.held or self.state is not None or bool(self.lengths)

    @property
    def items(self) -> list[StoredItem]:
        return [item for item in (self.kv, self.state) if item]

    @property
    def path(self) -> list[PrefixEntry]:
        """The entries from the first tokens to this one."""
        path, entry = [], self
        while entry.parent is not None:
            path.append(entry)
            entry = entry.parent
        return path[::-1]


@dataclass(frozen=True, slots=True, eq=False)
class LoadedPrefix:
    """A prefix that a tier has loaded. runs: pairs of the position of the first token and K/V tensors, in order. state:
    tensors of the recurrent state. logits: logits [V] after the last token, if known."""

    tokens: array[int]
    runs: tuple[tuple[int, Tensors], ...]
    state: Tensors
    logits: Tensor | None

    @property
    def done(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """A prefix in the pools. Both functions return copies and raise MemoryError if there is no memory for them.

    run: returns tokens and K/V from a position on. state: returns the state at the end, with logits if `final`.
    """

    tokens: Sequence[int]
    run: Callable[[int], dict[str, Tensor]]
    state: Callable[[], dict[str, Tensor]]
    final: bool = False


class TierStore(ABC):
    """Stores items. The index calls `scan`, `others`, `read` and `write` also on threads of its own.

    TierStoreError concerns one item. OSError means that the store cannot read or write at present; FullError, that it
    could write if items were deleted. writable: False if the store can only be read. trusted: True if the items are in
    this process, so that their numbers need not be checked.
    """

    name = ""
    budget = 0
    writable = True
    trusted = False

    @property
    def ready(self) -> bool:
        """False while the other methods would block."""
        return True

    def scan(self) -> Iterable[StoredItem]:
        """Returns all items that earlier or other processes have stored."""
        return ()

    def others(self) -> Iterable[StoredItem]:
        """Returns items of other models, which count towards the budget; they can only be deleted."""
        return ()

    @abstractmethod
    def write(self, item: StoredItem, tensors: Tensors) -> int:
        """Stores an item, whole or not at all; returns its size in bytes. The tensors are on the host and must not
        change afterwards."""

    @abstractmethod
    def read(self, item: StoredItem, most: int | None = None) -> dict[str, Tensor]:
        """Returns an item's tensors. Raises TierStoreError if the item is missing, damaged or larger than `most`."""

    @abstractmethod
    def delete(self, item: StoredItem) -> None:
        """Deletes an item if it is there; never fails."""

    def touch(self, item: StoredItem) -> None:  # noqa: B027
        """Records that an item is used now; never fails."""

    def abandon(self) -> None:  # noqa: B027
        """Makes all blocked methods return soon, because no more items are needed."""

    def close(self) -> None:  # noqa: B027
        """Completes the deferred work of `touch` and `delete`."""


class ItemValidator(Protocol):
    """Checks items before their use, because a store is not trusted."""

    def most(self, item: StoredItem) -> int | None:
        """Returns the maximum number of bytes of an item's tensors; None: no limit."""

    def refuse(self, item: StoredItem, tensors: Tensors, trusted: bool = False) -> str:
        """Returns the reason why these cannot be the item's tensors; empty if they can. trusted: that of the store."""


class AcceptAllItems:
    """A validator that accepts all items."""

    def most(self, item: StoredItem) -> int | None:
        return None

    def refuse(self, item: StoredItem, tensors: Tensors, trusted: bool = False) -> str:
        return ""


ANYTHING = AcceptAllItems()


class FullError(OSError):
    """The store is full. missing: number of bytes to delete before the item fits."""

    def __init__(self, code: int, reason: str, path: str, missing: int) -> None:
        super().__init__(code, reason, path)
        self.missing = missing


class TierStoreError(Exception):
    """An item cannot be read."""


class LostError(Exception):
    """An item of a prefix cannot be used."""

    def __init__(self, item: StoredItem, reason: object) -> None:
        super().__init__(f"a kept prefix of {item.done:,} tokens cannot be used, and is read anew: {reason}")
        self.item = item


class PrefixHash:
    """Computes the keys of increasingly long prefixes of one token sequence."""

    def __init__(self, tokens: Sequence[int]) -> None:
        numbers = array("q", tokens)  # for an array, a plain memory copy
        if sys.byteorder == "big":
            numbers.byteswap()
        self._bytes = numbers.tobytes()
        self._hash, self._done = blake2b(digest_size=KEY_BYTES), 0

    def key(self, done: int) -> str:
        """Returns the key of the first `done` tokens. `done` must not decrease from call to call."""
        assert done >= self._done
        self._hash.update(self._bytes[8 * self._done:8 * done])
        self._done = done
        return self._hash.hexdigest()


def size_of(tensors: Tensors) -> int:
    """Returns the bytes of tensors."""
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
