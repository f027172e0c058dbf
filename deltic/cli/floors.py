"""What a machine allows at most: how fast its memory is read, and on a GPU how fast it multiplies, beside what steps of
a model read and multiply."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from deltic.cli.measure import Case

if TYPE_CHECKING:
    import torch

    from deltic.config import ModelConfig
    from deltic.runner.model_runner import ModelRunner

_BYTES = {"cpu": 256 << 20, "cuda": 4 << 30}
"""What is read at once: more than caches hold, and for longer than it takes to have it done."""
_SIDE, _TRIES = 8192, 16
"""Rows and columns of the matrices that are multiplied; of several tries the best counts."""


def floors(runtime: ModelRunner, case: Case) -> dict[str, Any]:
    """What memory allows of writing with the case's sequences, and on a GPU what multiplying allows of reading prompts,
    both in tokens a second; measured right now, on as many threads as the model has."""
    read = _read_rate(runtime)
    bytes_read = step_bytes(runtime, case.batch, case.prompt_tokens + case.new_tokens // 2)
    found = {"memory_gb_per_second": round(read / 1e9, 2), "step_mib": round(bytes_read / (1 << 20), 1),
             "allowed_decode_tokens_per_second": round(case.batch * read / bytes_read, 4)}
    if runtime.device.type == "cuda":
        rate = _multiply_rate(runtime.device)
        operations = prompt_operations(runtime.config, case.prompt_tokens)
        found |= {"multiply_tflops": round(rate / 1e12, 1),
                  "allowed_prefill_tokens_per_second": round(case.prompt_tokens * rate / operations, 4)}
    return found


def step_bytes(runtime: ModelRunner, batch: int, context: int) -> int:
    """Bytes that a step of so many sequences with contexts of so many tokens reads and writes: weights once, states,
    keys and values. Of a mixture the experts that some token passes, if all are equally likely."""
    from deltic.engine.scheduler import DEFERRED
    from deltic.runner.input_batch import FEW_ROWS

    decoder, pools, experts = runtime.decoder, runtime.pools, runtime.config.experts
    weights = decoder.token_bytes()
    if experts and batch > 1:
        passed = experts.per_token / experts.count
        tied = decoder.weights.embedding is decoder.weights.head
        whole = decoder.weight_bytes() - (0 if tied else decoder.weights.embedding.nbytes)
        weights += int((whole - weights) * (1 - (1 - passed) ** batch - passed) / (1 - passed)) if passed < 1 else 0
    written = 1 / DEFERRED if runtime.capabilities.defers_state_writes and batch > FEW_ROWS else 1
    state = int((1 + written) * batch * pools.recurrent[:, 0].nbytes) if len(pools.recurrent) else 0
    return weights + state + 2 * batch * context * pools.keys[:, 0, 0].nbytes


def prompt_operations(config: ModelConfig, tokens: int) -> int:
    """Of products and attention while a prompt is read; the delta rule's and the only row of the head's are few."""
    from deltic.loader.names import expected_tensors

    shapes = expected_tensors(config)
    layers = sum(shape[0] * shape[1] for name, shape in shapes.items()
                 if ".layers." in name and len(shape) == 2 and ".conv1d." not in name)
    # of mixtures: the matrices of the experts that a token passes
    layers += sum(shape[1] * shape[2] for name, shape in shapes.items()
                  if ".experts." in name) * (config.experts.per_token if config.experts else 0)
    attention = config.layer_types.count("full_attention") * config.num_attention_heads * config.head_dim
    return 2 * layers * tokens + 2 * attention * tokens**2


def _read_rate(runtime: ModelRunner) -> float:
    """Bytes a second."""
    import torch

    from deltic.engine.memory import free_memory
    from deltic.ops.cpu import use_torch_threads

    use_torch_threads(runtime.decoder.ops, runtime.threads)
    size = min(_BYTES[runtime.device.type], free_memory(runtime.options.device) // 4)
    numbers = torch.ones(max(size // 4, 1), device=runtime.device)
    return numbers.nbytes / min(_seconds(numbers.sum, runtime.device) for _ in range(_TRIES))


def _multiply_rate(device: torch.device) -> float:
    """Operations a second, of bfloat16."""
    import torch

    one, other = (torch.randn(_SIDE, _SIDE, device=device).bfloat16() for _ in range(2))
    return float(2 * _SIDE**3 / min(_seconds(lambda: one @ other, device) for _ in range(_TRIES)))


def _seconds(work: Any, device: torch.device) -> float:
    import torch

    def done() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    began = done()
    work()
    return done() - began
