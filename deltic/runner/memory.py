"""The memory of a model's cache: how much it may take, and how it is split."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import replace

import torch

from deltic.cache.memory_plan import MemoryNeeds, MemoryPlan, enough, split_memory
from deltic.cache.tensors import PoolOptions, delta_log_bytes, page_bytes, slot_bytes
from deltic.config import EngineConfig, ModelConfig, available_memory
from deltic.config.engine import option_defaults
from deltic.errors import ConfigError
from deltic.ops.cuda.quantized_moe import scratch_bytes
from deltic.ops.kv import FP8

log = logging.getLogger("deltic")

_SHARE = 0.9
"""Default fraction of a GPU's memory for weights, cache and steps together."""
_KEPT = 1 << 30
"""Bytes that products and recorded steps keep for themselves on a card."""
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""glibc's numbers of options for mallopt."""


def plan_memory(config: ModelConfig, options: EngineConfig, dtype: torch.dtype,
                head: bool, drafts: bool, vectors: bool = False, defers: bool = False, unpacks: bool = False
                ) -> tuple[MemoryPlan, PoolOptions]:
    """Splits the cache's memory. Raises ConfigError if it holds nothing. dtype: of activations. head: there is a draft
    head. drafts, defers: sequences need delta logs, for drafts or for deferred state writes. vectors: the model makes
    embeddings beside other models, so the cache takes no more than one text of full length and a step need. unpacks: as
    in `working_bytes`."""
    kv = FP8 if options.kv_dtype == "fp8" else None
    state: torch.dtype = getattr(torch, options.state_dtype)
    logs = delta_log_bytes(config, dtype) if drafts or defers else 0
    needs = MemoryNeeds(page_bytes(config, kv or dtype, head), slot_bytes(config, dtype, head, state),
                        config.max_position_embeddings, options.max_batch, options.max_context, 4 * config.vocab_size,
                        logs, options.prefix_cache)
    budget = options.memory_bytes
    if budget is None:
        assert options.token_budget
        budget = _chosen(config, options, unpacks)
        if vectors:
            budget = min(budget, enough(needs, options.token_budget))
    memory = _split(budget, needs)
    if drafts and logs and not memory.delta_logs:
        log.warning("nothing is drafted: %d MiB of cache have no room for state delta logs (raise `memory`)",
                    budget >> 20)
    return memory, PoolOptions(memory.delta_logs, head, kv=kv, state=state)


def _split(budget: int, needs: MemoryNeeds) -> MemoryPlan:
    """Splits the budget; without state delta logs if one would take more than a quarter of it, or leave no room."""
    if needs.log_bytes > budget // 4 or needs.smallest_bytes > budget:
        needs = replace(needs, log_bytes=0)
    return split_memory(budget, needs)


def share_memory(options: EngineConfig) -> tuple[EngineConfig, EngineConfig]:
    """Splits the options of a model from those of its draft model, which gets a quarter of the memory."""
    memory = options.memory_bytes or free_memory(options.device) // 2
    own = {name: value for name, value in option_defaults().items()
           if name.startswith("expert_") or name in ("cache_dir", "cache_disk_gb")}
    drafting = replace(options, memory=str(memory // 4), speculate="off", **own)
    return replace(options, memory=str(memory - memory // 4)), drafting


def _chosen(config: ModelConfig, options: EngineConfig, unpacks: bool) -> int:
    """The default size of the cache in bytes, once the weights are loaded."""
    if not options.on_gpu:
        return free_memory(options.device) // 2
    work = working_bytes(config, options.token_budget, unpacks)
    if options.gpu_memory_utilization is not None:
        return card_share(options.device, options.gpu_memory_utilization, work)
    # some is left for steps even if the weights nearly fill the GPU
    return max(_left(options.device, _SHARE, work), free_memory(options.device) // 4)


def card_share(device: str, share: float, work: int = 0) -> int:
    """The free bytes of a fraction of a GPU's memory, without those that steps work in. Raises ConfigError if there are
    none."""
    left = _left(device, share, work)
    if left <= 0:
        free, total = torch.cuda.mem_get_info(device)
        raise ConfigError(
            f"gpu_memory_utilization={share} leaves no memory: of {total >> 20} MiB of the GPU {total - free >> 20} "
            f"are taken, and steps work in {work >> 20}; raise it, lower token_budget, or free memory of the GPU",
            "gpu_memory_utilization")
    return left


def _left(device: str, share: float, work: int) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return int(total * share) - (total - free) - work


def working_bytes(config: ModelConfig, tokens: int, unpacks: bool = False) -> int:
    """Upper bound for the bytes of a step besides weights and cache: inputs and outputs of one layer's products in two
    bytes, the residual in four, and what products and recorded steps keep. unpacks: the experts of one layer are
    dequantized in a step."""
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
    return tokens * (2 * (3 * mixer + inner) + 16 * config.hidden_size) + _KEPT + plain


def free_memory(device: str) -> int:
    """Bytes that can still be allocated on a device."""
    return torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else available_memory()


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory instead of returning it to the system. No effect with other C libraries.

    Otherwise each step would return its larger temporaries and get fresh pages again, which the kernel fills with
    zeros: about a tenth of the time of a long prompt. Blocks above 32 MiB (weights, cache pools) are still mapped one
    by one, so that pages of the pools cost memory only once they are used.
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
