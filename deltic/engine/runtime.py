"""A model loaded and ready to step: decoder, cache and limits, and the one function that runs a batch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from deltic.cache.disk import Disk, DiskNotes
from deltic.cache.host import Host
from deltic.cache.hybrid import HybridCache
from deltic.cache.policy import MemoryNeeds, MemoryPlan, split_memory
from deltic.cache.shelf import Shelf
from deltic.cache.storage import STATE_LAYOUT, allocate, page_bytes, slot_bytes
from deltic.config import DType, EngineConfig, GenerationDefaults, ModelConfig, available_memory
from deltic.engine.heap import keep_freed_memory
from deltic.errors import ConfigError
from deltic.model.decoder import Decoder, Observer, build
from deltic.ops import Ops, select
from deltic.ops.cpu import missing, use_level, use_threads
from deltic.ops.records import Batch, Block, Stores
from deltic.weights.fingerprint import fingerprint
from deltic.weights.gguf.load import is_quantized, wants_packing
from deltic.weights.gguf.tokenizer import TokenizerTexts
from deltic.weights.hub import ModelFiles, open_model
from deltic.weights.quant import quantize_weights
from deltic.weights.random import random_weights

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
    directory. step: runs a batch in one call, where the ops have that. statistics: the last step's layer outputs, if
    `options.debug_layers`."""

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
    notes: DiskNotes | None = None
    statistics: list[LayerStatistics] = field(default_factory=list)
    step: Callable[[Batch], Tensor] | None = field(init=False)

    def __post_init__(self) -> None:
        # made anew for every copy: it has taken pointers into the stores
        object.__setattr__(self, "step", self.decoder.ops.step(self.decoder.ops, self.decoder.stack, self.stores))

    @torch.inference_mode()
    def run(self, batch: Batch) -> Tensor:
        """Run one step and return the logits [L, V] float32 of its `logit_tokens`. Moves no cursor."""
        if self.step is not None and not self.options.debug_layers:
            return self.step(batch)
        hidden = self.decoder.forward(batch, self.stores, self._observer())
        return self.decoder.logits(hidden)

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
         progress: LoadProgress | None = None) -> Runtime:
    """Load a model (directory, GGUF file, hub name, "tiny" or None for the embedded one, or random weights) and size
    its cache."""
    _check_device(options.device)
    ops = select(options.ops, options.device)
    use_level(options.cpu_level)
    files, tiled = None, False
    if isinstance(model, RandomModel):
        name, generation = f"random-{model.preset}", GenerationDefaults()
        config = model.shape or ModelConfig.preset(model.preset, model.layers)
        dtype = _prepare(config, options, ops)
        weights: dict[str, Block] = {**random_weights(config, dtype, model.seed, device=options.device,
                                                      initializer_range=model.initializer_range)}
    else:
        files = open_model(model, revision, progress=progress is not None)
        name, config, generation = model or "tiny", files.config, files.generation
        dtype = _prepare(config, options, ops)
        tiled = _keeps_packed(files, options)
        weights = files.load_packed(progress) if tiled else {**files.load(dtype, options.device, progress)}
    if options.quant != "none":
        weights = _quantize(weights, options, config, tiled)
    identity = fingerprint(weights, (config, dtype, STATE_LAYOUT)) if options.cache_dir else ""
    decoder = build(config, weights, ops, getattr(torch, dtype), tiled)
    keep_freed_memory()
    memory = _plan_memory(config, options, getattr(torch, dtype))
    storage = allocate(config, memory.pages, memory.slots, getattr(torch, dtype), options.device)
    cache = HybridCache(storage, decoder.ops, options.prefix_cache)
    stores = Stores(storage.kv_views(), storage.state_views())
    runtime = Runtime(name, files.path if files else None, config, options, generation, memory, decoder, cache, stores,
                      files.tokenizer() if files else None)
    return _with_tiers(runtime, identity)


def _plan_memory(config: ModelConfig, options: EngineConfig, dtype: torch.dtype) -> MemoryPlan:
    needs = MemoryNeeds(page_bytes(config, dtype), slot_bytes(config, dtype), config.max_position_embeddings,
                        options.max_batch, options.max_context)
    memory = split_memory(options.memory_bytes or _free_memory(options.device) // 2, needs)
    for warning in memory.warnings:
        log.warning(warning)
    return memory


def _with_tiers(runtime: Runtime, identity: str) -> Runtime:
    """The runtime with the tiers of its cache that the options ask for."""
    options, tiers, notes = runtime.options, [], None
    host = options.host_memory_bytes
    if host is None and options.device.startswith("cuda"):
        host = available_memory() // 4
    if host:
        tiers.append(Shelf(Host(host), threads=False))
    if options.cache_dir:
        budget = int(options.cache_disk_gb * 1e9)
        try:
            disk = Disk(options.cache_dir, identity, budget, label=runtime.name)
            notes = DiskNotes(options.cache_dir, identity)
            tiers.append(Shelf(disk, threads=True))
        except (ConfigError, OSError) as error:
            log.warning("nothing is kept on disk: %s", error)
    cache = HybridCache(runtime.cache.storage, runtime.decoder.ops, options.prefix_cache, tiers)
    return replace(runtime, cache=cache, notes=notes)


def _prepare(config: ModelConfig, options: EngineConfig, ops: Ops) -> DType:
    """Set the process up for this model; returns the dtype of its weights and activations."""
    use_threads(options.threads_for(config.parameter_count), ops)
    return config.dtype if options.dtype == "auto" else cast(DType, options.dtype)


def _quantize(weights: dict[str, Block], options: EngineConfig, config: ModelConfig, tiled: bool) -> dict[str, Block]:
    """The weights in the quantized form that `options.quant` asks for."""
    reason = "on a GPU" if options.device != "cpu" else missing().get("step")
    if tiled:
        reason = "for weights that are quantized already: leave it out, or load the unquantized model"
    if reason:
        raise ConfigError(f"quant={options.quant} is not possible {reason}", "quant")
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
