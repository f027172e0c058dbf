"""Converts a model to a GGUF file of a given type.

Types of tensors follow llama.cpp (src/llama-quant.cpp), so that files resemble those of its tools.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

import torch

from deltic.config import DType, ModelConfig
from deltic.errors import ModelError
from deltic.loader.gguf.blocks import BY_NAME, BlockType, Bytes
from deltic.loader.gguf.imatrix import ImportanceMatrix
from deltic.loader.gguf.load import GgufSource, plan_gguf, read_gguf
from deltic.loader.gguf.names import PLAIN, ROPE_FACTORS, gguf_name
from deltic.loader.gguf.quantize import quantize_in_pieces
from deltic.loader.gguf.tokenizer import TokenizerTexts
from deltic.loader.gguf.write import NewTensor, config_to_gguf, generation_to_gguf, tokenizer_to_gguf, write_gguf
from deltic.loader.lora_merge import LoraMerge
from deltic.loader.model_files import ModelFiles
from deltic.loader.names import (
    HEAD,
    expected_head,
    expected_tensors,
    optional_head,
    packed_of,
    packed_parts,
    packed_shape,
    split_packed,
    tensor_dtype,
)
from deltic.loader.safetensors import TORCH_DTYPES, Progress, check_tied, plan_directory, read_stored
from deltic.loader.tensors import Source

_MAX_THREADS: Final = 8
_STORED: Final[Mapping[str, DType]] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_BLOCK: Final = re.compile(r"blk\.(\d+)\.(.+)\.weight")
_SENSITIVE: Final = ("attn_v", "attn_qkv", "ffn_down", "ffn_down_exps", "ffn_down_shexp")
"""Tensors that get more bits in some layers of a mixed-type file."""
_ALWAYS_F32: Final = re.compile(r".*(_norm|ssm_conv1d|ffn_gate_inp)\.weight")
_SMALLER_BLOCKS: Final[Mapping[str, str]] = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""Types with smaller blocks, for rows that are not a multiple of 256; if these do not fit either, F16 is used."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FileType:
    """A GGUF file type: the tensor types that a conversion uses.

    id: value of general.file_type.
    most: type of most matrices.
    head: type of lm_head, and of an embedding that is also the head.
    sensitive: type of matrices that need more bits.
    mtp: type of the multi-token-prediction head, whose drafts suffer from fewer than eight bits.
    """

    id: int
    most: str
    head: str
    sensitive: str
    mtp: str = "Q8_0"


FILE_TYPES: Final[Mapping[str, FileType]] = {
    "F32": FileType(0, "F32", "F32", "F32", "F32"),
    "F16": FileType(1, "F16", "F16", "F16", "F16"),
    "BF16": FileType(32, "BF16", "BF16", "BF16", "BF16"),
    "Q8_0": FileType(7, "Q8_0", "Q8_0", "Q8_0"),
    "Q6_K": FileType(18, "Q6_K", "Q6_K", "Q6_K"),
    "Q5_K_M": FileType(17, "Q5_K", "Q6_K", "Q6_K"),
    "Q5_1": FileType(9, "Q5_1", "Q6_K", "Q5_1"),
    "Q5_0": FileType(8, "Q5_0", "Q6_K", "Q5_0"),
    "Q4_K_M": FileType(15, "Q4_K", "Q6_K", "Q6_K"),
    "Q4_1": FileType(3, "Q4_1", "Q6_K", "Q4_1"),
    "Q4_0": FileType(2, "Q4_0", "Q6_K", "Q4_0"),
}


@dataclass(frozen=True, slots=True)
class Written:
    """Result of a conversion: size of the file, number of weights, and number of tensors by type."""

    nbytes: int
    weights: int
    tensors: Mapping[str, int]

    @property
    def bits_per_weight(self) -> float:
        """Returns the bits per weight of the whole file, including the tokenizer."""
        return self.nbytes * 8 / self.weights


def convert(files: ModelFiles, tokenizer: TokenizerTexts, name: str, path: Path, type: str,
            progress: Progress | None = None, mtp: Literal["q8_0", "same", "none"] = "q8_0",
            more: Mapping[str, Any] = MappingProxyType({})) -> Written:
    """Writes the text model of `files` to `path` as a GGUF file of `type` (of FILE_TYPES), called `name`.

    mtp: type of the multi-token-prediction head: q8_0 (at least Q8_0), same (as most matrices), or none (no head).
    more: additional metadata.
    One tensor is in memory at a time. `progress(done, total)` counts bytes of tensors. An existing file is replaced
    once the new one is complete. Raises ModelError naming a tensor that cannot be read or stored, DelticError if the
    file cannot be written.
    """
    config, kind = files.config, FILE_TYPES[type]
    sources = [*_joined(_merged(_sources(files), files.lora), config)]
    head = list(_head_sources(files)) if mtp != "none" else []
    config = replace(config, num_mtp_layers=1 if head else 0)
    if mtp == "same":
        kind = replace(kind, mtp=kind.most)
    sources += head
    shapes = {**expected_tensors(config), **expected_head(config), **optional_head(config)}
    shapes |= {name: packed_shape(name, config) for source in sources for name in source.names if packed_parts(name)}
    targets = {name: target_of(name, shapes[name], config, kind) for source in sources for name in source.names}
    if config.rope.yarn is None and len({*config.rope.factors}) > 1:
        _write_factors(config, sources, targets)
    _report_fallbacks(targets, config, kind)
    metadata = {
        **config_to_gguf(config), "general.type": "model", "general.name": name, "general.file_type": kind.id,
        "general.quantization_version": 2, **generation_to_gguf(files.generation),
        **tokenizer_to_gguf(tokenizer, config, files.generation.eos_token_ids), **more}
    if files.imatrix:
        files.imatrix.check(targets.values(), config.num_hidden_layers)
        metadata |= files.imatrix.metadata()
    data = _encoded(sources, targets, config, progress, files.imatrix)
    size = write_gguf(path, metadata, list(targets.values()), data)
    return Written(size, sum(math.prod(target.shape) for target in targets.values()),
                   Counter(target.type.name for target in targets.values()))


def _write_factors(config: ModelConfig, sources: list[_SourceTensor], targets: dict[str, NewTensor]) -> None:
    """Adds the divisors of the rotary frequencies, which readers expect for Llamas only."""
    if config.architecture != "llama":
        raise ModelError(f"GGUF files of a {config.architecture} model cannot store this scaling of its rotary "
                         "frequencies (rope_type llama3)")
    factors = torch.tensor(config.rope.factors)
    targets[ROPE_FACTORS] = NewTensor(ROPE_FACTORS, BY_NAME["F32"], (len(factors),))
    sources.append(_SourceTensor((ROPE_FACTORS,), lambda: {ROPE_FACTORS: factors}))


# Types


def target_of(name: str, shape: tuple[int, ...], config: ModelConfig, kind: FileType) -> NewTensor:
    """Returns the name, type and shape in a file of this type for a canonical tensor."""
    stored_name, form = gguf_name(name, config.architecture, config.layer_types)
    stored = form.shape(shape, config)
    wanted = BY_NAME[_wanted(stored_name, stored, config, kind)]
    return NewTensor(stored_name, fitting(wanted, stored), stored)


def _wanted(name: str, shape: tuple[int, ...], config: ModelConfig, kind: FileType) -> str:
    """Returns the preferred type of a tensor, before its rows are checked against the block size. llama.cpp requires
    F32 for norms, convolution, router and vectors."""
    if len(shape) < 2 or _ALWAYS_F32.fullmatch(name):
        return "F32"
    if name == "output.weight" or (name == "token_embd.weight" and config.tie_word_embeddings):
        return kind.head
    block = _BLOCK.fullmatch(name)
    if block is None:
        return kind.most
    if int(block[1]) >= config.num_hidden_layers:
        return kind.mtp
    more = block[2] in _SENSITIVE and _more_bits(int(block[1]), config.num_hidden_layers)
    return kind.sensitive if more else kind.most


def _more_bits(block: int, blocks: int) -> bool:
    """Returns True for the first and the last eighth of the layers, and every third layer in between."""
    eighth = blocks // 8
    return block < eighth or block >= 7 * blocks // 8 or (block - eighth) % 3 == 2


def fitting(type: BlockType, shape: tuple[int, ...]) -> BlockType:
    """Returns the type, or one with smaller blocks if the rows do not fit."""
    smaller = BY_NAME[_SMALLER_BLOCKS.get(type.name, "F16")]
    return next((one for one in (type, smaller) if shape[-1] % one.weights == 0), BY_NAME["F16"])


def _report_fallbacks(targets: Mapping[str, NewTensor], config: ModelConfig, kind: FileType) -> None:
    """Logs one line about all matrices whose rows do not fit the blocks of their type."""
    moved = [target for target in targets.values()
             if target.type.name != _wanted(target.name, target.shape, config, kind)]
    if moved:
        counts = Counter(target.type.name for target in moved)
        logger.warning("rows of %d tensors (such as %s, %d weights) do not fit the blocks of their type; written as %s",
                       len(moved), moved[0].name, moved[0].shape[-1],
                       ", ".join(f"{name} ({count})" for name, count in counts.items()))


# Data


@dataclass(frozen=True, slots=True)
class _SourceTensor:
    """A tensor on disk, and the canonical names of its parts."""

    names: tuple[str, ...]
    read: Callable[[], dict[str, torch.Tensor]]


def _sources(files: ModelFiles) -> Iterator[_SourceTensor]:
    """Yields the tensors in file order; everything but the data is checked. Matrices keep their stored dtype; matrices
    of a GGUF file become float32."""
    config = files.config
    if files.gguf is not None:
        for part in plan_gguf(files.gguf, config):
            yield _SourceTensor(part.target.names, partial(_read_gguf, part, config))
        return
    plan = plan_directory(files.path, config)
    if config.tie_word_embeddings and HEAD in plan:
        check_tied(plan)
    for name, stored in plan.items():
        if name != HEAD or not config.tie_word_embeddings:
            yield _SourceTensor(packed_parts(name) or (name,), partial(_read_directory, name, stored, config))


def _merged(sources: Iterable[_SourceTensor], lora: LoraMerge | None) -> Iterator[_SourceTensor]:
    """Yields the tensors with the low-rank terms of an adapter added."""
    for source in sources:
        yield source if lora is None else replace(source, read=partial(_read_merged, source, lora))


def _read_merged(source: _SourceTensor, lora: LoraMerge) -> dict[str, torch.Tensor]:
    return {name: lora.apply(name, tensor) for name, tensor in source.read().items()}


def _joined(sources: Iterable[_SourceTensor], config: ModelConfig) -> Iterator[_SourceTensor]:
    """Joins tensors that GGUF files of the model's family store as one."""
    waiting = dict[str, list[_SourceTensor]]()
    for source in sources:
        name = source.names[0]
        if not gguf_name(name, config.architecture, config.layer_types)[1].packed:
            yield source
            continue
        packed = packed_of(name) or name
        own = waiting.setdefault(packed, [])
        own.append(source)
        if {part for each in own for part in each.names} == {*packed_parts(packed)}:
            yield _SourceTensor((packed,), partial(_read_packed, packed, waiting.pop(packed)))


def _read_packed(name: str, sources: list[_SourceTensor]) -> dict[str, torch.Tensor]:
    found = {part: tensor for source in sources for part, tensor in source.read().items()}
    return {name: torch.cat([found[part] for part in packed_parts(name)])}


def _head_sources(files: ModelFiles) -> Iterator[_SourceTensor]:
    """Yields the tensors of the multi-token-prediction head."""
    config, parts = files.config, files.gguf_head()
    for part in parts:
        yield _SourceTensor(part.target.names, partial(_read_gguf, part, config))
    for name, stored in files.stored_head().items() if not parts else ():
        yield _SourceTensor(packed_parts(name) or (name,), partial(_read_directory, name, stored, config))


def _read_gguf(part: GgufSource, config: ModelConfig) -> dict[str, torch.Tensor]:
    return dict(read_gguf(part, config, "float32"))


def _read_directory(name: str, stored: Source, config: ModelConfig) -> dict[str, torch.Tensor]:
    dtype = TORCH_DTYPES[tensor_dtype(name, _STORED.get(stored.dtype, "float32"))]
    tensor = read_stored(name, stored, dtype, torch.device("cpu"))
    return split_packed(name, tensor, config) if packed_parts(name) else {name: tensor}


def _encoded(sources: Iterable[_SourceTensor], targets: Mapping[str, NewTensor], config: ModelConfig,
          progress: Progress | None, imatrix: ImportanceMatrix | None) -> Iterator[Iterator[Bytes]]:
    """Yields the bytes of each target, in order. A vector is stored as one row."""
    total = sum(target.nbytes for target in targets.values())
    done = 0
    pool = ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1))
    try:
        for source in sources:
            tensors = source.read()
            for name in source.names:
                form = PLAIN if name == ROPE_FACTORS else gguf_name(name, config.architecture, config.layer_types)[1]
                matrix = form.from_ours(tensors.pop(name), config).reshape(-1, targets[name].shape[-1])
                importance = imatrix.of(targets[name]) if imatrix else None
                yield quantize_in_pieces(targets[name].name, matrix, targets[name].type, pool, importance)
                done += targets[name].nbytes
                if progress is not None:
                    progress(done, total)
    finally:
        pool.shutdown(cancel_futures=True)
