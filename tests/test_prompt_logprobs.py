"""Probabilities of a prompt's tokens: those of a plain forward, whatever runs beside it and whatever is known of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import (
    RUNTIMES,
    TAU,
    drain,
    embedded_runtime,
    numbers,
    odd_runtime,
    rounded,
    same_scores,
    serve,
    session_over,
    small_runtime,
    stepwise_logits,
)
from test_server_harness import USER, Served, each, serving, tiny

from deltic import SamplingParams
from deltic.engine.engine import Engine
from deltic.params import EngineRequest, TokenLogprobs
from deltic.runner.model_runner import ModelRunner
from deltic.runner.sampling import scores_of

Found = tuple[TokenLogprobs, ...]


def asking(id: str, prompt: tuple[int, ...], top: int = 2, **more: Any) -> EngineRequest:
    return EngineRequest(
        id, prompt, SamplingParams(**{"max_tokens": 3, "temperature": 0.0, "prompt_logprobs": top} | more)
    )


def found_in(answers: Any, id: str = "x") -> Found:
    """What the first event of the first choice says, and no other."""
    first, *others = answers[id, 0].events
    assert first.prompt is not None and all(event.prompt is None for event in others)
    return first.prompt


def alone(runtime: ModelRunner, prompt: tuple[int, ...], **more: Any) -> Found:
    return found_in(serve(small_runtime(runtime), [asking("x", prompt, **more)]))


@each("name", RUNTIMES)
def test_prompt_logprobs_equal_a_plain_forward(name: str) -> None:
    runtime = RUNTIMES[name]()
    for seed, length in enumerate((1, 2, 33, 100)):
        prompt = numbers(seed, length, runtime.config.vocab_size)
        found = alone(runtime, prompt, top=3)
        chances = stepwise_logits(session_over(runtime, batch=1), prompt).double().log_softmax(-1)
        assert len(found) == length - 1
        for score, row, token in zip(found, chances, prompt[1:], strict=False):
            best = row.topk(3)
            assert abs(score.token - row[token]) < 2 * TAU
            assert torch.allclose(torch.tensor([each for _, each in score.top]).double(), best.values, atol=2 * TAU)
            low, high = (int((row > row[token] + margin).sum()) + 1 for margin in (2 * TAU, -2 * TAU))
            assert low <= score.rank <= high


def test_prompt_logprobs_are_bit_equal_in_batches_chunks_and_with_cache() -> None:
    runtime = odd_runtime()
    prompt = numbers(5, 150, runtime.config.vocab_size)
    expected, plain = alone(runtime, prompt), serve(small_runtime(runtime), [EngineRequest(
        "x", prompt, SamplingParams(max_tokens=3, temperature=0.0))])
    for budget in (5, 40, 512):
        shared = small_runtime(runtime, budget=budget)
        others = [asking(str(seed), numbers(seed, 20 + 30 * seed, runtime.config.vocab_size)) for seed in range(4)]
        neighbours = [EngineRequest(f"n{seed}", numbers(9 + seed, 60, runtime.config.vocab_size)) for seed in range(2)]
        neighbours = [EngineRequest(one.id, one.prompt, SamplingParams(max_tokens=40, temperature=1.0, seed=1))
                      for one in neighbours]
        for _ in range(2):  # the second time all of the prompt is known
            answers = serve(shared, [*neighbours, *others, asking("x", prompt)])
            same_scores(expected, found_in(answers))
            assert answers["x", 0].tokens == plain["x", 0].tokens
            assert answers["x", 0].last.usage.cached_tokens == 0  # type: ignore[union-attr]
        # and others know it afterwards
        known = serve(shared, [EngineRequest("y", prompt, SamplingParams(max_tokens=3, temperature=0.0))])["y", 0]
        assert known.tokens == plain["x", 0].tokens and known.last.usage.cached_tokens > 100  # type: ignore


def test_preempted_request_keeps_its_prompt_logprobs() -> None:
    runtime = odd_runtime()
    prompts = [numbers(seed, 90, runtime.config.vocab_size) for seed in range(4)]
    expected = [alone(runtime, prompt, max_tokens=60) for prompt in prompts]
    tight = small_runtime(runtime, batch=4, budget=24, pages=14, context=224)
    engine = Engine(tight)
    for index, prompt in enumerate(prompts):
        engine.add(asking(str(index), prompt, max_tokens=60))
    answers = drain(engine)
    assert engine.scheduler.preemptions > 0, "the test has not tested it"
    for index in range(4):
        same_scores(expected[index], found_in(answers, str(index)))
    # paused in the middle of its prompt
    engine = Engine(small_runtime(runtime, budget=24))
    engine.add(asking("x", prompts[0], max_tokens=60))
    engine.step()
    engine.step()
    engine.pause("x")
    assert not engine.step()
    engine.resume("x")
    same_scores(expected[0], found_in(drain(engine)))


def test_prompt_logprobs_with_several_choices_and_without_tokens() -> None:
    runtime = odd_runtime()
    prompt = numbers(5, 70, runtime.config.vocab_size)
    answers = serve(small_runtime(runtime), [asking("x", prompt, n=3, temperature=1.0, seed=3)])
    same_scores(alone(runtime, prompt), found_in(answers))
    assert all(event.prompt is None for choice in (1, 2) for event in answers["x", choice].events)
    event, = serve(small_runtime(runtime), [asking("x", prompt, max_tokens=0)])["x", 0].events
    assert event.prompt and event.token is None and event.finish == "length"
    same_scores(alone(runtime, prompt), event.prompt)


def test_large_prompt_logprobs_do_not_block_others() -> None:
    """However long the prompt, a step scores but a few tokens, and who came later is read beside it."""
    runtime = embedded_runtime()
    engine = Engine(small_runtime(runtime, budget=64))
    for index in range(3):
        engine.add(asking(f"large{index}", numbers(index, 480, runtime.config.vocab_size), top=20, max_tokens=1))
    for index in range(3):
        engine.add(EngineRequest(str(index), numbers(7 + index, 12, runtime.config.vocab_size),
                           SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)))
    plans, plan = [], engine.scheduler.schedule
    engine.scheduler.schedule = lambda: plans.append(plan()) or plans[-1]  # type: ignore
    answers: Any = {}
    for _ in range(12):
        for event in engine.step():
            answers.setdefault(event.request, []).append(event)
    assert all(answers[str(index)][-1].finish for index in range(3)), "they wait for the large ones"
    drain(engine)
    scored = [sum(row.scored for row in found.rows) for found, _ in plans]
    assert max(scored) <= 32 and sum(scored) == 3 * 479


def test_nan_logits_fail_the_request() -> None:
    runtime = small_runtime(odd_runtime())
    engine = Engine(runtime)
    prompt = numbers(5, 70, runtime.config.vocab_size)
    engine.add(asking("x", prompt))
    run = engine.launcher._runtime.run

    class Broken:
        def __getattr__(self, name: str) -> Any:
            return getattr(runtime, name)

        def run(self, batch: Any) -> Any:
            return run(batch).fill_(float("nan"))

    engine.launcher._runtime = Broken()  # type: ignore[assignment]
    last = drain(engine)["x", 0].last
    assert last.finish == "error" and "NaN" in (last.error or "")


# On the wire


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(tiny(), drain_seconds=0.2) as running:
        yield running


def reference(ids: list[int]) -> torch.Tensor:
    """The log probabilities [n, V] after each token, from a session of the same model."""
    return stepwise_logits(session_over(tiny().runtime, batch=1), ids).double().log_softmax(-1)


@each("text", ["Once upon a time, there was a cat.", "größer 日本 🙂 as", "x"])
@each("as_ids", [False, True])
def test_echo_with_logprobs_for_evaluations(served: Served, text: str, as_ids: bool) -> None:
    ids = list(tiny().chat_processor.tokenizer.encode(text))
    spell = tiny().chat_processor.tokenizer.token_bytes
    answer = served.post("/v1/completions", prompt=ids if as_ids else text, temperature=0, max_tokens=1, logprobs=1,
                         echo=True, seed=1234).json()
    choice, chances = answer["choices"][0], reference(ids)
    found = choice["logprobs"]
    assert choice["text"].startswith(text) and len(found["tokens"]) == len(ids) + 1 == len(found["text_offset"])
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    for place, token in enumerate(ids[1:], 1):
        assert abs(found["token_logprobs"][place] - chances[place - 1, token]) < 2 * TAU
        (_, best), = found["top_logprobs"][place].items()
        assert abs(best - chances[place - 1].max()) < 2 * TAU
    greedy = [max(top, key=top.get) == token for top, token in zip(found["top_logprobs"][1:], found["tokens"][1:])]
    assert greedy[:-1] == [int(row.argmax()) == token for row, token in zip(chances, ids[1:])] and greedy[-1]
    offsets = [len(b"".join(map(spell, ids[:place])).decode(errors="ignore")) for place in range(len(ids) + 1)]
    assert found["text_offset"] == offsets
    bare = served.post("/v1/completions", prompt=ids, max_tokens=0, logprobs=1, echo=True).json()["choices"][0]
    assert bare["logprobs"]["token_logprobs"] == rounded(found["token_logprobs"][:-1]) and bare["text"] == text


def test_several_prompts_and_choices(served: Served) -> None:
    prompts = [[5, 6, 7, 8], [9, 10], [11] * 40]
    asked: dict[str, Any] = {"max_tokens": 2, "logprobs": 2, "echo": True, "seed": 3}
    together = served.post("/v1/completions", prompt=prompts, n=2, **asked).json()["choices"]
    for index, prompt in enumerate(prompts):
        single = served.post("/v1/completions", prompt=prompt, n=2, **asked).json()["choices"]
        for choice in (0, 1):
            assert together[2 * index + choice]["logprobs"] == rounded(single[choice]["logprobs"])
    best = served.post("/v1/completions", prompt=prompts, best_of=3, **asked | {"temperature": 1}).json()["choices"]
    assert [len(choice["logprobs"]["tokens"]) for choice in best] == [6, 4, 42]
    assert [choice["logprobs"]["token_logprobs"][:2] for choice in best] == [
        rounded(choice["logprobs"]["token_logprobs"][:2]) for choice in together[::2]]


def test_prompt_logprobs_as_in_vllm(served: Served) -> None:
    ids = [5, 6, 7, 8]
    chances = reference(ids)
    for top in (0, 3):
        found = served.post("/v1/completions", prompt=ids, max_tokens=1, prompt_logprobs=top).json()["choices"][0]
        assert found["logprobs"] is None
        none, *scores = found["prompt_logprobs"]
        assert none is None and len(scores) == 3
        for row, token, score in zip(chances, ids[1:], scores, strict=False):
            assert abs(score[str(token)]["logprob"] - row[token]) < 2 * TAU
            assert {each["rank"] for each in score.values()} >= {*range(1, top + 1)}
            assert max(top, 1) <= len(score) <= top + 1
            best = min(score.values(), key=lambda each: each["rank"])
            assert top == 0 or abs(best["logprob"] - row.max()) < 2 * TAU
    chat = served.post("/v1/chat/completions", messages=USER, max_tokens=1, prompt_logprobs=1).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"] and chat["prompt_logprobs"][0] is None
    plain = served.post("/v1/chat/completions", messages=USER, max_tokens=1).json()
    assert "prompt_logprobs" not in plain and plain["choices"] == chat["choices"]


def test_prompt_logprobs_from_python() -> None:
    output, = tiny().generate([[5, 6, 7]], SamplingParams(max_tokens=1, prompt_logprobs=1))
    found = output.choices[0].prompt_logprobs
    assert found and len(found) == 2 and found[0].rank >= 1
    assert tiny().generate([[5, 6, 7]], SamplingParams(max_tokens=1))[0].choices[0].prompt_logprobs is None


@each(("path", "fields", "field"), [
    ("completions", {"prompt": "x", "echo": True, "logprobs": 1, "stream": True}, "echo"),
    ("completions", {"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ("completions", {"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs"),
    ("completions", {"prompt": "x", "prompt_logprobs": -1}, "prompt_logprobs"),
    ("completions", {"prompt": "x", "echo": True, "logprobs": 21}, "logprobs"),
    ("chat/completions", {"messages": USER, "prompt_logprobs": True}, "prompt_logprobs"),
    ("chat/completions", {"messages": USER, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
])
def test_what_is_refused(served: Served, path: str, fields: dict[str, Any], field: str) -> None:
    response = served.post(f"/v1/{path}", **fields)
    assert response.status_code == 400 and response.json()["error"]["param"] == field, response.text


def test_limit_of_answer_values() -> None:
    from test_server_harness import limited

    with serving(limited(tiny(), max_answer_values=200)) as served:
        assert served.post("/v1/completions", prompt=[5] * 30, prompt_logprobs=1, max_tokens=1).status_code == 200
        scored = {"echo": True, "logprobs": 1}
        for fields in ({"prompt": [5] * 110, "prompt_logprobs": 1}, {"prompt": [[5] * 60] * 2, **scored},
                       {"prompt": [5] * 50, "n": 3, **scored}):
            response = served.post("/v1/completions", max_tokens=1, **fields)
            assert response.status_code == 400 and "max_answer_values" in response.json()["error"]["message"]
        assert json.loads(served.http.get("/health").content)["requests"] == 0


def test_scores_do_not_depend_on_other_rows() -> None:
    """Logits as bfloat16 has them, of which many are equal."""
    logits = torch.randn(9, 300, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    tokens = [*range(0, 270, 30)]
    found = scores_of(logits, tokens, 5).report()
    for row, token, score in zip(logits, tokens, found, strict=True):
        chances = row.double().log_softmax(-1)
        assert score.token == float(chances[token].float()) and score.rank == 1 + int((row > row[token]).sum())
        assert [probability for _, probability in score.top] == chances.sort(descending=True)[0][:5].float().tolist()
        assert all(float(chances[name].float()) == probability for name, probability in score.top)
    assert [scores_of(logits[i:i + 1], tokens[i:i + 1], 5).report()[0] for i in range(9)] == found
