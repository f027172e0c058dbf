"""The pictures of one conversation, as its messages give them."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from deltic.config.vision import FilmConfig, Vision
from deltic.errors import RequestError, show
from deltic.vision.films import read_film
from deltic.vision.images import IN_PYTHON, read_image
from deltic.vision.patches import Film, Pixels, film_size, picture

if TYPE_CHECKING:
    from PIL.Image import Image

_UNSAID = 24
"""Frames a second, where neither a message nor the model's files say how fast a list of them goes (transformers)."""
_KEYS = ("image_url", "image", "url", "source")


def urls_of(parts: Iterable[tuple[Mapping[str, Any], str]]) -> dict[str, str]:
    """The http(s) URLs that parts show pictures by, with the field of each."""
    found = dict[str, str]()
    for part, field in parts:
        frames = part.get("video")
        shown = [({"image": frame}, f"{field}.video[{index}]") for index, frame in enumerate(frames)] if isinstance(
            frames, list | tuple) else [(part, field)]
        for each, place in shown:
            source = None if isinstance(frames, Path) else _source(each, place)
            if _is_url(source):
                found.setdefault(source, place)
    return found


def _is_url(source: Any) -> TypeGuard[str]:
    return isinstance(source, str) and source.startswith(("http://", "https://"))


class PictureReader:
    """Reads the parts of messages that are pictures or films, in order; `found` are those so far.

    encode: gives the ids of a text. most: pictures that a conversation may have, frames among them. tokens: those that
    all of them together may become. fetch: gets what is behind an http(s) URL; None: nobody does.
    """

    def __init__(self, vision: Vision, encode: Callable[[str], Sequence[int]], most: int, tokens: int,
                 fetch: Callable[[str, str], bytes] | None = None) -> None:
        self._vision, self._encode, self._most, self._tokens = vision, encode, most, tokens
        self._fetch = fetch
        self.found: list[Pixels | Film] = []

    def __call__(self, part: Mapping[str, Any], kind: str, field: str) -> dict[str, Any]:
        """The part as chat templates know it. RequestError names what is wrong with it."""
        try:
            return self._taken(part, kind, field)
        except RequestError as error:
            if error.field != "image":
                raise
            raise RequestError(str(error), field) from error  # who scales it knows no field

    def _taken(self, part: Mapping[str, Any], kind: str, field: str) -> dict[str, Any]:
        if kind == "video":
            return {"type": kind, "digest": self._film(part, field)}
        pixels = self._scaled([self._read(part, field)], field, None)
        self.found.append(pixels)
        return {"type": kind, "digest": pixels.digest}

    def _film(self, part: Mapping[str, Any], field: str) -> list[str]:
        """Reads a list of frames, or a file; gives the digests of its parts."""
        films = self._vision.pictures.films
        given, fps = part.get("video"), part.get("fps", films.rate or _UNSAID)
        if not isinstance(given, Path) and (not isinstance(given, list | tuple) or not given):
            raise RequestError(f'{field} must be of the form {{"type": "video", "video": [frame, ...], "fps": 2}}, '
                               f"with pictures as frames, or in Python a pathlib.Path as video, not {show(given)}",
                               field)
        if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0.001 <= fps <= 1000:
            raise RequestError(f"{field}.fps must be a number from 0.001 to 1000, not {show(fps)}", f"{field}.fps")
        wanted = replace(films, rate=fps, count=0) if "fps" in part else films
        frames, times = self._file(given, wanted, field) if isinstance(given, Path) else (
            [self._read({"image": frame}, f"{field}.video[{index}]") for index, frame in enumerate(given)],
            [index / fps for index in range(len(given))])
        together = self._vision.tower.temporal_patch_size
        size = self._film_size(frames[0], len(frames))
        frames += [frames[-1]] * (-len(frames) % together)
        parts, stamps = list[Pixels](), list[tuple[int, ...]]()
        for start in range(0, len(frames), together):
            parts.append(self._scaled(frames[start:start + together], field, size))
            # an added frame is shown when the last one is
            ends = (times[min(index, len(times) - 1)] for index in (start, start + together - 1))
            stamps.append(tuple(self._encode(f"<{sum(ends) / 2:.1f} seconds>")))
        self.found.append(Film(tuple(parts), tuple(stamps)))
        return [part.digest for part in parts]

    def _file(self, path: Path, films: FilmConfig, field: str) -> tuple[list[Image], list[float]]:
        from PIL.Image import Resampling

        size: tuple[int, int] | None = None

        def scaled(frame: Image, count: int) -> Image:
            nonlocal size
            size = size or self._film_size(frame, count)
            return frame.resize(size[::-1], Resampling.BICUBIC)

        frames, times = read_film(path, films, self._most, scaled, field)
        self._most -= len(frames)
        return frames, times

    def _film_size(self, first: Image, count: int) -> tuple[int, int]:
        return film_size(count, first.height, first.width, self._vision.pictures, self._vision.tower)

    def _read(self, part: Mapping[str, Any], field: str) -> Image:
        self._most -= 1
        if self._most < 0:
            raise RequestError("messages have more pictures than max_pictures allows: send fewer", "messages")
        source = _source(part, field)
        if isinstance(source, str):
            fetch = self._fetch if _is_url(source) else None
            source = fetch(source, field) if fetch else data_of(source, field)
        return read_image(source, field)

    def _scaled(self, images: list[Image], field: str, size: tuple[int, int] | None) -> Pixels:
        pixels = picture(images, self._vision.pictures, self._vision.tower, size)
        self._tokens -= pixels.tokens
        if self._tokens < 0:
            raise RequestError(f"{field} would be {pixels.tokens:,} tokens, more than there is room for beside the "
                               "pictures before it: send fewer, or smaller ones", field)
        return pixels


def _source(part: Mapping[str, Any], field: str) -> Any:
    """What `read_image` takes, or a URL. JSON has URLs alone; only Python can give anything else."""
    given = next((part[key] for key in _KEYS if part.get(key) is not None), None)
    if isinstance(given, Mapping):
        given = given.get("url")
    if given is None:
        raise RequestError(f'{field} has no picture: give {{"type": "image_url", "image_url": {{"url": "data:..."}}}}, '
                           f'or {{"type": "image", "image": ...}} with a data URL, or {IN_PYTHON}', field)
    return given


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
