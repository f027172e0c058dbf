"""Float8 weights: what is rounded, and how far."""

from __future__ import annotations

import pytest
import torch
from support import odd_shape

from deltic.config import EngineConfig, LinearConfig, ModelConfig, RopeConfig
from deltic.engine.loading import load
from deltic.errors import ConfigError, ModelError
from deltic.ops.cuda.tiles import Tiles, form
from deltic.weights import fp8
from deltic.weights.names import EMBEDDING, HEAD
from deltic.weights.quant import FP8, quantize_tensors
from deltic.weights.random import random_weights


def decoded(raw: torch.Tensor) -> torch.Tensor:
    blocks = raw.unflatten(1, (-1, fp8.TYPE.nbytes))
    scales, codes = blocks[..., :4].contiguous().view(torch.float32), blocks[..., 4:].contiguous()
    return (codes.view(torch.float8_e4m3fn).float() * scales).flatten(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_rounded_to_the_nearest(dtype: torch.dtype) -> None:
    matrix = (torch.randn(24, 512) * torch.logspace(-6, 3, 24)[:, None]).to(dtype)
    found = decoded(fp8.quantize_fp8("w", matrix))
    largest = matrix.float().unflatten(1, (-1, 128)).abs().amax(-1, keepdim=True).expand(-1, -1, 128).flatten(1)
    # four significant bits; below 2^-6 of the format, steps of 2^-9
    allowed = torch.maximum(matrix.float().abs() / 16, largest / fp8.LARGEST / 2**10) * (1 + 1e-5)
    assert bool(((found - matrix.float()).abs() <= allowed).all())
    assert torch.allclose(found.unflatten(1, (-1, 128)).abs().amax(-1), largest[:, ::128], rtol=1e-6)


def test_float8_numbers_stay_as_they_are() -> None:
    codes = torch.arange(256, dtype=torch.uint8)[None].repeat(3, 1)
    codes[codes & 0x7f == 0x7f] -= 1
    matrix = codes.view(torch.float8_e4m3fn).float() * torch.tensor([1.0, 2.0**-9, 32.0])[:, None]
    assert torch.equal(decoded(fp8.quantize_fp8("w", matrix)), matrix)


def test_nothing_is_nothing() -> None:
    assert torch.equal(decoded(fp8.quantize_fp8("w", torch.zeros(2, 256))), torch.zeros(2, 256))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_refused(value: float) -> None:
    matrix = torch.ones(2, 256)
    matrix[1, 200] = value
    with pytest.raises(ModelError, match=r"'model\.w'.*not finite"):
        fp8.quantize_fp8("model.w", matrix)


def shape() -> ModelConfig:
    """Rows of 256 and of 384 weights: the latter fit no tiles."""
    return odd_shape(vocab_size=300, hidden_size=256, intermediate_size=384, num_attention_heads=4, head_dim=64,
                     rope=RopeConfig(1e4, 6, (1, 1, 1)), linear=LinearConfig(2, 4, 10, 64, 4))


def test_a_model_in_float8() -> None:
    """Embedding, head and what decays are made of in 8 bits; of vectors and rows that fit no tiles nothing."""
    sources = random_weights(shape(), "bfloat16")
    found = quantize_tensors(iter(sources.items()), FP8, shape(), form("cpu"))
    kinds = {name: tensor.type if isinstance(tensor, Tiles) else "plain" for name, tensor in found.items()}
    for name, tensor in sources.items():
        plain = tensor.dim() < 2 or tensor.shape[-1] % 256 or name.endswith(".conv1d.weight")
        precise = name in (EMBEDDING, HEAD) or name.endswith((".in_proj_a.weight", ".in_proj_b.weight"))
        assert kinds[name] == ("plain" if plain else "Q8_0" if precise else "FP8"), name
        if isinstance(weight := found[name], Tiles):
            error = (weight.dequantize() - tensor.float()).norm() / tensor.float().norm()
            assert error < (0.03 if weight.type == "FP8" else 0.01), name
    assert {*kinds.values()} == {"plain", "Q8_0", "FP8"}


def test_a_cpu_refuses_it() -> None:
    with pytest.raises(ConfigError, match="quant=fp8 is not possible: float8 is for GPUs; take q8_0"):
        load(None, EngineConfig(quant="fp8", memory="16MiB"))
