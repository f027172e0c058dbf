"""Gated DeltaNet layers in plain torch: projections, short convolution over a ring of inputs, gated norm. The delta
rule itself is in `delta`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from deltic.ops import reference
from deltic.ops.torch.basic import linear, put, rms_norm
from deltic.ops.torch.delta import Chunks, Gates, chunked, cut, step
from deltic.ops.types import Batch, GdnWeights, StateView


def gdn_mixer(x: Tensor, weights: GdnWeights, state: StateView, batch: Batch) -> Tensor:
    return linear(core(linear(x, weights.in_proj), weights, state, batch), weights.out_proj)


def core(proj: Tensor, weights: GdnWeights, state: StateView, batch: Batch) -> Tensor:
    """What lies between the projections: proj [T, C + values + 2 Hv] -> [T, values]."""
    # the same tensor: nobody is behind, and that is known without waiting for the device
    behind = batch.base is not batch.done and bool((batch.base < batch.done).any()) if state.delta_log else False
    rings = state.delta_log is not None and (batch.layout.appends or behind)
    return (reference.gdn_core if rings else _core)(proj, weights, state, batch)


def fold_ring(states: tuple[StateView, ...], source: int, ring: int, base: int, done: int, target: int) -> None:
    reference.fold_ring(states, source, ring, base, done, target)


def _core(proj: Tensor, weights: GdnWeights, state: StateView, batch: Batch) -> Tensor:
    """As `core`, of rows without rings."""
    spec, plan = weights.spec, _plan(batch, state)
    qkv, z, beta, a = proj.split((spec.channels, spec.values, spec.value_heads, spec.value_heads), dim=-1)
    dtype = reference.wide(state.recurrent)
    gates = Gates(F.softplus(a.to(dtype) + weights.dt_bias).mul_(weights.decay), beta.to(dtype).sigmoid_())
    mixed = _mix(qkv, gates, weights, state, batch, plan)
    mixed = rms_norm(mixed, weights.norm, spec.eps)
    mixed = mixed.flatten(1).mul_(F.silu(z.to(dtype), inplace=z.dtype != dtype))
    return mixed.to(proj.dtype)


@dataclass(frozen=True, slots=True)
class _ConvPlan:
    """What a batch's geometry means for the convolution ring and the chunks; the same in every layer.

    Writes: the rows' targets, then the emits. slots [R + E]; places [R + E, W]; fresh [R + E, W, 1]: the value is
    an input of this batch, at index inputs [R + E, W]; kept [R + E, W, 1]: it comes from ring `sources`.
    Reads: window [R, W - 1]: places of the inputs before each row's chunk, oldest first; window_real [R, W - 1, 1]:
    which of them exist (None: all). started [R]: the row has a state; any_new: perhaps not all rows have.
    taps: see `_Taps`; None if the batch is not of single tokens in place.
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
    """Single tokens on rings as wide as the kernel: row r writes its input at write[r] and then needs the whole
    ring, whose place p meets tap index[r, p]."""

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
    """Convolution and delta rule of all rows -> [T, Hv, Dv] in the dtype of the gates; moves the slots."""
    singles, kernel = batch.layout.decode_rows, weights.spec.conv_kernel
    if plan.taps is not None and state.conv.shape[1] == kernel:
        mixed = _convolve_in_place(qkv, weights.conv, state, batch, plan.taps)
        return _step(mixed, gates, weights, state, batch, plan)
    history = _history(state.conv, batch, plan, kernel - 1)
    _write_rings(qkv, state.conv, plan)
    parts = []
    if singles:
        window = torch.cat((history[:singles], qkv[:singles, None]), dim=1)
        mixed = F.silu((window.to(gates.beta.dtype) * weights.conv.t()).sum(1))
        parts.append(_step(mixed, gates[:singles], weights, state, batch, plan))
    if plan.chunks is not None:
        mixed = _convolve(qkv, history, weights.conv, batch, gates.beta.dtype)
        parts.append(chunked(mixed, gates[singles:], weights.spec, state.recurrent, batch, plan.chunks))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _step(mixed: Tensor, gates: Gates, weights: GdnWeights, state: StateView, batch: Batch, plan: _ConvPlan) -> Tensor:
    """The delta rule for the leading rows of one token [R1, C] -> [R1, Hv, Dv]; writes their slots."""
    rows, recurrent = mixed.shape[0], state.recurrent
    place = slice(*batch.span) if batch.span else batch.source[:rows]
    current = recurrent[place].to(mixed.dtype)  # of a span, and in the same dtype: the slots themselves
    if plan.any_new:
        current.masked_fill_(~plan.started[:rows, None, None, None], 0)
    output = step(mixed, gates, weights.spec, current)
    if not batch.span:
        put(recurrent, batch.target[:rows], current)
    elif recurrent.dtype != current.dtype:
        recurrent[place] = current.to(recurrent.dtype)
    if batch.layout.checkpoints:
        # a row of one token emits its new state; what longer rows emit is written over by `chunked`
        put(recurrent, batch.emit_slot, current[batch.emit_row.clamp(max=rows - 1)])
    return output


def _convolve_in_place(qkv: Tensor, conv: Tensor, state: StateView, batch: Batch, taps: _Taps) -> Tensor:
    assert batch.span is not None
    ring = state.conv[batch.span[0]:batch.span[1]]
    ring[taps.write] = qkv
    return F.silu((ring.to(reference.wide(state.recurrent)) * conv.t()[taps.index]).sum(1), inplace=True)


def _history(conv: Tensor, batch: Batch, plan: _ConvPlan, count: int) -> Tensor:
    """The last `count` raw inputs before each row's chunk [R, count, C], zeros before position 0."""
    places = plan.window[:, plan.window.shape[1] - count:]
    history = conv[batch.source[:, None], places]
    return history if plan.window_real is None else torch.where(plan.window_real[:, -count:], history, 0)


def _write_rings(qkv: Tensor, conv: Tensor, plan: _ConvPlan) -> None:
    kept = conv[plan.sources[:, None], plan.places]
    values = torch.where(plan.fresh, qkv[plan.inputs], torch.where(plan.kept, kept, 0))
    conv[plan.slots[:, None], plan.places] = values


def _convolve(qkv: Tensor, history: Tensor, conv: Tensor, batch: Batch, dtype: torch.dtype) -> Tensor:
    """Causal depthwise convolution and silu of the longer rows -> [their tokens, C]."""
    layout, start, outputs = batch.layout, batch.layout.decode_rows, []
    # as an image of width 1 with its channels last, which is how the tokens lie in memory
    kernel = conv.to(qkv.dtype)[:, None, :, None]
    for row in range(layout.decode_rows, layout.rows):
        end = start + layout.chunks[row]
        padded = torch.cat((history[row], qkv[start:end]))[None, :, None].permute(0, 3, 1, 2)
        outputs.append(F.conv2d(padded, kernel, groups=conv.shape[0])[0, :, :, 0].t())
        start = end
    return F.silu((outputs[0] if len(outputs) == 1 else torch.cat(outputs)).to(dtype), inplace=True)
