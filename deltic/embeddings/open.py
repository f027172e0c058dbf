"""Finds and loads embedding models and rerankers, with their tokenizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from deltic.config import EngineConfig
from deltic.embeddings.bert import load_bert
from deltic.embeddings.decoder import decoder_texts, load_decoder, reranker_pairs
from deltic.embeddings.directory import StoredEncoder, read_directory
from deltic.embeddings.gguf import gives_vectors, is_bert, read_gguf
from deltic.embeddings.tokenize import EncoderTokenizer
from deltic.embeddings.types import Item, TextModel
from deltic.embeddings.weights import family_of
from deltic.engine.arguments import settled
from deltic.errors import ConfigError, ModelError, RequestError, show
from deltic.loader.disk import read_json
from deltic.loader.gguf.file import GgufFile
from deltic.loader.hub import ACCEPTED, resolve
from deltic.loader.model_files import only_gguf
from deltic.loader.safetensors import Progress

Task = Literal["auto", "embed", "rerank"]
Pairs = Callable[[str, Sequence[str], bool, str | None], list[Item]]
"""Builds the items from a query, documents, a flag to truncate, and an instruction."""


@dataclass(frozen=True, slots=True)
class Opened:
    model: TextModel
    texts: EncoderTokenizer
    pairs: Pairs


def is_encoder(place: Path) -> bool:
    """Returns True if a directory or GGUF file holds an encoder of the BERT family, or states how to pool vectors."""
    place = _file_or_directory(place)
    if place.is_file():
        return gives_vectors(GgufFile.open(place))
    config = place / "config.json"
    if not config.is_file():
        return False
    return family_of(read_json(config)) is not None or (place / "modules.json").is_file()


def open_stored(place: Path) -> StoredEncoder | None:
    """Returns the encoder of the BERT family in a directory or GGUF file; None if there is none."""
    place = _file_or_directory(place)
    if place.is_file():
        file = GgufFile.open(place)
        return read_gguf(file) if is_bert(file) else None
    config = place / "config.json"
    return read_directory(place) if config.is_file() and family_of(read_json(config)) else None


def _file_or_directory(place: Path) -> Path:
    """Returns the GGUF file of a directory without other weights, else the path itself."""
    return (only_gguf(place) if place.is_dir() else None) or place


def open_texts(model: str | Path, task: Task, options: EngineConfig, revision: str | None = None,
               progress: Progress | None = None, max_length: int | None = None, instruction: str | None = None
               ) -> Opened:
    """Loads a model. Raises ModelError naming the file, ConfigError naming the option that cannot be used."""
    if not isinstance(model, str | Path):
        raise ModelError(f"a model is {ACCEPTED}, not {show(model)}")
    if options.shards > 1:
        raise ConfigError(f"tp={options.tp} is for answers: leave it out with a model of vectors", "tp")
    place = resolve(model, revision, progress=progress is not None)
    name, stored = str(model), open_stored(place)
    if stored is None or not stored.compiled:
        options = settled(options)
    if stored is not None:
        if instruction is not None:
            raise _takes_no_instruction(name)
        return _open_encoder(name, stored, task, options, progress, max_length)
    decoder = load_decoder(name, place, task, options, revision, progress)
    if instruction is not None and "score" not in decoder.outputs:
        decoder.close()
        raise _takes_no_instruction(name)
    texts = decoder_texts(decoder, _checked_length(max_length, decoder.max_length))
    return Opened(decoder, texts, reranker_pairs(texts, instruction))


def _open_encoder(name: str, stored: StoredEncoder, task: Task, options: EngineConfig, progress: Progress | None,
                  max_length: int | None) -> Opened:
    model = load_bert(name, stored, options, progress)
    needed = {"embed": "dense", "rerank": "score"}.get(task)
    if needed is not None and needed not in model.outputs:
        raise ConfigError(f"task={task}: {name} gives {', '.join(sorted(model.outputs))}", "task")
    texts, config = stored.texts(_checked_length(max_length, model.max_length)), model.config
    if texts.vocab_size > config.vocab_size:
        raise ModelError(f"{stored.place}: the tokenizer has {texts.vocab_size} tokens, the model only "
                         f"{config.vocab_size}; take the files of one revision")
    if "score" in model.outputs and config.family == "bert" and texts.token_types > config.token_types:
        raise ModelError(f"{stored.place}: the tokenizer has {texts.token_types} token types, the model only "
                         f"{config.token_types}; take the files of one revision")

    def pairs(query: str, documents: Sequence[str], truncate: bool, instruction: str | None) -> list[Item]:
        if instruction is not None:
            raise RequestError(f"{name} takes no instruction: only rerankers that are decoders do", "instruction")
        return texts.pairs(query, documents, truncate)

    return Opened(model, texts, pairs)


def _takes_no_instruction(name: str) -> ConfigError:
    return ConfigError(f"instruction: {name} takes none, only rerankers that are decoders do", "instruction")


def _checked_length(wanted: int | None, limit: int) -> int:
    if wanted is None:
        return limit
    if type(wanted) is not int or not 1 <= wanted <= limit:
        raise ConfigError(f"max_length must be an integer from 1 to {limit}, which the model reads, not {show(wanted)}",
                          "max_length")
    return wanted
