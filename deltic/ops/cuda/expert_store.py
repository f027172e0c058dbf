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

import torch
from torch import Tensor

from deltic.errors import ModelError
from deltic.ops.cuda.beside import HostExperts
from deltic.ops.cuda.driver import tensor_map
from deltic.ops.cuda.layout import BOX_COLUMNS, BOX_ROWS
from deltic.ops.memory import reserve
from deltic.ops.records import ExpertPool
from deltic.ops.stored import ExpertStatistics

_SPARE = 8
"""Places that experts can be on their way to at a time."""
_HALF_LIFE = 512
"""Steps after which it counts half that an expert was wanted."""
_MORE, _MARGIN = 1.25, 2.0
"""An expert comes to the card if it was wanted so many times as often as the one that leaves, and so much more."""
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


@dataclass(frozen=True, slots=True)
class _Exchange:
    """An expert that comes to a place on the card, and the one that leaves another for it."""

    layer: int
    comes: int
    leaves: int
    place: int


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
        self._gate_maps, self._down_maps = (
            torch.zeros(layers, self.count + 1, 128, dtype=torch.uint8, device=device) for _ in range(2))
        self._gate, self._down = (
            torch.zeros(layers, self.count + 1, dtype=torch.int64, device=device) for _ in range(2))
        self._wanted = torch.zeros(layers, self.count, dtype=torch.int64, device=device)
        self._known, self._seen = torch.zeros(layers, self.count, dtype=torch.int64), _pinned_like(self._wanted)
        self._scores = torch.zeros(layers, self.count)
        self._resident = torch.zeros(layers, self.count, dtype=torch.bool)
        self._hosted = torch.zeros(layers, self.count, dtype=torch.bool)
        self._place = [[-1] * self.count for _ in range(layers)]
        self._hits, self._misses = ([0] * layers for _ in range(2))
        self._read = self._computed = self._ahead = 0
        self._promotions = self._refreshes = 0
        self._copying = torch.cuda.Stream(device)
        self._counted: torch.cuda.Event | None = None
        self._moved: torch.cuda.Event | None = None
        self._moving: list[_Exchange] = []
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
        self._place_maps = self._maps(self._pool)
        for layer, host in enumerate(self._host):
            if scores is not None:
                self._scores[layer] = torch.tensor(scores[layer])
            order = sorted(range(self.count), key=self._scores[layer].tolist().__getitem__, reverse=True)[:slots]
            for index, expert in enumerate(order):
                place = layer * slots + index
                self._pool[place].copy_(host[expert])
                self._place[layer][expert] = place
            self._resident[layer, order] = True
            own = [self._pool[place] if place >= 0 else host[expert]
                   for expert, place in enumerate(self._place[layer])]
            self._gate[layer, :-1] = torch.tensor([part.data_ptr() for part in own])
            self._down[layer, :-1] = torch.tensor([self._parts(part)[1].data_ptr() for part in own])
            for maps, mine in zip((self._gate_maps, self._down_maps), self._maps(own), strict=True):
                maps[layer, :-1] = mine
        self._host_maps = [self._maps(host) for host in self._host]

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
        absent = (self._hosted & ~self._resident).to(self._device)
        for pointers in (self._gate, self._down):
            pointers[:, :-1].masked_fill_(absent, 0)

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
            for index, (pointers, maps, rows) in enumerate(((self._gate, self._gate_maps, BOX_ROWS[0]),
                                                            (self._down, self._down_maps, BOX_ROWS[1]))):
                pointers[layer, -1] = shared[index].data_ptr()
                maps[layer, -1] = _bytes([tensor_map(shared[index], rows, BOX_COLUMNS)])[0].to(self._device)
        return Addresses(self._gate[layer], self._down[layer], self._gate_maps[layer], self._down_maps[layer],
                         self._wanted[layer], self.host, layer)

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
        return [list(map(float, layer)) for layer in self._scores.tolist()]

    def statistics(self) -> ExpertStatistics:
        """For any thread. What the last steps wanted is not known yet."""
        moved, computed = self._read + self._promotions, self.host.computed() if self.host else 0
        return ExpertStatistics(tuple(self._hits), tuple(self._misses), moved * self.expert_bytes, self._promotions,
                                self._refreshes, 0, 0, 0.0, 0.0, computed, computed * self.expert_bytes,
                                self.host.computing() if self.host else 0.0)

    def _learn(self) -> None:
        fresh = self._seen - self._known
        self._known, self._counted, missed = self._seen.clone(), None, 0
        for layer, (hits, all_wanted) in enumerate(zip((fresh * self._resident).sum(1).tolist(), fresh.sum(1).tolist(),
                                                       strict=True)):
            self._hits[layer] += hits
            self._misses[layer] += all_wanted - hits
            missed += all_wanted - hits
        self._count_read(missed)
        self._scores = self._scores * 0.5 ** (self._refresh / _HALF_LIFE) + fresh
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
        worst = self._scores.masked_fill(~self._resident, float("inf")).min(1)
        best = self._scores.masked_fill(self._resident, -1.0).max(1)
        gain = best.values - worst.values * _MORE - _MARGIN
        order = [layer for layer in gain.argsort(descending=True).tolist() if gain[layer] > 0][:len(self._free)]
        if not order:
            return
        with torch.cuda.device(self._device):
            self._copying.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._copying):
                for layer in order:
                    exchange = _Exchange(layer, int(best.indices[layer]), int(worst.indices[layer]),
                                         self._free.popleft())
                    self._pool[exchange.place].copy_(self._host[layer][exchange.comes], non_blocking=True)
                    self._moving.append(exchange)
                self._moved = torch.cuda.Event()
                self._moved.record()

    def _exchange(self) -> None:
        """Pointers to what was copied; steps that were launched before read the others to their end, and who copies to
        a place that becomes free waits for them."""
        for one in self._moving:
            host, place = self._host[one.layer][one.leaves], self._pool[one.place]
            came, left = one.comes, one.leaves
            hosted = bool(self._hosted[one.layer, left])
            for pointers, maps, index in ((self._gate, self._gate_maps, 0), (self._down, self._down_maps, 1)):
                pointers[one.layer, came] = self._parts(place)[index].data_ptr()
                pointers[one.layer, left] = 0 if hosted else self._parts(host)[index].data_ptr()
                maps[one.layer, came].copy_(self._place_maps[index][one.place])
                maps[one.layer, left].copy_(self._host_maps[one.layer][index][one.leaves])
            self._free.append(self._place[one.layer][left])
            self._place[one.layer][came], self._place[one.layer][left] = one.place, -1
            self._resident[one.layer, came], self._resident[one.layer, left] = True, False
        self._promotions += len(self._moving)
        self._moving, self._moved = [], None

    def _parts(self, expert: Tensor) -> tuple[Tensor, Tensor]:
        """Its matrices: gate and up [2 I, H], down [H, I]."""
        both = 2 * self.size * self.hidden
        return expert[:both].view(-1, self.hidden), expert[both:].view(self.hidden, -1)

    def _maps(self, experts: Sequence[Tensor] | Tensor) -> tuple[Tensor, Tensor]:
        """[n, 128] uint8 each, on the card."""
        parts = [self._parts(expert) for expert in experts]
        gate, down = (_bytes([tensor_map(part[index], BOX_ROWS[index], BOX_COLUMNS) for part in parts])
                      for index in range(2))
        return gate.to(self._device), down.to(self._device)


def hosted_experts(layers: int, count: int, share: float) -> Tensor:
    """Which experts are the host's to compute where they are not on the card: bool [layers, count], spread evenly."""
    numbers = torch.arange(layers * count, dtype=torch.int64).view(layers, count)
    return (numbers * _SPREADS >> 24 & 0xff) < round(share * 256)


def _bytes(maps: list[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(maps)), dtype=torch.uint8).view(-1, 128)


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
