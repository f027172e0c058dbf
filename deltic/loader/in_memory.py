"""Weights that a caller hands over as tensors, in the form in which those of files are found."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from deltic.errors import ConfigError, show
from deltic.loader.files import ITEM_BYTES, InMemory, StoredTensor, with_scales

PLACE: Final = Path("<weights in memory>")
"""Stands for the directory of a model that has none."""
_DTYPES: Final = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float8_e4m3fn: "F8_E4M3"}


def in_memory(weights: Any) -> InMemory:
    """The tensors by the names that they are given under, which are those of a checkpoint's files.

    ConfigError for what is no mapping of names to dense tensors; names, shapes and dtypes are checked as those of
    files are.
    """
    if not isinstance(weights, Mapping) or not weights:
        raise ConfigError(f"weights must map tensor names to tensors, as state_dict() does, not {show(weights)}",
                          "weights")
    return InMemory(with_scales({name: _stored(name, tensor) for name, tensor in weights.items()}))


def _stored(name: Any, tensor: Any) -> StoredTensor:
    if not isinstance(name, str):
        raise ConfigError(f"weights: names must be text, not {show(name)}", "weights")
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_meta:
        raise ConfigError(f"weights[{name[:200]!r}] must be a dense torch.Tensor with data, not {show(tensor)}",
                          "weights")
    dtype = _DTYPES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
    size = tensor.numel() * ITEM_BYTES.get(dtype, tensor.itemsize)
    return StoredTensor(PLACE, dtype, tuple(tensor.shape), 0, size, data=tensor)
