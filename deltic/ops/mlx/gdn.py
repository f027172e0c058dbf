"""Gated DeltaNet layers on MLX arrays: one-token rows in one batch, longer rows in chunks.

The chunked form is the same as in `ops.torch.gdn`. First `gdn` computes a layer; then `store` writes states,
convolution inputs and log entries to the pools.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import torch
from torch import Tensor

from deltic.ops.mlx import metal
from deltic.ops.mlx.gdn_plan import GdnPlan, Group, RingWrites, RowChunks, StateWrites
from deltic.ops.mlx.linear import Matrix, matrix_of, product, vector
from deltic.ops.mlx.memory import Array, array_of, seen
from deltic.ops.reference import UNIT_EPS
from deltic.ops.torch.basic import put
from deltic.ops.types import RING, GdnSpec, GdnWeights, StateView


@dataclass(frozen=True, slots=True)
class GdnArrays:
    """The weights of a layer. conv [K, C] float32; decay, dt_bias [Hv], norm [Dv] float32."""

    spec: GdnSpec
    in_proj: Matrix
    conv: Array
    decay: Array
    dt_bias: Array
    norm: Array
    out_proj: Matrix

    @classmethod
    def of(cls, weights: GdnWeights) -> GdnArrays:
        return cls(weights.spec, matrix_of(weights.in_proj), vector(weights.conv.t()), vector(weights.decay),
                   vector(weights.dt_bias), vector(weights.norm), matrix_of(weights.out_proj))


@dataclass(frozen=True, slots=True)
class Slots:
    """The pools of a layer as arrays: those of `StateView` and its delta log."""

    recurrent: Array
    conv: Array
    inputs: Array | None = None
    keys: Array | None = None
    updates: Array | None = None
    decays: Array | None = None

    @classmethod
    def of(cls, view: StateView) -> Slots:
        log = view.delta_log
        logs = () if log is None else map(array_of, (log.inputs, log.keys, log.updates, log.decays))
        return cls(array_of(view.recurrent), array_of(view.conv), *logs)


# The layer


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """Inputs of the delta rule for T tokens: query, key [T, Hv, Dk], normalised, queries scaled; value [T, Hv, Dv];
    plain_key [T, Hk or Hv, Dk]: keys as stored in logs; log_decay, beta [T, Hv]. All float32."""

    query: Array
    key: Array
    value: Array
    plain_key: Array
    log_decay: Array
    beta: Array

    def some(self, tokens: slice) -> DeltaHeads:
        return DeltaHeads(*(getattr(self, name)[tokens] for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class GdnResult:
    """Values to store after a layer. raw [T, C]: convolution inputs. states [n, Hv, Dk, Dv]: in the order of
    `StateWrites`. entries: keys, updates and decays of the tokens in `LogWrites`."""

    raw: Array
    states: Array
    entries: tuple[Array, ...] = ()

    @property
    def arrays(self) -> list[Array]:
        return [self.raw, self.states, *self.entries]


def gdn(x: Array, layer: GdnArrays, slots: Slots, plan: GdnPlan) -> tuple[Array, GdnResult]:
    """Computes a layer: x [T, H] -> [T, H], and the values for the pools."""
    spec = layer.spec
    ends = [spec.channels, spec.channels + spec.values, spec.channels + spec.values + spec.value_heads]
    raw, gate, beta, a = mx.split(product(x, layer.in_proj), ends, axis=-1)
    mixed = _convolved(raw, layer, slots, plan)
    heads = _heads(mixed, beta, a, layer)
    outputs, after, before, wanted, updates = list[Array](), list[Array](), list[Array](), list[Array](), list[Array]()
    if plan.first is not None:
        own, plain = heads.some(slice(0, plan.singles)), plan.first.entries is None and not plan.states.before
        if plain and metal.available():
            output, end, update = _on_metal(own, slots, plan.first)
        else:
            start = _start(slots, plan.first, spec)
            output, end, update = step(own, start)
            before.append(start)
        outputs.append(output)
        after.append(end)
        updates.append(update)
    if plan.rest is not None and plan.chunks is not None:
        start = _start(slots, plan.rest, spec)
        output, end, kept, update = chunked(heads.some(slice(plan.singles, plan.length)), start, plan.chunks)
        outputs.append(output)
        after.append(end)
        before.append(start)
        wanted += kept
        updates.append(update)
    output = _whole(outputs)
    output = mx.fast.rms_norm(output, layer.norm, spec.eps).reshape(plan.length, spec.values)
    output = (output * _silu(gate.astype(mx.float32))).astype(x.dtype)
    states = _picked(plan.states, _whole(after), before, wanted)
    entries = _log_entries(heads, _whole(updates), plan)
    return product(output, layer.out_proj), GdnResult(raw, states.astype(slots.recurrent.dtype), entries)


def _whole(parts: list[Array]) -> Array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def _silu(x: Array) -> Array:
    return x * mx.sigmoid(x)


def _picked(writes: StateWrites, after: Array, before: list[Array], wanted: list[Array]) -> Array:
    if writes.plain:
        return after
    parts = [after[mx.array(writes.after)]] if writes.after else []
    if writes.before:
        parts.append(_whole(before)[mx.array(writes.before)])
    parts += [each[None] for each in wanted]
    return _whole(parts) if parts else after[:0]


def _log_entries(heads: DeltaHeads, updates: Array, plan: GdnPlan) -> tuple[Array, ...]:
    if plan.entries is None:
        return ()
    tokens = plan.entries.picked
    return heads.plain_key[tokens], updates[tokens], mx.exp(heads.log_decay[tokens])


def _convolved(raw: Array, layer: GdnArrays, slots: Slots, plan: GdnPlan) -> Array:
    """Convolves raw [T, C] -> [T, C] float32. A row's own inputs follow the inputs in its history."""
    kernel, history = layer.spec.conv_kernel, plan.history
    before = slots.conv.reshape(-1, raw.shape[1])[history.places]
    if history.logged is not None and history.from_log is not None and slots.inputs is not None:
        entries = slots.inputs.reshape(-1, raw.shape[1])[history.logged]
        before = mx.where(history.from_log, entries, before)
    if history.real is not None:
        before = mx.where(history.real, before, mx.zeros_like(before))
    parts, singles = list[Array](), plan.singles
    if singles:
        window = mx.concatenate([before[:singles], raw[:singles, None]], axis=1).astype(mx.float32)
        parts.append((window * layer.conv).sum(axis=1))
    start = singles
    for row, length in enumerate(plan.chunks.lengths if plan.chunks else ()):
        padded = mx.concatenate([before[singles + row], raw[start:start + length]]).astype(mx.float32)
        taps = [padded[tap:tap + length] * layer.conv[tap] for tap in range(kernel)]
        total = taps[0]
        for tap in taps[1:]:
            total = total + tap
        parts.append(total)
        start += length
    return _silu(_whole(parts))


def _heads(mixed: Array, beta: Array, a: Array, layer: GdnArrays) -> DeltaHeads:
    spec, tokens = layer.spec, len(mixed)
    both = mixed[:, :2 * spec.keys].reshape(tokens, 2, spec.key_heads, spec.key_dim)
    both = both * mx.rsqrt(both.square().sum(axis=-1, keepdims=True) + UNIT_EPS)
    query, key = both[:, 0] * spec.key_dim**-0.5, both[:, 1]
    value = mixed[:, 2 * spec.keys:].reshape(tokens, spec.value_heads, spec.value_dim)
    steps = mx.logaddexp(a.astype(mx.float32) + layer.dt_bias, 0.0)
    plain = key
    groups = spec.value_heads // spec.key_heads
    if groups > 1:
        query, key = (_spread(x, groups, spec.tiled) for x in (query, key))
    return DeltaHeads(query, key, value, plain, steps * layer.decay, mx.sigmoid(beta.astype(mx.float32)))


def _spread(x: Array, groups: int, tiled: bool) -> Array:
    return mx.concatenate([x] * groups, axis=-2) if tiled else mx.repeat(x, groups, axis=-2)


def _start(slots: Slots, group: Group, spec: GdnSpec) -> Array:
    """Returns the rows' states before the step [R, Hv, Dk, Dv] float32."""
    state = slots.recurrent[group.source if group.span is None else group.span].astype(mx.float32)
    if group.fresh is not None:
        state = mx.where(group.fresh[:, None, None, None], mx.zeros_like(state), state)
    if group.entries is None:
        return state
    assert slots.keys is not None and slots.updates is not None and slots.decays is not None
    index, real = group.entries.index, group.entries.real[..., None]

    def entries(pool: Array, empty: float) -> Array:
        found = pool.reshape(-1, *pool.shape[2:])[index]
        mask = real if found.ndim == 3 else real[..., None]
        return mx.where(mask, found, mx.full(found.shape, empty, found.dtype))

    keys, updates, decays = entries(slots.keys, 0.0), entries(slots.updates, 0.0), entries(slots.decays, 1.0)
    # the product of decays after each entry, and of all decays
    later = mx.cumprod(decays, axis=1, reverse=True, inclusive=False)
    keys = _spread(keys, spec.value_heads // keys.shape[-2], spec.tiled) * later[..., None]
    added = mx.transpose(keys, (0, 2, 3, 1)) @ mx.transpose(updates, (0, 2, 1, 3))
    return state * (later[:, 0] * decays[:, 0])[..., None, None] + added


def _on_metal(heads: DeltaHeads, slots: Slots, group: Group) -> tuple[Array, Array, Array]:
    begun = mx.ones(group.source.shape, mx.int32) if group.fresh is None else (~group.fresh).astype(mx.int32)
    return metal.delta_step(slots.recurrent, group.source, begun, heads.query, heads.key, heads.value,
                            mx.exp(heads.log_decay), heads.beta)


def step(heads: DeltaHeads, state: Array) -> tuple[Array, Array, Array]:
    """Computes one token of each row: state [R, Hv, Dk, Dv] -> outputs [R, Hv, Dv], states, updates."""
    decay = mx.exp(heads.log_decay)[..., None]
    by_key, by_query = ((x[..., None] * state).sum(axis=-2) * decay for x in (heads.key, heads.query))
    update = (heads.value - by_key) * heads.beta[..., None]
    output = by_query + (heads.key * heads.query).sum(axis=-1, keepdims=True) * update
    return output, state * decay[..., None] + heads.key[..., None] * update[..., None, :], update


def chunked(heads: DeltaHeads, state: Array, chunks: RowChunks) -> tuple[Array, Array, list[Array], Array]:
    """Computes longer rows -> outputs [tokens, Hv, Dv], states after the rows [R, ...], wanted states, updates."""
    query, key, value = (chunks.split(x) for x in (heads.query, heads.key, heads.value))
    beta, log_decay = chunks.split(heads.beta), chunks.split(heads.log_decay)
    if chunks.real is not None:  # padding adds nothing and decays nothing
        beta, log_decay = beta * chunks.real, log_decay * chunks.real
    between, from_start = _decays(log_decay)
    to_end = between[..., -1, :, None]
    lower = mx.tril(mx.ones((chunks.size, chunks.size), mx.bool_), -1)
    keys = mx.swapaxes(key, -1, -2)
    system = mx.where(lower, (key @ keys) * between * beta[..., None], 0.0)
    inverse = _inverse(system) * beta[..., None, :]
    inner, reads = inverse @ value, (inverse * from_start[..., None, :]) @ key
    scores = (query @ keys) * between
    query, faded = query * from_start[..., None], mx.swapaxes(key * to_end, -1, -2)
    total = from_start[..., -1:, None]
    outputs, updates, kept, number = list[Array](), list[Array](), dict[tuple[int, int], Array](), 0
    for place, active in enumerate(chunks.rows):
        here, current = slice(number, number + active), state[:active]
        update = inner[here] - reads[here] @ current
        outputs.append(query[here] @ current + scores[here] @ update)
        updates.append(update)
        current = current * total[here] + faded[here] @ update
        kept |= {(place, rank): current[rank] for at, rank in chunks.wanted if at == place}
        state = current if active == len(state) else mx.concatenate([current, state[active:]])
        number += active
    wanted = [kept[each] for each in chunks.wanted]
    return chunks.joined(_whole(outputs)), state, wanted, chunks.joined(_whole(updates))


def _decays(log_decay: Array) -> tuple[Array, Array]:
    """Returns decays from place i to place t [.., C (t), C (i)], 0 for i > t, and from the start [.., C]. log_decay
    [.., C]. Sums the logs between i and t, because differences of long sums would lose digits."""
    size = log_decay.shape[-1]
    later = mx.tril(mx.ones((size, size), mx.bool_), -1)
    steps = mx.where(later, log_decay[..., None], 0.0)
    within = mx.tril(mx.ones((size, size), mx.bool_))
    between = mx.where(within, mx.exp(mx.cumsum(steps, axis=-2)), 0.0)
    return between, mx.exp(mx.cumsum(log_decay, axis=-1))


def _inverse(system: Array) -> Array:
    """Returns the inverse of 1 + system, strictly lower triangular [.., C, C]. Inverts larger and larger blocks."""
    size, lead = system.shape[-1], system.shape[:-2]
    found = mx.ones((*lead, size, 1, 1), system.dtype)
    block = 1
    while block < size:
        count = size // block
        blocks = mx.swapaxes(system.reshape(*lead, count, block, count, block), -3, -2)
        odd, even = mx.arange(1, count, 2), mx.arange(0, count, 2)
        corner = blocks[..., odd, even, :, :]
        upper, lower = found[..., 0::2, :, :], found[..., 1::2, :, :]
        corner = -(lower @ corner) @ upper
        top = mx.concatenate([upper, mx.zeros_like(upper)], axis=-1)
        found = mx.concatenate([top, mx.concatenate([corner, lower], axis=-1)], axis=-2)
        block *= 2
    return found[..., 0, :, :]


# The pools


def store(result: GdnResult, view: StateView, plan: GdnPlan) -> None:
    """Writes a layer's results to its pools. Reads everything that it needs before it writes."""
    raw = seen(result.raw)
    if plan.single_place is not None:
        view.conv[plan.single_place] = raw
    else:
        assert plan.rings is not None
        _store_rings(raw, view, plan.rings)
    put(view.recurrent, plan.states.slots, seen(result.states))
    if plan.entries is not None and view.delta_log is not None:
        at, log = (plan.entries.logs, plan.entries.places), view.delta_log
        log.inputs[at] = raw[plan.entries.tokens]
        for pool, values in zip((log.keys, log.updates, log.decays), result.entries, strict=True):
            pool[at] = seen(values)


def _store_rings(raw: Tensor, view: StateView, writes: RingWrites) -> None:
    values = torch.where(writes.fresh, raw[writes.index], 0)
    values = torch.where(writes.kept, view.conv[writes.sources[:, None], writes.places], values)
    if writes.logged is not None and view.delta_log is not None:
        entries = view.delta_log.inputs[writes.logs[:, None], writes.positions % RING]
        values = torch.where(writes.logged, entries, values)
    view.conv[writes.slots[:, None], writes.places] = values
