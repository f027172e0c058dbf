"""Reads the tokenizer's files of a model directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltic.chat.vocabulary import tokenizer_json
from deltic.errors import ModelError

DEFAULT_TEMPLATE = "default"
_LONGEST = 256 << 20
"""Bytes of a file; the largest tokenizers have some dozens of millions."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What a model directory says about its tokenizer.

    special_tokens: template variables (`eos_token` ...) and their text. templates: chat templates by name. added: what
    tokenizer_config.json calls tokens beside those of the vocabulary.
    """

    tokenizer: str
    special_tokens: Mapping[str, str]
    templates: Mapping[str, str]
    added: tuple[str, ...] = ()


def read_tokenizer_files(directory: Path, tokenizer: Path | None = None, config_file: Path | None = None
                         ) -> TokenizerFiles:
    """Read tokenizer.json, or what it is made of (`vocabulary.tokenizer_json`), and, where present,
    tokenizer_config.json and the chat template files. tokenizer, config_file: files that stand for those two.

    Raises ModelError that names a missing or unreadable file.
    """
    path = tokenizer or directory / "tokenizer.json"
    for given in (tokenizer, config_file):
        if given is not None and not given.is_file():
            raise ModelError(f"there is no file {given}: name the tokenizer's file")
    config = _read_json(config_file or directory / "tokenizer_config.json")
    whole = _read_text(path) if path.is_file() else tokenizer_json(directory, config, _read_json, _read_text)
    if whole is None:
        raise ModelError(f"{directory} has no tokenizer.json: copy it from the model's repository, "
                         "or name a directory that holds the complete model")
    return TokenizerFiles(whole, _special_tokens(config), _templates(directory, config), _added(config))


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_LONGEST + 1)
        if len(content) > _LONGEST:
            raise ModelError(f"cannot read {path}: it has more than {_LONGEST >> 20} MiB, which no file of its kind "
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
    """Later sources win, as in transformers: config, chat_template.json, chat_template.jinja, more files."""
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
