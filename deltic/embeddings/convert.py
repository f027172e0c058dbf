"""Writes an encoder as a GGUF file, with the names and keys of llama.cpp's converter (conversion/bert.py)."""

from __future__ import annotations

import logging
import os
from base64 import b64decode
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from deltic.embeddings.directory import StoredEncoder
from deltic.embeddings.gguf import ARCHITECTURE, POOLING_TYPES, RANK, gguf_names, recipe_keys
from deltic.embeddings.sentence_transformers import Recipe, read_recipe
from deltic.embeddings.weights import WeightSource
from deltic.errors import ModelError
from deltic.loader.disk import read_json
from deltic.loader.gguf.blocks import BY_NAME, Bytes
from deltic.loader.gguf.convert import FILE_TYPES, Written, fitting
from deltic.loader.gguf.quantize import quantize_in_pieces
from deltic.loader.gguf.tokenizer import CONTROL, NORMAL, SPACE, UNKNOWN, USER_DEFINED
from deltic.loader.gguf.write import NewTensor, write_gguf
from deltic.loader.safetensors import Progress

_F32_MATRICES: Final = ("position_embd", "token_types")
"""Matrices that llama.cpp requires as F32."""
_POSITIONS: Final = "embeddings.position_embeddings.weight"
_MAX_TOKENIZER: Final = 64 << 20

logger = logging.getLogger(__name__)


def convert_encoder(stored: StoredEncoder, name: str, path: Path, type: str, progress: Progress | None = None
                    ) -> Written:
    """Writes an encoder's directory as a GGUF file of a type (of `FILE_TYPES`), under a name."""
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
    """Returns the metadata of a decoder's pooling, empty if its directory states none. architecture: in GGUF's words.

    Raises ModelError for layers that GGUF files cannot hold.
    """
    if not (directory / "modules.json").is_file():
        return {}
    recipe = read_recipe(directory, "lasttoken")
    if recipe.dense:
        raise _no_dense(directory)
    return {f"{architecture}.pooling_type": pooling_type(recipe, False), **recipe_keys(recipe)}


def pooling_type(recipe: Recipe, scores: bool) -> int:
    """Returns llama.cpp's number of a pooling, 0 if it has none."""
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
    """GGUF marks the beginnings of words, WordPiece their continuations."""
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
    """Yields a step of a tokenizer, and the steps inside it."""
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
