"""The scheduler under random workloads: real engine, cache and sampler over a toy model that checks every step.

The toy's recurrent state is a running hash of the tokens and their number, and its K/V is the tokens themselves, so
that each row can be checked on its own: the state must stand at the row's cursor (L1), and must be the hash of what
the row's pages hold (L2). The next token is a function of the hash, so every answer is known beforehand.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from support import Answers, drain, examples, take
from torch import Tensor

from deltic.cache.manager import HybridCache
from deltic.cache.tensors import CachePools
from deltic.engine.engine import Engine
from deltic.engine.sequence import Sequence
from deltic.engine.step_plan import StepPlan
from deltic.ops import backends
from deltic.ops.capabilities import Capabilities
from deltic.ops.types import Batch
from deltic.params import PAGE, EngineRequest, SamplingParams

VOCABULARY = 97
MODULUS = 2_147_483_647


def advance(state: int, token: int) -> int:
    return (state * 31 + token + 7) % MODULUS


def scores(state: int) -> Tensor:
    generator = torch.Generator().manual_seed(state)
    return torch.randn(VOCABULARY, generator=generator)


def answer(prompt: tuple[int, ...], count: int) -> list[int]:
    """The greedy answer of the toy model."""
    state, tokens = 0, []
    for token in prompt:
        state = advance(state, token)
    for _ in range(count):
        tokens.append(int(scores(state).argmax()))
        state = advance(state, tokens[-1])
    return tokens


@dataclass(eq=False)
class Toy:
    """A `Model`. Pools are filled with NaN, which spreads if it is read."""

    pages: int
    max_batch: int
    budget: int
    context: int
    slots: int | None = None
    fed: int = 0
    before: Callable[[Batch], None] = field(default=lambda batch: None)

    def __post_init__(self) -> None:
        def full(*shape: int) -> Tensor:
            return torch.full(shape, float("nan"), dtype=torch.float64)

        ops = backends()["torch"]
        slots = self.slots or self.max_batch + 1
        pools = CachePools(full(1, self.pages, PAGE, 1, 1), full(1, self.pages, PAGE, 1, 1), full(1, slots, 1, 1, 1),
                          full(1, slots, 1, 1), ops)
        self.cache, self.pools, self.device = HybridCache(pools), pools, pools.device
        self.memory = SimpleNamespace(max_batch=self.max_batch, max_context=self.context)
        self.options = SimpleNamespace(token_budget=self.budget, seed=0, speculation=None, max_repeat=0,
                                       max_stall_ms=None, batch_invariant=False)
        self.mtp_runner, self.partial_head, self.encode, self.numbers = None, None, None, {}
        self.capabilities = Capabilities()
        self.config = SimpleNamespace(vocab_size=VOCABULARY, eos_token_ids=(), experts=None)
        self.generation = SimpleNamespace(eos_token_ids=(), sampling=dict)
        self.sample = ops.sample

    def run(self, batch: Batch) -> Tensor:
        self.before(batch)
        pools, states = self.cache.pools, []
        starts, done = batch.starts.tolist(), batch.done.tolist()
        pools.keys.flatten()[batch.store] = batch.ids.double()
        pools.values.flatten()[batch.store] = batch.ids.double()
        assert len(set(batch.store.tolist())) == len(batch.ids), "two tokens share a place"
        assert len(set(batch.target.tolist())) == batch.layout.rows, "two rows share a slot"
        for row in range(batch.layout.rows):
            context = done[row] + starts[row + 1] - starts[row]
            past = self._context(batch, row, context)
            state, position = 0, 0
            if done[row]:
                state, position = (int(pool[0, batch.source[row]].item()) for pool in pools.slot_tensors)
            assert position == done[row], f"L1: the state has {position} tokens, the cursor says {done[row]}"
            for index, token in enumerate(past):
                if index >= position:
                    assert token == int(batch.ids[starts[row] + index - position])
                    state = advance(state, token)
                    states.append(state)
            assert state == self._hash(past), "L2: K/V and state have different histories"
            pools.recurrent[0, batch.target[row]] = state
            pools.conv[0, batch.target[row]] = context
            for index in (batch.emit_row == row).nonzero().flatten().tolist():
                length, slot = int(batch.emit_length[index]), batch.emit_slot[index]
                assert done[row] < length <= context, "a state is wanted that this step does not pass"
                pools.recurrent[0, slot], pools.conv[0, slot] = self._hash(past[:length]), length
        self.fed += len(batch.ids)
        if not len(batch.logit_tokens):
            return torch.empty(0, VOCABULARY)
        return torch.stack([scores(states[token]) for token in batch.logit_tokens.tolist()])

    def _context(self, batch: Batch, row: int, length: int) -> list[int]:
        places = [int(batch.pages[row, i // PAGE]) * PAGE + i % PAGE for i in range(length)]
        keys = self.cache.pools.keys.flatten()[places].tolist()
        assert keys == self.cache.pools.values.flatten()[places].tolist()
        assert not any(key != key for key in keys), "K/V is read that nobody wrote"
        return [int(key) for key in keys]

    @staticmethod
    def _hash(tokens: list[int]) -> int:
        state = 0
        for token in tokens:
            state = advance(state, token)
        return state


class Checked(Engine):
    """An engine whose every plan is checked against the scheduler's promises."""

    def __init__(self, toy: Toy) -> None:
        super().__init__(toy)  # type: ignore[arg-type]
        self.toy, self.chunks = toy, []
        self.scheduler.times = None  # it must not depend on how busy the machine is
        self.arrivals: dict[Sequence, int] = {}
        self.held: set[Sequence] = set()
        self._plan, self.scheduler.schedule = self.scheduler.schedule, self._checked_plan  # type: ignore[method-assign]

    def _checked_plan(self) -> tuple[StepPlan, list[Sequence]]:
        before = self.order()
        plan, sequences = self._plan()
        after = self.order()
        before = [sequence for sequence in before if sequence not in self.held]
        assert before == after, "the order of arrival is lost"
        assert len(plan.rows) == len(sequences) == len(set(map(id, sequences)))
        if before:
            working = [
                *sequences,
                *(sequence for sequence in self.scheduler.running if sequence.sampler.logits is not None),
            ]
            assert working, "work is waiting and nothing runs"
            assert self.scheduler.running[0] in working, "the oldest sequence stands still"
        self.check_rows(plan, sequences)
        return plan, sequences

    def order(self) -> list[Sequence]:
        """Unfinished sequences, oldest first, without those that may be overtaken: who waited for what another one was
        reading, whose turn is over, and the further choices of a request, which wait behind one of each other's."""
        queue = [*self.scheduler.running, *self.scheduler.waiting]
        for sequence in queue:
            self.arrivals.setdefault(sequence, len(self.arrivals))
        self.held.update(
            sequence for sequence in queue if sequence.queue.prefix_wait or sequence.choice or sequence.queue.rest
        )
        queue = [sequence for sequence in queue if sequence not in self.held]
        numbers = [self.arrivals[sequence] for sequence in queue]
        assert numbers == sorted(numbers), "a younger sequence has overtaken an older one"
        return queue

    def check_rows(self, plan: StepPlan, sequences: list[Sequence]) -> None:
        """L4: every position is backed by pages that the sequence owns; the budget is kept."""
        cache = self.runtime.cache
        cache.check()
        for row, sequence in zip(plan.rows, sequences, strict=True):
            sequence_cache = sequence.cache
            assert sequence_cache is not None and row.slot == sequence_cache.slot and row.done == sequence_cache.done
            assert row.tokens and row.pages is sequence_cache.pages
            assert row.done + len(row.tokens) <= len(row.pages) * PAGE, "more tokens than granted pages"
            assert row.tokens == tuple(sequence.tokens[row.done:row.done + len(row.tokens)])
            assert row.logits == (row.done + len(row.tokens) == len(sequence.tokens))
        sizes = [len(row.tokens) for row in plan.rows]
        assert sizes == sorted(sizes, key=lambda size: size > 1), "single tokens come first"
        assert len(sizes) <= self.toy.max_batch
        ready = sum(len(sequence.tokens) - row.done == 1 for row, sequence in zip(plan.rows, sequences, strict=True))
        assert sum(sizes) <= max(self.toy.budget, ready + 1), f"{sum(sizes)} tokens for a budget of {self.toy.budget}"
        self.chunks.append(tuple(sizes))


def request(name: str, length: int, count: int, n: int = 1, seed: int = 0) -> EngineRequest:
    rng = random.Random(f"{name} {seed}")
    prompt = tuple(rng.randrange(VOCABULARY) for _ in range(length))
    return EngineRequest(name, prompt, SamplingParams(temperature=0.0, max_tokens=count, n=n))


def check_answers(requests: dict[str, EngineRequest], answers: Answers, engine: Engine) -> None:
    """Each choice has each of its tokens once and in order, or, if aborted, the first of them."""
    for item in requests.values():
        params = item.output
        for choice in range(params.n):
            found = answers.get((item.id, choice))
            if found is None:
                assert choice and answers[(item.id, 0)].last.finish == "abort", "a choice never ended"
                continue
            room = min(params.max_tokens or 0, engine.max_context - len(item.prompt))
            expected = answer(item.prompt, room)
            assert found.last.finish in ("length", "abort")
            if found.last.finish == "length":
                assert found.tokens == expected
            assert found.tokens == expected[:len(found.tokens)]
            usage = found.last.usage
            assert usage is not None and usage.completion_tokens == len(found.tokens)
            assert usage.prompt_tokens == len(item.prompt)


SHAPES = st.fixed_dictionaries({
    "pages": st.sampled_from((3, 2, 4, 6, 1, 12)), "max_batch": st.integers(1, 6),
    "budget": st.sampled_from((1, 2, 5, 16, 40, 200)),
})
ADD = st.tuples(st.just("add"), st.integers(1, 70), st.integers(0, 60), st.sampled_from((1, 1, 2, 3)))
STEP = st.tuples(st.just("step"), st.integers(1, 6))
ABORT = st.tuples(st.just("abort"), st.integers(0, 30))
PROGRAMS = st.lists(st.one_of(ADD, STEP, ADD, ABORT), min_size=1, max_size=25)


def run_program(shape: dict[str, int], program: list[tuple[Any, ...]]) -> Checked:
    toy = Toy(**shape, context=min(shape["pages"] * PAGE, 100))
    engine, requests, answers = Checked(toy), {}, {}
    for action, *values in program:
        if action == "add":
            length, count, n = values
            length = min(length, toy.context - 1)
            item = request(f"r{len(requests)}", length, count, n if count else 1)
            requests[item.id] = item
            engine.add(item)
        elif action == "step":
            for _ in range(values[0]):
                take(answers, engine.step())
                engine.check()
        elif requests:
            engine.abort(f"r{values[0] % len(requests)}")
            engine.check()
    drain(engine, answers, limit=4000)
    check_answers(requests, answers, engine)
    toy.cache.clear()
    assert toy.cache.pages.free == toy.pages and toy.cache.slots.free == toy.cache.slots.size
    return engine


@settings(max_examples=examples(150))
@given(SHAPES, PROGRAMS)
def test_any_workload_is_served_in_order_and_leaves_nothing(shape: dict[str, int], program: list[Any]) -> None:
    """L1, L2, L3, L4 and fairness, for requests that come, go and are aborted at any time."""
    run_program(shape, program)


@pytest.mark.slow
@settings(max_examples=3000, derandomize=False)
@given(SHAPES, PROGRAMS)
def test_thousands_of_workloads(shape: dict[str, int], program: list[Any]) -> None:
    run_program(shape, program)


def engine_with(requests: list[EngineRequest], **shape: int) -> Checked:
    shape = {"pages": 40, "max_batch": 4, "budget": 16, "context": 200, **shape}
    engine = Checked(Toy(**shape))
    for item in requests:
        engine.add(item)
    return engine


def served(engine: Checked, requests: list[EngineRequest]) -> Answers:
    answers = drain(engine, limit=3000)
    check_answers({item.id: item for item in requests}, answers, engine)
    return answers


def test_prompts_longer_than_the_budget_are_read_in_chunks() -> None:
    requests = [request("a", 50, 3)]
    engine = engine_with(requests)
    served(engine, requests)
    assert engine.chunks == [(16,), (16,), (16,), (2,), (1,), (1,)]


def test_decoding_goes_on_while_a_long_prompt_is_read() -> None:
    requests = [request("a", 4, 8), request("b", 100, 2)]
    engine = engine_with(requests)
    served(engine, requests)
    assert engine.chunks[0] == (4, 12) and engine.chunks[1:6] == [(1, 15)] * 5 and (1, 1) in engine.chunks


def test_a_prompt_gets_a_token_however_small_the_budget_is() -> None:
    requests = [request(name, 3, 20) for name in "abc"] + [request("d", 9, 2)]
    engine = engine_with(requests, budget=1)
    answers = served(engine, requests)
    assert (1, 1, 1, 1) in engine.chunks and all(max(chunk) == 1 for chunk in engine.chunks)
    assert answers[("d", 0)].last.usage.completion_tokens == 2  # type: ignore[union-attr]


def test_each_token_is_fed_exactly_once_without_preemption() -> None:
    """L1: all prompt tokens, and all answer tokens but the last."""
    requests = [request(f"r{i}", 5 + 11 * i, 1 + 3 * i) for i in range(6)]
    engine = engine_with(requests, pages=100)
    served(engine, requests)
    assert engine.scheduler.preemptions == 0
    assert engine.toy.fed == sum(len(item.prompt) + (item.output.max_tokens or 0) - 1 for item in requests)


def test_the_youngest_is_preempted_and_answers_all_the_same() -> None:
    requests = [request("old", 20, 60), request("young", 20, 60)]
    engine, seen = engine_with(requests, pages=6, context=96), []
    preempt = engine.scheduler._preempt
    engine.scheduler._preempt = lambda s: (seen.append(s.request.id), preempt(s))[1]  # type: ignore[method-assign]
    served(engine, requests)
    assert set(seen) == {"young"} and engine.scheduler.preemptions == len(seen)


def test_preemption_does_not_thrash() -> None:
    """A preempted sequence waits for pages instead of being read again and again for nothing."""
    requests = [request("old", 30, 60), request("young", 30, 60)]
    engine = engine_with(requests, pages=6, context=96, budget=64)
    served(engine, requests)
    assert 1 <= engine.scheduler.preemptions <= 10
    assert engine.toy.fed < 3 * 180


def test_a_pool_for_one_sequence_serves_all_in_turn() -> None:
    requests = [request(f"r{i}", 20, 12) for i in range(4)]
    engine = engine_with(requests, pages=2, context=32)
    answers = served(engine, requests)
    assert [key[0] for key in answers] == ["r0", "r1", "r2", "r3"]


@pytest.mark.parametrize("prompt", [15, 16, 17, 20, 32])
@pytest.mark.parametrize("max_batch", [1, 2, 4])
@pytest.mark.covering
def test_choices_fit_where_one_sequence_fits(prompt: int, max_batch: int) -> None:
    """L4: the kept end of a prompt must not take the room that a running choice needs to end."""
    requests = [request("a", prompt, 64 - prompt, n=3), request("b", 40, 24, n=2)]
    engine = engine_with(requests, pages=4, context=64, max_batch=max_batch)
    served(engine, requests)


def test_choices_process_the_prompt_once() -> None:
    requests = [request("a", 40, 5, n=4)]
    engine = engine_with(requests, max_batch=8)
    answers = served(engine, requests)
    assert engine.toy.fed == 40 + 4 * 4 and len(answers) == 4
    assert len({tuple(answer.tokens) for answer in answers.values()}) == 1


@pytest.mark.parametrize("when", range(14))
@pytest.mark.parametrize("victim", ["a", "b", "c"])
@pytest.mark.covering
def test_abort_at_any_step_frees_everything_and_affects_no_other(when: int, victim: str) -> None:
    """L3, L8: reading, decoding, preempted, waiting, forking or not yet looked at."""
    requests = [request("a", 20, 6), request("b", 30, 6, n=3), request("c", 10, 6)]
    engine, answers = engine_with(requests, pages=6, max_batch=3, context=60), {}
    for _ in range(when):
        take(answers, engine.step())
    engine.abort(victim)
    engine.check()
    drain(engine, answers)
    check_answers({item.id: item for item in requests}, answers, engine)
    for item in requests:
        if item.id != victim:
            assert answers[(item.id, 0)].last.finish == "length"


def test_abort_of_all_leaves_nothing() -> None:
    requests = [request(f"r{i}", 30, 9, n=1 + i % 3) for i in range(7)]
    engine = engine_with(requests, pages=8, context=60)
    for _ in range(5):
        engine.step()
    for item in requests:
        engine.abort(item.id)
    engine.check()
    engine.toy.cache.clear()
    assert engine.toy.cache.pages.free == 8
    events = engine.step()
    assert {event.request for event in events if event.finish == "abort"} == {item.id for item in requests}
    assert not engine.has_work


def test_first_come_first_served() -> None:
    requests = [request(f"r{i}", 33, 4) for i in range(9)]
    engine = engine_with(requests, max_batch=3, budget=24)
    answers = served(engine, requests)
    assert [name for name, _ in answers] == [item.id for item in requests]


def test_rows_are_ordered_by_slot_so_that_backends_may_take_views() -> None:
    requests = [request(f"r{i}", 3, 12) for i in range(4)]
    engine, spans = engine_with(requests), []
    engine.toy.before = lambda batch: spans.append(batch.span)
    served(engine, requests)
    assert (0, 4, 1) in spans


def failing(error: Exception, at: int) -> Callable[[Batch], None]:
    calls = iter(range(1000))

    def before(batch: Batch) -> None:
        if next(calls) == at:
            raise error

    return before


@pytest.mark.parametrize("at", range(8))
def test_l8_a_step_that_fails_ends_its_sequences_and_the_engine_goes_on(at: int) -> None:
    requests = [request("a", 20, 6), request("b", 30, 6, n=2), request("c", 10, 6)]
    engine = engine_with(requests, max_batch=2, pages=20)
    engine.toy.before = failing(RuntimeError("no luck"), at)
    answers = drain(engine)
    failed = {key for key, answer in answers.items() if answer.last.finish == "error"}
    assert failed and all("no luck" in (answers[key].last.error or "") for key in failed)
    for key, found in answers.items():
        if key not in failed:
            item = next(item for item in requests if item.id == key[0])
            assert found.last.finish == "length" and found.tokens == answer(item.prompt, 6)
    later = request("later", 25, 5)
    engine.add(later)
    assert drain(engine)[("later", 0)].tokens == answer(later.prompt, 5)


class Broken:
    """A matcher that raises at the token with this index."""

    def __init__(self, at: int) -> None:
        self.left = at

    def push(self, token: int) -> bool:
        self.left -= 1
        if self.left < 0:
            raise ValueError("broken matcher")
        return False


@pytest.mark.parametrize("at", [0, 2, 4])
@pytest.mark.parametrize("n", [1, 3])
def test_l8_a_matcher_that_raises_harms_its_own_request_only(at: int, n: int) -> None:
    good = [request("a", 6, 3, n=n), request("c", 7, 9)]
    bad = EngineRequest(
        "b", good[0].prompt, SamplingParams(temperature=0.0, max_tokens=8, n=n), matcher=lambda: Broken(at)
    )
    engine = engine_with([good[0], bad, good[1]], budget=64, max_batch=8)
    answers = drain(engine)
    for choice in range(n):
        assert answers[("b", choice)].last.finish == "error"
        assert "broken matcher" in (answers[("b", choice)].last.error or "")
        assert len(answers[("b", choice)].tokens) <= at + 1
    check_answers({item.id: item for item in good}, answers, engine)
    assert answers[("a", 0)].last.finish == answers[("c", 0)].last.finish == "length"


def test_l8_a_matcher_that_cannot_be_made_for_every_choice_harms_its_own_request_only() -> None:
    made = iter([Broken(9)])
    bad = EngineRequest("b", request("a", 6, 3).prompt, SamplingParams(temperature=0.0, max_tokens=8, n=3),
                  matcher=lambda: next(made))
    good = request("c", 7, 9)
    engine = engine_with([bad, good], budget=64, max_batch=8)
    answers = drain(engine)
    assert [answers[("b", choice)].last.finish for choice in range(3)] == ["error"] * 3
    check_answers({"c": good}, answers, engine)
    assert answers[("c", 0)].last.finish == "length"


@pytest.mark.parametrize("n", [1, 3])
def test_l8_a_sampler_that_raises_ends_the_choices_that_were_drawing(n: int) -> None:
    requests = [request("a", 6, 5, n=n), request("late", 60, 5)]
    engine = engine_with(requests, budget=16)
    sound = engine.toy.sample

    def sample(*arguments: Any) -> Any:
        engine.toy.sample = sound
        raise RuntimeError("no dice")

    engine.toy.sample = sample
    answers = drain(engine)
    assert all(answers[("a", choice)].last.finish == "error" for choice in range(n) if ("a", choice) in answers)
    assert ("a", 0) in answers
    engine.add(request("next", 6, 5))
    assert drain(engine)[("next", 0)].last.finish == "length"


def test_a_plan_is_plain_data() -> None:
    engine = engine_with([request("a", 5, 3), request("b", 30, 3)])
    plan, _ = engine._plan()
    assert StepPlan.from_json(plan.to_json()).to_json() == plan.to_json() and "Row(" in repr(plan)
    assert all(type(number) is int for row in plan.rows for number in (*row.tokens, *row.pages, row.done, row.slot))
