"""Draft head on MLX arrays: one graph per draft, and one for the K/V of a step."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import torch
from torch import Tensor

from deltic.ops import Ops
from deltic.ops.mlx import attention as attend
from deltic.ops.mlx.attention import AttentionArrays, Pages, Turns
from deltic.ops.mlx.feed_forward import feed_forward, feed_forward_of
from deltic.ops.mlx.linear import matrix_of, product, rms_norm, rows_of, vector
from deltic.ops.mlx.memory import Array, copied, dtype_of, seen
from deltic.ops.mlx.step import serves_layer
from deltic.ops.torch import OPS as TORCH
from deltic.ops.torch.draft_head import hidden_before, keep_hidden, last_hidden
from deltic.ops.types import PAGE, AttentionWeights, Batch, CacheViews, Layout, MtpStep, MtpWeights, Sampling


def mtp_step(ops: Ops, weights: MtpWeights, views: CacheViews, slots: Tensor) -> MtpStep | None:
    if not serves_layer(ops, weights.layer, views):
        return None
    head, sample = _Head(weights, views), ops.sample

    def follow(batch: Batch, hidden: Tensor) -> None:
        head.keep(batch, hidden_before(slots, batch, hidden))
        keep_hidden(slots, batch, hidden)

    def draft(batch: Batch, counts: Tensor, sampling: Sampling) -> Tensor:
        most = len(sampling.key) // len(counts)
        tokens = torch.zeros(len(counts), most, dtype=torch.int64)
        hidden, ids, rows = copied(last_hidden(slots, batch)), batch.ids, torch.arange(len(counts))
        for depth in range(most):
            active = counts[rows] > depth
            hidden, ids, rows = hidden[copied(active.nonzero()[:, 0])], ids[active], rows[active]
            hidden, logits = head.draft(_batch_at(batch, rows, ids, depth), hidden)
            ids = sample(logits, _sampling_at(sampling, rows * most + depth)).tokens
            tokens[rows, depth] = ids
        return tokens

    return MtpStep(follow, draft)


def _batch_at(batch: Batch, rows: Tensor, ids: Tensor, depth: int) -> Batch:
    """Returns the batch of the given rows, `depth` drafts later."""
    done, pages, count = batch.done[rows] + depth, batch.pages[rows], len(rows)
    layout = Layout((1,) * count, tuple((done + 1).tolist()), count, count)
    places = pages.gather(1, (done // PAGE)[:, None])[:, 0] * PAGE + done % PAGE
    return replace(batch, layout=layout, ids=ids, positions=batch.positions[:, rows] + depth, done=done, pages=pages,
                   store=places)


def _sampling_at(sampling: Sampling, draws: Tensor) -> Sampling:
    columns = ("temperature", "top_k", "top_p", "min_p", "key")
    return replace(sampling, kept=None, landing=None,
                   **{name: getattr(sampling, name)[draws] for name in columns})


class _Head:
    """The weights of a draft head as arrays. Embedding and rows of the logits matrix may change in place."""

    def __init__(self, weights: MtpWeights, views: CacheViews) -> None:
        mixer = weights.layer.mixer
        assert isinstance(mixer, AttentionWeights)
        self._weights, self._view = weights, views.kv[weights.layer.store]
        self._spec, self._eps, self._dtype = mixer.spec, weights.eps, dtype_of(self._view.keys.dtype)
        self._norms = [vector(norm) for norm in (weights.norm_embedding, weights.norm_hidden, weights.layer.input_norm,
                                                 weights.layer.post_norm, weights.norm)]
        self._embedding, self._fc = matrix_of(weights.embedding), matrix_of(weights.fc)
        self._mixer, self._pages = AttentionArrays.of(mixer), Pages.of(self._view)
        self._kv, self._head = matrix_of(weights.kv), matrix_of(weights.head)
        self._mlp = feed_forward_of(weights.layer.mlp)

    def _enter(self, batch: Batch, hidden: Array) -> tuple[Array, Array, Turns]:
        """Returns the residual stream at the layer's input, its norm, and the rotation of the tokens."""
        embedded = rows_of(self._embedding, copied(batch.ids))
        parts = [rms_norm(x.astype(self._dtype), norm, self._eps)
                 for x, norm in ((embedded, self._norms[0]), (hidden, self._norms[1]))]
        joined = product(mx.concatenate(parts, axis=-1), self._fc)
        turns = Turns.of(TORCH.rope(batch.positions, self._weights.rope))
        return joined, rms_norm(joined, self._norms[2], self._eps), turns

    def keep(self, batch: Batch, hidden: Tensor) -> None:
        """Stores the K/V of a step's tokens. hidden [T, H]: the hidden states before them."""
        _, x, turns = self._enter(batch, copied(hidden))
        result = attend.stored_only(x, self._kv, self._mixer.k_norm, self._spec, turns, self._dtype)
        mx.eval(*result.arrays)
        attend.store(result, self._view, batch.store)

    def draft(self, batch: Batch, hidden: Array) -> tuple[Array, Tensor]:
        """Stores the K/V of the rows' tokens. Returns hidden states [R, H] and logits [R, V] float32."""
        residual, x, turns = self._enter(batch, hidden)
        mixed, result = attend.attention(x, self._mixer, self._pages, attend.plan_of(batch), turns)
        x = residual + mixed
        x = x + feed_forward(rms_norm(x, self._norms[3], self._eps), self._mlp)
        x = rms_norm(x, self._norms[4], self._eps)
        logits = product(x, self._head).astype(mx.float32)
        mx.eval(x, logits, *result.arrays)
        attend.store(result, self._view, batch.store)
        found, tokens = seen(logits), self._weights.tokens
        if tokens is None:
            return x, found
        whole = found.new_full((len(found), len(self._weights.embedding)), -torch.inf)
        return x, whole.index_copy_(1, tokens, found)
