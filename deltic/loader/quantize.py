"""Weights that are quantized after loading: in memory what a file of `deltic convert` would hold, without the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any, Final

import numpy as np
from torch import Tensor

from deltic.config import ModelConfig, available_cores
from deltic.loader import fp8
from deltic.loader.fp8 import Float8
from deltic.loader.gguf.blocks import BY_NAME, BlockType
from deltic.loader.gguf.convert import FILE_TYPES, target_of
from deltic.loader.gguf.quantize import quantize_in_pieces
from deltic.loader.names import EMBEDDING, HEAD, expected_tensors
from deltic.loader.safetensors import Progress
from deltic.ops.quantized import PackedForm, QTensor, host_form, read_from
from deltic.ops.types import Block, Weight

SCHEMES: Final[Mapping[str, str]] = {"q8_0": "Q8_0", "q4_k": "Q4_K_M"}
"""The type of file (of FILE_TYPES) whose types the matrices get."""
FP8: Final = "fp8"
"""The scheme of float8, which no file has, and CPUs do not know. Embedding, head and what decays and gates of heads are
made of (a few rows) get 8 bits as of q8_0, which are more precise."""
FP8_TYPE: Final = BlockType("FP8", -1, fp8.GROUP, fp8.BLOCK_BYTES, True)
"""Of the blocks of float8, which GGUF files have not."""
_PLAIN: Final = ("F32", "F16", "BF16")
_OF_HEADS: Final = (".in_proj_a.weight", ".in_proj_b.weight", ".in_proj_ba.weight")


def quantize_weights(weights: dict[str, Tensor], scheme: str, config: ModelConfig,
                     progress: Progress | None = None) -> dict[str, Weight]:
    """The model's weights with matrices quantized as SCHEMES says, for the CPU's compiled kernels; all else as it was,
    and so are matrices whose rows fit no blocks. Value heads keep our order.

    Tensors are taken out of `weights` one after another, so that memory stays near the larger of both sizes.
    `progress(done, total)` counts bytes of what was there. Raises ModelError naming a tensor with values that its type
    cannot hold.
    """
    total, done = sum(tensor.nbytes for tensor in weights.values()), 0

    def popped() -> Iterator[tuple[str, Tensor]]:
        nonlocal done
        for name in list(weights):
            done += weights[name].nbytes
            yield name, weights.pop(name)
            if progress is not None:
                progress(done, total)

    return quantize_tensors(popped(), scheme, config)


def quantize_tensors(tensors: Iterator[tuple[str, Tensor | Float8]], scheme: str, config: ModelConfig,
                     form: PackedForm | None = None) -> dict[str, Weight]:
    """As `quantize_weights`, of tensors that come one after another, of which one is here at a time, in `form`. What it
    does not serve stays as it was. scheme: one of SCHEMES, or FP8, with which weights in float8 stay what they are."""
    result, kept = dict[str, Weight](), form or host_form()
    with ThreadPoolExecutor(available_cores()) as pool:
        while (item := next(tensors, None)) is not None:
            name, tensor = item
            type = _type(name, tuple(tensor.shape), scheme, config)
            plain = type.name in _PLAIN or not kept.serves(type.name, tensor.shape[-1])
            if isinstance(tensor, Float8) and (plain or type is not FP8_TYPE):
                tensor = tensor.numbers().to(kept.dtype)
            if isinstance(tensor, Float8):
                result[name] = _packed(tensor.shape, type, kept, _as_it_is(tensor))
            elif plain:
                result[name] = tensor
            else:
                result[name] = _packed(tensor.shape, type, kept, _quantizing(name, tensor.flatten(0, -2), type, pool))
            del item, tensor  # no name here keeps a tensor beyond its turn
    return {name: result[name] for name in expected_tensors(config) if name in result} | result


def _type(name: str, shape: tuple[int, ...], scheme: str, config: ModelConfig) -> BlockType:
    """What a tensor is to become."""
    type = target_of(name, shape, config, FILE_TYPES[SCHEMES["q8_0" if scheme == FP8 else scheme]]).type
    precise = name in (EMBEDDING, HEAD) or name.endswith(_OF_HEADS)
    return type if scheme != FP8 or type.name in _PLAIN or precise else FP8_TYPE


def quantize_tower(weights: Mapping[str, Block]) -> dict[str, Block]:
    """A vision tower's weights, on the CPU, with matrices in 8 bits (Q8_0) where their rows fit its blocks: they are
    few, and pictures suffer from fewer bits more than words do."""
    type, form = BY_NAME["Q8_0"], host_form()
    with ThreadPoolExecutor(available_cores()) as pool:
        return {name: quantized(name, matrix, type, pool, form)
                if isinstance(tensor, Tensor) and tensor.dim() > 1 and "pos_embed" not in name
                and (matrix := tensor.flatten(1)).shape[1] % type.weights == 0 else tensor
                for name, tensor in weights.items()}


def _packed(shape: tuple[int, ...], type: BlockType, form: PackedForm, read: Callable[[int, int], Any]) -> Weight:
    """A matrix, or a stack of some, whose blocks `read` gives, one matrix behind the other."""
    *_, rows, columns = shape
    size = type.size(columns)
    if len(shape) == 2:
        return form.pack(type.name, type.id, rows, columns, size, read)
    if form.stack:
        return form.stack(type.name, type.id, shape[0], rows, columns, size, read)
    return tuple(form.pack(type.name, type.id, rows, columns, size, partial(read_from, read, index * rows * size))
                 for index in range(shape[0]))


def _as_it_is(weight: Float8) -> Callable[[int, int], Any]:
    """What reads bytes of its blocks; nothing is rounded."""
    blocks = weight.blocks().flatten()
    return lambda start, count: blocks[start:start + count]


def quantized(name: str, matrix: Tensor, type: BlockType, pool: Executor, form: PackedForm) -> QTensor:
    """A matrix of any float type in blocks of this type. ModelError names it if it has values that these cannot hold.
    """
    found = _packed(matrix.shape, type, form, _quantizing(name, matrix, type, pool))
    assert isinstance(found, QTensor)
    return found


def _quantizing(name: str, matrix: Tensor, type: BlockType, pool: Executor) -> Callable[[int, int], Any]:
    """What reads bytes of the matrix as blocks of this type, whole rows at a time."""
    row_bytes = type.size(matrix.shape[1])

    def read(start: int, count: int) -> Any:
        first = start // row_bytes
        rows = matrix[first:first + count // row_bytes]
        if type is FP8_TYPE:
            return fp8.quantize_fp8(name, rows).flatten()
        return np.concatenate([*quantize_in_pieces(name, rows.cpu(), type, pool)])

    return read
