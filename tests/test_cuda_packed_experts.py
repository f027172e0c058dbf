"""Experts that stay quantized on a GPU: against the numbers that their blocks stand for, in float64; a token's bits its
own; whole models, from files and quantized at load, against those with the same weights as plain numbers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from four_bit_cases import random_four_bits
from safetensors.torch import save_file
from support import moe_shape, tiny_texts
from test_card_sources import compiled
from test_cuda_experts import rows
from test_cuda_kernels import CURSORS, NAN, batch_of, check_alone, check_replays, error, fill, randn, served
from test_cuda_packed import answers
from test_cuda_source import BLOCK, members
from test_cuda_tiles import FOUR_BITS, random_blocks, random_float8
from torch import Tensor

from deltic.config import EngineConfig, ExpertsConfig, GenerationDefaults, LinearConfig, ModelConfig, RopeConfig
from deltic.engine.loading import RandomModel, load
from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.errors import ConfigError
from deltic.loader.dummy import random_tensors, random_weights
from deltic.loader.gguf.blocks import BY_NAME, decode
from deltic.loader.gguf.convert import convert
from deltic.loader.gguf.file import GgufFile
from deltic.loader.gguf.load import load_packed, unserved_experts
from deltic.loader.model_files import ModelFiles
from deltic.loader.quantize import FP8_TYPE, quantize_tensors
from deltic.model.decoder import build as build_decoder
from deltic.ops import reference, select
from deltic.ops.cuda import arguments, quantized
from deltic.ops.cuda.card import CARDS, Card, default_card
from deltic.ops.cuda.driver import Module, compile_source, headers
from deltic.ops.cuda.moe import ALL_REAL, ExpertsShape, RealTokens
from deltic.ops.cuda.quantized import KINDS, Tiles, pack_stack
from deltic.ops.cuda.quantized_moe import Kinds, PackedShape, QuantizedMoeOp, experts_shape, knows_packed, scratch_bytes
from deltic.ops.types import Block, MlpWeights, MoeWeights
from deltic.runner.input_batch import build
from deltic.runner.memory import working_bytes
from deltic.runner.model_runner import ModelRunner

UNITS_APART = True
needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
GIB = 1 << 30


def kinds(gate: str, up: str = "", down: str = "") -> Kinds:
    return Kinds(gate, up or gate, down or gate)


def shape(hidden: int, size: int, count: int, per_token: int, routed: Kinds, shared: Kinds | None = None,
          normalised: bool = True) -> PackedShape:
    return PackedShape(hidden, size, count, per_token, shared is not None, normalised, frozenset({routed}),
                       frozenset({shared} if shared else ()))


Q4_K_M, Q8_0 = kinds("Q4_K", down="Q6_K"), kinds("Q8_0")
TRUE = shape(2048, 512, 256, 8, Q4_K_M, Q8_0)
"""A layer of 35B-A3B."""
SHAPES = {
    "Q4_K": shape(512, 256, 5, 2, kinds("Q4_K"), kinds("Q4_K")),
    "Q5_K": shape(256, 256, 40, 4, kinds("Q5_K"), kinds("Q6_K")),
    "Q6_K": shape(768, 512, 9, 9, kinds("Q6_K"), kinds("Q4_K")),
    "Q8_0": shape(2304, 256, 60, 3, Q8_0, kinds("Q5_K"), normalised=False),
    "plain shared": shape(512, 1024, 20, 4, Q4_K_M, kinds("BF16")),
    "none shared, halves of two kinds": shape(768, 768, 30, 5, Kinds("Q5_K", "Q4_K", "Q8_0")),
    "large": shape(3072, 1024, 12, 8, Q4_K_M, kinds("Q6_K", "Q8_0", "BF16")),
    "35B-A3B": TRUE,
    "FP8": shape(512, 512, 24, 4, kinds("FP8"), kinds("FP8")),
    "four bits": shape(512, 256, 24, 4, Kinds("NVFP4", "INT4_128", "MXFP4"), kinds("INT4_64", down="INT4_32")),
    "FP8 beside whole numbers": shape(768, 256, 10, 3, Kinds("FP8", "Q8_0", "Q4_K"), kinds("Q4_K", "FP8", "FP8")),
}
BLOCKS = 24
"""Few, so that every one has several items."""


def source(shape: PackedShape) -> str:
    return headers("input", "small", "packed", *shape.files) + "".join(shape.entries())


# Without a card


@pytest.mark.parametrize("name", ["PackedGate", "PackedDown", "UnpackExperts"])
def test_struct_layouts(name: str) -> None:
    assert [name for name, *_ in getattr(arguments, f"{name}Args")._fields_] == members(name)


LARGER = [replace(TRUE, hidden=3072, size=1024), replace(TRUE, hidden=4096, size=1024, count=512, per_token=10)]


@pytest.mark.parametrize("shape", [*SHAPES.values(), *LARGER], ids=str)
def test_blocks_fit(shape: PackedShape) -> None:
    shape = replace(shape, card=CARDS["sm_90"])
    assert shape.known and shape.shared_memory <= BLOCK and shape.most >= 8
    for tokens in range(1, shape.most + 1):
        group, slots, first = shape.gate_plan(tokens, 132)
        then, second = shape.down_plan(tokens, 132)
        assert group >= 1 and min(slots, then) >= 2 and max(slots, then) <= 16 and max(first, second) <= BLOCK
    assert all(1 <= shape.wide(kinds) <= 8 for kinds in shape.routed | shape.shared_one)


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
@pytest.mark.parametrize("shape", [*SHAPES.values(), *LARGER], ids=str)
def test_blocks_fit_every_card(shape: PackedShape, card: Card) -> None:
    shape = replace(shape, card=card)
    assert shape.known and shape.shared_memory <= card.shared_memory
    for tokens in range(1, shape.most + 1):
        (_, slots, first), (then, second) = shape.gate_plan(tokens, 82), shape.down_plan(tokens, 82)
        assert min(slots, then) >= (1 if tokens == 1 else 2) and max(first, second) <= card.max_shared_bytes


def test_unsupported_shapes() -> None:
    assert replace(TRUE, card=CARDS["sm_90"]).most == 16
    assert knows_packed(2048, 512, 256, 8, 512) and knows_packed(2048, 512, 256, 8, 0)
    for sizes in ((2048 + 64, 512, 256, 8, 0), (2048, 384, 256, 8, 384), (2048, 512, 256, 8, 1024),
                  (8192, 512, 256, 8, 0), (2048, 4096, 256, 8, 0), (2048, 512, 2048, 8, 0)):
        assert not knows_packed(*sizes)


def test_one_kernel_for_layers_of_several_types() -> None:
    other = replace(TRUE, routed=frozenset({kinds("Q4_K")}))
    both = TRUE.joined(other)
    assert isinstance(both, PackedShape) and both.routed == TRUE.routed | other.routed
    assert both == other.joined(TRUE) == both.joined(TRUE)
    assert TRUE.joined(replace(other, size=1024)) is None
    plain = ExpertsShape(2048, 512, 256, 8, True, True)
    assert TRUE.joined(plain) is None and plain.joined(TRUE) is None and plain.joined(plain) == plain


@pytest.mark.slow
@pytest.mark.parametrize("name", ["35B-A3B", "plain shared", "none shared, halves of two kinds", "FP8"])
def test_sources_compile(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for card in CARDS.values():
        assert compiled(source(replace(SHAPES[name], card=card)), card.target)[:4] == b"\x7fELF"


@pytest.mark.parametrize("count_rows", [(3, 16), (2, 12)])
@pytest.mark.parametrize("type", ["Q4_K", "Q6_K", "Q8_0", "Q4_0"])
def test_stacked_tiles_equal_the_blocks(type: str, count_rows: tuple[int, int]) -> None:
    count, rows = count_rows
    flat = random_blocks(type, count * rows, 512).reshape(-1)
    stack = pack_stack(type, BY_NAME[type].id, count, rows, 512, BY_NAME[type].size(512),
                       lambda start, size: flat[start:start + size], "cpu")
    wanted = torch.from_numpy(decode(flat, BY_NAME[type])).view(count, rows, 512)
    assert torch.allclose(torch.stack([matrix.dequantize() for matrix in stack]), wanted, rtol=1e-6, atol=1e-9)
    one = stack[0].data.untyped_storage().data_ptr()
    assert rows % 8 or all(matrix.data.untyped_storage().data_ptr() == one for matrix in stack), "copies"


SMALL = moe_shape(vocab_size=3072, hidden_size=512, num_attention_heads=4, head_dim=64, num_hidden_layers=4,
                  linear=LinearConfig(4, 8, 32, 32, 4), rope=RopeConfig(1e4, 16, (3, 3, 2)), dtype="bfloat16",
                  layer_types=("linear_attention", "full_attention", "linear_attention", "linear_attention"),
                  experts=ExpertsConfig(24, 4, 256, 256))


def written(place: Path, config: ModelConfig) -> Path:
    save_file(random_weights(config, "float32", initializer_range=0.08), place / "model.safetensors")
    convert(ModelFiles(place, config, GenerationDefaults(eos_token_ids=(3065,))), tiny_texts(), "small",
            place / "m.gguf", "Q4_K_M")
    return place / "m.gguf"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("gguf"), SMALL)


def test_experts_of_a_file_become_tiles(file: Path) -> None:
    """Also if they are quantized at load; and all layers have one set of kernels."""
    form, opened = quantized.tiles_form("cpu"), GgufFile.open(file)
    assert not unserved_experts(opened, form)
    weights = {"file": load_packed(opened, SMALL, form=form),
               "quantized": quantize_tensors(random_tensors(SMALL, "bfloat16"), "q4_k", SMALL, form)}
    for found in weights.values():
        decoder = build_decoder(SMALL, [found], select((), "cpu"), torch.bfloat16)
        shapes = []
        for layer in decoder.weights.layers:
            assert isinstance(layer.mlp, MoeWeights) and isinstance(layer.mlp.experts, tuple)
            blocks = [block for part in layer.mlp.experts for block in (*part.gate_up, part.down)]
            assert len(blocks) == 72 and all(isinstance(block, Tiles) for block in blocks)
            shapes.append(experts_shape(replace(layer.mlp, router=torch.zeros(25, 512, dtype=torch.bfloat16))))
        joined: ExpertsShape | None = shapes[0]
        for own in shapes:
            joined = joined and own and own.joined(joined)
        assert isinstance(joined, PackedShape) and joined.known
        assert {kinds.down for kinds in joined.routed} == {"Q4_K", "Q6_K"}


def test_scratch_memory_is_planned() -> None:
    mixture = ModelConfig.preset("qwen3.5-35b-a3b")
    room = scratch_bytes(257, 512, 2048)
    assert 1.6e9 < room < 1.7e9
    assert working_bytes(mixture, 8192, True) == working_bytes(mixture, 8192) + room
    dense = ModelConfig.preset("qwen3.5-4b")
    assert working_bytes(dense, 8192, True) == working_bytes(dense, 8192)


# The operation


def stack_of(kind: str, count: int, rows: int, columns: int, seed: int) -> tuple[Block, ...]:
    if kind == "BF16":
        return tuple(randn(count, rows, columns, seed=seed, dtype=torch.bfloat16) * columns**-0.5)
    type = {"FP8": FP8_TYPE, **BY_NAME, **FOUR_BITS}[kind]
    if kind == "FP8":
        raw = random_float8(count * rows, columns, seed)[0]
    else:
        raw = (random_four_bits if kind in FOUR_BITS else random_blocks)(kind, count * rows, columns, seed)
    flat = raw.reshape(-1)
    return pack_stack(kind, type.id, count, rows, columns, type.size(columns),
                      lambda start, size: flat[start:start + size], "cuda")


def experts_of(shape: PackedShape, kinds: Kinds, count: int, seed: int) -> list[MlpWeights]:
    gates, ups = (stack_of(kind, count, shape.size, shape.hidden, seed + index)
                  for index, kind in enumerate((kinds.gate, kinds.up)))
    downs = stack_of(kinds.down, count, shape.hidden, shape.size, seed + 2)
    return [MlpWeights((gate, up), down) for gate, up, down in zip(gates, ups, downs, strict=True)]


def weights_of(shape: PackedShape) -> MoeWeights:
    (routed,), common = shape.routed, next(iter(shape.shared_one), None)
    router = randn(shape.count + shape.shared, shape.hidden, seed=1, dtype=torch.bfloat16) * shape.hidden**-0.5
    return MoeWeights(router, tuple(experts_of(shape, routed, shape.count, 10)),
                      experts_of(shape, common, 1, 20)[0] if common else None, shape.per_token, shape.normalised)


@dataclass
class Mixture:
    """One layer on the card."""

    shape: PackedShape
    weights: MoeWeights
    experts: QuantizedMoeOp
    scale: Tensor

    def input(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Residual, its norm [T, H] float64, and the router's products [T, n] float32."""
        residual = randn(tokens, self.shape.hidden, seed=tokens) * 2
        normed = residual.double() * (residual.double().square().mean(-1, True) + 1e-6).rsqrt() * self.scale.double()
        assert isinstance(self.weights.router, Tensor)
        return residual, normed, (normed @ self.weights.router.double().t()).float().contiguous()

    def wanted(self, normed: Tensor) -> Tensor:
        """By the oracle, which knows tiles as their numbers."""
        assert isinstance(self.weights.router, Tensor)
        return reference.moe(normed, replace(self.weights, router=self.weights.router.double()))

    def few(self, residual: Tensor, logits: Tensor, real: RealTokens = ALL_REAL) -> Tensor:
        """What is given to the residual."""
        found = residual.clone()
        self.experts.gemv_rows(self.weights, found, self.scale, 1e-6, logits.contiguous(), real)
        return found


@pytest.fixture(scope="module")
def all_compiled() -> None:
    """All kernels, side by side."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda shape: compile_source(source(shape), default_card().target),
                      SHAPES.values()))


@pytest.fixture(scope="module", params=SHAPES)
def mixture(request: pytest.FixtureRequest, all_compiled: None) -> Mixture:
    shape, device = SHAPES[request.param], torch.device("cuda", torch.cuda.current_device())
    weights = weights_of(shape)
    assert experts_shape(weights) == shape
    experts = QuantizedMoeOp(Module(source(shape), device), shape, [weights], BLOCKS)
    return Mixture(shape, weights, experts, randn(shape.hidden, seed=3) * 0.1 + 1)


@needs_card
def test_few_tokens(mixture: Mixture) -> None:
    """Right, and a token's bits are its own, with every number of tokens and in every order."""
    residual, normed, logits = mixture.input(16)
    whole = mixture.few(residual, logits)
    assert error(whole.double() - residual.double(), mixture.wanted(normed)) < 6e-3
    for tokens in range(1, 16):
        assert torch.equal(mixture.few(residual[:tokens], logits[:tokens]), whole[:tokens]), tokens
    for token in range(16):
        assert torch.equal(mixture.few(residual[token:token + 1], logits[token:token + 1])[0], whole[token]), token
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1)).cuda()
    assert torch.equal(mixture.few(residual[order], logits[order]), whole[order])
    same = logits[:1].repeat(16, 1)  # all pass the same experts
    assert torch.equal(mixture.few(residual, same)[0], whole[0])
    for _ in range(20):
        assert torch.equal(mixture.few(residual, logits), whole), "it differs from run to run"


@needs_card
def test_few_tokens_in_several_passes(mixture: Mixture) -> None:
    residual, _, logits = mixture.input(70)
    found = mixture.few(residual, logits)
    assert torch.equal(found[33:38], mixture.few(residual[33:38], logits[33:38]))
    who = rows(*[1] * 37, filling=33)
    some = mixture.few(residual, logits, who)
    assert torch.equal(some[:37], found[:37]) and torch.equal(some[37:], residual[37:])


@needs_card
@pytest.mark.parametrize("blocks", [1, 7, 132])
def test_number_of_blocks_changes_no_bit(mixture: Mixture, blocks: int) -> None:
    residual, _, logits = mixture.input(5)
    wanted = mixture.few(residual, logits)
    other = QuantizedMoeOp(mixture.experts._module, mixture.shape, [mixture.weights], blocks)
    found = residual.clone()
    other.gemv_rows(mixture.weights, found, mixture.scale, 1e-6, logits)
    assert torch.equal(found, wanted)


@needs_card
@pytest.mark.parametrize("tokens", [17, 300, 1500])
def test_many_tokens(mixture: Mixture, tokens: int) -> None:
    _, normed, _ = mixture.input(tokens)
    x = normed.bfloat16()
    sample = sorted({0, tokens // 3, tokens - 1})
    found = mixture.experts.gemm_rows(mixture.weights, x)
    assert bool(found.isfinite().all()) and error(found[sample], mixture.wanted(x[sample].double())) < 8e-3
    assert not bool(mixture.experts._counts.any())
    mixture.experts._gate.fill_(NAN)  # what is not passed is not looked at
    mixture.experts._down.fill_(NAN)
    assert torch.equal(mixture.experts.gemm_rows(mixture.weights, x), found)


@needs_card
def test_padding_chooses_no_experts(mixture: Mixture) -> None:
    residual, _, logits = mixture.input(16)
    for real in ((1, 1, 1), (1, 3, 1), (1,) * 9):
        count = sum(real)
        found = mixture.few(residual, logits, rows(*real, filling=3))
        assert torch.equal(found[:count], mixture.few(residual[:count], logits[:count]))
        assert torch.equal(found[count:], residual[count:])


@needs_card
def test_nan_token_changes_no_other_token(mixture: Mixture) -> None:
    residual, _, logits = mixture.input(9)
    well, others = mixture.few(residual, logits), [token for token in range(9) if token != 4]
    for bad in (NAN, float("inf")):
        sick, told = residual.clone(), logits.clone()
        sick[4, 7], told[4] = bad, NAN
        found = mixture.few(sick, told)
        assert torch.equal(found[others], well[others]) and not bool(found[4].isfinite().all())


@needs_card
def test_tile_memory() -> None:
    """And are not copied where the kernels are made ready: only a layer's plain numbers come to them."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    weights = weights_of(TRUE)
    held = torch.cuda.memory_allocated() - before
    bits = {kind: found.nbytes * 8 / 2048 for kind, found in KINDS.items()}
    wanted = 2048 * 512 * (256 * (2 * bits["Q4_K"] + bits["Q6_K"]) + 3 * bits["Q8_0"]) / 8
    assert wanted <= held < 1.02 * wanted
    experts = QuantizedMoeOp(Module(source(TRUE), device), TRUE, [weights], BLOCKS)
    added = torch.cuda.memory_allocated() - before - held - scratch_bytes(257, 512, 2048)
    assert 0 <= added < 8 << 20 and experts.max_gemv_tokens


# Whole models


def options(**changes: object) -> EngineConfig:
    return EngineConfig(**{"device": "cuda", "dtype": "bfloat16", "memory": "256MiB", "max_batch": 64,  # type: ignore
                           "max_context": 1024, "speculate": "off", **changes})


ALL_PASSED = replace(SMALL, experts=ExpertsConfig(4, 4, 256, 256))


@pytest.fixture(scope="module", params=["all passed", "some passed", "float8"])
def runtime(request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    yield load(RandomModel(shape=SMALL if request.param == "some passed" else ALL_PASSED),
               options(quant="fp8" if request.param == "float8" else "q4_k"))
    torch.cuda.empty_cache()


def close(runtime: ModelRunner) -> float:
    """As far as a step may be from torch's; which experts a token passes, rounding decides now and then."""
    if runtime.options.quant == "fp8":  # which rounds activations on both sides
        return 0.1
    return 5e-2 if runtime.config.experts == ALL_PASSED.experts else 0.3


@needs_card
@pytest.mark.parametrize("done", CURSORS, ids=lambda done: f"{len(done)}-{done[0]}")
@torch.inference_mode()
def test_steps(runtime: ModelRunner, done: list[int]) -> None:
    assert ({"FP8"} if runtime.options.quant == "fp8" else {"Q4_K", "Q6_K"}) <= {*runtime.decoder.weight_kinds()}
    fill(runtime)
    batch = batch_of(done, len(done))
    wanted = runtime.decoder.logits(runtime.decoder.forward(batch, runtime.views))
    fill(runtime)
    found = served(runtime)(replace(batch, memo={}))
    assert found is not None and error(found[0], wanted) < close(runtime)


@needs_card
@pytest.mark.parametrize("lengths", [(30, 50), (90, 160, 230)], ids=str)
@torch.inference_mode()
def test_prompts(runtime: ModelRunner, lengths: tuple[int, ...]) -> None:
    """Of few tokens and of many."""
    plan = StepPlan(tuple(PlannedRow(tuple((7 * row + 3 * i) % 3000 for i in range(length)), 0,
                          tuple(range(20 * row, 20 * row + 20)), row, 1) for row, length in enumerate(lengths)))
    batch = build(plan, runtime.pools.device)
    wanted = runtime.decoder.logits(runtime.decoder.forward(batch, runtime.views))
    found = served(runtime)(replace(batch, memo={}))
    assert found is not None and error(found[0], wanted) < close(runtime)


@needs_card
@pytest.mark.parametrize("rows", [1, 5, 40])
@torch.inference_mode()
def test_replayed_steps(runtime: ModelRunner, rows: int) -> None:
    check_replays(runtime, rows)


@needs_card
@torch.inference_mode()
def test_token_bits_do_not_depend_on_batch(runtime: ModelRunner) -> None:
    check_alone(runtime)


def agreement(one: list[list[int]], other: list[list[int]], tokens: int) -> float:
    """Share of the first tokens of all answers that are the same."""
    same = [a == b for found, wanted in zip(one, other, strict=True)
            for a, b in zip(found[:tokens], wanted[:tokens], strict=True)]
    return sum(same) / len(same)


@needs_card
def test_file_stays_quantized(tmp_path: Path) -> None:
    """Prompts are rounded as steps of their size are; what is decoded from equal states is the same. All experts are
    passed: which of some are, rounding decides now and then, and then half of the tokens are others."""
    file = written(tmp_path, ALL_PASSED)
    packed = load(str(file), options(memory="64MiB", max_batch=20))
    plain = load(str(file), options(memory="64MiB", max_batch=20, packed_weights="off"))
    served(packed), served(plain)
    assert packed.decoder.weight_bytes() < 0.4 * plain.decoder.weight_bytes()
    together = answers(packed, 16)
    assert agreement(together, answers(plain, 16), 4) > 0.7
    assert answers(packed, 16) == together, "what is known of a prompt changes what follows it"
    cut = answers(load(str(file), options(memory="64MiB", max_batch=20, token_budget=48)), 16)
    assert agreement(cut, together, 4) > 0.8, "an answer depends on how a prompt was cut"
    assert all(len(found) == 24 for found in answers(packed, 20))  # 17 rows and more: several passes


@needs_card
def test_unsupported_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"quant=q4_k is not possible.*experts of these sizes"):
        load(RandomModel(shape=replace(SMALL, experts=ExpertsConfig(24, 4, 320, 320))), options(quant="q4_k"))
    with pytest.raises(ConfigError, match="bfloat16"):
        load(RandomModel(shape=SMALL), options(quant="q4_k", dtype="float32"))
