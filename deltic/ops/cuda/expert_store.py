"""Experts of which some lie on the card, and the others in pinned memory of the host, from where kernels read them.

A kernel finds an expert by a pointer, wherever it lies, so that a step is the same kernels in the same graph, and gives
the same bits, however many experts are on the card. Those that are wanted often come there between steps: a second
stream copies one to a free place, and then its pointer is exchanged, with that of the one whose place is free next.
A part of those that are not on the card may be the host's to compute (`share`): their pointers are null.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltic.errors import ModelError
from deltic.ops.cuda.beside import HostExperts
from deltic.ops.cuda.driver import tensor_map
from deltic.ops.cuda.layout import BOX_COLUMNS, BOX_ROWS
from deltic.ops.cuda.residency import Exchange, Residency
from deltic.ops.memory import reserve
from deltic.ops.records import ExpertPool
from deltic.ops.stored import ExpertStatistics

_SPARE = 8
"""Places that experts can be on their way to at a time."""
_STACKS = ("gate", "up", "down")
_SPREADS = 2654435761
"""Multiples of it, of which eight of the lowest 32 bits count, spread evenly: 2**32 over the golden ratio."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the experts of a layer lie. gate, down [E + 1] int64: pointers to their matrices, the last ones for the
    shared expert; null where `host` computes, if there is one, which knows the layer by its number. gate_maps,
    down_maps [E + 1, 128] uint8: how the tensor memory accelerator finds boxes of them. wanted [E] int64: the steps
    that wanted each; None: nobody asks."""

    gate: Tensor
    down: Tensor
    gate_maps: Tensor
    down_maps: Tensor
    wanted: Tensor | None
    host: HostExperts | None = None
    layer: int = 0


class _Tables:
    """`Addresses` of all layers. An expert's entry [2 + 2 * 16] int64: both pointers, then both maps."""

    def __init__(self, layers: int, count: int, device: torch.device) -> None:
        self.gate, self.down = (torch.zeros(layers, count + 1, dtype=torch.int64, device=device) for _ in range(2))
        self.gate_maps, self.down_maps = (
            torch.zeros(layers, count + 1, 128, dtype=torch.uint8, device=device) for _ in range(2))

    def write(self, cells: NDArray[np.int64], entries: NDArray[np.int64]) -> None:
        """The entries [n, 34] of these cells, layer * (E + 1) + expert, in the stream of steps: one copy."""
        numbers = torch.from_numpy(np.concatenate((cells[:, None], entries), 1)).pin_memory().to(
            self.gate.device, non_blocking=True)
        cell = numbers[:, 0]
        for index, pointers in enumerate((self.gate, self.down)):
            pointers.view(-1).index_copy_(0, cell, numbers[:, 1 + index])
        for index, maps in enumerate((self.gate_maps, self.down_maps)):
            first = 3 + 16 * index
            maps.view(torch.int64).view(-1, 16).index_copy_(0, cell, numbers[:, first:first + 16])


class ExpertStore:
    """The experts of a model's layers in bfloat16, `count` in each; gate [size, hidden].

    slots: how many of each layer are on the card. nbytes: what these take.
    host: who computes some of the others, for few tokens.
    """

    def __init__(self, layers: int, count: int, size: int, hidden: int, device: torch.device, refresh: int) -> None:
        """refresh: of so many steps one may exchange experts. ModelError if the host has no room for them."""
        self.hidden, self.size, self.count, self.nbytes = hidden, size, count, 0
        self.slots: tuple[int, ...] = ()
        self.host: HostExperts | None = None
        self._device, self._refresh, self._steps = device, refresh, 0
        self._host = [_pinned(self.count, 3 * self.size * hidden) for _ in range(layers)]
        self._tables = _Tables(layers, count, device)
        self._residency = Residency(layers, count, refresh)
        self._wanted = torch.zeros(layers, self.count, dtype=torch.int64, device=device)
        self._seen = _pinned_like(self._wanted)
        self._hosted = np.zeros((layers, count), bool)
        self._read = self._computed = self._ahead = 0
        self._promotions = self._refreshes = 0
        self._copying = torch.cuda.Stream(device)
        self._counted: torch.cuda.Event | None = None
        self._moved: torch.cuda.Event | None = None
        self._moving: list[tuple[Exchange, int]] = []
        self._free = deque[int]()
        self._pool = torch.empty(0)

    @property
    def expert_bytes(self) -> int:
        """What an expert takes."""
        return 3 * self.size * self.hidden * 2

    def take(self, name: str, tensor: Tensor) -> bool:
        """Keep the tensor [E, rows, columns] if it is a part of all experts of a layer, of our names."""
        prefix, _, rest = name.partition(".mlp.experts.")
        if not rest or not prefix.startswith("model.layers."):
            return False
        part, each = _STACKS.index(rest.removesuffix("_proj.weight")), self.size * self.hidden
        for own, expert in zip(self._host[int(prefix.rpartition(".")[2])], tensor, strict=True):
            own[part * each:(part + 1) * each].copy_(expert.flatten(), non_blocking=True)
        torch.cuda.synchronize(self._device)
        return True

    def fill(self, slots: int, scores: Sequence[Sequence[float]] | None = None) -> None:
        """Bring so many experts of each layer to the card: those with the highest scores, of equals, and without
        scores, the first. To be called once, when `take` has had all of them."""
        layers = len(self._host)
        self.slots = (slots,) * layers
        self.nbytes = slots * layers * self.expert_bytes
        spare = _SPARE if slots < self.count else 0
        self._pool = torch.empty(slots * layers + spare, self._host[0].shape[1], dtype=torch.bfloat16,
                                 device=self._device)
        self._free.extend(range(slots * layers, len(self._pool)))
        self._residency.begin(slots, scores)
        self._host_entries = np.stack([self._entries(host) for host in self._host])
        self._place_entries = self._entries(self._pool)
        for host, places in zip(self._host, self._residency.places, strict=True):
            for expert in np.flatnonzero(places >= 0).tolist():
                self._pool[int(places[expert])].copy_(host[expert], non_blocking=True)
        self._write(*np.nonzero(self._residency.resident | True))

    @property
    def matrices(self) -> list[Tensor]:
        """Of each layer [E, 3 * size * hidden] bfloat16 of the host: of an expert gate and up [2 size, hidden], then
        [hidden, size]."""
        return self._host

    def share(self, host: HostExperts, share: float) -> None:
        """Have the host compute so many of the experts that are not on the card, from 0 to 1, where there are few
        tokens. Who belongs to it is fixed, so that a token's bits do not depend on others. To be called once, before
        any step is made."""
        self.host = host
        self._hosted = hosted_experts(len(self._host), self.count, share)
        self._write(*np.nonzero(self._hosted))

    def copy_rate(self) -> float:
        """Bytes a second at which experts of a layer come to the card by plain copies. 0 if all are there."""
        if not self._free:
            return 0.0
        seconds = 0.0
        for _ in range(2):  # the first time the copy engine gets ready
            torch.cuda.synchronize(self._device)
            began = time.perf_counter()
            for expert in range(self.count):
                self._pool[self._free[expert % len(self._free)]].copy_(self._host[0][expert], non_blocking=True)
            torch.cuda.synchronize(self._device)
            seconds = time.perf_counter() - began
        return self.count * self.expert_bytes / seconds

    def close(self) -> None:
        """After the last step."""
        if self.host:
            self.host.beside.close()

    def pools(self) -> list[ExpertPool]:
        """What stands for the experts of each layer."""
        return [ExpertPool(self, layer, self.count, self.count * self.expert_bytes) for layer in range(len(self._host))]

    def addresses(self, layer: int, shared: tuple[Tensor, Tensor] | None) -> Addresses:
        """Where the experts of a layer lie, from now on. shared: the matrices of the one that all tokens pass."""
        if shared:
            entry = np.concatenate((self._pointers(shared), *(
                _words(tensor_map(part, rows, BOX_COLUMNS)) for part, rows in zip(shared, BOX_ROWS, strict=True))))
            self._tables.write(np.array([layer * (self.count + 1) + self.count]), entry[None])
        of = self._tables
        return Addresses(of.gate[layer], of.down[layer], of.gate_maps[layer], of.down_maps[layer], self._wanted[layer],
                         self.host, layer)

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
        moved, computed = self._read + self._promotions, self.host.computed() if self.host else 0
        of = self._residency
        return ExpertStatistics(tuple(of.hits), tuple(of.misses), moved * self.expert_bytes, self._promotions,
                                self._refreshes, 0, 0, 0.0, 0.0, computed, computed * self.expert_bytes,
                                self.host.computing() if self.host else 0.0)

    def _learn(self) -> None:
        self._counted = None
        self._count_read(self._residency.learn(self._seen.numpy()))
        self._refreshes += 1
        if self._moved is None:
            self._promote()

    def _count_read(self, missed: int) -> None:
        """Of the misses that came to be known those that the card has read: all that the host did not compute, which is
        known of later steps, too."""
        computed = self.host.computed() if self.host else 0
        self._ahead += computed - self._computed
        self._computed = computed
        own = min(self._ahead, missed)
        self._ahead -= own
        self._read += missed - own

    def _promote(self) -> None:
        chosen = self._residency.choose(len(self._free))
        if not chosen:
            return
        with torch.cuda.device(self._device):
            self._copying.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._copying):
                for exchange in chosen:
                    place = self._free.popleft()
                    self._pool[place].copy_(self._host[exchange.layer][exchange.comes], non_blocking=True)
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
        self._moving, self._moved = [], None

    def _write(self, layers: NDArray[np.int64], experts: NDArray[np.int64]) -> None:
        """Tell the card where these experts lie now."""
        place = self._residency.places[layers, experts]
        entries = np.where(place[:, None] >= 0, self._place_entries[place], self._host_entries[layers, experts])
        if self.host:
            entries[(place < 0) & self._hosted[layers, experts], :2] = 0
        with torch.cuda.device(self._device):
            self._tables.write(layers * (self.count + 1) + experts, entries)

    def _parts(self, expert: Tensor) -> tuple[Tensor, Tensor]:
        """Its matrices: gate and up [2 I, H], down [H, I]."""
        both = 2 * self.size * self.hidden
        return expert[:both].view(-1, self.hidden), expert[both:].view(self.hidden, -1)

    def _entries(self, experts: Tensor) -> NDArray[np.int64]:
        """[n, 34]: of `_Tables`."""
        parts = [self._parts(expert) for expert in experts]
        gate, down = (_words(b"".join(tensor_map(part[index], rows, BOX_COLUMNS) for part in parts)).reshape(-1, 16)
                      for index, rows in enumerate(BOX_ROWS))
        return np.concatenate((np.stack([self._pointers(part) for part in parts]), gate, down), 1)

    def _pointers(self, parts: tuple[Tensor, Tensor]) -> NDArray[np.int64]:
        return np.array([part.data_ptr() for part in parts], np.int64)


def hosted_experts(layers: int, count: int, share: float) -> NDArray[np.bool_]:
    """Which experts are the host's to compute where they are not on the card: [layers, count], spread evenly."""
    numbers = np.arange(layers * count, dtype=np.int64).reshape(layers, count)
    return (numbers * _SPREADS >> 24 & 0xff) < round(share * 256)


def _words(maps: bytes) -> NDArray[np.int64]:
    return np.frombuffer(maps, np.int64)


def _pinned(rows: int, columns: int) -> Tensor:
    """[rows, columns] bfloat16 of the host, which the card reads; no more memory than that."""
    memory = reserve((rows, columns), torch.bfloat16)  # large pages: the host streams it, too
    runtime, address = torch.cuda.cudart(), memory.data_ptr()
    if int(runtime.cudaHostRegister(address, memory.nbytes, 3)):  # for all contexts, and mapped
        raise ModelError(f"{memory.nbytes >> 20} MiB of the host's memory for experts cannot be pinned: there is too "
                         "little, or the system allows less (ulimit -l)")
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return memory


def _pinned_like(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype).pin_memory()
