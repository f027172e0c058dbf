"""Expensive but valid HTTP: tiny chunks, floods of headers and of pipelined requests, and answers before the end of a
request."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from test_limits_connections import answer
from test_server_harness import Scripted, Served, read_all, serving, wait_until

from deltic.server.connections import LEAST_HEADER, MOST_PIPELINED, Connection, RequestTurns

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
NOWHERE = CHUNKED.replace(b"completions", b"nowhere")
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
BODY = b'{"prompt": "x", "max_tokens": 1}'
ENOUGH = 64 << 20


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(Scripted("one").model(max_body_mib=1), api_keys={"secret": "me"}) as running:
        yield running


def counting(name: str, call: Callable[..., None], counts: Counter[str]) -> Callable[..., None]:
    def counted(protocol: Connection, *found: bytes) -> None:
        counts[name] += 1
        call(protocol, *found)
    return counted


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the callbacks of the parser by name."""
    counts: Counter[str] = Counter()
    for name in ("on_chunk_header", "on_header", "on_headers_complete"):
        monkeypatch.setattr(Connection, name, counting(name, getattr(Connection, name), counts))
    return counts


def chunks(body: bytes, size: int) -> bytes:
    pieces = (body[at:at + size] for at in range(0, len(body), size))
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def flood(raw: socket.socket, piece: bytes) -> tuple[int, str]:
    """Sends until the server closes. Returns the bytes sent and the answer."""
    sent = 0
    raw.settimeout(20)
    try:
        while sent < ENOUGH:
            sent += raw.send(piece)
    except ConnectionError:
        pass
    try:
        return sent, read_all(raw)
    except ConnectionError:  # it has been closed for so long that even the answer is gone
        return sent, ""


def ask(served: Served, sent: bytes) -> str:
    raw = served.connect()
    raw.sendall(sent)
    return read_all(raw)


def message(text: str) -> str:
    told: str = json.loads(text.rpartition("\r\n\r\n")[2])["error"]["message"]
    return told


@pytest.mark.parametrize("head", [CHUNKED, NOWHERE, CHUNKED.replace(b"host", b"x-api-key: secret\r\nhost")])
def test_a_body_in_tiny_chunks_is_refused(served: Served, calls: Counter[str], head: bytes) -> None:
    text = ask(served, head + b"1\r\n \r\n" * 8000)
    assert text.startswith("HTTP/1.1 400") and text.count("HTTP/1.1") == 1, "and not by what would be served"
    assert "connection: close" in text and "(max_body_chunks)" in message(text)
    assert calls["on_chunk_header"] <= 4096 + 4096 // 64 + 2


@pytest.mark.covering
@pytest.mark.parametrize("head", [CHUNKED, NOWHERE])
@pytest.mark.parametrize("piece", [b"1\r\n \r\n" * 10_000, b"1;" + b"e" * 60_000, b"0\r\n" + b"a: b\r\n" * 10_000,
                                   b"40\r\n" + b" " * 64 + b"\r\n"], ids=["chunks", "extension", "trailer", "fair"])
def test_endless_bodies_are_cut_off(served: Served, calls: Counter[str], head: bytes, piece: bytes) -> None:
    """After an early answer the rest is discarded for a while."""
    raw = served.connect()
    raw.sendall(head)
    wait_until(lambda: calls["on_headers_complete"] == 1)
    sent, _ = flood(raw, piece)
    assert sent < 30 << 20 and calls["on_header"] < 600 and calls["on_chunk_header"] < 100_000
    assert served.health()[0] == 200


def test_an_early_answer_closes_the_connection(served: Served, calls: Counter[str]) -> None:
    """The rest of the request is not parsed, and a client that reads after sending gets the answer."""
    raw = served.connect()
    raw.sendall(NOWHERE)
    text = b""
    while b"not served here" not in text:
        text += raw.recv(1000)
    for _ in range(30):
        raw.sendall(chunks(b" " * 100_000, 1000))
    raw.sendall(GET)
    raw.shutdown(socket.SHUT_WR)
    text += read_all(raw).encode()
    assert text.startswith(b"HTTP/1.1 404") and text.count(b"HTTP/1.1") == 1 and b"connection: close" in text
    assert calls["on_chunk_header"] == 0 and calls["on_headers_complete"] == 1
    raw = served.connect()
    for _ in range(3):  # a short one is read to its end
        raw.sendall(HEAD + b"content-length: 10\r\n\r\n")
        assert b"401 Unauthorized" in answer(raw)
        raw.sendall(b"0123456789")
    raw.close()
    raw = served.connect()
    raw.sendall(HEAD + b"content-length: 3000001\r\n\r\n")
    for _ in range(3):
        raw.sendall(b" " * 1_000_000)
    assert read_all(raw).startswith("HTTP/1.1 401")


def test_bodies_in_ordinary_chunks_are_served(served: Served) -> None:
    head = CHUNKED.replace(b"host", b"connection: close\r\nx-api-key: secret\r\nhost")
    for size, length in ((1, 4000), (64, 500_000), (1000, 500_000)):
        text = ask(served, head + chunks(BODY + b" " * (length - len(BODY)), size))
        assert text.startswith("HTTP/1.1 200"), (size, text)


@pytest.mark.covering
@pytest.mark.parametrize("flood", [
    b"".join(b"a%d: b\r\n" % number for number in range(9000)), b"a: " + b"b" * 20_000 + b"\r\n",
    b"a" * 20_000 + b": b\r\n", b"a:\r\n" * 60_000], ids=["many", "long", "name", "empty"])
@pytest.mark.parametrize("size", [1 << 20, 4000])
def test_floods_of_headers_are_refused(served: Served, calls: Counter[str], flood: bytes, size: int) -> None:
    """Headers are sent at once, or in pieces without an end."""
    raw, sent = served.connect(), HEAD + flood + b"\r\n"
    for at in range(0, min(len(sent), 6 * size) - (size == 4000), size):
        raw.sendall(sent[at:at + size])
        time.sleep(0.02)
    text = read_all(raw)
    assert text.startswith("HTTP/1.1 431 Request Header Fields Too Large") and "(max_header_kib)" in message(text)
    assert calls["on_header"] <= (16 << 10) // LEAST_HEADER + 1 and not calls["on_headers_complete"]


def test_a_long_target_is_refused(served: Served) -> None:
    assert ask(served, b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n").startswith("HTTP/1.1 431")
    assert ask(served, b"\r\n" * 10_000).startswith("HTTP/1.1 431"), "empty lines before a request count, too"


def test_large_headers_within_the_limit_are_accepted(served: Served) -> None:
    many = b"".join(b"a%d: b\r\n" % number for number in range(200))
    long = b"cookie: " + b"c" * 15_000 + b"\r\n"
    for headers in (many, long):
        assert "200 OK" in ask(served, GET[:-2] + b"connection: close\r\n" + headers + b"\r\n")


def test_too_many_pipelined_requests_are_cut_off(served: Served, calls: Counter[str]) -> None:
    text = ask(served, GET * 5000)
    assert MOST_PIPELINED < text.count("200 OK") < MOST_PIPELINED + 2 and text.count("connection: close") == 1
    assert calls["on_headers_complete"] <= MOST_PIPELINED + 2


def test_request_turns_alternate_between_clients() -> None:
    """One request of each client starts per turn, for any number of requests and connections."""
    begun: list[str] = []

    async def run() -> None:
        turns = RequestTurns()
        for number in range(50):
            turns.add("many", partial(begun.append, f"many {number}"))
        for number in range(2):
            turns.add("few", partial(begun.append, f"few {number}"))
        await asyncio.sleep(0)
        assert begun == ["many 0", "few 0"], "one of each in a turn of the loop"
        for _ in range(60):
            await asyncio.sleep(0)

    asyncio.run(run())
    assert begun[2:4] == ["many 1", "few 1"] and begun[4:] == [f"many {number}" for number in range(2, 50)]


def test_pipelined_requests_are_answered_in_order(served: Served) -> None:
    post = HEAD + b"x-api-key: secret\r\ncontent-length: %d\r\n\r\n%s" % (len(BODY), BODY)
    raw = served.connect()
    raw.sendall(post + GET + NOWHERE + chunks(BODY, 5) + post + GET[:-2] + b"connection: close\r\n\r\n")
    statuses = [piece[:3] for piece in read_all(raw).split("HTTP/1.1 ")[1:]]
    assert statuses == ["200", "200", "404", "200", "200"]


def test_an_unreadable_request_is_answered_after_those_before_it(served: Served) -> None:
    for bad, statuses in ((b"hello\r\n\r\n", "200 200 400"), (CHUNKED + b"zz", "200 200 400"),
                          (CHUNKED + b"1\r\n \r\n" * 9000, "200 200 400"), (HEAD + b"a:\r\n" * 900, "200 200 431")):
        text = ask(served, GET + GET + bad)
        assert " ".join(piece[:3] for piece in text.split("HTTP/1.1 ")[1:]) == statuses, bad[:60]


@pytest.mark.parametrize("upgrade", [b"websocket", b"h2c"])
def test_upgrades_are_ignored(served: Served, upgrade: bytes) -> None:
    """Java's client asks for h2c with every first request, with a body or without."""
    asked = b"\r\nconnection: upgrade, http2-settings\r\nupgrade: %s\r\nhttp2-settings: AAM\r\nhost" % upgrade
    raw = served.connect()
    for _ in range(2):
        raw.sendall(GET.replace(b"\r\nhost", asked) + GET)
        assert b'"ok"' in answer(raw) and b'"ok"' in answer(raw)
    head = HEAD.replace(b"\r\nhost", asked) + b"x-api-key: secret\r\n"
    for framed in (b"content-length: %d\r\n\r\n%s" % (len(BODY), BODY),
                   b"transfer-encoding: chunked\r\n\r\n" + chunks(BODY, 7)):
        raw.sendall(head + framed + GET)
        assert b"text_completion" in answer(raw) and b'"ok"' in answer(raw)
    raw.close()


INVALID = (
    (b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n\r\n", "CONNECT"), (b"GET / HTTP/2.0\r\nhost: a\r\n\r\n", "HTTP/2.0"),
    (b"GET / HTTP/1.1\r\n\r\n", "one Host"), (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", "one Host"),
    (b"GET /\r\n\r\n", "HTTP/0.9"), (HEAD + b"content-length: 1\r\ncontent-length: 2\r\n\r\n", "Content-Length"),
    (HEAD + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", "Transfer-Encoding"),
    (HEAD + b"transfer-encoding: gzip\r\n\r\n", "Transfer-Encoding"), (HEAD + b"a: b\0\r\n\r\n", "header value"),
)


def test_invalid_requests_are_explained(served: Served) -> None:
    for sent, reason in INVALID:
        text = ask(served, sent)
        assert text.startswith("HTTP/1.1 400 Bad Request") and reason in message(text), sent
        assert text.count("HTTP/1.1 4") == 1, sent


def test_expect_100_continue(served: Served) -> None:
    expecting = HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n" % len(BODY)
    raw = served.connect()
    raw.sendall(expecting + b"x-api-key: secret\r\n\r\n")
    assert raw.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
    raw.sendall(BODY)
    assert b"text_completion" in answer(raw)
    raw.sendall(expecting + b"\r\n")
    refused = answer(raw)
    assert refused.startswith(b"HTTP/1.1 401") and b"connection: close" in refused, "none of its body is wanted"
    raw.close()


def test_a_get_may_have_a_body(served: Served) -> None:
    raw = served.connect()
    for body in (b"content-length: 5\r\n\r\nhello", b"transfer-encoding: chunked\r\n\r\n" + chunks(b"hello", 2)):
        raw.sendall(GET[:-2] + body)
        assert b'"ok"' in answer(raw)
    raw.close()


def test_disconnect_with_pipelined_requests_is_noticed() -> None:
    engine = Scripted(pause=0.01)
    with serving(engine.model()) as served:
        body = b'{"prompt": "x", "stream": true, "max_tokens": 1000000}'
        raw = served.connect()
        raw.sendall(HEAD + b"content-length: %d\r\n\r\n%s" % (len(body), body) + GET)
        wait_until(lambda: bool(engine.running))
        raw.close()
        wait_until(lambda: not engine.running)
