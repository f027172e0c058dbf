"""Converts tool arguments to the types of the tool's schema, and writes them as JSON while they are read."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

from deltic.chat import json_schema
from deltic.chat.json_schema import has_type

# Matches a string without line breaks, a Python keyword, a bracket of a tuple, a comma before a closing bracket.
_PYTHON_TOKEN = re.compile(r"""('(?:[^'\\\r\n]|\\.)*+'|"(?:[^"\\\r\n]|\\.)*+")|\b(True|False|None)\b|([()])"""
                           r"""|(?<=[^\s\[({,]),(?=\s*[\])}])""", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:([0-7]{1,3})|x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ESCAPED = {"\n": "", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t",
            "v": "\v"}
_JSON_WORDS = {"True": "true", "False": "false", "None": "null"}
_PYTHON_WORDS = {"True": True, "true": True, "False": False, "false": False}
_NULLS = ("null", "None")
_CONVERTED = frozenset(("null", "boolean", "integer", "number", "object", "array"))
_MAX_DEPTH = 100
MAX_JSON_CHARS = 1 << 20  # json.loads holds the GIL, for 40 ms at most
_MAX_LITERAL = 1 << 16
_SURROGATE = re.compile("[\ud800-\udfff]")


class Schema(dict[str, Any]):
    """A JSON schema of a tool's parameters that caches the types of its parts."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        super().__init__(parameters)
        self.known: dict[int, set[str] | None] = {}

    @cached_property
    def properties(self) -> Mapping[str, Any]:
        return json_schema.properties_of(self, self)


def coerce(value: Any, schema: Any, root: Any = None) -> Any:
    """Converts a value to a type of the schema. A value that fits no type is returned unchanged.

    Text in JSON's or Python's spelling becomes null, boolean, number, object or array if the schema allows it. Other
    values become JSON text if only strings are allowed. `root` resolves references.
    """
    types = _types(schema, root if root is not None else schema)
    if not isinstance(value, str):
        return dumps(value) if types == {"string"} and value is not None else value
    text = value.strip()
    if "null" in types and text in _NULLS:
        return None
    if "boolean" in types and text in _PYTHON_WORDS:
        return _PYTHON_WORDS[text]
    number = _number(text) if types & {"integer", "number"} else None
    if number is not None and "integer" in types and number == int(number):
        return int(number)
    if number is not None and "number" in types:
        return number
    if types & {"object", "array"} and text[:1] in ("[", "{"):
        with suppress(ValueError):
            parsed = loads(text)
            if has_type(parsed, types & {"object", "array"}):
                return parsed
    return value


def typed(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the arguments of a call to the types of the tool's schema."""
    return {key: coerce(value, argument_schema(key, schema), schema) for key, value in arguments.items()}


def argument_schema(key: str, schema: Mapping[str, Any]) -> Any:
    """Returns the schema of one parameter, or None if there is none."""
    properties = schema.properties if isinstance(schema, Schema) else json_schema.properties_of(schema, schema)
    return properties.get(key, schema.get("additionalProperties"))


def types_of(key: str, schema: Mapping[str, Any]) -> set[str]:
    """Returns the types that a parameter may have, or an empty set if they are unknown."""
    return _types(argument_schema(key, schema), schema)


def stays_text(key: str, schema: Mapping[str, Any]) -> bool:
    """Returns True if `coerce` never changes text for this parameter."""
    return types_of(key, schema).isdisjoint(_CONVERTED)


def _types(schema: Any, root: Any) -> set[str]:
    return json_schema.types_of(schema, root, root.known if isinstance(root, Schema) else {})


def loads(text: str) -> Any:
    """Reads JSON, or JSON values in Python's spelling. Raises ValueError for other, too long or too deep values."""
    try:
        return read_json(text)
    except ValueError:
        if len(text) > _MAX_LITERAL:
            raise
    return read_json(_PYTHON_TOKEN.sub(_json_token, text))  # in linear time


def _json_token(found: re.Match[str]) -> str:
    """Translates a token of a Python literal into JSON."""
    string, word, bracket = found.groups()
    if string:
        return json.dumps(_ESCAPE.sub(_unescape, string[1:-1]))
    if word:
        return _JSON_WORDS[word]
    return {"(": "[", ")": "]"}.get(bracket, "")


def _unescape(found: re.Match[str]) -> str:
    octal, *codes, other = found.groups()
    code = next((int(code, 16) for code in codes if code), int(octal, 8) if octal else None)
    if code is not None:
        return chr(code)
    if other in "NxuU\r":  # character names, and escapes that are cut short
        raise ValueError(f"unknown escape {found[0]}")
    return _ESCAPED.get(other, found[0])


def read_json(text: str) -> Any:
    """Reads JSON. Raises ValueError as `loads` does."""
    if len(text) > MAX_JSON_CHARS:
        raise ValueError(f"longer than {MAX_JSON_CHARS} characters")
    value = _read_json(text)
    if json_schema.nested_deeper(value, _MAX_DEPTH):  # a deeper value could not be written and copied
        raise ValueError(f"nested more than {_MAX_DEPTH} levels deep")
    return value


def dumps(value: Any) -> str:
    """Returns JSON that is valid UTF-8: lone surrogates become the replacement character."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


def _read_json(text: str) -> Any:
    try:
        return json.loads(text, strict=False, parse_constant=_not_json, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _not_json(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large")
    return value


def _number(text: str) -> int | float | None:
    try:
        value = _read_json(text) if len(text) <= _MAX_LITERAL else None
    except ValueError:
        return None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


class CallDelta(NamedTuple):
    """A piece of a call: its name, or more of its arguments. `written` is as in ToolDelta."""

    name: str | None
    arguments: str = ""
    written: str = ""


class ToolArguments:
    """Writes the calls of one block to `out`, and text between them to `outside`.

    streams: strings are emitted as they arrive, if the schema cannot change their type. decodes: text is read as JSON
    if it is valid. drops_empty: ignores calls without arguments. typed: a value of an allowed type is not converted.
    """

    def __init__(self, schemas: Mapping[str, Schema], *, streams: bool, decodes: bool,
                 drops_empty: bool) -> None:
        self.out: list[CallDelta] = []
        self.outside: list[str] = []
        self.typed = False
        self._schemas = schemas
        self._streams = streams
        self._decodes = decodes
        self._drops_empty = drops_empty
        self._schema = Schema({})
        self._keys: set[str] | None = None  # keys of the open call
        # the open value
        self._key: str | None = None
        self.live = False  # the value's text is emitted as it arrives
        self._begun = False
        self._repeated = False  # the call had a value with this key before
        self._text: list[str] = []

    @property
    def open(self) -> bool:
        return self._keys is not None

    def knows(self, name: str) -> bool:
        return name in self._schemas

    def takes(self, key: str) -> bool:
        """Returns True if the call has no value for this key yet and the schema has the key, or has no properties."""
        names = self._schema.properties
        return key != self._key and key not in (self._keys or ()) and (not names or key in names)

    def begin(self, name: str) -> None:
        self._schema, self._keys = self._schemas.get(name, Schema({})), set()
        self.out.append(CallDelta(name))

    def key(self, key: str) -> None:
        """Begins a value. A second value with the same key is not part of the call."""
        assert self._keys is not None
        self._key, self._begun, self._text, self._repeated = key, False, [], key in self._keys
        self.live = self._streams and not self._repeated and stays_text(key, self._schema)

    def text(self, text: str) -> None:
        if self.live and text:
            self._emit_text(dumps(text)[1:-1])
        elif self._key is not None:
            self._text.append(text)

    def skip(self) -> None:
        """Drops a key without a value."""
        self._key = None

    def end_text(self) -> None:
        """Ends a text value if one is open."""
        if self._key is None:
            return
        if self.live:
            self._emit_text('"')
            self._key = None
        else:
            self.value("".join(self._text))

    def value(self, written: Any) -> None:
        """Sets the whole value. Text may spell a value of another type."""
        key, self._key = self._key, None
        if key is None:
            return
        if self._repeated:
            self.outside += [written if isinstance(written, str) else dumps(written), "\n"]
            return
        if self.typed and has_type(written, types_of(key, self._schema)):
            self._emit(key, written, written)
            return
        if self._decodes and isinstance(written, str):
            written = _decoded(written, types_of(key, self._schema) == {"string"})
        typed = coerce(written, argument_schema(key, self._schema), self._schema)
        self._emit(key, typed, written)

    def end(self) -> None:
        if self._keys is None:
            return
        self.end_text()
        if not self._keys and self._drops_empty:
            self.out.pop()
        else:
            closing = "}" if self._keys else "{}"
            self.out.append(CallDelta(None, closing, closing))
        self._keys = None

    def copy(self) -> ToolArguments:
        twin = copy.copy(self)
        twin.out = self.out.copy()
        twin.outside = self.outside.copy()
        twin._text = self._text.copy()
        twin._keys = None if self._keys is None else self._keys.copy()
        return twin

    def _emit(self, key: str, typed: Any, written: Any) -> None:
        before = self._key_text(key)
        self.out.append(CallDelta(None, before + dumps(typed), before + dumps(written)))

    def _emit_text(self, escaped: str) -> None:
        if not self._begun:
            assert self._key is not None
            self._begun, escaped = True, f'{self._key_text(self._key)}"{escaped}'
        self.out.append(CallDelta(None, escaped, escaped))

    def _key_text(self, key: str) -> str:
        assert self._keys is not None
        self._keys.add(key)
        return f"{', ' if len(self._keys) > 1 else '{'}{dumps(key)}: "


def _decoded(text: str, wants_text: bool) -> Any:
    """Decodes JSON text. Returns other text unchanged, and also JSON of other types if only strings are allowed."""
    try:
        value = read_json(text)
    except ValueError:
        return text
    return value if isinstance(value, str) or not wants_text else text
