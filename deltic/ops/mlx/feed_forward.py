"""Feed-forwards on MLX arrays: dense layers and mixtures of experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
from torch import Tensor

from deltic.ops.mlx import metal
from deltic.ops.mlx.linear import Matrix, MlxMatrix, Packed, matrix_of, product, together
from deltic.ops.mlx.memory import Array, array_of, share, whole_of
from deltic.ops.types import MlpWeights, MoeWeights, Weight

_SORTED = 64
"""Minimum tokens * experts for which tokens are sorted by expert, so that each expert's weights are read once."""


@dataclass(frozen=True, slots=True)
class MlpArrays:
    gate_up: Matrix
    down: Matrix

    @classmethod
    def of(cls, weights: MlpWeights) -> MlpArrays:
        return cls(matrix_of(weights.gate_up), matrix_of(weights.down))


@dataclass(frozen=True, slots=True)
class MoeArrays:
    """The weights of a mixture of experts. experts: `MlpArrays` of stacked matrices. count: number of experts."""

    router: Matrix
    experts: MlpArrays
    shared: MlpArrays | None
    count: int
    per_token: int
    normalised: bool

    @classmethod
    def of(cls, weights: MoeWeights) -> MoeArrays:
        assert isinstance(weights.experts, tuple)
        gate_up, down = ([getattr(each, name) for each in weights.experts] for name in ("gate_up", "down"))
        shared = None if weights.shared is None else MlpArrays.of(weights.shared)
        return cls(matrix_of(weights.router), MlpArrays(_stack(gate_up), _stack(down)), shared, len(weights.experts),
                   weights.per_token, weights.normalised)


def pack_experts(experts: tuple[MlpWeights, ...]) -> tuple[MlpWeights, ...]:
    """Moves unquantized experts to common memory, so that one product computes all of them."""
    stacks = [_common([each.gate_up for each in experts]), _common([each.down for each in experts])]
    return tuple(MlpWeights(gate_up, down) for gate_up, down in zip(*stacks, strict=True))


def _common(weights: Sequence[Weight]) -> Sequence[Weight]:
    plain = [weight for weight in weights if isinstance(weight, Tensor)]
    if len(plain) < len(weights):
        return weights
    return list(share(mx.stack([array_of(weight) for weight in plain])))


def feed_forward_of(weights: MlpWeights | MoeWeights) -> MlpArrays | MoeArrays:
    return MoeArrays.of(weights) if isinstance(weights, MoeWeights) else MlpArrays.of(weights)


def _stack(weights: Sequence[Weight]) -> Matrix:
    """Returns matrices as one stack, without a copy if their memory is a stack already."""
    first = weights[0]
    if isinstance(first, tuple):
        parts = [_stack([weight[index] for weight in weights if isinstance(weight, tuple)])
                 for index in range(len(first))]
        return tuple(part for part in parts if not isinstance(part, tuple))
    plain = [weight for weight in weights if isinstance(weight, Tensor)]
    if plain:
        whole = whole_of(plain)
        return mx.stack([array_of(weight) for weight in plain]) if whole is None else whole
    packed = [weight for weight in weights if isinstance(weight, MlxMatrix)]
    if packed and packed[0].stack is not None:
        return packed[0].stack
    if packed and len({weight.matrix.form for weight in packed}) == 1:
        return together([weight.matrix for weight in packed], mx.stack)
    matrices = [matrix_of(weight) for weight in weights]
    return mx.stack([each.plain() if isinstance(each, Packed) else each for each in matrices
                     if not isinstance(each, tuple)])


def feed_forward(x: Array, layer: MlpArrays | MoeArrays) -> Array:
    """Computes a feed-forward: x [T, H] -> [T, H]."""
    return moe(x, layer) if isinstance(layer, MoeArrays) else mlp(x, layer)


def mlp(x: Array, layer: MlpArrays) -> Array:
    return product(_gated(product(x, layer.gate_up)), layer.down)


def _gated(both: Array) -> Array:
    gate, up = mx.split(both, 2, axis=-1)
    return gate * mx.sigmoid(gate) * up


def moe(x: Array, layer: MoeArrays) -> Array:
    logits = product(x.astype(mx.float32), layer.router)
    chances = mx.softmax(logits[:, :layer.count], axis=-1)
    # a stable sort: among equals the lower index comes first
    chosen = mx.argsort(-chances, axis=-1)[:, :layer.per_token]
    shares = mx.take_along_axis(chances, chosen, axis=-1)
    if layer.normalised:
        shares = shares / shares.sum(axis=-1, keepdims=True)
    passed = _through_experts(x, chosen, layer)
    total = (passed.astype(mx.float32) * shares[..., None]).sum(axis=1)
    if layer.shared is not None:
        total = total + mx.sigmoid(logits[:, layer.count:]) * mlp(x, layer.shared).astype(mx.float32)
    return total.astype(x.dtype)


def _through_experts(x: Array, chosen: Array, layer: MoeArrays) -> Array:
    """Returns the outputs of the chosen experts: x [T, H], chosen [T, k] -> [T, k, H]."""
    tokens, most = chosen.shape
    flat, order = chosen.reshape(-1), None
    source = mx.arange(tokens * most) // most
    if tokens * most >= _SORTED:
        order = mx.argsort(flat)
        flat, source = flat[order], source[order]
    rows = x[source][:, None]
    gated = _gated(_chosen(rows, layer.experts.gate_up, flat, order is not None))
    found = _chosen(gated, layer.experts.down, flat, order is not None)[:, 0]
    if order is not None:
        found = found[mx.argsort(order)]
    return found.reshape(tokens, most, -1)


def _chosen(x: Array, stack: Matrix, experts: Array, ordered: bool) -> Array:
    """Multiplies each row with the matrix of its expert: x [N, 1, in], experts [N] -> [N, 1, out]."""
    if isinstance(stack, tuple):
        return mx.concatenate([_chosen(x, part, experts, ordered) for part in stack], axis=-1)
    if isinstance(stack, Packed):
        return mx.gather_qmm(x, stack.codes, stack.scales, stack.biases, rhs_indices=experts, transpose=True,
                             group_size=stack.group, bits=stack.bits, mode=stack.mode, sorted_indices=ordered)
    weights = mx.swapaxes(stack, -1, -2)
    if x.dtype == mx.float32 or metal.available():
        return mx.gather_mm(x, weights.astype(x.dtype), rhs_indices=experts, sorted_indices=ordered)
    # on a CPU MLX supports this product only in float32
    if len(experts) < len(stack):
        weights, experts = weights[experts], mx.arange(len(experts))
    wide = x.astype(mx.float32), weights.astype(mx.float32)
    return mx.gather_mm(*wide, rhs_indices=experts, sorted_indices=ordered).astype(x.dtype)
