"""An encoder on disk: what its files say, all but the weights read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from deltic.embeddings.bert_config import EncoderConfig
from deltic.embeddings.heads import Heads, read_heads
from deltic.embeddings.sentence_transformers import Recipe, read_recipe
from deltic.embeddings.tokenize import EncoderTokenizer
from deltic.embeddings.weights import WeightForm, WeightSource, find_sources
from deltic.errors import ModelError
from deltic.export.program import kind_of
from deltic.loader.files import read_json

HEADS: Final = "heads.safetensors"
"""The classifier of a compiled encoder, which its library does not have."""


@dataclass(frozen=True, slots=True)
class StoredEncoder:
    """sources: tensors by Hugging Face's names (`weights.expected_tensors`). heads: what comes behind, in a form.
    texts: its tokenizer, for items of so many tokens at most. compiled: the directory's library computes the states,
    and sources has the classifier's tensors alone."""

    place: Path
    config: EncoderConfig
    sources: Mapping[str, WeightSource]
    recipe: Recipe
    heads: Callable[[WeightForm], Heads]
    texts: Callable[[int], EncoderTokenizer]
    compiled: bool = False


def read_directory(directory: Path) -> StoredEncoder:
    """ModelError names the file, key or tensor that cannot be used."""
    path = directory / "config.json"
    mapping = read_json(path)
    try:
        config = EncoderConfig.from_hf(mapping)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    compiled = kind_of(directory) == "tvm"
    sources, recipe = find_sources(directory, config, not compiled), read_recipe(directory)
    heads = partial(read_heads, directory, config, sources, recipe, mapping=mapping)
    return StoredEncoder(directory, config, sources, recipe, heads, lambda longest: EncoderTokenizer.read(
        directory / "tokenizer.json", longest, recipe.lower), compiled)
