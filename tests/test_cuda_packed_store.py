"""Quantized experts beside a GPU: how they lie in the host's memory and in places on the card; the same bits with few,
some and all of them there, and while they change places; whole models, from files and quantized at load."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_cuda_experts import rows
from test_cuda_kernels import fill, randn
from test_cuda_packed import answers
from test_cuda_packed_experts import BLOCKS, SHAPES, SMALL, experts_of, options, source, stack_of, written
from test_cuda_tiles import random_blocks
from torch import Tensor

from deltic.config import EngineConfig, ExpertsConfig
from deltic.engine.loading import RandomModel, load
from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.errors import ConfigError, ModelError
from deltic.loader.dummy import random_tensors
from deltic.loader.gguf.blocks import BY_NAME
from deltic.loader.gguf.file import GgufFile
from deltic.loader.gguf.load import load_packed
from deltic.loader.quantize import quantize_tensors
from deltic.ops.cuda import expert_offload, quantized
from deltic.ops.cuda.driver import Module
from deltic.ops.cuda.expert_offload import TileStore, pack_pinned_stack, pinned_form, pointers_of, rows_of, take_stacks
from deltic.ops.cuda.moe import ALL_REAL, RealTokens, shape_of
from deltic.ops.cuda.quantized import KINDS, Tiles, pack_stack
from deltic.ops.cuda.quantized_moe import Kinds, PackedShape, QuantizedMoeOp, experts_shape
from deltic.ops.types import MlpWeights, MoeWeights
from deltic.runner.expert_offload import check_experts
from deltic.runner.input_batch import build
from deltic.runner.model_runner import ModelRunner
from deltic.runner.weights import not_packed

UNITS_APART = True
needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")


# Without a card


class Event:
    """Of a card that has done all at once."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True


@pytest.fixture
def cardless(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host stands for the card."""
    for name in ("device", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(wait_stream=lambda other: None))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(expert_offload, "pinned", lambda rows, columns: torch.empty(rows, columns, dtype=torch.uint8))


def packed(kind: str, count: int, rows: int, columns: int, seed: int) -> tuple[tuple[Tiles, ...], tuple[Tiles, ...]]:
    """The same matrices one by one of a stack on the device, and by a few in memory that stands for the host's."""
    flat = random_blocks(kind, count * rows, columns, seed).reshape(-1)
    given: tuple[Any, ...] = (kind, BY_NAME[kind].id, count, rows, columns, BY_NAME[kind].size(columns),
                              lambda start, size: flat[start:start + size])
    return pack_stack(*given, "cpu"), pack_pinned_stack(*given, torch.device("cpu"))


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q4_0"])
def test_tiles_are_packed_in_pieces(kind: str, cardless: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for piece in (1, 3 * 16 * 512, 1 << 24):
        monkeypatch.setattr(expert_offload, "WEIGHTS_PER_PIECE", piece)
        wanted, found = packed(kind, 7, 16, 512, 1)
        assert [(own.type, own.shape) for own in found] == [(own.type, own.shape) for own in wanted]
        lie = rows_of(found)
        assert torch.equal(lie, torch.stack([own.data.flatten() for own in wanted])), piece
        assert lie.data_ptr() == found[0].data.data_ptr(), "a copy"
        assert pointers_of([lie]).tolist() == [[own.data.data_ptr()] for own in found]


def test_interleaved_stacks(cardless: None) -> None:
    """As in files that have gates and ups in one tensor."""
    both, _ = packed("Q8_0", 6, 8, 256, 2)
    gates, ups = both[::2], both[1::2]
    assert torch.equal(rows_of(ups), torch.stack([own.data.flatten() for own in ups]))
    assert pointers_of([rows_of(gates), rows_of(ups)]).tolist() == [
        [gate.data.data_ptr(), up.data.data_ptr()] for gate, up in zip(gates, ups, strict=True)]
    with pytest.raises(AssertionError, match="equal distances"):
        rows_of([both[0], both[1], both[3]])


LAYERS = (Kinds("Q4_K", "Q4_K", "Q6_K"), Kinds("Q4_K", "Q5_K", "Q4_K"), Kinds("Q8_0", "Q4_K", "Q4_K"))


def cardless_store(count: int = 6) -> TileStore:
    layers = [[packed(kind, count, *size, 10 * layer + index)[1] for index, (kind, size) in enumerate(zip(
        (kinds.gate, kinds.up, kinds.down), ((256, 512), (256, 512), (512, 256)), strict=True))]
        for layer, kinds in enumerate(LAYERS)]
    return TileStore(layers, torch.device("cpu"), 1)


def bytes_at(address: int, count: int) -> Tensor:
    return torch.from_numpy(np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * count).from_address(address)))


def check_tables(store: TileStore) -> None:
    """Every pointer leads to its expert's tiles, on the card for those who are there."""
    first, last = store._pool.data_ptr(), store._pool.data_ptr() + store._pool.numel()
    for layer, stacks in enumerate(store._rows):
        addresses = store.addresses(layer, ())
        for pointers, stack in zip((addresses.gate, addresses.up, addresses.down), stacks, strict=True):
            for expert in range(store.count):
                address = int(pointers[expert])
                assert torch.equal(bytes_at(address, stack.shape[1]), stack[expert]), (layer, expert)
                assert (first <= address < last) == bool(store._residency.resident[layer, expert])


def test_experts_change_places(cardless: None) -> None:
    store = cardless_store()
    tile = {kind: KINDS[kind].nbytes * 64 for kind in KINDS}
    assert store.expert_bytes == (2 * tile["Q4_K"] + tile["Q6_K"], 2 * tile["Q4_K"] + tile["Q5_K"],
                                  tile["Q8_0"] + 2 * tile["Q4_K"])
    assert store.place_bytes == tile["Q8_0"] + tile["Q5_K"] + tile["Q6_K"] and store.place_bytes % 128 == 0
    assert (store.size, store.hidden) == (256, 512) and store.types[0] == ("Q4_K", "Q4_K", "Q6_K")
    store.fill(2)
    assert store.slots == (2, 2, 2) and store.nbytes == 6 * store.place_bytes
    check_tables(store)
    seen: list[int] = []
    for step in range(60):
        store._wanted[0, 4 if step < 30 else 5] += 1
        store._wanted[2, 1] += 1
        store._wanted[1, 3] += step % 2
        store.begin_step()
        check_tables(store)
        seen.append(store.statistics().bytes)
    assert bool(store._residency.resident[0, 5]) and bool(store._residency.resident[1, 3])
    known = store.statistics()
    assert known.promotions >= 3 and known.hits[2] >= 50 and known.misses[2] == 0 and seen == sorted(seen)
    moved = [0, 0, 0]
    moved[0], moved[1] = known.promotions - 1, 1  # the third layer wants who was there
    assert known.bytes == sum((known.misses[layer] + moved[layer]) * store.expert_bytes[layer] for layer in range(3))


def test_tables_are_freed(cardless: None) -> None:
    """Experts of a store are known by its types; the bfloat16 kernels leave them alone."""
    store = cardless_store(24)
    shared = expert_on_host(Kinds("Q8_0", "Q8_0", "Q6_K"))
    router = torch.zeros(25, 512, dtype=torch.bfloat16)
    shapes = [experts_shape(MoeWeights(router, pool, shared, 4, True)) for pool in store.pools()]
    joined: Any = shapes[0]
    for own in shapes[1:]:
        assert own and joined
        joined = joined.joined(own)
    assert isinstance(joined, PackedShape) and joined.routed == frozenset(LAYERS) and joined.known
    assert (joined.hidden, joined.size, joined.count, joined.shared) == (512, 256, 24, True)
    for part in (shared, None):
        assert shape_of(MoeWeights(router[:24 + bool(part)], store.pools()[0], part, 4, True)) is None
    assert [pool.nbytes for pool in store.pools()] == [24 * each for each in store.expert_bytes]
    matrices = [packed(kind, 1, *size, 5)[0][0] for kind, size in (("Q8_0", (256, 512)), ("Q4_K", (256, 512)),
                                                                  ("Q6_K", (512, 256)))]
    found = store.addresses(1, matrices)
    assert [int(own[24]) for own in found[:3]] == [matrix.data.data_ptr() for matrix in matrices]
    assert not any(bool(own[24]) for own in store.addresses(0, ())[:3])


def expert_on_host(kinds: Kinds) -> MlpWeights:
    gate, up = (packed(kind, 1, 256, 512, 3)[0][0] for kind in (kinds.gate, kinds.up))
    return MlpWeights((gate, up), packed(kinds.down, 1, 512, 256, 4)[0][0])


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("gguf"), SMALL)


def test_experts_are_removed_from_the_weights(file: Path, cardless: None) -> None:
    device = torch.device("cpu")
    for weights in (load_packed(GgufFile.open(file), SMALL, form=pinned_form(device)),
                    quantize_tensors(random_tensors(SMALL, "bfloat16"), "q4_k", SMALL, pinned_form(device))):
        store = TileStore(take_stacks(weights, 4), device, 1)
        assert not any(".experts." in name for name in weights) and any("shared_expert" in name for name in weights)
        assert (store.count, store.size, store.hidden) == (24, 256, 512)
        assert {down for *_, down in store.types} == {"Q4_K", "Q6_K"}
        store.fill(24)
        check_tables(store)


def test_memory_stays_pinned_while_referenced(monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[int] = []
    runtime = SimpleNamespace(cudaHostRegister=lambda address, size, flags: known.append(address) or 0,
                              cudaHostUnregister=known.remove)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    for size in (64, 8 << 20):
        view = expert_offload.pinned(3, size).view(torch.bfloat16).chunk(3)[1].view(-1)[4:]
        gc.collect()
        assert len(known) == 1 and 0 < view.data_ptr() - known[0] < 2 * size
        del view
        gc.collect()
        assert not known
    monkeypatch.setattr(runtime, "cudaHostRegister", lambda address, size, flags: 1)
    with pytest.raises(ModelError, match="8 MiB of the host's memory for weights cannot be pinned"):
        expert_offload.pinned(1, 8 << 20)


def test_options(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="quant=q4_k is not possible with expert_memory"):
        EngineConfig(quant="q4_k", expert_cap=3, device="cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for changes in ({"expert_cap": 3}, {"expert_memory": "1GiB", "expert_compute": "card"}):
        asked = options(quant="q4_k", **changes)
        assert not_packed(asked, SMALL, "bfloat16") is None
        check_experts(None, SMALL, asked, "bfloat16", True)
    host = options(expert_cap=3, expert_compute="host")
    assert "bfloat16 only; leave out expert_compute" in str(not_packed(host, SMALL, "bfloat16"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ConfigError, match=r"expert_cap=3 is not possible: it needs a GPU of compute capability 8\.0"):
        check_experts(None, SMALL, options(quant="q4_k", expert_cap=3), "bfloat16", True)


# The operation


NAMES = ["Q4_K", "Q5_K", "plain shared", "none shared, halves of two kinds"]


def beside(stack: Sequence[Any]) -> list[Tiles]:
    """The same tiles in pinned memory of the host."""
    rows = stack[0].data.shape[0]
    memory = expert_offload.pinned(rows * len(stack), stack[0].data.shape[1])
    for own, tile in zip(memory.chunk(len(stack)), stack, strict=True):
        own.copy_(tile.data)
    return [replace(tile, data=own) for own, tile in zip(memory.chunk(len(stack)), stack, strict=True)]


class Mixture:
    """A layer with all experts on the card, and stores that have it as their second of two layers."""

    def __init__(self, shape: PackedShape) -> None:
        self.shape, self.device = shape, torch.device("cuda", torch.cuda.current_device())
        (routed,), common = shape.routed, next(iter(shape.shared_one), None)
        router = randn(shape.count + shape.shared, shape.hidden, seed=1, dtype=torch.bfloat16) * shape.hidden**-0.5
        self.weights = MoeWeights(router, tuple(experts_of(shape, routed, shape.count, 10)),
                                  experts_of(shape, common, 1, 20)[0] if common else None, shape.per_token,
                                  shape.normalised)
        self.module, self.scale = Module(source(shape), self.device), randn(shape.hidden, seed=3) * 0.1 + 1
        self.whole = QuantizedMoeOp(self.module, shape, [self.weights], BLOCKS)
        experts: Any = self.weights.experts
        own = (*zip(*(part.gate_up for part in experts), strict=True), [part.down for part in experts])
        sizes = [(shape.size, shape.hidden)] * 2 + [(shape.hidden, shape.size)]
        other = [stack_of("Q8_0", shape.count, *size, 40) for size in sizes]
        self.stacks = [[beside(stack) for stack in stacks] for stacks in (other, own)]

    def store(self, slots: int) -> TileStore:
        found = TileStore(self.stacks, self.device, 1)
        found.fill(slots)
        return found

    def some(self, store: TileStore) -> tuple[MoeWeights, QuantizedMoeOp]:
        weights = replace(self.weights, experts=store.pools()[1])
        assert experts_shape(weights) == self.shape == experts_shape(self.weights)
        return weights, QuantizedMoeOp(self.module, self.shape, [weights], BLOCKS)

    def input(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Residual, and the router's products [T, n] float32."""
        residual = randn(tokens, self.shape.hidden, seed=tokens) * 2
        normed = residual.double() * (residual.double().square().mean(-1, True) + 1e-6).rsqrt() * self.scale.double()
        assert isinstance(self.weights.router, Tensor)
        return residual, (normed @ self.weights.router.double().t()).float().contiguous()

    def few(
        self,
        experts: QuantizedMoeOp,
        weights: MoeWeights,
        residual: Tensor,
        logits: Tensor,
        real: RealTokens = ALL_REAL,
    ) -> Tensor:
        found = residual.clone()
        experts.gemv_rows(weights, found, self.scale, 1e-6, logits, real)
        return found


@pytest.fixture(scope="module", params=NAMES)
def mixture(request: pytest.FixtureRequest) -> Iterator[Mixture]:
    yield Mixture(SHAPES[request.param])
    torch.cuda.empty_cache()


@needs_card
@torch.inference_mode()
def test_residency_changes_no_bit(mixture: Mixture) -> None:
    """And what few and many tokens wanted is counted."""
    count = mixture.shape.count
    for slots in (1, max(2, count // 3), count):
        store = mixture.store(slots)
        weights, some = mixture.some(store)
        for tokens in (1, 5, 16, 37):
            residual, logits = mixture.input(tokens)
            assert torch.equal(mixture.few(some, weights, residual, logits),
                               mixture.few(mixture.whole, mixture.weights, residual, logits)), (slots, tokens)
        residual, logits = mixture.input(16)
        real = rows(*[1] * 9, filling=7)
        assert torch.equal(mixture.few(some, weights, residual, logits, real),
                           mixture.few(mixture.whole, mixture.weights, residual, logits, real))
        for tokens in (70, 300):
            x = mixture.input(tokens)[0].bfloat16()
            assert torch.equal(some.gemm_rows(weights, x), mixture.whole.gemm_rows(mixture.weights, x)), (slots, tokens)
        assert bool(store._wanted[1].any()) and not bool(store._wanted[0].any())


@needs_card
@torch.inference_mode()
def test_wanted_experts_are_counted(mixture: Mixture) -> None:
    """Once a launch, which has all few tokens if they fit in shared memory."""
    store, shape = mixture.store(1), mixture.shape
    weights, some = mixture.some(store)
    wanted = torch.zeros(shape.count, dtype=torch.int64)
    for tokens in (1, 3, 8):
        residual, logits = mixture.input(tokens)
        mixture.few(some, weights, residual, logits)
        for part in logits[:, :shape.count].split(some.tokens_at_once):
            wanted[part.topk(shape.per_token).indices.unique().cpu()] += 1
    assert torch.equal(store._wanted[1].cpu(), wanted)
    before, x = store._wanted[1].clone(), mixture.input(300)[0].bfloat16()
    some.gemm_rows(weights, x)
    added = (store._wanted[1] - before).cpu()
    assert set(added.tolist()) <= {0, 1} and int(added.sum()) >= shape.per_token


@needs_card
@torch.inference_mode()
def test_replays_while_experts_change_places() -> None:
    """A recorded graph finds experts where they are now."""
    mixture = Mixture(SHAPES["plain shared"])
    store = mixture.store(mixture.shape.per_token)
    weights, some = mixture.some(store)
    residual, logits = mixture.input(4)
    given, found, wanted = logits.clone(), residual.clone(), list[tuple[Tensor, Tensor]]()
    for first in (4, 8, 14, 2):
        own = logits.clone()
        own[:, :first], own[:, first + 5:mixture.shape.count] = -1e30, -1e30
        wanted.append((own, mixture.few(mixture.whole, mixture.weights, residual, own)))
    some.gemv_rows(weights, found, mixture.scale, 1e-6, given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        some.gemv_rows(weights, found, mixture.scale, 1e-6, given)
    for own, right in wanted * 2:
        given.copy_(own)
        store._residency.scores[:] = 0  # at once, what is wanted now counts more
        for _ in range(30):
            store.begin_step()
            found.copy_(residual)
            graph.replay()
            assert torch.equal(found, right)
    seen = store.statistics()
    assert seen.promotions > 10 and seen.hits[1] > 0 and seen.misses[1] > 0 and seen.hits[0] == seen.misses[0] == 0
    assert seen.bytes == (seen.misses[1] + seen.promotions) * store.expert_bytes[1]
    assert int(store._residency.resident[1].sum()) == store.slots[1] and store.copy_rate() > 1e8


# Whole models


def logits_of(runtime: ModelRunner) -> list[Tensor]:
    """Of steps of few and of many rows, and of prompts, each several times, while experts change places."""
    found = []
    for count, length in ((1, 1), (5, 1), (12, 1), (40, 1), (3, 90)):
        plan = StepPlan(tuple(PlannedRow(tuple(range(7 + row, 7 + row + length)), 0 if length > 1 else 20 + row,
                              tuple(range(6 * row, 6 * row + 6)), row, 1) for row in range(count)))
        fill(runtime)
        for _ in range(8):
            found.append(runtime.run(build(plan, runtime.pools.device)).clone())
            torch.cuda.synchronize()
    return found


def store_of(runtime: ModelRunner) -> TileStore:
    assert runtime.experts and isinstance(runtime.experts.store, TileStore)
    return runtime.experts.store


@needs_card
@pytest.mark.parametrize("origin", ["file", "q4_k", "q8_0"])
@torch.inference_mode()
def test_models(origin: str, file: Path) -> None:
    model = str(file) if origin == "file" else RandomModel(shape=SMALL, initializer_range=0.05)
    asked = options(token_budget=256, **{} if origin == "file" else {"quant": origin})  # longer steps vary
    whole = load(model, asked)
    wanted, said = logits_of(whole), answers(whole, 12)
    assert whole.experts is None
    del whole
    for cap in (1, 7, 24):
        some = load(model, replace(asked, expert_cap=cap))
        store = store_of(some)
        assert all(map(torch.equal, logits_of(some), wanted)), cap
        assert answers(some, 12) == said, cap
        seen, each = store.statistics(), store.expert_bytes
        assert store.slots == (cap,) * 4 and store.nbytes == 4 * cap * store.place_bytes
        if cap < 24:
            assert all(seen.hits) and all(seen.misses) and seen.promotions and seen.refreshes
        else:  # nobody asks
            assert not (any(seen.hits) or any(seen.misses) or seen.promotions)
        missed = sum(misses * own for misses, own in zip(seen.misses, each, strict=True))
        assert min(each) * seen.promotions <= seen.bytes - missed <= max(each) * seen.promotions
        assert {"Q4_K", "Q8_0"} & {*some.decoder.weight_kinds()} and some.experts and some.experts.rates is None
        some.experts.close()
    torch.cuda.empty_cache()


@needs_card
def test_budgets(file: Path) -> None:
    store = store_of(load(str(file), options(expert_cap=1)))
    layers = 4 * store.place_bytes
    assert store_of(load(str(file), options(expert_memory=str(5 * layers + 1)))).slots == (5,) * 4
    assert store_of(load(str(file), options(expert_memory="auto"))).slots == (24,) * 4
    with pytest.raises(ConfigError, match="no room for one expert of each layer"):
        load(str(file), options(expert_memory=str(layers - 1)))


@needs_card
def test_unsupported_options_are_refused(file: Path) -> None:
    host = options(expert_cap=3, expert_compute="host")
    plain = load(str(file), host)
    assert plain.decoder.weight_kinds().keys() == {"BF16", "F32"} and plain.experts, "not as without packed experts"
    plain.experts.close()
    with pytest.raises(ConfigError, match=r"packed_weights=on is not possible.*bfloat16 only"):
        load(str(file), replace(host, packed_weights="on"))
    with pytest.raises(ConfigError, match=r"quant=q4_k is not possible.*bfloat16 only"):
        load(RandomModel(shape=SMALL), replace(host, quant="q4_k"))
    with pytest.raises(ConfigError, match=r"quant=q4_k is not possible.*experts of these sizes"):
        load(RandomModel(shape=replace(SMALL, experts=ExpertsConfig(24, 4, 320, 320))),
             options(quant="q4_k", expert_cap=3))
    with pytest.raises(ConfigError, match="leave out `ops` and `debug_layers`"):
        load(str(file), options(expert_cap=3, debug_layers=True))


@needs_card
def test_loading_needs_little_gpu_memory(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than all experts do, and in the end none for them."""
    monkeypatch.setattr(quantized, "WEIGHTS_PER_PIECE", 1 << 18)
    monkeypatch.setattr(expert_offload, "WEIGHTS_PER_PIECE", 1 << 18)
    device = torch.device("cuda", torch.cuda.current_device())
    many = replace(SMALL, experts=ExpertsConfig(64, 4, 256, 256), num_hidden_layers=8,
                   layer_types=SMALL.layer_types * 2)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    weights = quantize_tensors(random_tensors(many, "bfloat16", device="cuda"), "q8_0", many, pinned_form(device))
    peak, held = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    stacks = take_stacks(weights, 8)
    size = sum(matrix.nbytes for layer in stacks for stack in layer for matrix in stack)
    assert size == 8 * 64 * 3 * 256 * 512 * 2176 // 2048 and peak < size and held < size / 3
    assert all(matrix.data.is_pinned() for layer in stacks for stack in layer for matrix in stack[:1])
    del weights, stacks
    found = load_packed(GgufFile.open(file), SMALL, form=pinned_form(device))
    assert all(matrix.data.is_pinned() for layer in take_stacks(found, 4) for stack in layer for matrix in stack[:1])
