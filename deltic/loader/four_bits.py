"""Four-bit block types that GGUF files do not have, in the layout that the kernels multiply.

A block has 256 neighbouring weights of a row. A byte has two codes, the even column in the low bits, as in published
checkpoints.

NVFP4: e2m1 codes, one unsigned e4m3 scale for each 16 columns, and one float32 factor.
INT4_32, INT4_64, INT4_128: codes from 0 to 15, and a 32-bit word for each group of columns: a float32 scale of 16
significant bits with the zero point in its low byte. A float16 or bfloat16 scale has fewer bits and stays exact. A
weight is scale * (code - zero point).

Checkpoints have one factor per matrix. `--quant` computes one per block, so that the weights do not depend on how a
matrix is split over devices. Quantization rounds to nearest; csrc/quantize.cpp gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deltic.loader.gguf.blocks import BlockType, Floats

WEIGHTS: Final = 256
"""Weights of a block."""
LAYOUTS: Final[Mapping[str, np.dtype[Any]]] = {
    "NVFP4": np.dtype([("d", "<f4"), ("scales", "u1", 16), ("qs", "u1", 128)]),
    **{f"INT4_{group}": np.dtype([("words", "<u4", WEIGHTS // group), ("qs", "u1", 128)]) for group in (32, 64, 128)}}
"""Structured numpy types of blocks. d: 128 times the factor, as the kernels expect it."""
_NUMBERS: Final = {"NVFP4": 1001, "INT4_32": 1002, "INT4_64": 1003, "INT4_128": 1004}
TYPES: Final[Mapping[str, BlockType]] = {
    name: BlockType(name, _NUMBERS[name], WEIGHTS, layout.itemsize, True) for name, layout in LAYOUTS.items()}
_LARGEST: Final = np.float32(6 * 448)
"""The largest e2m1 number times the largest e4m3 number."""
_BOUNDS: Final = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
"""Midpoints of the e2m1 numbers 0, 0.5, 1, 1.5, 2, 3, 4 and 6. Every second midpoint rounds up: to the even code."""
_SIGN, _NAN = 0x80, 0x7f


# Weights of checkpoints


class InexactError(Exception):
    """Raised if blocks cannot hold a weight without rounding; has the reason. All functions below raise it."""


def nvfp4_blocks(codes: Tensor, scales: Tensor, factor: float) -> Tensor:
    """Returns blocks, uint8 [rows, bytes]. codes: uint8 [rows, columns / 2]. scales: bits of e4m3 numbers, uint8
    [rows, columns / 16]."""
    if bool((scales & _NAN == _NAN).any()):
        raise InexactError("scales that are not numbers")
    rows, width = codes.shape
    signs = (scales >> 7) * 0x88  # moves a scale's sign to its codes
    codes = codes ^ signs.repeat_interleave(8, 1)
    d = torch.full((rows, width // 128, 1), 128 * factor, dtype=torch.float32)
    if not bool(d.isfinite().all()):
        raise InexactError(f"a scale of {factor:g}")
    return _joined(d, scales & _NAN, codes)


def mxfp4_blocks(codes: Tensor, exponents: Tensor) -> Tensor:
    """Returns blocks of the GGUF type MXFP4, uint8 [rows, bytes]. codes: uint8 [rows, columns / 2]. exponents:
    exponents of two, plus 127, uint8 [rows, columns / 32]."""
    if bool((exponents == 255).any()):
        raise InexactError("scales that are not numbers")
    halves = torch.stack((codes & 15, codes >> 4), -1).view(len(codes), -1, 2, 16)
    return torch.cat((exponents[..., None], halves[:, :, 0] | halves[:, :, 1] << 4), -1).flatten(1)


def int4_blocks(codes: Tensor, scales: Tensor, zeros: Tensor | int) -> Tensor:
    """Returns blocks of `int4_type`, uint8 [rows, bytes]. codes: uint8 [rows, columns / 2]. scales: floats [rows,
    groups]. zeros: zero points, uint8 [rows, groups], or one zero point for all."""
    type = int4_type(2 * codes.shape[1], scales.shape[1])
    if type is None:
        raise InexactError(f"{scales.shape[1]} groups in rows of {2 * codes.shape[1]} columns")
    scales = scales.float()
    words = scales.contiguous().view(torch.int32)
    if not bool(scales.isfinite().all()):
        raise InexactError("scales that are not finite")
    if bool((words & 255).any()):
        raise InexactError("scales of more than 16 bits")
    words = words | (zeros if isinstance(zeros, int) else zeros.to(torch.int32))
    wanted = 2 * codes.shape[1] // WEIGHTS * LAYOUTS[type.name]["words"].shape[0]
    return _joined(words.repeat_interleave(wanted // words.shape[1], 1), codes)


def int4_type(columns: int, groups: int) -> BlockType | None:
    """Returns the block type of a matrix with `groups` groups in a row; a group may span several groups of the type.
    Returns None if no type fits."""
    found = next((own for own in (128, 64, 32) if columns // groups % own == 0), None)
    return TYPES[f"INT4_{found}"] if found and columns % WEIGHTS == 0 and columns % groups == 0 else None


def _joined(*fields: Tensor) -> Tensor:
    """Returns blocks with these fields. Each field is [rows, ...] and has the same number of blocks."""
    rows, blocks = len(fields[-1]), fields[-1].shape[1] // (WEIGHTS // 2)
    parts = [field.contiguous().view(rows, -1).view(torch.uint8).view(rows, blocks, -1) for field in fields]
    return torch.cat(parts, -1).flatten(1)


# Quantization: float32 [blocks, 256] -> fields of blocks


def _nvfp4(x: Floats) -> Mapping[str, NDArray[Any]]:
    groups = x.reshape(len(x), 16, 16)
    most = np.abs(groups).max(-1)
    d = most.max(-1) / _LARGEST
    wanted = torch.from_numpy(most * _inverse(d * np.float32(6))[:, None])
    scales = wanted.to(torch.float8_e4m3fn)
    factors = _inverse(scales.float().numpy() * d[:, None])
    scaled = groups * factors[..., None]
    size = np.abs(scaled)
    codes = sum((size >= bound if index % 2 else size > bound).astype(np.uint8)
                for index, bound in enumerate(_BOUNDS))
    codes = (codes | (scaled < 0).astype(np.uint8) << np.uint8(3)).reshape(len(x), -1)
    return {"d": d * np.float32(128), "scales": scales.view(torch.uint8).numpy(), "qs": _pairs(codes)}


def _int4(group: int, x: Floats) -> Mapping[str, NDArray[Any]]:
    groups = x.reshape(len(x), -1, group)
    low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
    bits = ((high - low) / np.float32(15)).view(np.uint32)
    bits = (bits + np.uint32(128)) & np.uint32(0xffffff00)
    factor = _inverse(bits.view(np.float32))
    zero = np.rint(np.clip(-low * factor, 0, 15))
    codes = np.rint(np.clip(groups * factor[..., None] + zero[..., None], 0, 15)).astype(np.uint8)
    return {"words": bits | zero.astype(np.uint32), "qs": _pairs(codes.reshape(len(x), -1))}


def _pairs(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return codes[:, ::2] | codes[:, 1::2] << np.uint8(4)


def _inverse(scale: Floats) -> Floats:
    """Returns 1 / scale, or 0 where products could overflow."""
    found: Floats = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale >= np.float32(2.0**-120))
    return found


ENCODERS: Final[Mapping[str, Callable[[Floats], Mapping[str, NDArray[Any]]]]] = {
    "NVFP4": _nvfp4, **{f"INT4_{group}": partial(_int4, group) for group in (32, 64, 128)}}
