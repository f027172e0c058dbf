"""Mixtures of quantized experts. Few tokens are multiplied with the experts' tiles. For many tokens a layer's experts
are dequantized to memory that all layers share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deltic.ops.cuda import arguments as args
from deltic.ops.cuda.card import card_of
from deltic.ops.cuda.driver import Module, entry
from deltic.ops.cuda.expert_offload import ExpertAddresses, TileStore
from deltic.ops.cuda.layout import MAX_GEMV_TOKENS, TWO_BLOCKS_SHARED_BYTES, WARPS
from deltic.ops.cuda.moe import (
    DOWN_SHARED_BYTES,
    GATE_SHARED_BYTES,
    ExpertsShape,
    ExpertTable,
    MoeOp,
    cpp_bool,
    filled_router,
    maps_of,
    ring_slots,
    shape_of,
)
from deltic.ops.cuda.quantized import KINDS, PLAIN_KINDS, TILE_COLUMNS, TILE_ROWS, Tiles, tiles_of
from deltic.ops.types import Block, ExpertPool, MlpWeights, MoeWeights, Weight

_MOST_HIDDEN, _MOST_SIZE = 4096, TILE_COLUMNS * WARPS
_LINES = 4 * 144
"""Bytes of a token's input for the columns of one tile, quantized to integers."""
_PLAIN = "BF16"
_PASSES = 4
"""Largest number of passes of `gemv_rows` that is faster than dequantizing the experts."""


@dataclass(frozen=True, slots=True)
class Kinds:
    """Tile formats of an expert's matrices: gate and up [size, hidden], down [hidden, size]."""

    gate: str
    up: str
    down: str

    @property
    def both(self) -> int:
        """Bytes of a gate tile and an up tile."""
        return KINDS[self.gate].nbytes + KINDS[self.up].nbytes


@dataclass(frozen=True, slots=True)
class PackedShape(ExpertsShape):
    """An `ExpertsShape` of experts that stay quantized.

    routed, shared_one: formats of the layers' routed experts, and of their shared experts.
    """

    routed: frozenset[Kinds]
    shared_one: frozenset[Kinds]

    @property
    def fits_blocks(self) -> bool:
        return (self.hidden % TILE_COLUMNS == self.size % TILE_COLUMNS == 0 and self.hidden <= _MOST_HIDDEN
                and self.size <= _MOST_SIZE)

    @property
    def files(self) -> tuple[str, ...]:
        return "experts", "grouped", "packed_experts"

    @property
    def kinds(self) -> frozenset[str]:
        """Formats of all tiles that are dequantized."""
        return self._gate_kinds | self._down_kinds

    def joined(self, other: ExpertsShape) -> ExpertsShape | None:
        if not isinstance(other, PackedShape):
            return None
        both = replace(self, routed=self.routed | other.routed, shared_one=self.shared_one | other.shared_one)
        return both if both == replace(other, routed=both.routed, shared_one=both.shared_one) else None

    @property
    def gate_slot(self) -> int:
        """Bytes of a slot of the first product's ring: a row's tiles, at most eight; fewer tiles of larger formats that
        only shared experts have."""
        row = min(self.hidden // TILE_COLUMNS, WARPS) * max(kinds.both for kinds in self.routed)
        return max([row, *(kinds.both for kinds in self.shared_one)])

    def wide(self, kinds: Kinds) -> int:
        """Returns the number of gate tiles, and of up tiles, in a slot of the first product's ring."""
        return min(self.hidden // TILE_COLUMNS, WARPS, self.gate_slot // kinds.both)

    @property
    def down_slot(self) -> int:
        """Bytes of a slot of the second product's ring."""
        routed, common = (max((2 * self._down_tiles * KINDS[kinds.down].nbytes for kinds in some), default=0)
                          for some in (self.routed, self.shared_one))
        return max(routed, common) + (self._experts_at_once - 1) * routed

    def gate_plan(self, tokens: int, blocks: int) -> tuple[int, int, int]:
        tiles = self.hidden // TILE_COLUMNS
        items = -(-self._max_experts(tokens) * (self.size // TILE_ROWS) // blocks)
        sums = tiles * tokens * 2 * TILE_ROWS * 4
        group = max(1, min(self.card.sum_bytes // sums, items))
        plain = 2 * self.hidden * bool(PLAIN_KINDS & self._gate_kinds)
        fixed = self.ring_offset + 8 * (self.count + 1) + 128 + tokens * (tiles * _LINES + plain) + 2 * group * sums
        slots = ring_slots(
            fixed, self.gate_slot, GATE_SHARED_BYTES, items * -(-tiles // min(map(self.wide, self._all))),
            self.card, tokens,
        )
        return group, slots, max(TWO_BLOCKS_SHARED_BYTES, fixed + slots * self.gate_slot)

    def down_plan(self, tokens: int, blocks: int) -> tuple[int, int]:
        own = _LINES + 2 * TILE_COLUMNS * bool(PLAIN_KINDS & self._down_kinds)
        sums = tokens * self.experts_per_token * self._down_tiles * 2 * TILE_ROWS * 4
        fixed = self.ring_offset + WARPS * own + 2 * sums
        fills = -(-self._max_experts(tokens) // self._experts_at_once) * -(-self.hidden // (2 * TILE_ROWS * blocks))
        slots = ring_slots(fixed, self.down_slot, DOWN_SHARED_BYTES, fills, self.card, tokens)
        return slots, max(TWO_BLOCKS_SHARED_BYTES, fixed + slots * self.down_slot)

    def gemv_entries(self) -> Iterator[str]:
        common = f"{self.hidden}, {self.size}, {self.template_args}, {cpp_bool(self.normalised)}"
        mixed = cpp_bool(any(kinds.gate != kinds.up for kinds in self._all))
        threads = f"{WARPS * 32 + 32}, {self.card.resident(TWO_BLOCKS_SHARED_BYTES)}"
        behind = -(-(self.ring_offset + 8 * (self.count + 1)) // 128) * 128
        yield entry("packed_gate", "PackedGate", threads,
                     f"packed_gate<{common}, {_bits(self._gate_kinds)}, {mixed}, {behind}>")
        yield entry("packed_down", "PackedDown", threads,
                     f"packed_down<{common}, {_bits(self._down_kinds)}, {self.ring_offset}>")
        for kind in sorted(self.kinds):
            yield entry(f"unpack_experts_{kind.lower()}", "UnpackExperts", "256",
                         f"unpack_experts<{KINDS[kind].number}>")

    @property
    def _all(self) -> frozenset[Kinds]:
        return self.routed | self.shared_one

    @property
    def _gate_kinds(self) -> frozenset[str]:
        return frozenset(kind for kinds in self._all for kind in (kinds.gate, kinds.up))

    @property
    def _down_kinds(self) -> frozenset[str]:
        return frozenset(kinds.down for kinds in self._all)

    @property
    def _down_tiles(self) -> int:
        return self.size // TILE_COLUMNS

    @property
    def _experts_at_once(self) -> int:
        """Number of experts in a slot of the second product's ring."""
        return WARPS // self._down_tiles

    def _max_experts(self, tokens: int) -> int:
        """Returns the largest number of experts that `tokens` tokens use, including the shared expert."""
        return min(self.count, tokens * self.per_token) + self.shared


def experts_shape(weights: MoeWeights) -> ExpertsShape | None:
    """Returns the shape of a layer; None if the kernels do not support its experts (dtype, sizes, block types, or only
    some of them quantized)."""
    return shape_of(weights) or _packed_shape(weights)


def experts_of(module: Module, shape: ExpertsShape, layers: Iterable[MoeWeights], blocks: int) -> MoeOp:
    """Returns the op for the mixtures of a model's layers."""
    if isinstance(shape, PackedShape):
        return QuantizedMoeOp(module, shape, layers, blocks)
    return MoeOp(module, shape, layers, blocks)


def knows_packed(hidden: int, size: int, count: int, per_token: int, shared_size: int) -> bool:
    """True if experts of these sizes can stay quantized. shared_size: 0 without a shared expert."""
    kinds = frozenset({Kinds("Q8_0", "Q8_0", "Q8_0")})
    shape = PackedShape(hidden, size, count, per_token, shared_size > 0, True, kinds, kinds)
    return shared_size in (0, size) and shape.fits_blocks and shape.known


def scratch_bytes(count: int, size: int, hidden: int) -> int:
    """Returns the bytes of a layer's dequantized experts. count: number of experts, including the shared one."""
    return 3 * count * size * hidden * 2


def _packed_shape(weights: MoeWeights) -> PackedShape | None:
    router, experts, shared = weights.router, weights.experts, weights.shared
    if not isinstance(router, Tensor) or router.dtype != torch.bfloat16 or weights.shards > 1:
        return None
    common = {_kinds(shared)} if shared else set()
    sizes = {_sizes(part) for part in weights.parts}
    if isinstance(experts, tuple):
        own = {_kinds(part) for part in experts}
    elif isinstance(experts.store, TileStore):
        own = {Kinds(*experts.store.types[experts.layer])}
        sizes.add((experts.store.size, experts.store.hidden))
    else:
        return None
    routed, shared_one = (frozenset(kinds for kinds in some if kinds) for some in (own, common))
    if len(routed) != 1 or None in own | common or len(sizes) != 1 or _PLAIN in _names(next(iter(routed))):
        return None
    size, hidden = sizes.pop()
    shape = PackedShape(hidden, size, len(experts), weights.per_token, shared is not None, weights.normalised, routed,
                        shared_one, card=card_of(router.device))
    return shape if shape.fits_blocks and shape.known else None


def _names(kinds: Kinds) -> tuple[str, str, str]:
    return kinds.gate, kinds.up, kinds.down


def _kinds(part: MlpWeights) -> Kinds | None:
    """Returns the formats of an expert's matrices; None if a matrix is neither tiles nor bfloat16."""
    names = [_kind(block) for block in _matrices(part)]
    gate, up, down = (*names, None, None, None)[:3]
    return Kinds(gate, up, down) if gate and up and down else None


def _kind(block: Block) -> str | None:
    if isinstance(block, Tensor):
        return _PLAIN if block.dtype == torch.bfloat16 and block.is_contiguous() else None
    return block.type if isinstance(block, Tiles) else None


def _matrices(part: MlpWeights) -> tuple[Block, ...]:
    """Returns gate, up and down; an empty tuple if they are stored in other blocks."""
    halves, down = _halves(part.gate_up), part.down
    return (*halves, down) if halves and not isinstance(down, tuple) else ()


def _halves(weight: Weight) -> tuple[Block, Block] | None:
    if isinstance(weight, tuple):
        return weight if len(weight) == 2 and weight[0].shape == weight[1].shape else None
    if isinstance(weight, Tensor):
        return weight[:len(weight) // 2], weight[len(weight) // 2:]
    return weight.halves() if isinstance(weight, Tiles) and weight.rows % (2 * TILE_ROWS) == 0 else None


def _sizes(part: MlpWeights) -> tuple[int, int]:
    """Returns the rows and columns of the gate matrix if the other matrices match it; otherwise zeros."""
    shapes = [(int(matrix.shape[0]), int(matrix.shape[1])) for matrix in _matrices(part)]
    return shapes[0] if shapes and shapes == [shapes[0], shapes[0], shapes[0][::-1]] else (0, 0)


def _bits(kinds: frozenset[str]) -> int:
    return sum(1 << KINDS[kind].number for kind in kinds)


@dataclass(frozen=True, slots=True)
class _QuantizedMoeLayer:
    """A layer's experts. up, down [E + 1] int64: addresses of tiles; the `ExpertTable` has the gates' addresses.

    routed, shared: tile formats. kept: tiles made from a bfloat16 shared expert, kept alive here.
    """

    up: Tensor
    down: Tensor
    routed: Kinds
    shared: Kinds
    kept: tuple[Tiles, ...]


class QuantizedMoeOp(MoeOp):
    """The `MoeOp` of a `PackedShape`. It owns memory for one layer's dequantized experts."""

    max_gemv_tokens = _PASSES * MAX_GEMV_TOKENS
    ahead = 0  # during routing the memory still holds another layer's experts

    def __init__(self, module: Module, shape: PackedShape, layers: Iterable[MoeWeights], blocks: int) -> None:
        self._packed, self._layers = shape, dict[int, _QuantizedMoeLayer]()
        count = shape.count + shape.shared
        self._gate, self._down = (torch.empty(count, rows, columns, dtype=torch.bfloat16, device=module.device)
                                  for rows, columns in ((2 * shape.size, shape.hidden), (shape.hidden, shape.size)))
        self._maps = maps_of(self._gate, 0), maps_of(self._down, 1)
        super().__init__(module, shape, layers, blocks)

    def table(self, weights: MoeWeights) -> ExpertTable:
        kept, parts, wanted = list[Tiles](), list[list[Tiles]](), None
        for part in weights.parts:
            parts.append([])
            for block in _matrices(part):
                if isinstance(block, Tensor):
                    kept.append(block := tiles_of(block))
                assert isinstance(block, Tiles)
                parts[-1].append(block)
        if isinstance(weights.experts, ExpertPool):
            store, layer = weights.experts.store, weights.experts.layer
            assert isinstance(store, TileStore)
            gate, up, down, wanted = store.addresses(layer, parts[0] if parts else ())
            routed: Kinds | None = Kinds(*store.types[layer])
        else:
            gate, up, down = (torch.tensor([block.data.data_ptr() for block in blocks], device=self._module.device)
                              for blocks in zip(*parts, strict=True))
            routed = _kinds(weights.experts[0])
        shared = _kinds(weights.shared) if weights.shared else routed
        assert routed and shared
        self._layers[id(weights)] = _QuantizedMoeLayer(up, down, routed, shared, tuple(kept))
        return ExpertTable(ExpertAddresses(gate, down, *self._maps, wanted), filled_router(weights))

    def _launch_gemv(self, weights: MoeWeights, residual: Tensor, gated: Tensor, gate: dict[str, Any],
                     down: dict[str, Any]) -> None:
        shape, table, layer = self._packed, self._tables[id(weights)], self._layers[id(weights)]
        (group, slots, shared), (down_slots, down_shared) = self._plans[len(residual)]
        self._module.launch("k_packed_gate", (self._blocks,), WARPS * 32 + 32, args.PackedGateArgs(
            gate=table.at.gate, up=layer.up, wanted=table.at.wanted, y=gated, group=group, slots=slots,
            slot=shape.gate_slot, wide=shape.wide(layer.routed), shared_wide=shape.wide(layer.shared),
            gate_kind=_number(layer.routed.gate), up_kind=_number(layer.routed.up),
            shared_gate_kind=_number(layer.shared.gate), shared_up_kind=_number(layer.shared.up), **gate), shared)
        self._module.launch("k_packed_down", (self._blocks,), WARPS * 32 + 32, args.PackedDownArgs(
            x=gated, down=layer.down, y=residual, slots=down_slots, slot=shape.down_slot,
            kind=_number(layer.routed.down), shared_kind=_number(layer.shared.down), **down), down_shared)

    def prepare(self, weights: MoeWeights) -> None:
        """Dequantizes the experts in use."""
        shape, layer = self._packed, self._layers[id(weights)]
        gate, up = self._gate[:, :shape.size], self._gate[:, shape.size:]
        gates = self._tables[id(weights)].at.gate
        for target, data, routed, shared in ((gate, gates, layer.routed.gate, layer.shared.gate),
                                             (up, layer.up, layer.routed.up, layer.shared.up),
                                             (self._down, layer.down, layer.routed.down, layer.shared.down)):
            self._unpack(target[:shape.count], data, routed, self._counts)
            if shape.shared:
                self._unpack(target[shape.count:], data[shape.count:], shared, None)

    def _unpack(self, target: Tensor, data: Tensor, kind: str, counts: Tensor | None) -> None:
        """Dequantizes tiles at the addresses data [n] int64 to target [n, rows, columns] bf16. counts [n] int32: tokens
        of each expert; None: all experts are in use."""
        count, rows, columns = target.shape
        grid = -(-rows // TILE_ROWS * (columns // TILE_COLUMNS) // WARPS), count
        self._module.launch(f"k_unpack_experts_{kind.lower()}", grid, 256, args.UnpackExpertsArgs(
            data=data, y=target, counts=counts, stride=target.stride(0), rows=rows, columns=columns))


def _number(kind: str) -> int:
    return KINDS[kind].number
