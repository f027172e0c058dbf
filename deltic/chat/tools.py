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

from deltic.chat.tool_arguments import Schema

_QUOTES = "\"'"
SPACES = " \t\r\n\f\v"
_NO_SPACE = re.compile(r"[^ \t\r\n\f\v]")
LONGEST_NAME = 256
_LONGEST_TAG = LONGEST_NAME + 32
CALLABLE = re.compile(rf"(?=.*\S)[^<>\r\n]{{1,{LONGEST_NAME}}}")
"""Tool names that a written call can contain."""


@dataclass(frozen=True)
class CallForm:
    """The text around the parts of calls, as chat templates write it.

    opening, closing: around a block of calls.
    function: before and after a name. function_end: after the arguments.
    parameter: before and after a key; None if the arguments are one JSON object. parameter_end: after a value.
    between: between calls. one_block: all calls are in one block, else each call has its own.

    For the reader:

    streams: arguments are emitted as they arrive, else at the end of the block.
    anywhere: a function without a block is a call even inside a line, in code and in reasoning.
    drops_empty: a function without parameters is not a call.
    decodes: values are read as JSON if they are valid JSON.
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
        """The tags around a block of calls."""
        return self.opening.strip(), self.closing.strip()

    @cached_property
    def value_ends(self) -> tuple[str, str]:
        """The two ends of a value under a grammar: its end tag before the function's end, or before a parameter."""
        assert self.parameter
        return self.parameter_end + self.function_end, self.parameter_end + self.parameter[0]

    @cached_property
    def openings(self) -> tuple[str, ...]:
        """Texts with which a call may begin."""
        return self.block[0], self.tags.function

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be single tokens of a vocabulary."""
        return *self.openings, self.block[1]

    @cached_property
    def tags(self) -> Tags:
        """The tags that the reader searches for."""
        form = QWEN if self.parameter is None else self
        assert form.parameter
        return Tags(self.block, form.function[0].strip(_QUOTES), form.function_end.strip(),
                    form.parameter[0].strip(_QUOTES), form.parameter_end.strip())


@dataclass(frozen=True)
class Tags:
    """The tags of a form. A name and `>` follow after `function` and `parameter`."""

    block: tuple[str, str]
    function: str
    function_end: str
    parameter: str
    parameter_end: str

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Pattern that matches a tag. `lastgroup` is its kind; the group `name` or `key` is its name."""
        opening, closing = map(re.escape, self.block)
        name, key = (rf"(?=[^<>\n]*?[^<>\s])(?P<{group}>[^<>\n]{{1,{LONGEST_NAME}}})>" for group in ("name", "key"))
        return re.compile(rf"(?P<opening>{opening})|(?P<closing>{closing})"
                          rf"|(?P<function>{re.escape(self.function)}{name})"
                          rf"|(?P<function_end>{re.escape(self.function_end)})"
                          rf"|(?P<parameter>{re.escape(self.parameter)}{key})"
                          rf"|(?P<parameter_end>{re.escape(self.parameter_end)})")

    @cached_property
    def marks(self) -> re.Pattern[str]:
        """Pattern that matches JSON's brackets, commas, quotes and escapes, and the tags of a block."""
        return re.compile(r"\\.|[][\"'{},]|" + "|".join(map(re.escape, self.block)), re.DOTALL)

    def begins(self, text: str, at: int) -> bool:
        """Returns True if more text may complete a tag at this position."""
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
"""Call forms by their names on the command line. auto: the form that the chat template uses."""

_SIGNS = (("<minimax:tool_call>", MINIMAX), ("<invoke", MINIMAX), ("<function=", QWEN), ('arguments": ', JSON),
          ('arguments\\": ', JSON))


def call_form(parser: str, template: str) -> CallForm:
    """Returns the call form for a parser name of PARSERS and the source of a chat template. The default is Qwen's form,
    whose reader also reads JSON."""
    return PARSERS[parser] or next((form for sign, form in _SIGNS if sign in template), QWEN)


def tool_schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Schema]:
    """Returns the parameter schema of each tool by name. A tool without parameters has an empty schema."""
    functions = [tool.get("function", tool) for tool in tools if isinstance(tool, Mapping)]
    return {function["name"]: Schema(given if isinstance(given := function.get("parameters"), Mapping) else {})
            for function in functions if isinstance(function, Mapping) and isinstance(function.get("name"), str)}


def clean_name(name: str) -> str:
    """Strips the quotes that models put around names."""
    return name.strip().strip(_QUOTES) or name.strip()


def skip_spaces(text: str, at: int) -> int:
    """Returns the position of the next non-space character, or the end."""
    found = _NO_SPACE.search(text, at)
    return found.start() if found else len(text)
