"""CUDA graphs of steps on several devices: each device replays its own graph, all launched by one thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deltic.ops.cuda.tensor_parallel import ShardedLogits, ShardedStep, record_all
from deltic.ops.types import Batch, Padded
from deltic.runner.cuda_graphs import borrowed
from deltic.runner.input_batch import BucketKey, step_of


@dataclass(frozen=True, slots=True)
class _ShardedCapture:
    """A recorded step. Per device: graphs; numbers: the step's integers, which a graph reads; logits [rows, own V]."""

    graphs: tuple[torch.cuda.CUDAGraph, ...]
    numbers: tuple[Tensor, ...]
    logits: tuple[Tensor, ...]


class ShardedGraphs:
    """As `CudaGraphs`, on several devices. The integers of a step come from the first device."""

    def __init__(self, step: ShardedStep) -> None:
        self._step = step
        self._captured: dict[BucketKey, _ShardedCapture] = {}
        self._pools: Sequence[Any] = [None] * len(step.devices)

    @property
    def buckets(self) -> tuple[BucketKey, ...]:
        """The recorded buckets."""
        return tuple(self._captured)

    def run(self, batch: Batch) -> Tensor | None:
        """Returns the logits [L, V] of a step, valid until the next one; None if it has no bucket."""
        padded = batch.padded
        if padded is None:
            return None
        captured = self._captured.get(padded.bucket)
        if captured is None:
            return self._first(padded)[:batch.layout.logits]
        self._send(padded, captured.numbers)
        for device, graph in zip(self._step.devices, captured.graphs, strict=True):
            with torch.cuda.device(device):
                graph.replay()
        return ShardedLogits([logits[:batch.layout.logits] for logits in captured.logits])

    def _send(self, padded: Padded, numbers: Sequence[Tensor]) -> None:
        """Copies the integers of a step to all devices."""
        for own in numbers:
            if own.data_ptr() != padded.numbers.data_ptr():
                own.copy_(padded.numbers, non_blocking=True)

    def _first(self, padded: Padded) -> Tensor:
        """Runs the first step of a bucket without graphs, then records its graphs. Returns the logits."""
        numbers = tuple(torch.empty_like(padded.numbers, device=device) for device in self._step.devices[1:])
        numbers = (padded.numbers, *numbers)
        self._send(padded, numbers)
        batches = [step_of(replace(padded, numbers=own)) for own in numbers]
        results = self._step.run(batches)
        assert results, "a bucket is served on all devices"
        logits = self._step.joined(results)[0].clone()
        graphs, recorded = record_all(lambda: self._step.run(batches), self._step.devices, self._pools)
        assert recorded
        self._pools = [pool or graph.pool() for pool, graph in zip(self._pools, graphs, strict=True)]
        self._captured[padded.bucket] = _ShardedCapture(
            tuple(graphs), numbers, tuple(borrowed(own) for own, _ in recorded))
        return logits
