"""Gated paged attention on MLX arrays: one-token rows in padded batches, longer rows one by one.

A row attends to tokens in pages before its cursor and to its own tokens, which are stored after the step is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from torch import Tensor

from deltic.ops import kv as pages
from deltic.ops.mlx.linear import Matrix, matrix_of, product, rms_norm, vector
from deltic.ops.mlx.memory import Array, array_of, copied, seen
from deltic.ops.types import PAGE, AttentionSpec, AttentionWeights, Batch, KvView, Rope


@dataclass(frozen=True, slots=True)
class AttentionArrays:
    """The weights of an attention layer. q_norm, k_norm [head_dim], bias: float32 or None."""

    spec: AttentionSpec
    qkv: Matrix
    q_norm: Array | None
    k_norm: Array | None
    o_proj: Matrix
    bias: Array | None

    @classmethod
    def of(cls, weights: AttentionWeights) -> AttentionArrays:
        return cls(weights.spec, matrix_of(weights.qkv), vector(weights.q_norm), vector(weights.k_norm),
                   matrix_of(weights.o_proj), vector(weights.bias))


@dataclass(frozen=True, slots=True)
class Pages:
    """K/V of a layer: keys, values [pages, PAGE, kv_heads, head_dim]."""

    keys: Array
    values: Array

    @classmethod
    def of(cls, view: KvView) -> Pages:
        return cls(array_of(view.keys), array_of(view.values))


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """Rows that attend in one batch. All have the same number of tokens.

    tokens: their range of tokens in the batch. count: number of rows. table [R, n]: their pages, including pages for
    their own tokens; None: no tokens are in pages yet. context: for a single row, number of tokens to read from pages.
    done [R]: for several one-token rows, number of tokens to read from pages.
    """

    tokens: slice
    count: int
    table: Array | None
    context: int = 0
    done: Array | None = None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The attention plan of a step, shared by all layers."""

    rows: tuple[AttentionRows, ...]


def plan_of(batch: Batch) -> AttentionPlan:
    table, done, layout = batch.pages.numpy(), batch.done.tolist(), batch.layout
    found, token, row = list[AttentionRows](), 0, 0
    for size in _padded(done[:layout.decode_rows]):
        found.append(_single_tokens(table[row:row + size], done[row:row + size], row))
        token = row = row + size
    for row in range(layout.decode_rows, layout.rows):
        end, context = token + layout.chunks[row], done[row]
        wanted = mx.array(table[row:row + 1, :-(-(context + layout.chunks[row]) // PAGE)]) if context else None
        found.append(AttentionRows(slice(token, end), 1, wanted, context))
        token = end
    return AttentionPlan(tuple(found))


def _padded(done: list[int]) -> Iterator[int]:
    """Yields sizes of groups of consecutive one-token rows that attend together: all rows if padding costs little."""
    if len(done) > 1 and max(done) * len(done) <= 2 * sum(done) + 256:
        yield len(done)
    else:
        yield from [1] * len(done)


def _single_tokens(table: np.ndarray, done: list[int], first: int) -> AttentionRows:
    tokens, count, longest = slice(first, first + len(done)), len(done), max(done)
    if longest == 0:
        return AttentionRows(tokens, count, None)
    wanted = mx.array(table[:, :longest // PAGE + 1])
    return AttentionRows(tokens, count, wanted, longest) if count == 1 else (
        AttentionRows(tokens, count, wanted, done=mx.array(done)))


@dataclass(frozen=True, slots=True)
class KvResult:
    """K/V of a step's tokens. key, value [T, kv_heads, head_dim], in the dtype of the pages."""

    key: Array
    value: Array

    @property
    def arrays(self) -> list[Array]:
        return [self.key, self.value]


@dataclass(frozen=True, slots=True)
class Turns:
    """Rotary tables of a step. cos, sin [T, 1, rotary_dim] float32."""

    cos: Array
    sin: Array

    @classmethod
    def of(cls, rope: Rope) -> Turns:
        return cls(copied(rope.cos)[:, None], copied(rope.sin)[:, None])


def attention(x: Array, layer: AttentionArrays, stored: Pages, plan: AttentionPlan, turns: Turns
              ) -> tuple[Array, KvResult]:
    """Computes an attention layer: x [T, H] -> [T, H], and the K/V of the step's tokens."""
    spec, tokens = layer.spec, len(x)
    wide = spec.queries * (2 if spec.gate else 1)
    projected = product(x, layer.qkv)
    if layer.bias is not None:
        projected = projected + layer.bias.astype(x.dtype)
    query, key, value = mx.split(projected, [wide, wide + spec.kv], axis=-1)
    query = query.reshape(tokens, spec.heads, -1)
    gate = None
    if spec.gate:
        query, gate = mx.split(query, 2, axis=-1)
    dtype = stored.keys.dtype
    query = _rotated(query, layer.q_norm, spec.eps, turns).astype(dtype)
    own = _keys_values(key, value, layer.k_norm, spec, turns, dtype)
    parts = [_attend(query[rows.tokens], own, stored, rows, spec) for rows in plan.rows]
    mixed = (parts[0] if len(parts) == 1 else mx.concatenate(parts)).astype(x.dtype)
    if gate is not None:
        mixed = mixed * mx.sigmoid(gate)
    return product(mixed.reshape(tokens, spec.queries), layer.o_proj), own


def stored_only(x: Array, matrix: Matrix, k_norm: Array | None, spec: AttentionSpec, turns: Turns,
                dtype: mx.Dtype) -> KvResult:
    """Returns only the K/V of the tokens. x [T, H], matrix [2 * kv, H]."""
    key, value = mx.split(product(x, matrix), 2, axis=-1)
    return _keys_values(key, value, k_norm, spec, turns, dtype)


def _keys_values(key: Array, value: Array, norm: Array | None, spec: AttentionSpec, turns: Turns, dtype: mx.Dtype
                 ) -> KvResult:
    key = _rotated(key.reshape(-1, spec.kv_heads, spec.head_dim), norm, spec.eps, turns).astype(dtype)
    return KvResult(key, value.reshape(-1, spec.kv_heads, spec.head_dim).astype(dtype))


def _rotated(x: Array, scale: Array | None, eps: float, turns: Turns) -> Array:
    """Returns x [T, heads, head_dim], normed and rotated, in float32."""
    x = x.astype(mx.float32)
    if scale is not None:
        x = rms_norm(x, scale, eps)
    size = turns.cos.shape[-1]
    turned, kept = x[..., :size], x[..., size:]
    first, second = mx.split(turned, 2, axis=-1)
    turned = turned * turns.cos + mx.concatenate([-second, first], axis=-1) * turns.sin
    return mx.concatenate([turned, kept], axis=-1) if kept.shape[-1] else turned


def _attend(query: Array, own: KvResult, stored: Pages, rows: AttentionRows, spec: AttentionSpec) -> Array:
    """Attends rows of n tokens each: query [R * n, heads, head_dim] -> the same shape."""
    count = rows.count
    keys, values = (
        _joined(pool, new[rows.tokens].reshape(count, -1, *new.shape[1:]), rows)
        for pool, new in ((stored.keys, own.key), (stored.values, own.value))
    )
    queries = mx.swapaxes(query.reshape(count, -1, spec.heads, spec.head_dim), 1, 2)
    mask = "causal" if queries.shape[2] > 1 else None
    if rows.done is not None:
        mask = (mx.arange(keys.shape[2]) <= rows.done[:, None])[:, None, None]
    out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=spec.head_dim**-0.5, mask=mask)
    return mx.swapaxes(out, 1, 2).reshape(query.shape)


def _joined(pool: Array, new: Array, rows: AttentionRows) -> Array:
    """Returns the pages' K or V followed by the rows' own tokens: new [R, n, ...] -> [R, kv_heads, .., head_dim].
    Copies the pages once. With several rows, a row's own token also fills the masked places after it, because a weight
    of zero times a stale NaN is NaN."""
    if rows.table is None:
        return mx.swapaxes(new, 1, 2)
    found = pool[rows.table].reshape(rows.count, -1, *pool.shape[2:])
    if rows.done is not None:
        before = mx.arange(found.shape[1]) < rows.done[:, None]
        return mx.swapaxes(mx.where(before[..., None, None], found, new), 1, 2)
    end = rows.context + new.shape[1]
    found[:, rows.context:end] = new  # in place: no other array shares this copy
    return mx.swapaxes(found[:, :end], 1, 2)


def store(result: KvResult, view: KvView, places: Tensor) -> None:
    """Writes K/V to places page * PAGE + offset."""
    pages.store(view.keys, places, seen(result.key))
    pages.store(view.values, places, seen(result.value))
