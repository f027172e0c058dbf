"""Where the experts of a model lie in its files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from deltic.config import DType, ModelConfig
from deltic.errors import ConfigError
from deltic.loader.files import ITEM_BYTES, Source, StoredTensor
from deltic.loader.gguf.file import GgufFile
from deltic.loader.gguf.load import matrices_of, plan_gguf
from deltic.loader.names import is_stack, packed_parts
from deltic.loader.safetensors import plan_directory
from deltic.ops.stored import StoredExpert, StoredMatrix

_TYPES: Final[Mapping[str, tuple[DType, int]]] = {
    "F32": ("float32", 0), "F16": ("float16", 1), "BF16": ("bfloat16", 30)}
"""What safetensors calls a dtype: our name, and the number of the GGUF type."""


def experts_in_directory(directory: Path, config: ModelConfig, dtype: DType) -> list[list[StoredExpert]]:
    """The experts of each layer of a safetensors directory, whether they lie in whole tensors, fused, or one by one.

    ConfigError where they are not of `dtype`, as they are used as they are. ModelError as `plan_directory`.
    """
    found = dict[str, list[StoredMatrix]]()
    for name, source in plan_directory(directory, config).items():
        if not is_stack(name):
            continue
        if source.dtype not in _TYPES:
            raise ConfigError(f"expert_memory is not possible with experts stored as {source.dtype}: they are used as "
                              "they lie in the model's files; write a quantized file once (deltic convert), and run "
                              "that", "expert_memory")
        kept, type = _TYPES[source.dtype]
        if kept != dtype:
            raise ConfigError(f"dtype {dtype}: experts that stay in their files are used as they are stored, which is "
                              f"{kept}: take `dtype='{kept}'`", "dtype")
        parts = packed_parts(name) or (name,)
        rows, columns = source.shape[-2] // len(parts), source.shape[-1]
        for expert in _experts(source):
            for place, part in enumerate(parts):
                start = place * rows * columns * ITEM_BYTES[source.dtype]
                found.setdefault(part, []).append(StoredMatrix(expert.path, expert.offset + start, type, rows, columns))
    return _by_layer(found, config)


def _experts(source: Source) -> Iterator[StoredTensor]:
    """The matrices of a stack one by one."""
    if not isinstance(source, StoredTensor):
        yield from source.parts
        return
    count, size = source.shape[0], source.nbytes // source.shape[0]
    for expert in range(count):
        yield StoredTensor(source.path, source.dtype, source.shape[1:], source.offset + expert * size, size)


def experts_in_gguf(file: GgufFile, config: ModelConfig) -> list[list[StoredExpert]]:
    """The experts of each layer of a GGUF file. ModelError as `plan_gguf`."""
    found = dict[str, list[StoredMatrix]]()
    for part in plan_gguf(file, config):
        if not is_stack(part.place.names[0]):
            continue
        stored, columns = part.stored, part.stored.shape[-1]
        for first, name, rows in matrices_of(part):
            start = stored.offset + first * stored.type.size(columns)
            found.setdefault(name, []).append(StoredMatrix(stored.path, start, stored.type.id, rows, columns))
    return _by_layer(found, config)


def _by_layer(found: Mapping[str, list[StoredMatrix]], config: ModelConfig) -> list[list[StoredExpert]]:
    """found: by the name of a stack its experts' matrices."""
    def stack(layer: int, part: str) -> list[StoredMatrix]:
        return found[f"model.layers.{layer}.mlp.experts.{part}_proj.weight"]

    return [[StoredExpert(*matrices) for matrices in zip(stack(layer, "gate"), stack(layer, "up"), stack(layer, "down"),
                                                         strict=True)] for layer in range(config.num_hidden_layers)]
