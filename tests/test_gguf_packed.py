"""A GGUF file whose matrices stay packed holds the same numbers, gives the same logits and takes no more memory than it
has bytes; who wants it otherwise says so, and what cannot be is refused by the option's name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from gguf_models import gguf_tensors, metadata_of, write
from safetensors.torch import save_file
from support import TAU, load_gguf, numbers, odd_shape, same_logits, session_over, tiny_texts
from test_gguf_model import WRONG, changed
from test_ops_linear_cpu import rounded
from torch import Tensor

from deltic.config import EngineConfig, ExpertsConfig, GenerationDefaults, LinearConfig, ModelConfig, RopeConfig
from deltic.engine.loading import RandomModel, load
from deltic.errors import ConfigError, ModelError
from deltic.loader.dummy import random_weights
from deltic.loader.gguf import load as loading
from deltic.loader.gguf.convert import FILE_TYPES, convert
from deltic.loader.gguf.file import GgufFile
from deltic.loader.gguf.load import load_packed
from deltic.loader.gguf.names import ROPE_FACTORS
from deltic.loader.model_files import ModelFiles, open_model
from deltic.loader.names import expected_tensors
from deltic.ops import explain
from deltic.ops.cpu import library, missing, overlay
from deltic.ops.cpu.library import LEVELS
from deltic.ops.quantized import QTensor
from deltic.runner.model_runner import ModelRunner

pytestmark = pytest.mark.skipif(bool(missing()), reason=str(missing()))


FAMILY = {"vocab_size": 3072, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64,
          "num_hidden_layers": 4, "rope": RopeConfig(1e4, 6, (1, 1, 1)),
          "layer_types": ("linear_attention", "full_attention", "linear_attention", "linear_attention")}
DENSE = {"architecture": "qwen3", "num_hidden_layers": 2, "layer_types": ("full_attention",) * 2, "linear": None,
         "attention_output_gate": False, "rope": RopeConfig(1e4, 64, ())}
LLAMA3 = RopeConfig(1e4, 64, (), tuple(1 + index / 8 for index in range(32)))


def shape(**changes: Any) -> ModelConfig:
    return odd_shape(**{**FAMILY, **changes})


SHAPES = {
    "equal heads": shape(linear=LinearConfig(4, 4, 24, 64, 4)),
    "two to a key": shape(linear=LinearConfig(2, 4, 24, 64, 4), tie_word_embeddings=True),
    "three to a key": shape(linear=LinearConfig(2, 6, 24, 128, 4)),
    "blocks of 32": shape(linear=LinearConfig(2, 6, 24, 32, 4), hidden_size=96, intermediate_size=160, head_dim=24,
                          tie_word_embeddings=True),
    "no blocks": shape(linear=LinearConfig(2, 6, 10, 12, 4), hidden_size=40, intermediate_size=52, head_dim=14),
    "qwen3": shape(**DENSE, tie_word_embeddings=True),
    "qwen3 next": shape(architecture="qwen3_next", rope=RopeConfig(1e4, 16, ()), linear=LinearConfig(2, 6, 24, 128, 4),
                        intermediate_size=0, experts=ExpertsConfig(5, 2, 256, 256)),
    "qwen2": shape(**{**DENSE, "architecture": "qwen2", "qk_norm": False, "qkv_bias": True}),
    "llama": shape(**{**DENSE, "architecture": "llama", "qk_norm": False, "rope": LLAMA3}, tie_word_embeddings=True),
}
MIXED = ("Q8_0", "Q6_K", "Q4_K_M")
CASES = [*((name, kind) for name in SHAPES for kind in ("F32", "F16", "BF16", *MIXED)),
         *(("three to a key", kind) for kind in FILE_TYPES if kind not in ("F32", "F16", "BF16", *MIXED))]
TOKENS = numbers(4, 40, 3072)
Written = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The file of a shape's random model in a type, as `deltic convert` writes it."""
    place, tokenizer = tmp_path_factory.mktemp("packed"), tiny_texts()

    @cache
    def directory(name: str) -> Path:
        path = place / name
        path.mkdir()
        save_file(random_weights(SHAPES[name], "float32"), path / "model.safetensors")
        return path

    @cache
    def file(name: str, kind: str) -> Path:
        path = place / f"{name} {kind}.gguf"
        files = ModelFiles(directory(name), SHAPES[name], GenerationDefaults(eos_token_ids=(3065,)))
        convert(files, tokenizer, name, path, kind)
        return path

    return file


def options(**changes: Any) -> EngineConfig:
    return EngineConfig(**{"dtype": "float32", "memory": "4MiB", "max_context": 128, "max_batch": 2, "threads": 1,
                           **changes})


def logits_of(runtime: ModelRunner, length: int = len(TOKENS)) -> Tensor:
    """After every token, in sequences of so many tokens."""
    session, parts = session_over(runtime, batch=2, budget=16), []
    for start in range(0, len(TOKENS), length):
        session.reset()
        parts.append(session.prefill(TOKENS[start:start + length], all_logits=True))
    return torch.cat(parts)


@cache
def logits(model: Path | str, length: int = len(TOKENS), **changes: Any) -> Tensor:
    """Of a file, or of the random model of a shape."""
    source = RandomModel(shape=SHAPES[model]) if isinstance(model, str) else str(model)
    return logits_of(load(source, options(**changes)), length)


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


# Tensors


def in_file_order(name: str, tensor: Tensor, config: ModelConfig) -> Tensor:
    """One of our tensors with its value heads as GGUF files have them: head i is of key head i modulo their number, but
    for Qwen3-Next."""
    linear, part = config.linear, name.rpartition("linear_attn.")[2]
    if config.architecture == "qwen3_next":
        return tensor
    axis = {"in_proj_qkv.weight": 0, "conv1d.weight": 0, "in_proj_z.weight": 0, "in_proj_a.weight": 0,
            "in_proj_b.weight": 0, "A_log": 0, "dt_bias": 0, "out_proj.weight": 1}.get(part)
    if linear is None or axis is None:
        return tensor
    share = linear.num_value_heads // linear.num_key_heads
    order = torch.tensor([key * share + j for j in range(share) for key in range(linear.num_key_heads)])
    if part in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
        return tensor[order]
    places = (order[:, None] * linear.value_head_dim + torch.arange(linear.value_head_dim)).flatten()
    behind = 2 * linear.key_dim if part in ("in_proj_qkv.weight", "conv1d.weight") else 0
    return tensor.index_select(axis, torch.cat([torch.arange(behind), behind + places]))


@pytest.mark.parametrize(("name", "kind"), CASES)
@pytest.mark.covering
def test_packed_tensors_equal_the_file(written: Written, name: str, kind: str) -> None:
    config, file, progress = SHAPES[name], GgufFile.open(written(name, kind)), []
    plain = load_gguf(file, config, "float32")
    found = load_packed(file, config, lambda done, total: progress.append((done, total)))
    assert list(found) == list(expected_tensors(config))
    for key, block in found.items():
        wanted = in_file_order(key, plain[key], config)
        if isinstance(block, tuple):  # of experts
            assert torch.equal(torch.stack([one.dequantize() for one in block if isinstance(one, QTensor)]), wanted)
            continue
        matrix = wanted.ndim == 2 and "shared_expert_gate" not in key  # which files store as a vector
        assert isinstance(block, QTensor) == matrix and tuple(block.shape) == tuple(wanted.shape), key
        assert torch.equal(block.dequantize() if isinstance(block, QTensor) else block, wanted), key
    types = {block.type for block in found.values() if isinstance(block, QTensor)}
    assert types <= {tensor.type.name for tensor in file.tensors.values()}
    if kind in MIXED and name != "no blocks":
        assert not types & {"F32", "F16", "BF16"}
    total = sum(stored.nbytes for name, stored in file.tensors.items() if name != ROPE_FACTORS)
    assert progress[-1] == (total, total) and progress == sorted(progress)


def test_embedding_lookup_equals_rows(written: Written) -> None:
    matrix = load_packed(GgufFile.open(written("two to a key", "Q4_K_M")), SHAPES["two to a key"])[
        "model.embed_tokens.weight"]
    assert isinstance(matrix, QTensor) and matrix.type == "Q6_K" and len(matrix) == 3072
    ids = torch.tensor([3071, 0, 17, 17, 1500])
    assert torch.equal(matrix.lookup(ids), matrix.dequantize()[ids])
    assert torch.equal(matrix.lookup(ids[::2]), matrix.dequantize()[ids[::2]])
    assert matrix.lookup(ids[:0]).shape == (0, 256)
    assert matrix.nbytes == 3072 * 210 and matrix.data.data_ptr() % 64 == 0


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0"])
def test_fused_projections_are_cut_between_rows(tmp_path: Path, kind: str) -> None:
    config, type = SHAPES["two to a key"], GGMLQuantizationType[kind]
    tensors = gguf_tensors(config, random_weights(config, "float32"))
    parts = [tensors.pop(f"blk.1.attn_{part}.weight") for part in "qkv"]
    fused = quants.quantize(np.concatenate(parts), type)
    path = write(tmp_path / "m.gguf", metadata_of(config), {**tensors, "blk.1.attn_qkv.weight": fused},
                 {"blk.1.attn_qkv.weight": type})
    found, first = load_packed(GgufFile.open(path), config), 0
    rows = torch.from_numpy(quants.dequantize(fused, type).copy())
    for part, plain in zip("qkv", parts, strict=True):
        block = found[f"model.layers.1.self_attn.{part}_proj.weight"]
        assert isinstance(block, QTensor) and block.type == kind
        assert torch.equal(block.dequantize(), rows[first:first + len(plain)])
        first += len(plain)


@pytest.mark.parametrize("message", WRONG)
def test_files_that_are_not_the_model_are_refused(tmp_path: Path, message: str) -> None:
    config = odd_shape()
    path = write(tmp_path / "m.gguf", metadata_of(config), changed(config, WRONG[message]))
    with pytest.raises(ModelError) as caught:
        load_packed(GgufFile.open(path), config)
    assert message in str(caught.value)


@pytest.mark.parametrize("kind", ["F32", "Q4_K_M"])
def test_truncated_file_named(written: Written, tmp_path: Path, kind: str) -> None:
    """Whichever of its tensors is cut short."""
    whole, path = written("three to a key", kind).read_bytes(), tmp_path / "short.gguf"
    path.write_bytes(whole)
    file = GgufFile.open(path)
    data = min(tensor.offset for tensor in file.tensors.values())
    for size in (len(whole) - 40, (data + len(whole)) // 2, data + 10):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"short\.gguf ended while it was read"):
            load_packed(file, SHAPES["three to a key"])
        with pytest.raises(ModelError, match=r"short\.gguf"):
            load(str(path), options(packed_weights="on"))
    path.unlink()
    with pytest.raises(ModelError, match=r"short\.gguf cannot be read"):
        load_packed(file, SHAPES["three to a key"])


# Logits

FEW_BITS = 0.2
"""How far (relative RMS) packed logits are at most from those of the same numbers in float32. F32 and F16 take
activations as they are; BF16 rounds each to 8 bits (an error of 1.7e-3), all others to 127 steps of a block's largest
(7e-3). Each of the dozen products in a row does that, and a random model of such layers enlarges an error up to ten
times: 0.05 and 0.12 were seen. What is wrong in a layer gives more than 1."""
LIMIT = {"F32": 1e-5, "F16": 1e-5, "BF16": 0.1}


@pytest.mark.parametrize("name", SHAPES)
def test_logits_of_float_files(written: Written, name: str) -> None:
    wanted, found = logits(name), logits(written(name, "F32"), packed_weights="on")
    assert same_logits(wanted, found, decided=0.9) <= TAU / 10


@pytest.mark.parametrize(("name", "kind"), CASES)
@pytest.mark.covering
def test_logits_near_the_dequantized_file(written: Written, name: str, kind: str) -> None:
    """Exactly where no activation is rounded."""
    path = written(name, kind)
    wanted = logits(path, packed_weights="off")
    assert off(logits(path, packed_weights="on"), wanted) <= LIMIT.get(kind, FEW_BITS)
    assert off(logits(path, packed_weights="on", ops=("torch",)), wanted) <= 1e-5


def rounding_linear(x: Tensor, weight: Any, shards: int = 1, runs: int = 1) -> Tensor:
    """What csrc/deltic.h says of a product, in torch."""
    parts = weight if isinstance(weight, tuple) else (weight,)
    return torch.cat([torch.from_numpy(rounded(part.type, x)).float() @ part.dequantize().t() for part in parts], -1)


@pytest.mark.parametrize(("name", "kind"), [case for case in CASES if case[1] not in ("F32", "F16")])
@pytest.mark.covering
def test_logits_with_rounded_activations(written: Written, name: str, kind: str,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly in most of a few short sequences. A single activation in several thousand is so near to the middle of two
    steps that the other way of summing in the layer before it decides."""
    found = logits(written(name, kind), 3, packed_weights="on")
    for module in ("basic", "gdn", "attention"):
        for product in ("linear", "row_parallel"):
            monkeypatch.setattr(f"deltic.ops.torch.{module}.{product}", rounding_linear)
    wanted = logits_of(load(str(written(name, kind)), options(packed_weights="on", ops=("torch",))), 3)
    errors = sorted(off(*pair) for pair in zip(found.split(3), wanted.split(3), strict=True))
    assert errors[len(errors) // 2] <= (1e-2 if kind == "BF16" else 1e-5) and errors[-1] <= FEW_BITS


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("ops", ["cpu", "torch", "reference", *(f"{op}=torch" for op in (
    "gdn_mixer", "attention_mixer", "mlp", "head", "embed", "add_norm"))])
@pytest.mark.covering
def test_every_backend_takes_packed_weights(written: Written, ops: str, dtype: str) -> None:
    """In every dtype. Those of other backends dequantize them, and round no activations."""
    path = written("three to a key", "Q4_K_M")
    found = logits(path, 10, packed_weights="on", ops=(ops,), dtype=dtype)
    exact = ops in ("torch", "reference") and dtype == "float32"
    assert off(found, logits(path, 10, packed_weights="off")) <= (1e-5 if exact else FEW_BITS)


@pytest.mark.parametrize(("name", "kind"), [("three to a key", "Q4_K_M"), ("equal heads", "Q8_0"), ("qwen3", "BF16")])
def test_every_processor_level(written: Written, name: str, kind: str) -> None:
    path = written(name, kind)
    wanted, best = logits(path, packed_weights="off"), library.library().deltic_best_level()
    for number, level in enumerate(LEVELS[:best + 1]):
        runtime = load(str(path), options(packed_weights="on", cpu_level=level))
        assert runtime.decoder.ops.step.__self__.level == number  # type: ignore[attr-defined]
        assert off(logits_of(runtime), wanted) <= LIMIT.get(kind, FEW_BITS)


def test_quantizing_at_load_gives_what_the_file_would(written: Written) -> None:
    """With as many value heads as key heads, rows and blocks are the same."""
    for quant, kind in (("q8_0", "Q8_0"), ("q4_k", "Q4_K_M")):
        model = load(RandomModel(shape=SHAPES["equal heads"]), options(quant=quant))
        file = load(str(written("equal heads", kind)), options(packed_weights="on"))
        for ours, theirs in zip(model.decoder.weights.layers, file.decoder.weights.layers, strict=True):
            for left, right in zip(blocks_of(ours), blocks_of(theirs), strict=True):
                assert left.type == right.type and torch.equal(left.data, right.data)
        assert off(logits_of(model), logits_of(file)) <= FEW_BITS


def blocks_of(layer: Any) -> list[QTensor]:
    mixer, mlp = layer.mixer, layer.mlp
    weights = [mlp.gate_up, mlp.down, *((mixer.in_proj, mixer.out_proj) if hasattr(mixer, "in_proj")
                                        else (mixer.qkv, mixer.o_proj))]
    return [block for weight in weights for block in (weight if isinstance(weight, tuple) else (weight,))]


# Which files stay packed


def types_of(path: Path, **changes: Any) -> set[str]:
    runtime = load(str(path), options(**changes))
    blocks = [block for layer in runtime.decoder.weights.layers for block in blocks_of(layer)]
    return {block.type if isinstance(block, QTensor) else str(block.dtype) for block in blocks}


@pytest.mark.parametrize(("kind", "choice", "types"), [
    ("Q4_K_M", "auto", {"Q4_K", "Q6_K"}), ("Q6_K", "auto", {"Q6_K"}), ("Q4_K_M", "off", {"F32"}),
    ("Q8_0", "auto", {"F32"}), ("Q8_0", "on", {"Q8_0"}), ("F16", "auto", {"F32"}), ("F16", "on", {"F16"}),
    ("BF16", "on", {"BF16"})])
def test_which_files_stay_packed(written: Written, kind: str, choice: str, types: set[str]) -> None:
    assert types_of(written("three to a key", kind), packed_weights=choice) == types


def test_large_files_stay_packed(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written("three to a key", "Q8_0")
    size = sum(tensor.nbytes for tensor in GgufFile.open(path).tensors.values())
    for limit, types in ((size, {"Q8_0"}), (size + 1, {"F32"})):
        monkeypatch.setattr(loading, "_PACKED_SIZE", limit)
        assert types_of(path) == types
    assert types_of(path, packed_weights="off") == {"F32"}


def test_without_the_kernels_nothing_is_packed(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written("three to a key", "Q4_K_M")
    wanted = logits(path, packed_weights="off")
    monkeypatch.setattr("deltic.ops.cpu.load", lambda: "install g++")
    assert types_of(path) == {"torch.float32"}
    assert off(logits_of(load(str(path), options())), wanted) <= 1e-5
    for changes, words in (({"packed_weights": "on"}, "packed_weights=on is not possible: install g"),
                           ({"packed_weights": "off", "quant": "q8_0"}, "quant=q8_0 is not possible: install g"),
                           ({"cpu_level": "avx2"}, "cpu_level=avx2: install g")):
        with pytest.raises(ConfigError, match=words) as caught:
            load(str(path), options(**changes))
        assert caught.value.option == [*changes][-1]


@pytest.mark.parametrize("model", ["tiny", RandomModel(shape=SHAPES["equal heads"])], ids=["files", "random"])
def test_packed_weights_need_quantized_files(model: Any) -> None:
    """But a model of two may be, one of which drafts for the other."""
    with pytest.raises(ConfigError, match=r"packed_weights=on is for GGUF files.*leave it out") as caught:
        load(model, options(packed_weights="on"))
    assert caught.value.option == "packed_weights"
    if model == "tiny":
        assert load(model, options(packed_weights="on", speculate="draft:tiny", memory="64MiB")).draft


@pytest.mark.parametrize("kind", ["Q4_K_M", "Q8_0"])
def test_quantized_files_not_requantized(written: Written, kind: str) -> None:
    """Unless its numbers are asked for."""
    path = written("three to a key", kind)
    with pytest.raises(ConfigError, match="quant=q8_0 is not possible: the weights are quantized") as caught:
        load(str(path), options(quant="q8_0"))
    assert caught.value.option == "quant"
    assert types_of(path, quant="q4_k", packed_weights="off") == {"Q4_K", "Q6_K"}


@pytest.mark.parametrize("kind", ["Q4_K_M", "BF16"])
def test_a_draft_model_is_quantized_unless_it_is_already(written: Written, kind: str) -> None:
    path = written("three to a key", kind)
    model = load(RandomModel(shape=SHAPES["three to a key"]), options(quant="q8_0", speculate=f"draft:{path}"))
    assert model.draft and {*model.decoder.weight_kinds()} == {"Q8_0", "F32"}
    assert {*model.draft.decoder.weight_kinds()} & {"Q8_0", "Q4_K"} == {"Q8_0" if kind == "BF16" else "Q4_K"}


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_large_float_files_can_be_quantized(written: Written, kind: str,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_PACKED_SIZE", 0)
    assert types_of(written("three to a key", kind)) == {kind}
    assert types_of(written("three to a key", kind), quant="q8_0") == {"Q8_0"}


@pytest.mark.parametrize("packed", ["on", "off"])
def test_float16_stays_float16_and_the_kernels_serve_it(written: Written, packed: str) -> None:
    runtime = load(str(written("three to a key", "F16")), options(packed_weights=packed, dtype="auto"))
    assert {*runtime.decoder.weight_kinds()} <= {"F16", "F32"} and runtime.step is not None
    views = [view.keys.dtype for view in runtime.views.kv] + [view.conv.dtype for view in runtime.views.states]
    assert set(views) == {torch.float16}
    served = explain(runtime.decoder.ops, runtime.decoder.weights, runtime.views)
    assert {op for op, who in served.items() if who != "cpu"} == {"embed", "rope", "copy_slots", "copy_pages"}


def test_loaded_model_names_its_backends() -> None:
    model = RandomModel(shape=SHAPES["three to a key"])
    plain = load(model, options(ops=("pack=torch",), dtype="float32"))
    served = explain(plain.decoder.ops, plain.decoder.weights, plain.views)
    assert {served[op] for op in ("head", "mlp", "gdn_mixer", "attention_mixer")} == {
        "torch (the weights are not packed)"}
    assert served["step"].startswith("the ops one by one") and served["sample"] == "cpu"
    mixed = load(model, options(ops=("mlp=reference",), dtype="float32"))
    served = explain(mixed.decoder.ops, mixed.decoder.weights, mixed.views)
    assert (served["mlp"], served["head"]) == ("reference", "cpu") and served["step"].startswith("the ops one by one")


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_K_M"])
def test_files_run_in_their_own_dtype(written: Written, kind: str) -> None:
    path = written("three to a key", kind)
    found = logits(path, packed_weights="on", dtype="auto")
    assert off(found, logits(path, packed_weights="off")) <= FEW_BITS


def test_missing_cpu_level_named(monkeypatch: pytest.MonkeyPatch) -> None:
    poor = SimpleNamespace(deltic_best_level=lambda: 1)
    monkeypatch.setattr("deltic.ops.cpu.load", lambda: poor)
    for level in LEVELS[2:]:
        with pytest.raises(ConfigError, match=f"cpu_level={level}: this processor has avx2 at most") as caught:
            overlay(level)
        assert caught.value.option == "cpu_level"
    for level in ("auto", "avx2", "portable"):
        overlay(level)
    with pytest.raises(ConfigError, match="cpu_level=i8mm: other processors have this level; use auto or portable, "):
        overlay("i8mm")


# Memory

LOADING = """
import json, resource, sys, torch
from deltic.config import EngineConfig
from deltic.engine.loading import load
from deltic.loader.gguf.load import load_packed
from deltic.loader.model_files import open_model

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

open_model(sys.argv[2])
warm = load(sys.argv[2], EngineConfig(memory="4MiB", packed_weights="on", threads=1))
files = open_model(sys.argv[1])
before = peak()
weights = load_packed(files.gguf, files.config)
grown = peak() - before
assert "torch._dynamo" not in sys.modules, "torch's compiler, whose import takes longer than loading"
print(json.dumps([grown, sum(block.nbytes for block in weights.values())]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory as Linux counts it")
@pytest.mark.parametrize("kind", [pytest.param("F32", marks=pytest.mark.slow), "Q4_K"])
def test_loading_needs_no_more_memory_than_the_result(written: Written, tmp_path: Path, kind: str) -> None:
    """A matrix is larger than the pieces that it is read in."""
    rows, config = {"F32": 20_000, "Q4_K": 150_000}[kind], SHAPES["qwen3"]
    config = replace(config, vocab_size=rows, hidden_size=512, num_attention_heads=8)
    name = "token_embd.weight"
    random = replace(config, vocab_size=256) if kind == "Q4_K" else config  # the embedding is replaced there
    tensors = gguf_tensors(config, random_weights(random, "float32"))
    if kind == "Q4_K":
        tensors[name] = np.zeros((rows, 512 // 256 * 144), np.uint8)
        tensors[name][:] = np.arange(288, dtype=np.uint8)
    path = write(tmp_path / "m.gguf", metadata_of(config), tensors,
                 {name: GGMLQuantizationType[kind]} if kind != "F32" else None)
    del tensors
    warm = written("qwen3", "Q4_K_M")
    result = subprocess.run([sys.executable, "-c", LOADING, str(path), str(warm)], capture_output=True, text=True,
                            check=False)
    assert result.returncode == 0, result.stderr
    grown, size = json.loads(result.stdout)
    assert size > 40e6 and open_model(path).config.vocab_size == rows
    assert grown <= 1.3 * size + 30e6, (grown, size)
