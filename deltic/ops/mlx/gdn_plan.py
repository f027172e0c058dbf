"""Plans the Gated DeltaNet layers of a step once on the host: rows, chunks, and writes to the pools. Chunks end at the
positions of wanted states, so that every checkpoint is the state after a chunk."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import mlx.core as mx
import numpy as np
import torch
from torch import Tensor

from deltic.ops.mlx.memory import Array, copied
from deltic.ops.reference import next_base
from deltic.ops.types import CHUNK, RING, Batch, GdnSpec


@dataclass(frozen=True, slots=True)
class Entries:
    """The log entries of R rows, RING per row. index [R, RING]: flat indices into the log's pool. real [R, RING]: True
    for existing entries."""

    index: Array
    real: Array


@dataclass(frozen=True, slots=True)
class ConvHistory:
    """The places of the K - 1 inputs before each row. places [R, K - 1]: in the slots' rings. real: the input exists.
    logged [R, K - 1] or None: places in the logs' rings, for the inputs that from_log marks."""

    places: Array
    real: Array | None
    logged: Array | None = None
    from_log: Array | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that are computed in one batch. source [R]: their slots. fresh [R] or None: rows that start from zero state.
    span: the slots if they are consecutive; their states are then read in place."""

    source: Array
    fresh: Array | None
    entries: Entries | None
    span: slice | None = None


@dataclass(frozen=True, slots=True)
class RowChunks:
    """The chunks of the longer rows: N chunks of C places each, ordered by chunk number, then by row.

    rows: for each j, number of rows with a chunk j. gather [N * C]: indices into the rows' tokens.
    real [N, 1, C]: True for tokens, False for padding; None: no padding. join [tokens]: the places of the tokens.
    lengths: number of tokens of each row, in batch order. wanted: (chunk, row) of each state to keep, both by rank.
    """

    size: int
    rows: tuple[int, ...]
    gather: Array
    real: Array | None
    join: Array
    lengths: tuple[int, ...]
    wanted: tuple[tuple[int, int], ...]

    def split(self, x: Array) -> Array:
        """Splits tokens into chunks: [tokens, heads, ...] -> [N, heads, C, ...]."""
        x = x[self.gather].reshape(-1, self.size, *x.shape[1:])
        return mx.swapaxes(x, 1, 2)

    def joined(self, x: Array) -> Array:
        """Inverts `split`: [N, heads, C, ...] -> [tokens, heads, ...]."""
        x = mx.swapaxes(x, 1, 2)
        return x.reshape(-1, *x.shape[2:])[self.join]


@dataclass(frozen=True, slots=True)
class StateWrites:
    """Concatenated states [n, Hv, Dk, Dv] to write, and their slots: indices of rows' states after the step, then
    before it (both in batch order), then wanted states of longer rows. plain: all rows' states in order."""

    after: tuple[int, ...]
    before: tuple[int, ...]
    slots: Tensor
    plain: bool


_ALL = StateWrites((), (), torch.empty(0, dtype=torch.int64), plain=True)


@dataclass(frozen=True, slots=True)
class RingWrites:
    """Writes to the rings of convolution inputs: slots [n], places [n, W]. fresh, index [n, W]: values from this step.
    sources [n], logs [n], positions [n, W]; kept, logged [n, W]: values from the sources' rings and from the logs.
    """

    slots: Tensor
    places: Tensor
    fresh: Tensor
    index: Tensor
    sources: Tensor
    logs: Tensor
    positions: Tensor
    kept: Tensor
    logged: Tensor | None


@dataclass(frozen=True, slots=True)
class LogWrites:
    """Tokens [n] that become entries of logs [n] at places [n]."""

    tokens: Tensor
    logs: Tensor
    places: Tensor
    picked: Array


@dataclass(frozen=True, slots=True)
class GdnPlan:
    """The plan shared by all layers of a step. singles: number of leading one-token rows. length: number of tokens."""

    singles: int
    length: int
    history: ConvHistory
    first: Group | None
    rest: Group | None
    chunks: RowChunks | None
    states: StateWrites
    rings: RingWrites | None
    single_place: tuple[Tensor, Tensor] | None
    entries: LogWrites | None

    @property
    def decodes(self) -> bool:
        """True if each row has one token and a state, and no log is read or written."""
        first = self.first
        plain = first is not None and first.fresh is None and first.entries is None and self.history.real is None
        return plain and self.states.plain


def decode_plan(rows: int, source: Array, places: Array) -> GdnPlan:
    """Returns the plan to compute a step of one token per row, without the writes to pools. source [R], places [R, K -
    1]: as in `Group` and `ConvHistory`."""
    return GdnPlan(rows, rows, ConvHistory(places, None), Group(source, None, None), None, None, _ALL, None, None, None)


class _Rows:
    """The rows of a batch in plain integers."""

    def __init__(self, batch: Batch) -> None:
        self.count, self.singles = batch.layout.rows, batch.layout.decode_rows
        self.chunk = batch.layout.chunks
        self.starts, self.done = batch.starts.tolist(), batch.done.tolist()
        self.base, self.log = batch.base.tolist(), batch.delta_log.tolist()
        self.source, self.target = batch.source.tolist(), batch.target.tolist()
        self.append = [bool(each) for each in batch.append.tolist()]
        columns = (batch.emit_row.tolist(), batch.emit_length.tolist(), batch.emit_slot.tolist())
        self.emits = list(zip(*columns, strict=True))


def plan_of(batch: Batch, spec: GdnSpec, width: int) -> GdnPlan:
    """Returns the plan of a batch. width: number of places in a ring of convolution inputs."""
    rows = _Rows(batch)
    before = spec.conv_kernel - 1
    singles = range(rows.singles)
    longer = sorted(range(rows.singles, rows.count), key=lambda row: -_chunk_count(rows, row))
    chunks = _cut(rows, longer) if longer else None
    states = _state_writes(rows, longer, chunks)
    rings = _ring_writes(batch, rows, width)
    return GdnPlan(
        singles=rows.singles,
        length=batch.layout.tokens,
        history=_history(rows, before, width),
        first=_group(rows, list(singles)) if singles else None,
        rest=_group(rows, longer) if longer else None,
        chunks=chunks,
        states=states,
        rings=rings,
        single_place=_single_place(batch, rows, width),
        entries=_log_writes(rows),
    )


def _group(rows: _Rows, members: list[int]) -> Group:
    fresh = [rows.base[row] == 0 for row in members]
    entries = None
    if any(rows.base[row] < rows.done[row] for row in members):
        index, real = np.zeros((len(members), RING), np.int64), np.zeros((len(members), RING), bool)
        for place, row in enumerate(members):
            positions = np.arange(rows.base[row], rows.done[row])
            index[place, :len(positions)] = rows.log[row] * RING + positions % RING
            real[place, :len(positions)] = True
        entries = Entries(mx.array(index), mx.array(real))
    slots = [rows.source[row] for row in members]
    span = slice(slots[0], slots[0] + len(slots))
    consecutive = slots == [*range(span.start, span.stop)]
    return Group(mx.array(slots), mx.array(fresh) if any(fresh) else None, entries, span if consecutive else None)


def _history(rows: _Rows, before: int, width: int) -> ConvHistory:
    done, base = np.array(rows.done)[:, None], np.array(rows.base)[:, None]
    positions = done - before + np.arange(before)
    places = np.array(rows.source)[:, None] * width + positions % width
    real = positions >= 0
    found = ConvHistory(mx.array(places), None if real.all() else mx.array(real)[..., None])
    if (base == done).all():
        return found
    logged = np.array(rows.log)[:, None] * RING + positions % RING
    return ConvHistory(found.places, found.real, mx.array(logged), mx.array((positions >= base) & real)[..., None])


def _ends(rows: _Rows, row: int) -> list[int]:
    """Returns the ends of a row's chunks, in tokens of the row: at wanted states, and after at most CHUNK tokens."""
    stops = {length - rows.done[row] for owner, length, _ in rows.emits if owner == row} | {rows.chunk[row]}
    found = list[int]()
    for start, stop in pairwise([0, *sorted(stops)]):
        found += [*range(start + CHUNK, stop, CHUNK), stop]
    return found


def _chunk_count(rows: _Rows, row: int) -> int:
    return len(_ends(rows, row))


def _cut(rows: _Rows, longer: list[int]) -> RowChunks:
    ends = [_ends(rows, row) for row in longer]
    first = rows.starts[rows.singles]
    widest = max(stop - start for each in ends for start, stop in pairwise([0, *each]))
    size = min(CHUNK, max(4, 1 << (widest - 1).bit_length()))
    counts = [len(each) for each in ends]
    active = tuple(sum(count > number for count in counts) for number in range(counts[0]))
    total = sum(counts)
    gather, real = np.zeros((total, size), np.int64), np.zeros((total, size), bool)
    join = np.zeros(rows.starts[-1] - first, np.int64)
    number = 0
    for j, some in enumerate(active):
        for rank in range(some):
            start, stop = ([0, *ends[rank]][j], ends[rank][j])
            tokens = rows.starts[longer[rank]] - first + np.arange(start, stop)
            gather[number, :len(tokens)], gather[number, len(tokens):] = tokens, tokens[-1]
            real[number, :len(tokens)] = True
            join[tokens] = number * size + np.arange(len(tokens))
            number += 1
    wanted = []
    for owner, length, _ in rows.emits:
        if owner >= rows.singles:
            rank = longer.index(owner)
            wanted.append((ends[rank].index(length - rows.done[owner]), rank))
    return RowChunks(size, active, mx.array(gather.ravel()), None if real.all() else mx.array(real)[:, None],
                  mx.array(join), tuple(rows.chunk[rows.singles:]), tuple(wanted))


def _state_writes(rows: _Rows, longer: list[int], chunks: RowChunks | None) -> StateWrites:
    order = [*range(rows.singles), *longer]
    after, before, slots, old = list[int](), list[int](), list[int](), list[int]()
    for place, row in enumerate(order):
        end = next_base(rows.base[row], rows.done[row], rows.chunk[row], rows.append[row])
        if not rows.append[row]:
            after.append(place)
            slots.append(rows.target[row])
        elif end > rows.base[row]:
            before.append(place)
            old.append(rows.target[row])
    emits = [(owner, slot) for owner, _, slot in rows.emits]
    after += [owner for owner, _ in emits if owner < rows.singles]
    slots += [slot for owner, slot in emits if owner < rows.singles]
    wanted = [slot for owner, slot in emits if owner >= rows.singles]
    plain = after == list(range(rows.count)) and not before and not wanted
    return StateWrites(tuple(after), tuple(before), torch.tensor([*slots, *old, *wanted], dtype=torch.int64), plain)


def _ring_writes(batch: Batch, rows: _Rows, width: int) -> RingWrites:
    """Returns the ring writes that match the state writes: each slot gets the inputs before its state's length."""
    owners, lengths, slots = list[int](), list[int](), list[int]()
    for row in range(rows.count):
        end = next_base(rows.base[row], rows.done[row], rows.chunk[row], rows.append[row])
        if not rows.append[row] or end > rows.base[row]:
            owners.append(row)
            lengths.append(end)
            slots.append(rows.target[row])
    owners += [owner for owner, _, _ in rows.emits]
    lengths += [length for _, length, _ in rows.emits]
    slots += [slot for _, _, slot in rows.emits]
    owner = torch.tensor(owners, dtype=torch.int64)
    positions = torch.tensor(lengths, dtype=torch.int64)[:, None] - 1 - torch.arange(width)
    done, base = batch.done[owner][:, None], batch.base[owner][:, None]
    logged = (positions >= base) & (positions < done)
    return RingWrites(
        slots=torch.tensor(slots, dtype=torch.int64),
        places=positions % width,
        fresh=(positions >= done)[..., None],
        index=(batch.starts[owner][:, None] + positions - done).clamp_(0, batch.layout.tokens - 1),
        sources=batch.source[owner],
        logs=batch.delta_log[owner],
        positions=positions,
        kept=((positions >= 0) & (positions < base))[..., None],
        logged=logged[..., None] if bool(logged.any()) else None,
    )


def _single_place(batch: Batch, rows: _Rows, width: int) -> tuple[Tensor, Tensor] | None:
    """Returns slot and place of each row's input for single tokens in place, where the rings change nowhere else."""
    plain = (rows.singles == rows.count and not rows.emits and not any(rows.append) and rows.base == rows.done
             and rows.source == rows.target and min(rows.done) > 0)
    return (batch.target, batch.done % width) if plain else None


def _log_writes(rows: _Rows) -> LogWrites | None:
    found = [(rows.starts[row] + token, rows.log[row], (rows.done[row] + token) % RING)
             for row in range(rows.count) if rows.append[row] for token in range(rows.chunk[row])]
    if not found:
        return None
    tokens, logs, places = torch.tensor(found, dtype=torch.int64).unbind(1)
    return LogWrites(tokens, logs, places, copied(tokens))
