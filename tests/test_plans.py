"""A plan is plain data: the scheduler makes it without torch, and whoever carries it out on pools of their own gets the
same bits."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_engine import serve as serve_plainly
from reuse_cases import runtime_of
from speculation_cases import PATTERNS, Scripted, expected
from support import drain, embedded_runtime, fresh_pools, greedy, numbers, odd_runtime
from torch import Tensor

from deltic.cache.manager import HybridCache
from deltic.cache.offload.host import HostStore
from deltic.cache.offload.index import TierIndex
from deltic.cache.offload.tiers import StoreRequest
from deltic.cache.offload.types import LoadedPrefix
from deltic.cache.operations import CopyPage, CopySlot, FlushDeltaLog, RestoreItem, StoreItem, operation_of, plain
from deltic.cache.tensors import CachePools
from deltic.engine.engine import Engine
from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.ops.types import Batch
from deltic.params import SamplingParams
from deltic.runner.input_batch import build
from deltic.runner.model_runner import ModelRunner
from deltic.spec_decode.draft_length import FixedDraftLength

WITHOUT_TORCH = """
import runpy, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy"):
            raise ImportError(f"{name} is imported")
sys.meta_path.insert(0, Refuse())
runpy.run_path(sys.argv[2], run_name="__main__")
"""


def test_the_scheduler_serves_in_a_process_that_has_no_torch() -> None:
    """Hundreds of random requests: prefixes, forks, drafts, preemption, pauses, aborts."""
    command = [sys.executable, "-c", WITHOUT_TORCH, "5", str(Path(__file__).with_name("plain_engine.py"))]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent.parent)
    assert result.returncode == 0, result.stderr
    answers, *others = map(int, result.stdout.split())
    assert answers > 300 and all(count > 10 for count in others), result.stdout


@pytest.mark.slow
def test_thousands_of_plain_requests() -> None:
    for seed in range(100, 200):
        serve_plainly(seed, 80)


OPERATIONS = (
    CopyPage(1, 2),
    CopySlot(3, 4),
    FlushDeltaLog(5, 6, 7, 9),
    StoreItem(0, (1, 2), 3),
    RestoreItem(1, (), 16, 0),
)


def test_a_plan_is_written_and_read_back() -> None:
    rows = (
        PlannedRow((5,), 31, (3, 4), 2, 1, base=30, delta_log=1, append=True),
        PlannedRow((1, 2, 3), 0, (7,), 1, 0, checkpoints=((2, 5),)),
        PlannedRow((4,), 9, (5,), 0, 1, rotary=-3),
        PlannedRow((0, 0), 2, (8,), 3, 0, rotary=((2, 2), (2, 2), (2, 3)), hidden=True),
    )
    for plan in (StepPlan(()), StepPlan(rows), StepPlan((), OPERATIONS), StepPlan(rows, OPERATIONS)):
        again = StepPlan.from_json(plan.to_json())
        assert again == plan and hash(again) == hash(plan)
    assert all(operation_of(plain(operation)) == operation for operation in OPERATIONS)


def test_invalid_operations_are_refused() -> None:
    with pytest.raises(KeyError):
        operation_of(["os.remove", "/"])
    with pytest.raises(TypeError):
        operation_of(["CopyPage", 1, 2, 3])


@dataclass
class Recorder:
    """Stands before a runtime and writes down all that reaches its pools: plans, what was carried out outside of one,
    and what came from tiers. logits: of each plan with rows."""

    runtime: ModelRunner
    plans: list[str] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    arrived: dict[int, LoadedPrefix] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runtime, name)

    def watch(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        cache, planned, hold = self.runtime.cache, engine.scheduler.schedule, CachePools.hold
        flush = cache.operations.flush

        def plan() -> Any:
            found = planned()
            self.plans.append(found[0].to_json())
            return found

        def flushed() -> None:
            self.plans.append(StepPlan((), tuple(cache.operations.queued)).to_json())
            flush()

        def held(pools: CachePools, content: object) -> int:
            number = hold(pools, content)
            if isinstance(content, LoadedPrefix):
                self.arrived[number] = content
            return number

        monkeypatch.setattr(engine.scheduler, "schedule", plan)
        monkeypatch.setattr(cache.operations, "flush", flushed)
        monkeypatch.setattr(CachePools, "hold", held)

    def run(self, batch: Batch) -> Tensor:
        logits = self.runtime.run(batch)
        self.logits.append(logits.clone())
        return logits

    def operations(self) -> list[str]:
        return [type(operation).__name__ for text in self.plans for operation in StepPlan.from_json(text).operations]


def story(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefix hits inside and at the end of pages, forks, drafts right and wrong, preemption, a pause in the middle of
    a prompt, a prompt known to its end, one that comes back from a tier, and the turn after an answer with drafts."""
    answer = expected("odd", "greedy")
    engine = Engine(recorder, Scripted({("a", 0): answer.tokens}, PATTERNS["alternating"], 4),  # type: ignore[arg-type]
                    FixedDraftLength(4))
    recorder.watch(engine, monkeypatch)
    opening = numbers(1, 70, 509)
    engine.add(replace(greedy((*opening, *numbers(2, 30, 509)), 12, "first"), stable_prefixes=(len(opening),)))
    engine.step()
    engine.pause("first")
    engine.resume("first")
    engine.add(greedy(answer.prompt, len(answer.tokens), "a"))
    for index in range(3):
        engine.add(greedy((*opening, *numbers(10 + index, 9 + 20 * index, 509)), 40, f"n{index}"))
    engine.add(replace(greedy(numbers(3, 37, 509), 9, "choices"),
                       output=SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=9, ignore_eos=True)))
    drain(engine)
    engine.add(greedy(numbers(3, 37, 509), 3, "again"))
    drain(engine)
    engine.runtime.cache.clear()
    for name in ("late", "later"):
        engine.add(greedy((*opening, *numbers(2, 30, 509), *numbers(4, 5, 509)), 4, name))
    drain(engine)
    engine.add(greedy(answer.prompt, len(answer.tokens), "a", stop_token_ids=(answer.tokens[10],)))
    ended = drain(engine)["a", 0].tokens
    engine.add(greedy((*answer.prompt, *ended, 7), 4, "turn"))
    assert 0 < drain(engine)["turn", 0].last.usage.cached_tokens - len(answer.prompt) < len(answer.tokens)
    assert engine.scheduler.preemptions > 0 and engine.speculator.stats.accepted_at[0] > 0


def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    tiers = [TierIndex(HostStore(1 << 24), threads=False)]
    recorder = Recorder(runtime_of(odd_runtime(), pages=18, slots=16, batch=4, context=200, tiers=tiers))
    story(recorder, monkeypatch)
    return recorder


def second(recorder: Recorder) -> ModelRunner:
    """The model over pools of its own. What came from tiers is given to it by its numbers."""
    sizes = recorder.runtime.cache.sizes
    pools = fresh_pools(recorder.runtime, sizes.pages, sizes.slots, sizes.delta_logs)
    pools.held.update(recorder.arrived)
    return replace(recorder.runtime, cache=HybridCache(pools))


def test_recorded_plans_give_the_same_bits_on_other_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = recorded(monkeypatch)
    assert set(recorder.operations()) == {"CopyPage", "CopySlot", "FlushDeltaLog", "StoreItem", "RestoreItem"}
    assert replayed(second(recorder), recorder) == len(recorder.logits) > 50


@pytest.mark.parametrize("kind", [CopyPage, CopySlot, FlushDeltaLog, RestoreItem])
def test_no_kind_of_operation_is_for_nothing(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = recorded(monkeypatch)
    recorder.plans = [without(StepPlan.from_json(text), kind).to_json() for text in recorder.plans]
    with pytest.raises(AssertionError, match="differs"):
        replayed(second(recorder), recorder)


def without(plan: StepPlan, kind: type) -> StepPlan:
    return replace(plan, operations=tuple(one for one in plan.operations if not isinstance(one, kind)))


def replayed(runtime: ModelRunner, recorder: Recorder) -> int:
    """Carry out what was written down; returns how many steps gave the same bits. What is offered to tiers stays."""
    logits = iter(recorder.logits)
    steps = 0
    for text in recorder.plans:
        plan = StepPlan.from_json(text)
        for operation in plan.operations:
            if isinstance(operation, StoreItem):
                runtime.pools.held[operation.item] = StoreRequest((), None, ())
        runtime.pools.apply(plan.operations)
        if plan.rows:
            found = runtime.run(build(plan, runtime.pools.device))
            assert torch.equal(found, next(logits)), f"step {steps} differs"
            steps += 1
    return steps


def test_a_page_that_is_still_arriving_is_copied_when_it_is_there() -> None:
    """Layer by layer, and in the order in which all was asked for."""
    pools = fresh_pools(embedded_runtime(), 8, 2)
    assert len(pools.keys) > 1

    class Arrives:
        def __init__(self, layer: int, page: int, value: float) -> None:
            self.layer, self.page, self.value = layer, page, value

        def wait(self) -> None:
            for pool in pools.page_tensors:
                pool[self.layer, self.page] = self.value

    for layer in range(len(pools.keys)):
        pools.arriving[layer].append(Arrives(layer, 1, layer + 1.0))
    pools.apply((CopyPage(1, 2), CopyPage(2, 3)))
    assert bool(pools.keys[:, 1:4].isnan().all())
    pools.kv_views()[1].wait()
    assert bool((pools.keys[1, 1:4] == 2.0).all() and (pools.values[1, 1:4] == 2.0).all())
    assert bool(pools.keys[0, 1:4].isnan().all())
    pools.wait()
    assert bool((pools.values[0, 1:4] == 1.0).all()) and not any(pools.arriving.values())
    pools.apply((CopyPage(3, 4),))
    assert bool((pools.keys[0, 4] == 1.0).all())
