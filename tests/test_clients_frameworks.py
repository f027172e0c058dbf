"""Frameworks against a live server: LangChain, instructor and pydantic-ai, with answers in the form they ask for."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field
from test_server_harness import CALL, Served, play_turns, scripted

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("script_server", "leftovers"),
              pytest.mark.filterwarnings("ignore")]

QUESTION = "What is the weather in Paris?"


Degrees = Annotated[int, Field(ge=-40, le=50)]


class Forecast(BaseModel, extra="forbid"):
    """The weather somewhere."""

    city: str = Field(max_length=12, description="Where")
    sunny: bool
    wind: Literal["none", "some", "strong"]
    degrees: list[Degrees] = Field(max_length=2)


class Report(BaseModel, extra="forbid"):
    """Several."""

    forecasts: list[Forecast] = Field(max_length=2)
    note: str | None = Field(default=None, max_length=8)


SAID = Forecast(city="Oslo", sunny=False, wind="some", degrees=[1, 2])


def weather(city: str, days: int) -> str:
    """The weather.

    Args:
        city: Where.
        days: For how many days.
    """
    return f"cold in {city} for {days} days"


# LangChain


def openai_model(served: Served, **more: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model="default", base_url=f"{served.url}/v1", api_key="none", max_retries=0,
                      **{"max_tokens": 400, "stream_usage": True, "extra_body": {"seed": 3}} | more)


def anthropic_model(served: Served, **more: Any) -> Any:
    from langchain_anthropic import ChatAnthropic

    return ChatAnthropic(model="default", base_url=served.url, api_key="none", max_retries=0, max_tokens=400, **more)


def last_of(pieces: Any) -> Any:
    *_, last = pieces
    return last


@pytest.mark.parametrize("kind", [Forecast, Report])
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_langchain_structured_output(served: Served, method: str, kind: type[BaseModel], temperature: float) -> None:
    model = openai_model(served, temperature=temperature)
    for strict in (None, True):
        asking = model.with_structured_output(kind, method=method, strict=strict)
        found = asking.invoke(QUESTION)
        assert isinstance(found, kind)
        assert last_of(asking.stream(QUESTION)) == found
    raw = model.with_structured_output(kind, method=method, include_raw=True).invoke(QUESTION)
    assert raw["parsing_error"] is None and isinstance(raw["parsed"], kind)
    plain = model.with_structured_output(kind.model_json_schema(), method=method).invoke(QUESTION)
    assert kind.model_validate(plain)


def test_langchain_json_mode(served: Served) -> None:
    found = openai_model(served, temperature=2).with_structured_output(None, method="json_mode").invoke(
        "Answer in JSON. " + QUESTION)
    assert isinstance(found, dict)
    with scripted(SAID.model_dump_json()) as (other, engine):
        asking = openai_model(other).with_structured_output(Forecast, method="json_mode")
        assert asking.invoke("In JSON") == SAID == last_of(asking.stream("In JSON"))
    assert all(request.constraint for request in engine.seen)


@pytest.mark.parametrize("responses", [False, True])
def test_langchain_tools(responses: bool) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    with scripted("") as (served, engine):
        play_turns(engine, "I look.\n" + CALL, "I look.\n" + CALL, "Cold.", "Cold.")
        model = openai_model(served, use_responses_api=responses).bind_tools([weather])
        asked = [HumanMessage(QUESTION)]
        first, streamed = model.invoke(asked), None
        for piece in model.stream(asked):
            streamed = piece if streamed is None else streamed + piece
        call, = first.tool_calls
        assert call["args"] == {"city": "Oslo", "days": 3} == streamed.tool_calls[0]["args"]
        assert first.text == streamed.text and "I look." in first.text
        asked += [first, ToolMessage(weather(**call["args"]), tool_call_id=call["id"])]
        assert model.invoke(asked).text == "Cold." == "".join(piece.text for piece in model.stream(asked))
        prompts = [request.ids for request in engine.seen]
    assert prompts[2][:len(prompts[0])] == prompts[0] and prompts[2] == prompts[3]


@pytest.mark.parametrize("choice", ["any", "weather", "required", True])
def test_langchain_forced_tools(served: Served, choice: Any) -> None:
    from langchain_core.messages import HumanMessage

    class weather(BaseModel):
        """The weather."""

        city: str = Field(max_length=12)
        days: int = Field(ge=0, le=99)

    found = openai_model(served).bind_tools([weather], tool_choice=choice).invoke([HumanMessage(QUESTION)])
    assert found.tool_calls and all(weather.model_validate(call["args"]) for call in found.tool_calls)


def test_langchain_text(served: Served) -> None:
    from langchain_core.messages import HumanMessage

    for model in (openai_model(served), openai_model(served, use_responses_api=True),
                  anthropic_model(served, temperature=0)):
        whole, pieces = model.invoke(QUESTION), [*model.stream(QUESTION)]
        assert "".join(piece.text for piece in pieces) == whole.text
        assert sum(piece.usage_metadata["output_tokens"] for piece in pieces if piece.usage_metadata) \
            == whole.usage_metadata["output_tokens"] > 0
    assert len(openai_model(served).batch([QUESTION] * 3)) == 3
    assert anthropic_model(served).get_num_tokens_from_messages([HumanMessage(QUESTION)]) > 5
    scored = openai_model(served).bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    assert scored.response_metadata["logprobs"]["content"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_anthropic_structured_output(served: Served, method: str) -> None:
    asking = anthropic_model(served, temperature=0).with_structured_output(Forecast, method=method)
    found = asking.invoke(QUESTION)
    assert isinstance(found, Forecast) and last_of(asking.stream(QUESTION)) == found


def test_langchain_anthropic_tools_and_thinking() -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    with scripted("") as (served, engine):
        play_turns(engine, "Let me see.\n</think>\n\n" + CALL, "So.\n</think>\n\nCold.")
        model = anthropic_model(served, thinking={"type": "enabled", "budget_tokens": 1024}).bind_tools([weather])
        first = model.invoke([HumanMessage(QUESTION)])
        call, = first.tool_calls
        assert call["args"] == {"city": "Oslo", "days": 3} and first.content[0]["thinking"] == "Let me see."
        second = model.invoke([HumanMessage(QUESTION), first, ToolMessage("-3", tool_call_id=call["id"])])
        assert second.text == "Cold."
        prompts = [request.ids for request in engine.seen]
    assert prompts[1][:len(prompts[0])] == prompts[0]


# instructor


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_instructor(served: Served, mode: str) -> None:
    import instructor

    client = instructor.from_openai(served.client, mode=getattr(instructor.Mode, mode))
    asked: Any = {"model": "default", "messages": [{"role": "user", "content": QUESTION}], "seed": 3,
                  "max_tokens": 400, "max_retries": 0, "temperature": 0}
    for kind in (Forecast, Report):
        found = client.create(response_model=kind, **asked)
        assert isinstance(found, kind)
    # for pieces it asks for a tool of another name
    assert Forecast.model_validate(last_of(client.create_partial(response_model=Forecast, **asked)).model_dump())


@pytest.mark.parametrize("mode", ["JSON", "MD_JSON"])
def test_instructor_json(mode: str) -> None:
    """Where the schema stands in the prompt alone."""
    import instructor

    said = SAID.model_dump_json() if mode == "JSON" else f"```json\n{SAID.model_dump_json()}\n```"
    with scripted(said) as (served, engine):
        client = instructor.from_openai(served.client, mode=getattr(instructor.Mode, mode))
        asked: Any = {"model": "default", "messages": [{"role": "user", "content": QUESTION}], "max_retries": 0}
        assert client.create(response_model=Forecast, **asked).model_dump() == SAID.model_dump()
        *_, last = client.create_partial(response_model=Forecast, **asked)
        assert last.model_dump() == SAID.model_dump()
    assert all(bool(request.constraint) == (mode == "JSON") for request in engine.seen)


def test_instructor_json_has_json(served: Served) -> None:
    """The embedded model does not know the schema, but it writes an object."""
    import instructor

    class Anything(BaseModel):
        model_config = {"extra": "allow"}

    client = instructor.from_openai(served.client, mode=instructor.Mode.JSON)
    found = client.create(response_model=Anything, model="default", temperature=2, seed=3, max_tokens=400,
                          messages=[{"role": "user", "content": QUESTION}], max_retries=0)
    assert isinstance(found, Anything)


def test_instructor_iterates() -> None:
    import instructor

    tasks = json.dumps([SAID.model_dump()] * 2, indent=1)
    called = CALL.replace("weather", "IterableForecast").replace("city", "tasks").replace("Oslo", tasks)
    with scripted(called.replace("<parameter=days>\n3\n</parameter>\n", ""), pause=0.001) as (served, _):
        client = instructor.from_openai(served.client, mode=instructor.Mode.TOOLS)
        found = [*client.create_iterable(response_model=Forecast, model="default", max_retries=0,
                                         messages=[{"role": "user", "content": QUESTION}])]
    assert [one.model_dump() for one in found] == [SAID.model_dump()] * 2


def test_instructor_tries_again() -> None:
    import instructor

    wrong = CALL.replace("\n3\n", "\nmany\n")
    with scripted("") as (served, engine):
        play_turns(engine, wrong, CALL)

        class weather(BaseModel):
            city: str
            days: int

        client = instructor.from_openai(served.client, mode=instructor.Mode.TOOLS)
        found = client.create(response_model=weather, model="default", max_retries=2,
                              messages=[{"role": "user", "content": QUESTION}])
        assert (found.city, found.days) == ("Oslo", 3) and len(engine.seen) == 2


# pydantic-ai


def pydantic_model(served: Served, wire: str = "chat") -> Any:
    if wire == "anthropic":
        from anthropic import AsyncAnthropic
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        client = AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0)
        return AnthropicModel("default", provider=AnthropicProvider(anthropic_client=client))
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    kind = OpenAIResponsesModel if wire == "responses" else OpenAIChatModel
    return kind("default", provider=OpenAIProvider(base_url=f"{served.url}/v1", api_key="none"))


WIRES = ["chat", "responses", "anthropic"]


@pytest.mark.parametrize(("wire", "form"), [
    *((wire, "ToolOutput") for wire in WIRES), ("chat", "NativeOutput"), ("responses", "NativeOutput")])
def test_pydantic_ai_output(served: Served, wire: str, form: str) -> None:
    import pydantic_ai

    agent: Any = pydantic_ai.Agent(pydantic_model(served, wire), output_type=getattr(pydantic_ai, form)(Forecast),
                                   model_settings={"max_tokens": 400, "temperature": 0}, retries=0)
    found = agent.run_sync(QUESTION)
    assert isinstance(found.output, Forecast) and found.usage.output_tokens > 0
    with agent.run_stream_sync(QUESTION) as streamed:
        assert last_of(streamed.stream_output(debounce_by=None)) == found.output


def test_pydantic_ai_prompted_output() -> None:
    import pydantic_ai

    with scripted(SAID.model_dump_json()) as (served, _):
        agent: Any = pydantic_ai.Agent(pydantic_model(served), output_type=pydantic_ai.PromptedOutput(Forecast))
        assert agent.run_sync(QUESTION).output == SAID


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("stream", [False, True])
def test_pydantic_ai_tools(wire: str, stream: bool) -> None:
    import pydantic_ai

    with scripted("") as (served, engine):
        play_turns(engine, CALL, "Cold.")
        agent: Any = pydantic_ai.Agent(pydantic_model(served, wire), tools=[weather])
        if stream:
            with agent.run_stream_sync(QUESTION) as streamed:
                *_, output = streamed.stream_text(debounce_by=None)
                messages = streamed.all_messages()
        else:
            found = agent.run_sync(QUESTION)
            output, messages = found.output, found.all_messages()
        assert output == "Cold." and len(engine.seen) == 2
        parts = [part for message in messages for part in message.parts if part.part_kind == "tool-return"]
        assert [part.content for part in parts] == ["cold in Oslo for 3 days"]
        first, second = (request.ids for request in engine.seen)
        assert second[:len(first)] == first


@pytest.mark.parametrize("wire", WIRES)
def test_pydantic_ai_text(served: Served, wire: str) -> None:
    import pydantic_ai

    agent: Any = pydantic_ai.Agent(pydantic_model(served, wire), instructions="Be brief.",
                                   model_settings={"max_tokens": 100, "temperature": 0})
    found = agent.run_sync(QUESTION)
    with agent.run_stream_sync(QUESTION) as streamed:
        assert last_of(streamed.stream_text(debounce_by=None)) == found.output
    again = agent.run_sync("And Rome?", message_history=found.all_messages())
    assert again.output and json.loads(again.all_messages_json())
