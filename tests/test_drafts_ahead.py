"""Drafts that a device makes before the host has seen what a step has drawn: when they are taken, and when not."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.ops.cuda.staging import row_keys
from deltic.ops.noise import answer_key, sample_key
from deltic.ops.types import Drafted
from deltic.params import SamplingParams
from deltic.runner.launch import InFlight, ScheduledSequence
from deltic.spec_decode.mtp import PendingDrafts
from deltic.spec_decode.proposers import MtpProposer, _has_room


@dataclass(eq=False)
class Running:
    """What is asked of a sequence."""

    tokens: list[int]
    done: int
    cache: Any = field(default_factory=object)
    seed: int = 7
    choice: int = 0
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.7))


def pending_of(*rows: list[int]) -> tuple[Any, list[Any]]:
    """Each row: the token that its drafts follow, its position, the drafts; and sequences that this is true of."""
    sequences = [Running([1, row[0]], row[1]) for row in rows]
    places: Any = {sequence: (sequence.cache, place) for place, sequence in enumerate(sequences)}
    arrived: Any = SimpleNamespace(synchronize=lambda: None)
    drafts, width = len(rows[0]) - 2, 4  # of rows, of which two are nobody's
    numbers = torch.full((2 * width * (drafts + 1),), -9)
    drafted = Drafted(numbers, width, drafts)
    for place, (token, position, *follow) in enumerate(rows):
        numbers[drafted.token_at(place):drafted.token_at(place) + 2] = torch.tensor([token, position])
        for draft, found in enumerate(follow):
            numbers[drafted.draft_at(place, draft)] = found
    return PendingDrafts(places, drafted, numbers, arrived), sequences


def test_drafts_are_taken_as_far_as_they_are_wanted() -> None:
    pending, (first, second) = pending_of([5, 20, 6, 7, 8], [9, 31, 1, 2, 3])
    assert pending.covers([first, second]) and pending.follows(first) and pending.follows(second)
    assert pending.drafts(first, 3) == (6, 7, 8) and pending.drafts(second, 1) == (1,)
    assert pending.drafts(second, 5) == (1, 2, 3)


def test_drafts_lie_as_the_device_writes_them() -> None:
    """[drafts, 2, rows], then [rows, 2]."""
    drafted = Drafted(torch.arange(2 * 4 * (3 + 1)), 4, 3)
    each, first = drafted.numbers.split((24, 8))
    for row in range(4):
        assert drafted.token_at(row) == first.view(4, 2)[row, 0]
        assert [drafted.draft_at(row, draft) for draft in range(3)] == each.view(3, 2, 4)[:, 0, row].tolist()


def test_a_step_can_take_them_from_where_they_are() -> None:
    pending, (first, second) = pending_of([5, 20, 6, 7, 8], [9, 31, 1, 2, 3])
    rows = [
        PlannedRow((9, -1, -1), 31, (0, 1), 0, 3, drafts=2),
        PlannedRow((5, -1, -1, -1), 20, (0, 1), 1, 4, drafts=3),
    ]
    numbers, places = pending.on_device(rows, [second, first])
    assert numbers[places].tolist() == [9, 1, 2, 5, 6, 7, 8]


@pytest.mark.parametrize("change", [{"tokens": [1, 6]}, {"done": 21}, {"cache": object()}])
def test_drafts_of_other_tokens_are_not_taken(change: dict[str, Any]) -> None:
    """A stop, a guide or a constraint has cut what was drawn, or the sequence was preempted."""
    pending, (first, second) = pending_of([5, 20, 6, 7, 8], [9, 31, 1, 2, 3])
    for name, value in change.items():
        setattr(first, name, value)
    assert not (pending.covers([first, second]) and pending.follows(first))
    assert pending.covers([second]) and pending.follows(second)
    assert not pending.covers([Running([5], 20)])


def test_drafts_of_a_step_that_another_one_has_followed_are_gone() -> None:
    """While drafts do not pay there are steps without."""
    pending, (first, second) = pending_of([5, 20, 6, 7, 8], [9, 31, 1, 2, 3])
    nothing: Any = SimpleNamespace(drafts_on_device=True)
    drafter, wants = MtpProposer(nothing, nothing, 3), [(first, 3), (second, 3)]
    drafter._pending = pending
    assert drafter.take_pending(wants) is pending and drafter.take_pending(wants) is None
    drafter._pending = pending
    drafter.draft_ahead(
        InFlight(StepPlan((PlannedRow((5,), 20, (0, 1), 0, 1), PlannedRow((9,), 31, (0, 1), 1, 1))), [])
    )
    assert drafter.take_pending(wants) is None


def share_of(row: PlannedRow, covered: int) -> ScheduledSequence:
    sequence: Any = Running(list(row.tokens), row.done)
    cache: Any = SimpleNamespace(covered=covered)
    return ScheduledSequence(sequence, cache, row)


def test_nothing_is_drafted_past_the_granted_pages() -> None:
    """Of three drafts that are all right, the last of three more lies six places after the row's first token."""
    row = PlannedRow((1, 2, 3, 4), 25, (0, 1), 0, 4, drafts=3)
    assert _has_room(share_of(row, 32)) and not _has_room(share_of(row, 31))
    assert not _has_room(share_of(replace(row, tokens=(1,), drafts=0), 99)), "it has no drafts"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch finds no CUDA device"))])
def test_drafts_are_drawn_with_the_keys_of_their_places(device: str) -> None:
    answers = [(7, 0), (-3, 2), ((1 << 63) - 1, 1)]
    known = torch.tensor([answer_key(*answer) for answer in answers], device=device)
    keys = torch.zeros(3, 200, dtype=torch.int64, device=device)
    row_keys(known, torch.tensor([25, 0, 99_999], device=device), keys)
    assert keys.tolist() == [[sample_key(*answer, first + place) for place in range(1, 201)]
                             for answer, first in zip(answers, (25, 0, 99_999), strict=True)]
