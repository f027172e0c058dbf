"""Sends integers from the host to a device in every step."""

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
    """Integers in fixed device memory that change in every step. The host writes alternately to two pinned buffers, so
    that it need not wait for the copy of the other one. On a CPU it writes to the memory itself."""

    def __init__(self, numbers: Tensor, tokens: int = 0) -> None:
        """numbers [N] int64: the device memory. tokens: number of ids, from IDS_OFFSET on, that `send` may gather from
        `drawn`; the last `tokens` numbers are their indices there. A buffer with tokens is meant for many steps."""
        self.numbers, self._turn, self._tokens = numbers, 0, tokens
        hosts = [torch.zeros_like(numbers, device="cpu", pin_memory=True) for _ in range(2)] if numbers.is_cuda else []
        self._buffers = [(host, host.numpy(), torch.cuda.Event(), sender(host, numbers, tokens) if tokens else None)
                         for host in hosts]
        if any(send for *_, send in self._buffers):  # torch's allocator does not know that a kernel reads them
            weakref.finalize(self, _wait, self._buffers).atexit = False

    def begin(self) -> Any:
        """Returns the array [N] to write to, which still has the numbers of an earlier step."""
        if not self._buffers:
            return self.numbers.numpy()
        self._turn ^= 1
        _, host, copied, _ = self._buffers[self._turn]
        if not copied.query():
            copied.synchronize()
        return host

    def send(self, drawn: Tensor | None = None) -> None:
        """Copies the written numbers to the device, in stream order. drawn [M] int64, on the device: tokens from which
        the ids are gathered."""
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
    """Waits until the device has read the buffers, after which their memory may be reused."""
    for _, _, copied, _ in buffers:
        copied.synchronize()


def upload(numbers: array[int] | array[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    # faster than torch.tensor, which reads every number several times
    return on_device(torch.frombuffer(numbers, dtype=dtype), device)
