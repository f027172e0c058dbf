"""The two expert caches: bfloat16 experts, of which the host may compute a share, and quantized ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltic.ops.cuda import quantized_tiles
from deltic.ops.cuda.driver import tensor_map
from deltic.ops.cuda.expert_cache import STACKS, GpuExpertCache, HostExperts, pinned
from deltic.ops.cuda.layout import BOX_COLUMNS, BOX_ROWS
from deltic.ops.cuda.quantized_tiles import PIECE, ROWS, Tiles, pack_tiles
from deltic.ops.quantized import PackedForm, read_from
from deltic.ops.types import Weight

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


class PinnedExpertStore(GpuExpertCache):
    """The experts of a model's layers in bfloat16, `count` in each; gate [size, hidden]."""

    def __init__(self, layers: int, count: int, size: int, hidden: int, device: torch.device, refresh: int) -> None:
        """refresh: of so many steps one may exchange experts. ModelError if the host has no room for them."""
        self.hidden, self.size = hidden, size
        rows = [pinned(count, 3 * size * hidden * 2) for _ in range(layers)]
        self._host = [own.view(torch.bfloat16) for own in rows]
        super().__init__([(own,) for own in rows], (1, 1, 16, 16), device, refresh)

    def take(self, name: str, tensor: Tensor) -> bool:
        """Keep the tensor [E, rows, columns] if it is a part of all experts of a layer, of our names."""
        prefix, _, rest = name.partition(".mlp.experts.")
        if not rest or not prefix.startswith("model.layers."):
            return False
        part, each = STACKS.index(rest.removesuffix("_proj.weight")), self.size * self.hidden
        for own, expert in zip(self._host[int(prefix.rpartition(".")[2])], tensor, strict=True):
            own[part * each:(part + 1) * each].copy_(expert.flatten(), non_blocking=True)
        torch.cuda.synchronize(self._device)
        return True

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

    def addresses(self, layer: int, shared: tuple[Tensor, Tensor] | None) -> Addresses:
        """Where the experts of a layer lie, from now on. shared: the matrices of the one that all tokens pass."""
        if shared:
            self._write_shared(layer, np.concatenate((_pointers(shared), *(
                _words(tensor_map(part, rows, BOX_COLUMNS)) for part, rows in zip(shared, BOX_ROWS, strict=True)))))
        gate, down, *maps = (part[layer] for part in self._tables.parts)
        gate_maps, down_maps = (part.view(torch.uint8) for part in maps)
        return Addresses(gate[:, 0], down[:, 0], gate_maps, down_maps, self._wanted[layer], self.host, layer)

    def _parts(self, expert: Tensor) -> tuple[Tensor, Tensor]:
        """Its matrices: gate and up [2 I, H], down [H, I]."""
        both = 2 * self.size * self.hidden
        return expert[:both].view(-1, self.hidden), expert[both:].view(self.hidden, -1)

    def _entries(self, parts: Sequence[Tensor]) -> NDArray[np.int64]:
        """[n, 2 + 2 * 16]: both pointers, then both maps."""
        experts = [self._parts(expert.view(torch.bfloat16)) for expert in parts[0]]
        gate, down = (_words(b"".join(tensor_map(own[index], rows, BOX_COLUMNS) for own in experts)).reshape(-1, 16)
                      for index, rows in enumerate(BOX_ROWS))
        return np.concatenate((np.stack([_pointers(own) for own in experts]), gate, down), 1)


def hosted_experts(layers: int, count: int, share: float) -> NDArray[np.bool_]:
    """Which experts are the host's to compute where they are not on the card: [layers, count], spread evenly."""
    numbers = np.arange(layers * count, dtype=np.int64).reshape(layers, count)
    return (numbers * _SPREADS >> 24 & 0xff) < round(share * 256)


def _pointers(parts: tuple[Tensor, Tensor]) -> NDArray[np.int64]:
    return np.array([part.data_ptr() for part in parts], np.int64)


def _words(maps: bytes) -> NDArray[np.int64]:
    return np.frombuffer(maps, np.int64)


class TileAddresses(NamedTuple):
    """Where the tiles of a layer's experts lie. gate, up, down [E + 1] int64: pointers, the last ones for the shared
    expert. wanted [E] int64: the passes of steps that wanted each."""

    gate: Tensor
    up: Tensor
    down: Tensor
    wanted: Tensor


class TileStore(GpuExpertCache):
    """The experts of a model's layers as tiles: gate, up [size, hidden], down [hidden, size]. types: by layer."""

    def __init__(self, layers: Sequence[Sequence[Sequence[Tiles]]], device: torch.device, refresh: int) -> None:
        """layers: of each the gates of all experts, the ups and the downs, which lie in memory that the card reads, as
        `pinned_form` puts them there. refresh: of so many steps one may exchange experts."""
        self.size, self.hidden = layers[0][0][0].shape
        self.types = [tuple(stack[0].type for stack in stacks) for stacks in layers]
        super().__init__([[rows_of(stack) for stack in stacks] for stacks in layers], (1, 1, 1), device, refresh)

    def addresses(self, layer: int, shared: Sequence[Tiles]) -> TileAddresses:
        """Where the experts of a layer lie, from now on. shared: gate, up and down of the one that all tokens pass, who
        asks keeps them; empty: there is none."""
        if shared:
            self._write_shared(layer, pointers_of([matrix.data.view(1, -1) for matrix in shared])[0])
        gate, up, down = (part[layer, :, 0] for part in self._tables.parts)
        return TileAddresses(gate, up, down, self._wanted[layer])

    def _entries(self, parts: Sequence[Tensor]) -> NDArray[np.int64]:
        return pointers_of(parts)


def pinned_form(device: torch.device) -> PackedForm:
    """As `tiles.form`, of models whose experts lie in pinned memory of the host."""
    return replace(quantized_tiles.tiles_form(device), stack=partial(pack_beside, device=device))


def pack_beside(type: str, number: int, count: int, rows: int, columns: int, row_bytes: int,
                read: Callable[[int, int], Any], device: torch.device) -> tuple[Tiles, ...]:
    """As `tiles.pack_stack`, to pinned memory of the host: they are made on the device, a few at a time. rows:
    a multiple of 8. ModelError if the host has no room for them."""
    memory, kept = torch.empty(0), type
    step = max(1, PIECE // (rows * columns))
    for first in range(0, count, step):
        piece = pack_tiles(type, number, min(step, count - first) * rows, columns, row_bytes,
                           partial(read_from, read, first * rows * row_bytes), device)
        if first == 0:
            memory, kept = pinned(count * rows // ROWS, piece.data.shape[1]), piece.type
        begin = first * rows // ROWS
        memory[begin:begin + len(piece.data)] = piece.data
    return tuple(Tiles(kept, rows, columns, data, None) for data in memory.chunk(count))


def take_stacks(weights: dict[str, Weight], layers: int) -> list[list[tuple[Tiles, ...]]]:
    """The experts of all layers out of a model's weights, as `TileStore` wants them."""
    return [[_tiles(weights.pop(f"model.layers.{layer}.mlp.experts.{part}_proj.weight")) for part in STACKS]
            for layer in range(layers)]


def _tiles(stack: Weight) -> tuple[Tiles, ...]:
    assert isinstance(stack, tuple)
    return tuple(matrix for matrix in stack if isinstance(matrix, Tiles))


def rows_of(stack: Sequence[Tiles]) -> Tensor:
    """Tiles that lie in one tensor at equal distances: uint8 [E, bytes], without a copy."""
    first = stack[0].data
    starts = [matrix.data.data_ptr() for matrix in stack]
    distance = starts[1] - starts[0] if len(stack) > 1 else first.numel()
    assert starts == list(range(starts[0], starts[0] + len(stack) * distance, distance)), "they lie here and there"
    return first.as_strided((len(stack), first.numel()), (distance, 1))


def pointers_of(parts: Sequence[Tensor]) -> NDArray[np.int64]:
    """Where the rows of these tensors [n, bytes] uint8 begin: [n, parts]."""
    return np.stack([part.data_ptr() + np.arange(len(part), dtype=np.int64) * part.stride(0) for part in parts], 1)
