"""Steps that are launched while another one is in flight: what comes out is the same as one by one, to the last bit,
and so is what stays. On a CPU a step runs when it is launched; everything else is as on a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from reuse_cases import runtime_of
from speculation_cases import Dictate, EndingAt, headed
from support import Answers, Watch, drain, embedded_runtime, greedy, numbers, odd_runtime, qwen3_runtime, take
from test_prefix_tree import tokens_of

from deltic.engine.engine import Engine
from deltic.engine.step_plan import StepPlan
from deltic.ops.types import Sampled
from deltic.params import EngineRequest, TokenEvent
from deltic.runner import launch
from deltic.runner.input_batch import build, decodes, has_bucket
from deltic.runner.launch import InFlight, Launcher, _on_host
from deltic.runner.model_runner import ModelRunner
from deltic.spec_decode.draft_length import FixedDraftLength
from deltic.spec_decode.proposers import NgramProposer

MODELS = {"odd": odd_runtime, "qwen3": qwen3_runtime, "headed": headed, "embedded": embedded_runtime}
BATCH = 4
Meddle = Callable[[Engine, int], None]


def engine_for(model: ModelRunner, ahead: bool, **changes: Any) -> Engine:
    """An engine that does not go by the clock."""
    limits: dict[str, Any] = {"batch": BATCH, "slots": 24, **changes}
    engine = Engine(runtime_of(model, **limits), NgramProposer(3), FixedDraftLength(3), ahead)
    engine.scheduler.times = None
    return engine


def test_sampled_tokens_reach_the_host_complete() -> None:
    sampled = Sampled(torch.tensor([3]), torch.tensor([1]), torch.tensor([True]), logprobs=torch.tensor([-0.5]))
    found = _on_host(sampled)
    assert found.tokens.tolist() == [3] and found.logprobs is not None and found.logprobs.tolist() == [-0.5]
    assert found.top_tokens is None and not found.landed


def nothing(engine: Engine, step: int) -> None:
    pass


def tell(engine: Engine, requests: Sequence[EngineRequest], meddle: Meddle = nothing) -> Answers:
    """All at once, then whatever meddles before each step."""
    answers, step = Answers(), 0
    for request in requests:
        engine.add(request)
    while engine.has_work or engine.scheduler.paused:
        meddle(engine, step)
        take(answers, engine.step())
        engine.check()
        step += 1
        assert step < 3000
    assert all(answer.last.finish for answer in answers.values())
    return answers


def counts(engine: Engine) -> Any:
    """The statistics without times."""
    return replace(engine.stats, async_steps=0, last_overhead=0.0, busy_seconds=0.0)


def kept(engine: Engine) -> set[tuple[int, ...]]:
    """The prefixes in the tree, which own all slots that are not free."""
    cache = engine.runtime.cache
    assert cache.slots.free + len(cache.tree._checkpoints) == cache.slots.size
    return {tuple(tokens_of(checkpoint)) for checkpoint in cache.tree._checkpoints}


def compare_kept(found: Engine, wanted: Engine) -> None:
    """Asserts that both trees keep the same prefixes, except that an answer which ended while a step was in flight is
    kept with its last token."""
    one, other = kept(found), kept(wanted)
    assert all(prefix in other or prefix[:-1] in other for prefix in one)
    longer = {prefix[:-1] for prefix in one}
    assert all(prefix in one or prefix in longer for prefix in other)


def plain(name: str, seed: int, **params: Any) -> EngineRequest:
    """Nobody drafts for it, so that it can be launched ahead."""
    settings = {"temperature": 0.8 * (seed % 2), "seed": seed, **params}
    return replace(greedy(numbers(seed, 20 + 7 * seed % 40, 250), 40, name, **settings), speculate=False)


REQUESTS: dict[str, list[EngineRequest]] = {
    "greedy and drawn": [plain("a", 1), plain("b", 2), plain("c", 3, top_p=0.9), plain("d", 4, logprobs=3)],
    "lengths": [plain("a", 1, max_tokens=1), plain("b", 2, max_tokens=2), plain("c", 3, max_tokens=17),
                plain("d", 4, max_tokens=None)],
    "stops": [plain("a", 1, stop_token_ids=tuple(range(0, 250, 9)), ignore_eos=False),
              replace(plain("b", 2), matcher=partial(EndingAt, 7)),
              replace(plain("c", 3), matcher=partial(EndingAt, 1)), plain("d", 5, max_repeat=2)],
    "choices": [plain("a", 1, n=3), plain("b", 2, n=2)],
    "what is forced": [plain("a", 1), replace(plain("b", 3, max_tokens=14), guide=partial(Dictate, {12: 3}))],
    "what the host must see": [plain("a", 1), plain("c", 6, repetition_penalty=0.5, max_tokens=19),
                               plain("d", 2, min_tokens=6, stop_token_ids=tuple(range(500)), ignore_eos=False)],
    "drafts": [plain("a", 1), replace(plain("b", 2, max_tokens=25), speculate=True), plain("c", 3)],
    "more than places": [plain(name, seed, max_tokens=8 + 5 * seed) for seed, name in enumerate("abcdefghi", 1)],
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("case", REQUESTS)
@pytest.mark.covering
def test_l6_a_step_in_flight_changes_nothing(case: str, model: str) -> None:
    wanted, found = (engine_for(MODELS[model](), ahead) for ahead in (False, True))
    answers = tell(wanted, REQUESTS[case])
    again = [replace(request, id=f"{request.id} again") for request in REQUESTS[case]]
    assert tell(found, REQUESTS[case]) == answers and counts(found) == counts(wanted)
    compare_kept(found, wanted)
    assert tell(found, again) == tell(wanted, again) and counts(found) == counts(wanted)
    compare_kept(found, wanted)
    assert found.stats.async_steps > (0 if case == "drafts" else 20) and not wanted.stats.async_steps


def test_l6_waiting_requests_are_admitted_during_a_step_in_flight() -> None:
    """Where an answer ends unforeseen that may be a step later."""
    requests = [replace(plain(name, seed, max_tokens=70), matcher=partial(EndingAt, 9 + 5 * seed % 23))
                for seed, name in enumerate("abcdefghij", 1)]
    wanted, found = (engine_for(odd_runtime(), ahead, slots=60) for ahead in (False, True))
    answers, others = tell(wanted, requests), tell(found, requests)
    assert {key: answer.tokens for key, answer in answers.items()} == {key: a.tokens for key, a in others.items()}
    assert wanted.stats.steps <= found.stats.steps <= 1.2 * wanted.stats.steps
    assert found.stats.async_steps > found.stats.steps / 2


@pytest.mark.parametrize("model", MODELS)
def test_l6_prompts_are_read_behind_a_step_in_flight(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests that come while others answer, with prompts that are known, new, or longer than a step."""
    first = [plain("a", 1), plain("b", 2, max_tokens=70)]
    known = replace(plain("known", 1), prompt=(*first[0].prompt,))
    later = {4: plain("short", 3), 9: replace(plain("long", 4), prompt=tuple(numbers(4, 150, 250))), 15: known,
             16: plain("choices", 6, n=2), 22: plain("penalty", 7, repetition_penalty=0.5, max_tokens=9)}
    launch, mixed = Launcher.launch, 0

    def launched(launcher: Launcher, plan: StepPlan, *args: Any, **named: Any) -> InFlight:
        nonlocal mixed
        mixed += named.get("before") is not None and any(row.drawn is None for row in plan.rows)
        return launch(launcher, plan, *args, **named)

    def arrive(engine: Engine, step: int) -> None:
        if step in later:
            engine.add(later[step])

    monkeypatch.setattr(Launcher, "launch", launched)
    wanted, found = (engine_for(MODELS[model](), ahead, batch=6) for ahead in (False, True))
    answers = tell(wanted, first, arrive)
    assert not mixed
    others = tell(found, first, arrive)
    assert mixed > 2 and {key: a.tokens for key, a in others.items()} == {key: a.tokens for key, a in answers.items()}


@pytest.mark.parametrize("same", [20, 40, 100])
def test_shared_prefixes_are_prefilled_once_with_async_scheduling(same: int) -> None:
    """By those that come together, and by those that come later."""
    opening, read = numbers(3, same, 250), []

    def arrive(engine: Engine, step: int) -> None:
        for index in {7: range(3, 6), 13: range(6, 7)}.get(step, ()):
            engine.add(replace(plain(f"late {index}", index), prompt=(*opening, index)))

    for ahead in (False, True):
        engine = engine_for(odd_runtime(), ahead, batch=8)
        tell(engine, [plain("a", 1), *(replace(plain(f"r{index}", index), prompt=(*opening, index))
                                       for index in range(3))], arrive)
        read.append((engine.stats.prompt_tokens, engine.stats.reused_tokens))
    assert engine.stats.async_steps and read[0] == read[1]


def test_no_request_waits_for_two_long_steps() -> None:
    """Of a prompt that is read in many, none is launched behind another one."""
    steps = []
    for ahead in (False, True):
        engine, came = engine_for(odd_runtime(), ahead, pages=80, context=1200), 0
        engine.add(replace(plain("long", 1), prompt=tuple(numbers(1, 1000, 250))))
        for _ in range(6):
            engine.step()
        engine.add(plain("short", 2))
        step = 0
        while not came:
            step += 1
            came = step * any(isinstance(event, TokenEvent) and event.request == "short" for event in engine.step())
        steps.append(came)
    assert steps[0] == steps[1]


def meddled(what: str, name: str, when: int) -> Meddle:
    def meddle(engine: Engine, step: int) -> None:
        if step == when:
            getattr(engine, what)(name)
        if what == "pause" and step == when + 5:
            engine.resume(name)
    return meddle


@pytest.mark.parametrize("when", range(1, 16, 2))
@pytest.mark.parametrize("what", ["abort", "pause"])
@pytest.mark.covering
def test_l3_work_launched_for_a_finished_answer_leaves_no_trace(what: str, when: int) -> None:
    """A prompt that goes on from there finds the same state."""
    requests, found = REQUESTS["greedy and drawn"], []
    for ahead in (False, True):
        engine = engine_for(odd_runtime(), ahead)
        answers = tell(engine, requests, meddled(what, "b", when))
        longer = (*requests[1].prompt, *answers[("b", 0)].tokens)
        more = tell(engine, [replace(greedy(longer, 12, "longer"), speculate=False)])
        found.append((answers, more))
        assert kept(engine)
    assert engine.stats.async_steps
    for one, other in zip(*found, strict=True):
        assert {key: answer.tokens for key, answer in one.items()} == {key: a.tokens for key, a in other.items()}
    if what == "abort":
        assert found[0][0] == found[1][0]


@pytest.mark.parametrize("when", range(4, 9))
@pytest.mark.parametrize("what", ["abort", "pause"])
@pytest.mark.covering
def test_l3_a_prompt_removed_from_a_step_in_flight_keeps_its_state(what: str, when: int) -> None:
    """Its next part was read in that step, but not by the state that is kept."""
    long, found = numbers(4, 150, 250), []
    for ahead in (False, True):
        engine = engine_for(odd_runtime(), ahead)
        out = meddled(what, "long", when)

        def meddle(engine: Engine, step: int, out: Meddle = out) -> None:
            if step == 3:
                engine.add(replace(plain("long", 4), prompt=tuple(long)))
            out(engine, step)

        answers = tell(engine, [plain("a", 1)], meddle)
        for read in range(30, 150, 8):  # whatever was kept of it
            again = replace(plain(f"again {read}", 3), prompt=(*long[:read], 7, 8))
            answers |= tell(engine, [again])
        found.append({key: answer.tokens for key, answer in answers.items() if key[0] != "long" or what == "pause"})
    assert engine.stats.async_steps and found[0] == found[1]


@pytest.mark.parametrize("pages", [12, 15, 18])
def test_l4_no_async_step_without_free_pages(pages: int) -> None:
    wanted, found = (engine_for(odd_runtime(), ahead, pages=pages, context=96) for ahead in (False, True))
    requests = [replace(request, output=replace(request.output, max_tokens=50))
                for request in REQUESTS["greedy and drawn"]]
    answers, others = tell(wanted, requests), tell(found, requests)
    assert {key: answer.tokens for key, answer in answers.items()} == {key: a.tokens for key, a in others.items()}
    assert found.scheduler.preemptions and found.stats.async_steps


@pytest.mark.parametrize("reuse", [False, True])
def test_steps_in_flight_need_no_more_slots_than_sequences(reuse: bool) -> None:
    """Nor does an answer that ends while a step is in flight keep the next request from its place."""
    wanted, found = (engine_for(odd_runtime(), ahead, slots=BATCH, reuse=reuse) for ahead in (False, True))
    for case in ("lengths", "stops", "more than places"):
        answers, others = tell(wanted, REQUESTS[case]), tell(found, REQUESTS[case])
        assert {key: answer.tokens for key, answer in answers.items()} == {key: a.tokens for key, a in others.items()}
        assert len(kept(found)) <= (BATCH if reuse else 0)
    assert found.stats.async_steps > found.stats.steps / 2


class Breaking(Watch):
    """A runtime whose n-th step fails."""

    at = 0

    def run(self, batch: Any) -> Any:
        if len(self.chunks) == self.at:
            self.chunks.append(())
            raise RuntimeError("this step breaks")
        return Watch.run(self, batch)


class Spoiling(Watch):
    """A runtime whose n-th step computes NaN."""

    at = 0

    def run(self, batch: Any) -> Any:
        logits = Watch.run(self, batch)
        return logits.fill_(float("nan")) if len(self.chunks) - 1 == self.at else logits


@pytest.mark.parametrize("broken", [False, True])
def test_l3_the_end_of_an_answer_is_kept_if_its_last_step_is_finite(broken: bool) -> None:
    """The step behind the token that ended the answer, which no client waits for."""
    found = []
    for kind in (Breaking, Spoiling):
        watch = kind(runtime_of(odd_runtime(), batch=BATCH))
        watch.at = 9 if broken else -1
        engine = Engine(watch, overlap=True)  # type: ignore[arg-type]
        request = replace(plain("a", 1), matcher=partial(EndingAt, 9))
        engine.add(request)
        answers, ended = Answers(), 0
        while engine.has_work:
            take(answers, engine.step())
            ended += not engine.scheduler.running
            engine.check()
        assert ended == 2, "the answer waits for a step behind it, or the step is not waited for"
        answer = answers[("a", 0)]
        assert answer.last.finish == "stop" and len(answer.tokens) == 9
        whole = (*request.prompt, *answer.tokens)
        found.append(whole in kept(engine))
        assert kept(engine)
    assert found == [not broken] * 2


def test_a_request_resumes_behind_a_token_that_ended_an_answer() -> None:
    """The next turn of a chat contains that token: the state with it is the same as that of a prompt that is read."""
    engine, request = engine_for(odd_runtime(), True), replace(plain("a", 1), matcher=partial(EndingAt, 9))
    answer = tell(engine, [request])[("a", 0)].tokens
    longer = replace(plain("b", 2), prompt=(*request.prompt, *answer, 5, 6, 7))
    found = tell(engine, [longer])[("b", 0)]
    assert found.last.usage and found.last.usage.cached_tokens == len(request.prompt) + len(answer)
    assert found.tokens == tell(engine_for(odd_runtime(), False, reuse=False), [longer])[("b", 0)].tokens


@pytest.mark.parametrize("at", [5, 6, 11])
def test_l8_failed_step_in_flight_fails_its_requests_when_collected(at: int) -> None:
    found = []
    for ahead in (False, True):
        watch = Breaking(runtime_of(odd_runtime(), batch=BATCH))
        watch.at = at
        engine = Engine(watch, overlap=ahead)  # type: ignore[arg-type]
        found.append(tell(engine, [plain("a", 1, max_tokens=6), plain("b", 2)]))
        later = tell(engine, [plain("c", 3)])
        assert later[("c", 0)].last.finish == "length"
    assert engine.stats.async_steps and found[0] == found[1]
    assert found[0][("b", 0)].last.finish == "error"


def test_nothing_is_left_in_flight_when_all_is_over() -> None:
    engine = engine_for(odd_runtime(), True)
    engine.add(plain("a", 1))
    answers = Answers()
    for _ in range(6):
        take(answers, engine.step())
    engine.abort("a")
    engine.add(plain("b", 2, max_tokens=3))
    drain(engine, answers)
    assert len(answers[("b", 0)].tokens) == 3 and engine.stats.steps == 6 + 3


def test_one_token_prompt_beside_unknown_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a prefix cache its row is one token whose logits are wanted, like those that take theirs from the step in
    flight; but a bucket has either kind alone."""
    plans = list[StepPlan]()

    def watched(plan: StepPlan, *args: Any, **options: Any) -> Any:
        plans.append(plan)
        return build(plan, *args, **options)

    monkeypatch.setattr(launch, "build", watched)
    engine = engine_for(odd_runtime(), True, reuse=False)

    def meddle(engine: Engine, step: int) -> None:
        if step in (6, 9):
            engine.add(replace(greedy([3 + step], 4, f"short {step}"), speculate=False))

    tell(engine, [plain("long", 1)], meddle)
    mixed = [plan for plan in plans if decodes(plan) and len({row.drawn is None for row in plan.rows}) == 2]
    assert len(mixed) == 2 and not any(map(has_bucket, mixed))
    assert any(has_bucket(plan) and plan.rows[0].drawn is not None for plan in plans)
