"""Where the system refuses memory, the error says for what, how much, and which option asks for less."""

from __future__ import annotations

import errno
import mmap
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import reuse_cases
import torch
from support import Answers, drain, greedy, numbers, odd_runtime, odd_shape, reference, serve, take

from deltic import LLM, RandomModel
from deltic.cache.manager import HybridCache
from deltic.cache.offload.host import HostStore
from deltic.cache.offload.index import TierIndex
from deltic.cache.tensors import CachePools, allocate
from deltic.config import available_memory
from deltic.engine import policy
from deltic.engine.engine import Engine
from deltic.errors import ConfigError
from deltic.ops import backends, memory
from deltic.ops.types import Batch
from deltic.runner.model_runner import ModelRunner


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `ulimit -v`."""
    real = mmap.mmap

    def refuse(descriptor: int, size: int, **more: Any) -> Any:
        if size > 70 << 20:  # weights are mapped in smaller pieces
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return real(descriptor, size, **more)
    monkeypatch.setattr(mmap, "mmap", refuse)


@pytest.mark.skipif(not memory.large_pages(), reason="nothing is mapped here")
def test_the_pools_say_what_they_are_for(refused: None) -> None:
    with pytest.raises(ConfigError, match=r"no memory for the cache, [0-9,]+ MiB in 1,000 pages and 80,000 states"
                                          r" \(the last [0-9.]+ MiB of it were refused\).* smaller `memory`") as caught:
        allocate(odd_shape(), 1000, 80_000, torch.float32, backends()["torch"])
    assert caught.value.option == "memory" and "`max_context`" in str(caught.value)


@pytest.mark.skipif(not memory.large_pages(), reason="nothing is mapped here")
def test_a_model_that_does_not_start_for_it(refused: None) -> None:
    with pytest.raises(ConfigError, match="no memory for the cache"):
        LLM(RandomModel(shape=odd_shape(max_position_embeddings=1 << 20)), memory="2GiB", threads=1)


@pytest.mark.parametrize("error", [
    MemoryError("tried to allocate 47185920 bytes: Cannot allocate memory"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to "
                 "allocate 47185920 bytes. Error code 12 (Cannot allocate memory)")])
def test_the_weights_too(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise error
    monkeypatch.setattr("deltic.engine.loading.random_tensors", refuse)
    with pytest.raises(ConfigError, match=r"weights of random-qwen3.5-0.8b \(the last 45.0 MiB.*`quant=.q4_k.`"):
        LLM(RandomModel(), memory="64MiB", threads=1)


def test_other_errors_are_unchanged() -> None:
    for error in (RuntimeError("shapes do not fit"), ValueError("x")):
        with pytest.raises(type(error), match=str(error)), memory.memory_for("nothing", "do nothing"):
            raise error


def test_the_limit_of_the_address_space_is_memory_that_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 8000000 kB\n")
    (tmp_path / "proc/self/statm").write_text("1000 1 1 1 0 1 0\n")
    assert available_memory(tmp_path) == 8_000_000 << 10
    limit = 5000 * resource.getpagesize()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert available_memory(tmp_path) == 4000 * resource.getpagesize()
    (tmp_path / "proc/self/statm").write_text("9000 1 1 1 0 1 0\n")
    assert available_memory(tmp_path) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("memory", "words"), [("64MiB", "first token"), ("4GiB", "error: there is no memory for")])
def test_a_process_with_little_address_space(memory: str, words: str) -> None:
    code = ("import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (5 << 29, 5 << 29)); sys.argv[0] = 'deltic';"
            "from deltic.cli import main; sys.exit(main(sys.argv[1:]))")
    arguments = (["bench", "--random", "qwen3.5-0.8b", "--layers", "4"] if "error" in words else ["run", "hi"])
    done = subprocess.run([sys.executable, "-c", code, *arguments, "--memory", memory], capture_output=True, text=True)
    assert words in done.stdout + done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_without_memory_costs_one_request(ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the step has written by then is not known: here states of all rows, by a step that fails at its end."""
    runtime = reuse_cases.runtime_of(odd_runtime(), batch=4, budget=64, slots=40)
    short = [greedy(numbers(index, 20, 500), 30, name=f"short{index}", seed=index) for index in range(3)]
    alone = {key: answer.tokens for request in short for key, answer in serve(runtime, [request]).items()}
    engine, answers, run, failed = Engine(runtime, overlap=ahead), Answers(), ModelRunner.run_hidden, list[int]()

    def refuse(self: ModelRunner, batch: Batch) -> Any:
        found = run(self, batch)
        if batch.layout.tokens > 50:
            failed.append(batch.layout.tokens)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return found

    monkeypatch.setattr(ModelRunner, "run_hidden", refuse)
    monkeypatch.setattr(policy, "_STALL", 3600.0)  # the duration of steps cuts no prompts
    runtime.cache.clear()
    for request in (short[0], short[1]):
        engine.add(request)
    for _ in range(8):
        take(answers, engine.step())
    engine.add(greedy(numbers(9, 200, 500), 4, name="long"))
    engine.add(short[2])
    drain(engine, answers)
    error = answers.pop(("long", 0)).last.error
    assert failed and error and "there is no memory for a step with" in error and "`token_budget`" in error
    assert {key: answer.tokens for key, answer in answers.items()} == alone and len(failed) == 1
    engine.check()


def test_steps_without_memory_get_shorter(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = reuse_cases.runtime_of(odd_runtime(), batch=4, budget=400, slots=40)
    asked = [greedy(numbers(index, size, 500), 12, name=f"{size}", seed=index)
             for index, size in enumerate((20, 300, 400))]
    alone = {key: answer.tokens for request in asked for key, answer in serve(runtime, [request]).items()}
    engine, run, steps = Engine(runtime), ModelRunner.run_hidden, list[int]()

    def refuse(self: ModelRunner, batch: Batch) -> Any:
        steps.append(batch.layout.tokens)
        if batch.layout.tokens > 280:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return run(self, batch)

    monkeypatch.setattr(ModelRunner, "run_hidden", refuse)
    runtime.cache.clear()
    for request in asked:
        engine.add(request)
    answers = Answers()
    drain(engine, answers)
    assert {key: answer.tokens for key, answer in answers.items()} == alone
    failed = [tokens for tokens in steps if tokens > 280]
    assert failed and 256 <= engine.scheduler.token_budget <= 280 and len(failed) == 1, steps
    assert f"from now on steps have at most {engine.scheduler.token_budget}" in caplog.text
    engine.check()


def test_steps_without_memory_wait_for_the_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes on their way to a tier are copies, which take the memory of the step."""
    tier = TierIndex(HostStore(1 << 24), threads=True)
    runtime = reuse_cases.runtime_of(odd_runtime(), batch=4, slots=40, tiers=[tier])
    first, second = (greedy(numbers(index, 50, 500), 8, name=f"{index}") for index in range(2))
    wanted = reference(odd_runtime(), second.prompt, 8).tokens
    engine, run, write, written = Engine(runtime), ModelRunner.run_hidden, HostStore.write, Event()
    budget, failed = engine.scheduler.token_budget, list[int]()

    def late(self: HostStore, *given: Any) -> int:
        assert written.wait(60)
        return write(self, *given)

    def refuse(self: ModelRunner, batch: Batch) -> Any:
        if not written.is_set():
            failed.append(len(tier.writes))
            written.set()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return run(self, batch)

    monkeypatch.setattr(HostStore, "write", late)
    engine.add(first)
    drain(engine)
    assert tier.writes, "nothing was on its way to the tier"
    monkeypatch.setattr(ModelRunner, "run_hidden", refuse)
    engine.add(second)
    answer = drain(engine)["1", 0]
    assert answer.tokens == list(wanted) and failed and failed[0] > 0
    assert engine.scheduler.token_budget == budget, "steps are shorter, though the memory came back"


SHORTAGE = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


@pytest.mark.parametrize("where", ["a step", "a pause"])
def test_what_was_not_copied_is_not_found_afterwards(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer's end is in the tree, and its partial page was to be copied, when carrying that out fails."""
    runtime = reuse_cases.runtime_of(odd_runtime(), batch=4, budget=64, slots=40)
    prompt, more = numbers(1, 37, 500), numbers(2, 6, 500)
    wanted = {name: reference(odd_runtime(), tokens, count).tokens for name, tokens, count in (
        ("again", (*prompt, *more), 6), ("beside", numbers(3, 20, 500), 12), ("running", numbers(9, 20, 500), 12))}
    for tensor in (*runtime.cache.pools.page_tensors, *runtime.cache.pools.slot_tensors):  # type: ignore[attr-defined]
        tensor.normal_()  # a cache that was in use
    engine, answers, apply, failed = Engine(runtime), Answers(), CachePools.apply, list[int]()
    for name in ("running", "beside"):
        engine.add(greedy(numbers(9 if name == "running" else 3, 20, 500), 12, name=name))
    for _ in range(3):
        take(answers, engine.step())
    engine.add(greedy(prompt, 1, name="first"))
    while ("first", 0) not in answers:
        take(answers, engine.step())

    def refuse(self: CachePools, operations: Any) -> None:
        if not failed:
            failed.append(len(operations))
            raise SHORTAGE
        apply(self, operations)

    monkeypatch.setattr(CachePools, "apply", refuse)
    if where == "a pause":
        engine.pause("running")
        engine.resume("running")
    drain(engine, answers)
    engine.add(greedy((*prompt, *more), 6, name="again"))
    drain(engine, answers)
    assert failed
    errors = {name: answers[name, 0].last.error for name in wanted if answers[name, 0].last.error}
    assert len(errors) == (where == "a step"), "memory ran out for one of them, or for nobody's step"
    assert all(answers[name, 0].tokens == list(tokens) for name, tokens in wanted.items() if name not in errors)
    engine.check()
    assert not runtime.cache.operations.poisoned and not runtime.cache.pools.held  # type: ignore[attr-defined]


def test_a_look_at_a_prefix_without_memory_costs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins like what is just being read, past a position that only a look can show to be sound."""
    runtime = reuse_cases.runtime_of(odd_runtime(), batch=4, budget=8, slots=40, pages=96)
    engine, answers, long, looks = Engine(runtime), Answers(), numbers(1, 400, 500), list[int]()

    def refuse(*_: Any) -> bool:
        looks.append(1)
        raise SHORTAGE

    monkeypatch.setattr(CachePools, "sound", refuse)
    engine.add(replace(greedy(long, 2, name="long"), stable_prefixes=(100,)))
    while not any(sequence.done >= 160 for sequence in engine.scheduler.running):
        take(answers, engine.step())
    engine.add(greedy((*long[:150], *numbers(3, 5, 500)), 2, name="second"))
    drain(engine, answers)
    assert looks and all(answer.last.finish == "length" for answer in answers.values()) and len(answers) == 2


def test_request_that_cannot_be_admitted_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = reuse_cases.runtime_of(odd_runtime(), batch=4, slots=40)
    admit = HybridCache.admit

    def refuse(self: HybridCache, prompt: Any = (), *more: Any, **options: Any) -> Any:
        if len(prompt) == 33:
            raise ValueError("of this one")
        return admit(self, prompt, *more, **options)

    monkeypatch.setattr(HybridCache, "admit", refuse)
    answers = serve(runtime, [greedy(numbers(index, length, 500), 5, name=str(length)) for index, length
                              in enumerate((20, 33, 40))])
    assert [answers[name, 0].last.finish for name in ("20", "33", "40")] == ["length", "error", "length"]
    assert "of this one" in (answers["33", 0].last.error or "")
