"""Weights and batches of layers in which all tokens of a sequence attend to each other: encoders and vision towers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deltic.errors import ConfigError
from deltic.ops.types import Block, Weight


@dataclass(frozen=True, slots=True, eq=False)
class LayerNorm:
    """Parameters of a layer norm. scale, shift [H]: float32; the model's dtype in an encoder on a GPU."""

    scale: Tensor
    shift: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Affine:
    """A linear layer. bias [rows]: float32; on a GPU the activations' dtype."""

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
        the dtype of biases. norm: applied to their sum.
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
    """N concatenated sequences without padding. ids, places, kinds [T] int64; starts [N + 1] int64, on the CPU."""

    ids: Tensor
    places: Tensor
    kinds: Tensor
    starts: Tensor

    @property
    def lengths(self) -> list[int]:
        lengths: list[int] = self.starts.diff().tolist()
        return lengths


@dataclass(frozen=True, slots=True, eq=False)
class EncoderBackend:
    """Runs encoders on a device.

    dtype: dtype of matrices in memory. vector_dtype: of biases, norms and small tables. activations: of hidden states.
    packs: matrices are packed for compiled kernels and may be quantized; a row's result does not depend on other rows.
    overlaps: the device computes while the host prepares the next batch.
    linear(x [N, in], affine) -> [N, out] float32.
    run(weights) -> a function from a batch and its embeddings [T, H] to the last layer's states [T, H].
    """

    device: torch.device
    dtype: torch.dtype
    vector_dtype: torch.dtype
    activations: torch.dtype
    linear: Callable[[Tensor, Affine], Tensor]
    run: Callable[[EncoderWeights], Callable[[Ragged, Tensor], Tensor]]
    packs: bool = False
    overlaps: bool = False


def select_backend(device: str, dtype: torch.dtype | None, torch_only: bool, level: str = "auto",
                   threads: int = 1) -> EncoderBackend:
    """Returns the backend for encoders on a device. dtype: of the weights; None: float32 on a CPU, and bfloat16 on a
    GPU, where float32 is many times slower."""
    from deltic.ops import cpu
    from deltic.ops.cuda import encoder as cuda_encoder
    from deltic.ops.torch import encoder as torch_encoder

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device {device}: torch finds no CUDA device here; use `device='cpu'`", "device")
    if device == "cpu":
        dtype = dtype or torch.float32
        if not torch_only and not cpu.missing():
            return cpu.encoder_backend(dtype, level, threads)
        return torch_encoder.encoder_backend(torch.device(device), dtype)
    make = torch_encoder.encoder_backend if torch_only else cuda_encoder.encoder_backend
    return make(torch.device(device), dtype or torch.bfloat16)


@dataclass(frozen=True, slots=True, eq=False)
class VisionWeights:
    """The blocks of a vision tower. eps: of its norms."""

    layers: tuple[EncoderLayer, ...]
    heads: int
    eps: float

    @property
    def hidden(self) -> int:
        return len(self.layers[0].out.bias)


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """A batch of images with concatenated patches.

    sizes: number of patches of each image.
    cos, sin [T, head_dim / 2] float32: rotation of elements i and i + head_dim / 2 of each query and key.
    dtype: dtype of the activations in products with plain weights.
    """

    sizes: tuple[int, ...]
    cos: Tensor
    sin: Tensor
    dtype: torch.dtype

    def pictures(self) -> Iterator[slice]:
        """Yields the range of patches of each image."""
        end = 0
        for size in self.sizes:
            yield slice(end, end + size)
            end += size
