"""On a GPU: where a step finds no memory, one request ends, and the others are answered."""

from __future__ import annotations

import gc
from contextlib import suppress

import pytest
import torch
from support import Answers, drain, greedy, numbers, take

from deltic import RandomModel
from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import load

if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)


def all_memory() -> list[torch.Tensor]:
    """As pieces of 2 MiB."""
    found = list[torch.Tensor]()
    with suppress(torch.OutOfMemoryError):
        while True:
            found.append(torch.empty(2 << 20, dtype=torch.uint8, device="cuda"))
    return found


def test_full_card_makes_steps_shorter() -> None:
    runtime = load(RandomModel("qwen3.5-0.8b", 4), EngineConfig(device="cuda", dtype="bfloat16", memory="1GiB",
                                                                max_batch=4, max_context=16384, speculate="off"))
    engine, answers, vocabulary = Engine(runtime), Answers(), runtime.config.vocab_size
    runtime.warm_up()
    for index in range(3):
        engine.add(greedy(numbers(index, 20, vocabulary), 40, name=f"short{index}"))
    for _ in range(8):
        take(answers, engine.step())
    gc.collect()  # what other tests have left behind would leave room later
    torch.cuda.empty_cache()
    budget = engine.scheduler.token_budget
    limit, total = torch.cuda.memory_reserved() + (192 << 20), torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        held = all_memory()  # also what is free between what others hold
        del held[-64:]  # side by side
        engine.add(greedy(numbers(9, 8000, vocabulary), 4, name="long"))
        drain(engine, answers)
        del held
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert 256 <= engine.scheduler.token_budget < budget
    assert [answer.last.error for answer in answers.values()] == [None] * 4
    assert all(len(answers[f"short{index}", 0].tokens) == 40 for index in range(3))
    engine.add(greedy(numbers(9, 8000, vocabulary), 4, name="again"))
    drain(engine, answers)
    assert answers["again", 0].last.finish == "length"
    engine.check()
