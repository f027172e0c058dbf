"""Mixtures of experts on a GPU: as the oracle in float64 at odd shapes, a token's bits its own, few tokens and many."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import drain, greedy, numbers, serve
from test_card_sources import compiled
from test_cuda_kernels import CURSORS, NAN, batch_of, check_alone, check_replays, error, fill, randn, served
from test_cuda_source import BLOCK, MULTIPROCESSOR, members
from test_cuda_verify import Known, plain_of
from torch import Tensor

from deltic.config import EngineConfig, ExpertsConfig, ModelConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import RandomModel, load
from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.errors import ConfigError
from deltic.ops import reference
from deltic.ops.cuda import arguments
from deltic.ops.cuda.card import CARDS, Card
from deltic.ops.cuda.driver import Module, headers
from deltic.ops.cuda.moe import ALL_REAL, ExpertsShape, MoeOp, RealTokens, shape_of
from deltic.ops.types import MlpWeights, MoeWeights
from deltic.params import SamplingParams
from deltic.runner.input_batch import build
from deltic.runner.model_runner import ModelRunner
from deltic.spec_decode.draft_length import FixedDraftLength

UNITS_APART = True
needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
TRUE = ExpertsShape(2048, 512, 256, 8, True, True)
SHAPES = [ExpertsShape(192, 40, 5, 1, True, True), ExpertsShape(192, 40, 5, 3, True, True),
          ExpertsShape(64, 24, 5, 5, False, False), ExpertsShape(128, 88, 60, 9, True, True),
          ExpertsShape(64, 8, 60, 60, True, False), ExpertsShape(576, 200, 60, 1, False, True),
          ExpertsShape(320, 136, 300, 12, True, True)]


def source(shape: ExpertsShape) -> str:
    return headers("input", "experts", "grouped") + "".join(shape.entries())


# Without a card


@pytest.mark.parametrize("name", ["ExpertsGate", "ExpertsDown", "Route", "Group", "Grouped", "Combine"])
def test_struct_layouts(name: str) -> None:
    found = [name for name, *_ in getattr(arguments, f"{name}Args")._fields_]
    assert found == members(name)


@pytest.mark.parametrize("shape", [TRUE, replace(TRUE, hidden=4096, size=1024, count=512, per_token=10), *SHAPES])
def test_blocks_fit(shape: ExpertsShape) -> None:
    shape = replace(shape, card=CARDS["sm_90"])
    assert shape.known and shape.shared_memory <= BLOCK
    _, slots, first = shape.gate_plan(1, 132)
    then, second = shape.down_plan(1, 132)
    assert slots >= 2 and then >= 2 and 2 * max(slots, then) * 8 <= 512, "the barriers have no room"
    if shape.hidden <= 2048:
        assert first + second + 2048 <= MULTIPROCESSOR, "the second kernel has no room beside the first"


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
@pytest.mark.parametrize("shape", [TRUE, *SHAPES])
def test_blocks_fit_every_card(shape: ExpertsShape, card: Card) -> None:
    shape = replace(shape, card=card)
    assert shape.known and shape.shared_memory <= card.shared_memory
    for tokens in range(1, shape.most + 1):
        (_, slots, first), (then, second) = shape.gate_plan(tokens, 82), shape.down_plan(tokens, 82)
        assert min(slots, then) >= (1 if tokens == 1 else 2) and max(first, second) <= card.max_shared_bytes


def test_unsupported_shapes() -> None:
    for change in ({"hidden": 100}, {"size": 44}, {"count": 2000}, {"per_token": 100}):
        assert not replace(TRUE, **change).known


@pytest.mark.slow
@pytest.mark.parametrize("shape", [TRUE, SHAPES[2], SHAPES[4]], ids=str)
def test_sources_compile(shape: ExpertsShape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for card in CARDS.values():
        assert compiled(source(replace(shape, card=card)), card.target)[:4] == b"\x7fELF"


# The operation


def weights_of(shape: ExpertsShape) -> MoeWeights:
    def part(seed: int) -> MlpWeights:
        return MlpWeights(randn(2 * shape.size, shape.hidden, seed=seed, dtype=torch.bfloat16) * shape.hidden**-0.5,
                          randn(shape.hidden, shape.size, seed=seed + 1, dtype=torch.bfloat16) * shape.size**-0.5)

    router = randn(shape.count + shape.shared, shape.hidden, seed=1, dtype=torch.bfloat16) * shape.hidden**-0.5
    parts = [part(10 + 2 * index) for index in range(shape.count + shape.shared)]
    return MoeWeights(router, tuple(parts[:shape.count]), parts[-1] if shape.shared else None, shape.per_token,
                      shape.normalised)


def wide(weights: MoeWeights) -> MoeWeights:
    def of(part: MlpWeights) -> MlpWeights:
        assert isinstance(part.gate_up, Tensor) and isinstance(part.down, Tensor)
        return MlpWeights(part.gate_up.double(), part.down.double())

    assert isinstance(weights.router, Tensor)
    return replace(weights, router=weights.router.double(), experts=tuple(map(of, weights.experts)),
                   shared=weights.shared and of(weights.shared))


class Mixture:
    """One layer on the card."""

    def __init__(self, shape: ExpertsShape) -> None:
        self.shape, self.weights = shape, weights_of(shape)
        assert shape_of(self.weights) == shape
        device = torch.device("cuda", torch.cuda.current_device())
        self.experts = MoeOp(Module(source(shape), device), shape, [self.weights], 24)
        self.scale, self.wide = randn(shape.hidden, seed=3) * 0.1 + 1, wide(self.weights)

    def input(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Residual, its norm [T, H] float64, and the router's products [T, n] float32."""
        residual = randn(tokens, self.shape.hidden, seed=tokens) * 2
        normed = residual.double() * (residual.double().square().mean(-1, True) + 1e-6).rsqrt() * self.scale.double()
        assert isinstance(self.weights.router, Tensor)
        return residual, normed, (normed @ self.weights.router.double().t()).float()

    def few(self, residual: Tensor, logits: Tensor, real: RealTokens = ALL_REAL) -> Tensor:
        found = residual.clone()
        self.experts.gemv_rows(self.weights, found, self.scale, 1e-6, logits.contiguous(), real)
        return found


@pytest.fixture(scope="module", params=[*SHAPES, TRUE], ids=str)
def mixture(request: pytest.FixtureRequest) -> Mixture:
    return Mixture(request.param)


@needs_card
@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 9, 16])
def test_few_tokens(mixture: Mixture, tokens: int) -> None:
    residual, normed, logits = mixture.input(tokens)
    wanted = reference.moe(normed, mixture.wide)
    found = mixture.few(residual, logits)
    assert error(found.double() - residual.double(), wanted) < 6e-3
    for token in range(tokens):
        alone = mixture.few(residual[token:token + 1], logits[token:token + 1])
        assert torch.equal(alone[0], found[token]), "a token's sums depend on the batch"
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(1)).cuda()
    assert torch.equal(mixture.few(residual[order], logits[order]), found[order])


@needs_card
@pytest.mark.parametrize("tokens", [1, 17, 64, 300, 1500])
def test_many_tokens(mixture: Mixture, tokens: int) -> None:
    _, normed, _ = mixture.input(tokens)
    x = normed.bfloat16()
    sample = sorted({0, tokens // 3, tokens - 1})
    found = mixture.experts.gemm_rows(mixture.weights, x)
    wanted = reference.moe(x[sample].double(), mixture.wide)
    assert bool(found.isfinite().all()) and error(found[sample], wanted) < 8e-3
    assert not bool(mixture.experts._counts.any())
    again = mixture.experts.gemm_rows(mixture.weights, x)
    assert torch.equal(again, found), "the order in which pairs arrive is seen"
    some = mixture.experts.gemm_rows(mixture.weights, x[:tokens // 2 + 1].contiguous())
    assert error(some, found[:tokens // 2 + 1]) < 3e-3


@needs_card
@pytest.mark.parametrize("tokens", [300, 700, 1024, 2048, 4096])
def test_many_tokens_on_all_multiprocessors(tokens: int) -> None:
    """Two blocks on each of them, where tiles are small enough: the same bits, however they fall."""
    device = torch.device("cuda", torch.cuda.current_device())
    weights = weights_of(TRUE)
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    experts = MoeOp(Module(source(TRUE), device), TRUE, [weights], multiprocessors)
    x = randn(tokens, TRUE.hidden, seed=tokens).bfloat16()
    wanted = experts.gemm_rows(weights, x)
    assert sum(not torch.equal(experts.gemm_rows(weights, x), wanted) for _ in range(20)) == 0


def rows(*chunks: int, filling: int) -> RealTokens:
    """Rows of so many tokens, and others that only fill up."""
    starts = [sum(chunks[:row]) for row in range(len(chunks) + 1)]
    return RealTokens(torch.tensor([len(chunks)], device="cuda"),
                torch.tensor(starts + starts[-1:] * filling, device="cuda"))


@needs_card
@pytest.mark.parametrize(("tokens", "real"), [(4, (1, 1, 1)), (8, (1, 3, 1)), (16, (1,) * 9), (16, (2, 1))], ids=str)
def test_padding_chooses_no_experts(mixture: Mixture, tokens: int, real: tuple[int, ...]) -> None:
    residual, normed, logits = mixture.input(tokens)
    count, who = sum(real), rows(*real, filling=3)
    found = mixture.few(residual, logits, who)
    assert torch.equal(found[:count], mixture.few(residual[:count], logits[:count]))
    assert torch.equal(found[count:], residual[count:])
    x = normed.bfloat16().repeat(8, 1)
    count, who = len(x) - tokens - 1, rows(1, len(x) - tokens - 2, filling=2)
    given = mixture.experts.gemm_rows(mixture.weights, x, who)
    assert not bool(given[count:].any()) and not bool(mixture.experts._counts.any())
    assert error(given[:count], mixture.experts.gemm_rows(mixture.weights, x[:count].contiguous())) < 3e-3


@needs_card
def test_nan_token_changes_no_other_token(mixture: Mixture) -> None:
    residual, normed, logits = mixture.input(9)
    well = mixture.few(residual, logits)
    for bad in (NAN, float("inf")):
        sick, told = residual.clone(), logits.clone()
        sick[4, 7], told[4] = bad, NAN
        found = mixture.few(sick, told)
        others = [token for token in range(9) if token != 4]
        assert torch.equal(found[others], well[others]) and not bool(found[4].isfinite().all())
        x = normed.bfloat16().repeat(4, 1)
        healthy = mixture.experts.gemm_rows(mixture.weights, x)
        x[20, 7] = bad
        found = mixture.experts.gemm_rows(mixture.weights, x)
        others = [token for token in range(36) if token != 20]
        assert torch.equal(found[others], healthy[others]) and not bool(found[20].isfinite().all())


@needs_card
def test_ties_choose_the_lower_expert() -> None:
    mixture = Mixture(ExpertsShape(64, 8, 60, 4, False, True))
    residual, _, logits = mixture.input(3)
    logits[:] = -5
    logits[1, 50], logits[2, [7, 33, 34, 40, 41]] = -1, 2
    found = mixture.few(residual, logits)
    for token, chosen in ((0, [0, 1, 2, 3]), (1, [0, 1, 2, 50]), (2, [7, 33, 34, 40])):
        others = logits.clone()
        others[token] = torch.where(torch.isin(torch.arange(60), torch.tensor(chosen)).cuda(), logits[token], -1e30)
        assert torch.equal(mixture.few(residual, others)[token], found[token])


# Whole steps


@pytest.fixture(scope="module", params=[ExpertsConfig(5, 5, 40, 40), ExpertsConfig(60, 9, 40, 40)], ids=str)
def runtime(request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    config = replace(ModelConfig.preset("qwen3.5-35b-a3b", 4), hidden_size=512, vocab_size=5003, experts=request.param)
    yield load(RandomModel(shape=config), EngineConfig(
        device="cuda", dtype="bfloat16", memory="2GiB", max_batch=64, max_context=4096, speculate="off"))
    torch.cuda.empty_cache()


@needs_card
@pytest.mark.parametrize("done", CURSORS, ids=lambda done: f"{len(done)}-{done[0]}")
@torch.inference_mode()
def test_steps(runtime: ModelRunner, done: list[int]) -> None:
    """As torch's; which experts a token passes, rounding decides now and then."""
    fill(runtime)
    batch = batch_of(done, len(done))
    wanted = runtime.decoder.logits(runtime.decoder.forward(batch, runtime.views))
    fill(runtime)
    found = served(runtime)(replace(batch, memo={}))
    assert found is not None
    assert runtime.config.experts
    assert error(found[0], wanted) < (5e-2 if runtime.config.experts.per_token == 5 else 0.2)


@needs_card
@torch.inference_mode()
def test_token_bits_do_not_depend_on_batch(runtime: ModelRunner) -> None:
    check_alone(runtime)


@needs_card
@pytest.mark.parametrize("rows", [1, 5, 40])
@torch.inference_mode()
def test_replayed_steps(runtime: ModelRunner, rows: int) -> None:
    check_replays(runtime, rows)


@needs_card
@torch.inference_mode()
def test_prompts(runtime: ModelRunner) -> None:
    plan = StepPlan(tuple(PlannedRow(tuple((7 * row + 3 * i) % 5000 for i in range(90 + 70 * row)), 0,
                          tuple(range(20 * row, 20 * row + 20)), row, 1) for row in range(3)))
    batch = build(plan, runtime.pools.device)
    wanted = runtime.decoder.logits(runtime.decoder.forward(batch, runtime.views))
    found = served(runtime)(replace(batch, memo={}))
    assert found is not None and runtime.config.experts
    assert error(found[0], wanted) < (5e-2 if runtime.config.experts.per_token == 5 else 0.3)


# Experts that are not all on the card


@needs_card
@torch.inference_mode()
def test_offloaded_experts() -> None:
    """The same bits, whoever lies where, and while experts change places."""
    config = replace(ModelConfig.preset("qwen3.5-35b-a3b", 4), hidden_size=512, vocab_size=5003,
                     experts=ExpertsConfig(60, 9, 40, 40))
    options = EngineConfig(device="cuda", dtype="bfloat16", memory="1GiB", max_batch=64, max_context=4096,
                           speculate="off")
    beside = replace(options, expert_cap=1, expert_compute="card")
    whole = load(RandomModel(shape=config), options)
    wanted: dict[int, list[Tensor]] = {}
    for cap in (60, 1, 15):
        some = whole if cap == 60 else load(RandomModel(shape=config), replace(beside, expert_cap=cap))
        for rows in (1, 5, 12, 40, 3):
            long = rows == 3
            plan = StepPlan(
                tuple(
                    PlannedRow(
                        tuple(range(7 + row, 97 + row)) if long else (7 + row,),
                        0 if long else 20 + row,
                        tuple(range(6 * row, 6 * row + 6)),
                        row,
                        1,
                    )
                    for row in range(rows)
                )
            )
            fill(some)
            found = []
            for _ in range(12):
                found.append(some.run(build(plan, some.pools.device)).clone())
                torch.cuda.synchronize()
            known = wanted.setdefault(rows, found)
            assert all(map(torch.equal, found, known)), (cap, rows)
        if cap == 60:
            assert some.experts is None
            continue
        assert some.experts
        store, seen = some.experts.store, some.experts.statistics()
        assert store.slots == (cap,) * 4 and store.nbytes == 4 * cap * 3 * 40 * 512 * 2
        assert all(seen.misses) and all(seen.hits) and seen.promotions and seen.refreshes
        assert seen.bytes == (sum(seen.misses) + seen.promotions) * 3 * 40 * 512 * 2
        some.experts.close()
    torch.cuda.empty_cache()


@needs_card
def test_budget_without_room_for_experts_is_refused() -> None:
    config = replace(ModelConfig.preset("qwen3.5-35b-a3b", 4), hidden_size=512, vocab_size=5003,
                     experts=ExpertsConfig(60, 9, 40, 40))
    options = EngineConfig(device="cuda", dtype="bfloat16", memory="256MiB", max_batch=4, max_context=256)
    for change, message in (({"expert_memory": "100KiB"}, "no room for one expert of each layer"),
                            ({"expert_cap": 1, "dtype": "float32"}, "only with dtype bfloat16"),
                            ({"expert_cap": 1, "debug_layers": True}, "leave out `ops` and `debug_layers`")):
        with pytest.raises(ConfigError, match=message):
            load(RandomModel(shape=config), replace(options, **change))
    for shape, message in ((replace(config, hidden_size=200), "do not know experts of these sizes"),
                           (replace(config, experts=ExpertsConfig(60, 9, 40, 80)), "own kernels read weights")):
        with pytest.raises(ConfigError, match=message):
            load(RandomModel(shape=shape), replace(options, expert_cap=1))


# Drafts


@needs_card
@pytest.mark.parametrize("cap", [None, 7])
def test_same_answers_with_drafts(cap: int | None) -> None:
    """To the bit, with a head that is a mixture itself."""
    config = replace(ModelConfig.preset("qwen3.5-35b-a3b", 4), hidden_size=512, vocab_size=5003,
                     experts=ExpertsConfig(60, 9, 40, 40))
    loaded = load(RandomModel(shape=config, head=True, initializer_range=0.05), EngineConfig(
        device="cuda", dtype="bfloat16", memory="1GiB", max_batch=16, max_context=2048, speculate="mtp:4",
        expert_cap=cap, expert_compute="card" if cap else "auto"))
    assert loaded.capabilities.verifies, "the kernels do not serve this model, or not its head"
    requests = [replace(greedy(numbers(seed, 30 + seed, 5003), 40, str(seed)), output=SamplingParams(
        temperature=0.8 * (seed % 2), seed=seed, max_tokens=40, ignore_eos=True)) for seed in range(3)]
    wanted = {name: answer.tokens for (name, _), answer in serve(plain_of(loaded), requests).items()}
    for drafter in (Known(wanted), None):
        engine = Engine(loaded, drafter, FixedDraftLength(4))
        for request in requests:
            engine.add(request)
        assert {name: answer.tokens for (name, _), answer in drain(engine).items()} == wanted
        assert engine.speculator.drafter and sum(engine.speculator.stats.drafted_at) > 30
    torch.cuda.empty_cache()
