"""On a GPU: prompts that a prefill replica has computed give the same answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cluster import replica
from test_prefill_replicas import answers, client_of, engine, opened, pair, question, worth_it

if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)

__all__ = ["worth_it"]

ON_CARD = {"device": "cuda", "dtype": "bfloat16", "memory": "256MiB", "host_memory": "64MiB", "max_batch": 8}


@pytest.mark.parametrize("invariant", [True, False])
def test_answers_are_those_of_one_engine(invariant: bool, tmp_path: Path) -> None:
    """Bit by bit with batch_invariant; otherwise the prompts come one at a time, so that batches are equal."""
    options: dict[str, Any] = {**ON_CARD, "batch_invariant": invariant}
    bodies = [question(number, 25 + 9 * number, temperature=float(number % 2), seed=number) for number in range(6)]

    async def run() -> None:
        async with replica(opened(None, **options)) as alone:
            expected = [await answers(alone, [body]) for body in bodies]
        async with pair(tmp_path, **options) as (near, far, handle):
            if invariant:
                found = [[answer] for answer in await answers(near, bodies)]
            else:
                found = [await answers(near, [body]) for body in bodies]
            assert client_of(near).outcomes["done"] == len(handle.calls) == 6, client_of(near).outcomes
            assert engine(near).stats.prompt_tokens < 6 * 32 and engine(far).stats.generated_tokens == 0
            assert found == expected
            for made in (near, far):
                assert made._opened.worker
                made._opened.worker.call(lambda engine: engine.check())

    asyncio.run(run())
