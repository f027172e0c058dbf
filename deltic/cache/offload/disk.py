"""Stores prefixes and answer records in a cache directory, so that they outlive the process."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import torch
from torch import Tensor

from deltic.cache.offload.directory import ITEM_SUFFIX, CacheDirectory, check_room, read_regular, temporary_file
from deltic.cache.offload.types import FullError, StoredItem, TierStore, TierStoreError

_DTYPES: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64,
                  "F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8, "I8": torch.int8}
_DTYPE_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}
LARGEST_HEADER: Final = 1 << 20
_LENGTH_BYTES = 8
_BLOCK = 4096
_ITEM_COLUMNS: Final = """CAST(kind AS TEXT), CAST(key AS TEXT), CAST(parent AS TEXT), CAST(start AS INTEGER),
    CAST(done AS INTEGER), CAST(size AS INTEGER), CAST(COALESCE(used, 0) AS REAL), CAST(file AS TEXT)"""
"""The fields of a StoredItem, with the right types even in a damaged index."""
_TOUCH_SECONDS = 60.0
"""Precision of a record's time of last use, in seconds."""
_RECORD_KEY = re.compile(r"[0-9a-f]{1,64}")
_TEMPORARY_ERRORS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR, errno.EIO, errno.ESTALE,
                     errno.ETIMEDOUT}
"""Errors after which an item may still be readable later."""

log = logging.getLogger(__name__)


def encode(tensors: Mapping[str, Tensor]) -> list[bytes | memoryview]:
    """Returns a safetensors file in pieces. The pieces of contiguous CPU tensors are views of these tensors."""
    header: dict[str, Any] = {}
    pieces = list[memoryview]()
    offset = 0
    for name, tensor in sorted(tensors.items(), key=lambda pair: (-pair[1].itemsize, pair[0])):
        content = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
        end = offset + len(content)
        header[name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        pieces.append(content)
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(_LENGTH_BYTES, "little"), text, *pieces]


def decode(data: bytearray) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file, as views of it. Raises TierStoreError if the header is wrong."""
    start = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    try:
        header = json.loads(data[_LENGTH_BYTES:start])
        return {name: _view(data, start, fields) for name, fields in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, RecursionError, OverflowError) as error:
        raise TierStoreError("has a damaged header") from error


def _view(data: bytearray, start: int, fields: Mapping[str, Any]) -> Tensor:
    dtype, shape = _DTYPES[fields["dtype"]], tuple(map(int, fields["shape"]))
    if not prod(shape):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=prod(shape), offset=start + fields["data_offsets"][0]).view(shape)


def opened(directory: str | Path | CacheDirectory) -> CacheDirectory:
    return directory if isinstance(directory, CacheDirectory) else CacheDirectory(directory)


def known(model: str | Future[str]) -> Future[str]:
    """Returns a future of a model's digest."""
    if isinstance(model, Future):
        return model
    found: Future[str] = Future()
    found.set_result(model)
    return found


class DiskStore(TierStore):
    """Stores items of one model in a cache directory. Several processes may use the directory at the same time.

    Methods that the tier's index calls on its own threads wait for the model's digest. `touch` and `delete` never wait:
    they change files at once, and the SQLite index with the next scan or write.
    """

    name = "disk"

    def __init__(self, directory: str | Path | CacheDirectory, model: str | Future[str], budget: int, label: str = "",
                 about: str = "", abandon: Callable[[], None] = lambda: None) -> None:
        """model: its digest, or a future of it. label, about: the model's name and how it is computed, for people.
        abandon: ends the computation of the digest. Raises ConfigError if the directory cannot be used."""
        self.budget, self._abandon = budget, abandon
        self._directory, self._model = opened(directory), known(model)
        self.writable = self._directory.writable
        self._label, self._about = _printable(label), _printable(about)
        self._used = dict[str, float]()
        self._deleted = set[str]()
        self._reported = 0, 0
        if self.writable:
            self._directory.remove_version_1()
        else:
            log.warning("%s cannot be written to: the prefixes in it are used, and none are added",
                        self._directory.root)

    @property
    def ready(self) -> bool:
        return self._model.done()

    @property
    def number(self) -> int:
        """As `CacheDirectory.number`."""
        return self._directory.number

    @property
    def model(self) -> str:
        """The model's digest; empty while it is unknown."""
        return self._model.result() if self._has_items() else ""

    def scan(self) -> Iterator[StoredItem]:
        if self.writable:
            with self._transaction() as index:
                self._directory.remove_leftovers(index)
        rows = self._rows("model = ?")
        return (item for item in rows if item.path not in self._deleted)

    def others(self) -> list[StoredItem]:
        """As `TierStore.others`; also logs a warning about the items whenever their number or size has changed."""
        if not self.writable:
            return []
        found = [item for item in self._rows("model != ?") if item.path not in self._deleted]
        summary = len(found), sum(item.size for item in found)
        if found and self._reported != summary:
            log.warning("%d files in %s are of other models, versions or kinds of processors; they count towards the "
                        "budget (%.1f MiB) until they are the oldest", summary[0], self._directory.root,
                        summary[1] / (1 << 20))
        self._reported = summary
        return found

    def write(self, item: StoredItem, tensors: Mapping[str, Tensor]) -> int:
        """As `TierStore.write`; raises FullError if the disk is full or nearly full. tensors: of the `_DTYPES`."""
        pieces = encode(tensors)
        with _full_disk(sum(map(len, pieces))):
            try:
                return self._write(item, pieces)
            except FileNotFoundError:  # the directory was removed a moment ago
                return self._write(item, pieces)

    def read(self, item: StoredItem, most: int | None = None) -> dict[str, Tensor]:
        path = self._directory.root / self._file(item)
        with self._directory.read() as index:
            row = index.execute("SELECT size, crc32 FROM items WHERE file = ? AND parent = ? AND done = ?",
                                (path.name, item.parent, item.done)).fetchone()
        try:
            if row is None:
                raise TierStoreError("is not in the index")
            size, checksum = row
            return decode(_read_checked(path, size, checksum, most))
        except OSError as error:
            if error.errno in _TEMPORARY_ERRORS:
                raise
            raise TierStoreError(f"{path} cannot be read: {error.strerror}") from error
        except TierStoreError as error:
            raise TierStoreError(f"{path} {error}") from error

    def delete(self, item: StoredItem) -> None:
        if self._has_items():
            file = item.path or self._file(item)
            self._deleted.add(file)
            self._directory.unlink_item(file)

    def touch(self, item: StoredItem) -> None:
        if self._has_items():
            self._used[self._file(item)] = time.time()

    def abandon(self) -> None:
        self._abandon()

    def close(self) -> None:
        if self.writable and (self._used or self._deleted):
            with suppress(OSError), self._transaction():
                pass

    def _has_items(self) -> bool:
        """Returns False while the model's digest is unknown, so that no item can have been written or found."""
        return self._model.done() and not self._model.exception()

    def _file(self, item: StoredItem) -> str:
        return f"{self._model.result()}-{item.key}-{item.start}.{item.kind}{ITEM_SUFFIX}"

    def _rows(self, condition: str) -> list[StoredItem]:
        model = self._model.result()
        with self._directory.read() as index:
            rows = index.execute(f"SELECT {_ITEM_COLUMNS} FROM items WHERE {condition}", (model,))
            return [StoredItem(*row) for row in rows]

    def _write(self, item: StoredItem, pieces: Sequence[bytes | memoryview]) -> int:
        file, size, checksum = self._file(item), sum(map(len, pieces)), 0
        for piece in pieces:
            checksum = crc32(piece, checksum)
        with self._directory.read():
            pass  # makes the directory if it is gone
        check_room(self._directory.root, size)
        with temporary_file(self._directory.root, pieces) as temporary, self._transaction() as index:
            index.execute("INSERT OR REPLACE INTO items VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                          (file, self._model.result(), item.kind, item.key, item.parent, item.start, item.done, size,
                           checksum, time.time()))
            os.replace(temporary, self._directory.root / file)
        return size

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Returns a transaction that first carries out the deferred work of `touch` and `delete`."""
        model = self._model.result()
        used, deleted = list(self._used.items()), list(self._deleted)
        with self._directory.transaction() as index:
            for file in deleted:
                self._directory.unlink_item(file)
            index.executemany("DELETE FROM items WHERE file = ?", [(file,) for file in deleted])
            index.executemany("UPDATE items SET used = ? WHERE file = ?", [(at, file) for file, at in used])
            if self._label:
                index.execute("INSERT OR REPLACE INTO models VALUES (?, ?, ?)", (model, self._label, self._about))
            else:
                index.execute("INSERT OR IGNORE INTO models VALUES (?, '', '')", (model,))
            yield index
        self._deleted.difference_update(deleted)
        for file, at in used:
            if self._used.get(file) == at:
                del self._used[file]


def _printable(text: str) -> str:
    return "".join(filter(str.isprintable, text))


def _read_checked(path: Path, size: int, checksum: int, most: int | None) -> bytearray:
    """Returns the content of a file. Raises TierStoreError if size or checksum are wrong, or it exceeds `most`."""
    if most is not None and size > most + LARGEST_HEADER:
        raise TierStoreError(f"has {size:,} bytes, and at most {most:,} can be right")
    data = read_regular(path, size)
    if crc32(data) != checksum:
        raise TierStoreError("has a wrong checksum")
    return data


@contextmanager
def _full_disk(size: int) -> Iterator[None]:
    """Turns the errors of a full disk into FullError."""
    try:
        yield
    except FullError:
        raise
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise FullError(error.errno, error.strerror or "full", error.filename or "", size) from error


class DiskRecords:
    """Stores small values, such as records of finished answers, by hexadecimal key in a cache directory.

    All models share `budget` bytes; the least recently used values are deleted first. Only the constructor raises:
    values that cannot be stored are dropped. Methods wait for the model's digest.
    """

    def __init__(self, directory: str | Path | CacheDirectory, model: str | Future[str],
                 budget: int = 64 << 20) -> None:
        """Raises ConfigError if the directory cannot be used."""
        self._directory, self._model = opened(directory), known(model)
        self._slack = budget // 8
        self._limit = budget - self._slack
        self._unchecked = self._slack
        self._warned = False

    @property
    def ready(self) -> bool:
        """True if the computation of the model's digest has ended, also with an error."""
        return self._model.done()

    def get(self, key: str) -> bytes | None:
        """Returns the value that was put last; None if there is none or if it is damaged."""
        with suppress(Exception):
            place = self._model.result(), key
            with self._directory.read() as index:
                row = index.execute("SELECT data, crc32, used FROM records WHERE model = ? AND key = ?",
                                    place).fetchone()
                if row is None or row[0] is None or _record_checksum(key, row[0]) != row[1]:
                    return None
                if time.time() - row[2] > _TOUCH_SECONDS and self._directory.writable:
                    with suppress(sqlite3.Error):
                        index.execute("UPDATE records SET used = ? WHERE model = ? AND key = ?", (time.time(), *place))
                return bytes(row[0])
        return None

    def put(self, key: str, data: bytes) -> None:
        """Stores a value; drops it if it takes more than three quarters of the budget or cannot be written."""
        cost = _disk_bytes(len(data))
        if not _RECORD_KEY.fullmatch(key) or cost > self._limit - self._slack or not self._directory.writable:
            return
        try:
            self._insert("REPLACE", key, data, cost)
            self._warned = False
        except OSError as error:
            if not self._warned:
                log.warning("answers cannot be recorded in %s now: %s", self._directory.root, error.strerror)
            self._warned = True
        except Exception:  # the model's files have changed, so that its digest is not known
            log.debug("an answer is not recorded", exc_info=True)

    def claim(self, key: str) -> bool:
        """Claims a key that has no value. Returns False if any process has claimed it or the write fails."""
        with suppress(Exception):
            return bool(_RECORD_KEY.fullmatch(key)) and self._insert("IGNORE", key, None, _BLOCK)
        return False

    def _insert(self, conflict: str, key: str, data: bytes | None, cost: int) -> bool:
        """Inserts a row. Returns False if `conflict` is IGNORE and the key exists."""
        row = (self._model.result(), key, data, _record_checksum(key, data or b""), cost)
        with self._directory.transaction() as index:
            check_room(self._directory.root, cost)
            found = index.execute(f"INSERT OR {conflict} INTO records VALUES (?, ?, ?, ?, ?, ?)", (*row, time.time()))
            self._unchecked += cost
            if self._unchecked > self._slack:
                self._remove_oldest(index)
            return found.rowcount == 1

    def _remove_oldest(self, index: sqlite3.Connection) -> None:
        """Deletes the least recently used records. Each process may add 1/8 of the budget between two calls."""
        index.execute("""DELETE FROM records WHERE rowid IN (SELECT rowid FROM
            (SELECT rowid, SUM(size) OVER (ORDER BY used DESC, rowid DESC) AS total FROM records) WHERE total > ?)""",
                      (self._limit - self._slack,))
        self._unchecked = 0


def _record_checksum(key: str, data: bytes) -> int:
    return crc32(data, crc32(key.encode()))


def _disk_bytes(size: int) -> int:
    """Returns the bytes that a value takes, in whole blocks."""
    return -(-max(size, 1) // _BLOCK) * _BLOCK
