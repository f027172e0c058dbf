"""Locates the experts of a mixture in the model's files, for experts that are offloaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from deltic.config import DType, ModelConfig
from deltic.errors import ConfigError
from deltic.loader.files import ITEM_BYTES, Source, StoredTensor
from deltic.loader.gguf.file import GgufFile
from deltic.loader.gguf.load import matrices_of, plan_gguf
from deltic.loader.names import is_stack, packed_parts
from deltic.loader.safetensors import plan_directory
from deltic.ops.stored import StoredExpert, StoredMatrix


class _Type(NamedTuple):
    dtype: DType
    gguf_id: int


_TYPES: Final[Mapping[str, _Type]] = {
    "F32": _Type("float32", 0), "F16": _Type("float16", 1), "BF16": _Type("bfloat16", 30)}
"""Keyed by safetensors dtype."""


def experts_in_directory(directory: Path, config: ModelConfig, dtype: DType) -> list[list[StoredExpert]]:
    """Returns the experts of each layer of a safetensors directory, stored as stacks, fused stacks, or one by one.

    Raises ConfigError if they are not of `dtype`, because they are used as they are stored; ModelError as
    `plan_directory`.
    """
    found = dict[str, list[StoredMatrix]]()
    for name, source in plan_directory(directory, config).items():
        if not is_stack(name):
            continue
        _check_dtype(source, dtype)
        type = _TYPES[source.dtype]
        parts = packed_parts(name) or (name,)
        rows, columns = source.shape[-2] // len(parts), source.shape[-1]
        nbytes = rows * columns * ITEM_BYTES[source.dtype]
        for expert in _split(source):
            for index, part in enumerate(parts):
                offset = expert.offset + index * nbytes
                found.setdefault(part, []).append(StoredMatrix(expert.path, offset, type.gguf_id, rows, columns))
    return _by_layer(found, config)


def _check_dtype(source: Source, dtype: DType) -> None:
    if source.dtype not in _TYPES:
        raise ConfigError(f"expert_memory is not possible with experts stored as {source.dtype}: they are used as they "
                          "are in the model's files; write a quantized file once (deltic convert), and run that",
                          "expert_memory")
    stored = _TYPES[source.dtype].dtype
    if stored != dtype:
        raise ConfigError(f"dtype {dtype}: offloaded experts are used as they are stored, as {stored}: use "
                          f"`dtype='{stored}'`", "dtype")


def _split(source: Source) -> Iterator[StoredTensor]:
    """Yields the matrices of a stack."""
    if not isinstance(source, StoredTensor):
        yield from source.parts
        return
    count = source.shape[0]
    nbytes = source.nbytes // count
    for index in range(count):
        yield StoredTensor(source.path, source.dtype, source.shape[1:], source.offset + index * nbytes, nbytes)


def experts_in_gguf(file: GgufFile, config: ModelConfig) -> list[list[StoredExpert]]:
    """Returns the experts of each layer of a GGUF file. Raises ModelError as `plan_gguf`."""
    found = dict[str, list[StoredMatrix]]()
    for part in plan_gguf(file, config):
        if not is_stack(part.target.names[0]):
            continue
        stored, columns = part.stored, part.stored.shape[-1]
        for first_row, name, rows in matrices_of(part):
            offset = stored.offset + first_row * stored.type.size(columns)
            found.setdefault(name, []).append(StoredMatrix(stored.path, offset, stored.type.id, rows, columns))
    return _by_layer(found, config)


def _by_layer(matrices: Mapping[str, list[StoredMatrix]], config: ModelConfig) -> list[list[StoredExpert]]:
    """Groups the matrices of each stack by layer and expert."""
    layers = []
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}.mlp.experts"
        stacks = [matrices[f"{prefix}.{part}_proj.weight"] for part in ("gate", "up", "down")]
        layers.append([StoredExpert(*parts) for parts in zip(*stacks, strict=True)])
    return layers
