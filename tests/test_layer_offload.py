"""Feed-forwards of dense layers in host memory, without a GPU: how many the plan moves and what its note names, where
they lie, the order of copies, and what the host computes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import every, tiny_texts
from torch import Tensor

from deltic.cli.inspect import plan_cache
from deltic.config import EngineConfig, GenerationDefaults, ModelConfig
from deltic.engine.loading import RandomModel
from deltic.errors import ConfigError
from deltic.loader.dummy import random_tensors, random_weights
from deltic.loader.gguf.convert import convert
from deltic.loader.gguf.file import GgufFile
from deltic.loader.gguf.load import load_packed, packed_sizes
from deltic.loader.model_files import ModelFiles
from deltic.loader.quantize import quantize_tensors
from deltic.model.decoder import Decoder, build, feed_forward
from deltic.ops import reference, select
from deltic.ops.cpu import missing
from deltic.ops.cuda import kernel_config, quantized, quantized_product
from deltic.ops.cuda.card import default_card
from deltic.ops.cuda.decode import DecodeStep, _offloaded_layers
from deltic.ops.cuda.driver import Module
from deltic.ops.cuda.gemv import GemvProducts
from deltic.ops.cuda.kernel_config import STORE, Shapes, _Found
from deltic.ops.cuda.layer_offload import HostTiles, LayerStore, LayerStream, host_layer, host_layer_form, used
from deltic.ops.cuda.quantized import Tiles, packed_bytes, tiles_form
from deltic.ops.cuda.tensor_parallel import alone
from deltic.ops.types import DecoderWeights, MlpWeights, Weight
from deltic.runner import layer_offload
from deltic.runner import weights as reader
from deltic.runner.layer_offload import LayerPlan, matrices_of, place_layers, plan_layers, why_not_beside
from deltic.runner.memory import CardMemory, plan_memory
from deltic.runner.weights import OpenedModel, weight_sizes

GIB, CPU = 1 << 30, torch.device("cpu")
TINY = replace(ModelConfig.preset("qwen3.5-0.8b", 6), hidden_size=512, intermediate_size=768, vocab_size=3072,
               tie_word_embeddings=True)
needs_library = pytest.mark.skipif(bool(missing()), reason=str(missing()))


# The plan


def note_of(size: str, **options: Any) -> tuple[Any, str]:
    found = plan_cache(ModelConfig.preset("qwen3.5-27b"),
                       EngineConfig(device="cuda", gpu_memory=size, quant="q4_k", **options))
    assert found
    plan, _ = found
    return plan, next((text for text in plan.warnings if "lie in host memory" in text), "")


def layers_of(note: str) -> int:
    found = re.match(r"the feed-forwards of (\d+) of 64 layers", note)
    return int(found[1]) if found else 0


@pytest.mark.parametrize("options", [{}, {"max_context": 1 << 16}, {"max_context": 1 << 16, "kv_dtype": "fp8"},
                                     {"prefix_cache": False}, {"max_context": 4096, "max_batch": 3}], ids=str)
def test_smaller_cards_move_more_layers_and_keep_the_promise(options: dict[str, Any]) -> None:
    counts = list[int]()
    for size in ("24GiB", "20GiB", "16GiB"):
        plan, note = note_of(size, **options)
        counts.append(layers_of(note))
        assert plan.max_context >= min(options.get("max_context", 14000), 1 << 16)
        assert plan.max_batch >= options.get("max_batch", 1)
    assert counts[0] == 8 * (options == {"max_context": 1 << 16}) and counts[0] < counts[2] < 64
    assert counts[1] < counts[2]


def test_the_note_names_the_trade() -> None:
    _, note = note_of("16GiB", max_context=1 << 16)
    count = layers_of(note)
    assert re.search(rf"feed-forwards of {count} of 64 layers lie in host memory, 9\.\d\d GiB \(layers 1-\d+, ", note)
    assert "contexts of up to 65,536 tokens" in note and "to read 158 MiB of host memory" in note
    shorter, fp8 = (re.search(rf"(\d+) layers with `{name}", note) for name in (
        "max_context=32768`", "kv_dtype='fp8'` for 65,536 tokens"))
    assert shorter and fp8 and 0 < int(shorter[1]) < count and int(fp8[1]) < count
    for name, found in (("max_context", shorter), ("kv_dtype", fp8)):  # the others are what they are said to be
        changed = {"max_context": 1 << 16, name: 32768 if name == "max_context" else "fp8"}
        assert layers_of(note_of("16GiB", **changed)[1]) == int(found[1])


def test_the_longest_context_where_none_is_long_enough() -> None:
    plan, note = note_of("12GiB", max_context=1 << 16)
    assert layers_of(note) == 64 and 28000 < plan.max_context < 1 << 16 and plan.max_batch == 1
    assert f"contexts of up to {plan.max_context:,} tokens" in note
    assert any("max_context is" in warning for warning in plan.warnings)
    plan, note = note_of("16GiB")
    longer = re.search(r"(\d+) layers with `max_context=32768`", note)
    assert plan.max_context == 16384 and longer and 0 < layers_of(note) < int(longer[1]) < 64


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """One without a size in the options."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (15 * GIB, 16 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


def planned(config: ModelConfig, options: EngineConfig) -> LayerPlan:
    def plan(given: EngineConfig, memory: CardMemory) -> Any:
        return plan_memory(config, given, torch.bfloat16, False, False, card=memory)[0]

    sizes = weight_sizes(config, "bfloat16", options.quant)
    return plan_layers(config, options, "bfloat16", sizes, 0, plan)


def test_a_card_of_its_own_size(card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a cache of a given size, which must fit beside the weights."""
    config = ModelConfig.preset("qwen3.5-9b")
    free = planned(config, EngineConfig(device="cuda", max_context=4096))
    small = planned(config, EngineConfig(device="cuda", memory="1GiB", max_context=4096))
    large = planned(config, EngineConfig(device="cuda", memory="2600MiB", max_context=4096))
    assert 0 < len(small.layers) < len(large.layers) < 32 and free.layers
    assert not planned(config, EngineConfig(device="cuda", speculate="draft:tiny")).layers
    huge = replace(config, vocab_size=1 << 20)
    with pytest.raises(ConfigError, match=r"even with all .*, gpu_memory_utilization=0.9 leaves no memory"):
        planned(huge, EngineConfig(device="cuda"))
    with pytest.raises(ConfigError, match="memory=9GiB does not fit the GPU beside the weights"):
        planned(config, EngineConfig(device="cuda", memory="9GiB", max_context=4096))
    assert large.nbytes == len(large.layers) * 3 * 4096 * 12288 * 2
    assert large.buffers == 2 * 3 * 4096 * 12288 * 2 and large.context == 4096
    little = ModelConfig.preset("qwen3.5-2b")
    assert not planned(little, EngineConfig(device="cuda")).layers
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (GIB + 4 * little.parameter_count, 100 * GIB))
    assert not planned(little, EngineConfig(device="cuda")).layers, "others have the rest, as they may without a limit"
    with pytest.raises(ConfigError, match="gpu_memory=4GiB leaves no memory"):
        planned(little, EngineConfig(device="cuda", gpu_memory="4GiB"))


def test_layers_are_spread_evenly() -> None:
    for count in range(33):
        found = layer_offload._spread(count, 32)
        assert len(found) == len(set(found)) == count and all(0 <= index < 32 for index in found)
        gaps = {second - first for first, second in pairwise(found)}
        assert not gaps or (max(gaps) - min(gaps) <= 1 and 32 // count in gaps)


def test_models_that_stay_on_the_gpu(card: None) -> None:
    dense, mixture = (ModelConfig.preset(name) for name in ("qwen3.5-9b", "qwen3.5-35b-a3b"))
    gpu = EngineConfig(device="cuda")
    assert "expert_memory" in str(why_not_beside(mixture, gpu, "bfloat16"))
    assert "dtype bfloat16" in str(why_not_beside(dense, gpu, "float32"))
    assert "dtype bfloat16" in str(why_not_beside(dense, replace(gpu, ops=("reference",)), "bfloat16"))
    assert why_not_beside(dense, gpu, "bfloat16") is None
    assert planned(dense, replace(gpu, debug_layers=True)) == LayerPlan()
    assert planned(mixture, gpu) == planned(dense, EngineConfig(device="cpu")) == LayerPlan()


def test_sizes_are_those_of_the_tiles() -> None:
    for type, rows, columns in (("Q4_K", 24, 512), ("Q5_K", 9, 256), ("Q4_0", 16, 256), ("Q6_K", 8, 1024)):
        form, block = tiles_form("cpu"), {"Q4_K": 144, "Q5_K": 176, "Q4_0": 144, "Q6_K": 210}[type]
        raw = torch.zeros(rows * columns // 256 * block, dtype=torch.uint8)
        matrix = form.pack(type, 0, rows, columns, columns // 256 * block,
                           lambda start, count, raw=raw: raw[start:start + count])  # type: ignore[misc]
        assert matrix.nbytes == packed_bytes(type, rows, columns)
    assert packed_bytes("Q4_K", 8, 128) is packed_bytes("IQ4_XS", 8, 256) is None
    sizes, plain = (weight_sizes(TINY, "bfloat16", scheme) for scheme in ("q4_k", "none"))
    assert sizes.keys() == plain.keys() and sum(sizes.values()) < 0.45 * sum(plain.values())


def test_weights_are_dequantized_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few rows each, which together are the weight."""
    monkeypatch.setattr(quantized_product, "_PIECE_WEIGHTS", 40 * 512)
    form, raw = tiles_form("cpu"), torch.randint(0, 120, (100 * 2 * 144,), dtype=torch.uint8)
    parts = tuple(form.pack("Q4_K", 0, rows, 512, 288, lambda start, count: raw[start:start + count])
                  for rows in (100, 16, 32))
    assert all(isinstance(part, Tiles) for part in parts)
    for given in (parts, parts[1:2]):
        pieces = [*quantized_product.pieces_of(cast("tuple[Tiles, ...]", given))]
        assert all(rows == sum(part.rows for part in own) <= 40 for rows, own in pieces)
        found = [part.dequantize() for _, own in pieces for part in own]
        assert torch.equal(torch.cat(found), torch.cat([part.dequantize() for part in given]))
    scratch = quantized_product.scratch_for([cast("tuple[Tiles, ...]", parts)])
    assert scratch is not None and scratch.numel() == 40 * 512 and quantized_product.scratch_for([]) is None


# Where they lie


SCHEMES = ["none", "q4_k", "q8_0", "fp8"]


@cache
def random_layers() -> dict[str, Tensor]:
    return dict(random_tensors(TINY, "bfloat16", 3))


@cache
def quantized_layers(scheme: str, offloaded: tuple[int, ...]) -> dict[str, Weight]:
    host = host_layer_form(CPU, computes=True)
    placed = {name: host for index in offloaded for name in matrices_of(index)}
    return quantize_tensors(iter(random_layers().items()), scheme, TINY, replace(tiles_form("cpu"), placed=placed))


def weights_of(scheme: str, offloaded: tuple[int, ...] = ()) -> dict[str, Weight]:
    """The layers of TINY as a GPU has them, and those offloaded as `WeightReader` leaves them: tensors that no test
    may write to, in a dictionary of the caller's own."""
    return {**(random_layers() if scheme == "none" else quantized_layers(scheme, offloaded))}


def plain(weight: Weight) -> Tensor:
    blocks = weight if isinstance(weight, tuple) else (weight,)
    return torch.cat([block if isinstance(block, Tensor) else block.dequantize() for block in blocks]).float()


def offloaded(scheme: str, layers: tuple[int, ...] = (1, 2, 4), compute: str = "card") -> tuple[Any, Decoder, Decoder]:
    """The offload, the model that has it, and the same model without."""
    options = EngineConfig(device="cpu", threads=2)
    object.__setattr__(options, "expert_compute", compute)
    weights = weights_of(scheme, layers)
    found = place_layers(weights, LayerPlan(layers, 1 << 20), options, TINY.num_hidden_layers)
    ops = select((), "cpu") if scheme == "none" else select(("torch",), "cpu")
    ops = replace(ops, pack=lambda matrix, table: matrix)
    models = [build(TINY, [own], ops, torch.bfloat16, scheme != "none", pools)
              for own, pools in ((weights, found.pools), (weights_of(scheme), ()))]
    return found, models[0], models[1]


def blocks_of(weights: MlpWeights) -> list[Tensor]:
    parts = [part for weight in (weights.gate_up, weights.down)
             for part in (weight if isinstance(weight, tuple) else (weight,))]
    return [part if isinstance(part, Tensor) else part.data for part in parts]


@needs_library
@pytest.mark.parametrize("scheme", every(3, SCHEMES))
def test_a_step_copies_each_layer_to_its_place(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit: the kernels then multiply with the same weights. Matrices are packed in several pieces."""
    monkeypatch.setattr(quantized, "WEIGHTS_PER_PIECE", 1 << 16)
    quantized_layers.cache_clear()
    offload, model, whole = offloaded(scheme)
    stream = offload.store.stream(few=False)
    for index, (own, other) in enumerate(zip(model.weights.layers, whole.weights.layers, strict=True)):
        assert (own.dense.pool is not None) == (index in (1, 2, 4))
        with used(stream, own.dense):
            assert own.dense.pool is None or own.dense.pool.nbytes == offload.store.layers[index].memory.nbytes
            base = offload.store._buffers.data_ptr()
            assert own.dense.pool is None or all((block.data_ptr() - base) % 512 == 0 for block in blocks_of(own.dense))
            for mine, right in ((own.dense.gate_up, other.dense.gate_up), (own.dense.down, other.dense.down)):
                assert type(mine) is type(right) and torch.equal(plain(mine), plain(right))
                if isinstance(mine, Tiles):
                    assert isinstance(right, Tiles) and mine.type == right.type and mine.shape == right.shape
    assert model.weight_bytes() == whole.weight_bytes()
    offload.close()


@needs_library
@pytest.mark.parametrize("type", ["Q4_K_M", "BF16"])
def test_layers_of_a_file(type: str, tmp_path: Path) -> None:
    """Only those that the plan moves have another form, and the plan knows the bytes of all."""
    save_file(random_weights(TINY, "bfloat16"), tmp_path / "model.safetensors")
    files = ModelFiles(tmp_path, TINY, GenerationDefaults(eos_token_ids=(3065,)))
    convert(files, tiny_texts(), "a model", tmp_path / "m.gguf", type)
    file = GgufFile.open(tmp_path / "m.gguf")
    sizes, whole = packed_sizes(file, TINY, packed_bytes), load_packed(file, TINY, form=tiles_form("cpu"))
    assert sizes == {name: nbytes(weight) for name, weight in whole.items()}
    host, names = host_layer_form(CPU, computes=True), matrices_of(1)
    found = load_packed(file, TINY, form=replace(tiles_form("cpu"), placed=dict.fromkeys(names, host)))
    assert [name for name, weight in found.items() if isinstance(weight, HostTiles)] == (
        [*names] if type == "Q4_K_M" else [])
    for name, weight in found.items():
        assert torch.equal(plain(weight), plain(whole[name])), name
        if isinstance(weight, HostTiles):
            assert weight.panels and torch.equal(weight.panels.dequantize(), plain(weight))


@needs_library
@pytest.mark.parametrize("scheme", ["none", "q4_k"])
def test_the_reader_keeps_layers_of_the_plan_in_host_memory(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights, as for a GPU whose place the CPU takes; the plan knows the bytes of all."""
    monkeypatch.setattr(reader, "packed_form", lambda options, device: tiles_form("cpu"))
    options = EngineConfig(device="cpu", quant=scheme, dtype="bfloat16", speculate="off")
    source = OpenedModel("random", TINY, GenerationDefaults(), random=RandomModel(shape=TINY))
    made = reader.WeightReader(source, options, select((), "cpu"), "bfloat16")
    (weights,), store = made.read(LayerPlan((1, 4), 1))
    assert store is None and made.tower_bytes() == 0
    assert made.sizes() == {name: nbytes(weight) for name, weight in weights.items()}
    own = [name for name, weight in weights.items() if isinstance(weight, HostTiles)]
    assert own == ([*matrices_of(1), *matrices_of(4)] if scheme == "q4_k" else [])
    (whole,), _ = reader.WeightReader(source, options, select((), "cpu"), "bfloat16").read(LayerPlan())
    assert weights.keys() == whole.keys()
    assert all(torch.equal(plain(weight), plain(whole[name])) for name, weight in weights.items())


def nbytes(weight: Weight) -> int:
    assert not isinstance(weight, tuple)
    return weight.nbytes


@needs_library
def test_gate_and_up_of_different_types() -> None:
    """As in files that were made by others: both become tiles, and the host has all three matrices."""
    weights = weights_of("q4_k", (0,))
    gate, up, down = (weights[name] for name in matrices_of(0))
    rough = weights_of("none")[matrices_of(0)[1]]
    assert isinstance(rough, Tensor) and isinstance(gate, Tiles) and isinstance(up, Tiles) and isinstance(down, Tiles)
    store = LayerStore({0: host_layer([gate, rough, down], CPU)}, CPU)
    store.settle()
    store.copy(0)
    both = store.weights(0).gate_up
    assert isinstance(both, tuple) and [block.type for block in both if isinstance(block, Tiles)] == [gate.type, "BF16"]
    assert torch.equal(plain(both[0]), plain(gate)) and torch.equal(plain(both[1]), rough.float())
    assert store.computable == [0]


def noted(copy: Callable[[int], None], events: list[str], number: int) -> None:
    events.append(f"copy {number}")
    copy(number)


def test_the_order_of_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each as early as its buffer is free, and never while its buffer is in use."""
    layers = {number: host_layer([torch.full((8, 64), float(number)).bfloat16()] * 2
                                 + [torch.full((64, 8), float(number)).bfloat16()], CPU, computes=False)
              for number in (0, 1, 3, 4, 5, 9)}
    for hosted in ((), (1,), (0, 3, 4), (5, 9)):
        store, events = LayerStore(layers, CPU), list[str]()
        store.settle()
        store.hosted = dict.fromkeys(hosted, 0)  # as if the host computed them
        monkeypatch.setattr(store, "copy", partial(noted, store.copy, events))
        for few in (True, False):
            events.clear()
            stream = LayerStream(store, [number for number in layers if not (few and number in hosted)])
            wanted = [number for number in layers if not (few and number in hosted)]
            for number in wanted:
                with stream.use(number):
                    events.append(f"use {number}")
                    assert plain(store.weights(number).down).unique().tolist() == [number]
            assert [event for event in events if "use" in event] == [f"use {number}" for number in wanted]
            assert len(events) == 2 * len(wanted)
        assert events[:2] == ["copy 0", "copy 1"] or hosted, "both buffers are filled at once"


@needs_library
def test_torch_refuses_such_layers() -> None:
    offload, model, _ = offloaded("none")
    with pytest.raises(AssertionError, match="own kernels copy these weights"):
        feed_forward(model.ops, torch.zeros(1, 512), model.weights.layers[1])
    offload.close()


# What the host computes


@needs_library
@pytest.mark.parametrize(("scheme", "rate"), [("none", 4e-3), ("q4_k", 4e-3), ("q8_0", 4e-3)])
def test_the_host_computes_the_layer(scheme: str, rate: float) -> None:
    """As the reference op with the weights of the card, up to rounding."""
    offload, _, whole = offloaded(scheme, compute="host")
    store = offload.store
    assert store.host and store.hosted == {1: 0, 2: 1, 4: 2}
    threads, rng = store.host.cpu_experts, torch.Generator().manual_seed(1)
    x = torch.randn(3, 512, generator=rng).bfloat16()
    store.begin_step()
    for number, place in store.hosted.items():
        threads.counts[:3], threads.experts[:3], threads.shares[:3] = 1, 0, 1.0
        threads.input[:3], threads.factors[:3] = x, 0.5
        threads.ask(place, 3)
        dense = whole.weights.layers[number].dense
        right = reference.mlp(x.float() * 0.5, MlpWeights(plain(dense.gate_up), plain(dense.down)))
        assert (threads.sums[:3] - right).norm() < rate * right.norm(), number
    assert store.host.computed() == 3
    offload.close()


@needs_library
def test_float8_is_left_to_the_card() -> None:
    offload, _, _ = offloaded("fp8", compute="host")
    assert offload.store.computable == [] and offload.store.host is None and not offload.store.hosted
    offload.close()


@needs_library
def test_the_share_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for rates, count in (((9e9, 1e9), 3), ((1e9, 99e9), 0)):
        monkeypatch.setattr(layer_offload, "host_share", lambda host, card, rates=rates: 1.0 if rates[0] > 5e9 else 0.0)
        offload, _, _ = offloaded("none", compute="auto")
        assert len(offload.store.hosted) == count and (offload.store.host is not None) == bool(count)
        offload.close()
    gpu, plan = EngineConfig(device="cuda"), LayerPlan((1,), GIB, GIB)
    assert layer_offload.has_second_form(gpu, plan) == (layer_offload.available_memory() > 2 * GIB)
    monkeypatch.setattr(layer_offload, "available_memory", lambda: GIB)
    assert not layer_offload.has_second_form(gpu, plan), "the host has no memory for a second form"
    monkeypatch.setattr(layer_offload, "available_memory", lambda: 3 * GIB)
    assert layer_offload.has_second_form(gpu, plan)
    for change in ({"expert_compute": "card"}, {"batch_invariant": True}):
        assert not layer_offload.has_second_form(replace(gpu, token_budget=None, **change), plan)


def test_a_host_without_room_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_offload, "available_memory", lambda: 3 * GIB)
    layer_offload.check_host_memory(LayerPlan((1,), 3 * GIB))
    with pytest.raises(ConfigError, match=r"the host has 3.00 GiB left, .* because a note"):
        layer_offload.check_host_memory(LayerPlan((1,), 3 * GIB + 1, note="a note"))


def test_hosted_layers_do_not_depend_on_chance() -> None:
    from deltic.ops.cuda.expert_offload import hosted_experts

    assert np.array_equal(hosted_experts(1, 54, 0.6), hosted_experts(1, 54, 0.6))
    assert hosted_experts(1, 54, 1.0).all() and 25 < hosted_experts(1, 54, 0.6).sum() < 40


def test_experts_have_an_option_of_their_own() -> None:
    with pytest.raises(ConfigError, match="expert_compute=card needs weights offloaded"):
        EngineConfig(device="cpu", expert_compute="card")
    assert EngineConfig(device="cuda", expert_compute="card").expert_compute == "card"


# What a step launches


class Launches:
    """In place of compiled kernels: what was launched, and the layer of each request to the host."""

    def __init__(self) -> None:
        self.names, self.asked = list[str](), list[int]()

    def launch(self, name: str, grid: tuple[int, ...], block: int, arguments: Any, *others: Any, **more: Any) -> None:
        self.names.append(name.split("_8")[0])
        if name == "k_ask_host":
            self.asked.append(arguments.layer)


class FeedForwards(DecodeStep):
    """A step of which only feed-forwards are computed."""

    def __init__(self, decoder: DecoderWeights) -> None:
        found = _Found(4, default_card())
        for layer in decoder.layers:
            found.add_dense(layer.dense)
        self.decoder, self._module, self.blocks, self.hidden = decoder, cast(Module, Launches()), 4, 512
        self.host, self._offloaded, self._experts = found.asks_host, _offloaded_layers(decoder), None
        self._adapters = None
        self._shapes = Shapes(tuple(found.products), None, None, frozenset(found.kinds), found.parts)

    def mix(self, *others: Any) -> None: ...

    def _project_out(self, *others: Any) -> Iterator[Any]:
        yield from ()

    def multiply(self, weight: object, x: Tensor, scale: Tensor | None, y: Tensor, out: int, *others: Any,
                 **named: Any) -> None:
        if out != STORE:
            products = GemvProducts(self._module, self._shapes, self.blocks, self.decoder.eps)
            products.multiply(weight, x, scale, y, out, *others, **named)


@needs_library
@pytest.mark.covering
@pytest.mark.parametrize(("scheme", "product"), [("none", "product"), ("q4_k", "packed")])
@pytest.mark.parametrize("compute", ["card", "host"])
def test_kernels_of_a_step(scheme: str, product: str, compute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is asked for its layers, by their place in its list; all others are multiplied, copied before or not."""
    offload, model, _ = offloaded(scheme, compute=compute)
    monkeypatch.setattr(kernel_config, "_plain", lambda weight: isinstance(weight, Tensor))
    step, launches = FeedForwards(model.weights), Launches()
    monkeypatch.setattr(step, "_module", launches)
    layout = SimpleNamespace(tokens=3)
    batch = SimpleNamespace(layout=layout, count=torch.tensor([3]), starts=torch.arange(4), adapter_entries=None)
    alone(step.layers(cast(Any, SimpleNamespace(batch=batch, residual=torch.zeros(3, 512), over_log=False, kind="few",
                                          y=torch.zeros(3, 8, dtype=torch.bfloat16)))))
    hosted = (1, 2, 4) if compute == "host" else ()
    assert step.host == bool(hosted) and launches.asked == [0, 1, 2][:len(hosted)]
    wanted = [name for index in range(6) for name in (
        ("k_ask_host", "k_add_host") if index in hosted else (f"{product}_512_norm_gate", f"{product}_768_plain_add"))]
    assert [re.sub("_q._k(_4_high)?$", "", name) for name in launches.names] == wanted
    offload.close()
