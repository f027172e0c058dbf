"""The ops on compiled kernels, which compute in float32 whatever the model's dtype is. Each takes the pool that it runs
on first; bound to one, it has the signature that `Ops` says."""

from __future__ import annotations

from ctypes import byref
from typing import Any

import torch
from torch import Tensor

from deltic.ops.cpu.library import (
    KINDS,
    AttentionLayer,
    Expert,
    GdnLayer,
    Kv,
    LinearWeight,
    MatrixStruct,
    MoeLayer,
    States,
    ThreadPool,
    address,
    library,
    step_batch,
)
from deltic.ops.quantized import QTensor, pack_tensor
from deltic.ops.torch import OPS as TORCH
from deltic.ops.torch.basic import linear as torch_linear
from deltic.ops.torch.gdn import core as torch_core
from deltic.ops.types import (
    AttentionSpec,
    AttentionWeights,
    Batch,
    Block,
    ExpertPool,
    GdnWeights,
    KvView,
    MlpWeights,
    MoeWeights,
    Rope,
    StateView,
    Weight,
)


def pack(pool: ThreadPool, weight: Tensor, table: bool) -> Block:
    return pack_tensor(weight, pool.arena) if weight.dtype in KINDS and weight.device.type == "cpu" else weight


def packed(weight: Weight) -> bool:
    """Whether the kernels can multiply with it."""
    return all(isinstance(block, QTensor) for block in (weight if isinstance(weight, tuple) else (weight,)))


def native_weight(weight: Weight) -> LinearWeight:
    """The struct of a packed weight; borrows its data."""
    blocks: tuple[Any, ...] = weight if isinstance(weight, tuple) else (weight,)
    return LinearWeight(len(blocks), (MatrixStruct * 4)(*(block.matrix for block in blocks)))


def linear(pool: ThreadPool, x: Tensor, weight: Weight) -> Tensor:
    """x [T, in] times the transpose of weight [out, in] -> [T, out] float32."""
    if not packed(weight):
        return torch_linear(x, weight).float()
    struct = native_weight(weight)
    wide = x.float().contiguous()
    out = torch.empty(len(x), sum(part.rows for part in struct.parts[:struct.count]))
    pool.call(library().deltic_linear, address(wide), len(x), byref(struct), address(out))
    return out


def add_norm(
    pool: ThreadPool, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    if residual.dtype not in KINDS:
        return TORCH.add_norm(residual, delta, weight, eps)
    wide = residual.float().contiguous()
    total, normed = torch.empty_like(wide), torch.empty_like(wide)
    added = None if delta is None else delta.float().contiguous()
    pool.call(library().deltic_add_norm, address(wide), address(added), address(weight), address(total),
              address(normed), *residual.shape, eps)
    return total.to(residual.dtype), normed.to(residual.dtype)


def mlp(pool: ThreadPool, x: Tensor, weights: MlpWeights) -> Tensor:
    if x.dtype not in KINDS or not packed(weights.gate_up) or not packed(weights.down):
        return TORCH.mlp(x, weights)
    gate_up, down, wide = native_weight(weights.gate_up), native_weight(weights.down), x.float().contiguous()
    out = torch.empty(len(x), down.parts[0].rows)
    pool.call(library().deltic_mlp, address(wide), len(x), byref(gate_up), byref(down), address(out))
    return out.to(x.dtype)


def moe_layer(weights: MoeWeights) -> MoeLayer:
    """The layer's struct; borrows the weights."""
    pooled = weights.experts if isinstance(weights.experts, ExpertPool) else None
    count = len(weights.experts)
    experts = (Expert * (count + 1))()
    for place, part in enumerate(weights.parts, count if pooled else 0):
        experts[place] = Expert(native_weight(part.gate_up), native_weight(part.down))
    return MoeLayer(native_weight(weights.router), experts, count, weights.per_token, weights.shared is not None,
                    weights.normalised, pooled and pooled.store.address, pooled.layer if pooled else 0)


def moe(pool: ThreadPool, x: Tensor, weights: MoeWeights) -> Tensor:
    if x.dtype not in KINDS or not all(map(packed, moe_weights(weights))):
        return TORCH.moe(x, weights)
    layer, wide = moe_layer(weights), x.float().contiguous()
    out = torch.empty(x.shape)
    pool.call(library().deltic_moe, address(wide), len(x), byref(layer), address(out))
    return out.to(x.dtype)


def moe_weights(weights: MoeWeights) -> list[Weight]:
    """All that the layer multiplies with."""
    return [weights.router, *(weight for part in weights.parts for weight in (part.gate_up, part.down))]


def head(pool: ThreadPool, x: Tensor, weight: Weight) -> Tensor:
    return linear(pool, x, weight) if packed(weight) else TORCH.head(x, weight)


def gdn_layer(weights: GdnWeights, conv: Tensor, projections: bool = False) -> GdnLayer:
    """The layer's struct; borrows the tensors. conv [channels, kernel] float32."""
    spec = weights.spec
    into, out = ((native_weight(weights.in_proj), native_weight(weights.out_proj)) if projections
                 else (LinearWeight(), LinearWeight()))
    return GdnLayer(into, out, address(conv), address(weights.decay), address(weights.dt_bias),
                    address(weights.norm), spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim,
                    spec.conv_kernel, spec.tiled, spec.eps)


def slots(view: StateView) -> States:
    """The struct of a layer's slots and rings."""
    ring = view.delta_log
    parts = () if ring is None else (ring.inputs, ring.keys, ring.updates, ring.decays)
    return States(address(view.recurrent), address(view.conv), view.conv.shape[1], KINDS[view.conv.dtype],
                  *(map(address, parts) if ring else [None] * 4), len(view.conv), len(ring.keys) if ring else 0)


def wide_states(states: tuple[StateView, ...]) -> bool:
    """Whether they are float32, which is all that the kernels know."""
    return all(state.recurrent.dtype == torch.float32 for state in states)


def gdn_mixer(pool: ThreadPool, x: Tensor, weights: GdnWeights, state: StateView, batch: Batch) -> Tensor:
    if x.dtype not in KINDS or state.conv.dtype not in KINDS:
        return TORCH.gdn_mixer(x, weights, state, batch)
    state.check_order(weights.spec)
    proj = linear(pool, x, weights.in_proj)
    if not wide_states((state,)):
        core = torch_core(proj.to(x.dtype), weights, state, batch)
        return linear(pool, core, weights.out_proj).to(x.dtype)
    conv = weights.conv.float().contiguous()
    mixed = torch.empty(len(x), weights.spec.values)
    pool.call(library().deltic_gdn, byref(gdn_layer(weights, conv)), byref(slots(state)), step_batch(batch),
                               address(proj), address(mixed))
    return linear(pool, mixed.to(x.dtype), weights.out_proj).to(x.dtype)


def fold_ring(pool: ThreadPool, states: tuple[StateView, ...], source: int, ring: int, base: int, done: int,
              target: int) -> None:
    if not states or states[0].conv.dtype not in KINDS or states[0].delta_log is None or not wide_states(states):
        return TORCH.fold_ring(states, source, ring, base, done, target)
    units, first = states[0].delta_log, states[0].recurrent
    shape = GdnLayer(key_heads=units.keys.shape[2], value_heads=first.shape[1], key_dim=first.shape[2],
                     value_dim=first.shape[3], kernel=1, tiled=units.tiled)
    layers = (States * len(states))(*map(slots, states))
    pool.call(library().deltic_fold_ring, byref(shape), layers, len(states), source, ring, base, done, target)


def attention_layer(weights: AttentionWeights, projections: bool = False) -> AttentionLayer:
    """The layer's struct; borrows the tensors."""
    spec = weights.spec
    into, out = ((native_weight(weights.qkv), native_weight(weights.o_proj)) if projections
                 else (LinearWeight(), LinearWeight()))
    return AttentionLayer(into, out, address(weights.q_norm), address(weights.k_norm), address(weights.bias),
                          spec.heads, spec.kv_heads, spec.head_dim, spec.rotary_dim, spec.gate, spec.eps)


def kv_pages(view: KvView) -> Kv:
    """The struct of a layer's pages."""
    return Kv(address(view.keys), address(view.values), KINDS[view.keys.dtype], len(view.keys))


def attention_mixer(
    pool: ThreadPool, x: Tensor, weights: AttentionWeights, kv: KvView, batch: Batch, rope: Rope
) -> Tensor:
    if x.dtype not in KINDS or kv.keys.dtype not in KINDS:
        return TORCH.attention_mixer(x, weights, kv, batch, rope)
    proj, mixed = linear(pool, x, weights.qkv), torch.empty(len(x), weights.spec.queries)
    if weights.bias is not None:
        proj += weights.bias
    pool.call(library().deltic_attention, byref(attention_layer(weights)), byref(kv_pages(kv)), step_batch(batch),
                                     address(rope.cos), address(rope.sin), address(proj), address(mixed))
    return linear(pool, mixed.to(x.dtype), weights.o_proj).to(x.dtype)


def store_kv(pool: ThreadPool, x: Tensor, weight: Weight, k_norm: Tensor | None, spec: AttentionSpec, kv: KvView,
             batch: Batch, rope: Rope) -> None:
    if x.dtype not in KINDS or kv.keys.dtype not in KINDS:
        return TORCH.store_kv(x, weight, k_norm, spec, kv, batch, rope)
    layer = AttentionLayer(k_norm=address(k_norm), heads=spec.heads, kv_heads=spec.kv_heads, head_dim=spec.head_dim,
                           rotary_dim=spec.rotary_dim, eps=spec.eps)
    multiplies = packed(weight)
    source = x.float().contiguous() if multiplies else linear(pool, x, weight)
    pool.call(library().deltic_store_kv, byref(layer), byref(native_weight(weight)) if multiplies else None,
                                    byref(kv_pages(kv)), step_batch(batch), address(rope.cos), address(rope.sin),
                                    address(source))
