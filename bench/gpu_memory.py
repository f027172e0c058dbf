"""deltic restricted to a part of a GPU's memory: turns of random length up to the whole context, and the peak of what
the process takes on the card, with random weights of true shapes or a file. Then one sequence alone: its first token
and its speed, which depend on how many layers lie in host memory.

    python bench/gpu_memory.py --model qwen3.5-27b --quant q4_k --gpu-memory 24GiB --context 65536 --kv-dtype fp8
    python bench/gpu_memory.py --model qwen3.5-27b --quant q4_k --gpu-memory 16GiB --context 65536 --turns 40
    python bench/gpu_memory.py --file 27b-Q4_K_M.gguf --picture --gpu-memory 24GiB --context 65536 --kv-dtype fp8
"""

from __future__ import annotations

import argparse
import base64
import io
import random
import time
from collections.abc import Iterator

import torch
from common import record

from deltic.config import EngineConfig, parse_bytes
from deltic.engine.engine import Engine
from deltic.engine.loading import RandomModel, load
from deltic.llm import LLM
from deltic.params import EngineRequest, SamplingParams, TokenEvent
from deltic.runner.model_runner import ModelRunner

AT_ONCE = 4
"""Conversations that are alive at the same time."""
ALONE = 2000
"""Tokens of the prompt of the sequence that runs alone."""


def main() -> None:
    args = _arguments()
    free, _ = torch.cuda.mem_get_info()
    config = EngineConfig(device="cuda", gpu_memory=args.gpu_memory, max_context=args.context, quant=args.quant,
                          kv_dtype=args.kv_dtype, expert_compute=args.expert_compute, tp=1)
    runtime = load(args.file or RandomModel(args.model, head=True), config)
    loaded = torch.cuda.memory_allocated()
    runtime.warm_up()
    warm = torch.cuda.memory_allocated()
    engine, failed, began = Engine(runtime), list[str](), time.perf_counter()
    peak = tokens = turns = steps = 0
    for request in _turns(args.turns, runtime.memory.max_context, runtime.config.vocab_size):
        if time.perf_counter() - began > args.seconds:
            break
        engine.add(request)
        turns += 1
        if turns % 25 == 0:
            stats, torch_stats = engine.stats, torch.cuda.memory_stats()
            print(f"{turns} turns, {time.perf_counter() - began:.0f} s, {len(failed)} failed, "
                  f"{peak >> 20} MiB, torch {torch.cuda.memory_allocated() >> 20}, {steps} steps, "
                  f"{stats.prompt_tokens} prompt tokens computed, {tokens} generated, "
                  f"{torch_stats.get('num_device_alloc')} blocks taken, {torch_stats.get('num_alloc_retries')} "
                  "retries", flush=True)
        while len(engine.scheduler.running) + len(engine.scheduler.waiting) >= AT_ONCE:
            tokens += _step(engine, failed)
            steps += 1
            peak = max(peak, free - torch.cuda.mem_get_info()[0])
    while engine.has_work:
        tokens += _step(engine, failed)
    engine.check()
    limit, seconds = parse_bytes(args.gpu_memory), time.perf_counter() - began
    record("gpu_memory", {
        "model": runtime.name, "quant": args.quant, "kv_dtype": args.kv_dtype, "turns": turns, "failed": failed,
        "plan": [*runtime.memory.notes, *runtime.memory.warnings], "limit_mib": limit >> 20, "peak_mib": peak >> 20,
        "fits": peak <= limit, "reserved_mib": torch.cuda.max_memory_reserved() >> 20,
        "allocated_mib": torch.cuda.max_memory_allocated() >> 20, "loaded_mib": loaded >> 20, "warm_mib": warm >> 20,
        "token_budget": engine.scheduler.token_budget, "generated": tokens,
        "preemptions": engine.scheduler.preemptions, "seconds": round(seconds, 1), **_layers(runtime),
        **_alone(engine, failed)})
    engine.close()
    if args.picture:
        del engine, runtime
        torch.cuda.empty_cache()
        _picture(args, free, limit)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3.5-27b")
    parser.add_argument("--file", help="a model instead of random weights")
    parser.add_argument("--picture", action="store_true", help="read one, too; only with --file")
    parser.add_argument("--quant", default="none", help="as of deltic serve")
    parser.add_argument("--kv-dtype", default="auto", help="as of deltic serve")
    parser.add_argument("--expert-compute", default="auto", help="as of deltic serve")
    parser.add_argument("--gpu-memory", default="24GiB")
    parser.add_argument("--context", type=int, default=65536)
    parser.add_argument("--turns", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=3600.0, help="add no turns after that")
    return parser.parse_args()


def _turns(count: int, context: int, vocabulary: int) -> Iterator[EngineRequest]:
    """Next turns of AT_ONCE conversations, which begin anew when they are as long as the context. The first one is."""
    chance = random.Random(1)
    texts = [list[int]() for _ in range(AT_ONCE)]
    for turn in range(count):
        new, text = chance.choice((8, 32, 100)), texts[turn % AT_ONCE]
        more = context - new - 1 if turn == 0 else int(chance.triangular(16, context // 32, 64))
        if len(text) + more + new >= context:
            text.clear()
        text += chance.choices(range(vocabulary), k=more)
        yield EngineRequest(str(turn), tuple(text), SamplingParams(temperature=1.0, seed=turn, max_tokens=new,
                                                                 ignore_eos=True))


def _layers(runtime: ModelRunner) -> dict[str, int]:
    """What lies in host memory, and how many of it the host computes."""
    if runtime.layers is None:
        return {}
    store = runtime.layers.store
    return {"layers_in_host_memory": len(store.layers), "host_mib": store.nbytes >> 20,
            "host_computes": len(store.hosted)}


def _alone(engine: Engine, failed: list[str]) -> dict[str, float]:
    """The first token and the speed of one sequence."""
    prompt = random.Random(2).choices(range(engine.runtime.config.vocab_size), k=ALONE)
    engine.add(EngineRequest("alone", tuple(prompt), SamplingParams(temperature=0.0, max_tokens=65, ignore_eos=True)))
    began, first, tokens = time.perf_counter(), 0.0, 0
    while engine.has_work:
        tokens += _step(engine, failed)
        if tokens and not first:
            first = time.perf_counter() - began
    seconds = time.perf_counter() - began - first
    return {f"first_token_of_{ALONE}_ms": round(1000 * first, 1), "tokens_per_second": round((tokens - 1) / seconds, 1)}


def _step(engine: Engine, failed: list[str]) -> int:
    events = [event for event in engine.step() if isinstance(event, TokenEvent)]
    failed += [event.error for event in events if event.error]
    return sum(event.token is not None for event in events)


def _picture(args: argparse.Namespace, free: int, limit: int) -> None:
    from PIL import Image

    shown = io.BytesIO()
    Image.effect_mandelbrot((1920, 1080), (-2, -1.5, 1, 1.5), 100).save(shown, "PNG")
    with LLM(args.file, gpu_memory=args.gpu_memory, max_context=args.context, kv_dtype=args.kv_dtype, tp=1) as llm:
        url = f"data:image/png;base64,{base64.b64encode(shown.getvalue()).decode()}"
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
        answer = llm.chat([{"role": "user", "content": content}], SamplingParams(max_tokens=64))
        peak = free - torch.cuda.mem_get_info()[0]
        record("gpu_memory", {"model": args.file, "picture": answer.text[:80], "limit_mib": limit >> 20,
                              "peak_mib": peak >> 20, "fits": peak <= limit})


if __name__ == "__main__":
    main()
