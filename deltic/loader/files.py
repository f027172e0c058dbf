"""Locates the tensors of a model's directory, in safetensors files or PyTorch's own. File contents are untrusted."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final
from zipfile import ZIP_STORED, ZipFile, ZipInfo

import torch
from torch import Tensor

from deltic.config.quantization import PLAIN, Quantization, read_quantization
from deltic.errors import ConfigError, ModelError, show
from deltic.loader.disk import DOWNLOAD_AGAIN, is_pointer, open_plain, parse_json, pointer_error, read_json
from deltic.loader.formats import combine
from deltic.loader.names import is_head, stack_of
from deltic.loader.tensors import DTYPES, IN_MEMORY, ITEM_BYTES, PackedTensor, Source, Stack, StoredTensor

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
PICKLED_INDEX: Final = "pytorch_model.bin.index.json"
PICKLED: Final = "pytorch_model.bin"
CONFIG: Final = "config.json"
MODELOPT: Final = "hf_quant_config.json"
"""File that older versions of ModelOpt write instead of the key `quantization_config`."""
MAX_CONFIG: Final = 4 << 20
# Headers of these models have some kilobytes. Far larger headers would only exhaust memory.
_MAX_HEADER: Final = 16 << 20
_MAX_DIMENSIONS: Final = 8
_SHARD: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
# Records other than tensor data have some kilobytes. Far larger records would only exhaust memory.
_MAX_RECORD: Final = 16 << 20
_OR_SAFETENSORS: Final = "download it again, or take the safetensors file"
COPIES: Final = ("consolidated", "adapter_", "optimizer", "original")
_ONE_REVISION: Final = "keep the files of one revision"


# Tensors


@dataclass(frozen=True, slots=True)
class InMemory:
    """Tensors by their names in a checkpoint, instead of a directory.

    name: the name of these weights in messages.
    """

    tensors: Mapping[str, StoredTensor]
    quantization: Quantization = PLAIN
    name: str = "`weights`"

    def __str__(self) -> str:
        return self.name


def in_memory(weights: Any) -> InMemory:
    """Wraps a state_dict. Raises ConfigError for anything but a mapping of names to dense tensors; names, shapes and
    dtypes are checked like names, shapes and dtypes in files."""
    if not isinstance(weights, Mapping) or not weights:
        raise ConfigError(f"weights must map tensor names to tensors, as state_dict() does, not {show(weights)}",
                          "weights")
    return InMemory({name: _stored(name, tensor) for name, tensor in weights.items()})


def _stored(name: Any, tensor: Any) -> StoredTensor:
    if not isinstance(name, str):
        raise ConfigError(f"weights: names must be text, not {show(name)}", "weights")
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_meta:
        raise ConfigError(f"weights[{name[:200]!r}] must be a dense torch.Tensor with data, not {show(tensor)}",
                          "weights")
    dtype = DTYPES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
    nbytes = tensor.numel() * ITEM_BYTES.get(dtype, tensor.itemsize)
    return StoredTensor(IN_MEMORY, dtype, tuple(tensor.shape), 0, nbytes, data=tensor)


def stacked(tensors: Mapping[str, Source], count_of: Callable[[str], int]) -> dict[str, Source]:
    """Combines tensors of single experts into stacks, each stack at the position of its first expert.

    count_of: returns the number of experts that a stack must have. Raises ModelError naming the tensor that is missing,
    doubled, or differs from the first in dtype or shape.
    """
    found: dict[str, Source | None] = {}
    experts: dict[str, dict[int, StoredTensor | PackedTensor]] = {}
    for name, stored in tensors.items():
        place = stack_of(name)
        if place is None or isinstance(stored, Stack):
            found[name] = stored
        else:
            stack, index = place
            found.setdefault(stack, None)
            experts.setdefault(stack, {})[index] = stored
    for name in experts:
        if found[name] is not None:
            raise ModelError(f"tensor {name!r} is given twice, as a whole and expert by expert; {_ONE_REVISION}")
    return {name: source or _stack(name, experts[name], count_of(name)) for name, source in found.items()}


def _stack(name: str, parts: Mapping[int, StoredTensor | PackedTensor], count: int) -> Stack:
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


# Formats


def quantization_of(directory: Path) -> Quantization:
    """Reads the quantization of a directory's weights. Raises ModelError naming the file and the key that is not
    supported."""
    config, modelopt = (read_json(path, MAX_CONFIG) if (path := directory / name).is_file() else {}
                        for name in (CONFIG, MODELOPT))
    try:
        return read_quantization(config, modelopt)
    except ModelError as error:
        raise ModelError(f"{directory}: {error}") from error


# Reading headers


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a safetensors file in file order.

    Raises ModelError naming the file unless the tensors cover its data exactly, without gaps or overlap.
    """
    try:
        with open_plain(path) as file:
            return parse_header(path, os.fstat(file.fileno()).st_size, file.read)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error


def parse_header(path: Path, size: int, read: Callable[[int], bytes], whole: bool = True) -> dict[str, StoredTensor]:
    """Parses a header like `read_header`, for a file of `size` bytes; `read(count)` returns the next bytes. whole:
    False allows a file that ends before its tensors."""
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


def find_tensors(directory: Path | InMemory) -> dict[str, Source]:
    """Returns all tensors of a model directory, or of `InMemory`, by their stored names; the tensors of a quantized
    weight are combined under the weight's name.

    Reads `model.safetensors`, else the shards of its index, else the only other safetensors file that is not a draft
    head, else `pytorch_model.bin`, else the shards of its index.
    Raises ModelError for an absent, foreign or corrupt file, for a tensor stored twice, and for a quantization that
    cannot be read.
    """
    if isinstance(directory, InMemory):
        return combine(directory.tensors, directory.quantization)
    return combine(_find_stored(directory), quantization_of(directory))


def _find_stored(directory: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of all files."""
    index = _find_index(directory)
    if index is None:
        return _union(_files_without_index(directory))
    weight_map = check_weight_map(read_json(index), index)
    for shard in dict.fromkeys(weight_map.values()):
        if not (directory / shard).is_file():
            raise ModelError(f"{index} names the shard {shard[:200]!r}, which is absent; download it too")
    tensors = _union(directory / name for name in sorted(set(weight_map.values())))
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].path.name != shard:
            raise ModelError(f"{index} places tensor {name[:200]!r} in {shard}, which lacks "
                             "it; download index and shards of one revision")
    return tensors


def _find_index(directory: Path) -> Path | None:
    """Returns the index of the shards; None if there is a single file or no file."""
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
        return all_shards(directory, found)
    if (directory / PICKLED).exists():
        return [directory / PICKLED]
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt*")):
        raise ModelError(f"{directory} has only pickled PyTorch weights that are not called {PICKLED}; "
                         "convert them with transformers: save_pretrained(..., safe_serialization=True)")
    raise ModelError(f"{directory} has no weights: {SINGLE} or {INDEX} with its shards is needed")


def _model_files(directory: Path) -> list[Path]:
    """Returns the safetensors files, except draft heads and copies of the weights in other forms."""
    names = [path for path in sorted(directory.glob("*.safetensors")) if not all(map(is_head, read_header(path)))]
    return [path for path in names if not path.name.startswith(COPIES)] or names


def all_shards(directory: Path, found: list[Path]) -> list[Path]:
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

    Raises OSError. Raises ModelError for a file that contains anything else, was written before torch 1.6, or has
    tensors that do not match the records of the zip archive.
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
    """Wraps a file and limits reads, so that a hostile archive causes no large allocation."""

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
