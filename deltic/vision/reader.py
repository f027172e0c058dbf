"""The pictures of one conversation, as its messages give them."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from deltic.config.vision import Vision
from deltic.errors import RequestError
from deltic.vision.images import read_image
from deltic.vision.patches import Pixels, picture

_KEYS = ("image_url", "image", "url", "source")


class PictureReader:
    """Reads the parts of messages that are pictures, in order; `pixels` are those so far.

    most: pictures that a conversation may have. tokens: those that all of them together may become.
    """

    def __init__(self, vision: Vision, most: int, tokens: int) -> None:
        self._vision, self._most, self._tokens = vision, most, tokens
        self.pixels: list[Pixels] = []

    def __call__(self, part: Mapping[str, Any], kind: str, field: str) -> dict[str, Any]:
        """The part as chat templates know it. RequestError names what is wrong with it."""
        if kind != "image":
            raise RequestError(f"{field} is a {kind}, which is not supported: send pictures", field)
        if len(self.pixels) == self._most:
            raise RequestError(f"messages have more than {self._most} pictures (max_pictures)", "messages")
        found = picture([read_image(_source(part, field), field)], self._vision.pictures, self._vision.tower)
        self._tokens -= found.tokens
        if self._tokens < 0:
            raise RequestError(f"{field} would be {found.tokens:,} tokens, more than there is room for beside the "
                               "pictures before it: send fewer, or smaller ones", field)
        self.pixels.append(found)
        return {"type": "image", "digest": found.digest}


def _source(part: Mapping[str, Any], field: str) -> Any:
    """What `read_image` takes. Of JSON that is the bytes of a data URL; only Python can give anything else."""
    given = next((part[key] for key in _KEYS if part.get(key) is not None), None)
    if isinstance(given, Mapping):
        given = given.get("url")
    if given is None:
        raise RequestError(f'{field} has no picture: give {{"type": "image_url", "image_url": {{"url": "data:..."}}}}',
                           field)
    return data_of(given, field) if isinstance(given, str) else given


def data_of(url: str, field: str) -> bytes:
    """The bytes of a data URL (RFC 2397) in base64. RequestError names the field."""
    head, comma, text = url.partition(",")
    if not head.startswith("data:") or not comma:
        raise RequestError(f"{field} must have its picture as a data URL (data:image/png;base64,...), not as "
                           f"{url[:40]!r}", field)
    if not head.endswith(";base64"):
        raise RequestError(f"{field} has a data URL that is not in base64", field)
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise RequestError(f"{field} has a data URL that is no valid base64: {error}", field) from error
