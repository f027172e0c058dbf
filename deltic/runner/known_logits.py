"""Samples from logits of an earlier step: logits from the cache, and logits that a request's logits processors have
changed. Processors run in threads, so that other sequences continue."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as List
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from deltic.cache.handles import SequenceCache
from deltic.engine.sequence import Sequence
from deltic.errors import RequestError, show
from deltic.runner.launch import ScheduledSequence

log = logging.getLogger("deltic")

_FIELD = "logits_processors"
_FORBIDDEN = -1e30
"""Replaces -inf in processed logits, because -inf in a model's own logits means that weights or a kernel are broken."""


@dataclass(frozen=True, slots=True)
class Processing:
    """A run of the logits processors over the logits [V] of a sequence's last token. cache: the sequence's cache at its
    start; if the sequence has another one now, it was preempted, and the logits are computed again."""

    cache: SequenceCache
    raw: Tensor
    processed: Future[Tensor]


Fail = Callable[[Sequence, str, "RequestError | None"], None]


class KnownLogits:
    """Selects an engine's sequences that sample from known logits, and runs their logits processors."""

    def __init__(self, vocabulary: int, threads: int) -> None:
        self._vocabulary, self._threads = vocabulary, threads
        self._pool: ThreadPoolExecutor | None = None

    def ready(self, running: List[Sequence], fail: Fail) -> list[Sequence]:
        """Returns the sequences that can sample without a forward pass. fail: ends a sequence with an error."""
        return [sequence for sequence in running[:] if self._is_ready(sequence, fail)]

    def postpone(self, share: ScheduledSequence, healthy: bool) -> bool:
        """Returns True if a sampled token is dropped because the request has processors, which this call starts."""
        sequence = share.sequence
        if not sequence.request.logits_processors or sequence.sampling.max_tokens == 0 or not healthy:
            return False
        if share.row is None:  # the token was sampled from the processors' result
            share.end, sequence.sampler.processing = sequence.sampler.processing.raw, None
            return False
        assert share.end is not None
        self._submit(sequence, share.cache, share.end)
        return True

    def close(self) -> None:
        """Starts no more processors."""
        if self._pool:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _is_ready(self, sequence: Sequence, fail: Fail) -> bool:
        processing: Processing | None = sequence.sampler.processing
        if processing and processing.cache is sequence.cache:
            return processing.processed.done() and self._take(sequence, processing, fail)
        if sequence.sampler.logits is None:
            return False
        kept: Tensor = sequence.sampler.logits
        if kept.shape != (self._vocabulary,) or kept.dtype != torch.float32:
            fail(sequence, f"internal error: the cache has kept logits of shape {list(kept.shape)}", None)
            return False
        if not sequence.request.logits_processors or sequence.sampling.max_tokens == 0:
            return True
        assert sequence.cache is not None
        sequence.sampler.logits = None
        self._submit(sequence, sequence.cache, kept)
        return False

    def _take(self, sequence: Sequence, processing: Processing, fail: Fail) -> bool:
        try:
            sequence.sampler.logits = processing.processed.result()
        except Exception as error:
            refused = error if isinstance(error, RequestError) else RequestError(
                f"a logits processor failed: {error!r}", _FIELD)
            log.warning("a logits processor failed; its request ends with an error", exc_info=error)
            fail(sequence, str(refused), refused)
            return False
        return True

    def _submit(self, sequence: Sequence, sequence_cache: SequenceCache, logits: Tensor) -> None:
        self._pool = self._pool or ThreadPoolExecutor(self._threads, "deltic-processors")
        sequence.sampler.processing = Processing(
            sequence_cache, logits, self._pool.submit(_processed, sequence, logits)
        )


def _processed(sequence: Sequence, logits: Tensor) -> Tensor:
    """Returns the logits after all processors. The sequence gets no token meanwhile."""
    found, shape = logits.to("cpu", copy=True), logits.shape
    for processor in sequence.request.logits_processors:
        found = processor(list(sequence.tokens), found)
        if not isinstance(found, Tensor) or found.shape != shape or not found.dtype.is_floating_point:
            raise RequestError(f"a logits processor must return a tensor of floats {[*shape]}, not {show(found)}",
                               _FIELD)
    found = found.detach().float().cpu().clamp(min=_FORBIDDEN)
    low, high = float(found.min()), float(found.max())
    if not low < high < torch.inf:
        raise RequestError("a logits processor returned NaN, infinity, or the same number for every token", _FIELD)
    return found
