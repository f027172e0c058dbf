"""Muon for matrices, AdamW for the rest.

Muon: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True)
class Rates:
    matrices: float = 0.02
    others: float = 0.004
    decay: float = 0.02  # of matrices, times their rate
    momentum: float = 0.95


def orthogonal(x: Tensor) -> Tensor:
    """About U V^T of each matrix U S V^T of [n, rows, columns], in bf16, by five Newton-Schulz steps."""
    a, b, c = NEWTON_SCHULZ
    tall = x.shape[-2] > x.shape[-1]
    x = (x.mT if tall else x).bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x


class Optimizer:
    """Updates a model's parameters from their gradients; `model.embed_tokens` counts among the rest."""

    def __init__(self, model: nn.Module, rates: Rates) -> None:
        self.rates = rates
        groups: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        others = []
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and min(weight.shape) >= 32 and "embed" not in name:
                groups[weight.shape].append(weight)
            else:
                others.append(weight)
        self.matrices = [(group, torch.zeros_like(torch.stack(list(group)))) for group in groups.values()]
        cuda = others[0].is_cuda
        self.adam = torch.optim.AdamW(others, lr=rates.others, betas=(0.9, 0.98), weight_decay=0.0, fused=cuda)

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One update with the rates times `factor`; the gradients are gone afterwards."""
        for group in self.adam.param_groups:
            group["lr"] = self.rates.others * factor
        self.adam.step()
        self.adam.zero_grad()
        rate, momentum = self.rates.matrices * factor, self.rates.momentum
        for weights, average in self.matrices:
            grad = torch.stack([w.grad for w in weights])
            average.lerp_(grad, 1 - momentum)
            rows, columns = weights[0].shape
            update = orthogonal(grad.lerp_(average, momentum)).to(average.dtype) * max(1.0, rows / columns) ** 0.5
            torch._foreach_mul_(weights, 1 - rate * self.rates.decay)
            torch._foreach_add_(weights, list(update.unbind(0)), alpha=-rate)
            for weight in weights:
                weight.grad = None
