"""Without a GPU: how a GPU adds adapters (LoRA) to decode steps. The kernels run on the processor, thread by thread;
launches, rows of a step and answers of engines are checked."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_cases import adapter, adapters_of, random_adapter, term, wanted
from support import drain, greedy, numbers, small_runtime
from test_lora import served, three
from torch import Tensor

from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import load
from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.ops.adapters import Adapter, AdapterLayer, BatchAdapters, LowRank
from deltic.ops.cuda import adapters as kernels
from deltic.ops.cuda import decode, kernel_config
from deltic.ops.cuda.adapters import (
    ENTRIES,
    EXPAND_THREADS,
    HEAD,
    MAX_TERMS,
    SERVED,
    SHRINK_THREADS,
    AdapterTable,
)
from deltic.ops.cuda.arguments import ExpandArgs, ShrinkArgs
from deltic.ops.cuda.driver import FOLDER
from deltic.ops.types import Batch, Layout
from deltic.runner.input_batch import decoding, step_of
from deltic.runner.launch import adapted_parts
from deltic.runner.model_runner import ModelRunner

ROOM, EPS, CPU = 2048, 1e-6, torch.device("cpu")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    target = tmp_path_factory.mktemp("emulated") / "lora.so"
    command = ["g++", "-std=c++20", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC", f"-I{FOLDER}",
               str(Path(__file__).with_name("emulated_lora.cpp")), "-o", str(target)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(target))


@pytest.fixture(autouse=True)
def tables_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "on_device", lambda host, device: host)


def run(library: Any, table: AdapterTable, place: Tensor, entries: Tensor, x: Tensor, norm: Tensor | None, rows: int,
        grid: int = 3) -> Tensor:
    """What both kernels add to a product [T, rows], launched with few blocks."""
    tokens, columns = x.shape
    sums, terms = torch.full((tokens, ROOM), float("nan")), torch.full((tokens, rows), float("nan"))
    shrink = ShrinkArgs(x=x, scale=norm, table=place, entries=entries, sums=sums, eps=EPS, tokens=tokens,
                        columns=columns, stride=table.stride, room=ROOM)
    expand = ExpandArgs(table=place, entries=entries, sums=sums, terms=terms, tokens=tokens, rows=rows,
                        stride=table.stride, room=ROOM)
    assert library.run_shrink(ctypes.byref(shrink), int(norm is not None), grid, SHRINK_THREADS) == grid
    assert library.run_expand(ctypes.byref(expand), grid, EXPAND_THREADS) == grid
    return terms


COLUMNS, ROWS = 2112, 1100
"""More than a pass of a block each, and no multiple of one."""


@pytest.fixture(scope="module")
def adapters() -> list[Adapter]:
    """Of two layers: many terms with odd ranks, few rows, and products without a term."""
    def many(*ranks: int, seed: int) -> tuple[LowRank, ...]:
        sizes = ((0, 512), (512, 300), (830, 7), (900, 200))
        return tuple(term(COLUMNS, size, rank, first, seed + place)
                     for place, ((first, size), rank) in enumerate(zip(sizes, ranks, strict=False)))
    return [
        adapter("a", {"mix_in": many(16, 3, 1, 64, seed=1)}, {"mix_in": many(5, seed=9)}),
        adapter("b", {"down": many(8, 8, seed=20)}, {"mix_in": many(17, 16, 9, 1, seed=30)}),
        adapter("c", {}, {"mix_in": many(24, 40, seed=40), "down": many(1, seed=44)}, head=many(16, seed=50)),
    ]


CASES = {"mix_in 0": (0, "mix_in", True), "mix_in 1": (1, "mix_in", True), "down 0": (0, "down", False),
         "down 1": (1, "down", False), "head": (0, HEAD, True)}


@pytest.mark.parametrize("case", CASES)
def test_the_kernels_add_the_terms_of_each_token(library: Any, adapters: list[Adapter], case: str) -> None:
    """Bit for bit the same for each token alone. Tokens without adapters are left alone."""
    layer, name, normed = CASES[case]
    table = AdapterTable(2, CPU)
    places = table.entries_of(adapters)
    assert sorted(place for place in places if place is not None) == [0, 1, 2]
    numbers = [0, -1, 1, 2, 0]
    entries = torch.tensor([-1 if number < 0 else places[number] for number in numbers])
    rng = torch.Generator().manual_seed(7)
    x = torch.randn(len(numbers), COLUMNS, generator=rng) * 3
    norm = torch.randn(COLUMNS, generator=rng) * 0.1 + 1 if normed else None
    x = x if normed else x.bfloat16()
    found = run(library, table, table.product(layer, name), entries, x, norm, ROWS)
    for token, number in enumerate(numbers):
        if number < 0:
            assert found[token].isnan().all()
            continue
        own = adapters[number]
        terms = own.head if name == HEAD else own.layers[layer].products.get(name, ())
        expected = wanted(x[token:token + 1], norm, terms, ROWS)[0]
        assert torch.allclose(found[token].double(), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
        alone = run(library, table, table.product(layer, name), entries[token:token + 1], x[token:token + 1], norm,
                    ROWS, grid=2)
        assert torch.equal(alone[0], found[token])


def test_sixteen_tokens_have_their_own_terms(library: Any) -> None:
    own = [adapter(str(seed), {"down": (term(64, 9, 1 + seed % 3, 2, seed),)}) for seed in range(16)]
    table = AdapterTable(1, CPU)
    entries = torch.tensor(table.entries_of(own))
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = run(library, table, table.product(0, "down"), entries, x, None, 12, grid=2)
    expected = torch.cat([wanted(x[token:token + 1], None, own[token].layers[0].products["down"], 12)
                          for token in range(16)])
    assert torch.allclose(found.double(), expected, rtol=0, atol=1e-5)


# The table


def small(name: str) -> Adapter:
    return adapter(name, {"down": (term(64, 8, 8, 0, 1),)})


def test_entries_stay_until_others_need_them() -> None:
    table, own = AdapterTable(1, CPU), [small(str(number)) for number in range(ENTRIES + 1)]
    first = table.entries_of(own[:ENTRIES])
    assert sorted(place for place in first if place is not None) == [*range(ENTRIES)]
    assert table.entries_of(own[1:ENTRIES]) == first[1:]
    assert table.entries_of([own[3], own[ENTRIES]]) == [first[3], first[0]], "the one that was not used for longest"
    a = own[ENTRIES].layers[0].products["down"][0].a
    assert table.product(0, "down").data_ptr() == table.terms[0, SERVED.index("down")].data_ptr()
    assert int(table.terms[first[0] or 0, SERVED.index("down"), 0, 0]) == a.data_ptr()
    found = table.entries_of(own)
    assert found.count(None) == 1 and len({*found}) == ENTRIES + 1, "a step's adapters do not displace each other"


def test_an_adapter_that_is_loaded_again_has_another_entry() -> None:
    """Its numbers lie elsewhere, although its identity is the same."""
    table, first = AdapterTable(1, CPU), small("a")
    again = small("a")
    assert table.entries_of([first]) != table.entries_of([again])


@pytest.mark.parametrize("build", [
    lambda: adapter("router", {"router": (term(64, 8, 8, 0, 1),)}),
    lambda: Adapter("experts", "", (AdapterLayer({}, ((term(64, 8, 8, 0, 1),),) * 2),)),  # type: ignore[arg-type]
    lambda: adapter("float32", {"down": (LowRank.of(torch.zeros(8, 64), torch.zeros(8, 8)),)}),
    lambda: adapter("terms", {"down": tuple(term(64, 8, 8, 8 * at, 1) for at in range(MAX_TERMS + 1))}),
], ids=["router", "experts", "float32", "terms"])
def test_other_adapters_are_left_to_torch(build: Callable[[], Adapter]) -> None:
    assert AdapterTable(1, CPU).entries_of([build(), small("a")]) == [None, 0]


# Launches of a step


@dataclass
class Recorder:
    """A module that launches nothing."""

    source: str
    calls: list[tuple[str, Any]]

    def launch(self, name: str, grid: tuple[int, ...], block: int, arguments: Any, shared: int = 0,
               overlap: bool = True) -> None:
        assert f" {name}(" in self.source, f"{name} is not compiled"
        self.calls.append((name, arguments))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """The launches of a model on a processor that is taken for a GPU."""
    found = list[tuple[str, Any]]()
    for module in (decode, kernels):
        monkeypatch.setattr(module, "load_module", lambda source, device: Recorder(source, found))
    for module in (decode, kernel_config):
        monkeypatch.setattr(module, "blocks_of", lambda device: 24)
    monkeypatch.setattr(decode, "why_not_compiled", lambda source, device: None)
    return found


def plain_tensors(value: Any) -> Any:
    """The same weights, none of them in a format of torch's own for CPUs."""
    if isinstance(value, Tensor):
        return value.to_dense() if value.is_mkldnn else value
    if isinstance(value, tuple):
        return tuple(map(plain_tensors, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: plain_tensors(getattr(value, each.name)) for each in fields(value)
                                 if each.init})
    return value


@pytest.mark.parametrize("tokens", [1, 2, 7, 16])
def test_a_step_launches_what_its_products_need(calls: list[tuple[str, Any]], tokens: int, tmp_path: Path,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = load(None, EngineConfig(dtype="bfloat16", ops=("torch",), memory="16MiB", max_batch=16, max_context=256,
                                      speculate="off", device="cpu"))
    paths = {"a": random_adapter(tmp_path / "a", runtime.config, 1, 3),
             "b": random_adapter(tmp_path / "b", runtime.config, 2, 16, "_proj")}
    own, weights = [*adapters_of(runtime, paths).values()], plain_tensors(runtime.decoder.weights)
    with monkeypatch.context() as on_card:
        on_card.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
        shapes = kernel_config.shapes_of(weights, runtime.views)
    assert shapes
    step = decode.DecodeStep(weights, runtime.views, shapes, reads=False)
    places = step.adapter_entries(own)
    entries = {each.identity: place for each, place in zip(own, places, strict=True) if place is not None}
    assert len(entries) == 2
    rows = [PlannedRow((5,), 3, (1, 2), 0, 1, adapter=own[number % 3].identity if number % 3 < 2 else "")
            for number in range(tokens)]
    numbered = decoding(StepPlan(tuple(rows)), CPU, entries=entries).padded
    plain = decoding(StepPlan(tuple(replace(row, adapter="") for row in rows)), CPU).padded
    assert numbered and plain and numbered.bucket == plain.bucket and (numbered.adapted, plain.adapted) == (True, False)
    with torch.inference_mode():
        assert step(step_of(plain)) is not None
        names = [name for name, _ in calls]
        assert not [name for name in names if "_terms" in name or "shrink" in name]
        calls.clear()
        static = step_of(numbered)
        assert static.adapter_entries is not None
        assert static.adapter_entries.tolist() == [entries.get(row.adapter, -1) for row in rows] + [-1] * (
            numbered.rows - tokens)
        found = step(static)
    assert found is not None and found[0].shape == (numbered.rows, runtime.config.vocab_size)
    assert step._adapters
    check_products(calls, step._adapters.table, static.adapter_entries, len(weights.layers))
    assert "_spread" not in str([name for name, _ in calls]), "heads are whole"
    assert step(replace(static, count=None)) is None, "a prefill step has no adapters"


def check_products(calls: list[tuple[str, Any]], table: AdapterTable, entries: Tensor, layers: int) -> None:
    """Each product follows the kernels that compute its terms, with the same input and its place in the table."""
    place, at = 0, 0
    while at < len(calls):
        name, shrink = calls[at]
        assert not name.startswith("product_"), "a product without terms"
        at += 1
        if not name.startswith("k_shrink_"):
            continue
        (expand_name, expand), own = calls[at], table.terms[0, place]
        assert expand_name == "k_expand" and shrink.table == expand.table == own.data_ptr(), f"product {place}"
        assert shrink.entries == expand.entries == entries.data_ptr() and shrink.sums == expand.sums
        at, done = at + 1, 0
        while done < len(entries):
            name, product = calls[at]
            x, scale = shrink.x + done * shrink.columns * (4 if shrink.scale else 2), shrink.scale
            if name == f"k_stage_{shrink.columns}":
                assert (product.x, product.scale, product.tokens) == (x, scale, len(entries))
                x, scale, at = product.y, product.factors, at + 1
                name, product = calls[at]
            found = re.fullmatch(r"product_(\d+)_(norm|plain)_\w+_terms", name)
            assert found and int(found[1]) == shrink.columns and product.rows == expand.rows
            assert (product.x, product.scale, found[2] == "norm") == (x, scale, shrink.scale is not None)
            assert product.terms == expand.terms + done * expand.rows * 4
            assert product.entries == expand.entries + done * 8
            at, done = at + 1, done + product.tokens
        assert done == shrink.tokens == expand.tokens == len(entries)
        place += 1
    assert place == layers * len(SERVED) + 1


# Rows of a step


def planned(adapter: str = "", tokens: int = 1, drawn: int | None = None) -> PlannedRow:
    return PlannedRow((5,) * tokens, 3, (1, 2), 0, 1, adapter=adapter, drawn=drawn)


@pytest.mark.parametrize(("rows", "parts"), [
    ([planned(), planned("a"), planned("b"), planned()], [[0, 1, 2, 3]]),
    ([planned("a"), planned("c"), planned()], [[0, 2], [1]]),
    ([planned("a"), planned("b", 7), planned(), planned(tokens=3)], [[2, 3], [0], [1]]),
    ([planned("a", drawn=0), planned(drawn=1)], [[0, 1]]),
    ([planned("a", drawn=0), planned("b"), planned(drawn=1)], [[2], [0], [1]]),
    ([planned("a")] * 20, [[*range(16)], [*range(16, 20)]]),
    ([*[planned()] * 12, *[planned("a")] * 5], [[*range(12)], [*range(12, 17)]]),
    ([replace(planned(), append=True), planned("a")], [[0], [1]]),
], ids=["mixed", "not served", "prompts", "drawn", "some drawn", "many", "too many", "delta log"])
def test_rows_that_are_computed_together(rows: list[PlannedRow], parts: list[list[int]]) -> None:
    """Adapter `c` has no entry."""
    assert [*adapted_parts(rows, {"a": 0, "b": 1})] == parts
    assert [*adapted_parts(rows, {})] == [part for part in (
        [place for place, row in enumerate(rows) if not row.adapter],
        [place for place, row in enumerate(rows) if row.adapter]) if part]


# Engines


class InBuckets:
    """Serves entries of a table on the processor, as a GPU's kernels do, and keeps the layouts of such steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.served, self.layouts = list[Adapter](), list[Layout]()
        forward = ModelRunner._forward

        def entries(runtime: ModelRunner, adapters: Mapping[str, Adapter]) -> Mapping[str, int]:
            self.served += [each for each in adapters.values() if each not in self.served]
            return {identity: self.served.index(each) for identity, each in adapters.items()}

        def run(runtime: ModelRunner, batch: Batch) -> tuple[Tensor, Tensor | None]:
            numbers = batch.adapter_entries
            if numbers is None:
                return forward(runtime, batch)
            self.layouts.append(batch.layout)
            own = BatchAdapters(numbers, tuple(self.served))
            return forward(runtime, replace(batch, adapters=own, adapter_entries=None, memo={}))

        monkeypatch.setattr(ModelRunner, "adapter_entries", entries)
        monkeypatch.setattr(ModelRunner, "_forward", run)


@pytest.mark.parametrize("count", [8, 24])
def test_steps_in_buckets_give_the_answers_of_steps_without(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With steps that are launched before the tokens of the one in flight are known."""
    runtime, own = three("dense", "torch")
    choices = [None, *own]
    requests = [replace(greedy(numbers(60 + place, 5 + 3 * place, 509), 12 + place % 5, f"r{place}"),
                        adapter=choices[place % 4]) for place in range(count)]
    expected = served(runtime, requests, batch=count)
    buckets, limited = InBuckets(monkeypatch), small_runtime(runtime, batch=count)
    limited.capabilities = replace(limited.capabilities, overlaps=True, adapts=True)
    engine = Engine(limited)
    for request in requests:
        engine.add(request)
    found = drain(engine)
    assert {key: answer.tokens for key, answer in found.items()} == {
        key: answer.tokens for key, answer in expected.items()}
    assert len(buckets.layouts) > 12 and engine.stats.async_steps > 5
    sizes = [layout.rows for layout in buckets.layouts]
    assert all(set(layout.chunks) == {1} for layout in buckets.layouts) and 4 < max(sizes) <= 16
