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

from deltic.embeddings.bert_config import EncoderConfig
from deltic.embeddings.directory import StoredEncoder
from deltic.embeddings.gguf import ARCHITECTURE, POOLING_TYPES, RANK, gguf_names, recipe_keys
from deltic.embeddings.sentence_transformers import Recipe, read_recipe
from deltic.embeddings.weights import WeightSource
from deltic.errors import ModelError
from deltic.loader.files import read_json
from deltic.loader.gguf.blocks import BY_NAME, Bytes
from deltic.loader.gguf.convert import FILE_TYPES, Written, fitting
from deltic.loader.gguf.quantize import quantize_in_pieces
from deltic.loader.gguf.word_tokenizers import CONTROL, NORMAL, SPACE, UNKNOWN, USER_DEFINED
from deltic.loader.gguf.write import NewTensor, write_gguf
from deltic.loader.safetensors import Progress

_PLAIN: Final = ("position_embd", "token_types")
"""Matrices that stay F32, as llama.cpp wants them."""

logger = logging.getLogger(__name__)


def convert_encoder(stored: StoredEncoder, name: str, path: Path, type: str, progress: Progress | None = None
                    ) -> Written:
    """Write an encoder's directory to `path` as a GGUF file of `type` (of FILE_TYPES), called `name`. As
    `gguf.convert.convert`."""
    if not stored.place.is_dir():
        raise ModelError(f"{stored.place} is a GGUF file already; convert the original model")
    if stored.compiled:
        raise ModelError(f"{stored.place} is compiled by TVM; convert the original model")
    if stored.recipe.dense:
        raise ModelError(f"{stored.place} has layers behind its pooling (Dense), for which GGUF files have no place")
    if any((stored.place / f"{kind}_linear.pt").is_file() for kind in ("sparse", "colbert")):
        logger.warning("%s: GGUF files have no place for sparse weights and vectors of tokens: the file gives dense "
                       "vectors alone", stored.place)
    config, sources = stored.config, _sources(stored)
    names = gguf_names(config)
    most = BY_NAME[FILE_TYPES[type].most]
    targets = {}
    for ours, source in sources.items():
        plain = len(source.shape) < 2 or names[ours].startswith(_PLAIN)
        targets[ours] = NewTensor(names[ours], BY_NAME["F32"] if plain else fitting(most, source.shape), source.shape)
    metadata = {
        "general.architecture": ARCHITECTURE, "general.type": "model", "general.name": name,
        "general.file_type": FILE_TYPES[type].id, "general.quantization_version": 2,
        **_config_keys(stored), **recipe_keys(stored.recipe), **_tokenizer_keys(stored)}
    size = write_gguf(path, metadata, list(targets.values()), _data(sources, targets, progress))
    return Written(size, sum(int(np.prod(source.shape)) for source in sources.values()),
                   Counter(target.type.name for target in targets.values()))


def _sources(stored: StoredEncoder) -> dict[str, WeightSource]:
    """The positions begin with that of the first token."""
    name, first = "embeddings.position_embeddings.weight", stored.config.first_place
    whole = stored.sources[name]
    cut = WeightSource((whole.shape[0] - first, whole.shape[1]), lambda dtype: whole.read(dtype)[first:])
    return {**stored.sources, name: cut}


def _data(sources: Mapping[str, WeightSource], targets: Mapping[str, NewTensor], progress: Progress | None
          ) -> Iterator[Iterator[Bytes]]:
    total, done = sum(target.nbytes for target in targets.values()), 0
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for ours, target in targets.items():
            matrix = sources[ours].read(torch.float32).reshape(-1, target.shape[-1])
            yield quantize_in_pieces(target.name, matrix, target.type, pool)
            done += target.nbytes
            if progress is not None:
                progress(done, total)


def pooling_type(recipe: Recipe, scores: bool) -> int:
    """llama.cpp's number of how states are pooled; 0 where it has none for it."""
    if scores:
        return RANK
    one = recipe.pooling[0] if len(recipe.pooling) == 1 else None
    return next((number for number, pooling in POOLING_TYPES.items() if number and pooling == one), 0)


def vector_keys(directory: Path, architecture: str) -> dict[str, Any]:
    """What the file of a decoder says of how vectors are made, if its directory does. architecture: as files call it.
    ModelError where files have no place for it."""
    if not (directory / "modules.json").is_file():
        return {}
    recipe = read_recipe(directory, "lasttoken")
    if recipe.dense:
        raise ModelError(f"{directory} has layers behind its pooling (Dense), for which GGUF files have no place")
    return {f"{architecture}.pooling_type": pooling_type(recipe, False), **recipe_keys(recipe)}


def _config_keys(stored: StoredEncoder) -> dict[str, Any]:
    config: EncoderConfig = stored.config
    keys = {
        "block_count": config.layers, "context_length": config.max_length, "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size, "attention.head_count": config.heads,
        "attention.layer_norm_epsilon": config.eps, "attention.causal": False,
        "pooling_type": pooling_type(stored.recipe, bool(config.labels))}
    return {f"{ARCHITECTURE}.{key}": value for key, value in keys.items()}


# The tokenizer


def _tokenizer_keys(stored: StoredEncoder) -> dict[str, Any]:
    path = stored.place / "tokenizer.json"
    tokenizer = read_json(path, 64 << 20)
    kind = tokenizer.get("model", {}).get("type")
    if kind not in ("WordPiece", "Unigram"):
        raise ModelError(f"{path} is a {kind} tokenizer; those of encoders that can be written to a GGUF file are "
                         "WordPiece and Unigram")
    added = {token["id"]: token for token in tokenizer.get("added_tokens", [])}
    keys = (_wordpiece if kind == "WordPiece" else _unigram)(tokenizer, added, stored.config.vocab_size)
    return {f"tokenizer.ggml.{key}": value for key, value in {
        **keys, "token_type_count": stored.config.kinds, **_special_ids(tokenizer, added)}.items()} | {
            "tokenizer.huggingface.json": path.read_text(encoding="utf-8")}


def _wordpiece(tokenizer: Mapping[str, Any], added: Mapping[int, Any], count: int) -> dict[str, Any]:
    """Beginnings of words are marked, not what goes on."""
    model = tokenizer["model"]
    names, types, mark = _listed(dict(model["vocab"]), added, count), [], model.get("continuing_subword_prefix", "##")
    for id, text in enumerate(names):
        types.append(_type(id, added))
        if types[-1] == NORMAL:
            names[id] = text[len(mark):] if text.startswith(mark) else SPACE + text
    return {"model": "bert", "pre": "default", "tokens": names, "token_type": types}


def _unigram(tokenizer: Mapping[str, Any], added: Mapping[int, Any], count: int) -> dict[str, Any]:
    vocabulary = tokenizer["model"]["vocab"]
    names = _listed({text: id for id, (text, _) in enumerate(vocabulary)}, added, count)
    scores = np.full(count, -10000.0, np.float32)
    scores[:len(vocabulary)] = [score for _, score in vocabulary]
    unknown = tokenizer["model"].get("unk_id")
    types = [UNKNOWN if id == unknown else _type(id, added) for id in range(count)]
    found = next((part["precompiled_charsmap"] for part in _parts(tokenizer.get("normalizer"))
                  if part.get("precompiled_charsmap")), None)
    charsmap = {} if found is None else {"precompiled_charsmap": np.frombuffer(b64decode(found), np.uint8)}
    return {"model": "t5", "pre": "default", "tokens": names, "token_type": types, "scores": scores,
            "add_space_prefix": True, "remove_extra_whitespaces": True, **charsmap}


def _listed(vocabulary: Mapping[str, int], added: Mapping[int, Any], count: int) -> list[str]:
    names = {id: text for text, id in vocabulary.items()} | {id: token["content"] for id, token in added.items()}
    return [names.get(id, f"[PAD{id}]") for id in range(count)]


def _type(id: int, added: Mapping[int, Any]) -> int:
    if id not in added:
        return NORMAL
    return CONTROL if added[id].get("special") else USER_DEFINED


def _parts(given: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """A step of a tokenizer, or those that it is made of."""
    if given:
        yield given
        for part in (*given.get("normalizers", ()), *given.get("processors", ())):
            yield from _parts(part)


def _special_ids(tokenizer: Mapping[str, Any], added: Mapping[int, Any]) -> dict[str, Any]:
    """What stands around a text, and what fills and hides."""
    ids = {token["content"]: id for id, token in added.items()}
    around: list[int] = []
    for part in _parts(tokenizer.get("post_processor")):
        if part.get("type") == "TemplateProcessing":
            texts = [step["SpecialToken"]["id"] for step in part["single"] if "SpecialToken" in step]
            around = [part["special_tokens"][text]["ids"][0] for text in texts]
        elif part.get("type") in ("BertProcessing", "RobertaProcessing"):
            around = [part["cls"][1], part["sep"][1]]
    found = dict(zip(("cls", "seperator"), around, strict=False)) | dict(zip(("bos", "eos"), around, strict=False))
    for key, names in (("unknown", ("[UNK]", "<unk>")), ("padding", ("[PAD]", "<pad>")),
                       ("mask", ("[MASK]", "<mask>"))):
        found.update((key, ids[name]) for name in names if name in ids)
    return {**{f"{key}_token_id": id for key, id in found.items()}, "add_bos_token": True, "add_eos_token": True}
