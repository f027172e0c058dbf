"""Loads the tensors of a GGUF model by canonical name: dequantized, or packed (still quantized)."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal

import numpy as np
import torch

from deltic.config import DTYPE_BYTES, DType, ModelConfig, available_cores
from deltic.errors import ModelError
from deltic.loader.gguf.blocks import Bytes, fill
from deltic.loader.gguf.file import GgufFile, GgufTensor
from deltic.loader.gguf.names import ROPE_FACTORS, TOWER, TensorTarget, gguf_name, tensor_target
from deltic.loader.names import (
    HEAD,
    Shape,
    expected_head,
    expected_tensors,
    is_stack,
    optional_head,
    required_head,
    tensor_dtype,
)
from deltic.loader.safetensors import TORCH_DTYPES, Progress
from deltic.ops.parts import Part, Split, one_device
from deltic.ops.quantized import PackedForm, host_form, read_from
from deltic.ops.slices import slice_unit
from deltic.ops.types import Block, Weight

_PACKED_SIZE: Final = 256 << 20
"""Model size in bytes from which a model stays packed."""
_FEW_BITS: Final = 5
"""Bits per weight, including scales, below which a type has at most four bits per code."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GgufSource:
    """A tensor of the file, its canonical target, and the canonical shapes."""

    stored: GgufTensor
    target: TensorTarget
    shapes: tuple[Shape, ...]


def read_file(
    source: GgufFile | str | Path,
    config: ModelConfig,
    dtype: DType | Literal["auto"] = "auto",
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of `expected_tensors(config)` in file order, contiguous, on `device`.

    Matrices are dequantized to `dtype` (`auto`: the config's), norms and decay parameters to float32. A
    multi-token-prediction head is not read. `progress(done, total)` counts bytes of the file. Peak memory is little
    more than the size of the result.
    Raises ModelError naming the tensor that is unknown, missing, doubled, or of another shape or an unsupported type,
    or the file that is absent, truncated or corrupt.
    """
    file = source if isinstance(source, GgufFile) else GgufFile.open(source)
    return ((name, tensor) for _, name, tensor in read_file_parts(file, config, dtype, one_device(device), progress))


def read_file_parts(file: GgufFile, config: ModelConfig, dtype: DType | Literal["auto"], split: Split,
                    progress: Progress | None = None) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Yields each device's part of the tensors of `read_file`: device, name, and tensor on the device."""
    kept: DType = config.dtype if dtype == "auto" else dtype
    sources = complete_plan(file, config)
    total, done = sum(part.stored.nbytes for part in sources), 0
    for part in sources:
        yield from split.cut(read_gguf(part, config, kept))
        done += part.stored.nbytes
        if progress is not None:
            progress(done, total)


def load_packed(source: GgufFile, config: ModelConfig, progress: Progress | None = None,
                form: PackedForm | None = None) -> dict[str, Weight]:
    """Loads the tensors of `load_packed_parts`, whole on one device, by default for the CPU's compiled kernels."""
    kept = form or host_form()
    return load_packed_parts(source, config, [kept], one_device(kept.device), progress)[0]


def load_packed_parts(source: GgufFile, config: ModelConfig, forms: Sequence[PackedForm], split: Split,
                      progress: Progress | None = None, experts: bool = True) -> list[dict[str, Weight]]:
    """Loads each device's part of the text model; quantized matrices get the packed form of their device. Stacks of
    experts become one matrix per expert. experts: include the experts.

    Convolutions, and matrices of types that the form does not serve, get the form's dtype; everything else is float32.
    Value heads keep the file's order (`GdnSpec.tiled`), because reordering columns would cut blocks. Peak memory is
    little more than the size of the result. `progress` and errors are as in `read_file`.
    """
    sources = complete_plan(source, config)
    sources = [part for part in sources if experts or not is_stack(part.target.names[0])]
    total = sum(part.stored.nbytes for part in sources)
    done = 0
    tensors: list[dict[str, Weight]] = [{} for _ in forms]
    _report_plain(sources, forms[0])

    def read(part: GgufSource) -> list[tuple[int, str, Weight]]:
        return [*_packed_parts(part, config, forms, split)]

    with ThreadPoolExecutor(available_cores()) as pool:
        for part, found in zip(sources, pool.map(read, sources), strict=True):
            for device, name, weight in found:
                tensors[device][name] = weight
            done += part.stored.nbytes
            if progress is not None:
                progress(done, total)
    return [{name: own[name] for name in expected_tensors(config) if name in own} for own in tensors]


def down_units(sources: Iterable[GgufSource], form: PackedForm) -> dict[str, int]:
    """Returns, for each `down` matrix of a feed-forward that stays packed, the unit in columns of its slices."""
    return {name: slice_unit(part.stored.type.name, part.stored.shape[-1]) for part in sources
            for name in part.target.names if name.endswith(".down_proj.weight") and not is_stack(name)
            and form.serves(part.stored.type.name, part.stored.shape[-1])}


def packed_sizes(file: GgufFile, config: ModelConfig, packed: Callable[[str, int, int], int | None]) -> dict[str, int]:
    """Returns the bytes of each tensor of the text model after `load_packed`. packed(type, rows, columns): returns the
    bytes of a quantized matrix, or None if it becomes bfloat16."""
    sizes = dict[str, int]()
    for part in plan_gguf(file, config):
        for name, shape in zip(part.target.names, part.shapes, strict=True):
            count, plain = math.prod(shape), DTYPE_BYTES[tensor_dtype(name, "bfloat16")]
            size = packed(part.stored.type.name, count // shape[-1], shape[-1]) if _is_matrix(part) else None
            sizes[name] = count * plain if size is None else size
    return sizes


def load_gguf_head(sources: list[GgufSource], config: ModelConfig, dtype: DType, split: Split,
                   forms: Sequence[PackedForm] = ()) -> list[dict[str, Weight]]:
    """Loads each device's part of the tensors of `plan_gguf_head`, dequantized to `dtype`, or packed in `forms` as in
    `load_packed_parts`. Logs a warning if they have few bits."""
    _warn_few_bits(sources)
    tensors: list[dict[str, Weight]] = [{} for _ in split.devices]
    for part in sources:
        for device, name, weight in (_packed_parts(part, config, forms, split) if forms
                                     else split.cut(read_gguf(part, config, dtype))):
            tensors[device][name] = weight.contiguous() if isinstance(weight, torch.Tensor) else weight
    return tensors


def plan_gguf_head(file: GgufFile, config: ModelConfig) -> list[GgufSource]:
    """Locates the tensors of `expected_head(config)` and `optional_head(config)` in file order, and checks everything
    but the data. Returns an empty list if the file has no head."""
    expected = expected_head(config)
    sources = list(_plan(file, config, {**expected, **optional_head(config)}, mtp=True))
    if sources:
        _check_complete(file, config, required_head(config), sources)
    return sources


def _warn_few_bits(sources: list[GgufSource]) -> None:
    few = [part.stored for part in sources if part.stored.nbytes * 8 < _FEW_BITS * math.prod(part.stored.shape)]
    if few:
        logger.warning("%s: %d tensors of the multi-token-prediction head have four bits or fewer (such as %s, %s), so "
                       "that its drafts are worse: take a file whose nextn tensors are Q8_0, or convert the original "
                       "model with deltic convert", few[0].path, len(few), few[0].name, few[0].type.name)


def wants_packing(file: GgufFile) -> bool:
    """Returns True for a model that should stay packed: it has types with blocks of 256 weights, or it is large."""
    tensors = file.tensors.values()
    return any(tensor.type.weights == 256 for tensor in tensors) or sum(t.nbytes for t in tensors) >= _PACKED_SIZE


def is_quantized(file: GgufFile) -> bool:
    """Returns True if any tensor is quantized."""
    return any(tensor.type.weights > 1 for tensor in file.tensors.values())


def unserved_experts(file: GgufFile, form: PackedForm) -> list[str]:
    """Returns the types of experts' matrices that the form does not serve."""
    stacks = [tensor for tensor in file.tensors.values() if len(tensor.shape) == 3]
    return sorted({tensor.type.name for tensor in stacks if not form.serves(tensor.type.name, tensor.shape[-1])})


def _is_matrix(part: GgufSource) -> bool:
    """Returns True for a matrix or a stack, except the convolution, whose shape changes when it is loaded."""
    return all(len(shape) > 1 for shape in part.shapes) and not part.target.form.changes


def _report_plain(sources: list[GgufSource], form: PackedForm) -> None:
    """Logs the number of matrices that are dequantized."""
    counts = Counter(part.stored.type.name for part in sources if _is_matrix(part)
                     and part.stored.type.weights > 1 and not form.serves(part.stored.type.name, part.stored.shape[-1]))
    if counts:
        logger.warning("%d quantized matrices have no kernel on %s and are dequantized: %s", counts.total(),
                       form.device, ", ".join(f"{name} ({count})" for name, count in counts.items()))


def _packed_parts(source: GgufSource, config: ModelConfig, forms: Sequence[PackedForm], split: Split
                  ) -> Iterator[tuple[int, str, Weight]]:
    """Yields each device's part of one of the file's tensors: device, name, and weight in the device's form."""
    if not _is_matrix(source):
        for device, name, tensor in split.cut(_floats(source, config)):
            kept = forms[device].dtype if tensor_dtype(name, "bfloat16") == "bfloat16" else torch.float32
            yield device, name, tensor.to(kept).contiguous()
    elif len(source.stored.shape) == 3:
        for device, part in split.own(source.target.names[0], source.stored.shape):
            yield from ((device, *found) for found in _pack_stack(source, forms[device], part))
    else:
        yield from _pack_matrices(source, config, forms, split)


def _pack_stack(source: GgufSource, form: PackedForm, part: Part) -> Iterator[tuple[str, Weight]]:
    """Packs the matrices of the experts in `part`, which has one range of experts."""
    stored, names = source.stored, source.target.names
    row_bytes, columns = stored.type.size(stored.shape[-1]), stored.shape[-1]
    found: dict[str, list[Block]] = {name: [] for name in names}
    experts, = part.ranges or (slice(0, stored.shape[0]),)
    matrices = list(matrices_of(source))[experts.start * len(names):experts.stop * len(names)]
    sizes = {rows for *_, rows in matrices}
    if form.stack and len(sizes) == 1 and form.serves(stored.type.name, columns):
        stack = form.stack(stored.type.name, stored.type.id, len(matrices), sizes.pop(), columns, row_bytes,
                           partial(read_from, stored.read, matrices[0][0] * row_bytes))
        for (_, name, _), matrix in zip(matrices, stack, strict=True):
            found[name].append(matrix)
        matrices = []
    for first, name, rows in matrices:
        read = partial(read_from, stored.read, first * row_bytes)
        found[name].append(_packed(stored, rows, columns, row_bytes, read, form.of(name)))
    yield from ((name, tuple(blocks)) for name, blocks in found.items())


def _pack_matrices(source: GgufSource, config: ModelConfig, forms: Sequence[PackedForm], split: Split
                   ) -> Iterator[tuple[int, str, Weight]]:
    """Packs each device's part of one matrix, or of several matrices stored one after another."""
    stored, type = source.stored, source.stored.type
    moved = source.target.form.rows(stored.shape[-2], config)
    for first, name, rows in matrices_of(source):
        whole = (rows, stored.shape[-1])
        order = None if moved is None else moved[first:first + rows] - first
        for device, part in split.own(name, whole):
            size, columns = part.shape(whole)
            read = _reader(stored, first, whole, part, order)
            yield device, name, _packed(stored, size, columns, type.size(columns), read, forms[device].of(name))


def _packed(stored: GgufTensor, rows: int, columns: int, row_bytes: int, read: Callable[[int, int], Bytes],
            form: PackedForm) -> Block:
    if form.serves(stored.type.name, columns):
        return form.pack(stored.type.name, stored.type.id, rows, columns, row_bytes, read)
    plain = torch.empty(rows, columns, dtype=form.dtype)
    fill(plain, stored.type, read)
    return plain.to(form.device)


def matrices_of(part: GgufSource) -> Iterator[tuple[int, str, int]]:
    """Yields the matrices of a tensor: first row, canonical name, number of rows."""
    first = 0
    for _ in range(part.stored.shape[0] if len(part.stored.shape) == 3 else 1):
        for name, shape in zip(part.target.names, part.shapes, strict=True):
            yield first, name, shape[-2]
            first += shape[-2]


def _reader(stored: GgufTensor, first: int, shape: Shape, part: Part, order: torch.Tensor | None
            ) -> Callable[[int, int], Bytes]:
    """Returns a reader of `part` of the matrix of this shape that begins at row `first`. order: the file's row of each
    row of the matrix, relative to `first`; rows are whole blocks."""
    rows, row_bytes = shape[0], stored.type.size(shape[1])
    if part.columns:
        matrix = stored.mapped(first * row_bytes, rows * row_bytes).reshape(rows, row_bytes)
        size = stored.type.size
        return _column_reader(matrix, [slice(size(own.start), size(own.stop)) for own in part.ranges or ()])
    ranges = part.ranges or (slice(0, rows),)
    if order is None and len(ranges) == 1:
        return partial(read_from, stored.read, (first + ranges[0].start) * row_bytes)
    joined = np.concatenate([_rows(stored, first, own, order) for own in ranges]).reshape(-1)
    return lambda offset, count: joined[offset:offset + count]


def _rows(stored: GgufTensor, first: int, own: slice, order: torch.Tensor | None) -> Bytes:
    """Reads the rows `own` of the matrix that begins at row `first`, [rows, bytes]. order: as in `_reader`."""
    wanted = np.arange(own.start, own.stop) if order is None else order[own].numpy()
    low, high, size = int(wanted.min()), int(wanted.max()) + 1, stored.type.size(stored.shape[-1])
    rows = stored.read((first + low) * size, (high - low) * size).reshape(-1, size)
    return rows if order is None else rows[wanted - low]


def _column_reader(matrix: Bytes, ranges: Sequence[slice]) -> Callable[[int, int], Bytes]:
    """Returns a reader of the byte ranges `ranges` of each row of a matrix [rows, bytes]."""
    width = sum(own.stop - own.start for own in ranges)

    def read(offset: int, count: int) -> Bytes:
        first, end = offset // width, -(-(offset + count) // width)
        rows = np.concatenate([matrix[first:end, own] for own in ranges], 1).reshape(-1)
        return rows[offset - first * width:][:count]

    return read


def _floats(source: GgufSource, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    tensor = torch.empty(source.stored.shape)
    fill(tensor, source.stored.type, source.stored.read)
    try:
        yield source.target.names[0], source.target.form.decode(tensor, config)
    except ModelError as error:
        raise ModelError(f"{source.stored.path}: tensor {source.stored.name!r}: {error}") from error


def plan_gguf(file: GgufFile, config: ModelConfig) -> Iterator[GgufSource]:
    """Locates the trunk's tensors in file order, and checks everything but the data."""
    return _plan(file, config, expected_tensors(config), mtp=False)


def complete_plan(file: GgufFile, config: ModelConfig) -> list[GgufSource]:
    """Returns all tensors of `plan_gguf`. Raises ModelError if a tensor is missing."""
    sources = list(plan_gguf(file, config))
    _check_complete(file, config, expected_tensors(config), sources)
    return sources


def _plan(file: GgufFile, config: ModelConfig, expected: Mapping[str, Shape], mtp: bool) -> Iterator[GgufSource]:
    served: dict[str, str] = {}
    for stored in file.tensors.values():
        if stored.name == ROPE_FACTORS or TOWER.fullmatch(stored.name):
            continue
        found = tensor_target(stored.name, config.architecture, config.layer_types)
        if found.mtp != mtp:
            continue
        for name in found.names:
            if name not in expected:
                raise ModelError(f"{stored.path}: tensor {stored.name!r} has no place in the model that the metadata "
                                 "describes; download the file again, or take another one")
            if name in served:
                raise ModelError(f"{stored.path}: tensor {name!r} is given twice, as {served[name]!r} and "
                                 f"{stored.name!r}")
            served[name] = stored.name
        yield _checked(GgufSource(stored, found, tuple(expected[name] for name in found.names)), config)


def _checked(source: GgufSource, config: ModelConfig) -> GgufSource:
    """Checks shape and type. A vector may be stored as a matrix of one row."""
    wanted = source.target.form.shape(source.shapes[0], config)
    if len(source.shapes) > 1:
        wanted = (*wanted[:-2], sum(shape[-2] for shape in source.shapes), wanted[-1])
    if source.stored.shape == (1, *wanted):
        source = replace(source, stored=replace(source.stored, shape=wanted))
    if source.stored.shape != wanted:
        raise ModelError(f"{source.stored.path}: tensor {source.stored.name!r} has shape {list(source.stored.shape)}, "
                         f"but the metadata requires {list(wanted)}")
    if not source.stored.type.readable:
        raise ModelError(f"{source.stored.path}: tensor {source.stored.name!r} is of type {source.stored.type.name}, "
                         "which is not supported; choose another quantization, such as Q4_K_M or Q8_0")
    return source


def _check_complete(file: GgufFile, config: ModelConfig, expected: Mapping[str, Shape],
                    sources: list[GgufSource]) -> None:
    served = {name for source in sources for name in source.target.names}
    missing = [name for name in expected if name not in served]
    if missing == [HEAD]:
        raise ModelError(f"tensor 'output.weight' is missing in {file.paths[0]}; if the head is the embedding, "
                         "set tie_word_embeddings")
    if missing:
        name, _ = gguf_name(missing[0], config.architecture, config.layer_types)
        raise ModelError(f"{len(missing)} tensors are missing in {file.paths[0]}, such as {name!r}; "
                         "download the file again, or all parts of the model")


def read_gguf(source: GgufSource, config: ModelConfig, kept: DType) -> Iterator[tuple[str, torch.Tensor]]:
    """Reads one of the file's tensors and yields its canonical tensors."""
    stored, names = source.stored, source.target.names
    tensor = torch.empty(stored.shape, dtype=TORCH_DTYPES[tensor_dtype(names[0], kept)])
    try:
        fill(tensor, stored.type, stored.read)
        tensor = source.target.form.to_ours(tensor, config)
    except ModelError as error:
        raise ModelError(f"{stored.path}: tensor {stored.name!r}: {error}") from error
    if len(names) == 1:
        yield names[0], tensor
    else:
        yield from zip(names, tensor.split([shape[-2] for shape in source.shapes], dim=-2), strict=True)
