"""Mixtures of experts against transformers: equal logits, and broken mixtures for which the comparison must fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import Mismatch, lively, same_logits, session_over, stepwise_logits
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
