"""What runs before a server is ready: prompts that touch nothing but page 0 and slot 0, in the engine's thread."""

from __future__ import annotations

import threading

import pytest
import torch

from deltic import LLM
from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import load
from deltic.errors import UnavailableError
from deltic.ops.types import Batch
from deltic.runner.warm_up import prompt_plans, sizes_up_to


@pytest.mark.parametrize(("budget", "context", "batch"), [(8192, 32768, 64), (8192, 2048, 256), (512, 4096, 1),
                                                          (16, 64, 2), (2, 32, 1), (1, 16, 1)])
def test_plans_fit_the_limits_and_write_to_the_first_page_and_slot(budget: int, context: int, batch: int) -> None:
    plans = [*prompt_plans(budget, context, batch)]
    largest = min(budget, context - 1)
    assert (largest < 2) or max(sum(len(row.tokens) for row in plan.rows) for plan in plans) == largest
    for plan in plans:
        assert 1 < sum(len(row.tokens) for row in plan.rows) <= budget and len(plan.rows) <= max(batch, 4)
        for row in plan.rows:
            assert {*row.pages} == {row.slot} == {0} and row.target is None
            assert all(slot == 0 for _, slot in row.checkpoints)
            assert row.done + len(row.tokens) <= context and row.done + len(row.tokens) <= 16 * len(row.pages)


def test_sizes_grow_by_half() -> None:
    assert sizes_up_to(100) == [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 100]
    assert sizes_up_to(1) == [] and sizes_up_to(2) == [2]
    few = [*prompt_plans(8192, 32768, 64, few=True)]
    assert [len(row.tokens) for plan in few for row in plan.rows] == [512, 2]


@pytest.mark.parametrize("speculate", ["off", "mtp:3"])
def test_prompts_run_and_leave_no_trace(speculate: str, monkeypatch: pytest.MonkeyPatch,
                                        caplog: pytest.LogCaptureFixture) -> None:
    """As on a GPU, where there is a step for each plan; one for which memory is short is named, and the others run."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    runtime = load(None, EngineConfig(device="cpu", memory="64MiB", max_batch=4, max_context=1024, token_budget=256,
                                      speculate=speculate))
    seen = list[int]()

    def profiler(batch: Batch) -> None:
        seen.append(batch.layout.tokens)
        if len(seen) == 1:
            raise MemoryError
    runtime.profiler = profiler
    runtime._warm_up_prompts()
    assert seen == [sum(len(row.tokens) for row in plan.rows) for plan in prompt_plans(256, 1024, 4)]
    assert "no memory for a step with 256 prompt tokens" in caplog.text
    runtime.cache.check()
    assert runtime.cache.idle and not len(runtime.cache.tree) and runtime.cache.pages.free == runtime.cache.pages.size


def test_a_model_warms_up_in_the_engines_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[str]()
    llm = LLM(max_context=512, memory="32MiB")
    monkeypatch.setattr(type(llm.runtime), "warm_up", lambda _: seen.append(threading.current_thread().name))
    llm.warm_up()
    assert seen == ["deltic-engine"]
    with pytest.raises(ZeroDivisionError):
        llm.worker.execute(lambda engine: 1 / 0)
    assert llm.worker.execute(lambda engine: isinstance(engine, Engine))
    llm.close()
    with pytest.raises(UnavailableError):
        llm.worker.execute(lambda engine: None)


def test_warming_up_costs_nothing_on_a_cpu() -> None:
    runtime = load(None, EngineConfig(device="cpu", memory="32MiB", max_context=512))
    profiled = list[object]()
    runtime.profiler = profiled.append
    runtime.warm_up()
    assert not profiled
