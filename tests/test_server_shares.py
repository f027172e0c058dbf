"""No client takes another's share: of threads, of places that wait, of tokens that are live."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from test_server_harness import USER, Scripted, Served, serving, tiny, wait_until

from deltic.text import grammar as grammar_module

KEYS = {"key-a": "flood", "key-b": "other"}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def as_client(served: Served, key: str) -> httpx.Client:
    limits = httpx.Limits(max_connections=None)
    return httpx.Client(base_url=served.url, timeout=60, headers={"authorization": f"Bearer {key}"}, limits=limits)


@contextmanager
def flooding(served: Served, count: int, path: str, **body: Any) -> Iterator[list[Future[httpx.Response]]]:
    """So many requests of one client at once."""
    with as_client(served, "key-a") as client, ThreadPoolExecutor(count) as pool:
        yield [pool.submit(client.post, path, json=body) for _ in range(count)]


@contextmanager
def blocking(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, mark: str) -> Iterator[threading.Event]:
    """Calls with this mark in an argument wait until the end of the block; the event: one does."""
    original, free, begun = getattr(owner, name), threading.Event(), threading.Event()

    def call(*args: Any, **options: Any) -> Any:
        if any(mark in str(arg) for arg in args):
            begun.set()
            free.wait(60)
        return original(*args, **options)
    monkeypatch.setattr(owner, name, call)
    try:
        yield begun
    finally:
        free.set()


@pytest.mark.parametrize("pad", [0, 1 << 16], ids=["small bodies", "large bodies"])
def test_prompts_of_one_client_do_not_hold_up_others(pad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = type(tiny().chat_processor.tokenizer)
    with serving(Scripted("one").model(), api_keys=KEYS) as served, \
            blocking(monkeypatch, tokenizer, "encode", "SLOW") as begun, \
            flooding(served, 24, TEXT, prompt="SLOW", user="x" * pad) as flood, as_client(served, "key-b") as other:
        assert begun.wait(30)
        for body in ({"prompt": "quick"}, {"prompt": "quick", "user": "x" * pad}):
            assert other.post(TEXT, json=body).status_code == 200
        assert other.post("/tokenize", json={"prompt": "quick"}).status_code == 200
        assert not any(request.done() for request in flood)


def test_grammars_of_one_client_do_not_hold_up_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tiny(), api_keys=KEYS) as served, \
            blocking(monkeypatch, grammar_module, "_compile", "SLOW") as begun, \
            flooding(served, 24, CHAT, messages=USER, max_tokens=1, guided_choice=["SLOW"]), \
            as_client(served, "key-b") as other:
        assert begun.wait(30)
        plain = {"messages": USER, "max_tokens": 2}
        assert other.post(CHAT, json=plain).status_code == 200
        formed = other.post(CHAT, json={**plain, "guided_choice": ["yes", "no"]})
        assert formed.status_code == 200, formed.text


def test_counting_tokens_compiles_no_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "_compile", lambda *_: pytest.fail("compiled"))
    with serving(Scripted("one").model()) as served:
        assert served.post("/tokenize", messages=USER, guided_choice=["yes", "no"]).status_code == 200


def test_a_clients_own_use_is_charged() -> None:
    with serving(Scripted("one").model(), api_keys=KEYS) as served, as_client(served, "key-a") as client:
        executors = served.app.state.records.executors
        client.post("/tokenize", json={"prompt": "word " * 4000})
        client.post("/tokenize", json={"prompt": "word " * 20_000})
        wait_until(lambda: executors.small.used("flood") > 0 and executors.large.used("flood") > 0)
        assert executors.small.used("other") == executors.large.used("other") == 0
