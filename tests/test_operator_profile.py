"""How time divides among operators: what is counted in which phase, that answers stay the same, and that nothing stays
behind."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support import moe_runtime, numbers, odd_shape, session_over
from test_cuda_source import MODELS, packed_mixture, packed_shapes, shapes_of

from deltic import LLM, RandomModel, SamplingParams
from deltic.cli import main
from deltic.errors import RequestError
from deltic.ops.cuda import adapters, mtp
from deltic.ops.cuda import prefill as prompts
from deltic.ops.cuda.marks import NAMES, mark_of, operator_of
from deltic.ops.cuda.sample import source
from deltic.runner import operator_profile
from deltic.runner.operator_profile import Profile, _Account, account_kernels, profiling
from deltic.spec_decode.draft_length import FixedDraftLength

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [list(numbers(seed, 5 + 40 * seed, 500)) for seed in range(4)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The embedded model with its draft head."""
    with LLM(memory="64MiB", dtype="float32", threads=1, token_budget=64, speculate="mtp:2") as model:
        # phases and drafts are counted, which may not depend on how long steps take
        model.engine.scheduler.times, model.engine.speculator.depth = None, FixedDraftLength(2)
        yield model
        model.worker.call(lambda engine: engine.check())


def answers(llm: LLM, shift: int = 0) -> list[tuple[int, ...]]:
    """shift: for other prompts, of which nothing is cached."""
    prompts = [[token + shift for token in prompt] for prompt in PROMPTS]
    return [tuple(output.sound().choices[0].tokens) for output in llm.generate(prompts, GREEDY)]


def calls(profile: Profile, phase: str, name: str) -> int:
    return profile.phases[phase].operators[name].calls


def total(profile: Profile, name: str) -> int:
    return sum(calls(profile, phase, name) for phase in profile.phases if name in profile.phases[phase].operators)


def test_all_steps_of_a_batch_are_counted_with_long_prompts_and_drafts(llm: LLM) -> None:
    wanted, config, before = answers(llm), llm.runtime.config, llm.engine.stats.steps
    step = llm.runtime.step  # type: ignore[union-attr]
    with llm.profile() as profile:
        found = answers(llm, 1)
        stepped = llm.engine.stats.steps - before
    assert len(found) == len(wanted) and llm.runtime.step is step and step is not None  # type: ignore[union-attr]
    steps = sum(phase.steps for phase in profile.phases.values())
    assert {"prefill", "decode"} <= set(profile.phases) and 0 < steps <= stepped
    assert total(profile, "gdn_mixer") == steps * len(config.linear_layers)
    assert total(profile, "attention_mixer") == steps * len(config.attention_layers)
    assert total(profile, "mlp") == steps * config.num_hidden_layers
    assert total(profile, "add_norm") == steps * (2 * config.num_hidden_layers + 1)
    assert total(profile, "head") == total(profile, "embed") == total(profile, "rope") == steps
    assert calls(profile, "decode", "sample") > 0 and calls(profile, "decode", "mtp") > 0
    read = sum(phase.tokens for name, phase in profile.phases.items() if name != "decode")
    assert read >= sum(map(len, PROMPTS)) - len(PROMPTS)
    for phase in profile.phases.values():
        assert 0 < sum(each.seconds for each in phase.operators.values()) <= phase.seconds
        assert all(each.seconds > 0 for each in phase.operators.values())


def test_answers_stay_the_same(llm: LLM) -> None:
    wanted = answers(llm, 2)
    llm.worker.call(lambda engine: engine.runtime.cache.clear())
    with llm.profile():
        assert answers(llm, 2) == wanted
    assert answers(llm, 2) == wanted


def test_a_session_and_experts() -> None:
    session = session_over(moe_runtime(), batch=4, budget=16, context=128)
    with session.profile() as profile:
        session.prefill(numbers(0, 40, 509))
        session.step(3)
        session.verify([4, 5])
        session.accept(1)
    assert (profile.phases["prefill"].steps, profile.phases["decode"].steps) == (3, 2)
    assert (profile.phases["prefill"].tokens, profile.phases["decode"].tokens) == (40, 3)
    assert calls(profile, "prefill", "moe") == 18 and calls(profile, "decode", "moe") == 12
    assert "mlp" not in profile.phases["decode"].operators
    before = profile.as_dict()
    session.step(7)
    assert profile.as_dict() == before and not session.runtime.hooks  # type: ignore[union-attr]


def test_a_draft_model_is_one_operator() -> None:
    options: dict[str, Any] = {"memory": "64MiB", "dtype": "float32", "threads": 1, "speculate": "draft:tiny:2"}
    with LLM(**options) as llm, llm.profile() as profile:
        llm.generate([[5, 6, 7]], GREEDY)
    assert total(profile, "draft_model") > 0


def test_a_profile_is_a_table_and_json(llm: LLM) -> None:
    with llm.profile() as profile:
        answers(llm, 3)
    text, found = str(profile), json.loads(json.dumps(profile.as_dict()))
    assert found["device"] == "cpu" and [*found["phases"]] == [*profile.phases]
    for name, phase in found["phases"].items():
        assert re.search(rf"^{name}: {phase['steps']:,} steps, {phase['tokens']:,} tokens, ", text, re.MULTILINE)
        assert abs(sum(each["share"] for each in phase["operators"].values()) - 1) < 1e-6
        longest = [each["seconds"] for operator, each in phase["operators"].items() if operator != "between operators"]
        assert longest == sorted(longest, reverse=True)
        for operator in phase["operators"]:
            assert re.search(rf"^  {operator} +[\d,]+ +[\d,.]+ +[\d,.]+ +[\d.]+%$", text, re.MULTILINE), text


def test_nothing_stays_behind(llm: LLM) -> None:
    runtime: Any = llm.runtime
    kept = runtime.decoder, runtime.step, runtime.mtp_runner.serving
    with pytest.raises(ZeroDivisionError), llm.profile() as profile:
        answers(llm)
        assert runtime.profiler is not None and runtime.step is None
        raise ZeroDivisionError
    assert (runtime.decoder, runtime.step, runtime.mtp_runner.serving, runtime.profiler) == (*kept, None)
    assert profile.phases
    with llm.profile() as empty:
        pass
    assert not empty.phases and str(empty) == "no steps were profiled"


def test_l8_one_profile_at_a_time(llm: LLM) -> None:
    with llm.profile() as profile:
        with pytest.raises(RequestError, match="is being profiled"), llm.profile():
            pass
        answers(llm, 4)
    assert profile.phases and llm.runtime.profiler is None  # type: ignore[union-attr]
    with pytest.raises(RequestError, match="a compiled model has no operators"), profiling(object()):
        pass


def test_a_model_that_is_closed_meanwhile_ends_its_profile() -> None:
    with LLM(RandomModel(shape=odd_shape()), memory="8MiB", threads=1) as llm, llm.profile() as profile:
        llm.generate([[1, 2, 3]], GREEDY)
        llm.close()
    assert profile.phases["decode"].steps > 5


# On the command line


BENCH = ["bench", "--prompt-tokens", "80", "--new-tokens", "4", "--batch", "3", "--repeat", "1", "--memory", "64MiB",
         "--dtype", "float32", "--threads", "1", "--profile"]


def test_bench_shows_a_profile(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BENCH, "--speculate", "off", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    phases = found["profile"]["phases"]  # "mixed" too, where a prompt is read in chunks beside an answer
    assert sum(phase["tokens"] for phase in phases.values()) == 3 * 80 + 3 * 3 and phases["prefill"]["tokens"] >= 80
    assert phases["decode"]["operators"]["gdn_mixer"]["calls"] > 0
    assert main(BENCH) == 0
    text = capsys.readouterr().out
    assert "prefill tokens per second" in text and re.search(r"^prefill: \d+ steps, \d+ tokens", text, re.MULTILINE)
    assert main([*BENCH, "--scenario", "edit"]) == 2
    assert "leave out --scenario edit" in capsys.readouterr().err


# Kernels of a GPU


def test_kernels_are_divided_by_marks_and_names() -> None:
    names = ["k_gdn_few", "k_mark_decode", "k_enter", "product_192_1_0_8", "k_gdn_few", "k_attention_few",
             "k_mark_sample", "some_kernel_of_torch", "k_mark_model", "Memcpy DtoH (Device -> Pinned)", "k_mark_mtp",
             "product_192_1_0_8", "k_mark_prefill", "nvjet_tst_128x128", "k_delta_scan", "who_knows"]
    kernels = [(name, 100 * place, 100 * place + 40) for place, name in enumerate(names)]
    profile = Profile("cuda")
    account = _Account(profile)
    account_kernels(account, kernels[::-1])
    account.close()
    decode, prefill = profile.phases["decode"], profile.phases["prefill"]
    assert {name: each.calls for name, each in decode.operators.items()} == {
        "embed": 1, "products": 1, "gdn_mixer": 1, "attention_mixer": 1, "sample": 1, "copies": 1, "mtp": 1}
    assert {name: each.calls for name, each in prefill.operators.items()} == {
        "products": 1, "gdn_mixer": 1, "other": 1}
    assert all(abs(each.seconds - 40e-9) < 1e-12 for each in decode.operators.values())
    assert abs(decode.seconds - 1040e-9) < 1e-12 and abs(decode.between - 760e-9) < 1e-12


class Card:
    """Stands for a GPU's marks, and for torch's profiler there, whose kernels are what was marked and computed."""

    def __init__(self, *_: object, **__: object) -> None:
        self.profiler = self.kineto_results = self
        self.names = list[str]()

    def put(self, name: str) -> None:
        self.names.append(f"k_mark_{name}")

    def start(self) -> None:
        self.names.append("a kernel of before")

    def stop(self) -> None:
        self.names.append("k_choose")

    def events(self) -> list[Any]:
        return [SimpleNamespace(name=lambda name=name: name, start_ns=lambda at=at: 10 * at,
                                end_ns=lambda at=at: 10 * at + 5, is_user_annotation=lambda: False,
                                device_type=lambda: SimpleNamespace(name="CUDA")) for at, name in enumerate(self.names)]


def test_a_card_s_steps_are_marked_and_stay_as_they_are(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    card, runtime = Card(), cast(Any, llm.runtime)
    step, serving = runtime.step, runtime.mtp_runner.serving
    monkeypatch.setattr(operator_profile, "_OnHost", operator_profile._OnCard)
    monkeypatch.setattr(operator_profile, "Marks", lambda device: card)
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: card)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with llm.profile() as profile:
        assert runtime.step is step  # the native one
        runtime.step = lambda batch: (card.names.append("k_gdn_few"), step(batch))[1]
        answers(llm, 5)
        runtime.step = step
    assert runtime.mtp_runner.serving == serving and runtime.profiler is None
    assert total(profile, "gdn_mixer") == sum(phase.steps for phase in profile.phases.values())
    marks = [name.removeprefix("k_mark_") for name in card.names if name.startswith("k_mark_")]
    assert {"prefill", "decode", "sample", "mtp", "model"} <= set(marks)
    assert all(after == "model" for mark, after in pairwise(marks) if mark in ("sample", "mtp")), marks


def test_names_of_all_kernels_of_a_step_say_their_operator() -> None:
    shapes = [packed_mixture(), packed_shapes("4B"), *map(shapes_of, MODELS)]
    texts = [text for each in shapes for text in (
        each.source(), prompts.source(each), mtp.source(each, 1024), adapters.source(each))]
    texts.append(source())
    pattern = r"__global__ void[^(]*\([^)]*\)?\s*(\w+)\(const __grid"
    kernels = {name for text in texts for name in re.findall(pattern, text)}
    assert len(kernels) > 20
    assert not {name for name in kernels if operator_of(name) == "other"}
    assert all(mark_of(f"k_mark_{name}") == name for name in NAMES) and mark_of("k_gdn_few") is None
