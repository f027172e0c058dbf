"""The blocks of a vision tower in plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from deltic.ops.encoder_layers import Affine, EncoderLayer, LayerNorm, Scene, VisionWeights
from deltic.ops.torch.basic import linear

SLICE = 2048
"""Patches that are worked on at once: bounds the memory of a large picture, and how long others wait for it."""


def vision(x: Tensor, weights: VisionWeights, scene: Scene) -> Iterator[None]:
    for layer in weights.layers:
        yield from _attend(x, layer, weights, scene)
        for part in x.split(SLICE):
            inner = F.gelu(_affine(_norm(part, layer.output_norm, weights, scene), layer.up), approximate="tanh")
            part += _affine(inner, layer.down)
            yield


def _attend(x: Tensor, layer: EncoderLayer, weights: VisionWeights, scene: Scene) -> Iterator[None]:
    """Add attention within each picture to x [T, H]."""
    heads, dim = weights.heads, weights.hidden // weights.heads
    query, key, value = (torch.empty(len(x), heads, dim, dtype=scene.dtype, device=x.device) for _ in range(3))
    for start in range(0, len(x), SLICE):
        rows = slice(start, start + SLICE)
        qkv = _affine(_norm(x[rows], layer.attention_norm, weights, scene), layer.qkv).view(-1, 3, heads, dim)
        cos, sin = scene.cos[rows, None], scene.sin[rows, None]
        query[rows], key[rows], value[rows] = rotate(qkv[:, 0], cos, sin), rotate(qkv[:, 1], cos, sin), qkv[:, 2]
        yield
    for picture in scene.pictures():
        keys, values = (each[picture].transpose(0, 1)[None] for each in (key, value))
        for start in range(picture.start, picture.stop, SLICE):
            rows = slice(start, min(start + SLICE, picture.stop))
            found = F.scaled_dot_product_attention(query[rows].transpose(0, 1)[None], keys, values)
            x[rows] += _affine(found[0].transpose(0, 1).flatten(1), layer.out)
            yield


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, head_dim] by angles [T, 1, head_dim / 2], in float32."""
    left, right = x.float().chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def _affine(x: Tensor, affine: Affine) -> Tensor:
    return linear(x, affine.weight) + affine.bias.to(x.dtype)


def _norm(x: Tensor, norm: LayerNorm, weights: VisionWeights, scene: Scene) -> Tensor:
    return F.layer_norm(x.float(), norm.scale.shape, norm.scale, norm.shift, weights.eps).to(scene.dtype)
