"""Objects to be answered as JSON, and their schemas as pydantic and zod write them."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

Json = dict[str, Any]
TYPES: dict[type, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}


@dataclass(frozen=True)
class Field:
    """A key and its value: a scalar, None, an `Object`, or a list of either.

    options: the texts that a Literal or Enum allows. optional: whether the schema allows null.
    """

    key: str
    value: Any
    options: tuple[str, ...] = ()
    optional: bool = False


@dataclass(frozen=True)
class Object:
    """The fields of one object; `name` is that of its class."""

    name: str
    fields: tuple[Field, ...]

    def plain(self) -> Json:
        return {field.key: plain(field.value) for field in self.fields}


def plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, Object):
        return value.plain()
    return [plain(item) for item in value] if isinstance(value, list) else value


def title(key: str) -> str:
    """What pydantic makes of a field's name."""
    return re.sub(r"[_\s]+", " ", key).title()


def _classes(thing: Object) -> Iterator[Object]:
    for field in thing.fields:
        first = field.value[0] if isinstance(field.value, list) and field.value else field.value
        if isinstance(first, Object):
            yield from _classes(first)
            yield first


def _typed(field: Field, value: Any, inline: bool) -> Json:
    """The type of a value; objects are referred to, or stand in their place."""
    if field.options:
        return {"enum": [*field.options], "type": "string"}
    if isinstance(value, Object):
        return zod(value) if inline else {"$ref": f"#/$defs/{value.name}"}
    if isinstance(value, list):
        return {"items": _typed(field, value[0] if value else "", inline), "type": "array"}
    return {"type": TYPES.get(type(value), "string")}


def _property(field: Field, described: str, strict: bool) -> Json:
    part = _typed(field, field.value, False)
    if field.optional:
        part = {"anyOf": [part, {"type": "null"}]} | ({} if strict else {"default": None})
    if described:
        part = {"description": described, **part}
    return part if "$ref" in part else part | {"title": title(field.key)}


def pydantic(thing: Object, rng: random.Random, *, strict: bool, described: bool) -> Json:
    """What `model_json_schema` gives; strict: with what OpenAI's `parse` adds."""

    def one(thing: Object) -> Json:
        properties = {}
        for field in thing.fields:
            about = f"The {field.key.replace('_', ' ')}" if described and rng.random() < 0.6 else ""
            properties[field.key] = _property(field, about, strict)
        required = [field.key for field in thing.fields if strict or not field.optional]
        part = {"properties": properties, **({"required": required} if required else {})}
        return part | {"title": thing.name, "type": "object"} | ({"additionalProperties": False} if strict else {})

    inner = {part.name: one(part) for part in _classes(thing)}
    return ({"$defs": inner} if inner else {}) | one(thing)


def zod(thing: Object) -> Json:
    """What zod's schemas become: without titles, objects in their places."""
    properties = {field.key: _typed(field, field.value, True) for field in thing.fields}
    for field in thing.fields:
        if field.optional:
            properties[field.key] = {"anyOf": [properties[field.key], {"type": "null"}]}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def camel(thing: Object) -> Object:
    """The same object with its keys as JavaScript has them."""

    def renamed(value: Any) -> Any:
        if isinstance(value, list):
            return [renamed(item) for item in value]
        return camel(value) if isinstance(value, Object) else value

    fields = (replace(f, key=re.sub(r"_(\w)", lambda m: m[1].upper(), f.key), value=renamed(f.value))
              for f in thing.fields)  # fmt: skip
    return replace(thing, fields=tuple(fields))
