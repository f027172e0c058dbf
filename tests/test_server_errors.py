"""What cannot be served is refused in OpenAI's form, naming the field, and harms nobody else."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI
from test_server_harness import USER, Scripted, Served, each, limited, read_all, serving, tiny

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
FUNCTION = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(limited(tiny(), max_body_mib=1)) as running:
        yield running
        assert running.health()[0] == 200
        tiny().worker.call(lambda engine: engine.check())


@pytest.fixture(autouse=True)
def engine_still_answers(served: Served) -> Iterator[None]:
    yield
    assert served.post("/v1/completions", prompt="x", max_tokens=1).status_code == 200


def user(content: Any) -> list[Any]:
    return [{"role": "user", "content": content}]


@each(("fields", "param"), [
    ({"messages": []}, "messages"), ({"messages": "Hi"}, "messages"), ({"messages": None}, "messages"),
    ({"messages": [5]}, "messages[0]"), ({"messages": [{"role": "alien", "content": "x"}]}, "messages[0].role"),
    ({"messages": user(5)}, "messages[0].content"), ({"messages": user([IMAGE])}, "messages[0].content[0]"),
    ({"messages": user([{"type": "input_audio"}])}, "messages[0].content[0]"),
    ({"messages": user("a " * 9000)}, "messages"),
    ({"max_tokens": "5"}, "max_tokens"), ({"max_tokens": -2}, "max_tokens"), ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"), ({"max_tokens": None, "max_completion_tokens": -2}, "max_completion_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"temperature": "hot"}, "temperature"), ({"temperature": -1}, "temperature"), ({"temperature": []}, "temperature"),
    ({"top_p": 2}, "top_p"), ({"min_p": -0.1}, "min_p"), ({"top_k": -2}, "top_k"), ({"n": 0}, "n"), ({"n": 1000}, "n"),
    ({"presence_penalty": 3}, "presence_penalty"), ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"seed": 1.5}, "seed"), ({"seed": 1 << 70}, "seed"), ({"seed": 10 ** 400}, "seed"),
    ({"max_repeat": 10 ** 400}, "max_repeat"), ({"thinking_budget": 10 ** 400}, "thinking_budget"),
    ({"stream": "yes"}, "stream"), ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop"), ({"stop": 5}, "stop"), ({"stop": ["x"] * 100}, "stop"),
    ({"logit_bias": {"a": 1}}, "logit_bias"), ({"logit_bias": {"5": 1000}}, "logit_bias"),
    ({"logit_bias": {"99999999": 1}}, "logit_bias"), ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"٣": 1}}, "logit_bias"), ({"logit_bias": [1]}, "logit_bias"),
    ({"stop_token_ids": [99999999]}, "stop_token_ids"), ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"top_logprobs": 3}, "top_logprobs"), ({"logprobs": True, "top_logprobs": 50}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"), ({"stream_options": {"include_usag": True}}, "stream_options.include_usag"),
    ({"tools": [5]}, "tools[0]"), ({"tools": {}}, "tools"), ({"tools": [{"type": "custom"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {"name": "a\nb"}}]}, "tools[0].function.name"),
    ({"tool_choice": "required"}, "tool_choice"), ({"tool_choice": "any", "tools": [FUNCTION]}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "no"}}, "tools": [FUNCTION]}, "tool_choice"),
    ({"response_format": {"type": "yaml"}}, "response_format"), ({"store": "yes"}, "store"),
    ({"functions": [{"name": "f"}]}, "functions"), ({"function_call": "auto"}, "function_call"),
    ({"audio": {"voice": "x"}}, "audio"), ({"modalities": ["text", "audio"]}, "modalities"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"), ({"service_tier": 5}, "service_tier"),
    ({"prediction": {"type": "content"}}, "prediction"), ({"web_search_options": {}}, "web_search_options"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"enable_thinking": "yes"}, "enable_thinking"), ({"best_of": 2}, "best_of"), ({"max_token": 1}, "max_token"),
    ({"user": 5}, "user"), ({"speculate": "off"}, "speculate"), ({"speculate": 3}, "speculate"),
])
@each("stream", [False, True])
def test_a_bad_field_is_named(served: Served, fields: dict[str, Any], param: str, stream: bool) -> None:
    body = {"messages": USER, "max_tokens": 2, "stream": stream} | fields
    response = served.http.post("/v1/chat/completions", content=json.dumps(body))
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), error
    assert set(error) == {"message", "type", "param", "code"} and len(error["message"]) > 10


@each(("body", "said"), [
    (b"", "not valid JSON"), (b"{", "not valid JSON"), (b"[]", "a JSON object"), (b"null", "a JSON object"),
    (b'{"prompt": "\xff"}', "UTF-8"), (b'{"temperature": NaN}', "line 1 column 17"),
    (b'{"seed": Infinity}', "line 1 column 10"), (b'{"prompt": "x", "temperature": 1e999}', "temperature must be"),
    (b'{"seed": ' + b"9" * 5000 + b"}", "not valid JSON"),
    (b"[" * 100_000, "recursion limit"), (b'{"prompt": "x"} x', "not valid JSON"), (b"\x1f\x8b\x08", "not valid JSON"),
    (b'{"prompt": ' + b"[" * 300 + b"]" * 300 + b"}", "recursion limit"), (b'{"promt": "x"}', "do you mean 'prompt'"),
    (b'{"prompt": "\\ud800"}', "surrogate"), (b'{"prompt": "x", "model": "\\ud800"}', "surrogate"),
])
def test_malformed_bodies(served: Served, body: bytes, said: str) -> None:
    response = served.http.post("/v1/completions", content=body)
    assert response.status_code == 400 and said in response.json()["error"]["message"]


def test_suggestion_for_a_misspelt_field(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match=r"unknown field 'max_tokns': do you mean 'max_tokens'\?"):
        served.client.chat.completions.create(model="tiny", messages=USER, extra_body={"max_tokns": 1})


def test_error_code_of_a_prompt_that_is_too_long(served: Served) -> None:
    known = r"prompt is too long: .* maximum context length is 2048 tokens"  # to clients, which shorten it then
    for create in (lambda text: served.client.completions.create(model="tiny", prompt=text),
                   lambda text: served.client.chat.completions.create(model="tiny", messages=user(text))):
        with pytest.raises(openai.BadRequestError, match=known) as refusal:
            create("a " * 5000)
        assert refusal.value.code == "context_length_exceeded"


def test_models_have_names(served: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-4") as refusal:
        served.client.chat.completions.create(model="gpt-4", messages=USER)
    assert (refusal.value.code, refusal.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        served.client.models.retrieve("org/other")
    for name in ("tiny", "default", None):
        assert served.post("/v1/completions", model=name, prompt="x", max_tokens=1).json()["model"] == "tiny"


def test_body_that_is_too_large(served: Served) -> None:
    response = served.post("/v1/completions", prompt="x" * (3 << 20))
    assert response.status_code == 413 and "larger than" in response.json()["error"]["message"]


def test_endless_bodies_are_cut_off(served: Served) -> None:
    with pytest.raises((openai.APIError, OSError)), OpenAI(
            base_url=served.url, api_key="x", max_retries=0) as client:
        client.post("/v1/completions", cast_to=str, body={"prompt": "x" * (9 << 20)})


def test_unknown_paths_and_methods(served: Served) -> None:
    missing, wrong = served.post("/v1/engines"), served.http.get("/v1/completions")
    assert missing.status_code == 404 and "/v1/engines" in missing.json()["error"]["message"]
    assert wrong.status_code == 405 and wrong.headers["allow"] == "POST" and wrong.json()["error"]["param"] is None
    assert served.http.get("/docs").status_code == 404


def test_connection_without_http(served: Served) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 400") or True
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{")


@each("path", ["/v1/chat/completions", "/v1/messages"])
def test_compressed_body_is_refused(served: Served, path: str) -> None:
    body = json.dumps({"messages": USER, "max_tokens": 1}).encode()
    packed = served.http.post(path, content=gzip.compress(body), headers={"content-encoding": "gzip"})
    assert packed.status_code == 415 and "Content-Encoding 'gzip'" in packed.json()["error"]["message"]
    assert served.http.post(path, content=body, headers={"content-encoding": "identity"}).status_code == 200


def test_internal_error_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Scripted("x")
    with serving(engine.model()) as other:
        monkeypatch.setattr(engine, "add", lambda request: 1 // 0)
        response = other.post("/v1/completions", prompt="x")
        assert response.status_code == 500 and "division" not in response.text
        monkeypatch.undo()
        assert other.post("/v1/completions", prompt="x").status_code == 200


def test_model_names_keys_and_origins() -> None:
    options: dict[str, Any] = {"served_name": "our/model", "api_keys": {"secret": "me"}, "cors_origins": ["https://page"]}
    with serving(Scripted("x").model(), **options) as other:
        assert other.post("/v1/completions", prompt="x").status_code == 401
        assert other.http.get("/v1/models", headers={"authorization": "Bearer wrong"}).status_code == 401
        with OpenAI(base_url=f"{other.url}/v1", api_key="secret") as client:
            assert client.models.retrieve("our/model").id == "our/model"
            assert client.completions.create(model="tiny", prompt="x").model == "our/model"
        page = {"origin": "https://page"}
        headers = other.http.get("/health", headers=page).headers
        assert headers["access-control-allow-origin"] == "https://page"
        told = set(headers["access-control-expose-headers"].split(", "))  # all others a page cannot read
        assert {"x-request-id", "request-id", "retry-after", "x-deltic-ignored"} <= told


KEY = "鍵 clé"


@each(("key", "accepted", "refused"), [
    (KEY, [KEY.encode()], [b"wrong", KEY.encode("latin-1", "ignore")]), ("ascii", [b"ascii"], [b"asci"]),
    ("clé", ["clé".encode("latin-1"), "clé".encode()], [b"cl"]), ("a\udcff", [b"a\xff"], []),
])
def test_api_keys_with_any_letters(key: str, accepted: list[bytes], refused: list[bytes]) -> None:
    with serving(Scripted("x").model(), api_keys={key: "me"}) as other:
        for sent in (*accepted, *refused):
            status = other.http.get("/v1/models", headers={"authorization": b"Bearer " + sent}).status_code
            assert status == (200 if sent in accepted else 401), sent
        assert other.http.get("/v1/models").status_code == 401


@each("path", ["/v1/completions", "/health", "/nowhere"])
def test_request_with_length_and_chunks_is_refused(served: Served, path: str) -> None:
    raw = served.connect()
    raw.sendall(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n"
                "0\r\n\r\nGET /health HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    text = read_all(raw)
    assert text.startswith("HTTP/1.1 400") and text.count("HTTP/1.1") == 1 and "connection: close" in text
    assert json.loads(text.partition("\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


def test_request_with_length_or_chunks_is_accepted(served: Served) -> None:
    body = b'{"prompt": "x", "max_tokens": 1}'
    for content in (body, iter([body[:5], body[5:]])):
        assert served.http.post("/v1/completions", content=content).status_code == 200


def test_preflight_of_a_web_page_is_refused_by_default(served: Served) -> None:
    headers = {"origin": "https://page", "access-control-request-method": "POST"}
    response = served.http.options("/v1/completions", headers=headers)
    assert response.status_code == 403 and "access-control-allow-origin" not in response.headers
