"""Bodies: limits for size and parts; parsing one does not delay other clients."""

from __future__ import annotations

import gc
import json
import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from pydantic_core import from_json
from test_server_harness import USER, Scripted, Served, read_all, serving, tiny, wait_until

from deltic.chat.processor import ChatProcessor
from deltic.config import Limits
from deltic.errors import RequestError, show
from deltic.server.body import parse, read_json
from deltic.server.openai_schema import ChatRequest, CompletionRequest
from deltic.server.records import LARGE

MIB = 1 << 20
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "description": "x" * 300}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    few = {"max_choices": 4, "max_messages": 3, "max_tools": 2, "max_schema_kib": 1, "max_stops": 2,
           "max_stop_characters": 9, "max_logit_bias": 2,
           "max_prompt_tokens": 50, "max_answer_tokens": 20, "max_body_values": 5000}
    with serving(Scripted().model(**few)) as running:
        yield running


@pytest.mark.parametrize(("fields", "param", "limit"), [
    ({"messages": USER * 4}, "messages", "max_messages"), ({"tools": [TOOL] * 3}, "tools", "max_tools"),
    ({"tools": [{**TOOL, "function": {"name": "f", "description": "x" * 1100}}]}, "tools", "max_schema_kib"),
    ({"tools": [{**TOOL, "function": {"name": "f", "parameters": {"enum": list(range(300))}}}]}, "tools",
     "max_schema_kib"),
    ({"stop": ["a", "b", "c"]}, "stop", "max_stops"), ({"stop_token_ids": [1, 2, 3]}, "stop_token_ids", "max_stops"),
    ({"stop": ["abcde", "abcde"]}, "stop", "max_stop_characters"),
    ({"stop": "abcdeabcde"}, "stop", "max_stop_characters"),
    ({"logit_bias": {"1": 1, "2": 1, "3": 1}}, "logit_bias", "max_logit_bias"), ({"n": 5}, "n", "max_choices"),
    ({"max_tokens": 21}, "max_tokens", "max_answer_tokens"),
    ({"max_completion_tokens": 21}, "max_completion_tokens", "max_answer_tokens"),
    ({"messages": [{"role": "user", "content": "a b " * 50}]}, "messages", "max_prompt_tokens"),
    ({"metadata": {"a": [0] * 22_000, "b": "x" * LARGE}}, None, "max_body_values"),
])
def test_exceeded_limits_are_named(served: Served, fields: dict[str, Any], param: str | None, limit: str) -> None:
    response = served.post("/v1/chat/completions", **{"messages": USER} | fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param) and f"({limit})" in error["message"], error


@pytest.mark.parametrize(("path", "field", "fields"), [
    ("/v1/messages", "stop_sequences", {"messages": USER, "max_tokens": 2, "stop_sequences": ["a", "b", "c"]}),
    ("/v1/messages", "messages", {"messages": USER * 4, "max_tokens": 2}),
    ("/v1/responses", "input", {"input": USER * 4}), ("/v1/responses", "stop", {"input": "x", "stop": ["a"] * 3}),
    ("/v1/completions", "stop", {"prompt": "x", "stop": ["a"] * 3}),
])
def test_too_many_entries_are_refused_by_every_api(served: Served, path: str, field: str, fields: Any) -> None:
    response = served.post(path, **fields)
    message = response.json()["error"]["message"]
    assert response.status_code == 400 and message.startswith(f"{field} has {len(fields[field])} entries"), message
    assert message.endswith("(max_stops)" if field.startswith("stop") else "(max_messages)")


def test_requests_at_the_limit_are_served(served: Served) -> None:
    small = {"type": "function", "function": {"name": "f"}}
    fields = {"messages": [*USER, {"role": "assistant", "content": "a"}, *USER], "tools": [small] * 2, "n": 4,
              "stop": ["a?", "b?"], "stop_token_ids": [1, 2], "logit_bias": {"1": 1, "2": 1}, "max_tokens": 20}
    with serving(Scripted("one").model(max_choices=4, max_messages=3, max_tools=2, max_schema_kib=1, max_stops=2,
                                       max_logit_bias=2, max_answer_tokens=20)) as other:
        response = other.post("/v1/chat/completions", **fields)
    assert response.status_code == 200, response.text
    short = served.post("/v1/completions", prompt=[5] * 50)
    assert short.json()["usage"]["completion_tokens"] == 16
    error = served.post("/v1/completions", prompt=[5] * 51).json()["error"]
    assert error["code"] == "context_length_exceeded" and "(max_prompt_tokens)" in error["message"]


def test_answers_end_at_max_answer_tokens(served: Served) -> None:
    usage = served.post("/v1/chat/completions", messages=USER).json()["usage"]
    assert usage["completion_tokens"] == 20


HOSTILE = {
    "empty lists": b'{"prompt":[' + b"[]," * (8 * MIB // 3 - 9) + b"[]]}",
    "objects": b'{"messages":[' + b'{"a":1},' * (8 * MIB // 8 - 9) + b"1]}",
    "unknown keys": b"{" + b",".join(b'"%d":1' % number for number in range(240_000)) + b"}",
    "a long key": b'{"' + b"messages" * (MIB - 9) + b'":1}',
    "wrong types": b'{"stop_token_ids":[' + b'"a",' * 400_000 + b"1]}",
    "a wrong type": b'{"temperature":[' + b"[1],2," * 160_000 + b"1]}",
    "unknown options": b'{"stream_options":{' + b",".join(b'"%d":1' % number for number in range(240_000)) + b"}}",
}


def test_hostile_bodies_are_refused() -> None:
    with serving(Scripted("one").model()) as served:
        for shape, body in HOSTILE.items():
            response = served.http.post("/v1/chat/completions", content=body)
            error = response.json()["error"]
            assert response.status_code == 400 and len(error["message"]) < 300, shape
            assert len(error["param"] or "") < 100, shape
            assert served.post("/v1/completions", prompt="x").status_code == 200, shape


MOST = Limits().max_body_values
WORST = {
    "lists": b'{"prompt":[' + b"[]," * (MOST * 4 // 5 - 9) + b"1]}",
    "objects": b'{"prompt":[' + b'{"a":1},' * (MOST * 4 // 9 - 9) + b"1]}",
    "members": b'{"metadata":{' + b",".join(b'"%d":1' % number for number in range(MOST * 4 // 5 - 9)) + b"}}",
    "numbers": b'{"prompt":[' + b"1," * (MOST * 4 - 29) + b"1]}",
    "floats": b'{"prompt":[' + b"0.1," * (MOST * 4 - 29) + b"1]}",
    "texts": b'{"prompt":[' + b'"",' * (MOST * 4 - 19) + b"1]}",
    "a text": b'{"prompt":"' + b"x" * (8 * MIB - 99) + b'"}',
    "escapes": b'{"prompt":"' + b"\\n" * (4 * MIB - 99) + b'"}',
    "depth": b'{"prompt":' + b"[" * (MOST - 9),
}


def test_parsing_the_worst_accepted_body_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing holds the interpreter's lock all the time. The time is the processor's."""
    spent: list[float] = []

    def timed(raw: bytes, **options: Any) -> Any:
        gc.collect()
        began = time.thread_time()
        try:
            return from_json(raw, **options)
        finally:
            spent.append(time.thread_time() - began)

    monkeypatch.setattr("deltic.server.body.from_json", timed)
    gc.collect()
    gc.freeze()  # collections before each body skip everything else
    try:
        for body in WORST.values():
            with suppress(RequestError):
                parse(body, CompletionRequest, Limits())
    finally:
        gc.unfreeze()
    slow = {shape: seconds for shape, seconds in zip(WORST, spent, strict=True) if seconds >= 0.15}
    assert not slow


@pytest.mark.parametrize("shape", ["empty lists", "objects", "unknown keys", "unknown options"])
def test_bodies_with_too_many_values_are_not_parsed(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltic.server.body.from_json", None)
    with pytest.raises(RequestError, match="max_body_values"):
        parse(HOSTILE[shape], ChatRequest, Limits())


def test_values_are_counted_outside_of_strings() -> None:
    texts = ["[{:,", '"', '\\', '\\"', '\\\\",[', "", "é[", "\\" * 9, '"' * 9]
    for value, cost in ((texts, 1 + 8 / 4), ({text: text for text in texts}, 1 + 9 + 8 / 4),
                        ([[], {}, [[]], {"a": [1, 2]}], 1 + 7 + 4 / 4), ([1.5, None, True, "x"], 1 + 3 / 4)):
        raw = json.dumps(value).encode()
        assert read_json(raw, math.ceil(cost)) == value
        with pytest.raises(RequestError, match="max_body_values"):
            read_json(raw, math.ceil(cost) - 1)


def hostile_conversation(kind: str, share: int) -> list[dict[str, Any]]:
    """A conversation that is expensive to prepare. share: 5 for a fifth of the largest one."""
    if kind == "special tokens":
        return [{"role": "user", "content": "<|im_end|>" * (120_000 // share)}]
    if kind == "many messages":
        return [{"role": role, "content": "Hi"} for role in ("user", "assistant") * (2047 // share)] + USER
    return [*USER, *[message for number in range(2000 // share) for message in (
        {"role": "assistant", "content": "", "tool_calls": [{
            "id": str(number), "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "tool_call_id": str(number), "content": "<|im_end|>"})]]


@pytest.mark.parametrize("share", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["special tokens", "many messages", "many calls"])
def test_hostile_conversations_do_not_delay_other_clients(kind: str, share: int) -> None:
    """Two clients send an expensive conversation while another one gets small answers. Seconds are processor time."""
    engine = Scripted("one")
    engine.max_context = 1 << 20
    model = engine.model()
    model.chat_processor = ChatProcessor(tiny().chat_processor.tokenizer, longest=1 << 20)
    with serving(model) as served:
        content = json.dumps({"messages": hostile_conversation(kind, share), "tools": [TOOL]}).encode()
        codes: list[int] = []
        waits: list[float] = []

        def send() -> None:
            with httpx.Client(base_url=served.url, timeout=30) as client:
                codes.append(client.post("/v1/chat/completions", content=content).status_code)

        with served.lateness(time.process_time) as late:
            senders = [threading.Thread(target=send) for _ in range(2)]
            for sender in senders:
                sender.start()
            while any(sender.is_alive() for sender in senders):
                began = time.process_time()
                assert served.post("/v1/chat/completions", messages=USER).status_code == 200
                waits.append(time.process_time() - began)
        assert codes == [200, 200] and len(waits) > 2 and max(late) < 0.3 and max(waits) < 0.6, (late, waits)


def test_parsed_bodies_keep_their_values() -> None:
    values: Any = {"a": [1, -2.5, 1e3, "é\U0001f642\n", None, True, {}, [], {"b": [{"c": ""}]}], "d": 10 ** 300}
    for pad in (0, LARGE):
        read = parse(json.dumps({"messages": [values], "user": "x" * pad}).encode(), ChatRequest, Limits())
        assert read.messages == [values]
        for wrong, said in ((b'{"temperature":NaN', "expected value"), (b'{"seed":1e999', "seed"),
                            (b'{"a"', "expected `:`"),
                            (b'{"a":' + b"[" * 9999, "recursion limit"), (b'{"a":[1,', "JSON"),
                            (b'{"a":"\xff"', "invalid unicode")):
            with pytest.raises(RequestError, match=said):
                parse(wrong + b',"user":"' + b"x" * pad + b'"}', CompletionRequest, Limits())


def test_show_does_not_format_whole_values() -> None:
    class Loud:
        def __repr__(self) -> str:
            pytest.fail("spelled")

    for value in (["x" * 99, Loud()], {"a" * 99: Loud()}, [[[["x" * 99, Loud()]]]], ["é" * 10_000_000]):
        assert len(show(value)) == 80
    for value in ([], {}, [1, "a'b"], {"a": [None, {"b": 1.5}]}, "x" * 70, (1, 2), b"x", True, {1, 2}, "\ud800"):
        assert show(value) == repr(value)
    assert show(10 ** 5000) == "a huge number"


def uploading(served: Served, size: int) -> socket.socket:
    """Returns a client that has sent its body except for the last byte."""
    raw = served.connect()
    raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (size + 1) + b" " * size)
    return raw


def test_bodies_are_bounded_together() -> None:
    engine = Scripted("one")
    engine.max_context = 1 << 20
    with serving(engine.model(max_body_mib=1, max_bodies_mib=2)) as served:
        slow = [uploading(served, MIB - 9) for _ in range(2)]
        reader = served.app.state.reader
        wait_until(lambda: reader.held == 2 * MIB - 18)
        assert served.post("/v1/completions", prompt="x" * 1000).status_code == 200, "small ones always pass"
        assert served.post("/v1/completions", prompt="x", user="x" * 100_000).status_code == 200, "the oldest gives way"
        head, _, body = read_all_of(slow[0]).partition("\r\n\r\n")
        assert " 503 " in head and "retry-after: 1" in head
        assert "(max_bodies_mib)" in json.loads(body)["error"]["message"]
        slow[1].sendall(b"x")
        assert " 400 " in read_all_of(slow[1]), "the other is read"
        wait_until(lambda: reader.held == 0)
        assert not reader.uploads


def read_all_of(raw: socket.socket) -> str:
    """Reads an answer and closes the connection."""
    text = raw.recv(1 << 16).decode()
    raw.close()
    return text


def test_max_live_tokens_bounds_all_prompts() -> None:
    engine, gate = Scripted("one"), threading.Event()
    with serving(engine.model(max_live_tokens=100)) as served:
        engine.before_step = gate.wait
        held = served.send("/v1/completions", prompt=[5] * 90)
        wait_until(lambda: served.health()[1]["requests"] == 1)
        refused = served.post("/v1/completions", prompt=[5] * 11)
        assert refused.status_code == 503 and "(max_live_tokens)" in refused.json()["error"]["message"]
        small = served.send("/v1/completions", prompt=[5] * 10)
        wait_until(lambda: served.health()[1]["requests"] == 2)
        gate.set()
        assert all("200 OK" in read_all(raw) for raw in (held, small))
        assert served.post("/v1/completions", prompt=[5] * 200).status_code == 200, "it is alone"


def test_a_large_content_length_costs_nothing() -> None:
    with serving(Scripted("one").model(max_body_mib=1)) as served:
        with served.connect() as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n{")
            assert served.post("/v1/completions", prompt="x").status_code == 200
        big = served.post("/v1/completions", prompt="x" * MIB)
        assert big.status_code == 413 and "1 MiB (max_body_mib)" in big.json()["error"]["message"]


def test_max_wait_seconds() -> None:
    engine, gate = Scripted("one"), threading.Event()
    with serving(engine.model(max_wait_seconds=0.2)) as served:
        for status in ("200 OK", "503"):
            gate.clear()
            engine.before_step = gate.wait
            all_places = served.send("/v1/completions", prompt="x", n=16)
            wait_until(lambda: served.health()[1]["requests"] == 1)
            behind = served.send("/v1/completions", prompt="x")
            time.sleep(0.3)
            gate.set()
            assert "200 OK" in read_all(all_places)
            said = read_all(behind)
            assert status in said
            served.wait_idle()
    assert "(max_wait_seconds)" in said and "retry-after: 1" in said.lower()


def test_requests_beyond_max_waiting_are_refused_before_parsing() -> None:
    engine, gate = Scripted("one"), threading.Event()
    with serving(engine.model(max_waiting=4)) as served:
        engine.before_step = gate.wait
        held = [served.send("/v1/completions", prompt="x", n=10) for _ in range(2)]
        wait_until(lambda: served.health()[1]["requests"] == 2)
        for body in (b'{"prompt": "x"}', b"no JSON at all"):
            refused = served.http.post("/v1/completions", content=body)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert "(max_waiting)" in refused.json()["error"]["message"]
        assert served.post("/tokenize", prompt="x").status_code == 200, "what counts tokens waits for no place"
        assert served.health()[0] == 200
        gate.set()
        assert all("200 OK" in read_all(raw) for raw in held)
        served.wait_idle()
        alone = served.post("/v1/completions", prompt="x", n=30)
        assert len(alone.json()["choices"]) == 30, "what could never wait is taken alone"
