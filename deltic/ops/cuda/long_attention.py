"""Attention of rows of several tokens: K/V gathered from the pages, then the flash kernels that torch has. cuDNN's are
twice as fast where contexts are long, but are built for given lengths (37 ms each), and know no cached prefix: for
those the row's own tokens and most of what lies before them are two parts, joined afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deltic.ops.kv import take
from deltic.ops.types import PAGE, AttentionSpec, Batch, KvView

_LARGE = 1 << 22
"""Products of tokens and context from which on a row has cuDNN's kernels for itself."""
_LONG = 1024
"""Tokens that such a row has at least."""
GRAIN = 1024
"""Of the cached tokens that such a row's first part reads: kernels are built for each number of them."""


@dataclass(frozen=True, slots=True)
class Square:
    """How a large row is served. prefix: cached tokens, a multiple of GRAIN, that all its queries read. before: the
    other ones, which come before its own tokens in a plainly causal square. side: of that square, rounded up."""

    prefix: int
    before: int
    side: int


@dataclass(frozen=True, slots=True)
class Context:
    """Neighbouring rows that one call serves.

    first: their first token.
    tokens: of all.
    longest, context: of a row.
    places [sum of contexts] int64: where their K/V lie. queries, keys [rows + 1] int32: where each row begins.
    square: of the only row, if it is large; places then has what the square reads behind the prefix, and repeats the
        last one.
    """

    first: int
    tokens: int
    longest: int
    context: int
    places: Tensor
    queries: Tensor
    keys: Tensor
    square: Square | None


@dataclass(frozen=True, slots=True)
class Attended:
    """own, prefix [n, heads, D] bfloat16: of the tokens and of what lies before them, to be joined by own_mass,
    prefix_mass [n, heads] float32, the logarithms of their sums of exponentials; or own is all."""

    own: Tensor
    prefix: Tensor | None = None
    own_mass: Tensor | None = None
    prefix_mass: Tensor | None = None


def contexts(batch: Batch) -> tuple[Context, ...]:
    return tuple(_context(batch, first, end) for first, end in _runs(batch))


def _large(batch: Batch, row: int) -> bool:
    tokens, context = batch.layout.chunks[row], batch.layout.contexts[row]
    return tokens >= _LONG and tokens * context >= _LARGE


def _runs(batch: Batch) -> Iterator[tuple[int, int]]:
    """The rows of several tokens, large ones alone."""
    first = batch.layout.decode_rows
    for row in range(first, batch.layout.rows):
        if _large(batch, row):
            if first < row:
                yield first, row
            yield row, row + 1
            first = row + 1
    if first < batch.layout.rows:
        yield first, batch.layout.rows


def _context(batch: Batch, first: int, end: int) -> Context:
    layout, device = batch.layout, batch.done.device
    chunks, lengths = layout.chunks[first:end], layout.contexts[first:end]
    square = _square(chunks[0], lengths[0]) if end == first + 1 and _large(batch, first) else None
    # from the device's own numbers: nothing to copy, and nothing to wait for
    starts = batch.starts[first:end + 1]
    ends = (batch.done[first:end] + starts[1:] - starts[:-1]).cumsum(0)
    keys = torch.cat((torch.zeros_like(ends[:1]), ends))
    place = torch.arange(square.prefix + square.side if square else sum(lengths), device=device)
    place.clamp_(max=sum(lengths) - 1)
    row = torch.bucketize(place, ends, right=True)
    position = place - keys[row]
    places = batch.pages[first + row, position // PAGE] * PAGE + position % PAGE
    return Context(sum(layout.chunks[:first]), sum(chunks), max(chunks), max(lengths), places,
                   (starts - starts[0]).int(), keys.int(), square)


def _square(tokens: int, context: int) -> Square:
    before = (context - tokens) % GRAIN
    side = before + tokens
    grain = max(64, 1 << side.bit_length() - 4)  # at most an eighth more, and eight kernels for each doubling
    return Square(context - tokens - before, before, -(-side // grain) * grain)


class Attend:
    """Attention of a context's tokens to K/V that are stored already. A row of few tokens after a long context has
    little to do in each block of 64 queries: alone, torch splits its context."""

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        self._cudnn = torch.backends.cudnn.is_available()
        if self._cudnn:  # it takes a second to set itself up
            query, keys = (torch.zeros(64, heads, spec.head_dim, dtype=torch.bfloat16, device=device)
                           for heads in (spec.heads, spec.kv_heads))
            _part(query, keys, keys, True)

    def __call__(self, query: Tensor, kv: KvView, context: Context) -> Attended:
        """query [GRAIN + T + side of the largest square, heads, D] bfloat16: those of the tokens after the first
        GRAIN."""
        begin, square = GRAIN + context.first, context.square
        # torch has no flash kernel that reads float8; as bfloat16 they are the same numbers
        keys, values = (take(pool.flatten(0, 1), 0, context.places).bfloat16() for pool in (kv.keys, kv.values))
        if len(context.queries) == 2 and (square is None or not self._cudnn):
            # one row alone: its context is split among the card's multiprocessors
            rows = (x[None] for x in (query[begin:begin + context.tokens], keys[:context.context],
                                      values[:context.context]))
            return Attended(torch.ops.aten._flash_attention_forward(
                *rows, None, None, context.tokens, context.context, 0.0, True, False)[0][0])
        if square is None or not self._cudnn:
            return Attended(torch.ops.aten._flash_attention_forward(
                query[begin:begin + context.tokens], keys, values, context.queries,
                context.keys, context.longest, context.context, 0.0, True, False)[0])
        # rows before and after the row's own give something that nobody looks at
        wide, own = query[begin - square.before:][:square.side], slice(square.before, square.before + context.tokens)
        near, near_mass = _part(wide, keys[square.prefix:], values[square.prefix:], True)
        if not square.prefix:
            return Attended(near[own])
        far, far_mass = _part(wide, keys[:square.prefix], values[:square.prefix], False)
        return Attended(near[own], far[own], near_mass[own], far_mass[own])


def _part(query: Tensor, keys: Tensor, values: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention to some tokens, all or, if it is causal, one more for each query: [n, heads, D] and the masses
    [n, heads] float32."""
    q, k, v = (x.transpose(0, 1)[None] for x in (query, keys, values))
    out, mass, *_ = torch.ops.aten._cudnn_attention_forward(q, k, v, None, None, None, q.shape[2], k.shape[2], True,
                                                            0.0, causal, False)
    return out[0].transpose(0, 1).contiguous(), mass.view(query.shape[1], -1).t().contiguous()
