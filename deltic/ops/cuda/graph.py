"""What is launched on a GPU, as a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from deltic.ops.memory import guard

Result = TypeVar("Result")


def record(launch: Callable[[], Result], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A graph of what `launch` launches, which is not run, and what it returns. pool: memory of an earlier graph, which
    this one may use too."""
    graph = torch.cuda.CUDAGraph()
    # other threads may copy to and from the card meanwhile, but nobody may collect an old graph as garbage
    collects = gc.isenabled()
    gc.disable()
    try:
        with guard().inside(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = launch()
    finally:
        if collects:
            gc.enable()
    return graph, result
