"""Answers do not depend on what the prefix tree knows (L6), and reuse is a number that is promised."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from support import (
    RUNTIMES,
    Answers,
    Forcing,
    Reference,
    drain,
    greedy,
    numbers,
    odd_runtime,
    pairwise,
    pools,
    reference,
    same_logits,
    same_tokens,
    session_over,
    small_runtime,
    stepwise_logits,
    take,
    with_sample,
)
from test_engine import POISONS, SICK, Fragile, poison
from test_scheduler import VOCABULARY, Toy, check_answers
from test_scheduler import answer as toy_answer
from torch import Tensor

from deltic import LLM
from deltic.cache.disk import Disk
from deltic.cache.host import Host
from deltic.cache.hybrid import HybridCache
from deltic.cache.shelf import Shelf
from deltic.engine.engine import Engine
from deltic.engine.runtime import Runtime
from deltic.model.decoder import Stores
from deltic.ops.records import Sampled, Sampling
from deltic.types import PAGE, Request, SamplingParams, Usage

PROMPT, ANSWER, WHOLE, SEED = 83, 24, 512, 77
FREE = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
DRAWN = replace(FREE, temperature=1.0, seed=SEED)


def runtime_of(runtime: Runtime, *, reuse: bool = True, slots: int = 24, batch: int = 8, budget: int = 64,
               pages: int | None = None, context: int | None = None, tiers: Sequence[Shelf] = ()) -> Runtime:
    """The same model with pools of its own, with slots for the prefix tree too."""
    small = small_runtime(runtime, batch=batch, budget=budget, pages=pages or 24 * 16, context=context)
    storage = pools(runtime, pages or 24 * 16, slots)
    return replace(small, cache=HybridCache(storage, runtime.decoder.ops, reuse, tiers),
                   stores=Stores(storage.kv_views(), storage.state_views()))


def serve(engine: Engine, *requests: Request) -> Answers:
    for request in requests:
        engine.add(request)
    return drain(engine, limit=3000)


def usage_of(answers: Answers, name: str = "a", choice: int = 0) -> Usage:
    usage = answers[(name, choice)].last.usage
    assert usage is not None
    return usage


def tree_of(engine: Engine) -> Any:
    return engine.runtime.cache.tree


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


def axes(case: Case) -> tuple[object, ...]:
    return case.model, case.story, case.budget, case.batch, case.aborted


HYBRID = list(pairwise([case for case in GRID if case.model != "qwen3"], axes))
FEW = [*HYBRID, *pairwise(GRID, axes, HYBRID)]
"""Every pair twice over where layers are recurrent: the model that has none adds only pairs of its own."""
CASES = [pytest.param(case, marks=() if case in FEW else pytest.mark.slow, id=str(case)) for case in GRID]


def prompt_of(runtime: Runtime) -> tuple[int, ...]:
    return numbers(5, PROMPT, runtime.config.vocab_size)


@cache
def expected(model: str, drawn: bool, choice: int = 0) -> Reference:
    runtime = RUNTIMES[model]()
    return reference(runtime, prompt_of(runtime), ANSWER, DRAWN if drawn else FREE, choice)


def neighbours(runtime: Runtime) -> list[Request]:
    """One that begins like the observed prompt, and strangers."""
    vocabulary = runtime.config.vocab_size
    shared = (*prompt_of(runtime)[:70], *numbers(6, 60, vocabulary))
    strangers = [greedy(numbers(6 + i, 25 + 5 * i, vocabulary), 44 - 4 * i, f"n{i}") for i in range(1, 7)]
    return [greedy(shared, 20, "n0"), *strangers]


def tiers_of(case: Case, directory: Path) -> list[Shelf]:
    if "host" in case.story:
        return [Shelf(Host(1 << 26), threads=False)]
    return [Shelf(Disk(directory, "model", 1 << 26), threads=True)] if "disk" in case.story else []


def told(case: Case, runtime: Runtime, params: SamplingParams, directory: Path) -> Engine:
    """Run the case's story; the observed request is named "seen"."""
    def engine_over(tiers: Sequence[Shelf]) -> Engine:
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
    engine.add(Request("seen", prompt, replace(params, n=case.choices)))
    return engine


def run(case: Case, engine: Engine) -> Answers:
    answers: Answers = {}
    if case.aborted:
        while not any(s.request.id == "n0" and s.done > s.started for s in engine.scheduler.running):
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


@pytest.mark.parametrize("case", CASES)
def test_l6_same_logits_whatever_the_cache_knows(case: Case, tmp_path: Path) -> None:
    runtime, answer = RUNTIMES[case.model](), expected(case.model, drawn=False)
    forcing = Forcing(runtime)
    forcing.force(SEED, answer)
    answers = run(case, told(case, with_sample(runtime, forcing.sample), DRAWN, tmp_path))
    check_reuse(case, answers)
    assert answers[("seen", 0)].tokens == list(answer.tokens)
    same_logits(answer.logits, forcing.recorded(SEED), decided=0.9 if case.model != "embedded" else 0.0)


@pytest.mark.parametrize("params", [FREE, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("case", CASES)
def test_l6_same_tokens_whatever_the_cache_knows(case: Case, params: SamplingParams, tmp_path: Path) -> None:
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

    def __init__(self, runtime: Runtime) -> None:
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
def test_l6_coming_back_from_a_tier_at_every_border(tier: str, kept: int, tmp_path: Path) -> None:
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
def test_l6_prompts_that_part_never_see_each_other(model: str, parting: int) -> None:
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


# Reuse is counted


def engine_for(**limits: Any) -> Engine:
    return Engine(runtime_of(odd_runtime(), **limits))


def test_the_same_prompt_again_reads_nothing() -> None:
    engine, prompt = engine_for(), numbers(1, 100, 500)
    first = serve(engine, greedy(prompt, 10))
    again = serve(engine, greedy(prompt, 10))
    assert (usage_of(first).cached_tokens, usage_of(again).cached_tokens) == (0, 100)
    assert again[("a", 0)].tokens == first[("a", 0)].tokens
    assert engine.stats.prompt_tokens == 100


@pytest.mark.parametrize("changes", [{"logit_bias": {7: 100.0}}, {"repetition_penalty": 5.0}, {"min_tokens": 4},
                                     {"presence_penalty": 2.0}])
def test_l8_what_one_request_changes_in_kept_logits_does_not_reach_the_next(changes: dict[str, Any]) -> None:
    engine, prompt = engine_for(), numbers(1, 100, 500)
    first = serve(engine, greedy(prompt, 3))
    serve(engine, greedy(prompt, 3, **changes, stop_token_ids=(first[("a", 0)].tokens[0],), ignore_eos=False))
    again = serve(engine, greedy(prompt, 3))
    assert usage_of(again).cached_tokens == 100 and again[("a", 0)].tokens == first[("a", 0)].tokens


@pytest.mark.parametrize("length", [14, 15, 16, 17, 100])
@pytest.mark.parametrize("answer", [1, 2, 12])
def test_a_prompt_that_goes_on_after_an_answer_reuses_all_but_its_last_token(length: int, answer: int) -> None:
    """The last token of an answer was chosen, but never read."""
    engine, prompt = engine_for(), numbers(1, length, 500)
    tokens = serve(engine, greedy(prompt, answer))[("a", 0)].tokens
    longer = (*prompt, *tokens, 1, 2, 3)
    usage = usage_of(serve(engine, greedy(longer, 4)))
    assert usage.cached_tokens == length + answer - 1
    assert engine.stats.prompt_tokens == length + 1 + 3


def test_another_answer_to_the_same_prompt_starts_at_its_end() -> None:
    engine, prompt = engine_for(), numbers(1, 50, 500)
    for seed in range(3):
        usage = usage_of(serve(engine, greedy(prompt, 9, temperature=1.0, seed=seed)))
        assert usage.cached_tokens == (50 if seed else 0)


def test_a_shorter_prompt_resumes_at_a_boundary_only() -> None:
    """L2: the K/V of all its tokens is there, but a state only at the boundaries, and logits only at prompts' ends."""
    engine, prompt = engine_for(), numbers(1, 100, 500)
    serve(engine, replace(greedy(prompt, 3), boundaries=(20, 57)))
    for length, cached in ((20, 0), (56, 20), (57, 56), (58, 57), (99, 58)):
        assert usage_of(serve(engine, greedy(prompt[:length], 1))).cached_tokens == cached, length


def test_several_choices_share_one_prompt_and_all_answers_are_kept() -> None:
    engine, prompt = engine_for(), numbers(1, 40, 500)
    found = serve(engine, greedy(prompt, 8, temperature=1.0, seed=4, n=3))
    assert [usage_of(found, choice=i).cached_tokens for i in range(3)] == [0, 40, 40]
    assert engine.stats.prompt_tokens == 40
    for choice in range(3):
        longer = (*prompt, *found[("a", choice)].tokens, 7)
        assert usage_of(serve(engine, greedy(longer, 1))).cached_tokens == 47


@pytest.mark.parametrize("budget", [7, WHOLE])
def test_six_that_arrive_together_read_their_common_prefix_once(budget: int) -> None:
    engine = engine_for(budget=budget)
    common = numbers(1, 400, 500)
    requests = [greedy((*common, *numbers(10 + i, 20 + i, 400)), 5, f"r{i}") for i in range(6)]
    found = serve(engine, *requests)
    own = sum(20 + i for i in range(6))
    assert engine.stats.prompt_tokens == 400 + own
    assert [usage_of(found, f"r{i}").cached_tokens for i in range(6)] == [0] + [400] * 5
    for request in requests[:3]:
        same_tokens(reference(odd_runtime(), request.prompt, 5), found[(request.id, 0)].tokens)


def test_identical_prompts_that_arrive_together_are_read_once() -> None:
    engine, prompt = engine_for(), numbers(1, 150, 500)
    found = serve(engine, *(greedy(prompt, 12, f"r{i}") for i in range(5)))
    assert engine.stats.prompt_tokens == 150
    assert [usage_of(found, f"r{i}").cached_tokens for i in range(5)] == [0] + [150] * 4
    assert len({tuple(answer.tokens) for answer in found.values()}) == 1


def test_strangers_that_arrive_together_do_not_wait() -> None:
    engine = engine_for(budget=WHOLE)
    for i in range(4):
        engine.add(greedy((*numbers(1, 20, 500), *numbers(20 + i, 60, 500)), 5, f"r{i}"))
    engine.step()
    assert len(engine.scheduler.running) == 4
    drain(engine)


def test_a_shared_prefix_is_read_anew_if_its_reader_is_aborted() -> None:
    engine, common = engine_for(budget=16), numbers(1, 200, 500)
    for i in range(3):
        engine.add(greedy((*common, i), 5, f"r{i}"))
    for _ in range(3):
        engine.step()
    assert len(engine.scheduler.running) == 1
    engine.abort("r0")
    found = drain(engine)
    assert found[("r0", 0)].last.finish == "abort"
    for i in (1, 2):
        same_tokens(reference(odd_runtime(), (*common, i), 5), found[(f"r{i}", 0)].tokens)
    assert [usage_of(found, f"r{i}").cached_tokens for i in (1, 2)] == [0, 200]


def test_chat_turns_resume_at_the_last_stable_boundary() -> None:
    llm = LLM(dtype="float32", memory="64MiB", max_context=512, threads=1)
    params = SamplingParams(temperature=0.0, max_tokens=20)
    messages = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "What is a river?"}]
    for question in ("And a lake?", "And the sea?", "Which is deepest?"):
        boundaries = llm.front.chat(messages, params).request.boundaries
        answer = llm.chat(messages, params).text
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
        output = llm.chat(messages, replace(params, max_tokens=1))
        assert boundaries and output.choices[0].usage.cached_tokens > max(boundaries) - PAGE
    llm.engine.check()


def test_chat_answers_are_the_same_without_reuse() -> None:
    def answers(reuse: bool) -> list[str]:
        llm = LLM(dtype="float32", memory="64MiB", max_context=512, threads=1, prefix_cache=reuse)
        messages = [{"role": "user", "content": "Tell me a story."}]
        for question in ("And then?", "Why?"):
            text = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=30)).text
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": question}]
        return [message["content"] for message in messages]

    assert answers(True) == answers(False)


# What is expected stays


def turn(name: str, prompt: Sequence[int], *boundaries: int, count: int = 4) -> Request:
    return replace(greedy(tuple(prompt), count, name), boundaries=boundaries)


def conversation(engine: Engine, turns: int, first: int = 60) -> tuple[int, ...]:
    """Turns as a template gives them that drops the thinking: each prompt parts 4 tokens before its end. Returns what
    the next prompt begins with."""
    stable = numbers(1, first, 400)
    for number in range(turns):
        prompt = (*stable, *numbers(50 + number, 4, 400))
        serve(engine, turn("main", prompt, 30, len(stable)))
        stable = (*stable, *numbers(100 + number, 25, 400))
    return stable[:-25]


def side_request(engine: Engine, seed: int) -> None:
    prompt = numbers(seed, 120, 400)
    serve(engine, turn("side", prompt, 100))


@pytest.mark.parametrize("slots", [6, 7, 8])
def test_side_requests_take_the_place_of_what_no_prompt_will_repeat(slots: int) -> None:
    """A long conversation, and after each turn a title: its last boundary survives in a pool for few states."""
    engine = engine_for(slots=slots, batch=1)
    for number in range(3, 9):
        last = conversation(engine, number)
        side_request(engine, 900 + number)
        assert engine.runtime.cache.known((*last, 9)) == len(last), "the conversation's last checkpoint is gone"


def test_side_requests_beside_a_running_conversation_do_not_take_its_last_checkpoint() -> None:
    """While it runs, as many as there may be."""
    engine = engine_for(slots=7, batch=2)
    last = conversation(engine, 3)
    prompt = (*last, *numbers(70, 20, 400))
    engine.add(turn("main", prompt, 30, len(last), count=300))
    for seed in range(12):
        engine.add(turn(f"side{seed}", numbers(900 + seed, 120, 400), 100))
    while any(name.startswith("side") for name in engine._sequences):
        engine.step()
        engine.check()
        assert engine.runtime.cache.known((*last, 9)) == len(last)
    engine.abort("main")
    drain(engine)
    assert engine.runtime.cache.known((*last, 9)) == len(last)


def test_positions_that_a_conversation_has_passed_go_first() -> None:
    engine = engine_for(slots=24, batch=1)
    last = conversation(engine, 4)
    marks = {mark.done: mark.expected for mark in tree_of(engine)._marks if mark.done <= len(last)}
    expected = [done for done, is_expected in marks.items() if is_expected]
    assert expected == [30, len(last)], "the opening, and where the next prompt will part"
    assert {60, 85, 110} <= set(marks), "others stay as long as there is room: an edit may return to them"


def test_pinned_prompts_outlive_everything_else() -> None:
    engine = engine_for(slots=5, batch=1)
    prompt = numbers(3, 90, 400)
    serve(engine, turn("pin", prompt, 90, count=0))
    assert engine.runtime.cache.pin(prompt) and not engine.runtime.cache.pin(prompt[:50])
    for seed in range(20):
        side_request(engine, 900 + seed)
    assert engine.runtime.cache.known((*prompt, 1)) == 90


def test_a_pinned_prompt_gives_way_rather_than_stop_everything(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_for(pages=8, slots=4, batch=1, context=8 * PAGE)
    prompt = numbers(3, 60, 400)
    serve(engine, greedy(prompt, 0))
    assert engine.runtime.cache.pin(prompt)
    found = serve(engine, greedy(numbers(4, 100, 400), 20))
    assert found[("a", 0)].last.finish == "length"
    assert "the pinned prompt of 60 tokens gives way" in caplog.text


# What is not kept, and what is given up


def test_without_reuse_everything_is_read_again() -> None:
    engine, prompt = engine_for(reuse=False), numbers(1, 60, 500)
    for _ in range(2):
        assert usage_of(serve(engine, replace(greedy(prompt, 5), boundaries=(20,)))).cached_tokens == 0
    assert len(tree_of(engine)) == 0 and engine.stats.prompt_tokens == 120
    assert engine.runtime.cache.pages.free == engine.runtime.cache.pages.size


@pytest.mark.parametrize("kind", POISONS)
@pytest.mark.parametrize("params", [{}, {"n": 3}, {"max_tokens": 0}])
def test_l3_a_prompt_with_sick_logits_leaves_nothing(kind: str, params: dict[str, Any]) -> None:
    engine = Engine(poison(POISONS[kind])(runtime_of(odd_runtime(), budget=16)))
    sick = greedy((*numbers(1, 40, SICK), SICK), 5, "sick", **params)
    found = serve(engine, replace(sick, boundaries=(10, 20)))
    assert found[("sick", 0)].last.finish == "error"
    assert len(tree_of(engine)) == 0
    assert engine.runtime.cache.slots.free == engine.runtime.cache.slots.size


def test_l3_an_answer_whose_logits_turn_sick_is_not_kept() -> None:
    """Its prompt was sound, and stays."""
    prompt = (*numbers(1, 40, SICK), 5)
    bias = greedy(prompt, 10, "sick", logit_bias={SICK: 100.0})
    engine = Engine(poison(POISONS["nan"])(runtime_of(odd_runtime())))
    found = serve(engine, bias)
    assert found[("sick", 0)].last.finish == "error" and found[("sick", 0)].tokens == [SICK]
    assert [mark.done for mark in tree_of(engine)._marks] == [41]


def test_l3_a_step_that_raises_leaves_nothing() -> None:
    engine = Engine(Fragile(runtime_of(odd_runtime(), budget=16)))  # type: ignore[arg-type]
    found = serve(engine, replace(greedy(numbers(1, 100, 500), 5), boundaries=(10, 55)))
    assert found[("a", 0)].last.finish == "error" and len(tree_of(engine)) == 0
    assert engine.runtime.cache.slots.free == engine.runtime.cache.slots.size


@pytest.mark.parametrize("steps", range(1, 8))
def test_l3_an_abort_mid_prefill_leaves_nothing(steps: int) -> None:
    engine = engine_for(budget=16)
    engine.add(replace(greedy(numbers(1, 100, 500), 5), boundaries=(10, 55)))
    for _ in range(steps):
        engine.step()
    engine.abort("a")
    found = drain(engine)
    assert found[("a", 0)].last.finish == "abort"
    if steps < 7:
        assert len(tree_of(engine)) == 0
    again = serve(engine, greedy(numbers(1, 100, 500), 5))
    same_tokens(reference(odd_runtime(), numbers(1, 100, 500), 5), again[("a", 0)].tokens)


def test_l3_an_aborted_answer_is_kept_up_to_where_it_was_read() -> None:
    engine, prompt, found = engine_for(), numbers(1, 30, 500), dict[Any, Any]()
    engine.add(greedy(prompt, 50))
    for _ in range(10):
        take(found, engine.step())
    engine.abort("a")
    tokens = drain(engine, found)[("a", 0)].tokens
    usage = usage_of(serve(engine, greedy((*prompt, *tokens, 3), 1)))
    assert usage.cached_tokens == 30 + len(tokens) - 1


def pressed(engine: Engine, rounds: int, lengths: Sequence[int], common: int = 40) -> None:
    """Many prompts with common beginnings, some repeated, three at a time; each answer must be the reference's."""
    for turn in range(rounds):
        requests = []
        for i in range(3):
            seed = (turn * 5 + i * 3) % 7
            prompt = (*numbers(seed % 2, common, 500), *numbers(seed, lengths[seed % len(lengths)], 500))
            requests.append(replace(greedy(prompt, 12, f"r{i}"), boundaries=(common,)))
        found = serve(engine, *requests)
        for request in requests:
            same_tokens(answer_to(request.prompt), found[(request.id, 0)].tokens)


@cache
def answer_to(prompt: tuple[int, ...]) -> Reference:
    return reference(odd_runtime(), prompt, 12)


@pytest.mark.parametrize(("pages", "slots"), [(24, 5), (12, 24), (8, 6), (8, 4)])
@pytest.mark.parametrize("budget", [7, 64])
def test_l6_under_eviction_pressure(pages: int, slots: int, budget: int) -> None:
    engine = engine_for(pages=pages, slots=slots, batch=3, budget=budget, context=pages * PAGE)
    pressed(engine, 8, (3, 8, 24, 41, 60))
    assert tree_of(engine).evictions > 5


def test_l6_preempted_sequences_resume_what_they_had_read() -> None:
    """Three whose answers do not fit together."""
    engine = engine_for(pages=14, slots=12, batch=3, context=160)
    requests = [greedy(numbers(40 + i, 50, 500), 60, f"r{i}") for i in range(3)]
    found = serve(engine, *requests)
    assert engine.scheduler.preemptions > 0
    for request in requests:
        same_tokens(reference(odd_runtime(), request.prompt, 60), found[(request.id, 0)].tokens)
        assert usage_of(found, request.id).cached_tokens == 0, "its own prompt was not in the cache before"


@pytest.mark.parametrize("budget", [7, 64, WHOLE])
def test_l4_a_kept_prefix_does_not_stop_the_prompt_that_extends_it(budget: int) -> None:
    """A pool of one context, of which the kept prefix holds a page."""
    engine = engine_for(pages=6, slots=4, batch=2, context=96, budget=budget)
    prompt = numbers(1, 92, 500)
    serve(engine, greedy(prompt[:20], 0))
    found = serve(engine, greedy(prompt, 3))
    same_tokens(reference(odd_runtime(), prompt, 3), found[("a", 0)].tokens)


def test_l4_a_prompt_starts_although_its_own_prefix_fills_the_pool() -> None:
    engine = engine_for(pages=4, slots=4, batch=2, context=64)
    prompt = numbers(1, 40, 500)
    tokens = serve(engine, greedy(prompt, 20))[("a", 0)].tokens
    longer = (*prompt, *tokens, 3)
    found = serve(engine, greedy(longer, 3))
    same_tokens(reference(odd_runtime(), longer, 3), found[("a", 0)].tokens)


def test_l1_an_exact_hit_that_is_preempted_at_once_draws_its_first_token_once() -> None:
    """Two sequences take the last pages in the very step that admits it."""
    engine = engine_for(pages=6, slots=8, batch=3, context=96)
    exact = numbers(1, 16, 500)
    serve(engine, greedy(exact, 0, "earlier"))
    found: Answers = {}
    for i in range(2):
        engine.add(greedy(numbers(10 + i, 16, 500), 24, f"old{i}"))
    while any(s.done < 32 for s in engine.scheduler.running) or not engine.scheduler.running:
        take(found, engine.step())
        engine.check()
    engine.add(greedy(exact, 10))
    drain(engine, found, limit=500)
    assert engine.scheduler.preemptions, "nobody was preempted: the test shows nothing"
    same_tokens(reference(odd_runtime(), exact, 10), found[("a", 0)].tokens)
    assert usage_of(found).completion_tokens == 10


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
        self.requests: dict[str, Request] = {}
        self.answers: Answers = {}

    def add(self, prompt: tuple[int, ...], count: int, n: int = 1, boundaries: Sequence[int] = ()) -> None:
        prompt = prompt[:self.toy.context - 1]
        params = SamplingParams(temperature=0.0, max_tokens=count, n=n if count else 1)
        request = Request(f"r{len(self.requests)}", prompt, params, tuple(b for b in boundaries if b <= len(prompt)))
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


@settings(max_examples=100, deadline=None)
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


class WrongState(HybridCache):
    """Resumes with the state of another position."""

    def _copy_slot(self, source: int, target: int) -> None:
        for pool in self.storage.slot_tensors:
            pool[:, target] = 0


class WrongPage(HybridCache):
    """Resumes mid-page without the page's tokens."""

    def _copy_page(self, source: int, target: int) -> None:
        for pool in self.storage.page_tensors:
            pool[:, target] = 0


@pytest.mark.parametrize("kind", [WrongState, WrongPage])
def test_l6_the_comparison_notices(kind: type[HybridCache], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    case = Case("odd", "resumed mid-page", 64, 1, False)
    monkeypatch.setitem(globals(), "HybridCache", kind)
    with pytest.raises(AssertionError):
        test_l6_same_logits_whatever_the_cache_knows(case, tmp_path)
