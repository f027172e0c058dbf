"""How much memory a model's cache may take, and what it is split into."""

from __future__ import annotations

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
"""Of a card's memory, for weights, cache and steps together, where nobody says how much."""
_KEPT = 1 << 30
"""Bytes that products and recorded steps keep for themselves on a card."""


def plan_memory(config: ModelConfig, options: EngineConfig, dtype: torch.dtype,
                head: bool, drafts: bool, vectors: bool = False, defers: bool = False, unpacks: bool = False
                ) -> tuple[MemoryPlan, PoolOptions]:
    """How the cache is split; ConfigError if it holds nothing. dtype: of activations. head: it serves a draft head too.
    drafts, defers: sequences shall have replay rings, for drafts, for updates of states that are deferred. vectors: it
    serves texts that are read once, beside other models, and takes no more than one of full length and a step need.
    unpacks: as of `working_bytes`."""
    kv = FP8 if options.kv_dtype == "fp8" else None
    state: torch.dtype = getattr(torch, options.state_dtype)
    needs = MemoryNeeds(page_bytes(config, kv or dtype, head), slot_bytes(config, dtype, head, state),
                        config.max_position_embeddings, options.max_batch, options.max_context, 4 * config.vocab_size,
                        ahead=options.device != "cpu")
    budget, ring = options.memory_bytes, delta_log_bytes(config, dtype)
    if budget is None:
        assert options.token_budget
        budget = _chosen(config, options, unpacks)
        if vectors:
            budget = min(budget, enough(needs, options.token_budget))
    # rings take a quarter at most: who gets none is served without
    rings = min(options.max_batch, budget // 4 // ring if ring else options.max_batch) if drafts or defers else 0
    memory = split_memory(budget - rings * ring, needs)
    if drafts and not rings:
        log.warning("nothing is drafted: %d MiB of cache have no room for replay rings (raise `memory`)", budget >> 20)
    return memory, PoolOptions(min(rings, memory.max_batch), head, kv=kv, state=state)


def share_memory(options: EngineConfig) -> tuple[EngineConfig, EngineConfig]:
    """The options of a model and of the one that drafts for it, which gets a quarter of the memory."""
    memory = options.memory_bytes or free_memory(options.device) // 2
    own = {name: value for name, value in option_defaults().items()
           if name.startswith("expert_") or name in ("cache_dir", "cache_disk_gb")}
    drafting = replace(options, memory=str(memory // 4), speculate="off", **own)
    return replace(options, memory=str(memory - memory // 4)), drafting


def _chosen(config: ModelConfig, options: EngineConfig, unpacks: bool) -> int:
    """Bytes of the cache where nobody says how many; the weights are there."""
    if options.device == "cpu":
        return free_memory(options.device) // 2
    work = working_bytes(config, options.token_budget, unpacks)
    if options.gpu_memory_utilization is not None:
        return card_share(options.device, options.gpu_memory_utilization, work)
    # of a card that weights nearly fill some is left for steps, too
    return max(_left(options.device, _SHARE, work), free_memory(options.device) // 4)


def card_share(device: str, share: float, work: int = 0) -> int:
    """Bytes that are left of a share of a card's memory, by all who have some of it, and by what steps work in;
    ConfigError if there are none."""
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
    """What a step of so many tokens takes at most beside weights and cache: of a layer what goes into its products and
    comes out of them, in two bytes, the residual in four; and what products and recorded steps keep for themselves.
    unpacks: experts stay quantized, and there is memory for those of one layer as plain numbers."""
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
    """Bytes that can still be allocated there."""
    return torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else available_memory()
