"""Converts the string rules of JSON schemas to Lark's terminal expressions, for XML calls with plain strings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Set
from typing import Any

from deltic.chat.json_schema import resolve

ANY = "(?s:.*)"
ALL, NOTHING = f"/{ANY}/", ""
_MAX_STEPS = 16
_NEVER_ALONE = frozenset(("anyOf", "oneOf", "allOf", "not", "if", "patternProperties", "minProperties", "maxProperties",
                          "propertyNames", "dependentRequired", "dependentSchemas", "dependencies", "enum", "const",
                          "unevaluatedProperties", "$dynamicRef", "$recursiveRef"))
"""Keywords of an object schema that do not apply to single properties."""
_NO_TEXT_RULE = frozenset(("not", "if", "$dynamicRef", "$recursiveRef"))
"""Keywords about strings without an expression."""
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_DAYS = {"28": "(0[1-9]|1[0-9]|2[0-8])", "30": "(0[1-9]|[12][0-9]|30)", "31": "(0[1-9]|[12][0-9]|3[01])"}
_DATE = (f"([1-9][0-9]{{3}}-(02-{_DAYS['28']}|(0[469]|11)-{_DAYS['30']}|(0[13578]|1[02])-{_DAYS['31']})"
         "|[1-9][0-9](0[48]|[2468][048]|[13579][26])-02-29)")
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
FORMATS: Mapping[str, str] = {
    "date": _DATE, "time": _TIME, "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "duration": "P([0-9]+W|[0-9]+D(T[0-9]+H([0-9]+M([0-9]+S)?)?)?|T[0-9]+[HMS])",
    "ipv4": rf"{_OCTET}(\.{_OCTET}){{3}}",
    "ipv6": "([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}|::([0-9a-f]{1,4}(:[0-9a-f]{1,4}){0,5})?",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,3}}",
    "email": rf"[a-zA-Z0-9_+-]+(\.[a-zA-Z0-9_+-]+)*@{_LABEL}(\.{_LABEL}){{1,3}}",
    "uri": "[a-zA-Z][a-zA-Z0-9+.-]*:[a-zA-Z0-9./?#@!$&()*+,;=_~-]+"}
"""Formats that llguidance enforces in JSON. The expressions match some or all of their texts."""
_SPACE = (r"[ \t\r\n\f\v\x{1c}-\x{1f}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}]*")
_READ: Mapping[str, str] = {
    "null": "(null|None)", "boolean": "([Tt]rue|[Ff]alse)", "integer": "-?[0-9](?s:.*)", "number": "-?[0-9](?s:.*)",
    "object": r"\{(?s:.*)", "array": r"\[(?s:.*)", "string": '"(?s:.*)'}
"""Expressions of the texts that the reader takes for values of other types."""


def object_of(schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Resolves the schema of an object; None if its properties cannot be checked one by one."""
    part: Any = schema
    for _ in range(_MAX_STEPS):
        if not isinstance(part, Mapping) or part.keys() & _NEVER_ALONE:
            return None
        if "$ref" not in part:
            break
        if part.keys() & {"properties", "required", "additionalProperties"}:
            return None
        part = resolve(part["$ref"], schema)
    properties, required = part.get("properties", {}), part.get("required", ())
    if not isinstance(properties, Mapping) or not isinstance(required, list | tuple):
        return None
    others = not properties and isinstance(part.get("additionalProperties"), Mapping)
    fits = part.get("type", "object") == "object" and not others and all(key in properties for key in required)
    return part if fits else None


def read_otherwise(types: Set[str], decodes: bool) -> list[str]:
    """Returns expressions of the texts that are not read as strings if these types are allowed. decodes: the form
    reads values as JSON."""
    kinds = set(types) - {"string"}
    if decodes and types:
        kinds = {"string"} if types == {"string"} else set(_READ)
    return sorted({slashed(_SPACE + _READ[kind] + _SPACE) for kind in kinds if kind in _READ})


class TextSchemas:
    """Expressions of the strings that parts of a schema allow.

    ignored: gets the keywords without an expression; None: they leave the schema without an expression.
    """

    def __init__(self, root: Mapping[str, Any], ignored: set[str] | None) -> None:
        self._root, self._ignored = root, ignored

    def _lacks(self, names: Iterable[str]) -> bool:
        """True if these keywords without an expression must not be ignored."""
        if self._ignored is not None:
            self._ignored.update(names)
        return self._ignored is None

    def of(self, part: Any, steps: int = 0) -> str | None:
        """Returns an expression, ALL or NOTHING; None if there is none."""
        if not isinstance(part, Mapping):
            return NOTHING if part is False else ALL
        declared = part.get("type", "string")
        if "string" not in (declared if isinstance(declared, list) else [declared]):
            return NOTHING
        if steps > _MAX_STEPS:
            return None if self._lacks(["$ref"]) else ALL
        if (unknown := part.keys() & _NO_TEXT_RULE) and self._lacks(unknown):
            return None
        found = [self._own(part)]
        if "$ref" in part:
            target = resolve(part["$ref"], self._root)
            found.append(None if target is None else self.of(target, steps + 1))
        found += [self.of(inner, steps + 1) for inner in part.get("allOf", ())]
        for name in ("anyOf", "oneOf"):
            if part.get(name):
                found.append(self._one_of([self.of(inner, steps + 1) for inner in part[name]], name))
        if None in found:
            return None
        wanted = [text for text in found if text not in (None, ALL)]
        return NOTHING if NOTHING in wanted else " & ".join(f"({text})" for text in wanted) or ALL

    def _one_of(self, texts: list[str | None], name: str) -> str | None:
        allowed = [text for text in texts if text != NOTHING]
        if None in allowed or (name == "oneOf" and len(allowed) > 1 and self._lacks(["oneOf"])):
            return None
        return ALL if ALL in allowed else " | ".join(f"({text})" for text in allowed)

    def _own(self, part: Mapping[str, Any]) -> str | None:
        """Returns the expression of the keywords for strings."""
        found: list[str] = []
        for values in ([part["const"]] if "const" in part else None, part.get("enum")):
            if isinstance(values, list):
                texts = [escaped(value) for value in values if isinstance(value, str)]
                if not texts:
                    return NOTHING
                found.append(slashed("|".join(texts)))
        if isinstance(part.get("pattern"), str):
            found.append(slashed(_searched(part["pattern"])))
        low, high = part.get("minLength", 0), part.get("maxLength")
        if low or high is not None:
            found.append(f"/(?s:.{{{low},{'' if high is None else high}}})/")
        form = FORMATS.get(str(part.get("format")))
        if form:
            found.append(slashed(form))
        elif "format" in part and self._lacks(["format"]):
            return None
        return " & ".join(found) or ALL


def _searched(pattern: str) -> str:
    """Returns the expression of texts that contain a match of the pattern."""
    begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith(r"\$")
    inner = pattern[begins:len(pattern) - ends]
    return ("" if begins else ANY) + f"({inner})" + ("" if ends else ANY)


def without(tag: str) -> str:
    """Returns a pattern of texts without this tag, which begins with `<`. Uses no negation: combined with a length
    limit it would cost llguidance thousands of states for each token."""
    rest = ""
    for sign in map(re.escape, reversed(tag[1:])):
        rest = f"[^<{sign}]|{sign}({rest})" if rest else f"[^<{sign}]"
    return f"([^<]|<+({rest}))*<*"


def escaped(text: str) -> str:
    """Returns a pattern of exactly this text."""
    return re.sub(r"\\(\s)", r"\1", re.escape(text))


def slashed(pattern: str) -> str:
    """Returns the pattern in Lark's notation."""
    return "/" + re.sub(r"\\.|/|\n", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), pattern,
                        flags=re.DOTALL) + "/"
