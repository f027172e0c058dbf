"""Texts of documents: read in threads of their own, and kept, as agents send the same documents with every turn."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from time import monotonic
from typing import Final

from deltic.config import Limits
from deltic.errors import RequestError
from deltic.vision.documents import pdf_text

_MOST_CHARACTERS: Final = 16_000_000
"""Of all texts that are kept."""
_COST: Final = 1000
"""Characters that an entry counts for besides its text."""
_ALL: Final = 3
"""So many times the seconds of one document are there for all documents of a request."""

Texts = Mapping[bytes, str | RequestError]
"""What documents say by their `digest`, or why they cannot be read, without a field."""
TextOf = Callable[[bytes], str | RequestError | None]
"""The same of one; None if it was not read."""


class DocumentTexts:
    """The texts of the documents used last, each for its owner alone: else the time that a document takes would tell
    that somebody else has it. Threads may share it."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str | None, bytes], str | RequestError] = OrderedDict()
        self._size, self._lock = 0, threading.Lock()

    def read(self, owner: str | None, documents: Sequence[bytes], limits: Limits) -> Texts:
        """The texts of a request's PDF documents, as far as its time reaches; takes up to so many seconds."""
        end, found = monotonic() + _ALL * limits.document_seconds, dict[bytes, str | RequestError]()
        for name, data in {digest(data): data for data in documents}.items():
            text = self._text(owner, name, data, limits, end - monotonic())
            if text is not None:
                found[name] = text
        return found

    def known(self, owner: str | None, name: bytes) -> str | RequestError | None:
        """The text of a document that was read lately."""
        with self._lock:
            found = self._kept.get((owner, name))
            if found is not None:
                self._kept.move_to_end((owner, name))
        return found

    def _text(self, owner: str | None, name: bytes, data: bytes, limits: Limits, seconds: float
              ) -> str | RequestError | None:
        known = self.known(owner, name)
        if known is not None or seconds <= 0:
            return known
        hurried = seconds < limits.document_seconds
        found = _read(data, replace(limits, document_seconds=max(seconds, 0.01)) if hurried else limits)
        if isinstance(found, str) or not hurried:  # else it may be read another time
            self._keep((owner, name), found)
        return found

    def _keep(self, key: tuple[str | None, bytes], found: str | RequestError) -> None:
        with self._lock:
            self._size += _size(found) - (_size(self._kept.pop(key)) if key in self._kept else 0)
            self._kept[key] = found
            while self._size > _MOST_CHARACTERS:
                self._size -= _size(self._kept.popitem(last=False)[1])


def digest(data: bytes) -> bytes:
    """What a document is known by."""
    return blake2b(data, digest_size=32).digest()


def _size(found: str | RequestError) -> int:
    return _COST + (len(found) if isinstance(found, str) else 0)


def _read(data: bytes, limits: Limits) -> str | RequestError:
    try:
        return pdf_text(data, limits, "it")
    except RequestError as error:
        return RequestError(str(error).removeprefix("it "))
