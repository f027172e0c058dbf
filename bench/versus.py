"""This checkout beside another one, in turns: has anything become slower?

    git worktree add ../before REVISION   # and have its own kernels built there: pip install -e, or hatch_build
    python bench/versus.py --other ../before

Each task runs `--pairs` times in both, by the public calls alone; `ratio` is the other's time over this one's: above 1,
this checkout is faster. `--device cuda` compares on a GPU; both sides share the card, in turns.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

TASKS: dict[str, dict[str, Any]] = {
    "tiny decode": {"model": None, "prompt": 64, "new": 1000, "batch": 1},
    "tiny decode, drawn": {"model": None, "prompt": 64, "new": 1000, "batch": 1, "temperature": 0.8, "top_p": 0.9},
    "tiny eight": {"model": None, "prompt": 64, "new": 100, "batch": 8},
    "tiny prompt": {"model": None, "prompt": 4000, "new": 1, "batch": 1},
    "0.8b decode": {"model": "qwen3.5-0.8b", "prompt": 64, "new": 24, "batch": 1},
    "0.8b eight": {"model": "qwen3.5-0.8b", "prompt": 32, "new": 12, "batch": 8},
    "0.8b prompt": {"model": "qwen3.5-0.8b", "prompt": 512, "new": 1, "batch": 1},
}
GPU_TASKS: dict[str, dict[str, Any]] = {
    f"{model} {label}": {"model": f"qwen3.5-{model}", "device": "cuda", "layers": layers, **work}
    for model, layers in (("0.8b", None), ("4b", 12), ("9b", 12))
    for label, work in (("decode, 1 row", {"prompt": 64, "new": 600, "batch": 1}),
                        ("decode, 256 rows", {"prompt": 16, "new": 250, "batch": 256}),
                        ("first token, 8k", {"prompt": 8192, "new": 1, "batch": 1}))
}
"""Two models of twelve layers and 256 rows fit on one card together."""


def worker() -> None:
    """Answers tasks from stdin with seconds. Keeps one model at a time."""
    import torch

    from deltic import SamplingParams

    held: list[Any] | None = None
    model: Any = None
    pipe, draw = os.fdopen(os.dup(1), "w"), random.Random(1)
    os.dup2(2, 1)
    for line in sys.stdin:
        task = json.loads(line)
        wanted = [task.get(name) for name in ("model", "device", "layers", "threads")]
        if held != wanted:
            del model
            gc.collect()
            torch.cuda.empty_cache()
            held, model = wanted, opened(task)
        prompts = [[draw.randrange(2000) for _ in range(task["prompt"])] for _ in range(task["batch"])]
        sampling = SamplingParams(max_tokens=task["new"], ignore_eos=True, temperature=task.get("temperature", 0),
                                  top_p=task.get("top_p"), seed=1)
        began = time.perf_counter()
        model.generate(prompts, sampling)
        print(time.perf_counter() - began, file=pipe, flush=True)


def opened(task: dict[str, Any]) -> Any:
    """Returns the model of a task."""
    from deltic import LLM, RandomModel

    if task.get("device") == "cuda":
        return LLM(RandomModel(task["model"], layers=task["layers"]), device="cuda", memory="25GiB", max_batch=256,
                   max_context=9000, speculate="off", prefix_cache=False)
    return LLM(RandomModel(task["model"]) if task["model"] else None, quant="q8_0" if task["model"] else "none",
               threads=task["threads"], max_batch=8, max_context=8192, memory="512MiB")


class Side:
    """One checkout's process."""

    def __init__(self, root: Path) -> None:
        paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen([sys.executable, str(Path(__file__).resolve()), "--worker"], text=True,
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root,
                                         env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})

    def seconds(self, task: dict[str, Any]) -> float:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, help="the other checkout")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--threads", type=int, help="default: what deltic chooses")
    parser.add_argument("--task", action="append", choices=[*TASKS, *GPU_TASKS])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker()
    from common import record

    sides = (Side(ROOT), Side(args.other.resolve()))
    tasks = TASKS if args.device == "cpu" else GPU_TASKS
    for name in args.task or tasks:
        task = {**tasks[name], "threads": args.threads}
        for side in sides:
            side.seconds(task)
        times: list[tuple[float, float]] = []
        for pair in range(args.pairs):
            first, second = (sides if pair % 2 else sides[::-1])
            found = {id(side): side.seconds(task) for side in (first, second)}
            times.append((found[id(sides[0])], found[id(sides[1])]))
        ratios = sorted(theirs / own for own, theirs in times)
        record("versus", {"task": name, **tasks[name], "threads": args.threads, "pairs": args.pairs, "unit": "s",
                          "median": round(median(own for own, _ in times), 4),
                          "other_median": round(median(theirs for _, theirs in times), 4),
                          "ratio": round(median(ratios), 4),
                          "quartiles": [round(ratios[len(ratios) // 4], 4), round(ratios[len(ratios) * 3 // 4], 4)]})


if __name__ == "__main__":
    main()
