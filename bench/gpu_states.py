"""The delta rule of many rows on an NVIDIA GPU, alone: microseconds a layer, by what rows do to their states.

    python bench/gpu_states.py --model qwen3.5-4b --rows 256
    python bench/gpu_states.py --state-dtype bfloat16

plain    every state is read and written
read N   states are only read, with N tokens in the rows' replay rings, and the row's token goes there, too
mixed    as the engine has it: one state of `DEFERRED` is written, the others have none to some tokens to be replayed
"""

from __future__ import annotations

import argparse

import torch
from common import record, units_apart

from deltic.config import EngineConfig
from deltic.engine.loading import RandomModel, load
from deltic.engine.scheduler import DEFERRED
from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.ops.cuda.decode import DecodeStep
from deltic.ops.types import Batch, GdnWeights
from deltic.runner.input_batch import decoding, step_of
from deltic.runner.model_runner import ModelRunner

DONE, TIMES = 100, 10
"""Tokens of every row; rounds through all layers that are timed together."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3.5-4b")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--state-dtype", default="float32", help="as of deltic serve")
    args = parser.parse_args()
    with units_apart():
        runtime = load(RandomModel(args.model, 4), EngineConfig(
            device="cuda", dtype="bfloat16", memory="24GiB", max_batch=args.rows, max_context=256, speculate="off",
            state_dtype=args.state_dtype))
    pools = runtime.pools.shards[0]
    assert runtime.capabilities.defers_state_writes, "these kernels do not serve the model"
    assert pools.delta_logs is not None
    for tensor in (pools.recurrent, pools.conv, *pools.delta_logs):
        tensor.normal_(0, 0.1)
    pools.delta_logs[3].uniform_(0.9, 1)
    found = {"plain": _time(runtime, _batch(args.rows, [(0, False)]), args.repeat),
             **{f"read {behind}": _time(runtime, _batch(args.rows, [(behind, True)]), args.repeat)
                for behind in (0, 2, 4)},
             "mixed": _time(runtime, _batch(args.rows, [(behind, behind < DEFERRED - 1) for behind in range(DEFERRED)]),
                            args.repeat)}
    state = pools.recurrent[0, 0].nbytes * args.rows
    record("gpu", {"task": "states", "model": runtime.name, "rows": args.rows,
                   "state_dtype": args.state_dtype, "deferred": DEFERRED,
                   "us_per_layer": found, "state_mb": round(state / 1e6, 1),
                   "plain_tb_s": round(2 * state / found["plain"] / 1e6, 2)})


def _batch(rows: int, kinds: list[tuple[int, bool]]) -> Batch:
    """Rows in turns of these kinds: how many tokens are in the ring, and whether the row's own goes there."""
    found = []
    for index in range(rows):
        behind, append = kinds[index % len(kinds)]
        found.append(
            PlannedRow((7,), DONE, tuple(range(8)), index, 1, base=DONE - behind, delta_log=index, append=append)
        )
    padded = decoding(StepPlan(tuple(found)), torch.device("cuda")).padded
    assert padded
    return step_of(padded)


@torch.inference_mode()
def _time(runtime: ModelRunner, batch: Batch, repeat: int) -> float:
    """Microseconds of a layer: the least of some runs, in which layers follow each other."""
    step, weights = runtime.step, runtime.decoder.weights
    layers = [layer for layer in weights.layers if isinstance(layer.mixer, GdnWeights)]
    assert isinstance(step, DecodeStep) and isinstance(layers[0].mixer, GdnWeights)
    spec = layers[0].mixer.spec
    proj = torch.randn(batch.layout.tokens, spec.channels + spec.values + 2 * spec.value_heads, device="cuda",
                       dtype=torch.bfloat16)
    work, times = step.begin(batch, "many"), []
    for run in range(repeat + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(TIMES):
            for layer in layers:
                step.mix(layer, work, proj, proj.shape[1])
        end.record()
        torch.cuda.synchronize()
        if run:
            times.append(begin.elapsed_time(end) * 1e3 / TIMES / len(layers))
    return float(round(min(times), 1))


if __name__ == "__main__":
    main()
