"""Choosing tokens on compiled kernels, which find the few best of a vocabulary; the rest is small."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deltic.ops.cpu.library import address, check, library, pool
from deltic.ops.records import Sampled, Sampling
from deltic.ops.torch import OPS as TORCH
from deltic.ops.torch.sample import CANDIDATES, apply


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
        tokens = best.ids.view(-1)
    else:
        best = _best(logits, min(CANDIDATES, logits.shape[1]), sampling.temperature)
        tokens = _draw(best, sampling, logits.shape[1])
        if -1 in tokens.tolist():
            tokens = TORCH.sample(logits, replace(sampling, adjust=None)).tokens
    return Sampled(tokens, best.healthy if healthy is None else healthy)


def _best(logits: Tensor, count: int, temperature: Tensor | None = None) -> _Best:
    rows, width = logits.shape
    values, ids = torch.empty(rows, count), torch.empty(rows, count, dtype=torch.int64)
    healthy = torch.empty(rows, dtype=torch.bool)
    totals, heat = None, None
    if temperature is not None:
        totals, heat = torch.empty(rows, dtype=torch.float64), temperature.contiguous()
    check(library().deltic_top(pool(), address(logits), rows, width, count, address(heat), address(values),
                               address(ids), address(totals), address(healthy)))
    return _Best(values, ids, totals, healthy)


def _draw(best: _Best, sampling: Sampling, width: int) -> Tensor:
    """The tokens drawn among the best ones [L]; -1 where the filters may keep others too."""
    rows, count = best.ids.shape
    tokens = torch.empty(rows, dtype=torch.int64)
    columns = [column.contiguous() for column in (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)]
    keys = sampling.key.contiguous()
    library().deltic_draw(address(best.values), address(best.ids), rows, count, width, *map(address, columns),
                          address(best.totals), address(keys), address(tokens))
    return tokens
