"""What is to be done to the pools: plain records, carried out in the order in which they were queued.

The order allows a released page or slot to be taken again at once: the operation that reads it for its last owner was
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
    """Copies pages, perhaps none, out of memory that becomes a slot, once nothing is written to it any more."""

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
    """Writes a prefix from a tier: K/V from the token `start` on to its places in these pages, the state to the slot.

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
    """Returns an operation as JSON: its name, then its fields."""
    return [type(operation).__name__, *astuple(operation)]


def operation_of(values: Sequence[Any]) -> Operation:
    """Returns the operation that `plain` made these values of, perhaps by way of JSON."""
    name, *fields = values
    return _KINDS[name](*(tuple(field) if isinstance(field, list) else field for field in fields))


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Numbers of units and their cost.

    token_bytes: of a token's K/V in all layers.
    slot_bytes: of a state in all layers.
    recurrent: some layer has a state, so that a sequence cannot be cut anywhere.
    layout: pages and slots share memory: these are the most of each, which do not fit at the same time.
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
        """Of all pages and slots."""
        if self.layout is None:
            return self.pages * PAGE * self.token_bytes + self.slots * self.slot_bytes
        return self.pages // self.layout.pages * self.layout.size + self.slots * self.layout.side

    def units(self) -> Units:
        """Returns their accounts."""
        if self.layout is None:
            return FixedUnits(self.pages, self.slots)
        return SharedUnits(self.layout, self.pages // self.layout.pages, self.slots)

    @property
    def slot_tokens(self) -> float:
        """The cost of a slot, in tokens of K/V."""
        return PAGE * self.slot_bytes / max(PAGE * self.token_bytes, 1)


class Pools(Protocol):
    """The tensors, as the accounts see them."""

    @property
    def sizes(self) -> PoolSizes: ...

    @property
    def item_validator(self) -> ItemValidator:
        """Checks what comes from a tier."""

    def apply(self, operations: Sequence[Operation]) -> None:
        """Carries out operations in order."""

    def forget(self, operations: Sequence[Operation]) -> None:
        """Drops what is held for operations that will not be carried out."""

    def sound(self, slots: Sequence[int], pages: Sequence[int], done: int) -> bool:
        """Returns True if these states and the K/V of the first `done` tokens in these pages are finite."""

    def hold(self, content: object) -> int:
        """Holds an object for an operation, which names it by the returned number."""


class OperationQueue:
    """Operations that wait for the next plan.

    poisoned: an operation failed, so that the pools do not hold what the accounts say. Nothing in them may be used
    until all sequences and snapshots are released and the cache is reset.
    """

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self.queued: list[Operation] = []
        self.poisoned = False

    def append(self, operation: Operation) -> None:
        self.queued.append(operation)

    def take(self) -> tuple[Operation, ...]:
        """Removes all operations; the caller has them applied before anything else."""
        operations = tuple(self.queued)
        self.queued.clear()
        return operations

    def flush(self) -> None:
        """Applies all operations now, outside of a plan."""
        if self.queued:
            self.apply(self.take())

    def apply(self, operations: Sequence[Operation]) -> None:
        """Carries out operations that were taken. An error poisons the cache."""
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
        """Drops all operations of a cache that is emptied."""
        self._pools.forget(self.take())
        self.poisoned = False
