"""Texts of documents: read in threads of their own, and kept, as agents send the same documents with every turn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from time import monotonic
from typing import Final

from deltic.chat.owned_entries import OwnedEntries
from deltic.config import Limits
from deltic.errors import RequestError
from deltic.vision.decoder_process import DecoderProcess
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
    that somebody else has it. Of too many, the owner that holds most loses its oldest. Threads may share it."""

    def __init__(self) -> None:
        self._kept: OwnedEntries[str | RequestError] = OwnedEntries(_MOST_CHARACTERS)
        self._lock = threading.Lock()

    def read(self, owner: str | None, documents: Sequence[bytes], limits: Limits, process: DecoderProcess) -> Texts:
        """The texts of a request's PDF documents, as far as its time reaches; takes up to so many seconds. process: one
        of `reader_process`, which is closed at the end; whoever stops it wants no more of them."""
        end, found = monotonic() + _ALL * limits.document_seconds, dict[bytes, str | RequestError]()
        with process:
            for name, data in {digest(data): data for data in documents}.items():
                text = self._text(owner, name, data, limits, end - monotonic(), process)
                if text is not None:
                    found[name] = text
        return found

    def known(self, owner: str | None, name: bytes) -> str | RequestError | None:
        """The text of a document that was read lately."""
        with self._lock:
            return self._kept.get(owner, name)

    def _text(self, owner: str | None, name: bytes, data: bytes, limits: Limits, seconds: float,
              process: DecoderProcess) -> str | RequestError | None:
        known = self.known(owner, name)
        if known is not None or seconds <= 0 or process.closed:
            return known
        hurried = seconds < limits.document_seconds
        found = _read(data, replace(limits, document_seconds=max(seconds, 0.01)) if hurried else limits, process)
        if isinstance(found, str) or not (hurried or process.closed):  # else it may be read another time
            with self._lock:
                self._kept.put(owner, name, found, _size(found))
        return found


def digest(data: bytes) -> bytes:
    """What a document is known by."""
    return blake2b(data, digest_size=32).digest()


def _size(found: str | RequestError) -> int:
    return _COST + (len(found) if isinstance(found, str) else 0)


def _read(data: bytes, limits: Limits, process: DecoderProcess) -> str | RequestError:
    try:
        return pdf_text(data, limits, "it", process)
    except RequestError as error:
        return RequestError(str(error).removeprefix("it "))
