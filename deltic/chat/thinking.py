"""Closes the think block of an answer that has thought for long enough."""

from __future__ import annotations

from dataclasses import dataclass

from deltic.chat.conversation import Conversation
from deltic.chat.markers import THINK_END
from deltic.chat.output_router import AnswerText
from deltic.chat.tokenizer import Tokenizer

_USUAL = f"\n{THINK_END}\n\n"
_THOUGHT, _ANSWER = "Because", "Answer"


@dataclass(frozen=True, slots=True)
class ThinkEnd:
    """Token ids that end a think block: those of the `gap` before the tag, and the tag with what follows it, which
    alone is the `rest`."""

    gap: bytes
    gap_ids: tuple[int, ...]
    tag_ids: tuple[int, ...]
    rest_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, conversation: Conversation) -> ThinkEnd:
        """As the conversation's template closes a think block, or else as those of Qwen do."""
        gap, _, rest = _closing_text(conversation).partition(THINK_END)
        tokenizer = conversation.tokenizer
        tag = tokenizer.token_to_id(THINK_END)
        tag_ids = tokenizer.encode(THINK_END) if tag is None else [tag]
        rest_ids = tuple(tokenizer.encode(rest))
        return cls(gap.encode(), tuple(tokenizer.encode(gap)), (*tag_ids, *rest_ids), rest_ids)

    def after(self, spelled: bytes) -> tuple[int, ...]:
        """What closes a block of thoughts that end with these bytes; a gap that is there is not repeated."""
        return self.tag_ids if spelled.endswith(self.gap) else (*self.gap_ids, *self.tag_ids)


class ThinkingBudget:
    """The guide of one answer: when it has spent `tokens` in think blocks, it closes the open one.

    text: that of the answer, which gets every token before the guide does; what it sees as reasoning counts, but not
    the tags around it, whoever opened the block. A block that the model opens when nothing is left is closed at once.
    """

    def __init__(self, text: AnswerText, tokenizer: Tokenizer, closing: ThinkEnd, tokens: int) -> None:
        self._text, self._tokenizer, self._closing, self._left = text, tokenizer, closing, tokens
        self._open = text.region == "reasoning"
        self._forced = self._due()

    def forced(self) -> int | None:
        """The next token of the closing."""
        return self._forced[0] if self._forced else None

    def push(self, token: int, /) -> None:
        """Take the next token of the answer."""
        was_open, self._open = self._open, self._text.region == "reasoning"
        if self._forced:
            self._forced = self._forced[1:]
        else:
            thought = was_open and self._open
            self._left -= thought
            self._forced = self._due(token if thought else None)

    def _due(self, thought: int | None = None) -> tuple[int, ...]:
        """The closing, if it is time; thought: the last token of the block."""
        if self._left > 0 or not self._open:
            return ()
        return self._closing.after(b"" if thought is None else self._tokenizer.token_bytes(thought))


def _closing_text(conversation: Conversation) -> str:
    """What the template writes between thinking and answer of a turn."""
    text = conversation.render_alone([{"role": "user", "content": "Question"}, {
        "role": "assistant", "reasoning_content": _THOUGHT, "content": _ANSWER}], False)
    closing = text.rpartition(_THOUGHT)[2].partition(_ANSWER)[0]
    return closing if closing.strip() == THINK_END else _USUAL
