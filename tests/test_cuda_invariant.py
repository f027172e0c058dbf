"""On a GPU with `--batch-invariant`: an answer is the same alone, among many, read in pieces, and resumed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from reuse_cases import runtime_of
from support import Answers, drain, greedy, numbers, serve

from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import load
from deltic.params import EngineRequest
from deltic.runner.model_runner import ModelRunner

if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)


@pytest.fixture(scope="module")
def runtime() -> Iterator[ModelRunner]:
    yield load(None, EngineConfig(device="cuda", dtype="bfloat16", memory="256MiB", max_batch=32, max_context=1024,
                                  batch_invariant=True))


def requests(vocabulary: int) -> list[EngineRequest]:
    return [greedy(numbers(seed, 10 + 23 * seed % 200, vocabulary), 40, str(seed), temperature=0.8 * (seed % 2),
                   seed=seed, logprobs=1) for seed in range(24)]


def check_same(found: Answers, wanted: Answers) -> None:
    """Steps of other sizes round differently: probabilities are off by a hundredth, and one token of 200 is another."""
    for key, answer in found.items():
        assert answer.tokens == wanted[key].tokens, key
        for one, other in zip(answer.events, wanted[key].events, strict=True):
            if one.logprobs and other.logprobs:
                assert abs(one.logprobs.token - other.logprobs.token) < 1e-5, key


def test_steps_are_recorded_for_few_rows(runtime: ModelRunner) -> None:
    fresh = replace(runtime)
    assert not fresh.capabilities.verifies and not fresh.capabilities.defers_state_writes and fresh.step is not None
    fresh.warm_up()
    assert fresh.graphs
    recorded = fresh.graphs.buckets
    assert max(rows for rows, *_ in recorded) == 16
    serve(fresh, requests(runtime.config.vocab_size)[:20])
    assert fresh.graphs.buckets == recorded


def test_alone_and_among_many(runtime: ModelRunner) -> None:
    asked = requests(runtime.config.vocab_size)
    together = serve(runtime, asked)
    for request in asked[::5]:
        check_same(serve(runtime, [request]), together)


@pytest.mark.parametrize("budget", [1, 7, 500])
def test_any_prompt_chunks(runtime: ModelRunner, budget: int) -> None:
    asked = requests(runtime.config.vocab_size)[:6]
    other = replace(runtime, options=replace(runtime.options, token_budget=budget))
    check_same(serve(other, asked), serve(runtime, asked))


def test_from_cached_prefixes(runtime: ModelRunner) -> None:
    vocabulary = runtime.config.vocab_size
    begin = numbers(1, 150, vocabulary)
    first, second = greedy(begin, 30, "first"), greedy([*begin, *numbers(2, 33, vocabulary)], 40, "second", logprobs=1)
    engine = Engine(runtime_of(runtime, batch=8))
    engine.add(first)
    drain(engine)
    engine.add(second)
    resumed = drain(engine)
    usage = resumed["second", 0].last.usage
    assert usage and usage.cached_tokens > 100
    check_same(resumed, serve(runtime_of(runtime, batch=8, reuse=False), [second]))
