"""Maps tensors of GGUF files to canonical ones (`loader/names`), and back: their names, order and values.

GGUF names and forms are those of llama.cpp's converter (conversion/qwen.py) and models (src/models/qwen35.cpp,
qwen35moe.cpp, qwen3next.cpp, qwen3.cpp, qwen2.cpp, llama.cpp).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from deltic.config import LinearConfig, ModelConfig
from deltic.config.families import FAMILIES, LayerType
from deltic.errors import ModelError
from deltic.loader.names import EMBEDDING, HEAD, Shape, packed_of, packed_parts, packed_rows

Change = Callable[[Tensor, ModelConfig], Tensor]


def _same(tensor: Tensor, config: ModelConfig) -> Tensor:
    return tensor


@dataclass(frozen=True, slots=True)
class TensorForm:
    """Differences between a GGUF tensor and the canonical one: order of rows or value heads, and values.

    heads: the axis of value heads, or None.
    behind_keys: True if queries and keys precede the value heads on that axis.
    wide: True if a head has value_head_dim entries on that axis; False if it has one.
    interleaved: number of heads whose rows are stored as adjacent rotated pairs.
    packed: suffix of the canonical name of a packed projection, whose rows are ordered by key head, then by part.
    decode, encode: convert GGUF's values to canonical ones and back.

    Canonical value heads are grouped by their key head: k0v0 k0v1 k1v0 k1v1. In GGUF files they are tiled:
    k0v0 k1v0 k0v1 k1v1, so that value head i belongs to key head i modulo the number of key heads.

    In `interleaved` heads, GGUF rows 2 i and 2 i + 1 are a rotated pair; canonical pairs are rows i and
    i + head_dim / 2.
    """

    heads: int | None = None
    behind_keys: bool = False
    wide: bool = False
    interleaved: Callable[[ModelConfig], int] | None = None
    packed: str = ""
    decode: Change = _same
    encode: Change = _same

    @property
    def changes(self) -> bool:
        """Returns True if values differ, not only their order."""
        return self.decode is not _same

    def rows(self, count: int, config: ModelConfig) -> Tensor | None:
        """Returns the file's row of each canonical row, [count] int64; None: the order is the same."""
        if self.packed:
            return packed_rows(self.packed, config)
        if self.interleaved is None:
            return None
        return torch.arange(count).view(self.interleaved(config), -1, 2).transpose(1, 2).flatten()

    def to_ours(self, tensor: Tensor, config: ModelConfig) -> Tensor:
        """Converts a GGUF tensor (in torch's shape) to the canonical one."""
        rows = self.rows(len(tensor), config)
        return self.decode(self._reorder(tensor, config, grouped=True) if rows is None else tensor[rows], config)

    def from_ours(self, tensor: Tensor, config: ModelConfig) -> Tensor:
        """Converts a canonical tensor to the GGUF one (in torch's shape); the inverse of `to_ours`."""
        encoded, rows = self.encode(tensor, config), self.rows(len(tensor), config)
        return self._reorder(encoded, config, grouped=False) if rows is None else encoded[rows.argsort()]

    def tiled(self, tensor: Tensor, config: ModelConfig) -> Tensor:
        """Returns the tensor with its axis of value heads reordered from the canonical order to the file's."""
        return self._reorder(tensor, config, grouped=False)

    def shape(self, shape: Shape, config: ModelConfig) -> Shape:
        """Returns the shape in a GGUF file of a canonical tensor with `shape`."""
        if self.encode is _drop_row:
            return shape[1:]
        return (shape[0], *shape[2:]) if self.encode is _drop_channel else shape

    def _reorder(self, tensor: Tensor, config: ModelConfig, grouped: bool) -> Tensor:
        linear = config.linear
        if self.heads is None or linear is None or linear.num_key_heads == linear.num_value_heads:
            return tensor
        axis, skip = self.heads, 2 * linear.key_dim if self.behind_keys else 0
        keys, values = tensor.split([skip, tensor.shape[axis] - skip], axis)
        heads = values.unflatten(axis, self._grid(linear, tiled=grouped)).transpose(axis, axis + 1)
        return torch.cat([keys, heads.flatten(axis, axis + 2)], axis)

    def _grid(self, linear: LinearConfig, tiled: bool) -> tuple[int, int, int]:
        share = linear.num_value_heads // linear.num_key_heads
        width = linear.value_head_dim if self.wide else 1
        return (share, linear.num_key_heads, width) if tiled else (linear.num_key_heads, share, width)


def _minus_offset(tensor: Tensor, config: ModelConfig) -> Tensor:
    return tensor - config.norm_offset


def _plus_offset(tensor: Tensor, config: ModelConfig) -> Tensor:
    return tensor + config.norm_offset


def _log_of_decay(tensor: Tensor, config: ModelConfig) -> Tensor:
    """Computes in float64, so that a second encoding differs by at most two units in the last place."""
    if not bool((tensor <= 0).all()):
        raise ModelError("decays (ssm_a) must be negative: the file is corrupt or written by an unknown converter")
    return (-tensor.double()).log().to(tensor.dtype)


def _decay(tensor: Tensor, config: ModelConfig) -> Tensor:
    return -tensor.double().exp().to(tensor.dtype)


def _add_channel(tensor: Tensor, config: ModelConfig) -> Tensor:
    return tensor.unsqueeze(1)


def _drop_channel(tensor: Tensor, config: ModelConfig) -> Tensor:
    return tensor.squeeze(1)


def _add_row(tensor: Tensor, config: ModelConfig) -> Tensor:
    return tensor.unsqueeze(0)


def _drop_row(tensor: Tensor, config: ModelConfig) -> Tensor:
    return tensor.squeeze(0)


PLAIN: Final = TensorForm()
NORM: Final = TensorForm(decode=_minus_offset, encode=_plus_offset)
"""GGUF stores the factor itself; checkpoints subtract the family's offset."""
_PER_HEAD: Final = TensorForm(heads=0)
_ROWS: Final = TensorForm(heads=0, wide=True)
_ROWS_BEHIND_KEYS: Final = TensorForm(heads=0, wide=True, behind_keys=True)
_COLUMNS: Final = TensorForm(heads=1, wide=True)
_CONVOLUTION: Final = TensorForm(heads=0, wide=True, behind_keys=True, decode=_add_channel, encode=_drop_channel)
_INTERLEAVED_QUERIES: Final = TensorForm(interleaved=lambda config: config.num_attention_heads)
_INTERLEAVED_KEYS: Final = TensorForm(interleaved=lambda config: config.num_key_value_heads)
_BETA_ALPHA: Final = TensorForm(packed="linear_attn.in_proj_ba.weight")
_QKVZ: Final = TensorForm(packed="linear_attn.in_proj_qkvz.weight")
_SINGLE_ROW: Final = TensorForm(decode=_add_row, encode=_drop_row)
_DECAY: Final = TensorForm(heads=0, decode=_log_of_decay, encode=_decay)

Table = Mapping[str, tuple[str, TensorForm]]
"""GGUF name -> canonical name and form."""

_TOP: Final[Table] = {
    "token_embd.weight": (EMBEDDING, PLAIN),
    "output_norm.weight": ("model.norm.weight", NORM),
    "output.weight": (HEAD, PLAIN),
}
_PROJECTIONS: Final[Table] = {
    "attn_q.weight": ("self_attn.q_proj.weight", PLAIN),
    "attn_k.weight": ("self_attn.k_proj.weight", PLAIN),
    "attn_v.weight": ("self_attn.v_proj.weight", PLAIN),
    "attn_output.weight": ("self_attn.o_proj.weight", PLAIN),
}
_QK_NORMS: Final[Table] = {
    "attn_q_norm.weight": ("self_attn.q_norm.weight", NORM),
    "attn_k_norm.weight": ("self_attn.k_norm.weight", NORM),
}
_BIASES: Final[Table] = {
    "attn_q.bias": ("self_attn.q_proj.bias", PLAIN),
    "attn_k.bias": ("self_attn.k_proj.bias", PLAIN),
    "attn_v.bias": ("self_attn.v_proj.bias", PLAIN),
}
_INTERLEAVED: Final[Table] = {
    "attn_q.weight": ("self_attn.q_proj.weight", _INTERLEAVED_QUERIES),
    "attn_k.weight": ("self_attn.k_proj.weight", _INTERLEAVED_KEYS),
}
_LINEAR: Final[Table] = {
    "attn_qkv.weight": ("linear_attn.in_proj_qkv.weight", _ROWS_BEHIND_KEYS),
    "attn_gate.weight": ("linear_attn.in_proj_z.weight", _ROWS),
    "ssm_beta.weight": ("linear_attn.in_proj_b.weight", _PER_HEAD),
    "ssm_alpha.weight": ("linear_attn.in_proj_a.weight", _PER_HEAD),
    "ssm_conv1d.weight": ("linear_attn.conv1d.weight", _CONVOLUTION),
    "ssm_a": ("linear_attn.A_log", _DECAY),
    "ssm_dt.bias": ("linear_attn.dt_bias", _PER_HEAD),
    "ssm_norm.weight": ("linear_attn.norm.weight", PLAIN),
    "ssm_out.weight": ("linear_attn.out_proj.weight", _COLUMNS),
}
_GROUPED: Final[Table] = {
    **{key: (name, replace(form, heads=None)) for key, (name, form) in _LINEAR.items()
       if key not in ("ssm_beta.weight", "ssm_alpha.weight")},
    "ssm_ba.weight": (_BETA_ALPHA.packed, _BETA_ALPHA)}
_OLDER_GROUPED: Final[Table] = {"ssm_in.weight": (_QKVZ.packed, _QKVZ)}
"""Layers of families with `gguf_grouped`, and a tensor that older files have in place of attn_qkv and attn_gate."""
_DENSE: Final[Table] = {
    "ffn_gate.weight": ("mlp.gate_proj.weight", PLAIN),
    "ffn_up.weight": ("mlp.up_proj.weight", PLAIN),
    "ffn_down.weight": ("mlp.down_proj.weight", PLAIN),
}
_ROUTED: Final[Table] = {
    "ffn_gate_inp.weight": ("mlp.gate.weight", PLAIN),
    "ffn_gate_exps.weight": ("mlp.experts.gate_proj.weight", PLAIN),
    "ffn_up_exps.weight": ("mlp.experts.up_proj.weight", PLAIN),
    "ffn_down_exps.weight": ("mlp.experts.down_proj.weight", PLAIN),
}
_SHARED: Final[Table] = {
    "ffn_gate_inp_shexp.weight": ("mlp.shared_expert_gate.weight", _SINGLE_ROW),
    "ffn_gate_shexp.weight": ("mlp.shared_expert.gate_proj.weight", PLAIN),
    "ffn_up_shexp.weight": ("mlp.shared_expert.up_proj.weight", PLAIN),
    "ffn_down_shexp.weight": ("mlp.shared_expert.down_proj.weight", PLAIN),
}
ROPE_FACTORS: Final = "rope_freqs.weight"
"""Divisors of the rotary frequencies, a part of the canonical config."""
_NEXTN: Final[Table] = {
    "nextn.eh_proj.weight": ("mtp.fc.weight", PLAIN),
    "nextn.enorm.weight": ("mtp.pre_fc_norm_embedding.weight", NORM),
    "nextn.hnorm.weight": ("mtp.pre_fc_norm_hidden.weight", NORM),
    "nextn.shared_head_norm.weight": ("mtp.norm.weight", NORM),
    "nextn.embed_tokens.weight": ("mtp.embed_tokens.weight", PLAIN),
    "nextn.shared_head_head.weight": ("mtp.shared_head.head.weight", PLAIN),
}
"""Tensors of a multi-token-prediction head outside its layers. Files store them in the first block after the
trunk's."""
_FUSED: Final = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
"""Parts of `attn_qkv.weight` in a block with full attention (a converter's option)."""
_FUSED_EXPERTS: Final = ("mlp.experts.gate_proj.weight", "mlp.experts.up_proj.weight")
"""Parts of each expert in `ffn_gate_up_exps.weight`."""
_OTHER_NAMES: Final[Mapping[str, str]] = {
    "ssm_dt": "ssm_dt.bias", "ssm_dt.weight": "ssm_dt.bias", "ssm_a.weight": "ssm_a",
    "ssm_ba_a.weight": "ssm_alpha.weight", "ssm_ba_b.weight": "ssm_beta.weight"}
"""Tensor names of other converters, such as Ollama's."""
_BUNDLED_HEAD: Final[Table] = {name: (name, PLAIN) for name, _ in _NEXTN.values()}
"""Draft heads in Ollama's files have the tensor names of checkpoints."""
TOWER: Final = re.compile(r"(v|mm)\..+")
"""Tensors of a vision tower in a text model's file (`ollama`)."""
EXPERT: Final = re.compile(r"(mtp\.layers\.\d{1,5}\.)mlp\.experts\.(\d{1,5})\.(gate|up|down)_proj\.weight")
"""Pattern of one expert's matrix in a draft head of Ollama's files."""
_BLOCK_NAME: Final = re.compile(r"(blk|mtp\.layers)\.(0|[1-9]\d{0,4})\.([a-z0-9_.]+)")
_LAYER_NAME: Final = re.compile(r"(model|mtp)\.layers\.(0|[1-9]\d{0,4})\.([A-Za-z0-9_.]+)")


@dataclass(frozen=True, slots=True)
class TensorTarget:
    """The canonical meaning of a GGUF tensor.

    names: one canonical name, or several whose rows follow each other in the GGUF tensor (within each expert).
    mtp: True if the tensor belongs to the draft head (`mtp.`).
    """

    names: tuple[str, ...]
    form: TensorForm
    mtp: bool = False


def tensor_target(name: str, architecture: str, layers: Sequence[LayerType]) -> TensorTarget:
    """Returns the target of the GGUF tensor `name` in a model of this canonical architecture with these trunk layers.

    Blocks after the trunk's belong to the draft head. Raises ModelError for an unknown name.
    """
    found = {**_TOP, **_BUNDLED_HEAD}.get(name)
    block = _BLOCK_NAME.fullmatch(name)
    if block is not None:
        index = int(block[2]) + (0 if block[1] == "blk" else len(layers))
        inner = _OTHER_NAMES.get(block[3], block[3])
        found = _in_block(index, inner, architecture, layers)
        parts = () if found else _fused(index, inner, architecture, layers)
        if parts:
            prefix = _prefix(index, len(layers))
            return TensorTarget(tuple(prefix + part for part in parts), PLAIN, prefix.startswith("mtp."))
    if found is None:
        raise ModelError(f"tensor {name[:200]!r} has no place in a {architecture} model of {len(layers)} layers; "
                         "is the file from an unusual converter or of a newer format?")
    return TensorTarget(packed_parts(found[0]) or (found[0],), found[1], found[0].startswith("mtp."))


def gguf_name(name: str, architecture: str, layers: Sequence[LayerType]) -> tuple[str, TensorForm]:
    """Returns the GGUF name and the form of a canonical tensor of the trunk or the draft head (`mtp.`). Tensors that
    share one GGUF tensor (`TensorForm.packed`) have the same name.

    Raises ModelError for a name without GGUF equivalent.
    """
    found = _reverse({**_TOP, **{f"blk.{len(layers)}.{key}": value for key, value in _NEXTN.items()}}).get(name)
    layer = _LAYER_NAME.fullmatch(name)
    if layer is not None:
        block = int(layer[2]) + (len(layers) if layer[1] == "mtp" else 0)
        named = _reverse(_table(block, architecture, layers))
        found = named.get(layer[3]) or named.get(packed_of(layer[3]) or "")
        found = found and (f"blk.{block}.{found[0]}", found[1])
    if found is None:
        raise ModelError(f"tensor {name[:200]!r} has no name in GGUF files of a {architecture} model")
    return found


def _in_block(block: int, name: str, architecture: str, layers: Sequence[LayerType]) -> tuple[str, TensorForm] | None:
    if block == len(layers) and name in _NEXTN:
        return _NEXTN[name]
    older = _OLDER_GROUPED if FAMILIES[architecture].gguf_grouped else {}
    found = {**older, **_table(block, architecture, layers)}.get(name)
    return found and (_prefix(block, len(layers)) + found[0], found[1])


def _table(block: int, architecture: str, layers: Sequence[LayerType]) -> Table:
    """Returns the table of a block's tensors."""
    family = FAMILIES[architecture]
    table = {"attn_norm.weight": ("input_layernorm.weight", NORM),
             family.gguf_second_norm: ("post_attention_layernorm.weight", NORM)}
    table |= {**_ROUTED, **(_SHARED if family.shared else {})} if family.experts else _DENSE
    if _kind(block, layers) == "linear_attention":
        return {**table, **(_GROUPED if family.gguf_grouped else _LINEAR)}
    table |= _PROJECTIONS
    if family.qk_norm:
        table |= _QK_NORMS
    if family.qkv_bias:
        table |= _BIASES
    if family.gguf_interleaved:
        table |= _INTERLEAVED
    return table


def _kind(block: int, layers: Sequence[LayerType]) -> LayerType:
    return layers[block] if block < len(layers) else "full_attention"


def _fused(block: int, name: str, architecture: str, layers: Sequence[LayerType]) -> tuple[str, ...]:
    """Returns the parts of a fused tensor; empty for other tensors."""
    family = FAMILIES[architecture]
    if name == "attn_qkv.weight" and family.qk_norm and _kind(block, layers) == "full_attention":
        return _FUSED
    return _FUSED_EXPERTS if family.experts and name == "ffn_gate_up_exps.weight" else ()


def _prefix(block: int, layers: int) -> str:
    return f"model.layers.{block}." if block < layers else f"mtp.layers.{block - layers}."


def _reverse(table: Table) -> Table:
    return {canonical: (name, form) for name, (canonical, form) in table.items()}
