"""Reads an encoder's directory: config, tokenizer, and the layers after the encoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from deltic.config.reading import flag
from deltic.embeddings.sentence_transformers import Recipe, check_module_names, read_recipe
from deltic.embeddings.tokenize import EncoderTokenizer
from deltic.embeddings.types import Output
from deltic.embeddings.weights import EncoderConfig, WeightSource, classifier_names, find_sources
from deltic.errors import ModelError, show
from deltic.export.program import kind_of
from deltic.loader.disk import read_json
from deltic.loader.files import find_tensors, read_pickled
from deltic.loader.safetensors import read_stored
from deltic.ops.encoder import Affine, EncoderBackend
from deltic.ops.memory import Arena
from deltic.ops.quantized import pack_tensor

HEADS: Final = "heads.safetensors"
"""The classifier of a compiled encoder."""


@dataclass(frozen=True, slots=True)
class StoredEncoder:
    place: Path
    config: EncoderConfig
    sources: Mapping[str, WeightSource]
    """Tensors by Hugging Face's names (`weights.expected_tensors`)."""
    recipe: Recipe
    heads: Callable[[EncoderBackend], Heads]
    """Reads the layers after the encoder."""
    texts: Callable[[int], EncoderTokenizer]
    """Reads the tokenizer. Its argument is the maximum number of tokens of an item."""
    compiled: bool = False
    """True if the states come from a compiled library; `sources` then contains only the classifier."""


def read_directory(directory: Path) -> StoredEncoder:
    """Reads an encoder's directory. Raises ModelError naming the file, key or tensor that cannot be used."""
    path = directory / "config.json"
    hf_config = read_json(path)
    try:
        config = EncoderConfig.from_hf(hf_config)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    compiled = kind_of(directory) == "tvm"
    sources = find_sources(directory, config, classifier_only=compiled)
    recipe = read_recipe(directory)
    heads = partial(read_heads, directory, config, sources, recipe, hf_config=hf_config)

    def texts(max_length: int) -> EncoderTokenizer:
        return EncoderTokenizer.read(directory / "tokenizer.json", max_length, recipe.lower)

    return StoredEncoder(directory, config, sources, recipe, heads, texts, compiled)


# Heads: dense layers, BGE-M3's sparse and ColBERT outputs, a classifier


Activation = Callable[[Tensor], Tensor]

_ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "torch.nn.modules.linear.Identity": nn.Identity(), "torch.nn.modules.activation.Tanh": torch.tanh,
    "torch.nn.modules.activation.ReLU": torch.relu, "torch.nn.modules.activation.GELU": nn.functional.gelu,
    "torch.nn.modules.activation.Sigmoid": torch.sigmoid}
"""Activations by their names in files. The names are only looked up here, nothing is imported by name."""


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    dense: tuple[tuple[Affine, Activation], ...] = ()
    """Layers after the pooling."""
    sparse: Affine | None = None
    colbert: Affine | None = None
    classifier: tuple[Affine, Affine] | None = None
    """Two layers over the first token's state."""
    activation: Activation = torch.sigmoid
    """Activation of the classifier's score."""

    @property
    def outputs(self) -> frozenset[Output]:
        if self.classifier is not None:
            return frozenset({"score"})
        outputs: dict[Output, bool] = {
            "dense": True, "sparse": self.sparse is not None, "colbert": self.colbert is not None}
        return frozenset(output for output, there in outputs.items() if there)

    def dimension(self, pooled: int) -> int:
        """Returns the size of a vector. pooled: its size before the dense layers."""
        return len(self.dense[-1][0].bias) if self.dense else pooled


def read_heads(directory: Path, config: EncoderConfig, sources: Mapping[str, WeightSource], recipe: Recipe,
               backend: EncoderBackend, *, hf_config: Mapping[str, Any]) -> Heads:
    """Reads a directory's heads. Raises ModelError naming the file that cannot be used."""
    if config.labels:
        return Heads(classifier=read_classifier(config, sources, backend),
                     activation=_score_activation(directory, hf_config))
    layers, width = [], len(recipe.pooling) * config.hidden_size
    for folder in recipe.dense:
        layers.append(_dense(folder, width, backend))
        width = len(layers[-1][0].bias)
    sparse = _m3_layer(directory / "sparse_linear.pt", config.hidden_size, backend)
    colbert = _m3_layer(directory / "colbert_linear.pt", config.hidden_size, backend)
    return Heads(tuple(layers), sparse, colbert)


def read_classifier(config: EncoderConfig, sources: Mapping[str, WeightSource], backend: EncoderBackend
                    ) -> tuple[Affine, Affine]:
    def read(name: str) -> Affine:
        weight, bias = (sources[f"{name}.{part}"].read(torch.float32) for part in ("weight", "bias"))
        return _affine(weight, bias, backend)

    dense, last = classifier_names(config)
    return read(dense), read(last)


def _affine(weight: Tensor, bias: Tensor, backend: EncoderBackend) -> Affine:
    weight, bias = weight.float().contiguous(), bias.float().contiguous()
    if backend.packs:
        return Affine(pack_tensor(weight, Arena()), bias)
    return Affine(weight.to(backend.device), bias.to(backend.device))


def _m3_layer(path: Path, hidden: int, backend: EncoderBackend) -> Affine | None:
    """Reads a layer of BGE-M3, stored as a pickle."""
    if not path.is_file():
        return None
    tensors = read_pickled(path)
    weight, bias = tensors.get("weight"), tensors.get("bias")
    if weight is None or bias is None or weight.dim() != 2 or weight.shape[1] != hidden or len(bias) != len(weight):
        raise ModelError(f"{path} must hold weight [rows, {hidden}] and bias [rows]; download it again")
    return _affine(weight, bias, backend)


def _dense(folder: Path, width: int, backend: EncoderBackend) -> tuple[Affine, Activation]:
    path = folder / "config.json"
    config = read_json(path)
    check_module_names(path, config)
    if flag(config, "use_residual", False):
        raise ModelError(f"{path}: use_residual true is not supported, only false")
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    if name not in _ACTIVATIONS:
        raise ModelError(f"{path}: activation_function {show(name)} is not supported, only "
                         f"{', '.join(each.rpartition('.')[2] for each in _ACTIVATIONS)}")
    tensors = _all_tensors(folder)
    weight = tensors.get("linear.weight")
    if weight is None or weight.dim() != 2 or weight.shape[1] != width:
        raise ModelError(f"{folder} must hold linear.weight [rows, {width}]; download it again")
    bias = tensors.get("linear.bias")
    return _affine(weight, torch.zeros(len(weight)) if bias is None else bias, backend), _ACTIVATIONS[name]


def _all_tensors(folder: Path) -> dict[str, Tensor]:
    if not any(folder.glob("*.safetensors")):
        return read_pickled(folder / "pytorch_model.bin")
    return {name: read_stored(name, stored, torch.float32, torch.device("cpu"))
            for name, stored in find_tensors(folder).items()}


def _score_activation(directory: Path, hf_config: Mapping[str, Any]) -> Activation:
    """Returns the activation that the model's files name, by default a sigmoid."""
    nested, path = hf_config.get("sentence_transformers"), directory / "config_sentence_transformers.json"
    name = nested.get("activation_fn") if isinstance(nested, dict) else None
    name = name or hf_config.get("sbert_ce_default_activation_function")
    if not name and path.is_file():
        name = read_json(path).get("activation_fn")
    if name is None:
        return torch.sigmoid
    if name not in _ACTIVATIONS:
        raise ModelError(f"{directory}: the activation {show(name)} of scores is not supported")
    return _ACTIVATIONS[name]
