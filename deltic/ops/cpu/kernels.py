"""The ops on compiled kernels, which compute in float32 for any model dtype. The first argument of each op is its
thread pool; bound to a pool, the op has its signature in `Ops`."""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deltic.ops.cpu.library import (
    KINDS,
    KV_KINDS,
    AttentionLayer,
    Drawing,
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
    made_once,
    step_batch,
)
from deltic.ops.quantized import QTensor, pack_tensor
from deltic.ops.slices import SLICES
from deltic.ops.torch import OPS as TORCH
from deltic.ops.torch.basic import linear as torch_linear
from deltic.ops.torch.basic import row_parallel as torch_row_parallel
from deltic.ops.torch.gdn import core as torch_core
from deltic.ops.torch.sample import CANDIDATES, changed
from deltic.ops.types import (
    Adjust,
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
    Sampled,
    Sampling,
    StateView,
    Weight,
)


def pack(pool: ThreadPool, weight: Tensor, table: bool) -> Block:
    return pack_tensor(weight, pool.arena) if weight.dtype in KINDS and weight.device.type == "cpu" else weight


def packed(weight: Weight) -> bool:
    """Returns True if the kernels can multiply with the weight."""
    return all(isinstance(block, QTensor) for block in (weight if isinstance(weight, tuple) else (weight,)))


def native_weight(weight: Weight, slices: int = 0, runs: int = 1) -> LinearWeight:
    """Returns the struct of a packed weight; it borrows the data. slices, runs: see `column_slices`; 0: not sliced."""
    blocks: tuple[Any, ...] = weight if isinstance(weight, tuple) else (weight,)
    return LinearWeight(len(blocks), (MatrixStruct * 4)(*(block.matrix for block in blocks)), slices, runs)


def sliced_weight(weight: Weight, shards: int, runs: int = 1) -> LinearWeight:
    """Returns the struct of a packed weight whose columns are split over shards."""
    return native_weight(weight, SLICES // shards, runs)


def linear(pool: ThreadPool, x: Tensor, weight: Weight) -> Tensor:
    """Returns x weightᵀ [T, out] float32 for x [T, in], weight [out, in]."""
    return _multiply(pool, x, native_weight(weight)) if packed(weight) else torch_linear(x, weight).float()


def row_parallel(pool: ThreadPool, x: Tensor, weight: Weight, shards: int, runs: int = 1) -> Tensor:
    """Runs `linear` in the order of `ops.slices` -> [T, out] in x's dtype, or float32 with several shards."""
    if not packed(weight):
        return torch_row_parallel(x, weight, shards, runs)
    out = _multiply(pool, x, sliced_weight(weight, shards, runs))
    return out.to(x.dtype) if shards == 1 else out


def _multiply(pool: ThreadPool, x: Tensor, struct: LinearWeight) -> Tensor:
    wide = x.float().contiguous()
    out = torch.empty(len(x), sum(part.rows for part in struct.parts[:struct.count]))
    pool.call(library().deltic_linear, address(wide), len(x), byref(struct), address(out))
    return out


def add_norm(pool: ThreadPool, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float
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
    gate_up, down = native_weight(weights.gate_up), sliced_weight(weights.down, weights.shards)
    wide, out = x.float().contiguous(), torch.empty(x.shape)
    pool.call(library().deltic_mlp, address(wide), len(x), byref(gate_up), byref(down), address(out))
    return out.to(x.dtype) if weights.shards == 1 else out


def moe_layer(weights: MoeWeights) -> MoeLayer:
    """Returns the layer's struct, which borrows the weights."""
    pooled = weights.experts if isinstance(weights.experts, ExpertPool) else None
    count = len(weights.experts)
    experts, router, shared = (Expert * (count + 1))(), native_weight(weights.router), weights.shared
    if not isinstance(weights.experts, ExpertPool):
        experts[:count] = [Expert(native_weight(part.gate_up), native_weight(part.down)) for part in weights.experts]
    if shared is not None:
        experts[count] = Expert(native_weight(shared.gate_up), sliced_weight(shared.down, weights.shards))
    rows = sum(part.rows for part in router.parts[:router.count])
    return MoeLayer(router, experts, rows - (shared is not None), weights.per_token, weights.first, count,
                    SLICES // weights.shards, shared is not None, weights.normalised, pooled and pooled.store.address,
                    pooled.layer if pooled else 0)


def moe(pool: ThreadPool, x: Tensor, weights: MoeWeights) -> Tensor:
    if x.dtype not in KINDS or not all(map(packed, moe_weights(weights))):
        return TORCH.moe(x, weights)
    layer, wide = moe_layer(weights), x.float().contiguous()
    out = torch.empty(x.shape)
    pool.call(library().deltic_moe, address(wide), len(x), byref(layer), address(out))
    return out.to(x.dtype) if weights.shards == 1 else out


def moe_weights(weights: MoeWeights) -> list[Weight]:
    """Returns all weights that the layer multiplies with."""
    return [weights.router, *(weight for part in weights.parts for weight in (part.gate_up, part.down))]


def head(pool: ThreadPool, x: Tensor, weight: Weight) -> Tensor:
    return linear(pool, x, weight) if packed(weight) else TORCH.head(x, weight)


def gdn_layer(weights: GdnWeights, conv: Tensor, projections: bool = False) -> GdnLayer:
    """Returns the layer's struct, which borrows the tensors. conv [channels, kernel] float32."""
    spec = weights.spec
    into, out = ((native_weight(weights.in_proj), sliced_weight(weights.out_proj, weights.shards, spec.value_runs))
                 if projections else (LinearWeight(), LinearWeight()))
    return GdnLayer(into, out, address(conv), address(weights.decay), address(weights.dt_bias),
                    address(weights.norm), spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim,
                    spec.conv_kernel, spec.tiled, spec.eps)


def slots(view: StateView) -> States:
    """Returns the struct of a layer's slots and delta logs."""
    log = view.delta_log
    parts = () if log is None else (log.inputs, log.keys, log.updates, log.decays)
    return States(address(view.recurrent), address(view.conv), view.conv.shape[1], KINDS[view.conv.dtype],
                  *(map(address, parts) if log else [None] * 4), len(view.conv), len(log.keys) if log else 0)


def wide_states(states: tuple[StateView, ...]) -> bool:
    """Returns True if all states are float32, which the kernels require."""
    return all(state.recurrent.dtype == torch.float32 for state in states)


def gdn_mixer(pool: ThreadPool, x: Tensor, weights: GdnWeights, state: StateView, batch: Batch) -> Tensor:
    if x.dtype not in KINDS or state.conv.dtype not in KINDS:
        return TORCH.gdn_mixer(x, weights, state, batch)
    state.check_order(weights.spec)
    proj = linear(pool, x, weights.in_proj)
    if not wide_states((state,)):
        core = torch_core(proj.to(x.dtype), weights, state, batch)
        return row_parallel(pool, core, weights.out_proj, weights.shards, weights.spec.value_runs)
    conv = weights.conv.float().contiguous()
    mixed = torch.empty(len(x), weights.spec.values)
    pool.call(library().deltic_gdn, byref(gdn_layer(weights, conv)), byref(slots(state)), step_batch(batch),
                               address(proj), address(mixed))
    return row_parallel(pool, mixed.to(x.dtype), weights.out_proj, weights.shards, weights.spec.value_runs)


def flush_delta_log(pool: ThreadPool, states: tuple[StateView, ...], source: int, log: int, base: int, done: int,
              target: int) -> None:
    if not states or states[0].conv.dtype not in KINDS or states[0].delta_log is None or not wide_states(states):
        return TORCH.flush_delta_log(states, source, log, base, done, target)
    units, first = states[0].delta_log, states[0].recurrent
    shape = GdnLayer(key_heads=units.keys.shape[2], value_heads=first.shape[1], key_dim=first.shape[2],
                     value_dim=first.shape[3], kernel=1, tiled=units.tiled)
    layers = (States * len(states))(*map(slots, states))
    pool.call(library().deltic_fold_ring, byref(shape), layers, len(states), source, log, base, done, target)


def attention_layer(weights: AttentionWeights, projections: bool = False) -> AttentionLayer:
    """Returns the layer's struct, which borrows the tensors."""
    spec = weights.spec
    into, out = ((native_weight(weights.qkv), sliced_weight(weights.o_proj, weights.shards)) if projections
                 else (LinearWeight(), LinearWeight()))
    return AttentionLayer(into, out, address(weights.q_norm), address(weights.k_norm), address(weights.bias),
                          spec.heads, spec.kv_heads, spec.head_dim, spec.rotary_dim, spec.gate, spec.eps)


def kv_pages(view: KvView) -> Kv:
    """Returns the struct of a layer's pages."""
    return Kv(address(view.keys), address(view.values), KV_KINDS[view.keys.dtype], len(view.keys))


def attention_mixer(pool: ThreadPool, x: Tensor, weights: AttentionWeights, kv: KvView, batch: Batch, rope: Rope
                    ) -> Tensor:
    if x.dtype not in KINDS or kv.keys.dtype not in KV_KINDS:
        return TORCH.attention_mixer(x, weights, kv, batch, rope)
    proj, mixed = linear(pool, x, weights.qkv), torch.empty(len(x), weights.spec.queries)
    if weights.bias is not None:
        proj += weights.bias
    pool.call(library().deltic_attention, byref(attention_layer(weights)), byref(kv_pages(kv)), step_batch(batch),
                                     address(rope.cos), address(rope.sin), address(proj), address(mixed))
    return row_parallel(pool, mixed.to(x.dtype), weights.o_proj, weights.shards)


def store_kv(pool: ThreadPool, x: Tensor, weight: Weight, k_norm: Tensor | None, spec: AttentionSpec, kv: KvView,
             batch: Batch, rope: Rope) -> None:
    if x.dtype not in KINDS or kv.keys.dtype not in KV_KINDS:
        return TORCH.store_kv(x, weight, k_norm, spec, kv, batch, rope)
    layer = AttentionLayer(k_norm=address(k_norm), heads=spec.heads, kv_heads=spec.kv_heads, head_dim=spec.head_dim,
                           rotary_dim=spec.rotary_dim, eps=spec.eps)
    multiplies = packed(weight)
    source = x.float().contiguous() if multiplies else linear(pool, x, weight)
    pool.call(library().deltic_store_kv, byref(layer), byref(native_weight(weight)) if multiplies else None,
                                    byref(kv_pages(kv)), step_batch(batch), address(rope.cos), address(rope.sin),
                                    address(source))


@dataclass(frozen=True, slots=True)
class _Best:
    """The best tokens of L rows. values [L, n] float32 and ids [L, n]: best first. tokens [L]: the first of them.
    totals [L] float64: log-sum-exps at the temperatures `heat`, if requested. healthy [L] bool."""

    values: Tensor
    ids: Tensor
    tokens: Tensor
    totals: Tensor | None
    healthy: Tensor
    heat: Tensor | None


def sample(pool: ThreadPool, logits: Tensor, sampling: Sampling) -> Sampled:
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        return TORCH.sample(logits, sampling)
    count, raw, reports, healthy = sampling.top_logprobs, logits, None, None
    if count is not None:
        reports = _best(pool, logits, min(max(count, 1), logits.shape[1]), torch.ones(len(logits)))
    if sampling.adjust is not None:
        healthy = _best(pool, logits, 1).healthy
        raw = logits.clone() if reports else logits
        _apply(pool, logits, sampling.adjust)
    best, tokens = _choose(pool, logits, sampling)
    possible = best.healthy if healthy is None else best.values[:, 0] > -torch.inf
    result = Sampled(tokens, best.healthy if healthy is None else healthy, possible)
    if reports is None or reports.totals is None:
        return result
    chances = (raw.gather(1, tokens[:, None]).double() - reports.totals[:, None])[:, 0].float()
    top = (reports.values.double() - reports.totals[:, None]).float()
    return replace(result, logprobs=chances, top_tokens=reports.ids[:, :count], top_logprobs=top[:, :count])


def _apply(pool: ThreadPool, logits: Tensor, adjust: Adjust) -> None:
    """Changes the logits in place."""
    single = len(adjust.row) > 0
    old = logits[adjust.row, adjust.token] if single else logits[:0, 0]
    for table in adjust.tables:
        pool.call(library().deltic_adjust, logits[table.row].data_ptr(), logits.shape[1], address(table.repetition),
                  address(table.offset))
    if single:
        logits[adjust.row, adjust.token] = changed(old, adjust.repetition, adjust.offset)


def _choose(pool: ThreadPool, logits: Tensor, sampling: Sampling) -> tuple[_Best, Tensor]:
    """Returns the best tokens of each row, and the sampled tokens [L]."""
    if sampling.greedy or not sampling.filtered:
        best = _best(pool, logits, 1, kept=sampling.kept)
        return best, best.tokens if sampling.greedy else _draw(pool, logits, best, sampling)
    best = _best(pool, logits, min(CANDIDATES, logits.shape[1]), sampling.temperature, sampling.kept)
    return best, _draw(pool, logits, best, sampling)


def _best(pool: ThreadPool, logits: Tensor, count: int, temperature: Tensor | None = None,
          kept: dict[Any, Any] | None = None) -> _Best:
    rows, width = logits.shape
    best, places = made_once(kept, (_best, count), lambda: _room(rows, count, temperature))
    pool.call(library().deltic_top, address(logits), rows, width, count, *places)
    return best


def _room(rows: int, count: int, temperature: Tensor | None) -> tuple[_Best, tuple[int | None, ...]]:
    """Allocates the best tokens of each row, and returns the arguments of `deltic_top` for them."""
    values, ids = torch.empty(rows, count), torch.empty(rows, count, dtype=torch.int64)
    healthy = torch.empty(rows, dtype=torch.bool)
    totals = None if temperature is None else torch.empty(rows, dtype=torch.float64)
    heat = None if temperature is None else temperature.contiguous()
    best = _Best(values, ids, ids[:, 0], totals, healthy, heat)
    return best, (address(heat), address(values), address(ids), address(totals), address(healthy))


def _draw(pool: ThreadPool, logits: Tensor, best: _Best, sampling: Sampling) -> Tensor:
    rows, count = best.ids.shape
    drawing, tokens, _ = made_once(sampling.kept, _draw, lambda: _drawing(rows, sampling))
    pool.call(library().deltic_draw, address(logits), rows, logits.shape[1], count, address(best.values),
              address(best.ids), address(best.totals), byref(drawing), address(tokens))
    return tokens


def _drawing(rows: int, sampling: Sampling) -> tuple[Drawing, Tensor, list[Tensor]]:
    """Returns the parameters of a draw, its result, and the tensors that the parameters borrow."""
    columns = [column.contiguous() for column in (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p,
                                                  sampling.key)]
    return Drawing(*map(address, columns), sampling.filtered), torch.empty(rows, dtype=torch.int64), columns
