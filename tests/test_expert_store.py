"""Experts that stay in the model's files: the same bits however few are in memory, whoever is exchanged for whom and
however the work is cut; what is counted, remembered and refused; files that fail or change."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_cases import options_of, pooled_runtime, saved
from speculation_cases import moe_headed
from story_cases import MODELS, Room
from support import (
    Answers,
    drain,
    greedy,
    lively,
    moe_runtime,
    moe_shape,
    numbers,
    pairwise,
    qwen3_runtime,
    serve,
    session_over,
    small_runtime,
)
from test_moe_files import converted, fused, split
from test_stories import OTHER, PLAIN, tell
from torch import Tensor

from deltic.cli import main
from deltic.config import EngineConfig, ExpertsConfig, LinearConfig, ModelConfig, RopeConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import RandomModel, load
from deltic.engine.stats import snapshot
from deltic.errors import ConfigError, ModelError
from deltic.loader.dummy import random_weights
from deltic.ops.cpu import missing
from deltic.params import EngineRequest
from deltic.runner.model_runner import ModelRunner
from deltic.server.metrics import exposition

pytestmark = pytest.mark.skipif(bool(missing()), reason=str(missing()))
COUNT, EACH = 7, 3
ODD = moe_shape(experts=ExpertsConfig(COUNT, EACH, 20, 28), num_hidden_layers=3,
                layer_types=("linear_attention", "full_attention", "linear_attention"))
BLOCKS = moe_shape(hidden_size=256, experts=ExpertsConfig(COUNT, EACH, 256, 512), num_attention_heads=4, head_dim=64,
                   rope=RopeConfig(1e4, 6, (1, 1, 1)), linear=LinearConfig(2, 4, 10, 64, 4), vocab_size=3072)
FILES = ["whole", "split", "fused", "bfloat16", "Q4_K_M", "Q8_0"]


def made(directory: Path, kind: str) -> tuple[str, EngineConfig, ModelConfig]:
    """A model of this kind of files, and the options that it is to be loaded with."""
    directory.mkdir()
    if kind in ("Q4_K_M", "Q8_0"):
        file = converted(directory, BLOCKS, kind)
        return str(file.paths[0]), options_of(dtype="bfloat16", packed_weights="on"), BLOCKS
    dtype: Any = "bfloat16" if kind == "bfloat16" else "float32"
    form = {"split": split, "fused": fused}.get(kind, dict)
    weights = random_weights(ODD, dtype, initializer_range=0.1)
    return str(saved(directory, replace(ODD, dtype=dtype), form(weights))), options_of(dtype=dtype), ODD


def logits_of(runtime: ModelRunner, config: ModelConfig) -> Tensor:
    """Of a prompt read in chunks, and of what is then said token by token."""
    session = session_over(runtime, budget=23)
    rows = [session.prefill(numbers(3, 60, config.vocab_size), all_logits=True)]
    for _ in range(12):
        rows.append(session.step(int(rows[-1][-1].argmax()))[None])
    found = torch.cat(rows)
    lively(found.argmax(-1).tolist())
    return found


@pytest.fixture(scope="module", params=FILES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
          ) -> Iterator[tuple[str, EngineConfig, ModelConfig, Tensor]]:
    """With the logits of all experts in memory."""
    where, options, config = made(tmp_path_factory.mktemp("model") / "m", request.param)
    yield where, options, config, logits_of(load(where, options), config)


@pytest.mark.parametrize("cap", [*range(1, COUNT + 1), 99])
@pytest.mark.covering
def test_residency_changes_no_bit(model: tuple[str, EngineConfig, ModelConfig, Tensor], cap: int) -> None:
    where, options, config, wanted = model
    runtime = load(where, replace(options, expert_cap=cap, expert_predict=cap % 2 == 0, threads=1 + cap % 2))
    assert torch.equal(logits_of(runtime, config), wanted)
    assert runtime.experts
    counts = runtime.experts.statistics()
    assert (sum(counts.misses) > 0) == (cap < COUNT)
    assert (counts.promotions > 0) == (cap < COUNT)
    assert (counts.predicted > 0) == (cap in (2, 4, 6))


@pytest.mark.parametrize("refresh", [1, 2, 1000])
def test_same_answers_in_any_batch(refresh: int) -> None:
    """Batches, chunks, reuse of prompts and drafts, with two of eleven experts in memory."""
    plain, few = moe_runtime(), pooled_runtime(refresh)
    requests = [greedy(numbers(i % 4, 20 + 13 * (i % 4), 509), 30 - i, f"r{i}") for i in range(7)]
    wanted = {name: answer.tokens for name, answer in serve(plain, requests).items()}
    assert len({*map(tuple, wanted.values())}) >= 4
    for batch, budget, speculate in ((1, 64, "off"), (8, 5, "off"), (4, 64, "ngram"), (8, 300, "ngram")):
        small = small_runtime(few, batch=batch, budget=budget)
        engine = Engine(replace(small, options=replace(small.options, speculate=speculate)))
        for request in requests:
            engine.add(request)
        assert {name: answer.tokens for name, answer in drain(engine).items()} == wanted, (batch, budget, speculate)


@dataclass(frozen=True)
class Way:
    """How the same requests are served: experts of a layer in memory (of 11), sequences and tokens of a step, what is
    kept of prompts, and who drafts."""

    cap: int
    batch: int
    budget: int
    kept: str
    speculate: str

    def answers(self, requests: list[EngineRequest], place: str) -> list[Answers]:
        """Of one engine after another: what the first has kept on a disk is there for the second."""
        model, found = pooled_runtime(1, self.cap), []
        if self.speculate == "mtp":
            model = replace(model, mtp=moe_headed().mtp)
        for _ in range(2):
            room = Room(self.batch, self.budget, 120, 256, self.batch + 6, self.batch, self.kept != "nothing",
                        "disk" if self.kept == "disk" else None)
            runtime = room.furnish(model, place)
            runtime = replace(runtime, options=replace(runtime.options, speculate=self.speculate))
            found.append(serve(runtime, requests))
        return found


@cache
def resident_answers() -> tuple[tuple[EngineRequest, ...], dict[tuple[str, int], list[int]]]:
    """Returns requests, and their answers with all experts in memory."""
    requests = [greedy((*numbers(1, 48, 509), *numbers(i, 5 + i, 509)), 16, f"r{i}") for i in range(4)]
    wanted = {name: answer.tokens for name, answer in serve(moe_runtime(), requests).items()}
    assert len({*map(tuple, wanted.values())}) >= 3
    return tuple(requests), wanted


WAYS = [Way(*way) for way in product((1, 2, 5, 10, 11), (1, 8), (5, 300), ("nothing", "prefixes", "disk"),
                                     ("off", "ngram", "mtp"))]
FEW_WAYS = [*pairwise(WAYS, astuple)]


@pytest.mark.parametrize("way", [*(pytest.param(way, id=str(number)) for number, way in enumerate(FEW_WAYS)),
                                 *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS if way not in FEW_WAYS)])
def test_same_answers_with_every_option(way: Way, tmp_path: Path) -> None:
    """Prompts with a common prefix, served twice; experts are exchanged in every step."""
    requests, wanted = resident_answers()
    for found in way.answers(list(requests), str(tmp_path)):
        assert {name: answer.tokens for name, answer in found.items()} == wanted


def test_stories_with_few_experts_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    headed = replace(pooled_runtime(), mtp=moe_headed().mtp)
    for name, model in (("few", pooled_runtime()), ("few, headed", headed)):
        monkeypatch.setitem(MODELS, name, lambda model=model: model)
        monkeypatch.setitem(PLAIN, name, moe_runtime)
        monkeypatch.setitem(OTHER, name, qwen3_runtime)
    happened = tell(range(700, 706), models={"odd": "few", "headed": "few, headed", "qwen3": "few"})
    assert happened["preempted"] and happened["accepted"] and happened["reused"]


# What is counted


def test_counters_equal_the_reads(tmp_path: Path) -> None:
    where, options, config = made(tmp_path / "m", "split")
    runtime = load(where, replace(options, expert_cap=2, expert_refresh=1 << 30))
    assert runtime.experts
    store, before = runtime.experts.store, runtime.experts.statistics()
    size = 3 * 20 * 40 * 4
    assert before.bytes == 3 * 2 * size and not sum(before.misses)
    session = session_over(runtime)
    for token in numbers(1, 10, config.vocab_size):
        session.step(token)
    counts = runtime.experts.statistics()
    assert [hits + misses for hits, misses in zip(counts.hits, counts.misses)] == [10 * EACH] * 3
    assert counts.bytes - before.bytes == sum(counts.misses) * size
    assert not counts.promotions and counts.waited > 0 and counts.reading > 0
    assert all(0.95 * 10 * EACH < sum(scores) < 10 * EACH for scores in store.scores())  # what was counted fades


def test_metrics_of_experts() -> None:
    runtime = pooled_runtime()
    engine = Engine(small_runtime(runtime))
    engine.add(greedy((1, 2, 3), 5))
    drain(engine)
    page = exposition({"m": snapshot(engine)}, {})
    assert runtime.experts
    counts = runtime.experts.statistics()
    assert f'deltic_expert_hits_total{{model="m",layer="0"}} {counts.hits[0]}' in page
    assert f'deltic_expert_misses_total{{model="m",layer="5"}} {counts.misses[5]}' in page
    assert f'deltic_expert_read_bytes_total{{model="m"}} {counts.bytes}' in page
    assert "expert" not in exposition({"m": snapshot(Engine(small_runtime(moe_runtime())))}, {})


def test_wanted_experts_become_resident(tmp_path: Path) -> None:
    """The same token again and again: after the first time its experts are there."""
    where, options, _ = made(tmp_path / "m", "whole")
    runtime = load(where, replace(options, expert_cap=4))
    session = session_over(runtime)
    session.prefill([5] * 40)
    assert runtime.experts
    before = runtime.experts.statistics()
    for _ in range(10):
        session.step(5)
    after = runtime.experts.statistics()
    wanted = 10 * EACH * 3
    assert sum(after.hits) - sum(before.hits) > 0.6 * wanted > 0.6 * (4 / COUNT) * wanted


def test_profile_orders_the_experts(tmp_path: Path) -> None:
    where, options, config = made(tmp_path / "m", "whole")
    profile = tmp_path / "profile.json"
    options = replace(options, expert_cap=2, expert_profile=str(profile))
    first = load(where, options)
    wanted = logits_of(first, config)
    Engine(first).close()
    assert first.experts
    kept = json.loads(profile.read_text())["layers"]
    assert kept == [[round(score, 3) for score in layer] for layer in first.experts.store.scores()]
    second = load(where, options)
    assert second.experts
    assert second.experts.store.scores()[0] == pytest.approx(kept[0])
    assert torch.equal(logits_of(second, config), wanted)
    for text in ("{", "{}", '{"layers": [[1, 2]]}', json.dumps({"layers": [[-1] * COUNT] * 3})):
        profile.write_text(text)
        with pytest.raises(ConfigError, match="expert_profile"):
            load(where, options)


# Files that fail


@pytest.mark.parametrize("harm", ["changed", "shorter"])
def test_changed_file_fails_the_request(tmp_path: Path, harm: str) -> None:
    where, options, _ = made(tmp_path / "m", "whole")
    runtime = load(where, replace(options, expert_cap=1))
    file = Path(where) / "model.safetensors"
    if harm == "changed":
        os.utime(file, ns=(1, 1))
    else:
        os.truncate(file, 5000)
    engine = Engine(small_runtime(runtime))
    engine.add(greedy(numbers(0, 20, 509), 5))
    last = drain(engine)["a", 0].last
    assert last.finish == "error" and last.error and str(file) in last.error
    assert {"changed": "has changed since the model was loaded", "shorter": "shorter"}[harm] in last.error
    engine.add(greedy(numbers(0, 20, 509), 5, "b"))
    assert drain(engine)["b", 0].last.finish == "error"


def test_after_an_error_the_next_request_is_served(tmp_path: Path) -> None:
    where, options, _ = made(tmp_path / "m", "whole")
    runtime = load(where, replace(options, expert_cap=2, expert_predict=True))
    file = Path(where) / "model.safetensors"
    before, wanted = file.stat(), serve(small_runtime(load(where, options)), [greedy(numbers(0, 20, 509), 9)])
    os.utime(file, ns=(1, 1))
    assert serve(small_runtime(runtime), [greedy(numbers(0, 20, 509), 9)])["a", 0].last.finish == "error"
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert serve(small_runtime(runtime), [greedy(numbers(0, 20, 509), 9)])["a", 0].tokens == wanted["a", 0].tokens


# What cannot be


def test_unsupported_options_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where, options, _ = made(tmp_path / "m", "whole")
    (tmp_path / "g").mkdir()
    gguf = str(converted(tmp_path / "g", BLOCKS, "F32").paths[0])
    cases: list[tuple[list[str], str]] = [
        (["tiny", "--expert-memory", "1GiB"], "dense model, without experts"),
        ([where, "--expert-memory", "20KiB"], "no room for one expert of each layer, which take 0.0 MiB"),
        ([where, "--expert-memory", "auto", "--expert-reserve", "900GiB"], "no room for one expert of each layer"),
        ([where, "--expert-memory", "lots"], "--expert-memory must be a size"),
        ([where, "--expert-cap", "0"], "--expert-cap must be from 1"),
        ([where, "--expert-cap", "2", "--dtype", "bfloat16"], "use --dtype float32"),
        ([where, "--expert-cap", "2", "--quant", "q8_0"], "deltic convert"),
        ([where, "--expert-cap", "2", "--ops", "moe=torch"], "leave out --ops"),
        ([where, "--expert-cap", "2", "--expert-predict", "--device", "cuda"], "--expert-predict is for device cpu"),
        ([where, "--expert-predict"], "--expert-predict needs offloaded experts"),
        (["tiny", "--expert-refresh", "5"], "--expert-refresh needs offloaded experts"),
        ([where, "--expert-cap", "2", "--expert-reserve", "2GiB"], "is what --expert-memory auto leaves free"),
        ([where, "--expert-cap", "2", "--expert-compute", "host"], "--expert-compute host needs weights offloaded"),
        ([where, "--expert-cap", "2", "--expert-compute", "none"], "--expert-compute: invalid choice"),
        ([gguf, "--expert-cap", "2", "--packed-weights", "off"], "add --packed-weights on"),
    ]
    for arguments, message in cases:
        assert main(["inspect", *arguments]) == 2, arguments
        error = capsys.readouterr().err
        assert message in error and "Traceback" not in error, (arguments, error)
    with pytest.raises(ConfigError, match="expert_compute must be one of auto, card, host, not 'none'"):
        replace(options, expert_compute="none")
    with pytest.raises(ConfigError, match="these weights lie in no file"):
        load(RandomModel(shape=ODD), replace(options, expert_cap=2))
    (Path(where) / "model.safetensors").unlink()
    assert main(["inspect", where, "--expert-cap", "2"]) == 2


def test_budget(tmp_path: Path) -> None:
    where, options, _ = made(tmp_path / "m", "whole")
    one = load(where, replace(options, expert_cap=1)).experts
    assert one
    each = one.store.nbytes // 3
    for budget, slots in ((3 * 3 * each, 3), (3 * 3 * each + each, 3), (1 << 30, COUNT)):
        runtime = load(where, replace(options, expert_memory=str(budget)))
        assert runtime.experts and runtime.experts.store.slots == (slots,) * 3
        assert runtime.experts.store.nbytes <= budget
    runtime = load(where, replace(options, expert_memory="auto", expert_cap=5))
    assert runtime.experts and runtime.experts.store.slots == (5, 5, 5)


def test_missing_expert_is_named(tmp_path: Path) -> None:
    weights = split(random_weights(ODD, "float32"))
    del weights["model.layers.1.mlp.experts.4.up_proj.weight"]
    where = saved(tmp_path / "m", ODD, weights)
    with pytest.raises(ModelError, match="expert 4"):
        load(str(where), options_of(dtype="float32", expert_cap=2))
