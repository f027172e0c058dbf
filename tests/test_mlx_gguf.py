"""GGUF files on device mlx: codes that MLX has too stay as they are, others become 8 bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from safetensors.torch import save_file
from support import numbers, odd_shape, same_logits, session_over, tiny_texts

from deltic.config import EngineConfig, ExpertsConfig, GenerationDefaults, LinearConfig, ModelConfig, RopeConfig
from deltic.engine.loading import load
from deltic.loader.dummy import random_weights
from deltic.loader.gguf.affine import GROUP, AffineBlocks, affine_rows
from deltic.loader.gguf.convert import convert
from deltic.loader.model_files import ModelFiles
from deltic.ops.mlx import missing
from deltic.ops.types import MlpWeights, MoeWeights

needs_mlx = pytest.mark.skipif(bool(missing()), reason=str(missing()))
SIZES = {"vocab_size": 3072, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64,
         "num_hidden_layers": 4, "rope": RopeConfig(1e4, 16, (1, 1, 1)), "linear": LinearConfig(2, 6, 24, 128, 4),
         "layer_types": ("linear_attention", "full_attention", "linear_attention", "linear_attention")}
SHAPES = {"dense": odd_shape(**SIZES), "experts": odd_shape(**{
    **SIZES, "architecture": "qwen3_5_moe", "intermediate_size": 0, "experts": ExpertsConfig(5, 2, 256, 256)})}


@pytest.mark.parametrize("type", ["Q4_0", "Q4_1", "Q8_0"])
def test_codes_are_the_blocks_numbers(type: str) -> None:
    rng = np.random.default_rng(1)
    plain = rng.standard_normal((6, 256)).astype(np.float32)
    raw = quants.quantize(plain, GGMLQuantizationType[type])
    check(type, raw, quants.dequantize(raw, GGMLQuantizationType[type]))


def test_codes_of_q4_k_are_the_blocks_numbers() -> None:
    rng = np.random.default_rng(2)
    raw = rng.integers(0, 256, (6, 144), np.uint8)
    raw[:, :4] = np.array([0.02, 0.01], "<f2").view(np.uint8)  # scales of whole blocks
    check("Q4_K", raw, quants.dequantize(raw, GGMLQuantizationType.Q4_K))


def check(type: str, raw: np.ndarray, expected: np.ndarray) -> None:
    found = affine_rows(type, raw, len(raw))
    assert isinstance(found, AffineBlocks) and found.codes.max() < 1 << found.bits
    groups = found.codes.reshape(len(raw), -1, GROUP) * found.scales[..., None] + found.biases[..., None]
    np.testing.assert_allclose(groups.reshape(expected.shape), expected, rtol=1e-6, atol=1e-6)


def test_other_types_are_numbers() -> None:
    raw = quants.quantize(np.ones((2, 64), np.float32), GGMLQuantizationType.Q5_0)
    np.testing.assert_array_equal(affine_rows("Q5_0", raw, 2), quants.dequantize(raw, GGMLQuantizationType.Q5_0))


def written(folder: Path, config: ModelConfig, kind: str) -> Path:
    (folder / "model").mkdir()
    save_file(random_weights(config, "float32", initializer_range=0.1), folder / "model" / "model.safetensors")
    path = folder / "model.gguf"
    convert(ModelFiles(folder / "model", config, GenerationDefaults(eos_token_ids=(0,))), tiny_texts(), "x", path, kind)
    return path


@needs_mlx
@pytest.mark.parametrize(("shape", "kind"), [
    ("dense", "Q8_0"), ("experts", "Q8_0"), pytest.param("dense", "Q4_K_M", marks=pytest.mark.slow)])
def test_logits_are_those_of_the_cpu(shape: str, kind: str, tmp_path: Path) -> None:
    """Value heads are tiled in these files."""
    from deltic.ops.mlx.linear import MlxMatrix

    path = written(tmp_path, SHAPES[shape], kind)
    ours, others = (load(str(path), EngineConfig(dtype="float32", memory="8MiB", max_batch=2, threads=1, device=device,
                                                 ops=ops, packed_weights="on"))
                    for device, ops in (("mlx", ()), ("cpu", ("torch",))))
    layer = ours.decoder.weights.layers[0]
    assert isinstance(layer.mixer.out_proj, MlxMatrix)
    if shape == "experts":
        assert isinstance(layer.mlp, MoeWeights) and isinstance(layer.mlp.experts, tuple)
        assert isinstance(layer.mlp.experts[0], MlpWeights)
    tokens = numbers(4, 70, 3072)
    found, expected = (session_over(each, batch=1, budget=33).prefill(tokens, all_logits=True)
                       for each in (ours, others))
    if kind == "Q8_0":
        same_logits(expected, found)
    else:
        assert float((expected.argmax(-1) == found.argmax(-1)).float().mean()) > 0.8
    assert torch.isfinite(found).all()

