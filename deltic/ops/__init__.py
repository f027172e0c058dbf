"""The operations that a model is made of, and who serves each of them.

`Ops` is a frozen record of functions: here their shapes, dtypes and mutation are specified (with the records of
`ops.records`); `ops.ref` is the naive oracle, `ops.torch` the default on any device. A backend is
`replace(torch_ops, gdn_mixer=..., mlp=...)`, chosen once at start. Op boundaries are fusion boundaries. Results
are freshly allocated; only the cache views are mutated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch import device as Device

from deltic.errors import ConfigError
from deltic.ops.mtp import MtpStep
from deltic.ops.types import (
    AttentionSpec,
    AttentionWeights,
    Batch,
    Block,
    CacheViews,
    DecoderWeights,
    GdnWeights,
    KvView,
    MlpWeights,
    MoeWeights,
    MtpWeights,
    Rope,
    RopeSpec,
    Sampled,
    Sampling,
    StateView,
    Weight,
)

if TYPE_CHECKING:
    from deltic.ops.encoder import Scene, VisionWeights


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do on its device besides the ops: engine/ and runner/ ask this instead of comparing devices.

    These are upper bounds, known before a model is loaded: what a loaded model gets depends on `Ops.step` and
    `Ops.mtp_step` too, which are None for models, or single replaced ops, that the kernels do not serve.

    runs_async: kernels run beside the host, so a step can be launched before the tokens of the last one are known.
    records_graphs: a step that is padded to a bucket (`Padded`) can be recorded as a graph and replayed.
    reuses_batches: steps of one layout may keep their tensors (`Batch.kept`, `Sampling.kept`).
    reports_to_pinned_memory: sampled tokens can be written to pinned host memory (`Sampling.landing`).
    max_verify_rows: rows up to which a step is faster with drafts; with more rows, writing states is what takes the
        time. None: any number.
    defers_state_writes: with more rows than `max_verify_rows`, states can be written once per `RING` tokens; between
        two writes their updates stay in the state delta log.
    drafts_on_device: a draft head can draft after a step before the host knows the step's tokens
        (`MtpStep.draft_ahead`).
    packed_formats: names of the GGUF types whose matrices can stay quantized (`PackedForm.serves` knows the widths).
    """

    runs_async: bool = False
    records_graphs: bool = False
    reuses_batches: bool = False
    reports_to_pinned_memory: bool = False
    max_verify_rows: int | None = None
    defers_state_writes: bool = False
    drafts_on_device: bool = False
    packed_formats: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Ops:
    """A backend. H: hidden size, V: vocabulary, T, L: tokens and logit rows of the batch.

    pack(weight [out, in], table) -> Block: the form in which this backend's linear layers want it; called once, at
        load. table: it is an embedding too, so that `embed` must be able to read it. Every backend also takes the
        forms of the others.
    embed(ids [T], weight [V, H], dtype) -> [T, H]
    rope(positions [3, T], spec) -> Rope
    add_norm(residual [T, H], delta [T, H] | None, weight [H] float32, eps) -> (residual + delta, its RMS norm
        scaled by weight, computed in float32); both in the residual's dtype.
    gdn_mixer(x [T, H], weights, state, batch) -> [T, H]: all that is between the norm and the residual of a Gated
        DeltaNet layer. Mutates the target and emit slots of `state`, of rows that append the ring unit, and nothing
        else in it.
    flush_delta_log(states, source, ring, base, done, target): writes slot `target` with the state as of `done`, in
    every layer: that of slot `source`, which is as of `base`, and entries base .. done - 1 of unit `ring`. The source
    may be the target; all but `states` are ints. Same bits as the steps that made the entries.
    attention_mixer(x [T, H], weights, kv, batch, rope) -> [T, H]: stores K/V at `batch.store`, then attends each
        row to its own context; K/V past a token's own index is never read.
    store_kv(x [T, H], weight, k_norm [head_dim] float32 | None, spec, kv, batch, rope): stores K/V at `batch.store`
        as attention_mixer does where there are no biases, and attends to nothing. weight [2 * kv, H]: rows k, v; the
        same bits where attention_mixer has it as a row block of its own in `qkv`.
    mlp(x [T, H], weights) -> [T, H]: down(silu(gate) * up).
    moe(x [T, H], weights) -> [T, H]: the sum of what mlp gives for each of a token's experts, times its share: softmax
        over all experts in float32, of which the largest count (of equal ones the lower id first), normalised or not;
        and of the shared expert times sigmoid of its gate. A token's result depends on that token alone.
    head(x [L, H], weight [V, H]) -> logits [L, V] float32.
    sample(logits [L, V] float32, sampling) -> Sampled. May mutate the logits.
    step(ops, decoder, views) -> a function from a batch to the logits [L, V] float32 of its `logit_tokens` and, with
        `layout.hidden`, the hidden states of all its tokens after the final norm [T, H] float32 (else None), which does
        all that these ops would do for it; None where they have to be called one by one, because some of them are of
        another backend, for instance. Takes pointers once, so the weights and the views must stay where they are. The
        function too may give None, for a batch that it does not serve, and has then done nothing.
    mtp_step(ops, weights, views, slots [S, H] float32) -> a draft head's `MtpStep`; None where it has to be put
        together from these ops. slots: the hidden states of the state slots' last tokens. Takes pointers like `step`.
    vision(x [T, H], weights, scene) -> an iterator that, when it is done, has taken x through all blocks of a vision
        tower, in place; between two items others may work. All patches of a picture see each other, and what a patch
        becomes depends on its own picture alone. x is contiguous; of float32, or of the dtype that is multiplied.
    copy_slots(states [layers, S, ...] each, source [N], target [N]), copy_pages(pools [layers, P, ...] each,
        source [N], target [N]): device copies, all layers at once.
    """

    pack: Callable[[Tensor, bool], Block]
    embed: Callable[[Tensor, Block, torch.dtype], Tensor]
    rope: Callable[[Tensor, RopeSpec], Rope]
    add_norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]
    gdn_mixer: Callable[[Tensor, GdnWeights, StateView, Batch], Tensor]
    flush_delta_log: Callable[[tuple[StateView, ...], int, int, int, int, int], None]
    attention_mixer: Callable[[Tensor, AttentionWeights, KvView, Batch, Rope], Tensor]
    store_kv: Callable[[Tensor, Weight, Tensor | None, AttentionSpec, KvView, Batch, Rope], None]
    mlp: Callable[[Tensor, MlpWeights], Tensor]
    moe: Callable[[Tensor, MoeWeights], Tensor]
    head: Callable[[Tensor, Weight], Tensor]
    sample: Callable[[Tensor, Sampling], Sampled]
    copy_slots: Callable[[tuple[Tensor, ...], Tensor, Tensor], None]
    copy_pages: Callable[[tuple[Tensor, ...], Tensor, Tensor], None]
    mtp_step: Callable[[Ops, MtpWeights, CacheViews, Tensor], MtpStep | None]
    step: Callable[[Ops, DecoderWeights, CacheViews], Callable[[Batch], tuple[Tensor, Tensor | None] | None] | None]
    vision: Callable[[Tensor, VisionWeights, Scene], Iterator[None]]


def backends(level: str = "auto", threads: int = 1) -> dict[str, Ops]:
    """Every backend, by name; `cpu`, the fastest on one, is `torch` where its kernels were not compiled.

    level, threads: the instructions that the CPU's kernels use, and on how many threads of their own.
    """
    from deltic.ops import cpu, cuda, reference, torch

    return {"reference": reference.OPS, "torch": torch.OPS, "cpu": cpu.overlay(level, threads), "cuda": cuda.overlay()}


def select(overrides: tuple[str, ...] = (), device: str = "cpu", level: str = "auto", threads: int = 1) -> Ops:
    """The best backend for a device with single ops replaced: `attention_mixer=reference`, or all of them: `reference`.
    Level and threads belong to these ops alone, whatever others there are in the process."""
    known = backends(level, threads)
    ops = known["cpu" if device == "cpu" else "cuda"]
    names = {f.name for f in fields(Ops)}
    for override in overrides:
        op, _, backend = override.rpartition("=")
        if backend not in known or (op and op not in names):
            raise ConfigError(f"ops={override!r}: write OP=BACKEND with OP one of {', '.join(sorted(names))} and "
                              f"BACKEND one of {', '.join(sorted(known))}", "ops")
        chosen = known[backend]
        ops = replace(ops, **{op: getattr(chosen, op)}) if op else chosen
    return ops


def capabilities(device: str | Device = "cpu", dtype: str = "bfloat16") -> Capabilities:
    """Returns what the backend of a device can do with models of this dtype, such as bfloat16."""
    from deltic.ops import cpu, cuda

    place = Device(device)
    return cpu.capabilities() if place.type == "cpu" else cuda.capabilities(place, dtype)


def explain(ops: Ops, decoder: DecoderWeights | None = None, views: CacheViews | None = None) -> dict[str, str]:
    """Who serves each op, and why nobody faster: `{"gdn_mixer": "cpu", "head": "torch (...)", ...}`. decoder, views:
    those of a loaded model, for which some kernels may have to leave their work to others."""
    from deltic.ops import cpu, cuda

    served = {f.name: getattr(ops, f.name).__module__.split(".")[2] for f in fields(ops)}
    served |= {name: f"torch ({why})" for name, why in cpu.missing().items() if served[name] == "torch"}
    if decoder is None or views is None:
        return served
    for backend, left_of in (("cpu", cpu.left_to_others), ("cuda", cuda.left_to_torch)):
        if backend in served.values():
            left = left_of(ops, decoder, views)
            served |= {name: who for name, who in left.items() if served[name] == backend}
    return served
