"""From what a user calls a model of texts to one that is loaded, with its tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from deltic.config import EngineConfig
from deltic.embeddings.bert import load_bert
from deltic.embeddings.bert_config import family_of
from deltic.embeddings.decoder import decoder_texts, load_decoder, reranker_pairs
from deltic.embeddings.directory import StoredEncoder, read_directory
from deltic.embeddings.gguf import gives_vectors, is_bert, read_gguf
from deltic.embeddings.tokenize import EncoderTokenizer
from deltic.embeddings.types import Item, TextModel
from deltic.engine.options import settled
from deltic.errors import ConfigError, ModelError, RequestError, show
from deltic.loader.files import read_json
from deltic.loader.gguf.file import GgufFile
from deltic.loader.hub import ACCEPTED, resolve
from deltic.loader.model_files import only_gguf
from deltic.loader.safetensors import Progress

Task = Literal["auto", "embed", "rerank"]
Pairs = Callable[[str, Sequence[str], bool, str | None], list[Item]]


@dataclass(frozen=True, slots=True)
class Opened:
    """pairs: makes the items of a query and documents; then come whether to cut long ones, and an instruction."""

    model: TextModel
    texts: EncoderTokenizer
    pairs: Pairs


def is_encoder(place: Path) -> bool:
    """Whether a model's directory or GGUF file holds an encoder of the BERT family, or says how vectors are made of its
    states."""
    place = _file_or_directory(place)
    if place.is_file():
        return gives_vectors(GgufFile.open(place))
    config = place / "config.json"
    if not config.is_file():
        return False
    return family_of(read_json(config)) is not None or (place / "modules.json").is_file()


def open_stored(place: Path) -> StoredEncoder | None:
    """The encoder of the BERT family in a directory or a GGUF file; None if it is something else."""
    place = _file_or_directory(place)
    if place.is_file():
        file = GgufFile.open(place)
        return read_gguf(file) if is_bert(file) else None
    config = place / "config.json"
    return read_directory(place) if config.is_file() and family_of(read_json(config)) else None


def _file_or_directory(place: Path) -> Path:
    """The GGUF file of a directory that has nothing else."""
    return (only_gguf(place) if place.is_dir() else None) or place


def open_texts(model: str | Path, task: Task, options: EngineConfig, revision: str | None = None,
               progress: Progress | None = None, max_length: int | None = None, instruction: str | None = None
               ) -> Opened:
    """Load a model of vectors or scores. ModelError names the file that cannot be used; ConfigError the option."""
    if not isinstance(model, str | Path):
        raise ModelError(f"a model is {ACCEPTED}, not {show(model)}")
    place = resolve(model, revision, progress=progress is not None)
    stored = open_stored(place)
    options = options if stored is not None and stored.compiled else settled(options)
    if stored is not None:
        if instruction is not None:
            raise _not_instructed(model)
        return _encoder(str(model), stored, task, options, progress, max_length)
    decoder = load_decoder(str(model), place, task, options, revision, progress)
    if instruction is not None and "score" not in decoder.outputs:
        decoder.close()
        raise _not_instructed(model)
    longest = _longest(max_length, decoder.max_length)
    texts = decoder_texts(decoder, longest)
    return Opened(decoder, texts, reranker_pairs(texts, instruction))


def _encoder(name: str, stored: StoredEncoder, task: Task, options: EngineConfig, progress: Progress | None,
             max_length: int | None) -> Opened:
    loaded = load_bert(name, stored, options, progress)
    needed = {"embed": "dense", "rerank": "score"}.get(task)
    if needed is not None and needed not in loaded.outputs:
        raise ConfigError(f"task={task}: {name} gives {', '.join(sorted(loaded.outputs))}", "task")
    texts = stored.texts(_longest(max_length, loaded.max_length))
    if texts.vocab_size > loaded.config.vocab_size:
        raise ModelError(f"{stored.place}: the tokenizer has {texts.vocab_size} tokens, the model only "
                         f"{loaded.config.vocab_size}; take the files of one revision")
    if "score" in loaded.outputs and loaded.config.family == "bert" and texts.kinds > loaded.config.kinds:
        raise ModelError(f"{stored.place}: the tokenizer has {texts.kinds} token types, the model only "
                         f"{loaded.config.kinds}; take the files of one revision")
    def pairs(query: str, documents: Sequence[str], truncate: bool, instruction: str | None) -> list[Item]:
        if instruction is not None:
            raise RequestError(f"{name} takes no instruction: only rerankers that are decoders do", "instruction")
        return texts.pairs(query, documents, truncate)

    return Opened(loaded, texts, pairs)


def _not_instructed(model: str | Path) -> ConfigError:
    return ConfigError(f"instruction: {model} takes none, only rerankers that are decoders do", "instruction")


def _longest(wanted: int | None, most: int) -> int:
    if wanted is None:
        return most
    if type(wanted) is not int or not 1 <= wanted <= most:
        raise ConfigError(f"max_length must be an integer from 1 to {most}, which the model reads, not {show(wanted)}",
                          "max_length")
    return wanted
