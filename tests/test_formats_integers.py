"""Integer weights of quantizers: the numbers of their files to the bit, whole models in every format against
transformers, and what happens to damaged files."""

from __future__ import annotations

import json
import random
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_cases import text_of
from format_cases import KINDS as MODELS
from format_cases import Quantizer, check_logits, check_weights, write_model
from integer_cases import KINDS, Kind
from safetensors.torch import save_file
from support import tiny_texts
from test_formats import CONFIGS, Form, load_mutated, opened, same, shape, write
from torch import Tensor

from deltic.config import ModelConfig
from deltic.config.quantization import read_quantization
from deltic.export.program import hf_config
from deltic.loader.dummy import random_weights
from deltic.loader.files import read_header
from deltic.loader.formats import combine
from deltic.loader.gguf.convert import convert
from deltic.loader.names import is_norm
from deltic.loader.safetensors import read_stored
from deltic.loader.tensors import PackedTensor
from deltic.model.tensor_parallel import WeightSplitter


def weight_of(rows: int, columns: int) -> Tensor:
    """A matrix, the same everywhere: exact numbers, of other sizes in each row."""
    places = torch.arange(rows * columns).view(rows, columns)
    numbers = (places * 7919 + places // 13 * 104729) % 2003 - 1001
    return numbers.float() / 1024 * (1 + torch.arange(rows) % 5)[:, None]


def stored(place: Path, kind: Kind, weight: Tensor) -> tuple[PackedTensor, Tensor]:
    """A matrix in a file, and its numbers."""
    written = kind.write(weight)
    path = place / "model.safetensors"
    save_file({f"model.w.{name}": part.contiguous() for name, part in written.parts.items()}, path)
    found = combine(read_header(path), read_quantization({"quantization_config": kind.config}))
    assert [*found] == ["model.w.weight"]
    source = found["model.w.weight"].shaped(weight.shape)
    assert isinstance(source, PackedTensor) and source.shape == weight.shape
    return source, written.values


RECORDED: dict[str, int] = {
    "pack-quantized": 3328401688, "pack-quantized, zeros": 749891402, "pack-quantized, 8 bits by row": 1089683536,
    "pack-quantized, 8 bits by row, zeros": 4047739068, "pack-quantized, 3 bits": 2036398241,
    "pack-quantized, 6 bits": 1869714752, "int-quantized": 2828277659, "int-quantized, zeros": 4047739068,
    "gptq": 3353491153, "gptq, zeros": 2866573579, "gptq v2, zeros, order": 3493418357,
    "gptq, order, one group": 879412129, "gptq, 8 bits": 2202955244, "gptq, 3 bits": 2193661437,
    "gptq, 2 bits": 3506497400, "awq": 2866573579, "auto-round": 3353491153, "auto-round, zeros": 2866573579,
    "auto-round, 5 bits": 3215208738, "auto-round awq": 2866573579, "auto-round awq, 6 bits": 2312335181,
    "mlx, 2 bits": 2762070619, "mlx, 3 bits": 1880340963, "mlx, 4 bits": 3074426043, "mlx, 5 bits": 1280047945,
    "mlx, 6 bits": 1663960714, "mlx, 8 bits": 1055616995, "mlx, float32": 1644297330, "mlx, float16": 2270501175,
    "mlx mxfp4": 3425446759, "mlx nvfp4": 332442266, "mlx mxfp8": 3642221965, "nf4": 1549625031,
    "nf4, double": 3147329370, "bitsandbytes 8 bits": 439882959}
"""crc32 of the numbers of `weight_of(96, 128)`, float32, that the tools computed (test_formats_integer_tools.py)."""


@pytest.mark.parametrize("name", RECORDED)
def test_numbers_are_those_that_tools_computed(name: str) -> None:
    assert zlib.crc32(KINDS[name].write(weight_of(96, 128)).values.numpy().tobytes()) == RECORDED[name]


@pytest.mark.parametrize("name", KINDS)
def test_the_numbers_of_a_matrix(name: str, tmp_path: Path) -> None:
    """Whole, and rows that begin anywhere; in float32, and rounded once to the dtype of the scales."""
    kind = KINDS[name]
    source, values = stored(tmp_path, kind, weight_of(96, 128))
    assert torch.equal(read_stored("w", source, torch.float32, torch.device("cpu")), values)
    assert torch.equal(read_stored("w", source, kind.dtype, torch.device("cpu")), values.to(kind.dtype))
    loaded = source.loaded()
    for first, end in ((0, 1), (5, 37), (63, 96)):
        assert torch.equal(loaded.read(first, end).numbers(), values[first:end])
        part = read_stored("w", source.rows(first, end), torch.float32, torch.device("cpu"))
        assert torch.equal(part, values[first:end])


# Whole models


FAMILIES = ("pack-quantized, zeros", "gptq, zeros", "awq", "mlx, 3 bits", "mlx nvfp4", "nf4, double",
            "bitsandbytes 8 bits")
"""A format of each family."""


def form(name: str) -> tuple[Form, dict[str, Any]]:
    """The format as `test_formats.write` takes it."""
    def quantize(weight: Tensor, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        written = KINDS[name].write(weight.float())
        return written.parts, written.values

    return quantize, KINDS[name].config


@pytest.mark.parametrize("name, config, layout", [
    *((name, "dense", "one by one") for name in FAMILIES), *((name, "experts", "one by one") for name in FAMILIES),
    *((name, "experts", "stacks") for name in ("pack-quantized, zeros", "gptq, zeros", "mlx, 3 bits"))])
def test_models(name: str, config: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a draft head; whole, in pieces of rows, and in parts for two devices."""
    numbers = write(tmp_path, CONFIGS[config], form(name), layout)
    for chunk in (1 << 22, 4 * 39 * 64):
        monkeypatch.setattr("deltic.loader.safetensors._CHUNK", chunk)
        found = opened(tmp_path).load("float32", "cpu", None)
        same(found, numbers)
    head = opened(tmp_path).load_head("float32", "cpu")
    assert head and {*found, *head} == {*numbers}
    same(head, numbers)
    split = WeightSplitter(CONFIGS[config], 2).over(["cpu", "cpu"])
    for device, part, weight in opened(tmp_path).parts("float32", split):
        wanted = dict(split.own(part, tuple(numbers[part].shape)))[device].of(numbers[part])
        assert torch.equal(weight, wanted), part


def write_mlx(place: Path, config: ModelConfig, kind: Kind | None) -> dict[str, Tensor]:
    """Writes a model as mlx-lm does, and returns its numbers by canonical name. kind: None if it is not quantized."""
    tensors, numbers, settings = dict[str, Tensor](), dict[str, Tensor](), dict[str, Any]()
    for name, tensor in random_weights(config, "bfloat16").items():
        path = "language_model." + name.removesuffix(".weight").replace(".mlp.experts.", ".mlp.switch_mlp.")
        own, numbers[name] = kind, tensor.float()
        if name.endswith(("mlp.gate.weight", "shared_expert_gate.weight")) and kind:
            own = KINDS["mlx, 6 bits"]
            settings[path] = {"group_size": 32, "bits": 6}
        if "conv1d" in name:
            tensors[f"{path}.weight"] = tensor.movedim(1, 2)
        elif is_norm(name) and "linear_attn" not in name:
            tensors[f"{path}.weight"] = tensor + 1
            numbers[name] = tensors[f"{path}.weight"].float() - 1
        elif tensor.dim() == 1 or own is None or tensor.shape[-1] % own.config["group_size"]:
            tensors[path + ".weight" * name.endswith("weight")] = tensor
        else:
            made = [own.write(matrix.float()) for matrix in tensor.reshape(-1, *tensor.shape[-2:])]
            numbers[name] = torch.stack([each.values for each in made]).view(tensor.shape)
            for part in made[0].parts:
                stacked = torch.stack([each.parts[part] for each in made])
                tensors[f"{path}.{part}"] = stacked if tensor.dim() == 3 else stacked[0]
    place.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, place / "model.safetensors")
    both = {key: {**kind.config, **settings} for key in ("quantization", "quantization_config")} if kind else {}
    own_config = text_of(config) if config.experts else hf_config(config)
    (place / "config.json").write_text(json.dumps({**own_config, **both}))
    return numbers


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", ["mlx, 4 bits", "mlx mxfp4", "mlx nvfp4", None])
def test_models_of_mlx(name: str | None, config: str, tmp_path: Path) -> None:
    """Other names, layouts and norms; bits of single modules; embedding and routers are quantized, too."""
    numbers = write_mlx(tmp_path, CONFIGS[config], KINDS[name] if name else None)
    same(opened(tmp_path).load("float32", "cpu", None), numbers)
    assert opened(tmp_path).load_head("float32", "cpu") is None


@pytest.mark.parametrize("name", [*FAMILIES, "auto-round, zeros", "mlx, 4 bits"])
def test_conversion_to_gguf(name: str, tmp_path: Path) -> None:
    """The last one with the names and the layout of MLX."""
    config = CONFIGS["experts"]
    numbers = (write_mlx(tmp_path, config, KINDS[name]) if name == "mlx, 4 bits" else
               write(tmp_path, config, form(name)))
    convert(opened(tmp_path), tiny_texts(), "small", tmp_path / "m.gguf", "F32")
    found = opened(tmp_path / "m.gguf").load("float32", "cpu", None)
    for each, tensor in found.items():
        assert (tensor - numbers[each]).norm() <= 1e-5 * numbers[each].norm(), each


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in KINDS if KINDS[name].config.get("group_size") != 128])
def test_mutated_files_load_or_give_an_error(name: str, tmp_path: Path) -> None:
    rng = random.Random(name)
    config = shape(num_hidden_layers=1, layer_types=("full_attention",), intermediate_size=64)
    write(tmp_path, config, form(name))
    assert 0 < load_mutated(tmp_path, rng) < 200


# Against transformers


def quantizer(name: str) -> Quantizer:
    def quantize(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        written = KINDS[name].write(weight.float())
        return written.parts, written.values, written.values.bfloat16()

    return quantize


@pytest.mark.slow
@pytest.mark.parametrize("name, model, fused", [
    *((name, model, False) for name in ("pack-quantized, zeros", "gptq v2, zeros, order", "awq", "nf4, double")
      for model in MODELS), ("pack-quantized, zeros", "experts", True)])
def test_weights_and_logits(name: str, model: str, fused: bool, tmp_path: Path) -> None:
    """Text model, draft head and vision tower; one layer is not quantized, nor what fills no words of AWQ."""
    kept = r"layers\.1\.|lm_head" if name == "awq" else r"layers\.1\."
    written = write_model(tmp_path, model, quantizer(name), KINDS[name].config, fused=fused, kept=kept)
    check_weights(written)
    check_logits(written)
