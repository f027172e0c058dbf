"""Texts of documents that were read lately: agents send the same documents with every turn."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import replace
from hashlib import blake2b
from typing import Final

from deltic.config import Limits
from deltic.errors import RequestError
from deltic.vision.documents import pdf_text

_MOST_CHARACTERS: Final = 16_000_000
"""Of all texts that are kept."""
_COST: Final = 1000
"""Characters that an entry counts for besides its text."""


class DocumentTexts:
    """The texts of the documents used last, each for its owner alone: else the time that a document takes would tell
    that somebody else has it. Threads may share it."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str | None, bytes], str | RequestError] = OrderedDict()
        self._size, self._lock = 0, threading.Lock()

    def known(self, owner: str | None, data: bytes) -> bool:
        """Whether the text of a document takes no time."""
        with self._lock:
            return _key(owner, data) in self._kept

    def read(self, owner: str | None, data: bytes, limits: Limits, seconds: float) -> str:
        """The text of a PDF document. seconds: that reading it may take, if less than the limits say. RequestError
        says, without a field, why it cannot be read."""
        key = _key(owner, data)
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
        if found is None:
            hurried = seconds < limits.document_seconds
            found = _read(data, replace(limits, document_seconds=seconds) if hurried else limits)
            if isinstance(found, str) or not hurried:
                self._keep(key, found)
        if isinstance(found, RequestError):
            raise RequestError(str(found))
        return found

    def _keep(self, key: tuple[str | None, bytes], found: str | RequestError) -> None:
        with self._lock:
            self._size += _size(found) - (_size(self._kept.pop(key)) if key in self._kept else 0)
            self._kept[key] = found
            while self._size > _MOST_CHARACTERS:
                self._size -= _size(self._kept.popitem(last=False)[1])


def _key(owner: str | None, data: bytes) -> tuple[str | None, bytes]:
    return owner, blake2b(data, digest_size=32).digest()


def _size(found: str | RequestError) -> int:
    return _COST + (len(found) if isinstance(found, str) else 0)


def _read(data: bytes, limits: Limits) -> str | RequestError:
    try:
        return pdf_text(data, limits, "it")
    except RequestError as error:
        return RequestError(str(error).removeprefix("it "))
