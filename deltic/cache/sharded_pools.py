"""The pools of a model that several devices share: each device has a part of every page and slot, under one account.

Pages, slots and delta logs have the same numbers on all devices. A shard stores the K/V heads, key heads and value
heads of its layers and the convolution channels of these heads, in the order q, k, v. A K/V head that several shards
need is on each of them. Every GPU stores the hidden states for a draft head; of the virtual devices of a CPU, only the
first does. Items of the tiers are whole (`item_copies`), so any number of devices reads what any other has written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch

from deltic.cache.item_copies import TensorPart, store_prefix
from deltic.cache.offload.item_validator import PoolItemValidator
from deltic.cache.operations import Operation, PoolSizes, StoreItem
from deltic.cache.tensors import PLAIN, CachePools, PoolOptions, allocate
from deltic.config import ModelConfig, shard_config
from deltic.ops import Ops
from deltic.ops.kv import INT4, INT8, KEY_BITS, VALUE_BITS, width

_Ranges = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class ShardedPools:
    """The pools of all devices.

    shards: the pools of each device, which its layers read and write.
    item: pools of one page and one slot on the meta device (no memory), in the shapes of whole items.
    backlogs: as in `CachePools`, for all shards.
    """

    shards: tuple[CachePools, ...]
    item: CachePools
    backlogs: list[Callable[[], Callable[[], None] | None]] = field(default_factory=list)

    @property
    def sizes(self) -> PoolSizes:
        """The sizes of the pools, with the bytes of all shards together."""
        sizes, count = self.shards[0].sizes, len(self.shards)
        slot = sum(shard.sizes.slot_bytes for shard in self.shards)
        return replace(sizes, token_bytes=count * sizes.token_bytes, slot_bytes=slot,
                       layout=sizes.layout and sizes.layout.of_shards(count))

    @property
    def last_page(self) -> int:
        """As in `CachePools`."""
        return self.shards[0].last_page

    @property
    def item_validator(self) -> PoolItemValidator:
        return PoolItemValidator(self.item)

    @property
    def device(self) -> torch.device:
        """The device of the first shard, which has the batches and the logits."""
        return self.shards[0].device

    def hold(self, content: object) -> int:
        """As in `CachePools`. Every shard holds the object under the same number."""
        number, *others = (shard.hold(content) for shard in self.shards)
        assert all(other == number for other in others), "shards disagree about the objects that they hold"
        return number

    def wait(self) -> None:
        """As in `CachePools`, on each device."""
        for shard in self.shards:
            with shard.current():
                shard.wait()

    def forget(self, operations: Sequence[Operation]) -> None:
        """As in `CachePools`."""
        for shard in self.shards:
            shard.forget(operations)

    def apply(self, operations: Sequence[Operation]) -> None:
        """Carries out operations in order, on each device."""
        self._write_backlogs()
        for stores, group in groupby(operations, lambda operation: isinstance(operation, StoreItem)):
            if stores:
                for operation in group:
                    assert isinstance(operation, StoreItem)
                    store_prefix(self.shards, operation.item, operation.pages, operation.slot)
                continue
            same = tuple(group)
            for shard in self.shards:
                with shard.current():
                    shard.apply(same)

    def sound(self, slots: Sequence[int], pages: Sequence[int], done: int) -> bool:
        """As in `CachePools`, for all shards."""
        self._write_backlogs()
        for shard in self.shards:
            with shard.current():
                if not shard.sound(slots, pages, done):
                    return False
        return True

    def _write_backlogs(self) -> None:
        for backlog in self.backlogs:
            if write := backlog():
                write()


def allocate_shards(config: ModelConfig, pages: int, slots: int, dtype: torch.dtype, ops: Sequence[Ops],
                    devices: Sequence[str], extras: PoolOptions = PLAIN) -> CachePools | ShardedPools:
    """As `allocate`, for several devices with one `Ops` each. config: the config of the whole model. extras.layout: the
    layout of one shard, as `frame_layout` returns it for the `shard_config`."""
    count = len(devices)
    if count == 1:
        return allocate(config, pages, slots, dtype, ops[0], devices[0], extras)
    own, kv = shard_config(config, count), extras.kv or dtype
    shards = [replace(allocate(own, pages, slots, dtype, its_ops, device, extras),
                      parts=item_parts(config, count, index, kv, extras.tiled))
              for index, (its_ops, device) in enumerate(zip(ops, devices, strict=True))]
    shards[1:] = [shard if shard.keys.is_cuda else replace(shard, hidden=None) for shard in shards[1:]]
    item = allocate(config, 1, 1, dtype, ops[0], "meta", replace(extras, delta_logs=0, layout=None))
    return ShardedPools(tuple(shards), item)


def item_parts(config: ModelConfig, shards: int, index: int, kv: torch.dtype, tiled: bool) -> dict[str, TensorPart]:
    """Returns the parts of items' tensors on shard `index`, by name. Tensors without an entry are stored whole. kv:
    dtype of K/V. tiled: as in `GdnSpec`."""
    own, heads, dim = shard_config(config, shards), config.num_key_value_heads, config.head_dim
    first = index * heads // shards
    parts = {name: TensorPart((heads, width(dim, bits, kv)),
                              _entries((heads, size, [(first, first + own.num_key_value_heads)])
                                       for size in _sections(dim, bits, kv)))
             for name, bits in (("keys", KEY_BITS), ("values", VALUE_BITS))}
    if (linear := config.linear) is None:
        return parts
    key_heads, value_heads = linear.num_key_heads, linear.num_value_heads
    start, end = index * key_heads // shards, (index + 1) * key_heads // shards
    ratio = value_heads // key_heads
    values = [(start * ratio, end * ratio)]
    if tiled:
        values = [(run + start, run + end) for run in range(0, value_heads, key_heads)]
    keys, key_dim, value_dim = [(start, end)], linear.key_head_dim, linear.value_head_dim
    channels = (key_heads, key_dim, keys), (key_heads, key_dim, keys), (value_heads, value_dim, values)
    return parts | {
        "recurrent": TensorPart((value_heads, key_dim, value_dim),
                                _entries([(value_heads, key_dim * value_dim, values)])),
        "conv": TensorPart((config.conv_dim,), _entries(channels))}


def _sections(dim: int, bits: int, kv: torch.dtype) -> tuple[int, ...]:
    """Returns the number of entries per head in each section of a token's K/V. int8 has two sections, int4 three (the
    second one is empty for values), other dtypes one."""
    if kv == INT8:
        return dim, 4
    return (dim // 2, dim * (bits - 4) // 8, 2) if kv == INT4 else (dim,)


def _entries(sections: Iterable[tuple[int, int, _Ranges]]) -> tuple[tuple[int, int], ...]:
    """Returns a shard's ranges of entries. sections: sections that lie side by side, each as its number of heads, the
    entries per head, and the shard's ranges of heads."""
    found, before = _Ranges(), 0
    for heads, size, own in sections:
        found += [(before + start * size, before + end * size) for start, end in own if size]
        before += heads * size
    return tuple(found)
