"""A GGUF model on disk: one file, or all parts of a split one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from deltic.errors import ModelError
from deltic.loader.gguf.names import EXPERT
from deltic.loader.gguf.reader import GgufTensor, Header, concatenated, read_header

_SHARD: Final = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
_REVISION: Final = "download all parts of one revision"


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Metadata and tensors of a model; the data stays on disk.

    paths: its files, in order.
    metadata: that of the first file.
    tensors: those of all files by name, in file order; experts that are stored one by one are stacked.
    """

    paths: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @classmethod
    def open(cls, path: str | Path) -> GgufFile:
        """Opens a file, and the other parts if it is any part of a split model.

        Raises ModelError naming the file, and the key or tensor that is wrong, or the part that is absent.
        """
        given = Path(path)
        header = read_header(given)
        parts = _parts(given, header.metadata)
        headers = [header if part == given else _part(part, given) for part in parts]
        if len(parts) > 1:
            _check_parts(parts, headers)
        return cls(parts, headers[0].metadata, dict(_with_stacks(dict(_union(parts, headers)))))


def _parts(path: Path, metadata: Mapping[str, Any]) -> tuple[Path, ...]:
    """Returns the paths of all parts. Their number is in the metadata."""
    count = metadata.get("split.count", 0)
    if type(count) is not int:
        raise ModelError(f"{path}: split.count must be an integer, not {str(count)[:80]}")
    if count <= 1:
        return (path,)
    found = _SHARD.fullmatch(path.name)
    if found is None or int(found[3]) != count:
        raise ModelError(f"{path} is one of {count} parts of a model, but its name does not end in "
                         f"-0000N-of-{count:05d}.gguf; give the parts their original names")
    return tuple(path.with_name(f"{found[1]}-{number:05d}-of-{found[3]}.gguf") for number in range(1, count + 1))


def _part(path: Path, given: Path) -> Header:
    if not path.is_file():
        raise ModelError(f"{path} is absent, a part of the model that {given.name} belongs to; {_REVISION}")
    return read_header(path)


def _check_parts(paths: tuple[Path, ...], headers: list[Header]) -> None:
    total = sum(len(header.tensors) for header in headers)
    wanted = {"split.no": range(len(paths)), "split.count": [len(paths)] * len(paths),
              "split.tensors.count": [total] * len(paths)}
    for key, values in wanted.items():
        for path, header, value in zip(paths, headers, values, strict=True):
            found = header.metadata.get(key)
            if type(found) is not int or found != value:
                raise ModelError(f"{path}: {key} is {str(found)[:80]}, but {value} would fit the "
                                 f"existing parts; {_REVISION}")


def _union(paths: tuple[Path, ...], headers: list[Header]) -> Iterator[tuple[str, GgufTensor]]:
    seen: dict[str, Path] = {}
    for path, header in zip(paths, headers, strict=True):
        for tensor in header.tensors:
            if tensor.name in seen:
                raise ModelError(f"tensor {tensor.name!r} is in both {seen[tensor.name].name} and {path}; {_REVISION}")
            seen[tensor.name] = path
            yield tensor.name, tensor


def _with_stacks(tensors: Mapping[str, GgufTensor]) -> Iterator[tuple[str, GgufTensor]]:
    """Stacks the experts of a draft head, as those of the trunk are in files."""
    stacks: dict[str, dict[int, GgufTensor]] = {}
    for name, tensor in tensors.items():
        found = EXPERT.fullmatch(name)
        if found is None:
            yield name, tensor
        else:
            stacks.setdefault(f"{found[1]}ffn_{found[3]}_exps.weight", {})[int(found[2])] = tensor
    for name, experts in stacks.items():
        if sorted(experts) != list(range(len(experts))):
            raise ModelError(f"{experts[min(experts)].path}: experts are missing among those of {name!r}; download the "
                             "file again")
        yield name, concatenated(name, [experts[index] for index in range(len(experts))], stack=True)
