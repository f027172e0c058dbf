"""A BERT encoder as a relax module, and its kernels as TIR for a CPU.

A batch is ragged: n tokens of several sequences, one after another. Everything is computed in float32.
"""

# mypy: ignore-errors
from __future__ import annotations

from functools import cache
from typing import Any

from tvm import tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op, spec
from tvm.script import tirx as T

from deltic.export.tvm.kernels import lanes_of
from deltic.export.tvm.network import PanelLinear, call

# Kernels


@cache
def embeddings(hidden: int, vocabulary: int, positions: int, kinds: int, dtype: str):
    """ids, places, types [n] int32, and three tables -> word plus type embedding [n, hidden], and position embedding
    [n, hidden]."""
    n = tirx.Var("n", "int64")

    @T.prim_func(s_tir=True, private=True)
    def rows(ids: T.Buffer((n,), "int32"), places: T.Buffer((n,), "int32"), types: T.Buffer((n,), "int32"),
             words: T.Buffer((vocabulary, hidden), dtype), place_table: T.Buffer((positions, hidden), "float32"),
             type_table: T.Buffer((kinds, hidden), "float32"), y: T.Buffer((n, hidden), "float32"),
             p: T.Buffer((n, hidden), "float32")):
        for t, i in T.grid(n, hidden):
            with T.sblock("number"):
                y[t, i] = T.cast(words[ids[t], i], "float32") + type_table[types[t], i]
                p[t, i] = place_table[places[t], i]
    return rows


@cache
def add_layer_norm(hidden: int, eps: float, width: int):
    """residual [n, hidden], delta [n, width >= hidden], bias, scale, shift [hidden] -> layer norm of
    residual + delta + bias [n, hidden]."""
    lanes = lanes_of(hidden)
    n = tirx.Var("n", "int64")

    @T.prim_func(s_tir=True, private=True)
    def norm(residual: T.Buffer((n, hidden), "float32"), delta: T.Buffer((n, width), "float32"),
             bias: T.Buffer((hidden,), "float32"), scale: T.Buffer((hidden,), "float32"),
             shift: T.Buffer((hidden,), "float32"), y: T.Buffer((n, hidden), "float32")):
        for t in T.parallel(n):
            with T.sblock("token"):
                part = T.sblock_alloc_buffer((lanes,), "float32", scope="local")
                moments = T.sblock_alloc_buffer((2,), "float32", scope="local")
                moments[0] = T.float32(0)
                moments[1] = T.float32(0)
                for lane in T.vectorized(lanes):
                    part[lane] = T.float32(0)
                for i in T.serial(hidden // lanes):
                    for lane in T.vectorized(lanes):
                        y[t, i * lanes + lane] = (residual[t, i * lanes + lane] + delta[t, i * lanes + lane]
                                                  + bias[i * lanes + lane])
                    for lane in T.vectorized(lanes):
                        part[lane] = part[lane] + y[t, i * lanes + lane]
                for lane in T.serial(lanes):
                    moments[0] = moments[0] + part[lane]
                moments[0] = moments[0] / T.float32(hidden)
                for lane in T.vectorized(lanes):
                    part[lane] = T.float32(0)
                for i in T.serial(hidden // lanes):
                    for lane in T.vectorized(lanes):
                        part[lane] = part[lane] + (y[t, i * lanes + lane] - moments[0]) * (
                            y[t, i * lanes + lane] - moments[0])
                for lane in T.serial(lanes):
                    moments[1] = moments[1] + part[lane]
                moments[1] = T.float32(1) / T.sqrt(moments[1] / T.float32(hidden) + T.float32(eps))
                for i in T.serial(hidden // lanes):
                    for lane in T.vectorized(lanes):
                        y[t, i * lanes + lane] = ((y[t, i * lanes + lane] - moments[0]) * moments[1]
                                                  * scale[i * lanes + lane] + shift[i * lanes + lane])
    return norm


@cache
def bias_gelu(inner: int, width: int):
    """x [n, width >= inner], bias [inner] -> gelu(x + bias) [n, inner], with the error function."""
    n = tirx.Var("n", "int64")

    @T.prim_func(s_tir=True, private=True)
    def gelu(x: T.Buffer((n, width), "float32"), bias: T.Buffer((inner,), "float32"),
             y: T.Buffer((n, inner), "float32")):
        for t in T.parallel(n):
            for i in T.serial(inner):
                with T.sblock("number"):
                    y[t, i] = T.float32(0.5) * (x[t, i] + bias[i]) * (
                        T.float32(1) + T.erf((x[t, i] + bias[i]) * T.float32(0.5 ** 0.5)))
    return gelu


@cache
def attention(heads: int, dim: int, width: int):
    """Bidirectional attention of each token over its sequence [n, heads * dim].

    x [n, width]: queries, keys and values in the first 3 * heads * dim columns; bias: of these columns. starts, ends
    [n] int32: bounds of each token's sequence. The softmax is online: each key updates the largest score, the sum and
    the weighted values (arXiv 1805.02867)."""
    lanes, hidden = lanes_of(dim), heads * dim
    n = tirx.Var("n", "int64")

    @T.prim_func(s_tir=True, private=True)
    def attend(x: T.Buffer((n, width), "float32"), bias: T.Buffer((3 * hidden,), "float32"),
               starts: T.Buffer((n,), "int32"), ends: T.Buffer((n,), "int32"), y: T.Buffer((n, hidden), "float32")):
        for t in T.parallel(n):
            for h in T.serial(heads):
                with T.sblock("head"):
                    query = T.sblock_alloc_buffer((dim,), "float32", scope="local")
                    total = T.sblock_alloc_buffer((dim,), "float32", scope="local")
                    part = T.sblock_alloc_buffer((lanes,), "float32", scope="local")
                    # largest score, sum of weights, this key's score, its weight, scale of the earlier weights
                    state = T.sblock_alloc_buffer((5,), "float32", scope="local")
                    state[0] = T.float32(-3e38)
                    state[1] = T.float32(0)
                    for d in T.serial(dim):
                        query[d] = (x[t, h * dim + d] + bias[h * dim + d]) * T.float32(dim ** -0.5)
                        total[d] = T.float32(0)
                    for j in T.serial(ends[t] - starts[t]):
                        for lane in T.vectorized(lanes):
                            part[lane] = T.float32(0)
                        for d in T.serial(dim // lanes):
                            for lane in T.vectorized(lanes):
                                part[lane] = part[lane] + query[d * lanes + lane] * (
                                    x[starts[t] + j, hidden + h * dim + d * lanes + lane]
                                    + bias[hidden + h * dim + d * lanes + lane])
                        state[2] = T.float32(0)
                        for lane in T.serial(lanes):
                            state[2] = state[2] + part[lane]
                        state[4] = T.exp(state[0] - T.max(state[0], state[2]))
                        state[0] = T.max(state[0], state[2])
                        state[3] = T.exp(state[2] - state[0])
                        state[1] = state[1] * state[4] + state[3]
                        for d in T.serial(dim // lanes):
                            for lane in T.vectorized(lanes):
                                total[d * lanes + lane] = total[d * lanes + lane] * state[4] + state[3] * (
                                    x[starts[t] + j, 2 * hidden + h * dim + d * lanes + lane])
                    for d in T.serial(dim):
                        y[t, h * dim + d] = total[d] / state[1] + bias[2 * hidden + h * dim + d]
    return attend


# The network


class ResidualLayerNorm(nn.Module):
    """Layer norm of a residual sum, including the bias of the product before it."""

    def __init__(self, config: Any) -> None:
        self.hidden, self.eps = config.hidden_size, config.eps
        self.scale = nn.Parameter((config.hidden_size,), "float32")
        self.shift = nn.Parameter((config.hidden_size,), "float32")

    def forward(self, residual: nn.Tensor, delta: nn.Tensor, bias: nn.Tensor) -> nn.Tensor:
        return call(add_layer_norm, (self.hidden, self.eps, delta.shape[1]), residual, delta, bias, self.scale,
                    self.shift)


class EncoderBlock(nn.Module):
    def __init__(self, config: Any, dtype: str) -> None:
        hidden = config.hidden_size
        self.heads, self.inner = config.heads, config.intermediate_size
        self.dim = hidden // config.heads
        self.qkv, self.out = PanelLinear(hidden, 3 * hidden, dtype), PanelLinear(hidden, hidden, dtype)
        self.up, self.down = PanelLinear(hidden, self.inner, dtype), PanelLinear(self.inner, hidden, dtype)
        self.qkv_bias = nn.Parameter((3 * hidden,), "float32")
        self.out_bias = nn.Parameter((hidden,), "float32")
        self.up_bias = nn.Parameter((self.inner,), "float32")
        self.down_bias = nn.Parameter((hidden,), "float32")
        self.attention_norm, self.output_norm = ResidualLayerNorm(config), ResidualLayerNorm(config)

    def forward(self, x: nn.Tensor, starts: nn.Tensor, ends: nn.Tensor) -> nn.Tensor:
        mixed = call(attention, (self.heads, self.dim, self.qkv.width), self.qkv(x), self.qkv_bias, starts, ends)
        middle = self.attention_norm(x, self.out(mixed), self.out_bias)
        wide = call(bias_gelu, (self.inner, self.up.width), self.up(middle), self.up_bias)
        return self.output_norm(middle, self.down(wide), self.down_bias)


class EncoderNetwork(nn.Module):
    """From tokens to the last layer's states. config: an `embeddings.bert_config.EncoderConfig`."""

    def __init__(self, config: Any, dtype: str) -> None:
        self.config, self.dtype, hidden = config, dtype, config.hidden_size
        self.words = nn.Parameter((config.vocab_size, hidden), dtype)
        self.places = nn.Parameter((config.positions, hidden), "float32")
        self.kinds = nn.Parameter((config.token_types, hidden), "float32")
        self.norm = ResidualLayerNorm(config)
        self.layers = nn.ModuleList([EncoderBlock(config, dtype) for _ in range(config.layers)])

    def hidden(self, ids: nn.Tensor, places: nn.Tensor, kinds: nn.Tensor, starts: nn.Tensor, ends: nn.Tensor
               ) -> nn.Tensor:
        """ids, places, kinds, starts, ends [n] int32 -> [n, hidden]. starts, ends: bounds of each token's sequence."""
        config = self.config
        sizes = (config.hidden_size, config.vocab_size, config.positions, config.token_types, self.dtype)
        x, delta = call(embeddings, sizes, ids, places, kinds, self.words, self.places, self.kinds)
        x = self.norm(x, delta, op.zeros((config.hidden_size,), "float32"))
        for layer in self.layers:
            x = layer(x, starts, ends)
        return x


def specification(network: EncoderNetwork) -> dict[str, Any]:
    """Returns the library's function and its arguments, for `export_tvm`."""
    numbers = {name: spec.Tensor(["n"], "int32") for name in ("ids", "places", "kinds", "starts", "ends")}
    return {"hidden": {**numbers, "$": {"param_mode": "packed", "effect_mode": "none"}}}
