"""Experts beside a GPU: does decoding reach what hits, misses, the host's cores and the way to the card allow?

    python bench/gpu_experts.py --layers 20 --cap 64 --batch 1 8
    python bench/gpu_experts.py --layers 20 --cap 64 --batch 1 8 --expert-compute host
    python bench/gpu_experts.py --layers 20 --cap 64 --batch 1 8 --quant q4_k

Random weights, whose tokens choose nearly evenly. `all_us`: a step with all experts on the card. What the host has
computed and the card has read or exchanged (MB a step) comes from the counters, `host_gb_s` and `copy_gb_s` from what
was measured as the model was loaded: one layer's experts computed for one token at a time, and copied to the card from
pinned memory. With that `allowed_us` is all_us and the longer one of computing and reading, which happen at the same
time; `share`: of that what was reached. `card` has no part for the host: there all that is missing is read,
as it always is of quantized experts.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from common import record
from gpu import _request

from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import RandomModel, load
from deltic.ops.cuda.expert_offload import GpuExpertCache
from deltic.params import TokenEvent
from deltic.runner.expert_offload import ExpertOffload
from deltic.runner.model_runner import ModelRunner

FIRST = 8
"""Steps of a full batch that are not counted: they record graphs."""


def main() -> None:
    args = _arguments()
    model = RandomModel(args.model, layers=args.layers)
    options = EngineConfig(device="cuda", dtype="bfloat16", memory=args.memory, max_batch=max(args.batch),
                           max_context=4096, prefix_cache=False, speculate="off", quant=args.quant)
    whole: dict[int, float] = {}
    if not args.without_all:
        runtime = load(model, options)
        whole = {batch: _steps(runtime, args, batch)["step"] for batch in args.batch}
        del runtime
        torch.cuda.empty_cache()
    for compute in args.expert_compute if args.quant == "none" else ["card"]:
        runtime = load(model, replace(options, expert_cap=args.cap, expert_compute=compute,
                                      expert_refresh=args.refresh))
        assert runtime.experts and isinstance(runtime.experts.store, GpuExpertCache)
        rates = runtime.experts.rates or (0.0, runtime.experts.store.copy_rate())
        for batch in args.batch:
            found = _steps(runtime, args, batch)
            record("gpu_experts", {
                "model": runtime.name, "layers": len(runtime.config.layer_types), "cap": args.cap, "compute": compute,
                "quant": args.quant, "batch": batch, "new": args.new,
                "hosts_share": _hosts_share(runtime.experts.store),
                "host_gb_s": round(rates[0] / 1e9, 1), "copy_gb_s": round(rates[1] / 1e9, 1),
                "hit_rate": round(found["hits"] / max(found["hits"] + found["misses"], 1), 4),
                "host_mb": round(found["computed"] / 1e6, 1), "read_mb": round(found["read"] / 1e6, 1),
                "computing_us": round(found["computing"] * 1e6, 1),
                "step_us": round(found["step"] * 1e6, 1), "tokens_per_second": round(batch / found["step"], 1),
                **(_allowed(found, whole[batch], rates) if whole else {})})
        runtime.experts.close()
        del runtime
        torch.cuda.empty_cache()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3.5-35b-a3b")
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--cap", type=int, default=64, help="experts of a layer on the card")
    parser.add_argument("--quant", choices=("none", "q8_0", "q4_k", "nvfp4", "int4", "fp8"), default="none",
                        help="quantized experts, which the card alone computes")
    parser.add_argument("--expert-compute", nargs="+", choices=("auto", "card", "host"),
                        default=["card", "auto", "host"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--refresh", type=int, default=1, help="as --expert-refresh of deltic serve")
    parser.add_argument("--memory", default="8GiB")
    parser.add_argument("--without-all", action="store_true", help="all experts do not fit on the card: no share")
    return parser.parse_args()


def _hosts_share(store: GpuExpertCache) -> float:
    return round(float(store._hosted.mean()), 3)


def _steps(runtime: ModelRunner, args: argparse.Namespace, batch: int) -> dict[str, float]:
    """Seconds of a step of a full batch, and what its experts cost, each a step."""
    engine, times = Engine(runtime), list[float]()
    for index in range(batch):
        engine.add(_request(index, args.prompt, args.new, runtime.config.vocab_size, 0.0))
    while len(engine.scheduler.running) < batch or any(s.reading for s in engine.scheduler.running):
        _step(engine)
    for _ in range(FIRST):
        _step(engine)
    before = _counted(runtime.experts)
    for _ in range(args.new - FIRST - 16):
        began = time.perf_counter()
        if _step(engine) == batch:
            times.append(time.perf_counter() - began)
    after, steps = _counted(runtime.experts), len(times)
    while engine.has_work:
        engine.step()
    return {"step": median(times), **{name: (after[name] - before[name]) / steps for name in after}}


def _step(engine: Engine) -> int:
    """How many tokens came."""
    events = engine.step()
    failed = [event.error for event in events if isinstance(event, TokenEvent) and event.error]
    if failed or not engine.has_work:
        raise SystemExit(f"requests failed: {failed[0]}" if failed else "answers ended too soon: raise --new")
    return len(events)


def _counted(experts: ExpertOffload | None) -> dict[str, float]:
    if experts is None:
        return {}
    found = experts.statistics()
    return {"hits": sum(found.hits), "misses": sum(found.misses), "read": found.bytes, "computed": found.computed_bytes,
            "computing": found.computing}


def _allowed(found: dict[str, float], whole: float, rates: tuple[float, float]) -> dict[str, Any]:
    host, card = rates
    beside = max(found["computed"] / host if host else 0.0, found["read"] / card)
    return {"all_us": round(whole * 1e6, 1), "allowed_us": round((whole + beside) * 1e6, 1),
            "share": round((whole + beside) / found["step"], 4)}


if __name__ == "__main__":
    main()
