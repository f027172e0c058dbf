"""The blocks of a vision tower in the compiled kernels, a slice of the work at a time."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import byref

import torch
from torch import Tensor

from deltic.ops.cpu.encoder import native_layers, packed_layers
from deltic.ops.cpu.library import EncoderModel, ThreadPool, VisionPart, address, library
from deltic.ops.encoder_layers import Scene, VisionWeights
from deltic.ops.torch import OPS as TORCH

_SLICE = 6e9
"""Arithmetic of a slice, products and sums counted: some 20 ms of two cores."""
_QUERIES = 1024
"""Patches that look at others in a slice, at least: a slice lays out the keys and values of its heads anew."""


def vision(pool: ThreadPool, x: Tensor, weights: VisionWeights, scene: Scene) -> Iterator[None]:
    if x.dtype != torch.float32 or not packed_layers(weights.layers):
        return TORCH.vision(x, weights, scene)
    return _blocks(pool, x, weights, scene)


def _blocks(pool: ThreadPool, x: Tensor, weights: VisionWeights, scene: Scene) -> Iterator[None]:
    layers, hidden = native_layers(weights.layers), weights.hidden
    tower = EncoderModel(hidden, weights.heads, len(layers), layers, eps=weights.eps)
    qkv, mixed = torch.empty(len(x), 3 * hidden), torch.empty_like(x)
    calls, kernels = byref(tower), library()
    for block, layer in enumerate(weights.layers):
        each = 2 * hidden * (4 * hidden + 2 * len(layer.up.bias))
        parts = range(0, len(x), max(1, int(_SLICE / each)))
        for some in (slice(start, start + parts.step) for start in parts):
            pool.call(kernels.deltic_vision_project, calls, block, address(x[some]), len(x[some]), address(qkv[some]))
            yield
        for picture in scene.pictures():
            for part in _parts(weights, scene, picture):
                pool.call(kernels.deltic_vision_attend, calls, block, address(qkv[picture]),
                          picture.stop - picture.start, byref(part), address(mixed[picture]))
                yield
        for some in (slice(start, start + parts.step) for start in parts):
            pool.call(kernels.deltic_vision_finish, calls, block, address(mixed[some]), len(x[some]), address(x[some]))
            yield


def _parts(weights: VisionWeights, scene: Scene, picture: slice) -> Iterator[VisionPart]:
    """The attention within one picture: several heads at once, or one for some of the patches."""
    size, narrow = picture.stop - picture.start, scene.dtype == torch.bfloat16
    turns = address(scene.cos[picture]), address(scene.sin[picture])
    row = 4 * size * weights.hidden / weights.heads
    heads = max(1, int(_SLICE / (row * size)))
    queries = size if heads > 1 else max(1, int(_SLICE / row) // _QUERIES) * _QUERIES
    for head in range(0, weights.heads, heads):
        for first in range(0, size, queries):
            yield VisionPart(*turns, head, min(head + heads, weights.heads), first, min(first + queries, size), narrow)
