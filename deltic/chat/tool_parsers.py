"""Reads tool calls while they are written, character by character, so that it does not matter how the text is cut.

    block -> calls -> arguments, of which each piece is said as soon as nothing that follows can change it

An argument may quote tags and whole calls. A closing tag ends a value if a tag follows that may follow a value, and if
the value has closed all functions and parameters that it quotes. A parameter that begins within a value is quoted if
the tool's schema does not know it, or if the call has it already; else the closing tag of the value may be missing.
Where that leaves a doubt, the text after the place in doubt is read as part of the value, but held back until the value
ends for certain; if it never does, the place in doubt was its end, and all that follows is read again.

Under a grammar there is no doubt: a value ends with the first closing tag that another parameter or the function's end
follows, both written as the form writes them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from deltic.chat import json_tool_calls
from deltic.chat.schema_coercion import Schema
from deltic.chat.stop_strings import open_suffix
from deltic.chat.tool_arguments import CallDelta, ToolArguments
from deltic.chat.tools import SPACES, CallForm, clean_name, skip_spaces

# What may follow the end of a value; the second, where the end of the value itself is missing.
_AFTER = {"parameter_end": {"parameter", "function_end", "function", "opening", "closing"},
          "function_end": {"function", "opening", "closing"}}

State = Callable[["CallReader", str, int], int]
"""Reads on from a place in the text, and says how far it came."""


@dataclass(slots=True)
class _PossibleEnd:
    """What may be the end of a value: the reader before it, the text since, how much had been said.

    by_parameter: the value quotes a parameter there, or ends one; if it has no closing tag of its own, it does not.
    """

    before: CallReader
    since: list[str]
    said: int
    by_parameter: bool


class CallReader:
    """One block of calls. form: how they are written; schemas: by the names of tools. retries: how often text may be
    read again.

    opening: the tag that began the block, or for a function without a block what that begins with: then `feed` takes
    it as well. exact: a grammar wrote the calls.
    """

    def __init__(self, form: CallForm, schemas: Mapping[str, Schema], opening: str, retries: int,
                 exact: bool = False) -> None:
        self.form, self.tags, self.retries, self.exact = form, form.tags, retries, exact
        self.bare = opening != form.block[0]
        self.arguments = ToolArguments(schemas, streams=form.streams, decodes=form.decodes,
                                   drops_empty=form.drops_empty and not exact)
        self.certain = False  # that there is a call
        self.failed = ""  # the text of a block that has no call
        self.state: State = bare_call if self.bare else block_begins
        self._raw = [] if self.bare else [opening]  # all text, until there is a call for certain
        self._held, self._rest = "", None  # type: str, str | None
        self._again: str | None = None
        self._doubt: _PossibleEnd | None = None
        self.decided = False  # the next tag is not quoted
        # of a value: functions and parameters that it quotes, whether it has begun, whether it is at the beginning of a
        # line, a line's end that may be its last, the kind of a tag that may end it
        self.depth = self.quoted = 0
        self.begun, self.line_begins, self.newline, self.ending = False, True, "", ""
        self.in_lines = True
        self.pieces: list[str] = []
        self.json = json_tool_calls.JsonScan()

    def feed(self, text: str) -> str | None:
        """Take more text. Once the block is over: what comes after it."""
        if self._doubt:
            self._doubt.since.append(text)
        if not self.certain:
            self._raw.append(text)
        text, at = self._held + text, 0
        while self._rest is None:
            state, start = self.state, at
            at = state(self, text, at)
            if self._again is not None:
                text, at, self._again = self._again, 0, None
            elif at == len(text) or (at == start and self.state is state):
                break
        self._held = text[at:]
        return self._rest

    def finish(self, cut: bool = False) -> str:
        """There is no more text: the call ends here, or where it was in doubt. What comes after it then.

        cut: the model did not end it, so that a call that is open stays open.
        """
        if cut and self.certain and self._rest is None and self.arguments.open:
            self._doubt, self._rest = None, ""
        while self._rest is None and self.fall_back():
            self.feed("")
        if self._rest is None:
            left = self._cut(self._held, self._held.startswith("</"))
            self.arguments.end()
            if not self.certain:
                self.failed, self.arguments.out = "".join(self._raw), []
            self._rest = self._beside(left) if self.certain else ""
        return self._rest

    def _cut(self, held: str, closes: bool) -> str:
        """The text ends with what was held back, the beginning of a closing tag perhaps; gives what is in no call."""
        if self.state is in_value and not closes:
            self.value(held)
        if self.state in (after_call, after_bare, json_tool_calls.after_object):
            return "" if closes else held
        return json_tool_calls.cut(self, held, closes)

    def take(self) -> list[CallDelta]:
        """What has become certain."""
        out, doubt = self.arguments.out, self._doubt
        said = len(out) if (self.form.streams and self.certain) or self._rest is not None else 0
        if doubt and said:
            said, doubt.said = doubt.said, 0
        if not said:
            return []
        self.arguments.out = out[said:]
        return out[:said]

    def copy(self) -> CallReader:
        """An independent reader in the same state."""
        twin = copy.copy(self)
        twin.arguments, twin.json = self.arguments.copy(), copy.copy(self.json)
        twin._raw, twin.pieces = self._raw.copy(), self.pieces.copy()
        if self._doubt:
            twin._doubt = replace(self._doubt, since=self._doubt.since.copy())
        return twin

    # What the states do

    def tag_at(self, text: str, at: int) -> tuple[re.Match[str] | None, bool]:
        """The tag here, and whether there may be one when more has come."""
        tag = self.tags.pattern.match(text, at)
        return tag, tag is None and text[at] == "<" and self.tags.begins(text, at)

    def past_spaces(self, text: str, at: int) -> tuple[int, re.Match[str] | None, bool]:
        """Behind the spaces that follow what may end a value, and become pieces of it: where that is, the tag there,
        and whether more text must come first."""
        start = skip_spaces(text, at)
        self.pieces.append(text[at:start])
        if start == len(text):
            return start, None, True
        return start, *self.tag_at(text, start)

    def next_tag(self, text: str, at: int) -> tuple[re.Match[str] | None, int]:
        """The next tag, and where it begins; else how far there is none."""
        tag = self.tags.pattern.search(text, at)
        return (tag, tag.start()) if tag else (None, self.open_tag(text, at))

    def open_tag(self, text: str, at: int) -> int:
        """Where a tag begins that is not all there, or the end."""
        start = text.rfind("<", at)
        return start if start >= 0 and self.tags.begins(text, start) else len(text)

    def begin(self, name: str) -> None:
        """A call."""
        self.arguments.end()
        self.arguments.begin(clean_name(name))
        if self.form.streams and not self.bare:
            self.settle()

    def settle(self) -> None:
        """There is a call."""
        self.certain, self._raw = True, []

    def end_value(self) -> None:
        """For certain. Where values stand in lines of their own, the line's ends are no part of them."""
        if self.newline and not self.in_lines:
            self.arguments.text(self.newline)
        self.arguments.end_text()
        self._doubt = None

    def doubt(self, since: str, by_parameter: bool = False) -> None:
        """The value may have ended before this text."""
        if self._doubt is None and not self.exact:
            before = self.copy()
            before._held, before.depth, before.quoted, before.decided, before.arguments.out = "", 0, 0, True, []
            before._raw = ["".join(self._raw).removesuffix(since)]
            self._doubt = _PossibleEnd(before, [since], len(self.arguments.out), by_parameter)

    def trust(self) -> None:
        """Nothing is in doubt."""
        self._doubt = None

    @property
    def lacks_an_end(self) -> bool:
        """Whether the value, if it had its end here, would lack a closing tag, and would not with its end where the
        doubt is."""
        return self._doubt is not None and self._doubt.by_parameter

    def may_follow(self, tag: re.Match[str]) -> bool:
        """Whether this tag may follow a value: the call has no such parameter, and the tool may have it."""
        return tag.lastgroup != "parameter" or self.arguments.takes(clean_name(tag["key"]))

    def fall_back(self) -> bool:
        """What was in doubt was the end; False if nothing was."""
        if self._doubt is None:
            return False
        doubt, said, retries = self._doubt, self.arguments.out[:self._doubt.said], self.retries - 1
        vars(self).update(vars(doubt.before.copy()))
        self.arguments.out, self.retries = said, retries
        self._again = "".join(doubt.since)
        if not self.certain:
            self._raw.append(self._again)
        if retries <= 0:
            self.close(self._again, 0)
        return True

    def close(self, text: str, at: int) -> int:
        """The block is over here."""
        self.arguments.end()
        self._rest, self._doubt = self._beside(text[at:]), None
        return at

    def fail(self, text: str, at: int) -> int:
        """There is no call in the block, which is over here."""
        raw = "".join(self._raw)
        self.failed = raw[:len(raw) - len(text) + at]
        self.arguments.out = []
        self._rest, self._doubt = text[at:], None
        return at

    def _beside(self, rest: str) -> str:
        """What was no part of a call stands behind them."""
        aside = "".join(self.arguments.aside).strip(SPACES)
        return f"{aside}\n{rest}" if aside else rest

    def value(self, text: str) -> None:
        """More of a value, without the line's ends around it."""
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


def block_begins(reader: CallReader, text: str, at: int) -> int:
    """After the tag that opens a block."""
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
        return at if is_open else reader.fail(text, len(reader.tags.function))
    reader.begin(tag["name"])
    reader.state = in_function
    return tag.end()


def after_bare(reader: CallReader, text: str, at: int) -> int:
    """After a function without a block. Models forget the tag that opens one, and write the one that closes it."""
    start = skip_spaces(text, at)
    tag, is_open = reader.tag_at(text, start) if start < len(text) else (None, True)
    if is_open:
        return at
    return reader.close(text, tag.end() if tag and tag.lastgroup == "closing" else at)


def before_function(reader: CallReader, text: str, at: int) -> int:
    """In a block that has no function yet."""
    tag, start = reader.next_tag(text, at)
    reader.arguments.aside.append(text[at:start])
    if tag is None:
        return start
    if tag.lastgroup in ("opening", "closing"):
        return reader.fail(text, start if tag.lastgroup == "opening" else tag.end())
    if tag.lastgroup == "function":
        reader.begin(tag["name"])
        reader.state = in_function
    return tag.end()


def in_function(reader: CallReader, text: str, at: int) -> int:
    """Between the values of a function."""
    tag, start = reader.next_tag(text, at)
    if not reader.certain and (reader.bare or not reader.form.streams) and text[at:start].strip(SPACES):
        return reader.fail(text, skip_spaces(text, at))
    reader.arguments.aside.append(text[at:start])
    return start if tag is None else next_part(reader, text, tag)


def next_part(reader: CallReader, text: str, tag: re.Match[str]) -> int:
    """A tag after a value, or before the first."""
    kind = tag.lastgroup
    if kind == "parameter":
        reader.settle()
        reader.arguments.key(clean_name(tag["key"]))
        reader.begun, reader.line_begins, reader.newline, reader.depth, reader.quoted = False, True, "", 0, 0
        reader.state = in_exact_value if reader.exact else in_value
    elif kind == "function":
        reader.begin(tag["name"])
        reader.state = in_function
    elif kind == "function_end":
        if reader.form.streams or reader.exact:
            reader.settle()
        reader.arguments.end()
        reader.state = after_bare if reader.bare else after_call
    elif kind in ("opening", "closing"):
        return reader.close(text, tag.start() if kind == "opening" else tag.end())
    return tag.end()


def in_exact_value(reader: CallReader, text: str, at: int) -> int:
    """In a value that ends with the first closing tag behind which the call goes on."""
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
    """In a value, at whose end there should be a tag."""
    tag, start = reader.next_tag(text, at)
    reader.value(text[at:start])
    if tag is None:
        return start
    decided, reader.decided = reader.decided, False
    kind, begins_line = tag.lastgroup or "", reader.line_begins
    around, parameter = kind in ("opening", "closing"), kind == "parameter" and begins_line
    if decided and (around or parameter):
        reader.end_value()
        return next_part(reader, text, tag)
    if kind == "parameter_end" or (kind == "function_end" and not reader.depth):
        reader.ending, reader.pieces, reader.state = kind, [tag[0]], after_value
        return tag.end()
    if around or (parameter and reader.may_follow(tag)):
        reader.doubt(text[start:], parameter)
    reader.depth += {"function": 1, "function_end": -1}.get(kind, 0)
    reader.quoted += parameter and not reader.depth
    reader.value(tag[0])
    return tag.end()


def after_value(reader: CallReader, text: str, at: int) -> int:
    """After a tag that ends a value, if the right one follows."""
    start, tag, waits = reader.past_spaces(text, at)
    if waits:
        return start
    reader.state = in_value
    quoted, ends = "".join(reader.pieces), tag is not None and tag.lastgroup in _AFTER[reader.ending]
    if reader.ending == "parameter_end" and reader.quoted and not reader.depth:
        reader.quoted -= 1
        if tag and ends and reader.may_follow(tag):
            reader.doubt(quoted + text[start:], True)
        reader.value(quoted)
    elif tag is None or not ends:
        reader.value(quoted)
    elif reader.depth:
        reader.doubt(quoted + text[start:])
        reader.value(quoted)
    elif reader.ending == "parameter_end" or not (reader.lacks_an_end and reader.fall_back()):
        return _value_ended(reader, text, start, tag)
    return start


def _value_ended(reader: CallReader, text: str, start: int, tag: re.Match[str]) -> int:
    """For certain, and this tag follows."""
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
    """Between the calls of a block, or behind the last."""
    start = skip_spaces(text, at)
    if start == len(text):
        return start
    tag, is_open = reader.tag_at(text, start)
    if tag is None:
        return start if is_open else reader.close(text, start)
    return reader.close(text, start) if tag.lastgroup == "parameter" else next_part(reader, text, tag)
