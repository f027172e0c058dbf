"""Responses: the real openai client talks to the embedded model, and to an engine that follows a script."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel
from test_server_harness import CALL, THOUGHT, Scripted, Served, each, scripted, serving, wait_until

from deltic import LLM
from deltic.config import Limits
from deltic.server.records import RequestLog
from deltic.server.response_store import ResponseStore
from deltic.server.routing import IGNORED_HEADER

TOOLS: list[Any] = [{"type": "function", "name": "weather", "strict": True, "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}]
PATCH = "<tool_call>\n<function=patch>\n<parameter=input>\n*** Begin\n+ a\n</parameter>\n</function>\n</tool_call>"
CUSTOM: list[Any] = [{"type": "custom", "name": "patch", "description": "Edits."}]
PATH = "/v1/responses"
pytestmark = pytest.mark.usefixtures("script_server")


def create(served: Served, **more: Any) -> Any:
    return served.client.responses.create(**({"model": "tiny", "input": "Hi"} | more))


def shown(value: Any) -> Any:
    """A response without what differs from one to the next."""
    if isinstance(value, dict):
        return {name: shown(item) for name, item in value.items()
                if name not in ("id", "call_id", "created_at", "completed_at", "item_id") and item is not None}
    return [shown(item) for item in value] if isinstance(value, list) else value


def test_answer_of_the_embedded_model(served: Served) -> None:
    asked: dict[str, Any] = {"temperature": 0, "max_output_tokens": 12, "extra_body": {"ignore_eos": True}}
    answer = create(served, instructions="Be brief.", **asked)
    assert answer.object == "response" and answer.model == "tiny" and answer.id.startswith("resp_")
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.output_tokens == 12 and answer.output_text
    same = served.client.chat.completions.create(
        model="tiny", temperature=0, max_tokens=12, extra_body={"ignore_eos": True},
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    assert same.choices[0].message.content == answer.output_text
    assert same.usage and same.usage.prompt_tokens == answer.usage.input_tokens


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("Hello there.", {}), "nothing": ("", {}), "calls": (CALL + "\n" + CALL, {"tools": TOOLS}),
    "all": (THOUGHT + "I look.\n" + CALL + "\n" + CALL, {"tools": TOOLS}),
    "sealed": (THOUGHT + "Yes.", {"store": False, "include": ["reasoning.encrypted_content"]}),
    "stopped": ("One two three.", {"extra_body": {"stop": ["two"]}}),
    "cut": ("One two three.", {"max_output_tokens": 3}), "cut thought": (THOUGHT, {"max_output_tokens": 5}),
    "custom": ("I edit.\n" + PATCH, {"tools": CUSTOM}), "broken": ("<tool_call>\nnonsense", {"tools": TOOLS}),
    "letters": ("a\U0001f642b\u00e9\u6f22", {"metadata": {"a": "b"}, "temperature": 0.5, "user": "u"}),
}


@each("name", CASES)
def test_a_stream_says_what_the_whole_says(name: str) -> None:
    text, more = CASES[name]
    with scripted(text) as (served, _):
        whole = create(served, **more)
        events = list(create(served, stream=True, **more))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{whole.status}"
    assert shown(events[-1].response.model_dump()) == shown(whole.model_dump())
    final, ids = events[-1].response, [item.id for item in events[-1].response.output]
    assert events[0].response.id == final.id and len(set(ids)) == len(ids)
    texts: dict[tuple[str, str], str] = {}
    for event in events[2:-1]:
        item = getattr(event, "item", None)
        assert (item.id if item else event.item_id) == ids[event.output_index]
        if event.type.endswith(".delta"):
            key = event.item_id, event.type.removesuffix(".delta")
            texts[key] = texts.get(key, "") + event.delta
        elif event.type == "response.output_item.done":
            assert item == final.output[event.output_index]
        elif event.type.endswith((".done",)) and "content_part" not in event.type:
            said = next(value for name in ("text", "arguments", "input") if (value := getattr(event, name, None)))
            assert texts[event.item_id, event.type.removesuffix(".done")] == said


def test_items() -> None:
    with scripted(THOUGHT + "I look.\n" + CALL) as (served, _):
        response = create(served, tools=TOOLS)
        with served.client.responses.stream(model="tiny", input="Hi", tools=TOOLS) as stream:
            helped = stream.get_final_response()
    thought, text, call = response.output
    assert (thought.type, thought.content[0].text, thought.summary) == ("reasoning", "Let me see.", [])
    assert text.content[0].text == "I look." == response.output_text
    assert (call.type, call.name) == ("function_call", "weather")
    assert json.loads(call.arguments) == {"city": "Oslo", "days": 3}
    assert response.usage.output_tokens_details.reasoning_tokens > 0 and response.status == "completed"
    assert [item.type for item in helped.output] == [item.type for item in response.output]


def test_tokens_are_counted() -> None:
    with scripted("Yes.") as (served, engine):
        asked: dict[str, Any] = {"model": "tiny", "input": "Hi", "instructions": "Be brief.", "tools": TOOLS}
        made = create(served, **asked)
        for more in ({}, {"previous_response_id": made.id, "input": "And?"}):
            counted = served.client.responses.input_tokens.count(**asked | more)
            assert counted.object == "response.input_tokens" and len(engine.seen) == 1
            assert not more or counted.input_tokens > made.usage.input_tokens
            assert more or counted.input_tokens == made.usage.input_tokens
        with pytest.raises(openai.BadRequestError, match="input must be"):
            served.client.responses.input_tokens.count(model="tiny")


def test_custom_tools_take_a_text() -> None:
    with scripted(PATCH) as (served, engine):
        call = create(served, tools=CUSTOM).output[0]
        output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
        create(served, tools=CUSTOM, input=[{"role": "user", "content": "Hi"}, call.to_dict(), output])
    assert (call.type, call.name, call.input) == ("custom_tool_call", "patch", "*** Begin\n+ a")
    first, second = (request.prompt for request in engine.seen)
    assert second[:len(first) + len(engine.script)] == (*first, *engine.script)


def test_tools_of_namespaces_are_the_clients_own() -> None:
    group: list[Any] = [{"type": "namespace", "name": "north", "description": "Up there.", "tools": [*TOOLS, *CUSTOM]}]
    call = CALL.replace("=weather", "=north.weather")
    with scripted(call + "\n" + PATCH.replace("=patch", "=north.patch")) as (served, engine):
        whole = create(served, tools=group)
        events = list(create(served, tools=group, stream=True))
        assert shown(events[-1].response.model_dump()) == shown(whole.model_dump())
        calls = [(item.type, item.namespace, item.name) for item in whole.output]
        assert calls == [("function_call", "north", "weather"), ("custom_tool_call", "north", "patch")]
        outputs: list[Any] = [{"type": f"{kind}_output", "call_id": item.call_id, "output": "done"}
                              for kind, item in zip(("function_call", "custom_tool_call"), whole.output, strict=True)]
        sent = [{"role": "user", "content": "Hi"}, *(item.to_dict() for item in whole.output), *outputs]
        create(served, tools=group, input=sent)
        create(served, tools=[*group, *CUSTOM], tool_choice={
            "type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "north"}]})
        many = [{"type": "function", "name": f"f{index}"} for index in range(513)]
        for wrong, param in (({"tools": 5}, "tools[0]"), ({"tools": [*TOOLS, group[0]]}, "tools[0].tools[1]"),
                             ({"tools": many}, "tools"), ({"name": "a<b"}, "tools[0].tools[0].name")):
            with pytest.raises(openai.BadRequestError) as refusal:
                create(served, tools=[group[0] | wrong])
            assert refusal.value.param == param
    first, _, after, same = (request.prompt for request in engine.seen)
    assert after[:len(first) + len(engine.script)] == (*first, *engine.script) and same == first


@each("way", ["kept", "sent", "named", "sealed", "unthought"])
def test_a_tool_loop_goes_on_from_the_very_ids(way: str) -> None:
    asked: dict[str, Any] = {"tools": TOOLS, "extra_body": {"enable_thinking": True}}
    if way == "sealed":
        asked |= {"store": False, "include": ["reasoning.encrypted_content"]}
    with scripted("Let  me see.\n</think>\n\nI look.\n\n" + CALL) as (served, engine):
        first = create(served, **asked)
        result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "rain"}
        items = [item.to_dict() for item in first.output]
        if way == "sealed":
            items[0] |= {"content": None}
        items = items[1:] if way == "unthought" else items
        if way == "named":
            items = [{"type": "item_reference", "id": item["id"]} for item in items]
        if way == "kept":
            create(served, **asked, previous_response_id=first.id, input=[result])
        else:
            create(served, **asked, input=[{"role": "user", "content": "Hi"}, *items, result])
    before, after = (request.prompt for request in engine.seen)
    assert (after[:len(before) + len(engine.script)] == (*before, *engine.script)) == (way != "unthought")


def test_the_next_turn_reads_only_what_is_new(served: Served) -> None:
    asked: dict[str, Any] = {"temperature": 0, "max_output_tokens": 60, "instructions": "Short!",
                             "extra_body": {"history": "preserve"}}
    first = create(served, **asked)
    second = create(served, **asked, input="And then?", previous_response_id=first.id)
    third = create(served, **asked, input="And now?", previous_response_id=second.id)
    for before, after in ((first, second), (second, third)):
        assert after.usage.input_tokens_details.cached_tokens >= before.usage.total_tokens - 1
    assert third.previous_response_id == second.id


class Person(BaseModel):
    name: Literal["Ada", "Bob"]
    old: bool


def test_answers_keep_to_a_schema(served: Served) -> None:
    asked: dict[str, Any] = {"model": "tiny", "input": "Who?", "text_format": Person, "max_output_tokens": 100}
    parsed = served.client.responses.parse(**asked)
    with served.client.responses.stream(**asked) as stream:
        streamed = stream.get_final_response()
    for response in (parsed, streamed):
        assert isinstance(response.output_parsed, Person) and response.status == "completed"
    assert parsed.text.format.type == "json_schema"  # type: ignore[union-attr]


def test_kept_responses_can_be_asked_for_and_deleted() -> None:
    with scripted("Yes.") as (served, _):
        made = create(served, input=[{"role": "user", "content": f"{i}"} for i in range(3)], metadata={"a": "b"})
        client = served.client.responses
        assert client.retrieve(made.id) == made
        found = client.input_items.list(made.id, order="asc")
        assert [item.content[0].text for item in found] == ["0", "1", "2"]  # type: ignore[union-attr]
        page = client.input_items.list(made.id, limit=2)
        assert [item.content[0].text for item in page.data] == ["2", "1"] and page.has_more  # type: ignore[union-attr]
        rest = client.input_items.list(made.id, after=page.data[-1].id or "")
        assert [item.content[0].text for item in rest.data] == ["0"]  # type: ignore[union-attr]
        with pytest.raises(openai.BadRequestError, match="completed"):
            client.cancel(made.id)
        assert served.http.delete(f"{PATH}/{made.id}").json()["deleted"] is True
        for ask in (client.retrieve, client.delete, client.cancel, client.input_items.list):
            with pytest.raises(openai.NotFoundError):
                ask(made.id)
        with pytest.raises(openai.BadRequestError) as refusal:
            create(served, previous_response_id=made.id)
        assert refusal.value.code == "previous_response_not_found"
        unkept = create(served, store=False)
        with pytest.raises(openai.NotFoundError):
            client.retrieve(unkept.id)


def test_items_may_be_named_instead_of_sent() -> None:
    with scripted("Yes.") as (served, engine):
        first = create(served, input=[{"role": "user", "content": "Hi"}])
        asked, = served.client.responses.input_items.list(first.id).data
        named: list[Any] = [{"id": asked.id}, {"type": "item_reference", "id": first.output[0].id}]
        second = create(served, input=[*named, {"role": "user", "content": "And?"}])
        items = served.client.responses.input_items.list(second.id, order="asc").data
        assert [item.content[0].text for item in items] == ["Hi", "Yes.", "And?"]  # type: ignore[union-attr]
        create(served, previous_response_id=first.id, input="And?")
        for gone in (named[1:] * 2, [{"id": create(served, store=False).output[0].id}]):
            with pytest.raises(openai.BadRequestError, match=r"is there already|is not kept: send it whole"):
                create(served, input=gone)
        served.client.responses.delete(first.id)
        with pytest.raises(openai.BadRequestError, match="is not kept: send it whole"):
            create(served, input=named)
    _, by_name, by_response, *_ = (request.prompt for request in engine.seen)
    assert by_name == by_response


def test_a_response_is_of_the_owner_of_its_key_alone() -> None:
    keys = {"first": "ann", "second": "ann", "third": "bob"}
    engine = Scripted("Hello.")
    with serving(engine.model(), api_keys=keys) as served:
        clients = {key: openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0) for key in keys}
        made = clients["first"].responses.create(model="tiny", input="Hi")
        id = made.id
        other = clients["third"].responses
        for asked in (other.retrieve, other.input_items.list, other.cancel, other.delete):
            with pytest.raises(openai.NotFoundError):
                asked(id)
        with pytest.raises(openai.BadRequestError, match="is not kept"):
            other.create(model="tiny", input="Go on", previous_response_id=id)
        with pytest.raises(openai.BadRequestError, match="is not kept"):
            other.create(model="tiny", input=[{"type": "item_reference", "id": made.output[0].id}])
        same = clients["second"].responses
        assert same.retrieve(id).id == id and same.input_items.list(id).data
        assert same.create(model="tiny", input="Go on", previous_response_id=id).previous_response_id == id
        engine.play(None)
        running = threading.Thread(target=lambda: clients["first"].responses.create(model="tiny", input="Hi"))
        running.start()
        making = wait_for_id(served)
        for asked in (other.retrieve, other.cancel):
            with pytest.raises(openai.NotFoundError):
                asked(making)
        assert same.cancel(making).status == "cancelled"
        running.join()
        same.delete(id)
        for client in clients.values():
            client.close()


@each("stream", [False, True])
def test_cancel(stream: bool) -> None:
    with scripted(None, pause=0.005) as (served, engine):
        found: list[Any] = []

        def ask() -> None:
            answer = create(served, stream=stream)
            found.extend(answer if stream else [answer])
        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(lambda: bool(engine.running))
        id = wait_for_id(served)
        assert served.client.responses.retrieve(id).status == "in_progress"
        assert served.client.responses.cancel(id).status == "cancelled"
        asking.join(20)
        last = found[-1].response if stream else found[-1]
        assert (last.id, last.status) == (id, "cancelled")
        served.wait_idle()
        wait_until(lambda: not engine.running)


def wait_for_id(served: Served) -> str:
    """Of the response that is being made."""
    found = next(route for route in served.app.routes if getattr(route, "path", "") == PATH)
    cells = [cell.cell_contents for cell in found.endpoint.__closure__]  # type: ignore[attr-defined]
    endpoints = next(cell.__self__ for cell in cells if hasattr(getattr(cell, "__self__", None), "active"))
    wait_until(lambda: bool(endpoints.active))
    return str(next(iter(endpoints.active)))


def test_an_engine_error() -> None:
    with scripted("one two three four five", error="the logits are NaN") as (served, _):
        with pytest.raises(openai.InternalServerError, match="the logits are NaN"):
            create(served)
        last = list(create(served, stream=True))[-1]
    assert last.type == "response.failed" and last.response.status == "failed"
    assert "the logits are NaN" in last.response.error.message


def test_what_has_no_effect_is_named() -> None:
    with scripted("x") as (served, engine):
        response = served.post(PATH, input="Hi", tools=[{"type": "web_search"}, *TOOLS], truncation="auto",
                               reasoning={"summary": "auto", "effort": "low"}, text={"verbosity": "low"},
                               include=["file_search_call.results"], client_metadata={}, max_tool_calls=3,
                               image={"context_compression": "auto"})
        served.post(PATH, input="Hi", tools=TOOLS, tool_choice={
            "type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]})
        served.post(PATH, input="Hi", tool_choice="none", tools=TOOLS)
        served.post(PATH, input="Hi")
    named = set(response.headers[IGNORED_HEADER].split(", "))
    assert named == {"tools.web_search", "truncation", "reasoning.summary", "text.verbosity", "client_metadata",
                     "include.file_search_call.results", "max_tool_calls", "image"}
    with_tools, same, none, without = (request.prompt for request in engine.seen)
    assert with_tools == same != none == without


@each("stream", [False, True])
def test_a_name_beyond_ascii_is_named(stream: bool) -> None:
    with scripted("x") as (served, engine):
        response = served.post(PATH, input="Hi", include=["\u00fc"], stream=stream)
        assert (response.status_code, response.headers[IGNORED_HEADER]) == (200, "include.%C3%BC")
        assert not engine.running


def test_names_of_what_has_no_effect_are_bounded(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(Scripted("x").model(), request_log=RequestLog(str(log))) as served:
        response = served.post(PATH, input="Hi", include=["y" * 100_000, *(f"x{index}" for index in range(3000))])
        assert response.status_code == 200 and "include.x40" in response.headers[IGNORED_HEADER]
        assert len(response.headers[IGNORED_HEADER]) < 1000
        wait_until(lambda: log.read_text().endswith("\n"))
    assert len(log.read_text()) < 2000


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}


def user(content: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": content}]}


@each(("fields", "param"), [
    ({"input": None}, "input"), ({"input": 5}, "input"), ({"input": [5]}, "input[0]"),
    ({"input": [{"role": "alien", "content": "x"}]}, "input[0].role"), (user(5), "input[0].content"),
    (user([IMAGE]), "input[0].content[0]"), (user([{"type": "input_text"}]), "input[0].content[0].text"),
    (user([5]), "input[0].content[0].type"),
    ({"input": "a " * 9000}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"), ({"input": [{"type": 5}]}, "input[0].type"),
    ({"input": [{"type": "item_reference"}]}, "input[0].id"), ({"input": [{"id": 5}]}, "input[0].id"),
    ({"input": [{"type": "function_call", "call_id": "1"}]}, "input[0].name"),
    ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].output"),
    ({"input": [{"type": "reasoning", "encrypted_content": "deltic:?"}]}, "input[0].encrypted_content"),
    ({"input": [{"type": "mesage", "role": "user", "content": "x"}]}, "input[0].type"),
    (user([{"type": "input_txt", "text": "x"}]), "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": "x"}] * 5000}, "input"), ({"instructions": 5}, "instructions"),
    ({"background": True}, "background"), ({"conversation": "x"}, "conversation"), ({"prompt": {"id": "x"}}, "prompt"),
    ({"max_output_tokens": -2}, "max_output_tokens"), ({"temperature": -1}, "temperature"), ({"top_p": 2}, "top_p"),
    ({"top_logprobs": 3}, "top_logprobs"), ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"include": "x"}, "include"), ({"truncation": "often"}, "truncation"), ({"stream": "yes"}, "stream"),
    ({"reasoning": {"effort": 5}}, "reasoning.effort"), ({"reasoning": "high"}, "reasoning"),
    ({"text": {"format": 5}}, "text.format"), ({"text": 5}, "text"), ({"metadata": {"a": 5}}, "metadata.a"),
    ({"tools": [5]}, "tools[0]"), ({"tools": [{"type": "function"}]}, "tools[0]"), ({"tools": 5}, "tools"),
    ({"tools": [{"type": ["x"], "name": "a"}]}, "tools[0]"), ({"tools": [{"type": {}}]}, "tools[0]"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "tools": 5}}, "tool_choice.tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": ["x"], "tools": TOOLS}}, "tool_choice"),
    ({"tools": [{"type": "web_search"}, {"type": "function", "name": "a<b"}]}, "tools[1].name"),
    ({"instructions": "x", "input": [*user("x")["input"], *user([IMAGE])["input"]]}, "input[1].content[0]"),
    ({"input": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"},
                {"type": "function_call", "call_id": "1", "name": "x", "arguments": 5}]}, "input[2].arguments"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": 5}}}, "text.format.schema"),
    ({"tools": [{"type": "alien", "name": "x"}]}, "tools[0]"), ({"previous_response_id": 5}, "previous_response_id"),
    ({"previous_response_id": "resp_x"}, "previous_response_id"),
    ({"instruction": "x"}, "instruction"), ({"max_tokens": 5}, "max_tokens"), ({"history": "all"}, "history"),
])
@each("stream", [False, True])
def test_a_bad_field_is_named(served: Served, fields: dict[str, Any], param: str, stream: bool) -> None:
    body = {"input": "Hi", "max_output_tokens": 2, "stream": stream} | fields
    response = served.http.post(PATH, content=json.dumps(body))
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), error


@each(("query", "param"), [
    ("limit=0", "limit"), ("limit=101", "limit"), ("limit=x", "limit"), ("limit=\u0663", "limit"),
    ("limit=" + "9" * 5000, "limit"), ("order=up", "order")])
def test_a_bad_query_is_named(query: str, param: str) -> None:
    with scripted("x") as (served, _):
        made = create(served)
        response = served.http.get(f"{PATH}/{made.id}/input_items?{query}")
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert served.http.get(f"{PATH}/{made.id}?stream=true").json()["error"]["param"] == "stream"


# The store


def record(id: str, size: int = 0, **more: Any) -> bytes:
    return json.dumps({"response": {"id": id, "output": ["o" + id]} | more, "input": ["i" + id, "x" * size]}).encode()


class Notes(dict[str, bytes]):
    """A store beyond the process."""

    ready = True

    def put(self, key: str, data: bytes) -> None:
        self[key] = data

    def claim(self, key: str) -> bool:
        return False


def test_the_store_is_bounded() -> None:
    store = ResponseStore(Limits(max_stored_responses=3, max_stored_mib=1), None)
    for id in "abcd":
        store.put(id, record(id))
        store.get("b")
    assert [bool(store.get(id)) for id in "abcd"] == [False, True, True, True]
    store.put("e", record("e", 1 << 20))
    assert not any(store.get(id) for id in "abcde"), "what is larger than all may be takes all, and is not kept"
    store.put("f", record("f"))
    assert store.delete("f") and not store.delete("f") and store.get("f") is None


def test_an_owner_does_not_push_out_another_ones_responses() -> None:
    store = ResponseStore(Limits(max_stored_responses=10, max_stored_mib=1), None)

    def put(id: str, owner: str) -> None:
        store.put(id, json.dumps({**json.loads(record(id)), "owner": owner}).encode(), owner)

    put("a", "quiet")
    for number in range(30):
        put(f"f{number}", "flood")
    assert store.get("a", "quiet") and store.get("a", "flood") is None and store.get("f3", "flood") is None
    assert store.get("f29", "flood") and not store.delete("f29", "quiet")


def test_chains() -> None:
    store = ResponseStore(Limits(), None)
    store.put("a", record("a"))
    store.put("b", record("b", previous_response_id="a"))
    assert store.items("b", 100) == ["ia", "", "oa", "ib", "", "ob"] and store.items(None, 100) == []
    store.put("c", record("c", previous_response_id="c"))
    assert len(store.items("c", 10) or ()) < 20, "a chain that bites its own tail ends"
    store.delete("a")
    assert store.items("b", 100) is None


@each("damage", [
    lambda data: data[:-1], lambda data: b"", lambda data: b"[" * 100_000, lambda data: b"[]", lambda data: b"\xff",
    lambda data: data.replace(b'"id": "a"', b'"id": "b"'), lambda data: data.replace(b'["oa"]', b"5")])
def test_what_is_damaged_is_not_there(damage: Any) -> None:
    notes = Notes()
    first = ResponseStore(Limits(), notes)
    first.put("a", record("a"))
    first.close()
    assert ResponseStore(Limits(), notes).get("a")
    for key in notes:
        notes[key] = damage(notes[key])
    assert ResponseStore(Limits(), notes).get("a") is None


def test_what_is_deleted_does_not_come_back_from_a_slow_disk() -> None:
    written = threading.Event()
    written.set()

    class Slow(Notes):
        def put(self, key: str, data: bytes) -> None:
            assert written.wait(10)
            super().put(key, data)

    notes = Slow()
    first = ResponseStore(Limits(max_stored_responses=1), notes)
    first.put("a", record("a"))
    first.put("b", record("b"))
    wait_until(lambda: not first.unwritten)
    written.clear()
    first.put("c", record("c"))
    assert first.delete("a") and first.delete("b")
    assert [bool(first.get(id)) for id in ("a", "b", "c")] == [False, False, True]
    written.set()
    first.close()
    again = ResponseStore(Limits(), notes)
    assert [bool(again.get(id)) for id in ("a", "b", "c")] == [False, False, True] and not first.unwritten


def test_responses_survive_a_restart(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_context": 512, "memory": "32MiB", "max_batch": 2, "threads": 1,
                               "cache_dir": str(tmp_path)}
    ids = []
    for turn in range(3):
        with serving(LLM(**options)) as served:
            more = {"previous_response_id": ids[-1]} if ids else {}
            if turn == 2:
                served.client.responses.delete(ids[0])
                with pytest.raises(openai.BadRequestError):
                    create(served, max_output_tokens=8, **more)
            else:
                ids.append(create(served, max_output_tokens=8, **more).id)
                assert len(served.client.responses.input_items.list(ids[0]).data) == 1
                item = served.client.responses.retrieve(ids[0]).output[0].id or ""
                create(served, input=[{"role": "user", "content": "Hi"}, {"id": item}], max_output_tokens=1)
