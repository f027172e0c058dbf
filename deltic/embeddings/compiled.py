"""Compiles encoders of the BERT family with TVM, and runs compiled encoders."""

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
from torch import Tensor

from deltic.embeddings.directory import HEADS, StoredEncoder
from deltic.embeddings.weights import EncoderConfig, classifier_names
from deltic.errors import ModelError
from deltic.export.program import load_json, require_extra, write_json
from deltic.export.tvm.artifact import (
    CONFIG,
    VERSION,
    Metadata,
    Spec,
    as_stored,
    check_architecture,
    quantization_name,
    read_metadata,
    write_parameters,
)
from deltic.export.tvm.compiler import Compiled, StoredType, build_library, parse_target
from deltic.export.tvm.runtime import CompiledLibrary
from deltic.ops.encoder import Ragged

_FILES: Final = ("config.json", "tokenizer.json", "tokenizer_config.json", "modules.json",
                 "config_sentence_transformers.json", "sentence_*_config.json", "sparse_linear.pt", "colbert_linear.pt")
"""Files of a model's directory that define its architecture, tokenizer and pooling."""


class CompiledEncoder:
    """Runs a compiled encoder. Raises ModelError like `CompiledLibrary`, and for a language model."""

    def __init__(self, folder: Path, config: EncoderConfig, threads: int) -> None:
        metadata, _ = read_metadata(folder)
        check_architecture(folder, metadata, config.family)
        if metadata.context_window_size != config.max_length:
            raise ModelError(f"{folder}: config.json has {config.max_length} positions, the library "
                             f"{metadata.context_window_size}: they are not of one model")
        self._library = CompiledLibrary(folder, metadata, config.vocab_size, threads)
        self._hidden = self._library.function("hidden")

    def hidden(self, batch: Ragged) -> Tensor:
        """Returns the last layer's states of all tokens [T, H] float32."""
        starts = batch.starts.numpy()
        lengths = np.diff(starts)
        columns = (batch.ids.numpy(), batch.places.numpy(), batch.kinds.numpy(),
                   np.repeat(starts[:-1], lengths), np.repeat(starts[1:], lengths))
        self._library.set_threads()
        device = self._library.device
        states = self._hidden(*(device.integers(column) for column in columns), self._library.parameters)
        return torch.from_numpy(device.numpy(states).copy())


def compile_encoder(stored: StoredEncoder, folder: Path, *, dtype: StoredType = "float32", target: str = "llvm"
                    ) -> Compiled:
    """Compiles an encoder into an existing directory. dtype: dtype of the matrices and the word table."""
    require_extra("tvm")
    from deltic.export.tvm.network import EncoderNetwork, encoder_specification

    compile_target, config = parse_target(target), stored.config
    stored.texts(min(stored.recipe.max_length or config.max_length, config.max_length))  # fails without a tokenizer
    _copy_files(stored, folder)
    metadata = Metadata("v2", config.family, quantization_name(dtype), (), config.max_length, config.max_length,
                        config.vocab_size, compile_target.machine)
    library, metadata = build_library(
        lambda: EncoderNetwork(config, dtype), encoder_specification, metadata, compile_target, folder)
    size = write_parameters(folder, "v2", _parameters(stored, metadata.parameters))
    _write_config(folder, metadata, stored)
    return Compiled(library, size)


def encoder_bytes(stored: StoredEncoder, dtype: StoredType) -> int:
    """Returns a lower bound for the parameters' size in bytes on disk."""
    count = sum(int(np.prod(source.shape)) for source in stored.sources.values())
    return count * (2 if dtype == "float16" else 4)


def encoder_files(folder: Path) -> list[Path]:
    """Returns the files that `compile_encoder` may have copied to a directory."""
    modules = [path.parent for path in folder.glob("[0-9]_*/config.json")]
    return [*(path for name in (*_FILES, HEADS) for path in folder.glob(name)), *modules]


def _copy_files(stored: StoredEncoder, folder: Path) -> None:
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
    if stored.config.labels:
        names = [f"{layer}.{part}" for layer in classifier_names(stored.config) for part in ("weight", "bias")]
        save_file({name: stored.sources[name].read(torch.float32).contiguous() for name in names}, folder / HEADS)


def _write_config(folder: Path, metadata: Metadata, stored: StoredEncoder) -> None:
    """Writes `CONFIG`, with the pooling under mlc-llm's names."""
    recipe = stored.recipe
    write_json(folder / CONFIG, {
        "version": VERSION, **metadata.mapping(), "model_config": load_json(folder / "config.json"),
        "model_task": "embedding", "tokenizer_files": sorted(path.name for path in folder.glob("tokenizer*")),
        "embedding_metadata": {"model_type": "encoder", "pooling_strategy": "+".join(recipe.pooling),
                               "normalize": recipe.normalize}})


def _parameters(stored: StoredEncoder, specs: tuple[Spec, ...]) -> Iterator[tuple[str, NDArray[Any]]]:
    for spec in specs:
        parts = [stored.sources[source].read(torch.float32) for source in _sources(spec[0])]
        yield as_stored(spec, torch.cat(parts).numpy())


_TOP: Final = {"words": "word_embeddings.weight", "places": "position_embeddings.weight",
               "kinds": "token_type_embeddings.weight", "norm.scale": "LayerNorm.weight",
               "norm.shift": "LayerNorm.bias"}
_LAYER: Final = {"qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
                 "out": ("attention.output.dense",), "up": ("intermediate.dense",), "down": ("output.dense",),
                 "attention_norm": ("attention.output.LayerNorm",), "output_norm": ("output.LayerNorm",)}
_ENDS: Final = {".weight": "weight", "_bias": "bias", ".scale": "weight", ".shift": "bias"}


def _sources(name: str) -> list[str]:
    """Returns Hugging Face's names of the tensors that make up a parameter."""
    if name in _TOP:
        return [f"embeddings.{_TOP[name]}"]
    _, number, rest = name.split(".", 2)
    end = next(end for end in _ENDS if rest.endswith(end))
    return [f"encoder.layer.{number}.{part}.{_ENDS[end]}" for part in _LAYER[rest.removesuffix(end)]]
