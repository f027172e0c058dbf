"""Attention of prompts on a GPU, by torch's flash kernels or cuDNN.

cuDNN's attention is twice as fast in long contexts, but is built for given lengths (37 ms each) and knows no cached
prefix: a large row's attention is computed in parts, its own tokens and what precedes them in pieces of few lengths,
joined afterwards.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deltic.ops.cuda import arguments as args
from deltic.ops.cuda.card import card_of
from deltic.ops.cuda.driver import Module
from deltic.ops.kv import INT4, take
from deltic.ops.types import PAGE, AttentionSpec, Batch, KvView

log = logging.getLogger("deltic")
_LARGE = 1 << 22
"""Tokens times context from which on cuDNN serves a row by itself."""
_LONG = 1024
"""Tokens that such a row has at least."""
PREFIX_GRAIN = 1024
"""The prefix part of such a row is cut into pieces of so many tokens times a power of two: cuDNN builds a kernel for
each length."""
_PREPARED = 4
"""Prefix pieces, in grains, and sides of squares behind them, for which kernels are built before the first request."""


@dataclass(frozen=True, slots=True)
class CausalSquare:
    """How cuDNN serves a large row.

    prefix: leading cached tokens, a multiple of PREFIX_GRAIN, that all queries read.
    before: the other cached tokens, which precede the row's own in a causal square.
    side: of that square, rounded up.
    """

    prefix: int
    before: int
    side: int


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Neighbouring rows that one call serves.

    first: their first token. tokens: of all rows. longest, context: largest chunk and context of a row.
    places [sum of contexts] int64: flat K/V indices. queries, keys [rows + 1] int32: where each row begins.
    square: of the only row, if it is large; places then covers prefix and square and repeats its last entry.
    """

    first: int
    tokens: int
    longest: int
    context: int
    places: Tensor
    queries: Tensor
    keys: Tensor
    square: CausalSquare | None


@dataclass(frozen=True, slots=True)
class AttentionParts:
    """own, prefix [n, heads, D] bfloat16: attention to the row's square and to its prefix, to be joined by own_mass,
    prefix_mass [n, heads] float32, their log-sum-exps. Without a prefix, own is the result."""

    own: Tensor
    prefix: Tensor | None = None
    own_mass: Tensor | None = None
    prefix_mass: Tensor | None = None


def attention_groups(batch: Batch) -> tuple[AttentionGroup, ...]:
    return tuple(_group(batch, first, end) for first, end in _runs(batch))


def _large(batch: Batch, row: int) -> bool:
    tokens, context = batch.layout.chunks[row], batch.layout.contexts[row]
    return tokens >= _LONG and tokens * context >= _LARGE


def _runs(batch: Batch) -> Iterator[tuple[int, int]]:
    """Cuts the rows of several tokens into runs; a large row is a run of its own."""
    first = batch.layout.decode_rows
    for row in range(first, batch.layout.rows):
        if _large(batch, row):
            if first < row:
                yield first, row
            yield row, row + 1
            first = row + 1
    if first < batch.layout.rows:
        yield first, batch.layout.rows


def _group(batch: Batch, first: int, end: int) -> AttentionGroup:
    layout, device = batch.layout, batch.done.device
    chunks, lengths = layout.chunks[first:end], layout.contexts[first:end]
    square = _square(chunks[0], lengths[0]) if end == first + 1 and _large(batch, first) else None
    # computed on the device: nothing to copy, nothing to wait for
    starts = batch.starts[first:end + 1]
    ends = (batch.done[first:end] + starts[1:] - starts[:-1]).cumsum(0)
    keys = torch.cat((torch.zeros_like(ends[:1]), ends))
    place = torch.arange(square.prefix + square.side if square else sum(lengths), device=device)
    place.clamp_(max=sum(lengths) - 1)
    row = torch.bucketize(place, ends, right=True)
    position = place - keys[row]
    places = batch.pages[first + row, position // PAGE] * PAGE + position % PAGE
    return AttentionGroup(sum(layout.chunks[:first]), sum(chunks), max(chunks), max(lengths), places,
                          (starts - starts[0]).int(), keys.int(), square)


def _square(tokens: int, context: int) -> CausalSquare:
    before = (context - tokens) % PREFIX_GRAIN
    prefix, side = context - tokens - before, before + tokens
    # at most an eighth more, and eight kernels for each doubling; fewer sides with prefixes, which have lengths too
    grain = max(64, 1 << side.bit_length() - (3 if prefix else 4))
    return CausalSquare(prefix, before, -(-side // grain) * grain)


def _pieces(prefix: int) -> list[int]:
    """Returns the lengths of a prefix's pieces, the longest first."""
    grains = prefix // PREFIX_GRAIN
    return [PREFIX_GRAIN << bit for bit in reversed(range(grains.bit_length())) if grains >> bit & 1]


class Attend:
    """Attention of a group's tokens to K/V that are stored already; with int4, of rotated queries to rotated K/V."""

    def __init__(self, spec: AttentionSpec, device: torch.device, module: Module) -> None:
        self._spec, self._module = spec, module
        # on older cards it knows no large heads, and torch's flash kernels are as fast
        self._cudnn = torch.backends.cudnn.is_available() and card_of(device).capability >= (9, 0)
        if self._cudnn:  # its first call takes a second
            query, keys = (torch.zeros(64, heads, spec.head_dim, dtype=torch.bfloat16, device=device)
                           for heads in (spec.heads, spec.kv_heads))
            try:
                _cudnn_attention(query, keys, keys, True)
            except RuntimeError as error:
                log.warning("cuDNN does not serve attention on this GPU, torch's flash kernels do: %s", error)
                self._cudnn = False

    def prepare(self, spec: AttentionSpec, device: torch.device, most: int) -> None:
        """Builds cuDNN's kernels for prompts of up to so many tokens without cached ones, and for their steps if they
        are read in several. They belong to the thread."""
        if not self._cudnn:
            return
        large = max(_LONG, math.isqrt(_LARGE))
        lengths = [*range(large, most, 64), most] if most >= large else []
        behind = min(most, _PREPARED * PREFIX_GRAIN)
        parts = {_square(tokens, PREFIX_GRAIN + tokens).side for tokens in range(_LONG, behind + 1, 64)}
        for side in sorted(parts.union(_square(tokens, tokens).side for tokens in lengths)):
            query = torch.zeros(side, spec.heads, spec.head_dim, dtype=torch.bfloat16, device=device)
            pieces = [PREFIX_GRAIN << bit for bit in range(_PREPARED.bit_length())] if side in parts else []
            for length in (side, *pieces):
                keys = torch.zeros(length, spec.kv_heads, spec.head_dim, dtype=torch.bfloat16, device=device)
                _cudnn_attention(query, keys, keys, length == side)

    def __call__(self, query: Tensor, kv: KvView, group: AttentionGroup) -> AttentionParts:
        """query [PREFIX_GRAIN + T + side of the largest square, heads, D] bfloat16; the tokens' queries begin at
        PREFIX_GRAIN."""
        begin = PREFIX_GRAIN + group.first
        own_query = query[begin:begin + group.tokens]
        keys, values = (self._gather(pool, name, group.places) for pool, name in (
            (kv.keys, "k_gather_keys"), (kv.values, "k_gather_values")))
        square = group.square if self._cudnn else None
        if square is None and len(group.queries) == 2:
            # a row alone: torch splits its context among the multiprocessors
            rows = (own_query[None], keys[None, :group.context], values[None, :group.context])
            return AttentionParts(torch.ops.aten._flash_attention_forward(
                *rows, None, None, group.tokens, group.context, 0.0, True, False)[0][0])
        if square is None:
            return AttentionParts(torch.ops.aten._flash_attention_forward(
                own_query, keys, values, group.queries, group.keys, group.longest, group.context, 0.0, True, False)[0])
        # the outputs of queries before and after the row's own are dropped
        wide, own = query[begin - square.before:][:square.side], slice(square.before, square.before + group.tokens)
        near, near_mass = _cudnn_attention(wide, keys[square.prefix:], values[square.prefix:], True)
        if not square.prefix:
            return AttentionParts(near[own])
        pieces = _pieces(square.prefix)
        far, far_mass = _joined([_cudnn_attention(wide, k, v, False) for k, v in zip(
            keys[:square.prefix].split(pieces), values[:square.prefix].split(pieces), strict=True)], own)
        return AttentionParts(near[own], far, near_mass[own], far_mass)

    def _gather(self, pool: Tensor, kernel: str, places: Tensor) -> Tensor:
        """Returns K or V of these places, [n, kv_heads, D] bfloat16, because torch's flash kernels read nothing else.
        float8 numbers are the same in bfloat16."""
        if pool.dtype != INT4:
            return take(pool.flatten(0, 1), 0, places).bfloat16()
        count, heads = len(places), self._spec.kv_heads
        gathered = torch.empty(count, heads, self._spec.head_dim, dtype=torch.bfloat16, device=pool.device)
        self._module.launch(kernel, (-(-count * heads // 8),), 256, args.GatherInt4Args(
            pool=pool, y=gathered, places=places, count=count, heads=heads))
        return gathered


def _cudnn_attention(query: Tensor, keys: Tensor, values: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """query [n, heads, D] -> outputs [n, heads, D] and log-sum-exps [n, heads] float32. causal: query i reads keys
    0 .. i; otherwise all read all."""
    q, k, v = (x.transpose(0, 1)[None] for x in (query, keys, values))
    out, mass, *_ = torch.ops.aten._cudnn_attention_forward(q, k, v, None, None, None, q.shape[2], k.shape[2], True,
                                                            0.0, causal, False)
    return out[0].transpose(0, 1).contiguous(), mass.view(query.shape[1], -1).t().contiguous()


def _joined(parts: list[tuple[Tensor, Tensor]], own: slice) -> tuple[Tensor, Tensor]:
    """Joins attention to several pieces, of these rows: outputs and log-sum-exps as of `_cudnn_attention`."""
    if len(parts) == 1:
        return parts[0][0][own], parts[0][1][own]
    mass = torch.stack([part[own] for _, part in parts]).logsumexp(0)
    total = torch.zeros(*mass.shape, parts[0][0].shape[-1], device=mass.device)
    for out, part in parts:
        total += out[own] * (part[own] - mass).exp()[..., None]
    return total.bfloat16(), mass
