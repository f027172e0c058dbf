"""A decoder as `torch.export` wants it: one sequence, whose K/V and states lie in buffers that each call changes.

The delta rule and attention are operators of ExecuTorch's (`llama::gated_delta_rule`, `update_cache`, `custom_sdpa`),
so that any number of tokens is one call of each. All is float32 but the products, whose weights say what they are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from deltic.artifacts.executorch.names import BUFFERS
from deltic.ops.records import (
    AttentionWeights,
    Block,
    DecoderWeights,
    GdnWeights,
    Layer,
    MlpWeights,
    RopeSpec,
    Weight,
)
from deltic.ops.ref import UNIT_EPS, rope


class Network(nn.Module):
    """tokens [1, T] int64, position [1] int64 -> logits [1, V] float32 of the last token.

    The tokens get the places position, position + 1, ... At position 0 the states count as zero, whatever sequence left
    them behind. max_context: places that there are. dtype: of the products.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, weights: DecoderWeights, max_context: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.max_context = max_context
        self.embedding: nn.Module = Embedding(_plain(weights.embedding).to(dtype))
        self.layers = nn.ModuleList(_Layer(layer, weights.eps, max_context, dtype) for layer in weights.layers)
        self.norm = Norm(weights.norm, weights.eps)
        self.head = Product(weights.head, dtype)
        cos, sin = _rotary_table(weights.rope, max_context)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
        count, start = tokens.shape[1], position[0].item()
        assert not isinstance(start, float)
        torch._check(start >= 0)
        torch._check(start + count <= self.max_context)
        turn = [table.narrow(0, start, count).unsqueeze(1) for table in (self.cos, self.sin)]
        kept = (position > 0).to(torch.float32)
        x = self.embedding(tokens[0])
        for layer in self.layers:
            x = layer(x, start, kept, turn)
        logits: Tensor = self.head(self.norm(x[-1:]))
        return logits


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
        matrix = _plain(weight)
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


class _Layer(nn.Module):
    def __init__(self, layer: Layer, eps: float, max_context: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_norm, self.post_norm = Norm(layer.input_norm, eps), Norm(layer.post_norm, eps)
        self.mixer = (_Delta(layer.mixer, dtype) if isinstance(layer.mixer, GdnWeights)
                      else _Attention(layer.mixer, max_context, dtype))
        self.mlp = _Mlp(layer.dense, dtype)

    def forward(self, x: Tensor, start: int, kept: Tensor, turn: list[Tensor]) -> Tensor:
        x = x + self.mixer(self.input_norm(x), start, kept, turn)
        after: Tensor = x + self.mlp(self.post_norm(x))
        return after


class _Mlp(nn.Module):
    def __init__(self, weights: MlpWeights, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up, self.down = Product(weights.gate_up, dtype), Product(weights.down, dtype)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        after: Tensor = self.down(functional.silu(gate) * up)
        return after


class _Attention(nn.Module):
    """Attention over the places below a token's own and itself. Buffers keys, values [1, places, kv_heads, head_dim]
    float32."""

    bias: Tensor | None
    keys: Tensor
    values: Tensor

    def __init__(self, weights: AttentionWeights, max_context: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec = weights.spec
        self.qkv, self.o_proj = Product(weights.qkv, dtype), Product(weights.o_proj, dtype)
        self.q_norm, self.k_norm = (nn.Identity() if scale is None else Norm(scale, spec.eps)
                                    for scale in (weights.q_norm, weights.k_norm))
        self.register_buffer("bias", weights.bias)
        for name in BUFFERS["full_attention"]:
            self.register_buffer(name, torch.zeros(1, max_context, spec.kv_heads, spec.head_dim))

    def forward(self, x: Tensor, start: int, kept: Tensor, turn: list[Tensor]) -> Tensor:
        spec, count, parts = self.spec, x.shape[0], 2 if self.spec.gate else 1
        joined = self.qkv(x) if self.bias is None else self.qkv(x) + self.bias
        queries, key, value = joined.split([parts * spec.queries, spec.kv, spec.kv], dim=-1)
        queries = queries.view(count, spec.heads, parts * spec.head_dim)
        query = _rotate(self.q_norm(queries[..., :spec.head_dim]), turn).unsqueeze(0)
        key = _rotate(self.k_norm(key.view(count, spec.kv_heads, spec.head_dim)), turn).unsqueeze(0)
        torch.ops.llama.update_cache(key, self.keys, start)
        torch.ops.llama.update_cache(value.view(1, count, spec.kv_heads, spec.head_dim), self.values, start)
        found = torch.ops.llama.custom_sdpa(query, self.keys, self.values, start, None, 0.0, True)
        mixed = found.view(count, spec.heads, spec.head_dim)
        if spec.gate:
            mixed = mixed * torch.sigmoid(queries[..., spec.head_dim:])
        after: Tensor = self.o_proj(mixed.reshape(count, spec.queries))
        return after


class _Delta(nn.Module):
    """A Gated DeltaNet layer between its norm and its residual (`ops.ref.gdn_mixer`). Buffers conv_state
    [taps - 1, C], the last raw inputs of the convolution, and recurrent_state [1, Hv, Dk, Dv], float32."""

    taps: Tensor
    decay: Tensor
    dt_bias: Tensor
    conv_state: Tensor
    recurrent_state: Tensor

    def __init__(self, weights: GdnWeights, dtype: torch.dtype) -> None:
        super().__init__()
        self.spec = spec = weights.spec
        assert not spec.tiled, "the value heads are in a GGUF file's order"
        self.in_proj, self.out_proj = Product(weights.in_proj, dtype), Product(weights.out_proj, dtype)
        self.norm = Norm(weights.norm, spec.eps)
        self.register_buffer("taps", weights.conv.to(torch.float32).T.contiguous())
        self.register_buffer("decay", weights.decay)
        self.register_buffer("dt_bias", weights.dt_bias)
        self.register_buffer("conv_state", torch.zeros(spec.conv_kernel - 1, spec.channels))
        self.register_buffer("recurrent_state", torch.zeros(1, spec.value_heads, spec.key_dim, spec.value_dim))

    def forward(self, x: Tensor, start: int, kept: Tensor, turn: list[Tensor]) -> Tensor:
        spec, count = self.spec, x.shape[0]
        raw, gate, b, a = self.in_proj(x).split(
            [spec.channels, spec.values, spec.value_heads, spec.value_heads], dim=-1)
        pairs, value = self._convolve(raw, kept).split([2 * spec.keys, spec.values], dim=-1)
        pairs = _heads_first(_unit(pairs.view(count, 2 * spec.key_heads, spec.key_dim)))
        query, key = (self._spread(part) for part in pairs.chunk(2, dim=1))
        decay = torch.exp(self.decay * functional.softplus(a + self.dt_bias))
        found, after = torch.ops.llama.gated_delta_rule(
            query * spec.key_dim ** -0.5, key, _heads_first(value.view(count, spec.value_heads, spec.value_dim)),
            _heads_first(decay), _heads_first(torch.sigmoid(b)), self.recurrent_state * kept)
        self.recurrent_state.copy_(after)
        mixed = self.norm(found.squeeze(0).transpose(0, 1))
        mixed = mixed * functional.silu(gate.view(count, spec.value_heads, spec.value_dim))
        output: Tensor = self.out_proj(mixed.reshape(count, spec.values))
        return output

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


def _unit(x: Tensor) -> Tensor:
    """x [..., D], of length 1."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + UNIT_EPS)


def _heads_first(x: Tensor) -> Tensor:
    """[T, heads, ...] -> [1, heads, T, ...]."""
    return x.transpose(0, 1).unsqueeze(0).contiguous()


def _rotate(x: Tensor, turn: list[Tensor]) -> Tensor:
    """x [T, heads, D]; cos, sin [T, 1, rotary_dim / 2]: pairs are half of the leading rotary_dim apart."""
    cos, sin = turn
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half:2 * half], x[..., 2 * half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def _rotary_table(spec: RopeSpec, max_context: int) -> tuple[Tensor, Tensor]:
    """cos, sin [places, rotary_dim / 2] of texts, whose positions are the same on all axes."""
    found = rope(torch.arange(max_context).expand(3, -1), spec)
    half = spec.rotary_dim // 2
    return found.cos[:, :half].contiguous(), found.sin[:, :half].contiguous()


def _plain(weight: Weight | Block) -> Tensor:
    assert isinstance(weight, Tensor), "weights are read as plain numbers"
    return weight
