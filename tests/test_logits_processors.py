"""Logits processors of a caller: what they change, and that nobody else pays for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import odd_shape

from deltic import LLM, RandomModel, SamplingParams, Session
from deltic.errors import GenerationError, RequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
MODEL = RandomModel(shape=odd_shape(), initializer_range=0.1)
PROMPT = [5, 6, 7, 8] * 10


def identity(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits


def only(*ids: int) -> Any:
    def processor(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        found = torch.full_like(logits, -torch.inf)
        found[list(ids)] = logits[list(ids)]
        return found
    return processor


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(MODEL, memory="64MiB", dtype="float32", threads=1, speculate="ngram:3") as model:
        yield model
        model.worker.call(lambda engine: engine.check())


def tokens(llm: LLM, prompt: list[int] = PROMPT, sampling: SamplingParams = GREEDY, **more: Any) -> list[int]:
    return list(llm.generate([prompt], sampling, **more)[0].sound().choices[0].tokens)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(seed=3, max_tokens=10, ignore_eos=True, top_p=0.9),
                                      SamplingParams(temperature=0, max_tokens=10, repetition_penalty=1.3)], ids=str)
def test_a_processor_that_changes_nothing_changes_nothing(llm: LLM, sampling: SamplingParams) -> None:
    plain = tokens(llm, sampling=sampling)
    assert tokens(llm, sampling=sampling, logits_processors=[identity]) == plain


def test_processors_see_tokens_and_logits_one_after_another(llm: LLM) -> None:
    seen, session = list[tuple[list[int], torch.Tensor]](), Session(MODEL, memory="64MiB", threads=1)

    def record(given: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append((given, logits.clone()))
        return logits

    prompt = [9, 8, 7, 3]
    found = tokens(llm, prompt, logits_processors=[record, only(11, 12)])
    assert len(found) == 10 and set(found) <= {11, 12}
    assert [given for given, _ in seen] == [[*prompt, *found[:count]] for count in range(10)]
    logits = session.prefill(prompt)
    for token, (_, raw) in zip(found, seen, strict=True):
        assert raw.dtype == torch.float32 and torch.allclose(raw, logits, atol=1e-3)
        logits = session.step(token)


def test_choices_have_their_processors_too(llm: LLM) -> None:
    for _ in range(2):  # the second time the prompt's end is known
        output, = llm.generate([PROMPT], SamplingParams(n=3, max_tokens=5, seed=1, ignore_eos=True),
                               logits_processors=[only(21, 22, 23), lambda given, logits: logits * 0.5])
        assert all(len(choice.tokens) == 5 and set(choice.tokens) <= {21, 22, 23} for choice in output.choices)
    halved, = llm.generate([PROMPT], SamplingParams(n=3, max_tokens=5, seed=1, ignore_eos=True),
                           logits_processors=[only(21, 22, 23), lambda given, logits: logits * 0.5])
    assert [choice.tokens for choice in halved.choices] == [choice.tokens for choice in output.choices]


def test_conversations_and_streams_take_processors() -> None:
    with LLM(memory="32MiB", threads=1) as llm:
        token = llm.chat_processor.tokenizer.encode("a")[0]
        sampling, given = SamplingParams(max_tokens=3, ignore_eos=True), {"logits_processors": [only(token)]}
        assert llm.chat("Hi", sampling, **given).text == "aaa"  # type: ignore[arg-type]
        assert "".join(delta.text for delta in llm.stream("Hi", sampling, **given)) == "aaa"  # type: ignore[arg-type]
        assert "".join(delta.text for delta in llm.generate_stream("Hi", sampling, **given)) == "aaa"  # type: ignore[arg-type]
        assert asyncio.run(llm.achat("Hi", sampling, **given)).text == "aaa"  # type: ignore[arg-type]


def test_others_go_on_while_a_processor_is_at_work(llm: LLM) -> None:
    """It waits until another request has been answered whole."""
    entered, answered = threading.Event(), threading.Event()

    def slow(given: list[int], logits: torch.Tensor) -> torch.Tensor:
        entered.set()
        assert answered.wait(60)
        return logits

    plain, found = tokens(llm), list[list[int]]()
    caller = threading.Thread(target=lambda: found.append(tokens(llm, logits_processors=[slow])))
    caller.start()
    assert entered.wait(60)
    assert len(tokens(llm, [1, 2, 3])) == 10
    answered.set()
    caller.join(60)
    assert found == [plain]


@pytest.mark.parametrize(("processor", "words"), [
    (lambda given, logits: 1 / 0, "a logits processor failed: ZeroDivisionError"),
    (lambda given, logits: logits[1:], "must return a tensor of floats"), (lambda given, logits: 5, "not 5"),
    (lambda given, logits: logits.long(), "must return a tensor of floats"),
    (lambda given, logits: logits * torch.nan, "NaN"), (lambda given, logits: logits - torch.inf, "NaN, infinity"),
    (lambda given, logits: logits + torch.inf, "NaN, infinity"),
    (lambda given, logits: logits if len(given) < 43 else 1 / 0, "ZeroDivisionError")])
def test_a_processor_that_fails_ends_its_request_alone(llm: LLM, processor: Any, words: str) -> None:
    plain, found = tokens(llm, [1, 2, 3]), list[list[int]]()
    other = threading.Thread(target=lambda: found.append(tokens(llm, [1, 2, 3])))
    other.start()
    output, = llm.generate([PROMPT], GREEDY, logits_processors=[processor])
    other.join(60)
    choice = output.choices[0]
    assert choice.finish == "error" and words in str(choice.error) and found == [plain]
    with pytest.raises((GenerationError, RequestError), match="logits processor"):
        output.sound()
    llm.worker.call(lambda engine: engine.check())


@pytest.mark.parametrize("given", [5, identity, [5], "text", {"a": 1}])
def test_l8_what_is_no_list_of_functions_is_refused(llm: LLM, given: Any) -> None:
    with pytest.raises(RequestError, match="logits_processors must be a list of functions"):
        llm.generate([PROMPT], GREEDY, logits_processors=given)


def test_a_preempted_request_has_its_logits_processed_again() -> None:
    """So little room that sequences push each other out."""
    prompts = [[place + 1] * 40 for place in range(6)]
    sampling = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    with LLM(MODEL, memory="64MiB", dtype="float32", threads=1, max_batch=2) as llm:
        plain = [tokens(llm, prompt, sampling) for prompt in prompts]
        found = llm.generate(prompts, sampling, logits_processors=[identity])
        assert [list(output.choices[0].tokens) for output in found] == plain
        assert llm.worker.call(lambda engine: engine.scheduler.turns) > 0
        llm.worker.call(lambda engine: engine.check())
