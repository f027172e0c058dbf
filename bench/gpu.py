"""deltic on an NVIDIA GPU: decoding and reading prompts through the engine, with random weights of true shapes.

    python bench/gpu.py decode --model qwen3.5-0.8b --batch 1 32 256
    python bench/gpu.py decode --no-graphs --ops torch     # the same without graphs, without kernels
    python bench/gpu.py prefill --tokens 2048 8192
    python bench/gpu.py speculate --batch 1     # against the same weights without drafts, in turns
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from bounds import prompt_operations, step_bytes
from common import record
from speculation import DEPTH, Forced, plain_runtime, serve

from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import RandomModel, load
from deltic.ops.cuda.card import card_of
from deltic.ops.cuda.tensor_parallel import ShardedStep
from deltic.params import EngineRequest, SamplingParams, TokenEvent
from deltic.runner.cuda_graphs import CudaGraphs
from deltic.runner.model_runner import ModelRunner
from deltic.spec_decode.controller import drafter_of
from deltic.spec_decode.draft_length import AdaptiveDraftLength, DraftLength, FixedDraftLength
from deltic.spec_decode.proposers import MtpProposer

BANDWIDTH = 4.4e12
"""Bytes a second that a kernel which only reads reaches on an H200."""
ARITHMETIC = 790e12
"""Operations a second that cuBLAS reaches there on large products."""


def main() -> None:
    args = _arguments()
    for model in args.model:
        config = EngineConfig(device="cuda", dtype="bfloat16", memory=args.memory, max_batch=max(*args.batch, 1),
                              max_context=args.context, token_budget=args.budget, prefix_cache=False,
                              ops=tuple(args.ops), quant=args.quant, kv_dtype=args.kv_dtype,
                              state_dtype=args.state_dtype, batch_invariant=args.batch_invariant, tp=args.tp,
                              speculate=f"mtp:{DEPTH}" if args.task == "speculate" else "off")
        started = time.perf_counter()
        runtime = load(RandomModel(model, head=args.task == "speculate"), config)
        if args.no_graphs:
            object.__setattr__(runtime, "graphs", None)
        torch.cuda.synchronize()
        ready = round(time.perf_counter() - started, 1)
        for batch in args.batch if args.task == "decode" else ():
            _decode(runtime, args, batch, ready)
        for tokens in args.tokens if args.task == "prefill" else ():
            _prefill(runtime, args, tokens)
        for batch in args.batch if args.task == "speculate" else ():
            _speculate(runtime, args, batch)
        del runtime
        torch.cuda.empty_cache()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("decode", "prefill", "speculate"))
    parser.add_argument("--model", nargs="+", default=["qwen3.5-0.8b"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1])
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 8192])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--budget", type=int, default=16384)
    parser.add_argument("--memory", default="40GiB")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--share", type=float, default=0.8, help="of the drafts that are made right")
    parser.add_argument("--adaptive", action="store_true", help="decide by itself how many to make")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--ops", nargs="*", default=[])
    parser.add_argument("--quant", default="none", help="as of deltic serve")
    parser.add_argument("--kv-dtype", default="auto", help="as of deltic serve")
    parser.add_argument("--state-dtype", default="float32", help="as of deltic serve")
    parser.add_argument("--batch-invariant", action="store_true", help="as of deltic serve")
    parser.add_argument("--tp", type=int, default=1, help="as of deltic serve; the floor is that of so many GPUs")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--kernels", action="store_true", help="the time of each kernel of a replayed step")
    parser.add_argument("--profile", action="store_true", help="where the host's time goes")
    return parser.parse_args()


def _request(index: int, prompt: int, new: int, vocabulary: int, temperature: float) -> EngineRequest:
    tokens = torch.randint(0, vocabulary, (prompt,), generator=torch.Generator().manual_seed(index)).tolist()
    return EngineRequest(str(index), tuple(tokens), SamplingParams(temperature=temperature, max_tokens=new, seed=index,
                                                             ignore_eos=True))


def _decode(runtime: ModelRunner, args: argparse.Namespace, batch: int, ready: float) -> None:
    """Steps of a full batch, after the first ones, which record graphs."""
    if batch > runtime.memory.max_batch:
        raise SystemExit(f"the cache holds {runtime.memory.max_batch} sequences, not {batch}: raise --memory")
    engine, times, forwards = Engine(runtime), [], []
    profile = cProfile.Profile() if args.profile else None
    for run in range(args.repeat):
        for index in range(batch):
            engine.add(_request(index, args.prompt, args.new, runtime.config.vocab_size, args.temperature))
        while len(engine.scheduler.running) < batch or any(s.reading for s in engine.scheduler.running):
            failed = [event.error for event in engine.step() if isinstance(event, TokenEvent) and event.error]
            if failed or not engine.has_work:
                raise SystemExit(f"{len(failed)} requests failed: {failed[0]}" if failed else
                                 "the first requests ended before the last ones began: raise --new or --budget")
        engine.step()
        for turn in range(args.new - 4):
            began = time.perf_counter()
            if profile and run:
                profile.enable()
            events = engine.step()
            if profile and run:
                profile.disable()
            if turn >= 4 and len(events) == batch and run:
                times.append(time.perf_counter() - began)
                forwards.append(engine.stats.last_overhead)
        while engine.has_work:
            engine.step()
    if profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(22)
    if not times:
        raise SystemExit("no steps were timed: raise --new above 8 and --repeat above 1")
    step = median(times)
    floor = step_bytes(runtime, batch, args.prompt + args.new // 2) / BANDWIDTH / args.tp
    record("gpu", {"task": "decode", "model": runtime.name, **_card(), "tp": args.tp, "served": _served(runtime),
                   "batch": batch, "quant": args.quant, "kv_dtype": args.kv_dtype, "state_dtype": args.state_dtype,
                   "batch_invariant": args.batch_invariant, "prompt": args.prompt, "new": args.new,
                   "temperature": args.temperature, "graphs": runtime.graphs is not None, "ops": args.ops,
                   "step_us": round(step * 1e6, 1),
                   "tokens_per_second": round(batch / step, 1),
                   "host_us": round(median(forwards) * 1e6, 1), "floor_us": round(floor * 1e6, 1),
                   "over_floor": round(step / floor, 2), "ready_s": ready,
                   "reserved_mib": torch.cuda.memory_reserved() >> 20, "replay_us": _replays(runtime, batch)})
    if args.kernels:
        _kernels(runtime, batch)


def _card() -> dict[str, str]:
    """kernels_for: another card than the GPU if DELTIC_CARD restricts the kernels."""
    return {"gpu": torch.cuda.get_device_name(), "kernels_for": card_of(torch.device("cuda")).name}


def _served(runtime: ModelRunner) -> str:
    return "torch" if runtime.step is None else "cuda"


def _replays(runtime: ModelRunner, batch: int) -> float | None:
    """Microseconds of the step's graph alone, or of those of all devices, replayed again and again."""
    replay = _replay_of(runtime, batch)
    return None if replay is None else _time(replay)


def _replay_of(runtime: ModelRunner, batch: int) -> Callable[[], None] | None:
    """Replays the graphs of a step on all devices; None if there are none."""
    captured = runtime.graphs and _captured(runtime, batch)
    if not captured:
        return None
    if not isinstance(runtime.step, ShardedStep):
        alone: Callable[[], None] = captured.graph.replay
        return alone
    devices = runtime.step.devices

    def replay() -> None:
        for device, graph in zip(devices, captured.graphs, strict=True):
            with torch.cuda.device(device):
                graph.replay()

    return replay


def _time(replay: Callable[[], None]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replay()
    begin.record()
    for _ in range(50):
        replay()
    end.record()
    torch.cuda.synchronize()
    return float(round(begin.elapsed_time(end) * 20, 1))


def _captured(runtime: ModelRunner, batch: int) -> Any:
    assert runtime.graphs
    return next((found
                 for (rows, _, tokens), found in reversed(runtime.graphs._captured.items())
                 if rows >= batch and tokens in (None, rows)), None)


def _kernels(runtime: ModelRunner, batch: int) -> None:
    """Microseconds of each kernel of the first device in a replayed step: all together, how many, one. What waits for
    the kernel before it, or for another device, counts its waiting."""
    replay = _replay_of(runtime, batch)
    assert replay
    _profile(replay)


def _profile(replay: Callable[[], None]) -> None:
    from torch.profiler import ProfilerActivity, profile

    found = defaultdict[str, list[float]](list)
    replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        replay()
        torch.cuda.synchronize()
    for event in profiler.events() or ():
        if event.device_time and event.device_index == 0:
            found[event.name].append(event.device_time)
    for name, times in sorted(found.items(), key=lambda item: -sum(item[1])):
        print(f"  {sum(times):9.1f} {len(times):5} {median(times):8.2f}  {name[:90]}", flush=True)


def _prefill(runtime: ModelRunner, args: argparse.Namespace, tokens: int) -> None:
    """Milliseconds from a request to its first token."""
    times = []
    for run in range(args.repeat + 1):
        engine = Engine(runtime)
        engine.add(_request(run, tokens, 1, runtime.config.vocab_size, 0.0))
        torch.cuda.synchronize()
        began = time.perf_counter()
        while engine.has_work:
            engine.step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    floor = prompt_operations(runtime.config, tokens) / ARITHMETIC / args.tp
    record("gpu", {"task": "prefill", "model": runtime.name, **_card(), "tp": args.tp, "tokens": tokens,
                   "budget": args.budget, "ops": args.ops, "quant": args.quant, "kv_dtype": args.kv_dtype,
                   "state_dtype": args.state_dtype,
                   "first_token_ms": round(median(times[1:]) * 1e3, 2), "floor_ms": round(floor * 1e3, 2),
                   "over_floor": round(median(times[1:]) / floor, 2), "served": _served(runtime)})


def _speculate(runtime: ModelRunner, args: argparse.Namespace, batch: int) -> None:
    """The same requests with drafts, of which a share is made right, and without, in turns."""
    plain, head = plain_runtime(runtime), drafter_of(runtime)
    assert isinstance(head, MtpProposer) and plain.mtp_runner is None
    requests = [_request(index, args.prompt, args.new, runtime.config.vocab_size, args.temperature)
                for index in range(batch)]
    without = Engine(plain)
    answers = serve(without, requests).answers
    depth: DraftLength = AdaptiveDraftLength(DEPTH) if args.adaptive else FixedDraftLength(DEPTH)
    drafting = Engine(runtime, Forced(head, args.share, {**answers}), depth)
    runs, same, steps = defaultdict[str, list[float]](list), 0, 0
    for run in range(args.repeat + 1):
        for name, engine in (("off", without), ("on", drafting)):
            found = serve(engine, requests)
            if run:
                runs[name].append(found.seconds)
            if name == "on" and run:
                same, steps = sum(found.answers[key] == answers[key] for key in answers), steps + found.steps
    # each run has luck of its own with its drafts, so that all of them count
    tokens, off, on = args.repeat * batch * (args.new - 1), sum(runs["off"]), sum(runs["on"])
    record("gpu", {"task": "speculate", "model": runtime.name, **_card(), "batch": batch,
                   "prompt": args.prompt, "new": args.new, "temperature": args.temperature, "acceptance": args.share,
                   "depth": "auto" if args.adaptive else DEPTH, "same_answers": same,
                   "tokens_per_step": round(tokens / steps / batch, 3), "off_us": round(off / tokens * batch * 1e6, 1),
                   "step_us": round(on / steps * 1e6, 1),
                   "tokens_per_second": round(tokens / on, 1), "off_tokens_per_second": round(tokens / off, 1),
                   "gain": round(off / on, 3), "replays_us": _all_replays(runtime)})
    if args.kernels and isinstance(runtime.graphs, CudaGraphs):
        for bucket, captured in runtime.graphs._captured.items():
            if bucket[2] == 4 * batch:
                _profile(captured.graph.replay)


def _all_replays(runtime: ModelRunner) -> dict[str, float]:
    """Microseconds of every graph of steps and drafts, replayed again and again."""
    assert isinstance(runtime.graphs, CudaGraphs) and runtime.mtp_runner and runtime.mtp_runner._step
    head: Any = runtime.mtp_runner._step.record
    known = {f"step {bucket}": found.graph for bucket, found in runtime.graphs._captured.items()}
    known |= {f"drafts {bucket}": found.graphs[0] for bucket, found in head.__self__._known.items()}
    return {name: _time(graph.replay) for name, graph in known.items()}


if __name__ == "__main__":
    main()
