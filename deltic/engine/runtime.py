"""A model loaded and ready to step: decoder, cache and limits, and the one function that runs a batch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from deltic.cache.disk import Disk, DiskNotes
from deltic.cache.folder import WEIGHTS, open_root
from deltic.cache.host import Host
from deltic.cache.hybrid import HybridCache
from deltic.cache.late import LateDisk, LateNotes
from deltic.cache.policy import MemoryNeeds, MemoryPlan, split_memory
from deltic.cache.shelf import Shelf
from deltic.cache.storage import Extras, Storage, allocate, page_bytes, ring_bytes, slot_bytes
from deltic.config import DType, EngineConfig, GenerationDefaults, ModelConfig, available_memory
from deltic.engine.graphs import Graphs
from deltic.engine.head import DraftHead
from deltic.engine.heap import keep_freed_memory
from deltic.engine.identity import Identity, Memory, computes, machine_facts, open_under
from deltic.errors import ConfigError, DelticError, ModelError
from deltic.model.decoder import Decoder, Observer, build
from deltic.model.mtp import Mtp as Head
from deltic.model.mtp import build_head
from deltic.ops import Ops, select
from deltic.ops.cpu import missing, use_torch_threads
from deltic.ops.memory import memory_for
from deltic.ops.records import Batch, Block, Stores
from deltic.types import Auto, Draft, Mtp, Ngram
from deltic.weights.fingerprint import FileMark
from deltic.weights.gguf.load import is_quantized, wants_packing
from deltic.weights.gguf.tokenizer import TokenizerTexts
from deltic.weights.hub import ModelFiles, open_model
from deltic.weights.quant import quantize_weights
from deltic.weights.random import random_head, random_weights

log = logging.getLogger("deltic")

LoadProgress = Callable[[int, int], None]
"""Called with (bytes loaded, bytes in all) while weights are read."""


@dataclass(frozen=True, slots=True)
class RandomModel:
    """A model of a known shape with random weights: true speed, no sense. For benchmarks and tests.

    preset: a name of `config.PRESETS`. layers: keep only the first so many. shape: use this instead of a preset.
    """

    preset: str = "qwen3.5-0.8b"
    layers: int | None = None
    seed: int = 0
    initializer_range: float | None = None
    shape: ModelConfig | None = None
    head: bool = False


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


@dataclass(frozen=True, slots=True, eq=False)
class Runtime:
    """Everything a step needs. path: the model's directory or file, None for random weights. tokenizer: its texts,
    where they are no files of the directory. notes: small texts that shall outlive the process, if there is a cache
    directory. step: runs a batch in one call, where the ops have that. graphs: replays decode steps, on a GPU. mtp: the
    model's draft head, if it is used; head: that head over this cache. draft: the model that drafts for this one, if
    another does. statistics: the last step's layer outputs, if `options.debug_layers`."""

    name: str
    path: Path | None
    config: ModelConfig
    options: EngineConfig
    generation: GenerationDefaults
    memory: MemoryPlan
    decoder: Decoder
    cache: HybridCache
    stores: Stores
    tokenizer: TokenizerTexts | None = None
    notes: DiskNotes | LateNotes | None = None
    mtp: Head | None = None
    draft: Runtime | None = None
    statistics: list[LayerStatistics] = field(default_factory=list)
    step: Callable[[Batch], tuple[Tensor, Tensor | None] | None] | None = field(init=False)
    head: DraftHead | None = field(init=False)
    graphs: Graphs | None = field(init=False)

    def __post_init__(self) -> None:
        # made anew for every copy: they have taken pointers into the stores
        object.__setattr__(self, "step", self.decoder.ops.step(self.decoder.ops, self.decoder.stack, self.stores))
        hidden = self.pools.hidden
        object.__setattr__(self, "head", DraftHead(self.mtp, self.stores, hidden)
                           if self.mtp is not None and hidden is not None else None)
        object.__setattr__(self, "graphs", Graphs(lambda batch: self._forward(batch)[0])
                           if self.options.device.startswith("cuda") and not self.options.debug_layers else None)

    @property
    def pools(self) -> Storage:
        """The tensors behind the cache."""
        assert isinstance(self.cache.pools, Storage)
        return self.cache.pools

    @torch.inference_mode()
    def run(self, batch: Batch) -> Tensor:
        """Run one step and return the logits [L, V] float32 of its `logit_tokens`. Moves no cursor. With a draft head
        the batch must ask for the hidden states."""
        logits = self.graphs.run(batch) if self.graphs else None
        if logits is None:
            logits, hidden = self._forward(batch)
            if self.head is not None:
                assert batch.layout.hidden and hidden is not None, "a draft head needs all hidden states"
                self.head.follow(batch, hidden.float())
        return logits

    def _forward(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Logits, and the hidden states of all tokens where the batch asks for them."""
        found = self.step(batch) if self.step is not None and not self.options.debug_layers else None
        if found is not None:
            return found
        hidden = self.decoder.forward(batch, self.stores, self._observer())
        logits = self.decoder.logits(hidden[batch.logit_tokens] if batch.layout.hidden else hidden)
        return logits, hidden if batch.layout.hidden else None

    def _observer(self) -> Observer | None:
        if not self.options.debug_layers:
            return None
        self.statistics.clear()
        return self._observe

    def _observe(self, layer: int, output: Tensor) -> None:
        last = output[-1].float()
        numbers = LayerStatistics(layer, last.numel(), int(last.count_nonzero()), int(last.isnan().sum()),
                                  float(last.min()), float(last.max()), float(last.mean()))
        self.statistics.append(numbers)
        log.warning("layer %d: %s", layer, numbers)


def load(model: str | RandomModel | None, options: EngineConfig, revision: str | None = None,
         progress: LoadProgress | None = None, rings: bool = False) -> Runtime:
    """Load a model (directory, GGUF file, hub name, "tiny" or None for the embedded one, or random weights) and size
    its cache; with it the draft head, or the model that drafts for it, if the options ask for one. rings: make replay
    rings even if nobody drafts."""
    speculation, draft = options.speculation, None
    if isinstance(speculation, Draft):
        options, drafting = _shared(options)
        try:
            with _memory_for_weights(speculation.model):
                draft = _load(speculation.model, drafting, None, progress, drafts=True)
        except (ModelError, ConfigError) as error:
            raise ConfigError(f"the draft model {speculation.model}: {error}", "speculate") from error
    with _memory_for_weights(model):
        return replace(_load(model, options, revision, progress, rings or draft is not None), draft=draft)


def _memory_for_weights(model: str | RandomModel | None) -> AbstractContextManager[None]:
    name = f"random-{model.preset}" if isinstance(model, RandomModel) else model or "tiny"
    return memory_for(f"the weights of {name}", "take a smaller model or one with fewer bits a weight (a quantized "
                                                "GGUF file with --packed-weights on, or --quant q4_k)")


def _shared(options: EngineConfig) -> tuple[EngineConfig, EngineConfig]:
    """The options of a model and of the one that drafts for it, which gets a quarter of the memory."""
    memory = options.memory_bytes or _free_memory(options.device) // 2
    drafting = replace(options, memory=str(memory // 4), speculate="off", cache_dir=None)
    return replace(options, memory=str(memory - memory // 4)), drafting


def _load(model: str | RandomModel | None, options: EngineConfig, revision: str | None,
          progress: LoadProgress | None, rings: bool = False, drafts: bool = False) -> Runtime:
    """drafts: it drafts for another model, with rings, without tiers, and quantized as it is."""
    _check_device(options.device)
    select(options.ops, options.device, options.cpu_level)  # what cannot be had is refused before anything is read
    files, tiled, marks = None, False, list[FileMark]()
    if isinstance(model, RandomModel):
        name, generation = f"random-{model.preset}", GenerationDefaults()
        config = model.shape or ModelConfig.preset(model.preset, model.layers)
        ops, dtype = _prepare(config, options)
        weights: dict[str, Block] = {**random_weights(config, dtype, model.seed, device=options.device,
                                                      initializer_range=model.initializer_range)}
    else:
        files = open_model(model, revision, progress=progress is not None)
        name, config, generation = str(model or "tiny"), files.config, files.generation
        ops, dtype = _prepare(config, options)
        tiled = _keeps_packed(files, options)
        marks = _marks(files, options)
        weights = files.load_packed(progress) if tiled else {**files.load(dtype, options.device, progress)}
    if options.quant != "none" and not (drafts and tiled):
        weights = _quantize(weights, options, config, tiled)
    head = _head_weights(model, files, config, dtype, tiled, options)
    made = Identity({"random": model if isinstance(model, RandomModel) else None, "config": config, "dtype": dtype,
                     "packed": tiled, "quant": options.quant, "head": head is not None}, marks)
    decoder = build(config, weights, ops, getattr(torch, dtype), tiled)
    mtp = build_head(config, head, decoder) if head else None
    keep_freed_memory()
    rings = rings or drafts or mtp is not None or isinstance(options.speculation, Ngram)
    memory, extras = plan_memory(config, options, getattr(torch, dtype), mtp is not None, rings)
    for warning in memory.warnings:
        log.warning("%s%s", f"the draft model {name}: " if drafts else "", warning)
    extras = replace(extras, tiled=tiled)
    storage = allocate(config, memory.pages, memory.slots, getattr(torch, dtype), decoder.ops, options.device, extras)
    cache = HybridCache(storage, options.prefix_cache, rows=memory.rows)
    stores = Stores(storage.kv_views(), storage.state_views())
    runtime = Runtime(name, files.path if files else None, config, options, generation, memory, decoder, cache, stores,
                      files.tokenizer() if files else None, mtp=mtp)
    return runtime if drafts else _with_tiers(runtime, made)


def _marks(files: ModelFiles, options: EngineConfig) -> list[FileMark]:
    """The model's files as they are now, if a tier will have to know them: those of the weights and, for the sake of
    notes beside the tier, of the tokenizer."""
    if not options.cache_dir:
        return []
    try:
        found = files.weight_files(isinstance(options.speculation, Auto | Mtp))
    except ModelError:  # the head's, of which `_head_weights` will tell
        found = files.weight_files(False)
    tokenizer = files.path / "tokenizer.json"
    return [FileMark.of(path) for path in (*found, *([tokenizer] if tokenizer.is_file() else []))]


def _head_weights(model: str | RandomModel | None, files: ModelFiles | None, config: ModelConfig, dtype: DType,
                  tiled: bool, options: EngineConfig) -> dict[str, Block] | None:
    """The draft head's weights, if the options want it and the model has one."""
    speculation = options.speculation
    if not isinstance(speculation, Auto | Mtp):
        return None
    if isinstance(speculation, Auto) and options.device != "cpu":
        return None  # replay rings have no fast kernel there
    found: dict[str, Block] | None
    if isinstance(model, RandomModel):
        found = {**random_head(config, dtype, model.seed, device=options.device)} if model.head else None
    else:
        assert files is not None
        try:
            found = files.load_head(dtype, options.device, tiled)
        except ModelError as error:
            if isinstance(speculation, Mtp):
                raise
            log.warning("the draft head cannot be used, so that nothing is drafted: %s", error)
            return None
    if found is None and isinstance(speculation, Mtp):
        remedy = "use" if isinstance(model, RandomModel) else "put one beside it (deltic mtp extract), or use"
        raise ConfigError(f"speculate={options.speculate}: this model has no draft head (tensors `mtp.*`): {remedy} "
                          "speculate=ngram, draft:MODEL or off", "speculate")
    return found


def plan_memory(config: ModelConfig, options: EngineConfig, dtype: torch.dtype,
                head: bool, wanted: bool) -> tuple[MemoryPlan, Extras]:
    """How the cache is split; ConfigError if it holds nothing. head: it serves a draft head too. wanted: sequences
    shall have replay rings."""
    budget, ring = options.memory_bytes or _free_memory(options.device) // 2, ring_bytes(config, dtype)
    # rings take a quarter at most: who gets none is served without guesses
    rings = min(options.max_batch, budget // 4 // ring if ring else options.max_batch) if wanted else 0
    needs = MemoryNeeds(page_bytes(config, dtype, head), slot_bytes(config, dtype, head),
                        config.max_position_embeddings, options.max_batch, options.max_context, 4 * config.vocab_size,
                        ahead=options.device != "cpu")
    memory = split_memory(budget - rings * ring, needs)
    if wanted and not rings:
        log.warning("nothing is drafted: %d MiB of cache have no room for replay rings (raise --memory)", budget >> 20)
    return memory, Extras(min(rings, memory.max_batch), head)


def _with_tiers(runtime: Runtime, made: Identity) -> Runtime:
    """The runtime with the tiers of its cache that the options ask for. made: what its weights were made of."""
    options, tiers = runtime.options, list[Shelf]()
    notes: DiskNotes | LateNotes | None = None
    host = options.host_memory_bytes
    if host is None and options.device.startswith("cuda"):
        host = available_memory() // 4
    if host:
        tiers.append(Shelf(Host(host), threads=False))
    if options.cache_dir:
        try:
            shelf, notes = _on_disk(runtime, made, options.cache_dir, int(options.cache_disk_gb * 1e9))
            tiers.append(shelf)
        except (DelticError, OSError) as error:
            log.warning("nothing is kept on disk: %s", error)
    cache = HybridCache(runtime.cache.pools, options.prefix_cache, tiers, runtime.memory.rows)
    return replace(runtime, cache=cache, notes=notes)


def _on_disk(runtime: Runtime, made: Identity, directory: str, budget: int) -> tuple[Shelf, DiskNotes | LateNotes]:
    """The tier in a directory and the notes beside it. They open when it is known which model it is, which for large
    files that are new is later."""
    facts = {**made.facts, **machine_facts(runtime.options, runtime.decoder.ops)}
    about = f"{str(runtime.pools.keys.dtype).removeprefix('torch.')}, {computes(facts)}"
    opening, abandon = open_under(
        Identity(facts, made.marks), Memory(open_root(directory) / WEIGHTS),
        lambda digest: (Disk(directory, digest, budget, runtime.name, about), DiskNotes(directory, digest)))
    if opening.done():
        disk, notes = opening.result()
        return Shelf(disk, threads=True), notes
    log.info("the weights' files are new and are being hashed; until then nothing is found in %s", directory)
    return Shelf(LateDisk(opening, budget, abandon), threads=True, late=True), LateNotes(opening)


def _prepare(config: ModelConfig, options: EngineConfig) -> tuple[Ops, DType]:
    """The ops that serve this model and no other; the dtype of its weights and activations."""
    threads = options.threads_for(config.parameter_count)
    ops = select(options.ops, options.device, options.cpu_level, threads)
    use_torch_threads(ops, threads)
    return ops, config.dtype if options.dtype == "auto" else cast(DType, options.dtype)


def _quantize(weights: dict[str, Block], options: EngineConfig, config: ModelConfig, tiled: bool) -> dict[str, Block]:
    """The weights in the quantized form that `options.quant` asks for."""
    reason = "not on a GPU" if options.device != "cpu" else missing().get("step")
    if tiled:
        reason = "the weights are quantized already; leave it out, or load the unquantized model"
    if reason:
        raise ConfigError(f"quant={options.quant} is not possible: {reason}", "quant")
    plain = {name: tensor for name, tensor in weights.items() if isinstance(tensor, Tensor)}
    weights.clear()
    return quantize_weights(plain, options.quant, config)


def _keeps_packed(files: ModelFiles, options: EngineConfig) -> bool:
    """Whether the weights stay in the form of a GGUF file."""
    if files.gguf is None or options.packed_weights == "off":
        return False
    reason = "on a GPU" if options.device != "cpu" else missing().get("step")
    if reason is None and options.quant != "none":  # only what is quantized already cannot be quantized
        return options.packed_weights == "on" or is_quantized(files.gguf)
    if reason is None:
        return options.packed_weights == "on" or wants_packing(files.gguf)
    if options.packed_weights == "on":
        raise ConfigError(f"packed_weights=on is not possible: {reason}", "packed_weights")
    return False


def _check_device(device: str) -> None:
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device {device}: torch finds no CUDA device here; use --device cpu, or install a CUDA "
                          "build of torch", "device")


def _free_memory(device: str) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else available_memory()
