"""The tiers below the pools, as the accounts see them: what is inserted into the prefix tree is offered to them, and
comes back from the one that knows most of a prompt. No tensors: what comes is looked at by nobody but the pools."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deltic.cache.offload.prefix_items import (
    ANYTHING,
    ItemValidator,
    LoadedPrefix,
    LostError,
    PrefixEntry,
    PrefixSource,
)

if TYPE_CHECKING:
    from deltic.cache.offload.index import TierIndex

log = logging.getLogger("deltic")


@dataclass(frozen=True, slots=True, eq=False)
class StoreRequest:
    """A prefix for the tiers, named by a `StoreItem`. logits: those of its last token, if known."""

    tokens: Sequence[int]
    logits: Any
    tiers: Sequence[TierIndex]

    def make(self, source: PrefixSource) -> None:
        """Have the tiers take what they want of it."""
        for tier in self.tiers:
            tier.offer(source)


@dataclass(slots=True, eq=False)
class LoadRequest:
    """What the tiers bring for one prompt beyond what the tree knows. `poll` until it is true; then `loaded` holds
    it, if there was anything. validator: what may come in. begun: a tier reads, or has read, for it."""

    tokens: Sequence[int]
    above: int
    tiers: Sequence[TierIndex]
    validator: ItemValidator = ANYTHING
    loaded: LoadedPrefix | None = None
    tier: TierIndex | None = None
    _reading: Future[LoadedPrefix] | None = None
    _found: bool = False
    _over: bool = False

    @property
    def begun(self) -> bool:
        return self._reading is not None or self.loaded is not None

    def poll(self, begin: bool = True) -> bool:
        """Whether all has come that will. What cannot be read is replaced by the next best. begin: a tier that has
        something may begin to read it."""
        while not self._over:
            if self._reading is None and self._found and not begin:
                return False
            if self._reading is None:
                self._start(begin)
            elif not self._reading.done():
                return False
            else:
                self._finish(self._reading)
        return True

    def wait(self, seconds: float) -> None:
        """Sleep until there is news, at most so long."""
        if self._reading is not None:
            wait([self._reading], seconds)

    def _start(self, begin: bool) -> None:
        best: tuple[TierIndex, PrefixEntry] | None = None
        for tier in self.tiers:
            entry = tier.find(self.tokens, best[1].done if best else self.above)
            best = (tier, entry) if entry else best
        self._over, self._found = best is None, best is not None
        if best and begin:
            self.tier, self._reading = best[0], best[0].fetch(best[1], self.validator)

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
            self._over = True
            return
        self.loaded = loaded if loaded.tokens == array("q", self.tokens[:loaded.done]) else None
        self._over = True


NOTHING = LoadRequest((), 0, ())
