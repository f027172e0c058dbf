"""Prefill steps on a GPU: cuBLAS for linear layers, torch's flash kernels or cuDNN for attention, else own kernels.

cuDNN's attention is twice as fast in long contexts. But it builds a kernel per pair of lengths (37 ms each), and does
not support a cached prefix. Therefore the attention of a large row is computed in parts: to its own tokens, and to the
preceding ones in pieces of a few fixed lengths. The parts are then joined.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deltic.ops.cuda import arguments as args
from deltic.ops.cuda.card import Card, card_of
from deltic.ops.cuda.cublas_rows import PRODUCT_ROWS, padded_rows
from deltic.ops.cuda.driver import Module, entry, headers, load_module
from deltic.ops.cuda.kernel_config import Shapes, state_header
from deltic.ops.cuda.staging import on_device
from deltic.ops.cuda.tensor_parallel import Shared
from deltic.ops.kv import INT4, KEY_BITS, VALUE_BITS, take
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
    MlpWeights,
    Weight,
)

if TYPE_CHECKING:
    from deltic.ops.cuda.decode import DecodeStep, _DecodeBuffers
    from deltic.ops.cuda.layer_offload import LayerStream

log = logging.getLogger("deltic")
_LARGE = 1 << 22
"""Least product of tokens and context for which cuDNN serves a row alone."""
_LONG = 1024
"""Least number of tokens of such a row."""
PREFIX_GRAIN = 1024
"""The prefix of such a row is cut into pieces of this length times a power of two, because cuDNN builds a kernel for
each length."""
_PREPARED = 4
"""Largest prefix pieces, in grains, and largest squares behind them for which kernels are built at startup."""
MOST_TOKENS = 65535
"""Largest number of tokens of a step: CUDA's limit for a grid's second axis."""
_LINE, _STAGES = 72, 3
"""Floats per line of a matrix, and stages of the scan's ring, as in kernels/delta.cuh."""


# Attention


@dataclass(frozen=True, slots=True)
class CausalSquare:
    """Split of a large row's attention for cuDNN.

    prefix: number of leading cached tokens that all queries read, a multiple of PREFIX_GRAIN.
    before: number of the other cached tokens, which precede the row's own tokens in a causal square.
    side: side of that square in tokens, rounded up.
    """

    prefix: int
    before: int
    side: int


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Neighbouring rows that share one call of attention.

    first: index of their first token. tokens: their number of tokens. longest, context: a row's largest chunk, context.
    places [sum of contexts] int64: flat K/V indices. queries, keys [rows + 1] int32: starts of the rows among them.
    square: split of the only row, if it is large; places then covers prefix and square, and repeats its last entry.
    """

    first: int
    tokens: int
    longest: int
    context: int
    places: Tensor
    queries: Tensor
    keys: Tensor
    square: CausalSquare | None


@dataclass(frozen=True, slots=True)
class AttentionParts:
    """Outputs of attention to a row's square and to its prefix: own, prefix [n, heads, D] bfloat16. own_mass,
    prefix_mass [n, heads] float32: their log-sum-exps, used to join them. Without a prefix, own is the result."""

    own: Tensor
    prefix: Tensor | None = None
    own_mass: Tensor | None = None
    prefix_mass: Tensor | None = None


def attention_groups(batch: Batch) -> tuple[AttentionGroup, ...]:
    return tuple(_group(batch, first, end) for first, end in _runs(batch))


def _large(batch: Batch, row: int) -> bool:
    tokens, context = batch.layout.chunks[row], batch.layout.contexts[row]
    return tokens >= _LONG and tokens * context >= _LARGE


def _runs(batch: Batch) -> Iterator[tuple[int, int]]:
    """Yields first and end of each run of rows with several tokens. A large row is a run of its own."""
    first = batch.layout.decode_rows
    for row in range(first, batch.layout.rows):
        if _large(batch, row):
            if first < row:
                yield first, row
            yield row, row + 1
            first = row + 1
    if first < batch.layout.rows:
        yield first, batch.layout.rows


def _group(batch: Batch, first: int, end: int) -> AttentionGroup:
    layout, device = batch.layout, batch.done.device
    chunks, lengths = layout.chunks[first:end], layout.contexts[first:end]
    square = _square(chunks[0], lengths[0]) if end == first + 1 and _large(batch, first) else None
    # computed on the device, without a copy and without waiting
    starts = batch.starts[first:end + 1]
    ends = (batch.done[first:end] + starts[1:] - starts[:-1]).cumsum(0)
    keys = torch.cat((torch.zeros_like(ends[:1]), ends))
    place = torch.arange(square.prefix + square.side if square else sum(lengths), device=device)
    place.clamp_(max=sum(lengths) - 1)
    row = torch.bucketize(place, ends, right=True)
    position = place - keys[row]
    places = batch.pages[first + row, position // PAGE] * PAGE + position % PAGE
    return AttentionGroup(sum(layout.chunks[:first]), sum(chunks), max(chunks), max(lengths), places,
                          (starts - starts[0]).int(), keys.int(), square)


def _square(tokens: int, context: int) -> CausalSquare:
    before = (context - tokens) % PREFIX_GRAIN
    prefix, side = context - tokens - before, before + tokens
    # adds at most an eighth, with eight kernels per doubling; a row with a prefix gets fewer sides, as pieces vary, too
    grain = max(64, 1 << side.bit_length() - (3 if prefix else 4))
    return CausalSquare(prefix, before, -(-side // grain) * grain)


def _pieces(prefix: int) -> list[int]:
    """Returns the lengths of a prefix's pieces, longest first."""
    grains = prefix // PREFIX_GRAIN
    return [PREFIX_GRAIN << bit for bit in reversed(range(grains.bit_length())) if grains >> bit & 1]


class Attend:
    """Computes attention of a group's tokens to stored K/V. With int4 K/V, queries and K/V are rotated."""

    def __init__(self, spec: AttentionSpec, device: torch.device, module: Module) -> None:
        self._spec, self._module = spec, module
        # on older cards cuDNN does not support large heads, and torch's flash kernels are as fast
        self._cudnn = torch.backends.cudnn.is_available() and card_of(device).capability >= (9, 0)
        if self._cudnn:  # its first call takes a second
            query, keys = (torch.zeros(64, heads, spec.head_dim, dtype=torch.bfloat16, device=device)
                           for heads in (spec.heads, spec.kv_heads))
            try:
                _cudnn_attention(query, keys, keys, True)
            except RuntimeError as error:
                log.warning("cuDNN does not serve attention on this GPU, torch's flash kernels do: %s", error)
                self._cudnn = False

    def prepare(self, spec: AttentionSpec, device: torch.device, most: int) -> None:
        """Builds cuDNN's kernels for prompts of up to `most` tokens without cached tokens, and for their steps if they
        are prefilled in several. The kernels belong to the calling thread."""
        if not self._cudnn:
            return
        large = max(_LONG, math.isqrt(_LARGE))
        lengths = [*range(large, most, 64), most] if most >= large else []
        behind = min(most, _PREPARED * PREFIX_GRAIN)
        parts = {_square(tokens, PREFIX_GRAIN + tokens).side for tokens in range(_LONG, behind + 1, 64)}
        for side in sorted(parts.union(_square(tokens, tokens).side for tokens in lengths)):
            query = torch.zeros(side, spec.heads, spec.head_dim, dtype=torch.bfloat16, device=device)
            pieces = [PREFIX_GRAIN << bit for bit in range(_PREPARED.bit_length())] if side in parts else []
            for length in (side, *pieces):
                keys = torch.zeros(length, spec.kv_heads, spec.head_dim, dtype=torch.bfloat16, device=device)
                _cudnn_attention(query, keys, keys, length == side)

    def __call__(self, query: Tensor, kv: KvView, group: AttentionGroup) -> AttentionParts:
        """Computes a group's attention. query [PREFIX_GRAIN + T + side of the largest square, heads, D] bfloat16: the
        tokens' queries begin at PREFIX_GRAIN."""
        begin = PREFIX_GRAIN + group.first
        own_query = query[begin:begin + group.tokens]
        keys, values = (self._gather(pool, name, group.places) for pool, name in (
            (kv.keys, "k_gather_keys"), (kv.values, "k_gather_values")))
        square = group.square if self._cudnn else None
        if square is None and len(group.queries) == 2:
            # for a single row, torch splits the context among the multiprocessors
            rows = (own_query[None], keys[None, :group.context], values[None, :group.context])
            return AttentionParts(torch.ops.aten._flash_attention_forward(
                *rows, None, None, group.tokens, group.context, 0.0, True, False)[0][0])
        if square is None:
            return AttentionParts(torch.ops.aten._flash_attention_forward(
                own_query, keys, values, group.queries, group.keys, group.longest, group.context, 0.0, True, False)[0])
        # the outputs of queries before and after the row's own are dropped
        wide, own = query[begin - square.before:][:square.side], slice(square.before, square.before + group.tokens)
        near, near_mass = _cudnn_attention(wide, keys[square.prefix:], values[square.prefix:], True)
        if not square.prefix:
            return AttentionParts(near[own])
        pieces = _pieces(square.prefix)
        far, far_mass = _joined([_cudnn_attention(wide, k, v, False) for k, v in zip(
            keys[:square.prefix].split(pieces), values[:square.prefix].split(pieces), strict=True)], own)
        return AttentionParts(near[own], far, near_mass[own], far_mass)

    def _gather(self, pool: Tensor, kernel: str, places: Tensor) -> Tensor:
        """Returns K or V at these places as [n, kv_heads, D] bfloat16, the only format that torch's flash kernels read.
        Widening float8 to bfloat16 is exact."""
        if pool.dtype != INT4:
            return take(pool.flatten(0, 1), 0, places).bfloat16()
        count, heads = len(places), self._spec.kv_heads
        gathered = torch.empty(count, heads, self._spec.head_dim, dtype=torch.bfloat16, device=pool.device)
        self._module.launch(kernel, (-(-count * heads // 8),), 256, args.GatherInt4Args(
            pool=pool, y=gathered, places=places, count=count, heads=heads))
        return gathered


def _cudnn_attention(query: Tensor, keys: Tensor, values: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Returns outputs [n, heads, D] and log-sum-exps [n, heads] float32 of query [n, heads, D]. causal: query i reads
    keys 0 .. i; otherwise every query reads all keys."""
    q, k, v = (x.transpose(0, 1)[None] for x in (query, keys, values))
    out, mass, *_ = torch.ops.aten._cudnn_attention_forward(q, k, v, None, None, None, q.shape[2], k.shape[2], True,
                                                            0.0, causal, False)
    return out[0].transpose(0, 1).contiguous(), mass.view(query.shape[1], -1).t().contiguous()


def _joined(parts: list[tuple[Tensor, Tensor]], own: slice) -> tuple[Tensor, Tensor]:
    """Joins attention to several pieces for the queries `own`. parts, result: as `_cudnn_attention` returns them."""
    if len(parts) == 1:
        return parts[0][0][own], parts[0][1][own]
    mass = torch.stack([part[own] for _, part in parts]).logsumexp(0)
    total = torch.zeros(*mass.shape, parts[0][0].shape[-1], device=mass.device)
    for out, part in parts:
        total += out[own] * (part[own] - mass).exp()[..., None]
    return total.bfloat16(), mass


# Kernels


def terms_bytes(size: int) -> int:
    """Returns the bytes of a chunk's terms for the scan, per head: two [CHUNK, size] and one [CHUNK, CHUNK], bf16."""
    return 2 * CHUNK * size * 2 + CHUNK * CHUNK * 2


def terms_shared(size: int) -> int:
    """Returns the bytes of shared memory of a block of `delta_terms`."""
    return 2 * CHUNK * _LINE * 4 + CHUNK * size * 2 + 6 * CHUNK * 4


def scan_shared(size: int, card: Card) -> int:
    """Returns the bytes of shared memory of a `delta_scan` block: several chunks, or one chunk with its gates twice."""
    tile, part, gates = CHUNK * size * 2, CHUNK * columns(size) * 2, 4 * CHUNK * 4
    stage = 3 * tile + CHUNK * CHUNK * 2 + part + gates
    return (_STAGES * stage if card.wgmma else stage + gates) + (size // 16 + 4) * 2048 + 64 + 1024


def columns(size: int) -> int:
    """Returns the columns of the state in a block of `delta_scan`."""
    return min(size, 64)


def source(shapes: Shapes) -> str:
    """Returns the CUDA source for a model's prefill steps."""
    text = [state_header(shapes.state), headers("kv", "attention", "prompt", "delta", "scan"),
            entry("copy_slot", "CopySlot", "256", "copy_slot")]
    if shapes.gdn:
        text += [entry(name, type, bounds, f"{name}<{shapes.gdn.key_dim}>") for name, type, bounds in (
            ("prompt_conv", "PromptConv", "128, 5"), ("prompt_ring", "PromptRing", "128"),
            ("gated_norm", "GatedNorm", "256"), ("delta_terms", "DeltaTerms", "128, 4"),
            ("delta_scan", "DeltaScan", "256, 1"))]
    if shapes.attention:
        spec, int4 = shapes.attention, shapes.kv == "Int4"
        heads, rotated = spec.heads + 2 * spec.kv_heads, spec.head_dim if int4 else 0
        text += [entry("prompt_heads", "PromptHeads", "256",
                       f"prompt_heads<{spec.head_dim}, {heads}, {shapes.kv}, {shapes.form}>"),
                 entry("prompt_gate", "PromptGate", "256", f"prompt_gate<{shapes.form}, {rotated}>")]
        if int4:
            text += [entry(name, "GatherInt4", "256", f"gather_int4<{spec.head_dim}, {bits}>")
                     for name, bits in (("gather_keys", KEY_BITS), ("gather_values", VALUE_BITS))]
    return "".join(text)


# Steps


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The geometry of a step, the same in every layer.

    decode_rows: the leading rows of one token, as a batch of their own.
    rows, tokens: number of the rows of several tokens, which follow, and number of their tokens.
    count: number of chunks. chunks [count, 2]: row, and first token in the row. firsts [R]: each row's first chunk.
    groups: groups of rows that share a call of attention.
    """

    decode_rows: Batch | None
    rows: int
    tokens: int
    count: int
    chunks: Tensor
    firsts: Tensor
    groups: tuple[AttentionGroup, ...]


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Intermediate results of a Gated DeltaNet layer: tiles [chunks, C, CHUNK], terms bf16, units, gates float32."""

    tiles: Tensor
    units: Tensor
    terms: Tensor
    gates: Tensor


@dataclass(frozen=True, slots=True)
class _PrefillBuffers:
    """The tensors of one step, used by all layers.

    turns [T, rotary] float32: rotary angles.
    y, core [T * (values or queries)] bf16: outputs of mixers, and of the delta rule before its norm.
    decode_rows: tensors of a decode step for the leading rows of one token, with the same y.
    stream: copies of feed-forwards from host memory; None if there are none.
    """

    batch: Batch
    plan: PrefillPlan
    turns: Tensor
    y: Tensor
    core: Tensor
    chunks: _Chunks | None
    decode_rows: _DecodeBuffers | None
    stream: LayerStream | None


def plan_of(batch: Batch) -> PrefillPlan:
    layout, device = batch.layout, batch.done.device
    counts = [0 if row < layout.decode_rows else -(-chunk // CHUNK) for row, chunk in enumerate(layout.chunks)]
    cuts = [number for row, count in enumerate(counts) for j in range(count) for number in (row, j * CHUNK)]
    firsts = [0, *accumulate(counts)][:-1]
    numbers = on_device(torch.tensor(cuts + firsts, dtype=torch.int64), device)
    return PrefillPlan(
        decode_rows=_decode_rows(batch) if layout.decode_rows else None,
        rows=layout.rows - layout.decode_rows,
        tokens=layout.tokens - layout.decode_rows,
        count=len(cuts) // 2,
        chunks=numbers[:len(cuts)],
        firsts=numbers[len(cuts):],
        groups=attention_groups(batch),
    )


def _decode_rows(batch: Batch) -> Batch:
    """Returns the leading rows of one token as a batch like that of a decode bucket."""
    layout, count = batch.layout, batch.layout.decode_rows
    done = batch.done[:count]
    return replace(
        batch,
        layout=Layout((1,) * count, layout.contexts[:count], count, count),
        ids=batch.ids[:count],
        positions=batch.positions[:, :count].contiguous(),
        starts=batch.starts[:count + 1],
        done=done,
        base=done if batch.base is batch.done else batch.base[:count],
        delta_log=batch.delta_log[:count],
        pages=batch.pages[:count],
        store=batch.store[:count],
        source=batch.source[:count],
        target=batch.target[:count],
        count=torch.full((1,), count, device=batch.done.device),
        memo={},
    )


class PrefillStep:
    """Computes the logits [L, V] of a batch and, if the batch requests them, all hidden states [T, H] float32."""

    def __init__(self, step: DecodeStep, shapes: Shapes, device: torch.device) -> None:
        self._step, self._shapes, self._device = step, shapes, device
        self._module = load_module(source(shapes), device)
        self._attend = Attend(shapes.attention, device, self._module) if shapes.attention else None

    def prepare_prompts(self, most: int) -> None:
        """Implements `PreparesPrompts`."""
        if self._attend and self._shapes.attention:
            self._attend.prepare(self._shapes.attention, self._device, most)
        rows = padded_rows(most)
        for weight in self._products():
            blocks = weight if isinstance(weight, tuple) else (weight,)
            x = torch.zeros(rows, blocks[0].shape[1], dtype=torch.bfloat16, device=self._device)
            for count in range(PRODUCT_ROWS, rows + 1, PRODUCT_ROWS):
                self._step.linear(x[:count], weight)

    def _products(self) -> Iterator[Weight]:
        """Yields the weights of cuBLAS products in one layer of each kind."""
        of_kind = {(type(layer.mixer), type(layer.mlp)): layer for layer in self._step.decoder.layers}
        for layer in of_kind.values():
            mixer, mlp = layer.mixer, layer.mlp
            yield from (mixer.in_proj, mixer.out_proj) if isinstance(mixer, GdnWeights) else (mixer.qkv, mixer.o_proj)
            if isinstance(mlp, MlpWeights):
                yield from (mlp.gate_up, mlp.down)
            elif mlp.shards > 1 and mlp.shared:
                yield from (mlp.shared.gate_up, mlp.shared.down)

    def serves(self, batch: Batch) -> bool:
        layout = batch.layout
        return not layout.appends and not layout.replays and layout.tokens <= MOST_TOKENS

    def launches(self, batch: Batch) -> Shared[tuple[Tensor, Tensor | None]]:
        """Returns the launches of a step, as `DecodeStep.launches`."""
        step, decoder = self._step, self._step.decoder
        plan, tokens = plan_of(batch), batch.layout.tokens
        residual = torch.empty(tokens, step.hidden, device=self._device)
        turns = torch.empty(tokens, decoder.rope.rotary_dim, device=self._device)
        step.enter(batch, residual, turns, 4 * step.blocks)
        if batch.input_embeds is not None:
            residual.index_copy_(0, batch.input_embeds.tokens, batch.input_embeds.rows)
        buffers = self._buffers(batch, plan, turns)
        delta: Tensor | None = None
        for layer in decoder.layers:
            delta = yield from self._layer(layer, residual, delta, buffers)
        wanted = batch.logit_tokens
        if batch.layout.hidden:
            hidden = yield from step.add_normed(residual, delta, decoder.norm)
            return step.head(hidden[wanted]), hidden.float()
        last = None if delta is None else delta[wanted]
        x = yield from step.add_normed(residual[wanted], last, decoder.norm)
        return step.head(x), None

    def _buffers(self, batch: Batch, plan: PrefillPlan, turns: Tensor) -> _PrefillBuffers:
        spec, attention, device = self._shapes.gdn, self._shapes.attention, self._device

        def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        width = max(spec.values if spec else 1, attention.queries if attention else 1)
        y = empty(padded_rows(batch.layout.tokens) * width)
        chunks = None
        if spec and plan.rows:
            count, heads = plan.count, plan.count * spec.value_heads
            chunks = _Chunks(
                tiles=empty(count, spec.channels, CHUNK),
                units=empty(count, 2 * spec.key_heads, CHUNK, dtype=torch.float32),
                terms=empty(heads, terms_bytes(spec.key_dim) // 2),
                gates=empty(heads, 4, CHUNK, dtype=torch.float32),
            )
        decode_rows = replace(self._step.begin(plan.decode_rows, "many"), y=y) if plan.decode_rows else None
        return _PrefillBuffers(batch, plan, turns, y, torch.empty_like(y) if chunks else y[:0], chunks, decode_rows,
                               self._step.stream(few=False))

    def _layer(self, layer: DecoderLayer, residual: Tensor, delta: Tensor | None, buffers: _PrefillBuffers
               ) -> Shared[Tensor | None]:
        linear, step, mixer = self._step.linear, self._step, layer.mixer
        x = yield from step.add_normed(residual, delta, layer.input_norm)
        if isinstance(mixer, GdnWeights):
            delta = linear(self._gdn(layer, mixer, linear(x, mixer.in_proj), buffers), mixer.out_proj)
        else:
            delta = linear(self._attention(layer, mixer, linear(x, mixer.qkv), buffers), mixer.o_proj)
        return (yield from step.feed_forward(layer, residual, delta, buffers.stream))

    def _gdn(self, layer: DecoderLayer, mixer: GdnWeights, proj: Tensor, buffers: _PrefillBuffers) -> Tensor:
        """Computes a Gated DeltaNet layer between its projections: proj [T, C + values + 2 Hv] -> [T, values]."""
        batch, spec, state = buffers.batch, mixer.spec, self._step.views.states[layer.store]
        decode_rows, checkpoints = batch.layout.decode_rows, batch.layout.checkpoints
        y = buffers.y[:proj.shape[0] * spec.values].view(-1, spec.values)
        if buffers.decode_rows:
            self._step.mix(layer, buffers.decode_rows, proj, proj.shape[1])
        if buffers.chunks:
            self._chunked(layer, mixer, proj, y, buffers, buffers.chunks)
        if decode_rows and checkpoints:
            self._module.launch("k_copy_slot", (16, checkpoints), 256, args.CopySlotArgs(
                state=state.recurrent, ring=state.conv, target=batch.target, emit_row=batch.emit_row,
                emit_slot=batch.emit_slot, state_size=state.recurrent[0].nbytes // 4, ring_size=state.conv[0].numel(),
                rows=decode_rows))
        return y

    def _chunked(self, layer: DecoderLayer, mixer: GdnWeights, proj: Tensor, y: Tensor, buffers: _PrefillBuffers,
                 chunks: _Chunks) -> None:
        """Computes convolution, delta rule and gated norm for the rows of several tokens, in chunks."""
        batch, plan, spec, launch = buffers.batch, buffers.plan, mixer.spec, self._module.launch
        state, core = self._step.views.states[layer.store], buffers.core
        size, stride, decode_rows = spec.key_dim, proj.shape[1], batch.layout.decode_rows
        tiles, units, terms, gates = chunks.tiles, chunks.units, chunks.terms, chunks.gates
        places = {"starts": batch.starts, "done": batch.done, "source": batch.source}
        heads = {"key_heads": spec.key_heads, "value_heads": spec.value_heads, "tiled": int(spec.tiled)}
        emits = {"emit_row": batch.emit_row, "emit_length": batch.emit_length, "emit_slot": batch.emit_slot,
                 "emits": batch.layout.checkpoints}
        launch("k_prompt_conv", (spec.channels // 128, plan.count), 128, args.PromptConvArgs(
            proj=proj, conv=mixer.conv, ring=state.conv, tiles=tiles, units=units, chunks=plan.chunks,
            stride=stride, channels=spec.channels, key_heads=spec.key_heads, **places))
        launch("k_delta_terms", (spec.value_heads, plan.count), 128, args.DeltaTermsArgs(
            proj=proj, tiles=tiles, units=units, decay=mixer.decay, dt_bias=mixer.dt_bias, terms=terms, gates=gates,
            starts=batch.starts, chunks=plan.chunks, stride=stride, gate_column=spec.channels + spec.values, **heads),
            terms_shared(size))
        launch("k_delta_scan", (size // columns(size), spec.value_heads, plan.rows), 256, args.DeltaScanArgs(
            tiles=tiles, terms=terms, gates=gates, state=state.recurrent, core=core, target=batch.target,
            firsts=plan.firsts, row=decode_rows, **heads, **places, **emits),
            scan_shared(size, self._shapes.card))
        launch("k_prompt_ring", (-(-spec.channels // 1024), plan.rows), 128, args.PromptRingArgs(
            proj=proj, ring=state.conv, target=batch.target, stride=stride, channels=spec.channels, row=decode_rows,
            **places, **emits))
        launch("k_gated_norm", (plan.tokens, -(-spec.values // 2048)), 256, args.GatedNormArgs(
            proj=proj, core=core, norm=mixer.norm, y=y, eps=spec.eps, stride=stride, channels=spec.channels,
            values=spec.values, token=decode_rows))

    def _attention(self, layer: DecoderLayer, mixer: AttentionWeights, proj: Tensor, buffers: _PrefillBuffers
                   ) -> Tensor:
        """Computes an attention layer between its projections: proj [T, (2 heads + 2 kv_heads) D] -> [T, heads * D]."""
        batch, plan, spec, stride = buffers.batch, buffers.plan, mixer.spec, proj.shape[1]
        kv = self._step.views.kv[layer.store]
        kv.wait()
        y = buffers.y[:proj.shape[0] * spec.queries].view(-1, spec.queries)
        if buffers.decode_rows:
            self._step.mix(layer, buffers.decode_rows, proj, stride)
        if not plan.rows:
            return y
        assert self._attend
        side = max((group.square.side for group in plan.groups if group.square), default=0)
        query = proj.new_empty(PREFIX_GRAIN + proj.shape[0] + side, spec.heads, spec.head_dim)
        self._module.launch("k_prompt_heads", (plan.tokens,), 256, args.PromptHeadsArgs(
            proj=proj, query_norm=mixer.q_norm, key_norm=mixer.k_norm, bias=mixer.bias, turns=buffers.turns,
            query=query[PREFIX_GRAIN:], keys=kv.keys, values=kv.values, store=batch.store, eps=spec.eps,
            heads=spec.heads, kv_heads=spec.kv_heads, stride=stride, rotary=spec.rotary_dim,
            token=batch.layout.decode_rows))
        for group in plan.groups:
            parts = self._attend(query, kv, group)
            self._module.launch("k_prompt_gate", (len(parts.own), -(-spec.queries // 2048)), 256, args.PromptGateArgs(
                proj=proj, bias=mixer.bias, own=parts.own, prefix=parts.prefix, own_mass=parts.own_mass,
                prefix_mass=parts.prefix_mass, y=y, heads=spec.heads, size=spec.head_dim, stride=stride,
                token=group.first))
        return y
