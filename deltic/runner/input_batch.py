"""From a plan to the tensors of a step."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from collections.abc import Sequence as List
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.ops.cuda.staging import mover
from deltic.ops.types import PAGE, RING, Batch, InputEmbeds, Layout, Padded
from deltic.runner.upload import HostToDeviceBuffer, on_device, upload

RowsOf = Callable[[str], Tensor]
"""Gives the rows [tokens, H] float32 of a picture, by its digest, on the device."""
Numbers = dict[tuple[int, int, int | None], Tensor]
"""Where the integers of a bucket's steps lie on the device, by `Padded.bucket`, and as many more as it has rows."""

FEW_ROWS = 16
"""Rows of a step on a GPU up to which there may be drafts. With more, states are what takes the time: then tokens stay
in replay rings."""
_LAYOUTS = 64
"""Of a bucket's steps, whose batches are kept."""
_FEWEST_PAGES = 16
"""Pages of the smallest bucket."""


class PageTable:
    """The page table of one step after another, in which only what has changed is written: planning does not become
    slower as contexts grow. A list of pages may become longer, but what is in it stays."""

    def __init__(self) -> None:
        self._numbers, self._width = array("q"), 0
        self._tensor = self._rows = torch.zeros(0, 0, dtype=torch.int64)
        self._view: Any = self._tensor.numpy()
        self._lists: list[List[int]] = []
        self._written: list[int] = []

    def write(self, rows: List[PlannedRow], into: Any) -> None:
        """Write the table of these rows into an array [R or more, P] int64; the last one's pages to all that follow."""
        self._update(rows, into.shape[1])
        into[:len(rows)] = self._view[:len(rows), :into.shape[1]]
        into[len(rows):] = self._view[len(rows) - 1, :into.shape[1]]

    def of(self, rows: List[PlannedRow], width: int) -> Tensor:
        """[R, P] int64, on the host, of at least so many pages; valid until the next call. The same tensor as last
        time where it has room for the pages, and there are as many rows."""
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
            if pages is not self._lists[place]:
                self._numbers[first:first + start] = array("q", bytes(8 * start))
                self._lists[place], start = pages, 0
            if start < end:
                self._numbers[first + start:first + end] = array("q", pages[start:])
            self._written[place] = end

    def _grow(self, places: int, width: int) -> None:
        self._numbers, self._width = array("q", bytes(8 * places * width)), width
        self._tensor = torch.frombuffer(self._numbers, dtype=torch.int64).view(places, width)
        self._view = self._tensor.numpy()
        self._lists, self._written, self._rows = [()] * places, [0] * places, self._tensor[:0]


class _Bucket:
    """What the steps of a bucket share: the place of their integers, and batches by their layout, whose tensors are
    views of it. The last ones of those integers, one for each token, say where the device has tokens that are not
    known."""

    def __init__(self, numbers: Tensor, rows: int, pages: int, tokens: int) -> None:
        self.upload = HostToDeviceBuffer(numbers, tokens)
        self.numbers, self._shape = numbers[:len(numbers) - tokens], (rows, pages)
        self.batches: dict[Layout | int, Batch] = {}
        self._move = mover(self.upload.numbers, rows, pages, tokens)

    def move(self, batch: Batch, drawn: Tensor) -> None:
        """Have the rows of what was just sent, a batch with drafts, begin where the device has their first tokens, each
        of which has its position after it in `drawn` [M] int64."""
        if self._move:
            self._move(drawn)
        else:
            _move(batch, self.upload.numbers[len(self.numbers):], drawn)

    def write(self, numbers: array[int], rows: List[PlannedRow], pages: PageTable) -> Any:
        """Write a step's integers and the rows' pages. Returns the array of draws."""
        count, width = self._shape
        host, end = self.upload.begin(), len(numbers) + count * width
        host[:len(numbers)] = numbers
        pages.write(rows, host[len(numbers):end].reshape(count, width))
        return host[end:]


class BatchMemory:
    """What stays from one step's batch to the next: the page table, on a GPU where the integers of a bucket's steps
    lie, on a CPU the last batch itself, whose memory one of the same shape is written into."""

    def __init__(self, numbers: Numbers | None = None) -> None:
        """numbers: of the buckets, where others know of them too."""
        self.pages = PageTable()
        self._shape: _Shape | None = None
        self._batch: Batch | None = None
        self._numbers, self._appends = array("q"), bytearray()
        self._places = {} if numbers is None else numbers
        self._buckets: dict[tuple[int, int, int | None], _Bucket] = {}

    def bucket(self, rows: int, pages: int, tokens: int | None, size: int, device: torch.device) -> _Bucket:
        """That of these rows, pages and tokens, which takes so many integers."""
        key = rows, pages, tokens
        found = self._buckets.get(key)
        if found is None:
            numbers, draws = self._places.get(key), tokens or rows
            if numbers is None:
                numbers = self._places[key] = torch.zeros(size + draws, dtype=torch.int64, device=device)
            found = self._buckets[key] = _Bucket(numbers, rows, pages, draws)
        return found

    def batch(self, shape: _Shape, numbers: array[int], appends: List[bool], pages: Tensor) -> Batch:
        """The batch of these numbers, on the host; valid until the next call."""
        if self._batch and self._batch.pages is pages and shape == self._shape:
            self._numbers[:], self._appends[:] = numbers, bytes(appends)
            self._batch.memo.clear()
        else:
            self._shape, self._numbers, self._appends = shape, numbers, bytearray(appends)
            self._batch = _batch(shape, torch.frombuffer(numbers, dtype=torch.int64),
                                 torch.frombuffer(self._appends, dtype=torch.bool), pages, {})
        return self._batch


class Promised(NamedTuple):
    """Where the tokens of a step are: places of all of them, row by row, among numbers [N] int64 on the device."""

    numbers: Tensor
    places: List[int]


class _Shape(NamedTuple):
    """All of a batch but its numbers. behind: some state is behind its cursor. span: as in `Batch`."""

    layout: Layout
    behind: bool
    span: tuple[int, int] | None


def build(plan: StepPlan, device: torch.device, all_logits: bool = False, hidden: bool = False,
          drawn: Tensor | Promised | None = None, memory: BatchMemory | None = None, rows_of: RowsOf | None = None,
          verified: bool = False) -> Batch:
    """Lay out the plan's rows as one ragged batch; one host-to-device copy, which waits for nothing on the device.

    all_logits: want the logits of every token, not only where the rows say so. hidden: want all hidden states. drawn
    int64, on the device: what the step in flight has drawn, of which the first rows take their tokens, as far as they
    say so; of rows with drafts that are not known: where the device has them, and with `PlannedRow.accepts` their
    cursors. memory: that of the steps before; on a CPU the batch is valid until the next one is built with it. rows_of:
    gives what stands in for embeddings of pictures' tokens. verified: `Model.verifies`.
    """
    rows = plan.rows
    if isinstance(drawn, Promised):
        return verifying(plan, device, memory, hidden, drawn)
    unknown = sum(row.drawn is not None for row in rows)
    if device.type == "cuda" and (verified or not hidden) and has_bucket(plan, verified):
        return decoding(plan, device, drawn if unknown else None, memory, hidden)
    if device.type == "cuda" and verified and drawn is None and verifies(plan):
        return verifying(plan, device, memory, hidden)
    shape, numbers = _numbers(rows, all_logits, hidden, exact=device.type != "cpu")
    appends = [row.append for row in rows]
    if device.type == "cpu" and memory:
        batch = memory.batch(shape, numbers, appends, memory.pages.of(rows, max([len(row.pages) for row in rows])))
    else:
        table = (memory.pages if memory else PageTable()).of(rows, max([len(row.pages) for row in rows]))
        append = on_device(torch.tensor(appends), device) if shape.layout.appends else _no_appends(len(rows), device)
        batch = _batch(shape, upload(numbers, torch.int64, device), append, on_device(table, device))
    if rows_of is not None and any(row.images for row in rows):
        batch = replace(batch, input_embeds=_given(rows, rows_of, device), memo={}, kept=None)
    if drawn is not None and unknown:
        _take_drawn(batch.ids[:unknown], drawn)
    return batch


def _given(rows: List[PlannedRow], rows_of: RowsOf, device: torch.device) -> InputEmbeds:
    places, parts, start = list[int](), list[Tensor](), 0
    for row in rows:
        for seen in row.images:
            places += range(start + seen.token, start + seen.token + seen.length)
            parts.append(rows_of(seen.digest)[seen.first:seen.first + seen.length])
        start += len(row.tokens)
    return InputEmbeds(upload(array("q", places), torch.int64, device), torch.cat(parts))


def _numbers(rows: List[PlannedRow], all_logits: bool, hidden: bool, exact: bool) -> tuple[_Shape, array[int]]:
    """The rows' numbers in the order in which `_batch` takes them. exact: give each row's context as it is; else
    rounded up, so that steps one after another have one shape."""
    ids, positions, store, starts, wanted = list[int](), list[int](), list[int](), [0], list[int]()
    for row in rows:
        count, first = len(row.tokens), row.done
        ids += _ids(row)
        if count == 1:
            positions.append(first)
            store.append(_flat(row, first))
        else:
            positions += range(first, first + count)
            for places in _places(row):
                store += places
        end = starts[-1] + count
        starts.append(end)
        wanted += range(end - (count if all_logits else row.logits), end)
    chunks = tuple([len(row.tokens) for row in rows])
    done, slots = [row.done for row in rows], [row.slot for row in rows]
    base = [row.done if row.base is None else row.base for row in rows]
    targets = [row.slot if row.target is None else row.target for row in rows]
    emits = [(index, *emit) for index, row in enumerate(rows) for emit in row.checkpoints]
    if exact:
        contexts = tuple([first + count for first, count in zip(done, chunks, strict=True)])
    else:
        contexts = (PAGE * power_of_two(max(_FEWEST_PAGES, *[len(row.pages) for row in rows])),) * len(rows)
    singles = chunks.count(1)
    replays = any(row.base not in (None, row.done) and len(row.tokens) > 1 for row in rows)
    layout = Layout(chunks, contexts, singles, len(wanted), len(emits), any(row.append for row in rows), hidden,
                    replays)
    numbers = array("q", ids)
    for values in (*_rotary(rows, positions), starts, done, base, store, slots, targets,
                   [row.delta_log for row in rows], wanted, *zip(*emits, strict=True)):
        numbers.extend(values)
    return _Shape(layout, base != done, _span(slots[:singles], targets[:singles])), numbers


def _batch(shape: _Shape, numbers: Tensor, append: Tensor, pages: Tensor, kept: dict[Any, Any] | None = None) -> Batch:
    layout = shape.layout
    rows, tokens, emits = layout.rows, layout.tokens, layout.checkpoints
    (ids, positions, starts, done, base, store, source, target, ring, logit_tokens, emit_row, emit_length,
     emit_slot) = numbers.split((tokens, 3 * tokens, rows + 1, rows, rows, tokens, rows, rows, rows, layout.logits,
                                 emits, emits, emits))
    return Batch(
        layout=layout, ids=ids, positions=positions.view(3, -1), starts=starts, done=done, pages=pages, store=store,
        source=source, target=target, base=base if shape.behind else done, delta_log=ring, append=append,
        emit_row=emit_row, emit_length=emit_length, emit_slot=emit_slot, logit_tokens=logit_tokens, span=shape.span,
        kept=kept)


def has_bucket(plan: StepPlan, verified: bool = False) -> bool:
    """Whether the step's integers are those of a bucket: it decodes, and either all tokens are known or none is, as the
    device takes all from the step in flight or leaves all as they are. verified: as of `decodes`."""
    rows = plan.rows
    unknown = sum(row.drawn is not None for row in rows)
    if not unknown:
        return decodes(plan, verified)
    # of few rows, those with tokens in replay rings have no bucket for tokens that are not known
    return unknown == len(rows) and (unknown > FEW_ROWS or not any(map(_over_ring, rows)))


def decodes(plan: StepPlan, verified: bool = False) -> bool:
    """Whether every row takes one token whose logits are wanted, and nothing else: then the step has a bucket.
    verified: of many rows, some may have tokens in replay rings, or leave this one there."""
    over_rings = verified and len(plan.rows) > FEW_ROWS
    return all(len(row.tokens) == 1 and row.logits == 1 and not row.checkpoints and not row.images
               and (over_rings or not _over_ring(row)) for row in plan.rows)


def _over_ring(row: PlannedRow) -> bool:
    return row.append or row.base not in (None, row.done)


def decoding(plan: StepPlan, device: torch.device, drawn: Tensor | None = None, memory: BatchMemory | None = None,
             hidden: bool = False) -> Batch:
    """A plan that `decodes`, with its bucket: both are views of one upload, valid until the next step of the bucket.
    drawn, memory, hidden: as in `build`."""
    rows, real, memory = plan.rows, len(plan.rows), memory or BatchMemory()
    count, pages = power_of_two(real), power_of_two(max(_FEWEST_PAGES, max([len(row.pages) for row in rows])))
    over_rings = any(map(_over_ring, rows))
    tokens, columns = (count, 13) if over_rings else (None, 9)
    bucket = memory.bucket(count, pages, tokens, 2 + columns * count + count * pages, device)
    done, slots = [row.done for row in rows], [row.slot for row in rows]
    targets = [row.slot if row.target is None else row.target for row in rows]
    ids = [row.tokens[0] if row.drawn is None else row.drawn for row in rows]
    fill, numbers = count - real, array("q", (real,))
    for column in (ids, *_rotary(rows, done)):
        numbers.extend(column)
        numbers.extend((column[-1],) * fill)
    numbers.extend(range(count + 1))
    store = [_flat(row, row.done) for row in rows]
    following = (
        (
            done,
            slots,
            targets,
            [row.done if row.base is None else row.base for row in rows],
            [row.delta_log for row in rows],
            [int(row.append) for row in rows],
            store,
            range(real),
        )
        if over_rings
        else (done, store, slots, targets)
    )
    for column in following:
        numbers.extend(column)
        numbers.extend((column[-1],) * fill)
    draws = bucket.write(numbers, rows, memory.pages)
    draws[:] = numbers[1:1 + count]
    bucket.upload.send(drawn)
    batch = bucket.batches.get(real)
    if batch is None or batch.layout.hidden != hidden:
        layout = Layout((1,) * real, (pages * PAGE,) * real, real, real, appends=over_rings, hidden=hidden)
        batch = bucket.batches[real] = step_of(Padded(bucket.numbers, count, pages, tokens, hidden), layout)
    batch.memo.clear()
    return batch


def verifies(plan: StepPlan) -> bool:
    """Whether every row takes a few tokens whose logits are all wanted, drafts among them that go to a replay ring, or
    one token; and nothing else."""
    return len(plan.rows) <= FEW_ROWS and all(
        row.logits == len(row.tokens) <= RING and not row.checkpoints and (row.append or len(row.tokens) == 1)
        for row in plan.rows)


def verifying(plan: StepPlan, device: torch.device, memory: BatchMemory | None = None, hidden: bool = False,
              promised: Promised | None = None) -> Batch:
    """A plan that `verifies`, with its bucket: both are views of one upload, valid until the next step of the bucket.
    memory, hidden, promised: as in `build`."""
    rows, real = plan.rows, len(plan.rows)
    tokens, count = [token for row in rows for token in row.tokens], power_of_two(real)
    size, pages = power_of_two(max(len(tokens), count)), draft_pages(max(len(row.pages) for row in rows))
    fill, starts, store = (0,) * (size - len(tokens)), [0], list[int]()
    places = [place for row in rows for place in range(row.done, row.done + len(row.tokens))]
    for row in rows:
        starts.append(starts[-1] + len(row.tokens))
        store += [_flat(row, row.done + index) for index in range(len(row.tokens))]
    numbers = array("q", (real,))
    for values in (tokens, *_rotary([*rows], places)):
        numbers.extend(values)
        numbers.extend(fill)
    numbers.extend(starts)
    numbers.extend((len(tokens),) * (count - real))
    for column in ([row.done for row in rows], [row.slot for row in rows],
                   [row.slot if row.target is None else row.target for row in rows],
                   [row.done if row.base is None else row.base for row in rows], [row.delta_log for row in rows],
                   [int(row.append) for row in rows]):
        numbers.extend(column)
        numbers.extend(column[-1:] * (count - real))
    numbers.extend(store)
    numbers.extend(fill)
    numbers.extend(range(size))
    chunks = tuple([len(row.tokens) for row in rows])
    layout = Layout(chunks, (pages * PAGE,) * real, chunks.count(1), len(tokens), appends=True, hidden=hidden)
    memory = memory or BatchMemory()
    bucket = memory.bucket(count, pages, size, len(numbers) + count * pages, device)
    draws = bucket.write(numbers, rows, memory.pages)
    if promised:
        draws[:len(tokens)], draws[len(tokens):] = promised.places, promised.places[-1]
    bucket.upload.send(promised.numbers if promised else None)
    batch = bucket.batches.get(layout)
    if batch is None:
        if len(bucket.batches) >= _LAYOUTS:
            bucket.batches.clear()
        batch = bucket.batches[layout] = step_of(Padded(bucket.numbers, count, pages, size, hidden), layout)
    batch.memo.clear()
    if promised and any(row.accepts for row in rows):
        bucket.move(batch, promised.numbers)
    return batch


def _move(batch: Batch, draws: Tensor, drawn: Tensor) -> None:
    """As `_Bucket.move`. draws: where each token is in `drawn`."""
    starts, chunks = batch.starts[:-1], torch.tensor(batch.layout.chunks, device=drawn.device)
    more = drawn[draws[starts] + 1] - batch.done
    batch.done.add_(more)
    row = torch.arange(batch.layout.rows, device=drawn.device).repeat_interleave(chunks)
    batch.positions.add_(more[row])
    index = batch.done[row] + torch.arange(batch.layout.tokens, device=drawn.device) - starts[row]
    batch.store.copy_(batch.pages[row, index // PAGE] * PAGE + index % PAGE)


def buckets(max_rows: int, max_context: int) -> Iterator[tuple[int, int]]:
    """Rows and pages of all buckets that steps may have, the largest first."""
    rows, most = bucket_of(max_rows, max_context)
    while rows:
        pages = most
        while pages >= _FEWEST_PAGES:
            yield rows, pages
            pages //= 2
        rows //= 2


def bucket_of(rows: int, context: int) -> tuple[int, int]:
    """Rows and pages of the bucket of steps that decode with so many rows, of which one has so many tokens."""
    return power_of_two(rows), power_of_two(max(_FEWEST_PAGES, -(-context // PAGE)))


def draft_buckets(max_rows: int, max_context: int) -> Iterator[tuple[int, int]]:
    """As `buckets`, of steps with drafts, which have fewer."""
    rows, most = power_of_two(max_rows), draft_pages(-(-max_context // PAGE))
    while rows:
        pages = most
        while pages >= _FEWEST_PAGES:
            yield rows, pages
            pages //= 4
        rows //= 2


def draft_pages(pages: int) -> int:
    """Pages of the bucket of a step with drafts."""
    size = _FEWEST_PAGES
    while size < pages:
        size *= 4
    return size


def step_of(padded: Padded, layout: Layout | None = None, span: tuple[int, int] | None = None) -> Batch:
    """The batch whose tensors are views of a bucket's numbers. layout: of the real rows alone, which then know their
    bucket; None: of all rows."""
    whole, rows, pages, numbers = layout is None, padded.rows, padded.pages, padded.numbers
    size, extra = (rows, 0) if padded.tokens is None else (padded.tokens, rows)
    if layout is None:
        chunks = (1,) * (rows - 1) + (size - rows + 1,)
        layout = Layout(chunks, (pages * PAGE,) * rows, rows - (size > rows), size, appends=padded.tokens is not None,
                        hidden=padded.hidden)
    real, tokens = layout.rows, layout.tokens
    if padded.tokens is None:
        sizes = (1, rows, 3 * rows, rows + 1, rows, rows, rows, rows, rows * pages)
        count, ids, positions, starts, done, store, source, target, table = numbers.split(sizes)
        base, ring, append, wanted = done, done, _no_appends(rows, numbers.device), starts
    else:
        count, ids, positions, starts, done, source, target, base, ring, append, store, wanted, table = numbers.split(
            (1, size, 3 * size, rows + 1, *(extra,) * 6, size, size, rows * pages))
    none, positions, behind = numbers[:0], positions.view(3, size), base is not done
    done = done[:real]
    return Batch(
        layout=layout, ids=ids[:tokens], positions=positions if whole else positions[:, :tokens],
        starts=starts[:real + 1], done=done, pages=table.view(rows, pages)[:real], store=store[:tokens],
        source=source[:real], target=target[:real], base=base[:real] if behind else done,
        delta_log=ring[:real], append=append[:real], emit_row=none, emit_length=none, emit_slot=none,
        logit_tokens=wanted[:tokens], span=span, count=count if whole else None, padded=None if whole else padded)


def power_of_two(number: int) -> int:
    """The smallest one that is not less."""
    return 1 << (number - 1).bit_length()


@cache
def _no_appends(rows: int, device: torch.device) -> Tensor:
    return torch.zeros(rows, dtype=torch.bool, device=device)


def _flat(row: PlannedRow, index: int) -> int:
    return row.pages[index // PAGE] * PAGE + index % PAGE


def _places(row: PlannedRow) -> Iterator[range]:
    """`_flat` of all the row's tokens, page by page."""
    index, end = row.done, row.done + len(row.tokens)
    while index < end:
        count = min(PAGE - index % PAGE, end - index)
        yield range(_flat(row, index), _flat(row, index) + count)
        index += count


def _span(sources: list[int], targets: list[int]) -> tuple[int, int] | None:
    if sources and sources == targets == list(range(sources[0], sources[0] + len(sources))):
        return sources[0], sources[0] + len(sources)
    return None


def _rotary(rows: List[PlannedRow], places: List[int]) -> List[List[int]]:
    """The tokens' rotary positions, axis by axis. places: their cache indices."""
    if {row.rotary for row in rows} == {0}:
        return [places] * 3
    return [[position for row in rows for position in _axis(row, axis)] for axis in range(3)]


def _axis(row: PlannedRow, axis: int) -> List[int]:
    if isinstance(row.rotary, int):
        return range(row.done + row.rotary, row.done + row.rotary + len(row.tokens))
    return row.rotary[axis]


def _ids(row: PlannedRow) -> tuple[int, ...]:
    """The row's tokens; instead of one that is not known the number of its draw."""
    return row.tokens if row.drawn is None else (row.drawn,)


def _take_drawn(ids: Tensor, drawn: Tensor) -> None:
    """Replace numbers of draws by what they have given."""
    ids.copy_(drawn[ids])
