"""L6: for equal prompt ids the answer does not depend on batching, chunking, preemption or neighbours.

Each case serves one observed request through the engine, twice: once with its tokens dictated by the reference (one
token at a time through a Session), to compare the logits of every draw; once free, to compare the tokens. The pools
are full of NaN at the start, and every case asserts that what it is about has really happened.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from support import (
    DEVICE,
    RUNTIMES,
    Answers,
    Forcing,
    Mismatch,
    Reference,
    Watch,
    drain,
    lively,
    moe_shape,
    numbers,
    odd_runtime,
    odd_shape,
    pairs,
    pairwise,
    reference,
    same_logits,
    same_tokens,
    session_over,
    small_runtime,
    split_runtime,
    take,
    with_sample,
)
from torch import Tensor

from deltic.config import EngineConfig, RopeConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import RandomModel, load
from deltic.loader.dummy import random_weights
from deltic.model.decoder import build as build_decoder
from deltic.ops.cpu import missing
from deltic.ops.types import Batch
from deltic.params import PAGE, EngineRequest, SamplingParams
from deltic.runner.input_batch import build
from deltic.runner.model_runner import ModelRunner

PROMPT, ANSWER = 83, 40
WHOLE = 512
BUDGETS = (1, 7, 64, WHOLE)
BATCHES = (1, 3, 8)
SEED = 77
NEIGHBOURS = ((30, 130), (20, 120), (70, 60), (27, 100), (24, 120), (15, 130), (12, 140))
"""Tokens of each neighbour's prompt and answer."""
FREE = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, max_tokens=ANSWER, ignore_eos=True, seed=SEED)


@cache
def packed_runtime(kv_dtype: str, head_dim: int) -> ModelRunner:
    """The odd shape in float32. head_dim: a power of two for K/V in four bits."""
    model = RandomModel(shape=odd_shape(head_dim=head_dim), initializer_range=0.1)
    return load(model, EngineConfig(dtype="float32", kv_dtype=kv_dtype, memory="8MiB", max_batch=8, threads=1))


@cache
def next_runtime() -> ModelRunner:
    """A Qwen3-Next beyond the context that it was trained with, in float32."""
    shape = moe_shape(architecture="qwen3_next", rope=RopeConfig(1e4, 6, ()), max_position_embeddings=64)
    model = RandomModel(shape=shape, initializer_range=0.1)
    return load(model, EngineConfig(dtype="float32", rope_scaling="yarn:4", memory="8MiB", max_batch=8, threads=1,
                                    device=DEVICE))


SPLIT = {f"{tp} devices": partial(split_runtime, tp) for tp in (2, 4)} if DEVICE == "cpu" else {}
"""A model that is split. The reference has it on one device."""
MODELS = {**RUNTIMES, "qwen3 next, yarn": next_runtime, **SPLIT}
if DEVICE == "cpu" and not missing():  # torch ops round in another order, which may move a number to another level
    MODELS |= {kv: partial(packed_runtime, kv, dim) for kv, dim in (("int4", 16), ("int8", 10))}


@dataclass(frozen=True)
class Case:
    """One point of the grid. budget: tokens a step. batch: requests at once, the observed one among them. squeezed:
    the pool is too small for all. aborted: a neighbour is aborted on the way."""

    model: str
    budget: int
    batch: int
    squeezed: bool
    aborted: bool

    def __str__(self) -> str:
        words = [self.model, f"budget {self.budget}", f"batch {self.batch}"]
        return ", ".join(words + ["squeezed"] * self.squeezed + ["aborted"] * self.aborted)


def sensible(case: Case) -> bool:
    """Someone alone is neither squeezed nor next to anybody."""
    return case.batch > 1 or not (case.squeezed or case.aborted)


AXES: tuple[tuple[object, ...], ...] = (tuple(MODELS), BUDGETS, BATCHES, (False, True), (False, True))
GRID = [case for values in itertools.product(*AXES) if sensible(case := Case(*values))]  # type: ignore[arg-type]


def axes(case: Case) -> tuple[object, ...]:
    return case.model, case.budget, case.batch, case.squeezed, case.aborted


HYBRID = list(pairwise([case for case in GRID if case.model in ("odd", "embedded")], axes))
FEW = [*HYBRID, *pairwise(GRID, axes, HYBRID)]
"""Every pair twice over where layers are recurrent: the model that has none, the one with experts, the split ones and
those with packed K/V add only pairs of their own."""
REST = [pytest.param(case, marks=pytest.mark.slow) for case in GRID if case not in FEW]


def test_the_few_cases_hold_every_pair() -> None:
    assert set().union(*(pairs(axes(c)) for c in FEW)) == set().union(*(pairs(axes(c)) for c in GRID))
    assert len(FEW) < len(GRID) / 2


def on_one_device(model: str) -> ModelRunner:
    return split_runtime(1) if model in SPLIT else MODELS[model]()


@cache
def expected(model: str, drawn: bool) -> Reference:
    runtime = on_one_device(model)
    answer = reference(runtime, numbers(5, PROMPT, runtime.config.vocab_size), ANSWER, DRAWN if drawn else FREE)
    if model != "embedded":
        lively(answer.tokens)
    return answer


def neighbours(case: Case, runtime: ModelRunner) -> list[EngineRequest]:
    """Requests of other lengths that overlap with the observed one at every budget."""
    vocabulary = runtime.config.vocab_size
    return [EngineRequest(f"n{i}", numbers(50 + i, length, vocabulary),
                    SamplingParams(temperature=1.0, max_tokens=answer, ignore_eos=True, seed=i))
            for i, (length, answer) in enumerate(NEIGHBOURS[:case.batch - 1])]


def squeezed_pages(requests: list[EngineRequest]) -> int:
    """Enough for all prompts, not for all answers."""
    return sum(-(-len(request.prompt) // PAGE) for request in requests) + 3


@dataclass
class Run:
    """What came of a case. preempted: the observed request was sent back to wait."""

    answers: Answers
    chunks: list[tuple[int, ...]]
    preempted: bool

    @property
    def tokens(self) -> list[int]:
        return self.answers[("seen", 0)].tokens


@dataclass
class Story:
    """A case as it runs."""

    case: Case
    engine: Engine
    answers: Answers
    preempted: bool = False
    started: bool = False
    aborted: bool = False

    def step(self) -> None:
        take(self.answers, self.engine.step())
        self.engine.check()
        scheduler = self.engine.scheduler
        self.preempted |= self.started and any(s.request.id == "seen" for s in scheduler.waiting)
        self.started |= any(s.request.id == "seen" for s in scheduler.running)

    def abort_neighbours(self) -> None:
        """One while the observed request is read, another while it answers, or when it has been preempted."""
        got = len(self.answers[("seen", 0)].tokens) if ("seen", 0) in self.answers else 0
        if self.preempted if self.case.squeezed else got == 3:
            self.abort_one()
        elif self.started and not got and not self.case.squeezed and self.case.batch == 8:
            self.engine.abort("n6")

    def abort_one(self) -> None:
        running = [s.request.id for s in self.engine.scheduler.running if s.request.id != "seen"]
        if not self.aborted:
            self.aborted = True
            self.engine.abort(running[-1])


def serve(case: Case, runtime: ModelRunner, params: SamplingParams, prompt: tuple[int, ...]) -> Run:
    """Serve the observed request among its neighbours; last of them, so first to be preempted, in a small pool."""
    others = neighbours(case, runtime)
    seen = EngineRequest("seen", prompt, params)
    requests = [*others, seen] if case.squeezed else [*others[:1], seen, *others[1:]]
    watch = Watch(small_runtime(runtime, batch=case.batch, budget=case.budget, context=160,
                                pages=squeezed_pages(requests) if case.squeezed else None))
    story = Story(case, Engine(watch), {})  # type: ignore[arg-type]
    for request in requests:
        story.engine.add(request)
    while story.engine.has_work:
        if case.aborted:
            story.abort_neighbours()
        story.step()
    drain(story.engine, story.answers)
    return Run(story.answers, watch.chunks, story.preempted)


def check_circumstances(case: Case, run: Run) -> None:
    """What the case is about has really happened."""
    longest = max(map(max, run.chunks))
    assert longest <= case.budget
    if case.budget == WHOLE or case.batch == 1:
        assert longest >= min(PROMPT, case.budget)
    else:
        assert max(map(sum, run.chunks)) >= case.budget and longest >= min(case.budget // 2, 4)  # prompts share it
    assert max(map(len, run.chunks)) >= min(case.batch, 2), "the request was alone"
    assert run.preempted == case.squeezed
    ends = [run.answers[(f"n{i}", 0)].last.finish for i in range(case.batch - 1)]
    assert ("abort" in ends) == case.aborted and set(ends) <= {"abort", "length"}
    if case.batch == 8 and case.budget >= 64 and not case.aborted and not case.squeezed:
        assert max(map(len, run.chunks)) == 8


@pytest.mark.parametrize("case", [*FEW, *REST], ids=str)
def test_l6_same_logits_when_the_reference_dictates(case: Case) -> None:
    runtime, answer = MODELS[case.model](), expected(case.model, drawn=False)
    forcing = Forcing(runtime)
    forcing.force(SEED, answer)
    run = serve(case, with_sample(runtime, forcing.sample), DRAWN, answer.prompt)
    check_circumstances(case, run)
    assert run.tokens == list(answer.tokens)
    worst = same_logits(answer.logits, forcing.recorded(SEED), decided=0.95 if case.model != "embedded" else 0.0)
    assert case.model not in SPLIT or missing() or worst == 0
    print(f"{case}: {worst:.2g}")


def free_runs() -> Iterator[Any]:
    """All cases greedy and drawn; of every third of the few, whose logits are all compared above, greedy and drawn ones
    in turn, and the slower model's greedy ones."""
    for case, (name, params) in itertools.product(GRID, (("greedy", FREE), ("drawn", DRAWN))):
        drawn = case.model != "embedded" and case in FEW[1::2]
        quick = case in FEW[::3] and (params is DRAWN) == drawn
        yield pytest.param(case, params, marks=() if quick else pytest.mark.slow, id=f"{name}, {case}")


@pytest.mark.parametrize(("case", "params"), list(free_runs()))
def test_l6_same_tokens(case: Case, params: SamplingParams) -> None:
    runtime, answer = MODELS[case.model](), expected(case.model, drawn=params is DRAWN)
    run = serve(case, runtime, params, answer.prompt)
    check_circumstances(case, run)
    same_tokens(answer, run.tokens, params)


@pytest.mark.parametrize("model", [
    pytest.param(model, marks=pytest.mark.slow) if model == "embedded" else model for model in MODELS])
def test_l6_200_tokens(model: str) -> None:
    """The rule at its full length: 200 tokens, nearly all decided, at least 100 distinct on the random model."""
    runtime = MODELS[model]()
    answer = reference(on_one_device(model), numbers(6, 30, runtime.config.vocab_size), 200)
    forcing = Forcing(runtime)
    forcing.force(SEED, answer)
    params = SamplingParams(temperature=1.0, max_tokens=200, ignore_eos=True, seed=SEED)
    engine = Engine(small_runtime(with_sample(runtime, forcing.sample), batch=2, budget=24))
    engine.add(EngineRequest("other", numbers(7, 50, 300), replace(params, seed=1, max_tokens=300)))
    engine.add(EngineRequest("seen", answer.prompt, params))
    drain(engine)
    same_logits(answer.logits, forcing.recorded(SEED), decided=0.95 if model != "embedded" else 0.0)
    if model == "odd":
        lively(answer.tokens)


TAU_BFLOAT16 = 0.3
"""Largest difference of logits between two paths of the random model in bfloat16; their deviation is 0.63."""


def half_and_exact(*ops: str) -> tuple[ModelRunner, ModelRunner]:
    """The odd model in bfloat16, and the same weights in float32."""
    shape = odd_shape()
    half = load(RandomModel(shape=shape, initializer_range=0.1),
                EngineConfig(dtype="bfloat16", memory="8MiB", ops=ops))
    rounded = random_weights(shape, "bfloat16", initializer_range=0.1)
    exact = build_decoder(shape, [{name: tensor.float() for name, tensor in rounded.items()}],
                          half.decoder.ops, torch.float32)
    return half, replace(odd_runtime(), decoder=exact)


@pytest.mark.skipif(DEVICE != "cpu", reason="about the ops of a CPU")
@pytest.mark.parametrize("ops", ["cpu", "torch"])
@pytest.mark.parametrize("budget", [
    pytest.param(7, marks=pytest.mark.slow), 64, pytest.param(WHOLE, marks=pytest.mark.slow)])
def test_l6_in_bfloat16_paths_differ_by_no_more_than_their_rounding(budget: int, ops: str) -> None:
    """Two paths may differ as two independent roundings do: by sqrt(2) of one path's own RMS error. The compiled
    kernels sum in one order, and do not differ at all."""
    half, exact = half_and_exact(ops)
    answer = reference(half, numbers(5, PROMPT, 509), ANSWER)
    whole = (*answer.prompt, *answer.tokens[:-1])
    ideal = session_over(exact, budget=WHOLE).prefill(whole, all_logits=True)[PROMPT - 1:]
    forcing = Forcing(half)
    forcing.force(SEED, answer)
    serve(Case("odd", budget, 3, False, False), with_sample(half, forcing.sample), DRAWN, answer.prompt)
    same_logits(answer.logits, forcing.recorded(SEED), TAU_BFLOAT16)
    error, difference = ((logits - answer.logits).square().mean().sqrt() for logits in (ideal, forcing.recorded(SEED)))
    if ops == "cpu" and not missing():
        assert float(difference) == 0 < float(error)
    else:
        assert 0 < float(difference) <= 1.42 * float(error)


def test_l6_drawn_tokens_differ_from_greedy_ones() -> None:
    """Otherwise the drawn cases would show nothing new."""
    greedy, drawn = expected("odd", drawn=False).tokens, expected("odd", drawn=True).tokens
    assert sum(a != b for a, b in zip(greedy, drawn, strict=True)) > ANSWER / 2


# The comparison must notice an engine that mixes its sequences


def recorded_logits() -> Tensor:
    """Of the observed request, between two neighbours."""
    runtime, answer = MODELS["odd"](), expected("odd", drawn=False)
    forcing = Forcing(runtime)
    forcing.force(SEED, answer)
    serve(Case("odd", 7, 3, False, False), with_sample(runtime, forcing.sample), DRAWN, answer.prompt)
    return forcing.recorded(SEED)


def stale_cursor(batch: Batch) -> Batch:
    """Every decoding row's rotary position is the shortest one's."""
    singles = batch.layout.decode_rows
    if singles > 1:
        batch.positions[:, :singles] = batch.done[:singles].min()
    return batch


def swapped_states(batch: Batch) -> Batch:
    """Decoding rows read each other's states."""
    if batch.layout.decode_rows == batch.layout.rows == 3:
        batch.source.copy_(batch.source.roll(1))  # in place: a bucket has the same numbers
        return replace(batch, span=None)
    return batch


def wrong_page(batch: Batch) -> Batch:
    """Decoding rows read each other's first page."""
    if batch.layout.decode_rows == batch.layout.rows > 1:
        batch.pages[:, 0] = batch.pages[:, 0].roll(1)
    return batch


@pytest.mark.parametrize("bug", [stale_cursor, swapped_states, wrong_page])
def test_l6_the_comparison_notices(bug: Callable[[Batch], Batch], monkeypatch: pytest.MonkeyPatch) -> None:
    answer = expected("odd", drawn=False)
    same_logits(answer.logits, recorded_logits())
    monkeypatch.setattr("deltic.runner.launch.build", lambda *arguments, **options: bug(build(*arguments, **options)))
    with pytest.raises(Mismatch):
        same_logits(answer.logits, recorded_logits())
