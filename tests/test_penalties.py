"""Penalties, bias and the minimum length: exactly what they say of all tokens so far, at a cost that does not grow with
their number; and a request that allows no token fails alone."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as List
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import drain, greedy, numbers, odd_runtime
from torch import Tensor

from deltic.engine.engine import Engine
from deltic.engine.sequence import Sequence
from deltic.ops import backends
from deltic.ops.types import Adjust, Sampling
from deltic.params import EngineRequest, SamplingParams
from deltic.runner.sampling import Penalties, SampleRow, sampling_of

CPU = torch.device("cpu")
OPS = backends()
VOCABULARY = 300
every_backend = pytest.mark.parametrize("backend", sorted(OPS))


def sequence_of(params: SamplingParams, prompt: List[int], eos: List[int] = ()) -> Sequence:
    return choices_of(params, prompt, eos)[0]


def choices_of(params: SamplingParams, prompt: List[int], eos: List[int] = ()) -> list[Sequence]:
    request = EngineRequest("r", tuple(prompt), params)
    return [Sequence(request, choice, params, 5, frozenset(eos), 1 << 30, list(prompt)) for choice in range(params.n)]


def plainly(draw: SampleRow) -> dict[int, tuple[float, float]]:
    """Repetition and offset of every token that is changed, from all tokens at once."""
    sequence, params, changes = draw.sequence, draw.sequence.sampling, dict[int, list[float]]()
    counts = Counter([*sequence.tokens[len(sequence.request.prompt):], *draw.drafts])
    if params.repetition_penalty not in (None, 1.0):
        for token in {*sequence.tokens, *draw.drafts}:
            changes[token] = [float(params.repetition_penalty or 1.0), 0.0]
    if params.presence_penalty or params.frequency_penalty:
        for token, count in counts.items():
            changes.setdefault(token, [1.0, 0.0])[1] -= params.presence_penalty + params.frequency_penalty * count
    for token, bias in params.logit_bias.items():
        changes.setdefault(token, [1.0, 0.0])[1] += bias if bias > -100 else -math.inf
    if sequence.generated + len(draw.drafts) < params.min_tokens:
        for token in sequence.eos:
            changes.setdefault(token, [1.0, 0.0])[1] = -math.inf
    return {token: (repetition, offset) for token, (repetition, offset) in changes.items()}


def expected(draws: List[SampleRow], logits: Tensor) -> Tensor:
    rows, tokens, repetitions, offsets = zip(*((row, token, *change) for row, draw in enumerate(draws)
                                               for token, change in plainly(draw).items()
                                               if token < logits.shape[1]), strict=True)
    adjust = Adjust(torch.tensor(rows), torch.tensor(tokens), torch.tensor(repetitions), torch.tensor(offsets))
    result, old = logits.clone(), logits[adjust.row, adjust.token]
    result[adjust.row, adjust.token] = torch.where(old > 0, old / adjust.repetition,
                                                   old * adjust.repetition) + adjust.offset
    return result


def changed(backend: str, logits: Tensor, sampling: Sampling) -> Tensor:
    """The logits from which a backend draws."""
    if backend == "reference":
        from deltic.ops.reference import apply_adjust

        return apply_adjust(logits, sampling.adjust)
    given = logits.clone()
    OPS[backend].sample(given, sampling)
    return given


def random_params(rng: random.Random, vocabulary: int) -> SamplingParams:
    def maybe(value: Any, neutral: Any) -> Any:
        return value if rng.random() < 0.5 else neutral

    bias = {rng.randrange(vocabulary): rng.choice([-100, 100, rng.uniform(-5, 5)]) for _ in range(rng.choice([1, 40]))}
    return SamplingParams(
        repetition_penalty=maybe(rng.choice([1.0, 1.1, 0.7]), None), presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0), logit_bias=maybe(bias, {}),
        min_tokens=maybe(rng.randrange(12), 0), temperature=0.0, n=rng.choice([1, 3]))


def story(seed: int) -> Iterator[list[SampleRow]]:
    """The draws of the steps of some sequences, which grow by one token or by several, rest, or fork."""
    rng = random.Random(seed)
    sequences: list[Sequence] = []
    for _ in range(4):
        params = random_params(rng, VOCABULARY)
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 60))]
        eos = rng.sample(range(VOCABULARY), rng.choice([0, 1, 5]))
        sequences += choices_of(params, prompt, eos)
    yield [SampleRow(sequence) for sequence in sequences]
    for _ in range(14):
        draws = []
        for sequence in rng.sample(sequences, rng.randrange(1, len(sequences) + 1)):
            for _ in range(rng.choice([0, 1, 1, 1, 2, 5])):
                sequence.append(rng.choice([rng.randrange(VOCABULARY), *sequence.tokens[-3:], *sequence.eos]))
            drafts = tuple(rng.choice([rng.randrange(VOCABULARY), sequence.tokens[0], *sequence.eos])
                            for _ in range(rng.choice([0, 0, 3])))
            draws += [SampleRow(sequence, drafts[:count]) for count in range(len(drafts) + 1)]
        yield draws


@every_backend
@pytest.mark.parametrize("seed", range(6))
def test_logits_are_what_all_tokens_so_far_make_of_them(seed: int, backend: str) -> None:
    for draws in story(seed):
        for vocabulary in (VOCABULARY, VOCABULARY - 100):
            logits = torch.randn(len(draws), vocabulary, generator=torch.Generator().manual_seed(seed))
            sampling = sampling_of(draws, CPU, vocabulary)
            if not any(map(plainly, draws)):
                assert sampling.adjust is None
                continue
            assert torch.equal(changed(backend, logits, sampling), expected(draws, logits))


def test_nothing_wanted_is_nothing_kept() -> None:
    sequence = sequence_of(SamplingParams(repetition_penalty=1.0, min_tokens=4), [1, 2])
    assert sampling_of([SampleRow(sequence)], CPU, VOCABULARY).adjust is None and sequence.sampler.penalties is None
    ends = sequence_of(SamplingParams(min_tokens=1), [1, 2], eos=[7])
    assert sampling_of([SampleRow(ends)], CPU, VOCABULARY).adjust is not None
    ends.append(3)
    assert sampling_of([SampleRow(ends)], CPU, VOCABULARY).adjust is None


# Cost


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each making of tensors looked at."""
    looked: list[int] = []
    original = Penalties._write

    def write(self: Penalties, sequence: Sequence, offset: Tensor, tokens: set[int]) -> None:
        looked.append(len(tokens))
        original(self, sequence, offset, tokens)

    monkeypatch.setattr(Penalties, "_write", write)
    return looked


@pytest.mark.parametrize("vocabulary", [4096, 248_320])
def test_step_cost_depends_on_new_tokens_only(vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a context of 100,000 tokens, with a bias of half of the vocabulary, and with drafts: milliseconds for 200
    draws, where looking at all tokens would take a minute."""
    looked = counted(monkeypatch)
    params = SamplingParams(repetition_penalty=1.1, presence_penalty=1.0, frequency_penalty=0.1, temperature=0.0,
                            logit_bias=dict.fromkeys(range(0, vocabulary, 2), 0.5))
    sequence = sequence_of(params, numbers(1, 100_000, vocabulary))
    sampling_of([SampleRow(sequence)], CPU, vocabulary)
    del looked[:]
    began = time.perf_counter()
    for step in range(50):
        sequence.append(step)
        sampling_of([SampleRow(sequence, (5, 6, 7)[:count]) for count in range(4)], CPU, vocabulary)
    assert time.perf_counter() - began < 1.0
    assert looked == [1] * 50


def test_choices_share_what_they_have_in_common() -> None:
    """A prompt of 100,000 tokens is looked at once, and its tables are there once until the choices differ."""
    params = SamplingParams(repetition_penalty=1.1, logit_bias={3: -100}, n=64)
    prompt = numbers(1, 100_000, 50_000)
    sequences = choices_of(params, prompt)
    sampling = sampling_of([SampleRow(sequence) for sequence in sequences], CPU, 50_000)
    assert sampling.adjust is not None
    assert len({table.repetition.data_ptr() for table in sampling.adjust.tables}) == 1  # type: ignore[union-attr]
    for choice, sequence in enumerate(sequences[:3]):
        sequence.append(choice + 50)
    again = sampling_of([SampleRow(sequence) for sequence in sequences[:4]], CPU, 50_000).adjust
    assert again is not None
    for row, table in enumerate(again.tables):
        assert table.repetition is not None and table.offset is not None
        met = {*prompt, row + 50} if row < 3 else {*prompt}
        assert set((table.repetition != 1).nonzero()[:, 0].tolist()) == met
        assert table.offset[3] == -math.inf


# Nothing allowed


def bans(vocabulary: int, but: List[int] = ()) -> dict[int, float]:
    return dict.fromkeys(set(range(vocabulary)) - set(but), -100.0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_that_forbids_every_token_fails_alone(temperature: float) -> None:
    runtime = odd_runtime()
    vocabulary, prompt = runtime.config.vocab_size, numbers(1, 20, runtime.config.vocab_size)
    alone = drain_one(runtime, greedy(prompt, 8, "n"))
    engine = Engine(odd_runtime())
    sick = SamplingParams(temperature=temperature, max_tokens=5, logit_bias=bans(vocabulary), n=2, seed=1)
    for request in (greedy(prompt, 8, "n"), EngineRequest("sick", prompt, sick)):
        engine.add(request)
    answers = drain(engine)
    assert [event.token for event in answers["n", 0].events] == alone
    for choice in range(2):
        last = answers["sick", choice].last
        assert last.finish == "error" and "no token is left to choose from" in str(last.error)
        assert [event.token for event in answers["sick", choice].events] == [None]


def drain_one(runtime: Any, request: EngineRequest) -> list[int | None]:
    engine = Engine(runtime)
    engine.add(request)
    return [event.token for event in drain(engine)[request.id, 0].events]


def test_the_only_token_left_may_be_forbidden_by_the_minimum_length() -> None:
    runtime = odd_runtime()
    vocabulary, prompt = runtime.config.vocab_size, numbers(1, 20, runtime.config.vocab_size)
    params = SamplingParams(temperature=0.0, max_tokens=5, logit_bias=bans(vocabulary, [7]), stop_token_ids=(7,),
                            ignore_eos=True)
    assert drain_one(runtime, EngineRequest("a", prompt, params)) == [7]
    engine = Engine(runtime)
    engine.add(EngineRequest("b", prompt, replace(params, min_tokens=2)))
    assert "min_tokens" in str(drain(engine)["b", 0].last.error)


@every_backend
def test_rows_without_a_possible_token_are_told(backend: str) -> None:
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(1))
    sequences = [sequence_of(SamplingParams(temperature=1.0, logit_bias=bans(20, but)), [1]) for but in ([], [4], [])]
    for top_k in (0, 5):
        for sequence in sequences:
            sequence.sampling = replace(sequence.sampling, top_k=top_k)
        found = OPS[backend].sample(logits.clone(), sampling_of([SampleRow(s) for s in sequences], CPU, 20))
        assert found.possible.tolist() == [False, True, False] and found.healthy.all()
        assert found.tokens[1] == 4 and ((found.tokens >= 0) & (found.tokens < 20)).all()
