"""A part of the matrix of logits, with which a model drafts its own next tokens.

The matrix is the largest of a small model: 40 % of the bytes that a token of Qwen3.5 0.8B reads as Q4_K_M. The part has
rows of likely tokens. A row gives the same logit in both, so the part finds the model's token if it contains it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from deltic.model.decoder import Decoder, blocks_of
from deltic.model.draft_vocabulary import DraftVocabulary
from deltic.ops.quantized import QTensor

log = logging.getLogger("deltic")

PART: Final = 8
"""The base of the part has at most one in `PART` tokens of the vocabulary."""
_ROWS: Final = 4
"""Maximum number of hidden states for which the kernels still read the matrix at the speed of memory."""


class PartialHead:
    """The part and the whole of a matrix of logits.

    vocabulary: the part's rows; None until `build`, which takes some tenths of a second.
    share: share of the whole matrix in the bytes that a token reads.
    """

    def __init__(self, decoder: Decoder, choose: Callable[[], Sequence[int] | None]) -> None:
        """choose: returns the tokens of the part, as `draft_vocabulary.draftable` does; None: there is no part."""
        self.vocabulary: DraftVocabulary | None = None
        self.share = head_share(decoder)
        self._decoder, self._choose = decoder, choose
        self._builder: threading.Thread | None = None

    def build(self) -> None:
        """Copies the rows of the part."""
        tokens = self._choose()
        self._choose = _nothing  # the old function may hold the model's files
        if tokens is not None:
            self.vocabulary = DraftVocabulary(self._decoder.head, tokens)

    def start_build(self) -> None:
        """Starts `build` in a thread, at the first call."""
        if self._builder is None:
            self._builder = threading.Thread(target=self._try_build, name="deltic-part", daemon=True)
            self._builder.start()

    def partial(self, hidden: Tensor, vocabulary: DraftVocabulary) -> Tensor:
        """Computes hidden states [T, H] -> logits [T, N] float32 of `vocabulary.ids`."""
        return self._decoder.ops.head(hidden, vocabulary.head)

    def whole(self, hidden: Tensor) -> Tensor:
        """Computes hidden states [T, H] -> logits [T, V] float32."""
        if len(hidden) <= _ROWS:
            return self._decoder.logits(hidden)
        return torch.cat([self._decoder.logits(rows) for rows in hidden.split(_ROWS)])

    def _try_build(self) -> None:
        try:
            self.build()
        except Exception:
            log.exception("the matrix of logits drafts nothing, as its part could not be copied")


def _nothing() -> None:
    pass


def serves(decoder: Decoder) -> bool:
    """True if the matrix is packed. Sums of torch depend on the number of rows, so a part might give other logits."""
    return all(isinstance(block, QTensor) for block in blocks_of(decoder.head))


def head_share(decoder: Decoder) -> float:
    """Returns the share of the matrix of logits in the bytes that a token reads."""
    return sum(block.nbytes for block in blocks_of(decoder.head)) / decoder.token_bytes()
