"""The digest under which a model's items are stored on disk. It covers all inputs that affect the bits of a kept state.

Two processes may exchange items only if their digests are equal. Files of weights are hashed completely, in pieces and
with low priority, while the model already answers. Their digests are remembered in the cache directory.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from hashlib import blake2b
from pathlib import Path

import torch

from deltic import __version__
from deltic.cache.offload.directory import CacheDirectory
from deltic.cache.tensors import STATE_LAYOUT
from deltic.config import EngineConfig
from deltic.errors import ModelError
from deltic.ops import Ops, explain
from deltic.ops.capabilities import numeric_facts
from deltic.threads import lower_priority

_REMEMBERED = 1000
_PIECE = 16 << 20
_AT_ONCE = _PIECE
"""Maximum bytes of files that are hashed during the start, instead of in the background: 20 ms."""
_THREADS = 2
_DIGEST_BYTES = 32
_BLOCK, _BLOCKS = 4096, 64
_SETTLED = 2_000_000_000
"""A change of a file this many nanoseconds after the last one is certain to get different file times."""


def machine_facts(options: EngineConfig, ops: Ops) -> dict[str, object]:
    """Returns versions, kernels and their instruction sets. Leaves out the number of threads, which changes no bit."""
    return {
        "deltic": __version__, "layout": STATE_LAYOUT, "ops": explain(ops), "stepwise": options.debug_layers,
        "machine": platform.machine(), "libc": platform.libc_ver(),
        "torch": [torch.__version__, torch.backends.cpu.get_cpu_capability(), torch.get_float32_matmul_precision()],
        **numeric_facts(options.device, options.cpu_level)}


@dataclass(frozen=True, slots=True)
class FileMark:
    """Identifies a version of a file without reading it. path: without links. modified, changed: in nanoseconds."""

    path: str
    inode: int
    size: int
    modified: int
    changed: int

    @classmethod
    def of(cls, path: str | Path) -> FileMark:
        """Returns the current mark of a file. Raises ModelError if it cannot be accessed."""
        real = os.path.realpath(path)
        try:
            found = os.stat(real)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}") from error
        return cls(real, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    @property
    def settled(self) -> bool:
        """True if every later change of the file results in a different mark."""
        return time.time_ns() - max(self.modified, self.changed) > _SETTLED

    def check(self) -> None:
        """Raises ModelError if the file has changed."""
        if FileMark.of(self.path) != self:
            raise ModelError(f"{self.path} was changed after it had been loaded")


@dataclass(frozen=True, slots=True)
class Identity:
    """facts: all inputs other than files. marks: marks of the model's files, taken before they were loaded."""

    facts: Mapping[str, object]
    marks: Sequence[FileMark] = ()

    def digest(self, digests: FileDigests, stopped: Callable[[], bool]) -> str:
        """Returns 32 hexadecimal digits. Raises ModelError if a file has changed since it was marked, and
        CancelledError once `stopped` returns True."""
        files = [digests.digest(mark, stopped) for mark in self.marks]
        text = json.dumps({**self.facts, "files": files}, sort_keys=True, default=repr)
        return blake2b(text.encode(), digest_size=16).hexdigest()

    def start_digest(self, digests: FileDigests) -> tuple[Future[str], Callable[[], None]]:
        """Computes the digest: immediately if the files are known or small, otherwise in the background. Returns a
        future of the digest and a function that ends the background work."""
        stop = threading.Event()
        if sum(mark.size for mark in self.marks if digests.find(mark) is None) <= _AT_ONCE:
            found: Future[str] = Future()
            try:
                found.set_result(self.digest(digests, stop.is_set))
            except Exception as error:
                found.set_exception(error)
            return found, stop.set
        with_low_priority = ThreadPoolExecutor(1, "deltic-identity", lower_priority, (19,))
        found = with_low_priority.submit(self.digest, digests, stop.is_set)
        with_low_priority.shutdown(wait=False)
        return found, stop.set


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """made: identity of the weights as they were loaded. weights: identity of their numbers in the files, independent
    of the dtype and without a draft head."""

    made: Identity
    weights: Identity


class FileDigests:
    """Digests of files by their marks, remembered in a cache directory if it can be written to."""

    def __init__(self, directory: CacheDirectory | None) -> None:
        self._directory = directory
        self._found = dict[FileMark, str | None]()

    def digest(self, mark: FileMark, stopped: Callable[[], bool]) -> str:
        """Returns the digest of a marked file; hashes the file if the digest is unknown. Raises as `hash_file`."""
        found = self.find(mark)
        if found is None:
            found = self._found[mark] = hash_file(mark, stopped)
            self._remember(mark, found)
        mark.check()
        return found

    def find(self, mark: FileMark) -> str | None:
        """Returns the remembered digest; None if there is none or the file has changed."""
        if mark not in self._found:
            self._found[mark] = self._recall(mark)
        return self._found[mark]

    def _recall(self, mark: FileMark) -> str | None:
        if self._directory is None:
            return None
        with suppress(OSError, ModelError):
            with self._directory.read() as index:
                row = index.execute("SELECT mark, sample, digest FROM digests WHERE path = ?",
                                    (mark.path,)).fetchone()
            if row and row[0] == _mark_text(mark) and row[1] == sample_file(mark):
                return str(row[2])
        return None

    def _remember(self, mark: FileMark, digest: str) -> None:
        if self._directory is None or not mark.settled:
            return
        row = mark.path, _mark_text(mark), sample_file(mark), digest
        with suppress(OSError), self._directory.transaction() as index:
            index.execute("INSERT OR REPLACE INTO digests VALUES (?, ?, ?, ?)", row)
            index.execute("DELETE FROM digests WHERE rowid <= (SELECT max(rowid) FROM digests) - ?", (_REMEMBERED,))


def _mark_text(mark: FileMark) -> str:
    return json.dumps(astuple(mark))


def sample_file(mark: FileMark) -> str:
    """Returns a digest of a few blocks. It distinguishes files of disk images that have equal times and inodes."""
    digest = blake2b(digest_size=_DIGEST_BYTES)
    with _opened(mark) as descriptor:
        for place in range(_BLOCKS + 1):
            digest.update(os.pread(descriptor, _BLOCK, max(mark.size - _BLOCK, 0) * place // _BLOCKS))
    return digest.hexdigest()


def hash_file(mark: FileMark, stopped: Callable[[], bool]) -> str:
    """Returns a digest of all bytes of a file. Raises ModelError if it cannot be read or has changed since it was
    marked, and CancelledError once `stopped` returns True."""
    whole = blake2b(mark.size.to_bytes(8, "little"), digest_size=_DIGEST_BYTES)
    with _opened(mark) as descriptor:
        try:
            for digest in _hash_pieces(descriptor, mark.size, stopped):
                whole.update(digest)
        except OSError as error:
            raise ModelError(f"{mark.path} cannot be read: {error.strerror}") from error
    mark.check()
    return whole.hexdigest()


def _hash_pieces(descriptor: int, size: int, stopped: Callable[[], bool]) -> Iterator[bytes]:
    """Yields the digests of a file's pieces. A small file is hashed with normal priority: the start may wait for it."""
    if size <= _AT_ONCE:
        yield _hash_piece(descriptor, 0, size)
        return
    waiting = deque[Future[bytes]]()
    with ThreadPoolExecutor(_THREADS, "deltic-hash", lower_priority, (19,)) as pool:
        for start in range(0, size, _PIECE):
            if stopped():
                raise CancelledError
            if len(waiting) > _THREADS:
                yield waiting.popleft().result()
            waiting.append(pool.submit(_hash_piece, descriptor, start, min(_PIECE, size - start)))
        for piece in waiting:
            yield piece.result()


def _hash_piece(descriptor: int, start: int, size: int) -> bytes:
    piece = os.pread(descriptor, size, start)
    if len(piece) != size:
        raise OSError(errno.EIO, "it ended while it was read")
    return blake2b(piece, digest_size=_DIGEST_BYTES).digest()


@contextmanager
def _opened(mark: FileMark) -> Iterator[int]:
    try:
        descriptor = os.open(mark.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ModelError(f"{mark.path} cannot be read: {error.strerror}") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)
