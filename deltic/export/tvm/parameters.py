"""A compiled directory's parameters: shards of raw numbers, and the file that describes them.

Both generations have one layout under two names. What lies in a shard is mapped, not read, and its digest is checked at
each start. The layout's own digest is MD5, which reads 0.3 GB a second; ours beside it ("sums") reads as fast as memory
does, and finds damage, though not forgery: see `sums`.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from deltic.config import available_cores
from deltic.errors import ModelError, show
from deltic.export.sidecar import load_json
from deltic.export.tvm.metadata import DESCRIPTORS, Generation, Metadata

if TYPE_CHECKING:
    from numpy.typing import NDArray

ALIGNMENT: Final = 64
"""Bytes: kernels take for granted that what they read begins at such an address."""
SHARD: Final = 128 << 20
_CACHE: Final = threading.Lock()
"""Held while parameters pass through the process's one cache."""
_WORDS: Final = 1 << 17
"""Of 8 bytes, whose sum is taken together."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """Where one lies: dtype and shape, and its bytes from `start` on in the shard's content [bytes] uint8. form: raw,
    or f32-to-bf16 for float32 numbers whose upper halves alone are stored."""

    content: NDArray[np.uint8]
    shape: tuple[int, ...]
    dtype: str
    start: int
    nbytes: int
    form: str = "raw"


def generation_of(folder: Path) -> Generation:
    """Which generation a directory's parameters are of: v2 if both are there. ModelError naming both if none is."""
    for generation, name in DESCRIPTORS.items():
        if (folder / name).is_file():
            return generation
    raise ModelError(f"{folder} has no parameters: neither {' nor '.join(DESCRIPTORS.values())} is there; copy all "
                     "files of the artifact")


def load(folder: Path, generation: Generation, metadata: Metadata, tvm_ffi: Any,
         put: Callable[[NDArray[Any]], Any]) -> Any:
    """The parameters as a TVM array in the order of the metadata, mapped. put: makes a tensor of an array. ModelError
    naming a shard or parameter that is missing, damaged or of another shape."""
    path = folder / DESCRIPTORS[generation]
    try:
        stored = read_descriptor(folder, load_json(path))
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    found = [(name, _mapped(path, name, stored, shape, dtype)) for name, shape, dtype in metadata.parameters]
    tensors = [(name, put(array)) for name, array in found]
    if generation == "v1" and metadata.convention == "deltic":
        return tvm_ffi.convert([tensor for _, tensor in tensors])
    return _through_cache(tensors, tvm_ffi)


def _through_cache(tensors: Sequence[tuple[str, Any]], tvm_ffi: Any) -> Any:
    """The array that the process's one cache makes: packed functions are to be given the very tensors that it holds."""
    update, array, clear = (tvm_ffi.get_global_func(f"vm.builtin.{name}") for name in (
        "tensor_cache.update", "param_array_from_cache_by_name", "tensor_cache.clear"))
    with _CACHE:
        clear()
        try:
            for name, tensor in tensors:
                update(name, tensor, True)
            return array([name for name, _ in tensors])
        finally:
            clear()


def read_descriptor(folder: Path, mapping: Mapping[str, Any]) -> dict[str, Parameter]:
    """Where the parameters lie, after their shards' sizes and digests were found right; ModelError."""
    records = mapping.get("records")
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise ModelError("records must be a list of objects")
    with ThreadPoolExecutor(max(available_cores(), 1)) as pool:
        contents = [*pool.map(lambda record: _checked(folder, record), records)]
    try:
        return {str(item["name"]): Parameter(content, tuple(item["shape"]), str(item["dtype"]), int(item["byteOffset"]),
                                             int(item["nbytes"]), str(item.get("format", "raw")))
                for content, record in zip(contents, records, strict=True) for item in record["records"]}
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ModelError(f"a record of a parameter must have name, shape, dtype, byteOffset and nbytes: "
                         f"{type(error).__name__} {show(str(error))}") from error


def _checked(folder: Path, record: Mapping[str, Any]) -> NDArray[np.uint8]:
    """The content of a shard, copied on write only; ModelError saying what is wrong with it."""
    name, size = record.get("dataPath"), record.get("nbytes")
    if not isinstance(name, str) or Path(name).name != name or not isinstance(record.get("records"), list):
        raise ModelError(f"a record has the dataPath {show(name)}, which is no file of this directory, or no records")
    path = folder / name
    if not path.is_file():
        raise ModelError(f"the shard {name} is missing: copy all files of the artifact")
    if path.stat().st_size != size or not size:
        raise ModelError(f"the shard {name} has {path.stat().st_size} bytes instead of {size}: copy it again")
    with path.open("rb") as file:
        content = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)
    for key, digest in (("sums", sums), ("md5sum", _md5)):  # older layouts have neither
        said = record.get(key)
        if isinstance(said, str):
            found = digest(content)
            if found != said:
                raise ModelError(f"the shard {name} is damaged ({key} {found[:12]}..., not {said[:12]}...): copy it "
                                 "again")
            break
    return content


def sums(content: NDArray[np.uint8]) -> str:
    """SHA-256 of the sums of a shard [bytes]: modulo 2^64, of its little-endian words of 8 bytes, each times an odd
    number of its own, 1 MiB at a time, with zeros at the end. A single wrong word always shows, as odd numbers can be
    divided by, several with all but certainty (multilinear hashing)."""
    # splitmix64 of the word's place, as in the draws' noise
    factor = np.arange(1, _WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, times in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        factor = (factor ^ (factor >> np.uint64(shift))) * np.uint64(times)
    factor = (factor ^ (factor >> np.uint64(31))) | np.uint64(1)
    whole = len(content) // (8 * _WORDS) * 8 * _WORDS
    rest = np.zeros(8 * _WORDS, np.uint8)
    rest[:len(content) - whole] = content[whole:]
    found = [np.einsum("rw,w->r", part.view(np.dtype("<u8")).reshape(-1, _WORDS), factor)
             for part in (content[:whole], rest)]
    return hashlib.sha256(np.concatenate(found).astype("<u8").tobytes()).hexdigest()


def _md5(content: NDArray[np.uint8]) -> str:
    return hashlib.md5(content.data, usedforsecurity=False).hexdigest()


def _mapped(path: Path, name: str, stored: Mapping[str, Parameter], shape: tuple[int, ...],
            dtype: str) -> NDArray[Any]:
    """A parameter's numbers. path: of the descriptor."""
    found = stored.get(name)
    if found is None:
        raise ModelError(f"{path} has no parameter {name}, which the library takes: they are not of one model")
    if dtype == "bfloat16":
        raise ModelError(f"{path}: parameter {name} is bfloat16, which is not read: convert the model with q4f16_1, "
                         "q4f32_1, q0f16 or q0f32")
    if (found.shape, found.dtype) != (shape, dtype):
        raise ModelError(f"{path}: parameter {name} is {found.dtype} {list(found.shape)}, but the library takes "
                         f"{dtype} {list(shape)}: they are not of one model")
    halved = found.form == "f32-to-bf16" and dtype == "float32"  # the upper halves of float32 numbers
    end, size = found.start + found.nbytes, int(np.prod(shape)) * (2 if halved else np.dtype(dtype).itemsize)
    if found.start < 0 or end > len(found.content) or found.nbytes != size:
        raise ModelError(f"{path}: parameter {name} does not lie where it is said to")
    content = found.content[found.start:end]
    if halved:
        return (aligned(content).view(np.uint16).astype(np.uint32) << 16).view(dtype).reshape(shape)
    return aligned(content).view(dtype).reshape(shape)


def aligned(content: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """These bytes at an address that kernels take for granted: where they are, or else a copy."""
    if content.ctypes.data % ALIGNMENT == 0:
        return content
    room = np.empty(len(content) + ALIGNMENT, np.uint8)
    skip = -room.ctypes.data % ALIGNMENT
    room[skip:skip + len(content)] = content
    return room[skip:skip + len(content)]


def write(folder: Path, generation: Generation, parameters: Iterable[tuple[str, NDArray[Any]]]) -> int:
    """Write shards and their descriptor; returns the bytes of all parameters."""
    records, total, count = list[dict[str, Any]](), 0, 0
    for index, shard in enumerate(_shards(parameters)):
        name, items, content = f"params_shard_{index}.bin", list[dict[str, Any]](), bytearray()
        for key, array in shard:
            content += bytes(-len(content) % ALIGNMENT)
            items.append({"name": key, "shape": [*array.shape], "dtype": str(array.dtype), "format": "raw",
                          "nbytes": array.nbytes, "byteOffset": len(content)})
            content += array.tobytes()
            total, count = total + array.nbytes, count + array.size
        (folder / name).write_bytes(content)
        records.append({"dataPath": name, "format": "raw-shard", "nbytes": len(content),
                        "md5sum": hashlib.md5(content, usedforsecurity=False).hexdigest(),
                        "sums": sums(np.frombuffer(content, np.uint8)), "records": items})
    said = {"ParamSize": sum(len(record["records"]) for record in records), "ParamBytes": total,
            "BitsPerParam": 8 * total / max(count, 1)}
    text = json.dumps({"metadata": said, "records": records})
    (folder / DESCRIPTORS[generation]).write_text(text, encoding="utf-8")
    return total


def _shards(parameters: Iterable[tuple[str, NDArray[Any]]]) -> Iterator[list[tuple[str, NDArray[Any]]]]:
    """In groups of at most `SHARD` bytes, but for single ones that are larger."""
    group, size = list[tuple[str, Any]](), 0
    for name, array in parameters:
        if group and size + array.nbytes > SHARD:
            yield group
            group, size = [], 0
        group.append((name, array))
        size += array.nbytes
    if group:
        yield group
