"""Determines how much memory a model's cache may take, and how this memory is split."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from deltic.cache.memory_plan import MemoryNeeds, MemoryPlan, enough, split_memory
from deltic.cache.tensors import PoolOptions, delta_log_bytes, frame_layout, page_bytes, slot_bytes
from deltic.config import EngineConfig, ModelConfig, available_memory, shard_config
from deltic.config.engine import GPU_TOKEN_BUDGET, option_defaults
from deltic.errors import ConfigError
from deltic.ops import mlx
from deltic.ops.capabilities import device_capabilities, device_kind
from deltic.ops.cuda.quantized_moe import scratch_bytes
from deltic.ops.kv import FP8, INT4, INT8, INT8_DIM
from deltic.ops.memory import empty_cache
from deltic.params import PAGE

SHARE = 0.9
"""Default fraction of a GPU's memory for weights, cache and steps together."""
_KEPT = 1152 << 20
"""Bytes that matrix products and recorded steps keep for themselves on a GPU, and gaps between their tensors."""
_OUTSIDE = 512 << 20
"""Bytes that libraries, kernels and recorded steps take on a GPU outside of torch's allocator."""
_USUAL_CONTEXT = 1 << 16
"""Context length in tokens for which steps have memory, unless the options set one."""
_CONTEXT = 512 << 20
"""Bytes that CUDA takes before the first allocation."""
_SMALL_CARD = 32 << 30
_SMALL_CARD_BUDGET = 2048
"""Token budget of a step on a small GPU."""
_WHOLE_BLOCK_MIB, _ANY_BLOCK_MIB = 32, 1 << 20
"""On a small GPU, torch does not split memory blocks larger than this: while weights are read, and afterwards."""
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Numbers of mallopt's options in glibc."""


@dataclass(frozen=True, slots=True)
class CardMemory:
    """The memory of a GPU in bytes.

    limit: bytes that the options allow.
    taken: bytes that weights, CUDA and other programs take.
    steps: bytes of the steps' work space.
    option: name of the option that raises the limit.
    """

    limit: int
    taken: int
    steps: int
    option: str = "gpu_memory"

    @property
    def left(self) -> int:
        """Bytes that are left for the cache; negative if the limit is exceeded."""
        return self.limit - self.taken - self.steps


def plan_memory(config: ModelConfig, options: EngineConfig, dtype: torch.dtype,
                head: bool, drafts: bool, vectors: bool = False, defers: bool = False,
                card: CardMemory | None = None) -> tuple[MemoryPlan, PoolOptions]:
    """Splits the cache's memory. Raises ConfigError if it cannot hold one sequence. The plan covers all devices that
    share the model. dtype: of activations. head: there is a draft head. drafts, defers: sequences need delta logs, for
    drafts or for deferred state writes. vectors: the model computes embeddings while other models run, so its cache
    takes only enough for one text of full length and a step. card: memory of the GPU; default: its present state."""
    kv = {"fp8": FP8, "int8": INT8, "int4": INT4}.get(options.kv_dtype)
    if kv == INT4 and config.head_dim not in (16, 32, 64, 128, 256):
        raise ConfigError(f"kv_dtype=int4 rotates heads of 16 to 256 dimensions, a power of two; this model's have "
                          f"{config.head_dim}: leave it out", "kv_dtype")
    if kv == INT8 and config.head_dim > INT8_DIM:
        raise ConfigError(f"kv_dtype=int8 serves heads of up to {INT8_DIM} dimensions; this model's have "
                          f"{config.head_dim}: leave it out", "kv_dtype")
    state: torch.dtype = getattr(torch, options.state_dtype)
    count = options.shards
    own = shard_config(config, count)
    logs = count * delta_log_bytes(own, dtype) if drafts or defers else 0
    layout = None
    if device_capabilities(options.device).frames:
        layout = frame_layout(own, dtype, PoolOptions(0, head, kv=kv, state=state))
    # only the first of several GPUs has the logits, but all GPUs get equal caches
    logits = 4 * config.vocab_size * (count if options.on_gpu else 1)
    needs = MemoryNeeds(count * page_bytes(own, kv or dtype, head), count * slot_bytes(own, dtype, head, state),
                        config.max_position_embeddings, options.max_batch, options.max_context, logits,
                        logs, options.prefix_cache, options.asks_for_context, layout=layout and layout.of_shards(count))
    budget = options.memory_bytes
    if budget is None and options.on_gpu:
        card = card or card_memory(options, step_bytes(own, options))
        budget = count * _card_budget(options, card)
        needs = replace(needs, option=card.option)
    budget = budget or free_memory(options.device) // 2
    if vectors and options.memory is None:
        budget = min(budget, enough(needs, options.token_budget))
    memory = _split(budget, needs)
    warnings = memory.warnings
    if drafts and logs and not memory.delta_logs:
        warnings = (*warnings, f"nothing is drafted: {budget >> 20} MiB of cache have no room for state delta logs "
                               f"(raise `{needs.option}`)")
    if options.on_gpu and kv is None and memory.max_context < (options.max_context or config.max_position_embeddings):
        warnings = (*warnings, "`kv_dtype='fp8'` would hold twice the context")
    return (replace(memory, warnings=warnings, notes=_division(memory, needs, card)),
            PoolOptions(memory.delta_logs, head, kv=kv, state=state, layout=memory.layout and layout))


def _division(memory: MemoryPlan, needs: MemoryNeeds, card: CardMemory | None) -> tuple[str, ...]:
    """Describes how the memory is divided, in one line for a GPU and one for the cache."""
    logs, logits = memory.delta_logs * needs.log_bytes, (memory.rows or 0) * needs.row_bytes
    if layout := memory.layout:
        moving, side = memory.pages // layout.pages * layout.size, memory.slots * layout.side
        size = moving + side
        units = (f"{_gib(moving)} for K/V of up to {memory.pages * PAGE:,} tokens or states of up to {memory.slots} "
                 f"running sequences and kept prefixes, {_gib(side)} beside the states")
    else:
        kv, states = memory.pages * needs.page_bytes, memory.slots * needs.slot_bytes
        size, tokens = kv + states, f"{_gib(kv)} K/V of {memory.pages * PAGE:,} tokens, " if needs.page_bytes else ""
        units = (f"{tokens}{_gib(states)} states of {memory.max_batch} running sequences and "
                 f"{memory.slots - memory.max_batch} others")
    parts = (f"cache: {_gib(size + logs + logits)} = {units}, {_gib(logs)} state delta logs, {_gib(logits)} logits of "
             f"prompt ends; up to {memory.max_batch} sequences run, contexts of up to {memory.max_context:,} tokens")
    if card is None:
        return (parts,)
    return (f"GPU memory: {_gib(card.limit)} = {_gib(card.taken)} weights, CUDA and other programs, "
            f"{_gib(card.steps)} work space of steps, {_gib(max(card.left, 0))} cache", parts)


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"


def _split(budget: int, needs: MemoryNeeds) -> MemoryPlan:
    """Splits the budget. Leaves out state delta logs if one would take more than a quarter of it, or leave no room."""
    if needs.log_bytes > budget // 4 or needs.smallest_bytes > budget:
        needs = replace(needs, log_bytes=0)
    return split_memory(budget, needs)


def share_memory(options: EngineConfig) -> tuple[EngineConfig, EngineConfig]:
    """Returns the options of a model and those of its draft model, which gets a quarter of the memory."""
    memory = options.memory_bytes or free_memory(options.device) // 2
    own = {name: value for name, value in option_defaults().items()
           if name.startswith("expert_") or name in ("cache_dir", "cache_disk_gb", "tp")}
    drafting = replace(options, memory=str(memory // 4), speculate="off", **own)
    return replace(options, memory=str(memory - memory // 4)), drafting


def _card_budget(options: EngineConfig, card: CardMemory) -> int:
    """Returns the size of the cache in bytes, after the weights are loaded."""
    if options.gpu_memory is None and options.gpu_memory_utilization is None:
        # some is left for steps even if the weights nearly fill the GPU
        return max(card.left, _least_memory(options)[0] // 4)
    if card.left <= 0:
        given = options.gpu_memory or options.gpu_memory_utilization
        raise ConfigError(
            f"{card.option}={given} leaves no memory for the cache: of {card.limit >> 20} MiB, weights, CUDA and other "
            f"programs take {card.taken >> 20}, and steps work in {card.steps >> 20}; raise it, lower `token_budget`, "
            "take weights of fewer bits (a smaller GGUF file, or `quant`), leave out the vision tower "
            "(`vision=False`) or drafts (`speculate='off'`), or free memory of the GPU", card.option)
    return card.left


def card_memory(options: EngineConfig, steps: int = 0) -> CardMemory:
    """Returns the memory of the options' GPU, or of the fullest of several. Unused blocks that torch caches count as
    free. If `gpu_memory` restricts torch, later allocations outside of torch (`_OUTSIDE`) count as taken."""
    if torch.cuda.is_initialized():
        empty_cache(map(torch.device, options.devices))
    free, total = _least_memory(options)
    limit = options.gpu_memory_bytes or int(total * (options.gpu_memory_utilization or SHARE))
    if options.gpu_memory is None:
        return CardMemory(min(limit, total), total - free, steps, "gpu_memory_utilization")
    return CardMemory(min(limit, total), total - free + _OUTSIDE, steps)


def _least_memory(options: EngineConfig) -> tuple[int, int]:
    """Returns the free and the total bytes of the options' GPU, or of the fullest of several."""
    return min(torch.cuda.mem_get_info(device) for device in options.devices)


def free_on_card(options: EngineConfig) -> int:
    """Returns the bytes that can still be allocated on the options' GPU, or on the fullest of several, within
    `gpu_memory`."""
    free, total = _least_memory(options)
    limit = options.gpu_memory_bytes
    return free if limit is None else max(min(free, limit - (total - free)), 0)


def card_room(options: EngineConfig) -> int:
    """Returns the bytes that models and their caches may still take on a GPU. Raises ConfigError if there are none."""
    return _card_budget(options, card_memory(options))


def expected_card(config: ModelConfig, options: EngineConfig, weights: int) -> CardMemory | None:
    """Returns the memory of the options' GPU as it will be after loading `weights` bytes of weights. None if this
    machine has no GPU and the options give no size."""
    if torch.cuda.is_available():
        card = card_memory(options)
    elif options.gpu_memory_bytes is None:
        return None
    else:
        card = CardMemory(options.gpu_memory_bytes, _CONTEXT + _OUTSIDE, 0)
    return with_steps(replace(card, taken=card.taken + weights), config, options)


def with_steps(card: CardMemory, config: ModelConfig, options: EngineConfig) -> CardMemory:
    """Returns `card` with the work space that steps with these options need."""
    return replace(card, steps=step_bytes(shard_config(config, options.shards), fit_steps(options, card.limit)))


def fit_card(options: EngineConfig) -> EngineConfig:
    """Restricts torch to the options' memory on each GPU, for the whole process. Returns the options, with a smaller
    token budget for a small GPU: there, memory is better used for the cache than as work space of steps."""
    if not options.on_gpu:
        return options
    card = card_memory(options)
    if options.gpu_memory is not None:
        for device in options.devices:
            free, total = torch.cuda.mem_get_info(device)
            others = total - free - torch.cuda.memory_reserved(device) + _OUTSIDE
            if others >= card.limit:
                raise ConfigError(f"gpu_memory={options.gpu_memory} is less than CUDA and other programs take on this "
                                  f"GPU, {others >> 20} MiB: raise it", "gpu_memory")
            torch.cuda.set_per_process_memory_fraction((card.limit - others) / total, torch.device(device).index)
    return fit_steps(options, card.limit)


@contextmanager
def whole_blocks(options: EngineConfig) -> Iterator[None]:
    """Keeps torch from splitting large blocks of a small GPU's memory while weights are read. Otherwise temporary
    tensors and weights share blocks, and the gaps between the weights are too small for steps. Does nothing if the
    environment of the process configures torch's allocator."""
    given = "PYTORCH_CUDA_ALLOC_CONF" in os.environ or "PYTORCH_ALLOC_CONF" in os.environ
    if given or not options.on_gpu or card_memory(options).limit > _SMALL_CARD:
        yield
        return
    # torch has no public function; the second of these warns in versions that have the first
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    change(f"max_split_size_mb:{_WHOLE_BLOCK_MIB}")
    try:
        yield
    finally:
        empty_cache(map(torch.device, options.devices))
        change(f"max_split_size_mb:{_ANY_BLOCK_MIB}")


def fit_steps(options: EngineConfig, limit: int) -> EngineConfig:
    """Returns the options with a smaller token budget if the GPU's memory is small and the budget is the default."""
    if limit > _SMALL_CARD or options.token_budget != GPU_TOKEN_BUDGET:
        return options
    return replace(options, token_budget=_SMALL_CARD_BUDGET)


def step_bytes(config: ModelConfig, options: EngineConfig, unpacks: bool = False) -> int:
    """Returns `working_bytes` of the longest step that the options allow."""
    context = min(options.max_context or _USUAL_CONTEXT, config.max_position_embeddings)
    return working_bytes(config, options.token_budget, unpacks, context)


def working_bytes(config: ModelConfig, tokens: int, unpacks: bool = False, context: int = 0) -> int:
    """Returns an upper bound for the bytes of a step besides weights and cache: inputs and outputs of one layer's
    products (2 bytes per number), the residual (4 bytes), `_KEPT`, and one layer's K/V of a context, gathered (2
    bytes). unpacks: a step dequantizes the experts of one layer."""
    linear, experts = config.linear, config.experts
    mixer = 2 * config.num_attention_heads * config.head_dim + 2 * config.num_key_value_heads * config.head_dim
    if linear:
        keys, values = linear.num_key_heads * linear.key_head_dim, linear.num_value_heads * linear.value_head_dim
        mixer = max(mixer, 2 * keys + 2 * values)
    inner, plain = 3 * config.intermediate_size, 0
    if experts and unpacks:
        plain = scratch_bytes(experts.count + bool(experts.shared_size), experts.size, config.hidden_size)
    if experts:
        inner = (experts.per_token + 1) * (2 * config.hidden_size + 2 * experts.size)
    gathered = context * config.num_key_value_heads * config.head_dim * 2 * 2
    return tokens * (2 * (3 * mixer + inner) + 16 * config.hidden_size) + _KEPT + plain + gathered


def free_memory(device: str) -> int:
    """Returns the number of bytes that can still be allocated on a device."""
    kind = device_kind(device)
    if kind == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(available_memory(), mlx.working_set()) if kind == "mlx" else available_memory()


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory instead of returning it to the system. No effect with other C libraries.

    Otherwise each step would return its larger temporaries and get fresh pages again, which the operating system fills
    with zeros: about a tenth of the time of a long prompt. Blocks above 32 MiB (weights, cache pools) are still mapped
    separately, so that pages of the pools cost memory only after their first use.
    """
    try:
        library = ctypes.CDLL(None)
        mallopt, trim = library.mallopt, library.malloc_trim
    except (OSError, AttributeError):
        return
    trim(0)
    mallopt(_TRIM_THRESHOLD, 1 << 30)
    mallopt(_TOP_PAD, 64 << 20)
    mallopt(_MMAP_THRESHOLD, 32 << 20)
