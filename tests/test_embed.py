"""Requests for a vector, the prompt's last hidden state: through the scheduler, cache and batches of all others."""

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
INSTRUCTION, TEXTS = numbers(1, 40, 500), [numbers(10 + seed, 5 + 30 * seed, 500) for seed in range(4)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def ask(name: str, prompt: tuple[int, ...] | Prompt, boundary: int = len(INSTRUCTION)) -> EngineRequest:
    return EngineRequest(name, prompt, Embed(), (boundary,))


def run(engine: Engine, *requests: EngineRequest) -> dict[str, Event]:
    """The last event of each."""
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
    """By the reference's ops, token by token."""
    runtime = small_runtime(MODELS[model](), batch=1)
    runtime = replace(runtime, decoder=replace(runtime.decoder, ops=backends()["reference"]))
    ids, rotary = with_rotary(prompt, ()) if isinstance(prompt, Prompt) else (list(prompt), [0] * len(prompt))
    lease = runtime.cache.admit(ids)
    assert lease is not None and runtime.cache.reserve(lease, len(ids)) == len(ids)
    for place, (token, positions) in enumerate(zip(ids, rotary, strict=True)):
        row = PlannedRow((token,), place, lease.pages, lease.slot, 0, rotary=positions)  # type: ignore[arg-type]
        hidden = runtime.run_hidden(build(StepPlan((row,)), runtime.device, hidden=True))[1]
        runtime.cache.commit(lease, 1)
    assert hidden is not None and hidden.shape == (1, runtime.config.hidden_size)
    return hidden[0]


def right(model: str, event: Event, prompt: tuple[int, ...] | Prompt) -> None:
    torch.testing.assert_close(vector(event), expected(model, prompt), rtol=0, atol=1e-4)


@pytest.mark.parametrize("budget", [16, 512])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.covering
def test_beside_answers_and_each_other(model: str, budget: int) -> None:
    """Vectors and answers of one batch, those of prompts in chunks, of one token, and of jumping positions."""
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


def test_an_instruction_is_read_once() -> None:
    """One after the other and all at once, also by an answer, and back from a tier."""
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


def test_an_end_whose_logits_are_known_is_no_vector() -> None:
    """An answer leaves its prompt's end in the tree, a vector does not; each is found by its own kind alone."""
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


def test_the_same_text_many_times_at_once() -> None:
    prompt = (*INSTRUCTION, *numbers(3, 150, 500))
    engine = Engine(runtime_of(odd_runtime(), budget=32))
    found = run(engine, *(ask(str(index), prompt) for index in range(3)), EngineRequest("answer", prompt, GREEDY))
    for index in range(3):
        right("odd", found[str(index)], prompt)
    assert engine.stats.prompt_tokens < 2.5 * len(prompt)


@pytest.mark.parametrize("change", ["preempted", "paused", "ahead"])
def test_whatever_happens_to_it(change: str) -> None:
    prompts = [(*INSTRUCTION, *numbers(3 + seed, 90, 500)) for seed in range(4)]
    engine = Engine(runtime_of(odd_runtime(), budget=32, pages=20, context=200), overlap=change == "ahead" or None)
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


def test_l8_a_vector_that_is_no_number_fails_its_request_alone() -> None:
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


def test_it_may_be_aborted_and_refused() -> None:
    engine = Engine(runtime_of(odd_runtime(), budget=16))
    engine.add(ask("a", INSTRUCTION))
    engine.step()
    engine.abort("a")
    ended, = engine.step()
    assert isinstance(ended, TokenEvent) and ended.finish == "abort" and not engine.has_work
    for prompt in ((), (509,), (1,) * 10_000):
        with pytest.raises(RequestError, match="prompt"):
            engine.add(ask("b", prompt))
