"""The declared columns of a step: their layout in memory, on the host and in the text that CUDA kernels include."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.ops.input_columns import COLUMNS, DECODE, IDS_OFFSET, RAGGED, VERIFY, ColumnLayout, Extents, cuda_header
from deltic.ops.types import PAGE
from deltic.runner.input_batch import InputBatch, decoding, step_of, verifying

CPU = torch.device("cpu")
EXTENTS = Extents(rows=4, tokens=8, pages=16, logits=5, checkpoints=2)


def random_rows(draw: Random, tokens: list[int], deferred: bool) -> tuple[PlannedRow, ...]:
    rows = []
    for slot, count in enumerate(tokens):
        done = draw.randrange(200)
        pages = [draw.randrange(1, 60) for _ in range((done + count) // PAGE + 1)]
        row = PlannedRow(tuple(draw.randrange(999) for _ in range(count)), done, pages, slot, count,
                         target=draw.choice([None, 70]), rotary=draw.choice([0, -3]))
        if deferred:
            row = replace(row, base=max(done - draw.randrange(4), 0), delta_log=draw.randrange(9), append=True)
        rows.append(row)
    return tuple(rows)


def in_order(rows: tuple[PlannedRow, ...], size: int, pages: int, tokens: int | None) -> list[int]:
    """A bucket's integers written one after another, as kernels have always read them."""
    def fill(values: list[int], count: int, last: int | None = None) -> list[int]:
        return values + [values[-1] if last is None else last] * (count - len(values))

    width, count = tokens or size, sum(len(row.tokens) for row in rows)
    zero = 0 if any(len(row.tokens) > 1 for row in rows) else None
    places = [(row, row.done + index) for row in rows for index in range(len(row.tokens))]
    starts = [sum(len(row.tokens) for row in rows[:index]) for index in range(len(rows) + 1)]
    starts += range(len(rows) + 1, size + 1) if zero is None else [count] * (size - len(rows))
    store = fill([row.pages[at // PAGE] * PAGE + at % PAGE for row, at in places], width, zero)
    done, source = fill([row.done for row in rows], size), fill([row.slot for row in rows], size)
    target = fill([row.slot if row.target is None else row.target for row in rows], size)
    numbers = [len(rows), *fill([token for row in rows for token in row.tokens], width, zero)]
    numbers += fill([at + int(row.rotary) for row, at in places], width, zero) * 3  # type: ignore[call-overload]
    numbers += [*starts, *done]
    if tokens is None:
        numbers += [*store, *source, *target, *[-1] * width]  # no row has an adapter
    else:
        base = fill([row.done if row.base is None else row.base for row in rows], size)
        numbers += [*source, *target, *base, *fill([row.delta_log for row in rows], size)]
        numbers += [*fill([int(row.append) for row in rows], size), *store]
        numbers += range(width) if zero == 0 else fill(list(range(len(rows))), width)
    for row in (*rows, *rows[-1:] * (size - len(rows))):
        numbers += fill([*row.pages], pages, 0)
    return numbers


@pytest.mark.parametrize("kind", ["decode", "deferred", "verify"])
def test_buckets_lie_in_memory_as_kernels_read_them(kind: str) -> None:
    draw, memory = Random(kind), InputBatch()
    for _ in range(100):
        count = draw.choice([1, 2, 3, 5, 17])
        if kind == "verify":
            tokens = [draw.choice([2, 3, 7]) for _ in range(min(count, 5))]
            rows = random_rows(draw, tokens, True)
            batch = verifying(StepPlan(rows), CPU, memory)
        else:
            rows = random_rows(draw, [1] * count, kind == "deferred")
            batch = decoding(StepPlan(rows), CPU, memory=memory)
        padded = batch.padded
        assert padded
        assert padded.numbers.tolist() == in_order(rows, padded.rows, padded.pages, padded.tokens)
        assert step_of(padded).pages.flatten().tolist() == padded.numbers[-padded.rows * padded.pages:].tolist()


@pytest.mark.parametrize("layout", [DECODE, VERIFY, RAGGED])
def test_a_forgotten_column_is_an_error(layout: ColumnLayout) -> None:
    columns = [column for column in layout.columns if column.set_by == "scheduler"]
    values = {column.name: [7] * column.size(EXTENTS) for column in columns}
    assert len(layout.pack(values, EXTENTS)) == sum(map(len, values.values()))
    for name, column in values.items():
        with pytest.raises(ValueError, match=f"column '{name}' of a step is missing"):
            layout.pack({other: values[other] for other in values if other != name}, EXTENTS)
        for wrong in (column[1:], [*column, 7]):
            with pytest.raises(ValueError, match=f"column '{name}' of a step must have {len(column)} integers"):
                layout.pack({**values, name: wrong}, EXTENTS)


def test_the_generated_struct_has_the_same_offsets(tmp_path: Path) -> None:
    names = [column.name for column in VERIFY.columns]
    assert set(names) == COLUMNS.keys() - {"adapter_entries"} and VERIFY.offset("ids", EXTENTS) == IDS_OFFSET
    prints = "".join(f'printf("%d ", int(step.{name} - memory));' for name in names)
    (tmp_path / "columns.cpp").write_text(
        f"#include <cstdio>\n#define __device__\n{cuda_header()}\nlong long memory[999];\n"
        f"int main() {{ VerifyColumns step(memory, {EXTENTS.rows}, {EXTENTS.tokens}, {EXTENTS.pages}); {prints} }}\n")
    subprocess.run(["g++", "columns.cpp", "-o", "columns"], cwd=tmp_path, check=True)
    found = subprocess.run([tmp_path / "columns"], capture_output=True, text=True, check=True).stdout
    assert [*map(int, found.split())] == [VERIFY.offset(name, EXTENTS) for name in names]
