"""On a GPU: a replayed step is the step that was recorded, bit for bit, and answers do not depend on who runs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from math import sqrt
from pathlib import Path
from random import Random

import pytest
import torch
from support import greedy, numbers, serve

from deltic import LLM
from deltic.config import EngineConfig
from deltic.engine.loading import load
from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.params import SamplingParams
from deltic.runner.input_batch import decoding, step_of
from deltic.runner.model_runner import ModelRunner
from deltic.session import Session

UNITS_APART = True
ROOT = Path(__file__).resolve().parents[1]

if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def runtime(request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    yield load(None, EngineConfig(device="cuda", dtype=request.param, memory="256MiB", max_batch=8, max_context=2048,
                                  speculate="off"))


def _memory(runtime: ModelRunner) -> tuple[torch.Tensor, ...]:
    pools = runtime.pools
    return pools.keys, pools.values, pools.recurrent, pools.conv


@pytest.mark.parametrize("rows", [1, 3, 8])
@torch.inference_mode()
def test_replay_has_the_bits_of_the_step(runtime: ModelRunner, rows: int) -> None:
    assert runtime.graphs
    for tensor in _memory(runtime):
        tensor.normal_(0, 0.1)
    plan = StepPlan(
        tuple(PlannedRow((7 + row,), 20 + 5 * row, tuple(range(4 * row, 4 * row + 4)), row, 1) for row in range(rows))
    )
    batch = decoding(plan, runtime.pools.device)
    assert batch.padded
    before = [tensor.clone() for tensor in _memory(runtime)]
    wanted = runtime._forward(step_of(batch.padded))[0][:rows].clone()
    after = [tensor.clone() for tensor in _memory(runtime)]
    runtime.graphs.capture(batch.padded)
    for tensor, old in zip(_memory(runtime), before, strict=True):
        tensor.copy_(old)
    assert torch.equal(runtime.run(batch), wanted)
    for tensor, new in zip(_memory(runtime), after, strict=True):
        assert torch.equal(tensor, new)


def test_answers_with_and_without_graphs(runtime: ModelRunner) -> None:
    plain = replace(runtime)
    object.__setattr__(plain, "graphs", None)
    requests = [greedy(numbers(seed, 5 + 9 * seed, runtime.config.vocab_size), 40, str(seed)) for seed in range(5)]
    found, wanted = serve(runtime, requests), serve(plain, requests)
    assert runtime.graphs and runtime.graphs.buckets
    same = sum(found[key].tokens == wanted[key].tokens for key in wanted)
    assert same >= (5 if runtime.options.dtype == "float32" else 3)


def test_nothing_is_recorded_after_warming_up(runtime: ModelRunner) -> None:
    fresh = replace(runtime)
    fresh.warm_up()
    assert fresh.graphs
    recorded = fresh.graphs.buckets
    assert len(recorded) == len({*recorded}) == 4 * 4  # 1 to 8 rows, 256 to 2,048 tokens
    requests = [greedy(numbers(seed, 40 + 90 * seed, runtime.config.vocab_size), 40, str(seed)) for seed in range(8)]
    found = serve(fresh, requests)
    assert fresh.graphs.buckets == recorded
    wanted = serve(runtime, requests)
    same = sum(found[key].tokens == wanted[key].tokens for key in wanted)
    assert same >= (8 if runtime.options.dtype == "float32" else 6)


def test_sampled_answers_do_not_depend_on_neighbours(runtime: ModelRunner) -> None:
    """Greedy and drawn, alone and together: with the kernels bit for bit, with the torch ops in float32 too."""
    requests = [replace(greedy(numbers(seed, 30 + seed, runtime.config.vocab_size), 30, str(seed), seed=seed),
                        output=SamplingParams(temperature=0.8 * (seed % 2), seed=seed, max_tokens=30,
                                                ignore_eos=True)) for seed in range(6)]
    together = serve(runtime, requests)
    for request in requests:
        alone = serve(runtime, [request])
        assert [a.tokens for a in alone.values()] == [together[next(iter(alone))].tokens]


def _agreement(prompts: Iterable[Sequence[int]], context: int, ends: Container[int] = ()) -> Counter[tuple[str, str]]:
    """Of 10,000 tokens, each after the CPU's own ones, how often each two of the three chose the same one."""
    options = {"memory": "128MiB", "max_context": context, "speculate": "off"}
    sessions = {"cpu": Session(None, dtype="bfloat16", **options), "exact": Session(None, dtype="float32", **options),
                "cuda": Session(None, dtype="bfloat16", device="cuda", **options)}
    same, tokens = Counter[tuple[str, str]](), 0
    for prompt in prompts:
        for session in sessions.values():
            session.reset()
        found = {name: int(session.prefill(prompt).argmax()) for name, session in sessions.items()}
        for _ in range(250):
            token = found["cpu"]
            if token in ends:
                break
            found, tokens = {name: int(session.step(token).argmax()) for name, session in sessions.items()}, tokens + 1
            same.update(pair for pair in combinations(found, 2) if found[pair[0]] == found[pair[1]])
            if tokens == 10_000:
                return same
    raise AssertionError(f"only {tokens} tokens")


def test_greedy_answers_equal_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """To conversations whose phrasings the model's training had not."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "tiny"))
    from data import heldout_set

    processor = LLM(device="cpu").chat_processor
    samples = heldout_set(7, 40)
    Random(1).shuffle(samples)
    prompts = (processor.chat(sample.messages, tools=sample.tools,
                              variables={"enable_thinking": sample.thinking}).request.prompt for sample in samples)
    same = _agreement((prompt for prompt in prompts if len(prompt) < 750), 1024, processor.tokenizer.ends)
    assert min(same[pair] for pair in combinations(("cpu", "exact", "cuda"), 2)) >= 9_950, same


def test_greedy_tokens_equal_the_cpu() -> None:
    """To tokens at random, where the model is hardly sure of anything. bfloat16 rounds differently here and there, so
    that both are compared with float32: neither is further from it than the other, but for chance, which moves a
    difference of counts by the root of their sum."""
    vocabulary = Session(None, device="cpu").vocab_size
    same, tokens = _agreement((numbers(seed, 20, vocabulary) for seed in range(40)), 512), 10_000
    others, own = tokens - same["exact", "cuda"], tokens - same["cpu", "exact"]
    assert abs(others - own) <= 3 * sqrt(others + own) and max(others, own) <= 0.01 * tokens, same
