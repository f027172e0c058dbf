"""Reads everything about an encoder's directory except its weights."""

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
from deltic.embeddings.weights import WeightSource, find_sources
from deltic.errors import ModelError
from deltic.export.program import kind_of
from deltic.loader.files import read_json
from deltic.ops.encoder import EncoderBackend

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
    """Reads the tokenizer, for items of up to so many tokens."""
    compiled: bool = False
    """The states come from a compiled library, and sources holds the classifier alone."""


def read_directory(directory: Path) -> StoredEncoder:
    """Raises ModelError naming the file, key or tensor that cannot be used."""
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
