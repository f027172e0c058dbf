"""Runs a step on several devices from one thread. The devices' layers are launched in turns. Wherever each device has
only its part of a sum, the parts are exchanged."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from deltic.ops.cuda.allreduce import AllReduce, RowNorm
from deltic.ops.cuda.driver import record, recording
from deltic.ops.types import Batch

Result = TypeVar("Result")
_MAX_EXACT_ROWS, MAX_SUMMED_ROWS = 64, 512
"""Largest numbers of rows that are summed by peer stores: float32 parts, and bfloat16 parts."""


@dataclass(frozen=True, slots=True)
class PartialSum:
    """One device's part of a sum over all devices.

    own [T, H]: the part, float32 for few tokens, bfloat16 for many. residual [T, H] float32: the sum is added to it;
    None: `own` becomes the sum. norm: the residual's norm after the addition, only with a bfloat16 part.
    """

    own: Tensor
    residual: Tensor | None = None
    norm: RowNorm | None = None


Shared = Generator[PartialSum, None, Result]
"""Launches of one device. Yields a part where the next launches need the sum, and returns the device's result."""


def part_of(residual: Tensor, shards: int) -> Tensor:
    """Returns the tensor for a device's part of a sum that is added to the residual of few tokens. With one device this
    is the residual itself."""
    return residual if shards == 1 else torch.empty_like(residual)


def add_part(part: Tensor, residual: Tensor) -> Shared[None]:
    """Adds all devices' parts to the residual. Does nothing if `part_of` returned the residual itself."""
    if part is not residual:
        yield PartialSum(part, residual)


class PartExchange(Protocol):
    """Launches sums over devices without waiting for a device."""

    def __call__(self, parts: Sequence[PartialSum]) -> None:
        """Launches one sum. parts: each device's part, in the order of the devices, all of the same shape."""


class PeerExchange:
    """Sums by stores into the memory of peers (`AllReduce`). Sums of longer prompts use NCCL."""

    def __init__(self, devices: Sequence[torch.device], hidden: int) -> None:
        # torch may map its memory in pages that other devices of the process cannot reach
        os.environ["NCCL_P2P_DIRECT_DISABLE"] = "1"
        self._sums = AllReduce(devices, hidden, _MAX_EXACT_ROWS, MAX_SUMMED_ROWS)

    def __call__(self, parts: Sequence[PartialSum]) -> None:
        if parts[0].residual is None:
            torch.cuda.nccl.all_reduce([part.own for part in parts])
            return
        for rank, part in enumerate(parts):
            assert part.residual is not None
            with torch.cuda.device(part.own.device):
                if part.norm:
                    self._sums.add_norm(rank, part.own, part.residual, part.norm)
                else:
                    self._sums.add(rank, part.own, part.residual)

    def check(self) -> None:
        """Raises UnavailableError if a device timed out waiting for another one."""
        self._sums.check()


def alone(launches: Shared[Result]) -> Result:
    """Runs all launches on the only device and returns the result."""
    try:
        next(launches)
    except StopIteration as stop:
        result: Result = stop.value
        return result
    raise AssertionError("a model on one device has no parts of sums")


def together(devices: Sequence[torch.device], launches: Sequence[Shared[Result]], exchange: PartExchange
             ) -> list[Result]:
    """Runs the launches of all devices in turns and returns the results. All devices yield the same sums in the same
    order. Therefore no device's launch queue fills up while the device waits for another one's part."""
    results = list[Result]()
    while not results:
        parts = list[PartialSum]()
        for device, own in zip(devices, launches, strict=True):
            with torch.cuda.device(device):
                try:
                    parts.append(next(own))
                except StopIteration as stop:
                    results.append(stop.value)
        if parts:
            assert not results, "devices disagree about the sums of a step"
            exchange(parts)
    return results


class ShardedLogits(Tensor):
    """Logits [L, V] with columns on several devices: `parts`. Every operation uses `whole`, all logits on the first
    device. The first operation gathers them there."""

    parts: tuple[Tensor, ...]
    _whole: Tensor | None

    @staticmethod
    def __new__(cls, parts: Sequence[Tensor]) -> ShardedLogits:
        first, width = parts[0], sum(part.shape[1] for part in parts)
        found: ShardedLogits = Tensor._make_wrapper_subclass(
            cls, (len(first), width), dtype=first.dtype, device=first.device)
        found.parts, found._whole = tuple(parts), None
        return found

    @property
    def whole(self) -> Tensor:
        if self._whole is None:
            device = self.parts[0].device
            self._whole = torch.cat([part.to(device, non_blocking=True) for part in self.parts], dim=1)
        return self._whole

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's annotations leave out the function
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(ShardedLogits, lambda logits: logits.whole, (args, kwargs or {}))
        return function(*args, **kwargs)


class DeviceStep(Protocol):
    """Launches steps of one device's part of a model."""

    @property
    def device(self) -> torch.device: ...

    def launches(self, batch: Batch) -> Shared[tuple[Tensor, Tensor | None]] | None:
        """Returns a generator that launches a step, as `Ops.step` does; None if the batch is not served."""

    def prepare_prompts(self, most: int) -> None:
        """Implements `PreparesPrompts`."""


class ShardedStep:
    """Computes the logits of a batch on several devices. The batch and the result are on the first device.

    follow: called for each device after a step's launches, with the device's number, its batch and the hidden states
    of all tokens, if the batch requests hidden states.
    """

    def __init__(self, steps: Sequence[DeviceStep], exchange: PartExchange) -> None:
        self._steps, self.exchange = tuple(steps), exchange
        self.devices = tuple(step.device for step in steps)
        self.follow: Callable[[int, Batch, Tensor], None] | None = None

    def check(self) -> None:
        """Raises UnavailableError if a device timed out in an earlier step. Waits for devices only in that case."""
        if isinstance(self.exchange, PeerExchange):
            self.exchange.check()

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor | None] | None:
        found = self.run([batch_on(batch, device) for device in self.devices])
        return None if found is None else self.joined(found)

    def prepare_prompts(self, most: int) -> None:
        """Implements `PreparesPrompts` on each device."""
        for step in self._steps:
            with torch.cuda.device(step.device):
                step.prepare_prompts(most)

    def run(self, batches: Sequence[Batch]) -> list[tuple[Tensor, Tensor | None]] | None:
        """Launches a step. batches: the batch on each device. Returns each device's logits, for its part of the
        vocabulary, and its hidden states; None if a device does not serve the batch."""
        launches = []
        for step, batch in zip(self._steps, batches, strict=True):
            own = step.launches(batch)
            if own is None:
                return None
            launches.append(own)
        results = together(self.devices, launches, self.exchange)
        for rank, (batch, (_, hidden)) in enumerate(zip(batches, results, strict=True)):
            if self.follow and hidden is not None:
                with torch.cuda.device(self.devices[rank]):
                    self.follow(rank, batch, hidden)
        return results

    def joined(self, results: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
        """Returns the logits [L, V] of all devices, and the hidden states of the first one."""
        return ShardedLogits([own for own, _ in results]), results[0][1]


def batch_on(batch: Batch, device: torch.device) -> Batch:
    """Returns the batch with its tensors on a device; the batch itself if they are already there."""
    if batch.ids.device == device:
        return batch
    moved: dict[str, Any] = {
        name: value.to(device, non_blocking=True) for name in Batch.__slots__
        if isinstance(value := getattr(batch, name), Tensor)}
    # both are the same tensor if no row has entries in a delta log
    moved["base"] = moved["done"] if batch.base is batch.done else moved["base"]
    embeds = batch.input_embeds and replace(
        batch.input_embeds, tokens=batch.input_embeds.tokens.to(device), rows=batch.input_embeds.rows.to(device))
    padded = batch.padded and replace(batch.padded, numbers=batch.padded.numbers.to(device, non_blocking=True))
    return replace(batch, **moved, input_embeds=embeds, padded=padded, memo={}, kept=None)


def record_all(launch: Callable[[], Result], devices: Sequence[torch.device], pools: Sequence[Any]
               ) -> tuple[list[torch.cuda.CUDAGraph], Result]:
    """Records what `launch` launches on each device, without running it. Returns one graph per device, and the result
    of `launch`. pools: one per device, as in `driver.record`."""
    if len(devices) == 1:
        with torch.cuda.device(devices[0]):
            graph, result = record(launch, pools[0])
        return [graph], result
    with recording(), torch.cuda.device(devices[0]):  # setting a stream makes its device the current one
        return _record_together(launch, devices, pools)


def _record_together(launch: Callable[[], Result], devices: Sequence[torch.device], pools: Sequence[Any]
                     ) -> tuple[list[torch.cuda.CUDAGraph], Result]:
    streams = [torch.cuda.Stream(device) for device in devices]
    graphs = [torch.cuda.CUDAGraph() for _ in devices]
    for device in devices:
        torch.cuda.synchronize(device)
    begun = 0
    try:
        for device, stream, graph, pool in zip(devices, streams, graphs, pools, strict=True):
            with torch.cuda.device(device), torch.cuda.stream(stream):
                graph.capture_begin(pool, "relaxed")
            begun += 1
        before = [torch.cuda.current_stream(device) for device in devices]
        for stream in streams:
            torch.cuda.set_stream(stream)
        try:
            result = launch()
        finally:
            for stream in before:
                torch.cuda.set_stream(stream)
    finally:
        for device, stream, graph in list(zip(devices, streams, graphs, strict=True))[:begun]:
            with torch.cuda.device(device), torch.cuda.stream(stream):
                graph.capture_end()
    return graphs, result
