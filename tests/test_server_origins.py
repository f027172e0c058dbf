"""Access of web pages, and requests of slightly misconfigured clients, which are understood or explained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from test_server_harness import USER, Scripted, Served, serving

BODY: dict[str, Any] = {"messages": USER, "max_tokens": 2}
CHAT = "/v1/chat/completions"
PAGE = "https://page.example"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(Scripted("one").model(), allowed_hosts=["localhost", "*.docker.internal", "page.example"],
                 cors_origins=["https://friend.example/"]) as running:
        yield running


def post(served: Served, path: str = CHAT, body: bytes = json.dumps(BODY).encode(), **headers: str) -> tuple[int, str]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    response = served.http.post(path, content=body, headers=named)
    return response.status_code, (response.json().get("error") or {}).get("message", "")


@pytest.mark.parametrize(("origin", "host", "site", "status"), [
    (None, "localhost:8000", None, 200),
    ("http://localhost:8000", "localhost:8000", None, 200), ("https://page.example", "page.example", "cross-site", 200),
    ("http://LOCALHOST:8000", "localhost:8000", None, 200), ("http://127.0.0.1:8000", "127.0.0.1:8000", None, 200),
    ("http://[::1]:8000", "[::1]:8000", None, 200), ("http://localhost:3000", "localhost:8000", None, 403),
    ("http://localhost", "localhost:8000", "same-site", 403), (PAGE, "localhost:8000", None, 403),
    (PAGE, "localhost:8000", "cross-site", 403), (PAGE, "localhost:8000", "same-origin", 200),
    ("null", "localhost:8000", None, 403), ("", "localhost:8000", None, 403),
    ("file://", "localhost:8000", None, 403), ("https://friend.example", "localhost:8000", None, 200),
    ("https://friend.example.evil.example", "localhost:8000", None, 403),
])
def test_other_web_pages_are_refused(served: Served, origin: str | None, host: str, site: str | None,
                                                      status: int) -> None:
    """same-origin: sent by the browser behind a proxy that changes the Host."""
    headers = {"host": host, **({"origin": origin} if origin is not None else {}),
               **({"sec-fetch-site": site} if site else {})}
    for kind in ("application/json", "text/plain"):
        found, said = post(served, content_type=kind, **headers)
        assert found == (status if kind == "application/json" or status == 403 else 415)
        assert "--cors-origin" in said if status == 403 else "Content-Type" in said or found == 200
    for method, path in (("GET", "/v1/models"), ("OPTIONS", CHAT), ("DELETE", "/v1/requests/x"), ("GET", "/metrics")):
        response = served.http.request(method, path, headers=headers)
        assert (response.status_code == 403) == (status == 403)
        assert ("access-control-allow-origin" in response.headers) == (origin == "https://friend.example")


def test_cors_origin_star_allows_all_pages() -> None:
    with serving(Scripted("one").model(), cors_origins=["*"]) as served:
        for origin in (PAGE, "null"):
            assert post(served, origin=origin, content_type="application/json")[0] == 200
            asked = {"origin": origin, "access-control-request-method": "POST",
                     "access-control-request-headers": "content-type"}
            assert served.http.options(CHAT, headers=asked).status_code == 200


KINDS = (
    ("application/json", 200), ("application/json; charset=utf-8", 200), ("Application/JSON", 200), ("text/json", 200),
    ("application/vnd.api+json", 200), ("", 200), ("application/x-www-form-urlencoded", 200),
    ("text/plain", 415), ("text/plain;charset=UTF-8", 415), ("multipart/form-data; boundary=x", 415),
    ("application/octet-stream", 415), ("application/xml", 415),
)


def test_content_types_of_bodies(served: Served) -> None:
    body = {"/v1/responses": {"input": "x"}, "/v1/completions": {"prompt": "x"}, "/tokenize": {"prompt": "x"}}
    for path in (CHAT, "/v1/messages", *body):
        for kind, status in KINDS:
            found, said = post(served, path, json.dumps(body.get(path, BODY)).encode(), content_type=kind)
            assert found == status and (status == 200 or "send JSON, as application/json" in said), (path, kind)


def test_html_forms_are_refused(served: Served) -> None:
    form = {"origin": "http://localhost:8000", "host": "localhost:8000",
            "content_type": "application/x-www-form-urlencoded"}
    assert post(served, **form)[0] == 415


def test_a_byte_order_mark_is_skipped(served: Served) -> None:
    for path in (CHAT, "/v1/messages"):
        assert post(served, path, b"\xef\xbb\xbf" + json.dumps(BODY).encode())[0] == 200, path


def test_a_base_url_may_end_with_a_slash(served: Served) -> None:
    body = json.dumps(BODY).encode()
    for path in ("//v1/chat/completions", "///v1/chat/completions"):
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        with served.connect() as raw:
            raw.sendall(head.encode() + body)
            assert raw.recv(100).startswith(b"HTTP/1.1 200"), path


PATHS = (
    ("/v1/chat/completions/", CHAT), ("/chat/completions", CHAT), ("/v1/v1/messages", "/v1/messages"),
    ("/api/v1/chat/completions", CHAT), ("/messages", "/v1/messages"), ("/v1/v1/chat/completions/", CHAT),
    ("/v1//chat//completions", CHAT), ("/v1/tokenize", "/tokenize"), ("/chat/completions/v1/x", None),
    ("/v1/engines", None), ("/" + "a/" * 500, None),
)


def test_an_unknown_path_is_answered_with_a_suggestion(served: Served) -> None:
    for path, meant in PATHS:
        status, said = post(served, path)
        assert status == 404 and said.partition(" is not served here: ")[2] == (
            f"do you mean {meant}?" if meant else "Not Found"), path


def test_names_of_the_host_inside_containers(served: Served) -> None:
    for host in ("host.docker.internal:8000", "gateway.docker.internal"):
        assert post(served, host=host)[0] == 200, host


def test_deprecated_function_calls_are_read_as_tool_calls(served: Served) -> None:
    call = {"name": "f", "arguments": '{"a": 1}'}
    old = [*USER, {"role": "assistant", "content": None, "function_call": call},
           {"role": "function", "name": "f", "content": "x"}]
    new = [*USER, {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call}]},
           {"role": "tool", "name": "f", "content": "x"}]
    prompts = [served.post("/tokenize", messages=messages).json()["tokens"] for messages in (old, new)]
    assert prompts[0] == prompts[1]
    response = served.post(CHAT, messages=old)
    assert response.status_code == 200 and "x-deltic-ignored" not in response.headers
    wrong = [{"role": "assistant", "function_call": {"arguments": "{}"}}, *USER]
    assert served.post(CHAT, messages=wrong).json()["error"]["param"] == "messages[0].function_call.function.name"
