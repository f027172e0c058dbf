"""Turns messages into a prompt: the rendered text, its ids, and the prefixes that later prompts will repeat."""

from __future__ import annotations

import json
import secrets
import unicodedata
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate, pairwise
from operator import itemgetter
from threading import Lock
from types import MappingProxyType
from typing import Any

from deltic.chat.control_tokens import MARK, Quoter
from deltic.chat.markers import start_mode
from deltic.chat.message_cache import MessageCache, ReadMessage, Schemas
from deltic.chat.messages import See, normalise_messages, plain
from deltic.chat.template import ChatTemplate
from deltic.chat.tokenizer import UNBOUNDED, Tokenizer, TokenLimit
from deltic.chat.tools import tool_schemas
from deltic.config import Limits
from deltic.errors import DelticError, RequestError, TemplateError
from deltic.params import common_length

_RESERVED = ("messages", "tools", "add_generation_prompt")
# Longer than any piece of a pre-tokenizer: a cut this far behind leaves earlier tokens alone.
_SLACK = 256
# Two messages with different beginnings: at least one differs from any given message.
_PROBES, _QUESTION = ("Hello", "0"), "Question"
_TWO_SYSTEMS = [{"role": "system", "content": "Be"}, {"role": "user", "content": "Hello"},
                {"role": "system", "content": "brief"}, {"role": "user", "content": "Hello"}]
_LONG = 64  # number of messages from which a shorter conversation is rendered in place of the whole
_AROUND = 2  # turns, or steps of one turn, that a shorter conversation keeps at either end
_MAX_PREFIXES = 256
_NO_TOOLS: Schemas = MappingProxyType({})

Messages = Sequence[Mapping[str, Any]]
Anchor = tuple[int, int, int]
"""A special token: its index among the ids, and the start and end of its text. A bare tuple, because a prompt may have
100,000 of them, and as many objects tracked by the garbage collector would trigger full collections."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The input of a prompt: normalised messages and tools, and template variables.

    quoter: keeps client text from becoming control tokens; None allows control tokens in client text.
    read_once: cached data of messages and tools, keyed by identity.
    """

    template: ChatTemplate
    tokenizer: Tokenizer
    messages: Messages
    tools: Messages | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    quoter: Quoter | None = None
    read_once: Mapping[int, ReadMessage] = field(default_factory=dict)

    @classmethod
    def read(cls, template: ChatTemplate, tokenizer: Tokenizer, messages: Any, tools: Any = None,
             variables: Mapping[str, Any] | None = None, *, see: See | None = None,
             parse_special: bool = False, cache: MessageCache | None = None) -> Conversation:
        """Reads the fields of a request. Raises RequestError that names a wrong one. Later system messages move to the
        first if the template takes no others. parse_special: messages may contain control tokens. cache: of the owner.
        """
        given = plain(variables or {}, "chat_template_kwargs")
        for name in _RESERVED:
            if name in given:
                raise RequestError(f"chat_template_kwargs cannot set {name}", f"chat_template_kwargs.{name}")
        cache = cache or MessageCache()
        clean, shown = cache.messages(messages, see), cache.tools(tools)
        known = {id(read.value): read for read in (*clean, shown) if read.value}
        quoter = None if parse_special else Quoter(tokenizer.controls, known)
        return _merge_system_messages(
            cls(template, tokenizer, [read.value for read in clean], shown.value, given, quoter, known))

    @property
    def schemas(self) -> Schemas:
        """Returns the schemas of the tools by name."""
        if not self.tools:
            return _NO_TOOLS
        read = self.read_once.get(id(self.tools))
        return tool_schemas(self.tools) if read is None or read.schemas is None else read.schemas

    def json(self, value: Any) -> str:
        """Returns a message or the tools as JSON. The JSON is cached with them."""
        read = self.read_once.get(id(value))
        if read is None:
            return json.dumps(value, sort_keys=True)
        read.json = read.json or json.dumps(value, sort_keys=True)
        return read.json

    def render_alone(self, messages: Messages, add_generation_prompt: bool = True) -> str:
        """Renders other messages without tools; "" if the template refuses them. Results are cached."""
        given = json.dumps([self.tokenizer.special_tokens, self.variables, messages])
        return _render_alone(self.template.source, given, add_generation_prompt)

    def render(self, messages: Messages, add_generation_prompt: bool = True, prefill: bool = False) -> str:
        """Renders messages with this conversation's tools and variables, in the Unicode form of the tokenizer and with
        the quoter's marks. prefill: the last message is the beginning of the answer."""
        def rendered(messages: Messages, tools: Messages | None, variables: Mapping[str, Any]) -> str:
            text = self.template.render(messages, tools, add_generation_prompt, **variables)
            return unicodedata.normalize("NFC", text) if self.tokenizer.composes else text

        if self.quoter is None:
            return rendered(messages, self.tools, self.variables)
        return self.quoter.render(rendered, messages, self.tools, self.variables, prefill)


def _merge_system_messages(conversation: Conversation) -> Conversation:
    messages = conversation.messages
    if all(message["role"] != "system" for message in messages[1:]) or conversation.render_alone(_TWO_SYSTEMS):
        return conversation
    texts = [message["content"] for message in messages if message["role"] == "system"]
    text = "\n\n".join(text for text in texts if isinstance(text, str) and text)
    rest = [message for message in messages if message["role"] != "system"]
    return replace(conversation, messages=[{"role": "system", "content": text, "contents": text}, *rest])


@lru_cache(maxsize=64)
def _render_alone(source: str, given: str, add_generation_prompt: bool) -> str:
    special_tokens, variables, messages = json.loads(given)
    with suppress(DelticError):
        return ChatTemplate(source, special_tokens).render(
            normalise_messages(messages), None, add_generation_prompt, **variables)
    return ""


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A text with marks, and its ids. kept: number of leading ids from the caller. anchors: special tokens in order."""

    text: str
    ids: tuple[int, ...]
    anchors: tuple[Anchor, ...]
    kept: int = 0


def load_template(tokenizer: Tokenizer, tools: object = None,
                  seconds: float = Limits().template_seconds) -> ChatTemplate:
    """Compiles the tokenizer's own chat template. Raises TemplateError if there is none. seconds: its time limit."""
    source = tokenizer.template_for(tools)
    if source is None:
        raise TemplateError("this model has no chat template: give a file with one (`chat_template`), "
                            "or use raw completions")
    return ChatTemplate(source, tokenizer.special_tokens, seconds)


def encode_prompt(tokenizer: Tokenizer, text: str, known: Sequence[int] = (), bound: TokenLimit = UNBOUNDED,
                  before: EncodedPrompt | None = None) -> EncodedPrompt:
    """Encodes a text from `Conversation.render`. Known ids that spell its beginning are kept; the rest is encoded.

    They are kept as a whole or up to a special token, where tokens always end. Raises LongPromptError beyond the bound.
    before: a prompt of the same tokenizer with a similar beginning, which saves work and never changes the result.
    """
    start, first, anchors = _shared_beginning(before, text, known)
    shared = before.ids[:start] if before else ()
    kept, offset, more = _matching_prefix(tokenizer, text[first:], known[start:])
    anchors += [(start + index, first + begin, first + end) for index, begin, end in more]
    offset, kept = first + offset, start + kept
    shared, rest = (*shared, *known[start:kept]), text[offset:]
    ids = tokenizer.encode(rest, quoted=True, bound=bound.after(kept))
    special = [index for index, id in enumerate(ids) if id in tokenizer.special]
    spelled = list(tokenizer.special_in(rest))
    if [ids[index] for index in special] == [id for id, _, _ in spelled]:
        anchors += [(kept + index, offset + start, offset + end)
                    for index, (_, start, end) in zip(special, spelled, strict=True)]
    return EncodedPrompt(text, (*shared, *ids), tuple(anchors), kept if known else 0)


def encode_unfinished(conversation: Conversation, continues: bool, bound: TokenLimit = UNBOUNDED) -> EncodedPrompt:
    """Encodes the conversation without the start of an answer. continues: also without the end of the last message,
    which must be the assistant's and is continued. Raises RequestError if it is not."""
    if not continues:
        text = conversation.render(conversation.messages, False)
        return encode_prompt(conversation.tokenizer, text, bound=bound)
    *before, last = conversation.messages or [{"role": "nobody"}]
    if last["role"] != "assistant" or last.get("tool_calls") or not isinstance(last["content"], str):
        raise RequestError("only an assistant's message without calls can be continued", "messages")
    mark = "x" + secrets.token_hex(16)
    marked = last["content"] + mark
    messages = [*before, {**last, "content": marked, "contents": marked}]
    text, *rest = conversation.render(messages, False, prefill=True).split(mark)
    if len(rest) != 1:
        raise RequestError("the chat template does not show the last message, so it cannot be continued", "messages")
    return encode_prompt(conversation.tokenizer, text, bound=bound)


def stable_prefixes(conversation: Conversation, prompt: EncodedPrompt, start: int | None = None) -> tuple[int, ...]:
    """Returns the token counts up to which following prompts will repeat this one, ascending.

    The template is rendered with continuations: `system_prefix_len`, the start of the last question, and the prefix
    shared with the prompt after an answer and a user message, and after a call and its result (the client may or may
    not send the reasoning back). start: the system prefix, if known.
    """
    start = system_prefix_len(conversation, prompt) if start is None else start
    view = _shorten(conversation, prompt)
    thinks = start_mode(prompt.ids, conversation.tokenizer) == "reasoning"
    answer = {"role": "assistant", "content": "Answer", "reasoning_content": "Because" if thinks else ""}
    turn = view.rendered(_append(view.conversation, answer, {"role": "user", "content": _QUESTION}))
    found = {start, _shared_tokens(prompt, view, turn), _last_turn_start(prompt, view, turn.rpartition(_QUESTION)[2])}
    if conversation.tools or any(message["role"] == "tool" for message in conversation.messages):
        # without reasoning the think block is empty, and less may be shared
        for reasoning in {answer["reasoning_content"], ""}:
            step = _next_step(view.conversation, answer | {"reasoning_content": reasoning})
            found.add(_shared_tokens(prompt, view, view.rendered(step)))
    return tuple(sorted(found - {0}))


def system_prefix_len(conversation: Conversation, prompt: EncodedPrompt,
                      prefixes: RenderedPrefixes | None = None) -> int:
    """Returns the number of ids shared by all conversations with these system messages and tools."""
    others = (prefixes or RenderedPrefixes()).others(conversation, prompt.text)
    view = _ShortView(conversation, prompt.text)
    return min((_shared_tokens(prompt, view, other) for other in others), default=0)


def _last_turn_start(prompt: EncodedPrompt, view: _ShortView, ending: str = "") -> int:
    """Returns the start of a last message that is a user message after an answer: an edit changes the prompt there.

    Returns 0 for other messages. ending: the text after a last question, if known, which saves a rendering.
    """
    *before, last = view.conversation.messages or [{"role": "nobody"}]
    if last["role"] != "user" or all(message["role"] != "assistant" for message in before):
        return 0
    content = last["content"] if isinstance(last["content"], str) else ""
    probe = next(text for text in _PROBES if text[0] != content.lstrip()[:1])
    if ending and view.text.endswith(ending):
        text = view.text.removesuffix(ending)
        for written in (content, content.strip()):
            if written and text.endswith(written):
                return _shared_tokens(prompt, view, text.removesuffix(written) + probe + ending)
    return _shared_tokens(prompt, view, view.rendered([*before, *_question(probe)]))


class RenderedPrefixes:
    """Caches the beginnings of rendered conversations. Thread-safe.

    Stores only the length and digest of a text, because a text may be long and may change with the date.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[int, bytes, tuple[str, ...]]] = OrderedDict()
        self._lock = Lock()

    def others(self, conversation: Conversation, text: str) -> list[str]:
        """Returns the beginnings of other conversations with the same system message and tools. Returns none without
        either, or if the template refuses them."""
        count = next((i for i, message in enumerate(conversation.messages) if message["role"] != "system"), 0)
        if not count and not conversation.tools:
            return []
        before, key = conversation.messages[:count], _digest(conversation, count)
        shared, ends = self._recall(key, text)
        if not ends:
            try:
                texts = [conversation.render([*before, *_question(probe)]) for probe in _PROBES]
            except DelticError:
                return []
            length = common_length(*texts)
            shared, ends = texts[0][:length], tuple(text[length:length + _SLACK] for text in texts)
            self._store(key, shared, ends)
        return [shared + end for end in ends]

    def before_answer(self, conversation: Conversation, last: int, text: str) -> str | None:
        """Returns the text before the first answer, up to message `last`, that the template renders alone.

        text: the text of the conversation up to at least this message.
        """
        for index in range(1, last + 1):
            if conversation.messages[index]["role"] == "assistant":
                key = _digest(conversation, index, "answer")
                shared, known = self._recall(key, text)
                if known:
                    return shared
                with suppress(DelticError):
                    shared = conversation.render(conversation.messages[:index], False)
                    self._store(key, shared, ("",))
                    return shared
        return None

    def _recall(self, key: str, text: str) -> tuple[str, tuple[str, ...]]:
        """Returns the known beginning of the text, and its possible continuations."""
        with self._lock:
            length, digest, ends = self._known.get(key, (0, b"", ()))
            if ends:
                self._known.move_to_end(key)
        shared = text[:length]
        return (shared, ends) if ends and _text_digest(shared) == digest else ("", ())

    def _store(self, key: str, shared: str, ends: tuple[str, ...]) -> None:
        with self._lock:
            self._known[key] = len(shared), _text_digest(shared), ends
            while len(self._known) > _MAX_PREFIXES:
                self._known.popitem(last=False)


def _shared_beginning(before: EncodedPrompt | None, text: str, known: Sequence[int]) -> tuple[int, int, list[Anchor]]:
    """Returns the last special token that a text has in common with an earlier prompt, with the same ids up to there:
    its index and position, and the special tokens before it. Zeros if there is none.

    With known ids, the earlier prompt must have kept them; without known ids, it must have kept none.
    """
    if before is None or (before.kept and not known):
        return 0, 0, []
    shared = common_length(before.text, text)
    anchors = before.anchors[:bisect_right(before.anchors, shared, key=itemgetter(2))]
    if known:
        anchors = anchors[:bisect_left(anchors, before.kept, key=itemgetter(0))]
    index, start, _ = anchors[-1] if anchors else (0, 0, 0)
    if known and tuple(known[:index + 1]) != before.ids[:index + 1]:
        return 0, 0, []
    return index, start, list(anchors[:-1])


def _matching_prefix(tokenizer: Tokenizer, text: str, known: Sequence[int]) -> tuple[int, int, list[Anchor]]:
    """Returns the number of known ids that the text begins with, their characters and their special tokens."""
    pieces = text.split(MARK)
    marks = [*accumulate(map(len, pieces[:-1]))]
    kept, offset, anchors = _matching_unmarked(tokenizer, "".join(pieces), marks, known)

    def place(characters: int) -> int:
        return characters + len(MARK) * bisect_left(marks, characters)
    if marks:
        anchors = [(index, place(start), place(end)) for index, start, end in anchors]
    return kept, place(offset), anchors


def _matching_unmarked(tokenizer: Tokenizer, text: str, marks: Sequence[int], known: Sequence[int]
                     ) -> tuple[int, int, list[Anchor]]:
    """Does the same as `_matching_prefix` for a text without marks. No special token may contain one of the `marks`."""
    anchors: list[Anchor] = []
    offset, composed = 0, tokenizer.composes
    cuts = [0, *(index for index, id in enumerate(known) if index and id in tokenizer.special), len(known)]
    for start, end in pairwise(cuts):
        piece = tokenizer.decode(known[start:end], skip_special=False)
        piece = unicodedata.normalize("NFC", piece) if composed else piece
        mark = tokenizer.decode(known[start:start + 1], skip_special=False)
        special = start < end and known[start] in tokenizer.special
        quoted = special and bisect_right(marks, offset) < bisect_left(marks, offset + len(mark))
        if quoted or not text.startswith(piece, offset):
            if start and (quoted or not text.startswith(mark, offset)):
                start, offset, _ = anchors.pop() if anchors else (0, 0, 0)
            return start, offset, anchors
        if special:
            anchors.append((start, offset, offset + len(mark)))
        offset += len(piece)
    return len(known), offset, anchors


def _digest(conversation: Conversation, count: int, kind: str = "") -> str:
    """Returns a hash of the first `count` messages, the template, tools and variables."""
    known = blake2b(json.dumps([kind, conversation.template.source, conversation.variables], sort_keys=True).encode(),
                    digest_size=16)
    for value in (conversation.tools, *conversation.messages[:count]):
        known.update(f"\n{conversation.json(value)}".encode())
    return known.hexdigest()


def _text_digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _next_step(conversation: Conversation, answer: dict[str, Any]) -> Messages:
    call = {"id": "call_0", "function": {"name": "function", "arguments": {"key": "value"}}}
    result = {"role": "tool", "content": "Result", "tool_call_id": "call_0", "name": "function"}
    return _append(conversation, answer | {"content": "", "tool_calls": [call]}, result)


def _question(text: str) -> Messages:
    return normalise_messages([{"role": "user", "content": text}])


def _append(conversation: Conversation, *tail: Mapping[str, Any]) -> Messages:
    return [*conversation.messages, *normalise_messages(tail)]


@dataclass(frozen=True, slots=True)
class _ShortView:
    """A shorter conversation in place of the whole one. Its text lacks `missing` characters at position `gap`."""

    conversation: Conversation
    text: str
    gap: int = 0
    missing: int = 0

    def rendered(self, messages: Messages) -> str:
        """Renders other messages; "" if the template refuses them."""
        with suppress(DelticError):
            return self.conversation.render(messages)
        return ""

    def place(self, characters: int) -> int:
        """Converts a position in this text to a position in the whole text."""
        return characters + self.missing if characters >= self.gap else characters


def _shorten(conversation: Conversation, prompt: EncodedPrompt) -> _ShortView:
    """Leaves out the middle of a long conversation, so that renderings of its continuations cost little.

    Only if the whole text equals the shorter one with an insertion: then both differ from their continuations alike.
    """
    whole, middle = _ShortView(conversation, prompt.text), _middle(conversation.messages)
    if len(middle) < _LONG:
        return whole
    messages = conversation.messages
    shorter = replace(conversation, messages=[*messages[:middle.start], *messages[middle.stop:]])
    try:
        text = shorter.render(shorter.messages)
    except DelticError:
        return whole
    head, end = common_length(text, prompt.text), prompt.text[-len(text):]
    gap = len(text) - common_length(text[::-1], end[::-1])
    return _ShortView(shorter, text, gap, len(prompt.text) - len(text)) if gap <= head else whole


def _middle(messages: Messages) -> range:
    """Returns the longest range of messages that do not affect the end: before or within the last turns."""
    start = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    turns = [index for index, message in enumerate(messages) if message["role"] == "user"][-_AROUND:] or [start]
    ranges = [range(start, turns[0])]
    for first, last in pairwise([*turns, len(messages)]):
        steps = [index for index in range(first, last) if messages[index]["role"] == "assistant"]
        if len(steps) > 2 * _AROUND:
            ranges.append(range(steps[_AROUND], steps[-_AROUND]))
    return max(ranges, key=len)


def _shared_tokens(prompt: EncodedPrompt, view: _ShortView, text: str) -> int:
    """Returns the number of ids shared with a text. Encodes from the last special token before the difference."""
    if not text:
        return 0
    parted = common_length(view.text, text)
    place = view.place(parted)
    before = bisect_right(prompt.anchors, place, key=itemgetter(2))
    index, start, _ = prompt.anchors[before - 1] if before else (0, 0, 0)
    tail = tuple(view.conversation.tokenizer.encode(prompt.text[start:place] + text[parted:parted + _SLACK],
                                                       quoted=True))
    return index + common_length(prompt.ids[index:index + len(tail)], tail)
