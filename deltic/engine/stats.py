"""What an engine has done and holds, as numbers that another thread may read while it runs.

The engine's thread writes, others read: every figure is an int, a length or a list of fixed length, so that no reader
can meet a collection that is just changing. A reading is not a moment in time: its figures may be a step apart.
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
"""Upper bounds of a histogram's buckets in seconds; a last bucket has what is above."""
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)
_LONG = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
WINDOW = 10
"""Seconds that a `Pace` looks back."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram as it was read. counts: observations per bucket, one more than `bounds`; sum: in seconds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


class Histogram:
    """Counts durations by size. One thread observes, any may read."""

    def __init__(self, bounds: tuple[float, ...] = BOUNDS) -> None:
        """bounds: ascending; an observation counts in the first bucket whose bound it does not exceed."""
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def read(self) -> Distribution:
        return Distribution(self._bounds, tuple(self._counts), self._sum)


class Pace:
    """How many events a second there were lately. One thread counts, any may read. Times are in seconds."""

    def __init__(self) -> None:
        # a place per second, taken over when its turn comes round again; two more than are summed, for a reader
        # whose clock was read before the writer's
        self._seconds = [(-1, 0)] * (WINDOW + 2)

    def count(self, now: float) -> None:
        second = int(now)
        place = second % len(self._seconds)
        known, events = self._seconds[place]
        self._seconds[place] = (second, events + 1 if known == second else 1)

    def read(self, now: float) -> float:
        """Events per second over the last WINDOW whole seconds."""
        second = int(now)
        return sum(events for known, events in tuple(self._seconds) if second - WINDOW <= known < second) / WINDOW


class TokenMeter:
    """What the engine's thread notes at every token, and at the end of every answer.

    first_token: from a request's arrival to its first token. queued: from its arrival to the first pages it got.
    inter_token: between two tokens of an answer; those of one step come together. latency: from a request's arrival to
    an answer's end. finishes: answers that ended, by why.
    """

    def __init__(self) -> None:
        self.first_token, self.queued, self.pace = Histogram(), Histogram(), Pace()
        self.inter_token, self.latency = Histogram(_SHORT), Histogram(_LONG)
        self.finishes: dict[Finish, int] = dict.fromkeys(get_args(Finish), 0)

    def token(self, sequence: Sequence) -> None:
        """A sequence has drawn a token; only a request's first choice tells how long the request waited."""
        now = time.perf_counter()
        self.pace.count(now)
        if sequence.times.last_token is not None:
            self.inter_token.observe(now - sequence.times.last_token)
        sequence.times.last_token = now
        if sequence.generated == 1 and not sequence.choice:
            self.first_token.observe(now - sequence.times.arrived)
            self.queued.observe((sequence.times.admitted or now) - sequence.times.arrived)

    def end(self, sequence: Sequence, unbegun: int = 0) -> None:
        """A sequence has ended, and with it so many choices that would have begun where it did."""
        self.latency.observe(time.perf_counter() - sequence.times.arrived)
        if sequence.finish:
            self.finishes[sequence.finish] += 1 + unbegun


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """Equal units of the device's memory: in use by running sequences or kept prefixes, and all there are."""

    used: int
    size: int


@dataclass(frozen=True, slots=True)
class TierUsage:
    """Where prefixes are kept. bytes: in use (on the device, by running sequences too), of `budget`.

    checkpoints: kept states.
    evictions: states given up.
    restored, restored_tokens: prefixes brought back from here to the device, and their tokens; None for the device
        itself.
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
    """All of an engine's figures. Sequences are choices: a request with n = 3 counts three times.

    finished: for whatever reason; by reason in `finishes`.
    failed: those of them that ended with an error.
    prompt_tokens: computed ones, those of a preempted sequence again.
    reused_tokens: prompt tokens that the cache knew.
    pace: generated tokens per second.
    drafted, accepted: drafts of speculation, and the right ones among them, by their place in a step.
    saved_seconds: the time that they saved.
    experts: of a mixture whose experts are not all in memory.
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
    """How far a request is. read: tokens of its prompt that are done, with those that the cache knew."""

    status: Literal["waiting", "prefill", "decoding", "finished"]
    read: int


def progress(sequences: list[Sequence], prompt: int) -> RequestProgress:
    """How far a request is whose choices these are, those that are not finished; its prompt has so many tokens. Cheap
    and safe in any thread."""
    for first in sequences[:1]:
        cache = first.cache
        if cache is None:
            return RequestProgress("waiting", 0)
        return RequestProgress("decoding" if first.generated or first.choice else "prefill", min(cache.done, prompt))
    return RequestProgress("finished", prompt)


def snapshot(engine: Engine) -> EngineSnapshot:
    """The engine's figures now. Cheap and safe in any thread; changes nothing."""
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

    async_steps: steps that were launched before the host had the tokens of the step before.
    prompt_tokens: processed prompt tokens; those of a preempted request count again.
    reused_tokens: prompt tokens of finished requests that the cache knew.
    busy_seconds: time in steps.
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
