"""Disconnects, pauses and shutdown, and /health when the engine hangs or breaks."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from test_server_harness import USER, Scripted, Served, read_all, serving, tiny, wait_until

from deltic.cli import main
from deltic.config import Limits
from deltic.errors import ConfigError, DelticError
from deltic.params import EngineRequest, SamplingParams, TokenEvent
from deltic.server.app import serve
from deltic.server.async_engine import AsyncEngine, RequestHandle
from deltic.server.run import listen

ENDLESS: dict[str, Any] = {"model": "tiny", "messages": USER, "stream": True}


async def one_of_many(client: AsyncOpenAI, number: int) -> str:
    stream = await client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": f"Number {number}"}], stream=True, max_tokens=16,
        temperature=2.0, seed=number, extra_body={"ignore_eos": True})
    text = ""
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        if number % 3 == 0 and len(text) > number % 7:
            await stream.close()
            return "gone"
    return text


def test_disconnects_do_not_change_other_streams() -> None:
    async def all_of_them(url: str) -> list[str]:
        limits = httpx.Limits(max_connections=40)
        async with httpx.AsyncClient(limits=limits, timeout=60) as http, AsyncOpenAI(
                base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http) as client:
            return await asyncio.gather(*(one_of_many(client, number) for number in range(40)))

    cache = tiny().engine.runtime.cache
    with serving(tiny()) as served:
        texts = asyncio.run(all_of_them(served.url))
        assert sum(text == "gone" for text in texts) == 14 and all(texts)
        served.wait_idle()
        wait_until(lambda: served.health()[0] == 200)
        tiny().worker.call(lambda engine: (engine.check(), cache.clear()))
        assert cache.pages.free == cache.pages.size and cache.slots.free == cache.slots.size
        undisturbed = asyncio.run(all_of_them(served.url))
    assert undisturbed == texts, "vanishing neighbours change nothing"


def test_a_disconnected_stream_ends_within_two_steps() -> None:
    engine = Scripted(pause=0.05)
    with serving(engine.model()) as served:
        stream = served.client.chat.completions.create(**ENDLESS)
        next(iter(stream))
        steps = engine.stats.steps
        stream.close()
        wait_until(lambda: not engine.running, 2)
        assert engine.stats.steps - steps <= 3


def test_disconnect_during_a_whole_answer() -> None:
    engine = Scripted(pause=0.02)
    with serving(engine.model()) as served:
        with pytest.raises(httpx.ReadTimeout):
            served.http.post("/v1/chat/completions", json={"messages": USER, "n": 3}, timeout=0.5)
        wait_until(lambda: not engine.running, 2)
        assert len(engine.seen) == 1 and served.wait_idle() < 2 and served.health()[0] == 200


def test_disconnect_before_admission() -> None:
    engine, gate = Scripted(), threading.Event()
    with serving(engine.model()) as served:
        engine.before_step = gate.wait
        first = served.client.chat.completions.create(**ENDLESS | {"max_tokens": 2})
        with pytest.raises(httpx.ReadTimeout):
            served.http.post("/v1/chat/completions", json={"messages": USER}, timeout=0.3)
        wait_until(lambda: served.health()[1]["requests"] == 1)
        gate.set()
        assert len(list(first)) > 1
        wait_until(lambda: not engine.running, 2)


def test_a_client_that_pauses_reading_gets_its_whole_answer() -> None:
    count, engine = 8000, Scripted()
    with serving(engine.model()) as served:
        sleeper = served.send("/v1/completions", 4096, prompt="x", stream=True, max_tokens=count, logprobs=1)
        wait_until(lambda: len(engine.seen) == 1)
        awake = served.client.chat.completions.create(**ENDLESS | {"max_tokens": 50})
        assert len(list(awake)) > 2
        wait_until(lambda: bool(engine.paused))
        made = engine.running[engine.seen[0].id][0][1]
        assert made < count, "the engine works no further ahead than a reader may be behind"
        text = read_all(sleeper)
    assert "[DONE]" in text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == "n" * count or len(events) < count
    assert sum(len(event["choices"][0]["logprobs"]["tokens"]) for event in events) == count


@pytest.mark.parametrize("stream", [False, True])
def test_shutdown_ends_running_requests_with_an_error(stream: bool) -> None:
    engine, said = Scripted(pause=0.01), []

    def talk(served: Served) -> None:
        with pytest.raises(openai.APIError) as error:
            list(served.client.chat.completions.create(**ENDLESS | {"stream": stream}))
        said.append(error.value.message)

    with serving(engine.model(), drain_seconds=0.3) as served:
        thread = threading.Thread(target=talk, args=(served,))
        thread.start()
        wait_until(lambda: engine.stats.steps > 5)
        served.server.should_exit = True
        wait_until(lambda: not (served.thread.is_alive() or thread.is_alive()), 5)
        assert not engine.running
    assert "shutting down" in said[0]


def test_a_second_signal_ends_draining() -> None:
    engine = Scripted(pause=0.01)
    with serving(engine.model(), drain_seconds=30) as served:
        stream = served.client.chat.completions.create(**ENDLESS)
        next(iter(stream))
        served.server.handle_exit(signal.SIGINT, None)
        time.sleep(0.3)
        assert engine.running
        served.server.handle_exit(signal.SIGINT, None)
        wait_until(lambda: not served.thread.is_alive(), 5)
        assert not engine.running
        stream.close()


def test_preparing_a_large_prompt_does_not_delay_another_client(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, begun, go = Scripted("one"), threading.Event(), threading.Event()
    with serving(engine.model()) as served:
        processor = tiny().chat_processor

        def complete(*given: Any) -> Any:
            begun.set()
            assert go.wait(30)
            return type(processor).complete(processor, *given)

        monkeypatch.setattr(processor, "complete", complete)
        slow = threading.Thread(target=served.post, args=("/v1/completions",), kwargs={"prompt": "x"})
        slow.start()
        assert begun.wait(30)
        try:
            with httpx.Client(transport=httpx.HTTPTransport(local_address="127.0.0.2")) as other:
                reply = other.post(f"{served.url}/v1/chat/completions", json={"model": "tiny", "messages": USER})
            assert reply.json()["choices"][0]["message"]["content"] == "one" and slow.is_alive()
        finally:
            go.set()
            slow.join()


def test_shutdown_lets_short_answers_end() -> None:
    engine = Scripted("one two three four five six", pause=0.05)
    with serving(engine.model(), drain_seconds=5) as served:
        stream = served.client.chat.completions.create(**ENDLESS)
        next(iter(stream))
        served.server.should_exit = True
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "one two three four five six"
        served.thread.join(5)


def test_unavailable_addresses() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1, port {port}: .*in use"):
            listen("127.0.0.1", port)
    for host, port, said in (("no.such.host.invalid", 0, "not known"), ("127.0.0.1", 70000, "port must be"),
                             ("203.0.113.7", 0, "cannot listen")):
        with pytest.raises(DelticError, match=said):
            listen(host, port)
    listen("::1", 0).close() if socket.has_ipv6 and os.path.exists("/proc/net/if_inet6") else None


SERVE_TWICE = """
import resource, sys; sys.path.insert(0, "tests")
from test_server_harness import Scripted
from deltic.server.app import serve
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128))
for _ in range(2):
    serve(Scripted(pause=0.01).model(), port=0, drain_seconds=0.2)
print("end")
"""


def test_a_process_with_few_files_serves_until_a_signal() -> None:
    """More clients than files do not keep a new one out. A signal ends the server, but not the process."""
    process = subprocess.Popen([sys.executable, "-c", SERVE_TWICE], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True)
    body = {"prompt": "x", "stream": True, "max_tokens": 99999}
    try:
        assert process.stdout and process.stderr
        for number in (signal.SIGTERM, signal.SIGINT):
            url = process.stdout.readline().split("is ready: ")[1].split("/v1")[0]
            host, port = url.partition("://")[2].split(":")
            many = [socket.create_connection((host, int(port)), 20) for _ in range(300)]
            assert httpx.get(f"{url}/health", timeout=20).status_code == 200
            for raw in many:
                raw.close()
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
                lines = response.iter_lines()
                next(lines)
                process.send_signal(number)
                assert "shutting down" in "".join(lines)
        assert process.wait(60) == 0 and process.stdout.read() == "end\n"
        log = process.stderr.read()
        assert "no more than 64 connections" in log and log.count("\n") < 9, log
    finally:
        process.kill()
        process.communicate()


def test_a_reader_that_is_cancelled_during_an_event_ends() -> None:
    """It is cancelled some turns of the loop after an event: it ends, or had ended before."""
    async def read(turns: int) -> bool:
        handle = RequestHandle([EngineRequest("r", (1,), SamplingParams())], Limits(), abort=lambda _: None,
                               pause=lambda *_: None)
        reader = asyncio.ensure_future(anext(handle))
        for _ in range(3):
            await asyncio.sleep(0)
        handle.take(TokenEvent("r", 0, 5))
        handle.wake()
        for _ in range(turns):
            await asyncio.sleep(0)
        cancelled = reader.cancel()
        await asyncio.wait([reader])
        return reader.cancelled() == cancelled

    for turns in range(4):
        assert asyncio.run(read(turns)), turns


def test_a_server_that_cannot_start_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def start(engine: AsyncEngine) -> None:
        raise RuntimeError("no more threads")

    monkeypatch.setattr(AsyncEngine, "start", start)
    assert main(["serve", "tiny", "--port", "0", "--memory", "64MiB"]) != 0
    shown = capsys.readouterr()
    assert "is ready" not in shown.out
    assert shown.err.strip().splitlines()[-1].endswith("the server did not start: no more threads"), shown.err


def test_a_signal_during_startup_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    start = AsyncEngine.start
    monkeypatch.setattr(AsyncEngine, "start", lambda engine: (start(engine), signal.raise_signal(signal.SIGTERM)))
    serve(Scripted("one").model(), port=0, drain_seconds=0, on_ready=said.append)
    assert not said


# Health


def test_health_fails_while_the_engine_is_stuck() -> None:
    engine, gate = Scripted("one two three"), threading.Event()
    with serving(engine.model(), stuck_after=0.3) as served:
        engine.before_step = gate.wait
        stream = served.client.chat.completions.create(**ENDLESS)
        assert served.health()[0] == 200
        wait_until(lambda: served.health()[0] == 503, 3)
        assert "finished no step" in served.health()[1]["reason"]
        gate.set()
        assert len(list(stream)) > 2
        wait_until(lambda: served.health() == (200, {"status": "ok", "requests": 0}), 3)
        time.sleep(0.5)
        assert served.health()[0] == 200, "idle is healthy"


def test_health_fails_while_steps_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Scripted("one two three")
    with serving(engine.model(), stuck_after=0.3) as served:
        monkeypatch.setattr(engine, "step", list)
        stream = served.client.chat.completions.create(**ENDLESS)
        used = time.process_time()
        wait_until(lambda: served.health()[0] == 503, 3)
        assert time.process_time() - used < 0.25, "a step that does nothing must not spin"
        monkeypatch.undo()
        assert len(list(stream)) > 2


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on() -> None:
    engine = Scripted("one two three")

    def fail_once() -> None:
        engine.before_step = lambda: None
        raise RuntimeError("kernel exploded")

    with serving(engine.model()) as served:
        engine.before_step = fail_once
        with pytest.raises(openai.InternalServerError, match="kernel exploded"):
            served.client.chat.completions.create(model="tiny", messages=USER, n=2)
        assert not engine.running
        answer = served.client.chat.completions.create(model="tiny", messages=USER)
        assert answer.choices[0].message.content == "one two three" and served.health()[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_health_reports_a_broken_engine(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    engine = Scripted()

    def broken(*_: Any) -> Any:
        raise RuntimeError("out of everything")

    with serving(engine.model()) as served:
        monkeypatch.setattr(engine, "step", broken)
        monkeypatch.setattr(engine, "abort", broken)
        with pytest.raises(openai.APIError, match="out of everything"):
            list(served.client.chat.completions.create(**ENDLESS | {"stream": stream}))
        wait_until(lambda: served.health()[0] == 503, 3)
        assert "out of everything" in served.health()[1]["reason"]
        again = served.post("/v1/chat/completions", messages=USER)
        assert again.status_code == 503 and again.json()["error"]["type"] == "server_error"


def test_idle_check_finds_wrong_accounts() -> None:
    engine = Scripted("one")

    def leak() -> None:
        raise AssertionError("page 7 has no owner")

    with serving(engine.model()) as served:
        engine.check = leak
        assert served.post("/v1/completions", prompt="x").status_code == 200
        wait_until(lambda: served.health()[0] == 503, 3)
        assert "page 7 has no owner" in served.health()[1]["reason"]


def test_an_idle_server_uses_no_processor_time() -> None:
    with serving(Scripted("one").model()) as served:
        served.post("/v1/completions", prompt="x")
        time.sleep(0.3)
        used = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - used < 0.1


# Load


@pytest.mark.slow
def test_load_with_disconnects_and_clients_that_do_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """`bench/clients.py`, shortened."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "bench"))
    import clients

    found = clients.run(clients.Load(clients=100, deaf=6, minutes=0.4, memory="128MiB"))
    assert all(found["holds"].values()), found
    assert found["answers"] > 100 and found["vanished"] > 30
