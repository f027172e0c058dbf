"""`llm` and litellm against a live server, litellm also in front of it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field
from test_server_harness import CALL, Served, play_turns, scripted

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("script_server", "leftovers"),
              pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).parents[1]
QUESTION = "What is the weather in Paris?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]


class Forecast(BaseModel, extra="forbid"):
    city: str = Field(max_length=12)
    sunny: bool
    wind: Literal["none", "some", "strong"]


def weather(city: str, days: int) -> str:
    """The weather in a city, for so many days."""
    return f"cold in {city} for {days} days"


# llm


@pytest.fixture
def plugged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Served], Any]:
    """Gives llm's model of a server, as the plugin registers it."""
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))

    def model_of(served: Served, id: str = "deltic") -> Any:
        from deltic import llm_plugin

        monkeypatch.setenv("DELTIC_URL", served.url)
        found: dict[str, Any] = {}
        llm_plugin.register_models(lambda model, other: found.update({model.model_id: model, "a-" + id: other}))
        return found[id]
    return model_of


def test_llm_streamed_and_with_a_schema(served: Served, plugged: Callable[..., Any]) -> None:
    name = served.client.models.list().data[0].id
    for model in (plugged(served), plugged(served, f"deltic/{name}")):
        whole = model.prompt(QUESTION, stream=False, temperature=0, max_tokens=100).text()
        assert whole and "".join(model.prompt(QUESTION, temperature=0, max_tokens=100)) == whole
        for stream in (False, True):
            answer = model.prompt(QUESTION, schema=Forecast, stream=stream, temperature=1, seed=3, max_tokens=300)
            assert Forecast.model_validate_json(answer.text())
    conversation = plugged(served).conversation()
    used = []
    for text in (QUESTION, "And Rome?"):
        answer = conversation.prompt(text, temperature=0, max_tokens=20)
        assert answer.text()
        used.append(answer.usage().input)
    assert used[1] > used[0], "the second turn has no first"


@pytest.mark.parametrize("stream", [False, True])
def test_llm_calls_tools(plugged: Callable[..., Any], stream: bool) -> None:
    with scripted("") as (served, engine):
        play_turns(engine, CALL, "It is cold.")
        chain = plugged(served).chain(QUESTION, tools=[weather], stream=stream)
        assert chain.text() == "It is cold." and len(engine.seen) == 2
        first, second = (request.ids for request in engine.seen)
        assert second[:len(first)] == first


def test_llm_on_the_command_line(served: Served, tmp_path: Path) -> None:
    """As installed, or else with the entry point that the package declares."""
    entry = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]["llm"]
    metadata = tmp_path / "deltic_entry-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: deltic-entry\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[llm]\ndeltic = " + entry["deltic"] + "\n")
    paths = os.pathsep.join((str(ROOT), str(tmp_path)))
    told = {**os.environ, "PYTHONPATH": paths, "LLM_USER_PATH": str(tmp_path / "llm"), "DELTIC_URL": served.url,
            "LLM_LOAD_PLUGINS": "deltic-entry"}

    def run(*arguments: str, **more: str) -> str:
        return subprocess.run([sys.executable, "-m", "llm", *arguments], capture_output=True, text=True, check=True,
                              timeout=120, env=told | more, stdin=subprocess.DEVNULL).stdout

    name = served.client.models.list().data[0].id
    listed = run("models")
    assert "deltic\n" in listed.replace(": ", "\n") and f"deltic/{name}" in listed
    schema = {"type": "object", "required": ["sunny", "cold"], "additionalProperties": False,
              "properties": {"sunny": {"type": "boolean"}, "cold": {"type": "boolean"}}}
    answer = run("-m", "deltic", "--schema", json.dumps(schema), "-o", "temperature", "0", QUESTION)
    assert set(json.loads(answer)) == {"sunny", "cold"}
    assert "deltic" in run("models", DELTIC_URL="http://127.0.0.1:9"), "without a server llm has to start all the same"


def test_deltic_does_not_import_llm() -> None:
    program = "import deltic, sys; deltic.LLM; print('llm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT,
                          timeout=60).stdout == "False\n"


# litellm as a client


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    litellm.telemetry = False
    yield litellm


def provided(served: Served, provider: str) -> dict[str, Any]:
    base = served.url if provider == "anthropic" else f"{served.url}/v1"
    return {"model": f"{provider}/default", "api_base": base, "api_key": "none", "num_retries": 0, "max_tokens": 200}


def content(answer: Any) -> str:
    return answer.choices[0].message.content or ""


@pytest.mark.parametrize("provider", ["openai", "anthropic", "hosted_vllm"])
def test_litellm(served: Served, litellm: Any, provider: str) -> None:
    asked = provided(served, provider) | {"messages": MESSAGES, "temperature": 0}
    whole = litellm.completion(**asked)
    chunks = [*litellm.completion(**asked, stream=True, stream_options={"include_usage": True})]
    joined = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert content(whole) == content(joined) and content(whole)
    assert whole.usage.completion_tokens == joined.usage.completion_tokens > 0
    assert content(asyncio.run(litellm.acompletion(**asked))) == content(whole)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_litellm_response_format(served: Served, litellm: Any, provider: str, temperature: float) -> None:
    asked = provided(served, provider) | {"messages": MESSAGES, "temperature": temperature, "seed": 3,
                                          "response_format": Forecast}
    whole = content(litellm.completion(**asked))
    assert Forecast.model_validate_json(whole)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True)) == whole
    with scripted('{"a": 1}') as (other, engine):
        asked |= provided(other, provider) | {"response_format": {"type": "json_object"}}
        assert content(litellm.completion(**asked)) == '{"a": 1}' and engine.seen[0].constraint


def test_litellm_response_format_for_anthropic(served: Served, litellm: Any) -> None:
    asked = provided(served, "anthropic") | {"messages": MESSAGES, "temperature": 0, "response_format": Forecast}
    assert Forecast.model_validate_json(content(litellm.completion(**asked)))


@pytest.mark.parametrize("provider", ["openai", "anthropic", "hosted_vllm"])
@pytest.mark.parametrize("stream", [False, True])
def test_litellm_tools(litellm: Any, provider: str, stream: bool) -> None:
    tool = {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}}
    with scripted("") as (served, engine):
        play_turns(engine, CALL, "Cold.")
        asked = provided(served, provider) | {"tools": [tool], "stream": stream}

        def ask(messages: list[Any]) -> Any:
            found = litellm.completion(**asked, messages=messages)
            return (litellm.stream_chunk_builder([*found]) if stream else found).choices[0].message

        first = ask(MESSAGES)
        call, = first.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo", "days": 3})
        result = {"role": "tool", "tool_call_id": call.id, "content": "-3"}
        assert ask([*MESSAGES, first, result]).content == "Cold."
        prompts = [request.ids for request in engine.seen]
        assert prompts[1][:len(prompts[0])] == prompts[0]


@pytest.mark.parametrize("stream", [False, True])
def test_litellm_for_anthropics_clients_in_front_of_chat(litellm: Any, stream: bool) -> None:
    """Its adapter: a request of Anthropic's wire is sent on as one of OpenAI's."""
    tool = {"name": "weather", "input_schema": {"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}}}}
    with scripted("I look.\n" + CALL) as (served, _):
        asked = provided(served, "hosted_vllm") | {"messages": MESSAGES, "tools": [tool], "stream": stream}

        async def ask() -> Any:
            found = await litellm.anthropic.messages.acreate(**asked)
            return [piece async for piece in found] if stream else found

        found = asyncio.run(ask())
    if not stream:
        text, call = found["content"]
        assert text["text"].strip() == "I look." and call["input"] == {"city": "Oslo", "days": 3}
        assert found["stop_reason"] == "tool_use"
        return
    events = b"".join(piece if isinstance(piece, bytes) else b"" for piece in found).decode()
    data = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: ")]
    pieces = [event["delta"] for event in data if event["type"] == "content_block_delta"]
    assert "".join(piece.get("text", "") for piece in pieces).strip() == "I look."
    assert json.loads("".join(piece.get("partial_json", "") for piece in pieces)) == {"city": "Oslo", "days": 3}
    assert data[-1]["type"] == "message_stop"


def test_litellm_responses(served: Served, litellm: Any) -> None:
    asked = provided(served, "openai")
    del asked["max_tokens"], asked["num_retries"]
    found = litellm.responses(**asked, input=QUESTION, temperature=0, max_output_tokens=60)
    assert found.output[0].content[0].text
    *_, last = litellm.responses(**asked, input=QUESTION, temperature=0, max_output_tokens=60, stream=True)
    assert last.response.output[0].content[0].text == found.output[0].content[0].text
