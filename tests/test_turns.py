"""Where more want to run than may, nobody keeps a place for long, nobody gets more than others by asking for more at
once, and answers are the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from reuse_cases import engine_for, runtime_of
from support import Answers, drain, greedy, numbers, odd_runtime, serve, take

from deltic.engine import policy
from deltic.engine.engine import Engine
from deltic.engine.policy import QUANTUM, SHORT_QUANTUM, quantum_of
from deltic.params import EngineRequest, SamplingParams
from deltic.spec_decode.draft_length import FixedDraftLength
from deltic.spec_decode.draft_model import DraftModelProposer

LONG = 6 * QUANTUM


def until_first(engine: Engine, answers: Answers, name: str) -> int:
    """Steps until this request has a token."""
    for step in range(1, 20 * QUANTUM):
        take(answers, engine.step())
        if answers.get((name, 0)) and answers[name, 0].tokens:
            return step
    raise AssertionError(f"{name} waits without end")


def long_ones(count: int, tokens: int = LONG, **more: object) -> list[EngineRequest]:
    return [greedy(numbers(index, 20, 500), tokens, name=f"long{index}", **more)
            for index in range(count)]


def started(batch: int, requests: list[EngineRequest], steps: int) -> tuple[Engine, Answers]:
    engine, answers = engine_for(batch=batch, pages=600, slots=80), Answers()
    for request in requests:
        engine.add(request)
    for _ in range(steps):
        take(answers, engine.step())
    return engine, answers


def test_new_client_preempts_after_a_quantum() -> None:
    engine, answers = started(2, long_ones(2), QUANTUM + 2)
    engine.add(greedy(numbers(9, 20, 500), 4, name="new"))
    assert until_first(engine, answers, "new") <= 3
    assert engine.scheduler.turns == 1 and engine.scheduler.preemptions == 0
    engine.check()


def test_a_place_is_safe_for_a_turn() -> None:
    engine, answers = started(2, long_ones(2), QUANTUM // 2)
    engine.add(greedy(numbers(9, 20, 500), 4, name="new"))
    assert QUANTUM // 2 - 3 <= until_first(engine, answers, "new") <= QUANTUM // 2 + 3


def test_newcomers_come_before_those_that_rest() -> None:
    engine, answers = started(2, long_ones(7), 3 * QUANTUM)
    assert len(engine.scheduler.waiting) == 5
    engine.add(greedy(numbers(9, 20, 500), 4, name="new"))
    assert until_first(engine, answers, "new") <= QUANTUM + 3


def test_all_come_to_their_end_and_none_waits_too_long() -> None:
    engine, answers = started(2, long_ones(6, 2 * QUANTUM), 0)
    since, longest = dict.fromkeys((f"long{index}" for index in range(6)), 0), 0
    for step in range(1, 4000):
        take(answers, engine.step())
        engine.check()
        since |= {sequence.request.id: step for sequence in engine.scheduler.running}
        longest = max(longest, *(step - since[sequence.request.id] for sequence in engine.scheduler.waiting), 0)
        if not engine.has_work:
            break
    assert QUANTUM <= longest <= 4 * QUANTUM, "two of six run at a time"
    assert [answer.last.finish for answer in answers.values()] == ["length"] * 6


@pytest.mark.parametrize("more", [{}, {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.2}])
def test_l6_turns_change_no_answer_and_read_nothing_again(more: dict[str, object]) -> None:
    requests = long_ones(5, 3 * QUANTUM, **more)
    alone = {key: answer.tokens for request in requests
             for key, answer in serve(runtime_of(odd_runtime(), pages=600, slots=80), [request]).items()}
    engine, answers = started(2, requests, 0)
    drain(engine, answers)
    assert {key: answer.tokens for key, answer in answers.items()} == alone
    assert engine.scheduler.turns >= 5
    assert engine.stats.prompt_tokens == sum(len(request.prompt) for request in requests)


def test_prompts_that_are_scored_go_on_where_they_were() -> None:
    """Each takes several turns of the only place."""
    def asked(index: int) -> EngineRequest:
        return EngineRequest(f"scored{index}", numbers(index, 100, 500), SamplingParams(
            temperature=0.0, max_tokens=3, prompt_logprobs=2))

    alone = [serve(runtime_of(odd_runtime()), [asked(index)])[f"scored{index}", 0].events for index in range(3)]
    engine, answers = engine_for(batch=1, budget=1), Answers()
    for index in range(3):
        engine.add(asked(index))
    drain(engine, answers, limit=400)
    assert [[event.prompt for event in answers[f"scored{index}", 0].events] for index in range(3)] == [
        [event.prompt for event in events] for events in alone]
    assert engine.scheduler.turns >= 5 and engine.stats.prompt_tokens == 3 * 100


def test_waiting_sequences_hold_no_draft_cache() -> None:
    drafter = DraftModelProposer(runtime_of(odd_runtime(), batch=2), 509, 4)
    engine, answers = (
        Engine(runtime_of(odd_runtime(), batch=2, pages=600, slots=80), drafter, FixedDraftLength(4)),
        Answers(),
    )
    requests = long_ones(5, 6 * QUANTUM)
    for request in requests:
        engine.add(request)
    while engine.has_work:
        take(answers, engine.step())
        assert len(drafter._caches) <= 4, "those that run, and those that did in the step before"
    alone = serve(runtime_of(odd_runtime(), pages=600, slots=80), requests)
    assert {key: answer.tokens for key, answer in answers.items()} == {
        key: answer.tokens for key, answer in alone.items()}
    assert engine.scheduler.turns > 3 and not drafter._caches and drafter._runtime.cache.idle


def test_choices_of_one_request_have_one_share() -> None:
    """Eight choices hold all places; another client waits for one turn, not for all of them."""
    engine, answers = started(2, [replace(long_ones(1)[0], output=replace(
        long_ones(1)[0].output, n=8, temperature=1.0, seed=1))], QUANTUM + 4)
    assert len(engine.scheduler.running) == 2 and len(engine.scheduler.waiting) == 6
    turns = engine.scheduler.turns
    assert turns == 0, "choices of one request do not push each other"
    engine.add(greedy(numbers(9, 20, 500), 4, name="new"))
    assert until_first(engine, answers, "new") <= 3 and engine.scheduler.turns == 1


def test_prompts_that_came_together_have_one_share() -> None:
    many = [replace(request, group="one body") for request in long_ones(9, 2 * QUANTUM)]
    engine, answers = started(3, many, 5)
    engine.add(greedy(numbers(9, 20, 500), 4, name="new"))
    assert until_first(engine, answers, "new") <= SHORT_QUANTUM
    waiting = [sequence.request.id for sequence in engine.scheduler.waiting]
    assert sorted(waiting) == waiting or engine.scheduler.turns, "the others keep their order"


def test_no_preemption_by_turns_without_a_prefix_cache() -> None:
    """What was read would be lost."""
    engine, answers = Engine(runtime_of(odd_runtime(), batch=2, reuse=False)), Answers()
    for request in long_ones(3, 2 * QUANTUM):
        engine.add(request)
    drain(engine, answers)
    assert engine.scheduler.turns == 0 and len(answers) == 3


def of(client: str, requests: list[EngineRequest]) -> list[EngineRequest]:
    return [replace(request, client=client, id=f"{client}-{request.id}") for request in requests]


def test_clients_take_turns_however_many_requests_one_has() -> None:
    """Each body of the one is a group of its own; the other's two come to their places at once."""
    engine, answers = started(4, of("many", long_ones(12)), 5)
    for request in of("few", [greedy(numbers(50 + index, 20, 500), 4, name=f"new{index}") for index in range(2)]):
        engine.add(request)
    assert until_first(engine, answers, "few-new0") <= 3
    assert until_first(engine, answers, "few-new1") <= SHORT_QUANTUM
    engine.check()


def test_who_has_waited_long_stands_before_nobody_elses_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the many have waited for longer than anybody shall."""
    monkeypatch.setattr(policy, "LONGEST_WAIT", QUANTUM)
    engine, _ = started(2, of("many", long_ones(12)), 2 * QUANTUM)
    answers = Answers()
    for request in of("few", [greedy(numbers(50 + index, 20, 500), 4, name=f"new{index}") for index in range(2)]):
        engine.add(request)
    assert until_first(engine, answers, "few-new0") <= 3
    assert until_first(engine, answers, "few-new1") <= QUANTUM


def test_who_has_waited_long_comes_before_his_clients_newcomers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "LONGEST_WAIT", QUANTUM)
    engine, _ = started(1, of("one", long_ones(3)), 2 * QUANTUM)
    patient = {
        sequence for sequence in engine.scheduler.waiting if engine.scheduler._step - sequence.queue.turn >= QUANTUM
    }
    engine.add(*of("one", [greedy(numbers(9, 20, 500), 4, name="new")]))
    ordered = policy.in_turn(engine.scheduler.waiting, [], engine.scheduler._step)
    assert patient and {*ordered[:len(patient)]} == patient and ordered[len(patient)].request.id == "one-new"


def test_a_client_is_seen_behind_hundreds_of_another() -> None:
    engine, answers = started(2, of("many", [greedy(numbers(index, 4, 500), 2, name=f"short{index}")
                                             for index in range(400)]), 2)
    engine.add(*of("few", [greedy(numbers(999, 4, 500), 2, name="new")]))
    assert until_first(engine, answers, "few-new") <= 3
    assert len(engine.scheduler.waiting) > 350
    drain(engine, answers)
    assert len(answers) == 401


def test_bodies_of_one_client_wait_for_their_turn() -> None:
    engine, answers = started(2, of("one", long_ones(2)), QUANTUM // 2)
    engine.add(*of("one", [greedy(numbers(9, 20, 500), 4, name="new")]))
    assert QUANTUM // 2 - 3 <= until_first(engine, answers, "one-new") <= QUANTUM // 2 + 3


def test_clients_with_as_many_places_keep_them() -> None:
    engine, answers = started(2, [*of("a", long_ones(1)), *of("b", long_ones(1))], QUANTUM + 2)
    for request in (*of("a", long_ones(3)[1:]), *of("b", long_ones(3)[1:])):
        engine.add(request)
    for _ in range(2 * QUANTUM):
        take(answers, engine.step())
    assert len({sequence.client for sequence in engine.scheduler.running}) == 2


def test_what_turns_have_read_again_is_little_of_what_steps_do() -> None:
    """Sixteen for four places, and memory for five: a step could read any of them again, but all wait meanwhile."""
    requests = [greedy(numbers(index, 100, 500), 4 * QUANTUM, name=f"long{index}") for index in range(16)]
    engine, answers = engine_for(batch=4, pages=70, slots=80, budget=512), Answers()
    for request in requests:
        engine.add(request)
    drain(engine, answers)
    assert 0 < engine.scheduler.turns <= 16 and engine.scheduler.preemptions == 0
    assert engine.stats.prompt_tokens <= 2 * 16 * 100, "every turn of 32 steps had them read again"


def test_many_places_change_hands_no_more_often_than_few() -> None:
    assert quantum_of(1, 1) == quantum_of(1, 8) == QUANTUM and quantum_of(2, 3) == SHORT_QUANTUM
    assert quantum_of(1, 64) == 8 * QUANTUM and quantum_of(3, 64) == 8 * SHORT_QUANTUM


def test_few_give_way_where_what_was_read_would_be_lost() -> None:
    """Eight long conversations for two places, and memory for four: if all took turns, most would be read again."""
    requests = [greedy(numbers(index, 150, 500), 2 * QUANTUM, name=f"long{index}") for index in range(8)]
    engine, answers = engine_for(batch=2, pages=60, slots=80, budget=64), Answers()
    for request in requests:
        engine.add(request)
    drain(engine, answers)
    assert engine.stats.prompt_tokens <= 9 * 150 and engine.scheduler.preemptions == 0
    assert 0 < engine.scheduler.turns < 8
