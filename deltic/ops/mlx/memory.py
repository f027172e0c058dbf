"""Unified memory: MLX arrays and torch tensors on the same memory, without a copy.

MLX arrays are immutable, but their memory is not: the host writes to it between steps, and graphs that are built later
read the new values. So the cache, the tiers and the sampler work on torch tensors as on any CPU.
"""

from __future__ import annotations

import re
from typing import Any
from weakref import WeakValueDictionary

import mlx.core as mx
import numpy as np
import torch
from torch import Tensor

Array = Any
"""MLX's array type `mx.array`. Type checkers know it only if the package is installed."""

_DTYPES = {
    torch.float32: mx.float32,
    torch.bfloat16: mx.bfloat16,
    torch.float16: mx.float16,
    torch.uint8: mx.uint8,
    torch.uint32: mx.uint32,
    torch.int64: mx.int64,
    torch.bool: mx.bool_,
}
_CPU = (1, 0)
"""DLPack's device number of host memory."""


class _Memory(np.ndarray[Any, Any]):
    """A view of an array's memory. torch keeps it alive while a tensor uses it. whole: the array."""

    whole: Array


_whole: WeakValueDictionary[int, _Memory] = WeakValueDictionary()
"""The memory behind tensors, by address."""


def dtype_of(dtype: torch.dtype) -> mx.Dtype:
    """Returns MLX's equivalent of a torch dtype."""
    return _DTYPES[dtype]


def share(array: Array) -> Tensor:
    """Returns a tensor on the memory of an array, which `array_of` can find later. Waits for the array."""
    plain = mx.contiguous(array)
    if array.dtype == mx.bfloat16:  # numpy has no bfloat16
        plain = plain.view(mx.uint16)
    mx.eval(plain)
    memory = np.array(plain, copy=False).view(_Memory)
    memory.whole = plain.view(array.dtype)
    mx.eval(memory.whole)
    tensor = torch.from_numpy(memory)
    if tensor.numel():
        _whole[tensor.data_ptr()] = memory
    return tensor.view(torch.bfloat16) if array.dtype == mx.bfloat16 else tensor


def reserve(shape: tuple[int, ...], dtype: torch.dtype, device: str | torch.device = "cpu") -> Tensor:
    """Returns zeros in MLX memory. Raises MemoryError if the allocation fails."""
    try:
        torch.empty(shape, dtype=dtype)  # on a CPU, MLX ends the process instead of raising an error
        return share(mx.zeros(shape, dtype_of(dtype)))
    except RuntimeError as error:
        asked = re.search(r"(\d+) bytes", str(error))
        raise MemoryError(f"tried to allocate {asked[1]} bytes: {error}" if asked else str(error)) from error


def copied(tensor: Tensor) -> Array:
    """Returns a copy of a tensor as an array."""
    plain = tensor.detach().contiguous()
    if plain.dtype == torch.bfloat16:
        return _evaluated(mx.array(plain.view(torch.uint16).numpy()).view(mx.bfloat16))
    return mx.array(plain.numpy())


def array_of(tensor: Tensor) -> Array:
    """Returns the array on a tensor's memory if that is MLX memory and the tensor is all of it or one of its leading
    entries; otherwise a copy."""
    if not tensor.numel():
        return mx.zeros(tensor.shape, dtype_of(tensor.dtype))
    memory = _whole.get(tensor.untyped_storage().data_ptr())
    if memory is None or not tensor.is_contiguous() or tensor.dtype == torch.float64:
        return copied(tensor)
    whole = memory.whole
    if whole.dtype != dtype_of(tensor.dtype):
        return copied(tensor)
    if tensor.numel() == whole.size:
        return _evaluated(whole.reshape(tensor.shape))
    if tuple(tensor.shape) != tuple(whole.shape[1:]):
        return copied(tensor)
    index = tensor.storage_offset() // tensor.numel()
    return _evaluated(whole[index:index + 1].squeeze(0))  # a plain index would copy


def _evaluated(array: Array) -> Array:
    """Computes the array and returns it, because only the thread that built a graph can compute it."""
    mx.eval(array)
    return array


def whole_of(tensors: list[Tensor]) -> Array | None:
    """Returns the array with exactly these tensors as its leading entries, in order, or None."""
    memory = _whole.get(tensors[0].untyped_storage().data_ptr())
    if memory is None or memory.whole.shape != (len(tensors), *tensors[0].shape):
        return None
    start, size = memory.__array_interface__["data"][0], tensors[0].nbytes
    own = all(tensor.data_ptr() == start + index * size for index, tensor in enumerate(tensors))
    return memory.whole if own else None


def seen(array: Array) -> Tensor:
    """Returns a tensor on the memory of a result array, which lives as long as the tensor."""
    found: Tensor = torch.utils.dlpack.from_dlpack(array.__dlpack__(dl_device=_CPU))
    return found
