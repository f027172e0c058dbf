"""Connections: their time limits and their number."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from test_server_harness import Scripted, read_all, serving, wait_until

from deltic.config import Limits
from deltic.server import run as server_run
from deltic.server.connections import ConnectionLimiter
from deltic.server.run import ConnectionAcceptor

HALF = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
WHOLE = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
BODY = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{"
MESSAGES = BODY.replace(b"completions", b"messages")


def answer(raw: socket.socket) -> bytes:
    """Reads one answer of a connection that stays open."""
    head, _, body = b"", b"", b""
    while b"\r\n\r\n" not in head:
        piece = raw.recv(1)
        assert piece, head
        head += piece
    length = next(int(line[16:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    while len(body) < length:
        body += raw.recv(length - len(body))
    return head + body


def test_connections_that_wait_too_long_are_closed() -> None:
    with serving(Scripted("one").model(header_seconds=1, keep_alive_seconds=1)) as served:
        waiting = [(sent, served.connect()) for sent in (b"", HALF, BODY, WHOLE + HALF, WHOLE, WHOLE + WHOLE,
                                                           MESSAGES)]
        for sent, raw in waiting:
            raw.sendall(sent)
        for sent, raw in waiting:
            text, half = read_all(raw), sent.endswith(HALF) or sent in (BODY, MESSAGES)
            assert text.count("200 OK") == sent.count(WHOLE) and text.count("408 Request Timeout") == half, sent
            if half:  # in the form of the path's clients, as far as there is a path
                said = json.loads(text.rpartition("\r\n\r\n")[2])
                assert said["error"]["type"] == "invalid_request_error" and ("type" in said) == (sent == MESSAGES)
        assert served.health()[0] == 200


PIECES = b"POST /v1/%s HTTP/1.1\r\nhost: %s\r\ntransfer-encoding: chunked\r\n\r\n"


INVALID: list[tuple[tuple[bytes, ...], list[int]]] = [
    ((b"hello\r\n\r\n",), [400]), ((WHOLE + b"hello\r\n\r\n",), [200, 400]),
    ((PIECES % (b"completions", b"x"), b"zz\r\n"), [400]), ((PIECES % (b"messages", b"x"), b"2\r\n{}zz\r\n"), [400]),
    ((PIECES % (b"completions", b"elsewhere") + b"zz\r\n",), [400]),  # found out before the request is refused
    ((PIECES % (b"nowhere", b"x"), b"zz\r\n"), [404]), ((PIECES % (b"nowhere", b"x") + b"2\r\n{}\r\nzz\r\n",), [400]),
]


def test_invalid_http_gets_one_answer(caplog: pytest.LogCaptureFixture) -> None:
    with serving(Scripted("one").model(), allowed_hosts=["x"]) as served, caplog.at_level(logging.ERROR):
        for sent, statuses in INVALID:
            raw = served.connect()
            for piece in sent:
                raw.sendall(piece)
                time.sleep(0.1)
            answers = read_all(raw).split("HTTP/1.1 ")[1:]
            assert [int(answer[:3]) for answer in answers] == statuses, sent
            body = json.loads(answers[-1].rpartition("\r\n\r\n")[2])
            assert ("no valid HTTP" in body["error"]["message"]) == (statuses[-1] == 400), sent
            assert ("type" in body) == (b"/messages" in sent[0]), sent
        assert served.http.get("/health", headers={"host": "x"}).status_code == 200
    assert not caplog.records


def test_slow_headers_are_cut_off() -> None:
    with serving(Scripted("one").model(header_seconds=1, keep_alive_seconds=30)) as served:
        raw, pieces = served.connect(), 0
        raw.sendall(HALF)
        with pytest.raises(ConnectionError):
            while pieces < 1000:
                raw.sendall(b"a: b\r\n")
                pieces += 1
                time.sleep(0.1)
        raw.close()
    assert 5 < pieces < 60


def test_slow_but_active_connections_stay_open() -> None:
    """A body in slow pieces, a slow answer, and a connection that is used for long."""
    engine = Scripted("one two three four five six seven eight nine ten", pause=0.12)
    with serving(engine.model(header_seconds=1, keep_alive_seconds=1)) as served, served.connect() as raw:
        data = b'{"prompt": "x", "max_tokens": 50}'
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(data))
        for place in range(0, len(data), 12):
            raw.sendall(data[place:place + 12])
            time.sleep(0.6)
        assert b"nine ten" in answer(raw)
        for _ in range(2):
            time.sleep(0.7)
            raw.sendall(WHOLE)
            assert b'"ok"' in answer(raw)


def test_max_connections_closes_the_longest_waiting() -> None:
    with serving(Scripted("one").model(max_connections=4)) as served:
        waiting = []
        for sent in (b"", HALF, WHOLE, BODY):
            waiting.append(served.connect())
            waiting[-1].sendall(sent)
            wait_until(lambda: len(served.server.server_state.connections) == len(waiting))
            time.sleep(0.05)
        assert b"200 OK" in answer(waiting[2])
        for _ in range(2):
            waiting.append(served.connect())
            waiting[-1].sendall(WHOLE)
            assert b'"ok"' in answer(waiting[-1])
        said = [read_all(raw) for raw in waiting[:2]]
        assert said[0] == "" and said[1].startswith("HTTP/1.1 408")
        waiting[2].sendall(WHOLE)
        assert b'"ok"' in answer(waiting[2]), "it waits for less long than the others"
        for raw in waiting[2:]:
            raw.close()


def test_max_connections_refuses_new_ones_if_all_are_busy() -> None:
    engine = Scripted(pause=0.01)
    with serving(engine.model(max_connections=3)) as served:
        busy = [served.send("/v1/completions", prompt="x", stream=True, max_tokens=1 << 20) for _ in range(3)]
        wait_until(lambda: len(engine.running) == 3)
        for _ in range(100):
            raw = served.connect()
            raw.sendall(WHOLE)
            text = read_all(raw).lower()
            assert text.startswith("http/1.1 503") and "retry-after: 1" in text and "(max_connections)" in text
        busy.pop().close()
        wait_until(lambda: len(engine.running) == 2)
        assert served.health()[0] == 200
        for raw in busy:
            raw.close()


class Empty:
    """A listener of a process without file descriptors."""

    tries = 0

    def fileno(self) -> int:
        return 5

    def accept(self) -> Any:
        self.tries += 1
        raise OSError(errno.EMFILE, "Too many open files")


def test_acceptor_without_file_descriptors_retries_and_logs_once(monkeypatch: pytest.MonkeyPatch,
                                                 caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(server_run, "_RETRY", 0.02)

    async def run() -> int:
        loop, listener, ready = asyncio.get_running_loop(), Empty(), set[Callable[[], Any]]()
        monkeypatch.setattr(loop, "add_reader", lambda _, call: ready.add(call))
        monkeypatch.setattr(loop, "remove_reader", lambda _: ready.clear())
        limiter = ConnectionLimiter(Limits(), lambda *_: None)
        acceptor = ConnectionAcceptor(listener, lambda _: pytest.fail("made"), limiter)  # type: ignore[arg-type]
        acceptor.start()
        turns = 0
        while listener.tries < 5:
            turns += 1
            for call in list(ready):
                call()
            await asyncio.sleep(0.005)
        acceptor.stop()
        return turns

    with caplog.at_level(logging.WARNING):
        turns = asyncio.run(run())
    assert turns > 5 and len(caplog.records) == 1 and "Too many open files" in caplog.text


def test_closed_connections_are_removed() -> None:
    with serving(Scripted("one").model()) as served:
        for _ in range(50):
            served.connect().close()
        assert served.health()[0] == 200
        wait_until(lambda: len(served.server.door) == 1 == len(served.server.server_state.connections))
