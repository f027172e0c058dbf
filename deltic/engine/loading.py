"""From a model's files, or from a shape alone, to a `ModelRunner`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from deltic.cache.manager import HybridCache
from deltic.cache.offload.identity import FileMark, Identity, machine_facts
from deltic.cache.tensors import allocate
from deltic.config import DType, EngineConfig, GenerationDefaults, ModelConfig
from deltic.engine.aot import PackedFile
from deltic.engine.memory import keep_freed_memory, plan_memory, share_memory
from deltic.engine.offload_tiers import open_tiers
from deltic.engine.options import settled
from deltic.engine.packed_weights import check_packed, dequantized_in_steps, keeps_packed, not_packed, packed_form
from deltic.errors import ConfigError, ModelError, show
from deltic.export.backend import ProgramModel, load_program
from deltic.export.program import kind_of
from deltic.loader.dummy import random_head, random_tensors
from deltic.loader.fp8 import Float8
from deltic.loader.gguf.tokenizer import TokenizerTexts
from deltic.loader.model_files import ModelFiles, open_model
from deltic.loader.quantize import FP8, quantize_tensors, quantize_tower
from deltic.model.decoder import Decoder, build
from deltic.model.draft_vocabulary import Tokens, draftable
from deltic.model.mtp_head import MtpHead as MtpHead
from deltic.model.mtp_head import build_head
from deltic.model.vision_tower import build_tower
from deltic.ops import Ops, explain, select
from deltic.ops.cpu import missing, use_torch_threads
from deltic.ops.cuda import quantized, serves_delta_logs
from deltic.ops.cuda.expert_offload import GpuExpertCache, TileStore
from deltic.ops.memory import memory_for
from deltic.ops.quantized import host_form
from deltic.ops.types import MoeWeights, Weight
from deltic.params import Auto, Draft, Mtp, Ngram
from deltic.runner.expert_offload import (
    ExpertOffload,
    beside_card,
    check_experts,
    fill_card,
    open_experts,
    plain_store,
    tile_store,
)
from deltic.runner.image_embeds import Encode
from deltic.runner.input_batch import FEW_ROWS
from deltic.runner.model_runner import ModelRunner
from deltic.vision.preprocess import Pixels, patches_of

log = logging.getLogger("deltic")

LoadProgress = Callable[[int, int], None]
"""Called with (bytes loaded, bytes in all) while weights are read."""


@dataclass(frozen=True, slots=True)
class RandomModel:
    """A model of a known shape with random weights: true speed, no sense. For benchmarks and tests.

    preset: a name of `config.PRESETS`.
    layers: keep only the first so many.
    shape: use this instead of a preset.
    ModelError for what cannot be such a model.
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


@dataclass(frozen=True, slots=True)
class ModelOverrides:
    """What a caller hands over instead of what the model's files have: see `open_model`."""

    config: ModelConfig | Mapping[str, Any] | str | Path | None = None
    weights: Mapping[str, Tensor] | None = None

    @property
    def name(self) -> str | None:
        """The first of them that there is."""
        return "weights" if self.weights is not None else None if self.config is None else "config"

    def check(self, model: str | RandomModel | None, options: EngineConfig) -> None:
        """ConfigError if they do not go with these."""
        if isinstance(model, RandomModel) and self.name:
            raise ConfigError(f"{self.name} is not for random weights: write RandomModel(shape=ModelConfig(...))",
                              self.name)
        kept = "cache_dir" if options.cache_dir else "aot_dir" if options.aot_dir else None
        if self.weights is not None and kept:
            raise ConfigError(f"{kept} is for weights that lie in files, by which they are known again: leave it out, "
                              "or write the weights to a file", kept)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A model that has its weights, but no cache yet.

    files: None for random weights.
    threads: those that compute for it.
    tiled: as in `GdnSpec`.
    made: what the weights were made of.
    drafts: it drafts for another model.
    experts: those that are not all in memory.
    tokenizer: its texts, where they are no files of the directory.
    times: where the time went until now.
    """

    name: str
    files: ModelFiles | None
    config: ModelConfig
    options: EngineConfig
    generation: GenerationDefaults
    decoder: Decoder
    head: MtpHead | None
    encode: Encode | None
    threads: int
    tiled: bool
    made: Identity
    drafts: bool
    experts: ExpertOffload | None
    tokenizer: TokenizerTexts | None
    times: StartTimes


def load_any(model: str | Path | RandomModel | None, options: EngineConfig, revision: str | None = None,
             progress: LoadProgress | None = None, rings: bool = False, given: ModelOverrides = ModelOverrides()
             ) -> ModelRunner | ProgramModel:
    """As `load`, or a compiled model, whose path has a name or content of its own."""
    model = str(model) if isinstance(model, Path) else model
    if isinstance(model, str) and kind_of(model):
        if revision is not None:
            raise ModelError(f"{model} is compiled: leave out the revision ({revision}), which is for models of the "
                             "Hugging Face hub")
        if given.name:
            raise ConfigError(f"{given.name} is not possible: {model} is compiled", given.name)
        began, program = time.perf_counter(), load_program(Path(model), options)
        log.info("%s: loaded in %.2f s", model, time.perf_counter() - began)
        return program
    return load(model, options, revision, progress, rings, given=given)


def load(model: str | RandomModel | None, options: EngineConfig, revision: str | None = None,
         progress: LoadProgress | None = None, rings: bool = False, vectors: bool = False,
         given: ModelOverrides = ModelOverrides()) -> ModelRunner:
    """Load a model (directory, GGUF file, hub name, "tiny" or None for the embedded one, or random weights) and size
    its cache; with it the draft head, or the model that drafts for it, if the options ask for one. rings: make replay
    rings even if nobody drafts. vectors: as of `plan_memory`."""
    options = settled(options)
    if options.params is not None:
        raise ConfigError("params is for a program (.pte) of ExecuTorch's own exporter: leave it out", "params")
    if vectors and options.batch_invariant:
        raise ConfigError("batch_invariant is for answers: leave it out with a model of vectors", "batch_invariant")
    speculation, draft = options.speculation, None
    if isinstance(speculation, Draft):
        options, drafting = share_memory(options)
        try:
            with _memory_for_weights(speculation.model, options.device):
                draft = _with_cache(_load(speculation.model, drafting, None, progress, drafts=True), True)
        except (ModelError, ConfigError) as error:
            raise ConfigError(f"the draft model {speculation.model}: {error}", "speculate") from error
    with _memory_for_weights(model, options.device):
        loaded = _load(model, options, revision, progress, given=given)
        rings = rings or draft is not None or loaded.head is not None or isinstance(speculation, Ngram)
        return _with_cache(loaded, rings, draft, vectors)


def _with_cache(loaded: _Loaded, rings: bool, draft: ModelRunner | None = None, vectors: bool = False) -> ModelRunner:
    config, options, ops, dtype = loaded.config, loaded.options, loaded.decoder.ops, loaded.decoder.dtype
    memory, extras = plan_memory(config, options, dtype, loaded.head is not None, rings, vectors, _defers(loaded),
                                 _unpacks(loaded))
    for warning in memory.warnings:
        log.warning("%s%s", f"the draft model {loaded.name}: " if loaded.drafts else "", warning)
    extras = replace(extras, tiled=loaded.tiled)
    pools = allocate(config, memory.pages, memory.slots, dtype, ops, options.device, extras)
    tiers, notes = ([], None) if loaded.drafts else open_tiers(loaded.name, options, ops, loaded.made, pools.keys.dtype)
    cache = HybridCache(pools, options.prefix_cache, tiers, memory.rows)
    files = loaded.files
    runtime = ModelRunner(loaded.name, files.place if files else None, config, options, loaded.generation, memory,
                   loaded.decoder, cache, loaded.threads, loaded.tokenizer, notes, loaded.head,
                   loaded.encode, files.vision if files and loaded.encode else None, draft, loaded.experts)
    if options.batch_invariant and options.device != "cpu" and runtime.step is None:
        log.warning("batch_invariant: on the GPU torch serves the steps, whose sums may depend on the number of rows")
    if loaded.experts and options.device != "cpu" and runtime.step is None:
        why = explain(ops, loaded.decoder.weights, runtime.views)["step"]
        raise ConfigError(f"expert_memory is not possible: on a GPU only deltic's own kernels know such experts: {why}",
                          "expert_memory")
    loaded.times.done("cache")
    log.info("%s%s: loaded in %s", "the draft model " if loaded.drafts else "", loaded.name, loaded.times)
    return runtime


def _defers(loaded: _Loaded) -> bool:
    """Whether updates of states are to be deferred: on a card, where there may be many rows."""
    options, dtype = loaded.options, str(loaded.decoder.dtype).removeprefix("torch.")
    return (options.device != "cpu" and options.max_batch > FEW_ROWS and not options.batch_invariant
            and loaded.config.linear is not None
            and serves_delta_logs(torch.device(options.device), dtype) and not loaded.drafts)


def _unpacks(loaded: _Loaded) -> bool:
    """Whether experts that stay quantized become plain numbers on a card, for steps of many tokens."""
    if loaded.experts:
        return isinstance(loaded.experts.store, TileStore)
    layers = loaded.decoder.weights.layers
    return any(isinstance(block, quantized.Tiles) for layer in layers if isinstance(layer.mlp, MoeWeights)
               for part in layer.mlp.parts[:1] for block in (part.down,))


def _memory_for_weights(model: str | RandomModel | None, device: str) -> AbstractContextManager[None]:
    name = f"random-{model.preset}" if isinstance(model, RandomModel) else model or "tiny"
    elsewhere = "" if device == "cpu" else ", run it on the CPU (`device='cpu'`)"
    return memory_for(f"the weights of {name}", "take a smaller model or one with fewer bits a weight (a quantized "
                                                f"GGUF file with `packed_weights='on'`, or `quant='q4_k'`){elsewhere}")


def _load(model: str | RandomModel | None, options: EngineConfig, revision: str | None,
          progress: LoadProgress | None, drafts: bool = False, given: ModelOverrides = ModelOverrides()) -> _Loaded:
    """drafts: it drafts for another model, and if it is quantized stays so."""
    times = StartTimes()
    _check_device(options.device)
    select(options.ops, options.device, options.cpu_level)  # what cannot be had is refused before anything is read
    files, tiled, marks = None, False, list[FileMark]()
    quantizes, here = options.quant != "none", beside_card(options) or not options.offloads_experts
    given.check(model, options)
    if isinstance(model, RandomModel):
        name, generation = f"random-{model.preset}", GenerationDefaults()
        config = model.shape or ModelConfig.preset(model.preset, model.layers)
        ops, dtype, threads = _prepare(config, options)
        check_packed(None, options, drafts)
        check_experts(None, config, options, dtype, quantizes)
        tensors = random_tensors(config, dtype, model.seed, device=options.device,
                                 initializer_range=model.initializer_range)
    else:
        files = open_model(model, revision, progress=progress is not None, mmproj=None if drafts else options.mmproj,
                           config=given.config, weights=given.weights)
        config, generation = files.config, files.generation
        name = str(model or ("tiny" if files.place else "weights"))
        times.done("files")
        ops, dtype, threads = _prepare(config, options)
        check_packed(files, options, drafts)
        tiled = keeps_packed(files, options, dtype)
        marks = _marks(files, options)
        check_experts(None if files.weights else files, config, options, dtype, tiled or quantizes)
        tensors = iter(()) if tiled else files.tensors(dtype, options.device, progress, here)
    card: GpuExpertCache | None = None
    if beside_card(options) and not tiled and not quantizes:
        card = plain = plain_store(config, options)
        tensors = ((name, tensor) for name, tensor in tensors if not plain.take(name, tensor))
    weights: dict[str, Weight]
    if quantizes and not (drafts and tiled):
        kept = _packed_file(model, config, dtype, marks, options, ops)
        stored = (files.float8_tensors(dtype, options.device, progress, here) if files and options.quant == FP8
                  else tensors)
        weights = _quantize(stored, options, config, dtype, tiled, kept)
    else:
        weights = (files.load_packed(progress, packed_form(options), here) if files and tiled
                   else {**dict(tensors)})
    head = _head_weights(model, files, config, dtype, tiled, options)
    times.done("weights")
    made = Identity({"random": model if isinstance(model, RandomModel) else None, "config": config, "dtype": dtype,
                     "packed": tiled, "quant": options.quant, "head": head is not None}, marks)
    experts = _experts(card, weights, files, config, options, ops, dtype)
    decoder = build(config, weights, ops, getattr(torch, dtype), tiled, experts.store.pools() if experts else ())
    texts = files.tokenizer() if files else None
    mtp = build_head(config, head, decoder, _draftable(files, texts, config, options)) if head else None
    keep_freed_memory()
    times.done("layers")
    encode = _tower(files, ops, dtype, options) if files and not drafts else None
    times.done("vision tower")
    return _Loaded(name, files, config, options, generation, decoder, mtp, encode, threads, tiled, made, drafts,
                   experts, texts, times)


def _tower(files: ModelFiles, ops: Ops, dtype: DType, options: EngineConfig) -> Encode | None:
    """What makes rows of pictures, if the model sees and shall."""
    packs = options.device == "cpu" and not missing()  # a GPU's torch ops want plain numbers
    form = host_form() if packs and options.packed_weights != "off" else None
    weights = files.load_tower(dtype, options.device, form) if options.vision else None
    if weights is None or files.vision is None:
        return None
    vision = files.vision
    if packs and options.quant != "none":
        weights = quantize_tower(weights)
    tower = build_tower(vision.tower, weights, ops, getattr(torch, dtype))

    def encode(pixels: Pixels) -> Generator[None, None, Tensor]:
        patches = torch.from_numpy(patches_of(pixels, vision.pictures, vision.tower)).to(options.device)
        return tower.encode(patches, [pixels.grid])

    return encode


def _marks(files: ModelFiles, options: EngineConfig) -> list[FileMark]:
    """The model's files as they are now, if a tier or what is kept for the next start will have to know them: those of
    the weights and, for the sake of notes beside the tier, of the tokenizer."""
    if not (options.cache_dir or options.aot_dir):
        return []
    try:
        found = files.weight_files(isinstance(options.speculation, Auto | Mtp))
    except ModelError:  # the head's, of which `_head_weights` will tell
        found = files.weight_files(False)
    tokenizer = files.path / "tokenizer.json"
    return [FileMark.of(path) for path in (*found, *([tokenizer] if tokenizer.is_file() else []))]


def _head_weights(model: str | RandomModel | None, files: ModelFiles | None, config: ModelConfig, dtype: DType,
                  tiled: bool, options: EngineConfig) -> dict[str, Weight] | None:
    """The draft head's weights, if the options want it and the model has one."""
    speculation = options.speculation
    if not isinstance(speculation, Auto | Mtp):
        return None
    if isinstance(speculation, Auto) and options.device != "cpu" and not serves_delta_logs(
            torch.device(options.device), dtype):
        return None  # there torch would verify them, one op at a time
    found: dict[str, Weight] | None
    if isinstance(model, RandomModel):
        found = {**random_head(config, dtype, model.seed, device=options.device)} if model.head else None
    else:
        assert files is not None
        try:
            found = files.load_head(dtype, options.device, tiled and options.device == "cpu")
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


def _experts(card: GpuExpertCache | None, weights: dict[str, Weight], files: ModelFiles | None, config: ModelConfig,
             options: EngineConfig, ops: Ops, dtype: DType) -> ExpertOffload | None:
    """Those that are not all in memory. card: on a GPU, where they are plain."""
    if beside_card(options):
        assert config.experts
        return fill_card(card or tile_store(weights, config, options), options, config.experts)
    return open_experts(files, options, ops, dtype) if files and options.offloads_experts else None


def _draftable(files: ModelFiles | None, texts: TokenizerTexts | None, config: ModelConfig, options: EngineConfig
               ) -> list[int] | None:
    """The tokens that the draft head can draft; None: all. texts: the tokenizer, where it is no file."""
    if files is None or not 0 < options.draft_vocab < config.vocab_size:
        return draftable(options.draft_vocab, config.vocab_size)
    text = texts.tokenizer if texts else ""
    with suppress(OSError, UnicodeDecodeError):
        text = text or (files.path / "tokenizer.json").read_text(encoding="utf-8")
    return draftable(options.draft_vocab, config.vocab_size, Tokens.of(text), files.generation.eos_token_ids)


def _prepare(config: ModelConfig, options: EngineConfig) -> tuple[Ops, DType, int]:
    """The ops that serve this model and no other; the dtype of its weights and activations; how many threads compute
    for it."""
    threads = options.threads_for(config.parameter_count)
    ops = select(options.ops, options.device, options.cpu_level, threads)
    use_torch_threads(ops, threads)
    return ops, config.dtype if options.dtype == "auto" else cast(DType, options.dtype), threads


def _packed_file(model: str | RandomModel | None, config: ModelConfig, dtype: DType, marks: list[FileMark],
                 options: EngineConfig, ops: Ops) -> PackedFile | None:
    """Where packed weights are kept for the next start, if they shall be. On a GPU they are made on the device."""
    if options.aot_dir is None or options.device != "cpu":
        return None
    facts = {"random": model if isinstance(model, RandomModel) else None, "config": config, "dtype": dtype,
             "quant": options.quant}
    return PackedFile(options.aot_dir, machine_facts(options, ops), Identity(facts, marks))


def _quantize(tensors: Iterator[tuple[str, Tensor | Float8]], options: EngineConfig, config: ModelConfig, dtype: DType,
              tiled: bool, kept: PackedFile | None) -> dict[str, Weight]:
    """The weights in the quantized form that `options.quant` asks for. They come one after another, so that memory
    stays near what they take then; or from where the last start has kept them."""
    reason = not_packed(options, config, dtype)
    if tiled:
        reason = "the weights are quantized already; leave it out, or load the unquantized model"
    if reason:
        raise ConfigError(f"quant={options.quant} is not possible: {reason}", "quant")
    if slow := dequantized_in_steps(options, config):
        log.warning("quant=%s: %s", options.quant, slow)
    found = kept.read() if kept else None
    if found is None:
        found = quantize_tensors(tensors, options.quant, config, packed_form(options))
        if kept:
            kept.write(found)
    return found


def _check_device(device: str) -> None:
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device {device}: torch finds no CUDA device here; use `device='cpu'`, or install a CUDA "
                          "build of torch", "device")


class StartTimes:
    """Seconds of the parts of a start, in order.

    files         finding and downloading them, reading all but the weights
    weights       reading and quantizing them, those of the draft head too
    layers        what the ops compute with: packed matrices, offloaded experts
    vision tower  the same for the tower
    cache         allocating its memory, opening the disk tier
    """

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def done(self, part: str) -> None:
        """Ends a part, which began with the end of the last one."""
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now

    def __str__(self) -> str:
        """The total and its parts: `1.29 s (files 0.03 s, weights 1.26 s)`."""
        parts = ", ".join(f"{part} {seconds:.2f} s" for part, seconds in self.seconds.items())
        return f"{self._last - self._began:.2f} s ({parts})"
