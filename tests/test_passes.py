"""`--batch-invariant`: a step's tokens are computed one by one, with the same answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from reuse_cases import runtime_of
from support import Answers, drain, greedy, numbers, odd_runtime, qwen3_runtime, take

from deltic import LLM, Session
from deltic.cache.operations import CopySlot
from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import load
from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.errors import ConfigError, RequestError
from deltic.params import Embed, EngineRequest
from deltic.runner import launch
from deltic.runner.input_batch import FEW_ROWS, build, has_bucket
from deltic.runner.launch import passes
from deltic.runner.model_runner import ModelRunner

MODELS = {"odd": odd_runtime, "qwen3": qwen3_runtime}
PAGES = (3, 4, 5)


def test_rows_become_single_tokens() -> None:
    rows = (
        PlannedRow((7, 8, 9), 14, PAGES, 1, 2, target=5, checkpoints=((16, 6), (17, 8)), rotary=-2),
        PlannedRow((4,), 30, PAGES, 2, 1),
        PlannedRow((1, 2), 0, PAGES, 3, 0),
    )
    found = list(passes(rows))
    assert [part.rows for part in found] == [
        (
            PlannedRow((7,), 14, PAGES, 1, 1, target=5, rotary=-2),
            PlannedRow((4,), 30, PAGES, 2, 1),
            PlannedRow((1,), 0, PAGES, 3, 1),
        ),
        (PlannedRow((8,), 15, PAGES, 5, 1, target=5, rotary=-2), PlannedRow((2,), 1, PAGES, 3, 1)),
        (PlannedRow((9,), 16, PAGES, 5, 1, target=5, rotary=-2),),
    ]
    assert [part.kept for part in found] == [((1, 2),), ((0, 0),), ((0, 1),)]
    assert [part.copies for part in found] == [(), (CopySlot(5, 6),), (CopySlot(5, 8),)]


def test_positions_go_with_their_tokens() -> None:
    row = PlannedRow((7, 8), 14, PAGES, 1, 1, rotary=((3, 4), (5, 6), (7, 8)))
    assert [part.rows[0].rotary for part in passes([row])] == [((3,), (5,), (7,)), ((4,), (6,), (8,))]


def test_known_and_unknown_tokens_are_apart_and_all_have_buckets() -> None:
    rows = [
        PlannedRow((-1,), 9, PAGES, n, 1, drawn=n) if n % 3 else PlannedRow((n, n), 9, PAGES, n, 1) for n in range(60)
    ]
    found = list(passes(rows))
    assert [len(part.rows) for part in found] == [16, 16, 8, 16, 4, 16, 4]
    assert all(len(part.rows) <= FEW_ROWS and has_bucket(StepPlan(part.rows)) for part in found)
    assert sorted(wanted for part in found for _, wanted in part.kept) == list(range(60))


def test_no_rows() -> None:
    assert list(passes([])) == []


# Through the engine


def invariant(model: ModelRunner, **limits: Any) -> ModelRunner:
    found = runtime_of(model, **limits)
    return replace(found, options=replace(found.options, batch_invariant=True, speculate="auto"))


def tell(engine: Engine, requests: list[EngineRequest]) -> Answers:
    for request in requests[:2]:
        engine.add(request)
    answers = Answers()
    for request in requests[2:]:
        for _ in range(2):
            take(answers, engine.step())
        engine.add(request)
    drain(engine, answers, limit=4000)
    engine.check()
    return answers


def mixed(vocabulary: int) -> list[EngineRequest]:
    """Long and short, greedy and drawn, with choices, scores, and one that goes on from another's prompt."""
    first = greedy(numbers(1, 90, vocabulary), 12, "a")
    return [first, greedy(numbers(2, 3, vocabulary), 20, "b", temperature=0.8, seed=2),
            greedy(numbers(3, 40, vocabulary), 9, "c", n=3, temperature=0.7, seed=3),
            greedy([*first.ids, *numbers(4, 21, vocabulary)], 8, "d", logprobs=2),
            greedy(numbers(5, 37, vocabulary), 5, "e", prompt_logprobs=1)]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_answers_are_the_same(name: str, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS[name]()
    requests = mixed(model.config.vocab_size)
    wanted = tell(Engine(runtime_of(model), overlap=ahead), requests)
    seen = list[StepPlan]()

    def watched(plan: StepPlan, *args: Any, **options: Any) -> Any:
        seen.append(plan)
        return build(plan, *args, **options)

    monkeypatch.setattr(launch, "build", watched)
    found = tell(Engine(invariant(model), overlap=ahead), requests)
    assert found.keys() == wanted.keys()
    for key, answer in found.items():
        assert answer.events == wanted[key].events, key
    assert seen and all(has_bucket(plan) and len(plan.rows) <= FEW_ROWS for plan in seen)


def test_what_it_is_not_for() -> None:
    engine = Engine(invariant(odd_runtime()))
    with pytest.raises(RequestError, match="was loaded with batch_invariant") as caught:
        engine.add(EngineRequest("a", (1, 2, 3), Embed()))
    assert caught.value.field == "output"
    for options, name in (({"speculate": "mtp"}, "speculate"), ({"mmproj": "a.gguf"}, "mmproj"),
                          ({"device": "cuda", "expert_cap": 3}, "expert_compute")):
        with pytest.raises(ConfigError, match="batch_invariant") as refused:
            EngineConfig(batch_invariant=True, **options)  # type: ignore[arg-type]
        assert refused.value.option == name
    with pytest.raises(ConfigError, match="a session computes what it is given at once"):
        Session(batch_invariant=True)
    with pytest.raises(ConfigError, match="leave it out with a model of vectors"):
        load(None, EngineConfig(batch_invariant=True), vectors=True)
    options = EngineConfig(batch_invariant=True, device="cuda", expert_cap=3, expert_compute="card")
    assert options.speculation is None and not options.vision and options.token_budget == 64


def test_a_conversation() -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    told = []
    for alone in (False, True):
        with LLM("tiny", memory="16MiB", batch_invariant=alone) as llm:
            told.append(llm.chat(question).text)
    assert told[0] == told[1] and "Paris" in told[0]
