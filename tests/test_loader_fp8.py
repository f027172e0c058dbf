"""Float8 weights: what is rounded, and how far."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expert_cases import text_of
from safetensors.torch import load_file, save_file
from support import interleaved, moe_shape, odd_shape, tiny_texts

from deltic.config import DType, EngineConfig, ExpertsConfig, LinearConfig, ModelConfig, RopeConfig
from deltic.engine.loading import load
from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.errors import ConfigError, ModelError
from deltic.export.program import hf_config
from deltic.loader.checkpoint import directory_checkpoint
from deltic.loader.dummy import random_head, random_weights
from deltic.loader.formats.fp8 import FLOAT8_BLOCK_BYTES, FLOAT8_LARGEST, Float8, quantize_fp8
from deltic.loader.gguf.convert import convert
from deltic.loader.model_files import ModelFiles, open_model
from deltic.loader.mtp_head import extract_head, find_head, load_stored_head
from deltic.loader.names import EMBEDDING, HEAD
from deltic.loader.quantize import FP8, STORED, quantize_tensors
from deltic.loader.safetensors import KeptForms
from deltic.model.tensor_parallel import WeightSplitter
from deltic.ops.cuda.quantized import Tiles, tiles_form
from deltic.ops.parts import one_device
from deltic.runner.input_batch import build


def decoded(raw: torch.Tensor) -> torch.Tensor:
    blocks = raw.unflatten(1, (-1, FLOAT8_BLOCK_BYTES))
    scales, codes = blocks[..., :4].contiguous().view(torch.float32), blocks[..., 4:].contiguous()
    return (codes.view(torch.float8_e4m3fn).float() * scales).flatten(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_rounded_to_the_nearest(dtype: torch.dtype) -> None:
    matrix = (torch.randn(24, 512) * torch.logspace(-6, 3, 24)[:, None]).to(dtype)
    found = decoded(quantize_fp8("w", matrix))
    largest = matrix.float().unflatten(1, (-1, 128)).abs().amax(-1, keepdim=True).expand(-1, -1, 128).flatten(1)
    # four significant bits; below 2^-6 of the format, steps of 2^-9
    allowed = torch.maximum(matrix.float().abs() / 16, largest / FLOAT8_LARGEST / 2**10) * (1 + 1e-5)
    assert bool(((found - matrix.float()).abs() <= allowed).all())
    assert torch.allclose(found.unflatten(1, (-1, 128)).abs().amax(-1), largest[:, ::128], rtol=1e-6)


def test_float8_numbers_stay_as_they_are() -> None:
    codes = torch.arange(256, dtype=torch.uint8)[None].repeat(3, 1)
    codes[codes & 0x7f == 0x7f] -= 1
    matrix = codes.view(torch.float8_e4m3fn).float() * torch.tensor([1.0, 2.0**-9, 32.0])[:, None]
    assert torch.equal(decoded(quantize_fp8("w", matrix)), matrix)


def test_zero_matrices() -> None:
    assert torch.equal(decoded(quantize_fp8("w", torch.zeros(2, 256))), torch.zeros(2, 256))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_weights_refused(value: float) -> None:
    matrix = torch.ones(2, 256)
    matrix[1, 200] = value
    with pytest.raises(ModelError, match=r"'model\.w'.*not finite"):
        quantize_fp8("model.w", matrix)


def pairs(files: ModelFiles, dtype: DType) -> Iterator[tuple[str, torch.Tensor | Float8]]:
    """The weights; those in float8 stay."""
    parts = files.parts(dtype, one_device("cpu"), kept=KeptForms(float8=True))
    return ((name, weight) for _, name, weight in parts)


def shape() -> ModelConfig:
    """Rows of 256 and of 384 weights: the latter fit no tiles."""
    return odd_shape(vocab_size=300, hidden_size=256, intermediate_size=384, num_attention_heads=4, head_dim=64,
                     rope=RopeConfig(1e4, 6, (1, 1, 1)), linear=LinearConfig(2, 4, 10, 64, 4))


def test_a_model_in_float8() -> None:
    """Embedding, head and what decays are made of in 8 bits; of vectors and rows that fit no tiles nothing."""
    sources = random_weights(shape(), "bfloat16")
    found = quantize_tensors(iter(sources.items()), FP8, shape(), tiles_form("cpu"))
    kinds = {name: tensor.type if isinstance(tensor, Tiles) else "plain" for name, tensor in found.items()}
    for name, tensor in sources.items():
        plain = tensor.dim() < 2 or tensor.shape[-1] % 256 or name.endswith(".conv1d.weight")
        precise = name in (EMBEDDING, HEAD) or name.endswith((".in_proj_a.weight", ".in_proj_b.weight"))
        assert kinds[name] == ("plain" if plain else "Q8_0" if precise else "FP8"), name
        if isinstance(weight := found[name], Tiles):
            error = (weight.dequantize() - tensor.float()).norm() / tensor.float().norm()
            assert error < (0.03 if weight.type == "FP8" else 0.01), name
    assert {*kinds.values()} == {"plain", "Q8_0", "FP8"}


def test_fp8_refused_on_cpu() -> None:
    with pytest.raises(ConfigError, match="quant=fp8 is for NVIDIA GPUs: use q8_0"):
        EngineConfig(quant="fp8", device="cpu")


# Checkpoints


SAID = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"]}


def in_blocks(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and numbers (float32) of a matrix or a stack of some, as checkpoints have them."""
    *rest, rows, columns = weight.shape
    padded = torch.zeros(*rest, -(-rows // 128) * 128, -(-columns // 128) * 128)
    padded[..., :rows, :columns] = weight.float()
    blocks = padded.unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128))
    scales = (blocks.abs().amax((-3, -1)) / FLOAT8_LARGEST).to(dtype)
    wide = scales.float().repeat_interleave(128, -2).repeat_interleave(128, -1)[..., :rows, :columns]
    codes = (weight.float() / wide).clamp(-FLOAT8_LARGEST, FLOAT8_LARGEST).to(torch.float8_e4m3fn)
    return codes, scales, codes.float() * wide


def by_row_or_matrix(weight: torch.Tensor, whole: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `in_blocks`, with a scale for each row, [..., rows, 1], or for the whole matrix, [...]."""
    largest = weight.float().abs().amax((-2, -1) if whole else -1, keepdim=True)
    scales = largest / FLOAT8_LARGEST
    codes = (weight.float() / scales).clamp(-FLOAT8_LARGEST, FLOAT8_LARGEST).to(torch.float8_e4m3fn)
    return codes, scales[..., 0, 0].clone() if whole else scales, codes.float() * scales


def mapping(config: ModelConfig) -> dict[str, Any]:
    """The config.json."""
    return text_of(config) if config.experts else hf_config(config)


def checkpoint(config: ModelConfig, place: Path, scales: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A directory in float8, and the numbers that its tensors stand for."""
    stored, numbers = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, tensor in random_weights(config, "bfloat16").items():
        numbers[name] = tensor.float()
        if tensor.dim() < 2 or "proj" not in name or name.endswith((".in_proj_a.weight", ".in_proj_b.weight")):
            stored[name] = tensor
        else:
            stored[name], stored[f"{name}_scale_inv"], numbers[name] = in_blocks(tensor, scales)
    save_file(stored, place / "model.safetensors")
    (place / "config.json").write_text(json.dumps({**mapping(config), "quantization_config": SAID}))
    return numbers


def mixture() -> ModelConfig:
    return moe_shape(vocab_size=300, hidden_size=256, num_attention_heads=4, head_dim=64,
                     rope=RopeConfig(1e4, 6, (1, 1, 1)), linear=LinearConfig(2, 4, 10, 64, 4),
                     experts=ExpertsConfig(3, 2, 144, 144))


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [shape(), mixture()], ids=["dense", "mixture"])
def test_a_checkpoint_in_float8(config: ModelConfig, scales: torch.dtype, tmp_path: Path) -> None:
    """Its numbers, in any dtype; matrices of 128 times 128 and others."""
    numbers = checkpoint(config, tmp_path, scales)
    opened = open_model(tmp_path, progress=False)
    for dtype in ("float32", "bfloat16"):
        found = opened.load(dtype, "cpu", None)
        assert found.keys() == numbers.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, numbers[name].to(tensor.dtype)), name


GROUPS = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}
OTHERS = {"rows": {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": GROUPS},
          "matrices": {"quant_method": "modelopt", "quant_algo": "FP8"}}


@pytest.mark.parametrize("config", [shape(), mixture()], ids=["dense", "mixture"])
@pytest.mark.parametrize("said", OTHERS)
def test_scales_of_rows_and_of_matrices(said: str, config: ModelConfig, tmp_path: Path,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole and in pieces, and as codes that stay as they are."""
    stored, numbers = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, tensor in random_weights(config, "bfloat16").items():
        stored[name] = numbers[name] = tensor
        if tensor.dim() > 1 and "proj" in name and not name.endswith((".in_proj_a.weight", ".in_proj_b.weight")):
            stored[name], stored[f"{name}_scale"], numbers[name] = by_row_or_matrix(tensor, said == "matrices")
            stored[f"{name.removesuffix('weight')}input_scale"] = torch.tensor(0.5)
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**mapping(config), "quantization_config": OTHERS[said]}))
    opened = open_model(tmp_path, progress=False)
    for chunk in (1 << 20, 128 * 256):
        monkeypatch.setattr("deltic.loader.safetensors._CHUNK", chunk)
        found = opened.load("float32", "cpu", None)
        assert found.keys() == numbers.keys()
        assert all(torch.equal(tensor, numbers[name].float()) for name, tensor in found.items())
    kept = dict(pairs(opened, "float32"))
    assert sum(isinstance(weight, Float8) for weight in kept.values()) > 8
    for name, weight in kept.items():
        if isinstance(weight, Float8):
            assert torch.equal(weight.numbers(), numbers[name]), name
            if weight.shape[-1] % 128 == 0:
                assert torch.equal(decoded(weight.blocks()), numbers[name].flatten(0, -2)), name


@pytest.mark.parametrize("kind", ["blocks", "rows", "matrices"])
def test_packed_projections_of_qwen3_next(kind: str, tmp_path: Path) -> None:
    """The rows of each key head in turn, across the blocks of scales: dequantized, and as codes for two devices."""
    config = replace(mixture(), architecture="qwen3_next", rope=RopeConfig(1e4, 6, ()))
    stored, numbers = dict[str, torch.Tensor](), random_weights(config, "bfloat16")
    for layer in config.linear_layers:
        prefix = f"model.layers.{layer}.linear_attn.in_proj_"
        qkv, z = f"{prefix}qkv.weight", f"{prefix}z.weight"
        places = torch.arange(len(numbers[qkv]) + len(numbers[z])).split([len(numbers[qkv]), len(numbers[z])])
        order = interleaved(config, {qkv: places[0], z: places[1]}, layer, "qkvz")
        packed = torch.cat([numbers[qkv], numbers[z]])[order]
        found = in_blocks(packed, torch.float32) if kind == "blocks" else by_row_or_matrix(packed, kind == "matrices")
        stored[f"{prefix}qkvz.weight"], stored[f"{prefix}qkvz.weight_scale{'_inv' * (kind == 'blocks')}"], exact = found
        numbers[qkv], numbers[z] = exact[order.argsort()].split([len(numbers[qkv]), len(numbers[z])])
    save_file({**{name: tensor for name, tensor in numbers.items() if "in_proj_qkv" not in name
                  and "in_proj_z" not in name}, **stored}, tmp_path / "model.safetensors")
    said = SAID if kind == "blocks" else OTHERS[kind]
    (tmp_path / "config.json").write_text(json.dumps({**hf_config(config), "quantization_config": said}))
    opened = open_model(tmp_path, progress=False)
    assert opened.config == config
    found = opened.load("float32", "cpu", None)
    assert found.keys() == numbers.keys()
    assert all(torch.equal(tensor, numbers[name].float()) for name, tensor in found.items())
    split = WeightSplitter(config, 2).over(["cpu", "cpu"])
    parts: dict[str, list[torch.Tensor]] = {}
    for device, name, weight in opened.parts("float32", split, kept=KeptForms(float8=True)):
        if isinstance(weight, Float8):
            parts.setdefault(name, []).append(weight.numbers())
            assert len(parts[name]) == device + 1
    assert {name.rpartition("in_proj_")[2] for name in parts} == {"qkv.weight", "z.weight"}
    for name, halves in parts.items():
        wanted = [part.of(numbers[name]) for part in split.parts(name, tuple(numbers[name].shape)) if part]
        assert all(torch.equal(*pair) for pair in zip(halves, wanted, strict=True)), name


def test_dequantized_values_equal_transformers(tmp_path: Path) -> None:
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    checkpoint(shape(), tmp_path)
    stored, found = load_file(tmp_path / "model.safetensors"), open_model(tmp_path, progress=False).load(
        "bfloat16", "cpu", None)
    theirs = Fp8Dequantize(SimpleNamespace(quantization_config=FineGrainedFP8Config()))
    compared = 0
    for name, tensor in stored.items():
        scales = stored.get(f"{name}_scale_inv")
        if scales is not None and not any(size % 128 for size in tensor.shape):
            wanted = theirs._dequantize_one(tensor, scales, output_dtype=torch.bfloat16)
            assert torch.equal(found[name], wanted), name
            compared += 1
    assert compared > 8


def test_experts_one_by_one(tmp_path: Path) -> None:
    numbers = checkpoint(mixture(), tmp_path)
    stored = dict[str, torch.Tensor]()
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        before, experts, after = name.partition(".mlp.experts.")
        if experts:
            stored |= {f"{before}{experts}{index}.{after}": one.clone() for index, one in enumerate(tensor)}
        else:
            stored[name] = tensor
    save_file(stored, tmp_path / "model.safetensors")
    found = open_model(tmp_path, progress=False).load("float32", "cpu", None)
    assert all(torch.equal(tensor, numbers[name]) for name, tensor in found.items())


def test_large_matrices_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltic.loader.safetensors._CHUNK", 128 * 256)
    numbers = checkpoint(shape(), tmp_path)
    found = open_model(tmp_path, progress=False).load("float32", "cpu", None)
    assert all(torch.equal(tensor, numbers[name]) for name, tensor in found.items())


def test_float8_checkpoint_runs(tmp_path: Path) -> None:
    """As the same numbers in float32, and quantized once more."""
    config = shape()
    for name in ("fp8", "plain"):
        (tmp_path / name).mkdir()
    numbers = checkpoint(config, tmp_path / "fp8")
    save_file(numbers, tmp_path / "plain" / "model.safetensors")
    (tmp_path / "plain" / "config.json").write_text(json.dumps(mapping(config)))
    batch = build(StepPlan((PlannedRow((5, 6, 7), 0, (0,), 0, 1),)), torch.device("cpu"))
    for quant in ("none", "q8_0"):
        options = EngineConfig(dtype="float32", memory="16MiB", quant=quant, speculate="off")
        found, wanted = (load(str(tmp_path / name), options).run(batch).clone() for name in ("fp8", "plain"))
        assert torch.equal(found, wanted), quant


def test_a_draft_head_in_float8(tmp_path: Path) -> None:
    """Beside a model, and taken out of it, bit for bit."""
    config = replace(mixture(), num_mtp_layers=1)
    checkpoint(config, tmp_path)
    stored, numbers = load_file(tmp_path / "model.safetensors"), dict[str, torch.Tensor]()
    for name, tensor in random_head(config, "bfloat16").items():
        numbers[name] = tensor.float()
        stored[name] = tensor
        if tensor.dim() > 1 and "proj" in name:
            stored[name], stored[f"{name}_scale_inv"], numbers[name] = in_blocks(tensor, torch.float32)
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "taken").mkdir()
    extract_head(directory_checkpoint(tmp_path), tmp_path / "taken" / "mtp.safetensors", "here")
    taken = find_head(directory_checkpoint(tmp_path / "taken"), config)
    for found in (open_model(tmp_path, progress=False).load_head("float32", "cpu"),
                  load_stored_head(taken, config, "float32", one_device("cpu"))[0]):
        assert found and found.keys() == numbers.keys()
        assert all(torch.equal(tensor, numbers[name]) for name, tensor in found.items())  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [shape(), mixture()], ids=["dense", "mixture"])
@pytest.mark.parametrize("type", ["F32", "Q8_0"])
def test_float8_converts_to_gguf(type: str, config: ModelConfig, tmp_path: Path) -> None:
    numbers, files = checkpoint(config, tmp_path), open_model(tmp_path, progress=False)
    convert(files, tiny_texts(), "small", tmp_path / "m.gguf", type)
    found = open_model(tmp_path / "m.gguf", progress=False).load("float32", "cpu", None)
    assert found.keys() == numbers.keys()
    for name, tensor in found.items():
        error = (tensor - numbers[name]).norm() / numbers[name].norm().clamp(min=1e-9)
        assert error < (1e-5 if type == "F32" else 0.01), name


@pytest.mark.parametrize("scheme", [FP8, STORED])
@pytest.mark.parametrize("config", [shape(), mixture()], ids=["dense", "mixture"])
def test_stored_float8_codes_kept(config: ModelConfig, scheme: str, tmp_path: Path) -> None:
    """Code by code; rows that fit no tiles become plain numbers. What is plain stays plain, or is quantized to Q8_0."""
    numbers = checkpoint(config, tmp_path)
    opened = open_model(tmp_path, progress=False)
    assert opened.has_float8
    tensors, kinds = pairs(opened, "bfloat16"), set[str]()
    for name, weight in quantize_tensors(tensors, scheme, config, tiles_form("cpu")).items():
        whole = torch.stack([one.dequantize() for one in weight]) if isinstance(weight, tuple) else weight  # type: ignore
        kind = weight[0] if isinstance(weight, tuple) else weight
        kinds.add(kind.type if isinstance(kind, Tiles) else "plain")
        if isinstance(kind, Tiles) and kind.type == "FP8":
            found = whole if isinstance(weight, tuple) else kind.dequantize()
            assert torch.equal(found, numbers[name]), name
        elif isinstance(kind, torch.Tensor):
            assert torch.equal(kind, numbers[name].to(kind.dtype)), name
        else:
            assert kind.type == "Q8_0"
    assert kinds == ({"plain", "FP8", "Q8_0"} if scheme == FP8 else {"plain", "FP8"})


@pytest.mark.parametrize("size", [128, 144])
def test_fused_halves_in_float8(size: int, tmp_path: Path) -> None:
    """Experts in one tensor stay in float8 where no block has rows of both."""
    config = replace(mixture(), experts=ExpertsConfig(3, 2, size, 144))
    numbers = checkpoint(config, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for layer in range(config.num_hidden_layers):
        name, halves = f"model.layers.{layer}.mlp.experts.", ("gate_proj.weight", "up_proj.weight")
        for half in halves:
            del stored[f"{name}{half}"], stored[f"{name}{half}_scale_inv"]
        both = torch.cat([numbers[f"{name}{half}"] for half in halves], 1)
        codes, scales, together = in_blocks(both, torch.float32)
        stored[f"{name}gate_up_proj"], stored[f"{name}gate_up_proj_scale_inv"] = codes, scales
        numbers |= {f"{name}{half}": part for half, part in zip(halves, together.chunk(2, 1), strict=True)}
    save_file(stored, tmp_path / "model.safetensors")
    opened = open_model(tmp_path, progress=False)
    found = opened.load("float32", "cpu", None)
    assert found.keys() == numbers.keys()
    assert all(torch.equal(tensor, numbers[name]) for name, tensor in found.items())
    kept = dict(pairs(opened, "float32"))
    assert kept.keys() == numbers.keys()
    for name, weight in kept.items():
        whole = weight.numbers() if isinstance(weight, Float8) else weight
        assert torch.equal(whole, numbers[name]), name
        if "experts.gate" in name:
            assert isinstance(weight, Float8) == (size == 128)


@pytest.mark.parametrize("whole", [False, True])
def test_halves_keep_the_scales_of_their_rows(whole: bool) -> None:
    codes, scales, numbers = by_row_or_matrix(torch.randn(3, 256, 128) * torch.logspace(-3, 3, 256)[:, None], whole)
    joined = Float8(codes.view(torch.uint8), scales[:, None, None] if whole else scales)
    for half, wanted in zip(joined.halves(), numbers.chunk(2, 1), strict=True):
        assert torch.equal(half.numbers(), wanted)


NAME = "model.layers.0.linear_attn.out_proj.weight"


@pytest.mark.parametrize("change, match", [
    ({f"{NAME}_scale_inv": None}, "without scales"),
    ({f"{NAME}_scale_inv": torch.ones(3, 2)}, r"scales of shape \[3, 2\]"),
    ({f"{NAME}_scale_inv": torch.ones(2, 2, dtype=torch.int32)}, "dtype I32"),
    ({f"{NAME}_scale_inv": torch.ones(255)}, r"scales of shape \[255\]"),
    ({"model.norm.weight_scale_inv": torch.ones(2, 2)}, "is unknown"),
    ({"model.norm.weight": torch.ones(256).to(torch.float8_e4m3fn)}, "without scales"),
    ({"model.norm.weight": torch.ones(256).to(torch.float8_e4m3fn), "model.norm.weight_scale_inv": torch.ones(2)},
     r"codes of shape \[256\]"),
    ({NAME: torch.zeros(256, 256).to(torch.float8_e5m2)}, "unknown|F8_E5M2"),
])
def test_broken_checkpoints_named(change: dict[str, torch.Tensor | None], match: str,
                                                 tmp_path: Path) -> None:
    checkpoint(shape(), tmp_path)
    stored = {**load_file(tmp_path / "model.safetensors"), **change}
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=match):
        open_model(tmp_path, progress=False).load("float32", "cpu", None)


@pytest.mark.parametrize("change", [{"quant_method": "hqq"}, {"weight_block_size": [64, 128]}, {"fmt": "e5m2"},
                                    {"quant_method": None}, {"quant_method": ["fp8"]},
                                    {"quant_algo": "NVFP4_SVD", "quant_method": "modelopt"},
                                    {"format": "marlin-24", "quant_method": "compressed-tensors"},
                                    {"config_groups": {"a": {"weights": {"num_bits": 3, "type": "float"}}}}])
@pytest.mark.parametrize("inner", [False, True])
def test_other_quantizations_are_refused_by_name(change: dict[str, Any], inner: bool) -> None:
    said, own = {"quantization_config": {**SAID, **change}}, hf_config(shape())
    with pytest.raises(ModelError, match=f"quantization_config: {next(iter(change))}"):
        ModelConfig.from_hf({**own, "text_config": {**own.get("text_config", own), **said}} if inner
                            else {**own, **said})


def test_offloaded_float8_experts_refused(tmp_path: Path) -> None:
    checkpoint(mixture(), tmp_path)
    with pytest.raises(ConfigError, match="expert_memory is not possible with experts stored as F8_E4M3"):
        load(str(tmp_path), EngineConfig(dtype="bfloat16", memory="16MiB", expert_memory="1MiB"))
