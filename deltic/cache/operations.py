"""Operations on the pools: plain records that are queued and carried out in order.

The order allows a released page or slot to be taken again at once: the operation that reads it for its last owner is
queued before the one that writes it for the next, and a step's rows run after the operations of its plan. Code that
writes to the pools outside of a plan flushes the queue first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from deltic.cache.frames import FixedUnits, FrameLayout, SharedUnits, Units
from deltic.errors import UnavailableError
from deltic.params import PAGE

if TYPE_CHECKING:
    from deltic.cache.offload.types import ItemValidator


@dataclass(frozen=True, slots=True)
class CopyPage:
    """Copies the K/V of all tokens of a page."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class MovePages:
    """Copies pages out of memory that becomes a slot, after pending writes to it. Without pages, it only waits."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CopySlot:
    """Copies a state."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class FlushDeltaLog:
    """Advances the state in a slot from `base` to `done` tokens with a state delta log."""

    slot: int
    delta_log: int
    base: int
    done: int


@dataclass(frozen=True, slots=True)
class StoreItem:
    """Offers a prefix to the tiers: its K/V in these pages, the state at its end in the slot. Changes no pool.

    item: the number under which the pools hold the StoreRequest.
    """

    item: int
    pages: tuple[int, ...]
    slot: int


@dataclass(frozen=True, slots=True)
class RestoreItem:
    """Writes a prefix from a tier: its K/V from token `start` on to these pages, its state to the slot.

    item: the number under which the pools hold the LoadedPrefix.
    """

    item: int
    pages: tuple[int, ...]
    start: int
    slot: int


Operation = CopyPage | MovePages | CopySlot | FlushDeltaLog | StoreItem | RestoreItem

_KINDS: dict[str, Callable[..., Operation]] = {
    kind.__name__: kind for kind in (CopyPage, MovePages, CopySlot, FlushDeltaLog, StoreItem, RestoreItem)}


def plain(operation: Operation) -> list[Any]:
    """Returns an operation as a list that JSON can represent: its name, then its fields."""
    return [type(operation).__name__, *astuple(operation)]


def operation_of(values: Sequence[Any]) -> Operation:
    """Returns the operation that `plain` turned into these values, which may have passed through JSON."""
    name, *fields = values
    return _KINDS[name](*(tuple(field) if isinstance(field, list) else field for field in fields))


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Numbers of units and their sizes.

    token_bytes: bytes of one token's K/V in all layers.
    slot_bytes: bytes of one state in all layers.
    recurrent: True if some layer has a state, so that a sequence cannot be cut at any token.
    layout: how pages and slots share memory, if they do; then `pages` and `slots` are maxima that do not fit together.
    """

    pages: int
    slots: int
    delta_logs: int = 0
    token_bytes: int = 0
    slot_bytes: int = 0
    recurrent: bool = True
    layout: FrameLayout | None = None

    @property
    def bytes(self) -> int:
        """Bytes of all pages and slots."""
        if self.layout is None:
            return self.pages * PAGE * self.token_bytes + self.slots * self.slot_bytes
        return self.pages // self.layout.pages * self.layout.size + self.slots * self.layout.side

    def units(self) -> Units:
        """Returns new accounts of these pages and slots."""
        if self.layout is None:
            return FixedUnits(self.pages, self.slots)
        return SharedUnits(self.layout, self.pages // self.layout.pages, self.slots)

    @property
    def slot_tokens(self) -> float:
        """The memory of a slot, in tokens of K/V."""
        return PAGE * self.slot_bytes / max(PAGE * self.token_bytes, 1)


class Pools(Protocol):
    """The interface of the tensor pools that the accounts use."""

    @property
    def sizes(self) -> PoolSizes: ...

    @property
    def item_validator(self) -> ItemValidator:
        """Checks items that tiers load."""

    def apply(self, operations: Sequence[Operation]) -> None:
        """Carries out operations in order."""

    def forget(self, operations: Sequence[Operation]) -> None:
        """Drops the objects held for operations that will not be carried out."""

    def sound(self, slots: Sequence[int], pages: Sequence[int], done: int) -> bool:
        """Returns True if these states and the K/V of the first `done` tokens in these pages are finite."""

    def hold(self, content: object) -> int:
        """Stores an object for an operation. Returns the number with which the operation refers to it."""


class OperationQueue:
    """Operations that wait for the next plan.

    poisoned: True after an operation failed: the pools no longer match the accounts. They must not be used until all
    sequences and snapshots are released and the cache is reset.
    """

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self.queued: list[Operation] = []
        self.poisoned = False

    def append(self, operation: Operation) -> None:
        self.queued.append(operation)

    def take(self) -> tuple[Operation, ...]:
        """Removes and returns all operations. The caller must apply them before it changes the pools otherwise."""
        operations = tuple(self.queued)
        self.queued.clear()
        return operations

    def flush(self) -> None:
        """Applies all operations now, outside of a plan."""
        if self.queued:
            self.apply(self.take())

    def apply(self, operations: Sequence[Operation]) -> None:
        """Carries out operations that `take` returned. An error poisons the cache."""
        try:
            if self.poisoned:
                raise UnavailableError("the cache's memory is not what its accounts say, as an earlier operation on it "
                                       "failed: load the model anew")
            self._pools.apply(operations)
        except BaseException:
            self.poisoned = True
            self._pools.forget(operations)
            raise

    def discard(self) -> None:
        """Drops all queued operations of a cache that is being emptied, and ends its poisoned state."""
        self._pools.forget(self.take())
        self.poisoned = False
