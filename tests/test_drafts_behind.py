"""Steps with drafts that are launched behind one in flight that has drafts itself: the device alone knows where their
rows begin. What comes out is the same as one by one, and so is what stays. On a CPU the part of the device is played
by a drafter that looks at what a step has drawn before the host does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reuse_cases import runtime_of
from speculation_cases import Dictate, EndingAt
from support import Answer, Answers, embedded_runtime, every, numbers, odd_runtime, same_scores, take
from test_ahead import compare_kept, plain, tell
from test_prefix_tree import tokens_of

from deltic.cache.offload.host import HostStore
from deltic.cache.offload.index import TierIndex
from deltic.engine.engine import Engine
from deltic.engine.sequence import Sequence
from deltic.engine.step_plan import UNKNOWN, PlannedRow, StepPlan
from deltic.ops.types import (
    Batch,
    Drafted,
)
from deltic.params import PAGE, RING, EngineRequest
from deltic.runner import launch
from deltic.runner.input_batch import DeviceTokens, InputBatch, build
from deltic.runner.launch import InFlight, Launcher
from deltic.runner.model_runner import ModelRunner
from deltic.spec_decode.draft_length import FixedDraftLength
from deltic.spec_decode.mtp import PendingDrafts, Wants


@pytest.fixture(autouse=True)
def no_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of the CPU know only batches of their own."""
    def built(*args: Any, **named: Any) -> Batch:
        batch = build(*args, **named)
        return replace(batch, append=batch.append.bool(), padded=None, memo={}, kept=None)

    monkeypatch.setattr(launch, "build", built)


MODELS = {"odd": odd_runtime, "embedded": embedded_runtime}
Right = Callable[[int], bool]


class Foreseeing:
    """Drafts ahead what another engine has answered, but for the places that `right` says are to be wrong."""

    def __init__(self, limit: int, answers: dict[str, list[int]], right: Right) -> None:
        self.limit, self._answers, self._right = limit, answers, right
        self._pending: PendingDrafts | None = None

    def _drafts(self, sequence: Sequence, place: int, count: int) -> list[int]:
        """Of the tokens from this place on."""
        known = [*sequence.request.prompt, *self._answers[sequence.request.id]]
        found = [known[at] if at < len(known) else 1 for at in range(place, place + count)]
        return [token if self._right(place + index) else (token + 1) % 200 for index, token in enumerate(found)]

    def draft(self, wants: Wants) -> list[list[int]]:
        self._pending = None
        return [self._drafts(sequence, len(sequence.tokens), count) for sequence, count in wants]

    def draft_ahead(self, flight: InFlight) -> None:
        self._pending = None
        rows, batch = flight.plan.rows, flight.batch
        most = max((row.drafts for row in rows), default=0)
        if not most or batch is None or flight.drawn is None or not all(
                share.row and share.row.drafts for share in flight.scheduled):
            return
        drafted = Drafted(torch.full((2 * len(rows) * (most + 1),), -7), len(rows), most)
        for place, share in enumerate(flight.scheduled):
            start, chunk, right = share.start, share.tokens, 0
            while right + 1 < chunk and flight.drawn[start + right] == batch.ids[start + right + 1]:
                right += 1
            done = int(batch.done[place]) + right + 1
            at = drafted.token_at(place)
            drafted.numbers[at:at + 2] = torch.tensor([int(flight.drawn[start + right]), done])
            for draft, token in enumerate(self._drafts(share.sequence, done + 1, most)):
                drafted.numbers[drafted.draft_at(place, draft)] = token
            share.drafted_next = True
        arrived: Any = SimpleNamespace(synchronize=lambda: None)
        places = {share.sequence: (share.cache, place) for place, share in enumerate(flight.scheduled)}
        self._pending = PendingDrafts(places, drafted, drafted.numbers.clone(), arrived)

    def take_pending(self, wants: Wants) -> PendingDrafts | None:
        ahead, self._pending = self._pending, None
        return ahead if ahead and ahead.covers(sequence for sequence, _ in wants) else None

    def drop_pending(self, sequence: Sequence) -> None:
        raise AssertionError("there is no head that could be told")

    def forget(self, sequence: Sequence) -> None:
        pass


PATTERNS: dict[str, Right] = {"right": lambda place: True, "often": lambda place: place % 7 not in (2, 3),
                              "rarely": lambda place: place % 5 == 0, "wrong": lambda place: False}


def limits_of(**changes: Any) -> dict[str, Any]:
    return {"batch": 4, "slots": 40, **changes}


def drafting(model: ModelRunner, known: dict[str, list[int]], right: Right, depth: int = 3, ahead: bool = True,
             **changes: Any) -> Engine:
    limits = limits_of(**changes)
    limits["slots"] += limits["batch"] if ahead else 0
    engine = Engine(runtime_of(model, **limits), Foreseeing(depth, known, right), FixedDraftLength(depth), ahead)
    engine.scheduler.times, engine.scheduler.mixes = None, False
    return engine


def drafted(seed: int, name: str, **params: Any) -> EngineRequest:
    return replace(plain(name, seed, **params), speculate=True)


def same_answers(found: Answers, wanted: Answers) -> None:
    """Raises an error unless all is equal but how many drafts there were."""
    assert found.keys() == wanted.keys()
    for key, answer in found.items():
        same_events(answer, wanted[key])


def same_events(found: Answer, wanted: Answer) -> None:
    events, others = ([event for event in answer.events if event.token is not None or event.finish]
                      for answer in (found, wanted))
    assert [(each.token, each.finish) for each in events] == [(each.token, each.finish) for each in others]
    wanted_scores, scores = ([each.logprobs for each in some if each.logprobs] for some in (others, events))
    same_scores(wanted_scores, scores)


def following(requests: list[EngineRequest], answers: Answers, keep: int = 0) -> list[EngineRequest]:
    """The next turns of conversations: after each answer, or so much of it."""
    return [replace(request, id=f"{request.id} next", prompt=(*request.prompt, *tokens[:keep or None], 7, 8, 9),
                    matcher=None, guide=None) for request in requests
            if (tokens := answers[request.id, 0].tokens) is not None]


REQUESTS: dict[str, list[EngineRequest]] = {
    "one": [drafted(2, "a", max_tokens=90)],
    "drawn": [drafted(1, "a"), drafted(3, "b", top_p=0.9), drafted(2, "c", logprobs=3)],
    "lengths": [drafted(1, "a", max_tokens=1), drafted(2, "b", max_tokens=4), drafted(4, "c", max_tokens=70)],
    "stops": [drafted(1, "a", stop_token_ids=tuple(range(0, 250, 9)), ignore_eos=False),
              replace(drafted(2, "b"), matcher=partial(EndingAt, 7)),
              replace(drafted(3, "c"), matcher=partial(EndingAt, 18)), drafted(5, "d", max_repeat=2)],
    "forced": [drafted(1, "a"), replace(drafted(3, "b", max_tokens=14), guide=partial(Dictate, {12: 3}))],
    "penalties": [drafted(1, "a"), drafted(6, "c", repetition_penalty=0.5, max_tokens=19)],
    "choices": [drafted(1, "a", n=3)],
    "many": [drafted(seed, name, max_tokens=8 + 5 * seed) for seed, name in enumerate("abcdefghi", 1)],
}
SELDOM = {"lengths", "forced", "penalties", "choices", "many"}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("case", REQUESTS)
@pytest.mark.covering
def test_l6_drafts_behind_drafts_change_nothing(case: str, pattern: str, model: str) -> None:
    """Neither the answers, nor what is kept, nor what is answered from there."""
    requests, wanted = REQUESTS[case], Engine(runtime_of(MODELS[model](), **limits_of()), overlap=False)
    answers = tell(wanted, requests)
    found = drafting(MODELS[model](), {name: answers[name, 0].tokens for name, _ in answers}, PATTERNS[pattern])
    same_answers(tell(found, requests), answers)
    if case != "many":  # of many some have to go, and not at the same time
        compare_kept(found, wanted)
    assert found.stats.async_steps >= (1 if case in SELDOM else found.stats.steps / 3)
    assert found.speculator.drafter, "it has failed"
    again = following(requests, answers)
    same_answers(tell(found, again), tell(wanted, again))
    if case != "many":
        compare_kept(found, wanted)


def prefixes(engine: Engine) -> Any:
    return sorted(tuple(tokens_of(checkpoint)) for checkpoint in engine.runtime.cache.tree._checkpoints)


@pytest.mark.parametrize("last", every(5, range(1, 40)))
def test_an_answer_that_ends_among_right_drafts_leaves_its_own_state(last: int) -> None:
    """Although the device has gone on behind it, from where more drafts were right."""
    requests = [replace(drafted(2, "a", max_tokens=60), matcher=partial(EndingAt, last))]
    long = tell(Engine(runtime_of(odd_runtime(), **limits_of()), overlap=False), [drafted(2, "a", max_tokens=60)])
    wanted = Engine(runtime_of(odd_runtime(), **limits_of()), overlap=False)
    answers, found = tell(wanted, requests), drafting(odd_runtime(), {"a": long["a", 0].tokens}, PATTERNS["often"])
    same_answers(tell(found, requests), answers)
    assert prefixes(found) == prefixes(wanted)
    again = following(requests, answers)
    others = tell(found, again)
    same_answers(others, tell(wanted, again))
    usage = others["a next", 0].last.usage
    assert usage and usage.cached_tokens >= len(requests[0].prompt) + last - 1, "what it has answered is read again"


@pytest.mark.parametrize("meddling", ["abort", "pause", "arrive"])
@pytest.mark.parametrize("step", [4, 7, 8, 9, 10])
@pytest.mark.covering
def test_a_sequence_is_taken_out_while_its_step_is_in_flight(step: int, meddling: str) -> None:
    """What it has answered is right, and so is what is answered from there."""
    requests, wanted = REQUESTS["one"] + [drafted(4, "b", max_tokens=70)], Engine(
        runtime_of(odd_runtime(), **limits_of()), overlap=False)
    late, answers = drafted(5, "late", max_tokens=9), tell(wanted, [*REQUESTS["one"], drafted(4, "b", max_tokens=70)])
    answers |= tell(wanted, [late])
    found, in_flight = drafting(odd_runtime(), {name: answers[name, 0].tokens for name, _ in answers},
                                PATTERNS["often"]), list[bool]()

    def meddle(engine: Engine, now: int) -> None:
        if now == step:
            in_flight.append(engine._flight is not None and engine._flight.pending is not None)
            if meddling == "abort":
                engine.abort("a")
            elif meddling == "pause":
                engine.pause("a")
            else:
                engine.add(late)
        elif now == step + 3 and meddling == "pause":
            engine.resume("a")

    others = tell(found, requests, meddle)
    assert in_flight == [True]
    for (name, choice), answer in others.items():
        tokens = answers[name, choice].tokens
        assert answer.tokens == (tokens[:len(answer.tokens)] if (name, meddling) == ("a", "abort") else tokens)
    again = following(requests, others)
    same_answers(tell(found, again), tell(wanted, again))


PARAMS: list[dict[str, Any]] = [
    {}, {"n": 2}, {"logprobs": 2}, {"repetition_penalty": 0.7}, {"min_tokens": 5}, {"top_p": 0.9},
    {"stop_token_ids": tuple(range(0, 500, 23)), "ignore_eos": False}]


def any_requests(draw: Random, seed: int) -> dict[int, EngineRequest]:
    """Eight with beginnings in common, by the step before which they come, the first of them before the first step."""
    opening, found = numbers(seed, 70, 250), dict[int, EngineRequest]()
    for index in range(8):
        params = draw.choice(PARAMS)
        prompt = (*opening[:draw.randrange(70)], *numbers(100 * seed + index, draw.randrange(1, 40), 250))
        matcher, guide = partial(EndingAt, draw.randrange(1, 50)), partial(Dictate, {draw.randrange(1, 9): 3})
        ends, guided = draw.random() < 0.4, draw.random() < 0.15
        request = drafted(draw.randrange(9), f"r{index}", max_tokens=draw.randrange(1, 50), **params)
        found[index and draw.randrange(50)] = replace(
            request, prompt=prompt, speculate=draw.random() < 0.9,
            matcher=matcher if ends and "n" not in params else None,
            guide=guide if guided and "n" not in params else None)
    return found


@pytest.mark.parametrize("seed", every(4, range(24)))
def test_l6_whatever_comes_between(seed: int) -> None:
    """Requests come, are taken out, rest and go on whenever they like, in few pages, with a tier behind them."""
    draw = Random(seed)
    requests, names, gone = any_requests(draw, seed), [f"r{index}" for index in range(8)], set[str]()
    answers = tell(Engine(runtime_of(odd_runtime(), batch=4, slots=60, pages=400), overlap=False), [*requests.values()])
    found = drafting(odd_runtime(), {name: answers[name, 0].tokens for name, _ in answers},
                     draw.choice([*PATTERNS.values()]), draw.choice([1, 2, 3, 5, 7]),
                     tiers=[TierIndex(HostStore(1 << 22), threads=False)] * draw.randrange(2),
                     pages=draw.choice([40, 60, 200]), batch=draw.choice([2, 3, 4]), slots=draw.choice([8, 24]))

    def meddle(step: int) -> None:
        if step in requests:
            found.add(requests.pop(step))
        name = draw.choice(names)
        match draw.choice(["abort", "pause", "resume", *[""] * 7]):
            case "abort" if found._sequences.get(name) and draw.random() < 0.2:
                found.abort(name)
                gone.add(name)
            case "pause" if step < 80:
                found.pause(name)
            case "resume":
                found.resume(name)
        for each in names if step >= 80 else ():
            found.resume(each)

    results, step = Answers(), 0
    while requests or found.has_work or found.scheduler.paused:
        meddle(step)
        take(results, found.step())
        found.check()
        step += 1
        assert step < 3000
    for key, result in results.items():
        assert not result.last.error and result.last.finish
        if key[0] not in gone:
            same_events(result, answers[key])
        elif key in answers:  # the other choices of who is gone may never have begun
            tokens = result.tokens
            assert tokens == answers[key].tokens[:len(tokens)]
    assert found.speculator.drafter


def test_step_waits_if_no_page_is_free() -> None:
    requests = [drafted(seed, name, max_tokens=60) for seed, name in enumerate("abcd", 1)]
    wanted = Engine(runtime_of(odd_runtime(), **limits_of(pages=14)), overlap=False)
    answers = tell(wanted, requests)
    found = drafting(odd_runtime(), {name: answers[name, 0].tokens for name, _ in answers}, PATTERNS["right"], pages=14)
    others = tell(found, requests)
    assert {key: a.tokens for key, a in others.items()} == {key: a.tokens for key, a in answers.items()}
    assert found.scheduler.preemptions and found.stats.async_steps


def test_no_step_reaches_past_the_end_of_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many drafts are right: there the context may end, too."""
    launched, behind = Launcher.launch, 0

    def launch(launcher: Launcher, plan: StepPlan, sequences: Any, *args: Any, **named: Any) -> InFlight:
        nonlocal behind
        for row, sequence in zip(plan.rows, sequences, strict=True):
            behind += row.accepts > 0
            assert row.done + row.accepts + len(row.tokens) < sequence.limit or not row.drafts
        return launched(launcher, plan, sequences, *args, **named)

    requests = [drafted(seed, name, max_tokens=10 + seed) for seed, name in enumerate("abc", 1)]
    answers = tell(Engine(runtime_of(odd_runtime(), **limits_of()), overlap=False), requests)
    monkeypatch.setattr(Launcher, "launch", launch)
    known = {name: answers[name, 0].tokens for name, _ in answers}
    same_answers(tell(drafting(odd_runtime(), known, PATTERNS["often"]), requests), answers)
    assert behind


def test_new_request_does_not_wait_for_drafting_ones() -> None:
    requests, late = [drafted(2, "a", max_tokens=90)], drafted(5, "late", max_tokens=9)
    answers = tell(Engine(runtime_of(odd_runtime(), **limits_of()), overlap=False), [*requests, late])
    found = drafting(odd_runtime(), {name: answers[name, 0].tokens for name, _ in answers}, PATTERNS["wrong"])
    begun = list[int]()

    def meddle(engine: Engine, step: int) -> None:
        if step == 20:
            engine.add(late)
        begun.extend([step] * any(sequence.generated for sequence in engine._sequences.get("late", ())))

    same_answers(tell(found, requests, meddle), answers)
    assert found.stats.async_steps > 40 and begun[0] <= 24


@pytest.mark.parametrize("depth", [1, 2, 5, 7, 8, 12])
def test_more_drafts_than_the_ring_takes_twice_wait(depth: int) -> None:
    requests = REQUESTS["one"]
    wanted = Engine(runtime_of(odd_runtime(), **limits_of()), overlap=False)
    answers = tell(wanted, requests)
    found = drafting(odd_runtime(), {"a": answers["a", 0].tokens}, PATTERNS["often"], depth)
    same_answers(tell(found, requests), answers)
    assert (found.stats.async_steps > 5) == (2 * depth + 2 <= RING)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch finds no CUDA device"))])
def test_the_cursors_of_a_batch_are_moved(device: str) -> None:
    """To where the device has the rows' first tokens: with them positions in the text and places of K/V."""
    rows = [
        PlannedRow(
            (UNKNOWN,) * 4, 14, (5, 6, 9), 2, 4, base=9, delta_log=8, append=True, drafts=3, accepts=3, rotary=100
        ),
        PlannedRow((UNKNOWN,) * 2, 30, (7, 8, 3), 4, 2, base=30, delta_log=9, append=True, drafts=1, accepts=3),
    ]
    drawn = torch.tensor([11, 16, 12, 13, 14, 21, 30, 22], device=device)
    for memory in (InputBatch(), InputBatch()):
        batch = build(StepPlan(tuple(rows)), drawn.device, drawn=DeviceTokens(drawn, [0, 2, 3, 4, 5, 7]), memory=memory)
        assert batch.ids.tolist() == [11, 12, 13, 14, 21, 22] and batch.done.tolist() == [16, 30]
        assert batch.positions.tolist() == [[116, 117, 118, 119, 30, 31]] * 3 and batch.base.tolist() == [9, 30]
        assert batch.store.tolist() == [*range(6 * PAGE, 6 * PAGE + 4), 8 * PAGE + 14, 8 * PAGE + 15]
