"""`deltic batch`: every request is answered once, in spite of signals, full disks and other processes."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from test_server_harness import serving, tiny

from deltic.cli import main
from deltic.cli.batch import Results, _Batch
from deltic.cli.parser import UsageError

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SHORT = ("--threads", "1", "--dtype", "float32", "--memory", "64MiB", "--max-context", "2048", "--max-batch", "8")


def line(id: Any, url: str, method: str = "POST", **body: Any) -> dict[str, Any]:
    return {"custom_id": id, "method": method, "url": url, "body": body}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))
    return path


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The answers by custom_id; each is there once."""
    found = [json.loads(one) for one in path.read_text().splitlines()]
    assert len({answer["custom_id"] for answer in found}) == len(found)
    return {answer["custom_id"]: answer for answer in found}


def said(body: dict[str, Any]) -> Any:
    """The part of an answer that does not differ from run to run."""
    if "output" in body:
        return [item["content"] for item in body["output"]], body["usage"]["output_tokens"]
    return body["choices"], body["usage"]["completion_tokens"]


def asked(count: int) -> list[dict[str, Any]]:
    question = "Which river flows through Oslo?"
    forms = [(CHAT, {"messages": [{"role": "user", "content": question}], "max_tokens": 12, "temperature": 0}),
             (TEXT, {"prompt": question, "n": 2, "max_tokens": 12, "seed": 3, "temperature": 1}),
             (RESPONSES, {"input": question, "max_output_tokens": 12, "temperature": 0})]
    return [line(f"ä{number}", url, **body) for number in range(count) for url, body in (forms[number % 3],)]


def test_answers_equal_those_of_the_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = asked(9)
    bad = [line("method", CHAT, "GET"), line("url", "/v1/embeddings", input="x"), line("stream", TEXT, stream=True),
           line("body", TEXT, prompt=3), line("model", TEXT, prompt="x", model="other"),
           {"custom_id": "none", "url": TEXT}]
    source, target = write(tmp_path / "in.jsonl", *good, *bad, ""), tmp_path / "out.jsonl"
    assert main(["batch", str(source), str(target), *SHORT]) == 1
    found = read(target)
    assert found.keys() == {one["custom_id"] for one in (*good, *bad)}
    with serving(tiny()) as served:
        for one in good:
            answer, expected = found[one["custom_id"]], served.post(one["url"], **one["body"]).json()
            assert answer["error"] is None and answer["response"]["status_code"] == 200
            assert said(answer["response"]["body"]) == said(expected)
            assert answer["response"]["body"].keys() == expected.keys()
    for name, text in (("method", "POST"), ("url", "/v1/embeddings"), ("stream", "complete"), ("none", "object")):
        assert found[name]["response"] is None and text in found[name]["error"]["message"]
    assert found["body"]["response"]["status_code"] == 400 and "prompt" in found["body"]["error"]["message"]
    assert found["model"]["response"]["status_code"] == 404
    assert found["model"]["error"]["code"] == "model_not_found"
    assert "15 answers" in capsys.readouterr().err


def test_think_applies_to_lines_without_the_field(tmp_path: Path) -> None:
    asked = {"messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0, "max_tokens": 12}
    lines = [line("silent", CHAT, **asked), line("not", CHAT, **asked, enable_thinking=False)]
    source, target = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    assert main(["batch", str(source), str(target), "--think", *SHORT]) == 0
    thoughts = {name: answer["response"]["body"]["choices"][0]["message"]["reasoning_content"]
                for name, answer in read(target).items()}
    assert thoughts["silent"] and not thoughts["not"]


def test_the_same_command_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = asked(6)
    source, target = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    command = ["batch", str(source), str(target), *SHORT]
    assert main(command) == 0
    whole = target.read_bytes()
    kept = whole.splitlines(keepends=True)[:3]
    for torn in (whole[len(b"".join(kept)):][:40], b""):
        target.write_bytes(b"".join(kept) + torn)
        assert main(command) == 0
        assert target.read_bytes().startswith(b"".join(kept))
        assert read(target).keys() == {one["custom_id"] for one in lines}
    capsys.readouterr()
    whole = target.read_bytes()
    assert main(command) == 0 and target.read_bytes() == whole
    assert "tokens" not in capsys.readouterr().err, "the model ran although nothing was missing"


@pytest.mark.parametrize(("lines", "text"), [
    ([line("a", TEXT), line("b", TEXT), "", line("a", TEXT)], "line 4 of"), ([line("a", TEXT), "{"], "line 2 of"),
    (["[]"], "not a JSON object"), ([line(3, TEXT)], "custom_id"), ([{"url": TEXT}], "custom_id"),
    (["[" * 100_000], "not a JSON object")])
def test_wrong_lines_are_refused_before_loading(
        lines: list[Any], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    assert main(["batch", str(source), str(target)]) == 2
    assert text in capsys.readouterr().err and not target.exists()


def test_other_files_are_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, other = write(tmp_path / "in.jsonl", *asked(1)), write(tmp_path / "other.txt", "notes")
    held = write(tmp_path / "held.jsonl")
    with held.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for target, text in ((source, "has the requests"), (other, "line 1"), (tmp_path, "is not a file"),
                             (held, "another process"), (tmp_path / "no" / "out", "cannot be written")):
            before = target.read_bytes() if target.is_file() else b""
            assert main(["batch", str(source), str(target)]) == 2
            assert text in capsys.readouterr().err
            assert not before or target.read_bytes() == before


def test_a_missing_model_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = write(tmp_path / "in.jsonl", *asked(1)), tmp_path / "out.jsonl"
    assert main(["batch", str(source), str(target), "/no/such/model"]) == 2
    assert "/no/such/model" in capsys.readouterr().err and not target.exists()
    link = tmp_path / "link.jsonl"
    link.symlink_to(target)
    assert main(["batch", str(source), str(link), "/no/such/model"]) == 2
    assert link.is_symlink() and not target.exists()
    target.touch()
    assert main(["batch", str(source), str(target), "/no/such/model"]) == 2 and target.exists(), "it was there before"


def test_a_process_without_the_lock_deletes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the file that another process has just made, nor does it write to one that was just deleted."""
    source, target = write(tmp_path / "in.jsonl", *asked(1)), tmp_path / "out.jsonl"
    lock = fcntl.flock

    def later(file: int, flags: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        if deleted:
            target.unlink()
        else:
            raise BlockingIOError

    for deleted in (False, True):
        target.unlink(missing_ok=True)
        monkeypatch.setattr(fcntl, "flock", later)
        with pytest.raises(UsageError, match="another process"):
            Results(target, source)
        assert target.exists() != deleted


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                   capsys: pytest.CaptureFixture[str]) -> None:
    lines = asked(6)
    source, target = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    command, plain, room = ["batch", str(source), str(target), *SHORT], os.write, [1500]

    def write_some(file: int, data: bytes) -> int:
        """As systems do: what fits first, then none."""
        if not os.path.samestat(os.fstat(file), target.stat()):
            return plain(file, data)
        taken = min(len(data), room[0])
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        room[0] -= taken
        return plain(file, data[:taken])

    monkeypatch.setattr(os, "write", write_some)
    assert main(command) == 2
    err = capsys.readouterr().err
    assert "No space left" in err and "Traceback" not in err
    kept = target.read_bytes()
    assert 0 < len(read(target)) < 6 and kept.endswith(b"\n")
    monkeypatch.undo()
    assert main(command) == 0
    assert target.read_bytes().startswith(kept) and read(target).keys() == {one["custom_id"] for one in lines}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_complete_answers(number: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line("short", TEXT, prompt="x", max_tokens=2, ignore_eos=True),
             *(line(str(index), TEXT, prompt="x", max_tokens=2000, ignore_eos=True, max_repeat=0)
               for index in range(20))]
    source, target = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    write_answer = Results.write

    def write_and_signal(self: Results, result: dict[str, Any]) -> None:
        write_answer(self, result)
        os.kill(os.getpid(), number)

    monkeypatch.setattr(Results, "write", write_and_signal)
    assert main(["batch", str(source), str(target), *SHORT]) == code
    assert "run the same command again to continue" in capsys.readouterr().err
    assert "short" in read(target) and len(read(target)) < 21


def stub(answer: Any) -> Starlette:
    async def endpoint(request: Request) -> Response:
        found: Response = await answer(await request.json())
        return found
    return Starlette(routes=[Route(TEXT, endpoint, methods=["POST"])])


def test_requests_are_read_on_demand(tmp_path: Path) -> None:
    taken, running, most = 0, 0, 0

    async def answer(body: Any) -> Response:
        nonlocal running, most
        running += 1
        most = max(most, taken - len(results))
        await asyncio.sleep(0.001 * (body["prompt"] % 3))
        running -= 1
        return JSONResponse({})

    class Counted(Results):
        def __len__(self) -> int:
            return len((tmp_path / "out").read_bytes().splitlines())

    def lines() -> Any:
        nonlocal taken
        for number in range(200):
            taken += 1
            yield line(str(number), TEXT, prompt=number)

    with Counted(tmp_path / "out", tmp_path) as results:
        asyncio.run(_Batch(stub(answer), results, 200).answer(lines(), 8))
    assert len(read(tmp_path / "out")) == 200 and 4 < most <= 8 and not running


def test_full_servers_are_retried_and_stopped_servers_are_not(tmp_path: Path) -> None:
    error = {"error": {"message": "the engine has stopped", "type": "server_error", "param": None, "code": None}}
    turns = [JSONResponse(error, 503, {"retry-after": "0"}), JSONResponse({"id": "x"}), JSONResponse(error, 503)]

    async def answer(_: Any) -> Response:
        return turns.pop(0)

    with Results(tmp_path / "out", tmp_path) as results:
        asyncio.run(_Batch(stub(answer), results, 1).answer(iter([line("a", TEXT, prompt="x")]), 1))
        with pytest.raises(ExceptionGroup) as found:
            asyncio.run(_Batch(stub(answer), results, 1).answer(iter([line("b", TEXT, prompt="x")]), 1))
    assert found.group_contains(UsageError, match="the engine has stopped") and read(tmp_path / "out").keys() == {"a"}
