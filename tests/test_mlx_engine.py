"""Device mlx: logits of transformers and of mlx-lm, and the same answers in every batch (L6)."""

from __future__ import annotations

import itertools
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import test_lora as lora
import test_prefix_same_answer as reuse
import test_same_answer as grid
import test_speculation as drafts
import torch
from op_cases import relative_rms
from reuse_cases import runtime_of
from speculation_cases import ANSWER, request_of
from support import (
    FAMILIES,
    drain,
    greedy,
    moe_shape,
    numbers,
    odd_shape,
    qwen2_shape,
    same_logits,
    same_tokens,
    session_over,
    stepwise_logits,
    transformers_model,
)

from deltic.cli.doctor import check_mlx
from deltic.config import EngineConfig, ExpertsConfig, LinearConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import RandomModel, load
from deltic.errors import ConfigError
from deltic.ops import explain
from deltic.ops.mlx import missing
from deltic.ops.quantized import QTensor
from deltic.ops.types import DecoderLayer, GdnWeights, MlpWeights, Weight
from deltic.params import SamplingParams
from deltic.runner.model_runner import ModelRunner
from deltic.spec_decode.draft_length import FixedDraftLength

needs_mlx = pytest.mark.skipif(bool(missing()), reason=str(missing()))
BLOCKS = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "linear": LinearConfig(2, 6, 24, 128, 4)}
"""Sizes that can be quantized."""


def some(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Marks all values but a few as slow."""
    columns = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*each, marks=() if each in quick or each[0] in quick else pytest.mark.slow)
            for each in columns]


SHAPES = {"mlx": odd_shape(), "mlx, experts": moe_shape(), "mlx, qwen2": qwen2_shape()}


@cache
def runtime(name: str = "mlx", **options: Any) -> ModelRunner:
    """Random weights of range 0.1, in float32."""
    given = {"dtype": "float32", "memory": "8MiB", "max_batch": 8, "threads": 1, "device": "mlx", **options}
    return load(RandomModel(shape=SHAPES[name], initializer_range=0.1), EngineConfig(**given))


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The grids of other modules know these models."""
    for models in (grid.MODELS, reuse.RUNTIMES, drafts.MODELS):
        for name in SHAPES:
            monkeypatch.setitem(models, name, lambda name=name: runtime(name))
    yield


# The same logits as others


@needs_mlx
@pytest.mark.parametrize("family", some(FAMILIES, "qwen3_5", "qwen3_5_moe"))
def test_logits_are_transformers(family: str, tmp_path: Path) -> None:
    theirs = transformers_model(tmp_path, family=family)
    ours = load(str(tmp_path), EngineConfig(dtype="float32", memory="8MiB", threads=1, device="mlx"))
    tokens = numbers(1, 150, ours.config.vocab_size)
    with torch.no_grad():
        expected = theirs(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    for budget in (7, 64, 512):
        found = session_over(ours, batch=2, budget=budget).prefill(tokens, all_logits=True)
        same_logits(expected, found)
    same_logits(expected[:40], stepwise_logits(session_over(ours, batch=1), tokens[:40]))


@needs_mlx
@pytest.mark.slow
def test_logits_are_mlx_lms(tmp_path: Path) -> None:
    mlx_lm = pytest.importorskip("mlx_lm.models.qwen3_5")
    import mlx.core as mx

    theirs = transformers_model(tmp_path)
    model = mlx_lm.TextModel(mlx_lm.TextModelArgs.from_dict(theirs.config.to_dict()))
    weights = {name: mx.array(tensor.numpy()) for name, tensor in theirs.state_dict().items()}
    model.load_weights([*model.sanitize(weights).items()])
    ours = load(str(tmp_path), EngineConfig(dtype="float32", memory="8MiB", threads=1, device="mlx"))
    tokens = numbers(2, 70, ours.config.vocab_size)
    expected = torch.tensor(model(mx.array([list(tokens)]))[0].tolist())
    same_logits(expected, session_over(ours, batch=1).prefill(tokens, all_logits=True))


@needs_mlx
@pytest.mark.parametrize("name", some(SHAPES, "mlx"))
def test_bfloat16_differs_by_its_rounding(name: str) -> None:
    """From float32 as much as the torch ops do."""
    tokens = numbers(3, 90, 509)
    exact, ours, others = (
        session_over(load(RandomModel(shape=SHAPES[name], initializer_range=0.1), EngineConfig(
            dtype=dtype, memory="8MiB", threads=1, device=device, ops=ops))).prefill(tokens, all_logits=True)
        for dtype, device, ops in (("float32", "cpu", ()), ("bfloat16", "mlx", ()), ("bfloat16", "cpu", ("torch",))))
    own, other = (float((logits - exact).square().mean().sqrt()) for logits in (ours, others))
    assert 0 < own < 1.5 * other


# The same answers in every batch


CASES = [grid.Case(*values) for values in (  # type: ignore[arg-type]
    ("mlx", 1, 1, False, False), ("mlx", 7, 3, True, True), ("mlx", 64, 8, False, True), ("mlx", 512, 8, True, False),
    ("mlx, experts", 7, 3, False, False), ("mlx, experts", 64, 8, True, True))]


@pytest.fixture
def on_mlx(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test if MLX did not compute its steps."""
    from deltic.ops.mlx import step

    steps, whole = list[int](), step._Model.layers_of

    def counted(model: Any, x: Any, *arguments: Any) -> Any:
        steps.append(len(x))
        return whole(model, x, *arguments)

    monkeypatch.setattr(step._Model, "layers_of", counted)
    yield
    assert len(steps) >= ANSWER // 4, "another backend computed the steps"


def test_grid_has_every_axis() -> None:
    """Batches, chunks, preemption and aborts; the cache and both tiers; drafts."""
    assert {case.batch for case in CASES} == set(grid.BATCHES) and {case.budget for case in CASES} == set(grid.BUDGETS)
    assert {(case.squeezed, case.aborted) for case in CASES} == {*itertools.product((False, True), repeat=2)}
    assert {story.partition(",")[0] for story in reuse.STORIES} >= {"warm", "exact", "forked", "from host", "from disk"}
    assert {story for _, story, _ in DRAFTS} == set(drafts.STORIES)
    assert {pattern for pattern, _, _ in DRAFTS} == {*drafts.PATTERNS, "itself", "part", "ngram"}


@needs_mlx
@pytest.mark.usefixtures("on_mlx")
@pytest.mark.parametrize("case", some(CASES, CASES[1], CASES[4]), ids=str)
def test_same_logits_in_every_batch(case: grid.Case) -> None:
    grid.test_l6_same_logits_when_the_reference_dictates(case)


@needs_mlx
@pytest.mark.usefixtures("on_mlx")
@pytest.mark.parametrize("story", some(reuse.STORIES, "warm", "from host, mid-page", "from disk, exact and forked"))
def test_same_logits_with_every_state_of_the_cache(story: str, tmp_path: Path) -> None:
    budget, batch = (7, 1) if "disk" in story else (64, 3)
    reuse.check_logits(reuse.Case("mlx", story, budget, batch, aborted=batch > 1), tmp_path)


DRAFTS = [
    *((pattern, story, False) for pattern in ("right", "wrong", "now and then", "itself") for story in (
        "cold", "forked")),
    ("now and then", "warm", True), ("alternating", "exact", True), ("every third wrong", "from disk", True),
    ("part", "warm", False), ("ngram", "from disk", False)]


@needs_mlx
@pytest.mark.usefixtures("on_mlx")
@pytest.mark.parametrize(("pattern", "story", "aborted"), some(DRAFTS, DRAFTS[5], "every third wrong"))
def test_same_tokens_with_all_drafts(pattern: str, story: str, aborted: bool, tmp_path: Path) -> None:
    case = drafts.Case("mlx", pattern, 3, story, 3, 64, aborted, "greedy")
    drafts.test_l6_same_tokens_whatever_is_drafted(case, tmp_path)


@needs_mlx
def test_same_tokens_with_a_draft_head() -> None:
    model = RandomModel(shape=odd_shape(), initializer_range=0.1, head=True)
    headed = load(model, EngineConfig(dtype="float32", memory="16MiB", max_batch=8, threads=1, device="mlx",
                                      speculate="mtp:3"))
    expected = grid.expected("mlx", drawn=False)
    engine = Engine(runtime_of(headed, slots=32), None, FixedDraftLength(3))
    engine.add(request_of(expected.prompt, "greedy"))
    engine.add(greedy(numbers(9, 50, 509), 60, "other"))
    answers = drain(engine)
    same_tokens(expected, answers[("seen", 0)].tokens[:ANSWER], SamplingParams(temperature=0.0))
    assert engine.speculator.stats.drafted_at[0] > 0


@needs_mlx
def test_drafts_are_those_of_the_cpu() -> None:
    """Of the embedded model's head, so that most of them are right."""
    found = list[tuple[list[int], list[int]]]()
    for device in ("cpu", "mlx"):
        engine = Engine(load(None, EngineConfig(dtype="float32", memory="32MiB", threads=1, device=device,
                                                speculate="mtp:3")), None, FixedDraftLength(3))
        engine.add(greedy(numbers(4, 40, 400), 60, "a"))
        engine.add(greedy(numbers(5, 70, 400), 40, "b"))
        drain(engine)
        found.append((engine.speculator.stats.drafted_at, engine.speculator.stats.accepted_at))
    assert found[0] == found[1] and found[0][1][1] > 3


@needs_mlx
@pytest.mark.parametrize("name", ["mlx", "mlx, experts"])
def test_ops_one_by_one_give_the_same_logits(name: str) -> None:
    """As hooks and `debug_layers` run them."""
    tokens = numbers(3, 70, 509)
    session, seen = session_over(runtime(name), batch=2, budget=33), list[int]()
    with session.hook(lambda layer, output: seen.append(layer)):
        found = session.prefill(tokens, all_logits=True)
    assert len(seen) == 3 * (len(SHAPES[name].layer_types) + 1)
    same_logits(session_over(runtime(name), batch=2).prefill(tokens, all_logits=True), found)


@needs_mlx
@pytest.mark.slow
def test_compiled_decode_steps_give_the_same_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled by a C++ compiler here, by Metal's on a Mac."""
    from deltic.ops.mlx import step

    tokens, compiled = numbers(3, 40, 509), list[bool]()
    expected = stepwise_logits(session_over(runtime(), batch=1), tokens)
    inputs = step._decode_inputs

    def watched(*arguments: Any) -> Any:
        found = inputs(*arguments)
        compiled.append(found is not None)
        return found

    monkeypatch.setattr(step, "compiles", lambda: True)
    monkeypatch.setattr(step, "_decode_inputs", watched)
    same_logits(expected, stepwise_logits(session_over(runtime(), batch=1), tokens))
    assert sum(compiled) == len(tokens) - 3  # the first tokens have no inputs before them


@needs_mlx
@pytest.mark.parametrize("shape", some(lora.SHAPES, "dense", "experts"))
def test_adapters_change_their_rows(shape: str, tmp_path: Path) -> None:
    """torch computes steps with adapters, on the same memory."""
    config, weights = lora.SHAPES[shape], lora.random_weights(lora.SHAPES[shape])
    path = lora.random_adapter(tmp_path, config, seed=5, rank=3)
    ours = lora.runtime_of(config, weights, device="mlx")
    adapter = lora.adapters_of(ours, {"a": path})["a"]
    whole = lora.runtime_of(config, lora.merged(config, weights, path), ops=("torch",))
    prompt = numbers(1, 21, 509)
    adapted, plain = lora.logits_of(ours, [(prompt, adapter), (prompt, None)], chunk=8)
    same_logits(lora.logits_of(whole, [(prompt, None)])[0], adapted)
    same_logits(lora.logits_of(ours, [(prompt, None)])[0], plain)
    assert float((adapted - plain).abs().max()) > 0.01


# Weights


@needs_mlx
@pytest.mark.parametrize(("quant", "experts"), some(
    itertools.product(("q8_0", "q4_k"), (False, True)), ("q4_k", False), ("q8_0", True)))
def test_quantized_weights_are_those_of_the_cpu(quant: str, experts: bool) -> None:
    shape = moe_shape(**{**BLOCKS, "intermediate_size": 0, "experts": ExpertsConfig(9, 3, 256, 512)}) if experts else (
        odd_shape(**BLOCKS))
    ours, others = (load(RandomModel(shape=shape, initializer_range=0.1), EngineConfig(
        dtype="float32", memory="8MiB", threads=1, device=device, ops=ops, quant=quant))
        for device, ops in (("mlx", ()), ("cpu", ("torch",))))
    assert explain(ours.ops)["step"] == "mlx" and ours.step is not None
    errors = [relative_rms(numbers_of(found), numbers_of(expected))
              for layer, other in zip(ours.decoder.weights.layers, others.decoder.weights.layers, strict=True)
              for found, expected in zip(weights_of(layer), weights_of(other), strict=True)]
    # Q4_K and Q8_0 keep their codes; the Q6_K among the former gets 8 bits in groups
    assert min(errors) < 1e-6 and max(errors) < (1e-6 if quant == "q8_0" else 5e-3)
    tokens = numbers(3, 90, 509)
    found, expected = (session_over(each).prefill(tokens, all_logits=True) for each in (ours, others))
    if quant == "q8_0":
        same_logits(expected, found)
    else:  # Q6_K was rounded again, which may change a token's experts
        assert float((expected.argmax(-1) == found.argmax(-1)).float().mean()) > 0.8


def weights_of(layer: DecoderLayer) -> list[Weight]:
    mixer, mlp = layer.mixer, layer.mlp
    parts = [mlp] if isinstance(mlp, MlpWeights) else [*mlp.parts]
    mixing = mixer.in_proj if isinstance(mixer, GdnWeights) else mixer.qkv
    return [mixing, *(weight for part in parts for weight in (part.gate_up, part.down))]


def numbers_of(weight: Weight) -> torch.Tensor:
    blocks = weight if isinstance(weight, tuple) else (weight,)
    assert all(isinstance(block, QTensor) for block in blocks)
    return torch.cat([block.dequantize() for block in blocks if isinstance(block, QTensor)])


@needs_mlx
def test_weights_and_cache_are_shared_not_copied() -> None:
    import mlx.core as mx

    from deltic.ops.mlx.memory import array_of

    pool = runtime().pools.keys[1]
    array = array_of(pool)
    mx.eval(array)
    pool[3] = 7
    assert float(array[3].min()) == float(array[3].max()) == 7
    before = mx.get_active_memory()
    layers = [array_of(layer.mlp.down) for layer in runtime().decoder.weights.layers]
    mx.eval(*layers)
    assert mx.get_active_memory() == before


# Options


def test_without_mlx_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltic.ops.mlx.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'deltic\[mlx\]'") as caught:
        load(RandomModel(shape=odd_shape()), EngineConfig(device="mlx", memory="8MiB"))
    assert caught.value.option == "device"


def test_nothing_else_imports_mlx() -> None:
    """Neither the package nor a model on another device."""
    program = ("import sys, deltic, deltic.cli, deltic.engine.loading, deltic.server.app, deltic.ops.mlx\n"
               "from deltic.ops import select; select()\n"
               "deltic.Session(device='cpu', max_context=64, threads=1).prefill([1, 2, 3])\n"
               "assert not [name for name in sys.modules if name == 'mlx' or name.startswith('mlx.')]")
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(("name", "value"), [
    ("kv_dtype", "int4"), ("batch_invariant", True), ("aot_dir", "/tmp/x"), ("tp", 2), ("expert_memory", "1GiB")])
def test_options_that_it_does_not_have(name: str, value: Any) -> None:
    needed = {"quant": "q8_0"} if name == "aot_dir" else {}
    with pytest.raises(ConfigError, match="device mlx") as caught:
        EngineConfig(device="mlx", **{name: value, **needed})
    assert caught.value.option == name


@pytest.mark.parametrize(("system", "machine", "installed", "found"), [
    ("darwin", "arm64", True, "mlx"), ("darwin", "arm64", False, "cpu"), ("darwin", "x86_64", True, "cpu"),
    ("linux", "aarch64", True, "cpu")])
def test_the_default_on_a_mac(system: str, machine: str, installed: bool, found: str,
                              monkeypatch: pytest.MonkeyPatch) -> None:
    from conftest import FIND_DEVICE

    monkeypatch.setattr("deltic.ops.capabilities.sys.platform", system)
    monkeypatch.setattr("deltic.ops.capabilities.platform.machine", lambda: machine)
    monkeypatch.setattr("deltic.ops.capabilities.find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert FIND_DEVICE() == found


def test_doctor_checks_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_mlx(Namespace()) is None
    monkeypatch.setattr("deltic.ops.capabilities.is_apple_silicon", lambda: True)
    monkeypatch.setattr("deltic.ops.mlx.find_spec", lambda name: None)
    found = check_mlx(Namespace())
    assert found and found.state == "warning" and "deltic[mlx]" in found.advice
