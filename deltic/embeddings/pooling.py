"""From the states of a text's tokens to one vector, of a whole batch at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

Pool = Callable[[Tensor, Tensor, Tensor], Tensor]


def pooled(states: Tensor, lengths: Sequence[int], prompts: Sequence[int], poolings: Sequence[str]) -> Tensor:
    """Vectors [N, H * poolings] float32 of the states [T, H] of N texts, one after another. A text's vector depends on
    its own states alone.

    lengths: tokens of each text. prompts: so many of its first tokens do not count, but where a pooling takes the first
    or the last one. poolings: of `recipe.POOLINGS`.
    """
    device = states.device
    ends = torch.tensor(lengths).cumsum(0)
    firsts = ends - torch.tensor(lengths)
    found = []
    for pooling in poolings:
        if pooling in _ONE:
            found.append(states[_ONE[pooling](firsts, ends).to(device)].float())
            continue
        skipped, places = torch.tensor(prompts), torch.arange(int(ends[-1])) - firsts.repeat_interleave(ends - firsts)
        rows = states
        if any(prompts):
            kept = places >= skipped.repeat_interleave(ends - firsts)
            rows, places = states[kept.to(device)], places[kept]
        found.append(_SEVERAL[pooling](rows.float(), (places + 1).to(device), (ends - firsts - skipped).to(device)))
    return torch.cat(found, 1)


_ONE: Final[Mapping[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "cls": lambda firsts, ends: firsts, "lasttoken": lambda firsts, ends: ends - 1}


def _reduced(rows: Tensor, how: str, lengths: Tensor) -> Tensor:
    if rows.device.type == "cpu":  # several times faster, but many calls
        return torch.stack([_REDUCED[how](part) for part in rows.split(lengths.tolist())])
    return torch.segment_reduce(rows, how, lengths=lengths, axis=0, unsafe=True)


_REDUCED: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "max": lambda rows: rows.amax(0) if len(rows) else rows.new_full(rows.shape[1:], -torch.inf),
    "mean": lambda rows: rows.mean(0), "sum": lambda rows: rows.sum(0)}


def _weighted(rows: Tensor, places: Tensor, lengths: Tensor) -> Tensor:
    """Each token weighs as much as its place, the first one 1."""
    weights = places.to(rows.dtype)[:, None]
    return _reduced(rows * weights, "sum", lengths) / _reduced(weights, "sum", lengths)


_SEVERAL: Final[Mapping[str, Pool]] = {
    "max": lambda rows, places, lengths: _reduced(rows, "max", lengths),
    "mean": lambda rows, places, lengths: _reduced(rows, "mean", lengths),
    "mean_sqrt_len": lambda rows, places, lengths: _reduced(rows, "sum", lengths) / lengths[:, None].sqrt(),
    "weightedmean": _weighted}
