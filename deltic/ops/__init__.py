"""Defines the operations of a model and selects the backend that runs them.

`Ops` is a frozen record of functions. With the records of `ops.types` it specifies shapes, dtypes and mutation.
`ops.reference` is the naive oracle, `ops.torch` the default on any device. A backend is `replace(torch_ops,
gdn_mixer=..., mlp=...)`, selected once at start. Op boundaries are fusion boundaries. Results are newly allocated;
only the cache views are mutated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deltic.errors import ConfigError
from deltic.ops.memory import reserve
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
    MtpStep,
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


def _as_they_are(experts: tuple[MlpWeights, ...]) -> tuple[MlpWeights, ...]:
    return experts


@dataclass(frozen=True, slots=True)
class Ops:
    """The functions of a backend. H: hidden size, V: vocabulary size, T, L: tokens and logit rows of the batch.

    pack(weight [out, in], table) -> Block: converts a weight to the format of this backend's linear layers; called
        once, at load. table: the weight is also an embedding table, which `embed` must be able to read. Every backend
        also reads the formats of the other backends.

    Output projections, `down` and the sum over experts are summed in the fixed order of `ops.slices`. With weights of
    one of several shards, `gdn_mixer`, `attention_mixer`, `mlp` and `moe` return that shard's sum [T, H] in float32
    (float64 for float64 inputs), not rounded. `tree_sum` of all shards, rounded to x's dtype, has the bits of one
    shard.

    pack_experts(experts) -> experts: converts a layer's experts, whose matrices are packed, to the format of `moe`;
        called once, at load.
    embed(ids [T], weight [V, H], dtype) -> [T, H]
    rope(positions [3, T], spec) -> Rope
    add_norm(residual [T, H], delta [T, H] | None, weight [H] float32, eps) -> (residual + delta, its RMS norm scaled by
        weight, computed in float32); both in the residual's dtype.
    gdn_mixer(x [T, H], weights, state, batch) -> [T, H]: a Gated DeltaNet layer between norm and residual. Mutates the
        target and emit slots of `state` and the delta logs of rows that append.
    flush_delta_log(states, source, log, base, done, target): applies entries base .. done - 1 of delta log `log` to the
        state of slot `source`, which contains `base` tokens, and writes the result to slot `target`, in every layer.
        source may equal target; all but `states` are ints. Has the same bits as the steps that wrote the entries.
    attention_mixer(x [T, H], weights, kv, batch, rope) -> [T, H]: stores K/V at `batch.store`, then each row attends to
        its own context. Never reads K/V past a token's own index.
    store_kv(x [T, H], weight [2 * kv, H], k_norm [head_dim] float32 | None, spec, kv, batch, rope): stores K/V as
        attention_mixer without biases does, and computes no attention. weight: rows k, v. Has the same bits as
        attention_mixer if these rows are a separate row block in `qkv`.
    mlp(x [T, H], weights) -> [T, H]: down(silu(gate) * up).
    moe(x [T, H], weights) -> [T, H]: the weighted sum of a token's top experts, plus the shared expert times the
        sigmoid of its gate. Weights are a float32 softmax over all experts (ties: the lower id), normalised over the
        top ones or not. A token's result depends only on that token.
    head(x [L, H], weight [V, H]) -> logits [L, V] float32.
    sample(logits [L, V] float32, sampling) -> Sampled. May mutate the logits.
    copy_slots(states [layers, S, ...] each, source [N], target [N]), copy_pages(pools [layers, P, ...] each, source
        [N], target [N]): device copies, all layers at once.
    mtp_step(ops, weights, views, slots [S, H] float32) -> a draft head's `MtpStep`; None if the draft head must call
        the ops one by one. slots: hidden state of each state slot's last token. Keeps pointers like `step`.
    step(ops, decoder, views) -> a function from a batch to the logits [L, V] float32 of its `logit_tokens` and, with
        `layout.hidden`, all tokens' hidden states after the final norm [T, H] float32 (else None). None if the ops must
        be called one by one, e.g. because some belong to another backend. Keeps pointers: weights and views must not
        move. For a batch that it does not support, the function does nothing and returns None.
    reserve(shape, dtype, device) -> Tensor: memory for the cache, uninitialised or zero.
    vision(x [T, H], weights, scene) -> an iterator that runs x through all blocks of a vision tower, in place; other
        work may run between two items. Patches attend to all patches of the same image. x is contiguous, in float32 or
        the dtype of the activations.
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
    reserve: Callable[[tuple[int, ...], torch.dtype, str], Tensor] = reserve
    pack_experts: Callable[[tuple[MlpWeights, ...]], tuple[MlpWeights, ...]] = _as_they_are


_PLACES = ("reserve", "pack_experts")
"""Ops that only allocate or convert tensors."""


def backends(level: str = "auto", threads: int = 1) -> dict[str, Ops]:
    """Returns all backends that need no extra package, by name. `cpu` equals `torch` if its kernels were not compiled.

    level, threads: instruction set of the CPU kernels, and size of their own thread pool.
    """
    from deltic.ops import cpu, cuda, reference, torch

    return {"reference": reference.OPS, "torch": torch.OPS, "cpu": cpu.overlay(level, threads), "cuda": cuda.overlay()}


def _known(level: str, threads: int, wanted: set[str]) -> dict[str, Ops]:
    """Returns the backends, including MLX if `wanted` contains it. Raises ConfigError if its package is missing."""
    known = backends(level, threads)
    if "mlx" in wanted:
        from deltic.ops import mlx

        known["mlx"] = mlx.overlay(level, threads)
    return known


def select(overrides: tuple[str, ...] = (), device: str = "cpu", level: str = "auto", threads: int = 1) -> Ops:
    """Returns the best backend for a device. overrides: `attention_mixer=reference` replaces one op, `reference` all
    ops. level and threads apply only to the returned ops."""
    kind = device.partition(":")[0]
    known = _known(level, threads, {kind, *(override.rpartition("=")[2] for override in overrides)})
    ops = known[kind]
    names = {f.name for f in fields(Ops)}
    for override in overrides:
        op, _, backend = override.rpartition("=")
        if backend not in known or (op and op not in names):
            raise ConfigError(f"ops={override!r}: write OP=BACKEND with OP one of {', '.join(sorted(names))} and "
                              f"BACKEND one of {', '.join(sorted(known))}", "ops")
        chosen = known[backend]
        ops = replace(ops, **{op: getattr(chosen, op)}) if op else chosen
    return ops


def explain(ops: Ops, decoder: DecoderWeights | None = None, views: CacheViews | None = None) -> dict[str, str]:
    """Returns the backend of each op, with the reason if a faster one is not used: `{"gdn_mixer": "cpu", "head": "torch
    (...)", ...}`. decoder, views: of a loaded model; its shapes or dtypes may force ops to torch."""
    from deltic.ops import cpu, cuda

    served = {f.name: getattr(ops, f.name).__module__.split(".")[2] for f in fields(ops) if f.name not in _PLACES}
    served |= {name: f"torch ({why})" for name, why in cpu.missing().items() if served[name] == "torch"}
    if decoder is None or views is None:
        return served
    for backend, left_of in (("cpu", cpu.left_to_others), ("cuda", cuda.left_to_torch)):
        if backend in served.values():
            left = left_of(ops, decoder, views)
            served |= {name: who for name, who in left.items() if served[name] == backend}
    return served


@dataclass(frozen=True, slots=True)
class NativeKernels:
    """The compiled CPU kernels. level: this processor's best instruction set. error: why they are unusable."""

    path: Path
    level: str = ""
    error: str = ""


def native_kernels() -> NativeKernels:
    """Describes the compiled CPU kernels. Raises ConfigError if their sources are not the package's."""
    from deltic.ops.cpu import library

    path, loaded = Path(library.__file__).parent / "libdeltic.so", library.load()
    if isinstance(loaded, str):
        return NativeKernels(path, error=loaded)
    return NativeKernels(path, library.LEVELS[loaded.deltic_best_level()])
