"""Integers that the host sends to a device in every step."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence as List
from typing import Any

import torch
from torch import Tensor

from deltic.ops.capabilities import on_device
from deltic.ops.cuda.staging import sender
from deltic.ops.input_columns import IDS_OFFSET


class HostToDeviceBuffer:
    """Integers at a fixed place on a device that change in every step. The host writes into one of two pinned buffers,
    by turns, so that it need not wait for the copy of the other. On a CPU it writes to the place itself."""

    def __init__(self, numbers: Tensor, tokens: int = 0) -> None:
        """numbers [N] int64: the place. tokens: the count of ids, from IDS_OFFSET on, that may be taken from others on
        the device; the last numbers are their places there. A buffer with tokens is meant for many steps."""
        self.numbers, self._turn, self._tokens = numbers, 0, tokens
        hosts = [torch.zeros_like(numbers, device="cpu", pin_memory=True) for _ in range(2)] if numbers.is_cuda else []
        self._buffers = [(host, host.numpy(), torch.cuda.Event(), sender(host, numbers, tokens) if tokens else None)
                         for host in hosts]
        if any(send for *_, send in self._buffers):  # torch's allocator does not know that a kernel reads them
            weakref.finalize(self, _wait, self._buffers).atexit = False

    def begin(self) -> Any:
        """The array [N] to write to. It holds an earlier step."""
        if not self._buffers:
            return self.numbers.numpy()
        self._turn ^= 1
        _, host, copied, _ = self._buffers[self._turn]
        if not copied.query():
            copied.synchronize()
        return host

    def send(self, drawn: Tensor | None = None) -> None:
        """Copies what was written, in the order of the device's stream. drawn [M] int64, on the device: the numbers
        that the ids are taken from."""
        if self._buffers:
            host, _, copied, send = self._buffers[self._turn]
            if send:
                send(drawn)
                drawn = None
            else:
                self.numbers.copy_(host, non_blocking=True)
            copied.record()
        if drawn is not None:
            places = self.numbers[len(self.numbers) - self._tokens:]
            torch.index_select(drawn, 0, places, out=self.numbers[IDS_OFFSET:IDS_OFFSET + self._tokens])


def _wait(buffers: List[tuple[Tensor, Any, torch.cuda.Event, Any]]) -> None:
    """Waits until the device has read the buffers; then their memory may be used again."""
    for _, _, copied, _ in buffers:
        copied.synchronize()


def upload(numbers: array[int] | array[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    # torch.tensor looks at every number several times
    return on_device(torch.frombuffer(numbers, dtype=dtype), device)
