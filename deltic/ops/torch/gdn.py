"""Gated DeltaNet layers in plain torch. Rows of one token run as one batch, longer rows in chunks of 64 tokens.

The chunked form is the WY representation of the gated delta rule (arXiv 2412.06464, section 3.3): with D(t, i) the
decay between two tokens of a chunk and S the state before it,
u = T (beta v - beta D(., 0) k S), T = (1 + tril(beta D k kT, -1))^-1, so that only one S per chunk is sequential.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from deltic.ops import reference
from deltic.ops.reference import pointwise
from deltic.ops.torch.basic import linear, matmul, put, rms_norm, row_parallel
from deltic.ops.types import CHUNK, Batch, GdnSpec, GdnWeights, StateView


@dataclass(frozen=True, slots=True)
class Gates:
    """The gates of T tokens. log_decay: log a, [T, Hv]. beta [T, Hv]."""

    log_decay: Tensor
    beta: Tensor

    def __getitem__(self, index: slice) -> Gates:
        return Gates(self.log_decay[index], self.beta[index])


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of the longer rows: N of them, ordered by chunk number, then by row, longest row first.

    rows: batch rows, longest first. active: for each j, number of rows that have a chunk j.
    gather [N * CHUNK]: indices into the rows' tokens, padded with the row's last token; None: tokens are in order
        already.
    real [N, 1, CHUNK]: True for tokens, False for padding.
    """

    rows: tuple[int, ...]
    active: tuple[int, ...]
    gather: Tensor | None
    real: Tensor

    def split(self, x: Tensor) -> Tensor:
        """Splits tokens into chunks: [tokens, heads, ...] -> [N, heads, CHUNK, ...], contiguous."""
        if self.gather is not None:
            x = x.index_select(0, self.gather)
        chunks: Tensor = x.unflatten(0, (-1, CHUNK))
        return chunks.transpose(1, 2).contiguous()

    def join(self, chunks: Tensor, tokens: int) -> Tensor:
        """Inverts `split` and drops padding: [N, heads, CHUNK, ...] -> [tokens, heads, ...]."""
        flat = chunks.transpose(1, 2).flatten(0, 1)
        if self.gather is None:
            return flat
        real, result = self.real.flatten(), flat.new_empty(tokens, *flat.shape[1:])
        result[self.gather[real]] = flat[real]
        return result


def cut(batch: Batch) -> Chunks:
    """Cuts the rows of more than one token into chunks."""
    layout = batch.layout
    rows = sorted(range(layout.decode_rows, layout.rows), key=lambda row: -layout.chunks[row])
    counts = [-(-layout.chunks[row] // CHUNK) for row in rows]
    active = tuple(sum(count > j for count in counts) for j in range(counts[0]))
    first = layout.decode_rows
    offsets = {row: sum(layout.chunks[first:row]) for row in rows}
    order = [(row, j) for j, n in enumerate(active) for row in rows[:n]]
    lengths = torch.tensor([layout.chunks[row] - j * CHUNK for row, j in order])
    starts = torch.tensor([offsets[row] + j * CHUNK for row, j in order])
    within = torch.arange(CHUNK)
    gather = starts[:, None] + torch.minimum(within, lengths[:, None] - 1)
    device, real = batch.done.device, (within < lengths[:, None])[:, None]
    plain = len(rows) == 1 and layout.chunks[rows[0]] % CHUNK == 0
    return Chunks(tuple(rows), active, None if plain else gather.flatten().to(device), real.to(device))


def heads(mixed: Tensor, spec: GdnSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Splits convolved channels [T, C] into normalised queries (scaled) and keys [T, Hv, Dk], values [T, Hv, Dv]."""
    both, value = mixed.split((2 * spec.keys, spec.values), dim=-1)
    both = both.unflatten(-1, (2, spec.key_heads, spec.key_dim))
    factor = torch.linalg.vector_norm(both, dim=-1, keepdim=True).square_().add_(1e-6).rsqrt_()
    factor[:, 0] *= spec.key_dim**-0.5
    query, key = (both * factor).unbind(1)
    groups = spec.value_heads // spec.key_heads
    if groups > 1:
        query, key = (x.repeat(1, groups, 1) if spec.tiled else x.repeat_interleave(groups, dim=1)
                      for x in (query, key))
    return query, key, value.unflatten(-1, (spec.value_heads, spec.value_dim))


def step(mixed: Tensor, gates: Gates, spec: GdnSpec, state: Tensor) -> Tensor:
    """Computes one token of each row: mixed [R, C], state [R, Hv, Dk, Dv] -> [R, Hv, Dv]. Updates the state in place,
    and reads it only once for both key and query."""
    query, key, value = heads(mixed, spec)
    decay, beta = pointwise(torch.exp, gates.log_decay)[..., None], gates.beta[..., None]
    from_key, from_query = (matmul(torch.stack((key, query), dim=2), state) * decay[..., None]).unbind(2)
    update = (value - from_key).mul_(beta)
    output = torch.addcmul(from_query, (key * query).sum(-1, keepdim=True), update)
    state.mul_(decay[..., None]).addcmul_(key[..., None], update[..., None, :])
    return output


@dataclass(frozen=True, slots=True)
class _Terms:
    """The state-independent terms of N chunks: u = inner - reads S.

    inner [N, Hv, CHUNK, Dv], reads, query, key [.., CHUNK, Dk], scores [.., CHUNK, CHUNK]: decayed q kT.
    total [.., CHUNK] float64: cumulative sums of log decays. from_start, to_end [.., CHUNK, 1]: decays from the chunk's
        start, and to its end.
    """

    inner: Tensor
    reads: Tensor
    query: Tensor
    key: Tensor
    scores: Tensor
    total: Tensor
    from_start: Tensor
    to_end: Tensor


def chunked(mixed: Tensor, gates: Gates, spec: GdnSpec, recurrent: Tensor, batch: Batch, chunks: Chunks) -> Tensor:
    """Computes the longer rows: mixed [tokens, C] -> [tokens, Hv, Dv]. Writes their slots of `recurrent`."""
    terms = _terms(mixed, gates, spec, chunks)
    rows = torch.tensor(chunks.rows, device=mixed.device)
    state = recurrent[batch.source[rows]].to(mixed.dtype)
    state.masked_fill_((batch.done[rows] == 0)[:, None, None, None], 0)
    outputs, updates = torch.empty_like(terms.inner), torch.empty_like(terms.inner)
    emits = _emits(batch, chunks) if batch.layout.checkpoints else None
    before, start = dict[int, Tensor](), 0
    for active in chunks.active:
        here, current = slice(start, start + active), state[:active]
        if emits and (emits.known is None or any(start <= chunk < start + active for chunk in emits.known)):
            before[start] = current.clone()
        updates[here] = update = terms.inner[here] - matmul(terms.reads[here], current)
        torch.mul(matmul(terms.query[here], current), terms.from_start[here], out=outputs[here])
        outputs[here] += matmul(terms.scores[here], update)
        current.mul_(terms.from_start[here, :, -1:])
        current += matmul(terms.key[here].transpose(-1, -2), update.mul_(terms.to_end[here]))
        start += active
    put(recurrent, batch.target[rows], state)
    if emits and before:
        _emit(recurrent, before, updates, terms, emits)
    return chunks.join(outputs, mixed.shape[0])


def _terms(mixed: Tensor, gates: Gates, spec: GdnSpec, chunks: Chunks) -> _Terms:
    query, key, value = map(chunks.split, heads(mixed, spec))
    beta, log_decay = (chunks.split(x) * chunks.real for x in (gates.beta, gates.log_decay))
    # float64: differences of long cumulative sums of logs lose digits that single decays still have
    total = log_decay.double().cumsum(-1)
    between = (total[..., :, None] - total[..., None, :]).tril_().exp_().to(mixed.dtype).tril_()
    from_start, to_end = total.exp().to(mixed.dtype), (total[..., -1:] - total).exp().to(mixed.dtype)
    system = matmul(key, key.transpose(-1, -2)).mul_(between).mul_(beta[..., None])
    identity = torch.eye(CHUNK, dtype=mixed.dtype, device=mixed.device).expand_as(system)
    inverse = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)
    inverse = inverse * beta[..., None, :]
    inner, reads = matmul(inverse, value), matmul(inverse * from_start[..., None, :], key)
    scores = matmul(query, key.transpose(-1, -2)).mul_(between)
    return _Terms(inner, reads, query, key, scores, total, from_start[..., None], to_end[..., None])


@dataclass(frozen=True, slots=True)
class _Emits:
    """The states [E] that longer rows emit: target slot, chunk, and index of the last token within the chunk. known:
    the chunks as integers, if reading them from the device is free."""

    slots: Tensor
    chunk: Tensor
    within: Tensor
    known: list[int] | None


def _emits(batch: Batch, chunks: Chunks) -> _Emits:
    emits: _Emits | None = batch.memo.get("emits")
    if emits is None:
        long = batch.emit_row >= batch.layout.decode_rows
        local = batch.emit_length - batch.done[batch.emit_row] - 1
        rank = torch.zeros(batch.layout.rows, dtype=torch.long, device=local.device)
        rank[list(chunks.rows)] = torch.arange(len(chunks.rows), device=local.device)
        first = torch.tensor((0, *chunks.active), device=local.device).cumsum(0)
        chunk = (first[(local // CHUNK).clamp_(min=0)] + rank[batch.emit_row])[long]
        known = chunk.tolist() if chunk.device.type == "cpu" else None
        emits = batch.memo["emits"] = _Emits(batch.emit_slot[long], chunk, (local % CHUNK)[long], known)
    return emits


def _emit(recurrent: Tensor, before: dict[int, Tensor], updates: Tensor, terms: _Terms, emits: _Emits) -> None:
    """Writes states inside or at the end of chunks: the state before the chunk, decayed, plus the chunk's leading
    tokens. before: states before chunks, keyed by the index of the first chunk in each group."""
    place = torch.zeros(len(terms.total), dtype=torch.long, device=emits.chunk.device)
    kept = torch.tensor([start + rank for start, states in before.items() for rank in range(len(states))],
                        device=place.device)
    place[kept] = torch.arange(len(kept), device=place.device)
    first = torch.cat(list(before.values()))[place[emits.chunk]]
    sums = terms.total[emits.chunk]
    at = sums.gather(-1, emits.within[:, None, None].expand(-1, sums.shape[1], 1))
    decay = (at - sums).masked_fill_(torch.arange(CHUNK, device=at.device) > emits.within[:, None, None], -torch.inf)
    keys = terms.key[emits.chunk] * decay.exp().to(first.dtype)[..., None]
    states = first * pointwise(torch.exp, at).to(first.dtype)[..., None]
    states = states + matmul(keys.transpose(-1, -2), updates[emits.chunk])
    put(recurrent, emits.slots, states)


def gdn_mixer(x: Tensor, weights: GdnWeights, state: StateView, batch: Batch) -> Tensor:
    mixed = core(linear(x, weights.in_proj), weights, state, batch)
    return row_parallel(mixed, weights.out_proj, weights.shards, weights.spec.value_runs)


def core(proj: Tensor, weights: GdnWeights, state: StateView, batch: Batch) -> Tensor:
    """Computes a layer between its projections: proj [T, C + values + 2 Hv] -> [T, values]."""
    # if both are the same tensor, no row has entries; this needs no wait for the device
    has_entries = batch.base is not batch.done and bool((batch.base < batch.done).any()) if state.delta_log else False
    uses_log = state.delta_log is not None and (batch.layout.appends or has_entries)
    return (reference.gdn_core if uses_log else _core)(proj, weights, state, batch)


def flush_delta_log(states: tuple[StateView, ...], source: int, log: int, base: int, done: int, target: int) -> None:
    reference.flush_delta_log(states, source, log, base, done, target)


def _core(proj: Tensor, weights: GdnWeights, state: StateView, batch: Batch) -> Tensor:
    """Runs `core` for rows without delta logs."""
    spec, plan = weights.spec, _plan(batch, state)
    qkv, z, beta, a = proj.split((spec.channels, spec.values, spec.value_heads, spec.value_heads), dim=-1)
    dtype = reference.wide(state.recurrent)
    gates = Gates(pointwise(F.softplus, a.to(dtype) + weights.dt_bias).mul_(weights.decay),
                  pointwise(torch.sigmoid, beta.to(dtype)))
    mixed = _mix(qkv, gates, weights, state, batch, plan)
    mixed = rms_norm(mixed, weights.norm, spec.eps)
    mixed = mixed.flatten(1).mul_(pointwise(F.silu, z.to(dtype)))
    return mixed.to(proj.dtype)


@dataclass(frozen=True, slots=True)
class _ConvPlan:
    """Indices of the convolution rings and the chunks of a batch; the same in every layer.

    Writes, first the rows' targets, then the emits: slots [R + E], places [R + E, W].
    fresh [R + E, W, 1]: the value is an input of this batch, with index inputs [R + E, W].
    kept [R + E, W, 1]: the value comes from the ring of `sources`.
    Reads: window [R, W - 1]: places of the inputs before each row's chunk, oldest first.
    window_real [R, W - 1, 1]: True if the input exists (None: all exist).
    started [R]: the row has a state. any_new: some row may have none.
    taps: see `_Taps`; None unless all rows are single tokens in place.
    """

    slots: Tensor
    sources: Tensor
    places: Tensor
    fresh: Tensor
    kept: Tensor
    inputs: Tensor
    started: Tensor
    any_new: bool
    window: Tensor
    window_real: Tensor | None
    chunks: Chunks | None
    taps: _Taps | None


@dataclass(frozen=True, slots=True)
class _Taps:
    """Plan for single tokens on rings as wide as the kernel. Row r writes its input at write[r] and then reads the
    whole ring; entry p is multiplied by tap index[r, p]."""

    write: tuple[Tensor, Tensor]
    index: Tensor


def _plan(batch: Batch, state: StateView) -> _ConvPlan:
    plan: _ConvPlan | None = batch.memo.get("gdn")
    if plan is None:
        plan = batch.memo["gdn"] = _make_plan(batch, state.conv.shape[1])
    return plan


def _make_plan(batch: Batch, width: int) -> _ConvPlan:
    device = batch.done.device
    chunk = batch.starts[1:] - batch.starts[:-1]
    rows = torch.cat((torch.arange(batch.layout.rows, device=device), batch.emit_row))
    lengths = torch.cat((batch.done + chunk, batch.emit_length))
    positions = lengths[:, None] - 1 - torch.arange(width, device=device)
    done = batch.done[rows][:, None]
    fresh = positions >= done
    before = batch.done[:, None] - torch.arange(width - 1, 0, -1, device=device)
    all_real = device.type == "cpu" and bool((before >= 0).all())
    return _ConvPlan(
        slots=torch.cat((batch.target, batch.emit_slot)),
        sources=batch.source[rows],
        places=positions % width,
        fresh=fresh[..., None],
        kept=((positions >= 0) & ~fresh)[..., None],
        inputs=(batch.starts[rows][:, None] + positions - done).clamp_(0, batch.layout.tokens - 1),
        started=batch.done > 0,
        any_new=device.type != "cpu" or not bool((batch.done > 0).all()),
        window=before % width,
        window_real=None if all_real else (before >= 0)[..., None],
        chunks=cut(batch) if batch.layout.rows > batch.layout.decode_rows else None,
        taps=_taps(batch, width) if all_real else None,
    )


def _taps(batch: Batch, width: int) -> _Taps | None:
    layout = batch.layout
    if batch.span is None or layout.decode_rows < layout.rows or layout.checkpoints:
        return None
    places = torch.arange(width, device=batch.done.device)
    rows = torch.arange(layout.rows, device=batch.done.device)
    return _Taps((rows, batch.done % width), (places - batch.done[:, None] - 1) % width)


def _mix(qkv: Tensor, gates: Gates, weights: GdnWeights, state: StateView, batch: Batch, plan: _ConvPlan) -> Tensor:
    """Computes convolution and delta rule of all rows -> [T, Hv, Dv] in the dtype of the gates. Updates the slots."""
    singles, kernel = batch.layout.decode_rows, weights.spec.conv_kernel
    if plan.taps is not None and state.conv.shape[1] == kernel:
        mixed = _convolve_in_place(qkv, weights.conv, state, batch, plan.taps)
        return _step(mixed, gates, weights, state, batch, plan)
    history = _history(state.conv, batch, plan, kernel - 1)
    _write_rings(qkv, state.conv, plan)
    parts = []
    if singles:
        window = torch.cat((history[:singles], qkv[:singles, None]), dim=1)
        mixed = _sum_taps(window.to(gates.beta.dtype) * weights.conv.t())
        parts.append(_step(mixed, gates[:singles], weights, state, batch, plan))
    if plan.chunks is not None:
        mixed = _convolve(qkv, history, weights.conv, batch, gates.beta.dtype)
        parts.append(chunked(mixed, gates[singles:], weights.spec, state.recurrent, batch, plan.chunks))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _step(mixed: Tensor, gates: Gates, weights: GdnWeights, state: StateView, batch: Batch, plan: _ConvPlan) -> Tensor:
    """Computes the delta rule of the leading one-token rows [R1, C] -> [R1, Hv, Dv]. Writes their slots."""
    rows, recurrent = mixed.shape[0], state.recurrent
    place = slice(*batch.span) if batch.span else batch.source[:rows]
    current = recurrent[place].to(mixed.dtype)  # for a span in the same dtype: the slots themselves
    if plan.any_new:
        current.masked_fill_(~plan.started[:rows, None, None, None], 0)
    output = step(mixed, gates, weights.spec, current)
    if not batch.span:
        put(recurrent, batch.target[:rows], current)
    elif recurrent.dtype != current.dtype:
        recurrent[place] = current.to(recurrent.dtype)
    if batch.layout.checkpoints:
        # a one-token row emits its new state; `chunked` later overwrites the emits of longer rows
        put(recurrent, batch.emit_slot, current[batch.emit_row.clamp(max=rows - 1)])
    return output


def _convolve_in_place(qkv: Tensor, conv: Tensor, state: StateView, batch: Batch, taps: _Taps) -> Tensor:
    assert batch.span is not None
    ring = state.conv[slice(*batch.span)]
    ring[taps.write] = qkv
    return _sum_taps(ring.to(reference.wide(state.recurrent)) * conv.t()[taps.index])


def _sum_taps(products: Tensor) -> Tensor:
    """Returns silu of the sums over taps: products [R, taps, C] -> [R, C]. Adds the taps one by one, because torch's
    order of additions over an axis depends on the number of channels."""
    return pointwise(F.silu, reduce(torch.add, products.unbind(1)))


def _history(conv: Tensor, batch: Batch, plan: _ConvPlan, count: int) -> Tensor:
    """Returns the last `count` raw inputs before each row's chunk [R, count, C], zeros before position 0."""
    places = plan.window[:, plan.window.shape[1] - count:]
    history = conv[batch.source[:, None], places]
    return history if plan.window_real is None else torch.where(plan.window_real[:, -count:], history, 0)


def _write_rings(qkv: Tensor, conv: Tensor, plan: _ConvPlan) -> None:
    kept = conv[plan.sources[:, None], plan.places]
    values = torch.where(plan.fresh, qkv[plan.inputs], torch.where(plan.kept, kept, 0))
    conv[plan.slots[:, None], plan.places] = values


def _convolve(qkv: Tensor, history: Tensor, conv: Tensor, batch: Batch, dtype: torch.dtype) -> Tensor:
    """Computes causal depthwise convolution and silu of the longer rows -> [their tokens, C]."""
    layout, start, outputs = batch.layout, batch.layout.decode_rows, []
    # as an image of width 1 with channels last, which is the memory layout of the tokens
    kernel = conv.to(qkv.dtype)[:, None, :, None]
    for row in range(layout.decode_rows, layout.rows):
        end = start + layout.chunks[row]
        padded = torch.cat((history[row], qkv[start:end]))[None, :, None].permute(0, 3, 1, 2)
        outputs.append(F.conv2d(padded, kernel, groups=conv.shape[0])[0, :, :, 0].t())
        start = end
    return pointwise(F.silu, (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).to(dtype))
