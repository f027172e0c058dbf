"""Sums over the devices of one process, in graphs of decode steps: peers store into each other's memory."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_void_p
from typing import Final

import torch
from torch import Tensor

from deltic.errors import UnavailableError
from deltic.ops.cuda.arguments import AllReduceArgs
from deltic.ops.cuda.driver import DeviceMemory, entry, headers, load_module, reach_peers

_THREADS: Final = 512
_DEVICES: Final = 8
_CELL_BYTES, _CELL_FLOATS = 16, 2
WAIT_SECONDS: Final = 5.0
"""How long a device waits for the others in a step."""


def source(devices: int) -> str:
    """Returns the CUDA source for so many devices: 2, 4 or 8."""
    return headers("allreduce") + entry("all_reduce", "AllReduce", str(_THREADS), f"all_reduce<{devices}>")


class AllReduce:
    """Adds the sum of all devices' parts to each device's residual, in the order of `ops.slices`.

    A captured launch may be replayed: the devices count the sums themselves. Every device must launch the same sums in
    the same order. Launch those of all devices before you wait for one: a device waits for the others.
    """

    def __init__(self, devices: Sequence[torch.device], floats: int, seconds: float = WAIT_SECONDS,
                 through_host: bool | None = None) -> None:
        """floats: numbers of a part, at most. seconds: that a device waits for the others. through_host: numbers pass
        through pinned host memory; None: if some device cannot reach another one."""
        count = len(devices)
        if count not in (2, 4, 8):
            raise ValueError(f"{count} devices: sums are made over 2, 4 or 8")
        self.devices, self._room = tuple(devices), -(-floats // _CELL_FLOATS)
        self.through_host = not reach_peers(devices) if through_host is None else through_host
        self._modules = [load_module(source(count), device) for device in devices]
        size = 2 * count * self._room * _CELL_BYTES
        if self.through_host:
            self._memory: list[Tensor | DeviceMemory] = [
                torch.zeros(size, dtype=torch.uint8, pin_memory=True) for _ in devices]
        else:
            self._memory = [DeviceMemory(device, size) for device in devices]
        self._boxes = (c_void_p * _DEVICES)(*[memory.data_ptr() for memory in self._memory])
        self._states = [torch.zeros(4, dtype=torch.int32, device=device) for device in devices]
        self._reports = torch.zeros(count, 4, dtype=torch.int32, pin_memory=True)
        self._limit = int(seconds * 1e9)
        for device in set(devices):
            torch.cuda.synchronize(device)

    def add(self, rank: int, part: Tensor, residual: Tensor) -> None:
        """Launches the sum on device number `rank`, which is torch's current one: adds all parts [T, H] float32 to the
        residual [T, H] float32."""
        assert part.is_contiguous() and residual.is_contiguous() and part.numel() == residual.numel()
        cells = part.numel() // _CELL_FLOATS
        assert part.numel() % _CELL_FLOATS == 0 and cells <= self._room, "the boxes have no room for these numbers"
        self._modules[rank].launch("k_all_reduce", (-(-cells // _THREADS),), _THREADS, AllReduceArgs(
            x=part, y=residual, state=self._states[rank], report=self._reports[rank], boxes=self._boxes,
            limit=self._limit, cells=cells, room=self._room, rank=rank))

    def check(self) -> None:
        """Raises UnavailableError if a device did not come in time. Residuals have been NaN since then. Waits for all
        devices in this case; later sums are right."""
        for rank, report in enumerate(self._reports[:, 0].tolist()):
            if report:
                self._start()
                raise UnavailableError(
                    f"device {self.devices[rank]} waited for device {self.devices[report - 1]} in vain for "
                    f"{self._limit / 1e9:g} s")

    def _start(self) -> None:
        """Lets all devices begin with the first sum."""
        for device in set(self.devices):
            torch.cuda.synchronize(device)
        for memory in (*self._memory, *self._states, self._reports):
            memory.zero_()
        for device in set(self.devices):
            torch.cuda.synchronize(device)


