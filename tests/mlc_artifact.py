"""Builds a directory by mlc-llm's conventions: names, shapes and dtypes of parameters, functions, metadata and files.

Uses no code of mlc-llm.
"""

# mypy: ignore-errors
from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from deltic.config import ModelConfig
from deltic.export.tvm.compiler import parse_target

GROUPS = {"q3": (3, 40), "q4": (4, 32), "q8": (8, 32)}
"""Bits of a number, and numbers that share a scale."""


def quantized(weight: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """weight [rows, columns] -> words [rows, ...] uint32, scales [rows, groups], and the numbers they stand for."""
    bits, group = GROUPS[name[:2]]
    each, most = 32 // bits, (1 << (bits - 1)) - 1
    rows, columns = weight.shape
    groups = -(-columns // group)
    padded = np.zeros((rows, groups * group), np.float32)
    padded[:, :columns] = weight
    dtype = np.float16 if "f16" in name else np.float32
    scales = (abs(padded).reshape(rows, groups, group).max(-1) / most).astype(dtype)
    wide = np.repeat(scales.astype(np.float32), group, 1)
    levels = np.clip(np.round(padded / np.where(wide == 0, 1, wide) + most), 0, 2 * most).astype(np.uint32)
    words = np.zeros((rows, groups * group // each), np.uint32)
    for place in range(each):
        words |= levels[:, place::each] << np.uint32(bits * place)
    return words, scales, ((levels.astype(np.float32) - most) * wide)[:, :columns]


def build(folder: Path, config: ModelConfig, tensors: dict[str, np.ndarray], quantization: str, descriptor: str,
          functions: tuple[str, ...], chunk: int) -> dict[str, np.ndarray]:
    """Writes the directory of a Qwen3. Returns the dequantized tensors."""
    import tvm
    from tvm import relax

    folder.mkdir(parents=True)
    network, dtype = network_of(config, quantization), "float16" if "f16" in quantization else "float32"
    module, named = network.export_tvm(spec=specification(network, functions, dtype))
    said = {"model_type": "qwen3", "quantization": quantization,
            "context_window_size": config.max_position_embeddings, "sliding_window_size": -1, "attention_sink_size": -1,
            "prefill_chunk_size": chunk, "tensor_parallel_shards": 1, "pipeline_parallel_stages": 1,
            "disaggregation": False, "kv_state_kind": "kv_cache", "max_batch_size": 4, "active_vocab_size": None,
            "model_task": "chat"}
    library = {**said, "memory_usage": {}, "kv_cache": {}, "params": [
        {"name": name, "shape": [*map(int, one.shape)], "dtype": str(one.dtype), "preprocs": [],
         "pipeline_stages": [0]} for name, one in named]}
    goal, builder = parse_target("llvm").target, relax.BlockBuilder(module)
    with builder.function("_metadata", params=[]):
        builder.emit_func_output(tvm.ir.StringImm(json.dumps(library)))
    built = tvm.relax.build(builder.get(), target=goal, relax_pipeline=relax.get_default_pipeline(goal))
    built.export_library(str(folder / "libqwen3.so"))
    stored, stand = parameters(config, tensors, quantization)
    write(folder, descriptor, [(name, stored[name]) for name, _ in named])
    model = {"hidden_act": "silu", "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size,
             "attention_bias": False, "num_attention_heads": config.num_attention_heads,
             "num_hidden_layers": config.num_hidden_layers, "num_key_value_heads": config.num_key_value_heads,
             "rms_norm_eps": config.rms_norm_eps, "rope_theta": int(config.rope.theta), "vocab_size": config.vocab_size,
             "tie_word_embeddings": config.tie_word_embeddings, "context_window_size": config.max_position_embeddings,
             "prefill_chunk_size": chunk, "tensor_parallel_shards": 1, "head_dim": config.head_dim, "dtype": "float32",
             "max_batch_size": 4, "weight_block_size": None, "kwargs": {}}
    (folder / "mlc-chat-config.json").write_text(json.dumps({
        "version": "0.1.0", **{key: said[key] for key in said if key not in ("kv_state_kind", "max_batch_size")},
        "model_config": model, "vocab_size": config.vocab_size, "active_vocab_size": config.vocab_size,
        "temperature": 0.6, "top_p": 0.95, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
        "tokenizer_files": [], "tokenizer_info": {}, "conv_template": {"name": "chatml"}, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": [3, 4], "embedding_metadata": None}), encoding="utf-8")
    return stand


def parameters(config: ModelConfig, tensors: dict[str, np.ndarray], quantization: str) -> Any:
    """Returns the stored parameters by mlc-llm's names, and the dequantized tensors."""
    stored, stand = {}, {}
    dtype = np.float16 if "f16" in quantization else np.float32

    def matrix(name: str, *sources: str) -> None:
        words, scales, plain = quantized(np.concatenate([tensors[source] for source in sources]), quantization)
        flip = quantization.endswith("_0") and "embed" not in name
        stored[f"{name}.q_weight"], stored[f"{name}.q_scale"] = (words.T, scales.T) if flip else (words, scales)
        start = 0
        for source in sources:
            stand[source] = plain[start:start + len(tensors[source])]
            start += len(tensors[source])

    matrix("model.embed_tokens", "model.embed_tokens.weight")
    if "lm_head.weight" in tensors:
        matrix("lm_head", "lm_head.weight")
    for index in range(config.num_hidden_layers):
        layer = f"model.layers.{index}"
        matrix(f"{layer}.self_attn.c_attn", *(f"{layer}.self_attn.{part}_proj.weight" for part in "qkv"))
        matrix(f"{layer}.self_attn.o_proj", f"{layer}.self_attn.o_proj.weight")
        matrix(f"{layer}.mlp.gate_up_proj", f"{layer}.mlp.gate_proj.weight", f"{layer}.mlp.up_proj.weight")
        matrix(f"{layer}.mlp.down_proj", f"{layer}.mlp.down_proj.weight")
    for name in tensors.keys() - stand.keys():  # norms
        stored[name] = stand[name] = tensors[name].astype(dtype)
    return {name: np.ascontiguousarray(value) for name, value in stored.items()}, {
        name: value.astype(np.float32) for name, value in stand.items()}


def write(folder: Path, descriptor: str, named: list[tuple[str, np.ndarray]]) -> None:
    """Writes one shard with unaligned parameters."""
    content, items = bytearray(), []
    for name, array in named:
        items.append({"name": name, "shape": [*array.shape], "dtype": str(array.dtype), "format": "raw",
                      "nbytes": array.nbytes, "byteOffset": len(content)})
        content += array.tobytes()
    (folder / "params_shard_0.bin").write_bytes(content)
    (folder / descriptor).write_text(json.dumps({"metadata": {"ParamSize": len(items)}, "records": [
        {"dataPath": "params_shard_0.bin", "format": "raw-shard", "nbytes": len(content),
         "md5sum": hashlib.md5(content).hexdigest(), "records": items}]}), encoding="utf-8")


def _classes() -> Any:
    from tvm import te, tirx
    from tvm.relax.frontend import nn
    from tvm.relax.frontend.nn import op

    class Grouped(nn.Module):
        """A matrix [rows, columns] in groups."""

        def __init__(self, columns: int, rows: int, name: str, flipped: bool) -> None:
            self.bits, self.group = GROUPS[name[:2]]
            self.shape, self.flipped = (rows, columns), flipped
            self.dtype = "float16" if "f16" in name else "float32"
            groups = -(-columns // self.group)
            words = groups * (self.group // (32 // self.bits))
            order = (lambda shape: shape[::-1]) if flipped else (lambda shape: shape)
            self.q_weight = nn.Parameter(order((rows, words)), "uint32")
            self.q_scale = nn.Parameter(order((rows, groups)), self.dtype)

        def weight(self) -> nn.Tensor:
            each, bits, group, flipped = 32 // self.bits, self.bits, self.group, self.flipped

            def number(words: te.Tensor, scales: te.Tensor) -> te.Tensor:
                def at(row: Any, column: Any) -> Any:
                    word = words(column // each, row) if flipped else words(row, column // each)
                    scale = scales(column // group, row) if flipped else scales(row, column // group)
                    shift = (column % each * bits).astype("uint32")
                    level = tirx.bitwise_and(tirx.shift_right(word, shift), tirx.const((1 << bits) - 1, "uint32"))
                    return (level.astype(self.dtype) - tirx.const((1 << (bits - 1)) - 1, self.dtype)) * scale
                return te.compute(self.shape, at, name="dequantize")
            return op.tensor_expr_op(number, "dequantize", [self.q_weight, self.q_scale])

        def forward(self, x: nn.Tensor, out_dtype: str | None = None) -> nn.Tensor:
            return op.matmul(x, op.permute_dims(self.weight()), out_dtype=out_dtype or self.dtype)

    class Embedding(Grouped):
        def forward(self, ids: nn.Tensor) -> nn.Tensor:
            return op.take(self.weight(), ids, axis=0)

        def lm_head_forward(self, x: nn.Tensor) -> nn.Tensor:
            return op.matmul(x, op.permute_dims(self.weight()), out_dtype="float32")

    class Attention(nn.Module):
        def __init__(self, config: ModelConfig, name: str) -> None:
            flipped, dim = name.endswith("_0"), config.head_dim
            self.heads, self.kv_heads, self.dim = config.num_attention_heads, config.num_key_value_heads, dim
            self.c_attn = Grouped(config.hidden_size, (self.heads + 2 * self.kv_heads) * dim, name, flipped)
            self.o_proj = Grouped(self.heads * dim, config.hidden_size, name, flipped)
            self.q_norm = nn.RMSNorm(dim, -1, config.rms_norm_eps, bias=False)
            self.k_norm = nn.RMSNorm(dim, -1, config.rms_norm_eps, bias=False)

        def forward(self, x: nn.Tensor, cache: Any, layer: int) -> nn.Tensor:
            batch, count, _ = x.shape
            qkv = op.reshape(self.c_attn(x), (batch, count, self.heads + 2 * self.kv_heads, self.dim))
            q, k, v = op.split(qkv, [self.heads, self.heads + self.kv_heads], axis=2)
            qkv = op.concat([self.q_norm(q), self.k_norm(k), v], dim=2)
            found = cache.attention_with_fused_qkv(layer, qkv, self.heads, sm_scale=self.dim ** -0.5)
            return self.o_proj(op.reshape(found, (batch, count, self.heads * self.dim)))

    class Mlp(nn.Module):
        def __init__(self, config: ModelConfig, name: str) -> None:
            flipped = name.endswith("_0")
            self.gate_up_proj = Grouped(config.hidden_size, 2 * config.intermediate_size, name, flipped)
            self.down_proj = Grouped(config.intermediate_size, config.hidden_size, name, flipped)

        def forward(self, x: nn.Tensor) -> nn.Tensor:
            gate, up = op.split(self.gate_up_proj(x), 2, axis=-1)
            return self.down_proj(op.silu(gate) * up)

    class Layer(nn.Module):
        def __init__(self, config: ModelConfig, name: str) -> None:
            self.self_attn, self.mlp = Attention(config, name), Mlp(config, name)
            self.input_layernorm = nn.RMSNorm(config.hidden_size, -1, config.rms_norm_eps, bias=False)
            self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, -1, config.rms_norm_eps, bias=False)

        def forward(self, x: nn.Tensor, cache: Any, layer: int) -> nn.Tensor:
            x = x + self.self_attn(self.input_layernorm(x), cache, layer)
            return x + self.mlp(self.post_attention_layernorm(x))

    class Trunk(nn.Module):
        def __init__(self, config: ModelConfig, name: str) -> None:
            self.embed_tokens = Embedding(config.hidden_size, config.vocab_size, name, False)
            self.layers = nn.ModuleList([Layer(config, name) for _ in range(config.num_hidden_layers)])
            self.norm = nn.RMSNorm(config.hidden_size, -1, config.rms_norm_eps, bias=False)

        def forward(self, x: nn.Tensor, cache: Any) -> nn.Tensor:
            for index, layer in enumerate(self.layers):
                x = layer(x, cache, index)
            return self.norm(x)

    return nn, op, Grouped, Trunk


def network_of(config: ModelConfig, name: str) -> Any:
    """Returns the model with mlc-llm's functions."""
    from tvm import relax as rx
    from tvm import te
    from tvm.relax.frontend.nn.llm.kv_cache import RopeMode, TIRPagedKVCache

    nn, op, grouped, trunk = _classes()

    class Model(nn.Module):
        def __init__(self) -> None:
            self.config, self.model = config, trunk(config, name)
            if not config.tie_word_embeddings:
                self.lm_head = grouped(config.hidden_size, config.vocab_size, name, name.endswith("_0"))
            self.to("float16" if "f16" in name else "float32")

        def to(self, dtype: str) -> None:
            for _, parameter in self.named_parameters():
                if parameter.dtype != "uint32":
                    parameter.to(dtype)

        def logits(self, x: Any) -> Any:
            return (self.model.embed_tokens.lm_head_forward(x) if config.tie_word_embeddings
                    else self.lm_head(x, "float32"))

        def embed(self, input_ids: Any) -> Any:
            return self.model.embed_tokens(input_ids)

        def prefill(self, input_embed: Any, paged_kv_cache: Any) -> Any:
            x = self.model(input_embed, paged_kv_cache)

            def last(every: Any) -> Any:
                _, count, hidden = every.shape
                return te.compute((1, 1, hidden), lambda i, _, k: every[i, count - 1, k], name="index")
            return self.logits(op.tensor_expr_op(last, "index", [x])), paged_kv_cache

        def decode(self, input_embed: Any, paged_kv_cache: Any) -> Any:
            return self.logits(self.model(input_embed, paged_kv_cache)), paged_kv_cache

        def batch_prefill(self, input_embeds: Any, logit_positions: Any, paged_kv_cache: Any) -> Any:
            x = op.take(self.model(input_embeds, paged_kv_cache), logit_positions, axis=1)
            return self.logits(x), paged_kv_cache

        def batch_decode(self, input_embeds: Any, paged_kv_cache: Any) -> Any:
            return self.logits(self.model(input_embeds, paged_kv_cache)), paged_kv_cache

        def create_tir_paged_kv_cache(self, max_batch_size: Any, max_total_seq_len: Any, prefill_chunk_size: Any,
                                      page_size: Any, support_sliding_window: Any) -> Any:
            return TIRPagedKVCache(
                "mha", max_batch_size, max_total_seq_len, prefill_chunk_size, page_size, support_sliding_window,
                layer_partition=rx.ShapeExpr([0, config.num_hidden_layers]),
                num_hidden_layers=config.num_hidden_layers, num_attention_heads=config.num_attention_heads,
                num_key_value_heads=config.num_key_value_heads, qk_head_dim=config.head_dim, v_head_dim=config.head_dim,
                mla_original_qk_head_dim=0, mla_original_v_head_dim=0, rope_mode=RopeMode.NORMAL, rope_scale=1,
                rope_theta=int(config.rope.theta), rope_scaling={}, rope_ext_factors=rx.prim_value(0),
                rotary_dim=config.head_dim, enable_disaggregation=False,
                dtype="float16" if "f16" in name else "float32", target=parse_target("llvm").target)

    return Model()


def specification(network: Any, functions: tuple[str, ...], dtype: str) -> dict[str, Any]:
    """Specifies these functions of mlc-llm, `embed` and the cache's."""
    from tvm.relax.frontend.nn import spec
    from tvm.relax.frontend.nn.llm.kv_cache import PagedKVCache

    hidden = network.config.hidden_size
    packed, plain = ({"param_mode": mode, "effect_mode": "none"} for mode in ("packed", "none"))
    cache = {"paged_kv_cache": spec.Object(object_type=PagedKVCache), "$": packed}
    every = {
        "prefill": {"input_embed": spec.Tensor([1, "seq_len", hidden], dtype), **cache},
        "decode": {"input_embed": spec.Tensor([1, 1, hidden], dtype), **cache},
        "batch_prefill": {"input_embeds": spec.Tensor([1, "seq_len", hidden], dtype),
                          "logit_positions": spec.Tensor(["batch_size"], "int32"), **cache},
        "batch_decode": {"input_embeds": spec.Tensor(["batch_size", 1, hidden], dtype), **cache}}
    numbers = ("max_batch_size", "max_total_seq_len", "prefill_chunk_size", "page_size", "support_sliding_window")
    return {"embed": {"input_ids": spec.Tensor(["seq_len"], "int32"), "$": packed},
            **{name: every[name] for name in functions},
            "create_tir_paged_kv_cache": {**dict.fromkeys(numbers, int), "$": plain}}
