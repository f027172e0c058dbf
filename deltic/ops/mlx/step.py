"""Runs whole steps as one graph of MLX arrays, and also provides single ops.

A step reads the pools and writes to them after its graph is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from torch import Tensor

from deltic.ops import Ops
from deltic.ops.mlx import attention as attend
from deltic.ops.mlx import gdn as delta
from deltic.ops.mlx import gdn_plan, metal
from deltic.ops.mlx.attention import AttentionArrays, AttentionPlan, AttentionRows, Pages, Turns
from deltic.ops.mlx.feed_forward import MlpArrays, MoeArrays, feed_forward, feed_forward_of
from deltic.ops.mlx.gdn import GdnArrays, Slots
from deltic.ops.mlx.gdn_plan import GdnPlan
from deltic.ops.mlx.linear import matrix_of, product, rms_norm, rows_of, vector
from deltic.ops.mlx.memory import Array, copied, dtype_of, seen
from deltic.ops.torch import OPS as TORCH
from deltic.ops.types import (
    PAGE,
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
class LayerArrays:
    """A decoder layer on arrays, with its part of the cache."""

    input_norm: Array
    mixer: GdnArrays | AttentionArrays
    cache: Slots | Pages
    post_norm: Array
    mlp: MlpArrays | MoeArrays

    @classmethod
    def of(cls, layer: DecoderLayer, views: CacheViews) -> LayerArrays:
        mixer = layer.mixer
        own: GdnArrays | AttentionArrays
        cache: Slots | Pages
        if isinstance(mixer, GdnWeights):
            view = views.states[layer.store]
            view.check_order(mixer.spec)
            own, cache = GdnArrays.of(mixer), Slots.of(view)
        else:
            own, cache = AttentionArrays.of(mixer), Pages.of(views.kv[layer.store])
        return cls(vector(layer.input_norm), own, cache, vector(layer.post_norm), feed_forward_of(layer.mlp))


Result = delta.GdnResult | attend.KvResult


def step(ops: Ops, decoder: DecoderWeights, views: CacheViews
         ) -> Callable[[Batch], tuple[Tensor, Tensor | None] | None] | None:
    if not _serves(ops, decoder, views):
        return None
    model = _Model(decoder, views)
    decode = mx.compile(model.decode) if compiles() else None

    def run(batch: Batch) -> tuple[Tensor, Tensor | None] | None:
        if batch.adapters:
            return None
        plans = _plans(batch, decoder, views)
        turns = Turns.of(TORCH.rope(batch.positions, decoder.rope))
        inputs = _decode_inputs(batch, plans, turns) if decode else None
        if decode and inputs:
            hidden, (logits, *parts) = None, decode(*inputs)
        else:
            x, parts = model.layers_of(model.embedded(batch), plans, turns)
            hidden, logits = model.logits(x, batch)
        mx.eval(logits, *([] if hidden is None else [hidden]), *parts)
        for layer in decoder.layers:
            parts = _store(parts, layer, views, plans, batch)
        return seen(logits), None if hidden is None else seen(hidden)

    return run


def compiles() -> bool:
    """Returns True if decode steps are compiled. MLX's compiler for CPUs calls a C++ compiler, which takes seconds."""
    return metal.available()


class _Model:
    """The weights of a decoder as arrays, with its cache."""

    def __init__(self, decoder: DecoderWeights, views: CacheViews) -> None:
        self._layers = [LayerArrays.of(layer, views) for layer in decoder.layers]
        self._embedding, self._norm, self._eps = matrix_of(decoder.embedding), vector(decoder.norm), decoder.eps
        self._head = self._embedding if decoder.head is decoder.embedding else matrix_of(decoder.head)
        self._dtype = dtype_of((views.states[0].conv if views.states else views.kv[0].keys).dtype)

    def embedded(self, batch: Batch) -> Array:
        x = rows_of(self._embedding, copied(batch.ids)).astype(self._dtype)
        given = batch.input_embeds
        if given is not None:
            x[copied(given.tokens)] = copied(given.rows).astype(self._dtype)
        return x

    def layers_of(self, x: Array, plans: _Plans, turns: Turns) -> tuple[Array, list[Array]]:
        """Runs all layers: x [T, H] -> the last layer's output, and the arrays of the layers' results for the pools."""
        parts = list[Array]()
        for layer in self._layers:
            x, result = _layer(x, layer, plans, turns, self._eps)
            parts += result.arrays
        return x, parts

    def logits(self, x: Array, batch: Batch) -> tuple[Array | None, Array]:
        """Returns the hidden states of all tokens, if the batch requests them, and the logits."""
        wanted, hidden = copied(batch.logit_tokens), None
        if batch.layout.hidden:
            x = rms_norm(x, self._norm, self._eps)
            hidden, x = x.astype(mx.float32), x[wanted]
        else:
            x = rms_norm(x[wanted], self._norm, self._eps)
        return hidden, product(x, self._head).astype(mx.float32)

    def decode(self, ids: Array, cos: Array, sin: Array, source: Array, places: Array, table: Array, done: Array
               ) -> list[Array]:
        """Computes a step of one token per row, for rows with a state. It takes only arrays, so that it can be
        compiled. Returns the logits and the values for the pools."""
        count = len(ids)
        rows = AttentionRows(slice(0, count), count, table, done=done)
        plans = _Plans(AttentionPlan((rows,)), gdn_plan.decode_plan(count, source, places))
        x, parts = self.layers_of(rows_of(self._embedding, ids).astype(self._dtype), plans, Turns(cos, sin))
        return [product(rms_norm(x, self._norm, self._eps), self._head).astype(mx.float32), *parts]


def _decode_inputs(batch: Batch, plans: _Plans, turns: Turns) -> tuple[Array, ...] | None:
    """Returns the arguments of `_Model.decode`; None for other steps."""
    layout, gdn = batch.layout, plans.gdn
    if layout.decode_rows < layout.rows or layout.logits < layout.rows or layout.hidden or batch.input_embeds:
        return None
    if gdn and not gdn.decodes:
        return None
    done = batch.done.tolist()
    pages = _bucket(max(done) // PAGE + 1)
    table = np.zeros((layout.rows, pages), np.int64)
    given = batch.pages.numpy()[:, :pages]
    table[:, :given.shape[1]] = given
    none = mx.zeros((layout.rows, 1), mx.int32)
    source, places = (gdn.first.source, gdn.history.places) if gdn and gdn.first else (none, none)
    return copied(batch.ids), turns.cos, turns.sin, source, places, mx.array(table), copied(batch.done)


def _bucket(pages: int) -> int:
    """Rounds a number of pages up, so that graphs can be reused."""
    return -(-pages // 16) * 16 if pages > 8 else max(4, 1 << (pages - 1).bit_length())


@dataclass(frozen=True, slots=True)
class _Plans:
    attention: AttentionPlan | None
    gdn: GdnPlan | None


def _plans(batch: Batch, decoder: DecoderWeights, views: CacheViews) -> _Plans:
    spec = next((layer.mixer.spec for layer in decoder.layers if isinstance(layer.mixer, GdnWeights)), None)
    return _Plans(
        attend.plan_of(batch) if views.kv else None,
        gdn_plan.plan_of(batch, spec, views.states[0].conv.shape[1]) if spec else None,
    )


def _layer(x: Array, layer: LayerArrays, plans: _Plans, turns: Turns, eps: float) -> tuple[Array, Result]:
    """Computes one layer. x [T, H]: the residual stream."""
    normed, cache = rms_norm(x, layer.input_norm, eps), layer.cache
    result: Result
    if isinstance(layer.mixer, GdnArrays):
        assert plans.gdn is not None and isinstance(cache, Slots)
        mixed, result = delta.gdn(normed, layer.mixer, cache, plans.gdn)
    else:
        assert plans.attention is not None and isinstance(cache, Pages)
        mixed, result = attend.attention(normed, layer.mixer, cache, plans.attention, turns)
    x = x + mixed
    return x + feed_forward(rms_norm(x, layer.post_norm, eps), layer.mlp), result


def _store(parts: list[Array], layer: DecoderLayer, views: CacheViews, plans: _Plans, batch: Batch) -> list[Array]:
    """Writes a layer's results, which are the first arrays, to its pools. Returns the remaining arrays."""
    if isinstance(layer.mixer, AttentionWeights):
        attend.store(attend.KvResult(*parts[:2]), views.kv[layer.store], batch.store)
        return parts[2:]
    assert plans.gdn is not None
    count = 5 if plans.gdn.entries else 2
    raw, states, *entries = parts[:count]
    delta.store(delta.GdnResult(raw, states, tuple(entries)), views.states[layer.store], plans.gdn)
    return parts[count:]


def _serves(ops: Ops, decoder: DecoderWeights, views: CacheViews) -> bool:
    """Returns True if `serves_layer` is True for all layers."""
    return all(serves_layer(ops, layer, views) for layer in decoder.layers)


def serves_layer(ops: Ops, layer: DecoderLayer, views: CacheViews) -> bool:
    """Returns True if all ops of a layer belong to this backend, on one device, and MLX supports its K/V dtype."""
    own = (ops.gdn_mixer, ops.attention_mixer, ops.store_kv, ops.mlp, ops.moe, ops.head) == (
        gdn_mixer, attention_mixer, store_kv, mlp, moe, head)
    shared = (ops.add_norm, ops.embed, ops.rope) == (TORCH.add_norm, TORCH.embed, TORCH.rope)
    offloaded = isinstance(layer.mlp, MoeWeights) and isinstance(layer.mlp.experts, ExpertPool)
    plain = isinstance(layer.mixer, GdnWeights) or _plain(views.kv[layer.store])
    return own and shared and layer.mixer.shards == 1 and not offloaded and plain


def _plain(view: KvView) -> bool:
    return view.keys.dtype.is_floating_point and view.keys.itemsize > 1


# Single ops, for models with ops of another backend or with layer hooks


def gdn_mixer(x: Tensor, weights: GdnWeights, state: StateView, batch: Batch) -> Tensor:
    state.check_order(weights.spec)
    plan = batch.memo.get("mlx gdn")
    if plan is None:
        plan = batch.memo["mlx gdn"] = gdn_plan.plan_of(batch, weights.spec, state.conv.shape[1])
    out, result = delta.gdn(copied(x), GdnArrays.of(weights), Slots.of(state), plan)
    mx.eval(out, *result.arrays)
    delta.store(result, state, plan)
    return seen(out)


def attention_mixer(x: Tensor, weights: AttentionWeights, kv: KvView, batch: Batch, rope: Rope) -> Tensor:
    if not _plain(kv):
        return TORCH.attention_mixer(x, weights, kv, batch, rope)
    plan = batch.memo.get("mlx attention")
    if plan is None:
        plan = batch.memo["mlx attention"] = attend.plan_of(batch)
    out, result = attend.attention(copied(x), AttentionArrays.of(weights), Pages.of(kv), plan, Turns.of(rope))
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
    return _evaluated(feed_forward(copied(x), MlpArrays.of(weights)))


def moe(x: Tensor, weights: MoeWeights) -> Tensor:
    return _evaluated(feed_forward(copied(x), MoeArrays.of(weights)))


def head(x: Tensor, weight: Weight) -> Tensor:
    return _evaluated(product(copied(x), matrix_of(weight)).astype(mx.float32))


def _evaluated(x: Array) -> Tensor:
    mx.eval(x)
    return seen(x)
