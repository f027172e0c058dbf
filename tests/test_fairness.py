"""No prompt holds up another: long ones do not stop short ones, short ones do not starve long ones, and nobody waits
for another's prefix longer than it saves."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from random import Random
from typing import Any
from unittest.mock import Mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from reuse_cases import runtime_of
from support import Answers, Watch, drain, greedy, numbers, odd_runtime, serve, take
from test_scheduler import VOCABULARY, Toy
from torch import Tensor

from deltic.engine import policy
from deltic.engine.engine import Engine
from deltic.engine.policy import PrefixWait, StepTimes, hurry, is_burst, share
from deltic.ops.types import Batch
from deltic.params import EngineRequest, SamplingParams

BUDGETS = st.integers(1, 600)
PENDING = st.lists(st.integers(1, 5000), min_size=1, max_size=20)


@given(BUDGETS, PENDING, st.data())
def test_all_of_the_budget_is_shared_and_no_more(budget: int, pending: list[int], data: st.DataObject) -> None:
    goals = [data.draw(st.integers(1, tokens)) for tokens in pending]
    counts = share(budget, pending, goals)
    assert sum(counts) == min(budget, sum(pending))
    assert all(0 <= count <= tokens for count, tokens in zip(counts, pending, strict=True))
    assert counts[0] >= min(pending[0], budget - budget // 2), "the oldest has its half"


@settings(max_examples=60)
@given(st.integers(2, 200), st.lists(st.integers(1, 3000), min_size=1, max_size=6), st.lists(st.integers(1, 400)))
def test_each_prompt_is_read_in_bounded_time_whatever_comes_later(budget: int, old: list[int],
                                                                  young: list[int]) -> None:
    """A young one comes in every step, for ever the nearest to its end."""
    pending, late, steps = dict(enumerate(old)), iter(young * 100), 0
    bounds = [-(-sum(old[:index + 1]) // (budget - budget // 2)) for index in range(len(old))]
    while any(index in pending for index in range(len(old))):
        pending[len(old) + steps] = next(late, 1)
        counts = share(budget, list(pending.values()), list(pending.values()))
        steps += 1
        for index, count in zip(list(pending), counts, strict=True):
            pending[index] -= count
            if not pending[index]:
                del pending[index]
                assert index >= len(old) or steps <= bounds[index]


@given(st.integers(2, 600), st.integers(1, 300), st.lists(st.floats(0, 1), max_size=8), st.integers(0, 8))
def test_a_prompt_waits_for_shorter_ones_only(budget: int, own: int, shorter: list[float], long: int) -> None:
    prompts, steps = [1_000_000] * long + [round(part * (own - 1)) + 1 for part in shorter] + [own], 0
    bound = -(-sum(prompts[long:]) // (budget // 2))
    while prompts[-1]:
        alive = [index for index, tokens in enumerate(prompts) if tokens]
        for index, count in zip(alive, share(budget, *[[prompts[index] for index in alive]] * 2), strict=True):
            prompts[index] -= count
        steps += 1
    assert steps <= bound


def test_a_state_that_others_wait_for_is_a_goal() -> None:
    assert share(100, [1000, 500, 400], [1000, 30, 400]) == [50, 30, 20]
    assert share(100, [1000, 500, 400], [1000, 500, 400]) == [50, 0, 50]


@pytest.mark.parametrize(("meeting", "pays"), [
    # equal short prompts in one batch: what they have in common is read once
    (PrefixWait(own=60, saved=40, away=40, others=60, alone=True), True),
    (PrefixWait(own=30, saved=17, away=17, others=30, alone=True), False),
    # beside a long prompt every step is long
    (PrefixWait(own=20, saved=17, away=17, others=30_000, alone=True), False),
    (PrefixWait(own=100, saved=80, away=80, others=30_000, alone=True), False),
    (PrefixWait(own=20_020, saved=20_000, away=20_000, others=30_000, alone=True), True),
    (PrefixWait(own=20_020, saved=20_000, away=100, others=10_100, alone=False), True),
    # the other one is far behind
    (PrefixWait(own=200, saved=150, away=20_000, others=20_000, alone=True), False),
    (PrefixWait(own=600, saved=40, away=40, others=600, alone=True), False),
    (PrefixWait(own=600, saved=400, away=400, others=600, alone=True), True),
])
def test_waiting_pays_if_it_saves_more_than_it_costs(meeting: PrefixWait, pays: bool) -> None:
    assert meeting.pays(512) == pays


def settled(times: StepTimes, fixed: float, by_token: float, answers: bool, budget: int = 512) -> float:
    """Seconds of a step after many of them, on a machine where a step takes `fixed` and so much for each token."""
    tokens = 0
    for _ in range(40):
        tokens = times.limit(budget, answers)
        times.add(tokens, fixed + by_token * tokens)
        times.add(0, fixed)
    return fixed + by_token * tokens


@pytest.mark.parametrize("answers", [False, True])
def test_prefill_steps_approach_the_stall_limit(answers: bool) -> None:
    times = StepTimes()
    assert 0.024 < settled(times, 0.001, 0.0006, answers) <= 0.03, "a small model after a long context"
    assert 0.024 < settled(times, 0.001, 0.0003, answers) <= 0.03, "the machine has become faster"
    assert times.limit(4, answers) == 4


def test_a_model_that_only_reads_prompts_takes_large_steps() -> None:
    """The engine of a prefill replica never decodes. Only steps with answers must be short."""
    times = StepTimes()
    for _ in range(10):
        tokens = times.limit(512, answers=False)
        times.add(tokens, 0.01 + 0.0024 * tokens)
    assert 120 < tokens < 160
    assert times.limit(512, answers=True) == 16


def test_a_large_model_spends_little_of_its_time_on_reading_weights() -> None:
    assert 0.3 < settled(StepTimes(), 0.1, 0.001, answers=True, budget=4096) <= 0.4
    assert 1.6 < settled(StepTimes(), 0.1, 0.001, answers=False, budget=4096) <= 2.0


def test_an_own_limit_holds_beside_answers_however_much_it_costs() -> None:
    assert 0.15 < settled(StepTimes(0.2), 0.05, 0.001, answers=True) <= 0.2
    assert settled(StepTimes(0.2), 0.05, 0.001, answers=False) == 0.05 + 0.512
    times = StepTimes(0.01)
    settled(times, 1.0, 0.001, answers=True)
    assert times.limit(512, answers=True) == 16, "a step has a page at least"


def test_a_step_with_a_large_fixed_cost_has_as_many_tokens_as_take_as_long() -> None:
    """As with quantized weights, which a step with prompts dequantizes, and one without does not."""
    times = StepTimes()
    times.add(0, 0.015)
    for _ in range(40):
        tokens = times.limit(2048, answers=True)
        times.add(tokens, 0.1 + 0.0001 * tokens)
        times.add(0, 0.015)
    assert 900 < tokens < 1100
    strict = replace(times, longest=0.05)
    assert strict.limit(2048, answers=True) == 16 and strict.limit(2048, answers=False) == times.limit(2048, False)


def test_durations_that_vary_make_no_long_steps() -> None:
    """The machine has other work at times. Without the fixed cost a step of 0.03 s would have 75 tokens."""
    chance, times, longest = Random(1), StepTimes(), 0
    for _ in range(400):
        tokens = times.limit(2048, answers=True)
        longest = max(longest, tokens)
        read = min(tokens, chance.choice((20, 60, 2048)))
        times.add(read, 0.0004 * read * chance.uniform(1, 1.5))
        times.add(0, 0.005 * chance.uniform(1, 1.5))
    assert times.limit(2048, answers=True) < 150 and longest <= 512


def test_steps_may_be_long_if_most_requests_wait() -> None:
    times = StepTimes()
    for _ in range(5):
        times.add(0, 0.005)
        times.add(8192, 0.12)
    usual, burst = (times.limit(8192, True, burst) for burst in (False, True))
    assert 1500 < usual < 2048 and 7000 < burst < 8192
    assert times.limit(8192, False, True) == times.limit(8192, False)
    own = replace(times, longest=0.05)
    assert own.limit(8192, True, True) == own.limit(8192, True), "the limit of the options holds in any case"


def of_clients(clients: str) -> list[Any]:
    """A sequence of each client."""
    return [Mock(client=client) for client in clients]


@pytest.mark.parametrize(("prompts", "answers", "burst"), [
    ("aaaa", "aaaa", True), ("aaa", "aaaa", False), ("aaaa", "", True),
    ("bcde", "afgh", True), ("bc", "afgh", False), ("bcd", "aaa", False), ("bcde", "aaa", True),
    # one client alone does not make another one's answer wait, however many prompts it has
    ("bbbbbbbb", "a", False), ("bbbbbbbb", "ab", False), ("bbbbbbbb", "b", True), ("bc", "a", True),
])
def test_a_burst_is_of_most_requests_and_of_several_clients(prompts: str, answers: str, burst: bool) -> None:
    assert is_burst(of_clients(prompts), of_clients(answers)) == burst


def test_before_anything_was_timed_a_chunk_beside_answers_is_a_quarter_of_the_budget() -> None:
    times = StepTimes()
    times.add(0, 1.0)
    times.add(3, 1.0)
    assert times.limit(512, answers=True) == 128 and times.limit(512, answers=False) == 512


def test_a_hurried_step_gives_what_reaches_its_goal() -> None:
    assert hurry([100, 20, 8], [300, 20, 30]) == [0, 20, 0]
    assert hurry([100, 20], [300, 40]) == [100, 20], "nothing comes of this step, so that nobody waits for it"
    assert hurry([100, 20], [300, 40], first=True) == [0, 0], "the end of a known prompt gives its first token"


# In the engine


class Slow(Watch):
    """A runtime whose steps take some milliseconds."""

    def run(self, batch: Batch) -> Tensor:
        time.sleep(0.002)
        return Watch.run(self, batch)


def test_prompts_beside_answers_are_read_in_smaller_chunks_if_a_step_would_take_too_long() -> None:
    runtime = odd_runtime()
    options = replace(runtime.options, max_stall_ms=1, max_batch=8, token_budget=512)
    slow = Slow(replace(runtime_of(runtime, budget=512, context=900), options=options))
    engine = Engine(slow)  # type: ignore[arg-type]
    engine.add(greedy(numbers(1, 30, 500), 60, "a"))
    found = Answers()
    take(found, engine.step())
    engine.add(greedy(numbers(2, 800, 500), 5, "b"))
    drain(engine, found)
    chunks = slow.chunks
    assert all(max(chunk) <= 16 for chunk in chunks if len(chunk) > 1) and (1, 16) in chunks
    assert max(map(max, chunks)) > 16, "alone it is read as fast as it can be"
    for name, seed, length in (("a", 1, 30), ("b", 2, 800)):
        plain = serve(runtime_of(runtime, context=900), [greedy(numbers(seed, length, 500), 60)])["a", 0].tokens
        assert found[name, 0].tokens == plain[:len(found[name, 0].tokens)]


class Idle(Toy):
    """A model that costs nothing: any logits will do."""

    def run(self, batch: Batch) -> Tensor:
        self.fed += len(batch.ids)
        self.cache.pools.recurrent[0, batch.target], self.cache.pools.conv[0, batch.target] = 0.0, 0.0
        self.cache.pools.recurrent[0, batch.emit_slot], self.cache.pools.conv[0, batch.emit_slot] = 0.0, 0.0
        for pool in self.cache.pools.page_tensors:
            pool.flatten()[batch.store] = 0.0
        return torch.arange(VOCABULARY).float().repeat(len(batch.logit_tokens), 1)


def engine_of(slots: int = 40) -> Engine:
    engine = Engine(Idle(pages=40_000, max_batch=16, budget=512, context=40_000, slots=slots))  # type: ignore[arg-type]
    engine.scheduler.times = None  # steps are counted, which may not depend on how long they take
    return engine


def test_a_burst_gets_its_first_tokens_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed loop on the clock of a GPU: 8 ms for a step with prompts, 14 us for each of their tokens."""
    burst = loop()
    monkeypatch.setattr(policy, "_BURST", policy._STALL)
    usual = loop()
    assert burst.last < 0.85 * usual.last and burst.seconds < usual.seconds


@dataclass
class Loop:
    """Seconds until the last first token, and in all; those of each step."""

    last: float
    seconds: float
    steps: list[float]


def loop(clients: int = 64, total: int = 80, prompt: int = 512, answer: int = 40) -> Loop:
    engine = Engine(Idle(pages=4000, max_batch=clients, budget=8192, context=2000, slots=200))  # type: ignore[arg-type]
    sent, done, clock, arrived, first, steps = 0, 0, 0.0, dict[str, float](), dict[str, float](), list[float]()

    def timed(flight: Any, _: float, prompt_tokens: int) -> None:
        seconds = 0.003 + 2e-5 * len(flight.scheduled) + (0.005 + 14e-6 * prompt_tokens if prompt_tokens else 0.0)
        steps.append(seconds)
        engine.scheduler.times.add(prompt_tokens, seconds)  # type: ignore[union-attr]

    engine._timed = timed  # type: ignore[method-assign]
    while done < total:
        while sent < total and sent - done < clients:
            arrived[f"r{sent}"] = clock
            tokens = tuple(numbers(sent, prompt, VOCABULARY))
            engine.add(EngineRequest(f"r{sent}", tokens, SamplingParams(max_tokens=answer, max_repeat=0), client="one"))
            sent += 1
        events = engine.step()
        clock = sum(steps)
        for event in events:
            first.setdefault(event.request, clock - arrived[event.request])
            done += event.finish is not None
    return Loop(max(first.values()), clock, steps)


def ask(name: str, *lengths: int, count: int = 1) -> EngineRequest:
    """A prompt that begins with the same tokens as others with the same first lengths; the last part is its own."""
    *common, own = lengths
    parts = [numbers(length, length, VOCABULARY) for length in common]
    parts.append(numbers(sum(map(ord, name)), own, VOCABULARY))
    return EngineRequest(name, tuple(chain.from_iterable(parts)), SamplingParams(temperature=0.0, max_tokens=count))


def steps_to(engine: Engine, name: str, most: int = 2000) -> int:
    for step in range(1, most):
        if any(event.request == name and event.token is not None for event in engine.step()):
            return step
    raise AssertionError(f"{name} had no token after {most} steps")


@pytest.mark.parametrize("common", [0, 17, 19])
@pytest.mark.parametrize("when", [0, 1, 20])
def test_a_short_prompt_is_answered_at_once_beside_a_long_one(common: int, when: int) -> None:
    engine = engine_of()
    engine.add(ask("long", common, 30_000 - common))
    alone = -(-30_000 // 512)
    for _ in range(when):
        engine.step()
    engine.add(ask("short", common, 20 - common))
    assert steps_to(engine, "short") <= 3
    assert steps_to(engine, "long") <= 1.05 * alone


def test_a_known_prompt_is_answered_in_a_step_that_reads_no_other() -> None:
    engine = engine_of()
    first = ask("first", 40)
    engine.add(first)
    steps_to(engine, "first")
    engine.scheduler.times = Mock(limit=lambda budget, answers, burst: 64)
    engine.add(ask("long", 5000))
    engine.step()
    engine.add(replace(first, id="again"))
    fed = engine.runtime.fed  # type: ignore[attr-defined]
    assert steps_to(engine, "again") == 1 and engine.runtime.fed == fed  # type: ignore[attr-defined]
    engine.step()
    assert engine.runtime.fed == fed + 64  # type: ignore[attr-defined]


def test_a_long_prompt_gets_its_half_however_many_short_ones_come() -> None:
    engine = engine_of()
    engine.add(ask("long", 10_000))
    for step in range(1, 200):
        for part in range(3):
            engine.add(ask(f"{step} {part}", 150))
        if any(event.request == "long" for event in engine.step()):
            break
    assert step <= 2 * -(-10_000 // 512) + 1
    assert len(engine.scheduler.waiting) < 100, "short ones are answered meanwhile"


def test_many_long_prompts_are_not_all_read_at_once() -> None:
    """Each would be ready at the end of all; the first is ready after twice its own time."""
    engine = engine_of()
    for index in range(8):
        engine.add(ask(f"l{index}", 8_000 + index))
    assert steps_to(engine, "l0") <= 2 * -(-8_000 // 512) + 1


def test_awaited_state_is_kept_before_its_prompt_is_done() -> None:
    engine = engine_of()
    engine.add(ask("long", 600, 20_000))
    engine.add(ask("other", 600, 30))
    engine.step()
    assert len(engine.scheduler.running) == 1, "it pays to wait"
    assert steps_to(engine, "other") <= 3
    assert engine.runtime.cache.tree.cached_length(ask("third", 600, 50).prompt) == 600
    engine.add(ask("third", 600, 50))
    assert steps_to(engine, "third") == 1


def test_earlier_state_is_there_for_a_later_request() -> None:
    engine = engine_of()
    engine.add(replace(ask("long", 600, 20_000), stable_prefixes=(600,)))
    for _ in range(5):
        engine.step()
    assert not len(engine.runtime.cache.tree)
    engine.add(ask("other", 600, 30))
    assert steps_to(engine, "other") == 1 and engine.stats.reused_tokens == 600


def test_no_prefix_wait_for_a_distant_prompt() -> None:
    engine = engine_of()
    engine.add(ask("old", 30_000))
    engine.add(ask("reader", 4_000, 20_000))
    engine.step()
    engine.add(ask("own", 4_000, 10))
    assert steps_to(engine, "own") <= -(-4_010 // 256) + 2


def test_a_common_opening_of_a_batch_of_short_prompts_is_read_once() -> None:
    engine = engine_of()
    for index in range(12):
        engine.add(ask(f"r{index}", 40, 20))
    drain(engine)
    assert engine.stats.prompt_tokens == 40 + 12 * 20


def test_scheduling_time_is_independent_of_waiting_requests() -> None:
    """A thousand with one long prefix: who is known to wait is not compared again, and nobody's prompt is looked at
    from its beginning in each step."""
    engine, compared = engine_of(), [0]
    scheduler, tree = engine.scheduler, engine.runtime.cache.tree

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            compared[0] += 1
            return function(*arguments)
        return call

    scheduler._await_prefix = counting(scheduler._await_prefix)  # type: ignore[method-assign]
    tree.match = counting(tree.match)  # type: ignore[method-assign]
    common = numbers(1, 20_000, VOCABULARY)
    for index in range(1000):
        engine.add(EngineRequest(f"r{index}", (*common, index % VOCABULARY, index // VOCABULARY),
                           SamplingParams(temperature=0.0, max_tokens=2)))
    most = 0
    for _ in range(46):
        compared[0] = 0
        engine.step()
        most = max(most, compared[0])
    assert most <= 4 * (16 + 8)
    assert engine.stats.prompt_tokens <= 20_000 + 2 * 1000, "the prefix is read once"
    assert engine.stats.finished > 30


def test_many_choices_share_one_copy_of_the_prompt_while_they_wait() -> None:
    engine, request = engine_of(), ask("a", 5_000, count=5)
    engine.add(replace(request, output=replace(request.output, n=128)))
    assert engine.scheduler.waiting[0].tokens is request.prompt
    steps_to(engine, "a")
    waiting = engine.scheduler.waiting
    assert len(waiting) == 127 and all(sequence.tokens is request.prompt for sequence in waiting)
    assert len({id(sequence.prompt_keys) for sequence in waiting}) == 1
    assert len(drain(engine)) == 128 and engine.stats.prompt_tokens == 5_000


def test_prompt_behind_shorter_ones_waits_for_their_prefix() -> None:
    """Until they are read it has what it would have read beside another one, from that one."""
    meeting = PrefixWait(own=83, saved=70, away=70, others=385, alone=False)
    assert not meeting.pays(64) and replace(meeting, nearer=255).pays(64)
    assert not replace(meeting, saved=20, nearer=255).pays(64), "too little is spared"
