"""OpenAI's own client against a live server: every helper, and streamed what it is whole."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field
from test_server_harness import CALL, THOUGHT, Served, play_turns, scripted

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("script_server")]

QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
LIMITS: dict[str, Any] = {"model": "default", "seed": 3, "max_completion_tokens": 300}


class Day(BaseModel):
    name: Literal["today", "tomorrow"]
    degrees: int = Field(ge=-40, le=50)


class Forecast(BaseModel):
    """The weather somewhere."""

    city: str = Field(max_length=12)
    sunny: bool
    wind: Literal["none", "some", "strong"] | None
    days: list[Day] = Field(max_length=2)


class weather(BaseModel):  # a tool has the name of its class
    city: str = Field(max_length=12)
    days: int = Field(ge=0, le=99)


TOOL: Any = openai.pydantic_function_tool(weather)
CALLED = {"city": "Oslo", "days": 3}


def joined(chunks: Any) -> tuple[dict[int, dict[str, Any]], Any]:
    """What a stream of chunks says, by choice, put together as it comes; and its usage."""
    found: dict[int, dict[str, Any]] = {}
    usage = None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            said = found.setdefault(choice.index, {"content": "", "reasoning": "", "calls": {}, "scores": []})
            said["content"] += choice.delta.content or ""
            said["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            said["scores"] += (choice.logprobs.content or []) if choice.logprobs else []
            for call in choice.delta.tool_calls or []:
                have = said["calls"].setdefault(call.index, {"name": "", "arguments": ""})
                have["name"] += call.function.name or ""
                have["arguments"] += call.function.arguments or ""
            said["finish"] = choice.finish_reason or said.get("finish")
    return found, usage


def whole(completion: Any) -> tuple[dict[int, dict[str, Any]], Any]:
    """The same of an answer that came whole."""
    return {choice.index: {
        "content": choice.message.content or "", "reasoning": getattr(choice.message, "reasoning_content", None) or "",
        "calls": {index: {"name": call.function.name, "arguments": call.function.arguments}
                  for index, call in enumerate(choice.message.tool_calls or [])},
        "scores": (choice.logprobs.content or []) if choice.logprobs else [], "finish": choice.finish_reason,
    } for choice in completion.choices}, completion.usage


def same(client: OpenAI, **asked: Any) -> Any:
    """The answer, which is the same whole, in chunks, and through the helper for streams, which takes no answer that is
    cut off; the second and third time more of its prompt is known."""
    asked = LIMITS | {"messages": QUESTION} | asked
    done = client.chat.completions.create(**asked)
    expected, usage = whole(done)
    found, streamed = joined(client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}))
    assert found == expected
    with client.chat.completions.stream(**asked) as stream:
        if any(choice.finish_reason == "length" for choice in done.choices):
            with pytest.raises(openai.LengthFinishReasonError):
                stream.get_final_completion()
        else:
            assert whole(stream.get_final_completion())[0] == expected
    assert (streamed.prompt_tokens, streamed.completion_tokens) == (usage.prompt_tokens, usage.completion_tokens)
    return done


@pytest.mark.parametrize("more", [
    {}, {"temperature": 0}, {"extra_body": {"enable_thinking": True}}, {"logprobs": True, "top_logprobs": 3},
    {"n": 3, "temperature": 1.5}, {"stop": ["e", "zzz"]}, {"max_completion_tokens": 3},
    {"response_format": {"type": "json_object"}, "temperature": 2}, {"reasoning_effort": "none"},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": {"5": 3}},
    {"messages": [{"role": "developer", "content": "Be brief."}, *QUESTION]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]},
    {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "parallel_tool_calls": False},
])
def test_chat(served: Served, more: dict[str, Any]) -> None:
    done = same(served.client, **more)
    assert len(done.choices) == more.get("n", 1) and done.usage.completion_tokens > 0


def test_asynchronous_client_gets_the_same_answer(served: Served) -> None:
    async def ask() -> tuple[Any, Any]:
        async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            asked = LIMITS | {"messages": QUESTION}
            async with client.chat.completions.stream(**asked) as stream:
                streamed = await stream.get_final_completion()
            return streamed, await client.chat.completions.create(**asked)

    streamed, done = asyncio.run(ask())
    assert whole(streamed)[0] == whole(done)[0]


@pytest.mark.parametrize("temperature", [0, 1, 2])
def test_parsed_answers(served: Served, temperature: float) -> None:
    asked = LIMITS | {"messages": QUESTION, "temperature": temperature, "response_format": Forecast}
    done = served.client.chat.completions.parse(**asked)
    assert isinstance(done.choices[0].message.parsed, Forecast)
    with served.client.chat.completions.stream(**asked) as stream:
        events = list(stream)
        assert stream.get_final_completion().choices[0].message.parsed == done.choices[0].message.parsed
    assert events[-1].type == "chunk" or any(event.type == "content.done" for event in events)
    assert [event.parsed for event in events if event.type == "content.done"] == [done.choices[0].message.parsed]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("temperature", [0, 1])
def test_parsed_calls(served: Served, choice: Any, temperature: float) -> None:
    asked = LIMITS | {"messages": QUESTION, "tools": [TOOL], "tool_choice": choice, "temperature": temperature,
                      "parallel_tool_calls": False}
    done = served.client.chat.completions.parse(**asked)
    call, = done.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, weather) and done.choices[0].finish_reason == "tool_calls"
    with served.client.chat.completions.stream(**asked) as stream:
        ended = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert [event.parsed_arguments for event in ended] == [call.function.parsed_arguments]


@pytest.mark.parametrize("text", [
    CALL, "I look it up.\n" + CALL + "\n" + CALL.replace("Oslo", "Rome"), THOUGHT + CALL, THOUGHT + "It rains.",
    "Just text.", ""])
def test_outputs_of_models(text: str) -> None:
    with scripted(text) as (served, _):
        message = same(served.client, tools=[TOOL]).choices[0].message
    calls = message.tool_calls or []
    assert len(calls) == text.count("<tool_call>") and ("rains" in text) == ("rains" in (message.content or ""))
    assert all(json.loads(call.function.arguments)["days"] == 3 for call in calls)


def test_tool_call_loop() -> None:
    """What the client has parsed it sends back as it is."""
    with scripted("") as (served, engine):
        play_turns(engine, THOUGHT.removeprefix("<think>\n") + CALL, "So.\n</think>\n\nIt is cold in Oslo.")
        messages, asked = [*QUESTION], {"model": "default", "tools": [TOOL], "extra_body": {"enable_thinking": True}}
        first = served.client.chat.completions.parse(messages=messages, **asked)
        message = first.choices[0].message
        call, = message.tool_calls or []
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "-3"}
        messages += [message, result]
        second = served.client.chat.completions.create(messages=messages, **asked)
    assert second.choices[0].message.content == "It is cold in Oslo."
    shown = engine.seen[1].ids
    assert shown[:len(engine.seen[0].ids)] == engine.seen[0].ids, "the second prompt does not continue the first"


def test_errors_have_the_client_s_exception_classes(served: Served) -> None:
    ask = served.client.chat.completions.create
    with pytest.raises(openai.BadRequestError, match="temperature"):
        ask(model="default", messages=QUESTION, temperature=-1)
    with pytest.raises(openai.NotFoundError):
        ask(model="none such", messages=QUESTION)
    with pytest.raises(openai.LengthFinishReasonError):
        served.client.chat.completions.parse(model="default", messages=QUESTION, max_completion_tokens=2,
                                             response_format=Forecast)


def test_models(served: Served) -> None:
    model, = served.client.models.list()
    assert served.client.models.retrieve(model.id).id == model.id


# Completions


@pytest.mark.parametrize("more", [
    {}, {"prompt": ["Hello", "The"]}, {"prompt": [5, 6, 7]}, {"n": 2, "temperature": 1}, {"logprobs": 2},
    {"echo": True}, {"stop": ["e"]}, {"extra_body": {"guided_regex": "[0-9]{3}"}},
])
def test_completions(served: Served, more: dict[str, Any]) -> None:
    asked: Any = {"model": "default", "prompt": "The weather in", "max_tokens": 20, "seed": 3} | more
    done = served.client.completions.create(**asked)
    texts: dict[int, str] = {}
    scores: dict[int, list[Any]] = {}
    for chunk in served.client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            scores.setdefault(choice.index, []).extend(choice.logprobs.token_logprobs if choice.logprobs else [])
    assert texts == {choice.index: choice.text for choice in done.choices}
    assert scores == {choice.index: choice.logprobs.token_logprobs if choice.logprobs else []
                      for choice in done.choices}


def test_echo_with_logprobs(served: Served) -> None:
    found = served.client.completions.create(model="default", prompt="The weather in", max_tokens=1, echo=True,
                                             logprobs=1, temperature=0).choices[0]
    assert found.logprobs and found.logprobs.tokens and found.logprobs.token_logprobs
    assert "".join(found.logprobs.tokens).startswith("The weather in") and found.logprobs.token_logprobs[0] is None


# Responses


FLAT: Any = {"type": "function", "name": "weather", "parameters": TOOL["function"]["parameters"], "strict": True}


def response(client: OpenAI, **asked: Any) -> Any:
    """A response, which is the same whole and streamed."""
    asked = {"model": "default", "input": "What is the weather?", "max_output_tokens": 300,
             "extra_body": {"seed": 3}} | asked
    done = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        if done.status == "incomplete":
            with pytest.raises(RuntimeError, match=r"response\.completed"):
                stream.get_final_response()
        else:
            assert said(stream.get_final_response()) == said(done)
    raw = list(client.responses.create(**asked, stream=True))
    assert said(raw[-1].response) == said(done) and raw[-1].response.status == done.status
    assert [event.sequence_number for event in raw] == [*range(len(raw))]
    return done


def said(response: Any) -> list[Any]:
    """The items of a response without what differs each time."""
    def bare(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: bare(one) for key, one in value.items()
                    if key not in ("id", "call_id", "parsed", "parsed_arguments")}
        return [bare(one) for one in value] if isinstance(value, list) else value
    return [bare(item.to_dict()) for item in response.output]


@pytest.mark.parametrize("more", [
    {}, {"instructions": "Be brief.", "temperature": 0}, {"max_output_tokens": 2}, {"reasoning": {"effort": "low"}},
    {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]}, {"store": False},
    {"text": {"format": {"type": "json_object"}}, "temperature": 2},
    {"extra_body": {"enable_thinking": True, "seed": 3}, "include": ["reasoning.encrypted_content"]},
    {"metadata": {"a": "b"}, "truncation": "auto", "parallel_tool_calls": False, "service_tier": "auto"},
])
def test_responses(served: Served, more: dict[str, Any]) -> None:
    done = response(served.client, **more)
    assert done.status in ("completed", "incomplete") and done.usage.output_tokens > 0


@pytest.mark.parametrize("temperature", [0, 1])
def test_parsed_responses(served: Served, temperature: float) -> None:
    asked: Any = {"model": "default", "input": "Weather?", "temperature": temperature, "text_format": Forecast,
                  "max_output_tokens": 300, "extra_body": {"seed": 3}}
    done = served.client.responses.parse(**asked)
    assert isinstance(done.output_parsed, Forecast)
    with served.client.responses.stream(**asked) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == done.output_parsed


def test_calls_in_responses(served: Served) -> None:
    for choice in ("required", {"type": "function", "name": "weather"}):
        item, = response(served.client, tools=[FLAT], tool_choice=choice, parallel_tool_calls=False).output
        assert item.type == "function_call" and weather.model_validate_json(item.arguments)
    parsed = served.client.responses.parse(model="default", input="Weather?", tool_choice="required",
                                           tools=[openai.pydantic_function_tool(weather)],  # type: ignore[list-item]
                                           max_output_tokens=300)
    assert any(isinstance(getattr(item, "parsed_arguments", None), weather) for item in parsed.output)


def test_responses_loop() -> None:
    with scripted("") as (served, engine):
        play_turns(engine, THOUGHT + CALL, "Cold.", THOUGHT + CALL, "Cold.")
        for kept in (True, False):
            first = served.client.responses.create(model="default", input="Weather?", tools=[FLAT], store=kept)
            call = next(item for item in first.output if item.type == "function_call")
            assert json.loads(call.arguments) == CALLED
            result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "-3"}
            before: list[Any] = [{"role": "user", "content": "Weather?"}, *first.output]
            after: Any = {"previous_response_id": first.id, "input": [result]} if kept else {"input": [*before, result]}
            second = served.client.responses.create(model="default", tools=[FLAT], **after)
            assert second.output_text == "Cold."
        found = served.client.responses.retrieve(second.id)
        assert said(found) == said(second)
        assert len(served.client.responses.input_items.list(second.id).data) >= 2
        served.client.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError):
            served.client.responses.retrieve(second.id)
    prompts = [request.ids for request in engine.seen]
    assert prompts[1] == prompts[3], "kept by the server or sent again: the prompts differ"
