"""`deltic serve --replicas --prefill-replicas` on a real Ray cluster."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from test_prefill_replicas import TEXT

pytest.importorskip("ray", reason="needs deltic[cluster]")
from test_cluster_front import figures, replica_processes, served

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    words = "--replicas", "1", "--prefill-replicas", "1", "--dtype", "float32", "--max-context", "8192"
    directory = tmp_path_factory.mktemp("prefill")
    with served(directory, *words, ready="1 replicas and 1 prefill replicas") as found:
        yield found


def body_of(number: int, words: int = 120, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": f"{number}: " + TEXT * words}], "max_tokens": 12,
            "temperature": 0, "logprobs": True, **more}


def ask(url: str, body: dict[str, Any]) -> list[Any]:
    found = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    assert found.status_code == 200, found.text
    return [(choice["message"]["content"], choice["logprobs"]) for choice in found.json()["choices"]]


def outcomes(url: str) -> dict[str, int]:
    page = httpx.get(f"{url}/metrics", timeout=30).text
    return {name: int(count) for name, count in
            re.findall(r'deltic_remote_prefills_total{.*outcome="(\w+)"} (\d+)', page)}


def test_a_long_prompt_is_computed_by_the_other_replica(url: str) -> None:
    """Answers are those of one engine, which has all of its own."""
    from starlette.testclient import TestClient

    from deltic import LLM
    from deltic.server.app import create_app

    bodies = [body_of(number, 100 + number, **({"temperature": 1.0, "seed": number} if number % 2 else {}))
              for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda body: ask(url, body), bodies)]
    assert outcomes(url)["done"] >= 1, outcomes(url)
    computed = figures(url, "deltic_prompt_tokens_computed_total")
    assert len(computed) == 2 and min(computed.values()) < 0.7 * max(computed.values())
    with LLM(max_context=8192, memory="64MiB", threads=1, dtype="float32") as llm, TestClient(create_app(llm)) as alone:
        for body, answers in zip(bodies, found, strict=True):
            choices = alone.post("/v1/chat/completions", json=body).json()["choices"]
            assert answers == [(choice["message"]["content"], choice["logprobs"]) for choice in choices]


def test_a_client_that_goes_ends_the_prefill(url: str) -> None:
    before = sum(figures(url, "deltic_prompt_tokens_computed_total").values())
    body = body_of(50, 260, stream=True)
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as streamed:
        assert streamed.status_code == 200
    for _ in range(100):
        if not sum(figures(url, "deltic_requests_running").values()):
            break
        time.sleep(0.1)
    time.sleep(0.5)
    assert not sum(figures(url, "deltic_requests_running").values())
    assert sum(figures(url, "deltic_prompt_tokens_computed_total").values()) - before < 6000


def test_hostile_requests_among_ordinary_ones(url: str) -> None:
    def leaves(number: int) -> None:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body_of(number, 200, stream=True), timeout=60):
            pass

    expected = ask(url, body_of(60))
    whole = {"prompt": [7] * 8180, "max_tokens": 6, "temperature": 0}
    with ThreadPoolExecutor(8) as pool:
        gone = [pool.submit(leaves, 70 + number) for number in range(4)]
        hostile = pool.submit(httpx.post, f"{url}/v1/completions", json=whole, timeout=120)
        too_long = pool.submit(httpx.post, f"{url}/v1/completions", json={"prompt": [7] * 9000}, timeout=120)
        ordinary = [pool.submit(ask, url, body_of(60)), pool.submit(ask, url, body_of(61))]
        assert ordinary[0].result() == expected and ordinary[1].result()
        assert (hostile.result().status_code, too_long.result().status_code) == (200, 400)
        for each in gone:
            each.result()


def test_a_killed_prefill_replica_costs_no_answer(url: str) -> None:
    """Prompts are computed by the decode replica until Serve has replaced it."""
    found = list[Any]()
    thread = threading.Thread(target=lambda: found.append(ask(url, body_of(80, 260))))
    thread.start()
    time.sleep(0.3)
    (process,) = replica_processes("prefill")
    os.kill(process, signal.SIGKILL)
    thread.join(120)
    assert found
    began = time.monotonic()
    for number in range(81, 84):
        assert ask(url, body_of(number))
    print(json.dumps({"seconds": time.monotonic() - began, **outcomes(url)}))
    for _ in range(240):
        done = outcomes(url)["done"]
        ask(url, body_of(int(time.time() * 10) % 10**6 + 1000))
        if outcomes(url)["done"] > done:
            return
        time.sleep(0.5)
    raise AssertionError("no prompt is handed over to the new prefill replica")
