"""From sequences to the tensors of a draw. The draw itself is `ops.sample`."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence as List
from dataclasses import dataclass
from functools import cache

import torch

from deltic.engine.sequence import Sequence
from deltic.ops.noise import sample_key
from deltic.ops.records import Adjust, Sampled, Sampling
from deltic.types import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Draw:
    """One draw: the sequence's next token, or, supposing that the guesses `ahead` are right, the one after them."""

    sequence: Sequence
    ahead: tuple[int, ...] = ()

    @property
    def position(self) -> int:
        """Of the token that is drawn."""
        return len(self.sequence.tokens) + len(self.ahead)


def sampling_of(draws: List[Draw], device: torch.device, vocabulary: int | None = None) -> Sampling:
    """Row i makes draw i. vocabulary: the logits are those of so many tokens only, the first."""
    params = [draw.sequence.sampling for draw in draws]
    greedy = all(p.temperature == 0 for p in params)
    wanted = [p.logprobs for p in params if p.logprobs is not None]
    adjust = _adjust(draws, device, vocabulary)
    if greedy and not wanted and adjust is None:
        return _greedy(len(draws), device)
    numbers = array("f", [_number(p.temperature, 1.0) for p in params])
    numbers.extend(_number(p.top_p, 1.0) for p in params)
    numbers.extend(_number(p.min_p, 0.0) for p in params)
    integers = array("q", [p.top_k or 0 for p in params])
    integers.extend(0 if p.temperature == 0 else sample_key(draw.sequence.seed, draw.sequence.choice, draw.position)
                    for p, draw in zip(params, draws, strict=True))
    temperature, top_p, min_p = torch.frombuffer(numbers, dtype=torch.float32).to(device).view(3, -1)
    top_k, key = torch.frombuffer(integers, dtype=torch.int64).to(device).view(2, -1)
    return Sampling(
        temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k, key=key, adjust=adjust, greedy=greedy,
        filtered=not greedy and any(map(_filters, params)), top_logprobs=max(wanted) if wanted else None)


@cache
def _greedy(rows: int, device: torch.device) -> Sampling:
    """What every step of nothing but greedy sequences has."""
    zeros, integers = torch.zeros(rows, device=device), torch.zeros(rows, dtype=torch.int64, device=device)
    return Sampling(zeros, integers, zeros + 1, zeros, integers)


def _number(value: float | None, neutral: float) -> float:
    return neutral if value is None else value


def _filters(params: SamplingParams) -> bool:
    return bool(params.top_k) or _number(params.top_p, 1.0) < 1 or bool(params.min_p)


def _adjust(draws: List[Draw], device: torch.device, vocabulary: int | None) -> Adjust | None:
    entries = [(row, token, change.repetition, change.offset) for row, draw in enumerate(draws)
               for token, change in _changes(draw).items() if vocabulary is None or token < vocabulary]
    if not entries:
        return None
    rows, tokens, repetitions, offsets = zip(*entries, strict=True)
    return Adjust(torch.tensor(rows, device=device), torch.tensor(tokens, device=device),
                  torch.tensor(repetitions, dtype=torch.float32, device=device),
                  torch.tensor(offsets, dtype=torch.float32, device=device))


@dataclass(slots=True)
class _Change:
    repetition: float = 1.0
    offset: float = 0.0


def _changes(draw: Draw) -> dict[int, _Change]:
    """What penalties, bias and the minimum length change in the logits of the next token, by token id."""
    sequence, params, changes = draw.sequence, draw.sequence.sampling, dict[int, _Change]()
    if params.repetition_penalty not in (None, 1.0):
        for token in {*sequence.tokens, *draw.ahead}:
            changes[token] = _Change(repetition=_number(params.repetition_penalty, 1.0))
    if params.presence_penalty or params.frequency_penalty:
        for token, count in (sequence.counts + Counter(draw.ahead) if draw.ahead else sequence.counts).items():
            penalty = params.presence_penalty + params.frequency_penalty * count
            changes.setdefault(token, _Change()).offset -= penalty
    for token, bias in params.logit_bias.items():
        changes.setdefault(token, _Change()).offset += bias if bias > -100 else float("-inf")
    if sequence.generated + len(draw.ahead) < params.min_tokens:
        for token in sequence.eos:
            changes.setdefault(token, _Change()).offset = float("-inf")
    return changes


def logprobs_of(sampled: Sampled, row: int, wanted: int | None) -> TokenLogprobs | None:
    """The report of one row, as many of the top tokens as its request wants."""
    if wanted is None or sampled.logprobs is None or sampled.top_tokens is None or sampled.top_logprobs is None:
        return None
    top = zip(sampled.top_tokens[row, :wanted].tolist(), sampled.top_logprobs[row, :wanted].tolist(), strict=True)
    return TokenLogprobs(float(sampled.logprobs[row]), tuple(top))
