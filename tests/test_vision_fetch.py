"""Pictures behind URLs: public addresses only, resolved once, within limits, and only if allowed."""

from __future__ import annotations

import http.server
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
from test_server_harness import read_all, serving, wait_until
from vision_models import GREEDY, drawing, png, shows

from deltic import LLM
from deltic.errors import RequestError
from deltic.vision import fetch
from deltic.vision.fetch import Fetcher, is_public

ADDRESSES = (
    ("93.184.216.34", True), ("2606:2800:220:1:248:1893:25c8:1946", True), ("127.0.0.1", False), ("127.9.9.9", False),
    ("0.0.0.0", False), ("10.1.2.3", False), ("172.16.0.1", False), ("192.168.1.1", False), ("169.254.169.254", False),
    ("100.64.0.1", False), ("224.0.0.1", False), ("255.255.255.255", False), ("192.0.2.1", False), ("::1", False),
    ("::", False), ("fe80::1%eth0", False), ("fc00::1", False), ("ff02::1", False), ("::ffff:127.0.0.1", False),
    ("::ffff:10.0.0.1", False), ("64:ff9b::7f00:1", False), ("2002:7f00:1::", False), ("2001:0:1::", False),
    ("::ffff:93.184.216.34", True), ("::127.0.0.1", False))


def test_public_addresses() -> None:
    assert [address for address, public in ADDRESSES if is_public(address) is not public] == []


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers by path."""

    picture = png(drawing(1))

    def do_GET(self) -> None:
        headers = {"/moved": "/it.png", "/round": "/round", "/inside": "http://10.0.0.1/it.png"}
        if self.path == "/slow":
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):
                for byte in self.picture[:100]:
                    self.wfile.write(bytes([byte]))
                    time.sleep(0.05)
            return
        self.send_response(302 if self.path in headers else 404 if self.path == "/none" else 200)
        if self.path in headers:
            self.send_header("Location", headers[self.path])
        self.end_headers()
        data = {"/it.png": self.picture, "/large": bytes(fetch.MAX_BYTES + 2)}.get(self.path, b"")
        with suppress(OSError):
            self.wfile.write(data)
        if self.path == "/it.png":
            Handler.seen = dict(self.headers)

    seen: ClassVar[dict[str, str]] = {}

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def internet(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A server that appears to be public. Yields the names that were resolved."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        asked = list[str]()

        def look_up(host: str, port: int, **_: Any) -> list[Any]:
            asked.append(host)
            address = host if host.replace(".", "").isdigit() else "93.184.216.34"
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

        def connect(address: tuple[str, int], timeout: float) -> socket.socket:
            assert address[0] == "93.184.216.34", "what was looked up is what is connected to"
            made = socket.socket()
            made.settimeout(timeout)
            made.connect(("127.0.0.1", server.server_port))
            return made

        monkeypatch.setattr(fetch.socket, "getaddrinfo", look_up)
        monkeypatch.setattr(fetch.socket, "create_connection", connect)
        monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
        yield asked
        server.shutdown()


def test_fetched(internet: list[str]) -> None:
    assert Fetcher()("http://example.com/it.png", "it") == Handler.picture
    assert Fetcher()("http://example.com/moved", "it") == Handler.picture
    assert internet == ["example.com"] * 3, "each address is looked up once"
    assert not {"Cookie", "Authorization", "Referer"} & Handler.seen.keys() and Handler.seen["Host"] == "example.com"


REFUSED = (
    ("http://127.0.0.1/it.png", "not on the public internet"), ("http://169.254.169.254/latest", "not on the public"),
    ("http://example.com/inside", "not on the public internet"), ("http://example.com/round", "more than 3 times"),
    ("http://example.com/none", "status 404"), ("http://example.com/large", "more than 20 MiB"),
    ("http://me:secret@example.com/", "without user and password"), ("http://example.com:22/", "on port 80 or 443"),
    ("http://exa mple.com/", "begins with http"), ("http://example.com/\r\nHost: x", "begins with http"),
    ("http:///it.png", "begins with http"), ("http://[::1/it.png", "cannot be fetched|begins with"),
    ("http://example.com:99999/", "cannot be fetched"))


def test_refused_urls(internet: list[str]) -> None:
    for url, message in REFUSED:
        with pytest.raises(RequestError) as raised:
            Fetcher()(url, "messages[0].content[0]")
        assert re.search(message, str(raised.value)), url
        assert raised.value.field == "messages[0].content[0]" and "secret" not in str(raised.value), url


def test_slow_servers_and_many_urls(internet: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "SECONDS", 0.5)
    began = time.monotonic()
    with pytest.raises(RequestError, match="takes too long"):
        Fetcher()("http://example.com/slow", "it")
    assert time.monotonic() - began < 3
    fetcher = Fetcher()
    monkeypatch.setattr(fetcher, "_left", 1)
    fetcher("http://example.com/it.png", "it")
    with pytest.raises(RequestError, match="more than 16"):
        fetcher("http://example.com/it.png", "it")


def test_by_tls(internet: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificate must be valid for the name."""
    tls, trusting = Path(__file__).parent / "tls", ssl.create_default_context
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls / "certificate.pem", tls / "key.pem")
        server.socket = context.wrap_socket(server.socket, server_side=True)
        server.handle_error = lambda *_: None  # type: ignore[method-assign, assignment]
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()

        def connect(address: tuple[str, int], timeout: float) -> socket.socket:
            assert address == ("93.184.216.34", 443)
            made = socket.socket()
            made.connect(("127.0.0.1", server.server_port))
            return made

        monkeypatch.setattr(fetch.socket, "create_connection", connect)
        with pytest.raises(RequestError, match="SSLCertVerificationError"):
            Fetcher()("https://localhost/it.png", "it")
        monkeypatch.setattr(ssl, "create_default_context", lambda: trusting(cafile=str(tls / "certificate.pem")))
        assert Fetcher()("https://localhost/it.png", "it") == Handler.picture
        with pytest.raises(RequestError, match="SSLCertVerificationError"):
            Fetcher()("https://example.com/it.png", "it")
        server.shutdown()


@pytest.fixture(scope="module")
def fetching() -> Iterator[LLM]:
    with LLM(dtype="float32", memory="64MiB", threads=1, allow_image_urls=True) as model:
        yield model


def test_urls_need_allow_image_urls(fetching: LLM, internet: list[str]) -> None:
    asked = shows("http://example.com/it.png")
    with (LLM(dtype="float32", memory="64MiB", threads=1) as plain,
          pytest.raises(RequestError, match="must have its picture as a data URL")):
        plain.chat([asked], GREEDY)
    assert not internet
    assert fetching.chat([asked], GREEDY).text == fetching.chat([shows(drawing(1))], GREEDY).text
    with pytest.raises(RequestError, match="must have its picture as a data URL"):
        fetching.chat([shows("file:///etc/passwd")], GREEDY)


def shown(*urls: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*parts, {"type": "text", "text": "What is this?"}]
    return {"max_tokens": 3, "temperature": 0, "messages": [{"role": "user", "content": content}]}


def test_slow_urls_do_not_delay_other_clients(fetching: LLM, internet: list[str],
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """There are more requests with such URLs than a server has threads."""
    many, at_once, seconds = 20, 4, 3.0  # at once for one client: half of the threads stay free
    monkeypatch.setattr(fetch, "SECONDS", seconds)
    with serving(fetching) as server:
        def answer(path: str, **body: Any) -> str:
            return read_all(server.send(path, **body))

        def fetched() -> int:
            return internet.count("example.com")

        seen = answer("/v1/chat/completions", **shown("http://example.com/it.png", "http://example.com/it.png"))
        assert " 200 " in seen and fetched() == 1, "what a conversation shows twice is fetched once"
        slow = [server.send("/v1/chat/completions", **shown("http://example.com/slow")) for _ in range(many)]
        wait_until(lambda: fetched() == 1 + at_once)
        began = time.monotonic()
        for _ in range(3):
            said = answer("/v1/chat/completions", max_tokens=3, messages=[{"role": "user", "content": "Hi"}])
            assert " 200 " in said
        assert time.monotonic() - began < seconds - 1 and fetched() == 1 + at_once
        monkeypatch.setattr(fetch, "SECONDS", 0.01)
        answers = [read_all(each) for each in slow]
        assert all(" 400 " in text and "takes too long" in text for text in answers)
        none = [{"role": "user", "content": [{"type": "input_image", "image_url": "http://example.com/none"}]}]
        monkeypatch.setattr(fetch, "SECONDS", seconds)
        text = answer("/v1/responses", input=none)
        assert " 400 " in text and "answers with status 404" in text and "input[0].content[0]" in text
