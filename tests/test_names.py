"""Other people's names mean the same wherever they come from, and names of nothing are refused there."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support import odd_shape

from deltic.cli import command_parser
from deltic.cli.parser import UsageError
from deltic.config import ARCHITECTURES, ModelConfig, architecture
from deltic.config.reading import FORMATS, GENERATIONS
from deltic.errors import ModelError
from deltic.export.program import hf_config, write_json
from deltic.export.tvm.artifact import CONFIG, Metadata, read_config, write_config
from deltic.loader.gguf.config import config_from_gguf
from deltic.loader.gguf.write import config_to_gguf

HYBRIDS = ("qwen35", "qwen3_5", "qwen3.5", "qwen36", "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration",
           "qwen3_5_text", "qwen3_8")


def of_config(name: str) -> str:
    return ModelConfig.from_hf({**hf_config(odd_shape()), "model_type": name}).architecture


def of_classes(name: str) -> str:
    mapping = {**hf_config(odd_shape()), "architectures": [name]}
    return ModelConfig.from_hf({key: value for key, value in mapping.items() if key != "model_type"}).architecture


def of_compiled(name: str, folder: Path) -> str:
    """What a compiled directory's config says."""
    shape = odd_shape()
    metadata = Metadata("v2", "qwen3_5", "q0f32", (), 64, 64, shape.vocab_size, "x86_64")
    write_json(folder / "config.json", hf_config(shape))
    write_config(folder, metadata, shape, hf_config(shape))
    write_json(folder / CONFIG, {**json.loads((folder / CONFIG).read_text()), "model_type": name})
    return read_config(folder)[0].architecture


def of_library(name: str) -> str:
    """What a compiled library says of itself."""
    metadata = Metadata("v2", "qwen3_5", "q0f32", (("w", (2, 3), "float32"),), 64, 64, 10, "x86_64")
    return Metadata.from_mapping({**json.loads(metadata.to_json()), "model_type": name}).architecture


def of_gguf(name: str) -> str:
    """What the metadata of a GGUF file says, under whose name its keys stand."""
    metadata = {key.replace("qwen35.", f"{name}."): np.array(value) if key.endswith("sections") else value
                for key, value in config_to_gguf(odd_shape()).items()}
    table = SimpleNamespace(shape=(509, 40), type=SimpleNamespace(name="F32"))
    file = SimpleNamespace(metadata={**metadata, "general.architecture": name}, paths=[Path("model.gguf")],
                           tensors={"token_embd.weight": table})
    return config_from_gguf(file).architecture  # type: ignore[arg-type]


SITES = [architecture, of_config, of_classes, of_gguf, of_library]


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("site", SITES, ids=lambda site: site.__name__)
def test_architectures(site: Callable[[str], str], name: str) -> None:
    assert site(name) == "qwen3_5" == ARCHITECTURES["qwen35"]


@pytest.mark.parametrize("name", HYBRIDS)
def test_architectures_of_compiled_directories(name: str, tmp_path: Path) -> None:
    assert of_compiled(name, tmp_path) == "qwen3_5"


@pytest.mark.parametrize("site", SITES, ids=lambda site: site.__name__)
def test_unknown_architectures(site: Callable[[str], str]) -> None:
    with pytest.raises(ModelError, match="gemma"):
        site("gemma3")


@pytest.mark.parametrize(("name", "meant"), [*FORMATS.items(), ("torch.bfloat16", "bfloat16"), ("BF16", "bfloat16")])
def test_formats_of_configs(name: str, meant: str) -> None:
    mapping = {**hf_config(odd_shape()), "dtype": name}
    assert ModelConfig.from_hf(mapping) == replace(odd_shape(), dtype=meant)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "meant"), [("q0f32", "float32"), ("q0f16", "float16"), ("fp16", "float16")])
def test_formats_of_compiled_weights(name: str, meant: str) -> None:
    metadata = Metadata("v1", "qwen3", name, (), 64, 64, 10, "x86_64")
    assert Metadata.from_mapping(metadata.mapping()).quantization == meant
    with pytest.raises(ModelError, match="quantization 'q5f16_7' is not known"):
        Metadata.from_mapping({**metadata.mapping(), "quantization": "q5f16_7"})


def arguments(*words: str) -> argparse.Namespace:
    return command_parser("compile").parse_mixed(["tiny", "-o", "out", *words])


@pytest.mark.parametrize(("name", "meant"), [("half", "float16"), ("F32", "float32"), ("fp16", "float16")])
def test_formats_of_the_command_line(name: str, meant: str) -> None:
    assert arguments("--dtype", name).dtype == meant
    with pytest.raises(UsageError, match="float32 or float16"):
        arguments("--dtype", "bf16")


@pytest.mark.parametrize(("name", "meant"), [*GENERATIONS.items(), ("V1", "v1")])
def test_generations(name: str, meant: str) -> None:
    assert arguments("--generation", name).generation == meant
    with pytest.raises(UsageError, match="generation 'v3' is not known"):
        arguments("--generation", "v3")
