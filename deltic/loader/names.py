"""Canonical names and shapes of a model's tensors: the names that Hugging Face's text models use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import torch

from deltic.config import DType, ExpertsConfig, LinearConfig, ModelConfig
from deltic.errors import ModelError

Shape = tuple[int, ...]

EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"

_QUANTIZED: Final = re.compile(
    r"\.(qweight|qzeros|g_idx|scales|biases|weight_(packed|scale|scale_2|global_scale|shape|zero_point)|SCB|"
    r"trellis|pre_quant_scale|weight\.(absmax|quant_\w+|nested_\w+))$")
"""Extra tensors of other quantizations (AWQ, GPTQ, bitsandbytes, compressed-tensors, MLX ...)."""
_PREFIX: Final = re.compile(r"(model\.language_model\.|language_model\.(?:model\.)?|model\.)?(.*)")
_LAYER: Final = re.compile(r"layers\.(0|[1-9]\d{0,4})\.([a-z_0-9.A-Z]+)")
_LAYER_TENSORS: Final = frozenset({
    "input_layernorm.weight", "post_attention_layernorm.weight",
    "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight",
    "mlp.gate.weight", "mlp.shared_expert_gate.weight", "mlp.shared_expert.gate_proj.weight",
    "mlp.shared_expert.up_proj.weight", "mlp.shared_expert.down_proj.weight", "mlp.experts.gate_up_proj.weight",
    "mlp.experts.gate_proj.weight", "mlp.experts.up_proj.weight", "mlp.experts.down_proj.weight",
    "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight",
    "self_attn.o_proj.weight", "self_attn.q_norm.weight", "self_attn.k_norm.weight",
    "self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias",
    "linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight", "linear_attn.in_proj_b.weight",
    "linear_attn.in_proj_a.weight", "linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight",
    "linear_attn.conv1d.weight", "linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.norm.weight",
    "linear_attn.out_proj.weight",
})
_UNUSED_SCALE: Final = re.compile(
    r"(\.|\.experts\.\w+_proj_)"
    r"(input_(global_)?scale|output_scale|[qkv]_scale|[kv]_global_scale|(input|output|[qkv])_zero_point)$")
"""Scales of quantized activations, and of keys and values."""
# Tensors that are not part of the text model: draft head, vision tower, rotary tables, and a convolution bias that some
# exporters write although the layer has none.
_IGNORED: Final = re.compile(
    r"^((model|language_model)\.){0,2}(mtp|visual|vision_tower|vision_model|multi_modal_projector)\."
    r"|\.rotary_emb\.(original_)?inv_freq$"
    r"|\.linear_attn\.conv1d\.bias$")
_HEAD: Final = re.compile(r"(?:(?:model|language_model)\.){0,2}(mtp\..*)", re.DOTALL)
HEAD_GATES: Final = ("mtp.layers.0.mlp.gate.weight", "mtp.layers.0.mlp.shared_expert_gate.weight")
"""The router of a head with experts, and the gate of its shared expert."""
_HEAD_TABLES: Final = ("mtp.embed_tokens.weight", "mtp.shared_head.head.weight")
_STACK: Final = re.compile(r"mlp\.experts\.(gate_up|gate|up|down)_proj")
_EXPERT: Final = re.compile(r"(.*\.mlp\.experts\.)(0|[1-9]\d{0,3})\.((?:gate|up|down)_proj\.weight)")
_FUSED_EXPERTS: Final = ".mlp.experts.gate_up_proj.weight"
_NORM: Final = re.compile(r"(norm|norm_embedding|norm_hidden)\.weight$")
_PACKED: Final[Mapping[str, tuple[str, ...]]] = {
    ".in_proj_qkvz.weight": (".in_proj_qkv.weight", ".in_proj_z.weight"),
    ".in_proj_ba.weight": (".in_proj_b.weight", ".in_proj_a.weight"),
    _FUSED_EXPERTS: (".mlp.experts.gate_proj.weight", ".mlp.experts.up_proj.weight"),
}


def canonical(name: str) -> str | None:
    """Returns the canonical name of a checkpoint's tensor; `None` for a tensor that the text model does not need.

    Packed projections (`in_proj_qkvz`, `in_proj_ba` of older exports, `experts.gate_up_proj`) keep their name, see
    `split_packed`; so do tensors of a single expert, see `stack_of`. Raises ModelError for an unknown name.
    """
    if _IGNORED.search(name) or is_unused_scale(name):
        return None
    found = _PREFIX.fullmatch(name)
    rest = found[2] if found else ""
    if rest == HEAD:
        return HEAD
    layer = _LAYER.fullmatch(rest)
    if layer and _STACK.fullmatch(layer[2]):
        return f"model.{rest}.weight"
    if rest in ("embed_tokens.weight", "norm.weight") or (
            layer and (layer[2] in _LAYER_TENSORS or _EXPERT.fullmatch(rest))):
        return f"model.{rest}"
    if _QUANTIZED.search(name):
        raise ModelError(f"tensor {name[:200]!r} is part of an unsupported quantization: take the unquantized "
                         "checkpoint, or a GGUF file of the model")
    raise ModelError(f"tensor {name[:200]!r} is unknown; is this an unquantized checkpoint of the architecture that "
                     "its config.json names?")


def is_unused_scale(name: str) -> bool:
    """Returns True for a scale of activations or K/V. deltic quantizes these with its own scales, or not at all."""
    return _UNUSED_SCALE.search(name) is not None


def is_head(name: str) -> bool:
    """Returns True for a tensor of any kind of multi-token-prediction head."""
    return _HEAD.fullmatch(name) is not None


def canonical_head(name: str) -> str | None:
    """Returns the canonical name (`mtp.` ...) of a head's tensor; `None` for any other tensor.

    Raises ModelError for an unsupported kind of head.
    """
    found = _HEAD.fullmatch(name)
    if found is None:
        return None
    rest = found[1]
    if rest.startswith("mtp.layers.") and not rest.startswith("mtp.layers.0."):
        raise ModelError(f"tensor {name[:200]!r}: the multi-token-prediction head has several layers, heads of one are "
                         "supported; use the model without its head")
    return f"{rest}.weight" if _STACK.fullmatch(rest.removeprefix("mtp.layers.0.")) else rest


def is_stack(name: str) -> bool:
    """Returns True for a canonical name of the stacked matrices of all experts."""
    return _STACK.search(name) is not None


def stack_of(name: str) -> tuple[str, int] | None:
    """Returns the stack's name and the index for a tensor of a single expert; None for others."""
    found = _EXPERT.fullmatch(name)
    return found and (found[1] + found[3], int(found[2]))


def is_norm(name: str) -> bool:
    """Returns True for the weight of a norm."""
    return _NORM.search(name) is not None


def tensor_dtype(name: str, dtype: DType) -> DType:
    """Returns the dtype of a tensor in memory: float32 for vectors (norms, biases, decay parameters)."""
    return "float32" if is_norm(name) or name.endswith((".A_log", ".dt_bias", ".bias")) else dtype


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Returns the shape of every tensor of the text model by canonical name; a tied head has no tensor."""
    hidden = config.hidden_size
    tensors: dict[str, Shape] = {EMBEDDING: (config.vocab_size, hidden)}
    for index, kind in enumerate(config.layer_types):
        mixer = _linear_tensors(config) if kind == "linear_attention" else _attention_tensors(config)
        layer = {**mixer, **_block(config)}
        tensors |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    tensors["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        tensors[HEAD] = (config.vocab_size, hidden)
    return tensors


def expected_head(config: ModelConfig) -> dict[str, Shape]:
    """Returns the shape of every tensor of the multi-token-prediction head by canonical name.

    Raises ModelError for a head of several layers.
    """
    if config.num_mtp_layers > 1:
        raise ModelError(f"the multi-token-prediction head has {config.num_mtp_layers} layers (mtp_num_hidden_layers, "
                         "nextn_predict_layers), heads of one are supported; use the model without its head")
    hidden = config.hidden_size
    layer = {**_attention_tensors(config), **_block(config)}
    return {
        "mtp.fc.weight": (hidden, 2 * hidden),
        "mtp.pre_fc_norm_embedding.weight": (hidden,),
        "mtp.pre_fc_norm_hidden.weight": (hidden,),
        **{f"mtp.layers.0.{name}": shape for name, shape in layer.items()},
        "mtp.norm.weight": (hidden,),
    }


def required_head(config: ModelConfig) -> dict[str, Shape]:
    """Returns `expected_head` without the gates of experts, which may be taken from the model."""
    return {name: shape for name, shape in expected_head(config).items() if name not in HEAD_GATES}


def optional_head(config: ModelConfig) -> dict[str, Shape]:
    """Returns the tensors of a head that does not share the model's embedding and lm_head."""
    return dict.fromkeys(_HEAD_TABLES, (config.vocab_size, config.hidden_size))


def _block(config: ModelConfig) -> dict[str, Shape]:
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        **({f"mlp.{name}": shape for name, shape in _mlp(inner, hidden).items()} if config.experts is None
           else _experts(config.experts, hidden)),
    }


def _mlp(inner: int, hidden: int) -> dict[str, Shape]:
    return {"gate_proj.weight": (inner, hidden), "up_proj.weight": (inner, hidden), "down_proj.weight": (hidden, inner)}


def _experts(experts: ExpertsConfig, hidden: int) -> dict[str, Shape]:
    shared = {f"mlp.shared_expert.{name}": shape for name, shape in _mlp(experts.shared_size, hidden).items()}
    return {
        "mlp.gate.weight": (experts.count, hidden),
        **{f"mlp.experts.{name}": (experts.count, *shape) for name, shape in _mlp(experts.size, hidden).items()},
        **({"mlp.shared_expert_gate.weight": (1, hidden), **shared} if experts.shared_size else {}),
    }


def _attention_tensors(config: ModelConfig) -> dict[str, Shape]:
    hidden, dim = config.hidden_size, config.head_dim
    query = config.num_attention_heads * dim
    keys = config.num_key_value_heads * dim
    rows = {"q": 2 * query if config.attention_output_gate else query, "k": keys, "v": keys}
    return {
        **{f"self_attn.{part}_proj.weight": (count, hidden) for part, count in rows.items()},
        **({f"self_attn.{part}_proj.bias": (count,) for part, count in rows.items()} if config.qkv_bias else {}),
        "self_attn.o_proj.weight": (hidden, query),
        **({f"self_attn.{part}_norm.weight": (dim,) for part in "qk"} if config.qk_norm else {}),
    }


def _linear_tensors(config: ModelConfig) -> dict[str, Shape]:
    hidden, linear = config.hidden_size, _linear(config)
    return {
        "linear_attn.in_proj_qkv.weight": (linear.conv_dim, hidden),
        "linear_attn.in_proj_z.weight": (linear.value_dim, hidden),
        "linear_attn.in_proj_b.weight": (linear.num_value_heads, hidden),
        "linear_attn.in_proj_a.weight": (linear.num_value_heads, hidden),
        "linear_attn.conv1d.weight": (linear.conv_dim, 1, linear.conv_kernel),
        "linear_attn.A_log": (linear.num_value_heads,),
        "linear_attn.dt_bias": (linear.num_value_heads,),
        "linear_attn.norm.weight": (linear.value_head_dim,),
        "linear_attn.out_proj.weight": (hidden, linear.value_dim),
    }


def _linear(config: ModelConfig) -> LinearConfig:
    if config.linear is None:
        raise ModelError("the checkpoint has Gated DeltaNet tensors, but config.json has no linear_... keys")
    return config.linear


def packed_parts(name: str) -> tuple[str, ...]:
    """Returns the canonical names that a packed projection splits into; empty for any other tensor."""
    for suffix, parts in _PACKED.items():
        if name.endswith(suffix):
            return tuple(name.removesuffix(suffix) + part for part in parts)
    return ()


def packed_shape(name: str, config: ModelConfig) -> Shape:
    """Returns the required shape of a packed projection."""
    if name.endswith(_FUSED_EXPERTS):
        if config.experts is None:
            raise ModelError(f"tensor {name} belongs to a mixture of experts, but config.json has no num_experts")
        return (config.experts.count, 2 * config.experts.size, config.hidden_size)
    linear = _linear(config)
    return (sum(_group_rows(name, linear)) * linear.num_key_heads, config.hidden_size)


def _group_rows(name: str, linear: LinearConfig) -> list[int]:
    """Returns the rows per key-head group in packed order: q, k, v, z, or b, a."""
    share = linear.num_value_heads // linear.num_key_heads
    if name.endswith(".in_proj_ba.weight"):
        return [share, share]
    return [linear.key_head_dim] * 2 + [share * linear.value_head_dim] * 2


def packed_of(part: str) -> str | None:
    """Returns the name of the packed projection of a Gated DeltaNet layer that contains this canonical tensor."""
    for suffix, parts in _PACKED.items():
        for own in parts:
            if suffix != _FUSED_EXPERTS and part.endswith(own):
                return part.removesuffix(own) + suffix
    return None


def expected_rows(part: str, config: ModelConfig) -> int:
    """Returns the number of rows of a part of a packed projection."""
    return _linear_tensors(config)[f"linear_attn.{part.split('.')[-2]}.weight"][0]


def packed_rows(name: str, config: ModelConfig) -> torch.Tensor:
    """Returns an int64 index into the rows of a packed projection of a Gated DeltaNet layer: the row of each row of the
    parts, one part after another."""
    linear = _linear(config)
    groups = torch.arange(packed_shape(name, config)[0]).view(linear.num_key_heads, -1)
    return torch.cat([part.flatten() for part in groups.split(_group_rows(name, linear), 1)])


def split_packed(name: str, tensor: torch.Tensor, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Splits a packed projection into copies of its canonical parts.

    Projections of Gated DeltaNet layers are interleaved: each key head's group has its own q, k, v, z (or b, a) rows.
    Projections of experts hold each expert's gate, then its up. Raises ModelError if the shape does not fit the config.
    """
    if not packed_parts(name) or tuple(tensor.shape) != packed_shape(name, config):
        raise ModelError(f"tensor {name} has shape {list(tensor.shape)}, "
                         f"but config.json requires {list(packed_shape(name, config))}")
    if name.endswith(_FUSED_EXPERTS):
        return {part: half.contiguous()
                for part, half in zip(packed_parts(name), tensor.chunk(2, dim=1), strict=True)}
    first, second = packed_parts(name)
    rows, size = packed_rows(name, config), expected_rows(first, config)
    return {first: tensor[rows[:size]], second: tensor[rows[size:]]}
