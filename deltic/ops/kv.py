"""Formats of K/V in pages: the model's dtype, float8 e4m3 with a scale of 1, int8 or int4.

int8: each head vector is rounded to the nearest of -127 .. 127 times its scale, which is its largest magnitude / 127. A
token has [kv_heads, D + 4] bytes: the codes of all heads, then their float32 scales.

int4: each head vector is rotated (`rotated`), so that its numbers are spread like those of a normal distribution, and
rounded to 2^bits levels: 5 bits for keys, because their errors change the attention weights, and 4 bits for values.
Levels are denser near zero, where most numbers are: level c stands for u * (u^2 + 2 h^2) * scale, with h = 2^(bits - 1)
and u = c + 3/4 - h, exact in float32. The sign of the scale decides which side has the outermost level. Of twelve
scales, six of each sign, the vector gets the scale whose levels have the largest cosine with it. The scale is then
adapted so that the product of the rounded vector with the vector itself is right. A vector's bytes depend only on it.
A token has [kv_heads, bits * D / 8 + 2] bytes: the low four bits of all heads, two numbers to a byte; the fifth bits of
keys, eight to a byte; the bfloat16 scales.
Queries are rotated in the same way, which keeps their products with keys; outputs are rotated back.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import torch
from torch import Tensor

FP8, INT8, INT4 = torch.float8_e4m3fn, torch.int8, torch.uint8
PACKED = frozenset({INT8, INT4})
"""dtypes of pages that store codes and scales as bytes."""
INT8_DIM = 1024
"""Maximum head_dim for int8: sums over this many products of codes fit 32 bits."""
KEY_BITS, VALUE_BITS = 5, 4
_LARGEST = 448.0
_SMALLEST_SCALE = 2.0**-100
"""Vectors with a smaller scale are stored as zeros, so that the inverse of a scale is finite."""
SCALES = tuple(parts / 32 for parts in (22, 25, 28, 30, 32, 35))
"""Scales that are tried with both signs, relative to the scale that maps the outermost level to the largest number."""
INVERSE = (0.98277253, -0.32738898, 0.13833282, -0.02469429)
"""Coefficients for the inverse of w = t + t^3 / 2: t is about w times this polynomial of w^2."""


def name_of(dtype: torch.dtype) -> str:
    """Returns the name of a K/V dtype."""
    return "int4" if dtype == INT4 else str(dtype).removeprefix("torch.")


def width(dim: int, bits: int, dtype: torch.dtype) -> int:
    """Returns the entries per head vector in pages: bytes for int8 and int4. bits: per number, for int4."""
    if dtype == INT8:
        return dim + 4
    return dim * bits // 8 + 2 if dtype == INT4 else dim


def as_bytes(x: Tensor) -> Tensor:
    """Returns a view of bytes if x is float8, which torch cannot index, otherwise x itself."""
    return x.view(torch.uint8) if x.dtype == FP8 else x


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds to the dtype of pages. float8 has no infinity: larger numbers become 448, in every version of torch."""
    return (x.clamp(-_LARGEST, _LARGEST) if dtype == FP8 else x).to(dtype)


def store(pool: Tensor, places: Tensor, x: Tensor) -> None:
    """Writes x [T, kv_heads, head_dim] to places page * PAGE + offset of pages [P, PAGE, kv_heads, width]."""
    if pool.dtype == INT4:
        x = pack(rotated(x), (pool.shape[-1] - 2) * 8 // x.shape[-1])
    if pool.dtype == INT8:
        x = pack_int8(x)
    as_bytes(pool).flatten(0, 1).index_copy_(0, places, as_bytes(rounded(x, pool.dtype)))


def take(pool: Tensor, dim: int, index: Tensor) -> Tensor:
    """Returns `index_select` of a pool. Also supports float8."""
    return as_bytes(pool).index_select(dim, index).view(pool.dtype)


def is_finite(x: Tensor) -> bool:
    """Returns True if all numbers are finite. Needs one or two passes and, unlike `isfinite`, no large tensor.

    x: for int8 and int4 [..., kv_heads, width]."""
    if not x.numel():
        return True
    if x.dtype in PACKED:
        kind = torch.bfloat16 if x.dtype == INT4 else torch.float32
        scales = x.flatten(-2)[..., -kind.itemsize * x.shape[-2]:].contiguous().view(kind)
        return bool(scales.isfinite().all())
    if x.dtype == FP8:  # in NaN, all bits except the sign are set
        return int(x.view(torch.int8).max()) < 0x7f and int(x.view(torch.uint8).max()) < 0xff
    return all(bool(bound.isfinite()) for bound in torch.aminmax(x))


def read(stored: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Returns entries of pages [..., kv_heads, width] as numbers [..., kv_heads, dim]; int4 stays rotated."""
    if stored.dtype == INT8:
        return unpack_int8(stored, dim, dtype)
    return unpack(stored, dim, dtype) if stored.dtype == INT4 else stored.to(dtype)


# int8


def pack_int8(x: Tensor) -> Tensor:
    """Encodes x [T, kv_heads, D] -> bytes [T, kv_heads, width]. NaN or inf make the scale non-finite."""
    wide = x if x.dtype == torch.float64 else x.float()
    largest = wide.abs().amax(-1, keepdim=True)
    small = largest < _SMALLEST_SCALE
    codes = (wide * torch.where(small, 0, 127 / largest)).nan_to_num(0).round().to(INT8)
    scales = torch.where(small, 0, largest / 127).float().view(INT8)
    whole: Tensor = torch.cat((codes.flatten(-2), scales.flatten(-2)), -1).unflatten(-1, (x.shape[-2], -1))
    return whole


def unpack_int8(stored: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Decodes stored [..., kv_heads, width] -> [..., kv_heads, dim]."""
    heads = stored.shape[-2]
    codes, scales = stored.flatten(-2).split((heads * dim, heads * 4), -1)
    wide = torch.promote_types(dtype, torch.float32)
    scale = scales.contiguous().view(torch.float32)[..., None].to(wide)
    return torch.mul(codes.unflatten(-1, (heads, dim)).to(wide), scale).to(dtype)


# int4


@cache
def _signs(dim: int, device: torch.device) -> Tensor:
    """Returns signs [dim] of a bent sequence. With them a Hadamard transform spreads equal numbers over all places."""
    index = torch.arange(dim)
    pairs = index & index >> 1
    parity = torch.stack([pairs >> bit & 1 for bit in range(0, dim.bit_length(), 2)]).sum(0) & 1
    return (1.0 - 2.0 * parity).to(device)


def _hadamard(x: Tensor) -> Tensor:
    step, size = 1, x.shape[-1]
    while step < size:
        left, right = x.unflatten(-1, (-1, 2, step)).unbind(-2)
        x = torch.stack((left + right, left - right), -2).flatten(-3)
        step *= 2
    return torch.mul(x, size**-0.5)


def rotated(x: Tensor) -> Tensor:
    """Returns the signed Hadamard transform of x [..., D], D a power of two, in float32 or float64."""
    wide = x if x.dtype == torch.float64 else x.float()
    return _hadamard(wide * _signs(x.shape[-1], x.device))


def rotated_back(x: Tensor) -> Tensor:
    """Inverts `rotated`."""
    wide = x if x.dtype == torch.float64 else x.float()
    return _hadamard(wide) * _signs(x.shape[-1], x.device)


def curve(u: Tensor, half: float) -> Tensor:
    """Returns the levels for u = code + 3/4 - half, in units of the scale."""
    return u * (u * u + 2 * half * half)


def pack(x: Tensor, bits: int) -> Tensor:
    """Encodes rotated x [T, kv_heads, D] -> bytes [T, kv_heads, width]. NaN or inf make the scale non-finite."""
    half = 2.0**(bits - 1)
    largest = (half - 0.25) * ((half - 0.25) ** 2 + 2 * half * half)
    unit = x.abs().amax(-1, keepdim=True) / largest
    unit = torch.where(unit < _SMALLEST_SCALE, 0, unit)
    x = x * torch.where(unit == 0, 0, 1 / unit)
    codes, dot, norm = _round(x, SCALES[0], 1.0, half)
    for scale, sign in product(SCALES, (1.0, -1.0)):
        others, other_dot, other_norm = _round(x, scale, sign, half)
        better = other_dot * other_dot * norm > dot * dot * other_norm
        codes = torch.where(better, others, codes)
        dot, norm = torch.where(better, other_dot, dot), torch.where(better, other_norm, norm)
    scales = torch.where(unit == 0, 0, unit * ((x * x).sum(-1, keepdim=True) / dot)).bfloat16()
    codes = codes.to(torch.uint8)
    even, odd = (codes & 15).unflatten(-1, (-1, 2)).unbind(-1)
    parts = [even | odd << 4]
    if bits == KEY_BITS:
        eighths = (codes >> 4).unflatten(-1, (-1, 8))
        parts.append((eighths << torch.arange(8, device=x.device)).sum(-1).to(torch.uint8))
    parts.append(scales.contiguous().view(torch.uint8))
    whole: Tensor = torch.cat([part.flatten(-2) for part in parts], -1).unflatten(-1, (x.shape[-2], -1))
    return whole


def _round(x: Tensor, scale: float, sign: float, half: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the codes of x for a scale, the dot product of their levels with x, and the levels' sum of squares. The
    largest magnitude in x is that of the outermost level."""
    w = (x * (0.5 * half**-3 / scale)).clamp(-1.5, 1.5)
    square, inverse = w * w, torch.full_like(w, INVERSE[-1])
    for factor in INVERSE[-2::-1]:
        inverse = inverse * square + factor
    codes = (w * inverse * (sign * half) + (half - 0.75)).nan_to_num(0).clamp(0, 2 * half - 1).round()
    levels = curve(codes - (half - 0.75), half)
    return codes, (levels * x).sum(-1, keepdim=True), (levels * levels).sum(-1, keepdim=True)


def unpack(stored: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Decodes stored [..., kv_heads, width] -> [..., kv_heads, dim], still rotated."""
    heads, bits = stored.shape[-2], (stored.shape[-1] - 2) * 8 // dim
    sizes = [heads * dim // 2, heads * dim // 8 * (bits - 4), heads * 2]
    low, high, scale = stored.flatten(-2).split(sizes, -1)
    codes = torch.stack((low & 15, low >> 4), -1).flatten(-2)
    if bits == KEY_BITS:
        fifths = (high[..., None] >> torch.arange(8, device=stored.device, dtype=torch.uint8) & 1).flatten(-2)
        codes = codes | fifths << 4
    half, wide = 2.0**(bits - 1), torch.promote_types(dtype, torch.float32)
    levels = curve(codes.to(wide) - (half - 0.75), half).unflatten(-1, (heads, dim))
    return torch.mul(levels, scale.contiguous().view(torch.bfloat16)[..., None].to(wide)).to(dtype)
