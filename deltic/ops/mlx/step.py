"""Whole steps as one graph of arrays, and the ops one by one.

A step reads the pools, and writes to them once its graph is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
from torch import Tensor

from deltic.ops import Ops
from deltic.ops.mlx import attention as attend
from deltic.ops.mlx import gdn as delta
from deltic.ops.mlx.attention import AttentionLayer, AttentionPlan, Pages, Turns
from deltic.ops.mlx.feed_forward import Mlp, Moe, feed_forward, feed_forward_of
from deltic.ops.mlx.gdn import GdnLayer, GdnPlan, Slots
from deltic.ops.mlx.linear import Matrix, MlxMatrix, matrix_of, product, rms_norm, rows_of, vector
from deltic.ops.mlx.memory import Array, array_of, copied, dtype_of, seen
from deltic.ops.torch import OPS as TORCH
from deltic.ops.types import (
    AttentionSpec,
    AttentionWeights,
    Batch,
    CacheViews,
    DecoderLayer,
    DecoderWeights,
    ExpertPool,
    GdnWeights,
    KvView,
    MlpWeights,
    MoeWeights,
    Rope,
    StateView,
    Weight,
)


@dataclass(frozen=True, slots=True)
class Layer:
    """A decoder layer on arrays, with its part of the cache."""

    input_norm: Array
    mixer: GdnLayer | AttentionLayer
    cache: Slots | Pages
    post_norm: Array
    mlp: Mlp | Moe

    @classmethod
    def of(cls, layer: DecoderLayer, views: CacheViews) -> Layer:
        mixer = layer.mixer
        own: GdnLayer | AttentionLayer
        cache: Slots | Pages
        if isinstance(mixer, GdnWeights):
            view = views.states[layer.store]
            view.check_order(mixer.spec)
            own, cache = GdnLayer.of(mixer), Slots.of(view)
        else:
            own, cache = AttentionLayer.of(mixer), Pages.of(views.kv[layer.store])
        return cls(vector(layer.input_norm), own, cache, vector(layer.post_norm), feed_forward_of(layer.mlp))


Result = delta.GdnResult | attend.KvResult


def step(ops: Ops, decoder: DecoderWeights, views: CacheViews
         ) -> Callable[[Batch], tuple[Tensor, Tensor | None]] | None:
    if not _serves(ops, decoder, views):
        return None
    layers = [Layer.of(layer, views) for layer in decoder.layers]
    embedding, norm = matrix_of(decoder.embedding), vector(decoder.norm)
    head = embedding if decoder.head is decoder.embedding else matrix_of(decoder.head)
    dtype = dtype_of((views.states[0].conv if views.states else views.kv[0].keys).dtype)

    def run(batch: Batch) -> tuple[Tensor, Tensor | None]:
        plans = _plans(batch, decoder, views)
        turns = Turns.of(TORCH.rope(batch.positions, decoder.rope))
        x, results = _embedded(batch, embedding, dtype), list[Result]()
        for layer in layers:
            x, result = _layer(x, layer, plans, turns, decoder.eps)
            results.append(result)
        hidden = None
        if batch.layout.hidden:
            x = rms_norm(x, norm, decoder.eps)
            hidden, x = x.astype(mx.float32), x[copied(batch.logit_tokens)]
        else:
            x = rms_norm(x[copied(batch.logit_tokens)], norm, decoder.eps)
        logits = product(x, head).astype(mx.float32)
        mx.eval(logits, *([] if hidden is None else [hidden]), *(part for each in results for part in each.arrays))
        for layer, result in zip(decoder.layers, results, strict=True):
            _store(result, layer, views, plans, batch)
        return seen(logits), None if hidden is None else seen(hidden)

    return run


@dataclass(frozen=True, slots=True)
class _Plans:
    attention: AttentionPlan | None
    gdn: GdnPlan | None


def _plans(batch: Batch, decoder: DecoderWeights, views: CacheViews) -> _Plans:
    spec = next((layer.mixer.spec for layer in decoder.layers if isinstance(layer.mixer, GdnWeights)), None)
    return _Plans(
        attend.plan_of(batch) if views.kv else None,
        delta.plan_of(batch, spec, views.states[0].conv.shape[1]) if spec else None,
    )


def _embedded(batch: Batch, embedding: Matrix, dtype: mx.Dtype) -> Array:
    x = rows_of(embedding, copied(batch.ids)).astype(dtype)
    given = batch.input_embeds
    if given is not None:
        x[copied(given.tokens)] = copied(given.rows).astype(dtype)
    return x


def _layer(x: Array, layer: Layer, plans: _Plans, turns: Turns, eps: float) -> tuple[Array, Result]:
    """x: the residual stream [T, H]."""
    normed, cache, result = rms_norm(x, layer.input_norm, eps), layer.cache, None
    if isinstance(layer.mixer, GdnLayer):
        assert plans.gdn is not None and isinstance(cache, Slots)
        mixed, result = delta.gdn(normed, layer.mixer, cache, plans.gdn)
    else:
        assert plans.attention is not None and isinstance(cache, Pages)
        mixed, result = attend.attention(normed, layer.mixer, cache, plans.attention, turns)
    x = x + mixed
    return x + feed_forward(rms_norm(x, layer.post_norm, eps), layer.mlp), result


def _store(result: Result, layer: DecoderLayer, views: CacheViews, plans: _Plans, batch: Batch) -> None:
    if isinstance(result, attend.KvResult):
        attend.store(result, views.kv[layer.store], batch.store)
    else:
        assert plans.gdn is not None
        delta.store(result, views.states[layer.store], plans.gdn)


def _serves(ops: Ops, decoder: DecoderWeights, views: CacheViews) -> bool:
    """True if a step's ops are all of this backend, on one device, and the caches have dtypes of MLX."""
    own = (ops.gdn_mixer, ops.attention_mixer, ops.mlp, ops.moe, ops.head, ops.add_norm, ops.embed, ops.rope) == (
        gdn_mixer, attention_mixer, mlp, moe, head, TORCH.add_norm, TORCH.embed, TORCH.rope)
    whole = all(layer.mixer.shards == 1 and not _offloaded(layer.mlp) for layer in decoder.layers)
    return own and whole and all(_plain(view) for view in views.kv)


def _offloaded(weights: MlpWeights | MoeWeights) -> bool:
    return isinstance(weights, MoeWeights) and isinstance(weights.experts, ExpertPool)


def _plain(view: KvView) -> bool:
    return view.keys.dtype.is_floating_point and view.keys.itemsize > 1


# The ops one by one: the rest of the model is of another backend, or looked at


def gdn_mixer(x: Tensor, weights: GdnWeights, state: StateView, batch: Batch) -> Tensor:
    state.check_order(weights.spec)
    plan = batch.memo.get("mlx gdn")
    if plan is None:
        plan = batch.memo["mlx gdn"] = delta.plan_of(batch, weights.spec, state.conv.shape[1])
    out, result = delta.gdn(copied(x), GdnLayer.of(weights), Slots.of(state), plan)
    mx.eval(out, *result.arrays)
    delta.store(result, state, plan)
    return seen(out)


def attention_mixer(x: Tensor, weights: AttentionWeights, kv: KvView, batch: Batch, rope: Rope) -> Tensor:
    if not _plain(kv):
        return TORCH.attention_mixer(x, weights, kv, batch, rope)
    plan = batch.memo.get("mlx attention")
    if plan is None:
        plan = batch.memo["mlx attention"] = attend.plan_of(batch)
    out, result = attend.attention(copied(x), AttentionLayer.of(weights), Pages.of(kv), plan, Turns.of(rope))
    mx.eval(out, *result.arrays)
    attend.store(result, kv, batch.store)
    return seen(out)


def store_kv(x: Tensor, weight: Weight, k_norm: Tensor | None, spec: AttentionSpec, kv: KvView, batch: Batch,
             rope: Rope) -> None:
    if not _plain(kv):
        return TORCH.store_kv(x, weight, k_norm, spec, kv, batch, rope)
    result = attend.stored_only(copied(x), matrix_of(weight), vector(k_norm), spec, Turns.of(rope),
                                dtype_of(kv.keys.dtype))
    mx.eval(*result.arrays)
    attend.store(result, kv, batch.store)


def mlp(x: Tensor, weights: MlpWeights) -> Tensor:
    return _evaluated(feed_forward(copied(x), Mlp.of(weights)))


def moe(x: Tensor, weights: MoeWeights) -> Tensor:
    return _evaluated(feed_forward(copied(x), Moe.of(weights)))


def head(x: Tensor, weight: Weight) -> Tensor:
    return _evaluated(product(copied(x), matrix_of(weight)).astype(mx.float32))


def _evaluated(x: Array) -> Tensor:
    mx.eval(x)
    return seen(x)
