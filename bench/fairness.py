"""Short and long prompts beside each other: who waits for whom, and what it costs.

    python bench/fairness.py                  # all but the stall table, about ten minutes
    python bench/fairness.py --only mix --rate 2 --requests 200
    python bench/fairness.py --stall-table    # what --max-stall-ms costs
    python bench/fairness.py --quick          # does it work at all

It runs on older versions, too: copy it into their bench/.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

from common import record, spread

from deltic import RandomModel, SamplingParams
from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import load
from deltic.params import EngineRequest
from deltic.runner.model_runner import Model

ANSWER, LONG_SHARE = 16, 0.1
STALLS = (None, 1000, 500, 250, 100, 50)


def main() -> None:
    args = _arguments()
    tasks: dict[str, Callable[[argparse.Namespace], None]] = {"mix": _mix, "behind": _behind, "plan": _plan,
                                                             "stall": _stall}
    for name in ["stall"] if args.stall_table else args.only or ["mix", "behind", "plan"]:
        tasks[name](args)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="qwen3.5-0.8b")
    parser.add_argument("--layers", type=int, default=4, help="layers of the preset that are kept (0: all)")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second of the mix")
    parser.add_argument("--requests", type=int, default=150, help="requests of the mix")
    parser.add_argument("--long", type=int, default=4000, help="tokens of the mix's long prompts")
    parser.add_argument("--behind", type=int, default=30_000, help="tokens of the prompt that a short one comes behind")
    parser.add_argument("--waiting", type=int, default=1000, help="requests that wait for one prefix")
    parser.add_argument("--prefix", type=int, default=20_000, help="its tokens")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="small sizes: only shows that everything works")
    parser.add_argument("--only", action="append", choices=("mix", "behind", "plan"))
    parser.add_argument("--stall-table", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.requests, args.rate, args.long, args.behind, args.repeat = 12, 20.0, 600, 2000, 1
        args.waiting, args.prefix = 100, 1000
    return args


def _engine(args: argparse.Namespace, **options: Any) -> Engine:
    return Engine(load(RandomModel(args.preset, layers=args.layers or None), EngineConfig(**{
        "memory": "4GiB", "max_context": 40_000, "threads": args.threads, "speculate": "off", **options})))


def _prompt(draw: random.Random, runtime: Model, count: int) -> tuple[int, ...]:
    return tuple(draw.randrange(runtime.config.vocab_size) for _ in range(count))


def _request(name: str, prompt: tuple[int, ...], count: int = ANSWER) -> EngineRequest:
    return EngineRequest(name, prompt, SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True))


def _facts(args: argparse.Namespace, engine: Engine) -> dict[str, Any]:
    return {"model": engine.runtime.name, "layers": args.layers or None, "dtype": engine.runtime.config.dtype,
            "token_budget": engine.runtime.options.token_budget, "max_batch": engine.scheduler.max_batch,
            "threads": args.threads}


# A mix as a server sees it


@dataclass
class Seen:
    """What one request met, in seconds: gaps between its tokens."""

    arrived: float
    long: bool
    first: float | None = None
    last: float = 0.0
    gaps: list[float] = field(default_factory=list)


def _arrivals(args: argparse.Namespace, runtime: Model) -> Iterator[tuple[float, bool, EngineRequest]]:
    draw, now = random.Random(7), 0.0
    for index in range(args.requests):
        now += draw.expovariate(args.rate)
        long = draw.random() < LONG_SHARE
        yield now, long, _request(f"r{index}", _prompt(draw, runtime, args.long if long else draw.randint(20, 200)))


def _mix(args: argparse.Namespace) -> None:
    """Poisson arrivals, nine of ten short; everything is counted from the time at which a request should come."""
    engine = _engine(args)
    coming = list(_arrivals(args, engine.runtime))[::-1]
    seen, began = dict[str, Seen](), time.perf_counter()
    while coming or engine.has_work:
        now = time.perf_counter() - began
        while coming and coming[-1][0] <= now:
            arrived, long, request = coming.pop()
            seen[request.id] = Seen(arrived, long)
            engine.add(request)
        if not engine.has_work:
            time.sleep(min(coming[-1][0] - now, 0.01))
            continue
        events = engine.step()
        now = time.perf_counter() - began
        for event in events:
            met = seen[event.request]
            if met.first is None:
                met.first = now - met.arrived
            else:
                met.gaps.append(now - met.last)
            met.last = now
    seconds = time.perf_counter() - began
    record("fairness", {
        "task": "mix", **_facts(args, engine), "requests": args.requests, "rate": args.rate,
        "short_tokens": [20, 200], "long_tokens": args.long, "long_share": LONG_SHARE, "new_tokens": ANSWER,
        "unit": "s", "first_token_short": _tail([met.first or 0.0 for met in seen.values() if not met.long]),
        "first_token_long": _tail([met.first or 0.0 for met in seen.values() if met.long]),
        "gap": _tail([gap for met in seen.values() for gap in met.gaps]),
        "prompt_tokens_per_second": round(engine.stats.prompt_tokens / seconds, 1),
        "answers_per_second": round(len(seen) / seconds, 3)})


def _tail(values: list[float]) -> dict[str, float | int]:
    """Median, 99th percentile and worst."""
    if not values:
        return {"count": 0}
    worst = quantiles(values, n=100, method="inclusive")[-1] if len(values) > 1 else values[0]
    return {"count": len(values), "median": round(median(values), 4), "p99": round(worst, 4),
            "max": round(max(values), 4)}


# A short prompt behind a long one


def _behind(args: argparse.Namespace) -> None:
    """The long prompt alone and with a short one that comes in its tenth step, in turn."""
    engine, draw = _engine(args), random.Random(8)
    alone, beside, first_steps, first_seconds = list[float](), list[float](), list[int](), list[float]()
    for _ in range(args.repeat):
        alone.append(_long_seconds(engine, args, draw)[0])
        seconds, steps, first = _long_seconds(engine, args, draw, short=True)
        beside.append(seconds)
        first_steps.append(steps)
        first_seconds.append(first)
    record("fairness", {
        "task": "behind", **_facts(args, engine), "long_tokens": args.behind, "short_tokens": 20, "unit": "s",
        "first_token_steps": max(first_steps), "first_token_seconds": spread(first_seconds),
        "long_alone": spread(alone), "long_beside": spread(beside),
        "slowdown": round(median([b / a for a, b in zip(alone, beside, strict=True)]), 4)})


def _long_seconds(engine: Engine, args: argparse.Namespace, draw: random.Random,
                  short: bool = False) -> tuple[float, int, float]:
    """Seconds to the long prompt's first token; steps and seconds to the short one's."""
    engine.add(_request("long", _prompt(draw, engine.runtime, args.behind), 1))
    began, step, came, steps, first, long = time.perf_counter(), 0, 0.0, 0, 0.0, 0.0
    while engine.has_work:
        if short and step == min(10, args.behind // 1024):
            engine.add(_request("short", _prompt(draw, engine.runtime, 20)))
            came = time.perf_counter()
        step += 1
        steps += came > 0 and not first
        for event in engine.step():
            now = time.perf_counter()
            if event.request == "short":
                first = first or now - came
            else:
                long = now - began
    return long, steps, first


# Planning


def _plan(args: argparse.Namespace) -> None:
    """Milliseconds that planning a step takes while many wait for one prefix."""
    engine, draw = _engine(args), random.Random(9)
    prefix, times, plan = _prompt(draw, engine.runtime, args.prefix), list[float](), engine.scheduler.schedule
    began = time.perf_counter()
    for index in range(args.waiting):
        engine.add(_request(f"r{index}", (*prefix, *_prompt(draw, engine.runtime, 8)), 4))
    added = time.perf_counter() - began

    def timed() -> Any:
        began = time.perf_counter()
        planned = plan()
        times.append((time.perf_counter() - began) * 1e3)
        return planned

    setattr(engine.scheduler, "plan", timed)  # noqa: B010
    while engine.stats.prompt_tokens < args.prefix - engine.runtime.options.token_budget:
        engine.step()
    waiting, times = times[:], []
    timed_steps = min(args.waiting, 100)
    for _ in range(timed_steps):
        engine.step()
    record("fairness", {
        "task": "plan", **_facts(args, engine), "waiting": args.waiting, "prefix_tokens": args.prefix, "unit": "ms",
        "add": round(added * 1e3 / args.waiting, 4), "while_it_is_read": _tail(waiting),
        "while_they_are_answered": _tail(times), "answered_meanwhile": engine.stats.finished})


# What --max-stall-ms costs


def _stall(args: argparse.Namespace) -> None:
    """Four answers and a long prompt, for several limits: the time between the answers' tokens, and the prompt's."""
    for limit in STALLS:
        engine, draw = _engine(args, max_stall_ms=limit), random.Random(10)
        for index in range(4):
            engine.add(_request(f"r{index}", _prompt(draw, engine.runtime, 30), 30_000))
        for _ in range(20):
            engine.step()
        engine.add(_request("long", _prompt(draw, engine.runtime, args.long), 1))
        gaps, began, over = list[float](), time.perf_counter(), False
        while not over:
            before = time.perf_counter()
            over = any(event.request == "long" for event in engine.step())
            gaps.append(time.perf_counter() - before)
        seconds = time.perf_counter() - began
        record("fairness", {
            "task": "stall", **_facts(args, engine), "max_stall_ms": limit, "answers": 4, "long_tokens": args.long,
            "unit": "s", "step": _tail(gaps), "long_first_token": round(seconds, 4),
            "prompt_tokens_per_second": round(args.long / seconds, 1)})


if __name__ == "__main__":
    main()
