"""Sizes and patches of images and video frames, computed as transformers does (Qwen2VLImageProcessor,
Qwen3VLVideoProcessor)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Final

import numpy as np
from numpy.typing import NDArray

from deltic.config.vision import ImageConfig, VisionConfig
from deltic.errors import RequestError

MAX_ASPECT: Final = 200
"""Upper bound of the aspect ratio."""

Frame = NDArray[np.uint8]
"""[height, width, 3]"""
Size = tuple[int, int]
"""Height and width."""


@dataclass(frozen=True)
class Pixels:
    """An image, or the video frames that share their patches: one input of the vision tower.

    frames: uint8 [temporal_patch_size or 1, height, width, 3], both multiples of a token's side.
    grid: patches by height and by width.
    tokens: number of tokens in the prompt.
    """

    frames: NDArray[np.uint8]
    grid: tuple[int, int]
    tokens: int

    @cached_property
    def digest(self) -> str:
        return blake2b(self.frames.tobytes(), digest_size=16, person=b"%d,%d" % self.grid).hexdigest()


@dataclass(frozen=True)
class Video:
    """A video.

    parts: groups of frames that share their patches, in order.
    stamps: token ids of each part's timestamp.
    """

    parts: tuple[Pixels, ...]
    stamps: tuple[tuple[int, ...], ...]


def target_size(height: int, width: int, config: ImageConfig, vision: VisionConfig) -> Size:
    """Returns the size that an image is scaled to (`smart_resize` of transformers): multiples of a token's side within
    the bounds of pixels, near the original aspect ratio."""
    _check_aspect(height, width)
    unit = vision.patch_size * vision.merge_size
    tall, wide = round(height / unit) * unit, round(width / unit) * unit
    if tall * wide > config.max_pixels:
        return _shrunk(height, width, math.sqrt(height * width / config.max_pixels), unit)
    if tall * wide < config.min_pixels:
        return _enlarged(height, width, math.sqrt(config.min_pixels / (height * width)), unit)
    return tall, wide


def video_size(count: int, height: int, width: int, config: ImageConfig, vision: VisionConfig) -> Size:
    """Returns the size that video frames are scaled to (`smart_resize` of Qwen3VLVideoProcessor): like `target_size`,
    with bounds for the pixels of all `count` frames, without padding, together."""
    unit = vision.patch_size * vision.merge_size
    count = max(count, vision.temporal_patch_size)
    if height < unit or width < unit:
        scale = max(unit / height, unit / width)
        height, width = int(height * scale), int(width * scale)
    _check_aspect(height, width)
    tall, wide = round(height / unit) * unit, round(width / unit) * unit
    padded_count = round(count / vision.temporal_patch_size) * vision.temporal_patch_size
    least, most = config.videos.pixels
    if config.videos.frame_tokens:
        most = count * max(min(config.videos.frame_tokens * unit ** 2, most // count), int(least * 1.05))
    if padded_count * tall * wide > most:
        return _shrunk(height, width, math.sqrt(count * height * width / most), unit)
    if padded_count * tall * wide < least:
        return _enlarged(height, width, math.sqrt(least / (count * height * width)), unit)
    return tall, wide


def _shrunk(height: int, width: int, scale: float, unit: int) -> Size:
    tall = max(unit, math.floor(height / scale / unit) * unit)
    wide = max(unit, math.floor(width / scale / unit) * unit)
    return tall, wide


def _enlarged(height: int, width: int, scale: float, unit: int) -> Size:
    return math.ceil(height * scale / unit) * unit, math.ceil(width * scale / unit) * unit


def _check_aspect(height: int, width: int) -> None:
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise RequestError(f"a picture of {width} x {height} pixels has an aspect ratio above {MAX_ASPECT}: crop it",
                           "image")


def pixels(frames: Sequence[Frame], vision: VisionConfig) -> Pixels:
    """Groups one image, or the frames of a video that share their patches, of their final size."""
    height, width = frames[0].shape[:2]
    grid = (height // vision.patch_size, width // vision.patch_size)
    return Pixels(np.stack(frames), grid, grid[0] * grid[1] // vision.merge_size ** 2)


def patches_of(given: Pixels, config: ImageConfig, vision: VisionConfig) -> NDArray[np.float32]:
    """Returns the normalised patches, float32 [N, patch_values], with those of one token next to each other.

    Within a patch the order is channel, frame, row, column; a single frame is repeated.
    """
    side, merge = vision.patch_size, vision.merge_size
    rows, columns = given.grid
    values: NDArray[np.float32] = given.frames.astype(np.float32) * np.float32(1 / 255)
    pixels = np.divide(values - np.asarray(config.mean, np.float32), np.asarray(config.std, np.float32))
    count = len(pixels)
    parts = pixels.reshape(count, rows // merge, merge, side, columns // merge, merge, side, 3)
    ordered = parts.transpose(1, 4, 2, 5, 7, 0, 3, 6)
    padding = vision.temporal_patch_size - count
    if padding > 0:
        ordered = np.concatenate([ordered, np.repeat(ordered[:, :, :, :, :, -1:], padding, axis=5)], axis=5)
    return np.ascontiguousarray(ordered).reshape(rows * columns, vision.patch_values)
