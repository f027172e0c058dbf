"""Encoder layers and vision towers in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from deltic.ops.encoder import (
    Affine,
    EncoderBackend,
    EncoderLayer,
    EncoderWeights,
    LayerNorm,
    Ragged,
    Scene,
    VisionWeights,
)
from deltic.ops.torch.basic import linear

Attend = Callable[[Tensor, int], Tensor]
"""(qkv [T, 3 H], number of heads) -> [T, H]."""

_MAX_FLASH_HEAD_DIM: Final = 256
"""Maximum head_dim of flash attention, which needs no padding of sequences."""
SLICE: Final = 2048
"""Patches per computation; bounds the memory of a large image and the time until other work can run."""


# Encoders


def encoder_backend(device: torch.device, dtype: torch.dtype) -> EncoderBackend:
    """Returns the backend that supports any device."""
    on_cpu = device.type == "cpu"
    return EncoderBackend(device, dtype, torch.float32 if on_cpu else dtype, dtype, _wide_affine,
                          lambda weights: partial(run, weights), overlaps=not on_cpu)


def _wide_affine(x: Tensor, affine: Affine) -> Tensor:
    return linear(x.float(), affine.weight) + affine.bias


def embeddings(weights: EncoderWeights, batch: Ragged, words: Tensor) -> Tensor:
    """Returns the sum of each token's embeddings [T, H], before its norm. words [T, H]: embeddings of the ids."""
    places = F.embedding(batch.places, weights.places).to(words.dtype)
    kinds = F.embedding(batch.kinds, weights.kinds).to(words.dtype)
    return words + places + kinds


def run(weights: EncoderWeights, batch: Ragged, x: Tensor) -> Tensor:
    """Returns the last layer's output [T, H] for the embeddings [T, H]."""
    x, attend = normed(x, weights), attention_of(batch, x.device)
    for layer in weights.layers:
        x = run_layer(layer, x, attend, weights).result
    return x


@dataclass(frozen=True, slots=True, eq=False)
class LayerStates:
    """The inputs of a layer's four linear layers and the layer's result, all [T, width]."""

    qkv: Tensor
    out: Tensor
    up: Tensor
    down: Tensor
    result: Tensor


def normed(x: Tensor, weights: EncoderWeights) -> Tensor:
    """Returns the first layer's input: embeddings after their norm."""
    return _norm(x, weights.norm, weights.eps)


def run_layer(layer: EncoderLayer, x: Tensor, attend: Attend, weights: EncoderWeights) -> LayerStates:
    """Runs one layer. weights: source of heads and eps."""
    mixed = attend(_affine(x, layer.qkv), weights.heads)
    middle = _norm(_affine(mixed, layer.out).add_(x), layer.attention_norm, weights.eps)
    wide = F.gelu(_affine(middle, layer.up))
    result = _norm(_affine(wide, layer.down).add_(middle), layer.output_norm, weights.eps)
    return LayerStates(x, mixed, middle, wide, result)


def _affine(x: Tensor, affine: Affine) -> Tensor:
    if isinstance(affine.weight, Tensor) and not affine.weight.is_mkldnn and affine.bias.dtype == x.dtype:
        return F.linear(x, affine.weight, affine.bias)
    return linear(x, affine.weight) + affine.bias.to(x.dtype)


def _norm(x: Tensor, norm: LayerNorm, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, norm.scale.dtype))
    return F.layer_norm(wide, norm.scale.shape, norm.scale, norm.shift, eps).to(x.dtype)


def on_device(host: Tensor, device: torch.device) -> Tensor:
    """Copies a host tensor to the device without waiting for the device's stream."""
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def to_host(outputs: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Callable[[], None]]:
    """Starts copies to the host. Returns the copies, and a function that waits until they are complete."""
    if not any(rows.is_cuda for rows in outputs.values()):
        return dict(outputs), lambda: None
    copies = {name: torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True).copy_(rows, non_blocking=True)
              for name, rows in outputs.items()}
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(next(iter(outputs.values())).device))
    return copies, done.synchronize


def segment_reduce(rows: Tensor, how: Literal["max", "mean", "sum"], lengths: Tensor) -> Tensor:
    """Reduces each segment of rows [T, H] to one row [N, H]."""
    if not rows.is_cpu:
        return torch.segment_reduce(rows, how, lengths=lengths, axis=0, unsafe=True)
    parts = rows.split(lengths.tolist())  # several times faster on a CPU
    if how == "max":
        return torch.stack([part.amax(0) if len(part) else part.new_full(part.shape[1:], -torch.inf) for part in parts])
    return torch.stack([part.mean(0) if how == "mean" else part.sum(0) for part in parts])


def attention_of(batch: Ragged, device: torch.device) -> Attend:
    """Returns a function for attention within each sequence of the batch."""
    lengths = batch.lengths
    if device.type == "cpu":
        return padded_attention(lengths)
    starts, longest = on_device(batch.starts.int(), device), max(lengths)

    def attend(qkv: Tensor, heads: int) -> Tensor:
        head_dim = qkv.shape[1] // 3 // heads
        if qkv.dtype not in (torch.float16, torch.bfloat16) or head_dim % 8 or head_dim > _MAX_FLASH_HEAD_DIM:
            return _padded(qkv, lengths, heads)
        query, key, value = qkv.view(-1, 3, heads, head_dim).unbind(1)
        return torch.ops.aten._flash_attention_forward(  # type: ignore[no-any-return]
            query, key, value, starts, starts, longest, longest, 0.0, False, False)[0].flatten(1)

    return attend


def padded_attention(lengths: list[int]) -> Attend:
    """Returns a function for attention within sequences of these lengths, on any device, in any dtype."""
    return lambda qkv, heads: _padded(qkv, lengths, heads)


def _padded(qkv: Tensor, lengths: list[int], heads: int) -> Tensor:
    """Computes attention of all sequences in one call. Pads them to the longest sequence only here."""
    width = qkv.shape[1] // 3
    wide = torch.nn.utils.rnn.pad_sequence(list(qkv.split(lengths)), batch_first=True)  # [N, L, 3 H]
    count, longest = wide.shape[:2]
    query, key, value = wide.view(count, longest, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
    real = torch.arange(longest, device=qkv.device) < torch.tensor(lengths, device=qkv.device)[:, None]
    mask = None if min(lengths) == longest else real[:, None, None]
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return mixed.transpose(1, 2).reshape(count, longest, width)[real]


# Vision towers


def vision(x: Tensor, weights: VisionWeights, scene: Scene) -> Iterator[None]:
    for layer in weights.layers:
        yield from _attend_images(x, layer, weights, scene)
        for part in x.split(SLICE):
            wide = _vision_affine(_vision_norm(part, layer.output_norm, weights, scene), layer.up)
            part += _vision_affine(F.gelu(wide, approximate="tanh"), layer.down)
            yield


def _attend_images(x: Tensor, layer: EncoderLayer, weights: VisionWeights, scene: Scene) -> Iterator[None]:
    """Adds attention within each image to x [T, H]."""
    heads, head_dim = weights.heads, weights.hidden // weights.heads
    query, key, value = (torch.empty(len(x), heads, head_dim, dtype=scene.dtype, device=x.device) for _ in range(3))
    for start in range(0, len(x), SLICE):
        rows = slice(start, start + SLICE)
        normed_rows = _vision_norm(x[rows], layer.attention_norm, weights, scene)
        qkv = _vision_affine(normed_rows, layer.qkv).view(-1, 3, heads, head_dim)
        cos, sin = scene.cos[rows, None], scene.sin[rows, None]
        query[rows] = _rotate(qkv[:, 0], cos, sin)
        key[rows] = _rotate(qkv[:, 1], cos, sin)
        value[rows] = qkv[:, 2]
        yield
    for picture in scene.pictures():
        keys, values = (each[picture].transpose(0, 1)[None] for each in (key, value))
        for start in range(picture.start, picture.stop, SLICE):
            rows = slice(start, min(start + SLICE, picture.stop))
            mixed = F.scaled_dot_product_attention(query[rows].transpose(0, 1)[None], keys, values)
            x[rows] += _vision_affine(mixed[0].transpose(0, 1).flatten(1), layer.out)
            yield


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [T, heads, head_dim] by angles [T, 1, head_dim / 2], in float32."""
    left, right = x.float().chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def _vision_affine(x: Tensor, affine: Affine) -> Tensor:
    return linear(x, affine.weight) + affine.bias.to(x.dtype)


def _vision_norm(x: Tensor, norm: LayerNorm, weights: VisionWeights, scene: Scene) -> Tensor:
    return F.layer_norm(x.float(), norm.scale.shape, norm.scale, norm.shift, weights.eps).to(scene.dtype)
