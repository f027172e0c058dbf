"""Reads encoders from GGUF files, and how vectors are made from any GGUF file.

The names are those of llama.cpp's converter (conversion/bert.py) and loader (src/models/bert.cpp).
"""

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
from deltic.embeddings.weights import WeightSource, classifier_names, expected_tensors
from deltic.errors import ModelError, show
from deltic.loader.gguf.blocks import fill
from deltic.loader.gguf.file import GgufFile
from deltic.loader.gguf.reader import GgufTensor
from deltic.loader.gguf.tokenizer import tokenizer_from_gguf
from deltic.ops.encoder import EncoderBackend
from deltic.ops.quantized import PackedForm, QTensor

ARCHITECTURE: Final = "bert"
POOLING_TYPES: Final[Mapping[int, str]] = {0: "mean", 1: "mean", 2: "cls", 3: "lasttoken", 4: "cls"}
"""Poolings by llama.cpp's numbers. 0: unspecified; 4: a reranker."""
RANK: Final = 4
RECIPE: Final = "deltic.recipe"
"""deltic's own key: what the files of sentence-transformers state, as JSON, where the format has no key for it."""
_RECIPE_TYPES: Final = {"normalize": bool, "with_prompt": bool, "lower": bool, "max_length": int | None,
                        "default": str | None, "prompts": dict}
_TOP: Final[Mapping[str, str]] = {
    "token_embd": "embeddings.word_embeddings", "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings", "token_embd_norm": "embeddings.LayerNorm"}
_BLOCK: Final[Mapping[str, str]] = {
    "attn_q": "attention.self.query", "attn_k": "attention.self.key", "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense", "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense", "ffn_down": "output.dense", "layer_output_norm": "output.LayerNorm"}
_MAX_SIZE: Final = 1 << 20


def is_bert(file: GgufFile) -> bool:
    """Returns whether a file holds an encoder of the BERT family."""
    return file.metadata.get("general.architecture") == ARCHITECTURE


def gives_vectors(file: GgufFile) -> bool:
    """Returns whether a file holds an encoder, or a decoder with a pooling type."""
    return is_bert(file) or f"{file.metadata.get('general.architecture')}.pooling_type" in file.metadata


def gguf_names(config: EncoderConfig) -> dict[str, str]:
    """Returns the GGUF names of `expected_tensors`, by Hugging Face's."""
    modules = {hf_name: name for name, hf_name in _TOP.items()}
    for layer in range(config.layers):
        modules |= {f"encoder.layer.{layer}.{hf_name}": f"blk.{layer}.{name}" for name, hf_name in _BLOCK.items()}
    if config.labels:
        modules |= dict(zip(classifier_names(config), ("cls", "cls.output"), strict=True))
    names = {}
    for name in expected_tensors(config):
        module, _, part = name.rpartition(".")
        names[name] = f"{modules[module]}.{part}"
    return names


def read_gguf(file: GgufFile) -> StoredEncoder:
    """Reads everything except the weights. Raises ModelError naming the file, and the key or tensor."""
    path = file.paths[0]
    try:
        config, recipe = _config(file), read_gguf_recipe(file)
        sources = _sources(file, config)
        tokenizer = tokenizer_from_gguf(file.metadata).tokenizer
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error

    def heads(backend: EncoderBackend) -> Heads:
        return Heads(classifier=read_classifier(config, sources, backend) if config.labels else None)

    def texts(max_length: int) -> EncoderTokenizer:
        return EncoderTokenizer(backend_of(tokenizer, path), max_length, recipe.lower)

    return StoredEncoder(path, config, sources, recipe, heads, texts)


def read_gguf_recipe(file: GgufFile) -> Recipe:
    """Returns how vectors are made. Without deltic's key they are pooled as the file says, and normalised."""
    stored = file.metadata.get(RECIPE)
    if stored is not None:
        return _parse_recipe(stored)
    key = f"{file.metadata.get('general.architecture')}.pooling_type"
    pooling = integer({key: 0, **file.metadata}, key, 0, max(POOLING_TYPES))
    return Recipe((POOLING_TYPES[pooling],))


def recipe_keys(recipe: Recipe) -> dict[str, str]:
    """Returns the metadata that `read_gguf_recipe` reads."""
    return {RECIPE: json.dumps({key: value for key, value in asdict(recipe).items() if key != "dense"})}


def _parse_recipe(stored: object) -> Recipe:
    try:
        found = json.loads(str(stored))
        recipe = replace(Recipe(), **{**found, "pooling": tuple(found["pooling"])})
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{RECIPE} cannot be used ({error}): convert the model again") from error
    valid = recipe.pooling and set(recipe.pooling) <= set(POOLINGS)
    if not valid or not all(isinstance(getattr(recipe, key), kind) for key, kind in _RECIPE_TYPES.items()):
        raise ModelError(f"{RECIPE} cannot be used ({show(stored)}): convert the model again")
    return recipe


def _config(file: GgufFile) -> EncoderConfig:
    metadata, tensors = file.metadata, file.tensors

    def size(key: str) -> int:
        return integer(metadata, f"{ARCHITECTURE}.{key}", 1, _MAX_SIZE)

    sizes = {"hidden_size": size("embedding_length"), "intermediate_size": size("feed_forward_length"),
             "layers": size("block_count"), "heads": size("attention.head_count")}
    if metadata.get(f"{ARCHITECTURE}.attention.causal") not in (None, False):
        raise ModelError(f"{ARCHITECTURE}.attention.causal is true; encoders see all of a text")
    vocab_size, positions, token_types = (
        _rows(tensors, f"{name}.weight") for name in ("token_embd", "position_embd", "token_types"))
    reranks = "cls.output.weight" in tensors
    if reranks and "cls.weight" not in tensors:
        raise ModelError("tensor 'cls.weight' is missing, the first of a reranker's two last layers, which some "
                         "converters leave out: convert the original model with deltic convert")
    return EncoderConfig(
        family="bert" if metadata.get("tokenizer.ggml.model") == "bert" else "roberta",
        vocab_size=vocab_size, **sizes, positions=positions, first_position=0, token_types=token_types,
        eps=number(metadata, f"{ARCHITECTURE}.attention.layer_norm_epsilon", 0, 1),
        labels=_rows(tensors, "cls.output.weight") if reranks else 0)


def _rows(tensors: Mapping[str, GgufTensor], name: str) -> int:
    stored = tensors.get(name)
    if stored is None:
        raise ModelError(f"tensor {name!r} is missing; is this a complete encoder?")
    return stored.shape[0]


def _sources(file: GgufFile, config: EncoderConfig) -> dict[str, WeightSource]:
    hf_names = {name: hf_name for hf_name, name in gguf_names(config).items()}
    expected, sources = expected_tensors(config), dict[str, WeightSource]()
    for stored in file.tensors.values():
        name = hf_names.get(stored.name)
        if name is None:
            raise ModelError(f"tensor {stored.name!r} has no place in an encoder of {config.layers} layers")
        if stored.shape != expected[name]:
            raise ModelError(f"tensor {stored.name!r} has shape {list(stored.shape)}, the metadata asks for "
                             f"{list(expected[name])}")
        if not stored.type.readable:
            raise ModelError(f"tensor {stored.name!r} is of type {stored.type.name}, which is not supported; choose "
                             "another quantization, such as Q8_0")
        quantized = stored.type.weights > 1 and len(stored.shape) == 2
        sources[name] = WeightSource(stored.shape, partial(_read, stored),
                                     partial(_pack, stored) if quantized else None)
    missing = [name for name, hf_name in hf_names.items() if hf_name not in sources]
    if missing:
        raise ModelError(f"{len(missing)} tensors are missing, such as {missing[0]!r}; download the file again")
    return sources


def _read(stored: GgufTensor, dtype: torch.dtype) -> Tensor:
    tensor = torch.empty(stored.shape, dtype=dtype)
    fill(tensor, stored.type, stored.read)
    return tensor


def _pack(stored: GgufTensor, form: PackedForm) -> QTensor:
    rows, columns = stored.shape
    return form.pack(stored.type.name, stored.type.id, rows, columns, stored.type.size(columns), stored.read)
