"""Requests to the tiers: prefixes to store, and prefixes to load for a prompt. No torch."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from deltic.cache.offload.types import (
    ANYTHING,
    ItemValidator,
    LoadedPrefix,
    LostError,
    PrefixEntry,
    PrefixHash,
    PrefixSource,
    StoredItem,
    Tensors,
    TierStore,
)

if TYPE_CHECKING:
    from deltic.cache.offload.index import TierIndex

log = logging.getLogger("deltic")


class PrefixTarget(Protocol):
    """Takes prefixes: a tier, or what writes files."""

    def offer(self, source: PrefixSource) -> None:
        """Copies a prefix."""


@dataclass(frozen=True, slots=True, eq=False)
class StoreRequest:
    """A prefix that a `StoreItem` names. logits: of its last token, if known."""

    tokens: Sequence[int]
    logits: Any
    tiers: Sequence[PrefixTarget]

    def make(self, source: PrefixSource) -> None:
        for tier in self.tiers:
            tier.offer(source)


@dataclass(slots=True, eq=False)
class LoadRequest:
    """Loads a prefix of a prompt that is longer than `above` tokens. Poll it until it is finished; `loaded` is then the
    prefix, if any tier had one, and `tier` the one that it came from. begun: a tier reads, or has read, for it."""

    tokens: Sequence[int]
    above: int
    tiers: Sequence[TierIndex]
    validator: ItemValidator = ANYTHING
    loaded: LoadedPrefix | None = None
    tier: TierIndex | None = None
    _reading: Future[LoadedPrefix] | None = None
    _found: bool = False
    _finished: bool = False

    @property
    def begun(self) -> bool:
        return self._reading is not None or self.loaded is not None

    def poll(self, begin: bool = True) -> bool:
        """Returns True if the request is finished. A prefix that cannot be read is replaced by the next best. begin: a
        tier may begin to read."""
        while not self._finished:
            if self._reading is not None:
                if not self._reading.done():
                    return False
                self._finish(self._reading)
                continue
            if self._found and not begin:
                return False
            best = self._deepest()
            self._found = best is not None
            if best is None:
                self._finished = True
            elif begin:
                self.tier, entry = best
                self._reading = self.tier.fetch(entry, self.validator)
        return True

    def wait(self, seconds: float) -> None:
        """Sleeps until a tier has read, at most so long."""
        if self._reading is not None:
            wait([self._reading], seconds)

    def _deepest(self) -> tuple[TierIndex, PrefixEntry] | None:
        best, above = None, self.above
        for tier in self.tiers:
            entry = tier.find(self.tokens, above)
            if entry:
                best, above = (tier, entry), entry.done
        return best

    def _finish(self, reading: Future[LoadedPrefix]) -> None:
        assert self.tier is not None
        self._reading = None
        try:
            loaded = reading.result()
        except LostError as error:
            log.warning("%s tier: %s", self.tier.name, error)
            self.tier.lose(error.item)
            return
        except Exception as error:
            log.warning("%s tier: a prompt is read anew, as its prefix cannot be: %s", self.tier.name,
                        error or type(error).__name__)
            self._finished = True
            return
        self.loaded = loaded if loaded.tokens == array("q", self.tokens[:loaded.done]) else None
        self._finished = True


def read_prefix(read: Callable[[StoredItem], dict[str, Any]], items: Sequence[StoredItem], state: StoredItem,
                writing: Sequence[Future[int]]) -> LoadedPrefix:
    """Reads a prefix once its items are written. Raises LostError with the item that cannot be used. read: as
    `read_item`."""
    tokens = array("q")
    runs: list[tuple[int, Tensors]] = []
    for future in writing:
        future.exception()  # waits
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
            raise LostError(item, "its tokens are not those of its key")
    # logits outlive the other tensors, which may lie in the same buffer
    return LoadedPrefix(tokens, tuple(runs), tensors, None if logits is None else logits.clone())


def read_item(store: TierStore, validator: ItemValidator, item: StoredItem) -> dict[str, Any]:
    """Reads and checks an item. Raises LostError if it cannot be used; OSError and MemoryError say nothing of it."""
    try:
        tensors = dict(store.read(item, validator.most(item)))
        reason = validator.refuse(item, tensors, store.trusted)
    except (OSError, MemoryError):
        raise
    except Exception as error:
        raise LostError(item, error) from error
    if reason:
        raise LostError(item, reason)
    return tensors
