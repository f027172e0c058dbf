"""Experts beside a GPU that the host computes: sums as with the card alone up to rounding, a token's bits its own,
recorded steps, exchanges meanwhile, and a host that does not answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import drain, greedy, numbers, serve
from test_card_sources import compiled
from test_cuda_experts import SHAPES, TRUE, rows, weights_of, wide
from test_cuda_kernels import NAN, batch_of, check_alone, check_replays, error, fill, randn, served
from test_cuda_source import members
from torch import Tensor

from deltic.config import EngineConfig, ExpertsConfig, ModelConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import RandomModel, load
from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.ops import reference
from deltic.ops.cpu import missing
from deltic.ops.cpu.experts import OffloadedExperts
from deltic.ops.cpu.library import library
from deltic.ops.cuda import arguments, expert_offload
from deltic.ops.cuda.card import CARDS
from deltic.ops.cuda.driver import Module, headers
from deltic.ops.cuda.expert_offload import HostExperts, PinnedExpertStore, hosted_experts
from deltic.ops.cuda.moe import ALL_REAL, ExpertsShape, MoeOp, RealTokens, shape_of
from deltic.ops.types import MoeWeights
from deltic.runner.expert_offload import host_share
from deltic.runner.input_batch import build
from deltic.runner.model_runner import ModelRunner

UNITS_APART = True
needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
HOSTED = [replace(shape, host=True) for shape in (*SHAPES, TRUE)]


def source(shape: ExpertsShape) -> str:
    return headers("input", *shape.files) + "".join(shape.entries())


# Without a card


@pytest.mark.parametrize("name", ["AskHost", "AddHost"])
def test_struct_layouts(name: str) -> None:
    assert [name for name, *_ in getattr(arguments, f"{name}Args")._fields_] == members(name)


@pytest.mark.skipif(bool(missing()), reason=str(missing()))
def test_mailbox_addresses() -> None:
    threads = OffloadedExperts([torch.zeros(3, 3 * 8 * 64, dtype=torch.bfloat16)], 64, 2, (1, 0))
    threads.counts[0] = 1
    threads.ask(0, 1)
    host = HostExperts(threads, torch.device("cpu"), 0.25)
    given = dict.fromkeys(("x", "scale", "logits", "weights", "count", "starts"))
    asked = arguments.AskHostArgs(layer=3, eps=1e-6, tokens=5, first=0, **host.request, **given)
    added = arguments.AddHostArgs(y=None, hidden=64, **host.answer)
    for name in ("counts", "experts", "shares", "factors", "input"):
        assert getattr(asked, name) == getattr(threads, name).data_ptr()
    assert (asked.request, asked.answer) == tuple(word.data_ptr() for word in threads.words)
    assert (added.answer, added.sums, added.limit) == (asked.answer, threads.sums.data_ptr(), 250_000_000)
    assert host.computed() == 0 and threads.computed() == 1
    assert host._state.tolist() == [1, *[0] * 19] and added.state == asked.state == host._state.data_ptr()
    threads.close()


def test_resident_models_have_no_host_kernels() -> None:
    for shape in HOSTED:
        plain = replace(shape, host=False)
        assert "_host(" in source(shape) and "_host(" not in source(plain)
        assert [*plain.gemv_entries()] == [text.replace(", true>(a)", ">(a)") for text in shape.gemv_entries()][:4]
        assert shape.ring_offset == plain.ring_offset and shape.gate_plan(5, 132) == plain.gate_plan(5, 132)


@pytest.mark.slow
@pytest.mark.parametrize("shape", HOSTED, ids=str)
def test_sources_compile(shape: ExpertsShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for card in CARDS.values():
        assert compiled(source(replace(shape, card=card)), card.target)[:4] == b"\x7fELF"


def test_host_experts_are_spread_evenly() -> None:
    for share in (0.0, 0.1, 0.4, 0.65, 1.0):
        found = hosted_experts(5, 256, share)
        assert (found == hosted_experts(5, 256, share)).all()
        assert (abs(found.mean(1) - share) < 0.02).all(), share
        for first in range(0, 256, 32):
            assert abs(found[2, first:first + 32].mean() - share) < 0.1
    assert not hosted_experts(3, 60, 0.0).any() and hosted_experts(3, 60, 1.0).all()


def test_host_share() -> None:
    assert host_share(100e9, 25e9) == 0.8 and host_share(5e9, 55e9) == 0.0
    assert host_share(10e9, 90e9) == 0.1


# The operation


def store_of(weights: MoeWeights, shape: ExpertsShape, slots: int, share: float, patience: float | None = None
             ) -> PinnedExpertStore:
    """Two layers, of which the first has the experts in the opposite order. share 0: the card reads all."""
    device = torch.device("cuda", torch.cuda.current_device())
    store = PinnedExpertStore(2, shape.count, shape.size, shape.hidden, device, 1)
    experts: list[Any] = list(weights.parts[:shape.count])
    for layer, parts in enumerate((experts[::-1], experts)):
        both, down = (torch.stack([getattr(part, name) for part in parts]) for name in ("gate_up", "down"))
        for name, stack in (("gate", both[:, :shape.size]), ("up", both[:, shape.size:]), ("down", down)):
            assert store.take(f"model.layers.{layer}.mlp.experts.{name}_proj.weight", stack)
    store.fill(slots)
    if share:
        threads = OffloadedExperts(
            store.matrices, shape.hidden, shape.per_token, (3, library().deltic_best_level()), pinned=True
        )
        store.share(HostExperts(threads, device, patience), share)
    return store


class Mixture:
    """A layer of which `slots` experts are on the card, and a share of the others is the host's."""

    def __init__(self, shape: ExpertsShape, share: float, slots: int = 1, patience: float | None = None) -> None:
        plain = weights_of(shape)
        self.shape, self.wide = replace(shape, host=share > 0), wide(plain)
        self.store = store_of(plain, shape, slots, share, patience)
        self.weights = replace(plain, experts=self.store.pools()[1])
        assert shape_of(self.weights) == self.shape
        device = torch.device("cuda", torch.cuda.current_device())
        self.experts = MoeOp(Module(source(self.shape), device), self.shape, [self.weights], 24)
        self.scale = randn(shape.hidden, seed=3) * 0.1 + 1

    def input(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Residual, its norm [T, H] float64, and the router's products [T, n] float32."""
        residual = randn(tokens, self.shape.hidden, seed=tokens) * 2
        normed = residual.double() * (residual.double().square().mean(-1, True) + 1e-6).rsqrt() * self.scale.double()
        assert isinstance(self.weights.router, Tensor)
        return residual, normed, (normed @ self.weights.router.double().t()).float()

    def few(self, residual: Tensor, logits: Tensor, real: RealTokens = ALL_REAL) -> Tensor:
        if self.store.host:
            self.store.host.cpu_experts.wake()
        found = residual.clone()
        self.experts.gemv_rows(self.weights, found, self.scale, 1e-6, logits.contiguous(), real)
        torch.cuda.synchronize()
        return found

    @property
    def threads(self) -> OffloadedExperts:
        assert self.store.host
        return self.store.host.cpu_experts


@pytest.fixture(scope="module", params=[(shape, share) for shape in (*SHAPES, TRUE) for share in (1.0, 0.5)], ids=str)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Mixture, Mixture]]:
    """By the host, and by the card alone."""
    shape, share = request.param
    both = Mixture(shape, share), Mixture(shape, 0.0)
    yield both
    both[0].store.close()


@needs_card
@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 9, 16])
def test_few_tokens(pair: tuple[Mixture, Mixture], tokens: int) -> None:
    host, card = pair
    residual, normed, logits = host.input(tokens)
    before = host.threads.computed()
    found, other = host.few(residual, logits), card.few(residual, logits)
    if host.shape.per_token > 1 and bool(host.store._hosted.all()):
        assert host.threads.computed() > before, "nobody asked the host"
    assert error(found.double() - residual.double(), other.double() - residual.double()) < 4e-3
    assert error(found.double() - residual.double(), reference.moe(normed, host.wide)) < 6e-3
    for token in range(tokens):
        alone = host.few(residual[token:token + 1], logits[token:token + 1])
        assert torch.equal(alone[0], found[token]), "a token's sums depend on the batch"
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(1)).cuda()
    assert torch.equal(host.few(residual[order], logits[order]), found[order])


@needs_card
@pytest.mark.parametrize("tokens", [1, 5, 16])
def test_no_request_without_host_experts(tokens: int) -> None:
    shape = SHAPES[3]
    host, card = (Mixture(shape, share, slots=shape.per_token + 3) for share in (1.0, 0.0))
    residual, _, logits = host.input(tokens)
    logits[:, shape.per_token + 3:shape.count] = -1e30
    assert torch.equal(host.few(residual, logits), card.few(residual, logits))
    assert host.threads.computed() == 0 and host.threads.request[0] == 0
    if tokens > 1:  # one of them does
        logits[1, shape.count - 1] = 1e3
        found, other = host.few(residual, logits), card.few(residual, logits)
        others = [token for token in range(tokens) if token != 1]
        assert torch.equal(found[others], other[others]) and host.threads.computed() == 1
        assert error(found - residual, other - residual) < 4e-3
    host.store.close()


@needs_card
def test_host_and_gpu_experts_are_counted() -> None:
    host, card = (Mixture(SHAPES[3], share) for share in (0.5, 0.0))
    for tokens in (1, 16, 7):
        residual, _, logits = host.input(tokens)
        host.few(residual, logits)
        card.few(residual, logits)
    assert bool(host.store._wanted[1].any()) and torch.equal(host.store._wanted, card.store._wanted)
    host.store.close()


@needs_card
@pytest.mark.parametrize(("tokens", "real"), [(4, (1, 1, 1)), (8, (1, 3, 1)), (16, (1,) * 9), (16, (2, 1))], ids=str)
def test_padding_chooses_no_experts(pair: tuple[Mixture, Mixture], tokens: int, real: tuple[int, ...]) -> None:
    host, _ = pair
    residual, _, logits = host.input(tokens)
    count = sum(real)
    found = host.few(residual, logits, rows(*real, filling=3))
    assert torch.equal(found[:count], host.few(residual[:count], logits[:count]))
    assert torch.equal(found[count:], residual[count:])


@needs_card
def test_nan_token_changes_no_other_token(pair: tuple[Mixture, Mixture]) -> None:
    host, _ = pair
    residual, _, logits = host.input(9)
    well = host.few(residual, logits)
    for bad in (NAN, float("inf")):
        sick, told = residual.clone(), logits.clone()
        sick[4, 7], told[4] = bad, NAN
        found = host.few(sick, told)
        others = [token for token in range(9) if token != 4]
        assert torch.equal(found[others], well[others]) and not bool(found[4].isfinite().all())


@needs_card
def test_silent_host_fails_only_its_tokens() -> None:
    shape = SHAPES[3]
    mixture = Mixture(shape, 1.0, slots=shape.per_token, patience=0.05)
    residual, _, logits = mixture.input(5)
    logits[2, shape.per_token:shape.count] = -1e30
    well, own = mixture.few(residual, logits), [0, 1, 3, 4]
    of = mixture.threads
    of.close()
    for turn in range(3):  # after the first time nobody waits, nor writes to the mailbox
        found = mixture.few(residual, logits)
        assert bool(found[own].isnan().all()) and torch.equal(found[2], well[2]), turn
        assert of.request[0] == of.answer[0] + 1
    of.answer[0] = of.request[0]  # it was only late
    assert bool(mixture.few(residual, logits)[own].isnan().all()) and of.request[0] == of.answer[0]
    mixture.few(residual, logits)
    assert of.request[0] == of.answer[0] + 1, "the host is not asked again"


# Whole steps


CONFIG = replace(ModelConfig.preset("qwen3.5-35b-a3b", 4), hidden_size=512, vocab_size=5003)
OPTIONS = {"device": "cuda", "dtype": "bfloat16", "memory": "2GiB", "max_batch": 64, "max_context": 4096,
           "speculate": "off", "threads": 3}


def loaded(experts: ExpertsConfig, cap: int, compute: str, **changes: Any) -> ModelRunner:
    """With random weights."""
    options = EngineConfig(**{**OPTIONS, "expert_cap": cap, "expert_compute": compute, **changes})
    return load(RandomModel(shape=replace(CONFIG, experts=experts), initializer_range=0.05), options)


ALL_PASS, SOME_PASS = ExpertsConfig(5, 5, 40, 40), ExpertsConfig(60, 9, 40, 40)


@pytest.fixture(scope="module")
def runtimes() -> Iterator[tuple[ModelRunner, ModelRunner]]:
    """By the host and by the card, of experts that all tokens pass, so that rounding changes no choices."""
    both = tuple(loaded(ALL_PASS, 2, compute, expert_refresh=1 << 20) for compute in ("host", "card"))
    yield both[0], both[1]
    for runtime in both:
        assert runtime.experts
        runtime.experts.close()
    torch.cuda.empty_cache()


def wake(runtime: ModelRunner) -> None:
    """As `ModelRunner.run` does."""
    assert runtime.experts
    runtime.experts.store.begin_step()


@needs_card
@pytest.mark.parametrize("tokens", [1, 5, 16])
@torch.inference_mode()
def test_steps(runtimes: tuple[ModelRunner, ModelRunner], tokens: int) -> None:
    found = []
    for runtime in runtimes:
        fill(runtime)
        wake(runtime)
        step = served(runtime)(batch_of([16 * row + row for row in range(tokens)], tokens))
        assert step
        found.append(step[0].clone())
    difference = error(found[0], found[1])
    assert difference < 5e-2
    if tokens == 16:
        assert difference and bool((found[0].argmax(-1) == found[1].argmax(-1)).float().mean() > 0.7)


@needs_card
@torch.inference_mode()
def test_token_bits_do_not_depend_on_batch(runtimes: tuple[ModelRunner, ModelRunner]) -> None:
    wake(runtimes[0])
    check_alone(runtimes[0])


@needs_card
@pytest.mark.parametrize("rows", [1, 5, 12])
@torch.inference_mode()
def test_replayed_steps(runtimes: tuple[ModelRunner, ModelRunner], rows: int) -> None:
    check_replays(runtimes[0], rows)


@needs_card
@torch.inference_mode()
def test_large_steps_run_on_the_gpu(runtimes: tuple[ModelRunner, ModelRunner]) -> None:
    """To the bit."""
    found, before = [], [runtime.experts.store.statistics().computed for runtime in runtimes if runtime.experts]
    for runtime in runtimes:
        plan = StepPlan(tuple(PlannedRow(tuple(range(7 + row, 97 + row)), 0, tuple(range(6 * row, 6 * row + 6)), row, 1)
                          for row in range(3)))
        fill(runtime)
        found.append(runtime.run(build(plan, runtime.pools.device)).clone())
    assert torch.equal(found[0], found[1])
    assert before == [runtime.experts.store.statistics().computed for runtime in runtimes if runtime.experts]


@needs_card
@torch.inference_mode()
def test_experts_change_places_while_steps_run() -> None:
    host, card = (loaded(SOME_PASS, 15, compute) for compute in ("host", "card"))
    assert host.experts and card.experts
    store = host.experts.store
    for count in (1, 5, 12):
        plan = StepPlan(tuple(PlannedRow((7 + row,), 20 + row, tuple(range(6 * row, 6 * row + 6)), row, 1)
                          for row in range(count)))
        found = []
        for runtime in (host, card):
            fill(runtime)
            for _ in range(30):
                logits = runtime.run(build(plan, runtime.pools.device)).clone()
                torch.cuda.synchronize()
                assert bool(logits.isfinite().all())
            fill(runtime)
            found.append(runtime.run(build(plan, runtime.pools.device)).clone())
        assert error(found[0], found[1]) < 0.3  # choices differ now and then
    seen, each = store.statistics(), 3 * 40 * 512 * 2
    assert seen.promotions and all(seen.misses) and all(seen.hits)
    assert seen.computed and seen.computed_bytes == seen.computed * each
    assert seen.bytes < (sum(seen.misses) + seen.promotions) * each, "what the host computed counts as read"
    assert isinstance(store, PinnedExpertStore)
    # who left is the host's again, who came is not
    gates, downs = (part[:, :-1, 0].cpu().numpy() == 0 for part in store._tables.parts[:2])
    assert (gates == ~store._residency.resident).all() and (downs == gates).all()
    for runtime in (host, card):
        assert runtime.experts
        runtime.experts.close()
    torch.cuda.empty_cache()


@needs_card
def test_answers(record_property: Any) -> None:
    """Greedy, beside those of the card: how far they agree is told, as rounding decides between tokens at random."""
    requests = [greedy(numbers(seed, 30 + seed, 5003), 40, str(seed), ignore_eos=True) for seed in range(6)]
    answers = []
    for compute in ("host", "card", "auto"):
        runtime = loaded(SOME_PASS, 15, compute)
        answers.append({name: answer.tokens for (name, _), answer in serve(runtime, requests).items()})
        assert runtime.experts
        runtime.experts.close()
    assert all(len(tokens) == 40 for found in answers for tokens in found.values())
    same = [sum(one == other for name in answers[0] for one, other in zip(answers[0][name], answers[1][name]))]
    record_property("tokens_as_the_cards", f"{same[0]} of {6 * 40}")
    print(f"{same[0]} of {6 * 40} greedy tokens as the card's")
    torch.cuda.empty_cache()


@needs_card
def test_dead_host_fails_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_offload, "HOST_TIMEOUT", 0.1)
    runtime = loaded(SOME_PASS, 5, "host")
    engine = Engine(runtime)
    for seed in range(3):
        engine.add(greedy(numbers(seed, 30, 5003), 200, str(seed), ignore_eos=True))
    for _ in range(10):
        engine.step()
    assert runtime.experts and isinstance(runtime.experts.store, PinnedExpertStore)
    runtime.experts.store.close()
    answers = drain(engine)
    assert len(answers) == 3 and all(answer.last.error for answer in answers.values())
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
