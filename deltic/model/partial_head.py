"""A part of the matrix of the logits, with which a model drafts its own next tokens.

The matrix is the largest of a small model: 39 % of the bytes that a token of Qwen3.5 0.8B reads as Q4_K_M. The part has
rows of likely tokens. A row gives the same logit in both, so the part finds the model's token whenever it contains it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from deltic.model.decoder import Decoder, blocks_of
from deltic.model.draft_vocabulary import DraftVocabulary
from deltic.ops.quantized import QTensor

PART: Final = 8
"""The base of the part is at most one in so many tokens of the vocabulary."""
_WORTH: Final = 0.2
"""The share of a token's bytes that the matrix must have to be worth it."""
_ROWS: Final = 4
"""Hidden states that the kernels multiply while they read the matrix at memory's speed."""
_LEAST: Final = 16 << 20
"""Bytes of the smallest matrix that is worth it. A smaller one may stay in the processor's cache."""


@dataclass(frozen=True, slots=True)
class PartialHead:
    """The part and the whole of a matrix of logits. share: the whole's share of the bytes that a token reads."""

    decoder: Decoder
    vocabulary: DraftVocabulary
    share: float

    @property
    def part(self) -> float:
        """The part's share of the whole."""
        return len(self.vocabulary.ids) / self.vocabulary.size

    def partial(self, hidden: Tensor) -> Tensor:
        """Hidden states [T, H] -> logits [T, N] float32 of `vocabulary.ids`."""
        return self.decoder.ops.head(hidden, self.vocabulary.head)

    def whole(self, hidden: Tensor) -> Tensor:
        """Hidden states [T, H] -> logits [T, V] float32."""
        if len(hidden) <= _ROWS:
            return self.decoder.logits(hidden)
        return torch.cat([self.decoder.logits(rows) for rows in hidden.split(_ROWS)])


def build_partial_head(decoder: Decoder, tokens: Sequence[int] | None) -> PartialHead | None:
    """Copies the rows of these tokens, as `draft_vocabulary.draftable` returns them. Returns None if they are all
    tokens, or if the matrix is not packed: sums of torch depend on the number of rows."""
    if tokens is None or not all(isinstance(block, QTensor) for block in blocks_of(decoder.head)):
        return None
    return PartialHead(decoder, DraftVocabulary(decoder.head, tokens), head_share(decoder))


def can_pay(decoder: Decoder) -> bool:
    """True if the matrix is large, for itself and among the weights."""
    nbytes = sum(block.nbytes for block in blocks_of(decoder.head))
    return nbytes >= _LEAST and head_share(decoder) >= _WORTH


def head_share(decoder: Decoder) -> float:
    """Returns the share of the matrix of logits in the bytes that a token reads."""
    return sum(block.nbytes for block in blocks_of(decoder.head)) / decoder.token_bytes()
