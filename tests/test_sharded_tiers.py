"""Items of the tiers are whole: any number of devices reads what any number of devices has written."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_cases import (
    DEPTHS,
    KINDS,
    TOKENS,
    Kind,
    cache_over,
    check_prefix,
    content,
    each_kind,
    pools_of,
    read_prefix,
    resumed,
    shape,
    store_of,
    write_page,
    write_prefix,
    write_slot,
)
from torch import Tensor

from deltic.cache.item_copies import TensorPart, _read_kv, read_state
from deltic.cache.offload.disk import DiskStore
from deltic.cache.offload.host import HostStore
from deltic.cache.operations import StoreItem
from deltic.ops.kv import as_bytes
from deltic.params import PAGE


@pytest.mark.covering
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
            # another process finds the items on disk
            again = store_of(tier, tmp_path / f"{writes}") if tier == "disk" else writer.tiers[0]
            reader = cache_over(config, reads, kind, again)
            for depth in DEPTHS:
                assert read_prefix(reader, config, whole, depth)
            reader.tiers[0].check()
    assert {*written[0]} == {("kv", 40), ("kv", 75), ("state", 40), ("final", 75)}
    for name, tensors in written[0].items():
        assert all(tensor.is_contiguous() for tensor in tensors.values())
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
    sequence = resumed(reader)
    reader.operations.flush()
    check_prefix(reader, config, {name: torch.cat((as_bytes(other[name])[:, :32], as_bytes(tensor)[:, 32:]), 1).view(
        tensor.dtype) if name in ("keys", "values") else tensor for name, tensor in whole.items()}, sequence)


def halves(name: str) -> Callable[[dict[str, Tensor]], None]:
    """Keeps the part of one of two shards."""
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
    ("final", halves("conv"), "its conv are torch.bfloat16"), ("final", longer, "and at most 19,092 can be right"),
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
    """Beside the whole tensor, joining takes the memory of one shard's part; a replica is not copied."""
    config, kind = shape(kv_heads=2), KINDS["float32"]
    pools = pools_of(config, 4, kind)
    whole = content(config, kind, PAGE)
    write_slot(pools, config, 0, whole, 0)
    write_page(pools, config, 0, whole, slice(0, PAGE))
    parts, shapes = list[weakref.ref[Tensor]](), list[tuple[int, ...]]()
    put, clone, select = TensorPart.put, Tensor.clone, Tensor.index_select

    def watched(part: TensorPart, copy: Tensor, whole: Tensor) -> None:
        parts.append(weakref.ref(copy))
        shapes.append(part.shape)
        put(part, copy, whole)

    def alone(read: Any) -> Any:
        def reading(*given: Any) -> Tensor:
            assert all(each() is None for each in parts), "an earlier part is still there"
            found: Tensor = read(*given)
            return found
        return reading

    monkeypatch.setattr(TensorPart, "put", watched)
    monkeypatch.setattr(Tensor, "clone", alone(clone))
    monkeypatch.setattr(Tensor, "index_select", alone(select))
    read_state(pools.shards, 0)
    assert shapes == [(12, 6, 10)] * 4 + [(config.conv_dim,)] * 4
    _read_kv(pools.shards, [0], 0, PAGE)
    assert shapes[8:] == [(2, 16)] * 4, "of keys and of values two parts"
