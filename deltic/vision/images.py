"""Pictures as pixels: decoded to RGB, upright, on white where they are transparent, in the size that the model sees.

Files are untrusted: a picture that is too large is refused by its header, before it is decoded. Sizes and patches are
computed as in transformers (Qwen2VLImageProcessor, Qwen3VLVideoProcessor).
"""

from __future__ import annotations

import base64
import io
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from deltic.config import Limits
from deltic.config.vision import ImageConfig, Vision, VisionConfig
from deltic.errors import RequestError, show

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Formats whose decoders are Pillow's own or part of its wheels."""
IN_PYTHON: Final = "in Python a pathlib.Path, the bytes of a file, a Pillow image or an array of uint8 pixels"
"""Alternatives to a data URL, for messages."""
_BRIGHTNESS: Final = {"I;16": 1 / 257, "I;16L": 1 / 257, "I;16B": 1 / 257, "I": 1 / 257, "F": 1.0}
_FULL_DECODE: Final = 1 << 24
"""Maximum pixels of a JPEG that is decoded at full size."""
_STRIP: Final = 1 << 22
"""Number of pixels converted to RGB at a time."""
_ORIENTATION: Final = 0x0112
"""EXIF tag of the orientation."""
_ROTATED: Final = range(5, 9)
"""Values of the tag for pictures that lie on their side."""
MAX_ASPECT: Final = 200
"""Upper bound of the aspect ratio."""

Frame = NDArray[np.uint8]
"""[height, width, 3]"""
Size = tuple[int, int]
"""Height and width."""


# Decoding


class PixelBudget:
    """Upper bounds for the pixels of each picture, and of all pictures of a request together."""

    def __init__(self, picture: int, request: int) -> None:
        self.picture, self.request = picture, request

    @classmethod
    def of(cls, limits: Limits) -> PixelBudget:
        return cls(limits.max_picture_megapixels * 1_000_000, limits.max_request_megapixels * 1_000_000)

    def take(self, width: int, height: int, name: str, field: str) -> None:
        """Subtracts one picture. Raises RequestError with the field if a bound is exceeded."""
        size = f"{name} has {width:,} x {height:,} pixels"
        if width * height > self.picture:
            raise RequestError(f"{size}, and at most {self.picture:,} are read (max_picture_megapixels): scale it down",
                               field)
        self.request -= width * height
        if self.request < 0:
            raise RequestError(f"{size}, which with the pictures before it exceeds the bound of a request "
                               "(max_request_megapixels): scale it down, or send fewer", field)


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """A picture to decode. Its file may be hostile: see `decoder_process`.

    source: a source of `read_image`, or a data URL.
    field: name in messages.
    frames: number of frames of the video that starts with this picture; 0: the picture is not part of a video.
    size: size to which the picture is scaled; None: the config determines it.
    """

    source: Any
    field: str
    vision: Vision
    budget: PixelBudget
    frames: int = 0
    size: Size | None = None

    def run(self) -> Image:
        """Returns the decoded picture. Raises RequestError."""
        source = self.source if not isinstance(self.source, str) else data_of(self.source, self.field)
        with named(self.field):
            return read_image(source, self.field, self.budget, self._target)

    def _target(self, height: int, width: int) -> Size:
        if self.size:
            return self.size
        if self.frames:
            return video_size(self.frames, height, width, self.vision.pictures, self.vision.tower)
        return target_size(height, width, self.vision.pictures, self.vision.tower)


@contextmanager
def named(field: str) -> Iterator[None]:
    """Replaces the field `image` of an error by this field."""
    try:
        yield
    except RequestError as error:
        if error.field != "image":
            raise
        raise RequestError(str(error), field) from error


def decode(job: DecodeJob) -> tuple[dict[str, Any], bytes]:
    """Runs a job in a child process. Returns the size, the remaining pixels of the request, and the pixels as bytes."""
    image = job.run()
    return {"size": (image.height, image.width), "left": job.budget.request}, image.tobytes()


def read_image(source: bytes | Path | Image | NDArray[np.uint8], name: str = "image", budget: PixelBudget | None = None,
               target: Callable[[int, int], Size] | None = None) -> Image:
    """Decodes a picture, or the first frame of an animated one, to mode RGB.

    source: a file's bytes, its path, a Pillow image, or uint8 pixels [height, width] with 3, 4 or no channels.
    name: field in errors, and subject of their messages.
    budget: pixel budget; default: the budget of `Limits`.
    target: maps height and width to the size to which the picture is scaled; None: it is not scaled.
    Raises RequestError.
    """
    from PIL import Image, UnidentifiedImageError

    if isinstance(source, np.ndarray):
        source = _from_pixels(source, name)
    if not isinstance(source, bytes | str | Path | Image.Image):
        raise RequestError(f"{name} must be a data URL, or {IN_PYTHON}, not {show(source)}", name)
    subject = f"{name} ({show(str(source))})" if isinstance(source, str | Path) else name
    if isinstance(source, str | Path) and not Path(source).is_file():
        raise RequestError(f"{subject} cannot be read: there is no such file", name)
    budget = budget or PixelBudget.of(Limits())
    try:
        if isinstance(source, Image.Image):
            return _scaled(source, subject, name, budget, target)
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS) as image:
            return _scaled(image, subject, name, budget, target)
    except UnidentifiedImageError as error:
        raise RequestError(f"{subject} is no picture that can be read: use {', '.join(FORMATS[:-1])} or {FORMATS[-1]}",
                           name) from error
    except Image.DecompressionBombError as error:
        raise RequestError(f"{subject} has far too many pixels (max_picture_megapixels): scale it down",
                           name) from error
    except MemoryError as error:
        raise RequestError(f"{subject} needs more memory than there is: it is too large or damaged", name) from error
    except RequestError:
        raise
    except (OSError, ValueError, SyntaxError, EOFError, LookupError, TypeError, ArithmeticError, RuntimeError) as error:
        # all errors of Pillow's decoders for damaged files, and of the system for paths
        why = f", it seems damaged: {str(error)[:200] or type(error).__name__}"
        if isinstance(error, OSError) and error.strerror:
            why = f": {error.strerror}"
        raise RequestError(f"{subject} cannot be read{why}", name) from error


def _from_pixels(pixels: NDArray[np.uint8], name: str) -> Image:
    from PIL import Image

    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in (3, 4)):
        raise RequestError(f"{name} must be an array of uint8 [height, width, 3], or with 4 channels or none, not of "
                           f"{pixels.dtype} {[*pixels.shape]}", name)
    if not pixels.size:
        raise RequestError(f"{name} has no pixels", name)
    return Image.fromarray(pixels)


def data_of(url: str, field: str) -> bytes:
    """Decodes a base64 data URL (RFC 2397). Raises RequestError with the field."""
    head, comma, text = url.partition(",")
    if not head.startswith("data:") or not comma:
        hint = ": URLs are fetched with `allow_image_urls` only" if url.startswith(("http://", "https://")) else ""
        raise RequestError(f"{field} must have its picture as a data URL (data:image/png;base64,...), or {IN_PYTHON}, "
                           f"not as {url[:40]!r}{hint}", field)
    if not head.endswith(";base64"):
        raise RequestError(f"{field} has a data URL that is not in base64", field)
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:  # also for text that is not ASCII
        raise RequestError(f"{field} has a data URL that is no valid base64: {error}", field) from error


def _scaled(image: Image, subject: str, name: str, budget: PixelBudget,
            target: Callable[[int, int], Size] | None) -> Image:
    from PIL import ImageOps
    from PIL.Image import Resampling

    if not image.width or not image.height:
        raise RequestError(f"{name} has no pixels", name)
    width, height = image.size
    budget.take(width, height, subject, name)
    if target:
        target(height, width)  # refuses impossible shapes before decoding
        _reduce_jpeg(image, target)
    image.load()
    orientation = image.getexif().get(_ORIENTATION, 1)  # 1 for a TIFF, which Pillow has rotated
    size = (width, height) if orientation in _ROTATED else (height, width)
    size = target(*size) if target else size
    plain = _to_rgb(image)
    if orientation != 1:
        plain.getexif()[_ORIENTATION] = orientation
        plain = ImageOps.exif_transpose(plain)
    return plain if plain.size == size[::-1] else plain.resize(size[::-1], Resampling.BICUBIC)


def _reduce_jpeg(image: Image, target: Callable[[int, int], Size]) -> None:
    """Makes Pillow decode a large JPEG at a half, a quarter or an eighth of its size, at least twice the target."""
    width, height = image.size
    if image.format in ("JPEG", "MPO") and width * height > _FULL_DECODE:
        rotated = image.getexif().get(_ORIENTATION, 1) in _ROTATED
        tall, wide = target(width, height)[::-1] if rotated else target(height, width)
        image.draft(None, (2 * wide, 2 * tall))


def _to_rgb(image: Image) -> Image:
    """Converts to mode RGB, one strip at a time to save memory."""
    from PIL import Image

    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    plain, rows = Image.new("RGB", image.size), max(_STRIP // image.width, 1)
    for top in range(0, image.height, rows):
        box = (0, top, image.width, min(top + rows, image.height))
        plain.paste(_flatten(image.crop(box)), box)
    return plain


def _flatten(image: Image) -> Image:
    """Converts to mode RGB on white."""
    from PIL import Image

    if image.mode in _BRIGHTNESS:
        image = image.convert("F").point(partial(operator.mul, _BRIGHTNESS[image.mode])).convert("L")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        above = image.convert("RGBA")
        below = Image.new("RGBA", above.size, "white")
        return Image.alpha_composite(below, above).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


# Sizes and patches


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
    """Returns the size to which an image is scaled (`smart_resize` of transformers): multiples of a token's side within
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
    """Returns the size to which video frames are scaled (`smart_resize` of Qwen3VLVideoProcessor): like `target_size`,
    with bounds for the total pixels of all `count` frames, without padding."""
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
    """Groups one image, or the frames of a video that share their patches. The frames have their final size."""
    height, width = frames[0].shape[:2]
    grid = (height // vision.patch_size, width // vision.patch_size)
    return Pixels(np.stack(frames), grid, grid[0] * grid[1] // vision.merge_size ** 2)


def patches_of(given: Pixels, config: ImageConfig, vision: VisionConfig) -> NDArray[np.float32]:
    """Returns the normalised patches, float32 [N, patch_values], with the patches of one token next to each other.

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
