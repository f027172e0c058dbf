"""Pools of several devices, what each device has of random content, and prefixes that go through tiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support import numbers, odd_shape
from torch import Tensor

from deltic.cache.handles import SequenceCache
from deltic.cache.manager import HybridCache
from deltic.cache.offload.disk import DiskStore
from deltic.cache.offload.host import HostStore
from deltic.cache.offload.index import TierIndex
from deltic.cache.offload.types import TierStore
from deltic.cache.sharded_pools import ShardedPools, allocate_shards
from deltic.cache.tensors import CachePools, PoolOptions
from deltic.config import LinearConfig, ModelConfig
from deltic.ops import backends
from deltic.ops.kv import FP8, INT4, INT8, KEY_BITS, PACKED, VALUE_BITS, as_bytes, pack, pack_int8, rotated, rounded
from deltic.params import PAGE

F32, BF16 = torch.float32, torch.bfloat16
Pools = CachePools | ShardedPools
Kind = tuple[torch.dtype, PoolOptions]
KINDS: dict[str, Kind] = {
    "float32": (F32, PoolOptions(3)),
    "bfloat16, tiled, draft head": (BF16, PoolOptions(3, head=True, tiled=True)),
    "fp8, bfloat16 states": (BF16, PoolOptions(3, tiled=True, kv=FP8, state=BF16)),
    "int4, draft head": (F32, PoolOptions(3, head=True, kv=INT4)),
    "int8": (F32, PoolOptions(3, kv=INT8)),
}
"""The dtype of activations, and the rest."""
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


def shape(heads: int = 8, kv_heads: int = 4, key_heads: int = 4, ratio: int = 3, **changes: Any) -> ModelConfig:
    return odd_shape(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=16, num_mtp_layers=1,
                     linear=LinearConfig(key_heads, ratio * key_heads, 6, 10, 4), **changes)


def pools_of(config: ModelConfig, devices: int | Sequence[str], kind: Kind, pages: int = 6, slots: int = 5) -> Pools:
    """Pools of these devices, or of so many CPUs, full of NaN."""
    dtype, extras = kind
    devices = ["cpu"] * devices if isinstance(devices, int) else devices
    pools = allocate_shards(config, pages, slots, dtype, [backends()["torch"]] * len(devices), devices, extras)
    for shard in pools.shards:
        for tensor in (*shard.page_tensors, *shard.slot_tensors, *(shard.delta_logs or ())):
            tensor.view(torch.uint8).fill_(0xff) if tensor.dtype in PACKED else tensor.fill_(float("nan"))
    return pools


# What a shard has, head by head


@dataclass(frozen=True)
class Heads:
    """The heads of a shard, by the definition: it has some query heads and key heads, and what belongs to them."""

    config: ModelConfig
    count: int
    index: int
    tiled: bool

    def own(self, total: int) -> list[int]:
        return [head for head in range(total) if head * self.count // total == self.index]

    @property
    def kv(self) -> list[int]:
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        return sorted({head // group for head in self.own(self.config.num_attention_heads)})

    @property
    def keys(self) -> list[int]:
        assert self.config.linear
        return self.own(self.config.linear.num_key_heads)

    @property
    def values(self) -> list[int]:
        linear = self.config.linear
        assert linear
        group = linear.num_value_heads // linear.num_key_heads
        return [head for head in range(linear.num_value_heads)
                if (head % linear.num_key_heads if self.tiled else head // group) in self.keys]

    @property
    def channels(self) -> list[int]:
        linear = self.config.linear
        assert linear
        found = []
        for first, heads, dim in ((0, self.keys, linear.key_head_dim),
                                  (linear.key_dim, self.keys, linear.key_head_dim),
                                  (2 * linear.key_dim, self.values, linear.value_head_dim)):
            found += [first + head * dim + place for head in heads for place in range(dim)]
        return found

    def of(self, name: str, whole: Tensor) -> Tensor:
        """The shard's part of a whole tensor: K/V [..., kv_heads, width], recurrent [..., Hv, Dk, Dv], conv or a
        delta log's inputs [..., C]."""
        match name:
            case "keys" | "values" if whole.dtype in PACKED:
                bits, dim = KEY_BITS if name == "keys" else VALUE_BITS, self.config.head_dim
                sizes = (dim, 4) if whole.dtype == INT8 else (dim // 2, dim // 8 * (bits - 4), 2)
                return self.of_sections(whole, sizes)
            case "keys" | "values":
                return as_bytes(whole)[..., self.kv, :].view(whole.dtype)
            case "recurrent":
                return whole[..., self.values, :, :]
            case "conv":
                return whole[..., self.channels]
        return whole

    def of_sections(self, whole: Tensor, sizes: Sequence[int]) -> Tensor:
        """A token's bytes: those of all heads in each section. int4 has low bits, fifth bits and scales, int8 has codes
        and scales."""
        flat = whole.flatten(-2)
        found, first = [], 0
        for size in sizes:
            found += [flat[..., first + head * size:first + (head + 1) * size] for head in self.kv]
            first += size * self.config.num_key_value_heads
        return torch.cat(found, -1).unflatten(-1, (len(self.kv), -1))


def heads_of(pools: Pools, config: ModelConfig) -> list[tuple[CachePools, Heads]]:
    count = len(pools.shards)
    return [(shard, Heads(config, count, index, shard.tiled)) for index, shard in enumerate(pools.shards)]


def content(config: ModelConfig, kind: Kind, units: int, seed: int = 0) -> dict[str, Tensor]:
    """Random K/V of tokens and random states, whole: [layers, units, ...] each."""
    dtype, extras = kind
    kv, linear = extras.kv or dtype, config.linear
    made = torch.Generator().manual_seed(seed)

    def randn(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=made)

    found = dict[str, Tensor]()
    heads = len(config.attention_layers) + extras.head, units, config.num_key_value_heads, config.head_dim
    for name, bits in (("keys", KEY_BITS), ("values", VALUE_BITS)):
        x = randn(*heads)
        packed = {INT4: lambda x, bits: pack(rotated(x), bits), INT8: lambda x, bits: pack_int8(x)}.get(kv)
        found[name] = packed(x.flatten(0, 1), bits).unflatten(0, heads[:2]) if packed else rounded(x, kv)
    if linear:
        layers = len(config.linear_layers)
        found["recurrent"] = randn(layers, units, linear.num_value_heads, linear.key_head_dim,
                                   linear.value_head_dim).to(extras.state)
        found["conv"] = randn(layers, units, linear.conv_kernel, config.conv_dim).to(dtype)
    if extras.head:
        found["hidden"] = randn(1, units, config.hidden_size)
    return found


def write_page(pools: Pools, config: ModelConfig, page: int, whole: dict[str, Tensor], tokens: slice) -> None:
    for shard, heads in heads_of(pools, config):
        for name, pool in shard.named_pages.items():
            part = as_bytes(heads.of(name, whole[name][:, tokens]))
            as_bytes(pool)[:, page, :part.shape[1]] = part.to(pool.device)


def write_slot(pools: Pools, config: ModelConfig, slot: int, whole: dict[str, Tensor], unit: int) -> None:
    for shard, heads in heads_of(pools, config):
        for name, pool in shard.named_slots.items():
            pool[:, slot] = heads.of(name, whole[name][:, unit]).to(pool.device)


def check_page(pools: Pools, config: ModelConfig, page: int, whole: dict[str, Tensor], tokens: slice) -> None:
    for shard, heads in heads_of(pools, config):
        for name, pool in shard.named_pages.items():
            part = as_bytes(heads.of(name, whole[name][:, tokens]))
            assert torch.equal(as_bytes(pool)[:, page, :part.shape[1]].cpu(), part)


def check_slot(pools: Pools, config: ModelConfig, slot: int, whole: dict[str, Tensor], unit: int) -> None:
    for shard, heads in heads_of(pools, config):
        for name, pool in shard.named_slots.items():
            assert torch.equal(pool[:, slot].cpu(), heads.of(name, whole[name][:, unit]))


# Tiers

TOKENS = numbers(3, 75, 500)
DEPTHS = 40, 75


def store_of(name: str, directory: Path) -> TierStore:
    return HostStore(1 << 24) if name == "host" else DiskStore(directory, "model", 1 << 24)


def cache_over(config: ModelConfig, devices: int | Sequence[str], kind: Kind, tier: TierStore | TierIndex,
               pages: int = 12) -> HybridCache:
    """A cache of these devices, or of so many CPUs, with this tier."""
    index = tier if isinstance(tier, TierIndex) else TierIndex(tier, threads=False)
    return HybridCache(pools_of(config, devices, kind, pages, 8), tiers=[index])


def write_prefix(cache: HybridCache, config: ModelConfig, whole: dict[str, Tensor], depths: Sequence[int]) -> None:
    """As steps do: K/V of all tokens, and states at some depths; the last one has logits."""
    sequence = cache.admit()
    assert sequence
    sequence.keys = [*TOKENS[:depths[-1]]]
    assert cache.reserve(sequence, depths[-1]) == depths[-1]
    pools: Any = cache.pools
    for index, page in enumerate(sequence.pages):
        tokens = slice(index * PAGE, min((index + 1) * PAGE, depths[-1]))
        write_page(pools, config, page, whole, tokens)
    for depth in depths:
        slot = cache.reserve_checkpoint(sequence, depth)
        assert slot is not None
        write_slot(pools, config, slot, whole, depth - 1)
    cache.commit(sequence, depths[-1])
    cache.commit_checkpoints(sequence, logits_of(config))
    cache.release(sequence)
    cache.operations.flush()
    cache.check()


def logits_of(config: ModelConfig) -> Tensor:
    return torch.arange(config.vocab_size, dtype=F32)


def read_prefix(cache: HybridCache, config: ModelConfig, whole: dict[str, Tensor], depth: int) -> SequenceCache | None:
    """Admits a sequence with what the tiers have; None if they have nothing."""
    prompt = [*TOKENS[:depth], 7, 7]
    load = cache.start_load(prompt)
    assert load.poll()
    if load.loaded is None:
        return None
    sequence = cache.admit(prompt, load=load)
    assert sequence and sequence.done == depth and cache.pages.alone(sequence.pages[depth // PAGE:])
    cache.operations.flush()
    pools: Any = cache.pools
    pools.wait()  # on a GPU K/V may still be on their way
    check_prefix(cache, config, whole, sequence)
    return sequence


def check_prefix(cache: HybridCache, config: ModelConfig, whole: dict[str, Tensor], sequence: SequenceCache) -> None:
    pools: Any = cache.pools
    for index, page in enumerate(sequence.pages):
        check_page(pools, config, page, whole, slice(index * PAGE, min((index + 1) * PAGE, sequence.done)))
    check_slot(pools, config, sequence.slot, whole, sequence.done - 1)


def resumed(reader: HybridCache) -> SequenceCache:
    """A sequence on the loaded prefix TOKENS, in pages that are not neighbours."""
    load = reader.start_load([*TOKENS, 7])
    assert load.poll() and load.loaded
    sequence = reader.admit([*TOKENS, 7], load=load)
    assert sequence and sequence.done == len(TOKENS)
    assert any(after != page + 1 for page, after in pairwise(sequence.pages)), "the pages lie side by side"
    return sequence
