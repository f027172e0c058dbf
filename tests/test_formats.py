"""Formats of quantized weights: tables of tensors, parts of weights, and files that are broken."""

from __future__ import annotations

import json
import random
import resource
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from expert_cases import text_of
from mutations import mutated
from safetensors.torch import load_file, save_file
from support import moe_shape, odd_shape, tiny_texts
from test_tensor_parallel import needs_kernels, wide_shape
from torch import Tensor

from deltic.config import EngineConfig, ExpertsConfig, LinearConfig, ModelConfig, RopeConfig
from deltic.engine.loading import load
from deltic.errors import ModelError
from deltic.export.program import hf_config
from deltic.loader.checkpoint import directory_checkpoint
from deltic.loader.dummy import random_head, random_weights
from deltic.loader.files import find_tensors
from deltic.loader.formats.fp8 import Float8
from deltic.loader.gguf.convert import convert
from deltic.loader.model_files import ModelFiles, open_model
from deltic.loader.mtp_head import extract_head, find_head, load_stored_head
from deltic.loader.safetensors import KeptForms
from deltic.loader.tensors import PackedTensor
from deltic.model.tensor_parallel import WeightSplitter
from deltic.ops import select
from deltic.ops.cuda.quantized import Tiles, tiles_form
from deltic.ops.parts import one_device
from deltic.runner import weights
from deltic.runner.layer_offload import LayerPlan

# Formats as plain arithmetic


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
Form = Callable[[Tensor, torch.Generator], tuple[dict[str, Tensor], Tensor]]


def nibbles(rows: int, columns: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random bytes of two codes, and their values in order."""
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator)
    both = np.stack([codes.numpy() & 15, codes.numpy() >> 4], -1).reshape(rows, columns)
    return codes, torch.from_numpy(np.where(both > 7, -1, 1).astype(np.float32) * E2M1[both & 7])


def float8s(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, columns, generator=generator).mul_(50).to(torch.float8_e4m3fn)


def nvfp4(weight: Tensor, generator: torch.Generator, *, modelopt: bool = False) -> tuple[dict[str, Tensor], Tensor]:
    codes, values = nibbles(*weight.shape, generator)
    scales = (float8s(len(weight), weight.shape[1] // 16, generator).float().abs() + 1).to(torch.float8_e4m3fn)
    whole = torch.rand(1, generator=generator) + 0.5
    if modelopt:
        wide = scales.float() * (whole / 4096)
        stored = {"weight": codes, "weight_scale": scales, "weight_scale_2": (whole / 4096)[0]}
    else:
        wide = scales.float() / (whole * 4096)
        stored = {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": whole * 4096}
    return stored, values * wide.repeat_interleave(16, 1)


def modelopt_nvfp4(weight: Tensor, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    return nvfp4(weight, generator, modelopt=True)


def powers(rows: int, columns: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random exponents, and the factors of all columns."""
    found = torch.randint(100, 127, (rows, columns // 32), dtype=torch.uint8, generator=generator)
    return found, torch.from_numpy(np.exp2(found.numpy().astype(np.float32) - 127)).repeat_interleave(32, 1)


def mxfp4(weight: Tensor, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    codes, values = nibbles(*weight.shape, generator)
    exponents, wide = powers(*weight.shape, generator)
    return {"weight_packed": codes, "weight_scale": exponents}, values * wide


def mxfp8(weight: Tensor, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    codes = float8s(*weight.shape, generator)
    exponents, wide = powers(*weight.shape, generator)
    return {"weight": codes, "weight_scale": exponents}, codes.float() * wide


def fp8(weight: Tensor, generator: torch.Generator, *, by: str) -> tuple[dict[str, Tensor], Tensor]:
    rows, columns = weight.shape
    codes = float8s(rows, columns, generator)
    groups = -(-columns // 128)
    grid = {"block": (-(-rows // 128), groups), "group": (rows, groups), "row": (rows, 1), "matrix": (1, 1)}[by]
    scales = torch.rand(grid, generator=generator) + 0.01
    wide = scales.repeat_interleave(-(-rows // len(scales)) if by != "block" else 128, 0)[:rows]
    wide = wide.repeat_interleave(128 if by in ("block", "group") else columns, 1)[:, :columns]
    name = "weight_scale_inv" if by == "block" else "weight_scale"
    return {"weight": codes, name: scales if by != "matrix" else scales[0, 0]}, codes.float() * wide


def fp8_block(weight: Tensor, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    return fp8(weight, generator, by="block")


def fp8_group(weight: Tensor, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    return fp8(weight, generator, by="group")


def fp8_row(weight: Tensor, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    return fp8(weight, generator, by="row")


def fp8_matrix(weight: Tensor, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    return fp8(weight, generator, by="matrix")


def compressed(format: str, bits: int) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": format,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": bits, "type": "float"}}}}


FORMS: dict[str, tuple[Form, dict[str, Any]]] = {
    "NVFP4": (nvfp4, compressed("nvfp4-pack-quantized", 4)),
    "NVFP4 of ModelOpt": (modelopt_nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "MXFP4": (mxfp4, compressed("mxfp4-pack-quantized", 4)),
    "MXFP8": (mxfp8, compressed("mxfp8-quantized", 8)),
    "FP8 by block": (fp8_block, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "FP8 by group": (fp8_group, compressed("float-quantized", 8)),
    "FP8 by row": (fp8_row, compressed("float-quantized", 8)),
    "FP8 by matrix": (fp8_matrix, {"quant_method": "modelopt", "quant_algo": "FP8"})}


def shape(**changes: Any) -> ModelConfig:
    sizes: dict[str, Any] = {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 320, "num_attention_heads": 4, "head_dim": 32,
        "rope": RopeConfig(1e4, 6, (1, 1, 1)), "linear": LinearConfig(2, 4, 16, 32, 4), "num_mtp_layers": 1,
        "num_hidden_layers": 3, "layer_types": ("linear_attention", "full_attention", "linear_attention")}
    return odd_shape(**{**sizes, **changes})


def mixture() -> ModelConfig:
    dense = shape()
    return moe_shape(**{name: getattr(dense, name) for name in (
        "vocab_size", "hidden_size", "num_attention_heads", "head_dim", "rope", "linear", "num_mtp_layers",
        "num_hidden_layers", "layer_types")}, experts=ExpertsConfig(3, 2, 32, 96))


CONFIGS = {"dense": shape(), "experts": mixture()}


@cache
def plain_weights(config: ModelConfig) -> dict[str, Tensor]:
    """Random weights of a model and its head."""
    return {**random_weights(config, "bfloat16"), **random_head(config, "bfloat16")}


def write(place: Path, config: ModelConfig, form: str | tuple[Form, dict[str, Any]], layout: str = "one by one"
          ) -> dict[str, Tensor]:
    """Writes a checkpoint, and returns its numbers by canonical name. layout: of experts, also `stacks`."""
    quantize, settings = FORMS[form] if isinstance(form, str) else form
    generator, stored, numbers = torch.Generator().manual_seed(1), dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in plain_weights(config).items():
        kept = tensor.dim() < 2 or "proj" not in name or name.endswith((".in_proj_a.weight", ".in_proj_b.weight"))
        excluded = ".layers.1." in name and ".mlp." not in name
        if kept or excluded:
            stored[name], numbers[name] = tensor, tensor.float()
            continue
        made = [quantize(matrix, generator) for matrix in tensor.reshape(-1, *tensor.shape[-2:])]
        numbers[name] = torch.stack([found for _, found in made]).reshape(tensor.shape)
        module = name.removesuffix(".weight")
        for suffix in made[0][0]:
            parts = [found[suffix] for found, _ in made]
            if tensor.dim() == 2:
                stored[f"{module}.{suffix}"] = parts[0]
            elif layout == "one by one":
                before, _, after = module.partition(".experts.")
                stored |= {f"{before}.experts.{index}.{after}.{suffix}": part for index, part in enumerate(parts)}
            else:
                stored[f"{module}.{suffix}"] = torch.stack(parts)
        stored[f"{module}.input_scale"] = torch.tensor(0.5)
    stored["model.layers.1.self_attn.k_scale"] = torch.tensor(0.5)
    place.mkdir(exist_ok=True)
    save_file(stored, place / "model.safetensors")
    own = text_of(config) if config.experts else hf_config(config)
    (place / "config.json").write_text(json.dumps({**own, "quantization_config": settings}))
    return numbers


def same(found: dict[str, Any], numbers: dict[str, Tensor]) -> None:
    assert not found.keys() - numbers.keys() and found
    assert not [name for name, tensor in found.items() if not torch.equal(tensor, numbers[name].to(tensor.dtype))]


def opened(place: Path) -> ModelFiles:
    return open_model(place, progress=False)


# Reading


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("form", FORMS)
def test_numbers(form: str, config: str, tmp_path: Path) -> None:
    """Of the model and its head, in any dtype."""
    numbers = write(tmp_path, CONFIGS[config], form)
    for dtype in ("float32", "bfloat16"):
        found, head = opened(tmp_path).load(dtype, "cpu", None), opened(tmp_path).load_head(dtype, "cpu")
        assert head and {*found, *head} == {*numbers}
        same({**found, **head}, numbers)


@pytest.mark.parametrize("form", FORMS)
def test_pieces_of_rows(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they begin inside of a block."""
    numbers = write(tmp_path, shape(num_hidden_layers=2, layer_types=("linear_attention", "full_attention")), form)
    for chunk in (3 * 64, 200 * 64):
        monkeypatch.setattr("deltic.loader.safetensors._CHUNK", chunk)
        same(opened(tmp_path).load("float32", "cpu", None), numbers)


@pytest.mark.covering(2)
@pytest.mark.parametrize("layout", ["one by one", "stacks"])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("form", FORMS)
def test_parts_for_devices(form: str, config: str, layout: str, tmp_path: Path) -> None:
    numbers = write(tmp_path, CONFIGS[config], form, layout)
    split = WeightSplitter(CONFIGS[config], 2).over(["cpu", "cpu"])
    for keeps in (False, True):
        found: dict[str, dict[int, Tensor]] = {}
        for device, name, weight in opened(tmp_path).parts("float32", split, kept=KeptForms(float8=keeps)):
            assert keeps or not isinstance(weight, Float8)
            found.setdefault(name, {})[device] = weight.numbers() if isinstance(weight, Float8) else weight
        for name, parts in found.items():
            wanted = {device: part.of(numbers[name]) for device, part in split.own(name, tuple(numbers[name].shape))}
            assert parts.keys() == wanted.keys()
            assert all(torch.equal(tensor, wanted[device]) for device, tensor in parts.items()), name


@pytest.mark.parametrize("form", FORMS)
def test_experts_in_one_tensor(form: str, tmp_path: Path) -> None:
    """With names of modules, and with names of parameters."""
    numbers, stored = write(tmp_path, CONFIGS["experts"], form, "stacks"), load_file(tmp_path / "model.safetensors")
    same(opened(tmp_path).load("float32", "cpu", None), numbers)
    for name in [name for name in stored if ".experts." in name and not name.endswith("input_scale")]:
        before, _, suffix = name.rpartition("_proj.")
        stored[f"{before}_proj{suffix.removeprefix('weight')}"] = stored.pop(name)
    save_file(stored, tmp_path / "model.safetensors")
    same(opened(tmp_path).load("float32", "cpu", None), numbers)


def test_one_scale_for_all_experts(tmp_path: Path) -> None:
    numbers = write(tmp_path, CONFIGS["experts"], "NVFP4", "stacks")
    stored = load_file(tmp_path / "model.safetensors")
    for name in [name for name in stored if name.endswith("experts.up_proj.weight_global_scale")]:
        first, weight = stored[name][0], name.removesuffix("_global_scale")
        ratio = stored[name] / first
        stored[name] = first
        if weight in numbers:
            assert ratio.shape == (3, 1)
            scales = stored[f"{weight}_scale"].float() / first
            pairs = nibble_values(stored[f"{weight}_packed"])
            numbers[weight] = pairs * scales.repeat_interleave(16, -1)
    save_file(stored, tmp_path / "model.safetensors")
    same(opened(tmp_path).load("float32", "cpu", None), numbers)


def nibble_values(codes: Tensor) -> Tensor:
    both = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
    return torch.tensor([*E2M1, *-E2M1])[both]


def write_mixed(tmp_path: Path, config: ModelConfig) -> dict[str, Tensor]:
    """Writes a checkpoint with layer 0 in NVFP4, others in FP8, and returns its numbers."""
    numbers = write(tmp_path, config, "NVFP4 of ModelOpt")
    other = write(tmp_path / "other", config, "FP8 by matrix")
    stored = {**{name: tensor for name, tensor in load_file(tmp_path / "model.safetensors").items() if ".0." in name},
              **{name: tensor for name, tensor in load_file(tmp_path / "other" / "model.safetensors").items()
                 if ".0." not in name}}
    save_file(stored, tmp_path / "model.safetensors")
    layers = {"model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
              "model.layers.2.mlp.up_proj": {"quant_algo": "FP8"}}
    settings = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    (tmp_path / "config.json").write_text(json.dumps({**hf_config(config), "quantization_config": settings}))
    return {name: tensor if ".0." in name else other[name] for name, tensor in numbers.items()}


def test_formats_by_layer(tmp_path: Path) -> None:
    numbers = write_mixed(tmp_path, CONFIGS["dense"])
    same(opened(tmp_path).load("float32", "cpu", None), numbers)
    kinds = {source.dtype for source in find_tensors(tmp_path).values() if isinstance(source, PackedTensor)}
    assert kinds == {"NVFP4", "F8_E4M3"}
    parts = opened(tmp_path).parts("float32", one_device("cpu"), kept=KeptForms(float8=True))
    kept = [name for _, name, weight in parts if isinstance(weight, Float8)]
    assert kept and all(".0." not in name for name in kept)
    assert opened(tmp_path).float8_names() == {*kept}


@needs_kernels
def test_bytes_on_a_gpu_that_keeps_float8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader keeps NVFP4 and float8 weights as they are stored."""
    config = wide_shape()
    write_mixed(tmp_path, config)
    monkeypatch.setattr(weights, "packed_form", lambda options, device: tiles_form("cpu"))
    monkeypatch.setattr(weights, "keeps_float8", lambda *_: True)
    monkeypatch.setattr(weights, "packs", lambda ops: False)
    files = opened(tmp_path)
    source = weights.OpenedModel("m", config, files.generation, files)
    reader = weights.WeightReader(source, EngineConfig(device="cpu", dtype="bfloat16"), select((), "cpu"), "bfloat16")
    (found,), _ = reader.read(LayerPlan())
    assert reader.sizes() == {name: weight.nbytes for name, weight in found.items()}  # type: ignore[union-attr]
    assert {weight.type for weight in found.values() if isinstance(weight, Tiles)} == {"FP8", "NVFP4"}
    up = found["model.layers.0.mlp.up_proj.weight"]
    assert isinstance(up, Tiles) and up.type == "NVFP4"


def test_unused_scales_are_noted_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, CONFIGS["dense"], "NVFP4")
    with caplog.at_level("INFO", "deltic"):
        opened(tmp_path).load("float32", "cpu", None)
    notes = [record.message for record in caplog.records if "are not used" in record.message]
    assert len(notes) == 1 and "scales of activations, keys and values" in notes[0]


def test_config_of_older_modelopt(tmp_path: Path) -> None:
    """In a file of its own."""
    numbers = write(tmp_path, CONFIGS["dense"], "NVFP4 of ModelOpt")
    (tmp_path / "config.json").write_text(json.dumps(hf_config(CONFIGS["dense"])))
    place, producer = tmp_path / "hf_quant_config.json", {"name": "modelopt", "version": "0.29.0"}
    place.write_text(json.dumps({"producer": producer, "quantization": {
        "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}}))
    same(opened(tmp_path).load("float32", "cpu", None), numbers)
    place.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4_SVD"}}))
    with pytest.raises(ModelError, match=r"hf_quant_config\.json: quantization: quant_algo 'NVFP4_SVD' is not supp"):
        opened(tmp_path).load("float32", "cpu", None)


def test_weights_in_memory(tmp_path: Path) -> None:
    numbers = write(tmp_path, CONFIGS["dense"], "MXFP4")
    files = open_model(None, config=tmp_path / "config.json", weights=load_file(tmp_path / "model.safetensors"))
    head = files.load_head("float32", "cpu")
    assert head
    same({**files.load("float32", "cpu", None), **head}, numbers)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("form", FORMS)
def test_a_head_taken_out(form: str, config: str, tmp_path: Path) -> None:
    """Bit for bit, and read without the config of its model."""
    numbers = write(tmp_path, CONFIGS[config], form, "stacks")
    (tmp_path / "taken").mkdir()
    extract_head(directory_checkpoint(tmp_path), tmp_path / "taken" / "mtp.safetensors", "here")
    head = find_head(directory_checkpoint(tmp_path / "taken"), CONFIGS[config])
    found = load_stored_head(head, CONFIGS[config], "float32", one_device("cpu"))[0]
    assert {*found} == {name for name in numbers if name.startswith("mtp.")}
    same(found, numbers)


@pytest.mark.parametrize("form", ["NVFP4", "MXFP8"])
def test_conversion_to_gguf(form: str, tmp_path: Path) -> None:
    numbers = write(tmp_path, CONFIGS["experts"], form)
    convert(opened(tmp_path), tiny_texts(), "small", tmp_path / "m.gguf", "F32")
    found = opened(tmp_path / "m.gguf").load("float32", "cpu", None)
    for name, tensor in found.items():
        assert (tensor - numbers[name]).norm() <= 1e-5 * numbers[name].norm(), name


@pytest.mark.parametrize("form", ["NVFP4", "FP8 by row"])
def test_a_quantized_copy_of_a_tied_embedding(form: str, tmp_path: Path) -> None:
    """It is left out, as in transformers. Another matrix is refused."""
    config = shape(tie_word_embeddings=True)
    numbers = write(tmp_path, config, form)
    stored = load_file(tmp_path / "model.safetensors")
    parts, values = FORMS[form][0](torch.empty(config.vocab_size, config.hidden_size), torch.Generator())
    noise = 0.05 * values.std() * torch.randn(values.shape, generator=torch.Generator().manual_seed(2))
    for embedding, fits in ((values + noise, True), (values.flip(0), False)):
        stored |= {"model.embed_tokens.weight": embedding, **{f"lm_head.{name}": part for name, part in parts.items()}}
        save_file({name: tensor.contiguous() for name, tensor in stored.items()}, tmp_path / "model.safetensors")
        if fits:
            same(opened(tmp_path).load("float32", "cpu", None), {**numbers, "model.embed_tokens.weight": embedding})
        else:
            with pytest.raises(ModelError, match="set tie_word_embeddings to false"):
                opened(tmp_path).load("float32", "cpu", None)


def test_quantized_once_more(tmp_path: Path) -> None:
    write(tmp_path, CONFIGS["dense"], "NVFP4")
    runtime = load(str(tmp_path), EngineConfig(dtype="float32", memory="16MiB", quant="q8_0", threads=1))
    assert runtime.config == replace(CONFIGS["dense"], eos_token_ids=runtime.config.eos_token_ids)


# Broken files


UP = "model.layers.0.mlp.up_proj."


@pytest.mark.parametrize("form, change, match", [
    ("NVFP4", {"weight_scale": None}, r"up_proj\.weight' is stored as NVFP4 without scales \(.*up_proj\.weight_sc"),
    ("NVFP4", {"weight_scale": torch.ones(320, 4)}, "NVFP4 with scales of dtype F32"),
    ("NVFP4", {"weight_scale": torch.ones(320, 8).to(torch.float8_e4m3fn)}, r"scales of shape \[320, 8\]; only a"),
    ("NVFP4", {"weight_global_scale": torch.ones(2)}, r"a scale of the matrix of shape \[2\]"),
    ("NVFP4", {"weight": torch.ones(320, 64)}, "given twice, quantized and plain"),
    ("NVFP4", {"weight_packed": torch.ones(320, 16, dtype=torch.uint8)}, r"scales of shape \[320, 4\]"),
    ("NVFP4", {"weight_packed": torch.ones(1, 320, 32, dtype=torch.uint8)}, r"scales of shape \[320, 4\] for 1 exp"),
    ("NVFP4", {"weight_packed": torch.ones(0, 32, dtype=torch.uint8)}, r"codes of shape \[0, 32\]"),
    ("NVFP4", {"weight_packed": None}, "part of an unsupported quantization"),
    ("NVFP4", {"pre_quant_scale": torch.ones(64)}, "pre_quant_scale' is part of an unsupported quantization"),
    ("NVFP4 of ModelOpt", {"weight_scale_2": None}, "weight_scale_2"),
    ("MXFP4", {"weight_scale": torch.ones(320, 4, dtype=torch.uint8)}, r"scales of shape \[320, 4\]; only a scale"),
    ("MXFP8", {"weight_scale": torch.ones(2, 320, dtype=torch.uint8)}, r"scales of shape \[2, 320\]; only a scale"),
])
def test_broken_weights_are_named(form: str, change: dict[str, Tensor | None], match: str, tmp_path: Path) -> None:
    write(tmp_path, CONFIGS["dense"], form)
    stored = {**load_file(tmp_path / "model.safetensors"), **{UP + name: tensor for name, tensor in change.items()}}
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=match):
        opened(tmp_path).load("float32", "cpu", None)


def changed_header(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file with one to three entries changed: names, shapes, dtypes, places."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + length])
    for _ in range(rng.randint(1, 3)):
        name = rng.choice([*header])
        entry = dict(header[name])
        kind = rng.randrange(6)
        if kind == 0:
            del header[name]
            continue
        if kind == 1:
            header[name + rng.choice(("_scale", "_packed", "x"))] = header.pop(name)
            continue
        if kind == 2:
            entry["dtype"] = rng.choice(("U8", "F8_E4M3", "F8_E8M0", "I8", "BF16", "F32", "I32", "F4"))
        elif kind == 3:
            entry["shape"] = rng.choice((entry["shape"][::-1], [1, *entry["shape"]], entry["shape"][1:], [0, 4],
                                         [1 << 40, 0], [*entry["shape"], 1], [2, 2, 2]))
        elif kind == 4:
            other = dict(header[rng.choice([*header])])
            entry["data_offsets"] = other["data_offsets"]
        else:
            entry = dict(header[rng.choice([*header])])
        header[name] = entry
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length:]


def changed_config(text: str, rng: random.Random) -> str:
    """A config.json with a value of its quantization_config changed."""
    config = json.loads(text)
    settings = config["quantization_config"]
    value = rng.choice((None, 0, -1, 1e300, "", "x" * 3000, [], {}, [[]], {"a": {"weights": []}}, True))
    settings[rng.choice([*settings, "quantized_layers", "ignore", "config_groups"])] = value
    return json.dumps(config)


def examine(place: Path) -> bool:
    """Loads a model, or gets a clear error; the memory stays small."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        opened(place).load("bfloat16", "cpu", None)
        opened(place).load_head("bfloat16", "cpu")
        return True
    except ModelError as error:
        assert len(str(error)) < 2000
        return False
    finally:
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def load_mutated(place: Path, rng: random.Random) -> int:
    """Loads a checkpoint 200 times, each time with another change. Returns how many were loaded."""
    tensors, settings = place / "model.safetensors", place / "config.json"
    data, text = tensors.read_bytes(), settings.read_text()
    loaded = 0
    for number in range(200):
        tensors.write_bytes((changed_header, mutated)[number % 2](data, rng) if number % 4 else data)
        settings.write_text(text if number % 4 else changed_config(text, rng))
        loaded += examine(place)
    return loaded


@pytest.mark.parametrize("form", FORMS)
def test_mutated_files_load_or_give_an_error(form: str, tmp_path: Path) -> None:
    rng = random.Random(form)
    config = shape(num_hidden_layers=1, layer_types=("full_attention",), intermediate_size=64)
    write(tmp_path, config, form)
    assert 0 < load_mutated(tmp_path, rng) < 200
