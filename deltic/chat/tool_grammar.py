"""Builds a grammar for tool calls in the form in which the model writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

from deltic.chat.json_schema import resolve, types_of, within
from deltic.chat.response_format import JsonSchema, OutputFormat
from deltic.chat.structured import Part, Schemas, objection, part_of, quoted, slashed
from deltic.chat.tools import JSON, CallForm
from deltic.errors import RequestError, show

ANY = "(?s:.*)"
ALL, NOTHING = f"/{ANY}/", ""
_MAX_STEPS = 16
_NEVER_ALONE = frozenset(("anyOf", "oneOf", "allOf", "not", "if", "patternProperties", "minProperties", "maxProperties",
                          "propertyNames", "dependentRequired", "dependentSchemas", "dependencies", "enum", "const",
                          "unevaluatedProperties", "$dynamicRef", "$recursiveRef"))
"""Keywords of an object schema that do not apply to single properties."""
_NO_TEXT_RULE = frozenset(("not", "if", "$dynamicRef", "$recursiveRef"))
"""Keywords for strings that have no equivalent expression."""
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
"""String formats that llguidance enforces in JSON. The expressions match some or all texts of each format."""
_SPACE = (r"[ \t\r\n\f\v\x{1c}-\x{1f}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}]*")
_READ: Mapping[str, str] = {
    "null": "(null|None)", "boolean": "([Tt]rue|[Ff]alse)", "integer": "-?[0-9](?s:.*)", "number": "-?[0-9](?s:.*)",
    "object": r"\{(?s:.*)", "array": r"\[(?s:.*)", "string": '"(?s:.*)'}
"""Expressions of the texts that the reader takes for values of types other than string."""


def object_of(schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Resolves the schema of an object. Returns None if its properties cannot be checked one by one."""
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
    """Returns expressions for the texts that are not read as strings if these types are allowed. decodes: the form
    reads values as JSON."""
    kinds = set(types) - {"string"}
    if decodes and types:
        kinds = {"string"} if types == {"string"} else set(_READ)
    return sorted({slashed(_SPACE + _READ[kind] + _SPACE) for kind in kinds if kind in _READ})


class TextSchemas:
    """Converts parts of a schema to expressions for the strings that they allow.

    ignored: gets the keywords without an expression; None: such a keyword leaves the schema without an expression.
    """

    def __init__(self, root: Mapping[str, Any], ignored: set[str] | None) -> None:
        self._root, self._ignored = root, ignored

    def _lacks(self, names: Iterable[str]) -> bool:
        """Returns True if one of these keywords has no expression and must not be ignored."""
        if self._ignored is not None:
            self._ignored.update(names)
        return self._ignored is None

    def of(self, part: Any, steps: int = 0) -> str | None:
        """Returns an expression, ALL or NOTHING, or None if there is no expression."""
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
        """Returns the expression for the string keywords of a schema."""
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
    """Returns the expression for texts that contain a match of the pattern."""
    begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith(r"\$")
    inner = pattern[begins:len(pattern) - ends]
    return ("" if begins else ANY) + f"({inner})" + ("" if ends else ANY)


def without(tag: str) -> str:
    """Returns a pattern for texts without this tag, which begins with `<`. It uses no negation: combined with a length
    limit, a negation would cost llguidance thousands of states for each token."""
    rest = ""
    for sign in map(re.escape, reversed(tag[1:])):
        rest = f"[^<{sign}]|{sign}({rest})" if rest else f"[^<{sign}]"
    return f"([^<]|<+({rest}))*<*"


def escaped(text: str) -> str:
    return re.sub(r"\\(\s)", r"\1", re.escape(text))


_UNSATISFIABLE = "Unsatisfiable"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The tools that an answer may call: `names`, or all if empty. needed: it must call a tool. parallel: it may call
    several."""

    names: tuple[str, ...] = ()
    needed: bool = False
    parallel: bool = True

    @classmethod
    def read(cls, value: Any, parallel: bool = True) -> ToolChoice:
        """Reads OpenAI's `tool_choice`. For `none`, no tools are shown. Raises RequestError for a wrong field."""
        if value in (None, "auto", "none", "required"):
            return cls((), value == "required", parallel)
        kind = value.get("type") if isinstance(value, Mapping) else None
        if kind == "function":
            return cls((_name(value, "tool_choice"),), True, parallel)
        given = value.get("allowed_tools", value) if kind == "allowed_tools" else None
        if isinstance(given, Mapping) and isinstance(given.get("tools"), list) and given["tools"]:
            names = (_name(tool, f"tool_choice.tools[{place}]") for place, tool in enumerate(given["tools"]))
            if given.get("mode") not in (None, "auto", "required"):
                raise RequestError(f"tool_choice.mode must be auto or required, not {show(given.get('mode'))}",
                                   "tool_choice.mode")
            return cls(tuple(names), given.get("mode") == "required", parallel)
        raise RequestError(f"tool_choice must be none, auto, required, or name a function, not {show(value)}",
                           "tool_choice")

    def functions(self, tools: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
        """Returns the callable functions by their index among the tools. Raises RequestError if one is missing."""
        found = {place: tool.get("function", tool) for place, tool in enumerate(tools)}
        if not found and (self.needed or self.names):
            raise RequestError("tool_choice asks for a call, and there are no tools: give some", "tool_choice")
        known = [function["name"] for function in found.values()]
        unknown = next((name for name in self.names if name not in known), None)
        if unknown is not None:
            raise RequestError(f"tool_choice names {show(unknown)}, which is none of the tools", "tool_choice")
        return {place: function for place, function in found.items() if function["name"] in (self.names or known)}


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The allowed forms of an answer. output: the format of an answer without calls; None: any text. begun: token ids
    with which the answer begins, as part of the prompt and of the text; an end token after them ends it there."""

    calls: ToolChoice = ToolChoice()
    output: OutputFormat | None = None
    begun: tuple[int, ...] = ()


FREE: Final = AnswerForm()


def _name(value: Any, field: str) -> str:
    inner = value.get("function", value) if isinstance(value, Mapping) else None
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if not isinstance(name, str):
        raise RequestError(f'{field} must name a function, {{"type": "function", "function": {{"name": ...}}}}, not '
                           f"{show(value)}", field)
    return name


@dataclass(frozen=True, slots=True)
class CallAnswers:
    """Answers with calls.

    functions: the callable functions, by their index among the tools.
    needed: the answer must be a call; else it may also be text, or have the format `other`.
    parallel: several calls are allowed.
    """

    form: CallForm
    functions: Mapping[int, Mapping[str, Any]]
    needed: bool
    parallel: bool = True
    other: OutputFormat | None = None


def call_parts(calls: CallAnswers, tags: Mapping[str, str], schemas: Schemas) -> list[Part]:
    """Returns the grammar of answers with calls. tags: the names in a grammar of tags that are tokens."""
    rules = _Rules(calls.form, tags, schemas)
    functions = [rules.function(index, function) for index, function in calls.functions.items()]
    call = rules.add("call", " | ".join(functions))
    if calls.needed:
        rules.add("start", rules.block(call, calls.parallel))
    elif calls.other:
        rules.add("start", f"{rules.block(call, calls.parallel)} | @other")
    else:
        rules.add_text(call, calls.parallel)
    other = [] if calls.needed or not calls.other else [{"name": "other", **part_of(calls.other, schemas)}]
    return [{"lark_grammar": rules.text}, *other]


@dataclass(frozen=True, slots=True)
class _Rest:
    """The rule for the text after a parameter, up to the function's end.

    begun: the rule after the beginning of a parameter tag; "" if no parameter may follow. ends: the function may end at
    once.
    """

    rule: str
    begun: str = ""
    ends: bool = False


class _Rules:
    """The rules of a grammar in Lark's notation."""

    def __init__(self, form: CallForm, tags: Mapping[str, str], schemas: Schemas) -> None:
        self._form = form
        self._marks = tags
        self._schemas = schemas
        self._lines: list[str] = []

    @property
    def text(self) -> str:
        return "\n".join(self._lines) + "\n"

    def add(self, name: str, rule: str) -> str:
        self._lines.append(f"{name}: {rule}")
        return name.partition("[")[0]

    def add_text(self, call: str, parallel: bool) -> None:
        """Adds the rule for text with an optional block of calls at its end."""
        tag = self._form.block[0]
        if tag in self._marks:
            self.add("start", f"TEXT ({self.block(call, parallel)})?")
            self.add("TEXT", f"/{ANY}/")
            return
        opening = escaped(tag)
        self.add("start", f"TEXT | head {self.block(call, parallel, begun=True)}")
        self.add("head[lazy]", slashed(ANY + opening))
        self.add("TEXT", f"/{ANY}/ & ~{slashed(ANY + opening + ANY)}")

    def block(self, call: str, parallel: bool, begun: bool = False) -> str:
        """Adds the rule for the blocks of calls. begun: the rule starts after the first tag."""
        form = self._form
        opening, closing = self._marked(form.opening), self._marked(form.closing)
        first = self._marked(form.opening.removeprefix(form.block[0])) if begun else opening
        between = f" {quoted(form.between)}" if form.between else ""
        if form.one_block:
            more = f" ({between} {call})*" if parallel else ""
            return self.add("calls", f"{first} {call}{more} {closing}")
        more = f" ({between} {opening} {call} {closing})*" if parallel else ""
        return self.add("calls", f"{first} {call} {closing}{more}")

    def function(self, index: int, function: Mapping[str, Any]) -> str:
        """Adds the rule for a function. Its arguments are a JSON object if the form requires it, or if the schema
        cannot be enforced on single parameters."""
        given, strict = function.get("parameters"), bool(function.get("strict"))
        field = f"tools[{index}].function.parameters"
        schema = self._schemas.fit(JsonSchema(given if isinstance(given, Mapping) else {}, strict, field))
        self._schemas.part(schema, strict, field)  # raises for the same schemas as response_format
        parameters = None
        if self._form.parameter:
            parameters = self._parameters(f"f{index}", schema, strict, field)
        if parameters is not None:
            before, after = self._form.function
            return self.add(f"f{index}", f"{quoted(before + function['name'] + after)} {parameters}")
        wanted = {**schema, "type": "object"}
        if "properties" in wanted and object_of(wanted):
            wanted.setdefault("additionalProperties", False)
        before, after = JSON.function
        name = json.dumps(function["name"], ensure_ascii=False)[1:-1]
        return self.add(f"f{index}", f"{quoted(before + name + after)} {self._json(wanted, strict, field)} "
                                     f"{quoted(JSON.function_end)}")

    def _parameters(self, name: str, schema: Mapping[str, Any], strict: bool, field: str) -> str | None:
        """Returns the rule for the parameters and the end, or None if single parameters cannot enforce the schema."""
        root = object_of(schema)
        if root is None:
            return None
        properties, required = root.get("properties") or {}, root.get("required") or ()
        rest = _Rest(self.add(f"{name}end", quoted(self._form.function_end)), ends=True)
        for place, (key, part) in reversed([*enumerate(properties.items())]):
            value = self._value(f"{name}p{place}", part, schema, strict, field, rest)
            if value is None or (not value and key in required):
                return None
            if value:
                rest = self._parameter(f"{name}p{place}", key, value, rest, key in required)
        return rest.rule

    def _parameter(self, name: str, key: str, value: str, rest: _Rest, required: bool) -> _Rest:
        """Adds a parameter before the rest. The parameter may be omitted unless it is required."""
        assert self._form.parameter
        before, after = self._form.parameter
        self.add(name, value)
        others = ([], []) if required else ([rest.rule], [rest.begun] if rest.begun else [])
        return _Rest(self.add(f"{name}a", " | ".join([f"{quoted(before + key + after)} {name}", *others[0]])),
                     self.add(f"{name}b", " | ".join([f"{quoted(key + after)} {name}", *others[1]])),
                     rest.ends and not required)

    def _value(self, name: str, part: Any, root: Mapping[str, Any], strict: bool, field: str, rest: _Rest
               ) -> str | None:
        """Returns the rule for a value, its end and the function's rest: strings as plain text, others as JSON.

        "" if no value is allowed; None if there is no such rule.
        """
        types, end = types_of(part, root, {}), quoted(self._form.parameter_end)
        texts: str | None = NOTHING
        if not types or "string" in types:
            texts = TextSchemas(root, None if strict else self._schemas.ignored).of(part)
        if texts is None:
            return None
        found = [] if texts == NOTHING else [self._text(name, texts, types, rest)]
        others = sorted(types - {"string"})
        if others:
            wanted = within(part if texts == NOTHING else {"allOf": [part, {"type": others}]}, root)
            if texts == NOTHING or not objection(wanted).startswith(_UNSATISFIABLE):
                found.append(f"{self._json(wanted, strict, field)} {end} {rest.rule}")
        return " | ".join(found)

    def _text(self, name: str, texts: str, types: Set[str], rest: _Rest) -> str:
        """Returns the rule for a string that the reader takes for a string, its end and the rest of the function.

        An unrestricted string may contain end tags. As in the reader, only an end tag before a parameter or the
        function's end ends it. A string with an expression contains no end tags.
        """
        end, barred = self._form.parameter_end, read_otherwise(types, self._form.decodes)
        if texts == ALL and not barred:
            return self._any_text(name, rest)
        tagless = slashed(without(end.strip().rstrip(">")))
        self.add(f"{name.upper()}T", " & ".join([tagless, f"({texts})", *(f"~{other}" for other in barred)]))
        return f"{self.add(f'{name}t[lazy]', f'{name.upper()}T {slashed(escaped(end))}')} {rest.rule}"

    def _any_text(self, name: str, rest: _Rest) -> str:
        """Returns the rule for an unrestricted string. The first allowed end ends it, the other may not occur."""
        last, more = map(escaped, self._form.value_ends)
        if rest.ends and rest.begun:
            ending = self.add(f"{name}l[lazy]", slashed(ANY + last)), self.add(f"{name}m[lazy]", slashed(ANY + more))
            return f"{ending[0]} | {ending[1]} {rest.begun}"
        own, other = (last, more) if rest.ends else (more, last)
        self.add(f"{name.upper()}T", f"{ALL} & ~{slashed(ANY + other + ANY)}")
        return f"{self.add(f'{name}t[lazy]', f'{name.upper()}T {slashed(own)}')} {rest.begun}"

    def _json(self, schema: Mapping[str, Any], strict: bool, field: str) -> str:
        return "%json " + json.dumps(self._schemas.part(schema, strict, field))

    def _marked(self, text: str) -> str:
        pieces = re.split("(" + "|".join(map(re.escape, self._form.block)) + ")", text)
        return " ".join(self._marks.get(piece) or quoted(piece) for piece in pieces if piece)
