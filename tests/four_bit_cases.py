"""Random blocks of the types of `loader.four_bits`, and the numbers they stand for."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from deltic.loader.four_bits import LAYOUTS, TYPES

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


def random_four_bits(name: str, rows: int, columns: int, seed: int = 0) -> NDArray[np.uint8]:
    """Any codes, scales of like size, zero points: uint8 [rows, bytes]."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, TYPES[name].size(columns)), dtype=np.uint8)
    blocks = raw.reshape(-1).view(LAYOUTS[name])
    if name == "NVFP4":
        blocks["d"] = (128 * rng.uniform(1e-4, 2e-4, len(blocks))).astype(np.float32)
        blocks["scales"] = rng.integers(0x30, 0x40, blocks["scales"].shape)
    else:
        scales = rng.uniform(5e-4, 1e-3, blocks["words"].shape).astype(np.float16).astype(np.float32)
        blocks["words"] = scales.view(np.uint32) | rng.integers(0, 16, scales.shape, dtype=np.uint32)
    return raw


def numbers_of(name: str, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """float32 [rows, columns], rounded as tools do: a scale of its factors, then the product with a code's number."""
    blocks = np.ascontiguousarray(raw).reshape(-1).view(LAYOUTS[name])
    codes = np.stack((blocks["qs"] & 15, blocks["qs"] >> 4), -1).reshape(len(blocks), -1)
    if name == "NVFP4":
        scales = E4M3[blocks["scales"]] * (blocks["d"] / np.float32(128))[:, None]
        values = E2M1[codes].reshape(len(blocks), 16, 16) * scales[..., None]
    else:
        scales = (blocks["words"] & np.uint32(0xffffff00)).view(np.float32)
        zeros = (blocks["words"] & 255).astype(np.float32)
        values = (codes.reshape(*scales.shape, -1) - zeros[..., None]) * scales[..., None]
    return np.asarray(values, np.float32).reshape(len(raw), -1)
