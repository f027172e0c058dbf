"""An encoder's layers on a card in bfloat16: cuBLAS products, one of them with its GELU inside, flash attention, and
one kernel for each residual sum with its norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from deltic.ops.cuda import arguments as args
from deltic.ops.cuda.driver import Module
from deltic.ops.cuda.kernel_config import entry
from deltic.ops.cuda.nvrtc import CompileError, headers
from deltic.ops.encoder import Affine, EncoderWeights, LayerNorm, Ragged, attention_of, normed

_WIDEST: Final = 4096
"""Numbers of a token that a warp has in its registers."""
_THREADS: Final = 256
"""Of a block, a warp of which has a token."""


def encoder_run(weights: EncoderWeights) -> Callable[[Ragged, Tensor], Tensor] | None:
    """What `ops.encoder.run` does for these weights; None where torch has to serve: another dtype or width, an old
    card, no compiler."""
    scale = weights.norm.scale
    hidden = len(scale)
    if scale.dtype != torch.bfloat16 or hidden % 8 or hidden > _WIDEST:
        return None
    if torch.cuda.get_device_capability(scale.device) < (8, 0):
        return None
    try:
        module = Module(source(hidden), scale.device)
    except CompileError:
        return None

    def add_norm(x: Tensor, delta: Tensor, norm: LayerNorm) -> Tensor:
        """The sum's norm, where `delta` was."""
        module.launch("k_residual_norm", (-(-len(x) * 32 // _THREADS),), _THREADS, args.ResidualNormArgs(
            x=x, delta=delta, scale=norm.scale, shift=norm.shift, y=delta, eps=weights.eps, tokens=len(x)))
        return delta

    def run(batch: Ragged, x: Tensor) -> Tensor:
        with torch.cuda.device(x.device):
            x, attend = normed(x, weights), attention_of(batch, x.device)
            for layer in weights.layers:
                mixed = attend(_affine(x, layer.qkv), weights.heads)
                x = add_norm(x, _affine(mixed, layer.out), layer.attention_norm)
                x = add_norm(x, _affine(_gelu_affine(x, layer.up), layer.down), layer.output_norm)
            return x
    return run


def source(hidden: int) -> str:
    """The text of the kernels for states of so many numbers."""
    return headers("encoder") + entry("residual_norm", "ResidualNorm", str(_THREADS), f"residual_norm<{hidden}>")


def _affine(x: Tensor, affine: Affine) -> Tensor:
    assert isinstance(affine.weight, Tensor)
    return F.linear(x, affine.weight, affine.bias)


def _gelu_affine(x: Tensor, affine: Affine) -> Tensor:
    """cuBLAS's GELU is the approximation by a hyperbolic tangent, which differs from the exact one by less than 5e-4:
    no more than bfloat16 does at such numbers."""
    assert isinstance(affine.weight, Tensor)
    found: Tensor = torch.ops.aten._addmm_activation(affine.bias, x, affine.weight.t(), use_gelu=True)
    return found
