"""Adds the terms of adapters to the weights of the torch ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deltic.ops.adapters import AdapterLayer, BatchAdapters, LowRanks
from deltic.ops.types import Batch, DecoderLayer, DecoderWeights, GdnWeights, MlpWeights, MoeWeights, Weight


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedWeight:
    """A weight, and the terms that a batch's adapters add to its products. numbers [T]: as in `BatchAdapters`. ranks:
    the terms of each adapter."""

    weight: Weight
    numbers: Tensor
    ranks: Sequence[LowRanks]

    def of(self, tokens: Tensor) -> AdaptedWeight:
        """Returns the same weight for a product of only these tokens."""
        return replace(self, numbers=self.numbers[tokens])

    def add(self, y: Tensor, x: Tensor) -> Tensor:
        """Adds the terms to the product y [T, rows] of x [T, columns], in place."""
        for index, ranks in enumerate(self.ranks):
            tokens = (self.numbers == index).nonzero()[:, 0] if ranks else ()
            if not len(tokens):
                continue
            rows = x[tokens]
            wide = rows if rows.dtype == torch.float64 else rows.float()
            for term in ranks:
                added = wide @ term.a.to(wide.dtype).T @ term.b.to(wide.dtype).T
                y[tokens, term.first:term.first + term.rows] += added.to(y.dtype)
        return y


def adapted_weights(weights: DecoderWeights, batch: Batch) -> DecoderWeights:
    """Returns the weights with the terms of a batch's adapters, for the torch ops."""
    given = batch.adapters
    assert given is not None
    layers = tuple(_adapted_layer(layer, index, given) for index, layer in enumerate(weights.layers))
    head: Any = weights.head
    if any(adapter.head for adapter in given.adapters):
        head = AdaptedWeight(head, given.numbers[batch.logit_tokens], [adapter.head for adapter in given.adapters])
    return replace(weights, layers=layers, head=head)


def _adapted_layer(layer: DecoderLayer, index: int, batch: BatchAdapters) -> DecoderLayer:
    own = [adapter.layers[index] for adapter in batch.adapters]

    def adapted(weight: Weight, ranks: Sequence[LowRanks]) -> Any:
        return AdaptedWeight(weight, batch.numbers, ranks) if any(ranks) else weight

    def product(weight: Weight, name: str) -> Any:
        return adapted(weight, [each.products.get(name, ()) for each in own])

    mixer, mlp = layer.mixer, layer.mlp
    new_mixer: Any
    if isinstance(mixer, GdnWeights):
        new_mixer = replace(mixer, in_proj=product(mixer.in_proj, "mix_in"),
                            out_proj=product(mixer.out_proj, "mix_out"))
    else:
        new_mixer = replace(mixer, qkv=product(mixer.qkv, "mix_in"), o_proj=product(mixer.o_proj, "mix_out"))
    if isinstance(mlp, MlpWeights):
        return replace(layer, mixer=new_mixer, mlp=_dense(mlp, product, "gate_up", "down"))
    return replace(layer, mixer=new_mixer, mlp=_mixture(mlp, own, adapted, product))


def _dense(mlp: MlpWeights, product: Callable[[Weight, str], Any], gate_up: str, down: str) -> MlpWeights:
    return replace(mlp, gate_up=product(mlp.gate_up, gate_up), down=product(mlp.down, down))


def _mixture(mlp: MoeWeights, own: Sequence[AdapterLayer], adapted: Callable[[Weight, Sequence[LowRanks]], Any],
             product: Callable[[Weight, str], Any]) -> MoeWeights:
    experts = mlp.experts
    if isinstance(experts, tuple) and any(each.experts for each in own):
        def ranks(expert: int, part: int) -> list[LowRanks]:
            return [each.experts[expert][part] if each.experts else () for each in own]
        experts = tuple(replace(one, gate_up=adapted(one.gate_up, ranks(place, 0)),
                                down=adapted(one.down, ranks(place, 1)))
                        for place, one in enumerate(experts, mlp.first))
    shared = mlp.shared and _dense(mlp.shared, product, "shared_gate_up", "shared_down")
    return replace(mlp, router=product(mlp.router, "router"), experts=experts, shared=shared)
