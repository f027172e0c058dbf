"""The allowed tokens of sequences with constraints, computed while the step runs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as List
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial

import torch
from torch import Tensor

from deltic.engine.fair_executor import FairExecutor
from deltic.engine.sequence import Sequence

_THREADS = 2
"""Masks are computed without the interpreter's lock, usually in a fraction of a millisecond."""
SLOW = 0.002
"""Processor seconds per mask from which on a sequence's masks are slow: its next one is computed before it may run
again, so that the others do not wait for it."""

Asked = Mapping[Sequence, "Future[list[bytes | None]]"]
"""By sequence: the masks of the next token and of the token after each draft; None: all are allowed."""


class LogitMasks:
    """Computes masks in threads."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._slow_threads: FairExecutor | None = None

    def begin(self, running: List[Sequence]) -> None:
        """Starts the next mask of each sequence with slow masks, in a thread that clients share by processor time. Such
        sequences have no drafts."""
        for sequence in running:
            if slow(sequence) and sequence.sampler.mask is None and sequence.answering:
                self._slow_threads = self._slow_threads or FairExecutor(1, "deltic-slow-masks")
                sequence.sampler.mask = self._slow_threads.submit(sequence.client, partial(_masks, sequence, ()))

    def ask(self, sequences: List[tuple[Sequence, tuple[int, ...]]]) -> Asked:
        """Starts the masks of the sequences with constraints, for their next tokens and drafts."""
        wanted = [(sequence, drafts) for sequence, drafts in sequences if sequence.constraint]
        if wanted and self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS, "deltic-masks")
        return {sequence: self._asked(self._threads, sequence, drafts) for sequence, drafts in wanted if self._threads}

    @staticmethod
    def _asked(threads: ThreadPoolExecutor, sequence: Sequence, drafts: tuple[int, ...]) -> Future[list[bytes | None]]:
        """Uses a mask that was started before the step, if the sequence has no drafts."""
        begun, sequence.sampler.mask = sequence.sampler.mask, None
        if begun is None:
            return threads.submit(_masks, sequence, drafts)
        return threads.submit(_masks_after, begun, sequence, drafts) if drafts else begun


def slow(sequence: Sequence) -> bool:
    """True if the last masks of a sequence were slow."""
    return sequence.sampler.mask_seconds >= SLOW


def offsets(mask: bytes, vocabulary: int, device: torch.device) -> Tensor:
    """Offsets [vocabulary] float32 of logits: 0 where the mask's bit is set, -inf elsewhere."""
    size = -(-vocabulary // 8)
    whole = torch.frombuffer(bytearray(mask[:size].ljust(size, b"\0")), dtype=torch.uint8)
    return _table(device)[whole.to(device).int()].view(-1)[:vocabulary]


def forbids(mask: bytes, token: int) -> bool:
    return token >= 8 * len(mask) or not mask[token >> 3] >> (token & 7) & 1


def _masks(sequence: Sequence, drafts: tuple[int, ...]) -> list[bytes | None]:
    assert sequence.constraint
    began = time.thread_time()
    masks = sequence.constraint.allowed(drafts)
    sequence.sampler.mask_seconds = (time.thread_time() - began) / len(masks)
    return [mask and _without_ends(sequence, mask, sequence.generated + place) for place, mask in enumerate(masks)]


def _masks_after(begun: Future[list[bytes | None]], sequence: Sequence, drafts: tuple[int, ...]
                 ) -> list[bytes | None]:
    """The masks, after the one that was started: a constraint serves one thread at a time."""
    begun.exception()
    return _masks(sequence, drafts)


def _without_ends(sequence: Sequence, mask: bytes, generated: int) -> bytes:
    """The mask without the end tokens that are not allowed yet, unless nothing else is allowed."""
    params = sequence.sampling
    if generated < params.min_tokens:
        ends = sequence.eos
    elif params.ignore_eos:
        ends = sequence.eos.difference(params.stop_token_ids)
    else:
        return mask
    rest = bytearray(mask)
    for end in ends:
        if end < 8 * len(rest):
            rest[end >> 3] &= ~(1 << (end & 7))
    return bytes(rest) if rest.count(0) < len(rest) else mask


@cache
def _table(device: torch.device) -> Tensor:
    """The offsets [256, 8] of each byte of a mask."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return torch.where(bits == 1, 0.0, -torch.inf).to(device)
