"""Routes generated tokens to reasoning, content and tool calls, and never takes a byte back.

    token ids -> bytes -> characters -> regions -> stop strings -> whitespace -> deltas

Every stage holds back only what the next token may still change: an incomplete character, a marker or stop
string that has begun, the whitespace before a marker. So how the text is split into tokens never shows.
"""

from __future__ import annotations

import codecs
import copy
import re
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import count
from typing import Any

from deltic.chat.deltas import Delta, Region, ToolDelta, merge
from deltic.chat.markers import THINK, THINK_END, Markers, MarkerVocabulary, start_mode
from deltic.chat.stop_strings import StopScanner, open_suffix
from deltic.chat.tool_parsers import CallReader
from deltic.chat.tools import QWEN, CallForm, tool_schemas

_SPACES = " \t\r\n"
_ENDLESS = 1 << 62
_FENCE = "```"
_MOST_RETRIES = 16  # broken calls of one answer: all that follows is read again for each


def chat_router(
    tokenizer: MarkerVocabulary,
    prompt_ids: Sequence[int],
    tools: Sequence[Mapping[str, Any]] | None = None,
    stop: Sequence[str] = (),
    form: CallForm = QWEN,
    one_call: bool = False,
    exact: bool = False,
) -> OutputRouter:
    """A router for one choice of a chat answer; without tools (tool_choice "none" too) calls are content.

    form: how calls are written; one_call: the answer ends with the first; exact: a grammar keeps calls to the form."""
    calls = CallOptions(tools, form, one_call, exact=exact) if tools else None
    return OutputRouter(tokenizer.visible_bytes, markers=Markers.of(tokenizer, form.markers),
                  start=start_mode(prompt_ids, tokenizer), calls=calls, stop=stop)


def text_router(tokenizer: MarkerVocabulary, stop: Sequence[str] = ()) -> OutputRouter:
    """A router for one choice of a raw completion: everything is content."""
    return OutputRouter(tokenizer.visible_bytes, stop=stop)


def _new_id() -> str:
    return "call_" + secrets.token_hex(12)


class CallOptions:
    """How the calls of an answer are to be read. tools: that may be called; form, one_call, exact: as in chat_router.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]], form: CallForm = QWEN, one_call: bool = False,
                 new_id: Callable[[], str] = _new_id, exact: bool = False) -> None:
        self.schemas, self.form, self.one_call, self.new_id = tool_schemas(tools), form, one_call, new_id
        self.exact = exact
        self.markers = (THINK, THINK_END, *form.markers)


class OutputRouter:
    """Turns the tokens of one choice into deltas.

    token_bytes gives the visible bytes of a token (none for special tokens). calls: without, they are content. Stop
    strings end the content: the text before them is emitted, they and all that follows are not, and `stopped` is set.
    They do not apply to reasoning and tool calls. characters: how many tokens have spelled so far, in whatever region.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], *, markers: Markers | None = None,
                 start: Region = "content", calls: CallOptions | None = None, stop: Sequence[str] = ()) -> None:
        self._token_bytes = token_bytes
        self._markers = markers or Markers()
        self._texts = self._markers.texts
        self._calls = calls
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.stops = StopScanner.of(stop)
        self._region: Region = start
        self._partial = ""  # perhaps the beginning of a marker
        self._spaces = ""  # whitespace that a following marker would swallow
        self._skip, self._skips = "\n", int(start == "reasoning")  # leading characters to drop, and how many
        self._reader: CallReader | None = None  # of the calls that are open, in the region "tool"
        self._origin, self._gap = start, ""  # the region before them, and whitespace that they have swallowed
        self._retries = _MOST_RETRIES
        self._line, self._fenced = "", False  # of content: how the open line begins, whether it is in a block of code
        self._called = self.characters = 0
        self._call_id = ""
        self._over = self._complete = False  # it ends with its first call; and that was all
        self._out: list[Delta] = []

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete, or the one call that is wanted; nothing is emitted any more."""
        return self._over or self.stops.stopped

    @property
    def region(self) -> Region:
        """Where the next token belongs: "tool" means that a call is still open."""
        return self._region

    @property
    def can_stop(self) -> bool:
        """Whether there is something that stops the answer."""
        return bool(self.stops.stops or (self._calls and self._calls.one_call))

    @property
    def ended(self) -> bool:
        """Whether the text may end here: in no think block or call, and with all that was said."""
        return self._region == "content" and (self._complete or not self.stopped)

    def feed(self, token: int) -> list[Delta]:
        """Take the next token."""
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
        """Give what was held back; the answer is over. cut: the model did not end it, and a call that is open stays
        open."""
        self._flush_text()
        while self._reader:
            self._after_calls(self._reader, self._reader.finish(cut))
        if not self.stopped:
            self._put(self.stops.flush())
            self._emit_spaces()
        return self._take()

    def copy(self) -> OutputRouter:
        """An independent router in the same state."""
        twin = copy.copy(self)
        twin._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        twin._utf8.setstate(self._utf8.getstate())
        twin.stops, twin._reader, twin._out = self.stops.copy(), self._reader and self._reader.copy(), []
        return twin

    def _take(self) -> list[Delta]:
        out, self._out = self._out, []
        return merge(out) if len(out) > 1 else out

    def _scan(self, text: str) -> None:
        """Split at markers that have no token of their own."""
        if not self._texts:
            return self._write(text)
        text = self._partial + text
        at = self._split(text, self._texts)
        cut = len(text) - open_suffix(text[at:], self._texts)
        self._partial = text[cut:]
        self._write(text[at:cut])

    def _split(self, text: str, markers: tuple[str, ...]) -> int:
        """Write as far as the last marker; gives where it ends."""
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
        """Text of the current region, free of markers."""
        if self._reader:
            self._read_call(self._reader, text)
        elif not self.stopped:
            if self._skips:
                text = self._skip_leading(text)
            if self._region == "content" and self._calls:
                self._follow_lines(text)
            if self._region != "content" or not self.stops.stops:
                return self._put(text)
            self._put(self.stops.push(text))
            if self.stopped:
                self._emit_spaces()

    def _follow_lines(self, text: str) -> None:
        """Content: a function without a block stands at the beginning of a line, in no block of code."""
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
            self._out.append(Delta("reasoning" if self._region == "reasoning" else "content", text))

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
        """Whether calls may begin here with this tag."""
        begins_line = self._region == "content" and not self._line and not self._fenced
        return marker == form.block[0] or form.anywhere or begins_line

    def _mark_in_call(self, reader: CallReader, marker: str) -> None:
        """Markers are text there, but for those of thinking before there is a call."""
        if marker in (THINK, THINK_END) and not reader.certain and not reader.json.quote:
            self._after_calls(reader, reader.finish())
            self._mark(marker)
        else:
            self._read_call(reader, marker)

    def _open_thinking(self) -> None:
        if self._region == "content":
            self._put(self.stops.flush())
            self._spaces = ""
        self._enter("reasoning", "\n", 1)

    def _close_thinking(self) -> None:
        if self._region == "reasoning":
            self._spaces = self._spaces.removesuffix("\n")
            self._emit_spaces()
        self._enter("content", "\r\n", _ENDLESS)

    def _open_calls(self, opening: str, calls: CallOptions) -> None:
        self._put(self.stops.flush())
        self._origin, self._gap, self._spaces = self._region, self._spaces, ""
        self._enter("tool", "", 0)
        self._reader = CallReader(calls.form, calls.schemas, opening, self._retries, calls.exact)
        if self._reader.bare:
            self._read_call(self._reader, opening)

    def _enter(self, region: Region, skip: str, skips: int) -> None:
        self._region, self._skip, self._skips = region, skip, skips

    def _read_call(self, reader: CallReader, text: str) -> None:
        rest = reader.feed(text)
        if rest is None:
            self._say_calls(reader)
        else:
            self._after_calls(reader, rest)

    def _after_calls(self, reader: CallReader, rest: str) -> None:
        """A block is over. What is no call belongs where it stands; a call ends the thinking."""
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
    """Of a model without a tokenizer: the ids themselves, as content."""

    def __init__(self) -> None:
        super().__init__(lambda token: b"")

    def feed(self, token: int) -> list[Delta]:
        return [Delta("content", tokens=(token,))]


@lru_cache(maxsize=16)
def _pattern(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))


Said = tuple[int, list[Delta], bool]
"""Characters that an answer's tokens said before one of them, what that one says, and whether it is a thought."""


class AnswerText:
    """The text of one choice. Each of its tokens is routed once: in the engine's thread where the text decides how the
    answer goes on (`push`), else where it is read (`take`, `finish`).

    hidden: stop ids, which end the answer and, like a stop string, are no part of its text.
    """

    def __init__(self, router: OutputRouter, hidden: frozenset[int] = frozenset()) -> None:
        self._router, self._stops, self._hidden = router, router.stops, hidden
        self._ahead: deque[Said] = deque()

    @property
    def region(self) -> Region:
        """Where the next token belongs: "tool" means that a call is still open."""
        return self._router.region

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self._router.stopped

    @property
    def stop(self) -> str | None:
        """The stop string that is complete."""
        return self._stops.found

    @property
    def ended(self) -> bool:
        """Whether the text may end here: in no think block or call, and with all that was said."""
        return self._router.ended

    def push(self, token: int, /) -> bool:
        """Route the next token before it is read; True if a stop string is complete."""
        self._ahead.append(self._route(token))
        return self._router.stopped

    def take(self, token: int) -> Said:
        """What the next token says."""
        return self._ahead.popleft() if self._ahead else self._route(token)

    def finish(self, cut: bool = False) -> list[Delta]:
        """What was held back; the answer is over, and no token will follow. cut: as in Router."""
        return self._router.finish(cut)

    def _route(self, token: int) -> Said:
        before, thinking = self._router.characters, self._router.region == "reasoning"
        deltas = [] if token in self._hidden else self._router.feed(token)
        return before, deltas, thinking and self._router.region == "reasoning"


class AnswerTexts:
    """The texts of a request's choices, each of which is made when it is asked for. router: as it is before the first
    token; hidden: as in AnswerText. Threads may share it."""

    def __init__(self, router: OutputRouter, hidden: Iterable[int] = ()) -> None:
        self._start, self._hidden = router, frozenset(hidden)
        self._texts: dict[int, AnswerText] = {}

    def of(self, choice: int) -> AnswerText:
        """That of a choice, the same for whoever asks."""
        return self._texts.get(choice) or self._texts.setdefault(choice, self.again())

    def followers(self) -> Callable[[], AnswerText]:
        """For the engine, which asks once for each choice, in their order."""
        return partial(next, map(self.of, count()))

    def again(self, tokens: Sequence[int] = ()) -> AnswerText:
        """A text of its own, which has taken these tokens."""
        text = AnswerText(self._start.copy(), self._hidden)
        for token in tokens:
            text.take(token)
        return text

    def forget(self, choice: int) -> None:
        """Its answer is over."""
        self._texts.pop(choice, None)
