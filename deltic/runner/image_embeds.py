"""What pictures of prompts become: encoded beside the steps, a slice at a time, and kept while prompts need it."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor

from deltic.engine.sequence import Sequence
from deltic.params import Picture

Encode = Callable[[Any], Generator[None, None, Tensor]]
"""Gives the rows [tokens, H] float32 of a picture's content, on the device; yields after each slice of the work."""
_SLICES, _ALONE = 0.05, 0.5
"""Seconds for slices between two steps while others answer or read, and where there is nothing else to do."""


class ImageEmbeds:
    """The rows of pictures that running sequences come to, by digest; those that nobody comes to stay for others as
    long as there is room.

    encoded: how many pictures were.
    """

    def __init__(self, encode: Encode, room: int) -> None:
        """room: bytes of rows that may be kept; more only where a single picture of each sequence has more."""
        self._encode, self._room = encode, room
        self._rows: dict[str, Tensor] = {}
        self._work: tuple[str, Generator[None, None, Tensor]] | None = None
        self.encoded = 0

    def rows(self, digest: str) -> Tensor:
        """Those of a picture that some sequence could read."""
        return self._rows[digest]

    def work(self, running: list[Sequence]) -> tuple[Sequence, Exception] | None:
        """Encode for some time, if a running sequence comes to a picture; then say how far each can be read. Returns
        whose picture cannot be encoded, and why."""
        if not any(sequence.images.pictures for sequence in running):
            return None
        self._trim(running)
        began = time.perf_counter()
        while wanting := self._look(running):
            sequence, picture = wanting
            try:
                self._advance(picture)
            except Exception as error:
                self._work = None
                return sequence, error
            waiting = any(other.readable for other in running)
            if time.perf_counter() - began > (_SLICES if waiting else _ALONE):
                self._look(running)
                break
        return None

    def _look(self, running: list[Sequence]) -> tuple[Sequence, Picture] | None:
        """Say how far each can be read; give the picture to encode next: one that somebody stands before, or the next
        one as long as there is room."""
        ahead = None
        blocked = None
        for sequence in running:
            if not sequence.images.pictures:
                continue
            missing = next((picture for picture in sequence.images.pictures
                            if picture.end > sequence.done and picture.digest not in self._rows), None)
            sequence.images.first_unencoded = missing.start if missing else None
            if missing and not sequence.readable:
                blocked = blocked or (sequence, missing)
            elif missing:
                ahead = ahead or (sequence, missing)
        return blocked or (ahead if self._kept() < self._room else None)

    def _advance(self, picture: Picture) -> None:
        """A slice of one picture's work."""
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
        """Let go of the oldest rows beyond the room, of those that nobody who runs comes to."""
        if self._kept() <= self._room:
            return
        needed = {picture.digest for sequence in running for picture in sequence.images.pictures
                  if picture.end > sequence.done}
        for digest in [digest for digest in self._rows if digest not in needed]:
            if self._kept() <= self._room:
                break
            del self._rows[digest]

    def _kept(self) -> int:
        """Bytes of rows."""
        return sum(rows.nbytes for rows in self._rows.values())
