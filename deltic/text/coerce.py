"""Gives the text of a tool argument the type that the tool's JSON schema asks for."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping
from typing import Any

_PYTHON_WORDS = {"True": True, "true": True, "False": False, "false": False}
_NULLS = ("null", "None")
_MAX_DEPTH = 8
_TYPE_NAMES: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string",
                                type(None): "null", dict: "object", list: "array"}


def coerce(value: Any, schema: Any, root: Any = None) -> Any:
    """The value as the schema's types want it; a value that fits none of them stays as it is.

    Text becomes null, boolean, number, object or array where the schema allows that, in JSON's or Python's
    spelling. Other values become their JSON text where only strings are allowed. `root` resolves references.
    """
    types = _types(schema, root if root is not None else schema, 0)
    if not isinstance(value, str):
        return dumps(value) if types == {"string"} and value is not None else value
    for name, read in _READERS:
        if name in types:
            found, parsed = read(value.strip())
            if found:
                return parsed
    return value


def loads(text: str) -> Any:
    """Read JSON, or a Python literal of JSON's types; ValueError if it is neither."""
    for read in (json.loads, ast.literal_eval):
        try:
            return _plain(read(text))
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    raise ValueError("neither JSON nor a Python literal")


def dumps(value: Any) -> str:
    """JSON text that can be sent as UTF-8, whatever escapes the value was read from."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise ValueError("keys must be strings")
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int) or _is_finite(value):
        return value
    raise ValueError(f"{type(value).__name__} is not a type of JSON")


def _is_finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _types(schema: Any, root: Any, depth: int) -> set[str]:
    """All types that a schema names, directly or through references, unions and enumerations."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return set()
    declared = schema.get("type")
    names = declared if isinstance(declared, list) else [declared]
    types = {name for name in names if isinstance(name, str)}
    types = types or {_TYPE_NAMES[type(value)] for value in _values(schema) if type(value) in _TYPE_NAMES}
    for part in _parts(schema, root):
        types |= _types(part, root, depth + 1)
    return types or ({"object"} if "properties" in schema else {"array"} if "items" in schema else set())


def _values(schema: Mapping[str, Any]) -> list[Any]:
    return [*_list(schema, "enum"), *([schema["const"]] if "const" in schema else [])]


def _parts(schema: Mapping[str, Any], root: Any) -> list[Any]:
    parts = [part for key in ("anyOf", "oneOf", "allOf") for part in _list(schema, key)]
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target = root
        for name in reference[2:].split("/"):
            target = target.get(name) if isinstance(target, Mapping) else None
        parts.append(target)
    return parts


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _read_null(text: str) -> tuple[bool, Any]:
    return text in _NULLS, None


def _read_boolean(text: str) -> tuple[bool, Any]:
    return text in _PYTHON_WORDS, _PYTHON_WORDS.get(text)


def _read_integer(text: str) -> tuple[bool, Any]:
    found, value = _read_number(text)
    whole = found and value == int(value)
    return whole, int(value) if whole else None


def _read_number(text: str) -> tuple[bool, Any]:
    try:
        value = _plain(json.loads(text))
    except ValueError:
        return False, None
    return isinstance(value, int | float) and not isinstance(value, bool), value


def _read_container(kind: type) -> Any:
    def read(text: str) -> tuple[bool, Any]:
        try:
            value = loads(text) if text[:1] in "[{" else None
        except ValueError:
            return False, None
        return isinstance(value, kind), value
    return read


_READERS = (("null", _read_null), ("boolean", _read_boolean), ("integer", _read_integer),
            ("number", _read_number), ("object", _read_container(dict)), ("array", _read_container(list)))
