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
from deltic.ops.cuda.expert_cache import EXPERT_MATRICES, GpuExpertCache, HostExperts, pinned
from deltic.ops.cuda.layout import BOX_COLUMNS, BOX_ROWS
from deltic.ops.cuda.quantized_tiles import TILE_ROWS, WEIGHTS_PER_PIECE, Tiles, pack_tiles
from deltic.ops.quantized import PackedForm, read_from
from deltic.ops.types import Weight

_GOLDEN_RATIO = 2654435761
"""2**32 over the golden ratio: eight bits of its multiples are spread evenly."""


@dataclass(frozen=True, slots=True)
class ExpertAddresses:
    """Where the experts of a layer lie.

    gate, down [E + 1] int64: pointers to matrices, the last of the shared expert; null if `host` computes the expert.
    gate_maps, down_maps [E + 1, 128] uint8: descriptors for the tensor memory accelerator.
    wanted [E] int64: counts steps that wanted each expert; None: not counted.
    host, layer: the host's threads, if they compute some, and the layer's number there.
    """

    gate: Tensor
    down: Tensor
    gate_maps: Tensor
    down_maps: Tensor
    wanted: Tensor | None
    host: HostExperts | None = None
    layer: int = 0


class PinnedExpertStore(GpuExpertCache):
    """Experts in bfloat16; gate and up [size, hidden], down [hidden, size]."""

    def __init__(self, layers: int, count: int, size: int, hidden: int, device: torch.device, refresh: int) -> None:
        """refresh: steps between exchanges. ModelError if the host has no room."""
        self.hidden, self.size = hidden, size
        rows = [pinned(count, 3 * size * hidden * 2) for _ in range(layers)]
        self._host = [own.view(torch.bfloat16) for own in rows]
        super().__init__([(own,) for own in rows], (1, 1, 16, 16), device, refresh)

    def take(self, name: str, tensor: Tensor) -> bool:
        """Keeps a tensor [E, rows, columns] if it holds a matrix of all experts of a layer, by its canonical name."""
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
        """Lets the host compute this share, 0 to 1, of the experts that are not on the card, for few tokens.

        Which experts the host computes is fixed, so that a token's bits do not depend on other tokens. Call it once,
        before any step is made.
        """
        self.host = host
        self._hosted = hosted_experts(len(self._host), self.count, share)
        self._write(*np.nonzero(self._hosted))

    def addresses(self, layer: int, shared: tuple[Tensor, Tensor] | None) -> ExpertAddresses:
        """Returns where a layer's experts lie, kept up to date. shared: gate_up and down of the shared expert."""
        if shared:
            maps = [_words(tensor_map(part, rows, BOX_COLUMNS)) for part, rows in zip(shared, BOX_ROWS, strict=True)]
            self._write_shared(layer, np.concatenate((_pointers(shared), *maps)))
        gate, down, *maps_of_all = (part[layer] for part in self._tables.parts)
        gate_maps, down_maps = (part.view(torch.uint8) for part in maps_of_all)
        return ExpertAddresses(gate[:, 0], down[:, 0], gate_maps, down_maps, self._wanted[layer], self.host, layer)

    def _parts(self, expert: Tensor) -> tuple[Tensor, Tensor]:
        """Returns gate_up [2 size, hidden] and down [hidden, size] of an expert's memory."""
        both = 2 * self.size * self.hidden
        return expert[:both].view(-1, self.hidden), expert[both:].view(self.hidden, -1)

    def _entries(self, parts: Sequence[Tensor]) -> NDArray[np.int64]:
        """[n, 2 + 2 * 16]: both pointers, then both descriptors."""
        experts = [self._parts(expert.view(torch.bfloat16)) for expert in parts[0]]
        gate, down = (_words(b"".join(tensor_map(own[index], rows, BOX_COLUMNS) for own in experts)).reshape(-1, 16)
                      for index, rows in enumerate(BOX_ROWS))
        return np.concatenate((np.stack([_pointers(own) for own in experts]), gate, down), 1)


def hosted_experts(layers: int, count: int, share: float) -> NDArray[np.bool_]:
    """Returns which experts the host computes when they are not on the card: [layers, count], spread evenly."""
    numbers = np.arange(layers * count, dtype=np.int64).reshape(layers, count)
    return (numbers * _GOLDEN_RATIO >> 24 & 0xff) < round(share * 256)


def _pointers(parts: tuple[Tensor, Tensor]) -> NDArray[np.int64]:
    return np.array([part.data_ptr() for part in parts], np.int64)


def _words(maps: bytes) -> NDArray[np.int64]:
    return np.frombuffer(maps, np.int64)


class TileAddresses(NamedTuple):
    """Where the tiles of a layer's experts lie.

    gate, up, down [E + 1] int64: pointers, the last of the shared expert.
    wanted [E] int64: counts passes of steps that wanted each expert.
    """

    gate: Tensor
    up: Tensor
    down: Tensor
    wanted: Tensor


class TileStore(GpuExpertCache):
    """Experts as tiles: gate and up [size, hidden], down [hidden, size]. types: tile formats, by layer."""

    def __init__(self, layers: Sequence[Sequence[Sequence[Tiles]]], device: torch.device, refresh: int) -> None:
        """layers: for each the gates of all experts, the ups and the downs, in memory that the card can read, as
        `pinned_form` makes them. refresh: steps between exchanges."""
        self.size, self.hidden = layers[0][0][0].shape
        self.types = [tuple(stack[0].type for stack in stacks) for stacks in layers]
        super().__init__([[rows_of(stack) for stack in stacks] for stacks in layers], (1, 1, 1), device, refresh)

    def addresses(self, layer: int, shared: Sequence[Tiles]) -> TileAddresses:
        """Returns where a layer's experts lie, kept up to date. shared: gate, up and down of the shared expert, which
        the caller keeps alive; empty: there is none."""
        if shared:
            self._write_shared(layer, pointers_of([matrix.data.view(1, -1) for matrix in shared])[0])
        gate, up, down = (part[layer, :, 0] for part in self._tables.parts)
        return TileAddresses(gate, up, down, self._wanted[layer])

    def _entries(self, parts: Sequence[Tensor]) -> NDArray[np.int64]:
        return pointers_of(parts)


def pinned_form(device: torch.device) -> PackedForm:
    """Returns the form of models whose experts lie in pinned host memory."""
    return replace(quantized_tiles.tiles_form(device), stack=partial(pack_pinned_stack, device=device))


def pack_pinned_stack(type: str, number: int, count: int, rows: int, columns: int, row_bytes: int,
                      read: Callable[[int, int], Any], device: torch.device) -> tuple[Tiles, ...]:
    """Packs like `quantized_tiles.pack_stack`, into pinned host memory; the device packs a few matrices at a time.

    rows: a multiple of 8. ModelError if the host has no room.
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
    """Pops the experts of all layers from a model's weights, as `TileStore` takes them."""
    return [[_tiles(weights.pop(f"model.layers.{layer}.mlp.experts.{part}_proj.weight")) for part in EXPERT_MATRICES]
            for layer in range(layers)]


def _tiles(stack: Weight) -> tuple[Tiles, ...]:
    assert isinstance(stack, tuple)
    return tuple(matrix for matrix in stack if isinstance(matrix, Tiles))


def rows_of(stack: Sequence[Tiles]) -> Tensor:
    """Returns tiles that lie in one tensor at equal distances as uint8 [E, bytes], without a copy."""
    first = stack[0].data
    starts = [matrix.data.data_ptr() for matrix in stack]
    distance = starts[1] - starts[0] if len(stack) > 1 else first.numel()
    expected = list(range(starts[0], starts[0] + len(stack) * distance, distance))
    assert starts == expected, "the matrices do not lie at equal distances"
    return first.as_strided((len(stack), first.numel()), (distance, 1))


def pointers_of(parts: Sequence[Tensor]) -> NDArray[np.int64]:
    """Returns the addresses of the rows of tensors [n, bytes] uint8: [n, parts]."""
    return np.stack([part.data_ptr() + np.arange(len(part), dtype=np.int64) * part.stride(0) for part in parts], 1)
