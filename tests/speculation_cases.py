"""Models, ways to draw, answers that are known, and drafters that know them: what the tests of speculation share."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from reuse_cases import runtime_of
from support import (
    DEVICE,
    Reference,
    drain,
    moe_shape,
    numbers,
    odd_runtime,
    odd_shape,
    qwen3_runtime,
    reference,
    session_over,
    stepwise_logits,
    units_apart,
)

from deltic.chat.processor import ChatProcessor
from deltic.chat.tokenizer import Tokenizer
from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import RandomModel, load
from deltic.engine.sequence import Sequence as Running
from deltic.model.decoder import Decoder
from deltic.model.draft_vocabulary import draftable
from deltic.model.partial_head import PartialHead
from deltic.params import EngineRequest, SamplingParams
from deltic.runner.model_runner import ModelRunner
from deltic.spec_decode.mtp import Wants

PROMPT, ANSWER, SEED = 83, 40, 77
FORCED = {0: 11, 5: 12, 6: 12, 7: 13, 20: 14, 39: 15}
MODELS = {"odd": odd_runtime, "qwen3": qwen3_runtime}
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True),
    "drawn": SamplingParams(temperature=1.0, max_tokens=ANSWER, ignore_eos=True, seed=SEED),
    "penalties": SamplingParams(temperature=0.8, max_tokens=ANSWER, ignore_eos=True, seed=SEED, presence_penalty=0.7,
                                frequency_penalty=0.5, repetition_penalty=1.3, logit_bias={7: 4.0, 9: -100}),
    "filters": SamplingParams(temperature=1.2, max_tokens=ANSWER, ignore_eos=True, seed=SEED, top_k=40, top_p=0.9,
                              min_p=0.02),
    "matcher": SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True),
}


@dataclass
class Scripted:
    """Drafts from known answers. wrong(n) says whether the n-th draft of all is spoiled."""

    answers: dict[tuple[str, int], Sequence[int]]
    wrong: Callable[[int], bool]
    limit: int
    vocabulary: int = 509
    made: int = 0
    spoiled: int = 0
    forgotten: list[Running] = field(default_factory=list)

    def draft(self, wants: Wants) -> list[list[int]]:
        return [self._draft(sequence, count) for sequence, count in wants]

    def _draft(self, sequence: Running, count: int) -> list[int]:
        answer = self.answers.get((sequence.request.id, sequence.choice), ())
        drafts = [*answer[sequence.generated:sequence.generated + count]]
        drafts += [(sequence.tokens[-1] + 1 + i) % self.vocabulary for i in range(count - len(drafts))]
        for index in range(count):
            self.made += 1
            if self.wrong(self.made):
                self.spoiled += 1
                drafts[index] = (drafts[index] + 1) % self.vocabulary
        return drafts

    def forget(self, sequence: Running) -> None:
        self.forgotten.append(sequence)


PATTERNS: dict[str, Callable[[int], bool]] = {
    "right": lambda n: False,
    "wrong": lambda n: True,
    "alternating": lambda n: n % 2 == 0,
    "every third wrong": lambda n: n % 3 == 0,
    "now and then": lambda n: random.Random(n).random() < 0.3,
}


@dataclass
class EndingAt:
    """A matcher that ends an answer at this token of it, as a stop string may."""

    last: int
    seen: int = 0

    def push(self, token: int) -> bool:
        self.seen += 1
        return self.seen == self.last


@dataclass
class Dictate:
    """Forces tokens at places of the answer."""

    places: dict[int, int] = field(default_factory=lambda: FORCED)
    count: int = 0

    def forced(self) -> int | None:
        return self.places.get(self.count)

    def push(self, token: int) -> None:
        assert token == self.places.get(self.count, token)
        self.count += 1


def request_of(prompt: Sequence[int], params: str, n: int = 1, name: str = "seen") -> EngineRequest:
    return EngineRequest(name, tuple(prompt), replace(PARAMS[params], n=n),
                   matcher=(lambda: EndingAt(17)) if params == "matcher" else None)




@cache
def expected(model: str, params: str, choice: int = 0) -> Reference:
    """Token by token, without an engine; penalties and filters through an engine that drafts nothing."""
    runtime = MODELS[model]()
    prompt = numbers(5, PROMPT, runtime.config.vocab_size)
    if params in ("greedy", "drawn"):
        return reference(runtime, prompt, ANSWER, PARAMS[params], choice)
    engine = Engine(runtime_of(runtime))
    engine.add(request_of(prompt, params, choice + 1))
    tokens = drain(engine)["seen", choice].tokens
    session = session_over(runtime, batch=1)
    logits = stepwise_logits(session, (*prompt, *tokens[:-1]))[PROMPT - 1:]
    return Reference(prompt, tuple(tokens), logits)


@cache
def headed() -> ModelRunner:
    """The odd model with a random head, whose drafts are all wrong."""
    model = RandomModel(shape=odd_shape(), initializer_range=0.1, head=True)
    return load(model, EngineConfig(dtype="float32", memory="8MiB", max_batch=8, threads=1, device=DEVICE))


def half_of(runtime: ModelRunner) -> PartialHead:
    """Every second token's row of the matrix of logits, and rows that follow what occurs. Of an odd vocabulary."""
    size = runtime.config.vocab_size
    tokens = draftable(size // 2, size)
    assert tokens and size % 2
    return part_of(runtime.decoder, [token * 2 % size for token in tokens])


def part_of(decoder: Decoder, tokens: Sequence[int] | None) -> PartialHead:
    """A part of these rows."""
    found = PartialHead(decoder, lambda: tokens)
    found.build()
    assert found.vocabulary
    return found


@cache
def moe_headed() -> ModelRunner:
    """The same with experts, in the model and in its head."""
    model = RandomModel(shape=moe_shape(), initializer_range=0.1, head=True)
    return load(model, EngineConfig(dtype="float32", memory="8MiB", max_batch=8, threads=1, device=DEVICE))


@cache
def embedded_with_head() -> ModelRunner:
    with units_apart():
        return load(None, EngineConfig(dtype="float32", memory="64MiB", max_batch=8, max_context=512, threads=1,
                                       device=DEVICE))


def embedded_prompt() -> tuple[int, ...]:
    tokenizer = Tokenizer.from_directory(Path(str(embedded_with_head().path)))
    return tuple(ChatProcessor(tokenizer).chat([{"role": "user", "content": "What is the capital of France?"}],
                                       PARAMS["greedy"]).request.prompt)
