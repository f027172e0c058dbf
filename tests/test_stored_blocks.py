"""Weights that are stored in 4 bits stay as they are: on the CPU's kernels, and in tiles of a GPU."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from integer_cases import KINDS
from safetensors.torch import load_file, save_file
from support import session_over
from test_formats import FORMS, Form, mixture, opened, shape, write
from torch import Tensor

from deltic.config import EngineConfig, ExpertsConfig, LinearConfig
from deltic.engine.loading import load
from deltic.loader.four_bits import InexactError, int4_blocks, mxfp4_blocks, nvfp4_blocks
from deltic.loader.quantize import STORED, quantize_parts
from deltic.loader.safetensors import KeptForms
from deltic.model.tensor_parallel import WeightSplitter
from deltic.ops.cpu import missing
from deltic.ops.cuda.quantized import tiles_form
from deltic.ops.parts import one_device
from deltic.ops.quantized import PackedForm, QTensor, host_form

pytestmark = pytest.mark.skipif(bool(missing()), reason=str(missing()))

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 64,
                         "num_hidden_layers": 2, "layer_types": ("linear_attention", "full_attention"),
                         "linear": LinearConfig(4, 8, 16, 64, 4)}
"""Rows of whole blocks, on two devices, too."""
CONFIGS = {"dense": shape(**SIZES), "experts": replace(
    mixture(), **SIZES, experts=ExpertsConfig(3, 2, 256, 256))}
INTEGERS = ("pack-quantized", "pack-quantized, zeros", "gptq", "gptq, zeros", "awq")
TYPES = {"NVFP4": "NVFP4", "NVFP4 of ModelOpt": "NVFP4", "MXFP4": "MXFP4", "mlx nvfp4": "NVFP4", "mlx mxfp4": "MXFP4",
         **dict.fromkeys(INTEGERS, "INT4_32")}


def form(name: str) -> str | tuple[Form, dict[str, Any]]:
    """A format as `write` takes it."""
    if name in FORMS:
        return name
    kind = KINDS[name]

    def quantize(weight: Tensor, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        written = kind.write(weight.float())
        return written.parts, written.values

    return quantize, kind.config


def kept(place: Path, packed: PackedForm, dtype: Any = "bfloat16") -> dict[str, Any]:
    files = opened(place)
    parts = files.parts(dtype, one_device("cpu"), kept=KeptForms(blocks=files.block_types(packed)))
    return quantize_parts(parts, STORED, files.config, [packed])[0]


def numbers_of(weight: Any) -> Tensor:
    if isinstance(weight, tuple):
        return torch.stack([numbers_of(one) for one in weight])
    found: Tensor = weight.dequantize() if isinstance(weight, QTensor) else weight
    return found.float()


@pytest.mark.parametrize(("name", "config"), [*((name, "dense") for name in TYPES), ("NVFP4", "experts"),
                                              ("gptq, zeros", "experts")])
def test_weights_stay_as_they_are(name: str, config: str, tmp_path: Path) -> None:
    """Their numbers are the file's: to the bit, or, where the tool divides by a scale, to its rounding."""
    numbers = write(tmp_path, CONFIGS[config], form(name))
    for packed in (host_form(), tiles_form("cpu")):
        found, types = kept(tmp_path, packed), set()
        for key, weight in found.items():
            parts = weight if isinstance(weight, tuple) else (weight,)
            types |= {part.type for part in parts if isinstance(part, QTensor)}
            wanted = numbers[key] if types and isinstance(parts[0], QTensor) else numbers[key].to(weight.dtype)
            assert torch.allclose(numbers_of(weight), wanted.float(), rtol=3e-7, atol=0), key
        assert types == {TYPES[name]}
        assert not isinstance(found["model.embed_tokens.weight"], QTensor)


@pytest.mark.parametrize("name", ["NVFP4", "MXFP4", "gptq, zeros"])
@pytest.mark.parametrize("config", CONFIGS)
def test_parts_for_devices(name: str, config: str, tmp_path: Path) -> None:
    numbers = write(tmp_path, CONFIGS[config], form(name), "stacks" if name != "gptq, zeros" else "one by one")
    packed, files = host_form(), opened(tmp_path)
    units = {key: 256 for key in files.block_types(packed) if key.endswith(".down_proj.weight")}
    split = WeightSplitter(CONFIGS[config], 2, units=units).over(["cpu", "cpu"])
    parts = files.parts("bfloat16", split, kept=KeptForms(blocks=files.block_types(packed)))
    found = quantize_parts(parts, STORED, files.config, [packed, packed])
    for device, weights in enumerate(found):
        assert any(isinstance(weight, QTensor) for weight in weights.values())
        for key, weight in weights.items():
            wanted = dict(split.own(key, tuple(numbers[key].shape)))[device].of(numbers[key])
            assert torch.allclose(numbers_of(weight), wanted, rtol=4e-3, atol=0), key


def test_packed_projections_of_qwen3_next(tmp_path: Path) -> None:
    """Rows of q, k, v and z that take turns."""
    numbers = write(tmp_path, CONFIGS["dense"], "NVFP4")
    stored, key = load_file(tmp_path / "model.safetensors"), "model.layers.0.linear_attn.in_proj"
    for end in ("weight_packed", "weight_scale", "weight_global_scale"):
        qkv, z = (stored.pop(f"{key}_{part}.{end}") for part in ("qkv", "z"))
        if end == "weight_global_scale":
            stored[f"{key}_qkvz.{end}"] = qkv
            continue
        q, k, v = qkv.split([64, 64, 512])
        heads = [part.view(4, -1, part.shape[1]) for part in (q, k, v, z)]
        stored[f"{key}_qkvz.{end}"] = torch.cat(heads, 1).flatten(0, 1)
    save_file(stored, tmp_path / "model.safetensors")
    found = kept(tmp_path, host_form())
    assert torch.allclose(numbers_of(found[f"{key}_qkv.weight"]), numbers[f"{key}_qkv.weight"], rtol=3e-7)


@pytest.mark.parametrize("name", ["NVFP4", "gptq, zeros"])
def test_logits_of_stored_weights(name: str, tmp_path: Path) -> None:
    """Those of the dequantized weights, up to the rounding of activations to 8 bits; in float32 all are dequantized."""
    write(tmp_path, CONFIGS["dense"], form(name))
    tokens, found = list(range(1, 40)), {}
    for dtype, packed in (("bfloat16", "auto"), ("bfloat16", "off"), ("float32", "auto")):
        options = EngineConfig(dtype=dtype, memory="16MiB", packed_weights=packed, threads=1, speculate="off")
        runtime = load(str(tmp_path), options)
        logits = session_over(runtime, batch=2, budget=512).prefill(tokens, all_logits=True)
        found[dtype, packed] = torch.as_tensor(logits).float()
    exact = found["float32", "auto"]
    assert not torch.equal(found["bfloat16", "auto"], found["bfloat16", "off"])
    for logits in found.values():
        assert (logits - exact).norm() < 0.1 * exact.norm()


def test_a_model_that_cannot_be_split_in_blocks_is_dequantized(tmp_path: Path) -> None:
    config = shape(**SIZES | {"linear": LinearConfig(4, 4, 16, 64, 4)})
    write(tmp_path, config, "NVFP4")
    for count, packed in ((1, True), (2, False)):
        runtime = load(str(tmp_path), EngineConfig(
            memory="16MiB", tp=count, device="cpu", dtype="bfloat16", speculate="off"))
        assert ("NVFP4" in runtime.decoder.weight_kinds()) == packed


def test_what_blocks_cannot_hold_is_dequantized(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    numbers = write(tmp_path, CONFIGS["dense"], form("gptq"))
    stored, key = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp.down_proj"
    stored[f"{key}.scales"] = stored[f"{key}.scales"].float() * (1 + 2**-20)
    save_file(stored, tmp_path / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        found = kept(tmp_path, host_form())[f"{key}.weight"]
    assert isinstance(found, Tensor) and f"tensor '{key}.weight' is dequantized, because" in caplog.text
    assert torch.allclose(found.float(), numbers[f"{key}.weight"], rtol=4e-3, atol=0)


def test_reasons() -> None:
    codes = torch.zeros(2, 128, dtype=torch.uint8)
    scales = torch.full((2, 16), 0x38, dtype=torch.uint8)
    scales[1, 3] = 0x7f
    with pytest.raises(InexactError, match="not numbers"):
        nvfp4_blocks(codes, scales, 1.0)
    with pytest.raises(InexactError, match="a scale of inf"):
        nvfp4_blocks(codes, scales[:1].expand(2, -1), float("inf"))
    with pytest.raises(InexactError, match="not numbers"):
        mxfp4_blocks(codes, torch.full((2, 8), 255, dtype=torch.uint8))
    with pytest.raises(InexactError, match="not finite"):
        int4_blocks(codes, torch.full((2, 2), torch.inf), 8)
    with pytest.raises(InexactError, match="more than 16 bits"):
        int4_blocks(codes, torch.full((2, 2), 1 / 3), 8)
    with pytest.raises(InexactError, match="16 groups in rows of 256"):
        int4_blocks(codes, torch.ones(2, 16), 8)


def test_signs_of_scales_move_to_the_codes() -> None:
    codes = torch.arange(128, dtype=torch.uint8)[None]
    scales = torch.full((1, 16), 0x38, dtype=torch.uint8)
    scales[0, 5] |= 0x80
    blocks = nvfp4_blocks(codes, scales, 1.0)[0]
    assert blocks[4 + 5] == 0x38 and torch.equal(blocks[20 + 40:20 + 48], codes[0, 40:48] ^ 0x88)
    assert torch.equal(blocks[20:20 + 40], codes[0, :40])
