"""From a plan to the tensors of a step."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as List
from functools import cache
from itertools import chain

import torch
from torch import Tensor

from deltic.engine.scheduler import Plan, Row
from deltic.ops.records import PAGE, Batch, Layout, Padded

_FEWEST_PAGES = 16
"""Pages of the smallest bucket."""


class PageTable:
    """The page table of one step after another, in which only what has changed is written: planning does not become
    slower as contexts grow. A list of pages may become longer, but what is in it stays."""

    def __init__(self) -> None:
        self._numbers = torch.zeros(0, 0, dtype=torch.int64)
        self._lists: list[List[int]] = []
        self._written: list[int] = []

    def of(self, rows: List[Row], width: int) -> Tensor:
        """[R, P] int64, on the host, of at least so many pages; valid until the next call."""
        places, most = self._numbers.shape
        if len(rows) > places or width > most:
            places, most = power_of_two(max(len(rows), places)), power_of_two(max(width, most))
            self._numbers = torch.zeros(places, most, dtype=torch.int64)
            self._lists, self._written = [()] * places, [0] * places
        for place, row in enumerate(rows):
            pages, start = row.pages, self._written[place]
            if pages is not self._lists[place]:
                self._numbers[place, :start], start = 0, 0
            if start < len(pages):
                self._numbers[place, start:len(pages)] = torch.frombuffer(array("q", pages[start:]), dtype=torch.int64)
            self._lists[place], self._written[place] = pages, len(pages)
        return self._numbers[:len(rows)]


def build(plan: Plan, device: torch.device, all_logits: bool = False, hidden: bool = False,
          drawn: Tensor | None = None, table: PageTable | None = None) -> Batch:
    """Lay out the plan's rows as one ragged batch; one host-to-device copy, which waits for nothing on the device.

    all_logits: want the logits of every token, not only where the rows say so. hidden: want all hidden states. drawn
    int64, on the device: what the step in flight has drawn; then every row takes its token from there. table: that of
    the steps before; on a CPU the batch is valid until the next one is built with it.
    """
    rows, table = plan.rows, table or PageTable()
    if device.type == "cuda" and not hidden and decodes(plan):
        return decoding(plan, device, drawn, table)
    chunks = tuple(len(row.tokens) for row in rows)
    starts = [0]
    for chunk in chunks:
        starts.append(starts[-1] + chunk)
    wanted = list(range(starts[-1])) if all_logits else [token for row, end in zip(rows, starts[1:], strict=True)
                                                         for token in range(end - row.logits, end)]
    pages = on_device(table.of(rows, max([len(row.pages) for row in rows])), device)
    sources = [row.slot for row in rows]
    targets = [row.slot if row.target is None else row.target for row in rows]
    done = [row.done for row in rows]
    fields = _upload(device,
                     ids=chain.from_iterable(map(_ids, rows)), positions=_rotary(rows), starts=starts, done=done,
                     store=chain.from_iterable(places for row in rows for places in _places(row)),
                     sources=sources, targets=targets, logit_tokens=wanted, rings=[row.ring for row in rows],
                     base=[row.done if row.base is None else row.base for row in rows],
                     emit_row=[index for index, row in enumerate(rows) for _ in row.emits],
                     emit_length=[position for row in rows for position, _ in row.emits],
                     emit_slot=[slot for row in rows for _, slot in row.emits])
    singles = sum(chunk == 1 for chunk in chunks)
    appends = [row.append for row in rows]
    if drawn is not None:
        _take_drawn(fields["ids"], drawn)
    behind = any(row.base not in (None, row.done) for row in rows)
    layout = Layout(chunks, tuple(d + c for d, c in zip(done, chunks, strict=True)), singles, len(wanted),
                    len(fields["emit_row"]), any(appends), hidden)
    return Batch(
        layout=layout, ids=fields["ids"], positions=fields["positions"].view(3, -1), starts=fields["starts"],
        done=fields["done"], pages=pages, store=fields["store"], source=fields["sources"],
        target=fields["targets"], base=fields["base" if behind else "done"], ring=fields["rings"],
        append=torch.tensor(appends, device=device) if layout.appends else _no_appends(len(rows), device),
        emit_row=fields["emit_row"], emit_length=fields["emit_length"], emit_slot=fields["emit_slot"],
        logit_tokens=fields["logit_tokens"],
        span=_span(sources[:singles], targets[:singles]))


def decodes(plan: Plan) -> bool:
    """Whether every row takes one token whose logits are wanted, and nothing else: then the step has a bucket."""
    return all(len(row.tokens) == 1 and row.logits == 1 and not row.emits and not row.append
               and row.base in (None, row.done) for row in plan.rows)


def decoding(plan: Plan, device: torch.device, drawn: Tensor | None = None, table: PageTable | None = None) -> Batch:
    """A plan that `decodes`, with its bucket: both are views of one upload. drawn, table: as in `build`."""
    rows = [*plan.rows]
    real, pages = len(rows), power_of_two(max(_FEWEST_PAGES, *(len(row.pages) for row in rows)))
    rows += [rows[-1]] * (power_of_two(real) - real)
    done = [row.done for row in rows]
    slots = [row.slot for row in rows]
    targets = [row.slot if row.target is None else row.target for row in rows]
    numbers = array("q", (real,))
    for values in ([_ids(row)[0] for row in rows], _rotary(rows), range(len(rows) + 1), done,
                   [_flat(row, row.done) for row in rows], slots, targets):
        numbers.extend(values)
    known = (table or PageTable()).of(plan.rows, pages)[:, :pages]
    numbers.extend((0,) * (len(rows) * pages))
    host = torch.frombuffer(numbers, dtype=torch.int64)
    below = host[-len(rows) * pages:].view(len(rows), pages)
    below[:real], below[real:] = known, known[-1]
    padded = Padded(on_device(host, device), len(rows), pages)
    if drawn is not None:
        _take_drawn(padded.numbers[1:1 + len(rows)], drawn)
    layout = Layout((1,) * real, tuple(row.done + 1 for row in plan.rows), real, real)
    return step_of(padded, layout, _span(slots[:real], targets[:real]))


def buckets(max_rows: int, max_context: int) -> Iterator[tuple[int, int]]:
    """Rows and pages of all buckets that steps may have, the largest first."""
    rows, most = power_of_two(max_rows), power_of_two(max(_FEWEST_PAGES, -(-max_context // PAGE)))
    while rows:
        pages = most
        while pages >= _FEWEST_PAGES:
            yield rows, pages
            pages //= 2
        rows //= 2


def step_of(padded: Padded, layout: Layout | None = None, span: tuple[int, int] | None = None) -> Batch:
    """The batch whose tensors are views of a bucket's numbers. layout: of the real rows alone, which then know their
    bucket; None: of all rows."""
    whole = layout is None
    rows, pages, numbers = padded.rows, padded.pages, padded.numbers
    if layout is None:
        layout = Layout((1,) * rows, (pages * PAGE,) * rows, rows, rows)
    real = layout.rows
    count, ids, positions, starts, done, store, source, target, table = numbers.split(
        (1, rows, 3 * rows, rows + 1, rows, rows, rows, rows, rows * pages))
    positions, table = positions.view(3, rows), table.view(rows, pages)
    if real < rows:
        positions, starts = positions[:, :real], starts[:real + 1]
        ids, done, store, source, target, table = (
            tensor[:real] for tensor in (ids, done, store, source, target, table))
    none = numbers[:0]
    return Batch(
        layout=layout, ids=ids, positions=positions, starts=starts, done=done, pages=table, store=store, source=source,
        target=target, base=done, ring=done, append=_no_appends(real, numbers.device), emit_row=none, emit_length=none,
        emit_slot=none, logit_tokens=starts[:real], span=span, count=count if whole else None,
        padded=None if whole else padded)


def power_of_two(number: int) -> int:
    """The smallest one that is not less."""
    return 1 << (number - 1).bit_length()


@cache
def _no_appends(rows: int, device: torch.device) -> Tensor:
    return torch.zeros(rows, dtype=torch.bool, device=device)


def _flat(row: Row, index: int) -> int:
    return row.pages[index // PAGE] * PAGE + index % PAGE


def _places(row: Row) -> Iterator[range]:
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


def _rotary(rows: List[Row]) -> array[int]:
    """The rotary positions of all tokens, axis by axis."""
    if {row.rotary for row in rows} == {0}:
        return array("q", chain.from_iterable(range(row.done, row.done + len(row.tokens)) for row in rows)) * 3
    return array("q", chain.from_iterable(_axis(row, axis) for axis in range(3) for row in rows))


def _axis(row: Row, axis: int) -> List[int]:
    if isinstance(row.rotary, int):
        return range(row.done + row.rotary, row.done + row.rotary + len(row.tokens))
    return row.rotary[axis]


def _ids(row: Row) -> tuple[int, ...]:
    """The row's tokens; instead of one that is not known the number of its draw."""
    return row.tokens if row.drawn is None else (row.drawn,)


def _take_drawn(ids: Tensor, drawn: Tensor) -> None:
    """Replace numbers of draws by what they have given."""
    ids.copy_(drawn[ids])


def on_device(host: Tensor, device: torch.device) -> Tensor:
    """Numbers of the host on the device. They are copied from pinned memory, which nobody gets again before that is
    done, so that nobody has to wait for it."""
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def upload(numbers: array[int] | array[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    # torch.tensor looks at every number several times
    return on_device(torch.frombuffer(numbers, dtype=dtype), device)


def _upload(device: torch.device, **lists: Iterable[int]) -> dict[str, Tensor]:
    flat, sizes = array("q"), list[int]()
    for values in lists.values():
        before = len(flat)
        flat.extend(values)
        sizes.append(len(flat) - before)
    return dict(zip(lists, upload(flat, torch.int64, device).split(sizes), strict=True))
