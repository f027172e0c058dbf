"""Kernels for NVIDIA GPUs over the torch backend, compiled when a model is loaded. Importing this loads none of it."""

from __future__ import annotations

from dataclasses import replace

from deltic.ops import Ops
from deltic.ops.cuda.decode import left_to_torch as left_to_torch
from deltic.ops.cuda.decode import serves_rings as serves_rings
from deltic.ops.cuda.decode import step
from deltic.ops.cuda.mtp import mtp_step
from deltic.ops.cuda.sample import sample
from deltic.ops.cuda.state_delta_log import fold_ring
from deltic.ops.cuda.tower import VisionOp
from deltic.ops.torch import OPS as TORCH_OPS


def overlay() -> Ops:
    """The torch ops with whole decode steps, draws and vision towers by kernels of our own where they can be used."""
    return replace(TORCH_OPS, step=step, sample=sample, fold_ring=fold_ring, mtp_step=mtp_step, vision=VisionOp())
