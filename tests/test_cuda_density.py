"""On a GPU: a slot for each sequence, memory that moves between states and pages, and a limit on all of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from reuse_cases import runtime_of
from speculation_cases import EndingAt
from support import Answers, drain, greedy, numbers, serve

from deltic.cache.manager import HybridCache
from deltic.cache.operations import MovePages
from deltic.cache.tensors import PoolOptions, allocate, frame_layout
from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import RandomModel, load
from deltic.errors import ConfigError
from deltic.params import PAGE, EngineRequest, TokenEvent
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


def test_a_size_of_gpu_memory_is_not_exceeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what torch takes. What other processes take on the card does not count here, as it may change."""
    torch.cuda.empty_cache()
    total, others = torch.cuda.mem_get_info()[1], 600 * MIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (
        total - others - torch.cuda.memory_reserved(), total))
    try:
        limit = others + torch.cuda.memory_reserved() + 3000 * MIB
        limited = loaded(gpu_memory=f"{limit >> 20}MiB", tp=1)
        limited.warm_up()
        assert limited.memory.notes[0].startswith(f"GPU memory: {limit / (1 << 30):.2f} GiB = ")
        engine = Engine(limited)
        for request in requests(40, limited.config.vocab_size):
            engine.add(request)
        while engine.has_work:
            engine.step()
            assert total - torch.cuda.mem_get_info()[0] <= limit
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(3000 * MIB, dtype=torch.uint8, device="cuda")
        with pytest.raises(ConfigError, match="gpu_memory"):
            loaded(gpu_memory="64MiB", tp=1)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


# Memory that moves between states and pages


def in_frames(runtime: ModelRunner, frames: int, batch: int) -> ModelRunner:
    """The same model with pools in so many frames, full of NaN."""
    like = runtime.pools
    extras = PoolOptions(batch, runtime.mtp is not None, like.tiled, like.keys.dtype, like.recurrent.dtype)
    layout = frame_layout(runtime.config, like.conv.dtype, extras)
    assert layout
    pools = allocate(runtime.config, frames * layout.pages, frames, like.conv.dtype, runtime.decoder.ops, "cuda",
                     replace(extras, layout=layout))
    pools.keys.untyped_storage().fill_(0xff)
    assert pools.recurrent.untyped_storage().data_ptr() == pools.keys.untyped_storage().data_ptr()
    for tensor in (pools.conv, *(pools.delta_logs or ())):
        tensor.fill_(float("nan"))
    pages = frames * layout.pages
    return replace(runtime, options=replace(runtime.options, token_budget=256, max_batch=batch),
                   memory=replace(runtime.memory, pages=pages, slots=frames, max_batch=batch,
                                  max_context=(frames - 1) * layout.pages * PAGE, layout=layout),
                   cache=HybridCache(pools))


def mixed(count: int, vocabulary: int) -> list[EngineRequest]:
    """Short and long prompts, half of which begin alike."""
    opening = numbers(1, 300, vocabulary)
    return [greedy((*opening[:300 * (seed % 2)], *numbers(seed, (9, 40, 350)[seed % 3], vocabulary)), 20 + seed % 60,
                   str(seed), n=1 + 2 * (seed % 5 == 0), temperature=float(seed % 2), seed=seed)
            for seed in range(count)]


def watched(engine: Engine) -> list[MovePages]:
    """The moves of its cache from now on."""
    moved, append = list[MovePages](), engine.runtime.cache.operations.append

    def watch(operation: Any) -> None:
        moved.extend([operation] if isinstance(operation, MovePages) else [])
        append(operation)

    engine.runtime.cache.operations.append = watch  # type: ignore[method-assign]
    return moved


@pytest.mark.parametrize("overlap", [False, True])
def test_answers_are_the_same_while_memory_moves(overlap: bool) -> None:
    """Bit for bit, against pools of their own with room for all; steps are recorded before."""
    runtime = loaded(memory="256MiB", max_batch=4, batch_invariant=True)
    asked = mixed(16, runtime.config.vocab_size)
    wanted = Engine(runtime_of(runtime, batch=4, slots=32, pages=800, budget=256, context=1024))
    found = Engine(in_frames(runtime, 32, 4), overlap=overlap)
    found.runtime.warm_up()
    pools, moved = found.runtime.pools, watched(found)
    addresses = [tensor.data_ptr() for tensor in (*pools.page_tensors, *pools.slot_tensors)]
    answers = [dict[tuple[str, int], list[int]](), dict[tuple[str, int], list[int]]()]
    for engine, kept in zip((wanted, found), answers, strict=True):
        for request in asked:
            engine.add(request)
        kept.update({key: answer.tokens for key, answer in drain(engine, limit=6000).items()})
    assert answers[0] == answers[1]
    assert moved, "no page has become a slot"
    assert any(operation.sources for operation in moved), "no page has moved"
    assert addresses == [tensor.data_ptr() for tensor in (*pools.page_tensors, *pools.slot_tensors)]


def test_many_rows_answer_the_same_while_memory_moves(runtime: ModelRunner) -> None:
    """Most states wait in delta logs. Steps of other sizes round differently, so that a few answers may differ."""
    asked = mixed(80, runtime.config.vocab_size)
    wanted = Engine(runtime_of(runtime, batch=40, slots=160, pages=4000, budget=256, context=1024))
    found = Engine(in_frames(runtime, 90, 40))
    moved = watched(found)
    for engine in (wanted, found):
        for request in asked:
            engine.add(request)
    answers, others = drain(wanted, limit=6000), drain(found, limit=6000)
    assert share_alike(answers, others) > 0.9 and moved
    assert all(answer.last.finish == "length" for answer in others.values())


def share_alike(answers: Answers, others: Answers) -> float:
    """Of answers, those that begin with the same eight tokens."""
    return sum(answer.tokens[:8] == others[key].tokens[:8] for key, answer in answers.items()) / len(answers)


def test_one_long_text_takes_the_memory_of_many_sequences(runtime: ModelRunner) -> None:
    shared = in_frames(runtime, 80, 48)
    engine = Engine(shared)
    for request in requests(48, runtime.config.vocab_size):
        engine.add(request)
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, len(engine.scheduler.running))
    assert most >= 40
    long = greedy(numbers(9, shared.memory.max_context - 40, runtime.config.vocab_size), 30, "long")
    engine.add(long)
    found = drain(engine)["long", 0]
    pages = -(-shared.memory.max_context // PAGE)
    alone = Engine(runtime_of(runtime, batch=1, slots=4, pages=pages + 4, context=pages * PAGE, budget=256,
                              reuse=False))
    alone.add(long)
    assert drain(alone)["long", 0].tokens == found.tokens and len(found.tokens) == 30


@pytest.mark.parametrize("invariant", [False, True])
def test_units_are_found_where_numbers_pass_32_bits(invariant: bool) -> None:
    """In frames, the numbers of units run as if each tensor filled the whole block. Prompts in steps of other sizes
    round differently, unless decode steps read them."""
    large = load(RandomModel("qwen3.5-4b", 8, initializer_range=0.05), EngineConfig(
        device="cuda", dtype="bfloat16", memory="24GiB", max_batch=16, max_context=100_000, speculate="off",
        token_budget=256, batch_invariant=invariant))
    large = replace(large, cache=HybridCache(large.pools, reuse=False))
    assert large.memory.layout and large.pools.keys[0].numel() > 1 << 32
    assert large.pools.recurrent[0].numel() > 1 << 31
    units = large.cache.accounts.units
    held = [units.take_slot()[0] for _ in range(3 * large.cache.slots.size // 4)]  # the engine gets the others
    engine, asked = Engine(large), [replace(each, output=replace(each.output, logprobs=1))
                                    for each in mixed(24, large.config.vocab_size)]
    for request in asked:
        engine.add(request)
    found, most = dict[tuple[str, int], list[TokenEvent]](), 0
    while engine.has_work:
        most = max([most, *(sequence.cache.slot for sequence in engine.scheduler.running if sequence.cache)])
        for event in engine.step():
            if event.token is not None:
                found.setdefault((event.request, event.choice), []).append(event)
    assert most * large.pools.recurrent[0, 0].numel() > 1 << 31, "slots are lower"
    large.cache.slots.release(held)
    engine.check()
    layout, last = large.memory.layout, large.pools.last_page
    assert layout
    old, new = [*range(last - 40, last)], [layout.first_page(0) + page for page in range(40)]
    for tensor in large.pools.page_tensors:
        for page in old:
            tensor[:, page] = page - last
    large.pools.apply([MovePages(tuple(old), tuple(new))])
    for tensor in large.pools.page_tensors:
        assert [float(tensor[:, page].unique()) for page in new] == [float(page - last) for page in old]
    large.cache.clear()
    wanted = Engine(runtime_of(large, batch=16, slots=80, pages=3000, budget=256, context=1024, reuse=False))
    for request in asked:
        wanted.add(request)
    answers = drain(wanted, limit=6000)
    if invariant:
        assert {key: answer.tokens for key, answer in answers.items()} == {
            key: [event.token for event in events] for key, events in found.items()}
    firsts = [(answer.events[0], found[key][0]) for key, answer in answers.items()]
    same = [(one.logprobs, other.logprobs) for one, other in firsts if one.token == other.token]
    assert len(same) > 0.9 * len(firsts)
    assert all(one and other and abs(one.token - other.token) < 0.15 for one, other in same)
