"""The multi-token-prediction head of a safetensors checkpoint: finding, loading and extracting it.

A head is in the model's own shards, else in `mtp.safetensors` or `mtp/weights.safetensors` of the directory, else in
another safetensors file there.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from deltic.config import DType, ModelConfig
from deltic.errors import ModelError
from deltic.loader.checkpoint import HEAD_FILES, CheckpointFiles
from deltic.loader.disk import check_room, replacing
from deltic.loader.files import (
    INDEX,
    SINGLE,
    InMemory,
    check_weight_map,
    stacked,
)
from deltic.loader.formats import combine, stored_tensors
from deltic.loader.names import (
    canonical_head,
    expected_head,
    is_unused_scale,
    optional_head,
    packed_parts,
    packed_shape,
    required_head,
)
from deltic.loader.safetensors import Progress, check_stored, read_source
from deltic.loader.tensors import Source, StoredTensor
from deltic.ops.parts import Split

FILE: Final = HEAD_FILES[0]
"""Default name of an extracted head."""
_PIECE: Final = 8 << 20

logger = logging.getLogger(__name__)


def find_head(checkpoint: CheckpointFiles, config: ModelConfig) -> dict[str, Source]:
    """Locates the head's tensors by canonical name, and checks everything but their data; empty if there is no head.

    Reads only headers. Raises ModelError naming a tensor that is missing, unknown, doubled, or of another shape or an
    unsupported dtype, and for a head of another kind.
    """
    own, others = _files(checkpoint)
    stored = _heads(checkpoint, own)
    if not stored:
        named = [name for name in HEAD_FILES if name in others][:1]
        stored = _heads(checkpoint, named) if named else _only_head(checkpoint, others)
    return _checked_head(checkpoint.place, stored, config)


def head_in_memory(weights: InMemory, config: ModelConfig) -> dict[str, Source]:
    """Locates the head's tensors like `find_head`, for tensors in memory."""
    return _checked_head(weights, _canonical(combine(weights.tensors, weights.quantization)), config)


def _canonical(tensors: Mapping[str, Source]) -> dict[str, Source]:
    """Returns a head's tensors by canonical name, without unused scales."""
    named = ((canonical_head(name), stored) for name, stored in tensors.items() if not is_unused_scale(name))
    return {name: stored for name, stored in named if name is not None}


def _checked_head(place: Path | InMemory, stored: Mapping[str, Source], config: ModelConfig) -> dict[str, Source]:
    expected = {**expected_head(config), **optional_head(config)}
    found = stacked(stored, count_of=lambda name: expected.get(name, (0,))[0])
    _check_head(place, found, config)
    return found


def _files(checkpoint: CheckpointFiles) -> tuple[list[str], list[str]]:
    """Returns the model's own safetensors files that may contain a head, and the other files that may contain one."""
    names = [name for name in checkpoint.sizes if name.endswith(".safetensors")]
    if SINGLE in names or INDEX not in checkpoint.sizes:
        own = {SINGLE} & set(names)
        return sorted(own), sorted(set(names) - own)
    weight_map = check_weight_map(checkpoint.json(INDEX), checkpoint.place / INDEX)
    shards = {shard for name, shard in weight_map.items() if canonical_head(name) is not None}
    for shard in sorted(shards - set(names)):
        raise ModelError(f"{checkpoint.place / INDEX} names the shard {shard!r}, which is absent; download it too")
    return sorted(shards), sorted(set(names) - set(weight_map.values()))


def _only_head(checkpoint: CheckpointFiles, files: Iterable[str]) -> dict[str, Source]:
    """Returns the head in one of these files. Files that cannot be read are skipped, because they may be anything."""
    found: dict[str, dict[str, Source]] = {}
    for name in files:
        try:
            if tensors := _heads(checkpoint, [name]):
                found[name] = tensors
        except ModelError as error:
            logger.warning("skipped in the search for a draft head: %s", error)
    if len(found) > 1:
        raise ModelError(f"{checkpoint.place} has several files with a multi-token-prediction head: "
                         f"{', '.join(found)}; rename the one to use to {FILE}")
    return next(iter(found.values()), {})


def _heads(checkpoint: CheckpointFiles, files: Iterable[str]) -> dict[str, Source]:
    stored_names: dict[str, str] = {}
    found: dict[str, StoredTensor] = {}
    for file in files:
        for stored_name, stored in checkpoint.header(file).items():
            name = canonical_head(stored_name)
            if name in stored_names:
                raise ModelError(f"tensor {name!r} is in both {found[stored_names[name]].path.name} and {file} of "
                                 f"{checkpoint.place}; keep the files of one revision")
            if name is not None:
                stored_names[name] = stored_name
                found[stored_name] = stored
    return _canonical(combine(found, checkpoint.quantization())) if found else {}


def _check_head(place: Path | InMemory, stored: dict[str, Source], config: ModelConfig) -> None:
    expected = expected_head(config)
    shapes = {**expected, **optional_head(config)}
    served = [part for name in stored for part in packed_parts(name) or (name,)]
    for name, tensor in stored.items():
        if not shapes.keys() >= set(packed_parts(name) or (name,)):
            raise ModelError(f"{tensor.path}: tensor {name[:200]!r} has no place in a multi-token-prediction head of "
                             "this model; take a head that is not quantized and belongs to the model")
        try:
            shape = packed_shape(name, config) if packed_parts(name) else shapes[name]
            stored[name] = check_stored(name, tensor, shape)
        except ModelError as error:
            raise ModelError(f"{tensor.path}: {error}") from error
    twice = [part for part in served if served.count(part) > 1]
    if twice:
        raise ModelError(f"tensor {twice[0]!r} is given twice in {place}; keep the files of one revision")
    missing = [name for name in required_head(config) if name not in served]
    if stored and missing:
        raise ModelError(f"{len(missing)} tensors of the multi-token-prediction head are missing in {place}, such as "
                         f"{missing[0]!r}; download all shards, or take the head from the original model with "
                         "deltic mtp extract")


def load_stored_head(stored: Mapping[str, Source], config: ModelConfig, dtype: DType, split: Split
                     ) -> list[dict[str, Tensor]]:
    """Loads each device's part of the tensors of `find_head`: matrices in `dtype`, norms in float32."""
    found: list[dict[str, Tensor]] = [{} for _ in split.devices]
    for name, source in stored.items():
        for device, part, tensor in read_source(name, source, config, dtype, split):
            found[device][part] = tensor
    return found


# Extracting


@dataclass(frozen=True, slots=True)
class Extracted:
    """Result of `extract_head`: size of the file, number of weights, and number of tensors by dtype."""

    nbytes: int
    weights: int
    tensors: Mapping[str, int]


def extract_head(checkpoint: CheckpointFiles, target: Path, source: str, progress: Progress | None = None) -> Extracted:
    """Copies the head of a checkpoint to a safetensors file, bit for bit, under canonical names.

    Tensors of single experts become stacks. The metadata has `kind`, `source` and `config` (JSON: the model's sizes).
    An existing file is replaced once the new one is complete. Reads only the head, some megabytes at a time;
    `progress(done, total)` counts bytes. Raises ModelError if there is no head or it cannot be read, DelticError if the
    target cannot be written.
    """
    config = ModelConfig.from_hf(checkpoint.json("config.json"))
    head = find_head(checkpoint, config)
    stored = dict(sorted((name, own) for weight, source in head.items()
                         for name, own in stored_tensors(weight, source).items()))
    if not stored:
        raise ModelError(f"{checkpoint.place} has no multi-token-prediction head (tensors mtp.*); take the original "
                         "model, as fine-tuned and quantized copies often lack it")
    parts = [part for tensor in stored.values() for part in tensor.stored]
    if any(path.resolve() == target.resolve() for path in {part.path for part in parts}):
        raise ModelError(f"{target} is the file that the head is read from; give another name")
    header = _header(stored, config, source)
    total = sum(tensor.nbytes for tensor in stored.values())
    done = 0
    check_room(target, len(header) + total, "make room, or choose another place")
    with replacing(target) as file:
        file.write(header)
        for part in parts:
            for start in range(0, part.nbytes, _PIECE):
                count = min(_PIECE, part.nbytes - start)
                piece = checkpoint.read(part.path.relative_to(checkpoint.place).as_posix(), part.offset + start, count)
                if len(piece) != count:
                    raise ModelError(f"{part.path} ended while it was read; is it still being downloaded?")
                file.write(piece)
                done += count
                if progress is not None:
                    progress(done, total)
    dtypes = [tensor.dtype for tensor in stored.values()]
    return Extracted(len(header) + total, sum(torch.Size(tensor.shape).numel() for tensor in stored.values()),
                     {dtype: dtypes.count(dtype) for dtype in dict.fromkeys(dtypes)})


def _header(stored: Mapping[str, Source], config: ModelConfig, source: str) -> bytes:
    """Returns the bytes of the file before the data, padded to a multiple of eight."""
    sizes = {"architecture": config.architecture, "hidden_size": config.hidden_size,
             "intermediate_size": config.intermediate_size, "num_attention_heads": config.num_attention_heads,
             "num_key_value_heads": config.num_key_value_heads, "head_dim": config.head_dim,
             "vocab_size": config.vocab_size, "mtp_num_hidden_layers": 1}
    entries: dict[str, Any] = {"__metadata__": {
        "format": "pt", "kind": "multi-token-prediction head", "source": source, "config": json.dumps(sizes)}}
    end = 0
    for name, tensor in stored.items():
        entries[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
