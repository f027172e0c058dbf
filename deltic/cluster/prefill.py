"""Disaggregated prefill: prefill replicas compute long prompts, and decode replicas continue from their states.

    decode replica                                            prefill replica
    pauses the request
    ids, known items    -- a streaming call -->               computes the prompt, writes items to the cache directory
    adopts the items    <-- names of the written items --
    resumes the request, which loads the state from the disk tier

The items are the items of the disk tier. Its identity promises equal bits. If anything fails, the decode replica
computes the prompt itself. No Ray.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, Final
from uuid import uuid4

from deltic.cache.manager import HybridCache
from deltic.cache.offload.disk import DiskStore
from deltic.cache.offload.index import TierIndex
from deltic.cache.offload.types import StoredItem
from deltic.cluster.boundaries import Boundaries, boundaries_of
from deltic.cluster.identity import NOT_SHARED
from deltic.engine.engine import Engine
from deltic.engine.worker import Worker
from deltic.errors import BusyError, ConfigError, GenerationError, RequestError, UnavailableError
from deltic.params import EngineRequest, Prompt, SamplingParams
from deltic.server.async_engine import AsyncEngine

LEAST_TOKENS: Final = 256
"""Minimum new tokens of a prompt that is handed over: the state alone is as large as 500 tokens of K/V or more."""
LEAST_SECONDS: Final = 0.25
"""Minimum seconds that these tokens would take here: less disturbs answers too little for two calls and copies."""
_PATIENCE, _PATIENCE_SECONDS = 3.0, 0.5
"""A prompt waits for a prefill replica this many times as long as it would take here, plus this many seconds."""
_ACCEPT_SECONDS: Final = 3.0
"""Timeout in seconds for a prefill replica to accept a prompt. Without it, Ray would wait until one runs."""
_REST_SECONDS: Final = 10.0
"""Seconds after a failure in which prefill replicas get no prompts."""

log = logging.getLogger("deltic")


@dataclass(frozen=True, slots=True)
class PrefillOrder:
    """A prompt to compute. items: items of the prompt that the cache directory is known to have. known: number of its
    tokens that the decode replica has. patience: seconds that it may wait. directory: number of the cache directory.
    model: digest of everything that determines the bits of items."""

    prompt: array[int]
    stable_prefixes: tuple[int, ...]
    cache_salt: str
    client: str
    items: Sequence[StoredItem]
    known: int
    patience: float
    directory: int = 0
    model: str = ""


def disk_tier(cache: HybridCache) -> TierIndex | None:
    """Returns the disk tier, which replicas share; None without a usable cache directory."""
    return next((tier for tier in cache.tiers if isinstance(tier.store, DiskStore)), None)


def directory_of(tier: TierIndex | None) -> int:
    """Returns the number of a tier's cache directory; 0 if there is none, or it cannot be used. Waits for the disk."""
    try:
        return tier.store.number if tier and isinstance(tier.store, DiskStore) else 0
    except OSError:
        return 0


def _model_of(tier: TierIndex) -> str:
    return tier.store.model if isinstance(tier.store, DiskStore) else ""


class PrefillClient:
    """Hands over prompts of a decode replica. calls: handle for the method `prefill` of the prefill replicas."""

    def __init__(self, calls: Any, worker: Worker, tier: TierIndex) -> None:
        self.outcomes: Counter[str] = Counter(done=0, busy=0, failed=0, cancelled=0)
        self._calls, self._worker, self._tier = calls, worker, tier
        self._rest_until = 0.0
        self._warned = False

    def order(self, request: EngineRequest) -> PrefillOrder | None:
        """Returns the order for a prompt; None if a handover would not pay. For the worker's thread."""
        output, length = request.output, len(request.prompt)
        shown = isinstance(request.prompt, Prompt) and request.prompt.keys is not None
        if shown or not isinstance(output, SamplingParams) or output.prompt_logprobs is not None:
            return None
        if length < LEAST_TOKENS or time.monotonic() < self._rest_until or not self._tier.store.ready:
            return None
        engine = self._worker.engine
        keys = engine.keys_of(request)
        known = _known(engine.runtime.cache, keys)
        new = length - known
        seconds = new * _token_seconds(engine)
        if new < LEAST_TOKENS or seconds < LEAST_SECONDS:
            return None
        return PrefillOrder(array("q", request.ids), request.stable_prefixes, request.cache_salt, request.client,
                            self._tier.written(keys), known, _PATIENCE * seconds + _PATIENCE_SECONDS,
                            model=_model_of(self._tier))

    async def compute(self, order: PrefillOrder) -> None:
        """Returns when the prompt is in the tier, or must be computed here."""
        outcome = "cancelled"
        try:
            items = await self._items(order)
            await asyncio.to_thread(self._worker.execute, lambda _: self._tier.adopt(items))
            outcome, self._warned = "done", False
        except (BusyError, RequestError) as error:  # the other replica works as it should
            log.debug("a prompt is computed here: %s", error)
            outcome = "busy"
        except Exception as error:
            outcome, self._rest_until = "failed", time.monotonic() + _REST_SECONDS
            if not self._warned:
                cause = getattr(error, "cause", None) or error  # the text of Ray's error has a traceback
                log.warning("prompts are computed here, because the prefill replicas do not: %s",
                            str(cause) or type(cause).__name__)
            self._warned = True
        finally:
            self.outcomes[outcome] += 1

    async def _items(self, order: PrefillOrder) -> Sequence[StoredItem]:
        """Returns the items that a prefill replica has written."""
        order = replace(order, directory=await asyncio.to_thread(directory_of, self._tier))
        answer = self._calls.remote(order, await asyncio.to_thread(_boundaries, order))
        try:
            parts = aiter(answer)
            if not await _within(_ACCEPT_SECONDS, parts):
                answer.cancel()
                raise UnavailableError(f"none has accepted a prompt within {_ACCEPT_SECONDS:g} seconds")
            items: Sequence[StoredItem] = [item async for part in parts for item in part]
        except asyncio.CancelledError:
            answer.cancel()
            raise
        if max((item.done for item in items), default=0) <= order.known:
            raise UnavailableError("one has written nothing to the cache directory, and its log says why")
        return items


async def _within(seconds: float, parts: AsyncIterator[Any]) -> bool:
    """Returns True if the next part arrives within `seconds`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await anext(parts)
            return True
    return False


async def prefilled(order: PrefillOrder, requests: AsyncEngine, worker: Worker, queue: float,
                    learn: Callable[[array[int]], None]) -> AsyncIterator[Sequence[StoredItem]]:
    """Yields an empty tuple when the order is accepted, and at the end the written items. queue: seconds of work that
    wait here. learn: gets the keys of the prompt, in the worker's thread. Raises BusyError if the queue is too long."""
    tier = disk_tier(worker.engine.runtime.cache)
    directory = await asyncio.to_thread(directory_of, tier)
    if tier is None or not directory or directory != order.directory:
        raise ConfigError(NOT_SHARED, "cache_dir")
    if order.model != _model_of(tier):
        raise ConfigError("they compute other bits than the decode replicas, whose states cannot continue theirs: use "
                          "machines, versions and options of one kind for all", "prefill_replicas")
    if queue > order.patience:
        raise BusyError(f"{queue:.1f} seconds of work wait for the prefill replica")
    yield ()  # comes before all calls that wait for a step
    await asyncio.to_thread(worker.execute, lambda _: tier.adopt(order.items))
    request = await asyncio.to_thread(_request_of, order)
    handle = await requests.submit([request])
    try:
        async for events in handle:
            for event in events:
                if event.refused or event.finish in ("error", "abort"):
                    raise event.refused or GenerationError(event.error or "the request was aborted")
    finally:
        handle.close()
    keys = await asyncio.to_thread(worker.engine.keys_of, request)
    wait_for = await asyncio.to_thread(worker.execute, partial(_store, tier=tier, keys=keys))
    await asyncio.to_thread(wait, wait_for)

    def finish(_: Engine) -> Sequence[StoredItem]:
        learn(keys)
        return tier.written(keys)

    yield await asyncio.to_thread(worker.execute, finish)


def _request_of(order: PrefillOrder) -> EngineRequest:
    return EngineRequest(f"prefill-{uuid4().hex}", tuple(order.prompt), SamplingParams(max_tokens=0),
                         order.stable_prefixes, client=order.client, cache_salt=order.cache_salt)


def _boundaries(order: PrefillOrder) -> Boundaries:
    """Returns boundaries, with which the router finds the prefill replica that has most of a prompt."""
    return boundaries_of({"prompt": order.prompt.tolist(), "cache_salt": order.cache_salt})


def _known(cache: HybridCache, keys: array[int]) -> int:
    """Returns the number of a prompt's tokens that the cache has, on the device or in a tier."""
    known = cache.tree.cached_length(keys)
    for tier in cache.tiers:
        entry = tier.find(keys, known)
        known = entry.done if entry else known
    return known


def _token_seconds(engine: Engine) -> float:
    """Returns the seconds that a prompt token takes; infinity if this is not measured yet."""
    times = engine.scheduler.times
    return median(times.by_token) if times and times.by_token else math.inf


def _store(engine: Engine, tier: TierIndex, keys: array[int]) -> list[Future[int]]:
    """Copies all queued items out of the pools. Returns the pending writes of a prompt."""
    with engine.resting_cache():
        pass
    return tier.writing(keys)
