"""Weights that are quantized after loading: in memory what a file of `deltic convert` would hold, without the file."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, Final

import numpy as np
from torch import Tensor

from deltic.config import ModelConfig, available_cores
from deltic.ops.memory import Arena
from deltic.ops.qtensor import QTensor, pack_rows
from deltic.weights.gguf.blocks import BlockType
from deltic.weights.gguf.convert import FILE_TYPES, target_of
from deltic.weights.gguf.quantize import quantize_in_pieces
from deltic.weights.safetensors import Progress

SCHEMES: Final[Mapping[str, str]] = {"q8_0": "Q8_0", "q4_k": "Q4_K_M"}
"""The type of file (of FILE_TYPES) whose types the matrices get."""
_PLAIN: Final = ("F32", "F16", "BF16")


def quantize_weights(weights: dict[str, Tensor], scheme: str, config: ModelConfig,
                     progress: Progress | None = None) -> dict[str, Tensor | QTensor]:
    """The model's weights, which must be on the CPU, with matrices quantized as SCHEMES says; all else as it was, and
    so are matrices whose rows fit no blocks. Value heads keep our order. Needs the compiled kernels.

    Tensors are taken out of `weights` one after another, so that memory stays near the larger of both sizes.
    `progress(done, total)` counts bytes of what was there. Raises ModelError naming a tensor with values that its type
    cannot hold.
    """
    kind = FILE_TYPES[SCHEMES[scheme]]
    total, done = sum(tensor.nbytes for tensor in weights.values()), 0
    result, arena = dict[str, Tensor | QTensor](), Arena()
    with ThreadPoolExecutor(available_cores()) as pool:
        for name in list(weights):
            done += weights[name].nbytes
            type = target_of(name, tuple(weights[name].shape), config, kind).type
            # no name here keeps a tensor beyond its turn
            result[name] = (weights.pop(name) if type.name in _PLAIN
                            else _packed(name, weights.pop(name), type, pool, arena))
            if progress is not None:
                progress(done, total)
    return result


def _packed(name: str, matrix: Tensor, type: BlockType, pool: Executor, arena: Arena) -> QTensor:
    rows, columns = matrix.shape
    row_bytes = type.size(columns)

    def read(start: int, count: int) -> Any:
        first = start // row_bytes
        return np.concatenate([*quantize_in_pieces(name, matrix[first:first + count // row_bytes], type, pool)])

    return pack_rows(type.name, type.id, rows, columns, row_bytes, read, arena)
