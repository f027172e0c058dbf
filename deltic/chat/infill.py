"""Fill-in-the-middle prompts, with text before and after the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deltic.errors import RequestError

_FORMS: Sequence[tuple[str, str, str]] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"), ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"), ("<PRE>", "<SUF>", "<MID>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"))
"""Tokens before the prefix, the suffix and the answer: Qwen, StarCoder, SantaCoder, GLM, CodeLlama, DeepSeek."""
_ENDS = ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|endoftext|>", "<fim_pad>", "<file_sep>", "<|endofmiddle|>",
         "\u2581<EOT>", "<EOT>")
"""More tokens that end such an answer."""


@dataclass(frozen=True, slots=True)
class Infill:
    """The fill-in-the-middle tokens of a vocabulary. ends: those that end an answer."""

    prefix: int
    suffix: int
    middle: int
    ends: tuple[int, ...]

    @classmethod
    def of(cls, added: Mapping[str, int]) -> Infill:
        """Looks the tokens up among the tokenizer's added tokens; RequestError if there are none."""
        for form in _FORMS:
            if all(token in added for token in form):
                prefix, suffix, middle = (added[token] for token in form)
                others = (added[token] for token in _ENDS if token in added)
                return cls(prefix, suffix, middle, (prefix, suffix, middle, *others))
        raise RequestError("suffix needs a model that fills in the middle: this one's tokenizer has no tokens for that "
                           "(such as fim_prefix)", "suffix")

    def ids(self, before: Sequence[int], behind: Sequence[int]) -> list[int]:
        """Returns the prompt for the text between two texts."""
        return [self.prefix, *before, self.suffix, *behind, self.middle]
