"""A batch or the parameters of draws in the memory of the step before are what would be made anew."""

from __future__ import annotations

from dataclasses import fields, replace
from random import Random

import pytest
import torch
from test_penalties import sequence_of
from torch import Tensor

from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.ops import backends
from deltic.ops.noise import sample_key
from deltic.ops.types import PAGE, Batch, Sampled, Sampling
from deltic.params import SamplingParams
from deltic.runner.input_batch import InputBatch, build
from deltic.runner.sampling import SampleRow, SamplingTable, sampling_of

CPU = torch.device("cpu")
VOCABULARY = 2000
PARAMS = (SamplingParams(temperature=0.0), SamplingParams(temperature=0.9), SamplingParams(temperature=0.7, top_k=20),
          SamplingParams(temperature=1.1, top_p=0.8, logprobs=3), SamplingParams(temperature=0.0, logprobs=0),
          SamplingParams(temperature=0.8, repetition_penalty=1.3), SamplingParams(temperature=0.0, min_tokens=3))


def same(found: Batch | Sampling | Sampled, wanted: Batch | Sampling | Sampled) -> None:
    for name in (field.name for field in fields(wanted) if field.name not in ("kept", "pages", "adjust")):
        left, right = getattr(found, name), getattr(wanted, name)
        if isinstance(right, Tensor):
            assert left.dtype == right.dtype and torch.equal(left, right), name
        else:
            assert left == right, name


def next_row(draw: Random, row: PlannedRow) -> PlannedRow:
    """What the same sequence does in the next step: mostly one more token."""
    done, pages = row.done + len(row.tokens), row.pages
    count = draw.choice([1, 1, 1, 1, 1, 1, 1, 3, 40])
    while len(pages) * PAGE < done + count:
        pages.append(draw.randrange(1, 99))  # type: ignore[attr-defined]
    drafts = min(count - 1, draw.choice([0, 0, 2]))
    return PlannedRow(tuple(draw.randrange(VOCABULARY) for _ in range(count)), done, pages, row.slot, drafts + 1,
               target=draw.choice([None] * 6 + [99]), checkpoints=((done + 1, 50),) if draw.random() < 0.1 else (),
               base=draw.choice([None, done, max(done - 2, 0)]), delta_log=draw.randrange(3), append=drafts > 0,
               drafts=drafts)


@pytest.mark.parametrize("seed", range(3))
def test_a_batch(seed: int) -> None:
    draw, memory, rows, last, again = Random(seed), InputBatch(), list[PlannedRow](), None, 0
    for _ in range(400):
        rows = [next_row(draw, row) if draw.random() < 0.9 else replace(row, slot=row.slot + 1) for row in rows]
        if not rows or draw.random() < 0.03:
            rows.append(PlannedRow((draw.randrange(VOCABULARY),), 0, [draw.randrange(1, 99)], draw.randrange(40), 1))
        if len(rows) > 1 and draw.random() < 0.05:
            del rows[draw.randrange(len(rows))]
        plan = StepPlan(tuple(sorted(rows, key=lambda row: (len(row.tokens) > 1, row.slot))))
        whole = draw.random() < 0.05, seed == 1
        found, wanted = build(plan, CPU, *whole, memory=memory), build(plan, CPU, *whole)
        same(found, wanted)
        assert all(value.is_contiguous() for field in fields(Batch)
                   if isinstance(value := getattr(found, field.name), Tensor))
        assert found.pages.tolist() == [[*row.pages, *(0,) * (found.pages.shape[1] - len(row.pages))]
                                        for row in plan.rows]
        assert wanted.kept is None and found.kept is not None
        again += found is last
        assert ("places" in found.kept) == (found is last)
        found.memo["numbers"] = found.kept["places"] = True
        last = found
    assert 40 < again < 350


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("backend", sorted(backends()))
@pytest.mark.covering
def test_draws(backend: str, seed: int) -> None:
    draw, table, sample = Random(seed), SamplingTable(), backends()[backend].sample
    every = [sequence_of(params, [draw.randrange(VOCABULARY) for _ in range(9)], eos=[7]) for params in PARAMS * 2]
    drawing, again, kept = every[:2], 0, None
    for step in range(150):
        if draw.random() < 0.2:
            drawing = draw.sample(every, draw.randint(1, 5))
        draws = [
            SampleRow(sequence, (5,) * ahead) for sequence in drawing for ahead in range(draw.choice([1, 1, 1, 2]))
        ]
        logits = torch.randn(len(draws), VOCABULARY, generator=torch.Generator().manual_seed(step)) * 3
        found, wanted = table.of(draws, CPU, VOCABULARY), sampling_of(draws, CPU, VOCABULARY)
        same(found, wanted)
        assert found.key.tolist() == [
            sample_key(each.sequence.seed, each.sequence.choice, each.position)
            if each.sequence.sampling.temperature else 0 for each in draws]
        same(sample(logits.clone(), found), sample(logits.clone(), wanted))
        again, kept = again + (found.kept is kept), found.kept
        for sequence in drawing:
            sequence.append(draw.randrange(VOCABULARY))
    assert 20 < again < 150
