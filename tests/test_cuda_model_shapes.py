"""On a GPU: deltic's own kernels serve models of every size and kind of attention, as torch's ops do."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from support import numbers
from test_cuda_kernels import CURSORS, batch_of, check_alone, error, fill, served
from test_cuda_prompts import CASES, widened
from test_cuda_prompts import batch_of as prompts_of

from deltic.config import EngineConfig, ModelConfig
from deltic.config.model import ExpertsConfig
from deltic.engine.loading import RandomModel, load
from deltic.ops.types import Batch
from deltic.runner.model_runner import ModelRunner
from deltic.session import Session

UNITS_APART = True
__test__ = torch.cuda.is_available()
VOCABULARY = 5003


def shape(preset: str, **changes: object) -> ModelConfig:
    """Four layers of a preset, with a small vocabulary."""
    return replace(ModelConfig.preset(preset, 4), vocab_size=VOCABULARY, **changes)


_DENSE = shape("qwen3-0.6b")
SHAPES = {
    "27b": shape("qwen3.5-27b"),
    "122b": shape("qwen3.5-122b-a10b", experts=ExpertsConfig(24, 8, 1024, 1024)),
    "397b": shape("qwen3.5-397b-a17b", experts=ExpertsConfig(24, 10, 1024, 1024)),
    "next": shape("qwen3-next-80b-a3b", experts=ExpertsConfig(24, 10, 512, 512)),
    "27b-yarn": shape("qwen3.5-27b").with_rope_scaling("yarn:4:1024"),
    "qwen3-0.6b": _DENSE,
    "qwen3-30b-a3b": shape("qwen3-30b-a3b"),
    "qwen2.5-0.5b": replace(_DENSE, architecture="qwen2", hidden_size=896, intermediate_size=4864, head_dim=64,
                            num_attention_heads=14, num_key_value_heads=2, qk_norm=False, qkv_bias=True,
                            rope=replace(_DENSE.rope, rotary_dim=64)),
    "llama-3.2-3b": replace(_DENSE, architecture="llama", hidden_size=3072, intermediate_size=8192, head_dim=128,
                            num_attention_heads=24, num_key_value_heads=8, qk_norm=False),
    "smollm2-135m": replace(_DENSE, architecture="llama", hidden_size=576, intermediate_size=1536, head_dim=64,
                            num_attention_heads=9, num_key_value_heads=3, qk_norm=False,
                            rope=replace(_DENSE.rope, rotary_dim=64)),
}
PARAMS = [*SHAPES, "27b q4_k", "27b fp8", "qwen3-0.6b q4_k", "llama-3.2-3b q8_0", "next q4_k"]


OPTIONS = {"device": "cuda", "dtype": "bfloat16", "memory": "3GiB", "max_context": 4096, "speculate": "off"}


@pytest.fixture(scope="module", params=PARAMS)
def runtime(request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    name, _, quant = request.param.partition(" ")
    yield load(RandomModel(shape=SHAPES[name], initializer_range=0.05),
               EngineConfig(max_batch=32, quant=quant or "none", **OPTIONS))
    torch.cuda.empty_cache()


def check(runtime: ModelRunner, batch: Batch) -> None:
    """The kernels are as near to float32 as torch's bfloat16 ops on the same weights, up to a half."""
    fill(runtime)
    theirs = runtime.decoder.logits(runtime.decoder.forward(replace(batch, memo={}), runtime.views))
    fill(runtime)
    exact = replace(runtime.decoder, weights=widened(runtime.decoder.weights), dtype=torch.float32)
    wanted = exact.logits(exact.forward(replace(batch, memo={}), widened(runtime.views)))
    fill(runtime)
    found = served(runtime)(replace(batch, memo={}))
    assert found is not None
    # rounding decides now and then which experts a token uses
    least = 0.2 if runtime.config.experts else 0.02
    assert error(found[0], wanted) < max(1.5 * error(theirs, wanted), least)


@pytest.mark.parametrize("done", CURSORS, ids=lambda done: f"{len(done)}-{done[0]}")
@torch.inference_mode()
def test_decode_steps(runtime: ModelRunner, done: list[int]) -> None:
    check(runtime, batch_of(done, len(done)))


@torch.inference_mode()
def test_token_bits_do_not_depend_on_batch(runtime: ModelRunner) -> None:
    check_alone(runtime)


@pytest.mark.parametrize("case", ["65", "ragged"])
@torch.inference_mode()
def test_prefill_steps(runtime: ModelRunner, case: str) -> None:
    check(runtime, prompts_of(*CASES[case]))


@pytest.mark.parametrize("name", PARAMS)
def test_verified_tokens_have_the_bits_of_single_tokens(name: str) -> None:
    model, _, quant = name.partition(" ")
    one, many = (Session(RandomModel(shape=SHAPES[model]), quant=quant or "none", **OPTIONS) for _ in range(2))
    assert many.runtime.capabilities.verifies
    prompt, tokens, rng = numbers(1, 20, VOCABULARY), numbers(2, 60, VOCABULARY), random.Random(3)
    for session in (one, many):
        session.prefill(prompt)
    wanted, place = [one.step(token) for token in tokens], 0
    while place < len(tokens) - 8:
        count = rng.choice([1, 2, 3, 4, 4, 8])
        right = rng.randint(1, count)
        drafts = [*tokens[place:place + right], *numbers(place, count - right, VOCABULARY)]
        logits = many.verify(drafts)
        for index in range(right):
            assert torch.equal(logits[index], wanted[place + index]), (place, index, count)
        many.accept(right)
        place += right
