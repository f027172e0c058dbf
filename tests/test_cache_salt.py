"""Requests with different salts share no cached prefix, in any tier.

Otherwise `cached_tokens` and the time to the first token would confirm a guess of how another prompt begins.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from reuse_cases import runtime_of, serve, tree_of, usage_of
from speculation_cases import headed
from support import Answers, drain, greedy, numbers, odd_runtime, reference, same_tokens, take
from test_prompts import PROMPT as SHOWN
from test_prompts import request as shown

from deltic.cache.offload.disk import DiskStore
from deltic.cache.offload.host import HostStore
from deltic.cache.offload.index import TierIndex
from deltic.engine.engine import Engine
from deltic.params import Embed, EngineRequest, Event, SamplingParams, VectorEvent, common_length
from deltic.runner.model_runner import ModelRunner
from deltic.spec_decode.draft_length import FixedDraftLength
from deltic.spec_decode.draft_model import DraftModelProposer
from deltic.spec_decode.proposers import MtpProposer, NgramProposer, Proposer

TEXT, COUNT = numbers(1, 150, 500), 12
MINE, YOURS = {"cache_salt": "mine"}, {"cache_salt": "yours"}


def asked(name: str, prompt: tuple[int, ...] = TEXT, salt: str = "", **params: object) -> EngineRequest:
    return replace(greedy(prompt, COUNT, name, **params), cache_salt=salt)


def cached(engine: Engine, *requests: EngineRequest) -> list[int]:
    """Returns the cached prompt tokens of each request. Answers equal the reference."""
    found = serve(engine, *requests)
    for request in requests:
        same_tokens(reference(odd_runtime(), request.ids, COUNT), found[request.id, 0].tokens)
    engine.check()
    return [usage_of(found, request.id).cached_tokens for request in requests]


def test_in_memory() -> None:
    """The prefix tree, with the logits at the end of prompts."""
    engine = Engine(runtime_of(odd_runtime()))
    assert [cached(engine, asked(f"{place}", salt=salt))[0] for place, salt in
            enumerate(["mine", "yours", "", "mine", "yours", ""])] == [0, 0, 0, 150, 150, 150]
    longer = (*TEXT, *reference(odd_runtime(), TEXT, COUNT).tokens, 7)
    for salt, known in (("mine", len(longer) - 2), ("yours", len(longer) - 2), ("", len(longer) - 2), ("theirs", 0)):
        assert cached(engine, asked(f"next of {salt}", longer, salt)) == [known]


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17])
def test_short_prompts(length: int) -> None:
    engine = Engine(runtime_of(odd_runtime()))
    prompt = TEXT[:length]
    assert [cached(engine, asked(f"{salt} {time}", prompt, salt))[0] for time in range(2)
            for salt in ("mine", "yours", "")] == [0, 0, 0, length, length, length]


def test_several_choices_and_vectors() -> None:
    engine = Engine(runtime_of(odd_runtime()))
    for salt in ("mine", "yours"):
        found = serve(engine, asked(salt, salt=salt, temperature=1.0, seed=3, n=3))
        assert [usage_of(found, salt, choice).cached_tokens for choice in range(3)] == [0, 150, 150]
        engine.add(EngineRequest("vector " + salt, TEXT, Embed(), (100,), cache_salt=salt))
        events = list[Event]()
        while engine.has_work:
            events += engine.step()
        vector, = (event for event in events if isinstance(event, VectorEvent))
        assert vector.usage.cached_tokens == 0, "a state is kept at the end alone, which is no vector"


def test_requests_with_different_salts_do_not_wait_for_each_other() -> None:
    """Requests that arrive together prefill a prefix once per salt."""
    engine = Engine(runtime_of(odd_runtime(), budget=64))
    rest = [numbers(10 + place, 20, 500) for place in range(4)]
    requests = [asked(f"{place}", (*TEXT, *more), salt) for place, (more, salt) in
                enumerate(zip(rest, ["mine", "yours", "mine", "yours"], strict=True))]
    for request in requests:
        engine.add(request)
    engine.step()
    holds = {
        sequence.request.id: sequence.queue.prefix_wait[1].request.id
        for sequence in engine.scheduler.waiting
        if sequence.queue.prefix_wait
    }
    assert holds == {"2": "0", "3": "1"}
    found = drain(engine)
    assert [usage_of(found, request.id).cached_tokens for request in requests] == [0, 0, 150, 150]


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_in_tiers(kind: str, tmp_path: Path) -> None:
    """A disk tier is checked after a restart."""
    host = HostStore(64 << 20)

    def started() -> Engine:
        store = host if kind == "host" else DiskStore(tmp_path, "model", 64 << 20)
        return Engine(runtime_of(odd_runtime(), tiers=[TierIndex(store, threads=False)]))

    engine = started()
    assert cached(engine, asked("a", salt="mine")) == [0]
    if kind == "host":
        engine.runtime.cache.clear()
    else:
        engine.close()
        engine = started()
    for name, salt, known in (("b", "yours", 0), ("c", "", 0), ("d", "mine", 150)):
        assert cached(engine, asked(name, salt=salt)) == [known], name
    hits = [(tier.hits, tier.hit_tokens) for tier in engine.runtime.cache.tiers]
    assert hits == [(1, 150)]
    engine.close()


def drafting(kind: str, runtime: ModelRunner) -> Proposer:
    if runtime.mtp_runner:
        return MtpProposer(runtime, runtime.mtp_runner, 3)
    return DraftModelProposer(runtime_of(odd_runtime()), 509, 3) if kind == "model" else NgramProposer(3)


@pytest.mark.parametrize("kind", ["ngram", "model", "head"])
def test_drafters(kind: str) -> None:
    """The draft model has its own cache."""
    runtime = runtime_of(headed() if kind == "head" else odd_runtime())
    drafter = drafting(kind, runtime)
    engine, read = Engine(runtime, drafter, FixedDraftLength(3)), list[int]()
    for salt in ("mine", "yours", "mine"):
        read += cached(engine, asked(f"{salt} {len(read)}", salt=salt))
        if isinstance(drafter, DraftModelProposer):
            cache = drafter._runtime.cache
            keys = [[*engine.keys_of(asked("", (*TEXT, 1), each))] for each in ("mine", "yours", "")]
            known = [cache.tree.cached_length(each) for each in keys]
            assert [count > 0 for count in known] == [True, len(read) > 1, False]
    assert read == [0, 0, 150] and engine.speculator.stats.drafted_at


def test_prompts_with_pictures() -> None:
    engine = Engine(runtime_of(odd_runtime()))
    found = [usage_of(serve(engine, replace(shown(name=f"{place}"), cache_salt=salt)), f"{place}").cached_tokens
             for place, salt in enumerate(["mine", "yours", "mine"])]
    assert found == [0, 0, len(SHOWN)]


@pytest.mark.parametrize("pin", [True, False])
def test_a_pinned_prompt_is_shared_by_all_salts(pin: bool) -> None:
    """A pinned prompt is no secret, but its continuation is."""
    engine, opening = Engine(runtime_of(odd_runtime())), TEXT[:70]
    serve(engine, EngineRequest("opening", opening, SamplingParams(max_tokens=0), (70,)))
    if pin:
        assert engine.pin(opening) and engine.pin(opening)
    for salt in ("mine", "yours"):
        for time in range(2):
            known = 150 if time else 70 if pin else 0
            assert cached(engine, asked(f"{salt} {time}", salt=salt)) == [known]
    checkpoint = tree_of(engine).at(opening)
    assert checkpoint.pinned == pin


def test_answers_to_a_pinned_prompt_are_private() -> None:
    """Another salt does not reuse the answer."""
    engine, opening = Engine(runtime_of(odd_runtime())), TEXT[:70]
    serve(engine, EngineRequest("opening", opening, SamplingParams(max_tokens=0), (70,)))
    engine.pin(opening)
    answer = serve(engine, asked("mine", opening, "mine"))["mine", 0].tokens
    guess = (*opening, *answer[:-1], 7)
    found = serve(engine, asked("yours", guess, "yours"))
    assert usage_of(found, "yours").cached_tokens == 70


def test_another_salt_costs_as_much_as_an_unknown_prompt() -> None:
    """Steps and prefilled tokens are the same for a correct guess and for an unknown prompt."""
    def costs(salt: str) -> tuple[int, int]:
        engine = Engine(runtime_of(odd_runtime()))
        serve(engine, asked("a", salt="mine"))
        before = engine.stats.steps, engine.stats.prompt_tokens
        serve(engine, asked("b", TEXT, salt))
        return engine.stats.steps - before[0], engine.stats.prompt_tokens - before[1]

    assert costs("yours") == costs("stranger") and costs("mine")[1] == 0 and costs("yours")[1] == len(TEXT)


def test_keys_of_salts() -> None:
    engine = Engine(runtime_of(odd_runtime()))
    one, two, none = (engine.keys_of(asked("a", salt=salt)) for salt in ("mine", "yours", ""))
    assert [*none] == [*TEXT] and one[2:] == two[2:] == none[2:]
    assert len({*one[:2], *two[:2]}) == 4 and max(*one[:2], *two[:2]) < 0


@pytest.mark.parametrize("seed", range(4))
def test_random_salts_in_a_small_cache(seed: int) -> None:
    """Requests evict each other, pause and end early, and reuse prefixes of their own salt only."""
    draw, engine = Random(seed), Engine(runtime_of(odd_runtime(), pages=40, slots=10, batch=3, budget=40))
    answers, told = Answers(), dict[str, list[EngineRequest]]()
    for number in range(14):
        salt, common = draw.choice(["", "mine", "yours"]), draw.choice([20, 48, 90])
        prompt = (*TEXT[:common], *numbers(draw.randrange(3), draw.randrange(1, 30), 500))
        request = asked(f"{number}", prompt, salt)
        engine.add(request)
        told.setdefault(salt, []).append(request)
        for _ in range(draw.randrange(6)):
            take(answers, engine.step())
            live = draw.choice([*engine._sequences, "nobody"])
            draw.choice([engine.pause, engine.resume, lambda _: None])(live)
            engine.check()
    for name in list(engine._sequences):
        engine.resume(name)
    answers = drain(engine, answers)
    engine.check()
    for requests in told.values():
        for place, request in enumerate(requests):
            answer = answers[request.id, 0]
            same_tokens(reference(odd_runtime(), request.ids, COUNT), answer.tokens)
            own = max((common_length(request.ids, other.ids) for other in requests if other is not request), default=0)
            assert answer.last.usage and answer.last.usage.cached_tokens <= own, (place, request.id)
    assert engine.scheduler.preemptions + engine.stats.reused_tokens > 0
