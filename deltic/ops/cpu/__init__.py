"""Compiled kernels over the torch backend. `missing` says which of them cannot be used here, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from deltic.ops import Ops
from deltic.ops.cpu.kernels import add_norm, gdn_mixer, head, mlp
from deltic.ops.cpu.library import load
from deltic.ops.torch import OPS as TORCH_OPS

_KERNELS: dict[str, Any] = {"add_norm": add_norm, "gdn_mixer": gdn_mixer, "mlp": mlp, "head": head}


def missing() -> dict[str, str]:
    """Kernels that cannot be used here, and why."""
    library = load()
    if isinstance(library, str):
        return dict.fromkeys(_KERNELS, library)
    return {} if library.deltic_has_bf16() else {"head": "this processor has no AVX-512 BF16"}


def overlay() -> Ops:
    """The torch ops with the kernels that can be used here."""
    return replace(TORCH_OPS, **{name: kernel for name, kernel in _KERNELS.items() if name not in missing()})
