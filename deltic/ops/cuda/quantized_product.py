"""Products of up to 16 tokens with quantized weights: selects their kernels and plans the blocks' shared memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from deltic.ops.cuda import arguments as args
from deltic.ops.cuda.card import Card, card_of, default_card
from deltic.ops.cuda.driver import KernelArguments, Module
from deltic.ops.cuda.layout import (
    BOUND_FOR_72_REGISTERS,
    MAX_GEMV_TOKENS,
    MAX_SPLIT_HEAD_TOKENS,
    MMA_TOKENS,
    TWO_BLOCKS_SHARED_BYTES,
    WARPS,
)
from deltic.ops.cuda.quantized import KINDS, PLAIN_KINDS, TILE_COLUMNS, TILE_ROWS, Tiles, tiles_of
from deltic.ops.cuda.sliced_product import WHOLE, ColumnSlices
from deltic.ops.types import Block, Weight

_OVERLAP_SHARED_BYTES = 104 << 10
"""Shared memory of a block that leaves room for the next product's block."""
_MAX_PARTS, _MAX_SLOTS = 4, 16
"""Largest number of parts of a weight, and of slots of a ring."""
_CHUNK_TILES = 8
"""The tiles of an input's chunk are a multiple of this number: one tile per warp."""
_LINE_BYTES = 4 * 144
"""Bytes of a token's input for the columns of one tile, quantized to integers."""
_PIECE_WEIGHTS = 1 << 26
"""Weights that are dequantized at once for many tokens: 128 MiB of bfloat16."""
_LONG_TILES = 256
"""A block with at least this number of tiles may take the next kernel's shared memory."""


def parts_of(weight: Weight, gate: bool) -> tuple[Tiles, ...] | None:
    """Returns the parts of a quantized weight, with bfloat16 parts converted to tiles; None if the kernels cannot serve
    the weight. gate: the weight consists of gate and up, which become two parts."""
    blocks = weight if isinstance(weight, tuple) else (weight,)
    if len(blocks) > _MAX_PARTS or not any(isinstance(block, Tiles) for block in blocks):
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
    """A product with a quantized weight.

    columns: the weight's columns. norm: the input is RMS-normed first. out: STORE, ADD, GATE or PART (kernel_config).
    kinds: tile formats. parts: number of the weight's parts. high: units that are multiplied at once for few tokens.
    head, slice, split, terms: as in `kernel_config.Multiply`.
    """

    columns: int
    norm: bool
    out: int
    kinds: frozenset[str]
    parts: int = 1
    high: int = 1
    head: int = 0
    slice: int = 0
    split: ColumnSlices = WHOLE
    card: Card = field(default_factory=default_card)
    terms: bool = False

    @property
    def most(self) -> int:
        """Largest number of tokens; 0 if not even one fits."""
        fit = self._fit(1)
        if self._may_chunk:
            chunk = _CHUNK_TILES * (self._tile_input + 32 * self.parts)
            fit = max(fit, self.card.product_bytes // (chunk + self._kept * self.parts))
        return min(MAX_SPLIT_HEAD_TOKENS if self.head else MAX_GEMV_TOKENS, fit)

    @property
    def _may_chunk(self) -> bool:
        """True if the input can be staged in chunks of columns. This needs at least one tile per slice."""
        return not self.norm and not self.head and self.out != 2 and (
            self.split.runs > 1 or self.columns // TILE_COLUMNS >= self.split.slices)

    @property
    def _sliced(self) -> bool:
        return self.out in (1, 3)

    @property
    def _kept(self) -> int:
        """Bytes of the sums per unit and token that a chunk leaves to the next one."""
        return TILE_ROWS * 4 * (self._kept_slices if self._sliced else 2)

    @property
    def _kept_slices(self) -> int:
        """Number of sums that a chunk leaves to the next one, as `kept_sums` of kernels/packed.cuh computes it."""
        slices = self.split.slices
        return slices if self.split.runs > 1 else slices.bit_length()

    @property
    def _tile_input(self) -> int:
        return _input(TILE_COLUMNS, self.kinds)

    def _chunked(self, tokens: int) -> bool:
        """True if the input of `tokens` tokens does not fit as a whole."""
        return tokens > self._fit(1)

    def name(self, tokens: int) -> str:
        kind = "norm" if self.norm else "heads" if self.head else "plain"
        out, tiles = ("store", "add", "gate", "part")[self.out], "_".join(sorted(self.kinds)).lower()
        return (f"packed_{self.columns}_{kind}_{out}_{tiles}_{_class(tokens, self.kinds)}"
                f"{'_high' * (self._high(tokens) - 1)}{'_chunked' * self._chunked(tokens)}"
                f"{self.split.suffix * self._sliced}{'_terms' * self.terms}")

    def source(self, tokens: int) -> str:
        kinds = sum(1 << KINDS[kind].number for kind in self.kinds)
        few = _class(tokens, self.kinds) <= MMA_TOKENS // 2  # more tokens need more registers than two blocks have
        resident = self.card.resident(TWO_BLOCKS_SHARED_BYTES) if few else 1
        threads = BOUND_FOR_72_REGISTERS if tokens == 1 and resident > 1 else WARPS * 32 + 32
        type, more = ("AddedPacked", ", true") if self.terms else ("Packed", "")
        return (f'extern "C" __global__ void __launch_bounds__({threads}, {resident}) {self.name(tokens)}'
                f"(const __grid_constant__ {type} a) {{ packed<{self.columns}, {str(self.norm).lower()}, {self.out}, "
                f"{_class(tokens, self.kinds)}, {kinds}, {self._high(tokens)}, {self.head}, {self.slice}, "
                f"{str(self._chunked(tokens)).lower()}, {self.split.slices}, {self.split.runs}{more}>(a); }}\n"
                f"static_assert(kept_sums({self.split.slices}, {self.split.runs}) == {self._kept_slices});\n")

    @property
    def shared(self) -> int:
        """Largest shared memory of a block, in bytes."""
        return max(self.plan(tokens, (1 << 20,) * self.parts).shared for tokens in range(1, self.most + 1))

    def _high(self, tokens: int) -> int:
        most = MMA_TOKENS // 2 if self.kinds & PLAIN_KINDS else MAX_GEMV_TOKENS
        return self.high if tokens <= min(most, self._fit(self.high)) else 1

    def _fit(self, high: int) -> int:
        """Returns the largest number of tokens with room for their input, the sums of `high` units, and the ring."""
        input = _input(self.columns, self.kinds)
        sums = 2 * self.parts * high * self.columns // TILE_COLUMNS * TILE_ROWS * 4
        room = self._room(high)
        return min(room // (input + sums), (room - 2 * self.card.sum_bytes) // input)

    def _room(self, high: int) -> int:
        """Returns the most shared memory for the input and the sums if the ring has two slots, in bytes."""
        return min(self.card.product_bytes, self.card.max_shared_bytes - 1024 - 2 * _slot(self.kinds, high))

    def plan(self, tokens: int, counts: tuple[int, ...]) -> ProductPlan:
        """Plans the shared memory of a block. counts: largest number of units of each part in a block."""
        if self._chunked(tokens):
            return self._chunked_plan(tokens, counts)
        high = self._high(tokens)
        tile, unit = self.columns // TILE_COLUMNS, self.columns // TILE_COLUMNS * TILE_ROWS * tokens * 4
        round = most = max(counts)
        room, shared = 2 * self.card.sum_bytes, self.card.max_shared_bytes
        if tokens > MMA_TOKENS // 2:  # multiplying takes longer than copying: equal work of all warps matters more
            room = max(room, self._room(high) - tokens * _input(self.columns, self.kinds))
        if sum(counts) * unit > room:  # a multiple of `high`, so that only the last unit may be single
            fits = [units for units in range(high, min(most, room // unit) + 1, high)
                    if sum(min(units, count) for count in counts) * unit <= room // 2]
            round = max(fits, default=high)
            if tokens > MMA_TOKENS // 2:  # fewer units if that takes no longer, because sums take room from the ring
                round = min(fits, key=lambda units: (self._steps(units, most, high), units), default=high)
        rounds = -(-most // round)
        sums = sum(min(round, count) for count in counts) * unit
        slot = _slot(self.kinds, high)
        fixed = 1024 + tokens * _input(self.columns, self.kinds) + sums * min(rounds, 2)
        overlapping = (min(_OVERLAP_SHARED_BYTES, shared) - fixed) // slot
        # total number of slots that a block fills
        wanted = sum(-(-(-(-min(round, count) // high) * tile) // WARPS) for count in counts) * rounds
        fit = overlapping if overlapping >= 3 else (shared - fixed) // slot
        slots = max(2, min(fit, _MAX_SLOTS, wanted))
        return ProductPlan(round, rounds, sums // 4, slots, slot, max(TWO_BLOCKS_SHARED_BYTES, fixed + slots * slot))

    def _steps(self, round: int, most: int, high: int) -> int:
        """Returns the tiles per warp if `round` of `most` units of each part are multiplied between two sums."""
        def steps(units: int) -> int:
            return -(-self.parts * -(-units // high) * (self.columns // TILE_COLUMNS) // WARPS)
        return most // round * steps(round) + steps(most % round)

    def _chunked_plan(self, tokens: int, counts: tuple[int, ...]) -> ProductPlan:
        """Returns the plan that stages the fewest chunks."""
        tiles, slot, found = self.columns // TILE_COLUMNS, _slot(self.kinds, 1), list[tuple[int, int, int, int]]()
        round = max(counts)
        while True:
            units = sum(min(round, count) for count in counts)
            each = tokens * (self._tile_input + units * TILE_ROWS * 4)
            chunk = (self.card.product_bytes - units * tokens * self._kept) // each // _CHUNK_TILES * _CHUNK_TILES
            if chunk > 0:
                rounds = -(-max(counts) // round)
                found.append((rounds * -(-tiles // chunk), round, chunk, units))
            if round == 1:
                break
            round = -(-round // 2)
        _, round, chunk, units = min(found)
        fixed = 1024 + chunk * tokens * (self._tile_input + units * TILE_ROWS * 4) + units * tokens * self._kept
        slots = max(2, min((self.card.max_shared_bytes - fixed) // slot, _MAX_SLOTS))
        return ProductPlan(round, -(-max(counts) // round), units * chunk * TILE_ROWS * tokens, slots, slot,
                           max(TWO_BLOCKS_SHARED_BYTES, fixed + slots * slot), chunk)


@dataclass(frozen=True, slots=True)
class ProductPlan:
    """The shared memory of a block.

    round: units of each part between two sums over tiles. rounds: number of rounds. sums: floats of a round's sums.
    slots, slot: slots of the ring, and bytes of a slot. shared: bytes of all shared memory.
    chunk: tiles of a row for which the input is staged at once; 0: all tiles.
    """

    round: int
    rounds: int
    sums: int
    slots: int
    slot: int
    shared: int
    chunk: int = 0


def _class(tokens: int, kinds: frozenset[str]) -> int:
    """Returns the largest number of tokens of the kernel for `tokens`. Plain tiles always take eight tokens at once."""
    few = MMA_TOKENS if kinds <= PLAIN_KINDS else MMA_TOKENS // 2
    return 1 if tokens == 1 else next(most for most in (few, MMA_TOKENS, MAX_GEMV_TOKENS) if tokens <= most)


def _slot(kinds: frozenset[str], high: int) -> int:
    """Returns the bytes of a slot of the ring."""
    return high * WARPS * max(KINDS[kind].nbytes for kind in kinds)


def _input(columns: int, kinds: frozenset[str]) -> int:
    """Returns the bytes of a token's input."""
    return columns // TILE_COLUMNS * _LINE_BYTES * (not kinds <= PLAIN_KINDS) + columns * 2 * bool(kinds & PLAIN_KINDS)


def product_of(parts: tuple[Tiles, ...], norm: bool, out: int, blocks: int, head: int = 0, slice: int = 0,
               split: ColumnSlices = WHOLE) -> PackedMultiply:
    columns, kinds, card = parts[0].columns, frozenset(part.type for part in parts), card_of(parts[0].data.device)
    if columns // TILE_COLUMNS % split.runs:  # on a single device only: parts of several devices have whole tiles
        split = replace(split, runs=1)
    units = max(len(part.data) for part in parts)
    sums = -(-units // blocks) * (columns // TILE_COLUMNS * TILE_ROWS * 4)
    room = min(_OVERLAP_SHARED_BYTES, card.max_shared_bytes) - 1024 - _input(columns, kinds) - sums
    long = units * (columns // TILE_COLUMNS) >= _LONG_TILES * blocks
    high = 2 if units > blocks and (room >= 3 * _slot(kinds, 2) or long) else 1
    return PackedMultiply(columns, norm, out, kinds, len(parts), high, head, slice, split, card)


def launch(module: Module, product: PackedMultiply, parts: tuple[Tiles, ...], tokens: int, blocks: int,
           **values: Any) -> None:
    """Launches a product. values: x, scale, y and eps of `PackedArgs`; with adapters also terms and entries."""
    plan, filled = arguments(product, parts, tokens, blocks, **values)
    module.launch(product.name(tokens), (blocks,), WARPS * 32 + 32, filled, plan.shared)


def arguments(product: PackedMultiply, parts: tuple[Tiles, ...], tokens: int, blocks: int,
              **values: Any) -> tuple[ProductPlan, KernelArguments]:
    gate, units = product.out == 2, [len(part.data) for part in parts]
    whole, rest = [unit // blocks for unit in units], [unit % blocks for unit in units]
    # each part has its additional units in other blocks, except that gate and up must be in the same block
    shift = [0 if gate else sum(rest[:index]) % blocks for index in range(len(parts))]
    plan = product.plan(tokens, tuple(w + (r > 0) for w, r in zip(whole, rest, strict=True)))
    row = [0 if gate else sum(part.rows for part in parts[:index]) for index in range(len(parts))]
    total = parts[0].rows if gate else sum(part.rows for part in parts)
    return plan, (args.AddedPackedArgs if product.terms else args.PackedArgs)(
        data=_four([part.data.data_ptr() for part in parts]), tokens=tokens, total=total,
        inverse=65536 // tokens + 1, slots=plan.slots, slot=plan.slot, parts=len(parts), rounds=plan.rounds,
        round=plan.round, sums=plan.sums, chunk=plan.chunk, kind=_four([part.kind.number for part in parts]),
        row=_four(row), rows=_four([part.rows for part in parts]), whole=_four(whole), rest=_four(rest),
        shift=_four(shift), **values)


def _four(values: list[int]) -> tuple[int, ...]:
    return (*values, *[0] * (_MAX_PARTS - len(values)))


def scratch_for(weights: Iterable[tuple[Tiles, ...]]) -> Tensor | None:
    """Allocates memory for the largest piece of any of these weights in bfloat16; None if there are no weights."""
    pieces = [rows * parts[0].columns for parts in weights for rows, _ in pieces_of(parts)]
    device = next((parts[0].data.device for parts in weights), None)
    return torch.empty(max(pieces), dtype=torch.bfloat16, device=device) if pieces else None


def pieces_of(parts: tuple[Tiles, ...]) -> Iterator[tuple[int, tuple[Tiles, ...]]]:
    """Yields the rows and the parts of each piece in which a weight is dequantized, up to _PIECE_WEIGHTS weights."""
    rows = sum(part.rows for part in parts)
    if rows * parts[0].columns <= _PIECE_WEIGHTS:
        yield rows, parts
        return
    most = max(1, _PIECE_WEIGHTS // (parts[0].columns * TILE_ROWS))
    for part in parts:
        for first in range(0, len(part.data), most):
            rows = min(most * TILE_ROWS, part.rows - first * TILE_ROWS)
            yield rows, (replace(part, rows=rows, data=part.data[first:first + most]),)


def unpack(module: Module, parts: tuple[Tiles, ...], memory: Tensor | None = None) -> Tensor:
    """Returns the weight dequantized to bfloat16 [rows, columns], as a view of `memory`, or of new memory if None."""
    rows, columns = sum(part.rows for part in parts), parts[0].columns
    if memory is None:
        memory = torch.empty(rows * columns, dtype=torch.bfloat16, device=parts[0].data.device)
    plain, first = memory[:rows * columns].view(rows, columns), 0
    for part in parts:
        tiles = len(part.data) * (columns // TILE_COLUMNS)
        module.launch(f"k_unpack_{part.type.lower()}", (-(-tiles // 8),), 256, args.UnpackArgs(
            data=part.data, y=plain[first:], rows=part.rows, columns=columns))
        first += part.rows
    return plain
