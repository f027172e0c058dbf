"""CUDA graphs of steps that have a bucket: a step's launches are recorded once per bucket and replayed in one call.

A file next to the weights may name the buckets that are recorded when a server starts (default: all):

    {"rows": [1, 2, 64], "contexts": [4096, 32768]}

Each number of rows is combined with each context in tokens. Other buckets are recorded when they are first needed,
which delays that step by tens of milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltic.errors import ConfigError, show
from deltic.ops.cuda.driver import record
from deltic.ops.types import PAGE, Batch, Padded
from deltic.runner.input_batch import MIN_PAGES, BucketKey, decode_pages, draft_pages, power_of_two, step_of

NAME = "deltic-buckets.json"
_KEYS = ("rows", "contexts")
_MAX_FILE_BYTES, _MAX_ENTRIES, _MAX_SIZE = 1 << 16, 64, 1 << 24


@dataclass(frozen=True, slots=True)
class _Captured:
    """numbers: the memory from which the graph reads a step's integers. logits [rows, V]: the memory to which it writes
    the logits; other graphs use it too."""

    graph: torch.cuda.CUDAGraph
    numbers: Tensor
    logits: Tensor


class _Borrowed:
    """A tensor's memory without ownership: graphs run one after another, so they share their working memory."""

    def __init__(self, tensor: Tensor) -> None:
        assert tensor.dtype == torch.float32 and tensor.is_contiguous()
        self.__cuda_array_interface__ = {"shape": tuple(tensor.shape), "typestr": "<f4", "version": 3,
                                         "data": (tensor.data_ptr(), False)}


def borrowed(tensor: Tensor) -> Tensor:
    """Returns a tensor over the same memory that does not keep it allocated."""
    return torch.as_tensor(_Borrowed(tensor), device=tensor.device)


class CudaGraphs:
    """Replays graphs of `forward`. The first step of a bucket runs without a graph and is recorded afterwards.
    Recording does not run the step, so every step runs once."""

    def __init__(self, forward: Callable[[Batch], Tensor]) -> None:
        """forward: returns the logits [L, V] of a step; must launch the same kernels for all steps of a bucket."""
        self._forward = forward
        self._captured: dict[BucketKey, _Captured] = {}
        self._adapted: dict[BucketKey, _Captured] = {}
        """Graphs of steps with adapters."""
        self._pool: Any = None

    @property
    def buckets(self) -> tuple[BucketKey, ...]:
        """The recorded buckets."""
        return (*self._captured, *self._adapted)

    def run(self, batch: Batch) -> Tensor | None:
        """Returns the logits [L, V] of a step, valid until the next one; None if it has no bucket."""
        padded = batch.padded
        if padded is None:
            return None
        if torch.cuda.current_device() == padded.numbers.device.index:
            return self._run(padded)[:batch.layout.logits]
        with torch.cuda.device(padded.numbers.device):
            return self._run(padded)[:batch.layout.logits]

    def _run(self, padded: Padded) -> Tensor:
        captured = (self._adapted if padded.adapted else self._captured).get(padded.bucket)
        if captured is None:
            logits = self._forward(step_of(padded)).clone()
            self.capture(padded)
            return logits
        if captured.numbers.data_ptr() != padded.numbers.data_ptr():
            captured.numbers.copy_(padded.numbers)
        captured.graph.replay()
        return captured.logits

    def capture(self, padded: Padded) -> None:
        """Records a graph for the bucket of this step. It reads its integers from the memory of `padded.numbers`."""
        numbers, static = padded.numbers, step_of(padded)
        graph, logits = record(lambda: self._forward(static), self._pool)
        self._pool = self._pool or graph.pool()
        known = self._adapted if padded.adapted else self._captured
        known[padded.bucket] = _Captured(graph, numbers, borrowed(logits))


def recorded_buckets(model: Path | None, max_rows: int, max_context: int) -> Iterator[tuple[int, int]]:
    """Yields rows and pages of the decode buckets to record, largest first. model: the model's directory or file; None:
    it has no files. Raises ConfigError if the file of buckets is invalid."""
    path = _file(model)
    if path is None or not path.is_file():
        yield from buckets(max_rows, max_context)
        return
    rows, contexts = _read(path)
    wanted = {bucket_of(min(count, max_rows), min(context, max_context)) for count in rows for context in contexts}
    yield from sorted(wanted, reverse=True)


def buckets(max_rows: int, max_context: int) -> Iterator[tuple[int, int]]:
    """Yields rows and pages of all decode buckets, largest first."""
    yield from _smaller(*bucket_of(max_rows, max_context), 2)


def bucket_of(rows: int, context: int) -> tuple[int, int]:
    """Returns rows and pages of the decode bucket for `rows` rows and `context` tokens."""
    return power_of_two(rows), decode_pages(-(-context // PAGE))


def draft_buckets(max_rows: int, max_context: int) -> Iterator[tuple[int, int]]:
    """Yields rows and pages of all buckets with drafts, largest first."""
    yield from _smaller(power_of_two(max_rows), draft_pages(-(-max_context // PAGE)), 4)


def _smaller(rows: int, max_pages: int, factor: int) -> Iterator[tuple[int, int]]:
    while rows:
        pages = max_pages
        while pages >= MIN_PAGES:
            yield rows, pages
            pages //= factor
        rows //= 2


def _file(model: Path | None) -> Path | None:
    if model is None:
        return None
    return model / NAME if model.is_dir() else model.with_name(f"{model.name}.{NAME}")


def _read(path: Path) -> tuple[list[int], list[int]]:
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_FILE_BYTES + 1)
        if len(text) > _MAX_FILE_BYTES:
            raise ConfigError(f"{path} is longer than {_MAX_FILE_BYTES} bytes")
        found = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {show(str(error))}") from error
    if not isinstance(found, dict) or found.keys() != {*_KEYS}:
        raise ConfigError(f'{path} must be an object with "rows" and "contexts"')
    for name in _KEYS:
        numbers = found[name]
        if not isinstance(numbers, list) or not 0 < len(numbers) <= _MAX_ENTRIES or not all(map(_is_size, numbers)):
            raise ConfigError(f"{path}: {name} must be a list of 1 to {_MAX_ENTRIES} integers from 1 to {_MAX_SIZE}")
    return found["rows"], found["contexts"]


def _is_size(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 1 <= number <= _MAX_SIZE
