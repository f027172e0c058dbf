"""From pixels to patches, as transformers' Qwen2VLImageProcessor and Qwen3VLVideoProcessor make them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from deltic.config.vision import ImageConfig, VisionConfig


@dataclass(frozen=True)
class Pixels:
    """What a tower sees at once: a picture, or the frames of a film that share their patches.

    frames: uint8 [temporal_patch_size or 1, height, width, 3], both multiples of a token's side.
    grid: patches by height and by width.
    tokens: that it becomes.
    """

    frames: NDArray[np.uint8]
    grid: tuple[int, int]
    tokens: int

    @cached_property
    def digest(self) -> str:
        """In hex, what no other picture has."""
        return blake2b(self.frames.tobytes(), digest_size=16, person=b"%d,%d" % self.grid).hexdigest()


@dataclass(frozen=True)
class Video:
    """Frames in the order in which they are shown.

    parts: those that share their patches, together. stamps: the token ids that say when each part is.
    """

    parts: tuple[Pixels, ...]
    stamps: tuple[tuple[int, ...], ...]


def pixels(frames: Sequence[NDArray[np.uint8]], vision: VisionConfig) -> Pixels:
    """One picture, or the frames of a film that share their patches: uint8 [height, width, 3], of their final size."""
    grid = (frames[0].shape[0] // vision.patch_size, frames[0].shape[1] // vision.patch_size)
    return Pixels(np.stack(frames), grid, grid[0] * grid[1] // vision.merge_size ** 2)


def patches_of(given: Pixels, config: ImageConfig, vision: VisionConfig) -> NDArray[np.float32]:
    """[N, patch_values] float32: the patches, normalised, those of one token behind each other. Within a patch the
    order is channel, frame, row, column; a single frame is there as often as the patch has frames."""
    side, merge, (rows, columns) = vision.patch_size, vision.merge_size, given.grid
    values: NDArray[np.float32] = given.frames.astype(np.float32) * np.float32(1 / 255)
    pixels = np.divide(values - np.asarray(config.mean, np.float32), np.asarray(config.std, np.float32))
    count, repeats = len(pixels), vision.temporal_patch_size
    parts = pixels.reshape(count, rows // merge, merge, side, columns // merge, merge, side, 3)
    ordered = parts.transpose(1, 4, 2, 5, 7, 0, 3, 6)
    if count < repeats:
        ordered = np.concatenate([ordered, np.repeat(ordered[:, :, :, :, :, -1:], repeats - count, axis=5)], axis=5)
    return np.ascontiguousarray(ordered).reshape(rows * columns, vision.patch_values)
