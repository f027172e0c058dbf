"""Quantized weights on the GPU: products against the numbers that the blocks stand for, in float64; steps and whole
engines against those that have the same weights as plain numbers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import numbers, odd_shape, tiny_texts
from test_cuda_kernels import HEADS, NAN, error, in_slices, normed, randn
from test_cuda_tiles import packed
from test_formats import write
from test_loader_fp8 import checkpoint
from test_stored_blocks import form
from torch import Tensor

from deltic.config import EngineConfig, GenerationDefaults, LinearConfig, ModelConfig, RopeConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import RandomModel, load
from deltic.errors import ConfigError
from deltic.loader.dummy import random_weights
from deltic.loader.gguf.convert import convert
from deltic.loader.model_files import ModelFiles
from deltic.loader.quantize import FP8, quantize_tensors
from deltic.ops.cuda import quantized_product
from deltic.ops.cuda.arguments import EnterArgs
from deltic.ops.cuda.card import default_card
from deltic.ops.cuda.decode import DecodeStep
from deltic.ops.cuda.driver import Module, compile_source
from deltic.ops.cuda.kernel_config import ADD, GATE, STORE, Shapes, gdn_slice
from deltic.ops.cuda.quantized import KINDS, PLAIN_KINDS, Tiles, tiles_form, tiles_of
from deltic.ops.cuda.quantized_product import PackedMultiply, launch, product_of, unpack
from deltic.ops.types import GdnSpec
from deltic.params import EngineRequest, SamplingParams
from deltic.runner.model_runner import ModelRunner

__test__ = torch.cuda.is_available()  # without a device only the helpers below are of use
BLOCKS = 24
"""Few, so that every one has several rounds of units."""
COLUMNS = (256, 1024, 2560, 9216)
MIXED = (("Q6_K", 500), ("Q4_K", 200), ("Q8_0", 5), ("Q5_K", 40))
PLAIN = (("FP8", 343), ("BF16", 24), ("FP8", 13))
BOTH = (("FP8", 343), ("Q8_0", 24))
FOUR_BITS = (("NVFP4", 500), ("INT4_128", 200), ("MXFP4", 5), ("INT4_32", 40))
EVERYWHERE = ("Q4_K", "Q6_K", "FP8")
"""Kinds that are multiplied with every number of columns."""


def weight_of(parts: tuple[tuple[str, int], ...], columns: int) -> tuple[tuple[Tiles, ...], Tensor]:
    found = [packed(kind, rows, columns, seed, "cuda") if kind != "BF16" else _plain(rows, columns)
             for seed, (kind, rows) in enumerate(parts)]
    return tuple(tiles for tiles, _ in found), torch.cat([numbers.cuda() for _, numbers in found])


def _plain(rows: int, columns: int) -> tuple[Tiles, Tensor]:
    weight = randn(rows, columns, dtype=torch.bfloat16) * 0.02
    return tiles_of(weight), weight.double()


def known() -> list[PackedMultiply]:
    """All products of these tests."""
    kinds = [(kind, columns, high) for kind in KINDS for columns in COLUMNS for high in (1, 2)
             if kind in EVERYWHERE or columns == 1024]
    found = [PackedMultiply(columns, norm, out, frozenset({kind}), 1, high) for kind, columns, high in kinds
             for norm, out in ((True, STORE), (False, ADD)) if columns <= 4096 or not norm]
    for high in (1, 2):
        found += [PackedMultiply(columns, True, GATE, frozenset({kind}), 2, high) for columns in COLUMNS
                  for kind in ("Q4_K", "FP8") if columns <= 4096]
        found += [PackedMultiply(columns, True, STORE, frozenset(kind for kind, _ in parts), len(parts), high)
                  for columns in (1024, 2560) for parts in (MIXED, PLAIN, BOTH, FOUR_BITS)]
        found += [PackedMultiply(spec.values, False, ADD, frozenset({kind}), 1, high, spec.value_dim,
                                 gdn_slice(spec, "few"))
                  for spec in HEADS[1:] for kind in ("Q4_K", "FP8")]
    return found


class Modules:
    """Kernels that are compiled side by side."""

    def __init__(self, sources: list[str]) -> None:
        device = torch.device("cuda")
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda source: compile_source(source, default_card().target), sources))
        self._modules = [(source, Module(source, device)) for source in sources]

    def launch(self, name: str, *args: Any, **options: Any) -> None:
        next(module for source, module in self._modules if f" {name}(" in source).launch(name, *args, **options)


@pytest.fixture(scope="module")
def products() -> Module:
    found, count = known(), 12
    modules: Any = Modules([Shapes(tuple(found[index::count]), None, None, frozenset(KINDS)).source()
                            for index in range(count)])
    return modules  # type: ignore[no-any-return]


def multiply(module: Module, parts: tuple[Tiles, ...], x: Tensor, scale: Tensor | None, y: Tensor, out: int,
             spec: GdnSpec | None = None) -> None:
    heads = (spec.value_dim, gdn_slice(spec, "few")) if spec else (0, 0)
    product = product_of(parts, scale is not None, out, BLOCKS, *heads)
    if len(x) > product.most:  # of a card with less shared memory
        half = len(x) // 2
        for part in (slice(half), slice(half, None)):
            multiply(module, parts, x[part], scale, y[part], out, spec)
        return
    launch(module, product, parts, len(x), BLOCKS, x=x, scale=scale, y=y, eps=1e-6)
    torch.cuda.synchronize()


def tokens_of(parts: tuple[Tiles, ...], norm: bool = False) -> list[int]:
    most = product_of(parts, norm, STORE, BLOCKS).most
    return [tokens for tokens in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16) if tokens <= most]


def check_store(products: Module, parts: tuple[Tiles, ...], weight: Tensor) -> None:
    """A token's sums are the numbers' and depend on nothing else."""
    rows, columns = weight.shape
    x, scale = randn(16, columns, seed=1) * 3, randn(columns, seed=2) * 0.1 + 1
    alone = torch.full((16, rows), NAN, device="cuda")
    for token in range(16):
        multiply(products, parts, x[token:token + 1], scale, alone[token:token + 1], STORE)
    factor = (x.double().square().mean(-1, True) + 1e-6).rsqrt()
    own = weight.split([part.rows for part in parts])
    wanted = torch.cat([((x * scale).bfloat16() if part.type in PLAIN_KINDS else x.double() * scale.double()).double()
                        * factor @ numbers.t() for part, numbers in zip(parts, own, strict=True)], 1)
    assert error(alone, wanted) < 5e-5
    for tokens in tokens_of(parts, norm=True):
        y = torch.full((tokens, rows), NAN, device="cuda")
        multiply(products, parts, x[:tokens], scale, y, STORE)
        assert torch.equal(y, alone[:tokens]), tokens


@pytest.mark.parametrize("rows", [1003, 868, 150])  # six units of a block at most, five, one
@pytest.mark.parametrize(("kind", "columns"), [(kind, columns) for kind in KINDS for columns in COLUMNS
                                               if kind in EVERYWHERE or columns == 1024])
def test_products(products: Module, kind: str, columns: int, rows: int) -> None:
    if rows < 8 * BLOCKS and kind not in EVERYWHERE:
        rows = 8 * BLOCKS + 13  # so that of many blocks one unit is alone
    parts, weight = weight_of(((kind, rows),), columns)
    if columns <= 4096:
        check_store(products, parts, weight)
    for tokens in tokens_of(parts):
        x, old = randn(tokens, columns, seed=4, dtype=torch.bfloat16), randn(tokens, rows, seed=5)
        y, alone = old.clone(), old.clone()
        multiply(products, parts, x, None, y, ADD)
        assert error(y, old.double() + x.double() @ weight.t()) < 5e-5
        for token in range(tokens):
            multiply(products, parts, x[token:token + 1], None, alone[token:token + 1], ADD)
        assert torch.equal(y, alone), tokens
    whole = weight.float().bfloat16()
    assert torch.equal(unpack(products, parts), whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantized_product, "_PIECE_WEIGHTS", 3000 * columns)
        scratch = quantized_product.scratch_for([parts])
        pieces = [unpack(products, piece, scratch).clone() for _, piece in quantized_product.pieces_of(parts)]
    assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("kinds", [MIXED, PLAIN, BOTH, FOUR_BITS], ids=["whole numbers", "plain", "both", "four bits"])
@pytest.mark.parametrize("columns", [1024, 2560])
def test_parts_of_several_kinds(products: Module, columns: int, kinds: tuple[tuple[str, int], ...]) -> None:
    check_store(products, *weight_of(kinds, columns))


@pytest.mark.parametrize("rows", [600, 900])  # four units of a block at most, five
@pytest.mark.parametrize("kind", ["Q4_K", "FP8"])
@pytest.mark.parametrize("columns", [256, 1024, 2560])
def test_gated_products(products: Module, columns: int, kind: str, rows: int) -> None:
    parts, weight = weight_of(((kind, rows), (kind, rows)), columns)
    for tokens in (1, 5, 16):
        x, scale = randn(tokens, columns, seed=1), randn(columns, seed=2) * 0.1 + 1
        y = torch.full((tokens, rows), NAN, device="cuda", dtype=torch.bfloat16)
        multiply(products, parts, x, scale, y, GATE)
        normalised = x.double() * (x.double().square().mean(-1, True) + 1e-6).rsqrt() * scale.double()
        gate, up = (normalised @ weight.t()).chunk(2, -1)
        assert error(y, gate * gate.sigmoid() * up) < 5e-3


@pytest.mark.parametrize("rows", [1003, 868])
@pytest.mark.parametrize("kind", ["Q4_K", "FP8"])
@pytest.mark.parametrize("spec", HEADS[1:], ids=lambda spec: str(spec.values))
def test_products_of_heads(products: Module, spec: GdnSpec, kind: str, rows: int) -> None:
    parts, weight = weight_of(((kind, rows),), spec.values)
    core, gates = randn(2, spec.values, seed=1), randn(2, spec.values + 60, seed=2)[:, 8:8 + spec.values]
    norm, old = randn(spec.value_dim, seed=3) * 0.1 + 1, randn(2, rows, seed=5)
    y = old.clone()
    left = in_slices(core, gates, spec, norm)
    multiply(products, parts, left, None, y, ADD, spec)
    assert error(y, old.double() + normed(core.double(), gates.double(), spec, norm.double()) @ weight.t()) < 4e-3
    multiply(products, parts, left[:1], None, old[:1], ADD, spec)
    assert torch.equal(old[0], y[0])


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings(products: Module, kind: str) -> None:
    (tiles,), weight = weight_of(((kind, 1003),), 512)
    ids = torch.tensor([1002, 0, 77], device="cuda")
    residual, turns = torch.full((3, 512), NAN, device="cuda"), torch.zeros(3, 8, device="cuda")
    positions, axes = (torch.zeros(shape, dtype=torch.int64, device="cuda") for shape in ((3, 3), (4,)))
    frequencies = torch.ones(4, device="cuda")
    products.launch(f"k_enter_{kind.lower()}", (BLOCKS,), 256, EnterArgs(
        ids=ids, positions=positions, embedding=tiles.data, frequencies=frequencies, axes=axes, residual=residual,
        turns=turns, factor=1.0, hidden=512, rotary=8, tokens=3))
    assert error(residual, weight[ids]) < 1e-6
    assert torch.equal(tiles.lookup(ids).double(), residual.double()) or error(tiles.lookup(ids), residual) < 1e-6


# Whole engines

SHAPE = odd_shape(vocab_size=3072, hidden_size=256, intermediate_size=768, num_attention_heads=4, head_dim=64,
                  num_hidden_layers=4, linear=LinearConfig(4, 8, 32, 32, 4), rope=RopeConfig(1e4, 16, (3, 3, 2)),
                  layer_types=("linear_attention", "full_attention", "linear_attention", "linear_attention"),
                  dtype="bfloat16")


def options(**changes: object) -> EngineConfig:
    return EngineConfig(**{"device": "cuda", "dtype": "bfloat16", "memory": "64MiB", "max_batch": 20,  # type: ignore
                           "max_context": 512, "speculate": "off", **changes})


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return file_of(random_weights(SHAPE, "float32", initializer_range=0.08), "Q4_K_M", tmp_path_factory.mktemp("gguf"))


def file_of(weights: dict[str, Tensor], type: str, place: Path, shape: ModelConfig = SHAPE) -> Path:
    """A GGUF file of this type."""
    save_file(weights, place / "model.safetensors")
    convert(ModelFiles(place, shape, GenerationDefaults(eos_token_ids=(3065,))), tiny_texts(), "small",
            place / "m.gguf", type)
    return place / "m.gguf"


def answers(runtime: ModelRunner, count: int, prompt: int | None = None) -> list[list[int]]:
    """prompt: tokens of each prompt; None: 40 and more."""
    engine = Engine(runtime)
    engine.scheduler.times = None  # what is computed together may not depend on the time
    found: dict[str, list[int]] = {str(index): [] for index in range(count)}
    for index in range(count):
        engine.add(EngineRequest(str(index), numbers(index, prompt or 40 + index, 3000), SamplingParams(
            temperature=0.0, max_tokens=24, ignore_eos=True)))
    while engine.has_work:
        for event in engine.step():
            found[event.request] += [] if event.token is None else [event.token]
    return list(found.values())


def test_file_stays_quantized(file: Path) -> None:
    packed, plain = load(str(file), options()), load(str(file), options(packed_weights="off"))
    assert isinstance(packed.step, DecodeStep) and isinstance(plain.step, DecodeStep)
    kinds = packed.decoder.weight_kinds()
    assert {"Q4_K", "Q6_K"} <= {*kinds} and packed.decoder.weight_bytes() < 0.4 * plain.decoder.weight_bytes()
    alone = answers(packed, 1)[0]
    together = answers(packed, 16)
    assert together[0] == alone, "an answer depends on its neighbours"
    same = [one == other for found, wanted in zip(together, answers(plain, 16), strict=True)
            for one, other in zip(found[:4], wanted[:4], strict=True)]
    assert sum(same) > 0.7 * len(same)
    assert all(len(found) == 24 for found in answers(packed, 20))  # 17 rows and more: plain copies


def test_float8_model(tmp_path: Path) -> None:
    """Answers as of the same numbers in bfloat16, and the same alone and together."""
    sources = random_weights(SHAPE, "float32", initializer_range=0.08)
    rounded = {name: weight.dequantize() if isinstance(weight, Tiles) else weight
               for name, weight in quantize_tensors(iter(sources.items()), FP8, SHAPE, tiles_form("cpu")).items()}
    file = str(file_of(rounded, "BF16", tmp_path))  # type: ignore[arg-type]
    packed, plain = load(file, options(quant="fp8")), load(file, options())
    assert isinstance(packed.step, DecodeStep) and {"FP8", "Q8_0"} <= {*packed.decoder.weight_kinds()}
    assert packed.decoder.weight_bytes() < 0.65 * plain.decoder.weight_bytes()
    alone, together = answers(packed, 1)[0], answers(packed, 16)
    assert together[0] == alone, "an answer depends on its neighbours"
    same = [one == other for found, wanted in zip(together, answers(plain, 16), strict=True)
            for one, other in zip(found[:4], wanted[:4], strict=True)]
    assert sum(same) > 0.7 * len(same)
    assert all(len(found) == 24 for found in answers(packed, 20))  # 17 rows and more: plain copies


@pytest.mark.parametrize("name", ["qwen3.5-4b", "qwen3.5-9b"])
@pytest.mark.parametrize("quant", ["fp8", "q4_k", "nvfp4", "int4"])
def test_input_larger_than_shared_memory(name: str, quant: str) -> None:
    """Weights of two kinds take each input in two forms: then 9 to 16 rows are multiplied in two parts. Prompts are of
    one token, as products of more than 16 tokens round by their number."""
    shape = replace(ModelConfig.preset(name, 4), vocab_size=5003, intermediate_size=2560)
    model = RandomModel(shape=shape, initializer_range=0.05)
    packed = load(model, options(quant=quant, memory="1GiB", prefix_cache=False))
    alone = answers(packed, 1, prompt=1)[0]
    assert len(alone) == 24
    for count in (9, 13, 14, 16):
        assert answers(packed, count, prompt=1)[0] == alone, count


def test_file_that_torch_serves(file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Its weights become bfloat16 at load where they fit; else torch dequantizes them in every step."""
    caplog.set_level("INFO")
    plain = load(str(file), options(ops=("torch",)))
    assert {*plain.decoder.weight_kinds()} == {"BF16", "F32"}
    assert "the weights become bfloat16 when they are loaded, as with `ops` torch serves the model" in caplog.text
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * SHAPE.parameter_count, 80 << 30))
    packed = load(str(file), options(memory="16MiB", ops=("torch",)))
    assert "torch dequantizes each matrix in every step; the CPU (device=cpu) may be faster" in caplog.text
    assert {"Q4_K", "Q6_K"} <= {*packed.decoder.weight_kinds()}
    same = [one == other for found, wanted in zip(answers(packed, 4), answers(plain, 4), strict=True)
            for one, other in zip(found[:4], wanted[:4], strict=True)]
    assert sum(same) > 0.7 * len(same)


def test_float8_checkpoint_stays_as_it_is(tmp_path: Path) -> None:
    """Without an option, and its answers are those of the same numbers in bfloat16."""
    checkpoint(SHAPE, tmp_path)
    packed, plain = load(str(tmp_path), options()), load(str(tmp_path), options(packed_weights="off"))
    assert isinstance(packed.step, DecodeStep) and {"FP8", "BF16"} <= {*packed.decoder.weight_kinds()}
    assert "FP8" not in plain.decoder.weight_kinds()
    alone, together = answers(packed, 1)[0], answers(packed, 16)
    assert together[0] == alone, "an answer depends on its neighbours"
    same = [one == other for found, wanted in zip(together, answers(plain, 16), strict=True)
            for one, other in zip(found[:4], wanted[:4], strict=True)]
    assert sum(same) > 0.7 * len(same)


@pytest.mark.parametrize(("name", "type"), [("NVFP4", "NVFP4"), ("gptq, zeros", "INT4_32")])
def test_checkpoint_of_four_bits_stays_as_it_is(name: str, type: str, tmp_path: Path) -> None:
    """Answers as of the same numbers in bfloat16, and the same alone and together."""
    shape = replace(SHAPE, num_mtp_layers=1)
    write(tmp_path, shape, form(name))
    packed, plain = load(str(tmp_path), options()), load(str(tmp_path), options(packed_weights="off"))
    assert isinstance(packed.step, DecodeStep) and {type, "BF16"} <= {*packed.decoder.weight_kinds()}
    assert type not in plain.decoder.weight_kinds()
    alone, together = answers(packed, 1)[0], answers(packed, 16)
    assert together[0] == alone, "an answer depends on its neighbours"
    same = [one == other for found, wanted in zip(together, answers(plain, 16), strict=True)
            for one, other in zip(found[:4], wanted[:4], strict=True)]
    assert sum(same) > 0.7 * len(same)
    assert all(len(found) == 24 for found in answers(packed, 20))  # 17 rows and more: plain copies


def test_unsupported_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="bfloat16"):
        load(RandomModel(shape=SHAPE), options(quant="q4_k", dtype="float32"))
