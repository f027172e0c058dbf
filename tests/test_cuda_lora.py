"""On a GPU: adapters (LoRA) in decode steps. The kernels against float64, steps against the torch ops, and bits that do
not depend on the other rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)

from lora_cases import PREFIX, adapter, adapters_of, random_adapter, term, wanted
from support import drain, greedy, numbers

from deltic.config import EngineConfig
from deltic.engine.adapters import AdapterSet
from deltic.engine.engine import Engine
from deltic.engine.loading import RandomModel, load
from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.ops.adapters import Adapter, LowRank
from deltic.ops.cuda import adapters as lora
from deltic.ops.cuda.decode import DecodeStep
from deltic.ops.cuda.driver import Module
from deltic.ops.cuda.gemv import launch_plain
from deltic.ops.cuda.kernel_config import ADD, GATE, STORE, Multiply, Shapes, blocks_of
from deltic.ops.types import Batch
from deltic.params import EngineRequest
from deltic.runner import model_runner
from deltic.runner.input_batch import build, decoding_adapted, with_adapters
from deltic.runner.model_runner import ModelRunner

UNITS_APART = True
CUDA, NAN = torch.device("cuda", 0), float("nan")
BLOCKS = 24
"""Few, so that each has several groups of units."""


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    rng = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=rng, device=CUDA).to(dtype)


def error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.double(), expected.double().to(found.device)
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


# The kernels that compute terms


def on_card(name: str, *layers: Mapping[str, Sequence[LowRank]]) -> Adapter:
    return adapter(name, *({product: tuple(each.to(CUDA) for each in terms) for product, terms in layer.items()}
                           for layer in layers))


@pytest.fixture(scope="module")
def kernels() -> lora.AdapterKernels:
    return lora.AdapterKernels(Shapes((), None, None), 1, blocks_of(CUDA), CUDA)


@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 16])
@pytest.mark.parametrize(("columns", "rows"), [(192, 588), (1024, 8288), (2560, 1003), (4096, 12352), (12288, 4096)])
@torch.inference_mode()
def test_terms(kernels: lora.AdapterKernels, columns: int, rows: int, tokens: int) -> None:
    part = rows // 3
    first, second, third = (
        on_card("a", {"mix_in": [term(columns, part, 16, 0, 1), term(columns, rows - part, 3, part, 2)]}),
        on_card("b", {"mix_in": [term(columns, part, 1, 7, 3), term(columns, 9, 64, part + 7, 4)]}),
        on_card("c", {"down": [term(columns, rows, 8, 0, 5)]}))
    places = kernels.table.entries_of([first, second, third])
    own = [(None, first, second, third)[token % 4] for token in range(1, tokens + 1)]
    places_of = {None: -1, first: places[0], second: places[1], third: places[2]}
    entries = torch.tensor([places_of[each] for each in own], device=CUDA)
    scale = randn(columns, seed=7) * 0.1 + 1
    for name, norm in (("mix_in", scale), ("down", None)):
        x = randn(tokens, columns, seed=6) * 3
        x = x if norm is not None else x.bfloat16()
        found = kernels.begin(entries, 1e-6).of(0, name, x, rows, columns, norm).terms
        for token, each in enumerate(own):
            if each is None:
                continue
            terms = each.layers[0].products.get(name, ())
            expected = wanted(x[token:token + 1].cpu(), None if norm is None else norm.cpu(),
                              tuple(one.to(torch.device("cpu")) for one in terms), rows)[0]
            off = error(found[token], expected) if terms else float(found[token].abs().max())
            assert off < 1e-5, f"{name} {columns}x{rows}, token {token} of {tokens}, adapter {each.name}: off {off:.1e}"
            alone = kernels.begin(entries[token:token + 1].clone(), 1e-6).of(
                0, name, x[token:token + 1].clone(), rows, columns, norm).terms[0]
            assert torch.equal(alone, found[token]), f"{name} {columns}x{rows}: bits of token {token} depend on others"


# Products that add terms

NORMED, SUMMED = (192, 1024, 2560, 4096), (576, 3584, 4096, 9216)


def products() -> list[Multiply]:
    return [*(Multiply(columns, True, out) for columns in NORMED for out in (STORE, GATE)),
            *(Multiply(columns, False, ADD, unit) for columns in SUMMED for unit in (8, 4))]


@pytest.fixture(scope="module")
def modules() -> tuple[Module, Module]:
    shapes = Shapes(tuple(products()), None, None)
    return Module(shapes.source(), CUDA), Module(lora.source(shapes), CUDA)


def multiply(module: Module, product: Multiply, weight: Tensor, tokens: int, **values: Any) -> None:
    launch_plain(module, product, weight, tokens, BLOCKS, eps=1e-6, **values)
    torch.cuda.synchronize()


@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 8, 16])
@pytest.mark.parametrize("product", products(), ids=lambda product: product.name(1))
def test_products_add_terms(modules: tuple[Module, Module], product: Multiply, tokens: int) -> None:
    if tokens > product.most:
        pytest.skip("no such product")
    columns, out = product.columns, product.out
    for rows in (1176,) if out == GATE else (588, 1003):
        weight = randn(rows, columns, seed=rows, dtype=torch.bfloat16) * columns**-0.5
        x, scale = randn(tokens, columns, seed=1) * 3, randn(columns, seed=2) * 0.1 + 1
        x, norm = (x, scale) if product.norm else (x.bfloat16(), None)
        terms = randn(tokens, rows, seed=3)
        entries = torch.tensor([token % 3 - 1 for token in range(tokens)], device=CUDA)
        terms[entries < 0] = NAN
        old = randn(tokens, rows // 2 if out == GATE else rows, seed=4, dtype=torch.bfloat16 if out == GATE else
                    torch.float32)
        plain, found = old.clone(), old.clone()
        multiply(modules[0], product, weight, tokens, x=x, scale=norm, y=plain)
        multiply(modules[1], replace(product, terms=True), weight, tokens, x=x, scale=norm, y=found, terms=terms,
                 entries=entries)
        where = f"{product.name(tokens)}, {rows} rows"
        assert torch.equal(found[entries < 0], plain[entries < 0]), f"{where}: tokens without adapters have other bits"
        own = x.double() if norm is None else (x * norm).bfloat16().double() * (
            x.double().square().mean(-1, True) + 1e-6).rsqrt()
        both = own @ weight.double().t() + terms.double()
        if out == GATE:
            gate, up = both.chunk(2, 1)
            both = torch.nn.functional.silu(gate) * up
        elif out == ADD:
            both += old.double()
        adapted = entries >= 0
        if adapted.any():
            off = error(found[adapted], both[adapted])
            assert off < (4e-3 if out == GATE else 1e-5), f"{where}: off {off:.1e}"


# Steps


@dataclass(frozen=True)
class Adapted:
    """A model and its adapters."""

    runtime: ModelRunner
    adapters: tuple[Adapter, ...]

    @property
    def known(self) -> dict[str, Adapter]:
        return {each.identity: each for each in self.adapters}


@pytest.fixture(scope="module", params=["qwen3.5-0.8b", "qwen3.5-4b", "qwen3.5-0.8b q4_k"])
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    name, _, quant = request.param.partition(" ")
    runtime = load(RandomModel(name, 4, initializer_range=0.05),
                   EngineConfig(device="cuda", dtype="bfloat16", memory="1GiB", max_batch=24, max_context=4096,
                                speculate="off", quant=quant or "none"))
    config, place = runtime.config, tmp_path_factory.mktemp("adapters")
    rng = torch.Generator().manual_seed(5)
    head = {f"{PREFIX}lm_head.lora_A.weight": torch.randn(4, config.hidden_size, generator=rng) * 0.02,
            f"{PREFIX}lm_head.lora_B.weight": torch.randn(config.vocab_size, 4, generator=rng) * 0.1}
    paths = {
        "all": random_adapter(place / "all", config, 1, 16),
        "again": random_adapter(place / "again", config, 2, 16),
        "head": random_adapter(place / "head", config, 3, 4, more=head),
        "odd": random_adapter(place / "odd", config, 4, 3),
        "large": random_adapter(place / "large", config, 5, 64, "_proj"),
        "down": random_adapter(place / "down", config, 6, 1, "down_proj"),
    }
    assert isinstance(runtime.step, DecodeStep) and runtime.capabilities.adapts, "the kernels do not serve this model"
    yield Adapted(runtime, tuple(adapters_of(runtime, paths).values()))
    torch.cuda.empty_cache()


def fill(runtime: ModelRunner) -> None:
    pools = runtime.pools
    for seed, tensor in enumerate((pools.keys, pools.values, pools.recurrent, pools.conv)):
        tensor.copy_(randn(*tensor.shape[1:], seed=seed) * 0.3)


def row(number: int, adapter: Adapter | None) -> PlannedRow:
    """A decode row with states and K/V of its own, which depend on the number alone."""
    pages = tuple(range(8 * number, 8 * number + 8))
    return PlannedRow((7 + number,), 5 + 6 * number, pages, number, 1, adapter=adapter.identity if adapter else "")


def step(own: Adapted, rows: Sequence[PlannedRow], torch_ops: bool = False) -> Tensor:
    """The logits [R, V] of rows over the same states."""
    runtime = own.runtime
    fill(runtime)
    used = {each.adapter: own.known[each.adapter] for each in rows if each.adapter}
    batch: Batch
    if torch_ops:
        batch = with_adapters(build(StepPlan(tuple(rows)), runtime.device), list(rows), used)
        assert batch.padded is None
    else:
        entries = runtime.adapter_entries(used)
        assert entries.keys() == used.keys(), f"the kernels serve {len(entries)} of {len(used)} adapters"
        plan = StepPlan(tuple(rows))
        batch = decoding_adapted(plan, runtime.device, entries) or build(plan, runtime.device)
        assert batch.padded and (batch.adapter_entries is not None) == bool(used)
    return runtime.run(batch).clone()


def mixed(own: Adapted, count: int) -> list[PlannedRow]:
    """Rows with all adapters by turns, and without."""
    choices = (own.adapters[0], None, *own.adapters[1:])
    return [row(number, choices[number % len(choices)]) for number in range(count)]


@pytest.mark.parametrize("count", [1, 2, 7, 8, 16])
@torch.inference_mode()
def test_steps_are_those_of_the_torch_ops(adapted: Adapted, count: int) -> None:
    rows = mixed(adapted, count)
    expected = step(adapted, rows, torch_ops=True)
    for turn in ("the first step", "its replay"):
        found = step(adapted, rows)
        off = [error(found[place], expected[place]) for place in range(count)]
        assert max(off) < 6e-2, f"{turn} of {count} rows: off " + " ".join(f"{each:.1e}" for each in off)
    plain = step(adapted, [replace(each, adapter="") for each in rows])
    for place, each in enumerate(rows):
        changed = error(found[place], plain[place])
        if each.adapter:
            assert changed > 5e-3, f"row {place}: its adapter {adapted.known[each.adapter].name} changes {changed:.1e}"


@pytest.mark.parametrize("count", [3, 8, 16])
@torch.inference_mode()
def test_l6_rows_have_the_bits_that_they_have_alone(adapted: Adapted, count: int) -> None:
    rows = mixed(adapted, count)
    found = step(adapted, rows)
    plain = step(adapted, [replace(each, adapter="") for each in rows])
    for place, each in enumerate(rows):
        alone = step(adapted, [each])[0]
        name = adapted.known[each.adapter].name if each.adapter else "none"
        assert torch.equal(found[place], alone), f"{count} rows: bits of row {place} ({name}) depend on the others"
        if not each.adapter:
            assert torch.equal(found[place], plain[place]), f"row {place} without adapter has other bits"


@torch.inference_mode()
def test_graphs_stay_when_adapters_come_and_go(adapted: Adapted, tmp_path: Path) -> None:
    runtime, loaded = adapted.runtime, AdapterSet(adapted.runtime)
    rows = mixed(adapted, 8)
    before = step(adapted, rows)
    assert runtime.graphs
    graphs = runtime.graphs.buckets
    for turn in range(3):
        path = random_adapter(tmp_path / str(turn), runtime.config, 40 + turn, 5 + turn)
        fresh = loaded.load("fresh", path, replace=True)
        own = Adapted(runtime, (*adapted.adapters, fresh))
        changed = [replace(rows[0], adapter=fresh.identity), *rows[1:]]
        found, expected = step(own, changed), step(own, changed, torch_ops=True)
        off = error(found[0], expected[0])
        assert off < 6e-2, f"adapter {turn} that was loaded later: off {off:.1e}"
        assert torch.equal(found[1:], before[1:]), f"adapter {turn} changes other rows"
    loaded.unload("fresh")
    assert torch.equal(step(adapted, rows), before), "bits changed after others were unloaded"
    assert runtime.graphs.buckets == graphs, "a graph was recorded again"


# Engines


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    """The embedded model, which keeps no prefixes: each prompt is computed."""
    runtime = load(None, EngineConfig(device="cuda", dtype="bfloat16", memory="256MiB", max_batch=24, max_context=2048,
                                      speculate="off", prefix_cache=False))
    place = tmp_path_factory.mktemp("embedded")
    paths = {name: random_adapter(place / name, runtime.config, seed, 4, settings={"lora_alpha": 0.4})
             for seed, name in enumerate("abc")}
    return Adapted(runtime, tuple(adapters_of(runtime, paths).values()))


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """The steps with adapters that torch computes."""
    found, original = list[Batch](), model_runner.adapted_weights
    monkeypatch.setattr(model_runner, "adapted_weights",
                        lambda weights, batch: (found.append(batch), original(weights, batch))[1])
    return found


def served(runtime: ModelRunner, requests: Sequence[EngineRequest]) -> tuple[Engine, dict[str, list[int]]]:
    """The answers of these requests by their names, and the engine."""
    engine = Engine(runtime)
    engine.scheduler.times = None  # what is computed together may not depend on the time
    for request in requests:
        engine.add(request)
    return engine, {name: answer.tokens for (name, _), answer in drain(engine).items()}


def requests_of(own: Adapted, count: int, prompt: int) -> list[EngineRequest]:
    """Requests for 40 tokens after prompts of `prompt` tokens and more, one of four without an adapter."""
    choices, vocabulary = (None, *own.adapters), own.runtime.config.vocab_size
    return [replace(greedy(numbers(seed, prompt + seed * (prompt > 1), vocabulary), 40, str(seed)),
                    adapter=choices[seed % 4]) for seed in range(count)]


@pytest.mark.parametrize("count", [8, 16])
def test_l6_answers_do_not_depend_on_others_adapters(embedded: Adapted, count: int, by_torch: list[Batch]) -> None:
    """Prompts are of one token, so that they are computed in the steps that decode."""
    requests = requests_of(embedded, count, 1)
    engine, found = served(embedded.runtime, requests)
    for request in requests:
        alone, name = served(embedded.runtime, [request])[1][request.id], request.adapter and request.adapter.name
        same = sum(one == other for one, other in zip(found[request.id], alone, strict=True))
        assert same == 40, f"{count} requests: {same} of 40 tokens of answer {request.id} ({name}) are those alone"
    assert not by_torch, f"torch has computed {len(by_torch)} steps, the first of chunks {by_torch[0].layout.chunks}"
    assert engine.stats.async_steps > 20, f"{engine.stats.async_steps} of about 40 steps were launched ahead"


def test_more_rows_than_a_bucket_has(embedded: Adapted, by_torch: list[Batch]) -> None:
    """Rows without adapters leave their states in delta logs. Torch computes prompts only."""
    requests = requests_of(embedded, 20, 20)
    _, found = served(embedded.runtime, requests)
    shares = []
    for request in requests:
        alone = served(embedded.runtime, [request])[1][request.id]
        shares.append(sum(a == b for a, b in zip(found[request.id], alone, strict=True)) / len(alone))
    assert sum(shares) / len(shares) > 0.7, "shares as alone: " + " ".join(f"{share:.2f}" for share in shares)
    assert all(max(batch.layout.chunks) > 1 for batch in by_torch), "torch has computed a step that decodes"


def test_answers_with_a_draft_head(tmp_path: Path) -> None:
    """Nothing is drafted while a row has an adapter; the draft head's K/V follow such steps too."""
    runtime = load(None, EngineConfig(device="cuda", dtype="bfloat16", memory="256MiB", max_batch=8, max_context=2048))
    path = random_adapter(tmp_path, runtime.config, 1, 4, settings={"lora_alpha": 0.4})
    (own,) = adapters_of(runtime, {"a": path}).values()
    engine, lengths = Engine(runtime), {str(seed): 20 + 20 * seed for seed in range(4)}
    for seed, (name, count) in enumerate(lengths.items()):
        request = greedy(numbers(seed, 30, runtime.config.vocab_size), count, name)
        engine.add(replace(request, adapter=own if seed == 1 else None))
    assert {name: len(answer.tokens) for (name, _), answer in drain(engine).items()} == lengths
