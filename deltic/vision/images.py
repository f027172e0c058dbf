"""From what a user gives to pixels: RGB, upright, on white where it was transparent. Nothing in a file is believed
unchecked: what is too large is refused by its header."""

from __future__ import annotations

import io
import operator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deltic.errors import RequestError, show

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 89_478_485
"""Pixels of a picture as it comes: decoding takes some bytes for each. Pillow warns of files that have more."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""What is decoded: formats whose decoders are Pillow's own or its wheels'."""
IN_PYTHON = "in Python a pathlib.Path, the bytes of a file, a picture of Pillow's or an array of uint8 pixels"
"""What a picture may be besides a data URL; messages that clients of a server see say so, too."""
_DEEP = {"I;16": 1 / 257, "I;16L": 1 / 257, "I;16B": 1 / 257, "I": 1 / 257, "F": 1.0}


def read_image(source: bytes | str | Path | Image | NDArray[np.uint8], name: str = "image") -> Image:
    """A picture in mode RGB. source: a file's bytes, its path, a picture of Pillow's, or pixels [height, width, 3],
    with 4 for one with an alpha channel, or [height, width] of a grey one. Of an animated one the first frame counts.

    name: what messages call it. Raises RequestError with it as the parameter, saying why the picture cannot be had.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    if isinstance(source, np.ndarray):
        source = _from_pixels(source, name)
    if not isinstance(source, bytes | str | Path | Image.Image):
        raise RequestError(f"{name} must be a data URL, or {IN_PYTHON}, not {show(source)}", name)
    said = f"{name} ({show(str(source))})" if isinstance(source, str | Path) else name
    if isinstance(source, str | Path) and not Path(source).is_file():
        raise RequestError(f"{said} cannot be read: there is no such file", name)
    try:
        if isinstance(source, Image.Image):
            return _plain(ImageOps.exif_transpose(source), name)
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise RequestError(f"{said} has {width:,} x {height:,} pixels, and at most {MAX_PIXELS:,} are read: "
                                   "scale it down", name)
            image.load()
            return _plain(ImageOps.exif_transpose(image), name)
    except UnidentifiedImageError as error:
        raise RequestError(f"{said} is no picture that can be read: use {', '.join(FORMATS[:-1])} or {FORMATS[-1]}",
                           name) from error
    except Image.DecompressionBombError as error:
        raise RequestError(f"{said} has far more than {MAX_PIXELS:,} pixels: scale it down", name) from error
    except MemoryError as error:
        raise RequestError(f"{said} needs more memory than there is: scale it down, or it is damaged", name) from error
    except RequestError:
        raise
    except (OSError, ValueError, SyntaxError, EOFError, LookupError, TypeError, ArithmeticError, RuntimeError) as error:
        # all that Pillow's decoders raise of damaged files; what the system says of a path is more than that
        why = (f": {error.strerror}" if isinstance(error, OSError) and error.strerror else
               f", it seems damaged: {str(error)[:200] or type(error).__name__}")
        raise RequestError(f"{said} cannot be read{why}", name) from error


def _from_pixels(pixels: NDArray[np.uint8], name: str) -> Image:
    from PIL import Image

    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in (3, 4)):
        raise RequestError(f"{name} must be an array of uint8 [height, width, 3], or with 4 channels or none, not of "
                           f"{pixels.dtype} {[*pixels.shape]}", name)
    if not 0 < pixels.shape[0] * pixels.shape[1] <= MAX_PIXELS:
        raise RequestError(f"{name} has {pixels.shape[1]:,} x {pixels.shape[0]:,} pixels, and from 1 to {MAX_PIXELS:,} "
                           "are read", name)
    return Image.fromarray(pixels)


def _plain(image: Image, name: str) -> Image:
    """In mode RGB."""
    from PIL import Image

    if not image.width or not image.height:
        raise RequestError(f"{name} has no pixels", name)
    if image.mode in _DEEP:
        image = image.convert("F").point(partial(operator.mul, _DEEP[image.mode])).convert("L")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        above = image.convert("RGBA")
        below = Image.new("RGBA", above.size, "white")
        return Image.alpha_composite(below, above).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")
