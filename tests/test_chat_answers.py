"""Every token of an answer is routed once, for all options of a request and all readers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from test_server_harness import USER, serving, tiny

from deltic import SamplingParams
from deltic.chat.choices import AnswerAssembler
from deltic.chat.output_router import OutputRouter
from deltic.chat.tokenizer import Tokenizer
from deltic.params import TokenEvent, Usage

TOOLS = [{"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}]
ASKED: list[dict[str, Any]] = [
    {}, {"tools": TOOLS}, {"stop": ["never seen"]}, {"thinking_budget": 3}, {"logprobs": True, "top_logprobs": 2},
    {"tools": TOOLS, "stop": ["never seen", "\n\n\n\n"], "thinking_budget": 3, "logprobs": True, "n": 3}]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How many tokens were routed, and how many were turned into text."""
    counts = Counter[str]()
    assert not tiny().chat_processor.tokenizer.composes  # found out once

    def counting(kind: type, name: str) -> None:
        method = getattr(kind, name)

        def call(*given: Any) -> Any:
            counts[name] += 1
            return method(*given)
        monkeypatch.setattr(kind, name, call)
    counting(OutputRouter, "feed")
    counting(Tokenizer, "visible_bytes")
    yield counts


@pytest.mark.parametrize("asked", ASKED, ids=[" ".join(asked) for asked in ASKED])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.covering
def test_server_routes_every_token_once(asked: dict[str, Any], stream: bool, counted: Counter[str]) -> None:
    with serving(tiny()) as served:
        counted.clear()
        more: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        chunks = served.client.chat.completions.with_raw_response.create(
            model="tiny", messages=USER, max_tokens=40, temperature=0, extra_body={"enable_thinking": True, **asked},
            **more)
        answer = chunks.parse()
        usage = [chunk.usage for chunk in answer][-1] if stream else answer.usage
        assert 10 < usage.completion_tokens == counted["feed"] >= counted["visible_bytes"]


@pytest.mark.parametrize("stream", [False, True])
def test_raw_completions_are_routed_once(stream: bool, counted: Counter[str]) -> None:
    with serving(tiny()) as served:
        counted.clear()
        served.post("/v1/completions", prompt=["Hi", "Ho"], n=2, stop=["never seen"], logprobs=3, max_tokens=10,
                    ignore_eos=True, stream=stream)
        assert counted == {"feed": 40, "visible_bytes": 40}


@pytest.mark.parametrize("stop", [(), ("never seen",)])
@pytest.mark.parametrize("budget", [None, 3])
def test_caller_routes_every_token_once(stop: tuple[str, ...], budget: int | None, counted: Counter[str]) -> None:
    sampling = SamplingParams(max_tokens=40, stop=stop, n=2, temperature=0.0)
    output = tiny().chat("Hi", sampling, thinking=True, thinking_budget=budget, tools=TOOLS)
    assert 20 < sum(len(choice.tokens) for choice in output.choices) == counted["feed"]
    counted.clear()
    assert list(stream := tiny().stream("Hi", sampling, thinking=True, thinking_budget=budget))
    assert stream.generated_tokens == counted["feed"]


@pytest.mark.parametrize("stop", [(), ("Hello there",)])
def test_stopped_answer_ends_at_last_read_token(stop: tuple[str, ...]) -> None:
    """The engine has gone on meanwhile, and held another beginning of a stop string back."""
    processor = tiny().chat_processor
    job = processor.complete("x", SamplingParams(stop=stop))
    tokens = processor.tokenizer.encode("Hey: Hello here")
    ahead = job.request.matcher() if job.request.matcher else None
    assert [ahead.push(token) for token in tokens] == [False] * len(tokens) if ahead else not stop
    answers = AnswerAssembler([job])
    read = len(processor.tokenizer.encode("Hey: Hel"))
    answers.take([TokenEvent(job.request.id, 0, token) for token in tokens[:read]])
    answers.stop(0)
    answers.take([TokenEvent(job.request.id, 0, tokens[read])])
    answers.take([TokenEvent(job.request.id, 0, tokens[-1], finish="length", usage=Usage(1, 0, len(tokens)))])
    output = answers.outputs[0]
    assert output and output.text == processor.tokenizer.decode(tokens[:read]) and output.choices[0].finish == "abort"
    assert output.choices[0].usage.completion_tokens == read == answers.tokens


def test_streamed_text_is_kept_only_for_answer_records() -> None:
    for job, kept in ((tiny().chat_processor.complete("x"), False), (tiny().chat_processor.chat(USER), True)):
        answers = AnswerAssembler([job], whole=False)
        tokens = tiny().chat_processor.tokenizer.encode("Yes")
        pieces = answers.take([TokenEvent(job.request.id, 0, token) for token in tokens])
        assert "".join(delta.text for delta in pieces[0].deltas) == "Yes"
        assert bool(answers._open[0].said) == kept
