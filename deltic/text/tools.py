"""Reads tool calls out of generated text: the XML form of the family's templates, and the older JSON form.

    <function=NAME>                             {"name": NAME, "arguments": {KEY: VALUE}}
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deltic.text.coerce import coerce, dumps, loads

_FUNCTION = re.compile(r"<function=[ \t]*([^<>\s][^<>\n]*)>")
_FUNCTION_END = "</function>"
_PARAMETER = re.compile(r"<parameter=[ \t]*([^<>\s][^<>\n]*)>")
# A value may hold the text of a closing tag; the real one is followed by the next tag or by the end.
_VALUE_END = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>|\Z))|(?=\n<parameter=)")
_VALUE_TAG = re.compile(_VALUE_END.pattern + "|<function=|</function>")
_QUOTES = "\"'"


def tool_schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The parameter schema of each tool by name, from OpenAI's form; tools in another form have none."""
    functions = [tool.get("function", tool) for tool in tools if isinstance(tool, Mapping)]
    return {function["name"]: function["parameters"] for function in functions
            if isinstance(function, Mapping) and isinstance(function.get("name"), str)
            and isinstance(function.get("parameters"), Mapping)}


@dataclass(slots=True)
class CallBody:
    """What stands between `<tool_call>` and `</tool_call>`, as far as it has arrived."""

    text: str = ""

    @property
    def name(self) -> str | None:
        """The function's name as soon as it is certain; None for the JSON form, whose name may come last."""
        if self._is_json:
            return None
        found = _FUNCTION.search(self.text)
        return _clean_name(found[1]) if found else None

    @property
    def complete(self) -> bool:
        """Whether a closing tag here closes the call, rather than being text of an argument.

        An argument may quote a whole call, hence the balance.
        """
        if self._is_json:
            return _json_call(self.text, {}) is not None
        openings = len(_FUNCTION.findall(self.text))
        return not openings or (self.text.rstrip().endswith(_FUNCTION_END)
                                and self.text.count(_FUNCTION_END) >= openings)

    def calls(self, schemas: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
        """Name and arguments (a JSON object as text) of each call; empty if the text is no call at all."""
        if self._is_json:
            call = _json_call(self.text, schemas)
            return [call] if call else []
        return _xml_calls(self.text, schemas)

    def copy(self) -> CallBody:
        """An independent body with the same text."""
        return CallBody(self.text)

    @property
    def _is_json(self) -> bool:
        return self.text.lstrip()[:1] == "{"


def _clean_name(name: str) -> str:
    return name.strip().strip(_QUOTES) or name.strip()


def _json_call(text: str, schemas: Mapping[str, Mapping[str, Any]]) -> tuple[str, str] | None:
    try:
        call = loads(text.strip())
        name, arguments = call["name"], call.get("arguments", call.get("parameters"))
        arguments = loads(arguments) if isinstance(arguments, str) and arguments.strip() else arguments or {}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    name = name.encode("utf-8", "replace").decode()
    return name, _typed(arguments, schemas.get(name, {}))


def _xml_calls(text: str, schemas: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    calls = []
    opening = _FUNCTION.search(text)
    while opening:
        name = _clean_name(opening[1])
        arguments, end = _parameters(text, opening.end())
        calls.append((name, _typed(arguments, schemas.get(name, {}))))
        opening = _FUNCTION.search(text, end)
    return calls


def _parameters(text: str, start: int) -> tuple[dict[str, str], int]:
    """The parameters of the function that begins at `start`, and where they end."""
    found: dict[str, str] = {}
    while opening := _next_parameter(text, start):
        end, start = _value_end(text, opening.end())
        found[_clean_name(opening[1])] = text[opening.end():end].removeprefix("\n").removesuffix("\n")
    return found, start


def _next_parameter(text: str, start: int) -> re.Match[str] | None:
    opening = _PARAMETER.search(text, start)
    return opening if opening and _FUNCTION_END not in text[start:opening.start()] else None


def _value_end(text: str, start: int) -> tuple[int, int]:
    """Where the value that begins at `start` ends, and where its closing tag does, which may be missing."""
    depth, function_end = 0, -1
    for tag in _VALUE_TAG.finditer(text, start):
        if tag[0] == "<function=" and function_end >= 0:
            break
        if tag[0] == "<function=":
            depth += 1
        elif tag[0] == _FUNCTION_END and depth:
            depth -= 1
        elif tag[0] == _FUNCTION_END:
            function_end = tag.start() if function_end < 0 else function_end
        elif not depth:
            return tag.start(), tag.end()
    closing = _VALUE_END.search(text, start) if function_end < 0 else None
    end = closing.start() if closing else function_end if function_end >= 0 else len(text)
    return end, closing.end() if closing else end


def _typed(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    properties = schema.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    return dumps({key: coerce(value, known.get(key), schema) for key, value in arguments.items()})
