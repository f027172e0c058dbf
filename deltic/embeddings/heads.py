"""What comes behind an encoder: layers over pooled vectors, BGE-M3's two other outputs, a classifier."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from deltic.config.reading import flag
from deltic.embeddings.bert_config import EncoderConfig
from deltic.embeddings.sentence_transformers import Recipe, refuse_other_names
from deltic.embeddings.types import Output
from deltic.embeddings.weights import WeightForm, WeightSource, classifier_names
from deltic.errors import ModelError, show
from deltic.loader.files import find_tensors, read_json
from deltic.loader.pickled import read_pickled
from deltic.loader.safetensors import read_stored
from deltic.ops.encoder import Affine
from deltic.ops.memory import Arena
from deltic.ops.quantized import pack_tensor

Activation = Callable[[Tensor], Tensor]

_ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "torch.nn.modules.linear.Identity": nn.Identity(), "torch.nn.modules.activation.Tanh": torch.tanh,
    "torch.nn.modules.activation.ReLU": torch.relu, "torch.nn.modules.activation.GELU": nn.functional.gelu,
    "torch.nn.modules.activation.Sigmoid": torch.sigmoid}
"""What names in files stand for; nothing that they name is imported."""


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """dense: layers over pooled vectors. sparse: a weight for each token. colbert: a vector for each. classifier: two
    layers over the first token's state. activation: of its score."""

    dense: tuple[tuple[Affine, Activation], ...] = ()
    sparse: Affine | None = None
    colbert: Affine | None = None
    classifier: tuple[Affine, Affine] | None = None
    activation: Activation = torch.sigmoid

    @property
    def outputs(self) -> frozenset[Output]:
        if self.classifier is not None:
            return frozenset({"score"})
        found: set[Output] = {"dense"}
        if self.sparse:
            found.add("sparse")
        if self.colbert:
            found.add("colbert")
        return frozenset(found)

    def dimension(self, pooled: int) -> int:
        """Numbers of a vector, of the pooled ones."""
        return len(self.dense[-1][0].bias) if self.dense else pooled


def read_heads(
    directory: Path,
    config: EncoderConfig,
    sources: Mapping[str, WeightSource],
    recipe: Recipe,
    form: WeightForm,
    *,
    mapping: Mapping[str, Any],
) -> Heads:
    """What the directory has. ModelError names the file that cannot be used."""
    if config.labels:
        return Heads(classifier=read_classifier(config, sources, form),
                     activation=_score_activation(directory, mapping))
    sparse, colbert = (_m3_layer(directory / f"{name}_linear.pt", config.hidden_size, form)
                       for name in ("sparse", "colbert"))
    layers, width = [], len(recipe.pooling) * config.hidden_size
    for place in recipe.dense:
        layers.append(_dense(place, width, form))
        width = len(layers[-1][0].bias)
    return Heads(tuple(layers), sparse, colbert)


def read_classifier(
    config: EncoderConfig, sources: Mapping[str, WeightSource], form: WeightForm
) -> tuple[Affine, Affine]:
    """The layers of a reranker."""
    dense, last = (_affine(sources[f"{name}.weight"].read(torch.float32), sources[f"{name}.bias"].read(torch.float32),
                           form) for name in classifier_names(config))
    return dense, last


def _affine(weight: Tensor, bias: Tensor, form: WeightForm) -> Affine:
    weight, bias = weight.float().contiguous(), bias.float().contiguous()
    if form.packed:
        return Affine(pack_tensor(weight, Arena()), bias)
    return Affine(weight.to(form.device), bias.to(form.device))


def _m3_layer(path: Path, hidden: int, form: WeightForm) -> Affine | None:
    """A layer of BGE-M3, which keeps them as pickles."""
    if not path.is_file():
        return None
    tensors = read_pickled(path)
    weight, bias = tensors.get("weight"), tensors.get("bias")
    if weight is None or bias is None or weight.dim() != 2 or weight.shape[1] != hidden or len(bias) != len(weight):
        raise ModelError(f"{path} must hold weight [rows, {hidden}] and bias [rows]; download it again")
    return _affine(weight, bias, form)


def _dense(place: Path, width: int, form: WeightForm) -> tuple[Affine, Activation]:
    config = read_json(place / "config.json")
    refuse_other_names(place / "config.json", config)
    if flag(config, "use_residual", False):
        raise ModelError(f"{place / 'config.json'}: use_residual true is not supported, only false")
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    if name not in _ACTIVATIONS:
        raise ModelError(f"{place / 'config.json'}: activation_function {show(name)} is not supported, only "
                         f"{', '.join(each.rpartition('.')[2] for each in _ACTIVATIONS)}")
    tensors = _tensors_of(place)
    weight = tensors.get("linear.weight")
    if weight is None or weight.dim() != 2 or weight.shape[1] != width:
        raise ModelError(f"{place} must hold linear.weight [rows, {width}]; download it again")
    bias = tensors.get("linear.bias")
    return _affine(weight, torch.zeros(len(weight)) if bias is None else bias, form), _ACTIVATIONS[name]


def _tensors_of(place: Path) -> dict[str, Tensor]:
    if any(place.glob("*.safetensors")):
        return {name: read_stored(name, stored, torch.float32, torch.device("cpu"))
                for name, stored in find_tensors(place).items()}
    return read_pickled(place / "pytorch_model.bin")


def _score_activation(directory: Path, mapping: Mapping[str, Any]) -> Activation:
    """Scores of one label go through a sigmoid, unless the model's files say otherwise."""
    nested = mapping.get("sentence_transformers")
    name = (nested or {}).get("activation_fn") if isinstance(nested, dict | None) else None
    path = directory / "config_sentence_transformers.json"
    name = name or mapping.get("sbert_ce_default_activation_function") or (
        read_json(path).get("activation_fn") if path.is_file() else None)
    if name is None:
        return torch.sigmoid
    if name not in _ACTIVATIONS:
        raise ModelError(f"{directory}: the activation {show(name)} of scores is not supported")
    return _ACTIVATIONS[name]
