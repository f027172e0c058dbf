"""LoRA adapters: low-rank terms that a step adds to its matrix products, for each token separately.

The products of a layer are named `mix_in` (in_proj or qkv), `mix_out` (out_proj or o_proj), `gate_up`, `down`,
`router` (with the row of the shared expert's gate, if there is one), `shared_gate_up` and `shared_down`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

from deltic.ops.quantized import PANEL

PRODUCTS: Final = ("mix_in", "mix_out", "gate_up", "down", "router", "shared_gate_up", "shared_down")
"""Names of the products, in the order of the compiled kernels."""


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """The term x aᵀ bᵀ that an adapter adds to `rows` rows of a product, from row `first` on.

    a [rank, columns]. panels [rows / PANEL, rank, PANEL]: b [rows, rank] times the scale, padded with rows of 0.
    Both have one dtype. a is contiguous; on a CPU panels is contiguous, on a GPU b.
    """

    a: Tensor
    panels: Tensor
    rows: int
    first: int = 0

    @classmethod
    def of(cls, a: Tensor, b: Tensor, first: int = 0) -> LowRank:
        """Packs b [rows, rank]. Both matrices get the dtype of b."""
        rows, rank = b.shape
        padded = torch.cat((b, b.new_zeros(-rows % PANEL, rank)))
        panels = padded.view(-1, PANEL, rank).transpose(1, 2).contiguous()
        return cls(a.to(b.dtype).contiguous(), panels, rows, first)

    @property
    def b(self) -> Tensor:
        """The matrix b [rows, rank]."""
        return self.panels.transpose(1, 2).flatten(0, 1)[:self.rows]

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.panels.nbytes

    def to(self, device: torch.device) -> LowRank:
        panels = self.panels.to(device)
        if device.type == "cuda":  # CUDA kernels read b row by row
            panels = panels.transpose(1, 2).contiguous().transpose(1, 2)
        return replace(self, a=self.a.to(device), panels=panels)


LowRanks = tuple[LowRank, ...]
"""The terms of one product. Their rows do not overlap."""


@dataclass(frozen=True, slots=True, eq=False)
class AdapterLayer:
    """The terms of a layer. products: terms by name (see `PRODUCTS`). experts: terms of gate_up and down for each
    expert; empty: none."""

    products: Mapping[str, LowRanks] = field(default_factory=dict)
    experts: tuple[tuple[LowRanks, LowRanks], ...] = ()

    def terms(self) -> Iterator[LowRank]:
        for ranks in self.products.values():
            yield from ranks
        for gate_up, down in self.experts:
            yield from (*gate_up, *down)


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A loaded adapter.

    identity: a digest of its numbers; caches use it to distinguish adapters.
    layers: one for each layer of the model. head: the terms of the logits.
    kept: values that a backend derives from it.
    """

    name: str
    identity: str
    layers: tuple[AdapterLayer, ...]
    head: LowRanks = ()
    kept: dict[Any, Any] = field(default_factory=dict, repr=False)

    def terms(self) -> Iterator[LowRank]:
        for layer in self.layers:
            yield from layer.terms()
        yield from self.head

    @property
    def nbytes(self) -> int:
        return sum(term.nbytes for term in self.terms())

    @property
    def rank(self) -> int:
        """The maximum rank of its terms."""
        return max((len(term.a) for term in self.terms()), default=0)


@dataclass(frozen=True, slots=True, eq=False)
class BatchAdapters:
    """The adapters of a batch. numbers [T] int64: index of each token's adapter in `adapters`, or -1."""

    numbers: Tensor
    adapters: tuple[Adapter, ...]
