"""Identity of weight files, so that states computed with one model are never used with another.

Files are hashed completely, by several threads of low priority, because the model is already in use.
"""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from deltic.errors import ModelError
from deltic.threads import lower_priority

_PIECE = 16 << 20
_THREADS = 2
_DIGEST_BYTES = 32
_BLOCK, _BLOCKS = 4096, 64
_SETTLED = 2_000_000_000
"""Nanoseconds after a change from which the next one changes the file's times."""


@dataclass(frozen=True, slots=True)
class FileMark:
    """Recognises a file without reading it.

    path: real path, without links.
    modified, changed: its times in nanoseconds.
    """

    path: str
    inode: int
    size: int
    modified: int
    changed: int

    @classmethod
    def of(cls, path: str | Path) -> FileMark:
        """Returns the current mark of a file. Raises ModelError."""
        real = os.path.realpath(path)
        try:
            found = os.stat(real)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}") from error
        return cls(real, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    @property
    def settled(self) -> bool:
        """True if every later change of the file will change its mark."""
        return time.time_ns() - max(self.modified, self.changed) > _SETTLED

    def check(self) -> None:
        """Raises ModelError if the file has changed."""
        if FileMark.of(self.path) != self:
            raise ModelError(f"{self.path} was changed after it had been loaded")


def sample_file(mark: FileMark) -> str:
    """Hashes a few blocks of a file, to distinguish files of disk images with equal times and inodes."""
    digest = blake2b(digest_size=_DIGEST_BYTES)
    with _opened(mark) as descriptor:
        for place in range(_BLOCKS + 1):
            digest.update(os.pread(descriptor, _BLOCK, max(mark.size - _BLOCK, 0) * place // _BLOCKS))
    return digest.hexdigest()


def hash_file(mark: FileMark, stopped: Callable[[], bool]) -> str:
    """Hashes a file. Raises ModelError if it cannot be read, or has changed since it was marked; CancelledError once
    `stopped` returns true."""
    whole = blake2b(mark.size.to_bytes(8, "little"), digest_size=_DIGEST_BYTES)
    waiting = deque[Future[bytes]]()
    with _opened(mark) as descriptor, ThreadPoolExecutor(_THREADS, "deltic-hash", lower_priority, (19,)) as pool:
        try:
            for start in range(0, mark.size, _PIECE):
                if stopped():
                    raise CancelledError
                if len(waiting) > _THREADS:
                    whole.update(waiting.popleft().result())
                waiting.append(pool.submit(_hash_piece, descriptor, start, min(_PIECE, mark.size - start)))
            for piece in waiting:
                whole.update(piece.result())
        except OSError as error:
            raise ModelError(f"{mark.path} cannot be read: {error.strerror}") from error
    mark.check()
    return whole.hexdigest()


def _hash_piece(descriptor: int, start: int, size: int) -> bytes:
    piece = os.pread(descriptor, size, start)
    if len(piece) != size:
        raise OSError(errno.EIO, "it ended while it was read")
    return blake2b(piece, digest_size=_DIGEST_BYTES).digest()


@contextmanager
def _opened(mark: FileMark) -> Iterator[int]:
    """Opens a marked file."""
    try:
        descriptor = os.open(mark.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ModelError(f"{mark.path} cannot be read: {error.strerror}") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)
