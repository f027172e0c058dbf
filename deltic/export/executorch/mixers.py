"""The mixers of an exported network, whose K/V and states lie in buffers that each call changes, over one of two sets
of operators. With either, any number of tokens is one call.

executorch: `llama::gated_delta_rule`, `update_cache`, `custom_sdpa`, which ExecuTorch's own packages have; what lies
around them is made of its core operators. deltic: `deltic::gated_delta_net` and `deltic::attention`, each of which is
all that lies between a layer's projections, over deltic's kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from deltic.export.executorch.names import BUFFERS
from deltic.export.executorch.parts import LinearPart, RmsNormPart
from deltic.ops.reference import UNIT_EPS
from deltic.ops.types import AttentionWeights, GdnWeights, Rope, Weight
from deltic.params import PAGE

Operators = Literal["executorch", "deltic"]


class Mixer(nn.Module, ABC):
    """A layer between its norm and its residual: x [T, hidden] -> [T, hidden]. place: of the tokens, as the operators'
    `CachePosition` gives it."""

    def __init__(self, into: Weight, out: Weight, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_proj, self.out_proj = LinearPart(into, dtype), LinearPart(out, dtype)

    def forward(self, x: Tensor, place: Any) -> Tensor:
        output: Tensor = self.out_proj(self.mix(self.in_proj(x), place))
        return output

    @abstractmethod
    def mix(self, projected: Tensor, place: Any) -> Tensor:
        """What lies between the projections."""


class Recurrent(Mixer):
    """A Gated DeltaNet layer (`ops.ref.gdn_mixer`). Buffers conv_state [taps - 1, C], the last raw inputs of the
    convolution, and recurrent_state [1, Hv, Dk, Dv], float32."""

    decay: Tensor
    dt_bias: Tensor
    conv_state: Tensor
    recurrent_state: Tensor

    def __init__(self, weights: GdnWeights, dtype: torch.dtype) -> None:
        super().__init__(weights.in_proj, weights.out_proj, dtype)
        self.spec = spec = weights.spec
        assert not spec.tiled, "the value heads are in a GGUF file's order"
        self.norm = RmsNormPart(weights.norm, spec.eps)
        self.register_buffer("decay", weights.decay)
        self.register_buffer("dt_bias", weights.dt_bias)
        self.register_buffer("conv_state", torch.zeros(spec.conv_kernel - 1, spec.channels))
        self.register_buffer("recurrent_state", torch.zeros(1, spec.value_heads, spec.key_dim, spec.value_dim))


class Attention(Mixer):
    """Attention over the places below a token's own and itself. Buffers keys, values [1, places, kv_heads, head_dim]
    float32."""

    bias: Tensor | None
    keys: Tensor
    values: Tensor

    def __init__(self, weights: AttentionWeights, places: int, dtype: torch.dtype) -> None:
        super().__init__(weights.qkv, weights.o_proj, dtype)
        self.spec = spec = weights.spec
        self.q_norm, self.k_norm = (None if scale is None else RmsNormPart(scale, spec.eps)
                                    for scale in (weights.q_norm, weights.k_norm))
        self.register_buffer("bias", weights.bias)
        for name in BUFFERS["full_attention"]:
            self.register_buffer(name, torch.zeros(1, places, spec.kv_heads, spec.head_dim))

    def joined(self, projected: Tensor) -> Tensor:
        """Queries (with their gates), keys and values."""
        return projected if self.bias is None else projected + self.bias


# Over ExecuTorch's operators


class Spot(NamedTuple):
    """start: place of the call's first token. kept [1]: 0 if it is the sequence's first, else 1. turn: cos, sin [T, 1,
    rotary_dim / 2]."""

    start: int
    kept: Tensor
    turn: list[Tensor]


class CachePosition(nn.Module):
    """position [1] int64, and how many tokens are read -> what mixers want to know of their places."""

    cos: Tensor
    sin: Tensor

    def __init__(self, rope: Rope) -> None:
        super().__init__()
        half = rope.cos.shape[1] // 2
        self.places = len(rope.cos)
        self.register_buffer("cos", rope.cos[:, :half].contiguous())
        self.register_buffer("sin", rope.sin[:, :half].contiguous())

    def forward(self, position: Tensor, count: int) -> Spot:
        start = position[0].item()
        assert not isinstance(start, float)
        torch._check(start >= 0)
        torch._check(start + count <= self.places)
        turn = [table.narrow(0, start, count).unsqueeze(1) for table in (self.cos, self.sin)]
        return Spot(start, (position > 0).to(torch.float32), turn)


class LlamaRecurrent(Recurrent):
    """conv_state: oldest input first."""

    taps: Tensor

    def __init__(self, weights: GdnWeights, dtype: torch.dtype) -> None:
        super().__init__(weights, dtype)
        self.register_buffer("taps", weights.conv.to(torch.float32).T.contiguous())

    def mix(self, projected: Tensor, place: Spot) -> Tensor:
        spec, count = self.spec, projected.shape[0]
        raw, gate, b, a = projected.split([spec.channels, spec.values, spec.value_heads, spec.value_heads], dim=-1)
        pairs, value = self._convolve(raw, place.kept).split([2 * spec.keys, spec.values], dim=-1)
        pairs = _heads_first(_unit(pairs.view(count, 2 * spec.key_heads, spec.key_dim)))
        query, key = (self._spread(part) for part in pairs.chunk(2, dim=1))
        decay = torch.exp(self.decay * functional.softplus(a + self.dt_bias))
        found, after = torch.ops.llama.gated_delta_rule(
            query * spec.key_dim ** -0.5, key, _heads_first(value.view(count, spec.value_heads, spec.value_dim)),
            _heads_first(decay), _heads_first(torch.sigmoid(b)), self.recurrent_state * place.kept)
        self.recurrent_state.copy_(after)
        mixed = self.norm(found.squeeze(0).transpose(0, 1))
        mixed = mixed * functional.silu(gate.view(count, spec.value_heads, spec.value_dim))
        flat: Tensor = mixed.reshape(count, spec.values)
        return flat

    def _convolve(self, raw: Tensor, kept: Tensor) -> Tensor:
        count, before = raw.shape[0], self.spec.conv_kernel - 1
        inputs = torch.cat([self.conv_state * kept, raw])
        self.conv_state.copy_(inputs[-before:])
        total = inputs.narrow(0, 0, count) * self.taps[0]
        for tap in range(1, before + 1):
            total = total + inputs.narrow(0, tap, count) * self.taps[tap]
        return functional.silu(total)

    def _spread(self, x: Tensor) -> Tensor:
        """[1, Hk, T, Dk] -> [1, Hv, T, Dk]: each head serves as many consecutive ones."""
        repeats = self.spec.value_heads // self.spec.key_heads
        return x.contiguous() if repeats == 1 else x.repeat_interleave(repeats, dim=1)


class LlamaAttention(Attention):
    def mix(self, projected: Tensor, place: Spot) -> Tensor:
        spec, count, parts = self.spec, projected.shape[0], 2 if self.spec.gate else 1
        queries, key, value = self.joined(projected).split([parts * spec.queries, spec.kv, spec.kv], dim=-1)
        queries = queries.view(count, spec.heads, parts * spec.head_dim)
        query = _turned(queries[..., :spec.head_dim], self.q_norm, place)
        key = _turned(key.view(count, spec.kv_heads, spec.head_dim), self.k_norm, place)
        torch.ops.llama.update_cache(key, self.keys, place.start)
        torch.ops.llama.update_cache(value.view(1, count, spec.kv_heads, spec.head_dim), self.values, place.start)
        found = torch.ops.llama.custom_sdpa(query, self.keys, self.values, place.start, None, 0.0, True)
        mixed: Tensor = found.view(count, spec.heads, spec.head_dim)
        if spec.gate:
            mixed = mixed * torch.sigmoid(queries[..., spec.head_dim:])
        return mixed.reshape(count, spec.queries)


def _unit(x: Tensor) -> Tensor:
    """x [..., D], of length 1."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + UNIT_EPS)


def _heads_first(x: Tensor) -> Tensor:
    """[T, heads, ...] -> [1, heads, T, ...]."""
    return x.transpose(0, 1).unsqueeze(0).contiguous()


def _turned(x: Tensor, norm: RmsNormPart | None, place: Spot) -> Tensor:
    """x [T, heads, D] -> [1, T, heads, D], normed and rotated: pairs are half of the leading rotary_dim apart."""
    cos, sin = place.turn
    half, normed = cos.shape[-1], x if norm is None else norm(x)
    first, second, rest = normed[..., :half], normed[..., half:2 * half], normed[..., 2 * half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1).unsqueeze(0)


# Over deltic's


class RopeTable(NamedTuple):
    """position [1] int64; cos, sin [places, rotary_dim]."""

    position: Tensor
    cos: Tensor
    sin: Tensor


class WholeRopeTable(nn.Module):
    """As `CachePosition`, for operators that find the call's places themselves."""

    cos: Tensor
    sin: Tensor

    def __init__(self, rope: Rope) -> None:
        super().__init__()
        self.register_buffer("cos", rope.cos)
        self.register_buffer("sin", rope.sin)

    def forward(self, position: Tensor, count: int) -> RopeTable:
        return RopeTable(position, self.cos, self.sin)


class DelticRecurrent(Recurrent):
    """conv_state: the input of position p lies in row p mod (taps - 1)."""

    conv: Tensor

    def __init__(self, weights: GdnWeights, dtype: torch.dtype) -> None:
        super().__init__(weights, dtype)
        self.register_buffer("conv", weights.conv.to(torch.float32).contiguous())

    def mix(self, projected: Tensor, place: RopeTable) -> Tensor:
        mixed: Tensor = torch.ops.deltic.gated_delta_net(
            projected, place.position, self.conv, self.decay, self.dt_bias, self.norm.scale, self.conv_state,
            self.recurrent_state, self.spec.key_heads, self.spec.eps)
        return mixed


class DelticAttention(Attention):
    """Keys and values have room for whole pages."""

    def __init__(self, weights: AttentionWeights, places: int, dtype: torch.dtype) -> None:
        super().__init__(weights, -(-places // PAGE) * PAGE, dtype)

    def mix(self, projected: Tensor, place: RopeTable) -> Tensor:
        scales = (None if norm is None else norm.scale for norm in (self.q_norm, self.k_norm))
        mixed: Tensor = torch.ops.deltic.attention(
            self.joined(projected), place.position, place.cos, place.sin, *scales, self.keys, self.values,
            self.spec.heads, self.spec.gate, self.spec.eps)
        return mixed


@dataclass(frozen=True, slots=True)
class Kit:
    """What a network over some operators is made of."""

    place: type[CachePosition | WholeRopeTable]
    recurrent: type[Recurrent]
    attention: type[Attention]


KITS: Final[Mapping[Operators, Kit]] = {
    "executorch": Kit(CachePosition, LlamaRecurrent, LlamaAttention),
    "deltic": Kit(WholeRopeTable, DelticRecurrent, DelticAttention),
}
