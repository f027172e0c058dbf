"""Requests for a vector, the prompt's last hidden state, through the scheduler and cache of all other requests."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from reuse_cases import runtime_of, serve
from speculation_cases import headed
from support import numbers, odd_runtime, qwen3_runtime, reference, same_tokens, small_runtime
from test_prompts import PROMPT as PICTURES
from test_prompts import with_rotary

from deltic.cache.offload.host import HostStore
from deltic.cache.offload.index import TierIndex
from deltic.engine.engine import Engine
from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.errors import RequestError
from deltic.ops import backends
from deltic.params import Embed, EngineRequest, Event, Prompt, SamplingParams, TokenEvent, VectorEvent
from deltic.runner.input_batch import build
from deltic.runner.model_runner import ModelRunner

MODELS = {"odd": odd_runtime, "qwen3": qwen3_runtime, "headed": headed}
INSTRUCTION, TEXTS = numbers(1, 40, 500), [numbers(10 + seed, 5 + 15 * seed, 500) for seed in range(3)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def ask(name: str, prompt: tuple[int, ...] | Prompt, boundary: int = len(INSTRUCTION)) -> EngineRequest:
    return EngineRequest(name, prompt, Embed(), (boundary,))


def run(engine: Engine, *requests: EngineRequest) -> dict[str, Event]:
    """Returns the last event of each request."""
    for request in requests:
        engine.add(request)
    last: dict[str, Event] = {}
    while engine.has_work:
        for event in engine.step():
            assert event.request not in last, "an event after the end"
            if event.finish:
                last[event.request] = event
        engine.check()
    return last


def vector(event: Event) -> torch.Tensor:
    assert isinstance(event, VectorEvent), event
    assert event.usage.completion_tokens == 0
    return torch.tensor(event.vector)


@cache
def expected(model: str, prompt: tuple[int, ...] | Prompt) -> torch.Tensor:
    """By the reference's ops, in chunks of at most 16 tokens; with images token by token."""
    runtime = small_runtime(MODELS[model](), batch=1)
    runtime = replace(runtime, decoder=replace(runtime.decoder, ops=backends()["reference"]))
    ids, rotary = with_rotary(prompt, ()) if isinstance(prompt, Prompt) else (list(prompt), [0] * len(prompt))
    lease = runtime.cache.admit(ids)
    assert lease is not None and runtime.cache.reserve(lease, len(ids)) == len(ids)
    chunk = 1 if isinstance(prompt, Prompt) else 16
    for place in range(0, len(ids), chunk):
        tokens = tuple(ids[place:place + chunk])
        row = PlannedRow(tokens, place, lease.pages, lease.slot, 0, rotary=rotary[place])  # type: ignore[arg-type]
        hidden = runtime.run_hidden(build(StepPlan((row,)), runtime.device, hidden=True))[1]
        runtime.cache.commit(lease, len(tokens))
    assert hidden is not None and hidden.shape == (len(tokens), runtime.config.hidden_size)
    return hidden[-1]


def right(model: str, event: Event, prompt: tuple[int, ...] | Prompt) -> None:
    torch.testing.assert_close(vector(event), expected(model, prompt), rtol=0, atol=1e-4)


@pytest.mark.parametrize("budget", [16, 512])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.covering
def test_vectors_in_mixed_batches(model: str, budget: int) -> None:
    """Vectors and answers in one batch: prompts in chunks, of one token, and with image positions."""
    engine = Engine(runtime_of(MODELS[model](), budget=budget))
    prompts = {"one": (7,), "other": PICTURES,
               **{f"v{index}": (*INSTRUCTION, *text) for index, text in enumerate(TEXTS)}}
    answers = [EngineRequest(f"a{seed}", numbers(20 + seed, 30, 500), GREEDY) for seed in range(2)]
    found = run(engine, answers[0], *(ask(name, prompt) for name, prompt in prompts.items()), answers[1])
    for name, prompt in prompts.items():
        right(model, found[name], prompt)
    if model != "headed":
        tokens = serve(engine, *answers)
        for answer in answers:
            same_tokens(reference(MODELS[model](), answer.ids, 12), tokens[answer.id, 0].tokens)


def test_instruction_is_prefilled_once() -> None:
    """In sequence and in parallel, shared with an answer, and restored from a tier."""
    engine = Engine(runtime_of(odd_runtime(), tiers=[TierIndex(HostStore(1 << 24), threads=False)]))
    prompts = [(*INSTRUCTION, *text) for text in TEXTS]
    assert cached(run(engine, ask("first", prompts[0]))["first"]) == 0
    for place in ("tree", "tier"):
        found = run(engine, *(ask(f"v{index}", prompt) for index, prompt in enumerate(prompts[1:], 1)))
        for index, prompt in enumerate(prompts[1:], 1):
            right("odd", found[f"v{index}"], prompt)
            assert cached(found[f"v{index}"]) >= len(INSTRUCTION), place
        engine.runtime.cache.clear()
    answer = EngineRequest("answer", prompts[2], GREEDY)
    tokens = serve(engine, answer)["answer", 0]
    same_tokens(reference(odd_runtime(), prompts[2], 12), tokens.tokens)
    assert cached(tokens.last) == len(INSTRUCTION)


def cached(event: Event) -> int:
    assert event.usage
    return event.usage.cached_tokens


def test_answers_and_vectors_do_not_share_prompt_ends() -> None:
    """An answer leaves its prompt's end in the tree, a vector does not."""
    engine, prompt = Engine(runtime_of(odd_runtime())), (*INSTRUCTION, *TEXTS[1])
    serve(engine, EngineRequest("answer", prompt, GREEDY, (40,)))
    for name in ("a", "b"):
        event = run(engine, ask(name, prompt))[name]
        right("odd", event, prompt)
        assert cached(event) == len(INSTRUCTION)
    engine.runtime.cache.clear()
    run(engine, ask("a", prompt))
    assert engine.runtime.cache.tree.cached_length((*prompt, 1)) == len(INSTRUCTION)
    again = serve(engine, EngineRequest("answer", prompt, GREEDY, (40,)))["answer", 0]
    same_tokens(reference(odd_runtime(), prompt, 12), again.tokens)


def test_equal_prompts_in_one_batch() -> None:
    prompt = (*INSTRUCTION, *numbers(3, 150, 500))
    engine = Engine(runtime_of(odd_runtime(), budget=32))
    found = run(engine, *(ask(str(index), prompt) for index in range(3)), EngineRequest("answer", prompt, GREEDY))
    for index in range(3):
        right("odd", found[str(index)], prompt)
    assert engine.stats.prompt_tokens < 2.5 * len(prompt)


@pytest.mark.parametrize("change", ["preempted", "paused", "ahead"])
def test_vector_survives_preemption_pause_and_async_steps(change: str) -> None:
    prompts = [(*INSTRUCTION, *numbers(3 + seed, 50, 500)) for seed in range(4)]
    engine = Engine(runtime_of(odd_runtime(), budget=32, pages=14, context=150), overlap=change == "ahead" or None)
    for seed in range(4 if change == "preempted" else 0):
        engine.add(EngineRequest(f"answer{seed}", numbers(seed, 28, 500), replace(GREEDY, max_tokens=40)))
    for index, prompt in enumerate(prompts):
        engine.add(ask(str(index), prompt, 3 * index))
    if change == "paused":
        engine.step()
        engine.pause("0")
        engine.step()
        engine.resume("0")
    found = run(engine)
    assert bool(engine.scheduler.preemptions) == (change == "preempted")
    for index, prompt in enumerate(prompts):
        right("odd", found[str(index)], prompt)


def test_l8_nan_vector_fails_only_its_request() -> None:
    class Sick:
        def __getattr__(self, name: str) -> Any:
            return getattr(runtime, name)

        def run_hidden(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            logits, hidden = runtime.run_hidden(batch)
            assert hidden is not None
            return logits, torch.where((batch.ids == 77)[:, None], float("nan"), hidden)

    runtime: ModelRunner = runtime_of(odd_runtime())
    engine = Engine(Sick())  # type: ignore[arg-type]
    found = run(
        engine, ask("sick", (*INSTRUCTION, 77)), ask("sound", TEXTS[1]), EngineRequest("answer", TEXTS[2], GREEDY)
    )
    sick = found["sick"]
    assert isinstance(sick, TokenEvent) and sick.finish == "error" and "NaN" in (sick.error or "")
    right("odd", found["sound"], TEXTS[1])
    assert engine.stats.failed == 1 and engine.runtime.cache.tree.cached_length((*INSTRUCTION, 1)) == 0


def test_abort_and_refusal() -> None:
    engine = Engine(runtime_of(odd_runtime(), budget=16))
    engine.add(ask("a", INSTRUCTION))
    engine.step()
    engine.abort("a")
    ended, = engine.step()
    assert isinstance(ended, TokenEvent) and ended.finish == "abort" and not engine.has_work
    for prompt in ((), (509,), (1,) * 10_000):
        with pytest.raises(RequestError, match="prompt"):
            engine.add(ask("b", prompt))
