"""Weights as quantizers of integers write them, made here bit by bit: the tensors of the file, and their numbers.

`test_loader_integers.py` compares these writers with the tools that they stand for, where those are installed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Parts = dict[str, Tensor]


@dataclass(frozen=True)
class Written:
    """A weight in a file. parts: tensors by the ends of their names. values: float32."""

    parts: Parts
    values: Tensor


@dataclass(frozen=True)
class Kind:
    """A format. config: quantization_config. write(weight): quantizes a matrix."""

    config: dict[str, Any]
    write: Callable[[Tensor], Written]
    dtype: torch.dtype = torch.float16


def stream(codes: Tensor, bits: int) -> Tensor:
    """Rows of codes as streams of bits, in words of 32."""
    ones = np.unpackbits(codes.to(torch.uint8).numpy()[..., None], axis=-1, bitorder="little")[..., :bits]
    octets = np.packbits(ones.reshape(len(codes), -1), axis=-1, bitorder="little")
    octets = np.pad(octets, ((0, 0), (0, -octets.shape[1] % 4)))
    return torch.from_numpy(octets.view(np.int32).copy())


def rounded(weight: Tensor, bits: int, groups: Tensor, dtype: torch.dtype, symmetric: bool
            ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [rows, columns], zeros and scales [rows, groups] of a matrix, and its numbers in float32. groups: that of
    each column."""
    count, top = int(groups.max()) + 1, (1 << bits) - 1
    low, high = (torch.stack([getattr(weight[:, groups == one], extreme)(1) for one in range(count)], 1)
                 for extreme in ("amin", "amax"))
    low, high = low.clamp(max=0), high.clamp(min=0)
    if symmetric:
        high = torch.maximum(-low, high)
        low = -high
    scales = ((high - low) / top).clamp(min=2**-12).to(dtype)
    zeros = torch.full_like(scales, 1 << (bits - 1)) if symmetric else (-low / scales.float()).round().clamp(0, top)
    wide, shift = scales.float()[:, groups], zeros.float()[:, groups]
    codes = (weight / wide + shift).round().clamp(0, top)
    return codes, zeros.float(), scales, (codes - shift) * wide


def in_order(columns: int, size: int) -> Tensor:
    """The group of each column if groups follow each other."""
    return torch.arange(columns) // (size if size > 0 else columns)


def shuffled(columns: int, size: int) -> Tensor:
    """The group of each column as activation order leaves them."""
    return in_order(columns, size)[torch.from_numpy(np.random.RandomState(5).permutation(columns))]


# compressed-tensors


def pack_quantized(bits: int, size: int, symmetric: bool = True, order: bool = False,
                   dtype: torch.dtype = torch.bfloat16) -> Kind:
    def write(weight: Tensor) -> Written:
        groups = (shuffled if order else in_order)(weight.shape[1], size)
        codes, zeros, scales, values = rounded(weight, bits, groups, dtype, symmetric)
        parts = {"weight_packed": stream(codes, bits), "weight_scale": scales,
                 "weight_shape": torch.tensor(weight.shape)}
        if not symmetric:
            parts["weight_zero_point"] = stream(zeros.t(), bits).t().contiguous()
        if order:
            parts["weight_g_idx"] = groups.int()
        return Written(parts, values)

    strategy = {"strategy": "group", "group_size": size} if size > 0 else {"strategy": "channel", "group_size": None}
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, **strategy}
    return Kind(compressed("pack-quantized", weights), write, dtype)


def int_quantized(symmetric: bool = True) -> Kind:
    def write(weight: Tensor) -> Written:
        codes, zeros, scales, values = rounded(weight, 8, in_order(weight.shape[1], -1), torch.float32, symmetric)
        zero = {} if symmetric else {"weight_zero_point": (zeros - 128).to(torch.int8)}
        return Written({"weight": (codes - 128).to(torch.int8), "weight_scale": scales, **zero}, values)

    weights = {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": "channel"}
    return Kind(compressed("int-quantized", weights), write, torch.float32)


def compressed(format: str, weights: Mapping[str, Any]) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
            "ignore": ["lm_head"], "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


# GPTQ, AWQ, AutoRound


def gptq(bits: int, size: int, version: int = 1, symmetric: bool = True, order: bool = False,
         config: Mapping[str, Any] | None = None, index: bool = True) -> Kind:
    """index: files have the group of each column."""
    def write(weight: Tensor) -> Written:
        groups = (shuffled if order else in_order)(weight.shape[1], size)
        codes, zeros, scales, values = rounded(weight, bits, groups, torch.float16, symmetric)
        words = stream(zeros.t(), bits)
        if version == 1:
            words = less_one(words, zeros.t(), bits)
        parts = {"qweight": stream(codes, bits).t().contiguous(), "qzeros": words, "scales": scales.t().contiguous()}
        return Written({**parts, "g_idx": groups.int()} if index else parts, values)

    own = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": order, "sym": symmetric,
           "checkpoint_format": "gptq" if version == 1 else "gptq_v2"}
    return Kind({**own, **(config or {})}, write)


def less_one(words: Tensor, zeros: Tensor, bits: int) -> Tensor:
    """Zeros of version 1. Whole words are subtracted from each other, except where a code extends over two."""
    if 32 % bits:
        return stream((zeros - 1) % (1 << bits), bits)
    return words - sum(1 << shift for shift in range(0, 32, bits))


def awq(bits: int = 4, size: int = 32, config: Mapping[str, Any] | None = None) -> Kind:
    def write(weight: Tensor) -> Written:
        codes, zeros, scales, values = rounded(weight, bits, in_order(weight.shape[1], size), torch.float16, False)
        parts = {name: stream(each.t().unflatten(1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1), bits)
                 for name, each in (("qweight", codes), ("qzeros", zeros))}
        return Written({**parts, "scales": scales.t().contiguous()}, values)

    own = {"quant_method": "awq", "bits": bits, "group_size": size, "version": "gemm", "zero_point": True,
           "modules_to_not_convert": ["visual"]}
    return Kind({**own, **(config or {})}, write)


def auto_round(packing: str, bits: int = 4, size: int = 32, symmetric: bool = True) -> Kind:
    config = {"quant_method": "auto-round", "packing_format": packing, "sym": symmetric, "data_type": "int",
              "version": None, "checkpoint_format": None, "extra_config": {"lm_head": {"bits": 16}}}
    if packing == "auto_round:auto_awq":
        return awq(bits, size, config)
    return gptq(bits, size, 1 if packing == "auto_round:auto_gptq" else 2, symmetric, config=config, index=False)


# MLX


def mlx_affine(bits: int, size: int, dtype: torch.dtype = torch.bfloat16) -> Kind:
    """Product and sum are rounded to the dtype of the scales, one after the other."""
    def write(weight: Tensor) -> Written:
        low, high = (getattr(weight.unflatten(1, (-1, size)), extreme)(-1) for extreme in ("amin", "amax"))
        scales = ((high - low) / ((1 << bits) - 1)).clamp(min=2**-12).to(dtype)
        biases = low.to(dtype)
        wide, shift = (each.repeat_interleave(size, 1) for each in (scales, biases))
        codes = ((weight - shift.float()) / wide.float()).round().clamp(0, (1 << bits) - 1)
        values = (codes * wide.float()).to(dtype).float() + shift.float()
        return Written({"weight": stream(codes, bits).view(torch.uint32), "scales": scales, "biases": biases},
                       values.to(dtype).float())

    return Kind({"group_size": size, "bits": bits, "mode": "affine"}, write, dtype)


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def mlx_floats(mode: str) -> Kind:
    bits, size = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}[mode]
    table = E2M1 if bits == 4 else torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    largest = 6.0 if bits == 4 else 448.0

    def write(weight: Tensor) -> Written:
        groups = weight.unflatten(1, (-1, size))
        wanted = groups.abs().amax(-1).clamp(min=2**-6) / largest
        if mode == "nvfp4":
            stored = wanted.to(torch.float8_e4m3fn).view(torch.uint8)
            scales = stored.view(torch.float8_e4m3fn).float()
        else:
            stored = (wanted.log2().ceil() + 127).to(torch.uint8)
            scales = torch.exp2(stored.float() - 127)
        finite = table.nan_to_num(1e9)
        codes = (groups[..., None] / scales[..., None, None] - finite).abs().argmin(-1)
        return Written({"weight": stream(codes.flatten(1), bits).view(torch.uint32), "scales": stored},
                       (table[codes] * scales[..., None]).flatten(1))

    return Kind({"group_size": size, "bits": bits, "mode": mode}, write, torch.bfloat16)


# bitsandbytes


NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0])


def bnb4(double: bool = False, block: int = 64) -> Kind:
    def write(weight: Tensor) -> Written:
        flat = weight.flatten()
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % block)).view(-1, block)
        factors = padded.abs().amax(1).clamp(min=2**-10)
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": [*weight.shape]}
        parts = {"weight.quant_map": NF4.clone()}
        if double:
            offset = factors.mean()
            table = torch.arange(-128, 128) / 127.0
            centred = torch.nn.functional.pad(factors - offset, (0, -len(factors) % 256)).view(-1, 256)
            outer = centred.abs().amax(1).clamp(min=2**-10)
            places = ((centred / outer[:, None])[..., None] - table).abs().argmin(-1)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset.item()}
            parts |= {"weight.absmax": places.flatten()[:len(factors)].to(torch.uint8),
                      "weight.nested_absmax": outer, "weight.nested_quant_map": table}
            factors = (table[places] * outer[:, None]).flatten()[:len(factors)] + offset
        else:
            parts["weight.absmax"] = factors
        codes = ((padded / factors[:, None])[..., None] - NF4).abs().argmin(-1).flatten()[:len(flat) + len(flat) % 2]
        values = (NF4[codes][:len(flat)].view(-1) * factors.repeat_interleave(block)[:len(flat)]).view(weight.shape)
        text = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
        packed = (codes[::2] * 16 + codes[1::2]).to(torch.uint8)[:, None]
        return Written({"weight": packed, **parts, "weight.quant_state.bitsandbytes__nf4": text}, values)

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
              "bnb_4bit_use_double_quant": double, "llm_int8_skip_modules": ["lm_head"]}
    return Kind(config, write, torch.float32)


def bnb8() -> Kind:
    def write(weight: Tensor) -> Written:
        scales = weight.abs().amax(1)
        codes = (weight * (127 / scales[:, None])).round().to(torch.int8)
        values = codes * scales[:, None] * 7.874015718698502e-3
        return Written({"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}, values)

    return Kind({"quant_method": "bitsandbytes", "load_in_8bit": True}, write, torch.float32)


KINDS: dict[str, Kind] = {
    "pack-quantized": pack_quantized(4, 32),
    "pack-quantized, zeros": pack_quantized(4, 32, symmetric=False),
    "pack-quantized, 8 bits by row": pack_quantized(8, -1, dtype=torch.float16),
    "pack-quantized, 8 bits by row, zeros": pack_quantized(8, -1, symmetric=False, dtype=torch.float32),
    "pack-quantized, 3 bits": pack_quantized(3, 32, symmetric=False),
    "pack-quantized, 6 bits": pack_quantized(6, 32),
    "pack-quantized, order": pack_quantized(4, 32, symmetric=False, order=True),
    "int-quantized": int_quantized(),
    "int-quantized, zeros": int_quantized(symmetric=False),
    "gptq": gptq(4, 32),
    "gptq, zeros": gptq(4, 32, symmetric=False),
    "gptq v2, zeros, order": gptq(4, 32, 2, symmetric=False, order=True),
    "gptq, order, one group": gptq(4, -1, order=True),
    "gptq, 8 bits": gptq(8, 32),
    "gptq, 3 bits": gptq(3, 32, symmetric=False),
    "gptq, 2 bits": gptq(2, 32),
    "awq": awq(),
    "auto-round": auto_round("auto_round:auto_gptq"),
    "auto-round, zeros": auto_round("auto_round", symmetric=False),
    "auto-round, 5 bits": auto_round("auto_round", bits=5),
    "auto-round awq": auto_round("auto_round:auto_awq"),
    "auto-round awq, 6 bits": auto_round("auto_round:auto_awq", bits=6),
    **{f"mlx, {bits} bits": mlx_affine(bits, size)
       for bits, size in ((2, 64), (3, 32), (4, 64), (5, 32), (6, 32), (8, 128))},
    "mlx, float32": mlx_affine(4, 32, torch.float32),
    "mlx, float16": mlx_affine(4, 32, torch.float16),
    **{f"mlx {mode}": mlx_floats(mode) for mode in ("mxfp4", "nvfp4", "mxfp8")},
    "nf4": bnb4(),
    "nf4, double": bnb4(double=True),
    "bitsandbytes 8 bits": bnb8(),
}
