"""Answers: limits for their number and size, and for clients that do not read them."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import Any

import pytest
from test_server_harness import USER, Scripted, limited, read_all, serving, tiny, wait_until

from deltic.config import Limits
from deltic.params import EngineRequest, SamplingParams, TokenEvent
from deltic.server import async_engine as handles
from deltic.server.async_engine import RequestHandle
from deltic.server.connections import _LEAST_READ, Connection, Transport
from deltic.server.http import PIECE

UNBOUND = Limits(max_unread_tokens=1 << 20)


@pytest.mark.parametrize(("path", "fields", "param"), [
    ("/v1/completions", {"prompt": ["x"] * 9}, "prompt"), ("/v1/completions", {"prompt": ["x"] * 3, "n": 3}, "n"),
    ("/v1/completions", {"prompt": [[1]] * 2048, "n": 128}, "prompt"),
    ("/v1/completions", {"prompt": "x", "n": 9}, "n"), ("/v1/chat/completions", {"messages": USER, "n": 9}, "n"),
])
def test_too_many_choices_are_refused_before_encoding(path: str, fields: dict[str, Any], param: str,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Scripted("one")
    with serving(engine.model(max_choices=8)) as served:
        tokenizer = type(tiny().chat_processor.tokenizer)
        for name in ("encode", "encode_batch"):
            monkeypatch.setattr(tokenizer, name, lambda *_: pytest.fail("read"), raising=False)
        response = served.post(path, **fields)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param) and "at most 8 (max_choices)" in error["message"]
        monkeypatch.undo()
        assert served.post("/v1/completions", prompt=["x"] * 4, n=2).status_code == 200
        assert len(engine.seen) == 4


def test_many_choices_do_not_block_the_event_loop() -> None:
    engine = Scripted("one two three", pause=0.05)
    with serving(engine.model(max_choices=1 << 20)) as served, served.lateness(time.process_time) as late:
        body = {"prompt": [[1, 2, 3]] * 512, "n": 128, "stream": True}
        with served.http.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
        served.wait_idle()
    assert len(engine.seen) == 512 and max(late) < 0.7, "65,536 answers at once took seconds"


@pytest.mark.parametrize("stream", [False, True])
def test_large_answers_do_not_block_the_event_loop(stream: bool) -> None:
    engine = Scripted()
    with serving(engine.model()) as served, served.lateness(time.process_time) as late:
        response = served.post("/v1/completions", prompt="x", n=64, max_tokens=300, logprobs=2, stream=stream)
        assert response.status_code == 200 and response.text.count("nan") + response.text.count('"na"') > 64 * 300
    assert max(late) < 0.4, "19,200 tokens with their probabilities took as long as they took to be written"


def test_large_answers_equal_small_ones() -> None:
    with serving(Scripted().model()) as served:
        small = served.post("/v1/completions", prompt="x", n=2, max_tokens=90, logprobs=2).json()["choices"]
        big = served.post("/v1/completions", prompt="x", n=30, max_tokens=90, logprobs=2).json()["choices"]
    assert [choice | {"index": index} for index, choice in enumerate(small * 15)] == big


def test_echo_is_limited_by_max_body_mib() -> None:
    engine, prompts = Scripted("one"), ["capital " * 1500, "capital " * 1400]
    engine.max_context = 1 << 20
    with serving(engine.model(max_body_mib=1)) as served:
        choices = served.post("/v1/completions", prompt=prompts, n=2, echo=True).json()["choices"]
        assert [choice["text"] for choice in choices] == [prompts[0] + "one"] * 2 + [prompts[1] + "one"] * 2
        refused = served.post("/v1/completions", prompt=prompts, n=64, echo=True)
    assert refused.status_code == 400 and "max_body_mib" in refused.json()["error"]["message"]


def test_a_reader_with_many_events_yields_to_others() -> None:
    async def read() -> tuple[list[int], int]:
        handle = RequestHandle(
            [EngineRequest("a", (1,), SamplingParams())], UNBOUND, abort=lambda _: None, pause=lambda *_: None
        )
        for _ in range(999):
            handle.take(TokenEvent("a", 0, 5))
        handle.take(TokenEvent("a", 0, 5, finish="length"))
        turns, sizes = 0, []

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        async for events in handle:
            sizes.append(len(events))
        task.cancel()
        return sizes, turns

    sizes, turns = asyncio.run(read())
    assert sum(sizes) == 1000 and max(sizes) <= handles.TURN and turns >= len(sizes) - 1


LONG: dict[str, Any] = {"messages": USER, "stream": True, "max_tokens": 300, "temperature": 2.0, "logprobs": True,
                        "top_logprobs": 20, "ignore_eos": True}


def texts(answer: str) -> str:
    chunks = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def test_clients_that_do_not_read_do_not_delay_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltic.server.run._SEND_BUFFER", 4096)  # that the kernel takes little is soon seen
    endless = {**LONG, "max_tokens": 400}  # none shall be over before it is noticed that nobody reads it
    with serving(limited(tiny(), max_unread_tokens=64)) as served:
        asleep = [served.send("/v1/chat/completions", 4096, **endless, seed=seed) for seed in range(20)]
        scheduler = tiny().engine.scheduler
        wait_until(lambda: len(scheduler.paused) == 20, 60)
        assert not scheduler.running and not scheduler.waiting
        waiting = [handle.unread for handle in served.bridge.handles]
        assert len(waiting) == 20 and max(waiting) < 64 + 32
        for _ in range(5):
            assert served.client.chat.completions.create(model="tiny", messages=USER, max_tokens=8).choices[0]
        assert len(scheduler.paused) == 20 and served.health()[0] == 200
        awake = [texts(served.post("/v1/chat/completions", **endless, seed=seed).text) for seed in (3,)]
        slept = [texts(read_all(asleep[seed])) for seed in (3,)]
        for raw in asleep:
            raw.close()
        served.wait_idle()
    assert awake == slept and all(awake), "an answer that paused is the same"
    tiny().engine.check()
    tiny().engine.runtime.cache.clear()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_reads_nothing_is_closed(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    engine = Scripted()
    with serving(engine.model(max_unread_tokens=16, unread_seconds=1)) as served, caplog.at_level(logging.WARNING):
        body = {"prompt": "x", "n": 8, "logprobs": 1, "stream": stream, "max_tokens": 1 << 20 if stream else 1000}
        raw = served.send("/v1/completions", 4096, **body)
        wait_until(lambda: bool(engine.seen))
        wait_until(lambda: not served.server.server_state.connections, 15)
        wait_until(lambda: not engine.running)
        assert "read nothing for 1 seconds (unread_seconds)" in caplog.text
        with pytest.raises(ConnectionError), raw:
            while raw.recv(1 << 16):
                pass
        assert served.post("/v1/completions", prompt="x", max_tokens=3).status_code == 200


@pytest.mark.parametrize("steady", [False, True], ids=["", "refilled"])
def test_a_client_that_reads_slowly_is_served(steady: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if steady:  # as much as the client takes is written again before anybody looks
        monkeypatch.setattr(Transport, "get_write_buffer_size", lambda counted: 1 << 16, raising=False)
        monkeypatch.setattr("deltic.server.connections.fcntl.ioctl", lambda *arguments: bytes(4))
    monkeypatch.setattr("deltic.server.run._SEND_BUFFER", 4096)  # the system shall not hold the rest of the answer
    checks, check, engine = list[Connection](), Connection.check, Scripted()
    monkeypatch.setattr(Connection, "check", lambda known: (check(known), checks.append(known)))
    model = engine.model(max_unread_tokens=16, unread_seconds=2)
    with serving(model) as served, served.clock() as advance:  # a busy machine must not delay the client
        raw, data = served.send("/v1/completions", 4096, prompt="x", stream=True, max_tokens=4000, logprobs=1), b""
        wait_until(lambda: bool(engine.paused))
        (connection,) = served.server.server_state.connections
        for turn in range(1, 7):
            enough = connection.transport.written + _LEAST_READ
            while len(data) < turn << 15 or connection.transport.written < enough:  # more than most buffers hold
                data += raw.recv(1 << 15) or pytest.fail("the answer ends early")
            checks.clear()
            advance(0.9)
            wait_until(lambda: bool(checks) or bool(advance(0)))  # wakes the loop again, if it slept on
        text = data.decode() + read_all(raw)
    assert "data: [DONE]" in text and texts(text) == "na" * 4000


def test_clients_that_read_are_not_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Scripted()
    monkeypatch.setattr(engine, "pause", lambda request: pytest.fail("paused"))
    with serving(engine.model(max_unread_tokens=1)) as served:
        for stream in (False, True):
            answer = served.post("/v1/completions", prompt="x", n=16, max_tokens=100, stream=stream)
            assert answer.status_code == 200 and answer.text.count("na") >= 1600 // (1 if stream else 100)
        assert served.health()[0] == 200


@pytest.mark.parametrize("path", ["/page/vendor/katex-0.19.1/katex.min.js", "/openapi.json", "/v1/completions"])
def test_a_large_answer_is_written_in_pieces(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a whole it would be copied twice in one turn of the event loop."""
    sizes: list[int] = []
    write = Transport.write
    monkeypatch.setattr(Transport, "write", lambda counted, data: (sizes.append(len(data)), write(counted, data)))
    with serving(Scripted().model()) as served:
        answer = (served.post(path, prompt=["x"] * 16, max_tokens=1000, logprobs=1) if path == "/v1/completions" else
                  served.http.get(path))
    assert answer.status_code == 200 and len(answer.content) == int(answer.headers["content-length"])
    assert answer.content.endswith((b"}", b"\n", b";")) and sum(sizes) > len(answer.content)
    assert max(sizes) <= PIECE and (len(answer.content) < PIECE or max(sizes) == PIECE)
    assert served.app.state.records.outbox.held == 0


def test_max_unsent_mib_bounds_unread_answers(monkeypatch: pytest.MonkeyPatch,
                                                           caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("deltic.server.run._SEND_BUFFER", 4096)
    body = {"prompt": ["x"] * 16, "max_tokens": 1000, "logprobs": 1}
    with serving(Scripted().model(max_unsent_mib=1)) as served, caplog.at_level(logging.WARNING):
        size, outbox = len(served.post("/v1/completions", **body).content), served.app.state.records.outbox
        assert 1 << 19 < size < 1 << 20, "it is served alone"
        first = served.send("/v1/completions", 4096, **body)
        wait_until(lambda: outbox.held > size / 2)
        assert len(read_all(served.send("/v1/completions", **body))) > size, "who reads is served meanwhile"
        with first, pytest.raises(ConnectionError):
            while first.recv(1 << 16):
                pass
        wait_until(lambda: outbox.held == 0)
        assert caplog.text.count("(max_unsent_mib)") == 1
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]
