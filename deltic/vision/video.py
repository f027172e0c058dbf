"""Reads video files with PyAV (FFmpeg's decoders; the extra `video`). Frames are sampled at even distances, as in
transformers' Qwen3VLVideoProcessor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from deltic.config import Limits
from deltic.config.vision import VideoConfig
from deltic.errors import RequestError

if TYPE_CHECKING:
    from PIL.Image import Image

_OPTIONS: Final = {"protocol_whitelist": "file"}
"""A playlist may name local files only."""


def read_video(path: Path, config: VideoConfig, max_frames: int, scale: Callable[[Image, int], Image], field: str,
               max_pixels: int = Limits().max_picture_megapixels * 1_000_000) -> tuple[list[Image], list[float]]:
    """Returns the sampled frames of a video, and the time of each in seconds.

    scale: shrinks a frame, given the number of frames; called for one frame at a time, so that few full-size frames are
        in memory. max_pixels: bound for a frame. Raises RequestError if the file cannot be read, has too many frames,
        or PyAV is not installed.
    """
    try:
        import av
    except ImportError as error:
        raise RequestError(f"{field} is a video file, which needs PyAV: pip install 'deltic[video]'", field) from error
    try:
        with av.open(str(path), metadata_errors="ignore", options=_OPTIONS) as video:
            if not video.streams.video:
                raise RequestError(f"{field} has no video stream", field)
            rate = float(video.streams.video[0].average_rate or 0)
            count = video.streams.video[0].frames or _count_packets(video)
        numbers = frame_numbers(count, rate, config, max_frames, field)
        with av.open(str(path), metadata_errors="ignore", options=_OPTIONS) as video:
            frames = _decode(video, numbers, scale, field, max_pixels)
    except (av.error.FFmpegError, OSError, ValueError) as error:
        raise RequestError(f"{field} cannot be read as a video: {str(error)[:200]}", field) from error
    if not frames:
        raise RequestError(f"{field} has no frame that can be read", field)
    # files may end earlier than their headers announce
    return frames, [number / rate for number in numbers[:len(frames)]]


def _count_packets(video: Any) -> int:
    return sum(1 for packet in video.demux(video=0) if packet.size)


def frame_numbers(count: int, rate: float, config: VideoConfig, max_frames: int, field: str) -> list[int]:
    """Selects frames of a video with `count` frames, `rate` per second: all, or some at even distances from the first
    to the last. Short videos repeat frames."""
    if count < 1 or not rate > 0:
        raise RequestError(f"{field} does not say how many frames it has, or its frame rate", field)
    if max_frames < 1:
        raise RequestError("messages have more pictures than max_pictures allows: send fewer", "messages")
    if not config.sampled:
        if count > max_frames:
            raise RequestError(f"{field} has {count:,} frames, which this model uses all, and max_pictures leaves room "
                               f"for {max_frames:,}: send a shorter video", field)
        return list(range(count))
    least, most = config.frames
    wanted = count
    if config.rate:
        wanted = int(count / rate * config.rate)
        most = min(most, count)
    selected = config.count or min(max(wanted, least), most)
    return [int(index) for index in np.linspace(0, count - 1, min(selected, max_frames)).round()]


def _decode(video: Any, numbers: list[int], scale: Callable[[Image, int], Image], field: str, max_pixels: int
            ) -> list[Image]:
    stream = video.streams.video[0]
    if stream.codec_context is None:
        raise RequestError(f"{field} is no video that can be decoded", field)
    width, height = stream.codec_context.width, stream.codec_context.height
    if width * height > max_pixels:
        raise RequestError(f"{field} has frames of {width:,} x {height:,} pixels, and at most {max_pixels:,} are read "
                           "(max_picture_megapixels): scale it down", field)
    stream.codec_context.options = {"max_pixels": str(max_pixels)}  # a frame's size may differ from the header's
    stream.thread_type = "AUTO"
    found = list["Image"]()
    for number, frame in enumerate(video.decode(stream)):
        while len(found) < len(numbers) and numbers[len(found)] == number:
            image = frame.to_image()
            if frame.rotation:
                image = image.rotate(frame.rotation, expand=True)
            found.append(scale(image, len(numbers)))
        if len(found) == len(numbers):
            break
    return found
