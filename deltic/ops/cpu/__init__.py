"""Compiled kernels over the torch backend, for processors of this machine. `unavailable` says why there are none."""

from __future__ import annotations

from dataclasses import replace

from deltic.ops import Ops
from deltic.ops.cpu.kernels import add_norm, gdn_mixer, head, mlp
from deltic.ops.cpu.library import load
from deltic.ops.torch import OPS as TORCH_OPS


def unavailable() -> str | None:
    """Why the kernels cannot be used here, or None."""
    library = load()
    return library if isinstance(library, str) else None


def overlay() -> Ops:
    """The torch ops with the kernels that this processor can run."""
    library = load()
    assert not isinstance(library, str), library
    ops = replace(TORCH_OPS, add_norm=add_norm, mlp=mlp, gdn_mixer=gdn_mixer)
    return replace(ops, head=head) if library.deltic_has_bf16() else ops
