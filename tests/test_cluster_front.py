"""The front of several replicas: lost replicas, full ones, clients that go, and errors in the form of each API. With
Ray's exceptions, but without a cluster; and, slowly, `deltic serve --replicas` on a real one."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from deltic.cli import main
from deltic.cluster.boundaries import Boundaries, boundaries_of
from deltic.config import Limits

pytest.importorskip("ray", reason="needs deltic[cluster]")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of Ray's own code
    from ray.exceptions import RayActorError
    from ray.serve.exceptions import BackPressureError

    from deltic.cluster.front import front_app

Message = dict[str, Any]
BODY = {"messages": [{"role": "user", "content": "hello"}]}


def start(kind: bytes = b"application/json", status: int = 200) -> Message:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]}


def piece(body: bytes, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


class Handle:
    """A handle whose calls play scripts: messages to yield, exceptions to raise, None to wait for ever."""

    def __init__(self, *scripts: list[Any]) -> None:
        self.scripts, self.calls, self.cancelled = list(scripts), list[tuple[Any, ...]](), 0

    def options(self, **_: Any) -> Handle:
        return self

    def remote(self, *call: Any) -> Handle:
        self.calls.append(call)
        return self

    def cancel(self) -> None:
        self.cancelled += 1

    async def __aiter__(self) -> AsyncIterator[list[Message]]:
        for part in self.scripts.pop(0):
            if isinstance(part, Exception):
                raise part
            if part is None:
                await asyncio.Event().wait()
            yield [part]


OK = [start(), piece(b"{}")]


def answer(handle: Handle, path: str = "/v1/chat/completions", body: bytes | None = None, gone: float | None = None,
           method: str = "POST", **limits: Any) -> tuple[int, dict[str, str], bytes]:
    """Sends a request to a front. gone: seconds after which the client disconnects."""
    app, sent = front_app(handle, Limits(**limits)), list[Message]()
    raw = json.dumps(BODY).encode() if body is None else body
    received = [{"type": "http.request", "body": raw, "more_body": False}]

    async def receive() -> Message:
        if received:
            return received.pop(0)
        await asyncio.sleep(1000 if gone is None else gone)
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"a=1",
             "headers": [(b"host", b"x"), (b"x-request-id", b"mine"), (b"authorization", b"Bearer k")],
             "client": ("10.0.0.1", 3), "scheme": "http"}
    asyncio.run(app(scope, receive, send))
    if not sent:
        return 0, {}, b""
    headers = [(name.decode(), value.decode()) for name, value in sent[0]["headers"]]
    assert len({name for name, _ in headers}) == len(headers), "a header comes twice"
    return sent[0]["status"], dict(headers), b"".join(message["body"] for message in sent[1:])


def test_a_request_goes_on_as_it_is() -> None:
    handle = Handle(OK)
    status, headers, body = answer(handle)
    assert (status, body, headers["x-request-id"], headers["request-id"]) == (200, b"{}", "mine", "mine")
    (head, raw, boundaries), = handle.calls
    assert json.loads(raw) == BODY and head["query_string"] == b"a=1" and head["client"] == ("10.0.0.1", 3)
    assert dict(head["headers"])[b"x-request-id"] == b"mine"
    assert boundaries == boundaries_of(BODY, {"authorization": "Bearer k"}) and boundaries.keys


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 10_000, b"[" + b"1," * 200_000 + b"1]"])
def test_a_body_that_cannot_be_read_is_left_to_the_replica(body: bytes) -> None:
    handle = Handle(OK)
    assert answer(handle, body=body)[0] == 200
    assert handle.calls[0][1:] == (body, Boundaries())


def test_a_body_that_is_too_large_reaches_no_replica() -> None:
    handle = Handle()
    status, _, body = answer(handle, body=b"x" * (2 << 20), max_body_mib=1)
    assert status == 413 and b"max_body_mib" in body and not handle.calls


def test_a_request_whose_replica_is_lost_goes_to_another_one() -> None:
    handle = Handle([RayActorError()], [RayActorError()], OK)
    assert answer(handle)[0] == 200
    assert len(handle.calls) == 3 and handle.calls[0] == handle.calls[2]


def test_a_client_is_told_to_try_again_if_all_are_lost() -> None:
    status, headers, body = answer(Handle(*[[RayActorError()]] * 4))
    assert (status, headers["retry-after"]) == (503, "1") and b"send the request again" in body
    status, headers, body = answer(Handle(*[[RayActorError()]] * 4), "/v1/messages")
    assert (status, headers["retry-after"], json.loads(body)["type"]) == (529, "1", "error")


@pytest.mark.parametrize(("path", "kind", "form"), [
    ("/v1/chat/completions", b"text/event-stream; charset=utf-8",
     rb'data: a\n\ndata: {"error":{"message":"the replica.*'),
    ("/v1/messages", b"text/event-stream", rb'data: a\n\nevent: error\ndata: {"type":"error".*again.*'),
    ("/api/chat", b"application/x-ndjson", rb'data: a\n\n{"error":"the replica.*again"}\n')])
def test_a_stream_whose_replica_is_lost_ends_with_an_error(path: str, kind: bytes, form: bytes) -> None:
    handle = Handle([start(kind), piece(b"data: a\n\n", True), RayActorError()])
    status, _, body = answer(handle, path)
    assert status == 200 and re.fullmatch(form, body, re.DOTALL), body
    assert len(handle.calls) == 1


def test_a_cut_body_is_no_answer() -> None:
    """The server closes the connection, which is an error for the client."""
    with pytest.raises(Exception, match="send the request again"):
        answer(Handle([start(), piece(b'{"a":', True), RayActorError()]))
    with pytest.raises(Exception, match="send the request again"):
        answer(Handle([start(), piece(b'{"a":', True)]))


def test_full_replicas_are_named_with_a_time_to_wait() -> None:
    status, headers, body = answer(Handle([BackPressureError(num_queued_requests=1, max_queued_requests=1)]))
    assert (status, headers["retry-after"]) == (503, "1") and b"all replicas are full" in body


def test_a_client_that_goes_cancels_the_call() -> None:
    handle = Handle([None])
    assert answer(handle, gone=0.05)[0] == 0
    assert handle.cancelled == 1


def test_a_front_that_ends_takes_no_more() -> None:
    handle = Handle()
    app = front_app(handle, Limits())

    async def run() -> int:
        await app.state.work.drain(0.1)
        sent = list[Message]()

        async def send(message: Message) -> None:
            sent.append(message)

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        await app({"type": "http", "method": "GET", "path": "/v1/models", "raw_path": b"", "query_string": b"",
                   "headers": [], "client": None, "scheme": "http"}, receive, send)
        return int(sent[0]["status"])

    assert asyncio.run(run()) == 503


class Everyone(Handle):
    """A handle whose replicas all answer at once, or an exception."""

    def __init__(self, *found: Any) -> None:
        super().__init__()
        self.found = found

    def broadcast(self, method: str, head: dict[str, Any]) -> Everyone:
        self.calls.append((method, head))
        return self

    async def results_async(self, timeout_s: float, return_exceptions: bool) -> list[Any]:
        if isinstance(self.found[0], TimeoutError):
            raise self.found[0]
        assert timeout_s and return_exceptions
        return [*self.found]


def test_what_concerns_all_replicas_is_gathered() -> None:
    page = b"# HELP deltic_up Up.\n# TYPE deltic_up gauge\ndeltic_up 1\n"
    handle = Everyone(("r1", 200, page), RayActorError(), ("r2", 200, page))
    status, headers, body = answer(handle, "/metrics", method="GET")
    assert (status, body.count(b"\n")) == (200, 4) and b'{replica="r2"} 1' in body
    assert headers["content-type"].startswith("text/plain") and handle.calls[0][0] == "whole"
    missing, found = ("r1", 404, b'{"error":{}}'), ("r2", 200, b'{"cancelled":true}')
    assert answer(Everyone(missing, found), "/v1/requests/7", method="DELETE")[::2] == (200, found[2])
    assert answer(Everyone(missing, missing), "/v1/requests/7", method="DELETE")[::2] == (404, missing[2])
    refused = Everyone(("r1", 401, b"{}"), ("r2", 401, b"{}"))
    assert answer(refused, "/v1/requests", method="GET")[0] == 401


def test_metrics_of_the_others_come_while_prefill_replicas_are_gone() -> None:
    page = b"# HELP deltic_up Up.\n# TYPE deltic_up gauge\ndeltic_up 1\n"
    app, sent = front_app(Everyone(("r1", 200, page)), Limits(), Everyone(TimeoutError())), list[Message]()

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(app({"type": "http", "method": "GET", "path": "/metrics", "raw_path": b"/metrics", "query_string": b"",
                     "headers": [], "client": None, "scheme": "http"}, receive, send))
    assert sent[0]["status"] == 200 and b'deltic_up{replica="r1"} 1' in sent[1]["body"]


@pytest.mark.parametrize("trouble", [TimeoutError(), RayActorError()])
def test_replicas_that_do_not_answer_for_all(trouble: Exception) -> None:
    status, headers, _ = answer(Everyone(trouble), "/metrics", method="GET")
    assert (status, headers["retry-after"]) == (503, "1")


# A real cluster


@contextmanager
def served(directory: Path, *words: str, ready: str = "2 replicas") -> Iterator[str]:
    """Yields the URL of `deltic serve --replicas` on a cluster of its own."""
    log = directory / "log"
    with log.open("w") as out:
        process = subprocess.Popen([sys.executable, "-m", "deltic", "serve", "tiny", "--port", "0", "--threads", "1",
                                    "--memory", "64MiB", "--drain-seconds", "5", "--cache-dir",
                                    str(directory / "cache"), *words], stdout=subprocess.PIPE, stderr=out, text=True,
                                   start_new_session=True)
    assert process.stdout
    line = process.stdout.readline()
    found = re.search(rf"on {ready}: (http://[^/]+)/", line)
    try:
        assert found, log.read_text()[-3000:]
        yield found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(90) == 0
        finally:
            process.kill()
            process.stdout.close()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("serve"), "--replicas", "2") as found:
        yield found


def chat(url: str, *contents: str, **more: Any) -> dict[str, Any]:
    roles = ("system", *("user", "assistant") * len(contents))
    body = {"messages": [{"role": role, "content": text} for role, text in zip(roles, contents)], "max_tokens": 8,
            "temperature": 0, **more}
    found = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert found.status_code == 200, found.text
    return dict(found.json())


def figures(url: str, name: str) -> dict[str, float]:
    """Returns a metric that has one sample for each replica."""
    page = httpx.get(f"{url}/metrics", timeout=30).text
    return {replica: float(value) for replica, value in re.findall(rf'{name}{{replica="(\w+)".*}} (\S+)', page)}


SYSTEM = "be brief and kind. " * 40


@pytest.mark.slow
def test_conversations_stay_and_spread(url: str) -> None:
    with_answers: dict[int, list[str]] = {number: [f"{number}: {SYSTEM}", "hello"] for number in range(6)}
    for turn in range(3):
        for number, contents in with_answers.items():
            found = chat(url, *contents)
            cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert not turn or cached > 0.8 * found["usage"]["prompt_tokens"] - 16, (turn, number)
            contents += [found["choices"][0]["message"]["content"], f"question {turn}"]
    assert min(figures(url, "deltic_generated_tokens_total").values()) > 0
    assert len(figures(url, "deltic_steps_total")) == 2


@pytest.mark.slow
def test_top_shows_each_replica(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    chat(url, SYSTEM, "hello")
    assert main(["top", url, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["replica"]: row for row in found["replicas"]}
    assert rows.keys() == figures(url, "deltic_steps_total").keys() and len(rows) == 2
    assert {replica: row["reused_prompt_tokens"] for replica, row in rows.items()} == figures(
        url, "deltic_prompt_tokens_reused_total")
    assert found["all"]["cache"]["device"]["budget"] == 2 * found["replicas"][0]["cache"]["device"]["budget"] > 0
    assert main(["top", url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["replica", "all", *sorted(rows)]


@pytest.mark.slow
def test_a_client_that_goes_ends_its_answer(url: str) -> None:
    before = sum(figures(url, "deltic_generated_tokens_total").values())
    body = {"messages": [{"role": "user", "content": "count"}], "max_tokens": 20_000, "stream": True,
            "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as streamed:
        for _ in zip(streamed.iter_lines(), range(4)):
            pass
    for _ in range(50):
        if not sum(figures(url, "deltic_requests_running").values()):
            break
        time.sleep(0.1)
    assert not sum(figures(url, "deltic_requests_running").values())
    assert sum(figures(url, "deltic_generated_tokens_total").values()) - before < 15_000


@pytest.mark.slow
def test_requests_of_all_replicas_are_listed_and_cancelled(url: str) -> None:
    def talk() -> None:
        found.append(chat(url, "s", "count", max_tokens=20_000, ignore_eos=True))

    found = list[dict[str, Any]]()
    thread = threading.Thread(target=talk)
    thread.start()
    listed: list[Any] = []
    for _ in range(100):
        listed = httpx.get(f"{url}/v1/requests", timeout=30).json()["data"]
        if listed:
            break
        time.sleep(0.1)
    assert httpx.delete(f"{url}/v1/requests/{listed[0]['id']}", timeout=30).json()["cancelled"]
    thread.join(60)
    assert found[0]["choices"][0]["finish_reason"] == "length"
    assert httpx.delete(f"{url}/v1/requests/unknown", timeout=30).status_code == 404


@pytest.mark.slow
def test_a_killed_replica_costs_retries_but_no_conversation(url: str) -> None:
    first = chat(url, SYSTEM + "killed", "hello")["choices"][0]["message"]["content"]
    before = figures(url, "deltic_steps_total")
    time.sleep(3)  # states are written to the shared directory
    for process in replica_processes()[:1]:
        os.kill(process, signal.SIGKILL)
    for number in range(6):
        chat(url, SYSTEM + "killed", "hello", first, f"and {number}?")
    for _ in range(120):
        if len(now := figures(url, "deltic_steps_total")) == 2 and now.keys() != before.keys():
            return
        time.sleep(0.5)
    raise AssertionError("Serve has not replaced the replica")


def replica_processes(deployment: str = "replica") -> list[int]:
    def title(entry: Path) -> bytes:
        try:
            return (entry / "cmdline").read_bytes()
        except OSError:
            return b""

    entries = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [int(entry.name) for entry in entries if title(entry).startswith(
        f"ray::ServeReplica:deltic:{deployment}".encode())]


