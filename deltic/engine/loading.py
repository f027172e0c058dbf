"""Loads a model from its files, or a shape with random weights, and returns a `ModelRunner`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from deltic.cache.manager import HybridCache
from deltic.cache.memory_plan import MemoryPlan
from deltic.cache.offload.open import open_tiers
from deltic.cache.sharded_pools import allocate_shards
from deltic.cache.tensors import PoolOptions
from deltic.config import DType, EngineConfig, GenerationDefaults, ModelConfig, shard_config
from deltic.engine.arguments import settled
from deltic.errors import ConfigError, DelticError, ModelError, show
from deltic.export.backend import ProgramModel, load_program
from deltic.export.program import kind_of
from deltic.loader.dummy import random_tensors
from deltic.loader.gguf.tokenizer import TokenizerTexts
from deltic.loader.model_files import open_model
from deltic.model.decoder import Decoder, build
from deltic.model.mtp_head import build_head
from deltic.model.partial_head import PART, PartialHead, serves
from deltic.ops import Ops, select
from deltic.ops.capabilities import check_devices, device_capabilities
from deltic.ops.memory import memory_for
from deltic.ops.types import Weight
from deltic.params import Draft, Head, Ngram
from deltic.runner.degree import choose_degree
from deltic.runner.expert_offload import place_experts, unpacks_experts
from deltic.runner.layer_offload import LayerPlan, place_layers, plan_layers
from deltic.runner.memory import (
    CardMemory,
    card_memory,
    fit_card,
    keep_freed_memory,
    plan_memory,
    share_memory,
    step_bytes,
    whole_blocks,
)
from deltic.runner.model_runner import ModelRunner, defers_state_writes, select_ops
from deltic.runner.weights import OpenedModel, WeightReader

log = logging.getLogger("deltic")

LoadProgress = Callable[[int, int], None]
"""Called with (bytes loaded, bytes in all) while weights are read."""
OnTokenizer = Callable[[Path, TokenizerTexts | None], None]
"""Called before weights are read, with the model's path, and the tokenizer's texts if these are not in files."""


@dataclass(frozen=True, slots=True)
class RandomModel:
    """A model of a known shape with random weights: real speed, meaningless answers. For benchmarks and tests.

    preset: a name of `config.PRESETS`.
    layers: number of layers to keep, from the first on; None: all.
    shape: use this instead of a preset.
    head: True for a model with a draft head.
    Raises ModelError for impossible values.
    """

    preset: str = "qwen3.5-0.8b"
    layers: int | None = None
    seed: int = 0
    initializer_range: float | None = None
    shape: ModelConfig | None = None
    head: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.preset, str):
            raise ModelError(f"preset must be text, not {show(self.preset)}")
        if not isinstance(self.shape, ModelConfig | None):
            raise ModelError(f"shape must be a ModelConfig, not {show(self.shape)}")
        if self.layers is not None and (type(self.layers) is not int or self.layers < 1):
            raise ModelError(f"layers must be an integer from 1 on, or None, not {show(self.layers)}")
        if type(self.seed) is not int:
            raise ModelError(f"seed must be an integer, not {show(self.seed)}")
        if not isinstance(self.initializer_range, int | float | None):
            raise ModelError(f"initializer_range must be a number or None, not {show(self.initializer_range)}")

    @property
    def config(self) -> ModelConfig:
        return self.shape or ModelConfig.preset(self.preset, self.layers)

    def tensors(self, config: ModelConfig, dtype: DType, device: str, head: bool = False
                ) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights of the model, or of its draft head if `head`."""
        spread = None if head else self.initializer_range
        return random_tensors(config, dtype, self.seed, device=device, initializer_range=spread, head=head)


@dataclass(frozen=True, slots=True)
class ModelOverrides:
    """Replaces parts of the model's files, as in `open_model`."""

    config: ModelConfig | Mapping[str, Any] | str | Path | None = None
    weights: Mapping[str, Tensor] | None = None

    @property
    def name(self) -> str | None:
        """The name of the argument that is given; None if none is."""
        return "weights" if self.weights is not None else None if self.config is None else "config"

    def check(self, model: str | RandomModel | None, options: EngineConfig) -> None:
        """Raises ConfigError if the overrides do not fit the model and the options."""
        if isinstance(model, RandomModel) and self.name:
            raise ConfigError(f"{self.name} is not for random weights: write RandomModel(shape=ModelConfig(...))",
                              self.name)
        kept = "cache_dir" if options.cache_dir else "aot_dir" if options.aot_dir else None
        if self.weights is not None and kept:
            raise ConfigError(f"{kept} is for weights that lie in files, by which they are known again: leave it out, "
                              "or write the weights to a file", kept)


def load_any(model: str | Path | RandomModel | None, options: EngineConfig, revision: str | None = None,
             progress: LoadProgress | None = None, rings: bool = False, given: ModelOverrides = ModelOverrides(),
             on_tokenizer: OnTokenizer | None = None) -> ModelRunner | ProgramModel:
    """Loads a model as `load` does, or a compiled model, which is known by the name or content of its path.
    on_tokenizer: takes the tokenizer, which the model then does not keep."""
    model = str(model) if isinstance(model, Path) else model
    if isinstance(model, str) and kind_of(model):
        if revision is not None:
            raise ModelError(f"{model} is compiled: leave out the revision ({revision}), which is for models of the "
                             "Hugging Face hub")
        if given.name:
            raise ConfigError(f"{given.name} is not possible: {model} is compiled", given.name)
        began, program = time.perf_counter(), load_program(Path(model), options)
        log.info("%s: loaded in %.2f s", model, time.perf_counter() - began)
        if on_tokenizer and program.path:
            on_tokenizer(program.path, program.tokenizer)
        return program
    return load(model, options, revision, progress, rings, given=given, on_tokenizer=on_tokenizer)


class Vocabulary(Protocol):
    """A tokenizer. ends: ids of the tokens that end an answer."""

    @property
    def vocab_size(self) -> int: ...

    ends: tuple[int, ...]


def with_ends(runtime: ModelRunner | ProgramModel, tokenizer: Vocabulary | None) -> ModelRunner | ProgramModel:
    """Adds a tokenizer's end-of-text tokens to the tokens that end answers, because some configs name only one."""
    if tokenizer is None:
        return runtime
    if tokenizer.vocab_size > runtime.config.vocab_size:
        log.warning("the tokenizer has %d tokens, the model only %d: are they of one checkpoint?",
                    tokenizer.vocab_size, runtime.config.vocab_size)
    return replace(runtime, generation=runtime.generation.with_eos(tokenizer.ends), tokenizer=None)


def load(model: str | RandomModel | None, options: EngineConfig, revision: str | None = None,
         progress: LoadProgress | None = None, rings: bool = False, vectors: bool = False,
         given: ModelOverrides = ModelOverrides(), on_tokenizer: OnTokenizer | None = None) -> ModelRunner:
    """Loads a model (directory, GGUF file, hub name, "tiny" or None for the embedded model, or random weights), and the
    model that drafts for it if the options name one. rings: sequences get delta logs even if nothing is drafted.
    vectors: as in `plan_memory`. on_tokenizer: as in `load_any`."""
    options = settled(options)
    if options.params is not None:
        raise ConfigError("params is for a program (.pte) of ExecuTorch's own exporter: leave it out", "params")
    if vectors and options.batch_invariant:
        raise ConfigError("batch_invariant is for answers: leave it out with a model of vectors", "batch_invariant")
    speculation, use = options.speculation, _Use(rings=rings, vectors=vectors, on_tokenizer=on_tokenizer)
    if isinstance(speculation, Draft):
        options, drafting = share_memory(options)
        try:
            draft = _load(speculation.model, drafting, None, progress, ModelOverrides(), _Use(drafts=True, rings=True))
        except (ModelError, ConfigError) as error:
            raise ConfigError(f"the draft model {speculation.model}: {error}", "speculate") from error
        use = replace(use, draft=draft, rings=True)
    return _load(model, options, revision, progress, given, use)


@dataclass(frozen=True, slots=True)
class _Use:
    """drafts: True if the model drafts for another one. draft: the model that drafts for this one. rings, vectors,
    on_tokenizer: as in `load`."""

    drafts: bool = False
    draft: ModelRunner | None = None
    rings: bool = False
    vectors: bool = False
    on_tokenizer: OnTokenizer | None = None


def _load(model: str | RandomModel | None, options: EngineConfig, revision: str | None, progress: LoadProgress | None,
          given: ModelOverrides, use: _Use) -> ModelRunner:
    """Returns a loaded model. Makes its parts in the order in which they depend on each other."""
    # device: refuses options that it cannot serve, before anything is read
    check_devices(options.devices)
    with _memory_for_weights(model, options.on_gpu), whole_blocks(options):
        times = StartTimes()
        options = fit_card(options)
        select(options.ops, options.device, options.cpu_level)
        given.check(model, options)
        # files and config
        source = _open(model, options, revision, progress is not None, given, use)
        times.done("files")
        source, texts, broken = _take_tokenizer(source, use.on_tokenizer)
        files, config = source.files, source.config
        times.done("tokenizer")
        # backend and weights
        threads = options.threads_for(config.parameter_count)
        ops = select_ops(options, threads)
        dtype = config.dtype if options.dtype == "auto" else cast(DType, options.dtype)
        options = _over_gpus(source, options, ops, dtype, use)
        reader = WeightReader(source, options, ops, dtype, use.drafts, progress)
        head_parts = reader.read_head()
        plan = _cache_planner(config, options, dtype, bool(head_parts), use)
        layer_plan = _layers_beside(reader, head_parts, use, plan)
        parts, store = reader.read(layer_plan)
        times.done("weights")
        # layers
        experts = place_experts(store, parts[0], files, config, options, ops, dtype)
        layers = place_layers(parts[0], layer_plan, options, config.num_hidden_layers) if layer_plan.layers else None
        offloaded_pools = layers.pools if layers else experts.store.pools() if experts else ()
        decoder = build(config, parts, ops, getattr(torch, dtype), reader.tiled, offloaded_pools)
        head = build_head(config, head_parts, decoder, reader.draft_vocabulary(texts)) if head_parts else None
        partial_head = _partial_head(reader, decoder, texts) if head is None and not use.drafts else None
        plan = plan if partial_head is None else _cache_planner(config, options, dtype, False, replace(use, rings=True))
        keep_freed_memory()
        times.done("layers")
        encode = reader.read_tower()
        times.done("vision tower")
        if broken:
            raise broken
        # memory plan, cache and tiers
        settled = layer_plan.settle(options)
        work = step_bytes(shard_config(config, options.shards), settled, unpacks_experts(experts, decoder.weights))
        memory, pool_options = plan(settled, card_memory(options, work) if options.on_gpu else None)
        memory = layer_plan.describe(memory)
        _log_plan(memory, f"the draft model {source.name}: " if use.drafts else "")
        pools = allocate_shards(config, memory.pages, memory.slots, decoder.dtype, [ops] * options.shards,
                                options.devices, replace(pool_options, tiled=reader.tiled))
        tiers, records = ([], None) if use.drafts else open_tiers(
            source.name, options, ops, reader.identity(head is not None), pools.shards[0].keys.dtype)
        cache = HybridCache(pools, options.prefix_cache, tiers, memory.rows)
        runtime = ModelRunner(source.name, files.place if files else None, config, options, source.generation, memory,
                              decoder, cache, threads, None if use.on_tokenizer else texts, records, head, encode,
                              files.vision if files and encode else None, use.draft, experts, layers,
                              reader.model_identity(head is not None), partial_head)
        runtime.check_kernels()
        times.done("cache")
        log.info("%s%s: loaded in %s", "the draft model " if use.drafts else "", source.name, times)
        return runtime


def _take_tokenizer(source: OpenedModel, take: OnTokenizer | None
                    ) -> tuple[OpenedModel, TokenizerTexts | None, DelticError | None]:
    """Returns the model without the tokenizer's part of a GGUF file's metadata, which need not be in memory with the
    weights; the texts of that tokenizer; and the tokenizer's error, if any. It is raised only after the weights are
    read, because an error of the weights may be its cause."""
    files = source.files
    texts = files.tokenizer() if files else None
    if files and files.gguf:
        metadata = {key: value for key, value in files.gguf.metadata.items() if not key.startswith("tokenizer.")}
        source = replace(source, files=replace(files, gguf=replace(files.gguf, metadata=metadata)))
    if files and files.place and take:
        try:
            take(files.place, texts)
        except DelticError as error:
            return source, texts, error
    return source, texts, None


def _partial_head(reader: WeightReader, decoder: Decoder, texts: TokenizerTexts | None) -> PartialHead | None:
    """Returns the part of the matrix of logits that drafts; None if it is not wanted or not possible."""
    options = reader.options
    if not isinstance(options.speculation, Head) or decoder.others or not serves(decoder):
        return None
    if not device_capabilities(options.device).partial_heads:
        return None
    return PartialHead(decoder, partial(reader.draft_vocabulary, texts, decoder.config.vocab_size // PART))


def _over_gpus(source: OpenedModel, options: EngineConfig, ops: Ops, dtype: DType, use: _Use) -> EngineConfig:
    """Returns the options with the number of GPUs that the model needs."""
    if not options.on_gpu or use.drafts or use.vectors:
        return options
    plan = _cache_planner(source.config, options, dtype, source.config.num_mtp_layers > 0, use)
    return fit_card(choose_degree(source, options, ops, dtype, lambda given, card: plan(given, card)[0]))


def _layers_beside(reader: WeightReader, head: list[dict[str, Weight]] | None, use: _Use, plan: _PlanCache
                   ) -> LayerPlan:
    """Returns the plan that keeps feed-forwards in host memory. head: each device's part of the draft head."""
    options = reader.options
    if use.drafts or use.vectors or not options.on_gpu or options.shards > 1:
        return LayerPlan()
    others = reader.tower_bytes() + reader.head_copies(head[0] if head else None)
    return plan_layers(reader.source.config, options, reader.dtype, reader.sizes(), others,
                       lambda given, card: plan(given, card)[0])


_PlanCache = Callable[[EngineConfig, CardMemory | None], tuple[MemoryPlan, PoolOptions]]


def _cache_planner(config: ModelConfig, options: EngineConfig, dtype: DType, head: bool, use: _Use
                   ) -> _PlanCache:
    """Returns `plan_memory` for this model as a function of options and GPU memory. head: it has a draft head."""
    drafts = use.rings or head or isinstance(options.speculation, Ngram)
    defers = not use.drafts and defers_state_writes(config, options, dtype)
    own: torch.dtype = getattr(torch, dtype)

    def plan(given: EngineConfig, card: CardMemory | None) -> tuple[MemoryPlan, PoolOptions]:
        return plan_memory(config, given, own, head, drafts, use.vectors, defers, card)

    return plan


def _log_plan(memory: MemoryPlan, prefix: str) -> None:
    for line in memory.notes:
        log.info("%s", line)
    for warning in memory.warnings:
        log.warning("%s%s", prefix, warning)


def _open(model: str | RandomModel | None, options: EngineConfig, revision: str | None, shows_progress: bool,
          given: ModelOverrides, use: _Use) -> OpenedModel:
    if isinstance(model, RandomModel):
        config = model.config.with_rope_scaling(options.rope_scaling)
        return OpenedModel(f"random-{model.preset}", config, GenerationDefaults(), random=model)
    files = open_model(model, revision, progress=shows_progress, mmproj=None if use.drafts else options.mmproj,
                       config=given.config, weights=given.weights)
    files = replace(files, config=files.config.with_rope_scaling(options.rope_scaling))
    name = str(model or ("tiny" if files.place else "weights"))
    return OpenedModel(name, files.config, files.generation, files)


def _memory_for_weights(model: str | RandomModel | None, on_gpu: bool | None) -> AbstractContextManager[None]:
    name = f"random-{model.preset}" if isinstance(model, RandomModel) else model or "tiny"
    elsewhere = ", run it on the CPU (`device='cpu'`)" if on_gpu else ""
    return memory_for(f"the weights of {name}", "take a smaller model or one with fewer bits a weight (a quantized "
                                                f"GGUF file with `packed_weights='on'`, or `quant='q4_k'`){elsewhere}")


class StartTimes:
    """Seconds of the parts of a start, in order.

    files         finding and downloading the files, reading all of them but the weights
    tokenizer     reading it before the weights, because meanwhile it takes several times its memory
    weights       reading and quantizing the weights, including the draft head's
    layers        making the form in which the ops compute: packed matrices, offloaded experts
    vision tower  reading the tower, and the same for its layers
    cache         allocating its memory, opening the disk tier
    """

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def done(self, part: str) -> None:
        """Ends a part, which began at the end of the previous one."""
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now

    def __str__(self) -> str:
        """Returns the total and its parts: `1.29 s (files 0.03 s, weights 1.26 s)`."""
        parts = ", ".join(f"{part} {seconds:.2f} s" for part, seconds in self.seconds.items())
        return f"{self._last - self._began:.2f} s ({parts})"
