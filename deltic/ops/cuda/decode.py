"""Decode steps with deltic's kernels. Products are own kernels (gemv rows, up to 16 tokens) or cuBLAS (gemm rows)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from deltic.ops import Ops
from deltic.ops.adapters import Adapter
from deltic.ops.cuda import arguments as args
from deltic.ops.cuda import prefill, quantized_product
from deltic.ops.cuda.adapters import HEAD, AdapterKernels, ProductTerms, StepAdapters, terms_of
from deltic.ops.cuda.adapters import source as adapters_source
from deltic.ops.cuda.allreduce import RowNorm
from deltic.ops.cuda.card import card_of
from deltic.ops.cuda.cublas_rows import empty_rows, padded
from deltic.ops.cuda.driver import load_module, why_not_compiled
from deltic.ops.cuda.gemv import GemvProducts, columns_of, compact, rows_of
from deltic.ops.cuda.kernel_config import (
    ADD,
    GATE,
    STORE,
    WHOLE_STATE_THREADS,
    Multiply,
    Shapes,
    attention_bytes,
    blocks_of,
    gdn_slice,
    heads_product,
    heads_stride,
    passes_whole,
    shapes_of,
    summed,
    unit_of,
)
from deltic.ops.cuda.layer_offload import LayerStore, LayerStream, used
from deltic.ops.cuda.layout import MAX_GEMV_TOKENS, MAX_SPLIT_HEAD_TOKENS, SPLIT_HEAD_SHARED_BYTES, WARPS
from deltic.ops.cuda.moe import ALL_REAL, RealTokens
from deltic.ops.cuda.quantized_moe import experts_of
from deltic.ops.cuda.quantized_product import PackedMultiply
from deltic.ops.cuda.sample import why_not as why_not_draw
from deltic.ops.cuda.sliced_product import split_of
from deltic.ops.cuda.state_delta_log import NewDeltas, StateDeltaLog, gdn_arguments
from deltic.ops.cuda.tensor_parallel import (
    MAX_SUMMED_ROWS,
    PartialSum,
    PeerExchange,
    ShardedStep,
    Shared,
    add_part,
    alone,
    part_of,
)
from deltic.ops.reference import frequency_axis
from deltic.ops.torch import OPS as TORCH
from deltic.ops.torch.basic import frequencies
from deltic.ops.types import (
    AttentionWeights,
    Batch,
    CacheViews,
    DecoderLayer,
    DecoderWeights,
    GdnSpec,
    GdnWeights,
    MlpWeights,
    MoeWeights,
    RopeSpec,
)

log = logging.getLogger("deltic")
_CONTEXT_PARTS = 32
"""Parts into which attention splits a context: a power of two, at most 64; fewer if many rows fill the card."""
_MAX_ROWS = 1024


def step(ops: Ops, decoder: DecoderWeights, views: CacheViews
         ) -> Callable[[Batch], tuple[Tensor, Tensor | None] | None] | None:
    why, shapes = why_not(ops, decoder, views), shapes_of(decoder, views)
    if why or shapes is None:
        log.warning("on the GPU torch serves every step: %s", why)
        return None
    log.info("on the GPU deltic's own kernels serve the steps")
    return DecodeStep(decoder, views, shapes)


def sharded_step(ops: Ops, shards: Sequence[DecoderWeights], views: Sequence[CacheViews]) -> ShardedStep | None:
    """Returns the step of a model that is split over several GPUs; None if the kernels do not serve it."""
    steps = [step(ops, decoder, own) for decoder, own in zip(shards, views, strict=True)]
    own = [each for each in steps if isinstance(each, DecodeStep)]
    if len(own) < len(shards):
        return None
    return ShardedStep(own, PeerExchange([each.device for each in own], own[0].hidden))


def why_not(ops: Ops, decoder: DecoderWeights, views: CacheViews) -> str | None:
    """Returns the reason why torch serves a model's steps; None if deltic's kernels serve them."""
    shapes = shapes_of(decoder, views)
    if not _all_ops_replaceable(ops):
        return "some of its operations are of another backend"
    if shapes is None:
        return "the kernels do not know its dtype, its sizes or its experts"
    device = decoder.norm.device
    if shapes.shared > card_of(device).shared_memory:
        return "the card has too little shared memory for the kernels"
    sources = shapes.source(), prefill.source(shapes)
    return next(filter(None, (why_not_compiled(source, device) for source in sources)), None)


def left_to_torch(ops: Ops, decoder: DecoderWeights, views: CacheViews) -> dict[str, str]:
    """Returns the ops of this backend that torch serves for a model on a GPU, each with the reason."""
    reasons = {"step": why_not(ops, decoder, views), "sample": why_not_draw(decoder.norm.device)}
    return {name: f"torch ({why})" for name, why in reasons.items() if why}


def serves_delta_logs(device: torch.device, dtype: str) -> bool:
    """True if the kernels can verify drafts and defer state writes for models of this dtype. Needs no loaded model."""
    return dtype == "bfloat16" and torch.cuda.get_device_capability(device) >= (8, 0)


def _all_ops_replaceable(ops: Ops) -> bool:
    """True if none of the ops that a step replaces belongs to another backend."""
    return all(getattr(ops, name) is getattr(TORCH, name) for name in (
        "embed", "rope", "add_norm", "gdn_mixer", "attention_mixer", "mlp", "moe", "head"))


@dataclass(frozen=True, slots=True)
class _DecodeBuffers:
    """The tensors of one step.

    kind: `few` (float32 projections) or `many` (bfloat16 projections), as in the kernels' names.
    parts: number of parts into which attention splits each context.
    residual [T, H] float32. turns [T, rotary] float32: rotary angles.
    y [T, values or queries] bf16: outputs of the mixers.
    core [T, ...] float32: outputs of split heads before their norm; each row ends with its slices' sums of squares.
    mixed, mass: outputs, highest scores and softmax denominators of attention's parts (kernels/attention.cuh).
    over_log: True if rows have tokens in their delta logs.
    new_deltas: the entries that `end` appends to the logs; None unless over_log, or if `mix_decode_rows` appends them.
    """

    batch: Batch
    kind: str
    parts: int
    residual: Tensor
    turns: Tensor
    y: Tensor
    core: Tensor
    mixed: Tensor
    mass: Tensor
    over_log: bool
    new_deltas: NewDeltas | None


class DecodeStep:
    """Computes the logits of a batch. Returns None if the batch is neither a bucket of decode rows nor a prefill."""

    def __init__(self, decoder: DecoderWeights, views: CacheViews, shapes: Shapes, reads: bool = True) -> None:
        """reads: also serve prefill steps."""
        self.decoder, self.views, self._shapes = decoder, views, shapes
        self._device, self.hidden = decoder.norm.device, decoder.embedding.shape[1]
        self._module = load_module(shapes.source(), self._device)
        self.blocks = blocks_of(self._device)
        heads = shapes.attention.kv_heads if shapes.attention else 1
        self._ended = torch.zeros(_MAX_ROWS * heads, dtype=torch.int32, device=self._device)
        self.frequencies, self.axes = _frequencies(decoder.rope, self._device)
        self.delta_log = None
        if shapes.gdn and shapes.delta_logs:
            self.delta_log = StateDeltaLog(self._module, views, shapes.gdn, _MAX_ROWS)
        mixtures = [layer.mlp for layer in decoder.layers if isinstance(layer.mlp, MoeWeights)]
        self._experts = experts_of(self._module, shapes.experts, mixtures, self.blocks) if shapes.experts else None
        self._offloaded = _offloaded_layers(decoder)
        self._adapters: AdapterKernels | None = None
        self._products = GemvProducts(self._module, shapes, self.blocks, decoder.eps)
        self.multiply = self._products.multiply
        self.prefill = prefill.PrefillStep(self, shapes, self._device) if reads else None

    @property
    def device(self) -> torch.device:
        return self._device

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor | None] | None:
        launches = self.launches(batch)
        return None if launches is None else alone(launches)

    def launches(self, batch: Batch) -> Shared[tuple[Tensor, Tensor | None]] | None:
        """Returns the launches of a step on this device; None if the kernels do not serve the batch."""
        if batch.adapter_entries is not None and (batch.count is None or self._adapters is None):
            return None
        if batch.count is None:
            return self.prefill.launches(batch) if self.prefill and self.prefill.serves(batch) else None
        tokens = batch.layout.tokens
        if tokens > _MAX_ROWS:
            return None
        return self._gemv_rows(batch) if tokens <= MAX_GEMV_TOKENS else self._gemm_rows(batch)

    def why_no_adapters(self) -> str | None:
        """Compiles the kernels for adapters. Returns the reason if this fails; None if it succeeds."""
        return why_not_compiled(adapters_source(self._shapes), self._device)

    def adapter_entries(self, adapters: Sequence[Adapter]) -> list[int | None]:
        """Returns `AdapterTable.entries_of`, or None for every adapter if the kernels are not used."""
        if self._adapters is None and self.why_no_adapters() is None:
            self._adapters = AdapterKernels(self._shapes, len(self.decoder.layers), self.blocks, self._device)
        return self._adapters.table.entries_of(adapters) if self._adapters else [None] * len(adapters)

    def prepare_prompts(self, most: int) -> None:
        """Implements `PreparesPrompts`."""
        if self.prefill:
            self.prefill.prepare_prompts(most)

    def buffers(self, batch: Batch, kind: str, residual: Tensor | None = None) -> _DecodeBuffers:
        """Allocates a step's tensors. residual [T, H] float32: the input of the first layer; None: a new tensor."""
        layout, attention, gdn = batch.layout, self._shapes.attention, self._shapes.gdn
        tokens = layout.tokens
        heads, size = (attention.heads, attention.head_dim) if attention else (1, 1)
        parts = _CONTEXT_PARTS
        if kind == "many":
            fill = 512 // (tokens * (attention.kv_heads if attention else 1))
            # a row's earlier tokens may lie in a page that belongs to another part
            several = layout.appends and tokens > layout.rows
            parts = max(1 + several, min(8, 1 << max(fill, 1).bit_length() - 1))
        over_log = self.delta_log is not None and batch.base is not batch.done
        whole = kind == "many" and tokens == layout.rows and gdn is not None and passes_whole(gdn)

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=self._device)

        return _DecodeBuffers(
            batch=batch,
            kind=kind,
            parts=parts,
            residual=empty(tokens, self.hidden) if residual is None else residual,
            turns=empty(tokens, self.decoder.rope.rotary_dim),
            y=empty(tokens, max(gdn.values if gdn else 1, heads * size), dtype=torch.bfloat16),
            core=empty(min(tokens, MAX_SPLIT_HEAD_TOKENS), heads_stride(gdn, self._shapes.shards) if gdn else 1),
            mixed=empty(tokens, heads, parts, size),
            mass=empty(tokens, heads, parts, 2),
            over_log=over_log,
            new_deltas=self.delta_log.begin(tokens) if over_log and self.delta_log and not whole else None,
        )

    def begin(self, batch: Batch, kind: str) -> _DecodeBuffers:
        """Allocates a step's tensors and launches the embedding."""
        buffers = self.buffers(batch, kind)
        self.enter(batch, buffers.residual, buffers.turns, self.blocks)
        return buffers

    def enter(self, batch: Batch, residual: Tensor, turns: Tensor, blocks: int) -> None:
        """Writes the tokens' embeddings and rotary angles."""
        embedding = self.decoder.embedding
        name, table = "k_enter", embedding
        if not isinstance(embedding, Tensor):
            name, table = f"k_enter_{embedding.type.lower()}", embedding.data
        self._module.launch(name, (blocks,), 256, args.EnterArgs(
            ids=batch.ids, positions=batch.positions, embedding=table, frequencies=self.frequencies, axes=self.axes,
            residual=residual, turns=turns, factor=self.decoder.rope.attention_factor, hidden=self.hidden,
            rotary=turns.shape[1], tokens=len(residual)), overlap=False)

    # Few tokens

    def _gemv_rows(self, batch: Batch) -> Shared[tuple[Tensor, Tensor | None]]:
        buffers = self.begin(batch, "few")
        logits = yield from self.layers(buffers)
        self.end(buffers)
        if not batch.layout.hidden:
            return logits, None
        hidden = torch.empty_like(buffers.residual)
        self.normed(buffers.residual, None, self.decoder.norm, hidden)
        return logits, hidden

    def layers(self, buffers: _DecodeBuffers) -> Shared[Tensor]:
        """Runs all layers on the residual of few tokens and returns the logits."""
        decoder, tokens, residual = self.decoder, buffers.batch.layout.tokens, buffers.residual
        stream, real = self.stream(few=True), _real(buffers.batch)
        logits = residual.new_empty(tokens, rows_of(decoder.head))
        width = max(max(rows_of(_in_proj(layer)), 1) for layer in decoder.layers)
        proj = residual.new_empty(tokens * width)
        inner = [columns_of(layer.mlp.down) for layer in decoder.layers if isinstance(layer.mlp, MlpWeights)]
        gated = buffers.y.new_empty(tokens, max(inner, default=1))
        adapters = self._step_adapters(buffers.batch)
        for index, layer in enumerate(decoder.layers):
            self._multiply_normed(_in_proj(layer), residual, layer.input_norm, proj, STORE, adapters, index, "mix_in")
            self.mix(layer, buffers, proj, rows_of(_in_proj(layer)))
            yield from self._project_out(layer, buffers, adapters, index)
            if isinstance(layer.mlp, MoeWeights):
                yield from self._add_experts(layer.mlp, layer.post_norm, residual, real)
            elif self._offloaded and layer.dense.pool and layer.dense.pool.layer in self._offloaded.hosted:
                self._add_host(self._offloaded, layer, residual, real)
            else:
                with used(stream, layer.dense):
                    self._multiply_normed(layer.dense.gate_up, residual, layer.post_norm, gated, GATE, adapters, index,
                                          "gate_up")
                    down = layer.dense.down
                    terms = terms_of(adapters, index, "down", gated, rows_of(down), columns_of(down))
                    yield from self._add(down, gated, residual, layer.dense.shards, terms=terms)
        self._multiply_normed(decoder.head, residual, decoder.norm, logits, STORE, adapters, 0, HEAD)
        return logits

    def _step_adapters(self, batch: Batch) -> StepAdapters | None:
        """Returns the adapters of a step of few tokens; None if the step has no adapters."""
        if batch.adapter_entries is None or self._adapters is None:
            return None
        return self._adapters.begin(batch.adapter_entries, self.decoder.eps)

    def _multiply_normed(self, weight: object, residual: Tensor, norm: Tensor, y: Tensor, out: int,
                         adapters: StepAdapters | None, layer: int, name: str) -> None:
        """Multiplies the normed residual of few tokens with a weight, and adds the terms of adapters to the product."""
        terms = terms_of(adapters, layer, name, residual, rows_of(weight), columns_of(weight), norm)
        self.multiply(weight, residual, norm, y, out, terms=terms)

    def stream(self, few: bool) -> LayerStream | None:
        """Starts a step's copies of feed-forwards from host memory. few: the host computes its layers itself."""
        return self._offloaded.stream(few) if self._offloaded else None

    def _add_host(self, store: LayerStore, layer: DecoderLayer, residual: Tensor, real: RealTokens) -> None:
        """Requests a feed-forward of few tokens from the host, and adds its result to the residual."""
        host, tokens, pool = store.host, len(residual), layer.dense.pool
        assert host and pool
        self._module.launch("k_ask_host", (tokens,), WARPS * 32 + 32, args.AskHostArgs(
            x=residual, scale=layer.post_norm, logits=None, weights=None, count=real.count, starts=real.starts,
            eps=self.decoder.eps, tokens=tokens, first=0, layer=store.hosted[pool.layer], **host.request))
        self._module.launch("k_add_host", (tokens,), 256, args.AddHostArgs(
            y=residual, hidden=self.hidden, **host.answer))

    def _add_experts(self, weights: MoeWeights, norm: Tensor, residual: Tensor, real: RealTokens) -> Shared[None]:
        """Adds the experts' output of few tokens to the residual. norm [H]: scale of the norm before the experts."""
        assert self._experts
        logits = residual.new_empty(len(residual), rows_of(weights.router))
        self.multiply(weights.router, residual, norm, logits, STORE)
        part = part_of(residual, weights.shards)
        self._experts.gemv_rows(weights, residual, norm, self.decoder.eps, logits, real, part)
        yield from add_part(part, residual)

    def end(self, buffers: _DecodeBuffers) -> None:
        if buffers.new_deltas and self.delta_log:
            self.delta_log.end(buffers.batch, buffers.new_deltas)

    def _project_out(self, layer: DecoderLayer, buffers: _DecodeBuffers, adapters: StepAdapters | None, index: int
                     ) -> Shared[None]:
        """Adds the output projection of the mixer to the residual. index: the layer's number."""
        mixer, weight, residual, shards = layer.mixer, _out_proj(layer), buffers.residual, layer.mixer.shards
        terms = terms_of(adapters, index, "mix_out", buffers.y, rows_of(weight), columns_of(weight))
        if not isinstance(mixer, GdnWeights):
            return (yield from self._add(weight, buffers.y, residual, shards, terms=terms))
        if not self.splits_heads(mixer.spec, buffers):
            return (yield from self._add(weight, buffers.y, residual, shards, mixer.spec, terms))
        spec, parts = mixer.spec, self._shapes.parts.get(id(weight))
        product: Multiply | PackedMultiply
        if parts:
            product = quantized_product.product_of(parts, False, summed(shards), self.blocks, spec.value_dim,
                                                   gdn_slice(spec, "few", shards), split_of(shards, spec))
        else:
            product = heads_product(spec, unit_of(rows_of(weight), ADD, self.blocks), self._shapes.card, shards)
        part = part_of(residual, shards)
        self._products.launch(product, weight, len(residual), self._module, x=buffers.core, scale=None, y=part,
                              eps=spec.eps)
        yield from add_part(part, residual)

    def _add(self, weight: object, x: Tensor, residual: Tensor, shards: int, spec: GdnSpec | None = None,
             terms: ProductTerms | None = None) -> Shared[None]:
        """Multiplies few tokens x [T, columns] with a weight and adds the product to the residual. The weight's columns
        are split over `shards` devices. spec: as in `split_of`."""
        part = part_of(residual, shards)
        self.multiply(weight, x, None, part, summed(shards), split_of(shards, spec), terms)
        yield from add_part(part, residual)

    # Mixers

    def mix(self, layer: DecoderLayer, buffers: _DecodeBuffers, proj: Tensor, stride: int) -> None:
        """Runs a layer's mixer on projections [T, stride]. Writes `buffers.y`, or `buffers.core` for split heads."""
        mixer, batch, log = layer.mixer, buffers.batch, self.delta_log
        if not isinstance(mixer, GdnWeights):
            self._attend(layer, mixer, buffers, proj, stride)
        elif buffers.new_deltas and log:
            log.mix(mixer, layer.store, batch, proj, stride, buffers.y, buffers.new_deltas)
        elif buffers.over_log and log:
            log.mix_decode_rows(mixer, layer.store, batch, proj, stride, buffers.y, self.blocks)
        else:
            self._gdn(layer, mixer, buffers, proj, stride)

    def _gdn(self, layer: DecoderLayer, mixer: GdnWeights, buffers: _DecodeBuffers, proj: Tensor, stride: int) -> None:
        batch, spec, state = buffers.batch, mixer.spec, self.views.states[layer.store]
        slices = spec.value_dim // gdn_slice(spec, buffers.kind, mixer.shards)
        heads, kind = spec.value_heads * batch.layout.rows, buffers.kind
        if splits := self.splits_heads(spec, buffers):
            # one block per multiprocessor leaves equal room on each for the next kernel; quantized products gain little
            each = 1 if slices * heads <= self.blocks or slices % 2 or self._shapes.parts else 2
            grid, block, kind = max(slices * heads // each, self.blocks), 128 * each, f"spread_{each}"
            alone = grid == self.blocks and not self._shapes.limits_registers and self._shapes.experts is None
            shared = SPLIT_HEAD_SHARED_BYTES * alone
        elif kind == "many" and passes_whole(spec):
            grid, block, shared = min(heads, self.blocks), WHOLE_STATE_THREADS, self._shapes.card.whole_state_bytes
        else:
            grid, block = min(heads, 8 // slices * self.blocks), slices * 128
            shared = spec.key_dim * spec.value_dim * state.recurrent.element_size()
        y = buffers.core if splits else buffers.y
        self._module.launch(f"k_gdn_{kind}", (grid,), block, args.GdnArgs(
            **gdn_arguments(mixer, state, batch, proj, stride, y), heads=heads), shared)

    def splits_heads(self, spec: GdnSpec, buffers: _DecodeBuffers) -> bool:
        """True if each slice of a head has its own block; the output projection then computes the heads' norm."""
        tokens = len(buffers.residual)
        if buffers.over_log or buffers.kind != "few" or tokens > MAX_SPLIT_HEAD_TOKENS:
            return False
        if buffers.batch.adapter_entries is not None:
            return False  # the kernels for adapters read whole heads
        slices = spec.values // gdn_slice(spec, "few", self._shapes.shards)
        return slices * tokens <= 2 * self.blocks

    def _attend(self, layer: DecoderLayer, mixer: AttentionWeights, buffers: _DecodeBuffers, proj: Tensor, stride: int
                ) -> None:
        spec, kv, batch = mixer.spec, self.views.kv[layer.store], buffers.batch
        blocks = max(buffers.parts * spec.kv_heads * batch.layout.tokens, self.blocks)
        self._module.launch(f"k_attention_{buffers.kind}", (blocks,), 256, args.AttentionArgs(
            proj=proj, query_norm=mixer.q_norm, key_norm=mixer.k_norm, bias=mixer.bias, turns=buffers.turns,
            keys=kv.keys, values=kv.values, mixed=buffers.mixed, mass=buffers.mass, y=buffers.y, ended=self._ended,
            count=batch.count, starts=batch.starts, done=batch.done, pages=batch.pages, eps=spec.eps, heads=spec.heads,
            kv_heads=spec.kv_heads, stride=stride, rotary=spec.rotary_dim, width=batch.pages.shape[1],
            parts=buffers.parts), attention_bytes(spec, self._shapes.card))

    # Many tokens

    def _gemm_rows(self, batch: Batch) -> Shared[tuple[Tensor, Tensor | None]]:
        decoder, buffers = self.decoder, self.begin(batch, "many")
        residual = buffers.residual
        delta: Tensor | None = None
        stream = self.stream(few=False)
        for layer in decoder.layers:
            x = yield from self.add_normed(residual, delta, layer.input_norm)
            proj = self.linear(x, _in_proj(layer))
            self.mix(layer, buffers, proj, proj.shape[1])
            weight = _out_proj(layer)
            delta = self.linear(compact(buffers.y, len(proj), columns_of(weight)), weight)
            delta = yield from self.feed_forward(layer, residual, delta, stream, _real(batch))
        self.end(buffers)
        hidden = torch.empty_like(residual) if batch.layout.hidden else None
        x = yield from self.add_normed(residual, delta, decoder.norm, hidden)
        return self.head(x), hidden

    def feed_forward(self, layer: DecoderLayer, residual: Tensor, delta: Tensor | None, stream: LayerStream | None,
                     real: RealTokens = ALL_REAL) -> Shared[Tensor | None]:
        """Adds delta to the residual [T, H] of many tokens and runs the feed-forward. delta: as in `add_normed`.
        stream: the step's copies. Returns the output, which is the next delta; None if the residual contains it."""
        x = yield from self.add_normed(residual, delta, layer.post_norm)
        if self._experts and isinstance(layer.mlp, MoeWeights):
            if len(x) <= self._experts.max_gemv_tokens:
                yield from self._add_experts(layer.mlp, layer.post_norm, residual, real)
                return None
            own = layer.mlp.shared if layer.mlp.shards > 1 else None
            shared = self.linear(self._gated(x, own), own.down) if own else None
            return self._experts.gemm_rows(layer.mlp, x, real, shared)
        with used(stream, layer.dense):
            return self.linear(self._gated(x, layer.dense), layer.dense.down)

    def _gated(self, x: Tensor, weights: MlpWeights) -> Tensor:
        """Returns the inner activations [T, columns] bf16 of a feed-forward of many tokens."""
        both = self.linear(x, weights.gate_up)
        tokens, width = both.shape[0], both.shape[1] // 2
        gated = empty_rows(tokens, width, both.device)
        self._module.launch("k_gate", (-(-width // 2048), tokens), 256, args.GateArgs(x=both, y=gated, width=width))
        return gated

    def linear(self, x: Tensor, weight: object, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Multiplies x [T, columns] bf16 with a weight by cuBLAS. Returns [T, rows] in `dtype`. A quantized weight is
        dequantized for the call, piece by piece."""
        parts, tokens = self._shapes.parts.get(id(weight)), len(x)
        x = padded(x)
        if not parts:
            assert isinstance(weight, Tensor)
            return (F.linear(x, weight) if dtype == x.dtype else torch.mm(x, weight.t(), out_dtype=dtype))[:tokens]
        first, total = 0, sum(part.rows for part in parts)
        found = x.new_empty(len(x), total, dtype=dtype)
        for rows, piece in quantized_product.pieces_of(parts):
            plain = quantized_product.unpack(self._module, piece, self._scratch)
            if dtype == x.dtype:
                torch.mm(x, plain.t(), out=found[:, first:first + rows])
            else:
                found[:, first:first + rows] = torch.mm(x, plain.t(), out_dtype=dtype)
            first += rows
        return found[:tokens]

    @cached_property
    def _scratch(self) -> Tensor | None:
        """Memory for a piece of a quantized weight in bfloat16. All steps share it, because a nearly full GPU may have
        no large piece of memory left for an allocation in each step."""
        return quantized_product.scratch_for(self._shapes.parts.values())

    def head(self, x: Tensor) -> Tensor:
        """Returns the logits [L, V] float32 of normed hidden states [L, H] bf16."""
        weight = self.decoder.head
        if isinstance(weight, Tensor) or len(x) > MAX_GEMV_TOKENS:
            return self.linear(x, weight, torch.float32)
        logits = torch.empty(len(x), rows_of(weight), device=self._device)
        if len(x):
            self.multiply(weight, x, None, logits, STORE)
        return logits

    def add_normed(self, residual: Tensor, delta: Tensor | None, scale: Tensor, wide: Tensor | None = None
                   ) -> Shared[Tensor]:
        """Sums delta over all devices, then works like `normed`. The residual may have no tokens."""
        if not len(residual):
            return empty_rows(0, self.hidden, self._device)
        if delta is not None and self._shapes.shards > 1:
            if len(delta) <= MAX_SUMMED_ROWS:
                norm = RowNorm(empty_rows(len(delta), self.hidden, self._device), scale, self.decoder.eps, wide)
                yield PartialSum(delta, residual, norm)
                return norm.y
            yield PartialSum(delta)
        return self.normed(residual, delta, scale, wide)

    def normed(self, residual: Tensor, delta: Tensor | None, scale: Tensor, wide: Tensor | None = None) -> Tensor:
        """Adds delta to the residual. Returns its norm [T, H] bf16. wide [T, H]: receives the norm in float32."""
        y = empty_rows(len(residual), self.hidden, self._device)
        self._module.launch("k_add_norm", (y.shape[0],), 256, args.AddNormArgs(
            residual=residual, delta=delta, scale=scale, y=y, wide=wide, eps=self.decoder.eps, hidden=self.hidden))
        return y


def _offloaded_layers(decoder: DecoderWeights) -> LayerStore | None:
    """Returns the store of the feed-forwards in host memory; None if there are none."""
    pools = (layer.mlp.pool for layer in decoder.layers if isinstance(layer.mlp, MlpWeights))
    store = next((pool.store for pool in pools if pool), None)
    assert isinstance(store, LayerStore | None)
    return store


def _real(batch: Batch) -> RealTokens:
    return RealTokens(batch.count, batch.starts) if batch.count is not None else ALL_REAL


def _in_proj(layer: DecoderLayer) -> object:
    return layer.mixer.in_proj if isinstance(layer.mixer, GdnWeights) else layer.mixer.qkv


def _out_proj(layer: DecoderLayer) -> object:
    return layer.mixer.out_proj if isinstance(layer.mixer, GdnWeights) else layer.mixer.o_proj


def _frequencies(rope: RopeSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the radians per position [rotary_dim / 2] float32, and each frequency's position axis, int64."""
    half = rope.rotary_dim // 2
    axes = torch.tensor([frequency_axis(index, rope.sections) for index in range(half)], device=device)
    return frequencies(rope, device), axes
