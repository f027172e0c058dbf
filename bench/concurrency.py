"""One `LLM` for many callers: tokens per second of 8 threads and of 100 asyncio tasks over those of one thread, and
what the hand-over between the caller's thread and the engine's costs a single caller.

    python bench/concurrency.py            # a quarter of an hour
    python bench/concurrency.py --quick    # does it work at all
    python bench/concurrency.py --model tiny

The embedded model, whose weights stay in a core's cache and which drafts well when it is alone, shows what the calls
cost; random qwen3.5-0.8b what batching gives where weights are streamed. Exit code 1 if an answer differs from that of
one thread.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from common import record, spread

from deltic import LLM, RandomModel, SamplingParams
from deltic.engine.engine import Engine
from deltic.params import EngineRequest

TINY = "tiny"
WORDS = ("river", "lake", "sea", "hill", "cloud", "stone", "tree", "bird", "road", "town")
Answers = list[tuple[int, ...]]


def main() -> None:
    args = _arguments()
    right = [_measure(args, name) for name in args.model or (TINY, "qwen3.5-0.8b")]
    sys.exit(0 if all(right) else 1)


def _measure(args: argparse.Namespace, name: str) -> bool:
    args.words, args.new_tokens = name == TINY, (16 if args.quick or name != TINY else 64)
    model = None if args.words else RandomModel(name, args.layers)
    with LLM(model, threads=args.threads, max_batch=args.max_batch, max_context=2048, memory="2GiB",
             prefix_cache=False) as llm:
        right = _many(llm, args)
        _alone(llm, args)
    return right


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help=f"{TINY}, or a preset with random weights (default: both)")
    parser.add_argument("--layers", type=int, help="of the preset")
    parser.add_argument("--threads", type=int, help="of the kernels; default: what deltic chooses for the model")
    parser.add_argument("--max-batch", type=int, default=16)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small sizes: only shows that everything works")
    args = parser.parse_args()
    if args.quick:
        args.requests, args.repeat, args.layers = 16, 2, 4
    return args


def _many(llm: LLM, args: argparse.Namespace) -> bool:
    """The same requests by one thread, by eight, and by a task each, in turns; whether all answers are the same."""
    requests = [_question(llm, args, number) for number in range(args.requests)]

    def one() -> Answers:
        return [_tokens(ask()) for ask in requests]

    def eight() -> Answers:
        with ThreadPoolExecutor(8) as threads:
            return list(threads.map(lambda ask: _tokens(ask()), requests))

    def tasks() -> Answers:
        async def all_of_them() -> Any:
            return await asyncio.gather(*(_task(llm, args, number) for number in range(args.requests)))
        return [_tokens(output) for output in asyncio.run(all_of_them())]

    ways: dict[str, Callable[[], Answers]] = {"one_thread": one, "8_threads": eight, "tasks": tasks}
    times: dict[str, list[float]] = {name: [] for name in ways}
    expected, wrong = one(), 0
    for turn in range(args.repeat):
        for name, ask in ways.items() if turn % 2 else reversed(ways.items()):
            started = time.perf_counter()
            answers = ask()
            times[name].append(time.perf_counter() - started)
            wrong += sum(found != wanted for found, wanted in zip(answers, expected, strict=True))
    tokens = sum(map(len, expected))
    rates = {name: spread([tokens / seconds for seconds in found]) for name, found in times.items()}
    ratios = {f"{name}_over_one_thread": round(rates[name]["median"] / rates["one_thread"]["median"], 3)
              for name in ("8_threads", "tasks")}
    record("concurrency", {"task": "many", "unit": "tokens/s", **_facts(llm, args), "requests": args.requests,
                           "tokens": tokens, "wrong_answers": wrong, **ratios, **rates})
    return not wrong


def _alone(llm: LLM, args: argparse.Namespace) -> None:
    """Milliseconds per token of one answer: the engine stepped in the caller's thread; through the worker as a whole
    answer; as a stream. Without drafts, so that a token is a step."""
    prompt, sampling = list(range(100, 116)), _sampling(args, 0)

    def by_hand() -> None:
        def steps(engine: Engine) -> None:
            engine.add(EngineRequest("alone", tuple(prompt), sampling, speculate=False))
            while engine.has_work:
                engine.step()
        llm.worker.call(steps)

    def through(call: Callable[[], Any]) -> Callable[[], None]:
        drafter = llm.engine.speculator.drafter

        def run() -> None:
            llm.engine.speculator.drafter = None
            call()
            llm.engine.speculator.drafter = drafter
        return run

    ways = {"by_hand": by_hand, "generate": through(lambda: llm.generate([prompt], sampling)),
            "stream": through(lambda: list(llm.generate_stream(prompt, sampling)))}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(-1, args.repeat * 2):
        for name, run in ways.items() if turn % 2 else reversed(ways.items()):
            started = time.perf_counter()
            run()
            if turn >= 0:
                times[name].append((time.perf_counter() - started) * 1e3 / args.new_tokens)
    found = {name: spread(values) for name, values in times.items()}
    costs = {f"{name}_over_by_hand": round(found[name]["median"] / found["by_hand"]["median"], 4)
             for name in ("generate", "stream")}
    record("concurrency", {"task": "alone", "unit": "ms/token", **_facts(llm, args), **costs, **found})


def _sampling(args: argparse.Namespace, seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=args.new_tokens, ignore_eos=True)


def _question(llm: LLM, args: argparse.Namespace, number: int) -> Callable[[], Any]:
    sampling = _sampling(args, number)
    if args.words:
        return lambda: llm.chat(_text(number), sampling)
    return lambda: llm.generate([_ids(number)], sampling)[0]


async def _task(llm: LLM, args: argparse.Namespace, number: int) -> Any:
    sampling = _sampling(args, number)
    if args.words:
        return await llm.achat(_text(number), sampling)
    return (await llm.agenerate([_ids(number)], sampling))[0]


def _text(number: int) -> str:
    return f"Tell me about the {WORDS[number % 10]} and the {WORDS[number // 10 % 10]}, please."


def _ids(number: int) -> list[int]:
    return [100 + (number * 31 + place * 7) % 900 for place in range(24)]


def _tokens(output: Any) -> tuple[int, ...]:
    tokens: tuple[int, ...] = output.choices[0].tokens
    return tokens


def _facts(llm: LLM, args: argparse.Namespace) -> dict[str, Any]:
    return {"model": llm.runtime.name, "layers": llm.runtime.config.num_hidden_layers, "max_batch": args.max_batch,
            "threads": llm.runtime.threads,
            "new_tokens": args.new_tokens, "repeat": args.repeat}


if __name__ == "__main__":
    main()
