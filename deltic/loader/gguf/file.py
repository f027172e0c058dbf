"""A GGUF model on disk: one file, or all parts of a split file. Reads headers, which are untrusted input."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from deltic.errors import ModelError
from deltic.loader.disk import is_pointer, open_plain, pointer_error
from deltic.loader.gguf.blocks import TYPES, BlockType, Bytes
from deltic.loader.gguf.names import EXPERT

_DOWNLOAD_AGAIN: Final = "the file is truncated or corrupt, download it again"
_SCALARS: Final[Mapping[int, np.dtype[Any]]] = {id: np.dtype(name) for id, name in {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}.items()}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_LEAST_BYTES: Final[Mapping[int, int]] = {**{id: kind.itemsize for id, kind in _SCALARS.items()}, _BOOL: 1, _STRING: 8}
"""Minimum size of a value of each type."""

# Headers have about 20 MiB, nearly all of it the tokenizer. Far larger headers would only exhaust memory.
_MAX_HEADER: Final = 256 << 20
_MAX_ARRAY: Final = 1 << 24
_MAX_KEYS: Final = 1 << 16
_MAX_TENSORS: Final = 1 << 17
_MAX_NAME: Final = 512
_MAX_DIMENSIONS: Final = 4
_MAX_ALIGNMENT: Final = 1 << 20
_LEAST_KEY: Final = 8 + 1 + 4 + 1
_LEAST_TENSOR: Final = 8 + 1 + 4 + 4 + 8


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor on disk: `nbytes` bytes of blocks at `offset` of `path`. The shape has rows first, as in torch."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int

    def read(self, start: int = 0, count: int | None = None) -> Bytes:
        """Reads `count` of the tensor's bytes from `start`, by default up to its end, into a new uint8 array.

        Raises ModelError if the file cannot be read or has become shorter.
        """
        wanted = self.nbytes - start if count is None else count
        if not 0 <= start <= start + wanted <= self.nbytes:
            raise IndexError(f"{self.name} has {self.nbytes} bytes, not {start} to {start + wanted}")
        try:
            found = np.fromfile(self.path, np.uint8, wanted, offset=self.offset + start)
        except OSError as error:
            raise ModelError(f"{self.path} cannot be read: {error.strerror}") from error
        if found.size != wanted:
            raise ModelError(f"{self.path} ended while it was read; is it still being downloaded?")
        return found


    def mapped(self, start: int, count: int) -> Bytes:
        """Maps bytes of the tensor for a short time: only pages that are touched are read. Raises as `read`."""
        try:
            return np.asarray(np.memmap(self.path, np.uint8, "r", self.offset + start, count))
        except OSError as error:
            raise ModelError(f"{self.path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ModelError(f"{self.path} ended while it was read; is it still being downloaded?") from error


@dataclass(frozen=True, slots=True)
class ConcatenatedTensor(GgufTensor):
    """Several tensors of one type and path, read as one; `offset` is the offset of the first."""

    parts: tuple[GgufTensor, ...]

    def read(self, start: int = 0, count: int | None = None) -> Bytes:
        end = self.nbytes if count is None else start + count
        first, pieces = 0, list[Bytes]()
        for part in self.parts:
            low, high = max(start - first, 0), min(end - first, part.nbytes)
            if low < high:
                pieces.append(part.read(low, high - low))
            first += part.nbytes
        return np.concatenate(pieces) if pieces else np.empty(0, np.uint8)


def concatenated(name: str, parts: Sequence[GgufTensor], stack: bool = False) -> ConcatenatedTensor:
    """Concatenates tensors along their first axis, or along a new one (`stack`).

    Raises ModelError if their types, or the shapes of the other axes, differ.
    """
    first = parts[0]
    if any(part.type is not first.type or part.path != first.path
           or part.shape[not stack:] != first.shape[not stack:] for part in parts):
        raise ModelError(f"{first.path}: the parts of {name!r}, such as {first.name!r}, differ in type or shape; "
                         "take another file")
    shape = (len(parts), *first.shape) if stack else (sum(part.shape[0] for part in parts), *first.shape[1:])
    return ConcatenatedTensor(name, first.type, shape, first.path, first.offset, sum(part.nbytes for part in parts),
                              tuple(parts))


@dataclass(frozen=True, slots=True)
class Header:
    """Metadata and tensors of one file, in file order."""

    metadata: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]


def read_header(path: Path) -> Header:
    """Reads one file's header, and checks that its tensors are within the file, aligned and disjoint.

    Integers, floats, booleans and strings become Python objects, arrays of numbers become numpy arrays, and arrays of
    strings or booleans become lists. Raises ModelError naming the file, and the key or tensor that is wrong.
    """
    try:
        with open_plain(path) as file:
            return parse_header(path, path.stat().st_size, file)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error


def parse_header(path: Path, size: int, file: BinaryIO, whole: bool = True) -> Header:
    """Parses the header of an open file of `size` bytes, like `read_header`. whole=False: it may end early."""
    cursor = _Cursor(file, path, size)
    tensors, keys = _read_counts(cursor)
    metadata = dict(_read_metadata(cursor, keys))
    entries = [_read_entry(cursor) for _ in range(tensors)]
    return Header(metadata, _check_places(path, cursor, _alignment(path, metadata), entries, whole))


class _Cursor:
    """Reads a file forwards. Every length is compared with the rest of the file before anything is allocated."""

    def __init__(self, file: BinaryIO, path: Path, size: int) -> None:
        self.file, self.path, self.size = file, path, size
        self.position, self.end = 0, min(size, _MAX_HEADER)

    def error(self, text: str) -> ModelError:
        return ModelError(f"{self.path}: {text}; {_DOWNLOAD_AGAIN}")

    def take(self, count: int, what: str) -> bytes:
        if count > self.end - self.position:
            bound = "the file's end" if self.end == self.size else f"the {_MAX_HEADER} bytes that a header may have"
            raise self.error(f"{what} needs {count} bytes at offset {self.position}, beyond {bound}")
        data = self.file.read(count)
        if len(data) != count:
            raise self.error(f"{what} ended while it was read")
        self.position += count
        return data

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def count(self, what: str, least_bytes: int, limit: int) -> int:
        """Reads a number of items, at most `limit`; each item takes at least `least_bytes`."""
        count = self.u64(what)
        if count > min((self.end - self.position) // least_bytes, limit):
            raise self.error(f"{what} is {count}, more than the file can hold or any model has")
        return count

    def string(self, what: str) -> str:
        data = self.take(int.from_bytes(self.take(8, what), "little"), what)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8") from error

    def strings(self, count: int, what: str) -> list[str]:
        """Reads several strings. Vocabularies have hundreds of thousands of strings, so this loop makes few calls."""
        read, found, position = self.file.read, [], self.position
        for _ in range(count):
            head = read(8)
            after = position + 8 + int.from_bytes(head, "little")
            data = read(after - position - 8) if after <= self.end else b""
            if len(head) + len(data) != after - position:
                break
            try:
                found.append(data.decode())
            except UnicodeDecodeError:
                break
            position = after
        self.position = position
        if len(found) < count:
            self.file.seek(position)
            self.string(what)  # raises the error
        return found

    def name(self, what: str) -> str:
        name = self.string(what)
        if not 0 < len(name) <= _MAX_NAME:
            raise self.error(f"{what} has {len(name)} characters; it must have 1 to {_MAX_NAME}")
        return name


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    """Reads magic, version, and the numbers of tensors and keys."""
    magic = cursor.take(4, "the magic")
    if is_pointer(magic):
        raise pointer_error(cursor.path)
    if magic != b"GGUF":
        raise ModelError(f"{cursor.path} is no GGUF file: it begins with {magic!r}")
    version = cursor.u32("the version")
    if version and not version & 0xFFFF:
        raise ModelError(f"{cursor.path} is a big-endian GGUF file; convert it to little endian "
                         "(gguf-convert-endian), or download such a file")
    if version not in (2, 3):
        raise ModelError(f"{cursor.path} is a GGUF file of version {version}; versions 2 and 3 can be read")
    return (cursor.count("the number of tensors", _LEAST_TENSOR, _MAX_TENSORS),
            cursor.count("the number of keys", _LEAST_KEY, _MAX_KEYS))


def _read_metadata(cursor: _Cursor, count: int) -> Iterator[tuple[str, Any]]:
    seen: set[str] = set()
    for index in range(count):
        key = cursor.name(f"key {index}")
        if key in seen:
            raise cursor.error(f"the key {key!r} occurs twice")
        seen.add(key)
        what = f"the value of {key!r}"
        yield key, _read_value(cursor, cursor.u32(what), what)


def _read_value(cursor: _Cursor, kind: int, what: str) -> Any:
    if kind == _ARRAY:
        return _read_array(cursor, what)
    return _scalar_reader(cursor, kind, what)()


def _scalar_reader(cursor: _Cursor, kind: int, what: str) -> Callable[[], Any]:
    """Returns a reader of a scalar value."""
    if kind == _STRING:
        return lambda: cursor.string(what)
    if kind == _BOOL:
        return lambda: _read_bool(cursor, what)
    dtype = _SCALARS.get(kind)
    if dtype is None:
        raise cursor.error(f"{what} has the type {kind}, which does not exist")
    return lambda: np.frombuffer(cursor.take(dtype.itemsize, what), dtype)[0].item()


def _read_bool(cursor: _Cursor, what: str) -> bool:
    byte = cursor.take(1, what)[0]
    if byte > 1:
        raise cursor.error(f"{what} is the boolean {byte}; it must be 0 or 1")
    return bool(byte)


def _read_array(cursor: _Cursor, what: str) -> Any:
    """Reads an array. Arrays of arrays do not occur, and ggml does not read them either."""
    kind = cursor.u32(what)
    if kind == _ARRAY:
        raise cursor.error(f"{what} is an array of arrays, which is not supported")
    read = _scalar_reader(cursor, kind, what)
    count = cursor.count(f"the length of {what}", _LEAST_BYTES[kind], _MAX_ARRAY)
    if kind == _STRING:
        return cursor.strings(count, what)
    dtype = _SCALARS.get(kind)
    if dtype is not None:
        return np.frombuffer(cursor.take(count * dtype.itemsize, what), dtype)
    return [read() for _ in range(count)]


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    name: str
    type: BlockType
    shape: tuple[int, ...]
    offset: int


def _read_entry(cursor: _Cursor) -> _TensorInfo:
    name = cursor.name("a tensor's name")
    what = f"tensor {name!r}"
    dimensions = cursor.u32(what)
    if dimensions > _MAX_DIMENSIONS:
        raise cursor.error(f"{what} has {dimensions} dimensions; {_MAX_DIMENSIONS} are possible")
    shape = tuple(cursor.u64(what) for _ in range(dimensions))[::-1]
    type = TYPES.get(id := cursor.u32(what))
    if type is None:
        raise ModelError(f"{cursor.path}: {what} is of type {id}, which is unknown to this version of deltic")
    if 0 in shape or math.prod(shape[-1:]) % type.weights:
        raise cursor.error(f"{what} has the shape {list(shape)}, which is impossible for type {type.name} with "
                           f"blocks of {type.weights}")
    return _TensorInfo(name, type, shape, cursor.u64(what))


def _alignment(path: Path, metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", 32)
    if type(value) is not int or not 0 < value <= _MAX_ALIGNMENT or value & (value - 1):
        raise ModelError(f"{path}: general.alignment must be a power of two up to {_MAX_ALIGNMENT}, "
                         f"not {str(value)[:80]}; {_DOWNLOAD_AGAIN}")
    return value


def _check_places(path: Path, cursor: _Cursor, alignment: int, entries: list[_TensorInfo], whole: bool
                  ) -> tuple[GgufTensor, ...]:
    """Checks the tensors and sorts them by offset; gaps are allowed."""
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for entry in entries:
        nbytes = entry.type.size(math.prod(entry.shape))
        if entry.name in tensors:
            raise cursor.error(f"tensor {entry.name!r} occurs twice")
        if entry.offset % alignment:
            raise cursor.error(f"tensor {entry.name!r} is at offset {entry.offset}, no multiple of general.alignment "
                               f"({alignment})")
        if whole and start + entry.offset + nbytes > cursor.size:
            raise cursor.error(f"tensor {entry.name!r} has {nbytes} bytes at {start + entry.offset}, but the file has "
                               f"{cursor.size}")
        tensors[entry.name] = GgufTensor(
            entry.name, entry.type, entry.shape, path, start + entry.offset, nbytes)
    ordered = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    for before, after in pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            raise cursor.error(f"tensors {before.name!r} and {after.name!r} overlap")
    return tuple(ordered)


# Models


_SHARD: Final = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_REVISION: Final = "download all parts of one revision"


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Metadata and tensors of a model; the data stays on disk.

    paths: the model's files, in order.
    metadata: metadata of the first file.
    tensors: the tensors of all files by name, in file order; experts that are stored one by one are stacked.
    """

    paths: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @classmethod
    def open(cls, path: str | Path, read: Callable[[Path], Header] = read_header,
             exists: Callable[[Path], bool] = Path.is_file) -> GgufFile:
        """Opens a file; if it is a part of a split model, opens all other parts too.

        read, exists: replace reading a header and checking that a file exists, for files that are not on this machine.
        Raises ModelError naming the file, and the key or tensor that is wrong, or the part that is absent.
        """
        given = Path(path)
        header = read(given)
        parts = _parts(given, header.metadata)
        for part in parts:
            if part != given and not exists(part):
                raise ModelError(f"{part} is absent, a part of the model that {given.name} belongs to; {_REVISION}")
        headers = [header if part == given else read(part) for part in parts]
        if len(parts) > 1:
            _check_parts(parts, headers)
        return cls(parts, headers[0].metadata, dict(_with_stacks(dict(_union(parts, headers)))))


def _parts(path: Path, metadata: Mapping[str, Any]) -> tuple[Path, ...]:
    """Returns the paths of all parts. The metadata contains their number."""
    count = metadata.get("split.count", 0)
    if type(count) is not int:
        raise ModelError(f"{path}: split.count must be an integer, not {str(count)[:80]}")
    if count <= 1:
        return (path,)
    found = _SHARD.fullmatch(path.name)
    if found is None or int(found[3]) != count:
        raise ModelError(f"{path} is one of {count} parts of a model, but its name does not end in "
                         f"-0000N-of-{count:05d}.gguf; give the parts their original names")
    return tuple(path.with_name(f"{found[1]}-{number:05d}-of-{found[3]}.gguf") for number in range(1, count + 1))


def _check_parts(paths: tuple[Path, ...], headers: list[Header]) -> None:
    total = sum(len(header.tensors) for header in headers)
    wanted = {"split.no": range(len(paths)), "split.count": [len(paths)] * len(paths),
              "split.tensors.count": [total] * len(paths)}
    for key, values in wanted.items():
        for path, header, value in zip(paths, headers, values, strict=True):
            found = header.metadata.get(key)
            if type(found) is not int or found != value:
                raise ModelError(f"{path}: {key} is {str(found)[:80]}, but {value} would fit the "
                                 f"existing parts; {_REVISION}")


def _union(paths: tuple[Path, ...], headers: list[Header]) -> Iterator[tuple[str, GgufTensor]]:
    seen: dict[str, Path] = {}
    for path, header in zip(paths, headers, strict=True):
        for tensor in header.tensors:
            if tensor.name in seen:
                raise ModelError(f"tensor {tensor.name!r} is in both {seen[tensor.name].name} and {path}; {_REVISION}")
            seen[tensor.name] = path
            yield tensor.name, tensor


def _with_stacks(tensors: Mapping[str, GgufTensor]) -> Iterator[tuple[str, GgufTensor]]:
    """Stacks the experts of a draft head, like the trunk's experts, which files store stacked."""
    stacks: dict[str, dict[int, GgufTensor]] = {}
    for name, tensor in tensors.items():
        found = EXPERT.fullmatch(name)
        if found is None:
            yield name, tensor
        else:
            stacks.setdefault(f"{found[1]}ffn_{found[3]}_exps.weight", {})[int(found[2])] = tensor
    for name, experts in stacks.items():
        if sorted(experts) != list(range(len(experts))):
            raise ModelError(f"{experts[min(experts)].path}: experts are missing among those of {name!r}; download the "
                             "file again")
        yield name, concatenated(name, [experts[index] for index in range(len(experts))], stack=True)
