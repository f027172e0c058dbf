"""Weights of bitsandbytes: 4 bits (nf4, fp4) in blocks, and 8 bits with a scale for each row.

4 bits: the matrix is one long row of weights, two in a byte, the first in the high bits. A block of weights (64, unless
the file has another size) has a factor (`absmax`), float32 or again in 8 bits with blocks of its own ("double
quantization"). A code, and a factor of 8 bits, is a place in a table. `quant_state`, JSON in a tensor of bytes, has the
shape and the sizes of blocks.
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
"""1 / 127, as bitsandbytes has it."""


@dataclass(frozen=True, slots=True, eq=False)
class Blocks4(PackedRows):
    """Rows of a matrix of 4 bits.

    codes: uint8, of the first block to the last one, two in a byte.
    factors: float32 [blocks].
    table: value of each code, float32 [16].
    block: weights of a block. skipped: weights before the first row, and of the first block.
    shape: that of the rows.
    """

    codes: Tensor
    factors: Tensor
    table: Tensor
    block: int
    skipped: int
    shape: tuple[int, int]

    def numbers(self) -> Tensor:
        """Returns the values, float32 [rows, columns]."""
        pairs = torch.stack((self.codes >> 4, self.codes & 15), -1).flatten()
        padded = torch.nn.functional.pad(pairs, (0, len(self.factors) * self.block - len(pairs)))
        values = self.table[padded.int()].view(-1, self.block).mul_(self.factors[:, None]).flatten()
        return values[self.skipped:self.skipped + math.prod(self.shape)].view(self.shape)


def _plan_blocks(tensors: Mapping[str, StoredTensor], quantization: Quantization, module: str) -> Plan:
    state = _state(tensors["state"])
    rows, columns = _pair(state)
    count, block = rows * columns, _block(state, "blocksize")
    blocks = -(-count // block)
    found = {"block": block, "columns": columns, "rows": rows}
    sizes = {"codes": -(-count // 2), "factors": blocks, "table": 16}
    if tensors["factors"].dtype == "U8":
        found |= {"factors": _block(state, "nested_blocksize"), "offset": _offset(state)}
        sizes |= {"nested_factors": -(-blocks // found["factors"]), "nested_table": 256}
    for role, size in sizes.items():
        given = math.prod(tensors[role].shape) if role in tensors else 0
        if given != size:
            raise ValueError(f"{role} of {given} instead of {size} numbers")
    return (rows, columns), found


def _state(stored: StoredTensor) -> Mapping[str, Any]:
    if stored.nbytes > _MAX_STATE:
        raise ValueError(f"a quant_state of {stored.nbytes} bytes")
    try:
        found = json.loads(bytes(stored.read().flatten().tolist()))
    except (ValueError, RecursionError) as error:
        raise ValueError("a quant_state that is not JSON") from error
    if not isinstance(found, dict):
        raise ValueError(f"the quant_state {show(found)}")
    return found


def _pair(state: Mapping[str, Any]) -> tuple[int, int]:
    match state.get("shape"):
        case [int(rows), int(columns)] if 0 < rows < 1 << 31 and 0 < columns < 1 << 31:
            return rows, columns
    raise ValueError(f"the shape {show(state.get('shape'))} in its quant_state; only matrices can be read")


def _block(state: Mapping[str, Any], key: str) -> int:
    found = state.get(key)
    if found not in _BLOCKS:
        raise ValueError(f"{key} {show(found)} in its quant_state")
    return int(found)


def _offset(state: Mapping[str, Any]) -> float:
    found = state.get("nested_offset")
    if not isinstance(found, int | float) or not abs(found) < 1e30:
        raise ValueError(f"nested_offset {show(found)} in its quant_state")
    return float(found)


def _read_blocks(tensor: PackedTensor, first: int, end: int) -> Blocks4:
    own, columns, block = tensor.tensors, tensor.settings["columns"], tensor.settings["block"]
    start, stop = first * columns // block, -(-end * columns // block)
    last = min(stop * block, tensor.settings["rows"] * columns)
    codes = _flat(own["codes"]).rows(start * block // 2, -(-last // 2)).read()
    factors = _flat(own["factors"]).rows(start, stop).read()
    if factors.dtype == torch.uint8:
        factors = _nested(tensor, factors, start)
    return Blocks4(codes, factors.float(), own["table"].read().float().flatten(), block,
                   first * columns - start * block, (end - first, columns))


def _flat(stored: StoredTensor) -> StoredTensor:
    """Returns a tensor without its axes."""
    return replace(stored, shape=(math.prod(stored.shape),))


def _nested(tensor: PackedTensor, codes: Tensor, start: int) -> Tensor:
    """Returns the factors of blocks from `start` on, float32."""
    block = tensor.settings["factors"]
    factors = tensor.tensors["nested_factors"].read().float().flatten()
    table = tensor.tensors["nested_table"].read().float().flatten()
    own = torch.arange(start, start + len(codes)) // block
    return table[codes.int()].mul_(factors[own]).add_(tensor.settings["offset"])


@dataclass(frozen=True, slots=True, eq=False)
class Bytes(PackedRows):
    """Rows of a matrix of 8 bits. codes: int8 [rows, columns]. scales: float32 [rows], of the largest code."""

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
