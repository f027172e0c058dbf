"""Reads the tokenizer files of a model directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltic.config.families import GPT2, SPLITTERS, Splitter, splitter_of
from deltic.errors import ModelError

DEFAULT_TEMPLATE = "default"
VOCABULARY, MERGES = "vocab.json", "merges.txt"
_MAX_BYTES = 256 << 20  # the largest tokenizer files have some tens of MB
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The tokenizer of a model directory.

    tokenizer: the text of tokenizer.json. special_tokens: template variables (`eos_token` ...) and their text.
    templates: chat templates by name. added: further tokens that tokenizer_config.json names.
    """

    tokenizer: str
    special_tokens: Mapping[str, str]
    templates: Mapping[str, str]
    added: tuple[str, ...] = ()


def read_tokenizer_files(directory: Path, tokenizer: Path | None = None, config_file: Path | None = None
                         ) -> TokenizerFiles:
    """Reads tokenizer.json, or vocabulary and merges in its place, tokenizer_config.json and chat templates.

    tokenizer, config_file: files in place of tokenizer.json and tokenizer_config.json. ModelError names a missing or
    unreadable file.
    """
    path = tokenizer or directory / "tokenizer.json"
    for given in (tokenizer, config_file):
        if given is not None and not given.is_file():
            raise ModelError(f"there is no file {given}: name the tokenizer's file")
    config = _read_json(config_file or directory / "tokenizer_config.json")
    whole = _read_text(path) if path.is_file() else _tokenizer_json(directory, config)
    if whole is None:
        raise ModelError(f"{directory} has no tokenizer.json: copy it from the model's repository, "
                         "or name a directory that holds the complete model")
    return TokenizerFiles(whole, _special_tokens(config), _templates(directory, config), _added(config))


def _tokenizer_json(directory: Path, config: Mapping[str, Any]) -> str | None:
    """Makes a tokenizer.json from vocab.json and merges.txt of a byte-level BPE; None if a file is missing or the
    pre-tokenizer is unknown."""
    if not all((directory / name).is_file() for name in (VOCABULARY, MERGES)):
        return None
    splitter = _splitter(_read_json(directory / "config.json"), config)
    if splitter is None:
        return None
    vocabulary = _read_json(directory / VOCABULARY)
    if not all(type(id) is int for id in vocabulary.values()):
        raise ModelError(f"{directory / VOCABULARY} must hold token ids by token; download the file again")
    lines = _read_text(directory / MERGES).split("\n")
    merges = [line for line in lines if line and not line.startswith("#version")]
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": splitter.whole,
             "vocab": vocabulary, "merges": merges}
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": _added_tokens(config, directory),
        "normalizer": splitter.normalizer, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splitter.cuts]},
        "post_processor": {**GPT2, "use_regex": False}, "decoder": GPT2, "model": model}, ensure_ascii=False)


def _splitter(model: Mapping[str, Any], config: Mapping[str, Any]) -> Splitter | None:
    if config.get("tokenizer_class") in ("GPT2Tokenizer", "GPT2TokenizerFast"):
        return SPLITTERS["gpt-2"]
    inner = model.get("text_config")
    kind = (inner if isinstance(inner, dict) else {}).get("model_type") or model.get("model_type")
    return splitter_of(kind) if isinstance(kind, str) else None


def _added_tokens(config: Mapping[str, Any], directory: Path) -> list[dict[str, Any]]:
    """Returns the tokens beside the vocabulary, by ascending id."""
    found: dict[int, dict[str, Any]] = {}
    for content, number in _read_json(directory / "added_tokens.json").items():
        found[number] = {"content": content, "special": True}
    decoder = config.get("added_tokens_decoder")
    for id, token in (decoder.items() if isinstance(decoder, dict) else ()):
        if str(id).isdecimal() and isinstance(token, dict) and isinstance(token.get("content"), str):
            found[int(id)] = token
    return [{"id": id, "content": token["content"], **{flag: bool(token.get(flag)) for flag in _FLAGS}}
            for id, token in sorted(found.items())]


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ModelError(f"cannot read {path}: it has more than {_MAX_BYTES >> 20} MiB, which no tokenizer file "
                             "has; download the file again")
        return content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"cannot read {path}: {error}; download the file again") from error


def _read_json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ModelError(f"{path} has a lone surrogate, which is not valid Unicode; download the file again") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}); download the file again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object; download the file again")
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    named = {key: value for key, value in config.items() if key.endswith("_token")}
    for key in ("extra_special_tokens", "model_specific_special_tokens"):
        extra = config.get(key)
        named |= extra if isinstance(extra, dict) else {}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _added(config: Mapping[str, Any]) -> tuple[str, ...]:
    decoder = config.get("added_tokens_decoder")
    named = [*decoder.values()] if isinstance(decoder, dict) else []
    for key in ("additional_special_tokens", "extra_special_tokens"):
        more = config.get(key)
        named += more if isinstance(more, list) else []
    texts = [token.get("content") if isinstance(token, dict) else token for token in named]
    return tuple(dict.fromkeys(text for text in texts if isinstance(text, str)))


def _templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Returns chat templates. Later sources win, as in transformers: config, chat_template.json, chat_template.jinja,
    further files."""
    found = _named_templates(config.get("chat_template"))
    found |= _named_templates(_read_json(directory / "chat_template.json").get("chat_template"))
    if (directory / "chat_template.jinja").is_file():
        found[DEFAULT_TEMPLATE] = _read_text(directory / "chat_template.jinja")
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = _read_text(path)
    return found


def _named_templates(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        return {DEFAULT_TEMPLATE: value}
    if isinstance(value, list):
        pairs = [(entry.get("name"), entry.get("template")) for entry in value if isinstance(entry, dict)]
    else:
        pairs = list(value.items()) if isinstance(value, dict) else []
    return {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
