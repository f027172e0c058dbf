"""Which tokens constrained sequences may draw: worked out while the step runs whose logits they are for."""

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
"""Masks are made without the interpreter's lock, each within a fraction of a millisecond as a rule."""
SLOW = 0.002
"""Seconds of a processor per mask from which on the masks of a sequence count as slow. Its next one is made before it
may run again, so that the others of a step do not wait for it."""

Asked = Mapping[Sequence, "Future[list[bytes | None]]"]
"""By sequence: for the next token, and for those after each draft, which tokens may come; None: all."""


class LogitMasks:
    """Asks the sequences' constraints, in threads of its own."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._slow_threads: FairExecutor | None = None

    def begin(self, running: List[Sequence]) -> None:
        """Have the next mask made of each sequence whose last ones were slow, in a thread of their own, in which
        clients take turns by processor time. They have no drafts."""
        for sequence in running:
            if slow(sequence) and sequence.sampler.mask is None and sequence.answering:
                self._slow_threads = self._slow_threads or FairExecutor(1, "deltic-slow-masks")
                sequence.sampler.mask = self._slow_threads.submit(sequence.client, partial(_masks, sequence, ()))

    def ask(self, sequences: List[tuple[Sequence, tuple[int, ...]]]) -> Asked:
        """Have masks made for those of the sequences that are constrained, each with its drafts."""
        wanted = [(sequence, drafts) for sequence, drafts in sequences if sequence.constraint]
        if wanted and self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS, "deltic-masks")
        return {sequence: self._asked(self._threads, sequence, drafts) for sequence, drafts in wanted if self._threads}

    @staticmethod
    def _asked(threads: ThreadPoolExecutor, sequence: Sequence, drafts: tuple[int, ...]) -> Future[list[bytes | None]]:
        """The mask that was begun before the step, if that has no drafts: it may have become slow with drafts made."""
        begun, sequence.sampler.mask = sequence.sampler.mask, None
        if begun is None:
            return threads.submit(_masks, sequence, drafts)
        return threads.submit(_masks_after, begun, sequence, drafts) if drafts else begun


def slow(sequence: Sequence) -> bool:
    """Whether the last masks of a sequence were slow."""
    return sequence.sampler.mask_seconds >= SLOW


def offsets(mask: bytes, vocabulary: int, device: torch.device) -> Tensor:
    """What is added to logits [vocabulary] float32: 0 where the mask's bit is set, elsewhere minus infinity."""
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
    return [mask and _held_back(sequence, mask, sequence.generated + place) for place, mask in enumerate(masks)]


def _masks_after(begun: Future[list[bytes | None]], sequence: Sequence, drafts: tuple[int, ...]
                 ) -> list[bytes | None]:
    """The masks, once the one that was begun is made: a constraint works for one thread at a time."""
    begun.exception()
    return _masks(sequence, drafts)


def _held_back(sequence: Sequence, mask: bytes, generated: int) -> bytes:
    """The mask without the ends that are not to come yet, unless nothing else may."""
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
    """The offsets [256, 8] that eight bits stand for."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return torch.where(bits == 1, 0.0, -torch.inf).to(device)
