"""A constraint's tokens are the only ones that are drawn, one by one, in batches, with drafts and without; the rest of
a draw is as ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reuse_cases import runtime_of, usage_of
from speculation_cases import PARAMS, PATTERNS, Dictate, Scripted, expected
from support import (
    Answers,
    Reference,
    drain,
    drawn,
    greedy,
    numbers,
    odd_runtime,
    same_tokens,
    session_over,
    small_runtime,
    take,
)

from deltic.engine.engine import Engine
from deltic.params import EngineRequest, SamplingParams
from deltic.runner.sampling import SLOW, LogitMasks, forbids, offsets
from deltic.spec_decode.draft_length import FixedDraftLength

PROMPT, ANSWER, VOCABULARY = 83, 40, 509


def may_follow(before: Sequence[int], token: int) -> bool:
    """The rule: a quarter of all tokens, another one after each."""
    return (token + len(before) + sum(before)) % 4 == 0


@dataclass
class Quarter:
    """Keeps to the rule. end: a token that may come at any time, too."""

    end: int | None = None
    tokens: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)

    def fitting(self, drafts: Sequence[int], /) -> int:
        return next((place for place, draft in enumerate(drafts)
                     if not may_follow([*self.tokens, *drafts[:place]], draft)), len(drafts))

    def allowed(self, drafts: Sequence[int], /) -> list[bytes | None]:
        assert Quarter.fitting(self, drafts) == len(drafts), "a draft that is forbidden was offered"
        self.asked.append(len(drafts))
        return [self.mask([*self.tokens, *drafts[:count]]) for count in range(len(drafts) + 1)]

    def mask(self, before: Sequence[int]) -> bytes:
        bits = sum(1 << token for token in range(VOCABULARY) if may_follow(before, token) or token == self.end)
        return bits.to_bytes(-(-VOCABULARY // 8), "little")

    def push(self, token: int, /) -> None:
        self.tokens.append(token)


@cache
def constrained(params: str, choice: int = 0) -> Reference:
    """Token by token, without an engine."""
    runtime, asked, rule = odd_runtime(), PARAMS[params], Quarter()
    prompt = numbers(5, PROMPT, VOCABULARY)
    session, rows, tokens = session_over(runtime, batch=1), [], list[int]()
    logits = session.prefill(prompt)
    for index in range(ANSWER):
        rows.append(logits.clone())
        logits = logits + offsets(rule.mask(tokens), VOCABULARY, logits.device)
        tokens.append(drawn(logits, asked, choice, PROMPT + index))
        logits = session.step(tokens[-1])
    return Reference(prompt, tuple(tokens), torch.stack(rows))


def keeps_to_the_rule(tokens: Sequence[int]) -> bool:
    return all(may_follow(tokens[:place], token) for place, token in enumerate(tokens))


@pytest.mark.parametrize("params", ["greedy", "drawn"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("depth", [0, 1, 4, 12])
@pytest.mark.covering
def test_constraint_allows_only_its_tokens(params: str, pattern: str, depth: int) -> None:
    """A neighbour without a constraint goes on as ever."""
    answer = constrained(params)
    drafter = Scripted({("a", 0): answer.tokens}, PATTERNS[pattern], depth)
    engine = Engine(runtime_of(odd_runtime()), drafter, FixedDraftLength(depth))
    engine.add(EngineRequest("other", answer.prompt, PARAMS[params]))
    engine.add(EngineRequest("a", answer.prompt, PARAMS[params], constraint=Quarter))
    answers = drain(engine)
    assert answers["a", 0].tokens == list(answer.tokens) and keeps_to_the_rule(answer.tokens)
    same_tokens(expected("odd", params), answers["other", 0].tokens, PARAMS[params])
    usage = usage_of(answers)
    if pattern == "right":
        assert usage.accepted_tokens == usage.drafted_tokens == ANSWER - 1 - -(-(ANSWER - 1) // (depth + 1))
    if pattern == "wrong":  # a wrong one is never offered here, as it breaks the rule
        assert usage.drafted_tokens == 0


@pytest.mark.parametrize("params", ["penalties", "filters"])
@pytest.mark.parametrize("depth", [0, 4])
def test_penalties_and_filters_apply_after_the_constraint(params: str, depth: int) -> None:
    plain = Engine(runtime_of(odd_runtime()))
    plain.add(EngineRequest("a", constrained("greedy").prompt, PARAMS[params], constraint=Quarter))
    tokens = drain(plain)["a", 0].tokens
    assert keeps_to_the_rule(tokens) and len(tokens) == ANSWER and 9 not in tokens
    drafter = Scripted({("a", 0): tokens}, PATTERNS["every third wrong"], depth)
    engine = Engine(runtime_of(odd_runtime()), drafter, FixedDraftLength(depth))
    engine.add(EngineRequest("a", constrained("greedy").prompt, PARAMS[params], constraint=Quarter))
    assert drain(engine)["a", 0].tokens == tokens


def test_each_choice_has_its_own() -> None:
    engine = Engine(runtime_of(odd_runtime()))
    engine.add(EngineRequest("a", constrained("drawn").prompt, replace(PARAMS["drawn"], n=3), constraint=Quarter))
    answers = drain(engine)
    for choice in range(3):
        assert answers["a", choice].tokens == list(constrained("drawn", choice).tokens)


def test_preempted_and_repeated_prompts() -> None:
    answer = constrained("greedy")
    drafter = Scripted({("a", 0): answer.tokens}, PATTERNS["now and then"], 4)
    engine = Engine(small_runtime(odd_runtime(), batch=4, pages=20, context=160), drafter, FixedDraftLength(4))
    for index in range(3):
        engine.add(greedy(numbers(20 + index, 70, VOCABULARY), 60, f"n{index}"))
    engine.add(EngineRequest("a", answer.prompt, PARAMS["greedy"], constraint=Quarter))
    assert drain(engine)["a", 0].tokens == list(answer.tokens) and engine.scheduler.preemptions > 0
    engine = Engine(runtime_of(odd_runtime()))
    for name in ("a", "b"):
        engine.add(EngineRequest(name, answer.prompt, PARAMS["greedy"], constraint=Quarter))
        answers = drain(engine)
        assert answers[name, 0].tokens == list(answer.tokens)
    assert usage_of(answers, "b").cached_tokens == PROMPT
    engine.add(EngineRequest("c", answer.prompt, PARAMS["greedy"]))  # the kept logits are the model's own
    same_tokens(expected("odd", "greedy"), drain(engine)["c", 0].tokens)


@pytest.mark.parametrize("depth", [0, 4])
def test_logprobs_are_those_before_the_constraint(depth: int) -> None:
    answer = constrained("greedy")
    drafter = Scripted({("a", 0): answer.tokens}, PATTERNS["every third wrong"], depth)
    engine = Engine(runtime_of(odd_runtime()), drafter, FixedDraftLength(depth))
    engine.add(EngineRequest("a", answer.prompt, replace(PARAMS["greedy"], logprobs=2), constraint=Quarter))
    events, wanted = drain(engine)["a", 0].events, answer.logits.log_softmax(-1)
    assert len(events) == ANSWER
    for index, event in enumerate(events):
        assert event.logprobs is not None and event.token == answer.tokens[index]
        assert event.logprobs.token == pytest.approx(float(wanted[index, event.token]), abs=2e-3)
        assert [token for token, _ in event.logprobs.top] == wanted[index].topk(2).indices.tolist()


def test_a_guide_has_the_last_word() -> None:
    engine = Engine(runtime_of(odd_runtime()))
    engine.add(EngineRequest("a", constrained("greedy").prompt, PARAMS["greedy"], guide=partial(Dictate, {3: 8, 4: 9}),
                       constraint=Quarter))
    tokens = drain(engine)["a", 0].tokens
    assert tokens[3:5] == [8, 9] and tokens[:3] == list(constrained("greedy").tokens[:3])
    assert all(may_follow(tokens[:place], token) for place, token in enumerate(tokens) if place not in (3, 4))


@dataclass
class Stair(Quarter):
    """The end may come after four tokens, and nothing else after eight."""

    def mask(self, before: Sequence[int]) -> bytes:
        if len(before) >= 8:
            return (1 << 13).to_bytes(64, "little")
        self.end = 13 if len(before) >= 4 else None
        return super().mask(before)


@pytest.mark.parametrize("more", [{}, {"min_tokens": 6}, {"min_tokens": 30}, {"ignore_eos": True}])
def test_eos_is_sampled_if_nothing_else_is_allowed(more: dict[str, Any]) -> None:
    runtime = odd_runtime()
    runtime = runtime_of(replace(runtime, generation=runtime.generation.with_eos([13])))
    engine = Engine(runtime)
    wants_end = SamplingParams(temperature=0.0, max_tokens=20, logit_bias={13: 100.0}, **more)
    engine.add(EngineRequest("a", constrained("greedy").prompt, wants_end, constraint=Stair))
    answer = drain(engine)["a", 0]
    length = {"min_tokens": min(more.get("min_tokens", 0), 8), "ignore_eos": 8}.get(next(iter(more), ""), 4)
    assert answer.last.finish == "stop" and answer.tokens.index(13) == length == len(answer.tokens) - 1


@dataclass
class Slow(Quarter):
    """Takes its time for every mask, and for the third one waits until it may go on."""

    free: threading.Event = field(default_factory=threading.Event)

    def allowed(self, drafts: Sequence[int], /) -> list[bytes | None]:
        assert not drafts or not self.asked, "what is slow has no drafts"
        until = time.thread_time() + 2 * SLOW
        while time.thread_time() < until:
            pass
        if len(self.asked) == 2:
            assert self.free.wait(60)
        return Quarter.allowed(self, drafts)


@pytest.mark.parametrize("depth", [0, 4])
def test_slow_mask_delays_no_other_request(depth: int) -> None:
    """Its sequence sits out steps; the answers of both are as ever."""
    answer, slow = constrained("greedy"), Slow()
    drafter = Scripted({("a", 0): answer.tokens}, PATTERNS["right"], depth)
    engine = Engine(runtime_of(odd_runtime()), drafter, FixedDraftLength(depth))
    engine.add(EngineRequest("a", answer.prompt, PARAMS["greedy"], constraint=lambda: slow))
    engine.add(EngineRequest("other", answer.prompt, PARAMS["greedy"]))
    answers: Answers = {}
    for _ in range(20_000):
        take(answers, engine.step())
        if ("other", 0) in answers and answers["other", 0].last.finish and len(slow.tokens) == 2:
            break
    assert answers["other", 0].last.finish and len(slow.tokens) == 2
    slow.free.set()
    assert drain(engine, answers)["a", 0].tokens == list(answer.tokens)
    same_tokens(expected("odd", "greedy"), answers["other", 0].tokens)


def test_an_answer_may_be_aborted_while_its_mask_is_made() -> None:
    answer, slow = constrained("greedy"), Slow()
    engine = Engine(runtime_of(odd_runtime()))
    engine.add(EngineRequest("a", answer.prompt, PARAMS["greedy"], constraint=lambda: slow))
    for _ in range(20_000):
        engine.step()
        if len(slow.tokens) == 2:
            break
    assert len(slow.tokens) == 2
    engine.pause("a")
    engine.resume("a")
    engine.abort("a")
    slow.free.set()
    assert drain(engine)["a", 0].last.finish == "abort"


def test_slow_masks_take_turns_by_client() -> None:
    """Sixty of one client wait, and one of another is made next."""
    masks, made, free, begun = LogitMasks(), list[str](), threading.Event(), threading.Event()

    class Waits:
        def __init__(self, client: str) -> None:
            self.client = client

        def allowed(self, drafts: Sequence[int], /) -> list[bytes | None]:
            begun.set()
            assert free.wait(60)
            made.append(self.client)
            return [None]

    def asking(client: str) -> Any:
        return SimpleNamespace(client=client, constraint=Waits(client), answering=True,
                               sampler=SimpleNamespace(mask=None, mask_seconds=1.0))

    sequences = [asking("flood") for _ in range(60)]
    masks.begin(sequences)
    assert begun.wait(60)
    sequences.append(asking("other"))
    masks.begin(sequences)
    free.set()
    for sequence in sequences:
        assert sequence.sampler.mask.result(60) == [None]
    assert made.index("other") == 1


def test_pending_mask_is_dropped_with_its_answer() -> None:
    """The only thread for slow ones is held by another one's."""
    answer, slow, other = constrained("greedy"), Slow(), Slow()
    other.free.set()
    engine = Engine(runtime_of(odd_runtime()))
    for name, constraint in (("a", slow), ("b", other)):
        engine.add(
            EngineRequest(name, answer.prompt, PARAMS["greedy"], constraint=lambda constraint=constraint: constraint)
        )
    held = False
    for _ in range(20_000):
        engine.step()
        masks = [sequence.sampler.mask for name in "ab" for sequence in engine._sequences[name]]
        held = len(slow.asked) == 2 and all(masks) and [mask.running() or mask.done() for mask in masks if mask] == [
            True, False]
        if held:
            break
    made = len(other.asked)
    engine.abort("b")
    slow.free.set()
    answers = drain(engine)
    assert held and answers["a", 0].last.finish and len(other.asked) == made


def test_bias_that_forbids_every_token_is_an_error() -> None:
    engine = Engine(runtime_of(odd_runtime()))
    first = [token for token in range(VOCABULARY) if may_follow([], token)]
    params = SamplingParams(temperature=0.0, max_tokens=4, logit_bias=dict.fromkeys(first, -100.0))
    engine.add(EngineRequest("a", constrained("greedy").prompt, params, constraint=Quarter))
    last = drain(engine)["a", 0].last
    assert last.finish == "error" and "no token is left" in str(last.error)


@pytest.mark.parametrize("method", ["fitting", "allowed", "push"])
@pytest.mark.parametrize("depth", [0, 4])
def test_failing_constraint_ends_only_its_own_request(method: str, depth: int) -> None:
    class Broken(Quarter):
        """Works for four tokens."""

    def fail(self: Broken, given: Any, /) -> Any:
        if len(self.tokens) >= 4:
            raise LookupError("mine")
        return getattr(Quarter, method)(self, given)

    setattr(Broken, method, fail)
    answer = constrained("greedy")
    drafter = Scripted({("a", 0): answer.tokens, ("bad", 0): answer.tokens}, PATTERNS["right"], depth)
    engine = Engine(runtime_of(odd_runtime()), drafter, FixedDraftLength(depth))
    engine.add(EngineRequest("bad", answer.prompt, PARAMS["greedy"], constraint=Broken))
    engine.add(EngineRequest("a", answer.prompt, PARAMS["greedy"], constraint=Quarter))
    answers = drain(engine)
    if method == "fitting":  # it costs drafts, if there are any
        assert answers["bad", 0].tokens == list(answer.tokens)
    else:
        assert answers["bad", 0].last.finish == "error" and "mine" in str(answers["bad", 0].last.error)
    assert answers["a", 0].tokens == list(answer.tokens)


def test_masks_in_bits() -> None:
    mask = bytes([0b10000001, 0b00000010])
    assert offsets(mask, 21, torch.device("cpu")).tolist() == [0.0 if token in (0, 7, 9) else float("-inf")
                                                               for token in range(21)]
    assert [token for token in range(40) if not forbids(mask, token)] == [0, 7, 9]
    assert len(offsets(bytes(64), 509, torch.device("cpu"))) == 509
