"""The tiers below the pools: what is inserted into the prefix tree is offered to them, and comes back from the one
that knows most of a prompt."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

import torch
from torch import Tensor

from deltic.cache.shelf import Entry, Loaded, LostError, Shelf, Source, Tensors
from deltic.cache.storage import Storage
from deltic.types import PAGE

log = logging.getLogger("deltic")


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """A prefix in the pools: its pages, the last perhaps partial, and the slot of its state."""

    tokens: Sequence[int]
    pages: Sequence[int]
    slot: int
    logits: Tensor | None


@dataclass(slots=True, eq=False)
class Fetch:
    """What the tiers bring for one prompt beyond what the tree knows. `poll` until it is true; then `loaded` holds
    it, if there was anything."""

    tokens: Sequence[int]
    above: int
    shelves: Sequence[Shelf]
    loaded: Loaded | None = None
    shelf: Shelf | None = None
    _reading: Future[Loaded] | None = None
    _over: bool = False

    def poll(self) -> bool:
        """Whether all has come that will. What cannot be read is replaced by the next best."""
        while not self._over:
            if self._reading is None:
                self._start()
            elif not self._reading.done():
                return False
            else:
                self._finish(self._reading)
        return True

    def wait(self, seconds: float) -> None:
        """Sleep until there is news, at most so long."""
        if self._reading is not None:
            wait([self._reading], seconds)

    def _start(self) -> None:
        best: tuple[Shelf, Entry] | None = None
        for shelf in self.shelves:
            entry = shelf.find(self.tokens, best[1].done if best else self.above)
            best = (shelf, entry) if entry else best
        self._over = best is None
        if best:
            self.shelf, self._reading = best[0], best[0].fetch(best[1])

    def _finish(self, reading: Future[Loaded]) -> None:
        assert self.shelf is not None
        self._reading = None
        try:
            loaded = reading.result()
        except LostError as error:
            log.warning("%s tier: %s", self.shelf.name, error)
            self.shelf.lose(error.item)
            return
        self.loaded = loaded if list(loaded.tokens) == list(self.tokens[:loaded.done]) else None
        self._over = True


NOTHING = Fetch((), 0, ())


def source_of(storage: Storage, kept: Kept) -> Source:
    """What a tier may read of a prefix in the pools, before they change."""
    return Source(kept.tokens, lambda start: _read_kv(storage, kept, start),
                  lambda: _read_state(storage, kept.slot), kept.logits)


def restore(storage: Storage, loaded: Loaded, pages: Sequence[int], known: int, slot: int) -> None:
    """Write what came from a tier into a slot, and into pages of the prefix from the token `known` on."""
    for start, tensors in loaded.runs:
        skip = max(known - start, 0)
        if skip < tensors["keys"].shape[1]:
            index = _places(storage, pages, start + skip, start + tensors["keys"].shape[1])
            for pool, name in zip(storage.page_tensors, ("keys", "values"), strict=True):
                pool.flatten(1, 2).index_copy_(1, index, tensors[name][:, skip:].to(pool.device))
    for name, pool in storage.named_slots.items():
        pool[:, slot] = loaded.state[name].to(pool.device)


def fits(storage: Storage, loaded: Loaded) -> bool:
    """Whether the tensors are of this cache's shapes and dtypes: a medium is not to be trusted."""
    runs = [tensors for _, tensors in loaded.runs]
    position = 0
    for start, tensors in loaded.runs:
        if start != position or set(tensors) != {"keys", "values"}:
            return False
        position += tensors["keys"].shape[1]
    return (position == loaded.done and set(loaded.state) == set(storage.named_slots)
            and all(_like(pool.flatten(1, 2), tensors, name) for tensors in runs
                    for pool, name in zip(storage.page_tensors, ("keys", "values"), strict=True))
            and all(pool[:, 0].shape == loaded.state[name].shape and pool.dtype == loaded.state[name].dtype
                    for name, pool in storage.named_slots.items()))


def _like(pool: Tensor, tensors: Tensors, name: str) -> bool:
    found, length = tensors[name], tensors["keys"].shape[1]
    return found.dtype == pool.dtype and found.shape == (pool.shape[0], length, *pool.shape[2:])


def _read_kv(storage: Storage, kept: Kept, start: int) -> dict[str, Tensor]:
    """keys, values [A, tokens, kv_heads, head_dim] from position `start` on."""
    index = _places(storage, kept.pages, start, len(kept.tokens))
    return {name: pool.flatten(1, 2).index_select(1, index).cpu()
            for name, pool in zip(("keys", "values"), storage.page_tensors, strict=True)}


def _read_state(storage: Storage, slot: int) -> dict[str, Tensor]:
    """recurrent [G, Hv, Dk, Dv], conv [G, conv_kernel, C]; with a draft head, hidden [1, H]."""
    return {name: pool[:, slot].to("cpu", copy=True) for name, pool in storage.named_slots.items()}


def _places(storage: Storage, pages: Sequence[int], start: int, end: int) -> Tensor:
    """Where the tokens from `start` to `end` lie in the flat pool."""
    positions = torch.arange(start, end)
    return (torch.tensor(list(pages))[positions // PAGE] * PAGE + positions % PAGE).to(storage.device)
