"""Importance matrices: the mean square of each column's activations. Quantization weights errors by it.

Files of llama.cpp's `llama-imatrix`: GGUF files with the tensors NAME.in_sum2 [experts, columns] and NAME.counts
[experts, 1], and the older binary form with sums and one number of calls. NAME is a tensor's name in a GGUF file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from deltic.errors import ModelError, show
from deltic.loader.disk import open_plain
from deltic.loader.gguf.blocks import Floats
from deltic.loader.gguf.file import GgufTensor, read_header
from deltic.loader.gguf.write import NewTensor

_SUMS, _COUNTS = ".in_sum2", ".counts"
_MAGIC: Final = b"GGUF"
_MOST_ENTRIES: Final = 1 << 17
_MOST_NAME: Final = 512
_OPTIONAL: Final = ("token_embd.weight", "output.weight")
"""Tensors that `llama-imatrix` leaves out by default."""
_LARGEST: Final = np.float32(1e4)
"""Bound on a column's importance: at most this many times the mean, and at least the mean divided by it. The squares of
a column that no calibration text reached are 0, but its weights should not become arbitrary."""


@dataclass(frozen=True, slots=True)
class ImportanceMatrix:
    """Mean squares of activations, float32 [experts, columns], by the name of a tensor in GGUF files.

    datasets: names of the calibration texts. chunks: number of text chunks that were read.
    """

    path: Path
    means: Mapping[str, Floats]
    datasets: tuple[str, ...] = ()
    chunks: int = 0

    def of(self, target: NewTensor) -> Floats | None:
        """Returns the importance of a matrix's columns, around 1, [experts, columns] or [1, columns]; None if the file
        has none. Raises ModelError if its size differs from the matrix."""
        found = self.means.get(target.name)
        if found is None:
            return None
        experts = target.shape[0] if len(target.shape) == 3 else 1
        if found.shape[1] != target.shape[-1] or found.shape[0] not in (1, experts):
            raise ModelError(f"{self.path}: tensor {target.name!r} has the shape {list(target.shape)}, but the "
                             f"importance matrix has {list(found.shape)} values for it (experts, columns): it is that "
                             "of another model")
        mean = found.mean(1, keepdims=True)
        relative: Floats = np.divide(found, mean, out=np.ones_like(found), where=mean > 0)
        return relative.clip(1 / _LARGEST, _LARGEST)

    def check(self, targets: Iterable[NewTensor], layers: int) -> None:
        """Raises ModelError naming a quantized matrix of the text model that has no importance, or an importance of the
        wrong size."""
        for target in targets:
            found = self.of(target)
            needed = target.type.weights > 1 and target.name not in _OPTIONAL and not _is_head(target.name, layers)
            if found is None and needed:
                raise ModelError(f"{self.path}: the importance matrix has no values for tensor {target.name!r}: take "
                                 "that of this model, made from a text that uses all of its layers")

    def metadata(self) -> dict[str, Any]:
        """Returns the metadata keys that describe this importance matrix in a GGUF file."""
        found: dict[str, Any] = {"quantize.imatrix.file": self.path.name,
                                 "quantize.imatrix.entries_count": len(self.means)}
        if self.datasets:
            found["quantize.imatrix.dataset"] = self.datasets[0]
        return found | ({"quantize.imatrix.chunks_count": self.chunks} if self.chunks else {})


def _is_head(name: str, layers: int) -> bool:
    """Returns True for a tensor of the multi-token-prediction head, whose blocks come after the model's layers."""
    block = name.removeprefix("blk.").partition(".")[0]
    return block.isdecimal() and int(block) >= layers


def read_imatrix(path: Path) -> ImportanceMatrix:
    """Reads a file of either form. Raises ModelError naming the file, and the tensor whose values are wrong."""
    try:
        with open_plain(path) as file:
            is_gguf = file.read(len(_MAGIC)) == _MAGIC
            file.seek(0)
            found = None if is_gguf else _read_old(path, file, path.stat().st_size)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    found = found or _read_gguf(path)
    if not found.means:
        raise ModelError(f"{path} has no tensors; is it an importance matrix (llama-imatrix)?")
    return found


def _read_gguf(path: Path) -> ImportanceMatrix:
    header = read_header(path)
    if header.metadata.get("general.type") != "imatrix":
        raise ModelError(f"{path} is a GGUF file of type {show(header.metadata.get('general.type'))}, not of an "
                         "importance matrix (llama-imatrix)")
    tensors = {tensor.name: tensor for tensor in header.tensors}
    means = dict[str, Floats]()
    for name, tensor in tensors.items():
        if not name.endswith(_SUMS):
            continue
        weight = name.removesuffix(_SUMS)
        counts = tensors.get(weight + _COUNTS)
        if counts is None:
            raise ModelError(f"{path}: tensor {weight!r} has sums, but no counts; make the importance matrix again")
        means[weight] = _means(path, weight, _matrix(tensor), _matrix(counts).reshape(-1, 1))
    datasets, chunks = header.metadata.get("imatrix.datasets"), header.metadata.get("imatrix.chunk_count")
    named = tuple(filter(lambda text: isinstance(text, str), datasets)) if isinstance(datasets, list) else ()
    return ImportanceMatrix(path, means, named, chunks if type(chunks) is int else 0)


def _matrix(tensor: GgufTensor) -> Floats:
    if tensor.type.name != "F32" or not 0 < len(tensor.shape) < 4:
        raise ModelError(f"{tensor.path}: tensor {tensor.name!r} is of type {tensor.type.name} and shape "
                         f"{list(tensor.shape)}; importance matrices have matrices of F32")
    found: Floats = tensor.read().view(np.float32).reshape(-1, tensor.shape[-1])
    return found


def _means(path: Path, name: str, sums: Floats, counts: Floats) -> Floats:
    """Returns the sums divided by the counts; experts that no token reached get 1. Raises ModelError for values that
    cannot be a sum of squares."""
    if len(counts) not in (1, len(sums)):
        raise ModelError(f"{path}: tensor {name!r} has sums for {len(sums)} experts and counts for {len(counts)}")
    for values in (sums, counts):
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise ModelError(f"{path}: tensor {name!r} has values that are negative or not finite; make the importance "
                             "matrix again, from a model in another dtype")
    return np.divide(sums, counts, out=np.ones_like(sums), where=counts > 0)


# The older form: numbers are int32, little endian


def _read_old(path: Path, file: BinaryIO, size: int) -> ImportanceMatrix:
    def number(most: int) -> int:
        value: int = struct.unpack("<i", take(4))[0]
        if not 0 < value <= most:
            raise _no_imatrix(path)
        return value

    def take(count: int) -> bytes:
        data = file.read(count) if count <= size else b""
        if len(data) != count:
            raise _no_imatrix(path)
        return data

    def entries() -> Iterator[tuple[str, Floats]]:
        for _ in range(number(_MOST_ENTRIES)):
            name = take(number(_MOST_NAME)).decode("utf-8", "replace")
            calls, count = number(1 << 31), number(size // 4)
            sums = np.frombuffer(take(4 * count), np.float32)[None]
            yield name, _means(path, name, sums, np.array([[calls]], np.float32))

    means = dict(entries())
    rest = file.read(8)
    chunks, length = struct.unpack("<ii", rest) if len(rest) == 8 else (0, 0)
    dataset = file.read(length).decode("utf-8", "replace") if 0 < length <= _MOST_NAME else ""
    return ImportanceMatrix(path, means, (dataset,) if dataset else (), max(chunks, 0))


def _no_imatrix(path: Path) -> ModelError:
    return ModelError(f"{path} is no importance matrix, or ends too early; make it with llama-imatrix")
