"""A draft head by our own kernels: its K/V after every step, and all drafts of a step as one CUDA graph, which starts
from the model's draws without waiting for the host."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deltic.ops import Ops
from deltic.ops.cuda import arguments as args
from deltic.ops.cuda.decode import DecodeStep, why_not
from deltic.ops.cuda.driver import Module, entry, headers, record, why_not_compiled
from deltic.ops.cuda.kernel_config import STORE, Shapes, shapes_of
from deltic.ops.cuda.layout import MAX_GEMV_TOKENS
from deltic.ops.cuda.sample import choose
from deltic.ops.types import (
    AttentionWeights,
    Batch,
    CacheViews,
    DecoderWeights,
    Drafted,
    Layout,
    MtpStep,
    MtpWeights,
    Sampling,
    Weight,
)

MAX_KEPT_TOKENS = 1024
"""Tokens of a step whose hidden states are kept, at most."""


def mtp_step(ops: Ops, weights: MtpWeights, views: CacheViews, slots: Tensor) -> MtpStep | None:
    """Returns None if the kernels do not know the head or the rest of the model: torch then serves it."""
    decoder = _as_decoder(weights)
    kv = CacheViews(views.kv, ())
    if not slots.is_cuda or why_not(ops, decoder, kv):
        return None
    keys_values = _keys_values(decoder, weights)
    # further products: embedding and hidden state joined, and keys and values alone
    shapes = shapes_of(decoder, kv, ((weights.fc, False), (keys_values, True)))
    if shapes is None or shapes.attention is None:
        return None
    if any(why_not_compiled(text, slots.device) for text in (source(shapes, slots.shape[1]), shapes.source())):
        return None
    head = MtpHeadOp(decoder, weights, keys_values, kv, shapes, slots)
    return MtpStep(head.follow, head.draft, head.draft_ahead, head.record, head.last)


def source(shapes: Shapes, hidden: int) -> str:
    """Returns the CUDA source of the kernels that a head needs besides a layer's. hidden: size of its hidden states."""
    assert shapes.attention
    text = [headers("kv", "attention", "draft")]
    text += [entry("head_enter", "HeadEnter", "256", f"head_enter<{hidden}>"),
             entry("accept", "Accept", "256", "accept")]
    text += [entry(f"head_keys_{kind}", "HeadKeys", "256",
                   f"head_keys<{shapes.attention.head_dim}, {number}, {shapes.kv}>")
             for kind, number in (("few", "float"), ("many", "u16"))]
    return "".join(text)


def _as_decoder(weights: MtpWeights) -> DecoderWeights:
    """Returns the head's layer as a model of one layer, with joined projections if all of them are plain."""
    mixer = weights.layer.mixer
    assert isinstance(mixer, AttentionWeights)
    layer = replace(weights.layer, mixer=replace(mixer, qkv=_joined(mixer.qkv)))
    return DecoderWeights(weights.embedding, (layer,), weights.norm, weights.head, weights.rope, weights.eps)


def _joined(weight: Weight) -> Weight:
    tensors = [block for block in weight if isinstance(block, Tensor)] if isinstance(weight, tuple) else []
    return torch.cat(tensors) if tensors and len(tensors) == len(weight) else weight


def _keys_values(decoder: DecoderWeights, weights: MtpWeights) -> Weight:
    """Returns the rows k, v of the projections; of a plain matrix a view."""
    mixer = decoder.layers[0].mixer
    assert isinstance(mixer, AttentionWeights)
    return mixer.qkv[-2 * mixer.spec.kv:] if isinstance(mixer.qkv, Tensor) else weights.kv


@dataclass(frozen=True, slots=True)
class _Drafts:
    """The recorded drafts of a bucket.

    numbers: the graph's input, laid out as in kernels/draft.cuh. drafted: its output; tokens and accepted are views of
        it.
    """

    numbers: Tensor
    drafted: Drafted
    tokens: Tensor
    accepted: Tensor
    graph: torch.cuda.CUDAGraph


class MtpHeadOp:
    """A draft head over one cache. last [MAX_KEPT_TOKENS, H] float32: the hidden states of the last step's tokens."""

    def __init__(self, decoder: DecoderWeights, weights: MtpWeights, keys_values: Weight, views: CacheViews,
                 shapes: Shapes, slots: Tensor) -> None:
        self._weights, self._slots, self._views = weights, slots, views
        self._layer, self._device, self._size = decoder.layers[0], slots.device, slots.shape[1]
        self._step = DecodeStep(decoder, views, shapes, reads=False)
        self._module = Module(source(shapes, self._size), slots.device)
        mixer = self._layer.mixer
        assert isinstance(mixer, AttentionWeights)
        self._mixer, self._kv = mixer, keys_values
        self._known: dict[tuple[int, int, int], _Drafts] = {}
        self._pool: Any = None
        self.last = torch.zeros(MAX_KEPT_TOKENS, self._size, device=slots.device)

    def follow(self, batch: Batch, hidden: Tensor) -> None:
        """As `MtpStep.follow`."""
        tokens = batch.layout.tokens
        if batch.count is None:
            batch = replace(batch, count=torch.full((1,), batch.layout.rows, device=self._device))
        append = batch.append.long() if batch.layout.appends else None
        last = self.last if tokens <= MAX_KEPT_TOKENS else None
        x = torch.empty(tokens, 2 * self._size, dtype=torch.bfloat16, device=self._device)
        turns = torch.empty(tokens, self._weights.rope.rotary_dim, device=self._device)
        self._enter(batch, x, turns, hidden, last)
        kv, spec, kind = self._views.kv[self._layer.store], self._mixer.spec, "few"
        if tokens <= MAX_GEMV_TOKENS:
            joined = torch.empty(tokens, self._size, device=self._device)
            proj = torch.empty(tokens, 2 * spec.kv, device=self._device)
            self._step.multiply(self._weights.fc, x, None, joined, STORE)
            self._step.multiply(self._kv, joined, self._layer.input_norm, proj, STORE)
        else:
            joined, kind = self._step.linear(x, self._weights.fc, torch.float32), "many"
            proj = self._step.linear(self._step.normed(joined, None, self._layer.input_norm), self._kv)
        self._module.launch(f"k_head_keys_{kind}", (tokens,), 256, args.HeadKeysArgs(
            proj=proj, key_norm=self._mixer.k_norm, turns=turns, last=hidden if last is None else last,
            slots=self._slots, keys=kv.keys, values=kv.values, count=batch.count, starts=batch.starts, done=batch.done,
            target=batch.target, append=append, pages=batch.pages, eps=spec.eps, kv_heads=spec.kv_heads,
            stride=2 * spec.kv, rotary=spec.rotary_dim, width=batch.pages.stride(0), size=self._size))
        if batch.layout.checkpoints:
            rows = batch.emit_row
            self._slots[batch.emit_slot] = hidden[batch.starts[rows] + batch.emit_length - batch.done[rows] - 1]

    def draft(self, batch: Batch, counts: Tensor, sampling: Sampling) -> Tensor:
        """As `MtpStep.draft`. The result is valid until the next drafts. Ignores filters and penalties."""
        most = len(sampling.key) // batch.layout.rows
        drafts = self._plan(batch, most, None, sampling.key, sampling.temperature, most)
        drafts.graph.replay()
        return drafts.tokens[:, 0, :batch.layout.rows].t()

    def draft_ahead(self, batch: Batch, most: int, chosen: Tensor, keys: Tensor, temperature: Tensor) -> Drafted:
        """As `MtpStep.draft_ahead`, for a step that had a bucket."""
        drafts = self._plan(batch, most, chosen, keys, temperature, keys.shape[1])
        drafts.graph.replay()
        return drafts.drafted

    def record(self, rows: int, pages: int, most: int) -> None:
        """Records the drafts of a bucket."""
        key = rows, pages, most
        if key in self._known:
            return
        size = 2 + 4 * rows + most * 5 * rows + rows * pages
        numbers = torch.zeros(size, dtype=torch.int64, device=self._device)
        numbers[0] = 1
        drafted = Drafted(torch.zeros(2 * rows * (most + 1), dtype=torch.int64, device=self._device), rows, most)
        each, first = drafted.numbers.split((2 * rows * most, 2 * rows))
        tokens, accepted = each.view(most, 2, rows), first.view(rows, 2)
        with torch.cuda.device(self._device):
            self._draft(numbers, rows, pages, tokens)
            graph, _ = record(lambda: self._draft(numbers, rows, pages, tokens), self._pool)
        self._pool = self._pool or graph.pool()
        self._known[key] = _Drafts(numbers, drafted, tokens, accepted, graph)

    def _plan(self, batch: Batch, most: int, chosen: Tensor | None, keys: Tensor, temperature: Tensor, width: int
              ) -> _Drafts:
        """Writes the input of the bucket's drafts."""
        padded = batch.padded
        assert padded is not None, "drafts follow steps that have buckets"
        key = padded.rows, batch.pages.shape[1], most
        self.record(*key)
        drafts = self._known[key]
        self._module.launch("k_accept", (padded.rows,), 256, args.AcceptArgs(
            count=padded.numbers, ids=batch.ids, starts=batch.starts, done=batch.done, positions=batch.positions,
            source=batch.source, pages=batch.pages, chosen=chosen, keys=keys, temperature=temperature, last=self.last,
            slots=self._slots, next=drafts.numbers, accepted=drafts.accepted, tokens=batch.positions.stride(0),
            rows=padded.rows, drafts=most, width=batch.pages.shape[1], size=self._size, key_width=width),
            overlap=False)
        return drafts

    def _draft(self, numbers: Tensor, rows: int, pages: int, tokens: Tensor) -> None:
        """Launches the drafts of a bucket."""
        most = len(tokens)
        count, ids, starts, source, each, temperature, table = numbers.split(
            (1, rows, rows + 1, rows, 5 * rows * most, rows, rows * pages))
        x = torch.empty(rows, 2 * self._size, dtype=torch.bfloat16, device=self._device)
        residual = torch.empty(rows, self._size, device=self._device)
        for depth, part in enumerate(each.view(most, 5 * rows).unbind(0)):
            positions, done, keys = part.split((3 * rows, rows, rows))
            batch = _batch(count, ids if depth == 0 else tokens[depth - 1, 0], positions.view(3, rows), starts, done,
                           source, table.view(rows, pages))
            work = self._step.buffers(batch, "few", residual)
            self._enter(batch, x, work.turns, residual, goes_on=depth > 0)
            self._step.multiply(self._weights.fc, x, None, residual, STORE)
            choose(self._step.layers(work), temperature.view(torch.float32), keys, tokens[depth],
                   self._weights.tokens)

    def _enter(self, batch: Batch, x: Tensor, turns: Tensor, hidden: Tensor, last: Tensor | None = None,
               goes_on: bool = False) -> None:
        """Writes the head's input x [T, 2 H] bf16 from tokens and the hidden states before them. goes_on: these are the
        head's own output for them."""
        weights, tokens = self._weights, batch.layout.tokens
        embedding, embedded = weights.embedding, None
        if not isinstance(embedding, Tensor):  # the kernel of the model's steps reads its tiles
            embedded = torch.empty(tokens, self._size, device=self._device)
            self._step.enter(batch, embedded, turns, tokens)
        self._module.launch("k_head_enter", (tokens,), 256, args.HeadEnterArgs(
            ids=batch.ids, positions=batch.positions, embedding=None if embedded is not None else embedding,
            embedded=embedded, norm_embedding=weights.norm_embedding, norm_hidden=weights.norm_hidden, hidden=hidden,
            norm=weights.norm if goes_on else None, slots=None if goes_on else self._slots,
            frequencies=self._step.frequencies, axes=self._step.axes, count=batch.count, starts=batch.starts,
            done=batch.done, source=batch.source, x=x, turns=turns, last=last, eps=weights.eps,
            factor=weights.rope.attention_factor, size=self._size, rotary=weights.rope.rotary_dim, tokens=tokens),
            overlap=False)


def _batch(count: Tensor, ids: Tensor, positions: Tensor, starts: Tensor, done: Tensor, source: Tensor, pages: Tensor
           ) -> Batch:
    """Returns rows of one token, without states."""
    rows, none = len(ids), ids[:0]
    return Batch(
        layout=Layout((1,) * rows, (1,) * rows, rows, rows),
        ids=ids,
        positions=positions,
        starts=starts,
        done=done,
        pages=pages,
        store=none,
        source=source,
        target=source,
        base=done,
        delta_log=done,
        append=none.bool(),
        emit_row=none,
        emit_length=none,
        emit_slot=none,
        logit_tokens=starts[:rows],
        count=count,
    )
