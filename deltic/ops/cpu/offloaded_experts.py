"""Threads of the host that compute experts for a GPU, which asks for them through memory that both see
(csrc/beside.cpp)."""

from __future__ import annotations

import ctypes
import math
import os
import time
import weakref
from collections.abc import Sequence
from ctypes import byref, c_int64, c_uint32, c_void_p
from threading import Lock

import torch
from torch import Tensor

from deltic.ops.cpu.library import BesideModel, MailboxStruct, library
from deltic.ops.types import PAGE

TOKENS = PAGE
"""The most of a request."""
_ALIGNMENT = 64
_PASSES = 4
"""That a rate is measured in: the first one gets threads and pages ready, and others may be disturbed."""
_HANGS = 60.0
"""Seconds after which a request that the host itself has made is given up."""


class OffloadedExperts:
    """Threads, and the mailbox that they listen to. They begin at once, and end with `close`, with this object, or when
    the interpreter ends, as the memory may go after that.

    counts [16] and experts [16, most] int32, shares [16, most] and factors [16] float32, input [16, hidden] bfloat16,
    sums [16, hidden] float32: as `deltic_mailbox` says.
    words: request [3] and answer [1] int32, for kernels; request, answer: the same, for who asks here.
    """

    def __init__(self, weights: Sequence[Tensor], hidden: int, most: int, threads: tuple[int, int],
                 pinned: bool = False) -> None:
        """weights: of each layer [E, 3 * size * hidden] bfloat16, an expert's gate and its other half [2 size, hidden],
        then [hidden, size]. most: experts of a token. threads: how many, and the level of their instructions.
        pinned: the mailbox is for a card. MemoryError if threads or memory ran out."""
        self._weights, self._turn = tuple(weights), Lock()
        self.expert_bytes = self._weights[0][0].nbytes
        words, numbers = torch.int32, torch.float32
        parts = _laid_out({
            "request": ((3,), words), "answer": ((1,), words), "counts": ((TOKENS,), words),
            "experts": ((TOKENS, most), words), "shares": ((TOKENS, most), numbers), "factors": ((TOKENS,), numbers),
            "input": ((TOKENS, hidden), torch.bfloat16), "sums": ((TOKENS, hidden), numbers)}, pinned)
        self.counts, self.experts, self.shares = parts["counts"], parts["experts"], parts["shares"]
        self.factors, self.input, self.sums = parts["factors"], parts["input"], parts["sums"]
        self.words = parts["request"], parts["answer"]
        self.request = (c_uint32 * 3).from_address(parts["request"].data_ptr())
        self.answer = (c_uint32 * 1).from_address(parts["answer"].data_ptr())
        addresses = (c_void_p * len(weights))(*(layer.data_ptr() for layer in weights))
        count, columns = self._weights[0].shape
        model = BesideModel(hidden, columns // (3 * hidden), count, len(weights), most,
                            ctypes.cast(addresses, c_void_p))
        mailbox = MailboxStruct(**{name: part.data_ptr() for name, part in parts.items()})
        made = library().deltic_beside_new(byref(model), byref(mailbox), *threads)
        if not made:
            raise MemoryError("no memory for the threads that compute experts beside the GPU")
        self._address: int = made
        self._counted = 0, 0.0
        self._end = weakref.finalize(self, _free, made, os.getpid())

    def wake(self) -> None:
        """Requests may come."""
        with self._turn:
            if self._end.alive:
                library().deltic_beside_wake(self._address)

    def computed(self) -> int:
        """Experts that were computed so far, each once for a request. For any thread."""
        return self._count()[0]

    def computing(self) -> float:
        """Seconds that these took. For any thread."""
        return self._count()[1]

    def _count(self) -> tuple[int, float]:
        experts, nanoseconds = c_int64(), c_int64()
        with self._turn:
            if self._end.alive:
                library().deltic_beside_count(self._address, byref(experts), byref(nanoseconds))
                self._counted = experts.value, nanoseconds.value / 1e9
            return self._counted

    def close(self) -> None:
        """End the threads when the request that they are at is done; who asks afterwards gets no answer. May be called
        again."""
        self.computed()
        with self._turn:
            self._end()

    def ask(self, layer: int, tokens: int) -> None:
        """Have the request carried out that is in the mailbox, as the card would. RuntimeError if nobody answers."""
        self.wake()
        number, until = (self.request[0] + 1) & 0xffffffff, time.monotonic() + _HANGS
        self.request[1], self.request[2] = layer, tokens
        self.request[0] = number  # last
        while self.answer[0] != number:
            if time.monotonic() > until:
                raise RuntimeError("the threads that compute experts beside the GPU do not answer")

    def rate(self) -> float:
        """Bytes of weights a second at which experts of one layer are computed, for one token at a time: the most in
        some passes over all of them."""
        count, most = len(self._weights[0]), self.experts.shape[1]
        self.input.fill_(0.01)
        self.factors.fill_(1.0)
        self.shares.fill_(1.0 / most)
        self.counts[0] = most
        whole = range(0, count - most + 1, most)
        seconds = float("inf")
        for _ in range(_PASSES):
            before = self.computing()
            for first in whole:
                self.experts[0] = torch.arange(first, first + most)
                self.ask(0, 1)
            seconds = min(seconds, self.computing() - before)
        return len(whole) * most * self.expert_bytes / seconds


def _laid_out(sizes: dict[str, tuple[tuple[int, ...], torch.dtype]], pinned: bool) -> dict[str, Tensor]:
    """Tensors one behind another in one piece of memory, each from a border of cache lines on; zeros."""
    total, starts = 0, {}
    for name, (shape, dtype) in sizes.items():
        starts[name] = total
        total += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    memory = torch.zeros(total + _ALIGNMENT, dtype=torch.uint8)
    memory = memory.pin_memory() if pinned else memory
    skip = -memory.data_ptr() % _ALIGNMENT
    return {name: memory[skip + starts[name]:][:math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            for name, (shape, dtype) in sizes.items()}


def _free(address: int, process: int) -> None:
    if os.getpid() == process:
        library().deltic_beside_free(address)
