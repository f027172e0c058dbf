"""Pools of several devices: what a shard has, that every operation changes all of them as it changes whole pools, and
that the tiers have whole items, which any number of devices reads."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis.stateful import initialize, run_state_machine_as_test
from support import examples, numbers, odd_shape
from test_cache_frames import RESTLESS, SharedMachine, SharedReuseMachine, toy_shared
from torch import Tensor

from deltic.cache.handles import SequenceCache
from deltic.cache.item_copies import TensorPart, read_state
from deltic.cache.manager import HybridCache
from deltic.cache.offload.disk import DiskStore
from deltic.cache.offload.host import HostStore
from deltic.cache.offload.index import TierIndex
from deltic.cache.offload.types import TierStore
from deltic.cache.operations import CopyPage, CopySlot, FlushDeltaLog, MovePages, Operation, PoolSizes, StoreItem
from deltic.cache.sharded_pools import ShardedPools, allocate_shards, item_parts
from deltic.cache.tensors import CachePools, PoolOptions, delta_log_bytes, frame_layout, page_bytes, slot_bytes
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


@pytest.mark.parametrize("preset", ["qwen3.5-4b", "qwen3.5-27b", "qwen3.5-35b-a3b"])
@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize(("kv", "state"), [(None, F32), (FP8, F32), (None, BF16)])
def test_frames_have_the_same_numbers_on_all_devices(preset: str, count: int, kv: torch.dtype | None,
                                                     state: torch.dtype) -> None:
    """Of a model whose K/V heads divide they are those of one device; else K/V takes more of them."""
    config, extras = ModelConfig.preset(preset), PoolOptions(0, True, kv=kv, state=state)
    own = shard_config(config, count)
    whole, part = frame_layout(config, BF16, extras), frame_layout(own, BF16, extras)
    assert whole and part
    together = part.of_shards(count)
    replicas = max(count // config.num_key_value_heads, 1)
    assert together.size == whole.size and together.slot_step == whole.slot_step
    assert together.page_step == replicas * whole.page_step and 0 <= whole.pages - replicas * together.pages < replicas
    hidden = whole.slot_step * 4 * config.hidden_size
    assert together.side == whole.side + (count - 1) * hidden
    for frame in (0, 1, 7, 1000):
        first = part.first_page(frame)
        assert together.first_page(frame) == first and together.frame_of(first) == part.frame_of(first) == frame
        assert replicas > 1 or whole.first_page(frame) == first
    numbers_of = PoolSizes(40 * part.pages, 9, layout=part).units(), PoolSizes(40 * part.pages, 9,
                                                                                layout=together).units()
    for units in numbers_of:
        taken = [units.take_slot()[0] for _ in range(3)], units.pages.take(2 * part.pages)
        assert taken == ([frame * part.slot_step for frame in range(3)],
                         [part.first_page(frame) + page for frame in (39, 38) for page in range(part.pages)])


@pytest.mark.parametrize("count", [2, 4])
def test_pools_in_frames_change_roles(count: int) -> None:
    """Pages of every frame but the first, then a slot where pages were."""
    config = odd_shape(num_attention_heads=4, num_key_value_heads=4, head_dim=16,
                       linear=LinearConfig(4, 4, 64, 64, 4))
    plain = F32, PoolOptions(3)
    layout = frame_layout(shard_config(config, count), F32, plain[1])
    assert layout and layout.pages > 1
    pools = pools_of(config, count, (F32, PoolOptions(3, layout=layout)), 4 * layout.pages, 3)
    assert pools.sizes.layout == layout.of_shards(count) == frame_layout(config, F32, plain[1])
    assert pools.sizes.bytes == count * (4 * layout.size + 3 * layout.side) and pools.sizes.pages == 4 * layout.pages
    whole = content(config, plain, 2 * PAGE)
    first, far = (layout.first_page(frame) for frame in (1, 3))
    write_slot(pools, config, 0, whole, 1)
    write_page(pools, config, first, whole, slice(0, PAGE))
    write_page(pools, config, first + 1, whole, slice(PAGE, 2 * PAGE))
    pools.apply((MovePages((first, first + 1), (far, far + 1)), CopySlot(0, layout.slot_step)))
    check_page(pools, config, far, whole, slice(0, PAGE))
    check_page(pools, config, far + 1, whole, slice(PAGE, 2 * PAGE))
    for slot in (0, layout.slot_step):
        check_slot(pools, config, slot, whole, 1)


class SeenPools(ShardedPools):
    """As the machines of `test_cache_frames` look at pools: all shards have the same content, or they notice."""

    @property
    def page_tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for shard in self.shards for tensor in shard.page_tensors)

    @property
    def slot_tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for shard in self.shards for tensor in shard.slot_tensors)

    @property
    def recurrent(self) -> Tensor:
        return torch.cat([shard.recurrent for shard in self.shards])

    @property
    def conv(self) -> Tensor:
        return torch.cat([shard.conv for shard in self.shards])


class ForgetsAShard(SeenPools):
    def apply(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            if isinstance(operation, CopyPage):
                self.shards[0].apply((operation,))
            else:
                super().apply((operation,))


def toy_shards(frames: int, kind: type[SeenPools] = SeenPools) -> HybridCache:
    shards = [toy_shared(frames).pools for _ in range(2)]
    assert all(isinstance(shard, CachePools) for shard in shards)
    return HybridCache(kind(tuple(shards), shards[0]))  # type: ignore[arg-type]


@pytest.mark.parametrize("base", [SharedMachine, SharedReuseMachine])
@pytest.mark.parametrize("restless", [True, False])
def test_the_cache_of_shards_equals_a_dictionary(base: Any, restless: bool) -> None:
    class Machine(base):
        looks = 5

        @initialize(pages=st.sampled_from((6, 4, 9, 2)), slots=st.sampled_from((3, 1, 5)))
        def start(self, pages: int, slots: int) -> None:
            with RESTLESS if restless else nullcontext():
                self.cache = toy_shards(pages)

    run_state_machine_as_test(Machine, settings=settings(max_examples=examples(50), stateful_step_count=40))


def test_the_machine_notices_a_shard_that_is_left_out() -> None:
    class Machine(SharedMachine):
        @initialize(pages=st.sampled_from((6, 4, 9)), slots=st.sampled_from((3, 5)))
        def start(self, pages: int, slots: int) -> None:
            self.cache = toy_shards(pages, ForgetsAShard)

    with pytest.raises(AssertionError):
        run_state_machine_as_test(Machine, settings=settings(max_examples=200, stateful_step_count=40,
                                                             report_multiple_bugs=False, phases=(Phase.generate,)))


# Tiers

TOKENS = numbers(3, 75, 500)
DEPTHS = 40, 75


def store_of(name: str, directory: Path) -> TierStore:
    return HostStore(1 << 24) if name == "host" else DiskStore(directory, "model", 1 << 24)


def cache_over(config: ModelConfig, count: int, kind: Kind, store: TierStore, pages: int = 12) -> HybridCache:
    return HybridCache(pools_of(config, count, kind, pages, 8), tiers=[TierIndex(store, threads=False)])


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
    check_prefix(cache, config, whole, sequence)
    return sequence


def check_prefix(cache: HybridCache, config: ModelConfig, whole: dict[str, Tensor], sequence: SequenceCache) -> None:
    pools: Any = cache.pools
    for index, page in enumerate(sequence.pages):
        check_page(pools, config, page, whole, slice(index * PAGE, min((index + 1) * PAGE, sequence.done)))
    check_slot(pools, config, sequence.slot, whole, sequence.done - 1)


@each_kind
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_items_are_read_by_any_number_of_devices(kind: Kind, tier: str, kv_heads: int, tmp_path: Path) -> None:
    """What 1, 2 and 4 devices write are the same items, bit by bit, and each of them reads it."""
    config = shape(kv_heads=kv_heads)
    whole = content(config, kind, len(TOKENS))
    written = list[dict[tuple[str, int], dict[str, Tensor]]]()
    for writes in (1, 2, 4):
        store = store_of(tier, tmp_path / f"{writes}")
        writer = cache_over(config, writes, kind, store)
        write_prefix(writer, config, whole, DEPTHS)
        items = [item for entry in writer.tiers[0]._entries.values() for item in entry.items]
        written.append({(item.kind, item.done): store.read(item) for item in items})
        for reads in (1, 2, 4):
            reader = cache_over(config, reads, kind, store)
            reader.tiers = writer.tiers
            for depth in DEPTHS:
                assert read_prefix(reader, config, whole, depth)
            reader.tiers[0].check()
    assert {*written[0]} == {("kv", 40), ("kv", 75), ("state", 40), ("final", 75)}
    for name, tensors in written[0].items():
        assert tensors["keys" if name[0] == "kv" else "conv"].is_contiguous()
        for other in written[1:]:
            assert other[name].keys() == tensors.keys()
            for part, tensor in tensors.items():
                found = other[name][part]
                assert found.dtype == tensor.dtype and torch.equal(as_bytes(found), as_bytes(tensor)), (name, part)


@each_kind
@pytest.mark.parametrize("spans", [32, 0])
@pytest.mark.parametrize("count", [2, 4])
def test_only_what_is_missing_is_written(kind: Kind, spans: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree has the first pages, which other sequences use; the others lie all over the pool."""
    monkeypatch.setattr("deltic.cache.item_copies._SPANS", spans)
    config = shape()
    whole, other = (content(config, kind, len(TOKENS), seed) for seed in (0, 1))
    writer = cache_over(config, 1, kind, HostStore(1 << 24))
    write_prefix(writer, config, whole, DEPTHS)
    reader = cache_over(config, count, kind, HostStore(1 << 24), 16)
    write_prefix(reader, config, {name: other[name] if name in ("keys", "values") else tensor
                                  for name, tensor in whole.items()}, (40,))
    reader.tiers = writer.tiers
    gaps = [reader.admit() for _ in range(3)]
    for _ in range(3):
        for gap in gaps:
            assert gap and reader.reserve(gap, len(gap.pages) * PAGE + 1)
    assert gaps[0] and gaps[2]
    reader.release(gaps[0])
    reader.release(gaps[2])
    load = reader.start_load([*TOKENS, 7])
    assert load.poll() and load.loaded
    sequence = reader.admit([*TOKENS, 7], load=load)
    assert sequence and sequence.done == 75
    assert any(after != page + 1 for page, after in pairwise(sequence.pages)), "the pages lie side by side"
    reader.operations.flush()
    check_prefix(reader, config, {name: torch.cat((as_bytes(other[name])[:, :32], as_bytes(tensor)[:, 32:]), 1).view(
        tensor.dtype) if name in ("keys", "values") else tensor for name, tensor in whole.items()}, sequence)


def halves(name: str) -> Callable[[dict[str, Tensor]], None]:
    """What a shard of two has."""
    def change(tensors: dict[str, Tensor]) -> None:
        place = {"keys": 2, "values": 2, "recurrent": 1, "conv": 2}[name]
        tensors[name] = tensors[name].chunk(2, place)[0].contiguous()
    return change


def sick(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(-1)[-1] = float("nan")
    return change


def longer(tensors: dict[str, Tensor]) -> None:
    tensors["hidden"] = torch.zeros(1, 1 << 20)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize(("item", "change", "reason"), [
    ("kv", halves("keys"), "its keys are torch.bfloat16"), ("kv", halves("values"), "its values are torch.bfloat16"),
    ("final", halves("recurrent"), "its recurrent are torch.float32"),
    ("final", halves("conv"), "its conv are torch.bfloat16"), ("final", longer, "is larger than"),
    ("kv", sick("values"), "its values are not all finite"),
    ("final", sick("recurrent"), "its recurrent are not all finite"),
    ("final", lambda tensors: tensors.pop("hidden"), "instead of conv, hidden")])
def test_hostile_items_are_refused(item: str, change: Any, reason: str, count: int, tmp_path: Path,
                                   caplog: pytest.LogCaptureFixture) -> None:
    """A shard's part is none of an item, and nothing of what is refused reaches the pools."""
    caplog.set_level(logging.WARNING, "deltic")
    config, kind = shape(), KINDS["bfloat16, tiled, draft head"]
    whole, store = content(config, kind, len(TOKENS)), DiskStore(tmp_path, "model", 1 << 24)
    write_prefix(cache_over(config, 2, kind, store), config, whole, (75,))
    (found,) = (each for each in DiskStore(tmp_path, "model", 1 << 24).scan() if each.kind == item)
    tensors = {name: tensor.clone() for name, tensor in store.read(found).items()}
    change(tensors)
    store.write(found, tensors)
    reader = cache_over(config, count, kind, DiskStore(tmp_path, "model", 1 << 24))
    assert read_prefix(reader, config, whole, 75) is None
    assert reason in caplog.text and not reader.operations.queued
    reader.check()


def test_a_shortage_while_shards_are_joined_harms_nothing(monkeypatch: pytest.MonkeyPatch,
                                                          caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "deltic")
    config, kind = shape(), KINDS["float32"]
    whole, cache = content(config, kind, len(TOKENS)), cache_over(config, 2, kind, HostStore(1 << 24))

    def refuse(*_: Any) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
    with monkeypatch.context() as patched:
        patched.setattr(TensorPart, "put", refuse)
        write_prefix(cache, config, whole, (40,))
    assert not cache.tiers[0].prefixes and "`host_memory`" in caplog.text and not cache.operations.poisoned
    write_prefix(cache, config, whole, (75,))
    assert cache.tiers[0].prefixes == 1
    assert not any(shard.held for shard in cache.pools.shards)  # type: ignore[attr-defined]


def test_dropped_operations_hold_nothing() -> None:
    config, kind = shape(), KINDS["float32"]
    cache = cache_over(config, 2, kind, HostStore(1 << 24))
    item = cache.pools.hold("a prefix")
    shards = cache.pools.shards  # type: ignore[attr-defined]
    assert all(shard.held == {item: "a prefix"} for shard in shards)
    cache.operations.append(StoreItem(item, (), 0))
    cache.operations.discard()
    assert not any(shard.held for shard in shards)


def test_one_part_at_a_time_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the whole tensor, joining takes the memory of one shard's part."""
    config, kind = shape(kv_heads=2), KINDS["float32"]
    pools = pools_of(config, 4, kind)
    write_slot(pools, config, 0, content(config, kind, 1), 0)
    live, put = list[weakref.ref[Tensor]](), TensorPart.put
    names = list[tuple[int, ...]]()

    def watched(part: TensorPart, copy: Tensor, whole: Tensor) -> None:
        assert all(each() is None for each in live), "an earlier part is still there"
        live.append(weakref.ref(copy))
        names.append(part.shape)
        assert 4 * copy.numel() == whole.numel()
        put(part, copy, whole)

    monkeypatch.setattr(TensorPart, "put", watched)
    read_state(pools.shards, 0)
    assert len(live) == 8 and len({*names}) == 2
