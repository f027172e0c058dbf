"""L6: answers do not depend on what the prefix tree knows, nor on where a prompt resumes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from reuse_cases import ANSWER, DRAWN, FREE, PROMPT, SEED, WHOLE, runtime_of, serve, usage_of
from support import (
    RUNTIMES,
    Answers,
    Forcing,
    Reference,
    drain,
    examples,
    greedy,
    numbers,
    odd_runtime,
    reference,
    same_logits,
    same_tokens,
    session_over,
    stepwise_logits,
    take,
    with_sample,
)
from test_scheduler import VOCABULARY, Toy, check_answers
from test_scheduler import answer as toy_answer
from torch import Tensor

from deltic.cache.offload.disk import DiskStore
from deltic.cache.offload.host import HostStore
from deltic.cache.offload.index import TierIndex
from deltic.cache.operations import CopyPage, CopySlot, Operation
from deltic.cache.tensors import CachePools
from deltic.engine.engine import Engine
from deltic.ops.types import Sampled, Sampling
from deltic.params import PAGE, EngineRequest, SamplingParams
from deltic.runner.model_runner import ModelRunner

# The grid: what the cache knows, how the prompt is cut, who else is there


STORIES = {"cold": 0, "warm": 64, "exact": PROMPT, "forked": 0, "exact and forked": PROMPT, "resumed mid-page": 53,
           "from host": 64, "from host, exact": PROMPT, "from host, mid-page": 53,
           "from disk": 64, "from disk, exact and forked": PROMPT, "from disk, mid-page": 53}
"""Tokens of the prompt that an earlier request had. Those from the disk were read by a process before this one."""
BUDGETS = (1, 7, 64, WHOLE)


@dataclass(frozen=True)
class Case:
    """One point of the grid. aborted: a neighbour with which the prompt has 70 tokens in common goes mid-prefill."""

    model: str
    story: str
    budget: int
    batch: int
    aborted: bool

    def __str__(self) -> str:
        return f"{self.model}, {self.story}, budget {self.budget}, batch {self.batch}" + ", aborted" * self.aborted

    @property
    def choices(self) -> int:
        return 2 if "forked" in self.story else 1


GRID = [Case(*values) for values in itertools.product(RUNTIMES, STORIES, BUDGETS, (1, 3, 8), (False, True))
        if values[3] > 1 or not values[4]]


AXES = "model", "story", "budget", "batch", "aborted"
CASES = [tuple(getattr(case, axis) for axis in AXES) for case in GRID]


def prompt_of(runtime: ModelRunner) -> tuple[int, ...]:
    return numbers(5, PROMPT, runtime.config.vocab_size)


@cache
def expected(model: str, drawn: bool, choice: int = 0) -> Reference:
    runtime = RUNTIMES[model]()
    return reference(runtime, prompt_of(runtime), ANSWER, DRAWN if drawn else FREE, choice)


def neighbours(runtime: ModelRunner) -> list[EngineRequest]:
    """One that begins like the observed prompt, and strangers."""
    vocabulary = runtime.config.vocab_size
    shared = (*prompt_of(runtime)[:70], *numbers(6, 60, vocabulary))
    strangers = [greedy(numbers(6 + i, 25 + 5 * i, vocabulary), 44 - 4 * i, f"n{i}") for i in range(1, 7)]
    return [greedy(shared, 20, "n0"), *strangers]


def tiers_of(case: Case, directory: Path) -> list[TierIndex]:
    if "host" in case.story:
        return [TierIndex(HostStore(1 << 26), threads=False)]
    return [TierIndex(DiskStore(directory, "model", 1 << 26), threads=True)] if "disk" in case.story else []


def told(case: Case, runtime: ModelRunner, params: SamplingParams, directory: Path) -> Engine:
    """Run the case's story; the observed request is named "seen"."""
    def engine_over(tiers: Sequence[TierIndex]) -> Engine:
        return Engine(runtime_of(runtime, batch=8, budget=case.budget, context=256, tiers=tiers))

    engine = engine_over(tiers_of(case, directory))
    prompt, earlier = prompt_of(runtime), STORIES[case.story]
    if earlier:
        serve(engine, greedy(prompt[:earlier], 0, "earlier"))
    if "host" in case.story:
        engine.runtime.cache.clear()
    if "disk" in case.story:
        engine.close()
        engine = engine_over(tiers_of(case, directory))
    for request in neighbours(runtime)[:case.batch - 1]:
        engine.add(request)
    engine.add(EngineRequest("seen", prompt, replace(params, n=case.choices)))
    return engine


def run(case: Case, engine: Engine) -> Answers:
    answers: Answers = {}
    if case.aborted:
        while not any(s.request.id == "n0" and s.done > s.cached for s in engine.scheduler.running):
            take(answers, engine.step())
            engine.check()
        engine.abort("n0")
    return drain(engine, answers)


def check_reuse(case: Case, answers: Answers) -> None:
    """The earlier request's tokens are reused, or more from the neighbour, and forks have the whole prompt."""
    cached = usage_of(answers, "seen").cached_tokens
    assert cached >= STORIES[case.story] if case.batch > 1 else cached == STORIES[case.story]
    if case.batch > 1 and not case.aborted and 70 - STORIES[case.story] >= 64:  # it pays to wait for so many
        assert cached == 70, "the neighbour's prefix is read twice"
    for choice in range(1, case.choices):
        assert usage_of(answers, "seen", choice).cached_tokens == PROMPT


@pytest.mark.parametrize(AXES, CASES)
@pytest.mark.covering
def test_l6_same_logits_whatever_the_cache_knows(model: str, story: str, budget: int, batch: int, aborted: bool,
                                                 tmp_path: Path) -> None:
    check_logits(Case(model, story, budget, batch, aborted), tmp_path)


def check_logits(case: Case, tmp_path: Path) -> None:
    runtime, answer = RUNTIMES[case.model](), expected(case.model, drawn=False)
    forcing = Forcing(runtime)
    forcing.force(SEED, answer)
    answers = run(case, told(case, with_sample(runtime, forcing.sample), DRAWN, tmp_path))
    check_reuse(case, answers)
    assert answers[("seen", 0)].tokens == list(answer.tokens)
    same_logits(answer.logits, forcing.recorded(SEED), decided=0.9 if case.model != "embedded" else 0.0)


@pytest.mark.parametrize("params", [FREE, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize(AXES, CASES)
@pytest.mark.covering
def test_l6_same_tokens_whatever_the_cache_knows(model: str, story: str, budget: int, batch: int, aborted: bool,
                                                 params: SamplingParams, tmp_path: Path) -> None:
    case = Case(model, story, budget, batch, aborted)
    runtime, drawn = RUNTIMES[case.model](), params is DRAWN
    answers = run(case, told(case, runtime, params, tmp_path))
    check_reuse(case, answers)
    for choice in range(case.choices):
        same_tokens(expected(case.model, drawn, choice), answers[("seen", choice)].tokens, params, choice)


# Every border of pages and chunks


BORDERS = [*range(1, 71)]
QUICK = (1, 2, 15, 16, 17, 31, 33, 47, 48, 49, 62, 63, 64, 65, 66, 70)


class Recorder:
    """A `sample` op that keeps the logits."""

    def __init__(self, runtime: ModelRunner) -> None:
        self.runtime, self.rows = runtime, list[Tensor]()

    def sample(self, logits: Tensor, sampling: Sampling) -> Sampled:
        self.rows.append(logits.clone())
        return self.runtime.decoder.ops.sample(logits, sampling)


@cache
def stepwise(model: str) -> Tensor:
    """Logits after each token of a text."""
    return stepwise_logits(session_over(RUNTIMES[model](), batch=1), text(model))


def text(model: str) -> tuple[int, ...]:
    return numbers(11, 140, RUNTIMES[model]().config.vocab_size)


@pytest.mark.parametrize("model", RUNTIMES)
@pytest.mark.parametrize("kept", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in BORDERS])
@pytest.mark.covering
def test_l6_resuming_at_every_border(model: str, kept: int) -> None:
    """Prompts that extend a kept one by 0, 1, 16 and 64 tokens: the longest that is known is reused, to the token."""
    runtime = RUNTIMES[model]()
    recorder = Recorder(runtime)
    engine = Engine(runtime_of(with_sample(runtime, recorder.sample), budget=50, batch=1))
    before = 0
    for length in (kept, kept, kept + 1, kept + 16, kept + 64):
        cached = usage_of(serve(engine, greedy(text(model)[:length], 0))).cached_tokens
        assert cached == before, f"{length} tokens after {before}"
        before = length
        same_logits(stepwise(model)[length - 1:length], recorder.rows[-1])
    assert engine.stats.prompt_tokens == before, "a token was read twice"


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("kept", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in BORDERS])
@pytest.mark.covering
def test_l6_resuming_from_a_tier_at_every_border(tier: str, kept: int, tmp_path: Path) -> None:
    """As above, but nothing is left in the pools: at most a page is read again, as no state is kept for so little."""
    runtime = odd_runtime()
    recorder, before = Recorder(runtime), 0
    case = Case("odd", f"from {tier}", 50, 1, False)
    tiers = tiers_of(case, tmp_path)
    for length in (kept, kept, kept + 1, kept + 16, kept + 64):
        engine = Engine(runtime_of(with_sample(runtime, recorder.sample), budget=50, batch=1, tiers=tiers))
        cached = usage_of(serve(engine, greedy(text("odd")[:length], 0))).cached_tokens
        assert before - PAGE <= cached <= before, f"{length} tokens after {before}"
        before = length
        same_logits(stepwise("odd")[length - 1:length], recorder.rows[-1])
        if tier == "disk":
            engine.close()
            tiers = tiers_of(case, tmp_path)


@pytest.mark.parametrize("model", RUNTIMES)
@pytest.mark.parametrize("parting", [1, 16, 17, 40, 69])
@pytest.mark.covering
def test_l6_diverging_prompts_do_not_mix(model: str, parting: int) -> None:
    """A prompt that leaves a kept one after `parting` tokens; the third of them resumes at a kept branch point."""
    runtime = RUNTIMES[model]()
    first = text(model)[:70]
    engine = Engine(runtime_of(runtime, budget=64, batch=1))
    for index in range(3):
        prompt = (*first[:parting], *((token + index) % 300 for token in first[parting:]), *[index] * (index > 0))
        found = serve(engine, greedy(prompt, 6, f"r{index}"))[(f"r{index}", 0)]
        same_tokens(reference(runtime, prompt, 6), found.tokens)
        cached = found.last.usage.cached_tokens if found.last.usage else None
        branch = parting // PAGE * PAGE
        assert cached == (branch if index == 2 and branch > 2 * PAGE else 0)


# Any workload of related prompts, over the toy model that checks every row's state and K/V


TEXTS = [tuple(random.Random(i).randrange(VOCABULARY) for _ in range(100)) for i in range(2)]
SHAPES = st.fixed_dictionaries({
    "pages": st.sampled_from((4, 6, 3, 2, 9, 14)), "max_batch": st.integers(1, 5), "slots": st.integers(2, 12),
    "budget": st.sampled_from((5, 16, 1, 40, 200))})
FRESH = st.builds(lambda text, cut, tail: (*TEXTS[text][:cut], *[tail] * (tail > 0)), st.integers(0, 1),
                  st.sampled_from((1, 15, 16, 17, 20, 32, 33, 48, 64, 70, 80)), st.integers(0, 2))
ADD = st.tuples(st.just("add"), FRESH, st.integers(0, 40), st.sampled_from((1, 1, 2, 3)),
                st.lists(st.sampled_from((3, 16, 20, 40)), max_size=2))
AGAIN = st.tuples(st.just("again"), st.integers(0, 30), st.integers(0, 40), st.integers(0, 3), st.integers(0, 20))
STEP = st.tuples(st.just("step"), st.integers(1, 8))
ABORT = st.tuples(st.just("abort"), st.integers(0, 30))
PROGRAMS = st.lists(st.one_of(ADD, AGAIN, STEP, AGAIN, ABORT), min_size=2, max_size=25)


class Workload:
    """Requests that come, go and are aborted; many of them repeat or extend earlier ones with their answers."""

    def __init__(self, shape: dict[str, int]) -> None:
        self.toy = Toy(**{**shape, "slots": max(shape["slots"], shape["max_batch"] + 1)},
                       context=min(shape["pages"] * PAGE, 120))
        self.engine = Engine(self.toy)  # type: ignore[arg-type]
        self.requests: dict[str, EngineRequest] = {}
        self.answers: Answers = {}

    def add(self, prompt: tuple[int, ...], count: int, n: int = 1, boundaries: Sequence[int] = ()) -> None:
        prompt = prompt[:self.toy.context - 1]
        params = SamplingParams(temperature=0.0, max_tokens=count, n=n if count else 1)
        request = EngineRequest(
            f"r{len(self.requests)}", prompt, params, tuple(b for b in boundaries if b <= len(prompt))
        )
        self.requests[request.id] = request
        self.engine.add(request)

    def again(self, pick: int, count: int, tail: int, answered: int) -> None:
        if self.requests:
            prompt = list(self.requests.values())[pick % len(self.requests)].prompt
            self.add((*prompt, *toy_answer(prompt, answered), *range(tail)), count)

    def step(self, count: int) -> None:
        for _ in range(count):
            take(self.answers, self.engine.step())
            self.engine.check()

    def abort(self, pick: int) -> None:
        self.engine.abort(f"r{pick % max(1, len(self.requests))}")
        self.engine.check()

    def finish(self) -> None:
        drain(self.engine, self.answers, limit=4000)
        check_answers(self.requests, self.answers, self.engine)
        for (name, _), answer in self.answers.items():
            usage = answer.last.usage
            assert usage and 0 <= usage.cached_tokens <= len(self.requests[name].prompt)
        self.toy.cache.clear()
        assert self.toy.cache.pages.free == self.toy.pages and self.toy.cache.slots.free == self.toy.cache.slots.size


def run_program(shape: dict[str, int], program: list[tuple[Any, ...]]) -> None:
    workload = Workload(shape)
    for action, *values in program:
        getattr(workload, action)(*values)
    workload.finish()


@settings(max_examples=examples(100), deadline=None)
@given(SHAPES, PROGRAMS)
def test_l6_any_workload_of_related_prompts(shape: dict[str, int], program: list[Any]) -> None:
    """L1, L2, L3, L6: all is served, each token once, and nothing is left."""
    run_program(shape, program)


@pytest.mark.slow
@settings(max_examples=2000, derandomize=False, deadline=None)
@given(SHAPES, PROGRAMS)
def test_l6_thousands_of_workloads_of_related_prompts(shape: dict[str, int], program: list[Any]) -> None:
    run_program(shape, program)


# The comparison must notice K/V without its state


def without_state(pools: CachePools, operation: Operation) -> None:
    """Resumes with the state of another position."""
    if isinstance(operation, CopySlot):
        for pool in pools.slot_tensors:
            pool[:, operation.target] = 0


def without_page(pools: CachePools, operation: Operation) -> None:
    """Resumes mid-page without the page's tokens."""
    if isinstance(operation, CopyPage):
        for pool in pools.page_tensors:
            pool[:, operation.target] = 0


@pytest.mark.parametrize("spoil", [without_state, without_page])
def test_l6_the_comparison_notices(spoil: Callable[[CachePools, Operation], None], monkeypatch: pytest.MonkeyPatch,
                                   tmp_path: Path) -> None:
    case, apply = Case("odd", "resumed mid-page", 64, 1, False), CachePools.apply

    def spoiled(pools: CachePools, operations: Sequence[Operation]) -> None:
        for operation in operations:
            apply(pools, [operation])
            spoil(pools, operation)

    monkeypatch.setattr(CachePools, "apply", spoiled)
    with pytest.raises(AssertionError):
        check_logits(case, tmp_path)
