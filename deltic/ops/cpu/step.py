"""Runs a whole step in one call of the compiled kernels. The structs of all layers are built once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from ctypes import addressof, byref, pointer
from itertools import pairwise
from types import MethodType

import torch
from torch import Tensor

from deltic.ops import Ops
from deltic.ops.cpu import kernels
from deltic.ops.cpu.kernels import (
    attention_layer,
    gdn_layer,
    kv_pages,
    moe_layer,
    moe_weights,
    native_weight,
    packed,
    sliced_weight,
    slots,
    wide_states,
)
from deltic.ops.cpu.library import (
    KINDS,
    KV_KINDS,
    Drawing,
    ModelLayer,
    ModelStruct,
    MtpStruct,
    ThreadPool,
    address,
    library,
    made_once,
    step_batch,
)
from deltic.ops.quantized import QTensor
from deltic.ops.reference import frequency_axis
from deltic.ops.torch import OPS as TORCH
from deltic.ops.torch.basic import frequencies
from deltic.ops.types import (
    Batch,
    CacheViews,
    DecoderLayer,
    DecoderWeights,
    ExpertPool,
    GdnWeights,
    Layout,
    MoeWeights,
    MtpStep,
    MtpWeights,
    RopeSpec,
    Sampling,
    Weight,
)


def step(pool: ThreadPool, ops: Ops, decoder: DecoderWeights, views: CacheViews
         ) -> Callable[[Batch], tuple[Tensor, Tensor | None]] | None:
    if not _own(pool, ops) or not _fits(decoder, views) or _split(decoder):
        return None
    model, borrowed = _model(decoder, views)
    vocabulary, width, by_reference = len(decoder.embedding), model.hidden, byref(model)

    # The cache key is the inner function `outputs`: a function that refers to itself would be a reference cycle and
    # hold the weights until garbage collection.
    def run(batch: Batch, _borrowed: list[object] = borrowed) -> tuple[Tensor, Tensor | None]:
        logits, hidden, places = made_once(batch.kept, outputs, lambda: outputs(batch.layout))
        pool.call(library().deltic_forward, by_reference, step_batch(batch), *places)
        return logits, hidden

    def outputs(layout: Layout) -> tuple[Tensor, Tensor | None, tuple[int | None, ...]]:
        logits = torch.empty(layout.logits, vocabulary)
        hidden = torch.empty(layout.tokens, width) if layout.hidden else None
        return logits, hidden, (address(hidden), address(logits))

    return run


def mtp_step(pool: ThreadPool, ops: Ops, weights: MtpWeights, views: CacheViews, slots: Tensor) -> MtpStep | None:
    decoder = DecoderWeights(weights.embedding, (weights.layer,), weights.norm, weights.head, weights.rope, weights.eps)
    own = _own(pool, ops) and ops.store_kv == MethodType(kernels.store_kv, pool)
    if not own or not _fits(decoder, views) or _split(decoder) or not packed(weights.fc):
        return None
    model, borrowed = _model(decoder, views)
    head = MtpStruct(model, native_weight(weights.fc), native_weight(weights.kv), address(weights.norm_embedding),
               address(weights.norm_hidden), address(weights.tokens))
    borrowed += [weights, head, slots]
    by_reference = byref(head)

    def follow(batch: Batch, hidden: Tensor) -> None:
        pool.call(library().deltic_mtp_follow, by_reference, step_batch(batch), address(hidden), address(slots))

    def draft(batch: Batch, counts: Tensor, sampling: Sampling, _borrowed: list[object] = borrowed) -> Tensor:
        most = len(sampling.key) // len(counts)
        drawing, tokens, _ = made_once(sampling.kept, drawing_of, lambda: drawing_of(sampling, len(counts), most))
        pool.call(library().deltic_mtp_draft, by_reference, step_batch(batch), address(counts), most,
                  address(slots), byref(drawing), address(tokens))
        return tokens

    def drawing_of(sampling: Sampling, rows: int, most: int) -> tuple[Drawing, Tensor, list[Tensor]]:
        columns = [column.view(-1, most)[:, 0].contiguous() for column in (
            sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)]
        columns.append(sampling.key.contiguous())
        return (Drawing(*map(address, columns), sampling.filtered), torch.empty(rows, most, dtype=torch.int64), columns)

    return MtpStep(follow, draft)


def _model(decoder: DecoderWeights, views: CacheViews) -> tuple[ModelStruct, list[object]]:
    """Returns the struct of a whole model, and the objects that it borrows."""
    layers = (ModelLayer * len(decoder.layers))()
    borrowed: list[object] = [layers, decoder, views]
    for struct, layer in zip(layers, decoder.layers, strict=True):
        _fill(struct, layer, views, borrowed)
    _predict(layers, decoder.layers)
    turns, axes = _frequencies(decoder.rope)
    assert isinstance(decoder.embedding, QTensor)
    model = ModelStruct(
        decoder.embedding.columns,
        len(layers),
        layers,
        decoder.embedding.matrix,
        native_weight(decoder.head),
        address(decoder.norm),
        address(turns),
        address(axes),
        decoder.rope.rotary_dim,
        decoder.eps,
        decoder.rope.attention_factor,
    )
    return model, [*borrowed, turns, axes, model]


def _own(pool: ThreadPool, ops: Ops) -> bool:
    """Returns True if all ops that a step replaces belong to the cpu backend and use this pool."""
    served = (ops.add_norm, ops.gdn_mixer, ops.attention_mixer, ops.mlp, ops.moe, ops.head)
    own = (kernels.add_norm, kernels.gdn_mixer, kernels.attention_mixer, kernels.mlp, kernels.moe, kernels.head)
    return (ops.embed, ops.rope) == (TORCH.embed, TORCH.rope) and served == tuple(MethodType(op, pool) for op in own)


def has_wide_activations(ops: Ops, decoder: DecoderWeights, views: CacheViews) -> bool:
    """Returns True if the kernels would run whole steps on one device. Activations between layers are float32 in that
    case, and must then be float32 on several devices too."""
    pool = getattr(ops.step, "__self__", None)
    return isinstance(pool, ThreadPool) and _own(pool, ops) and _fits(decoder, views)


def _split(decoder: DecoderWeights) -> bool:
    return any(layer.mixer.shards > 1 for layer in decoder.layers)


def left_to_others(ops: Ops, decoder: DecoderWeights, views: CacheViews) -> dict[str, str]:
    """Returns the ops that other backends run for this model, with the reasons."""
    torch_serves = "torch (the weights are not packed)"
    left = {op: torch_serves for op, weights in _linear_layers(decoder).items() if not all(map(packed, weights))}
    if not wide_states(views.states):
        left |= dict.fromkeys(("gdn_mixer", "flush_delta_log"), "torch (the states are not float32)")
    if _split(decoder):
        left |= dict.fromkeys(("step", "mtp_step"), "the ops one by one (the model is split)")
    elif ops.step(ops, decoder, views) is None:
        left["step"] = "the ops one by one (not all of them are the kernels')"
    return left


def _linear_layers(decoder: DecoderWeights) -> dict[str, list[Weight]]:
    """Returns the weights, grouped by the op that multiplies with them."""
    layers: dict[str, list[Weight]] = {
        "head": [decoder.head], "mlp": [], "moe": [], "gdn_mixer": [], "attention_mixer": []}
    for layer in decoder.layers:
        mixer, mlp = layer.mixer, layer.mlp
        if isinstance(mlp, MoeWeights):
            layers["moe"] += moe_weights(mlp)
        else:
            layers["mlp"] += [mlp.gate_up, mlp.down]
        if isinstance(mixer, GdnWeights):
            layers["gdn_mixer"] += [mixer.in_proj, mixer.out_proj]
        else:
            layers["attention_mixer"] += [mixer.qkv, mixer.o_proj]
    return layers


def _fits(decoder: DecoderWeights, views: CacheViews) -> bool:
    """Returns True if all weights are packed and on the CPU, and the kernels support the caches' dtypes."""
    weights = [decoder.embedding, *(weight for group in _linear_layers(decoder).values() for weight in group)]
    kinds, dtypes = {view.keys.dtype for view in views.kv}, {view.conv.dtype for view in views.states}
    known = kinds <= KV_KINDS.keys() and dtypes <= KINDS.keys()
    return known and all(map(packed, weights)) and wide_states(views.states)


def _predict(structs: Iterable[ModelLayer], layers: Sequence[DecoderLayer]) -> None:
    """Gives each layer the next layer's router if the next layer's experts are to be read ahead."""
    for (struct, layer), (following, after) in pairwise(zip(structs, layers, strict=True)):
        pools = [each.mlp.experts for each in (layer, after) if isinstance(each.mlp, MoeWeights)]
        if len(pools) == 2 and all(isinstance(pool, ExpertPool) and pool.store.predict for pool in pools):
            struct.moe.contents.next = addressof(following.moe.contents)


def _fill(struct: ModelLayer, layer: DecoderLayer, views: CacheViews, borrowed: list[object]) -> None:
    mixer = layer.mixer
    struct.input_norm, struct.post_norm = address(layer.input_norm), address(layer.post_norm)
    if isinstance(layer.mlp, MoeWeights):
        struct.moe = pointer(moe_layer(layer.mlp))
    else:
        struct.gate_up, struct.down = native_weight(layer.mlp.gate_up), sliced_weight(layer.mlp.down, 1)
    if isinstance(mixer, GdnWeights):
        views.states[layer.store].check_order(mixer.spec)
        conv = mixer.conv.float().contiguous()
        borrowed.append(conv)
        struct.gdn = pointer(gdn_layer(mixer, conv, projections=True))
        struct.states = pointer(slots(views.states[layer.store]))
    else:
        struct.attention = pointer(attention_layer(mixer, projections=True))
        struct.kv = pointer(kv_pages(views.kv[layer.store]))


def _frequencies(rope: RopeSpec) -> tuple[Tensor, Tensor]:
    """Returns radians per position [rotary_dim / 2] float32, and the position axis of each frequency, int64."""
    half = rope.rotary_dim // 2
    axes = torch.tensor([frequency_axis(index, rope.sections) for index in range(half)])
    return frequencies(rope, axes.device), axes
