"""Embedding, norms, linear layers, feed-forward, head, rotary tables and copies in plain torch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from deltic.ops.quantized import QTensor
from deltic.ops.reference import pointwise
from deltic.ops.slices import SLICES, expert_slices, slice_products, tree_sum
from deltic.ops.torch.adapters import AdaptedWeight
from deltic.ops.types import Block, MlpWeights, MoeWeights, Rope, RopeSpec, Weight

_PIECE: Final = 64
"""Number of weight rows in one product."""


def pack(weight: Tensor, table: bool) -> Block:
    """Reorders a bfloat16 weight on a CPU into oneDNN's blocked layout. This halves the time for few tokens, because
    F.linear reads the plain layout at half of the memory's speed."""
    fits = weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and not table
    if not fits or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return packed


def linear(x: Tensor, weight: Weight | AdaptedWeight) -> Tensor:
    """Returns x weightᵀ [T, out] for x [T, in], weight [out, in]."""
    if isinstance(weight, AdaptedWeight):
        return weight.add(linear(x, weight.weight), x)
    if isinstance(weight, tuple):
        return torch.cat([linear(x, block) for block in weight], dim=-1)
    if isinstance(weight, QTensor):
        return linear(x, weight.dequantize().to(x.dtype))
    if weight.is_mkldnn:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        return product
    if weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.float64):
        return _in_pieces(x, weight)
    return F.linear(x, weight)


def _in_pieces(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x weightᵀ as several products of one size. In one larger product, or a batch of one product, bits of a
    row depend on the number of weight rows, which shards split."""
    rows = len(weight)
    whole = rows - rows % _PIECE
    if whole < 2 * _PIECE:
        return _in_pieces(x, F.pad(weight, (0, 0, 0, 2 * _PIECE - rows)))[:, :rows].contiguous()
    pieces = x @ weight[:whole].unflatten(0, (-1, _PIECE)).transpose(1, 2)
    product = pieces.transpose(0, 1).flatten(1)
    return product if whole == rows else torch.cat((product, _in_pieces(x, weight[whole:])), 1)


def matmul(one: Tensor, other: Tensor) -> Tensor:
    """Returns the products of two batches of matrices [B, ..., rows, columns]. On a CPU it multiplies at least two
    pairs, because the library uses another order for a single pair."""
    if one.device.type != "cpu" or one.shape[:-2].numel() > 1:
        return one @ other
    return (torch.cat((one, one)) @ torch.cat((other, other)))[:1]


def row_parallel(x: Tensor, weight: Weight, shards: int = 1, runs: int = 1) -> Tensor:
    """Returns x weightᵀ [T, out], on a CPU summed in the order of `ops.slices`, for x [T, in], weight [out, in]. In x's
    dtype; for one of several shards in float32."""
    if shards == 1 and x.device.type != "cpu":
        return linear(x, weight)  # torch ops do not support split models there
    total = tree_sum(_sliced(x, weight, shards, runs))
    return total.to(x.dtype) if shards == 1 else total


def _sliced(x: Tensor, weight: Weight | AdaptedWeight, shards: int, runs: int = 1) -> list[Tensor]:
    """Returns the products of all slices. Adapters add their terms to the first one."""
    if not isinstance(weight, AdaptedWeight):
        return slice_products(_slice, x, weight, shards, runs)
    first, *others = slice_products(_slice, x, weight.weight, shards, runs)
    return [weight.add(first, x), *others]


def _slice(x: Tensor, weight: Block) -> Tensor:
    """Returns the product of one slice in float32."""
    assert isinstance(weight, Tensor)
    product = F.linear(x, weight.to(x.dtype))
    return product if x.dtype == torch.float64 else product.float()


def embed(ids: Tensor, weight: Block, dtype: torch.dtype) -> Tensor:
    return (weight.lookup(ids) if isinstance(weight, QTensor) else F.embedding(ids, weight)).to(dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis in float32, scaled by weight; float32 result."""
    x = x if x.dtype == torch.float64 else x.float()
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


def add_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if delta is not None:
        residual = residual + delta
    return residual, rms_norm(residual, weight, eps).to(residual.dtype)


def mlp(x: Tensor, weights: MlpWeights) -> Tensor:
    return row_parallel(_gated(x, weights), weights.down, weights.shards)


def _gated(x: Tensor, weights: MlpWeights) -> Tensor:
    gate, up = linear(x, weights.gate_up).chunk(2, dim=-1)
    return pointwise(F.silu, gate).mul_(up)


def moe(x: Tensor, weights: MoeWeights) -> Tensor:
    """Runs each expert once, on all tokens that are routed to it."""
    assert isinstance(weights.experts, tuple)
    logits, most = head(x, weights.router), weights.per_token
    count = logits.shape[1] - (weights.shared is not None)
    probabilities, order = torch.softmax(logits[:, :count], dim=-1).sort(dim=-1, descending=True, stable=True)
    shares, chosen = probabilities[:, :most], order[:, :most]
    if weights.normalised:
        shares = shares / shares.sum(-1, keepdim=True)
    chosen = chosen - weights.first
    passed = x.new_zeros(len(x), most, x.shape[1])
    for expert in chosen.unique().tolist():
        if 0 <= expert < len(weights.experts):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            own = _of(weights.experts[expert], token)
            passed[token, place] = linear(_gated(x[token], own), own.down)
    parts = _sum_slices(passed, shares, chosen, weights)
    if weights.shared is not None:
        gate = torch.sigmoid(logits[:, count:])
        products = _sliced(_gated(x, weights.shared), weights.shared.down, weights.shards)
        parts = [part + gate * product for part, product in zip(parts, products, strict=True)]
    total = tree_sum(parts)
    return total.to(x.dtype) if weights.shards == 1 else total


def _of(expert: MlpWeights, tokens: Tensor) -> MlpWeights:
    """Returns an expert's weights for products of only these tokens."""
    parts: list[Any] = [part.of(tokens) if isinstance(part, AdaptedWeight) else part
                        for part in (expert.gate_up, expert.down)]
    return replace(expert, gate_up=parts[0], down=parts[1])


def _sum_slices(passed: Tensor, shares: Tensor, chosen: Tensor, weights: MoeWeights) -> list[Tensor]:
    """Returns the sum over the experts of each slice, best first. passed [T, K, H]: outputs of the experts; 0 for
    experts of other shards."""
    count = len(weights.experts)
    slices = torch.tensor([*expert_slices(count, weights.shards), 0], device=chosen.device)
    slices = slices[torch.where((chosen >= 0) & (chosen < count), chosen, count)]
    sums = passed.new_zeros(SLICES // weights.shards, *passed[:, 0].shape, dtype=shares.dtype)
    tokens = torch.arange(len(passed), device=chosen.device)
    for place in range(passed.shape[1]):
        sums[slices[:, place], tokens] += shares[:, place, None] * passed[:, place]
    return list(sums)


def head(x: Tensor, weight: Weight) -> Tensor:
    logits = linear(x, weight)
    return logits if logits.dtype == torch.float64 else logits.float()


@cache
def frequencies(spec: RopeSpec, device: torch.device) -> Tensor:
    """Returns radians per position [rotary_dim / 2] float32. Cached: a CUDA graph may not copy from the host."""
    exponents = torch.arange(spec.rotary_dim // 2, device=device, dtype=torch.float32) * 2 / spec.rotary_dim
    plain = 1.0 / spec.theta**exponents
    return plain / torch.tensor(spec.factors, device=device) if spec.factors else plain


def rope(positions: Tensor, spec: RopeSpec) -> Rope:
    """Computes M-RoPE tables with interleaved frequencies of the three axes (Qwen3-VL report, arXiv 2511.21631)."""
    half, turns = spec.rotary_dim // 2, frequencies(spec, positions.device)
    angles = positions[0].float()[:, None] * turns
    if spec.sections:
        for axis in (1, 2):
            # a slice: a list of indices would be a copy from the host, which a CUDA graph cannot hold
            taken = slice(axis, min(3 * spec.sections[axis], half), 3)
            angles[:, taken] = positions[axis].float()[:, None] * turns[taken]
    angles = torch.cat((angles, angles), dim=-1).double()  # float32 cosines differ between libraries
    return Rope(angles.cos().float() * spec.attention_factor, angles.sin().float() * spec.attention_factor)


def put(pool: Tensor, index: Tensor, values: Tensor) -> None:
    """Sets pool[index] = values along the first axis, rounded to the pool's dtype. On a CPU it copies entry by entry,
    because torch scatters such large entries far below memory speed."""
    if pool.device.type != "cpu":
        pool.index_copy_(0, index, values.to(pool.dtype))
        return
    for place, value in zip(index.tolist(), values, strict=True):
        pool[place].copy_(value)


def copy(pools: tuple[Tensor, ...], source: Tensor, target: Tensor) -> None:
    """Copies entries `source` to `target` along the second axis of every pool."""
    for pool in pools:
        for layer in pool:
            put(layer, target, layer[source])
