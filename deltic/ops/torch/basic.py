"""Embedding, norms, linear layers, feed-forward, head, rotary tables and copies in plain torch."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from deltic.ops.quantized import QTensor
from deltic.ops.types import Block, MlpWeights, MoeWeights, Rope, RopeSpec, Weight


def pack(weight: Tensor, table: bool) -> Block:
    """Reorders bfloat16 on a CPU into oneDNN's blocked layout, which takes half the time for few tokens: F.linear reads
    the plain layout at half of the memory's speed."""
    fits = weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and not table
    if not fits or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return packed


def linear(x: Tensor, weight: Weight) -> Tensor:
    """x [T, in], weight [out, in] -> x weightᵀ [T, out]."""
    if isinstance(weight, tuple):
        return torch.cat([linear(x, block) for block in weight], dim=-1)
    if isinstance(weight, QTensor):
        return F.linear(x, weight.dequantize().to(x.dtype))
    if weight.is_mkldnn:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        return product
    return F.linear(x, weight)


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
    gate, up = linear(x, weights.gate_up).chunk(2, dim=-1)
    return linear(F.silu(gate).mul_(up), weights.down)


def moe(x: Tensor, weights: MoeWeights) -> Tensor:
    """Runs each expert once, on all tokens that pass it."""
    assert isinstance(weights.experts, tuple)
    logits, count, most = head(x, weights.router), len(weights.experts), weights.per_token
    probabilities, order = torch.softmax(logits[:, :count], dim=-1).sort(dim=-1, descending=True, stable=True)
    shares, chosen = probabilities[:, :most], order[:, :most]
    if weights.normalised:
        shares = shares / shares.sum(-1, keepdim=True)
    passed = x.new_empty(len(x), most, x.shape[1])
    for expert in chosen.unique().tolist():
        token, place = (chosen == expert).nonzero(as_tuple=True)
        passed[token, place] = mlp(x[token], weights.experts[expert])
    total = (passed * shares[..., None]).sum(1)
    if weights.shared is not None:
        total = total + torch.sigmoid(logits[:, count:]) * mlp(x, weights.shared)
    return total.to(x.dtype)


def head(x: Tensor, weight: Weight) -> Tensor:
    logits = linear(x, weight)
    return logits if logits.dtype == torch.float64 else logits.float()


@cache
def frequencies(spec: RopeSpec, device: torch.device) -> Tensor:
    """Radians per position [rotary_dim / 2] float32. Cached: a CUDA graph may not copy from the host."""
    exponents = torch.arange(spec.rotary_dim // 2, device=device, dtype=torch.float32) * 2 / spec.rotary_dim
    plain = 1.0 / spec.theta**exponents
    return plain / torch.tensor(spec.factors, device=device) if spec.factors else plain


def rope(positions: Tensor, spec: RopeSpec) -> Rope:
    """M-RoPE tables; frequencies of the three axes are interleaved (Qwen3-VL report, arXiv 2511.21631)."""
    half, turns = spec.rotary_dim // 2, frequencies(spec, positions.device)
    angles = positions[0].float()[:, None] * turns
    if spec.sections:
        for axis in (1, 2):
            # a slice: a list of indices would be a copy from the host, which a CUDA graph cannot hold
            taken = slice(axis, min(3 * spec.sections[axis], half), 3)
            angles[:, taken] = positions[axis].float()[:, None] * turns[taken]
    angles = torch.cat((angles, angles), dim=-1).double()  # float32 cosines differ between libraries
    return Rope(angles.cos().float(), angles.sin().float())


def put(pool: Tensor, index: Tensor, values: Tensor) -> None:
    """pool[index] = values along the first axis, rounded to the pool's dtype. On a CPU entry by entry: torch scatters
    entries this large far below the speed of memory."""
    if pool.device.type != "cpu":
        pool.index_copy_(0, index, values.to(pool.dtype))
        return
    for place, value in zip(index.tolist(), values, strict=True):
        pool[place].copy_(value)


def copy(pools: tuple[Tensor, ...], source: Tensor, target: Tensor) -> None:
    """Copies entries of the second axis of every pool."""
    for pool in pools:
        for layer in pool:
            put(layer, target, layer[source])
