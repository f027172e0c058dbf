"""The gated delta rule over packed conversations, in chunks, as training needs it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 64
FORGET = -100.0  # the logarithm of a decay that leaves nothing


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


@torch.library.custom_op("tiny::inverse", mutates_args=())
def inverse(lower: Tensor) -> Tensor:
    """(1 + L)^-1 for strictly lower triangular L [..., CHUNK, CHUNK]."""
    return _inverse(lower).contiguous()


@torch.library.custom_op("tiny::inverse_backward", mutates_args=())
def _inverse_backward(grad: Tensor, made: Tensor) -> Tensor:
    turned = made.transpose(-1, -2)
    return -(turned @ grad @ turned).tril(-1)


@torch.library.custom_op("tiny::scan", mutates_args=())
def scan(keep: Tensor, turn: Tensor, write: Tensor) -> Tensor:
    """The state that enters each chunk: nothing, then keep * state + turn @ state + write of the chunk before.

    `keep` [chunks, n, 1, 1], `turn` [chunks, n, k, k], `write` [chunks, n, k, v]; the result is like `write`.
    """
    states = torch.zeros_like(write)
    for i in range(len(write) - 1):
        torch.baddbmm(torch.addcmul(write[i], keep[i], states[i]), turn[i], states[i], out=states[i + 1])
    return states


@torch.library.custom_op("tiny::scan_backward", mutates_args=())
def _scan_backward(grad: Tensor, keep: Tensor, turn: Tensor) -> Tensor:
    """The gradient of what each chunk writes, which is that of the state after it."""
    after = torch.zeros_like(grad)
    for i in range(len(grad) - 1, 0, -1):
        total = torch.addcmul(grad[i], keep[i], after[i])
        torch.baddbmm(total, turn[i].transpose(-1, -2), after[i], out=after[i - 1])
    return after


inverse.register_fake(torch.empty_like)
_inverse_backward.register_fake(lambda grad, made: torch.empty_like(made))
scan.register_fake(lambda keep, turn, write: torch.empty_like(write))
_scan_backward.register_fake(lambda grad, keep, turn: torch.empty_like(grad))


def _keep_inverse(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _inverse_grad(ctx: Any, grad: Tensor) -> Tensor:
    return _inverse_backward(grad.contiguous(), *ctx.saved_tensors)


def _keep_scan(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output)


def _scan_grad(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    keep, turn, states = ctx.saved_tensors
    after = _scan_backward(grad.contiguous(), keep, turn)
    return (after * states).sum((-1, -2), keepdim=True), after @ states.transpose(-1, -2), after


inverse.register_autograd(_inverse_grad, setup_context=_keep_inverse)
scan.register_autograd(_scan_grad, setup_context=_keep_scan)


def _chunks(x: Tensor) -> Tensor:
    """[rows, width, heads, ...] as [chunks, rows * heads, CHUNK, ...] in fp32."""
    rows, width, heads = x.shape[:3]
    x = x.float().reshape(rows, width // CHUNK, CHUNK, heads, *x.shape[3:])
    return x.movedim(1, 0).movedim(3, 2).flatten(1, 2)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


@torch.autocast("cuda", enabled=False)
def gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, first: Tensor) -> Tensor:
    """What transformers' function of this name gives for each conversation alone.

    `query`, `key` [rows, width, key heads, k], `value` [rows, width, heads, v], `g` (log decay) and `beta`
    [rows, width, heads]; `first` [rows, width] marks where a conversation begins. CHUNK divides the width.
    """
    rows, _, heads, _ = value.shape
    query, key = (x.repeat_interleave(heads // key.shape[2], dim=2) for x in (query, key))
    q, k, v, beta = (_chunks(x) for x in (query, key, value, beta))
    q, k = _unit(q) * q.shape[-1] ** -0.5, _unit(k)
    total = _chunks(g.float().masked_fill(first.unsqueeze(-1), FORGET)).cumsum(-1)
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).tril()
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~causal, -torch.inf).exp()
    k_beta = k * beta.unsqueeze(-1)
    made = inverse((k_beta @ k.transpose(-1, -2) * decay).tril(-1))
    reads = q @ k.transpose(-1, -2) * decay
    into = total.exp().unsqueeze(-1)
    last = total[..., -1:]
    k_out = (k * (last - total).exp().unsqueeze(-1)).transpose(-1, -2)
    u, w = made @ (v * beta.unsqueeze(-1)), made @ (k_beta * into)
    states = scan(last.exp().unsqueeze(-1), -(k_out @ w), k_out @ u)
    out = (q * into) @ states + reads @ (u - w @ states)
    return out.unflatten(1, (rows, heads)).movedim(2, 3).movedim(0, 1).reshape(value.shape)
