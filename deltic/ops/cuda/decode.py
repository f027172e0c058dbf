"""A whole decode step by our own kernels: few rows with products of our own, many with those of cuBLAS."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deltic.ops import Ops
from deltic.ops.cuda import arguments as args
from deltic.ops.cuda import prefill, quantized_gemm
from deltic.ops.cuda.driver import CompileError, Module, architecture, compile_source, shared_memory
from deltic.ops.cuda.kernel_config import (
    ADD,
    GATE,
    PASSING,
    PASSING_ROOM,
    STORE,
    Multiply,
    Shapes,
    blocks_of,
    gdn_slice,
    heads_product,
    heads_stride,
    passes_whole,
    shapes_of,
    unit_of,
)
from deltic.ops.cuda.layout import LONE, MOST, SPREAD, WARPS
from deltic.ops.cuda.moe import ALL, Real
from deltic.ops.cuda.quantized_moe import experts_of
from deltic.ops.cuda.sample import why_not as why_not_draw
from deltic.ops.cuda.state_delta_log import NewDeltas, StateDeltaLog
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
_PARTS = 32
"""Parts of a context: a power of two, at most 64; fewer where many rows fill the card."""
_MOST_ROWS = 1024


def step(ops: Ops, decoder: DecoderWeights, views: CacheViews
         ) -> Callable[[Batch], tuple[Tensor, Tensor | None] | None] | None:
    why, shapes = why_not(ops, decoder, views), shapes_of(decoder, views)
    if why or shapes is None:
        log.warning("on the GPU torch serves every step: %s", why)
        return None
    log.info("on the GPU deltic's own kernels serve the steps")
    return DecodeStep(decoder, views, shapes)


def why_not(ops: Ops, decoder: DecoderWeights, views: CacheViews) -> str | None:
    """Why torch serves the steps of a model; None: the kernels here do."""
    shapes = shapes_of(decoder, views)
    if not _own(ops):
        return "some of its operations are of another backend"
    if shapes is None:
        return "the kernels do not know its dtype, its sizes or its experts"
    device = decoder.norm.device
    if shapes.shared > shared_memory(device):
        return "the card has too little shared memory for the kernels"
    try:
        for source in (shapes.source(), *([prefill.source(shapes)] if _reads_prompts(device) else [])):
            compile_source(source, architecture(device))
    except CompileError as error:
        return f"the kernels cannot be compiled: {error}"
    return None


def left_to_torch(ops: Ops, decoder: DecoderWeights, views: CacheViews) -> dict[str, str]:
    """Of what this backend serves, what it leaves to torch for a model on a GPU, and why."""
    found = {"step": why_not(ops, decoder, views), "sample": why_not_draw(decoder.norm.device)}
    return {name: f"torch ({why})" for name, why in found.items() if why}


def serves_rings(device: torch.device, dtype: str) -> bool:
    """Whether steps over replay rings are served, with drafts and without, of models that the kernels know, as far as
    that can be said before one is loaded."""
    return dtype == "bfloat16" and torch.cuda.get_device_capability(device) >= (9, 0)


def _reads_prompts(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def _own(ops: Ops) -> bool:
    """Whether every op that a step stands for is served as this backend serves it."""
    return all(getattr(ops, name) is getattr(TORCH, name) for name in (
        "embed", "rope", "add_norm", "gdn_mixer", "attention_mixer", "mlp", "moe", "head"))


@dataclass(frozen=True, slots=True)
class _DecodeBuffers:
    """One step's memory. residual [T, H], turns [T, rotary] float32; y: what mixers give, [T, values or queries] bf16;
    core [T, ...] float32: what heads in slices give, not
    normed yet, and behind each row of them the squares of its slices. mixed, mass: parts of the attention.
    kind: of the projections: few (float32) or many (bf16). behind: rows have tokens in replay rings. fresh: then, what
    they append; None where they have one token each, and append it themselves."""

    batch: Batch
    kind: str
    parts: int
    residual: Tensor
    turns: Tensor
    y: Tensor
    core: Tensor
    mixed: Tensor
    mass: Tensor
    behind: bool
    fresh: NewDeltas | None


class DecodeStep:
    """A batch to its logits; None for batches that are not a bucket of rows that decode."""

    def __init__(self, decoder: DecoderWeights, views: CacheViews, shapes: Shapes, reads: bool = True) -> None:
        """reads: steps with prompts, too."""
        self._decoder, self._views, self._shapes = decoder, views, shapes
        self._device, self._hidden = decoder.norm.device, decoder.embedding.shape[1]
        self._module = _module(shapes.source(), self._device)
        self._blocks = blocks_of(self._device)
        heads = shapes.attention.kv_heads if shapes.attention else 1
        self._ended = torch.zeros(_MOST_ROWS * heads, dtype=torch.int32, device=self._device)
        self._frequencies, self._axes = _frequencies(decoder.rope, self._device)
        self._rings = (
            StateDeltaLog(self._module, views, shapes.gdn, _MOST_ROWS) if shapes.gdn and shapes.rings else None
        )
        mixtures = [layer.mlp for layer in decoder.layers if isinstance(layer.mlp, MoeWeights)]
        self._experts = experts_of(self._module, shapes.experts, mixtures, self._blocks) if shapes.experts else None
        reads = reads and _reads_prompts(self._device)
        self._prompts = prefill.PrefillStep(self, shapes, self._device) if reads else None

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor | None] | None:
        if batch.count is None:
            return self._prompts(batch) if self._prompts and self._prompts.serves(batch) else None
        if batch.layout.tokens > _MOST_ROWS:
            return None
        return (self._gemv_rows if batch.layout.tokens <= MOST else self._gemm_rows)(batch)

    def work(self, batch: Batch, kind: str, residual: Tensor | None = None) -> _DecodeBuffers:
        """A step's memory. residual [T, H] float32: what its layers begin with, if it is there."""
        tokens, attention, gdn = batch.layout.tokens, self._shapes.attention, self._shapes.gdn
        heads, size = (attention.heads, attention.head_dim) if attention else (1, 1)
        fill = 512 // (tokens * (attention.kv_heads if attention else 1))
        # of a row's tokens, those before them have a page in another part
        several = batch.layout.appends and tokens > batch.layout.rows
        parts = _PARTS if kind == "few" else max(1 + several, min(8, 1 << max(fill, 1).bit_length() - 1))
        behind = self._rings is not None and batch.base is not batch.done
        whole = kind == "many" and tokens == batch.layout.rows and gdn is not None and passes_whole(gdn)

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=self._device)

        rotary = self._decoder.rope.rotary_dim
        return _DecodeBuffers(batch, kind, parts, empty(tokens, self._hidden) if residual is None else residual,
                     empty(tokens, rotary),
                     empty(tokens, max(gdn.values if gdn else 1, heads * size), dtype=torch.bfloat16),
                     empty(min(tokens, SPREAD), heads_stride(gdn) if gdn else 1), empty(tokens, heads, parts, size),
                     empty(tokens, heads, parts, 2), behind,
                     self._rings.begin(tokens) if behind and self._rings and not whole else None)

    def _begin(self, batch: Batch, kind: str) -> _DecodeBuffers:
        work = self.work(batch, kind)
        self.enter(batch, work.residual, work.turns, self._blocks)
        return work

    def enter(self, batch: Batch, residual: Tensor, turns: Tensor, blocks: int) -> None:
        embedding = self._decoder.embedding
        name, table = (("k_enter", embedding) if isinstance(embedding, Tensor)
                       else (f"k_enter_{embedding.type.lower()}", embedding.data))
        self._module.launch(name, (blocks,), 256, args.EnterArgs(
            ids=batch.ids, positions=batch.positions, embedding=table, frequencies=self._frequencies, axes=self._axes,
            residual=residual, turns=turns, hidden=self._hidden, rotary=turns.shape[1], tokens=len(residual)),
            overlap=False)

    def _gemv_rows(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        work = self._begin(batch, "few")
        logits = self.layers(work)
        self._end(work)
        if not batch.layout.hidden:
            return logits, None
        hidden = torch.empty_like(work.residual)
        self.normed(work.residual, None, self._decoder.norm, hidden)
        return logits, hidden

    def layers(self, work: _DecodeBuffers) -> Tensor:
        """From the residual of few tokens to their logits."""
        decoder, tokens = self._decoder, work.batch.layout.tokens
        logits = work.residual.new_empty(tokens, _rows(decoder.head))
        width = max(max(_rows(_inner(layer)), 1) for layer in decoder.layers)
        proj = work.residual.new_empty(tokens * width)
        inner = [_columns(layer.mlp.down) for layer in decoder.layers if isinstance(layer.mlp, MlpWeights)]
        gated = work.y.new_empty(tokens, max(inner, default=1))
        for layer in decoder.layers:
            self._multiply(_inner(layer), work.residual, layer.input_norm, proj, STORE)
            self._mix(layer, work, proj, _rows(_inner(layer)))
            self._project(layer, work)
            self._add_feed_forward(layer, work, gated)
        self._multiply(decoder.head, work.residual, decoder.norm, logits, STORE)
        return logits

    def _add_feed_forward(self, layer: DecoderLayer, work: _DecodeBuffers, gated: Tensor) -> None:
        """Of few tokens. gated: room for what lies between a dense layer's products."""
        residual = work.residual
        if isinstance(layer.mlp, MoeWeights):
            self._add_experts(layer.mlp, layer.post_norm, residual, _real(work.batch))
        else:
            self._multiply(layer.dense.gate_up, residual, layer.post_norm, gated, GATE)
            self._multiply(layer.dense.down, gated, None, residual, ADD)

    def _add_experts(self, weights: MoeWeights, norm: Tensor, residual: Tensor, real: Real) -> None:
        """What the experts of few tokens give. norm [H]: before them."""
        assert self._experts
        logits = residual.new_empty(len(residual), _rows(weights.router))
        self._multiply(weights.router, residual, norm, logits, STORE)
        self._experts.gemv_rows(weights, residual, norm, self._decoder.eps, logits, real)

    def _end(self, work: _DecodeBuffers) -> None:
        if work.fresh and self._rings:
            self._rings.end(work.batch, work.fresh)

    def _project(self, layer: DecoderLayer, work: _DecodeBuffers) -> None:
        """From what the mixer gave to the residual."""
        mixer, weight = layer.mixer, _outer(layer)
        if not isinstance(mixer, GdnWeights) or not self._spreads(mixer.spec, work):
            return self._multiply(weight, work.y, None, work.residual, ADD)
        spec, blocks = mixer.spec, self._blocks
        parts = self._shapes.parts.get(id(weight))
        product = (quantized_gemm.product_of(parts, False, ADD, blocks, spec.value_dim, gdn_slice(spec, "few")) if parts
                   else heads_product(spec, unit_of(_rows(weight), ADD, blocks)))
        self._launch(product, weight, len(work.residual), x=work.core, scale=None, y=work.residual,
                     eps=spec.eps)

    def _multiply(self, weight: object, x: Tensor, scale: Tensor | None, y: Tensor, out: int) -> None:
        parts = self._shapes.parts.get(id(weight))
        product = (quantized_gemm.product_of(parts, scale is not None, out, self._blocks) if parts
                   else Multiply(_columns(weight), scale is not None, out, unit_of(_rows(weight), out, self._blocks)))
        if len(x) > product.most:  # their input would not fit
            half = len(x) // 2
            x = _compact(x, len(x), _columns(weight))
            y = _compact(y, len(x), _rows(weight) // (2 if out == GATE else 1))
            self._multiply(weight, x[:half], scale, y[:half], out)
            return self._multiply(weight, x[half:], scale, y[half:], out)
        self._launch(product, weight, len(x), x=x, scale=scale, y=y, eps=self._decoder.eps)

    def _launch(
        self, product: Multiply | quantized_gemm.PackedMultiply, weight: object, tokens: int, **values: Any
    ) -> None:
        if isinstance(product, quantized_gemm.PackedMultiply):
            part = self._shapes.parts[id(weight)]
            return quantized_gemm.launch(self._module, product, part, tokens, self._blocks, **values)
        rows, blocks = _rows(weight), self._blocks
        units = -(-rows // product.unit)
        mine = -(-units // blocks)
        group = product.group(tokens, mine)
        slots, shared = product.shared(tokens, group, mine)
        self._module.launch(product.name(tokens), (blocks,), WARPS * 32 + 32, args.ProductArgs(
            weight=weight, tokens=tokens, rows=rows, whole=units // blocks, rest=units % blocks, group=group,
            inverse=65536 // tokens + 1, slots=slots, **values), shared)

    def _mix(self, layer: DecoderLayer, work: _DecodeBuffers, proj: Tensor, stride: int) -> None:
        """From the projections to `work.y`, or `work.core`."""
        mixer, batch = layer.mixer, work.batch
        if isinstance(mixer, GdnWeights) and work.fresh and self._rings:
            self._rings.mix(mixer, layer.store, batch, proj, stride, work.y, work.fresh)
        elif isinstance(mixer, GdnWeights) and work.behind and self._rings:
            self._rings.mix_singles(mixer, layer.store, batch, proj, stride, work.y, self._blocks)
        elif isinstance(mixer, GdnWeights):
            spec, state = mixer.spec, self._views.states[layer.store]
            slices, heads = spec.value_dim // gdn_slice(spec, work.kind), spec.value_heads * batch.layout.rows
            spread, size = self._spreads(spec, work), spec.key_dim * spec.value_dim * state.recurrent.element_size()
            if spread:
                # kernels with a block for each multiprocessor leave the same room for the next one everywhere
                grid, block = max(slices * heads, self._blocks), 128
                size = LONE * (grid == self._blocks and not self._shapes.squeezed and self._shapes.experts is None)
            elif work.kind == "many" and passes_whole(spec):
                grid, block, size = min(heads, self._blocks), PASSING, PASSING_ROOM
            else:
                grid, block = min(heads, 8 // slices * self._blocks), slices * 128
            self._module.launch(f"k_gdn_{'spread' if spread else work.kind}", (grid,), block, args.GdnArgs(
                proj=proj, conv=mixer.conv, decay=mixer.decay, dt_bias=mixer.dt_bias, norm=mixer.norm,
                state=state.recurrent, ring=state.conv, y=work.core if spread else work.y, count=batch.count,
                starts=batch.starts, done=batch.done, source=batch.source, target=batch.target, eps=spec.eps,
                key_heads=spec.key_heads, value_heads=spec.value_heads, stride=stride, tiled=int(spec.tiled),
                heads=heads), size)
        else:
            self._attend(layer, mixer, work, proj, stride)

    def _spreads(self, spec: GdnSpec, work: _DecodeBuffers) -> bool:
        """Whether each slice of a head is a block of its own, and what they give is not normed yet."""
        if work.behind:
            return False
        slices = spec.value_heads * spec.value_dim // gdn_slice(spec, "few")
        return work.kind == "few" and len(work.residual) <= SPREAD and slices * len(work.residual) <= 2 * self._blocks

    def _attend(
        self, layer: DecoderLayer, mixer: AttentionWeights, work: _DecodeBuffers, proj: Tensor, stride: int
    ) -> None:
        spec, kv, batch = mixer.spec, self._views.kv[layer.store], work.batch
        blocks = max(work.parts * spec.kv_heads * batch.layout.tokens, self._blocks)
        self._module.launch(f"k_attention_{work.kind}", (blocks,), 256, args.AttentionArgs(
            proj=proj, query_norm=mixer.q_norm, key_norm=mixer.k_norm, turns=work.turns, keys=kv.keys,
            values=kv.values, mixed=work.mixed, mass=work.mass, y=work.y, ended=self._ended, count=batch.count,
            starts=batch.starts, done=batch.done, pages=batch.pages, eps=spec.eps, heads=spec.heads,
            kv_heads=spec.kv_heads, stride=stride, rotary=spec.rotary_dim, width=batch.pages.shape[1],
            parts=work.parts))

    def _gemm_rows(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        decoder, work = self._decoder, self._begin(batch, "many")
        delta: Tensor | None = None
        for layer in decoder.layers:
            proj = self.linear(self.normed(work.residual, delta, layer.input_norm), _inner(layer))
            self._mix(layer, work, proj, proj.shape[1])
            outer = _outer(layer)
            delta = self.linear(work.y.view(-1)[:len(proj) * _columns(outer)].view(len(proj), -1), outer)
            delta = self.feed_forward(layer, work.residual, delta, _real(batch))
        self._end(work)
        hidden = torch.empty_like(work.residual) if batch.layout.hidden else None
        return self.head(self.normed(work.residual, delta, decoder.norm, hidden)), hidden

    def feed_forward(
        self, layer: DecoderLayer, residual: Tensor, delta: Tensor | None, real: Real = ALL
    ) -> Tensor | None:
        """Of many tokens: adds delta to the residual [T, H]; what is to be added to that next, [T, H] bf16, or None
        where it was."""
        x = self.normed(residual, delta, layer.post_norm)
        if self._experts and isinstance(layer.mlp, MoeWeights):
            if len(x) <= self._experts.in_passes:
                self._add_experts(layer.mlp, layer.post_norm, residual, real)
                return None
            return self._experts.gemm_rows(layer.mlp, x, real)
        both = self.linear(x, layer.dense.gate_up)
        tokens, width = both.shape[0], both.shape[1] // 2
        gated = both.new_empty(tokens, width)
        self._module.launch("k_gate", (-(-width // 2048), tokens), 256, args.GateArgs(x=both, y=gated, width=width))
        return self.linear(gated, layer.dense.down)

    def linear(self, x: Tensor, weight: object) -> Tensor:
        """By cuBLAS, of a quantized weight with a plain copy that is gone afterwards."""
        return F.linear(x, self.plain(weight))

    def plain(self, weight: object) -> Tensor:
        """A weight [rows, columns] bf16; of a quantized one a copy."""
        parts = self._shapes.parts.get(id(weight))
        if parts:
            return quantized_gemm.unpack(self._module, parts)
        assert isinstance(weight, Tensor)
        return weight

    def head(self, x: Tensor) -> Tensor:
        """Normed hidden states [L, H] bf16 -> logits [L, V] float32."""
        weight = self._decoder.head
        if isinstance(weight, Tensor) or len(x) > MOST:
            return torch.mm(x, self.plain(weight).t(), out_dtype=torch.float32)
        logits = torch.empty(len(x), _rows(weight), device=self._device)
        if len(x):
            self._multiply(weight, x, None, logits, STORE)
        return logits

    def normed(self, residual: Tensor, delta: Tensor | None, scale: Tensor, wide: Tensor | None = None) -> Tensor:
        """Adds delta to the residual; its norm [T, H] bf16, which goes to `wide` in float32, too."""
        y = torch.empty_like(residual, dtype=torch.bfloat16)
        self._module.launch("k_add_norm", (y.shape[0],), 256, args.AddNormArgs(
            residual=residual, delta=delta, scale=scale, y=y, wide=wide, eps=self._decoder.eps,
            hidden=self._hidden))
        return y


@cache
def _module(source: str, device: torch.device) -> Module:
    """Loaded once, however many copies of a model are made."""
    return Module(source, device)


def _compact(memory: Tensor, tokens: int, width: int) -> Tensor:
    """The rows [tokens, width] at the beginning of memory that may have been made for wider ones."""
    return memory.view(-1)[:tokens * width].view(tokens, width)


def _real(batch: Batch) -> Real:
    return Real(batch.count, batch.starts) if batch.count is not None else ALL


def _inner(layer: DecoderLayer) -> object:
    return layer.mixer.in_proj if isinstance(layer.mixer, GdnWeights) else layer.mixer.qkv


def _outer(layer: DecoderLayer) -> object:
    return layer.mixer.out_proj if isinstance(layer.mixer, GdnWeights) else layer.mixer.o_proj


def _rows(weight: Any) -> int:
    return sum(map(len, weight)) if isinstance(weight, tuple) else int(weight.shape[0])


def _columns(weight: Any) -> int:
    return int((weight[0] if isinstance(weight, tuple) else weight).shape[1])


def _frequencies(rope: RopeSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    """Radians per position [rotary_dim / 2] float32, and which of the three positions they belong to, int64."""
    half = rope.rotary_dim // 2
    axes = torch.tensor([frequency_axis(index, rope.sections) for index in range(half)], device=device)
    return frequencies(rope, device), axes
