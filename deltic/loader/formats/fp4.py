"""Weights in 4-bit floating point (e2m1), two columns in a byte, the even column in the low bits.

NVFP4: an 8-bit float (e4m3) for each 16 columns of a row, and a scale of the matrix: compressed-tensors divides by this
scale, ModelOpt multiplies.
MXFP4: a power of two for each 32 columns of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Final

import torch
from torch import Tensor

from deltic.config.quantization import Quantization
from deltic.loader.formats.fp8 import FLOAT8, mx_shape, powers_of_two
from deltic.loader.four_bits import TYPES, mxfp4_blocks, nvfp4_blocks
from deltic.loader.gguf.blocks import BY_NAME, BlockType
from deltic.loader.tensors import PackedRows, PackedTensor, Plan, Role, StoredTensor, WeightFormat

NV_GROUP: Final = 16
"""Columns of NVFP4 that share a scale."""
_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1: Final = (*_VALUES, *(-value for value in _VALUES))
"""Value of each code."""


@dataclass(frozen=True, slots=True, eq=False)
class Float4(PackedRows):
    """Rows of a matrix in NVFP4 or MXFP4.

    codes: uint8 [rows, columns / 2].
    scales: as stored: float8_e4m3fn [rows, columns / 16] in NVFP4; uint8 [rows, columns / 32] in MXFP4, exponents of
        two plus 127.
    factor: scale of the matrix, float32; None in MXFP4. divides: True if the values are divided by the factor.
    """

    codes: Tensor
    scales: Tensor
    factor: Tensor | None = None
    divides: bool = False

    def group_scales(self) -> Tensor:
        """Returns the factor of each group of columns, float32, rounded as the format's own tool does."""
        if self.factor is None:
            return powers_of_two(self.scales)
        scales = self.scales.float()
        return scales / self.factor if self.divides else scales * self.factor

    def numbers(self) -> Tensor:
        """Returns the values, float32 [rows, columns]."""
        pairs = torch.tensor([(E2M1[code & 15], E2M1[code >> 4]) for code in range(256)], device=self.codes.device)
        table = pairs.view(torch.float64).flatten()  # two values at once: 10 times as fast
        scales = self.group_scales()
        values = table.index_select(0, self.codes.flatten().int()).view(torch.float32).view(*scales.shape, -1)
        return values.mul_(scales[..., None]).flatten(-2)

    def blocks(self) -> Tensor:
        """Returns blocks of NVFP4 or MXFP4. A factor that divides becomes its inverse, rounded to float32."""
        if self.factor is None:
            return mxfp4_blocks(self.codes, self.scales)
        factor = float(1 / self.factor if self.divides else self.factor)
        return nvfp4_blocks(self.codes, self.scales.view(torch.uint8), factor)


def _blocks(tensor: PackedTensor) -> BlockType:
    return TYPES["NVFP4"] if "factor" in tensor.tensors else BY_NAME["MXFP4"]


def _plan_nvfp4(tensors: Mapping[str, StoredTensor], quantization: Quantization, module: str) -> Plan:
    codes, scales, factor = (tensors[role].shape for role in ("codes", "scales", "factor"))
    if len(codes) != 2:
        raise ValueError(f"codes of shape {list(codes)}")
    rows, columns = codes[0], 2 * codes[1]
    if scales != (rows, columns // NV_GROUP) or columns % NV_GROUP:
        raise ValueError(f"scales of shape {list(scales)}; only a scale for each {NV_GROUP} columns can be read")
    if prod(factor) != 1:
        raise ValueError(f"a scale of the matrix of shape {list(factor)}; only a single number can be read")
    return (rows, columns), {}


def _read_nvfp4(tensor: PackedTensor, first: int, end: int) -> Float4:
    codes, scales = (tensor.tensors[role].rows(first, end).read() for role in ("codes", "scales"))
    factor = tensor.tensors["factor"].read().float().reshape(())
    return Float4(codes, scales, factor, tensor.format is _COMPRESSED)


def _plan_mxfp4(tensors: Mapping[str, StoredTensor], quantization: Quantization, module: str) -> Plan:
    return mx_shape(tensors["codes"].shape, tensors["scales"].shape, 2), {}


def _read_mxfp4(tensor: PackedTensor, first: int, end: int) -> Float4:
    codes, exponents = (tensor.tensors[role].rows(first, end).read() for role in ("codes", "scales"))
    return Float4(codes, exponents)


_COMPRESSED: Final = WeightFormat(
    "NVFP4", {"codes": Role(("weight_packed",), ("U8",)), "scales": Role(("weight_scale",), (FLOAT8,)),
              "factor": Role(("weight_global_scale",), ("F32",))},
    _plan_nvfp4, _read_nvfp4, blocks=_blocks)
_MODELOPT: Final = WeightFormat(
    "NVFP4", {"codes": Role(("weight",), ("U8",)), "scales": Role(("weight_scale",), (FLOAT8,)),
              "factor": Role(("weight_scale_2",), ("F32",))},
    _plan_nvfp4, _read_nvfp4, blocks=_blocks)
FORMATS: Final = (
    _COMPRESSED, _MODELOPT,
    WeightFormat(
        "MXFP4", {"codes": Role(("weight_packed", "weight"), ("U8",)),
                  "scales": Role(("weight_scale",), ("U8", "F8_E8M0"))},
        _plan_mxfp4, _read_mxfp4, blocks=_blocks))
