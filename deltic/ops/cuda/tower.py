"""The blocks of a vision tower: products by cuBLAS, attention by what torch has, all between by kernels of our own."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from deltic.ops.cuda import arguments as args
from deltic.ops.cuda.driver import Module, architecture
from deltic.ops.cuda.kernel_config import entry
from deltic.ops.cuda.nvrtc import CompileError, compile_source, headers
from deltic.ops.encoder_layers import Affine, EncoderLayer, LayerNorm, Scene, VisionWeights
from deltic.ops.torch import OPS as TORCH

log = logging.getLogger("deltic")

_SLICE = 1 << 16
"""Patches that pass the feed-forward at once: bounds the memory of many pictures."""
_WIDEST = 4096
"""Numbers of a patch, and of a head a sixteenth as many: what a warp holds in registers."""
_OFTEN, _SIZES = 4, 64
"""From which time on attention of pictures of one size is cuDNN's, which takes half the time, but has to build a
program for every size first (some 50 ms); and for how many sizes it does."""


class VisionOp:
    """The op, which knows which pictures came to it."""

    def __init__(self) -> None:
        self._seen = Counter[tuple[tuple[int, ...], int, int]]()

    def __call__(self, x: Tensor, weights: VisionWeights, scene: Scene) -> Iterator[None]:
        dim = weights.hidden // weights.heads
        plain = all(isinstance(part.weight, Tensor) for layer in weights.layers
                    for part in (layer.qkv, layer.out, layer.up, layer.down))
        known = (plain and x.is_cuda and x.dtype == scene.dtype == torch.bfloat16 and not weights.hidden % 8
                 and weights.hidden <= _WIDEST and not dim % 8 and dim <= _WIDEST // 16)
        module = _module(weights.hidden, dim, x.device) if known else None
        if module is None:
            return TORCH.vision(x, weights, scene)
        return _blocks(
            _TowerBuffers(module, x, weights, scene, self._often(weights, scene, x.device)), weights, x.device
        )

    def _often(self, weights: VisionWeights, scene: Scene, device: torch.device) -> bool:
        """Whether pictures of these sizes come often, and cuDNN knows such heads."""
        key = (scene.sizes, weights.hidden, weights.heads)
        if (len(set(scene.sizes)) > 1 or weights.hidden // weights.heads > 128
                or torch.cuda.get_device_capability(device) < (9, 0)
                or (key not in self._seen and len(self._seen) >= _SIZES)):
            return False
        self._seen[key] += 1
        return self._seen[key] >= _OFTEN


def _blocks(work: _TowerBuffers, weights: VisionWeights, device: torch.device) -> Iterator[None]:
    """A block is a slice of the work."""
    for layer in weights.layers:
        with torch.cuda.device(device):
            work.run(layer)
        yield
    work.add()


class _TowerBuffers:
    """What one call has between its products. often: pictures of these sizes, all the same, came often."""

    def __init__(self, module: Module, x: Tensor, weights: VisionWeights, scene: Scene, often: bool) -> None:
        self._module, self._x, self._weights, self._scene = module, x, weights, scene
        self._normed = torch.empty_like(x)
        self._delta: Tensor | None = None
        starts = [0, *(picture.stop for picture in scene.pictures())]
        self._starts = torch.tensor(starts, dtype=torch.int32).to(x.device, non_blocking=True)
        self._longest = max(scene.sizes)
        self._often = often

    def run(self, layer: EncoderLayer) -> None:
        mixed = self._attend(_product(self._norm(layer.attention_norm), layer.qkv))
        self._delta = _product(mixed, layer.out)
        normed, delta = self._norm(layer.output_norm), self._delta
        for rows in (slice(start, start + _SLICE) for start in range(0, len(normed), _SLICE)):
            # the tanh form of gelu, which is the tower's
            inner = torch._addmm_activation(layer.up.bias, normed[rows], _matrix(layer.up).t(), use_gelu=True)
            torch.addmm(layer.down.bias, inner, _matrix(layer.down).t(), out=delta[rows])

    def add(self) -> None:
        """What the last block gave."""
        if self._delta is not None:
            self._x += self._delta

    def _norm(self, norm: LayerNorm) -> Tensor:
        """The sum so far, normed."""
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
        """[T, H] of queries, keys and values [T, heads, D]."""
        if self._often:
            count, size = len(self._scene.sizes), self._longest
            parts = [part.unflatten(0, (count, size)).transpose(1, 2) for part in (query, key, value)]
            mixed: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
                *parts, None, False, 0.0, False, False)[0]
            return mixed.transpose(1, 2).reshape(len(query), -1)
        found: Tensor = torch.ops.aten._flash_attention_forward(
            query, key, value, self._starts, self._starts, self._longest, self._longest, 0.0, False, False)[0]
        return found.flatten(1)


def _matrix(affine: Affine) -> Tensor:
    assert isinstance(affine.weight, Tensor)
    return affine.weight


def _product(x: Tensor, affine: Affine) -> Tensor:
    return torch.addmm(affine.bias, x, _matrix(affine).t())


def tower_source(hidden: int, dim: int) -> str:
    """The text of the kernels for a tower of this width, with heads of that."""
    return (headers("tower") + entry("turn", "Turn", "256", f"turn<{dim}>")
            + entry("tower_norm", "TowerNorm", "256", f"tower_norm<{hidden}>"))


@cache
def _module(hidden: int, dim: int, device: torch.device) -> Module | None:
    """None where the kernels cannot be compiled."""
    source = tower_source(hidden, dim)
    try:
        compile_source(source, architecture(device))
    except CompileError as error:
        log.warning("on the GPU torch serves the vision tower: the kernels cannot be compiled: %s", error)
        return None
    return Module(source, device)
