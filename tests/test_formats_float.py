"""Weights in FP8, NVFP4, MXFP4 and MXFP8, written by compressed-tensors and by ModelOpt."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from format_cases import KINDS, Quantizer, check_logits, check_weights, write_model
from torch import Tensor

# compressed-tensors


def by_compressed_tensors(preset: str) -> tuple[Quantizer, dict[str, Any]]:
    """The quantizer of a preset scheme of compressed-tensors, and the quantization_config."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.compressors.mx_utils import decompress_mx_scale
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme = preset_name_to_scheme(preset, ["Linear"])
    args, format = scheme.weights, infer_module_format(torch.nn.Linear, scheme)
    compressor = BaseCompressor.get_value_from_registry(format.value)

    def quantize(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        groups = grouped(weight, args)
        low, high = groups.amin(-1), groups.amax(-1)
        state = {"weight": weight}
        if args.strategy == "tensor_group":
            state["weight_global_scale"] = generate_gparam(weight.amin(), weight.amax())
        state["weight_scale"], _ = calculate_qparams(low, high, args, state.get("weight_global_scale"))
        stored = compressor.compress(state, scheme)
        scale, codes = stored["weight_scale"], stored.get("weight")
        if codes is None:
            packed = stored["weight_packed"]
            codes = unpack_fp4_from_uint8(packed, len(packed), 2 * packed.shape[1], torch.float32)
        wide = decompress_mx_scale(scale) if scale.dtype == torch.uint8 else scale
        exact = dequantize(codes, wide.float(), None, args, torch.float32, stored.get("weight_global_scale"))
        rounded = compressor.decompress(stored, scheme)["weight"]
        stored["input_global_scale" if "weight_packed" in stored else "input_scale"] = torch.tensor([0.25])
        return stored, exact, rounded

    settings = QuantizationConfig(config_groups={"group_0": scheme}, format=format, ignore=["re:.*in_proj_[ab]$"])
    return quantize, settings.model_dump(mode="json")


def grouped(weight: Tensor, args: Any) -> Tensor:
    """The weights that share a scale, along the last axis."""
    if args.strategy == "tensor":
        return weight.reshape(1, -1)
    if args.strategy == "channel":
        return weight[:, None]
    if args.strategy == "block":
        rows, columns = weight.shape
        padded = torch.zeros(-(-rows // 128) * 128, -(-columns // 128) * 128, dtype=weight.dtype)
        padded[:rows, :columns] = weight
        return padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).transpose(1, 2).flatten(2)
    return weight.unflatten(1, (-1, args.group_size))


# ModelOpt


def by_modelopt(algorithm: str) -> tuple[Quantizer, dict[str, Any]]:
    """The quantizer of an algorithm of ModelOpt, and the quantization_config."""
    pytest.importorskip("modelopt.torch.quantization.qtensor")
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP4QTensor, MXFP8QTensor, NVFP4QTensor

    def quantize(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        kind = "FP8" if algorithm == "MIXED_PRECISION" and "mlp" not in module else algorithm
        stored, used = {"input_scale": torch.tensor(0.5)}, dict[str, Any]()
        if kind == "FP8":
            codes, scale = FP8QTensor.quantize(weight, weight.float().abs().amax() / 448)
        elif kind == "MXFP8":
            codes, scale = MXFP8QTensor.quantize(weight)
        elif kind == "MXFP4":
            codes, scale = MXFP4QTensor.quantize(weight.clone(), 32)
            used["block_sizes"], scale = {-1: 32}, scale.reshape(len(weight), -1)
        else:
            codes, scale, whole = NVFP4QTensor.quantize(weight.clone(), 16)
            used = {"block_sizes": {-1: 16}, "double_scale": whole}
            stored["weight_scale_2"] = whole
        stored |= {"weight": codes._quantized_data, "weight_scale": scale}
        exact = codes.dequantize(torch.float32, scale=scale, **used)
        return stored, exact, exact.bfloat16()

    return quantize, {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["*in_proj_a*", "*in_proj_b*"],
                      "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}


QUANTIZERS: dict[str, Callable[[], tuple[Quantizer, dict[str, Any]]]] = {
    **{f"compressed-tensors {name}": lambda name=name: by_compressed_tensors(name)  # type: ignore[misc]
       for name in ("FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4", "NVFP4A16", "MXFP4", "MXFP8")},
    **{f"modelopt {name}": lambda name=name: by_modelopt(name)  # type: ignore[misc]
       for name in ("FP8", "NVFP4", "W4A16_NVFP4", "MXFP4", "MXFP8", "MIXED_PRECISION")}}


@cache
def quantizer(name: str) -> tuple[Quantizer, dict[str, Any]]:
    return QUANTIZERS[name]()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_numbers_and_logits_are_the_tools(name: str, kind: str, tmp_path: Path) -> None:
    written = write_model(tmp_path, kind, *quantizer(name))
    check_weights(written)
    check_logits(written)
