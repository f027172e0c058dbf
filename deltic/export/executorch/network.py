"""A decoder in the form that `torch.export` needs: one sequence, to which each call appends some tokens.

Everything is float32 except the products, which run in their weights' dtype. KV cache and recurrent states are buffers
that each call updates. The mixers exist for two sets of operators:

executorch: `llama::gated_delta_rule`, `update_cache` and `custom_sdpa` of ExecuTorch's packages, with core operators
around them. deltic: `deltic::gated_delta_net` and `deltic::attention`, which compute everything between a layer's
projections with deltic's kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from deltic.export.executorch.runtime import BUFFERS
from deltic.ops.reference import UNIT_EPS, rope
from deltic.ops.types import (
    AttentionWeights,
    Block,
    DecoderLayer,
    DecoderWeights,
    GdnWeights,
    MlpWeights,
    MoeWeights,
    Rope,
    Weight,
)
from deltic.params import PAGE

Operators = Literal["executorch", "deltic"]


@dataclass(frozen=True, slots=True)
class Build:
    """Options of a network. dtype: dtype of the products."""

    max_context: int
    dtype: torch.dtype = torch.float32
    operators: Operators = "executorch"

    @property
    def kit(self) -> Kit:
        return KITS[self.operators]


class ExportedNetwork(nn.Module):
    """tokens [1, T] int64, position [1] int64 -> logits [1, V] float32 of the last token.

    The tokens get the positions position, position + 1, ... At position 0 the states are treated as zero, whatever the
    buffers contain.
    """

    def __init__(self, weights: DecoderWeights, build: Build) -> None:
        super().__init__()
        self.embedding: nn.Module = Table(plain(weights.embedding).to(build.dtype))
        self.layers = nn.ModuleList(_ExportedLayer(layer, weights.eps, build) for layer in weights.layers)
        self.norm = RmsNormPart(weights.norm, weights.eps)
        self.head = LinearPart(weights.head, build.dtype)
        # text has the same position on all three axes
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
        self.input_norm = RmsNormPart(layer.input_norm, eps)
        self.post_norm = RmsNormPart(layer.post_norm, eps)
        self.mixer: Mixer
        if isinstance(layer.mixer, GdnWeights):
            self.mixer = build.kit.recurrent(layer.mixer, build.dtype)
        else:
            self.mixer = build.kit.attention(layer.mixer, build.max_context, build.dtype)
        self.mlp: nn.Module
        if isinstance(layer.mlp, MoeWeights):
            self.mlp = _MixtureOfExperts(layer.mlp, build.dtype)
        else:
            self.mlp = _Mlp(layer.dense, build.dtype)

    def forward(self, x: Tensor, place: Any) -> Tensor:
        x = x + self.mixer(self.input_norm(x), place)
        output: Tensor = x + self.mlp(self.post_norm(x))
        return output


class _Mlp(nn.Module):
    def __init__(self, weights: MlpWeights, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up, self.down = LinearPart(weights.gate_up, dtype), LinearPart(weights.down, dtype)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        output: Tensor = self.down(functional.silu(gate) * up)
        return output


class _MixtureOfExperts(nn.Module):
    """Maps x [1, H] -> [1, H], a single token. Copies the matrices of the chosen experts."""

    def __init__(self, weights: MoeWeights, dtype: torch.dtype) -> None:
        super().__init__()
        assert isinstance(weights.experts, tuple), "all experts are in memory"
        self.router = LinearPart(weights.router, torch.float32)
        self.gate_up: nn.Module = Table(torch.stack([plain(one.gate_up).to(dtype) for one in weights.experts]))
        self.down: nn.Module = Table(torch.stack([plain(one.down).to(dtype) for one in weights.experts]))
        self.shared = None if weights.shared is None else _Mlp(weights.shared, dtype)
        self.count, self.per_token, self.normalised = len(weights.experts), weights.per_token, weights.normalised

    def forward(self, x: Tensor) -> Tensor:
        routes = self.router(x)
        share, chosen = torch.topk(torch.softmax(routes[:, :self.count], -1), self.per_token)
        if self.normalised:
            share = share / share.sum(-1, keepdim=True)
        gate, up = torch.matmul(self.gate_up(chosen[0]), x[0]).chunk(2, dim=-1)
        each = torch.bmm(self.down(chosen[0]), (functional.silu(gate) * up)[..., None])[..., 0]
        output: Tensor = share @ each
        if self.shared is not None:
            output = output + torch.sigmoid(routes[:, self.count:]) * self.shared(x)
        return output


# Tables, products, norms


def plain(weight: Weight | Block) -> Tensor:
    assert isinstance(weight, Tensor), "weights are loaded unpacked"
    return weight


class Table(nn.Module):
    """Embeddings [V, H] or experts' matrices [E, out, in]: indices [K] int64 -> [K, ...] float32."""

    rows: Tensor

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.register_buffer("rows", rows)

    def forward(self, indices: Tensor) -> Tensor:
        return self.rows.index_select(0, indices).to(torch.float32)


class QuantizedTable(Table):
    """A table in int8, with one scale per row of values."""

    scale: Tensor

    def __init__(self, rows: Tensor) -> None:
        scale = rows.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
        super().__init__((rows / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, indices: Tensor) -> Tensor:
        return super().forward(indices) * self.scale.index_select(0, indices)


class LinearPart(nn.Module):
    """x [T, in] float32 -> x weightᵀ [T, out] float32, computed in `dtype`."""

    def __init__(self, weight: Weight, dtype: torch.dtype) -> None:
        super().__init__()
        matrix = plain(weight)
        self.linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, device="meta")
        self.linear.weight = nn.Parameter(matrix.to(dtype), requires_grad=False)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = self.linear(x.to(self.dtype))
        return product.to(torch.float32)


class RmsNormPart(nn.Module):
    """x [..., D] -> scale * x / sqrt(mean(x²) + eps)."""

    scale: Tensor

    def __init__(self, scale: Tensor, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("scale", scale.to(torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps) * self.scale


# Mixers


class Mixer(nn.Module, ABC):
    """A layer between its norm and its residual: x [T, hidden] -> [T, hidden]. place: output of the kit's `place`."""

    def __init__(self, in_proj: Weight, out_proj: Weight, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_proj, self.out_proj = LinearPart(in_proj, dtype), LinearPart(out_proj, dtype)

    def forward(self, x: Tensor, place: Any) -> Tensor:
        output: Tensor = self.out_proj(self.mix(self.in_proj(x), place))
        return output

    @abstractmethod
    def mix(self, projected: Tensor, place: Any) -> Tensor:
        """Computes the part of the layer between the two projections."""


class Recurrent(Mixer):
    """A Gated DeltaNet layer (`ops.reference.gdn_mixer`).

    Buffers, float32: conv_state [taps - 1, C], the last raw inputs of the convolution; recurrent_state [1, Hv, Dk, Dv].
    """

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
    """Causal attention. Buffers keys, values [1, places, kv_heads, head_dim] float32."""

    bias: Tensor | None
    keys: Tensor
    values: Tensor

    def __init__(self, weights: AttentionWeights, places: int, dtype: torch.dtype) -> None:
        super().__init__(weights.qkv, weights.o_proj, dtype)
        self.spec = spec = weights.spec
        self.q_norm = None if weights.q_norm is None else RmsNormPart(weights.q_norm, spec.eps)
        self.k_norm = None if weights.k_norm is None else RmsNormPart(weights.k_norm, spec.eps)
        self.register_buffer("bias", weights.bias)
        for name in BUFFERS["full_attention"]:
            self.register_buffer(name, torch.zeros(1, places, spec.kv_heads, spec.head_dim))

    def biased(self, projected: Tensor) -> Tensor:
        return projected if self.bias is None else projected + self.bias


# Over ExecuTorch's operators


class LlamaPlace(NamedTuple):
    """Position of a call's tokens. kept [1]: 0 at the sequence's start, else 1. cos, sin [T, 1, rotary_dim / 2]."""

    start: int
    kept: Tensor
    cos: Tensor
    sin: Tensor


class LlamaPlaces(nn.Module):
    """position [1] int64 and a number of tokens -> `LlamaPlace`."""

    cos: Tensor
    sin: Tensor

    def __init__(self, rope: Rope) -> None:
        super().__init__()
        half = rope.cos.shape[1] // 2
        self.places = len(rope.cos)
        self.register_buffer("cos", rope.cos[:, :half].contiguous())
        self.register_buffer("sin", rope.sin[:, :half].contiguous())

    def forward(self, position: Tensor, count: int) -> LlamaPlace:
        start = position[0].item()
        assert not isinstance(start, float)
        torch._check(start >= 0)
        torch._check(start + count <= self.places)
        cos, sin = (table.narrow(0, start, count).unsqueeze(1) for table in (self.cos, self.sin))
        return LlamaPlace(start, (position > 0).to(torch.float32), cos, sin)


class LlamaRecurrent(Recurrent):
    """Gated DeltaNet by ExecuTorch's operators. conv_state: oldest input first."""

    taps: Tensor

    def __init__(self, weights: GdnWeights, dtype: torch.dtype) -> None:
        super().__init__(weights, dtype)
        self.register_buffer("taps", weights.conv.to(torch.float32).T.contiguous())

    def mix(self, projected: Tensor, place: LlamaPlace) -> Tensor:
        spec, count = self.spec, projected.shape[0]
        raw, gate, b, a = projected.split([spec.channels, spec.values, spec.value_heads, spec.value_heads], dim=-1)
        pairs, value = self._convolve(raw, place.kept).split([2 * spec.keys, spec.values], dim=-1)
        pairs = _heads_first(_unit(pairs.view(count, 2 * spec.key_heads, spec.key_dim)))
        query, key = (self._repeat_heads(part) for part in pairs.chunk(2, dim=1))
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
        count, past = raw.shape[0], self.spec.conv_kernel - 1
        inputs = torch.cat([self.conv_state * kept, raw])
        self.conv_state.copy_(inputs[-past:])
        total = inputs.narrow(0, 0, count) * self.taps[0]
        for tap in range(1, past + 1):
            total = total + inputs.narrow(0, tap, count) * self.taps[tap]
        return functional.silu(total)

    def _repeat_heads(self, x: Tensor) -> Tensor:
        """[1, Hk, T, Dk] -> [1, Hv, T, Dk]: each key head serves consecutive value heads."""
        repeats = self.spec.value_heads // self.spec.key_heads
        return x.contiguous() if repeats == 1 else x.repeat_interleave(repeats, dim=1)


class LlamaAttention(Attention):
    def mix(self, projected: Tensor, place: LlamaPlace) -> Tensor:
        spec, count, parts = self.spec, projected.shape[0], 2 if self.spec.gate else 1
        queries, key, value = self.biased(projected).split([parts * spec.queries, spec.kv, spec.kv], dim=-1)
        queries = queries.view(count, spec.heads, parts * spec.head_dim)
        query = _rotated(queries[..., :spec.head_dim], self.q_norm, place)
        key = _rotated(key.view(count, spec.kv_heads, spec.head_dim), self.k_norm, place)
        torch.ops.llama.update_cache(key, self.keys, place.start)
        torch.ops.llama.update_cache(value.view(1, count, spec.kv_heads, spec.head_dim), self.values, place.start)
        found = torch.ops.llama.custom_sdpa(query, self.keys, self.values, place.start, None, 0.0, True)
        mixed: Tensor = found.view(count, spec.heads, spec.head_dim)
        if spec.gate:
            mixed = mixed * torch.sigmoid(queries[..., spec.head_dim:])
        return mixed.reshape(count, spec.queries)


def _unit(x: Tensor) -> Tensor:
    """Scales x [..., D] to length 1."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + UNIT_EPS)


def _heads_first(x: Tensor) -> Tensor:
    """[T, heads, ...] -> [1, heads, T, ...]."""
    return x.transpose(0, 1).unsqueeze(0).contiguous()


def _rotated(x: Tensor, norm: RmsNormPart | None, place: LlamaPlace) -> Tensor:
    """x [T, heads, D] -> [1, T, heads, D], normed and rotated. A pair is half of the leading rotary_dim apart."""
    half = place.cos.shape[-1]
    x = x if norm is None else norm(x)
    first, second, rest = x[..., :half], x[..., half:2 * half], x[..., 2 * half:]
    pairs = (first * place.cos - second * place.sin, second * place.cos + first * place.sin)
    return torch.cat([*pairs, rest], dim=-1).unsqueeze(0)


# Over deltic's operators, which `operators.cpp` computes in ExecuTorch's runtime

_SCHEMAS: Final = {
    "gated_delta_net": "(Tensor projected, Tensor position, Tensor conv, Tensor decay, Tensor dt_bias, Tensor norm, "
                       "Tensor(a!) conv_state, Tensor(b!) recurrent_state, int key_heads, float eps",
    "attention": "(Tensor joined, Tensor position, Tensor cosines, Tensor sines, Tensor? q_norm, Tensor? k_norm, "
                 "Tensor(a!) keys, Tensor(b!) values, int heads, bool gate, float eps",
}
_LIBRARY: Final = torch.library.Library("deltic", "DEF")
for _name, _schema in _SCHEMAS.items():
    _LIBRARY.define(f"{_name}{_schema}) -> Tensor")
    _LIBRARY.define(f"{_name}.out{_schema}, *, Tensor(c!) out) -> Tensor(c!)")


@torch.library.impl(_LIBRARY, "gated_delta_net", "Meta")
def _gated_delta_net(projected: Tensor, *others: Any) -> Tensor:
    _, heads, _, columns = others[6].shape  # recurrent_state
    return projected.new_empty(projected.shape[0], heads * columns)


@torch.library.impl(_LIBRARY, "attention", "Meta")
def _attention(joined: Tensor, *others: Any) -> Tensor:
    keys, _, heads, _, _ = others[5:]
    return joined.new_empty(joined.shape[0], heads * keys.shape[3])


class DelticPlace(NamedTuple):
    """The place of a call's tokens. position [1] int64; cos, sin [places, rotary_dim]."""

    position: Tensor
    cos: Tensor
    sin: Tensor


class DelticPlaces(nn.Module):
    """Passes on the whole tables: the operators find the call's rows themselves."""

    cos: Tensor
    sin: Tensor

    def __init__(self, rope: Rope) -> None:
        super().__init__()
        self.register_buffer("cos", rope.cos)
        self.register_buffer("sin", rope.sin)

    def forward(self, position: Tensor, count: int) -> DelticPlace:
        return DelticPlace(position, self.cos, self.sin)


class DelticRecurrent(Recurrent):
    """Gated DeltaNet by deltic's operators. conv_state: the input of position p is in row p mod (taps - 1)."""

    conv: Tensor

    def __init__(self, weights: GdnWeights, dtype: torch.dtype) -> None:
        super().__init__(weights, dtype)
        self.register_buffer("conv", weights.conv.to(torch.float32).contiguous())

    def mix(self, projected: Tensor, place: DelticPlace) -> Tensor:
        mixed: Tensor = torch.ops.deltic.gated_delta_net(
            projected, place.position, self.conv, self.decay, self.dt_bias, self.norm.scale, self.conv_state,
            self.recurrent_state, self.spec.key_heads, self.spec.eps)
        return mixed


class DelticAttention(Attention):
    """Attention by deltic's operators. Keys and values have whole pages."""

    def __init__(self, weights: AttentionWeights, places: int, dtype: torch.dtype) -> None:
        super().__init__(weights, -(-places // PAGE) * PAGE, dtype)

    def mix(self, projected: Tensor, place: DelticPlace) -> Tensor:
        scales = (None if norm is None else norm.scale for norm in (self.q_norm, self.k_norm))
        mixed: Tensor = torch.ops.deltic.attention(
            self.biased(projected), place.position, place.cos, place.sin, *scales, self.keys, self.values,
            self.spec.heads, self.spec.gate, self.spec.eps)
        return mixed


@dataclass(frozen=True, slots=True)
class Kit:
    """The modules of a network over one set of operators."""

    place: type[LlamaPlaces | DelticPlaces]
    recurrent: type[Recurrent]
    attention: type[Attention]


KITS: Final[Mapping[Operators, Kit]] = {
    "executorch": Kit(LlamaPlaces, LlamaRecurrent, LlamaAttention),
    "deltic": Kit(DelticPlaces, DelticRecurrent, DelticAttention),
}
