"""Copies a step's integers to the device by small kernels, and inserts tokens and cursors that exist only there. Unlike
a copy engine, a kernel does not wait for copies in other streams."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial

import torch
from torch import Tensor

from deltic.ops.cuda import arguments as args
from deltic.ops.cuda.driver import Module, entry, headers, make_current, module_or_none
from deltic.ops.input_columns import cuda_header
from deltic.ops.noise import keys_at

MAX_NUMBERS = 1 << 14
"""Largest number of int64 numbers for which a kernel is faster than a copy."""
_BLOCK_NUMBERS = 1024
"""Numbers that one block copies."""
_BUFFERS = 16
"""Number of pinned buffers allocated at once, because an allocation blocks everything else on the card."""
_MOST_TOKENS = 256
"""Largest number of tokens of a step with cursors that exist only on the device."""


def source() -> str:
    """Returns the CUDA source of the kernels."""
    return (cuda_header() + headers("numbers") + entry("numbers", "Numbers", "256", "numbers")
            + entry("cursors", "Cursors", str(_MOST_TOKENS), "cursors")
            + entry("row_keys", "RowKeys", "256", "row_keys"))


def sender(host: Tensor, numbers: Tensor, tokens: int) -> Callable[[Tensor | None], None] | None:
    """Returns a function that copies `host` [N] int64, pinned, to `numbers` [N] on a device, in stream order.

    Its argument is None, or int64 numbers [M] on the device: `tokens` of these replace the second number and the next
    ones. The last numbers of `host` are their indices. Returns None without kernels, or if a copy is faster.
    """
    count, device = len(host), numbers.device
    module = _module(device) if 0 < count <= MAX_NUMBERS else None
    if module is None:
        return None
    arguments = args.NumbersArgs(host=host, numbers=numbers, drawn=None, count=count, tokens=tokens)
    launch = module.prepare("k_numbers", (-(-count // _BLOCK_NUMBERS),), 256, arguments)

    def send(drawn: Tensor | None) -> None:
        arguments.drawn = None if drawn is None else drawn.data_ptr()
        _on(device, launch)

    return send


def mover(numbers: Tensor, rows: int, pages: int, tokens: int) -> Callable[[Tensor], None] | None:
    """Returns a function that updates a bucket's cursors on the device; None if the kernels cannot be compiled.

    numbers: input of the bucket's steps, laid out as in runner/input_batch. The function's argument: numbers [M] int64
        on the device, in which each token is followed by its position.
    """
    module = _module(numbers.device) if numbers.is_cuda and tokens <= _MOST_TOKENS else None
    if module is None:
        return None
    arguments = args.CursorsArgs(numbers=numbers, drawn=None, tokens=tokens, rows=rows, width=pages)
    launch = module.prepare("k_cursors", (1,), _MOST_TOKENS, arguments)

    def move(drawn: Tensor) -> None:
        arguments.drawn = drawn.data_ptr()
        _on(numbers.device, launch)

    return move


def row_keys(answers: Tensor, done: Tensor, keys: Tensor) -> None:
    """Writes the keys [R, n] int64 of the draws that follow each row's first n tokens. answers [R] int64: each row's
    `noise.answer_key`. done [R] int64: cursors of the first tokens. All tensors are on one device."""
    rows, width = keys.shape
    module = _module(keys.device) if keys.is_cuda else None
    if module is None:
        keys.copy_(keys_at(answers[:, None], done[:, None] + torch.arange(1, width + 1, device=keys.device)))
    else:
        arguments = args.RowKeysArgs(answers=answers, done=done, keys=keys, rows=rows, width=width)
        grid = (-(-rows * width // 256),)
        _on(keys.device, partial(module.launch, "k_row_keys", grid, 256, arguments, overlap=False))


def on_device(host: Tensor, device: torch.device) -> Tensor:
    """Copies a host tensor to the device in stream order, without waiting. A kernel copies small tensors."""
    module, count = _module(device), -(-host.nbytes // 8)
    if module is None or not 0 < count <= MAX_NUMBERS:
        return host.pin_memory().to(device, non_blocking=True)  # torch reuses pinned memory only after it was read
    make_current(device)  # the thread may not have used the device yet
    piece, read = _staging(device)
    piece.view(torch.uint8)[:host.nbytes] = host.contiguous().view(-1).view(torch.uint8)
    copy = torch.empty(count, dtype=torch.int64, device=device)
    arguments = args.NumbersArgs(host=piece, numbers=copy, drawn=None, count=count, tokens=0)
    _on(device, partial(module.launch, "k_numbers", (-(-count // _BLOCK_NUMBERS),), 256, arguments, overlap=False))
    read.record(torch.cuda.current_stream(device))
    _buffers(device).append((piece, read))
    return copy.view(torch.uint8)[:host.nbytes].view(host.dtype).view(host.shape)


def _staging(device: torch.device) -> tuple[Tensor, torch.cuda.Event]:
    """Returns free pinned memory, and an event to record after the last launch that reads the memory."""
    pieces = _buffers(device)
    with suppress(IndexError):
        piece, read = pieces.popleft()
        if read.query():
            return piece, read
        pieces.append((piece, read))
    piece, *others = torch.empty(_BUFFERS, MAX_NUMBERS, dtype=torch.int64, pin_memory=True)
    pieces.extend((other, torch.cuda.Event()) for other in others)
    return piece, torch.cuda.Event()


@cache
def _buffers(device: torch.device) -> deque[tuple[Tensor, torch.cuda.Event]]:
    return deque()


def _on(device: torch.device, launch: Callable[[], None]) -> None:
    if torch.cuda.current_device() == device.index:
        launch()
    else:
        with torch.cuda.device(device):
            launch()


@cache
def _module(device: torch.device) -> Module | None:
    return module_or_none(source(), device)
