"""Writes GGUF files, one tensor in memory at a time.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, version 3, little endian.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from deltic.errors import ModelError
from deltic.loader.gguf.blocks import BlockType, Bytes
from deltic.loader.writing import check_room, replacing

_VERSION, _ALIGNMENT = 3, 32
_ARRAY: Final = 9
_NUMBERS: Final[Mapping[str, int]] = {
    "uint8": 0, "int8": 1, "uint16": 2, "int16": 3, "uint32": 4, "int32": 5, "float32": 6, "uint64": 10, "int64": 11,
    "float64": 12}
"""numpy type -> type in files."""


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor to be written. The shape has rows first, as in torch."""

    name: str
    type: BlockType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.type.size(math.prod(self.shape))


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Sequence[NewTensor],
               data: Iterable[Iterable[Bytes]]) -> int:
    """Writes a file and returns its size. `data` yields the bytes of each tensor in pieces (uint8).

    Metadata may be booleans, integers (stored as uint32, larger ones as int64), floats (float32), strings, lists of one
    of these types (integers as int32), and numpy arrays of numbers.
    The file is temporary until it is complete. Raises DelticError if it cannot be written or the disk is full, errors
    of `data`, and ModelError if `data` does not fit the tensors.
    """
    header = _header(metadata, tensors)
    size = len(header) + sum(_aligned(tensor.nbytes) for tensor in tensors)
    check_room(path, size, "make room, or choose a smaller type or another place")
    with replacing(path) as file:
        file.write(header)
        for tensor, pieces in zip(tensors, data, strict=True):
            _write_tensor(file, tensor, pieces)
    return size


def _write_tensor(file: BinaryIO, tensor: NewTensor, pieces: Iterable[Bytes]) -> None:
    written = 0
    for piece in pieces:
        file.write(np.ascontiguousarray(piece).data)
        written += piece.size
    if written != tensor.nbytes:
        raise ModelError(f"tensor {tensor.name!r} has {written} bytes, not the {tensor.nbytes} of its shape")
    file.write(bytes(_aligned(written) - written))


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


# The header


def _header(metadata: Mapping[str, Any], tensors: Sequence[NewTensor]) -> bytes:
    """Returns the padded bytes before the data."""
    parts = [b"GGUF", _u32(_VERSION), _u64(len(tensors)), _u64(len(metadata))]
    for key, value in metadata.items():
        kind, data = _value(value)
        parts += [_string(key), _u32(kind), data]
    offset = 0
    for tensor in tensors:
        parts.append(_entry(tensor, offset))
        offset += _aligned(tensor.nbytes)
    header = b"".join(parts)
    return header.ljust(_aligned(len(header)), b"\0")


def _entry(tensor: NewTensor, offset: int) -> bytes:
    """Returns a tensor's entry. Files have the length of rows first."""
    dimensions = b"".join(map(_u64, reversed(tensor.shape)))
    return _string(tensor.name) + _u32(len(tensor.shape)) + dimensions + _u32(tensor.type.id) + _u64(offset)


def _u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


def _u64(value: int) -> bytes:
    return value.to_bytes(8, "little")


def _string(text: str) -> bytes:
    data = text.encode()
    return _u64(len(data)) + data


def _integer(value: int) -> tuple[int, bytes]:
    return (4, _u32(value)) if 0 <= value < 1 << 32 else (11, value.to_bytes(8, "little", signed=True))


_SINGLE: Final[Mapping[type, Callable[[Any], tuple[int, bytes]]]] = {
    bool: lambda value: (7, bytes([value])),
    int: _integer,
    float: lambda value: (6, np.float32(value).tobytes()),
    str: lambda value: (8, _string(value)),
}
"""Python type -> encoder, which returns type and bytes."""


def _value(value: Any) -> tuple[int, bytes]:
    if isinstance(value, np.ndarray):
        numbers = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
        return _ARRAY, _u32(_NUMBERS[value.dtype.name]) + _u64(value.size) + numbers.tobytes()
    if not isinstance(value, list):
        return _SINGLE[type(value)](value)
    if not value or type(value[0]) is int:
        return _value(np.array(value, np.int32))
    encode = _SINGLE[type(value[0])]
    parts = [encode(one) for one in value]
    return _ARRAY, _u32(parts[0][0]) + _u64(len(parts)) + b"".join(data for _, data in parts)
