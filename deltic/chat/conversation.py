"""Messages to prompt: the rendered text, its tokens, and the positions that later turns will repeat."""

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
from typing import Any

from deltic.chat.control_tokens import MARK, Quoter
from deltic.chat.markers import start_mode
from deltic.chat.messages import See, normalise_messages, normalise_tools, plain
from deltic.chat.template import ChatTemplate
from deltic.chat.tokenizer import UNBOUNDED, Tokenizer, TokenLimit
from deltic.config import Limits
from deltic.errors import DelticError, RequestError, TemplateError
from deltic.params import common_length

_RESERVED = ("messages", "tools", "add_generation_prompt")
# Longer than what any pre-tokenizer keeps together, so that a cut there leaves earlier tokens alone.
_SLACK = 256
# Beginnings of messages: two, as one alone might be that of the message at hand.
_PROBES, _QUESTION = ("Hello", "0"), "Question"
_TWO_SYSTEMS = [{"role": "system", "content": "Be"}, {"role": "user", "content": "Hello"},
                {"role": "system", "content": "brief"}, {"role": "user", "content": "Hello"}]
# Messages from which on it pays to leave some out; turns, or steps of one, that are looked at on either side.
_LONG, _AROUND = 64, 2
_MOST_OPENINGS = 256

Messages = Sequence[Mapping[str, Any]]
Anchor = tuple[int, int, int]
"""A special token: where it is among the ids, and where what it stands for begins and ends in the text. A bare tuple,
as a prompt may have 100,000: objects of classes would bring about full garbage collections, which hold up everybody."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a prompt is made from. messages and tools are normalised, variables are those of the template. quoter: keeps
    client text from becoming control tokens, if it is not to."""

    template: ChatTemplate
    tokenizer: Tokenizer
    messages: Messages
    tools: Messages | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    quoter: Quoter | None = None

    @classmethod
    def read(cls, template: ChatTemplate, tokenizer: Tokenizer, messages: Any, tools: Any = None,
             variables: Mapping[str, Any] | None = None, *, see: See | None = None,
             parse_special: bool = False) -> Conversation:
        """From what a request says; RequestError names the field that is wrong. Where the template takes a system
        message at the beginning only, later ones are put there, too. parse_special: control tokens that messages spell
        become control tokens."""
        given = plain(variables or {}, "chat_template_kwargs")
        for name in _RESERVED:
            if name in given:
                raise RequestError(f"chat_template_kwargs cannot set {name}", f"chat_template_kwargs.{name}")
        clean = normalise_messages(messages, see=see)
        return _with_one_system(cls(template, tokenizer, clean, normalise_tools(tools), given,
                                    None if parse_special else Quoter(tokenizer.controls)))

    def aside(self, messages: Messages, add_generation_prompt: bool = True) -> str:
        """A few other messages under this template and its variables, without tools; "" if it refuses them. Asked
        once."""
        return _aside(self.template.source, json.dumps([self.tokenizer.special_tokens, self.variables, messages]),
                      add_generation_prompt)

    def render(self, messages: Messages, add_generation_prompt: bool = True, prefill: bool = False) -> str:
        """These messages under this conversation's template, tools and variables, as the ids would spell them; with
        the quoter's marks. prefill: the last message is the beginning of the answer."""
        def rendered(messages: Messages, tools: Messages | None, variables: Mapping[str, Any]) -> str:
            text = self.template.render(messages, tools, add_generation_prompt, **variables)
            return unicodedata.normalize("NFC", text) if self.tokenizer.composes else text

        if self.quoter is None:
            return rendered(messages, self.tools, self.variables)
        return self.quoter.render(rendered, messages, self.tools, self.variables, prefill)


def _with_one_system(conversation: Conversation) -> Conversation:
    messages = conversation.messages
    if all(message["role"] != "system" for message in messages[1:]) or conversation.aside(_TWO_SYSTEMS):
        return conversation
    texts = [message["content"] for message in messages if message["role"] == "system"]
    text = "\n\n".join(text for text in texts if isinstance(text, str) and text)
    rest = [message for message in messages if message["role"] != "system"]
    return replace(conversation, messages=[{"role": "system", "content": text, "contents": text}, *rest])


@lru_cache(maxsize=64)
def _aside(source: str, given: str, add_generation_prompt: bool) -> str:
    special_tokens, variables, messages = json.loads(given)
    with suppress(DelticError):
        return ChatTemplate(source, special_tokens).render(
            normalise_messages(messages), None, add_generation_prompt, **variables)
    return ""


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A text, with marks, and ids that spell it, of which the first `kept` were given. anchors: its special tokens,
    ascending."""

    text: str
    ids: tuple[int, ...]
    anchors: tuple[Anchor, ...]
    kept: int = 0


def load_template(tokenizer: Tokenizer, tools: object = None,
                  seconds: float = Limits().template_seconds) -> ChatTemplate:
    """The tokenizer's own chat template, which takes so many seconds at most; TemplateError if it has none."""
    source = tokenizer.template_for(tools)
    if source is None:
        raise TemplateError("this model has no chat template: give a file with one (`chat_template`), "
                            "or use raw completions")
    return ChatTemplate(source, tokenizer.special_tokens, seconds)


def spell(tokenizer: Tokenizer, text: str, known: Sequence[int] = (), bound: TokenLimit = UNBOUNDED) -> EncodedPrompt:
    """The ids of a text. Where it begins as the `known` ids do, they are taken, and only the rest is encoded.

    They are taken as a whole, or up to a special token that the text has there too, so that the seam is where
    tokens end anyway. A `text` from `Conversation.render` is assumed. LongPromptError if it is beyond the bound.
    """
    kept, offset, anchors = _agreement(tokenizer, text, known)
    rest = text[offset:]
    ids = tokenizer.encode(rest, quoted=True, bound=bound.after(kept))
    special = [index for index, id in enumerate(ids) if id in tokenizer.special]
    spelled = list(tokenizer.special_in(rest))
    if [ids[index] for index in special] == [id for id, _, _ in spelled]:
        anchors += [(kept + index, offset + start, offset + end)
                    for index, (_, start, end) in zip(special, spelled, strict=True)]
    return EncodedPrompt(text, (*known[:kept], *ids), tuple(anchors), kept)


def unfinished(conversation: Conversation, continues: bool, bound: TokenLimit = UNBOUNDED) -> EncodedPrompt:
    """The conversation without the beginning of an answer; continues: nor the end of its last message, the
    assistant's, which then goes on as it stands. RequestError if there is no such message."""
    if not continues:
        text = conversation.render(conversation.messages, False)
        return spell(conversation.tokenizer, text, bound=bound)
    *before, last = conversation.messages or [{"role": "nobody"}]
    if last["role"] != "assistant" or last.get("tool_calls") or not isinstance(last["content"], str):
        raise RequestError("only an assistant's message without calls can be continued", "messages")
    mark = "x" + secrets.token_hex(16)
    marked = last["content"] + mark
    messages = [*before, {**last, "content": marked, "contents": marked}]
    text, *rest = conversation.render(messages, False, prefill=True).split(mark)
    if len(rest) != 1:
        raise RequestError("the chat template does not show the last message, so it cannot be continued", "messages")
    return spell(conversation.tokenizer, text, bound=bound)


def boundaries(conversation: Conversation, prompt: EncodedPrompt, start: int | None = None) -> tuple[int, ...]:
    """Positions (counts of tokens) of the prompt up to which following prompts will repeat it.

    Found by asking the template: the `opening`, where the last question begins, and how far the prompt agrees with its
    continuation by an answer and a user message, and by a call and its result (with tools; the client may or may not
    send the thinking back). A conversation that the template refuses yields no boundary. Ascending, at most the
    prompt's length. start: the opening, if it is known.
    """
    start = opening(conversation, prompt) if start is None else start
    view = _view(conversation, prompt)
    thinks = start_mode(prompt.ids, conversation.tokenizer) == "reasoning"
    answer = {"role": "assistant", "content": "Answer", "reasoning_content": "Because" if thinks else ""}
    turn = view.rendered(_next_turn(view.conversation, answer))
    found = {start, _shared_by(prompt, view, turn), _turning(prompt, view, turn.rpartition(_QUESTION)[2])}
    if conversation.tools or any(message["role"] == "tool" for message in conversation.messages):
        # what an empty think block shares with the prompt may be less
        for reasoning in {answer["reasoning_content"], ""}:
            step = _next_step(view.conversation, answer | {"reasoning_content": reasoning})
            found.add(_shared_by(prompt, view, view.rendered(step)))
    return tuple(sorted(found - {0}))


def opening(conversation: Conversation, prompt: EncodedPrompt, openings: RenderedPrefixes | None = None) -> int:
    """The stable boundary that conversations with the same system message and tools share; 0 if there is none."""
    others = (openings or RenderedPrefixes()).others(conversation, prompt.text)
    view = _View(conversation, prompt.text)
    return min((_shared_by(prompt, view, other) for other in others), default=0)


def _turning(prompt: EncodedPrompt, view: _View, ending: str = "") -> int:
    """Where the last message begins if it is the user's, and one that follows an answer: what comes instead when it is
    edited; 0 if there is nothing of that kind. ending: what the template writes after a last question, if that is
    known: then it need not be asked."""
    *before, last = view.conversation.messages or [{"role": "nobody"}]
    if last["role"] != "user" or all(message["role"] != "assistant" for message in before):
        return 0
    content = last["content"] if isinstance(last["content"], str) else ""
    probe = next(text for text in _PROBES if text[0] != content.lstrip()[:1])
    if ending and view.text.endswith(ending):
        text = view.text.removesuffix(ending)
        for written in (content, content.strip()):
            if written and text.endswith(written):
                return _shared_by(prompt, view, text.removesuffix(written) + probe + ending)
    return _shared_by(prompt, view, view.rendered([*before, *_asked(probe)]))


class RenderedPrefixes:
    """How conversations begin, remembered so that the template need not be asked each time. Threads may share it.

    Of a text only length and digest are kept: it may be long, and may change with the date.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[str, tuple[int, bytes, tuple[str, ...]]] = OrderedDict()
        self._lock = Lock()

    def others(self, conversation: Conversation, text: str) -> list[str]:
        """Texts of other conversations with the same system message and tools, as far as they matter for what the
        conversation's own text shares with them; none if it has neither, or the template refuses them."""
        count = next((i for i, message in enumerate(conversation.messages) if message["role"] != "system"), 0)
        if not count and not conversation.tools:
            return []
        before, key = conversation.messages[:count], _digest(conversation, count)
        shared, ends = self._recall(key, text)
        if not ends:
            try:
                texts = [conversation.render([*before, *_asked(probe)]) for probe in _PROBES]
            except DelticError:
                return []
            length = common_length(*texts)
            shared, ends = texts[0][:length], tuple(text[length:length + _SLACK] for text in texts)
            self._note(key, shared, ends)
        return [shared + end for end in ends]

    def before_answer(self, conversation: Conversation, last: int, text: str) -> str | None:
        """What the template renders before the first answer: of those up to the message `last`, the first that allows
        to. text: that of the conversation as far as that message, or farther."""
        for index in range(1, last + 1):
            if conversation.messages[index]["role"] == "assistant":
                key = _digest(conversation, index, "answer")
                shared, known = self._recall(key, text)
                if known:
                    return shared
                with suppress(DelticError):
                    shared = conversation.render(conversation.messages[:index], False)
                    self._note(key, shared, ("",))
                    return shared
        return None

    def _recall(self, key: str, text: str) -> tuple[str, tuple[str, ...]]:
        """The beginning of the text that is known by this key, and what may follow."""
        with self._lock:
            length, digest, ends = self._known.get(key, (0, b"", ()))
            if ends:
                self._known.move_to_end(key)
        shared = text[:length]
        return (shared, ends) if ends and _sum(shared) == digest else ("", ())

    def _note(self, key: str, shared: str, ends: tuple[str, ...]) -> None:
        with self._lock:
            self._known[key] = len(shared), _sum(shared), ends
            while len(self._known) > _MOST_OPENINGS:
                self._known.popitem(last=False)


def _agreement(tokenizer: Tokenizer, text: str, known: Sequence[int]) -> tuple[int, int, list[Anchor]]:
    """How many of the known ids the text begins with, how many characters these are, their special tokens."""
    pieces = text.split(MARK)
    marks = [*accumulate(map(len, pieces[:-1]))]
    kept, offset, anchors = _clean_agreement(tokenizer, "".join(pieces), marks, known)

    def place(characters: int) -> int:
        return characters + len(MARK) * bisect_left(marks, characters)
    if marks:
        anchors = [(index, place(start), place(end)) for index, start, end in anchors]
    return kept, place(offset), anchors


def _clean_agreement(tokenizer: Tokenizer, text: str, marks: Sequence[int], known: Sequence[int]
                     ) -> tuple[int, int, list[Anchor]]:
    """The same of a text without marks. marks: where it has them; no special token is there."""
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
    """What tells the beginning of a conversation, so many messages, from others."""
    known = [kind, conversation.template.source, conversation.tools, conversation.variables,
             conversation.messages[:count]]
    return blake2b(json.dumps(known, sort_keys=True).encode(), digest_size=16).hexdigest()


def _sum(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _next_turn(conversation: Conversation, answer: dict[str, Any]) -> Messages:
    return _continued(conversation, answer, {"role": "user", "content": _QUESTION})


def _next_step(conversation: Conversation, answer: dict[str, Any]) -> Messages:
    call = {"id": "call_0", "function": {"name": "function", "arguments": {"key": "value"}}}
    result = {"role": "tool", "content": "Result", "tool_call_id": "call_0", "name": "function"}
    return _continued(conversation, answer | {"content": "", "tool_calls": [call]}, result)


def _asked(text: str) -> Messages:
    return normalise_messages([{"role": "user", "content": text}])


def _continued(conversation: Conversation, *tail: Mapping[str, Any]) -> Messages:
    return [*conversation.messages, *normalise_messages(tail)]


@dataclass(frozen=True, slots=True)
class _View:
    """A conversation that stands for a longer one, and its `text`: that of the longer one but for so many characters
    that are `missing` at the place `gap`."""

    conversation: Conversation
    text: str
    gap: int = 0
    missing: int = 0

    def rendered(self, messages: Messages) -> str:
        """Other messages in its place; "" if the template refuses them."""
        with suppress(DelticError):
            return self.conversation.render(messages)
        return ""

    def place(self, characters: int) -> int:
        """Where a place of this text is in the whole one."""
        return characters + self.missing if characters >= self.gap else characters


def _view(conversation: Conversation, prompt: EncodedPrompt) -> _View:
    """The conversation, without the middle if it is long, so that asking about its end costs little. Only if the prompt
    is the shorter one's with something in between: then a template that looks at one message after the other is sure to
    part where it parts here."""
    whole, hole = _View(conversation, prompt.text), _hole(conversation.messages)
    if len(hole) < _LONG:
        return whole
    messages = conversation.messages
    shorter = replace(conversation, messages=[*messages[:hole.start], *messages[hole.stop:]])
    try:
        text = shorter.render(shorter.messages)
    except DelticError:
        return whole
    head, end = common_length(text, prompt.text), prompt.text[-len(text):]
    gap = len(text) - common_length(text[::-1], end[::-1])
    return _View(shorter, text, gap, len(prompt.text) - len(text)) if gap <= head else whole


def _hole(messages: Messages) -> range:
    """Messages that say nothing about how the template treats the last ones: those before the last few turns, or in the
    middle of one of these, whichever are the most."""
    start = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    turns = [index for index, message in enumerate(messages) if message["role"] == "user"][-_AROUND:] or [start]
    holes = [range(start, turns[0])]
    for first, last in pairwise([*turns, len(messages)]):
        steps = [index for index in range(first, last) if messages[index]["role"] == "assistant"]
        if len(steps) > 2 * _AROUND:
            holes.append(range(steps[_AROUND], steps[-_AROUND]))
    return max(holes, key=len)


def _shared_by(prompt: EncodedPrompt, view: _View, text: str) -> int:
    """Tokens shared with a text, if there is one; encodes only from the last special token before they part."""
    if not text:
        return 0
    parted = common_length(view.text, text)
    place = view.place(parted)
    before = bisect_right(prompt.anchors, place, key=itemgetter(2))
    index, start, _ = prompt.anchors[before - 1] if before else (0, 0, 0)
    tail = tuple(view.conversation.tokenizer.encode(prompt.text[start:place] + text[parted:parted + _SLACK],
                                                       quoted=True))
    return index + common_length(prompt.ids[index:index + len(tail)], tail)
