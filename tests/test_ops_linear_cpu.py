"""Linear layers on packed matrices: at every processor level, every type gives the products that csrc/deltic.h
promises, and a row of them has the same bits however many tokens, threads and parts there are."""

from __future__ import annotations

import subprocess
import sys
from ctypes import byref
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from four_bit_cases import numbers_of, random_four_bits
from native_pools import at_every_level, best_level, naming, pool, using
from numpy.typing import NDArray
from op_cases import same_bits
from test_gguf_blocks import READABLE as IN_FILES
from test_gguf_blocks import random_rows
from test_gguf_blocks import theirs as numbers_in_files
from torch import Tensor

from deltic.loader import four_bits
from deltic.loader.gguf import blocks
from deltic.ops.cpu import missing
from deltic.ops.cpu.kernels import native_weight
from deltic.ops.cpu.library import LEVELS, library
from deltic.ops.memory import Arena
from deltic.ops.quantized import QTensor, pack_rows

pytestmark = pytest.mark.skipif(bool(missing()), reason=str(missing()))

Exact = NDArray[np.float64]
WORDS = ("F32", "F16", "BF16")
BY_NAME, LAYOUTS = {**blocks.BY_NAME, **four_bits.TYPES}, {**blocks.LAYOUTS, **four_bits.LAYOUTS}
READABLE = (*IN_FILES, "NVFP4", "INT4_32", "INT4_128")
ROWS = (1, 15, 17, 37)
TOKENS = (1, 2, 3, 5, 7, 8, 9, 12, 13, 25)
COLUMNS = {name: tuple(columns for columns in ((7, 96, 256, 1280) if name in WORDS else (32, 96, 256, 512, 1280))
                       if columns % BY_NAME[name].weights == 0) for name in READABLE}
TOLERANCE = {"F32": 1e-6, "F16": 1e-6, "BF16": 1e-6}
"""Of sums of up to 1280 float32 products; the integer sums of all other types are exact."""
GUARD, CANARY = 67, -7e33
by_name = pytest.mark.parametrize("name", READABLE)


def file_rows(name: str, rows: int, columns: int) -> NDArray[np.uint8]:
    """Rows of random blocks whose scales are of like size, so that every group tells in every sum."""
    if name in four_bits.TYPES:
        return random_four_bits(name, rows, columns)
    raw, rng = random_rows(name, rows, columns // BY_NAME[name].weights), np.random.default_rng(columns)
    fields = raw.reshape(-1).view(LAYOUTS[name])
    for field in {"d", "dmin", "m", "x"} & set(LAYOUTS[name].names or ()):
        values = (rng.uniform(0.5, 1, fields.shape) * rng.choice([-1.0, 1.0], fields.shape)).astype(np.float32)
        fields[field] = values.view(np.uint32) >> 16 if name == "BF16" else values
    if name == "MXFP4":
        fields["e"] = rng.integers(126, 129, fields.shape)
    return raw


def theirs(name: str, raw: NDArray[np.uint8]) -> Any:
    return numbers_of(name, raw) if name in four_bits.TYPES else numbers_in_files(name, raw)


def packed(name: str, raw: NDArray[np.uint8], columns: int) -> QTensor:
    flat = raw.reshape(-1)
    return pack_rows(name, BY_NAME[name].id, len(raw), columns, raw.shape[1], lambda start, count: flat[start:][:count],
                     Arena())


@cache
def layer(name: str, rows: int, columns: int) -> tuple[QTensor, Exact]:
    """A packed matrix, and its numbers as gguf-py reads them. One of fewer rows has the first of these."""
    raw = file_rows(name, max(rows, ROWS[-1]), columns)[:rows]
    return packed(name, raw, columns), theirs(name, raw).astype(np.float64)


@cache
def activations(tokens: int, columns: int) -> Tensor:
    """Tokens of very different size, one of which is zero, and one whose first 32 numbers are."""
    rng = torch.Generator().manual_seed(columns)
    x = torch.randn(tokens, columns, generator=rng) * torch.logspace(-3, 3, tokens)[:, None]
    x[3 % tokens] = 0
    x[-1, :32 if columns > 32 else 5] = 0
    return x


def rounded(name: str, x: Tensor) -> Exact:
    """What the type's kernels make of activations, in the same float32 operations, so that ties fall the same way."""
    if name in ("F32", "F16"):
        return np.asarray(x.double())
    if name == "BF16":
        return np.asarray(x.bfloat16().double())
    blocks = x.numpy().reshape(-1, 256 if x.shape[1] % 256 == 0 else 32)
    most = abs(blocks).max(axis=1, keepdims=True)
    codes = np.rint(blocks * (np.float32(127) / np.where(most, most, np.float32(1))))
    return (codes.astype(np.float64) * (most / np.float32(127))).reshape(x.shape)


def multiply(x: Tensor, *parts: QTensor) -> Tensor:
    """x times the transpose of all parts, at odd addresses: all is written, and nothing beside it."""
    tokens, rows = len(x), sum(map(len, parts))
    given, memory = torch.empty(x.numel() + 1)[1:].view_as(x).copy_(x), torch.full((tokens * rows + 2 * GUARD,), CANARY)
    y = memory[GUARD:GUARD + tokens * rows].fill_(torch.nan)
    weight = native_weight(parts)
    pool().call(library().deltic_linear, given.data_ptr(), tokens, byref(weight), y.data_ptr())
    assert bool((memory[:GUARD] == CANARY).all()) and bool((memory[GUARD + tokens * rows:] == CANARY).all())
    return y.view(tokens, rows)


def error(found: Tensor, x: Exact, numbers: Exact, wanted: Exact) -> float:
    """Relative RMS, every token and row of weights counting as much as any other."""
    size = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(numbers, axis=1)
    size[size == 0] = 1
    return float(np.linalg.norm((found.double().numpy() - wanted) / size) / np.linalg.norm(wanted / size))


@by_name
@at_every_level
def test_products(name: str) -> None:
    """Products equal those of the rounded activations, and are near those of the exact ones."""
    for columns in COLUMNS[name]:
        x, (weight, numbers) = activations(25, columns), layer(name, ROWS[-1], columns)
        exact, near = np.asarray(x.double()), rounded(name, x)
        y = multiply(x, weight)
        assert not y[3].any() and bool(y.isfinite().all())
        assert error(y, near, numbers, near @ numbers.T) <= TOLERANCE.get(name, 3e-7), columns
        limit = {"F32": 1e-6, "F16": 1e-6, "BF16": 2.5e-3}.get(name, 1.2e-2)
        assert error(y, exact, numbers, exact @ numbers.T) <= limit, columns


@pytest.mark.parametrize("name", [name for name in READABLE if name not in WORDS])
def test_products_of_extreme_codes(name: str) -> None:
    """Codes of one sign, whose sums are as large as possible."""
    columns = COLUMNS[name][-1]
    raw = file_rows(name, 17, columns)
    fields = raw.reshape(-1).view(LAYOUTS[name])
    for byte in (0x00, 0x0f, 0x7f, 0x80, 0xf0, 0xff):
        for field in {"qs", "qh", "ql", "hmask"} & set(LAYOUTS[name].names or ()):
            fields[field].view(np.uint8)[:] = byte
        with naming(f"byte {byte:#x}"):
            assert_products_of_ones(packed(name, raw, columns), theirs(name, raw).astype(np.float64))


@at_every_level
def assert_products_of_ones(weight: QTensor, numbers: Exact) -> None:
    for tokens in (1, 2, 3, 13):
        x = torch.ones(tokens, numbers.shape[1])
        x[tokens // 2] = -1
        wanted = np.asarray(x.double()) @ numbers.T
        y = multiply(x, weight).double().numpy()
        assert (abs(y - wanted) <= 1e-5 * abs(numbers).sum(1) + 1e-6).all(), tokens


@by_name
@at_every_level
def test_row_and_token_counts_change_no_bit(name: str) -> None:
    for columns in COLUMNS[name]:
        x = activations(25, columns)
        whole = multiply(x, layer(name, ROWS[-1], columns)[0])
        for rows in ROWS:
            weight = layer(name, rows, columns)[0]
            for tokens in TOKENS:
                assert same_bits(multiply(x[-tokens:], weight), whole[-tokens:, :rows]), (columns, rows, tokens)
        assert multiply(x[:0], weight).shape == (0, ROWS[-1])


@by_name
def test_many_tokens_have_the_bits_of_few(name: str) -> None:
    """Tiles share unpacked weights, and the last ones are not full. Levels with exact sums of bytes and the same fma
    have the same bits, too."""
    columns, exact = COLUMNS[name][-1], LEVELS.index("avx512")
    x, weight, found = activations(141, columns), layer(name, ROWS[-1], columns)[0], []

    @at_every_level
    def check() -> None:
        wanted = torch.cat([multiply(piece, weight) for piece in x.split(3)])
        for tokens in (141, 132, 72, 69, 64, 61, 60, 24):
            assert same_bits(multiply(x[-tokens:], weight), wanted[-tokens:]), tokens
        found.append(wanted)

    check()
    if name not in WORDS:
        assert all(same_bits(other, found[exact]) for other in found[exact + 1:])


@by_name
@at_every_level
def test_threads_change_no_bit(name: str) -> None:
    """The matrix is large enough to be split over threads."""
    x = activations(13, 512)
    weight = layer(name, 395, 512)[0]
    wanted = multiply(x, weight)
    for threads in (1, 2, 5):
        with using(threads=threads):
            for tokens in (1, 13):
                assert same_bits(multiply(x[-tokens:], weight), wanted[-tokens:]), (threads, tokens)


@by_name
@at_every_level
def test_non_finite_activations_stay_in_their_token(name: str) -> None:
    for columns in (96, 512):
        if columns % BY_NAME[name].weights:
            continue
        x, weight = activations(13, columns), layer(name, ROWS[-1], columns)[0]
        wanted = multiply(x, weight)
        for (token, column), value in product(((0, 0), (3, columns - 1), (8, 33), (12, 64)), (np.nan, np.inf, -np.inf)):
            sick = x.clone()
            sick[token, column] = value
            y, others = multiply(sick, weight), [other for other in range(13) if other != token]
            assert not y[token].isfinite().any(), (columns, token, value)
            assert same_bits(y[others], wanted[others]), (columns, token, value)


@at_every_level
def test_parts_are_concatenated_rows() -> None:
    for names in (("Q4_K", "F32", "Q8_0", "BF16"), ("Q6_K", "Q2_K"), ("MXFP4", "Q5_1", "F16", "Q3_K"),
                  ("Q4_0", "F16", "Q5_1", "BF16"), ("IQ4_NL", "Q8_0"), ("F32", "F32", "F32", "F32")):
        columns = 512 if any(BY_NAME[name].weights == 256 for name in names) else 96
        parts = [layer(name, rows, columns)[0] for name, rows in zip(names, (17, 1, 37, 15), strict=False)]
        for tokens in (1, 2, 13):
            x = activations(tokens, columns)
            joined = torch.cat([multiply(x, part) for part in parts], 1)
            assert same_bits(multiply(x, *parts), joined), (names, tokens)
            assert not multiply(torch.zeros(tokens, columns), *parts).any(), (names, tokens)


@pytest.mark.parametrize("name", ["F16", "Q8_0", "Q4_1", "MXFP4"])
def test_every_scale(name: str) -> None:
    """Includes subnormal scales, and infinities and NaN, which stay in their row."""
    scales = np.arange(0, 1 << 16, 7) if name != "MXFP4" else np.arange(256)
    width, raw = BY_NAME[name].weights, np.zeros((len(scales), BY_NAME[name].nbytes), np.uint8)
    if name == "MXFP4":
        raw[:, 0] = scales
    else:
        raw[:, :2] = scales.astype(np.uint16).view(np.uint8).reshape(-1, 2)
    raw[:, 4:] = 1  # of Q4_1 the m are zero
    with np.errstate(invalid="ignore"):
        numbers = theirs(name, raw).astype(np.float64)
        wanted = 0.5 * numbers.sum(1)
    finite, sane = np.isfinite(numbers).all(1), abs(wanted) < 1e30  # sums of codes may be 2^16 times as large
    assert sane.sum() > len(scales) / 2
    weight = packed(name, raw, width)

    @at_every_level
    def check() -> None:
        y = multiply(torch.full((2, width), 0.5), weight).double().numpy()
        assert not np.isfinite(y[:, ~finite]).any()
        # subnormal results have fewer bits
        assert np.allclose(y[:, sane], wanted[sane], rtol=1e-6, atol=2e-45)

    check()


def beyond() -> None:
    """Multiply with everything at the very end of readable memory (run by the next test)."""
    import ctypes
    import mmap

    size, page = 1 << 20, mmap.PAGESIZE
    kept: list[Any] = []

    def at_the_end(values: Tensor, alignment: int = 4) -> Tensor:
        memory = mmap.mmap(-1, size + page)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + size), page, 0) == 0
        flat = values.reshape(-1)
        begin = (size - flat.nbytes) // alignment * alignment
        kept.append(memory)
        return torch.frombuffer(memory, dtype=flat.dtype, count=len(flat), offset=begin).copy_(flat)

    for name in READABLE:
        for columns in COLUMNS[name][:3]:
            weight, x = layer(name, 17, columns)[0], at_the_end(activations(13, columns))
            weight.matrix.data = (data := at_the_end(weight.data, 64)).data_ptr()
            y, struct = at_the_end(torch.full((13 * 17,), torch.nan)), native_weight(weight)
            for level in range(best_level() + 1):
                with using(level=level):
                    for tokens in (1, 13):
                        pool().call(library().deltic_linear, x.data_ptr(), tokens, byref(struct), y.data_ptr())
            assert bool(y.isfinite().all()) and len(data)


@pytest.mark.skipif(sys.platform != "linux", reason="protects memory as Linux does")
def test_kernels_stay_within_buffers() -> None:
    result = subprocess.run([sys.executable, "-c", "import test_ops_linear_cpu; test_ops_linear_cpu.beyond()"],
                            cwd=Path(__file__).parent, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr
