"""Statistics of an engine, as numbers that another thread may read while the engine runs.

The engine's thread writes, others read: every figure is an int, a length or a list of fixed length, so that no reader
iterates over a collection while it changes. The figures of one reading may be a step apart.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from deltic.params import PAGE, Finish

if TYPE_CHECKING:
    from deltic.cache.frames import PagePool, SlotPool
    from deltic.cache.manager import HybridCache
    from deltic.cache.offload.index import TierIndex
    from deltic.engine.engine import Engine
    from deltic.engine.sequence import Sequence
    from deltic.ops.stored import ExpertStatistics

BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of a histogram's buckets in seconds; one more bucket counts all longer durations."""
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)
_LONG = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
WINDOW = 10
"""Length in seconds of the window over which `Pace` averages."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """A reading of a histogram. counts: observations per bucket, one more bucket than `bounds`. sum: in seconds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


class Histogram:
    """Counts durations by length. One thread observes; any thread may read."""

    def __init__(self, bounds: tuple[float, ...] = BOUNDS) -> None:
        """bounds: ascending; an observation is counted in the first bucket with a bound that it does not exceed."""
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def read(self) -> Distribution:
        return Distribution(self._bounds, tuple(self._counts), self._sum)


class Pace:
    """Measures the recent number of events per second. One thread counts; any thread may read. Times are in seconds."""

    def __init__(self) -> None:
        # one place per second, reused in turn; two more than are summed, because a reader may read its clock before the
        # writer does
        self._seconds = [(-1, 0)] * (WINDOW + 2)

    def count(self, now: float) -> None:
        second = int(now)
        place = second % len(self._seconds)
        known, events = self._seconds[place]
        self._seconds[place] = (second, events + 1 if known == second else 1)

    def read(self, now: float) -> float:
        """Returns the events per second over the last WINDOW whole seconds."""
        second = int(now)
        return sum(events for known, events in tuple(self._seconds) if second - WINDOW <= known < second) / WINDOW


class TokenMeter:
    """Measures latencies. The engine's thread records every token, and the end of every answer.

    first_token: from a request's arrival to its first token. queued: from a request's arrival to its first pages.
    inter_token: between two tokens of an answer; the tokens of one step arrive together. latency: from a request's
    arrival to an answer's end. finishes: number of ended answers by finish reason.
    """

    def __init__(self) -> None:
        self.first_token, self.queued, self.pace = Histogram(), Histogram(), Pace()
        self.inter_token, self.latency = Histogram(_SHORT), Histogram(_LONG)
        self.finishes: dict[Finish, int] = dict.fromkeys(get_args(Finish), 0)

    def token(self, sequence: Sequence) -> None:
        """Records a token of a sequence. Only a request's first choice counts for the time that the request waited."""
        now = time.perf_counter()
        self.pace.count(now)
        if sequence.times.last_token is not None:
            self.inter_token.observe(now - sequence.times.last_token)
        sequence.times.last_token = now
        if sequence.generated == 1 and not sequence.choice:
            self.first_token.observe(now - sequence.times.arrived)
            self.queued.observe((sequence.times.admitted or now) - sequence.times.arrived)

    def end(self, sequence: Sequence, unbegun: int = 0) -> None:
        """Records the end of a sequence. unbegun: number of choices that end with it, before they have forked."""
        self.latency.observe(time.perf_counter() - sequence.times.arrived)
        if sequence.finish:
            self.finishes[sequence.finish] += 1 + unbegun


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """Units of the device's memory. used: units of running sequences and kept prefixes. size: all units."""

    used: int
    size: int


@dataclass(frozen=True, slots=True)
class TierUsage:
    """A memory that keeps prefixes. bytes: bytes in use, of `budget`; on the device, by running sequences, too.

    checkpoints: number of kept states.
    evictions: number of evicted states.
    restored, restored_tokens: numbers of prefixes copied from here to the device, and of their tokens; None for the
        device itself.
    """

    name: str
    bytes: int
    budget: int
    checkpoints: int
    evictions: int
    restored: int | None = None
    restored_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """All of an engine's figures. They count choices: a request with n = 3 counts three times.

    finished: choices that finished for any reason; `finishes` counts them by reason.
    failed: finished choices that ended with an error.
    prompt_tokens: computed prompt tokens; tokens of a preempted sequence count again.
    reused_tokens: prompt tokens that the cache had.
    pace: generated tokens per second.
    drafted, accepted: numbers of drafts, and of the right ones among them, by their position in a row.
    saved_seconds: the time that the drafts saved.
    experts: statistics of a mixture of experts that are not all in memory.
    """

    running: int
    waiting: int
    paused: int
    finished: int
    failed: int
    prompt_tokens: int
    reused_tokens: int
    generated_tokens: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    saved_seconds: float
    pace: float
    steps: int
    preemptions: int
    pages: PoolUsage
    slots: PoolUsage
    tiers: tuple[TierUsage, ...]
    first_token: Distribution
    queued: Distribution
    inter_token: Distribution
    latency: Distribution
    finishes: Mapping[Finish, int]
    experts: ExpertStatistics | None = None


@dataclass(frozen=True, slots=True)
class RequestProgress:
    """The progress of a request. read: number of processed prompt tokens, including those that the cache had."""

    status: Literal["waiting", "prefill", "decoding", "finished"]
    read: int


def progress(sequences: list[Sequence], prompt: int) -> RequestProgress:
    """Returns the progress of a request. sequences: its unfinished choices. prompt: number of its prompt tokens. Cheap
    and thread-safe."""
    for first in sequences[:1]:
        cache = first.cache
        if cache is None:
            return RequestProgress("waiting", 0)
        return RequestProgress("decoding" if first.generated or first.choice else "prefill", min(cache.done, prompt))
    return RequestProgress("finished", prompt)


def snapshot(engine: Engine) -> EngineSnapshot:
    """Returns the engine's current figures. Cheap and thread-safe; changes nothing."""
    stats, scheduler, cache, meter = engine.stats, engine.scheduler, engine.runtime.cache, engine.meter
    drafts, limit = engine.speculator.stats, engine.speculator.depth.limit
    return EngineSnapshot(
        running=len(scheduler.running), waiting=len(scheduler.waiting), paused=len(scheduler.paused),
        finished=stats.finished, failed=stats.failed,
        prompt_tokens=stats.prompt_tokens, reused_tokens=stats.reused_tokens,
        generated_tokens=stats.generated_tokens, drafted=tuple(drafts.drafted_at[:limit]),
        accepted=tuple(drafts.accepted_at[:limit]), saved_seconds=drafts.saved_seconds,
        pace=meter.pace.read(time.perf_counter()),
        steps=stats.steps, preemptions=scheduler.preemptions,
        pages=_pool(cache.pages), slots=_pool(cache.slots),
        tiers=(_device(cache), *map(_tier, cache.tiers)),
        first_token=meter.first_token.read(), queued=meter.queued.read(),
        inter_token=meter.inter_token.read(), latency=meter.latency.read(), finishes=dict(meter.finishes),
        experts=engine.runtime.experts.statistics() if engine.runtime.experts else None)


def _pool(ledger: PagePool | SlotPool) -> PoolUsage:
    return PoolUsage(ledger.used, ledger.size)


def _device(cache: HybridCache) -> TierUsage:
    page, slot = PAGE * cache.sizes.token_bytes, cache.sizes.slot_bytes
    pages, slots = _pool(cache.pages), _pool(cache.slots)
    return TierUsage("device", pages.used * page + slots.used * slot, cache.sizes.bytes,
                len(cache.tree), cache.tree.evictions)


def _tier(tier: TierIndex) -> TierUsage:
    return TierUsage(tier.name, tier.bytes, tier.budget, tier.prefixes, tier.evictions, tier.hits, tier.hit_tokens)


@dataclass(slots=True)
class EngineStats:
    """Counters since the start.

    async_steps: steps that were launched before the host had the tokens of the previous step.
    prompt_tokens: processed prompt tokens; tokens of a preempted request count again.
    reused_tokens: prompt tokens of finished requests that the cache had.
    busy_seconds: total duration of steps.
    last_overhead: seconds of the last step outside of the model's forward pass.
    """

    steps: int = 0
    async_steps: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    finished: int = 0
    failed: int = 0
    busy_seconds: float = 0.0
    last_overhead: float = 0.0
