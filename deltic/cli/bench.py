"""`deltic bench`: how fast this machine reads and writes tokens, with random token ids for a prompt."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any

from deltic import __version__
from deltic.cli import options
from deltic.cli.machine import commit, machine_facts, peak_memory_mib
from deltic.cli.measure import Case, Run, measure
from deltic.cli.models import open_llm
from deltic.cli.parser import UsageError, whole
from deltic.cli.table import table

if TYPE_CHECKING:
    from deltic.engine.llm import LLM

HELP = "Measure reading (prefill) and writing (decode) of tokens. Prompts are random token ids."

_MEASURES = {"prefill_tokens_per_second": "prompt tokens over the time until every sequence has its first token",
             "decode_tokens_per_second": "tokens per second while all sequences write, summed over the batch",
             "time_to_first_token_ms": "median over the batch",
             "overhead_ms": "a decode step without the model's forward pass"}


def add(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    parser.add_argument("--prompt-tokens", type=whole(1), default=512, metavar="N",
                        help="tokens of each prompt (default: 512)")
    parser.add_argument("--new-tokens", type=whole(1), default=64, metavar="N",
                        help="tokens of each answer (default: 64)")
    parser.add_argument("--batch", type=whole(1, 4096), default=1, metavar="N",
                        help="sequences that run together (default: 1)")
    parser.add_argument("--repeat", type=whole(1, 1000), default=3, metavar="N",
                        help="measured runs, after one to warm up (default: 3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options.add_random(parser)
    options.add_engine(parser)


def run(args: argparse.Namespace) -> int:
    case = Case(args.prompt_tokens, args.new_tokens, args.batch)
    llm = open_llm(args, max_batch=case.batch, max_context=case.prompt_tokens + case.new_tokens)
    _check_room(llm, case)
    result = report(llm, case, measure(llm.engine, case, args.repeat))
    print(json.dumps(result) if args.json else table(_for_people(result)))
    return 0


def report(llm: LLM, case: Case, runs: Sequence[Run]) -> dict[str, Any]:
    """Medians and runs, with all that is needed to understand them."""
    from deltic.ops import explain

    runtime = llm.runtime
    return {"model": runtime.name, "layers": runtime.config.num_hidden_layers, "dtype": dtype_of(llm),
            "device": runtime.options.device, **asdict(case), "repeat": len(runs),
            **{name: _median([getattr(run, name) for run in runs]) for name in _MEASURES},
            "peak_memory_mib": round(peak_memory_mib(), 1), "runs": [asdict(run) for run in runs],
            "machine": machine_facts(), "version": __version__, "commit": commit(), "ops": explain(runtime.decoder.ops)}


def dtype_of(llm: LLM) -> str:
    wanted = llm.runtime.options.dtype
    return llm.runtime.config.dtype if wanted == "auto" else wanted


def _check_room(llm: LLM, case: Case) -> None:
    tokens, memory = case.prompt_tokens + case.new_tokens, llm.runtime.memory
    if tokens > memory.max_context:
        raise UsageError(f"--prompt-tokens and --new-tokens are {tokens} together and the context holds "
                         f"{memory.max_context}: ask for fewer, or raise --max-context or --memory")
    if case.batch > memory.max_batch:
        raise UsageError(f"--batch {case.batch} is more than the {memory.max_batch} sequences that can run at the same "
                         "time: ask for fewer, or raise --max-batch or --memory")


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(median(known), 4) if known else None


def _for_people(result: dict[str, Any]) -> dict[str, Any]:
    hidden = ("runs", "ops", "machine")
    rows = {name: f"{value}  ({_MEASURES[name]})" if name in _MEASURES else value
            for name, value in result.items() if name not in hidden}
    return {**rows, "machine": result["machine"], "ops": result["ops"]}
