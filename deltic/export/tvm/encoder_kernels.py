"""The steps of a BERT encoder as TIR for a CPU, over a ragged batch: n tokens of several sequences, one after another.
Matrix products are those of `kernels.linear`; everything is computed in float32."""

# mypy: ignore-errors
from __future__ import annotations

from functools import cache

from tvm.script import tirx as T

from deltic.export.tvm.kernels import lanes_of


@cache
def embeddings(hidden: int, vocabulary: int, positions: int, kinds: int, dtype: str):
    """ids, places, types [n] int32 and the three tables -> the sum of word and type [n, hidden], and the position's
    embedding [n, hidden]."""
    @T.prim_func(s_tir=True, private=True)
    def rows(ids_handle: T.handle, places_handle: T.handle, types_handle: T.handle,
             words: T.Buffer((vocabulary, hidden), dtype), place_table: T.Buffer((positions, hidden), "float32"),
             type_table: T.Buffer((kinds, hidden), "float32"), y_handle: T.handle, p_handle: T.handle):
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        n = T.int64()
        ids = T.match_buffer(ids_handle, (n,), "int32")
        places = T.match_buffer(places_handle, (n,), "int32")
        types = T.match_buffer(types_handle, (n,), "int32")
        y = T.match_buffer(y_handle, (n, hidden), "float32")
        p = T.match_buffer(p_handle, (n, hidden), "float32")
        for t, i in T.grid(n, hidden):
            with T.sblock("number"):
                y[t, i] = T.cast(words[ids[t], i], "float32") + type_table[types[t], i]
                p[t, i] = place_table[places[t], i]
    return rows


@cache
def add_layer_norm(hidden: int, eps: float, width: int):
    """residual [n, hidden], delta [n, width >= hidden], bias, scale, shift [hidden] -> the layer norm of
    residual + delta + bias [n, hidden]."""
    lanes = lanes_of(hidden)

    @T.prim_func(s_tir=True, private=True)
    def norm(r_handle: T.handle, d_handle: T.handle, bias: T.Buffer((hidden,), "float32"),
             scale: T.Buffer((hidden,), "float32"), shift: T.Buffer((hidden,), "float32"), y_handle: T.handle):
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        n = T.int64()
        residual = T.match_buffer(r_handle, (n, hidden), "float32")
        delta = T.match_buffer(d_handle, (n, width), "float32")
        y = T.match_buffer(y_handle, (n, hidden), "float32")
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
    """x [n, width >= inner], bias [inner] -> gelu(x + bias) [n, inner], by the error function."""
    @T.prim_func(s_tir=True, private=True)
    def gelu(x_handle: T.handle, bias: T.Buffer((inner,), "float32"), y_handle: T.handle):
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        n = T.int64()
        x = T.match_buffer(x_handle, (n, width), "float32")
        y = T.match_buffer(y_handle, (n, inner), "float32")
        for t in T.parallel(n):
            for i in T.serial(inner):
                with T.sblock("number"):
                    y[t, i] = T.float32(0.5) * (x[t, i] + bias[i]) * (
                        T.float32(1) + T.erf((x[t, i] + bias[i]) * T.float32(0.5 ** 0.5)))
    return gelu


@cache
def attention(heads: int, dim: int, width: int):
    """Attention of each token over its whole sequence [n, heads * dim].

    x [n, width]: the first 3 * heads * dim columns are queries, keys and values; bias: of these columns. starts, ends
    [n] int32: the first token of each token's sequence, and the end of the sequence. The softmax is computed online:
    the kernel updates the largest score, the sum and the weighted values with each key (arXiv 1805.02867)."""
    lanes, hidden = lanes_of(dim), heads * dim

    @T.prim_func(s_tir=True, private=True)
    def attend(x_handle: T.handle, bias: T.Buffer((3 * hidden,), "float32"), starts_handle: T.handle,
               ends_handle: T.handle, y_handle: T.handle):
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        n = T.int64()
        x = T.match_buffer(x_handle, (n, width), "float32")
        starts = T.match_buffer(starts_handle, (n,), "int32")
        ends = T.match_buffer(ends_handle, (n,), "int32")
        y = T.match_buffer(y_handle, (n, hidden), "float32")
        for t in T.parallel(n):
            for h in T.serial(heads):
                with T.sblock("head"):
                    query = T.sblock_alloc_buffer((dim,), "float32", scope="local")
                    total = T.sblock_alloc_buffer((dim,), "float32", scope="local")
                    part = T.sblock_alloc_buffer((lanes,), "float32", scope="local")
                    # largest score, sum of the weights, this key's score, its weight, what the older ones shrink by
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
