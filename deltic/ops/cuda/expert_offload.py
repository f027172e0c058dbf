"""Experts in GPU memory and in pinned host memory, which kernels read over PCIe.

A kernel finds each expert by a pointer. A step therefore has the same kernels, the same graph and the same bits with
any number of experts on the card. Between steps, a second stream copies often used experts to free places on the card.
Then the pointers of these experts and of the replaced ones are updated. For small batches, host threads may compute a
share of the experts that are not on the card (kernels/beside.cuh). `PinnedExpertStore` holds bfloat16 experts,
`TileStore` quantized ones.
"""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import mul
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltic.errors import ModelError
from deltic.ops.cpu.experts import MAX_TOKENS, OffloadedExperts
from deltic.ops.cuda.driver import tensor_map
from deltic.ops.cuda.layout import BOX_COLUMNS, BOX_ROWS
from deltic.ops.cuda.quantized import TILE_ROWS, WEIGHTS_PER_PIECE, Tiles, pack_tiles, tiles_form
from deltic.ops.memory import reserve
from deltic.ops.quantized import PackedForm, read_from
from deltic.ops.stored import ExpertStatistics
from deltic.ops.types import ExpertPool, Weight

EXPERT_MATRICES = ("gate", "up", "down")
"""The matrices of an expert, as in the names of the tensors with a layer's experts."""
HOST_TIMEOUT = 5.0
"""Seconds that the card waits for the host. After a timeout the tokens become NaN, which fails their requests. A card
that waited forever would have to be reset."""
_HALF_LIFE = 512
"""Steps after which a use of an expert counts half in its score."""
_MIN_RATIO, _MIN_GAIN = 1.25, 2.0
"""An expert replaces another if its score exceeds the other's times this ratio, plus this gain."""
_SPARE_PLACES = 8
"""Places on the card to which experts can be copied at the same time."""
_ALIGNMENT = 128
"""Alignment of the parts of a place, in bytes."""
_STATE_WORDS = 4
"""int32 words of the card's own state. One word per token follows them."""


class Exchange(NamedTuple):
    """An expert of a layer that comes to the card, and the expert that leaves the card for it."""

    layer: int
    comes: int
    leaves: int


class Residency:
    """Decides which experts are on the card, with the same number for each layer. Does not access the card.

    Uses numpy, because torch would wake all its threads for these few numbers and take cores from computing threads.

    resident [layers, E] bool: the expert is on the card. places [layers, E] int64: its place there, or -1.
    scores [layers, E] float32: number of recent uses of each expert, decaying over time.
    hits, misses: number of uses of experts that were, or were not, on the card, by layer.
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
        """Assigns places to the `slots` experts of each layer with the highest scores; among equals, the first ones."""
        if scores is not None:
            self.scores[:] = scores
        for layer, own in enumerate(self.scores):
            order = np.argsort(-own, kind="stable")[:slots]
            self.places[layer, order] = layer * slots + np.arange(slots)
            self.resident[layer, order] = True

    def learn(self, wanted: NDArray[np.int64]) -> list[int]:
        """Updates the scores. Returns the new misses by layer. wanted [layers, E]: all uses of each expert so far."""
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
        """Returns the exchanges that pay, best first: at most `most`, and at most one per layer."""
        worst = np.where(self.resident, self.scores, np.inf)
        best = np.where(self.resident, -1.0, self.scores)
        leaves, comes, layers = worst.argmin(1), best.argmax(1), np.arange(len(worst))
        gain = best[layers, comes] - worst[layers, leaves] * _MIN_RATIO - _MIN_GAIN
        order = np.argsort(-gain, kind="stable")[:most]
        return [Exchange(int(layer), int(comes[layer]), int(leaves[layer])) for layer in order if gain[layer] > 0]

    def exchange(self, one: Exchange, place: int) -> int:
        """Records that an expert was copied to a place. Returns the place that becomes free."""
        layer, comes, leaves = one
        free = int(self.places[layer, leaves])
        self.places[layer, comes], self.places[layer, leaves] = place, -1
        self.resident[layer, comes], self.resident[layer, leaves] = True, False
        return free


class HostExperts:
    """The mailbox of the host's expert threads, as members of the kernels' structs.

    request: members of `AskHostArgs`. answer: members of `AddHostArgs`.
    """

    def __init__(self, cpu_experts: OffloadedExperts, device: torch.device, timeout: float | None = None) -> None:
        """Create this after the host's own last request, because the card continues to count from there. timeout:
        seconds; None: `HOST_TIMEOUT`."""
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
        """Returns the number of experts computed for the card, each counted once per request. Thread-safe."""
        return self.cpu_experts.computed() - self._before[0]

    def computing(self) -> float:
        """Returns the seconds spent on computing experts for the card. Thread-safe."""
        return self.cpu_experts.computing() - self._before[1]


class ExpertTables:
    """The pointers of all layers' experts, in GPU memory.

    parts: for each part of an entry, [layers, E + 1, words] int64; the last entry of a layer is the shared expert's.
    """

    def __init__(self, layers: int, count: int, words: Sequence[int], device: torch.device) -> None:
        """words: number of int64 words of each part of an entry."""
        self.parts = [torch.zeros(layers, count + 1, width, dtype=torch.int64, device=device) for width in words]

    def write(self, cells: NDArray[np.int64], entries: NDArray[np.int64]) -> None:
        """Writes entries [n, words of all parts] to cells [n], layer * (E + 1) + expert, in the stream of the steps."""
        numbers = torch.from_numpy(np.concatenate((cells[:, None], entries), 1)).pin_memory().to(
            self.parts[0].device, non_blocking=True)
        cell, *own = numbers.split([1, *(part.shape[-1] for part in self.parts)], 1)
        for part, words in zip(self.parts, own, strict=True):
            part.flatten(0, 1).index_copy_(0, cell[:, 0], words)


class GpuExpertCache(ABC):
    """The experts of a model's layers, `count` in each. Subclasses define the entries of the tables.

    expert_bytes: bytes of an expert, by layer. place_bytes: bytes of a place on the card, for an expert of any layer.
    slots: number of experts on the card, by layer. nbytes: bytes of their places.
    host: computes some of the other experts for few tokens. It requires experts of the same size in all layers.
    """

    def __init__(self, rows: Sequence[Sequence[Tensor]], words: Sequence[int], device: torch.device, refresh: int
                 ) -> None:
        """rows: the parts of each layer's experts, uint8 [E, bytes] each, in memory that the card can read. words: as
        in `ExpertTables`. refresh: steps between exchanges."""
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
        """Returns the table entries [n, words of all parts] of n experts. parts: [n, bytes] each. Each row contains, or
        begins with, a part of an expert."""

    def fill(self, slots: int, scores: Sequence[Sequence[float]] | None = None) -> None:
        """Copies the `slots` experts of each layer with the highest scores to the card; among equals, the first ones.
        Call this once, after loading."""
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
        """Measures bytes per second of copies of the first layer's experts to the card; 0 if all experts are there."""
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
        """Stops the host's threads. Call this after the last step."""
        if self.host:
            self.host.cpu_experts.close()

    def pools(self) -> list[ExpertPool]:
        """Returns an `ExpertPool` for each layer, which a model has in place of the layer's experts."""
        return [ExpertPool(self, layer, self.count, self.count * size) for layer, size in enumerate(self.expert_bytes)]

    def begin_step(self) -> None:
        """Publishes the pointers of copied experts, reads the counts of earlier steps, and starts copies of experts
        that are used more often. Never waits. Call this before each step."""
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
        """Returns the score of each expert, by layer: its recent uses. Call this between steps."""
        return [list(map(float, layer)) for layer in self._residency.scores.tolist()]

    def statistics(self) -> ExpertStatistics:
        """Returns the statistics, without the latest steps. Thread-safe."""
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
        """Counts the bytes that the card read for misses: all misses but those that the host computed. The host's count
        may be ahead, because it includes later steps."""
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
        """Publishes the pointers of copied experts. Steps that were launched earlier use the old pointers to their end.
        Copies to places that become free wait for these steps."""
        self._free.extend(self._residency.exchange(one, place) for one, place in self._moving)
        changed = [(one.layer, expert) for one, _ in self._moving for expert in (one.comes, one.leaves)]
        self._write(*np.array(changed).T)
        self._promotions += len(self._moving)
        self._moved_bytes += sum(self.expert_bytes[one.layer] for one, _ in self._moving)
        self._moving, self._moved = [], None

    def _write(self, layers: NDArray[np.int64], experts: NDArray[np.int64]) -> None:
        """Writes the current pointers of these experts to the card; null for experts that the host computes."""
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
        """Copies an expert to a place on the card, in the current stream."""
        for offset, part in zip(self._offsets, self._rows[layer], strict=True):
            self._pool[place, offset:offset + part.shape[1]].copy_(part[expert], non_blocking=True)


def offsets(rows: Sequence[Sequence[Tensor]]) -> tuple[list[int], int]:
    """Returns the offsets of an expert's parts in a place, and the bytes of a place. rows: as in `GpuExpertCache`."""
    starts, end = list[int](), 0
    for part in zip(*rows, strict=True):
        starts.append(end)
        end += -(-max(own.shape[1] for own in part) // _ALIGNMENT) * _ALIGNMENT
    return starts, end


def pinned(rows: int, columns: int) -> Tensor:
    """Allocates pinned host memory uint8 [rows, columns] that the card can read, without rounding up. Raises ModelError
    if the host has too little memory."""
    memory = reserve((rows, columns), torch.uint8).numpy()  # large pages, because the host may also stream it
    runtime, address = torch.cuda.cudart(), memory.ctypes.data
    if int(runtime.cudaHostRegister(address, memory.nbytes, 3)):  # 3: portable to all contexts, and mapped
        raise ModelError(f"{memory.nbytes >> 20} MiB of the host's memory for weights cannot be pinned: there is too "
                         "little, or the system allows less (ulimit -l)")
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return torch.from_numpy(memory)  # keeps the array alive


_GOLDEN_RATIO = 2654435761
"""2**32 over the golden ratio: eight bits of its multiples are spread evenly."""


@dataclass(frozen=True, slots=True)
class ExpertAddresses:
    """Addresses of the experts of a layer.

    gate, down [E + 1] int64: pointers to matrices, the shared expert's last; null if `host` computes the expert.
    gate_maps, down_maps [E + 1, 128] uint8: descriptors for the tensor memory accelerator.
    wanted [E] int64: counts the steps that used each expert; None: not counted.
    host, layer: the host's threads if they compute some experts, and the layer's number in their requests.
    """

    gate: Tensor
    down: Tensor
    gate_maps: Tensor
    down_maps: Tensor
    wanted: Tensor | None
    host: HostExperts | None = None
    layer: int = 0


class PinnedExpertStore(GpuExpertCache):
    """A store of experts in bfloat16: gate and up [size, hidden], down [hidden, size]."""

    def __init__(self, layers: int, count: int, size: int, hidden: int, device: torch.device, refresh: int) -> None:
        """refresh: steps between exchanges. Raises ModelError if the host has too little memory."""
        self.hidden, self.size = hidden, size
        rows = [pinned(count, 3 * size * hidden * 2) for _ in range(layers)]
        self._host = [own.view(torch.bfloat16) for own in rows]
        super().__init__([(own,) for own in rows], (1, 1, 16, 16), device, refresh)

    def take(self, name: str, tensor: Tensor) -> bool:
        """Stores a tensor [E, rows, columns] if its canonical name is that of a layer's experts; else returns False."""
        prefix, _, rest = name.partition(".mlp.experts.")
        if not rest or not prefix.startswith("model.layers."):
            return False
        part, size = EXPERT_MATRICES.index(rest.removesuffix("_proj.weight")), self.size * self.hidden
        for own, expert in zip(self._host[int(prefix.rpartition(".")[2])], tensor, strict=True):
            own[part * size:(part + 1) * size].copy_(expert.flatten(), non_blocking=True)
        torch.cuda.synchronize(self._device)
        return True

    @property
    def matrices(self) -> list[Tensor]:
        """Host memory of each layer, [E, 3 * size * hidden] bfloat16: gate and up [2 size, hidden], then down."""
        return self._host

    def share(self, host: HostExperts, share: float) -> None:
        """Lets the host compute a share, 0 to 1, of the experts that are not on the card, for few tokens.

        The set of experts for the host is fixed, so that a token's bits do not depend on other tokens. Call this once,
        before any step is created.
        """
        self.host = host
        self._hosted = hosted_experts(len(self._host), self.count, share)
        self._write(*np.nonzero(self._hosted))

    def addresses(self, layer: int, shared: tuple[Tensor, Tensor] | None) -> ExpertAddresses:
        """Returns a layer's addresses, which are kept up to date. shared: gate_up and down of the shared expert."""
        if shared:
            maps = [_words(tensor_map(part, rows, BOX_COLUMNS)) for part, rows in zip(shared, BOX_ROWS, strict=True)]
            self._write_shared(layer, np.concatenate((_pointers(shared), *maps)))
        gate, down, *maps_of_all = (part[layer] for part in self._tables.parts)
        gate_maps, down_maps = (part.view(torch.uint8) for part in maps_of_all)
        return ExpertAddresses(gate[:, 0], down[:, 0], gate_maps, down_maps, self._wanted[layer], self.host, layer)

    def _parts(self, expert: Tensor) -> tuple[Tensor, Tensor]:
        """Returns views of an expert's memory: gate_up [2 size, hidden] and down [hidden, size]."""
        both = 2 * self.size * self.hidden
        return expert[:both].view(-1, self.hidden), expert[both:].view(self.hidden, -1)

    def _entries(self, parts: Sequence[Tensor]) -> NDArray[np.int64]:
        """Returns [n, 2 + 2 * 16]: both pointers, then both descriptors."""
        experts = [self._parts(expert.view(torch.bfloat16)) for expert in parts[0]]
        gate, down = (_words(b"".join(tensor_map(own[index], rows, BOX_COLUMNS) for own in experts)).reshape(-1, 16)
                      for index, rows in enumerate(BOX_ROWS))
        return np.concatenate((np.stack([_pointers(own) for own in experts]), gate, down), 1)


def hosted_experts(layers: int, count: int, share: float) -> NDArray[np.bool_]:
    """Returns a mask [layers, count] of experts that the host computes if they are not on the card, spread evenly."""
    numbers = np.arange(layers * count, dtype=np.int64).reshape(layers, count)
    return (numbers * _GOLDEN_RATIO >> 24 & 0xff) < round(share * 256)


def _pointers(parts: tuple[Tensor, Tensor]) -> NDArray[np.int64]:
    return np.array([part.data_ptr() for part in parts], np.int64)


def _words(maps: bytes) -> NDArray[np.int64]:
    return np.frombuffer(maps, np.int64)


class TileAddresses(NamedTuple):
    """Addresses of the tiles of a layer's experts.

    gate, up, down [E + 1] int64: pointers, the shared expert's last.
    wanted [E] int64: counts the passes of steps that used each expert.
    """

    gate: Tensor
    up: Tensor
    down: Tensor
    wanted: Tensor


class TileStore(GpuExpertCache):
    """A store of experts as tiles: gate and up [size, hidden], down [hidden, size]. types: tile formats, by layer."""

    def __init__(self, layers: Sequence[Sequence[Sequence[Tiles]]], device: torch.device, refresh: int) -> None:
        """layers: for each layer gate, up and down of all experts, in memory that the card can read, packed by
        `pinned_form`. refresh: steps between exchanges."""
        self.size, self.hidden = layers[0][0][0].shape
        self.types = [tuple(stack[0].type for stack in stacks) for stacks in layers]
        super().__init__([[rows_of(stack) for stack in stacks] for stacks in layers], (1, 1, 1), device, refresh)

    def addresses(self, layer: int, shared: Sequence[Tiles]) -> TileAddresses:
        """Returns a layer's addresses, which are kept up to date. shared: gate, up and down of the shared expert, kept
        alive by the caller; empty: no shared expert."""
        if shared:
            self._write_shared(layer, pointers_of([matrix.data.view(1, -1) for matrix in shared])[0])
        gate, up, down = (part[layer, :, 0] for part in self._tables.parts)
        return TileAddresses(gate, up, down, self._wanted[layer])

    def _entries(self, parts: Sequence[Tensor]) -> NDArray[np.int64]:
        return pointers_of(parts)


def pinned_form(device: torch.device) -> PackedForm:
    """Returns the form of a model's weights if its experts are in pinned host memory."""
    return replace(tiles_form(device), stack=partial(pack_pinned_stack, device=device))


def pack_pinned_stack(type: str, number: int, count: int, rows: int, columns: int, row_bytes: int,
                      read: Callable[[int, int], Any], device: torch.device) -> tuple[Tiles, ...]:
    """Packs like `cuda.quantized.pack_stack` to pinned host memory. The device packs a few matrices at a time.

    rows: a multiple of 8. Raises ModelError if the host has too little memory.
    """
    memory, kind = torch.empty(0), type
    step = max(1, WEIGHTS_PER_PIECE // (rows * columns))
    for first in range(0, count, step):
        piece = pack_tiles(type, number, min(step, count - first) * rows, columns, row_bytes,
                           partial(read_from, read, first * rows * row_bytes), device)
        if first == 0:
            memory, kind = pinned(count * rows // TILE_ROWS, piece.data.shape[1]), piece.type
        begin = first * rows // TILE_ROWS
        memory[begin:begin + len(piece.data)] = piece.data
    return tuple(Tiles(kind, rows, columns, data, None) for data in memory.chunk(count))


def take_stacks(weights: dict[str, Weight], layers: int) -> list[list[tuple[Tiles, ...]]]:
    """Pops the experts of all layers from a model's weights. Returns them in the format that `TileStore` takes."""
    return [[_tiles(weights.pop(f"model.layers.{layer}.mlp.experts.{part}_proj.weight")) for part in EXPERT_MATRICES]
            for layer in range(layers)]


def _tiles(stack: Weight) -> tuple[Tiles, ...]:
    assert isinstance(stack, tuple)
    return tuple(matrix for matrix in stack if isinstance(matrix, Tiles))


def rows_of(stack: Sequence[Tiles]) -> Tensor:
    """Returns tiles as a view uint8 [E, bytes]. They must lie in one tensor at equal distances."""
    first = stack[0].data
    starts = [matrix.data.data_ptr() for matrix in stack]
    distance = starts[1] - starts[0] if len(stack) > 1 else first.numel()
    expected = list(range(starts[0], starts[0] + len(stack) * distance, distance))
    assert starts == expected, "the matrices do not lie at equal distances"
    return first.as_strided((len(stack), first.numel()), (distance, 1))


def pointers_of(parts: Sequence[Tensor]) -> NDArray[np.int64]:
    """Returns the addresses [n, parts] of the rows of tensors [n, bytes] uint8."""
    return np.stack([part.data_ptr() + np.arange(len(part), dtype=np.int64) * part.stride(0) for part in parts], 1)
