"""Records launches as a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from deltic.ops.memory import guard

Result = TypeVar("Result")


def record(launch: Callable[[], Result], pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Returns a graph of what `launch` launches, which does not run, and the result of `launch`. pool: memory of an
    earlier graph, which this one may use too."""
    graph = torch.cuda.CUDAGraph()
    # other threads may copy meanwhile, but no old graph may be collected as garbage
    collects = gc.isenabled()
    gc.disable()
    try:
        with guard().inside(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = launch()
    finally:
        if collects:
            gc.enable()
    return graph, result
