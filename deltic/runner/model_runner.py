"""A model loaded and ready to step: decoder, cache and limits, and the one function that runs a batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from deltic.cache.manager import HybridCache
from deltic.cache.memory_plan import MemoryPlan
from deltic.cache.offload.deferred_open import DeferredRecords
from deltic.cache.offload.disk import DiskRecords
from deltic.cache.tensors import CachePools
from deltic.config import EngineConfig, GenerationDefaults, ModelConfig
from deltic.config.vision import Vision
from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.loader.gguf.tokenizer import TokenizerTexts
from deltic.model.decoder import Decoder, Observer
from deltic.model.mtp_head import MtpHead as MtpHead
from deltic.ops import Ops
from deltic.ops.cpu import use_torch_threads
from deltic.ops.types import Batch, CacheViews, Sampled, Sampling
from deltic.params import Auto, Mtp
from deltic.runner.buckets import recorded_buckets
from deltic.runner.cuda_graphs import CudaGraphs
from deltic.runner.expert_offload import ExpertOffload
from deltic.runner.image_embeds import Encode
from deltic.runner.input_batch import FEW_ROWS, BatchMemory, Numbers, build, draft_buckets
from deltic.runner.model import Model
from deltic.spec_decode.mtp import MtpRunner, draft_sizes

log = logging.getLogger("deltic")


@dataclass(frozen=True, slots=True)
class LayerStatistics:
    """One layer's output for the last token of a step: what to look at when a model talks nonsense."""

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

    path: the model's directory or file, None for random weights.
    threads: those that compute for it.
    tokenizer: its texts, where they are no files of the directory.
    notes: small texts that shall outlive the process, if there is a cache directory.
    mtp: the model's draft head, if it is used.
    encode: makes rows of pictures, if the model sees, with `vision`.
    statistics: the last step's layer outputs, if `options.debug_layers`.
    hooks: see every layer's output, and may change it; while there are any the layers are computed one by one.
    profiler: is given each batch before its step, while a profile is taken.

    The others follow from these.

    views: the cache's tensors, layer by layer.
    step: runs a batch in one call, where the ops have that.
    mtp_runner: the draft head over this cache.
    graphs: replays decode steps, on a GPU.
    verifies, defers_state_writes, numbers: as in `Model`.
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
    notes: DiskRecords | DeferredRecords | None = None
    mtp: MtpHead | None = None
    encode: Encode | None = None
    vision: Vision | None = None
    draft: Model | None = None
    experts: ExpertOffload | None = None
    statistics: list[LayerStatistics] = field(default_factory=list)
    hooks: list[Observer] = field(default_factory=list)
    profiler: Callable[[Batch], None] | None = None
    views: CacheViews = field(init=False)
    step: Callable[[Batch], tuple[Tensor, Tensor | None] | None] | None = field(init=False)
    mtp_runner: MtpRunner | None = field(init=False)
    graphs: CudaGraphs | None = field(init=False)
    verifies: bool = field(init=False)
    defers_state_writes: bool = field(init=False)
    numbers: Numbers = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        pools, ops = self.pools, self.decoder.ops
        self.views = CacheViews(pools.kv_views(), pools.state_views())
        self.step = ops.step(ops, self.decoder.weights, self.views)
        self.mtp_runner = (MtpRunner(self.mtp, self.views, pools.hidden)
                     if self.mtp is not None and pools.hidden is not None else None)
        if self.mtp_runner:
            pools.backlogs[:] = [self.mtp_runner.catch_up]
        self.graphs = (CudaGraphs(lambda batch: self._follow(batch)[0])
                       if self.options.device.startswith("cuda") and not self.options.debug_layers
                       # torch's mixture of experts asks the device which experts there are
                       and (self.config.experts is None or self.step is not None) else None)
        fast = self.graphs is not None and self.step is not None and (self.mtp_runner is None or self.mtp_runner.ahead)
        if isinstance(self.options.speculation, Auto) and self.options.device != "cpu" and not fast:
            self.mtp_runner = None  # torch would serve it, one op at a time
        # where kernels of our own serve steps with drafts, and the head if there is one
        self.verifies = fast and pools.delta_logs is not None and not self.options.batch_invariant
        self.defers_state_writes = self.verifies and self.config.linear is not None

    @property
    def pools(self) -> CachePools:
        """The tensors behind the cache."""
        assert isinstance(self.cache.pools, CachePools)
        return self.cache.pools

    @property
    def ops(self) -> Ops:
        """What it computes with."""
        return self.decoder.ops

    @property
    def device(self) -> torch.device:
        return self.pools.device

    def run(self, batch: Batch) -> Tensor:
        """Run one step and return the logits [L, V] float32 of its `logit_tokens`. Moves no cursor. With a draft head
        the batch must ask for the hidden states."""
        return self.run_hidden(batch)[0]

    @torch.inference_mode()
    def run_hidden(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """As `run`; with the hidden states [T, H] float32 of all tokens after the final norm, if the batch asks for
        them."""
        use_torch_threads(self.decoder.ops, self.threads)
        if batch.padded is not None:
            self.pools.wait()
        if self.experts is not None:
            self.experts.store.begin_step()
        if self.profiler is not None:
            self.profiler(batch)
        logits = self.graphs.run(batch) if self.graphs and not self.hooks else None
        if logits is not None:
            return logits, None
        return self._follow(batch)

    def _follow(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """A step, and the draft head after it."""
        logits, hidden = self._forward(batch)
        hidden = None if hidden is None else hidden.float()
        if self.mtp_runner is not None:
            assert hidden is not None, "a draft head needs all hidden states"
            self.pools.wait()
            self.mtp_runner.follow(batch, hidden)
        return logits, hidden

    @torch.inference_mode()
    def warm_up(self) -> None:
        """On a GPU: record the graphs of all steps that only decode, with drafts and without, and load what draws;
        nothing is left to be compiled for them afterwards. Writes to page 0, slot 0 and replay ring 0, so that nobody
        may have taken those yet."""
        if self.graphs is None or (self.mtp_runner is not None and not self.verifies):
            return
        head, memory = self.mtp_runner is not None, BatchMemory(self.numbers)
        began, most = time.perf_counter(), FEW_ROWS if self.options.batch_invariant else self.memory.max_batch
        for rows, pages in recorded_buckets(self.path, min(most, self.memory.max_batch), self.memory.max_context):
            deferred = self.defers_state_writes and rows > FEW_ROWS
            row = PlannedRow((0,), int(deferred), (0,) * pages, 0, 1, base=0, append=deferred)
            logits = self.run(build(StepPlan((row,) * rows), self.device, hidden=head, memory=memory,
                                    verified=self.verifies))
        if self.verifies and (self._drafts or self.defers_state_writes):
            self._warm_up_rings(memory)
            self.ops.flush_delta_log(self.views.states, 0, 0, 0, 1, 0)
        nothing = torch.zeros(1, device=self.device)
        self.sample(logits[:1], Sampling(nothing, nothing.long(), nothing + 1, nothing, nothing.long()))
        torch.cuda.synchronize(self.device)
        log.info("%s: recorded %d graphs of steps that decode in %.2f s", self.name, len(self.graphs.buckets),
                 time.perf_counter() - began)

    @property
    def _drafts(self) -> int:
        """The most drafts of a step."""
        speculation = self.options.speculation
        if isinstance(speculation, Auto):
            return Mtp().tokens if self.mtp_runner else 0
        return speculation.tokens if speculation else 0

    def _warm_up_rings(self, memory: BatchMemory) -> None:
        """Steps of few rows with drafts, or with tokens that were left in replay rings."""
        most, head = self._drafts, self.mtp_runner
        for rows, pages in draft_buckets(min(self.memory.max_batch, FEW_ROWS), self.memory.max_context):
            each = 1
            while each < 2 * (most + 1):
                # as if one token had been left in the ring before, or as many were appended
                row = PlannedRow(
                    (0,) * min(each, most + 1),
                    int(each == 1),
                    (0,) * pages,
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
        """Choose from logits [L, V] float32, which may be changed."""
        return self.decoder.ops.sample(logits, sampling)

    def _forward(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Logits, and the hidden states of all tokens where the batch asks for them."""
        observer = self._observer()
        found = self.step(batch) if self.step is not None and observer is None else None
        if found is not None:
            return found
        self.pools.wait()
        hidden = self.decoder.forward(batch, self.views, observer)
        logits = self.decoder.logits(hidden[batch.logit_tokens] if batch.layout.hidden else hidden)
        return logits, hidden if batch.layout.hidden else None

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
