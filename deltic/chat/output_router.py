"""Routes generated tokens to reasoning, content and tool calls. Emitted text is never taken back.

    token ids -> bytes -> characters -> regions -> stop strings -> whitespace -> deltas

Every stage holds back only text that the next token may change: an incomplete character, the beginning of a marker or
stop string, whitespace before a marker. So the deltas do not depend on how the text is split into tokens.
"""

from __future__ import annotations

import codecs
import copy
import re
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import count
from typing import Any, NamedTuple

from deltic.chat.markers import (
    THINK,
    THINK_END,
    Markers,
    MarkerVocabulary,
    Region,
    StopScanner,
    open_suffix,
    start_mode,
)
from deltic.chat.tool_parsers import CallReader
from deltic.chat.tools import QWEN, CallForm, tool_schemas


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """A piece of a tool call.

    index: index of the call in the answer. id: the same for all pieces of a call. name: on the first piece only.
    arguments: all pieces concatenated are one JSON object, or the beginning of one if the answer was cut.
    written: like `arguments`, with the values as the model wrote them, before conversion to the schema's types.
    """

    index: int
    id: str
    name: str | None = None
    arguments: str = ""
    written: str = field(default="", compare=False)


class Delta(NamedTuple):
    """A piece of an answer: text, or `call` if kind is "tool".

    index: of the choice, in a stream of several choices. tokens: ids in place of text, for a model without a tokenizer.
    """

    kind: Region
    text: str = ""
    call: ToolDelta | None = None
    index: int = 0  # type: ignore[assignment]  # hides tuple.index
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerCall:
    """A tool call of an answer. `arguments` and `written` are as in ToolDelta."""

    id: str
    name: str
    arguments: str
    written: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[AnswerCall, ...] = ()


def join(deltas: Iterable[Delta]) -> Answer:
    """Joins the pieces of one answer."""
    texts: dict[str, list[str]] = {"reasoning": [], "content": []}
    calls: dict[int, list[ToolDelta]] = {}
    for delta in deltas:
        if delta.call is None:
            texts[delta.kind].append(delta.text)
        else:
            calls.setdefault(delta.call.index, []).append(delta.call)
    return Answer("".join(texts["reasoning"]), "".join(texts["content"]),
                  tuple(_join_call(pieces) for pieces in calls.values()))


def merge(deltas: list[Delta]) -> list[Delta]:
    """Joins neighbouring pieces of one kind or call, and drops empty ones."""
    merged: list[Delta] = []
    for delta in deltas:
        before = merged[-1] if merged else None
        if before and before.kind == delta.kind and (joined := _joined(before, delta)):
            merged[-1] = joined
        elif delta.call is not None or delta.text or delta.tokens:
            merged.append(delta)
    return merged


def _joined(before: Delta, delta: Delta) -> Delta | None:
    first, second = before.call, delta.call
    if first is None or second is None:
        return Delta(delta.kind, before.text + delta.text, tokens=before.tokens + delta.tokens)
    if first.name is not None or second.name is not None:
        return None
    return Delta("tool", call=ToolDelta(first.index, first.id, None, first.arguments + second.arguments,
                                        first.written + second.written))


def _join_call(pieces: list[ToolDelta]) -> AnswerCall:
    return AnswerCall(pieces[0].id, "".join(piece.name or "" for piece in pieces),
                      "".join(piece.arguments for piece in pieces), "".join(piece.written for piece in pieces))


_SPACES = " \t\r\n"
_ENDLESS = 1 << 62
_FENCE = "```"
_MAX_RETRIES = 16  # broken calls of one answer; after each of them the text is read again


def chat_router(
    tokenizer: MarkerVocabulary,
    prompt_ids: Sequence[int],
    tools: Sequence[Mapping[str, Any]] | None = None,
    stop: Sequence[str] = (),
    form: CallForm = QWEN,
    one_call: bool = False,
    exact: bool = False,
) -> OutputRouter:
    """Creates the router of one chat answer. Without tools, calls are content.

    one_call: the answer ends after the first call. exact: a grammar enforces the form of calls.
    """
    calls = CallOptions(tools, form, one_call, exact=exact) if tools else None
    return OutputRouter(tokenizer.visible_bytes, markers=Markers.of(tokenizer, form.markers),
                        start=start_mode(prompt_ids, tokenizer), calls=calls, stop=stop)


def text_router(tokenizer: MarkerVocabulary, stop: Sequence[str] = ()) -> OutputRouter:
    """Creates the router of one raw completion: all text is content."""
    return OutputRouter(tokenizer.visible_bytes, stop=stop)


def _new_id() -> str:
    return "call_" + secrets.token_hex(12)


class CallOptions:
    """The way in which the calls of an answer are read. The options are those of `chat_router`."""

    def __init__(self, tools: Sequence[Mapping[str, Any]], form: CallForm = QWEN, one_call: bool = False,
                 new_id: Callable[[], str] = _new_id, exact: bool = False) -> None:
        self.schemas = tool_schemas(tools)
        self.form = form
        self.one_call = one_call
        self.exact = exact
        self.new_id = new_id
        self.markers = (THINK, THINK_END, *form.markers)


class OutputRouter:
    """Turns the tokens of one answer into deltas.

    token_bytes: returns the visible bytes of a token (none for special tokens). calls: None makes calls content. stop:
    strings that end the content without being part of it; they do not apply to reasoning and calls. characters: number
    of characters so far, in all regions. region: region of the next token; "tool" inside a call.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], *, markers: Markers | None = None,
                 start: Region = "content", calls: CallOptions | None = None, stop: Sequence[str] = ()) -> None:
        self._token_bytes = token_bytes
        self._markers = markers or Markers()
        self._texts = self._markers.texts
        self._calls = calls
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.stops = StopScanner.of(stop)
        self.region: Region = start
        self._partial = ""  # possibly the beginning of a marker
        self._spaces = ""  # whitespace that a following marker would remove
        self._skip = "\n"  # leading characters to drop
        self._skips = int(start == "reasoning")  # number of leading characters to drop
        self._reader: CallReader | None = None  # reads the open calls while the region is "tool"
        self._origin = start  # the region before the calls
        self._gap = ""  # the whitespace that the calls removed
        self._retries = _MAX_RETRIES
        self._line = ""  # the beginning of the open line of content
        self._fenced = False  # the open line is in a block of code
        self.characters = 0
        self._called = 0  # number of calls
        self._call_id = ""
        self._over = False  # the only allowed call is complete
        self._complete = False  # no text followed the only allowed call
        self._out: list[Delta] = []

    @property
    def stopped(self) -> bool:
        return self._over or self.stops.stopped

    @property
    def can_stop(self) -> bool:
        """True if the text may stop the answer."""
        return bool(self.stops.stops or (self._calls and self._calls.one_call))

    @property
    def ended(self) -> bool:
        """True if the text is complete: outside of think blocks and calls, and not cut at a stop string."""
        return self.region == "content" and (self._complete or not self.stopped)

    def feed(self, token: int) -> list[Delta]:
        """Takes the next token."""
        marker = self._markers.ids.get(token)
        if marker is None:
            text = self._utf8.decode(self._token_bytes(token))
            self.characters += len(text)
            self._scan(text)
        else:
            self._flush_text()
            self._mark(marker)
        return self._take()

    def finish(self, cut: bool = False) -> list[Delta]:
        """Ends the answer and returns the held text. cut: the model did not end the answer; an open call stays open."""
        self._flush_text()
        while self._reader:
            self._after_calls(self._reader, self._reader.finish(cut))
        if not self.stopped:
            self._put(self.stops.flush())
            self._emit_spaces()
        return self._take()

    def copy(self) -> OutputRouter:
        twin = copy.copy(self)
        twin._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        twin._utf8.setstate(self._utf8.getstate())
        twin.stops = self.stops.copy()
        twin._reader = self._reader and self._reader.copy()
        twin._out = []
        return twin

    def _take(self) -> list[Delta]:
        out, self._out = self._out, []
        return merge(out) if len(out) > 1 else out

    def _scan(self, text: str) -> None:
        """Splits text at markers that are not tokens of their own."""
        if not self._texts:
            return self._write(text)
        text = self._partial + text
        at = self._split(text, self._texts)
        cut = len(text) - open_suffix(text[at:], self._texts)
        self._partial = text[cut:]
        self._write(text[at:cut])

    def _split(self, text: str, markers: tuple[str, ...]) -> int:
        """Writes text up to the last marker. Returns the position after the marker."""
        at = 0
        for found in _pattern(markers).finditer(text):
            self._write(text[at:found.start()])
            self._mark(found[0])
            at = found.end()
        return at

    def _flush_text(self) -> None:
        self._scan(self._utf8.decode(b"", True))
        partial, self._partial = self._partial, ""
        self._write(partial)

    def _write(self, text: str) -> None:
        """Writes text without markers to the current region."""
        if self._reader:
            self._read_call(self._reader, text)
        elif not self.stopped:
            if self._skips:
                text = self._skip_leading(text)
            if self.region == "content" and self._calls:
                self._follow_lines(text)
            if self.region != "content" or not self.stops.stops:
                return self._put(text)
            self._put(self.stops.push(text))
            if self.stopped:
                self._emit_spaces()

    def _follow_lines(self, text: str) -> None:
        """Tracks lines of content. A function without a block counts only at the start of a line, outside of code."""
        *lines, last = (self._line + text).split("\n")
        self._fenced ^= sum(line.lstrip().startswith(_FENCE) for line in lines) % 2 == 1
        self._line = last.lstrip()[:len(_FENCE)]

    def _skip_leading(self, text: str) -> str:
        kept = text.lstrip(self._skip)
        if len(text) - len(kept) > self._skips:
            kept = text[self._skips:]
        self._skips = 0 if kept else self._skips - len(text)
        return kept

    def _put(self, text: str) -> None:
        if self._spaces:
            text = self._spaces + text
        kept = text.rstrip(_SPACES)
        self._spaces = text[len(kept):]
        self._emit(kept)

    def _emit_spaces(self) -> None:
        spaces, self._spaces = self._spaces, ""
        self._emit(spaces)

    def _emit(self, text: str) -> None:
        if text:
            self._out.append(Delta("reasoning" if self.region == "reasoning" else "content", text))

    def _mark(self, marker: str) -> None:
        if self.stopped:
            return
        if self._reader:
            self._mark_in_call(self._reader, marker)
        elif marker == THINK:
            self._open_thinking()
        elif marker == THINK_END:
            self._close_thinking()
        elif self._calls and marker in self._calls.form.openings and self._may_open(marker, self._calls.form):
            self._open_calls(marker, self._calls)
        else:
            self._write(marker)

    def _may_open(self, marker: str, form: CallForm) -> bool:
        begins_line = self.region == "content" and not self._line and not self._fenced
        return marker == form.block[0] or form.anywhere or begins_line

    def _mark_in_call(self, reader: CallReader, marker: str) -> None:
        """Treats a marker inside a call as text, except for think tags before a call is confirmed."""
        if marker in (THINK, THINK_END) and not reader.confirmed and not reader.json.quote:
            self._after_calls(reader, reader.finish())
            self._mark(marker)
        else:
            self._read_call(reader, marker)

    def _open_thinking(self) -> None:
        if self.region == "content":
            self._put(self.stops.flush())
            self._spaces = ""
        self._enter("reasoning", "\n", 1)

    def _close_thinking(self) -> None:
        if self.region == "reasoning":
            self._spaces = self._spaces.removesuffix("\n")
            self._emit_spaces()
        self._enter("content", "\r\n", _ENDLESS)

    def _open_calls(self, opening: str, calls: CallOptions) -> None:
        self._put(self.stops.flush())
        self._origin = self.region
        self._gap = self._spaces
        self._spaces = ""
        self._enter("tool", "", 0)
        self._reader = CallReader(calls.form, calls.schemas, opening, self._retries, calls.exact)
        if self._reader.bare:
            self._read_call(self._reader, opening)

    def _enter(self, region: Region, skip: str, skips: int) -> None:
        self.region = region
        self._skip = skip
        self._skips = skips

    def _read_call(self, reader: CallReader, text: str) -> None:
        rest = reader.feed(text)
        if rest is None:
            self._say_calls(reader)
        else:
            self._after_calls(reader, rest)

    def _after_calls(self, reader: CallReader, rest: str) -> None:
        """Ends a block. If it has no call, its text stays in its region; a call ends the reasoning."""
        assert self._calls
        self._say_calls(reader)
        self._reader, self._retries = None, reader.retries
        if reader.failed:
            self._enter(self._origin, "", 0)
            self._write(self._gap + reader.failed)
        else:
            self._enter("content", _SPACES, _ENDLESS)
            self._over = self._calls.one_call and self._called > 0
            self._complete = self._over and self._called == 1 and not rest
        if rest:
            at = self._split(rest, self._calls.markers) if self._retries > 0 else 0
            self._write(rest[at:])

    def _say_calls(self, reader: CallReader) -> None:
        assert self._calls
        for name, arguments, written in reader.take():
            if name is not None:
                self._called, self._call_id = self._called + 1, self._calls.new_id()
            if self._called == 1 or not self._calls.one_call:
                self._out.append(Delta("tool", call=ToolDelta(self._called - 1, self._call_id, name, arguments,
                                                              written)))


class TokenRouter(OutputRouter):
    """Emits token ids as content, for a model without a tokenizer."""

    def __init__(self) -> None:
        super().__init__(lambda token: b"")

    def feed(self, token: int) -> list[Delta]:
        return [Delta("content", tokens=(token,))]


@lru_cache(maxsize=16)
def _pattern(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))


RoutedToken = tuple[int, list[Delta], bool]
"""The number of characters of an answer before a token, the token's deltas, and True if the token is reasoning."""


class AnswerText:
    """The text of one choice. Each token is routed once: in the engine's thread if the text controls the answer
    (`push`), else by the reader (`take`, `finish`).

    hidden: stop ids, which are not part of the text.
    """

    def __init__(self, router: OutputRouter, hidden: frozenset[int] = frozenset(), begun: Sequence[Delta] = ()) -> None:
        """begun: output of tokens already routed, which is returned with the first token or at the end."""
        self._router = router
        self._hidden = hidden
        self._begun = begun
        self._pushed: deque[RoutedToken] = deque()

    @property
    def region(self) -> Region:
        """The region of the next token; "tool" inside a call."""
        return self._router.region

    @property
    def stopped(self) -> bool:
        return self._router.stopped

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._router.stops.found

    @property
    def ended(self) -> bool:
        """True if the text is complete: outside of think blocks and calls, and not cut at a stop string."""
        return self._router.ended

    def push(self, token: int, /) -> bool:
        """Routes the next token before it is read. Returns True after a stop string."""
        self._pushed.append(self._route(token))
        return self._router.stopped

    def take(self, token: int) -> RoutedToken:
        """Returns the next token in routed form."""
        return self._pushed.popleft() if self._pushed else self._route(token)

    def finish(self, cut: bool = False) -> list[Delta]:
        """Ends the answer and returns the held text. cut: as in OutputRouter."""
        begun, self._begun = self._begun, ()
        return [*begun, *self._router.finish(cut)]

    def _route(self, token: int) -> RoutedToken:
        before, thinking = self._router.characters, self._router.region == "reasoning"
        deltas = [] if token in self._hidden else self._router.feed(token)
        if self._begun:
            deltas, self._begun = [*self._begun, *deltas], ()
        return before, deltas, thinking and self._router.region == "reasoning"


class AnswerTexts:
    """The texts of a request's choices, created on demand. router: in the state before the first token. begun: tokens
    with which all choices begin. Thread-safe."""

    def __init__(self, router: OutputRouter, hidden: Iterable[int] = (), begun: Iterable[int] = ()) -> None:
        self._start, self._hidden = router, frozenset(hidden)
        self._begun = merge([delta for token in begun for delta in router.feed(token)])
        self._texts: dict[int, AnswerText] = {}

    def of(self, choice: int) -> AnswerText:
        """Returns the text of a choice. It is the same object in each call."""
        return self._texts.get(choice) or self._texts.setdefault(choice, self.again())

    def followers(self) -> Callable[[], AnswerText]:
        """Returns a function for the engine that returns the texts of the choices in order."""
        return partial(next, map(self.of, count()))

    def again(self, tokens: Sequence[int] = ()) -> AnswerText:
        """Returns a new text that has taken these tokens."""
        text = AnswerText(self._start.copy(), self._hidden, self._begun)
        for token in tokens:
            text.take(token)
        return text

    def forget(self, choice: int) -> None:
        self._texts.pop(choice, None)
