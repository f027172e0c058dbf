"""The files of a checkpoint, in a directory or on the Hugging Face hub. Only the parts that are read are downloaded."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

from deltic.config.quantization import Quantization, read_quantization
from deltic.errors import ModelError
from deltic.loader.catalog import parse_repository, repository_of
from deltic.loader.disk import parse_json
from deltic.loader.files import CONFIG, MODELOPT, parse_header
from deltic.loader.hub import EMBEDDED, cached, explained_errors, is_offline, resolve
from deltic.loader.ranges import Repository
from deltic.loader.tensors import StoredTensor

HEAD_FILES: Final = ("mtp.safetensors", "mtp/weights.safetensors")
"""Files of draft heads, by priority."""
_MAX_CONFIG: Final = 64 << 20
_BUFFER: Final = 4 << 20
_GGUF_REFUSED: Final = "is a GGUF file; take the original model, a directory or a Hugging Face name"


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """Files of a checkpoint, in a directory or on the hub.

    place: prefix of the files' names in messages.
    sizes: bytes of each file.
    read(name, offset, count): returns bytes of a file, fewer at its end, or raises ModelError.
    whole: False allows files that end before the data of their tensors.
    parsed: JSON files that were already read.
    """

    place: Path
    sizes: Mapping[str, int]
    read: Callable[[str, int, int], bytes]
    whole: bool = True
    parsed: dict[str, dict[str, Any]] = field(default_factory=dict)

    def json(self, name: str) -> dict[str, Any]:
        """Reads a JSON object. Raises ModelError naming the file."""
        if name in self.parsed:
            return self.parsed[name]
        path, size = self.place / name, self.sizes.get(name)
        if size is None or size > _MAX_CONFIG:
            raise ModelError(f"{path} is {'absent' if size is None else 'too large'}; "
                             "is this a complete Hugging Face model?")
        self.parsed[name] = parse_json(self.read(name, 0, size), path)
        return self.parsed[name]

    def quantization(self) -> Quantization:
        """Reads how the weights are quantized. Raises ModelError like `read_quantization`."""
        return read_quantization(*(self.json(name) if name in self.sizes else {} for name in (CONFIG, MODELOPT)))

    def header(self, name: str) -> dict[str, StoredTensor]:
        """Returns the tensors of a safetensors file."""
        position = 0

        def read_next(count: int) -> bytes:
            nonlocal position
            position += count
            return self.read(name, position - count, count)

        return parse_header(self.place / name, self.sizes[name], read_next, self.whole)

    def open(self, name: str) -> BinaryIO:
        """Opens a file for forward reading, some megabytes at a time."""
        return io.BufferedReader(_Reader(self, name), min(_BUFFER, self.sizes[name] + 1))


class _Reader(io.RawIOBase):
    """Reads a file of a checkpoint as a raw stream."""

    def __init__(self, files: CheckpointFiles, name: str) -> None:
        self._files, self._name, self._position = files, name, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = (0, self._position, self._files.sizes[self._name])[whence]
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), self._files.sizes[self._name] - self._position)
        piece = self._files.read(self._name, self._position, count) if count > 0 else b""
        buffer[:len(piece)] = piece
        self._position += len(piece)
        return len(piece)


def directory_checkpoint(directory: Path) -> CheckpointFiles:
    """Opens the files of a directory, including a draft head's file in a folder of its own."""
    def read(name: str, offset: int, count: int) -> bytes:
        path = directory / name
        try:
            with path.open("rb") as file:
                file.seek(offset)
                return file.read(count)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}") from error

    try:
        paths = [*sorted(directory.iterdir()), *(directory / name for name in HEAD_FILES if "/" in name)]
        sizes = {path.relative_to(directory).as_posix(): path.stat().st_size for path in paths if path.is_file()}
    except OSError as error:
        raise ModelError(f"{directory} cannot be read: {error.strerror}") from error
    return CheckpointFiles(directory, sizes, read)


def open_checkpoint(model: str, revision: str | None = None, token: str | None = None) -> CheckpointFiles:
    """Opens the files of a directory or a repository. Only the parts that are read are downloaded.

    Raises ModelError like `resolve`, and for a GGUF file.
    """
    local = Path(model).exists()
    found = None if local or model == EMBEDDED else parse_repository(model, revision)
    if found and found.file:
        raise ModelError(f"{model} {_GGUF_REFUSED}")
    if found:
        return hub_checkpoint(found.repository, found.revision, token)
    path = resolve(model if local else repository_of(model), revision, token)
    if path.is_file():
        raise ModelError(f"{path} {_GGUF_REFUSED}")
    return directory_checkpoint(path)


def hub_checkpoint(repository: str, revision: str | None = None, token: str | None = None) -> CheckpointFiles:
    """Opens the files of a repository on the hub, or, without network, the files of an earlier download.

    Raises ModelError with a remedy if it is absent, gated, unauthorised or offline, or the hub sends no byte ranges.
    """
    with explained_errors(repository, revision):
        try:
            found = Repository(repository, revision, token)
        except Exception as error:
            if not is_offline(error):
                raise
            return directory_checkpoint(cached(repository, None, revision, error))

    def read(name: str, offset: int, count: int) -> bytes:
        with explained_errors(repository, revision):
            return found.read(name, offset, count)

    return CheckpointFiles(Path(repository), found.sizes, read)
