"""What a request gets: draws, penalties, ends, log-probabilities, and what a sick neighbour does to it (nothing).

Where the semantics must be exact, a table stands in for the model's head: the logits depend on the last token only.
The model still runs, so that cache, batches and slots are real.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from support import (
    Answers,
    Watch,
    drain,
    drawn,
    greedy,
    margins,
    numbers,
    odd_runtime,
    reference,
    same_tokens,
    serve,
    small_runtime,
    take,
)
from torch import Tensor

from deltic.config import GenerationDefaults
from deltic.engine.engine import Engine
from deltic.errors import RequestError
from deltic.ops import reference as ref
from deltic.ops.types import Batch
from deltic.params import EngineRequest, SamplingParams
from deltic.runner.model_runner import ModelRunner

VOCABULARY = 509
PROMPT = (3, 14, 15, 92, 65)
EOS = 500


@dataclass(slots=True)
class Scripted(Watch):
    """A runtime whose logits after token t are table[t]."""

    table: Tensor = field(default_factory=lambda: torch.empty(0))

    def run(self, batch: Batch) -> Tensor:
        Watch.run(self, batch)
        return self.table[batch.ids[batch.logit_tokens]].clone()


def random_table(seed: int = 0, spread: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(VOCABULARY, VOCABULARY, generator=generator) * spread


def chain(*tokens: int, then: int = 0) -> Tensor:
    """A table in which these tokens follow PROMPT one after the other; `then` follows everything else."""
    table = torch.zeros(VOCABULARY, VOCABULARY)
    table[:, then] = 5.0
    for before, after in zip((PROMPT[-1], *tokens), tokens, strict=False):
        table[before] = 0.0
        table[before, after] = 10.0
    return table


def scripted(table: Tensor, eos: tuple[int, ...] = (), **limits: Any) -> Any:
    runtime = replace(odd_runtime(), generation=GenerationDefaults(eos_token_ids=eos))
    return Scripted(small_runtime(runtime, **{"batch": 8, **limits}), table=table)


def answers_of(table: Tensor, *requests: EngineRequest, eos: tuple[int, ...] = (), **limits: Any) -> Answers:
    return serve(scripted(table, eos, **limits), requests)


def ask(name: str = "a", prompt: Sequence[int] = PROMPT, **params: Any) -> EngineRequest:
    return EngineRequest(name, tuple(prompt), SamplingParams(**{"temperature": 0.0, **params}))


# Draws


MIXED = [
    {"temperature": 0.7, "seed": 1}, {"temperature": 1.3, "top_k": 20, "seed": 2}, {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.7, "seed": 1}, {"temperature": 2.0, "min_p": 0.05, "seed": 9},
    {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.4, "presence_penalty": 0.6},
    {"temperature": 0.9, "seed": 5, "frequency_penalty": 1.5, "logit_bias": {7: 4.0, 8: -100.0}},
    {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "seed": -4, "logprobs": 3},
]


def test_l6_draws_are_equal_alone_and_in_a_batch() -> None:
    """Bit for bit: on the same logits no neighbour's settings change a draw."""
    table = random_table(1)
    requests = [ask(f"r{i}", numbers(i, 3 + i, VOCABULARY), max_tokens=25, **params) for i, params in enumerate(MIXED)]
    together = answers_of(table, *requests)
    for request in requests:
        alone = answers_of(table, request)
        assert together[(request.id, 0)].events == alone[(request.id, 0)].events
    drawn_tokens = [tuple(together[(request.id, 0)].tokens) for request in requests]
    assert len(set(drawn_tokens)) == len(requests)


def test_l6_choices_are_the_keyed_draws_of_as_many_runs() -> None:
    """n = 3 through one prompt gives what three token-by-token runs with the choices' keys give."""
    runtime = odd_runtime()
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=20, ignore_eos=True, n=3)
    prompt = numbers(8, 21, VOCABULARY)
    for batch in (8, 1):
        found = serve(small_runtime(runtime, batch=batch), [EngineRequest("a", prompt, params)])
        for choice in range(3):
            same_tokens(reference(runtime, prompt, 20, params, choice), found[("a", choice)].tokens, params, choice)
    assert len({tuple(answer.tokens) for answer in found.values()}) == 3


def test_choices_of_greedy_requests_are_equal() -> None:
    found = serve(small_runtime(odd_runtime()), [greedy(numbers(9, 18, VOCABULARY), 12, n=4)])
    assert len({tuple(answer.tokens) for answer in found.values()}) == 1 and len(found) == 4


def test_a_seed_fixes_the_answer_and_no_seed_does_not() -> None:
    table = random_table(2)

    def answer(seed: int | None) -> list[int]:
        return answers_of(table, ask(temperature=1.0, seed=seed, max_tokens=30))[("a", 0)].tokens

    assert answer(5) == answer(5) != answer(6)
    assert answer(None) != answer(None)


def test_draws_follow_the_documented_noise() -> None:
    """The engine's token is the maximum of logits / temperature + keyed Gumbel noise."""
    table, params = random_table(3), SamplingParams(temperature=0.8, seed=21, max_tokens=30)
    found = answers_of(table, EngineRequest("a", PROMPT, params))[("a", 0)].tokens
    last, position = PROMPT[-1], len(PROMPT)
    for token in found:
        assert token == drawn(table[last], params, 0, position)
        last, position = token, position + 1


def test_generation_defaults_fill_what_a_request_leaves_open() -> None:
    table = random_table(4)
    runtime = scripted(table)
    runtime.runtime = replace(runtime.runtime, generation=GenerationDefaults(temperature=0.0))
    default = serve(runtime, [EngineRequest("a", PROMPT, SamplingParams(max_tokens=9))])[("a", 0)].tokens
    assert default == answers_of(table, ask(max_tokens=9))[("a", 0)].tokens
    own = serve(runtime, [EngineRequest("a", PROMPT, SamplingParams(max_tokens=9, temperature=1.0, seed=1))])[("a", 0)]
    assert own.tokens == answers_of(table, ask(max_tokens=9, temperature=1.0, seed=1))[("a", 0)].tokens != default


# Penalties and bias, against the words of the definition


def naive_answer(table: Tensor, params: SamplingParams, count: int) -> list[int]:
    """Repetition: of prompt and answer, division or multiplication. Presence, frequency: of the answer alone."""
    answer = list[int]()
    for _ in range(count):
        logits = table[[*PROMPT, *answer][-1]].clone()
        for token in {*PROMPT, *answer} if params.repetition_penalty else ():
            penalty = torch.tensor(params.repetition_penalty)
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        for token in set(answer):
            logits[token] -= params.presence_penalty
            logits[token] -= params.frequency_penalty * answer.count(token)
        for token, bias in params.logit_bias.items():
            logits[token] += bias if bias > -100 else float("-inf")
        answer.append(int(logits.argmax()))
    return answer


PENALTIES = [
    {"repetition_penalty": 1.5}, {"repetition_penalty": 0.7}, {"presence_penalty": 1.5}, {"presence_penalty": -2.0},
    {"frequency_penalty": 0.9}, {"frequency_penalty": -1.5}, {"logit_bias": {3: 2.5, 4: -2.5}},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {1: 1.0, 14: -100.0}},
]


def repetitive_table(seed: int) -> Tensor:
    """A few tokens, with logits of both signs, are far more probable than the rest."""
    table = random_table(seed, 1.0) - 9.0
    table[:, sorted({*PROMPT, 0, 1, 2, 3, 4})] += 9.0
    return table


@pytest.mark.parametrize("params", PENALTIES, ids=lambda params: " ".join(params))
def test_penalties_and_bias_match_their_definition(params: dict[str, Any]) -> None:
    sampling, changed = SamplingParams(temperature=0.0, max_tokens=30, **params), 0
    for seed in range(6):
        table = repetitive_table(seed)
        plain = answers_of(table, ask(max_tokens=30))[("a", 0)].tokens
        found = answers_of(table, EngineRequest("a", PROMPT, sampling), ask("b", max_tokens=30))
        assert found[("a", 0)].tokens == naive_answer(table, sampling, 30)
        assert found[("b", 0)].tokens == plain, "a neighbour's penalties leak"
        changed += found[("a", 0)].tokens != plain
    assert changed


def test_the_three_penalties_are_three_different_things() -> None:
    table = repetitive_table(0)
    settings = ({"repetition_penalty": 1.9}, {"presence_penalty": 1.9}, {"frequency_penalty": 1.9})
    tokens = {tuple(answers_of(table, ask(max_tokens=30, **one))[("a", 0)].tokens) for one in settings}
    assert len(tokens) == 3


def test_bias_of_100_decides_and_of_minus_100_forbids() -> None:
    table = random_table(5)
    forced = answers_of(table, ask(max_tokens=5, logit_bias={77: 100.0}))[("a", 0)].tokens
    assert forced == [77] * 5
    favourite = int(table[PROMPT[-1]].argmax())
    table[:, favourite] = 1000.0
    forbidden = answers_of(table, ask(max_tokens=20, temperature=1.0, seed=1, logit_bias={favourite: -100.0}))
    assert favourite not in forbidden[("a", 0)].tokens


def test_penalties_do_not_change_the_reported_probabilities() -> None:
    table = repetitive_table(1)
    found = answers_of(table, ask(max_tokens=12, logprobs=2, repetition_penalty=1.7, presence_penalty=1.0))[("a", 0)]
    last = PROMPT[-1]
    for event in found.events:
        assert event.logprobs is not None and event.token is not None
        assert event.logprobs.token == pytest.approx(float(table[last].log_softmax(-1)[event.token]), abs=1e-5)
        last = event.token


# Ends


def test_an_end_token_stops_and_is_reported() -> None:
    found = answers_of(chain(1, 2, EOS), ask(max_tokens=9), eos=(EOS,))[("a", 0)]
    assert found.tokens == [1, 2, EOS] and found.last.finish == "stop"
    assert found.last.usage is not None
    assert (found.last.usage.prompt_tokens, found.last.usage.completion_tokens) == (5, 3)
    assert all(event.finish is None and event.usage is None for event in found.events[:-1])


def test_end_tokens_of_the_model_config_count_too() -> None:
    runtime = scripted(chain(1, EOS))
    runtime.runtime = replace(runtime.runtime, config=replace(runtime.config, eos_token_ids=(EOS,)))
    assert serve(runtime, [ask(max_tokens=9)])[("a", 0)].last.finish == "stop"


def test_ignore_eos_goes_on() -> None:
    found = answers_of(chain(1, EOS, 2, 3), ask(max_tokens=4, ignore_eos=True), eos=(EOS,))[("a", 0)]
    assert found.tokens == [1, EOS, 2, 3] and found.last.finish == "length"


def test_stop_ids_stop_even_if_eos_is_ignored() -> None:
    request = ask(max_tokens=9, ignore_eos=True, stop_token_ids=(2,))
    found = answers_of(chain(1, EOS, 2, 3), request, eos=(EOS,))[("a", 0)]
    assert found.tokens == [1, EOS, 2] and found.last.finish == "stop"


@pytest.mark.parametrize("params", [{}, {"stop_token_ids": (9,)}, {"logit_bias": {EOS: 50.0}}])
def test_min_tokens_masks_every_end_until_then(params: dict[str, Any]) -> None:
    """Whatever would end the answer: the ends are forbidden, the next best token is taken."""
    table = torch.zeros(VOCABULARY, VOCABULARY)
    table[:, EOS], table[:, 9], table[:, 4] = 9.0, 8.0, 7.0
    found = answers_of(table, ask(max_tokens=20, min_tokens=3, **params), eos=(EOS,))[("a", 0)]
    second = 4 if "stop_token_ids" in params else 9
    assert found.tokens == [second] * 3 + [EOS] and found.last.finish == "stop"


def test_max_tokens_of_zero_reads_the_prompt_only() -> None:
    runtime = scripted(chain(1, 2, 3))
    found = serve(runtime, [ask(max_tokens=0, logprobs=2)])[("a", 0)]
    assert found.tokens == [] and len(found.events) == 1 and found.last.finish == "length"
    assert found.last.usage is not None and found.last.usage.completion_tokens == 0
    assert sum(map(sum, runtime.chunks)) == len(PROMPT)


def test_max_tokens_of_one() -> None:
    found = answers_of(chain(1, 2, 3), ask(max_tokens=1))[("a", 0)]
    assert found.tokens == [1] and found.last.finish == "length" and len(found.events) == 1


def test_an_end_at_the_limit_is_a_stop() -> None:
    assert answers_of(chain(1, EOS), ask(max_tokens=2), eos=(EOS,))[("a", 0)].last.finish == "stop"


@pytest.mark.parametrize("max_tokens", [None, 40, 44])
@pytest.mark.parametrize("pages", [2, 3])
def test_the_context_ends_an_answer(max_tokens: int | None, pages: int) -> None:
    prompt = numbers(1, 9, VOCABULARY)
    found = answers_of(random_table(6), ask("a", prompt, max_tokens=max_tokens), batch=1, pages=pages, context=31)
    assert found[("a", 0)].last.finish == "length" and len(found[("a", 0)].tokens) == 31 - 9


def test_a_prompt_may_fill_the_context_but_for_one_token() -> None:
    prompt = numbers(1, 31, VOCABULARY)
    engine = Engine(scripted(random_table(6), context=32, batch=1))
    engine.add(ask("a", prompt))
    assert len(drain(engine)[("a", 0)].tokens) == 1
    with pytest.raises(RequestError, match="32 tokens and the maximum context length is 32") as caught:
        engine.add(ask("b", (*prompt, 1)))
    assert caught.value.field == "prompt"
    engine.check()


class Ends:
    """A matcher that ends the answer with its third token."""

    def __init__(self) -> None:
        self.seen = 0

    def push(self, token: int) -> bool:
        self.seen += 1
        return self.seen == 3


def test_a_matcher_ends_its_own_choice() -> None:
    request = replace(ask(max_tokens=10, temperature=1.0, seed=1, n=2), matcher=Ends)
    found = answers_of(random_table(7), request, ask("b", max_tokens=10))
    assert [len(found[key].tokens) for key in (("a", 0), ("a", 1), ("b", 0))] == [3, 3, 10]
    assert [found[key].last.finish for key in (("a", 0), ("a", 1), ("b", 0))] == ["stop", "stop", "length"]


# Log-probabilities


def test_log_probabilities_are_those_of_the_raw_logits() -> None:
    table = random_table(8)
    wants: list[int | None] = [5, 0, None, 20]
    requests = [ask(f"r{i}", numbers(20 + i, 4 + i, VOCABULARY), max_tokens=6, temperature=0.5 * i, seed=i,
                    logprobs=want) for i, want in enumerate(wants)]
    found = answers_of(table, *requests)
    for request, want in zip(requests, wants, strict=True):
        last = request.prompt[-1]
        for event in found[(request.id, 0)].events:
            assert event.token is not None
            exact = table[last].double().log_softmax(-1)
            last = event.token
            if want is None:
                assert event.logprobs is None
                continue
            assert event.logprobs is not None
            assert event.logprobs.token == pytest.approx(float(exact[event.token]), abs=1e-5)
            best = exact.topk(want) if want else None
            assert [token for token, _ in event.logprobs.top] == (best.indices.tolist() if best else [])
            assert [value for _, value in event.logprobs.top] == pytest.approx(best.values.tolist() if best else [],
                                                                                abs=1e-5)


# Sick requests


SICK = 77
"""A prompt that ends with this token has broken logits."""


def poison(value: Callable[[Tensor], Tensor]) -> Callable[[ModelRunner], Any]:
    @dataclass(slots=True)
    class Poisoned(Watch):
        def run(self, batch: Batch) -> Tensor:
            logits = Watch.run(self, batch)
            sick = batch.ids[batch.logit_tokens] == SICK
            return torch.where(sick[:, None], value(logits), logits)

    return Poisoned


def one_bad(logits: Tensor, value: float) -> Tensor:
    logits = logits.clone()
    logits[:, 100] = value
    return logits


POISONS = {
    "nan": lambda logits: logits * float("nan"), "one nan": lambda logits: one_bad(logits, float("nan")),
    "inf": lambda logits: one_bad(logits, float("inf")), "-inf": lambda logits: one_bad(logits, -float("inf")),
    "flat": lambda logits: torch.full_like(logits, 0.25),
}


def neighbours() -> list[EngineRequest]:
    return [greedy(numbers(30 + i, 12 + 9 * i, VOCABULARY - 100), 25, f"n{i}") for i in range(3)]


def healthy_answers() -> Answers:
    return serve(small_runtime(odd_runtime()), neighbours())


@pytest.mark.parametrize("kind", POISONS)
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "top_k": 4, "seed": 1}, {"n": 3}])
def test_l8_sick_logits_end_their_own_request_only(kind: str, params: dict[str, Any]) -> None:
    first, *others = neighbours()
    sick = greedy((*numbers(1, 20, 400), SICK), 25, "sick", **params)
    runtime = poison(POISONS[kind])(small_runtime(odd_runtime()))
    found = serve(runtime, [first, sick, *others])
    expected = healthy_answers()
    for choice in range(sick.choices):
        assert found[("sick", choice)].tokens == [] and found[("sick", choice)].last.finish == "error"
        assert "NaN, infinite or all equal" in (found[("sick", choice)].last.error or "")
    for key, answer in expected.items():
        assert found[key].tokens == answer.tokens and found[key].last.finish == "length"


@pytest.mark.parametrize("params", [{}, {"n": 2}])
def test_l3_a_sick_request_leaves_nothing_in_the_pages_and_slots_it_had(params: dict[str, Any]) -> None:
    """NaN in a weight fills the sick request's state and K/V; whoever gets them afterwards must not notice."""
    healthy = odd_runtime()
    weights = healthy.decoder.weights
    embedding = ref.embed(torch.arange(healthy.config.vocab_size), weights.embedding, torch.float32)
    embedding[SICK] = float("nan")
    packed = healthy.decoder.ops.pack(embedding, True)
    broken = replace(healthy, decoder=replace(healthy.decoder, weights=replace(weights, embedding=packed)))
    engine = Engine(small_runtime(broken, batch=4, pages=16))
    engine.add(greedy((*numbers(1, 60, SICK), SICK), 25, "sick", **params))
    engine.add(neighbours()[0])
    found = drain(engine)
    assert found[("sick", 0)].last.finish == "error" and not found[("sick", 0)].tokens
    for request in neighbours()[1:]:
        engine.add(request)
    found |= drain(engine)
    for key, answer in healthy_answers().items():
        assert found[key].tokens == answer.tokens, "a sick request's NaN got into another one"
    assert engine.stats.failed == 1 + bool(params)


@dataclass(slots=True)
class Fragile(Watch):
    """Raises in its fourth step, after the model has written to the cache."""

    def run(self, batch: Batch) -> Tensor:
        logits = Watch.run(self, batch)
        if len(self.chunks) == 4:
            raise RuntimeError("out of luck")
        return logits


def test_l8_failed_step_ends_its_requests_and_the_engine_continues() -> None:
    found = serve(Fragile(small_runtime(odd_runtime(), batch=2)), neighbours())  # type: ignore[arg-type]
    expected = healthy_answers()
    assert [found[(f"n{i}", 0)].last.finish for i in range(3)] == ["error", "error", "length"]
    for name in ("n0", "n1"):
        assert "out of luck" in (found[(name, 0)].last.error or "")
        assert found[(name, 0)].tokens == expected[(name, 0)].tokens[:3]
    assert found[("n2", 0)].tokens == expected[("n2", 0)].tokens


def test_l8_a_prompt_that_fails_ends_all_its_choices() -> None:
    engine = Engine(scripted(chain(1, 2, 3)))
    engine.add(ask(n=3))
    engine.abort("a")
    assert [(event.choice, event.finish) for event in engine.step()] == [(0, "abort"), (1, "abort"), (2, "abort")]
    engine.check()


# The door


@pytest.mark.parametrize(("request_", "field", "words"), [
    (ask("x", ()), "prompt", "empty"),
    (ask("x", (1, VOCABULARY)), "prompt", "outside"),
    (ask("x", (-1, 2)), "prompt", "outside"),
    (ask("x", (1,) * 600), "prompt", "raise `max_context`"),
    (ask("a"), "id", "already running"),
    (ask("x", logit_bias={VOCABULARY: 1.0}), "logit_bias", "vocabulary"),
    (ask("x", stop_token_ids=(VOCABULARY + 5,)), "stop_token_ids", "vocabulary"),
])
def test_l8_a_bad_request_is_refused_by_name_and_harms_nobody(request_: EngineRequest, field: str, words: str) -> None:
    engine = Engine(scripted(chain(1, 2, 3)))
    engine.add(ask(max_tokens=3))
    with pytest.raises(RequestError, match=words) as caught:
        engine.add(request_)
    assert caught.value.field == field
    found = drain(engine)
    assert list(found) == [("a", 0)] and found[("a", 0)].tokens == [1, 2, 3]


def test_abort_reports_and_unknown_ids_are_ignored() -> None:
    engine = Engine(scripted(random_table(9)))
    engine.abort("nobody")
    engine.add(ask(max_tokens=50))
    found: Answers = {}
    for _ in range(4):
        take(found, engine.step())
    engine.abort("a")
    engine.abort("a")
    assert engine.has_work
    drain(engine, found)
    assert found[("a", 0)].last.finish == "abort" and len(found[("a", 0)].tokens) == 4
    usage = found[("a", 0)].last.usage
    assert usage is not None and usage.completion_tokens == 4
    engine.add(ask(max_tokens=2))
    assert len(drain(engine)[("a", 0)].tokens) == 2, "an id can be used again"


def test_the_counters_count() -> None:
    engine = Engine(scripted(random_table(9), budget=4))
    assert not engine.has_work and engine.step() == []
    engine.add(ask(max_tokens=7))
    engine.add(ask("b", numbers(3, 9, VOCABULARY), max_tokens=5))
    drain(engine)
    stats = engine.stats
    assert (stats.prompt_tokens, stats.generated_tokens, stats.finished, stats.failed) == (14, 12, 2, 0)
    assert stats.steps >= 7 and stats.last_overhead >= 0


def test_equal_choices_of_the_reference_are_decided() -> None:
    """What the exact comparisons above rest on: no answer of the neighbours hangs on rounding."""
    for request in neighbours():
        answer = reference(odd_runtime(), request.prompt, 25)
        assert float(margins(answer.logits).min()) > 1e-4
