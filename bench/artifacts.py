"""Speed and size of ExecuTorch programs beside the memory's speed and the native engine.

    python bench/artifacts.py --preset qwen3.5-0.8b                 # exports into a temporary directory: some minutes
    python bench/artifacts.py --programs fp32 fp32-deltic           # over either set of operators
    python bench/artifacts.py --preset qwen3.5-0.8b --layers 4 --folder /tmp/programs     # kept for the next time

Random weights of a true shape. The kinds take turns, token by token, so that what else the machine does is shared.
Decode is told as a share of what reading the weights alone would take: all products once, of the embeddings one row.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import record

from deltic import RandomModel, Session
from deltic.config import EngineConfig, GenerationDefaults, ModelConfig
from deltic.export.executorch.export import CHUNK, ExportForm, export
from deltic.export.executorch.runtime import sidecar_of
from deltic.export.program import generation_config, hf_config, open_program, write_json
from deltic.loader.dummy import random_weights

PROMPT, CONTEXT = 64, 512
_PLAIN, _QUANTIZED = ExportForm("fp32", CONTEXT, CHUNK), ExportForm("8da4w", CONTEXT, CHUNK)
PROGRAMS = {"fp32": _PLAIN, "8da4w": _QUANTIZED, "fp32-deltic": replace(_PLAIN, operators="deltic"),
            "8da4w-deltic": replace(_QUANTIZED, operators="deltic")}
"""By name: what is multiplied how, and whose operators compute the rest."""


def main() -> int:
    args = parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(args.folder or temporary)
        shape = replace(ModelConfig.preset(args.preset, args.layers), num_mtp_layers=0)
        paths = {name: made(folder, args.preset, shape, name) for name in args.programs}
        found = measure(paths, RandomModel(shape=shape), args)
    for line in found:
        record("artifacts", line) if args.record else print(json.dumps(line))
    return 0


def made(folder: Path, preset: str, shape: ModelConfig, name: str) -> Path:
    """The program of this shape, exported unless it is there."""
    path = folder / f"{preset}-{shape.num_hidden_layers}-{name}.pte"
    if path.exists():
        return path
    began = time.perf_counter()
    weights = random_weights(shape, "float32")
    export(shape, GenerationDefaults(), weights, path, PROGRAMS[name])
    sidecar = sidecar_of(path)
    sidecar.mkdir(exist_ok=True)
    write_json(sidecar / "config.json", hf_config(shape))
    write_json(sidecar / "generation_config.json", generation_config(GenerationDefaults()))
    print(f"{path.name}: exported in {time.perf_counter() - began:.0f} s", file=sys.stderr)
    return path


def measure(paths: dict[str, Path], model: RandomModel, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One line for each program and for the engine."""
    options = EngineConfig(threads=args.threads)
    steps: dict[str, Callable[[list[int]], Any]] = {}
    starts: dict[str, Callable[[], Any]] = {}
    for name, path in paths.items():
        program = open_program(path, options)
        steps[name], starts[name] = partial(program.feed, 0), partial(program.start, 0)
    session = Session(model, "float32", threads=args.threads, max_context=CONTEXT)
    clean = session.snapshot()
    steps["engine fp32"], starts["engine fp32"] = session.prefill, partial(session.restore, clean)
    prefill, decode = {name: list[float]() for name in steps}, {name: list[float]() for name in steps}
    for _ in range(args.runs):
        for name, step in steps.items():
            starts[name]()
            prefill[name].append(seconds(partial(step, [*range(1, PROMPT + 1)])))
        for _ in range(args.tokens):
            for name, step in steps.items():
                decode[name].append(seconds(partial(step, [7])))
    speed = read_bandwidth(args.threads)
    table = 4 * model.shape.vocab_size * model.shape.hidden_size if model.shape else 0
    lines = []
    for name in steps:
        line: dict[str, Any] = {
            "preset": args.preset, "layers": args.layers, "kind": name, "threads": args.threads,
            "decode_ms": round(1e3 * median(decode[name]), 2), "read_gb_s": round(speed / 1e9, 1),
            "prefill_tokens_s": round(PROMPT / median(prefill[name]), 1)}
        if name in paths:
            size = paths[name].stat().st_size
            read = size - (table if PROGRAMS[name].kind == "fp32" else table // 4)
            line |= {"bytes": size, "bytes_read_per_token": read,
                     "share_of_bandwidth": round(read / speed / median(decode[name]), 3)}
        lines.append(line)
    return lines


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def read_bandwidth(threads: int) -> float:
    """Bytes a second at which these threads add up numbers that are in no cache."""
    torch.set_num_threads(threads)
    numbers = torch.ones(1 << 28)
    return numbers.nbytes / min(seconds(numbers.sum) for _ in range(7))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="qwen3.5-0.8b")
    parser.add_argument("--layers", type=int, help="keep only the first so many")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=16, help="that are decoded in each run")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=[*PROGRAMS], metavar="NAME",
                        help=f"which of {', '.join(PROGRAMS)} (default: all)")
    parser.add_argument("--folder", help="where programs are kept")
    parser.add_argument("--record", action="store_true", help="add the lines to bench/results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
