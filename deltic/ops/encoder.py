"""Weights and batches of layers in which all tokens of a sequence attend to each other: encoders and vision towers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deltic.ops.types import Block, Weight


@dataclass(frozen=True, slots=True, eq=False)
class LayerNorm:
    """scale, shift [H]: float32; in an encoder on a GPU the model's dtype."""

    scale: Tensor
    shift: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Affine:
    """A linear layer. bias [rows]: float32; on a GPU the dtype of the activations."""

    weight: Weight
    bias: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class EncoderLayer:
    """One layer of an encoder or a vision tower.

    qkv: rows of all heads' queries, then keys, then values.
    attention_norm, output_norm: in an encoder they follow attention and feed-forward (post-norm, BERT); in a vision
        tower they precede them (pre-norm).
    """

    qkv: Affine
    out: Affine
    attention_norm: LayerNorm
    up: Affine
    down: Affine
    output_norm: LayerNorm


@dataclass(frozen=True, slots=True, eq=False)
class EncoderWeights:
    """An encoder (BERT, arXiv 1810.04805).

    words [V, H], places [P, H], kinds [K, H]: embeddings of tokens, positions and token types; places and kinds have
        the dtype of biases. norm: of their sum.
    """

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
        lengths: list[int] = self.starts.diff().tolist()
        return lengths


@dataclass(frozen=True, slots=True, eq=False)
class VisionWeights:
    """The blocks of a vision tower. eps: of their norms."""

    layers: tuple[EncoderLayer, ...]
    heads: int
    eps: float

    @property
    def hidden(self) -> int:
        return len(self.layers[0].out.bias)


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """Images whose patches lie one after another.

    sizes: patches of each image.
    cos, sin [T, head_dim / 2] float32: rotation of elements i and i + head_dim / 2 of each query and key.
    dtype: of the activations that are multiplied with plain weights.
    """

    sizes: tuple[int, ...]
    cos: Tensor
    sin: Tensor
    dtype: torch.dtype

    def pictures(self) -> Iterator[slice]:
        """The patches of each image."""
        end = 0
        for size in self.sizes:
            yield slice(end, end + size)
            end += size
