"""Compiled kernels over the torch backend. `missing` says which of them cannot be used here, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from deltic.errors import ConfigError
from deltic.ops import Ops
from deltic.ops.cpu.kernels import add_norm, attention_mixer, gdn_mixer, head, mlp, pack
from deltic.ops.cpu.library import LEVELS, load
from deltic.ops.cpu.step import step
from deltic.ops.torch import OPS as TORCH_OPS

_KERNELS: dict[str, Any] = {"pack": pack, "add_norm": add_norm, "gdn_mixer": gdn_mixer,
                            "attention_mixer": attention_mixer, "mlp": mlp, "head": head, "step": step}


def missing() -> dict[str, str]:
    """Kernels that cannot be used here, and why."""
    library = load()
    return dict.fromkeys(_KERNELS, library) if isinstance(library, str) else {}


def use_level(level: str) -> None:
    """Which instructions the kernels use from now on, in the whole process: one of `LEVELS`, or auto, the best.

    ConfigError if this processor does not have them.
    """
    library = load()
    if isinstance(library, str):
        if level != "auto":
            raise ConfigError(f"cpu_level={level}: {library}", "cpu_level")
        return
    best = library.deltic_best_level()
    if library.deltic_set_level(best if level == "auto" else LEVELS.index(level)):
        raise ConfigError(f"cpu_level={level}: this processor has {LEVELS[best]} at most", "cpu_level")


def overlay() -> Ops:
    """The torch ops with the kernels that can be used here."""
    return replace(TORCH_OPS, **{name: kernel for name, kernel in _KERNELS.items() if name not in missing()})
