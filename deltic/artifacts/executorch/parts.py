"""What layers of an exported network are made of: tables, products, norms. Weights say in which type they multiply."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from deltic.ops.records import Block, Weight


class Embedding(nn.Module):
    """ids [T] -> [T, H] float32."""

    table: Tensor

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)

    def forward(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.table).to(torch.float32)


class Product(nn.Module):
    """x [T, in] float32 -> x weightᵀ [T, out] float32, computed in the dtype."""

    def __init__(self, weight: Weight, dtype: torch.dtype) -> None:
        super().__init__()
        matrix = plain(weight)
        self.linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, device="meta")
        self.linear.weight = nn.Parameter(matrix.to(dtype), requires_grad=False)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = self.linear(x.to(self.dtype))
        return product.to(torch.float32)


class Norm(nn.Module):
    """x [..., D] -> scale * x / sqrt(mean(x²) + eps)."""

    scale: Tensor

    def __init__(self, scale: Tensor, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("scale", scale.to(torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps) * self.scale


def plain(weight: Weight | Block) -> Tensor:
    """A weight of an unpacked model."""
    assert isinstance(weight, Tensor), "weights are read as plain numbers"
    return weight
