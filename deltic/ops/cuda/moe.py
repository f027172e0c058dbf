"""Mixtures of experts: their kernels, where the experts lie, and what is launched for few tokens and for many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from ctypes import c_uint64
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deltic.ops.cuda import arguments as args
from deltic.ops.cuda.driver import Module, tensor_map
from deltic.ops.cuda.expert_stores import ExpertAddresses, PinnedExpertStore
from deltic.ops.cuda.layout import (
    BOX_COLUMNS,
    BOX_ROWS,
    MAX_GEMV_TOKENS,
    MAX_SHARED_BYTES,
    MMA_TOKENS,
    TWO_BLOCKS_SHARED_BYTES,
    WARPS,
)
from deltic.ops.types import ExpertPool, MlpWeights, MoeWeights, Weight

GATE_SHARED_BYTES, DOWN_SHARED_BYTES = 115 << 10, 98 << 10
"""Bytes of shared memory of the blocks of both products, which then lie on a multiprocessor together."""
SUM_BYTES = 8 << 10
"""Bytes of a group's sums."""
_MOST_EXPERTS, _MOST_CHOSEN = 1024, 64
_STAGES = {16: 5, 32: 5, 64: 4, 128: 4}
"""By the tokens of a tile."""


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """What the kernels are made for: count experts of `size` rows, of which a token passes per_token; shared: and one
    more of the same size. normalised: as in `MoeWeights`. host: some of them are computed by the host, for few
    tokens."""

    hidden: int
    size: int
    count: int
    per_token: int
    shared: bool
    normalised: bool
    host: bool = field(default=False, kw_only=True)

    @property
    def each(self) -> int:
        """Experts of a token."""
        return self.per_token + self.shared

    @property
    def known(self) -> bool:
        return (self.fits_blocks and self.count <= _MOST_EXPERTS and self.per_token <= _MOST_CHOSEN
                and self.shared_memory <= MAX_SHARED_BYTES)

    @property
    def fits_blocks(self) -> bool:
        """Whether the matrices are whole units of the kernels."""
        return self.hidden % 64 == 0 and self.size % 8 == 0

    @property
    def files(self) -> tuple[str, ...]:
        """The kernel files of the kernels, behind those of products."""
        return "experts", "grouped", *["beside"] * self.host

    def joined(self, other: ExpertsShape) -> ExpertsShape | None:
        """What serves layers of both shapes; None where nothing does."""
        return self if self == other else None

    @property
    def offset(self) -> int:
        """Where the rings begin: behind the barriers and `Passed`."""
        slots = min(self.count, MAX_GEMV_TOKENS * self.per_token) + self.shared
        passed = 8 * (self.count + 1) + 16 * slots + 4 * self.count + 64 * self.each + 128 * self.per_token + 64
        return -(-(1024 + passed) // 128) * 128

    @property
    def shared_memory(self) -> int:
        """Bytes that the largest block takes."""
        return max(self._few_bytes(max(self.most, 1)), *map(_tile_bytes, _STAGES))

    @property
    def most(self) -> int:
        """Tokens whose input fits in a block's shared memory."""
        return max(
            (tokens for tokens in range(1, MAX_GEMV_TOKENS + 1) if self._few_bytes(tokens) <= MAX_SHARED_BYTES),
            default=0,
        )

    def _few_bytes(self, tokens: int) -> int:
        return max(self.gate_plan(tokens, 1)[2], self.down_plan(tokens, 1)[1])

    def gate_plan(self, tokens: int, blocks: int) -> tuple[int, int, int]:
        """Units between two sums, slots of the ring, bytes of shared memory."""
        units = -(-(min(self.count, tokens * self.per_token) + self.shared) * (self.size // 4) // blocks)
        group = max(1, min(SUM_BYTES // (WARPS * 8 * 4 * tokens), units))
        fixed = self.offset + 2 * self.hidden * tokens + 2 * group * WARPS * 8 * 4 * tokens
        slots = ring_slots(fixed, 16 * self.hidden, GATE_SHARED_BYTES, units)
        return group, slots, max(TWO_BLOCKS_SHARED_BYTES, fixed + slots * 16 * self.hidden)

    def down_plan(self, tokens: int, blocks: int) -> tuple[int, int]:
        """Slots of the ring, bytes of shared memory."""
        experts = min(self.count, tokens * self.per_token) + self.shared
        slot = -(-(32 * self.size + tokens * (-(-self.size // 64) * 128 + 64)) // 128) * 128
        fixed = self.offset + 2 * WARPS * 16 * 4 * tokens
        slots = ring_slots(fixed, slot, DOWN_SHARED_BYTES, experts * -(-self.hidden // (16 * blocks)))
        return slots, max(TWO_BLOCKS_SHARED_BYTES, fixed + slots * slot)

    @property
    def who(self) -> str:
        """What kernels are told of which experts there are."""
        return f"{self.count}, {self.per_token}, {cpp_bool(self.shared)}"

    def entries(self) -> Iterator[str]:
        """The text of all kernels."""
        yield from self.gemv_entries()
        yield from self.grouped_entries()

    def gemv_entries(self) -> Iterator[str]:
        """Of those for few tokens."""
        few, host = f"{self.hidden}, {self.size}, {self.who}, {cpp_bool(self.normalised)}", ", true" * self.host
        for name, many in (("few", False), ("many", True)):
            for kind, type in (("gate", "ExpertsGate"), ("down", "ExpertsDown")):
                yield kernel(f"experts_{kind}_{name}", type, f"{WARPS * 32 + 32}, 2",
                             f"experts_{kind}<{few}, {cpp_bool(many)}, {self.offset}{host}>")
        if self.host:
            yield kernel("ask_host", "AskHost", f"{WARPS * 32 + 32}",
                         f"ask_host<{self.hidden}, {self.who}, {cpp_bool(self.normalised)}>")
            yield kernel("add_host", "AddHost", "256", "::add_host")

    def grouped_entries(self) -> Iterator[str]:
        """Of those for many."""
        who = self.who
        yield kernel("route", "Route", "256", f"route<{who}, {cpp_bool(self.normalised)}>")
        yield kernel("group", "Group", "1024", f"group<{who}>")
        yield kernel("combine", "Combine", "256", "::combine")
        for tile, stages in _STAGES.items():
            for kind, columns, rows in (("gate", self.hidden, 2 * self.size), ("down", self.size, self.hidden)):
                yield kernel(f"grouped_{kind}_{tile}", "Grouped", f"{WARPS * 32 + 32}, {_resident(tile)}",
                             f"grouped<{columns}, {rows}, {tile}, {stages}, {cpp_bool(kind == 'gate')}>")


def shape_of(weights: MoeWeights) -> ExpertsShape | None:
    """None where the kernels do not know them: another dtype, another size of the shared expert, quantized ones."""
    shared, store = weights.shared is not None, _store(weights)
    if not all(map(_plain, _matrices(weights))) or (isinstance(weights.experts, ExpertPool) and store is None):
        return None
    hidden, size = (store.hidden, store.size) if store else _sizes(weights.parts[0])[1]
    if any(_sizes(part) != ((2 * size, hidden), (hidden, size)) for part in weights.parts):
        return None
    shape = ExpertsShape(hidden, size, len(weights.experts), weights.per_token, shared, weights.normalised,
                         host=store is not None and store.host is not None)
    return shape if shape.known else None


@dataclass(frozen=True, slots=True)
class ExpertTable:
    """at: where the matrices of all experts lie. router [n, H]: filled up to a multiple of 8 rows."""

    at: ExpertAddresses
    router: Tensor


@dataclass(frozen=True, slots=True)
class RealTokens:
    """Which tokens do not only fill a bucket up: those of the first rows. count [1], starts [R + 1] int64: how many
    rows these are, and where rows begin; None: all tokens are real."""

    count: Tensor | None
    starts: Tensor | None


ALL_REAL = RealTokens(None, None)


class MoeOp:
    """The mixtures of a model's layers.

    max_gemv_tokens: up to so many tokens `gemv_rows` is faster, in several passes, than `gemm_rows`; 0: not.
    """

    max_gemv_tokens = 0
    ahead = 8
    """Steps of the first product that are fetched while tokens choose, where nearly all experts are passed by some."""

    def __init__(self, module: Module, shape: ExpertsShape, layers: Iterable[MoeWeights], blocks: int) -> None:
        """blocks: multiprocessors of the card."""
        self._module, self._shape, self._blocks = module, shape, blocks
        self._tables = {id(layer): self.table(layer) for layer in layers}
        self._counts = torch.zeros(shape.count, dtype=torch.int32, device=module.device)

    def table(self, weights: MoeWeights) -> ExpertTable:
        """What is known of a layer."""
        return ExpertTable(_addresses(weights, self._module.device), filled_router(weights))

    def prepare(self, weights: MoeWeights) -> None:
        """Called when it is known how many tokens pass each expert of the layer (`_counts`), before `grouped.cuh`
        reads those of them."""

    def gemv_rows(
        self,
        weights: MoeWeights,
        residual: Tensor,
        scale: Tensor,
        eps: float,
        logits: Tensor,
        real: RealTokens = ALL_REAL,
        first: int = 0,
    ) -> None:
        """Adds what the experts give to the residual [T, H] float32 of up to 16 tokens. scale [H]: of the norm before
        them. logits [T, n] float32: what the router gives. first: of the step's tokens."""
        shape, table, tokens = self._shape, self._tables[id(weights)], len(residual)
        if tokens > shape.most:
            half = -(-tokens // 2)
            for part, begins in ((slice(half), first), (slice(half, tokens), first + half)):
                self.gemv_rows(weights, residual[part], scale, eps, logits[part], real, begins)
            return
        name = "many" if tokens > MMA_TOKENS else "few"
        gated = torch.empty(tokens * shape.each, shape.size, dtype=torch.bfloat16, device=residual.device)
        given = {"x": residual, "scale": scale, "logits": logits, "weights": table.at.gate, "count": real.count,
                 "starts": real.starts, "eps": eps, "tokens": tokens, "first": first}
        host = table.at.host
        if host:
            self._module.launch("k_ask_host", (tokens,), WARPS * 32 + 32, args.AskHostArgs(
                layer=table.at.layer, **host.request, **given))
        group, slots, shared = shape.gate_plan(tokens, self._blocks)
        self._module.launch(f"k_experts_gate_{name}", (self._blocks,), WARPS * 32 + 32, args.ExpertsGateArgs(
            wanted=table.at.wanted, y=gated, group=group, slots=slots, **given), shared)
        slots, shared = shape.down_plan(tokens, self._blocks)
        self._module.launch(f"k_experts_down_{name}", (self._blocks,), WARPS * 32 + 32, args.ExpertsDownArgs(
            x=gated, logits=logits, weights=table.at.down, y=residual, count=real.count, starts=real.starts,
            tokens=tokens, first=first, slots=slots), shared)
        if host:
            self._module.launch("k_add_host", (tokens,), 256, args.AddHostArgs(
                y=residual, hidden=shape.hidden, **host.answer))

    def gemm_rows(self, weights: MoeWeights, x: Tensor, real: RealTokens = ALL_REAL) -> Tensor:
        """Normed hidden states [T, H] bf16 -> what the experts give [T, H] bf16; zeros for tokens that are not real."""
        shape, table, tokens = self._shape, self._tables[id(weights)], len(x)
        pairs, tile = tokens * shape.each, _tile(tokens * shape.per_token / shape.count)
        logits = torch.mm(x, table.router.t(), out_dtype=torch.float32)

        def empty(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(size, dtype=dtype, device=x.device)

        expert, place, rows, total = empty(pairs), empty(pairs), empty(pairs), empty(4)
        share, weight = empty(pairs, dtype=torch.float32), empty(pairs, dtype=torch.float32)
        tiles = empty(shape.count + pairs // tile + 2, 4)
        ordered, gated = x.new_empty(pairs, shape.hidden), x.new_empty(pairs, shape.size)
        given = x.new_empty(pairs, shape.hidden)
        self._module.launch("k_route", (-(-tokens // 8),), 256, args.RouteArgs(
            logits=logits, expert=expert, place=place, counts=self._counts, share=share, count=real.count,
            starts=real.starts, tokens=tokens, stride=logits.shape[1]))
        self.prepare(weights)
        self._module.launch("k_group", (-(-pairs // 32),), 1024, args.GroupArgs(
            x=x, expert=expert, place=place, counts=self._counts, wanted=table.at.wanted, share=share, sorted=ordered,
            rows=rows, tiles=tiles, total=total, weight=weight, count=real.count, starts=real.starts, tokens=tokens,
            hidden=shape.hidden, shift=tile.bit_length() - 1))
        for kind, source, target, maps in (("gate", ordered, gated, table.at.gate_maps),
                                           ("down", gated, given, table.at.down_maps)):
            self._module.launch(f"k_grouped_{kind}_{tile}", (_resident(tile) * self._blocks,), WARPS * 32 + 32,
                                args.GroupedArgs(
                x=_words(tensor_map(source, tile, BOX_COLUMNS)), weights=maps, tiles=tiles, total=total, rows=rows,
                weight=weight, y=target, counts=self._counts if kind == "down" else None, experts=shape.count,
                ahead=self.ahead if kind == "gate" and tokens * shape.per_token >= 4 * shape.count else 0),
                _tile_bytes(tile))
        found = torch.empty_like(x)
        self._module.launch("k_combine", (tokens, -(-shape.hidden // 2048)), 256, args.CombineArgs(
            x=given, y=found, count=real.count, starts=real.starts, tokens=tokens, hidden=shape.hidden,
            each=shape.each))
        return found


def _store(weights: MoeWeights) -> PinnedExpertStore | None:
    """Who has the experts that are not all on the card, of bfloat16."""
    store = weights.experts.store if isinstance(weights.experts, ExpertPool) else None
    return store if isinstance(store, PinnedExpertStore) else None


def _addresses(weights: MoeWeights, device: torch.device) -> ExpertAddresses:
    pairs, store = [_both(part) for part in weights.parts], _store(weights)
    if store and isinstance(weights.experts, ExpertPool):
        return store.addresses(weights.experts.layer, pairs[0] if pairs else None)
    gate, down = (torch.tensor([pair[index].data_ptr() for pair in pairs], device=device) for index in range(2))
    gate_maps, down_maps = (maps_of([pair[index] for pair in pairs], index) for index in range(2))
    return ExpertAddresses(gate, down, gate_maps, down_maps, None)


def maps_of(matrices: Iterable[Tensor], index: int) -> Tensor:
    """How the tensor memory accelerator finds boxes of matrices of gates and their other halves (index 0), or of those
    after them (1): uint8 [n, 128], beside them."""
    found, device = bytearray(), torch.device("cpu")
    for matrix in matrices:
        found += tensor_map(matrix, BOX_ROWS[index], BOX_COLUMNS)
        device = matrix.device
    return torch.frombuffer(found, dtype=torch.uint8).view(-1, 128).to(device)


def filled_router(weights: MoeWeights) -> Tensor:
    """Its rows, filled up with zeros to a multiple of 8."""
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


def ring_slots(fixed: int, slot: int, beside: int, items: int) -> int:
    """How many slots a ring has; fixed: bytes of what else a block has. Three at least beside the next kernel's block,
    or more in all the memory."""
    few, most = (beside - fixed) // slot, (MAX_SHARED_BYTES - fixed) // slot
    return max(2, min(few if few >= 3 else most, items, 16))


def _tile(average: float) -> int:
    """Tokens of a tile; average: tokens of an expert. So large that few experts have more than one tile."""
    return 16 if average <= 10 else 32 if average <= 24 else 64 if average <= 64 else 128


def _resident(tile: int) -> int:
    """Blocks on a multiprocessor."""
    return 1 if tile == 128 else 2


def _tile_bytes(tile: int) -> int:
    return 1024 + _STAGES[tile] * ((128 + tile) * 2 * BOX_COLUMNS + 16)


def _words(map: bytes) -> object:
    return (c_uint64 * 16).from_buffer_copy(map)


def cpp_bool(value: bool) -> str:
    return str(value).lower()


def kernel(name: str, type: str, bounds: str, call: str) -> str:
    return (f'extern "C" __global__ void __launch_bounds__({bounds}) k_{name}(const __grid_constant__ {type} a) '
            f"{{ {call}(a); }}\n")
