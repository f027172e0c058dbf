"""Closes the think block of an answer when its thinking budget is spent."""

from __future__ import annotations

from dataclasses import dataclass

from deltic.chat.conversation import Conversation
from deltic.chat.markers import THINK_END
from deltic.chat.output_router import AnswerText
from deltic.chat.tokenizer import Tokenizer

_USUAL = f"\n{THINK_END}\n\n"
_REASONING, _CONTENT = "Because", "Answer"


@dataclass(frozen=True, slots=True)
class ThinkEnd:
    """Token ids that end a think block: the gap before the tag, the tag with the text after it, and only that text
    (`rest`)."""

    gap: bytes
    gap_ids: tuple[int, ...]
    tag_ids: tuple[int, ...]
    rest_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, conversation: Conversation) -> ThinkEnd:
        """Returns the ids with which the template closes a think block, or Qwen's ids if the template shows none."""
        gap, _, rest = _closing_text(conversation).partition(THINK_END)
        tokenizer = conversation.tokenizer
        tag = tokenizer.token_to_id(THINK_END)
        tag_ids = tokenizer.encode(THINK_END) if tag is None else [tag]
        rest_ids = tuple(tokenizer.encode(rest))
        return cls(gap.encode(), tuple(tokenizer.encode(gap)), (*tag_ids, *rest_ids), rest_ids)

    def after(self, spelled: bytes) -> tuple[int, ...]:
        """Returns the ids that close a block ending with these bytes. A gap that is already there is not repeated."""
        return self.tag_ids if spelled.endswith(self.gap) else (*self.gap_ids, *self.tag_ids)


class ThinkingBudget:
    """Forces the tokens that close a think block after `tokens` tokens of reasoning in one answer.

    text: the answer's text, which takes every token first. The tags of a block do not count. A block that opens when
    the budget is spent is closed at once.
    """

    def __init__(self, text: AnswerText, tokenizer: Tokenizer, closing: ThinkEnd, tokens: int) -> None:
        self._text = text
        self._tokenizer = tokenizer
        self._closing = closing
        self._left = tokens
        self._open = text.region == "reasoning"
        self._forced = self._due()

    def forced(self) -> int | None:
        return self._forced[0] if self._forced else None

    def push(self, token: int, /) -> None:
        was_open, self._open = self._open, self._text.region == "reasoning"
        if self._forced:
            self._forced = self._forced[1:]
        else:
            thought = was_open and self._open
            self._left -= thought
            self._forced = self._due(token if thought else None)

    def _due(self, thought: int | None = None) -> tuple[int, ...]:
        """Returns the closing ids if the budget is spent. thought: the last token of the block."""
        if self._left > 0 or not self._open:
            return ()
        return self._closing.after(b"" if thought is None else self._tokenizer.token_bytes(thought))


def _closing_text(conversation: Conversation) -> str:
    """Returns the text that the template writes between reasoning and content."""
    text = conversation.render_alone([{"role": "user", "content": "Question"}, {
        "role": "assistant", "reasoning_content": _REASONING, "content": _CONTENT}], False)
    closing = text.rpartition(_REASONING)[2].partition(_CONTENT)[0]
    return closing if closing.strip() == THINK_END else _USUAL
