"""Weights in FP8, NVFP4, MXFP4 and MXFP8, written by compressed-tensors and by ModelOpt.

RECORDED has a small weight of each, for machines without these tools. `python tests/test_formats_float.py` makes it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from format_cases import KINDS, TOWER, Quantizer, check_logits, check_weights, write_model
from safetensors.torch import load_file, save_file
from support import transformers_vision_model
from torch import Tensor

from deltic.loader.files import find_tensors
from deltic.loader.model_files import open_model
from deltic.loader.safetensors import read_stored

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


# A small weight


RECORDED = Path(__file__).with_name("quantizers.json")
NAME = "model.layers.0.mlp.up_proj"


def as_json(tensor: Tensor) -> dict[str, Any]:
    data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "data": data.hex()}


def from_json(found: dict[str, Any]) -> Tensor:
    data = torch.frombuffer(bytearray.fromhex(found["data"]), dtype=torch.uint8)
    return data.view(getattr(torch, found["dtype"])).reshape(found["shape"])


def record() -> None:
    weight, recorded = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16(), dict[str, Any]()
    for name in QUANTIZERS:
        quantize, settings = quantizer(name)
        tensors, exact, _ = quantize("mlp.up_proj", weight)
        recorded[name] = {"settings": settings, "numbers": as_json(exact),
                          "tensors": {suffix: as_json(tensor) for suffix, tensor in tensors.items()}}
    RECORDED.write_text(json.dumps(recorded, indent=1, default=str) + "\n")


@pytest.mark.parametrize("name", QUANTIZERS)
def test_recorded_weights(name: str, tmp_path: Path) -> None:
    recorded = json.loads(RECORDED.read_text())[name]
    tensors = {f"{NAME}.{suffix}": from_json(found) for suffix, found in recorded["tensors"].items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": recorded["settings"]}))
    source = find_tensors(tmp_path)[f"{NAME}.weight"]
    found = read_stored(NAME, source, torch.float32, torch.device("cpu"))
    assert torch.equal(found, from_json(recorded["numbers"]))


# Whole models exported by ModelOpt


FOUR_BITS = {"num_bits": (2, 1), "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": (4, 3)}}
EXPORTS: dict[str, tuple[str, str, list[dict[str, Any]]]] = {
    "NVFP4": ("dense", "NVFP4_DEFAULT_CFG", []),
    "NVFP4 of experts, FP8 K/V": ("experts", "NVFP4_DEFAULT_CFG", [
        {"quantizer_name": "*[kv]_bmm_quantizer", "cfg": {"num_bits": (4, 3)}}]),
    "W4A16": ("experts", "W4A16_NVFP4_CFG", []),
    "mixed": ("dense", "FP8_DEFAULT_CFG", [
        {"quantizer_name": f"*{name}*{part}_quantizer", "cfg": FOUR_BITS}
        for name in ("mlp", "lm_head") for part in ("weight", "input")]),
    "mixed, of experts": ("experts", "FP8_DEFAULT_CFG", [
        {"quantizer_name": f"*experts*{part}_quantizer", "cfg": FOUR_BITS} for part in ("weight", "input")]),
    "FP8 by row": ("experts", "FP8_PER_CHANNEL_PER_TOKEN_CFG", []),
    "FP8 by block": ("dense", "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", []),
    "MXFP8": ("experts", "MXFP8_DEFAULT_CFG", []),
    "MXFP4": ("dense", "MXFP4_DEFAULT_CFG", [])}


def exported(place: Path, kind: str, name: str, rules: list[dict[str, Any]]) -> None:
    """Quantizes and writes a random model."""
    quantization = pytest.importorskip("modelopt.torch.quantization")
    from modelopt.torch.export import export_hf_checkpoint

    family, sizes = KINDS[kind]
    shape = {**sizes, "mtp_num_hidden_layers": 0}
    model = transformers_vision_model(place / "random", family=family, text=shape, **TOWER).bfloat16()
    config = copy.deepcopy(getattr(quantization, name))
    config["quant_cfg"] += rules
    tokens = torch.randint(0, 290, (1, 32))
    model = quantization.quantize(model, config, lambda model: model(tokens, use_cache=False))
    export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=str(place / "export"))


def dequantized(tensors: dict[str, Tensor], name: str) -> Tensor:
    """A weight, as ModelOpt dequantizes it."""
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP4QTensor, MXFP8QTensor, NVFP4QTensor

    codes, scale, whole = (tensors.get(f"{name}{suffix}") for suffix in ("", "_scale", "_scale_2"))
    assert codes is not None
    if scale is None:
        return codes.float()
    columns = codes.shape[1] * (2 if codes.dtype == torch.uint8 else 1)
    kind: Any = FP8QTensor
    used: dict[str, Any] = {"scale": scale if scale.dim() != 1 else scale[:, None]}
    if whole is not None:
        kind, used = NVFP4QTensor, {"scale": scale, "double_scale": whole, "block_sizes": {-1: 16}}
    elif codes.dtype == torch.uint8:
        kind, used = MXFP4QTensor, {"scale": scale.flatten(), "block_sizes": {-1: 32}}
    elif scale.dtype == torch.uint8:
        kind = MXFP8QTensor
    elif scale.dim() == 4:
        used = {"scale": scale[:, 0, :, 0], "block_sizes": {0: 128, 1: 128}}
    found: Tensor = kind((len(codes), columns), torch.float32, codes).dequantize(torch.float32, **used)
    return found.contiguous()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EXPORTS)
def test_exports_of_modelopt(name: str, tmp_path: Path) -> None:
    """Described in config.json, and in hf_quant_config.json alone."""
    exported(tmp_path, *EXPORTS[name])
    place, plain = tmp_path / "export", tmp_path / "plain"
    tensors = load_file(place / "model.safetensors")
    plain.mkdir()
    save_file({name: dequantized(tensors, name) if name.endswith("weight") else tensor.float()
               for name, tensor in tensors.items() if not name.endswith(("scale", "scale_2"))},
              plain / "model.safetensors")
    config = json.loads((place / "config.json").read_text())
    mixed = config["quantization_config"]["quant_algo"] == "MIXED_PRECISION"
    assert mixed == name.startswith("mixed")
    assert any(name.endswith("k_scale") for name in tensors) == ("K/V" in name)
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    wanted = open_model(plain, progress=False).load("float32", "cpu", None)
    for _ in range(2):
        found = open_model(place, progress=False).load("float32", "cpu", None)
        assert found.keys() == wanted.keys()
        assert not [name for name, tensor in wanted.items() if not torch.equal(found[name], tensor)]
        (place / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    record()
