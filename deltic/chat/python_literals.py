"""Reads Python literals of JSON's types, which models write where JSON was asked for.

`ast.literal_eval` reads the same, but no other thread runs meanwhile, and it takes 800 bytes per character.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

_MOST_DEPTH = 100
_WORDS = {"True": True, "False": False, "None": None}
_TOKEN = re.compile(
    r"[ \t\r\n\f]*+(?:"
    r"(?P<string>'(?:[^'\\\r\n]|\\.)*+'|\"(?:[^\"\\\r\n]|\\.)*+\")"
    r"|(?P<float>[-+]?(?:[0-9]++\.[0-9]*+|\.[0-9]++)(?:[eE][-+]?[0-9]++)?|[-+]?[0-9]++[eE][-+]?[0-9]++)"
    r"|(?P<int>[-+]?(?:0++|[1-9][0-9]*+))"
    r"|(?P<word>True|False|None)(?!\w)"
    r"|(?P<mark>[][{}(),:])"
    r")", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ESCAPES = {"\n": "", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r",
            "t": "\t", "v": "\v"}
_CLOSING = {"[": "]", "(": ")", "{": "}"}


def read_literal(text: str) -> Any:
    """The value of a literal, tuples as lists; ValueError if it is none or has other types. Takes linear time."""
    reader = _LiteralReader(text)
    value = reader.value(reader.next(), 0)
    if reader.next() is not None:
        raise ValueError("more than one value")
    return value


class _LiteralReader:
    """Walks along the tokens of a text: a mark, or a value in a list of one; None at the end."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def next(self) -> str | list[Any] | None:
        found = _TOKEN.match(self._text, self._at)
        if found is None:
            if self._text[self._at:].strip(" \t\r\n\f"):
                raise ValueError(f"no literal at character {self._at}")
            return None
        self._at = found.end()
        kind, token = found.lastgroup, found[found.lastgroup or 0]
        if kind == "mark":
            return token
        if self._text[self._at:self._at + 1].isalnum() or self._text.startswith("_", self._at):
            raise ValueError(f"no literal at character {found.start()}")
        return [_ATOMS[kind or ""](token)]

    def value(self, token: str | list[Any] | None, depth: int) -> Any:
        if isinstance(token, list):
            return token[0]
        if token not in _CLOSING or depth >= _MOST_DEPTH:
            raise ValueError("nested too deeply" if token in _CLOSING else "a value is missing")
        return self._pairs(depth + 1) if token == "{" else self._items(_CLOSING[token], depth + 1)

    def _items(self, closing: str, depth: int) -> Any:
        """A list or tuple, or what stands in parentheses alone."""
        items: list[Any] = []
        token = self.next()
        while token != closing:
            items.append(self.value(token, depth))
            token = self.next()
            if token == closing == ")" and len(items) == 1:
                return items[0]
            token = self._after_item(token, closing)
        return items

    def _pairs(self, depth: int) -> dict[str, Any]:
        pairs: dict[str, Any] = {}
        token = self.next()
        while token != "}":
            key = self.value(token, depth)
            if not isinstance(key, str) or self.next() != ":":
                raise ValueError("keys must be strings, followed by a colon")
            pairs[key] = self.value(self.next(), depth)
            token = self._after_item(self.next(), "}")
        return pairs

    def _after_item(self, token: str | list[Any] | None, closing: str) -> str | list[Any] | None:
        if token == ",":
            return self.next()
        if token != closing:
            raise ValueError("a comma is missing")
        return token


def _string(token: str) -> str:
    text = token[1:-1]
    return _ESCAPE.sub(_unescape, text) if "\\" in text else text


def _unescape(found: re.Match[str]) -> str:
    octal, *codes, other = found.groups()
    if octal:
        return chr(int(octal, 8))
    code = next((code for code in codes if code), None)
    if code:
        return chr(int(code, 16))
    if other in "NxuU\r":  # names of characters, codes that are cut short
        raise ValueError(f"unknown escape {found[0]}")
    return _ESCAPES.get(other, found[0])


def _float(token: str) -> float:
    value = float(token)
    if not math.isfinite(value):
        raise ValueError(f"{token[:40]} is too large")
    return value


_ATOMS: dict[str, Callable[[str], Any]] = {"string": _string, "float": _float, "int": int, "word": _WORDS.__getitem__}
