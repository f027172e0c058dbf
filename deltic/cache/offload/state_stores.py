"""Stores of saved prefixes: a directory, an HTTP server, or a place that fsspec opens, such as s3://. Needs no torch.

Files have the names that `state_manifest` describes; others are ignored. A file appears whole or not at all, and a
manifest after its items.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from deltic.cache.offload.directory import (
    ITEM_SUFFIX,
    check_room,
    open_regular,
    remove_abandoned,
    temporary_file,
    write_whole,
)
from deltic.cache.offload.state_manifest import (
    LARGEST_MANIFEST,
    MANIFEST_SUFFIX,
    Manifest,
    SavedState,
    StateError,
    checked_id,
    parse_manifest,
)
from deltic.errors import ConfigError

_NAME: Final = re.compile(r"[0-9a-f]{64}(?:\.json|\.safetensors)")
_ID_LENGTH: Final = 64
_PIECE: Final = 4 << 20
_LARGEST_LISTING: Final = 64 << 20
_TIMEOUT: Final = 60.0

Progress = Callable[[int, int], None]
"""Called with (bytes copied, total bytes)."""


class StateFolder(ABC):
    """A store of files by name. Methods raise StateError with the reason, or OSError."""

    def __init__(self, place: str) -> None:
        self.place = place

    @abstractmethod
    def pieces(self, name: str) -> Iterator[bytes]:
        """Yields the content of a file. Raises StateError if it is missing."""

    @abstractmethod
    def put(self, name: str, source: Path) -> None:
        """Stores a file."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Returns the size of a file; None if it is missing."""

    @abstractmethod
    def names(self) -> list[str]:
        """Returns the names of all files that may belong to saved prefixes."""

    def ids(self) -> list[str]:
        return sorted(name.removesuffix(MANIFEST_SUFFIX) for name in self.names() if name.endswith(MANIFEST_SUFFIX))

    def manifest(self, id: str) -> tuple[Manifest, bytes]:
        """Returns a manifest and its bytes. Raises StateError if it is missing, damaged or too large."""
        found = bytearray()
        for piece in self.pieces(checked_id(id) + MANIFEST_SUFFIX):
            found += piece
            if len(found) > LARGEST_MANIFEST:
                raise StateError(f"the manifest of the saved state {id} has more than {LARGEST_MANIFEST:,} bytes")
        data = bytes(found)
        return parse_manifest(id, data), data

    def find(self, id: str | None) -> str:
        """Returns the only id that begins with `id` (None: the only id). Raises StateError for none or several."""
        if id and len(id) == _ID_LENGTH:
            return checked_id(id)
        ids = [found for found in self.ids() if found.startswith(id or "")]
        if len(ids) == 1:
            return ids[0]
        if not ids:
            raise StateError(f"{self.place} has no saved state" + (f" {id}" if id else ""))
        raise StateError(f"{self.place} has {len(ids)} saved states{f' that begin with {id}' if id else ''}: name one "
                         "by its id, as `deltic state ls` shows it")


class StateDirectory(StateFolder):
    """A local directory. Only the user who writes its files can read them."""

    def __init__(self, place: str | Path) -> None:
        super().__init__(str(place))
        self.root = Path(place).expanduser()

    def path(self, name: str) -> Path:
        assert _NAME.fullmatch(name), "the name of a file was not checked"
        return self.root / name

    def create(self) -> None:
        """Creates the directory and deletes temporary files of killed writers. Raises ConfigError if that fails."""
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            remove_abandoned(self.root)
        except OSError as error:
            raise ConfigError(f"{self.place} cannot be used as a directory of states: {error.strerror}",
                              "state_dir") from error

    def pieces(self, name: str) -> Iterator[bytes]:
        with self._opened(name) as file:
            while piece := file.read(_PIECE):
                yield piece

    def put(self, name: str, source: Path) -> None:
        self.create()
        check_room(self.root, source.stat().st_size)
        with open_regular(source) as file:
            write_whole(self.path(name), iter(lambda: file.read(_PIECE), b""))

    def size(self, name: str) -> int | None:
        with suppress(OSError):
            return self.path(name).lstat().st_size
        return None

    def names(self) -> list[str]:
        try:
            return [path.name for path in self.root.iterdir() if _NAME.fullmatch(path.name)]
        except OSError as error:
            raise StateError(f"{self.place} cannot be read: {error.strerror}") from error

    @contextmanager
    def _opened(self, name: str) -> Iterator[Any]:
        try:
            with open_regular(self.path(name)) as file:
                yield file
        except OSError as error:
            raise StateError(f"the file {name} cannot be read: {error.strerror}") from error


class HttpStates(StateFolder):
    """A directory of an HTTP server, accessed by GET, HEAD and PUT. Its index page lists the files."""

    def __init__(self, place: str) -> None:
        import httpx2

        super().__init__(place.rstrip("/"))
        self._client = httpx2.Client(timeout=_TIMEOUT, follow_redirects=True)

    def pieces(self, name: str) -> Iterator[bytes]:
        yield from self._get(f"/{name}")

    def put(self, name: str, source: Path) -> None:
        def content() -> Iterator[bytes]:
            with open_regular(source) as file:
                while piece := file.read(_PIECE):
                    yield piece

        with self._reported():
            headers = {"content-length": str(source.stat().st_size)}
            response = self._client.put(f"{self.place}/{name}", content=content(), headers=headers)
        if response.status_code >= 300:
            raise StateError(f"{self.place} does not take {name}: status {response.status_code}")

    def size(self, name: str) -> int | None:
        with self._reported():
            response = self._client.head(f"{self.place}/{name}")
        length = response.headers.get("content-length", "")
        return int(length) if response.status_code == 200 and length.isdigit() else None

    def names(self) -> list[str]:
        page = bytearray()
        for piece in self._get("/"):
            page += piece
            if len(page) > _LARGEST_LISTING:
                raise StateError(f"the list of files at {self.place} has more than {_LARGEST_LISTING:,} bytes")
        return sorted(set(_NAME.findall(page.decode("utf-8", "replace"))))

    def _get(self, path: str) -> Iterator[bytes]:
        with self._reported(), self._client.stream("GET", self.place + path) as response:
            if response.status_code != 200:
                raise StateError(f"{self.place}{path} cannot be read: status {response.status_code}")
            yield from response.iter_bytes(_PIECE)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        import httpx2

        try:
            yield
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise StateError(f"{self.place} cannot be reached: {error or type(error).__name__}") from error


class FsspecStates(StateFolder):
    """A folder of a file system that fsspec opens."""

    def __init__(self, place: str) -> None:
        super().__init__(place.rstrip("/"))
        try:
            import fsspec

            self._system, self._root = fsspec.core.url_to_fs(self.place)
        except ImportError as error:
            raise ConfigError(f"{self.place}: {error}; pip install 'deltic[states]' brings what s3:// needs") from error
        except ValueError as error:
            raise ConfigError(f"{self.place} is neither a directory nor a place that fsspec knows: {error}") from error

    def pieces(self, name: str) -> Iterator[bytes]:
        with self._reported(name), self._system.open(f"{self._root}/{name}", "rb") as file:
            while piece := file.read(_PIECE):
                yield piece

    def put(self, name: str, source: Path) -> None:
        with self._reported(name):
            self._system.makedirs(self._root, exist_ok=True)
            self._system.put_file(str(source), f"{self._root}/{name}")

    def size(self, name: str) -> int | None:
        with self._reported(name):
            path = f"{self._root}/{name}"
            return int(self._system.info(path)["size"]) if self._system.exists(path) else None

    def names(self) -> list[str]:
        with self._reported(""):
            self._system.invalidate_cache()
            found = [path.rsplit("/", 1)[-1] for path in self._system.ls(self._root, detail=False)]
        return [name for name in found if _NAME.fullmatch(name)]

    @contextmanager
    def _reported(self, name: str) -> Iterator[None]:
        """Turns the errors of file system libraries into StateError."""
        try:
            yield
        except (StateError, GeneratorExit):
            raise
        except FileNotFoundError as error:
            raise StateError(f"{self.place} has no file {name}" if name else f"there is no {self.place}") from error
        except Exception as error:
            raise StateError(f"{self.place} cannot be used: {error or type(error).__name__}") from error


def open_states(place: str | Path) -> StateFolder:
    """Returns the store at a path or URL. Raises ConfigError if it cannot be opened."""
    scheme = str(place).partition("://")[0] if "://" in str(place) else ""
    if scheme in ("http", "https"):
        return HttpStates(str(place))
    return FsspecStates(str(place)) if scheme else StateDirectory(place)


def list_states(store: StateFolder) -> list[tuple[SavedState, str]]:
    """Returns the saved prefixes, newest first. A manifest that cannot be read comes last, with the reason."""
    found = list[tuple[SavedState, str]]()
    for id in store.ids():
        try:
            found.append((SavedState.of(id, store.manifest(id)[0]), ""))
        except StateError as error:
            found.append((SavedState(id, "", 0, (), 0, 0, "", ""), str(error)))
    return sorted(found, key=lambda pair: -pair[0].created)


def push(source: StateDirectory, id: str, target: StateFolder, progress: Progress) -> SavedState:
    """Copies a saved prefix from a directory to a store: first the missing items, then the manifest."""
    manifest, _ = source.manifest(id)
    sent = 0
    for item in manifest.items:
        name = item.sha256 + ITEM_SUFFIX
        _check(source.pieces(name), name, item.size, item.sha256, lambda piece: None)
        if target.size(name) != item.size:
            target.put(name, source.path(name))
        sent += item.size
        progress(sent, manifest.size)
    target.put(id + MANIFEST_SUFFIX, source.path(id + MANIFEST_SUFFIX))
    return SavedState.of(id, manifest)


def pull(source: StateFolder, id: str, target: StateDirectory, progress: Progress) -> SavedState:
    """Copies a saved prefix from a store to a directory. Checks every file before it appears there."""
    target.create()
    manifest, data = source.manifest(id)
    received = 0
    for item in manifest.items:
        name = item.sha256 + ITEM_SUFFIX
        if target.size(name) != item.size:
            check_room(target.root, item.size)
            _receive(source.pieces(name), target.path(name), item.size, item.sha256)
        received += item.size
        progress(received, manifest.size)
    write_whole(target.path(id + MANIFEST_SUFFIX), [data])
    return SavedState.of(id, manifest)


def _receive(pieces: Iterator[bytes], path: Path, size: int, digest: str) -> None:
    with temporary_file(path.parent, ()) as temporary:
        with open(temporary, "r+b") as file:
            _check(pieces, path.name, size, digest, file.write)
        temporary.replace(path)


def _check(pieces: Iterator[bytes], name: str, size: int, digest: str, use: Callable[[bytes], object]) -> None:
    """Passes the content of a file to `use`, piece by piece. Raises StateError if its size or digest are wrong."""
    found, count = sha256(), 0
    for piece in pieces:
        count += len(piece)
        if count > size:
            break
        found.update(piece)
        use(piece)
    if count != size:
        raise StateError(f"the file {name} has {'more' if count > size else 'fewer'} than the {size:,} bytes that its "
                         "manifest names")
    if found.hexdigest() != digest:
        raise StateError(f"the file {name} was changed: it does not have the hash that it is named by")


def chosen_ids(store: StateFolder, ids: Sequence[str]) -> list[str]:
    """Returns the full ids for these beginnings of ids; all ids if `ids` is empty. Raises StateError."""
    found = [store.find(id) for id in ids] if ids else store.ids()
    if not found:
        raise StateError(f"{store.place} has no saved state")
    return found
