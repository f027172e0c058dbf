"""`deltic bench`: how fast this machine reads and writes tokens, with random token ids for a prompt."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any

from deltic.cli import bench_model, options
from deltic.cli.floors import floors
from deltic.cli.machine import peak_memory_mib
from deltic.cli.measure import Case, Measurement, check_room, measure, model_facts, origin_facts, trial
from deltic.cli.models import open_llm
from deltic.cli.parser import UsageError, whole
from deltic.cli.scenarios import SCENARIOS
from deltic.cli.table import table

if TYPE_CHECKING:
    from deltic.engine.engine import Engine
    from deltic.engine.operator_profile import Profile
    from deltic.llm import LLM

HELP = ("Measure reading (prefill) and writing (decode) of tokens, and say what this machine allows of them. Prompts "
        "are random token ids.")

_MEASURES = {"prefill_tokens_per_second": "prompt tokens over the time until every sequence has its first token",
             "decode_tokens_per_second": "tokens per second while all sequences write, summed over the batch",
             "time_to_first_token_ms": "median over the batch",
             "overhead_ms": "a decode step without the model's forward pass"}
_FLOORS = {"memory_gb_per_second": "how fast a sum read memory just now; kernels may be a little faster",
           "step_mib": "what a decode step reads and writes: weights, states, keys and values",
           "allowed_decode_tokens_per_second": "if that were all, and nothing of it in caches",
           "multiply_tflops": "how fast the GPU multiplied large matrices just now",
           "allowed_prefill_tokens_per_second": "if products and attention were all, at that speed"}
_PROMPT, _NEW, _REPEAT = 512, 64, 3


def add(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument("--prompt-tokens", type=whole(1), metavar="N",
                        help=f"tokens of each prompt (default: {_PROMPT}); in a scenario, of the system message and "
                             "tools (default: its own)")
    parser.add_argument("--new-tokens", type=whole(1), metavar="N",
                        help=f"tokens of each answer (default: {_NEW}, or the scenario's own)")
    parser.add_argument("--batch", type=whole(1, 4096), metavar="N",
                        help="sequences that run together (default: 1, or the scenario's own)")
    parser.add_argument("--repeat", type=whole(1, 1000), metavar="N",
                        help=f"measured runs, after one to warm up (default: {_REPEAT}; of a scenario 1)")
    parser.add_argument("--seed", type=whole(0), default=0, metavar="N",
                        help="seed of the prompts' token ids (default: 0)")
    parser.add_argument("--profile", action="store_true",
                        help="after the measured runs one more, which shows how the time of prefill and decode divides "
                             "among operators")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    _add_scenario(parser)
    options.add_random(parser)
    options.add_engine(parser)


def run(args: argparse.Namespace) -> int:
    _check(args)
    if args.scenario:
        print(bench_model.run(args, args.scenario))
        return 0
    case = Case(args.prompt_tokens or _PROMPT, args.new_tokens or _NEW, args.batch or 1)
    llm = open_llm(args, max_batch=case.batch, max_context=case.prompt_tokens + case.new_tokens)
    check_room(llm, case)
    repeat = args.repeat or _REPEAT
    with llm.worker.hold() as engine:
        runs = measure(engine, case, repeat, args.seed)
        profile = _profile(engine, case, args.seed + repeat + 1) if args.profile else None
    result = report(llm, case, runs)
    if args.json:
        print(json.dumps(result | ({"profile": profile.as_dict()} if profile else {})))
    else:
        print("\n\n".join([table(_for_people(result)), *([str(profile)] if profile else [])]))
    return 0


def _profile(engine: Engine, case: Case, seed: int) -> Profile:
    from deltic.engine.operator_profile import profiling

    with profiling(engine.runtime) as profile:
        trial(engine, case, seed)
    return profile


def report(llm: LLM, case: Case, runs: Sequence[Measurement]) -> dict[str, Any]:
    """Medians and runs, with all that is needed to understand them."""
    return {**model_facts(llm), **asdict(case), "repeat": len(runs),
            **{name: _median([getattr(run, name) for run in runs]) for name in _MEASURES},
            "peak_memory_mib": round(peak_memory_mib(), 1), **_floors(llm, case), "runs": [asdict(run) for run in runs],
            **origin_facts(llm)}


def _floors(llm: LLM, case: Case) -> dict[str, Any]:
    from deltic.runner.model_runner import ModelRunner

    return floors(llm.runtime, case) if isinstance(llm.runtime, ModelRunner) else {}


def _add_scenario(parser: argparse.ArgumentParser) -> None:
    lines = "; ".join(f"{name}: {scenario.line}" for name, scenario in SCENARIOS.items())
    group = parser.add_argument_group("scenario")
    group.add_argument("--scenario", choices=tuple(SCENARIOS),
                       help=f"send requests as programs send them, and show what is reused of their prompts. {lines}")
    group.add_argument("--turns", type=whole(1, 10000), metavar="N",
                       help="user messages, steps of an agent, or waves (default: the scenario's own)")
    group.add_argument("--turn-tokens", type=whole(1), metavar="N",
                       help="tokens that each of them brings (default: the scenario's own)")


def _check(args: argparse.Namespace) -> None:
    for name in ("turns", "turn_tokens"):
        if getattr(args, name) and not args.scenario:
            raise UsageError(f"--{name.replace('_', '-')} needs --scenario")
    if args.profile and args.scenario:
        raise UsageError(f"--profile is of plain prompts: leave out --scenario {args.scenario}")
    if args.batch and args.scenario and SCENARIOS[args.scenario].sizes.batch == 1:
        raise UsageError(f"--batch {args.batch}: the requests of {args.scenario} come one after the other; leave it "
                         "out, or take --scenario shared-system")


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(median(known), 4) if known else None


def _for_people(result: dict[str, Any]) -> dict[str, Any]:
    hidden = ("runs", "ops", "machine")
    said = _MEASURES | _FLOORS
    rows = {name: f"{value}  ({said[name]})" if name in said else value
            for name, value in result.items() if name not in hidden}
    return {**rows, "machine": result["machine"], "ops": result["ops"]}
