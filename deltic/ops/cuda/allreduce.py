"""Sums over the devices of one process, also in recorded graphs. Peers store into each other's memory."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_void_p
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from deltic.errors import UnavailableError
from deltic.ops.cuda.arguments import AllReduceArgs, AllReduceNormArgs
from deltic.ops.cuda.driver import DeviceMemory, entry, headers, load_module, reach_peers

_THREADS, _NORM_THREADS = 512, 256
_DEVICES: Final = 8
_CELL_BYTES, _CELL_FLOATS, _CELL_HALVES = 16, 2, 8
_ABSENT: Final = 0xff
"""Value of each byte of a bfloat16 cell before a part arrives."""
WAIT_SECONDS: Final = 5.0
"""Seconds that a device waits for the others in a step."""


def source(devices: int, hidden: int) -> str:
    """Returns the CUDA source for `devices` devices: 2, 4 or 8."""
    return headers("allreduce") + (
        entry("all_reduce", "AllReduce", str(_THREADS), f"all_reduce<{devices}>")
        + entry("all_reduce_norm", "AllReduceNorm", str(_NORM_THREADS), f"all_reduce_norm<{devices}, {hidden}>"))


@dataclass(frozen=True, slots=True)
class RowNorm:
    """The norm of a residual, with `scale` [H] float32. y [T, H] bf16 and `wide` [T, H] float32 receive the result."""

    y: Tensor
    scale: Tensor
    eps: float
    wide: Tensor | None = None


class AllReduce:
    """Adds the sum of all devices' parts to each device's residual [T, H] float32.

    A captured launch may be replayed, because the devices count the sums themselves. All devices must launch the same
    sums in the same order. Launch a sum on all devices before you wait for one of them: each waits for the others.
    """

    def __init__(self, devices: Sequence[torch.device], hidden: int, few: int, many: int,
                 seconds: float = WAIT_SECONDS, through_host: bool | None = None) -> None:
        """few, many: largest number of tokens of `add` and of `add_norm`. seconds: timeout of a device that waits for
        the others. through_host: parts pass through pinned host memory; None: only if a device cannot reach a peer."""
        count = len(devices)
        if count not in (2, 4, 8):
            raise ValueError(f"{count} devices: sums are made over 2, 4 or 8")
        self.devices, self._hidden = tuple(devices), hidden
        self.through_host = not reach_peers(devices) if through_host is None else through_host
        self._modules = [load_module(source(count, hidden), device) for device in devices]
        self._few = _Boxes(devices, self.through_host, count, few * hidden // _CELL_FLOATS, 0)
        self._many = _Boxes(devices, self.through_host, 2 * count, self._own(many) * hidden // _CELL_HALVES, _ABSENT)
        self._states = [torch.zeros(4, dtype=torch.int32, device=device) for device in devices]
        self._reports = torch.zeros(count, 4, dtype=torch.int32, pin_memory=True)
        self._limit = int(seconds * 1e9)
        for device in set(devices):
            torch.cuda.synchronize(device)

    def add(self, rank: int, part: Tensor, residual: Tensor) -> None:
        """Launches the sum of few tokens on device number `rank`, which must be torch's current device. part [T, H]
        float32. Parts are added in the order of `ops.slices`."""
        cells = part.numel() // _CELL_FLOATS
        self._modules[rank].launch("k_all_reduce", (-(-cells // _THREADS),), _THREADS, AllReduceArgs(
            **self._arguments(rank, part, residual, self._few, cells), cells=cells))

    def add_norm(self, rank: int, part: Tensor, residual: Tensor, norm: RowNorm) -> None:
        """Launches the sum of many tokens like `add`, and writes the norm of the residual. part [T, H] bf16. The sum
        over more than two devices is rounded to bfloat16."""
        rows, cells = len(part), self._own(len(part)) * self._hidden // _CELL_HALVES
        self._modules[rank].launch("k_all_reduce_norm", (rows,), _NORM_THREADS, AllReduceNormArgs(
            **self._arguments(rank, part, residual, self._many, cells), cells=rows, normed=norm.y, scale=norm.scale,
            eps=norm.eps, wide=norm.wide))

    def _own(self, rows: int) -> int:
        """Returns the number of rows that one device sums up: all rows with two devices, else its share of them."""
        return rows if len(self.devices) == 2 else -(-rows // len(self.devices))

    def _arguments(self, rank: int, part: Tensor, residual: Tensor, boxes: _Boxes, cells: int) -> dict[str, Any]:
        assert part.is_contiguous() and residual.is_contiguous() and part.shape == residual.shape
        assert cells <= boxes.room, "the boxes have no room for these numbers"
        return {"x": part, "y": residual, "state": self._states[rank], "report": self._reports[rank],
                "boxes": boxes.addresses, "limit": self._limit, "room": boxes.room, "rank": rank,
                "fences": self.through_host}

    def check(self) -> None:
        """Raises UnavailableError if a device timed out. Residuals have been NaN since then. Before it raises, it waits
        for all devices and resets the boxes and counters, so that later sums are correct."""
        late = [(rank, report - 1) for rank, report in enumerate(self._reports[:, 0].tolist()) if report]
        if not late:
            return
        for device in set(self.devices):
            torch.cuda.synchronize(device)
        for boxes in (self._few, self._many):
            boxes.clear()
        for tensor in (*self._states, self._reports):
            tensor.zero_()
        for device in set(self.devices):
            torch.cuda.synchronize(device)
        waiting, missing = (self.devices[rank] for rank in late[0])
        raise UnavailableError(f"device {waiting} waited for device {missing} in vain for {self._limit / 1e9:g} s")


class _Boxes:
    """Receive buffer of each device, in its own or the host's memory: [2, parts, room] cells that the peers write."""

    def __init__(self, devices: Sequence[torch.device], on_host: bool, parts: int, room: int, empty: int) -> None:
        """empty: value of each byte before the first sum."""
        self.room, self._empty, size = room, empty, 2 * parts * room * _CELL_BYTES
        self._memory: list[Tensor | DeviceMemory] = [
            torch.empty(size, dtype=torch.uint8, pin_memory=True) if on_host else DeviceMemory(device, size)
            for device in devices]
        self.addresses = (c_void_p * _DEVICES)(*[memory.data_ptr() for memory in self._memory])
        self.clear()

    def clear(self) -> None:
        for memory in self._memory:
            memory.fill_(self._empty)
