"""Backend of compiled CPU kernels, on top of the torch backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from deltic.errors import ConfigError
from deltic.ops import Ops
from deltic.ops.cpu.encoder import encoder_run, vision
from deltic.ops.cpu.kernels import (
    add_norm,
    attention_mixer,
    flush_delta_log,
    gdn_mixer,
    head,
    linear,
    mlp,
    moe,
    pack,
    sample,
    store_kv,
)
from deltic.ops.cpu.library import LEVELS, ThreadPool, load
from deltic.ops.cpu.step import has_wide_activations as has_wide_activations
from deltic.ops.cpu.step import left_to_others as left_to_others
from deltic.ops.cpu.step import mtp_step as mtp_step
from deltic.ops.cpu.step import step as step
from deltic.ops.encoder import Affine, EncoderBackend, EncoderWeights, Ragged
from deltic.ops.torch import OPS as TORCH_OPS
from deltic.ops.torch import encoder as torch_encoder

_KERNELS: dict[str, Any] = {
    "pack": pack,
    "add_norm": add_norm,
    "gdn_mixer": gdn_mixer,
    "flush_delta_log": flush_delta_log,
    "attention_mixer": attention_mixer,
    "store_kv": store_kv,
    "mlp": mlp,
    "moe": moe,
    "head": head,
    "sample": sample,
    "step": step,
    "mtp_step": mtp_step,
    "vision": vision,
}


def missing() -> dict[str, str]:
    """Returns the kernels that are unusable here, with the reasons."""
    loaded = load()
    return dict.fromkeys(_KERNELS, loaded) if isinstance(loaded, str) else {}


def packs(ops: Ops) -> bool:
    """Returns True if these ops pack matrices for the kernels."""
    return getattr(ops.pack, "__func__", None) is pack


def overlay(level: str = "auto", threads: int = 1) -> Ops:
    """Returns the torch ops with all usable kernels. threads: size of their own pool, including the calling thread.

    level: one of `LEVELS`, or auto for the best. Raises ConfigError if this processor lacks its instructions.
    """
    absent, pool = missing(), pool_of(level, threads)
    return replace(TORCH_OPS, **{name: MethodType(kernel, pool) for name, kernel in _KERNELS.items()
                                 if name not in absent})


def encoder_backend(dtype: torch.dtype, level: str, threads: int) -> EncoderBackend:
    """Returns the encoder backend of compiled kernels, with float32 activations. dtype: of the packed matrices."""
    pool = pool_of(level, threads)

    def product(x: Tensor, affine: Affine) -> Tensor:
        return linear(pool, x, affine.weight) + affine.bias

    def run(weights: EncoderWeights) -> Callable[[Ragged, Tensor], Tensor]:
        native = encoder_run(pool, weights)
        assert native is not None  # the weights are packed

        def states(batch: Ragged, x: Tensor) -> Tensor:
            torch_threads(1)  # two spinning thread pools would slow each other down
            return native(batch, x)

        return states

    plain = torch_encoder.encoder_backend(torch.device("cpu"), dtype)
    return replace(plain, activations=torch.float32, linear=product, run=run, packs=True)


def pool_of(level: str = "auto", threads: int = 1) -> ThreadPool:
    """Returns a thread pool. level: one of `LEVELS`, or auto for the best. Raises ConfigError if this processor lacks
    its instructions."""
    return ThreadPool(_number(level), threads)


def _number(level: str) -> int:
    loaded = load()
    if isinstance(loaded, str):
        if level != "auto":
            raise ConfigError(f"cpu_level={level}: {loaded}", "cpu_level")
        return 0
    best = int(loaded.deltic_best_level())
    if level == "auto":
        return best
    if level not in LEVELS:
        raise ConfigError(f"cpu_level={level}: other processors have this level; use auto or {', '.join(LEVELS)}",
                          "cpu_level")
    if LEVELS.index(level) > best:
        raise ConfigError(f"cpu_level={level}: this processor has {LEVELS[best]} at most", "cpu_level")
    return LEVELS.index(level)


def use_torch_threads(ops: Ops, count: int) -> None:
    """Sets torch's thread count for a step of these ops: `count`, or 1 if the kernels serve whole steps.

    Two thread pools that take turns would slow each other down by spinning. Torch stores the count per calling thread,
    and threads without a count use the last one set. Setting it before every step selects this model's count.
    """
    torch_threads(1 if getattr(ops.step, "__func__", None) is step else count)


def torch_threads(wanted: int) -> None:
    """Sets torch's thread count in the calling thread."""
    if torch.get_num_threads() != wanted:
        torch.set_num_threads(wanted)
