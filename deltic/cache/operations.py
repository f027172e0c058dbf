"""What the accounts have done to the pools: plain records, carried out in the order in which they were queued.

The order is what lets a page or slot that was given back be given to somebody else at once: what reads it for its last
owner was queued before what writes it for the next, and a step's rows run after all that was queued before its plan was
made. Whoever writes to the pools outside of a plan has the queue carried out first (`HybridCache.flush`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from deltic.params import PAGE

if TYPE_CHECKING:
    from deltic.cache.offload.prefix_items import ItemValidator


@dataclass(frozen=True, slots=True)
class CopyPage:
    """Copy the K/V of all places of a page."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class CopySlot:
    """Copy a state."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class FlushDeltaLog:
    """Bring the state in a slot, which stands for `base` tokens, forward to `done` with what lies in a replay ring."""

    slot: int
    delta_log: int
    base: int
    done: int


@dataclass(frozen=True, slots=True)
class StoreItem:
    """Offer a prefix to the tiers: its K/V lies in these pages, the last perhaps partial, the state at its end in the
    slot. item: the number under which the pools hold which prefix it is. Changes nothing in the pools."""

    item: int
    pages: tuple[int, ...]
    slot: int


@dataclass(frozen=True, slots=True)
class RestoreItem:
    """Write a prefix that came from a tier: its K/V from the token `start` on to its places in these pages, its state
    to the slot. item: the number under which the pools hold what came."""

    item: int
    pages: tuple[int, ...]
    start: int
    slot: int


Operation = CopyPage | CopySlot | FlushDeltaLog | StoreItem | RestoreItem

_KINDS: dict[str, Callable[..., Operation]] = {kind.__name__: kind
                                               for kind in (CopyPage, CopySlot, FlushDeltaLog, StoreItem, RestoreItem)}


def plain(operation: Operation) -> list[Any]:
    """An operation as JSON knows it: its name, then its fields."""
    return [type(operation).__name__, *astuple(operation)]


def operation_of(found: Sequence[Any]) -> Operation:
    """What `plain` gave, perhaps by way of JSON."""
    name, *values = found
    return _KINDS[name](*(tuple(value) if isinstance(value, list) else value for value in values))


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """How many units there are, and what they cost.

    token_bytes: of a token's K/V in all layers.
    slot_bytes: of a state in all layers.
    recurrent: some layer has a state, so that a sequence cannot be cut anywhere.
    """

    pages: int
    slots: int
    delta_logs: int = 0
    token_bytes: int = 0
    slot_bytes: int = 0
    recurrent: bool = True

    @property
    def slot_tokens(self) -> float:
        """What a slot costs, in tokens of K/V."""
        return PAGE * self.slot_bytes / max(PAGE * self.token_bytes, 1)


class Pools(Protocol):
    """What the accounts need of the tensors that they are kept of."""

    @property
    def sizes(self) -> PoolSizes:
        """How many units there are, and what they cost."""

    @property
    def item_validator(self) -> ItemValidator:
        """What may come in from a tier."""

    def apply(self, operations: Sequence[Operation]) -> None:
        """Carry these out, in order."""

    def forget(self, operations: Sequence[Operation]) -> None:
        """Let go of what is held for these, which nobody will carry out."""

    def sound(self, slots: Sequence[int], pages: Sequence[int], done: int) -> bool:
        """Whether the states in these slots, and the K/V of the first `done` tokens in these pages, are finite."""

    def hold(self, content: object) -> int:
        """Keep something that is no plain data until the operation that names it by this number is carried out."""
