"""Connections: none waits without end, and there are only so many."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from test_server_harness import Scripted, read_all, serving, wait_until

from deltic.server import connections
from deltic.server.connections import ConnectionAcceptor

HALF = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
WHOLE = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
BODY = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{"
MESSAGES = BODY.replace(b"completions", b"messages")


def answer(raw: socket.socket) -> bytes:
    """One whole answer of a connection that stays."""
    head, _, body = b"", b"", b""
    while b"\r\n\r\n" not in head:
        piece = raw.recv(1)
        assert piece, head
        head += piece
    length = next(int(line[16:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    while len(body) < length:
        body += raw.recv(length - len(body))
    return head + body


def test_a_connection_that_waits_too_long_ends() -> None:
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


@pytest.mark.parametrize(("sent", "statuses"), [
    ((b"hello\r\n\r\n",), [400]), ((WHOLE + b"hello\r\n\r\n",), [200, 400]),
    ((PIECES % (b"completions", b"x"), b"zz\r\n"), [400]), ((PIECES % (b"messages", b"x"), b"2\r\n{}zz\r\n"), [400]),
    ((PIECES % (b"completions", b"elsewhere") + b"zz\r\n",), [400]),  # found out before the request is refused
    ((PIECES % (b"nowhere", b"x"), b"zz\r\n"), [404]), ((PIECES % (b"nowhere", b"x") + b"2\r\n{}\r\nzz\r\n",), [400]),
])
def test_what_is_no_http_is_told_so_once(sent: tuple[bytes, ...], statuses: list[int],
                                         caplog: pytest.LogCaptureFixture) -> None:
    with serving(Scripted("one").model(), allowed_hosts=["x"]) as served, caplog.at_level(logging.ERROR):
        raw = served.connect()
        for piece in sent:
            raw.sendall(piece)
            time.sleep(0.1)
        answers = read_all(raw).split("HTTP/1.1 ")[1:]
        assert [int(said[:3]) for said in answers] == statuses
        told = json.loads(answers[-1].rpartition("\r\n\r\n")[2])
        assert ("no valid HTTP" in told["error"]["message"]) == (statuses[-1] == 400)
        assert ("type" in told) == (b"/messages" in sent[0])
        assert served.health()[0] == 200
    assert not caplog.records


def test_a_header_may_not_drip() -> None:
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


def test_what_goes_on_is_not_cut_off() -> None:
    """A body in slow pieces, an answer that takes long, and a connection in use for long."""
    engine = Scripted("one two three four five six seven eight nine ten", pause=0.15)
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


def test_the_oldest_that_waits_gives_way() -> None:
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


def test_where_all_are_busy_a_new_one_is_refused() -> None:
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


def test_without_files_it_waits_and_says_so_once(monkeypatch: pytest.MonkeyPatch,
                                                 caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(connections, "_RETRY", 0.02)

    async def run() -> int:
        loop, listener, ready = asyncio.get_running_loop(), Empty(), set[Callable[[], Any]]()
        monkeypatch.setattr(loop, "add_reader", lambda _, call: ready.add(call))
        monkeypatch.setattr(loop, "remove_reader", lambda _: ready.clear())
        acceptor = ConnectionAcceptor(listener, lambda _: pytest.fail("made"))  # type: ignore[arg-type]
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


FEW_FILES = """
import resource, sys; sys.path.insert(0, "tests")
from test_server_harness import Scripted
from deltic.server.app import serve
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128))
serve(Scripted("one").model(), port=0, allowed_hosts=["x"])
"""


def test_more_clients_than_files() -> None:
    process = subprocess.Popen([sys.executable, "-c", FEW_FILES], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True)
    assert process.stdout and process.stderr
    try:
        host, port = process.stdout.readline().split("http://")[1].split("/v1")[0].split(":")
        many = [socket.create_connection((host, int(port)), 20) for _ in range(300)]
        with socket.create_connection((host, int(port)), 20) as raw:
            raw.sendall(WHOLE)
            assert b'"ok"' in answer(raw)
        for raw in many:
            raw.close()
        process.terminate()
        log = process.stderr.read()
        assert "no more than 64 connections" in log and log.count("\n") < 5, log
    finally:
        process.kill()
        process.communicate()


def test_dead_connections_are_forgotten() -> None:
    with serving(Scripted("one").model()) as served:
        for _ in range(50):
            served.connect().close()
        assert served.health()[0] == 200
        wait_until(lambda: len(served.server.door) == 1 == len(served.server.server_state.connections))
