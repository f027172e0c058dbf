"""Tokens that a draft head gets late, because nothing is drafted, are there when its state is read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from speculation_cases import headed as odd_headed
from support import Answers, greedy, numbers, session_over, take

from deltic.config import EngineConfig, ModelConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import RandomModel, load
from deltic.runner.model_runner import ModelRunner
from deltic.spec_decode import mtp
from deltic.spec_decode.draft_length import FixedDraftLength

PROMPTS = {"a": 5, "b": 30, "c": 17, "d": 40, "e": 9}
LENGTHS = {"a": 60, "b": 35, "c": 5, "d": 21, "e": 44}


def headed() -> ModelRunner:
    shape = replace(ModelConfig.preset("qwen3.5-0.8b", 4), vocab_size=5003)
    return load(RandomModel(shape=shape, initializer_range=0.1, head=True), EngineConfig(
        dtype="float32", memory="96MiB", max_batch=3, max_context=256, threads=1, speculate="mtp:2"))


def head_rows(runtime: ModelRunner, pages: list[int], done: int) -> list[torch.Tensor]:
    """The head's keys and values of the first `done` tokens in these pages."""
    return [tensor[-1, pages].flatten(0, 1)[:done].clone() for tensor in runtime.pools.page_tensors]


def compare(late: Engine, early: Engine) -> None:
    """All that the late one has been told of."""
    assert late.runtime.mtp_runner
    backlog = late.runtime.mtp_runner._backlog
    for mine, other in zip(late.scheduler.running, early.scheduler.running, strict=True):
        assert mine.cache and other.cache and mine.cache.pages == other.cache.pages
        told = mine.cache.done - (len(backlog.ids) if backlog else 0)
        for found, wanted in zip(head_rows(late.runtime, mine.cache.pages, told),
                                 head_rows(early.runtime, mine.cache.pages, told), strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_mtp_head_catches_up_after_late_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares, step by step, a head that gets tokens late with one that gets them at once. Sequences come and go, one
    is aborted, and one reuses the prefix that another has just left."""
    engines = [Engine(headed(), depth=FixedDraftLength(0)) for _ in range(2)]
    requests = {name: greedy(numbers(index, PROMPTS[name], 500), LENGTHS[name], name)
                for index, name in enumerate(PROMPTS)}
    single, calls = mtp._single, [0, 0]
    answers: list[Answers] = [{}, {}]
    for number, engine in enumerate(engines):
        runner = engine.runtime.mtp_runner
        assert runner and runner._step

        def counted(*arguments: Any, number: int = number, follow: Any = runner._step.follow) -> None:
            calls[number] += 1
            follow(*arguments)

        monkeypatch.setattr(runner, "_step", replace(runner._step, follow=counted))
        for name in "abc":
            engine.add(requests[name])
    steps, after = 0, {"b": "again", "again": "d", "c": "e"}
    while engines[0].has_work:
        for number, engine in enumerate(engines):
            monkeypatch.setattr(mtp, "_single", single if number == 0 else lambda batch: False)
            take(answers[number], engine.step())
            if steps == 50:
                engine.abort("d")
            engine.check()
        for name in [name for name in after if (name, 0) in answers[0] and answers[0][name, 0].last.finish]:
            again, said = after.pop(name), answers[0]["b", 0].tokens if ("b", 0) in answers[0] else []
            for engine in engines:
                engine.add(requests[again] if again in requests else
                           greedy((*requests["b"].ids, *said, 7, 8, 9), 30, again))
        steps += 1
        if steps % 4 == 0:
            compare(*engines)
    assert calls[0] < 0.5 * calls[1] and not after, calls
    assert answers[0]["again", 0].last.usage.cached_tokens >= 60
    assert {key: answer.tokens for key, answer in answers[0].items()} == {
        key: answer.tokens for key, answer in answers[1].items()}


@pytest.mark.parametrize("pieces", [(2, 1, 1), (1, 3, 1, 2, 1, 1), (5, 21, 1, 1)])
@pytest.mark.parametrize("budget", [1, 4, 64])
def test_a_session_drafts_the_same_however_its_tokens_came(pieces: tuple[int, ...], budget: int) -> None:
    """It leaves each call's state in another slot."""
    tokens = numbers(3, sum(pieces), 500)
    cut, whole = (session_over(odd_headed(), batch=1, budget=each) for each in (budget, 64))
    done = 0
    for count in pieces:
        cut.commit(tokens[done:done + count])
        done += count
    whole.commit(tokens)
    assert cut.draft(7, 3) == whole.draft(7, 3)
    rows = [head_rows(each.runtime, each._cache.pages, done) for each in (cut, whole)]
    assert all(torch.equal(*pair) for pair in zip(*rows, strict=True))


def test_a_copy_of_the_model_leaves_late_tokens_to_their_head() -> None:
    """Pools write deferred K/V before pages move. If they forgot the head of a copied model, it would write its K/V to
    memory that has become another sequence's state."""
    runtime = headed()
    engine, copies = Engine(runtime, depth=FixedDraftLength(0)), [replace(runtime)]
    engine.add(greedy(numbers(0, 5, 500), 20, "a"))
    for copied in (True, False):
        for _ in range(4):
            engine.step()
        head = runtime.mtp_runner
        assert head and head._backlog and bool(copies) == copied
        runtime.pools.apply(())
        assert head._backlog is None
        copies.clear()
    engine.abort("a")
    engine.check()
