"""Gated DeltaNet layers with state delta logs: steps of rows with several tokens, or with entries in a log."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from deltic.ops.cuda import arguments as args
from deltic.ops.cuda.card import card_of
from deltic.ops.cuda.driver import Module, entry, headers, module_or_none
from deltic.ops.cuda.kernel_config import (
    STATES,
    WHOLE_STATE_THREADS,
    gdn_slice,
    state_header,
)
from deltic.ops.torch.gdn import flush_delta_log as flush_by_torch
from deltic.ops.types import RING, Batch, CacheViews, DeltaLogView, GdnSpec, GdnWeights, StateView


@dataclass(frozen=True, slots=True)
class NewDeltas:
    """The entries that a step's rows append to their logs at the end of the step, and scratch memory.

    inputs [layers, T, C] bf16. keys [layers, T, Hk * Dk], decays [layers, T, Hv] float32.
    core [T, values] float32: scratch memory for a layer's heads before their norm and gate.
    """

    inputs: Tensor
    keys: Tensor
    decays: Tensor
    core: Tensor


class StateDeltaLog:
    """The state delta logs of a model. The logs of its layers are contiguous."""

    def __init__(self, module: Module, views: CacheViews, spec: GdnSpec, most_rows: int) -> None:
        logs = [state.delta_log for state in views.states if state.delta_log is not None]
        assert logs and len(logs) == len(views.states), "some layers have no delta log"
        for first, second in pairwise(logs):
            for name in ("inputs", "keys", "decays"):
                one, other = getattr(first, name), getattr(second, name)
                assert one.is_contiguous() and other.data_ptr() - one.data_ptr() == one.nbytes, "delta logs lie apart"
        self._module, self._states, self._spec, self._first = module, views.states, spec, logs[0]
        self._device = logs[0].keys.device
        self._ended = torch.zeros(most_rows * spec.value_heads, dtype=torch.int32, device=self._device)

    def begin(self, tokens: int) -> NewDeltas:
        """Allocates the new entries of a step."""
        spec, layers = self._spec, len(self._states)
        return NewDeltas(torch.empty(layers, tokens, spec.channels, dtype=torch.bfloat16, device=self._device),
                     torch.empty(layers, tokens, spec.keys, device=self._device),
                     torch.empty(layers, tokens, spec.value_heads, device=self._device),
                     torch.empty(tokens, spec.values, device=self._device))

    def mix(self, mixer: GdnWeights, store: int, batch: Batch, proj: Tensor, stride: int, y: Tensor,
            new: NewDeltas) -> None:
        """Computes a layer's heads from projections [T, stride], normed and gated, to y [T, values] bf16."""
        spec, state = mixer.spec, self._states[store]
        kind, heads = "few" if proj.dtype == torch.float32 else "many", spec.value_heads * len(batch.source)
        blocks = spec.value_dim // gdn_slice(spec, kind, mixer.shards) * heads
        self._module.launch(f"k_gdn_verify_{kind}", (blocks,), 128, args.VerifyArgs(
            **gdn_arguments(mixer, state, batch, proj, stride, y), **_log_arguments(state, batch), heads=heads,
            new_inputs=new.inputs[store], new_keys=new.keys[store], new_decays=new.decays[store], core=new.core,
            ended=self._ended))

    def mix_decode_rows(self, mixer: GdnWeights, store: int, batch: Batch, proj: Tensor, stride: int, y: Tensor,
                        blocks: int) -> None:
        """Works like `mix` for many rows of one token, with whole states in shared memory and at most `blocks` blocks.
        Appends the entries to the logs at once; the logs must have room for them."""
        state, heads = self._states[store], mixer.spec.value_heads * len(batch.source)
        self._module.launch("k_gdn_many_rings", (min(heads, blocks),), WHOLE_STATE_THREADS, args.OverRingsArgs(
            **gdn_arguments(mixer, state, batch, proj, stride, y), **_log_arguments(state, batch), heads=heads),
            card_of(self._device).whole_state_bytes)

    def end(self, batch: Batch, new: NewDeltas) -> None:
        """Appends the step's entries to the logs. Call this after the last layer."""
        if not batch.layout.appends:
            return
        log, tokens = self._first, new.inputs.shape[1]
        self._module.launch("k_append", (tokens, len(self._states)), 256, args.AppendArgs(
            new_inputs=new.inputs, new_keys=new.keys, new_decays=new.decays, inputs=log.inputs, keys=log.keys,
            decays=log.decays, count=batch.count, starts=batch.starts, done=batch.done, unit=batch.delta_log,
            append=batch.append, channels=self._spec.channels, key_size=self._spec.keys,
            value_heads=self._spec.value_heads, tokens=tokens, units=len(log.keys)))


def gdn_arguments(mixer: GdnWeights, state: StateView, batch: Batch, proj: Tensor, stride: int, y: Tensor
                  ) -> dict[str, object]:
    """Returns all members of `GdnArgs` but `heads`. proj [T, stride]: projections. y: receives the heads' outputs."""
    spec = mixer.spec
    return {
        "proj": proj, "conv": mixer.conv, "decay": mixer.decay, "dt_bias": mixer.dt_bias, "norm": mixer.norm,
        "state": state.recurrent, "ring": state.conv, "y": y, "count": batch.count, "starts": batch.starts,
        "done": batch.done, "source": batch.source, "target": batch.target, "eps": spec.eps,
        "key_heads": spec.key_heads, "value_heads": spec.value_heads, "stride": stride, "tiled": int(spec.tiled)}


def _log_arguments(state: StateView, batch: Batch) -> dict[str, object]:
    log = _log(state)
    return {"base": batch.base, "unit": batch.delta_log, "append": batch.append if batch.layout.appends else None,
            "inputs": log.inputs, "keys": log.keys, "updates": log.updates, "decays": log.decays}


def _log(state: StateView) -> DeltaLogView:
    assert state.delta_log is not None
    return state.delta_log


def flush_delta_log(states: tuple[StateView, ...], source: int, log: int, base: int, done: int, target: int) -> None:
    """Implements `Ops.flush_delta_log` with the bits of the kernels. Torch serves states that they do not support."""
    conv, state = states[0].conv, states[0].recurrent
    kind = STATES.get(state.dtype)
    known = conv.dtype == torch.bfloat16 and conv.shape[1] == 4 and conv.is_cuda and state.shape[3] % 4 == 0
    module = _module(conv.device, kind) if kind and known else None
    if module is None:
        return flush_by_torch(states, source, log, base, done, target)
    assert done - base <= RING
    first, (heads, key_dim, value_dim) = states[0], states[0].recurrent.shape[1:]
    view = _log(first)
    steps = {name: _step([getattr(_log(state), name) for state in states])
             for name in ("inputs", "keys", "updates", "decays")}
    with torch.cuda.device(conv.device):
        module.launch("k_fold", (heads, 8, len(states)), 256, args.FoldArgs(
            source_state=first.recurrent[source], source_conv=conv[source], state=first.recurrent[target],
            conv=conv[target], inputs=view.inputs[log], keys=view.keys[log], updates=view.updates[log],
            decays=view.decays[log], key_heads=view.keys.shape[2], value_heads=heads, key_dim=key_dim,
            value_dim=value_dim, channels=conv.shape[2], tiled=int(view.tiled), base=base, done=done,
            state_step=_step([state.recurrent for state in states]), conv_step=_step([state.conv for state in states]),
            **{f"{name}_step": step for name, step in steps.items()}), overlap=False)


def _step(layers: list[Tensor]) -> int:
    """Returns the number of elements between the tensors of consecutive layers. All distances must be equal."""
    distances = {second.data_ptr() - first.data_ptr() for first, second in pairwise(layers)} or {0}
    assert len(distances) == 1, "layers do not lie one after another"
    return distances.pop() // layers[0].element_size()


def flush_source(state: str = "float") -> str:
    """Returns the CUDA source of the kernel that flushes logs. state: as in `Shapes`."""
    return state_header(state) + headers("gdn", "verify") + entry("fold", "Fold", "256", "fold")


@cache
def _module(device: torch.device, state: str) -> Module | None:
    return module_or_none(flush_source(state), device)
