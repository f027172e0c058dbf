"""Integer weights that the quantizers' own packages write: their numbers, to the bit, and the logits of these numbers.

A tool that is not installed is skipped; `test_formats_integers.py` has what the tools computed.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from format_cases import KINDS as MODELS
from format_cases import Quantizer, check_logits, check_weights, write_model
from integer_cases import KINDS, in_order, rounded
from safetensors.torch import load_file, save_file
from support import same_logits, session_over
from test_formats_integers import RECORDED, weight_of
from torch import Tensor

from deltic.config import EngineConfig
from deltic.engine.loading import load
from deltic.loader.model_files import open_model
from deltic.loader.names import is_norm

Made = tuple[Quantizer, dict[str, Any]]

# compressed-tensors


def by_compressed_tensors(format: str, bits: int, symmetric: bool, size: int) -> Made:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    grouped: dict[str, Any] = {"strategy": "group", "group_size": size} if size > 0 else {"strategy": "channel"}
    args = QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, **grouped)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(format)

    def quantize(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        groups = weight.unflatten(1, (-1, size if size > 0 else weight.shape[1]))
        scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
        stored = compressor.compress({"weight": weight, "weight_scale": scale, "weight_zero_point": zero}, scheme)
        exact = compressor.decompress({**stored, "weight_scale": stored["weight_scale"].float()}, scheme)["weight"]
        return stored, exact, compressor.decompress(stored, scheme)["weight"]

    settings = QuantizationConfig(config_groups={"group_0": scheme}, format=format, ignore=["re:.*in_proj_[ab]$"])
    return quantize, settings.model_dump(mode="json")


# AutoRound


def by_auto_round(packing: str, bits: int, symmetric: bool, size: int, order: bool = False) -> Made:
    pytest.importorskip("auto_round")
    from auto_round.export.export_to_awq.utils import WQLinear_GEMM, dequantize_gemm
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

    def quantize(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        linear = torch.nn.Linear(weight.shape[1], len(weight), bias=False)
        linear.weight.data = weight.float()
        _, zeros, scales, _ = rounded(weight.float(), bits, in_order(weight.shape[1], size), torch.float16, symmetric)
        if packing == "auto_round:auto_awq":
            made: Any = WQLinear_GEMM.from_linear(linear, bits, size, scales=scales.t().contiguous(),
                                                  zeros=zeros.t().contiguous(), device="cpu")
            own = (made.qweight, made.qzeros, made.scales.float(), bits, size)
            exact = dequantize_gemm(*own).t()
        else:
            kind = qlinear_torch_zp if packing == "auto_round:auto_gptq" else qlinear_torch
            made = kind.QuantLinear(bits, size, weight.shape[1], len(weight), bias=False, g_idx=order)
            made.device = "cpu"
            made.pack(linear, scales, zeros, None, device="cpu")
            stored = {name: getattr(made, name) for name in ("qweight", "qzeros", "scales")}
            made.scales = made.scales.float()
            exact = made(torch.eye(weight.shape[1])).t()
            made.scales = stored["scales"]
        parts = {name: getattr(made, name).clone() for name in ("qweight", "qzeros", "scales")}
        return parts, exact.contiguous(), exact.bfloat16().contiguous()

    return quantize, {"quant_method": "auto-round", "packing_format": packing, "bits": bits, "group_size": size,
                      "sym": symmetric, "data_type": "int", "extra_config": {"lm_head": {"bits": 16}}}


# GPTQModel


def by_gptqmodel(format: str, bits: int, symmetric: bool, size: int, order: bool = False) -> Made:
    pytest.importorskip("gptqmodel")
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    def quantize(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        columns = weight.shape[1]
        groups = in_order(columns, size)
        if order:
            groups = groups[torch.randperm(columns, generator=torch.Generator().manual_seed(1))]
        linear = torch.nn.Linear(columns, len(weight), bias=False)
        linear.weight.data = weight.float()
        _, zeros, scales, _ = rounded(weight.float(), bits, groups, torch.float16, symmetric)
        made = TorchLinear(bits=bits, group_size=size, sym=symmetric, desc_act=order, in_features=columns,
                           out_features=len(weight), bias=False, pack_dtype=torch.int32, register_buffers=True)
        made.pack_original(linear, scales.float(), zeros, groups.int())
        made.post_init()
        made.qzero_format(format=2)
        made.eval()
        made.scales = made.scales.float()
        exact = made.dequantize_weight().t().contiguous()
        made.scales = made.scales.half()
        if format == "gptq":
            convert_gptq_v2_to_v1_format_module(made, QuantizeConfig(bits=bits))
        parts = {name: getattr(made, name).clone() for name in ("qweight", "qzeros", "scales", "g_idx")}
        return parts, exact, exact.bfloat16()

    return quantize, {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": order, "sym": symmetric,
                      "checkpoint_format": format, "dynamic": {r"-:.*layers\.1\..*": {}}}


# MLX


def to_mlx(tensor: Tensor) -> Any:
    import mlx.core as mx

    bfloat16 = tensor.dtype == torch.bfloat16
    found = mx.array((tensor.float() if bfloat16 else tensor).numpy())
    return found.astype(mx.bfloat16) if bfloat16 else found


def from_mlx(array: Any) -> Tensor:
    import mlx.core as mx

    if array.dtype == mx.bfloat16:
        return torch.from_numpy(np.array(array.astype(mx.float32))).bfloat16()
    return torch.from_numpy(np.array(array))


def by_mlx(mode: str, bits: int, size: int) -> Made:
    pytest.importorskip("mlx.core")
    import mlx.core as mx

    def quantize(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        codes, scales, *biases = mx.quantize(to_mlx(weight), size, bits, mode=mode)
        back = from_mlx(mx.dequantize(codes, scales, *biases, group_size=size, bits=bits, mode=mode))
        parts = {"weight": from_mlx(codes), "scales": from_mlx(scales)}
        if biases:
            parts["biases"] = from_mlx(biases[0])
        return parts, back.float(), back.bfloat16()

    return quantize, {"group_size": size, "bits": bits, "mode": mode}


# bitsandbytes


def by_bitsandbytes(kind: str, double: bool = False) -> Made:
    functional = pytest.importorskip("bitsandbytes").functional
    ops = pytest.importorskip("bitsandbytes.backends.default.ops")

    def quantize(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        if kind == "int8":
            codes, scales, _ = functional.int8_vectorwise_quant(weight.half())
            exact = functional.int8_vectorwise_dequant(codes, scales)
            layout = torch.tensor(0, dtype=torch.uint8)
            return {"weight": codes, "SCB": scales, "weight_format": layout}, exact, exact.bfloat16()
        codes, state = functional.quantize_4bit(weight, compress_statistics=double, quant_type=kind)
        parts = {"weight": codes, **{f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}}
        # the kernel for CPUs of bitsandbytes 0.50 mixes the blocks of rows that do not fill theirs
        plain = getattr(ops._dequantize_4bit_compute, "__wrapped__", ops._dequantize_4bit_compute)
        factors = state.absmax
        if double:
            factors = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
        exact, rounded = (plain(codes.flatten(), factors, state.code, state.blocksize, weight.shape, dtype)
                          for dtype in (torch.float32, torch.bfloat16))
        return parts, exact, rounded

    return quantize, {"quant_method": "bitsandbytes", "load_in_4bit": kind != "int8", "bnb_4bit_quant_type": kind,
                      "bnb_4bit_use_double_quant": double, "llm_int8_skip_modules": ["lm_head"]}


QUANTIZERS: dict[str, Callable[[], Made]] = {
    "compressed-tensors, 4 bits": partial(by_compressed_tensors, "pack-quantized", 4, True, 32),
    "compressed-tensors, 4 bits, zeros": partial(by_compressed_tensors, "pack-quantized", 4, False, 32),
    "compressed-tensors, 8 bits by row, zeros": partial(by_compressed_tensors, "pack-quantized", 8, False, -1),
    "compressed-tensors, 3 bits": partial(by_compressed_tensors, "pack-quantized", 3, False, 32),
    "compressed-tensors, bytes": partial(by_compressed_tensors, "int-quantized", 8, True, -1),
    "auto-round gptq": partial(by_auto_round, "auto_round:auto_gptq", 4, True, 32),
    "auto-round gptq, 8 bits": partial(by_auto_round, "auto_round:auto_gptq", 8, True, 32),
    "auto-round, zeros": partial(by_auto_round, "auto_round", 4, False, 32),
    "auto-round, 3 bits": partial(by_auto_round, "auto_round", 3, False, 32),
    "auto-round, 6 bits": partial(by_auto_round, "auto_round", 6, False, 32),
    "auto-round awq": partial(by_auto_round, "auto_round:auto_awq", 4, False, 32),
    "gptqmodel": partial(by_gptqmodel, "gptq", 4, True, 32),
    "gptqmodel, zeros, order": partial(by_gptqmodel, "gptq", 4, False, 32, True),
    "gptqmodel v2, zeros, order": partial(by_gptqmodel, "gptq_v2", 4, False, 32, True),
    "gptqmodel, 8 bits": partial(by_gptqmodel, "gptq", 8, True, 32),
    "gptqmodel, 3 bits": partial(by_gptqmodel, "gptq", 3, False, 32),
    "gptqmodel, 2 bits": partial(by_gptqmodel, "gptq", 2, True, 32),
    **{f"mlx, {bits} bits": partial(by_mlx, "affine", bits, size)
       for bits, size in ((2, 32), (3, 32), (4, 32), (5, 32), (6, 32), (8, 32))},
    **{f"mlx {mode}": partial(by_mlx, mode, bits, size)
       for mode, bits, size in (("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32))},
    "bitsandbytes nf4": partial(by_bitsandbytes, "nf4"),
    "bitsandbytes nf4, double": partial(by_bitsandbytes, "nf4", True),
    "bitsandbytes fp4": partial(by_bitsandbytes, "fp4"),
    "bitsandbytes int8": partial(by_bitsandbytes, "int8"),
}


BY_COLUMN = ("auto-round", "gptqmodel")
"""Tools that leave out matrices with a number of rows that fills no words, and vision towers."""


@cache
def quantizer(name: str) -> Made:
    return QUANTIZERS[name]()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # GPTQModel leaves temporary directories
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", QUANTIZERS)
def test_numbers_and_logits_are_the_tools(name: str, kind: str, tmp_path: Path) -> None:
    kept = r"layers\.1\.|lm_head|visual" if name.startswith(BY_COLUMN) else r"layers\.1\."
    written = write_model(tmp_path, kind, *quantizer(name), kept=kept)
    check_weights(written)
    check_logits(written)


# The writers of integer_cases


def dequantized(name: str, parts: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    """The numbers of a matrix as a tool computes them, float32."""
    method = config.get("quant_method", "mlx")
    if method == "compressed-tensors":
        compressors = pytest.importorskip("compressed_tensors.compressors")
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

        args = QuantizationArgs(**config["config_groups"]["group_0"]["weights"])
        compressor = compressors.BaseCompressor.get_value_from_registry(config["format"])
        wide = {**parts, "weight_scale": parts["weight_scale"].float()}
        return compressor.decompress(wide, QuantizationScheme(targets=["Linear"], weights=args))["weight"]
    if method == "mlx":
        mx = pytest.importorskip("mlx.core")
        codes = to_mlx(parts["weight"].view(torch.int32)).view(mx.uint32)
        biases = to_mlx(parts["biases"]) if "biases" in parts else None
        return from_mlx(mx.dequantize(codes, to_mlx(parts["scales"]), biases, **config)).float()
    if method == "bitsandbytes":
        functional = pytest.importorskip("bitsandbytes").functional
        if "SCB" in parts:
            return functional.int8_vectorwise_dequant(parts["weight"], parts["SCB"])
        state = {end.removeprefix("weight."): part for end, part in parts.items() if end != "weight"}
        loaded = functional.QuantState.from_dict(state, torch.device("cpu"))
        loaded.dtype = torch.float32
        return functional.dequantize_4bit(parts["weight"], loaded)
    pytest.importorskip("auto_round")
    from auto_round.export.export_to_awq.utils import dequantize_gemm
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

    words, zeros, scales = parts["qweight"], parts["qzeros"], parts["scales"].float()
    if "awq" in name:
        return dequantize_gemm(words, zeros, scales, config["bits"], config["group_size"]).t()
    second = "gptq_v2" in config.values() or config.get("packing_format") == "auto_round"
    columns = words.shape[0] * 32 // config["bits"]
    made: Any = (qlinear_torch if second else qlinear_torch_zp).QuantLinear(
        config["bits"], config["group_size"], columns, words.shape[1], bias=False, g_idx="g_idx" in parts)
    made.qweight, made.qzeros, made.scales = words, zeros, scales
    if "g_idx" in parts:
        made.g_idx = parts["g_idx"]
    return made(torch.eye(columns)).t()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in KINDS if "order" not in name or "gptq" in name])
def test_writers_and_tools_agree(name: str) -> None:
    """compressed-tensors has given up the group of each column."""
    written = KINDS[name].write(weight_of(96, 128))
    found = dequantized(name, written.parts, KINDS[name].config).contiguous()
    assert torch.equal(found, written.values)
    assert zlib.crc32(found.numpy().tobytes()) == RECORDED[name]


# Whole models of MLX


def write_mlx(package: str, plain: Path, place: Path, tokens: Tensor, size: int, bits: int, mode: str) -> Tensor:
    """Quantizes a model of transformers with mlx-lm or mlx-vlm, and returns MLX's logits."""
    import mlx.core as mx

    utils = pytest.importorskip(f"{package}.utils")
    loaded = utils.load_model(plain, lazy=False)
    model, config = loaded if isinstance(loaded, tuple) else (loaded, utils.load_config(plain))
    if size:
        quantize = pytest.importorskip("mlx_lm.utils").quantize_model
        model, config = quantize(model, config, size, bits, mode=mode)
    place.mkdir()
    (utils.save_model if package == "mlx_lm" else utils.save_weights)(place, model)
    utils.save_config(config, place / "config.json")
    found = model(mx.array(tokens.numpy())[None])
    return from_mlx((found if package == "mlx_lm" else found.logits)[0].astype(mx.float32))


def numbers_of(place: Path) -> dict[str, Tensor]:
    """The numbers of a file of MLX, under its own names."""
    import mlx.core as mx

    config, found = json.loads((place / "config.json").read_text()).get("quantization", {}), dict[str, Tensor]()
    stored = mx.load(str(place / "model.safetensors"))
    for name, array in stored.items():
        module = name.removesuffix(".weight")
        if f"{module}.scales" in stored and name.endswith(".weight"):
            own = config.get(module) or {key: config[key] for key in ("bits", "group_size", "mode")}
            own = {"mode": "affine"} | own  # that of modules of their own
            parts = (stored[f"{module}.scales"], stored.get(f"{module}.biases"))
            found[name] = from_mlx(mx.dequantize(array, *parts, **own))
        elif not name.endswith((".scales", ".biases")):
            found[name] = from_mlx(array)
    return {name: tensor.float() for name, tensor in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("package, size, bits, mode", [
    ("mlx_lm", 0, 0, ""), ("mlx_lm", 32, 4, "affine"), ("mlx_lm", 32, 4, "mxfp4"), ("mlx_lm", 16, 4, "nvfp4"),
    ("mlx_vlm", 0, 0, ""), ("mlx_vlm", 64, 8, "affine")])
def test_models_of_mlx(package: str, size: int, bits: int, mode: str, kind: str, tmp_path: Path) -> None:
    """Names, layouts and norms are MLX's; the vision tower, too; logits are MLX's own."""
    pytest.importorskip("mlx.core")
    written = write_model(tmp_path, kind, lambda module, weight: ({"weight": weight}, weight.float(), weight), {})
    (tmp_path / "text").mkdir()
    save_file({name: tensor for name, tensor in load_file(written.plain / "model.safetensors").items()
               if not name.startswith("mtp.")}, tmp_path / "text" / "model.safetensors", {"format": "pt"})
    shutil.copy(written.plain / "config.json", tmp_path / "text")
    tokens = torch.randint(0, 290, (40,), generator=torch.Generator().manual_seed(3))
    expected = write_mlx(package, tmp_path / "text", tmp_path / "mlx", tokens, size, bits, mode)
    files, numbers = open_model(tmp_path / "mlx", progress=False), numbers_of(tmp_path / "mlx")
    found = files.load("float32", "cpu", None)
    assert files.load_head("float32", "cpu") is None
    for name, tensor in found.items():
        theirs = numbers[f"language_model.{name}".replace(".mlp.experts.", ".mlp.switch_mlp.")]
        if "conv1d" in name:
            theirs = theirs.movedim(1, 2)
        elif is_norm(name) and "linear_attn" not in name:
            theirs = theirs - 1
        assert torch.equal(tensor, theirs), name
    if package == "mlx_vlm":
        (tmp_path / "mlx" / "preprocessor_config.json").write_text(json.dumps({"patch_size": 4}))
        tower = open_model(tmp_path / "mlx", progress=False).load_tower("float32", "cpu")
        for name, tensor in tower.items() if tower else ():
            theirs = numbers[name.replace("visual.", "vision_tower.")]
            assert torch.equal(tensor, theirs.movedim(-1, 1) if theirs.dim() == 5 else theirs), name
        assert tower and len(tower) == sum(name.startswith("vision_tower.") for name in numbers)
    ours = load(str(tmp_path / "mlx"), EngineConfig(dtype="float32", memory="8MiB", threads=1))
    same_logits(expected, session_over(ours, batch=2, budget=512).prefill(tokens.tolist(), all_logits=True), 1e-3)
