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

from deltic.text.coerce import dumps, typed
from deltic.text.deltas import Delta, Region, ToolDelta, merge
from deltic.text.markers import ALL, CALL, CALL_END, THINK, THINK_END, Markers, Vocabulary, start_mode
from deltic.text.stops import StopScanner, open_suffix
from deltic.text.tools import CallBody, tool_schemas

_SPACES = " \t\r\n"
_ENDLESS = 1 << 62
_MOST_SALVAGED = 16  # broken calls of one answer: all that follows is read again for each


def chat_router(tokenizer: Vocabulary, prompt_ids: Sequence[int],
                tools: Sequence[Mapping[str, Any]] | None = None, stop: Sequence[str] = ()) -> Router:
    """A router for one choice of a chat answer; without tools (tool_choice "none" too) calls are content."""
    return Router(tokenizer.visible_bytes, markers=Markers.of(tokenizer),
                  start=start_mode(prompt_ids, tokenizer), tools=tools, stop=stop)


def text_router(tokenizer: Vocabulary, stop: Sequence[str] = ()) -> Router:
    """A router for one choice of a raw completion: everything is content."""
    return Router(tokenizer.visible_bytes, stop=stop)


def _new_id() -> str:
    return "call_" + secrets.token_hex(12)


class Router:
    """Turns the tokens of one choice into deltas.

    token_bytes gives the visible bytes of a token (none for special tokens). Stop strings end the content:
    the text before them is emitted, they and all that follows are not, and `stopped` is set. They do not
    apply to reasoning and tool calls. characters: how many tokens have spelled so far, in whatever region.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], *, markers: Markers | None = None,
                 start: Region = "content", tools: Sequence[Mapping[str, Any]] | None = None,
                 stop: Sequence[str] = (), new_id: Callable[[], str] = _new_id) -> None:
        self._token_bytes = token_bytes
        self._markers = markers or Markers()
        self._texts = self._markers.texts
        self._schemas = tool_schemas(tools or ())
        self._parse_calls = bool(tools)
        self._new_id = new_id
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self.stops = StopScanner(tuple(stop))
        self._region: Region = start
        self._partial = ""  # perhaps the beginning of a marker
        self._spaces = ""  # whitespace that a following marker would swallow
        self._gap = ""  # whitespace that the open call has swallowed
        self._skip, self._skips = "\n", int(start == "reasoning")  # leading characters to drop, and how many
        self._body = CallBody()
        self._calls = self.characters = 0
        self._call_id = ""
        self._out: list[Delta] = []

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete; nothing is emitted any more."""
        return self.stops.stopped

    @property
    def region(self) -> Region:
        """Where the next token belongs: "tool" means that a call is still open."""
        return self._region

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

    def finish(self) -> list[Delta]:
        """Give what was held back; the answer is over."""
        self._flush_text()
        self._texts = ALL
        for _ in range(_MOST_SALVAGED):
            if self._region == "tool":
                self._salvage_call()
        if self._region == "tool":
            self._give_call_up()
        if not self.stopped:
            self._put(self.stops.flush())
            self._emit_spaces()
        return self._take()

    def copy(self) -> Router:
        """An independent router in the same state."""
        twin = copy.copy(self)
        twin._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        twin._utf8.setstate(self._utf8.getstate())
        twin.stops, twin._body, twin._out = self.stops.copy(), self._body.copy(), []
        return twin

    def _take(self) -> list[Delta]:
        out, self._out = self._out, []
        return merge(out) if len(out) > 1 else out

    def _scan(self, text: str) -> None:
        """Split at markers that have no token of their own."""
        if not self._texts:
            return self._write(text)
        text, at = self._partial + text, 0
        for found in _pattern(self._texts).finditer(text):
            self._write(text[at:found.start()])
            self._mark(found[0])
            at = found.end()
        cut = len(text) - open_suffix(text[at:], self._texts)
        self._partial = text[cut:]
        self._write(text[at:cut])

    def _flush_text(self) -> None:
        self._scan(self._utf8.decode(b"", True))
        partial, self._partial = self._partial, ""
        self._write(partial)

    def _write(self, text: str) -> None:
        """Text of the current region, free of markers."""
        if self._region == "tool":
            self._body.add(text)
            if ">" in text:
                self._announce_call()
        elif not self.stopped:
            text = self._skip_leading(text)
            self._put(self.stops.push(text) if self._region == "content" else text)
            if self.stopped:
                self._emit_spaces()

    def _skip_leading(self, text: str) -> str:
        if not self._skips:
            return text
        kept = text.lstrip(self._skip)
        if len(text) - len(kept) > self._skips:
            kept = text[self._skips:]
        self._skips = 0 if kept else self._skips - len(text)
        return kept

    def _put(self, text: str) -> None:
        text = self._spaces + text
        cut = len(text.rstrip(_SPACES))
        self._spaces = text[cut:]
        self._emit(text[:cut])

    def _emit_spaces(self) -> None:
        spaces, self._spaces = self._spaces, ""
        self._emit(spaces)

    def _emit(self, text: str) -> None:
        if text:
            self._out.append(Delta("reasoning" if self._region == "reasoning" else "content", text))

    def _mark(self, marker: str) -> None:
        if self.stopped:
            return
        if self._region == "tool":
            self._mark_in_call(marker)
        elif marker == THINK:
            self._open_thinking()
        elif marker == THINK_END:
            self._close_thinking()
        elif marker == CALL and self._parse_calls:
            self._open_call()
        else:
            self._write(marker)

    def _mark_in_call(self, marker: str) -> None:
        """Markers inside an argument are text: only a complete body can be closed."""
        if marker not in (CALL, CALL_END) or not self._body.complete:
            self._write(marker)
        elif marker == CALL_END:
            self._close_call(CALL_END)
        else:
            self._close_call("")
            self._open_call()

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

    def _open_call(self) -> None:
        self._put(self.stops.flush())
        self._gap = self._spaces if self._region == "content" else ""
        self._spaces, self._body, self._call_id = "", CallBody(), ""
        self._enter("tool", "", 0)

    def _enter(self, region: Region, skip: str, skips: int) -> None:
        self._region, self._skip, self._skips = region, skip, skips

    def _announce_call(self) -> None:
        if not self._call_id and (name := self._body.name):
            self._send_name(name)

    def _send_name(self, name: str) -> None:
        self._call_id = self._new_id()
        self._out.append(Delta("tool", call=ToolDelta(self._calls, self._call_id, name)))

    def _close_call(self, closing: str) -> None:
        calls = self._body.calls()
        if not calls:
            return self._give_call_up(closing)
        self._enter("content", _SPACES, _ENDLESS)
        for name, arguments in calls:
            if not self._call_id:
                self._send_name(name)
            wanted, written = dumps(typed(arguments, self._schemas.get(name, {}))), dumps(arguments)
            self._out.append(Delta("tool", call=ToolDelta(self._calls, self._call_id, None, wanted, written)))
            self._calls, self._call_id = self._calls + 1, ""

    def _give_call_up(self, closing: str = "") -> None:
        """It is content."""
        self._enter("content", "", _ENDLESS)
        self._write(self._gap + CALL + self._body.text + closing)

    def _salvage_call(self) -> None:
        """The answer ended inside a call: take the shortest body that was closed, route the rest again."""
        whole, closing, rest = self._body.text, "", ""
        if not self._body.complete:
            whole, closing, rest = whole.partition(CALL_END)
            self._body = CallBody(whole)
        self._close_call(closing)
        self._scan(rest)
        self._flush_text()


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

    def __init__(self, router: Router, hidden: frozenset[int] = frozenset()) -> None:
        self._router, self._stops, self._hidden = router, router.stops, hidden
        self._ahead: deque[Said] = deque()

    @property
    def region(self) -> Region:
        """Where the next token belongs: "tool" means that a call is still open."""
        return self._router.region

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete."""
        return self._stops.stopped

    @property
    def stop(self) -> str | None:
        """The stop string that is complete."""
        return self._stops.found

    def push(self, token: int, /) -> bool:
        """Route the next token before it is read; True if a stop string is complete."""
        self._ahead.append(self._route(token))
        return self._stops.stopped

    def take(self, token: int) -> Said:
        """What the next token says."""
        return self._ahead.popleft() if self._ahead else self._route(token)

    def finish(self) -> list[Delta]:
        """What was held back; the answer is over, and no token will follow."""
        return self._router.finish()

    def _route(self, token: int) -> Said:
        before, thinking = self._router.characters, self._router.region == "reasoning"
        deltas = [] if token in self._hidden else self._router.feed(token)
        return before, deltas, thinking and self._router.region == "reasoning"


class AnswerTexts:
    """The texts of a request's choices, each of which is made when it is asked for. router: as it is before the first
    token; hidden: as in AnswerText. Threads may share it."""

    def __init__(self, router: Router, hidden: Iterable[int] = ()) -> None:
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
