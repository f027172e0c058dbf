"""Conversations continue after a restart or kill -9; pinned prompts are cached at start."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from deltic.cli import main

OPTIONS = ("--port", "0", "--threads", "1", "--memory", "64MiB", "--max-context", "2048")
SYSTEM = "You are a careful assistant who answers in one short sentence and never drafts."


@contextmanager
def served(*options: str, end: int = signal.SIGTERM) -> Iterator[httpx.Client]:
    """`deltic serve` in a process of its own."""
    command = [sys.executable, "-m", "deltic", "serve", *OPTIONS, *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout
        url = process.stdout.readline().split("is ready: ")[1].split("/v1")[0]
        with httpx.Client(base_url=url, timeout=60) as client:
            yield client
        process.send_signal(end)
        process.wait(120)
    finally:
        process.kill()
        process.communicate()


def ask(client: httpx.Client, messages: list[dict[str, Any]], **more: Any) -> dict[str, int]:
    """Gets an answer and adds it to the conversation. Returns prompt and cached tokens."""
    body = {"messages": messages, "max_tokens": 24, "temperature": 0, "enable_thinking": True, **more}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"] or ""})
    usage = answer["usage"]
    return {"prompt": usage["prompt_tokens"], "cached": usage["prompt_tokens_details"]["cached_tokens"]}


def conversation(question: str) -> list[dict[str, Any]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def stored(client: httpx.Client) -> int:
    """Returns the bytes on disk."""
    line, = (line for line in client.get("/metrics").text.splitlines() if line.startswith("deltic_cache_bytes{")
             and 'tier="disk"' in line)
    return int(float(line.split()[-1]))


def wait_until_stored(client: httpx.Client, before: int) -> None:
    """Waits until nothing is being written, which a kill may lose."""
    seen = [before]
    while seen[-1] == before or len({*seen[-8:]}) > 1:
        time.sleep(0.2)
        seen.append(stored(client))
        assert len(seen) < 300, "nothing is written"


@pytest.mark.parametrize(("end", "mode"), [
    (signal.SIGKILL, "preserve"), pytest.param(signal.SIGTERM, "template", marks=pytest.mark.slow)])
def test_a_conversation_survives_a_restart(end: int, mode: str, tmp_path: Path) -> None:
    options = ("--cache-dir", str(tmp_path / "cache"), "--history", mode)
    messages = conversation("What is the capital of France?")
    with served(*options, end=end) as client:
        for question in ("And of Italy?", "And of Spain?"):
            ask(client, messages, max_tokens=200)
            messages.append({"role": "user", "content": question})
        known = stored(client)
        before = ask(client, messages, max_tokens=200)
        wait_until_stored(client, known)
    assert before["cached"] > 20
    messages.append({"role": "user", "content": "And of Greece?"})
    pinned = [{"role": "system", "content": "You count the letters of each word."}]
    sorting = [{"role": "system", "content": "You sort lists of words, longest first."}]
    text, request = tmp_path / "system.txt", tmp_path / "request.json"
    text.write_text(pinned[0]["content"])
    request.write_text(json.dumps({"messages": [*sorting, {"role": "user", "content": "ignored"}]}))
    with served(*options, "--pin-prompt", str(text), "--pin-prompt", str(request)) as client:
        after = ask(client, messages)
        metrics = client.get("/metrics").text
        for known in (pinned, sorting):
            first = ask(client, [*known, {"role": "user", "content": "b a"}])
            assert first["cached"] > 10, "pinned prompts are known to the first request"
    assert after["cached"] > before["prompt"] - 20, f"{after} after a restart, {before} before"
    assert 'deltic_cache_restored_prefixes_total{model="tiny",tier="disk"} 1' in metrics


@pytest.mark.parametrize(("content", "message"), [
    ("[]", "form"), ("{", "JSON"), ('{"messages": 3}', "form"),
    ('{"messages": [{"role": "user", "content": "x"}]}', "nothing to pin")])
def test_invalid_pinned_prompts_are_refused_at_start(content: str, message: str, tmp_path: Path,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pin.json"
    path.write_text(content)
    assert main(["serve", *OPTIONS, "--pin-prompt", str(path)]) == 2
    assert message in capsys.readouterr().err
