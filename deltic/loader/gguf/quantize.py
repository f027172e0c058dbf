"""Quantizes weights to the blocks of GGUF files: the inverse of `blocks.decode`.

Types of 32 weights are bit-equal to ggml's reference formulas (ggml-quants.c) unless the scale is 0 in float16. Types
of 256 weights have scales of scales, which are searched: each candidate scale rounds the weights, least squares over
the rounded weights refines it, and the best result is kept.

The compiled kernels (csrc/quantize.cpp) are faster and bit-equal; this module is the fallback and the oracle. To agree,
both add sums in an order that does not depend on the processor.

With the importance of columns (`imatrix`), errors are weighted by it, except those of Q8_0, and the scales of types of
32 weights are searched, too. The kernels do not implement the weighted form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from deltic.errors import ModelError
from deltic.loader import four_bits
from deltic.loader.gguf.blocks import BY_NAME, LAYOUTS, BlockType, Bytes, Floats, decode
from deltic.ops.cpu.library import load
from deltic.ops.quantized import PLAIN_TYPES

_PIECE: Final = 1 << 18
"""Weights that a thread quantizes at a time: temporaries of a few MiB."""
_FLOAT16_MAX: Final = 65504.0
_LEAST_SCALE: Final = np.float32(2.0**-120)
_ANY_VALUE: Final = ("F32", "BF16")
_UNQUANTIZED: Final = ("F32", "F16", "BF16")
_AFFINE_STEPS: Final = np.linspace(-0.9, 0.9, 7).tolist()
"""Search steps: offsets of the number of levels that a group's range is spread over."""
_SYMMETRIC_STEPS: Final = np.linspace(-1.2, 1.2, 7).tolist()


def quantize(values: Floats, type: BlockType, importance: Floats | None = None) -> Bytes:
    """Quantizes a matrix: float32 [rows, n] -> uint8 [rows, n / type.weights * type.nbytes]. importance: the positive
    weight of each column's errors, float32 [n].

    Raises ModelError if n is no multiple of the block, the type cannot be written, or values are too large or NaN.
    """
    if type.name not in _ENCODERS:
        raise ModelError(f"type {type.name} cannot be written, only {', '.join(_ENCODERS)}")
    rows, count = values.shape
    if count % type.weights:
        raise ModelError(f"rows of {count} weights do not fit blocks of {type.weights}, which {type.name} has")
    if type.name not in _ANY_VALUE:
        _check_range(values, type)
    values, library = np.ascontiguousarray(values, np.float32), load()
    if importance is not None and type.name in _WEIGHTED:
        return _encode(values, type, np.broadcast_to(importance, values.shape))
    if type.name in _UNQUANTIZED or isinstance(library, str):
        return _encode(values, type)
    blocks = np.empty((rows, type.size(count)), np.uint8)
    status = library.deltic_quantize(type.id, values.ctypes.data, rows, count, blocks.ctypes.data)
    assert status == 0, type.name
    return blocks


def quantize_in_pieces(name: str, matrix: torch.Tensor, type: BlockType, pool: Executor,
                       importance: Floats | None = None) -> Iterator[Bytes]:
    """Quantizes a matrix of any float type in the threads of `pool`. Yields blocks, [some rows, bytes]. importance: of
    the columns, for as many equal parts of the rows (experts) as it has rows.

    Raises ModelError as `quantize`, with the name of the tensor.
    """
    step = max(1, _PIECE // matrix.shape[1])
    if importance is None:
        return pool.map(partial(_quantize_piece, name, type), matrix.split(step))
    parts = matrix.chunk(len(importance))
    pieces = [(piece, own) for part, own in zip(parts, importance, strict=True) for piece in part.split(step)]
    return pool.map(partial(_quantize_piece, name, type), *zip(*pieces, strict=True))


def _quantize_piece(name: str, type: BlockType, rows: torch.Tensor, importance: Floats | None = None) -> Bytes:
    """Converts to float32 with numpy, because torch would start threads in each thread of the pool."""
    plain = BY_NAME[PLAIN_TYPES[rows.dtype][0]]
    values = decode(rows.contiguous().view(-1).view(torch.uint8).numpy(), plain).reshape(rows.shape)
    try:
        return quantize(values, type, importance)
    except ModelError as error:
        raise ModelError(f"tensor {name!r}: {error}") from error


def _encode(values: Floats, type: BlockType, importance: Floats | None = None) -> Bytes:
    """Quantizes without the compiled kernels. importance: weight of each value's error."""
    x = values.reshape(-1, type.weights)
    fields = (_ENCODERS[type.name](x) if importance is None
              else _WEIGHTED[type.name](x, importance.reshape(-1, type.weights)))
    blocks = np.empty(values.size // type.weights, _LAYOUTS[type.name])
    for name, field in fields.items():
        blocks[name] = field
    return blocks.view(np.uint8).reshape(len(values), -1)


Fields = Mapping[str, NDArray[Any]]
"""Fields of blocks by their names in `LAYOUTS`."""


def _check_range(values: Floats, type: BlockType) -> None:
    """Raises ModelError for values beyond the range of float16, the type of the values or scales."""
    largest = float(np.maximum(values.max(initial=0.0), -values.min(initial=0.0)))
    if not largest <= _FLOAT16_MAX:
        raise ModelError(f"it has values that {type.name} cannot hold ({largest:g}); use {' or '.join(_ANY_VALUE)}")


def _pack(q: Bytes, bits: int, run: int) -> Bytes:
    """Packs the low `bits` (1, 2 or 4) of every number: [n, count] -> [n, count * bits / 8]; see `blocks.fields_of`."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields = (q & np.uint8((1 << bits) - 1)).reshape(len(q), -1, 8 // bits, run)
    return np.asarray(np.bitwise_or.reduce(fields << shifts, axis=2).reshape(len(q), -1))


def _inverse(scale: Floats) -> Floats:
    """Returns 1 / scale, and 0 where products could overflow. (In float16 such a scale is 0 anyway.)"""
    result: Floats = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=np.abs(scale) >= _LEAST_SCALE)
    return result


def _first(x: Floats, index: NDArray[np.intp]) -> Floats:
    """Returns the value of each row at `index`; the first one if several are equal, [n, 1]."""
    return np.take_along_axis(x, index[:, None], axis=1)


# Blocks of one weight and of 32


def _float(x: Floats) -> Fields:
    return {"x": x[:, 0]}


def _bf16(x: Floats) -> Fields:
    """Rounds to nearest, ties to even; NaN stays NaN."""
    bits = x[:, 0].view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(64)
    return {"x": np.where(np.isnan(x[:, 0]), quiet, rounded)}


def _q8_0(x: Floats) -> Fields:
    """Rounds halves away from zero."""
    scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    scaled = x * _inverse(scale)
    size = np.abs(scaled)
    whole = np.floor(size)
    return {"d": scale[:, 0], "qs": np.sign(scaled) * (whole + np.floor(2 * (size - whole)))}


def _codes(x: Floats, bits: int) -> Fields:
    """Packs 32 codes of 4 or 5 bits."""
    q = x.astype(np.uint8).clip(0, (1 << bits) - 1)
    high = {"qh": _pack(q >> np.uint8(4), 1, 1)} if bits == 5 else {}
    return {"qs": _pack(q, 4, 16), **high}


def _around_zero(x: Floats, bits: int) -> Fields:
    """Quantizes to Q4_0, Q5_0: the largest weight gets the lowest code and is exact."""
    half = 1 << (bits - 1)
    scale = _first(x, np.abs(x).argmax(axis=1)) / np.float32(-half)
    return {"d": scale[:, 0], **_codes(np.trunc(x * _inverse(scale) + np.float32(half + 0.5)), bits)}


def _above_minimum(x: Floats, bits: int) -> Fields:
    """Quantizes to Q4_1, Q5_1: the range is spread over all codes."""
    low = _first(x, x.argmin(axis=1))
    scale = np.abs(x.max(axis=1, keepdims=True) - low) / np.float32((1 << bits) - 1)
    codes = _codes(np.trunc((x - low) * _inverse(scale) + np.float32(0.5)), bits)
    return {"d": scale[:, 0], "m": low[:, 0], **codes}


def _around_zero_weighted(x: Floats, importance: Floats, bits: int) -> Fields:
    """Quantizes to Q4_0, Q5_0 with the scale that the search finds."""
    half = 1 << (bits - 1)
    scale = _float16(_search_around_zero(x, half, _weights(x, importance)))
    return {"d": scale[:, 0], **_codes((np.rint(x * _inverse(scale)) + np.float32(half)).clip(0), bits)}


def _above_minimum_weighted(x: Floats, importance: Floats, bits: int) -> Fields:
    """Quantizes to Q4_1, Q5_1 with scale and minimum that the search finds."""
    levels = (1 << bits) - 1
    scale, minimum = map(_float16, _search_affine(x, levels, _weights(x, importance)))
    codes = _codes(np.rint((x + minimum) * _inverse(scale)).clip(0, levels), bits)
    return {"d": scale[:, 0], "m": -minimum[:, 0], **codes}


def _float16(x: Floats) -> Floats:
    """Rounds to float16, the precision of a block's scales."""
    return x.astype(np.float16).astype(np.float32)


# Blocks of 256


def _with_minima(x: Floats, importance: Floats | None = None, *, bits: int) -> Fields:
    """Quantizes to Q4_K, Q5_K: eight groups of 32, with scales and minima of six bits in units of d and dmin."""
    groups, levels = x.reshape(-1, 32), (1 << bits) - 1
    found = _search_affine(groups, levels, _weights(groups, importance))
    units, sixths = zip(*(_in_units(part.reshape(-1, 8), 63) for part in found), strict=True)
    scale, minimum = (np.repeat(unit.astype(np.float32), 8) * sixth.reshape(-1)
                      for unit, sixth in zip(units, sixths, strict=True))
    scaled = (groups + minimum[:, None]) * _inverse(scale)[:, None]
    q = np.rint(scaled).clip(0, levels).astype(np.uint8).reshape(-1, 256)
    high = {"qh": _pack(q >> np.uint8(4), 1, 32)} if bits == 5 else {}
    return {"d": units[0], "dmin": units[1], "scales": _twelve_bytes(*sixths), "qs": _pack(q, 4, 32), **high}


def _in_units(parts: Floats, most: int) -> tuple[NDArray[np.float16], Bytes]:
    """Expresses nonnegative numbers, [n, 8], as multiples up to `most` of a float16 unit of each row."""
    unit = np.abs(parts.max(axis=1) / np.float32(most)).astype(np.float16)
    scaled = parts * _inverse(unit.astype(np.float32))[:, None]
    return unit, np.rint(scaled).clip(0, most).astype(np.uint8)


def _twelve_bytes(scales: Bytes, minima: Bytes) -> Bytes:
    """Packs scales and minima of six bits, [n, 8] each, for `blocks.six_bits`."""
    four, six, low = np.uint8(4), np.uint8(6), np.uint8(15)
    tops = [part[:, :4] | part[:, 4:] >> four << six for part in (scales, minima)]
    return np.concatenate([*tops, scales[:, 4:] & low | (minima[:, 4:] & low) << four], axis=1)


def _weights(x: Floats, importance: Floats | None = None) -> Floats:
    """Returns the weights of squared errors: larger for larger values and for important columns."""
    weights: Floats = np.abs(x) + np.sqrt(_sum(x * x) / np.float32(x.shape[1]))
    return weights if importance is None else weights * importance.reshape(x.shape)


def _sum(x: Floats) -> Floats:
    """Sums each row, [n, 1], every fourth number first."""
    fours = sum(np.hsplit(x, x.shape[1] // 4), np.zeros_like(x[:, :4]))
    return (fours[:, :1] + fours[:, 1:2]) + (fours[:, 2:3] + fours[:, 3:])


def _search_affine(x: Floats, levels: int, weights: Floats) -> tuple[Floats, Floats]:
    """Finds scales and minima, both at least 0, with x = scale * q - minimum, q up to `levels`: [n, 32] -> [n, 1].
    weights: of squared errors."""
    low = np.minimum(x.min(axis=1, keepdims=True), np.float32(0))
    width = x.max(axis=1, keepdims=True).clip(0) - low
    sums = _sum(weights), _sum(weights * x)
    best = [width / np.float32(levels), -low, np.full_like(low, -np.inf)]
    for step in _AFFINE_STEPS:
        q = np.rint((x - low) * (np.float32(levels + step) * _inverse(width))).clip(0, levels)
        found = _fit_affine(x, q, weights, sums)
        better = found[2] > best[2]
        best = [np.where(better, new, old) for new, old in zip(found, best, strict=True)]
    return best[0], best[1]


def _fit_affine(x: Floats, q: Floats, weights: Floats, sums: tuple[Floats, Floats]) -> tuple[Floats, Floats, Floats]:
    """Fits scale and minimum to codes by least squares; also returns the reduction of the squared error, [n, 1]."""
    weighted = weights * q
    total, sum_x = sums
    sum_q, sum_qq, sum_qx = _sum(weighted), _sum(weighted * q), _sum(weighted * x)
    determinant = total * sum_qq - sum_q * sum_q
    inverse = _inverse(np.where(determinant > np.float32(1e-6) * total * sum_qq, determinant, np.float32(0)))
    offset = (sum_qq * sum_x - sum_q * sum_qx) * inverse
    bent = offset <= 0
    scale = np.where(bent, (total * sum_qx - sum_q * sum_x) * inverse, sum_qx * _inverse(sum_qq))
    offset = np.where(bent, offset, np.float32(0))
    gain = np.where(scale > 0, scale * sum_qx + offset * sum_x, np.float32(-np.inf))
    return scale, -offset, gain


def _q6_k(x: Floats, importance: Floats | None = None) -> Fields:
    """Quantizes to Q6_K: sixteen groups of 16, each with a signed scale of eight bits in units of d."""
    groups = x.reshape(-1, 16)
    scales = _search_around_zero(groups, 32, _weights(groups, importance)).reshape(-1, 16)
    unit = (_first(scales, np.abs(scales).argmax(axis=1))[:, 0] / np.float32(-128)).astype(np.float16)
    eighths = np.rint(scales * _inverse(unit.astype(np.float32))[:, None]).clip(-128, 127)
    scale = np.repeat(unit.astype(np.float32), 16) * eighths.reshape(-1)
    q = (np.rint(groups * _inverse(scale)[:, None]).clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 256)
    return {"d": unit, "scales": eighths, "ql": _pack(q, 4, 64), "qh": _pack(q >> np.uint8(4), 2, 32)}


def _search_around_zero(x: Floats, half: int, weights: Floats) -> Floats:
    """Finds scales with x = scale * q, q from -half to half - 1: [n, 16] -> [n, 1]. The largest weight has q < 0.
    weights: of squared errors."""
    largest = _first(x, np.abs(x).argmax(axis=1))
    best = [np.zeros_like(largest), np.zeros_like(largest)]
    for step in _SYMMETRIC_STEPS:
        q = np.rint(x * (np.float32(-half + step) * _inverse(largest))).clip(-half, half - 1)
        weighted = weights * q
        product, inverse = _sum(weighted * x), _inverse(_sum(weighted * q))
        better = product * product * inverse > best[1]
        found = (product * inverse, product * product * inverse)
        best = [np.where(better, new, old) for new, old in zip(found, best, strict=True)]
    return best[0]


_ENCODERS: Final[Mapping[str, Callable[[Floats], Fields]]] = {
    "F32": _float,
    "F16": _float,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": partial(_around_zero, bits=4),
    "Q4_1": partial(_above_minimum, bits=4),
    "Q5_0": partial(_around_zero, bits=5),
    "Q5_1": partial(_above_minimum, bits=5),
    "Q4_K": partial(_with_minima, bits=4),
    "Q5_K": partial(_with_minima, bits=5),
    "Q6_K": _q6_k,
    **four_bits.ENCODERS,
}
_WEIGHTED: Final[Mapping[str, Callable[[Floats, Floats], Fields]]] = {
    "Q4_0": partial(_around_zero_weighted, bits=4),
    "Q4_1": partial(_above_minimum_weighted, bits=4),
    "Q5_0": partial(_around_zero_weighted, bits=5),
    "Q5_1": partial(_above_minimum_weighted, bits=5),
    "Q4_K": partial(_with_minima, bits=4),
    "Q5_K": partial(_with_minima, bits=5),
    "Q6_K": _q6_k,
}
"""Encoders that use the importance of each value. Q8_0 keeps the largest value exact and needs no search."""
_LAYOUTS: Final = {**LAYOUTS, **four_bits.LAYOUTS}
