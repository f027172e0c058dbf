"""MoE offload: places experts in device and host memory, and stores the profile of their use."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import cast

import torch

from deltic.config import DType, EngineConfig, ExpertsConfig, ModelConfig, available_cores, available_memory
from deltic.config.machine import parse_bytes
from deltic.errors import ConfigError, show
from deltic.loader.disk import open_plain
from deltic.loader.model_files import ModelFiles
from deltic.ops import Ops
from deltic.ops.cpu import missing, pool_of
from deltic.ops.cpu.experts import ExpertStore, OffloadedExperts, expert_bytes
from deltic.ops.cpu.library import ThreadPool
from deltic.ops.cuda.expert_offload import GpuExpertCache, HostExperts, PinnedExpertStore, TileStore, take_stacks
from deltic.ops.cuda.moe import ExpertsShape
from deltic.ops.cuda.quantized import Tiles
from deltic.ops.cuda.quantized_moe import scratch_bytes
from deltic.ops.stored import ExpertStatistics
from deltic.ops.types import DecoderWeights, MoeWeights, Weight
from deltic.runner.memory import free_on_card

log = logging.getLogger("deltic")

_MOST_PROFILE = 64 << 20
_MOST_THREADS, _OTHERS = 16, 2
"""Maximum number of host threads that compute experts, and number of cores left for other work. Beyond this number,
memory bandwidth is the limit."""
_READS = 0.85
"""Fraction of a copy's rate that kernels reach while the host also reads the same memory to compute."""
_LEAST_SHARE = 0.1
"""Minimum share of the experts in host memory that the host computes. A smaller share does not pay."""


@dataclass(slots=True)
class ExpertOffload:
    """The offloaded experts of a model. profile: the file of their scores, if there is one. rates: bytes of experts per
    second that the host computes and that the GPU copies, if both were measured."""

    store: ExpertStore | GpuExpertCache
    profile: Path | None
    rates: tuple[float, float] | None = None

    def statistics(self) -> ExpertStatistics:
        """Returns the statistics of the store. Thread-safe."""
        return self.store.statistics()

    def close(self) -> None:
        """Logs statistics and writes the profile. Call it after the last step."""
        found = self.statistics()
        hits, misses = sum(found.hits), sum(found.misses)
        log.info("experts: %.1f %% of %d were in memory, %.1f MiB were read in %.1f s, %d promoted; steps waited "
                 "%.1f s", 100 * hits / max(hits + misses, 1), hits + misses, found.bytes / (1 << 20),
                 found.reading, found.promotions, found.waited)
        if isinstance(self.store, GpuExpertCache) and self.store.host:
            log.info("experts: of %d misses the host computed %d, %.1f MiB, in %.1f s", misses, found.computed,
                     found.computed_bytes / (1 << 20), found.computing)
            self.store.close()
        if self.profile:
            try:
                fresh = self.profile.with_name(self.profile.name + ".new")
                fresh.write_text(json.dumps({"layers": [[round(score, 3) for score in layer]
                                                        for layer in self.store.scores()]}))
                fresh.replace(self.profile)
            except OSError as error:
                log.error("the profile of experts cannot be written to %s: %s", self.profile, error.strerror)


def check_experts(files: ModelFiles | None, config: ModelConfig, options: EngineConfig, dtype: str,
                  packed: bool) -> None:
    """Raises ConfigError if the options offload experts and this model does not allow it. files: None for random
    weights. packed: True if the weights stay as in a GGUF file or are quantized at load."""
    if not options.offloads_experts:
        if options.expert_compute != "auto" and config.experts:
            raise ConfigError(f"expert_compute={options.expert_compute} needs experts offloaded from a GPU: leave it "
                              "out, or give `expert_memory`", "expert_compute")
        return
    asked = "expert_memory" if options.expert_memory else "expert_cap"
    reason = None
    if config.experts is None:
        reason = "this is a dense model, without experts; leave it out"
    elif options.expert_compute == "host" and missing():
        asked, reason = "expert_compute", next(iter(missing().values()))
    elif options.on_gpu:
        reason = _not_beside_the_card(config, config.experts, options, dtype, packed)
    elif files is None:
        reason = "these weights lie in no file; leave it out, or write them to one"
    elif (absent := missing().get("moe")) or options.ops:
        reason = absent or "only the compiled kernels know such experts; leave out `ops`"
    elif files.gguf is not None and not packed:
        reason = "the experts of a GGUF file are used as they are in it: add `packed_weights='on'`"
    if reason:
        raise ConfigError(f"{asked}={getattr(options, asked)} is not possible: {reason}", asked)


def _not_beside_the_card(config: ModelConfig, experts: ExpertsConfig, options: EngineConfig, dtype: str,
                         packed: bool) -> str | None:
    if dtype != "bfloat16":
        return f"on a GPU only with dtype bfloat16, not {dtype}"
    if options.ops or options.debug_layers:
        return "on a GPU only deltic's own kernels know such experts; leave out `ops` and `debug_layers`"
    if torch.cuda.get_device_capability(options.device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 or later"
    shape = ExpertsShape(config.hidden_size, experts.size, experts.count, experts.per_token, bool(experts.shared_size),
                         True)
    if not packed and not shape.known:  # quantized experts were checked before
        return "the kernels do not know experts of these sizes"
    return None


def place_experts(plain: PinnedExpertStore | None, weights: dict[str, Weight], files: ModelFiles | None,
                  config: ModelConfig, options: EngineConfig, ops: Ops, dtype: DType) -> ExpertOffload | None:
    """Places the experts if they are offloaded, else returns None. plain: the store of unquantized experts, if any."""
    if beside_card(options):
        assert config.experts
        return fill_card(plain or tile_store(weights, config, options), options, config.experts)
    return open_experts(files, options, ops, dtype) if files and options.offloads_experts else None


def unpacks_experts(experts: ExpertOffload | None, weights: DecoderWeights) -> bool:
    """Returns True if a GPU dequantizes a layer's experts for steps of many tokens."""
    if experts:
        return isinstance(experts.store, TileStore)
    return any(isinstance(layer.mlp.parts[0].down, Tiles) for layer in weights.layers
               if isinstance(layer.mlp, MoeWeights) and layer.mlp.parts)


def beside_card(options: EngineConfig) -> bool:
    """Returns True if experts are offloaded from a GPU."""
    return options.offloads_experts and bool(options.on_gpu)


def plain_store(config: ModelConfig, options: EngineConfig) -> PinnedExpertStore:
    """Returns an empty store, which takes bfloat16 experts while weights are read."""
    assert config.experts
    return PinnedExpertStore(len(config.layer_types), config.experts.count, config.experts.size, config.hidden_size,
                      torch.device(options.device), options.expert_refresh)


def tile_store(weights: dict[str, Weight], config: ModelConfig, options: EngineConfig) -> TileStore:
    """Moves the model's quantized experts from `weights` to a store and returns it."""
    return TileStore(take_stacks(weights, len(config.layer_types)), torch.device(options.device),
                     options.expert_refresh)


def fill_card(store: GpuExpertCache, options: EngineConfig, experts: ExpertsConfig) -> ExpertOffload:
    """Places as many experts on the GPU as the options allow. Call it after the other weights are loaded."""
    torch.cuda.empty_cache()  # frees the temporaries of loading weights
    free = free_on_card(options)
    if isinstance(store, TileStore):
        free -= scratch_bytes(experts.count + bool(experts.shared_size), experts.size, store.hidden)
    slots = _slots([store.place_bytes] * len(store.expert_bytes), store.count, options, free)
    profile = Path(options.expert_profile) if options.expert_profile else None
    store.fill(slots, _read_profile(profile, [store.count] * len(store.expert_bytes))
               if profile and profile.exists() else None)
    log.info("%d of %d experts of each layer are on the GPU (%.1f MiB)", slots, store.count, store.nbytes / (1 << 20))
    rates = None
    some = slots < store.count and options.expert_compute != "card"
    if isinstance(store, PinnedExpertStore) and some and not missing():
        rates = _share_with_host(store, options, experts.per_token)
    return ExpertOffload(store, profile, rates)


def _share_with_host(store: PinnedExpertStore, options: EngineConfig, per_token: int) -> tuple[float, float]:
    """Lets the host's cores compute a share of the experts that are not on the GPU: all of them if the options say so,
    otherwise the share with which host and GPU end at the same time. Returns the rates of `ExpertOffload`."""
    threads = offload_threads(options)
    beside = OffloadedExperts(store.matrices, store.hidden, per_token, threads, pinned=True)
    host, card = beside.rate(), store.copy_rate()
    share = 1.0 if options.expert_compute == "host" else host_share(host, _READS * card)
    log.info("experts that are not on the GPU: %d threads of the host compute %.1f GB/s, the GPU copies %.1f GB/s: the "
             "host computes %.0f %% of them (expert_compute=%s)", threads[0], host / 1e9, card / 1e9, 100 * share,
             options.expert_compute)
    if share:
        store.share(HostExperts(beside, torch.device(options.device)), share)
    else:
        beside.close()
    return host, card


def offload_threads(options: EngineConfig) -> tuple[int, int]:
    """Returns the number of host threads that compute experts, and the level of their instruction set."""
    threads = options.threads or max(1, min(available_cores() - _OTHERS, _MOST_THREADS))
    return threads, pool_of(options.cpu_level).level


def host_share(host: float, card: float) -> float:
    """Returns the share (0 to 1) of the experts not on the GPU that the host should compute, so that both end at the
    same time. host, card: bytes per second that the host computes and that the GPU reads."""
    share = host / (host + card)
    return share if share >= _LEAST_SHARE else 0.0


def open_experts(files: ModelFiles, options: EngineConfig, ops: Ops, dtype: DType) -> ExpertOffload:
    """Opens experts on disk, with as many in memory as the options allow. Call it after other weights are loaded."""
    layers = files.stored_experts(dtype)
    slots = _slots([expert_bytes(experts[0]) for experts in layers], len(layers[0]), options, available_memory())
    pool = cast(ThreadPool, ops.moe.__self__)  # type: ignore[attr-defined]
    store = ExpertStore(pool, layers, [slots] * len(layers), options.expert_refresh, options.expert_predict)
    if not store.direct:
        log.warning("%s cannot be read past the page cache, which takes memory that deltic does not count",
                    store.paths[0].parent)
    profile = Path(options.expert_profile) if options.expert_profile else None
    store.fill(_read_profile(profile, [len(experts) for experts in layers])
               if profile and profile.exists() else None)
    log.info("%d of %d experts of each layer are in memory (%.1f MiB)", slots, len(layers[0]),
             store.nbytes / (1 << 20))
    return ExpertOffload(store, profile)


def _slots(sizes: Sequence[int], count: int, options: EngineConfig, free: int) -> int:
    """Returns the number of experts of each layer to keep in memory, at most `count`. sizes: bytes of an expert by
    layer. free: available bytes."""
    budget, most = options.expert_bytes, min(options.expert_cap or count, count)
    if options.expert_memory == "auto":
        budget = free - parse_bytes(options.expert_reserve) - (options.memory_bytes or 0)
    slots = most if budget is None else min(most, budget // sum(sizes))
    if slots < 1:
        raise ConfigError(f"expert_memory={options.expert_memory} has no room for one expert of each layer, which take "
                          f"{sum(sizes) / (1 << 20):.1f} MiB{_left(options, budget)}: give more", "expert_memory")
    return slots


def _left(options: EngineConfig, budget: int | None) -> str:
    return f" ({max(budget or 0, 0) / (1 << 20):.1f} MiB are left)" if options.expert_memory == "auto" else ""


def _read_profile(path: Path, counts: Sequence[int]) -> list[list[float]]:
    """Returns expert scores by layer. counts: experts by layer. Raises ConfigError if the file does not fit these."""
    try:
        with open_plain(path) as file:
            text = file.read(_MOST_PROFILE + 1)
        if len(text) > _MOST_PROFILE:
            raise ValueError("it is too large")
        found = json.loads(text)["layers"]
        shape = [len(layer) for layer in found]
        if shape != list(counts):
            raise ValueError("it is of a model with another number of layers or experts")
        if not all(isinstance(score, int | float) and isfinite(score) and score >= 0
                   for layer in found for score in layer):
            raise ValueError("its scores must be numbers from 0 on")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"expert_profile {show(str(path))} cannot be used: {error}; delete it, or name another file",
                          "expert_profile") from error
    return cast("list[list[float]]", found)
