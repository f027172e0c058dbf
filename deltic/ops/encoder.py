"""An encoder's layers over a ragged batch: what they need, and how torch runs them. All tokens of a sequence see each
other, norms come behind the sums (BERT, arXiv 1810.04805). deltic/ops/cpu/encoder.py is the same, compiled."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from deltic.ops.encoder_layers import Affine as Affine
from deltic.ops.encoder_layers import EncoderLayer as EncoderLayer
from deltic.ops.encoder_layers import Norm as Norm
from deltic.ops.records import Block
from deltic.ops.torch.basic import linear


@dataclass(frozen=True, slots=True, eq=False)
class EncoderWeights:
    """words [V, H]; places [P, H], kinds [K, H] float32: of positions and of token types; norm: of their sum."""

    words: Block
    places: Tensor
    kinds: Tensor
    norm: Norm
    layers: tuple[EncoderLayer, ...]
    heads: int
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Sequences one after another, without padding. ids, places, kinds [T] int64; starts [N + 1] int64."""

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
    return words + weights.places[batch.places].to(words.dtype) + weights.kinds[batch.kinds].to(words.dtype)


def run(weights: EncoderWeights, batch: Ragged, x: Tensor) -> Tensor:
    """The last layer's output [T, H] for the embeddings [T, H]."""
    x, lengths = _norm(x, weights.norm, weights.eps), batch.lengths
    for layer in weights.layers:
        mixed = _attention(_affine(x, layer.qkv), lengths, weights.heads)
        x = _norm(x + _affine(mixed, layer.out), layer.attention_norm, weights.eps)
        x = _norm(x + _affine(F.gelu(_affine(x, layer.up)), layer.down), layer.output_norm, weights.eps)
    return x


def _affine(x: Tensor, affine: Affine) -> Tensor:
    return linear(x, affine.weight) + affine.bias.to(x.dtype)


def _norm(x: Tensor, norm: Norm, eps: float) -> Tensor:
    return F.layer_norm(x.float(), norm.scale.shape, norm.scale, norm.shift, eps).to(x.dtype)


def _attention(qkv: Tensor, lengths: list[int], heads: int) -> Tensor:
    """qkv [T, 3 H] -> [T, H]. Here alone sequences are padded, to the longest: there is one call for all of them."""
    width = qkv.shape[1] // 3
    wide = pad_sequence(list(qkv.split(lengths)), batch_first=True)  # [N, L, 3 H]
    count, longest = wide.shape[:2]
    query, key, value = wide.view(count, longest, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
    real = torch.arange(longest, device=qkv.device) < torch.tensor(lengths, device=qkv.device)[:, None]
    mask = None if min(lengths) == longest else real[:, None, None]
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    return mixed.transpose(1, 2).reshape(count, longest, width)[real]
