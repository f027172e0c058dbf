"""Packed matrices hold what their GGUF blocks hold, laid out as csrc/matrix.hpp says."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import byref
from typing import Any

import numpy as np
import pytest
from four_bit_cases import E2M1, E4M3, numbers_of, random_four_bits
from numpy.typing import NDArray
from test_gguf_blocks import READABLE as IN_FILES
from test_gguf_blocks import random_rows

from deltic.loader import four_bits
from deltic.loader.gguf import blocks
from deltic.loader.gguf.blocks import IQ4_VALUES, MXFP4_VALUES, decode
from deltic.ops.cpu import missing
from deltic.ops.cpu.library import MatrixStruct, library

pytestmark = pytest.mark.skipif(bool(missing()), reason=str(missing()))

Bytes = NDArray[np.uint8]
GUARD = 4096
"""Bytes behind a packed matrix that must stay unchanged."""

BY_NAME = {**blocks.BY_NAME, **four_bits.TYPES}
READABLE = (*IN_FILES, *four_bits.TYPES)
WORDS = ("F32", "F16", "BF16")
by_name = pytest.mark.parametrize("name", READABLE)


def shapes(name: str) -> Iterator[tuple[int, int]]:
    """Yields numbers of rows and columns that the type can have."""
    for columns in (1, 3, 7, 64) if name in WORDS else (32, 96, 256, 512):
        if columns % BY_NAME[name].weights == 0:
            yield from ((rows, columns) for rows in (1, 15, 16, 17, 40))


def packed_bytes(name: str, rows: int, columns: int) -> int:
    size: int = library().deltic_packed_bytes(BY_NAME[name].id, rows, columns)
    return size


def pack(name: str, raw: Bytes, columns: int, cuts: tuple[int, ...] = ()) -> Bytes:
    """The packed matrix of the file's rows in `raw`, packed in several calls that start at the rows in `cuts`."""
    size = packed_bytes(name, len(raw), columns)
    buffer = np.full(size + GUARD, 0xAA, np.uint8)
    for first, end in zip((0, *cuts), (*cuts, len(raw)), strict=True):
        part = raw[first:end].copy()
        library().deltic_pack(BY_NAME[name].id, part.ctypes.data, first, len(part), columns, buffer.ctypes.data)
    assert (buffer[size:] == 0xAA).all()
    return buffer[:size]


def unpack(name: str, packed: Bytes, shape: tuple[int, int], rows: NDArray[np.int64]) -> NDArray[np.float32]:
    matrix = MatrixStruct(BY_NAME[name].id, *shape, packed.ctypes.data)
    out = np.full(len(rows) * shape[1] + GUARD, 77, np.float32)
    library().deltic_unpack_rows(byref(matrix), rows.ctypes.data, len(rows), out.ctypes.data)
    assert (out[out.size - GUARD:] == 77).all()
    return out[:out.size - GUARD].reshape(len(rows), shape[1])


def numbers(name: str, raw: Bytes) -> NDArray[np.float32]:
    if name in four_bits.TYPES:
        with np.errstate(all="ignore"):
            return numbers_of(name, raw)
    return decode(raw.reshape(-1), BY_NAME[name]).reshape(len(raw), -1)


def same(found: NDArray[np.float32], expected: NDArray[np.float32]) -> bool:
    """Equal to the bit, except for what NaN is made of."""
    nan = np.isnan(expected)
    return np.array_equal(np.isnan(found), nan) and np.array_equal(found[~nan].view(np.uint32),
                                                                   expected[~nan].view(np.uint32))


def file_rows(name: str, rows: int, columns: int, seed: int = 0) -> Bytes:
    if name in four_bits.TYPES:
        return random_four_bits(name, rows, columns, seed)
    return random_rows(name, rows, columns // BY_NAME[name].weights, seed)


@by_name
def test_unpacked_rows_equal_the_file(name: str) -> None:
    for rows, columns in shapes(name):
        raw, rng = file_rows(name, rows, columns), np.random.default_rng(rows)
        packed, expected = pack(name, raw, columns), numbers(name, raw)
        for order in (np.arange(rows), rng.permutation(rows), rng.integers(0, rows, 5), np.arange(0)):
            assert same(unpack(name, packed, (rows, columns), order), expected[order]), (rows, columns)


@pytest.mark.parametrize("name", IN_FILES)
def test_random_bits_are_unpacked(name: str) -> None:
    """Infinite, NaN and subnormal scales have the values that `decode` gives them."""
    raw = np.random.default_rng(3).integers(0, 256, (512, BY_NAME[name].size(256)), np.uint8)
    assert same(unpack(name, pack(name, raw, 256), (512, 256), np.arange(512)), numbers(name, raw))


@pytest.mark.parametrize("name", ["F16", "Q8_0", "MXFP4"])
def test_every_scale_is_unpacked(name: str) -> None:
    raw = np.zeros((1 << 16, BY_NAME[name].nbytes), np.uint8)
    raw[:, :2] = np.arange(1 << 16, dtype=np.uint16).view(np.uint8).reshape(-1, 2)
    raw[:, 2:] = 1
    columns = BY_NAME[name].weights
    assert same(unpack(name, pack(name, raw, columns), (1 << 16, columns), np.arange(1 << 16)), numbers(name, raw))


def test_every_e4m3_scale_is_unpacked() -> None:
    raw = random_four_bits("NVFP4", 127, 256)
    raw.reshape(-1).view(four_bits.LAYOUTS["NVFP4"])["scales"] = np.arange(127)[:, None]
    assert same(unpack("NVFP4", pack("NVFP4", raw, 256), (127, 256), np.arange(127)), numbers("NVFP4", raw))


@by_name
def test_matrix_packed_in_parts(name: str) -> None:
    columns = 7 if name in WORDS else 512
    raw = file_rows(name, 40, columns)
    whole = pack(name, raw, columns)
    for cuts in ((16,), (32,), (16, 32)):
        assert np.array_equal(pack(name, raw, columns, cuts), whole), cuts


@by_name
def test_missing_rows_are_zero(name: str) -> None:
    """All bits of missing rows in a panel are zero."""
    for rows, columns in shapes(name):
        raw = file_rows(name, rows, columns)
        padding = np.arange(rows, -(-rows // 16) * 16)
        assert not unpack(name, pack(name, raw, columns), (rows, columns), padding).any(), (rows, columns)
        ones = np.full((16, raw.shape[1]), 255, np.uint8)
        last, full = (np.unpackbits(pack(name, part, columns)).sum() for part in (ones[:rows % 16], ones))
        assert last * 16 == full * (rows % 16), (rows, columns)


@by_name
def test_packed_sizes_equal_file_sizes(name: str) -> None:
    for columns in (256, 512, 2048):
        for rows in (16, 48):
            assert packed_bytes(name, rows, columns) == rows * BY_NAME[name].size(columns)
        assert packed_bytes(name, 17, columns) == packed_bytes(name, 32, columns)
        assert packed_bytes(name, 0, columns) == 0


def test_types_without_packed_form_are_refused() -> None:
    size = library().deltic_packed_bytes
    for type in BY_NAME.values():
        wrong = [(16, 0), (16, -256), (-1, 256), (-16, 256)]
        wrong += [(16, columns) for columns in (1, 31, 255, 257) if columns % type.weights]
        wrong += [(1 << 62, 1 << 20), (16, (1 << 63) - 256), ((1 << 63) - 1, 256)]
        assert {size(type.id, *shape) for shape in wrong} == {-1}, type
        assert (size(type.id, 16, 256) > 0) == (type.name in READABLE)
    assert {size(id, 16, 256) for id in (-1, 4, 5, 9, 15, 31, 1 << 32, 1000)} == {-1}
    assert size(BY_NAME["BF16"].id, 3, 5) == 3 * 64 and size(BY_NAME["F16"].id, 3, 5) == 5 * 32


# The layouts, implemented a second time after the comments of csrc/matrix.hpp.

PLANES = {"Q8_0": (8,), "Q5_0": (4, 1), "Q5_1": (4, 1), "Q5_K": (4, 1), "Q6_K": (4, 2), "Q3_K": (2, 1), "Q2_K": (2,)}
"""Bits of the planes of codes; all others have one of four."""
HEADERS = {"Q4_0": 32, "Q5_0": 32, "Q8_0": 32, "IQ4_NL": 32, "Q4_1": 64, "Q5_1": 64, "MXFP4": 16,
           "Q4_K": 256, "Q5_K": 256, "Q2_K": 320, "Q6_K": 288, "Q3_K": 224, "IQ4_XS": 128}
"""Bytes in front of the codes."""
RUNS = {"NVFP4": 64, "INT4_32": 32, "INT4_64": 64, "INT4_128": 128}
"""Columns of types that have 64 bytes of scales in front of the codes of so many columns."""


def code(name: str, block: Any, row: int, k: int) -> int:
    planes = PLANES.get(name, (4,))
    at = HEADERS.get(name, 0) + k // 32 * 64 * sum(planes)
    if name in RUNS:
        at += 64 * (k // RUNS[name] + 1) + 64 * (name == "NVFP4")
    i, b = k % 32 // 4, k % 4
    result = position = 0
    for bits in planes:
        vector, shift = {8: (i, 0), 4: (i % 4, i // 4 * 4), 2: (i // 4, i % 4 * 2), 1: (0, i)}[bits]
        result |= (block[at + vector * 64 + row * 4 + b] >> shift & (1 << bits) - 1) << position
        at += bits * 64
        position += bits
    return result


def weight(name: str, block: Any, row: int, k: int) -> Any:
    """The number in column k of a packed block of 16 rows."""
    q, g32, g16 = code(name, block, row, k), k // 32, k // 16
    half = [np.array(block[at + 2 * row:at + 2 * row + 2], np.uint8).view(np.float16)[0].astype(np.float32)
            for at in (0, 32)]
    d, single = half[0], np.float32

    def byte(at: int, index: int) -> int:
        value: int = block[at + 16 * index + row]
        return value

    def six(groups: int, g: int) -> int:
        low, high = byte(32, g // 2), byte(32 + 16 * (groups // 2), g // 4)
        return (low >> 4 * (g % 2) & 15 | (high >> 2 * (g % 4) & 3) << 4) - 32

    def word(at: int) -> Any:
        return np.array(block[at + 4 * row:at + 4 * row + 4], np.uint8).view(np.uint32)[0]

    if name == "NVFP4":
        own = E4M3[byte(64 + k // 64 * 576, g16 % 4)]
        return E2M1[q] * (own * (word(0).view(np.float32) / single(128)))
    if name in RUNS:
        scale = word(k // RUNS[name] * (64 + 8 * RUNS[name]))
        return (single(q) - single(scale & 255)) * (scale & np.uint32(0xffffff00)).view(np.float32)
    if name in ("Q4_0", "Q5_0", "Q8_0"):
        return d * single(q - {"Q4_0": 8, "Q5_0": 16, "Q8_0": 128}[name])
    if name in ("Q4_1", "Q5_1"):
        return d * single(q) + half[1]
    if name == "IQ4_NL":
        return d * single(IQ4_VALUES[q])
    if name == "MXFP4":
        return np.ldexp(single(1), byte(0, 0) - 128) * single(MXFP4_VALUES[q])
    if name in ("Q4_K", "Q5_K"):
        low, high = byte(64, g32), byte(64 + 128, g32 // 2) >> 4 * (g32 % 2)
        scale, minimum = low & 15 | (high & 3) << 4, low >> 4 | (high >> 2 & 3) << 4
        return d * single(scale) * single(q) - half[1] * single(minimum)
    if name == "Q2_K":
        return d * single(byte(64, g16) & 15) * single(q) - half[1] * single(byte(64, g16) >> 4)
    if name == "Q6_K":
        return d * single(np.uint8(byte(32, g16)).astype(np.int8)) * single(q - 32)
    if name == "Q3_K":
        return d * single(six(16, g16)) * single(q - 4)
    return d * single(six(8, g32)) * single(IQ4_VALUES[q])


@pytest.mark.parametrize("name", sorted({**HEADERS, **RUNS}))
def test_quantized_block_layout(name: str) -> None:
    width, nbytes = BY_NAME[name].weights, BY_NAME[name].nbytes * 16
    raw = file_rows(name, 19, 2 * width)
    blocks = pack(name, raw, 2 * width).reshape(2, 2, nbytes).tolist()
    with np.errstate(all="ignore"):
        found = [[weight(name, blocks[row // 16][column // width], row % 16, column % width)
                  for column in range(2 * width)] for row in range(19)]
    assert same(np.array(found, np.float32), numbers(name, raw))


@pytest.mark.parametrize("name", [name for name in sorted(HEADERS) if BY_NAME[name].weights == 32])
def test_layout_of_eight_small_blocks(name: str) -> None:
    """Field after field of the eight blocks, then their codes."""
    nbytes, field = BY_NAME[name].nbytes, 16 if name == "MXFP4" else 32
    raw = file_rows(name, 19, 256)
    single = [pack(name, np.ascontiguousarray(raw[:, i * nbytes:(i + 1) * nbytes]), 32).reshape(2, -1)
              for i in range(8)]
    heads = [block[:, at:at + field] for at in range(0, HEADERS[name], field) for block in single]
    expected = np.concatenate([*heads, *(block[:, HEADERS[name]:] for block in single)], axis=1)
    assert np.array_equal(pack(name, raw, 256).reshape(2, -1), expected)


def test_layout_of_plain_columns() -> None:
    for name, kind in (("F32", np.uint32), ("F16", np.uint16)):
        raw = file_rows(name, 19, 5)
        found = pack(name, raw, 5).view(kind).reshape(2, 5, 16).transpose(0, 2, 1).reshape(32, 5)
        assert np.array_equal(found[:19], raw.view(kind)) and not found[19:].any()
    raw = file_rows("BF16", 19, 5)
    found = pack("BF16", raw, 5).view(np.uint16).reshape(2, 3, 16, 2).transpose(0, 2, 1, 3).reshape(32, 6)
    assert np.array_equal(found[:19, :5], raw.view(np.uint16)) and not found[19:].any() and not found[:, 5].any()
