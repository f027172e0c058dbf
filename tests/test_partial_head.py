"""Groups of tokens that a part of the matrix of logits drafts and one pass over the whole matrix verifies: the same
answers, fewer passes, and no groups where they do not pay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from real_models import documents, smollm2
from reuse_cases import runtime_of, serve, usage_of
from speculation_cases import ANSWER, PARAMS, Dictate, EndingAt, half_of, part_of
from support import drain, greedy, numbers, odd_runtime, odd_shape, reference, same_tokens, session_over, take
from test_draft_vocabulary import panels
from torch import Tensor

from deltic import LLM
from deltic.config import EngineConfig
from deltic.config.engine import parse_speculation
from deltic.engine.engine import Engine
from deltic.engine.loading import RandomModel, load
from deltic.errors import ConfigError
from deltic.model.draft_vocabulary import draftable
from deltic.model.partial_head import PartialHead
from deltic.ops.cpu import missing
from deltic.ops.types import Sampling
from deltic.params import EngineRequest, Head
from deltic.runner.model_runner import ModelRunner
from deltic.spec_decode.controller import drafter_of
from deltic.spec_decode.draft_length import Acceptance, AdaptiveDraftLength, FixedDraftLength, HeadGrowth
from deltic.spec_decode.partial_head import HeadProposer

pytestmark = pytest.mark.skipif(bool(missing()), reason="needs the compiled kernels")


def engine_of(depth: int, **limits: Any) -> Engine:
    runtime = runtime_of(odd_runtime(), **limits)
    return Engine(runtime, HeadProposer(runtime, half_of(runtime), depth), FixedDraftLength(depth))


@cache
def prompt() -> tuple[int, ...]:
    return numbers(5, 40, 509)


# Which models have it


def test_the_option() -> None:
    assert parse_speculation("head") == Head() and parse_speculation("head:3") == Head(3)
    for wrong in ("head:0", "head:13", "head:x", "heads"):
        with pytest.raises(ConfigError, match="speculate"):
            parse_speculation(wrong)
    with pytest.raises(ConfigError, match="head is for one device, a CPU"):
        EngineConfig(speculate="head", device="cuda")
    with pytest.raises(ConfigError, match="head:2 is for one device, a CPU"):
        EngineConfig(speculate="head:2", tp=2, device="cpu")


@pytest.mark.parametrize(("speculate", "vocabulary", "head", "drafts"), [
    ("auto", 4096, False, False), ("off", 4096, False, False), ("ngram", 4096, False, False),
    ("head", 509, False, True), ("head:2", 509, True, True)])
def test_the_matrix_drafts_if_asked(speculate: str, vocabulary: int, head: bool, drafts: bool) -> None:
    runtime = load(RandomModel(shape=odd_shape(vocab_size=vocabulary), head=head), EngineConfig(
        dtype="float32", memory="8MiB", threads=1, speculate=speculate, device="cpu"))
    drafter = drafter_of(runtime)
    assert isinstance(drafter, HeadProposer) == drafts
    if isinstance(drafter, HeadProposer):
        assert drafter.limit == (2 if speculate == "head:2" else 3)
        assert 0 < drafter.head.share < 1 and runtime.cache.delta_logs.size
        drafter.head.build()
        assert drafter.head.vocabulary and len(drafter.head.vocabulary.ids) == -(-vocabulary * 9 // 64 // 16) * 16


# The two matrices


@pytest.mark.parametrize("type", ["F32", "BF16", "Q8_0", "Q4_K", "Q6_K", "Q4_1"])
def test_rows_have_the_same_bits_in_both(type: str) -> None:
    """One row or many, in the part or in the whole: a logit's bits depend on its row and its hidden state."""
    decoder = odd_runtime().decoder
    head = part_of(replace(decoder, weights=replace(decoder.weights, head=panels(type, 256))), draftable(64, 300))
    vocabulary = head.vocabulary
    assert vocabulary
    vocabulary.see([299, 250])
    hidden = torch.randn(12, 256)
    whole = head.whole(hidden)
    for first, end in ((0, 1), (3, 5), (4, 10), (0, 12)):
        for found, wanted in ((head.whole(hidden[first:end]), whole[first:end]),
                              (head.partial(hidden[first:end], vocabulary), whole[first:end, vocabulary.ids])):
            assert torch.equal(found.view(torch.int32), wanted.contiguous().view(torch.int32))


# Answers


def passes_of(engine: Engine) -> list[int]:
    """The rows of each pass over the whole matrix of a group."""
    found = list[int]()
    assert isinstance(engine.speculator.drafter, HeadProposer)
    head: Any = engine.speculator.drafter.head
    whole = head.whole
    head.whole = lambda hidden: (found.append(len(hidden)), whole(hidden))[1]  # type: ignore[func-returns-value]
    return found


@pytest.mark.parametrize("name", ["greedy", "drawn", "filters", "penalties"])
@pytest.mark.parametrize("depth", [1, 5, 12])
def test_a_group_takes_one_pass(name: str, depth: int) -> None:
    request = EngineRequest("a", prompt(), PARAMS[name])
    plain = drain_of(Engine(runtime_of(odd_runtime())), request)
    engine = engine_of(depth)
    passes = passes_of(engine)
    answers = serve(engine, request)
    assert answers["a", 0].tokens == plain
    usage = usage_of(answers)
    assert usage.accepted_tokens > 5 and usage.accepted_tokens + len(passes) >= ANSWER - 2
    assert sum(passes) == len(passes) + sum(engine.speculator.stats.drafted_at)
    assert max(passes) == depth + 1


def drain_of(engine: Engine, *requests: EngineRequest) -> list[int]:
    return serve(engine, *requests)[requests[0].id, 0].tokens


def test_tokens_without_rows_are_not_drafted() -> None:
    """And only these are drafted wrong."""
    engine = engine_of(4)
    drafter: Any = engine.speculator.drafter
    missed = list[bool]()
    observe = drafter.observe

    def observed(sequence: Any, acceptance: Acceptance) -> None:
        begin = drafter._seen.get(sequence, 0)
        missed.extend(token not in drafter.head.vocabulary for token in sequence.tokens[max(begin, 41):])
        observe(sequence, acceptance)

    drafter.observe = observed
    usage = usage_of(serve(engine, EngineRequest("a", prompt(), PARAMS["drawn"])))
    wrong = engine.speculator.stats.drafted_at, engine.speculator.stats.accepted_at
    assert usage.accepted_tokens and any(missed)
    assert sum(at - right for at, right in zip(*wrong, strict=True)) >= 0


@pytest.mark.parametrize("change", [{"logprobs": 3}, {"stop_token_ids": (4,)}, {"min_tokens": 30, "ignore_eos": False},
                                    {"n": 3}, {"prompt_logprobs": 1}])
def test_other_parameters(change: dict[str, Any]) -> None:
    request = EngineRequest("a", prompt(), replace(PARAMS["drawn"], **change))
    plain, found = serve(Engine(runtime_of(odd_runtime())), request), serve(engine_of(3), request)
    assert plain.keys() == found.keys()
    for key, answer in plain.items():
        assert found[key].tokens == answer.tokens and found[key].last.finish == answer.last.finish
        assert [event.logprobs for event in found[key].events] == [event.logprobs for event in answer.events]


@pytest.mark.parametrize("made", [lambda: Dictate({0: 11, 5: 12, 6: 12}), None])
def test_forced_tokens_need_the_host(made: Callable[[], Dictate] | None) -> None:
    request = EngineRequest("a", prompt(), PARAMS["greedy"], guide=made)
    engine = engine_of(3)
    passes = passes_of(engine)
    assert drain_of(engine, request) == drain_of(Engine(runtime_of(odd_runtime())), request)
    assert bool(passes) == (made is None)


@pytest.mark.parametrize("after", range(3, 9))
def test_a_request_that_comes_stops_the_groups(after: int) -> None:
    """Prompts share steps with answers. The drafts of these are dropped: the host does not know them."""
    requests = [EngineRequest(name, numbers(seed, 30, 509), PARAMS["drawn"]) for seed, name in enumerate("abc")]
    plain = serve(Engine(runtime_of(odd_runtime())), *requests)
    engine, answers = engine_of(4, budget=16), {}
    for request in requests:
        engine.add(request)
        for _ in range(after):
            take(answers, engine.step())
            engine.check()
    drain(engine, answers)
    assert {key: answer.tokens for key, answer in answers.items()} == {
        key: answer.tokens for key, answer in plain.items()}
    assert usage_of(answers, "a").drafted_tokens and usage_of(answers, "c").drafted_tokens


@pytest.mark.parametrize("pages", [10, 12])
def test_preempted_sequences(pages: int) -> None:
    requests = [replace(greedy(numbers(index, 20 + 10 * index, 509), 60, f"r{index}")) for index in range(4)]
    engine = engine_of(5, pages=pages, context=160)
    answers = serve(engine, *requests)
    assert engine.scheduler.preemptions > 0 and sum(engine.speculator.stats.drafted_at)
    for request in requests:
        same_tokens(reference(odd_runtime(), request.prompt, 60), answers[request.id, 0].tokens)


def test_an_end_within_a_group_leaves_the_state_of_the_answer() -> None:
    runtime, engine = odd_runtime(), engine_of(5)
    for last in range(2, 12):
        request = replace(greedy(prompt(), ANSWER, f"a{last}"), matcher=lambda last=last: EndingAt(last))
        tokens = drain_of(engine, request)
        longer = (*prompt(), *tokens, *numbers(8, 9, 509))
        answers = serve(engine, greedy(longer, 12, f"b{last}"))
        assert usage_of(answers, f"b{last}").cached_tokens >= len(prompt()) + last - 1
        same_tokens(reference(runtime, longer, 12), answers[f"b{last}", 0].tokens)


# Whether groups pay


def test_acceptance_is_known_without_drafts() -> None:
    acceptance = Acceptance.hopeful(4)
    for _ in range(300):
        acceptance.observe(False)
    assert max(acceptance.shares) < 0.01
    for _ in range(300):
        acceptance.observe(True)
    assert min(acceptance.shares) > 0.99 and len({*acceptance.shares}) == 1


def test_groups_are_as_long_as_they_pay() -> None:
    """By the bytes of a matrix that is 39 % of all, and a part of a seventh."""
    found = list[int]()
    for share in (0.4, 0.7, 0.9, 0.99):
        length = AdaptiveDraftLength(5, HeadGrowth(0.39, 1 / 7), 1024)
        acceptance = Acceptance([share] * 5, [9] * 5)
        for _ in range(4):
            length.timed(1, 0, 1.0)
        found.append(length.choose([acceptance], 1))
        assert [length.choose([acceptance], 1) for _ in range(500)].count(0) > (500 if share < 0.6 else 0) - 1
    assert found[0] == 0 and found == sorted(found) and found[-1] == 5


def test_nothing_is_drafted_where_the_part_contains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(3)
    engine.speculator.depth = AdaptiveDraftLength(3, HeadGrowth(0.39, 0.1), 1024)
    drafter: Any = engine.speculator.drafter
    monkeypatch.setattr(type(drafter.head.vocabulary), "__contains__", lambda self, token: False)
    usage = usage_of(serve(engine, EngineRequest("a", prompt(), replace(PARAMS["drawn"], max_tokens=200))))
    assert not usage.drafted_tokens


def test_the_part_is_built_once_an_answer_is_long() -> None:
    """In a thread; and answers go on without where it cannot be built."""
    runtime, chosen = runtime_of(odd_runtime()), list[int]()

    def choose() -> list[int] | None:
        chosen.append(1)
        return draftable(256, 509)

    head = PartialHead(runtime.decoder, choose)
    engine = Engine(runtime, HeadProposer(runtime, head, 3), FixedDraftLength(3))
    serve(engine, greedy(prompt(), 20, "short"))
    assert head._builder is None and not chosen
    plain = drain_of(Engine(runtime_of(odd_runtime())), greedy(prompt(), 200))
    assert drain_of(engine, greedy(prompt(), 200)) == plain
    assert head._builder
    head._builder.join()
    assert head.vocabulary and chosen == [1]
    answers = serve(engine, greedy(prompt(), 200, "long"))
    assert answers["long", 0].tokens == plain and usage_of(answers, "long").accepted_tokens


def test_a_part_that_cannot_be_built(caplog: pytest.LogCaptureFixture) -> None:
    def choose() -> list[int]:
        raise OSError("the tokenizer is gone")

    runtime = runtime_of(odd_runtime())
    head = PartialHead(runtime.decoder, choose)
    engine = Engine(runtime, HeadProposer(runtime, head, 3), FixedDraftLength(3))
    assert len(drain_of(engine, greedy(prompt(), 60))) == 60
    assert head._builder
    head._builder.join()
    assert head.vocabulary is None and "could not be copied" in caplog.text


# Real matrices of logits


@pytest.mark.slow
@pytest.mark.parametrize("model", ["smollm2", "embedded"])
def test_a_million_draws_of_real_heads(model: str) -> None:
    """Hidden states of real text. Groups of six rows give the bits of single rows, so a draw is the same; and a part
    draws the token of the whole exactly if it contains that token."""
    runtime, head, hidden = real_head(model)
    vocabulary = head.vocabulary
    assert vocabulary
    draws, differ = 0, 0
    each = -(-1_000_000 // ((len(KINDS) - 1) * len(hidden)))
    for block in hidden.split(6):
        whole = head.whole(block)
        assert torch.equal(whole, torch.cat([head.whole(row[None]) for row in block]))
        found = head.partial(block, vocabulary)
        assert torch.equal(found, whole[:, vocabulary.ids])
        spread = vocabulary.spread(found)
        for kind, (temperature, top_k, top_p, min_p) in KINDS.items():
            times = each if temperature else 1
            sampling = sampling_of(draws, times * len(block), temperature, top_k, top_p, min_p)
            chosen = [runtime.sample(logits.repeat(times, 1), sampling).tokens for logits in (whole, spread)]
            inside = torch.isin(chosen[0], vocabulary.ids)
            same = chosen[0] == chosen[1]
            if kind in ("greedy", "drawn"):
                assert torch.equal(same, inside)
            differ += int((~same & inside).sum())
            draws += times * len(block)
    print(f"{model}: {draws} draws, {differ} that a filter of the part's logits changes")
    assert draws >= 1_000_000 and differ < 0.01 * draws


KINDS: dict[str, tuple[float, int, float, float]] = {
    "greedy": (0.0, 0, 1.0, 0.0), "drawn": (1.0, 0, 1.0, 0.0), "top-k": (1.0, 40, 1.0, 0.0),
    "top-p": (0.8, 0, 0.9, 0.0), "min-p": (1.2, 0, 1.0, 0.05), "all": (0.7, 20, 0.8, 0.01)}


def sampling_of(first: int, count: int, temperature: float, top_k: int, top_p: float, min_p: float) -> Sampling:
    full = torch.full
    return Sampling(full((count,), temperature), full((count,), top_k), full((count,), top_p), full((count,), min_p),
                    torch.arange(first, first + count) * 7919, greedy=temperature == 0,
                    filtered=bool(top_k or top_p < 1 or min_p))


def real_head(model: str) -> tuple[ModelRunner, PartialHead, Tensor]:
    """A model, an eighth of its matrix of logits, and hidden states [n, H] of text."""
    options: dict[str, Any] = {"max_context": 2048, "memory": "256MiB", "speculate": "off", "threads": 2}
    llm = LLM(**options) if model == "embedded" else LLM(str(smollm2()), packed_weights="on", **options)
    runtime = llm.runtime
    assert isinstance(runtime, ModelRunner)
    size = runtime.config.vocab_size
    head = part_of(runtime.decoder, draftable(size // 8, size))
    tokens = llm.chat_processor.tokenizer.encode(documents())[:1800]
    return runtime, head, session_over(runtime, context=2048).hidden_states(tokens)[-1].contiguous()
