"""Reads the output format of a request: a JSON schema, a regular expression, choices, or a grammar."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deltic.chat.json_schema import nested_deeper
from deltic.errors import RequestError, show

_MOST_NESTED = 64
_MOST_CHOICES = 10_000
_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """JSON that matches a schema. field: the request field with the schema.

    strict: the whole schema is enforced or the request is refused; else keywords may be left to the model.
    """

    schema: Any
    strict: bool = False
    field: str = field(default="response_format", compare=False)


@dataclass(frozen=True, slots=True)
class Regex:
    """Text that matches a regular expression as a whole, in the syntax of Rust's regex crate."""

    pattern: str
    field: str = field(default="structured_outputs.regex", compare=False)


@dataclass(frozen=True, slots=True)
class ChoiceFormat:
    """One of several texts."""

    texts: tuple[str, ...]
    field: str = field(default="structured_outputs.choice", compare=False)


@dataclass(frozen=True, slots=True)
class GrammarText:
    """A grammar in Lark's notation or in llama.cpp's GBNF."""

    text: str
    field: str = field(default="structured_outputs.grammar", compare=False)


OutputFormat = JsonSchema | Regex | ChoiceFormat | GrammarText


def response_format(value: Any, name: str = "response_format", ignored: list[str] | None = None) -> OutputFormat | None:
    """Reads OpenAI's `response_format` and the variants of other servers. Returns None for plain text.

    Raises RequestError that names a wrong field. ignored: gets the names of fields without effect.
    """
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(kind, str) or kind not in _FORMATS:
        raise RequestError(f"{name} must be an object whose type is {_TYPES}, not {show(value)}", name)
    read, names = _FORMATS[kind]
    key = next((key for key in names if value.get(key) is not None), "")
    found: OutputFormat | None
    if kind == "json_schema" and (not key or value.get("json_schema") is not None):
        key, found = "json_schema", _wrapped(value.get("json_schema"), f"{name}.json_schema", ignored)
    else:
        found = read(value.get(key), f"{name}.{key or (*names, '')[0]}".rstrip("."), value)
    _note(value, ("type", key, *_BESIDE), name, ignored)
    return found


def _wrapped(given: Any, name: str, ignored: list[str] | None) -> JsonSchema:
    if not isinstance(given, Mapping) or given.get("schema") is None:
        raise RequestError(f"{name} must be an object with a name and a schema, not {show(given)}", name)
    _note(given, ("schema", *_BESIDE), name, ignored)
    return _flat(given["schema"], f"{name}.schema", given)


def _flat(schema: Any, name: str, given: Mapping[str, Any]) -> JsonSchema:
    """Reads an object that contains a schema and `strict`."""
    path, strict = name.rpartition(".")[0], given.get("strict")
    if strict not in (None, True, False):
        raise RequestError(f"{path}.strict must be true or false, not {show(strict)}", f"{path}.strict")
    return json_schema(schema, bool(strict), name)


def _object(schema: Any, name: str, given: Mapping[str, Any]) -> JsonSchema:
    """Reads an object format, with or without a schema."""
    return JsonSchema(_OBJECT, field=name.rpartition(".")[0]) if schema is None else _flat(schema, name, given)


def _pattern(pattern: Any, name: str, given: Mapping[str, Any]) -> Regex:
    inner = pattern.get("regex") if isinstance(pattern, Mapping) else pattern
    return regex(inner, name)


def _note(given: Mapping[str, Any], known: Sequence[str], name: str, ignored: list[str] | None) -> None:
    """Adds the names of fields without effect to `ignored`."""
    if ignored is not None:
        ignored += [f"{name}.{key}" for key, value in given.items() if key not in known and value not in (None, False)]


_FORMATS: Mapping[str, tuple[Callable[[Any, str, Mapping[str, Any]], OutputFormat | None], tuple[str, ...]]] = {
    "text": (lambda value, name, given: None, ()),
    "json_object": (_object, ("schema", "value")), "json": (_object, ("value", "schema")),
    "json_schema": (_flat, ("schema", "value")),
    "regex": (_pattern, ("pattern", "regex", "value")),
    "grammar": (lambda value, name, given: grammar(value, name), ("grammar", "value")),
    "ebnf": (lambda value, name, given: grammar(value, name), ("ebnf", "grammar"))}
"""Readers of formats by type, and the fields that may hold the value, including those of llama.cpp, Together,
Fireworks, SGLang and text-generation-inference."""
_TYPES = "text, json_object, json_schema, regex or grammar"
_BESIDE = ("name", "description", "strict")


def json_schema(schema: Any, strict: bool = False, name: str = "response_format") -> JsonSchema:
    """Reads a JSON schema: an object, true, false, or JSON text."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{name} is no JSON: {error}", name) from None
    if not isinstance(schema, Mapping | bool):
        raise RequestError(f"{name} must be a JSON schema, an object, not {show(schema)}", name)
    if nested_deeper(schema, _MOST_NESTED):
        raise RequestError(f"{name} is nested more than {_MOST_NESTED} levels deep: move parts of it to $defs, and "
                           "refer to them", name)
    return JsonSchema(schema, strict, name)


def structured_outputs(value: Any, name: str = "structured_outputs", ignored: list[str] | None = None
                       ) -> OutputFormat | None:
    """Reads vLLM's `structured_outputs`: one of json, json_object, regex, choice, grammar."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise RequestError(f"{name} must be an object, not {show(value)}", name)
    unknown = next((key for key in value if key not in (*_READERS, "json_object", *_IGNORED)), None)
    if unknown is not None:
        raise RequestError(f"{name}.{unknown} is not supported: use one of json, json_object, regex, choice, grammar",
                           f"{name}.{unknown}")
    _note(value, (*_READERS, "json_object"), name, ignored)
    found = [read(value[kind], f"{name}.{kind}") for kind, read in _READERS.items() if value.get(kind) is not None]
    if value.get("json_object"):
        found.append(JsonSchema(_OBJECT, field=f"{name}.json_object"))
    if len(found) != 1:
        raise RequestError(f"{name} must have one of json, json_object, regex, choice, grammar; it has {len(found)}",
                           name)
    return found[0]


def only_format(formats: Sequence[OutputFormat | None]) -> OutputFormat | None:
    """Returns the only format that is given. Raises RequestError if there are several."""
    found = [given for given in formats if given]
    if len(found) > 1:
        raise RequestError(f"{found[0].field} and {found[1].field} both set the format of the answer: give one",
                           found[0].field)
    return found[0] if found else None


_OF_CALLS = (response_format, structured_outputs)


def as_format(response_format: Any = None, structured_outputs: Any = None) -> OutputFormat | None:
    """Returns the format that is given, if any. Raises RequestError if both are given."""
    given = (response_format, structured_outputs)
    return only_format([read(value) for read, value in zip(_OF_CALLS, given, strict=True)])


def regex(value: Any, name: str) -> Regex:
    return Regex(_text(value, name), name)


def choice(value: Any, name: str) -> ChoiceFormat:
    texts = tuple(value) if isinstance(value, list | tuple) else ()
    if not texts or len(texts) > _MOST_CHOICES or not all(isinstance(text, str) and text for text in texts):
        raise RequestError(f"{name} must be a list of 1 to {_MOST_CHOICES} non-empty texts, not {show(value)}", name)
    return ChoiceFormat(texts, name)


def grammar(value: Any, name: str) -> GrammarText:
    return GrammarText(_text(value, name), name)


def _json(value: Any, name: str) -> JsonSchema:
    return json_schema(value, True, name)


_READERS: Mapping[str, Callable[[Any, str], OutputFormat]] = {
    "json": _json, "regex": regex, "choice": choice, "grammar": grammar}
_IGNORED = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
"""Options of vLLM's own grammar backends, which have no effect here."""
GUIDED = {f"guided_{kind}": read for kind, read in _READERS.items()}
"""Readers of vLLM's older request fields."""


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise RequestError(f"{name} must be text, not {show(value)}", name)
    return value
