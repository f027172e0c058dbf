"""A cache directory: an SQLite index and the files that it names, shared by models and processes. Needs no torch.

    DIRECTORY/deltic-prefixes/
        index.sqlite3                                  items, answer records, models, digests of model files
        MODEL-KEY-START.KIND.safetensors               one item each
        .tmp-PID-RANDOM                                a file that is being written
        CACHEDIR.TAG

An item's row and its file appear in one transaction: the file is renamed into place before the commit. A kill in
between leaves a file without a row, which the next scan deletes. Nothing is synced to the disk: after a power failure
a torn item fails its checksum, and a torn index is deleted and created again. Other names in the directory are ignored.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import sqlite3
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, cast

from deltic.cache.offload.types import FullError, TierStoreError
from deltic.errors import ConfigError

ROOT: Final = "deltic-prefixes"
INDEX: Final = "index.sqlite3"
ITEM_SUFFIX: Final = ".safetensors"
VERSION: Final = 2
RESERVE = 256 << 20
RESERVE_SHARE = 0.01
"""Writes leave this much of the disk free: the smaller of RESERVE bytes and RESERVE_SHARE of its size."""

_TAG, _TEMPORARY = "CACHEDIR.TAG", ".tmp-"
_TAG_TEXT = b"Signature: 8a477f597d28d172789f06886806bc55\n# A prefix cache of deltic; it may be deleted.\n"
_ITEM = re.compile(rf"[0-9a-z]{{1,64}}-[0-9a-f]{{1,64}}-[0-9]{{1,19}}\.[a-z]{{1,9}}{re.escape(ITEM_SUFFIX)}")
_VERSION_1 = re.compile(r"v1-[0-9a-z]{1,64}|weights\.json")
_START_SECONDS = 2.0
"""Maximum time between the creation of a temporary file and the lock on it."""
_BUSY_SECONDS = 10.0
"""Maximum time for which a transaction waits for transactions of other processes."""
_TABLES = (
    "CREATE TABLE models (model TEXT PRIMARY KEY, label TEXT, about TEXT)",
    """CREATE TABLE items (file TEXT PRIMARY KEY, model TEXT, kind TEXT, key TEXT, parent TEXT, start INTEGER,
        done INTEGER, size INTEGER, crc32 INTEGER, used REAL)""",
    """CREATE TABLE records (model TEXT, key TEXT, data BLOB, crc32 INTEGER, size INTEGER, used REAL,
        PRIMARY KEY (model, key))""",
    "CREATE INDEX records_by_use ON records (used, size)",
    "CREATE TABLE digests (path TEXT PRIMARY KEY, mark TEXT, sample TEXT, digest TEXT)",
    f"PRAGMA user_version = {VERSION}",
)
_ERRNO = {sqlite3.SQLITE_FULL: errno.ENOSPC, sqlite3.SQLITE_BUSY: errno.EAGAIN, sqlite3.SQLITE_READONLY: errno.EROFS,
          sqlite3.SQLITE_NOMEM: errno.ENOMEM}

log = logging.getLogger("deltic")


@dataclass(frozen=True, slots=True)
class ModelLabel:
    """A model of the directory. model: its digest. label: its name. about: how it is computed. Empty if unknown."""

    model: str
    label: str = ""
    about: str = ""


@dataclass(frozen=True, slots=True)
class StoredRow:
    """An item or an answer record (kind "record") of the index. used: seconds since the epoch."""

    model: str
    kind: str
    key: str
    start: int
    done: int
    size: int
    used: float
    file: str = ""


class CacheDirectory:
    """The index and files of a directory. Methods may be called from any thread; they raise OSError.

    writable: False if the directory can only be read.
    """

    def __init__(self, directory: str | Path) -> None:
        """Raises ConfigError if the directory can be neither written to nor read."""
        self.root = root_of(directory)
        self.index = self.root / INDEX
        self.writable = False
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._opened: tuple[int, ...] = ()
        try:
            self.writable = _make_or_read(self.root)
            self._open_index()
        except (OSError, ValueError) as error:
            place = getattr(error, "filename", None) or self.root
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"cache_dir {str(directory)!r} cannot be used ({place}: {reason}); name a directory that you own and "
                "may write to, or leave cache_dir out to keep nothing on disk", "cache_dir") from error

    @property
    def number(self) -> int:
        """A random number with which processes on different machines recognise a shared directory; 0: none."""
        with self.read() as index:
            return _number_of(index)

    # the index

    def _open_index(self) -> None:
        """Opens the index. Deletes a damaged index and creates a new one."""
        for last in (not self.writable, True):
            try:
                with self.read():
                    return
            except OSError:
                if last:
                    raise

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Returns a context with the index, for single statements."""
        with self._lock, self._translated_errors():
            yield self._connect()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Returns a context with the index, for statements that take effect together, without other writers."""
        with self.read() as index:
            index.execute("BEGIN IMMEDIATE")
            try:
                yield index
                index.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    index.execute("ROLLBACK")
                raise

    def _connect(self) -> sqlite3.Connection:
        """Returns a connection to the current file, which another process may have replaced since the last call."""
        if self._connection is None or self._opened != self._file_identity():
            if self.writable:
                make_private(self.root)
                _create_empty(self.index)
            if self._connection is not None and self._opened[0] == os.getpid():
                self._connection.close()
            self._connection = None
            identity = self._file_identity()
            mode = "rw" if self.writable else "ro"
            uri = f"{Path(os.path.abspath(self.index)).as_uri()}?mode={mode}"
            connection = sqlite3.connect(uri, _BUSY_SECONDS, isolation_level=None, check_same_thread=False, uri=True)
            connection.execute("PRAGMA synchronous = OFF")
            connection.execute("PRAGMA secure_delete = ON")
            self._prepare(connection)
            self._connection, self._opened = connection, identity
        return self._connection

    def _file_identity(self) -> tuple[int, ...]:
        with suppress(FileNotFoundError):
            found = self.index.lstat()
            return os.getpid(), found.st_dev, found.st_ino
        return ()

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Creates the tables of a new index."""
        def version() -> int:
            return int(connection.execute("PRAGMA user_version").fetchone()[0])

        if self.writable and not (version() and _number_of(connection)):
            connection.execute("BEGIN IMMEDIATE")
            for statement in () if version() else _TABLES:
                connection.execute(statement)
            if not _number_of(connection):
                connection.execute(f"PRAGMA application_id = {1 + secrets.randbits(30)}")
            connection.execute("COMMIT")
        if version() != VERSION:
            raise OSError(errno.EINVAL, f"its format is version {version()}, not {VERSION}", str(self.index))

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) and self.writable:
                log.warning("%s is damaged (%s): the cache on disk begins anew", self.index, error)
                for name in (f"{INDEX}-journal", INDEX):
                    (self.root / name).unlink(missing_ok=True)
            raise OSError(_ERRNO.get(code, errno.EIO), str(error), str(self.index)) from error

    # contents

    def models(self) -> list[ModelLabel]:
        with self.read() as index:
            return [ModelLabel(*row) for row in index.execute("SELECT * FROM models ORDER BY model")]

    def rows(self) -> list[StoredRow]:
        """Returns all items and answer records."""
        with self.read() as index:
            return [StoredRow(*row) for row in index.execute(
                """SELECT model, kind, key, start, done, size, used, file FROM items
                    UNION ALL SELECT model, 'record', key, 0, 0, size, used, '' FROM records""")]

    def remove_unused(self, since: float) -> None:
        """Deletes items and records last used before `since`, and the directory if no file of deltic remains."""
        with self.transaction() as index:
            for (file,) in index.execute("SELECT file FROM items WHERE used < ?", (since,)).fetchall():
                self.unlink_item(file)
            index.execute("DELETE FROM items WHERE used < ?", (since,))
            index.execute("DELETE FROM records WHERE used < ?", (since,))
            self.remove_leftovers(index)
            if index.execute("SELECT count(*) FROM models").fetchone()[0]:
                return
            index.execute("DELETE FROM digests")
            with suppress(OSError):
                if {entry.name for entry in os.scandir(self.root)} <= {INDEX, f"{INDEX}-journal", _TAG}:
                    self.index.unlink()
                    (self.root / _TAG).unlink(missing_ok=True)
        with suppress(OSError):
            self.root.rmdir()

    def remove_leftovers(self, index: sqlite3.Connection) -> None:
        """Deletes files without a row, rows without a file, models without rows, and temporary files of killed writers.
        index: in a transaction."""
        known = {file for (file,) in index.execute("SELECT file FROM items")}
        present = {entry.name for entry in os.scandir(self.root) if entry.is_file(follow_symlinks=False)}
        remove_abandoned(self.root)
        for name in present - known:
            self.unlink_item(name)
        index.executemany("DELETE FROM items WHERE file = ?", [(file,) for file in known - present])
        index.execute("""DELETE FROM models WHERE model NOT IN
            (SELECT model FROM items UNION SELECT model FROM records)""")

    def unlink_item(self, file: str) -> None:
        """Deletes a file, but only if its name is valid for an item: the index may be damaged. Never fails."""
        if _ITEM.fullmatch(file):
            with suppress(OSError):
                (self.root / file).unlink()

    def remove_version_1(self) -> None:
        """Deletes the folders and digests of earlier versions of deltic, which had one folder per model."""
        old = [entry for entry in os.scandir(self.root) if _VERSION_1.fullmatch(entry.name) and not entry.is_symlink()]
        for entry in old:
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                Path(entry).unlink(missing_ok=True)
        if old:
            log.warning("%s: the prefixes of an earlier version of deltic were deleted", self.root)


def _number_of(index: sqlite3.Connection) -> int:
    return int(index.execute("PRAGMA application_id").fetchone()[0])


def root_of(directory: str | Path) -> Path:
    """Returns the folder below a cache directory that holds all of deltic's files."""
    return Path(os.path.expanduser(directory)) / ROOT


def check_room(folder: Path, size: int) -> None:
    """Raises FullError if a file of this size would use up the disk's reserve."""
    usage = shutil.disk_usage(folder)
    missing = min(RESERVE, int(usage.total * RESERVE_SHARE)) + size - usage.free
    if usage.total and missing > 0:
        raise FullError(errno.ENOSPC, "the disk is nearly full", str(folder), missing)


# files


def open_regular(path: Path) -> BinaryIO:
    """Opens a file for unbuffered reading. Raises OSError if it is missing, a link or not a plain file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a plain file", str(path))
    return cast("BinaryIO", os.fdopen(descriptor, "rb", buffering=0))


def read_regular(path: Path, size: int) -> bytearray:
    """Returns the content of a file of a known size. Does not map it, because truncating a mapped file kills the
    process. Raises TierStoreError if the size is wrong."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size != size:
            raise TierStoreError("has a wrong length")
        data = bytearray(size)
        place = 0
        while place < size:
            count = file.readinto(memoryview(data)[place:])  # type: ignore[attr-defined]
            if not count:
                raise TierStoreError("is truncated")
            place += count
    return data


@contextmanager
def temporary_file(folder: Path, pieces: Iterable[bytes | memoryview]) -> Iterator[Path]:
    """Writes a file of mode 0600 for the caller to rename in a `with` block; deletes it if the block raises.

    The file is locked while the block runs, which shows other processes that its writer is alive.
    """
    path = folder / f"{_TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"
    try:
        with open(path, "xb", opener=_open_private) as file:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            for piece in pieces:
                file.write(piece)
            file.flush()
            yield path
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise


def write_whole(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Writes a file of mode 0600 atomically: readers never see a part of it."""
    with temporary_file(path.parent, pieces) as temporary:
        os.replace(temporary, path)


def make_private(path: Path) -> None:
    """Creates a folder that only this user can read, whatever the umask. A read-only folder stays read-only.

    Raises OSError if the path is a link or a file, or belongs to another user.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    permissions = found.st_mode & 0o700 or 0o700
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "not a directory", str(path))
    if stat.S_IMODE(found.st_mode) == permissions:
        return
    try:
        path.chmod(permissions)
    except PermissionError as error:
        if found.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "owned by another user, who could read it", str(path)) from error
        log.warning("%s does not keep permissions: others may be able to read the prefixes in it", path)


def _make_or_read(root: Path) -> bool:
    """Creates the folder, or accepts one that can only be read. Returns True if it can be written to."""
    try:
        make_private(root)
        if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, "not writable", str(root))
    except OSError:
        if not os.access(root / INDEX, os.R_OK):
            raise
        found = root.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (os.geteuid(), 0):
            raise
        return False
    if not (root / _TAG).exists():
        with suppress(OSError):
            write_whole(root / _TAG, [_TAG_TEXT])
    return True


def _create_empty(path: Path) -> None:
    with suppress(FileExistsError):
        os.close(_open_private(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))


def _open_private(path: str | Path, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with suppress(OSError):
        os.fchmod(descriptor, 0o600)
    return descriptor


def remove_abandoned(folder: Path) -> None:
    """Deletes the temporary files of killed writers."""
    for entry in os.scandir(folder):
        if entry.name.startswith(_TEMPORARY) and _is_abandoned(Path(entry)):
            with suppress(OSError):
                os.unlink(entry)


def _is_abandoned(path: Path) -> bool:
    """Returns True if the writer of a temporary file no longer holds its lock."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return abs(time.time() - os.fstat(descriptor).st_mtime) > _START_SECONDS
    except OSError:
        return False
    finally:
        os.close(descriptor)
