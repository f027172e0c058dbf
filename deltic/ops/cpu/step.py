"""A whole step in one call: what the layers need is laid out once."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref, pointer

import torch
from torch import Tensor

from deltic.ops import Ops
from deltic.ops.cpu import kernels
from deltic.ops.cpu.kernels import attention_layer, gdn_layer, kv_pages, native_weight, packed, slots
from deltic.ops.cpu.library import KINDS, Model, ModelLayer, address, check, library, pool, step_batch
from deltic.ops.qtensor import QTensor
from deltic.ops.records import Batch, GdnWeights, Layer, RopeSpec, Stack, Stores
from deltic.ops.ref import frequency_axis
from deltic.ops.torch import OPS as TORCH


def step(ops: Ops, stack: Stack, stores: Stores) -> Callable[[Batch], Tensor] | None:
    if not _own(ops) or not _fits(stack, stores):
        return None
    layers = (ModelLayer * len(stack.layers))()
    kept: list[object] = [layers, stack, stores]
    for struct, layer in zip(layers, stack.layers, strict=True):
        _fill(struct, layer, stores, kept)
    frequencies, axes = _frequencies(stack.rope)
    assert isinstance(stack.embedding, QTensor)
    model = Model(stack.embedding.columns, len(layers), layers, stack.embedding.matrix, native_weight(stack.head),
                  address(stack.norm), address(frequencies), address(axes), stack.rope.rotary_dim, stack.eps)
    kept += [frequencies, axes, model]
    vocabulary, by_reference = stack.embedding.rows, byref(model)

    def run(batch: Batch, _kept: list[object] = kept) -> Tensor:
        logits = torch.empty(batch.layout.logits, vocabulary)
        check(library().deltic_forward(pool(), by_reference, step_batch(batch), None, logits.data_ptr()))
        return logits

    return run


def _own(ops: Ops) -> bool:
    """Whether every op that a step stands for is served as the cpu backend serves it."""
    return (ops.embed, ops.rope, ops.add_norm, ops.gdn_mixer, ops.attention_mixer, ops.mlp, ops.head) == (
        TORCH.embed, TORCH.rope, kernels.add_norm, kernels.gdn_mixer, kernels.attention_mixer, kernels.mlp,
        kernels.head)


def _fits(stack: Stack, stores: Stores) -> bool:
    """Whether everything is packed, on the CPU, and of a dtype that the kernels know."""
    weights = [stack.embedding, stack.head]
    for layer in stack.layers:
        mixer = layer.mixer
        weights += [layer.mlp.gate_up, layer.mlp.down]
        weights += ([mixer.in_proj, mixer.out_proj] if isinstance(mixer, GdnWeights) else [mixer.qkv, mixer.o_proj])
    dtypes = {view.keys.dtype for view in stores.kv} | {view.conv.dtype for view in stores.states}
    return all(map(packed, weights)) and dtypes <= KINDS.keys() and all(s.ring_key is None for s in stores.states)


def _fill(struct: ModelLayer, layer: Layer, stores: Stores, kept: list[object]) -> None:
    mixer = layer.mixer
    struct.input_norm, struct.post_norm = address(layer.input_norm), address(layer.post_norm)
    struct.gate_up, struct.down = native_weight(layer.mlp.gate_up), native_weight(layer.mlp.down)
    if isinstance(mixer, GdnWeights):
        conv = mixer.conv.float().contiguous()
        kept.append(conv)
        struct.gdn = pointer(gdn_layer(mixer, conv, projections=True))
        struct.states = pointer(slots(stores.states[layer.store]))
    else:
        struct.attention = pointer(attention_layer(mixer, projections=True))
        struct.kv = pointer(kv_pages(stores.kv[layer.store]))


def _frequencies(rope: RopeSpec) -> tuple[Tensor, Tensor]:
    """Radians per position [rotary_dim / 2] float32, and which of the three positions they belong to, int64."""
    half = rope.rotary_dim // 2
    exponents = torch.arange(half, dtype=torch.float32) * 2 / rope.rotary_dim
    axes = torch.tensor([frequency_axis(index, rope.sections) for index in range(half)])
    return 1.0 / rope.theta**exponents, axes
