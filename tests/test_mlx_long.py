"""Device mlx with a conversation of 87,000 tokens: chunks, a second turn, other requests and an abort on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support import (
    TAU,
    Answer,
    Answers,
    Reference,
    drain,
    greedy,
    lively,
    numbers,
    odd_shape,
    same_tokens,
    session_over,
    take,
)
from torch import Tensor

from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import RandomModel, load
from deltic.ops.mlx import missing
from deltic.ops.types import Batch
from deltic.runner.model_runner import ModelRunner
from deltic.session import Session

if why := missing():
    pytest.skip(why, allow_module_level=True)

TURN, ANSWER, MESSAGE = 87_000, 24, 50
VOCABULARY, BUDGET = 509, 512


def long_runtime(device: str) -> ModelRunner:
    """A small model in float32 with one layer that attends, with one head: MLX's CPU build computes all scores."""
    kinds = ("linear_attention", "full_attention", "linear_attention")
    shape = odd_shape(num_hidden_layers=3, layer_types=kinds, num_attention_heads=1, num_key_value_heads=1,
                      max_position_embeddings=100_000)
    return load(RandomModel(shape=shape, initializer_range=0.1), EngineConfig(
        dtype="float32", memory="48MiB", max_batch=4, threads=2, device=device, token_budget=BUDGET))


@dataclass(slots=True)
class Steps:
    """Stands before `ModelRunner.run` and keeps the cursors and the lengths of the rows of each step."""

    runtime: ModelRunner
    rows: list[list[tuple[int, int]]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runtime, name)

    def run(self, batch: Batch) -> Tensor:
        self.rows.append([*zip(batch.done.tolist(), batch.layout.chunks, strict=True)])
        return self.runtime.run(batch)


def expected(session: Session, tokens: Sequence[int], answer: Sequence[int]) -> Reference:
    """Returns what the CPU would answer after the session's tokens and these, if it gave this answer so far."""
    logits = torch.stack([session.prefill(tokens), *(session.step(token) for token in answer[:-1])])
    session.step(answer[-1])
    return Reference((), tuple(logits.argmax(-1).tolist()), logits)


def same_answer(wanted: Reference, answer: Answer) -> None:
    same_tokens(wanted, answer.tokens)
    scores = torch.tensor([event.logprobs.token for event in answer.events if event.logprobs])
    assert len(scores) == ANSWER
    chances = wanted.logits.log_softmax(-1).gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
    assert float((scores - chances).abs().max()) < 2 * TAU


@pytest.mark.slow
def test_conversation_of_87000_tokens() -> None:
    steps = Steps(long_runtime("mlx"))
    engine, answers = Engine(steps), Answers()  # type: ignore[arg-type]
    engine.scheduler.times = None
    prompt = numbers(1, TURN, VOCABULARY)
    engine.add(greedy(prompt, ANSWER, "first", logprobs=1))
    engine.add(greedy(numbers(2, 30_000, VOCABULARY), 5, "aborted"))
    while not any(sequence.request.id == "aborted" and sequence.done > 2_000 for sequence in engine.scheduler.running):
        take(answers, engine.step())
    engine.abort("aborted")
    for seed in (3, 4):
        engine.add(greedy(numbers(seed, 40 * seed, VOCABULARY), 400, f"short {seed}"))
    drain(engine, answers)
    assert answers["aborted", 0].last.finish == "abort" and not answers["aborted", 0].tokens
    assert max(tokens for rows in steps.rows for _, tokens in rows) <= BUDGET
    first = answers["first", 0]
    lively(first.tokens)

    before = engine.stats.prompt_tokens
    message = numbers(5, MESSAGE, VOCABULARY)
    engine.add(greedy((*prompt, *first.tokens, *message), ANSWER, "second", logprobs=1))
    engine.add(greedy(numbers(6, 20, VOCABULARY), 2 * ANSWER, "other"))
    drain(engine, answers)
    usage = answers["second", 0].last.usage
    assert usage and usage.cached_tokens == TURN + ANSWER - 1
    assert engine.stats.prompt_tokens - before == MESSAGE + 1 + 20, "tokens of the first turn were computed again"
    for beginning in (TURN, TURN + ANSWER + MESSAGE):
        together = [[done for done, tokens in rows if tokens == 1] for rows in steps.rows]
        assert any(max(done) >= beginning and min(done) < 1000 for done in together if done), "rows decoded alone"

    session = session_over(long_runtime("cpu"), batch=1, context=TURN + 2 * ANSWER + MESSAGE + 1)
    same_answer(expected(session, prompt, first.tokens), first)
    same_answer(expected(session, message, answers["second", 0].tokens), answers["second", 0])
