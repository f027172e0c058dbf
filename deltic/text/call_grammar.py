"""A grammar for calls of some tools, in the form in which a model writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from deltic.errors import RequestError, show
from deltic.text.coerce import types_of
from deltic.text.grammar import LENIENT, STRICT, Part, part_of, quoted
from deltic.text.output_format import OutputFormat
from deltic.text.tools import CallForm

_ANY = "(?s:.*)"
_NO_JSON = rf"([^\s\[{{]{_ANY})?"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tools an answer may call. names: those; none: all. needed: it must call one. parallel: it may call several
    at once."""

    names: tuple[str, ...] = ()
    needed: bool = False
    parallel: bool = True

    @classmethod
    def read(cls, value: Any, parallel: bool = True) -> ToolChoice:
        """OpenAI's `tool_choice`, but for `none`, which shows no tools. RequestError names what is wrong."""
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
        """Those that may be called, by their places among the tools; RequestError if there are not."""
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
    """What an answer may be. output: what it has to look like, where it is no call; None: text."""

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
class Calls:
    """Answers that are calls.

    form: how they are written.
    functions: those that may be called, by their places among the tools.
    needed: a call is all that the answer may be; else it may be text, or what has another format.
    parallel: there may be several calls.
    """

    form: CallForm
    functions: Mapping[int, Mapping[str, Any]]
    needed: bool
    parallel: bool = True
    other: OutputFormat | None = None


def call_parts(calls: Calls, tags: Mapping[str, str]) -> list[Part]:
    """The grammar of such answers. tags: those that are tokens, and how a grammar names them. RequestError names the
    tool that is wrong."""
    rules = _Rules(calls.form, tags)
    functions = [rules.function(index, function) for index, function in calls.functions.items()]
    call = rules.add("call", " | ".join(functions))
    if calls.needed:
        rules.add("start", rules.block(call, calls.parallel))
    elif calls.other:
        rules.add("start", f"{rules.block(call, calls.parallel)} | @other")
    else:
        rules.add_text(call, calls.parallel)
    other = [] if calls.needed or not calls.other else [{"name": "other", **part_of(calls.other)}]
    return [{"lark_grammar": rules.text}, *other]


class _Rules:
    """The rules of a grammar in Lark's notation."""

    def __init__(self, form: CallForm, tags: Mapping[str, str]) -> None:
        self._form, self._marks = form, tags
        self._lines: list[str] = []

    @property
    def text(self) -> str:
        return "\n".join(self._lines) + "\n"

    def add(self, name: str, rule: str) -> str:
        self._lines.append(f"{name}: {rule}")
        return name

    def add_text(self, call: str, parallel: bool) -> None:
        """Text, with a block of calls at its end or not."""
        tag = self._form.block[0]
        if tag in self._marks:
            self.add("start", f"TEXT ({self.block(call, parallel)})?")
            self.add("TEXT", f"/{_ANY}/")
            return
        opening = _escaped(tag)
        self.add("start", f"TEXT | head {self.block(call, parallel, begun=True)}")
        self.add("head[lazy]", _slashed(_ANY + opening))
        self.add("TEXT", f"/{_ANY}/ & ~{_slashed(_ANY + opening + _ANY)}")

    def block(self, call: str, parallel: bool, begun: bool = False) -> str:
        """One block of calls, or more of them. begun: the first tag has come."""
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
        """One function with its arguments."""
        form, schema = self._form, function.get("parameters")
        schema = schema if isinstance(schema, Mapping) else {}
        strict, field = bool(function.get("strict")), f"tools[{index}].function.parameters"
        before, after = form.function
        begin = quoted(before + function["name"] + after)
        if form.parameter is None:
            wanted = {"type": "object", **schema}
            if wanted.get("properties"):
                wanted.setdefault("additionalProperties", False)
            return self.add(f"f{index}", f"{begin} {self._json(wanted, strict)} {quoted(form.function_end)}")
        root = _resolved(schema, schema)
        properties = root.get("properties")
        if not isinstance(properties, Mapping):
            properties = {}
        required = root.get("required") or ()
        if strict and (unknown := [key for key in required if key not in properties]):
            raise RequestError(f"{field} requires {unknown[0]!r}, which it does not describe", field)
        parameters = [self._parameter(f"f{index}p{place}", key, (value, schema), strict)
                      + ("" if key in required else "?") for place, (key, value) in enumerate(properties.items())]
        return self.add(f"f{index}", " ".join([begin, *parameters, quoted(form.function_end)]))

    def _parameter(self, name: str, key: str, value: tuple[Any, Mapping[str, Any]], strict: bool) -> str:
        assert self._form.parameter
        before, after = self._form.parameter
        part, root = value
        return self.add(name, f"{quoted(before + key + after)} ({self._value(name, part, root, strict)})")

    def _value(self, name: str, part: Any, root: Mapping[str, Any], strict: bool) -> str:
        """A value and what ends it: texts stand as they are, all else as JSON."""
        end = quoted(self._form.parameter_end)
        resolved = _resolved(part, root)
        types = types_of("value", {"properties": {"value": resolved}, **_definitions(root)})
        as_json = f"{self._json({**resolved, **_definitions(root)}, strict)} {end}"
        if types and "string" not in types:
            return as_json
        texts = _texts(resolved)
        if texts is not None:
            return " | ".join(f"{quoted(text)} {end}" for text in texts)
        pattern = _pattern(resolved) if types == {"string"} else _ANY
        if types - {"string"}:
            # what looks like JSON is read as JSON
            return f"{as_json} | {self._free(name, _NO_JSON)}"
        return self._free(name, pattern)

    def _free(self, name: str, pattern: str) -> str:
        """Text that the pattern matches, which holds no tag of a call, and its end."""
        end = _escaped(self._form.parameter_end)
        tags = "|".join(_escaped(tag.strip("<>/")) for tag in dict.fromkeys(self._tags()))
        body, barred = f"({pattern}){end}", f"{_ANY}<\\/?({tags}){_ANY}{end}"
        return self.add(f"{name}t[lazy]", f"{_slashed(body)} & ~{_slashed(barred)}").partition("[")[0]

    def _tags(self) -> Iterable[str]:
        form = self._form
        assert form.parameter
        parts = (form.parameter_end, form.function_end, form.parameter[0], form.function[0], form.opening)
        return (re.split(r"[=\s\"]", part.strip())[0] for part in parts)

    def _json(self, schema: Mapping[str, Any], strict: bool) -> str:
        return "%json " + json.dumps({**schema, "x-guidance": STRICT if strict else LENIENT})

    def _marked(self, text: str) -> str:
        """Text, its tags by their tokens where they have one."""
        pieces = re.split("(" + "|".join(map(re.escape, self._form.block)) + ")", text)
        return " ".join(self._marks.get(piece) or quoted(piece) for piece in pieces if piece)


def _escaped(text: str) -> str:
    """A pattern of this text alone."""
    return re.sub(r"\\(\s)", r"\1", re.escape(text))


def _slashed(pattern: str) -> str:
    """A pattern as Lark writes it."""
    return "/" + re.sub(r"(?<!\\)/", r"\/", pattern.replace("\n", r"\n")) + "/"


def _resolved(part: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that a reference stands for, if it is one into the same document."""
    for _ in range(8):
        reference = part.get("$ref") if isinstance(part, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        target: Any = root
        for name in reference[2:].split("/"):
            target = target.get(name) if isinstance(target, Mapping) else None
        part = {**(target if isinstance(target, Mapping) else {}),
                **{key: value for key, value in part.items() if key != "$ref"}}
    return part if isinstance(part, Mapping) else {}


def _definitions(root: Mapping[str, Any]) -> dict[str, Any]:
    return {key: root[key] for key in ("$defs", "definitions") if key in root}


def _texts(schema: Mapping[str, Any]) -> list[str] | None:
    """The values of an enumeration as they are written in the place of a text."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not values:
        return None
    return [value if isinstance(value, str) else json.dumps(value) for value in values]


def _pattern(schema: Mapping[str, Any]) -> str:
    """An expression for the texts that a schema allows. Formats are left to the model."""
    low, high = schema.get("minLength") or 0, schema.get("maxLength")
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith(r"\$")
        inner = pattern[begins:len(pattern) - ends]
        return ("" if begins else _ANY) + f"({inner})" + ("" if ends else _ANY)
    if isinstance(low, int) and isinstance(high, int | None) and (low or high is not None):
        return f"(?s:.{{{low},{'' if high is None else high}}})"
    return _ANY
