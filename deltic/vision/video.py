"""Files of films, by PyAV (FFmpeg's decoders; the extra `video`): frames at even distances, as transformers'
Qwen3VLVideoProcessor takes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from deltic.config import Limits
from deltic.config.vision import VideoConfig
from deltic.errors import RequestError

if TYPE_CHECKING:
    from PIL.Image import Image

_OPTIONS = {"protocol_whitelist": "file"}
"""A list of films may name others, but none elsewhere."""


def read_film(path: Path, films: VideoConfig, room: int, scaled: Callable[[Image, int], Image], field: str,
              pixels: int = Limits().max_picture_megapixels * 1_000_000) -> tuple[list[Image], list[float]]:
    """Frames of a film, and the second at which each is shown.

    films: how many there shall be. room: most. scaled: makes a frame as small as it shall be, told how many there are;
    it is called for one after another, so that few are here in full. pixels: most of a frame.
    RequestError if the file cannot be read, has more frames than there is room for, or PyAV is not there.
    """
    try:
        import av
    except ImportError as error:
        raise RequestError(f"{field} is the file of a film, for which PyAV is needed: pip install 'deltic[video]'",
                           field) from error
    try:
        with av.open(str(path), metadata_errors="ignore", options=_OPTIONS) as film:
            if not film.streams.video:
                raise RequestError(f"{field} has no moving pictures", field)
            rate = float(film.streams.video[0].average_rate or 0)
            count = film.streams.video[0].frames or _count(film)
        wanted = frame_numbers(count, rate, films, room, field)
        with av.open(str(path), metadata_errors="ignore", options=_OPTIONS) as film:
            found = _frames(film, wanted, scaled, field, pixels)
    except (av.error.FFmpegError, OSError, ValueError) as error:
        raise RequestError(f"{field} cannot be read as a film: {str(error)[:200]}", field) from error
    if not found:
        raise RequestError(f"{field} has no frame that can be read", field)
    # files may end before their headers say
    return found, [number / rate for number in wanted[:len(found)]]


def _count(film: Any) -> int:
    return sum(1 for packet in film.demux(video=0) if packet.size)


def frame_numbers(count: int, rate: float, films: VideoConfig, room: int, field: str) -> list[int]:
    """Which of `count` frames, `rate` a second, are looked at: all, or so many at even distances from the first to the
    last, of few frames some more than once."""
    if count < 1 or not rate > 0:
        raise RequestError(f"{field} does not say how many frames it has, or how fast they go", field)
    if room < 1:
        raise RequestError("messages have more pictures than max_pictures allows: send fewer", "messages")
    if not films.sampled:
        if count > room:
            raise RequestError(f"{field} has {count:,} frames, of which this model looks at all, and max_pictures "
                               f"leaves room for {room:,}: send a shorter film", field)
        return list(range(count))
    least, most = films.frames
    most = min(most, count) if films.rate else most
    wanted = min(max(int(count / rate * films.rate) if films.rate else count, least), most)
    return [int(index) for index in np.linspace(0, count - 1, min(films.count or wanted, room)).round()]


def _frames(film: Any, wanted: list[int], scaled: Callable[[Image, int], Image], field: str, pixels: int
            ) -> list[Image]:
    found, stream = list["Image"](), film.streams.video[0]
    if stream.codec_context is None:
        raise RequestError(f"{field} is no film that can be decoded", field)
    width, height = stream.codec_context.width, stream.codec_context.height
    if width * height > pixels:
        raise RequestError(f"{field} has frames of {width:,} x {height:,} pixels, and at most {pixels:,} are read "
                           "(max_picture_megapixels): scale it down", field)
    stream.codec_context.options = {"max_pixels": str(pixels)}  # frames may say otherwise than their file
    stream.thread_type = "AUTO"
    for number, frame in enumerate(film.decode(stream)):
        while len(found) < len(wanted) and wanted[len(found)] == number:
            image = frame.to_image()
            if frame.rotation:
                image = image.rotate(frame.rotation, expand=True)
            found.append(scaled(image, len(wanted)))
        if len(found) == len(wanted):
            break
    return found
