"""The speed that a machine allows: bytes of a decode step over the speed of memory, and operations of a prompt over the
speed of products on a GPU. Both speeds are measured.

    python bench/bounds.py [MODEL] --batch 1 --prompt 512 --new 64
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from deltic.cli.bench import Case
from deltic.config import EngineConfig, ModelConfig
from deltic.engine.loading import RandomModel, load
from deltic.engine.scheduler import DEFERRED
from deltic.loader.names import expected_tensors
from deltic.runner.input_batch import FEW_ROWS
from deltic.runner.memory import free_memory
from deltic.runner.model_runner import ModelRunner

_READ_BYTES, _READ_GPU_BYTES = 256 << 20, 4 << 30
"""More than caches hold, and on a GPU enough to make the launch negligible."""
_MATRIX_SIZE, _TRIES = 8192, 16


def bounds_of(runtime: ModelRunner, case: Case) -> dict[str, Any]:
    """Measures how fast memory is read and, on a GPU, matrices are multiplied, and the tokens a second that allows."""
    speed = _read_speed(runtime)
    step = step_bytes(runtime, case.batch, case.prompt_tokens + case.new_tokens // 2)
    bounds = {"memory_gb_per_second": round(speed / 1e9, 2), "step_mib": round(step / (1 << 20), 1),
              "allowed_decode_tokens_per_second": round(case.batch * speed / step, 4)}
    if runtime.capabilities.overlaps:
        rate = _multiply_speed(runtime)
        operations = prompt_operations(runtime.config, case.prompt_tokens)
        bounds |= {"multiply_tflops": round(rate / 1e12, 1),
                   "allowed_prefill_tokens_per_second": round(case.prompt_tokens * rate / operations, 4)}
    return bounds


def step_bytes(runtime: ModelRunner, batch: int, context: int) -> int:
    """Bytes that a decode step reads and writes: weights once, states, keys and values.

    Of a mixture it counts the experts that some token selects, if all are equally likely.
    """
    decoder, pools, experts = runtime.decoder, runtime.pools.shards, runtime.config.experts
    weights = decoder.token_bytes()
    if experts and batch > 1 and experts.per_token < experts.count:
        selected = experts.per_token / experts.count
        tied = decoder.weights.embedding is decoder.weights.head
        whole = decoder.weight_bytes() - (0 if tied else decoder.weights.embedding.nbytes)
        weights += int((whole - weights) * (1 - (1 - selected) ** batch - selected) / (1 - selected))
    writes = 1 / DEFERRED if runtime.capabilities.defers_state_writes and batch > FEW_ROWS else 1
    state = sum(own.recurrent[:, 0].nbytes for own in pools if len(own.recurrent))
    kv = sum(2 * own.keys[:, 0, 0].nbytes for own in pools)
    return weights + int((1 + writes) * batch * state) + batch * context * kv


def prompt_operations(config: ModelConfig, tokens: int) -> int:
    """Operations of products and attention in prefill. The delta rule and the head's single row are negligible."""
    weights = 0
    for name, shape in expected_tensors(config).items():
        if ".experts." in name and config.experts:
            weights += config.experts.per_token * shape[1] * shape[2]
        elif ".layers." in name and len(shape) == 2 and ".conv1d." not in name:
            weights += shape[0] * shape[1]
    attention = config.layer_types.count("full_attention") * config.num_attention_heads * config.head_dim
    return 2 * weights * tokens + 2 * attention * tokens**2


def _read_speed(runtime: ModelRunner) -> float:
    """Bytes a second, on as many threads as the model has."""
    torch.set_num_threads(runtime.threads)
    wanted = _READ_GPU_BYTES if runtime.capabilities.overlaps else _READ_BYTES
    size = min(wanted, free_memory(runtime.options.device) // 4)
    numbers = torch.ones(max(size // 4, 1), device=runtime.device)
    return numbers.nbytes / _best_seconds(numbers.sum, runtime)


def _multiply_speed(runtime: ModelRunner) -> float:
    """Operations a second, of bfloat16."""
    left, right = (torch.randn(_MATRIX_SIZE, _MATRIX_SIZE, device=runtime.device).bfloat16() for _ in range(2))
    return 2 * _MATRIX_SIZE**3 / _best_seconds(lambda: left @ right, runtime)


def _best_seconds(work: Callable[[], Any], runtime: ModelRunner) -> float:
    def now() -> float:
        if runtime.capabilities.overlaps:
            torch.cuda.synchronize(runtime.device)
        return time.perf_counter()

    times = []
    for _ in range(_TRIES):
        began = now()
        work()
        times.append(now() - began)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--random", metavar="PRESET", help="random weights of this shape instead of a model")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=64)
    args = parser.parse_args()
    source = RandomModel(args.random) if args.random else args.model
    config = EngineConfig(max_batch=args.batch, max_context=args.prompt + args.new)
    print(json.dumps(bounds_of(load(source, config), Case(args.prompt, args.new, args.batch))))


if __name__ == "__main__":
    main()
