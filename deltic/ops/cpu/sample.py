"""Choosing tokens on compiled kernels, which find the few best of a vocabulary; the rest is small."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deltic.ops.cpu.library import address, check, library, pool
from deltic.ops.noise import gumbel
from deltic.ops.records import Sampled, Sampling
from deltic.ops.torch import OPS as TORCH
from deltic.ops.torch.sample import CANDIDATES, apply, complete, keep


@dataclass(frozen=True, slots=True)
class _Best:
    """values [L, n] float32 and ids [L, n] of the best tokens, best first; totals [L] float64, if asked for; healthy
    [L] bool."""

    values: Tensor
    ids: Tensor
    totals: Tensor | None
    healthy: Tensor


def sample(logits: Tensor, sampling: Sampling) -> Sampled:
    plain = sampling.greedy or sampling.filtered
    if not plain or sampling.top_logprobs is not None or logits.dtype != torch.float32 or not logits.is_contiguous():
        return TORCH.sample(logits, sampling)
    healthy = None
    if sampling.adjust is not None:
        healthy = _best(logits, 1).healthy
        apply(logits, sampling.adjust)
    if sampling.greedy:
        best = _best(logits, 1)
        return Sampled(best.ids[:, 0], best.healthy if healthy is None else healthy)
    best = _best(logits, min(CANDIDATES, logits.shape[1]), sampling.temperature)
    tokens = _draw(best, sampling, logits.shape[1])
    if tokens is None:
        tokens = TORCH.sample(logits, sampling).tokens
    return Sampled(tokens, best.healthy if healthy is None else healthy)


def _best(logits: Tensor, count: int, temperature: Tensor | None = None) -> _Best:
    rows, width = logits.shape
    values, ids = torch.empty(rows, count), torch.empty(rows, count, dtype=torch.int64)
    healthy = torch.empty(rows, dtype=torch.bool)
    totals, heat = None, None
    if temperature is not None:
        totals, heat = torch.empty(rows, dtype=torch.float64), temperature.float().contiguous()
    check(library().deltic_top(pool(), address(logits), rows, width, count, address(heat), address(values),
                               address(ids), address(totals), address(healthy)))
    return _Best(values, ids, totals, healthy)


def _draw(best: _Best, sampling: Sampling, width: int) -> Tensor | None:
    """The tokens drawn among the best ones [L]; None if the filters may keep others too."""
    assert best.totals is not None
    heat = sampling.temperature.clamp(min=1e-9)[:, None].double()
    scores = best.values.double() / heat
    kept = keep(scores, best.totals[:, None], sampling)
    if best.ids.shape[1] < width and not complete(scores, kept, sampling):
        return None
    noisy = scores.masked_fill(~kept, -torch.inf) + gumbel(sampling.key, best.ids)
    drawn = best.ids.gather(1, noisy.argmax(-1, keepdim=True))[:, 0]
    return torch.where(sampling.temperature == 0, best.ids[:, 0], drawn)
