"""A step's integers, from the host to where the step's kernels read them, with tokens among them that only the device
knows: one small kernel instead of a copy and a gather."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from deltic.ops.cuda import arguments as args
from deltic.ops.cuda.driver import Module
from deltic.ops.cuda.nvrtc import CompileError, headers
from deltic.ops.cuda.shapes import entry

MOST = 1 << 14
"""Numbers; of more a copy is faster."""
_EACH = 1024
"""Of a block."""


def source() -> str:
    """The text of the kernel."""
    return headers("numbers") + entry("numbers", "Numbers", "256", "numbers")


def sender(host: Tensor, numbers: Tensor, tokens: int) -> Callable[[Tensor | None], None] | None:
    """What copies `host` [N] int64, which is pinned, to `numbers` [N] on a device, behind all that the device was given
    before. It is given None, or numbers [M] int64 on the device, from which the second number and the next ones are
    taken, `tokens` in all; the last numbers say where they are. None where that cannot be, or another way is faster."""
    count, device = len(host), numbers.device
    module = _module(device) if 0 < count <= MOST else None
    if module is None:
        return None
    given = args.Numbers(host=host, numbers=numbers, drawn=None, count=count, tokens=tokens)
    launch = module.prepare("k_numbers", (-(-count // _EACH),), 256, given)

    def send(drawn: Tensor | None) -> None:
        given.drawn = None if drawn is None else drawn.data_ptr()
        if torch.cuda.current_device() == device.index:
            launch()
        else:
            with torch.cuda.device(device):
                launch()

    return send


@cache
def _module(device: torch.device) -> Module | None:
    """None where the kernel cannot be compiled."""
    try:
        return Module(source(), device)
    except CompileError:
        return None
