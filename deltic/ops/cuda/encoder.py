"""Encoder layers and vision towers on a GPU in bfloat16: linear layers by cuBLAS, attention by torch's flash or cuDNN
kernels, and own kernels for residual sums with their norms and for rotary embeddings."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from deltic.ops.cuda import arguments as args
from deltic.ops.cuda.driver import Module, entry, headers, load_module, why_not_compiled
from deltic.ops.cuda.nvrtc import CompileError
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
from deltic.ops.torch import OPS as TORCH
from deltic.ops.torch import encoder as torch_encoder
from deltic.ops.torch.encoder import attention_of, normed

log = logging.getLogger("deltic")

_MAX_HIDDEN: Final = 4096
"""Largest number of elements of a token or patch that a warp keeps in registers. A head has at most a sixteenth."""
_BLOCK_THREADS: Final = 256
"""Threads per block, with one warp per token."""
_SLICE: Final = 1 << 16
"""Largest number of patches per call of the feed-forward. It limits the memory for many images."""
_CUDNN_AFTER, _CUDNN_SIZES = 4, 64
"""cuDNN's attention takes half the time, but builds a program for each image size (50 ms): it serves a size from its
fourth call on, and at most 64 sizes."""


# Encoders


def encoder_backend(device: torch.device, dtype: torch.dtype) -> EncoderBackend:
    """Returns the backend with the kernels for encoders. Torch serves weights that the kernels do not support."""
    return replace(torch_encoder.encoder_backend(device, dtype),
                   run=lambda weights: encoder_run(weights) or partial(torch_encoder.run, weights))


def encoder_run(weights: EncoderWeights) -> Callable[[Ragged, Tensor], Tensor] | None:
    """Returns `ops.torch.encoder.run` for these weights; None if torch must serve it (dtype, width, card, compiler)."""
    scale = weights.norm.scale
    hidden = len(scale)
    if scale.dtype != torch.bfloat16 or hidden % 8 or hidden > _MAX_HIDDEN:
        return None
    if torch.cuda.get_device_capability(scale.device) < (8, 0):
        return None
    try:
        module = Module(encoder_source(hidden), scale.device)
    except CompileError:
        return None

    def add_norm(x: Tensor, delta: Tensor, norm: LayerNorm) -> Tensor:
        """Overwrites `delta` with the norm of x + delta."""
        blocks = -(-len(x) * 32 // _BLOCK_THREADS)
        module.launch("k_residual_norm", (blocks,), _BLOCK_THREADS, args.ResidualNormArgs(
            x=x, delta=delta, scale=norm.scale, shift=norm.shift, y=delta, eps=weights.eps, tokens=len(x)))
        return delta

    def run(batch: Ragged, x: Tensor) -> Tensor:
        with torch.cuda.device(x.device):
            x, attend = normed(x, weights), attention_of(batch, x.device)
            for layer in weights.layers:
                mixed = attend(_encoder_product(x, layer.qkv), weights.heads)
                x = add_norm(x, _encoder_product(mixed, layer.out), layer.attention_norm)
                x = add_norm(x, _encoder_product(_gelu_product(x, layer.up), layer.down), layer.output_norm)
            return x

    return run


def encoder_source(hidden: int) -> str:
    """Returns the CUDA source for hidden states of this width."""
    return headers("encoder") + entry("residual_norm", "ResidualNorm", str(_BLOCK_THREADS), f"residual_norm<{hidden}>")


def _encoder_product(x: Tensor, affine: Affine) -> Tensor:
    return F.linear(x, _matrix(affine), affine.bias)


def _gelu_product(x: Tensor, affine: Affine) -> Tensor:
    """Returns GELU of a product. cuBLAS approximates it by tanh: the error, below 5e-4, is no more than bfloat16's."""
    gelu: Tensor = torch.ops.aten._addmm_activation(affine.bias, x, _matrix(affine).t(), use_gelu=True)
    return gelu


def _matrix(affine: Affine) -> Tensor:
    assert isinstance(affine.weight, Tensor)
    return affine.weight


# Vision towers


class VisionOp:
    """The vision op. It counts the calls with images of each size."""

    def __init__(self) -> None:
        self._seen = Counter[tuple[tuple[int, ...], int, int]]()

    def __call__(self, x: Tensor, weights: VisionWeights, scene: Scene) -> Iterator[None]:
        known = _known(x, weights, scene)
        module = _module(weights.hidden, weights.hidden // weights.heads, x.device) if known else None
        if module is None:
            return TORCH.vision(x, weights, scene)
        buffers = _TowerBuffers(module, x, weights, scene, self._uses_cudnn(weights, scene, x.device))
        return _blocks(buffers, weights, x.device)

    def _uses_cudnn(self, weights: VisionWeights, scene: Scene, device: torch.device) -> bool:
        """Counts a call. Returns True if images of these sizes came often, and cuDNN serves such heads."""
        key = (scene.sizes, weights.hidden, weights.heads)
        if len(set(scene.sizes)) > 1 or weights.hidden // weights.heads > 128:
            return False
        if torch.cuda.get_device_capability(device) < (9, 0):
            return False
        if key not in self._seen and len(self._seen) >= _CUDNN_SIZES:
            return False
        self._seen[key] += 1
        return self._seen[key] >= _CUDNN_AFTER


def _known(x: Tensor, weights: VisionWeights, scene: Scene) -> bool:
    head_dim = weights.hidden // weights.heads
    plain = all(isinstance(part.weight, Tensor) for layer in weights.layers
                for part in (layer.qkv, layer.out, layer.up, layer.down))
    return (plain and x.is_cuda and x.dtype == scene.dtype == torch.bfloat16
            and not weights.hidden % 8 and weights.hidden <= _MAX_HIDDEN
            and not head_dim % 8 and head_dim <= _MAX_HIDDEN // 16)


def _blocks(buffers: _TowerBuffers, weights: VisionWeights, device: torch.device) -> Iterator[None]:
    """Runs the tower. Yields after each layer, so that other work can run."""
    for layer in weights.layers:
        with torch.cuda.device(device):
            buffers.run(layer)
        yield
    buffers.add()


class _TowerBuffers:
    """The tensors of one call. cudnn: cuDNN computes the attention. This requires images of equal size."""

    def __init__(self, module: Module, x: Tensor, weights: VisionWeights, scene: Scene, cudnn: bool) -> None:
        self._module, self._x, self._weights, self._scene = module, x, weights, scene
        self._normed = torch.empty_like(x)
        self._delta: Tensor | None = None
        starts = [0, *(picture.stop for picture in scene.pictures())]
        self._starts = torch.tensor(starts, dtype=torch.int32).to(x.device, non_blocking=True)
        self._longest = max(scene.sizes)
        self._cudnn = cudnn

    def run(self, layer: EncoderLayer) -> None:
        mixed = self._attend(_vision_product(self._norm(layer.attention_norm), layer.qkv))
        self._delta = _vision_product(mixed, layer.out)
        normed, delta = self._norm(layer.output_norm), self._delta
        for start in range(0, len(normed), _SLICE):
            rows = slice(start, start + _SLICE)
            # the tower's GELU is the approximation by tanh
            wide = torch._addmm_activation(layer.up.bias, normed[rows], _matrix(layer.up).t(), use_gelu=True)
            torch.addmm(layer.down.bias, wide, _matrix(layer.down).t(), out=delta[rows])

    def add(self) -> None:
        """Adds the pending result of the last layer to x."""
        if self._delta is not None:
            self._x += self._delta

    def _norm(self, norm: LayerNorm) -> Tensor:
        """Adds the pending delta to x and returns the norm of the sum."""
        x = self._x
        self._module.launch("k_tower_norm", (-(-len(x) // 8),), 256, args.TowerNormArgs(
            x=x, delta=self._delta, scale=norm.scale, shift=norm.shift, y=self._normed, eps=self._weights.eps,
            tokens=len(x)))
        return self._normed

    def _attend(self, qkv: Tensor) -> Tensor:
        heads, scene = self._weights.heads, self._scene
        count = len(qkv) * 2 * self._weights.hidden // 8
        self._module.launch("k_turn", (-(-count // 256),), 256, args.TurnArgs(
            qkv=qkv, cos=scene.cos, sin=scene.sin, count=count, heads=heads))
        return self._mix(*qkv.view(len(qkv), 3, heads, -1).unbind(1))

    def _mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Computes attention [T, H] of query, key, value [T, heads, head_dim]."""
        if self._cudnn:
            count, size = len(self._scene.sizes), self._longest
            parts = [part.unflatten(0, (count, size)).transpose(1, 2) for part in (query, key, value)]
            mixed: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
                *parts, None, False, 0.0, False, False)[0]
            return mixed.transpose(1, 2).reshape(len(query), -1)
        flash: Tensor = torch.ops.aten._flash_attention_forward(
            query, key, value, self._starts, self._starts, self._longest, self._longest, 0.0, False, False)[0]
        return flash.flatten(1)


def _vision_product(x: Tensor, affine: Affine) -> Tensor:
    return torch.addmm(affine.bias, x, _matrix(affine).t())


def tower_source(hidden: int, head_dim: int) -> str:
    """Returns the CUDA source for a tower of this width."""
    return (headers("tower") + entry("turn", "Turn", "256", f"turn<{head_dim}>")
            + entry("tower_norm", "TowerNorm", "256", f"tower_norm<{hidden}>"))


@cache
def _module(hidden: int, head_dim: int, device: torch.device) -> Module | None:
    source = tower_source(hidden, head_dim)
    why = why_not_compiled(source, device)
    if why:
        log.warning("on the GPU torch serves the vision tower: %s", why)
    return None if why else load_module(source, device)
