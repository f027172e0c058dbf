"""deltic alone: how soon it answers, what a step costs beside the model, what it does with the machine's memory.

    python bench/engine.py           # a few minutes
    python bench/engine.py --quick   # does it work at all
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import four_bit_files
from common import ROOT, Answer, Worker, environment, record, spread, work

if TYPE_CHECKING:
    from deltic import LLM
    from deltic.cli.bench import Case
    from deltic.engine.engine import Engine
    from deltic.ops.adapters import Adapter
    from deltic.params import Event

QUESTION = "What is the capital of France?"


def main() -> None:
    args = _arguments()
    if args.worker:
        return work(args.worker, _start)
    for name in args.only or TASKS:
        TASKS[name](args)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, help="default: what deltic chooses for the model")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small sizes: only shows that everything works")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters (task adapters)")
    parser.add_argument("--quant", default="none", help="of their base model: none, q4_k ...")
    parser.add_argument("--model", default="qwen3.5-0.8b", help="their base model's shape")
    parser.add_argument("--device", default="cpu", help="of the base model: cpu, cuda ...")
    parser.add_argument("--only", action="append", choices=TASKS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.repeat = min(args.repeat, 2) if args.quick else args.repeat
    return args


def _start_up(args: argparse.Namespace) -> None:
    """Seconds from the start of `deltic run` to the first text and to its end; the very first start is not counted."""
    _one_start(args.threads)
    times = [_one_start(args.threads) for _ in range(args.repeat)]
    record("engine", {"task": "start", "model": "tiny", "unit": "s", "threads": args.threads, "prompt": QUESTION,
                      "answer": times[-1][2], "first_text": spread([first for first, _, _ in times]),
                      "exit": spread([end for _, end, _ in times])})


def _one_start(threads: int | None) -> tuple[float, float, str]:
    chosen = ["--threads", str(threads)] if threads else []
    command = [sys.executable, "-m", "deltic", "run", QUESTION, "--temperature", "0", *chosen]
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment(),
                          cwd=ROOT) as process:
        assert process.stdout
        text = process.stdout.read(1)
        first = time.perf_counter() - started
        text += process.stdout.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with code {process.returncode}")
    return first, time.perf_counter() - started, text.decode().strip()


def _speed(args: argparse.Namespace) -> None:
    """Tokens per second and step minus forward of the embedded model, for one and for eight requests."""
    worker = Worker(__file__, {"model": None, "threads": args.threads, "max_batch": 8, "max_context": 1024})
    sizes = {"prompt_tokens": 64, "new_tokens": 16 if args.quick else 128}
    for batch in (1, 8):
        task = {**sizes, "batch": batch}
        worker.ask(task)
        runs = [worker.ask(task) for _ in range(args.repeat)]
        rates = {name: spread([run[name] for run in runs]) for name in runs[0] if name != "peak_mib"}
        record("engine", {"task": "speed", "model": "tiny", "dtype": "bfloat16", "threads": worker.ready["threads"],
                          **task, **rates})
    worker.close()


def _step(args: argparse.Namespace) -> None:
    """What a step that decodes costs outside of the kernels: planning, dispatch, bookkeeping. No drafts."""
    for model in (None, "qwen3.5-0.8b"):
        settings = {"model": model, "layers": 4 if args.quick else None, "threads": args.threads, "max_batch": 8,
                    "max_context": 1024, "speculate": "off"}
        worker = Worker(__file__, settings)
        for batch in (1, 8):
            task = {"prompt_tokens": 30, "new_tokens": (16 if model else 500) // (4 if args.quick else 1),
                    "batch": batch, "outside": True}
            worker.ask(task)
            runs = [worker.ask(task) for _ in range(args.repeat)]
            figures = {name: spread([run[name] for run in runs]) for name in runs[0]}
            record("engine", {"task": "step", "model": model or "tiny", "dtype": "bfloat16", "unit": "us",
                              "threads": worker.ready["threads"], **task, **figures})
        worker.close()


def _adapters(args: argparse.Namespace) -> None:
    """Eight rows with an adapter each, of all linear layers, against the base model alone; the two take turns."""
    settings = {"model": args.model, "layers": 4 if args.quick else None, "threads": args.threads, "max_batch": 8,
                "max_context": 1024, "speculate": "off", "rank": args.rank, "quant": args.quant, "device": args.device}
    worker = Worker(__file__, settings)
    new_tokens = 4 if args.quick else 48 if args.device == "cpu" else 256
    task = {"prompt_tokens": 64, "new_tokens": new_tokens, "batch": 8}
    runs: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for adapted in (False, True):
        worker.ask({**task, "adapted": adapted})
    for _ in range(args.repeat):
        for adapted, own in runs.items():
            own.append(worker.ask({**task, "adapted": adapted}))
    for name in ("decode_tokens_per_second", "prefill_tokens_per_second"):
        base, adapters = (spread([run[name] for run in own]) for own in runs.values())
        record("engine", {"task": "adapters", "dtype": "bfloat16", **settings, **worker.ready, **task, "measure": name,
                          "base": base, "adapters": adapters,
                          "slower": round(1 - adapters["median"] / base["median"], 4),
                          "more_time": round(base["median"] / adapters["median"] - 1, 4)})
    worker.close()


def _random_adapters(llm: LLM, rank: int) -> list[Adapter]:
    """Loads eight adapters of all linear layers."""
    import torch
    from safetensors.torch import save_file

    from deltic.loader.names import expected_tensors

    tensors = dict[str, torch.Tensor]()
    for name, shape in expected_tensors(llm.runtime.config).items():
        if name.startswith("model.layers.") and len(shape) == 2:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(rank, shape[1])
            tensors[f"{module}.lora_B.weight"] = torch.randn(shape[0], rank) * 1e-3
    for number in range(8):
        with TemporaryDirectory() as place:
            save_file(tensors, Path(place) / "adapter_model.safetensors")
            Path(place, "adapter_config.json").write_text(f'{{"peft_type": "LORA", "lora_alpha": {rank + number}}}')
            llm.adapters.load(f"adapter-{number}", place)
    return [llm.adapters.find(f"adapter-{number}") for number in range(8)]


def _contexts(args: argparse.Namespace) -> None:
    """Writing down a step of eight sequences that decode, by the length of their contexts; kernels run none."""
    import torch

    from deltic.engine.step_plan import PlannedRow, StepPlan
    from deltic.params import PAGE
    from deltic.runner.input_batch import InputBatch, build

    for context in (1_000, 262_000):
        pages = [list(range(index, context * 8 // PAGE + 16, 8)) for index in range(8)]
        memory, times = InputBatch(), list[float]()
        for step in range(20 if args.quick else 500):
            plan = StepPlan(tuple(PlannedRow((7,), context + step % PAGE, pages[row], row, 1) for row in range(8)))
            began = time.perf_counter()
            build(plan, torch.device("cpu"), memory=memory)
            times.append(1e6 * (time.perf_counter() - began))
        record("engine", {"task": "contexts", "unit": "us", "batch": 8, "context": context,
                          "first_step": round(times[0], 1), "step": round(median(times[1:]), 1)})


def _memory(args: argparse.Namespace) -> None:
    """Peak memory of the 0.8b shape with 2,048 tokens of context, beside the size of its weights."""
    context, new = (256, 4) if args.quick else (2048, 16)
    settings = {"model": "qwen3.5-0.8b", "layers": 4 if args.quick else None, "threads": args.threads, "max_batch": 1,
                "max_context": context}
    worker = Worker(__file__, settings)
    peak = worker.ask({"prompt_tokens": context - new, "new_tokens": new, "batch": 1})["peak_mib"]
    weights = worker.ready["weights_mib"]
    record("engine", {"task": "memory", "unit": "MiB", "dtype": "bfloat16", **settings, **worker.ready,
                      "peak_mib": peak, "peak_over_weights": round(peak / weights, 4)})
    worker.close()


def _four_bits(args: argparse.Namespace) -> None:
    """Decode of one request of the 0.8b shape in 4 bits. The models take turns; `share` is that of q4_k's speed."""
    settings = {"model": "qwen3.5-0.8b", "layers": 4 if args.quick else None, "threads": args.threads, "max_batch": 1,
                "max_context": 512, "speculate": "off"}
    workers = {quant: Worker(__file__, {**settings, "quant": quant}) for quant in ("q4_k", "nvfp4", "int4")}
    task = {"prompt_tokens": 32, "new_tokens": 16 if args.quick else 128, "batch": 1}
    runs: dict[str, list[dict[str, Any]]] = {quant: [] for quant in workers}
    for _ in range(args.repeat + 1):
        for quant, worker in workers.items():
            runs[quant].append(worker.ask(task))
    rates = {quant: [run["decode_tokens_per_second"] for run in own[1:]] for quant, own in runs.items()}
    for quant, worker in workers.items():
        record("engine", {"task": "four_bits", "quant": quant, "unit": "tokens/s", **settings, **task, **worker.ready,
                          "decode": spread(rates[quant]), "peak_mib": runs[quant][-1]["peak_mib"],
                          "share": round(median(rates[quant]) / median(rates["q4_k"]), 4)})
        worker.close()


def _checkpoints(args: argparse.Namespace) -> None:
    """Peak memory of the 0.8b shape in 4-bit files of several tools beyond that of the imports: after the load, after a
    short prompt and after one that fills a step. The pages of the cache that were used do not count."""
    from deltic.config import ModelConfig

    config = ModelConfig.preset("qwen3.5-0.8b", 4 if args.quick else None)
    for kind in ("nvfp4",) if args.quick else four_bit_files.KINDS:
        with TemporaryDirectory() as place:
            size = four_bit_files.write(Path(place), config, kind) / (1 << 20)
            worker = Worker(__file__, {"model": None, "place": place, "threads": args.threads, "max_batch": 1,
                                       "max_context": 1024, "memory": "64MiB", "speculate": "off"})
            peaks = {"loaded": worker.ready["loaded_mib"]}
            for tokens in (8, 512):
                found = worker.ask({"prompt_tokens": tokens, "new_tokens": 8, "batch": 1})
                peaks[f"prompt_{tokens}"] = found["peak_mib"] - found["cache_mib"]
            worker.close()
        figures = {name: round(peak - worker.ready["imported_mib"], 1) for name, peak in peaks.items()}
        record("engine", {"task": "checkpoints", "kind": kind, "unit": "MiB", "layers": config.num_hidden_layers,
                          "file": round(size, 1), **worker.ready, **figures,
                          "over_file": {name: round(peak / size, 4) for name, peak in figures.items()}})


def _cache_mib(llm: LLM) -> float:
    """The pages in memory of the mapping that has keys, values and states."""
    from deltic.cache.tensors import CachePools

    pools, inside = llm.runtime.cache.pools, False
    assert isinstance(pools, CachePools)
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= pools.keys.data_ptr() < int(bounds[2], 16)
        elif inside and line.startswith("Rss:"):
            return int(line.split()[1]) / 1024
    raise AssertionError


def _start(settings: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
    from dataclasses import asdict

    import torch

    from deltic import LLM, RandomModel
    from deltic.cli.bench import Case, trial
    from deltic.cli.inspect import weight_bytes
    from deltic.cli.output import peak_memory_mib
    from deltic.runner.model_runner import ModelRunner

    imported, seeds = peak_memory_mib(), count()
    model = RandomModel(settings["model"], settings["layers"]) if settings["model"] else None
    llm = LLM(settings.get("place", model), dtype="bfloat16", threads=settings["threads"],
              max_batch=settings["max_batch"], max_context=settings["max_context"],
              speculate=settings.get("speculate", "auto"), quant=settings.get("quant", "none"),
              memory=settings.get("memory"), device=settings.get("device", "auto"))
    adapters = _random_adapters(llm, settings["rank"]) if "rank" in settings else []

    def answer(task: dict[str, Any]) -> dict[str, Any]:
        outside, adapted = task.pop("outside", False), task.pop("adapted", False)
        case, own = Case(**task), adapters if adapted else ()
        if outside:
            return llm.worker.call(lambda engine: _outside(engine, case, next(seeds)))
        run = llm.worker.call(lambda engine: trial(engine, case, next(seeds), own))
        return {**asdict(run), "peak_mib": round(peak_memory_mib(), 1),
                **({"cache_mib": round(_cache_mib(llm), 1)} if "place" in settings else {})}
    assert isinstance(llm.runtime, ModelRunner)
    weights = weight_bytes(llm.runtime.config, "bfloat16", settings.get("quant", "none"))
    card = torch.cuda.get_device_name(llm.runtime.device) if llm.runtime.device.type == "cuda" else None
    return {"weights_mib": round(weights / (1 << 20), 1),
            "packed_mib": round(llm.runtime.decoder.weight_bytes() / (1 << 20), 1),
            "gpu": card, "threads": llm.runtime.threads, "imported_mib": round(imported, 1),
            "loaded_mib": round(peak_memory_mib(), 1)}, answer


def _outside(engine: Engine, case: Case, seed: int) -> dict[str, float]:
    """Medians over a trial's steps that only decode, in microseconds: of a step, and of what of it no kernel ran."""
    from deltic.cli.bench import trial
    from deltic.ops.cpu.library import ThreadPool

    steps, inside, call, step = list[tuple[float, float]](), [0.0], ThreadPool.call, engine.step

    def timed_call(pool: ThreadPool, kernel: Callable[..., int], *arguments: object) -> None:
        def timed(*native: object) -> int:
            began = time.perf_counter()
            status = kernel(*native)
            inside[0] += time.perf_counter() - began
            return status
        call(pool, timed, *arguments)

    def timed_step() -> list[Event]:
        began, inside[0] = time.perf_counter(), 0.0
        events = step()
        steps.append((time.perf_counter() - began, inside[0]))
        return events

    with patch.object(ThreadPool, "call", timed_call), patch.object(engine, "step", timed_step):
        trial(engine, case, seed)
    steps = steps[-case.new_tokens // 2:]  # by then all prompts have been read
    whole, outside = median(a for a, _ in steps) * 1e6, median(a - b for a, b in steps) * 1e6
    return {"step": whole, "outside": outside, "share": outside / whole}


TASKS = {"start": _start_up, "speed": _speed, "step": _step, "contexts": _contexts, "memory": _memory,
         "adapters": _adapters, "four_bits": _four_bits, "checkpoints": _checkpoints}

if __name__ == "__main__":
    main()
