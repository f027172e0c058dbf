"""The sizes that pictures and frames are scaled to, as transformers computes them."""

from __future__ import annotations

import math

from deltic.config.vision import ImageConfig, VisionConfig
from deltic.errors import RequestError

MAX_ASPECT = 200
"""How many times as long as wide a picture may be."""


def film_size(count: int, height: int, width: int, config: ImageConfig, vision: VisionConfig) -> tuple[int, int]:
    """Height and width that the frames of a film are scaled to (`smart_resize` of transformers' Qwen3VLVideoProcessor):
    as `target_size`, with the pixels of all frames counted. count: of frames that there are, not of those added."""
    unit, together = vision.patch_size * vision.merge_size, vision.temporal_patch_size
    count = max(count, together)  # transformers takes no fewer
    if height < unit or width < unit:
        scale = max(unit / height, unit / width)
        height, width = int(height * scale), int(width * scale)
    _check_aspect(height, width)
    tall, wide = round(height / unit) * unit, round(width / unit) * unit
    pixels, (least, most) = round(count / together) * together * tall * wide, config.videos.pixels
    if config.videos.frame_tokens:
        most = count * max(min(config.videos.frame_tokens * unit ** 2, most // count), int(least * 1.05))
    if pixels > most:
        scale = math.sqrt(count * height * width / most)
        tall = max(unit, math.floor(height / scale / unit) * unit)
        wide = max(unit, math.floor(width / scale / unit) * unit)
    elif pixels < least:
        scale = math.sqrt(least / (count * height * width))
        tall, wide = math.ceil(height * scale / unit) * unit, math.ceil(width * scale / unit) * unit
    return tall, wide


def target_size(height: int, width: int, config: ImageConfig, vision: VisionConfig) -> tuple[int, int]:
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
