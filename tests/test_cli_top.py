"""`deltic top`: figures of one server, of several replicas and models, and errors."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from rich.console import Console
from test_server_harness import Served, serving, tiny, wait_until

from deltic import LLM
from deltic.cli import main, top
from deltic.cli.client import ServerClient
from deltic.cli.top import Figures, read_figures, status_of, table_of
from deltic.cluster.gather import merged_metrics
from deltic.server.models import ModelSet, ModelSource

PROMPT = [5 + number % 50 for number in range(320)]
BUILD = 'deltic_build_info{version="1"} 1\n'


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DELTIC_API_KEY", raising=False)


@contextmanager
def answering(read: Callable[[], tuple[int, str]]) -> Iterator[str]:
    """The URL of a server with /metrics alone: status and body."""
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = read() if self.path == "/metrics" else (404, "")
            self.send_response(status)
            self.send_header("content-length", str(len(body.encode())))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert main(["top", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def complete(served: Served, prompt: list[int] = PROMPT, tokens: int = 4, **more: Any) -> None:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}
    assert served.post("/v1/completions", **body).status_code == 200
    served.wait_idle()


def figures(page: str) -> Figures:
    with answering(lambda: (200, page)) as url:
        return read_figures(ServerClient(url))


def page_of(**samples: str) -> str:
    return BUILD + "".join(f"deltic_{name} {sample}\n" if "{" not in sample else f"deltic_{name}{sample}\n"
                           for name, sample in samples.items())


# A real server


def test_figures_are_those_of_the_metrics(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    complete(served)
    complete(served)
    found = shown(capsys, served.url)
    (row,) = found["replicas"]
    page = served.http.get("/metrics").text

    def metric(name: str, labels: str = "") -> float:
        [value] = re.findall(rf'^deltic_{name}{{model="tiny"{labels}}} (\S+)$', page, re.MULTILINE)
        return float(value)

    computed, reused = metric("prompt_tokens_computed_total"), metric("prompt_tokens_reused_total")
    assert (row["prompt_tokens"], row["reused_prompt_tokens"]) == (computed + reused, reused) and reused > 0
    assert row["cache"]["device"] == {"bytes": metric("cache_bytes", ',tier="device"'),
                                      "budget": metric("cache_budget_bytes", ',tier="device"')}
    assert (row["running"], row["waiting"], row["model"], row["replica"]) == (0, 0, "tiny", None)
    bounds = [metric("time_to_first_token_seconds_bucket", f',le="{milliseconds / 1000}"')
              for milliseconds in row["first_token_ms"].values()]
    count = metric("time_to_first_token_seconds_count")
    assert bounds[0] >= count / 2 and bounds[1] >= 0.95 * count and count >= 2
    assert {name: value for name, value in row.items() if name in found["all"]} == found["all"]
    assert found["version"] in page and found["url"] == served.url


def test_running_and_waiting_answers(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 20_000, "ignore_eos": True, "stream": True}
    ended = threading.Event()

    def read() -> None:
        with httpx.stream("POST", f"{served.url}/v1/completions", timeout=60, json=body) as stream:
            for _ in stream.iter_lines():
                if ended.is_set():
                    break

    reader = threading.Thread(target=read)
    reader.start()
    try:
        wait_until(lambda: shown(capsys, f"{served.url}/v1")["all"]["running"] == 1)
        assert main(["top", served.url]) == 0
    finally:
        ended.set()
        reader.join()
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["model", "running", "waiting", "tokens/s", "reused", "first", "token", "p95", "device"]
    assert re.match(r"tiny +1 +0 +\d+ +\d+ % +≤ [\d,]+ ms +≤ [\d,]+ ms +[\d.]+ of [\d.]+ MiB$", row), row
    served.wait_idle()


def test_several_models_are_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    def load() -> LLM:
        return LLM(threads=1, memory="16MiB", max_context=512)

    with serving(ModelSet(tuple(ModelSource(name, load) for name in ("one", "two", "three")))) as server:
        assert main(["top", server.url]) == 0
        assert capsys.readouterr().out == f"no language model is loaded at {server.url}\n"
        assert shown(capsys, server.url)["replicas"] == []
        for model in ("one", "two", "two"):
            complete(server, model=model)
        found = shown(capsys, server.url)
        one, two = found["replicas"]
        assert (one["model"], two["model"]) == ("one", "two") and one["reused_prompt_tokens"] == 0
        assert found["all"]["prompt_tokens"] == one["prompt_tokens"] + two["prompt_tokens"] == 3 * len(PROMPT)
        assert main(["top", server.url, "--once"]) == 0
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["model", "all", "one", "two"]


def test_keys(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tiny(), api_keys={"secret": "me"}) as server:
        assert main(["top", server.url]) == 2
        assert "wants a key: give --api-key, or set DELTIC_API_KEY" in capsys.readouterr().err
        assert main(["top", server.url, "--api-key", "other"]) == 2
        assert "wants another key" in capsys.readouterr().err
        assert shown(capsys, server.url, "--api-key", "secret")["replicas"]
        monkeypatch.setenv("DELTIC_API_KEY", "secret")
        assert shown(capsys, server.url)["replicas"]


# Replicas


def test_replicas_have_a_row_each(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    complete(served)
    before = served.http.get("/metrics").content
    complete(served)
    after = served.http.get("/metrics").content
    with answering(lambda: (200, merged_metrics({"r2": after, "r1": before}).decode())) as url:
        found = shown(capsys, url)
        assert main(["top", url]) == 0
    first, second = found["replicas"]
    assert (first["replica"], second["replica"], second["model"]) == ("r1", "r2", "tiny")
    assert second["prompt_tokens"] - first["prompt_tokens"] == len(PROMPT)
    for name in ("prompt_tokens", "reused_prompt_tokens", "running"):
        assert found["all"][name] == first[name] + second[name]
    assert found["all"]["cache"]["device"]["budget"] == 2 * first["cache"]["device"]["budget"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["replica", "all", "r1", "r2"] and "tiny" not in "".join(lines)


def test_reuse_and_first_token_are_those_of_the_last_minute() -> None:
    def at(computed: int, reused: int, quick: int, slow: int, replica: str = "a") -> Figures:
        labels = f'replica="{replica}",model="m"'
        return figures(BUILD + f"""deltic_requests_running{{{labels}}} 2
deltic_prompt_tokens_computed_total{{{labels}}} {computed}
deltic_prompt_tokens_reused_total{{{labels}}} {reused}
deltic_time_to_first_token_seconds_bucket{{{labels},le="0.01"}} {quick}
deltic_time_to_first_token_seconds_bucket{{{labels},le="60.0"}} {quick}
deltic_time_to_first_token_seconds_bucket{{{labels},le="+Inf"}} {quick + slow}
""")

    def read(now: Figures, before: Figures | None) -> tuple[int, int, Any]:
        facts = status_of(now, before)["replicas"][0]
        return facts["reused_prompt_tokens"], facts["prompt_tokens"], facts["first_token_ms"]

    old, new = at(100, 100, 30, 0), at(110, 190, 30, 2)
    assert read(new, old) == (90, 100, {"p50": None, "p95": None}), "both were slower than the last bound"
    assert read(new, None) == (190, 300, {"p50": 10, "p95": None})
    assert read(old, old) == (100, 200, {"p50": 10, "p95": 10}), "nothing came: since the start"
    assert read(old, new) == (100, 200, {"p50": 10, "p95": 10}), "the server was started again"
    assert read(new, at(5, 5, 5, 5, "b")) == (190, 300, {"p50": 10, "p95": None}), "a new replica"
    (row,) = table_of(status_of(new, old))
    assert (row["reused"], row["first_token"], row["p95"]) == ("90 %", "> 60 s", "> 60 s")
    (row,) = table_of(status_of(at(0, 0, 0, 0)))
    assert (row["reused"], row["first_token"], row["p95"]) == ("-", "-", "-")


def test_replicas_that_do_not_fit_the_terminal_are_counted() -> None:
    page = BUILD + "".join(f'deltic_requests_running{{replica="r{number:02}",model="m"}} {number}\n'
                           for number in range(40))
    console = Console(file=io.StringIO(), width=100, height=20)
    console.print(top._view(ServerClient("http://x"), deque([(0.0, figures(page))]), "no server answers", console))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.findall(r"^r\d\d", text, re.MULTILINE) == [f"r{number}" for number in range(39, 30, -1)]
    assert re.search(r"all 40 +780 ", text) and "31 more" in text and "no server answers" in text


def test_memory_has_a_fitting_unit() -> None:
    assert [top._memory(*sizes) for sizes in ((0, 0), (512, 1023), (1 << 20, 64 << 20), (5 << 30, 10 << 40))] == [
        "0 of 0 B", "512 of 1,023 B", "1.0 of 64 MiB", "0.0 of 10 TiB"]


# Errors


def test_servers_that_are_not_deltic(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    for page, hint in (
            (page_of(requests_running='{model="m"} nan'), r"cannot be read \(ValueError\): URL has to be"),
            (page_of(requests_running='{model="m"} 1e999'), r"cannot be read \(ValueError\)"),
            (page_of(requests_running='{model="m"} x'), r"cannot be read \(ValueError\)"),
            (page_of(time_to_first_token_seconds_bucket='{model="m",le="x"} 1'), r"cannot be read \(ValueError\)"),
            ("# HELP vllm:x X.\nvllm:num_requests_running 1\n", "is not a deltic server: .* no deltic_build_info"),
            ("<html>", "is not a deltic server")):
        with answering(lambda page=page: (200, page)) as url:  # type: ignore[misc]
            assert main(["top", url]) == 2
            assert re.search(hint, capsys.readouterr().err), page
    with answering(lambda: (503, "")) as url:
        assert main(["top", url]) == 2 and "status 503): try again" in capsys.readouterr().err
    for argv, hint in (([f"{served.url}/nowhere"], "status 404: URL has to be that of a deltic server"),
                       (["http://127.0.0.1:1"], "no server answers at http://127.0.0.1:1.*or give its URL"),
                       (["ftp://x"], "argument URL: must be like http://127.0.0.1:8000"),
                       (["a", "b"], "unrecognized arguments: b")):
        assert main(["top", *argv]) == 2 and re.search(hint, capsys.readouterr().err), argv


def test_pages_that_are_too_long(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltic.cli.client.MAX_BYTES", 1000)
    with answering(lambda: (200, BUILD + "#" * 1000)) as url:
        assert main(["top", url]) == 2 and "(ValueError)" in capsys.readouterr().err


def test_names_do_not_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["\x1b[2J\x1b[31mred", 'a" b\\c\nd {e="f"} 7', "[bold]x[/]", "x" * 300]
    quoted = (name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") for name in names)
    page = BUILD + "".join(f'deltic_requests_running{{model="{name}"}} {number}\n'
                           for number, name in enumerate(quoted, 1))
    with answering(lambda: (200, page)) as url:
        assert main(["top", url]) == 0
        out = capsys.readouterr().out
        console = Console(file=io.StringIO(), width=200, height=30)
        console.print(top._view(ServerClient(url), deque([(0.0, read_figures(ServerClient(url)))]), "", console))
    for text in (out, console.file.getvalue()):  # type: ignore[attr-defined]
        assert "\x1b" not in text and r"\x1b[2J\x1b[31mred" in text and "[bold]x[/]" in text
        assert re.search(r'a" b\\c\\nd \{e="f"\} 7 +2 ', text) and f" {'x' * 41}" not in text


# On a terminal


def test_the_table_is_renewed_until_ctrl_c(served: Served) -> None:
    pages = [BUILD + f'deltic_requests_running{{model="m{number}"}} {number}\n' for number in (1, 2)]
    left = [(200, pages[0]), (503, ""), (200, pages[1])]
    master, slave = pty.openpty()
    with answering(lambda: left.pop(0) if len(left) > 1 else left[0]) as url:
        command = [sys.executable, "-m", "deltic", "top", url]
        process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave,
                                   env=os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
                                   preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        os.close(slave)
        text, deadline = "", time.monotonic() + 60
        while "m2" not in text and time.monotonic() < deadline:
            if select.select([master], [], [], 1)[0]:
                text += os.read(master, 1 << 16).decode(errors="replace")
        process.send_signal(signal.SIGINT)
        while select.select([master], [], [], 5)[0] and time.monotonic() < deadline:
            try:
                text += os.read(master, 1 << 16).decode(errors="replace")
            except OSError:  # the other end is closed
                break
        try:
            assert process.wait(20) == 0
        finally:
            process.kill()
    os.close(master)
    first, problem, second = text.index("m1"), text.index("try again"), text.index("m2")
    assert first < problem < second and "Traceback" not in text
    assert text.index("\x1b[?1049h") < first and text.rindex("\x1b[?1049l") > second, "the screen is as it was before"
