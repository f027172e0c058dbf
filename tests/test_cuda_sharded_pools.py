"""On GPUs: pools of several devices are joined to the items that a CPU writes, and read them. A single GPU plays all
devices."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from sharded_cases import (
    DEPTHS,
    TOKENS,
    Kind,
    cache_over,
    check_page,
    check_prefix,
    content,
    each_kind,
    heads_of,
    pools_of,
    read_prefix,
    shape,
    write_page,
    write_prefix,
    write_slot,
)

from deltic.cache.offload.host import DeviceToHostCopy, HostStore, PinnedMemory
from deltic.cache.offload.index import TierIndex
from deltic.cache.operations import CopyPage, CopySlot, MovePages
from deltic.ops.kv import as_bytes
from deltic.params import PAGE

if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)


def gpus(count: int) -> list[str]:
    return [f"cuda:{index % torch.cuda.device_count()}" for index in range(count)]


def host_tier(pinned: bool) -> TierIndex:
    memory = PinnedMemory(1 << 26) if pinned else None
    return TierIndex(HostStore(1 << 26), threads=True, copier=DeviceToHostCopy(memory))


def settled(tier: TierIndex) -> TierIndex:
    while tier._pending:
        tier._pending[0].future.result(60)
        tier._settle()
    tier.check()
    return tier


@each_kind
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_items_are_those_of_a_cpu(kind: Kind, pinned: bool, kv_heads: int) -> None:
    """Bit by bit, written by 1, 2 and 4 GPUs and read by as many others."""
    config = shape(kv_heads=kv_heads)
    whole = content(config, kind, len(TOKENS))
    plain = cache_over(config, 1, kind, HostStore(1 << 26))
    write_prefix(plain, config, whole, DEPTHS)
    items = [item for entry in plain.tiers[0]._entries.values() for item in entry.items]
    for writes in (1, 2, 4):
        writer = cache_over(config, gpus(writes), kind, host_tier(pinned))
        write_prefix(writer, config, whole, DEPTHS)
        tier = settled(writer.tiers[0])
        for item in items:
            found = tier.store.read(item)
            for name, tensor in plain.tiers[0].store.read(item).items():
                assert found[name].device.type == "cpu" and found[name].dtype == tensor.dtype
                assert torch.equal(as_bytes(found[name]), as_bytes(tensor)), (writes, item.kind, name)
        for reads in (1, 2, 4):
            reader = cache_over(config, gpus(reads), kind, tier)
            for depth in DEPTHS:
                assert read_prefix(reader, config, whole, depth)


@each_kind
@pytest.mark.parametrize("spans", [32, 0])
@pytest.mark.parametrize("count", [2, 4])
def test_each_device_waits_for_its_own_copies(kind: Kind, spans: int, count: int, monkeypatch: pytest.MonkeyPatch
                                              ) -> None:
    """Copies of a tier's K/V go on beside steps; a page that is copied meanwhile, and another tier's prefix, follow."""
    monkeypatch.setattr("deltic.cache.item_copies._SPANS", spans)
    config = shape()
    whole = content(config, kind, len(TOKENS))
    writer = cache_over(config, 1, kind, HostStore(1 << 26))
    write_prefix(writer, config, whole, DEPTHS)
    reader = cache_over(config, gpus(count), kind, writer.tiers[0], 24)
    gaps = [reader.admit() for _ in range(2)]
    for index in range(6):  # every other page is free then
        gap = gaps[index % 2]
        assert gap and reader.reserve(gap, len(gap.pages) * PAGE + 1)
    assert gaps[0]
    reader.release(gaps[0])
    load = reader.start_load([*TOKENS, 7])
    assert load.poll() and load.loaded
    sequence = reader.admit([*TOKENS, 7], load=load)
    assert sequence and sequence.done == 75
    assert any(after != page + 1 for page, after in pairwise(sequence.pages)), "the pages lie side by side"
    fork = reader.fork(sequence)
    assert fork and fork.pages[-1] != sequence.pages[-1]
    reader.operations.flush()
    pools = reader.pools
    assert all(any(shard.arriving.values()) for shard in pools.shards)  # type: ignore[attr-defined]
    pools.wait()  # type: ignore[attr-defined]
    assert not any(any(shard.arriving.values()) for shard in pools.shards)  # type: ignore[attr-defined]
    for each in (sequence, fork):
        check_prefix(reader, config, whole, each)
    assert pools.sound((sequence.slot,), sequence.pages, 75)


@each_kind
def test_operations_change_all_devices(kind: Kind) -> None:
    config = shape()
    pools = pools_of(config, gpus(2), kind)
    whole = content(config, kind, 2 * PAGE)
    for page in range(2):
        write_page(pools, config, page, whole, slice(page * PAGE, (page + 1) * PAGE))
    write_slot(pools, config, 0, whole, 0)
    before = torch.cuda.current_device()
    pools.apply((CopyPage(0, 3), CopySlot(0, 4), MovePages((0, 1), (5, 4))))
    assert torch.cuda.current_device() == before
    for page, first in ((3, 0), (5, 0), (4, 1)):
        check_page(pools, config, page, whole, slice(first * PAGE, (first + 1) * PAGE))
    assert pools.sound((0, 4), (3,), PAGE)
    for shard, _ in heads_of(pools, config):
        kept = shard.recurrent[0, 4, 0, 0, 0].clone()
        shard.recurrent[0, 4, 0, 0, 0] = float("nan")
        assert not pools.sound((0, 4), (3,), PAGE)
        shard.recurrent[0, 4, 0, 0, 0] = kept
