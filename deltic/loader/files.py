"""Where the tensors of a model's directory lie on disk, in safetensors files or in PyTorch's own. Nothing in the files
is believed unchecked."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch import Tensor

from deltic.errors import ModelError
from deltic.loader.fp8 import GROUP
from deltic.loader.layout import is_pointer, pointer_error
from deltic.loader.names import is_head, stack_of
from deltic.loader.pickled import find_pickled

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
PICKLED_INDEX: Final = "pytorch_model.bin.index.json"
PICKLED: Final = "pytorch_model.bin"

ITEM_BYTES: Final[Mapping[str, int]] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}
# A header of this family has some kilobytes; far larger ones only serve to exhaust memory.
_MAX_HEADER: Final = 16 << 20
_MAX_INDEX: Final = 64 << 20
_MAX_DIMENSIONS: Final = 8
_SHARD: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_COPIES: Final = ("consolidated", "adapter_", "optimizer", "original")
_AGAIN: Final = "the file is truncated or corrupt, download it again"


FLOAT8: Final = "F8_E4M3"
SCALES: Final = "_scale_inv"
"""Behind a tensor's name: its scales."""


class _TensorReader(io.RawIOBase):
    """Reads a tensor's bytes as if they lay in a file."""

    def __init__(self, tensor: Tensor) -> None:
        numbers = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        self._bytes, self._place = numbers.numpy().data, 0

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._place = offset
        return offset

    def readinto(self, buffer: Any) -> int:
        piece = self._bytes[self._place:self._place + len(buffer)]
        buffer[:len(piece)] = piece
        self._place += len(piece)
        return len(piece)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor on disk: `nbytes` bytes at `offset` of `path`, row-major, of safetensors dtype `dtype`. scales: of
    FLOAT8, what each block of GROUP rows and columns is to be multiplied with. data: the tensor itself, if it is in
    memory instead."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    scales: StoredTensor | None = None
    data: Tensor | None = field(default=None, compare=False)

    def open(self) -> BinaryIO | _TensorReader:
        """Its file, or something like it."""
        return self.path.open("rb", buffering=0) if self.data is None else _TensorReader(self.data)

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        """The tensor itself: it lies in one piece."""
        return (self,)


@dataclass(frozen=True, slots=True)
class Stack:
    """A tensor whose entries along the first axis are stored one by one, all of one dtype and shape."""

    parts: tuple[StoredTensor, ...]

    @property
    def path(self) -> Path:
        """The file of the first part."""
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


@dataclass(frozen=True, slots=True)
class InMemory:
    """Tensors that a caller has handed over, by the names of a checkpoint; in the place of a directory."""

    tensors: Mapping[str, StoredTensor]

    def __str__(self) -> str:
        return "`weights`"


def scales_of(source: Source) -> Source | None:
    """Of float8 numbers, as they lie."""
    scales = [part.scales for part in source.parts if part.scales]
    if not scales:
        return None
    return scales[0] if isinstance(source, StoredTensor) else Stack(tuple(scales))


def stacked(tensors: Mapping[str, StoredTensor], counts: Callable[[str], int]) -> dict[str, Source]:
    """The tensors by our names, with those of single experts put together to stacks, in the place of the first.

    counts: how many experts the stack of this name must have. Raises ModelError naming the tensor that is missing, and
    one that is of another dtype or shape than the first.
    """
    found: dict[str, Source | None] = {}
    stacks: dict[str, dict[int, StoredTensor]] = {}
    for name, stored in tensors.items():
        place = stack_of(name)
        if place is None:
            found[name] = stored
        else:
            found.setdefault(place[0], None)
            stacks.setdefault(place[0], {})[place[1]] = stored
    for name in stacks:
        if found[name] is not None:
            raise ModelError(f"tensor {name!r} is given twice, as a whole and expert by expert; keep the files of one "
                             "revision")
    return {name: source or _stack(name, stacks[name], counts(name)) for name, source in found.items()}


def _stack(name: str, parts: Mapping[int, StoredTensor], count: int) -> Stack:
    first = next(iter(parts.values()))
    missing = [expert for expert in range(count) if expert not in parts]
    if missing or len(parts) > count:
        wrong = (f"{len(missing)} of {count} experts are missing, such as expert {missing[0]}" if missing
                 else f"there are {len(parts)} experts, config.json says {count}")
        raise ModelError(f"tensor {name!r} in {first.path.parent}: {wrong}; download all shards of the revision that "
                         "config.json belongs to")
    for expert, part in parts.items():
        if (part.dtype, part.shape) != (first.dtype, first.shape):
            raise ModelError(f"tensor {name!r}: expert {expert} is {part.dtype[:20]} {list(part.shape)}, others are "
                             f"{first.dtype[:20]} {list(first.shape)}; keep the files of one revision")
    return Stack(tuple(parts[expert] for expert in range(count)))


def read_json(path: Path, limit: int = _MAX_INDEX) -> dict[str, Any]:
    """The JSON object in `path`. Raises ModelError naming a file that is absent, too large, or none."""
    try:
        with open_plain(path) as file:
            text = file.read(limit + 1)
    except FileNotFoundError as error:
        raise ModelError(f"{path} is absent; {path.parent} is not a complete model directory") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    if len(text) > limit:
        raise ModelError(f"{path} is larger than {limit} bytes, which no file of its kind is")
    return parse_json(text, path)


def open_plain(path: Path) -> BinaryIO:
    """Open for reading; OSError for what is no plain file, such as a pipe that nobody writes to."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a plain file", str(path))
    return os.fdopen(descriptor, "rb")


def parse_json(text: bytes, path: Path) -> dict[str, Any]:
    """The JSON object `text` that came from `path`. Raises ModelError naming the path if it is none."""
    if is_pointer(text):
        raise pointer_error(path)
    try:
        value = json.loads(text.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} does not hold valid JSON ({error}); {_AGAIN}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object; {_AGAIN}")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"the name {counts.most_common(1)[0][0][:200]!r} occurs twice")
    return found


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Tensors of one safetensors file, in file order.

    Raises ModelError naming the file unless the tensors tile its data exactly.
    """
    try:
        with open_plain(path) as file:
            return parse_header(path, os.fstat(file.fileno()).st_size, file.read)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error


def parse_header(path: Path, size: int, read: Callable[[int], bytes]) -> dict[str, StoredTensor]:
    """`read_header` of a file of `size` bytes wherever it lies; `read(count)` gives its bytes one after another."""
    length = int.from_bytes(start := read(8), "little")
    if is_pointer(start):
        raise pointer_error(path)
    if size < 8 or length > min(size - 8, _MAX_HEADER):
        raise ModelError(f"{path} announces a header of {length} bytes in a file of {size}; {_AGAIN}")
    header = parse_json(read(length), path)
    header.pop("__metadata__", None)
    entries = [_entry(path, name, entry, 8 + length) for name, entry in header.items()]
    tensors = dict(sorted(entries, key=lambda item: (item[1].offset, item[1].nbytes)))
    _check_tiling(path, tensors, 8 + length, size)
    return tensors


def _entry(path: Path, name: str, entry: object, start: int) -> tuple[str, StoredTensor]:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [begin, end]} if (
                len(shape) <= _MAX_DIMENSIONS and all(map(_is_size, [*shape, begin, end])) and begin <= end):
            stored = StoredTensor(path, dtype, tuple(shape), start + begin, end - begin)
        case _:
            raise ModelError(f"{path}: the header entry of tensor {name[:200]!r} is malformed; {_AGAIN}")
    item = ITEM_BYTES.get(dtype)
    if item is not None and math.prod(shape) * item != stored.nbytes:
        raise ModelError(f"{path}: tensor {name[:200]!r} has {stored.nbytes} bytes, which its shape "
                         f"{str(shape)[:80]} and dtype {dtype} contradict; {_AGAIN}")
    return name, stored


def _is_size(number: object) -> bool:
    return type(number) is int and 0 <= number < 1 << 63


def _check_tiling(path: Path, tensors: Mapping[str, StoredTensor], start: int, size: int) -> None:
    for name, stored in tensors.items():
        if stored.offset != start:
            raise ModelError(f"{path}: tensor {name[:200]!r} overlaps another or leaves a gap; {_AGAIN}")
        start += stored.nbytes
    if start != size:
        raise ModelError(f"{path} has {size} bytes, but its header describes {start}; {_AGAIN}")


def find_tensors(directory: Path | InMemory) -> dict[str, StoredTensor]:
    """All tensors of a model directory, or of those in memory, by the names they are stored under.

    Reads `model.safetensors`, else the shards of its index, else an only other safetensors file that is no draft head,
    else `pytorch_model.bin`, else the shards of its index.
    Raises ModelError for an absent, foreign or corrupt file, and for a tensor stored twice.
    """
    if isinstance(directory, InMemory):
        return {**directory.tensors}
    index = _index(directory)
    if index is None:
        return with_scales(_union(_without_index(directory)))
    weight_map = _weight_map(index)
    tensors = _union(directory / name for name in sorted(set(weight_map.values())))
    for name, shard in weight_map.items():
        if name not in tensors or tensors[name].path.name != shard:
            raise ModelError(f"{index} places tensor {name[:200]!r} in {shard}, which lacks "
                             "it; download index and shards of one revision")
    return with_scales(tensors)


def _index(directory: Path) -> Path | None:
    """That of the shards; None where there is a single file, or nothing."""
    if (directory / SINGLE).exists():
        return None
    if (directory / INDEX).exists():
        return directory / INDEX
    index = directory / PICKLED_INDEX
    return None if (directory / PICKLED).exists() or not index.exists() or _no_heads(directory) else index


def with_scales(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The same tensors, where those of float8 have their scales, which are no tensors of their own then. Raises
    ModelError naming one without scales, or with scales of another shape or dtype."""
    found = dict(tensors)
    for name, stored in tensors.items():
        if stored.dtype != FLOAT8:
            continue
        scales = found.pop(f"{name}{SCALES}", None)
        blocks = (*stored.shape[:-2], *(-(-size // GROUP) for size in stored.shape[-2:]))
        if scales is None:
            raise ModelError(f"tensor {name[:200]!r} is stored as {FLOAT8} without scales ({name[:200]}{SCALES}); "
                             "take a checkpoint in float8 with them, or the unquantized one")
        if len(stored.shape) < 2 or scales.shape != blocks or scales.dtype not in ("F32", "BF16", "F16"):
            raise ModelError(f"tensor {name[:200]!r} is stored as {FLOAT8} with scales of shape {list(scales.shape)} "
                             f"and dtype {scales.dtype[:20]}; only blocks of {GROUP} by {GROUP} can be "
                             "read, so use the unquantized checkpoint")
        found[name] = replace(stored, scales=scales)
    return found


def _weight_map(path: Path) -> dict[str, str]:
    weight_map = check_weight_map(read_json(path), path)
    for shard in dict.fromkeys(weight_map.values()):
        if not (path.parent / shard).is_file():
            raise ModelError(f"{path} names the shard {shard[:200]!r}, which is absent; download it too")
    return weight_map


def check_weight_map(index: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Tensor -> shard beside it, out of the index that came from `path`. ModelError naming that if it is none."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path} has no weight_map; {_AGAIN}")
    ending = Path(path.name.removesuffix(".index.json")).suffix
    for shard in dict.fromkeys(map(str, weight_map.values())):
        if "/" in shard or "\\" in shard or len(shard) > 200 or not shard.endswith(ending):
            raise ModelError(f"{path} names the shard {shard[:200]!r}; "
                             f"a shard is a {ending} file beside its index")
    return {name: str(shard) for name, shard in weight_map.items()}


def _without_index(directory: Path) -> list[Path]:
    """The files that hold the tensors where no index says so: one, or all shards of one model."""
    if (directory / SINGLE).exists():
        return [directory / SINGLE]
    found = _no_heads(directory)
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


def _all_shards(directory: Path, found: list[Path]) -> list[Path]:
    """Several safetensors files, if their names say that they are all of one model."""
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


def _no_heads(directory: Path) -> list[Path]:
    """The safetensors files that have more than a draft head, and are no copy of the weights in another form."""
    names = [path for path in sorted(directory.glob("*.safetensors")) if not holds_only_head(path)]
    return [path for path in names if not path.name.startswith(_COPIES)] or names


def holds_only_head(path: Path) -> bool:
    """Whether a safetensors file has nothing but a multi-token-prediction head."""
    return all(map(is_head, read_header(path)))


def _tensors_of(path: Path) -> dict[str, StoredTensor]:
    """Of a file of either kind."""
    if path.suffix != Path(PICKLED).suffix:
        return read_header(path)
    try:
        with open_plain(path) as file:
            return {name: StoredTensor(path, *piece) for name, piece in find_pickled(path, file).items()}
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error


def _union(paths: Iterable[Path]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for path in paths:
        for name, stored in _tensors_of(path).items():
            if name in tensors:
                raise ModelError(f"tensor {name[:200]!r} is in both {tensors[name].path.name} and "
                                 f"{path.name} of {path.parent}; keep the files of one revision")
            tensors[name] = stored
    return tensors
