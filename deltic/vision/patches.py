"""From pixels to patches, as transformers' Qwen2VLImageProcessor and Qwen3VLVideoProcessor make them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deltic.config.vision import PictureConfig, VisionConfig
from deltic.errors import RequestError

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_ASPECT = 200
"""How many times as long as wide a picture may be."""


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
class Film:
    """Frames in the order in which they are shown.

    parts: those that share their patches, together. stamps: the token ids that say when each part is.
    """

    parts: tuple[Pixels, ...]
    stamps: tuple[tuple[int, ...], ...]


def film_size(count: int, height: int, width: int, config: PictureConfig, vision: VisionConfig) -> tuple[int, int]:
    """Height and width that the frames of a film are scaled to (`smart_resize` of transformers' Qwen3VLVideoProcessor):
    as `target_size`, with the pixels of all frames counted. count: of frames that there are, not of those added."""
    unit, together = vision.patch_size * vision.merge_size, vision.temporal_patch_size
    count = max(count, together)  # transformers takes no fewer
    if height < unit or width < unit:
        scale = max(unit / height, unit / width)
        height, width = int(height * scale), int(width * scale)
    _check_aspect(height, width)
    tall, wide = round(height / unit) * unit, round(width / unit) * unit
    pixels, (least, most) = round(count / together) * together * tall * wide, config.films.pixels
    if config.films.frame_tokens:
        most = count * max(min(config.films.frame_tokens * unit ** 2, most // count), int(least * 1.05))
    if pixels > most:
        scale = math.sqrt(count * height * width / most)
        tall = max(unit, math.floor(height / scale / unit) * unit)
        wide = max(unit, math.floor(width / scale / unit) * unit)
    elif pixels < least:
        scale = math.sqrt(least / (count * height * width))
        tall, wide = math.ceil(height * scale / unit) * unit, math.ceil(width * scale / unit) * unit
    return tall, wide


def picture(images: Sequence[Image], config: PictureConfig, vision: VisionConfig,
            size: tuple[int, int] | None = None) -> Pixels:
    """One picture, or the frames of a film that share their patches, in mode RGB, scaled to what the model sees.

    size: height and width that they are scaled to; None: as `target_size` says of the first one.
    Raises RequestError where it is too long for its width.
    """
    from PIL.Image import Resampling

    first = images[0]
    height, width = size or target_size(first.height, first.width, config, vision)
    scaled = [image if image.size == (width, height) else image.resize((width, height), Resampling.BICUBIC)
              for image in images]
    side = vision.patch_size
    frames = np.stack([np.asarray(image, dtype=np.uint8) for image in scaled])
    grid = (height // side, width // side)
    return Pixels(frames, grid, grid[0] * grid[1] // vision.merge_size ** 2)


def target_size(height: int, width: int, config: PictureConfig, vision: VisionConfig) -> tuple[int, int]:
    """Height and width that a picture is scaled to: multiples of a token's side, as many pixels as the config allows,
    and the proportions kept as far as that goes (`smart_resize` of transformers)."""
    _check_aspect(height, width)
    unit = vision.patch_size * vision.merge_size
    tall, wide = round(height / unit) * unit, round(width / unit) * unit
    if tall * wide > config.max_pixels:
        scale = math.sqrt(height * width / config.max_pixels)
        tall = max(unit, math.floor(height / scale / unit) * unit)
        wide = max(unit, math.floor(width / scale / unit) * unit)
    elif tall * wide < config.min_pixels:
        scale = math.sqrt(config.min_pixels / (height * width))
        tall, wide = math.ceil(height * scale / unit) * unit, math.ceil(width * scale / unit) * unit
    return tall, wide


def _check_aspect(height: int, width: int) -> None:
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise RequestError(f"a picture of {width} x {height} pixels is more than {MAX_ASPECT} times as long as wide: "
                           "cut it", "image")


def patches_of(given: Pixels, config: PictureConfig, vision: VisionConfig) -> NDArray[np.float32]:
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
