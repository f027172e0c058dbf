"""Files of MLX: quantized weights, and the layout and names that mlx-lm and mlx-vlm give to hybrid models.

A row is a stream of bits in words of 32, lowest first. `affine`: code * scale + bias, for each group of columns. The
modes `mxfp4`, `nvfp4` and `mxfp8` have 8-bit scales and no biases. `quantization` in config.json has bits and group
size, and overrides for single modules under their names.

Convolutions have their channels last, norms already contain the 1 that Qwen's models add to them, experts are called
`switch_mlp` and the vision tower `vision_tower`. The layout of the convolutions identifies a hybrid model as MLX's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from deltic.config.quantization import MLX, Quantization
from deltic.errors import ModelError, show
from deltic.loader.formats.fp4 import Float4
from deltic.loader.formats.fp8 import MxFloat8
from deltic.loader.formats.integers import FLOATS, pairs, unpack, words_of
from deltic.loader.four_bits import TYPES
from deltic.loader.gguf.blocks import BY_NAME, BlockType
from deltic.loader.tensors import PackedRows, PackedTensor, Plan, Role, Source, StoredTensor, WeightFormat

_AFFINE_BITS: Final = (2, 3, 4, 5, 6, 8)
_MODES: Final = {(4, 32): "mxfp4", (4, 16): "nvfp4", (8, 32): "mxfp8"}
"""Bits and columns of a group -> mode."""
_NVFP4_LARGEST: Final = 448.0 * 6.0
"""Largest value of nvfp4 with a global scale of 1. MLX divides the global scale by it."""


# Quantized weights


@dataclass(frozen=True, slots=True, eq=False)
class AffineRows(PackedRows):
    """Rows of a matrix. codes: uint8 [rows, columns]. scales, biases: as stored, [rows, groups]."""

    codes: Tensor
    scales: Tensor
    biases: Tensor

    def numbers(self) -> Tensor:
        """Returns the values, float32 [rows, columns]. Product and sum are rounded to the dtype of the scales."""
        values: Tensor = self.codes.to(self.scales.dtype).unflatten(1, (self.scales.shape[1], -1))
        return values.mul_(self.scales[..., None]).add_(self.biases[..., None]).flatten(1).float()


def _plan(tensors: Mapping[str, StoredTensor], quantization: Quantization, module: str) -> Plan:
    (rows, words), scales = pairs(tensors, "codes", "scales")
    own = quantization.settings.get(module)
    given = own if isinstance(own, Mapping) else quantization.settings
    bits, size = given.get("bits"), given.get("group_size")
    affine = "biases" in tensors
    if not isinstance(bits, int) or not isinstance(size, int) or not 0 < size < 1 << 31 or (
            bits not in _AFFINE_BITS if affine else (bits, size) not in _MODES):
        raise ValueError(f"{show(bits)} bits and groups of {show(size)} columns")
    columns = scales[1] * size
    if scales[0] != rows or words_of(columns, bits) != words:
        raise ValueError(f"codes of shape {[rows, words]} and scales of shape {list(scales)}, which are not those of "
                         f"{bits} bits and groups of {size} columns")
    if affine and tensors["biases"].shape != scales:
        raise ValueError(f"biases of shape {list(tensors['biases'].shape)} and scales of shape {list(scales)}")
    return (rows, columns), {"bits": bits, "columns": columns, "mode": "affine" if affine else _MODES[bits, size]}


def _read_affine(tensor: PackedTensor, first: int, end: int) -> AffineRows:
    words, scales, biases = (tensor.tensors[role].rows(first, end).read() for role in ("codes", "scales", "biases"))
    codes = unpack(words, tensor.settings["bits"], 0, tensor.settings["columns"])
    return AffineRows(codes, scales, biases.to(scales.dtype))


def _read_floats(tensor: PackedTensor, first: int, end: int) -> PackedRows:
    codes, scales = (tensor.tensors[role].rows(first, end).read() for role in ("codes", "scales"))
    octets = codes.view(torch.uint8)
    if tensor.settings["mode"] == "mxfp8":
        return MxFloat8(octets, scales)
    if tensor.settings["mode"] == "mxfp4":
        return Float4(octets, scales)
    factor = torch.ones(())
    if "factor" in tensor.tensors:
        factor = tensor.tensors["factor"].read().reshape(()) / _NVFP4_LARGEST
    return Float4(octets, scales.view(torch.float8_e4m3fn), factor)


def _blocks(tensor: PackedTensor) -> BlockType | None:
    return {"nvfp4": TYPES["NVFP4"], "mxfp4": BY_NAME["MXFP4"]}.get(tensor.settings["mode"])


_CODES: Final = Role(("weight",), ("U32",))
FORMATS: Final = (
    WeightFormat(
        "MLX integers",
        {"codes": _CODES, "scales": Role(("scales",), FLOATS), "biases": Role(("biases",), FLOATS)},
        _plan, _read_affine, (MLX,)),
    WeightFormat(
        "MLX floats",
        {"codes": _CODES, "scales": Role(("scales",), ("U8",)),
         "factor": Role(("global_scale",), ("F32",), required=False)},
        _plan, _read_floats, (MLX,), _blocks))


# Layout and names


@dataclass(frozen=True, slots=True, eq=False)
class Plain(PackedRows):
    """Rows of a tensor that is stored in another layout. values: float32."""

    values: Tensor

    def numbers(self) -> Tensor:
        return self.values


def _layout(name: str, turn: Callable[[Tensor], Tensor]) -> WeightFormat:
    """Returns a format of plain tensors. turn: computes rows from the stored rows, float32."""
    def plan(tensors: Mapping[str, StoredTensor], quantization: Quantization, module: str) -> Plan:
        raise AssertionError(name)

    def read(tensor: PackedTensor, first: int, end: int) -> Plain:
        return Plain(turn(tensor.tensors["codes"].rows(first, end).read().float()).contiguous())

    return WeightFormat(name, {}, plan, read, matrices=False)


_CHANNELS_LAST: Final = _layout("channels last", lambda rows: rows.movedim(-1, 1))
_WITH_ONE: Final = _layout("norm plus 1", lambda rows: rows - 1)
_CONVOLUTION: Final = re.compile(r"\.linear_attn\.conv1d\.weight$")
_PATCH: Final = re.compile(r"^vision_tower\.patch_embed\.proj\.weight$")
_NORM: Final = re.compile(r"(?:^|\.)(?:input_layernorm|post_attention_layernorm|model\.norm|[qk]_norm)\.weight$")
_EXPERTS: Final = ".mlp.switch_mlp."
_TOWER: Final = "vision_tower."


def from_mlx(tensors: dict[str, Source]) -> dict[str, Source]:
    """Returns tensors under the names and in the layout of Hugging Face. Raises ModelError for a name given twice."""
    hybrid = any(_CONVOLUTION.search(name) and _has_channels_last(source) for name, source in tensors.items())
    if not hybrid and not any(_EXPERTS in name for name in tensors):
        return tensors
    found = dict[str, Source]()
    for name, source in tensors.items():
        new = name.replace(_EXPERTS, ".mlp.experts.")
        if hybrid:
            source = _turned(name, source)
            new = f"visual.{new.removeprefix(_TOWER)}" if new.startswith(_TOWER) else new
        if new in found:
            raise ModelError(f"tensor {new[:200]!r} is given twice; keep the files of one revision")
        found[new] = source
    return found


def _has_channels_last(source: Source) -> bool:
    return len(source.shape) == 3 and source.shape[2] == 1 < source.shape[1]


def _turned(name: str, source: Source) -> Source:
    """Returns a norm or a convolution in the layout of Hugging Face."""
    shape, axes = source.shape, len(source.shape)
    if isinstance(source, StoredTensor) and source.dtype in FLOATS:
        if axes == 1 and _NORM.search(name):
            return PackedTensor(_WITH_ONE, shape, {"codes": source}, {})
        if (axes == 3 and _CONVOLUTION.search(name)) or (axes == 5 and _PATCH.search(name)):
            return PackedTensor(_CHANNELS_LAST, (shape[0], shape[-1], *shape[1:-1]), {"codes": source}, {})
    return source
