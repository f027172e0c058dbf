"""Mixtures of experts in bfloat16: kernel sources, addresses of the experts, and launches for few tokens (gemv) and
for many (gemm)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from ctypes import c_uint64
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from deltic.ops.cuda import arguments as args
from deltic.ops.cuda.card import Card, card_of, default_card
from deltic.ops.cuda.driver import Module, entry, tensor_map
from deltic.ops.cuda.expert_offload import ExpertAddresses, PinnedExpertStore
from deltic.ops.cuda.layout import (
    BOX_COLUMNS,
    BOX_ROWS,
    MAX_GEMV_TOKENS,
    MMA_TOKENS,
    TWO_BLOCKS_SHARED_BYTES,
    WARPS,
)
from deltic.ops.slices import SLICES, slice_ends
from deltic.ops.types import ExpertPool, MlpWeights, MoeWeights, Weight

GATE_SHARED_BYTES, DOWN_SHARED_BYTES = 115 << 10, 98 << 10
"""Shared memory of a block of each product. Blocks of both products then fit on a multiprocessor together."""
_MOST_EXPERTS, _MOST_CHOSEN = 1024, 64
_STAGES = {16: 5, 32: 5, 64: 4, 128: 4}
"""Stages of the grouped products' pipeline by tokens per tile. Blocks with less shared memory have fewer stages."""


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """The shape of a mixture-of-experts layer for which the kernels are compiled.

    count: number of experts, with `size` rows each. per_token: experts that a token uses.
    shared: True with a shared expert of the same size for all tokens. normalised: as in `MoeWeights`.
    host: the host computes some experts of few tokens. shards: devices over which the experts are split.
    """

    hidden: int
    size: int
    count: int
    per_token: int
    shared: bool
    normalised: bool
    host: bool = field(default=False, kw_only=True)
    shards: int = field(default=1, kw_only=True)
    card: Card = field(default_factory=default_card, kw_only=True)

    @property
    def experts_per_token(self) -> int:
        """Experts that a token uses, including the shared expert."""
        return self.per_token + self.shared

    @property
    def groups_shared(self) -> bool:
        """True if the kernels for many tokens also serve the shared expert, because it is not split over devices."""
        return self.shared and self.shards == 1

    @property
    def known(self) -> bool:
        return (self.fits_blocks and self.count <= _MOST_EXPERTS and self.per_token <= _MOST_CHOSEN
                and self.most > 0)

    @property
    def fits_blocks(self) -> bool:
        """True if the matrices consist of whole units of the kernels."""
        return self.hidden % 64 == 0 and self.size % 8 == 0

    @property
    def files(self) -> tuple[str, ...]:
        """The kernel files of the experts. They are included after those of the products."""
        return "experts", "grouped", *["beside"] * self.host

    def joined(self, other: ExpertsShape) -> ExpertsShape | None:
        """Returns a shape with kernels for the layers of both shapes; None if there is none."""
        return self if self == other else None

    @property
    def ring_offset(self) -> int:
        """Bytes of shared memory before the ring of weights: barriers and `Passed`."""
        slots = min(self.count, MAX_GEMV_TOKENS * self.per_token) + self.shared
        passed = 8 * (self.count + 1) + 16 * slots + 4 * self.count + 128 * self.per_token + 64
        passed += 64 * self.experts_per_token
        return -(-(1024 + passed) // 128) * 128

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory of the largest block."""
        return max(self._few_bytes(max(self.most, 1)), *(tile_bytes(self.card, tile) for tile in _STAGES))

    @property
    def most(self) -> int:
        """Largest number of tokens with an input that fits in a block's shared memory."""
        room = self.card.max_shared_bytes
        tokens = takewhile(lambda tokens: self._few_bytes(tokens) <= room, range(1, MAX_GEMV_TOKENS + 1))
        return max(tokens, default=0)

    def _few_bytes(self, tokens: int) -> int:
        return max(self.gate_plan(tokens, 1)[2], self.down_plan(tokens, 1)[1])

    def gate_plan(self, tokens: int, blocks: int) -> tuple[int, int, int]:
        """Returns the units between two sums, the slots of the ring, and the bytes of shared memory of a gate block."""
        units = -(-(min(self.count, tokens * self.per_token) + self.shared) * (self.size // 4) // blocks)
        group = max(1, min(self.card.sum_bytes // (WARPS * 8 * 4 * tokens), units))
        fixed = self.ring_offset + 2 * self.hidden * tokens + 2 * group * WARPS * 8 * 4 * tokens
        slots = ring_slots(fixed, 16 * self.hidden, GATE_SHARED_BYTES, units, self.card, tokens)
        return group, slots, max(TWO_BLOCKS_SHARED_BYTES, fixed + slots * 16 * self.hidden)

    def down_plan(self, tokens: int, blocks: int) -> tuple[int, int]:
        """Returns the slots of the ring and the bytes of shared memory of a block of the down product."""
        experts = min(self.count, tokens * self.per_token) + self.shared
        slot = -(-(32 * self.size + tokens * (-(-self.size // 64) * 128 + 64)) // 128) * 128
        sums = (SLICES * self.shared + WARPS * parts_at_once(tokens)) * 16 * 4 * tokens
        fixed = self.ring_offset + 2 * sums
        slots = ring_slots(fixed, slot, DOWN_SHARED_BYTES, experts * -(-self.hidden // (16 * blocks)),
                           self.card, tokens)
        return slots, max(TWO_BLOCKS_SHARED_BYTES, fixed + slots * slot)

    @property
    def template_args(self) -> str:
        """Template arguments for the numbers of experts."""
        return f"{self.count}, {self.per_token}, {cpp_bool(self.shared)}"

    def entries(self) -> Iterator[str]:
        """Yields the sources of all kernels."""
        yield from self.gemv_entries()
        yield from self.grouped_entries()

    def gemv_entries(self) -> Iterator[str]:
        """Yields the sources of the kernels for few tokens."""
        few = f"{self.hidden}, {self.size}, {self.template_args}, {cpp_bool(self.normalised)}"
        absent = ", true" * (self.host or self.shards > 1)
        resident = self.card.resident(TWO_BLOCKS_SHARED_BYTES)
        for name, many in (("few", False), ("many", True)):
            for kind, type in (("gate", "ExpertsGate"), ("down", "ExpertsDown")):
                yield entry(f"experts_{kind}_{name}", type, f"{WARPS * 32 + 32}, {resident}",
                             f"experts_{kind}<{few}, {cpp_bool(many)}, {self.ring_offset}{absent}>")
        if self.host:
            yield from host_entries(f"{self.hidden}, {self.template_args}, {cpp_bool(self.normalised)}")

    def grouped_entries(self) -> Iterator[str]:
        """Yields the sources of the kernels for many tokens."""
        experts = f"{self.count}, {self.per_token}, {cpp_bool(self.groups_shared)}"
        yield entry("route", "Route", "256", f"route<{experts}, {cpp_bool(self.normalised)}>")
        yield entry("group", "Group", "1024", f"group<{experts}>")
        yield entry("combine", "Combine", "256", "combine")
        for tile in _STAGES:
            stages, resident = _stages(self.card, tile)
            for kind, columns, rows in (("gate", self.hidden, 2 * self.size), ("down", self.size, self.hidden)):
                yield entry(f"grouped_{kind}_{tile}", "Grouped", f"{WARPS * 32 + 32}, {resident}",
                             f"grouped<{columns}, {rows}, {tile}, {stages}, {cpp_bool(kind == 'gate')}>")


def host_entries(arguments: str) -> Iterator[str]:
    """Yields the sources of the kernels that request host compute. arguments: template arguments of `ask_host`."""
    yield entry("ask_host", "AskHost", f"{WARPS * 32 + 32}", f"ask_host<{arguments}>")
    yield entry("add_host", "AddHost", "256", "add_host")


def shape_of(weights: MoeWeights) -> ExpertsShape | None:
    """Returns the shape of a layer; None if the kernels do not support it (dtype, size of the shared expert, or
    quantized experts)."""
    shared, store, router = weights.shared is not None, _store(weights), weights.router
    if not isinstance(router, Tensor):
        return None
    if not all(map(_plain, _matrices(weights))) or (isinstance(weights.experts, ExpertPool) and store is None):
        return None
    hidden, size = (store.hidden, store.size) if store else _sizes(weights.parts[0])[1]
    common = _shared_columns(weights) or size
    own = [size] * (len(weights.parts) - shared) + [common] * shared
    if common % 8 or any(_sizes(part) != ((2 * columns, hidden), (hidden, columns))
                         for part, columns in zip(weights.parts, own, strict=True)):
        return None
    count = len(weights.experts) if weights.shards == 1 else len(router) - shared
    shape = ExpertsShape(hidden, size, count, weights.per_token, shared, weights.normalised,
                         host=store is not None and store.host is not None, shards=weights.shards,
                         card=card_of(router.device))
    return shape if shape.known else None


@dataclass(frozen=True, slots=True)
class ExpertTable:
    """A layer's experts. at: addresses of their matrices. router [n, H]: padded to a multiple of 8 rows."""

    at: ExpertAddresses
    router: Tensor


@dataclass(frozen=True, slots=True)
class RealTokens:
    """The tokens of a batch without padding. count [1] int64: number of rows that are no padding. starts [R + 1] int64:
    first token of each row. None: all tokens are real."""

    count: Tensor | None
    starts: Tensor | None


ALL_REAL = RealTokens(None, None)


class MoeOp:
    """Computes the mixtures of a model's layers.

    max_gemv_tokens: largest number of tokens for which several passes of `gemv_rows` are faster than `gemm_rows`.
    tokens_at_once: largest number of tokens of one pass of `gemv_rows`.
    """

    max_gemv_tokens = 0
    ahead = 8
    """Steps of the first product with weights that are prefetched during routing if nearly all experts are used."""

    def __init__(self, module: Module, shape: ExpertsShape, layers: Iterable[MoeWeights], blocks: int) -> None:
        """blocks: multiprocessors of the card."""
        self._module, self._shape, self._blocks = module, shape, blocks
        self._tables = {id(layer): self.table(layer) for layer in layers}
        self.tokens_at_once, self._plans = shape.most, dict[int, tuple[tuple[int, int, int], tuple[int, int]]]()
        self._counts = torch.zeros(shape.count, dtype=torch.int32, device=module.device)

    def table(self, weights: MoeWeights) -> ExpertTable:
        """Returns the addresses and the router of a layer."""
        return ExpertTable(_addresses(weights, self._module.device), filled_router(weights))

    def prepare(self, weights: MoeWeights) -> None:
        """Prepares the experts' matrices for the grouped products. Called when `_counts`, the tokens of each expert of
        the layer, is known."""

    def gemv_rows(self, weights: MoeWeights, residual: Tensor, scale: Tensor, eps: float, logits: Tensor,
                  real: RealTokens = ALL_REAL, y: Tensor | None = None) -> None:
        """Adds the mixture of few tokens to the residual [T, H] float32. scale [H]: scale of the norm before it. logits
        [T, n] float32: the router's output. y [T, H] float32: receives the device's part, if there are several."""
        for first in range(0, len(residual), self.tokens_at_once):
            part = slice(first, first + self.tokens_at_once)
            x, own = residual[part], logits[part]
            tokens = len(x)
            if tokens not in self._plans:
                self._plans[tokens] = (self._shape.gate_plan(tokens, self._blocks),
                                       self._shape.down_plan(tokens, self._blocks))
            gated = torch.empty(tokens * self._shape.experts_per_token, self._shape.size, dtype=torch.bfloat16,
                                device=x.device)
            numbers = {"tokens": tokens, "first": first, "count": real.count, "starts": real.starts, "logits": own}
            target = x if y is None else y[part]
            self._launch_gemv(weights, target, gated, {"x": x, "scale": scale, "eps": eps, **numbers}, numbers)

    def _launch_gemv(self, weights: MoeWeights, y: Tensor, gated: Tensor, gate: dict[str, Any],
                     down: dict[str, Any]) -> None:
        """Launches both products for tokens that fit in shared memory. y: the residual, or a device's part. gate, down:
        arguments that the kernels of all formats have in common."""
        table, tokens, threads = self._tables[id(weights)], len(y), WARPS * 32 + 32
        shared, count = _shared_columns(weights) or self._shape.size, self._shape.count
        (group, slots, bytes), (down_slots, down_bytes) = self._plans[tokens]
        gate |= {"weights": table.at.gate}
        name, host = "many" if tokens > MMA_TOKENS else "few", table.at.host
        if host:
            self._module.launch("k_ask_host", (tokens,), threads, args.AskHostArgs(
                layer=table.at.layer, **host.request, **gate))
        self._module.launch(f"k_experts_gate_{name}", (self._blocks,), threads, args.ExpertsGateArgs(
            wanted=table.at.wanted, y=gated, group=group, slots=slots, shared=shared, **gate), bytes)
        self._module.launch(f"k_experts_down_{name}", (self._blocks,), threads, args.ExpertsDownArgs(
            x=gated, weights=table.at.down, y=y, slots=down_slots, group=parts_at_once(tokens), shared=shared,
            part=first_part(weights, count), adds=weights.shards == 1, **down), down_bytes)
        if host:
            self._module.launch("k_add_host", (tokens,), 256, args.AddHostArgs(
                y=y, hidden=self._shape.hidden, **host.answer))

    def gemm_rows(self, weights: MoeWeights, x: Tensor, real: RealTokens = ALL_REAL, shared: Tensor | None = None
                  ) -> Tensor:
        """Returns the mixture [T, H] bf16 of normed hidden states [T, H] bf16; zeros for padding. One of several
        devices returns the sum over its experts and `shared` [T, H] bf16: its part of the shared expert, not gated."""
        shape, table, tokens = self._shape, self._tables[id(weights)], len(x)
        each, own = shape.per_token + shape.groups_shared, shape.count
        if weights.shards > 1:
            own = len(weights.experts)
        pairs, tile = tokens * each, _tile(tokens * shape.per_token / shape.count)
        _, resident = _stages(shape.card, tile)
        logits = torch.mm(x, table.router.t(), out_dtype=torch.float32)

        def empty(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(size, dtype=dtype, device=x.device)

        expert, place, rows, total = empty(pairs), empty(pairs), empty(pairs), empty(4)
        share, weight = empty(pairs, dtype=torch.float32), empty(pairs, dtype=torch.float32)
        tiles = empty(shape.count + pairs // tile + 2, 4)
        ordered, gated = x.new_empty(pairs, shape.hidden), x.new_empty(pairs, shape.size)
        outputs = x.new_empty(pairs, shape.hidden)
        self._module.launch("k_route", (-(-tokens // 8),), 256, args.RouteArgs(
            logits=logits, expert=expert, place=place, counts=self._counts, share=share, count=real.count,
            starts=real.starts, tokens=tokens, stride=logits.shape[1], first=weights.first, own=own))
        self.prepare(weights)
        self._module.launch("k_group", (-(-pairs // 32),), 1024, args.GroupArgs(
            x=x, expert=expert, place=place, counts=self._counts, wanted=table.at.wanted, share=share, sorted=ordered,
            rows=rows, tiles=tiles, total=total, weight=weight, count=real.count, starts=real.starts, tokens=tokens,
            hidden=shape.hidden, shift=tile.bit_length() - 1))
        for kind, source, target, maps in (("gate", ordered, gated, table.at.gate_maps),
                                           ("down", gated, outputs, table.at.down_maps)):
            self._module.launch(f"k_grouped_{kind}_{tile}", (resident * self._blocks,), WARPS * 32 + 32,
                                args.GroupedArgs(
                x=_words(tensor_map(source, tile, BOX_COLUMNS)), weights=maps, tiles=tiles, total=total, rows=rows,
                weight=weight, y=target, counts=self._counts if kind == "down" else None, experts=shape.count,
                ahead=self.ahead if kind == "gate" and own == shape.count <= tokens * shape.per_token // 4 else 0),
                tile_bytes(shape.card, tile))
        mixture = torch.empty_like(x)
        self._module.launch("k_combine", (tokens, -(-shape.hidden // 2048)), 256, args.CombineArgs(
            x=outputs, y=mixture, count=real.count, starts=real.starts, expert=expert if own < shape.count else None,
            shared=shared, logits=logits[:, shape.count:], tokens=tokens, hidden=shape.hidden, each=each,
            stride=logits.shape[1]))
        return mixture


def _shared_columns(weights: MoeWeights) -> int:
    """Returns the device's number of columns of a split shared expert; 0 if it is not split or does not exist."""
    return _sizes(weights.shared)[1][1] if weights.shared and weights.shards > 1 else 0


def first_part(weights: MoeWeights, count: int) -> int:
    """Returns the number of the device's first part (`ops.slices`). count: number of all experts."""
    starts = [0, *slice_ends(count, 1)]
    return next(part for part in range(0, SLICES, SLICES // weights.shards) if starts[part] == weights.first)


def _store(weights: MoeWeights) -> PinnedExpertStore | None:
    """Returns the store of bfloat16 experts that are partly in host memory; None if there is no such store."""
    store = weights.experts.store if isinstance(weights.experts, ExpertPool) else None
    return store if isinstance(store, PinnedExpertStore) else None


def _addresses(weights: MoeWeights, device: torch.device) -> ExpertAddresses:
    pairs, store = [_both(part) for part in weights.parts], _store(weights)
    if store and isinstance(weights.experts, ExpertPool):
        return store.addresses(weights.experts.layer, pairs[0] if pairs else None)
    if weights.shards > 1:  # pointers of other devices' experts are null
        count, own = len(weights.router) - (weights.shared is not None), len(weights.experts)
        tables, maps = list[Tensor](), list[Tensor]()
        for index in range(2):
            found = [pair[index].data_ptr() for pair in pairs]
            rest = [0] * (count - weights.first - own)
            tables.append(torch.tensor([*[0] * weights.first, *found[:own], *rest, *found[own:]], device=device))
            # experts without a map have no tiles
            maps.append(torch.zeros(count, 128, dtype=torch.uint8, device=device))
            maps[-1][weights.first:weights.first + own] = maps_of([pair[index] for pair in pairs[:own]], index)
        return ExpertAddresses(tables[0], tables[1], maps[0], maps[1], None)
    gate, down = (torch.tensor([pair[index].data_ptr() for pair in pairs], device=device) for index in range(2))
    gate_maps, down_maps = (maps_of([pair[index] for pair in pairs], index) for index in range(2))
    return ExpertAddresses(gate, down, gate_maps, down_maps, None)


def maps_of(matrices: Iterable[Tensor], index: int) -> Tensor:
    """Returns the matrices' descriptors for the tensor memory accelerator, uint8 [n, 128], on their device. index: 0
    for gate_up, 1 for down matrices."""
    maps, device = bytearray(), torch.device("cpu")
    for matrix in matrices:
        maps += tensor_map(matrix, BOX_ROWS[index], BOX_COLUMNS)
        device = matrix.device
    return torch.frombuffer(maps, dtype=torch.uint8).view(-1, 128).to(device)


def filled_router(weights: MoeWeights) -> Tensor:
    """Returns the router, padded with zeros to a multiple of 8 rows."""
    router = weights.router
    assert isinstance(router, Tensor)
    filled = router.new_zeros(-(-len(router) // 8) * 8, router.shape[1])
    filled[:len(router)] = router
    return filled


def _both(part: MlpWeights) -> tuple[Tensor, Tensor]:
    assert isinstance(part.gate_up, Tensor) and isinstance(part.down, Tensor)
    return part.gate_up, part.down


def _matrices(weights: MoeWeights) -> Iterator[Weight]:
    yield weights.router
    for part in weights.parts:
        yield from (part.gate_up, part.down)


def _plain(weight: Weight) -> bool:
    return (isinstance(weight, Tensor) and weight.is_cuda and weight.dtype == torch.bfloat16
            and weight.is_contiguous() and weight.data_ptr() % 16 == 0)


def _sizes(part: MlpWeights) -> tuple[tuple[int, ...], tuple[int, ...]]:
    gate, down = _both(part)
    return tuple(gate.shape), tuple(down.shape)


def parts_at_once(tokens: int) -> int:
    """Returns the number of parts of the mixture (`ops.slices`) that the threads of a block sum at once."""
    return min(SLICES, 1 << (WARPS * 32 // (16 * tokens)).bit_length() - 1)


def ring_slots(fixed: int, slot: int, beside: int, items: int, card: Card, tokens: int) -> int:
    """Returns the number of slots of a ring. It leaves the next kernel's block its room if at least three slots fit
    next to it; otherwise the ring may take all shared memory. At least two slots, or one if a single token's block has
    no room for two. fixed: bytes of the block besides the ring. beside: bytes of the block beside the next kernel's."""
    shared = card.max_shared_bytes
    few, most = (min(beside, shared) - fixed) // slot, (shared - fixed) // slot
    least = 1 if tokens == most == 1 else 2
    return max(least, min(few if few >= 3 else most, items, 16))


def _tile(average: float) -> int:
    """Returns the tokens per tile, chosen so that few experts have more than one tile. average: tokens per expert."""
    return 16 if average <= 10 else 32 if average <= 24 else 64 if average <= 64 else 128


def _stages(card: Card, tile: int) -> tuple[int, int]:
    """Returns the stages of the pipeline, and the blocks per multiprocessor."""
    for resident in (2, 1) if tile < 128 else (1,):
        fit = ((card.shared_memory + 1024) // resident - 2048) // _stage_bytes(tile)
        if fit >= 2:
            return min(fit, _STAGES[tile]), resident
    raise ValueError(f"{card} has no room for tiles of {tile} tokens")


def _stage_bytes(tile: int) -> int:
    return (128 + tile) * 2 * BOX_COLUMNS + 16


def tile_bytes(card: Card, tile: int) -> int:
    """Returns the bytes of shared memory of a block of a grouped product. tile: as in `_STAGES`."""
    return 1024 + _stages(card, tile)[0] * _stage_bytes(tile)


def _words(map: bytes) -> object:
    return (c_uint64 * 16).from_buffer_copy(map)


def cpp_bool(value: bool) -> str:
    return str(value).lower()
