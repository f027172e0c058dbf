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
    """A receiver of prefixes: a tier, or a writer of files."""

    def offer(self, source: PrefixSource) -> None:
        """Copies a prefix from the pools if it wants it."""


@dataclass(frozen=True, slots=True, eq=False)
class StoreRequest:
    """The prefix that a `StoreItem` refers to. logits: logits after its last token, if known."""

    tokens: Sequence[int]
    logits: Any
    tiers: Sequence[PrefixTarget]

    def make(self, source: PrefixSource) -> None:
        for tier in self.tiers:
            tier.offer(source)


@dataclass(slots=True, eq=False)
class LoadRequest:
    """Loads the longest prefix of a prompt with more than `above` tokens. The caller polls it until it is finished;
    then `loaded` is the prefix, if a tier had one, and `tier` its source. begun: True if a tier reads or has read."""

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
        """Advances the request; returns True if it is finished. If a prefix cannot be read, the next best one is tried.
        begin: False if no tier may begin to read now."""
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
        """Sleeps until the tier has finished reading, for at most `seconds`."""
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
    """Reads a prefix after waiting for its items to be written. Raises LostError with the item that cannot be used.
    read: as `read_item`. writing: the writes to wait for."""
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
    # a copy of the logits, because they outlive the other tensors in the same buffer
    return LoadedPrefix(tokens, tuple(runs), tensors, None if logits is None else logits.clone())


def read_item(store: TierStore, validator: ItemValidator, item: StoredItem) -> dict[str, Any]:
    """Reads and checks an item. Raises LostError if it cannot be used; OSError and MemoryError do not imply that."""
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
