"""Gated paged attention in plain torch: one-token rows in one padded batch, longer rows one by one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deltic.ops.kv import FP8, INT4, INT8, read, rotated, rotated_back, store, take
from deltic.ops.reference import pointwise
from deltic.ops.torch.basic import linear, matmul, rms_norm, row_parallel
from deltic.ops.types import PAGE, AttentionSpec, AttentionWeights, Batch, KvView, Rope, Weight

_SHORT = 16384
"""Total number of K/V tokens up to which float32 products beat the flash kernel for single queries."""


def attention_mixer(x: Tensor, weights: AttentionWeights, kv: KvView, batch: Batch, rope: Rope) -> Tensor:
    spec = weights.spec
    wide = spec.queries * (2 if spec.gate else 1)
    projected = linear(x, weights.qkv)
    if weights.bias is not None:
        projected = projected + weights.bias.to(projected.dtype)
    query, key, value = projected.split((wide, spec.kv, spec.kv), dim=-1)
    query = query.unflatten(-1, (spec.heads, -1))
    query, gate = query.chunk(2, dim=-1) if spec.gate else (query, None)
    query = rotate(_normed(query, weights.q_norm, spec.eps), rope).to(x.dtype)
    _store(key, value, weights.k_norm, spec, kv, batch, rope)
    if kv.keys.dtype == INT4:
        mixed = rotated_back(_attend(rotated(query).to(x.dtype), kv, batch)).to(x.dtype)
    else:
        mixed = _attend(query if kv.keys.dtype in (FP8, INT8) else query.to(kv.keys.dtype), kv, batch).to(x.dtype)
    if gate is not None:
        mixed = mixed * pointwise(torch.sigmoid, gate)
    return row_parallel(mixed.flatten(1), weights.o_proj, weights.shards)


def store_kv(x: Tensor, weight: Weight, k_norm: Tensor | None, spec: AttentionSpec, kv: KvView, batch: Batch,
             rope: Rope) -> None:
    key, value = linear(x, weight).chunk(2, dim=-1)
    _store(key, value, k_norm, spec, kv, batch, rope)


def _normed(x: Tensor, scale: Tensor | None, eps: float) -> Tensor:
    """Returns the RMS norm of x in float32 or wider."""
    return x.to(_accumulator(x)) if scale is None else rms_norm(x, scale, eps)


def _store(key: Tensor, value: Tensor, k_norm: Tensor | None, spec: AttentionSpec, kv: KvView, batch: Batch,
           rope: Rope) -> None:
    """Stores key, value [T, kv]. Both are given before norm and rotation."""
    key = rotate(_normed(key.unflatten(-1, (spec.kv_heads, -1)), k_norm, spec.eps), rope)
    store(kv.keys, batch.store, key)
    store(kv.values, batch.store, value.unflatten(-1, (spec.kv_heads, -1)))


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Applies rotary embedding in split halves to the leading rotary_dim elements of x [T, heads, head_dim]."""
    size = rope.cos.shape[-1]
    cos, sin = rope.cos[:, None].to(x.dtype), rope.sin[:, None].to(x.dtype)
    turned, kept = x[..., :size], x[..., size:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, kept), dim=-1) if kept.shape[-1] else turned


@dataclass(frozen=True, slots=True)
class _AttentionPlan:
    """Attention plan of a batch. contexts: each row's context length after the step; exact on a CPU.

    padded: the single-token rows are cheaper as one padded batch than one by one. mask [R1, 1, 1, context]: the mask of
        that batch.
    """

    contexts: tuple[int, ...]
    padded: bool
    mask: Tensor | None


def _plan(batch: Batch) -> _AttentionPlan:
    plan: _AttentionPlan | None = batch.memo.get("attention")
    if plan is None:
        plan = batch.memo["attention"] = _make_plan(batch)
    return plan


def _make_plan(batch: Batch) -> _AttentionPlan:
    layout = batch.layout
    exact = batch.done.device.type == "cpu"
    contexts = layout.contexts
    if exact:
        contexts = tuple(d + c for d, c in zip(batch.done.tolist(), layout.chunks, strict=True))
    decode_contexts = contexts[:layout.decode_rows]
    rows, longest, mask = len(decode_contexts), max(decode_contexts, default=0), None
    padded = not exact or (rows > 1 and longest * rows <= 2 * sum(decode_contexts) + 256)
    if padded and decode_contexts:
        index = torch.arange(longest, device=batch.done.device)
        mask = (index <= batch.done[:layout.decode_rows, None])[:, None, None]
    return _AttentionPlan(contexts, padded, mask)


def _attend(query: Tensor, kv: KvView, batch: Batch) -> Tensor:
    """Attends all rows. query [T, heads, head_dim] in K/V's dtype (float8, integers: any) -> same shape."""
    plan, layout = _plan(batch), batch.layout
    parts, row, token = [], 0, 0
    if plan.padded and layout.decode_rows:
        assert plan.mask is not None
        context, row = plan.mask.shape[-1], layout.decode_rows
        parts.append(_single_tokens(query[:row], kv, batch.pages[:row], context, plan.mask))
        token = row
    while row < layout.rows:
        end, context = token + layout.chunks[row], plan.contexts[row]
        attend = _single_tokens if row < layout.decode_rows else _chunk
        groups = 1 if query.device.type == "cpu" else query.shape[1] // kv.keys.shape[2]
        mask = None if row < layout.decode_rows else _causal(batch, row, end - token, context, groups)
        parts.append(attend(query[token:end], kv, batch.pages[row:row + 1], context, mask))
        row, token = row + 1, end
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _causal(batch: Batch, row: int, tokens: int, context: int, groups: int) -> Tensor | None:
    """Returns the mask [groups * tokens, context] of a longer row for `groups` query heads; None: causal from position
    0."""
    if batch.done.device.type == "cpu" and tokens == context:
        return None
    masks: dict[int, Tensor] = batch.memo.setdefault("masks", {})
    if row not in masks:
        index = torch.arange(context, device=batch.done.device)
        mask = index <= (batch.done[row] + torch.arange(tokens, device=index.device))[:, None]
        masks[row] = mask.repeat(groups, 1)
    return masks[row]


def _single_tokens(query: Tensor, kv: KvView, pages: Tensor, context: int, mask: Tensor | None) -> Tensor:
    """Computes attention of one-token rows: query [R, heads, head_dim], mask [R, 1, 1, context]."""
    keys, values = (_gather(pool, pages, context, query) for pool in (kv.keys, kv.values))
    if mask is not None:
        # masked weights are zero, but zero times a stale NaN is NaN, and a masked score may be NaN too
        keys, values = (x.masked_fill(~mask.transpose(-1, -2), 0) for x in (keys, values))
    if len(pages) * context > _SHORT:
        out = F.scaled_dot_product_attention(query[:, :, None], keys, values, attn_mask=mask, enable_gqa=True)
        return out[:, :, 0]
    keys, values = keys.to(_accumulator(query)), values.to(_accumulator(query))
    grouped = query.to(keys.dtype).view(query.shape[0], keys.shape[1], -1, query.shape[-1])
    groups = grouped.shape[2]
    # full groups of eight heads: the library adds in another order in a partial group
    grouped = F.pad(grouped * query.shape[-1]**-0.5, (0, 0, 0, -groups % 8))
    scores = matmul(grouped, keys.transpose(-1, -2))
    if mask is not None:
        scores.masked_fill_(~mask, -torch.inf)
    mixed: Tensor = matmul(scores.softmax(-1), values)[:, :, :groups].flatten(1, 2)
    return mixed.to(query.dtype)


def _chunk(query: Tensor, kv: KvView, pages: Tensor, context: int, mask: Tensor | None) -> Tensor:
    """Attends one longer row: query [n, heads, head_dim], mask [groups * n, context], on a CPU [n, context]."""
    keys, values = (_gather(pool, pages, context, query) for pool in (kv.keys, kv.values))
    if mask is None or mask.device.type == "cpu":
        out = F.scaled_dot_product_attention(query.transpose(0, 1)[None], keys, values, attn_mask=mask,
                                             is_causal=mask is None, enable_gqa=True)
        return out[0].transpose(0, 1)
    keys, values = (x.masked_fill(~mask[-1][:, None], 0) for x in (keys, values))
    # all query heads of a K/V head in one product, which reads and lays out the K/V head only once
    grouped = query.unflatten(1, (keys.shape[1], -1)).permute(1, 2, 0, 3)
    out = F.scaled_dot_product_attention(grouped.flatten(1, 2)[None], keys.contiguous(), values.contiguous(),
                                         attn_mask=mask)
    ungrouped: Tensor = out[0].unflatten(1, grouped.shape[1:3]).permute(2, 0, 1, 3).flatten(1, 2)
    return ungrouped


def _gather(pool: Tensor, pages: Tensor, context: int, query: Tensor) -> Tensor:
    """Gathers K or V of each row: pool [P, PAGE, kv_heads, head_dim], pages [R, ...] -> [R, kv_heads, context,
    head_dim], in the query's dtype."""
    wanted = pages[:, :-(-context // PAGE)]
    rows = take(pool.flatten(1), 0, wanted.flatten()).view(len(pages), -1, *pool.shape[2:])[:, :context]
    return read(rows, query.shape[-1], query.dtype).transpose(1, 2)


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
