"""The CPU kernels of a language model's step, in TIR. All compute in float32, whatever the weights' dtype.

n: number of tokens of a step, known at run time. Matrices are stored in panels of `LANES` outputs, so that the sums of
a panel are one vector; see `artifact.panels`.
"""

# mypy: ignore-errors
from __future__ import annotations

from functools import cache
from math import gcd

from tvm import tirx
from tvm.script import tirx as T

from deltic.export.tvm.artifact import LANES

_ROWS = 8
"""Number of tokens whose sums stay in registers while a panel is read."""
_SPLIT = 4
"""Number of independent partial sums in a single token's product; they hide the latency of additions."""


def lanes_of(size: int) -> int:
    """Returns the largest number of lanes, up to `LANES`, that divides `size`."""
    return gcd(size, LANES)


@cache
def linear(inputs: int, panels: int, dtype: str):
    """x [n, inputs], w [panels, inputs, LANES] -> y [n, panels * LANES]."""
    n = tirx.Var("n", "int64")

    @T.prim_func(s_tir=True, private=True)
    def matrix(x: T.Buffer((n, inputs), "float32"), w: T.Buffer((panels, inputs, LANES), dtype),
               y: T.Buffer((n, panels * LANES), "float32")):
        for panel in T.parallel(panels):
            for tile in T.serial(T.ceildiv(n, T.int64(_ROWS))):
                with T.sblock("tile"):
                    total = T.sblock_alloc_buffer((_ROWS, LANES), "float32", scope="local")
                    for r in T.unroll(_ROWS):
                        for lane in T.vectorized(LANES):
                            total[r, lane] = T.float32(0)
                    for i in T.serial(inputs):
                        for r in T.unroll(_ROWS):
                            for lane in T.vectorized(LANES):
                                total[r, lane] = total[r, lane] + x[T.min(tile * _ROWS + r, n - 1), i] * T.cast(
                                    w[panel, i, lane], "float32")
                    for r in T.unroll(_ROWS):
                        if tile * _ROWS + r < n:
                            for lane in T.vectorized(LANES):
                                y[tile * _ROWS + r, panel * LANES + lane] = total[r, lane]
    return matrix


@cache
def linear_one(inputs: int, panels: int, dtype: str):
    """Computes `linear` for one token, with `_SPLIT` partial sums."""
    split = gcd(inputs, _SPLIT)

    @T.prim_func(s_tir=True, private=True)
    def vector(x: T.Buffer((1, inputs), "float32"), w: T.Buffer((panels, inputs, LANES), dtype),
               y: T.Buffer((1, panels * LANES), "float32")):
        for panel in T.parallel(panels):
            with T.sblock("panel"):
                total = T.sblock_alloc_buffer((split, LANES), "float32", scope="local")
                for r in T.unroll(split):
                    for lane in T.vectorized(LANES):
                        total[r, lane] = T.float32(0)
                for i in T.serial(inputs // split):
                    for r in T.unroll(split):
                        for lane in T.vectorized(LANES):
                            total[r, lane] = total[r, lane] + x[0, i * split + r] * T.cast(
                                w[panel, i * split + r, lane], "float32")
                for r in T.unroll(1, split):
                    for lane in T.vectorized(LANES):
                        total[0, lane] = total[0, lane] + total[r, lane]
                for lane in T.vectorized(LANES):
                    y[0, panel * LANES + lane] = total[0, lane]
    return vector


@cache
def embed(hidden: int, panels: int, dtype: str):
    """ids [n] int32, w [panels, hidden, LANES] -> y [n, hidden]."""
    n = tirx.Var("n", "int64")

    @T.prim_func(s_tir=True, private=True)
    def rows(ids: T.Buffer((n,), "int32"), w: T.Buffer((panels, hidden, LANES), dtype),
             y: T.Buffer((n, hidden), "float32")):
        for t, i in T.grid(n, hidden):
            with T.sblock("row"):
                y[t, i] = T.cast(w[ids[t] // LANES, i, ids[t] % LANES], "float32")
    return rows


@cache
def add_norm(hidden: int, eps: float, width: int):
    """residual [n, hidden], delta [n, width >= hidden], scale [hidden] -> their sum [n, hidden] and its RMS norm."""
    lanes = lanes_of(hidden)
    n = tirx.Var("n", "int64")

    @T.prim_func(s_tir=True, private=True)
    def norm(residual: T.Buffer((n, hidden), "float32"), delta: T.Buffer((n, width), "float32"),
             scale: T.Buffer((hidden,), "float32"), total: T.Buffer((n, hidden), "float32"),
             y: T.Buffer((n, hidden), "float32")):
        for t in T.serial(n):
            with T.sblock("token"):
                squares = T.sblock_alloc_buffer((lanes,), "float32", scope="local")
                factor = T.sblock_alloc_buffer((1,), "float32", scope="local")
                for lane in T.vectorized(lanes):
                    squares[lane] = T.float32(0)
                for i in T.serial(hidden // lanes):
                    for lane in T.vectorized(lanes):
                        total[t, i * lanes + lane] = residual[t, i * lanes + lane] + delta[t, i * lanes + lane]
                    for lane in T.vectorized(lanes):
                        squares[lane] = squares[lane] + total[t, i * lanes + lane] * total[t, i * lanes + lane]
                factor[0] = T.float32(0)
                for lane in T.serial(lanes):
                    factor[0] = factor[0] + squares[lane]
                factor[0] = T.float32(1) / T.sqrt(factor[0] / T.float32(hidden) + T.float32(eps))
                for i in T.serial(hidden // lanes):
                    for lane in T.vectorized(lanes):
                        y[t, i * lanes + lane] = (total[t, i * lanes + lane] * factor[0]) * scale[i * lanes + lane]
    return norm


@cache
def swiglu(inner: int, width: int):
    """x [n, width]: gate [inner], up [inner], padding -> silu(gate) * up [n, inner]."""
    n = tirx.Var("n", "int64")

    @T.prim_func(s_tir=True, private=True)
    def product(x: T.Buffer((n, width), "float32"), y: T.Buffer((n, inner), "float32")):
        for t in T.serial(n):
            for i in T.serial(inner):
                with T.sblock("number"):
                    y[t, i] = x[t, i] / (T.float32(1) + T.exp(T.float32(0) - x[t, i])) * x[t, inner + i]
    return product


@cache
def short_conv(channels: int, kernel: int, width: int):
    """Causal convolution and silu.

    x [n, width]: raw inputs in the first columns; before [1, kernel - 1, channels]: the last inputs of earlier tokens;
    taps [kernel, channels], the last one for the token itself -> y [n, channels], and `before` of the next step."""
    lanes = lanes_of(channels)
    past = kernel - 1
    n = tirx.Var("n", "int64")

    @T.prim_func(s_tir=True, private=True)
    def conv(x: T.Buffer((n, width), "float32"), before: T.Buffer((1, past, channels), "float32"),
             taps: T.Buffer((kernel, channels), "float32"), y: T.Buffer((n, channels), "float32"),
             after: T.Buffer((1, past, channels), "float32")):
        for block in T.parallel(channels // lanes):
            for t in T.serial(n):
                with T.sblock("token"):
                    total = T.sblock_alloc_buffer((lanes,), "float32", scope="local")
                    for lane in T.vectorized(lanes):
                        total[lane] = T.float32(0)
                    for tap in T.unroll(kernel):
                        if t + tap < past:
                            for lane in T.vectorized(lanes):
                                total[lane] = total[lane] + taps[tap, block * lanes + lane] * before[
                                    0, t + tap, block * lanes + lane]
                        else:
                            for lane in T.vectorized(lanes):
                                total[lane] = total[lane] + taps[tap, block * lanes + lane] * x[
                                    t + tap - past, block * lanes + lane]
                    for lane in T.vectorized(lanes):
                        y[t, block * lanes + lane] = total[lane] / (T.float32(1) + T.exp(T.float32(0) - total[lane]))
            for place in T.serial(past):
                with T.sblock("keep"):
                    if n + place < past:
                        for lane in T.vectorized(lanes):
                            after[0, place, block * lanes + lane] = before[0, n + place, block * lanes + lane]
                    else:
                        for lane in T.vectorized(lanes):
                            after[0, place, block * lanes + lane] = x[n + place - past, block * lanes + lane]
    return conv


@cache
def delta_gates(value_heads: int, start: int, width: int):
    """x [n, width]: b, a [value_heads] from column `start` on; decay, dt_bias [value_heads] -> the state's decay and
    beta [n, 2, value_heads]."""
    n = tirx.Var("n", "int64")

    @T.prim_func(s_tir=True, private=True)
    def gates(x: T.Buffer((n, width), "float32"), decay: T.Buffer((value_heads,), "float32"),
              dt_bias: T.Buffer((value_heads,), "float32"), y: T.Buffer((n, 2, value_heads), "float32")):
        for t, h in T.grid(n, value_heads):
            with T.sblock("head"):
                sum = T.sblock_alloc_buffer((1,), "float32", scope="local")
                sum[0] = x[t, start + value_heads + h] + dt_bias[h]
                sum[0] = T.max(sum[0], T.float32(0)) + T.log1p(T.exp(T.float32(0) - T.abs(sum[0])))  # softplus
                y[t, 0, h] = T.exp(decay[h] * sum[0])
                y[t, 1, h] = T.float32(1) / (T.float32(1) + T.exp(T.float32(0) - x[t, start + h]))
    return gates


@cache
def delta_rule(key_heads: int, value_heads: int, key_dim: int, value_dim: int):
    """The gated delta rule (arXiv 2412.06464, equation 10).

    mixed [n, C]: queries, keys, values after the convolution; gates [n, 2, value_heads]; before [1, value_heads,
    key_dim, value_dim]: the state -> y [n, value_heads * value_dim], and the state after the step."""
    lanes = lanes_of(value_dim)
    blocks, share, keys = value_dim // lanes, value_heads // key_heads, key_heads * key_dim
    channels, values = 2 * keys + value_heads * value_dim, value_heads * value_dim
    n = tirx.Var("n", "int64")

    @T.prim_func(s_tir=True, private=True)
    def rule(mixed: T.Buffer((n, channels), "float32"), gates: T.Buffer((n, 2, value_heads), "float32"),
             before: T.Buffer((1, value_heads, key_dim, value_dim), "float32"), y: T.Buffer((n, values), "float32"),
             after: T.Buffer((1, value_heads, key_dim, value_dim), "float32")):
        for h in T.parallel(value_heads):
            for d, v in T.grid(key_dim, blocks):
                with T.sblock("load"):
                    for lane in T.vectorized(lanes):
                        after[0, h, d, v * lanes + lane] = before[0, h, d, v * lanes + lane]
            for t in T.serial(n):
                with T.sblock("token"):
                    # factors that normalise query and key
                    unit = T.sblock_alloc_buffer((2,), "float32", scope="local")
                    update = T.sblock_alloc_buffer((value_dim,), "float32", scope="local")
                    output = T.sblock_alloc_buffer((value_dim,), "float32", scope="local")
                    for part in T.unroll(2):
                        unit[part] = T.float32(0)
                        for d in T.serial(key_dim):
                            unit[part] = unit[part] + mixed[t, part * keys + h // share * key_dim + d] * mixed[
                                t, part * keys + h // share * key_dim + d]
                        unit[part] = T.float32(1) / T.sqrt(unit[part] + T.float32(1e-6))
                    for v in T.serial(blocks):
                        for lane in T.vectorized(lanes):
                            update[v * lanes + lane] = T.float32(0)
                            output[v * lanes + lane] = T.float32(0)
                    for d, v in T.grid(key_dim, blocks):
                        for lane in T.vectorized(lanes):
                            after[0, h, d, v * lanes + lane] = after[0, h, d, v * lanes + lane] * gates[t, 0, h]
                        for lane in T.vectorized(lanes):
                            update[v * lanes + lane] = update[v * lanes + lane] + after[
                                0, h, d, v * lanes + lane] * (mixed[t, keys + h // share * key_dim + d] * unit[1])
                    for v in T.serial(blocks):
                        for lane in T.vectorized(lanes):
                            update[v * lanes + lane] = (mixed[t, 2 * keys + h * value_dim + v * lanes + lane]
                                                        - update[v * lanes + lane]) * gates[t, 1, h]
                    for d, v in T.grid(key_dim, blocks):
                        for lane in T.vectorized(lanes):
                            after[0, h, d, v * lanes + lane] = after[0, h, d, v * lanes + lane] + (
                                mixed[t, keys + h // share * key_dim + d] * unit[1]) * update[v * lanes + lane]
                        for lane in T.vectorized(lanes):
                            output[v * lanes + lane] = output[v * lanes + lane] + after[0, h, d, v * lanes + lane] * (
                                mixed[t, h // share * key_dim + d] * (unit[0] * T.float32(key_dim ** -0.5)))
                    for v in T.serial(value_dim):
                        y[t, h * value_dim + v] = output[v]
    return rule


@cache
def gated_norm(value_heads: int, value_dim: int, start: int, eps: float, width: int):
    """y [n, value_heads * value_dim], scale [value_dim], x [n, width]: gates from column `start` on -> RMS norm of each
    head of y, times silu of its gates."""
    n = tirx.Var("n", "int64")

    @T.prim_func(s_tir=True, private=True)
    def norm(y: T.Buffer((n, value_heads * value_dim), "float32"), scale: T.Buffer((value_dim,), "float32"),
             x: T.Buffer((n, width), "float32"), o: T.Buffer((n, value_heads * value_dim), "float32")):
        for t, h in T.grid(n, value_heads):
            with T.sblock("head"):
                factor = T.sblock_alloc_buffer((1,), "float32", scope="local")
                factor[0] = T.float32(0)
                for v in T.serial(value_dim):
                    factor[0] = factor[0] + y[t, h * value_dim + v] * y[t, h * value_dim + v]
                factor[0] = T.float32(1) / T.sqrt(factor[0] / T.float32(value_dim) + T.float32(eps))
                for v in T.serial(value_dim):
                    o[t, h * value_dim + v] = ((y[t, h * value_dim + v] * factor[0]) * scale[v]) * (
                        x[t, start + h * value_dim + v]
                        / (T.float32(1) + T.exp(T.float32(0) - x[t, start + h * value_dim + v])))
    return norm


@cache
def heads(query_heads: int, kv_heads: int, dim: int, rotary: int, gated: bool, eps: float, width: int):
    """x [n, width]: queries (each followed by its gate, if gated), keys, values; q_norm, k_norm [dim]; positions [n]
    int32; frequencies [rotary / 2] -> queries and keys, normed and rotated, and values [n, query_heads + 2 kv_heads,
    dim]."""
    step = 2 * dim if gated else dim
    queries, half, total = query_heads * step, rotary // 2, query_heads + 2 * kv_heads
    n = tirx.Var("n", "int64")

    @T.prim_func(s_tir=True, private=True)
    def split(x: T.Buffer((n, width), "float32"), q_norm: T.Buffer((dim,), "float32"),
              k_norm: T.Buffer((dim,), "float32"), positions: T.Buffer((n,), "int32"),
              frequencies: T.Buffer((half,), "float32"), y: T.Buffer((n, total, dim), "float32")):
        for t, h in T.grid(n, query_heads + kv_heads):
            with T.sblock("head"):
                factor = T.sblock_alloc_buffer((1,), "float32", scope="local")
                start = T.sblock_alloc_buffer((1,), "int64", scope="local")
                normed = T.sblock_alloc_buffer((dim,), "float32", scope="local")
                start[0] = T.if_then_else(h < query_heads, h * step, queries + (h - query_heads) * dim)
                factor[0] = T.float32(0)
                for d in T.serial(dim):
                    factor[0] = factor[0] + x[t, start[0] + d] * x[t, start[0] + d]
                factor[0] = T.float32(1) / T.sqrt(factor[0] / T.float32(dim) + T.float32(eps))
                for d in T.serial(dim):
                    normed[d] = (x[t, start[0] + d] * factor[0]) * T.if_then_else(h < query_heads, q_norm[d], k_norm[d])
                for d in T.serial(half):
                    y[t, h, d] = (normed[d] * T.cos(T.cast(positions[t], "float32") * frequencies[d])
                                  - normed[half + d] * T.sin(T.cast(positions[t], "float32") * frequencies[d]))
                    y[t, h, half + d] = (normed[half + d] * T.cos(T.cast(positions[t], "float32") * frequencies[d])
                                         + normed[d] * T.sin(T.cast(positions[t], "float32") * frequencies[d]))
                for d in T.serial(dim - rotary):
                    y[t, h, rotary + d] = normed[rotary + d]
        for t, h, d in T.grid(n, kv_heads, dim):
            with T.sblock("value"):
                y[t, query_heads + kv_heads + h, d] = x[t, queries + kv_heads * dim + h * dim + d]
    return split


@cache
def output_gate(query_heads: int, dim: int, width: int):
    """y [n, query_heads, dim], x [n, width] as for `heads` -> y times sigmoid of its gate [n, query_heads * dim]."""
    n = tirx.Var("n", "int64")

    @T.prim_func(s_tir=True, private=True)
    def gated(y: T.Buffer((n, query_heads, dim), "float32"), x: T.Buffer((n, width), "float32"),
              o: T.Buffer((n, query_heads * dim), "float32")):
        for t, h, d in T.grid(n, query_heads, dim):
            with T.sblock("number"):
                o[t, h * dim + d] = y[t, h, d] / (T.float32(1) + T.exp(T.float32(0) - x[t, h * 2 * dim + dim + d]))
    return gated


@cache
def row(hidden: int):
    """x [n, hidden], position [1] int32 -> this row of x [1, hidden]."""
    n = tirx.Var("n", "int64")

    @T.prim_func(s_tir=True, private=True)
    def taken(x: T.Buffer((n, hidden), "float32"), position: T.Buffer((1,), "int32"),
              y: T.Buffer((1, hidden), "float32")):
        for i in T.serial(hidden):
            with T.sblock("number"):
                y[0, i] = x[position[0], i]
    return taken


@cache
def state_copy(shape: tuple[int, ...], stores: bool):
    """Copies states between the storage [sequences, history, ...] and data [b, ...] of the sequences in slots [b].

    places [b]: history index of the current states, which are read; with `stores` the next index is written."""
    sequences, history, b = (tirx.Var(name, "int64") for name in ("sequences", "history", "b"))

    @T.prim_func(s_tir=True)
    def copied(storage: T.Buffer((sequences, history, *shape), "float32"), slots: T.Buffer((b,), "int32"),
               places: T.Buffer((b,), "int32"), data: T.Buffer((b, *shape), "float32")):
        for i in T.serial(b):
            for s in T.grid(*shape):
                with T.sblock("copy"):
                    if stores:
                        T.buffer_store(storage, T.BufferLoad(data, [i, *s]),
                                       [slots[i], (places[i] + 1) % T.cast(history, "int32"), *s])
                    else:
                        T.buffer_store(data, T.BufferLoad(storage, [slots[i], places[i], *s]), [i, *s])
    return copied
