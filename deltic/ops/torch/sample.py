"""Sampling in plain torch, all rows at once."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from deltic.ops.noise import gumbel
from deltic.ops.types import Adjust, Sampled, Sampling

_FLAT = 1e-6
CANDIDATES = 256
"""Number of best tokens that the filters try first."""


def _apply(logits: Tensor, adjust: Adjust) -> None:
    """Changes the logits [L, V] in place."""
    old = logits[adjust.row, adjust.token]
    for table in adjust.tables:
        logits[table.row] = changed(logits[table.row], table.repetition, table.offset)
    logits[adjust.row, adjust.token] = changed(old, adjust.repetition, adjust.offset)


def changed(old: Tensor, repetition: Tensor | None, offset: Tensor | None) -> Tensor:
    """Applies repetition penalty and offset to logits of any shape."""
    new = old if repetition is None else torch.where(old > 0, old / repetition, old * repetition)
    return new if offset is None else new + offset


def sample(logits: Tensor, sampling: Sampling) -> Sampled:
    low, high = torch.aminmax(logits, dim=-1)
    # a NaN or infinite logit makes the difference NaN or infinite
    healthy = ((high - low) >= _FLAT) & torch.isfinite(high - low)
    reports = _logprobs(logits, sampling.top_logprobs)
    if sampling.adjust is not None:
        _apply(logits, sampling.adjust)
        possible = logits.amax(-1) > -torch.inf
    else:
        possible = healthy
    tokens = logits.argmax(-1) if sampling.greedy else _draw(logits, sampling)
    if reports is None:
        return Sampled(tokens, healthy, possible)
    probabilities, top_tokens, top = reports
    return Sampled(tokens, healthy, possible, probabilities.gather(1, tokens[:, None])[:, 0], top_tokens, top)


def _logprobs(logits: Tensor, count: int | None) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns log-probabilities [L, V], the most probable tokens [L, n] and their values [L, n]; lower ids win ties."""
    if count is None:
        return None
    probabilities = logits.double().log_softmax(-1).float()
    tokens = logits.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return probabilities, tokens, probabilities.gather(1, tokens)


def _draw(logits: Tensor, sampling: Sampling) -> Tensor:
    best = logits.argmax(-1)
    scores = logits.double() / sampling.temperature.clamp(min=1e-9)[:, None].double()
    if sampling.filtered:
        drawn, sure = _draw_filtered(scores, sampling, CANDIDATES)
        free = (sampling.top_k == 0) & (sampling.top_p >= 1) & (sampling.min_p == 0)
        for wanted, draw in ((free, _draw_any), (~free & ~sure, _draw_ordered)):
            # rows are independent: filters of other rows change nothing
            rows = (wanted & (sampling.temperature > 0)).nonzero()[:, 0]
            if len(rows):
                drawn[rows] = draw(scores[rows], _some(sampling, rows))
    else:
        drawn = _draw_any(scores, sampling)
    return torch.where(sampling.temperature == 0, best, drawn)


def _some(sampling: Sampling, rows: Tensor) -> Sampling:
    """Returns the sampling parameters of these rows."""
    return replace(sampling, temperature=sampling.temperature[rows], top_k=sampling.top_k[rows],
                   top_p=sampling.top_p[rows], min_p=sampling.min_p[rows], key=sampling.key[rows])


def _draw_any(scores: Tensor, sampling: Sampling) -> Tensor:
    """Draws among all tokens."""
    return (scores + gumbel(sampling.key, torch.arange(scores.shape[1], device=scores.device))).argmax(-1)


def _draw_ordered(scores: Tensor, sampling: Sampling) -> Tensor:
    """Draws among the tokens that the filters keep; sorts the whole vocabulary."""
    return _draw_filtered(scores, sampling, scores.shape[1])[0]


def _draw_filtered(scores: Tensor, sampling: Sampling, count: int) -> tuple[Tensor, Tensor]:
    """Draws among those of the `count` best tokens that the filters keep. Also returns for each row [L] if the filters
    certainly keep no other tokens."""
    count = min(count, scores.shape[1])
    # sorted by id, so that a stable sort puts the lower one of two equals first
    ids = scores.topk(count).indices.sort(-1).values
    values, order = scores.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    ids, top_k = ids.gather(1, order), sampling.top_k[:, None]
    kept = _keep(values, scores.logsumexp(-1, keepdim=True), sampling)
    chosen = (values + gumbel(sampling.key, ids)).masked_fill(~kept, -torch.inf).argmax(-1, keepdim=True)
    # tokens that tie with the last candidate may be missing
    sure = kept.sum(-1) <= (values > values[:, -1:]).sum(-1)
    sure &= ((top_k <= count) | (sampling.top_p[:, None] >= 1))[:, 0]
    return ids.gather(1, chosen)[:, 0], sure | (count == scores.shape[1])


def _keep(values: Tensor, total: Tensor, sampling: Sampling) -> Tensor:
    """Returns a mask of the candidates that the filters keep. values [L, n] float64: best first. total [L, 1]:
    logsumexp of the row. top_p is correct only if top_k is 0 or at most n."""
    rank = torch.arange(values.shape[1], device=values.device)
    top_k = sampling.top_k[:, None]
    in_k = (top_k == 0) | (rank < top_k)
    mass = torch.where(top_k == 0, total, values.masked_fill(~in_k, -torch.inf).logsumexp(-1, keepdim=True))
    before = functional.pad((values - mass).exp().cumsum(-1)[:, :-1], (1, 0))
    top_p = sampling.top_p[:, None].double()
    in_p = (top_p >= 1) | (before < top_p) | (rank == 0)
    likely = (values - values[:, :1]).exp() >= sampling.min_p[:, None].double()
    return in_k & in_p & likely
