"""Reads tool calls from text that arrives in pieces; the result does not depend on how the text is cut.

    block -> calls -> arguments; each piece is emitted as soon as no later text can change it

`CallReader` is the core that all forms share. Its states for calls in XML (Qwen, MiniMax) follow; those for calls in
JSON are in `json_tool_calls`.

An argument may quote tags and whole calls. An end tag ends a value if a tag follows that may follow a value, and if
the value has closed all functions and parameters that it quotes. A parameter inside a value is quoted if the tool's
schema does not have it, or the call already has; otherwise the end tag of the value may be missing. The text after
such a possible end is read as part of the value, but held back until the value certainly ends. If it never does, the
reader backtracks: the value ended there, and the text is read again.

Under a grammar there is no ambiguity: a value ends with the first end tag before another parameter or the end of the
function, both written as the form writes them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from deltic.chat import json_tool_calls
from deltic.chat.markers import open_suffix
from deltic.chat.tool_arguments import CallDelta, Schema, ToolArguments
from deltic.chat.tools import SPACES, CallForm, clean_name, skip_spaces

State = Callable[["CallReader", str, int], int]
"""Function that reads on from a position in the text and returns the new position."""


@dataclass(slots=True)
class _PossibleEnd:
    """A possible end of a value.

    before: the reader before it. since: the text since. emitted: the number of deltas before it. by_parameter: a
    parameter tag is at this end; the tag is quoted only if the value has an end tag of its own later.
    """

    before: CallReader
    since: list[str]
    emitted: int
    by_parameter: bool


class CallReader:
    """Reads one block of calls.

    opening: the tag that began the block, or the beginning of a function without a block, which `feed` gets as well.
    retries: number of times that text may be read again. exact: a grammar enforced the form of the calls.
    """

    def __init__(self, form: CallForm, schemas: Mapping[str, Schema], opening: str, retries: int,
                 exact: bool = False) -> None:
        self.form = form
        self.tags = form.tags
        self.retries = retries
        self.exact = exact
        self.bare = opening != form.block[0]
        self.arguments = ToolArguments(schemas, streams=form.streams, decodes=form.decodes,
                                   drops_empty=form.drops_empty and not exact)
        self.confirmed = False  # the block has a call
        self.failed = ""  # the text of a block that turned out to have no call
        self.state: State = bare_call if self.bare else block_begins
        self._all_text = [] if self.bare else [opening]  # all text until a call is confirmed
        self._held, self._rest = "", None  # type: str, str | None
        self._reread: str | None = None
        self._possible_end: _PossibleEnd | None = None
        self.next_tag_ends = False  # set after backtracking: the next tag ends the value
        # the open value
        self.depth = 0  # open functions that the value quotes
        self.quoted = 0  # open parameters that the value quotes
        self.begun = False
        self.line_begins = True  # the next character is the first of a line
        self.newline = ""  # a line break that may be the last of the value
        self.ending = ""  # the kind of the tag that may end the value
        self.in_lines = True  # the value stands in lines of its own
        self.pieces: list[str] = []
        self.json = json_tool_calls.JsonScan()

    def feed(self, text: str) -> str | None:
        """Takes more text. Returns the text after the block once the block is over, else None."""
        if self._possible_end:
            self._possible_end.since.append(text)
        if not self.confirmed:
            self._all_text.append(text)
        text, at = self._held + text, 0
        while self._rest is None:
            state, start = self.state, at
            at = state(self, text, at)
            if self._reread is not None:
                text = self._reread
                at = 0
                self._reread = None
            elif at == len(text) or (at == start and self.state is state):
                break
        self._held = text[at:]
        return self._rest

    def finish(self, cut: bool = False) -> str:
        """Ends the text: the block ends here or at a possible end. Returns the text after the block.

        cut: the model did not end its answer, so an open call stays open.
        """
        if cut and self.confirmed and self._rest is None and self.arguments.open:
            self._possible_end, self._rest = None, ""
        while self._rest is None and self.backtrack():
            self.feed("")
        if self._rest is None:
            left = self._finish_held(self._held, self._held.startswith("</"))
            self.arguments.end()
            if not self.confirmed:
                self.failed, self.arguments.out = "".join(self._all_text), []
            self._rest = self._with_outside_text(left) if self.confirmed else ""
        return self._rest

    def _finish_held(self, held: str, closes: bool) -> str:
        """Handles held text at the end of all text. Returns the part outside of calls."""
        if self.state is in_value and not closes:
            self.value(held)
        if self.state in (after_call, after_bare, json_tool_calls.after_object):
            return "" if closes else held
        return json_tool_calls.cut(self, held, closes)

    def take(self) -> list[CallDelta]:
        """Returns the deltas that no later text can change."""
        out, possible = self.arguments.out, self._possible_end
        emitted = len(out) if (self.form.streams and self.confirmed) or self._rest is not None else 0
        if possible and emitted:
            emitted, possible.emitted = possible.emitted, 0
        if not emitted:
            return []
        self.arguments.out = out[emitted:]
        return out[:emitted]

    def copy(self) -> CallReader:
        twin = copy.copy(self)
        twin.arguments, twin.json = self.arguments.copy(), copy.copy(self.json)
        twin._all_text, twin.pieces = self._all_text.copy(), self.pieces.copy()
        if self._possible_end:
            twin._possible_end = replace(self._possible_end, since=self._possible_end.since.copy())
        return twin

    # Used by the states

    def tag_at(self, text: str, at: int) -> tuple[re.Match[str] | None, bool]:
        """Returns the tag at this position, and True if more text may complete a tag."""
        tag = self.tags.pattern.match(text, at)
        return tag, tag is None and text[at] == "<" and self.tags.begins(text, at)

    def past_spaces(self, text: str, at: int) -> tuple[int, re.Match[str] | None, bool]:
        """Skips spaces after a possible end, keeping them. Returns the position, its tag, and True to wait for text."""
        start = skip_spaces(text, at)
        self.pieces.append(text[at:start])
        if start == len(text):
            return start, None, True
        return start, *self.tag_at(text, start)

    def next_tag(self, text: str, at: int) -> tuple[re.Match[str] | None, int]:
        """Returns the next tag and its position, or None and the position up to which there is no tag."""
        tag = self.tags.pattern.search(text, at)
        return (tag, tag.start()) if tag else (None, self.open_tag(text, at))

    def open_tag(self, text: str, at: int) -> int:
        """Returns the position of an incomplete tag at the end of the text, else the end."""
        start = text.rfind("<", at)
        return start if start >= 0 and self.tags.begins(text, start) else len(text)

    def begin(self, name: str) -> None:
        self.arguments.end()
        self.arguments.begin(clean_name(name))
        if self.form.streams and not self.bare:
            self.confirm()

    def confirm(self) -> None:
        self.confirmed, self._all_text = True, []

    def end_value(self) -> None:
        """Ends the value. Line breaks around a value in lines of its own are not part of the value."""
        if self.newline and not self.in_lines:
            self.arguments.text(self.newline)
        self.arguments.end_text()
        self._possible_end = None

    def mark_possible_end(self, since: str, by_parameter: bool = False) -> None:
        if self._possible_end is None and not self.exact:
            before = self.copy()
            before._held = ""
            before.depth = 0
            before.quoted = 0
            before.next_tag_ends = True
            before.arguments.out = []
            before._all_text = ["".join(self._all_text).removesuffix(since)]
            self._possible_end = _PossibleEnd(before, [since], len(self.arguments.out), by_parameter)

    def discard_possible_end(self) -> None:
        self._possible_end = None

    @property
    def lacks_an_end(self) -> bool:
        """Returns True if an end here leaves the value without an end tag, while the possible end does not."""
        return self._possible_end is not None and self._possible_end.by_parameter

    def may_follow(self, tag: re.Match[str]) -> bool:
        """Returns True if this tag may follow a value: no parameter, or one that the tool has and the call lacks."""
        return tag.lastgroup != "parameter" or self.arguments.takes(clean_name(tag["key"]))

    def backtrack(self) -> bool:
        """Returns to the possible end, which thus was the end. Returns False if there is none."""
        if self._possible_end is None:
            return False
        possible, retries = self._possible_end, self.retries - 1
        emitted = self.arguments.out[:possible.emitted]
        vars(self).update(vars(possible.before.copy()))
        self.arguments.out, self.retries = emitted, retries
        self._reread = "".join(possible.since)
        if not self.confirmed:
            self._all_text.append(self._reread)
        if retries <= 0:
            self.close(self._reread, 0)
        return True

    def close(self, text: str, at: int) -> int:
        """Ends the block here."""
        self.arguments.end()
        self._rest, self._possible_end = self._with_outside_text(text[at:]), None
        return at

    def reject(self, text: str, at: int) -> int:
        """Ends the block here, without a call."""
        raw = "".join(self._all_text)
        self.failed = raw[:len(raw) - len(text) + at]
        self.arguments.out = []
        self._rest, self._possible_end = text[at:], None
        return at

    def _with_outside_text(self, rest: str) -> str:
        """Puts the block's text outside of calls before the text after the block."""
        aside = "".join(self.arguments.outside).strip(SPACES)
        return f"{aside}\n{rest}" if aside else rest

    def value(self, text: str) -> None:
        """Adds text to the value, without the line breaks around it."""
        if not text:
            return
        self.line_begins = text[-1] == "\n"
        if not self.begun:
            self.begun, self.in_lines = True, self.form.parameter_end[:1] == "\n" or text[0] == "\n"
            text = text.removeprefix("\n")
        if self.newline or self.line_begins:
            text = self.newline + text
            self.newline = "\n" if text.endswith("\n") else ""
            text = text.removesuffix("\n")
        self.arguments.text(text)


# Tags that may follow the end of a value; at the end of a function, its last value lacks an end tag.
_AFTER = {"parameter_end": {"parameter", "function_end", "function", "opening", "closing"},
          "function_end": {"function", "opening", "closing"}}


def block_begins(reader: CallReader, text: str, at: int) -> int:
    """Handles text after the start tag of a block."""
    start = skip_spaces(text, at)
    if start < len(text):
        as_json = text[start] == "{"
        reader.arguments.typed = as_json and reader.exact
        reader.state = json_tool_calls.head if as_json else before_function
    return start


def bare_call(reader: CallReader, text: str, at: int) -> int:
    """Handles text in a function without a block."""
    tag, is_open = reader.tag_at(text, at)
    if tag is None or not reader.arguments.knows(clean_name(tag["name"])):
        return at if is_open else reader.reject(text, len(reader.tags.function))
    reader.begin(tag["name"])
    reader.state = in_function
    return tag.end()


def after_bare(reader: CallReader, text: str, at: int) -> int:
    """Handles text after a function without a block. Models may write the end tag of a block without its start tag."""
    start = skip_spaces(text, at)
    tag, is_open = reader.tag_at(text, start) if start < len(text) else (None, True)
    if is_open:
        return at
    return reader.close(text, tag.end() if tag and tag.lastgroup == "closing" else at)


def before_function(reader: CallReader, text: str, at: int) -> int:
    """Handles text in a block, before the first function."""
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
    """Handles text between the parameters of a function."""
    tag, start = reader.next_tag(text, at)
    if not reader.confirmed and (reader.bare or not reader.form.streams) and text[at:start].strip(SPACES):
        return reader.reject(text, skip_spaces(text, at))
    reader.arguments.outside.append(text[at:start])
    return start if tag is None else next_part(reader, text, tag)


def next_part(reader: CallReader, text: str, tag: re.Match[str]) -> int:
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
    """Handles text in a value under a grammar. The first end tag after which the call can continue ends the value."""
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
    """Handles text in a value, up to a tag that may end it."""
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
    """Handles text after a tag that ends the value if a suitable tag follows."""
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
    """Handles text between the calls of a block, or after the last call."""
    start = skip_spaces(text, at)
    if start == len(text):
        return start
    tag, is_open = reader.tag_at(text, start)
    if tag is None:
        return start if is_open else reader.close(text, start)
    return reader.close(text, start) if tag.lastgroup == "parameter" else next_part(reader, text, tag)
