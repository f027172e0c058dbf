"""Weights of bitsandbytes: 4 bits (nf4, fp4) in blocks, and 8 bits with a scale for each row.

4 bits: the matrix is one long row of weights, two in a byte, the first in the high bits. Each block of weights (64,
unless the file states another size) has a factor (`absmax`), in float32 or again in 8 bits with blocks of its own
("double quantization"). A code, and an 8-bit factor, is an index into a table. `quant_state`, JSON in a tensor of
bytes, holds the shape and the block sizes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from deltic.config.quantization import Quantization
from deltic.errors import ModelError, show
from deltic.loader.tensors import PackedRows, PackedTensor, Plan, Role, StoredTensor, WeightFormat

_METHODS: Final = ("bitsandbytes",)
_MAX_STATE: Final = 1 << 16
_BLOCKS: Final = tuple(1 << power for power in range(4, 17))
_PER_ROW: Final = 7.874015718698502e-3
"""1 / 127, as rounded by bitsandbytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Blocks4(PackedRows):
    """Rows of a matrix of 4 bits.

    codes: uint8, from the first block to the last one, two in a byte.
    factors: float32 [blocks].
    table: value of each code, float32 [16].
    block: weights of a block. skipped: weights of the first block before the first row.
    shape: shape of the rows.
    """

    codes: Tensor
    factors: Tensor
    table: Tensor
    block: int
    skipped: int
    shape: tuple[int, ...]

    def numbers(self) -> Tensor:
        """Returns the values, float32 [rows, columns]."""
        pairs = torch.stack((self.codes >> 4, self.codes & 15), -1).flatten()
        padded = torch.nn.functional.pad(pairs, (0, len(self.factors) * self.block - len(pairs)))
        values = self.table[padded.int()].view(-1, self.block).mul_(self.factors[:, None]).flatten()
        return values[self.skipped:self.skipped + math.prod(self.shape)].view(self.shape)


def _plan_blocks(tensors: Mapping[str, StoredTensor], quantization: Quantization, module: str) -> Plan:
    """Returns a single row as the shape: the true shape is in the quant_state, which is not read here."""
    return (2 * math.prod(tensors["codes"].shape),), {}


@dataclass(frozen=True, slots=True)
class _QuantState:
    """quant_state. block: weights of a block. outer: factors in a block of factors. offset: added to the factors."""

    block: int
    outer: int
    offset: float


def _state(tensor: PackedTensor) -> _QuantState:
    """Reads the quant_state, and compares it with the tensors' sizes. Raises ModelError naming the file and the key."""
    own = tensor.tensors
    try:
        found = _parsed(own["state"])
        shape, block = found.get("shape"), _size(found, "blocksize")
        if not isinstance(shape, list) or not all(type(size) is int and 0 < size < 1 << 40 for size in shape):
            raise ValueError(f"shape {show(shape)}")
        count = math.prod(shape)
        sizes = {"codes": -(-count // 2), "factors": -(-count // block), "table": 16}
        outer, offset = 1, found.get("nested_offset", 0.0)
        if own["factors"].dtype == "U8":
            outer = _size(found, "nested_blocksize")
            sizes |= {"nested_factors": -(-sizes["factors"] // outer), "nested_table": 256}
        for role, size in sizes.items():
            given = math.prod(own[role].shape) if role in own else 0
            if given != size:
                raise ValueError(f"{role} of {given} numbers for the shape {show(shape)}")
        if not isinstance(offset, int | float) or not abs(offset) < 1e30:
            raise ValueError(f"nested_offset {show(offset)}")
    except ValueError as error:
        raise ModelError(f"{tensor.path}: a quant_state of bitsandbytes does not belong to its weight: {error}; "
                         "download the file again") from error
    return _QuantState(block, outer, float(offset))


def _parsed(stored: StoredTensor) -> Mapping[str, Any]:
    if stored.nbytes > _MAX_STATE:
        raise ValueError(f"it has {stored.nbytes} bytes")
    try:
        found = json.loads(bytes(stored.read().flatten().tolist()))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError(f"it is {show(found)}")
    return found


def _size(state: Mapping[str, Any], key: str) -> int:
    found = state.get(key)
    if not isinstance(found, int) or found not in _BLOCKS:
        raise ValueError(f"{key} {show(found)}")
    return found


def _read_blocks(tensor: PackedTensor, first: int, end: int) -> Blocks4:
    own, state, row = tensor.tensors, _state(tensor), math.prod(tensor.shape[1:])
    start, stop = first * row // state.block, -(-end * row // state.block)
    last = min(stop * state.block // 2, own["codes"].nbytes)
    codes = _flat(own["codes"]).rows(start * state.block // 2, last).read()
    factors = _flat(own["factors"]).rows(start, stop).read()
    if factors.dtype == torch.uint8:
        outer, table = (own[role].read().flatten() for role in ("nested_factors", "nested_table"))
        places = torch.arange(start, stop) // state.outer
        factors = table[factors.int()].mul_(outer[places]).add_(state.offset)
    return Blocks4(codes, factors.float(), own["table"].read().flatten(), state.block,
                   first * row - start * state.block, (end - first, *tensor.shape[1:]))


def _flat(stored: StoredTensor) -> StoredTensor:
    """Returns the tensor flattened to one axis."""
    return replace(stored, shape=(math.prod(stored.shape),))


@dataclass(frozen=True, slots=True, eq=False)
class Bytes(PackedRows):
    """Rows of a matrix of 8 bits. codes: int8 [rows, columns]. scales: float32 [rows], the value of code 127."""

    codes: Tensor
    scales: Tensor

    def numbers(self) -> Tensor:
        """Returns the values, float32 [rows, columns]."""
        return self.codes.float().mul_(self.scales[:, None]).mul_(_PER_ROW)


def _plan_bytes(tensors: Mapping[str, StoredTensor], quantization: Quantization, module: str) -> Plan:
    shape, scales = tensors["codes"].shape, tensors["scales"].shape
    if len(shape) != 2 or math.prod(scales) != shape[0]:
        raise ValueError(f"codes of shape {list(shape)} and SCB of shape {list(scales)}")
    return shape, {}


def _read_bytes(tensor: PackedTensor, first: int, end: int) -> Bytes:
    own = tensor.tensors
    if "layout" in own and own["layout"].read().any():
        raise ModelError(f"{tensor.path}: weight_format {own['layout'].read().tolist()} of bitsandbytes is not "
                         "supported, only 0 (rows): save the model with a newer version of bitsandbytes")
    return Bytes(own["codes"].rows(first, end).read(), _flat(own["scales"]).rows(first, end).read())


FORMATS: Final = (
    WeightFormat(
        "bitsandbytes 4 bits",
        {"codes": Role(("weight",), ("U8",)),
         "factors": Role(("weight.absmax",), ("F32", "F16", "BF16", "U8")),
         "table": Role(("weight.quant_map",), ("F32",)),
         "state": Role(("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4"), ("U8",)),
         "nested_factors": Role(("weight.nested_absmax",), ("F32",), required=False),
         "nested_table": Role(("weight.nested_quant_map",), ("F32",), required=False)},
        _plan_blocks, _read_blocks, _METHODS),
    WeightFormat(
        "bitsandbytes 8 bits",
        {"codes": Role(("weight",), ("I8",)), "scales": Role(("SCB",), ("F32",)),
         "layout": Role(("weight_format",), ("U8",), required=False)},
        _plan_bytes, _read_bytes, _METHODS))
