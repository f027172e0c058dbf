"""Pools of several devices: what a shard has, that every operation changes all of them as it changes whole pools, and
that the tiers have whole items, which any number of devices reads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from support import examples, odd_shape
from torch import Tensor

from deltic.cache.item_copies import read_state
from deltic.cache.operations import CopyPage, CopySlot, FlushDeltaLog, MovePages
from deltic.cache.sharded_pools import ShardedPools, allocate_shards, item_parts
from deltic.cache.tensors import CachePools, PoolOptions, delta_log_bytes, page_bytes, slot_bytes
from deltic.config import LinearConfig, ModelConfig, shard_config
from deltic.errors import ConfigError
from deltic.ops import backends
from deltic.ops.kv import FP8, INT4, KEY_BITS, VALUE_BITS, as_bytes, pack, rotated, rounded
from deltic.params import PAGE

F32, BF16 = torch.float32, torch.bfloat16
Pools = CachePools | ShardedPools
Kind = tuple[torch.dtype, PoolOptions]
KINDS: dict[str, Kind] = {
    "float32": (F32, PoolOptions(3)),
    "bfloat16, tiled, draft head": (BF16, PoolOptions(3, head=True, tiled=True)),
    "fp8, bfloat16 states": (BF16, PoolOptions(3, tiled=True, kv=FP8, state=BF16)),
    "int4, draft head": (F32, PoolOptions(3, head=True, kv=INT4)),
}
"""The dtype of activations, and the rest."""
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


def shape(heads: int = 8, kv_heads: int = 4, key_heads: int = 4, ratio: int = 3, **changes: Any) -> ModelConfig:
    return odd_shape(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=16, num_mtp_layers=1,
                     linear=LinearConfig(key_heads, ratio * key_heads, 6, 10, 4), **changes)


def pools_of(config: ModelConfig, count: int, kind: Kind, pages: int = 6, slots: int = 5) -> Pools:
    """Pools of so many devices, full of NaN."""
    dtype, extras = kind
    pools = allocate_shards(config, pages, slots, dtype, [backends()["torch"]] * count, ["cpu"] * count, extras)
    for shard in pools.shards:
        for tensor in (*shard.page_tensors, *shard.slot_tensors, *(shard.delta_logs or ())):
            tensor.fill_(0xff if tensor.dtype == INT4 else float("nan"))
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
            case "keys" | "values" if whole.dtype == INT4:
                return self.of_int4(whole, KEY_BITS if name == "keys" else VALUE_BITS)
            case "keys" | "values":
                return as_bytes(whole)[..., self.kv, :].view(whole.dtype)
            case "recurrent":
                return whole[..., self.values, :, :]
            case "conv":
                return whole[..., self.channels]
        return whole

    def of_int4(self, whole: Tensor, bits: int) -> Tensor:
        """A token's bytes: the low bits of all heads, then the fifth bits, then the scales."""
        dim, flat = self.config.head_dim, whole.flatten(-2)
        found, first = [], 0
        for size in (dim // 2, dim // 8 * (bits - 4), 2):
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
        found[name] = (pack(rotated(x.flatten(0, 1)), bits).unflatten(0, heads[:2]) if kv == INT4 else rounded(x, kv))
    if linear:
        layers = len(config.linear_layers)
        found["recurrent"] = randn(layers, units, linear.num_value_heads, linear.key_head_dim,
                                   linear.value_head_dim).to(extras.state)
        found["conv"] = randn(layers, units, linear.conv_kernel, config.conv_dim).to(dtype)
    if extras.head:
        found["hidden"] = randn(1, units, config.hidden_size)
    return found


def write_page(pools: Pools, config: ModelConfig, page: int, whole: dict[str, Tensor], tokens: slice,
               first: int = 0) -> None:
    for shard, heads in heads_of(pools, config):
        for name, pool in shard.named_pages.items():
            part = as_bytes(heads.of(name, whole[name][:, tokens]))
            as_bytes(pool)[:, page, first:first + part.shape[1]] = part


def write_slot(pools: Pools, config: ModelConfig, slot: int, whole: dict[str, Tensor], unit: int) -> None:
    for shard, heads in heads_of(pools, config):
        for name, pool in shard.named_slots.items():
            pool[:, slot] = heads.of(name, whole[name][:, unit])


def check_page(pools: Pools, config: ModelConfig, page: int, whole: dict[str, Tensor], tokens: slice,
               first: int = 0) -> None:
    for shard, heads in heads_of(pools, config):
        for name, pool in shard.named_pages.items():
            part = as_bytes(heads.of(name, whole[name][:, tokens]))
            assert torch.equal(as_bytes(pool)[:, page, first:first + part.shape[1]], part)


def check_slot(pools: Pools, config: ModelConfig, slot: int, whole: dict[str, Tensor], unit: int) -> None:
    for shard, heads in heads_of(pools, config):
        for name, pool in shard.named_slots.items():
            assert torch.equal(pool[:, slot], heads.of(name, whole[name][:, unit]))


def test_heads_that_cannot_be_split_are_refused() -> None:
    for changes, tp, message in (
            ({"heads": 6, "kv_heads": 2}, 4, "tp=4 cannot split this model's 6 attention heads"),
            ({"heads": 12, "kv_heads": 6}, 4, "tp=4 cannot split this model's 6 K/V heads"),
            ({"key_heads": 2}, 4, "tp=4 cannot split this model's 2 key heads")):
        with pytest.raises(ConfigError, match=message) as caught:
            shard_config(shape(**changes), tp)
        assert caught.value.option == "tp"
    own = shard_config(shape(8, 2, 4), 4)
    assert own.linear
    assert (own.num_attention_heads, own.num_key_value_heads, own.linear.num_key_heads,
            own.linear.num_value_heads) == (2, 1, 1, 3)
    recurrent = odd_shape(num_attention_heads=3, num_key_value_heads=3, linear=LinearConfig(4, 4, 6, 10, 4),
                          layer_types=("linear_attention",) * 6)
    assert shard_config(recurrent, 4).num_attention_heads == 3, "attention heads that no layer has are no obstacle"


@st.composite
def splits(draw: st.DrawFn) -> tuple[ModelConfig, int]:
    count = draw(st.sampled_from((2, 4, 8)))
    kv_heads = draw(st.sampled_from((count, 2 * count, 3 * count, count // 2, 1)))
    heads = draw(st.integers(1, 3)) * max(kv_heads, count)
    return shape(heads, kv_heads, count * draw(st.integers(1, 3)), draw(st.integers(1, 4))), count


@settings(max_examples=examples(60), deadline=None)
@given(splits(), st.sampled_from((F32, FP8, INT4)), st.booleans())
def test_parts_are_those_of_the_heads_and_together_the_whole(split: tuple[ModelConfig, int], kv: torch.dtype,
                                                             tiled: bool) -> None:
    config, count = split
    whole = content(config, (F32, PoolOptions(tiled=tiled, kv=kv)), 2)
    joined = {name: torch.full_like(as_bytes(tensor), 77) for name, tensor in whole.items()}
    for index in range(count):
        parts = item_parts(config, count, index, kv, tiled)
        assert parts.keys() == whole.keys()
        heads = Heads(config, count, index, tiled)
        for name, part in parts.items():
            found = part.of(as_bytes(whole[name]))
            assert torch.equal(found, as_bytes(heads.of(name, whole[name])))
            part.put(found, joined[name])
    for name, tensor in whole.items():
        assert torch.equal(joined[name], as_bytes(tensor))


# Operations


@pytest.mark.parametrize(("count", "kv_heads"), [(1, 4), (2, 4), (2, 2), (4, 4), (4, 2), (4, 1)])
@each_kind
def test_operations_change_all_shards(count: int, kv_heads: int, kind: Kind) -> None:
    config = shape(kv_heads=kv_heads)
    pools = pools_of(config, count, kind)
    whole = content(config, kind, 3 * PAGE)
    for page in range(3):
        write_page(pools, config, page, whole, slice(page * PAGE, (page + 1) * PAGE))
        write_slot(pools, config, page, whole, page)
    pools.apply((CopyPage(0, 3), CopySlot(1, 4), CopySlot(2, 1), CopySlot(4, 2)))
    for page in (0, 3):
        check_page(pools, config, page, whole, slice(0, PAGE))
    for slot, unit in ((0, 0), (1, 2), (2, 1), (4, 1)):
        check_slot(pools, config, slot, whole, unit)
    pools.apply((MovePages((1, 2), (5, 1)), MovePages((), ())))
    for page, first in ((5, 1), (1, 2)):
        check_page(pools, config, page, whole, slice(first * PAGE, (first + 1) * PAGE))


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("tiled", [False, True])
def test_delta_logs_are_flushed_on_all_shards(count: int, tiled: bool) -> None:
    """As whole pools flush them, bit by bit."""
    kind = F32, PoolOptions(3, tiled=tiled)
    config = shape()
    single, pools = pools_of(config, 1, kind), pools_of(config, count, kind)
    state = content(config, kind, 1)
    write_slot(single, config, 2, state, 0)
    write_slot(pools, config, 2, state, 0)
    made = torch.Generator().manual_seed(5)
    (one,) = single.shards
    assert one.delta_logs
    for log in one.delta_logs:
        log.copy_(torch.rand(log.shape, generator=made))
    for shard, heads in heads_of(pools, config):
        assert shard.delta_logs
        inputs, keys, updates, decays = one.delta_logs
        split = inputs[..., heads.channels], keys[..., heads.keys, :], updates[..., heads.values, :], decays[
            ..., heads.values]
        for log, part in zip(shard.delta_logs, split, strict=True):
            log.copy_(part)
    flush = FlushDeltaLog(2, 1, 7, 12)
    single.apply((flush,))
    pools.apply((flush,))
    after = read_state((one,), 2)
    assert not torch.equal(after["recurrent"], state["recurrent"][:, 0])
    check_slot(pools, config, 2, {name: tensor[:, None] for name, tensor in after.items()}, 0)
    found = read_state(pools.shards, 2)
    assert all(torch.equal(found[name], tensor) for name, tensor in after.items())


@pytest.mark.parametrize("name", ["keys", "values", "recurrent", "conv", "hidden"])
def test_a_sick_number_on_any_shard_is_seen(name: str) -> None:
    kind = KINDS["bfloat16, tiled, draft head"]
    config = shape()
    pools = pools_of(config, 2, kind)
    whole = content(config, kind, PAGE)
    for shard in pools.shards:
        write_page(pools, config, 1, whole, slice(0, PAGE))
        write_slot(pools, config, 1, whole, 0)
        assert pools.sound((1,), (1,), PAGE)
        tensor = {**shard.named_pages, **shard.named_slots}[name]
        tensor[0, 1].view(-1)[-1] = float("nan")
        assert not pools.sound((1,), (1,), PAGE)
        assert name not in ("keys", "values") or pools.sound((1,), (1,), PAGE - 1)


def test_what_steps_left_is_written_first() -> None:
    pools = pools_of(shape(), 2, KINDS["float32"])
    assert isinstance(pools, ShardedPools)
    order = list[str]()
    pools.backlogs.append(lambda: order.append("backlog"))
    pools.shards[0].backlogs.append(lambda: order.append("first shard"))
    pools.apply((CopySlot(0, 1),))
    assert order == ["backlog", "first shard"]
    pools.sound((0,), (0,), 1)
    assert order == ["backlog", "first shard"] * 2


# Sizes


@each_kind
@pytest.mark.parametrize("count", [2, 4])
def test_sizes_are_of_all_shards(count: int, kind: Kind) -> None:
    config, (dtype, extras) = shape(), kind
    single, pools = pools_of(config, 1, kind), pools_of(config, count, kind)
    assert pools.last_page == single.last_page == 5 and pools.device == torch.device("cpu")
    own, hidden = shard_config(config, count), 4 * config.hidden_size * extras.head
    assert pools.sizes == replace(single.sizes, slot_bytes=single.sizes.slot_bytes + (count - 1) * hidden)
    assert count * page_bytes(own, extras.kv or dtype, extras.head) == PAGE * pools.sizes.token_bytes
    assert count * slot_bytes(own, dtype, extras.head, extras.state) == pools.sizes.slot_bytes
    assert count * delta_log_bytes(own, dtype) == delta_log_bytes(config, dtype)
