"""An encoder's layers over a ragged batch: what they need, and how torch runs them. All tokens of a sequence see each
other, norms come behind the sums (BERT, arXiv 1810.04805). deltic/ops/cpu/encoder.py is the same, compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from deltic.ops.encoder_layers import Affine as Affine
from deltic.ops.encoder_layers import EncoderLayer as EncoderLayer
from deltic.ops.encoder_layers import LayerNorm as LayerNorm
from deltic.ops.torch.basic import linear
from deltic.ops.types import Block

Attend = Callable[[Tensor, int], Tensor]
"""From qkv [T, 3 H] and the number of heads to [T, H]."""

_WIDEST: Final = 256
"""Numbers of a head that flash attention takes, which knows no padding."""


@dataclass(frozen=True, slots=True, eq=False)
class EncoderWeights:
    """words [V, H]; places [P, H], kinds [K, H] as biases are: of positions and of token types; norm: of their sum."""

    words: Block
    places: Tensor
    kinds: Tensor
    norm: LayerNorm
    layers: tuple[EncoderLayer, ...]
    heads: int
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Sequences one after another, without padding. ids, places, kinds [T] int64; starts [N + 1] int64, on the CPU."""

    ids: Tensor
    places: Tensor
    kinds: Tensor
    starts: Tensor

    @property
    def lengths(self) -> list[int]:
        found: list[int] = self.starts.diff().tolist()
        return found


def embeddings(weights: EncoderWeights, batch: Ragged, words: Tensor) -> Tensor:
    """The sum of each token's embeddings [T, H], before its norm; words [T, H]: those of the ids."""
    return words + F.embedding(batch.places, weights.places).to(words.dtype) + F.embedding(
        batch.kinds, weights.kinds).to(words.dtype)


def run(weights: EncoderWeights, batch: Ragged, x: Tensor) -> Tensor:
    """The last layer's output [T, H] for the embeddings [T, H]."""
    x, attend = normed(x, weights), attention_of(batch, x.device)
    for layer in weights.layers:
        x = run_layer(layer, x, attend, weights).result
    return x


@dataclass(frozen=True, slots=True, eq=False)
class LayerStates:
    """What a layer's products are multiplied with, and what comes of it, all [T, width]."""

    qkv: Tensor
    out: Tensor
    up: Tensor
    down: Tensor
    result: Tensor


def normed(x: Tensor, weights: EncoderWeights) -> Tensor:
    """The first layer's input, of the embeddings."""
    return _norm(x, weights.norm, weights.eps)


def run_layer(layer: EncoderLayer, x: Tensor, attend: Attend, weights: EncoderWeights) -> LayerStates:
    """One layer. weights: whose heads and eps count."""
    mixed = attend(_affine(x, layer.qkv), weights.heads)
    middle = _norm(_affine(mixed, layer.out).add_(x), layer.attention_norm, weights.eps)
    wide = F.gelu(_affine(middle, layer.up))
    result = _norm(_affine(wide, layer.down).add_(middle), layer.output_norm, weights.eps)
    return LayerStates(x, mixed, middle, wide, result)


def padded_attention(lengths: list[int]) -> Attend:
    """Attention of sequences of these lengths, on any device, in any dtype."""
    return lambda qkv, heads: _padded(qkv, lengths, heads)


def _affine(x: Tensor, affine: Affine) -> Tensor:
    if isinstance(affine.weight, Tensor) and not affine.weight.is_mkldnn and affine.bias.dtype == x.dtype:
        return F.linear(x, affine.weight, affine.bias)
    return linear(x, affine.weight) + affine.bias.to(x.dtype)


def _norm(x: Tensor, norm: LayerNorm, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, norm.scale.dtype))
    return F.layer_norm(wide, norm.scale.shape, norm.scale, norm.shift, eps).to(x.dtype)


def on_device(host: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host's on the device, without waiting for what runs there."""
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def attention_of(batch: Ragged, device: torch.device) -> Attend:
    """Attention of the batch's sequences, each to itself."""
    lengths = batch.lengths
    if device.type == "cpu":
        return padded_attention(lengths)
    starts, longest = on_device(batch.starts.int(), device), max(lengths)

    def attend(qkv: Tensor, heads: int) -> Tensor:
        dim = qkv.shape[1] // 3 // heads
        if qkv.dtype not in (torch.float16, torch.bfloat16) or dim % 8 or dim > _WIDEST:
            return _padded(qkv, lengths, heads)
        query, key, value = qkv.view(-1, 3, heads, dim).unbind(1)
        return torch.ops.aten._flash_attention_forward(  # type: ignore[no-any-return]
            query, key, value, starts, starts, longest, longest, 0.0, False, False)[0].flatten(1)
    return attend


def _padded(qkv: Tensor, lengths: list[int], heads: int) -> Tensor:
    """Here alone sequences are padded, to the longest: there is one call for all of them."""
    width = qkv.shape[1] // 3
    wide = pad_sequence(list(qkv.split(lengths)), batch_first=True)  # [N, L, 3 H]
    count, longest = wide.shape[:2]
    query, key, value = wide.view(count, longest, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
    real = torch.arange(longest, device=qkv.device) < torch.tensor(lengths, device=qkv.device)[:, None]
    mask = None if min(lengths) == longest else real[:, None, None]
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return mixed.transpose(1, 2).reshape(count, longest, width)[real]
