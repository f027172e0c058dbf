"""Reads PyTorch's own files. Pickles can run code, so they are read with torch's weights_only, which allows tensors and
containers only."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple
from zipfile import ZIP_STORED, ZipFile, ZipInfo

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from deltic.errors import ModelError

DTYPES: Final = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}
"""torch dtype -> safetensors dtype."""
# Records other than tensor data have some kilobytes. Far larger ones only serve to exhaust memory.
_MAX_RECORD: Final = 16 << 20
_ADVICE: Final = "download it again, or take the safetensors file"


class TensorLocation(NamedTuple):
    """A tensor in a file: `nbytes` bytes at `offset`, row-major, of safetensors dtype `dtype`."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_pickled(path: Path) -> dict[str, Tensor]:
    """Reads the tensors of a file such as pytorch_model.bin. Raises ModelError if it contains anything else."""
    try:
        with path.open("rb") as file:
            found = _load(path, file)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    if not all(type(tensor) is Tensor for tensor in found.values()):
        raise _other(path)
    return found


def find_pickled(path: Path, file: BinaryIO) -> dict[str, TensorLocation]:
    """Locates the tensors in a file such as pytorch_model.bin, without reading their data.

    Raises OSError, and ModelError for a file that contains anything else, that was written before torch 1.6, or whose
    tensors do not match the records of the zip archive.
    """
    records = _records(path, file)
    file.seek(0)
    with FakeTensorMode():  # shapes and offsets only
        tensors = _load(path, file)
    return {name: _locate(path, name, tensor, records) for name, tensor in tensors.items()}


def _load(path: Path, file: BinaryIO) -> dict[str, Tensor]:
    try:
        found: Any = torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # hostile files cause any exception
        reason = str(error).strip().split("\n")[0][:200]
        raise ModelError(f"{path} is no file of weights that can be opened without running code from it ({reason}): "
                         f"{_ADVICE}") from error
    if not isinstance(found, dict) or not all(isinstance(name, str) and isinstance(tensor, Tensor)
                                              for name, tensor in found.items()):
        raise _other(path)
    return dict(found)


def _other(path: Path) -> ModelError:
    return ModelError(f"{path} must hold tensors by their names, and nothing else; take the safetensors file")


def _records(path: Path, file: BinaryIO) -> dict[int, int]:
    """Returns the records of the zip archive: offset -> bytes."""
    size = file.seek(0, 2)
    try:
        with ZipFile(_BoundedReader(file)) as archive:
            entries = {_start(file, entry): entry for entry in archive.infolist()}
            order = next((archive.read(entry) for entry in entries.values()
                          if entry.filename.endswith("/byteorder") and entry.file_size < 99), b"little")
    except OSError:
        raise
    except Exception as error:  # hostile files cause any exception
        raise ModelError(f"{path} is damaged, or older than torch 1.6 ({str(error)[:200]}): {_ADVICE}") from error
    if order.decode(errors="replace") != sys.byteorder:
        raise ModelError(f"{path} was written on a machine with another byte order: take the safetensors file")
    for start, entry in entries.items():
        if (entry.compress_type != ZIP_STORED or start + entry.file_size > size
                or ("/data/" not in entry.filename and entry.file_size > _MAX_RECORD)):
            raise ModelError(f"{path}: its record {entry.filename[:200]!r} is not one of weights; {_ADVICE}")
    return {start: entry.file_size for start, entry in entries.items()}


def _start(file: BinaryIO, entry: ZipInfo) -> int:
    """Returns the offset of a record's data, after its name and extra fields."""
    file.seek(entry.header_offset + 26)
    return entry.header_offset + 30 + sum(int.from_bytes(file.read(2), "little") for _ in range(2))


class _BoundedReader:
    """Wraps a file, so that a hostile archive causes no large allocation."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.seek = file.seek
        self.tell = file.tell
        self.seekable = file.seekable

    def read(self, count: int = -1) -> bytes:
        found = self.file.read(_MAX_RECORD + 1 if count < 0 else min(count, _MAX_RECORD + 1))
        if len(found) > _MAX_RECORD:
            raise ValueError(f"a directory of more than {_MAX_RECORD} bytes")
        return found


def _locate(path: Path, name: str, tensor: Tensor, records: dict[int, int]) -> TensorLocation:
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise ModelError(f"{path}: tensor {name[:200]!r} is not contiguous; take the safetensors file")
    storage = tensor.untyped_storage()
    start = getattr(storage, "_checkpoint_offset", -1)
    skipped = tensor.storage_offset() * tensor.element_size()
    nbytes = tensor.numel() * tensor.element_size()
    if records.get(start) != storage.nbytes() or skipped + nbytes > storage.nbytes():
        raise ModelError(f"{path}: tensor {name[:200]!r} does not match its record; {_ADVICE}")
    dtype = DTYPES.get(tensor.dtype, str(tensor.dtype))
    return TensorLocation(dtype, tuple(tensor.shape), int(start + skipped), nbytes)
