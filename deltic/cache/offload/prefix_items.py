"""What a tier says of a prefix: its place in the index, where its tensors can be had, and how it is read."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from deltic.cache.offload.types import PrefixHash, StoredItem, TierStore

if TYPE_CHECKING:
    from torch import Tensor

Tensors = Mapping[str, "Tensor"]
Keys = set[str]


@dataclass(slots=True, eq=False)
class PrefixEntry:
    """A prefix of `done` tokens.

    kv, state: the items of it, None where there is none.
    lengths: the entries that continue this one, by where they end.
    writing: what has not been written yet.
    held: about to get a state.
    """

    key: str
    done: int
    parent: PrefixEntry | None
    kv: StoredItem | None = None
    state: StoredItem | None = None
    used: float = 0.0
    lengths: dict[int, Keys] = field(default_factory=dict)
    writing: list[Future[int]] = field(default_factory=list)
    held: bool = False

    @property
    def needed(self) -> bool:
        return self.held or self.state is not None or bool(self.lengths)

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
    """A prefix as it came from a tier. runs: K/V tensors, each with the position of its first token, in order.
    state: the tensors of the recurrent state. logits [V] of the last token, if known."""

    tokens: array[int]
    runs: tuple[tuple[int, Tensors], ...]
    state: Tensors
    logits: Tensor | None

    @property
    def done(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """Where copies of a prefix's tensors can be had.

    run: tokens and K/V from a position on.
    state: the state at its end, with, if `final`, the last token's logits. Both raise MemoryError if there is none for
        the copy.
    """

    tokens: Sequence[int]
    run: Callable[[int], dict[str, Tensor]]
    state: Callable[[], dict[str, Tensor]]
    final: bool = False


class ItemValidator(Protocol):
    """What items have to look like to be let in: a store is not to be trusted."""

    def most(self, item: StoredItem) -> int | None:
        """The bytes that its tensors can have."""

    def refuse(self, item: StoredItem, tensors: Tensors, trusted: bool = False) -> str:
        """Why these cannot be the item's tensors; empty if they can. trusted: as of the store; then
        nobody looks at each number."""


class AcceptAllItems:
    """Lets everything in."""

    def most(self, item: StoredItem) -> int | None:
        return None

    def refuse(self, item: StoredItem, tensors: Tensors, trusted: bool = False) -> str:
        return ""


ANYTHING = AcceptAllItems()


@dataclass(frozen=True, slots=True, eq=False)
class PendingWrite:
    """An item on its way to the store.

    tensors: what to write, should it have to be tried again.
    given_up: bytes that the tier had given up when it was sent off.
    tries: how often that was before.
    """

    entry: PrefixEntry
    item: StoredItem
    tensors: Tensors
    future: Future[int]
    given_up: int = 0
    tries: int = 0


class LostError(Exception):
    """An item could not be read."""

    def __init__(self, item: StoredItem, reason: object) -> None:
        super().__init__(f"a kept prefix of {item.done:,} tokens cannot be used, and is read anew: {reason}")
        self.item = item


def read_prefix(read: Callable[[StoredItem], dict[str, Tensor]], items: Sequence[StoredItem], state: StoredItem,
                writing: Sequence[Future[int]]) -> LoadedPrefix:
    """A prefix out of its K/V items and its state, once they are written; LostError names the one that is no good.
    read: as `read_item`. For a thread of its own, unless all of it is in this process."""
    tokens = array("q")
    runs: list[tuple[int, Tensors]] = []
    for future in writing:
        future.exception()  # wait until it is there
    for item in items:
        tensors = read(item)
        fresh = tensors.pop("tokens", None)
        if fresh is None or fresh.numel() != item.done - item.start:
            raise LostError(item, "its tokens do not fit")
        tokens.frombytes(fresh.contiguous().numpy().tobytes())
        runs.append((item.start, tensors))
    tensors = read(state)
    logits = tensors.pop("logits", None)
    prefix = PrefixHash(tokens)
    for item in (*items, state):
        if prefix.key(item.done) != item.key:
            raise LostError(item, "its tokens are others than it says")
    return LoadedPrefix(tokens, tuple(runs), tensors, logits)


def read_item(store: TierStore, door: ItemValidator, item: StoredItem) -> dict[str, Tensor]:
    """The tensors of an item that may come in; LostError says why not. OSError and MemoryError say nothing of the
    item."""
    try:
        tensors = dict(store.read(item, door.most(item)))
        reason = door.refuse(item, tensors, store.trusted)
    except (OSError, MemoryError):
        raise
    except Exception as error:
        raise LostError(item, error) from error
    if reason:
        raise LostError(item, reason)
    return tensors


def size_of(tensors: Tensors) -> int:
    """Bytes."""
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
