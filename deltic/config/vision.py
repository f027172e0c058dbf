"""The vision half of a checkpoint: shapes of its tower, and how its pictures are prepared."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deltic.config.reading import flag, integer, number
from deltic.errors import ModelError, show

_SQUARE = (0.5, 0.5, 0.5)
_CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
"""Means and deviations that Qwen2VLImageProcessor takes where a file does not say them."""
_EDGES = ("shortest_edge", "longest_edge")
_CHANNELS = ("image_mean", "image_std")
_BICUBIC = 3
"""Pillow's number for it."""


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """Shape of the tower (Qwen3_5VisionModel), and the tokens that stand for what it sees.

    depth: blocks. hidden_size, intermediate_size, num_heads: of a block.
    out_hidden_size: of the rows that it gives, which is the text model's.
    num_position_embeddings: entries of the learned table, a square grid that is interpolated to a picture's.
    patch_size, temporal_patch_size: pixels a side and frames of a patch. merge_size: patches a side of what becomes
        one token.
    image_token_id, video_token_id: of each token of a picture, of a film.
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
            raise ModelError("vision_config: num_position_embeddings must be a square, and is "
                             f"{self.num_position_embeddings}")

    @classmethod
    def from_hf(cls, mapping: Mapping[str, Any], out_hidden_size: int) -> VisionConfig | None:
        """Read a config.json that has a `vision_config`; None without one. out_hidden_size: the text model's.

        Raises ModelError naming the key that is absent, of the wrong type, absurd or unsupported.
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
            depth=integer(keys, "depth", 1, 256),
            hidden_size=integer(keys, "hidden_size", 1, 1 << 16),
            intermediate_size=integer(keys, "intermediate_size", 1, 1 << 18),
            num_heads=integer(keys, "num_heads", 1, 1024),
            out_hidden_size=integer(keys, "out_hidden_size", 1, 1 << 17),
            num_position_embeddings=integer(keys, "num_position_embeddings", 1, 1 << 20),
            in_channels=integer(keys, "in_channels", 3, 3),
            patch_size=integer(keys, "patch_size", 1, 256),
            temporal_patch_size=integer(keys, "temporal_patch_size", 1, 16),
            merge_size=integer(keys, "spatial_merge_size", 1, 16),
            rope_theta=number(rope, "rope_theta", 1.0, 1e12),
            image_token_id=integer(mapping, "image_token_id", 0, 1 << 31),
            video_token_id=integer(mapping, "video_token_id", 0, 1 << 31),
        )
        if found.out_hidden_size != out_hidden_size:
            raise ModelError(f"vision_config: out_hidden_size is {found.out_hidden_size}, and the text model's "
                             f"hidden_size {out_hidden_size}: take the config.json that belongs to the weights")
        return found

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def grid_side(self) -> int:
        """Entries a side of the table of positions."""
        return math.isqrt(self.num_position_embeddings)

    @property
    def patch_values(self) -> int:
        """Numbers of a patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size ** 2


@dataclass(frozen=True, slots=True)
class VideoConfig:
    """How films become pictures (video_preprocessor_config.json of a checkpoint).

    pixels: least and most of all frames together. frames: least and most that are looked at of a film that has so many.
    rate: that are looked at of a second; 0: all. count: that are looked at of any film; 0: as `rate` says.
    sampled: without, all frames are looked at, however many. frame_tokens: most tokens of a frame; 0: as many as
    `pixels` allows.
    """

    pixels: tuple[int, int] = (128 * 32 * 32, 768 * 32 * 32)
    frames: tuple[int, int] = (4, 768)
    rate: float = 2.0
    frame_tokens: int = 0
    count: int = 0
    sampled: bool = True

    @classmethod
    def from_hf(cls, mapping: Mapping[str, Any]) -> VideoConfig:
        """Read a video_preprocessor_config.json. Raises ModelError naming the key."""
        plain = cls()
        size = dict(zip(_EDGES, plain.pixels, strict=True)) | _size(mapping)
        given = {"min_frames": plain.frames[0], "max_frames": plain.frames[1], "fps": plain.rate,
                 "max_video_tokens": 768, **{key: value for key, value in mapping.items() if value is not None}}
        if "num_frames" in given and mapping.get("fps") is not None:
            raise ModelError("num_frames and fps exclude each other: leave one of them out")
        least, most = (integer(size, edge, 1, 1 << 31) for edge in _EDGES)
        few, many = (integer(given, key, 1, 1 << 20) for key in ("min_frames", "max_frames"))
        tokens = integer(given, "max_video_tokens", 1, 1 << 20)
        count = integer(given, "num_frames", 1, 1 << 20) if "num_frames" in given else 0
        unbound = count or mapping.get("fps", plain.rate) is None  # null is not the same as left out
        return cls((least, most), (few, many), 0.0 if unbound else number(given, "fps", 1e-3, 1e3),
                   tokens if flag(given, "cap_pixels_per_frame", False) else 0, count,
                   flag(given, "do_sample_frames", True))

    def to_hf(self) -> dict[str, Any]:
        """What `from_hf` reads."""
        return {"size": dict(zip(_EDGES, self.pixels, strict=True)), "min_frames": self.frames[0],
                "max_frames": self.frames[1], "fps": self.rate or None,
                "num_frames": self.count or None, "do_sample_frames": self.sampled,
                "cap_pixels_per_frame": bool(self.frame_tokens),
                **({"max_video_tokens": self.frame_tokens} if self.frame_tokens else {})}


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """How pictures become patches (preprocessor_config.json of a checkpoint).

    min_pixels, max_pixels: a picture is scaled until it has so many. mean, std: each channel's, subtracted and divided
    by, of values from 0 to 1, also of a film's frames.
    """

    min_pixels: int = 256 * 256
    max_pixels: int = 4096 * 4096
    mean: tuple[float, ...] = _SQUARE
    std: tuple[float, ...] = _SQUARE
    videos: VideoConfig = VideoConfig()

    @classmethod
    def from_hf(cls, mapping: Mapping[str, Any], films: Mapping[str, Any]) -> ImageConfig:
        """Read a preprocessor_config.json and a video_preprocessor_config.json, each empty if there is none. What one
        leaves out is as transformers' classes have it. Raises ModelError naming the key."""
        for said in (mapping, films):
            _refuse_unsupported(said)
        plain = cls(56 * 56, 28 * 28 * 1280, *_CLIP) if mapping else cls()
        means, stds = (_channels(mapping, *each) for each in zip(_CHANNELS, (plain.mean, plain.std), strict=True))
        if films and tuple(_channels(films, key, _SQUARE) for key in _CHANNELS) != (means, stds):
            raise ModelError("image_mean and image_std of films must be those of pictures")
        size = dict(zip(_EDGES, (plain.min_pixels, plain.max_pixels), strict=True)) | _size(mapping)
        least, most = (integer(size, edge, 1, 1 << 30) for edge in _EDGES)
        return cls(least, most, means, stds, VideoConfig.from_hf(films))


@dataclass(frozen=True, slots=True)
class Vision:
    """What a model sees with, and how pictures are prepared for it."""

    tower: VisionConfig
    pictures: ImageConfig


def _refuse_unsupported(mapping: Mapping[str, Any]) -> None:
    for key in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if not flag(mapping, key, True):
            raise ModelError(f"{key} false is not supported, only true")
    if mapping.get("resample", _BICUBIC) != _BICUBIC:
        raise ModelError(f"resample {show(mapping['resample'])} is not supported, only {_BICUBIC} (bicubic)")
    if not math.isclose(number({"rescale_factor": 1 / 255, **mapping}, "rescale_factor", 0.0, 1.0), 1 / 255,
                        rel_tol=1e-6):
        raise ModelError(f"rescale_factor {mapping['rescale_factor']} is not supported, only 1 / 255")


def _size(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Least and most pixels, as far as they are given. Their older keys go before `size`."""
    size = mapping.get("size") or {}
    if not isinstance(size, Mapping) or not {*size} <= {*_EDGES}:
        raise ModelError(f"size must be an object of {' and '.join(_EDGES)}, not {show(size)}")
    older = zip(_EDGES, (mapping.get("min_pixels"), mapping.get("max_pixels")), strict=True)
    return {**size, **{edge: pixels for edge, pixels in older if pixels is not None}}


def _channels(mapping: Mapping[str, Any], key: str, default: tuple[float, ...]) -> tuple[float, ...]:
    given = mapping.get(key)
    if given is None:
        return default
    if not isinstance(given, list) or len(given) != 3:
        raise ModelError(f"{key} must be a list of three numbers, not {show(given)}")
    return tuple(number({key: value}, key, 1e-6 if key == "image_std" else -1e6, 1e6) for value in given)
