"""Eight bits for an encoder's matrices. Encoders have a few columns of states that are many times larger than others,
so that a matrix's errors in these columns are nearly all that shows. Which ones they are is seen by running some random
tokens through the layers as they are read; blocks with such columns get the scale at which these columns lose least.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

TOKENS: Final = (4, 64)
"""Sequences of random tokens, and tokens of each."""
_PEAK: Final = 1.0
"""Blocks are looked at where a column weighs so many times more than the block's mean."""
_SCALES: Final = tuple(1.0 + 0.0025 * step for step in range(33))
"""What a block's least scale may be multiplied with: from where the largest number has the code 127 to 8 % more."""


def random_ids(vocab_size: int, first: int, length: int) -> Tensor:
    """Ids [N, length] from `first` on, always the same."""
    drawn = np.random.default_rng(0).integers(min(first, vocab_size - 1), vocab_size, (TOKENS[0], length))
    return torch.from_numpy(drawn)


def q8_0_blocks(matrix: Tensor, weights: Tensor) -> NDArray[Any]:
    """The blocks of Q8_0 [rows, bytes] uint8 of a matrix [rows, columns] float32, whose errors in a column weigh as
    `weights` [columns] says: the mean square of what it is multiplied with."""
    rows, columns = matrix.shape
    blocks = matrix.view(rows, columns // 32, 32)
    least = blocks.abs().amax(2) / 127
    scale, share = least.half().float(), weights.view(columns // 32, 32)
    peaks = (share.amax(1) > _PEAK * share.mean(1)).nonzero()[:, 0]
    if len(peaks):
        some, weigh = blocks[:, peaks], share[peaks]
        best, chosen = torch.full(some.shape[:2], torch.inf), scale[:, peaks]
        for factor in _SCALES:
            tried = (least[:, peaks] * factor).half().float()
            error = ((_codes(some, tried) * tried[:, :, None] - some).square() * weigh).sum(2)
            better = error < best
            best, chosen = torch.where(better, error, best), torch.where(better, tried, chosen)
        scale[:, peaks] = chosen
    found = np.empty((rows, columns // 32), np.dtype([("d", "<f2"), ("q", "i1", 32)]))
    found["d"], found["q"] = scale.half().numpy(), _codes(blocks, scale).to(torch.int8).numpy()
    return found.view(np.uint8).reshape(rows, -1)


def _codes(blocks: Tensor, scale: Tensor) -> Tensor:
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    return (blocks * inverse[:, :, None]).round_().clamp_(-127, 127)
