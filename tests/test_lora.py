"""Adapters (LoRA): every linear layer has the numbers of the merged model, alone and among rows with others."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from lora_cases import adapters_of, linears, logits_of, merged, random_adapter, random_weights, runtime_of, stacks
from support import (
    DEVICE,
    Answers,
    Watch,
    drain,
    greedy,
    moe_shape,
    numbers,
    odd_shape,
    same_logits,
    small_runtime,
    split_runtime,
)

from deltic import LLM, SamplingParams
from deltic.config import EngineConfig, LinearConfig, ModelConfig, RopeConfig
from deltic.engine.adapters import AdapterError, AdapterSet
from deltic.engine.engine import Engine
from deltic.engine.loading import RandomModel, load
from deltic.ops.adapters import Adapter
from deltic.ops.cpu import missing
from deltic.params import EngineRequest, Usage
from deltic.runner.model_runner import ModelRunner
from deltic.spec_decode.draft_length import FixedDraftLength

BACKENDS = ["torch", *([] if missing() or DEVICE != "cpu" else ["cpu"])]
SHAPES: dict[str, ModelConfig] = {
    "dense": odd_shape(num_hidden_layers=2, layer_types=("linear_attention", "full_attention")),
    "experts": moe_shape(num_hidden_layers=2, layer_types=("linear_attention", "full_attention")),
    "qwen3": odd_shape(architecture="qwen3", num_hidden_layers=1, layer_types=("full_attention",),
                       attention_output_gate=False, rope=RopeConfig(1e4, 14, ()), linear=None)}
PARITY = 1e-4
PROMPTS = numbers(1, 21, 509), numbers(2, 9, 509), numbers(3, 1, 509)


@cache
def model(shape: str, backend: str) -> ModelRunner:
    return runtime_of(SHAPES[shape], random_weights(SHAPES[shape]), ops=() if backend == "cpu" else (backend,))


def kinds(shape: str) -> list[str]:
    """What ends the names of a shape's modules."""
    config = SHAPES[shape]
    names = linears(config) | stacks(config)
    return sorted({name.partition(".layers.")[2].partition(".")[2] or name for name in names})


CASES = [(shape, kind) for shape in SHAPES for kind in kinds(shape)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("shape", "kind"), CASES)
def test_a_target_has_the_numbers_of_the_merged_model(shape: str, kind: str, backend: str, tmp_path: Path) -> None:
    config, weights = SHAPES[shape], random_weights(SHAPES[shape])
    path = random_adapter(tmp_path, config, seed=5, rank=3, only=kind)
    runtime = model(shape, backend)
    adapter = adapters_of(runtime, {"a": path})["a"]
    whole = runtime_of(config, merged(config, weights, path), ops=("torch",))
    expected = logits_of(whole, [(PROMPTS[0], None)])[0]
    found = logits_of(runtime, [(PROMPTS[0], adapter)])[0]
    same_logits(expected, found, PARITY)
    assert float((found - logits_of(runtime, [(PROMPTS[0], None)])[0]).abs().max()) > 20 * PARITY


# Rows with other adapters


@cache
def three(shape: str, backend: str) -> tuple[ModelRunner, list[Adapter]]:
    """A model, and adapters of other ranks and targets."""
    runtime, place = model(shape, backend), Path(mkdtemp())
    paths = {"all": random_adapter(place / "all", SHAPES[shape], 1, 4),
             "up": random_adapter(place / "up", SHAPES[shape], 2, 17, "down_proj"),
             "mixers": random_adapter(place / "mixers", SHAPES[shape], 3, 1, "o_proj", {"use_rslora": True})}
    return runtime, [*adapters_of(runtime, paths).values()]


def rows(adapters: list[Adapter]) -> list[tuple[Any, Adapter | None]]:
    prompts = [numbers(20 + place, 1 + 7 * place, 509) for place in range(6)]
    return [*zip(prompts, [adapters[0], None, adapters[1], adapters[0], adapters[2], None], strict=True)]


@pytest.mark.parametrize("chunk", [1, 5, 1 << 20])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_l6_rows_do_not_depend_on_each_others_adapters(shape: str, backend: str, chunk: int) -> None:
    """With the compiled kernels bit for bit. Rows without adapters are as if there were none."""
    runtime, adapters = three(shape, backend)
    batch = rows(adapters)
    for (tokens, adapter), found in zip(batch, logits_of(runtime, batch, chunk), strict=True):
        alone = logits_of(runtime, [(tokens, adapter)])[0]
        if backend == "cpu":
            assert torch.equal(found, alone)
        else:
            same_logits(alone, found)
        if adapter:
            assert not torch.allclose(found, logits_of(runtime, [(tokens, None)])[0], atol=1e-2)


def test_rslora_and_patterns_scale(tmp_path: Path) -> None:
    config, weights = SHAPES["dense"], random_weights(SHAPES["dense"])
    scaled = {"use_rslora": True, "lora_alpha": 3.0}
    path = random_adapter(tmp_path / "rs", config, rank=4, settings=scaled)
    runtime, whole = model("dense", BACKENDS[-1]), runtime_of(config, merged(config, weights, path))
    adapter = adapters_of(runtime, {"a": path})["a"]
    same_logits(logits_of(whole, [(PROMPTS[0], None)])[0], logits_of(runtime, [(PROMPTS[0], adapter)])[0], PARITY)
    plain = random_adapter(tmp_path / "plain", config, rank=4, settings={"lora_alpha": 6})
    pattern = random_adapter(tmp_path / "pattern", config, rank=4, settings={
        "lora_alpha": 1, "alpha_pattern": {"layers.0.mlp.gate_proj": 6, ".*mlp.*": 6, "^model.layers.*_attn.*": 6,
                                           "lm_head": 6}})
    one, other = adapters_of(runtime, {"a": plain, "b": pattern}).values()
    assert torch.equal(*(logits_of(runtime, [(PROMPTS[0], each)])[0] for each in (one, other)))


# Engines


def served(runtime: ModelRunner, requests: list[EngineRequest], **limits: Any) -> Answers:
    engine = Engine(small_runtime(runtime, **limits))
    for request in requests:
        engine.add(request)
    return drain(engine)


def requests_of(adapters: list[Adapter], count: int = 24) -> list[EngineRequest]:
    """The same prompt with each adapter and without, and other prompts."""
    prompt, own = numbers(5, 83, 509), [None, *adapters]
    return [replace(greedy(prompt if place < 4 else numbers(60 + place, 30 + place, 509), count, f"r{place}"),
                    adapter=own[place % 4]) for place in range(8)]


@cache
def alone(shape: str, backend: str) -> list[list[int]]:
    runtime, adapters = three(shape, backend)
    found = [served(runtime, [request], batch=1)[request.id, 0].tokens for request in requests_of(adapters)]
    assert len({tuple(tokens) for tokens in found}) == len(found)
    return found


@pytest.mark.parametrize(("budget", "pages"), [(7, None), (64, None), (512, None), (64, 30)])
@pytest.mark.parametrize(("shape", "backend"), [(shape, BACKENDS[-1]) for shape in SHAPES] + [("dense", "torch")])
def test_l6_answers_are_those_of_each_request_alone(shape: str, backend: str, budget: int, pages: int | None) -> None:
    """pages: too few for all, so that some are preempted."""
    runtime, adapters = three(shape, backend)
    requests = requests_of(adapters)
    engine = Engine(small_runtime(runtime, batch=8, budget=budget, pages=pages, context=160))
    for request in requests:
        engine.add(request)
    answers = drain(engine)
    assert [answers[request.id, 0].tokens for request in requests] == alone(shape, backend)
    assert (engine.scheduler.preemptions > 0) == (pages is not None)


def test_an_unloaded_adapter_is_freed_with_the_next_step(tmp_path: Path) -> None:
    runtime, found = model("dense", BACKENDS[-1]), AdapterSet(model("dense", BACKENDS[-1]))
    adapter = weakref.ref(found.load("a", random_adapter(tmp_path, runtime.config)).layers[0].products["down"][0].a)
    engine = Engine(small_runtime(runtime))
    engine.add(replace(greedy(PROMPTS[0], 5, "a"), adapter=found.find("a")))
    engine.step()
    found.unload("a")
    drain(engine)
    engine.add(greedy(PROMPTS[1], 1, "b"))
    drain(engine)
    gc.collect()
    assert adapter() is None


def test_prefixes_belong_to_an_adapter() -> None:
    """Also if one adapter is loaded under two names, which is one adapter."""
    runtime, adapters = three("dense", BACKENDS[-1])
    engine, prompt = Engine(small_runtime(runtime, batch=8)), numbers(9, 70, 509)
    assert engine.pin(prompt) is False
    cached = list[int]()
    for number, adapter in enumerate([None, None, adapters[0], adapters[0], adapters[1], None,
                                      replace(adapters[0], name="other")]):
        engine.add(replace(greedy(prompt, 4, f"r{number}"), adapter=adapter))
        last = drain(engine)[f"r{number}", 0].last
        assert last.usage
        cached.append(last.usage.cached_tokens)
    assert [count > 0 for count in cached] == [False, True, False, True, False, True, True]


@pytest.mark.parametrize("speculate", ["mtp:3", "ngram:4"])
def test_l6_drafts_change_no_answer(speculate: str, tmp_path: Path) -> None:
    """The head drafts with the base model's weights, the model verifies with the adapter's."""
    options: dict[str, Any] = {"dtype": "float32", "memory": "32MiB", "max_batch": 4, "threads": 1}
    plain = load(None, EngineConfig(**options, speculate="off"))
    drafting = load(None, EngineConfig(**options, speculate=speculate))
    paths = {name: random_adapter(tmp_path / name, plain.config, seed, 2, settings={"lora_alpha": 2})
             for seed, name in enumerate("ab")}
    found, usages = list[list[list[int]]](), list[Usage]()
    for runtime in (plain, drafting):
        own = [None, *adapters_of(runtime, paths).values()]
        requests = [replace(greedy(numbers(3, 12, 300) * 3, 40, f"r{place}"), adapter=adapter)
                    for place, adapter in enumerate(own)]
        engine = Engine(runtime, depth=FixedDraftLength(3) if runtime is drafting else None)
        for request in requests:
            engine.add(request)
        answers = drain(engine)
        found.append([answers[request.id, 0].tokens for request in requests])
        usages += [usage for request in requests if (usage := answers[request.id, 0].last.usage)]
    assert found[0] == found[1] and len(set(map(tuple, found[0]))) == 3
    assert [usage.drafted_tokens > 0 for usage in usages] == [False] * 3 + [True] * 3
    assert usages[3].accepted_tokens and usages[4].accepted_tokens + usages[5].accepted_tokens


def test_tiers_keep_adapters_apart(tmp_path: Path) -> None:
    options: dict[str, Any] = {"dtype": "float32", "memory": "32MiB", "max_batch": 2, "threads": 1,
                               "cache_dir": str(tmp_path / "cache")}
    cached = dict[str, int]()
    for seeds in ({"a": 0}, {"a": 0, "b": 1}, {"a": 1}):
        shape = load(None, EngineConfig(**options)).config
        paths = {name: random_adapter(tmp_path / name, shape, seed) for name, seed in seeds.items()}
        with LLM(**options, lora=paths) as llm:
            for name in (*seeds, None):
                output, = llm.generate([[*numbers(4, 200, 300)]], SamplingParams(max_tokens=2), lora=name)
                cached[f"{seeds} {name}"] = output.choices[0].usage.cached_tokens
    assert [count > 0 for count in cached.values()] == [False, False, True, False, True, True, True]


@pytest.mark.skipif(bool(missing()), reason=str(missing()))
@pytest.mark.parametrize("kind", [{"dtype": "bfloat16"}, {"dtype": "bfloat16", "quant": "q4_k"}, {"dtype": "float16"}])
@pytest.mark.parametrize("threads", [1, 3])
def test_l6_bit_for_bit_in_other_formats(kind: dict[str, Any], threads: int, tmp_path: Path) -> None:
    """A promise of the CPU's kernels alone."""
    config = odd_shape(hidden_size=256, intermediate_size=512, head_dim=64, linear=LinearConfig(2, 6, 24, 128, 4))
    runtime = load(RandomModel(shape=config, initializer_range=0.1),
                   EngineConfig(memory="8MiB", max_batch=8, threads=threads, device="cpu", **kind))
    paths = {str(rank): random_adapter(tmp_path / str(rank), config, rank, rank) for rank in (4, 16, 33)}
    batch = rows([*adapters_of(runtime, paths).values()])
    for chunk in (3, 1 << 20):
        for (tokens, adapter), found in zip(batch, logits_of(runtime, batch, chunk), strict=True):
            assert torch.equal(found, logits_of(runtime, [(tokens, adapter)])[0])


@pytest.mark.skipif(DEVICE != "cpu", reason="GPUs do not split models in float32")
def test_split_models_take_no_adapters(tmp_path: Path) -> None:
    runtime = split_runtime(2)
    with pytest.raises(AdapterError, match="tp=1"):
        AdapterSet(runtime).load("a", random_adapter(tmp_path, runtime.config))


@pytest.mark.parametrize("budget", [64, 512])
def test_rows_with_adapters_are_computed_apart_where_the_device_overlaps(budget: int) -> None:
    """As on a GPU: its own steps serve the other rows."""
    runtime, adapters = three("dense", BACKENDS[-1])
    watch = Watch(small_runtime(runtime, batch=8, budget=budget))
    watch.runtime.capabilities = replace(watch.runtime.capabilities, overlaps=True)
    engine, requests = Engine(watch), requests_of(adapters)  # type: ignore[arg-type]
    late = [greedy(numbers(90 + place, 20, 509), 150, f"l{place}") for place in range(2)]
    for request in (*late, *requests):
        engine.add(request)
    answers = drain(engine)
    assert [answers[request.id, 0].tokens for request in requests] == alone("dense", BACKENDS[-1])
    assert [answers[each.id, 0].tokens for each in late] == [
        served(runtime, [each], batch=1)[each.id, 0].tokens for each in late]
    assert engine.stats.async_steps > 0 and engine.stats.steps < len(watch.chunks)
