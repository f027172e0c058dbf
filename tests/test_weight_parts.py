"""Each device reads its own part of the weights: the numbers of the whole model, and no others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from expert_cases import text_of
from safetensors.torch import save_file
from support import DEVICE, split_shape, tiny_texts
from test_llama_family import LLAMA, permuted_file
from test_loader_fp8 import by_row_or_matrix, in_blocks, mapping
from test_tensor_parallel import OPTIONS, QUANTIZED, needs_kernels, same, story, wide_shape
from torch import Tensor

from deltic.config import EngineConfig, ExpertsConfig, GenerationDefaults, LinearConfig, ModelConfig, RopeConfig
from deltic.engine.loading import RandomModel, load
from deltic.errors import ModelError
from deltic.loader.dummy import random_head, random_tensors, random_weights
from deltic.loader.formats.fp8 import Float8
from deltic.loader.gguf import load as gguf_load
from deltic.loader.gguf.convert import convert
from deltic.loader.gguf.file import GgufTensor
from deltic.loader.model_files import ModelFiles, open_model
from deltic.loader.names import EMBEDDING, expected_tensors
from deltic.loader.quantize import FP8, STORED, quantize_parts
from deltic.loader.safetensors import KeptForms
from deltic.loader.tensors import StoredTensor
from deltic.model.tensor_parallel import WeightSplitter, check_degree
from deltic.ops import select
from deltic.ops.cuda.quantized import Tiles, tiles_form
from deltic.ops.parts import Split, one_device
from deltic.ops.quantized import QTensor
from deltic.ops.types import Weight
from deltic.runner import weights as reading
from deltic.runner.layer_offload import LayerPlan
from deltic.runner.weights import OpenedModel, WeightReader

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="the devices are virtual ones of a CPU")
TILED = wide_shape(linear=LinearConfig(4, 8, 32, 256, 4))
EXPERTS = split_shape(architecture="qwen3_5_moe", intermediate_size=0, experts=ExpertsConfig(11, 3, 20, 80))


def numbers_of(weight: Weight | Float8) -> Tensor:
    if isinstance(weight, tuple):
        return torch.stack([numbers_of(block) for block in weight])
    if isinstance(weight, Float8):
        return weight.numbers()
    return weight.dequantize() if isinstance(weight, QTensor) else weight


PLAIN = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


def kinds_of(weight: Weight) -> set[str]:
    """One device packs plain matrices of the vocabulary while it reads them."""
    blocks = weight if isinstance(weight, tuple) else (weight,)
    return {block.type if isinstance(block, QTensor) else PLAIN[block.dtype] for block in blocks}


def check(whole: dict[str, Weight], parts: list[dict[str, Weight]], split: Split) -> None:
    """Every device has its part, in the format of the whole tensor."""
    assert {name for own in parts for name in own} == whole.keys()
    for name, weight in whole.items():
        numbers = numbers_of(weight)
        for own, part in zip(parts, split.parts(name, tuple(numbers.shape)), strict=True):
            if part is None:
                assert name not in own, name
            else:
                assert torch.equal(numbers_of(own[name]), part.of(numbers)), name
                assert kinds_of(own[name]) == kinds_of(weight), name


def check_reader(source: OpenedModel, tp: int, **options: Any) -> list[dict[str, Weight]]:
    def reader(devices: int) -> WeightReader:
        given = EngineConfig(**{**OPTIONS, "tp": devices, **options})
        return WeightReader(source, given, select((), "cpu"), given.dtype)  # type: ignore[arg-type]

    one, several = reader(1), reader(tp)
    parts = several.read(LayerPlan())[0]
    assert len(parts) == tp
    check(one.read(LayerPlan())[0][0], parts, several._split)
    head, heads = one.read_head(), several.read_head()
    assert (head is None) == (heads is None)
    if head and heads:
        check(head[0], heads, several._split)
    return parts


def opened(folder: Path, config: ModelConfig, tensors: dict[str, Tensor] | None = None) -> OpenedModel:
    stored = random_weights(config, "bfloat16") if tensors is None else tensors
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(text_of(config) if config.experts else mapping(config)))
    files = ModelFiles(folder, config, GenerationDefaults(eos_token_ids=(config.vocab_size - 7,)))
    return OpenedModel("m", config, files.generation, files)


def fused(config: ModelConfig) -> dict[str, Tensor]:
    """As other exporters write models: what enters Gated DeltaNet by key heads, gates and ups of experts together."""
    tensors, linear = random_weights(config, "bfloat16"), config.linear
    assert linear
    for layer, kind in enumerate(config.layer_types):
        prefix = f"model.layers.{layer}."
        if kind == "linear_attention":
            qkv = tensors.pop(f"{prefix}linear_attn.in_proj_qkv.weight").split(
                [linear.key_dim, linear.key_dim, linear.value_dim])
            rest = [tensors.pop(f"{prefix}linear_attn.in_proj_{part}.weight") for part in "zba"]
            grouped = [part.unflatten(0, (linear.num_key_heads, -1)) for part in (*qkv, *rest)]
            for name, parts in (("qkvz", grouped[:4]), ("ba", grouped[4:])):
                tensors[f"{prefix}linear_attn.in_proj_{name}.weight"] = torch.cat(parts, 1).flatten(0, 1)
        if config.experts:
            both = [tensors.pop(f"{prefix}mlp.experts.{part}_proj.weight") for part in ("gate", "up")]
            tensors[f"{prefix}mlp.experts.gate_up_proj"] = torch.cat(both, 1)
    return tensors


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("config", [split_shape(), EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("form", ["plain", "fused"])
def test_safetensors(config: ModelConfig, form: str, tp: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltic.loader.safetensors._CHUNK", 3000)
    source = opened(tmp_path, config, fused(config) if form == "fused" else None)
    check_reader(source, tp, dtype="bfloat16")


def test_experts_stored_one_by_one(tmp_path: Path) -> None:
    tensors = random_weights(EXPERTS, "bfloat16")
    for name in [name for name in tensors if ".mlp.experts." in name]:
        for expert, matrix in enumerate(tensors.pop(name)):
            tensors[name.replace(".experts.", f".experts.{expert}.")] = matrix
    check_reader(opened(tmp_path, EXPERTS, tensors), 4)


def test_tensors_in_memory() -> None:
    config = split_shape()
    files = open_model(None, config=config, weights={name: tensor.t().contiguous().t() if tensor.dim() == 2 else tensor
                                                     for name, tensor in random_weights(config, "bfloat16").items()})
    check_reader(OpenedModel("m", config, GenerationDefaults(), files), 4)


@needs_kernels
@pytest.mark.parametrize("quant", ["q8_0", "q4_k"])
@pytest.mark.parametrize("kind", ["hybrid", "experts"])
def test_quantized_at_load(kind: str, quant: str) -> None:
    config = QUANTIZED[kind]
    source = OpenedModel("m", config, GenerationDefaults(), random=RandomModel(shape=config, head=True))
    parts = check_reader(source, 4, quant=quant)
    assert any(isinstance(weight, QTensor) for weight in parts[3].values())


def test_random_weights_with_a_head() -> None:
    source = OpenedModel("m", EXPERTS, GenerationDefaults(), random=RandomModel(shape=EXPERTS, head=True))
    check_reader(source, 4, speculate="mtp:2")


def test_a_head_in_safetensors(tmp_path: Path) -> None:
    config = split_shape(num_mtp_layers=1)
    tensors = {**random_weights(config, "bfloat16"), **random_head(config, "bfloat16")}
    check_reader(opened(tmp_path, config, tensors), 4, speculate="mtp:2")


# GGUF


@pytest.mark.parametrize("packed", [pytest.param("on", marks=needs_kernels), "off"])
@pytest.mark.parametrize("file_type", ["BF16", "Q8_0", "Q4_K_M", "Q5_0"])
def test_gguf_files(file_type: str, packed: str, tmp_path: Path) -> None:
    """With value heads in tiles, and a draft head."""
    config = replace(TILED, num_mtp_layers=1, vocab_size=3072)
    tensors = {**random_weights(config, "float32"), **random_head(config, "float32")}
    files = opened(tmp_path, config, tensors).files
    assert files
    convert(files, tiny_texts(), "model", tmp_path / "m.gguf", file_type)
    found = open_model(tmp_path / "m.gguf")
    source = OpenedModel("m", found.config, found.generation, found)
    parts = check_reader(source, 4, packed_weights=packed, speculate="mtp:2")
    kinds = {kind for weight in parts[3].values() for kind in kinds_of(weight)}
    assert (packed == "off") == (kinds == {"F32"})


@needs_kernels
@pytest.mark.parametrize(("family", "file_type"), [("qwen3_5_moe", "Q8_0"), ("qwen3_5_moe", "Q6_K"),
                                                   ("qwen3_next", "Q8_0")])
def test_experts_in_gguf_files(family: str, file_type: str, tmp_path: Path) -> None:
    config = replace(QUANTIZED["experts"], linear=TILED.linear, vocab_size=3072)
    if family == "qwen3_next":
        config = replace(config, architecture=family, rope=replace(config.rope, mrope_section=()))
    files = opened(tmp_path, config).files
    assert files
    convert(files, tiny_texts(), "model", tmp_path / "m.gguf", file_type)
    found = open_model(tmp_path / "m.gguf")
    check_reader(OpenedModel("m", found.config, found.generation, found), 4, packed_weights="on")


@needs_kernels
def test_rows_of_gguf_files_in_another_order(tmp_path: Path) -> None:
    """Queries and keys of llama's files are in the order of rotated pairs."""
    config = replace(LLAMA, hidden_size=64, intermediate_size=288, num_attention_heads=8, num_key_value_heads=2,
                     head_dim=16, rope=RopeConfig(1e4, 16, ()))
    permuted_file(tmp_path / "m.gguf", config, "Q8_0")
    found = open_model(tmp_path / "m.gguf")
    check_reader(OpenedModel("m", found.config, found.generation, found), 2, packed_weights="on")


# float8


def float8_checkpoint(config: ModelConfig, scales: str) -> dict[str, Tensor]:
    stored = random_weights(config, "bfloat16")
    for name in [name for name, tensor in stored.items() if "proj" in name and tensor.dim() > 1]:
        if name.endswith((".in_proj_a.weight", ".in_proj_b.weight")):
            continue
        codes = (in_blocks(stored[name], torch.float32) if scales == "blocks"
                 else by_row_or_matrix(stored[name], scales == "matrix"))
        stored[name], stored[f"{name}_scale_inv"] = codes[0], codes[1]
    return stored


FLOAT8 = {"dense": wide_shape(), "rows within blocks": wide_shape(head_dim=64, num_attention_heads=8,
                                                                  intermediate_size=1024 + 160),
          "experts": QUANTIZED["experts"]}


@pytest.mark.covering
@pytest.mark.parametrize("scales", ["blocks", "rows", "matrix"])
@pytest.mark.parametrize("kind", FLOAT8)
def test_float8(kind: str, scales: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dequantized on a CPU; as tiles where a GPU keeps them."""
    config = FLOAT8[kind]
    source = opened(tmp_path, config, float8_checkpoint(config, scales))
    monkeypatch.setattr("deltic.loader.safetensors._CHUNK", 200 * 256)
    check_reader(source, 4, dtype="bfloat16")
    assert source.files
    tp = 2 if kind == "rows within blocks" else 4  # a GPU's tiles have 256 columns
    check_degree(config, tp, packed=True)
    for scheme in (FP8, STORED):
        units = {name: 256 for name in expected_tensors(config) if name.endswith("down_proj.weight")
                 and kind != "rows within blocks"}
        split = WeightSplitter(config, tp, units=units).over(["cpu"] * tp)
        whole, parts = (quantize_parts(source.files.parts("bfloat16", own, kept=KeptForms(float8=True)), scheme, config,
                                       [tiles_form("cpu")] * len(own.devices)) for own in (one_device("cpu"), split))
        check(whole[0], parts, split)
        assert any(isinstance(weight, Tiles) and weight.type == "FP8" for weight in parts[1].values())


@needs_kernels
def test_answers_of_a_float8_checkpoint(tmp_path: Path) -> None:
    config = wide_shape(vocab_size=300)
    opened(tmp_path, config, float8_checkpoint(config, "blocks"))
    one, two, four = (load(str(tmp_path), EngineConfig(**{**OPTIONS, "tp": tp})) for tp in (1, 2, 4))
    answers = story(one)
    same(answers, story(two), exact=True)
    same(answers, story(four), exact=True)


# Packed weights of an earlier start


@needs_kernels
def test_each_number_of_devices_has_its_file_of_packed_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, kept = [], reading.quantize_parts

    def quantize(*given: Any) -> Any:
        made.append(len(given[3]))
        return kept(*given)

    monkeypatch.setattr(reading, "quantize_parts", quantize)
    answers, model = [], RandomModel(shape=QUANTIZED["hybrid"], initializer_range=0.1)
    for tp in (1, 2, 4, 2, 4, 1):
        options = EngineConfig(**{**OPTIONS, "tp": tp, "quant": "q8_0", "aot_dir": str(tmp_path)})
        answers.append(story(load(model, options)))
    assert made == [1, 2, 4] and len(list(tmp_path.iterdir())) == 3
    for found in answers[1:]:
        same(answers[0], found, exact=True)


# What is read


class CountedFile:
    def __init__(self, file: Any, read: list[int]) -> None:
        self.file, self.read, self.seek = file, read, file.seek

    def __enter__(self) -> CountedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def readinto(self, buffer: Any) -> int:
        count: int = self.file.readinto(buffer)
        self.read.append(count)
        return count


def layer_bytes(source: OpenedModel) -> int:
    """Bytes of the layers in bfloat16."""
    return sum(2 * int(np.prod(shape)) for name, shape in expected_tensors(source.config).items() if ".layers." in name)


@pytest.mark.parametrize("config", [wide_shape(num_key_value_heads=4), EXPERTS], ids=["dense", "experts"])
def test_four_devices_read_a_file_once(config: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the layers each reads little more than a quarter: norms and routers are on all devices."""
    source, read, plain = opened(tmp_path, config), list[int](), StoredTensor.open
    monkeypatch.setattr(StoredTensor, "open", lambda stored: CountedFile(plain(stored), read))
    given = EngineConfig(**{**OPTIONS, "tp": 4})
    WeightReader(source, given, select((), "cpu"), "float32").read(LayerPlan())
    tables = 2 * 2 * config.vocab_size * config.hidden_size  # embedding and head once
    assert layer_bytes(source) <= sum(read) - tables <= 4 * 0.3 * layer_bytes(source)


class CountedBytes(np.ndarray):  # type: ignore[type-arg]
    taken = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        CountedBytes.taken += found.nbytes
        return found.view(np.ndarray)


@needs_kernels
def test_a_device_reads_its_blocks_of_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(TILED, vocab_size=3072, num_key_value_heads=4, intermediate_size=2048)
    files = opened(tmp_path, config).files
    assert files
    convert(files, tiny_texts(), "model", tmp_path / "m.gguf", "Q4_K_M")
    found = open_model(tmp_path / "m.gguf")
    assert found.gguf
    total = sum(stored.nbytes for stored in found.gguf.tensors.values() if stored.name.startswith("blk."))
    layers, read, plain, mapped = [0], list[int](), GgufTensor.read, GgufTensor.mapped

    def counted(stored: GgufTensor, start: int = 0, count: int | None = None) -> Any:
        found = plain(stored, start, count)
        read.append(found.nbytes * stored.name.startswith("blk."))
        return found

    monkeypatch.setattr(GgufTensor, "read", counted)
    monkeypatch.setattr(GgufTensor, "mapped", lambda *given: mapped(*given).view(CountedBytes))
    monkeypatch.setattr(gguf_load, "available_cores", lambda: 1)
    given = EngineConfig(**{**OPTIONS, "tp": 4, "packed_weights": "on"})
    reader = WeightReader(OpenedModel("m", found.config, found.generation, found), given, select((), "cpu"), "float32")
    for device in range(4):
        read.clear()
        CountedBytes.taken = 0
        alone = Split((torch.device("cpu"),), lambda name, shape, device=device: [  # type: ignore[misc]
            reader._split.parts(name, shape)[device]])
        parts, = found.load_packed([reader._forms[0]], alone)
        assert (EMBEDDING in parts) == (device == 0)
        assert CountedBytes.taken > total / 20, "columns were read otherwise"
        layers.append(sum(read) + CountedBytes.taken)
        assert 0.2 * total <= layers[-1] <= 0.3 * total


def test_a_gguf_file_that_became_shorter(tmp_path: Path) -> None:
    files = opened(tmp_path, replace(TILED, vocab_size=3072)).files
    assert files
    convert(files, tiny_texts(), "model", tmp_path / "m.gguf", "Q8_0")
    gguf = open_model(tmp_path / "m.gguf").gguf
    assert gguf
    stored = gguf.tensors["blk.0.ffn_down.weight"]
    assert np.array_equal(stored.mapped(34, 68), stored.read(34, 68))
    os.truncate(stored.path, stored.offset + stored.nbytes - 1)
    with pytest.raises(ModelError, match="ended while it was read"):
        stored.mapped(0, stored.nbytes)
    stored.path.unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        stored.mapped(0, 34)


LOADING = """
import json, resource, sys
import torch
from deltic.config import EngineConfig
from deltic.loader.model_files import open_model
from deltic.model.tensor_parallel import WeightSplitter, check_degree

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def read(path):
    files = open_model(path)
    parts = [{} for _ in range(4)]
    for device, name, tensor in files.parts("bfloat16", WeightSplitter(files.config, 4).over(["cpu"] * 4)):
        parts[device][name] = tensor
    return parts

read(sys.argv[2])
before = peak()
parts = read(sys.argv[1])
print(json.dumps([peak() - before, sum(tensor.nbytes for own in parts for tensor in own.values())]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory as Linux counts it")
def test_reading_needs_memory_for_the_model_and_one_tensor(tmp_path: Path) -> None:
    for folder, inner in (("large", 16384), ("small", 1024)):
        config = split_shape(hidden_size=512, intermediate_size=inner, num_hidden_layers=4, head_dim=64,
                             layer_types=("full_attention",) * 4, rope=RopeConfig(1e4, 16, (3, 3, 2)))
        (tmp_path / folder).mkdir()
        zeros = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in expected_tensors(config).items()}
        opened(tmp_path / folder, config, zeros)
    result = subprocess.run([sys.executable, "-c", LOADING, str(tmp_path / "large"), str(tmp_path / "small")],
                            capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    grown, size = json.loads(result.stdout)
    tensor = 2 * 16384 * 512
    assert size > 12 * tensor
    assert grown <= size + tensor + 12e6, (grown, size)


# Devices


def test_each_part_is_on_its_own_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineConfig, "devices", property(lambda options: ["cpu", "meta"]))
    config = split_shape(num_mtp_layers=1)
    tensors = {**random_weights(config, "bfloat16"), **random_head(config, "bfloat16")}
    random = OpenedModel("m", config, GenerationDefaults(), random=RandomModel(shape=config, head=True))
    options = EngineConfig(**{**OPTIONS, "tp": 2, "speculate": "mtp:2"})
    for source in (opened(tmp_path, config, tensors), random):
        reader = WeightReader(source, options, select((), "cpu"), "float32")
        found, head = reader.read(LayerPlan())[0], reader.read_head()
        assert head
        for index, device in enumerate(options.devices):
            kept = [weight for weight in (*found[index].values(), *head[index].values()) if isinstance(weight, Tensor)]
            assert len(kept) > 10 and {weight.device.type for weight in kept} == {device}


@pytest.mark.parametrize("device, first", [("cuda", 0), ("cuda:2", 2)])
def test_gpus_follow_the_first_one(device: str, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineConfig, "_device_rules", lambda options: ())  # until they permit several GPUs
    assert EngineConfig(device=device).devices == [device]
    options = EngineConfig(device=device, tp=4, dtype="bfloat16", quant="q8_0")
    config = QUANTIZED["hybrid"]
    source = OpenedModel("m", config, GenerationDefaults(), random=RandomModel(shape=config))
    reader = WeightReader(source, options, select((), "cpu"), "bfloat16")
    wanted = [torch.device("cuda", first + shard) for shard in range(4)]
    assert [form.device for form in reader._forms] == wanted == list(reader._split.devices)
    assert EngineConfig(device="cpu", tp=4).devices == ["cpu"] * 4


def freed(parts: Iterable[tuple[int, str, Tensor | Float8]]) -> int:
    """Counts tensors, each of which must be freed, with no other one in its memory, before the next one is read."""
    count = 0
    for _, name, weight in parts:
        tensor = weight.codes if isinstance(weight, Float8) else weight
        halves = 2 if isinstance(weight, Float8) and ".experts." in name else 1
        assert tensor.untyped_storage().nbytes() <= halves * tensor.nbytes, name
        alive = weakref.ref(tensor)
        del weight, tensor
        assert alive() is None, name
        count += 1
    return count


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("config", [split_shape(), EXPERTS], ids=["dense", "experts"])
def test_parts_can_be_freed_one_by_one(config: ModelConfig, tp: int, tmp_path: Path) -> None:
    """The memory of plain numbers is free again when their packed form is there."""
    split = WeightSplitter(config, tp).over(["meta"] * tp)
    least = len(expected_tensors(config))
    assert freed(split.cut(random_tensors(config, "bfloat16"))) >= least
    whole = ((name, torch.empty(shape, device="meta")) for name, shape in expected_tensors(config).items())
    if tp == 1:
        assert freed(split.cut(whole)) == least
    else:  # devices share norms here
        assert all(part.untyped_storage().nbytes() == part.nbytes for _, _, part in split.cut(whole))
    for form, tensors in (("plain", None), ("fused", fused(config))):
        (tmp_path / form).mkdir()
        files = opened(tmp_path / form, config, tensors).files
        assert files and freed(files.parts("bfloat16", split)) >= least
    stored = dict[str, Tensor]()
    for name, tensor in random_weights(config, "bfloat16").items():
        if tensor.dim() > 1 and ".mlp." in name:
            stored[name], stored[f"{name}_scale_inv"], _ = in_blocks(tensor, torch.float32)
        else:
            stored[name] = tensor
    (tmp_path / "float8").mkdir()
    files = opened(tmp_path / "float8", config, stored).files
    assert files and freed(files.parts("bfloat16", split, kept=KeptForms(float8=True))) >= least
    files = opened(tmp_path, replace(config, vocab_size=3072)).files
    assert files
    convert(files, tiny_texts(), "model", tmp_path / "m.gguf", "BF16")
    assert freed(open_model(tmp_path / "m.gguf").parts("bfloat16", split)) >= least


@pytest.mark.parametrize("tp", [1, 4])
def test_memory_goes_back_to_a_gpu_after_each_packed_matrix(tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """When no plain numbers are left, so that the next packed matrix cannot be placed in a part of their memory. All
    devices have ended their work then: torch waits for one of them before it unmaps pages."""
    config, alive, free = QUANTIZED["hybrid"], list[weakref.ref[Tensor]](), list[bool]()

    def seen(part: tuple[int, str, Tensor]) -> tuple[int, str, Tensor]:
        alive.append(weakref.ref(part[2]))
        return part

    waited = list[torch.device]()
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.append(alive[-1]() is None))
    tensors = random_weights(config, "bfloat16")
    split = WeightSplitter(config, tp).over(["cpu"] * tp)
    devices = [torch.device("cuda", index) for index in range(tp)]
    forms = [replace(tiles_form("cpu"), device=device) for device in devices]
    found = quantize_parts(map(seen, split.cut((name, tensors.pop(name)) for name in [*tensors])), FP8, config, forms)
    packed = sum(isinstance(weight, Tiles) and weight.type == FP8.upper() for own in found for weight in own.values())
    assert packed > 10 * tp and sum(free) >= packed and len(free) == len(alive)
    assert len(waited) == tp * len(free) and {*waited} == {*devices}
