"""From what a user gives to pixels: RGB, upright, on white where it was transparent, in the size that the model sees.
Nothing in a file is believed unchecked: what is too large is refused by its header, before it is decoded."""

from __future__ import annotations

import base64
import io
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltic.config import Limits
from deltic.config.vision import Vision
from deltic.errors import RequestError, show
from deltic.vision.sizes import film_size, target_size

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""What is decoded: formats whose decoders are Pillow's own or its wheels'."""
IN_PYTHON = "in Python a pathlib.Path, the bytes of a file or a picture of Pillow's"
"""What a picture may be besides a data URL; messages that clients of a server see say so, too."""
_DEEP = {"I;16": 1 / 257, "I;16L": 1 / 257, "I;16B": 1 / 257, "I": 1 / 257, "F": 1.0}
_EXACT = 1 << 24
"""Pixels of the largest picture that is decoded in full where its decoder could reduce it."""
_STRIP = 1 << 22
"""Pixels that are converted to RGB at a time."""
_ORIENTATION, _TURNED = 0x0112, range(5, 9)
"""The EXIF tag, and its values for pictures that lie on their side."""

Size = tuple[int, int]
"""Height and width."""


class PixelBudget:
    """Pixels, as files have them, that may be decoded. picture: of each picture. request: of all of them together."""

    def __init__(self, picture: int, request: int) -> None:
        self.picture, self.request = picture, request

    @classmethod
    def of(cls, limits: Limits) -> PixelBudget:
        return cls(limits.max_picture_megapixels * 1_000_000, limits.max_request_megapixels * 1_000_000)

    def take(self, width: int, height: int, name: str, field: str) -> None:
        """Count one picture in. RequestError with the field if it, or all together, are too large."""
        size = f"{name} has {width:,} x {height:,} pixels"
        if width * height > self.picture:
            raise RequestError(f"{size}, and at most {self.picture:,} are read (max_picture_megapixels): scale it down",
                               field)
        self.request -= width * height
        if self.request < 0:
            raise RequestError(f"{size}, which with the pictures before it are more than a request may have "
                               "(max_request_megapixels): scale it down, or send fewer", field)


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """A picture to decode. Its file may be hostile: see `decoder_process`.

    source: as `read_image` takes it, or a data URL. field: what messages call it. size: that it is scaled to; None: as
    the model wants it, which depends on the number of frames if it is a film's first; 0: it is no film's.
    """

    source: Any
    field: str
    vision: Vision
    budget: PixelBudget
    frames: int = 0
    size: Size | None = None

    def run(self) -> Image:
        """The picture. RequestError says why it cannot be had."""
        source = self.source if not isinstance(self.source, str) else data_of(self.source, self.field)
        with named(self.field):
            return read_image(source, self.field, self.budget, self._target)

    def _target(self, height: int, width: int) -> Size:
        if self.size:
            return self.size
        if self.frames:
            return film_size(self.frames, height, width, self.vision.pictures, self.vision.tower)
        return target_size(height, width, self.vision.pictures, self.vision.tower)


@contextmanager
def named(field: str) -> Iterator[None]:
    """What is wrong with a picture's shape is said of its field."""
    try:
        yield
    except RequestError as error:
        if error.field != "image":
            raise
        raise RequestError(str(error), field) from error


def decode(job: DecodeJob) -> tuple[dict[str, Any], bytes]:
    """Runs a job in a child process: height and width, pixels of the request that are left, and the pixels as bytes."""
    image = job.run()
    return {"size": (image.height, image.width), "left": job.budget.request}, image.tobytes()


def read_image(source: bytes | Path | Image, name: str = "image", budget: PixelBudget | None = None,
               target: Callable[[int, int], Size] | None = None) -> Image:
    """A picture in mode RGB. source: a file's bytes, its path, or a picture of Pillow's. Of an animated one the first
    frame counts. budget: what it may have; None: as `Limits` has it. target: gives the size that one of a given height
    and width is scaled to; None: none is scaled.

    name: what messages call it. Raises RequestError with it as the parameter, saying why the picture cannot be had.
    """
    from PIL import Image, UnidentifiedImageError

    if not isinstance(source, bytes | str | Path | Image.Image):
        raise RequestError(f"{name} must be a data URL, or {IN_PYTHON}, not {show(source)}", name)
    said = f"{name} ({show(str(source))})" if isinstance(source, str | Path) else name
    if isinstance(source, str | Path) and not Path(source).is_file():
        raise RequestError(f"{said} cannot be read: there is no such file", name)
    budget = budget or PixelBudget.of(Limits())
    try:
        if isinstance(source, Image.Image):
            return _scaled(source, said, name, budget, target)
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS) as image:
            return _scaled(image, said, name, budget, target)
    except UnidentifiedImageError as error:
        raise RequestError(f"{said} is no picture that can be read: use {', '.join(FORMATS[:-1])} or {FORMATS[-1]}",
                           name) from error
    except Image.DecompressionBombError as error:
        raise RequestError(f"{said} has far more pixels than are read (max_picture_megapixels): scale it down",
                           name) from error
    except MemoryError as error:
        raise RequestError(f"{said} needs more memory than there is: scale it down, or it is damaged", name) from error
    except RequestError:
        raise
    except (OSError, ValueError, SyntaxError, EOFError, LookupError, TypeError, ArithmeticError, RuntimeError) as error:
        # all that Pillow's decoders raise of damaged files; what the system says of a path is more than that
        why = (f": {error.strerror}" if isinstance(error, OSError) and error.strerror else
               f", it seems damaged: {str(error)[:200] or type(error).__name__}")
        raise RequestError(f"{said} cannot be read{why}", name) from error


def data_of(url: str, field: str) -> bytes:
    """The bytes of a data URL (RFC 2397) in base64. RequestError names the field."""
    head, comma, text = url.partition(",")
    if not head.startswith("data:") or not comma:
        hint = ": URLs are fetched with `allow_image_urls` alone" if url.startswith(("http://", "https://")) else ""
        raise RequestError(f"{field} must have its picture as a data URL (data:image/png;base64,...), or {IN_PYTHON}, "
                           f"not as {url[:40]!r}{hint}", field)
    if not head.endswith(";base64"):
        raise RequestError(f"{field} has a data URL that is not in base64", field)
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:  # also of text that is not ASCII
        raise RequestError(f"{field} has a data URL that is no valid base64: {error}", field) from error


def _scaled(image: Image, said: str, name: str, budget: PixelBudget,
            target: Callable[[int, int], Size] | None) -> Image:
    """The picture as `read_image` gives it, of what is open."""
    from PIL import ImageOps
    from PIL.Image import Resampling

    if not image.width or not image.height:
        raise RequestError(f"{name} has no pixels", name)
    width, height = image.size
    budget.take(width, height, said, name)
    if target:
        target(height, width)  # raises for a shape that no model takes
        _draft(image, target)
    image.load()
    orientation = image.getexif().get(_ORIENTATION, 1)  # of a TIFF 1 by now, as Pillow turns it
    size = (width, height) if orientation in _TURNED else (height, width)
    size = target(*size) if target else size
    plain = _plain(image)
    if orientation != 1:
        plain.getexif()[_ORIENTATION] = orientation
        plain = ImageOps.exif_transpose(plain)
    return plain if plain.size == size[::-1] else plain.resize(size[::-1], Resampling.BICUBIC)


def _draft(image: Image, target: Callable[[int, int], Size]) -> None:
    """Has a large JPEG decoded at a half, a quarter or an eighth of its size, where that leaves twice what is needed.
    """
    width, height = image.size
    if image.format in ("JPEG", "MPO") and width * height > _EXACT:
        turned = image.getexif().get(_ORIENTATION, 1) in _TURNED
        tall, wide = target(width, height)[::-1] if turned else target(height, width)
        image.draft(None, (2 * wide, 2 * tall))


def _plain(image: Image) -> Image:
    """In mode RGB; a strip at a time, as a large picture leaves no room for several copies."""
    from PIL import Image

    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    plain, rows = Image.new("RGB", image.size), max(_STRIP // image.width, 1)
    for top in range(0, image.height, rows):
        box = (0, top, image.width, min(top + rows, image.height))
        plain.paste(_flat(image.crop(box)), box)
    return plain


def _flat(image: Image) -> Image:
    """In mode RGB, every pixel of its own."""
    from PIL import Image

    if image.mode in _DEEP:
        image = image.convert("F").point(partial(operator.mul, _DEEP[image.mode])).convert("L")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        above = image.convert("RGBA")
        below = Image.new("RGBA", above.size, "white")
        return Image.alpha_composite(below, above).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")
