"""The tensors behind the ledgers: K/V pages of the attention layers, state slots and replay rings of the recurrent
layers; and how the operations that the accounts queue are carried out on them."""

from __future__ import annotations

import logging
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import count, pairwise
from typing import Any

import torch
from torch import Tensor

from deltic.cache.offload.item_validator import PoolItemValidator
from deltic.cache.offload.prefix_items import LoadedPrefix, PrefixSource, Tensors
from deltic.cache.offload.tiers import StoreRequest
from deltic.cache.operations import CopyPage, CopySlot, FlushDeltaLog, Operation, PoolSizes, RestoreItem, StoreItem
from deltic.config import ModelConfig
from deltic.ops import Ops
from deltic.ops.cuda.staging import on_device
from deltic.ops.kv import as_bytes, is_finite, take
from deltic.ops.memory import is_shortage, memory_for, reserve
from deltic.ops.types import PAGE, RING, DeltaLogView, KvView, StateView

log = logging.getLogger("deltic")

_SPANS = 32
"""Pieces of the flat pool to which a prefix is copied one by one; of more it is copied whole, and then distributed."""
STATE_LAYOUT = 1
"""Grows when the meaning of what lies in pages or slots changes, so that older files are not taken for new ones."""


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """How a cache differs from the plain one of a model. delta_logs: sequences that may have a replay ring at the same
    time. head: the model's draft head runs, which has K/V of its own and reads the last hidden state. tiled: as in
    `GdnSpec`. kv: dtype of K/V; None: the model's. state: of recurrent states."""

    delta_logs: int = 0
    head: bool = False
    tiled: bool = False
    kv: torch.dtype | None = None
    state: torch.dtype = torch.float32


PLAIN = PoolOptions()


def page_bytes(config: ModelConfig, dtype: torch.dtype, head: bool = False) -> int:
    """Bytes of one page: K and V of PAGE tokens, of this dtype, in every attention layer, the draft head's among
    them."""
    layers = len(config.attention_layers) + head
    return 2 * layers * PAGE * config.num_key_value_heads * config.head_dim * dtype.itemsize


def slot_bytes(config: ModelConfig, dtype: torch.dtype, head: bool = False, kind: torch.dtype = torch.float32) -> int:
    """Bytes of one slot: recurrent state, of the dtype `kind`, and convolution ring in every recurrent layer; for a
    draft head the last hidden state (float32)."""
    linear, hidden = config.linear, 4 * config.hidden_size * head
    if linear is None:
        return hidden
    state = linear.num_value_heads * linear.key_head_dim * linear.value_head_dim * kind.itemsize
    return hidden + len(config.linear_layers) * (state + linear.conv_kernel * config.conv_dim * dtype.itemsize)


def ring_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one sequence's replay ring: inputs of the convolution, keys, updates and decays (float32)."""
    linear = config.linear
    if linear is None:
        return 0
    keys, values = linear.num_key_heads * linear.key_head_dim, linear.num_value_heads * linear.value_head_dim
    entry = config.conv_dim * dtype.itemsize + 4 * (keys + values + linear.num_value_heads)
    return len(config.linear_layers) * RING * entry


@dataclass(frozen=True, slots=True)
class CachePools:
    """The tensors of A attention layers (the draft head's is the last) and G recurrent layers.

    keys, values: [A, pages, PAGE, kv_heads, head_dim].
    recurrent: [G, slots, Hv, Dk, Dv] float32 or bfloat16.
    conv: [G, slots, conv_kernel, C].
    ops: what copies and folds.
    hidden: [1, slots, H] float32, of a slot's last token after the final norm; None without a draft head.
    delta_logs: inputs, keys, updates, decays of `DeltaLogView`, each with a leading dimension G; None without rings.
    tiled: as in `GdnSpec`.
    vocabulary: size of the logits that are kept with states; None: any.
    arriving: of each attention layer, as in `KvView`.
    copying: copies that may still be under way, oldest first, of which someone may wait no longer.
    held: what queued operations name by a number.
    numbers: the next ones.
    backlogs: each writes what steps have left to be written later, before anybody else looks at the tensors.

    Memory is not initialised: a slot is read only after a write (rows with done = 0 start from zero), a K/V entry
    only below its sequence's cursor. Pages that are never used are never touched, so they cost no real memory.
    """

    keys: Tensor
    values: Tensor
    recurrent: Tensor
    conv: Tensor
    ops: Ops
    hidden: Tensor | None = None
    delta_logs: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    tiled: bool = False
    vocabulary: int | None = None
    arriving: defaultdict[int, list[Any]] = field(default_factory=lambda: defaultdict(list))
    copying: deque[_Arrival] = field(default_factory=deque)
    held: dict[int, object] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=count)
    backlogs: list[Callable[[], None]] = field(default_factory=list)

    @property
    def page_tensors(self) -> tuple[Tensor, ...]:
        return self.keys, self.values

    @property
    def named_slots(self) -> dict[str, Tensor]:
        """What a slot consists of, [layers, slots, ...] each."""
        named = {"recurrent": self.recurrent, "conv": self.conv}
        return named if self.hidden is None else {**named, "hidden": self.hidden}

    @property
    def slot_tensors(self) -> tuple[Tensor, ...]:
        return tuple(self.named_slots.values())

    @property
    def sizes(self) -> PoolSizes:
        """How many units there are, and what they cost."""
        page, slot = (sum(tensor[:, :1].numel() * tensor.itemsize for tensor in tensors)
                      for tensors in (self.page_tensors, self.slot_tensors))
        return PoolSizes(
            self.keys.shape[1],
            self.recurrent.shape[1],
            self.delta_logs[0].shape[1] if self.delta_logs else 0,
            page // PAGE,
            slot,
            len(self.recurrent) > 0,
        )

    @property
    def item_validator(self) -> PoolItemValidator:
        """What may come in from a tier."""
        return PoolItemValidator(self)

    @property
    def device(self) -> torch.device:
        return self.keys.device

    def kv_views(self) -> tuple[KvView, ...]:
        return tuple(KvView(keys, values, self.arriving[layer])
                     for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)))

    def state_views(self) -> tuple[StateView, ...]:
        rings: list[DeltaLogView | None] = [None] * len(self.recurrent)
        if self.delta_logs:
            rings = [DeltaLogView(*layer, self.tiled) for layer in zip(*self.delta_logs, strict=True)]
        return tuple(map(StateView, self.recurrent, self.conv, rings))

    def hold(self, content: object) -> int:
        """Keep something for an operation to name by this number, until it is carried out."""
        number = next(self.numbers)
        self.held[number] = content
        return number

    def wait(self) -> None:
        """Have what follows wait for all K/V that is on its way."""
        for copies in self.arriving.values():
            while copies:
                copies.pop(0).wait()

    def forget(self, operations: Sequence[Operation]) -> None:
        """Let go of what is held for these, which nobody will carry out."""
        for operation in operations:
            if isinstance(operation, StoreItem | RestoreItem):
                self.held.pop(operation.item, None)

    def apply(self, operations: Sequence[Operation]) -> None:
        """Carry these out, in order."""
        self._catch_up()
        while self.copying and self.copying[0].event.query():
            self.copying.popleft()
        for operation in operations:
            match operation:
                case CopySlot(source, target):
                    self._copy(self.ops.copy_slots, self.slot_tensors, source, target)
                case CopyPage(source, target) if any(self.arriving.values()):
                    for layer in range(len(self.keys)):
                        tensors = [pool[layer] for pool in self.page_tensors]
                        self.arriving[layer].append(_DeferredPageCopy(tensors, source, target))
                case CopyPage(source, target):
                    self._copy(self.ops.copy_pages, self.page_tensors, source, target)
                case FlushDeltaLog(slot, ring, base, done):
                    self.ops.flush_delta_log(self.state_views(), slot, ring, base, done, slot)
                case StoreItem(item, pages, slot):
                    offer = self.held.pop(item)
                    assert isinstance(offer, StoreRequest)
                    self.wait()
                    try:
                        offer.make(_source(self, offer, pages, slot))
                    except Exception:  # the pools are as they were
                        log.exception("a prefix is not kept in the tiers")
                case RestoreItem(item, pages, start, slot):
                    loaded = self.held.pop(item)
                    assert isinstance(loaded, LoadedPrefix)
                    _restore(self, loaded, pages, start, slot)

    def sound(self, slots: Sequence[int], pages: Sequence[int], done: int) -> bool:
        """Whether the states in these slots, and the K/V of the first `done` tokens in these pages, are finite."""
        self._catch_up()
        self.wait()
        index = torch.tensor(pages[:-(-done // PAGE)], dtype=torch.int64, device=self.device)
        return (all(bool(pool[:, slot].isfinite().all()) for pool in self.slot_tensors for slot in slots)
                and all(is_finite(take(layer, 0, index).flatten(0, 1)[:done])
                        for pool in self.page_tensors for layer in pool))

    def _catch_up(self) -> None:
        for write in self.backlogs:
            write()

    def _copy(self, by: Callable[[tuple[Tensor, ...], Tensor, Tensor], None], tensors: tuple[Tensor, ...], source: int,
              target: int) -> None:
        tensors = tuple(map(as_bytes, tensors))
        if self.device.type == "cpu":
            return by(tensors, torch.tensor([source]), torch.tensor([target]))
        for tensor in tensors:  # a number that had to be brought to the device would wait for all that it is to do
            tensor[:, target].copy_(tensor[:, source])


def allocate(config: ModelConfig, pages: int, slots: int, dtype: torch.dtype, ops: Ops, device: str = "cpu",
             extras: PoolOptions = PLAIN) -> CachePools:
    """Reserve address space for the pools; ConfigError naming what makes them smaller if that is refused."""
    size = (
        pages * page_bytes(config, extras.kv or dtype, extras.head)
        + slots * slot_bytes(config, dtype, extras.head, extras.state)
        + extras.delta_logs * ring_bytes(config, dtype)
    )
    with memory_for(f"the cache, {size / (1 << 20):,.0f} MiB in {pages:,} pages and {slots:,} states",
                    "choose a smaller `memory`, which `max_context` and `max_batch` must then fit", "memory"):
        return _allocate(config, pages, slots, dtype, ops, device, extras)


def _allocate(config: ModelConfig, pages: int, slots: int, dtype: torch.dtype, ops: Ops, device: str,
              extras: PoolOptions) -> CachePools:
    attention, recurrent = len(config.attention_layers) + extras.head, len(config.linear_layers)
    kv = (attention, pages, PAGE, config.num_key_value_heads, config.head_dim)
    linear = config.linear
    heads = (linear.num_value_heads, linear.key_head_dim, linear.value_head_dim) if linear else (1, 1, 1)
    conv = (linear.conv_kernel, config.conv_dim) if linear else (1, 1)
    return CachePools(
        keys=reserve(kv, extras.kv or dtype, device),
        values=reserve(kv, extras.kv or dtype, device),
        recurrent=reserve((recurrent, slots, *heads), extras.state, device),
        conv=reserve((recurrent, slots, *conv), dtype, device),
        ops=ops,
        hidden=reserve((1, slots, config.hidden_size), torch.float32, device) if extras.head else None,
        delta_logs=_rings(config, extras.delta_logs, dtype, device), tiled=extras.tiled,
        vocabulary=config.vocab_size,
    )


def _rings(config: ModelConfig, units: int, dtype: torch.dtype,
           device: str) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    linear = config.linear
    if linear is None or not units:
        return None
    lead = (len(config.linear_layers), units, RING)
    return (reserve((*lead, config.conv_dim), dtype, device),
            reserve((*lead, linear.num_key_heads, linear.key_head_dim), torch.float32, device),
            reserve((*lead, linear.num_value_heads, linear.value_head_dim), torch.float32, device),
            reserve((*lead, linear.num_value_heads), torch.float32, device))


def _source(pools: CachePools, offer: StoreRequest, pages: Sequence[int], slot: int) -> PrefixSource:
    """What a tier may read of a prefix in the pools, before they change."""
    def run(start: int) -> dict[str, Tensor]:
        with _named_shortage():
            # a copy: nobody else may change what is kept
            tokens = torch.frombuffer(array("q", offer.tokens[start:]), dtype=torch.int64)
            return {"tokens": tokens, **_read_kv(pools, pages, start, len(offer.tokens))}

    def state() -> dict[str, Tensor]:
        with _named_shortage():
            logits = {} if offer.logits is None else {"logits": offer.logits}
            return _read_state(pools, slot) | logits

    return PrefixSource(offer.tokens, run, state, offer.logits is not None)


@contextmanager
def _named_shortage() -> Iterator[None]:
    """Where memory runs out in this block, it is a MemoryError."""
    try:
        yield
    except RuntimeError as error:
        if not is_shortage(error):
            raise
        raise MemoryError(str(error)) from error


def _restore(pools: CachePools, loaded: LoadedPrefix, pages: Sequence[int], known: int, slot: int) -> None:
    """Write what came from a tier into a slot, and into pages of the prefix from the token `known` on. Steps of a GPU
    need not wait for more than the layers that they have come to."""
    for name, pool in pools.named_slots.items():
        pool[:, slot] = loaded.state[name].to(pool.device, non_blocking=True)
    runs = [_run(pools, tensors, pages, start, max(known, start)) for start, tensors in loaded.runs
            if known < start + tensors["keys"].shape[1]]
    if not pools.keys.is_cuda:
        for layer in range(len(pools.keys)):
            _restore_layer(pools, layer, runs)
        return
    if any(isinstance(copy, _DeferredPageCopy) for copies in pools.arriving.values() for copy in copies):
        pools.wait()  # this may write where one is made from
    beside = _beside(pools.device)
    beside.wait_stream(torch.cuda.current_stream(pools.device))
    with torch.cuda.stream(beside):
        for layer in range(len(pools.keys)):
            _restore_layer(pools, layer, runs)
            arrival = _Arrival(beside.record_event(), loaded, runs)
            pools.arriving[layer].append(arrival)
    if len(pools.keys):
        pools.copying.append(arrival)


@dataclass(frozen=True, slots=True)
class _TokenSpan:
    """K/V whose first `skip` tokens are known, and where the others go: which of them, place in the flat pool and count
    of those that lie one after another; or the places of all, where these are many."""

    tensors: Tensors
    skip: int
    spans: list[tuple[int, int, int]]
    places: Tensor | None


def _run(pools: CachePools, tensors: Tensors, pages: Sequence[int], start: int, first: int) -> _TokenSpan:
    """Of K/V from the position `start` on that which is wanted from `first` on."""
    end = start + tensors["keys"].shape[1]
    spans = [(position - start, place, tokens) for position, place, tokens in _spans(pages, first, end)]
    return _TokenSpan(tensors, first - start, spans, _places(pools, pages, first, end) if len(spans) > _SPANS else None)


@dataclass(frozen=True, slots=True)
class _Arrival:
    """Copies that are done with this event, and what they read: until then nobody else may have its memory, the host's
    or the card's, which another stream's allocations would get at once."""

    event: torch.cuda.Event
    loaded: LoadedPrefix
    runs: Sequence[_TokenSpan]

    def wait(self) -> None:
        self.event.wait()


@dataclass(frozen=True, slots=True)
class _DeferredPageCopy:
    """A copy of a page that is to be made when what arrives there before has arrived, so that steps wait for no layer
    but their own. tensors: of a layer, [pages, PAGE, kv_heads, head_dim] each."""

    tensors: list[Tensor]
    source: int
    target: int

    def wait(self) -> None:
        for tensor in self.tensors:  # by a kernel: the card's copying engines are at work on other layers' K/V
            source, target = (tensor[page].view(torch.uint8) for page in (self.source, self.target))
            torch.bitwise_or(source, 0, out=target)


@cache
def _beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _restore_layer(pools: CachePools, layer: int, runs: Sequence[_TokenSpan]) -> None:
    """The K/V of one attention layer."""
    for run in runs:
        for pool, name in zip(pools.page_tensors, ("keys", "values"), strict=True):
            flat, kept = as_bytes(pool[layer].flatten(0, 1)), as_bytes(run.tensors[name][layer])
            if run.places is not None:  # as a whole, which waits for nobody
                flat.index_copy_(0, run.places, kept.to(pool.device, non_blocking=True)[run.skip:])
                continue
            for token, place, tokens in run.spans:
                flat[place:place + tokens].copy_(kept[token:token + tokens], non_blocking=True)


def _read_kv(pools: CachePools, pages: Sequence[int], start: int, end: int) -> dict[str, Tensor]:
    """keys, values [A, tokens, kv_heads, head_dim] of the positions `start` to `end`, where the pools are."""
    index = _places(pools, pages, start, end)
    return {name: take(pool.flatten(1, 2), 1, index)
            for name, pool in zip(("keys", "values"), pools.page_tensors, strict=True)}


def _read_state(pools: CachePools, slot: int) -> dict[str, Tensor]:
    """recurrent [G, Hv, Dk, Dv], conv [G, conv_kernel, C]; with a draft head, hidden [1, H]."""
    return {name: pool[:, slot].clone() for name, pool in pools.named_slots.items()}


def _spans(pages: Sequence[int], start: int, end: int) -> list[tuple[int, int, int]]:
    """Where the tokens from `start` to `end` lie in the flat pool: position, place and count of those that lie one
    after another."""
    spans = list[tuple[int, int, int]]()
    wanted = pages[start // PAGE:-(-end // PAGE)]
    breaks = [index for index, (page, next) in enumerate(pairwise(wanted), 1) if next != page + 1]
    for first, last in pairwise((0, *breaks, len(wanted))):
        position = max(start, (start // PAGE + first) * PAGE)
        until = min(end, (start // PAGE + last) * PAGE)
        spans.append((position, wanted[first] * PAGE + position % PAGE, until - position))
    return spans


def _places(pools: CachePools, pages: Sequence[int], start: int, end: int) -> Tensor:
    """Where the tokens from `start` to `end` lie in the flat pool."""
    positions = torch.arange(start, end)
    places = torch.frombuffer(array("q", pages), dtype=torch.int64)[positions // PAGE] * PAGE + positions % PAGE
    return on_device(places, pools.device) if pools.keys.is_cuda else places.to(pools.device)
