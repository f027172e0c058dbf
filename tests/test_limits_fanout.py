"""One request for many answers: how many there may be, and that making them holds up nobody."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from test_server_harness import USER, Scripted, serving, tiny

from deltic.params import EngineRequest, SamplingParams, TokenEvent
from deltic.server import async_engine as handles
from deltic.server.async_engine import QueueLimits, RequestHandle

UNBOUND = QueueLimits(1, 0, 1, unread=1 << 20, unread_seconds=60)


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
