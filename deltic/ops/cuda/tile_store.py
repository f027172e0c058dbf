"""Quantized experts that are not all on the card: how they come to the host's memory, and tables of where they lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltic.ops.cuda import quantized_gemm
from deltic.ops.cuda.card_store import STACKS, GpuExpertCache, pinned
from deltic.ops.cuda.quantized_gemm import PIECE, ROWS, Tiles, pack_tiles
from deltic.ops.quantized import PackedForm, read_from
from deltic.ops.types import Weight


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
        `form` puts them there. refresh: of so many steps one may exchange experts."""
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


def form(device: torch.device) -> PackedForm:
    """As `tiles.form`, of models whose experts lie in pinned memory of the host."""
    return replace(quantized_gemm.form(device), stack=partial(pack_beside, device=device))


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
