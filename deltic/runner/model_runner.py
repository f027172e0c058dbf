"""A loaded model with its decoder, cache and limits; `ModelRunner.run` runs one batch through it."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol
from weakref import WeakMethod

import torch
from torch import Tensor

from deltic.cache.handles import SequenceCache
from deltic.cache.manager import HybridCache
from deltic.cache.memory_plan import MemoryPlan
from deltic.cache.offload.disk import DiskRecords
from deltic.cache.offload.identity import ModelIdentity
from deltic.cache.operations import CopyPage, CopySlot
from deltic.cache.sharded_pools import ShardedPools
from deltic.cache.tensors import CachePools
from deltic.config import EngineConfig, GenerationDefaults, ModelConfig
from deltic.config.vision import Vision
from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.errors import ConfigError, RequestError
from deltic.loader.gguf.tokenizer import TokenizerTexts
from deltic.model.decoder import Decoder, Observer
from deltic.model.mtp_head import MtpHead as MtpHead
from deltic.model.partial_head import PartialHead
from deltic.ops import Ops, explain, select
from deltic.ops.adapters import Adapter
from deltic.ops.capabilities import Capabilities, can_defer_state_writes, device_capabilities
from deltic.ops.cpu import has_wide_activations, use_torch_threads
from deltic.ops.cuda.decode import DecodeStep, sharded_step
from deltic.ops.cuda.driver import make_current
from deltic.ops.cuda.mtp import draft_heads
from deltic.ops.cuda.sample import sample_parts
from deltic.ops.cuda.tensor_parallel import ShardedLogits, ShardedStep
from deltic.ops.memory import is_shortage
from deltic.ops.torch import OPS as TORCH
from deltic.ops.torch.adapters import adapted_weights
from deltic.ops.types import Batch, CacheViews, PreparesPrompts, Sampled, Sampling
from deltic.params import PAGE, Auto, Mtp
from deltic.runner.cuda_graphs import CudaGraphs, draft_buckets, recorded_buckets
from deltic.runner.expert_offload import ExpertOffload
from deltic.runner.image_embeds import Encode
from deltic.runner.input_batch import FEW_ROWS, BucketNumbers, InputBatch, build
from deltic.runner.layer_offload import LayerOffload
from deltic.runner.sharded_graphs import ShardedGraphs
from deltic.runner.warm_up import prompt_plans
from deltic.spec_decode.mtp import MtpRunner, draft_sizes


class Model(Protocol):
    """A model with its cache, on any backend.

    name: the name under which users request the model.
    config: the checkpoint's architecture.
    options: how the model runs, with the limits of a request.
    generation: defaults for fields that a request leaves open.
    memory: limits on the sequences and tokens that run at once.
    cache: grants the pages and slots of batches, and carries out operations on its pools (`cache.pools`).
    mtp_runner: the draft head over this cache, if it is used.
    partial_head: the part of the logits matrix that proposes drafts, if it is used.
    draft: the draft model, if there is one.
    encode: computes image embeddings, if the model has a vision tower.
    experts: the offloaded experts, if there are any.
    layers: the offloaded feed-forwards of dense layers, if there are any.
    capabilities: features of the backend.
    numbers: per bucket, the device memory from which recorded CUDA graphs read a step's integers.
    """

    name: str
    config: ModelConfig
    options: EngineConfig
    generation: GenerationDefaults
    memory: MemoryPlan
    cache: HybridCache
    mtp_runner: MtpRunner | None
    partial_head: PartialHead | None
    draft: Model | None
    encode: Encode | None
    experts: ExpertOffload | None
    layers: LayerOffload | None
    capabilities: Capabilities
    numbers: BucketNumbers

    @property
    def device(self) -> torch.device:
        """The device of batches and logits."""

    def run(self, batch: Batch) -> Tensor:
        """Runs one step. Returns the logits [L, V] float32 of its `logit_tokens`, valid until the next step. Does not
        move cursors. With a draft head the batch must ask for the hidden states."""

    def run_hidden(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """As `run`; also returns the hidden states [T, H] float32 of all tokens after the final norm, if the batch asks
        for them."""

    def sample(self, logits: Tensor, sampling: Sampling) -> Sampled:
        """Samples from logits [L, V] float32, which it may change."""


log = logging.getLogger("deltic")

_WITHOUT_WEIGHTS = {"add_norm", "rope", "embed", "sample", "copy_slots", "copy_pages", "flush_delta_log", "pack",
                    "step", "mtp_step", "store_kv", "vision"}
"""Names of the ops whose results do not depend on adapters."""


def select_ops(options: EngineConfig, threads: int) -> Ops:
    """Returns the ops of one model, with `threads` CPU threads of their own."""
    ops = select(options.ops, options.device, options.cpu_level, threads)
    use_torch_threads(ops, threads)
    return ops


def defers_state_writes(config: ModelConfig, options: EngineConfig, dtype: str) -> bool:
    """Returns True if decode steps of more than FEW_ROWS rows should leave state updates in delta logs."""
    return (options.max_batch > FEW_ROWS and not options.batch_invariant and config.linear is not None
            and can_defer_state_writes(options.device, dtype))


@dataclass(frozen=True, slots=True)
class LayerStatistics:
    """Statistics of one layer's output for the last token of a step, used to find broken layers."""

    layer: int
    size: int
    nonzero: int
    nan: int
    minimum: float
    maximum: float
    mean: float


@dataclass(slots=True, eq=False)
class ModelRunner:
    """A `Model` on this machine.

    path: the model's directory or file; None: random weights.
    threads: CPU threads.
    tokenizer: texts of the tokenizer, if they are not files of the directory.
    notes: small records on disk, if there is a cache directory.
    mtp, partial_head: the model's draft head, or the part of the logits matrix that proposes drafts, if one is used.
    encode, vision: the vision tower, if there is one.
    identity: identifies the model to stores outside of this process, if its weights lie in files.
    statistics: statistics of the last step's layer outputs, if `options.debug_layers`.
    hooks: called with each layer's output, which they may replace; layers are then computed one by one.
    profiler: called with each batch before its step, while a profile is taken.

    `__post_init__` derives the other fields:

    shard_views: the cache's tensors by layer, for each device.
    step: runs a batch in one native call, if the ops have one.
    mtp_runner: the draft head over this cache.
    graphs: replays decode steps, on a GPU.
    capabilities, numbers: as in `Model`.
    """

    name: str
    path: Path | None
    config: ModelConfig
    options: EngineConfig
    generation: GenerationDefaults
    memory: MemoryPlan
    decoder: Decoder
    cache: HybridCache
    threads: int
    tokenizer: TokenizerTexts | None = None
    notes: DiskRecords | None = None
    mtp: MtpHead | None = None
    encode: Encode | None = None
    vision: Vision | None = None
    draft: Model | None = None
    experts: ExpertOffload | None = None
    layers: LayerOffload | None = None
    identity: ModelIdentity | None = None
    partial_head: PartialHead | None = None
    statistics: list[LayerStatistics] = field(default_factory=list)
    hooks: list[Observer] = field(default_factory=list)
    profiler: Callable[[Batch], None] | None = None
    shard_views: tuple[CacheViews, ...] = field(init=False)
    step: Callable[[Batch], tuple[Tensor, Tensor | None] | None] | None = field(init=False)
    mtp_runner: MtpRunner | None = field(init=False)
    graphs: CudaGraphs | ShardedGraphs | None = field(init=False)
    capabilities: Capabilities = field(init=False)
    numbers: BucketNumbers = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        pools, ops = self.pools, self.decoder.ops
        self.shard_views = tuple(CacheViews(shard.kv_views(), shard.state_views()) for shard in pools.shards)
        several = bool(self.decoder.others) and self.options.on_gpu
        self.step = (sharded_step(ops, self.decoder.shards, self.shard_views) if several
                     else ops.step(ops, self.decoder.weights, self.views))
        if self.decoder.others and has_wide_activations(ops, self.decoder.weights, self.views):
            self.decoder = replace(self.decoder, dtype=torch.float32)
        self.mtp_runner = self._draft_head()
        if self.step is None:
            self.partial_head = None  # its product would have another precision than torch's own steps
        if self.mtp_runner:
            pools.backlogs.append(WeakMethod(self.mtp_runner.catch_up))  # a copy of this runner adds its own
        graphs = (ShardedGraphs(self.step) if isinstance(self.step, ShardedStep)
                  else CudaGraphs(lambda batch: self._follow(batch)[0]))
        self.graphs = (graphs
                       if self.options.on_gpu and not self.options.debug_layers
                       # torch's mixture of experts waits for the device
                       and (self.config.experts is None or self.step is not None) else None)
        fast = (
            self.graphs is not None
            and self.step is not None
            and (self.mtp_runner is None or self.mtp_runner.drafts_on_device)
        )
        if isinstance(self.options.speculation, Auto) and self.options.on_gpu and not fast:
            self.mtp_runner = None  # torch would compute it op by op, which is too slow
        may_verify = pools.shards[0].delta_logs is not None or self.config.linear is None
        verifies = fast and may_verify and not self.options.batch_invariant
        defers = verifies and self.config.linear is not None
        self.capabilities = replace(device_capabilities(pools.device), max_verify_rows=FEW_ROWS if verifies else None,
                                    defer_from=FEW_ROWS + 1 if defers else None,
                                    adapts=(fast and isinstance(self.step, DecodeStep)
                                            and (self.mtp_runner is None or verifies)))

    def _draft_head(self) -> MtpRunner | None:
        head, slots = self.mtp, [shard.hidden[0] for shard in self.pools.shards if shard.hidden is not None]
        if head is None or not slots:
            return None
        if not isinstance(self.step, ShardedStep):
            step = head.ops.mtp_step(head.ops, head, self.views, slots[0]) if len(head.shards) == 1 else None
            return MtpRunner(head, self.shard_views, slots, step)
        heads = draft_heads(head.ops, head.shards, self.shard_views, slots, self.step.exchange)
        if heads is None:
            log.warning("nothing is drafted: on several GPUs deltic's own kernels do not know this draft head")
            return None
        self.step.follow = heads.follow
        return MtpRunner(head, self.shard_views, slots, heads.step)

    def check_kernels(self) -> None:
        """Raises ConfigError if the options need deltic's GPU kernels and these do not support this model."""
        if not self.options.on_gpu or self.step is not None:
            return
        if self.decoder.others:
            why = explain(self.ops, self.decoder.weights, self.views)["step"]
            raise ConfigError(f"tp={self.options.tp} is not possible: on several GPUs only deltic's own kernels serve "
                              f"a model: {why}", "tp")
        if self.options.batch_invariant:
            log.warning("batch_invariant: on the GPU torch serves the steps, whose sums may depend on the number of "
                        "rows")
        if self.experts or self.layers:
            why = explain(self.ops, self.decoder.weights, self.views)["step"]
            option = "gpu_memory" if self.layers else "expert_memory"
            raise ConfigError(f"{option} is not possible: on a GPU only deltic's own kernels read weights in host "
                              f"memory: {why}", option)

    @property
    def pools(self) -> CachePools | ShardedPools:
        """The cache's tensors."""
        assert isinstance(self.cache.pools, CachePools | ShardedPools)
        return self.cache.pools

    @property
    def views(self) -> CacheViews:
        """The cache's tensors by layer, on the first device."""
        return self.shard_views[0]

    @property
    def ops(self) -> Ops:
        """The ops of the decoder's layers."""
        return self.decoder.ops

    @property
    def device(self) -> torch.device:
        return self.pools.device

    def run(self, batch: Batch) -> Tensor:
        """Runs one step. Returns the logits [L, V] float32 of its `logit_tokens`. Does not move cursors. With a draft
        head the batch must ask for the hidden states."""
        return self.run_hidden(batch)[0]

    @torch.inference_mode()
    def run_hidden(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """As `run`; also returns the hidden states [T, H] float32 of all tokens after the final norm, if the batch asks
        for them."""
        use_torch_threads(self.decoder.ops, self.threads)
        if isinstance(self.step, ShardedStep):
            self.step.check()
        if batch.padded is not None:
            self.pools.wait()
        for offload in (self.experts, self.layers):
            if offload is not None:
                offload.store.begin_step()
        if self.profiler is not None:
            self.profiler(batch)
        logits = self.graphs.run(batch) if self.graphs and not self.hooks else None
        if logits is not None:
            return logits, None
        return self._follow(batch)

    def _follow(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Runs a step without a CUDA graph, and the draft head after it."""
        logits, hidden = self._forward(batch)
        hidden = None if hidden is None else hidden.float()
        if self.mtp_runner is not None and not isinstance(self.step, ShardedStep):  # a ShardedStep runs the head itself
            assert hidden is not None, "a draft head needs all hidden states"
            self.pools.wait()
            self.mtp_runner.follow(batch, hidden)
        return logits, hidden

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Warms up a GPU: records the CUDA graphs of all decode steps, with and without drafts, and runs prompts of all
        sizes, so that no request waits for loading. Must run in the thread that will run the steps. Writes to page 0,
        slot 0 and delta log 0, which must be free."""
        if not self.options.on_gpu:
            return
        make_current(self.device)  # the model may have been loaded in another thread
        if self.graphs is not None and (self.mtp_runner is None or self.capabilities.verifies):
            self._warm_up_decode()
        if not self.options.batch_invariant:  # batch_invariant computes prompts in decode steps
            self._warm_up_prompts()

    def _warm_up_decode(self) -> None:
        head, memory = self.mtp_runner is not None, InputBatch(self.numbers)
        began, most = time.perf_counter(), FEW_ROWS if self.options.batch_invariant else self.memory.max_batch
        for rows, pages in recorded_buckets(self.path, min(most, self.memory.max_batch), self.memory.max_context):
            deferred = self.capabilities.defers_state_writes and rows > FEW_ROWS
            row = PlannedRow((0,), int(deferred), (self.pools.last_page,) * pages, 0, 1, base=0, append=deferred)
            logits = self.run(build(StepPlan((row,) * rows), self.device, hidden=head, memory=memory,
                                    verified=self.capabilities.verifies))
        if self.capabilities.verifies and (self._drafts or self.capabilities.defers_state_writes):
            self._warm_up_rings(memory)
            if self.views.states:
                self.ops.flush_delta_log(self.views.states, 0, 0, 0, 1, 0)
        nothing = torch.zeros(len(logits), device=self.device)
        self.sample(logits, Sampling(nothing, nothing.long(), nothing + 1, nothing, nothing.long()))
        torch.cuda.synchronize(self.device)
        assert self.graphs
        log.info("%s: recorded %d graphs of steps that decode in %.2f s", self.name, len(self.graphs.buckets),
                 time.perf_counter() - began)

    def _warm_up_prompts(self) -> None:
        head, memory, began = self.mtp_runner is not None, InputBatch(self.numbers), time.perf_counter()
        budget = self.options.token_budget
        assert budget is not None
        if isinstance(self.step, PreparesPrompts):
            self.step.prepare_prompts(min(budget, self.memory.max_context))
        slow = bool(self.experts or self.layers)
        plans = [*prompt_plans(budget, self.memory.max_context, self.memory.max_batch, slow, self.pools.last_page)]
        for plan in plans:
            try:
                self.run(build(plan, self.device, hidden=head, memory=memory, verified=self.capabilities.verifies))
            except Exception as error:
                if not is_shortage(error):  # such requests will fail alone; a failed warm-up need not end the server
                    log.exception("%s: a step with prompts failed before the start", self.name)
                    break
                log.warning("%s: there is no memory for a step with %d prompt tokens, so that long prompts need more "
                            "steps: choose a smaller `token_budget`, `memory` or `gpu_memory_utilization`", self.name,
                            sum(len(row.tokens) for row in plan.rows))
        self.pools.apply((CopySlot(0, 0), CopyPage(0, 0)))
        self.pools.sound((0,), (0,), PAGE)
        torch.cuda.synchronize(self.device)
        log.info("%s: ran %d steps with prompts in %.2f s", self.name, len(plans), time.perf_counter() - began)

    @property
    def _drafts(self) -> int:
        """The maximum number of drafts of a row."""
        speculation = self.options.speculation
        if isinstance(speculation, Auto):
            return Mtp().tokens if self.mtp_runner else 0
        return speculation.tokens if speculation else 0

    def _warm_up_rings(self, memory: InputBatch) -> None:
        """Records steps of few rows that verify drafts or have tokens in delta logs."""
        most, head = self._drafts, self.mtp_runner
        for rows, pages in draft_buckets(min(self.memory.max_batch, FEW_ROWS), self.memory.max_context):
            each = 1
            while each < 2 * (most + 1):
                # one token is in the delta log, or all are appended
                row = PlannedRow(
                    (0,) * min(each, most + 1),
                    int(each == 1),
                    (self.pools.last_page,) * pages,
                    0,
                    min(each, most + 1),
                    base=0,
                    append=each > 1,
                )
                self.run(build(StepPlan((row,) * rows), self.device, hidden=head is not None, memory=memory,
                               verified=True))
                each *= 2
            for drafts in draft_sizes(most) if most else ():
                if head:
                    head.record(rows, pages, drafts)

    def sample(self, logits: Tensor, sampling: Sampling) -> Sampled:
        """Samples from logits [L, V] float32, which it may change."""
        if isinstance(logits, ShardedLogits):
            found = sample_parts(logits.parts, sampling)
            if found is not None:
                return found
            logits = logits.whole
        return self.decoder.ops.sample(logits, sampling)

    def _forward(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Runs the decoder. Returns logits, and the hidden states of all tokens if the batch asks for them."""
        observer = self._observer()
        native = self.step is not None and observer is None and not (batch.adapters and self.options.on_gpu)
        found = self.step(batch) if self.step is not None and native else None
        if found is not None:
            return found
        assert batch.adapter_entries is None, "torch has no table of adapters"
        assert not isinstance(self.step, ShardedStep), "several GPUs do not serve such a batch"
        self.pools.wait()
        decoder = self.decoder
        if batch.adapters:
            decoder = replace(decoder, ops=TORCH, weights=adapted_weights(decoder.weights, batch))
        hidden = decoder.forward(batch, *self.shard_views, observe=observer)
        logits = decoder.logits(hidden[batch.logit_tokens] if batch.layout.hidden else hidden)
        return logits, hidden if batch.layout.hidden else None

    def adapter_entries(self, adapters: Mapping[str, Adapter]) -> Mapping[str, int]:
        """Returns the table entries of adapters by their identities, for the step that is launched next. The GPU
        kernels for few tokens read this table; torch adds the terms of adapters without an entry."""
        if not isinstance(self.step, DecodeStep) or not self.capabilities.adapts or self.hooks:
            return {}
        found = zip(adapters, self.step.adapter_entries([*adapters.values()]), strict=True)
        return {identity: entry for identity, entry in found if entry is not None}

    def prepare_adapters(self) -> None:
        """Compiles the kernels for adapters, so that the first step with an adapter need not wait, or logs why they are
        not used."""
        why = self.step.why_no_adapters() if isinstance(self.step, DecodeStep) else None
        if why:
            log.warning("torch computes all rows with adapters: %s", why)

    @property
    def not_adapted(self) -> str | None:
        """The reason why steps on a CPU cannot add the terms of adapters; None if they can. They can with the kernels
        for whole steps or with torch ops alone: then tokens without adapters are computed as in any other step."""
        plain = {name for name, backend in explain(self.ops).items() if not backend.startswith("torch")}
        if self.step is not None or plain <= _WITHOUT_WEIGHTS:
            return None
        return f"its layers are computed one by one ({', '.join(sorted(plain))}), so leave out `ops` and state_dtype"

    def _observer(self) -> Observer | None:
        if not self.options.debug_layers and not self.hooks:
            return None
        self.statistics.clear()
        return self._observe

    def _observe(self, layer: int, output: Tensor) -> Tensor:
        for hook in self.hooks:
            changed = hook(layer, output)
            output = output if changed is None else changed
        if self.options.debug_layers and layer >= 0:
            self._note(layer, output)
        return output

    def _note(self, layer: int, output: Tensor) -> None:
        last = output[-1].float()
        numbers = LayerStatistics(layer, last.numel(), int(last.count_nonzero()), int(last.isnan().sum()),
                                  float(last.min()), float(last.max()), float(last.mean()))
        self.statistics.append(numbers)
        log.warning("layer %d: %s", layer, numbers)


def batch_logits(model: Model, prompts: Sequence[Sequence[int]], all_logits: bool, check: Callable[[Tensor], None]
                 ) -> list[Tensor]:
    """Returns the float32 logits of each prompt's last token [V], or of all its tokens [n, V]. Batches as many prompts
    as fit into the cache. check: called with the logits of each row."""
    cache, parts = model.cache, [list[Tensor]() for _ in prompts]
    waiting, running = deque(range(len(prompts))), dict[int, SequenceCache]()
    try:
        while waiting or running:
            while waiting and (sequence_cache := _admit(model, prompts[waiting[0]])):
                running[waiting.popleft()] = sequence_cache
            if not running:
                raise RequestError(f"no room for a prompt of {len(prompts[waiting[0]])} tokens: drop snapshots, or "
                                   "raise memory", "rows")
            rows = _rows(running, prompts, model.options.token_budget)
            cache.operations.flush()
            batch = build(StepPlan(tuple(rows.values())), model.device, all_logits, model.mtp_runner is not None,
                          verified=model.capabilities.verifies)
            sizes = [len(row.tokens) if all_logits else 1 for row in rows.values()]
            for (place, row), logits in zip(rows.items(), model.run(batch).clone().split(sizes), strict=True):
                check(logits)
                parts[place].append(logits)
                cache.commit(running[place], len(row.tokens))
                if running[place].done == len(prompts[place]):
                    cache.release(running.pop(place))
    finally:
        for sequence_cache in running.values():
            cache.release(sequence_cache)
    return [torch.cat(found) if all_logits else found[-1][0] for found in parts]


def _admit(model: Model, prompt: Sequence[int]) -> SequenceCache | None:
    sequence_cache = model.cache.admit()
    if sequence_cache is None:
        return None
    sequence_cache.keys = [*prompt]
    if model.cache.reserve(sequence_cache, len(prompt)) < len(prompt):
        model.cache.release(sequence_cache)
        return None
    return sequence_cache


def _rows(running: dict[int, SequenceCache], prompts: Sequence[Sequence[int]], budget: int) -> dict[int, PlannedRow]:
    """Returns the rows of the next step by prompt index: rows of one token, then longer ones, each sorted by slot."""
    rows = dict[int, PlannedRow]()
    for place, sequence_cache in running.items():
        tokens = tuple(prompts[place][sequence_cache.done:sequence_cache.done + budget])
        if tokens:
            rows[place] = PlannedRow(tokens, sequence_cache.done, sequence_cache.pages, sequence_cache.slot, 1)
            budget -= len(tokens)
    return dict(sorted(rows.items(), key=lambda item: (len(item[1].tokens) > 1, item[1].slot)))
