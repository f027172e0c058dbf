"""Turns a plan into the tensors of a step: rows become columns of integers, which one copy brings to the device.

`ops/input_columns` declares the columns. Steps that decode or verify drafts are padded to a bucket: a fixed shape with
permanent device memory, which CUDA graphs read.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as List
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltic.cache.handles import PageList
from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.ops.adapters import Adapter, BatchAdapters
from deltic.ops.capabilities import on_device
from deltic.ops.cuda.staging import mover
from deltic.ops.input_columns import DECODE, RAGGED, VERIFY, Extents
from deltic.ops.types import PAGE, RING, Batch, InputEmbeds, Layout, Padded
from deltic.runner.upload import HostToDeviceBuffer, upload

ImageRows = Callable[[str], Tensor]
"""A function that returns the embeddings [tokens, H] float32 of an image on the device, given its digest."""
BucketKey = tuple[int, int, int | None]
"""Rows, pages and tokens of a bucket, as in `Padded.bucket`."""
BucketNumbers = dict[BucketKey, Tensor]
"""The device memory of each bucket's integers."""

FEW_ROWS = 16
"""On a GPU, steps of up to this many rows may have drafts. In steps with more rows, state writes are deferred."""
_LAYOUTS = 64
"""Maximum number of batches that a bucket keeps."""
MIN_PAGES = 16
"""Width of the page table in the smallest bucket."""


class DeviceTokens(NamedTuple):
    """Tokens that only the device has. numbers [N] int64: device memory with the tokens. places: for each token of a
    step, its index in `numbers`. With `PlannedRow.accepts`, the number after a token is its position."""

    numbers: Tensor
    places: List[int]


def build(plan: StepPlan, device: torch.device, all_logits: bool = False, hidden: bool = False,
          drawn: Tensor | DeviceTokens | None = None, memory: InputBatch | None = None,
          image_rows: ImageRows | None = None, verified: bool = False) -> Batch:
    """Returns the plan's rows as one ragged batch. Makes one copy to the device and never waits for it.

    all_logits: compute the logits of every token. hidden: compute all hidden states. drawn: the tokens [N] int64 that
    the step in flight has drawn, for rows with `PlannedRow.drawn`; or the tokens of rows with pending drafts. memory:
    reused from step to step; the batch is valid until the next one is built with it. verified: `Capabilities.verifies`.
    """
    rows = plan.rows
    if isinstance(drawn, DeviceTokens):
        return verifying(plan, device, memory, hidden, drawn)
    unknown = sum(row.drawn is not None for row in rows)
    bucketed = device.type == "cuda" and not any(row.adapter for row in rows)
    if bucketed and (verified or not hidden) and has_bucket(plan, verified):
        return decoding(plan, device, drawn if unknown else None, memory, hidden)
    if bucketed and verified and drawn is None and verifies(plan):
        return verifying(plan, device, memory, hidden)
    batch = _ragged(rows, device, all_logits, hidden, memory)
    if image_rows is not None and any(row.images for row in rows):
        batch = replace(batch, input_embeds=_input_embeds(rows, image_rows, device), memo={}, kept=None)
    if drawn is not None and unknown:
        ids = batch.ids[:unknown]
        ids.copy_(drawn[ids])
    return batch


# Columns


def _columns(rows: List[PlannedRow]) -> dict[str, list[int]]:
    """Returns the columns of rows, by their names in `ops/input_columns`. `positions` has cache indices; `_rotary`
    turns these into rotary positions."""
    ids, positions, store, starts = list[int](), list[int](), list[int](), [0]
    for row in rows:
        count, first = len(row.tokens), row.done
        ids += row.tokens if row.drawn is None else (row.drawn,)
        if count == 1:
            positions.append(first)
            store.append(_kv_index(row, first))
        else:
            positions += range(first, first + count)
            for indices in _kv_ranges(row):
                store += indices
        starts.append(starts[-1] + count)
    return {
        "ids": ids,
        "positions": positions,
        "starts": starts,
        "done": [row.done for row in rows],
        "source": [row.slot for row in rows],
        "target": [row.slot if row.target is None else row.target for row in rows],
        "base": [row.done if row.base is None else row.base for row in rows],
        "delta_log": [row.delta_log for row in rows],
        "append": [int(row.append) for row in rows],
        "store": store,
    }


def _rotary(rows: List[PlannedRow], positions: List[int]) -> list[List[int]]:
    """Returns the rotary positions on each of 3 axes. positions: the cache indices of the tokens."""
    if {row.rotary for row in rows} == {0}:
        return [positions] * 3
    return [[position for row in rows for position in _axis(row, axis)] for axis in range(3)]


def _axis(row: PlannedRow, axis: int) -> List[int]:
    if isinstance(row.rotary, int):
        return range(row.done + row.rotary, row.done + row.rotary + len(row.tokens))
    return row.rotary[axis]


def _kv_index(row: PlannedRow, index: int) -> int:
    return row.pages[index // PAGE] * PAGE + index % PAGE


def _kv_ranges(row: PlannedRow) -> Iterator[range]:
    """Yields the `_kv_index` of all tokens of a row, one range per page."""
    index, end = row.done, row.done + len(row.tokens)
    while index < end:
        count = min(PAGE - index % PAGE, end - index)
        first = _kv_index(row, index)
        yield range(first, first + count)
        index += count


# Batches of any shape


class _Shape(NamedTuple):
    """All data of a batch except its integers. behind: True if some state is behind its cursor. span: as in `Batch`."""

    layout: Layout
    behind: bool
    span: tuple[int, int, int] | None

    @property
    def extents(self) -> Extents:
        layout = self.layout
        return Extents(layout.rows, layout.tokens, logits=layout.logits, checkpoints=layout.checkpoints)


def _ragged(rows: List[PlannedRow], device: torch.device, all_logits: bool, hidden: bool, memory: InputBatch | None
            ) -> Batch:
    shape, numbers = _ragged_numbers(rows, all_logits, hidden, exact=device.type != "cpu")
    width = max([len(row.pages) for row in rows])
    pages = (memory.pages if memory else PageTable()).of(rows, width)
    appends = [row.append for row in rows]
    if device.type == "cpu" and memory:
        return memory.batch(shape, numbers, appends, pages)
    append = on_device(torch.tensor(appends), device) if shape.layout.appends else _no_appends(len(rows), device)
    return _ragged_batch(shape, upload(numbers, torch.int64, device), append, on_device(pages, device))


def _ragged_numbers(rows: List[PlannedRow], all_logits: bool, hidden: bool, exact: bool) -> tuple[_Shape, array[int]]:
    """Returns the shape and the packed columns of rows. exact: contexts have the exact lengths of the rows; otherwise
    they are rounded up, so that successive steps have the same shape."""
    columns, chunks = _columns(rows), tuple([len(row.tokens) for row in rows])
    wanted = list[int]()
    for row, end in zip(rows, columns["starts"][1:], strict=True):
        wanted += range(end - (len(row.tokens) if all_logits else row.logits), end)
    emits = [(index, *emit) for index, row in enumerate(rows) for emit in row.checkpoints]
    contexts = tuple([row.done + count for row, count in zip(rows, chunks, strict=True)])
    if not exact:
        contexts = (PAGE * decode_pages(max([len(row.pages) for row in rows])),) * len(rows)
    singles = chunks.count(1)
    layout = Layout(chunks, contexts, singles, len(wanted), len(emits), any(columns["append"]), hidden,
                    replays=any(row.base not in (None, row.done) and len(row.tokens) > 1 for row in rows))
    span = _span(columns["source"][:singles], columns["target"][:singles])
    shape = _Shape(layout, columns["base"] != columns["done"], span)
    emit_rows, lengths, slots = zip(*emits, strict=True) if emits else ((), (), ())
    values = {
        **columns,
        "positions": chain(*_rotary(rows, columns["positions"])),
        "logit_tokens": wanted,
        "emit_row": emit_rows,
        "emit_length": lengths,
        "emit_slot": slots,
    }
    return shape, RAGGED.pack(values, shape.extents)


def _ragged_batch(shape: _Shape, numbers: Tensor, append: Tensor, pages: Tensor,
                  kept: dict[Any, Any] | None = None) -> Batch:
    columns = RAGGED.views(numbers, shape.extents)
    columns["positions"] = columns["positions"].view(3, -1)
    if not shape.behind:
        columns["base"] = columns["done"]
    return Batch(layout=shape.layout, pages=pages, append=append, span=shape.span, kept=kept, **columns)


def _span(sources: list[int], targets: list[int]) -> tuple[int, int, int] | None:
    if not sources or sources != targets:
        return None
    first, end, step = sources[0], sources[-1] + 1, max(sources[1] - sources[0], 1) if len(sources) > 1 else 1
    return (first, end, step) if sources == list(range(first, end, step)) else None


@cache
def _no_appends(rows: int, device: torch.device) -> Tensor:
    return torch.zeros(rows, dtype=torch.bool, device=device)


def _input_embeds(rows: List[PlannedRow], image_rows: ImageRows, device: torch.device) -> InputEmbeds:
    places, parts, start = list[int](), list[Tensor](), 0
    for row in rows:
        for image in row.images:
            places += range(start + image.token, start + image.token + image.length)
            parts.append(image_rows(image.digest)[image.first:image.first + image.length])
        start += len(row.tokens)
    return InputEmbeds(upload(array("q", places), torch.int64, device), torch.cat(parts))


def with_adapters(batch: Batch, rows: List[PlannedRow], adapters: Mapping[str, Adapter],
                  memory: InputBatch | None = None) -> Batch:
    """Returns the batch of these rows with their adapters added. adapters: by identity. memory: as in `build`."""
    if not any(row.adapter for row in rows):
        if memory:
            memory.drop_adapters()
        return batch
    places, numbers = {identity: place for place, identity in enumerate(adapters)}, array("q")
    for row in rows:
        numbers.extend([places[row.adapter] if row.adapter else -1] * len(row.tokens))
    if memory and batch.kept is not None:
        return memory.adapted(batch, numbers, tuple(adapters.values()))
    found = BatchAdapters(upload(numbers, torch.int64, batch.ids.device), tuple(adapters.values()))
    return replace(batch, adapters=found, memo={}, kept=None)


# Batches of buckets


def has_bucket(plan: StepPlan, verified: bool = False) -> bool:
    """Returns True if the step decodes in a bucket: either the host knows all tokens, or the device takes all of them
    from the step in flight. verified: as in `decodes`."""
    rows = plan.rows
    unknown = sum(row.drawn is not None for row in rows)
    if not unknown:
        return decodes(plan, verified)
    # few rows with tokens in delta logs have no bucket for unknown tokens
    return unknown == len(rows) and (unknown > FEW_ROWS or not any(map(_uses_delta_log, rows)))


def decodes(plan: StepPlan, verified: bool = False) -> bool:
    """Returns True if every row has one token and asks for its logits and nothing else. verified: rows of steps with
    more than FEW_ROWS rows may use delta logs."""
    deferred = verified and len(plan.rows) > FEW_ROWS
    return all(len(row.tokens) == 1 and row.logits == 1 and not row.checkpoints and not row.images
               and (deferred or not _uses_delta_log(row)) for row in plan.rows)


def verifies(plan: StepPlan) -> bool:
    """Returns True if every row either verifies drafts (it asks for all logits and appends to a delta log) or has one
    token, and asks for nothing else."""
    return len(plan.rows) <= FEW_ROWS and all(
        row.logits == len(row.tokens) <= RING and not row.checkpoints and (row.append or len(row.tokens) == 1)
        for row in plan.rows)


def _uses_delta_log(row: PlannedRow) -> bool:
    return row.append or row.base not in (None, row.done)


def decoding(plan: StepPlan, device: torch.device, drawn: Tensor | None = None, memory: InputBatch | None = None,
             hidden: bool = False, entries: Mapping[str, int] | None = None) -> Batch:
    """Returns the batch of a plan that `decodes`, in its bucket. Padding rows repeat the last row, without its adapter.
    The batch is valid until the next step of the bucket. entries: as in `decoding_adapted`."""
    rows, real = plan.rows, len(plan.rows)
    columns, size = _columns(rows), power_of_two(real)
    pages = decode_pages(max([len(row.pages) for row in rows]))
    deferred = any(map(_uses_delta_log, rows))
    values = {name: _filled(column, size) for name, column in columns.items()}
    values["count"] = [real]
    values["positions"] = _filled_axes(_rotary(rows, columns["positions"]), size)
    values["starts"] = list(range(size + 1))
    values["logit_tokens"] = _filled(range(real), size)
    own = [entries[row.adapter] if entries and row.adapter else -1 for row in rows]
    values["adapter_entries"] = [*own, *[-1] * (size - real)]
    bucket = (memory or InputBatch()).bucket((size, pages, size if deferred else None), device)
    draws = bucket.write(values, rows)
    draws[:] = values["ids"]
    bucket.upload.send(drawn)
    return bucket.batch(Layout((1,) * real, (pages * PAGE,) * real, real, real, appends=deferred, hidden=hidden,
                               adapted=entries is not None))


def decoding_adapted(plan: StepPlan, device: torch.device, entries: Mapping[str, int], drawn: Tensor | None = None,
                     memory: InputBatch | None = None, hidden: bool = False) -> Batch | None:
    """As `decoding`; returns None unless few rows decode, at least one of them with an adapter. entries: the entries of
    adapters in the device's table, by their identities."""
    used = {row.adapter for row in plan.rows if row.adapter}
    if not used or not used <= entries.keys() or len(plan.rows) > FEW_ROWS or not has_bucket(plan):
        return None
    unknown = any(row.drawn is not None for row in plan.rows)
    return decoding(plan, device, drawn if unknown else None, memory, hidden, entries)


def verifying(plan: StepPlan, device: torch.device, memory: InputBatch | None = None, hidden: bool = False,
              drawn: DeviceTokens | None = None) -> Batch:
    """Returns the batch of a plan that `verifies`, in its bucket. Padding rows have no tokens. The batch is valid until
    the next step of the bucket. drawn: as in `build`."""
    rows, real = plan.rows, len(plan.rows)
    columns, count = _columns(rows), power_of_two(real)
    tokens = len(columns["ids"])
    size, pages = power_of_two(max(tokens, count)), draft_pages(max(len(row.pages) for row in rows))
    values = {name: _filled(column, count) for name, column in columns.items()}
    values["count"] = [real]
    values["starts"] = _filled(columns["starts"], count + 1)
    zeros = (0,) * (size - tokens)
    values["ids"] = [*columns["ids"], *zeros]
    values["store"] = [*columns["store"], *zeros]
    values["positions"] = _filled_axes([[*axis, *zeros] for axis in _rotary(rows, columns["positions"])], size)
    values["logit_tokens"] = list(range(size))
    bucket = (memory or InputBatch()).bucket((count, pages, size), device)
    draws = bucket.write(values, rows)
    if drawn:
        draws[:] = _filled(drawn.places, size)
    bucket.upload.send(drawn.numbers if drawn else None)
    chunks = tuple([len(row.tokens) for row in rows])
    batch = bucket.batch(Layout(chunks, (pages * PAGE,) * real, chunks.count(1), tokens, appends=True, hidden=hidden))
    if drawn and any(row.accepts for row in rows):
        bucket.move(batch, drawn.numbers)
    return batch


def _filled(column: List[int], size: int) -> list[int]:
    """Returns a column padded to `size` with its last integer."""
    return [*column, *[column[-1]] * (size - len(column))]


def _filled_axes(axes: List[List[int]], size: int) -> list[int]:
    return [position for axis in axes for position in _filled(axis, size)]


def step_of(padded: Padded, layout: Layout | None = None) -> Batch:
    """Returns a batch of views of a bucket's integers. layout: the layout of the real rows, for a batch without padding
    rows; None: the batch has all rows."""
    whole, rows, pages = layout is None, padded.rows, padded.pages
    size = rows if padded.tokens is None else padded.tokens
    if layout is None:
        chunks = (1,) * (rows - 1) + (size - rows + 1,)
        layout = Layout(chunks, (pages * PAGE,) * rows, rows - (size > rows), size, appends=padded.tokens is not None,
                        hidden=padded.hidden, adapted=padded.adapted)
    extents, kind = Extents(rows, size, pages), DECODE if padded.tokens is None else VERIFY
    columns = kind.views(padded.numbers, extents)
    real, tokens, none = layout.rows, layout.tokens, padded.numbers[:0]
    positions, done = columns["positions"].view(3, size), columns["done"][:real]
    deferred: dict[str, Any]
    if padded.tokens is None:
        deferred = {"base": done, "delta_log": done, "append": _no_appends(rows, padded.numbers.device)[:real]}
        wanted = columns["starts"]
    else:
        deferred = {name: columns[name][:real] for name in ("base", "delta_log", "append")}
        wanted = columns["logit_tokens"]
    return Batch(
        layout=layout, ids=columns["ids"][:tokens], positions=positions if whole else positions[:, :tokens],
        starts=columns["starts"][:real + 1], done=done, pages=columns["pages"].view(rows, pages)[:real],
        store=columns["store"][:tokens], source=columns["source"][:real], target=columns["target"][:real],
        emit_row=none, emit_length=none, emit_slot=none, logit_tokens=wanted[:tokens],
        adapter_entries=columns["adapter_entries"][:tokens] if layout.adapted else None,
        count=columns["count"] if whole else None, padded=None if whole else padded, **deferred)


# Memory that is reused from step to step


class InputBatch:
    """Memory that is reused from one step's batch to the next: the page table; on a GPU the integers of each bucket; on
    a CPU the last batch itself, which the next batch of the same shape overwrites."""

    def __init__(self, numbers: BucketNumbers | None = None) -> None:
        """numbers: the device memory of the buckets, if it is shared with CUDA graphs."""
        self.pages = PageTable()
        self._shape: _Shape | None = None
        self._batch: Batch | None = None
        self._numbers, self._appends = array("q"), bytearray()
        self._plain: Batch | None = None
        self._adapted: Batch | None = None
        self._places = array("q")
        self._bucket_numbers = {} if numbers is None else numbers
        self._buckets: dict[BucketKey, _Bucket] = {}

    def bucket(self, key: BucketKey, device: torch.device) -> _Bucket:
        found = self._buckets.get(key)
        if found is None:
            found = self._buckets[key] = _Bucket(key, self._bucket_numbers, self.pages, device)
        return found

    def batch(self, shape: _Shape, numbers: array[int], appends: List[bool], pages: Tensor) -> Batch:
        """Returns the batch of these integers on the host; reuses the last batch if shape and page table are equal."""
        if self._batch and self._batch.pages is pages and shape == self._shape:
            self._numbers[:], self._appends[:] = numbers, bytes(appends)
            self._batch.memo.clear()
        else:
            self._shape, self._numbers, self._appends = shape, numbers, bytearray(appends)
            self._batch = _ragged_batch(shape, torch.frombuffer(numbers, dtype=torch.int64),
                                        torch.frombuffer(self._appends, dtype=torch.bool), pages, {})
        return self._batch


    def drop_adapters(self) -> None:
        """Drops the last batch with adapters, because these may have been unloaded."""
        self._plain = self._adapted = None

    def adapted(self, batch: Batch, numbers: array[int], adapters: tuple[Adapter, ...]) -> Batch:
        """Returns a batch on the host with adapters added; reuses the last one if batch and adapters are the same.
        numbers: as in `BatchAdapters`."""
        known = self._adapted.adapters if self._adapted else None
        if self._adapted and known and batch is self._plain and known.adapters == adapters:
            self._places[:] = numbers
            self._adapted.memo.clear()
        else:
            self._plain, self._places = batch, numbers
            found = BatchAdapters(torch.frombuffer(numbers, dtype=torch.int64), adapters)
            self._adapted = replace(batch, adapters=found, memo={}, kept={})
        return self._adapted


class _Bucket:
    """The memory of a bucket's integers, and the bucket's batches by layout: their tensors are views of this memory."""

    def __init__(self, key: BucketKey, known: BucketNumbers, pages: PageTable, device: torch.device) -> None:
        self._key, self._pages = key, pages
        rows, width, tokens = key
        self._columns = DECODE if tokens is None else VERIFY
        self._extents = Extents(rows, tokens or rows, width)
        if key not in known:
            known[key] = torch.zeros(self._columns.size(self._extents), dtype=torch.int64, device=device)
        self._draws = self._columns.offset("draws", self._extents)
        self._table = self._columns.offset("pages", self._extents)
        self.upload = HostToDeviceBuffer(known[key], self._extents.tokens)
        self._batches: dict[Layout, Batch] = {}
        self._move = mover(self.upload.numbers, rows, width, self._extents.tokens)

    def write(self, columns: dict[str, list[int]], rows: List[PlannedRow]) -> Any:
        """Writes a step's columns and page table on the host. Returns the column `draws`."""
        host, numbers = self.upload.begin(), self._columns.pack(columns, self._extents)
        host[:self._table] = numbers
        self._pages.write(rows, host[self._table:self._draws].reshape(self._extents.rows, self._extents.pages))
        return host[self._draws:]

    def batch(self, layout: Layout) -> Batch:
        found = self._batches.get(layout)
        if found is None:
            if len(self._batches) >= _LAYOUTS:
                self._batches.clear()
            padded = Padded(self.upload.numbers[:self._draws], *self._key, layout.hidden, layout.adapted)
            found = self._batches[layout] = step_of(padded, layout)
        found.memo.clear()
        return found

    def move(self, batch: Batch, drawn: Tensor) -> None:
        """Moves the rows of the batch that was just sent to the positions that only the device knows: in `drawn` [M]
        int64 the position of each row's first token follows the token."""
        if self._move:
            return self._move(drawn)
        device = drawn.device
        draws, starts = self.upload.numbers[self._draws:], batch.starts[:-1]
        more = drawn[draws[starts] + 1] - batch.done
        batch.done.add_(more)
        row = torch.arange(batch.layout.rows, device=device)
        row = row.repeat_interleave(torch.tensor(batch.layout.chunks, device=device))
        batch.positions.add_(more[row])
        index = batch.done[row] + torch.arange(batch.layout.tokens, device=device) - starts[row]
        batch.store.copy_(batch.pages[row, index // PAGE] * PAGE + index % PAGE)


class PageTable:
    """The page table of successive steps. Each step writes only changes, so that planning does not become slower as
    contexts grow: a row's list of pages may become longer, its entries stay unless pages move."""

    def __init__(self) -> None:
        self._numbers, self._width = array("q"), 0
        self._tensor = self._rows = torch.zeros(0, 0, dtype=torch.int64)
        self._view: Any = self._tensor.numpy()
        self._lists: list[List[int]] = []
        self._written: list[int] = []
        self._versions: list[int] = []

    def write(self, rows: List[PlannedRow], into: Any) -> None:
        """Writes the table into an array [R or more, P] int64; rows beyond R get the pages of the last one."""
        self._update(rows, into.shape[1])
        into[:len(rows)] = self._view[:len(rows), :into.shape[1]]
        into[len(rows):] = self._view[len(rows) - 1, :into.shape[1]]

    def of(self, rows: List[PlannedRow], width: int) -> Tensor:
        """Returns the table [R, width or more] int64 on the host, valid until the next call. Returns the same tensor as
        the last call if the number of rows is the same and the pages fit."""
        self._update(rows, width)
        if len(rows) != len(self._rows):
            self._rows = self._tensor[:len(rows)]
        return self._rows

    def _update(self, rows: List[PlannedRow], width: int) -> None:
        if len(rows) > len(self._lists) or width > self._width:
            self._grow(power_of_two(max(len(rows), len(self._lists))), power_of_two(max(width, self._width)))
        for place, row in enumerate(rows):
            pages, start = row.pages, self._written[place]
            first, end = place * self._width, len(pages)
            version = pages.version if isinstance(pages, PageList) else 0
            if pages is not self._lists[place] or version != self._versions[place]:
                self._numbers[first:first + start] = array("q", bytes(8 * start))
                self._lists[place], self._versions[place], start = pages, version, 0
            if start < end:
                self._numbers[first + start:first + end] = array("q", pages[start:])
            self._written[place] = end

    def _grow(self, places: int, width: int) -> None:
        self._numbers, self._width = array("q", bytes(8 * places * width)), width
        self._tensor = torch.frombuffer(self._numbers, dtype=torch.int64).view(places, width)
        self._view = self._tensor.numpy()
        self._lists, self._written, self._rows = [()] * places, [0] * places, self._tensor[:0]
        self._versions = [0] * places


def power_of_two(number: int) -> int:
    """Returns the smallest power of two that is not less than `number`."""
    return 1 << (number - 1).bit_length()


def decode_pages(pages: int) -> int:
    """Returns the width of the page table in the decode bucket for rows of up to `pages` pages."""
    return power_of_two(max(MIN_PAGES, pages))


def draft_pages(pages: int) -> int:
    """Returns the width of the page table in the draft bucket for rows of up to `pages` pages: in steps of factor 4."""
    size = MIN_PAGES
    while size < pages:
        size *= 4
    return size
