"""Texts of PDF documents, cached because agents send the same documents with every turn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from time import monotonic
from typing import Final

from deltic.chat.history_store import OwnedEntries
from deltic.config import Limits
from deltic.errors import RequestError
from deltic.vision.decoder_process import DecoderProcess, pdf_text

_MOST_CHARACTERS: Final = 16_000_000
"""Characters of all cached texts."""
_COST: Final = 1000
"""Characters that an entry counts for in addition."""
_ALL: Final = 3
"""All documents of a request may take this many times the seconds of one."""

Texts = Mapping[bytes, str | RequestError]
"""Texts of documents by `digest`, or why they cannot be read."""
TextOf = Callable[[bytes], str | RequestError | None]
"""Returns the text of a document by its digest; None if it was not read."""


class DocumentTexts:
    """A cache of texts, for all threads. Each owner has its own entries: otherwise the time that a document takes would
    show that another owner has it. If there are too many, the owner with the most loses its oldest."""

    def __init__(self) -> None:
        self._kept: OwnedEntries[str | RequestError] = OwnedEntries(_MOST_CHARACTERS)
        self._lock = threading.Lock()

    def read(self, owner: str | None, documents: Sequence[bytes], limits: Limits, process: DecoderProcess) -> Texts:
        """Returns the texts of a request's documents that can be read in its time. process: from `reader_process`; it
        is closed at the end, and stopping it ends the work."""
        end = monotonic() + _ALL * limits.document_seconds
        found = dict[bytes, str | RequestError]()
        with process:
            for name, data in {digest(data): data for data in documents}.items():
                text = self._text(owner, name, data, limits, end - monotonic(), process)
                if text is not None:
                    found[name] = text
        return found

    def known(self, owner: str | None, name: bytes) -> str | RequestError | None:
        """Returns the text of a cached document."""
        with self._lock:
            return self._kept.get(owner, name)

    def _text(self, owner: str | None, name: bytes, data: bytes, limits: Limits, seconds: float,
              process: DecoderProcess) -> str | RequestError | None:
        known = self.known(owner, name)
        if known is not None or seconds <= 0 or process.closed:
            return known
        hurried = seconds < limits.document_seconds
        found = _read(data, replace(limits, document_seconds=max(seconds, 0.01)) if hurried else limits, process)
        if isinstance(found, str) or not (hurried or process.closed):  # with more time it may be readable
            with self._lock:
                self._kept.put(owner, name, found, _size(found))
        return found


def digest(data: bytes) -> bytes:
    """Returns the key of a document."""
    return blake2b(data, digest_size=32).digest()


def _size(found: str | RequestError) -> int:
    return _COST + (len(found) if isinstance(found, str) else 0)


def _read(data: bytes, limits: Limits, process: DecoderProcess) -> str | RequestError:
    try:
        return pdf_text(data, limits, "it", process)
    except RequestError as error:
        return RequestError(str(error).removeprefix("it "))
