"""The tensors of the cache and the operations on them.

Attention layers have K/V pages; recurrent layers have state slots and state delta logs.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from math import prod
from typing import Any

import torch
from torch import Tensor

from deltic.cache.frames import FrameLayout
from deltic.cache.item_copies import Arrival, DeferredPageCopy, TensorPart, restore_prefix, store_prefix
from deltic.cache.offload.item_validator import PoolItemValidator
from deltic.cache.offload.types import LoadedPrefix
from deltic.cache.operations import (
    CopyPage,
    CopySlot,
    FlushDeltaLog,
    MovePages,
    Operation,
    PoolSizes,
    RestoreItem,
    StoreItem,
)
from deltic.config import ModelConfig
from deltic.ops import Ops
from deltic.ops.capabilities import on_device
from deltic.ops.kv import KEY_BITS, VALUE_BITS, as_bytes, is_finite, take, width
from deltic.ops.memory import memory_for, reserve
from deltic.ops.types import PAGE, RING, DeltaLogView, KvView, StateView

_ALIGNMENT = 64
STATE_LAYOUT = 2
"""Version of the layout of pages and slots. It grows with each change, so that items of older versions are not used."""


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """delta_logs: number of state delta logs. head: True if the model's draft head runs, which has K/V of its own and
    reads the last hidden state. tiled: as in `GdnSpec`. kv: dtype of K/V; None: the model's. state: dtype of recurrent
    states. layout: how pages and slots share memory, if they do."""

    delta_logs: int = 0
    head: bool = False
    tiled: bool = False
    kv: torch.dtype | None = None
    state: torch.dtype = torch.float32
    layout: FrameLayout | None = None


PLAIN = PoolOptions()


@dataclass(frozen=True, slots=True)
class _UnitTensor:
    """The part of a page, slot or delta log that lies in one tensor: an array of `shape` for each of `layers`."""

    layers: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.layers * prod(self.shape) * self.dtype.itemsize

    @property
    def entry(self) -> int:
        """Bytes of the part in one layer."""
        return prod(self.shape) * self.dtype.itemsize

    def reserve(self, units: int, device: str, ops: Ops) -> Tensor:
        return ops.reserve((self.layers, units, *self.shape), self.dtype, device)

    def within(self, block: Tensor, units: int, start: int, step: int) -> Tensor:
        """Returns a view [layers, units, ...] of a block of bytes: the units of layer 0 lie side by side from byte
        `start` on, the units of each further layer begin `step` bytes later. Layers may overlap."""
        strides = torch.empty(self.shape, device="meta").stride()
        size = self.dtype.itemsize
        return block.view(self.dtype).as_strided((self.layers, units, *self.shape), (step // size, self.entry // size,
                                                 *strides), start // size)


def _page(config: ModelConfig, dtype: torch.dtype, head: bool) -> dict[str, _UnitTensor]:
    layers = len(config.attention_layers) + head
    heads, dim = config.num_key_value_heads, config.head_dim
    return {name: _UnitTensor(layers, (PAGE, heads, width(dim, bits, dtype)), dtype)
            for name, bits in (("keys", KEY_BITS), ("values", VALUE_BITS))}


def _slot(config: ModelConfig, dtype: torch.dtype, head: bool, state: torch.dtype) -> dict[str, _UnitTensor]:
    layers, linear = len(config.linear_layers), config.linear
    heads = (linear.num_value_heads, linear.key_head_dim, linear.value_head_dim) if linear else (1, 1, 1)
    conv = (linear.conv_kernel, config.conv_dim) if linear else (1, 1)
    hidden = {"hidden": _UnitTensor(1, (config.hidden_size,), torch.float32)} if head else {}
    return {"recurrent": _UnitTensor(layers, heads, state), "conv": _UnitTensor(layers, conv, dtype), **hidden}


def _delta_log(config: ModelConfig, dtype: torch.dtype) -> tuple[_UnitTensor, ...]:
    """Returns the parts of a delta log: convolution inputs, keys, updates, decays. Empty without recurrent layers."""
    layers, linear = len(config.linear_layers), config.linear
    if linear is None:
        return ()
    entries = (linear.num_key_heads, linear.key_head_dim), (linear.num_value_heads, linear.value_head_dim), (
        linear.num_value_heads,)
    return (_UnitTensor(layers, (RING, config.conv_dim), dtype),
            *(_UnitTensor(layers, (RING, *entry), torch.float32) for entry in entries))


def frame_layout(config: ModelConfig, dtype: torch.dtype, extras: PoolOptions) -> FrameLayout | None:
    """Returns the layout in which pages and slots share memory. Returns None if they cannot: if the model lacks
    attention or recurrent layers, if keys and values differ in size, or if pages fill less than 7/8 of a state."""
    page = _page(config, extras.kv or dtype, extras.head)
    slot = _slot(config, dtype, extras.head, extras.state)
    state, keys = slot["recurrent"], page["keys"]
    if not (state.layers and keys.layers) or keys.entry != page["values"].entry:
        return None
    parts, loss = 2 * keys.layers, keys.entry - 1 if state.nbytes % keys.entry else 0
    pages = (state.nbytes - loss) // (parts * keys.entry)
    if 8 * pages * parts * keys.entry < 7 * state.nbytes:
        return None
    side = sum(state.layers * part.entry for name, part in slot.items() if name != "recurrent")
    return FrameLayout(state.nbytes, pages, keys.entry, state.layers, side)


def page_bytes(config: ModelConfig, dtype: torch.dtype, head: bool = False) -> int:
    """Returns the bytes of a page: K and V of PAGE tokens in every attention layer, and in the draft head's."""
    return sum(part.nbytes for part in _page(config, dtype, head).values())


def slot_bytes(config: ModelConfig, dtype: torch.dtype, head: bool = False, kind: torch.dtype = torch.float32) -> int:
    """Returns the bytes of a slot: recurrent state (of dtype `kind`) and convolution inputs in every recurrent layer,
    and the last hidden state if a draft head runs."""
    return sum(part.nbytes for part in _slot(config, dtype, head, kind).values())


def delta_log_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Returns the bytes of a state delta log."""
    return sum(part.nbytes for part in _delta_log(config, dtype))


@dataclass(frozen=True, slots=True)
class CachePools:
    """The tensors of A attention layers (the draft head's is the last) and G recurrent layers.

    keys, values: [A, pages, PAGE, kv_heads, head_dim]; with int4 the last dimension is `ops.kv.width`.
    recurrent: [G, slots, Hv, Dk, Dv] float32 or bfloat16.
    conv: [G, slots, conv_kernel, C].
    ops: the kernels that copy and flush.
    hidden: [1, slots, H] float32, hidden state of a slot's last token after the final norm; None without a draft head.
    delta_logs: inputs, keys, updates, decays of `DeltaLogView`, each with a leading dimension G; None without logs.
    tiled: as in `GdnSpec`.
    vocabulary: size of the logits that are kept with states; None: any.
    arriving: pending copies by attention layer, as in `KvView`.
    copying: copies that may not be complete yet, oldest first.
    held: objects of queued operations, keyed by the number with which an operation refers to them.
    numbers: the source of these numbers.
    layout: set if the tensors of pages and `recurrent` are views of the same memory, whose layers overlap; then only
        some numbers of pages and slots are used.
    backlogs: weak references to methods that write deferred K/V. `apply` and `sound` call them first.
    parts: for a shard, the parts of an item's tensors that it stores, by name; empty if these pools store all of them.

    Memory is not initialised. A slot is read only after a write (rows with done = 0 start from zero), a K/V entry only
    below its sequence's cursor. Unused pages are never touched, so that they cost no memory.
    """

    keys: Tensor
    values: Tensor
    recurrent: Tensor
    conv: Tensor
    ops: Ops
    hidden: Tensor | None = None
    delta_logs: tuple[Tensor, ...] | None = None
    tiled: bool = False
    vocabulary: int | None = None
    layout: FrameLayout | None = None
    arriving: defaultdict[int, list[Any]] = field(default_factory=lambda: defaultdict(list))
    copying: deque[Arrival] = field(default_factory=deque)
    held: dict[int, object] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=count)
    backlogs: list[Callable[[], Callable[[], None] | None]] = field(default_factory=list)
    parts: Mapping[str, TensorPart] = field(default_factory=dict)

    @property
    def shards(self) -> tuple[CachePools, ...]:
        """The pools of each device: only this one."""
        return (self,)

    @property
    def named_pages(self) -> dict[str, Tensor]:
        """The tensors of the pages by name, each [layers, pages, PAGE, ...]."""
        return {"keys": self.keys, "values": self.values}

    @property
    def page_tensors(self) -> tuple[Tensor, ...]:
        return self.keys, self.values

    @property
    def named_slots(self) -> dict[str, Tensor]:
        """The tensors of the slots by name, each [layers, slots, ...]."""
        named = {"recurrent": self.recurrent, "conv": self.conv}
        return named if self.hidden is None else {**named, "hidden": self.hidden}

    @property
    def slot_tensors(self) -> tuple[Tensor, ...]:
        return tuple(self.named_slots.values())

    @property
    def sizes(self) -> PoolSizes:
        page, slot = (sum(tensor[:, :1].numel() * tensor.itemsize for tensor in tensors)
                      for tensors in (self.page_tensors, self.slot_tensors))
        pages, slots, layout = self.keys.shape[1], self.recurrent.shape[1], self.layout
        if layout:
            pages = (layout.frame_of(pages - 1) + 1) * layout.pages
            slots = (slots - 1) // layout.slot_step + 1
        return PoolSizes(
            pages,
            slots,
            self.delta_logs[0].shape[1] if self.delta_logs else 0,
            page // PAGE,
            slot,
            len(self.recurrent) > 0,
            layout,
        )

    @property
    def last_page(self) -> int:
        """A page that does not share memory with slot 0."""
        return self.keys.shape[1] - 1

    @property
    def item_validator(self) -> PoolItemValidator:
        return PoolItemValidator(self)

    @property
    def device(self) -> torch.device:
        return self.keys.device

    def current(self) -> AbstractContextManager[object]:
        """Returns a context in which the device of these pools is the current CUDA device."""
        return torch.cuda.device(self.device) if self.keys.is_cuda else nullcontext()

    def kv_views(self) -> tuple[KvView, ...]:
        return tuple(KvView(keys, values, self.arriving[layer])
                     for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)))

    def state_views(self) -> tuple[StateView, ...]:
        logs: list[DeltaLogView | None] = [None] * len(self.recurrent)
        if self.delta_logs:
            logs = [DeltaLogView(inputs, keys, updates, decays, self.tiled)
                    for inputs, keys, updates, decays in zip(*self.delta_logs, strict=True)]
        return tuple(map(StateView, self.recurrent, self.conv, logs))

    def hold(self, content: object) -> int:
        """Stores an object for an operation. Returns the number with which the operation refers to it."""
        number = next(self.numbers)
        self.held[number] = content
        return number

    def wait(self) -> None:
        """Makes all later work wait for the K/V copies under way."""
        for copies in self.arriving.values():
            while copies:
                copies.pop(0).wait()

    def forget(self, operations: Sequence[Operation]) -> None:
        """Drops the objects held for operations that will not be carried out."""
        for operation in operations:
            if isinstance(operation, StoreItem | RestoreItem):
                self.held.pop(operation.item, None)

    def apply(self, operations: Sequence[Operation]) -> None:
        """Carries out operations in order."""
        self._write_backlogs()
        while self.copying and self.copying[0].event.query():
            self.copying.popleft()
        for operation in operations:
            match operation:
                case CopySlot(source, target):
                    self._copy(self.ops.copy_slots, self.slot_tensors, source, target)
                case CopyPage(source, target) if any(self.arriving.values()):
                    for layer in range(len(self.keys)):
                        tensors = [pool[layer] for pool in self.page_tensors]
                        self.arriving[layer].append(DeferredPageCopy(tensors, source, target))
                case CopyPage(source, target):
                    self._copy(self.ops.copy_pages, self.page_tensors, source, target)
                case MovePages(sources, targets):
                    self.wait()
                    if sources:
                        old, new = (on_device(torch.tensor(pages), self.device) for pages in (sources, targets))
                        self.ops.copy_pages(tuple(map(as_bytes, self.page_tensors)), old, new)
                case FlushDeltaLog(slot, delta_log, base, done):
                    self.ops.flush_delta_log(self.state_views(), slot, delta_log, base, done, slot)
                case StoreItem(item, pages, slot):
                    store_prefix(self.shards, item, pages, slot)
                case RestoreItem(item, pages, start, slot):
                    loaded = self.held.pop(item)
                    assert isinstance(loaded, LoadedPrefix)
                    restore_prefix(self, loaded, pages, start, slot)

    def sound(self, slots: Sequence[int], pages: Sequence[int], done: int) -> bool:
        """Returns True if these states and the K/V of the first `done` tokens in these pages are finite."""
        self._write_backlogs()
        self.wait()
        index = torch.tensor(pages[:-(-done // PAGE)], dtype=torch.int64, device=self.device)
        return (all(bool(pool[:, slot].isfinite().all()) for pool in self.slot_tensors for slot in slots)
                and all(is_finite(take(layer, 0, index).flatten(0, 1)[:done])
                        for pool in self.page_tensors for layer in pool))

    def _write_backlogs(self) -> None:
        for backlog in self.backlogs:
            if write := backlog():
                write()

    def _copy(self, by: Callable[[tuple[Tensor, ...], Tensor, Tensor], None], tensors: tuple[Tensor, ...], source: int,
              target: int) -> None:
        tensors = tuple(map(as_bytes, tensors))
        if not self.keys.is_cuda:
            return by(tensors, torch.tensor([source]), torch.tensor([target]))
        for tensor in tensors:  # an index tensor would have to be copied to the device first
            tensor[:, target].copy_(tensor[:, source])


def allocate(config: ModelConfig, pages: int, slots: int, dtype: torch.dtype, ops: Ops, device: str = "cpu",
             extras: PoolOptions = PLAIN) -> CachePools:
    """Returns pools in newly reserved address space. Raises ConfigError if the system refuses it."""
    page = _page(config, extras.kv or dtype, extras.head)
    slot = _slot(config, dtype, extras.head, extras.state)
    layout, log_parts = extras.layout, _delta_log(config, dtype) if extras.delta_logs else ()
    size = PoolSizes(pages, slots, 0, sum(part.nbytes for part in page.values()) // PAGE,
                     sum(part.nbytes for part in slot.values()), layout=layout).bytes
    size += extras.delta_logs * sum(part.nbytes for part in log_parts)
    with memory_for(f"the cache, {size / (1 << 20):,.0f} MiB in {pages:,} pages and {slots:,} states",
                    "choose a smaller `memory`, which `max_context` and `max_batch` must then fit", "memory"):
        if layout:
            of_pages, of_slots = _share(page, slot, layout, pages // layout.pages, slots, device)
        else:
            of_pages = {name: part.reserve(pages, device, ops) for name, part in page.items()}
            of_slots = {name: part.reserve(slots, device, ops) for name, part in slot.items()}
        delta_logs = tuple(part.reserve(extras.delta_logs, device, ops) for part in log_parts)
        return CachePools(of_pages["keys"], of_pages["values"], of_slots["recurrent"], of_slots["conv"], ops,
                          of_slots.get("hidden"), delta_logs or None, extras.tiled, config.vocab_size, layout)


def _share(page: dict[str, _UnitTensor], slot: dict[str, _UnitTensor], layout: FrameLayout, frames: int, slots: int,
           device: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the tensors of pages and slots as views of one block. The parts of slots that lie outside of frames
    (`FrameLayout.side`) have memory of their own."""
    block = reserve((-(-frames * layout.size // _ALIGNMENT) * _ALIGNMENT,), torch.uint8, device)
    numbers = layout.first_page(frames - 1) + layout.pages
    run = layout.pages * layout.page_step
    pages = {name: part.within(block, numbers, index * part.layers * run, run)
             for index, (name, part) in enumerate(page.items())}
    numbers = (min(slots, frames) - 1) * layout.slot_step + 1
    of_slots = {"recurrent": slot["recurrent"].within(block, numbers, 0, slot["recurrent"].entry)}
    for name, part in slot.items():
        if name != "recurrent":
            size = (numbers + part.layers - 1) * part.entry
            own = reserve((-(-size // _ALIGNMENT) * _ALIGNMENT,), torch.uint8, device)
            of_slots[name] = part.within(own, numbers, 0, part.entry)
    return pages, of_slots
