"""Warms up a model on a GPU, so that its first request is as fast as later ones."""

from __future__ import annotations

from deltic.cache.manager import HybridCache
from deltic.engine.engine import Engine
from deltic.params import EngineRequest, SamplingParams
from deltic.runner.model_runner import ModelRunner

_PROMPT_TOKENS, _NEW_TOKENS = 300, 4


def warm_up(runtime: ModelRunner) -> None:
    """Runs all kinds of steps (`ModelRunner.warm_up`), then answers two requests, because sampling and the copy of
    tokens to the host allocate their memory at first use. Must run in the thread of the steps, before any request."""
    runtime.warm_up()
    if not runtime.options.on_gpu:
        return
    cache, runtime.cache = runtime.cache, HybridCache(runtime.pools, reuse=False)  # keeps nothing of these requests
    try:
        _answer(Engine(runtime))
    finally:
        runtime.cache = cache


def _answer(engine: Engine) -> None:
    longest = min(_PROMPT_TOKENS, engine.max_context - _NEW_TOKENS, engine.runtime.config.vocab_size)
    for temperature in (0.0, 1.0):
        engine.add(EngineRequest(str(temperature), tuple(range(max(1, longest))), SamplingParams(
            temperature=temperature, top_p=0.9, max_tokens=_NEW_TOKENS, ignore_eos=True)))
        engine.step()
    while engine.has_work:
        engine.step()
