"""Messages to prompt: the rendered text, its tokens, and the positions that later turns will repeat."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deltic.errors import DelticError, RequestError, TemplateError
from deltic.text.markers import start_mode
from deltic.text.messages import normalise_messages, normalise_tools, plain
from deltic.text.template import ChatTemplate
from deltic.text.tokenizer import Tokenizer
from deltic.types import common_length

__all__ = ["ChatTemplate", "Prompt", "build_prompt", "load_template", "normalise_messages", "normalise_tools",
           "stable_boundaries", "start_mode"]

_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
# Longer than what any pre-tokenizer keeps together, so that a cut there leaves earlier tokens alone.
_SLACK = 256

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation. boundaries: see `stable_boundaries`."""

    text: str
    ids: tuple[int, ...]
    boundaries: tuple[int, ...]


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
    given = plain(variables or {}, "chat_template_kwargs")
    for name in _RESERVED:
        if name in given:
            raise RequestError(f"chat_template_kwargs cannot set {name}", f"chat_template_kwargs.{name}")
    clean = normalise_messages(messages, images=images)
    probe = _Probe(template, tokenizer, clean, normalise_tools(tools), given)
    return Prompt(probe.text, tuple(probe.ids), probe.boundaries())


def stable_boundaries(template: ChatTemplate, tokenizer: Tokenizer, messages: Messages,
                      tools: Messages | None = None, **variables: Any) -> tuple[int, ...]:
    """Positions (counts of tokens) of the prompt up to which following prompts will repeat it.

    Found by asking the template: how far the prompt agrees with its continuation by an answer and a user
    message, by a call and its result (with tools), and with other conversations under the same system
    message and tools. A conversation that the template refuses yields no boundary. Ascending, at most the
    prompt's length. `messages` and `tools` are normalised ones.
    """
    return _Probe(template, tokenizer, messages, tools, variables).boundaries()


class _Probe:
    """One rendered prompt, and how far others agree with it."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer, messages: Messages,
                 tools: Messages | None, variables: Mapping[str, Any]) -> None:
        self._template, self._tokenizer = template, tokenizer
        self._messages, self._tools, self._variables = messages, tools, variables
        self.text = self._render(messages)
        self.ids, self._starts = tokenizer.encode_with_offsets(self.text)

    def boundaries(self) -> tuple[int, ...]:
        found = [self._shared_by(group) for group in (self._next_turn(), self._next_step(), self._others())]
        return tuple(sorted({position for position in found if position}))

    def _render(self, messages: Messages) -> str:
        return self._template.render(messages, self._tools, True, **self._variables)

    def _next_turn(self) -> list[Messages]:
        return [self._continued(self._answer(), {"role": "user", "content": "Question"})]

    def _next_step(self) -> list[Messages]:
        if not self._tools and all(message["role"] != "tool" for message in self._messages):
            return []
        call = {"id": "call_0", "function": {"name": "function", "arguments": {"key": "value"}}}
        result = {"role": "tool", "content": "Result", "tool_call_id": "call_0", "name": "function"}
        return [self._continued(self._answer() | {"content": "", "tool_calls": [call]}, result)]

    def _others(self) -> list[Messages]:
        """Two conversations with the same opening: one alone might begin with the words of this one."""
        length = next((i for i, message in enumerate(self._messages) if message["role"] != "system"), 0)
        if not length and not self._tools:
            return []
        opening = self._messages[:length]
        return [[*opening, *normalise_messages([{"role": "user", "content": text}])]
                for text in ("Hello", "0")]

    def _answer(self) -> dict[str, Any]:
        thinks = start_mode(self.ids, self._tokenizer) == "reasoning"
        return {"role": "assistant", "content": "Answer", "reasoning_content": "Because" if thinks else ""}

    def _continued(self, *tail: Mapping[str, Any]) -> Messages:
        return [*self._messages, *normalise_messages(tail)]

    def _shared_by(self, conversations: list[Messages]) -> int:
        """Tokens that the prompt shares with all of them."""
        try:
            return min((self._shared(self._render(messages)) for messages in conversations), default=0)
        except DelticError:
            return 0

    def _shared(self, text: str) -> int:
        """Tokens shared with one text; encodes only from the last special token before they part."""
        characters = common_length(self.text, text)
        index = max(bisect_right(self._starts, characters) - 2, 0)
        while index and self.ids[index] not in self._tokenizer.special:
            index -= 1
        start = self._starts[index] if index else 0
        tail = self._tokenizer.encode(text[start:characters + _SLACK])
        return index + common_length(self.ids[index:], tail)
