"""Analyses JSON schemas for tool arguments, and rewrites them for llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from deltic.config.reading import GenerationDefaults

_NAMES: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null",
                           dict: "object", list: "array"}
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_ONE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames",
        "unevaluatedItems", "unevaluatedProperties")
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_LARGEST = 9223372036854774784
"""Largest double below 2**63. llguidance reads bounds as doubles and accepts no larger ones."""
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_MAX_COUNT = 1 << 30  # characters or items: no answer has more
_MAX_NUMBER = 10_000_000_000  # bound for numbers that have none
_STEP = 0.01  # resolution of bounded numbers
_OPEN_KEYWORDS = {"patternProperties", "unevaluatedProperties", "maxProperties", "$ref", "anyOf", "oneOf"}
_NAME, _SCALARS = "^[a-zA-Z][a-zA-Z0-9_]{0,23}$", ["string", "integer", "boolean", "null"]
_MAX_NAMES, _MAX_NESTED, _MAX_WITHIN = 100, 64, 3
_MAX_PROBES, _MAX_STEPS = 5_000, 16
_ROOT = "root"
_DEFINITION = re.compile(r"#/(\$defs|definitions)/([^/~%]+)")
_ANNOTATIONS = frozenset(("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
                          "$comment", "$id", "$anchor"))

Change = Callable[[dict[str, Any]], dict[str, Any]]
Probe = Callable[[Mapping[str, Any]], str]
"""Function that takes a schema and returns llguidance's error, or "" if the schema is valid."""


def resolve(reference: Any, root: Any) -> Any:
    """Returns the part of the schema `root` that a reference names by path or anchor, or None."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    path = unquote(reference[1:])
    if path and not path.startswith("/"):
        return next((part for part in parts(root) if path in (part.get("$anchor"), part.get("$dynamicAnchor"))), None)
    target: Any = root
    for name in path.split("/", _MAX_NAMES)[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list):
            target = target[int(name)] if name.isdecimal() and len(name) < 8 and int(name) < len(target) else None
        else:
            target = target.get(name) if isinstance(target, Mapping) else None
    return target


def within(part: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a part of a schema as a complete schema in which its references still resolve."""
    found = dict(part) if isinstance(part, Mapping) else {"allOf": [part]}
    needed = _definitions(found, root)
    if needed is not None:
        return found | needed
    return {**{name: root[name] for name in ("$id", "$schema") if name in root}, **_changed(found, _moved),
            "$defs": {_ROOT: _changed(root, _moved)}}


def _definitions(part: Any, root: Any) -> dict[str, Any] | None:
    """Returns the definitions that a part refers to; None if it has other references."""
    found: dict[str, dict[str, Any]] = {}
    left = [part]
    while left:
        for inner in parts(left.pop()):
            if "$dynamicRef" in inner:
                return None
            if "$ref" not in inner:
                continue
            place = _DEFINITION.fullmatch(str(inner["$ref"]))
            if not place:
                return None
            kind, name = place.groups()
            known = found.setdefault(kind, {})
            if name not in known:
                known[name] = resolve(inner["$ref"], root)
                left.append(known[name])
    return found


def _moved(part: dict[str, Any]) -> dict[str, Any]:
    reference = part.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        part["$ref"] = f"#/$defs/{_ROOT}{reference[1:]}"
    return {name: value for name, value in part.items() if name not in ("$id", "$schema")}


def types_of(schema: Any, root: Any, known: dict[int, set[str] | None]) -> set[str]:
    """Returns the types that a schema names, or an empty set if it names none.

    known: cache by identity of the schema; it also ends cycles of references.
    """
    return _types(schema, root, known, 0) or set()


def properties_of(schema: Any, root: Any, seen: set[int] | None = None) -> dict[str, Any]:
    """Returns the properties of a schema, also through references and unions. seen: schemas to skip, by identity."""
    seen = seen if seen is not None else set()
    if not isinstance(schema, Mapping) or id(schema) in seen:
        return {}
    seen.add(id(schema))
    found: dict[str, Any] = {}
    others = [*_list(schema, "allOf"), *_list(schema, "anyOf"), *_list(schema, "oneOf")]
    for part in [*others, *([resolve(schema["$ref"], root)] if "$ref" in schema else [])]:
        found |= properties_of(part, root, seen)
    own = schema.get("properties")
    return found | own if isinstance(own, dict) else found


def has_type(value: Any, types: set[str]) -> bool:
    """Returns True if the value has one of these types, or if there are none."""
    return not types or _NAMES.get(type(value)) in _wide(types)


def _types(schema: Any, root: Any, known: dict[int, set[str] | None], steps: int) -> set[str] | None:
    """Does the same as `types_of`, but returns None for any type."""
    if not isinstance(schema, Mapping) or id(schema) in known or steps > _MAX_STEPS:
        return known.get(id(schema))
    known[id(schema)] = None
    declared, values = schema.get("type"), _values(schema)
    named = {name for name in (declared if isinstance(declared, list) else [declared]) if isinstance(name, str)}
    found = named or {_NAMES[type(value)] for value in values if type(value) in _NAMES} or None
    for part in [*_list(schema, "allOf"), *([resolve(schema["$ref"], root)] if "$ref" in schema else [])]:
        found = _both(found, _types(part, root, known, steps + 1))
    for name in ("anyOf", "oneOf"):
        branches = [_types(part, root, known, steps + 1) for part in _list(schema, name)]
        if branches and None not in branches:
            found = _both(found, set().union(*(branch for branch in branches if branch)))
    if found is None and ("properties" in schema or "items" in schema):
        found = {"object"} if "properties" in schema else {"array"}
    known[id(schema)] = found
    return found


def _both(one: set[str] | None, other: set[str] | None) -> set[str] | None:
    """Intersects two sets of types; returns their union if they are disjoint."""
    if not one or not other:
        return one or other
    return _wide(one) & _wide(other) or one | other


def _wide(types: set[str]) -> set[str]:
    return types | {"integer"} if "number" in types else types


def _values(schema: Mapping[str, Any]) -> list[Any]:
    return [*_list(schema, "enum"), *([schema["const"]] if "const" in schema else [])]


def _list(schema: Mapping[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


def parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yields the schema and all schemas in it."""
    if not isinstance(schema, Mapping):
        return
    yield schema
    for _, inner in _within(schema):
        yield from parts(inner)


def fitted(schema: Any) -> dict[str, Any]:
    """Adapts a schema to llguidance: lowers bounds to its largest, and drops limits that no answer can reach."""
    root = schema if isinstance(schema, Mapping) else {"allOf": [schema]}
    return _changed(root, lambda part: _fit(part, root))


def loosened(schema: Any, probe: Probe) -> tuple[dict[str, Any], set[str]]:
    """Returns the schema without the keywords that llguidance refuses, and the names of these keywords."""
    dropped, objections = set[str](), dict[str, str]()

    def asked(tried: Mapping[str, Any]) -> str:
        key = json.dumps(tried, sort_keys=True)
        if key not in objections and len(objections) < _MAX_PROBES:
            objections[key] = probe(tried)
        return objections.get(key, "")

    def loosen(part: dict[str, Any]) -> dict[str, Any]:
        kept = {name: value for name, value in part.items() if name in _ANNOTATIONS or (
            _refers(value, schema) if name == "$ref" else not asked(_alone(part, name)))}
        dropped.update(part.keys() - kept.keys())
        for name in _MAPS:
            for key, inner in kept.get(name, {}).items():
                if not isinstance(inner, Mapping | bool):
                    kept[name] = {**kept[name], key: True}
                    dropped.add(name)
        return kept

    return _changed(schema if isinstance(schema, Mapping) else {}, loosen), dropped


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits on string length and array size for JSON schemas that set none."""

    length: int
    items: int

    @classmethod
    def of(cls, generation: GenerationDefaults) -> Bounds | None:
        """Returns the limits of a model's generation config, if it has any."""
        length, items = generation.json_max_length, generation.json_max_items
        return cls(length, items) if length and items else None

    def on(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the schema with these limits. Also bounds numbers and additional properties."""
        merged = any("allOf" in part for part in parts(schema))
        return _changed(schema, lambda part: self._bound(part, merged))

    def _bound(self, part: dict[str, Any], merged: bool) -> dict[str, Any]:
        declared = part.get("type")
        types = declared if isinstance(declared, list) else [declared]
        if "string" in types and not part.keys() & {"maxLength", "enum", "const", "pattern", "format"}:
            part["maxLength"] = max(self.length, part.get("minLength", 0))
        if "array" in types:
            part.setdefault("maxItems", max(self.items, part.get("minItems", 0)))
        if {"integer", "number"} & {*types} and not part.keys() & {"enum", "const", "multipleOf"}:
            lower, upper = (next((part[name] for name in names if name in part), bound)
                            for names, bound in ((_LOWER, -_MAX_NUMBER), (_UPPER, _MAX_NUMBER)))
            if not part.keys() & {*_LOWER, *_UPPER}:
                part |= {"minimum": lower, "maximum": upper}
            if "number" in types and lower + 1 <= upper:
                part["multipleOf"] = _STEP
        if "object" in types and not merged and not part.keys() & _OPEN_KEYWORDS:
            self._close(part)
        return part

    def _close(self, part: dict[str, Any]) -> None:
        """Allows only the named properties of an object; without names, a few with short ones."""
        named, others = part.get("properties") or {}, part.get("additionalProperties", True)
        if others is False or any(name not in named for name in part.get("required", ())):
            return
        part["additionalProperties"] = False
        if "properties" not in part:
            part["patternProperties"] = {_NAME: others if isinstance(others, Mapping) else self._value(_MAX_WITHIN)}
            part["maxProperties"] = max(self.items, part.get("minProperties", 0))

    def _value(self, levels: int) -> dict[str, Any]:
        """Returns a schema of any value with at most `levels` nested levels."""
        if not levels:
            return {"type": _SCALARS}
        inner = self._value(levels - 1)
        return {"type": [*_SCALARS, "array", "object"], "items": inner, "patternProperties": {_NAME: inner},
                "additionalProperties": False, "maxProperties": self.items}


def _alone(part: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns a schema with only one keyword of another schema, without the schemas in it."""
    value = part[name]
    if name in _MAPS and isinstance(value, Mapping):
        return {name: dict.fromkeys(value, True)}
    if name in _LISTS and isinstance(value, list):
        return {name: [True] * len(value)} if name == "prefixItems" or not value else {}
    if name in _ONE and isinstance(value, Mapping | bool):
        return {}
    return {name: value}


def _refers(reference: Any, root: Any) -> bool:
    if not isinstance(reference, str):
        return False
    where = reference.partition("#")[0]
    known = not where or any(str(part.get("$id", "\0")).endswith(where) for part in parts(root))
    return known and (bool(where) or resolve(reference, root) is not None)


def _told_apart(branches: list[Any], root: Any) -> bool:
    """Returns True if the schemas exclude each other: one property is required, and a different constant, in each."""
    seen: dict[str, list[set[str]]] = {}
    for branch in branches:
        for _ in range(_MAX_STEPS):
            if isinstance(branch, Mapping) and "$ref" in branch:
                branch = resolve(branch["$ref"], root)
        if not isinstance(branch, Mapping) or branch.get("type") != "object":
            return False
        named = branch.get("properties")
        for name in branch.get("required", ()):
            values = _values(named.get(name, {})) if isinstance(named, Mapping) else []
            seen.setdefault(name, []).append({json.dumps(value) for value in values})
    return any(len(sets) == len(branches) and all(sets) and sum(map(len, sets)) == len(set().union(*sets))
               for sets in seen.values())


def _fit(part: dict[str, Any], root: Any) -> dict[str, Any]:
    for name in (*_LOWER, *_UPPER):
        bound = part.get(name)
        if isinstance(bound, int | float) and not isinstance(bound, bool):
            lower = name in _LOWER
            if lower == (bound < 0) and abs(bound) > _LARGEST:  # a bound on the other side is unsatisfiable
                part[name] = -_LARGEST if lower else _LARGEST
    for name in _COUNTS:
        count = part.get(name)
        if isinstance(count, float) and count.is_integer():
            part[name] = count = int(count)
        if isinstance(count, int) and count > _MAX_COUNT and name.startswith("max"):
            del part[name]
    branches = part.get("oneOf")
    if isinstance(branches, list) and "anyOf" not in part and _told_apart(branches, root):
        part["anyOf"] = part.pop("oneOf")
    if "json-schema.org" not in str(part.get("$schema", "json-schema.org")):
        del part["$schema"]
    return part


def _changed(schema: Mapping[str, Any], change: Change, depth: int = 0) -> dict[str, Any]:
    """Returns a copy with `change` applied to every schema in it, outermost first."""
    def inner(value: Any) -> Any:
        return _changed(value, change, depth + 1) if isinstance(value, Mapping) and depth < _MAX_NESTED else value

    found = change(dict(schema))
    for name, value in found.items():
        if name in _MAPS and isinstance(value, Mapping):
            found[name] = {key: inner(item) for key, item in value.items()}
        elif isinstance(value, list) and (name in _LISTS or name == "items"):
            found[name] = [inner(item) for item in value]
        elif name in _ONE:
            found[name] = inner(value)
    return found


def _within(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the direct subschemas with their keywords."""
    for name, value in schema.items():
        if name in _MAPS and isinstance(value, Mapping):
            yield from ((name, item) for item in value.values())
        elif isinstance(value, list) and (name in _LISTS or name == "items"):
            yield from ((name, item) for item in value)
        elif name in _ONE:
            yield name, value


def nested_deeper(value: Any, levels: int) -> bool:
    """Returns True if the JSON value is nested more than `levels` deep."""
    level = [value]
    for _ in range(levels + 1):
        level = [item for value in level if isinstance(value, Mapping | list)
                 for item in (value.values() if isinstance(value, Mapping) else value)]
    return bool(level)


def keywords_of(warnings: list[str]) -> set[str]:
    """Returns the keywords that llguidance's warnings name as not enforced."""
    said = " ".join(warnings)
    found = set(re.findall(r'"([^"\\]+)"', " ".join(re.findall(r"Unimplemented keys: \[([^]]*)\]", said))))
    return found | ({"format"} if "Unknown format" in said else set()) | ({"oneOf"} if "oneOf not" in said else set())
