"""Experts of which some lie in GPU memory and the others in pinned host memory, which kernels read over PCIe.

A kernel finds an expert by a pointer, wherever it lies: a step is the same kernels in the same graph with the same
bits, however many experts are on the card. Between steps, a second stream copies often wanted experts to free places on
the card; then their pointers are exchanged with those of the experts that leave. Of the experts that are not on the
card, threads of the host may compute a share for small batches (kernels/beside.cuh).
"""

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
from deltic.ops.cpu.experts import MAX_TOKENS, OffloadedExperts
from deltic.ops.memory import reserve
from deltic.ops.stored import ExpertStatistics
from deltic.ops.types import ExpertPool

EXPERT_MATRICES = ("gate", "up", "down")
"""The matrices of an expert, as in the names of tensors that hold those of a layer."""
HOST_TIMEOUT = 5.0
"""Seconds for which the card waits for the host. Then the tokens become NaN, which fails their requests; a card that
waited for ever would have to be reset."""
_HALF_LIFE = 512
"""Steps after which a use of an expert counts half."""
_MIN_RATIO, _MIN_GAIN = 1.25, 2.0
"""An expert replaces another if its score exceeds the other's times this ratio, plus this gain."""
_SPARE_PLACES = 8
"""Places on the card to which experts can be copied at the same time."""
_ALIGNMENT = 128
"""Bytes, of the parts of a place."""
_STATE_WORDS = 4
"""int32 words of the card's own state, before one for each token."""


class Exchange(NamedTuple):
    """An expert of a layer that comes to the card, and the one that leaves it."""

    layer: int
    comes: int
    leaves: int


class Residency:
    """Decides which experts are on the card; equally many of each layer. Host only.

    Uses numpy: for these few numbers torch would wake all its threads, which would take cores from those that compute.

    resident [layers, E] bool: on the card. places [layers, E] int64: place there, or -1.
    scores [layers, E] float32: how often each expert was wanted lately.
    hits, misses: uses of experts that were, or were not, on the card, by layer.
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
        """Gives `slots` experts of each layer a place: those with the highest scores; among equals, the first."""
        if scores is not None:
            self.scores[:] = scores
        for layer, own in enumerate(self.scores):
            order = np.argsort(-own, kind="stable")[:slots]
            self.places[layer, order] = layer * slots + np.arange(slots)
            self.resident[layer, order] = True

    def learn(self, wanted: NDArray[np.int64]) -> list[int]:
        """Updates the scores. wanted [layers, E]: uses of each expert so far. Returns the new misses by layer."""
        fresh = wanted - self._known
        self._known = wanted.copy()
        hits, uses = (fresh * self.resident).sum(1).tolist(), fresh.sum(1).tolist()
        missed = [use - hit for hit, use in zip(hits, uses, strict=True)]
        for layer, (hit, miss) in enumerate(zip(hits, missed, strict=True)):
            self.hits[layer] += hit
            self.misses[layer] += miss
        self.scores = self.scores * self._decay + fresh.astype(np.float32)
        return missed

    def choose(self, most: int) -> list[Exchange]:
        """Returns at most so many exchanges that pay, one of a layer, the best first."""
        worst = np.where(self.resident, self.scores, np.inf)
        best = np.where(self.resident, -1.0, self.scores)
        leaves, comes, layers = worst.argmin(1), best.argmax(1), np.arange(len(worst))
        gain = best[layers, comes] - worst[layers, leaves] * _MIN_RATIO - _MIN_GAIN
        order = np.argsort(-gain, kind="stable")[:most]
        return [Exchange(int(layer), int(comes[layer]), int(leaves[layer])) for layer in order if gain[layer] > 0]

    def exchange(self, one: Exchange, place: int) -> int:
        """Records that an expert was copied to this place; returns the place that becomes free."""
        layer, comes, leaves = one
        free = int(self.places[layer, leaves])
        self.places[layer, comes], self.places[layer, leaves] = place, -1
        self.resident[layer, comes], self.resident[layer, leaves] = True, False
        return free


class HostExperts:
    """The mailbox of the host's expert threads, as members of the kernels' structs.

    request: of `AskHostArgs`. answer: of `AddHostArgs`.
    """

    def __init__(self, cpu_experts: OffloadedExperts, device: torch.device, timeout: float | None = None) -> None:
        """Make it after the host's own last request: the card counts on from there. timeout: instead of
        `HOST_TIMEOUT`."""
        timeout = HOST_TIMEOUT if timeout is None else timeout
        self.cpu_experts = cpu_experts
        self._before = cpu_experts.computed(), cpu_experts.computing()
        request, answer = cpu_experts.words
        state = torch.zeros(_STATE_WORDS + MAX_TOKENS, dtype=torch.int32)
        state[0] = request[0]
        self._state = state.to(device)
        self.request: dict[str, object] = {
            "state": self._state, "request": request, "answer": answer, "counts": cpu_experts.counts,
            "experts": cpu_experts.experts, "shares": cpu_experts.shares, "factors": cpu_experts.factors,
            "input": cpu_experts.input}
        self.answer: dict[str, object] = {
            "state": self._state, "answer": answer, "sums": cpu_experts.sums, "limit": round(timeout * 1e9)}

    def computed(self) -> int:
        """Experts computed for the card, each once for a request. Thread-safe."""
        return self.cpu_experts.computed() - self._before[0]

    def computing(self) -> float:
        """Seconds spent on them. Thread-safe."""
        return self.cpu_experts.computing() - self._before[1]


class ExpertTables:
    """The pointers of all layers' experts, in GPU memory.

    parts: for each part of an entry, [layers, E + 1, words] int64; the last entry of a layer is the shared expert's.
    """

    def __init__(self, layers: int, count: int, words: Sequence[int], device: torch.device) -> None:
        """words: of each part of an entry."""
        self.parts = [torch.zeros(layers, count + 1, width, dtype=torch.int64, device=device) for width in words]

    def write(self, cells: NDArray[np.int64], entries: NDArray[np.int64]) -> None:
        """Writes entries [n, words of all parts] to cells [n], layer * (E + 1) + expert, in the stream of steps."""
        numbers = torch.from_numpy(np.concatenate((cells[:, None], entries), 1)).pin_memory().to(
            self.parts[0].device, non_blocking=True)
        cell, *own = numbers.split([1, *(part.shape[-1] for part in self.parts)], 1)
        for part, words in zip(self.parts, own, strict=True):
            part.flatten(0, 1).index_copy_(0, cell[:, 0], words)


class GpuExpertCache(ABC):
    """The experts of a model's layers, `count` in each. Subclasses define the entries of the tables.

    expert_bytes: of an expert, by layer. place_bytes: of a place on the card, which fits an expert of any layer.
    slots: experts of each layer on the card. nbytes: of these.
    host: computes some of the others for few tokens; only if all layers' experts have the same size.
    """

    def __init__(self, rows: Sequence[Sequence[Tensor]], words: Sequence[int], device: torch.device, refresh: int
                 ) -> None:
        """rows: for each layer the parts of its experts, uint8 [E, bytes] each, in memory that the card can read.
        words: as in `ExpertTables`. refresh: steps between exchanges."""
        layers, count = len(rows), len(rows[0][0])
        self.count, self.nbytes = count, 0
        self.expert_bytes = tuple(sum(part.shape[1] for part in parts) for parts in rows)
        self._offsets, self.place_bytes = offsets(rows)
        self.slots: tuple[int, ...] = ()
        self.host: HostExperts | None = None
        self._device, self._refresh, self._steps = device, refresh, 0
        self._rows = rows
        self._tables = ExpertTables(layers, count, words, device)
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
        """Returns the table entries [n, words of all parts] of n experts. parts: each [n, bytes]; the rows hold, or
        begin with, the parts of the experts."""

    def fill(self, slots: int, scores: Sequence[Sequence[float]] | None = None) -> None:
        """Copies `slots` experts of each layer to the card: those with the highest scores; among equals, the first.
        Call it once, after loading."""
        layers = len(self._rows)
        self.slots = (slots,) * layers
        self.nbytes = slots * layers * self.place_bytes
        spare = _SPARE_PLACES if slots < self.count else 0
        self._pool = torch.empty(slots * layers + spare, self.place_bytes, dtype=torch.uint8, device=self._device)
        self._free.extend(range(slots * layers, len(self._pool)))
        self._residency.begin(slots, scores)
        self._host_entries = np.stack([self._entries(parts) for parts in self._rows])
        self._place_entries = self._entries([self._pool[:, offset:] for offset in self._offsets])
        for layer, places in enumerate(self._residency.places):
            for expert in np.flatnonzero(places >= 0).tolist():
                self._copy_to_card(layer, expert, int(places[expert]))
        self._write(*np.nonzero(self._residency.resident | True))

    def copy_rate(self) -> float:
        """Measures bytes a second of plain copies of the first layer's experts to the card; 0 if all are there."""
        if not self._free:
            return 0.0
        seconds = 0.0
        for _ in range(2):  # the first pass warms up the copy engine
            torch.cuda.synchronize(self._device)
            began = time.perf_counter()
            for expert in range(self.count):
                self._copy_to_card(0, expert, self._free[expert % len(self._free)])
            torch.cuda.synchronize(self._device)
            seconds = time.perf_counter() - began
        return self.count * self.expert_bytes[0] / seconds

    def close(self) -> None:
        """Stops the host's threads. Call it after the last step."""
        if self.host:
            self.host.cpu_experts.close()

    def pools(self) -> list[ExpertPool]:
        """Returns what a model has in place of each layer's experts."""
        return [ExpertPool(self, layer, self.count, self.count * size) for layer, size in enumerate(self.expert_bytes)]

    def begin_step(self) -> None:
        """Call it before each step. Publishes pointers of copied experts, reads the counts of earlier steps, and starts
        copies of experts that are wanted more often. Never waits."""
        self._steps += 1
        if self.host:
            self.host.cpu_experts.wake()
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
        """How often each expert was wanted lately, by layer. Call it between steps."""
        return [list(map(float, layer)) for layer in self._residency.scores.tolist()]

    def statistics(self) -> ExpertStatistics:
        """Thread-safe. The last steps are not counted yet."""
        residency, computed = self._residency, self.host.computed() if self.host else 0
        return ExpertStatistics(
            hits=tuple(residency.hits),
            misses=tuple(residency.misses),
            bytes=self._moved_bytes,
            promotions=self._promotions,
            refreshes=self._refreshes,
            predicted=0,
            useful=0,
            waited=0.0,
            reading=0.0,
            computed=computed,
            computed_bytes=computed * self.expert_bytes[0],
            computing=self.host.computing() if self.host else 0.0,
        )

    def _learn(self) -> None:
        self._counted = None
        self._count_reads(self._residency.learn(self._seen.numpy()))
        self._refreshes += 1
        if self._moved is None:
            self._promote()

    def _count_reads(self, missed: Sequence[int]) -> None:
        """Counts the bytes of misses that the card has read, which are those that the host did not compute. The host's
        count may be ahead: it includes later steps."""
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
                    self._copy_to_card(exchange.layer, exchange.comes, place)
                    self._moving.append((exchange, place))
                self._moved = torch.cuda.Event()
                self._moved.record()

    def _exchange(self) -> None:
        """Publishes pointers of copied experts. Steps launched before read the old ones to their end; copies to places
        that become free wait for them."""
        self._free.extend(self._residency.exchange(one, place) for one, place in self._moving)
        changed = [(one.layer, expert) for one, _ in self._moving for expert in (one.comes, one.leaves)]
        self._write(*np.array(changed).T)
        self._promotions += len(self._moving)
        self._moved_bytes += sum(self.expert_bytes[one.layer] for one, _ in self._moving)
        self._moving, self._moved = [], None

    def _write(self, layers: NDArray[np.int64], experts: NDArray[np.int64]) -> None:
        """Writes the current pointers of these experts to the card; null for those that the host computes."""
        place = self._residency.places[layers, experts]
        entries = np.where(place[:, None] >= 0, self._place_entries[place], self._host_entries[layers, experts])
        if self.host:
            entries[(place < 0) & self._hosted[layers, experts], :2] = 0
        with torch.cuda.device(self._device):
            self._tables.write(layers * (self.count + 1) + experts, entries)

    def _write_shared(self, layer: int, entry: NDArray[np.int64]) -> None:
        """Writes the pointers of a layer's shared expert, which never moves."""
        self._tables.write(np.array([layer * (self.count + 1) + self.count]), entry[None])

    def _copy_to_card(self, layer: int, expert: int, place: int) -> None:
        """Copies an expert in the current stream."""
        for offset, part in zip(self._offsets, self._rows[layer], strict=True):
            self._pool[place, offset:offset + part.shape[1]].copy_(part[expert], non_blocking=True)


def offsets(rows: Sequence[Sequence[Tensor]]) -> tuple[list[int], int]:
    """Returns where the parts of an expert begin in a place, and the bytes of a place. rows: as in `GpuExpertCache`."""
    starts, end = list[int](), 0
    for part in zip(*rows, strict=True):
        starts.append(end)
        end += -(-max(own.shape[1] for own in part) // _ALIGNMENT) * _ALIGNMENT
    return starts, end


def pinned(rows: int, columns: int) -> Tensor:
    """Allocates uint8 [rows, columns] of host memory that the card can read, without rounding up. ModelError if the
    host has no room."""
    memory = reserve((rows, columns), torch.uint8).numpy()  # large pages: the host may stream it too
    runtime, address = torch.cuda.cudart(), memory.ctypes.data
    if int(runtime.cudaHostRegister(address, memory.nbytes, 3)):  # for all contexts, and mapped
        raise ModelError(f"{memory.nbytes >> 20} MiB of the host's memory for experts cannot be pinned: there is too "
                         "little, or the system allows less (ulimit -l)")
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return torch.from_numpy(memory)  # keeps the array alive
