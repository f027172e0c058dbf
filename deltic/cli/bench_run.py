"""Runs a scenario on an engine and takes the time of every request."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from statistics import median, median_low
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from deltic.cli.scenarios import RequestGroup, Scenario, Sizes, Tokens, advance, drawing
from deltic.errors import DelticError
from deltic.params import EngineRequest, Event, SamplingParams

if TYPE_CHECKING:
    from deltic.engine.engine import Engine

Progress = Callable[[], None]
"""Called whenever a group has been served: once more than the script has groups."""
Record = TypeVar("Record", "Timed", "Summary")


class Restartable(Protocol):
    """What a scenario is run on. `restart` puts a new engine in place, which knows what the last one left on disk."""

    @property
    def engine(self) -> Engine: ...

    def restart(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Timed:
    """One request that was served. Milliseconds since it arrived."""

    request: str
    prompt_tokens: int
    cached_tokens: int
    time_to_first_token_ms: float
    total_ms: float


@dataclass(frozen=True, slots=True)
class Summary:
    """A scenario as a whole.

    computed_tokens: prompt tokens that were not in the cache.
    reuse_share: the part of all that were.
    evictions: states that the pools had no room for.
    time_to_first_token_warm_ms: median over the requests of which something was cached, None without any.
    last_warm_ms, last_cold_ms: median time to the first token of the last group's requests, as they came and without
        any reuse.
    cold_over_warm: their ratio.
    """

    prompt_tokens: int
    computed_tokens: int
    reuse_share: float
    evictions: int
    time_to_first_token_warm_ms: float | None
    last_warm_ms: float
    last_cold_ms: float
    cold_over_warm: float


@dataclass(frozen=True, slots=True)
class BenchRun:
    """One run of a scenario."""

    requests: tuple[Timed, ...]
    summary: Summary


def run_scenario(model: Restartable, scenario: Scenario, sizes: Sizes, seed: int = 0,
                 progress: Progress = lambda: None) -> BenchRun:
    """Run a scenario, from pools without prefixes; then the last group again without any reuse.

    DelticError if a request fails.
    """
    script = scenario.script(sizes, drawing(seed, model.engine.runtime.config.vocab_size))
    model.engine.runtime.cache.clear()
    groups: list[list[Timed]] = []
    evictions, group = 0, advance(script, None)
    while group is not None:
        if group.restarted:
            model.restart()
        tree = model.engine.runtime.cache.tree
        before, last = tree.evictions, group
        timed, answers = serve(model.engine, group, sizes.new_tokens)
        groups.append(timed)
        evictions += tree.evictions - before
        progress()
        group = advance(script, answers)
    cold, _ = serve(_without_reuse(model.engine), last, sizes.new_tokens)
    progress()
    requests = tuple(timed for group in groups for timed in group)
    return BenchRun(requests, _summary(requests, groups[-1], cold, evictions))


def serve(engine: Engine, group: RequestGroup, new_tokens: int) -> tuple[list[Timed], list[Tokens]]:
    """Serve requests that arrive together; returns their times and answers, in order."""
    sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    first: dict[str, float] = {}
    last: dict[str, tuple[float, Event]] = {}
    answers: dict[str, list[int]] = {ask.name: [] for ask in group.asks}
    started = time.perf_counter()
    for ask in group.asks:
        engine.add(EngineRequest(ask.name, ask.prompt, sampling, ask.boundaries))
    while engine.has_work:
        for event in engine.step():
            now = (time.perf_counter() - started) * 1e3
            if event.token is not None:
                answers[event.request].append(event.token)
                first.setdefault(event.request, now)
            if event.finish:
                last[event.request] = now, event
    timed = [_timed(name, first.get(name, 0.0), *last[name]) for name in answers]
    return timed, [tuple(answer) for answer in answers.values()]


def medians(runs: Sequence[BenchRun]) -> BenchRun:
    """Each number's median over the runs."""
    requests = zip(*(run.requests for run in runs), strict=True)
    return BenchRun(tuple(map(_median, requests)), _median([run.summary for run in runs]))


def _timed(name: str, first: float, last: float, end: Event) -> Timed:
    if end.finish == "error" or end.usage is None:
        raise DelticError(f"the measurement failed: {name}: {end.error}")
    return Timed(name, end.usage.prompt_tokens, end.usage.cached_tokens, round(first, 3), round(last, 3))


def _without_reuse(engine: Engine) -> Engine:
    """An engine of the same model and the same pools, which must be empty, that knows no prefixes."""
    from deltic.cache.manager import HybridCache
    from deltic.engine.engine import Engine
    from deltic.runner.model_runner import ModelRunner

    runtime, known = engine.runtime, engine.runtime.cache
    assert isinstance(runtime, ModelRunner), "its pools are not here"
    known.clear()
    assert not len(known.tree) and known.idle, "the pools are in use"
    return Engine(replace(runtime, cache=HybridCache(known.pools, reuse=False)))


def _summary(requests: Sequence[Timed], last: Sequence[Timed], cold: Sequence[Timed], evictions: int) -> Summary:
    prompt, cached = sum(r.prompt_tokens for r in requests), sum(r.cached_tokens for r in requests)
    warm = [r.time_to_first_token_ms for r in requests if r.cached_tokens]
    last_warm = median(r.time_to_first_token_ms for r in last)
    last_cold = median(r.time_to_first_token_ms for r in cold)
    return Summary(prompt, prompt - cached, round(cached / prompt, 4), evictions,
                   round(median(warm), 3) if warm else None, round(last_warm, 3), round(last_cold, 3),
                   round(last_cold / last_warm, 3))


def _median(records: Sequence[Record]) -> Record:
    """A record of medians; text is that of the first."""
    names = [field.name for field in fields(records[0])]
    return type(records[0])(**{name: _middle([asdict(record)[name] for record in records]) for name in names})


def _middle(values: Sequence[Any]) -> Any:
    known = [value for value in values if value is not None]
    if not known or isinstance(known[0], str):
        return values[0]
    return median_low(known) if isinstance(known[0], int) else round(median(known), 4)
