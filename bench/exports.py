"""Size of an ExecuTorch program, and the processor time and memory that its export takes, by shape.

    python bench/exports.py --preset qwen3.5-2b                          # all layers: minutes, and 4 bytes a parameter
    python bench/exports.py --preset qwen3.5-4b --layers 8 --record      # several numbers of layers give the slope
    python bench/exports.py --preset qwen3.5-35b-a3b --layers 4

Random weights of a true shape, or of its first layers. Processor time rather than wall time: other work on the machine
hardly changes it.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import get_args

from common import record

from deltic.config import GenerationDefaults, ModelConfig
from deltic.export.executorch.export import CHUNK, KINDS, ExportForm, export
from deltic.export.executorch.network import Operators
from deltic.loader.dummy import random_weights


def main() -> int:
    args = parse_args()
    shape = replace(ModelConfig.preset(args.preset, args.layers), num_mtp_layers=0)
    if args.vocabulary:
        shape = replace(shape, vocab_size=args.vocabulary)
    form = ExportForm(args.type, 512, 1 if shape.experts else CHUNK, args.operators)
    seconds: dict[str, float] = {}
    marks: list[tuple[str, float]] = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        size = export(shape, GenerationDefaults(), random_weights(shape, "float32"), Path(folder) / "made.pte", form,
                      lambda stage: marks.append((stage, time.process_time())))
    marks.append(("end", time.process_time()))
    for (stage, began), (_, ended) in pairwise(marks):
        seconds[stage] = round(ended - began, 1)
    line = {"task": "export", "unit": "bytes", "preset": args.preset, "layers": shape.num_hidden_layers,
            "vocabulary": shape.vocab_size, "type": args.type, "operators": args.operators, "static": form.static,
            "parameters": shape.parameter_count, "bytes": size, "processor_seconds": seconds,
            "processor_seconds_in_all": round(sum(seconds.values()), 1),
            "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    record("exports", line) if args.record else print(json.dumps(line))
    return 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="qwen3.5-2b")
    parser.add_argument("--layers", type=int, help="the first so many (default: all)")
    parser.add_argument("--vocabulary", type=int, metavar="N", help="rows of the embedding table")
    parser.add_argument("--type", default="8da4w", choices=KINDS)
    parser.add_argument("--operators", default="executorch", choices=get_args(Operators))
    parser.add_argument("--folder", help="where the program is written, and removed again")
    parser.add_argument("--record", action="store_true", help="append to bench/results/exports.jsonl")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
