"""Messages to prompt: the rendered text, its tokens, and the positions that later turns will repeat."""

from __future__ import annotations

import unicodedata
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from deltic.errors import DelticError, RequestError, TemplateError
from deltic.text.markers import start_mode
from deltic.text.messages import normalise_messages, normalise_tools, plain
from deltic.text.template import ChatTemplate
from deltic.text.tokenizer import UNBOUNDED, Bound, Tokenizer
from deltic.types import common_length

__all__ = ["ChatTemplate", "Conversation", "Prompt", "Spelled", "boundaries", "build_prompt",
           "load_template", "normalise_messages", "normalise_tools", "opening", "spell", "stable_boundaries",
           "start_mode"]

_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
# Longer than what any pre-tokenizer keeps together, so that a cut there leaves earlier tokens alone.
_SLACK = 256
_DECOMPOSED = "e\u0301"

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation, and its stable `boundaries`."""

    text: str
    ids: tuple[int, ...]
    boundaries: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a prompt is made from. messages and tools are normalised, variables are those of the template."""

    template: ChatTemplate
    tokenizer: Tokenizer
    messages: Messages
    tools: Messages | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, template: ChatTemplate, tokenizer: Tokenizer, messages: Any, tools: Any = None,
             variables: Mapping[str, Any] | None = None, *, images: bool = False) -> Conversation:
        """From what a request says; RequestError names the field that is wrong."""
        given = plain(variables or {}, "chat_template_kwargs")
        for name in _RESERVED:
            if name in given:
                raise RequestError(f"chat_template_kwargs cannot set {name}", f"chat_template_kwargs.{name}")
        clean = normalise_messages(messages, images=images)
        return cls(template, tokenizer, clean, normalise_tools(tools), given)

    def render(self, messages: Messages, add_generation_prompt: bool = True) -> str:
        """These messages under this conversation's template, tools and variables, as the ids would spell them."""
        text = self.template.render(messages, self.tools, add_generation_prompt, **self.variables)
        return unicodedata.normalize("NFC", text) if composes(self.tokenizer) else text


class Anchor(NamedTuple):
    """A special token: where it is among the ids, and the characters of the text that it stands for."""

    at: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Spelled:
    """A text and ids that spell it, of which the first `kept` were given. anchors: special tokens of it, ascending."""

    text: str
    ids: tuple[int, ...]
    anchors: tuple[Anchor, ...]
    kept: int = 0


def load_template(tokenizer: Tokenizer, tools: object = None) -> ChatTemplate:
    """The tokenizer's own chat template; TemplateError if it has none."""
    source = tokenizer.template_for(tools)
    if source is None:
        raise TemplateError("this model has no chat template: pass one with --chat-template FILE, "
                            "or use raw completions")
    return ChatTemplate(source, tokenizer.special_tokens)


def build_prompt(template: ChatTemplate, tokenizer: Tokenizer, messages: Any, tools: Any = None,
                 variables: Mapping[str, Any] | None = None, *, images: bool = False) -> Prompt:
    """From a request's messages, tools and template variables (`enable_thinking` ...) to its prompt.

    Nothing needs to be normalised before; RequestError names the field that is wrong.
    """
    conversation = Conversation.read(template, tokenizer, messages, tools, variables, images=images)
    spelled = spell(tokenizer, conversation.render(conversation.messages))
    return Prompt(spelled.text, spelled.ids, boundaries(conversation, spelled))


def composes(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer puts text into Unicode's composed form, so that its ids spell that."""
    return tokenizer.decode(tokenizer.encode(_DECOMPOSED)) == unicodedata.normalize("NFC", _DECOMPOSED)


def spell(tokenizer: Tokenizer, text: str, known: Sequence[int] = (), bound: Bound = UNBOUNDED) -> Spelled:
    """The ids of a text. Where it begins as the `known` ids do, they are taken, and only the rest is encoded.

    They are taken as a whole, or up to a special token that the text has there too, so that the seam is where
    tokens end anyway. A `text` from `Conversation.render` is assumed. LongPromptError if it is beyond the bound.
    """
    kept, offset, anchors = _agreement(tokenizer, text, known)
    rest = text[offset:]
    ids = tokenizer.encode(rest, bound=bound.after(kept))
    special = [index for index, id in enumerate(ids) if id in tokenizer.special]
    spelled = list(tokenizer.special_in(rest))
    if [ids[index] for index in special] == [id for id, _, _ in spelled]:
        anchors += [Anchor(kept + index, offset + start, offset + end)
                    for index, (_, start, end) in zip(special, spelled, strict=True)]
    return Spelled(text, (*known[:kept], *ids), tuple(anchors), kept)


def stable_boundaries(template: ChatTemplate, tokenizer: Tokenizer, messages: Messages,
                      tools: Messages | None = None, **variables: Any) -> tuple[int, ...]:
    """The `boundaries` of the plain prompt for normalised messages and tools."""
    conversation = Conversation(template, tokenizer, messages, tools, variables)
    return boundaries(conversation, spell(tokenizer, conversation.render(messages)))


def boundaries(conversation: Conversation, prompt: Spelled) -> tuple[int, ...]:
    """Positions (counts of tokens) of the prompt up to which following prompts will repeat it.

    Found by asking the template: how far the prompt agrees with its continuation by an answer and a user
    message, by a call and its result (with tools; the client may or may not send the thinking back), and
    with other conversations under the same system message and tools. A conversation that the template refuses
    yields no boundary. Ascending, at most the prompt's length.
    """
    groups = (_next_turn(conversation, prompt), _next_step(conversation, prompt),
              _next_step(conversation, prompt, returns=False), _others(conversation))
    return tuple(sorted({position for group in groups if (position := _shared_by(conversation, prompt, group))}))


def opening(conversation: Conversation, prompt: Spelled) -> int:
    """The stable boundary that conversations with the same system message and tools share; 0 if there is none."""
    return _shared_by(conversation, prompt, _others(conversation))


def _agreement(tokenizer: Tokenizer, text: str, known: Sequence[int]) -> tuple[int, int, list[Anchor]]:
    """How many of the known ids the text begins with, how many characters these are, their special tokens."""
    anchors: list[Anchor] = []
    offset, composed = 0, composes(tokenizer)
    cuts = [0, *(index for index, id in enumerate(known) if index and id in tokenizer.special), len(known)]
    for start, end in pairwise(cuts):
        piece = tokenizer.decode(known[start:end], skip_special=False)
        piece = unicodedata.normalize("NFC", piece) if composed else piece
        mark = tokenizer.decode(known[start:start + 1], skip_special=False)
        if not text.startswith(piece, offset):
            if start and not text.startswith(mark, offset):
                start, offset, _ = anchors.pop() if anchors else Anchor(0, 0, 0)
            return start, offset, anchors
        if start < end and known[start] in tokenizer.special:
            anchors.append(Anchor(start, offset, offset + len(mark)))
        offset += len(piece)
    return len(known), offset, anchors


def _next_turn(conversation: Conversation, prompt: Spelled) -> list[Messages]:
    return [_continued(conversation, _answer(conversation, prompt), {"role": "user", "content": "Question"})]


def _next_step(conversation: Conversation, prompt: Spelled, returns: bool = True) -> list[Messages]:
    """returns: the client sends the thinking back; what an empty think block shares with the prompt may be less."""
    if not conversation.tools and all(message["role"] != "tool" for message in conversation.messages):
        return []
    call = {"id": "call_0", "function": {"name": "function", "arguments": {"key": "value"}}}
    result = {"role": "tool", "content": "Result", "tool_call_id": "call_0", "name": "function"}
    answer = _answer(conversation, prompt) | {"content": "", "tool_calls": [call]}
    return [_continued(conversation, answer if returns else answer | {"reasoning_content": ""}, result)]


def _others(conversation: Conversation) -> list[Messages]:
    """Two conversations with the same opening: one alone might begin with the words of this one."""
    messages = conversation.messages
    length = next((i for i, message in enumerate(messages) if message["role"] != "system"), 0)
    if not length and not conversation.tools:
        return []
    return [[*messages[:length], *normalise_messages([{"role": "user", "content": text}])] for text in ("Hello", "0")]


def _answer(conversation: Conversation, prompt: Spelled) -> dict[str, Any]:
    thinks = start_mode(prompt.ids, conversation.tokenizer) == "reasoning"
    return {"role": "assistant", "content": "Answer", "reasoning_content": "Because" if thinks else ""}


def _continued(conversation: Conversation, *tail: Mapping[str, Any]) -> Messages:
    return [*conversation.messages, *normalise_messages(tail)]


def _shared_by(conversation: Conversation, prompt: Spelled, others: list[Messages]) -> int:
    """Tokens that the prompt shares with all of them."""
    try:
        return min((_shared(conversation.tokenizer, prompt, conversation.render(other)) for other in others), default=0)
    except DelticError:
        return 0


def _shared(tokenizer: Tokenizer, prompt: Spelled, text: str) -> int:
    """Tokens shared with one text; encodes only from the last special token before they part."""
    characters = common_length(prompt.text, text)
    before = bisect_right(prompt.anchors, characters, key=lambda anchor: anchor.end)
    index, start, _ = prompt.anchors[before - 1] if before else Anchor(0, 0, 0)
    tail = tuple(tokenizer.encode(text[start:characters + _SLACK]))
    return index + common_length(prompt.ids[index:index + len(tail)], tail)
