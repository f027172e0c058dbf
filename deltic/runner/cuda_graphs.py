"""Decode steps on a GPU as CUDA graphs: what a step launches is recorded once per bucket, then replayed in one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltic.ops.cuda.graph import record
from deltic.ops.types import Batch, Padded
from deltic.runner.input_batch import step_of


@dataclass(frozen=True, slots=True)
class _Captured:
    """numbers: the graph reads the step's integers here. logits [rows, V]: it writes them here, in memory that other
    graphs use too."""

    graph: torch.cuda.CUDAGraph
    numbers: Tensor
    logits: Tensor


class _Borrowed:
    """A tensor's memory without a claim to it: graphs that run one after another share what they work in."""

    def __init__(self, tensor: Tensor) -> None:
        assert tensor.dtype == torch.float32 and tensor.is_contiguous()
        self.__cuda_array_interface__ = {"shape": tuple(tensor.shape), "typestr": "<f4", "version": 3,
                                         "data": (tensor.data_ptr(), False)}


class CudaGraphs:
    """Runs steps by replaying graphs of `forward`. The first step of a bucket runs as it is and is recorded after;
    recording runs nothing, so every step happens once."""

    def __init__(self, forward: Callable[[Batch], Tensor]) -> None:
        """forward: a step to its logits [L, V]; must launch the same for all steps of a bucket."""
        self._forward = forward
        self._captured: dict[tuple[int, int, int | None], _Captured] = {}
        self._pool: Any = None

    @property
    def buckets(self) -> tuple[tuple[int, int, int | None], ...]:
        """What was recorded so far: rows, pages and tokens, as in `Padded`."""
        return tuple(self._captured)

    def run(self, batch: Batch) -> Tensor | None:
        """The logits [L, V] of a step, valid until the next one; None where it has no bucket."""
        padded = batch.padded
        if padded is None:
            return None
        if torch.cuda.current_device() == padded.numbers.device.index:
            return self._run(padded)[:batch.layout.logits]
        with torch.cuda.device(padded.numbers.device):
            return self._run(padded)[:batch.layout.logits]

    def _run(self, padded: Padded) -> Tensor:
        captured = self._captured.get(padded.bucket)
        if captured is None:
            logits = self._forward(step_of(padded)).clone()
            self.capture(padded)
            return logits
        if captured.numbers.data_ptr() != padded.numbers.data_ptr():
            captured.numbers.copy_(padded.numbers)
        captured.graph.replay()
        return captured.logits

    def capture(self, padded: Padded) -> None:
        """Record the bucket of this step. Its numbers stay those that the graph reads."""
        numbers, static = padded.numbers, step_of(padded)
        graph, logits = record(lambda: self._forward(static), self._pool)
        self._pool = self._pool or graph.pool()
        borrowed = torch.as_tensor(_Borrowed(logits), device=numbers.device)
        self._captured[padded.bucket] = _Captured(graph, numbers, borrowed)
