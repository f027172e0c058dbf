"""A step's integers, from the host to where the step's kernels read them, with tokens and cursors among them that only
the device knows: small kernels instead of copies and gathers."""

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
_MOST_TOKENS = 256
"""Of a step whose cursors only the device knows."""


def source() -> str:
    """The text of the kernels."""
    return (headers("numbers") + entry("numbers", "Numbers", "256", "numbers")
            + entry("cursors", "Cursors", str(_MOST_TOKENS), "cursors"))


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
        _on(device, launch)

    return send


def mover(numbers: Tensor, rows: int, pages: int, tokens: int) -> Callable[[Tensor], None] | None:
    """What moves the cursors of a bucket's step, whose `numbers` lie as `engine.batch` writes them, to where the device
    has them: it is given numbers [M] int64 on the device, in which each token has its position after it. None where
    that cannot be."""
    module = _module(numbers.device) if numbers.is_cuda and tokens <= _MOST_TOKENS else None
    if module is None:
        return None
    given = args.Cursors(numbers=numbers, drawn=None, tokens=tokens, rows=rows, width=pages)
    launch = module.prepare("k_cursors", (1,), _MOST_TOKENS, given)

    def move(drawn: Tensor) -> None:
        given.drawn = drawn.data_ptr()
        _on(numbers.device, launch)

    return move


def _on(device: torch.device, launch: Callable[[], None]) -> None:
    if torch.cuda.current_device() == device.index:
        launch()
    else:
        with torch.cuda.device(device):
            launch()


@cache
def _module(device: torch.device) -> Module | None:
    """None where the kernel cannot be compiled."""
    try:
        return Module(source(), device)
    except CompileError:
        return None
