"""Stores the packed weights of a model, so that the next start maps them from a file instead of packing them again.

    magic, bytes of the header | header: JSON | the matrices' bytes, each at a multiple of 64

The name of a file is the digest of its key, which covers everything that its bytes depend on. The header repeats the
key and has a digest of every piece of the data, which a start verifies. An incomplete file, or one with another key, is
ignored with a warning and written again. Files are replaced, never changed: truncating a mapped file kills the process.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from deltic.cache.offload.directory import write_whole
from deltic.cache.offload.identity import Identity
from deltic.config import available_cores
from deltic.errors import ConfigError
from deltic.ops.quantized import QTensor
from deltic.ops.types import Weight

log = logging.getLogger("deltic")

VERSION: Final = 2
_MAGIC: Final = b"deltic-aot\0\0"
_HEAD: Final = struct.Struct("<12sIQ")
_ALIGNMENT: Final = 64
_PIECE: Final = 16 << 20
_LARGEST: Final = 64 << 20
"""Maximum bytes of a header."""


class PackedFile:
    """A model's packed weights in a directory."""

    def __init__(self, folder: str, facts: Mapping[str, object], made: Identity) -> None:
        """facts: facts of the machine and the kernels. made: identity of the weights. Raises ConfigError if the
        directory cannot be created."""
        files = [asdict(mark) for mark in made.marks]
        self.usable = all(mark.settled for mark in made.marks)
        """True if every later change of the model's files can be detected."""
        key = json.dumps({"version": VERSION, "machine": facts, "weights": made.facts, "files": files}, default=str,
                         sort_keys=True)
        self.key = hashlib.sha256(key.encode()).hexdigest()
        self.path = Path(folder) / f"packed-{self.key[:32]}.bin"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"aot_dir {folder}: {error.strerror}: name a directory that can be written to",
                              "aot_dir") from error

    def read(self) -> list[dict[str, Weight]] | None:
        """Returns each device's part of the weights, mapped. None if they must be packed, with a warning if there is an
        unusable file."""
        if not self.usable:
            return None
        try:
            with self.path.open("rb") as file:
                weights = _read(file.fileno(), self.key)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s is ignored and written again: %s", self.path, error)
            return None
        log.info("packed weights come from %s", self.path)
        return weights

    def write(self, parts: Sequence[Mapping[str, Weight]]) -> None:
        """Writes each device's part of the weights for the next start. An error is only a warning, because the weights
        are in memory."""
        if not self.usable:
            log.info("packed weights are not kept: the model's files were changed a moment ago")
            return
        try:
            write_whole(self.path, _pieces(self.key, parts))
        except OSError as error:
            log.warning("packed weights are not kept: %s: %s", self.path, error.strerror)


def _bytes_of(block: Tensor | QTensor) -> memoryview:
    data = block.data if isinstance(block, QTensor) else block.detach().contiguous().view(-1).view(torch.uint8)
    return _view(data)


def _view(data: Tensor) -> memoryview:
    """Returns the bytes of a uint8 tensor."""
    numbers: Any = data.numpy()
    return memoryview(numbers).cast("B")


def _describe(block: Tensor | QTensor) -> dict[str, Any]:
    if isinstance(block, QTensor):
        return {"type": block.type, "number": block.matrix.type, "rows": block.rows, "columns": block.columns}
    return {"dtype": str(block.dtype).removeprefix("torch."), "shape": [*block.shape]}


def _pieces(key: str, weights: Sequence[Mapping[str, Weight]]) -> Iterator[bytes | memoryview]:
    """Yields the file's content. If a weight is a tuple, its blocks follow each other under its name."""
    entries, parts, start = list[dict[str, Any]](), list[memoryview](), 0
    named = [(device, name, weight) for device, own in enumerate(weights) for name, weight in own.items()]
    for device, name, weight in named:
        for block in weight if isinstance(weight, tuple) else (weight,):
            view = _bytes_of(block)
            start = -(-start // _ALIGNMENT) * _ALIGNMENT
            entries.append({"device": device, "name": name, "stack": isinstance(weight, tuple), "start": start,
                            "nbytes": len(view), **_describe(block)})
            parts.append(view)
            start += len(view)
    with ThreadPoolExecutor(available_cores()) as pool:
        digests = [*pool.map(_digests, parts)]
    entries = [{**entry, "sha256": found} for entry, found in zip(entries, digests, strict=True)]
    header = json.dumps({"key": key, "nbytes": start, "devices": len(weights), "entries": entries}).encode()
    header += b" " * (-(_HEAD.size + len(header)) % _ALIGNMENT)
    yield _HEAD.pack(_MAGIC, VERSION, len(header)) + header
    end = 0
    for entry, view in zip(entries, parts, strict=True):
        yield bytes(entry["start"] - end)
        yield view
        end = entry["start"] + len(view)


def _digests(view: memoryview) -> list[str]:
    return [hashlib.sha256(view[start:start + _PIECE]).hexdigest() for start in range(0, len(view), _PIECE)]


def _read(descriptor: int, key: str) -> list[dict[str, Weight]]:
    """Returns each device's weights from a file. Raises ValueError with the reason if the file is unusable."""
    magic, version, size = _HEAD.unpack(_exactly(descriptor, _HEAD.size, 0))
    if magic != _MAGIC or version != VERSION or size > _LARGEST:
        raise ValueError("it is no file of packed weights, or of another version of deltic")
    header = json.loads(_exactly(descriptor, size, _HEAD.size))
    if header["key"] != key:
        raise ValueError("it is of another model, machine or version")
    first = _HEAD.size + size
    if os.fstat(descriptor).st_size != first + header["nbytes"]:
        raise ValueError("it is not whole")
    mapped = torch.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    with ThreadPoolExecutor(available_cores()) as pool:
        blocks = [*pool.map(lambda entry: _block(mapped[first + entry["start"]:][:entry["nbytes"]], entry),
                            header["entries"])]
    found: list[dict[str, Weight]] = [{} for _ in range(header["devices"])]
    for entry, block in zip(header["entries"], blocks, strict=True):
        own, name = found[entry["device"]], entry["name"]
        own[name] = (*own.get(name, ()), block) if entry["stack"] else block
    return found


def _block(data: Tensor, entry: Mapping[str, Any]) -> Tensor | QTensor:
    """Returns the block in these bytes. Raises ValueError if they differ from what was written."""
    from deltic.ops.cpu.library import MatrixStruct

    if _digests(_view(data)) != entry["sha256"]:
        raise ValueError(f"the bytes of {entry['name']} are damaged")
    if "dtype" in entry:
        return data.view(getattr(torch, entry["dtype"])).view(entry["shape"])
    rows, columns = entry["rows"], entry["columns"]
    return QTensor(entry["type"], rows, columns, data, MatrixStruct(entry["number"], rows, columns, data.data_ptr()))


def _exactly(descriptor: int, size: int, start: int) -> bytes:
    content = os.pread(descriptor, size, start)
    if len(content) != size:
        raise ValueError("it is not whole")
    return content

