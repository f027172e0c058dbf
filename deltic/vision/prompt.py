"""Collects and reads the pictures of a conversation, and builds the prompt that contains their tokens."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeGuard

import numpy as np

from deltic.config import Limits
from deltic.config.vision import VideoConfig, Vision, VisionConfig
from deltic.errors import RequestError, show
from deltic.params import Picture, Positions, Prompt, content_keys
from deltic.vision.images import (
    IN_PYTHON,
    DecodeJob,
    Frame,
    PixelBudget,
    Pixels,
    Size,
    Video,
    named,
    pixels,
    video_size,
)
from deltic.vision.video import read_video

if TYPE_CHECKING:
    from PIL.Image import Image

_DEFAULT_RATE: Final = 24
"""Default frames per second for a list of frames without a rate (as in transformers)."""
_IMAGE_KEYS: Final = ("image_url", "image", "url", "source")

Fetch = Callable[[str, str], bytes]
"""Downloads an http(s) URL. The second argument is the field that contains the URL."""
Shown = Mapping[str, Pixels | Video]
"""Decoded pictures by field."""
Steps = Generator[DecodeJob, Frame, Shown]


# Reading


@dataclass(frozen=True, slots=True)
class ShownPart:
    """A part of a message that is a picture or a video, as `kind` states.

    rendered: the part in the form for chat templates; its digest is set once the picture is decoded.
    """

    part: Mapping[str, Any]
    kind: str
    field: str
    rendered: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reading:
    """Reads the pictures of one conversation.

    encode: returns the token ids of a text.
    tokens: upper bound for the tokens of all pictures.
    fetches: True if http(s) URLs are allowed.
    """

    vision: Vision
    encode: Callable[[str], Sequence[int]]
    limits: Limits
    tokens: int
    fetches: bool = False
    parts: list[ShownPart] = field(default_factory=list)

    def see(self, part: Mapping[str, Any], kind: str, field: str) -> dict[str, Any]:
        """Adds a part to the parts to read. Returns its form for chat templates, which `show` completes."""
        rendered = {"type": kind}
        self.parts.append(ShownPart(part, kind, field, rendered))
        return rendered

    def show(self, found: Shown) -> list[Pixels | Video]:
        """Sets the digests of the parts. Returns the pictures in the order of the parts."""
        for each in self.parts:
            seen = found[each.field]
            each.rendered["digest"] = seen.digest if isinstance(seen, Pixels) else [part.digest for part in seen.parts]
        return [found[each.field] for each in self.parts]

    def urls(self) -> dict[str, str]:
        """Returns the http(s) URLs to fetch, with the field of each."""
        found = dict[str, str]()
        if self.fetches:
            for each in self.parts:
                for source, place in _sources(each):
                    if _is_url(source):
                        found.setdefault(source, place)
        return found

    def read(self, fetch: Fetch | None) -> Shown:
        """Decodes the parts in this thread. Raises RequestError."""
        steps, frame = self.steps(fetch), None
        try:
            while True:
                frame = np.asarray(steps.send(frame).run())  # type: ignore[arg-type]
        except StopIteration as done:
            found: Shown = done.value
            return found

    def steps(self, fetch: Fetch | None) -> Steps:
        """Runs like `read`, but yields each decoding job to the caller, who sends back the job's result."""
        reader = _BudgetedReader(self, fetch)
        found = dict[str, Pixels | Video]()
        for each in self.parts:
            read = reader.video if each.kind == "video" else reader.image
            found[each.field] = yield from read(each.part, each.field)
        return found


class UnreadImages(Exception):
    """Raised for a conversation with pictures that are not decoded yet."""

    def __init__(self, reading: Reading) -> None:
        super().__init__("pictures have to be read first")
        self.reading = reading


def _sources(shown: ShownPart) -> Iterator[tuple[Any, str]]:
    """Yields the sources of a part's pictures, with the field of each."""
    frames = shown.part.get("video")
    if isinstance(frames, list | tuple):
        for index, frame in enumerate(frames):
            place = f"{shown.field}.video[{index}]"
            yield _source({"image": frame}, place), place
    elif not isinstance(frames, Path):
        yield _source(shown.part, shown.field), shown.field


def _source(part: Mapping[str, Any], field: str) -> Any:
    """Returns the source for a `DecodeJob`, or a URL. A part from JSON contains only URLs."""
    given = next((part[key] for key in _IMAGE_KEYS if part.get(key) is not None), None)
    if isinstance(given, Mapping):
        given = given.get("url")
    if given is None:
        raise RequestError(f'{field} has no picture: give {{"type": "image_url", "image_url": {{"url": "data:..."}}}}, '
                           f'or {{"type": "image", "image": ...}} with a data URL, or {IN_PYTHON}', field)
    return given


def _is_url(source: Any) -> TypeGuard[str]:
    return isinstance(source, str) and source.startswith(("http://", "https://"))


class _BudgetedReader:
    """Reads the parts of one conversation within its limits."""

    def __init__(self, reading: Reading, fetch: Fetch | None) -> None:
        self._vision = reading.vision
        self._encode = reading.encode
        self._tokens_left = reading.tokens
        self._pictures_left = reading.limits.max_pictures
        self._budget = PixelBudget.of(reading.limits)
        self._fetch = fetch

    def image(self, part: Mapping[str, Any], field: str) -> Generator[DecodeJob, Frame, Pixels]:
        frame = yield self._job(part, field)
        return self._counted([frame], field)

    def video(self, part: Mapping[str, Any], field: str) -> Generator[DecodeJob, Frame, Video]:
        """Reads a list of frames, or a file."""
        config = self._vision.pictures.videos
        given, fps = part.get("video"), part.get("fps", config.rate or _DEFAULT_RATE)
        if not isinstance(given, Path) and (not isinstance(given, list | tuple) or not given):
            raise RequestError(f'{field} must be of the form {{"type": "video", "video": [frame, ...], "fps": 2}}, '
                               f"with pictures as frames, or in Python a pathlib.Path as video, not {show(given)}",
                               field)
        if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0.001 <= fps <= 1000:
            raise RequestError(f"{field}.fps must be a number from 0.001 to 1000, not {show(fps)}", f"{field}.fps")
        if isinstance(given, Path):
            frames, times = self._file(given, replace(config, rate=fps, count=0) if "fps" in part else config, field)
            return self._video(frames, times, field)
        frames, times = [], [index / fps for index in range(len(given))]
        for index, each in enumerate(given):
            size: Size | None = frames[0].shape[:2] if frames else None
            frames.append((yield self._job({"image": each}, f"{field}.video[{index}]", len(given), size)))
        return self._video(frames, times, field)

    def _video(self, frames: list[Frame], times: list[float], field: str) -> Video:
        group = self._vision.tower.temporal_patch_size
        padding = -len(frames) % group
        frames += [frames[-1]] * padding
        times += [times[-1]] * padding
        parts, stamps = list[Pixels](), list[tuple[int, ...]]()
        for start in range(0, len(frames), group):
            parts.append(self._counted(frames[start:start + group], field))
            middle = (times[start] + times[start + group - 1]) / 2
            stamps.append(tuple(self._encode(f"<{middle:.1f} seconds>")))
        return Video(tuple(parts), tuple(stamps))

    def _file(self, path: Path, config: VideoConfig, field: str) -> tuple[list[Frame], list[float]]:
        from PIL.Image import Resampling

        size: Size | None = None

        def scale(frame: Image, count: int) -> Image:
            nonlocal size
            size = size or video_size(count, frame.height, frame.width, self._vision.pictures, self._vision.tower)
            return frame.resize(size[::-1], Resampling.BICUBIC)

        with named(field):
            images, times = read_video(path, config, self._pictures_left, scale, field, self._budget.picture)
        self._pictures_left -= len(images)
        return [np.asarray(image) for image in images], times

    def _job(self, part: Mapping[str, Any], field: str, frames: int = 0, size: Size | None = None) -> DecodeJob:
        self._pictures_left -= 1
        if self._pictures_left < 0:
            raise RequestError("messages have more pictures than max_pictures allows: send fewer", "messages")
        source = _source(part, field)
        if _is_url(source) and self._fetch:
            source = self._fetch(source, field)
        return DecodeJob(source, field, self._vision, self._budget, frames, size)

    def _counted(self, frames: list[Frame], field: str) -> Pixels:
        found = pixels(frames, self._vision.tower)
        self._tokens_left -= found.tokens
        if self._tokens_left < 0:
            raise RequestError(f"{field} would take {found.tokens:,} tokens, more than there is room for after the "
                               "pictures before it: send fewer, or smaller ones", field)
        return found


# Prompts


def with_pictures(ids: Sequence[int], pictures: Sequence[Pixels | Video], vision: VisionConfig,
                  boundaries: Sequence[int] = ()) -> tuple[Prompt, tuple[int, ...]]:
    """Replaces each placeholder token by the tokens of its picture. Returns the prompt and the new `boundaries`.

    An image becomes one `image_token_id` for each of its tokens. A video (`video_token_id`) becomes its parts, each
    with a timestamp, between the tokens that surround it. Raises RequestError if placeholders and pictures differ.
    """
    kinds = {vision.image_token_id: Pixels, vision.video_token_id: Video}
    expected = [kinds[token] for token in ids if token in kinds]
    if expected != [type(each) for each in pictures]:
        raise RequestError(f"the prompt has {len(expected)} places for {len(pictures)} pictures, or they are of other "
                           "kinds: no text may contain the placeholder tokens, and the chat template must use each "
                           "once", "messages")
    builder = _PromptBuilder()
    starts, remaining = list[int](), iter(pictures)
    for place, token in enumerate(ids):
        starts.append(len(builder.ids))
        each = next(remaining) if token in kinds else None
        if each is None:
            builder.add_text((token,))
        elif isinstance(each, Pixels):
            builder.add_pixels(each, token)
        else:
            before, after = ids[place - 1:place], ids[place + 1:place + 2]
            for part, stamp in zip(each.parts, each.stamps, strict=True):
                builder.add_text((*stamp, *before))
                builder.add_pixels(part, token)
                builder.add_text(after)
    starts.append(len(builder.ids))
    return builder.prompt(vision.merge_size), tuple(starts[boundary] for boundary in boundaries)


class _PromptBuilder:
    def __init__(self) -> None:
        self.ids = list[int]()
        self._keys = list[int]()
        self._pictures = list[Picture]()

    def add_text(self, tokens: Sequence[int]) -> None:
        self.ids.extend(tokens)
        self._keys.extend(tokens)

    def add_pixels(self, pixels: Pixels, token: int) -> None:
        self._pictures.append(Picture(len(self.ids), pixels.tokens, pixels.digest, pixels))
        self.ids.extend([token] * pixels.tokens)
        self._keys.extend(content_keys(pixels.digest.encode(), pixels.tokens))

    def prompt(self, merge: int) -> Prompt:
        grids = [(picture.start, picture.content.grid) for picture in self._pictures]
        tokens = [(start, (rows // merge, columns // merge)) for start, (rows, columns) in grids]
        positions, offset = rotary_positions(len(self.ids), tokens)
        return Prompt(tuple(self.ids), tuple(self._keys), positions, offset, tuple(self._pictures))


def rotary_positions(length: int, pictures: Iterable[tuple[int, tuple[int, int]]]) -> tuple[Positions, int]:
    """Returns the rotary positions of a prompt (M-RoPE) by time, height and width, as `get_rope_index` of transformers'
    Qwen3_5Model does, and the difference between position and index after the prompt.

    pictures: start index of each, in order, and its rows and columns of tokens. A picture advances the positions after
        it by its longer side.
    """
    axes: tuple[list[int], list[int], list[int]] = ([], [], [])
    shift = 0
    for start, (rows, columns) in pictures:
        first = start + shift
        for axis in axes:
            axis.extend(range(len(axis) + shift, first))
        axes[0].extend([first] * (rows * columns))
        axes[1].extend(first + row for row in range(rows) for _ in range(columns))
        axes[2].extend(list(range(first, first + columns)) * rows)
        shift += max(rows, columns) - rows * columns
    for axis in axes:
        axis.extend(range(len(axis) + shift, length + shift))
    return (tuple(axes[0]), tuple(axes[1]), tuple(axes[2])), shift
