"""`deltic bench`: the speed of prefill and decode on random token ids. The scenarios are in bench/scenarios.py."""

from __future__ import annotations

import argparse
import json
import random
import runpy
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from deltic import __version__
from deltic.cli import options
from deltic.cli.options import open_llm
from deltic.cli.output import commit, machine_facts, peak_memory_mib, table
from deltic.cli.parser import UsageError, whole
from deltic.errors import DelticError
from deltic.params import EngineRequest, Event, LoadedAdapter, SamplingParams

if TYPE_CHECKING:
    from deltic.engine.engine import Engine
    from deltic.llm import LLM
    from deltic.runner.operator_profile import Profile

_MEASURES = {"prefill_tokens_per_second": "prompt tokens over the time until every sequence has its first token",
             "decode_tokens_per_second": "tokens per second while all sequences decode, summed over the batch",
             "time_to_first_token_ms": "median over the batch",
             "overhead_ms": "a decode step without the model's forward pass"}
_PROMPT, _NEW, _REPEAT = 512, 64, 3
_WARM_UP_TOKENS = 16
SCENARIOS = ("multi-turn", "agent", "edit", "restart", "shared-system")
_SCENARIO_SCRIPT = Path(__file__).parents[2] / "bench" / "scenarios.py"


def add_bench(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measure the speed of prefill and decode. Prompts are random token ids."
    options.add_model(parser)
    parser.add_argument("--prompt-tokens", type=whole(1), metavar="N",
                        help=f"tokens of each prompt (default: {_PROMPT}); in a scenario, of the system message")
    parser.add_argument("--new-tokens", type=whole(1), metavar="N", help=f"tokens of each answer (default: {_NEW})")
    parser.add_argument("--batch", type=whole(1, 4096), metavar="N",
                        help="sequences that run at the same time (default: 1)")
    parser.add_argument("--repeat", type=whole(1, 1000), metavar="N",
                        help=f"measured runs, after one to warm up (default: {_REPEAT}; of a scenario 1)")
    parser.add_argument("--profile", action="store_true",
                        help="add a run that shows the share of each operator in prefill and decode")
    options.add_json(parser)
    group = parser.add_argument_group("scenario", "In a checkout of the source. Defaults are the scenario's own.")
    group.add_argument("--scenario", choices=SCENARIOS,
                       help="send requests as programs send them, and show how much of their prompts is reused")
    group.add_argument("--turns", type=whole(1, 10000), metavar="N", help="user messages, steps of an agent, or waves")
    group.add_argument("--turn-tokens", type=whole(1), metavar="N", help="new tokens of each turn")
    options.add_random(parser)
    options.add_engine(parser)


def run_bench(args: argparse.Namespace) -> int:
    if args.scenario:
        return _run_scenario(args)
    options.refuse({"--turns": args.turns, "--turn-tokens": args.turn_tokens}, "{} needs --scenario")
    case = Case(args.prompt_tokens or _PROMPT, args.new_tokens or _NEW, args.batch or 1)
    llm = open_llm(args, max_batch=case.batch, max_context=case.prompt_tokens + case.new_tokens)
    check_room(llm, case)
    repeat = args.repeat or _REPEAT
    with llm.worker.hold() as engine:
        warm_up = Case(min(case.prompt_tokens, _WARM_UP_TOKENS), min(case.new_tokens, 2), case.batch)
        trial(engine, warm_up)
        runs = [trial(engine, case, seed) for seed in range(1, repeat + 1)]
        profile = _profile(engine, case, repeat + 1) if args.profile else None
    result = _report(llm, case, runs)
    if args.json:
        print(json.dumps(result | ({"profile": profile.as_dict()} if profile else {})))
    else:
        print(_as_table(result) + (f"\n\n{profile}" if profile else ""))
    return 0


def _run_scenario(args: argparse.Namespace) -> int:
    options.refuse({"--profile": args.profile}, f"{{}} is for plain prompts: leave out --scenario {args.scenario}")
    if not _SCENARIO_SCRIPT.exists():
        raise UsageError("--scenario needs bench/scenarios.py of the source, which the package does not have: run it "
                         "in a checkout")
    print(runpy.run_path(str(_SCENARIO_SCRIPT))["run"](args))
    return 0


def _profile(engine: Engine, case: Case, seed: int) -> Profile:
    from deltic.runner.operator_profile import profiling

    with profiling(engine.runtime) as profile:
        trial(engine, case, seed)
    return profile


@dataclass(frozen=True, slots=True)
class Case:
    """The size of a measurement: `batch` sequences, each with `prompt_tokens` and `new_tokens`."""

    prompt_tokens: int
    new_tokens: int
    batch: int = 1


@dataclass(frozen=True, slots=True)
class Measurement:
    """The result of one run. Rates are totals over the batch. None: the case is too short for this figure."""

    prefill_tokens_per_second: float
    decode_tokens_per_second: float | None
    time_to_first_token_ms: float
    overhead_ms: float | None


@dataclass(slots=True)
class _Trace:
    """Records times in seconds since the start.

    steady: (time, tokens so far) of the steps in which all sequences decode. overheads: overheads of these steps.
    """

    first: dict[str, float] = field(default_factory=dict)
    steady: list[tuple[float, int]] = field(default_factory=list)
    overheads: list[float] = field(default_factory=list)
    tokens: int = 0
    ended: bool = False

    def add(self, events: Sequence[Event], now: float, overhead: float, batch: int) -> None:
        """Adds the events of a step."""
        for event in events:
            if event.finish == "error":
                raise DelticError(f"the measurement failed: {event.error}")
            self.tokens += event.token is not None
            self.first.setdefault(event.request, now)
        if len(self.first) == batch and not self.ended:
            if self.steady:
                self.overheads.append(overhead)
            self.steady.append((now, self.tokens))
        self.ended = self.ended or any(event.finish for event in events)


def trial(engine: Engine, case: Case, seed: int = 0, adapters: Sequence[LoadedAdapter] = ()) -> Measurement:
    """Runs the case once, with prompts drawn from the seed. adapters: adapters of the sequences, in turn."""
    draw = random.Random(seed)
    vocabulary = engine.runtime.config.vocab_size
    sampling = SamplingParams(temperature=0.0, max_tokens=case.new_tokens, ignore_eos=True)
    requests = []
    for index in range(case.batch):
        prompt = tuple(draw.randrange(vocabulary) for _ in range(case.prompt_tokens))
        adapter = adapters[index % len(adapters)] if adapters else None
        requests.append(EngineRequest(f"bench-{index}", prompt, sampling, adapter=adapter))
    trace, started = _Trace(), time.perf_counter()
    for request in requests:
        engine.add(request)
    while engine.has_work:
        events = engine.step()
        trace.add(events, time.perf_counter() - started, engine.stats.last_overhead, case.batch)
    decode = None
    if len(trace.steady) > 1:
        (start, before), (end, after) = trace.steady[0], trace.steady[-1]
        decode = (after - before) / (end - start)
    return Measurement(
        prefill_tokens_per_second=case.batch * case.prompt_tokens / max(trace.first.values()),
        decode_tokens_per_second=decode,
        time_to_first_token_ms=median(trace.first.values()) * 1e3,
        overhead_ms=median(trace.overheads) * 1e3 if trace.overheads else None)


def check_room(llm: LLM, case: Case, asked: str = "--prompt-tokens and --new-tokens") -> None:
    """Raises UsageError if the case exceeds the model's context or batch. asked: the options that set its tokens."""
    tokens, memory = case.prompt_tokens + case.new_tokens, llm.runtime.memory
    if tokens > memory.max_context:
        raise UsageError(f"{asked} are {tokens} together and the context holds {memory.max_context}: ask for fewer, or "
                         "raise --max-context or --memory")
    if case.batch > memory.max_batch:
        raise UsageError(f"--batch {case.batch} is more than the {memory.max_batch} sequences that can run at the same "
                         "time: ask for fewer, or raise --max-batch or --memory")


def _report(llm: LLM, case: Case, runs: Sequence[Measurement]) -> dict[str, Any]:
    """Returns the medians and all runs, with facts about the model, the machine and the code."""
    return {**model_facts(llm), **asdict(case), "repeat": len(runs),
            **{name: _median([getattr(run, name) for run in runs]) for name in _MEASURES},
            "peak_memory_mib": round(peak_memory_mib(), 1), "runs": [asdict(run) for run in runs],
            **origin_facts(llm)}


def model_facts(llm: LLM) -> dict[str, Any]:
    from deltic.ops.kv import name_of
    from deltic.runner.model_runner import ModelRunner

    runtime = llm.runtime
    dtype = runtime.config.dtype if runtime.options.dtype == "auto" else runtime.options.dtype
    kv = name_of(runtime.pools.shards[0].keys.dtype) if isinstance(runtime, ModelRunner) else dtype
    return {"model": runtime.name, "layers": runtime.config.num_hidden_layers, "dtype": dtype, "kv_dtype": kv,
            "state_dtype": runtime.options.state_dtype, "device": runtime.options.device}


def origin_facts(llm: LLM) -> dict[str, Any]:
    """Returns facts about the machine and the code."""
    from deltic.ops import explain

    return {"machine": {**machine_facts(), "threads": llm.runtime.threads}, "version": __version__, "commit": commit(),
            "ops": explain(llm.runtime.ops)}


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(median(known), 4) if known else None


def _as_table(result: dict[str, Any]) -> str:
    rows = {name: f"{value}  ({_MEASURES[name]})" if name in _MEASURES else value
            for name, value in result.items() if name not in ("runs", "ops", "machine")}
    return table({**rows, "machine": result["machine"], "ops": result["ops"]})
