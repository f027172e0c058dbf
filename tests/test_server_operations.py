"""Access to the server: API keys, hosts, TLS, Unix sockets, and how it ends."""

from __future__ import annotations

import signal
import socket
import ssl
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_server_harness import USER, Scripted, Served, read_all, serving, wait_until

from deltic.errors import ConfigError
from deltic.server.app import create_app
from deltic.server.middleware import LOCAL_NAMES, ApiKeyAuth, read_keys
from deltic.server.run import hosts_of, listen, listen_unix, tls_context

TLS = Path(__file__).parent / "tls"
ENDLESS: dict[str, Any] = {"messages": USER, "stream": True}
KEYS = {"first": "ann", "second": "ann", "third": "bob"}


def ask(served: Served, key: str, **body: Any) -> httpx.Response:
    return served.http.post("/v1/completions", json={"prompt": "x", **body}, headers={"authorization": f"Bearer {key}"})


# Keys


def test_only_known_api_keys_are_accepted() -> None:
    with serving(Scripted("one two").model(), api_keys=KEYS) as served, served.lateness(time.process_time) as late:
        threads = [threading.Thread(target=guess, args=(served, start)) for start in range(0, 2000, 500)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            for key in KEYS:
                assert ask(served, key).json()["choices"][0]["text"] == "one two"
        assert max(late) < 0.5
        for key in KEYS:
            assert served.http.get("/v1/models", headers={"x-api-key": key}).status_code == 200
        for wrong in ("x", "firs", "firstx", "first second", "ann"):
            assert ask(served, wrong).status_code == 401
        for header, status in (("bearer first", 200), ("BEARER first", 200), ("bearer wrong", 401)):
            assert served.http.get("/v1/models", headers={"authorization": header}).status_code == status, header


def guess(served: Served, start: int) -> None:
    """Sends 500 wrong keys over one connection."""
    with served.connect() as raw:
        for number in range(start, start + 500, 50):
            raw.sendall(b"".join(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %d\r\n\r\n" % bogus
                                 for bogus in range(number, number + 50)))
            seen = b""
            while seen.count(b"invalid_api_key") < 50:
                seen += raw.recv(1 << 16)
            assert seen.count(b"HTTP/1.1 401") == 50


def test_max_running_per_key() -> None:
    engine = Scripted(pause=0.01)
    with serving(engine.model(max_running_per_key=2), api_keys=KEYS) as served:
        two = [served.http.stream("POST", "/v1/chat/completions", json=ENDLESS, headers={"x-api-key": key})
               for key in ("first", "second")]
        responses = [each.__enter__() for each in two]
        assert [response.status_code for response in responses] == [200, 200]
        refused = ask(served, "first")
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "rate_limit_error" and "max_running_per_key" in refused.text
        for path, body in (("/v1/messages", {"messages": USER, "max_tokens": 3}), ("/v1/responses", {"input": "x"})):
            said = served.http.post(path, json=body, headers={"x-api-key": "first"})
            assert said.status_code == 429 and said.json()["error"]["type"] == "rate_limit_error"
        for path, body in (("/v1/messages/count_tokens", {"messages": USER}), ("/tokenize", {"prompt": "x"}),
                           ("/v1/responses/input_tokens", {"input": "x"}), ("/detokenize", {"tokens": [5]})):
            counted = served.http.post(path, json=body, headers={"x-api-key": "first"})
            assert counted.status_code == 200, "what counts tokens is no answer"
        assert ask(served, "third", max_tokens=3).status_code == 200
        assert ask(served, "third", n=3).json()["error"]["param"] == "n"
        for each in two:
            each.__exit__(None, None, None)
        wait_until(lambda: ask(served, "first", max_tokens=3).status_code == 200)


def test_max_running_per_key_needs_api_keys() -> None:
    with pytest.raises(ConfigError, match="max_running_per_key needs API keys"):
        create_app(Scripted("x").model(max_running_per_key=1))


@pytest.mark.parametrize(("text", "said"), [
    ("# nothing\n\n", "no API keys"), ("a ann\nb\na bob", "line 3 of keys"), ("a " + "n" * 200, "line 1 of keys"),
])
def test_invalid_key_files(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        read_keys(text, "keys")
    assert "ann" not in str(error.value)


def test_key_files() -> None:
    assert read_keys("# ours\nsk-1  Ann of X \r\n\n sk-2\n", "keys") == {"sk-1": "Ann of X", "sk-2": None}
    for owners, said in (({"": "x"}, "empty"), ({str(number): "x" for number in range(1001)}, "at most 1000")):
        with pytest.raises(ConfigError, match=said):
            ApiKeyAuth(owners)


# Hosts


HOSTS = (
    ("localhost", 200), ("LOCALHOST.:8000", 200), ("chat.localhost", 200), ("127.0.0.1:1", 200), ("[::1]:8000", 200),
    ("192.168.0.7", 200), ("page.evil", 403), ("localhost.evil", 403), ("evil:localhost", 403), ("xlocalhost", 403),
    ("127.0.0.1.evil", 403), ("[evil", 403), ("", 403), ("ours.lan", 200), ("a.ours.lan", 403), ("a.b.all.lan", 200),
    ("all.lan", 403), ("örtlich", 403),
)
TARGETS = (
    ("http://localhost/health", "200"), ("HTTPS://localhost:1/v1/models?x=y", "200"), ("http://localhost", "200"),
    ("http://localhost/nowhere", "404"), ("/http://localhost/health", "404"))


def test_allowed_hosts_and_absolute_urls() -> None:
    with serving(Scripted("x").model(), allowed_hosts=[*LOCAL_NAMES, "ours.lan", "*.all.lan"]) as served:
        for host, status in HOSTS:
            assert served.http.get("/health", headers={b"host": host.encode()}).status_code == status, host
            body = served.http.post("/v1/messages", json={}, headers={b"host": host.encode()}).json()
            assert body["type"] == "error", host
            assert (body["error"]["type"] == "permission_error") == (status == 403), host
        for target, expected in TARGETS:
            raw = served.connect()
            raw.sendall(f"GET {target} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
            assert read_all(raw).split()[1] == expected, target


def test_default_allowed_hosts() -> None:
    with listen("127.0.0.1", 0) as near, listen("0.0.0.0", 0) as far:
        assert hosts_of(near, [], "127.0.0.1") == (*LOCAL_NAMES, "127.0.0.1")
        assert hosts_of(far, [], "0.0.0.0") == ("*",)
        assert "localhost" in hosts_of(far, ["x.lan"], "0.0.0.0") and "*" not in hosts_of(far, ["x.lan"], "0.0.0.0")


# TLS


@contextmanager
def served_with_tls(engine: Scripted, **limits: Any) -> Iterator[Served]:
    model = engine.model(**limits)
    context = tls_context(TLS / "certificate.pem", TLS / "key.pem")
    with serving(model, tls=context) as served:
        yield served


def trusting() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(TLS / "certificate.pem"))


def test_tls_serves_during_slow_and_broken_handshakes() -> None:
    """Of 99 connections, a third sends nothing, a third plain HTTP, and a third half of a handshake."""
    with served_with_tls(Scripted("one two three"), max_connections=20) as served:
        assert served.url.startswith("https://")
        hello = b"\x16\x03\x01\x00\x05\x01"
        raws = []
        for number in range(99):
            raw = served.connect()
            raw.sendall((b"", b"GET / HTTP/1.1\r\n\r\n", hello)[number % 3])
            raws.append(raw)
        with httpx.Client(base_url=served.url, verify=trusting(), timeout=20) as client:
            for _ in range(5):
                body = {"prompt": "x", "stream": True}
                assert client.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
                assert client.get("/health").json()["status"] == "ok"
        assert len(served.server.door) <= 20
        for raw in raws:
            raw.close()
        wait_until(lambda: len(served.server.door) == 0)


def test_slow_handshakes_are_cut_off() -> None:
    with served_with_tls(Scripted("x"), header_seconds=1) as served, served.connect() as raw:
        raw.sendall(b"\x16\x03\x01")
        assert raw.recv(1) == b""
        wait_until(lambda: len(served.server.door) == 0)


def test_clients_with_tls_that_do_not_read_are_closed() -> None:
    with served_with_tls(Scripted(), unread_seconds=1) as served:
        raw = trusting().wrap_socket(served.connect(4096), server_hostname="localhost")
        body = b'{"prompt": "x", "stream": true, "logprobs": 1, "max_tokens": 99999}'
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: len(served.server.door) == 1)
        wait_until(lambda: len(served.server.door) == 0, 20)
        raw.close()


@pytest.mark.parametrize(("certificate", "key", "said"), [
    ("key.pem", "key.pem", "cannot be used"), ("certificate.pem", "certificate.pem", "cannot be used"),
    ("certificate.pem", "nowhere.pem", "No such file"), ("certificate.pem", "locked.pem", "has a passphrase"),
])
def test_invalid_tls_files(certificate: str, key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tls_context(TLS / certificate, TLS / key)


# Unix sockets


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with served_on_unix(path) as client:
        assert stat.S_IMODE(path.stat().st_mode) == 0o620
        answer = client.post("http://x/v1/completions", json={"prompt": "x", "stream": True})
        assert answer.text.endswith("data: [DONE]\n\n")
        with pytest.raises(ConfigError, match="another server uses it"):
            listen_unix(path)
        assert client.get("http://x/health").status_code == 200
    assert not path.exists()


@contextmanager
def served_on_unix(path: Path) -> Iterator[httpx.Client]:
    listener = listen_unix(path, 0o620)
    with serving(Scripted("one").model(), listener=listener), httpx.Client(
            transport=httpx.HTTPTransport(uds=str(path)), timeout=20) as client:
        yield client


def test_existing_files_at_a_unix_socket_path(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    listen_unix(path).close()
    assert not path.exists(), "what was left behind was taken over"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(ConfigError, match="another program listens on it"):
            listen_unix(path)
    path.unlink()
    path.write_text("precious")
    with pytest.raises(ConfigError, match="no socket"):
        listen_unix(path)
    assert path.read_text() == "precious"
    for wrong, said in ((tmp_path / "no" / "s", "No such file"), (tmp_path / ("x" * 150), "too long"),
                        (tmp_path, "no socket")):
        with pytest.raises(ConfigError, match=said):
            listen_unix(wrong)


# The end


def test_a_draining_server_is_not_ready() -> None:
    engine = Scripted("one two three four five six seven eight", pause=0.1)
    with serving(engine.model(), drain_seconds=30) as served:
        assert served.http.get("/ready").json() == {"status": "ready", "requests": 0}
        with served.http.stream("POST", "/v1/chat/completions", json=ENDLESS) as running:
            lines = running.iter_lines()
            next(lines)
            served.server.handle_exit(signal.SIGTERM, None)
            wait_until(lambda: served.http.get("/ready").status_code == 503)
            assert served.health()[0] == 200, "it works on"
            late = served.post("/v1/completions", prompt="x")
            assert late.status_code == 503 and "shutting down" in late.text and "retry-after" in late.headers
            assert "[DONE]" in "".join(lines)
        served.thread.join(10)
        assert not served.thread.is_alive()


def test_drain_is_bounded() -> None:
    engine = Scripted(pause=0.01)
    with serving(engine.model(), drain_seconds=0.3) as served, served.http.stream(
            "POST", "/v1/chat/completions", json=ENDLESS) as running:
        lines = running.iter_lines()
        next(lines)
        began = time.monotonic()
        served.server.handle_exit(signal.SIGTERM, None)
        assert "shutting down" in "".join(lines)
        served.thread.join(10)
        assert time.monotonic() - began < 5 and not engine.running


def test_an_idle_server_ends_at_once() -> None:
    with serving(Scripted("x").model(), drain_seconds=1000) as served:
        served.server.handle_exit(signal.SIGTERM, None)
        wait_until(lambda: not served.thread.is_alive(), 5)


def names(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


def test_a_closed_unix_socket_leaves_no_files(tmp_path: Path) -> None:
    with listen_unix(tmp_path / "s"):
        assert names(tmp_path) == ["s", "s.lock"]
        with pytest.raises(ConfigError, match="another server uses it"):
            listen_unix(tmp_path / "s")
        assert names(tmp_path) == ["s", "s.lock"]
    assert names(tmp_path) == []


def test_a_refused_unix_socket_leaves_no_lock(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    for name, said in (("file", "no socket"), ("x" * 150, "too long")):
        with pytest.raises(ConfigError, match=said):
            listen_unix(tmp_path / name)
        assert names(tmp_path) == ["file"]


def test_an_existing_file_is_not_deleted_as_lock(tmp_path: Path) -> None:
    (tmp_path / "poetry.lock").write_text("precious")
    listen_unix(tmp_path / "poetry").close()
    assert names(tmp_path) == ["poetry.lock"] and (tmp_path / "poetry.lock").read_text() == "precious"


def test_a_lock_removed_by_its_owner_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.lock"
    monkeypatch.setattr("fcntl.flock", lambda file, kind: path.unlink())
    with pytest.raises(ConfigError, match="another server uses it"):
        listen_unix(tmp_path / "s")
    assert names(tmp_path) == []
