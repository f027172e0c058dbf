"""The torch ops with compiled kernels where a step has few tokens: there torch spends its time on calls, and reads the
head's matrix at half of the memory's speed. Everything else falls to torch."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from deltic.ops.cpu.library import GdnStep, load
from deltic.ops.records import Batch, GdnWeights, MlpWeights, StateView, Weight
from deltic.ops.torch import OPS as TORCH
from deltic.ops.torch.basic import linear

_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_FEW = 16
"""Tokens up to which one thread in compiled code beats torch's many calls."""
_HEAD_TOKENS = 64
_AT_ONCE = 8
"""Tokens that share one reading of the head's matrix."""


def _library() -> ctypes.CDLL:
    library = load()
    assert not isinstance(library, str), library
    return library


def add_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    kind = _TYPES.get(residual.dtype)
    if kind is None or residual.shape[0] > _FEW or not residual.is_contiguous():
        return TORCH.add_norm(residual, delta, weight, eps)
    if delta is not None and not delta.is_contiguous():
        delta = delta.contiguous()
    total = residual if delta is None else torch.empty_like(residual)
    normed = torch.empty_like(residual)
    _library().deltic_add_norm(residual.data_ptr(), None if delta is None else delta.data_ptr(), weight.data_ptr(),
                               total.data_ptr(), normed.data_ptr(), *residual.shape, eps, kind)
    return total, normed


def mlp(x: Tensor, weights: MlpWeights) -> Tensor:
    kind = _TYPES.get(x.dtype)
    if kind is None or x.shape[0] > _FEW:
        return TORCH.mlp(x, weights)
    both = linear(x, weights.gate_up)
    gated = both.new_empty(both.shape[0], both.shape[1] // 2)
    _library().deltic_silu_mul(both.data_ptr(), gated.data_ptr(), *gated.shape, kind)
    return linear(gated, weights.down)


def head(x: Tensor, weight: Weight) -> Tensor:
    if (isinstance(weight, tuple) or weight.is_mkldnn or weight.dtype != torch.bfloat16 or x.shape[1] % 64
            or x.shape[0] > _HEAD_TOKENS or not weight.is_contiguous()):
        return TORCH.head(x, weight)
    logits = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32)
    for tokens, rows in zip(x.contiguous().split(_AT_ONCE), logits.split(_AT_ONCE), strict=True):
        if len(tokens):
            _library().deltic_linear_bf16(tokens.data_ptr(), weight.data_ptr(), rows.data_ptr(), len(tokens),
                                          *weight.shape, torch.get_num_threads())
    return logits


def gdn_mixer(x: Tensor, weights: GdnWeights, state: StateView, batch: Batch) -> Tensor:
    kind = _TYPES.get(x.dtype)
    if kind is None or state.conv.dtype != x.dtype or not _plain(batch):
        return TORCH.gdn_mixer(x, weights, state, batch)
    spec, proj = weights.spec, linear(x, weights.in_proj)
    mixed = x.new_empty(x.shape[0], spec.values)
    step = GdnStep(
        x.shape[0], spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim, spec.conv_kernel,
        state.conv.shape[1], proj.stride(0), kind, spec.eps, proj.data_ptr(), weights.conv.data_ptr(),
        weights.decay.data_ptr(), weights.dt_bias.data_ptr(), weights.norm.data_ptr(), batch.target.data_ptr(),
        batch.done.data_ptr(), state.recurrent.data_ptr(), state.conv.data_ptr(), mixed.data_ptr())
    _library().deltic_gdn_step(ctypes.byref(step))
    return linear(mixed, weights.out_proj)


def _plain(batch: Batch) -> bool:
    """Whether every row has one token and moves its own slot, with nothing to fold or emit."""
    plain = batch.memo.get("plain")
    if plain is None:
        layout = batch.layout
        plain = batch.memo["plain"] = (
            layout.singles == layout.rows and not layout.emits and not layout.appends
            and torch.equal(batch.source, batch.target) and torch.equal(batch.base, batch.done))
    return bool(plain)
