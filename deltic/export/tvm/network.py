"""A language model as a relax module, from which `relax.frontend.nn` makes the functions of a library."""

# mypy: ignore-errors
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import relax as rx
from tvm import tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op, spec
from tvm.relax.frontend.nn.llm.kv_cache import PagedKVCache, RopeMode, TIRPagedKVCache
from tvm.target import Target

from deltic.config import LinearConfig, ModelConfig
from deltic.export.tvm import gpu_kernels, kernels
from deltic.export.tvm.artifact import LANES

STATE, CONV = 0, 1
"""Kinds of a recurrent layer's states."""


def on_gpu() -> bool:
    return Target.current().kind.name != "llvm"


def scheduled(kernel: Any) -> Any:
    """Returns a kernel for the current target, with an attribute that keeps TVM from scheduling it again."""
    kernel = kernel.with_attr("tirx.is_scheduled", True)
    return gpu_kernels.spread(kernel) if on_gpu() else kernel


def call(kernel: Callable[..., Any], constants: tuple[Any, ...], *arguments: nn.Tensor) -> Any:
    """Calls the kernel that `kernel(*constants)` makes, or its variant for a GPU.

    Returns its outputs, float32: the parameters after the arguments. The first argument has n rows.
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
    """Product with a matrix [outputs, inputs] in panels. The result has the width of all panels."""

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
        """Returns the attention layers' KV cache, float32."""
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
        """Returns the recurrent layers' states, zero."""
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
