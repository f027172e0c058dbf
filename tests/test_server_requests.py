"""The list of running requests, cancelling, and the request log."""

from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from openai import OpenAI
from test_server_harness import USER, Scripted, Served, read_all, serving, tiny, wait_until

from deltic.errors import ConfigError
from deltic.server.records import RequestLog

ENDLESS: dict[str, Any] = {"model": "tiny", "messages": USER}
KEYS = {"a": "ann", "b": "bob"}


def listed(served: Served, key: str = "a") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = served.http.get("/v1/requests", headers={"x-api-key": key}).json()["data"]
    return found


def cancel(served: Served, id: str, key: str = "a") -> int:
    return served.http.delete(f"/v1/requests/{id}", headers={"x-api-key": key}).status_code


# The list, and cancelling


@pytest.mark.parametrize("stream", [False, True])
def test_a_cancelled_chat_ends_cleanly(stream: bool) -> None:
    engine, said = Scripted(pause=0.01), []

    def talk(served: Served) -> None:
        given = served.client.chat.completions.create(**ENDLESS, n=2, stream=stream,
                                                      extra_headers={"x-request-id": "my/1"})
        said.extend(choice.finish_reason for chunk in (given if stream else [given]) for choice in chunk.choices
                    if choice.finish_reason)

    with serving(engine.model()) as served:
        thread = threading.Thread(target=talk, args=(served,))
        thread.start()
        wait_until(lambda: any(one["output_tokens"] > 3 for one in listed(served)))
        one, = listed(served)
        assert (one["id"], one["path"], one["stream"]) == ("my/1", "/v1/chat/completions", stream)
        assert one["status"] == "decoding" and one["answers"] == 2 and one["prompt_tokens"] == one["prompt_tokens_read"]
        assert cancel(served, "other") == 404 and cancel(served, "my/1") == 200
        thread.join(10)
        assert said == ["length", "length"] and not engine.running and listed(served) == []
        assert cancel(served, "my/1") == 404


def test_cancelling_messages_and_responses() -> None:
    engine, done = Scripted(pause=0.01), dict[str, Any]()

    def messages(served: Served) -> None:
        with anthropic.Anthropic(base_url=served.url, api_key="x", max_retries=0) as client, client.messages.stream(
                model="tiny", messages=USER, max_tokens=9999) as stream:  # type: ignore[arg-type]
            done["messages"] = stream.get_final_message().stop_reason

    def responses(served: Served) -> None:
        response = served.client.responses.create(model="tiny", input="x")
        done["responses"] = (response.status, response.incomplete_details.reason)

    with serving(engine.model()) as served:
        threads = [threading.Thread(target=talk, args=(served,)) for talk in (messages, responses)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(engine.running) == 2)
        assert [cancel(served, one["id"]) for one in listed(served)] == [200, 200]
        for thread in threads:
            thread.join(10)
    assert done == {"messages": "max_tokens", "responses": ("incomplete", "max_output_tokens")}


def test_keys_see_only_their_own_requests() -> None:
    engine = Scripted(pause=0.01)
    with serving(engine.model(), api_keys=KEYS) as served, served.http.stream(
            "POST", "/v1/chat/completions", json={**ENDLESS, "stream": True}, headers={"x-api-key": "b"}) as running:
        id = running.headers["x-request-id"]
        assert listed(served, "a") == [] and cancel(served, id, "a") == 404
        assert served.http.get("/v1/requests").status_code == 401
        one, = listed(served, "b")
        assert one["id"] == id and one["key"] == "bob" and cancel(served, id, "b") == 200
        assert "[DONE]" in "".join(running.iter_lines())


def test_prompt_progress() -> None:
    """The list is read before each step."""
    seen: list[list[dict[str, Any]]] = []
    prompt = [*range(100, 1100)]
    with serving(tiny()) as served:
        step = tiny().engine.step

        def look() -> Any:
            seen.append(listed(served))
            return step()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiny().engine, "step", look)
            threads = [threading.Thread(target=served.post, args=("/v1/completions",),
                                        kwargs={"prompt": [number, *prompt], "max_tokens": 4, "ignore_eos": True})
                       for number in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
        wait_until(lambda: listed(served) == [])
    ones = [one for ones in seen for one in ones]
    assert {"waiting", "prefill", "decoding"} <= {one["status"] for one in ones}
    assert any(0 < one["prompt_tokens_read"] < one["prompt_tokens"] == 1001 for one in ones)
    assert all(one["prompt_tokens_read"] >= 1001 for one in ones if one["status"] == "decoding")


def test_cancels_do_not_affect_other_requests() -> None:
    engine = Scripted("one two three")
    with serving(engine.model()) as served:
        stop = threading.Event()

        def storm() -> None:
            with httpx.Client(base_url=served.url, timeout=20) as http:
                while not stop.is_set():
                    for one in http.get("/v1/requests").json()["data"]:
                        if one["id"].startswith("req_"):
                            http.delete(f"/v1/requests/{one['id']}")
                    http.delete("/v1/requests/%2e%2e/%00" + "x" * 5000)

        threads = [threading.Thread(target=storm) for _ in range(3)]
        for thread in threads:
            thread.start()
        for number in range(24):
            headers = {"x-request-id": f"mine-{number}"} if number % 2 else {}
            body = {"messages": USER, "n": 1 + number % 3}
            choices = served.http.post("/v1/chat/completions", json=body, headers=headers).json()["choices"]
            ends = {(choice["finish_reason"], choice["message"]["content"]) for choice in choices}
            assert len(choices) == body["n"] and (not headers or ends == {("stop", "one two three")})
            assert all(end == "length" for end, text in ends if text != "one two three")
        stop.set()
        for thread in threads:
            thread.join()
        assert not engine.running and served.health() == (200, {"status": "ok", "requests": 0})


# The log


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_request_log_with_texts(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with serving(Scripted("one two").model(), request_log=RequestLog(str(path), texts=True)) as served:
        served.post("/v1/completions", prompt=["first", "second"], n=2)
        with served.http.stream("POST", "/v1/chat/completions", json={"messages": USER, "stream": True}) as running:
            running.read()
        served.post("/v1/completions", prompt=5)
        wait_until(lambda: len(path.read_text().splitlines()) == 3)
    texts, chat, wrong = lines(path)
    assert (texts["prompts"], texts["answers"]) == (["first", "second"], ["one two<|im_end|>"] * 4)
    assert f"<|im_start|>user\n{USER[0]['content']}<|im_end|>" in chat["prompts"][0]
    assert chat["answers"] == ["one two<|im_end|>"] and "prompts" not in wrong


def test_request_log_has_a_line_for_each_request(tmp_path: Path) -> None:
    path = tmp_path / "log"
    secret = "a secret that no log may have"
    with serving(Scripted("one two").model(), api_keys=KEYS, request_log=RequestLog(str(path))) as served:
        http = served.http
        http.headers["x-api-key"] = "a"
        body = {"messages": [{"role": "user", "content": secret}], "n_probs": 1}
        answer = http.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine"})
        assert answer.headers["x-request-id"] == "mine"
        http.post("/v1/completions", json={"prompt": secret, "stream": True, "n": 2})
        http.post("/v1/completions", json={"prompt": "x", "temperature": secret})
        http.post("/v1/completions", json={"prompt": "x"}, headers={"x-api-key": "wrong", "x-request-id": "two words"})
        http.get(f"/nowhere/{'x' * 500}")
        http.get("/health")
        raw = served.connect()
        raw.sendall(b"nonsense\r\n\r\n")
        read_all(raw)
        wait_until(lambda: len(path.read_text().splitlines()) == 6)
    assert secret not in path.read_text()
    chat, text, wrong, foreign, nowhere, nonsense = lines(path)
    assert (chat["id"], chat["key"], chat["status"], chat["model"]) == ("mine", "ann", 200, "tiny")
    assert not chat["stream"]
    assert chat["finish_reasons"] == ["stop"] and chat["ignored"] == ["n_probs"] and chat["refused"] is None
    assert chat["cached_tokens"] == 5 and chat["output_tokens"] > 1 and chat["prompt_tokens"] > 5
    assert 0 <= chat["queue_ms"] <= chat["first_token_ms"] <= chat["total_ms"] < 60_000
    assert text["stream"] and text["finish_reasons"] == ["stop", "stop"] and text["id"].startswith("req_")
    assert (wrong["status"], wrong["refused"]) == (400, {"param": "temperature", "code": None})
    assert (foreign["status"], foreign["key"], foreign["refused"]["code"]) == (401, None, "invalid_api_key")
    assert foreign["id"].startswith("req_"), "an id has no spaces"
    assert nowhere["status"] == 404 and len(nowhere["path"]) == 200
    assert nowhere["refused"] == {"param": None, "code": None}
    assert nonsense["status"] == 400 and nonsense["client"] == "127.0.0.1"
    assert path.stat().st_mode & 0o077 == 0


def test_request_log_names_refused_hosts(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with serving(Scripted("one").model(), allowed_hosts=["localhost"], request_log=RequestLog(str(path))) as served:
        for place in ("/v1/models", "/v1/messages"):
            assert served.http.get(place, headers={"host": "page.example"}).status_code == 403
        wait_until(lambda: len(path.read_text().splitlines()) == 2)
    assert [line["refused"] for line in lines(path)] == [{"param": None, "code": "host_not_allowed"}] * 2


def test_request_log_of_disconnects_and_cancels(tmp_path: Path) -> None:
    path, engine = tmp_path / "log", Scripted(pause=0.01)
    with serving(engine.model(), request_log=RequestLog(str(path))) as served:
        with served.http.stream("POST", "/v1/chat/completions", json={**ENDLESS, "stream": True}) as gone:
            next(gone.iter_lines())
        wait_until(lambda: path.read_text() != "")
        with served.http.stream("POST", "/v1/chat/completions", json={**ENDLESS, "stream": True}) as cut:
            some = cut.iter_lines()
            next(some)
            cancel(served, cut.headers["x-request-id"])
            assert "[DONE]" in "".join(some)
    left, ended = (line for line in lines(path) if line["method"] == "POST")
    assert left["finish_reasons"] == [] and left["output_tokens"] > 0 and left["cached_tokens"] is None
    assert ended["finish_reasons"] == ["length"] and ended["cancelled"] and not left["cancelled"]


def test_a_full_disk_costs_lines_and_no_requests(caplog: pytest.LogCaptureFixture) -> None:
    log = RequestLog("/dev/full")
    with caplog.at_level(logging.ERROR), serving(Scripted("one").model(), request_log=log) as served:
        assert all(served.post("/v1/completions", prompt="x").status_code == 200 for _ in range(20))
        wait_until(lambda: log.lost == 20)
    assert caplog.text.count("cannot be written") == 1


def test_a_blocked_pipe_costs_lines_and_no_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltic.server.records._MOST_WAITING", 8)
    monkeypatch.setattr("deltic.server.records._PATIENCE", 0.2)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    log = RequestLog(str(path))
    with serving(Scripted("one").model(), request_log=log) as served, served.lateness() as late:
        while not log.lost:
            assert served.http.post("/v1/completions", json={"prompt": "x"}, headers={
                "x-request-id": "x" * 128}).status_code == 200
        assert max(late) < 0.5
    os.close(reader)


def test_half_written_log_lines_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    log, write, full = RequestLog(str(path)), os.write, threading.Event()

    def some(file: int, data: bytes) -> int:
        if full.is_set():
            raise OSError(28, "No space left on device")
        full.set()
        return write(file, data[:3])

    monkeypatch.setattr(os, "write", some)
    log.write({"id": "first"})
    wait_until(lambda: log.lost == 1)
    monkeypatch.undo()
    log.write({"id": "second"})
    log.close()
    assert path.read_text() == '{"i\n{"id":"second"}\n'


def test_an_unusable_request_log_is_refused(tmp_path: Path) -> None:
    for wrong in (str(tmp_path), str(tmp_path / "no" / "log"), "\0"):
        with pytest.raises(ConfigError, match="cannot be opened"):
            RequestLog(wrong)


def test_responses_have_request_ids(tmp_path: Path) -> None:
    with serving(Scripted("one").model()) as served, OpenAI(base_url=f"{served.url}/v1", api_key="x") as client:
        assert client.chat.completions.create(**ENDLESS)._request_id.startswith("req_")
        for path in ("/", "/health", "/nowhere", "/v1/models"):
            assert served.http.get(path).headers["x-request-id"].startswith("req_")
        evil = served.connect()
        evil.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
                     b"x-request-id: \xff" + b"x" * 300 + b"\r\n\r\n")
        assert "x-request-id: req_" in read_all(evil)


@pytest.mark.parametrize("remade", [False, True])
def test_a_rotated_log_is_reopened(tmp_path: Path, remade: bool) -> None:
    """logrotate renames the file, with and without `create`."""
    path, old = tmp_path / "log", tmp_path / "log.1"
    log = RequestLog(str(path))
    log.write({"id": "first"})
    wait_until(lambda: path.stat().st_size > 0)
    path.rename(old)
    if remade:
        path.touch(0o644)
    log.write({"id": "second"})
    log.close()
    assert old.read_text() == '{"id":"first"}\n' and path.read_text() == '{"id":"second"}\n'


def test_a_log_in_a_removed_directory_continues(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = tmp_path / "logs"
    place.mkdir()
    log = RequestLog(str(place / "log"))
    place.rename(tmp_path / "moved")
    for name in ("first", "second"):
        log.write({"id": name})
    log.close()
    assert (tmp_path / "moved" / "log").read_text().count("\n") == 2 and caplog.text.count("opened again") == 1
