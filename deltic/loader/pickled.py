"""PyTorch's own files. They are pickles, which can run code when opened: they are read by torch with weights_only,
which knows tensors and containers and calls nothing else, or not at all."""

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
"""What safetensors calls them."""
# What is no tensor's numbers has some kilobytes; far more only serves to exhaust memory.
_MAX_RECORD: Final = 16 << 20
_ADVICE: Final = "download it again, or take the safetensors file"


class TensorLocation(NamedTuple):
    """Where a tensor lies in a file: `nbytes` bytes at `offset`, row-major. dtype: as safetensors calls it."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_pickled(path: Path) -> dict[str, Tensor]:
    """The tensors of a file such as pytorch_model.bin, on the CPU. ModelError names a file that holds anything else."""
    try:
        with path.open("rb") as file:
            found = _load(path, file)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    if not all(type(tensor) is Tensor for tensor in found.values()):
        raise _other(path)
    return found


def find_pickled(path: Path, file: BinaryIO) -> dict[str, TensorLocation]:
    """Where the tensors of a file such as pytorch_model.bin lie in it, of which no numbers are read.

    file: the one at `path`, open. Raises OSError, and ModelError naming a file that holds anything else, that torch
    wrote before version 1.6, or in which a tensor is not where the file's own directory has numbers.
    """
    records = _records(path, file)
    file.seek(0)
    with FakeTensorMode():  # has shapes and places alone
        tensors = _load(path, file)
    return {name: _piece(path, name, tensor, records) for name, tensor in tensors.items()}


def _load(path: Path, file: BinaryIO) -> dict[str, Tensor]:
    try:
        found: Any = torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # whatever the bytes make of the reader
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
    """What lies in the zip file: offset -> bytes."""
    size = file.seek(0, 2)
    try:
        with ZipFile(_Sparing(file)) as archive:
            entries = {_start(file, entry): entry for entry in archive.infolist()}
            order = next((archive.read(entry) for entry in entries.values()
                          if entry.filename.endswith("/byteorder") and entry.file_size < 99), b"little")
    except OSError:
        raise
    except Exception as error:  # whatever the bytes make of the reader
        raise ModelError(f"{path} is damaged, or older than torch 1.6 ({str(error)[:200]}): {_ADVICE}") from error
    if order.decode(errors="replace") != sys.byteorder:
        raise ModelError(f"{path} was written on a machine with another order of bytes: take the safetensors file")
    for start, entry in entries.items():
        if (entry.compress_type != ZIP_STORED or start + entry.file_size > size
                or ("/data/" not in entry.filename and entry.file_size > _MAX_RECORD)):
            raise ModelError(f"{path}: its part {entry.filename[:200]!r} is none of a file of weights; {_ADVICE}")
    return {start: entry.file_size for start, entry in entries.items()}


def _start(file: BinaryIO, entry: ZipInfo) -> int:
    """Where the data of a part begin: behind its name and extras, of which lengths are said before."""
    file.seek(entry.header_offset + 26)
    return entry.header_offset + 30 + sum(int.from_bytes(file.read(2), "little") for _ in range(2))


class _Sparing:
    """A file that is never read in large pieces, whatever it says of itself."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.seek, self.tell, self.seekable = file, file.seek, file.tell, file.seekable

    def read(self, count: int = -1) -> bytes:
        found = self.file.read(_MAX_RECORD + 1 if count < 0 else min(count, _MAX_RECORD + 1))
        if len(found) > _MAX_RECORD:
            raise ValueError(f"a directory of more than {_MAX_RECORD} bytes")
        return found


def _piece(path: Path, name: str, tensor: Tensor, records: dict[int, int]) -> TensorLocation:
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise ModelError(f"{path}: tensor {name[:200]!r} does not lie in one piece; take the safetensors file")
    storage = tensor.untyped_storage()
    start, size = getattr(storage, "_checkpoint_offset", -1), storage.nbytes()
    skipped, nbytes = tensor.storage_offset() * tensor.element_size(), tensor.numel() * tensor.element_size()
    if records.get(start) != size or skipped + nbytes > size:
        raise ModelError(f"{path}: tensor {name[:200]!r} is not where the file says; {_ADVICE}")
    return TensorLocation(
        DTYPES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape), int(start + skipped), nbytes
    )
