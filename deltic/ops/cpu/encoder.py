"""Encoder layers and vision towers on the compiled kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from ctypes import byref
from typing import Any

import torch
from torch import Tensor

from deltic.ops.cpu.kernels import native_weight, packed
from deltic.ops.cpu.library import (
    EncoderModel,
    EncoderModelLayer,
    LayerNormStruct,
    ThreadPool,
    VisionPart,
    address,
    library,
)
from deltic.ops.encoder import Affine, EncoderLayer, EncoderWeights, LayerNorm, Ragged, Scene, VisionWeights
from deltic.ops.torch import OPS as TORCH

_SLICE = 6e9
"""Floating-point operations between two yields of a vision tower: about 20 ms on two cores."""
_QUERIES = 1024
"""Minimum patches per slice of attention, because each slice lays out the keys and values of its heads again."""


def encoder_run(pool: ThreadPool, weights: EncoderWeights) -> Callable[[Ragged, Tensor], Tensor] | None:
    """Returns a float32 equivalent of `ops.torch.encoder.run` for these weights; None if they are not packed."""
    if not packed_layers(weights.layers):
        return None
    layers = native_layers(weights.layers)
    model = EncoderModel(weights.places.shape[1], weights.heads, len(layers), layers, _norm(weights.norm), weights.eps)

    def run(batch: Ragged, x: Tensor, _borrowed: object = weights) -> Tensor:
        starts, x = batch.starts.contiguous(), x.float().contiguous()
        pool.call(library().deltic_encode, byref(model), address(starts), len(starts) - 1, address(x))
        return x

    return run


def packed_layers(layers: Sequence[EncoderLayer]) -> bool:
    """Returns True if the kernels can multiply with all weights."""
    return all(packed(affine.weight) for layer in layers for affine in _affines(layer))


def native_layers(layers: Sequence[EncoderLayer]) -> Any:
    """Returns the structs of packed layers; they borrow the weights."""
    return (EncoderModelLayer * len(layers))(*map(_layer, layers))


def _affines(layer: EncoderLayer) -> tuple[Affine, ...]:
    return layer.qkv, layer.out, layer.up, layer.down


def _layer(layer: EncoderLayer) -> EncoderModelLayer:
    weights = [native_weight(affine.weight) for affine in _affines(layer)]
    biases = [address(affine.bias) for affine in _affines(layer)]
    return EncoderModelLayer(*weights, *biases, _norm(layer.attention_norm), _norm(layer.output_norm))


def _norm(norm: LayerNorm) -> LayerNormStruct:
    return LayerNormStruct(address(norm.scale), address(norm.shift))


def vision(pool: ThreadPool, x: Tensor, weights: VisionWeights, scene: Scene) -> Iterator[None]:
    if x.dtype != torch.float32 or not packed_layers(weights.layers):
        return TORCH.vision(x, weights, scene)
    return _blocks(pool, x, weights, scene)


def _blocks(pool: ThreadPool, x: Tensor, weights: VisionWeights, scene: Scene) -> Iterator[None]:
    layers, hidden = native_layers(weights.layers), weights.hidden
    tower = EncoderModel(hidden, weights.heads, len(layers), layers, eps=weights.eps)
    qkv, mixed = torch.empty(len(x), 3 * hidden), torch.empty_like(x)
    model, kernels = byref(tower), library()
    for block, layer in enumerate(weights.layers):
        patch_work = 2 * hidden * (4 * hidden + 2 * len(layer.up.bias))
        step = max(1, int(_SLICE / patch_work))
        slices = [slice(start, start + step) for start in range(0, len(x), step)]
        for rows in slices:
            pool.call(kernels.deltic_vision_project, model, block, address(x[rows]), len(x[rows]), address(qkv[rows]))
            yield
        for picture in scene.pictures():
            for part in _parts(weights, scene, picture):
                pool.call(kernels.deltic_vision_attend, model, block, address(qkv[picture]),
                          picture.stop - picture.start, byref(part), address(mixed[picture]))
                yield
        for rows in slices:
            pool.call(kernels.deltic_vision_finish, model, block, address(mixed[rows]), len(x[rows]), address(x[rows]))
            yield


def _parts(weights: VisionWeights, scene: Scene, picture: slice) -> Iterator[VisionPart]:
    """Yields slices of the attention within one image: several heads at once, or one head for some of the patches."""
    size, narrow = picture.stop - picture.start, scene.dtype == torch.bfloat16
    angles = address(scene.cos[picture]), address(scene.sin[picture])
    row_work = 4 * size * weights.hidden / weights.heads
    heads = max(1, int(_SLICE / (row_work * size)))
    queries = size if heads > 1 else max(1, int(_SLICE / row_work) // _QUERIES) * _QUERIES
    for head in range(0, weights.heads, heads):
        end_head = min(head + heads, weights.heads)
        for first in range(0, size, queries):
            yield VisionPart(*angles, head, end_head, first, min(first + queries, size), narrow)
