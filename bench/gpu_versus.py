"""Kernels of a decode step on an NVIDIA GPU against other versions of themselves, in turns on one card.

    git worktree add /tmp/old HEAD~3
    python bench/gpu_versus.py --model qwen3.5-0.8b --quant q4_k --against /tmp/old/deltic/ops/cuda/kernels

Each folder of kernel files is compiled for the same weights, and a step of one row recorded with each. Microseconds of
the graph: the least of some series and their median; and whether logits and states have the same bits.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from statistics import median

import torch
from common import record, units_apart
from torch import Tensor

from deltic.config import EngineConfig, ModelConfig
from deltic.engine.loading import RandomModel, load
from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.ops.cuda import driver
from deltic.ops.cuda.driver import record as record_graph
from deltic.ops.cuda.kernel_config import shapes_of
from deltic.ops.types import Batch
from deltic.runner.input_batch import decoding, step_of
from deltic.runner.model_runner import ModelRunner

steps = import_module("deltic.ops.cuda.decode")
"""The module; the package has a function of this name."""
DONE, REPLAYS = 180, 40
"""Tokens of the row; replays that are timed together."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3.5-0.8b")
    parser.add_argument("--layers", type=int, help="of the model; default: all")
    parser.add_argument("--vocabulary", type=int, default=16384, help="a small one, as a head hides much")
    parser.add_argument("--quant", default="none", help="as of deltic serve")
    parser.add_argument("--against", nargs="+", type=Path, required=True, metavar="FOLDER", help="other kernel files")
    parser.add_argument("--repeat", type=int, default=9)
    args = parser.parse_args()
    shape = replace(ModelConfig.preset(args.model, args.layers), num_mtp_layers=0, vocab_size=args.vocabulary)
    with units_apart():
        runtime = load(RandomModel(args.model, shape=shape), EngineConfig(
            device="cuda", dtype="bfloat16", memory="3GiB", max_batch=2, max_context=1024, speculate="off",
            prefix_cache=False, quant=args.quant))
    pools = runtime.pools.shards[0]
    for tensor in (pools.recurrent, pools.conv, pools.keys, pools.values):
        tensor.normal_(0, 0.1)
    padded = decoding(StepPlan((PlannedRow((7,), DONE, tuple(range(16)), 0, 1),)), pools.device).padded
    assert padded
    batch, folders = step_of(padded), {"own": driver.FOLDER}
    folders |= {f"other {number}": folder for number, folder in enumerate(args.against, 1)}
    graphs = {name: _recorded(runtime, batch, folder) for name, folder in folders.items()}
    wanted = graphs["own"][1]
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(args.repeat):
        for name, (graph, _) in graphs.items():
            times[name].append(_time(graph))
    record("gpu", {"task": "versus", "model": runtime.name, "layers": len(shape.layer_types), "quant": args.quant,
                   "vocabulary": args.vocabulary, "graph_us": {name: [min(found), round(median(found), 1)]
                                                               for name, found in times.items()},
                   "same_bits": {name: all(map(torch.equal, found, wanted)) for name, (_, found) in graphs.items()}})


@torch.inference_mode()
def _recorded(runtime: ModelRunner, batch: Batch, folder: Path) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """The step with these kernels, and what it gives: logits and states."""
    pools = runtime.pools.shards[0]
    before = pools.recurrent.clone(), pools.conv.clone()
    driver.FOLDER = folder
    shapes = shapes_of(runtime.decoder.weights, runtime.views)
    assert shapes, "the kernels do not know the model"
    step = steps.DecodeStep(runtime.decoder.weights, runtime.views, shapes, reads=False)
    step(batch)  # loads all that it launches
    graph, (logits, _) = record_graph(lambda: step(batch))
    pools.recurrent.copy_(before[0]), pools.conv.copy_(before[1])
    graph.replay()
    torch.cuda.synchronize()
    found = [logits.clone(), pools.recurrent.clone()]
    pools.recurrent.copy_(before[0]), pools.conv.copy_(before[1])
    return graph, found


def _time(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of one replay."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(round(begin.elapsed_time(end) * 1e3 / REPLAYS, 1))


if __name__ == "__main__":
    main()
