"""Kernels for NVIDIA GPUs over the torch backend, compiled when a model is loaded; importing this loads no driver."""

from __future__ import annotations

from dataclasses import replace

from deltic.ops import Ops
from deltic.ops.cuda.decode import left_to_torch as left_to_torch
from deltic.ops.cuda.decode import serves_delta_logs as serves_delta_logs
from deltic.ops.cuda.decode import step
from deltic.ops.cuda.encoder import VisionOp
from deltic.ops.cuda.mtp import mtp_step
from deltic.ops.cuda.sample import sample
from deltic.ops.cuda.state_delta_log import flush_delta_log
from deltic.ops.torch import OPS as TORCH_OPS


def overlay() -> Ops:
    """Returns the torch ops with deltic's kernels for whole steps, draws, vision towers and draft heads, wherever these
    can be used."""
    return replace(TORCH_OPS, step=step, sample=sample, flush_delta_log=flush_delta_log, mtp_step=mtp_step,
                   vision=VisionOp())
