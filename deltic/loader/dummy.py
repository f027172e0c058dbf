"""Random weights of a given shape, for tests and benchmarks."""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

import torch

from deltic.config import DType, ModelConfig, available_cores
from deltic.loader.names import Shape, expected_head, expected_tensors, is_norm, tensor_dtype
from deltic.loader.safetensors import TORCH_DTYPES


def random_weights(config: ModelConfig, dtype: DType | Literal["auto"] = "auto", seed: int = 0, **options: Any
                   ) -> dict[str, torch.Tensor]:
    """Returns the tensors of `random_tensors`."""
    return dict(random_tensors(config, dtype, seed, **options))


def random_head(config: ModelConfig, dtype: DType | Literal["auto"] = "auto", seed: int = 0, **options: Any
                ) -> dict[str, torch.Tensor]:
    """Returns a multi-token-prediction head of `random_tensors`."""
    return dict(random_tensors(config, dtype, seed, head=True, **options))


def random_tensors(
    config: ModelConfig,
    dtype: DType | Literal["auto"] = "auto",
    seed: int = 0,
    *,
    device: str | torch.device = "cpu",
    initializer_range: float | None = None,
    head: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of `expected_tensors(config)`, or `expected_head(config)`, with random values.

    Matrices are normal with std `initializer_range`, by default 1/sqrt(inputs), which keeps activations finite at any
    depth. Norm factors are near 1. Decays range from one token to thousands, so that a lost or stale recurrent state
    changes the output. Values depend on seed, name, shape, dtype and architecture only.
    """
    kept: DType = config.dtype if dtype == "auto" else dtype
    place = torch.device(device)

    def make(item: tuple[str, Shape]) -> tuple[str, torch.Tensor]:
        name, shape = item
        tensor = torch.empty(shape, dtype=TORCH_DTYPES[tensor_dtype(name, kept)], device=place)
        # The CPU generator uses the low 32 bits of a seed only.
        generator = torch.Generator(place).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        return name, _fill(name, tensor, generator, initializer_range, config.norm_offset)

    shapes = expected_head(config) if head else expected_tensors(config)
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
        # Inverse softplus of time steps between 0.001 and 0.1.
        step = tensor.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_()
        return step.expm1_().log_()
    if is_norm(name):
        # the norm inside linear_attn multiplies by its plain weight in every family
        return tensor.normal_(1.0 if "linear_attn" in name else 1.0 - norm_offset, 0.02, generator=generator)
    return tensor.normal_(0.0, spread or tensor.shape[-1] ** -0.5, generator=generator)
