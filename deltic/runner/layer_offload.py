"""Offload of dense models that do not fit a GPU: chooses feed-forwards for host memory and places them there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from deltic.cache.memory_plan import MemoryPlan, extra_slots
from deltic.config import EngineConfig, ModelConfig, available_memory
from deltic.errors import ConfigError
from deltic.ops.cpu import missing
from deltic.ops.cpu.experts import OffloadedExperts
from deltic.ops.cuda.expert_offload import HostExperts, hosted_experts
from deltic.ops.cuda.layer_offload import BUFFERS, MATRICES, HostLayer, LayerStore, host_layer
from deltic.ops.types import Block, ExpertPool, Weight
from deltic.params import Draft
from deltic.runner.expert_offload import host_share, offload_threads
from deltic.runner.memory import SHARE, CardMemory, expected_card, free_on_card, with_steps

log = logging.getLogger("deltic")

_CONTEXT = 16384
"""Context length in tokens for which offloading makes room if the options set none."""
_KEPT_STATES = 1
"""Minimum number of states for kept prefixes: without one, each turn would compute its whole conversation again."""
_MARGIN = 640 << 20
"""Bytes that weights may take beyond their size, because allocators round up and kernels are loaded."""

PlanCache = Callable[[EngineConfig, CardMemory], MemoryPlan]
"""Plans a model's cache for a given division of GPU memory. Raises ConfigError if no sequence fits into it."""


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """The feed-forwards that lie in host memory.

    layers: their layers, ascending. nbytes: their bytes. buffers: bytes of the GPU buffers to which they are copied.
    context: context length in tokens for which they make room. note: a description of this trade-off.
    """

    layers: tuple[int, ...] = ()
    nbytes: int = 0
    buffers: int = 0
    context: int = 0
    note: str = ""

    def of(self, card: CardMemory) -> CardMemory:
        """Returns a GPU's memory without the weights of these feed-forwards. card: the memory with all weights."""
        return replace(card, taken=card.taken - self.nbytes + self.buffers)

    def settle(self, options: EngineConfig) -> EngineConfig:
        """Returns the options with which the cache is planned."""
        return replace(options, max_context=self.context) if self.layers else options

    def describe(self, memory: MemoryPlan) -> MemoryPlan:
        """Returns the plan of the cache with a warning about the layers."""
        return replace(memory, warnings=(self.note, *memory.warnings)) if self.layers else memory


def matrices_of(layer: int) -> tuple[str, ...]:
    """Returns the names of a feed-forward's matrices."""
    return tuple(f"model.layers.{layer}.mlp.{part}_proj.weight" for part in MATRICES)


def why_not_beside(config: ModelConfig, options: EngineConfig, dtype: str) -> str | None:
    """Returns the reason why feed-forwards cannot be offloaded; None if they can."""
    if config.experts:
        return "its experts can: give `expert_memory`"
    if dtype != "bfloat16" or options.ops or options.debug_layers:
        return "only deltic's own kernels copy them: use dtype bfloat16, without `ops` and `debug_layers`"
    return None


def plan_layers(config: ModelConfig, options: EngineConfig, dtype: str, sizes: Mapping[str, int], others: int,
                plan: PlanCache) -> LayerPlan:
    """Returns the plan with the fewest feed-forwards in host memory that leaves the GPU room for the context. If there
    is none, returns the plan with all feed-forwards in host memory. Call it before the weights are read.

    sizes: bytes of the weights on a GPU by name. others: bytes of other weights that will be read. Raises ConfigError
    if not even the latter plan leaves room for a cache."""
    whole = sum(sizes.values()) + others
    card = expected_card(config, options, whole) if options.on_gpu else None
    shares = options.memory is None and isinstance(options.speculation, Draft)  # the draft model's size is not known
    if card is None or shares or why_not_beside(config, options, dtype):
        return LayerPlan()
    if _certainly_fits(options, whole):
        return LayerPlan()
    layers = [sum(sizes[name] for name in matrices_of(index)) for index in range(config.num_hidden_layers)]
    choose = partial(_fewest, config, layers=layers, card=card, plan=partial(_strictly, plan))
    context = wanted_context(config, options)
    found = choose(options, context) or _placed(range(len(layers)), layers)
    if not found.layers:
        return found
    found = replace(found, context=context)
    try:
        settled = found.settle(options)
        reached = _strictly(plan, settled, found.of(with_steps(card, config, settled)))
    except ConfigError as error:
        raise ConfigError(f"even with all feed-forwards in host memory, {error}", error.option) from None
    instead = [*_alternatives(config, options, choose, reached.max_context)]
    return replace(found, note=_note(config, found, reached, instead))


def has_room(config: ModelConfig, options: EngineConfig, weights: int, plan: PlanCache) -> bool:
    """Returns True if each of the options' GPUs has room for `weights` bytes of weights and for the context."""
    card = expected_card(config, options, weights)
    if card is None:
        return False
    return _fewest(config, options, wanted_context(config, options), (), card, partial(_strictly, plan)) is not None


def _certainly_fits(options: EngineConfig, weights: int) -> bool:
    """Returns True if weights and a given cache size fit, or if no limits are given and weights fill at most half."""
    if options.memory_bytes is not None:
        return options.memory_bytes + weights <= free_on_card(options)
    unlimited = options.gpu_memory is None and options.gpu_memory_utilization is None
    return unlimited and 2 * weights <= free_on_card(options)


def _strictly(plan: PlanCache, options: EngineConfig, card: CardMemory) -> MemoryPlan:
    """Plans a cache in the GPU memory that weights and steps leave free. Raises ConfigError if there is no room."""
    if options.memory_bytes is not None and options.memory_bytes > options.shards * card.left:
        raise ConfigError(f"memory={options.memory} does not fit the GPU beside the weights: give less", "memory")
    if options.memory is None and options.gpu_memory is None:
        options = replace(options, gpu_memory_utilization=options.gpu_memory_utilization or SHARE)
    return plan(options, card)


def wanted_context(config: ModelConfig, options: EngineConfig) -> int:
    """Returns the context length in tokens for which feed-forwards are offloaded."""
    return min(options.max_context or _CONTEXT, config.max_position_embeddings)


def _fewest(config: ModelConfig, options: EngineConfig, context: int, layers: Sequence[int], card: CardMemory,
            plan: PlanCache) -> LayerPlan | None:
    """Returns the plan with the fewest offloaded feed-forwards, if any is good enough. context: tokens that it must
    allow, for one sequence if the options ask for a context, otherwise for `max_batch` sequences."""
    options = replace(options, max_context=context)
    if options.asks_for_context:
        options = replace(options, max_batch=1)
    card = with_steps(card, config, options)
    for count in range(len(layers) + 1):
        found = _placed(_spread(count, len(layers)), layers)
        try:
            memory = plan(options, found.of(_with_margin(card) if 0 < count < len(layers) else card))
        except ConfigError:
            continue
        kept = memory.slots - memory.max_batch - extra_slots(memory.max_batch)
        enough = kept >= _KEPT_STATES or not options.prefix_cache or not count
        if enough and memory.max_context >= context and memory.max_batch >= options.max_batch:
            return found
    return None


def _with_margin(card: CardMemory) -> CardMemory:
    return replace(card, taken=card.taken + _MARGIN)


def _spread(count: int, total: int) -> list[int]:
    """Returns `count` numbers below `total`, evenly spread, because a layer is copied while others are computed."""
    return [index for index in range(total) if (index + 1) * count // total > index * count // total]


def _placed(chosen: Sequence[int], layers: Sequence[int]) -> LayerPlan:
    """Returns the plan for the chosen layers. layers: bytes of each layer's feed-forward."""
    if not chosen:
        return LayerPlan()
    return LayerPlan(tuple(chosen), sum(layers[index] for index in chosen),
                     BUFFERS * max(layers[index] for index in chosen))


def _note(config: ModelConfig, plan: LayerPlan, memory: MemoryPlan, instead: Sequence[str]) -> str:
    each = plan.nbytes / len(plan.layers) / (1 << 20)
    return (f"the feed-forwards of {len(plan.layers)} of {config.num_hidden_layers} layers lie in host memory, "
            f"{plan.nbytes / (1 << 30):.2f} GiB (layers {_ranges(plan.layers)}): the GPU has no room for them and for "
            f"contexts of up to {memory.max_context:,} tokens. Each costs a step of few tokens the time to read "
            f"{each:.0f} MiB of host memory" + (f"; instead: {', '.join(instead)}" if instead else ""))


def _alternatives(config: ModelConfig, options: EngineConfig, choose: Callable[[EngineConfig, int], LayerPlan | None],
                  reached: int) -> Iterator[str]:
    """Yields descriptions of plans for other contexts or smaller K/V. reached: context length of the current plan."""
    context = wanted_context(config, options)
    longer = options.max_context is None and 2 * reached <= config.max_position_embeddings
    lengths = [reached // 2, *[2 * reached] * longer]
    others = [(f"max_context={length}", replace(options, max_context=length)) for length in lengths]
    if options.kv_dtype == "auto":
        others += [(f"kv_dtype='{kind}'", replace(options, kv_dtype=kind, max_context=context))
                   for kind in ("fp8", "int4")]
    for name, other in others:
        found = choose(other, wanted_context(config, other))
        if found:
            tokens = "" if name.startswith("max_context") else f" for {other.max_context:,} tokens"
            yield f"{len(found.layers)} layers with `{name}`{tokens}"


def _ranges(numbers: Sequence[int]) -> str:
    """Returns ascending numbers in short form, such as `0-3, 5`."""
    runs = list[list[int]]()
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def host_computes(options: EngineConfig) -> bool:
    """Returns True if the host may compute feed-forwards."""
    return options.expert_compute != "card" and not options.batch_invariant and not missing()


def check_host_memory(plan: LayerPlan) -> None:
    """Raises ConfigError if the host has no room for the feed-forwards. Call it before they are read."""
    if plan.nbytes > (free := available_memory()):
        raise ConfigError(f"the host has {free / (1 << 30):.2f} GiB left, which is too little: free some, or take "
                          f"weights of fewer bits. It is needed because {plan.note}", "gpu_memory")


def has_second_form(options: EngineConfig, plan: LayerPlan) -> bool:
    """Returns True if the host keeps quantized feed-forwards in a second form, with which it computes."""
    if not host_computes(options):
        return False
    if available_memory() > 2 * plan.nbytes:
        return True
    log.warning("the host has no memory for a second form of %d MiB of feed-forwards, so that the GPU computes them "
                "all", plan.nbytes >> 20)
    return False


@dataclass(slots=True)
class LayerOffload:
    """The offloaded feed-forwards of a loaded model. pools: per layer, the object that replaces its feed-forward."""

    store: LayerStore
    pools: list[ExpertPool | None]

    def close(self) -> None:
        """Logs statistics. Call it after the last step."""
        if host := self.store.host:
            log.info("feed-forwards: the host computed %d in %.1f s", host.computed(), host.computing())
        self.store.close()


def place_layers(weights: dict[str, Weight], plan: LayerPlan, options: EngineConfig, count: int) -> LayerOffload:
    """Moves feed-forwards from `weights` to pinned host memory. The host computes all of them if the options say so,
    otherwise the share with which host and GPU end at the same time. count: number of the model's layers."""
    device, computes = torch.device(options.device), host_computes(options)
    layers = dict[int, HostLayer]()
    for index in plan.layers:
        layers[index] = host_layer([_block(weights.pop(name)) for name in matrices_of(index)], device, computes)
    store = LayerStore(layers, device)
    host, hosted = None, list[int]()
    if computable := store.computable:
        experts = [own for index in computable if (own := layers[index].expert) is not None]
        threads = OffloadedExperts(experts, _hidden(layers[computable[0]]), 1, offload_threads(options),
                                   pinned=device.type == "cuda")
        rates = threads.rate(), store.copy_rate()
        share = 1.0 if options.expert_compute == "host" else host_share(*rates)
        spread = hosted_experts(1, len(computable), share)[0]
        hosted = [index for index, own in zip(computable, spread.tolist(), strict=True) if own]
        log.info("feed-forwards in host memory: the host computes %.1f GB/s, the GPU copies %.1f GB/s: in steps of few "
                 "tokens the host computes %d of %d (expert_compute=%s)", rates[0] / 1e9, rates[1] / 1e9, len(hosted),
                 len(layers), options.expert_compute)
        if hosted:
            host = HostExperts(threads, device)
        else:
            threads.close()
    store.settle(host, hosted)
    return LayerOffload(store, store.pools(count))


def _block(weight: Weight) -> Block:
    assert not isinstance(weight, tuple)
    return weight


def _hidden(layer: HostLayer) -> int:
    return int(layer.parts[0].shape[1])
