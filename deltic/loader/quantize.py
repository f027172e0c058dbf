"""Quantizes weights during loading, to the types that `deltic convert` would write, or to types that only kernels use.
Also packs weights that are stored quantized."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from math import prod
from typing import Any, Final

import numpy as np
from torch import Tensor

from deltic.config import ModelConfig, available_cores
from deltic.loader.formats.fp8 import FLOAT8_BLOCK_BYTES, GROUP, Float8, quantize_fp8
from deltic.loader.four_bits import TYPES as FOUR_BITS
from deltic.loader.four_bits import InexactError
from deltic.loader.gguf.blocks import BY_NAME, BlockType
from deltic.loader.gguf.convert import FILE_TYPES, target_of
from deltic.loader.gguf.quantize import quantize_in_pieces
from deltic.loader.names import EMBEDDING, HEAD, expected_tensors, is_stack
from deltic.loader.safetensors import StoredWeight
from deltic.loader.stored_blocks import StoredBlocks
from deltic.ops.memory import empty_cache
from deltic.ops.quantized import PackedForm, QTensor, host_form, read_from
from deltic.ops.slices import slice_unit
from deltic.ops.types import Block, Weight

SCHEMES: Final[Mapping[str, str]] = {"q8_0": "Q8_0", "q4_k": "Q4_K_M", "nvfp4": "Q4_K_M", "int4": "Q4_K_M"}
"""Scheme -> file type (of FILE_TYPES) whose types the matrices get."""
_INSTEAD_OF_Q4_K: Final[Mapping[str, BlockType]] = {"nvfp4": FOUR_BITS["NVFP4"], "int4": FOUR_BITS["INT4_128"]}
"""Scheme -> type that matrices get instead of Q4_K."""
FP8: Final = "fp8"
"""The scheme of float8, on GPUs only. Embedding, lm_head and the small projections of decays and betas get Q8_0, which
is more precise."""
STORED: Final = "stored"
"""The scheme that keeps weights that are stored quantized, and quantizes no others."""
FP8_TYPE: Final = BlockType("FP8", -1, GROUP, FLOAT8_BLOCK_BYTES, True)
"""Float8 blocks, which GGUF files do not have."""
_PLAIN: Final = ("F32", "F16", "BF16")
_PRECISE: Final = (".in_proj_a.weight", ".in_proj_b.weight", ".in_proj_ba.weight")

logger = logging.getLogger(__name__)


def quantize_tensors(tensors: Iterable[tuple[str, StoredWeight]], scheme: str, config: ModelConfig,
                     form: PackedForm | None = None) -> dict[str, Weight]:
    """Quantizes tensors like `quantize_parts`, whole on one device, by default for the CPU's compiled kernels."""
    return quantize_parts(map(_on_first, tensors), scheme, config, [form or host_form()])[0]


def _on_first(item: tuple[str, StoredWeight]) -> tuple[int, str, StoredWeight]:
    return 0, *item


def quantize_parts(tensors: Iterator[tuple[int, str, StoredWeight | QTensor]], scheme: str, config: ModelConfig,
                   forms: Sequence[PackedForm]) -> list[dict[str, Weight]]:
    """Quantizes each device's part of matrices by a scheme of SCHEMES, or by FP8 or STORED, which keep float8 weights.
    Other tensors stay unchanged, as do matrices whose rows fit no blocks or whose type the form does not serve. Value
    heads keep their order. Matrices that are already packed are kept, and stored blocks too unless they are inexact.

    Holds one input tensor in memory at a time. Raises ModelError naming a tensor with values that its type cannot hold.
    """
    result: list[dict[str, Weight]] = [{} for _ in forms]
    shapes = expected_tensors(config)
    with ThreadPoolExecutor(available_cores()) as pool:
        while (item := next(tensors, None)) is not None:
            device, name, tensor = item
            kept = forms[device]
            if isinstance(tensor, StoredBlocks | QTensor):
                result[device][name] = tensor if isinstance(tensor, QTensor) else _kept(name, tensor, kept.of(name))
                continue
            type = _target_type(name, shapes.get(name, tuple(tensor.shape)), scheme, config)
            stays = scheme == STORED and not isinstance(tensor, Float8)
            plain = stays or type.name in _PLAIN or not kept.serves(type.name, tensor.shape[-1])
            if isinstance(tensor, Float8) and (plain or type is not FP8_TYPE):
                tensor = tensor.numbers().to(kept.dtype)
            if isinstance(tensor, Float8):
                weight = _packed(tensor.shape, type, kept.of(name), _float8_reader(tensor))
            elif plain:
                weight = kept.put(name, tensor)
            else:
                weight = _packed(
                    tensor.shape, type, kept.of(name), _quantizing_reader(name, tensor.flatten(0, -2), type, pool))
            result[device][name] = weight
            del item, tensor  # frees the tensor before the next one is loaded
            if kept.device.type == "cuda":  # otherwise smaller matrices would stay in parts of its memory
                empty_cache({form.device for form in forms})
    return [{name: own[name] for name in shapes if name in own} | own for own in result]


def quantized_units(config: ModelConfig, scheme: str, form: PackedForm) -> dict[str, int]:
    """Returns, for each `down` matrix of a feed-forward that a scheme quantizes, the unit in columns of its slices."""
    found = dict[str, int]()
    for name, shape in expected_tensors(config).items():
        if name.endswith(".down_proj.weight") and not is_stack(name):
            type = _target_type(name, shape, scheme, config)
            if type.name not in _PLAIN and form.serves(type.name, shape[-1]):
                found[name] = slice_unit(type.name, shape[-1])
    return found


def quantized_bytes(config: ModelConfig, scheme: str, plain: Mapping[str, int],
                    packed: Callable[[str, int, int], int | None] | None = None) -> dict[str, int]:
    """Returns the bytes of each tensor of a model that is quantized by a scheme. plain: bytes of the unquantized
    tensors. packed(type, rows, columns): returns the bytes of a matrix in the form of a device, or None if it stays
    plain. Default: the bytes in a file."""
    found = dict(plain)
    for name, shape in expected_tensors(config).items():
        type = _target_type(name, shape, scheme, config)
        if type.name not in _PLAIN and shape[-1] % type.weights == 0:
            size = packed(type.name, prod(shape[:-1]), shape[-1]) if packed else type.size(prod(shape))
            found[name] = plain[name] if size is None else size
    return found


def _target_type(name: str, shape: tuple[int, ...], scheme: str, config: ModelConfig) -> BlockType:
    """Returns the type that a tensor gets under the scheme."""
    float8 = scheme in (FP8, STORED)
    file_type = FILE_TYPES[SCHEMES["q8_0" if float8 else scheme]]
    type = target_of(name, shape, config, file_type).type
    precise = name in (EMBEDDING, HEAD) or name.endswith(_PRECISE)
    if float8:
        return FP8_TYPE if type.name not in _PLAIN and not precise else type
    return _INSTEAD_OF_Q4_K.get(scheme, type) if type.name == "Q4_K" else type


def quantize_tower(weights: Mapping[str, Block]) -> dict[str, Block]:
    """Quantizes the matrices of a vision tower to Q8_0 on the CPU, if their rows fit its blocks. Towers are small and
    lose more quality with fewer bits than text models do."""
    type, form = BY_NAME["Q8_0"], host_form()
    found = dict(weights)
    with ThreadPoolExecutor(available_cores()) as pool:
        for name, tensor in weights.items():
            if not isinstance(tensor, Tensor) or tensor.dim() < 2 or "pos_embed" in name:
                continue
            matrix = tensor.flatten(1)
            if matrix.shape[1] % type.weights == 0:
                found[name] = quantized(name, matrix, type, pool, form)
    return found


def _packed(shape: tuple[int, ...], type: BlockType, form: PackedForm, read: Callable[[int, int], Any]) -> Weight:
    """Packs a matrix, or a stack. `read` returns bytes of the blocks, one matrix after another."""
    *_, rows, columns = shape
    size = type.size(columns)
    if len(shape) == 2:
        return form.pack(type.name, type.id, rows, columns, size, read)
    if form.stack:
        return form.stack(type.name, type.id, shape[0], rows, columns, size, read)
    return tuple(form.pack(type.name, type.id, rows, columns, size, partial(read_from, read, index * rows * size))
                 for index in range(shape[0]))


def _kept(name: str, weight: StoredBlocks, form: PackedForm) -> Weight:
    """Packs stored blocks; dequantizes a weight that blocks cannot hold without rounding."""
    try:
        return _packed(weight.shape, weight.type, form, weight.read)
    except InexactError as error:
        logger.warning("tensor %r is dequantized, because the kernels know no %s with %s", name, weight.type.name,
                       error)
        return weight.numbers().to(form.device)


def _float8_reader(weight: Float8) -> Callable[[int, int], Any]:
    """Returns a reader of the weight's blocks, without rounding."""
    blocks = weight.blocks().flatten()
    return lambda start, count: blocks[start:start + count]


def quantized(name: str, matrix: Tensor, type: BlockType, pool: Executor, form: PackedForm) -> QTensor:
    """Quantizes a float matrix. Raises ModelError naming the matrix for values that the type cannot hold."""
    found = _packed(matrix.shape, type, form, _quantizing_reader(name, matrix, type, pool))
    assert isinstance(found, QTensor)
    return found


def _quantizing_reader(name: str, matrix: Tensor, type: BlockType, pool: Executor) -> Callable[[int, int], Any]:
    """Returns a reader that quantizes whole rows on demand."""
    row_bytes = type.size(matrix.shape[1])

    def read(start: int, count: int) -> Any:
        first = start // row_bytes
        rows = matrix[first:first + count // row_bytes]
        if type is FP8_TYPE:
            return quantize_fp8(name, rows).flatten()
        return np.concatenate([*quantize_in_pieces(name, rows.cpu(), type, pool)])

    return read
