"""GGUF blocks as codes with a scale and a bias for each group of 32 columns: code * scale + bias."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from deltic.loader.gguf.blocks import BY_NAME, LAYOUTS, Blocks, Bytes, Floats, decode, fields_of, six_bits

GROUP: Final = 32


@dataclass(frozen=True, slots=True)
class AffineBlocks:
    """codes [rows, columns] uint8. scales, biases [rows, columns / GROUP] float32. bits: bits of a code."""

    codes: Bytes
    scales: Floats
    biases: Floats
    bits: int


def _q4_0(b: Blocks) -> tuple[Bytes, Any, Any]:
    scale = b["d"].astype(np.float32)
    return fields_of(b["qs"], 4, 16), scale, -8 * scale


def _q4_1(b: Blocks) -> tuple[Bytes, Any, Any]:
    return fields_of(b["qs"], 4, 16), b["d"].astype(np.float32), b["m"].astype(np.float32)


def _q8_0(b: Blocks) -> tuple[Bytes, Any, Any]:
    scale = b["d"].astype(np.float32)
    return (b["qs"].view(np.uint8) ^ np.uint8(128)), scale, -128 * scale


def _q4_k(b: Blocks) -> tuple[Bytes, Any, Any]:
    scales, minima = six_bits(b["scales"])
    scale, minimum = (b[name].astype(np.float32)[:, None] for name in ("d", "dmin"))
    return fields_of(b["qs"], 4, 32), scale * scales, -minimum * minima


_EXACT: Final[Mapping[str, tuple[int, Callable[[Blocks], tuple[Bytes, Any, Any]]]]] = {
    "Q4_0": (4, _q4_0), "Q4_1": (4, _q4_1), "Q8_0": (8, _q8_0), "Q4_K": (4, _q4_k)}
"""Block types with an affine form -> bits of a code, and a function that returns codes, scales and biases."""


def affine_rows(type: str, raw: Bytes, rows: int) -> AffineBlocks | Floats:
    """Returns blocks of a type as affine codes if the type has this form; otherwise their values [rows, columns]."""
    raw = np.ascontiguousarray(raw).reshape(-1)
    if type not in _EXACT:
        return decode(raw, BY_NAME[type]).reshape(rows, -1)
    bits, parts = _EXACT[type]
    codes, scales, biases = parts(raw.view(LAYOUTS[type]))
    return AffineBlocks(codes.reshape(rows, -1), scales.reshape(rows, -1), biases.reshape(rows, -1), bits)
