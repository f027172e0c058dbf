"""`deltic bench --scenario`: opens the model, runs the scenario, and reports."""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from itertools import count
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from deltic.cli.bench_run import BenchRun, Summary, medians, run_scenario
from deltic.cli.machine import peak_memory_mib
from deltic.cli.measure import Case, check_room, model_facts, origin_facts, trial
from deltic.cli.models import open_llm
from deltic.cli.scenarios import SCENARIOS, RequestGroup, Scenario, Sizes, rehearse
from deltic.cli.table import grid, table
from deltic.cli.terminal import Bar
from deltic.config import EngineConfig

if TYPE_CHECKING:
    from deltic.engine.engine import Engine
    from deltic.llm import LLM

_NOTE = "loading and warming up the model, after a restart too, is part of no figure"
_WARM_UP = Case(prompt_tokens=16, new_tokens=2)


class BenchModel:
    """A model that can be loaded anew; nobody else uses its engine. defaults: engine options to use where none is
    given."""

    def __init__(self, args: argparse.Namespace, **defaults: Any) -> None:
        self._args, self._defaults, self._opened = args, defaults, 0
        self._held = ExitStack()
        self._llm: LLM | None = self._open()

    @property
    def llm(self) -> LLM:
        assert self._llm, "the model is closed"
        return self._llm

    @property
    def engine(self) -> Engine:
        return self.llm.engine

    def restart(self) -> None:
        self.close()
        self._llm = self._open()

    def close(self) -> None:
        """Wait until the cache is on disk, and give the memory back: it may not hold the model twice."""
        if self._llm:
            self._held.close()
            self._llm.close()
            self._llm = None
            gc.collect()

    def _open(self) -> LLM:
        llm = open_llm(self._args, **self._defaults)
        self._opened += 1
        trial(self._held.enter_context(llm.worker.hold()), _WARM_UP, self._opened)
        return llm


def run(args: argparse.Namespace, name: str) -> str:
    """Run a scenario as the arguments say; returns the report, as JSON if they ask for it."""
    scenario = SCENARIOS[name]
    sizes = scenario.sizes.changed(prompt_tokens=args.prompt_tokens, turn_tokens=args.turn_tokens,
                                   new_tokens=args.new_tokens, turns=args.turns, batch=args.batch)
    groups = rehearse(scenario, sizes)
    longest = Case(max(group.longest for group in groups), sizes.new_tokens, sizes.batch)
    with _opened(args, groups, longest) as model:
        check_room(model.llm, longest, "the longest prompt and --new-tokens")
        runs = _run_all(model, scenario, sizes, range(args.seed, args.seed + (args.repeat or 1)))
        result = report(model.llm, name, sizes, runs)
    return json.dumps(result) if args.json else _for_people(result)


def report(llm: LLM, name: str, sizes: Sizes, runs: Sequence[BenchRun]) -> dict[str, Any]:
    """Medians of every request and of the whole, and the runs, with all that is needed to understand them."""
    return {**model_facts(llm), "scenario": name, **asdict(sizes), "repeat": len(runs), **asdict(medians(runs)),
            "note": _NOTE, "peak_memory_mib": round(peak_memory_mib(), 1), "runs": [asdict(run) for run in runs],
            **origin_facts(llm)}


@contextmanager
def _opened(args: argparse.Namespace, groups: Sequence[RequestGroup], longest: Case) -> Iterator[BenchModel]:
    """A model with room for the groups, and with a directory for the cache if there is a restart."""
    with _cache_directory(groups) as directory:
        model = BenchModel(args, max_batch=max(EngineConfig().max_batch, longest.batch),
                           max_context=longest.prompt_tokens + longest.new_tokens, **directory)
        try:
            yield model
        finally:
            model.close()


@contextmanager
def _cache_directory(groups: Sequence[RequestGroup]) -> Iterator[dict[str, str]]:
    if not any(group.restarted for group in groups):
        yield {}
        return
    with TemporaryDirectory(prefix="deltic-bench-") as directory:
        yield {"cache_dir": directory}


def _run_all(model: BenchModel, scenario: Scenario, sizes: Sizes, seeds: Sequence[int]) -> list[BenchRun]:
    total = len(seeds) * (len(rehearse(scenario, sizes)) + 1)
    done, bar = count(1), Bar("running", 1, "groups of requests", patience=1.0)
    try:
        return [run_scenario(model, scenario, sizes, seed, lambda: bar.update(next(done), total)) for seed in seeds]
    finally:
        bar.close()


def _for_people(result: dict[str, Any]) -> str:
    shown = ("model", "layers", "dtype", "device", "peak_memory_mib", "machine", "version", "commit")
    facts = {name: result[name] for name in shown}
    return "\n\n".join((grid(result["requests"]), table(facts), _line(result["scenario"], result["summary"])))


def _line(name: str, summary: dict[str, Any]) -> str:
    found = Summary(**summary)
    warm = found.time_to_first_token_warm_ms
    first = "" if warm is None else f" First token after {warm:,.0f} ms (median) where something was known."
    return (f"{name}: {found.computed_tokens:,} of {found.prompt_tokens:,} prompt tokens were computed, "
            f"{found.reuse_share:.1%} reused.{first} The last prompt took {found.last_warm_ms:,.0f} ms, without reuse "
            f"{found.last_cold_ms:,.0f} ms: {found.cold_over_warm:.1f} x. Note: {_NOTE}.")
