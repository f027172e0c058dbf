"""Without a GPU: the launches of several devices go side by side, and sums come where all devices have their parts."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from op_cases import Row, build_batch
from torch import Tensor

from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.model.draft_vocabulary import DraftVocabulary, gather_rows, to_device
from deltic.ops.cuda import mtp
from deltic.ops.cuda.mtp import DraftHeads
from deltic.ops.cuda.sample import sample_parts
from deltic.ops.cuda.tensor_parallel import (
    PartExchange,
    PartialSum,
    ShardedLogits,
    ShardedStep,
    Shared,
    alone,
    batch_on,
    together,
)
from deltic.ops.slices import tree_sum
from deltic.ops.types import Batch, PreparesPrompts, Sampling
from deltic.runner.input_batch import decoding

DEVICES = [torch.device("cuda", index) for index in range(4)]


@pytest.fixture(autouse=True)
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened, in order: devices by their numbers when they become current."""
    happened = list[str]()

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        happened.append(str(device.index))
        yield

    monkeypatch.setattr(torch.cuda, "device", current)
    return happened


def exchange_into(order: list[str]) -> PartExchange:
    """Adds parts as peers do."""
    def exchange(parts: Sequence[PartialSum]) -> None:
        order.append("sum")
        total = tree_sum([part.own.clone() for part in parts])
        for part in parts:
            (part.own if part.residual is None else part.residual).copy_(
                total if part.residual is None else part.residual + total)

    return exchange


def launches_of(rank: int, sums: int = 3) -> Shared[Tensor]:
    """Each sum is made of what the sums before have left."""
    residual = torch.ones(2)
    for index in range(sums):
        part = (rank + 1) * residual
        yield PartialSum(part, residual if index % 2 else None)
        residual = residual if index % 2 else part
    return residual


@pytest.mark.parametrize("count", [2, 4])
def test_devices_go_side_by_side(count: int, order: list[str]) -> None:
    found = together(DEVICES[:count], [launches_of(rank) for rank in range(count)], exchange_into(order))
    turn = [str(rank) for rank in range(count)]
    assert order == [*turn, "sum", *turn, "sum", *turn, "sum", *turn]
    total = sum(range(1, count + 1))
    assert all(torch.equal(each, torch.full((2,), float(total * (1 + total) * total))) for each in found)


def test_devices_that_do_not_agree_are_found(order: list[str]) -> None:
    with pytest.raises(AssertionError, match="devices disagree"):
        together(DEVICES[:2], [launches_of(0, 1), launches_of(1, 2)], exchange_into(order))


def test_one_device_has_no_sums() -> None:
    assert torch.equal(alone(launches_of(0, 0)), torch.ones(2))
    with pytest.raises(AssertionError, match="no parts of sums"):
        alone(launches_of(0))


# Steps


@dataclass
class Step:
    """Its logits are the numbers of the tokens that it has, after a sum."""

    rank: int
    serves: bool = True
    seen: list[Batch] = field(default_factory=list)
    prepared: int = 0

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def launches(self, batch: Batch) -> Shared[tuple[Tensor, Tensor | None]] | None:
        return self._launches(batch) if self.serves else None

    def prepare_prompts(self, most: int) -> None:
        self.prepared = most

    def _launches(self, batch: Batch) -> Shared[tuple[Tensor, Tensor | None]]:
        self.seen.append(batch)
        hidden = torch.zeros(batch.layout.tokens, 3)
        yield PartialSum(torch.full_like(hidden, float(self.rank + 1)), hidden)
        return torch.full((batch.layout.logits, 2), float(self.rank)), hidden if batch.layout.hidden else None


def test_the_head_follows_on_each_device(order: list[str]) -> None:
    steps = [Step(rank) for rank in range(2)]
    sharded = ShardedStep(steps, exchange_into(order))
    batch = decoding(StepPlan((PlannedRow((5,), 20, (1, 2), 0, 1),) * 2), torch.device("cpu"))
    followed = list[tuple[int, Batch, Tensor]]()
    sharded.follow = lambda *arguments: followed.append(arguments)
    found = sharded(batch)
    assert found and found[0].clone().tolist() == [[0, 0, 1, 1]] * 2 and found[1] is None and not followed
    found = sharded(replace(batch, layout=replace(batch.layout, hidden=True)))
    assert found and found[1] is not None and found[1].tolist() == [[3.0] * 3] * 2
    assert [rank for rank, _, _ in followed] == [0, 1] and order.index("sum") < len(order) - 2
    for (_, own, hidden), step in zip(followed, steps, strict=True):
        assert own is step.seen[-1] and torch.equal(hidden, found[1])


def test_all_devices_prepare_for_prompts() -> None:
    steps = [Step(rank) for rank in range(2)]
    sharded = ShardedStep(steps, exchange_into([]))
    assert isinstance(sharded, PreparesPrompts)
    sharded.prepare_prompts(500)
    assert [step.prepared for step in steps] == [500] * 2


def test_a_batch_that_a_device_does_not_serve_is_not_begun(order: list[str]) -> None:
    steps = [Step(0), Step(1, serves=False)]
    batch = decoding(StepPlan((PlannedRow((5,), 20, (1, 2), 0, 1),)), torch.device("cpu"))
    assert ShardedStep(steps, exchange_into(order))(batch) is None
    assert not steps[0].seen and not order


def test_a_batch_moves_with_all_it_has() -> None:
    meta = torch.device("meta")
    for case in (build_batch([Row(1, 5), Row(4, 3, emits=(2,))]), build_batch([Row(3, 0)])):
        batch = case.batch
        assert batch_on(batch, batch.ids.device) is batch
        moved = batch_on(replace(batch, memo={"a": 1}), meta)
        assert moved.layout is batch.layout and not moved.memo and moved.kept is None
        for name in Batch.__slots__:
            value, own = getattr(batch, name), getattr(moved, name)
            if isinstance(value, Tensor):
                assert own.device == meta and own.shape == value.shape and own.dtype == value.dtype, name
    batch = decoding(StepPlan((PlannedRow((5,), 20, (1, 2), 0, 1),)), torch.device("cpu"))
    assert batch.base is batch.done, "no row has tokens in a delta log"
    moved = batch_on(batch, meta)
    assert moved.base is moved.done and moved.padded and moved.padded.numbers.device == meta


@torch.inference_mode()
def test_logits_are_joined_when_they_are_needed() -> None:
    parts = [torch.randn(3, width, generator=torch.Generator().manual_seed(width)) for width in (4, 4, 2)]
    whole, logits = torch.cat(parts, 1), ShardedLogits(parts)
    assert logits.shape == (3, 10) and len(logits) == 3 and logits.device == parts[0].device
    assert logits._whole is None and isinstance(logits, Tensor), "nobody has needed them"
    found: list[Tensor] = [logits[1:], logits[2], logits.clone(), torch.cat([logits, logits]), logits.argmax(-1),
                           logits.cpu().float(), logits + 1, torch.stack([*logits.split([1, 2])[1]])]
    wanted = [whole[1:], whole[2], whole, torch.cat([whole, whole]), whole.argmax(-1), whole, whole + 1, whole[1:]]
    for own, other in zip(found, wanted, strict=True):
        assert torch.equal(own, other)
    assert not any(isinstance(own, ShardedLogits) for own in found[2:5]) and torch.equal(logits, whole)
    logits.mul_(2)
    assert torch.equal(logits.whole, 2 * whole) and torch.equal(parts[0], whole[:, :4]), "parts stay as they are"


def test_candidates_are_drawn_from_only_on_devices() -> None:
    rows = torch.zeros(2)
    plain = Sampling(rows, rows.long(), rows + 1, rows, rows.long())
    for sampling in (replace(plain, filtered=True), replace(plain, top_logprobs=0)):
        assert sample_parts([torch.zeros(2, 4)] * 2, sampling) is None


# Drafts


class Graph:
    def __init__(self, rank: int, order: list[str]) -> None:
        self.rank, self.order = rank, order

    def pool(self) -> str:
        return f"pool {self.rank}"

    def replay(self) -> None:
        self.order.append(f"replay {self.rank}")


class Head:
    """Drafts the token that it is given plus the sum of all devices' ranks plus one."""

    def __init__(self, rank: int) -> None:
        self.rank, self.device, self.last = rank, torch.device("cpu", rank), torch.zeros(1)
        self.seen = list[Tensor]()

    def follow(self, batch: Batch, hidden: Tensor) -> None:
        self.last = hidden

    def accept(self, batch: Batch, drafts: Any, chosen: Any, keys: Tensor, temperature: Tensor, width: int) -> None:
        drafts.numbers[0].copy_(torch.arange(len(drafts.numbers[0])))
        drafts.accepted.fill_(77)

    def drafts(self, numbers: Tensor, rows: int, pages: int, tokens: Tensor) -> Generator[PartialSum, None, None]:
        self.seen.append(numbers)
        assert int(numbers[0]) == 1 and int((numbers == -1).sum()) == rows, "one row, which takes no hidden state"
        for depth in range(len(tokens)):
            total = torch.zeros(1)
            yield PartialSum(torch.tensor([self.rank + 1.0]), total)
            tokens[depth, 0] = depth * int(total)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_drafts_of_all_devices_are_recorded_and_replayed(count: int, order: list[str], monkeypatch: pytest.MonkeyPatch
                                                         ) -> None:
    used = list[Any]()

    def record_all(launch: Any, devices: Sequence[torch.device], pools: Sequence[Any]) -> Any:
        used.append(list(pools))
        order.append("record")
        return [Graph(rank, order) for rank in range(count)], launch()

    monkeypatch.setattr(mtp, "record_all", record_all)
    heads: list[Any] = [Head(rank) for rank in range(count)]
    drafting = DraftHeads(heads, exchange_into(order))
    batch = decoding(StepPlan((PlannedRow((5,), 20, (1, 2), 0, 1),) * 3), torch.device("cpu"))
    keys, temperature = torch.zeros(3, 5, dtype=torch.int64), torch.zeros(3)
    found = drafting.draft_ahead(batch, 2, torch.zeros(3, dtype=torch.int64), keys, temperature)
    turn = [str(rank) for rank in range(count)]
    once = [*turn, "sum", *turn, "sum", *turn]
    replays = [entry for rank in range(count) for entry in (str(rank), f"replay {rank}")]
    assert order == [*once, "record", *once, *replays] and used == [[None] * count]
    drafts, = drafting._known.values()
    total = sum(range(1, count + 1))
    for own, head, output in zip(drafts.numbers, heads, drafts.outputs, strict=True):
        assert torch.equal(own, torch.arange(len(own))), "the numbers come from the first device"
        assert all(seen is own for seen in head.seen), "the graph reads them where they are"
        assert output.numbers[:16].view(2, 2, 4)[:, 0].tolist() == [[0] * 4, [total] * 4]
    assert found is drafts.outputs[0] and (found.rows, found.drafts) == (4, 2)
    assert [int(output.numbers[-1]) for output in drafts.outputs] == [77] + [0] * (count - 1)
    assert found.numbers[found.token_at(0):].tolist() == [77] * 8
    order.clear()
    again = drafting.draft(batch, keys, Sampling(temperature, keys, temperature, temperature, keys.flatten()[:6]))
    assert order == replays and again.shape == (3, 2)
    drafting.record(4, 32, 2)
    assert used[1:] == [[f"pool {rank}" for rank in range(count)]]


def test_a_device_follows_with_its_own_head(order: list[str]) -> None:
    heads: list[Any] = [Head(rank) for rank in range(2)]
    DraftHeads(heads, exchange_into(order)).follow(1, build_batch([Row(1, 5)]).batch, torch.ones(1))
    assert float(heads[0].last) == 0 and float(heads[1].last) == 1


# Rows of the logits


def test_rows_are_gathered_from_the_parts_of_all_devices() -> None:
    whole = torch.randn(96, 5, generator=torch.Generator().manual_seed(1))
    parts = whole[:32], whole[32:48], whole[48:]
    ids = torch.tensor([95, 0, 31, 32, 47, 48, 3, 32])
    assert torch.equal(gather_rows(parts, ids), whole[ids]) and torch.equal(gather_rows(parts), whole)
    tokens = [*range(40, 72)]
    one, split = DraftVocabulary(whole, tokens), DraftVocabulary(parts, tokens, [torch.device("cpu")] * 3)
    for seen in ([1, 33, 80], [95], [2, 3, 45, 90]):
        one.see(seen)
        split.see(seen)
        assert isinstance(split.head, Tensor) and isinstance(one.head, Tensor)
        assert torch.equal(one.ids, split.ids) and torch.equal(one.head, split.head) and one.copied == split.copied
        assert torch.equal(split.head, whole[split.ids])
    assert split.size == 96 and [*split.copies] == [torch.device("cpu")], "virtual devices share the rows"
    assert split.copies[torch.device("cpu")][0] is split.head


def test_weights_that_are_on_a_device_stay_there() -> None:
    block = torch.ones(2, 3)
    assert to_device((block, block), torch.device("cpu"))[1] is block
    assert to_device(block, torch.device("meta")).shape == (2, 3)
