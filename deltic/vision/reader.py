"""The pictures of one conversation, as its messages give them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from deltic.config import Limits
from deltic.config.vision import VideoConfig, Vision
from deltic.errors import RequestError, show
from deltic.vision.images import IN_PYTHON, DecodeJob, PixelBudget, Size, named
from deltic.vision.patches import Pixels, Video, pixels
from deltic.vision.sizes import film_size
from deltic.vision.video import read_film

if TYPE_CHECKING:
    from PIL.Image import Image

_UNSAID = 24
"""Frames a second, where neither a message nor the model's files say how fast a list of them goes (transformers)."""
_KEYS = ("image_url", "image", "url", "source")

Frame = NDArray[np.uint8]
"""[height, width, 3]"""
Fetch = Callable[[str, str], bytes]
"""Gets what is behind an http(s) URL, with the field that has it."""
Shown = Mapping[str, Pixels | Video]
"""What parts show, by their fields."""
Steps = Generator[DecodeJob, Frame, Shown]


@dataclass(frozen=True, slots=True)
class ShownPart:
    """A part of a message that shows a picture or a film (`kind`). rendered: the part as chat templates know it, whose
    digest is set when the picture is there."""

    part: Mapping[str, Any]
    kind: str
    field: str
    rendered: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reading:
    """Reads the pictures of one conversation.

    encode: gives the ids of a text. tokens: those that all pictures together may become. fetches: whether http(s) URLs
    are fetched.
    """

    vision: Vision
    encode: Callable[[str], Sequence[int]]
    limits: Limits
    tokens: int
    fetches: bool = False
    parts: list[ShownPart] = field(default_factory=list)

    def see(self, part: Mapping[str, Any], kind: str, field: str) -> dict[str, Any]:
        """Notes a part to be read. Returns it as chat templates know it; `show` completes it."""
        rendered = {"type": kind}
        self.parts.append(ShownPart(part, kind, field, rendered))
        return rendered

    def show(self, found: Shown) -> list[Pixels | Video]:
        """Completes the parts with what they show, which is returned in their order."""
        for each in self.parts:
            seen = found[each.field]
            each.rendered["digest"] = seen.digest if isinstance(seen, Pixels) else [part.digest for part in seen.parts]
        return [found[each.field] for each in self.parts]

    def urls(self) -> dict[str, str]:
        """The http(s) URLs to fetch, with the field of each."""
        found = dict[str, str]()
        for each in self.parts if self.fetches else ():
            for source, place in _sources(each):
                if _is_url(source):
                    found.setdefault(source, place)
        return found

    def read(self, fetch: Fetch | None) -> Shown:
        """What the parts show, decoded in this thread. RequestError names what is wrong."""
        steps, frame = self.steps(fetch), None
        try:
            while True:
                frame = np.asarray(steps.send(frame).run())  # type: ignore[arg-type]
        except StopIteration as done:
            found: Shown = done.value
            return found

    def steps(self, fetch: Fetch | None) -> Steps:
        """As `read`, by a caller that decodes: yields a job for each file, and takes what it gives."""
        reader = _BudgetedReader(self, fetch)
        found = dict[str, Pixels | Video]()
        for each in self.parts:
            read = reader.film if each.kind == "video" else reader.picture
            found[each.field] = yield from read(each.part, each.field)
        return found


class UnreadImages(Exception):
    """A conversation shows pictures that nobody has read."""

    def __init__(self, reading: Reading) -> None:
        super().__init__("pictures have to be read first")
        self.reading = reading


def _sources(shown: ShownPart) -> Iterator[tuple[Any, str]]:
    """What pictures of a part are given as, with the field of each."""
    frames = shown.part.get("video")
    if isinstance(frames, list | tuple):
        for index, frame in enumerate(frames):
            yield _source({"image": frame}, place := f"{shown.field}.video[{index}]"), place
    elif not isinstance(frames, Path):
        yield _source(shown.part, shown.field), shown.field


def _is_url(source: Any) -> TypeGuard[str]:
    return isinstance(source, str) and source.startswith(("http://", "https://"))


class _BudgetedReader:
    """What is left of the budgets of a reading."""

    def __init__(self, reading: Reading, fetch: Fetch | None) -> None:
        self._vision, self._encode, self._tokens = reading.vision, reading.encode, reading.tokens
        self._most, self._budget = reading.limits.max_pictures, PixelBudget.of(reading.limits)
        self._fetch = fetch

    def picture(self, part: Mapping[str, Any], field: str) -> Generator[DecodeJob, Frame, Pixels]:
        """A picture alone."""
        frame = yield self._job(part, field)
        return self._counted([frame], field)

    def film(self, part: Mapping[str, Any], field: str) -> Generator[DecodeJob, Frame, Video]:
        """A list of frames, or a file."""
        films = self._vision.pictures.videos
        given, fps = part.get("video"), part.get("fps", films.rate or _UNSAID)
        if not isinstance(given, Path) and (not isinstance(given, list | tuple) or not given):
            raise RequestError(f'{field} must be of the form {{"type": "video", "video": [frame, ...], "fps": 2}}, '
                               f"with pictures as frames, or in Python a pathlib.Path as video, not {show(given)}",
                               field)
        if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0.001 <= fps <= 1000:
            raise RequestError(f"{field}.fps must be a number from 0.001 to 1000, not {show(fps)}", f"{field}.fps")
        if isinstance(given, Path):
            frames, times = self._file(given, replace(films, rate=fps, count=0) if "fps" in part else films, field)
        else:
            frames, times = list[Frame](), [index / fps for index in range(len(given))]
            for index, each in enumerate(given):
                size: Size | None = frames[0].shape[:2] if frames else None
                frames.append((yield self._job({"image": each}, f"{field}.video[{index}]", len(given), size)))
        return self._film(frames, times, field)

    def _film(self, frames: list[Frame], times: list[float], field: str) -> Video:
        together = self._vision.tower.temporal_patch_size
        frames += [frames[-1]] * (-len(frames) % together)
        parts, stamps = list[Pixels](), list[tuple[int, ...]]()
        for start in range(0, len(frames), together):
            parts.append(self._counted(frames[start:start + together], field))
            # an added frame is shown when the last one is
            ends = (times[min(index, len(times) - 1)] for index in (start, start + together - 1))
            stamps.append(tuple(self._encode(f"<{sum(ends) / 2:.1f} seconds>")))
        return Video(tuple(parts), tuple(stamps))

    def _file(self, path: Path, films: VideoConfig, field: str) -> tuple[list[Frame], list[float]]:
        from PIL.Image import Resampling

        size: Size | None = None

        def scaled(frame: Image, count: int) -> Image:
            nonlocal size
            size = size or film_size(count, frame.height, frame.width, self._vision.pictures, self._vision.tower)
            return frame.resize(size[::-1], Resampling.BICUBIC)

        with named(field):
            images, times = read_film(path, films, self._most, scaled, field, self._budget.picture)
        self._most -= len(images)
        return [np.asarray(image) for image in images], times

    def _job(self, part: Mapping[str, Any], field: str, frames: int = 0, size: Size | None = None) -> DecodeJob:
        self._most -= 1
        if self._most < 0:
            raise RequestError("messages have more pictures than max_pictures allows: send fewer", "messages")
        source = _source(part, field)
        if _is_url(source) and self._fetch:
            source = self._fetch(source, field)
        return DecodeJob(source, field, self._vision, self._budget, frames, size)

    def _counted(self, frames: list[Frame], field: str) -> Pixels:
        found = pixels(frames, self._vision.tower)
        self._tokens -= found.tokens
        if self._tokens < 0:
            raise RequestError(f"{field} would be {found.tokens:,} tokens, more than there is room for beside the "
                               "pictures before it: send fewer, or smaller ones", field)
        return found


def _source(part: Mapping[str, Any], field: str) -> Any:
    """What a `DecodeJob` takes, or a URL. JSON has URLs alone; only Python can give anything else."""
    given = next((part[key] for key in _KEYS if part.get(key) is not None), None)
    if isinstance(given, Mapping):
        given = given.get("url")
    if given is None:
        raise RequestError(f'{field} has no picture: give {{"type": "image_url", "image_url": {{"url": "data:..."}}}}, '
                           f'or {{"type": "image", "image": ...}} with a data URL, or {IN_PYTHON}', field)
    return given
