"""What a device gets from the host for each step."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence as List
from typing import Any

import torch
from torch import Tensor

from deltic.ops.cuda import staging
from deltic.ops.cuda.staging import sender


class HostToDeviceBuffer:
    """Integers at one place on a device, of which there are others in every step. The host writes them into pinned
    memory, from which they are copied beside what it does: two pieces by turns, so that it need not wait. On a CPU it
    writes to the place itself."""

    def __init__(self, numbers: Tensor, tokens: int = 0) -> None:
        """numbers [N] int64: where they are to be. tokens: how many of them, from the second one on, may be taken from
        others that the device has; the last ones say where those are. With tokens it is to be kept for many steps."""
        self.numbers, self._turn, self._tokens = numbers, 0, tokens
        hosts = [torch.zeros_like(numbers, device="cpu", pin_memory=True) for _ in range(2)] if numbers.is_cuda else []
        self._pieces = [(host, host.numpy(), torch.cuda.Event(), sender(host, numbers, tokens) if tokens else None)
                        for host in hosts]
        if any(send for *_, send in self._pieces):  # a kernel reads them, of which torch's allocator knows nothing
            weakref.finalize(self, _wait, self._pieces).atexit = False

    def begin(self) -> Any:
        """The array [N] to write to. What is in it is of a step before."""
        if not self._pieces:
            return self.numbers.numpy()
        self._turn ^= 1
        _, array, copied, _ = self._pieces[self._turn]
        if not copied.query():
            copied.synchronize()
        return array

    def send(self, drawn: Tensor | None = None) -> None:
        """Have what was written copied, behind all that the device was given before. drawn [M] int64, on the device:
        what the tokens are taken from."""
        if self._pieces:
            host, _, copied, send = self._pieces[self._turn]
            if send:
                send(drawn)
                drawn = None
            else:
                self.numbers.copy_(host, non_blocking=True)
            copied.record()
        if drawn is not None:
            torch.index_select(drawn, 0, self.numbers[len(self.numbers) - self._tokens:],
                               out=self.numbers[1:1 + self._tokens])


def _wait(pieces: List[tuple[Tensor, Any, torch.cuda.Event, Any]]) -> None:
    """Until the device has read what was sent from these: then they may be given to others."""
    for _, _, copied, _ in pieces:
        copied.synchronize()


def on_device(host: Tensor, device: torch.device) -> Tensor:
    """Numbers of the host on the device; nobody waits for them."""
    return host if device.type == "cpu" else staging.on_device(host, device)


def upload(numbers: array[int] | array[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    # torch.tensor looks at every number several times
    return on_device(torch.frombuffer(numbers, dtype=dtype), device)
