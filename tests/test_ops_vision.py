"""The blocks of a vision tower: every backend and level against the reference, and one sum order for a patch (L5)."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from native_pools import best_level
from torch import Tensor

from deltic.ops import backends, reference
from deltic.ops.cpu import encoder as compiled
from deltic.ops.cpu import missing
from deltic.ops.cpu.library import ThreadPool
from deltic.ops.encoder import Affine, EncoderLayer, LayerNorm, Scene, VisionWeights

SHAPES = {"heads of 4": (1, 4, 10, (1, 2, 3)), "of 12": (5, 12, 33, (13, 1, 40)), "of 64": (3, 64, 96, (481, 12)),
          "of 72": (2, 72, 64, (130, 1030)), "of 40": (2, 40, 50, (960, 17))}
"""Heads, numbers of a head, width of the feed-forward, patches of each picture: around the kernels' blocks."""


def tower(heads: int, dim: int, inner: int, sizes: tuple[int, ...], dtype: torch.dtype = torch.float32
          ) -> tuple[Tensor, VisionWeights, Scene]:
    generator, hidden = torch.Generator().manual_seed(heads * dim), heads * dim

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(*shape, generator=generator)

    def affine(rows: int, columns: int, scale: float = 1.0) -> Affine:
        return Affine(normal(rows, columns, scale=scale * columns ** -0.5).to(dtype), normal(rows))

    def norm() -> LayerNorm:
        return LayerNorm(normal(hidden), normal(hidden))

    layers = tuple(EncoderLayer(affine(3 * hidden, hidden, 2.0), affine(hidden, hidden), norm(), affine(inner, hidden),
                                affine(hidden, inner), norm()) for _ in range(2))
    angles = normal(sum(sizes), dim // 2, scale=3.0)
    scene = Scene(sizes, angles.cos(), angles.sin(), dtype)
    return normal(sum(sizes), hidden), VisionWeights(layers, heads, 1e-6), scene


def packed(weights: VisionWeights) -> VisionWeights:
    pack = backends()["cpu"].pack

    def of(affine: Affine) -> Affine:
        assert isinstance(affine.weight, Tensor)
        return Affine(pack(affine.weight, False), affine.bias)

    layers = tuple(EncoderLayer(of(layer.qkv), of(layer.out), layer.attention_norm, of(layer.up), of(layer.down),
                                layer.output_norm) for layer in weights.layers)
    return VisionWeights(layers, weights.heads, weights.eps)


@cache
def exact(shape: str) -> Tensor:
    """In float64, by the reference."""
    x, weights, scene = tower(*SHAPES[shape])
    result = x.double()
    for _ in reference.vision(result, weights, scene):
        pass
    return result


def difference(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("shape", SHAPES)
def test_in_torch(shape: str) -> None:
    x, weights, scene = tower(*SHAPES[shape])
    wanted = exact(shape)
    for _ in backends()["torch"].vision(x, weights, scene):
        pass
    assert difference(x, wanted) < 1e-5


@pytest.mark.skipif(bool(missing()), reason=str(missing()))
@pytest.mark.parametrize("shape", SHAPES)
def test_at_every_level(shape: str) -> None:
    x, plain, scene = tower(*SHAPES[shape])
    wanted, weights = exact(shape), packed(plain)
    narrow = Scene(scene.sizes, scene.cos, scene.sin, torch.bfloat16)
    for level in range(best_level() + 1):
        threads = ThreadPool(level, 2)
        assert run(threads, x.clone(), weights, scene, wanted) < 2e-5, level
        assert run(threads, x.clone(), weights, narrow, wanted) < 2e-2, level


def run(threads: ThreadPool, x: Tensor, weights: VisionWeights, scene: Scene, wanted: Tensor) -> float:
    slices = sum(1 for _ in compiled.vision(threads, x, weights, scene))
    assert slices >= 2 * (2 + len(scene.sizes)), "the work of the kernels comes in slices"
    return difference(x, wanted)


@pytest.mark.skipif(bool(missing()), reason=str(missing()))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_slices_or_other_images(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x, plain, scene = tower(3, 64, 96, (481, 1500), dtype)
    weights, alone = packed(plain), x[481:].clone()
    together = x.clone()
    list(compiled.vision(ThreadPool(best_level(), 2), together, weights, scene))
    monkeypatch.setattr("deltic.ops.cpu.encoder._SLICE", 1e7)
    monkeypatch.setattr("deltic.ops.cpu.encoder._QUERIES", 96)
    part = Scene((1500,), scene.cos[481:], scene.sin[481:], dtype)
    assert sum(1 for _ in compiled.vision(ThreadPool(best_level(), 1), alone, weights, part)) > 100
    assert torch.equal(alone, together[481:])
