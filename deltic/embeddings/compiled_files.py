"""Writes the files of a compiled encoder's directory: all but the library."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from deltic.embeddings.directory import HEADS, StoredEncoder
from deltic.embeddings.weights import classifier_names
from deltic.errors import ModelError
from deltic.export.sidecar import load_json, write_json
from deltic.export.tvm.metadata import CONFIG, VERSION, Metadata
from deltic.export.tvm.panels import panels

_FILES: Final = ("config.json", "tokenizer.json", "tokenizer_config.json", "modules.json",
                 "config_sentence_transformers.json", "sentence_*_config.json", "sparse_linear.pt", "colbert_linear.pt")
"""Files of a model's directory that define its architecture, tokenizer and pooling."""


def write_encoder_files(stored: StoredEncoder, folder: Path) -> None:
    """Copy the tokenizer and pooling files; ModelError if the model is a GGUF file or is compiled already."""
    place = stored.place
    if stored.compiled or not place.is_dir():
        kind = "is compiled already" if stored.compiled else "is a GGUF file"
        raise ModelError(f"{place} {kind}: compile the original model's directory")
    for name in _FILES:
        for path in place.glob(name):
            shutil.copyfile(path, folder / path.name)
    if (place / "modules.json").is_file():
        for module in json.loads((place / "modules.json").read_text(encoding="utf-8")):
            if module["path"] and (place / module["path"]).is_dir():
                shutil.copytree(place / module["path"], folder / module["path"], dirs_exist_ok=True)
    names = classifier_names(stored.config) if stored.config.labels else ()
    tensors = {name: stored.sources[name].read(torch.float32).contiguous()
               for layer in names for name in (f"{layer}.weight", f"{layer}.bias")}
    if tensors:
        save_file(tensors, folder / HEADS)


def encoder_files(folder: Path) -> list[Path]:
    """What `write_encoder_files` may have left in a directory."""
    modules = [path.parent for path in folder.glob("[0-9]_*/config.json")]
    return [*(path for name in (*_FILES, HEADS) for path in folder.glob(name)), *modules]


def write_encoder_config(folder: Path, metadata: Metadata, stored: StoredEncoder) -> None:
    """Write `CONFIG`, with the pooling under the names that mlc-llm has for it."""
    recipe = stored.recipe
    write_json(folder / CONFIG, {
        "version": VERSION, **metadata.plain(), "model_config": load_json(folder / "config.json"),
        "model_task": "embedding", "tokenizer_files": sorted(path.name for path in folder.glob("tokenizer*")),
        "embedding_metadata": {"model_type": "encoder", "pooling_strategy": "+".join(recipe.pooling),
                               "normalize": recipe.normalize}})


def encoder_parameters(stored: StoredEncoder, wanted: tuple[tuple[str, tuple[int, ...], str], ...]
                       ) -> Iterator[tuple[str, NDArray[Any]]]:
    """The library's parameters, made of the model's tensors, one at a time."""
    for name, shape, dtype in wanted:
        parts = [stored.sources[source].read(torch.float32) for source in _sources(name)]
        array = torch.cat(parts).numpy()
        array = panels(array) if len(shape) == 3 else array
        assert array.shape == shape, f"{name} is {array.shape} instead of {shape}"
        yield name, np.ascontiguousarray(array.astype(dtype))


_TOP: Final = {"words": "word_embeddings.weight", "places": "position_embeddings.weight",
               "kinds": "token_type_embeddings.weight", "norm.scale": "LayerNorm.weight",
               "norm.shift": "LayerNorm.bias"}
_LAYER: Final = {"qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
                 "out": ("attention.output.dense",), "up": ("intermediate.dense",), "down": ("output.dense",),
                 "attention_norm": ("attention.output.LayerNorm",), "output_norm": ("output.LayerNorm",)}
_ENDS: Final = {".weight": "weight", "_bias": "bias", ".scale": "weight", ".shift": "bias"}


def _sources(name: str) -> list[str]:
    """The tensors, by Hugging Face's names, that a parameter of the network consists of."""
    if name in _TOP:
        return [f"embeddings.{_TOP[name]}"]
    _, number, rest = name.split(".", 2)
    end = next(end for end in _ENDS if rest.endswith(end))
    return [f"encoder.layer.{number}.{part}.{_ENDS[end]}" for part in _LAYER[rest.removesuffix(end)]]
