"""Clients share threads, waiting places and live tokens; which request is given up in a full queue."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_server_harness import USER, Scripted, Served, serving, tiny, wait_until

from deltic.chat import structured as grammar_module
from deltic.engine.policy import to_give_up
from deltic.errors import GenerationError
from deltic.params import EngineRequest, SamplingParams, TokenEvent
from deltic.server.async_engine import RequestHandle

KEYS = {"key-a": "flood", "key-b": "other"}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def as_client(served: Served, key: str) -> httpx.Client:
    limits = httpx.Limits(max_connections=None)
    return httpx.Client(base_url=served.url, timeout=60, headers={"authorization": f"Bearer {key}"}, limits=limits)


class Block:
    """Blocks calls with the word SLOW in an argument until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.begun, self.free, original = threading.Event(), threading.Event(), getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            if any("SLOW" in str(arg) for arg in args):
                self.begun.set()
                self.free.wait(60)
            return original(*args, **options)
        monkeypatch.setattr(owner, name, call)


@contextmanager
def flooding(served: Served, block: Block, path: str, **body: Any) -> Iterator[list[Future[httpx.Response]]]:
    """Many requests of one client, which wait until the end of the block."""
    with as_client(served, "key-a") as client, ThreadPoolExecutor(24) as pool:
        asked = [pool.submit(client.post, path, json=body) for _ in range(24)]
        try:
            assert block.begun.wait(30)
            yield asked
        finally:
            block.free.set()


@pytest.mark.parametrize("pad", [0, 1 << 16], ids=["small bodies", "large bodies"])
def test_prompts_of_one_client_do_not_delay_others(pad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    block = Block(monkeypatch, type(tiny().chat_processor.tokenizer), "encode")
    with serving(Scripted("one").model(), api_keys=KEYS) as served, as_client(served, "key-b") as other, \
            flooding(served, block, TEXT, prompt="SLOW", user="x" * pad) as flood:
        for body in ({"prompt": "quick"}, {"prompt": "quick", "user": "x" * pad}):
            assert other.post(TEXT, json=body).status_code == 200
        assert other.post("/tokenize", json={"prompt": "quick"}).status_code == 200
        assert not any(request.done() for request in flood)


def test_grammars_of_one_client_do_not_delay_others(monkeypatch: pytest.MonkeyPatch) -> None:
    block = Block(monkeypatch, grammar_module, "_compile")
    with serving(tiny(), api_keys=KEYS) as served, as_client(served, "key-b") as other, \
            as_client(served, "key-a") as same, \
            flooding(served, block, CHAT, messages=USER, max_tokens=1, guided_choice=["SLOW"]):
        plain = {"messages": USER, "max_tokens": 2}
        assert other.post(CHAT, json=plain).status_code == 200
        assert same.post(CHAT, json=plain, timeout=30).status_code == 200, "nor the client's own without a grammar"
        formed = other.post(CHAT, json={**plain, "guided_choice": ["yes", "no"]})
        assert formed.status_code == 200, formed.text


def test_work_of_a_disconnected_client_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    block = Block(monkeypatch, type(tiny().chat_processor.tokenizer), "encode")
    with serving(Scripted("one").model()) as served:
        executors = served.app.state.records.executors
        left = [served.send(TEXT, prompt="SLOW") for _ in range(20)]
        wait_until(lambda: executors.small.waiting() >= 10)
        for connection in left:
            connection.close()
        try:
            wait_until(lambda: executors.small.waiting() == 0)
        finally:
            block.free.set()


def test_counting_tokens_compiles_no_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "_compile", lambda *_: pytest.fail("compiled"))
    with serving(Scripted("one").model()) as served:
        assert served.post("/tokenize", messages=USER, guided_choice=["yes", "no"]).status_code == 200


def test_clients_are_charged_for_their_own_use() -> None:
    with serving(Scripted("one").model(), api_keys=KEYS) as served, as_client(served, "key-a") as client:
        executors = served.app.state.records.executors
        client.post("/tokenize", json={"prompt": "word " * 4000})
        client.post("/tokenize", json={"prompt": "word " * 20_000})
        wait_until(lambda: executors.small.used("flood") > 0 and executors.large.used("flood") > 0)
        assert executors.small.used("other") == executors.large.used("other") == 0


class Crowded(Scripted):
    """Runs a limited number of answers of the flood, and all others at once."""

    places = 0

    def step(self) -> list[TokenEvent]:
        self.left = self.places
        return super().step()

    def _advance(self, request: EngineRequest, choice: list[Any]) -> list[TokenEvent]:
        if request.client == "flood":
            self.left -= 1
            if self.left < 0:
                return []
        return super()._advance(request, choice)


@contextmanager
def full(engine: Crowded, requests: list[dict[str, Any]], **limits: Any
         ) -> Iterator[tuple[Served, list[Future[httpx.Response]], httpx.Client, httpx.Client]]:
    """Yields a server with these requests of the flood, and two clients."""
    with serving(engine.model(**limits), api_keys=KEYS) as served, as_client(served, "key-a") as flood, \
            as_client(served, "key-b") as other, ThreadPoolExecutor(len(requests)) as pool:
        asked = list[Future[httpx.Response]]()
        for number, body in enumerate(requests, 1):  # one after another, so that their order is known
            asked.append(pool.submit(flood.post, TEXT, json={"max_tokens": 30_000, **body}))
            wait_until(lambda number=number: len(engine.seen) == number)  # type: ignore[misc]
        try:
            yield served, asked, flood, other
        finally:
            for record in served.app.state.records:
                if record.run:
                    served.loop.call_soon_threadsafe(record.run.cancel, "the test is over")
        for request in asked:
            request.result(30)


def test_a_new_client_gets_a_place_in_a_full_queue() -> None:
    """One request fills the batch, and four requests for 128 answers each fill the queue."""
    engine, short = Crowded(), {"prompt": "x", "max_tokens": 2}
    engine.places = batch = tiny().runtime.memory.max_batch
    with full(engine, [{"prompt": "x", "n": n} for n in (batch, 128, 128, 128, 128)]) as (served, asked, flood, other):
        assert flood.post(TEXT, json=short).status_code == 503, "its own share is full"
        for _ in range(2):
            assert other.post(TEXT, json=short).status_code == 200
        assert [request.done() for request in asked] == [False] * 4 + [True]
        response = asked[-1].result()
        assert response.status_code == 503 and int(response.headers["retry-after"])
        assert "another client" in response.text and "max_waiting" in response.text
        served.bridge.check_room("flood")  # alone it may have all again


def test_a_displaced_stream_ends_with_an_error() -> None:
    engine, short = Crowded(), {"prompt": "x", "max_tokens": 2}
    batch = tiny().runtime.memory.max_batch
    streams = [{"prompt": "x", "stream": True, "n": n} for n in (1, 1, batch)]
    with full(engine, streams, max_waiting=2) as (served, asked, _, other):
        assert engine.places == 0 and other.post(TEXT, json=short).status_code == 200
        events = asked[-1].result(30).text
        assert "another client" in events and "error" in events and "[DONE]" not in events
        assert not any(request.done() for request in asked[:-1])
        assert served.bridge.displaced == 1


def test_a_new_client_gets_room_for_its_prompt() -> None:
    body = {"prompt": [5] * 250}
    with full(Crowded(), [body] * 4, max_live_tokens=1000) as (_, asked, flood, other):
        assert "max_live_tokens" in flood.post(TEXT, json={"prompt": [5], "max_tokens": 1}).text
        assert other.post(TEXT, json={"prompt": [5] * 100, "max_tokens": 1}).status_code == 200
        assert other.post(TEXT, json={"prompt": [5] * 900, "max_tokens": 1}).status_code == 503, "it would have more"
        assert "max_live_tokens" in asked[-1].result(30).text
        assert [request.done() for request in asked] == [False] * 3 + [True]


def test_unread_answers_end_after_unread_seconds() -> None:
    async def work() -> None:
        ended, aborted, held = list[int](), list[RequestHandle](), list[bool]()
        handle = RequestHandle(
            [EngineRequest("r", (1,), SamplingParams())],
            SimpleNamespace(max_unread_tokens=4, unread_seconds=0.02),  # type: ignore[arg-type]
            abort=aborted.append,
            pause=lambda _, hold: held.append(hold),
            on_unread=partial(ended.append, 1),
        )
        handle.admit(None)
        handle.take(TokenEvent("r", 0, 5))
        assert len(await anext(handle)) == 1 and (handle.begun, handle.waiting) == (1, 0)
        for _ in range(5):
            handle.take(TokenEvent("r", 0, 5))
        assert held == [True] and (handle.begun, handle.waiting) == (0, 1), "who pauses holds a place as who waits"
        while not ended:
            await asyncio.sleep(0.01)
        assert aborted == [handle] and not handle.open
        with pytest.raises(GenerationError, match="unread_seconds"):
            await anext(handle)

    asyncio.run(work())


def test_a_reader_that_resumes_in_time_loses_nothing() -> None:
    async def work() -> None:
        ended = list[int]()
        handle = RequestHandle(
            [EngineRequest("r", (1,), SamplingParams())],
            SimpleNamespace(max_unread_tokens=4, unread_seconds=0.05),  # type: ignore[arg-type]
            abort=lambda _: None,
            pause=lambda *_: None,
            on_unread=partial(ended.append, 1),
        )
        handle.take(TokenEvent("r", 0, 5))
        await anext(handle)
        for _ in range(5):
            handle.take(TokenEvent("r", 0, 5))
        assert handle.held and len(await anext(handle)) == 5 and not handle.held
        await asyncio.sleep(0.15)
        assert handle.open and not ended

    asyncio.run(work())


@dataclass(eq=False)
class One:
    """A request."""

    client: str
    waiting: int
    begun: int = 0


def sized(*requests: One) -> list[tuple[One, int]]:
    return [(request, request.waiting + request.begun) for request in requests]


def test_a_single_client_may_fill_the_queue() -> None:
    held = sized(*(One("a", 1) for _ in range(10)))
    assert to_give_up(held[:9], "a", 1, 10) == []
    assert to_give_up(held, "a", 1, 10) is None


def test_the_newest_waiting_request_is_given_up() -> None:
    running, old, new = One("a", 0, 4), One("a", 3), One("a", 3)
    assert to_give_up(sized(running, old, new), "b", 1, 10) == [new]
    assert to_give_up(sized(running, new, old), "b", 1, 10) == [old]


def test_running_requests_are_never_given_up() -> None:
    assert to_give_up(sized(One("a", 0, 10)), "b", 1, 10) is None


def test_requests_that_have_begun_are_given_up_last() -> None:
    waiting, begun = One("a", 2), One("a", 7, 1)
    assert to_give_up(sized(waiting, begun), "b", 1, 10) == [waiting]
    assert to_give_up(sized(begun), "b", 3, 10) == [begun]


def test_an_oversized_request_is_accepted_alone() -> None:
    assert to_give_up([], "a", 100, 10) == []
    assert to_give_up(sized(One("b", 1)), "a", 100, 10) is None


CLIENTS = "abcd"
REQUESTS = st.lists(st.builds(One, st.sampled_from(CLIENTS), st.integers(0, 6), st.integers(0, 3)), max_size=20)


@settings(max_examples=60)
@given(REQUESTS, st.sampled_from(CLIENTS), st.integers(1, 8))
def test_a_new_client_never_holds_more_than_the_others(requests: list[One], client: str, size: int) -> None:
    held = sized(*requests)
    most = max(sum(taken for _, taken in held), 1)
    going = to_give_up(held, client, size, most)
    before = Counter[str]()
    for request, taken in held:
        before[request.client] += taken
    after = Counter(before)
    after[client] += size
    if going is None:
        return
    assert len({id(request) for request in going}) == len(going)
    for request in going:
        assert request.client != client and request.waiting
        assert after[request.client] > before[client] + size, "it holds more than the newcomer when it gives up one"
        after[request.client] -= request.waiting + request.begun
    if before:
        assert sum(after.values()) <= most or not any(taken for _, taken in held)


@settings(max_examples=40)
@given(REQUESTS, st.integers(1, 3))
def test_a_small_request_displaces_a_large_waiting_one(requests: list[One], size: int) -> None:
    requests = [*requests, One("flood", 100)]
    held = sized(*requests)
    most = sum(taken for _, taken in held)
    assert to_give_up(held, "newcomer", size, most)
