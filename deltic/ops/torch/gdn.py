"""Gated DeltaNet in plain torch: one-token rows in one batched step, longer rows in chunks of 64 tokens.

The chunked form is the WY representation of the gated delta rule (arXiv 2412.06464, section 3.3): within a chunk
u = T (beta v - beta D k S), T = (1 + tril(beta D k kT, -1))^-1, so that only one S per chunk is sequential.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deltic.ops import ref
from deltic.ops.records import CHUNK, Batch, GdnSpec, GdnWeights, StateView
from deltic.ops.torch.basic import linear, rms_norm


def gdn_mixer(x: Tensor, weights: GdnWeights, state: StateView, batch: Batch) -> Tensor:
    if state.ring_key is not None and (batch.layout.appends or bool((batch.base < batch.done).any())):
        return ref.gdn_mixer(x, weights, state, batch)
    spec, plan = weights.spec, _plan(batch, state)
    qkv, z, beta, a = linear(x, weights.in_proj).split(
        (spec.channels, spec.values, spec.value_heads, spec.value_heads), dim=-1)
    accumulate = state.recurrent.dtype
    gates = _Gates(decay=weights.decay.to(accumulate) * F.softplus(a.to(accumulate) + weights.dt_bias),
                   beta=beta.to(accumulate).sigmoid())
    mixed = _mix(qkv, gates, weights, state, batch, plan)
    mixed = rms_norm(mixed, weights.norm, spec.eps)
    mixed = mixed * F.silu(z.to(accumulate)).view_as(mixed)
    return linear(mixed.flatten(1).to(x.dtype), weights.out_proj)


@dataclass(frozen=True, slots=True)
class _Gates:
    """decay: log a, [T, Hv]. beta [T, Hv]."""

    decay: Tensor
    beta: Tensor

    def __getitem__(self, index: slice) -> _Gates:
        return _Gates(self.decay[index], self.beta[index])


@dataclass(frozen=True, slots=True)
class _Chunks:
    """How the longer rows are cut: N chunks, ordered by chunk number, then by row, longest row first.

    rows: batch rows, longest first. active: rows that have a chunk j, for each j. gather [N * CHUNK]: index into
    the rows' tokens, padded with the row's last token. real [N, 1, CHUNK]: what is not padding.
    """

    rows: tuple[int, ...]
    active: tuple[int, ...]
    gather: Tensor
    real: Tensor


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a batch's geometry means for the convolution ring and the chunks; the same in every layer.

    Writes: the rows' targets, then the emits. slots [R + E]; places [R + E, W]; fresh [R + E, W, 1]: the value is
    an input of this batch, at index inputs [R + E, W]; kept [R + E, W, 1]: it comes from ring `sources`.
    Reads: window [R, W - 1]: places of the inputs before each row's chunk, oldest first; window_real [R, W - 1, 1]:
    which of them exist (None: all). started [R]: the row has a state; any_new: perhaps not all rows have.
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
    chunks: _Chunks | None


def _plan(batch: Batch, state: StateView) -> _Plan:
    plan: _Plan | None = batch.memo.get("gdn")
    if plan is None:
        plan = batch.memo["gdn"] = _make_plan(batch, state.conv.shape[1])
    return plan


def _make_plan(batch: Batch, width: int) -> _Plan:
    device = batch.done.device
    chunk = batch.starts[1:] - batch.starts[:-1]
    rows = torch.cat((torch.arange(batch.layout.rows, device=device), batch.emit_row))
    lengths = torch.cat((batch.done + chunk, batch.emit_length))
    positions = lengths[:, None] - 1 - torch.arange(width, device=device)
    done = batch.done[rows][:, None]
    fresh = positions >= done
    started = batch.done > 0
    before = batch.done[:, None] - torch.arange(width - 1, 0, -1, device=device)
    return _Plan(
        slots=torch.cat((batch.target, batch.emit_slot)),
        sources=batch.source[rows],
        places=positions % width,
        fresh=fresh[..., None],
        kept=((positions >= 0) & ~fresh)[..., None],
        inputs=(batch.starts[rows][:, None] + positions - done).clamp_(min=0),
        started=started,
        any_new=device.type != "cpu" or not bool(started.all()),
        window=before % width,
        window_real=None if device.type == "cpu" and bool((before >= 0).all()) else (before >= 0)[..., None],
        chunks=_cut(batch) if batch.layout.rows > batch.layout.singles else None,
    )


def _cut(batch: Batch) -> _Chunks:
    layout = batch.layout
    rows = sorted(range(layout.singles, layout.rows), key=lambda row: -layout.chunks[row])
    counts = [-(-layout.chunks[row] // CHUNK) for row in rows]
    active = tuple(sum(count > j for count in counts) for j in range(counts[0]))
    first = layout.singles
    offsets = {row: sum(layout.chunks[first:row]) for row in rows}
    order = [(row, j) for j, n in enumerate(active) for row in rows[:n]]
    lengths = torch.tensor([layout.chunks[row] - j * CHUNK for row, j in order])
    starts = torch.tensor([offsets[row] + j * CHUNK for row, j in order])
    within = torch.arange(CHUNK)
    gather = starts[:, None] + torch.minimum(within, lengths[:, None] - 1)
    device = batch.done.device
    return _Chunks(tuple(rows), active, gather.flatten().to(device), (within < lengths[:, None])[:, None].to(device))


def _mix(qkv: Tensor, gates: _Gates, weights: GdnWeights, state: StateView, batch: Batch, plan: _Plan) -> Tensor:
    """Convolution and delta rule of all rows -> [T, Hv, Dv] in the state's dtype; moves the slots."""
    singles, spec = batch.layout.singles, weights.spec
    history = _history(state.conv, batch, plan, spec.conv_kernel - 1)
    _write_rings(qkv, state.conv, plan)
    parts = []
    if singles:
        window = torch.cat((history[:singles], qkv[:singles, None]), dim=1)
        mixed = F.silu((window.to(gates.beta.dtype) * weights.conv.t()).sum(1))
        parts.append(_step(mixed, gates[:singles], spec, state.recurrent, batch, plan))
    if plan.chunks is not None:
        mixed = _convolve(qkv, history, weights.conv, batch, state.recurrent.dtype)
        parts.append(_chunked(mixed, gates[singles:], spec, state.recurrent, batch, plan.chunks))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _history(conv: Tensor, batch: Batch, plan: _Plan, count: int) -> Tensor:
    """The last `count` raw inputs before each row's chunk [R, count, C], zeros before position 0."""
    places = plan.window[:, plan.window.shape[1] - count:]
    history = conv[batch.source[:, None], places]
    return history if plan.window_real is None else torch.where(plan.window_real[:, -count:], history, 0)


def _write_rings(qkv: Tensor, conv: Tensor, plan: _Plan) -> None:
    kept = conv[plan.sources[:, None], plan.places]
    values = torch.where(plan.fresh, qkv[plan.inputs.clamp(max=qkv.shape[0] - 1)], torch.where(plan.kept, kept, 0))
    conv[plan.slots[:, None], plan.places] = values


def _convolve(qkv: Tensor, history: Tensor, conv: Tensor, batch: Batch, dtype: torch.dtype) -> Tensor:
    """Causal depthwise convolution and silu of the longer rows -> [their tokens, C]."""
    layout, start, outputs = batch.layout, batch.layout.singles, []
    # as an image of width 1 with its channels last, which is how the tokens lie in memory
    kernel = conv[:, None, :, None]
    for row in range(layout.singles, layout.rows):
        end = start + layout.chunks[row]
        padded = torch.cat((history[row], qkv[start:end]))[None, :, None].permute(0, 3, 1, 2)
        outputs.append(F.conv2d(padded, kernel, groups=conv.shape[0])[0, :, :, 0].t())
        start = end
    return F.silu((outputs[0] if len(outputs) == 1 else torch.cat(outputs)).to(dtype))


def _split(mixed: Tensor, spec: GdnSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised queries (scaled) and keys [T, Hv, Dk], values [T, Hv, Dv] of convolved channels [T, C]."""
    both, value = mixed.split((2 * spec.keys, spec.values), dim=-1)
    both = both.unflatten(-1, (2, spec.key_heads, spec.key_dim))
    query, key = (both * torch.rsqrt((both * both).sum(-1, keepdim=True) + 1e-6)).unbind(1)
    query = query * spec.key_dim**-0.5
    groups = spec.value_heads // spec.key_heads
    if groups > 1:
        query, key = query.repeat_interleave(groups, dim=1), key.repeat_interleave(groups, dim=1)
    return query, key, value.unflatten(-1, (spec.value_heads, spec.value_dim))


def _step(mixed: Tensor, gates: _Gates, spec: GdnSpec, recurrent: Tensor, batch: Batch, plan: _Plan) -> Tensor:
    """One token of each leading row: [R1, C] -> [R1, Hv, Dv]. Reads each state once, writes it in place."""
    query, key, value = _split(mixed, spec)
    decay, beta = gates.decay.exp()[..., None], gates.beta[..., None]
    rows = mixed.shape[0]
    state = recurrent[batch.span[0]:batch.span[1]] if batch.span else recurrent[batch.source[:rows]]
    if plan.any_new:
        state.masked_fill_(~plan.started[:rows, None, None, None], 0)
    read = torch.stack((key, query), dim=2) @ state
    update = beta * (value - decay * read[:, :, 0])
    output = decay * read[:, :, 1] + (key * query).sum(-1, keepdim=True) * update
    state.mul_(decay[..., None]).addcmul_(key[..., None], update[..., None, :])
    if not batch.span:
        recurrent[batch.target[:rows]] = state
    _emit_singles(recurrent, state, batch)
    return output


def _emit_singles(recurrent: Tensor, state: Tensor, batch: Batch) -> None:
    """A single-token row can only emit its new state; emits of longer rows are written by their chunks later."""
    if batch.layout.emits:
        rows = batch.emit_row.clamp(max=state.shape[0] - 1)
        recurrent[batch.emit_slot] = state[rows]


def _chunked(mixed: Tensor, gates: _Gates, spec: GdnSpec, recurrent: Tensor, batch: Batch, cut: _Chunks) -> Tensor:
    """The longer rows: [tokens, C] -> [tokens, Hv, Dv]."""
    heads = [x.index_select(0, cut.gather).unflatten(0, (-1, CHUNK)).transpose(1, 2) for x in _split(mixed, spec)]
    query, key, value = heads
    beta, log_decay = (x.index_select(0, cut.gather).unflatten(0, (-1, CHUNK)).transpose(1, 2) * cut.real
                       for x in (gates.beta, gates.decay))
    # float64: differences of long cumulative sums of logs lose digits that single decays still have
    total = log_decay.double().cumsum(-1)
    between = (total[..., :, None] - total[..., None, :]).tril_().exp_().to(mixed.dtype).tril_()
    from_start = total.exp().to(mixed.dtype)[..., None]
    to_end = (total[..., -1:] - total).exp().to(mixed.dtype)[..., None]
    weighted = key * beta[..., None]
    system = (weighted @ key.transpose(-1, -2)).mul_(between)
    identity = torch.eye(CHUNK, dtype=mixed.dtype, device=mixed.device).expand_as(system)
    inverse = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)
    inner, reads = inverse @ (value * beta[..., None]), inverse @ (weighted * from_start)
    scores = (query @ key.transpose(-1, -2)).mul_(between)
    reads = torch.cat((reads, query * from_start), dim=-2)
    kept_keys = (key * to_end).transpose(-1, -2)
    rows = torch.tensor(cut.rows, device=mixed.device)
    state = recurrent[batch.source[rows]]
    state.masked_fill_((batch.done[rows] == 0)[:, None, None, None], 0)
    outputs, updates, before, start = [], [], [], 0
    for active in cut.active:
        here = slice(start, start + active)
        current = state[:active]
        before.append(current.clone() if batch.layout.emits else current)
        read = reads[here] @ current
        update = inner[here] - read[..., :CHUNK, :]
        outputs.append(torch.matmul(scores[here], update).add_(read[..., CHUNK:, :]))
        current.mul_(from_start[here, :, -1:]).add_(kept_keys[here] @ update)
        updates.append(update)
        start += active
    recurrent[batch.target[rows]] = state
    if batch.layout.emits:
        _emit_chunks(recurrent, torch.cat(before), torch.cat(updates), key, total, batch, cut)
    output = torch.cat(outputs).transpose(1, 2).flatten(0, 1)
    result = output.new_empty(mixed.shape[0], *output.shape[1:])
    result[cut.gather.view(-1, CHUNK)[cut.real[:, 0]]] = output.view(-1, CHUNK, *output.shape[1:])[cut.real[:, 0]]
    return result


def _emit_chunks(recurrent: Tensor, before: Tensor, updates: Tensor, key: Tensor, total: Tensor, batch: Batch,
                 cut: _Chunks) -> None:
    """States inside or at the end of chunks: the chunk's first state decayed, plus its leading tokens."""
    long = batch.emit_row >= batch.layout.singles
    local = batch.emit_length - batch.done[batch.emit_row] - 1
    rank = torch.zeros(batch.layout.rows, dtype=torch.long, device=local.device)
    rank[list(cut.rows)] = torch.arange(len(cut.rows), device=local.device)
    first = torch.tensor((0, *cut.active), device=local.device).cumsum(0)
    chunk = (first[(local // CHUNK).clamp_(min=0)] + rank[batch.emit_row])[long]
    within = (local % CHUNK)[long]
    sums = total[chunk]
    at = sums.gather(-1, within[:, None, None].expand(-1, sums.shape[1], 1))
    decay = (at - sums).masked_fill_(torch.arange(CHUNK, device=at.device) > within[:, None, None], -torch.inf)
    kept = key[chunk] * decay.exp().to(key.dtype)[..., None]
    states = before[chunk] * at.exp().to(key.dtype)[..., None] + kept.transpose(-1, -2) @ updates[chunk]
    recurrent[batch.emit_slot[long]] = states
