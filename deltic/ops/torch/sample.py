"""Choosing tokens in plain torch, all rows at once."""

from __future__ import annotations

import torch
from torch import Tensor

from deltic.ops.noise import gumbel
from deltic.ops.records import Adjust, Sampled, Sampling

_FLAT = 1e-6
CANDIDATES = 256
"""Tokens among which the filters look first."""


def apply(logits: Tensor, adjust: Adjust) -> None:
    """Change the logits [L, V] in place."""
    old = logits[adjust.row, adjust.token]
    new = torch.where(old > 0, old / adjust.repetition, old * adjust.repetition)
    logits[adjust.row, adjust.token] = new + adjust.offset


def sample(logits: Tensor, sampling: Sampling) -> Sampled:
    low, high = torch.aminmax(logits, dim=-1)
    # NaN and infinities make the difference NaN or infinite
    healthy = ((high - low) >= _FLAT) & torch.isfinite(high - low)
    reports = _logprobs(logits, sampling.top_logprobs)
    if sampling.adjust is not None:
        apply(logits, sampling.adjust)
    tokens = logits.argmax(-1) if sampling.greedy else _draw(logits, sampling)
    if reports is None:
        return Sampled(tokens, healthy)
    chances, top_tokens, top = reports
    return Sampled(tokens, healthy, chances.gather(1, tokens[:, None])[:, 0], top_tokens, top)


def _logprobs(logits: Tensor, count: int | None) -> tuple[Tensor, Tensor, Tensor] | None:
    """(log-probabilities [L, V], most probable tokens [L, n], theirs [L, n]); ties by lower token id."""
    if count is None:
        return None
    chances = logits.double().log_softmax(-1).float()
    tokens = logits.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return chances, tokens, chances.gather(1, tokens)


def _draw(logits: Tensor, sampling: Sampling) -> Tensor:
    best = logits.argmax(-1)
    scaled = logits.double() / sampling.temperature.clamp(min=1e-9)[:, None].double()
    if sampling.filtered:
        scaled, ids = _filter(scaled, sampling)
    else:
        ids = torch.arange(logits.shape[1], device=logits.device)
    chosen = (scaled + gumbel(sampling.key, ids)).argmax(-1)
    drawn = ids.gather(1, chosen[:, None])[:, 0] if ids.dim() == 2 else chosen
    return torch.where(sampling.temperature == 0, best, drawn)


def _filter(scores: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Scores of the tokens that may be drawn, others -inf, and their ids [L, n]: of the few best tokens if these
    provably hold all that the filters keep in every row, else of the whole vocabulary."""
    count = min(CANDIDATES, scores.shape[1])
    total = scores.logsumexp(-1, keepdim=True)
    # in order of their ids, so that a stable sort puts the lower one of two equals first
    ids = scores.topk(count).indices.sort(-1).values
    values, order = scores.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    kept = _keep(values, total, sampling)
    if count < scores.shape[1] and not _complete(values, kept, sampling):
        values, ids = scores.sort(dim=-1, descending=True, stable=True)
        kept = _keep(values, total, sampling)
    else:
        ids = ids.gather(1, order)
    return values.masked_fill(~kept, -torch.inf), ids


def _complete(values: Tensor, kept: Tensor, sampling: Sampling) -> bool:
    """Whether the best tokens hold all that the filters keep, in every row that is drawn from: tokens that tie with the
    last one may have been left out."""
    certain = (values > values[:, -1:]).sum(-1)
    return not bool(((sampling.temperature > 0) & (kept.sum(-1) > certain)).any())


def _keep(values: Tensor, total: Tensor, sampling: Sampling) -> Tensor:
    """Which candidates the filters keep: values [L, n] float64, best first; total [L, 1]: logsumexp of the row."""
    rank = torch.arange(values.shape[1], device=values.device)
    top_k = sampling.top_k[:, None]
    in_k = (top_k == 0) | (rank < top_k)
    mass = torch.where(top_k == 0, total, values.masked_fill(~in_k, -torch.inf).logsumexp(-1, keepdim=True))
    chances = (values - mass).exp()
    top_p = sampling.top_p[:, None].double()
    in_p = (top_p >= 1) | (chances.cumsum(-1) - chances < top_p) | (rank == 0)
    likely = (values - values[:, :1]).exp() >= sampling.min_p[:, None].double()
    return in_k & in_p & likely
