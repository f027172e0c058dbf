"""Markers that split an answer into regions, and the region in which an answer begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from deltic.chat.deltas import Region

THINK, THINK_END = "<think>", "</think>"


class MarkerVocabulary(Protocol):
    """The part of a tokenizer that routing needs."""

    @property
    def eos_id(self) -> int | None: ...
    def token_to_id(self, token: str, /) -> int | None: ...
    def visible_bytes(self, id: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Markers:
    """Region markers: by token id if they have one, else as text."""

    ids: Mapping[int, str] = field(default_factory=dict)
    texts: tuple[str, ...] = ()

    @classmethod
    def of(cls, tokenizer: MarkerVocabulary, calls: Sequence[str] = ()) -> Markers:
        """Returns the think tags and the `calls` tags of a vocabulary."""
        ids = {marker: tokenizer.token_to_id(marker) for marker in (THINK, THINK_END, *calls)}
        return cls({id: marker for marker, id in ids.items() if id is not None},
                   tuple(marker for marker, id in ids.items() if id is None))


def start_mode(prompt_ids: Sequence[int], tokenizer: MarkerVocabulary) -> Region:
    """Returns the region in which the answer begins: reasoning if the prompt leaves a think block open.

    Looks at ids after the last end-of-turn token only, so that a quoted think tag has no effect.
    """
    think, think_end = tokenizer.token_to_id(THINK), tokenizer.token_to_id(THINK_END)
    if think is None:
        return "content"
    for id in reversed(prompt_ids):
        if id == think:
            return "reasoning"
        if id in (think_end, tokenizer.eos_id):
            break
    return "content"


def closes_thinking(prompt_ids: Sequence[int], tokenizer: MarkerVocabulary) -> bool:
    """True if the prompt ends with a closed think block of the answer."""
    think_end = tokenizer.token_to_id(THINK_END)
    ends = (id == think_end for id in reversed(prompt_ids) if id in (think_end, tokenizer.eos_id))
    return next(ends, False)
