"""Quantized matrices in the form that the GPU's kernels read stand for the numbers that their blocks stand for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from four_bit_cases import numbers_of, random_four_bits

from deltic.loader.formats.fp8 import FLOAT8_BLOCK_BYTES, GROUP
from deltic.loader.four_bits import TYPES as FOUR_BITS
from deltic.loader.gguf.blocks import BY_NAME, LAYOUTS, decode
from deltic.ops.cuda.quantized import KINDS, Tiles, pack_tiles, serves, tiles_of

TYPES = ("Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q5_0", "IQ4_NL", "FP8", "MXFP4", *FOUR_BITS)


def random_blocks(type: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Any bits, but scales that are numbers: uint8 [rows, bytes]."""
    rng, kind = np.random.default_rng(seed), BY_NAME[type]
    raw = rng.integers(0, 256, (rows, kind.size(columns)), dtype=np.uint8)
    blocks = raw.reshape(-1).view(LAYOUTS[type])
    for name in ("d", "dmin"):
        if name in (LAYOUTS[type].names or ()):
            blocks[name] = (rng.random(len(blocks)) * 2e-3 + 1e-4).astype(np.float16)
    if type == "MXFP4":
        blocks["e"] = rng.integers(115, 121, len(blocks))
    return raw


def random_float8(rows: int, columns: int, seed: int) -> tuple[np.ndarray, torch.Tensor]:
    """Blocks with all codes that are numbers, uint8 [rows, bytes]; and these numbers, float64."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, columns // GROUP, FLOAT8_BLOCK_BYTES), dtype=np.uint8)
    raw[raw & 0x7f == 0x7f] -= 1  # NaN
    scales = (rng.random((rows, columns // GROUP, 1)) * 2e-4 + 1e-5).astype(np.float32)
    raw[..., :4] = scales.view(np.uint8)
    codes = torch.from_numpy(raw[..., 4:].copy()).view(torch.float8_e4m3fn).double()
    return raw.reshape(rows, -1), (codes * torch.from_numpy(scales).double()).flatten(1)


def packed(type: str, rows: int, columns: int, seed: int = 0, device: str = "cpu") -> tuple[Tiles, torch.Tensor]:
    """A matrix and the numbers it stands for, float64."""
    if type == "FP8":
        raw, numbers = random_float8(rows, columns, seed)
    elif type in FOUR_BITS:
        raw = random_four_bits(type, rows, columns, seed)
        numbers = torch.from_numpy(numbers_of(type, raw)).double()
    else:
        raw = random_blocks(type, rows, columns, seed)
        numbers = torch.from_numpy(decode(raw.reshape(-1), BY_NAME[type])).view(rows, columns).double()
    flat, width = raw.reshape(-1), raw.shape[1]
    tiles = pack_tiles(type, -1, rows, columns, width, lambda start, count: flat[start:start + count], device)
    return tiles, numbers


@pytest.mark.parametrize("rows", [8, 3, 43])
@pytest.mark.parametrize("type", TYPES)
def test_tiles_equal_the_blocks(type: str, rows: int) -> None:
    assert serves(type, 512) and not serves(type, 512 + 32)
    tiles, wanted = packed(type, rows, 512)
    assert tiles.shape == (rows, 512) and tiles.data.shape == (-(-rows // 8), 2 * KINDS[tiles.type].nbytes)
    found = tiles.dequantize()
    assert found.shape == wanted.shape and torch.allclose(found.double(), wanted, rtol=1e-6, atol=1e-9)
    ids = torch.tensor([rows - 1, 0, rows // 2, 0])
    assert torch.equal(tiles.lookup(ids), found[ids])


def test_tiles_of_plain_numbers() -> None:
    weight = torch.randn(21, 768).bfloat16()
    assert torch.equal(tiles_of(weight).dequantize(), weight.float())


def test_every_float8_number_is_exact_in_bfloat16() -> None:
    """Which the kernels make of it: its bits where bfloat16 has them, times 2^120."""
    codes = torch.arange(256, dtype=torch.int32)
    bits = (codes << 4 & 0x07f0 | codes << 8 & 0x8000).to(torch.int16)
    found, wanted = bits.view(torch.bfloat16).float() * 2.0**120, codes.to(torch.uint8).view(torch.float8_e4m3fn)
    sound = codes & 0x7f != 0x7f
    assert torch.equal(found[sound], wanted.float()[sound])
