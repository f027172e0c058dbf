"""An item of the prefix cache as the bytes of a safetensors file, and back with nothing taken on trust.

A header has one form only: the reader builds anew what the writer would have written for the item it wants, and
anything else is damage. The checksum covers that header, with zeros in its own place, and the tensors' bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO, Final
from zlib import crc32

import torch
from torch import Tensor

from deltic.cache.offload.types import StoredItem, TierStoreError

_DTYPES: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64,
                 "F8_E4M3": torch.float8_e4m3fn}
_DTYPE_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}
_FORMAT, _VERSION = "deltic-prefix", "1"
_METADATA, _CHECKSUM, _NO_CHECKSUM = "__metadata__", "crc32", "00000000"
_LENGTH_BYTES, _HEADER_LIMIT = 8, 1 << 20


@dataclass(frozen=True, slots=True)
class _ItemEntry:
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * _DTYPES[self.dtype].itemsize


def encode(item: StoredItem, tensors: Mapping[str, Tensor]) -> list[bytes | memoryview]:
    """The file of an item, in pieces; those of contiguous tensors on the CPU are views of them.

    Tensors are float32, bfloat16, float16, float8 e4m3 or int64, of any shape.
    """
    ordered = sorted(tensors.items(), key=lambda pair: (-pair[1].itemsize, pair[0]))
    entries = [_ItemEntry(name, _DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in ordered]
    contents = [_bytes_of(tensor.detach()) for _, tensor in ordered]
    checksum = crc32(_header(item, entries, _NO_CHECKSUM))
    for content in contents:
        checksum = crc32(content, checksum)
    header = _header(item, entries, f"{checksum:08x}")
    assert len(header) <= _HEADER_LIMIT, f"{len(entries)} tensors are too many for an item"
    return [len(header).to_bytes(_LENGTH_BYTES, "little"), header, *contents]


def decode(file: BinaryIO, item: StoredItem, most: int | None = None) -> dict[str, Tensor]:
    """The tensors in an unbuffered file; TierStoreError if it is not just what `encode` made of this item, or if they
    have more than `most` bytes.

    No more memory is taken than the file is long.
    """
    try:
        return _decode(file, item, most)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise TierStoreError("has a damaged header") from error
    except (RuntimeError, MemoryError) as error:
        raise TierStoreError(f"does not fit in memory: {error}") from error


def _decode(file: BinaryIO, item: StoredItem, most: int | None) -> dict[str, Tensor]:
    size = os.fstat(file.fileno()).st_size
    raw = _read_header(file, size)
    header = json.loads(raw)
    metadata = header.pop(_METADATA)
    entries = [_entry(name, fields) for name, fields in header.items()]
    checksum = metadata[_CHECKSUM]
    if {**metadata, _CHECKSUM: ""} != {**_metadata(item), _CHECKSUM: ""}:
        raise TierStoreError("is not what its name says")
    if raw != _header(item, entries, checksum):
        raise TierStoreError("has a damaged header")
    content = sum(entry.size for entry in entries)
    if _LENGTH_BYTES + len(raw) + content != size:
        raise TierStoreError("has a wrong length")
    if most is not None and content > most:
        raise TierStoreError(f"has {content:,} bytes, and at most {most:,} can be right")
    tensors, found = {}, crc32(_header(item, entries, _NO_CHECKSUM))
    for entry in entries:
        tensors[entry.name] = tensor = torch.empty(entry.shape, dtype=_DTYPES[entry.dtype])
        memory = _bytes_of(tensor)
        _fill(file, memory)
        found = crc32(memory, found)
    if checksum != f"{found:08x}":
        raise TierStoreError("has a wrong checksum")
    return tensors


def _read_header(file: BinaryIO, size: int) -> bytes:
    prefix = bytearray(_LENGTH_BYTES)
    _fill(file, memoryview(prefix))
    length = int.from_bytes(prefix, "little")
    if length > min(size - _LENGTH_BYTES, _HEADER_LIMIT):
        raise TierStoreError("has a damaged header")
    raw = bytearray(length)
    _fill(file, memoryview(raw))
    return bytes(raw)


def _entry(name: str, fields: Mapping[str, Any]) -> _ItemEntry:
    dtype, shape = fields["dtype"], fields["shape"]
    if dtype not in _DTYPES or not all(type(size) is int and 0 <= size < 1 << 63 for size in shape):
        raise ValueError(name)
    return _ItemEntry(name, dtype, tuple(shape))


def _header(item: StoredItem, entries: Sequence[_ItemEntry], checksum: str) -> bytes:
    """As safetensors has it: JSON, padded so that the tensors behind it are aligned."""
    header: dict[str, Any] = {_METADATA: {**_metadata(item), _CHECKSUM: checksum}}
    offset = 0
    for entry in entries:
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [offset, offset + entry.size]}
        offset += entry.size
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _metadata(item: StoredItem) -> dict[str, str]:
    return {"format": _FORMAT, "version": _VERSION, "kind": item.kind, "key": item.key, "parent": item.parent,
            "start": str(item.start), "done": str(item.done)}


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor, or of a copy that is."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _fill(file: BinaryIO, target: memoryview) -> None:
    done = 0
    while done < len(target):
        count = file.readinto(target[done:])  # type: ignore[attr-defined]
        if not count:
            raise TierStoreError("is truncated")
        done += count
