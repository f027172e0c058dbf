"""Anthropic's own client against a live server: every helper, and streamed what it is whole."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic, beta_tool
from pydantic import BaseModel
from test_server_harness import CALL, Served, play_turns, scripted

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("script_server")]

QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
TOOL: dict[str, Any] = {"name": "weather", "description": "The weather", "input_schema": {
    "type": "object", "required": ["city", "days"], "additionalProperties": False,
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "minimum": 0,
                                                                         "maximum": 99}}}}


class Forecast(BaseModel):
    """The weather somewhere. Of texts and numbers the client would send no limits."""

    city: Literal["Paris", "Oslo"]
    days: list[Literal["sunny", "cold"]]
    good: bool | None


def client_of(served: Served) -> Anthropic:
    return Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=30)


def said(message: Any) -> list[dict[str, Any]]:
    return [{key: value for key, value in block.to_dict().items() if key not in ("id", "citations", "parsed_output")}
            for block in message.content]


def same(served: Served, **more: Any) -> Any:
    """A message, which is the same whole, by the helper for streams, and for the client's beta."""
    asked: Any = {"model": "default", "messages": QUESTION, "max_tokens": 200} | more
    own = {name: asked.pop(name) for name in ("temperature", "top_p", "top_k") if name in asked}
    asked["extra_body"] = {"seed": 3, **own}
    with client_of(served) as client:
        done = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        tested = client.beta.messages.create(**asked, betas=["context-1m-2025-08-07"])
    assert said(final) == said(done) == said(tested)
    assert (final.stop_reason, final.stop_sequence) == (done.stop_reason, done.stop_sequence)
    assert final.usage.output_tokens == done.usage.output_tokens
    assert text == "".join(block.text for block in done.content if block.type == "text")
    return done


@pytest.mark.parametrize("more", [
    {}, {"temperature": 0.0}, {"system": "Be brief."}, {"max_tokens": 3}, {"stop_sequences": ["e", "zzz"]},
    {"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"thinking": {"type": "adaptive"}},
    {"thinking": {"type": "enabled", "budget_tokens": 5}}, {"top_k": 5, "top_p": 0.9},
    {"system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]},
    {"messages": [*QUESTION, {"role": "assistant", "content": "It is"}]}, {"metadata": {"user_id": "me"}},
    {"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": {"type": "none"}},
])
def test_messages(served: Served, more: dict[str, Any]) -> None:
    done = same(served, **more)
    assert done.usage.output_tokens > 0 and done.role == "assistant"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"},
                                    {"type": "any", "disable_parallel_tool_use": True}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forced_calls(served: Served, choice: Any, temperature: float) -> None:
    done = same(served, tools=[TOOL], tool_choice=choice, temperature=temperature)
    assert done.stop_reason == "tool_use" and {block.type for block in done.content} == {"tool_use"}
    assert all(set(block.input) == {"city", "days"} for block in done.content)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_parsed_answers(served: Served, temperature: float) -> None:
    asked: Any = {"model": "default", "messages": QUESTION, "max_tokens": 200,
                  "extra_body": {"seed": 3, "temperature": temperature}}
    with client_of(served) as client:
        done = client.messages.parse(**asked, output_format=Forecast)
        assert isinstance(done.parsed_output, Forecast)
        with client.messages.stream(**asked, output_format=Forecast) as stream:
            assert stream.get_final_message().parsed_output == done.parsed_output
        assert client.beta.messages.parse(**asked, output_format=Forecast).parsed_output == done.parsed_output


def test_tokens_are_counted(served: Served) -> None:
    with client_of(served) as client:
        for more in ({}, {"tools": [TOOL]}, {"system": "Be brief."}, {"thinking": {"type": "adaptive"}}):
            asked: Any = {"model": "default", "messages": QUESTION, **more}
            counted = client.messages.count_tokens(**asked).input_tokens
            assert counted == client.beta.messages.count_tokens(**asked).input_tokens
            usage = client.messages.create(**asked, max_tokens=1).usage
            assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_models(served: Served) -> None:
    with client_of(served) as client:
        model, = client.models.list()
        assert client.models.retrieve(model.id).id == model.id and model.type == "model"


def test_tool_runner_loop() -> None:
    asked: list[str] = []

    @beta_tool
    def weather(city: str, days: int) -> str:
        """The weather in a city, for so many days."""
        asked.append(f"{city} {days}")
        return "-3"

    for stream in (False, True):
        with scripted("") as (served, engine), client_of(served) as client:
            play_turns(engine, "Let me see.\n</think>\n\n" + CALL, "So.\n</think>\n\nIt is cold in Oslo.")
            runner: Any = client.beta.messages.tool_runner(
                model="default", max_tokens=500, tools=[weather], messages=QUESTION, stream=stream,
                thinking={"type": "enabled", "budget_tokens": 1024})
            if stream:
                last = [turn.get_final_message() for turn in runner][-1]
            else:
                last = runner.until_done()
            assert [block.type for block in last.content] == ["thinking", "text"]
            assert last.content[1].text == "It is cold in Oslo." and len(engine.seen) == 2
            first, second = (request.ids for request in engine.seen)
            assert second[:len(first)] == first, "the second prompt does not continue the first"
    assert asked == ["Oslo 3"] * 2


def test_the_asynchronous_client(served: Served) -> None:
    async def ask() -> tuple[Any, Any]:
        async with AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0) as client:
            asked: Any = {"model": "default", "messages": QUESTION, "max_tokens": 100, "extra_body": {"seed": 3}}
            async with client.messages.stream(**asked) as stream:
                streamed = await stream.get_final_message()
            return streamed, await client.messages.create(**asked)

    streamed, done = asyncio.run(ask())
    assert said(streamed) == said(done)


def test_errors_have_the_client_s_exception_classes(served: Served) -> None:
    with client_of(served) as client:
        with pytest.raises(anthropic.BadRequestError, match="temperature"):
            client.messages.create(model="default", messages=QUESTION, max_tokens=5, extra_body={"temperature": -1})
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(model="none such", messages=QUESTION, max_tokens=5)
