"""On a GPU: no more state slots than sequences, and a limit on the memory that a model takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from reuse_cases import runtime_of
from speculation_cases import EndingAt
from support import drain, greedy, numbers, serve

from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import load
from deltic.errors import ConfigError
from deltic.params import EngineRequest
from deltic.runner.model_runner import ModelRunner

if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)

MIB = 1 << 20


def loaded(**options: Any) -> ModelRunner:
    return load(None, EngineConfig(device="cuda", dtype="bfloat16", max_context=1024, speculate="off", **options))


@pytest.fixture(scope="module")
def runtime() -> Iterator[ModelRunner]:
    yield loaded(memory="256MiB", max_batch=48)


def requests(count: int, vocabulary: int) -> list[EngineRequest]:
    """Answers that end without notice."""
    return [replace(greedy(numbers(seed, 10 + 23 * seed % 200, vocabulary), 60, str(seed)),
                    matcher=partial(EndingAt, 5 + 7 * seed % 41)) for seed in range(count)]


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("batch", [4, 40])
def test_a_slot_for_each_sequence_is_enough(runtime: ModelRunner, batch: int, reuse: bool) -> None:
    """Of few rows, which write their states in every step, and of many, which leave most in delta logs."""
    engine = Engine(runtime_of(runtime, batch=batch, slots=batch + 1, pages=batch * 20, reuse=reuse))
    for request in requests(2 * batch, runtime.config.vocab_size):
        engine.add(request)
    answers = drain(engine, limit=3000)
    engine.check()
    assert all(answer.last.finish == "stop" for answer in answers.values())
    assert engine.stats.async_steps > 20


def test_answers_in_their_own_slots_equal_those_of_steps_one_by_one() -> None:
    """Prompts share steps in other ways, so that only batch-invariant kernels give the same bits."""
    runtime = loaded(memory="256MiB", max_batch=4, batch_invariant=True)
    asked = requests(12, runtime.config.vocab_size)
    wanted = Engine(runtime_of(runtime, batch=4), overlap=False)
    found = Engine(runtime_of(runtime, batch=4, slots=5, reuse=False))
    for engine in (wanted, found):
        for request in asked:
            engine.add(request)
    answers, others = drain(wanted, limit=3000), drain(found, limit=3000)
    assert {key: answer.tokens for key, answer in answers.items()} == {key: a.tokens for key, a in others.items()}


def test_a_turn_resumes_behind_the_token_that_ended_an_answer(runtime: ModelRunner) -> None:
    first = requests(3, runtime.config.vocab_size)[2]
    engine = Engine(runtime_of(runtime, batch=4))
    engine.add(first)
    answer = drain(engine)[first.id, 0].tokens
    longer = greedy([*first.prompt, *answer, 5, 6, 7], 30, "longer")
    engine.add(longer)
    resumed = drain(engine)["longer", 0]
    assert resumed.last.usage and resumed.last.usage.cached_tokens == len(first.prompt) + len(answer)
    alone = serve(runtime_of(runtime, batch=4, reuse=False), [longer])["longer", 0]
    assert resumed.tokens == alone.tokens


def test_a_size_of_gpu_memory_is_not_exceeded() -> None:
    """By what the process takes on the card, beside what others took before."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    before = total - free
    try:
        limit = before + 3000 * MIB
        limited = loaded(gpu_memory=f"{limit >> 20}MiB")
        limited.warm_up()
        assert limited.memory.notes[0].startswith(f"GPU memory: {limit / (1 << 30):.2f} GiB = ")
        engine = Engine(limited)
        for request in requests(40, limited.config.vocab_size):
            engine.add(request)
        while engine.has_work:
            engine.step()
            free, total = torch.cuda.mem_get_info()
            assert total - free <= limit
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(3000 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(ConfigError, match="gpu_memory"):
            loaded(gpu_memory="64MiB")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
