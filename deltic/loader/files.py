"""Locates the tensors of a model's directory, in safetensors files or PyTorch's own. File contents are untrusted."""

from __future__ import annotations

import io
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Final
from zipfile import ZIP_STORED, ZipFile, ZipInfo

import torch
from torch import Tensor

from deltic.errors import ConfigError, ModelError, show
from deltic.loader.disk import DOWNLOAD_AGAIN, is_pointer, open_plain, parse_json, pointer_error, read_json
from deltic.loader.names import is_head, stack_of

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
PICKLED_INDEX: Final = "pytorch_model.bin.index.json"
PICKLED: Final = "pytorch_model.bin"
FLOAT8: Final = "F8_E4M3"
GROUP: Final = 128
"""Columns and rows that share a scale of a float8 tensor."""
SCALES: Final = ("_scale_inv", "_scale")
"""Suffixes of the tensor with a float8 tensor's scales."""
IN_MEMORY: Final = Path("<weights in memory>")
"""Path of tensors that are in no file."""
ITEM_BYTES: Final[Mapping[str, int]] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}
# Headers of these models have some kilobytes. Far larger ones only serve to exhaust memory.
_MAX_HEADER: Final = 16 << 20
_MAX_DIMENSIONS: Final = 8
_SHARD: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
DTYPES: Final = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}
"""torch dtype -> safetensors dtype."""
# Records other than tensor data have some kilobytes. Far larger ones only serve to exhaust memory.
_MAX_RECORD: Final = 16 << 20
_OR_SAFETENSORS: Final = "download it again, or take the safetensors file"
_COPIES: Final = ("consolidated", "adapter_", "optimizer", "original")
_ONE_REVISION: Final = "keep the files of one revision"


# Tensors


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor on disk: `nbytes` bytes at `offset` of `path`, row-major, of safetensors dtype `dtype`.

    scales: for FLOAT8, the factors of blocks of GROUP rows and columns.
    data: the tensor itself if it is in memory.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    scales: StoredTensor | None = None
    data: Tensor | None = field(default=None, compare=False)

    def open(self) -> BinaryIO | _TensorReader:
        """Opens its file, or a stand-in."""
        return self.path.open("rb", buffering=0) if self.data is None else _TensorReader(self.data)

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """The tensor itself, as the only part."""
        return (self,)


@dataclass(frozen=True, slots=True)
class Stack:
    """A tensor whose entries along the first axis are stored separately, all of one dtype and shape."""

    parts: tuple[StoredTensor, ...]

    @property
    def path(self) -> Path:
        return self.parts[0].path

    @property
    def dtype(self) -> str:
        return self.parts[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.parts), *self.parts[0].shape)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


Source = StoredTensor | Stack


class _TensorReader(io.RawIOBase):
    """Reads a tensor's bytes like a file."""

    def __init__(self, tensor: Tensor) -> None:
        self._bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        self._position = 0

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset
        return offset

    def readinto(self, buffer: Any) -> int:
        piece = self._bytes[self._position:self._position + len(buffer)]
        buffer[:len(piece)] = piece
        self._position += len(piece)
        return len(piece)


@dataclass(frozen=True, slots=True)
class InMemory:
    """Tensors in memory, by their names in a checkpoint, instead of a directory."""

    tensors: Mapping[str, StoredTensor]

    def __str__(self) -> str:
        return "`weights`"


def in_memory(weights: Any) -> InMemory:
    """Wraps a state_dict. Raises ConfigError for anything but a mapping of names to dense tensors; names, shapes and
    dtypes are checked like those of files."""
    if not isinstance(weights, Mapping) or not weights:
        raise ConfigError(f"weights must map tensor names to tensors, as state_dict() does, not {show(weights)}",
                          "weights")
    return InMemory(with_scales({name: _stored(name, tensor) for name, tensor in weights.items()}))


def _stored(name: Any, tensor: Any) -> StoredTensor:
    if not isinstance(name, str):
        raise ConfigError(f"weights: names must be text, not {show(name)}", "weights")
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_meta:
        raise ConfigError(f"weights[{name[:200]!r}] must be a dense torch.Tensor with data, not {show(tensor)}",
                          "weights")
    dtype = DTYPES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
    nbytes = tensor.numel() * ITEM_BYTES.get(dtype, tensor.itemsize)
    return StoredTensor(IN_MEMORY, dtype, tuple(tensor.shape), 0, nbytes, data=tensor)


def scales_of(source: Source) -> Source | None:
    """Returns the scales of a float8 tensor or stack."""
    scales = [part.scales for part in source.parts if part.scales]
    if not scales:
        return None
    return scales[0] if isinstance(source, StoredTensor) else Stack(tuple(scales))


def rows_of(source: Source, first: int, end: int) -> Source | None:
    """Locates these rows of a tensor (these matrices of a stack). None if a float8 block extends over their first."""
    if isinstance(source, Stack):
        return Stack(source.parts[first:end])
    rows, scales = source.shape[0], source.scales
    if scales and len(source.shape) == 2 and scales.shape[0] not in (1, rows):
        if first % GROUP:
            return None
        scales = _rows(scales, first // GROUP, -(-end // GROUP))
    elif scales and scales.shape[0] == rows:
        scales = _rows(scales, first, end)
    return replace(_rows(source, first, end), scales=scales)


def _rows(stored: StoredTensor, first: int, end: int) -> StoredTensor:
    size = stored.nbytes // stored.shape[0]
    data = None if stored.data is None else stored.data.reshape(stored.shape)[first:end]
    return replace(stored, shape=(end - first, *stored.shape[1:]), nbytes=(end - first) * size, data=data,
                   offset=stored.offset + first * size if data is None else 0)


def stacked(tensors: Mapping[str, StoredTensor], count_of: Callable[[str], int]) -> dict[str, Source]:
    """Combines tensors of single experts to stacks, each at the place of its first expert.

    count_of: number of experts that a stack must have. Raises ModelError naming the tensor that is missing, doubled, or
    of another dtype or shape than the first.
    """
    found: dict[str, Source | None] = {}
    experts: dict[str, dict[int, StoredTensor]] = {}
    for name, stored in tensors.items():
        place = stack_of(name)
        if place is None:
            found[name] = stored
        else:
            stack, index = place
            found.setdefault(stack, None)
            experts.setdefault(stack, {})[index] = stored
    for name in experts:
        if found[name] is not None:
            raise ModelError(f"tensor {name!r} is given twice, as a whole and expert by expert; {_ONE_REVISION}")
    return {name: source or _stack(name, experts[name], count_of(name)) for name, source in found.items()}


def _stack(name: str, parts: Mapping[int, StoredTensor], count: int) -> Stack:
    first = next(iter(parts.values()))
    missing = [expert for expert in range(count) if expert not in parts]
    if missing or len(parts) > count:
        wrong = f"there are {len(parts)} experts, but {count} in config.json"
        if missing:
            wrong = f"{len(missing)} of {count} experts are missing, such as expert {missing[0]}"
        raise ModelError(f"tensor {name!r} in {first.path.parent}: {wrong}; download all shards of the revision that "
                         "config.json belongs to")
    for expert, part in parts.items():
        if (part.dtype, part.shape) != (first.dtype, first.shape):
            raise ModelError(f"tensor {name!r}: expert {expert} is {part.dtype[:20]} {list(part.shape)}, others are "
                             f"{first.dtype[:20]} {list(first.shape)}; {_ONE_REVISION}")
    return Stack(tuple(parts[expert] for expert in range(count)))


def with_scales(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Attaches the scales to float8 tensors, and removes them from the names. Raises ModelError naming a tensor with
    missing or unsupported scales. Scales of activations are left out, because activations are not quantized."""
    found = dict(tensors)
    for name, stored in tensors.items():
        if stored.dtype != FLOAT8:
            continue
        found.pop(f"{name.removesuffix('weight')}input_scale", None)
        given = [scales for suffix in SCALES if (scales := found.pop(f"{name}{suffix}", None))]
        if not given:
            raise ModelError(f"tensor {name[:200]!r} is stored as {FLOAT8} without scales ({name[:200]}"
                             f"{' or '.join(SCALES)}); take a float8 checkpoint with scales, or the unquantized one")
        scales = given[0]
        grid = _scale_grid(stored.shape, scales.shape) if len(stored.shape) > 1 else None
        if grid is None or scales.dtype not in ("F32", "BF16", "F16"):
            raise ModelError(f"tensor {name[:200]!r} is stored as {FLOAT8} with scales of shape {list(scales.shape)} "
                             f"and dtype {scales.dtype[:20]}; only a scale for each block of {GROUP} by {GROUP}, each "
                             "row or each matrix can be read, so use the unquantized checkpoint")
        found[name] = replace(stored, scales=replace(scales, shape=grid))
    return found


def _scale_grid(shape: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the shape [..., r, c] of a tensor's scales: of blocks, of rows ([..., rows, 1]), or of the whole matrix
    ([..., 1, 1]). None if they are of something else."""
    *stack, rows, columns = shape
    if scales in ((*stack, -(-rows // GROUP), -(-columns // GROUP)), (*stack, rows, 1)):
        return scales
    whole = (tuple(stack), (*stack, 1, 1)) if stack else ((), (1,), (1, 1))
    return (*stack, 1, 1) if scales in whole else None


# Reading headers


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a safetensors file in file order.

    Raises ModelError naming the file unless the tensors tile its data exactly.
    """
    try:
        with open_plain(path) as file:
            return parse_header(path, os.fstat(file.fileno()).st_size, file.read)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error


def parse_header(path: Path, size: int, read: Callable[[int], bytes], whole: bool = True) -> dict[str, StoredTensor]:
    """Like `read_header`, for a file of `size` bytes; `read(count)` returns its next bytes. whole: False allows a file
    that ends before its tensors."""
    start = read(8)
    length = int.from_bytes(start, "little")
    if is_pointer(start):
        raise pointer_error(path)
    if size < 8 or length > min(size - 8, _MAX_HEADER):
        raise ModelError(f"{path} announces a header of {length} bytes in a file of {size}; {DOWNLOAD_AGAIN}")
    header = parse_json(read(length), path)
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, entry, 8 + length) for name, entry in header.items()}
    tensors = dict(sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)))
    _check_tiling(path, tensors, 8 + length, size, whole)
    return tensors


def _entry(path: Path, name: str, entry: object, start: int) -> StoredTensor:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]} if (
                len(shape) <= _MAX_DIMENSIONS and all(map(_is_size, [*shape, begin, end])) and begin <= end):
            stored = StoredTensor(path, dtype, tuple(shape), start + begin, end - begin)
        case _:
            raise ModelError(f"{path}: the header entry of tensor {name[:200]!r} is malformed; {DOWNLOAD_AGAIN}")
    item = ITEM_BYTES.get(dtype)
    if item is not None and math.prod(shape) * item != stored.nbytes:
        raise ModelError(f"{path}: tensor {name[:200]!r} has {stored.nbytes} bytes, which its shape "
                         f"{str(shape)[:80]} and dtype {dtype} contradict; {DOWNLOAD_AGAIN}")
    return stored


def _is_size(number: object) -> bool:
    return type(number) is int and 0 <= number < 1 << 63


def _check_tiling(path: Path, tensors: Mapping[str, StoredTensor], start: int, size: int, whole: bool) -> None:
    for name, stored in tensors.items():
        if stored.offset != start:
            raise ModelError(f"{path}: tensor {name[:200]!r} overlaps another or leaves a gap; {DOWNLOAD_AGAIN}")
        start += stored.nbytes
    if start < size or (whole and start > size):
        raise ModelError(f"{path} has {size} bytes, but its header describes {start}; {DOWNLOAD_AGAIN}")


# Finding files


def find_tensors(directory: Path | InMemory) -> dict[str, StoredTensor]:
    """Returns all tensors of a model directory, or those in memory, by their stored names.

    Reads `model.safetensors`, else the shards of its index, else the only other safetensors file that is no draft head,
    else `pytorch_model.bin`, else the shards of its index.
    Raises ModelError for an absent, foreign or corrupt file, and for a tensor stored twice.
    """
    if isinstance(directory, InMemory):
        return {**directory.tensors}
    index = _find_index(directory)
    if index is None:
        return with_scales(_union(_files_without_index(directory)))
    weight_map = check_weight_map(read_json(index), index)
    for shard in dict.fromkeys(weight_map.values()):
        if not (directory / shard).is_file():
            raise ModelError(f"{index} names the shard {shard[:200]!r}, which is absent; download it too")
    tensors = _union(directory / name for name in sorted(set(weight_map.values())))
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].path.name != shard:
            raise ModelError(f"{index} places tensor {name[:200]!r} in {shard}, which lacks "
                             "it; download index and shards of one revision")
    return with_scales(tensors)


def _find_index(directory: Path) -> Path | None:
    """Returns the index of the shards; None if there is a single file, or nothing."""
    if (directory / SINGLE).exists():
        return None
    if (directory / INDEX).exists():
        return directory / INDEX
    index = directory / PICKLED_INDEX
    return None if (directory / PICKLED).exists() or not index.exists() or _model_files(directory) else index


def check_weight_map(index: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Returns tensor name -> shard of an index that came from `path`. Raises ModelError naming the path."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path} has no weight_map; {DOWNLOAD_AGAIN}")
    suffix = Path(path.name.removesuffix(".index.json")).suffix
    for shard in dict.fromkeys(map(str, weight_map.values())):
        if "/" in shard or "\\" in shard or len(shard) > 200 or not shard.endswith(suffix):
            raise ModelError(f"{path} names the shard {shard[:200]!r}; "
                             f"a shard is a {suffix} file beside its index")
    return {name: str(shard) for name, shard in weight_map.items()}


def _files_without_index(directory: Path) -> list[Path]:
    """Returns the file with the tensors, or all shards of one model."""
    if (directory / SINGLE).exists():
        return [directory / SINGLE]
    found = _model_files(directory)
    if len(found) == 1:
        return found
    if found:
        return _all_shards(directory, found)
    if (directory / PICKLED).exists():
        return [directory / PICKLED]
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt*")):
        raise ModelError(f"{directory} has only pickled PyTorch weights that are not called {PICKLED}; "
                         "convert them with transformers: save_pretrained(..., safe_serialization=True)")
    raise ModelError(f"{directory} has no weights: {SINGLE} or {INDEX} with its shards is needed")


def _model_files(directory: Path) -> list[Path]:
    """Returns the safetensors files without those of a draft head, and without copies of the weights in other forms."""
    names = [path for path in sorted(directory.glob("*.safetensors")) if not all(map(is_head, read_header(path)))]
    return [path for path in names if not path.name.startswith(_COPIES)] or names


def _all_shards(directory: Path, found: list[Path]) -> list[Path]:
    """Checks that several safetensors files are, by their names, all shards of one model."""
    shards = [shard for path in found if (shard := _SHARD.fullmatch(path.name))]
    if len({(shard[1], shard[3]) for shard in shards}) != 1:
        names = ", ".join(path.name for path in found[:6])
        raise ModelError(f"{directory} has {len(found)} safetensors files ({names}) but no {INDEX}: download the index "
                         "too, or keep the files of one model only")
    count, numbers = int(shards[0][3]), {int(shard[2]) for shard in shards}
    missing = next((number for number in range(1, count + 1) if number not in numbers), None)
    if missing is not None:
        raise ModelError(f"{directory} has {len(shards)} of {count} shards: {shards[0][1]}-{missing:05d}-of-"
                         f"{count:05d}.safetensors is absent; download it, and {INDEX}")
    return [directory / shard[0] for shard in shards]


def _union(paths: Iterable[Path]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for path in paths:
        for name, stored in _tensors_of(path).items():
            if name in tensors:
                raise ModelError(f"tensor {name[:200]!r} is in both {tensors[name].path.name} and "
                                 f"{path.name} of {path.parent}; {_ONE_REVISION}")
            tensors[name] = stored
    return tensors


def _tensors_of(path: Path) -> dict[str, StoredTensor]:
    if path.suffix != Path(PICKLED).suffix:
        return read_header(path)
    try:
        with open_plain(path) as file:
            return _find_pickled(path, file)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error


# PyTorch's own files: pickles, which can run code. With weights_only torch reads tensors and containers only.


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


def _find_pickled(path: Path, file: BinaryIO) -> dict[str, StoredTensor]:
    """Locates the tensors in a file such as pytorch_model.bin, without reading their data.

    Raises OSError, and ModelError for a file that contains anything else, that was written before torch 1.6, or whose
    tensors do not match the records of the zip archive.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # imports much of torch's compiler

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
                         f"{_OR_SAFETENSORS}"
                         ) from error
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
        raise ModelError(f"{path} is damaged, or older than torch 1.6 ({str(error)[:200]}): {_OR_SAFETENSORS}"
                         ) from error
    if order.decode(errors="replace") != sys.byteorder:
        raise ModelError(f"{path} was written on a machine with another byte order: take the safetensors file")
    for start, entry in entries.items():
        if (entry.compress_type != ZIP_STORED or start + entry.file_size > size
                or ("/data/" not in entry.filename and entry.file_size > _MAX_RECORD)):
            raise ModelError(f"{path}: its record {entry.filename[:200]!r} is not one of weights; {_OR_SAFETENSORS}")
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


def _locate(path: Path, name: str, tensor: Tensor, records: dict[int, int]) -> StoredTensor:
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise ModelError(f"{path}: tensor {name[:200]!r} is not contiguous; take the safetensors file")
    storage = tensor.untyped_storage()
    start = getattr(storage, "_checkpoint_offset", -1)
    skipped = tensor.storage_offset() * tensor.element_size()
    nbytes = tensor.numel() * tensor.element_size()
    if records.get(start) != storage.nbytes() or skipped + nbytes > storage.nbytes():
        raise ModelError(f"{path}: tensor {name[:200]!r} does not match its record; {_OR_SAFETENSORS}")
    dtype = DTYPES.get(tensor.dtype, str(tensor.dtype))
    return StoredTensor(path, dtype, tuple(tensor.shape), int(start + skipped), nbytes)
