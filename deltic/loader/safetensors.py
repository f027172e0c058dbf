"""Loads the tensors of a model's directory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

import torch

from deltic.config import DType, ModelConfig
from deltic.errors import ModelError
from deltic.loader.files import InMemory, find_tensors, stacked
from deltic.loader.formats.fp8 import FLOAT8, GROUP, Float8, float8_scales, row_scales, scales_part
from deltic.loader.gguf.blocks import BlockType
from deltic.loader.names import (
    EMBEDDING,
    HEAD,
    Shape,
    canonical,
    expected_rows,
    expected_tensors,
    is_stack,
    is_unused_scale,
    packed_parts,
    packed_rows,
    packed_shape,
    split_packed,
    tensor_dtype,
)
from deltic.loader.stored_blocks import StoredBlocks, stored_blocks
from deltic.loader.tensors import PackedTensor, Source, Stack, StoredTensor, fill
from deltic.ops.parts import WHOLE, Part, Split, one_device
from deltic.ops.types import Weight

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
StoredWeight = torch.Tensor | Float8 | StoredBlocks

TORCH_DTYPES: Final[dict[DType, torch.dtype]] = {
    "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED_DTYPES: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_CHUNK: Final = 4 << 20
"""Number of values that are read, or dequantized, at a time."""
_COMPARED_ROWS: Final = 64
_ROUNDED: Final = 0.3
"""Maximum relative error of a matrix that is a 4-bit copy of another; unrelated matrices have errors above 1."""
_FLOAT16_LIMIT: Final = 65520.0  # the smallest value that rounds to infinity


@dataclass(frozen=True, slots=True)
class KeptForms:
    """The weights that stay quantized while a model is read.

    float8: matrices and stacks that are stored in float8.
    blocks: block types of weights that keep their stored quantization, by canonical name.
    pack: reads a weight in the form of the only device; returns None if it cannot.
    """

    float8: bool = False
    blocks: Mapping[str, BlockType] = field(default_factory=dict)
    pack: Callable[[str, Source], Weight | None] | None = None


DEQUANTIZED: Final = KeptForms()
"""No weight stays quantized."""


def read_directory(
    path: str | Path | InMemory,
    config: ModelConfig,
    dtype: DType | Literal["auto"] = "auto",
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of `read_parts`, whole on one device."""
    for _, name, tensor in read_parts(path, config, dtype, one_device(device), progress):
        assert isinstance(tensor, torch.Tensor)
        yield name, tensor


def read_parts(path: str | Path | InMemory, config: ModelConfig, dtype: DType | Literal["auto"], split: Split,
               progress: Progress | None = None, experts: bool = True, kept: KeptForms = DEQUANTIZED
               ) -> Iterator[tuple[int, str, StoredWeight | Weight]]:
    """Yields each device's part of the tensors of `expected_tensors(config)` in file order: device, name, and tensor,
    contiguous, on the device. experts: include the experts. kept: the weights that stay quantized.

    Matrices get `dtype` (`auto`: the config's), norms and decay parameters float32 (`tensor_dtype`). A byte of a file
    is read for only one device, unless all devices need it. `progress(done, total)` counts bytes. Peak memory is little
    more than the size of the result: tensors are read one by one. Files are not mapped, because a later eviction of
    cached pages would stall a step.
    Raises ModelError naming the tensor that is unknown, missing, doubled or of another shape or dtype, or the file that
    is absent, truncated or corrupt.
    """
    place = Path(path) if isinstance(path, str) else path
    tensors = find_tensors(place)
    planned = _plan(place, tensors, config)
    if unused := sum(map(is_unused_scale, tensors)):
        logger.info("%d scales of activations, keys and values in %s are not used: activations are not quantized, and "
                    "`kv_dtype` determines how keys and values are stored", unused, place)
    sources = {name: source for name, source in planned.items() if experts or not is_stack(name)}
    own: DType = config.dtype if dtype == "auto" else dtype
    total = sum(stored.nbytes for stored in sources.values())
    done = 0
    for name, stored in sources.items():
        if name == HEAD and config.tie_word_embeddings:
            continue
        packed = kept.pack(name, stored) if kept.pack else None
        type = kept.blocks.get((packed_parts(name) or (name,))[0])
        if packed is not None:
            yield 0, name, packed
        elif type:
            yield from _blocks_of(name, stored, type, config, own, split)
        else:
            yield from _parts_of(name, stored, config, own, split, kept.float8)
        del packed
        done += stored.nbytes
        if progress is not None:
            progress(done, total)
    if config.tie_word_embeddings and HEAD in sources:
        check_tied(sources)


def read_source(name: str, stored: Source, config: ModelConfig, dtype: DType, split: Split
                ) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Yields each device's part of the canonical tensors in a stored tensor, like `read_parts`."""
    for device, part, tensor in _parts_of(name, stored, config, dtype, split, False):
        assert isinstance(tensor, torch.Tensor)
        yield device, part, tensor


def _parts_of(name: str, stored: Source, config: ModelConfig, dtype: DType, split: Split, float8: bool
              ) -> Iterator[tuple[int, str, torch.Tensor | Float8]]:
    kept, names = TORCH_DTYPES[tensor_dtype(name, dtype)], packed_parts(name)
    if names and not is_stack(name) and float8 and stored.dtype == FLOAT8:
        yield from _split_float8(name, stored, config, split)
        return
    if names and not is_stack(name):  # rows are ordered by key head
        whole = split_packed(name, read_stored(name, stored, kept, split.devices[0]), config)
        yield from split.cut((part, whole.pop(part)) for part in [*whole])
        return
    # gate and up of an expert are on the same device
    own = dict(split.own(names[0] if names else name, stored.shape))
    stays = float8 and _stays_float8(name, stored, own.values())
    for device, tensor in (_read_float8(name, stored, split, own) if stays
                           else _read_own(name, stored, kept, split, own)):
        parts = dict(zip(names, _halves(tensor), strict=True)) if names else {name: tensor}
        del tensor  # so that the caller can free the parts one by one
        for part in [*parts]:
            yield device, part, parts.pop(part)


def _blocks_of(name: str, stored: Source, type: BlockType, config: ModelConfig, dtype: DType, split: Split
               ) -> Iterator[tuple[int, str, StoredBlocks]]:
    """Yields each device's part of a weight that keeps its stored quantization, without reading it."""
    sources = [part for part in stored.parts if isinstance(part, PackedTensor)]
    stacked, names = isinstance(stored, Stack), packed_parts(name)
    rows = torch.arange(stored.shape[-2])
    own = {name: rows}
    if names and is_stack(name):
        own = dict(zip(names, rows.chunk(2), strict=True))
    elif names:
        order = packed_rows(name, config)
        own = dict(zip(names, order.split([expected_rows(part, config) for part in names]), strict=True))
    for part, some in own.items():
        shape = (len(sources), len(some), stored.shape[-1]) if stacked else (len(some), stored.shape[-1])
        for device, place in split.own(part, shape):
            yield device, part, stored_blocks(sources, stacked, type, TORCH_DTYPES[dtype], place, some)


def _read_own(name: str, stored: Source, dtype: torch.dtype, split: Split, own: Mapping[int, Part]
              ) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields each device's part of a tensor; `own` has the part of each device that has one."""
    if not any(part.columns for part in own.values()):
        for device, part in own.items():
            yield device, read_stored(name, stored, dtype, split.devices[device], part)
        return
    found = {device: torch.empty(part.shape(stored.shape), dtype=dtype, device=split.devices[device])
             for device, part in own.items()}
    step = max(1, _CHUNK // (GROUP * stored.shape[1])) * GROUP
    stored = stored.loaded() if isinstance(stored, PackedTensor) else stored
    for first in range(0, stored.shape[0], step):
        rows = Part((slice(first, min(first + step, stored.shape[0])),))
        piece = read_stored(name, stored, dtype, torch.device("cpu"), rows)
        for device, part in own.items():
            found[device][first:first + len(piece)] = part.of(piece)
    for device in own:
        yield device, found.pop(device)


def _stays_float8(name: str, stored: Source, own: Iterable[Part]) -> bool:
    """Returns True for a float8 tensor that need not be split, or whose parts share no block of scales."""
    splittable = is_stack(name) and stored.shape[-2] % (2 * GROUP) == 0
    aligned = all(bound % GROUP == 0 for part in own if part.columns and part.ranges
                  for columns in part.ranges for bound in (columns.start, columns.stop))
    return stored.dtype == FLOAT8 and aligned and (splittable or not packed_parts(name))


def _halves(weight: torch.Tensor | Float8) -> tuple[torch.Tensor | Float8, ...]:
    return weight.halves() if isinstance(weight, Float8) else tuple(half.contiguous() for half in weight.chunk(2, 1))


def plan_directory(directory: Path | InMemory, config: ModelConfig) -> dict[str, Source]:
    """Locates each tensor by canonical (or packed) name, in file order, and checks everything but the data."""
    return _plan(directory, find_tensors(directory), config)


def _plan(directory: Path | InMemory, found: Mapping[str, Source], config: ModelConfig) -> dict[str, Source]:
    """Plans these tensors of a directory."""
    expected = expected_tensors(config)
    shapes = {**expected, HEAD: expected[EMBEDDING]}
    named: dict[str, str] = {}
    tensors: dict[str, Source] = {}
    for stored_name, stored in found.items():
        name = canonical(stored_name)
        if name in named:
            raise _twice(name, named[name], stored_name)
        if name is not None:
            named[name], tensors[name] = stored_name, stored
    served: dict[str, str] = {}
    sources = stacked(tensors, count_of=lambda name: shapes.get(name, (0,))[0])
    for name, source in sources.items():
        stored_name = named.get(name, name)
        for part in packed_parts(name) or (name,):
            if part not in shapes:
                raise ModelError(f"tensor {stored_name!r} has no place in the model of config.json; "
                                 "take the config.json that belongs to the weights")
            if part in served:
                raise _twice(part, served[part], stored_name)
            served[part] = stored_name
        shape = packed_shape(name, config) if packed_parts(name) else shapes[name]
        sources[name] = check_stored(stored_name, source, shape)
    _check_complete(directory, expected, served)
    return sources


def _twice(name: str, first: str, second: str) -> ModelError:
    return ModelError(f"tensor {name!r} is given twice, as {first!r} and {second!r}; keep the files of one revision")


def check_stored(name: str, stored: Source, shape: Shape) -> Source:
    """Returns the tensor in this shape. Raises ModelError naming it for a different shape or unsupported dtype."""
    stored = stored.shaped(shape)
    if stored.shape != shape:
        raise ModelError(f"tensor {name!r} has shape {list(stored.shape)}, config.json requires "
                         f"{list(shape)}; take the config.json that belongs to the weights")
    if stored.dtype not in _STORED_DTYPES and not isinstance(stored.parts[0], PackedTensor):
        raise ModelError(f"tensor {name!r} is stored as {stored.dtype[:20]}; F32, BF16, F16 and quantized weights with "
                         "their scales can be read, so use the unquantized checkpoint")
    return stored


def _check_complete(directory: Path | InMemory, expected: dict[str, Shape], served: dict[str, str]) -> None:
    missing = [name for name in expected if name not in served]
    if missing == [HEAD]:
        raise ModelError(f"tensor {HEAD!r} is missing in {directory}; if the head is the embedding, "
                         "set tie_word_embeddings to true in config.json")
    if missing:
        raise ModelError(f"{len(missing)} tensors are missing in {directory}, such as {missing[0]!r}; "
                         "download all shards of the revision that config.json belongs to")


def read_stored(name: str, stored: Source, dtype: torch.dtype, device: torch.device, part: Part = WHOLE
                ) -> torch.Tensor:
    """Reads and converts a tensor, or rows of it. Raises ModelError naming a truncated file."""
    assert not part.columns
    found = [stored if rows is None else stored.rows(rows.start, rows.stop) for rows in part.ranges or (None,)]
    result = torch.empty(part.shape(stored.shape), dtype=dtype, device=device)
    pieces = [result] if part.ranges is None else result.split([source.shape[0] for source in found])
    for source, own in zip(found, pieces, strict=True):
        for stored_part, piece in zip(source.parts, own.view(len(source.parts), -1), strict=True):
            try:
                _read_part(name, stored_part, piece)
            except OSError as error:
                raise ModelError(f"{stored_part.path} cannot be read: {error.strerror}") from error
    return result


def _read_part(name: str, stored: StoredTensor | PackedTensor, result: torch.Tensor) -> None:
    if isinstance(stored, PackedTensor):
        return _read_packed(name, stored, result)
    source_dtype = torch.uint8 if stored.dtype == "U8" else _STORED_DTYPES[stored.dtype]
    direct = source_dtype == result.dtype and result.device.type == "cpu"
    staging = torch.empty(0 if direct else min(_CHUNK, result.numel()), dtype=source_dtype)
    with stored.open() as file:
        file.seek(stored.offset)
        for piece in torch.split(result, _CHUNK):
            raw = piece if direct else staging[:piece.numel()]
            fill(file, raw, stored)
            if not direct:
                piece.copy_(raw)
                _check_range(name, raw, piece)


def _read_packed(name: str, stored: PackedTensor, result: torch.Tensor) -> None:
    """Reads and dequantizes a weight, some rows at a time."""
    rows = result.view(stored.shape)
    step = max(1, _CHUNK // 4 * len(rows) // max(1, result.numel()))  # temporaries are several times larger
    source = stored.loaded()
    for first in range(0, len(rows), step):
        piece = rows[first:first + step]
        numbers = source.read(first, first + len(piece)).to(result.device).numbers()
        piece.copy_(numbers)
        _check_range(name, numbers, piece)


def _read_float8(name: str, stored: Source, split: Split, own: Mapping[int, Part]) -> Iterator[tuple[int, Float8]]:
    """Yields each device's part of a float8 tensor, without conversion. Raises ModelError like `read_stored`."""
    packed = [part for part in stored.parts if isinstance(part, PackedTensor)]
    parts = [replace(part.tensors["codes"], dtype="U8") for part in packed]
    scales = [float8_scales(part) for part in packed]
    codes, factors = (Stack(tuple(parts)), torch.stack(scales)) if isinstance(stored, Stack) else (parts[0], scales[0])

    def weight(part: tuple[int, torch.Tensor]) -> tuple[int, Float8]:
        device, found = part
        return device, Float8(found, scales_part(factors, stored.shape, own[device]).to(found.device))

    return map(weight, _read_own(name, codes, torch.uint8, split, own))


def _split_float8(name: str, stored: Source, config: ModelConfig, split: Split) -> Iterator[tuple[int, str, Float8]]:
    """Yields each device's part of the tensors in a packed projection, without conversion."""
    (_, whole), = _read_float8(name, stored, one_device("cpu"), {0: WHOLE})
    scales, rows, first = row_scales(whole.scales, whole.shape), packed_rows(name, config), 0
    for part in packed_parts(name):
        own = rows[first:first + expected_rows(part, config)]
        codes, factors, first = whole.codes[own], scales[own], first + len(own)
        for device, place in split.own(part, tuple(codes.shape)):
            yield device, part, Float8(*(place.of(tensor).to(split.devices[device]) for tensor in (codes, factors)))


def _check_range(name: str, raw: torch.Tensor, piece: torch.Tensor) -> None:
    """Raises ModelError if a cast to float16 overflowed."""
    if piece.dtype == torch.float16 and raw.dtype != torch.float16:
        low, high = (float(bound) for bound in torch.aminmax(raw))
        if _FLOAT16_LIMIT <= max(-low, high) < float("inf"):
            raise ModelError(f"tensor {name!r} has values beyond float16; use dtype bfloat16 or float32")


def check_tied(sources: Mapping[str, Source]) -> None:
    """Raises ModelError unless a redundant tied head, as some exporters write, equals the embedding. If either is
    quantized, only the first rows are compared, within an error bound."""
    (head,), (embedding,) = sources[HEAD].parts, sources[EMBEDDING].parts
    if isinstance(head, PackedTensor) or isinstance(embedding, PackedTensor):
        rows = Part((slice(0, min(_COMPARED_ROWS, head.shape[0])),))
        found, wanted = (read_stored(name, sources[name], torch.float32, torch.device("cpu"), rows)
                         for name in (HEAD, EMBEDDING))
        if not bool((found - wanted).norm() <= _ROUNDED * wanted.norm()):
            raise _not_tied()
        return
    same = head.dtype == embedding.dtype
    with head.open() as left, embedding.open() as right:
        left.seek(head.offset)
        right.seek(embedding.offset)
        for start in range(0, head.nbytes, _CHUNK):
            count = min(_CHUNK, head.nbytes - start)
            same = same and left.read(count) == right.read(count)
    if not same:
        raise _not_tied()


def _not_tied() -> ModelError:
    return ModelError(f"config.json ties the head to the embedding, but {HEAD!r} differs from {EMBEDDING!r}; set "
                      "tie_word_embeddings to false")
