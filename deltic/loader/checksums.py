"""Files from the hub are what the hub says they are: each is hashed once, after it has come."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from deltic.errors import ModelError

_CHECKED: Final = ".deltic-checked"
_PIECE: Final = 1 << 22
_NAMES: Final = {64: "SHA-256", 40: "git's SHA-1"}


@dataclass(frozen=True, slots=True)
class _DownloadedFile:
    """A downloaded file. name: in the repository. path: the link in the snapshot. digest: what the hub says, SHA-256
    for large files (64 digits), else git's SHA-1 of a blob (40)."""

    name: str
    path: Path
    digest: str

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    @property
    def mark(self) -> str:
        """What is written down when the file was found right: another file has another one."""
        found = self.path.stat()
        return f"{self.digest} {found.st_size} {found.st_mtime_ns}"


def check_files(repository: str, snapshot: Path, digests: Mapping[str, str], bar: Callable[..., Any]) -> None:
    """Hash the files of a snapshot in the hub's cache that were not hashed before; bar: as tqdm, for the bytes.

    Damaged files are deleted, so that the next download brings them anew. ModelError names them.
    """
    place = snapshot.parents[1] / _CHECKED
    known = _marks(place)
    files = [_DownloadedFile(name, snapshot / name, digest) for name, digest in digests.items()
             if len(digest) in _NAMES and (snapshot / name).is_file()]
    files = [file for file in files if file.mark not in known]
    damaged: list[str] = []
    with bar(total=sum(file.size for file in files), desc="Checking", unit="B", unit_scale=True,
             disable=None if files else True) as progress:
        for file in files:
            found = _digest(file, progress.update)
            if found == file.digest:
                _mark(place, file.mark)
            else:
                damaged.append(f"{file.name} ({_NAMES[len(found)]} {found[:12]}..., not {file.digest[:12]}...)"
                               f"{_delete(file.path)}")
    if damaged:
        raise ModelError(f"{repository} has come damaged: {', '.join(damaged)}. What is damaged is not used; "
                         f"`deltic pull {repository}` fetches it again")


def _digest(file: _DownloadedFile, progress: Callable[[int], Any]) -> str:
    """Of the file's bytes, in the hub's way; git puts a head before them."""
    if len(file.digest) == 64:
        state = hashlib.sha256()
    else:
        state = hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)
    with file.path.open("rb") as source:
        while piece := source.read(_PIECE):
            state.update(piece)
            progress(len(piece))
    return state.hexdigest()


def _marks(place: Path) -> set[str]:
    with suppress(OSError):
        return set(place.read_text("ascii", "replace").splitlines())
    return set()


def _mark(place: Path, mark: str) -> None:
    """In a cache that cannot be written to, files are hashed each time."""
    with suppress(OSError), place.open("a", encoding="ascii") as file:
        file.write(f"{mark}\n")


def _delete(path: Path) -> str:
    """The file and its link; says so if that cannot be."""
    try:
        path.resolve().unlink()
        path.unlink(missing_ok=True)
    except OSError as error:
        return f", which cannot be deleted: {error}"
    return ""
