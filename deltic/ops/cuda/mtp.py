"""The MTP draft head with deltic's kernels: its K/V after every step, and all drafts of a step as one CUDA graph, which
starts from the model's drawn tokens and does not wait for the host.

The K/V heads and the feed-forward of the head are split over several devices; each device has everything else as a
whole. Each draws the same drafts from the same numbers, so that only the sums of the layer are exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deltic.ops import Ops
from deltic.ops.cuda import arguments as args
from deltic.ops.cuda.decode import DecodeStep, why_not
from deltic.ops.cuda.driver import Module, entry, headers, why_not_compiled
from deltic.ops.cuda.kernel_config import STORE, Shapes, shapes_of
from deltic.ops.cuda.layout import MAX_GEMV_TOKENS
from deltic.ops.cuda.sample import choose
from deltic.ops.cuda.tensor_parallel import PartExchange, PartialSum, Shared, record_all, together
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
"""Largest number of tokens of a step for which hidden states are kept."""


def mtp_step(ops: Ops, weights: MtpWeights, views: CacheViews, slots: Tensor) -> MtpStep | None:
    """Returns the draft head's step; None if the kernels do not support the head or the rest of the model."""
    heads = draft_heads(ops, [weights], [views], [slots], _no_exchange)
    return heads.step if heads else None


def draft_heads(ops: Ops, weights: Sequence[MtpWeights], views: Sequence[CacheViews], slots: Sequence[Tensor],
                exchange: PartExchange) -> DraftHeads | None:
    """Returns the draft head on several devices, or None like `mtp_step`. exchange: as in the devices' steps."""
    heads = list[MtpHeadOp]()
    for own, cache, hidden in zip(weights, views, slots, strict=True):
        head = _head(ops, own, CacheViews(cache.kv, ()), hidden)
        if head is None:
            return None
        heads.append(head)
    return DraftHeads(heads, exchange)


def _head(ops: Ops, weights: MtpWeights, kv: CacheViews, slots: Tensor) -> MtpHeadOp | None:
    decoder = _as_decoder(weights)
    if not slots.is_cuda or why_not(ops, decoder, kv):
        return None
    keys_values = _keys_values(decoder, weights)
    # further products: of embedding and hidden state joined, and for keys and values alone
    shapes = shapes_of(decoder, kv, ((weights.fc, False), (keys_values, True)))
    if shapes is None or shapes.attention is None:
        return None
    if any(why_not_compiled(text, slots.device) for text in (source(shapes, slots.shape[1]), shapes.source())):
        return None
    return MtpHeadOp(decoder, weights, keys_values, kv, shapes, slots)


def _no_exchange(parts: Sequence[PartialSum]) -> None:
    raise AssertionError("a model on one device has no parts of sums")


def source(shapes: Shapes, hidden: int) -> str:
    """Returns the CUDA source of a head's kernels besides those of its layer. hidden: size of its hidden states."""
    assert shapes.attention
    text = [headers("kv", "attention", "draft")]
    text += [entry("head_enter", "HeadEnter", "256", f"head_enter<{hidden}>"),
             entry("accept", "Accept", "256", "accept")]
    text += [entry(f"head_keys_{kind}", "HeadKeys", "256",
                   f"head_keys<{shapes.attention.head_dim}, {number}, {shapes.kv}>")
             for kind, number in (("few", "float"), ("many", "u16"))]
    return "".join(text)


def _as_decoder(weights: MtpWeights) -> DecoderWeights:
    """Returns the head as a model of one layer. Its projections are joined if all of them are plain tensors."""
    mixer = weights.layer.mixer
    assert isinstance(mixer, AttentionWeights)
    layer = replace(weights.layer, mixer=replace(mixer, qkv=_joined(mixer.qkv)))
    return DecoderWeights(weights.embedding, (layer,), weights.norm, weights.head, weights.rope, weights.eps)


def _joined(weight: Weight) -> Weight:
    tensors = [block for block in weight if isinstance(block, Tensor)] if isinstance(weight, tuple) else []
    return torch.cat(tensors) if tensors and len(tensors) == len(weight) else weight


def _keys_values(decoder: DecoderWeights, weights: MtpWeights) -> Weight:
    """Returns the K and V rows of the projections; a view if the matrix is a plain tensor."""
    mixer = decoder.layers[0].mixer
    assert isinstance(mixer, AttentionWeights)
    return mixer.qkv[-2 * mixer.spec.kv:] if isinstance(mixer.qkv, Tensor) else weights.kv


class MtpHeadOp:
    """A draft head over one cache, on one device.

    last [MAX_KEPT_TOKENS, H] float32: the hidden states of the last step's tokens.
    """

    def __init__(self, decoder: DecoderWeights, weights: MtpWeights, keys_values: Weight, views: CacheViews,
                 shapes: Shapes, slots: Tensor) -> None:
        self._weights, self._slots, self._views = weights, slots, views
        self._layer, self.device, self._size = decoder.layers[0], slots.device, slots.shape[1]
        self._step = DecodeStep(decoder, views, shapes, reads=False)
        self._module = Module(source(shapes, self._size), slots.device)
        mixer = self._layer.mixer
        assert isinstance(mixer, AttentionWeights)
        self._mixer, self._kv = mixer, keys_values
        self.last = torch.zeros(MAX_KEPT_TOKENS, self._size, device=slots.device)

    def follow(self, batch: Batch, hidden: Tensor) -> None:
        """Implements `MtpStep.follow`."""
        tokens = batch.layout.tokens
        if batch.count is None:
            batch = replace(batch, count=torch.full((1,), batch.layout.rows, device=self.device))
        append = batch.append.long() if batch.layout.appends else None
        last = self.last if tokens <= MAX_KEPT_TOKENS else None
        x = torch.empty(tokens, 2 * self._size, dtype=torch.bfloat16, device=self.device)
        turns = torch.empty(tokens, self._weights.rope.rotary_dim, device=self.device)
        self._enter(batch, x, turns, hidden, last)
        kv, spec, kind = self._views.kv[self._layer.store], self._mixer.spec, "few"
        kv.wait()
        if tokens <= MAX_GEMV_TOKENS:
            joined = torch.empty(tokens, self._size, device=self.device)
            proj = torch.empty(tokens, 2 * spec.kv, device=self.device)
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

    def accept(self, batch: Batch, drafts: _Drafts, chosen: Tensor | None, keys: Tensor, temperature: Tensor,
               width: int) -> None:
        """Compares drawn tokens with a step's drafts and writes the input of the next drafts. width: keys of a row."""
        padded = batch.padded
        assert padded is not None
        self._module.launch("k_accept", (padded.rows,), 256, args.AcceptArgs(
            count=padded.numbers, ids=batch.ids, starts=batch.starts, done=batch.done, positions=batch.positions,
            source=batch.source, pages=batch.pages, chosen=chosen, keys=keys, temperature=temperature,
            next=drafts.numbers[0], accepted=drafts.accepted, tokens=batch.positions.stride(0), rows=padded.rows,
            drafts=drafts.outputs[0].drafts, width=batch.pages.shape[1], key_width=width), overlap=False)

    def drafts(self, numbers: Tensor, rows: int, pages: int, tokens: Tensor) -> Shared[None]:
        """Launches the drafts of a bucket. tokens [drafts, 2, rows]: receives the results of `choose`."""
        most = len(tokens)
        count, ids, starts, source, each, temperature, taken, table = numbers.split(_sizes(rows, pages, most))
        x = torch.empty(rows, 2 * self._size, dtype=torch.bfloat16, device=self.device)
        residual = torch.empty(rows, self._size, device=self.device)
        for depth, part in enumerate(each.view(most, 5 * rows).unbind(0)):
            positions, done, keys = part.split((3 * rows, rows, rows))
            batch = _batch(count, ids if depth == 0 else tokens[depth - 1, 0], positions.view(3, rows), starts, done,
                           source, table.view(rows, pages))
            work = self._step.buffers(batch, "few", residual)
            self._enter(batch, x, work.turns, residual, taken=None if depth else taken, goes_on=depth > 0)
            self._step.multiply(self._weights.fc, x, None, residual, STORE)
            logits = yield from self._step.layers(work)
            choose(logits, temperature.view(torch.float32), keys, tokens[depth], self._weights.tokens)

    def _enter(self, batch: Batch, x: Tensor, turns: Tensor, hidden: Tensor, last: Tensor | None = None,
               taken: Tensor | None = None, goes_on: bool = False) -> None:
        """Writes the head's input x [T, 2 H] bf16 from tokens and the hidden states before them. taken [R]: tokens of
        the last step, or -1; their hidden states are first copied to the rows' slots. goes_on: the hidden states are
        the head's own output for the preceding tokens."""
        weights, tokens = self._weights, batch.layout.tokens
        embedding, embedded = weights.embedding, None
        if not isinstance(embedding, Tensor):  # the kernel of the model's steps reads its tiles
            embedded = torch.empty(tokens, self._size, device=self.device)
            self._step.enter(batch, embedded, turns, tokens)
        self._module.launch("k_head_enter", (tokens,), 256, args.HeadEnterArgs(
            ids=batch.ids, positions=batch.positions, embedding=None if embedded is not None else embedding,
            embedded=embedded, norm_embedding=weights.norm_embedding, norm_hidden=weights.norm_hidden, hidden=hidden,
            norm=weights.norm if goes_on else None, slots=None if goes_on else self._slots,
            kept=None if taken is None else self.last, taken=taken,
            frequencies=self._step.frequencies, axes=self._step.axes, count=batch.count, starts=batch.starts,
            done=batch.done, source=batch.source, x=x, turns=turns, last=last, eps=weights.eps,
            factor=weights.rope.attention_factor, size=self._size, rotary=weights.rope.rotary_dim, tokens=tokens),
            overlap=False)


@dataclass(frozen=True, slots=True)
class _Drafts:
    """The recorded drafts of a bucket. All fields but `accepted` have one element per device.

    numbers: input of the graph, laid out as in kernels/draft.cuh. outputs: results of the graph. accepted: the tokens
    and positions that the drafts follow, the part of the first device's output that its `accept` writes.
    """

    numbers: tuple[Tensor, ...]
    outputs: tuple[Drafted, ...]
    accepted: Tensor
    graphs: tuple[torch.cuda.CUDAGraph, ...]


class DraftHeads:
    """The draft head of a model on all of its devices."""

    def __init__(self, heads: Sequence[MtpHeadOp], exchange: PartExchange) -> None:
        self._heads, self._exchange = tuple(heads), exchange
        self._devices = [head.device for head in heads]
        self._known: dict[tuple[int, int, int], _Drafts] = {}
        self._pools: list[Any] = [None] * len(heads)

    @property
    def step(self) -> MtpStep:
        """The draft head as an `MtpStep`, with `follow` of the first device."""
        first = self._heads[0]
        return MtpStep(first.follow, self.draft, self.draft_ahead, self.record, first.last)

    def follow(self, rank: int, batch: Batch, hidden: Tensor) -> None:
        """Implements `MtpStep.follow` on one device, which must be torch's current device."""
        self._heads[rank].follow(batch, hidden)

    def draft(self, batch: Batch, counts: Tensor, sampling: Sampling) -> Tensor:
        """Implements `MtpStep.draft`. The result is valid until the next drafts. Ignores filters and penalties."""
        rows = batch.layout.rows
        most = len(sampling.key) // rows
        drafted = self._run(batch, most, None, sampling.key, sampling.temperature, most)
        return _tokens(drafted)[:, 0, :rows].t()

    def draft_ahead(self, batch: Batch, most: int, chosen: Tensor, keys: Tensor, temperature: Tensor) -> Drafted:
        """Implements `MtpStep.draft_ahead` for a step that had a bucket."""
        return self._run(batch, most, chosen, keys, temperature, keys.shape[1])

    def record(self, rows: int, pages: int, most: int) -> None:
        """Records the drafts of a bucket."""
        key = rows, pages, most
        if key in self._known:
            return
        inputs, outputs = list[Tensor](), list[Drafted]()
        for device in self._devices:
            numbers = torch.zeros(sum(_sizes(rows, pages, most)), dtype=torch.int64, device=device)
            numbers[0] = 1
            numbers.split(_sizes(rows, pages, most))[-2].fill_(-1)
            inputs.append(numbers)
            outputs.append(Drafted(torch.zeros(2 * rows * (most + 1), dtype=torch.int64, device=device), rows, most))

        def launch() -> None:
            launches = [head.drafts(numbers, rows, pages, _tokens(drafted))
                        for head, numbers, drafted in zip(self._heads, inputs, outputs, strict=True)]
            together(self._devices, launches, self._exchange)

        launch()
        graphs, _ = record_all(launch, self._devices, self._pools)
        self._pools = [pool or graph.pool() for pool, graph in zip(self._pools, graphs, strict=True)]
        accepted = outputs[0].numbers[outputs[0].token_at(0):]
        self._known[key] = _Drafts(tuple(inputs), tuple(outputs), accepted, tuple(graphs))

    def _run(self, batch: Batch, most: int, chosen: Tensor | None, keys: Tensor, temperature: Tensor, width: int
             ) -> Drafted:
        """Launches the drafts that follow a step on all devices."""
        assert batch.padded is not None, "drafts follow steps that have buckets"
        key = batch.padded.rows, batch.pages.shape[1], most
        self.record(*key)
        drafts = self._known[key]
        self._heads[0].accept(batch, drafts, chosen, keys, temperature, width)
        for numbers in drafts.numbers[1:]:
            numbers.copy_(drafts.numbers[0], non_blocking=True)
        for device, graph in zip(self._devices, drafts.graphs, strict=True):
            with torch.cuda.device(device):
                graph.replay()
        return drafts.outputs[0]


def _sizes(rows: int, pages: int, drafts: int) -> list[int]:
    """Returns the sizes of the parts of a bucket's input: count, ids, starts, source; positions, done and keys of each
    draft; temperature, taken and pages."""
    return [1, rows, rows + 1, rows, 5 * rows * drafts, rows, rows, rows * pages]


def _tokens(drafted: Drafted) -> Tensor:
    """Returns a view [drafts, 2, rows] of the drafted tokens."""
    return drafted.numbers[:drafted.token_at(0)].view(drafted.drafts, 2, drafted.rows)


def _batch(count: Tensor, ids: Tensor, positions: Tensor, starts: Tensor, done: Tensor, source: Tensor, pages: Tensor
           ) -> Batch:
    """Returns a batch of rows with one token each, without states."""
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
