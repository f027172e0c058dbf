"""On a GPU: a prefix that comes back from the host's memory, beside the step that needs it, gives the same answer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import greedy, numbers, serve

from deltic.cache.manager import HybridCache
from deltic.config import EngineConfig
from deltic.engine.loading import load

if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)


@pytest.mark.parametrize(("spans", "pinned"), [(32, True), (0, True), (32, False)])
def test_host_prefix_is_identical(spans: int, pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where pages lie one after another, and as if they lay all over the pool; in pinned memory, and where there is
    none left."""
    monkeypatch.setattr("deltic.cache.item_copies._SPANS", spans)
    monkeypatch.setattr("deltic.cache.offload.host._STAGING_BYTES", 100_000)
    if not pinned:
        monkeypatch.setattr("deltic.cache.offload.host.PinnedMemory.tensor", lambda memory, like: None)
    runtime = load(None, EngineConfig(device="cuda", dtype="bfloat16", memory="256MiB", host_memory="256MiB",
                                      max_batch=2, max_context=4096, speculate="off"))
    prompt = numbers(5, 1500, runtime.config.vocab_size)
    wanted = serve(runtime, [greedy(prompt, 24)])["a", 0]
    longer = (*prompt, *wanted.tokens, *numbers(6, 40, runtime.config.vocab_size))
    known = serve(runtime, [greedy(longer, 24)])["a", 0]
    assert known.last.usage
    assert known.last.usage.cached_tokens >= 1500
    for tier in runtime.cache.tiers:
        while tier._pending:
            torch.cuda.synchronize()
            tier._settle()
    items = [tensor for tier in runtime.cache.tiers for tensors in tier.store._items.values()  # type: ignore[attr-defined]
             for name, tensor in tensors.items() if name not in ("tokens", "logits")]
    assert items and {tensor.is_pinned() for tensor in items} == {pinned}
    for tensor in (runtime.pools.keys, runtime.pools.values, runtime.pools.recurrent, runtime.pools.conv):
        tensor.fill_(float("nan"))
    empty = replace(runtime, cache=HybridCache(runtime.pools, True, runtime.cache.tiers))
    found = serve(empty, [greedy(longer, 24)])["a", 0]
    assert found.last.usage
    assert found.last.usage.cached_tokens >= 1500 and found.tokens == known.tokens
    assert not any(runtime.pools.arriving.values())


def test_two_host_prefixes_at_once() -> None:
    """With a partial page of each, which is copied when it is there."""
    runtime = load(None, EngineConfig(device="cuda", dtype="bfloat16", memory="256MiB", host_memory="256MiB",
                                      max_batch=2, max_context=4096, speculate="off"))
    prompts = [numbers(seed, 1200 + 5 * seed, runtime.config.vocab_size) for seed in (1, 2)]
    answers = [serve(runtime, [greedy(prompt, 24)])["a", 0].tokens for prompt in prompts]
    requests = [greedy((*prompt, *answer, *numbers(6, 40, runtime.config.vocab_size)), 24, name)
                for name, prompt, answer in zip("ab", prompts, answers, strict=True)]
    known = serve(runtime, requests)
    for tier in runtime.cache.tiers:
        while tier._pending:
            torch.cuda.synchronize()
            tier._settle()
    for tensor in (runtime.pools.keys, runtime.pools.values, runtime.pools.recurrent, runtime.pools.conv):
        tensor.fill_(float("nan"))
    found = serve(replace(runtime, cache=HybridCache(runtime.pools, True, runtime.cache.tiers)), requests)
    for key, answer in known.items():
        usage = found[key].last.usage
        assert usage and usage.cached_tokens >= 1200 and found[key].tokens == answer.tokens
