"""Attention of rows of several tokens: K/V gathered from the pages, then the flash kernels that torch has. cuDNN's are
twice as fast where contexts are long, but want to be told the lengths when they are built, and know no cached prefix:
for those the row's own tokens and what lies before them are two parts, joined afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deltic.ops.records import PAGE, Batch, KvView

_LARGE = 1 << 22
"""Products of tokens and context from which on a row has a kernel of cuDNN for itself."""


@dataclass(frozen=True, slots=True)
class Context:
    """Neighbouring rows that one call serves. first: their first token; tokens: of all. longest, context: of a row.
    places [sum of contexts] int64: where their K/V lie. queries, keys [rows + 1] int32: where each row begins.
    done: what is cached of the only row, if it is large; None: many rows, or small ones."""

    first: int
    tokens: int
    longest: int
    context: int
    places: Tensor
    queries: Tensor
    keys: Tensor
    done: int | None


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
    layout = batch.layout
    return layout.chunks[row] * layout.contexts[row] >= _LARGE


def _runs(batch: Batch) -> Iterator[tuple[int, int]]:
    """The rows of several tokens, large ones alone."""
    first = batch.layout.singles
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
    total = sum(lengths)
    # from the device's own numbers: nothing to copy, and nothing to wait for
    starts = batch.starts[first:end + 1]
    ends = (batch.done[first:end] + starts[1:] - starts[:-1]).cumsum(0)
    keys = torch.cat((torch.zeros_like(ends[:1]), ends))
    place = torch.arange(total, device=device)
    row = torch.bucketize(place, ends, right=True)
    position = place - keys[row]
    places = batch.pages[first + row, position // PAGE] * PAGE + position % PAGE
    large = end == first + 1 and _large(batch, first)
    return Context(sum(layout.chunks[:first]), sum(chunks), max(chunks), max(lengths), places,
                   (starts - starts[0]).int(), keys.int(), lengths[0] - chunks[0] if large else None)


class Attend:
    """Attention of a context's tokens, query [T, heads, D] bfloat16, to K/V that are stored already."""

    def __init__(self, device: torch.device) -> None:
        self._cudnn = torch.cuda.get_device_capability(device) == (9, 0) and torch.backends.cudnn.is_available()

    def __call__(self, query: Tensor, kv: KvView, context: Context) -> Attended:
        query = query[context.first:context.first + context.tokens]
        keys, values = (pool.flatten(0, 1).index_select(0, context.places) for pool in (kv.keys, kv.values))
        if context.done is None or not self._cudnn or query.shape[-1] > 256:
            return Attended(torch.ops.aten._flash_attention_forward(
                query, keys, values, context.queries, context.keys, context.longest, context.context, 0.0, True,
                False)[0])
        done = context.done
        if not done:
            return Attended(_part(query, keys, values, True)[0])
        own, own_mass = _part(query, keys[done:], values[done:], True)
        prefix, prefix_mass = _part(query, keys[:done], values[:done], False)
        return Attended(own, prefix, own_mass, prefix_mass)


def _part(query: Tensor, keys: Tensor, values: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """One row's attention to some tokens, all or, if it is causal, as many as its own: [n, heads, D] and the masses
    [n, heads] float32."""
    q, k, v = (x.transpose(0, 1)[None] for x in (query, keys, values))
    out, mass, *_ = torch.ops.aten._cudnn_attention_forward(q, k, v, None, None, None, q.shape[2], k.shape[2], True,
                                                            0.0, causal, False)
    return out[0].transpose(0, 1).contiguous(), mass.view(query.shape[1], -1).t().contiguous()
