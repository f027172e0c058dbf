"""Quantized products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltic.ops.cuda import arguments as args
from deltic.ops.cuda.driver import Module
from deltic.ops.cuda.layout import (
    BOUND_FOR_72_REGISTERS,
    MAX_GEMV_TOKENS,
    MAX_SHARED_BYTES,
    MAX_SPLIT_HEAD_TOKENS,
    MMA_TOKENS,
    TWO_BLOCKS_SHARED_BYTES,
    WARPS,
)
from deltic.ops.cuda.quantized_tiles import KINDS, PLAIN_KINDS, TILE_COLUMNS, TILE_ROWS, Tiles, tiles_of
from deltic.ops.types import Block, Weight

_HALF = 104 << 10
"""Bytes of shared memory of a block beside which there is room for the next product's."""
_INPUT = 144 << 10
"""Bytes of input that a block keeps in shared memory at most."""
_SUMS = 16 << 10
"""Bytes of a block's sums, if they fit; of two rounds' sums."""
_PARTS, _SLOTS = 4, 16
"""Most parts of a weight; most slots of a ring."""
_LINES = 4 * 144
"""Bytes of a tile's columns of x, as whole numbers."""
_LONG = 32
"""Units of a block, for each multiprocessor one, from which on the next kernel's need not find room beside it."""


def parts_of(weight: Weight, gate: bool) -> tuple[Tiles, ...] | None:
    """The parts of a weight that has tiles, the plain ones as tiles too; gate: two, of its gate and of the other half.
    None: it cannot be served so."""
    blocks = weight if isinstance(weight, tuple) else (weight,)
    if len(blocks) > _PARTS or not any(isinstance(block, Tiles) for block in blocks):
        return None
    parts = tuple(found for found in map(_tiles, blocks) if found is not None)
    if gate and len(parts) == 1 and parts[0].rows % (2 * TILE_ROWS) == 0:
        parts = parts[0].halves()
    return parts if len(parts) >= len(blocks) and (not gate or len(parts) == 2) else None


def _tiles(block: Block) -> Tiles | None:
    if isinstance(block, Tensor) and block.dtype == torch.bfloat16 and block.shape[1] % TILE_COLUMNS == 0:
        return tiles_of(block)
    return block if isinstance(block, Tiles) else None


@dataclass(frozen=True, slots=True)
class PackedMultiply:
    """A product: columns of its weight, whether its input is normalised, what becomes of its sums, what kinds of tiles
    it has, in how many parts, how many units are multiplied at once, of few tokens. head, slice: as of
    `shapes.Multiply`."""

    columns: int
    norm: bool
    out: int
    kinds: frozenset[str]
    parts: int = 1
    high: int = 1
    head: int = 0
    slice: int = 0

    @property
    def most(self) -> int:
        """Tokens whose input fits in a block's shared memory, and that it is used for."""
        return min(MAX_SPLIT_HEAD_TOKENS if self.head else MAX_GEMV_TOKENS, _INPUT // _input(self.columns, self.kinds))

    def name(self, tokens: int) -> str:
        kind = "norm" if self.norm else "heads" if self.head else "plain"
        return (f"packed_{self.columns}_{kind}_{('store', 'add', 'gate')[self.out]}"
                f"_{'_'.join(sorted(self.kinds)).lower()}_{_class(tokens)}{'_high' * (self._high(tokens) - 1)}")

    def source(self, tokens: int) -> str:
        kinds = sum(1 << KINDS[kind].number for kind in self.kinds)
        threads = BOUND_FOR_72_REGISTERS if tokens == 1 else WARPS * 32 + 32
        return (f'extern "C" __global__ void __launch_bounds__({threads}, 2) {self.name(tokens)}'
                f"(const __grid_constant__ Packed a) {{ packed<{self.columns}, {str(self.norm).lower()}, {self.out}, "
                f"{_class(tokens)}, {kinds}, {self._high(tokens)}, {self.head}, {self.slice}>(a); }}\n")

    @property
    def shared(self) -> int:
        """Bytes of shared memory that a block takes at most."""
        return max(self.plan(tokens, (1 << 20,) * self.parts).shared for tokens in range(1, self.most + 1))

    def _high(self, tokens: int) -> int:
        return self.high if tokens <= MMA_TOKENS // 2 else 1

    def plan(self, tokens: int, counts: tuple[int, ...]) -> ProductPlan:
        """counts: units of the parts that a block has at most."""
        high = self._high(tokens)
        tile = self.columns // TILE_COLUMNS
        unit = tile * TILE_ROWS * tokens * 4
        most = max(counts)
        round = most
        if sum(counts) * unit > _SUMS:  # a multiple of `high`, so that only the last units may be alone
            fits = [units for units in range(high, min(most, _SUMS // unit) + 1, high)
                    if sum(min(units, count) for count in counts) * unit <= _SUMS // 2]
            round = max(fits, default=high)
        rounds = -(-most // round)
        sums = sum(min(round, count) for count in counts) * unit
        slot = _slot(self.kinds, high)
        fixed = 1024 + tokens * _input(self.columns, self.kinds) + sums * min(rounds, 2)
        beside = (_HALF - fixed) // slot
        # what a block has in all
        wanted = sum(-(-(-(-min(round, count) // high) * tile) // WARPS) for count in counts) * rounds
        slots = max(2, min(beside if beside >= 3 else (MAX_SHARED_BYTES - fixed) // slot, _SLOTS, wanted))
        return ProductPlan(round, rounds, sums // 4, slots, slot, max(TWO_BLOCKS_SHARED_BYTES, fixed + slots * slot))


@dataclass(frozen=True, slots=True)
class ProductPlan:
    """round: units of each part between two sums. sums: floats of a round. slots, slot: how many, and bytes of each.
    shared: bytes of shared memory of a block."""

    round: int
    rounds: int
    sums: int
    slots: int
    slot: int
    shared: int


def _class(tokens: int) -> int:
    return 1 if tokens == 1 else 8 if tokens <= 8 else 16


def _slot(kinds: frozenset[str], high: int) -> int:
    """Bytes of a slot of the ring."""
    return high * WARPS * max(KINDS[kind].nbytes for kind in kinds)


def _input(columns: int, kinds: frozenset[str]) -> int:
    """Bytes of a token's input."""
    return columns // TILE_COLUMNS * _LINES * (not kinds <= PLAIN_KINDS) + columns * 2 * bool(kinds & PLAIN_KINDS)


def product_of(parts: tuple[Tiles, ...], norm: bool, out: int, blocks: int, head: int = 0,
               slice: int = 0) -> PackedMultiply:
    columns, kinds, units = parts[0].columns, frozenset(part.type for part in parts), max(map(_units, parts))
    room = _HALF - 1024 - _input(columns, kinds) - units // blocks * (columns // TILE_COLUMNS * TILE_ROWS * 4)
    high = 2 if units > blocks and (room >= 3 * _slot(kinds, 2) or units >= _LONG * blocks) else 1
    return PackedMultiply(columns, norm, out, kinds, len(parts), high, head, slice)


def _units(part: Tiles) -> int:
    return len(part.data)


def launch(module: Module, product: PackedMultiply, parts: tuple[Tiles, ...], tokens: int, blocks: int,
           **values: Any) -> None:
    """values: the members x, scale, y and eps of `arguments.PackedArgs`."""
    plan, filled = arguments(product, parts, tokens, blocks, **values)
    module.launch(product.name(tokens), (blocks,), WARPS * 32 + 32, filled, plan.shared)


def arguments(product: PackedMultiply, parts: tuple[Tiles, ...], tokens: int, blocks: int,
              **values: Any) -> tuple[ProductPlan, args.PackedArgs]:
    gate = product.out == 2
    units = [len(part.data) for part in parts]
    whole, rest = [unit // blocks for unit in units], [unit % blocks for unit in units]
    # so that no block has one more of every part; a gate and its partner lie in the same block
    shift = [0 if gate else sum(rest[:index]) % blocks for index in range(len(parts))]
    plan = product.plan(tokens, tuple(w + (r > 0) for w, r in zip(whole, rest, strict=True)))
    row = [0 if gate else sum(part.rows for part in parts[:index]) for index in range(len(parts))]
    total = parts[0].rows if gate else sum(part.rows for part in parts)
    return plan, args.PackedArgs(
        data=_four([part.data.data_ptr() for part in parts]), tokens=tokens, total=total,
        inverse=65536 // tokens + 1, slots=plan.slots, slot=plan.slot, parts=len(parts), rounds=plan.rounds,
        round=plan.round, sums=plan.sums, kind=_four([part.kind.number for part in parts]), row=_four(row),
        rows=_four([part.rows for part in parts]), whole=_four(whole), rest=_four(rest), shift=_four(shift), **values)


def _four(values: list[int]) -> tuple[int, ...]:
    return (*values, *[0] * (_PARTS - len(values)))


def kinds_entries(kinds: frozenset[str]) -> Iterator[tuple[str, str, str, str]]:
    """What `shapes.entry` wants, of the kernels that turn tiles into plain numbers."""
    for kind in sorted(kinds):
        number = KINDS[kind].number
        yield f"unpack_{kind.lower()}", "Unpack", "256", f"unpack<{number}>"
        yield f"enter_{kind.lower()}", "Enter", "256", f"enter_packed<{number}>"


def unpack(module: Module, parts: tuple[Tiles, ...]) -> Tensor:
    """The whole weight as bfloat16 [rows, columns], for as long as it is needed."""
    rows, columns = sum(part.rows for part in parts), parts[0].columns
    plain = torch.empty(rows, columns, dtype=torch.bfloat16, device=parts[0].data.device)
    first = 0
    for part in parts:
        tiles = len(part.data) * (columns // TILE_COLUMNS)
        module.launch(f"k_unpack_{part.type.lower()}", (-(-tiles // 8),), 256, args.UnpackArgs(
            data=part.data, y=plain[first:], rows=part.rows, columns=columns))
        first += part.rows
    return plain
