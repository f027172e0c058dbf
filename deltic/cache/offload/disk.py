"""Prefixes in a directory, so that they outlive the process; and small notes beside them."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from zlib import crc32

from torch import Tensor

from deltic.cache.offload import item_folder as layout
from deltic.cache.offload.item_file import decode, encode
from deltic.cache.offload.types import FullError, StoredItem, TierStoreError

_CHECKSUM_BYTES, _BLOCK = 4, 4096
_PASSING = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR, errno.EIO, errno.ESTALE,
            errno.ETIMEDOUT}
"""What keeps a file from being read now, and says nothing of what is in it."""

logger = logging.getLogger(__name__)


class DiskStore:
    """A TierStore in `directory`, for the model that `fingerprint` (lower-case letters and digits) stands for.

    Several processes may use a directory at the same time. Files are for this user alone. `label` is the model's
    name, `about` how it is computed, for people. budget: bytes, which the caller keeps to. writable: False if the
    directory can only be read, which is said once in a warning. Raises ConfigError if it cannot be used at all.
    """

    name, trusted = "disk", False

    def __init__(self, directory: str | Path, fingerprint: str, budget: int, label: str = "", about: str = "") -> None:
        self.budget = budget
        self._folder, self.writable = layout.open_folder(directory, fingerprint)
        self._root, self._label = self._folder.parent, layout.FolderLabel(label, about)
        self._warned, self._gone = (0, 0), set[str]()
        if self.writable:
            layout.write_label(self._folder, self._label)
        else:
            logger.warning("%s cannot be written to: the prefixes in it are used, and none are added", self._root)

    def scan(self) -> Iterator[StoredItem]:
        """The items of this model, by their names alone."""
        return (file.item for file in layout.files(self._folder) if file.item and file.path not in self._gone)

    def others(self) -> list[StoredItem]:
        """What else takes room: of other models, machines and versions, and what is not ours. Items with `path`; what
        their other fields say holds for other models. The first look at many of them warns. What writers that were
        killed have left is deleted on the way."""
        if not self.writable:
            return []
        layout.sweep(self._root)
        found = [file for folder in layout.folders(self._root) for file in layout.files(folder)
                 if not file.temporary and not self._owns(file)]
        self._warn(len(found), sum(file.size for file in found))
        return [replace(file.item or StoredItem("kv", "", "", 0, 0), size=file.size, used=file.used,
                        path=f"{file.folder}/{file.path}") for file in found]

    def write(self, item: StoredItem, tensors: Mapping[str, Tensor]) -> int:
        """Keep an item; returns the size of its file. Tensors are float32, bfloat16, float16 or int64.

        Raises OSError, with nothing left behind, if the disk refuses; FullError if it is full, or nearly.
        """
        return _write(self._folder / layout.item_name(item), encode(item, tensors), self._restore)

    def read(self, item: StoredItem, most: int | None = None) -> dict[str, Tensor]:
        """New tensors on the CPU, of at most so many bytes in all. Everything is checked; TierStoreError says what is
        wrong, and OSError that the machine cannot read it at present."""
        path = self._folder / layout.item_name(item)
        try:
            with layout.open_regular(path) as file:
                return decode(file, item, most)
        except OSError as error:
            if error.errno in _PASSING:
                raise
            raise TierStoreError(f"{path} cannot be read: {error.strerror}") from error
        except TierStoreError as error:
            raise TierStoreError(f"{path} {error}") from error

    def delete(self, item: StoredItem) -> None:
        """Unlink a file, and the folder of another model if this empties it. Never fails: what the disk does not
        give up is found again by the next scan, unless it can only be read."""
        name, _, path = (item.path or f"{self._folder.name}/{layout.item_name(item)}").partition("/")
        try:
            layout.remove(self._root / name, path)
        except OSError as error:
            logger.debug("%s stays: %s", self._root / name / path, error.strerror)
            if not self.writable:
                self._gone.add(path)
        if name != self._folder.name:
            layout.prune(self._root / name)

    def touch(self, item: StoredItem) -> None:
        with suppress(OSError):
            os.utime(self._folder / layout.item_name(item), follow_symlinks=False)

    def abandon(self) -> None:
        """Nothing: it is there."""

    def _owns(self, file: layout.StoredFile) -> bool:
        return file.folder == self._folder.name and (file.item is not None or file.note)

    def _restore(self) -> None:
        layout.make_folder(self._folder)
        layout.write_label(self._folder, self._label)

    def _warn(self, count: int, size: int) -> None:
        if count and self._warned != (count, size):
            logger.warning("%d files in %s are of other models, versions or kinds of processors; they count towards "
                           "the budget (%.1f MiB) until they are the oldest", count, self._root, size / (1 << 20))
        self._warned = count, size


class DiskRecords:
    """Small values by hexadecimal key beside a model's items, at most `budget` bytes of disk in all; those unused
    for longest go first. Writing is for the caller's thread. Raises ConfigError if the directory cannot be used,
    and nothing later: what cannot be kept is not kept."""

    ready = True

    def __init__(self, directory: str | Path, fingerprint: str, budget: int = 64 << 20) -> None:
        self._model, self._writable = layout.open_folder(directory, fingerprint)
        self._folder = self._model / layout.NOTES
        self._slack = budget // 8
        self._limit = budget - 2 * self._slack
        self._unseen = self._slack
        self._warned = False

    def get(self, key: str) -> bytes | None:
        """What was put there last; None if nothing, or if it is damaged."""
        if not layout.is_note(key):
            return None
        path = self._folder / key
        with suppress(OSError), layout.open_regular(path) as file:
            checksum, data = file.read(_CHECKSUM_BYTES), file.read(self._limit)
            if checksum == _note_checksum(key, data):
                with suppress(OSError):
                    os.utime(path)
                return data
        return None

    def put(self, key: str, data: bytes) -> None:
        """Keep a value of at most three quarters of the budget."""
        cost = _disk_bytes(_CHECKSUM_BYTES + len(data))
        if not layout.is_note(key) or cost > self._limit or not self._writable:
            return
        try:
            if self._unseen + cost > self._slack:
                self._make_room(cost)
            _write(self._folder / key, [_note_checksum(key, data), data], self._restore)
            self._unseen += cost
            self._warned = False
        except OSError as error:
            if not self._warned:
                logger.warning("notes in %s cannot be written now: %s", self._folder, error.strerror)
            self._warned = True

    def claim(self, key: str) -> bool:
        """Take a key that nothing was put under yet; False if somebody has it, of all processes, or nobody can."""
        if not layout.is_note(key):
            return False
        with suppress(FileNotFoundError):
            return layout.claim(self._folder / key)
        with suppress(OSError):
            self._restore()
            return layout.claim(self._folder / key)
        return False

    def _make_room(self, cost: int) -> None:
        """Look how much there is by now, of all processes; each may add an eighth of the budget between two looks."""
        notes = sorted((file for file in layout.files(self._model) if file.note), key=lambda file: file.used)
        excess = sum(_disk_bytes(file.size) for file in notes) + cost - self._limit
        for file in notes:
            if excess <= 0:
                break
            layout.remove(self._model, file.path)
            excess -= _disk_bytes(file.size)
        self._unseen = 0

    def _restore(self) -> None:
        layout.make_folder(self._model)
        layout.make_private(self._folder)


def _note_checksum(key: str, data: bytes) -> bytes:
    return crc32(data, crc32(key.encode())).to_bytes(_CHECKSUM_BYTES, "little")


def _disk_bytes(size: int) -> int:
    """What a file takes on most disks."""
    return -(-size // _BLOCK) * _BLOCK


def _write(path: Path, pieces: Sequence[bytes | memoryview], restore: Callable[[], None]) -> int:
    """Write a file and return its size; `restore` is called if somebody removed its folder. FullError if there is no
    room."""
    size = sum(map(len, pieces))
    try:
        try:
            layout.check_room(path.parent, size)
            layout.write_whole(path, pieces)
        except FileNotFoundError:
            restore()
            layout.check_room(path.parent, size)
            layout.write_whole(path, pieces)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and not isinstance(error, FullError):
            raise FullError(error.errno, error.strerror or "full", str(path), size) from error
        raise
    return size
