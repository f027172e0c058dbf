"""A tokenizer.json out of the files that came before it: vocab.json and merges.txt of a byte-level BPE."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from deltic.config.splitters import GPT2, SPLITTERS, Splitter, splitter_of
from deltic.errors import ModelError

VOCABULARY, MERGES = "vocab.json", "merges.txt"
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")
Read = Callable[[Path], Any]


def tokenizer_json(directory: Path, config: Mapping[str, Any], read: Read, text: Read) -> str | None:
    """The tokenizer.json of a directory that has a vocabulary and merges instead; None where it has none, or where
    nothing tells how its text is cut.

    config: tokenizer_config.json. read, text: give the object in a JSON file, {} if it is absent, and a file's text.
    """
    if not all((directory / name).is_file() for name in (VOCABULARY, MERGES)):
        return None
    splitter = _splitter(read(directory / "config.json"), config)
    if splitter is None:
        return None
    vocabulary = read(directory / VOCABULARY)
    if not all(type(id) is int for id in vocabulary.values()):
        raise ModelError(f"{directory / VOCABULARY} must hold token ids by token; download the file again")
    lines = [line for line in text(directory / MERGES).split("\n") if line and not line.startswith("#version")]
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": _added(config, read, directory),
        "normalizer": splitter.normalizer, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splitter.cuts]},
        "post_processor": {**GPT2, "use_regex": False}, "decoder": GPT2,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                  "ignore_merges": splitter.whole, "vocab": vocabulary, "merges": lines}}, ensure_ascii=False)


def _splitter(model: Mapping[str, Any], config: Mapping[str, Any]) -> Splitter | None:
    inner = model.get("text_config")
    kind = (inner if isinstance(inner, dict) else {}).get("model_type") or model.get("model_type")
    if config.get("tokenizer_class") in ("GPT2Tokenizer", "GPT2TokenizerFast"):
        return SPLITTERS["gpt-2"]
    return splitter_of(kind) if isinstance(kind, str) else None


def _added(config: Mapping[str, Any], read: Read, directory: Path) -> list[dict[str, Any]]:
    """The tokens beside the vocabulary's, in order of their ids."""
    decoder = config.get("added_tokens_decoder")
    found: dict[int, dict[str, Any]] = {
        id: {"content": content, "special": True} for content, id in read(directory / "added_tokens.json").items()}
    for id, token in (decoder.items() if isinstance(decoder, dict) else ()):
        if str(id).isdecimal() and isinstance(token, dict) and isinstance(token.get("content"), str):
            found[int(id)] = token
    return [{"id": id, "content": token["content"], **{flag: bool(token.get(flag)) for flag in _FLAGS}}
            for id, token in sorted(found.items())]
