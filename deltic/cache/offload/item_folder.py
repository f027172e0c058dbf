"""Where things lie in a cache directory, without torch: names, modes, and files that are whole or not there.

Everything is below `DIRECTORY/deltic-prefixes`: a folder `v<version>-<fingerprint>` per model, in it a file per item,
`model.json` with the model's name, and the folder `notes`; beside these folders `weights.json`, which remembers digests
of models' files. Folders with other names are none of ours. Links are never followed. Nothing is synced to the disk: a
file that a power failure tore fails its checksum when it is read.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Final, cast, get_args

from deltic.cache.offload.types import FullError, Kind, StoredItem
from deltic.errors import ConfigError

ROOT: Final = "deltic-prefixes"
VERSION: Final = 1
NOTES: Final = "notes"
WEIGHTS: Final = "weights.json"
_LABEL, _TAG, _TEMPORARY = "model.json", "CACHEDIR.TAG", ".tmp-"
_TAG_TEXT = b"Signature: 8a477f597d28d172789f06886806bc55\n# A prefix cache of deltic; it may be deleted.\n"
_LABEL_LIMIT = 1 << 16
_STALE_SECONDS, _GRACE_SECONDS = 600.0, 2.0
_FOLDER = re.compile(r"v([1-9][0-9]{0,8})-([0-9a-z]{1,64})")
_COUNT = "(0|[1-9][0-9]{0,17})"
_ITEM = re.compile(rf"{_COUNT}-{_COUNT}-([0-9a-f]{{1,64}})-([0-9a-f]{{1,64}}|root)\.({'|'.join(get_args(Kind))})")
_NOTE = re.compile(r"[0-9a-f]{1,64}")

RESERVE = 256 << 20
RESERVE_SHARE = 0.01
"""What is left free on the disk: the smaller of so many bytes and so large a part of it."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file in some model's folder.

    folder: that folder's name.
    path: below it, with /.
    size: bytes.
    used: seconds since the epoch.
    item: what an item's name says, else None.
    """

    folder: str
    path: str
    size: int
    used: float
    item: StoredItem | None

    @property
    def temporary(self) -> bool:
        return self.path.rpartition("/")[2].startswith(_TEMPORARY)

    @property
    def note(self) -> bool:
        return self.path.startswith(f"{NOTES}/") and is_note(self.path.removeprefix(f"{NOTES}/"))


@dataclass(frozen=True, slots=True)
class FolderLabel:
    """What people are told of a model's folder. model: its name; about: how it is computed. Empty if unknown."""

    model: str = ""
    about: str = ""


def root_of(directory: str | Path) -> Path:
    """Below this lies all that we create or delete for a cache directory."""
    return Path(os.path.expanduser(directory)) / ROOT


def folder_name(fingerprint: str) -> str:
    name = f"v{VERSION}-{fingerprint}"
    assert _FOLDER.fullmatch(name), f"{fingerprint!r} is no fingerprint"
    return name


def split_folder(name: str) -> tuple[int, str]:
    """Version and fingerprint of a model's folder."""
    version, fingerprint = name[1:].split("-")
    return int(version), fingerprint


def item_name(item: StoredItem) -> str:
    """The file name that carries the whole item."""
    name = f"{item.done}-{item.start}-{item.key}-{item.parent or 'root'}.{item.kind}"
    assert _ITEM.fullmatch(name), f"{name!r} is no item"
    return name


def parse_item(name: str, size: int = 0, used: float = 0.0) -> StoredItem | None:
    """The item of that name; None if it is not an item's name."""
    match = _ITEM.fullmatch(name)
    if match is None:
        return None
    done, start, key, parent, kind = match.groups()
    return StoredItem(cast("Kind", kind), key, "" if parent == "root" else parent, int(start), int(done), size, used)


def is_note(key: str) -> bool:
    return _NOTE.fullmatch(key) is not None


# Looking


def folders(root: Path) -> list[Path]:
    """The models' folders, of all versions."""
    try:
        with os.scandir(root) as entries:
            names = [entry.name for entry in entries
                     if _FOLDER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [root / name for name in sorted(names)]


def files(folder: Path) -> Iterator[StoredFile]:
    """All files in a model's folder, but for its label. What vanishes or cannot be looked at meanwhile is left out."""
    below = [""]
    while below:
        prefix = below.pop()
        for entry in _entries(folder / prefix):
            path = prefix + entry.name
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    below.append(f"{path}/")
                elif path != _LABEL:
                    yield _found(folder.name, path, entry.stat(follow_symlinks=False))


def open_regular(path: Path) -> BinaryIO:
    """Open for unbuffered reading; OSError for what is missing or not a plain file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a plain file", str(path))
    return cast("BinaryIO", os.fdopen(descriptor, "rb", buffering=0))


def read_label(folder: Path) -> FolderLabel:
    """What is known of the folder's model."""
    with suppress(OSError, ValueError, RecursionError), open_regular(folder / _LABEL) as file:
        match json.loads(file.read(_LABEL_LIMIT)):
            case {"model": str(model), "about": str(about)}:
                return FolderLabel("".join(filter(str.isprintable, model)), "".join(filter(str.isprintable, about)))
    return FolderLabel()


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _found(folder: str, path: str, status: os.stat_result) -> StoredFile:
    item = parse_item(path, status.st_size, status.st_mtime) if stat.S_ISREG(status.st_mode) else None
    return StoredFile(folder, path, status.st_size, status.st_mtime, item)


# Making


def open_root(directory: str | Path) -> Path:
    """The place of all models, made if need be, for this user alone; ConfigError if it can be neither written to nor
    read."""
    root = root_of(directory)
    _open(directory, root, make_root, (root,))
    return root


def open_folder(directory: str | Path, fingerprint: str) -> tuple[Path, bool]:
    """The folder of one model, made if need be, for this user alone, and whether it can be written to; ConfigError if
    it cannot be read either."""
    root = root_of(directory)
    folder = root / folder_name(fingerprint)
    return folder, _open(directory, folder, make_folder, (root, folder))


def _open(directory: str | Path, path: Path, make: Callable[[Path], None], above: Sequence[Path]) -> bool:
    try:
        make(path)
        denied = next((place for place in above if not os.access(place, os.R_OK | os.W_OK | os.X_OK)), None)
        if denied:
            raise OSError(errno.EACCES, "not writable", str(denied))
        return True
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and all(map(_readable, above)):
            return False
        where, reason = getattr(error, "filename", None) or path, getattr(error, "strerror", None) or error
        raise ConfigError(f"cache_dir {str(directory)!r} cannot be used ({where}: {reason}); name a directory that "
                          "you own and may write to, or leave cache_dir out to keep nothing on disk",
                          "cache_dir") from error


def _readable(path: Path) -> bool:
    """Whether what lies in a folder can be read, and is the user's own or the system's."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid in (os.geteuid(), 0) and os.access(path, os.R_OK | os.X_OK)


def make_root(root: Path) -> None:
    """Make the place of all models and what is above it; OSError if that is impossible or others could look into
    it."""
    root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    make_private(root)
    tag = root / _TAG
    if not tag.exists():
        with suppress(OSError):
            write_whole(tag, [_TAG_TEXT])


def make_folder(folder: Path) -> None:
    """Make a model's folder and what is above it; OSError as `make_root`."""
    make_root(folder.parent)
    make_private(folder)


def make_private(path: Path) -> None:
    """A folder for this user alone, whatever the umask; OSError if it is a link, a file or somebody else's. One that
    the user has made read-only stays so."""
    kept = 0
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        kept = stat.S_IMODE(path.lstat().st_mode) & 0o700
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "not a directory", str(path))
    if stat.S_IMODE(found.st_mode) == (kept or 0o700):
        return
    try:
        path.chmod(kept or 0o700)
    except PermissionError as error:
        if found.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "owned by another user, who could read it", str(path)) from error
        logger.warning("%s keeps no permissions: others may be able to read the prefixes in it", path)


def write_label(folder: Path, label: FolderLabel) -> None:
    """Note what is known of the folder's model, as far as the disk allows."""
    if label.model and read_label(folder) != label:
        with suppress(OSError):
            write_whole(folder / _LABEL, [json.dumps(asdict(label)).encode()])


def write_whole(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write a file that is never seen in parts, mode 0600; OSError if it cannot be, and then nothing is left."""
    temporary = path.with_name(f"{_TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb", opener=_create_private) as file:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)  # as long as it is held, nobody takes the file for a left-over
            for piece in pieces:
                file.write(piece)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def claim(path: Path) -> bool:
    """Make an empty file, mode 0600; False if there is something already, or none can be made. FileNotFoundError if
    the folder is missing."""
    try:
        with open(path, "xb", opener=_create_private):
            return True
    except FileNotFoundError:
        raise
    except OSError:
        return False


def check_room(folder: Path, size: int) -> None:
    """FullError if so many more bytes would take what is to stay free on the disk."""
    usage = shutil.disk_usage(folder)
    missing = min(RESERVE, int(usage.total * RESERVE_SHARE)) + size - usage.free
    if usage.total and missing > 0:
        raise FullError(errno.ENOSPC, "the disk is nearly full", str(folder), missing)


def _create_private(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o600)
    with suppress(OSError):
        os.fchmod(descriptor, 0o600)
    return descriptor


# Removing


def sweep(root: Path) -> None:
    """Remove what writers that were killed have left."""
    for folder in [root, *(path for model in folders(root) for path in (model, model / NOTES))]:
        for entry in _entries(folder):
            if entry.name.startswith(_TEMPORARY) and _abandoned(folder / entry.name):
                with suppress(OSError):
                    os.unlink(folder / entry.name)


def _abandoned(path: Path) -> bool:
    """Whether nobody writes a temporary file any more: its writer holds a lock. (Where locks do not reach, the writer
    finds its file gone and writes it again.)"""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        age = abs(time.time() - os.fstat(descriptor).st_mtime)  # clocks also go backwards
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return age > _GRACE_SECONDS
    except BlockingIOError:
        return False
    except OSError:  # a disk without locks
        return age > _STALE_SECONDS
    finally:
        os.close(descriptor)


def remove(folder: Path, path: str) -> None:
    """Unlink a file that `files` found, if it is still there; and the folders inside that this leaves empty."""
    assert ".." not in path.split("/") and not path.startswith("/"), path
    (folder / path).unlink(missing_ok=True)
    inner = path.rpartition("/")[0]
    with suppress(OSError):
        while inner:
            (folder / inner).rmdir()
            inner = inner.rpartition("/")[0]


def prune(folder: Path) -> None:
    """Remove a model's folder if nothing is in it but its label."""
    with suppress(OSError):
        (folder / NOTES).rmdir()
    _remove_but_for(folder, {_LABEL})


def prune_root(root: Path) -> None:
    """Remove the place of all models if no model's folder is in it, nor anything else that is not ours."""
    _remove_but_for(root, {_TAG, WEIGHTS})


def _remove_but_for(folder: Path, names: Set[str]) -> None:
    """Remove a folder in which at most those files are left."""
    with suppress(OSError):
        with os.scandir(folder) as entries:
            if any(entry.name not in names for entry in entries):
                return
        for name in names:
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()
