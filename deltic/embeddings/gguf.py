"""Reads and writes encoders as GGUF files, under llama.cpp's names and keys (conversion/bert.py, src/models)."""

from __future__ import annotations

import json
import logging
import os
from base64 import b64decode
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from deltic.config.reading import integer, number
from deltic.embeddings.directory import Heads, StoredEncoder, read_classifier
from deltic.embeddings.sentence_transformers import POOLINGS, Recipe, read_recipe
from deltic.embeddings.tokenize import EncoderTokenizer, backend_of
from deltic.embeddings.weights import EncoderConfig, WeightSource, classifier_names, expected_tensors
from deltic.errors import ModelError, show
from deltic.loader.disk import read_json
from deltic.loader.gguf.blocks import BY_NAME, Bytes, fill
from deltic.loader.gguf.convert import FILE_TYPES, Written, fitting
from deltic.loader.gguf.file import GgufFile, GgufTensor
from deltic.loader.gguf.quantize import quantize_in_pieces
from deltic.loader.gguf.tokenizer import CONTROL, NORMAL, SPACE, UNKNOWN, USER_DEFINED, tokenizer_from_gguf
from deltic.loader.gguf.write import NewTensor, write_gguf
from deltic.loader.safetensors import Progress
from deltic.ops.encoder import EncoderBackend
from deltic.ops.quantized import PackedForm, QTensor

# Reading


ARCHITECTURE: Final = "bert"
POOLING_TYPES: Final[Mapping[int, str]] = {0: "mean", 1: "mean", 2: "cls", 3: "lasttoken", 4: "cls"}
"""llama.cpp's number -> pooling. 0: unspecified; 4: a reranker."""
RANK: Final = 4
RECIPE: Final = "deltic.recipe"
"""deltic's own key: the settings of sentence-transformers' files, as JSON, where the format has no key for them."""
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
    """Returns True if a file holds an encoder of the BERT family."""
    return file.metadata.get("general.architecture") == ARCHITECTURE


def gives_vectors(file: GgufFile) -> bool:
    """Returns True if a file holds an encoder, or a decoder with a pooling type."""
    return is_bert(file) or f"{file.metadata.get('general.architecture')}.pooling_type" in file.metadata


def gguf_names(config: EncoderConfig) -> dict[str, str]:
    """Returns the GGUF names of `expected_tensors` by Hugging Face's names."""
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
    """Reads the recipe for vectors. Without deltic's key, vectors use the file's pooling type and are normalised."""
    stored = file.metadata.get(RECIPE)
    if stored is not None:
        return _parse_recipe(stored)
    key = f"{file.metadata.get('general.architecture')}.pooling_type"
    pooling = integer({key: 0, **file.metadata}, key, 0, max(POOLING_TYPES))
    return Recipe((POOLING_TYPES[pooling],))


def recipe_keys(recipe: Recipe) -> dict[str, str]:
    """Returns the metadata keys that `read_gguf_recipe` reads."""
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


# Writing


_F32_MATRICES: Final = ("position_embd", "token_types")
"""Matrices that llama.cpp requires as F32."""
_POSITIONS: Final = "embeddings.position_embeddings.weight"
_MAX_TOKENIZER: Final = 64 << 20

logger = logging.getLogger(__name__)


def convert_encoder(stored: StoredEncoder, name: str, path: Path, type: str, progress: Progress | None = None
                    ) -> Written:
    """Writes an encoder's directory as a GGUF file of type `type` (of `FILE_TYPES`). name: the model's name in it."""
    _check(stored)
    names, sources = gguf_names(stored.config), dict(stored.sources)
    sources[_POSITIONS] = _from_first_position(sources[_POSITIONS], stored.config.first_position)
    block_type = BY_NAME[FILE_TYPES[type].most]
    targets = {}
    for hf_name, source in sources.items():
        plain = len(source.shape) < 2 or names[hf_name].startswith(_F32_MATRICES)
        target_type = BY_NAME["F32"] if plain else fitting(block_type, source.shape)
        targets[hf_name] = NewTensor(names[hf_name], target_type, source.shape)
    metadata = {
        "general.architecture": ARCHITECTURE, "general.type": "model", "general.name": name,
        "general.file_type": FILE_TYPES[type].id, "general.quantization_version": 2,
        **_config_keys(stored), **recipe_keys(stored.recipe), **_tokenizer_keys(stored)}
    size = write_gguf(path, metadata, list(targets.values()), _data(sources, targets, progress))
    return Written(size, sum(int(np.prod(source.shape)) for source in sources.values()),
                   Counter(target.type.name for target in targets.values()))


def vector_keys(directory: Path, architecture: str) -> dict[str, Any]:
    """Returns the metadata of a decoder's pooling; empty if its directory states none. architecture: GGUF's name of it.

    Raises ModelError for layers that GGUF files cannot hold.
    """
    if not (directory / "modules.json").is_file():
        return {}
    recipe = read_recipe(directory, "lasttoken")
    if recipe.dense:
        raise _no_dense(directory)
    return {f"{architecture}.pooling_type": pooling_type(recipe, False), **recipe_keys(recipe)}


def pooling_type(recipe: Recipe, scores: bool) -> int:
    """Returns llama.cpp's number of a pooling; 0 if it has none."""
    if scores:
        return RANK
    return next((number for number, pooling in POOLING_TYPES.items() if number and recipe.pooling == (pooling,)), 0)


def _check(stored: StoredEncoder) -> None:
    place = stored.place
    if not place.is_dir():
        raise ModelError(f"{place} is a GGUF file already; convert the original model")
    if stored.compiled:
        raise ModelError(f"{place} is compiled by TVM; convert the original model")
    if stored.recipe.dense:
        raise _no_dense(place)
    if (place / "sparse_linear.pt").is_file() or (place / "colbert_linear.pt").is_file():
        logger.warning("%s: GGUF files have no place for sparse weights and vectors of tokens: the file gives dense "
                       "vectors alone", place)


def _no_dense(place: Path) -> ModelError:
    return ModelError(f"{place} has layers behind its pooling (Dense), for which GGUF files have no place")


def _from_first_position(source: WeightSource, first: int) -> WeightSource:
    """Returns the position table without the rows before a sequence's first position."""
    rows, columns = source.shape
    return WeightSource((rows - first, columns), lambda dtype: source.read(dtype)[first:])


def _data(sources: Mapping[str, WeightSource], targets: Mapping[str, NewTensor], progress: Progress | None
          ) -> Iterator[Iterator[Bytes]]:
    total, done = sum(target.nbytes for target in targets.values()), 0
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for name, target in targets.items():
            matrix = sources[name].read(torch.float32).reshape(-1, target.shape[-1])
            yield quantize_in_pieces(target.name, matrix, target.type, pool)
            done += target.nbytes
            if progress is not None:
                progress(done, total)


def _config_keys(stored: StoredEncoder) -> dict[str, Any]:
    config = stored.config
    keys = {
        "block_count": config.layers, "context_length": config.max_length, "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size, "attention.head_count": config.heads,
        "attention.layer_norm_epsilon": config.eps, "attention.causal": False,
        "pooling_type": pooling_type(stored.recipe, bool(config.labels))}
    return {f"{ARCHITECTURE}.{key}": value for key, value in keys.items()}


# The tokenizer


def _tokenizer_keys(stored: StoredEncoder) -> dict[str, Any]:
    path = stored.place / "tokenizer.json"
    tokenizer = read_json(path, _MAX_TOKENIZER)
    kind = tokenizer.get("model", {}).get("type")
    if kind not in ("WordPiece", "Unigram"):
        raise ModelError(f"{path} is a {kind} tokenizer; those of encoders that can be written to a GGUF file are "
                         "WordPiece and Unigram")
    added = {token["id"]: token for token in tokenizer.get("added_tokens", [])}
    keys = (_wordpiece if kind == "WordPiece" else _unigram)(tokenizer, added, stored.config.vocab_size)
    keys |= {"token_type_count": stored.config.token_types, **_special_ids(tokenizer, added)}
    return {**{f"tokenizer.ggml.{key}": value for key, value in keys.items()},
            "tokenizer.huggingface.json": path.read_text(encoding="utf-8")}


def _wordpiece(tokenizer: Mapping[str, Any], added: Mapping[int, Any], count: int) -> dict[str, Any]:
    """Converts WordPiece. GGUF marks the beginnings of words, WordPiece their continuations."""
    model = tokenizer["model"]
    mark = model.get("continuing_subword_prefix", "##")
    names = _token_names(dict(model["vocab"]), added, count)
    types = [_token_type(id, added) for id in range(count)]
    for id, text in enumerate(names):
        if types[id] == NORMAL:
            names[id] = text[len(mark):] if text.startswith(mark) else SPACE + text
    return {"model": "bert", "pre": "default", "tokens": names, "token_type": types}


def _unigram(tokenizer: Mapping[str, Any], added: Mapping[int, Any], count: int) -> dict[str, Any]:
    model = tokenizer["model"]
    vocabulary, unknown = model["vocab"], model.get("unk_id")
    scores = np.full(count, -10000.0, np.float32)
    scores[:len(vocabulary)] = [score for _, score in vocabulary]
    keys = {
        "model": "t5", "pre": "default",
        "tokens": _token_names({text: id for id, (text, _) in enumerate(vocabulary)}, added, count),
        "token_type": [UNKNOWN if id == unknown else _token_type(id, added) for id in range(count)],
        "scores": scores, "add_space_prefix": True, "remove_extra_whitespaces": True}
    for step in _steps(tokenizer.get("normalizer")):
        if step.get("precompiled_charsmap"):
            keys["precompiled_charsmap"] = np.frombuffer(b64decode(step["precompiled_charsmap"]), np.uint8)
            break
    return keys


def _token_names(vocabulary: Mapping[str, int], added: Mapping[int, Any], count: int) -> list[str]:
    names = {id: text for text, id in vocabulary.items()} | {id: token["content"] for id, token in added.items()}
    return [names.get(id, f"[PAD{id}]") for id in range(count)]


def _token_type(id: int, added: Mapping[int, Any]) -> int:
    if id not in added:
        return NORMAL
    return CONTROL if added[id].get("special") else USER_DEFINED


def _steps(step: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yields a tokenizer step and the steps nested inside it."""
    if step:
        yield step
        for inner in (*step.get("normalizers", ()), *step.get("processors", ())):
            yield from _steps(inner)


def _special_ids(tokenizer: Mapping[str, Any], added: Mapping[int, Any]) -> dict[str, Any]:
    ids = {token["content"]: id for id, token in added.items()}
    around: list[int] = []  # special tokens before and after a text
    for step in _steps(tokenizer.get("post_processor")):
        if step.get("type") == "TemplateProcessing":
            texts = [piece["SpecialToken"]["id"] for piece in step["single"] if "SpecialToken" in piece]
            around = [step["special_tokens"][text]["ids"][0] for text in texts]
        elif step.get("type") in ("BertProcessing", "RobertaProcessing"):
            around = [step["cls"][1], step["sep"][1]]
    found = dict(zip(("cls", "seperator"), around, strict=False)) | dict(zip(("bos", "eos"), around, strict=False))
    for key, names in (("unknown", ("[UNK]", "<unk>")), ("padding", ("[PAD]", "<pad>")),
                       ("mask", ("[MASK]", "<mask>"))):
        found.update((key, ids[name]) for name in names if name in ids)
    return {**{f"{key}_token_id": id for key, id in found.items()}, "add_bos_token": True, "add_eos_token": True}
