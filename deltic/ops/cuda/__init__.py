"""Kernels for NVIDIA GPUs over the torch backend, compiled when a model is loaded; importing this loads no driver."""

from __future__ import annotations

from dataclasses import replace

import torch

from deltic.ops import Capabilities, Ops
from deltic.ops.cuda.decode import left_to_torch as left_to_torch
from deltic.ops.cuda.decode import serves_delta_logs as serves_delta_logs
from deltic.ops.cuda.decode import step
from deltic.ops.cuda.encoder import VisionOp
from deltic.ops.cuda.layout import MAX_GEMV_TOKENS
from deltic.ops.cuda.mtp import mtp_step
from deltic.ops.cuda.quantized_tiles import PACKED_FORMATS
from deltic.ops.cuda.sample import sample
from deltic.ops.cuda.state_delta_log import flush_delta_log
from deltic.ops.torch import OPS as TORCH_OPS


def overlay() -> Ops:
    """Returns the torch ops with whole steps, draws, vision towers and draft heads by our own kernels where they can be
    used."""
    return replace(
        TORCH_OPS, step=step, sample=sample, flush_delta_log=flush_delta_log, mtp_step=mtp_step, vision=VisionOp()
    )


def capabilities(device: torch.device, dtype: str) -> Capabilities:
    """Returns what our kernels can do with models of this dtype; torch serves all others, one op at a time."""
    own_kernels = dtype == "bfloat16"
    verifies = serves_delta_logs(device, dtype)
    return Capabilities(
        runs_async=True,
        records_graphs=True,
        reports_to_pinned_memory=True,
        max_verify_rows=MAX_GEMV_TOKENS if verifies else None,
        defers_state_writes=verifies,
        drafts_on_device=own_kernels,
        packed_formats=PACKED_FORMATS if own_kernels else frozenset(),
    )
