"""Computes the embeddings of images between steps, a slice at a time, and keeps them while prompts need them."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor

from deltic.engine.sequence import Sequence
from deltic.params import Picture

Encode = Callable[[Any], Generator[None, None, Tensor]]
"""Yields after each slice of work; returns the embeddings [tokens, H] float32 of an image on the device."""
_SLICES, _ALONE = 0.05, 0.5
"""Seconds for slices between two steps: if other sequences can run, and if none can."""


class ImageEmbeds:
    """The embeddings of images by digest. Embeddings that no running sequence needs are kept while there is room.

    encoded: number of images encoded so far.
    """

    def __init__(self, encode: Encode, room: int) -> None:
        """room: bytes of embeddings to keep; exceeded only for images that running sequences need."""
        self._encode, self._room = encode, room
        self._rows: dict[str, Tensor] = {}
        self._work: tuple[str, Generator[None, None, Tensor]] | None = None
        self.encoded = 0

    def rows(self, digest: str) -> Tensor:
        """Returns the embeddings of an encoded image."""
        return self._rows[digest]

    def work(self, running: list[Sequence]) -> tuple[Sequence, Exception] | None:
        """Encodes for a limited time if a running sequence needs an image, and updates `ImageState.first_unencoded`. If
        an image cannot be encoded, returns its sequence and the error."""
        if not any(sequence.images.pictures for sequence in running):
            return None
        self._trim(running)
        began = time.perf_counter()
        while wanting := self._next(running):
            sequence, picture = wanting
            try:
                self._advance(picture)
            except Exception as error:
                self._work = None
                return sequence, error
            waiting = any(other.readable for other in running)
            if time.perf_counter() - began > (_SLICES if waiting else _ALONE):
                self._next(running)
                break
        return None

    def _next(self, running: list[Sequence]) -> tuple[Sequence, Picture] | None:
        """Updates `first_unencoded`. Returns the image to encode next: one that blocks a sequence, otherwise, if there
        is room, the next one that is needed."""
        upcoming = blocked = None
        for sequence in running:
            if not sequence.images.pictures:
                continue
            missing = next((picture for picture in sequence.images.pictures
                            if picture.end > sequence.done and picture.digest not in self._rows), None)
            sequence.images.first_unencoded = missing.start if missing else None
            if missing and not sequence.readable:
                blocked = blocked or (sequence, missing)
            elif missing:
                upcoming = upcoming or (sequence, missing)
        return blocked or (upcoming if self._kept() < self._room else None)

    def _advance(self, picture: Picture) -> None:
        """Computes one slice of an image's embeddings."""
        if self._work is None or self._work[0] != picture.digest:
            self._work = picture.digest, self._encode(picture.content)
        try:
            next(self._work[1])
        except StopIteration as done:
            self._work = None
            rows = done.value
            if rows.shape[0] != picture.count:
                raise ValueError(f"a picture gave {rows.shape[0]} rows for {picture.count} tokens") from None
            if not bool(torch.isfinite(rows).all()):
                raise ValueError("a picture gave rows that are not finite: weights or a kernel are broken") from None
            self._rows[picture.digest] = rows
            self.encoded += 1

    def _trim(self, running: list[Sequence]) -> None:
        """Drops the oldest embeddings that no running sequence needs, until the others fit."""
        if self._kept() <= self._room:
            return
        needed = {picture.digest for sequence in running for picture in sequence.images.pictures
                  if picture.end > sequence.done}
        for digest in [digest for digest in self._rows if digest not in needed]:
            if self._kept() <= self._room:
                break
            del self._rows[digest]

    def _kept(self) -> int:
        """Returns the bytes of all embeddings."""
        return sum(rows.nbytes for rows in self._rows.values())
