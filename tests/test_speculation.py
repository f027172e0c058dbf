"""L6: drafts change the speed of an answer, never the answer, whoever makes them, however wrong they are, whatever the
cache knows and whoever else is there; L3: a rejected draft leaves no trace."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from reuse_cases import runtime_of, usage_of
from speculation_cases import (
    ANSWER,
    MODELS,
    PARAMS,
    PATTERNS,
    PROMPT,
    EndingAt,
    Scripted,
    expected,
    half_of,
    headed,
    request_of,
)
from support import (
    Answers,
    Mismatch,
    drain,
    greedy,
    numbers,
    odd_runtime,
    pairwise,
    reference,
    same_tokens,
    small_runtime,
    take,
)

from deltic.cache.offload.disk import DiskStore
from deltic.cache.offload.index import TierIndex
from deltic.engine.engine import Engine
from deltic.params import MAX_DRAFTS, EngineRequest, SamplingParams, TokenEvent
from deltic.spec_decode.draft_length import FixedDraftLength
from deltic.spec_decode.draft_model import DraftModelProposer
from deltic.spec_decode.partial_head import HeadProposer
from deltic.spec_decode.proposers import NgramProposer

# The grid


@dataclass(frozen=True)
class Case:
    """One point: `depth` drafts a step of this pattern; what the cache knows; requests at once; tokens a step."""

    model: str
    pattern: str
    depth: int
    story: str
    batch: int
    budget: int
    aborted: bool
    params: str

    def __str__(self) -> str:
        return (f"{self.model}, {self.params}, {self.depth} {self.pattern}, {self.story}, batch {self.batch}, budget "
                f"{self.budget}" + ", aborted" * self.aborted)


def axes(case: Case) -> tuple[object, ...]:
    return (case.model, case.pattern, case.depth, case.story, case.batch, case.budget, case.aborted, case.params)


STORIES = ("cold", "warm", "exact", "forked", "from disk")
DRAFTERS = ("head", "ngram", "itself", "part")
"""Drafters that are used in earnest: a random head, which is often wrong; the model, which drafts for itself; and half
of the matrix of its logits."""
GRID = [Case(*values) for values in itertools.product(
    MODELS, (*PATTERNS, *DRAFTERS), (1, 2, 3, 4, MAX_DRAFTS), STORIES, (1, 3, 8), (7, 64), (False, True), PARAMS)
    if (values[4] > 1 or not values[6]) and values[:2] != ("qwen3", "head")]
FEW = list(pairwise(random.Random(1).sample(GRID, 1500), axes))
QUICK = list(pairwise(FEW, lambda case: (case.pattern, case.story)))
"""Every drafter with every state of the cache; the other axes' values occur, and their pairs are slow."""


def engine_of(case: Case, place: Path) -> tuple[Engine, Scripted | None]:
    runtime = headed() if case.pattern == "head" else MODELS[case.model]()
    choices = range(2 if case.story == "forked" else 1)
    answers: dict[tuple[str, int], Sequence[int]] = {
        ("seen", choice): expected(case.model, case.params, choice).tokens for choice in choices}
    drafter = None
    if case.pattern in PATTERNS:
        drafter = Scripted(answers, PATTERNS[case.pattern], case.depth)
    tiers = [TierIndex(DiskStore(place, "x", 1 << 30), threads=False)] if case.story == "from disk" else []
    small = runtime_of(runtime, budget=case.budget, batch=8, slots=32, tiers=tiers)
    real = {"ngram": lambda: NgramProposer(case.depth),
            "itself": lambda: DraftModelProposer(runtime_of(MODELS[case.model]()), 509, case.depth),
            "part": lambda: HeadProposer(small, half_of(small), case.depth)}
    return Engine(small, drafter or real.get(case.pattern, lambda: None)(), FixedDraftLength(case.depth)), drafter


def before(case: Case, engine: Engine) -> None:
    """What the cache knows was answered with drafts too."""
    prompt = expected(case.model, case.params).prompt
    known = {"warm": 64, "exact": PROMPT, "from disk": 64}.get(case.story, 0)
    if known:
        engine.add(greedy(prompt[:known], 3, "before"))
        drain(engine)


def run(case: Case, place: Path) -> tuple[Answers, Engine, Scripted | None]:
    engine, drafter = engine_of(case, place)
    before(case, engine)
    if case.story == "from disk":
        engine.close()
        engine, drafter = engine_of(case, place)
    answer = expected(case.model, case.params)
    seen = request_of(answer.prompt, case.params, 2 if case.story == "forked" else 1)
    vocabulary = engine.runtime.config.vocab_size
    others = [EngineRequest(f"n{i}", numbers(50 + i, 20 + 9 * i, vocabulary), SamplingParams(
        temperature=1.0, max_tokens=60 - 4 * i, ignore_eos=True, seed=i), speculate=i % 2 == 0)
        for i in range(case.batch - 1)]
    for request in (*others[:1], seen, *others[1:]):
        engine.add(request)
    answers: Answers = {}
    while engine.has_work:
        take(answers, engine.step())
        engine.check()
        if case.aborted and len(answers.get(("seen", 0), Nothing).events) >= 5:
            engine.abort("n0")
    drain(engine, answers)
    return answers, engine, drafter


class Nothing:
    events: tuple[TokenEvent, ...] = ()


@pytest.mark.parametrize("case", [
    case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in FEW], ids=str)
def test_l6_same_tokens_whatever_is_drafted(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("story", STORIES)
@pytest.mark.parametrize("pattern", [*PATTERNS, *DRAFTERS])
def test_l6_the_whole_grid(pattern: str, story: str, params: str, tmp_path: Path) -> None:
    cases = [case for case in GRID if (case.pattern, case.story, case.params) == (pattern, story, params)]
    for index, case in enumerate(cases):
        print(case)
        check(case, tmp_path / str(index))
    assert len(cases) >= 50


def check(case: Case, tmp_path: Path) -> None:
    answers, engine, drafter = run(case, tmp_path)
    for choice in range(2 if case.story == "forked" else 1):
        answer = expected(case.model, case.params, choice)
        if case.params in ("greedy", "drawn"):
            same_tokens(answer, answers["seen", choice].tokens, PARAMS[case.params], choice)
        else:
            assert answers["seen", choice].tokens == list(answer.tokens)
    usage, length = usage_of(answers, "seen"), len(expected(case.model, case.params).tokens)
    # else there may be no room for drafts beside prompts and the drafts of the request before it
    # and all sequences of a step must have groups, which are few
    at_any_time = case.pattern != "part" and case.budget == 64
    if case.pattern != "ngram" and (case.batch == 1 or at_any_time):
        assert usage.drafted_tokens > 0 and engine.speculator.stats.drafted_at[0] > 0
    if case.pattern == "wrong":
        assert usage.accepted_tokens == 0
    if case.pattern == "head" and usage.drafted_tokens:  # it shares the noise of draws with the model, nothing else
        share = 1 if PARAMS[case.params].temperature else 0.5
        assert usage.accepted_tokens < share * usage.drafted_tokens
    if case.pattern == "right" and case.story != "forked" and case.budget >= case.batch * (case.depth + 1):
        # every step brings one token that was not drafted, but for a last one that is cut short by the answer's end
        steps, rest = divmod(length - 1, case.depth + 1)
        assert usage.accepted_tokens == length - 1 - steps - (rest > 0 and case.params != "matcher")
    if case.pattern == "itself" and case.budget >= case.batch * (case.depth + 1):
        assert usage.accepted_tokens > 0.8 * min(usage.drafted_tokens, length) - case.depth
    assert not drafter or {sequence.request.id for sequence in drafter.forgotten} >= {"seen"}
    assert engine.runtime.cache.delta_logs.free == engine.runtime.cache.delta_logs.size


def test_the_few_hold_every_pair() -> None:
    from support import pairs

    assert set().union(*(pairs(axes(c)) for c in FEW)) == set().union(*(pairs(axes(c)) for c in GRID))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_logprobs_are_the_models(pattern: str) -> None:
    runtime, answer = odd_runtime(), expected("odd", "drawn")
    engine = Engine(runtime_of(runtime), Scripted({("a", 0): answer.tokens}, PATTERNS[pattern], 3), FixedDraftLength(3))
    engine.add(EngineRequest("a", answer.prompt, replace(PARAMS["drawn"], logprobs=2)))
    events = drain(engine)["a", 0].events
    found = torch.tensor([event.logprobs.token for event in events if event.logprobs])
    wanted = answer.logits.log_softmax(-1).gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
    assert len(found) == ANSWER and float((found - wanted).abs().max()) < 2e-3


# Ends within drafts


@pytest.mark.parametrize("place", range(1, 9))
@pytest.mark.parametrize("depth", [3, 7])
@pytest.mark.covering
def test_a_stop_within_right_drafts_cuts_there(place: int, depth: int) -> None:
    """The state that is kept is that of the answer, and of no draft behind its end."""
    runtime, answer = odd_runtime(), expected("odd", "greedy")
    stop = answer.tokens[place]
    end = answer.tokens.index(stop)
    engine = Engine(runtime_of(runtime), Scripted({("a", 0): answer.tokens}, PATTERNS["right"], depth),
                    FixedDraftLength(depth))
    params = SamplingParams(temperature=0.0, stop_token_ids=(stop,), max_tokens=ANSWER)
    engine.add(EngineRequest("a", answer.prompt, params))
    answers = drain(engine)
    assert answers["a", 0].tokens == list(answer.tokens[:end + 1]) and answers["a", 0].last.finish == "stop"
    assert usage_of(answers).completion_tokens == end + 1
    # what follows resumes at the answer's last token but one, and answers as if it had read all anew
    longer = (*answer.prompt, *answer.tokens[:end + 1], *numbers(8, 20, 509))
    engine.add(greedy(longer, 12, "b"))
    answers = drain(engine)
    assert usage_of(answers, "b").cached_tokens == PROMPT + end
    same_tokens(reference(runtime, longer, 12), answers["b", 0].tokens)


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 9])
def test_the_limit_cuts_drafts(limit: int) -> None:
    runtime, answer = odd_runtime(), expected("odd", "greedy")
    engine = Engine(runtime_of(runtime), Scripted({("a", 0): answer.tokens}, PATTERNS["right"], 4), FixedDraftLength(4))
    engine.add(greedy(answer.prompt, limit))
    answers = drain(engine)
    assert answers["a", 0].tokens == list(answer.tokens[:limit]) and answers["a", 0].last.finish == "length"


def test_a_matcher_sees_accepted_tokens_alone() -> None:
    runtime, answer = odd_runtime(), expected("odd", "greedy")
    for pattern in PATTERNS.values():
        engine = Engine(runtime_of(runtime), Scripted({("a", 0): answer.tokens}, pattern, 4), FixedDraftLength(4))
        engine.add(replace(greedy(answer.prompt, ANSWER), matcher=lambda: EndingAt(3)))
        answers = drain(engine)
        assert answers["a", 0].tokens == list(answer.tokens[:3]) and answers["a", 0].last.finish == "stop"


def test_minimum_length_holds_within_drafts() -> None:
    runtime, answer = odd_runtime(), expected("odd", "greedy")
    stop = answer.tokens[4]
    engine = Engine(runtime_of(runtime), Scripted({("a", 0): answer.tokens}, PATTERNS["right"], 4), FixedDraftLength(4))
    plain = Engine(runtime_of(runtime))
    for each in (engine, plain):
        each.add(greedy(answer.prompt, 20, min_tokens=12, stop_token_ids=(stop,)))
    assert drain(engine)["a", 0].tokens == drain(plain)["a", 0].tokens


@pytest.mark.parametrize("place", range(2, 7))
def test_a_right_draft_that_ends_the_answer_is_a_right_one(place: int) -> None:
    """And those after it are not counted: neither right nor wrong."""
    runtime, answer = odd_runtime(), expected("odd", "greedy")
    engine = Engine(runtime_of(runtime), Scripted({("a", 0): answer.tokens}, PATTERNS["right"], 4), FixedDraftLength(4))
    assert answer.tokens[place] not in answer.tokens[:place]
    for _ in range(10):
        engine.add(greedy(answer.prompt, ANSWER, stop_token_ids=(answer.tokens[place],)))
        usage = usage_of(drain(engine))
        assert usage.accepted_tokens == usage.drafted_tokens == place - place // 5
    assert engine.speculator.stats.drafted_at == engine.speculator.stats.accepted_at
    assert min(engine.speculator._usual.shares) >= 0.8, "it was never wrong"


def test_drafts_after_a_wrong_one_that_ends_the_answer_are_not_counted() -> None:
    runtime, answer, place = odd_runtime(), expected("odd", "greedy"), 5
    engine = Engine(runtime_of(runtime), Scripted({("a", 0): answer.tokens}, PATTERNS["wrong"], 4), FixedDraftLength(4))
    engine.add(greedy(answer.prompt, ANSWER, stop_token_ids=(answer.tokens[place],)))
    usage = usage_of(drain(engine))
    assert (usage.accepted_tokens, usage.drafted_tokens) == (0, 4 * (place - 1) + 1)
    assert sum(engine.speculator.stats.drafted_at) == usage.drafted_tokens


# Pressure, and who may not


@pytest.mark.parametrize(("pages", "seed"), [
    (10, 0), *(pytest.param(*values, marks=pytest.mark.slow) for values in ((12, 0), (10, 2), (12, 2)))])
def test_preempted_sequences_resume_without_drafts(pages: int, seed: int) -> None:
    """It may be back in the very step that it was to verify them in, and without a replay ring."""
    rng = random.Random(seed)
    requests = [replace(greedy(numbers(1000 * seed + index, rng.randint(10, 60), 509), rng.randint(8, 70), f"r{index}"),
                        speculate=index == 3) for index in range(4)]
    engine = Engine(runtime_of(odd_runtime(), pages=pages, context=160), Scripted({}, PATTERNS["wrong"], 12),
                    FixedDraftLength(12))
    for request in requests:
        engine.add(request)
    answers = drain(engine)
    assert engine.scheduler.preemptions > 0
    for request in requests:
        wanted = reference(odd_runtime(), request.prompt, request.output.max_tokens or 0)
        same_tokens(wanted, answers[request.id, 0].tokens)


def test_a_prompt_that_was_read_again_amid_drafts_is_kept_with_its_own_logits() -> None:
    """The second request is preempted after its first token. The chunk in which it reads the prompt's end again is not
    its last, so that the state there is kept in the step after it, which has drafts."""
    runtime, prompt = odd_runtime(), numbers(7, 48, 509)
    answer = reference(runtime, prompt, 12)
    drafter = Scripted({("second", 0): answer.tokens}, PATTERNS["right"], 3)
    engine = Engine(runtime_of(runtime, pages=6, budget=16, context=96), drafter, FixedDraftLength(3))
    engine.add(replace(greedy(numbers(9, 16, 509), 60, "first"), speculate=False))
    answers: Answers = {}
    for _ in range(13):
        take(answers, engine.step())
    engine.add(greedy(prompt, 12, "second"))
    drain(engine, answers)
    assert engine.scheduler.preemptions > 0
    engine.add(greedy(prompt, 12, "third"))
    drain(engine, answers)
    for name in ("second", "third"):
        same_tokens(answer, answers[name, 0].tokens)


@pytest.mark.parametrize("depth", [4, 12])
def test_prompts_do_not_wait_for_drafts(depth: int) -> None:
    runtime, steps = odd_runtime(), []
    for drafts in (0, depth):
        engine = Engine(runtime_of(runtime, budget=64, pages=500), Scripted({}, PATTERNS["wrong"], 12),
                        FixedDraftLength(drafts))
        for index in range(7):
            engine.add(greedy(numbers(index, 8, 509), 200, f"r{index}"))
        for _ in range(6):
            engine.step()
        engine.add(greedy(numbers(77, 300, 509), 1, "late"))
        steps.append(next(step for step in range(400) if any(event.request == "late" for event in engine.step())))
    assert steps[1] <= 2 * steps[0] + 1


def test_without_rings_nothing_is_drafted() -> None:
    runtime, answer = odd_runtime(), expected("odd", "greedy")
    small = runtime_of(runtime)
    plain = replace(small.pools, delta_logs=None)
    small.cache.__init__(plain)  # type: ignore[misc]
    engine = Engine(small, Scripted({("a", 0): answer.tokens}, PATTERNS["right"], 4), FixedDraftLength(4))
    engine.add(EngineRequest("a", answer.prompt, PARAMS["greedy"]))
    answers = drain(engine)
    same_tokens(answer, answers["a", 0].tokens)
    assert usage_of(answers).drafted_tokens == 0


@pytest.mark.parametrize("pattern", PATTERNS)
def test_preempted_sequences_go_on(pattern: str) -> None:
    runtime, answer = odd_runtime(), expected("odd", "greedy")
    small = small_runtime(runtime, batch=4, pages=20, context=160)
    engine = Engine(small, Scripted({("a", 0): answer.tokens}, PATTERNS[pattern], 4), FixedDraftLength(4))
    for index in range(3):
        engine.add(greedy(numbers(20 + index, 70, 509), 60, f"n{index}"))
    engine.add(EngineRequest("a", answer.prompt, PARAMS["greedy"]))
    answers = drain(engine)
    same_tokens(answer, answers["a", 0].tokens)
    assert engine.scheduler.preemptions > 0


# The comparison must notice


@pytest.mark.parametrize("bug", ["leaked draft", "lost token", "stale ring"])
def test_l6_the_comparison_notices(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, answer = odd_runtime(), expected("odd", "greedy")
    small = runtime_of(runtime)
    engine = Engine(small, Scripted({("a", 0): answer.tokens}, PATTERNS["alternating"], 3), FixedDraftLength(3))
    cache, commit = small.cache, small.cache.commit

    def broken(cache: Any, tokens: Any, base: int | None = None) -> None:
        commit(cache, tokens, base)
        if base is not None and bug == "lost token" and cache.unflushed > 1:
            cache.unflushed -= 1
        if base is not None and bug == "leaked draft" and cache.done % 5 == 0:
            pools = cache.pools
            assert pools.delta_logs is not None
            pools.delta_logs[2][:, :, (cache.done - 1) % 16] *= 1.5
        if base is not None and bug == "stale ring" and cache.done % 3 == 0:
            assert cache.pools.delta_logs is not None
            cache.pools.delta_logs[1].copy_(cache.pools.delta_logs[1].roll(1, 2))

    monkeypatch.setattr(cache, "commit", broken)
    engine.add(EngineRequest("a", answer.prompt, PARAMS["greedy"]))
    with pytest.raises((Mismatch, AssertionError)):
        same_tokens(answer, drain(engine)["a", 0].tokens)
