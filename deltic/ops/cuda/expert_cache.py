"""Experts of which some lie in GPU memory and the others in pinned host memory, which kernels can read."""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltic.errors import ModelError
from deltic.ops.cpu.experts import TOKENS, OffloadedExperts
from deltic.ops.memory import reserve
from deltic.ops.stored import ExpertStatistics
from deltic.ops.types import ExpertPool

_HALF_LIFE = 512
"""Steps after which it counts half that an expert was wanted."""
_MORE, _MARGIN = 1.25, 2.0
"""An expert comes to the card if it was wanted so many times as often as the one that leaves, and so much more."""


class Exchange(NamedTuple):
    """An expert of a layer that comes to the card, and the one that leaves it."""

    layer: int
    comes: int
    leaves: int


class Residency:
    """Of each layer equally many experts.

    resident [layers, E] bool: who is on the card. places [layers, E] int64: where there; -1: nowhere.
    scores [layers, E] float32: how often each was wanted lately.
    hits, misses: by layer, those wanted by steps that were on the card, and that were not.
    """

    def __init__(self, layers: int, count: int, refresh: int) -> None:
        """refresh: steps between two calls of `learn`."""
        self.resident = np.zeros((layers, count), bool)
        self.places = np.full((layers, count), -1, np.int64)
        self.scores = np.zeros((layers, count), np.float32)
        self.hits, self.misses = ([0] * layers for _ in range(2))
        self._known = np.zeros((layers, count), np.int64)
        self._decay = np.float32(0.5 ** (refresh / _HALF_LIFE))

    def begin(self, slots: int, scores: Sequence[Sequence[float]] | None) -> None:
        """Give so many experts of each layer a place, layer by layer: those with the highest scores, of equals, and
        without scores, the first."""
        if scores is not None:
            self.scores[:] = scores
        for layer, own in enumerate(self.scores):
            order = np.argsort(-own, kind="stable")[:slots]
            self.places[layer, order] = layer * slots + np.arange(slots)
            self.resident[layer, order] = True

    def learn(self, wanted: NDArray[np.int64]) -> list[int]:
        """wanted [layers, E]: the steps so far that wanted each. Returns by layer how many of those since the last call
        were not on the card."""
        fresh = wanted - self._known
        self._known = wanted.copy()
        hits, all_wanted = (fresh * self.resident).sum(1).tolist(), fresh.sum(1).tolist()
        missed = [every - hit for hit, every in zip(hits, all_wanted, strict=True)]
        for layer, (hit, miss) in enumerate(zip(hits, missed, strict=True)):
            self.hits[layer] += hit
            self.misses[layer] += miss
        self.scores = self.scores * self._decay + fresh.astype(np.float32)
        return missed

    def choose(self, most: int) -> list[Exchange]:
        """At most so many exchanges that pay, one of a layer, the best first."""
        worst = np.where(self.resident, self.scores, np.inf)
        best = np.where(self.resident, -1.0, self.scores)
        leaves, comes, layers = worst.argmin(1), best.argmax(1), np.arange(len(worst))
        gain = best[layers, comes] - worst[layers, leaves] * _MORE - _MARGIN
        order = np.argsort(-gain, kind="stable")[:most]
        return [Exchange(int(layer), int(comes[layer]), int(leaves[layer])) for layer in order if gain[layer] > 0]

    def exchange(self, one: Exchange, place: int) -> int:
        """It has come to this place; returns the one that is free."""
        layer, comes, leaves = one
        free = int(self.places[layer, leaves])
        self.places[layer, comes], self.places[layer, leaves] = place, -1
        self.resident[layer, comes], self.resident[layer, leaves] = True, False
        return free


PATIENCE = 5.0
"""Seconds that the card waits for the host. Then its tokens become NaN, an error of their requests, as a card that
waits for ever would have to be reset."""
_STATE = 4
"""Numbers that the card keeps, before those of each token."""


class HostExperts:
    """The mailbox of `beside`, as members of the kernels' structs.

    request: of `AskHostArgs`. answer: of `AddHostArgs`.
    """

    def __init__(self, beside: OffloadedExperts, device: torch.device, patience: float | None = None) -> None:
        """To be made when the host itself has asked for the last time: the card counts on from there. patience: seconds
        instead of `PATIENCE`."""
        patience = PATIENCE if patience is None else patience
        self.beside, self._before = beside, (beside.computed(), beside.computing())
        state = torch.zeros(_STATE + TOKENS, dtype=torch.int32)
        state[0] = beside.words[0][0]
        self._state = state.to(device)
        request, answer = beside.words
        self.request: dict[str, object] = {
            "state": self._state, "request": request, "answer": answer, "counts": beside.counts,
            "experts": beside.experts, "shares": beside.shares, "factors": beside.factors, "input": beside.input}
        self.answer: dict[str, object] = {"state": self._state, "answer": answer, "sums": beside.sums,
                                          "limit": round(patience * 1e9)}

    def computed(self) -> int:
        """Experts that were computed for the card, each once for a request. For any thread."""
        return self.beside.computed() - self._before[0]

    def computing(self) -> float:
        """Seconds that these took. For any thread."""
        return self.beside.computing() - self._before[1]


STACKS = ("gate", "up", "down")
"""The matrices of an expert, as tensors that have those of all experts of a layer are named."""
_SPARE = 8
"""Places that experts can be on their way to at a time."""
_ALIGNMENT = 128
"""Bytes, of the parts of a place."""


class Tables:
    """Where the experts of all layers lie, in the card's memory. parts: of each part of an expert's entry
    [layers, E + 1, its words] int64; behind the experts of a layer is the shared one."""

    def __init__(self, layers: int, count: int, words: Sequence[int], device: torch.device) -> None:
        """words: of each part of an entry."""
        self.parts = [torch.zeros(layers, count + 1, width, dtype=torch.int64, device=device) for width in words]

    def write(self, cells: NDArray[np.int64], entries: NDArray[np.int64]) -> None:
        """The entries [n, words of all parts] of these cells, layer * (E + 1) + expert, in the stream of steps: one
        copy."""
        numbers = torch.from_numpy(np.concatenate((cells[:, None], entries), 1)).pin_memory().to(
            self.parts[0].device, non_blocking=True)
        cell, *own = numbers.split([1, *(part.shape[-1] for part in self.parts)], 1)
        for part, words in zip(self.parts, own, strict=True):
            part.flatten(0, 1).index_copy_(0, cell[:, 0], words)


class GpuExpertCache(ABC):
    """The experts of a model's layers, `count` in each. What an entry of the tables is, who derives from it says.

    expert_bytes: what an expert of each layer takes. place_bytes: what a place on the card takes, for one of any layer.
    slots: how many of each layer are on the card. nbytes: what these take.
    host: who computes some of the others, for few tokens; only where all experts take equally much.
    """

    def __init__(self, rows: Sequence[Sequence[Tensor]], words: Sequence[int], device: torch.device, refresh: int
                 ) -> None:
        """rows: of each layer the parts of experts that lie one behind another, uint8 [E, bytes] each, which the card
        can read. words: as of `Tables`. refresh: of so many steps one may exchange experts."""
        layers, count = len(rows), len(rows[0][0])
        self.count, self.nbytes = count, 0
        self.expert_bytes = tuple(sum(part.shape[1] for part in parts) for parts in rows)
        self._offsets, self.place_bytes = offsets(rows)
        self.slots: tuple[int, ...] = ()
        self.host: HostExperts | None = None
        self._device, self._refresh, self._steps = device, refresh, 0
        self._rows = rows
        self._tables = Tables(layers, count, words, device)
        self._residency = Residency(layers, count, refresh)
        self._wanted = torch.zeros(layers, count, dtype=torch.int64, device=device)
        self._seen = torch.zeros(layers, count, dtype=torch.int64).pin_memory()
        self._hosted = np.zeros((layers, count), bool)
        self._computed = self._ahead = 0
        self._moved_bytes = self._promotions = self._refreshes = 0
        self._copying = torch.cuda.Stream(device)
        self._counted: torch.cuda.Event | None = None
        self._moved: torch.cuda.Event | None = None
        self._moving: list[tuple[Exchange, int]] = []
        self._free = deque[int]()
        self._pool = torch.empty(0)

    @abstractmethod
    def _entries(self, parts: Sequence[Tensor]) -> NDArray[np.int64]:
        """[n, words of all parts]: of `Tables`, of n experts whose parts lie in the rows of these, [n, bytes] each, or
        where these begin."""

    def fill(self, slots: int, scores: Sequence[Sequence[float]] | None = None) -> None:
        """Bring so many experts of each layer to the card: those with the highest scores, of equals, and without
        scores, the first. To be called once, when all of them are here."""
        layers = len(self._rows)
        self.slots = (slots,) * layers
        self.nbytes = slots * layers * self.place_bytes
        spare = _SPARE if slots < self.count else 0
        self._pool = torch.empty(slots * layers + spare, self.place_bytes, dtype=torch.uint8, device=self._device)
        self._free.extend(range(slots * layers, len(self._pool)))
        self._residency.begin(slots, scores)
        self._host_entries = np.stack([self._entries(parts) for parts in self._rows])
        self._place_entries = self._entries([self._pool[:, offset:] for offset in self._offsets])
        for layer, places in enumerate(self._residency.places):
            for expert in np.flatnonzero(places >= 0).tolist():
                self._bring(layer, expert, int(places[expert]))
        self._write(*np.nonzero(self._residency.resident | True))

    def copy_rate(self) -> float:
        """Bytes a second at which experts of the first layer come to the card by plain copies. 0 if all are there."""
        if not self._free:
            return 0.0
        seconds = 0.0
        for _ in range(2):  # the first time the copy engine gets ready
            torch.cuda.synchronize(self._device)
            began = time.perf_counter()
            for expert in range(self.count):
                self._bring(0, expert, self._free[expert % len(self._free)])
            torch.cuda.synchronize(self._device)
            seconds = time.perf_counter() - began
        return self.count * self.expert_bytes[0] / seconds

    def close(self) -> None:
        """After the last step."""
        if self.host:
            self.host.beside.close()

    def pools(self) -> list[ExpertPool]:
        """What stands for the experts of each layer."""
        return [ExpertPool(self, layer, self.count, self.count * each) for layer, each in enumerate(self.expert_bytes)]

    def begin_step(self) -> None:
        """Before a step: what was copied gets its pointers, what earlier steps wanted is looked at, and what is wanted
        more often than others is copied. Waits for nothing."""
        self._steps += 1
        if self.host:
            self.host.beside.wake()
        if self._moved and self._moved.query():
            self._exchange()
        if self._counted and self._counted.query():
            self._learn()
        if self._counted is None and self._steps % self._refresh == 0 and self._free:
            with torch.cuda.device(self._device):
                self._seen.copy_(self._wanted, non_blocking=True)
                self._counted = torch.cuda.Event()
                self._counted.record()

    def scores(self) -> list[list[float]]:
        """By layer, how often each expert was wanted lately. Between steps."""
        return [list(map(float, layer)) for layer in self._residency.scores.tolist()]

    def statistics(self) -> ExpertStatistics:
        """For any thread. What the last steps wanted is not known yet."""
        of, computed = self._residency, self.host.computed() if self.host else 0
        return ExpertStatistics(tuple(of.hits), tuple(of.misses), self._moved_bytes, self._promotions, self._refreshes,
                                0, 0, 0.0, 0.0, computed, computed * self.expert_bytes[0],
                                self.host.computing() if self.host else 0.0)

    def _learn(self) -> None:
        self._counted = None
        self._count_read(self._residency.learn(self._seen.numpy()))
        self._refreshes += 1
        if self._moved is None:
            self._promote()

    def _count_read(self, missed: Sequence[int]) -> None:
        """Of each layer's misses that came to be known those that the card has read: all that the host did not compute,
        which is known of later steps, too."""
        computed = self.host.computed() if self.host else 0
        self._ahead += computed - self._computed
        self._computed = computed
        own = min(self._ahead, sum(missed))
        self._ahead -= own
        self._moved_bytes += sum(map(mul, missed, self.expert_bytes)) - own * self.expert_bytes[0]

    def _promote(self) -> None:
        chosen = self._residency.choose(len(self._free))
        if not chosen:
            return
        with torch.cuda.device(self._device):
            self._copying.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._copying):
                for exchange in chosen:
                    place = self._free.popleft()
                    self._bring(exchange.layer, exchange.comes, place)
                    self._moving.append((exchange, place))
                self._moved = torch.cuda.Event()
                self._moved.record()

    def _exchange(self) -> None:
        """Pointers to what was copied; steps that were launched before read the others to their end, and who copies to
        a place that becomes free waits for them."""
        self._free.extend(self._residency.exchange(one, place) for one, place in self._moving)
        changed = [(one.layer, expert) for one, _ in self._moving for expert in (one.comes, one.leaves)]
        self._write(*np.array(changed).T)
        self._promotions += len(self._moving)
        self._moved_bytes += sum(self.expert_bytes[one.layer] for one, _ in self._moving)
        self._moving, self._moved = [], None

    def _write(self, layers: NDArray[np.int64], experts: NDArray[np.int64]) -> None:
        """Tell the card where these experts lie now."""
        place = self._residency.places[layers, experts]
        entries = np.where(place[:, None] >= 0, self._place_entries[place], self._host_entries[layers, experts])
        if self.host:
            entries[(place < 0) & self._hosted[layers, experts], :2] = 0
        with torch.cuda.device(self._device):
            self._tables.write(layers * (self.count + 1) + experts, entries)

    def _write_shared(self, layer: int, entry: NDArray[np.int64]) -> None:
        """Where the shared expert of a layer lies: for good."""
        self._tables.write(np.array([layer * (self.count + 1) + self.count]), entry[None])

    def _bring(self, layer: int, expert: int, place: int) -> None:
        """Copy it, in the current stream."""
        for offset, part in zip(self._offsets, self._rows[layer], strict=True):
            self._pool[place, offset:offset + part.shape[1]].copy_(part[expert], non_blocking=True)


def offsets(rows: Sequence[Sequence[Tensor]]) -> tuple[list[int], int]:
    """Where the parts of an expert begin in a place that has room for one of any layer, and the bytes of a place. rows:
    as of `GpuExpertCache`."""
    found, end = list[int](), 0
    for part in zip(*rows, strict=True):
        found.append(end)
        end += -(-max(own.shape[1] for own in part) // _ALIGNMENT) * _ALIGNMENT
    return found, end


def pinned(rows: int, columns: int) -> Tensor:
    """uint8 [rows, columns] of the host, which the card reads; no more memory than that. ModelError if the host has no
    room for it."""
    memory = reserve((rows, columns), torch.uint8).numpy()  # large pages: the host may stream it, too
    runtime, address = torch.cuda.cudart(), memory.ctypes.data
    if int(runtime.cudaHostRegister(address, memory.nbytes, 3)):  # for all contexts, and mapped
        raise ModelError(f"{memory.nbytes >> 20} MiB of the host's memory for experts cannot be pinned: there is too "
                         "little, or the system allows less (ulimit -l)")
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return torch.from_numpy(memory)  # what is made of it has the array, too
