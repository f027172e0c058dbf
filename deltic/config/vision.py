"""The shape of a vision tower, and the preprocessing of its images and videos."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from deltic.config.reading import flag, integer, number
from deltic.errors import ModelError, show

_HALF: Final = (0.5, 0.5, 0.5)
_CLIP_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD: Final = (0.26862954, 0.26130258, 0.27577711)
_EDGES: Final = ("shortest_edge", "longest_edge")
_BICUBIC: Final = 3
"""Pillow's number for bicubic resampling."""
_MAX_PIXELS: Final = 1 << 30
_LARGEST: Final = {
    "depth": 256, "hidden_size": 1 << 16, "intermediate_size": 1 << 18, "num_heads": 1024, "out_hidden_size": 1 << 17,
    "num_position_embeddings": 1 << 20, "patch_size": 256, "temporal_patch_size": 16}
"""Maximum values of keys of vision_config, which are also fields of VisionConfig."""


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """Shape of a vision tower (Qwen3_5VisionModel), and its placeholder tokens.

    depth: number of blocks.
    out_hidden_size: size of its output rows, the hidden_size of the text model.
    num_position_embeddings: entries of the learned table, a square grid that is interpolated to the image's grid.
    patch_size: side of a patch in pixels.
    temporal_patch_size: number of frames in a patch.
    merge_size: side of a token in patches.
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    num_position_embeddings: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    rope_theta: float
    image_token_id: int
    video_token_id: int

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads or self.head_dim % 4:
            raise ModelError(f"vision_config: hidden_size ({self.hidden_size}) must be num_heads ({self.num_heads}) "
                             "times a multiple of 4")
        if self.grid_side ** 2 != self.num_position_embeddings:
            raise ModelError("vision_config: num_position_embeddings must be a square, not "
                             f"{self.num_position_embeddings}")

    @classmethod
    def from_hf(cls, mapping: Mapping[str, Any], out_hidden_size: int) -> VisionConfig | None:
        """Reads the `vision_config` of a config.json; None if there is none. out_hidden_size: the text model's.

        Raises ModelError naming the key that is missing, of the wrong type, out of range or unsupported.
        """
        given = mapping.get("vision_config")
        if given is None:
            return None
        if not isinstance(given, Mapping):
            raise ModelError(f"vision_config must be an object, not {show(given)}")
        keys = {"in_channels": 3, "temporal_patch_size": 2, "spatial_merge_size": 2, **given}
        rope = {"rope_theta": 1e4, **(given.get("rope_parameters") or {})}
        for key, only in (("hidden_act", "gelu_pytorch_tanh"), ("deepstack_visual_indexes", [])):
            if keys.get(key, only) != only:
                raise ModelError(f"vision_config: {key} {show(keys[key])} is not supported, only {only!r}")
        found = cls(
            **{key: integer(keys, key, 1, high) for key, high in _LARGEST.items()},
            in_channels=integer(keys, "in_channels", 3, 3),
            merge_size=integer(keys, "spatial_merge_size", 1, 16),
            rope_theta=number(rope, "rope_theta", 1.0, 1e12),
            image_token_id=integer(mapping, "image_token_id", 0, 1 << 31),
            video_token_id=integer(mapping, "video_token_id", 0, 1 << 31),
        )
        if found.out_hidden_size != out_hidden_size:
            raise ModelError(f"vision_config: out_hidden_size is {found.out_hidden_size}, but the text model's "
                             f"hidden_size is {out_hidden_size}: take the config.json that belongs to the weights")
        return found

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def grid_side(self) -> int:
        """Side length of the square table of positions."""
        return math.isqrt(self.num_position_embeddings)

    @property
    def patch_values(self) -> int:
        """Count of numbers in a patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size ** 2


@dataclass(frozen=True, slots=True)
class VideoConfig:
    """Sampling of videos (video_preprocessor_config.json).

    pixels: bounds for all frames together.
    frames: bounds for the number of sampled frames.
    rate: sampled frames per second; 0: all frames.
    frame_tokens: maximum number of tokens per frame; 0: bounded by `pixels` only.
    count: number of sampled frames of each video; 0: determined by `rate`.
    sampled: sample frames; False: use all frames.
    """

    pixels: tuple[int, int] = (128 * 32 * 32, 768 * 32 * 32)
    frames: tuple[int, int] = (4, 768)
    rate: float = 2.0
    frame_tokens: int = 0
    count: int = 0
    sampled: bool = True

    @classmethod
    def from_hf(cls, mapping: Mapping[str, Any]) -> VideoConfig:
        """Reads a video_preprocessor_config.json. Raises ModelError naming the key."""
        default = cls()
        given = {key: value for key, value in mapping.items() if value is not None}
        if "num_frames" in given and "fps" in given:
            raise ModelError("num_frames and fps exclude each other: leave one of them out")
        size = {**dict(zip(_EDGES, default.pixels, strict=True)), **_size(mapping)}
        values = {"min_frames": default.frames[0], "max_frames": default.frames[1], "max_video_tokens": 768,
                  "fps": default.rate, **given}
        count = integer(given, "num_frames", 1, 1 << 20) if "num_frames" in given else 0
        all_frames = "fps" in mapping and mapping["fps"] is None
        tokens = integer(values, "max_video_tokens", 1, 1 << 20)
        return cls(
            pixels=(integer(size, _EDGES[0], 1, 1 << 31), integer(size, _EDGES[1], 1, 1 << 31)),
            frames=(integer(values, "min_frames", 1, 1 << 20), integer(values, "max_frames", 1, 1 << 20)),
            rate=0.0 if count or all_frames else number(values, "fps", 1e-3, 1e3),
            frame_tokens=tokens if flag(given, "cap_pixels_per_frame", False) else 0,
            count=count,
            sampled=flag(given, "do_sample_frames", True))

    def to_hf(self) -> dict[str, Any]:
        """Returns the mapping that `from_hf` reads."""
        tokens = {"max_video_tokens": self.frame_tokens} if self.frame_tokens else {}
        return {"size": dict(zip(_EDGES, self.pixels, strict=True)), "min_frames": self.frames[0],
                "max_frames": self.frames[1], "fps": self.rate or None, "num_frames": self.count or None,
                "do_sample_frames": self.sampled, "cap_pixels_per_frame": bool(self.frame_tokens), **tokens}


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """Preprocessing of images (preprocessor_config.json).

    min_pixels, max_pixels: bounds for the size of a scaled image.
    mean, std: normalisation of each channel, for values from 0 to 1. Video frames use it too.
    """

    min_pixels: int = 256 * 256
    max_pixels: int = 4096 * 4096
    mean: tuple[float, ...] = _HALF
    std: tuple[float, ...] = _HALF
    videos: VideoConfig = VideoConfig()

    @classmethod
    def from_hf(cls, images: Mapping[str, Any], videos: Mapping[str, Any]) -> ImageConfig:
        """Reads a preprocessor_config.json and a video_preprocessor_config.json, each empty if there is none.

        Absent keys have the defaults of transformers' classes. Raises ModelError naming the key.
        """
        for mapping in (images, videos):
            _refuse_unsupported(mapping)
        # a file without keys means Qwen2VLImageProcessor; no file means Qwen3VL's sizes
        default = cls(56 * 56, 28 * 28 * 1280, _CLIP_MEAN, _CLIP_STD) if images else cls()
        mean = _channels(images, "image_mean", default.mean)
        std = _channels(images, "image_std", default.std)
        if videos and (_channels(videos, "image_mean", _HALF), _channels(videos, "image_std", _HALF)) != (mean, std):
            raise ModelError("image_mean and image_std of videos must be those of images")
        size = {_EDGES[0]: default.min_pixels, _EDGES[1]: default.max_pixels, **_size(images)}
        least, most = (integer(size, edge, 1, _MAX_PIXELS) for edge in _EDGES)
        return cls(least, most, mean, std, VideoConfig.from_hf(videos))


@dataclass(frozen=True, slots=True)
class Vision:
    """A vision tower and the preprocessing of its images."""

    tower: VisionConfig
    pictures: ImageConfig


def _refuse_unsupported(mapping: Mapping[str, Any]) -> None:
    for key in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if not flag(mapping, key, True):
            raise ModelError(f"{key} false is not supported, only true")
    if mapping.get("resample", _BICUBIC) != _BICUBIC:
        raise ModelError(f"resample {show(mapping['resample'])} is not supported, only {_BICUBIC} (bicubic)")
    factor = number({"rescale_factor": 1 / 255, **mapping}, "rescale_factor", 0.0, 1.0)
    if not math.isclose(factor, 1 / 255, rel_tol=1e-6):
        raise ModelError(f"rescale_factor {mapping['rescale_factor']} is not supported, only 1 / 255")


def _size(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the given bounds of pixels. The older keys min_pixels and max_pixels override `size`."""
    size = mapping.get("size") or {}
    if not isinstance(size, Mapping) or not {*size} <= {*_EDGES}:
        raise ModelError(f"size must be an object of {' and '.join(_EDGES)}, not {show(size)}")
    older = {edge: mapping.get(key) for edge, key in zip(_EDGES, ("min_pixels", "max_pixels"), strict=True)}
    return {**size, **{edge: pixels for edge, pixels in older.items() if pixels is not None}}


def _channels(mapping: Mapping[str, Any], key: str, default: tuple[float, ...]) -> tuple[float, ...]:
    given = mapping.get(key)
    if given is None:
        return default
    if not isinstance(given, list) or len(given) != 3:
        raise ModelError(f"{key} must be a list of three numbers, not {show(given)}")
    low = 1e-6 if key == "image_std" else -1e6
    return tuple(number({key: value}, key, low, 1e6) for value in given)
