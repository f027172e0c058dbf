"""A decoder as `torch.export` wants it: one sequence, of which each call reads some tokens. All is float32 but the
products, whose weights say what they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deltic.export.executorch.mixers import KITS, Kit, Operators
from deltic.export.executorch.parts import Embedding, ExpertBank, LinearPart, RmsNormPart, plain
from deltic.ops.reference import rope
from deltic.ops.types import DecoderLayer, DecoderWeights, GdnWeights, MlpWeights, MoeWeights


@dataclass(frozen=True, slots=True)
class Build:
    """How a network is made. max_context: places that there are. dtype: of the products. operators: of the mixers."""

    max_context: int
    dtype: torch.dtype = torch.float32
    operators: Operators = "executorch"

    @property
    def kit(self) -> Kit:
        return KITS[self.operators]


class ExportedNetwork(nn.Module):
    """tokens [1, T] int64, position [1] int64 -> logits [1, V] float32 of the last token.

    The tokens get the places position, position + 1, ... At position 0 the states count as zero, whatever sequence left
    them behind.
    """

    def __init__(self, weights: DecoderWeights, build: Build) -> None:
        super().__init__()
        self.embedding: nn.Module = Embedding(plain(weights.embedding).to(build.dtype))
        self.layers = nn.ModuleList(_ExportedLayer(layer, weights.eps, build) for layer in weights.layers)
        self.norm = RmsNormPart(weights.norm, weights.eps)
        self.head = LinearPart(weights.head, build.dtype)
        # texts have the same position on all axes
        self.place = build.kit.place(rope(torch.arange(build.max_context).expand(3, -1), weights.rope))

    def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
        place = self.place(position, tokens.shape[1])
        x = self.embedding(tokens[0])
        for layer in self.layers:
            x = layer(x, place)
        logits: Tensor = self.head(self.norm(x[-1:]))
        return logits


class _ExportedLayer(nn.Module):
    def __init__(self, layer: DecoderLayer, eps: float, build: Build) -> None:
        super().__init__()
        self.input_norm, self.post_norm = RmsNormPart(layer.input_norm, eps), RmsNormPart(layer.post_norm, eps)
        self.mixer = (build.kit.recurrent(layer.mixer, build.dtype) if isinstance(layer.mixer, GdnWeights)
                      else build.kit.attention(layer.mixer, build.max_context, build.dtype))
        self.mlp = (_Mixture(layer.mlp, build.dtype) if isinstance(layer.mlp, MoeWeights)
                    else _Mlp(layer.dense, build.dtype))

    def forward(self, x: Tensor, place: Any) -> Tensor:
        x = x + self.mixer(self.input_norm(x), place)
        after: Tensor = x + self.mlp(self.post_norm(x))
        return after


class _Mlp(nn.Module):
    def __init__(self, weights: MlpWeights, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up, self.down = LinearPart(weights.gate_up, dtype), LinearPart(weights.down, dtype)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        after: Tensor = self.down(functional.silu(gate) * up)
        return after


class _Mixture(nn.Module):
    """A mixture of experts, for a single token: x [1, H] -> [1, H]. The chosen experts' matrices are copied out."""

    def __init__(self, weights: MoeWeights, dtype: torch.dtype) -> None:
        super().__init__()
        assert isinstance(weights.experts, tuple), "all experts are in memory"
        self.router = LinearPart(weights.router, torch.float32)
        self.gate_up: nn.Module = ExpertBank(torch.stack([plain(one.gate_up).to(dtype) for one in weights.experts]))
        self.down: nn.Module = ExpertBank(torch.stack([plain(one.down).to(dtype) for one in weights.experts]))
        self.shared = None if weights.shared is None else _Mlp(weights.shared, dtype)
        self.count, self.per_token, self.normalised = len(weights.experts), weights.per_token, weights.normalised

    def forward(self, x: Tensor) -> Tensor:
        routes = self.router(x)
        share, chosen = torch.topk(torch.softmax(routes[:, :self.count], -1), self.per_token)
        share = share / share.sum(-1, keepdim=True) if self.normalised else share
        gate, up = torch.matmul(self.gate_up(chosen[0]), x[0]).chunk(2, dim=-1)
        each = torch.bmm(self.down(chosen[0]), (functional.silu(gate) * up)[..., None])[..., 0]
        after: Tensor = share @ each
        if self.shared is not None:
            after = after + torch.sigmoid(routes[:, self.count:]) * self.shared(x)
        return after
