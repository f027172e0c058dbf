"""Mixtures of experts against transformers: equal logits, and broken mixtures for which the comparison must fail."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import (
    Mismatch,
    greedy,
    lively,
    margins,
    same_logits,
    serve,
    session_over,
    small_runtime,
    stepwise_logits,
)
from test_model_parity import Pair, paired, their_answer, with_ops
from torch import Tensor

from deltic.config import EngineConfig
from deltic.engine.loading import load
from deltic.ops import Ops, backends, reference
from deltic.ops.types import MlpWeights, MoeWeights

VARIANTS: dict[str, dict[str, Any]] = {
    "experts": {},
    "tied, one expert a token": {"tie_word_embeddings": True, "num_experts_per_tok": 1},
    "all experts": {"num_experts_per_tok": 5, "moe_intermediate_size": 7, "num_hidden_layers": 2,
                    "layer_types": ["full_attention", "linear_attention"]},
    "sixty experts": {"num_experts": 60, "num_experts_per_tok": 9, "moe_intermediate_size": 33, "hidden_size": 44,
                      "shared_expert_intermediate_size": 5},
    "nested": {"nested": True},
    "qwen3 next": {"family": "qwen3_next"},
    "qwen3 next, tied, not normalised": {
        "family": "qwen3_next", "tie_word_embeddings": True, "norm_topk_prob": False, "num_experts_per_tok": 3,
        "num_hidden_layers": 5, "layer_types": ["full_attention", *["linear_attention"] * 3, "full_attention"],
        "hidden_size": 44, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10,
        "linear_num_key_heads": 3, "linear_num_value_heads": 9, "linear_key_head_dim": 6, "linear_value_head_dim": 14,
        "linear_conv_kernel_dim": 3, "vocab_size": 331, "rms_norm_eps": 1e-5, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "partial_rotary_factor": 0.4, "factor": 4.0,
            "original_max_position_embeddings": 32}},
    "qwen3": {"family": "qwen3_moe"},
    "qwen3, not normalised": {"family": "qwen3_moe", "norm_topk_prob": False, "num_experts_per_tok": 3},
}


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return paired(tmp_path_factory.mktemp("model"), **{"family": "qwen3_5_moe", **VARIANTS[request.param]})


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return paired(tmp_path_factory.mktemp("plain"), family="qwen3_5_moe")


@pytest.mark.parametrize("count", [1, 2, 17, 64, 150])
def test_whole_prompt(pair: Pair, count: int) -> None:
    tokens = pair.prompt(count)
    same_logits(pair.expected(tokens), pair.session().prefill(tokens, all_logits=True))


def test_stepwise_and_chunked(pair: Pair) -> None:
    tokens = pair.prompt(70, seed=1)
    expected = pair.expected(tokens)
    same_logits(expected, stepwise_logits(pair.session(), tokens))
    for budget in (1, 7, 64):
        same_logits(expected, pair.session(budget).prefill(tokens, all_logits=True))


def random_next(seed: int) -> dict[str, Any]:
    """A shape of Qwen3-Next with odd sizes."""
    draw = random.Random(seed)
    heads, keys, kv = draw.randint(1, 3), draw.randint(1, 4), draw.randint(1, 2)
    dim, layers, experts = 4 * draw.randint(2, 5), draw.randint(2, 5), draw.randint(2, 12)
    return {
        "family": "qwen3_next", "hidden_size": draw.randint(9, 50), "num_hidden_layers": layers, "head_dim": dim,
        "layer_types": ["linear_attention", *draw.choices(["linear_attention", "full_attention"], k=layers - 2),
                        "full_attention"],
        "num_attention_heads": heads * kv, "num_key_value_heads": kv, "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * draw.randint(1, 4), "linear_key_head_dim": draw.randint(3, 17),
        "linear_value_head_dim": draw.randint(3, 17), "linear_conv_kernel_dim": draw.randint(2, 5),
        "num_experts": experts, "num_experts_per_tok": draw.randint(1, experts), "vocab_size": draw.randint(60, 400),
        "moe_intermediate_size": draw.randint(3, 40), "shared_expert_intermediate_size": draw.randint(3, 40),
        "tie_word_embeddings": draw.random() < 0.5, "norm_topk_prob": draw.random() < 0.8, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": draw.choice([0.5, 1.0])}}


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 20))])
def test_odd_shapes_of_qwen3_next(tmp_path: Path, seed: int) -> None:
    """Whole, stepwise, chunked and batched."""
    pair = paired(tmp_path, seed=seed, **random_next(seed))
    prompts = [pair.prompt(count, seed=seed) for count in (70, 33, 5)]
    expected = [pair.expected(tokens) for tokens in prompts]
    for tokens, wanted in zip(prompts, expected, strict=True):
        same_logits(wanted, pair.session().prefill(tokens, all_logits=True), 1e-4)
    same_logits(expected[0], stepwise_logits(pair.session(), prompts[0]), 1e-4)
    for budget in (3, 64):
        same_logits(expected[0], pair.session(budget).prefill(prompts[0], all_logits=True), 1e-4)
    runtime = small_runtime(pair.ours, batch=3, budget=16)
    requests = [greedy(tokens, 8, name=str(place)) for place, tokens in enumerate(prompts)]
    answers, compared = serve(runtime, requests), 0
    for place, tokens in enumerate(prompts):
        theirs, logits = their_answer(pair, tokens, 8)
        decided = int((margins(logits) > 2e-4).long().cumprod(0).sum())
        assert answers[str(place), 0].tokens[:decided] == theirs[:decided]
        compared += decided
    assert compared > 12


@pytest.mark.parametrize("ops", ["reference", "torch"])
def test_other_backends(pair: Pair, ops: str) -> None:
    tokens = pair.prompt(20, seed=2)
    slow = session_over(with_ops(pair.ours, backends()[ops]), budget=13)
    same_logits(pair.expected(tokens), slow.prefill(tokens, all_logits=True))


@pytest.mark.parametrize("count", [50, pytest.param(200, marks=pytest.mark.slow)])
def test_greedy_tokens_teacher_forced(plain: Pair, count: int) -> None:
    prompt = plain.prompt(12, seed=3)
    tokens, expected = their_answer(plain, prompt, count)
    lively(tokens)
    session = plain.session()
    found = torch.stack([session.prefill(prompt), *stepwise_logits(session, tokens[:-1])])
    same_logits(expected, found, decided=0.95)


# Broken mixtures must not pass


def changed(change: Callable[[MoeWeights], MoeWeights]) -> Callable[[Ops], Ops]:
    """The mixture with other weights."""
    return lambda ops: replace(ops, moe=lambda x, weights: ops.moe(x, change(weights)))


def ungated(ops: Ops) -> Ops:
    """The shared expert's gate is left out."""
    def moe(x: Tensor, weights: MoeWeights) -> Tensor:
        assert weights.shared is not None
        gate = torch.sigmoid(ops.head(x, weights.router)[:, len(weights.experts):])
        return ops.moe(x, weights) + (1 - gate) * ops.mlp(x, weights.shared)

    return replace(ops, moe=moe)


def swapped(weights: MlpWeights) -> MlpWeights:
    """Gate is up, and up is gate."""
    assert isinstance(weights.gate_up, Tensor)
    return replace(weights, gate_up=torch.cat(weights.gate_up.chunk(2)[::-1]))


def without_shared(weights: MoeWeights) -> MoeWeights:
    assert isinstance(weights.router, Tensor)
    return replace(weights, router=weights.router[:len(weights.experts)], shared=None)


def sharper(weights: MoeWeights) -> MoeWeights:
    """The shares are those of another temperature; who is chosen stays."""
    assert isinstance(weights.router, Tensor)
    count = len(weights.experts)
    return replace(weights, router=torch.cat([weights.router[:count] * 1.5, weights.router[count:]]))


def of_the_token_before(ops: Ops) -> Ops:
    """Each token is given what the experts made of the one before it."""
    return replace(ops, moe=lambda x, weights: ops.moe(x, weights).roll(1, 0))


BUGS = {
    "shares are not normalised": changed(lambda weights: replace(weights, normalised=False)),
    "one expert fewer": changed(lambda weights: replace(weights, per_token=weights.per_token - 1)),
    "experts are numbered from one": changed(
        lambda weights: replace(weights, experts=(*weights.experts[1:], weights.experts[0]))),
    "gate and up are swapped": changed(
        lambda weights: replace(weights, experts=tuple(map(swapped, weights.experts)))),
    "gate and up of the shared expert are swapped": changed(
        lambda weights: replace(weights, shared=weights.shared and swapped(weights.shared))),
    "the shared expert is left out": changed(without_shared), "the shared expert's gate is left out": ungated,
    "shares of another temperature": changed(sharper), "what the token before should get": of_the_token_before,
}


@pytest.fixture(scope="module")
def healthy(plain: Pair) -> Pair:
    """With plain weights, on torch."""
    options = EngineConfig(dtype="float32", memory="8MiB", threads=1, ops=("torch",))
    return replace(plain, ours=load(str(plain.ours.path), options))


@pytest.mark.parametrize("bug", BUGS)
def test_the_comparison_notices(bug: str, healthy: Pair) -> None:
    tokens = healthy.prompt(60, seed=9)
    expected = healthy.expected(tokens)
    same_logits(expected, healthy.session().prefill(tokens, all_logits=True))
    broken = session_over(with_ops(healthy.ours, BUGS[bug](healthy.ours.decoder.ops)), budget=512)
    with pytest.raises(Mismatch, match=r"best token|differ by"):
        same_logits(expected, broken.prefill(tokens, all_logits=True))


def test_the_comparison_notices_a_softmax_over_the_chosen_alone(tmp_path: Any) -> None:
    """Which is the same where shares are normalised."""
    pair = paired(tmp_path, family="qwen3_moe", norm_topk_prob=False)
    tokens = pair.prompt(60, seed=9)
    bug = changed(lambda weights: replace(weights, normalised=True))
    broken = session_over(with_ops(pair.ours, bug(reference.OPS)), budget=512)
    with pytest.raises(Mismatch, match=r"best token|differ by"):
        same_logits(pair.expected(tokens), broken.prefill(tokens, all_logits=True))
