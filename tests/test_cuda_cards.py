"""On a GPU that is restricted to another card's instructions and shared memory (`DELTIC_CARD`): decoding gives the bits
of the unrestricted kernels, prompts give their numbers up to rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import greedy, numbers, serve
from test_card_sources import restrict as restrict

from deltic import RandomModel, Session
from deltic.config import EngineConfig, ExpertsConfig, ModelConfig
from deltic.engine.loading import load
from deltic.ops.cuda.card import CARDS
from deltic.ops.cuda.decode import DecodeStep

if not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)
Restrict = Callable[[str], None]
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {}, "qwen3.5-0.8b": {}, "qwen3.5-4b": {"quant": "q4_k"}, "mixture": {}, "packed mixture": {"quant": "q4_k"}}
MIXTURE = replace(ModelConfig.preset("qwen3.5-35b-a3b", 4), vocab_size=5003, experts=ExpertsConfig(24, 4, 256, 256))
VOCABULARY = 500
OTHERS = [name for name in CARDS if name != "sm_90"]


@pytest.fixture(autouse=True)
def _unrestricted(monkeypatch: pytest.MonkeyPatch) -> None:
    """At first."""
    monkeypatch.delenv("DELTIC_CARD", raising=False)


def model_of(name: str) -> RandomModel | None:
    if "mixture" in name:
        return RandomModel(shape=MIXTURE, initializer_range=0.05)
    return None if name == "tiny" else RandomModel(name, 4, initializer_range=0.05)


def answers(name: str) -> list[tuple[list[int], list[float]]]:
    """Tokens and their log-probabilities, all computed by steps of at most 16 rows."""
    runtime = load(model_of(name), EngineConfig(device="cuda", dtype="bfloat16", memory="512MiB", max_batch=32,
                                                max_context=1024, batch_invariant=True, **MODELS[name]))
    assert isinstance(runtime.step, DecodeStep), "the kernels do not serve this model"
    asked = [greedy(numbers(seed, 10 + 37 * seed, VOCABULARY), 20, str(seed), logprobs=1) for seed in range(6)]
    return [(answer.tokens, [event.logprobs.token for event in answer.events if event.logprobs])
            for answer in serve(runtime, asked).values()]


@pytest.mark.parametrize("name", MODELS)
def test_decoding_gives_the_same_bits(name: str, restrict: Restrict) -> None:
    wanted = answers(name)
    for card in OTHERS:
        restrict(card)
        found = answers(name)
        off = max(abs(one - other) for (_, some), (_, others) in zip(found, wanted, strict=True)
                  for one, other in zip(some, others, strict=True))
        assert found == wanted, f"restricted to {card}, log-probabilities are up to {off} off"


@pytest.mark.parametrize("name", MODELS)
def test_prompts_differ_by_rounding(name: str, restrict: Restrict) -> None:
    """A prompt of several chunks, then one that goes on from its state."""
    def logits() -> list[torch.Tensor]:
        session = Session(model_of(name), "bfloat16", device="cuda", memory="512MiB", max_context=1024, max_batch=8,
                          **MODELS[name])
        step = session.runtime.step
        assert isinstance(step, DecodeStep) and step.prefill, "the kernels serve no prompts of this model"
        return [session.prefill(list(numbers(seed, tokens, VOCABULARY)), all_logits=True)
                for seed, tokens in ((1, 333), (2, 100))]

    wanted = logits()
    for card in OTHERS:
        restrict(card)
        for part, (found, before) in enumerate(zip(logits(), wanted, strict=True)):
            off = float((found - before).norm() / before.norm())
            assert off < 4e-2, f"restricted to {card}, the logits of part {part} are {off} off"
