"""On a GPU: what a program or a researcher sees of the inside of a model is what a CPU shows. Hidden states, recurrent
states, hooks, logits of many prompts, logits processors, weights in memory, perplexity, expert statistics, profiles."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import moe_shape, numbers
from test_cuda_experts_host import CONFIG

import deltic
from deltic import LLM, RandomModel, SamplingParams, Session
from deltic.cli.eval import perplexity
from deltic.config import ExpertsConfig
from deltic.errors import RequestError
from deltic.loader.dummy import random_weights
from deltic.runner.operator_profile import Profile

if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)
TINY = Path(deltic.__file__).parent / "models" / "tiny"
NEAR = {"float32": 1e-3, "bfloat16": 6e-2}
"""The largest share by which numbers on the card may differ from those of a CPU in float32: those of bfloat16 are
computed by deltic's own kernels, but where layers are looked at one by one, which torch computes."""
TOKENS = list(numbers(0, 150, 500))
TEXT = "The capital of France is Paris. Ünïcode, too: 数字 1234567890.\n" * 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def session(device: str, dtype: str = "float32", model: Any = None, **options: Any) -> Session:
    return Session(model, dtype, **{"device": device, "memory": "128MiB", "max_context": 1024, "max_batch": 32,
                                    "token_budget": 64, **options})


@pytest.fixture(scope="module")
def ours() -> Session:
    """On the CPU."""
    return session("cpu")


@pytest.fixture(scope="module", params=NEAR)
def theirs(request: pytest.FixtureRequest) -> Session:
    """On the card, with the draft head where kernels of deltic serve it."""
    return session("cuda", request.param)


@pytest.fixture(autouse=True)
def _fresh(ours: Session) -> None:
    ours.reset()


def near(theirs: Session, wanted: torch.Tensor, found: torch.Tensor, what: object = "") -> None:
    """found lies on the card, in float32, and is what a CPU gives, by its norm."""
    assert found.is_cuda and found.dtype == torch.float32 and found.shape == wanted.shape, what
    off = float((found.cpu() - wanted).norm() / wanted.norm())
    assert off < NEAR[str(theirs.runtime.options.dtype)], f"{what}: {off}"


# Layers


def test_hidden_states(ours: Session, theirs: Session) -> None:
    """Read in parts, then of a single token, which no recorded graph may hide."""
    theirs.reset()
    for tokens in (TOKENS, TOKENS[:1]):
        wanted, found = ours.hidden_states(tokens), theirs.hidden_states(tokens)
        for layer, (one, other) in enumerate(zip(wanted, found, strict=True)):
            near(theirs, one, other, layer)
    near(theirs, ours.step(7), theirs.step(7))


def test_recurrent_states(ours: Session, theirs: Session) -> None:
    """At the start, after a prompt, and after drafts of which some were accepted, which lie in a replay ring."""
    theirs.reset()
    assert all(state.is_cuda and not state.any() for state in theirs.recurrent_states().values())
    ours.prefill(TOKENS)
    theirs.prefill(TOKENS)
    for accepted in (0, 3):
        if accepted:
            for one in (ours, theirs):
                one.verify(TOKENS[:5])
                one.accept(accepted)
        wanted, found = ours.recurrent_states(), theirs.recurrent_states()
        assert list(wanted) == list(found)
        for layer, state in wanted.items():
            near(theirs, state, found[layer], layer)
    for state in theirs.recurrent_states().values():
        state.zero_()  # a copy
    near(theirs, ours.step(3), theirs.step(3))


def test_hook_is_called_every_step(ours: Session, theirs: Session) -> None:
    """Also those that are replays of a graph without it; what it sees is finished, in whatever way it looks."""
    theirs.reset()
    theirs.prefill(TOKENS[:70])
    ours.prefill(TOKENS[:70])
    for token in (5, 6):  # the second one may be a replay
        theirs.step(token)
        ours.step(token)
    seen = list[tuple[int, torch.Tensor, torch.Tensor]]()
    with theirs.hook(lambda layer, output: seen.append((layer, output.clone(), output.cpu()))):
        found = theirs.step(7)
    near(theirs, ours.step(7), found)
    assert [layer for layer, *_ in seen] == [*range(-1, theirs.config.num_hidden_layers)]
    assert all(kept.is_cuda and torch.equal(kept.cpu(), there) for _, kept, there in seen)
    count = len(seen)
    near(theirs, ours.step(8), theirs.step(8))
    assert len(seen) == count


def test_hook_changes_hidden_states(ours: Session, theirs: Session) -> None:
    """What it returns may lie on the CPU, and be of another dtype."""
    theirs.reset()
    direction = torch.linspace(-1, 1, ours.config.hidden_size, dtype=torch.float64)

    def steer(layer: int, output: torch.Tensor) -> torch.Tensor | None:
        return output.cpu().double() + direction if layer == 1 else None

    logits = []
    for one in (ours, theirs):
        with one.hook(steer):
            logits.append(one.prefill(TOKENS[:90]))
    near(theirs, *logits)
    ours.reset()
    assert (ours.prefill(TOKENS[:90]) - logits[0]).norm() > 0.1 * logits[0].norm()


def test_failing_hook_keeps_the_session(ours: Session, theirs: Session) -> None:
    theirs.reset()
    for one in (ours, theirs):
        one.prefill(TOKENS[:20])
    with pytest.raises(ZeroDivisionError), theirs.hook(lambda *_: 1 / 0):  # type: ignore[arg-type]
        theirs.prefill(TOKENS[20:90])
    assert theirs.position == 20
    near(theirs, ours.step(3), theirs.step(3))


def test_layers_of_a_mixture_of_experts() -> None:
    """Weights in memory and a shape in place of files; torch computes each expert."""
    shape = moe_shape()
    weights = random_weights(shape, "float32", initializer_range=0.1)
    one, other = (session(device, weights=weights, config=shape) for device in ("cpu", "cuda"))
    near(other, one.hidden_states(TOKENS), other.hidden_states(TOKENS))
    near(other, one.step(3), other.step(3))


# Logits


@pytest.mark.parametrize("lengths", [(1,), (5, 140, 1, 17), (1,) * 20, (30,) * 9])
@pytest.mark.parametrize("all_logits", [False, True])
def test_logits_of_many_prompts(ours: Session, theirs: Session, lengths: tuple[int, ...], all_logits: bool) -> None:
    theirs.reset()
    for one in (ours, theirs):
        one.prefill(TOKENS[:7])
    rows = [numbers(3 + place, count, 500) for place, count in enumerate(lengths)]
    for wanted, found in zip(ours.batch_logits(rows, all_logits), theirs.batch_logits(rows, all_logits), strict=True):
        near(theirs, wanted, found, lengths)
    near(theirs, ours.step(3), theirs.step(3))
    theirs.runtime.cache.check()


@pytest.fixture(scope="module", params=NEAR)
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(device="cuda", dtype=request.param, memory="256MiB", max_context=1024, max_batch=8,
             speculate="off") as model:
        yield model
        model.worker.call(lambda engine: engine.check())


def answer(llm: LLM, prompt: list[int] = TOKENS[:40], **more: Any) -> list[int]:
    return list(llm.generate([prompt], GREEDY, **more)[0].sound().choices[0].tokens)


def test_logits_processors(llm: LLM) -> None:
    """They see finished logits in float32 on the CPU, and choose the token; another request goes on beside."""
    plain, seen = answer(llm), list[tuple[list[int], torch.Tensor]]()

    def look(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append((tokens, logits.clone()))
        return logits

    beside, others = answer(llm, [9, 8, 7]), list[list[int]]()
    thread = threading.Thread(target=lambda: others.append(answer(llm, [9, 8, 7])))
    thread.start()
    assert answer(llm, logits_processors=[look]) == plain
    thread.join(60)
    assert others == [beside]
    assert [tokens for tokens, _ in seen] == [[*TOKENS[:40], *plain[:count]] for count in range(len(plain))]
    assert all(logits.device.type == "cpu" and logits.dtype == torch.float32 for _, logits in seen)
    assert [int(logits.argmax()) for _, logits in seen] == plain

    def only(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        forbidden = torch.full_like(logits, -torch.inf).cuda()  # what it returns may lie anywhere
        forbidden[[11, 12]] = logits[[11, 12]].cuda()
        return forbidden

    assert set(answer(llm, logits_processors=[only])) <= {11, 12}


def test_perplexity(llm: LLM) -> None:
    with LLM(device="cpu", dtype="float32", memory="64MiB", max_context=1024) as one:
        wanted = perplexity(one, TEXT, 40, 20)
    found = perplexity(llm, TEXT, 40, 20)
    assert (found.scored, found.nbytes) == (wanted.scored, wanted.nbytes)
    assert abs(found.perplexity / wanted.perplexity - 1) < NEAR[str(llm.runtime.options.dtype)]


# Weights in memory


@pytest.mark.parametrize("dtype", NEAR)
def test_weights_in_memory(dtype: str) -> None:
    """On the card, given to a model there and to one on the CPU; the model keeps copies."""
    plain = session("cuda", dtype, speculate="off").prefill(TOKENS, all_logits=True)
    weights = {name: tensor.cuda() for name, tensor in load_file(TINY / "model.safetensors").items()}
    options: dict[str, Any] = {"weights": weights, "config": TINY / "config.json", "speculate": "off"}
    there, here = session("cuda", dtype, **options), session("cpu", **options)
    for tensor in weights.values():
        tensor.zero_()
    assert torch.equal(there.prefill(TOKENS, all_logits=True), plain)
    near(there, here.prefill(TOKENS, all_logits=True), plain)


# Experts


def test_expert_statistics() -> None:
    model = RandomModel(shape=replace(CONFIG, experts=ExpertsConfig(60, 9, 40, 40)), initializer_range=0.05)
    options: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "memory": "64MiB", "max_batch": 8,
                               "expert_cap": 20, "expert_compute": "card", "expert_refresh": 1}
    with LLM(model, **options) as llm:
        llm.generate([list(numbers(seed, 30, CONFIG.vocab_size)) for seed in range(3)], GREEDY)
        experts = llm.runtime.experts
        assert experts
        found = experts.statistics()
        layers = CONFIG.num_hidden_layers
        assert len(found.hits) == len(found.misses) == layers and min(found.hits) > 0 and sum(found.misses) > 0
        scores = experts.store.scores()
        assert len(scores) == layers and all(len(layer) == 60 and max(layer) > 0 for layer in scores)
    with pytest.raises(RequestError, match="layers cannot be looked at while experts lie beside a GPU"):
        Session(model, **options).hidden_states([1, 2, 3])


# Profiles


def shares(profile: Profile, phase: str) -> set[str]:
    """The operators that have taken time."""
    found = profile.phases[phase]
    assert found.steps > 0 and found.seconds > 0
    return {name for name, each in found.operators.items() if each.seconds > 0 and each.calls > 0}


def test_a_profile_of_kernels() -> None:
    """Of recorded steps, long prompts and drafts; nothing stays behind, and answers stay as they are."""
    prompts = [list(numbers(seed, 3 + 200 * seed, 500)) for seed in range(4)]
    with LLM(device="cuda", dtype="bfloat16", memory="256MiB", max_context=1024, max_batch=8, token_budget=256,
             prefix_cache=False, speculate="mtp:2") as llm:
        runtime: Any = llm.runtime
        wanted = [output.sound().choices[0].tokens for output in llm.generate(prompts, GREEDY)]
        kept = runtime.decoder, runtime.step, runtime.mtp_runner.serving
        with llm.profile() as profile:
            found = [output.sound().choices[0].tokens for output in llm.generate(prompts, GREEDY)]
        assert found == wanted
        assert (runtime.decoder, runtime.step, runtime.mtp_runner.serving, runtime.profiler) == (*kept, None)
    assert {"gdn_mixer", "attention_mixer", "products", "mtp"} <= shares(profile, "decode"), str(profile)
    assert {"gdn_mixer", "attention_mixer", "products"} <= shares(profile, "prefill"), str(profile)
    assert sum(phase.tokens for phase in profile.phases.values()) >= sum(map(len, prompts))
    assert "decode: " in str(profile)


def test_a_profile_of_a_session(theirs: Session) -> None:
    theirs.reset()
    with theirs.profile() as profile:
        theirs.prefill(TOKENS)
        for token in range(4):
            theirs.step(token)
    assert (profile.phases["prefill"].steps, profile.phases["decode"].steps) == (3, 4)
    assert shares(profile, "prefill") and shares(profile, "decode")
    busy = sum(each.seconds for each in profile.phases["decode"].operators.values())
    assert 0 < busy <= 2 * profile.phases["decode"].seconds
