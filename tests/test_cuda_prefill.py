"""On a GPU: an engine that continues a prompt of another one gives the same answer."""

from __future__ import annotations

from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import numbers

from deltic.cluster import prefill
from deltic.cluster.prefill import PrefillClient, disk_tier
from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import load
from deltic.params import EngineRequest, SamplingParams, TokenEvent

if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)


def opened(directory: Path | None) -> Engine:
    """Steps of prompts depend on measured times; with batch_invariant that changes no bit."""
    runtime = load(None, EngineConfig(device="cuda", dtype="bfloat16", memory="256MiB", host_memory="64MiB",
                                      max_batch=4, max_context=4096, batch_invariant=True,
                                      cache_dir=str(directory) if directory else None))
    if directory:
        store: Any = runtime.cache.tiers[-1].store
        store._model.result()  # until then the tier does nothing
    return Engine(runtime)


def answer(engine: Engine) -> list[tuple[int, float]]:
    found = []
    while engine.has_work:
        for event in engine.step():
            assert event.finish != "error", event.error
            if isinstance(event, TokenEvent) and event.token is not None and event.logprobs:
                found.append((event.token, event.logprobs.token))
    return found


def test_answers_are_those_of_one_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and seeded, with the log probabilities."""
    monkeypatch.setattr(prefill, "LEAST_SECONDS", 0.0)
    alone, near, far = (opened(directory) for directory in (None, tmp_path, tmp_path))
    worker: Any = SimpleNamespace(engine=near)
    tier, other = disk_tier(near.runtime.cache), disk_tier(far.runtime.cache)
    assert tier and other
    client = PrefillClient(None, worker, tier)
    for number in range(5):
        prompt = tuple(numbers(number, 700 + 301 * number, alone.runtime.config.vocab_size))
        sampling = SamplingParams(max_tokens=24, temperature=number % 2, seed=number, logprobs=0)
        request = EngineRequest(f"r{number}", prompt, sampling, stable_prefixes=(500,), cache_salt="x" * number)
        alone.add(request)
        expected = answer(alone)
        near.add(request)
        order = client.order(request)
        assert order
        near.pause(request.id)
        own = prefill._request_of(order)
        far.add(own)
        assert not answer(far)
        keys = far.keys_of(own)
        wait(prefill._store(far, other, keys))
        items = other.written(keys)
        assert max(item.done for item in items) > len(prompt) - 16
        tier.adopt(items)
        near.resume(request.id)
        assert answer(near) == expected and len(expected) > 1, number
    assert near.stats.prompt_tokens < 5 * 16 and tier.hits == 5
    for engine in (near, far):
        engine.check()
        engine.close()
