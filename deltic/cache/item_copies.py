"""Copies of prefixes between the pools and the items of the tiers.

Items are whole, however many devices share the pools: storing joins the parts of all shards, and restoring gives each
shard its part.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from deltic.cache.offload.tiers import StoreRequest
from deltic.cache.offload.types import LoadedPrefix, PrefixSource, Tensors
from deltic.ops.capabilities import on_device
from deltic.ops.kv import as_bytes
from deltic.ops.memory import is_shortage
from deltic.params import PAGE

if TYPE_CHECKING:
    from deltic.cache.tensors import CachePools

log = logging.getLogger("deltic")

_SPANS = 32
"""A prefix from a tier is copied span by span to up to this many spans of the pool, and to more by an index."""


@dataclass(frozen=True, slots=True)
class TensorPart:
    """The part of an item's tensor that one shard stores.

    shape: sizes of the tensor's last dimensions. The first of them is split; `ranges` index all of them, flattened.
    ranges: start and end of each range of the shard, in the shard's order.
    """

    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]

    def of(self, whole: Tensor) -> Tensor:
        """Returns the part of a whole tensor: a view, or a copy if there are several ranges."""
        flat = whole.flatten(-len(self.shape))
        found = [flat[..., start:end] for start, end in self.ranges]
        part = found[0] if len(found) == 1 else torch.cat(found, -1)
        return part.view(*part.shape[:-1], -1, *self.shape[1:])

    def put(self, part: Tensor, whole: Tensor) -> None:
        """Copies the part to its places in a whole tensor, which must be contiguous."""
        found = part.flatten(-len(self.shape)).split([end - start for start, end in self.ranges], -1)
        flat = whole.view(*whole.shape[:-len(self.shape)], -1)
        for (start, end), each in zip(self.ranges, found, strict=True):
            flat[..., start:end].copy_(each)


# to the tiers


def store_prefix(shards: Sequence[CachePools], item: int, pages: Sequence[int], slot: int) -> None:
    """Offers a prefix in the pools of all shards to the tiers of the StoreRequest that they hold as `item`. Only logs
    errors, because they leave the pools unchanged."""
    requests = [shard.held.pop(item) for shard in shards]
    assert isinstance(requests[0], StoreRequest)
    for shard in shards:
        with shard.current():
            shard.wait()
    try:
        requests[0].make(_source(shards, requests[0], pages, slot))
    except Exception:
        log.exception("a prefix is not kept in the tiers")


def _source(shards: Sequence[CachePools], request: StoreRequest, pages: Sequence[int], slot: int) -> PrefixSource:
    """Returns functions that read a prefix from the pools. They must be called before the pools change."""
    def run(start: int) -> dict[str, Tensor]:
        with _shortage_as_memory_error():
            tokens = torch.frombuffer(array("q", request.tokens[start:]), dtype=torch.int64)  # a copy
            return {"tokens": tokens, **_read_kv(shards, pages, start, len(request.tokens))}

    def state() -> dict[str, Tensor]:
        with _shortage_as_memory_error():
            logits = {} if request.logits is None else {"logits": request.logits}
            return read_state(shards, slot) | logits

    return PrefixSource(request.tokens, run, state, request.logits is not None)


@contextmanager
def _shortage_as_memory_error() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not is_shortage(error):
            raise
        raise MemoryError(str(error)) from error


def _read_kv(shards: Sequence[CachePools], pages: Sequence[int], start: int, end: int) -> dict[str, Tensor]:
    """Returns keys and values [A, tokens, kv_heads, head_dim] of the positions `start` to `end`."""
    places = list[Tensor]()
    for shard in shards:
        with shard.current():
            places.append(_places(shard, pages, start, end))

    def read(name: str, index: int) -> Tensor:
        pool = shards[index].named_pages[name].flatten(1, 2)
        layers = as_bytes(pool)
        found = layers.new_empty((len(layers), end - start, *layers.shape[2:]))
        for layer, part in zip(layers, found, strict=True):  # for all layers at once, a CPU would first copy the pool
            torch.index_select(layer, 0, places[index], out=part)
        return found.view(pool.dtype)

    return {name: _joined(shards, name, read) for name in shards[0].named_pages}


def read_state(shards: Sequence[CachePools], slot: int) -> dict[str, Tensor]:
    """Returns recurrent [G, Hv, Dk, Dv], conv [G, conv_kernel, C] and, with a draft head, hidden [1, H]."""
    def read(name: str, index: int) -> Tensor:
        return shards[index].named_slots[name][:, slot].clone()

    return {name: _joined(shards, name, read) for name in shards[0].named_slots}


def _joined(shards: Sequence[CachePools], name: str, read: Callable[[str, int], Tensor]) -> Tensor:
    """Returns a whole tensor of an item, on the first shard's device. read: returns a copy of a shard's part, given the
    shard's index. Only one such copy exists at a time; equal parts of consecutive shards are read once."""
    whole: Tensor | None = None
    last: TensorPart | None = None
    for index, shard in enumerate(shards):
        part = shard.parts.get(name)
        if part is None:
            return read(name, index)
        if part == last:
            continue
        with shard.current():
            copy = read(name, index)
        if whole is None:
            whole = copy.new_empty((*copy.shape[:-len(part.shape)], *part.shape))
        part.put(as_bytes(copy), as_bytes(whole))
        del copy
        last = part
    assert whole is not None
    return whole


# from the tiers


def restore_prefix(pools: CachePools, loaded: LoadedPrefix, pages: Sequence[int], known: int, slot: int) -> None:
    """Writes the state of a tier's prefix to a slot, and its K/V from token `known` on to pages.

    On a GPU the K/V copies overlap with steps: a step waits only for the layer that it computes next.
    """
    for name, pool in pools.named_slots.items():
        for layer, state in zip(pool, loaded.state[name], strict=True):  # all layers at once would need a copy
            own = _part(pools, name, state.to(pool.device, non_blocking=True)) if name in pools.parts else state
            layer[slot].copy_(own, non_blocking=True)
    runs = [_run(pools, tensors, pages, start, max(known, start)) for start, tensors in loaded.runs
            if known < start + tensors["keys"].shape[1]]
    if not pools.keys.is_cuda:
        for layer in range(len(pools.keys)):
            _restore_layer(pools, layer, runs)
        return
    if any(isinstance(copy, DeferredPageCopy) for copies in pools.arriving.values() for copy in copies):
        pools.wait()  # the restore may write to the source of a deferred copy
    stream = _side_stream(pools.device)
    stream.wait_stream(torch.cuda.current_stream(pools.device))
    with torch.cuda.stream(stream):
        for layer in range(len(pools.keys)):
            _restore_layer(pools, layer, runs)
            arrival = Arrival(stream.record_event(), loaded, runs)
            pools.arriving[layer].append(arrival)
    if len(pools.keys):
        pools.copying.append(arrival)


def _part(pools: CachePools, name: str, whole: Tensor) -> Tensor:
    """Returns the part of an item's tensor that these pools store."""
    part = pools.parts.get(name)
    return whole if part is None else part.of(whole)


@dataclass(frozen=True, slots=True)
class _Run:
    """K/V of consecutive tokens. The first `skip` tokens are already in the pages.

    spans: runs of the other tokens: index of the first one among them, place in the flat pool, count.
    places: place of each other token in the flat pool, if there are many spans.
    """

    tensors: Tensors
    skip: int
    spans: list[tuple[int, int, int]]
    places: Tensor | None


def _run(pools: CachePools, tensors: Tensors, pages: Sequence[int], start: int, first: int) -> _Run:
    """Returns a run of the K/V in `tensors`, which begins at position `start`, from position `first` on."""
    end = start + tensors["keys"].shape[1]
    spans = [(position - first, place, length) for position, place, length in _spans(pages, first, end)]
    return _Run(tensors, first - start, spans, _places(pools, pages, first, end) if len(spans) > _SPANS else None)


@dataclass(frozen=True, slots=True)
class Arrival:
    """Copies that are complete after an event. Holds their sources: this memory must not be reused before."""

    event: torch.cuda.Event
    loaded: LoadedPrefix
    runs: Sequence[_Run]

    def wait(self) -> None:
        self.event.wait()


@dataclass(frozen=True, slots=True)
class DeferredPageCopy:
    """A copy of a page in one layer, which must follow the arrivals queued before it. tensors: keys and values, each
    [pages, PAGE, kv_heads, head_dim]."""

    tensors: list[Tensor]
    source: int
    target: int

    def wait(self) -> None:
        for tensor in self.tensors:  # with a kernel, because the copy engines are busy with other layers
            source, target = (tensor[page].view(torch.uint8) for page in (self.source, self.target))
            torch.bitwise_or(source, 0, out=target)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _restore_layer(pools: CachePools, layer: int, runs: Sequence[_Run]) -> None:
    for run in runs:
        for name, pool in pools.named_pages.items():
            flat, kept = as_bytes(pool[layer].flatten(0, 1)), as_bytes(run.tensors[name][layer])[run.skip:]
            if run.places is not None or pools.parts:  # strided copies would not overlap with steps
                kept = _part(pools, name, kept.to(pool.device, non_blocking=True))
            if run.places is not None:
                flat.index_copy_(0, run.places, kept)
                continue
            for token, place, length in run.spans:
                flat[place:place + length].copy_(kept[token:token + length], non_blocking=True)


def _spans(pages: Sequence[int], start: int, end: int) -> list[tuple[int, int, int]]:
    """Returns the spans of the flat pool with the tokens from `start` to `end`: position, place and count of each."""
    spans = list[tuple[int, int, int]]()
    wanted = pages[start // PAGE:-(-end // PAGE)]
    breaks = [index for index, (page, next) in enumerate(pairwise(wanted), 1) if next != page + 1]
    for first, last in pairwise((0, *breaks, len(wanted))):
        position = max(start, (start // PAGE + first) * PAGE)
        until = min(end, (start // PAGE + last) * PAGE)
        spans.append((position, wanted[first] * PAGE + position % PAGE, until - position))
    return spans


def _places(pools: CachePools, pages: Sequence[int], start: int, end: int) -> Tensor:
    """Returns the place of each token from `start` to `end` in the flat pool."""
    positions = torch.arange(start, end)
    places = torch.frombuffer(array("q", pages), dtype=torch.int64)[positions // PAGE] * PAGE + positions % PAGE
    return on_device(places, pools.device)
