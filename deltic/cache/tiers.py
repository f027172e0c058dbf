"""The tiers below the pools: what is inserted into the prefix tree is offered to them, and comes back from the one
that knows most of a prompt."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

import torch
from torch import Tensor

from deltic.cache.medium import Item
from deltic.cache.prefix import ANYTHING, Door, Entry, Loaded, LostError, Source, Tensors
from deltic.cache.shelf import Shelf
from deltic.cache.storage import Storage
from deltic.errors import show
from deltic.types import PAGE

log = logging.getLogger("deltic")

_LARGEST_VOCABULARY = 1 << 22
_Looks = tuple[torch.dtype, tuple[int, ...] | None]
"""Dtype and shape of a tensor; None: any shape."""


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
    it, if there was anything. door: what may come in."""

    tokens: Sequence[int]
    above: int
    shelves: Sequence[Shelf]
    door: Door = ANYTHING
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
            self.shelf, self._reading = best[0], best[0].fetch(best[1], self.door)

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


@dataclass(frozen=True, slots=True, eq=False)
class PoolDoor:
    """Lets in what could have come from these pools: names, shapes, dtypes, and numbers that a sound model gives."""

    storage: Storage

    def most(self, item: Item) -> int:
        """The bytes that the item's tensors can have."""
        if item.kind == "kv":
            return max(item.done - item.start, 0) * (self.storage.cost[0] + torch.int64.itemsize)
        return self.storage.cost[1] + (self.storage.vocabulary or _LARGEST_VOCABULARY) * torch.float32.itemsize

    def refuse(self, item: Item, tensors: Tensors) -> str:
        """Why these are not the item's tensors; empty if they may be."""
        expected = self._run(item) if item.kind == "kv" else self._state(item)
        if set(tensors) != set(expected):
            return f"it has {show(sorted(tensors))} instead of {', '.join(sorted(expected))}"
        for name, (dtype, shape) in expected.items():
            found = tensors[name]
            if found.dtype != dtype or shape not in (None, tuple(found.shape)):
                return f"its {name} are {found.dtype} {show(list(found.shape))}"
            unused = name == "conv" and item.done < found.shape[1]  # places that nothing was written to yet
            if not unused and found.is_floating_point() and not _finite(found):
                return f"its {name} are not all finite"
        return self._nonsense(tensors)

    def _run(self, item: Item) -> dict[str, _Looks]:
        length = max(item.done - item.start, 0)
        pools = zip(("keys", "values"), self.storage.page_tensors, strict=True)
        return {"tokens": (torch.int64, (length,)),
                **{name: (pool.dtype, (len(pool), length, *pool.shape[3:])) for name, pool in pools}}

    def _state(self, item: Item) -> dict[str, _Looks]:
        looks: dict[str, _Looks] = {name: (pool.dtype, tuple(pool[:, 0].shape))
                                    for name, pool in self.storage.named_slots.items()}
        if item.kind == "final":
            vocabulary = self.storage.vocabulary
            looks["logits"] = torch.float32, None if vocabulary is None else (vocabulary,)
        return looks

    def _nonsense(self, tensors: Tensors) -> str:
        tokens, logits, vocabulary = tensors.get("tokens"), tensors.get("logits"), self.storage.vocabulary
        if vocabulary is None:
            return ""
        if tokens is not None and len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
            return "its tokens are outside of the vocabulary"
        if logits is not None and bool((logits == logits[0]).all()):
            return "its logits are all equal"
        return ""


def _finite(tensor: Tensor) -> bool:
    """Whether all of it is: in one pass, unlike `isfinite`, so that it takes less time than copying."""
    return not tensor.numel() or all(bool(bound.isfinite()) for bound in torch.aminmax(tensor))


def source_of(storage: Storage, kept: Kept) -> Source:
    """What a tier may read of a prefix in the pools, before they change."""
    return Source(kept.tokens, lambda start: _read_kv(storage, kept, start),
                  lambda: _read_state(storage, kept.slot), kept.logits, storage.cost)


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
