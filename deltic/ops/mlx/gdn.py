"""Gated DeltaNet layers on arrays: rows of one token in one step, longer rows in chunks.

The chunked form is that of `ops.torch.gdn`. Chunks end where states are wanted, so that every checkpoint is the state
after a chunk. The layer computes; `GdnWrites` then stores states, convolution inputs and log entries in the pools.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import mlx.core as mx
import numpy as np
import torch
from torch import Tensor

from deltic.ops.mlx import metal
from deltic.ops.mlx.linear import Matrix, matrix_of, product, vector
from deltic.ops.mlx.memory import Array, array_of, copied, seen
from deltic.ops.reference import UNIT_EPS, next_base
from deltic.ops.torch.basic import put
from deltic.ops.types import CHUNK, RING, Batch, GdnSpec, GdnWeights, StateView


@dataclass(frozen=True, slots=True)
class GdnLayer:
    """The weights of a layer. conv [K, C] float32; decay, dt_bias [Hv], norm [Dv] float32."""

    spec: GdnSpec
    in_proj: Matrix
    conv: Array
    decay: Array
    dt_bias: Array
    norm: Array
    out_proj: Matrix

    @classmethod
    def of(cls, weights: GdnWeights) -> GdnLayer:
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


@dataclass(frozen=True, slots=True)
class Entries:
    """The log entries of some rows, RING for each. index [R, RING]: places in the log's pool, as if it had one axis.
    real [R, RING]."""

    index: Array
    real: Array


@dataclass(frozen=True, slots=True)
class History:
    """Where the K - 1 inputs before each row lie. places [R, K - 1]: in the slots' rings. real: the input exists.
    logged [R, K - 1], or None: places in the logs' rings, of those that from_log marks."""

    places: Array
    real: Array | None
    logged: Array | None = None
    from_log: Array | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that are computed together. source [R]: their slots. fresh [R] or None: rows that start from zero."""

    source: Array
    fresh: Array | None
    entries: Entries | None


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of the longer rows: N of them with C places each, ordered by chunk number, then by row.

    rows: the number of rows with a chunk j, for each j. gather [N * C]: indices into the rows' tokens.
    real [N, 1, C]: what is no padding; None: everything. join [tokens]: the places of the tokens.
    lengths: tokens of each row, in batch order. wanted: chunks and rows (both by rank) of the states to keep.
    """

    size: int
    rows: tuple[int, ...]
    gather: Array
    real: Array | None
    join: Array
    lengths: tuple[int, ...]
    wanted: tuple[tuple[int, int], ...]

    def split(self, x: Array) -> Array:
        """[tokens, heads, ...] -> [N, heads, C, ...]."""
        x = x[self.gather].reshape(-1, self.size, *x.shape[1:])
        return mx.swapaxes(x, 1, 2)

    def joined(self, x: Array) -> Array:
        """[N, heads, C, ...] -> [tokens, heads, ...]."""
        x = mx.swapaxes(x, 1, 2)
        return x.reshape(-1, *x.shape[2:])[self.join]


@dataclass(frozen=True, slots=True)
class StateWrites:
    """Which states go to which slots, [n, Hv, Dk, Dv] after one another: places among the rows' states after the step,
    then before it (both in batch order), then wanted ones of longer rows. plain: they are all rows' in order."""

    after: tuple[int, ...]
    before: tuple[int, ...]
    slots: Tensor
    plain: bool


_ALL = StateWrites((), (), torch.empty(0, dtype=torch.int64), plain=True)


@dataclass(frozen=True, slots=True)
class RingWrites:
    """What the rings of convolution inputs get: slots [n], places [n, W]. fresh, index [n, W]: values of this step.
    sources [n], logs [n], positions [n, W]; kept, logged [n, W]: values of the sources' rings and of the logs.
    """

    slots: Tensor
    places: Tensor
    fresh: Tensor
    index: Tensor
    sources: Tensor
    logs: Tensor
    positions: Tensor
    kept: Tensor
    logged: Tensor | None


@dataclass(frozen=True, slots=True)
class LogWrites:
    """Tokens [n] that become entries of logs [n] at places [n]."""

    tokens: Tensor
    logs: Tensor
    places: Tensor
    picked: Array


@dataclass(frozen=True, slots=True)
class GdnPlan:
    """What all layers of a step share. singles: number of rows of one token, which come first. length: tokens."""

    singles: int
    length: int
    history: History
    first: Group | None
    rest: Group | None
    chunks: Chunks | None
    states: StateWrites
    rings: RingWrites | None
    single_place: tuple[Tensor, Tensor] | None
    entries: LogWrites | None


def decode_plan(rows: int, source: Array, places: Array) -> GdnPlan:
    """Returns the plan to compute a step of one token a row, without what the pools get. source [R], places [R, K - 1]:
    as in `Group` and `History`."""
    return GdnPlan(rows, rows, History(places, None), Group(source, None, None), None, None, _ALL, None, None, None)


class _Rows:
    """The rows of a batch in plain integers."""

    def __init__(self, batch: Batch) -> None:
        self.count, self.singles = batch.layout.rows, batch.layout.decode_rows
        self.chunk = batch.layout.chunks
        self.starts, self.done = batch.starts.tolist(), batch.done.tolist()
        self.base, self.log = batch.base.tolist(), batch.delta_log.tolist()
        self.source, self.target = batch.source.tolist(), batch.target.tolist()
        self.append = [bool(each) for each in batch.append.tolist()]
        columns = (batch.emit_row.tolist(), batch.emit_length.tolist(), batch.emit_slot.tolist())
        self.emits = list(zip(*columns, strict=True))


def plan_of(batch: Batch, spec: GdnSpec, width: int) -> GdnPlan:
    """width: places of a ring of convolution inputs."""
    rows = _Rows(batch)
    before = spec.conv_kernel - 1
    singles = range(rows.singles)
    longer = sorted(range(rows.singles, rows.count), key=lambda row: -_chunk_count(rows, row))
    chunks = _cut(rows, longer) if longer else None
    states = _state_writes(rows, longer, chunks)
    rings = _ring_writes(batch, rows, width)
    return GdnPlan(
        singles=rows.singles,
        length=batch.layout.tokens,
        history=_history(rows, before, width),
        first=_group(rows, list(singles)) if singles else None,
        rest=_group(rows, longer) if longer else None,
        chunks=chunks,
        states=states,
        rings=rings,
        single_place=_single_place(batch, rows, width),
        entries=_log_writes(rows),
    )


def _group(rows: _Rows, members: list[int]) -> Group:
    fresh = [rows.base[row] == 0 for row in members]
    entries = None
    if any(rows.base[row] < rows.done[row] for row in members):
        index, real = np.zeros((len(members), RING), np.int64), np.zeros((len(members), RING), bool)
        for place, row in enumerate(members):
            positions = np.arange(rows.base[row], rows.done[row])
            index[place, :len(positions)] = rows.log[row] * RING + positions % RING
            real[place, :len(positions)] = True
        entries = Entries(mx.array(index), mx.array(real))
    return Group(mx.array([rows.source[row] for row in members]), mx.array(fresh) if any(fresh) else None, entries)


def _history(rows: _Rows, before: int, width: int) -> History:
    done, base = np.array(rows.done)[:, None], np.array(rows.base)[:, None]
    positions = done - before + np.arange(before)
    places = np.array(rows.source)[:, None] * width + positions % width
    real = positions >= 0
    found = History(mx.array(places), None if real.all() else mx.array(real)[..., None])
    if (base == done).all():
        return found
    logged = np.array(rows.log)[:, None] * RING + positions % RING
    return History(found.places, found.real, mx.array(logged), mx.array((positions >= base) & real)[..., None])


def _ends(rows: _Rows, row: int) -> list[int]:
    """Where chunks of a row end, in tokens of the row: at wanted states, and so that none is longer than CHUNK."""
    stops = {length - rows.done[row] for owner, length, _ in rows.emits if owner == row} | {rows.chunk[row]}
    found = list[int]()
    for start, stop in pairwise([0, *sorted(stops)]):
        found += [*range(start + CHUNK, stop, CHUNK), stop]
    return found


def _chunk_count(rows: _Rows, row: int) -> int:
    return len(_ends(rows, row))


def _cut(rows: _Rows, longer: list[int]) -> Chunks:
    ends = [_ends(rows, row) for row in longer]
    first = rows.starts[rows.singles]
    widest = max(stop - start for each in ends for start, stop in pairwise([0, *each]))
    size = min(CHUNK, max(4, 1 << (widest - 1).bit_length()))
    counts = [len(each) for each in ends]
    active = tuple(sum(count > number for count in counts) for number in range(counts[0]))
    total = sum(counts)
    gather, real = np.zeros((total, size), np.int64), np.zeros((total, size), bool)
    join = np.zeros(rows.starts[-1] - first, np.int64)
    number = 0
    for j, some in enumerate(active):
        for rank in range(some):
            start, stop = ([0, *ends[rank]][j], ends[rank][j])
            tokens = rows.starts[longer[rank]] - first + np.arange(start, stop)
            gather[number, :len(tokens)], gather[number, len(tokens):] = tokens, tokens[-1]
            real[number, :len(tokens)] = True
            join[tokens] = number * size + np.arange(len(tokens))
            number += 1
    wanted = []
    for owner, length, _ in rows.emits:
        if owner >= rows.singles:
            rank = longer.index(owner)
            wanted.append((ends[rank].index(length - rows.done[owner]), rank))
    return Chunks(size, active, mx.array(gather.ravel()), None if real.all() else mx.array(real)[:, None],
                  mx.array(join), tuple(rows.chunk[rows.singles:]), tuple(wanted))


def _state_writes(rows: _Rows, longer: list[int], chunks: Chunks | None) -> StateWrites:
    order = [*range(rows.singles), *longer]
    after, before, slots, old = list[int](), list[int](), list[int](), list[int]()
    for place, row in enumerate(order):
        end = next_base(rows.base[row], rows.done[row], rows.chunk[row], rows.append[row])
        if not rows.append[row]:
            after.append(place)
            slots.append(rows.target[row])
        elif end > rows.base[row]:
            before.append(place)
            old.append(rows.target[row])
    emits = [(owner, slot) for owner, _, slot in rows.emits]
    after += [owner for owner, _ in emits if owner < rows.singles]
    slots += [slot for owner, slot in emits if owner < rows.singles]
    wanted = [slot for owner, slot in emits if owner >= rows.singles]
    plain = after == list(range(rows.count)) and not before and not wanted
    return StateWrites(tuple(after), tuple(before), torch.tensor([*slots, *old, *wanted], dtype=torch.int64), plain)


def _ring_writes(batch: Batch, rows: _Rows, width: int) -> RingWrites:
    """As the states' writes: each slot gets the inputs before the length that its state stands for."""
    owners, lengths, slots = list[int](), list[int](), list[int]()
    for row in range(rows.count):
        end = next_base(rows.base[row], rows.done[row], rows.chunk[row], rows.append[row])
        if not rows.append[row] or end > rows.base[row]:
            owners.append(row)
            lengths.append(end)
            slots.append(rows.target[row])
    owners += [owner for owner, _, _ in rows.emits]
    lengths += [length for _, length, _ in rows.emits]
    slots += [slot for _, _, slot in rows.emits]
    owner = torch.tensor(owners, dtype=torch.int64)
    positions = torch.tensor(lengths, dtype=torch.int64)[:, None] - 1 - torch.arange(width)
    done, base = batch.done[owner][:, None], batch.base[owner][:, None]
    logged = (positions >= base) & (positions < done)
    return RingWrites(
        slots=torch.tensor(slots, dtype=torch.int64),
        places=positions % width,
        fresh=(positions >= done)[..., None],
        index=(batch.starts[owner][:, None] + positions - done).clamp_(0, batch.layout.tokens - 1),
        sources=batch.source[owner],
        logs=batch.delta_log[owner],
        positions=positions,
        kept=((positions >= 0) & (positions < base))[..., None],
        logged=logged[..., None] if bool(logged.any()) else None,
    )


def _single_place(batch: Batch, rows: _Rows, width: int) -> tuple[Tensor, Tensor] | None:
    """The slot and place of each row's input, if nothing else changes in the rings: single tokens in place."""
    plain = (rows.singles == rows.count and not rows.emits and not any(rows.append) and rows.base == rows.done
             and rows.source == rows.target and min(rows.done) > 0)
    return (batch.target, batch.done % width) if plain else None


def _log_writes(rows: _Rows) -> LogWrites | None:
    found = [(rows.starts[row] + token, rows.log[row], (rows.done[row] + token) % RING)
             for row in range(rows.count) if rows.append[row] for token in range(rows.chunk[row])]
    if not found:
        return None
    tokens, logs, places = torch.tensor(found, dtype=torch.int64).unbind(1)
    return LogWrites(tokens, logs, places, copied(tokens))


# The layer


@dataclass(frozen=True, slots=True)
class Heads:
    """Of T tokens: query, key [T, Hv, Dk], normalised, queries scaled; value [T, Hv, Dv]; plain_key [T, Hk or Hv, Dk]:
    the keys as logs keep them; log_decay, beta [T, Hv]. All float32."""

    query: Array
    key: Array
    value: Array
    plain_key: Array
    log_decay: Array
    beta: Array

    def some(self, tokens: slice) -> Heads:
        return Heads(*(getattr(self, name)[tokens] for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class GdnResult:
    """raw [T, C]: convolution inputs. states [n, Hv, Dk, Dv]: in the order of `StateWrites`. entries: keys, updates,
    decays of the tokens of `LogWrites`."""

    raw: Array
    states: Array
    entries: tuple[Array, ...] = ()

    @property
    def arrays(self) -> list[Array]:
        return [self.raw, self.states, *self.entries]


def gdn(x: Array, layer: GdnLayer, slots: Slots, plan: GdnPlan) -> tuple[Array, GdnResult]:
    """x [T, H] -> [T, H], and what the pools get."""
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


def _log_entries(heads: Heads, updates: Array, plan: GdnPlan) -> tuple[Array, ...]:
    if plan.entries is None:
        return ()
    tokens = plan.entries.picked
    return heads.plain_key[tokens], updates[tokens], mx.exp(heads.log_decay[tokens])


def _convolved(raw: Array, layer: GdnLayer, slots: Slots, plan: GdnPlan) -> Array:
    """raw [T, C] -> convolved, float32. A row's own inputs follow the ones before it."""
    kernel, history = layer.spec.conv_kernel, plan.history
    before = slots.conv.reshape(-1, raw.shape[1])[history.places]
    if history.logged is not None and slots.inputs is not None:
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


def _heads(mixed: Array, beta: Array, a: Array, layer: GdnLayer) -> Heads:
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
    return Heads(query, key, value, plain, steps * layer.decay, mx.sigmoid(beta.astype(mx.float32)))


def _spread(x: Array, groups: int, tiled: bool) -> Array:
    return mx.concatenate([x] * groups, axis=-2) if tiled else mx.repeat(x, groups, axis=-2)


def _start(slots: Slots, group: Group, spec: GdnSpec) -> Array:
    """Returns the rows' states before the step [R, Hv, Dk, Dv] float32."""
    state = slots.recurrent[group.source].astype(mx.float32)
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
    # decays after each entry, and of all entries together
    later = mx.cumprod(decays, axis=1, reverse=True, inclusive=False)
    keys = _spread(keys, spec.value_heads // keys.shape[-2], spec.tiled) * later[..., None]
    added = mx.transpose(keys, (0, 2, 3, 1)) @ mx.transpose(updates, (0, 2, 1, 3))
    return state * (later[:, 0] * decays[:, 0])[..., None, None] + added


def _on_metal(heads: Heads, slots: Slots, group: Group) -> tuple[Array, Array, Array]:
    begun = mx.ones(group.source.shape, mx.int32) if group.fresh is None else (~group.fresh).astype(mx.int32)
    return metal.delta_step(slots.recurrent, group.source, begun, heads.query, heads.key, heads.value,
                            mx.exp(heads.log_decay), heads.beta)


def step(heads: Heads, state: Array) -> tuple[Array, Array, Array]:
    """One token of each row: state [R, Hv, Dk, Dv] -> outputs [R, Hv, Dv], states, updates."""
    decay = mx.exp(heads.log_decay)[..., None]
    reads = (mx.stack([heads.key, heads.query], axis=2) @ state) * decay[..., None]
    update = (heads.value - reads[:, :, 0]) * heads.beta[..., None]
    output = reads[:, :, 1] + (heads.key * heads.query).sum(axis=-1, keepdims=True) * update
    return output, state * decay[..., None] + heads.key[..., None] * update[..., None, :], update


def chunked(heads: Heads, state: Array, chunks: Chunks) -> tuple[Array, Array, list[Array], Array]:
    """Longer rows: -> outputs [tokens, Hv, Dv], states after the rows [R, ...], wanted states, updates."""
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
    """log_decay [.., C] -> decays from place i to place t [.., C (t), C (i)], 0 for i > t; and from the start [.., C].
    Sums of the logs in between: differences of long sums would lose digits."""
    size = log_decay.shape[-1]
    later = mx.tril(mx.ones((size, size), mx.bool_), -1)
    steps = mx.where(later, log_decay[..., None], 0.0)
    within = mx.tril(mx.ones((size, size), mx.bool_))
    between = mx.where(within, mx.exp(mx.cumsum(steps, axis=-2)), 0.0)
    return between, mx.exp(mx.cumsum(log_decay, axis=-1))


def _inverse(system: Array) -> Array:
    """Returns the inverse of 1 + system, strictly lower triangular [.., C, C], by inverses of ever larger blocks."""
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
    """Writes what a layer has computed to its pools. Reads all that it needs before it writes."""
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
