"""Tensor types of GGUF files: layout and dequantization of blocks.

Tensors are stored by rows, and rows as blocks of 1, 32 or 256 neighbouring weights with common scales. Layouts and
formulas are those of ggml (ggml-common.h, ggml-quants.c); all fields are little endian.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from deltic.errors import ModelError

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Read = Callable[[int, int], Bytes]
"""A reader of a tensor's bytes: (start, count) -> uint8 [count]."""

_PIECE: Final = 1 << 18
"""Weights dequantized at a time: temporaries of a few MiB."""
_FLOAT16_LIMIT: Final = 65520.0  # the least value that rounds to infinity


@dataclass(frozen=True, slots=True)
class BlockType:
    """A tensor type.

    id: the type's number in GGUF files.
    weights, nbytes: weights and bytes of a block.
    readable: True if deltic can dequantize it.
    """

    name: str
    id: int
    weights: int
    nbytes: int
    readable: bool = False

    def size(self, count: int) -> int:
        """Returns the bytes of `count` weights; `count` is a multiple of the block's weights."""
        return count // self.weights * self.nbytes


def fill(target: torch.Tensor, type: BlockType, read: Read) -> None:
    """Reads and dequantizes bytes piece by piece into the contiguous `target`.

    Raises ModelError if the type is not readable or a value exceeds a float16 target.
    """
    start = 0
    for piece in torch.split(target.view(-1), _PIECE):
        count = type.size(piece.numel())
        values = torch.from_numpy(decode(read(start, count), type))
        piece.copy_(values)
        if piece.dtype == torch.float16:
            _check_range(values)
        start += count


def _check_range(values: torch.Tensor) -> None:
    low, high = (float(bound) for bound in torch.aminmax(values))
    if _FLOAT16_LIMIT <= max(-low, high) < math.inf:
        raise ModelError("it has values beyond float16; use dtype bfloat16 or float32")


def decode(raw: Bytes, type: BlockType) -> Floats:
    """Dequantizes whole blocks: uint8 [n * type.nbytes] -> float32 [n * type.weights].

    Raises ModelError for a type that is not readable.
    """
    if not type.readable:
        raise ModelError(f"type {type.name} is not supported, only {', '.join(LAYOUTS)}; "
                         "choose another quantization of the model")
    blocks = np.ascontiguousarray(raw).view(LAYOUTS[type.name])
    with np.errstate(invalid="ignore", over="ignore"):  # infinite scales give NaN weights, as in ggml
        return _READABLE[type.name][3](blocks).reshape(-1)


Blocks = NDArray[Any]
"""Structured arrays of one of the LAYOUTS."""


def fields_of(packed: Bytes, bits: int, run: int) -> Bytes:
    """Unpacks fields of 1, 2 or 4 bits: [n, bytes] -> [n, bytes * 8 / bits].

    Of every `run` bytes, the lowest field of each byte comes first, then the next field of each, and so on.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    runs = packed.reshape(len(packed), -1, 1, run)
    return ((runs >> shifts) & np.uint8((1 << bits) - 1)).reshape(len(packed), -1)


def _float(values: NDArray[Any]) -> Floats:
    return values.astype(np.float32)


def _scaled(scale: Floats, q: NDArray[Any], minimum: Floats | None = None) -> Floats:
    """Returns scale * q (- minimum), with scales [n], or [n, groups] for groups of neighbouring weights."""
    groups = _float(q).reshape(len(q), math.prod(scale.shape[1:]), -1)
    groups *= scale.reshape(len(q), -1, 1)
    if minimum is not None:
        groups -= minimum.reshape(len(q), -1, 1)
    return groups


def _signed(q: Bytes, offset: int) -> NDArray[np.int8]:
    return q.astype(np.int8) - np.int8(offset)


def _bf16(b: Blocks) -> Floats:
    return (b["x"].astype(np.uint32) << np.uint32(16)).view(np.float32)


def _q5(b: Blocks) -> Bytes:
    return fields_of(b["qs"], 4, 16) | fields_of(b["qh"], 1, 1) << np.uint8(4)


def _plus(scale: Floats, q: Bytes, offset: Floats) -> Floats:
    return _scaled(scale, q) + offset.reshape(-1, 1, 1)


def _q2_k(b: Blocks) -> Floats:
    scales, minima = b["scales"] & np.uint8(15), b["scales"] >> np.uint8(4)
    return _scaled(_float(b["d"])[:, None] * scales, fields_of(b["qs"], 2, 32), _float(b["dmin"])[:, None] * minima)


def _q3_k(b: Blocks) -> Floats:
    packed = b["scales"]
    scales = fields_of(packed[:, :8], 4, 8) | fields_of(packed[:, 8:], 2, 4) << np.uint8(4)
    q = fields_of(b["qs"], 2, 32) | fields_of(b["hmask"], 1, 32) << np.uint8(2)
    return _scaled(_float(b["d"])[:, None] * _signed(scales, 32), _signed(q, 4))


def six_bits(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Unpacks scales and minima of Q4_K and Q5_K, 8 each, from 12 bytes.

    Bytes 0-3 and 4-7 hold the first four scales and minima in their low six bits; bytes 8-11 the low four bits of the
    last four scales (low nibble) and minima (high nibble), whose high two bits are the top bits of the bytes before.
    """
    scales, minima, low = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    return (np.concatenate([scales & np.uint8(63), low & np.uint8(15) | scales >> np.uint8(6) << np.uint8(4)], axis=1),
            np.concatenate([minima & np.uint8(63), low >> np.uint8(4) | minima >> np.uint8(6) << np.uint8(4)], axis=1))


def _with_minima(b: Blocks, q: Bytes) -> Floats:
    scales, minima = six_bits(b["scales"])
    return _scaled(_float(b["d"])[:, None] * scales, q, _float(b["dmin"])[:, None] * minima)


def _q5_k(b: Blocks) -> Floats:
    return _with_minima(b, fields_of(b["qs"], 4, 32) | fields_of(b["qh"], 1, 32) << np.uint8(4))


def _q6_k(b: Blocks) -> Floats:
    q = fields_of(b["ql"], 4, 64) | fields_of(b["qh"], 2, 32) << np.uint8(4)
    return _scaled(_float(b["d"])[:, None] * b["scales"], _signed(q, 32))


IQ4_VALUES: Final = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int8)
"""Values of the codes of IQ4_NL and IQ4_XS."""
MXFP4_VALUES: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.int8)
"""Values of the codes of MXFP4 (e2m1), doubled."""


def _iq4_nl(b: Blocks) -> Floats:
    return _scaled(_float(b["d"]), IQ4_VALUES[fields_of(b["qs"], 4, 16)])


def _iq4_xs(b: Blocks) -> Floats:
    scales = fields_of(b["scales_l"], 4, 1) | fields_of(b["scales_h"], 2, 1) << np.uint8(4)
    return _scaled(_float(b["d"])[:, None] * _signed(scales, 32), IQ4_VALUES[fields_of(b["qs"], 4, 16)])


def _mxfp4(b: Blocks) -> Floats:
    """The scale is a power of two with bias 127, halved because the values are doubled."""
    return _scaled(np.ldexp(np.float32(1), b["e"].astype(np.int32) - 128), MXFP4_VALUES[fields_of(b["qs"], 4, 16)])


_READABLE: Final[Mapping[str, tuple[int, int, list[Any], Callable[[Blocks], Floats]]]] = {
    "F32": (0, 1, [("x", "<f4")], lambda b: _float(b["x"])),
    "F16": (1, 1, [("x", "<f2")], lambda b: _float(b["x"])),
    "BF16": (30, 1, [("x", "<u2")], _bf16),
    "Q4_0": (2, 32, [("d", "<f2"), ("qs", "u1", 16)],
             lambda b: _scaled(_float(b["d"]), _signed(fields_of(b["qs"], 4, 16), 8))),
    "Q4_1": (3, 32, [("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)],
             lambda b: _plus(_float(b["d"]), fields_of(b["qs"], 4, 16), _float(b["m"]))),
    "Q5_0": (6, 32, [("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)],
             lambda b: _scaled(_float(b["d"]), _signed(_q5(b), 16))),
    "Q5_1": (7, 32, [("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)],
             lambda b: _plus(_float(b["d"]), _q5(b), _float(b["m"]))),
    "Q8_0": (8, 32, [("d", "<f2"), ("qs", "i1", 32)], lambda b: _scaled(_float(b["d"]), b["qs"])),
    "Q2_K": (10, 256, [("scales", "u1", 16), ("qs", "u1", 64), ("d", "<f2"), ("dmin", "<f2")], _q2_k),
    "Q3_K": (11, 256, [("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", "<f2")], _q3_k),
    "Q4_K": (12, 256, [("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128)],
             lambda b: _with_minima(b, fields_of(b["qs"], 4, 32))),
    "Q5_K": (13, 256, [("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)],
             _q5_k),
    "Q6_K": (14, 256, [("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")], _q6_k),
    "IQ4_NL": (20, 32, [("d", "<f2"), ("qs", "u1", 16)], _iq4_nl),
    "IQ4_XS": (23, 256, [("d", "<f2"), ("scales_h", "u1", 2), ("scales_l", "u1", 4), ("qs", "u1", 128)], _iq4_xs),
    "MXFP4": (39, 32, [("e", "u1"), ("qs", "u1", 16)], _mxfp4),
}
"""Name -> id, weights of a block, its fields in file order (name, numpy type, count), and decoder.

d and dmin are scales, scales are the scales of sub-blocks in units of d (and their minima in units of dmin), qs the low
bits of the weights, qh (in Q3_K: hmask) the high ones.
"""
_SIZES_ONLY: Final = (
    ("IQ2_XXS", 16, 256, 66), ("IQ2_XS", 17, 256, 74),
    ("IQ3_XXS", 18, 256, 98), ("IQ1_S", 19, 256, 50), ("IQ3_S", 21, 256, 110), ("IQ2_S", 22, 256, 82), ("I8", 24, 1, 1),
    ("I16", 25, 1, 2), ("I32", 26, 1, 4), ("I64", 27, 1, 8), ("F64", 28, 1, 8), ("IQ1_M", 29, 256, 56),
    ("TQ1_0", 34, 256, 54), ("TQ2_0", 35, 256, 66), ("NVFP4", 40, 64, 36), ("Q1_0", 41, 128, 18), ("Q2_0", 42, 64, 18),
)
"""Name, id, weights and bytes of types that deltic cannot dequantize. (Q8_1 and Q8_K exist in memory only.)"""

LAYOUTS: Final[Mapping[str, np.dtype[Any]]] = {name: np.dtype(row[2]) for name, row in _READABLE.items()}
"""Structured numpy types of blocks."""
TYPES: Final[Mapping[int, BlockType]] = {type.id: type for type in (
    *(BlockType(name, row[0], row[1], LAYOUTS[name].itemsize, True) for name, row in _READABLE.items()),
    *(BlockType(*row) for row in _SIZES_ONLY))}
BY_NAME: Final[Mapping[str, BlockType]] = {type.name: type for type in TYPES.values()}
