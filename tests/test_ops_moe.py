"""Mixtures of experts: every backend as the oracle; a token's result is its own, to the bit; who is chosen on a tie."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from op_cases import generator, randn
from torch import Tensor

from deltic.loader.gguf.blocks import BY_NAME
from deltic.loader.gguf.quantize import _ENCODERS, quantize
from deltic.ops import Ops, backends, reference
from deltic.ops.cpu import missing, overlay
from deltic.ops.memory import Arena
from deltic.ops.quantized import QTensor, pack_rows
from deltic.ops.types import Block, MlpWeights, MoeWeights, Weight

needs_kernels = pytest.mark.skipif(bool(missing()), reason=str(missing()))
BACKENDS = ["torch", pytest.param("cpu", marks=needs_kernels)]
SHAPES = [(5, 1, 20, 28, 40), (5, 5, 7, 7, 13), (60, 9, 33, 5, 44), (17, 4, 16, 0, 32), (1, 1, 3, 4, 5)]
"""Experts, how many a token passes, rows of each, of the shared one, hidden size."""


def weights_of(shape: tuple[int, int, int, int, int], seed: int = 0, normalised: bool = True) -> MoeWeights:
    """Random weights, float32."""
    count, most, inner, shared, hidden = shape
    rng = generator(seed)

    def mlp(rows: int) -> MlpWeights:
        return MlpWeights(randn(rng, 2 * rows, hidden).float() * hidden**-0.5, randn(rng, hidden, rows).float())

    router = randn(rng, count + (shared > 0), hidden).float()
    experts = tuple(mlp(inner) for _ in range(count))
    return MoeWeights(router, experts, mlp(shared) if shared else None, most, normalised)


def mapped(weights: MoeWeights, change: object) -> MoeWeights:
    """The same with every matrix changed."""
    def of(part: MlpWeights) -> MlpWeights:
        return MlpWeights(change(part.gate_up), change(part.down))  # type: ignore[operator]

    return replace(weights, router=change(weights.router), experts=tuple(map(of, weights.experts)),  # type: ignore[operator]
                   shared=weights.shared and of(weights.shared))


def packed(weights: MoeWeights, ops: Ops) -> MoeWeights:
    return mapped(weights, lambda matrix: ops.pack(matrix, False))


def tokens_of(count: int, hidden: int, seed: int = 1) -> Tensor:
    return randn(generator(seed), count, hidden).float()


@pytest.mark.covering
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_moe_matches_the_reference(backend: str, shape: tuple[int, int, int, int, int], normalised: bool) -> None:
    ops, weights = backends()[backend], weights_of(shape, normalised=normalised)
    for count in (0, 1, 2, 9, 70):
        x = tokens_of(count, shape[-1])
        expected, found = reference.moe(x, weights), ops.moe(x, packed(weights, ops))
        assert found.shape == expected.shape and found.dtype == x.dtype
        assert torch.allclose(found, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(backend: str, dtype: torch.dtype) -> None:
    ops, weights = backends()[backend], mapped(weights_of(SHAPES[2]), lambda matrix: matrix.to(dtype))
    x = tokens_of(30, 44).to(dtype)
    expected = reference.moe(x.float(), mapped(weights, lambda matrix: matrix.float()))
    found = ops.moe(x, packed(weights, ops))
    assert found.dtype == dtype
    assert float((found.float() - expected).abs().mean() / expected.abs().mean()) < 0.01


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
def test_ties_choose_the_lower_expert(backend: str) -> None:
    """The experts give their own number; all logits are equal, but for one."""
    ops, hidden = backends()[backend], 16
    router = torch.zeros(7, hidden)
    router[5, 0] = 1.0
    ones = torch.zeros(2, hidden)
    ones[:, 0] = torch.tensor([50.0, 1.0])  # silu(50) is 50
    down = [torch.full((hidden, 1), float(number)) / 50 for number in range(7)]
    weights = MoeWeights(router, tuple(MlpWeights(ones, matrix) for matrix in down), None, 3, False)
    x = torch.zeros(1, hidden)
    x[0, 0] = 1.0
    found = float(ops.moe(x, packed(weights, ops))[0, 3])
    shares = torch.softmax(router @ x[0], 0)
    assert found == pytest.approx(float(shares[5] * 5 + shares[0] * 0 + shares[1] * 1), rel=1e-5)


KINDS = [name for name in _ENCODERS if name not in ("F32", "F16", "BF16")]


def quantized(weights: MoeWeights, kind: str) -> MoeWeights:
    """Packed as in a GGUF file: gate and up by themselves, the router in float32."""
    arena = Arena()

    def pack(matrix: Tensor, type: str = kind) -> QTensor:
        raw = quantize(matrix.numpy(), BY_NAME[type]).reshape(-1)
        size = len(raw) // len(matrix)
        return pack_rows(type, BY_NAME[type].id, *matrix.shape, size, lambda start, count: raw[start:start + count],
                         arena)

    def of(part: MlpWeights) -> MlpWeights:
        assert isinstance(part.gate_up, Tensor) and isinstance(part.down, Tensor)
        return MlpWeights(tuple(pack(half) for half in part.gate_up.chunk(2)), pack(part.down))

    assert isinstance(weights.router, Tensor)
    return replace(weights, router=pack(weights.router, "F32"), experts=tuple(map(of, weights.experts)),
                   shared=weights.shared and of(weights.shared))


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_every_quantized_type(kind: str) -> None:
    weights = quantized(weights_of((6, 2, 256, 512, 256)), kind)
    x = tokens_of(13, 256)
    found, expected = overlay(threads=2).moe(x, weights), reference.moe(x, weights)
    assert float((found - expected).norm() / expected.norm()) < 0.02


@needs_kernels
@pytest.mark.parametrize("threads", [2, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q4_K", "Q6_K"])
def test_token_bits_do_not_depend_on_batch(kind: str, threads: int) -> None:
    shape = (12, 3, 256, 512, 256)
    plain = weights_of(shape)
    if kind in ("F32", "BF16"):
        dtype = torch.float32 if kind == "F32" else torch.bfloat16
        weights = packed(mapped(plain, lambda matrix: matrix.to(dtype)), overlay())
    else:
        weights = quantized(plain, kind)
    x = tokens_of(61, 256)
    alone = torch.cat([overlay().moe(x[token:token + 1], weights) for token in range(len(x))])
    ops = overlay(threads=threads)
    assert torch.equal(ops.moe(x, weights), alone)
    order = torch.randperm(len(x), generator=generator(3))
    assert torch.equal(ops.moe(x[order], weights), alone[order])
    for size in (2, 7, 24):
        assert torch.equal(torch.cat([ops.moe(part.contiguous(), weights) for part in x.split(size)]), alone)


@needs_kernels
def test_many_rows_are_computed_in_parts() -> None:
    """5,400 rows of experts, of which at most 4,096 are computed at a time."""
    weights, x = packed(weights_of(SHAPES[2]), overlay()), tokens_of(600, 44)
    assert torch.equal(overlay(threads=2).moe(x, weights), torch.cat([overlay().moe(part.contiguous(), weights)
                                                                      for part in x.split(100)]))
    one = replace(weights, experts=weights.experts[:1], router=packed(weights_of((1, 1, 3, 5, 44)), overlay()).router,
                  per_token=1)
    many = tokens_of(4200, 44)
    assert torch.equal(overlay().moe(many, one)[4100:], overlay().moe(many[4100:].contiguous(), one))


@needs_kernels
def test_levels_agree() -> None:
    from deltic.ops.cpu.library import LEVELS, library

    weights, x = quantized(weights_of((6, 2, 256, 256, 256)), "Q4_K"), tokens_of(9, 256)
    best = overlay().moe(x, weights)
    for level in LEVELS[:library().deltic_best_level()]:
        assert torch.allclose(overlay(level).moe(x, weights), best, rtol=1e-3, atol=1e-3), level


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_token_changes_no_other_token(backend: str, bad: float) -> None:
    ops, weights = backends()[backend], weights_of(SHAPES[0])
    x = tokens_of(9, 40)
    expected = ops.moe(x, packed(weights, ops))
    x[4, 7] = bad
    found = ops.moe(x, packed(weights, ops))
    others = [token for token in range(9) if token != 4]
    assert not bool(found[4].isfinite().all())
    assert torch.allclose(found[others], expected[others], rtol=1e-5, atol=1e-6)


def test_block_sizes() -> None:
    """The oracle reads the packed forms of the others."""
    if missing():
        pytest.skip(str(missing()))
    weights = weights_of(SHAPES[0])
    x = tokens_of(4, 40)
    blocks: list[Weight | Block] = [packed(weights, overlay()).router]
    assert isinstance(blocks[0], QTensor)
    assert torch.allclose(reference.moe(x, packed(weights, overlay())), reference.moe(x, weights), atol=1e-5)
    assert np.isfinite(x.numpy()).all()
