"""A long conversation's next turn on an NVIDIA GPU, from token ids to the first new token: read whole, resumed from the
card's memory, and from the host's.

    python bench/gpu_reuse.py --model qwen3.5-4b --tokens 100000
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import random
import time
from dataclasses import replace
from statistics import median

import torch
from common import record

from deltic.cache.manager import HybridCache
from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import RandomModel, load
from deltic.params import EngineRequest, SamplingParams

ANSWER = 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3.5-4b")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--new", type=int, default=50)
    parser.add_argument("--budget", type=int, default=8192)
    parser.add_argument("--memory", default="20GiB")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="where the host's time goes")
    args = parser.parse_args()
    runtime = load(RandomModel(args.model), EngineConfig(
        device="cuda", dtype="bfloat16", memory=args.memory, host_memory="14GiB", max_batch=2, speculate="off",
        max_context=args.tokens + 2048, token_budget=args.budget))
    gc.collect()
    gc.freeze()  # as a server does
    for tier in runtime.cache.tiers:
        tier.prepare()
    pinned = list[float]()
    times: dict[str, list[float]] = {"cold": [], "warm": [], "host": []}
    engine, draw, vocabulary = Engine(runtime), random.Random(0), runtime.config.vocab_size
    _first_token(engine, [draw.randrange(vocabulary) for _ in range(args.tokens // 10)])
    for _ in range(args.repeat + 1):  # the first time compiles attention kernels of these lengths
        prompt = [draw.randrange(vocabulary) for _ in range(args.tokens)]
        seconds, answer, _ = _first_token(engine, prompt)
        times["cold"].append(seconds)
        prompt += answer
        for name in ("warm", "host"):
            for tier in runtime.cache.tiers:  # as while somebody reads the answer
                while tier._pending:
                    time.sleep(0.01)
                    tier._settle()
            if name == "host":  # the same pools with nothing in them
                engine = Engine(replace(runtime, cache=HybridCache(runtime.pools, True, runtime.cache.tiers)))
                kept = [tensor for tier in runtime.cache.tiers for item in tier.store._items.values()  # type: ignore[attr-defined]
                        for tensor in item.values()]
                pinned.append(round(sum(each.nbytes for each in kept if each.is_pinned())
                                    / sum(each.nbytes for each in kept), 3))
            fresh = [draw.randrange(vocabulary) for _ in range(args.new)]
            if args.profile:
                profile = cProfile.Profile()
                profile.enable()
            seconds, _, cached = _first_token(engine, prompt + fresh)
            if args.profile:
                profile.disable()
                pstats.Stats(profile).sort_stats("tottime").print_stats(16)
            assert cached >= args.tokens, f"only {cached} tokens were reused"
            times[name].append(seconds)
    sizes = runtime.pools.sizes
    size = args.tokens * sizes.token_bytes + sizes.slot_bytes
    rate = _copy_rate()
    cold, warm, host = (median(times[name][1:]) for name in ("cold", "warm", "host"))
    record("gpu", {"task": "reuse", "model": runtime.name, "tokens": args.tokens, "new": args.new,
                   "cold_ms": round(cold * 1e3, 2), "warm_ms": round(warm * 1e3, 2), "host_ms": round(host * 1e3, 2),
                   "cold_over_warm": round(cold / warm, 1), "bytes": size, "pinned_gb_s": round(rate / 1e9, 1),
                   "pinned": pinned, "host_over_copy": round(host / (size / rate), 2),
                   "runs_ms": {name: [round(value * 1e3, 1) for value in values] for name, values in times.items()}})


def _first_token(engine: Engine, prompt: list[int]) -> tuple[float, list[int], int]:
    """Seconds to the first token, the answer, and the tokens that were reused."""
    request = EngineRequest("r", tuple(prompt), SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True))
    torch.cuda.synchronize()
    began, first, answer, cached = time.perf_counter(), 0.0, list[int](), 0
    engine.add(request)
    while engine.has_work:
        for event in engine.step():
            first = first or time.perf_counter() - began
            answer.append(event.token or 0)
            cached = event.usage.cached_tokens if event.usage else cached
    return first, answer, cached


def _copy_rate() -> float:
    """Bytes a second from pinned memory to the card."""
    here = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(here, device="cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for event in (begin, end):
        there.copy_(here, non_blocking=True)
        event.record()
    torch.cuda.synchronize()
    return float(len(here) / (begin.elapsed_time(end) / 1e3))


if __name__ == "__main__":
    main()
