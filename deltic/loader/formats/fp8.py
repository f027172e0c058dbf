"""Weights in 8-bit floating point (e4m3).

FP8: a scale for each block of 128 rows and columns, each 128 columns of a row, each row, or the whole matrix. In memory
a weight may keep this form (`Float8`), or have blocks of GROUP columns of a row with a scale each (`quantize_fp8`).
MXFP8: a power of two for each 32 columns of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Final

import torch
from torch import Tensor

from deltic.config.quantization import Quantization
from deltic.errors import ModelError
from deltic.loader.tensors import PackedRows, PackedTensor, Plan, Role, Shape, StoredTensor, WeightFormat
from deltic.ops.parts import Part

FLOAT8: Final = "F8_E4M3"
GROUP: Final = 128
"""Columns and rows that share a scale of a float8 tensor."""
FLOAT8_LARGEST: Final = 448.0
"""Largest finite float8 value."""
FLOAT8_BLOCK_BYTES: Final = 4 + GROUP
"""Bytes of a group in memory: its scale, then codes."""
MX_GROUP: Final = 32
"""Columns that share a power of two."""
_FLOATS: Final = ("F32", "BF16", "F16")


def quantize_fp8(name: str, matrix: Tensor) -> Tensor:
    """Quantizes a float matrix [rows, columns], columns a multiple of GROUP, to blocks, uint8 [rows, bytes], on its
    device. The largest value of a group becomes FLOAT8_LARGEST. Raises ModelError for values that are not finite."""
    groups = matrix.float().unflatten(1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    if not bool(largest.isfinite().all()):
        raise ModelError(f"tensor {name!r}: it has values that are not finite")
    scales = torch.where(largest > 0, largest / FLOAT8_LARGEST, 1.0)
    codes = (groups / scales).clamp(-FLOAT8_LARGEST, FLOAT8_LARGEST).to(torch.float8_e4m3fn)
    return torch.cat((scales.view(torch.uint8), codes.view(torch.uint8)), -1).flatten(1)


@dataclass(frozen=True, slots=True, eq=False)
class Float8(PackedRows):
    """A matrix or a stack in the float8 format of checkpoints.

    codes: uint8 [..., rows, columns].
    scales: float32, one of three shapes: of blocks [..., rows / GROUP, columns / GROUP], rounded up; of rows [...,
        rows, 1 or columns / GROUP]; of the matrix [..., 1, 1].
    """

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def numbers(self) -> Tensor:
        """Returns the values, float32 [..., rows, columns]."""
        values, scales = float8_values(self.codes), row_scales(self.scales, self.shape)
        if self.shape[-1] % GROUP:
            return values.mul_(scales.repeat_interleave(GROUP, -1)[..., :self.shape[-1]])
        values.unflatten(-1, (-1, GROUP)).mul_(scales[..., None])
        return values

    def blocks(self) -> Tensor:
        """Returns the blocks of `quantize_fp8` for all matrices, one after another, without rounding."""
        scales = row_scales(self.scales, self.shape).flatten(0, -2).contiguous()
        scales = scales.view(torch.uint8).unflatten(1, (-1, 4))
        codes = self.codes.flatten(0, -2).unflatten(1, (-1, GROUP))
        return torch.cat((scales, codes), -1).flatten(1)

    def halves(self) -> tuple[Float8, Float8]:
        """Splits the rows in two halves. No block may extend over both halves."""
        codes, scales = self.codes.chunk(2, -2), self.scales.chunk(2, -2)
        return Float8(codes[0], scales[0]), Float8(codes[1], scales[-1])  # both halves share a matrix's only scale


def float8_values(codes: Tensor) -> Tensor:
    """Returns the values of codes, uint8 [..., columns], in float32."""
    if codes.device.type != "cpu" or codes.shape[-1] % 2:
        return codes.view(torch.float8_e4m3fn).float()
    pairs = codes.contiguous().view(torch.uint16).flatten().int()
    return _value_pairs().index_select(0, pairs).view(torch.float32).view(codes.shape)


@cache
def _value_pairs() -> Tensor:
    """Returns the float32 values of each two codes as a float64: a look-up is 10 times as fast as a conversion."""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return torch.stack((values.repeat(256), values.repeat_interleave(256)), -1).view(torch.float64).flatten()


def row_scales(scales: Tensor, shape: Shape) -> Tensor:
    """Returns the scales of each row of a Float8 of this shape, [..., rows, columns / GROUP]."""
    *stack, rows, columns = shape
    if scales.shape[-2] == -(-rows // GROUP):
        scales = scales.repeat_interleave(GROUP, -2)[..., :rows, :]
    return scales.expand(*stack, rows, -(-columns // GROUP))


def scales_part(scales: Tensor, shape: Shape, part: Part) -> Tensor:
    """Returns the scales of a part of a Float8 of this shape. The part's columns must fill whole groups."""
    if part.ranges is None:
        return scales
    groups = tuple(slice(own.start // GROUP, own.stop // GROUP) for own in part.ranges)
    return (replace(part, ranges=groups) if part.columns else part).of(row_scales(scales, shape))


# Checkpoints


def float8_scales(tensor: PackedTensor) -> Tensor:
    """Reads the scales of a whole FP8 weight, float32, in the shapes that `Float8` documents."""
    grid: Shape = tensor.settings["grid"]
    return tensor.tensors["scales"].read().float().reshape(grid)


def _plan_fp8(tensors: Mapping[str, StoredTensor], quantization: Quantization, module: str) -> Plan:
    codes, scales = tensors["codes"].shape, tensors["scales"].shape
    if len(codes) != 2:
        raise ValueError(f"codes of shape {list(codes)}")
    rows, columns = codes
    blocks = -(-rows // GROUP), -(-columns // GROUP)
    kept = tuple(size for size in scales if size != 1)
    for grid in (blocks, (rows, blocks[1]), (rows, 1), (1, 1)):
        if scales == grid or (prod(scales) == prod(grid) and len(scales) != 2
                              and kept == tuple(size for size in grid if size != 1)):
            return codes, {"grid": grid}
    raise ValueError(f"scales of shape {list(scales)}; only a scale for each block of {GROUP} by {GROUP}, each {GROUP} "
                     "columns of a row, each row or each matrix can be read")


def _read_fp8(tensor: PackedTensor, first: int, end: int) -> Float8:
    codes = tensor.tensors["codes"].rows(first, end).read().view(torch.uint8)
    scales, rows = float8_scales(tensor), tensor.tensors["codes"].shape[0]
    if scales.shape[0] == rows:
        return Float8(codes, scales[first:end])
    if scales.shape[0] > 1:  # rows may begin inside a block
        scales = scales[first // GROUP:-(-end // GROUP)].repeat_interleave(GROUP, 0)[first % GROUP:][:end - first]
    return Float8(codes, scales)


@dataclass(frozen=True, slots=True, eq=False)
class MxFloat8(PackedRows):
    """Rows in MXFP8. codes: uint8 [rows, columns]. exponents: scale exponents plus 127, uint8 [rows, columns / 32]."""

    codes: Tensor
    exponents: Tensor

    def numbers(self) -> Tensor:
        """Returns the values, float32 [rows, columns]."""
        values = float8_values(self.codes)
        values.unflatten(-1, (-1, MX_GROUP)).mul_(powers_of_two(self.exponents)[..., None])
        return values


def powers_of_two(exponents: Tensor) -> Tensor:
    """Returns the float32 scales for exponents that are stored plus 127."""
    return torch.exp2(exponents.float() - 127)


def mx_shape(codes: Shape, scales: Shape, per_byte: int) -> Shape:
    """Returns the shape of a matrix with one power of two for each 32 columns. Raises ValueError if shapes disagree."""
    if len(codes) != 2:
        raise ValueError(f"codes of shape {list(codes)}")
    rows, columns = codes[0], per_byte * codes[1]
    if scales != (rows, columns // MX_GROUP) or columns % MX_GROUP:
        raise ValueError(f"scales of shape {list(scales)}; only a scale for each {MX_GROUP} columns can be read")
    return rows, columns


def _plan_mxfp8(tensors: Mapping[str, StoredTensor], quantization: Quantization, module: str) -> Plan:
    return mx_shape(tensors["codes"].shape, tensors["scales"].shape, 1), {}


def _read_mxfp8(tensor: PackedTensor, first: int, end: int) -> MxFloat8:
    codes, exponents = (tensor.tensors[role].rows(first, end).read().view(torch.uint8) for role in ("codes", "scales"))
    return MxFloat8(codes, exponents)


FORMATS: Final = (
    WeightFormat(
        "MXFP8", {"codes": Role(("weight",), (FLOAT8,)),
                  "scales": Role(("weight_scale", "weight_scale_inv"), ("U8", "F8_E8M0"))},
        _plan_mxfp8, _read_mxfp8),
    WeightFormat(
        FLOAT8, {"codes": Role(("weight",), (FLOAT8,)),
                 "scales": Role(("weight_scale_inv", "weight_scale"), _FLOATS)},
        _plan_fp8, _read_fp8),
)
