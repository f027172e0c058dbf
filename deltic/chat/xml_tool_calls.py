"""The states of `deltic.chat.tool_parsers` for calls in XML: Qwen's and MiniMax's."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from deltic.chat import json_tool_calls
from deltic.chat.stop_strings import open_suffix
from deltic.chat.tools import SPACES, clean_name, skip_spaces

if TYPE_CHECKING:
    from deltic.chat.tool_parsers import CallReader

# Tags that may follow the end of a value; at the end of a function, its last value lacks an end tag.
_AFTER = {"parameter_end": {"parameter", "function_end", "function", "opening", "closing"},
          "function_end": {"function", "opening", "closing"}}


def block_begins(reader: CallReader, text: str, at: int) -> int:
    """After the start tag of a block."""
    start = skip_spaces(text, at)
    if start < len(text):
        as_json = text[start] == "{"
        reader.arguments.typed = as_json and reader.exact
        reader.state = json_tool_calls.head if as_json else before_function
    return start


def bare_call(reader: CallReader, text: str, at: int) -> int:
    """A function without a block."""
    tag, is_open = reader.tag_at(text, at)
    if tag is None or not reader.arguments.knows(clean_name(tag["name"])):
        return at if is_open else reader.reject(text, len(reader.tags.function))
    reader.begin(tag["name"])
    reader.state = in_function
    return tag.end()


def after_bare(reader: CallReader, text: str, at: int) -> int:
    """After a function without a block. Models may write the end tag of a block without its start tag."""
    start = skip_spaces(text, at)
    tag, is_open = reader.tag_at(text, start) if start < len(text) else (None, True)
    if is_open:
        return at
    return reader.close(text, tag.end() if tag and tag.lastgroup == "closing" else at)


def before_function(reader: CallReader, text: str, at: int) -> int:
    """In a block, before the first function."""
    tag, start = reader.next_tag(text, at)
    reader.arguments.outside.append(text[at:start])
    if tag is None:
        return start
    if tag.lastgroup in ("opening", "closing"):
        return reader.reject(text, start if tag.lastgroup == "opening" else tag.end())
    if tag.lastgroup == "function":
        reader.begin(tag["name"])
        reader.state = in_function
    return tag.end()


def in_function(reader: CallReader, text: str, at: int) -> int:
    """Between the parameters of a function."""
    tag, start = reader.next_tag(text, at)
    if not reader.confirmed and (reader.bare or not reader.form.streams) and text[at:start].strip(SPACES):
        return reader.reject(text, skip_spaces(text, at))
    reader.arguments.outside.append(text[at:start])
    return start if tag is None else next_part(reader, text, tag)


def next_part(reader: CallReader, text: str, tag: re.Match[str]) -> int:
    """Handles a tag between parameters."""
    kind = tag.lastgroup
    if kind == "parameter":
        reader.confirm()
        reader.arguments.key(clean_name(tag["key"]))
        reader.begun = False
        reader.line_begins = True
        reader.newline = ""
        reader.depth = 0
        reader.quoted = 0
        reader.state = in_exact_value if reader.exact else in_value
    elif kind == "function":
        reader.begin(tag["name"])
        reader.state = in_function
    elif kind == "function_end":
        if reader.form.streams or reader.exact:
            reader.confirm()
        reader.arguments.end()
        reader.state = after_bare if reader.bare else after_call
    elif kind in ("opening", "closing"):
        return reader.close(text, tag.start() if kind == "opening" else tag.end())
    return tag.end()


def in_exact_value(reader: CallReader, text: str, at: int) -> int:
    """In a value under a grammar: the first end tag after which the call goes on ends it."""
    form = reader.form
    assert form.parameter
    if not reader.begun:
        begins = form.parameter[1].rpartition(">")[2]
        if len(text) - at < len(begins):
            return at
        at, reader.begun = at + len(begins), True
    end = min((place for place in (text.find(ending, at) for ending in form.value_ends) if place >= 0), default=-1)
    if end < 0:
        end = len(text) - open_suffix(text[at:], form.value_ends)
        reader.arguments.text(text[at:end])
        return end
    reader.arguments.text(text[at:end])
    reader.arguments.end_text()
    reader.state = in_function
    return end + len(form.parameter_end)


def in_value(reader: CallReader, text: str, at: int) -> int:
    """In a value, up to a tag that may end it."""
    tag, start = reader.next_tag(text, at)
    reader.value(text[at:start])
    if tag is None:
        return start
    decided, reader.next_tag_ends = reader.next_tag_ends, False
    kind, begins_line = tag.lastgroup or "", reader.line_begins
    around, parameter = kind in ("opening", "closing"), kind == "parameter" and begins_line
    if decided and (around or parameter):
        reader.end_value()
        return next_part(reader, text, tag)
    if kind == "parameter_end" or (kind == "function_end" and not reader.depth):
        reader.ending = kind
        reader.pieces = [tag[0]]
        reader.state = after_value
        return tag.end()
    if around or (parameter and reader.may_follow(tag)):
        reader.mark_possible_end(text[start:], parameter)
    reader.depth += {"function": 1, "function_end": -1}.get(kind, 0)
    reader.quoted += parameter and not reader.depth
    reader.value(tag[0])
    return tag.end()


def after_value(reader: CallReader, text: str, at: int) -> int:
    """After a tag that ends the value if a suitable tag follows."""
    start, tag, waits = reader.past_spaces(text, at)
    if waits:
        return start
    reader.state = in_value
    quoted, ends = "".join(reader.pieces), tag is not None and tag.lastgroup in _AFTER[reader.ending]
    if reader.ending == "parameter_end" and reader.quoted and not reader.depth:
        reader.quoted -= 1
        if tag and ends and reader.may_follow(tag):
            reader.mark_possible_end(quoted + text[start:], True)
        reader.value(quoted)
    elif tag is None or not ends:
        reader.value(quoted)
    elif reader.depth:
        reader.mark_possible_end(quoted + text[start:])
        reader.value(quoted)
    elif reader.ending == "parameter_end" or not (reader.lacks_an_end and reader.backtrack()):
        return _value_ended(reader, text, start, tag)
    return start


def _value_ended(reader: CallReader, text: str, start: int, tag: re.Match[str]) -> int:
    """Ends the value, which this tag follows."""
    reader.end_value()
    reader.state = in_function
    if reader.ending == "parameter_end":
        return start
    if not reader.bare:
        return next_part(reader, text, tag)
    reader.arguments.end()
    reader.state = after_bare
    return start


def after_call(reader: CallReader, text: str, at: int) -> int:
    """Between the calls of a block, or after the last."""
    start = skip_spaces(text, at)
    if start == len(text):
        return start
    tag, is_open = reader.tag_at(text, start)
    if tag is None:
        return start if is_open else reader.close(text, start)
    return reader.close(text, start) if tag.lastgroup == "parameter" else next_part(reader, text, tag)
