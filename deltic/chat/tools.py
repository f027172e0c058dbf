"""The forms in which models write tool calls, and the tools' schemas.

    qwen     <tool_call>                            json     <tool_call>
             <function=NAME>                                 {"name": NAME, "arguments": {KEY: VALUE}}
             <parameter=KEY>                                 </tool_call>
             VALUE
             </parameter>                           minimax  <minimax:tool_call>
             </function>                                     <invoke name="NAME">
             </tool_call>                                    <parameter name="KEY">VALUE</parameter>
                                                             </invoke>
                                                             </minimax:tool_call>
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from deltic.chat.schema_coercion import Schema

_QUOTES = "\"'"
SPACES = " \t\r\n\f\v"
_NO_SPACE = re.compile(r"[^ \t\r\n\f\v]")
LONGEST_NAME = 256
_LONGEST_TAG = LONGEST_NAME + 32
CALLABLE = re.compile(rf"(?=.*\S)[^<>\r\n]{{1,{LONGEST_NAME}}}")
"""Names of tools that can be read again where a call is written."""


@dataclass(frozen=True)
class CallForm:
    """The text around the parts of calls, as chat templates write it.

    opening, closing: around a block of calls. function: before and after a name; function_end: after the arguments.
    parameter: before and after a key, parameter_end: after a value; None: the arguments are one JSON object.
    between: calls. one_block: all calls stand in one block, else each has its own.

    For the reader.

    streams: arguments are told as they come, else when the block is over.
    anywhere: a function without a block is a call also in the midst of a line, in code, and in thinking.
    drops_empty: a call without parameters is none.
    decodes: values are JSON where they can be.
    """

    opening: str
    closing: str
    function: tuple[str, str]
    function_end: str
    parameter: tuple[str, str] | None
    parameter_end: str = ""
    between: str = "\n"
    one_block: bool = False
    streams: bool = True
    anywhere: bool = False
    drops_empty: bool = False
    decodes: bool = False

    @cached_property
    def block(self) -> tuple[str, str]:
        """The tags around a block."""
        return self.opening.strip(), self.closing.strip()

    @cached_property
    def value_ends(self) -> tuple[str, str]:
        """What ends a value where a call is written exactly so: its closing tag before the function's end, and before
        another parameter. The closing tag alone is text."""
        assert self.parameter
        return self.parameter_end + self.function_end, self.parameter_end + self.parameter[0]

    @cached_property
    def openings(self) -> tuple[str, ...]:
        """What begins a call in the midst of text."""
        return self.block[0], self.tags.function

    @property
    def markers(self) -> tuple[str, ...]:
        """What may be a token of its own, or has to be found in text."""
        return *self.openings, self.block[1]

    @cached_property
    def tags(self) -> Tags:
        """How the reader recognises the parts."""
        form = QWEN if self.parameter is None else self
        assert form.parameter
        return Tags(self.block, form.function[0].strip(_QUOTES), form.function_end.strip(),
                    form.parameter[0].strip(_QUOTES), form.parameter_end.strip())


@dataclass(frozen=True)
class Tags:
    """The tags of a form; those of functions and parameters begin like this, with the name and `>` to follow."""

    block: tuple[str, str]
    function: str
    function_end: str
    parameter: str
    parameter_end: str

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """A whole tag; the group that matched last is its kind, `name` or `key` what it names."""
        opening, closing = map(re.escape, self.block)
        name, key = (rf"(?=[^<>\n]*?[^<>\s])(?P<{group}>[^<>\n]{{1,{LONGEST_NAME}}})>" for group in ("name", "key"))
        return re.compile(rf"(?P<opening>{opening})|(?P<closing>{closing})"
                          rf"|(?P<function>{re.escape(self.function)}{name})"
                          rf"|(?P<function_end>{re.escape(self.function_end)})"
                          rf"|(?P<parameter>{re.escape(self.parameter)}{key})"
                          rf"|(?P<parameter_end>{re.escape(self.parameter_end)})")

    @cached_property
    def marks(self) -> re.Pattern[str]:
        """What matters in JSON: brackets, commas, quotes, escapes, and the tags around it."""
        return re.compile(r"\\.|[][\"'{},]|" + "|".join(map(re.escape, self.block)), re.DOTALL)

    def begins(self, text: str, at: int) -> bool:
        """Whether the text may go on so that there is a tag at this place."""
        tail = text[at:at + _LONGEST_TAG]
        if len(tail) == _LONGEST_TAG or ">" in tail or "\n" in tail or "<" in tail[1:]:
            return False
        whole = (*self.block, self.function_end, self.parameter_end, self.function, self.parameter)
        return (any(tag.startswith(tail) for tag in whole)
                or tail.startswith((self.function, self.parameter)))


QWEN = CallForm("<tool_call>\n", "</tool_call>", ("<function=", ">\n"), "</function>\n",
                ("<parameter=", ">\n"), "\n</parameter>\n")
JSON = CallForm("<tool_call>\n", "</tool_call>", ('{"name": "', '", "arguments": '), "}\n", None)
MINIMAX = CallForm("<minimax:tool_call>\n", "</minimax:tool_call>", ('<invoke name="', '">\n'), "</invoke>\n",
                   ('<parameter name="', '">'), "</parameter>\n", between="", one_block=True, streams=False,
                   anywhere=True, drops_empty=True, decodes=True)

PARSERS: Mapping[str, CallForm | None] = {"auto": None, "qwen": QWEN, "json": JSON, "minimax": MINIMAX}
"""By their names on the command line; auto: the one that the chat template writes."""

_SIGNS = (("<minimax:tool_call>", MINIMAX), ("<invoke", MINIMAX), ("<function=", QWEN), ('arguments": ', JSON),
          ('arguments\\": ', JSON))


def call_form(parser: str, template: str) -> CallForm:
    """The form of calls. parser: one of PARSERS; template: the source of the chat template. Qwen's and the JSON form
    are read alike, and are what a template is taken to mean that shows none."""
    return PARSERS[parser] or next((form for sign, form in _SIGNS if sign in template), QWEN)


def tool_schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Schema]:
    """The parameter schema of each tool by name, from OpenAI's form; an empty one where a tool has none."""
    functions = [tool.get("function", tool) for tool in tools if isinstance(tool, Mapping)]
    return {function["name"]: Schema(given if isinstance(given := function.get("parameters"), Mapping) else {})
            for function in functions if isinstance(function, Mapping) and isinstance(function.get("name"), str)}


def clean_name(name: str) -> str:
    """A name without the quotes that models put around it."""
    return name.strip().strip(_QUOTES) or name.strip()


def skip_spaces(text: str, at: int) -> int:
    """The next place that is no whitespace, or the end."""
    found = _NO_SPACE.search(text, at)
    return found.start() if found else len(text)
