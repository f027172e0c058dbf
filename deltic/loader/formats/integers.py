"""Integer codes in words of 32 bits: `pack-quantized` of compressed-tensors, GPTQ, AWQ, and AutoRound's files of these.

A weight is (code - zero) * scale, with a zero and a scale for each group of columns. Codes and zeros are streams of
bits, lowest first: `bits` words hold 32 codes, and a code may span two words. For a matrix [rows, columns]:

| | codes | zeros | scales |
|---|---|---|---|
| pack-quantized | [rows, words of columns] | [words of rows, groups]; if absent, the middle code | [rows, groups] |
| GPTQ | [words of columns, rows] | [groups, words of rows]; version 1 stores zero - 1 | [groups, rows] |
| AWQ | [columns, words of rows], eight codes in AWQ_ORDER | [groups, words of rows], like codes | [groups, rows] |

Groups are consecutive and have the same number of columns, unless the file lists the group of each column (`g_idx`).
`int-quantized` of compressed-tensors has a signed byte for each code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from deltic.config.quantization import Quantization
from deltic.errors import ModelError
from deltic.loader.four_bits import int4_blocks, int4_type
from deltic.loader.gguf.blocks import BlockType
from deltic.loader.tensors import PackedRows, PackedTensor, Plan, Role, Shape, StoredTensor, WeightFormat

WORD: Final = 32
"""Bits of a word."""
AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""The position of each of eight codes in the stream of AWQ."""
FLOATS: Final = ("F16", "BF16", "F32")
_BITS: Final = (4, 8, 3, 2, 5, 6, 7)


@dataclass(frozen=True, slots=True, eq=False)
class Integers(PackedRows):
    """Rows of a matrix of integers.

    codes: uint8 [rows, columns].
    scales: as stored, [rows, groups].
    zeros: uint8 [rows, groups], or one zero for all.
    groups: the group of each column, int64 [columns]; None: groups are consecutive and of equal size.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | int
    groups: Tensor | None = None

    def numbers(self) -> Tensor:
        """Returns the values, float32 [rows, columns]."""
        scales = self.scales.float()
        zeros = self.zeros if isinstance(self.zeros, int) else self.zeros.float()
        if self.groups is not None:  # index_select is the fastest way, for floats
            scales = scales.index_select(1, self.groups)
            zeros = zeros if isinstance(zeros, int) else zeros.index_select(1, self.groups)
        values: Tensor = self.codes.float().unflatten(1, (scales.shape[1], -1))
        values -= zeros if isinstance(zeros, int) else zeros[..., None]
        return values.mul_(scales[..., None]).flatten(1)

    def blocks(self) -> Tensor:
        """Returns blocks of INT4. Codes must be below 16."""
        return int4_blocks(self.codes[:, ::2] | self.codes[:, 1::2] << 4, self.scales, self.zeros)


def _blocks(tensor: PackedTensor) -> BlockType | None:
    if tensor.settings["bits"] != 4 or _groups(tensor) is not None:
        return None
    return int4_type(tensor.settings["columns"], tensor.settings["groups"])


def unpack(stream: Tensor, bits: int, first: int, end: int) -> Tensor:
    """Returns the codes [first, end) of each row of a stream, int32 [rows, words], as uint8 [rows, end - first]."""
    start = first // WORD * WORD
    octets = _octets(stream, bits, start, end)
    size = bits // math.gcd(bits, 8)  # the fewest bytes that hold whole codes
    padded = torch.nn.functional.pad(octets, (0, -octets.shape[1] % size))
    return _split(padded.view(-1, size), bits).view(len(stream), -1)[:, first - start:end - start]


def _octets(stream: Tensor, bits: int, start: int, end: int) -> Tensor:
    """Returns the bytes of the words that hold these codes of each row, [rows, bytes], starting at a word boundary."""
    words = stream[:, start * bits // WORD:words_of(end, bits)]
    return words.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _split(octets: Tensor, bits: int) -> Tensor:
    """Splits units of whole bytes into codes, uint8 [units, bytes, ...] -> [units, codes, ...]."""
    codes = octets.new_empty(len(octets), octets.shape[1] * 8 // bits, *octets.shape[2:])
    for index in range(codes.shape[1]):
        byte, shift = divmod(index * bits, 8)
        code = octets[:, byte] >> shift
        if shift + bits > 8:
            code |= octets[:, byte + 1] << (8 - shift)
        codes[:, index] = code & ((1 << bits) - 1)
    return codes


def words_of(count: int, bits: int) -> int:
    """Returns the number of words that hold `count` codes."""
    return -(-count * bits // WORD)


def pairs(tensors: Mapping[str, StoredTensor], *roles: str) -> Iterator[tuple[int, int]]:
    """Yields the shape of each matrix in the tensors of these roles."""
    for role in roles:
        shape = tensors[role].shape
        if len(shape) != 2 or 0 in shape:
            raise ValueError(f"{role} of shape {list(shape)}")
        yield shape[0], shape[1]


def _check_shape(tensors: Mapping[str, StoredTensor], role: str, shape: Shape) -> None:
    if role in tensors and tensors[role].shape != shape:
        raise ValueError(f"{role} of shape {list(tensors[role].shape)} instead of {list(shape)}")


def _groups(tensor: PackedTensor) -> Tensor | None:
    """Returns the group of each column; None if groups are consecutive and have the same number of columns."""
    count, columns, size = (tensor.settings[key] for key in ("groups", "columns", "size"))
    following, stored = torch.arange(columns) // size, tensor.tensors.get("order")
    found = following if stored is None else stored.read().long()
    if int(found.max()) < 0:  # old versions of compressed-tensors write -1 for no order
        found = following
    if not 0 <= int(found.min()) <= int(found.max()) < count:
        raise ModelError(f"{tensor.path}: the group of a column (g_idx) is none of {count}; download the file again")
    return None if count * size == columns and torch.equal(found, following) else found


def _size(columns: int, groups: int, quantization: Quantization) -> int:
    """Returns the columns of a group: the config's number if it gives this number of groups."""
    given = quantization.settings.get("group_size")
    if isinstance(given, int) and given > 0 and -(-columns // given) == groups:
        return given
    if columns % groups:
        raise ValueError(f"scales of {groups} groups for {columns} columns")
    return columns // groups


# compressed-tensors


def _plan_packed(tensors: Mapping[str, StoredTensor], quantization: Quantization, module: str) -> Plan:
    (rows, words), (scaled, groups) = pairs(tensors, "codes", "scales")
    found = dict[int, int]()
    for bits, size in _schemes(quantization):
        columns = groups * size if size else words * WORD // bits
        if words_of(columns, bits) == words and (size or groups == 1):
            found[columns] = bits
    if len(found) > 1 and "shape" in tensors:  # such as 4 bits in groups of 128, and 8 bits in groups of 64
        columns = int(tensors["shape"].read().flatten()[-1])
        found = {columns: found[columns]} if columns in found else {}
    if scaled != rows or len(found) != 1:
        raise ValueError(f"codes of shape {[rows, words]} and scales of shape {[scaled, groups]}, which no group of "
                         "config_groups has")
    (columns, bits), = found.items()
    _check_shape(tensors, "zeros", (words_of(rows, bits), groups))
    _check_shape(tensors, "order", (columns,))
    return (rows, columns), {"bits": bits, "columns": columns, "groups": groups, "size": columns // groups}


def _schemes(quantization: Quantization) -> Iterator[tuple[int, int]]:
    """Yields bits and columns per group of each kind of quantized weights; 0 columns means the whole row."""
    for weights in quantization.groups():
        bits, size = weights["num_bits"], weights.get("group_size")
        if weights["type"] == "int" and isinstance(bits, int):
            yield bits, size if isinstance(size, int) and 0 < size < 1 << 31 else 0


def _read_packed(tensor: PackedTensor, first: int, end: int) -> Integers:
    own, bits = tensor.tensors, tensor.settings["bits"]
    codes = unpack(own["codes"].rows(first, end).read(), bits, 0, tensor.settings["columns"])
    zeros: Tensor | int = 1 << (bits - 1)
    if "zeros" in own:
        start = first // WORD * WORD
        words = own["zeros"].rows(start * bits // WORD, words_of(end, bits)).read()
        zeros = unpack(words.t(), bits, first - start, end - start).t()
    return Integers(codes, own["scales"].rows(first, end).read(), zeros, _groups(tensor))


def _plan_bytes(tensors: Mapping[str, StoredTensor], quantization: Quantization, module: str) -> Plan:
    (rows, columns), (scaled, groups) = pairs(tensors, "codes", "scales")
    if scaled != rows or columns % groups:
        raise ValueError(f"scales of shape {[scaled, groups]} for codes of shape {[rows, columns]}")
    _check_shape(tensors, "zeros", (rows, groups))
    return (rows, columns), {"columns": columns, "groups": groups, "size": columns // groups}


def _read_bytes(tensor: PackedTensor, first: int, end: int) -> Integers:
    own = {role: stored.rows(first, end).read() for role, stored in tensor.tensors.items()}
    zeros = _unsigned(own["zeros"]) if "zeros" in own else 128
    return Integers(_unsigned(own["codes"]), own["scales"], zeros)


def _unsigned(codes: Tensor) -> Tensor:
    """Converts int8 codes to uint8 by adding 128."""
    return codes.view(torch.uint8) ^ 128


# GPTQ and AWQ


def _plan_gptq(tensors: Mapping[str, StoredTensor], quantization: Quantization, module: str) -> Plan:
    (words, rows), (groups, scaled), (own, zero_words) = pairs(tensors, "codes", "scales", "zeros")
    bits = _bits(rows, zero_words, quantization)
    if quantization.method == "gptq" and bits in (5, 6, 7):
        raise ValueError(f"{bits} bits in planes, which is not supported")
    columns = words * WORD // bits
    if "order" in tensors:
        columns = tensors["order"].shape[0] if len(tensors["order"].shape) == 1 else 0
    if (scaled, own) != (rows, groups) or words_of(columns, bits) != words:
        raise ValueError(f"codes of shape {[words, rows]}, scales of shape {[groups, scaled]} and zeros of shape "
                         f"{[own, zero_words]}, which do not belong together")
    return (rows, columns), {"bits": bits, "columns": columns, "groups": groups,
                             "size": _size(columns, groups, quantization), "less_one": _less_one(quantization)}


def _bits(count: int, words: int, quantization: Quantization) -> int:
    """Returns the bits of a code if `words` hold `count` codes, preferably the config's bits."""
    for bits in (quantization.settings.get("bits"), *_BITS):
        if bits in _BITS and words_of(count, bits) == words:
            return int(bits)
    raise ValueError(f"{words} words for {count} codes")


def _less_one(quantization: Quantization) -> bool:
    """Returns True if zeros are stored minus 1 (version 1)."""
    given = quantization.settings
    if quantization.method == "auto-round":
        return given.get("packing_format") in ("auto_round:auto_gptq", None)
    return "gptq_v2" not in (given.get("checkpoint_format"), given.get("format"))


def _read_gptq(tensor: PackedTensor, first: int, end: int) -> Integers:
    own, bits = {role: stored.read() for role, stored in tensor.tensors.items()}, tensor.settings["bits"]
    codes = unpack(own["codes"][:, first:end].t(), bits, 0, tensor.settings["columns"])
    zeros, less_one = own["zeros"], tensor.settings["less_one"]
    if less_one and WORD % bits == 0:  # writers subtract from whole words, so that a zero of 0 borrows from the next
        zeros = zeros + sum(1 << shift for shift in range(0, WORD, bits))
    zeros = unpack(zeros, bits, first, end)
    if less_one and WORD % bits:
        zeros = (zeros + 1) & ((1 << bits) - 1)
    return Integers(codes, own["scales"][:, first:end].t(), zeros.t(), _groups(tensor))


def _plan_awq(tensors: Mapping[str, StoredTensor], quantization: Quantization, module: str) -> Plan:
    (columns, words), (groups, rows), zeros = pairs(tensors, "codes", "scales", "zeros")
    if zeros != (groups, words) or rows % len(AWQ_ORDER):
        raise ValueError(f"codes of shape {[columns, words]}, scales of shape {[groups, rows]} and zeros of shape "
                         f"{list(zeros)}, which do not belong together")
    bits = _bits(rows, words, quantization)
    return (rows, columns), {"bits": bits, "columns": columns, "groups": groups,
                             "size": _size(columns, groups, quantization)}


def _read_awq(tensor: PackedTensor, first: int, end: int) -> Integers:
    own, bits = {role: stored.read() for role, stored in tensor.tensors.items()}, tensor.settings["bits"]
    start, stop = first // WORD * WORD, min(-(-end // WORD) * WORD, own["scales"].shape[1])

    def codes(words: Tensor) -> Tensor:
        eights = (stop - start) // len(AWQ_ORDER)
        octets = _octets(words, bits, start, stop)[:, :eights * bits].t().contiguous()
        found = _split(octets.unflatten(0, (eights, bits)), bits)
        return found[:, list(AWQ_ORDER)].flatten(0, 1)[first - start:end - start]

    return Integers(codes(own["codes"]), own["scales"][:, first:end].t(), codes(own["zeros"]), _groups(tensor))


_WORDS: Final = {
    "codes": Role(("qweight",), ("I32",)), "scales": Role(("scales",), FLOATS), "zeros": Role(("qzeros",), ("I32",)),
    "order": Role(("g_idx",), ("I32", "I64"), required=False)}
FORMATS: Final = (
    WeightFormat(
        "packed integers",
        {"codes": Role(("weight_packed",), ("I32",)), "scales": Role(("weight_scale",), FLOATS),
         "zeros": Role(("weight_zero_point",), ("I32",), required=False),
         "shape": Role(("weight_shape",), ("I64", "I32"), required=False),
         "order": Role(("weight_g_idx",), ("I32", "I64"), required=False)},
        _plan_packed, _read_packed, ("compressed-tensors",), _blocks),
    WeightFormat(
        "INT8", {"codes": Role(("weight",), ("I8",)), "scales": Role(("weight_scale",), FLOATS),
                 "zeros": Role(("weight_zero_point",), ("I8",), required=False)},
        _plan_bytes, _read_bytes),
    WeightFormat("GPTQ", _WORDS, _plan_gptq, _read_gptq, ("gptq", "auto-round"), _blocks, by_rows=False),
    WeightFormat("AWQ", _WORDS, _plan_awq, _read_awq, ("awq",), _blocks, by_rows=False))
