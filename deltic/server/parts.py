"""Fields within messages, items, blocks and tools: those that mean something here.

Clients send back what they were told, with what their libraries and pages keep beside it. So what means nothing here is
not refused, but named, and what has no value is not even that. A name that seems to be misspelt is refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from deltic.errors import RequestError
from deltic.server.body import Fields, unknown_field

_REFUSED: Mapping[str, str] = {
    "function_call": "use tool_calls", "prefix": "use continue_final_message", "partial": "use continue_final_message",
    "images": "use parts of type image_url"}
"""What would change the answer, and what to do instead."""
_MISSPELT, _LONGEST_NAME, _MOST_NAMES = 0.88, 64, 1000
"""How near to a name that is known (difflib) another one is that must be meant as it, characters of such a one, and
names of a request that are looked at."""
_MISSPELT_TYPE = 0.85
"""The same of a tool's type."""


@dataclass(frozen=True, slots=True)
class Known:
    """What means something in an object. within: what does in the objects, or lists of them, that its fields hold.
    kinds: the types that are looked at; none: all."""

    names: frozenset[str]
    within: Mapping[str, Known] = field(default_factory=dict)
    kinds: tuple[str | None, ...] = ()

    @classmethod
    def of(cls, names: str, **within: Known) -> Known:
        return cls(frozenset([*names.split(), *within]), within)


_FUNCTION = Known.of("name arguments")
_PART = replace(Known.of("type text refusal image video video_url url source fps", image_url=Known.of("url")),
                kinds=(None, "text", "refusal", "image", "image_url", "video", "video_url"))
CHAT: Mapping[str, Known] = {
    "messages": Known.of("role contents name tool_call_id reasoning_content reasoning thinking", content=_PART,
                         tool_calls=Known.of("id type index name arguments custom", function=_FUNCTION),
                         function_call=_FUNCTION)}

_TEXT = replace(Known.of("type text refusal image_url"), kinds=(None, "input_text", "output_text", "input_image"))
RESPONSES: Mapping[str, Known] = {
    "input": replace(Known.of("type id role status name namespace arguments call_id input summary encrypted_content",
                              content=_TEXT, output=_TEXT), kinds=(
        None, "message", "reasoning", "item_reference", "function_call", "function_call_output", "custom_tool_call",
        "custom_tool_call_output")),
    "reasoning": Known.of("effort summary generate_summary"), "text": Known.of("format verbosity"),
    "stream_options": Known.of("include_obfuscation"),
    "tools": replace(Known.of("type name description parameters strict"), kinds=("function", "custom"))}

_PIECE = Known.of("type text cache_control")
_SOURCE = Known.of("type media_type data url file_id", content=_PIECE)
_RESULT = replace(Known.of("type text title context cache_control", source=_SOURCE, content=_PIECE),
                  kinds=(None, "text", "image", "document", "search_result"))
_BLOCK = Known.of("type text id name input tool_use_id is_error thinking signature data title context cache_control",
                  source=_SOURCE, content=_RESULT)
_BLOCK = replace(_BLOCK, kinds=(None, "text", "image", "document", "search_result", "tool_use", "tool_result",
                                "thinking", "redacted_thinking"))
ANTHROPIC: Mapping[str, Known] = {
    "messages": Known.of("role", content=_BLOCK), "system": _BLOCK,
    "tools": Known.of("type name description input_schema strict cache_control"),
    "tool_choice": Known.of("type name disable_parallel_tool_use"),
    "thinking": Known.of("type budget_tokens display"), "output_config": Known.of("effort format")}


def usable_tools(tools: Sequence[Any], kinds: Sequence[str | None], ignored: list[str]) -> list[tuple[int, Any]]:
    """The tools of these types, or of none that can be read, with their places. Others are left out and noted, if that
    leaves any: they are another server's own. All are given where it does not, or where one of them is misspelt."""
    unknown = {index: tool["type"] for index, tool in enumerate(tools)
               if isinstance(tool, dict) and isinstance(tool.get("type"), str) and tool["type"] not in kinds}
    if len(unknown) == len(tools) or any(
            difflib.get_close_matches(kind[:_LONGEST_NAME], filter(None, kinds), 1, _MISSPELT_TYPE)
            for kind in {*unknown.values()}):
        return [*enumerate(tools)]
    ignored.extend(f"tools.{kind}" for kind in unknown.values())
    return [(index, tool) for index, tool in enumerate(tools) if index not in unknown]


def check_within(body: Fields, table: Mapping[str, Known], also: Callable[[str], bool] = lambda name: False) -> None:
    """Note what has no effect in these fields of a body; RequestError names what is misspelt or would change the
    answer, unless the server is lenient. also: whether a name means something besides."""
    ignored: dict[str, None] = {}
    for place, known in table.items():
        for path, inner, name, value in _others(getattr(body, place), known, place):
            if value in (None, "", False, [], {}) or also(name):
                continue
            if name in _REFUSED and not body.lenient:
                raise RequestError(f"{path}.{name} is not supported: {_REFUSED[name]}", f"{path}.{name}")
            noted = f"{_plain(path)}.{name}"
            if noted in ignored or len(ignored) >= _MOST_NAMES:
                continue
            if not body.lenient and _is_misspelt(name, inner.names):
                raise unknown_field(f"{path}.", name, inner.names)
            ignored[noted] = None
    body.ignored.extend(ignored)


def _is_misspelt(name: str, known: frozenset[str]) -> bool:
    return len(name) <= _LONGEST_NAME and bool(difflib.get_close_matches(name, known, 1, _MISSPELT))


def _others(value: Any, known: Known, path: str) -> Iterator[tuple[str, Known, str, Any]]:
    """Where there are fields that mean nothing: the path of the object, what is known there, name and value."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            if isinstance(item, dict):
                yield from _others(item, known, f"{path}[{index}]")
    elif isinstance(value, dict) and (not known.kinds or value.get("type") in known.kinds):
        for name, inner in value.items():
            if name in known.within:
                yield from _others(inner, known.within[name], f"{path}.{name}")
            elif name not in known.names:
                yield path, known, name, inner


def _plain(path: str) -> str:
    """Without the places in lists: the same for all messages."""
    return "".join(piece.partition("]")[2] or ("" if "]" in piece else piece) for piece in path.split("["))
