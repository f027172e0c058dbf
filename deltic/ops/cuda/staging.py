"""A step's integers, from the host to where the step's kernels read them, with tokens and cursors among them that only
the device knows: small kernels instead of copies and gathers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial

import torch
from torch import Tensor

from deltic.ops.cuda import arguments as args
from deltic.ops.cuda.driver import CompileError, Module, headers, make_current
from deltic.ops.cuda.kernel_config import entry
from deltic.ops.noise import keys_at

MAX_NUMBERS = 1 << 14
"""Numbers; of more a copy is faster."""
_EACH = 1024
"""Of a block."""
_PIECES = 16
"""Of pinned memory that are made at once: it holds up all else that the card is asked for."""
_MOST_TOKENS = 256
"""Of a step whose cursors only the device knows."""


def source() -> str:
    """The text of the kernels."""
    return (headers("numbers") + entry("numbers", "Numbers", "256", "numbers")
            + entry("cursors", "Cursors", str(_MOST_TOKENS), "cursors")
            + entry("row_keys", "RowKeys", "256", "row_keys"))


def sender(host: Tensor, numbers: Tensor, tokens: int) -> Callable[[Tensor | None], None] | None:
    """What copies `host` [N] int64, which is pinned, to `numbers` [N] on a device, behind all that the device was given
    before. It is given None, or numbers [M] int64 on the device, from which the second number and the next ones are
    taken, `tokens` in all; the last numbers say where they are. None where that cannot be, or another way is faster."""
    count, device = len(host), numbers.device
    module = _module(device) if 0 < count <= MAX_NUMBERS else None
    if module is None:
        return None
    given = args.NumbersArgs(host=host, numbers=numbers, drawn=None, count=count, tokens=tokens)
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
    given = args.CursorsArgs(numbers=numbers, drawn=None, tokens=tokens, rows=rows, width=pages)
    launch = module.prepare("k_cursors", (1,), _MOST_TOKENS, given)

    def move(drawn: Tensor) -> None:
        given.drawn = drawn.data_ptr()
        _on(numbers.device, launch)

    return move


def row_keys(answers: Tensor, done: Tensor, keys: Tensor) -> None:
    """Write the keys [R, n] int64 of draws after rows' first tokens and those that follow. answers [R] int64:
    `noise.answer_key` of each. done [R] int64: the cursors of the first tokens. All on one device."""
    rows, width = keys.shape
    module = _module(keys.device) if keys.is_cuda else None
    if module is None:
        keys.copy_(keys_at(answers[:, None], done[:, None] + torch.arange(1, width + 1, device=keys.device)))
    else:
        given = args.RowKeysArgs(answers=answers, done=done, keys=keys, rows=rows, width=width)
        _on(keys.device, partial(module.launch, "k_row_keys", (-(-rows * width // 256),), 256, given, overlap=False))


def on_device(host: Tensor, device: torch.device) -> Tensor:
    """What is on the host, on the device, behind all that the device was given before; nobody waits. A kernel reads a
    small tensor: what the card's copying engines are given waits for all that they have been given, by other streams,
    too, such as K/V that comes from the host."""
    module, count = _module(device), -(-host.nbytes // 8)
    if module is None or not 0 < count <= MAX_NUMBERS:
        return host.pin_memory().to(device, non_blocking=True)  # nobody gets that memory before it is read
    make_current(device)  # this may be the first thing that the thread asks of it
    piece, read = _staging(device)
    piece.view(torch.uint8)[:host.nbytes] = host.contiguous().view(-1).view(torch.uint8)
    found = torch.empty(count, dtype=torch.int64, device=device)
    given = args.NumbersArgs(host=piece, numbers=found, drawn=None, count=count, tokens=0)
    _on(device, partial(module.launch, "k_numbers", (-(-count // _EACH),), 256, given, overlap=False))
    read.record(torch.cuda.current_stream(device))
    _pieces(device).append((piece, read))
    return found.view(torch.uint8)[:host.nbytes].view(host.dtype).view(host.shape)


def _staging(device: torch.device) -> tuple[Tensor, torch.cuda.Event]:
    """Pinned memory that nobody reads any more, and an event for when it was read again."""
    pieces = _pieces(device)
    with suppress(IndexError):
        piece, read = pieces.popleft()
        if read.query():
            return piece, read
        pieces.append((piece, read))
    piece, *others = torch.empty(_PIECES, MAX_NUMBERS, dtype=torch.int64, pin_memory=True)
    pieces.extend((other, torch.cuda.Event()) for other in others)
    return piece, torch.cuda.Event()


@cache
def _pieces(device: torch.device) -> deque[tuple[Tensor, torch.cuda.Event]]:
    return deque()


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
