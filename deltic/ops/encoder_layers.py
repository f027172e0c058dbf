"""The records of layers in which all tokens of a sequence see each other: of encoders and of vision towers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deltic.ops.types import Weight


@dataclass(frozen=True, slots=True, eq=False)
class LayerNorm:
    """Layer norm: scale, shift [H] float32, of an encoder on a GPU of the model's dtype."""

    scale: Tensor
    shift: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Affine:
    """A product with a bias [rows] float32, on a GPU of the dtype of what is multiplied."""

    weight: Weight
    bias: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class EncoderLayer:
    """qkv: rows of all heads' queries, then keys, then values. In an encoder the norms come behind what they are named
    after, in a vision tower `attention_norm` comes before attention, `output_norm` before the feed-forward."""

    qkv: Affine
    out: Affine
    attention_norm: LayerNorm
    up: Affine
    down: Affine
    output_norm: LayerNorm


@dataclass(frozen=True, slots=True, eq=False)
class VisionWeights:
    """A vision tower's blocks; eps: of their norms."""

    layers: tuple[EncoderLayer, ...]
    heads: int
    eps: float

    @property
    def hidden(self) -> int:
        return len(self.layers[0].out.bias)


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """Pictures whose patches lie one after another.

    sizes: patches of each. cos, sin [T, head_dim / 2] float32: by how much numbers i and i + head_dim / 2 of each
    query and key turn together. dtype: what is multiplied, as far as it is not quantized.
    """

    sizes: tuple[int, ...]
    cos: Tensor
    sin: Tensor
    dtype: torch.dtype

    def pictures(self) -> Iterator[slice]:
        """Where the patches of each lie."""
        end = 0
        for size in self.sizes:
            yield slice(end, end + size)
            end += size
