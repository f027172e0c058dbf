"""A paused request owns nothing, costs nobody anything, and answers the same once it goes on."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from reuse_cases import engine_for, runtime_of, tree_of, usage_of
from speculation_cases import PATTERNS, Dictate, Scripted
from support import Answers, drain, greedy, numbers, odd_runtime, serve, take
from test_engine import POISONS, SICK, poison
from test_prefix_reuse import answer_to

from deltic.engine.engine import Engine
from deltic.params import EngineRequest, SamplingParams
from deltic.spec_decode.draft_length import FixedDraftLength
from deltic.spec_decode.proposers import NgramProposer

PROMPT = numbers(1, 100, 500)
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {}, "drawn": {"temperature": 1.0, "seed": 5}, "choices": {"temperature": 1.0, "seed": 6, "n": 3},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3, "min_tokens": 5},
    "logprobs": {"temperature": 0.8, "seed": 7, "logprobs": 3}, "circles": {"max_repeat": 2},
}


def run(engine: Engine, answers: Answers, steps: int) -> None:
    for _ in range(steps):
        take(answers, engine.step())
        engine.check()


def at_rest(engine: Engine) -> bool:
    return not engine.has_work and engine.runtime.cache.idle


@pytest.mark.covering
@pytest.mark.parametrize("when", [0, 1, 3, 7, 8, 9, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_l6_answers_are_the_same_after_a_pause(kind: str, when: int) -> None:
    """Waiting, in the middle of the prompt, at its end, and in the answer: not by a bit, and nothing is read again."""
    request = greedy(PROMPT, 25, **KINDS[kind])
    request = replace(
        request, stable_prefixes=(40,), guide=partial(Dictate, {3: 9, 11: 17}) if kind == "greedy" else None
    )
    whole = serve(runtime_of(odd_runtime(), budget=16), [request])
    engine, found = engine_for(budget=16), Answers()
    engine.add(request)
    run(engine, found, when)
    engine.pause("a")
    engine.pause("a")
    engine.check()
    assert at_rest(engine) or (found and not engine.scheduler.running)
    run(engine, found, 3)
    engine.resume("a")
    engine.resume("a")
    drain(engine, found)
    assert found.keys() == whole.keys()
    for key, answer in whole.items():
        assert [(event.token, event.logprobs, event.finish, event.usage) for event in found[key].events] == [
            (event.token, event.logprobs, event.finish, event.usage) for event in answer.events]
    assert engine.stats.prompt_tokens == len(PROMPT)


@pytest.mark.parametrize("every", [2, 3, 5])
def test_l6_many_pauses_amid_drafts_change_nothing(every: int) -> None:
    request = greedy(PROMPT, 40, temperature=1.0, seed=3, n=2)
    whole = serve(runtime_of(odd_runtime()), [request])
    known = {key: answer.tokens for key, answer in whole.items()}
    for drafter in (NgramProposer(4), Scripted(known, PATTERNS["every third wrong"], 4)):
        engine = Engine(runtime_of(odd_runtime()), drafter, FixedDraftLength(4))
        found = Answers()
        engine.add(request)
        while engine.scheduler.paused or engine.has_work:
            engine.resume("a")
            run(engine, found, every)
            engine.pause("a")
            assert engine.runtime.cache.delta_logs.free == engine.runtime.cache.delta_logs.size
        assert {key: answer.tokens for key, answer in found.items()} == known
    assert engine.speculator.drafter and sum(engine.speculator.stats.accepted_at), "nothing was drafted"


def test_a_paused_request_is_no_work_and_gives_its_place_to_others() -> None:
    engine, found = engine_for(batch=1), Answers()
    engine.add(greedy(PROMPT, 12))
    run(engine, found, 5)
    engine.add(greedy(numbers(2, 30, 500), 5, "b"))
    run(engine, found, 2)
    assert ("b", 0) not in found
    engine.pause("a")
    drained = drain(engine, {key: answer for key, answer in found.items() if key[0] == "b"})
    assert len(drained[("b", 0)].tokens) == 5 and at_rest(engine)
    assert engine.step() == [] and engine.stats.finished == 1
    engine.resume("a")
    assert engine.has_work
    assert tuple(drain(engine, found)[("a", 0)].tokens) == answer_to(PROMPT).tokens


def test_it_goes_on_before_those_that_came_later() -> None:
    engine, found = engine_for(batch=1), Answers()
    for name in "abc":
        engine.add(greedy(numbers(ord(name), 20, 500), 5, name))
    engine.pause("b")
    run(engine, found, 2)
    engine.resume("b")
    assert [name for name, _ in drain(engine, found)] == ["a", "b", "c"]


@pytest.mark.parametrize("steps", [0, 3, 12])
def test_a_paused_request_can_be_aborted(steps: int) -> None:
    engine, found = engine_for(budget=16), Answers()
    engine.add(greedy(PROMPT, 25, n=2))
    run(engine, found, steps)
    engine.pause("a")
    engine.abort("a")
    assert engine.has_work, "its end is to be told"
    assert all(answer.last.finish == "abort" for answer in drain(engine, found).values())
    assert at_rest(engine) and not engine.scheduler.paused
    engine.resume("a")
    assert not engine.has_work


def test_unknown_requests_are_ignored() -> None:
    engine = engine_for()
    engine.pause("nobody")
    engine.resume("nobody")
    assert not engine.has_work


def test_evicted_state_of_a_paused_request_is_prefilled_again() -> None:
    engine, found = engine_for(budget=16), Answers()
    engine.add(greedy(PROMPT, 12))
    run(engine, found, 10)
    engine.pause("a")
    engine.runtime.cache.clear()
    engine.resume("a")
    assert tuple(drain(engine, found)[("a", 0)].tokens) == answer_to(PROMPT).tokens
    assert engine.stats.prompt_tokens == 2 * len(PROMPT)
    assert usage_of(found).cached_tokens == 0


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_l3_a_paused_prompt_with_nan_leaves_nothing(kind: str) -> None:
    """No logits were seen of it, so that its state itself is looked at."""
    runtime = runtime_of(odd_runtime(), budget=16)
    engine = Engine(runtime)
    engine.add(replace(greedy(PROMPT, 5), stable_prefixes=(10,)))
    engine.step()
    cache = engine.scheduler.running[0].cache
    assert cache is not None
    runtime.pools.keys[-1, cache.pages[0], 3] = float(kind)
    engine.pause("a")
    assert len(tree_of(engine)) == 0 and engine.runtime.cache.slots.free == engine.runtime.cache.slots.size
    engine.resume("a")
    assert tuple(drain(engine)[("a", 0)].tokens) == answer_to(PROMPT).tokens[:5]


def test_l8_a_prompt_whose_logits_turn_sick_after_a_pause_ends_with_an_error() -> None:
    engine = Engine(poison(POISONS["nan"])(runtime_of(odd_runtime(), budget=16)))
    engine.add(EngineRequest("a", (*numbers(1, 40, SICK), SICK), SamplingParams(temperature=0.0, max_tokens=5)))
    engine.step()
    engine.pause("a")
    engine.resume("a")
    assert drain(engine)[("a", 0)].last.finish == "error"
