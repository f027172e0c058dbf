"""Quantized matrices in the form that the GPU's kernels read stand for the numbers that their blocks stand for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deltic.ops.cuda.tiles import KINDS, Tiles, pack_tiles, serves, tiles_of
from deltic.weights.gguf.blocks import BY_NAME, LAYOUTS, decode

TYPES = ("Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q5_0", "IQ4_NL")


def random_blocks(type: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Any bits, but scales that are numbers: uint8 [rows, bytes]."""
    rng, kind = np.random.default_rng(seed), BY_NAME[type]
    raw = rng.integers(0, 256, (rows, kind.size(columns)), dtype=np.uint8)
    blocks = raw.reshape(-1).view(LAYOUTS[type])
    for name in ("d", "dmin"):
        if name in (LAYOUTS[type].names or ()):
            blocks[name] = (rng.random(len(blocks)) * 2e-3 + 1e-4).astype(np.float16)
    return raw


def packed(type: str, rows: int, columns: int, seed: int = 0, device: str = "cpu") -> tuple[Tiles, torch.Tensor]:
    """A matrix and the numbers it stands for, float64."""
    raw = random_blocks(type, rows, columns, seed)
    flat, width = raw.reshape(-1), raw.shape[1]
    tiles = pack_tiles(type, BY_NAME[type].id, rows, columns, width, lambda start, count: flat[start:start + count],
                       device)
    return tiles, torch.from_numpy(decode(flat, BY_NAME[type])).view(rows, columns).double()


@pytest.mark.parametrize("rows", [8, 3, 43])
@pytest.mark.parametrize("type", TYPES)
def test_tiles_are_the_blocks_numbers(type: str, rows: int) -> None:
    assert serves(type, 512) and not serves(type, 512 + 32)
    tiles, wanted = packed(type, rows, 512)
    assert tiles.shape == (rows, 512) and tiles.data.shape == (-(-rows // 8), 2 * KINDS[tiles.type].nbytes)
    found = tiles.dequantize()
    assert found.shape == wanted.shape and torch.allclose(found.double(), wanted, rtol=1e-6, atol=1e-9)
    ids = torch.tensor([rows - 1, 0, rows // 2, 0])
    assert torch.equal(tiles.lookup(ids), found[ids])
    assert torch.equal(tiles.first(2).dequantize(), found[:2])


def test_tiles_of_plain_numbers() -> None:
    weight = torch.randn(21, 768).bfloat16()
    assert torch.equal(tiles_of(weight).dequantize(), weight.float())
