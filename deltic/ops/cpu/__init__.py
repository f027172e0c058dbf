"""Compiled kernels over the torch backend. `missing` says which of them cannot be used here, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from deltic.errors import ConfigError
from deltic.ops import Ops
from deltic.ops.cpu import library
from deltic.ops.cpu.kernels import add_norm, attention_mixer, fold_ring, gdn_mixer, head, mlp, pack, store_kv
from deltic.ops.cpu.library import LEVELS, load
from deltic.ops.cpu.sample import sample
from deltic.ops.cpu.step import head_step, step
from deltic.ops.torch import OPS as TORCH_OPS

_KERNELS: dict[str, Any] = {"pack": pack, "add_norm": add_norm, "gdn_mixer": gdn_mixer, "fold_ring": fold_ring,
                            "attention_mixer": attention_mixer, "store_kv": store_kv, "mlp": mlp, "head": head,
                            "sample": sample, "step": step, "head_step": head_step}


def missing() -> dict[str, str]:
    """Kernels that cannot be used here, and why."""
    loaded = load()
    return dict.fromkeys(_KERNELS, loaded) if isinstance(loaded, str) else {}


def use_level(level: str) -> None:
    """Which instructions the kernels use from now on, in the whole process: one of `LEVELS`, or auto, the best.

    ConfigError if this processor does not have them.
    """
    loaded = load()
    if isinstance(loaded, str):
        if level != "auto":
            raise ConfigError(f"cpu_level={level}: {loaded}", "cpu_level")
        return
    best = loaded.deltic_best_level()
    if loaded.deltic_set_level(best if level == "auto" else LEVELS.index(level)):
        raise ConfigError(f"cpu_level={level}: this processor has {LEVELS[best]} at most", "cpu_level")


def use_threads(count: int, ops: Ops) -> None:
    """How many threads the process uses for these ops from now on: the kernels, or else torch. (Two pools of threads
    that take turns would spin in each other's way.)"""
    native = not missing() and ops.step is step
    library.use_threads(count if native else 1)
    torch.set_num_threads(1 if native else count)


def threads() -> int:
    """How many threads the process uses for its ops."""
    return max(library.threads(), torch.get_num_threads())


def overlay() -> Ops:
    """The torch ops with the kernels that can be used here."""
    return replace(TORCH_OPS, **{name: kernel for name, kernel in _KERNELS.items() if name not in missing()})
