"""Pools of several devices: what each has, and that operations change all of them as they change whole pools."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis.stateful import initialize, run_state_machine_as_test
from sharded_cases import (
    BF16,
    F32,
    KINDS,
    Heads,
    Kind,
    check_page,
    check_slot,
    content,
    each_kind,
    heads_of,
    pools_of,
    shape,
    write_page,
    write_slot,
)
from support import examples, odd_shape
from test_cache_frames import RESTLESS, SharedMachine, SharedReuseMachine, toy_shared
from torch import Tensor

from deltic.cache.item_copies import read_state
from deltic.cache.manager import HybridCache
from deltic.cache.operations import CopyPage, CopySlot, FlushDeltaLog, MovePages, Operation, PoolSizes, StoreItem
from deltic.cache.sharded_pools import ShardedPools, allocate_shards, item_parts
from deltic.cache.tensors import CachePools, PoolOptions, delta_log_bytes, frame_layout, page_bytes, slot_bytes
from deltic.config import EngineConfig, LinearConfig, ModelConfig, shard_config
from deltic.errors import ConfigError
from deltic.ops import backends
from deltic.ops.kv import FP8, INT4, INT8, as_bytes
from deltic.params import PAGE
from deltic.runner.memory import plan_memory


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
@given(splits(), st.sampled_from((F32, FP8, INT8, INT4)), st.booleans())
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
        assert (shard.hidden is None) == (shard is not pools.shards[0])
        write_page(pools, config, 1, whole, slice(0, PAGE))
        write_slot(pools, config, 1, whole, 0)
        assert pools.sound((1,), (1,), PAGE)
        tensor = {**shard.named_pages, **shard.named_slots}.get(name)
        if tensor is None:
            assert name == "hidden" and shard is not pools.shards[0]
            continue
        tensor[0, 1].view(-1)[-1] = float("nan")
        assert not pools.sound((1,), (1,), PAGE)
        assert name not in ("keys", "values") or pools.sound((1,), (1,), PAGE - 1)


def test_what_steps_left_is_written_first() -> None:
    pools = pools_of(shape(), 2, KINDS["float32"])
    assert isinstance(pools, ShardedPools)
    order = list[str]()
    pools.backlogs.append(lambda: lambda: order.append("backlog"))
    pools.shards[0].backlogs.append(lambda: lambda: order.append("first shard"))
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
    assert pools.sizes == single.sizes
    assert count * page_bytes(own, extras.kv or dtype, extras.head) == PAGE * pools.sizes.token_bytes
    assert count * slot_bytes(own, dtype, extras.head, extras.state) == pools.sizes.slot_bytes + (count - 1) * hidden
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


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_plan_for_one_device_is_a_plan_for_all(count: int, kv_heads: int) -> None:
    """The memory of a device, planned for its part of the model, holds what the plan promises, on every device."""
    config = odd_shape(num_attention_heads=4, num_key_value_heads=kv_heads, head_dim=16,
                       linear=LinearConfig(4, 4, 64, 64, 4))
    options = EngineConfig(memory="3MiB", dtype="float32", max_batch=8, max_context=300, device="cpu")
    memory, extras = plan_memory(shard_config(config, count), options, F32, False, True)
    assert memory.layout and memory.delta_logs and not memory.warnings
    pools = allocate_shards(config, memory.pages, memory.slots, F32, [backends()["torch"]] * count, ["cpu"] * count,
                            extras)
    assert isinstance(pools, ShardedPools)
    logs = memory.delta_logs * delta_log_bytes(shard_config(config, count), F32)
    assert 2 << 20 < pools.sizes.bytes // count + logs <= 3 << 20
    assert (pools.sizes.pages, pools.sizes.slots, pools.sizes.delta_logs) == (memory.pages, memory.slots,
                                                                              memory.delta_logs)
    cache = HybridCache(pools)
    sequences = [cache.admit([1], 1) for _ in range(memory.max_batch)]
    for sequence in sequences:
        assert sequence and cache.reserve(sequence, 1) == 1
        cache.release(sequence)
    whole = cache.admit([1], memory.max_context)
    assert whole and memory.max_context == 300 and cache.reserve(whole, 300) == 300
    cache.check()


def test_a_device_that_fails_poisons_the_whole_cache() -> None:
    """No device goes on with memory that another one does not have."""
    def fail(*_: Any) -> None:
        raise RuntimeError("an illegal address")

    config, kind = shape(), KINDS["float32"]
    pools = pools_of(config, 2, kind)
    shards = pools.shards
    broken = replace(shards[1], ops=replace(shards[1].ops, copy_slots=fail))
    assert isinstance(pools, ShardedPools)
    cache = HybridCache(replace(pools, shards=(shards[0], broken)))
    item = cache.pools.hold("a prefix")
    cache.operations.append(CopySlot(0, 1))
    cache.operations.append(StoreItem(item, (), 0))
    with pytest.raises(RuntimeError, match="illegal address"):
        cache.operations.flush()
    assert cache.operations.poisoned and not shards[0].held and not broken.held


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
