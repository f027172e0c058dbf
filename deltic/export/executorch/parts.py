"""What layers of an exported network are made of: tables, products, norms. Weights say in which type they multiply."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from deltic.ops.types import Block, Weight


class Embedding(nn.Module):
    """ids [T] -> [T, H] float32."""

    table: Tensor

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)

    def forward(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.table).to(torch.float32)


class LinearPart(nn.Module):
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


class ExpertBank(nn.Module):
    """Matrices of E experts [E, out, in]. Those of chosen [k] int64 -> [k, out, in] float32."""

    matrices: Tensor

    def __init__(self, matrices: Tensor) -> None:
        super().__init__()
        self.register_buffer("matrices", matrices)

    def forward(self, chosen: Tensor) -> Tensor:
        return self.matrices.index_select(0, chosen).to(torch.float32)


class QuantizedExpertBank(nn.Module):
    """As `ExpertBank`, of matrices that are kept as int8 with a scale for each row."""

    matrices: Tensor
    scale: Tensor

    def __init__(self, matrices: Tensor) -> None:
        super().__init__()
        scale = matrices.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
        self.register_buffer("matrices", (matrices / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, chosen: Tensor) -> Tensor:
        return self.matrices.index_select(0, chosen).to(torch.float32) * self.scale.index_select(0, chosen)


class RmsNormPart(nn.Module):
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
