"""Image files: formats, orientation, transparency, and damaged and hostile files."""

from __future__ import annotations

import io
import resource
import struct
import time
import zlib
from random import Random
from typing import Any

import numpy as np
import pytest
from PIL import Image

from deltic.config import Limits
from deltic.errors import RequestError
from deltic.vision.images import PixelBudget, read_image


def photo(width: int = 30, height: int = 20) -> Image.Image:
    across, down = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return Image.fromarray(np.stack([across, down, 255 - across], -1).astype(np.uint8))


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def alike(image: Image.Image, other: Image.Image, most: float = 6.0) -> bool:
    one, two = (np.asarray(each.convert("RGB"), dtype=float) for each in (image, other))
    return one.shape == two.shape and float(np.abs(one - two).mean()) < most


@pytest.mark.parametrize(("kind", "options"), [
    ("PNG", {}), ("JPEG", {"quality": 95}), ("WEBP", {"lossless": True}), ("BMP", {}), ("TIFF", {}), ("PPM", {}),
    ("GIF", {})])
def test_formats(kind: str, options: dict[str, Any]) -> None:
    found = read_image(saved(photo(), kind, **options))
    assert found.mode == "RGB" and alike(found, photo(), 12.0 if kind == "GIF" else 6.0)


def test_exif_orientation() -> None:
    turned = photo().transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 270 degrees
    assert alike(read_image(saved(turned, "JPEG", quality=95, exif=exif.tobytes())), photo())


def test_transparent_is_white() -> None:
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    half = Image.new("LA", (4, 4), (0, 128))
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 0, 255, 0])
    assert read_image(saved(clear, "PNG")).getpixel((0, 0)) == (255, 255, 255)
    assert read_image(saved(half, "PNG")).getpixel((0, 0)) == (127, 127, 127)
    assert read_image(saved(palette, "PNG", transparency=1)).getpixel((0, 0)) == (255, 255, 255)
    assert read_image(saved(palette, "PNG")).getpixel((0, 0)) == (0, 255, 0)


def test_other_modes() -> None:
    grey = photo().convert("L")
    assert alike(read_image(saved(grey, "PNG")), grey)
    assert alike(read_image(saved(photo().convert("CMYK"), "JPEG", quality=95)), photo(), 12.0)
    assert alike(read_image(saved(photo().convert("1"), "PNG")), photo().convert("1"))
    deep = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    assert alike(read_image(saved(deep, "PNG")), grey, 2.0)
    film = [photo(), photo().transpose(Image.Transpose.FLIP_LEFT_RIGHT)]
    assert alike(read_image(saved(film[0], "WEBP", save_all=True, append_images=film[1:], lossless=True)), film[0])
    assert read_image(saved(photo(1, 1), "PNG")).size == (1, 1)
    assert read_image(photo().convert("CMYK")).mode == "RGB"


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@pytest.mark.filterwarnings("ignore:Image size")
@pytest.mark.parametrize("side", [9_500, 14_000, 60_000])
def test_bombs(side: int) -> None:
    """Refused by the header, without decoding."""
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    bomb = (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1 << 20)))
            + chunk(b"IEND", b""))
    assert side ** 2 > PixelBudget.of(Limits()).picture
    began = time.perf_counter()
    with pytest.raises(RequestError, match=r"pixels.*: scale it down"):
        read_image(bomb)
    assert time.perf_counter() - began < 1


def test_no_external_programs_run() -> None:
    """Formats that Pillow passes to other programs are refused."""
    for text in (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage", b"<svg/>", b"%PDF-1.4", b"GIF", b""):
        with pytest.raises(RequestError, match=r"no picture|damaged"):
            read_image(text)


@pytest.mark.filterwarnings("ignore")
def test_mutated_files() -> None:
    """300 files are decoded or refused, quickly and within limits."""
    random = Random(4)
    kinds = [saved(photo(200, 150), kind, **options) for kind, options in (
        ("PNG", {}), ("JPEG", {}), ("WEBP", {}), ("GIF", {}), ("TIFF", {"compression": "tiff_lzw"}), ("BMP", {}))]
    before, read = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    for _ in range(300):
        data = bytearray(random.choice(kinds))
        for _ in range(random.choice([1, 1, 2, 9])):
            at = random.randrange(min(len(data), random.choice([40, 400, 1 << 20])))
            match random.randrange(4):
                case 0:
                    data[at] = random.randrange(256)
                case 1:
                    data[at:at + 4] = b"\xff\xff\xff\x7f"
                case 2:
                    del data[at:at + random.randint(1, 50)]
                case 3:
                    data[at:at] = random.randbytes(random.randint(1, 20))
        began = time.perf_counter()
        try:
            assert read_image(bytes(data)).mode == "RGB"
            read += 1
        except RequestError as error:
            assert error.field == "image"
        assert time.perf_counter() - began < 5
    assert read > 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, "KiB"
