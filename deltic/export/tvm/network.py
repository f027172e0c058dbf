"""Language models and encoders as relax modules. `relax.frontend.nn` turns them into the functions of a library."""

# mypy: ignore-errors
from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from tvm import relax as rx
from tvm import tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op, spec
from tvm.relax.frontend.nn.llm.kv_cache import PagedKVCache, RopeMode, TIRPagedKVCache
from tvm.script import tirx as T
from tvm.target import Target

from deltic.config import LinearConfig, ModelConfig
from deltic.export.tvm import gpu_kernels, kernels
from deltic.export.tvm.artifact import LANES
from deltic.export.tvm.kernels import lanes_of

STATE, CONV = 0, 1
"""Kinds of a recurrent layer's states."""


def on_gpu() -> bool:
    return Target.current().kind.name != "llvm"


def scheduled(kernel: Any) -> Any:
    """Returns a kernel for the current target, with an attribute that prevents TVM from scheduling it again."""
    kernel = kernel.with_attr("tirx.is_scheduled", True)
    return gpu_kernels.spread(kernel) if on_gpu() else kernel


def call(kernel: Callable[..., Any], constants: tuple[Any, ...], *arguments: nn.Tensor) -> Any:
    """Calls the kernel that `kernel(*constants)` builds, or its GPU variant.

    Returns its float32 outputs: the kernel's parameters after the arguments. The first argument has n rows.
    """
    name = kernel.__name__
    if on_gpu():
        kernel = getattr(gpu_kernels, name, kernel)
    function = kernel(*constants)
    n, outputs = arguments[0].shape[0], []
    for parameter in function.params[len(arguments):]:
        shape = [int(size) if isinstance(size, tirx.IntImm) else n for size in parameter.shape]
        outputs.append(nn.Tensor.placeholder(shape, "float32", name))
    function = scheduled(function.with_attr("tirx.noalias", True))
    return op.tensor_ir_op(function, f"{name}_kernel", [*arguments], outputs[0] if len(outputs) == 1 else outputs)


class StateStore(nn.Object):
    """The recurrent layers' states of all sequences."""

    def get(self, layer: int, kind: int, shape: tuple[int, ...]) -> nn.Tensor:
        """Returns a state of the current sequence [1, ...]."""
        state = rx.call_dps_packed("vm.builtin.rnn_state_get",
                                   [self._expr, rx.prim_value(layer), rx.prim_value(kind)],
                                   out_ty=rx.TensorType((1, *shape), "float32"))
        return nn.Tensor(_expr=rx.BlockBuilder.current().emit(state))

    def set(self, layer: int, kind: int, state: nn.Tensor) -> StateStore:
        """Returns the store with this state after the step."""
        store = rx.call_pure_packed("vm.builtin.rnn_state_set", self._expr, rx.prim_value(layer), rx.prim_value(kind),
                                    state._expr, ty_args=rx.AnyType())
        return StateStore(_expr=store, _name="rnn_state")


class PanelLinear(nn.Module):
    """Product with a matrix [outputs, inputs] stored in panels. The result has the width of all panels."""

    def __init__(self, inputs: int, outputs: int, dtype: str) -> None:
        self.inputs, self.panels, self.dtype = inputs, -(-outputs // LANES), dtype
        self.weight = nn.Parameter((self.panels, inputs, LANES), dtype)

    @property
    def width(self) -> int:
        return self.panels * LANES

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        """x [n, inputs] -> [n, width]."""
        single = isinstance(x.shape[0], int) and x.shape[0] == 1 and not on_gpu()
        kernel = kernels.linear_one if single else kernels.linear
        return call(kernel, (self.inputs, self.panels, self.dtype), x, self.weight)


class TvmRecurrent(nn.Module):
    """The mixer of a Gated DeltaNet layer. store: the layer's index in the `StateStore`."""

    def __init__(self, config: ModelConfig, linear: LinearConfig, store: int, dtype: str) -> None:
        self.shape, self.store, self.eps = linear, store, config.rms_norm_eps
        rows = linear.conv_dim + linear.value_dim + 2 * linear.num_value_heads
        self.in_proj = PanelLinear(config.hidden_size, rows, dtype)
        self.out_proj = PanelLinear(linear.value_dim, config.hidden_size, dtype)
        self.conv = nn.Parameter((linear.conv_kernel, linear.conv_dim), "float32")
        self.decay = nn.Parameter((linear.num_value_heads,), "float32")
        self.dt_bias = nn.Parameter((linear.num_value_heads,), "float32")
        self.norm = nn.Parameter((linear.value_head_dim,), "float32")

    def forward(self, x: nn.Tensor, states: StateStore) -> tuple[nn.Tensor, StateStore]:
        shape, heads, width = self.shape, self.shape.num_value_heads, self.in_proj.width
        conv = states.get(self.store, CONV, (shape.conv_kernel - 1, shape.conv_dim))
        state = states.get(self.store, STATE, (heads, shape.key_head_dim, shape.value_head_dim))
        projected = self.in_proj(x)
        mixed, conv = call(kernels.short_conv, (shape.conv_dim, shape.conv_kernel, width), projected, conv, self.conv)
        gates = call(kernels.delta_gates, (heads, shape.conv_dim + shape.value_dim, width), projected, self.decay,
                     self.dt_bias)
        out, state = call(kernels.delta_rule, (shape.num_key_heads, heads, shape.key_head_dim, shape.value_head_dim),
                          mixed, gates, state)
        out = call(kernels.gated_norm, (heads, shape.value_head_dim, shape.conv_dim, self.eps, width), out, self.norm,
                   projected)
        return self.out_proj(out), states.set(self.store, CONV, conv).set(self.store, STATE, state)


class TvmAttention(nn.Module):
    """The mixer of an attention layer. store: the layer's index in the paged KV cache."""

    def __init__(self, config: ModelConfig, store: int, dtype: str) -> None:
        self.config, self.store, dim = config, store, config.head_dim
        query = config.num_attention_heads * dim * (2 if config.attention_output_gate else 1)
        self.qkv = PanelLinear(config.hidden_size, query + 2 * config.num_key_value_heads * dim, dtype)
        self.o_proj = PanelLinear(config.num_attention_heads * dim, config.hidden_size, dtype)
        self.q_norm = nn.Parameter((dim,), "float32")
        self.k_norm = nn.Parameter((dim,), "float32")

    def forward(self, x: nn.Tensor, cache: PagedKVCache, positions: nn.Tensor, frequencies: nn.Tensor) -> nn.Tensor:
        config, n, dim = self.config, x.shape[0], self.config.head_dim
        query_heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, self.qkv.width
        projected = self.qkv(x)
        heads = call(
            kernels.heads, (query_heads, kv_heads, dim, config.rope.rotary_dim, config.attention_output_gate,
                            config.rms_norm_eps, width),
            projected, self.q_norm, self.k_norm, positions, frequencies)
        found = cache.attention_with_fused_qkv(
            self.store, op.reshape(heads, (1, n, query_heads + 2 * kv_heads, dim)), query_heads, dim ** -0.5)
        if config.attention_output_gate:
            found = call(kernels.output_gate, (query_heads, dim, width), op.reshape(found, (n, query_heads, dim)),
                         projected)
        return self.o_proj(op.reshape(found, (n, query_heads * dim)))


class TvmBlock(nn.Module):
    def __init__(self, config: ModelConfig, kind: str, store: int, dtype: str) -> None:
        self.inner = config.intermediate_size
        self.input_norm = nn.Parameter((config.hidden_size,), "float32")
        self.post_norm = nn.Parameter((config.hidden_size,), "float32")
        if kind == "linear_attention":
            self.mixer = TvmRecurrent(config, config.linear, store, dtype)
        else:
            self.mixer = TvmAttention(config, store, dtype)
        self.gate_up = PanelLinear(config.hidden_size, 2 * config.intermediate_size, dtype)
        self.down = PanelLinear(config.intermediate_size, config.hidden_size, dtype)

    def feed_forward(self, x: nn.Tensor) -> nn.Tensor:
        return self.down(call(kernels.swiglu, (self.inner, self.gate_up.width), self.gate_up(x)))


class TvmNetwork(nn.Module):
    """A decoder with the functions that create its caches."""

    def __init__(self, config: ModelConfig, dtype: str, target: Any) -> None:
        self.config, self.target, self.dtype = config, target, dtype
        counts = {"linear_attention": 0, "full_attention": 0}
        blocks = []
        for kind in config.layer_types:
            blocks.append(TvmBlock(config, kind, counts[kind], dtype))
            counts[kind] += 1
        self.table = PanelLinear(config.hidden_size, config.vocab_size, dtype)
        self.layers = nn.ModuleList(blocks)
        self.norm = nn.Parameter((config.hidden_size,), "float32")
        self.frequencies = nn.Parameter((config.rope.rotary_dim // 2,), "float32")
        self.head = None if config.tie_word_embeddings else PanelLinear(config.hidden_size, config.vocab_size, dtype)

    def embed(self, input_ids: nn.Tensor) -> nn.Tensor:
        """input_ids [n] -> [n, hidden]."""
        return call(kernels.embed, (self.config.hidden_size, self.table.panels, self.dtype), input_ids,
                    self.table.weight)

    def create_paged_kv_cache(self, max_batch_size: Any, max_total_seq_len: Any, prefill_chunk_size: Any,
                              page_size: Any, support_sliding_window: Any) -> PagedKVCache:
        """Returns the attention layers' KV cache, in float32."""
        config, layers = self.config, len(self.config.attention_layers)
        return TIRPagedKVCache(
            "mha", max_batch_size, max_total_seq_len, prefill_chunk_size, page_size, support_sliding_window,
            layer_partition=rx.ShapeExpr([0, layers]), num_hidden_layers=layers,
            num_attention_heads=config.num_attention_heads, num_key_value_heads=config.num_key_value_heads,
            qk_head_dim=config.head_dim, v_head_dim=config.head_dim, mla_original_qk_head_dim=0,
            mla_original_v_head_dim=0, rope_mode=RopeMode.NONE, rope_scale=1, rope_theta=1, rope_scaling={},
            rope_ext_factors=rx.prim_value(0), rotary_dim=config.head_dim, enable_disaggregation=False,
            dtype="float32", target=self.target)

    def create_rnn_state(self, max_batch_size: Any, max_history: Any) -> StateStore:
        """Returns the recurrent layers' states, initialised to zero."""
        linear, builder = self.config.linear, rx.BlockBuilder.current()
        shapes = ((linear.num_value_heads, linear.key_head_dim, linear.value_head_dim),
                  (linear.conv_kernel - 1, linear.conv_dim))
        gets, sets = [], []
        for kind, shape in enumerate(shapes):
            for functions, name, stores in ((gets, f"state_get_{kind}", False), (sets, f"state_set_{kind}", True)):
                copy = scheduled(kernels.state_copy(shape, stores))
                functions.append(builder.add_func(copy.with_attr("global_symbol", name), name))
        zeros = [rx.op.zeros(shape, "float32") for shape in shapes]
        store = rx.call_pure_packed(
            "vm.builtin.rnn_state_create", rx.prim_value(len(self.config.linear_layers)), max_batch_size, max_history,
            rx.Tuple(gets), rx.Tuple(sets), rx.Tuple(zeros), ty_args=rx.AnyType())
        return StateStore(_expr=store, _name="rnn_state")

    def _forward(self, residual: nn.Tensor, cache: PagedKVCache, states: StateStore | None) -> Any:
        n, positions = residual.shape[0], cache.get_query_positions(residual.shape[0])
        delta = op.zeros((n, self.config.hidden_size), "float32")
        for layer in self.layers:
            residual, x = self._norm(residual, delta, layer.input_norm)
            if isinstance(layer.mixer, TvmRecurrent):
                delta, states = layer.mixer(x, states)
            else:
                delta = layer.mixer(x, cache, positions, self.frequencies)
            residual, x = self._norm(residual, delta, layer.post_norm)
            delta = layer.feed_forward(x)
        return self._norm(residual, delta, self.norm)[1], states

    def _norm(self, residual: nn.Tensor, delta: nn.Tensor, scale: nn.Tensor) -> Any:
        constants = (self.config.hidden_size, self.config.rms_norm_eps, delta.shape[1])
        return call(kernels.add_norm, constants, residual, delta, scale)

    def _row(self, x: nn.Tensor, position: nn.Tensor) -> nn.Tensor:
        return call(kernels.row, (self.config.hidden_size,), x, position)

    def _logits(self, x: nn.Tensor) -> nn.Tensor:
        return (self.head or self.table)(x)


class HybridNetwork(TvmNetwork):
    """A model with recurrent layers."""

    def prefill(self, embeddings: nn.Tensor, logit_positions: nn.Tensor, paged_kv_cache: PagedKVCache,
                rnn_state: StateStore) -> Any:
        """embeddings [n, hidden], logit_positions [1] -> logits of that token [1, width], and the caches."""
        x, rnn_state = self._forward(embeddings, paged_kv_cache, rnn_state)
        return self._logits(self._row(x, logit_positions)), paged_kv_cache, rnn_state

    def decode(self, embeddings: nn.Tensor, paged_kv_cache: PagedKVCache, rnn_state: StateStore) -> Any:
        """embeddings [1, hidden] -> logits [1, width], and the caches."""
        x, rnn_state = self._forward(embeddings, paged_kv_cache, rnn_state)
        return self._logits(x), paged_kv_cache, rnn_state


class AttentionNetwork(TvmNetwork):
    """A model without recurrent layers."""

    def prefill(self, embeddings: nn.Tensor, logit_positions: nn.Tensor, paged_kv_cache: PagedKVCache) -> Any:
        x, _ = self._forward(embeddings, paged_kv_cache, None)
        return self._logits(self._row(x, logit_positions)), paged_kv_cache

    def decode(self, embeddings: nn.Tensor, paged_kv_cache: PagedKVCache) -> Any:
        return self._logits(self._forward(embeddings, paged_kv_cache, None)[0]), paged_kv_cache


def specification(network: TvmNetwork) -> dict[str, Any]:
    """Returns the library's functions and their arguments, for `export_tvm`."""
    hidden, plain = network.config.hidden_size, {"param_mode": "none", "effect_mode": "none"}
    packed = {"param_mode": "packed", "effect_mode": "none"}
    numbers = ("max_batch_size", "max_total_seq_len", "prefill_chunk_size", "page_size", "support_sliding_window")
    many, one = spec.Tensor(["n", hidden], "float32"), spec.Tensor([1, hidden], "float32")
    caches = {"paged_kv_cache": spec.Object(object_type=PagedKVCache)}
    found = {"embed": {"input_ids": spec.Tensor(["n"], "int32"), "$": packed},
             "create_paged_kv_cache": {**dict.fromkeys(numbers, int), "$": plain}}
    if network.config.linear_layers:
        caches["rnn_state"] = spec.Object(object_type=StateStore)
        found["create_rnn_state"] = {"max_batch_size": int, "max_history": int, "$": plain}
    return {**found, "decode": {"embeddings": one, **caches, "$": packed},
            "prefill": {"embeddings": many, "logit_positions": spec.Tensor([1], "int32"), **caches, "$": packed}}


# Encoders: kernels over ragged batches (n tokens of several sequences, one after another), in float32


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
    """Computes the last layer's states from tokens. config: an `embeddings.weights.EncoderConfig`."""

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


def encoder_specification(network: EncoderNetwork) -> dict[str, Any]:
    """Returns the library's function and its arguments, for `export_tvm`."""
    numbers = {name: spec.Tensor(["n"], "int32") for name in ("ids", "places", "kinds", "starts", "ends")}
    return {"hidden": {**numbers, "$": {"param_mode": "packed", "effect_mode": "none"}}}
