"""Reads tool calls out of generated text: the XML form of the family's templates, and the older JSON form.

    <function=NAME>                             {"name": NAME, "arguments": {KEY: VALUE}}
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

from deltic.text.coerce import Schema, loads
from deltic.text.functions import FUNCTION, FUNCTION_END, clean_name, read_functions

_QUOTES = "\"'"
_JSON_MARK = re.compile(r"\\.|[]\"'{}[]", re.DOTALL)  # an escaped character is none
_FUNCTION_TAG = re.compile(f"{FUNCTION.pattern}|{FUNCTION_END}")
_OPEN_TAG = re.compile(r"<[^<>\n]*\Z")


def tool_schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The parameter schema of each tool by name, from OpenAI's form; tools in another form have none."""
    functions = [tool.get("function", tool) for tool in tools if isinstance(tool, Mapping)]
    return {function["name"]: Schema(function["parameters"]) for function in functions
            if isinstance(function, Mapping) and isinstance(function.get("name"), str)
            and isinstance(function.get("parameters"), Mapping)}


class CallBody:
    """What stands between `<tool_call>` and `</tool_call>`, as far as it has arrived. Characters are looked at once."""

    def __init__(self, text: str = "") -> None:
        self._pieces, self._unread = [text], [text]
        self._is_json: bool | None = None
        # of the XML form: the first name, the tags so far, and whether nothing came after the last end of a function
        self._name: str | None = None
        self._openings, self._endings, self._ended = 0, 0, False
        # of the JSON form: the open quote, the open brackets, and whether the text can become a call no more
        self._quote, self._depth, self._broken = "", 0, False

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def add(self, text: str) -> None:
        """Take more text."""
        self._pieces.append(text)
        self._unread.append(text)

    @property
    def name(self) -> str | None:
        """The function's name as soon as it is certain; None for the JSON form, whose name may come last."""
        self._read()
        return self._name

    @property
    def complete(self) -> bool:
        """Whether a closing tag here closes the call, rather than being text of an argument.

        An argument may quote a whole call, hence the balance.
        """
        self._read()
        if self._is_json:
            return self._closes_json()
        return not self._openings or (self._endings >= self._openings and self._ended and not self._unread[0])

    def calls(self) -> list[tuple[str, dict[str, Any]]]:
        """Name and arguments of each call, as they are written; empty if the text is no call at all."""
        self._read()
        if self._is_json:
            call = _json_call(self.text)
            return [call] if call else []
        return [(name, {**arguments}) for name, arguments in read_functions(self.text)]

    def copy(self) -> CallBody:
        """An independent body with the same text."""
        twin = copy.copy(self)
        twin._pieces, twin._unread = self._pieces.copy(), self._unread.copy()
        return twin

    def _read(self) -> None:
        text = "".join(self._unread)
        if self._is_json is None:
            text = text.lstrip()
            self._is_json = text[0] == "{" if text else None
        self._unread = [self._read_json(text) if self._is_json else self._read_tags(text)]

    def _read_tags(self, text: str) -> str:
        """Gives back a tag that has only begun."""
        at = 0
        for tag in _FUNCTION_TAG.finditer(text):
            at, self._ended = tag.end(), tag[0] == FUNCTION_END
            if self._ended:
                self._endings += 1
            else:
                self._openings += 1
                self._name = self._name or clean_name(tag[1])
        begun = _OPEN_TAG.search(text, max(at, text.rfind("<")))
        end = begun.start() if begun else len(text)
        self._ended = self._ended and not text[at:end].strip()
        return text[end:]

    def _read_json(self, text: str) -> str:
        """Gives back a backslash whose character has not come."""
        at = 0
        for mark in _JSON_MARK.finditer(text):
            at = mark.end()
            if self._quote:
                self._quote = "" if mark[0] == self._quote else self._quote
            elif mark[0] in _QUOTES:
                self._quote = mark[0]
            elif len(mark[0]) == 1:
                self._depth += 1 if mark[0] in "{[" else -1
        return "\\" if text[at:].endswith("\\") else ""

    def _closes_json(self) -> bool:
        """Once its brackets are closed the text is a call, or never will be."""
        if self._quote or self._depth > 0 or self._unread[0] or self._broken:
            return False
        self._broken = _json_call(self.text) is None
        return not self._broken


def _json_call(text: str) -> tuple[str, dict[str, Any]] | None:
    try:
        call = loads(text.strip())
        name, arguments = call["name"], call.get("arguments", call.get("parameters"))
        arguments = loads(arguments) if isinstance(arguments, str) and arguments.strip() else arguments or {}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return name.encode("utf-8", "replace").decode(), arguments
