"""Choosing tokens on compiled kernels."""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deltic.ops.cpu.library import Drawing, ThreadPool, address, library, made_once
from deltic.ops.torch import OPS as TORCH
from deltic.ops.torch.sample import CANDIDATES, changed
from deltic.ops.types import Adjust, Sampled, Sampling


@dataclass(frozen=True, slots=True)
class _Best:
    """values [L, n] float32 and ids [L, n] of the best tokens, best first; tokens [L]: the first of them; totals [L]
    float64, at the temperatures `heat`, if asked for; healthy [L] bool."""

    values: Tensor
    ids: Tensor
    tokens: Tensor
    totals: Tensor | None
    healthy: Tensor
    heat: Tensor | None


def sample(pool: ThreadPool, logits: Tensor, sampling: Sampling) -> Sampled:
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        return TORCH.sample(logits, sampling)
    count, raw, reports, healthy = sampling.top_logprobs, logits, None, None
    if count is not None:
        reports = _best(pool, logits, min(max(count, 1), logits.shape[1]), torch.ones(len(logits)))
    if sampling.adjust is not None:
        healthy = _best(pool, logits, 1).healthy
        raw = logits.clone() if reports else logits
        _apply(pool, logits, sampling.adjust)
    best, tokens = _choose(pool, logits, sampling)
    possible = best.healthy if healthy is None else best.values[:, 0] > -torch.inf
    result = Sampled(tokens, best.healthy if healthy is None else healthy, possible)
    if reports is None or reports.totals is None:
        return result
    chances = (raw.gather(1, tokens[:, None]).double() - reports.totals[:, None])[:, 0].float()
    top = (reports.values.double() - reports.totals[:, None]).float()
    return replace(result, logprobs=chances, top_tokens=reports.ids[:, :count], top_logprobs=top[:, :count])


def _apply(pool: ThreadPool, logits: Tensor, adjust: Adjust) -> None:
    """Change the logits in place."""
    single = len(adjust.row) > 0
    old = logits[adjust.row, adjust.token] if single else logits[:0, 0]
    for table in adjust.tables:
        pool.call(library().deltic_adjust, logits[table.row].data_ptr(), logits.shape[1], address(table.repetition),
                  address(table.offset))
    if single:
        logits[adjust.row, adjust.token] = changed(old, adjust.repetition, adjust.offset)


def _choose(pool: ThreadPool, logits: Tensor, sampling: Sampling) -> tuple[_Best, Tensor]:
    """What is best in each row, and the tokens chosen [L]."""
    if sampling.greedy or not sampling.filtered:
        best = _best(pool, logits, 1, kept=sampling.kept)
        return best, best.tokens if sampling.greedy else _draw(pool, logits, best, sampling)
    best = _best(pool, logits, min(CANDIDATES, logits.shape[1]), sampling.temperature, sampling.kept)
    return best, _draw(pool, logits, best, sampling)


def _best(pool: ThreadPool, logits: Tensor, count: int, temperature: Tensor | None = None,
          kept: dict[Any, Any] | None = None) -> _Best:
    rows, width = logits.shape
    best, places = made_once(kept, (_best, count), lambda: _room(rows, count, temperature))
    pool.call(library().deltic_top, address(logits), rows, width, count, *places)
    return best


def _room(rows: int, count: int, temperature: Tensor | None) -> tuple[_Best, tuple[int | None, ...]]:
    """Where the best of each row will be written, and what `deltic_top` is to be told of that."""
    values, ids = torch.empty(rows, count), torch.empty(rows, count, dtype=torch.int64)
    healthy = torch.empty(rows, dtype=torch.bool)
    totals = None if temperature is None else torch.empty(rows, dtype=torch.float64)
    heat = None if temperature is None else temperature.contiguous()
    best = _Best(values, ids, ids[:, 0], totals, healthy, heat)
    return best, (address(heat), address(values), address(ids), address(totals), address(healthy))


def _draw(pool: ThreadPool, logits: Tensor, best: _Best, sampling: Sampling) -> Tensor:
    rows, count = best.ids.shape
    drawing, tokens, _ = made_once(sampling.kept, _draw, lambda: _drawing(rows, sampling))
    pool.call(library().deltic_draw, address(logits), rows, logits.shape[1], count, address(best.values),
              address(best.ids), address(best.totals), byref(drawing), address(tokens))
    return tokens


def _drawing(rows: int, sampling: Sampling) -> tuple[Drawing, Tensor, list[Tensor]]:
    """How to draw, where to, and what the first borrows."""
    columns = [column.contiguous() for column in (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p,
                                                  sampling.key)]
    return Drawing(*map(address, columns), sampling.filtered), torch.empty(rows, dtype=torch.int64), columns
