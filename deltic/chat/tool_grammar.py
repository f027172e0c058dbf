"""Builds a grammar for tool calls in the form in which the model writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

from deltic.chat.json_schema import types_of, within
from deltic.chat.response_format import JsonSchema, OutputFormat
from deltic.chat.structured import Part, Schemas, objection, part_of, quoted
from deltic.chat.text_schema import ALL, ANY, NOTHING, TextSchemas, escaped, object_of, read_otherwise, slashed, without
from deltic.chat.tools import JSON, CallForm
from deltic.errors import RequestError, show

_UNSATISFIABLE = "Unsatisfiable"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The tools that an answer may call: `names`, or all if empty. needed: it must call one. parallel: it may call
    several."""

    names: tuple[str, ...] = ()
    needed: bool = False
    parallel: bool = True

    @classmethod
    def read(cls, value: Any, parallel: bool = True) -> ToolChoice:
        """Reads OpenAI's `tool_choice`; `none` is handled by showing no tools. RequestError names a wrong field."""
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
        """Returns the callable functions by their index among the tools; RequestError if one is missing."""
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
    """What an answer may be. output: the format of an answer without calls; None: any text."""

    calls: ToolChoice = ToolChoice()
    output: OutputFormat | None = None


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

    functions: the callable ones, by their index among the tools.
    needed: the answer must be a call; else it may also be text, or have the format `other`.
    parallel: several calls are allowed.
    """

    form: CallForm
    functions: Mapping[int, Mapping[str, Any]]
    needed: bool
    parallel: bool = True
    other: OutputFormat | None = None


def call_parts(calls: CallAnswers, tags: Mapping[str, str], schemas: Schemas) -> list[Part]:
    """Returns the grammar of such answers. tags: the names in a grammar of tags that are tokens."""
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

    begun: the rule after the beginning of a parameter tag, "" if no parameter may follow. ends: the function may end
    at once.
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
        """Adds the rule of text with an optional block of calls at its end."""
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
        """Adds the rule of the blocks of calls. begun: after the first tag."""
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
        """Adds the rule of a function. Its arguments are a JSON object if the form says so, or if the schema cannot be
        enforced on single parameters."""
        given, strict = function.get("parameters"), bool(function.get("strict"))
        field = f"tools[{index}].function.parameters"
        schema = self._schemas.fit(JsonSchema(given if isinstance(given, Mapping) else {}, strict, field))
        self._schemas.part(schema, strict, field)  # refuses the same schemas as response_format
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
        """Returns the rule of the parameters and the end; None if single parameters cannot keep the schema."""
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
        """Adds a parameter, which may be omitted unless required, before the rest."""
        assert self._form.parameter
        before, after = self._form.parameter
        self.add(name, value)
        others = ([], []) if required else ([rest.rule], [rest.begun] if rest.begun else [])
        return _Rest(self.add(f"{name}a", " | ".join([f"{quoted(before + key + after)} {name}", *others[0]])),
                     self.add(f"{name}b", " | ".join([f"{quoted(key + after)} {name}", *others[1]])),
                     rest.ends and not required)

    def _value(self, name: str, part: Any, root: Mapping[str, Any], strict: bool, field: str, rest: _Rest
               ) -> str | None:
        """Returns the rule of a value, its end and the rest of the function: strings as plain text, others as JSON.

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
        """Returns the rule of a string that the reader takes for a string, its end and the rest of the function.

        An unrestricted string may contain end tags: as in the reader, only one before a parameter or the function's end
        ends it. A string with an expression contains none.
        """
        end, barred = self._form.parameter_end, read_otherwise(types, self._form.decodes)
        if texts == ALL and not barred:
            return self._any_text(name, rest)
        tagless = slashed(without(end.strip().rstrip(">")))
        self.add(f"{name.upper()}T", " & ".join([tagless, f"({texts})", *(f"~{other}" for other in barred)]))
        return f"{self.add(f'{name}t[lazy]', f'{name.upper()}T {slashed(escaped(end))}')} {rest.rule}"

    def _any_text(self, name: str, rest: _Rest) -> str:
        """Returns the rule of an unrestricted string: the first allowed end ends it, the other may not occur in it."""
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
        """Writes text for a grammar, with tags as tokens if they are."""
        pieces = re.split("(" + "|".join(map(re.escape, self._form.block)) + ")", text)
        return " ".join(self._marks.get(piece) or quoted(piece) for piece in pieces if piece)
