"""Load a GGUF model into memory as plain tensors, exactly those that the model has, under our names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from deltic.config import DType, ModelConfig
from deltic.errors import ModelError
from deltic.weights.gguf.blocks import fill
from deltic.weights.gguf.file import GgufFile
from deltic.weights.gguf.header import GgufTensor
from deltic.weights.gguf.names import Place, gguf_name, place
from deltic.weights.names import HEAD, Shape, expected_tensors, tensor_dtype
from deltic.weights.safetensors import TORCH_DTYPES, Progress


@dataclass(frozen=True, slots=True)
class GgufSource:
    """A tensor of the file, what it is to us, and the shapes of ours that it becomes."""

    stored: GgufTensor
    place: Place
    shapes: tuple[Shape, ...]


def load_gguf(
    source: GgufFile | str | Path,
    config: ModelConfig,
    dtype: DType | Literal["auto"] = "auto",
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> dict[str, torch.Tensor]:
    """Load the text model of a GGUF file: the tensors of `expected_tensors(config)`, contiguous, on `device`.

    Matrices are dequantized to `dtype` (`auto`: the config's), norms and decay parameters to float32. The draft head's
    blocks stay on disk. `progress(done, total)` counts bytes of the file. Memory stays near the size of the result:
    tensors are read one by one, and piece by piece.
    Raises ModelError naming the tensor that is unknown, missing, doubled, or of another shape or an unsupported type,
    and naming the file that is absent, truncated or corrupt.
    """
    file = source if isinstance(source, GgufFile) else GgufFile.open(source)
    kept: DType = config.dtype if dtype == "auto" else dtype
    sources = list(plan_gguf(file, config))
    _check_complete(file, config, sources)
    total, done = sum(part.stored.nbytes for part in sources), 0
    tensors: dict[str, torch.Tensor] = {}
    for part in sources:
        for name, tensor in read_gguf(part, config, kept):
            tensors[name] = tensor.contiguous().to(device)
        done += part.stored.nbytes
        if progress is not None:
            progress(done, total)
    return {name: tensors[name] for name in expected_tensors(config)}


def plan_gguf(file: GgufFile, config: ModelConfig) -> Iterator[GgufSource]:
    """Sources of the trunk's tensors in file order, all but the data checked."""
    expected = expected_tensors(config)
    served: dict[str, str] = {}
    for stored in file.tensors.values():
        found = place(stored.name, config.architecture, config.layer_types)
        if found.mtp:
            continue
        for name in found.names:
            if name not in expected:
                raise ModelError(f"{stored.path}: tensor {stored.name!r} has no place in the model that the metadata "
                                 "describes; download the file again, or take another one")
            if name in served:
                raise ModelError(f"{stored.path}: tensor {name!r} is given twice, as {served[name]!r} and "
                                 f"{stored.name!r}")
            served[name] = stored.name
        source = GgufSource(stored, found, tuple(expected[name] for name in found.names))
        _check_shape(source, config)
        yield source


def _check_shape(source: GgufSource, config: ModelConfig) -> None:
    first, *more = (source.place.form.shape(shape, config) for shape in source.shapes)
    wanted = (first[0] + sum(shape[0] for shape in more), *first[1:])
    if source.stored.shape != wanted:
        raise ModelError(f"{source.stored.path}: tensor {source.stored.name!r} has shape {list(source.stored.shape)}, "
                         f"but the metadata asks for {list(wanted)}")
    if not source.stored.type.readable:
        raise ModelError(f"{source.stored.path}: tensor {source.stored.name!r} is of type {source.stored.type.name}, "
                         "which is not supported; choose another quantization, such as Q4_K_M or Q8_0")


def _check_complete(file: GgufFile, config: ModelConfig, sources: list[GgufSource]) -> None:
    served = {name for source in sources for name in source.place.names}
    missing = [name for name in expected_tensors(config) if name not in served]
    if missing == [HEAD]:
        raise ModelError(f"tensor 'output.weight' is missing in {file.paths[0]}; if the head is the embedding, "
                         "set tie_word_embeddings")
    if missing:
        name, _ = gguf_name(missing[0], config.architecture, config.layer_types)
        raise ModelError(f"{len(missing)} tensors are missing in {file.paths[0]}, such as {name!r}; "
                         "download the file again, or all parts of the model")


def read_gguf(source: GgufSource, config: ModelConfig, kept: DType) -> Iterator[tuple[str, torch.Tensor]]:
    """Our tensors out of one of the file."""
    stored, names = source.stored, source.place.names
    tensor = torch.empty(stored.shape, dtype=TORCH_DTYPES[tensor_dtype(names[0], kept)])
    try:
        fill(tensor, stored.type, stored.read)
        tensor = source.place.form.to_ours(tensor, config)
    except ModelError as error:
        raise ModelError(f"{stored.path}: tensor {stored.name!r}: {error}") from error
    yield from zip(names, tensor.split([shape[0] for shape in source.shapes]), strict=True)
