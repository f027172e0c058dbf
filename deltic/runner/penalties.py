"""Penalties, logit bias and minimum length: changes of a sequence's logits, updated token by token."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from deltic.engine.sequence import Sequence
from deltic.ops.types import LogitTable
from deltic.params import MAX_LOGIT_BIAS, SamplingParams

_FORBIDDEN = float("-inf")


def penalizes(params: SamplingParams) -> bool:
    """True if logits change throughout the answer."""
    return bool(params.repetition_penalty not in (None, 1.0) or params.presence_penalty or params.frequency_penalty
                or params.logit_bias)


def changes_logits(sequence: Sequence) -> bool:
    """True if a logit of this sequence's next tokens may change."""
    params = sequence.sampling
    return penalizes(params) or _is_short(sequence)


def _is_short(sequence: Sequence, drafts: int = 0) -> bool:
    """True if the answer may not end after so many drafts. Sequences with a constraint: see `logit_masks`."""
    return bool(sequence.eos and sequence.constraint is None
                and sequence.generated + drafts < sequence.sampling.min_tokens)


class Penalties:
    """The changes of one sequence's next logits, over the whole vocabulary.

    New tokens are entered at the next call, so that a step costs as much as its new tokens. Choices of one request
    share the tensors until they differ.
    """

    __slots__ = ("_offset", "_penalizes", "_read", "_repetition", "_shared", "_short", "factor")

    def __init__(self, sequence: Sequence, vocabulary: int, device: torch.device) -> None:
        params = sequence.sampling
        self._shared = False
        self.factor = 1.0 if params.repetition_penalty is None else params.repetition_penalty
        self._penalizes = bool(params.presence_penalty or params.frequency_penalty)
        self._read = len(sequence.tokens)
        self._short = _is_short(sequence)
        self._repetition: Tensor | None = None
        self._offset: Tensor | None = None
        if self.factor != 1.0:
            self._repetition = torch.ones(vocabulary, device=device)
            self._repetition[torch.frombuffer(array("q", sequence.tokens), dtype=torch.int64).to(device)] = self.factor
        if self._penalizes or params.logit_bias or self._short:
            self._offset = torch.zeros(vocabulary, device=device)
            changed = {*params.logit_bias, *(sequence.sampler.counts if self._penalizes else ()),
                       *(sequence.eos if self._short else ())}
            self._write(sequence, self._offset, changed)

    def fork(self) -> Penalties:
        """Returns a copy for another choice of the request, which shares the tensors."""
        other = object.__new__(Penalties)
        self._shared = True
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        return other

    def table(self, sequence: Sequence, row: int, vocabulary: int) -> LogitTable | None:
        """The changes of the logits of a row for the sequence's next token; None: none."""
        self._follow(sequence)
        if self._repetition is None and self._offset is None:
            return None
        return LogitTable(row, *(None if tensor is None else tensor[:vocabulary]
                            for tensor in (self._repetition, self._offset)))

    def after_drafts(self, sequence: Sequence, drafts: tuple[int, ...]) -> Iterator[tuple[int, float, float]]:
        """Yields the differences from `table` after these drafts: tokens, their repetition factors and offsets. Must be
        called after `table`."""
        counts = Counter(drafts if self._repetition is not None or self._penalizes else ())
        short = _is_short(sequence, len(drafts))
        for token in {*counts, *(sequence.eos if self._short and not short else ())}:
            met = token in counts or (self._repetition is not None and float(self._repetition[token]) != 1.0)
            yield (token, self.factor if met else 1.0,
                   _offset(sequence.sampling, token, sequence.sampler.counts[token] + counts[token],
                           short and token in sequence.eos))

    def _follow(self, sequence: Sequence) -> None:
        """Enters the new tokens."""
        params, new = sequence.sampling, {*sequence.tokens[self._read:]}
        self._read = len(sequence.tokens)
        if self._repetition is not None and new:
            self._own()
            for token in new:
                self._repetition[token] = self.factor
        changed = new if self._penalizes else set[int]()
        if self._short and sequence.generated >= params.min_tokens:
            self._short, changed = False, {*changed, *sequence.eos}
        if self._offset is None or not changed:
            return
        if not self._penalizes and not params.logit_bias:
            self._offset = None  # only the minimum length had changed logits
            return
        self._own()
        self._write(sequence, self._offset, changed)

    def _own(self) -> None:
        """Copies the tensors if other choices share them."""
        if self._shared:
            self._repetition, self._offset = (None if tensor is None else tensor.clone()
                                              for tensor in (self._repetition, self._offset))
            self._shared = False

    def _write(self, sequence: Sequence, offset: Tensor, tokens: set[int]) -> None:
        places = array("q", tokens)
        if not places:
            return
        values = array("f", [_offset(sequence.sampling, token, sequence.sampler.counts[token] if self._penalizes else 0,
                                     self._short and token in sequence.eos) for token in places])
        offset[torch.frombuffer(places, dtype=torch.int64).to(offset.device)] = torch.frombuffer(
            values, dtype=torch.float32).to(offset.device)


def _offset(params: SamplingParams, token: int, count: int, banned: bool) -> float:
    """The offset of the logit of a token that the answer has `count` times."""
    if banned:
        return _FORBIDDEN
    bias = params.logit_bias.get(token)
    if bias is not None and bias <= -MAX_LOGIT_BIAS:
        return _FORBIDDEN
    penalty = params.presence_penalty + params.frequency_penalty * count if count else 0.0
    return (0.0 if bias is None else bias) - penalty
