"""L6: guesses change the speed of an answer, never the answer, whoever makes them, however wrong they are, whatever the
cache knows and whoever else is there; L3: a rejected guess leaves no trace."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support import (
    Answers,
    Mismatch,
    Reference,
    drain,
    greedy,
    numbers,
    odd_runtime,
    odd_shape,
    pairwise,
    qwen3_runtime,
    reference,
    same_logits,
    same_tokens,
    session_over,
    small_runtime,
    stepwise_logits,
    take,
)
from test_prefix_reuse import runtime_of, usage_of

from deltic.cache.disk import Disk
from deltic.cache.shelf import Shelf
from deltic.config import EngineConfig
from deltic.engine.depth import FixedDepth
from deltic.engine.drafters import HeadDrafter, ModelDrafter, NgramDrafter, Wants
from deltic.engine.engine import Engine
from deltic.engine.head import DraftHead
from deltic.engine.runtime import RandomModel, Runtime, load
from deltic.engine.sequence import Sequence as Running
from deltic.errors import ConfigError, RequestError
from deltic.text.front import Front
from deltic.text.tokenizer import Tokenizer
from deltic.types import MAX_DRAFTS, PAGE, Request, SamplingParams, TokenOut

PROMPT, ANSWER, SEED = 83, 40, 77
RUNTIMES = {"odd": odd_runtime, "qwen3": qwen3_runtime}
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True),
    "drawn": SamplingParams(temperature=1.0, max_tokens=ANSWER, ignore_eos=True, seed=SEED),
    "penalties": SamplingParams(temperature=0.8, max_tokens=ANSWER, ignore_eos=True, seed=SEED, presence_penalty=0.7,
                                frequency_penalty=0.5, repetition_penalty=1.3, logit_bias={7: 4.0, 9: -100}),
    "filters": SamplingParams(temperature=1.2, max_tokens=ANSWER, ignore_eos=True, seed=SEED, top_k=40, top_p=0.9,
                              min_p=0.02),
    "matcher": SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True),
}


# Drafters that know the answer


@dataclass
class Scripted:
    """Guesses from known answers. wrong(n) says whether the n-th guess of all is spoiled."""

    answers: dict[tuple[str, int], Sequence[int]]
    wrong: Callable[[int], bool]
    limit: int
    vocabulary: int = 509
    made: int = 0
    spoiled: int = 0
    forgotten: list[Running] = field(default_factory=list)

    def draft(self, wants: Wants) -> list[list[int]]:
        return [self._guess(sequence, count) for sequence, count in wants]

    def _guess(self, sequence: Running, count: int) -> list[int]:
        answer = self.answers.get((sequence.request.id, sequence.choice), ())
        guesses = [*answer[sequence.generated:sequence.generated + count]]
        guesses += [(sequence.tokens[-1] + 1 + i) % self.vocabulary for i in range(count - len(guesses))]
        for index in range(count):
            self.made += 1
            if self.wrong(self.made):
                self.spoiled += 1
                guesses[index] = (guesses[index] + 1) % self.vocabulary
        return guesses

    def forget(self, sequence: Running) -> None:
        self.forgotten.append(sequence)


PATTERNS: dict[str, Callable[[int], bool]] = {
    "right": lambda n: False,
    "wrong": lambda n: True,
    "alternating": lambda n: n % 2 == 0,
    "every third wrong": lambda n: n % 3 == 0,
    "now and then": lambda n: random.Random(n).random() < 0.3,
}


class Seventeen:
    """Ends an answer at its seventeenth token, as a stop string may."""

    def __init__(self) -> None:
        self.seen = 0

    def push(self, token: int) -> bool:
        self.seen += 1
        return self.seen == 17


def request_of(prompt: Sequence[int], params: str, n: int = 1, name: str = "seen") -> Request:
    return Request(name, tuple(prompt), replace(PARAMS[params], n=n),
                   matcher=Seventeen if params == "matcher" else None)


# The grid


@dataclass(frozen=True)
class Case:
    """One point: `depth` guesses a step of this pattern; what the cache knows; requests at once; tokens a step."""

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
DRAFTERS = ("head", "ngram", "itself")
"""Drafters that are used in earnest: a random head, which is mostly wrong; and the model, which drafts for itself."""
GRID = [Case(*values) for values in itertools.product(
    RUNTIMES, (*PATTERNS, *DRAFTERS), (1, 2, 3, 4, MAX_DRAFTS), STORIES, (1, 3, 8), (7, 64), (False, True), PARAMS)
    if (values[4] > 1 or not values[6]) and values[:2] != ("qwen3", "head")]
FEW = list(pairwise(random.Random(1).sample(GRID, 1500), axes))


@cache
def expected(model: str, params: str, choice: int = 0) -> Reference:
    """Token by token, without an engine; penalties and filters through an engine that guesses nothing."""
    runtime = RUNTIMES[model]()
    prompt = numbers(5, PROMPT, runtime.config.vocab_size)
    if params in ("greedy", "drawn"):
        return reference(runtime, prompt, ANSWER, PARAMS[params], choice)
    engine = Engine(runtime_of(runtime))
    engine.add(request_of(prompt, params, choice + 1))
    tokens = drain(engine)["seen", choice].tokens
    session = session_over(runtime, batch=1)
    logits = stepwise_logits(session, (*prompt, *tokens[:-1]))[PROMPT - 1:]
    return Reference(prompt, tuple(tokens), logits)


def engine_of(case: Case, place: Path) -> tuple[Engine, Scripted | None]:
    runtime = headed() if case.pattern == "head" else RUNTIMES[case.model]()
    choices = range(2 if case.story == "forked" else 1)
    answers: dict[tuple[str, int], Sequence[int]] = {
        ("seen", choice): expected(case.model, case.params, choice).tokens for choice in choices}
    drafter = None
    if case.pattern in PATTERNS:
        drafter = Scripted(answers, PATTERNS[case.pattern], case.depth)
    real = {"ngram": lambda: NgramDrafter(case.depth),
            "itself": lambda: ModelDrafter(runtime_of(RUNTIMES[case.model]()), 509, case.depth)}
    tiers = [Shelf(Disk(place, "x", 1 << 30), threads=False)] if case.story == "from disk" else []
    small = runtime_of(runtime, budget=case.budget, batch=8, slots=32, tiers=tiers)
    return Engine(small, drafter or real.get(case.pattern, lambda: None)(), FixedDepth(case.depth)), drafter


def before(case: Case, engine: Engine) -> None:
    """What the cache knows was answered with guesses too."""
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
    others = [Request(f"n{i}", numbers(50 + i, 20 + 9 * i, vocabulary), SamplingParams(
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
    events: tuple[TokenOut, ...] = ()


@pytest.mark.parametrize("case", FEW, ids=str)
def test_l6_same_tokens_whatever_is_guessed(case: Case, tmp_path: Path) -> None:
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
    if case.pattern != "ngram" and case.budget > case.batch:  # else there may be no room for guesses
        assert usage.drafted_tokens > 0 and engine.stats.drafted_at[0] > 0
    if case.pattern == "wrong":
        assert usage.accepted_tokens == 0
    if case.pattern == "head":
        assert usage.accepted_tokens < usage.drafted_tokens / 2, "it shares the noise of draws, and nothing else"
    if case.pattern == "right" and case.story != "forked" and case.budget >= case.batch * (case.depth + 1):
        steps = -(-(length - 1) // (case.depth + 1))
        assert usage.accepted_tokens == length - 1 - steps
    if case.pattern == "itself" and case.budget >= case.batch * (case.depth + 1):
        assert usage.accepted_tokens > 0.8 * min(usage.drafted_tokens, length) - case.depth
    assert not drafter or {sequence.request.id for sequence in drafter.forgotten} >= {"seen"}
    assert engine.runtime.cache.rings.free == engine.runtime.cache.rings.size


def test_the_few_hold_every_pair() -> None:
    from support import pairs

    assert set().union(*(pairs(axes(c)) for c in FEW)) == set().union(*(pairs(axes(c)) for c in GRID))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_logprobs_are_the_models(pattern: str) -> None:
    runtime, answer = odd_runtime(), expected("odd", "drawn")
    engine = Engine(runtime_of(runtime), Scripted({("a", 0): answer.tokens}, PATTERNS[pattern], 3), FixedDepth(3))
    engine.add(Request("a", answer.prompt, replace(PARAMS["drawn"], logprobs=2)))
    events = drain(engine)["a", 0].events
    found = torch.tensor([event.logprobs.token for event in events if event.logprobs])
    wanted = answer.logits.log_softmax(-1).gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
    assert len(found) == ANSWER and float((found - wanted).abs().max()) < 2e-3


# Ends within guesses


@pytest.mark.parametrize("place", range(1, 9))
@pytest.mark.parametrize("depth", [3, 7])
def test_a_stop_within_right_guesses_cuts_there(place: int, depth: int) -> None:
    """The state that is kept is that of the answer, and of no guess behind its end."""
    runtime, answer = odd_runtime(), expected("odd", "greedy")
    stop = answer.tokens[place]
    end = answer.tokens.index(stop)
    engine = Engine(runtime_of(runtime), Scripted({("a", 0): answer.tokens}, PATTERNS["right"], depth),
                    FixedDepth(depth))
    params = SamplingParams(temperature=0.0, stop_token_ids=(stop,), max_tokens=ANSWER)
    engine.add(Request("a", answer.prompt, params))
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
def test_the_limit_cuts_guesses(limit: int) -> None:
    runtime, answer = odd_runtime(), expected("odd", "greedy")
    engine = Engine(runtime_of(runtime), Scripted({("a", 0): answer.tokens}, PATTERNS["right"], 4), FixedDepth(4))
    engine.add(greedy(answer.prompt, limit))
    answers = drain(engine)
    assert answers["a", 0].tokens == list(answer.tokens[:limit]) and answers["a", 0].last.finish == "length"


class Third:
    """Ends the answer at its third token."""

    def __init__(self) -> None:
        self.seen = 0

    def push(self, token: int) -> bool:
        self.seen += 1
        return self.seen == 3


def test_a_matcher_sees_accepted_tokens_alone() -> None:
    runtime, answer = odd_runtime(), expected("odd", "greedy")
    for pattern in PATTERNS.values():
        engine = Engine(runtime_of(runtime), Scripted({("a", 0): answer.tokens}, pattern, 4), FixedDepth(4))
        engine.add(replace(greedy(answer.prompt, ANSWER), matcher=Third))
        answers = drain(engine)
        assert answers["a", 0].tokens == list(answer.tokens[:3]) and answers["a", 0].last.finish == "stop"


def test_minimum_length_holds_within_guesses() -> None:
    runtime, answer = odd_runtime(), expected("odd", "greedy")
    stop = answer.tokens[4]
    engine = Engine(runtime_of(runtime), Scripted({("a", 0): answer.tokens}, PATTERNS["right"], 4), FixedDepth(4))
    plain = Engine(runtime_of(runtime))
    for each in (engine, plain):
        each.add(greedy(answer.prompt, 20, min_tokens=12, stop_token_ids=(stop,)))
    assert drain(engine)["a", 0].tokens == drain(plain)["a", 0].tokens


# The other drafters


def test_ngrams_guess_what_followed_before() -> None:
    runtime = load(RandomModel(shape=odd_shape(tie_word_embeddings=True), initializer_range=0.02), EngineConfig(
        dtype="float32", memory="8MiB", threads=1))
    drafter, prompt = NgramDrafter(4), numbers(3, 20, 509)
    engine = Engine(runtime_of(runtime), drafter, FixedDepth(4))
    engine.add(greedy(prompt, 40))
    answers = drain(engine)
    same_tokens(reference(runtime, prompt, 40), answers["a", 0].tokens, tau=1e-5)
    assert usage_of(answers).accepted_tokens > 20, "this model soon repeats itself"
    assert not drafter._known
    sequence = engine._sequence(Request("x", (1, 2, 3, 4, 5, 1, 2, 3)), 0, 0)
    assert drafter.draft([(sequence, 3)]) == [[4, 5, 1]]
    sequence.tokens += [4]
    assert drafter.draft([(sequence, 6)]) == [[5, 1, 2, 3, 4, 5]]
    sequence.tokens += [9]
    assert drafter.draft([(sequence, 6)]) == [[]]


def itself(depth: int, **limits: Any) -> ModelDrafter:
    """The model as its own draft model: guesses nothing wrong, as it draws with the same noise."""
    return ModelDrafter(runtime_of(odd_runtime(), **limits), 509, depth)


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_model_that_drafts_for_itself_is_always_right(params: str, batch: int) -> None:
    drafter, answer = itself(4), expected("odd", params)
    engine = Engine(runtime_of(odd_runtime()), drafter, FixedDepth(4))
    for index in range(batch):
        engine.add(request_of(answer.prompt, params, name=f"a{index}"))
    answers = drain(engine)
    for index in range(batch):
        assert answers[f"a{index}", 0].tokens == list(answer.tokens)
        usage = usage_of(answers, f"a{index}")
        assert usage.accepted_tokens >= usage.drafted_tokens - 4, "all, but for what lies behind the answer's end"
    assert not drafter._leases and drafter._runtime.cache.at_rest
    drafter._runtime.cache.check()


def test_another_model_drafts_wrongly_and_changes_nothing() -> None:
    small = runtime_of(qwen3_runtime())
    drafter, answer = ModelDrafter(small, 509, 3), expected("odd", "greedy")
    engine = Engine(runtime_of(odd_runtime()), drafter, FixedDepth(3))
    engine.add(Request("a", answer.prompt, PARAMS["greedy"]))
    answers = drain(engine)
    same_tokens(answer, answers["a", 0].tokens)
    assert usage_of(answers).accepted_tokens < 5 and small.cache.at_rest


def test_a_draft_model_without_room_drafts_nothing() -> None:
    drafter, answer = itself(4, pages=2), expected("odd", "greedy")
    engine = Engine(runtime_of(odd_runtime()), drafter, FixedDepth(4))
    engine.add(Request("a", answer.prompt, PARAMS["greedy"]))
    answers = drain(engine)
    same_tokens(answer, answers["a", 0].tokens)
    assert usage_of(answers).drafted_tokens == 0 and drafter._runtime.cache.at_rest


# Options


@pytest.mark.parametrize(("option", "words"), [("mtp", "this model has no draft head"),
                                               ("mtp:2", "speculate=mtp:2: this model has no draft head")])
def test_a_model_without_a_head_says_so(option: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load(RandomModel(shape=odd_shape()), EngineConfig(memory="8MiB", speculate=option))
    assert caught.value.option == "speculate"


@pytest.mark.parametrize(("option", "kind"), [("auto", HeadDrafter), ("mtp:2", HeadDrafter), ("off", type(None)),
                                              ("ngram:5", NgramDrafter)])
def test_options_choose_the_drafter(option: str, kind: type) -> None:
    runtime = load(RandomModel(shape=odd_shape(), head=True), EngineConfig(memory="8MiB", speculate=option))
    engine = Engine(runtime)
    assert isinstance(engine.drafter, kind) and (runtime.head is None) == (kind is not HeadDrafter)
    assert engine.depth.limit == {"auto": 3, "mtp:2": 2, "off": 0, "ngram:5": 5}[option]


def test_a_draft_model_is_loaded_beside() -> None:
    """With a vocabulary of its own it is refused."""
    runtime = load(None, EngineConfig(memory="64MiB", speculate="draft:tiny:2"))
    engine = Engine(runtime)
    assert isinstance(engine.drafter, ModelDrafter) and engine.depth.limit == 2
    assert runtime.draft is not None and runtime.draft.cache is not runtime.cache
    with pytest.raises(ConfigError, match="must share one tokenizer"):
        Engine(load(RandomModel(shape=odd_shape()), EngineConfig(memory="64MiB", speculate="draft:tiny")))


def test_too_little_memory_for_rings_is_said(caplog: pytest.LogCaptureFixture) -> None:
    runtime = load(RandomModel(shape=odd_shape()), EngineConfig(memory="100KiB", speculate="ngram", max_context=64))
    assert "nothing is drafted" in caplog.text and runtime.cache.rings.size == 0


class Failing:
    """Guesses rightly at first."""

    limit = 3

    def __init__(self, answer: Sequence[int]) -> None:
        self.scripted, self.calls = Scripted({("a", 0): answer}, PATTERNS["right"], 3), 0

    def draft(self, wants: Wants) -> list[list[int]]:
        self.calls += 1
        if self.calls > 2:
            raise MemoryError("nothing left")
        return self.scripted.draft(wants)

    def forget(self, sequence: Running) -> None:
        raise AssertionError("it is switched off")


def test_l8_a_drafter_that_fails_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    answer = expected("odd", "greedy")
    drafter = Failing(answer.tokens)
    engine = Engine(runtime_of(odd_runtime()), drafter, FixedDepth(3))
    engine.add(Request("a", answer.prompt, PARAMS["greedy"]))
    answers = drain(engine)
    same_tokens(answer, answers["a", 0].tokens)
    assert usage_of(answers).accepted_tokens == 6 and drafter.calls == 3
    assert caplog.text.count("switched off") == 1 and engine.stats.failed == 0


# Pressure, and who may not


def test_without_rings_nothing_is_guessed() -> None:
    runtime, answer = odd_runtime(), expected("odd", "greedy")
    small = runtime_of(runtime)
    plain = replace(small.cache.storage, rings=None)
    small.cache.__init__(plain, runtime.decoder.ops)  # type: ignore[misc]
    engine = Engine(small, Scripted({("a", 0): answer.tokens}, PATTERNS["right"], 4), FixedDepth(4))
    engine.add(Request("a", answer.prompt, PARAMS["greedy"]))
    answers = drain(engine)
    same_tokens(answer, answers["a", 0].tokens)
    assert usage_of(answers).drafted_tokens == 0


@pytest.mark.parametrize("pattern", PATTERNS)
def test_preempted_sequences_go_on(pattern: str) -> None:
    runtime, answer = odd_runtime(), expected("odd", "greedy")
    small = small_runtime(runtime, batch=4, pages=20, context=160)
    engine = Engine(small, Scripted({("a", 0): answer.tokens}, PATTERNS[pattern], 4), FixedDepth(4))
    for index in range(3):
        engine.add(greedy(numbers(20 + index, 70, 509), 60, f"n{index}"))
    engine.add(Request("a", answer.prompt, PARAMS["greedy"]))
    answers = drain(engine)
    same_tokens(answer, answers["a", 0].tokens)
    assert engine.scheduler.preemptions > 0


# A session by hand


@pytest.mark.parametrize("model", RUNTIMES)
def test_a_session_verifies_and_accepts(model: str) -> None:
    runtime, answer = RUNTIMES[model](), expected(model, "greedy")
    session, rng, done = session_over(runtime), random.Random(3), 0
    session.prefill(answer.prompt)
    parts = []
    while done < ANSWER - 1:
        count = rng.randint(1, min(6, ANSWER - 1 - done))
        right = rng.randint(0, count)
        wanted = answer.tokens[done:done + count]
        guessed = [*wanted[:right], *((token + 1) % 500 for token in wanted[right:])]
        logits = session.verify(guessed)
        session.accept(right)
        parts.append(logits[:right])
        done += right
        assert session.position == PROMPT + done
        if rng.random() < 0.2 and done < ANSWER - 1:
            parts.append(session.step(answer.tokens[done])[None])
            done += 1
    same_logits(answer.logits[1:], torch.cat(parts))
    mark = session.checkpoint()
    after = session.step(5)
    session.restore(mark)
    assert torch.equal(session.step(5), after)


@pytest.mark.parametrize("accepted", range(8, 14))
def test_tokens_that_were_verified_and_never_accepted_leave_nothing(accepted: int) -> None:
    """Also where the ring was full, so that the state has moved on."""
    runtime, answer = odd_runtime(), expected("odd", "greedy")
    session = session_over(runtime)
    session.prefill(answer.prompt)
    session.verify(answer.tokens[:accepted])
    session.accept(accepted)
    for _ in range(2):
        session.verify([1, 2, 3, 4, 5, 6, 7, 8])
    logits = [session.verify(answer.tokens[accepted:accepted + 2])]
    session.verify([9] * 10)
    logits.append(session.step(answer.tokens[accepted])[None])
    wanted = answer.logits[[accepted + 1, accepted + 2, accepted + 1]]
    same_logits(wanted, torch.cat(logits))


def test_a_session_drafts_with_the_head() -> None:
    session, prompt = session_over(embedded_with_head()), embedded_prompt()
    logits, right, steps = session.prefill(prompt), 0, 0
    while session.position < len(prompt) + 12:
        token = int(logits.argmax())
        guesses = session.draft(token, 3)
        rows = session.verify([token, *guesses])
        count = 0
        while count < 3 and int(rows[count].argmax()) == guesses[count]:
            count += 1
        session.accept(1 + count)
        logits, right, steps = rows[count], right + count, steps + 1
    assert right >= steps
    with pytest.raises(RequestError, match="no draft head"):
        session_over(odd_runtime()).draft(1, 3)
    with pytest.raises(RequestError, match="count must be from 1 to 12"):
        session.draft(1, 13)


@cache
def embedded_with_head() -> Runtime:
    return load(None, EngineConfig(dtype="float32", memory="64MiB", max_batch=8, max_context=512, threads=1))


def embedded_prompt() -> tuple[int, ...]:
    tokenizer = Tokenizer.from_directory(Path(str(embedded_with_head().path)))
    return tuple(Front(tokenizer).chat([{"role": "user", "content": "What is the capital of France?"}],
                                       PARAMS["greedy"]).request.prompt)


@pytest.mark.parametrize("params", ["greedy", "drawn", "filters"])
def test_l6_with_the_trained_head(params: str) -> None:
    """Which is nearly always right where the model speaks, also where it draws."""
    runtime, prompt = embedded_with_head(), embedded_prompt()
    found = []
    for depth in (0, 3):
        engine = Engine(runtime_of(runtime), depth=FixedDepth(depth))
        for index in range(3):
            engine.add(Request(f"a{index}", prompt, replace(PARAMS[params], ignore_eos=False, seed=index)))
        answers = drain(engine)
        found.append([answers[f"a{index}", 0].tokens for index in range(3)])
    assert found[0] == found[1]
    drafted, accepted = sum(engine.stats.drafted_at), sum(engine.stats.accepted_at)
    assert accepted > 0.6 * drafted > 0


def test_a_session_refuses_what_it_cannot_verify() -> None:
    session = session_over(odd_runtime())
    session.prefill([1, 2, 3])
    with pytest.raises(RequestError, match="call verify first"):
        session.accept(1)
    with pytest.raises(RequestError, match="at most 13"):
        session.verify([1] * 14)
    session.verify([4, 5])
    with pytest.raises(RequestError, match="count must be from 0 to 2"):
        session.accept(3)
    session.verify([4, 5])
    session.step(7)
    with pytest.raises(RequestError, match="call verify first"):
        session.accept(1)


# The comparison must notice


@pytest.mark.parametrize("bug", ["leaked guess", "lost token", "stale ring"])
def test_l6_the_comparison_notices(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, answer = odd_runtime(), expected("odd", "greedy")
    small = runtime_of(runtime)
    engine = Engine(small, Scripted({("a", 0): answer.tokens}, PATTERNS["alternating"], 3), FixedDepth(3))
    cache, commit = small.cache, small.cache.commit

    def broken(lease: Any, tokens: Any, base: int | None = None) -> None:
        commit(lease, tokens, base)
        if base is not None and bug == "lost token" and lease.behind > 1:
            lease.behind -= 1
        if base is not None and bug == "leaked guess" and lease.done % 5 == 0:
            storage = cache.storage
            assert storage.rings is not None
            storage.rings[2][:, :, (lease.done - 1) % 16] *= 1.5
        if base is not None and bug == "stale ring" and lease.done % 3 == 0:
            assert cache.storage.rings is not None
            cache.storage.rings[1].copy_(cache.storage.rings[1].roll(1, 2))

    monkeypatch.setattr(cache, "commit", broken)
    engine.add(Request("a", answer.prompt, PARAMS["greedy"]))
    with pytest.raises((Mismatch, AssertionError)):
        same_tokens(answer, drain(engine)["a", 0].tokens)


# The model's own head


@cache
def headed() -> Runtime:
    """The odd model with a random head, whose guesses are all wrong."""
    model = RandomModel(shape=odd_shape(), initializer_range=0.1, head=True)
    return load(model, EngineConfig(dtype="float32", memory="8MiB", max_batch=8, threads=1))


def test_the_heads_rows_are_made_of_the_models_own_states() -> None:
    """However the tokens came, and whatever was guessed in between; so prefixes may be shared."""
    runtime, answer = headed(), expected("odd", "greedy")
    tokens = (*answer.prompt, *answer.tokens)
    whole, parts, rng = session_over(runtime, budget=512), session_over(runtime, budget=7), random.Random(4)
    whole.prefill(tokens)
    parts.prefill(answer.prompt[:-5])
    while parts.position < len(tokens):
        done, count = parts.position, rng.randint(1, 5)
        right = min(rng.randint(0, count), len(tokens) - done)
        wanted = [*tokens[done:done + right], *((token + 1) % 500 for token in range(count - right))]
        parts.verify(wanted)
        parts.accept(right)
        if rng.random() < 0.3:
            mark = parts.checkpoint()
            parts.step(3)
            parts.restore(mark)
            parts.drop(mark)
    for kind in (0, 1):
        ours, theirs = (session.runtime.cache.storage.page_tensors[kind][-1].flatten(0, 1)[places(session)]
                        for session in (parts, whole))
        assert float((ours - theirs).abs().max()) < 1e-4 < float(theirs.abs().max())
    ours, theirs = (session.runtime.cache.storage.named_slots["hidden"][0, session._lease.slot]
                    for session in (parts, whole))
    assert float((ours - theirs).abs().max()) < 1e-3


def places(session: Any) -> list[int]:
    return [session._lease.pages[i // PAGE] * PAGE + i % PAGE for i in range(session.position)]


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize(("depth", "batch"), [(1, 3), (3, 1), (MAX_DRAFTS, 3)])
def test_l6_with_a_head_that_guesses_wrong(params: str, depth: int, batch: int) -> None:
    runtime, answer = headed(), expected("odd", params)
    engine = Engine(runtime_of(runtime), depth=FixedDepth(depth))
    for index in range(batch):
        engine.add(replace(request_of(answer.prompt, params, name=f"a{index}"), speculate=index != 2))
    answers = drain(engine)
    for index in range(batch):
        assert answers[f"a{index}", 0].tokens == list(answer.tokens)
        assert (usage_of(answers, f"a{index}").drafted_tokens > 0) == (index != 2)


@pytest.mark.parametrize("params", ["greedy", "drawn", "filters"])
def test_guesses_of_one_call_are_those_of_many(params: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled head guesses as many tokens as are wanted of each sequence at once; other backends one by one."""
    answer = expected("odd", params)

    def guessed() -> list[list[list[int]]]:
        engine, seen = Engine(runtime_of(headed()), depth=FixedDepth(4)), list[list[list[int]]]()
        drafter = engine.drafter
        assert isinstance(drafter, HeadDrafter)
        original = drafter.draft

        def spy(wants: Wants) -> list[list[int]]:
            seen.append(original(wants))
            return seen[-1]

        monkeypatch.setattr(drafter, "draft", spy)
        for index in range(3):
            engine.add(Request(f"a{index}", answer.prompt, replace(PARAMS[params], max_tokens=20 + index)))
        drain(engine)
        return seen

    at_once = guessed()
    monkeypatch.setattr(DraftHead, "guess", lambda *arguments: None)
    one_by_one = guessed()
    assert at_once == one_by_one and len(at_once) > 10
    assert {len(row) for step in at_once for row in step} == {1, 2, 3, 4}


def test_a_head_serves_what_was_kept_without_guesses(tmp_path: Path) -> None:
    """Prefixes from the tree, from host memory and from disk bring the head's rows and hidden state with them."""
    runtime, answer = headed(), expected("odd", "greedy")
    for place in ("tree", "disk"):
        tiers = [Shelf(Disk(tmp_path, "x", 1 << 30), threads=False)] if place == "disk" else []
        engine = Engine(runtime_of(runtime, tiers=tiers))
        engine.add(greedy(answer.prompt, 30, "before"))
        drain(engine)
        if tiers:
            engine.close()
            engine = Engine(runtime_of(runtime, tiers=[Shelf(Disk(tmp_path, "x", 1 << 30), threads=False)]))
        drafted: list[list[int]] = []
        drafter = engine.drafter
        assert drafter is not None
        original = drafter.draft

        def spy(wants: Wants, draft: Any = original, drafted: Any = drafted) -> list[list[int]]:
            drafted.append(draft(wants)[0])
            return drafted[-1:]

        drafter.draft = spy  # type: ignore[method-assign]
        engine.depth = FixedDepth(3)
        engine.add(greedy((*answer.prompt, *answer.tokens[:30], *numbers(9, 9, 509)), 8))
        answers = drain(engine)
        assert usage_of(answers).cached_tokens == PROMPT + 29
        if place == "tree":
            seen = drafted
    assert drafted == seen and len(drafted) > 3
