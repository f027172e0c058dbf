"""The real openai client talks to the embedded model."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI
from test_server_harness import USER, Served, tiny

from deltic.spec_decode.draft_length import FixedDraftLength

LIMITS: dict[str, Any] = {"model": "tiny", "messages": USER, "max_tokens": 12, "extra_body": {"ignore_eos": True}}


def streamed(chunks: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_an_answer_and_its_usage(served: Served) -> None:
    tiny().worker.call(lambda engine: engine.runtime.cache.clear())  # other files may have asked the same
    answer = served.client.chat.completions.create(**LIMITS)
    assert answer.object == "chat.completion" and answer.model == "tiny"
    assert answer.choices[0].message.role == "assistant" and answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage and answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert answer.usage.prompt_tokens_details and answer.usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_stream_is_the_answer_in_pieces(served: Served, drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece per token; where tokens are drafted, per step."""
    monkeypatch.setattr(tiny().engine.speculator, "depth", FixedDraftLength(drafts))
    whole = served.client.chat.completions.create(**LIMITS, temperature=0)
    chunks = list(served.client.chat.completions.create(**LIMITS, temperature=0, stream=True))
    assert streamed(chunks) == whole.choices[0].message.content
    assert len(chunks) > (1 if drafts else 3) and len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize("body", [{"messages": USER}, {"prompt": "Once upon a time"}])
def test_a_request_can_do_without_drafts(served: Served, body: dict[str, Any],
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny().engine.speculator, "depth", FixedDraftLength(3))
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answers = [served.post(path, **body, temperature=0, max_tokens=12, **more).json()
               for more in ({}, {"speculate": True}, {"speculate": None}, {"speculate": False})]
    drafted = [sum(answer["usage"]["completion_tokens_details"][f"{kind}_prediction_tokens"]
                   for kind in ("accepted", "rejected")) for answer in answers]
    assert min(drafted[:3]) > 0 == drafted[3]
    assert all(answer["choices"] == answers[0]["choices"] for answer in answers)


def test_the_usage_chunk_comes_last_and_without_choices(served: Served) -> None:
    chunks = list(served.client.chat.completions.create(**LIMITS, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and chunks[-1].usage and chunks[-1].usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_streams_are_server_sent_events(served: Served) -> None:
    body = {"messages": USER, "max_tokens": 3, "stream": True}
    with served.http.stream("POST", "/v1/chat/completions", json=body) as response:
        text = response.read().decode()
        assert response.headers["content-type"].startswith("text/event-stream")
    assert text.endswith("data: [DONE]\n\n") and all(line.startswith("data: ") for line in text.split("\n\n")[:-1])


def test_seeds_reproduce(served: Served) -> None:
    def text(seed: int, stream: bool) -> str:
        asked = LIMITS | {"temperature": 5.0, "seed": seed}
        if stream:
            return streamed(served.client.chat.completions.create(**asked, stream=True))
        return served.client.chat.completions.create(**asked).choices[0].message.content or ""
    assert text(7, False) == text(7, True) == text(7, False)
    assert text(7, False) != text(8, False)


@pytest.mark.parametrize("stream", [False, True])
def test_choices(served: Served, stream: bool) -> None:
    asked = LIMITS | {"n": 3, "temperature": 5.0, "seed": 1}
    if stream:
        texts = {0: "", 1: "", 2: ""}
        for chunk in served.client.chat.completions.create(**asked, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    else:
        answer = served.client.chat.completions.create(**asked)
        texts = {choice.index: choice.message.content for choice in answer.choices}
        assert answer.usage and answer.usage.completion_tokens == 36 and answer.usage.prompt_tokens < 100
    assert len(set(texts.values())) == 3 and list(texts) == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_have_tokens_bytes_and_alternatives(served: Served, stream: bool) -> None:
    asked = LIMITS | {"logprobs": True, "top_logprobs": 3, "temperature": 0}
    if stream:
        chunks = list(served.client.chat.completions.create(**asked, stream=True))
        found = [score for chunk in chunks if chunk.choices[0].logprobs for score in chunk.choices[0].logprobs.content]
    else:
        logprobs = served.client.chat.completions.create(**asked).choices[0].logprobs
        found = logprobs.content if logprobs else []
    assert len(found) == 12
    for score in found:
        assert score.logprob <= 0 and len(score.top_logprobs) == 3
        assert score.top_logprobs[0].token == score.token
        assert score.bytes and bytes(score.bytes).decode("utf-8", "replace") == score.token


def test_stop_strings_are_not_part_of_the_answer(served: Served) -> None:
    whole = served.client.chat.completions.create(**LIMITS, temperature=0).choices[0].message.content or ""
    stop = whole.strip()[3:6]
    for form in (stop, [stop, "never to be seen"]):
        answer = served.client.chat.completions.create(**LIMITS, temperature=0, stop=form)
        assert answer.choices[0].message.content == whole[:whole.index(stop)]
        assert answer.choices[0].finish_reason == "stop"


def test_logit_bias_forbids_and_forces(served: Served) -> None:
    token = tiny().chat_processor.tokenizer.encode("a")[0]
    answer = served.client.chat.completions.create(**LIMITS, temperature=0, logit_bias={str(token): 100})
    assert answer.choices[0].message.content == "a" * 12


def test_every_accepted_field_at_once(served: Served) -> None:
    answer = served.client.chat.completions.create(
        model="default", messages=[{"role": "developer", "content": "Be brief."}, *USER], max_completion_tokens=2,
        temperature=0.5, top_p=0.9, presence_penalty=0.1, frequency_penalty=0.1, seed=1, user="u", metadata={"a": "b"},
        store=False, service_tier="auto", reasoning_effort="low", response_format={"type": "text"}, n=1,
        modalities=["text"], parallel_tool_calls=True, tool_choice="auto", logprobs=False, safety_identifier="s",
        prompt_cache_key="k", extra_body={
            "top_k": 5, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 1, "ignore_eos": True,
            "stop_token_ids": [5], "enable_thinking": False, "chat_template_kwargs": {"any": 1}, "stop": None})
    assert answer.usage and answer.usage.completion_tokens <= 2


def test_models(served: Served) -> None:
    assert [model.id for model in served.client.models.list()] == ["tiny"]
    assert served.client.models.retrieve("tiny").owned_by == "deltic"


def test_async_clients_share_the_engine(served: Served) -> None:
    async def ask(client: AsyncOpenAI, seed: int) -> str:
        stream = await client.chat.completions.create(**LIMITS, seed=seed, temperature=3.0, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, seed % 4) for seed in range(12)))

    texts = asyncio.run(all_of_them())
    assert texts[:4] == texts[4:8] == texts[8:] and len(set(texts)) > 1


def test_the_trained_model_ends_its_answers(served: Served) -> None:
    answer = served.client.chat.completions.create(model="tiny", messages=USER, temperature=0, max_tokens=500,
                                                   logprobs=True)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs and answer.choices[0].logprobs.content and answer.usage
    assert len(answer.choices[0].logprobs.content) == answer.usage.completion_tokens - 1, "the end is not a token"
