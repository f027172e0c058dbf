"""Encoders in GGUF files, as llama.cpp's converter writes them (conversion/bert.py; src/models/bert.cpp reads them),
and what else such a file says of how vectors are made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Final

import torch
from torch import Tensor

from deltic.config.reading import integer, number
from deltic.embeddings.bert_config import EncoderConfig
from deltic.embeddings.directory import StoredEncoder
from deltic.embeddings.heads import Heads, read_classifier
from deltic.embeddings.sentence_transformers import POOLINGS, Recipe
from deltic.embeddings.tokenize import EncoderTokenizer, backend_of
from deltic.embeddings.weights import WeightForm, WeightSource, classifier_names, expected_tensors
from deltic.errors import ModelError, show
from deltic.loader.gguf.blocks import fill
from deltic.loader.gguf.file import GgufFile
from deltic.loader.gguf.reader import GgufTensor
from deltic.loader.gguf.tokenizer import tokenizer_from_gguf
from deltic.ops.quantized import PackedForm as PackedForm
from deltic.ops.quantized import QTensor

ARCHITECTURE: Final = "bert"
POOLING_TYPES: Final[Mapping[int, str]] = {0: "mean", 1: "mean", 2: "cls", 3: "lasttoken", 4: "cls"}
"""What llama.cpp's numbers stand for. 0: states of all tokens; 4: a reranker."""
RANK: Final = 4
RECIPE: Final = "deltic.recipe"
"""A key of our own: what sentence-transformers' files said, as JSON, where the format has no word for it."""
_TOP: Final[Mapping[str, str]] = {
    "token_embd": "embeddings.word_embeddings", "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings", "token_embd_norm": "embeddings.LayerNorm"}
_BLOCK: Final[Mapping[str, str]] = {
    "attn_q": "attention.self.query", "attn_k": "attention.self.key", "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense", "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense", "ffn_down": "output.dense", "layer_output_norm": "output.LayerNorm"}
_KEYS: Final[Mapping[str, str]] = {
    "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length", "layers": "block_count",
    "heads": "attention.head_count"}
_MOST: Final = 1 << 20


def is_bert(file: GgufFile) -> bool:
    """Whether it holds an encoder of the BERT family."""
    return file.metadata.get("general.architecture") == ARCHITECTURE


def gives_vectors(file: GgufFile) -> bool:
    """Whether its model is for vectors or scores: an encoder, or a decoder that says how its states are pooled."""
    return is_bert(file) or f"{file.metadata.get('general.architecture')}.pooling_type" in file.metadata


def gguf_names(config: EncoderConfig) -> dict[str, str]:
    """The names in a file of the tensors of `expected_tensors`, by Hugging Face's."""
    theirs = {ours: name for name, ours in _TOP.items()}
    for layer in range(config.layers):
        theirs |= {f"encoder.layer.{layer}.{ours}": f"blk.{layer}.{name}" for name, ours in _BLOCK.items()}
    if config.labels:
        theirs |= dict(zip(classifier_names(config), ("cls", "cls.output"), strict=True))
    return {name: f"{theirs[module]}.{part}" for name in expected_tensors(config)
            for module, _, part in [name.rpartition(".")]}


def read_gguf(file: GgufFile) -> StoredEncoder:
    """ModelError names the file, and the key or tensor that cannot be used."""
    path = file.paths[0]
    try:
        config = _config(file)
        sources, recipe = _sources(file, config), read_gguf_recipe(file)
        tokenizer = tokenizer_from_gguf(file.metadata).tokenizer
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    return StoredEncoder(path, config, sources, recipe, partial(_heads, config, sources),
                         lambda longest: EncoderTokenizer(backend_of(tokenizer, path), longest, recipe.lower))


def read_gguf_recipe(file: GgufFile) -> Recipe:
    """How vectors are made. Without our key they are pooled as the file says, and of length 1."""
    architecture, told = file.metadata.get("general.architecture"), file.metadata.get(RECIPE)
    if told is not None:
        return _told(told)
    key = f"{architecture}.pooling_type"
    pooling = integer({key: 0, **file.metadata}, key, 0, max(POOLING_TYPES))
    return Recipe((POOLING_TYPES[pooling],))


def recipe_keys(recipe: Recipe) -> dict[str, str]:
    """What `read_gguf_recipe` reads of our key."""
    return {RECIPE: json.dumps({key: value for key, value in asdict(recipe).items() if key != "dense"})}


def _told(told: object) -> Recipe:
    try:
        found = json.loads(str(told))
        recipe = replace(Recipe(), **{**found, "pooling": tuple(found["pooling"])})
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{RECIPE} cannot be used ({error}): convert the model again") from error
    fine = {"normalize": bool, "with_prompt": bool, "lower": bool, "max_length": int | None, "default": str | None,
            "prompts": dict}
    if not recipe.pooling or not set(recipe.pooling) <= set(POOLINGS) or not all(
            isinstance(getattr(recipe, key), kind) for key, kind in fine.items()):
        raise ModelError(f"{RECIPE} cannot be used ({show(told)}): convert the model again")
    return recipe


def _config(file: GgufFile) -> EncoderConfig:
    metadata, tensors = file.metadata, file.tensors
    sizes = {ours: integer(metadata, f"{ARCHITECTURE}.{key}", 1, _MOST) for ours, key in _KEYS.items()}
    if metadata.get(f"{ARCHITECTURE}.attention.causal") not in (None, False):
        raise ModelError(f"{ARCHITECTURE}.attention.causal is true; encoders see all of a text")
    rows = {name: _rows(tensors, f"{name}.weight") for name in ("token_embd", "position_embd", "token_types")}
    family = "bert" if metadata.get("tokenizer.ggml.model") == "bert" else "roberta"
    ranks = "cls.output.weight" in tensors
    if ranks and "cls.weight" not in tensors:
        raise ModelError("tensor 'cls.weight' is missing, the first of a reranker's two last layers, which some "
                         "converters leave out: convert the original model with deltic convert")
    return EncoderConfig(
        family, rows["token_embd"], **sizes, places=rows["position_embd"], first_place=0, kinds=rows["token_types"],
        eps=number(metadata, f"{ARCHITECTURE}.attention.layer_norm_epsilon", 0, 1),
        labels=_rows(tensors, "cls.output.weight") if ranks else 0)


def _rows(tensors: Mapping[str, GgufTensor], name: str) -> int:
    stored = tensors.get(name)
    if stored is None:
        raise ModelError(f"tensor {name!r} is missing; is this a complete encoder?")
    return stored.shape[0]


def _sources(file: GgufFile, config: EncoderConfig) -> dict[str, WeightSource]:
    names = {theirs: ours for ours, theirs in gguf_names(config).items()}
    expected, found = expected_tensors(config), dict[str, WeightSource]()
    for stored in file.tensors.values():
        ours = names.get(stored.name)
        if ours is None:
            raise ModelError(f"tensor {stored.name!r} has no place in an encoder of {config.layers} layers")
        if stored.shape != expected[ours]:
            raise ModelError(f"tensor {stored.name!r} has shape {list(stored.shape)}, the metadata asks for "
                             f"{list(expected[ours])}")
        if not stored.type.readable:
            raise ModelError(f"tensor {stored.name!r} is of type {stored.type.name}, which is not supported; choose "
                             "another quantization, such as Q8_0")
        blocks = stored.type.weights > 1 and len(stored.shape) == 2
        found[ours] = WeightSource(stored.shape, partial(_plain, stored), partial(_pack, stored) if blocks else None)
    missing = [theirs for theirs, ours in names.items() if ours not in found]
    if missing:
        raise ModelError(f"{len(missing)} tensors are missing, such as {missing[0]!r}; download the file again")
    return found


def _plain(stored: GgufTensor, dtype: torch.dtype) -> Tensor:
    tensor = torch.empty(stored.shape, dtype=dtype)
    fill(tensor, stored.type, stored.read)
    return tensor


def _pack(stored: GgufTensor, form: PackedForm) -> QTensor:
    rows, columns = stored.shape
    return form.pack(stored.type.name, stored.type.id, rows, columns, stored.type.size(columns), stored.read)


def _heads(config: EncoderConfig, sources: Mapping[str, WeightSource], form: WeightForm) -> Heads:
    return Heads(classifier=read_classifier(config, sources, form)) if config.labels else Heads()
