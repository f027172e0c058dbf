"""Feed-forwards of dense layers in pinned host memory: streamed to the card, or computed by the host for few tokens.

A step copies such a layer to one of two buffers while the card computes earlier layers. The usual kernels then multiply
with it and give the same bits. In steps of up to 16 tokens, host threads may compute some of the layers instead
(kernels/beside.cuh). They treat a layer as an expert that every token uses with weight 1.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deltic.ops.cpu.experts import PackedExpert
from deltic.ops.cuda.expert_offload import HostExperts, pinned
from deltic.ops.cuda.quantized import TILE_ROWS, Tiles, pack_tiles, tiles_form, tiles_of
from deltic.ops.memory import Arena
from deltic.ops.quantized import PackedForm, QTensor, pack_rows, pack_tensor
from deltic.ops.types import Block, ExpertPool, MlpWeights

MATRICES = ("gate", "up", "down")
"""The matrices of a feed-forward, as its tensors are named."""
BUFFERS = 2
"""Number of layers that are on the card, or are being copied to it, at the same time."""
_ALIGNMENT = 512
"""Alignment of multiplied matrices in bytes, the same as that of torch's allocations. With a smaller alignment products
may choose another order of sums."""


@dataclass(frozen=True, slots=True, eq=False)
class HostTiles(Tiles):
    """Tiles in host memory. panels: the same matrix in the CPU kernels' format; None: the CPU kernels do not use it."""

    panels: QTensor | None = None


def host_layer_form(device: torch.device, computes: bool) -> PackedForm:
    """Returns the form of matrices in host memory. computes: the host also computes with them."""
    pack = partial(_pack, device=device, arena=Arena() if computes else None)
    return replace(tiles_form(device), pack=pack, device=torch.device("cpu"), stack=None)


def _pack(type: str, number: int, rows: int, columns: int, row_bytes: int, read: Callable[[int, int], Any],
          device: torch.device, arena: Arena | None) -> HostTiles:
    """Packs like `cuda.quantized.pack_tiles`. number: negative for a type that the CPU kernels do not support."""
    raw = torch.as_tensor(read(0, rows * row_bytes)).flatten()  # read once, because reading may include quantizing

    def again(start: int, count: int) -> Tensor:
        return raw[start:start + count]

    tiles = pack_tiles(type, number, rows, columns, row_bytes, again, device)
    known = arena is not None and number >= 0
    panels = pack_rows(type, number, rows, columns, row_bytes, again, arena) if arena and known else None
    return HostTiles(tiles.type, rows, columns, tiles.data.cpu(), None, panels)


@dataclass(frozen=True, slots=True, eq=False)
class HostLayer:
    """A layer's feed-forward in host memory.

    memory [bytes]: gate, up, down, in the card's format. parts: views of these matrices. expert: the matrices in the
    format of the host's kernels; None: the host cannot compute this layer.
    """

    memory: Tensor
    parts: tuple[Block, Block, Block]
    expert: Tensor | PackedExpert | None


def host_layer(blocks: Sequence[Block], device: torch.device, computes: bool = True) -> HostLayer:
    """Moves gate, up and down to host memory that the device can read. computes: the host also computes with them.

    The matrices are bfloat16, or packed by `host_layer_form`. Raises ModelError if the host has too little memory.
    """
    gate, up, down = blocks
    if isinstance(gate, Tiles) != isinstance(up, Tiles):
        gate, up = (block if isinstance(block, Tiles) else _as_tiles(block, computes) for block in (gate, up))
    own = (gate, up, down)
    sizes = [_data(block).nbytes for block in own]
    starts = [0, sizes[0], -(-(sizes[0] + sizes[1]) // _ALIGNMENT) * _ALIGNMENT]
    size = starts[2] + sizes[2]
    memory = pinned(1, size)[0] if device.type == "cuda" else torch.empty(size, dtype=torch.uint8)
    parts = list[Block]()
    for block, start in zip(own, starts, strict=True):
        data = _data(block)
        memory[start:start + data.nbytes].copy_(data.contiguous().view(torch.uint8).flatten())
        parts.append(_view(block, memory, start))
    expert: Tensor | PackedExpert | None = None
    if computes and not any(isinstance(block, Tiles) for block in own):
        assert size == sum(sizes), "the host has the matrices side by side"
        expert = memory.view(torch.bfloat16)[None]
    elif computes:
        panels = [_panels(block) for block in own]
        found = tuple(matrix for matrix in panels if matrix is not None)
        expert = (found[0], found[1], found[2]) if len(found) == len(own) else None
    return HostLayer(memory, (parts[0], parts[1], parts[2]), expert)


def _as_tiles(block: Block, computes: bool) -> HostTiles:
    """Converts a bfloat16 matrix to tiles. Gate and up must both be tiles if one of them is quantized."""
    assert isinstance(block, Tensor)
    tiles = tiles_of(block)
    return HostTiles(tiles.type, tiles.rows, tiles.columns, tiles.data.cpu(), None,
                     pack_tensor(block.cpu(), Arena()) if computes else None)


def _panels(block: Block) -> QTensor | None:
    if isinstance(block, HostTiles):
        return block.panels
    return pack_tensor(block.cpu(), Arena()) if isinstance(block, Tensor) else None


def _data(block: Block) -> Tensor:
    return block if isinstance(block, Tensor) else block.data


def _view(block: Block, memory: Tensor, start: int) -> Block:
    """Returns a view of `memory`, from byte `start` on, as a matrix of the same form as `block`."""
    data = _data(block)
    found = memory[start:start + data.nbytes].view(data.dtype).view(data.shape)
    return found if isinstance(block, Tensor) else Tiles(block.type, block.rows, block.columns, found, None)


class LayerStore:
    """The feed-forwards in host memory, by the numbers of their layers.

    host: computes the layers in `hosted` for few tokens; None: no layers.
    """

    def __init__(self, layers: Mapping[int, HostLayer], device: torch.device) -> None:
        self.layers, self._device = dict(sorted(layers.items())), device
        self.nbytes = sum(layer.memory.nbytes for layer in layers.values())
        self.host: HostExperts | None = None
        self.hosted: dict[int, int] = {}
        most = -(-max(layer.memory.nbytes for layer in layers.values()) // _ALIGNMENT) * _ALIGNMENT
        self._buffers = torch.empty(BUFFERS, most, dtype=torch.uint8, device=device)
        self._buffer_of: dict[int, int] = {}
        self.copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._fence = torch.zeros(1, device=device)

    @property
    def computable(self) -> list[int]:
        """Numbers of the layers that the host can compute. A request names a layer by its index in this list."""
        return [number for number, layer in self.layers.items() if layer.expert is not None]

    def settle(self, host: HostExperts | None = None, hosted: Sequence[int] = ()) -> None:
        """Assigns a buffer to each layer. host: computes the layers `hosted`. Call this once, before `weights`."""
        self.host, places = host, {number: place for place, number in enumerate(self.computable)}
        self.hosted = {number: places[number] for number in hosted} if host else {}
        streamed, before = 0, 1
        for number in self.layers:
            # layers that every step copies use the buffers in turns, so that one is copied while another is used
            before = 1 - before if number in self.hosted else streamed % BUFFERS
            streamed += number not in self.hosted
            self._buffer_of[number] = before

    def weights(self, number: int) -> MlpWeights:
        """Returns a layer's weights as views of its buffer. They are invalid until a step has copied the layer."""
        layer, buffer = self.layers[number], self._buffers[self._buffer_of[number]]
        first = layer.memory.data_ptr()
        gate, up, down = (_view(part, buffer, _data(part).data_ptr() - first) for part in layer.parts)
        return MlpWeights(_joined(gate, up), down, ExpertPool(self, number, 1, layer.memory.nbytes))

    def pools(self, layers: int) -> list[ExpertPool | None]:
        """Returns a model's feed-forwards by layer: an `ExpertPool` if it is in host memory, else None."""
        return [ExpertPool(self, number, 1, self.layers[number].memory.nbytes) if number in self.layers else None
                for number in range(layers)]

    def buffer_of(self, number: int) -> int:
        return self._buffer_of[number]

    def copy(self, number: int) -> None:
        """Copies a layer to its buffer in the current stream."""
        memory = self.layers[number].memory
        self._buffers[self._buffer_of[number], :memory.nbytes].copy_(memory, non_blocking=True)

    def fence(self) -> None:
        """Launches one of torch's kernels in the current stream. It waits for all earlier work. Without it, deltic's
        kernels could start before earlier ones have ended."""
        self._fence.zero_()

    def copy_rate(self) -> float:
        """Measures the rate of copies of a layer to the card, in bytes per second."""
        memory, seconds = next(iter(self.layers.values())).memory, 0.0
        for _ in range(2):  # the first pass warms up the copy engine
            began = self._now()
            for buffer in self._buffers:
                buffer[:memory.nbytes].copy_(memory, non_blocking=True)
            seconds = self._now() - began
        return BUFFERS * memory.nbytes / seconds

    def _now(self) -> float:
        """Waits for all work of the device and returns the time."""
        if self.copies:
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def begin_step(self) -> None:
        """Wakes the host's threads. Call this before each step."""
        if self.host:
            self.host.cpu_experts.wake()

    def stream(self, few: bool) -> LayerStream:
        """Starts a step's copies. few: the host computes its layers, which are not copied."""
        return LayerStream(self, [number for number in self.layers if not (few and number in self.hosted)])

    def close(self) -> None:
        """Stops the host's threads. Call this after the last step."""
        if self.host:
            self.host.cpu_experts.close()


def _joined(gate: Block, up: Block) -> Block | tuple[Block, Block]:
    """Returns gate and up, which are contiguous in memory, as one matrix if they have the same form."""
    if isinstance(gate, Tensor) and isinstance(up, Tensor):
        return gate.as_strided((2 * len(gate), gate.shape[1]), (gate.shape[1], 1))
    assert isinstance(gate, Tiles) and isinstance(up, Tiles)
    if gate.type != up.type or gate.rows % TILE_ROWS:
        return gate, up
    data = gate.data
    return replace(gate, rows=2 * gate.rows, data=data.as_strided((2 * len(data), data.shape[1]), (data.shape[1], 1)))


def used(stream: LayerStream | None, weights: MlpWeights) -> AbstractContextManager[None]:
    """Context for launching the kernels that read a feed-forward. stream: the step's copies; None: no copies."""
    return stream.use(weights.pool.layer) if stream and weights.pool else nullcontext()


class LayerStream:
    """Copies layers to the card in the order in which a step uses them, each as soon as its buffer is free."""

    def __init__(self, store: LayerStore, layers: Sequence[int]) -> None:
        self._store, self._waiting = store, deque(layers)
        self._copied = dict[int, torch.cuda.Event]()
        self._taken = set[int]()
        self._main = torch.cuda.current_stream(store.copies.device) if store.copies else None
        self._copy_ahead()

    @contextmanager
    def use(self, number: int) -> Iterator[None]:
        """Context for launching the kernels that read a layer. Waits for the copy, and frees the buffer at the end."""
        if self._main:
            self._main.wait_event(self._copied.pop(number))
            self._store.fence()
        yield
        self._taken.remove(self._store.buffer_of(number))
        self._copy_ahead()

    def _copy_ahead(self) -> None:
        """Starts the copies to free buffers. They wait for everything that was launched so far."""
        store, copies = self._store, self._store.copies
        ready = list[int]()
        while self._waiting and store.buffer_of(self._waiting[0]) not in self._taken:
            ready.append(self._waiting.popleft())
            self._taken.add(store.buffer_of(ready[-1]))
        if not ready:
            return  # a recorded graph cannot contain a wait of the copy stream that no copy follows
        if not copies or not self._main:
            for number in ready:
                store.copy(number)
            return
        copies.wait_stream(self._main)
        with torch.cuda.stream(copies):
            for number in ready:
                store.copy(number)
                self._copied[number] = copies.record_event()
