"""Prefill steps on a GPU: products by cuBLAS, attention by torch's kernels, the rest by our own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deltic.ops.cuda import arguments as args
from deltic.ops.cuda.driver import Module, headers
from deltic.ops.cuda.kernel_config import Shapes, entry, state_header
from deltic.ops.cuda.staging import on_device
from deltic.ops.kv import take
from deltic.ops.types import (
    CHUNK,
    PAGE,
    AttentionSpec,
    AttentionWeights,
    Batch,
    DecoderLayer,
    GdnWeights,
    KvView,
    Layout,
)

if TYPE_CHECKING:
    from deltic.ops.cuda.decode import DecodeStep
    from deltic.ops.cuda.decode import _DecodeBuffers as Work

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


MOST_TOKENS = 65535
"""Of a step: blocks of a grid's second axis."""
_LINE, _STAGES = 72, 3
"""As in kernels/delta.cuh."""


def terms_bytes(size: int) -> int:
    """What a chunk of one head leaves for the scan: two tiles [CHUNK, size] and a matrix [CHUNK, CHUNK], bfloat16."""
    return 2 * CHUNK * size * 2 + CHUNK * CHUNK * 2


def terms_shared(size: int) -> int:
    """Bytes of shared memory of a block of `delta_terms`."""
    return 2 * CHUNK * _LINE * 4 + CHUNK * size * 2 + 6 * CHUNK * 4


def scan_shared(size: int) -> int:
    """Bytes of shared memory of a block of `delta_scan`."""
    tile, part = CHUNK * size * 2, CHUNK * columns(size) * 2
    return _STAGES * (3 * tile + CHUNK * CHUNK * 2 + part + 4 * CHUNK * 4) + (size // 16 + 4) * 2048 + 64 + 1024


def columns(size: int) -> int:
    """Of the state that a block of `delta_scan` has."""
    return min(size, 64)


def source(shapes: Shapes) -> str:
    """The text of the kernels for a model."""
    text = [state_header(shapes.state), headers("kv", "prompt", "delta", "scan"),
            entry("prompt_gate", "PromptGate", "256", "prompt_gate"),
            entry("copy_slot", "CopySlot", "256", "copy_slot")]
    if shapes.gdn:
        text += [entry(name, type, bounds, f"{name}<{shapes.gdn.key_dim}>") for name, type, bounds in (
            ("prompt_conv", "PromptConv", "128, 5"), ("prompt_ring", "PromptRing", "128"),
            ("gated_norm", "GatedNorm", "256"), ("delta_terms", "DeltaTerms", "128, 4"),
            ("delta_scan", "DeltaScan", "256, 1"))]
    if shapes.attention:
        spec = shapes.attention
        text.append(entry("prompt_heads", "PromptHeads", "256",
                          f"prompt_heads<{spec.head_dim}, {spec.heads + 2 * spec.kv_heads}, {shapes.kv}>"))
    return "".join(text)


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The geometry of a step, the same in every layer.

    rows: of several tokens, which come after the single ones, and their tokens after as many.
    count: chunks in all.
    chunks [count, 2]: row and first token in it.
    firsts [R]: each row's first chunk.
    decode_rows: the rows of one token as a batch of their own.
    """

    decode_rows: Batch | None
    rows: int
    tokens: int
    count: int
    chunks: Tensor
    firsts: Tensor
    contexts: tuple[Context, ...]


@dataclass(frozen=True, slots=True)
class _Chunks:
    """What lies between the kernels of a Gated DeltaNet layer: tiles [chunks, C, CHUNK], terms bf16, units, gates
    float32."""

    tiles: Tensor
    units: Tensor
    terms: Tensor
    gates: Tensor


@dataclass(frozen=True, slots=True)
class _PrefillBuffers:
    """What all layers of a step share. turns [T, rotary] float32. y, core: room for what mixers give, [T, values or
    queries] bf16, and what the delta rule gives before it is normed. decode_rows: of the rows of one token, which come
    first, as of a step that only decodes; with the same y."""

    batch: Batch
    plan: PrefillPlan
    turns: Tensor
    y: Tensor
    core: Tensor
    chunks: _Chunks | None
    decode_rows: Work | None


def plan_of(batch: Batch) -> PrefillPlan:
    layout, device = batch.layout, batch.done.device
    counts = [0 if row < layout.decode_rows else -(-chunk // CHUNK) for row, chunk in enumerate(layout.chunks)]
    cuts = [number for row, count in enumerate(counts) for j in range(count) for number in (row, j * CHUNK)]
    firsts = [0, *accumulate(counts)][:-1]
    numbers = on_device(torch.tensor(cuts + firsts, dtype=torch.int64), device)
    return PrefillPlan(_singles(batch) if layout.decode_rows else None, layout.rows - layout.decode_rows,
                layout.tokens - layout.decode_rows, len(cuts) // 2, numbers[:len(cuts)], numbers[len(cuts):],
                contexts(batch))


def _singles(batch: Batch) -> Batch:
    """The rows of one token, which come first, with the shape of a bucket."""
    count, layout, done = batch.layout.decode_rows, batch.layout, batch.done[:batch.layout.decode_rows]
    return replace(
        batch, layout=Layout((1,) * count, layout.contexts[:count], count, count), ids=batch.ids[:count],
        positions=batch.positions[:, :count].contiguous(), starts=batch.starts[:count + 1], done=done,
        base=done if batch.base is batch.done else batch.base[:count], delta_log=batch.delta_log[:count],
        pages=batch.pages[:count], store=batch.store[:count], source=batch.source[:count],
        target=batch.target[:count], count=torch.full((1,), count, device=batch.done.device), memo={})


class PrefillStep:
    """A batch to its logits [L, V] and, if they are wanted, all hidden states [T, H] float32."""

    def __init__(self, step: DecodeStep, shapes: Shapes, device: torch.device) -> None:
        self._step, self._shapes, self._device = step, shapes, device
        self._module = _module(source(shapes), device)
        self._attend = Attend(shapes.attention, device) if shapes.attention else None

    def serves(self, batch: Batch) -> bool:
        layout = batch.layout
        return not layout.appends and not layout.replays and layout.tokens <= MOST_TOKENS

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        step, decoder, plan = self._step, self._step._decoder, plan_of(batch)
        tokens, rotary = batch.layout.tokens, decoder.rope.rotary_dim
        residual = torch.empty(tokens, step._hidden, device=self._device)
        turns = torch.empty(tokens, rotary, device=self._device)
        step.enter(batch, residual, turns, 4 * step._blocks)
        if batch.input_embeds is not None:
            residual.index_copy_(0, batch.input_embeds.tokens, batch.input_embeds.rows)
        work = self._work(batch, plan, turns)
        delta: Tensor | None = None
        for layer in decoder.layers:
            delta = self._layer(layer, residual, delta, work)
        if batch.layout.hidden:
            hidden = self._norm(residual, delta, decoder.norm)
            return step.head(hidden[batch.logit_tokens]), hidden.float()
        wanted = batch.logit_tokens
        last = None if delta is None else delta[wanted]
        return step.head(self._norm(residual[wanted], last, decoder.norm)), None

    def _work(self, batch: Batch, plan: PrefillPlan, turns: Tensor) -> _PrefillBuffers:
        spec, attention, device = self._shapes.gdn, self._shapes.attention, self._device

        def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        y = empty(batch.layout.tokens * max(spec.values if spec else 1, attention.queries if attention else 1))
        chunks = None
        if spec and plan.rows:
            count, heads = plan.count, plan.count * spec.value_heads
            chunks = _Chunks(empty(count, spec.channels, CHUNK),
                             empty(count, 2 * spec.key_heads, CHUNK, dtype=torch.float32),
                             empty(heads, terms_bytes(spec.key_dim) // 2), empty(heads, 4, CHUNK, dtype=torch.float32))
        singles = replace(self._step._begin(plan.decode_rows, "many"), y=y) if plan.decode_rows else None
        return _PrefillBuffers(batch, plan, turns, y, torch.empty_like(y) if chunks else y[:0], chunks, singles)

    def _layer(
        self, layer: DecoderLayer, residual: Tensor, delta: Tensor | None, work: _PrefillBuffers
    ) -> Tensor | None:
        x = self._norm(residual, delta, layer.input_norm)
        if isinstance(layer.mixer, GdnWeights):
            delta = self._step.linear(self._gdn(layer, layer.mixer, self._step.linear(x, layer.mixer.in_proj), work),
                             layer.mixer.out_proj)
        else:
            delta = self._step.linear(self._attention(layer, layer.mixer, self._step.linear(x, layer.mixer.qkv), work),
                             layer.mixer.o_proj)
        return self._step.feed_forward(layer, residual, delta)

    def _norm(self, residual: Tensor, delta: Tensor | None, scale: Tensor) -> Tensor:
        """Adds delta to the residual; its norm [T, H] bf16."""
        return self._step.normed(residual, delta, scale) if residual.shape[0] else residual.bfloat16()

    def _gdn(self, layer: DecoderLayer, mixer: GdnWeights, proj: Tensor, work: _PrefillBuffers) -> Tensor:
        """proj [T, C + values + 2 Hv] -> [T, values]: what lies between the projections."""
        batch, plan = work.batch, work.plan
        spec, state, launch = mixer.spec, self._step._views.states[layer.store], self._module.launch
        size, stride, singles = spec.key_dim, proj.shape[1], batch.layout.decode_rows
        y = work.y[:proj.shape[0] * spec.values].view(-1, spec.values)
        if work.decode_rows:
            self._step._mix(layer, work.decode_rows, proj, stride)
        emits = {"emit_row": batch.emit_row, "emit_length": batch.emit_length, "emit_slot": batch.emit_slot}
        if work.chunks:
            core, tiles, units = work.core, work.chunks.tiles, work.chunks.units
            terms, gates = work.chunks.terms, work.chunks.gates
            places = {"starts": batch.starts, "done": batch.done, "source": batch.source}
            heads = {"key_heads": spec.key_heads, "value_heads": spec.value_heads, "tiled": int(spec.tiled)}
            launch("k_prompt_conv", (spec.channels // 128, plan.count), 128, args.PromptConvArgs(
                proj=proj, conv=mixer.conv, ring=state.conv, tiles=tiles, units=units, chunks=plan.chunks,
                stride=stride, channels=spec.channels, key_heads=spec.key_heads, **places))
            launch("k_delta_terms", (spec.value_heads, plan.count), 128, args.DeltaTermsArgs(
                proj=proj, tiles=tiles, units=units, decay=mixer.decay, dt_bias=mixer.dt_bias, terms=terms,
                gates=gates, starts=batch.starts, chunks=plan.chunks, stride=stride,
                gate_column=spec.channels + spec.values, **heads), terms_shared(size))
            launch("k_delta_scan", (size // columns(size), spec.value_heads, plan.rows), 256, args.DeltaScanArgs(
                tiles=tiles, terms=terms, gates=gates, state=state.recurrent, core=core, target=batch.target,
                firsts=plan.firsts, row=singles, emits=batch.layout.checkpoints, **heads, **places, **emits),
                scan_shared(size))
            launch("k_prompt_ring", (-(-spec.channels // 1024), plan.rows), 128, args.PromptRingArgs(
                proj=proj, ring=state.conv, target=batch.target, stride=stride, channels=spec.channels, row=singles,
                emits=batch.layout.checkpoints, **places, **emits))
            launch("k_gated_norm", (plan.tokens, -(-spec.values // 2048)), 256, args.GatedNormArgs(
                proj=proj, core=core, norm=mixer.norm, y=y, eps=spec.eps, stride=stride, channels=spec.channels,
                values=spec.values, token=singles))
        if singles and batch.layout.checkpoints:
            launch("k_copy_slot", (16, batch.layout.checkpoints), 256, args.CopySlotArgs(
                state=state.recurrent, ring=state.conv, target=batch.target, emit_row=batch.emit_row,
                emit_slot=batch.emit_slot, state_size=state.recurrent[0].nbytes // 4, ring_size=state.conv[0].numel(),
                rows=singles))
        return y

    def _attention(self, layer: DecoderLayer, mixer: AttentionWeights, proj: Tensor, work: _PrefillBuffers) -> Tensor:
        """proj [T, (2 heads + 2 kv_heads) D] -> [T, heads * D]: what lies between the projections."""
        batch, plan = work.batch, work.plan
        spec, kv, singles = mixer.spec, self._step._views.kv[layer.store], batch.layout.decode_rows
        kv.wait()
        y = work.y[:proj.shape[0] * spec.queries].view(-1, spec.queries)
        if work.decode_rows:
            self._step._mix(layer, work.decode_rows, proj, proj.shape[1])
        if not plan.rows:
            return y
        spare = max((context.square.side for context in plan.contexts if context.square), default=0)
        query = proj.new_empty(GRAIN + proj.shape[0] + spare, spec.heads, spec.head_dim)
        self._module.launch("k_prompt_heads", (plan.tokens,), 256, args.PromptHeadsArgs(
            proj=proj, query_norm=mixer.q_norm, key_norm=mixer.k_norm, turns=work.turns, query=query[GRAIN:],
            keys=kv.keys, values=kv.values, store=batch.store, eps=spec.eps, heads=spec.heads, kv_heads=spec.kv_heads,
            stride=proj.shape[1], rotary=spec.rotary_dim, token=singles))
        assert self._attend
        for context in plan.contexts:
            found = self._attend(query, kv, context)
            self._module.launch("k_prompt_gate", (len(found.own), -(-spec.queries // 2048)), 256, args.PromptGateArgs(
                proj=proj, own=found.own, prefix=found.prefix, own_mass=found.own_mass,
                prefix_mass=found.prefix_mass, y=y, heads=spec.heads, size=spec.head_dim, stride=proj.shape[1],
                token=context.first))
        return y


@cache
def _module(text: str, device: torch.device) -> Module:
    """Loaded once, however many copies of a model are made."""
    return Module(text, device)
