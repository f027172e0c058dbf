"""The real anthropic client talks to the embedded model, and to an engine that follows a script."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic
from test_server_harness import CALL, THOUGHT, Scripted, Served, authorities, each, scripted, serving, tiny

USER: list[Any] = [{"role": "user", "content": "Hi"}]
TOOLS: list[Any] = [{"name": "weather", "description": "Says how it is.", "input_schema": {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}]
THINKING = {"type": "enabled", "budget_tokens": 1024}
pytestmark = pytest.mark.usefixtures("script_server")


@contextmanager
def client_of(served: Served, **options: Any) -> Iterator[Anthropic]:
    given = {"api_key": "none", "max_retries": 0, "timeout": 30} | options
    transport = anthropic.DefaultHttpxClient(verify=authorities())
    with Anthropic(base_url=served.url, http_client=transport, **given) as client:
        yield client


def create(served: Served, **more: Any) -> Any:
    with client_of(served) as client:
        return client.messages.create(**({"model": "tiny", "max_tokens": 200, "messages": USER} | more))


def stream(served: Served, **more: Any) -> tuple[list[Any], Any]:
    """The events as they came over the wire, and the message that the client made of them."""
    asked = {"model": "tiny", "max_tokens": 200, "messages": USER} | more
    with client_of(served) as client:
        events = list(client.messages.create(**asked, stream=True))
        with client.messages.stream(**asked) as live:
            return events, live.get_final_message()


def shown(message: Any) -> Any:
    """A message without what differs from answer to answer."""
    data = message.model_dump(exclude_none=True)
    for block in data["content"]:
        block.pop("id", None)
        block.pop("parsed_output", None)
    data["usage"] = {name: data["usage"][name] for name in (
        "input_tokens", "cache_read_input_tokens", "output_tokens", "output_tokens_details")}
    return {name: data.get(name) for name in ("content", "role", "model", "stop_reason", "stop_sequence", "usage")}


def test_answer_of_the_embedded_model(served: Served) -> None:
    answer = create(served, system="Be brief.", extra_body={"ignore_eos": True, "temperature": 0}, max_tokens=12)
    assert answer.type == "message" and answer.role == "assistant" and answer.model == "tiny"
    assert [block.type for block in answer.content] == ["text"] and answer.content[0].text
    assert answer.stop_reason == "max_tokens" and answer.usage.output_tokens == 12 and answer.id.startswith("msg_")
    same = served.client.chat.completions.create(
        model="tiny", temperature=0, max_tokens=12, extra_body={"ignore_eos": True, "enable_thinking": False},
        messages=[{"role": "system", "content": "Be brief."}, *USER])
    assert same.choices[0].message.content == answer.content[0].text
    assert answer._request_id.startswith("req_")  # type: ignore[union-attr]
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == same.usage.prompt_tokens  # type: ignore


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("Hello there.", {}), "nothing": ("", {}), "calls": (CALL + "\n" + CALL, {"tools": TOOLS}),
    "all": (THOUGHT + "I look.\n" + CALL + "\n" + CALL, {"tools": TOOLS, "thinking": THINKING}),
    "hidden": (THOUGHT + "Yes.", {"thinking": {"type": "adaptive", "display": "omitted"}}),
    "stopped": ("One two three.", {"stop_sequences": ["two", "never"]}), "cut": ("One two three.", {"max_tokens": 3}),
    "broken": ("<tool_call>\nnonsense", {"tools": TOOLS}), "letters": ("a\U0001f642b\u00e9\u6f22", {}),
}


@each("name", CASES)
def test_a_stream_says_what_the_whole_says(name: str) -> None:
    text, more = CASES[name]
    with scripted(text.removeprefix("<think>\n") if "thinking" in more else text) as (served, _):
        whole = create(served, **more)
        events, message = stream(served, **more)
    assert shown(message) == shown(whole)
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    open_block = -1
    for event in events[1:-2]:
        if event.type == "content_block_start":
            assert event.index == open_block + 1
            open_block = event.index
        assert event.index == open_block
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(whole.content)


def test_thinking_calls_and_reasons() -> None:
    with scripted("Let me see.\n</think>\n\nI look.\n" + CALL) as (served, _):
        whole = create(served, tools=TOOLS, thinking=THINKING)
        events, _ = stream(served, tools=TOOLS, thinking=THINKING)
    thought, text, call = whole.content
    assert (thought.type, thought.thinking, bool(thought.signature)) == ("thinking", "Let me see.", True)
    assert (text.text, call.name, call.input) == ("I look.", "weather", {"city": "Oslo", "days": 3})
    assert whole.stop_reason == "tool_use" and call.id
    assert 0 < whole.usage.output_tokens_details.thinking_tokens < whole.usage.output_tokens
    deltas = [event.delta.type for event in events if event.type == "content_block_delta"]
    assert list(dict.fromkeys(deltas)) == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]


@each(("more", "reason", "sequence"), [
    ({}, "end_turn", None), ({"max_tokens": 2}, "max_tokens", None), ({"stop_sequences": ["wo", "x"]},
                                                                     "stop_sequence", "wo")])
def test_why_it_ended(more: dict[str, Any], reason: str, sequence: str | None) -> None:
    with scripted("One two three four.") as (served, _):
        answer = create(served, **more)
    assert (answer.stop_reason, answer.stop_sequence) == (reason, sequence)


def test_an_answer_that_ends_with_the_context_says_so(served: Served) -> None:
    fill: list[Any] = [{"role": "user", "content": "a " * 2000}]
    room = 2048 - served.post("/v1/messages/count_tokens", messages=fill).json()["input_tokens"]
    for tokens, reason in ((room + 1, "model_context_window_exceeded"), (room - 1, "max_tokens")):
        asked: dict[str, Any] = {"messages": fill, "max_tokens": tokens, "extra_body": {"ignore_eos": True}}
        assert create(served, **asked).stop_reason == stream(served, **asked)[1].stop_reason == reason


def test_no_tokens_read_the_prompt_ahead(served: Served) -> None:
    prompt: dict[str, Any] = {"system": "Ahead of who will ask.", "max_tokens": 0}
    first = create(served, **prompt)
    assert (first.content, first.stop_reason, first.usage.output_tokens) == ([], "max_tokens", 0)
    again = create(served, **prompt | {"max_tokens": 1}).usage
    assert again.cache_read_input_tokens >= first.usage.input_tokens - 1 > 5
    events, message = stream(served, **prompt)
    assert [event.type for event in events] == ["message_start", "message_delta", "message_stop"]
    assert message.content == []


def test_without_the_field_nobody_thinks() -> None:
    with scripted("x") as (served, engine):
        create(served)
        create(served, thinking={"type": "disabled"})
        create(served, thinking=THINKING)
    first, off, on = (request.prompt for request in engine.seen)
    assert first == off != on


def test_what_is_sent_as_blocks_is_the_same_prompt() -> None:
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    with scripted("x") as (served, engine):
        create(served, system="Be brief.")
        create(served, system=[{"type": "text", "text": "Be brief.", **cached}], cache_control={"type": "ephemeral"},
               messages=[{"role": "user", "content": [{"type": "text", "text": "Hi", **cached}]}],
               metadata={"user_id": "somebody"}, service_tier="auto",
               extra_headers={"anthropic-beta": "prompt-caching-2024-07-31"}, extra_query={"beta": "true"})
    one, other = (request.prompt for request in engine.seen)
    assert one == other


def loop(result: Any, **more: Any) -> list[Any]:
    """A conversation in which a tool has answered."""
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"days": 3, "city": "Oslo"}}
    return [*USER, {"role": "assistant", "content": [{"type": "text", "text": "I look."}, call]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": result, **more},
                                         {"type": "text", "text": "And?"}]}]


def test_results_of_tools() -> None:
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "rain"}}
    with scripted("x") as (served, engine):
        for result in ("rain", [{"type": "text", "text": "rain"}], [document]):
            create(served, messages=loop(result), tools=TOOLS)
        create(served, messages=loop(None, is_error=True), tools=TOOLS)
        chat = [*USER, {"role": "assistant", "content": "I look.", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"days":3,"city":"Oslo"}'}}]},
            {"role": "tool", "tool_call_id": "1", "content": "rain"}, {"role": "user", "content": "And?"}]
        tools = [{"type": "function", "function": {"name": tool["name"], "description": tool["description"],
                                                   "parameters": tool["input_schema"]}} for tool in TOOLS]
        served.post("/v1/chat/completions", messages=chat, tools=tools, enable_thinking=False)
    prompts = [request.prompt for request in engine.seen]
    assert prompts[0] == prompts[1] == prompts[2] == prompts[4] != prompts[3]


def test_documents_and_search_results_that_are_texts() -> None:
    rain, snow = {"type": "text", "text": "rain"}, {"type": "text", "text": "snow"}
    same: list[tuple[dict[str, Any], str]] = [
        ({"type": "document", "title": "Sky", "context": "Oslo", "source": {"type": "text", "data": "rain"}},
         "Sky\nOslo\nrain"),
        ({"type": "document", "title": "Sky", "source": {"type": "content", "content": [rain, snow]}},
         "Sky\nrain\n\nsnow"),
        ({"type": "document", "source": {"type": "content", "content": "rain"}, "title": None}, "rain"),
        ({"type": "search_result", "title": "Sky", "source": "sky.example", "content": [rain]},
         "Sky\nsky.example\nrain")]
    with scripted("x") as (served, engine):
        for block, text in same:
            for content in ([block], text):
                answer = served.post("/v1/messages", max_tokens=1, messages=[{"role": "user", "content": content}])
                assert answer.status_code == 200 and "x-deltic-ignored" not in answer.headers
                create(served, messages=loop(content))
    prompts = [request.prompt for request in engine.seen]
    assert all(prompts[at:at + 2] == prompts[at + 2:at + 4] for at in range(0, len(prompts), 4))


def test_the_next_turn_reads_only_what_is_new(served: Served) -> None:
    asked: dict[str, Any] = {"max_tokens": 60, "thinking": {"type": "enabled", "budget_tokens": 20}, "system": "Brief!",
                             "extra_body": {"history": "preserve", "temperature": 0}}
    first = create(served, **asked)
    again = [*USER, {"role": "assistant", "content": [block.to_dict() for block in first.content]},
             {"role": "user", "content": "And then?"}]
    second = create(served, **asked, messages=again)
    before = first.usage.input_tokens + first.usage.cache_read_input_tokens
    assert first.content[0].type == "thinking"
    assert second.usage.cache_read_input_tokens >= before + first.usage.output_tokens - 1


@each("sent", [True, False])
def test_a_tool_loop_goes_on_from_the_very_ids(sent: bool) -> None:
    """With the thinking sent back as it came."""
    asked: dict[str, Any] = {"tools": TOOLS, "thinking": THINKING}
    with scripted("Let  me see.\n</think>\n\nI look.\n\n" + CALL) as (served, engine):
        content = [block.to_dict() for block in create(served, **asked).content]
        result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": "rain"}
        create(served, **asked, messages=[*USER, {"role": "assistant", "content": content[not sent:]},
                                          {"role": "user", "content": [result]}])
    first, second = (request.prompt for request in engine.seen)
    assert (second[:len(first) + len(engine.script)] == (*first, *engine.script)) == sent


def test_a_last_message_of_the_assistant_is_continued() -> None:
    prefilled = [*USER, {"role": "assistant", "content": "The answer is"}]
    with scripted(" yes.") as (served, engine):
        assert create(served, messages=prefilled).content[0].text == " yes."
        prompt = engine.seen[-1].prompt
    tokenizer = tiny().chat_processor.tokenizer
    assert tokenizer.decode(prompt, skip_special=False).endswith("The answer is")


def test_tokens_are_counted(served: Served) -> None:
    with client_of(served) as client:
        few = client.messages.count_tokens(model="tiny", messages=USER).input_tokens
        many = client.messages.count_tokens(model="tiny", messages=USER, tools=TOOLS, system="Be brief.").input_tokens
    usage = create(served, tools=TOOLS, system="Be brief.", max_tokens=1).usage
    assert 0 < few < many == usage.input_tokens + usage.cache_read_input_tokens


SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "old": {"type": "boolean"}},
          "required": ["name", "old"], "additionalProperties": False}


def test_answers_keep_to_a_schema(served: Served) -> None:
    form = {"format": {"type": "json_schema", "schema": SCHEMA}}
    answer = create(served, output_config=form, max_tokens=100)
    _, streamed = stream(served, output_config=form, max_tokens=100)
    for message in (answer, streamed):
        found = json.loads(message.content[0].text)
        assert set(found) == {"name", "old"} and isinstance(found["old"], bool) and message.stop_reason == "end_turn"


def test_tool_choice() -> None:
    with scripted(CALL) as (served, engine):
        none = create(served, tools=TOOLS, tool_choice={"type": "none"})
        create(served)
        assert create(served, tools=TOOLS, tool_choice={"type": "auto"}).stop_reason == "tool_use"
    assert none.content[0].text == CALL and engine.seen[-3].prompt == engine.seen[-2].prompt


def test_a_long_silence_is_filled_with_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltic.server.http.KEEP_ALIVE", 0.05)
    with scripted("ab", pause=0.3) as (served, _):
        text = served.post("/v1/messages", messages=USER, max_tokens=9, stream=True).text
        assert stream(served)[1].content[0].text == "ab"
    names = [line.removeprefix("event: ") for line in text.split("\n") if line.startswith("event: ")]
    assert names[:2] == ["message_start", "ping"] and names[-1] == "message_stop"


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


@each(("fields", "said"), [
    ({"messages": []}, "messages must have"), ({"messages": 5}, "messages must be"), ({"messages": None}, "messages"),
    ({"messages": [5]}, r"messages[0].role"), ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    (user(5), "messages[0].content must be"), (user([5]), "messages[0].content[0] must be"),
    (user([{"type": 5}]), "messages[0].content[0]"), (user([IMAGE]), "messages[0].content[0] is no picture"),
    (user([{"type": "text", "text": 5}]), "content[0].text must be text"),
    (user([{"type": "tool_result", "tool_use_id": "1", "content": [IMAGE]}]), "content[0].content[0] is no picture"),
    (user([{"type": "document", "source": {"type": "base64", "data": ""}}]), "neither a PDF document nor text"),
    (user([{"type": "document", "source": {"type": "url", "url": "https://x.example/a.pdf"}}]), "has no data"),
    (user([{"type": "docment", "source": {}}]), "do you mean 'document'?"),
    (user([{"type": "input_audio", "input_audio": {}}]), "sounds are not read"),
    (user([{"type": "document", "title": 5, "source": {"type": "text", "data": "x"}}]), "content[0].title must be"),
    (user([{"type": "document", "source": {"type": "content", "content": [IMAGE]}}]), "source.content[0] is of type"),
    (user([{"type": "search_result", "title": "x", "source": "y"}]), "content[0].content must be text or a list"),
    (user("a " * 9000), "prompt is too long: it has more than 2047 tokens"), ({"system": 5}, "system must be"),
    ({"system": [IMAGE]}, "system[0]"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens must be"), ({"max_tokens": "5"}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 2}, "top_p"), ({"top_k": -2}, "top_k"), ({"stop_sequences": [""]}, "stop_sequences must be"),
    ({"stop_sequences": "x"}, "stop_sequences"), ({"stop_sequences": ["x"] * 100}, "max_stops"),
    ({"stream": "yes"}, "stream"), ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "often"}}, "thinking.type"), ({"thinking": True}, "thinking"),
    ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens must be a number"),
    ({"tools": [5]}, "tools[0] must"), ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0] has the type"),
    ({"tools": TOOLS, "tool_choice": {"type": "often"}}, "tool_choice.type"), ({"tool_choice": "auto"}, "tool_choice"),
    ({"output_config": {"effort": 5}}, "output_config.effort"), ({"output_config": {"format": {}}}, "output_config.f"),
    ({"tools": TOOLS, "tool_choice": {"type": ["x"]}}, "tool_choice.type must be"),
    ({"tools": [{"name": "a<b", "input_schema": {}}]}, "tools[0].name must be"),
    ({"messages": [*USER, {"role": "assistant", "content": [
        {"type": "text", "text": "x"}, {"type": "tool_use", "id": "1", "name": "x", "input": 5}]}, *USER]},
     "messages[1].content[1].input must be"),
    ({"output_config": {"format": {"type": "json_schema", "schema": 5}}}, "output_config.format.schema"),
    ({"stop_sequence": 1}, "unknown field 'stop_sequence'"), ({"max_token": 1}, "do you mean 'max_tokens'"),
    ({"history": "all"}, "history"),
    ({"messages": [*USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": 5}]}]}, "[0].thinking"),
    ({"messages": [*USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "x"}]}]},
     "only an assistant"), ({"mcp_servers": [{"url": "x"}]}, "mcp_servers is not supported"),
    ({"thread": {"type": "create"}}, "thread is not supported"), ({"output_format": {"type": "x"}}, "output_config.f"),
])
@each("streamed", [False, True])
def test_a_bad_field_is_named(served: Served, fields: dict[str, Any], said: str, streamed: bool) -> None:
    body = {"messages": USER, "max_tokens": 2, "stream": streamed} | fields
    response = served.http.post("/v1/messages", content=json.dumps(body))
    data = response.json()
    assert response.status_code == 400 and data["type"] == "error", data
    assert data["error"]["type"] == "invalid_request_error" and said in data["error"]["message"], data
    assert data["request_id"] == response.headers["request-id"]


def test_the_tool_runner_is_told_that_there_are_no_threads() -> None:
    with scripted("Yes.") as (served, engine), client_of(served) as client:
        runner = client.beta.messages.tool_runner(model="tiny", max_tokens=5, messages=USER, tools=[])
        assert runner.until_done().content[0].text == "Yes." and len(engine.seen) == 1  # type: ignore[union-attr]


def test_errors_have_the_types_of_anthropic(served: Served) -> None:
    with client_of(served) as client:
        with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
            client.messages.create(model="gpt-4", max_tokens=1, messages=USER)
        with pytest.raises(anthropic.BadRequestError, match="invalid_request_error"):
            client.messages.create(model="tiny", max_tokens=-1, messages=USER)
        with pytest.raises(anthropic.BadRequestError, match="system"):
            client.messages.count_tokens(model="tiny", messages=USER, system=5)  # type: ignore[arg-type]
    assert served.http.get("/v1/messages").json()["error"]["type"] == "invalid_request_error"
    assert served.http.post("/v1/messages/batches").json()["error"]["type"] == "not_found_error"
    assert served.http.post("/v1/messages", content=b"x" * (9 << 20)).json()["error"]["type"] == "request_too_large"


def test_keys_and_engines_that_fail() -> None:
    engine = Scripted("one two three four five", error="the logits are NaN")
    with serving(engine.model(max_waiting=1), api_keys={"secret": "me"}) as other:
        with client_of(other) as client, pytest.raises(anthropic.AuthenticationError):
            client.messages.create(model="tiny", max_tokens=5, messages=USER)
        for options in ({"api_key": "secret"}, {"api_key": None, "auth_token": "secret"}):
            with client_of(other, **options) as client:
                with pytest.raises(anthropic.InternalServerError, match="logits are NaN"):
                    client.messages.create(model="tiny", max_tokens=9, messages=USER)
                with pytest.raises(anthropic.APIStatusError, match="logits are NaN"):
                    list(client.messages.create(model="tiny", max_tokens=9, messages=USER, stream=True))


def test_no_room_is_overload() -> None:
    engine = Scripted(None, pause=0.01)
    with serving(engine.model(max_waiting=1, max_live_tokens=10)) as other:
        raw = other.send("/v1/messages", messages=USER, max_tokens=2000, stream=True)
        with raw, client_of(other) as client:
            assert raw.recv(10)
            with pytest.raises(anthropic.OverloadedError) as refusal:
                client.messages.create(model="tiny", max_tokens=5, messages=USER)
    assert refusal.value.status_code == 529 and refusal.value.response.headers["retry-after"]
