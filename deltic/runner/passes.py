"""A step as passes of few single tokens, so that no sum depends on what else is in it (`--batch-invariant`)."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass, replace

from deltic.cache.operations import CopySlot
from deltic.engine.step_plan import PlannedRow
from deltic.runner.input_batch import FEW_ROWS


@dataclass(frozen=True, slots=True)
class Pass:
    """rows: of one token each, all of them known or none. kept: of which rows the logits are wanted, and which of the
    step's they are. copies: states that are kept when it has run."""

    rows: tuple[PlannedRow, ...]
    kept: tuple[tuple[int, int], ...]
    copies: tuple[CopySlot, ...]


def passes(rows: List[PlannedRow]) -> Iterator[Pass]:
    """What does the same as a step of these rows, one pass after another: the n-th tokens of all rows come before the
    next ones. Rows with drafts, pictures or tokens in replay rings are none of those that it takes."""
    firsts, total = list[int](), 0  # where the logits of a row's first token would be
    for row in rows:
        assert not row.drafts and not row.append and not row.images
        firsts.append(total + row.logits - len(row.tokens))
        total += row.logits
    for index in range(max((len(row.tokens) for row in rows), default=0)):
        there = [number for number, row in enumerate(rows) if index < len(row.tokens)]
        for unknown in (True, False):
            some = [number for number in there if (rows[number].drawn is not None) == unknown]
            for start in range(0, len(some), FEW_ROWS):
                yield _pass(rows, some[start:start + FEW_ROWS], index, firsts)


def _pass(rows: List[PlannedRow], numbers: List[int], index: int, firsts: List[int]) -> Pass:
    kept = tuple((place, firsts[number] + index) for place, number in enumerate(numbers)
                 if index >= len(rows[number].tokens) - rows[number].logits)
    copies = tuple(
        CopySlot(_target(rows[number]), slot)
        for number in numbers
        for position, slot in rows[number].checkpoints
        if position == rows[number].done + index + 1
    )
    return Pass(tuple(_single(rows[number], index) for number in numbers), kept, copies)


def _single(row: PlannedRow, index: int) -> PlannedRow:
    """The row's token `index` alone. Its logits are wanted in any case, as those of all rows of a bucket are."""
    rotary = row.rotary if isinstance(row.rotary, int) else (
        row.rotary[0][index:index + 1], row.rotary[1][index:index + 1], row.rotary[2][index:index + 1])
    return replace(row, tokens=row.tokens[index:index + 1], done=row.done + index, logits=1, checkpoints=(), base=None,
                   scored=0, slot=_target(row) if index else row.slot, rotary=rotary)


def _target(row: PlannedRow) -> int:
    return row.slot if row.target is None else row.target
