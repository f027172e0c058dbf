"""Engines with slots for the prefix tree, and what they say of reuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from support import (
    Answers,
    drain,
    fresh_pools,
    odd_runtime,
    small_runtime,
)

from deltic.cache.manager import HybridCache
from deltic.cache.offload.index import TierIndex
from deltic.engine.engine import Engine
from deltic.params import EngineRequest, SamplingParams, Usage
from deltic.runner.model_runner import ModelRunner

PROMPT, ANSWER, WHOLE, SEED = 83, 24, 512, 77
FREE = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
DRAWN = replace(FREE, temperature=1.0, seed=SEED)


def runtime_of(runtime: ModelRunner, *, reuse: bool = True, slots: int = 24, batch: int = 8, budget: int = 64,
               pages: int | None = None, context: int | None = None, tiers: Sequence[TierIndex] = ()) -> ModelRunner:
    """The same model with pools of its own, with slots for the prefix tree too."""
    small = small_runtime(runtime, batch=batch, budget=budget, pages=pages or 24 * 16, context=context)
    pools = fresh_pools(runtime, pages or 24 * 16, slots)
    return replace(small, cache=HybridCache(pools, reuse, tiers))


def serve(engine: Engine, *requests: EngineRequest) -> Answers:
    for request in requests:
        engine.add(request)
    return drain(engine, limit=3000)


def usage_of(answers: Answers, name: str = "a", choice: int = 0) -> Usage:
    usage = answers[(name, choice)].last.usage
    assert usage is not None
    return usage


def tree_of(engine: Engine) -> Any:
    return engine.runtime.cache.tree


def engine_for(**limits: Any) -> Engine:
    return Engine(runtime_of(odd_runtime(), **limits))
