"""Several models in one process keep their level, threads and bits; invalid batches cannot make the kernels leave the
memory of the model."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from native_pools import best_level, naming
from op_cases import same_bits
from support import drain, greedy, numbers, odd_shape
from test_native_pool import in_time
from torch import Tensor

from deltic.config import EngineConfig, LinearConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import RandomModel, load
from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.ops.cpu import missing
from deltic.ops.cpu.library import LEVELS
from deltic.ops.types import Batch
from deltic.runner.input_batch import build
from deltic.runner.model_runner import ModelRunner

UNITS_APART = True
pytestmark = pytest.mark.skipif(bool(missing()), reason=str(missing()))

SHAPE = odd_shape(hidden_size=256, intermediate_size=512, head_dim=64, linear=LinearConfig(2, 6, 24, 128, 4))
CPU = torch.device("cpu")
TOKENS = numbers(7, 60, SHAPE.vocab_size)
PAGES = tuple(range(1, 6))
LEVEL_PAIRS = [(0, -1), (-1, 0), (-1, -1)]
"""Levels of two models, the last one being the best that there is."""


def model(level: int, count: int = 1, **changes: Any) -> ModelRunner:
    number = range(best_level() + 1)[level]
    options: dict[str, Any] = {"memory": "8MiB", "max_batch": 4, "threads": count, "cpu_level": LEVELS[number],
                               "dtype": "bfloat16", **changes}
    return cleared(load(RandomModel(shape=SHAPE, initializer_range=0.1), EngineConfig(**options)))


def cleared(runtime: ModelRunner) -> ModelRunner:
    """Fills the pools with zeros: some batches here continue sequences that were never prefilled."""
    for field in fields(runtime.pools):
        value = getattr(runtime.pools, field.name)
        for tensor in value if isinstance(value, tuple) else (value,):
            if isinstance(tensor, Tensor):
                tensor.zero_()
    return runtime


def steps(runtime: ModelRunner, chunks: tuple[int, ...] = (33, 1, 1, 1, 9, 1, 1, 1, 1, 1, 10)) -> list[Tensor]:
    """Returns the logits of one sequence's steps."""
    done, found = 0, []
    for chunk in chunks:
        plan = StepPlan((PlannedRow(TOKENS[done:done + chunk], done, PAGES, 1, 1),))
        found.append(runtime.run(build(plan, CPU, all_logits=True)))
        done += chunk
    return found


@cache
def alone(level: int, count: int) -> list[Tensor]:
    return steps(model(level, count))


def all_same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(map(same_bits, found, wanted))


def test_levels_differ() -> None:
    """Otherwise the tests below would prove nothing."""
    if best_level() == 0:
        pytest.skip("there is one level")
    assert not all_same(alone(0, 1), alone(-1, 1))


@pytest.mark.parametrize("levels", LEVEL_PAIRS)
def test_models_stepped_alternately(levels: tuple[int, int]) -> None:
    first, second = model(levels[0], 2), model(levels[1], 3)
    for _ in range(3):
        assert all_same(steps(first), alone(levels[0], 1))
        assert all_same(steps(second), alone(levels[1], 1))


@pytest.mark.parametrize("levels", LEVEL_PAIRS)
def test_models_at_once(levels: tuple[int, int]) -> None:
    pairs = [(model(level, count), alone(level, 1)) for level, count in zip(levels, (3, 1), strict=True)]

    def work(runtime: ModelRunner, wanted: list[Tensor]) -> None:
        for _ in range(6):
            assert all_same(steps(runtime), wanted)

    in_time(*(lambda runtime=runtime, wanted=wanted: work(runtime, wanted) for runtime, wanted in pairs))


def test_engines_at_once() -> None:
    """Compares whole answers, greedy and sampled ones."""
    runtimes = [model(-1, 2), model(0, 1), model(-1, 1, quant="q8_0")]

    def answers(runtime: ModelRunner) -> dict[str, list[int | None]]:
        engine = Engine(runtime)
        for index in range(4):
            request = greedy(numbers(index, 20 + 3 * index, SHAPE.vocab_size), 20, f"n{index}")
            drawn = replace(request.output, temperature=1.0, top_p=0.9, seed=index, repetition_penalty=1.1)
            engine.add(replace(request, output=drawn) if index % 2 else request)
        return {name: [event.token for event in answer.events] for (name, _), answer in drain(engine).items()}

    wanted = [answers(runtime) for runtime in runtimes]

    def work(runtime: ModelRunner, right: dict[str, list[int | None]]) -> None:
        for _ in range(3):
            assert answers(runtime) == right

    in_time(*(lambda runtime=runtime, right=right: work(runtime, right)
                 for runtime, right in zip(runtimes, wanted, strict=True)))


def test_one_model_stepped_from_many_threads() -> None:
    """Each thread has a sequence of its own."""
    runtime = model(-1, 3)
    wanted = alone(-1, 1)[0]

    def work(slot: int) -> None:
        for _ in range(20):
            row = PlannedRow(TOKENS[:33], 0, tuple(range(6 * slot, 6 * slot + 6)), slot, 1)
            assert same_bits(runtime.run(build(StepPlan((row,)), CPU, all_logits=True)), wanted)

    in_time(*(lambda slot=slot: work(slot) for slot in range(4)))


def test_model_keeps_its_thread_count() -> None:
    """The kernels' threads, and torch's threads where torch computes."""
    natively, slowly, others = model(-1, 5), model(-1, 3, ops=("torch",)), model(0, 2, ops=("torch",))
    assert natively.threads == 5 and natively.decoder.ops.step.__self__.threads == 5  # type: ignore[attr-defined]
    for runtime, count in ((natively, 1), (slowly, 3), (others, 2), (slowly, 3), (natively, 1)):
        steps(runtime, (5,))
        assert torch.get_num_threads() == count


# Invalid batches


def good() -> Batch:
    """A row of one token and one of a chunk, with an emit, after some tokens."""
    plan = StepPlan(
        (
            PlannedRow(TOKENS[20:21], 20, PAGES, 0, 1),
            PlannedRow(TOKENS[:8], 17, tuple(range(6, 11)), 1, 1, checkpoints=((20, 2),)),
        )
    )
    return build(plan, CPU)


def bent(name: str, place: int, value: int) -> Batch:
    batch = good()
    flat = getattr(batch, name).clone()
    flat.view(-1)[place] = value
    return replace(batch, **{name: flat}, memo={}, span=None)


FAR = (-1, 1 << 40)
WRONG = [(name, place, value) for name, places, values in (
    ("ids", (0, 8), (*FAR, SHAPE.vocab_size)), ("store", (0, 8), FAR), ("pages", (0, 1), FAR), ("source", (0, 1), FAR),
    ("target", (0, 1), FAR), ("done", (0, 1), (-1, 1000)), ("starts", (0, 1, 2), FAR), ("starts", (0, 2), (5,)),
    ("logit_tokens", (0, 1), (-1, 9)), ("emit_slot", (0,), FAR), ("emit_row", (0,), (-1, 2)),
    ("emit_length", (0,), (17, 26))) for place in places for value in values]


def test_valid_batch_is_served() -> None:
    assert model(-1).run(good()).isfinite().all()


def test_invalid_batches_are_refused() -> None:
    """A refused batch changes no bit of the next steps."""
    runtime = shared()
    wanted = steps(runtime)
    for case in WRONG:
        with naming(case), pytest.raises(ValueError, match="a batch points outside of the cache"):
            runtime.run(bent(*case))
        assert all_same(steps(runtime, (33, 1)), wanted[:2]), case
    assert all_same(steps(runtime), wanted)


@cache
def shared() -> ModelRunner:
    return model(-1)


RINGS = [("base", 5, "appends from far behind"), ("base", 30, "the state is ahead"), ("delta_log", -1, "no unit"),
         ("delta_log", 1 << 40, "no unit")]


def test_invalid_delta_log_cursors_are_refused() -> None:
    runtime = cleared(load(RandomModel(shape=SHAPE), EngineConfig(memory="8MiB", max_batch=4, threads=1), rings=True))
    plan = StepPlan((PlannedRow(TOKENS[:2], 24, PAGES, 0, 1, base=20, delta_log=1, append=True),))
    batch = build(plan, CPU)
    assert runtime.run(batch).isfinite().all()
    for name, value, why in RINGS:
        with naming(why), pytest.raises(ValueError, match="a batch points outside"):
            runtime.run(replace(batch, **{name: torch.tensor([value])}, memo={}))


STORM = """
import random, sys, threading, torch
import test_native_models as tests
from deltic.runner.input_batch import build
from deltic.engine.step_plan import PlannedRow, StepPlan
runtime = tests.shared()

def work(seed):
    rng = random.Random(seed)
    for _ in range(120):
        batch = tests.good()
        for _ in range(rng.randrange(3)):
            name, place, value = rng.choice(tests.WRONG)
            flat = getattr(batch, name).clone(); flat.view(-1)[place] = rng.choice([value, rng.randrange(64)])
            batch = tests.replace(batch, **{name: flat}, memo={}, span=None)
        try:
            runtime.run(batch)
        except ValueError:
            pass

threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
wanted = tests.alone(-1, 1)
assert tests.all_same(tests.steps(runtime), wanted)
"""


def test_many_invalid_batches_corrupt_nothing() -> None:
    """Four threads at once, in a process of their own that must survive."""
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", STORM], cwd=Path(__file__).parent,
                            capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr
