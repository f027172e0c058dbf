"""Adapters (LoRA) over HTTP: per request by name, loaded and unloaded while other requests run undisturbed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_cases import PREFIX, random_adapter, write_adapter
from test_server_harness import USER, Served, serving

from deltic import LLM, SamplingParams
from deltic.errors import ConfigError, RequestError
from deltic.server.app import create_app

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of adapters of the embedded model."""
    found = tmp_path_factory.mktemp("adapters")
    with LLM(memory="32MiB", max_batch=1, threads=1) as llm:
        for seed, name in enumerate(("pirate", "poet", "late")):
            random_adapter(found / name, llm.runtime.config, seed, 4)
    return found


@pytest.fixture(scope="module")
def llm(place: Path) -> Iterator[LLM]:
    with LLM(dtype="float32", memory="64MiB", max_batch=8, max_context=1024, threads=1,
             lora={name: place / name for name in ("pirate", "poet")}) as found:
        yield found


@pytest.fixture
def served(llm: LLM, place: Path) -> Iterator[Served]:
    with serving(llm, lora_dir=place) as found:
        yield found
    for name in {name for name, _ in llm.adapters.entries()} - {"pirate", "poet"}:
        llm.adapters.unload(name)


def text(served: Served, model: str, **more: Any) -> str:
    body = {"model": model, "messages": USER, "temperature": 0, "max_tokens": 12, "ignore_eos": True, **more}
    response = served.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == {"pirate": "tiny:pirate", "late": "tiny:late"}.get(model, model)
    found: str = response.json()["choices"][0]["message"]["content"]
    return found


def error(response: Any, status: int) -> str:
    assert response.status_code == status, response.text
    message: str = response.json()["error"]["message"]
    return message


def test_a_request_names_its_adapter(served: Served, llm: LLM) -> None:
    expected = {name: llm.chat(USER, GREEDY, lora=lora).text for name, lora in (
        ("tiny", None), ("tiny:pirate", "pirate"), ("tiny:poet", "poet"))}
    assert len(set(expected.values())) == 3
    with ThreadPoolExecutor(6) as pool:
        for _ in range(2):  # the second time from the prefix cache
            assert dict(zip(expected, pool.map(lambda name: text(served, name), expected), strict=True)) == expected
    assert text(served, "pirate") == expected["tiny:pirate"]
    ids = {model["id"]: model.get("parent") for model in served.http.get("/v1/models").json()["data"]}
    assert ids == {"tiny": None, "pirate": "tiny", "poet": "tiny"}
    assert served.http.get("/v1/models/tiny:poet").json()["id"] == "poet"
    said = error(served.post("/v1/chat/completions", model="tiny:none", messages=USER), 404)
    assert "'tiny', 'pirate', 'poet'" in said


def test_adapters_come_and_go(served: Served, llm: LLM, place: Path) -> None:
    error(served.post("/v1/chat/completions", model="late", messages=USER), 404)
    assert served.post(LOAD, lora_name="late", lora_path=str(place / "late")).text == (
        "Success: LoRA adapter 'late' added successfully.")
    assert text(served, "late") == llm.chat(USER, GREEDY, lora="late").text
    assert "already been loaded" in error(served.post(LOAD, lora_name="late", lora_path="late"), 400)
    before = text(served, "late")
    assert served.post(LOAD, lora_name="late", lora_path="poet", load_inplace=True).status_code == 200
    assert text(served, "late") == text(served, "tiny:poet") != before
    assert served.post(UNLOAD, lora_name="late", lora_int_id=1).text == (
        "Success: LoRA adapter 'late' removed successfully.")
    assert "'late' is not loaded" in error(served.post(UNLOAD, lora_name="late"), 404)
    error(served.post("/v1/chat/completions", model="late", messages=USER), 404)


def test_paths_lie_in_the_operators_directory(llm: LLM, served: Served, place: Path, tmp_path: Path) -> None:
    (place / "out").symlink_to(tmp_path)
    for path in ("..", "/etc", str(tmp_path), "out", "late/../../x"):
        assert "--lora-dir" in error(served.post(LOAD, lora_name="x", lora_path=path), 400)
    assert "no directory" in error(served.post(LOAD, lora_name="x", lora_path="absent"), 404)
    assert "adapter_config.json" in error(served.post(LOAD, lora_name="x", lora_path="."), 400)
    for name, path in (("x", "a\0b"), ("x:y", "late"), ("", "late")):
        error(served.post(LOAD, lora_name=name, lora_path=path), 400)
    with serving(llm) as other:
        assert "--lora-dir" in error(other.post(LOAD, lora_name="x", lora_path="late"), 404)
        assert "--lora-dir" in error(other.post(UNLOAD, lora_name="pirate"), 404)
    with serving(llm, lora_dir=place, api_keys={"k": None}) as guarded:
        error(guarded.post(LOAD, lora_name="x", lora_path="late"), 401)
        error(guarded.post(UNLOAD, lora_name="pirate"), 401)
    with pytest.raises(ConfigError, match="lora_dir"):
        create_app(llm, lora_dir=tmp_path / "absent")


def test_unloading_ends_no_request(served: Served, llm: LLM) -> None:
    served.post(LOAD, lora_name="late", lora_path="late")
    expected, started, stop = text(served, "late", max_tokens=90), threading.Event(), threading.Event()

    def answer() -> str:
        body = {"model": "late", "messages": USER, "temperature": 0, "max_tokens": 90, "ignore_eos": True,
                "stream": True}
        pieces = list[str]()
        with served.http.stream("POST", "/v1/chat/completions", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    pieces += [choice["delta"].get("content", "") for choice in json.loads(line[6:])["choices"]]
                    started.set()
        return "".join(pieces)

    def reload() -> int:
        count = 0
        while not stop.is_set():
            assert served.post(UNLOAD, lora_name="late").status_code == 200
            assert served.post(LOAD, lora_name="late", lora_path="late").status_code == 200
            count += 1
        return count

    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(answer)
        try:
            assert started.wait(20)
            reloads = pool.submit(reload)
            assert running.result(60) == expected
        finally:
            stop.set()
        assert reloads.result(60) > 0
    assert text(served, "late", max_tokens=90) == expected
    llm.worker.call(lambda engine: engine.check())


def test_a_large_adapter_delays_no_other_request(served: Served, llm: LLM, place: Path) -> None:
    """It is valid but for its last tensor, and has as many patterns as there may be."""
    config = llm.runtime.config
    foreign = {f"{PREFIX}model.layers.0.mlp.up_proj.lora_B.weight": torch.zeros(config.intermediate_size + 1, 256)}
    patterns = {f"layers.*x{number}.*_proj": 1 for number in range(1000)}
    random_adapter(place / "large", config, rank=256, more=foreign, settings={"alpha_pattern": patterns})
    with ThreadPoolExecutor(2) as pool, served.lateness(time.process_time) as late:
        loading = [pool.submit(served.post, LOAD, lora_name="x", lora_path="large") for _ in range(2)]
        expected = text(served, "tiny")
        while not all(each.done() for each in loading):
            assert text(served, "tiny") == expected
    assert all("up_proj.lora_B" in error(each.result(), 400) for each in loading)
    assert max(late) < 0.5


def test_states_of_adapters_are_refused(served: Served, llm: LLM, place: Path, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="lora"):
        llm.save_state(USER, tmp_path, lora="pirate")
    with serving(llm, lora_dir=place, state_dir=tmp_path) as other:
        assert "base model" in error(other.post("/v1/states", model="tiny:pirate", messages=USER), 400)


def test_python_names_adapters(llm: LLM, place: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="'none' is not loaded"):
        llm.chat(USER, GREEDY, lora="none")
    with pytest.raises(ConfigError, match="lora"):
        LLM(lora=["x"])  # type: ignore[arg-type]
    write_adapter(tmp_path, {f"{PREFIX}model.layers.0.x.lora_A.weight": torch.zeros(1, 1),
                             f"{PREFIX}model.layers.0.x.lora_B.weight": torch.zeros(1, 1)}, {})
    with pytest.raises(ConfigError, match=r"lora 'bad': .*layers\.0\.x"):
        LLM(memory="16MiB", threads=1, lora={"bad": tmp_path})
    found = llm.generate(["Once", "Once"], GREEDY, lora="poet")
    assert found[0].text == found[1].text == "".join(delta.text for delta in llm.generate_stream(
        "Once", GREEDY, lora="poet"))
