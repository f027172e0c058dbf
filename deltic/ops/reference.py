"""Implements every op in naive torch. Tests compare the other backends with this oracle. It is never optimized.

Precision: float64 inputs are computed in float64, all others in float32. Results are rounded to the input's
dtype after each linear map, the convolution, the delta rule, each norm, the rotation, the softmax average and
each product with a gate, and nowhere else. A token's value does not depend on its batch, bit for bit: operations
for which the library chooses the order of additions run token by token, in shapes that depend only on the token's
own sequence. All rows read their slots before any row writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from math import inf

import torch
from torch import Tensor
from torch.nn import functional

from deltic.ops import Ops
from deltic.ops.encoder import Affine, LayerNorm, Scene, VisionWeights
from deltic.ops.noise import gumbel
from deltic.ops.quantized import QTensor
from deltic.ops.slices import SLICES, expert_slices, slice_products, tree_sum, unpacked
from deltic.ops.types import (
    PAGE,
    RING,
    Adjust,
    AttentionSpec,
    AttentionWeights,
    Batch,
    Block,
    CacheViews,
    DecoderWeights,
    DeltaLogView,
    GdnSpec,
    GdnWeights,
    KvView,
    MlpWeights,
    MoeWeights,
    MtpStep,
    MtpWeights,
    Rope,
    RopeSpec,
    Sampled,
    Sampling,
    StateView,
    Weight,
)
from deltic.params import ring_base

UNIT_EPS = 1e-6
"""Added to the squared norm of the delta rule's queries and keys, as in the training of the checkpoints."""
HEALTHY_SPREAD = 1e-6
"""Logits with a smaller range count as constant, which no working model returns."""
_WHOLE = 64
"""Libraries process rows and numbers in groups. A multiple of this size fills every group."""


def wide(x: Tensor) -> torch.dtype:
    """Returns the dtype in which ops on `x` compute."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def each_token(function: Callable[..., Tensor], *columns: Tensor) -> Tensor:
    """Applies the function to one token at a time and stacks the results [T, ...]. In a longer tensor, a vectorised
    exponential or sum rounds differently in the middle and at the end."""
    return torch.stack([function(*token) for token in zip(*columns, strict=True)]) if len(columns[0]) else columns[0]


def pointwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Applies the function to every number of x, with the same bits for any shape of x. Without padding, the last
    numbers of a tensor are not computed in vectors and round differently."""
    if x.device.type != "cpu" or (x.is_contiguous() and x.numel() % _WHOLE == 0):
        return function(x)
    flat = x.reshape(-1)
    return function(functional.pad(flat, (0, -len(flat) % _WHOLE)))[:len(flat)].reshape(x.shape)


def project(x: Tensor, weight: Weight) -> Tensor:
    """Returns x weightᵀ. x [T, in], weight [out, in] -> [T, out] in the wide dtype."""
    if isinstance(weight, tuple):
        return torch.cat([project(x, block) for block in weight], dim=-1)
    plain = unpacked(weight)
    # Pads to full groups of rows: the library adds in another order in a partial group.
    matrix = functional.pad(plain.to(wide(x)), (0, 0, 0, -len(plain) % _WHOLE))
    result = x.new_empty(len(x), len(weight), dtype=wide(x))
    for token, vector in enumerate(x.to(wide(x))):
        # A copy has the same alignment for every token; the library's order of additions depends on it.
        result[token] = (matrix @ vector.clone())[:len(plain)]
    return result


def linear(x: Tensor, weight: Weight) -> Tensor:
    """Returns x weightᵀ. x [T, in], weight [out, in] or its row blocks -> [T, out] in x's dtype."""
    return project(x, weight).to(x.dtype)


def row_parallel(x: Tensor, weight: Weight, shards: int = 1, runs: int = 1) -> Tensor:
    """Returns x weightᵀ, summed in the order of `ops.slices`. x [T, in], weight [out, in] -> [T, out] in x's dtype; for
    one of several shards, in the wide dtype."""
    total = tree_sum(slice_products(project, x, weight, shards, runs))
    return total.to(x.dtype) if shards == 1 else total


def rms_norm(x: Tensor, scale: Tensor | None, eps: float) -> Tensor:
    """Returns scale * x / sqrt(mean(x²) + eps), rounded once to x's dtype, or x without a scale. x [..., D]."""
    if scale is None:
        return x
    values = x.to(wide(x))
    normalised = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (normalised * scale.to(wide(x))).to(x.dtype)


def pack(weight: Tensor, table: bool) -> Block:
    """Returns the weight [out, in] unchanged."""
    return weight


def embed(ids: Tensor, weight: Block, dtype: torch.dtype) -> Tensor:
    """Looks up embeddings. ids [T], weight [V, H] -> [T, H]."""
    return (weight.lookup(ids) if isinstance(weight, QTensor) else weight[ids]).to(dtype)


def mtp_step(ops: Ops, weights: MtpWeights, views: CacheViews, slots: Tensor) -> MtpStep | None:
    """Returns None: the ops are called one by one."""


def step(ops: Ops, decoder: DecoderWeights, views: CacheViews) -> None:
    """Returns None: the ops are called one by one."""


def add_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns (residual + delta, its RMS norm) in residual's dtype. residual, delta [T, H], weight [H]."""
    total = residual.clone() if delta is None else residual + delta.to(residual.dtype)
    return total, each_token(lambda token: rms_norm(token, weight, eps), total)


def mlp(x: Tensor, weights: MlpWeights) -> Tensor:
    """Returns down(silu(gate) * up) [T, H] for x [T, H]."""
    return row_parallel(_gated(x, weights), weights.down, weights.shards)


def _gated(x: Tensor, weights: MlpWeights) -> Tensor:
    gate, up = linear(x, weights.gate_up).to(wide(x)).chunk(2, dim=-1)
    return (each_token(silu, gate) * up).to(x.dtype)


def moe(x: Tensor, weights: MoeWeights) -> Tensor:
    """Returns the sum of each token's experts [T, H] for x [T, H]. Adds the experts of a slice from best to worst, and
    then the slices of the shared expert."""
    assert isinstance(weights.experts, tuple)
    logits = project(x, weights.router)
    count, places = logits.shape[1] - (weights.shared is not None), expert_slices(len(weights.experts), weights.shards)
    result = torch.empty_like(x) if weights.shards == 1 else torch.empty_like(x, dtype=wide(x))
    for token in range(len(x)):
        chances = torch.softmax(logits[token, :count], dim=-1)
        best = ranked(chances)[:weights.per_token]
        shares = chances[best] / chances[best].sum() if weights.normalised else chances[best]
        own = x[token:token + 1]
        parts = [torch.zeros(x.shape[1:], dtype=wide(x), device=x.device) for _ in range(SLICES // weights.shards)]
        for share, expert in zip(shares, (best - weights.first).tolist(), strict=True):
            if 0 <= expert < len(weights.experts):
                gated = _gated(own, weights.experts[expert])
                parts[places[expert]] += share * linear(gated, weights.experts[expert].down)[0]
        if weights.shared is not None:
            products = slice_products(project, _gated(own, weights.shared), weights.shared.down, weights.shards)
            for part, product in zip(parts, products, strict=True):
                part += sigmoid(logits[token, count]) * product[0]
        result[token] = tree_sum(parts)
    return result


def head(x: Tensor, weight: Weight) -> Tensor:
    """Computes logits. x [L, H], weight [V, H] -> [L, V] float32, or float64 for float64 inputs."""
    return project(x, weight)


# Gated DeltaNet


def unit(x: Tensor) -> Tensor:
    """Returns x / sqrt(|x|² + 1e-6), in x's dtype, for x [..., D]."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS)


def short_conv(ring: Tensor, chunk: Tensor, done: int, weight: Tensor) -> Tensor:
    """Computes the causal depthwise convolution and silu -> [n, C] in the chunk's dtype.

    ring [W, C]: raw inputs; the input of position p is at index p mod W. chunk [n, C]: raw inputs of positions done,
    done + 1, ... weight [C, K]: the last tap multiplies the token itself.
    Inputs before position 0 count as zero; the ring's numbers there are ignored.
    """
    taps, result = weight.to(wide(chunk)), torch.empty_like(chunk)
    for token in range(len(chunk)):
        total = torch.zeros_like(chunk[token], dtype=wide(chunk))
        for tap in range(weight.shape[1]):
            position = done + token - (weight.shape[1] - 1) + tap
            if position >= 0:
                source = chunk[position - done] if position >= done else ring[position % len(ring)]
                total = total + taps[:, tap] * source.to(wide(chunk))
        result[token] = silu(total).to(chunk.dtype)
    return result


def advance_conv(ring: Tensor, chunk: Tensor, done: int, length: int) -> Tensor:
    """Returns a copy of the ring [W, C] with positions done .. length - 1 taken from the chunk [n, C].

    If done = 0, the old ring is not read, and entries of positions before 0 become zero.
    """
    result = ring.clone() if done else torch.zeros_like(ring)
    for position in range(done, length):
        result[position % len(ring)] = chunk[position - done]
    return result


def spread(x: Tensor, heads: int, tiled: bool = False) -> Tensor:
    """Repeats the heads of x [..., fewer heads, D] -> [..., heads, D]: each one in consecutive places (0, 0, 1, 1);
    tiled: the whole sequence of heads again and again (0, 1, 0, 1)."""
    if tiled:
        return torch.cat([x] * (heads // x.shape[-2]), dim=-2)
    return x.repeat_interleave(heads // x.shape[-2], dim=-2)


def gated_delta_step(state: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor
                     ) -> tuple[Tensor, Tensor, Tensor]:
    """Computes one token of the gated delta rule (arXiv 2412.06464, equation 10).

    state [Hv, Dk, Dv]; query, key [Hk, Dk], normalised; value [Hv, Dv]; decay a = exp(g) and beta [Hv].
    S ← a S; u = β (v - Sᵀ k); S ← S + k uᵀ; o = Sᵀ q / √Dk. -> (new state, o [Hv, Dv], u [Hv, Dv]); does not
    change the given state.
    """
    heads = len(value)
    query, key = spread(query, heads)[..., None], spread(key, heads)[..., None]
    state = state * decay[:, None, None]
    update = (value - (state * key).sum(-2)) * beta[:, None]
    state = state + key * update[:, None, :]
    output = (state * (query / state.shape[-2] ** 0.5)).sum(-2)
    return state, output, update


def fold(state: Tensor, keys: Tensor, updates: Tensor, decays: Tensor) -> Tensor:
    """Applies n log entries to a state, oldest first: S ← a S + k uᵀ. Does not change the given state.

    state [Hv, Dk, Dv]; keys [n, Hk, Dk], updates [n, Hv, Dv], decays [n, Hv]. The two roundings per element
    are those of `gated_delta_step`, so the result has the same bits as the steps that wrote the entries.
    """
    for key, update, decay in zip(keys, updates, decays, strict=True):
        state = state * decay[:, None, None]
        state = state + spread(key, len(update))[..., None] * update[:, None, :]
    return state


@dataclass(frozen=True, slots=True)
class DeltaRun:
    """The result of `gated_delta`. outputs, updates [n, Hv, Dv]. states [Hv, Dk, Dv]: by number of processed tokens."""

    outputs: Tensor
    updates: Tensor
    states: dict[int, Tensor]


def gated_delta(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor,
    wanted: tuple[int, ...] = (),
) -> DeltaRun:
    """Runs `gated_delta_step` over n tokens: query, key [n, Hk, Dk], value [n, Hv, Dv], decay, beta [n, Hv].

    The result contains the states after 0, n and each of the `wanted` numbers of tokens.
    """
    tokens = len(value)
    outputs, updates, states = torch.empty_like(value), torch.empty_like(value), {0: state}
    for token in range(tokens):
        state, outputs[token], updates[token] = gated_delta_step(
            state, query[token], key[token], value[token], decay[token], beta[token])
        if token + 1 in (tokens, *wanted):
            states[token + 1] = state
    return DeltaRun(outputs, updates, states)


def next_base(base: int, done: int, chunk: int, append: bool) -> int:
    """Returns the number of tokens in a row's target state after a step, which is `base` of its next step. Rejected
    tokens never move `done` below it. Raises ValueError if a chunk to append is longer than a ring."""
    if append and chunk > RING:
        raise ValueError(f"a chunk of {chunk} tokens does not fit a replay ring of {RING}")
    return ring_base(base, done, chunk) if append else done + chunk


@dataclass(frozen=True, slots=True)
class _BatchRow:
    """One row of a batch in plain integers. checkpoints: (length, slot) of each state to emit."""

    tokens: slice
    done: int
    base: int
    delta_log: int
    append: bool
    source: int
    target: int
    checkpoints: tuple[tuple[int, int], ...]

    @property
    def chunk(self) -> int:
        return int(self.tokens.stop - self.tokens.start)


def _rows(batch: Batch) -> list[_BatchRow]:
    starts = batch.starts.tolist()
    columns = (column.tolist() for column in (batch.emit_row, batch.emit_length, batch.emit_slot))
    emits = list(zip(*columns, strict=True))
    return [
        _BatchRow(slice(starts[row], starts[row + 1]), int(batch.done[row]), int(batch.base[row]),
             int(batch.delta_log[row]), bool(batch.append[row]), int(batch.source[row]), int(batch.target[row]),
             tuple((length, slot) for owner, length, slot in emits if owner == row))
        for row in range(batch.layout.rows)
    ]


@dataclass(frozen=True, slots=True)
class _Taken:
    """Inputs of a row's chunk: raw conv inputs [n, C]; in the wide dtype normalised query, key [n, Hk or Hv, Dk] (Hv:
    already spread), value [n, Hv, Dv], decay, beta [n, Hv]."""

    raw: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor


def _split_heads(mixed: Tensor, spec: GdnSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Splits mixed [n, C] into normalised query and key [n, Hk, Dk] (tiled: spread to [n, Hv, Dk]) and value [n, Hv,
    Dv], in the wide dtype."""
    query, key, value = torch.split(mixed.to(wide(mixed)), [spec.keys, spec.keys, spec.values], dim=-1)
    query, key = (each_token(unit, x.reshape(-1, spec.key_heads, spec.key_dim)) for x in (query, key))
    if spec.tiled:
        query, key = (spread(x, spec.value_heads, tiled=True) for x in (query, key))
    return query, key, value.reshape(-1, spec.value_heads, spec.value_dim)


def decay_gate(a: Tensor, decay: Tensor, dt_bias: Tensor) -> Tensor:
    """Returns exp(decay * softplus(a + dt_bias)) in a's wide dtype. a, decay, dt_bias [Hv]; decay is -exp(A_log)."""
    steps = pointwise(functional.softplus, a.to(wide(a)) + dt_bias.to(wide(a)))
    return pointwise(torch.exp, decay.to(wide(a)) * steps)


def sigmoid(x: Tensor) -> Tensor:
    """Returns the sigmoid of x [...] in the wide dtype."""
    return pointwise(torch.sigmoid, x.to(wide(x)))


def silu(x: Tensor) -> Tensor:
    """Returns silu of x [...] in the wide dtype."""
    return pointwise(functional.silu, x.to(wide(x)))


def gated_norm(x: Tensor, gate: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Returns rms_norm(x) * silu(gate), rounded once to x's dtype. x, gate [..., D], scale [D]."""
    normalised = rms_norm(x.to(wide(x)), scale, eps)
    return (normalised * silu(gate)).to(x.dtype)


def load_state(state: StateView, slot: int, ring: int, base: int, done: int) -> tuple[Tensor, Tensor]:
    """Returns copies of the state [Hv, Dk, Dv], in the wide dtype, and convolution ring [W, C] at `done` tokens:
    applies entries base .. done - 1 of delta log `ring` to the slot, which contains `base` tokens (0: zero state)."""
    slots = state.recurrent
    recurrent = slots[slot].to(wide(slots), copy=True) if base else torch.zeros_like(slots[slot], dtype=wide(slots))
    if base == done:
        return recurrent, advance_conv(state.conv[slot], state.conv[slot][:0], base, done)
    assert state.delta_log is not None, "entries are wanted of slots without rings"
    places, units = [position % RING for position in range(base, done)], state.delta_log
    inputs, keys, updates, decays = (
        pool[ring, places] for pool in (units.inputs, units.keys, units.updates, units.decays))
    keys = spread(keys, len(recurrent), units.tiled)
    return fold(recurrent, keys, updates, decays), advance_conv(state.conv[slot], inputs, base, done)


def flush_delta_log(states: tuple[StateView, ...], source: int, ring: int, base: int, done: int, target: int) -> None:
    """Writes the state at `done` tokens, computed from slot `source`, to slot `target` in every layer."""
    for state in states:
        state.recurrent[target], state.conv[target] = load_state(state, source, ring, base, done)


def _run_row(row: _BatchRow, taken: _Taken, start: Tensor) -> DeltaRun:
    wanted, start = tuple(length - row.done for length, _ in row.checkpoints), start.to(taken.value.dtype)
    return gated_delta(start, taken.query, taken.key, taken.value, taken.decay, taken.beta, wanted)


def _append_entries(row: _BatchRow, taken: _Taken, run: DeltaRun, ring: DeltaLogView) -> None:
    for token in range(row.chunk):
        place = (row.done + token) % RING
        ring.inputs[row.delta_log, place] = taken.raw[token]
        ring.keys[row.delta_log, place] = taken.key[token, :ring.keys.shape[2]]
        ring.updates[row.delta_log, place] = run.updates[token]
        ring.decays[row.delta_log, place] = taken.decay[token]


def _write_row(row: _BatchRow, taken: _Taken, run: DeltaRun, conv: Tensor, state: StateView) -> None:
    """Writes a row's slots and log entries. conv: the ring before the chunk, as the source may be overwritten."""
    after = next_base(row.base, row.done, row.chunk, row.append)
    written = [(after, row.target)] if after > row.base else []
    for length, slot in (*written, *row.checkpoints):
        state.recurrent[slot] = run.states[length - row.done]
        state.conv[slot] = advance_conv(conv, taken.raw, row.done, length)
    if row.append:
        assert state.delta_log is not None, "a row appends to slots without rings"
        _append_entries(row, taken, run, state.delta_log)


def gdn_core(proj: Tensor, weights: GdnWeights, state: StateView, batch: Batch) -> Tensor:
    """Computes a layer between its projections: proj [T, C + values + 2 Hv] -> [T, values]."""
    spec = weights.spec
    state.check_order(spec)
    sizes = [spec.channels, spec.values, spec.value_heads, spec.value_heads]
    raw, gate, b, a = torch.split(proj, sizes, dim=-1)
    decay = each_token(lambda token: decay_gate(token, weights.decay, weights.dt_bias), a)
    beta = each_token(sigmoid, b)
    rows, work = _rows(batch), []
    for row in rows:
        start, conv = load_state(state, row.source, row.delta_log, row.base, row.done)
        mixed = short_conv(conv, raw[row.tokens], row.done, weights.conv)
        taken = _Taken(raw[row.tokens], *_split_heads(mixed, spec), decay[row.tokens], beta[row.tokens])
        work.append((row, taken, _run_row(row, taken, start), conv))
    for row, taken, run, conv in work:
        _write_row(row, taken, run, conv, state)
    output = torch.cat([run.outputs for _, _, run, _ in work]).to(proj.dtype)
    normalised = each_token(lambda x, gate: gated_norm(x, gate, weights.norm, spec.eps), output,
                            gate.reshape(output.shape))
    return normalised.flatten(1)


def gdn_mixer(x: Tensor, weights: GdnWeights, state: StateView, batch: Batch) -> Tensor:
    """Computes a Gated DeltaNet layer between its norm and its residual: x [T, H] -> [T, H] (arXiv 2412.06464).

    Writes for each row: the target slot, unless it stays at `base`; with append, the chunk's ring entries; each
    emit slot. Ring entries are not rounded, so a replayed state has the bits of the plain recurrence.
    """
    mixed = gdn_core(linear(x, weights.in_proj), weights, state, batch)
    return row_parallel(mixed, weights.out_proj, weights.shards, weights.spec.value_runs)


# Gated attention


def frequency_axis(index: int, sections: tuple[int, ...]) -> int:
    """Returns the position axis (0 temporal, 1 height, 2 width) of frequency `index`. Axes 1 and 2 take every third
    frequency up to the size of their section; axis 0 takes the rest (interleaved M-RoPE)."""
    axis = index % 3
    return axis if sections and index < 3 * sections[axis] else 0


def rope(positions: Tensor, spec: RopeSpec) -> Rope:
    """Computes rotary tables as transformers does. positions [3, T] int64 -> cos, sin [T, rotary_dim] float32."""
    pairs = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32, device=positions.device)
    factors = torch.tensor(spec.factors or 1.0, device=positions.device)
    frequencies = 1.0 / spec.theta ** (pairs / spec.rotary_dim) / factors
    angles = [positions[frequency_axis(index, spec.sections)].to(torch.float32) * frequency
              for index, frequency in enumerate(frequencies)]
    half = torch.stack(angles, dim=-1)
    return Rope(*(each_token(turn, half).repeat(1, 2) * spec.attention_factor for turn in (torch.cos, torch.sin)))


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Applies rotary embedding (arXiv 2104.09864) to the leading rotary_dim dimensions, in split halves.

    x [T, heads, D] -> the same shape and dtype.
    """
    turned, cos, sin = rope.cos.shape[-1], rope.cos[:, None].to(wide(x)), rope.sin[:, None].to(wide(x))
    front = x[..., :turned].to(wide(x))
    first, second = front.chunk(2, dim=-1)
    front = front * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([front.to(x.dtype), x[..., turned:]], dim=-1)


def attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Computes attention of one token, in query's dtype: query [heads, D], keys, values [n, kv_heads, D] -> [heads, D].

    Softmax of q·k / √D over all n entries, the token's own last; each K/V head serves heads / kv_heads query heads.
    """
    heads, dtype = len(query), wide(query)
    scores = (spread(keys.to(dtype), heads) * query.to(dtype)).sum(-1) * query.shape[-1] ** -0.5
    chances = torch.softmax(scores, dim=0)
    return (chances[..., None] * spread(values.to(dtype), heads)).sum(0).to(query.dtype)


def _project_heads(x: Tensor, weights: AttentionWeights) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Projects x [T, H] to query and gate [T, heads, D], key and value [T, kv_heads, D], before norm and rotation."""
    spec, parts = weights.spec, 2 if weights.spec.gate else 1
    sizes = [parts * spec.queries, spec.kv, spec.kv]
    bias = 0.0 if weights.bias is None else weights.bias.to(wide(x))
    queries, key, value = torch.split((project(x, weights.qkv) + bias).to(x.dtype), sizes, dim=-1)
    split = queries.reshape(-1, spec.heads, parts, spec.head_dim).unbind(2)
    shape = (-1, spec.kv_heads, spec.head_dim)
    return split[0], split[1] if spec.gate else None, key.reshape(shape), value.reshape(shape)


def _read_context(pool: Tensor, pages: Tensor, length: int) -> Tensor:
    """Reads a row's first `length` entries. pool [pages, PAGE, kv_heads, D], pages [P] -> [length, kv_heads, D]."""
    entries = [pool[int(pages[index // PAGE]), index % PAGE] for index in range(length)]
    read = {torch.uint8: read_int4, torch.int8: read_int8}.get(pool.dtype)
    return torch.stack([read(entry) for entry in entries] if read else entries)


@cache
def hadamard(size: int) -> Tensor:
    """Returns the rotation [size, size] float64 for x @ hadamard: row i of a Hadamard matrix, with the sign of a bent
    function (parity of the pairs of neighbouring bits of i that are both set), so that equal numbers do not add up."""
    def sign(row: int, column: int) -> int:
        pairs = sum(row >> bit & row >> bit + 1 & 1 for bit in range(0, size.bit_length(), 2))
        return -1 if ((row & column).bit_count() + pairs) % 2 else 1

    rows = [[sign(row, column) for column in range(size)] for row in range(size)]
    return torch.tensor(rows, dtype=torch.float64) * float(size**-0.5)


def _level(code: int, bits: int) -> float:
    half = 2 ** (bits - 1)
    place = code + 0.75 - half
    return float(place * (place * place + 2 * half * half))


def _nearest_levels(numbers: list[float], scale: float, bits: int) -> list[int]:
    """Returns the code of the level * scale that is nearest to each number. numbers: in units of the levels."""
    half, codes = 2 ** (bits - 1), list[int]()
    for number in numbers:
        w = min(max(number / scale / (2 * half**3), -1.5), 1.5)
        inverse = 0.98277253 + w**2 * (-0.32738898 + w**2 * (0.13833282 + w**2 * -0.02469429))  # of w = t + t^3 / 2
        codes.append(min(max(round(w * inverse * half + half - 0.75), 0), 2 * half - 1))
    return codes


def write_int4(x: Tensor, bits: int) -> Tensor:
    """Rotates and rounds x [kv_heads, D] -> bytes [kv_heads, D * bits / 8 + 2] (see `ops/kv`)."""
    low, high, scales = list[int](), list[int](), list[float]()
    for head in x.double() @ hadamard(x.shape[-1]):
        unit = float(head.abs().max()) / _level(2**bits - 1, bits)
        unit = 0.0 if unit < 2.0**-100 else unit
        numbers = (head / unit if 0 < unit < inf else torch.zeros_like(head)).tolist()
        best, product, codes = -1.0, 1.0, list[int]()
        for parts in (22, -22, 25, -25, 28, -28, 30, -30, 32, -32, 35, -35):
            found = _nearest_levels(numbers, parts / 32, bits)
            levels = [_level(code, bits) for code in found]
            dot = sum(level * number for level, number in zip(levels, numbers, strict=True))
            cosine = dot * dot / sum(level * level for level in levels)
            if cosine > best:
                best, product, codes = cosine, dot, found
        low += [codes[i] % 16 + codes[i + 1] % 16 * 16 for i in range(0, len(codes), 2)]
        high += [sum((codes[i + bit] >> 4) << bit for bit in range(8)) for i in range(0, len(codes), 8)]
        squares = sum(number * number for number in numbers)
        scales.append(unit * squares / product if squares else unit)
    body = torch.tensor(low + (high if bits == 5 else []), dtype=torch.uint8)
    return torch.cat([body, torch.tensor(scales).to(torch.bfloat16).view(torch.uint8)]).view(len(x), -1)


def read_int4(stored: Tensor) -> Tensor:
    """Decodes bytes that `write_int4` returned -> [kv_heads, D] float64, rotated back."""
    heads, width = stored.shape
    bits, flat = 4 if (width - 2) % 5 else 5, stored.flatten().tolist()  # as D is a power of two
    size = (width - 2) * 8 // bits
    scales = stored.flatten()[-2 * heads:].clone().view(torch.bfloat16)
    codes = torch.tensor([[flat[(head * size + i) // 2] >> i % 2 * 4 & 15 for i in range(size)]
                          for head in range(heads)])
    if bits == 5:
        high = flat[heads * size // 2:]
        codes += torch.tensor([[(high[(head * size + i) // 8] >> i % 8 & 1) * 16 for i in range(size)]
                               for head in range(heads)])
    levels = torch.tensor([_level(code, bits) for code in range(2**bits)], dtype=torch.float64)[codes]
    return levels * scales.double()[:, None] @ hadamard(size).T


def write_int8(x: Tensor) -> Tensor:
    """Rounds x [kv_heads, D] -> bytes [kv_heads, D + 4]: codes, then scales (see `ops/kv`)."""
    codes, scales = list[int](), list[float]()
    for head in x.double():
        scale = float(head.abs().max()) / 127
        scale = 0.0 if scale * 127 < 2.0**-100 else scale
        scales.append(scale)
        codes += [round(number / scale) if 0 < scale < inf else 0 for number in head.tolist()]
    return torch.cat([torch.tensor(codes, dtype=torch.int8), torch.tensor(scales).view(torch.int8)]).view(len(x), -1)


def read_int8(stored: Tensor) -> Tensor:
    """Decodes bytes that `write_int8` returned -> [kv_heads, D] float64."""
    heads, width = stored.shape
    codes, scales = stored.flatten().split((heads * (width - 4), heads * 4))
    units = scales.clone().view(torch.float32).double()
    return torch.mul(codes.view(heads, -1).double(), units[:, None])


def _store(key: Tensor, value: Tensor, k_norm: Tensor | None, eps: float, kv: KvView, batch: Batch, rope: Rope) -> None:
    """Stores key, value [T, kv_heads, D]. Both are given before norm and rotation."""
    key = rotate(each_token(lambda heads: rms_norm(heads, k_norm, eps), key), rope)
    for pool, rows, bits in ((kv.keys, key, 5), (kv.values, value, 4)):
        if pool.dtype == torch.uint8:
            rows = torch.stack([write_int4(entry, bits) for entry in rows])
        if pool.dtype == torch.int8:
            rows = torch.stack([write_int8(entry) for entry in rows])
        if pool.dtype == torch.float8_e4m3fn:  # it has no infinity, and torch can only index its bytes
            pool, rows = pool.view(torch.uint8), rows.clamp(-448, 448).to(pool.dtype).view(torch.uint8)
        pool.view(-1, *rows.shape[1:])[batch.store] = rows.to(pool.dtype)


def store_kv(x: Tensor, weight: Weight, k_norm: Tensor | None, spec: AttentionSpec, kv: KvView, batch: Batch,
             rope: Rope) -> None:
    """Stores keys and values of all tokens as attention_mixer does. x [T, H], weight [2 * kv, H]."""
    key, value = linear(x, weight).unflatten(-1, (2, spec.kv_heads, spec.head_dim)).unbind(1)
    _store(key, value, k_norm, spec.eps, kv, batch, rope)


def attention_mixer(x: Tensor, weights: AttentionWeights, kv: KvView, batch: Batch, rope: Rope) -> Tensor:
    """Computes a gated attention layer between its norm and its residual: x [T, H] -> [T, H].

    Stores keys after norm and rotation, in the view's dtype. All keys are read from the cache, including new ones.
    """
    query, gate, key, value = _project_heads(x, weights)
    eps = weights.spec.eps
    query = rotate(each_token(lambda heads: rms_norm(heads, weights.q_norm, eps), query), rope)
    _store(key, value, weights.k_norm, eps, kv, batch, rope)
    output = torch.empty_like(query)
    for index, row in enumerate(_rows(batch)):
        keys, values = (_read_context(pool, batch.pages[index], row.done + row.chunk)
                        for pool in (kv.keys, kv.values))
        for end, token in enumerate(range(row.tokens.start, row.tokens.stop), row.done + 1):
            # K/V heads one by one: the sums of a head do not depend on the number of heads
            output[token] = torch.cat([attention(part, keys[:end, head:head + 1], values[:end, head:head + 1])
                                       for head, part in enumerate(query[token].chunk(weights.spec.kv_heads))])
    if gate is not None:
        output = (output.to(wide(x)) * each_token(sigmoid, gate)).to(x.dtype)
    return row_parallel(output.flatten(1), weights.o_proj, weights.shards)


# Sampling


def ranked(scores: Tensor) -> Tensor:
    """Returns token ids [V] in descending order of scores [V]; among equal scores the lower id comes first."""
    return torch.sort(scores, descending=True, stable=True).indices


def is_healthy(logits: Tensor) -> bool:
    """Returns True if logits [V] are all finite and not all equal."""
    return bool(logits.isfinite().all() and logits.max() - logits.min() >= HEALTHY_SPREAD)


def apply_adjust(logits: Tensor, adjust: Adjust | None) -> Tensor:
    """Returns a copy of logits [L, V] with repetition penalties and then offsets applied, in the logits' dtype."""
    result = logits.clone()
    if adjust is None:
        return result
    tables = [(table.row, slice(None), table.repetition, table.offset) for table in adjust.tables]
    single = zip(adjust.row, adjust.token, adjust.repetition, adjust.offset, strict=True)
    for row, place, repetition, offset in (*tables, *single):
        old, factor = logits[row, place], 1.0 if repetition is None else repetition
        result[row, place] = torch.where(old > 0, old / factor, old * factor) + (0.0 if offset is None else offset)
    return result


def kept_tokens(scores: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Returns ids of the tokens that may be drawn, best first; never empty. scores [V] float64: after temperature.

    top_k: the best k tokens (0: all). top_p: of these, the fewest best tokens with at least top_p of their mass (1:
    all). min_p: of these, the tokens at least min_p times as probable as the best. Lower ids win ties.
    """
    kept = ranked(scores)
    if top_k:
        kept = kept[:top_k]
    if top_p < 1:
        mass = torch.softmax(scores[kept], dim=0).cumsum(0)
        before = torch.cat([mass.new_zeros(1), mass[:-1]])
        kept = kept[: max(1, int((before < top_p).sum()))]
    if min_p:
        kept = kept[(scores[kept] - scores[kept[0]]).exp() >= min_p]
    return kept


def draw(logits: Tensor, sampling: Sampling, row: int) -> int:
    """Returns one token for adjusted logits [V]: the best one (temperature 0), or of logits / temperature + noise."""
    temperature = float(sampling.temperature[row])
    if temperature == 0:
        return int(ranked(logits)[0])
    scores = logits.to(torch.float64) / temperature
    top_k, top_p, min_p = int(sampling.top_k[row]), float(sampling.top_p[row]), float(sampling.min_p[row])
    kept = kept_tokens(scores, top_k, top_p, min_p).sort().values
    noisy = scores[kept] + gumbel(sampling.key[row : row + 1], kept)[0]
    return int(kept[ranked(noisy)[0]])


def sample(logits: Tensor, sampling: Sampling) -> Sampled:
    """Samples one token per row of logits [L, V]. Does not change the logits.

    Each row uses its own parameters; `greedy` and `filtered` are hints for faster backends.
    """
    healthy = torch.tensor([is_healthy(row) for row in logits], dtype=torch.bool, device=logits.device)
    adjusted = apply_adjust(logits, sampling.adjust)
    drawn = [draw(adjusted[row], sampling, row) for row in range(len(logits))]
    tokens = torch.tensor(drawn, dtype=torch.int64, device=logits.device)
    possible = (adjusted > -torch.inf).any(-1)
    if sampling.top_logprobs is None:
        return Sampled(tokens, healthy, possible)
    chances = torch.log_softmax(logits.to(torch.float64), dim=-1).to(torch.float32)
    order = torch.stack([ranked(row)[:sampling.top_logprobs] for row in logits])
    return Sampled(tokens, healthy, possible, chances.gather(1, tokens[:, None])[:, 0], order, chances.gather(1, order))


# Pictures


def vision(x: Tensor, weights: VisionWeights, scene: Scene) -> Iterator[None]:
    """Runs x [T, H] through all blocks, in place, one picture after another."""
    heads, width = weights.heads, weights.hidden
    for layer in weights.layers:
        for picture in scene.pictures():
            qkv = affine(layer_norm(x[picture], layer.attention_norm, weights.eps), layer.qkv).to(wide(x))
            query, key, value = qkv.view(-1, 3, heads, width // heads).unbind(1)
            turned = [rotated(part, scene.cos[picture], scene.sin[picture]) for part in (query, key)]
            mixed = torch.stack([attended(turned[0][:, head], turned[1][:, head], value[:, head])
                                 for head in range(heads)], 1)
            x[picture] += affine(mixed.flatten(1).to(x.dtype), layer.out)
            inner = affine(layer_norm(x[picture], layer.output_norm, weights.eps), layer.up)
            inner = functional.gelu(inner.to(wide(x)), approximate="tanh").to(x.dtype)
            x[picture] += affine(inner, layer.down)
            yield


def affine(x: Tensor, weights: Affine) -> Tensor:
    """Computes a linear layer with bias: x [T, in] -> [T, out] in x's dtype."""
    return (project(x, weights.weight) + weights.bias.to(wide(x))).to(x.dtype)


def layer_norm(x: Tensor, norm: LayerNorm, eps: float) -> Tensor:
    """Returns the layer norm of x [T, H], scaled and shifted, in x's dtype."""
    apart = x.to(wide(x)) - x.to(wide(x)).mean(-1, keepdim=True)
    normalised = apart * torch.rsqrt(apart.square().mean(-1, keepdim=True) + eps)
    return (normalised * norm.scale.to(wide(x)) + norm.shift.to(wide(x))).to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (i, i + D / 2) of x [T, heads, D]. cos, sin [T, D / 2]."""
    left, right = x.chunk(2, -1)
    cos, sin = cos.to(x.dtype)[:, None], sin.to(x.dtype)[:, None]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Returns softmax attention [T, D] of one head. query, key, value [T, D]."""
    return torch.softmax(query @ key.T * query.shape[1] ** -0.5, -1) @ value


# Copies


def copy_slots(states: tuple[Tensor, ...], source: Tensor, target: Tensor) -> None:
    """Copies slots of states [layers, S, ...] each. source, target [N]: reads all slots before it writes any."""
    for pool in states:
        pool[:, target] = pool[:, source].clone()


def copy_pages(pools: tuple[Tensor, ...], source: Tensor, target: Tensor) -> None:
    """Copies pages of pools [layers, P, ...] each. source, target [N]: reads all pages before it writes any."""
    copy_slots(pools, source, target)


OPS = Ops(pack=pack, embed=embed, rope=rope, add_norm=add_norm, gdn_mixer=gdn_mixer, flush_delta_log=flush_delta_log,
          attention_mixer=attention_mixer, store_kv=store_kv, mlp=mlp, moe=moe, head=head, sample=sample,
          copy_slots=copy_slots, copy_pages=copy_pages, step=step, mtp_step=mtp_step, vision=vision)
