"""Three functions of transformers' Qwen3.5 layers in forms that train faster.

Their values are the same; they pass over memory less often.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3_5 import modeling_qwen3_5

CHUNK = 64


def _inverse(lower: Tensor) -> Tensor:
    """(1 + L)^-1 for strictly lower triangular L, by halves; small blocks by their finite series."""
    size = lower.shape[-1]
    eye = torch.eye(size, dtype=lower.dtype, device=lower.device)
    if size <= 8:
        square = lower @ lower
        return (eye - lower) @ (eye + square) @ (eye + square @ square)
    half = size // 2
    corners = torch.stack([lower[..., :half, :half], lower[..., half:, half:]])
    first, second = _inverse(corners)
    below = -second @ lower[..., half:, :half] @ first
    above = torch.zeros_like(below)
    return torch.cat([torch.cat([first, above], -1), torch.cat([below, second], -1)], -2)


class _Inverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lower: Tensor) -> Tensor:
        inverse = _inverse(lower)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        turned = inverse.transpose(-1, -2)
        return -(turned @ grad @ turned).tril(-1)


def _chunks(x: Tensor) -> Tensor:
    """[batch, length, heads, ...] as [batch, heads, chunk, CHUNK, ...]."""
    batch, length, heads = x.shape[:3]
    x = x.float().reshape(batch, length // CHUNK, CHUNK, heads, *x.shape[3:])
    return x.movedim(3, 1)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _within(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """All that the chunks can do without the state that enters them."""
    q, k, v, g, beta = (_chunks(x) for x in (q, k, v, g, beta))
    q, k = _unit(q) * q.shape[-1] ** -0.5, _unit(k)
    total = g.cumsum(-1)
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).tril()
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~causal, -torch.inf).exp()
    k_beta = k * beta.unsqueeze(-1)
    lower = (k_beta @ k.transpose(-1, -2) * decay).tril(-1)
    reads = q @ k.transpose(-1, -2) * decay
    into = total.exp().unsqueeze(-1)
    last = total[..., -1:]
    k_out = k * (last - total).exp().unsqueeze(-1)
    return lower, reads, v * beta.unsqueeze(-1), k_beta * into, q * into, k_out, last.exp().unsqueeze(-1)


def _across(u: Tensor, w: Tensor, k_out: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Walk the chunks: the state that enters each, and the values each writes."""
    state = torch.zeros_like(u[:, :, 0, : w.shape[-1]])
    states, written = [], []
    for u_i, w_i, k_i, keep_i in zip(u.unbind(2), w.unbind(2), k_out.unbind(2), keep.unbind(2), strict=True):
        states.append(state)
        written.append(u_i - w_i @ state)
        state = state * keep_i + k_i.transpose(-1, -2) @ written[-1]
    return torch.stack(states, 2), torch.stack(written, 2)


def chunk_gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """transformers' function of this name, from an empty state and for lengths that CHUNK divides."""
    heads = value.shape[2]
    if key.shape[2] != heads:
        query, key = (x.repeat_interleave(heads // key.shape[2], dim=2) for x in (query, key))
    lower, reads, v_beta, k_in, q_in, k_out, keep = _within(query, key, value, g, beta)
    inverse = _Inverse.apply(lower)
    states, written = _across(inverse @ v_beta, inverse @ k_in, k_out, keep)
    out = q_in @ states + reads @ written
    return out.movedim(1, 3).reshape(value.shape).to(value.dtype), None


def norm(self: nn.Module, x: Tensor) -> Tensor:
    """Qwen3_5RMSNorm.forward."""
    return F.rms_norm(x, x.shape[-1:], 1.0 + self.weight, self.eps)


def gated_norm(self: nn.Module, x: Tensor, gate: Tensor) -> Tensor:
    """Qwen3_5RMSNormGated.forward."""
    return F.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon) * F.silu(gate)


def install() -> None:
    """Let transformers' layers use these functions."""
    modeling_qwen3_5.torch_chunk_gated_delta_rule = chunk_gated_delta_rule
    modeling_qwen3_5.Qwen3_5RMSNorm.forward = norm
    modeling_qwen3_5.Qwen3_5RMSNormGated.forward = gated_norm
