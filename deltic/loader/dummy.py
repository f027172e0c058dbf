"""Weights of true shape without a checkpoint, for tests and benchmarks."""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

import torch

from deltic.config import DType, ModelConfig, available_cores
from deltic.loader.names import Shape, expected_head, expected_tensors, is_norm, tensor_dtype
from deltic.loader.safetensors import TORCH_DTYPES


def random_weights(
    config: ModelConfig,
    dtype: DType | Literal["auto"] = "auto",
    seed: int = 0,
    *,
    device: str | torch.device = "cpu",
    initializer_range: float | None = None,
) -> dict[str, torch.Tensor]:
    """The tensors of `expected_tensors(config)` with random values, in the dtypes of `load_directory`.

    Matrices are normal with std `initializer_range`, by default 1/sqrt(inputs), which keeps activations
    finite at any depth. The factors of norms scatter around one. Decays span from a token to thousands of
    tokens, so that a lost or stale recurrent state shows in the output. A tensor's values depend on seed, name,
    shape, dtype and architecture only.
    """
    return dict(random_tensors(config, dtype, seed, device=device, initializer_range=initializer_range))


def random_tensors(
    config: ModelConfig,
    dtype: DType | Literal["auto"] = "auto",
    seed: int = 0,
    *,
    device: str | torch.device = "cpu",
    initializer_range: float | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """What `random_weights` gives, one after another, of which few are made ahead."""
    return _random(expected_tensors(config), config, dtype, seed, torch.device(device), initializer_range)


def random_head(
    config: ModelConfig,
    dtype: DType | Literal["auto"] = "auto",
    seed: int = 0,
    *,
    device: str | torch.device = "cpu",
    initializer_range: float | None = None,
) -> dict[str, torch.Tensor]:
    """The tensors of `expected_head(config)`, made as `random_weights` makes those of the trunk."""
    return dict(_random(expected_head(config), config, dtype, seed, torch.device(device), initializer_range))


def _random(shapes: Mapping[str, Shape], config: ModelConfig, dtype: DType | Literal["auto"], seed: int,
            place: torch.device, spread: float | None) -> Iterator[tuple[str, torch.Tensor]]:
    kept: DType = config.dtype if dtype == "auto" else dtype

    def make(item: tuple[str, Shape]) -> tuple[str, torch.Tensor]:
        name, shape = item
        tensor = torch.empty(shape, dtype=TORCH_DTYPES[tensor_dtype(name, kept)], device=place)
        # The CPU generator looks at the low 32 bits of a seed only.
        generator = torch.Generator(place).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        return name, _fill(name, tensor, generator, spread, config.norm_offset)

    if place.type != "cpu":
        yield from map(make, shapes.items())
        return
    with ThreadPoolExecutor(available_cores()) as pool:
        ahead: deque[Future[tuple[str, torch.Tensor]]] = deque()
        for item in shapes.items():
            ahead.append(pool.submit(make, item))
            if len(ahead) > available_cores():
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _fill(name: str, tensor: torch.Tensor, generator: torch.Generator, spread: float | None,
          norm_offset: float) -> torch.Tensor:
    if name.endswith(".A_log"):
        return tensor.uniform_(0.01, 16.0, generator=generator).log_()
    if name.endswith(".dt_bias"):
        # The inverse of softplus, of time steps between 0.001 and 0.1.
        step = tensor.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_()
        return step.expm1_().log_()
    if is_norm(name):
        # the norm inside linear_attn multiplies by its plain weight in every family
        return tensor.normal_(1.0 if "linear_attn" in name else 1.0 - norm_offset, 0.02, generator=generator)
    return tensor.normal_(0.0, spread or tensor.shape[-1] ** -0.5, generator=generator)
