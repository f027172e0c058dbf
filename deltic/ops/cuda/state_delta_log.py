"""Gated DeltaNet layers over replay rings: rows of several tokens, and those that have left tokens in a ring."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from deltic.ops.cuda import arguments as args
from deltic.ops.cuda.driver import CompileError, Module, architecture, compile_source, headers
from deltic.ops.cuda.kernel_config import (
    STATES,
    WHOLE_STATE_SHARED_BYTES,
    WHOLE_STATE_THREADS,
    entry,
    gdn_slice,
    state_header,
)
from deltic.ops.torch.gdn import flush_delta_log as flush_by_torch
from deltic.ops.types import RING, Batch, CacheViews, DeltaLogView, GdnSpec, GdnWeights, StateView


@dataclass(frozen=True, slots=True)
class NewDeltas:
    """What a step's rows append, before it goes to their rings: inputs [layers, T, C] bf16, keys [layers, T, Hk * Dk],
    decays [layers, T, Hv] float32. core [T, values] float32: what a layer's heads give, neither normed nor gated."""

    inputs: Tensor
    keys: Tensor
    decays: Tensor
    core: Tensor


class StateDeltaLog:
    """The rings of a model, whose layers' lie one after another."""

    def __init__(self, module: Module, views: CacheViews, spec: GdnSpec, most_rows: int) -> None:
        rings = [state.delta_log for state in views.states if state.delta_log is not None]
        assert rings and len(rings) == len(views.states), "some layers have replay rings"
        for first, second in pairwise(rings):
            for name in ("inputs", "keys", "decays"):
                one, other = getattr(first, name), getattr(second, name)
                assert one.is_contiguous() and other.data_ptr() - one.data_ptr() == one.nbytes, "rings lie apart"
        self._module, self._states, self._spec, self._first = module, views.states, spec, rings[0]
        self._device = rings[0].keys.device
        self._ended = torch.zeros(most_rows * spec.value_heads, dtype=torch.int32, device=self._device)

    def begin(self, tokens: int) -> NewDeltas:
        """A step's memory."""
        spec, layers = self._spec, len(self._states)
        return NewDeltas(torch.empty(layers, tokens, spec.channels, dtype=torch.bfloat16, device=self._device),
                     torch.empty(layers, tokens, spec.keys, device=self._device),
                     torch.empty(layers, tokens, spec.value_heads, device=self._device),
                     torch.empty(tokens, spec.values, device=self._device))

    def mix(self, mixer: GdnWeights, store: int, batch: Batch, proj: Tensor, stride: int, y: Tensor,
            fresh: NewDeltas) -> None:
        """From a layer's projections [T, stride] to what its heads give, normed and gated, [T, values] bf16."""
        spec, state = mixer.spec, self._states[store]
        ring, kind = _ring(state), "few" if proj.dtype == torch.float32 else "many"
        heads = spec.value_heads * len(batch.source)
        blocks = spec.value_dim // gdn_slice(spec, kind) * heads
        self._module.launch(
            f"k_gdn_verify_{kind}",
            (blocks,),
            128,
            args.VerifyArgs(
                proj=proj,
                conv=mixer.conv,
                decay=mixer.decay,
                dt_bias=mixer.dt_bias,
                norm=mixer.norm,
                state=state.recurrent,
                ring=state.conv,
                y=y,
                count=batch.count,
                starts=batch.starts,
                done=batch.done,
                source=batch.source,
                target=batch.target,
                eps=spec.eps,
                key_heads=spec.key_heads,
                value_heads=spec.value_heads,
                stride=stride,
                tiled=int(spec.tiled),
                heads=heads,
                base=batch.base,
                unit=batch.delta_log,
                append=batch.append if batch.layout.appends else None,
                inputs=ring.inputs,
                keys=ring.keys,
                updates=ring.updates,
                decays=ring.decays,
                new_inputs=fresh.inputs[store],
                new_keys=fresh.keys[store],
                new_decays=fresh.decays[store],
                core=fresh.core,
                ended=self._ended,
            ),
        )

    def mix_decode_rows(self, mixer: GdnWeights, store: int, batch: Batch, proj: Tensor, stride: int, y: Tensor,
                    blocks: int) -> None:
        """As `mix`, of many rows of one token whose states pass whole, in this many blocks. What rows append goes to
        their rings right away, which have room for it."""
        spec, state = mixer.spec, self._states[store]
        ring, heads = _ring(state), spec.value_heads * batch.source.shape[0]
        self._module.launch("k_gdn_many_rings", (min(heads, blocks),), WHOLE_STATE_THREADS, args.OverRingsArgs(
            proj=proj, conv=mixer.conv, decay=mixer.decay, dt_bias=mixer.dt_bias, norm=mixer.norm,
            state=state.recurrent, ring=state.conv, y=y, count=batch.count, starts=batch.starts, done=batch.done,
            source=batch.source, target=batch.target, eps=spec.eps, key_heads=spec.key_heads,
            value_heads=spec.value_heads, stride=stride, tiled=int(spec.tiled), heads=heads, base=batch.base,
            unit=batch.delta_log, append=batch.append if batch.layout.appends else None, inputs=ring.inputs,
            keys=ring.keys, updates=ring.updates, decays=ring.decays),
            WHOLE_STATE_SHARED_BYTES)

    def end(self, batch: Batch, fresh: NewDeltas) -> None:
        """After the last layer: what was appended goes to the rings."""
        if not batch.layout.appends:
            return
        ring, tokens = self._first, fresh.inputs.shape[1]
        self._module.launch("k_append", (tokens, len(self._states)), 256, args.AppendArgs(
            new_inputs=fresh.inputs, new_keys=fresh.keys, new_decays=fresh.decays, inputs=ring.inputs, keys=ring.keys,
            decays=ring.decays, count=batch.count, starts=batch.starts, done=batch.done, unit=batch.delta_log,
            append=batch.append, channels=self._spec.channels, key_size=self._spec.keys,
            value_heads=self._spec.value_heads, tokens=tokens, units=len(ring.keys)))


def _ring(state: StateView) -> DeltaLogView:
    assert state.delta_log is not None
    return state.delta_log


def flush_delta_log(states: tuple[StateView, ...], source: int, ring: int, base: int, done: int, target: int) -> None:
    """As `Ops.flush_delta_log`: with the bits of the kernels here, for states that they know."""
    conv, state = states[0].conv, states[0].recurrent
    kind = STATES.get(state.dtype)
    known = conv.dtype == torch.bfloat16 and conv.shape[1] == 4 and conv.is_cuda and state.shape[3] % 4 == 0
    module = _module(conv.device, kind) if kind and known else None
    if module is None:
        return flush_by_torch(states, source, ring, base, done, target)
    assert done - base <= RING
    first, (heads, key_dim, value_dim) = states[0], states[0].recurrent.shape[1:]
    view = _ring(first)
    steps = {name: _step([getattr(_ring(state), name) for state in states])
             for name in ("inputs", "keys", "updates", "decays")}
    with torch.cuda.device(conv.device):
        module.launch("k_fold", (heads, 8, len(states)), 256, args.FoldArgs(
            source_state=first.recurrent[source], source_conv=conv[source], state=first.recurrent[target],
            conv=conv[target], inputs=view.inputs[ring], keys=view.keys[ring], updates=view.updates[ring],
            decays=view.decays[ring], key_heads=view.keys.shape[2], value_heads=heads, key_dim=key_dim,
            value_dim=value_dim, channels=conv.shape[2], tiled=int(view.tiled), base=base, done=done,
            state_step=_step([state.recurrent for state in states]), conv_step=_step([state.conv for state in states]),
            **{f"{name}_step": step for name, step in steps.items()}), overlap=False)


def _step(layers: list[Tensor]) -> int:
    """Numbers from one layer's tensor to the next one's; all must be as far apart."""
    found = {second.data_ptr() - first.data_ptr() for first, second in pairwise(layers)} or {0}
    assert len(found) == 1, "layers do not lie one after another"
    return found.pop() // layers[0].element_size()


def flush_source(state: str = "float") -> str:
    """The text of the kernel that folds. state: as of `Shapes`."""
    return state_header(state) + headers("gdn", "verify") + entry("fold", "Fold", "256", "fold")


@cache
def _module(device: torch.device, state: str) -> Module | None:
    """None where the kernel cannot be compiled."""
    try:
        compile_source(flush_source(state), architecture(device))
    except CompileError:
        return None
    return Module(flush_source(state), device)
