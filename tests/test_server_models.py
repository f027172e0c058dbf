"""Several models in one server: chosen by name, loaded on demand, unloaded when unused."""

from __future__ import annotations

import gc
import json
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support import tiny_texts
from test_server_harness import USER, Scripted, Served, serving, wait_until

from deltic import LLM
from deltic.cli import main
from deltic.cli.serve import stored_bytes
from deltic.errors import ConfigError, ModelError
from deltic.loader.gguf.convert import convert
from deltic.loader.model_files import open_model
from deltic.server.models import ModelSet, ModelSource


@dataclass
class Shelf:
    """Scripted models that answer with their own names, and a record of loads and closes."""

    loads: list[str] = field(default_factory=list)
    closes: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    seconds: float = 0.0
    engines: dict[str, Scripted] = field(default_factory=dict)

    def source(self, name: str, size: int = 0, text: str | None = "") -> ModelSource:
        def load() -> Any:
            self.loads.append(name)
            time.sleep(self.seconds)
            if name in self.broken:
                raise ModelError("its files are damaged")
            engine = self.engines[name] = Scripted(name if text == "" else text, pause=0.01)
            model = engine.model()
            close = model.close

            def noted() -> None:
                self.closes.append(name)
                close()
            model.close = noted
            return model
        return ModelSource(name, load, size)

    def set(self, *names: str, size: int = 0, **more: Any) -> ModelSet:
        return ModelSet(tuple(self.source(name, size) for name in names), **more)


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    yield Shelf()


def ask(served: Served, model: str | None) -> Any:
    return served.post("/v1/chat/completions", messages=USER, **({"model": model} if model else {}))


def said(served: Served, model: str | None) -> str:
    answer = ask(served, model)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


CODEX = ("slug display_name description supported_reasoning_levels shell_type visibility supported_in_api priority "
         "upgrade base_instructions supports_reasoning_summaries support_verbosity default_verbosity "
         "apply_patch_tool_type truncation_policy supports_parallel_tool_calls context_window "
         "experimental_supported_tools")
"""Fields that Codex has to find."""


def test_codex_model_catalogue(served: Served) -> None:
    plain = served.http.get("/v1/models").json()
    listed = served.http.get("/v1/models?client_version=0.99.0").json()
    model, = listed.pop("models")
    assert listed == plain and "models" not in plain
    assert not set(CODEX.split()) - model.keys() and model["slug"] == "tiny" and model["context_window"] == 2048
    assert model["input_modalities"] == ["text", "image"] and len(model["base_instructions"]) > 200


def test_requests_choose_a_model(shelf: Shelf) -> None:
    with serving(shelf.set("one", "two")) as served:
        assert not shelf.loads
        listed = served.http.get("/v1/models").json()["data"]
        assert [(model["id"], model["loaded"]) for model in listed] == [("one", False), ("two", False)]
        assert [model["modalities"] for model in listed] == [None, None]
        assert said(served, "two") == "two" and shelf.loads == ["two"]
        assert [said(served, name) for name in (None, "default", "one", "two")] == ["one", "one", "one", "two"]
        assert shelf.loads == ["two", "one"]
        body = ask(served, "two").json()
        assert body["model"] == "two"
        missing = ask(served, "three")
        assert missing.status_code == 404 and "'one', 'two'" in missing.json()["error"]["message"]
        assert served.http.get("/v1/models/three").status_code == 404
        one = served.http.get("/v1/models/one").json()
        assert one["loaded"] and one["max_model_len"] == 2048 and one["modalities"] == {"vision": True}
        anthropic = {"anthropic-version": "2023-06-01"}
        assert [model["id"] for model in served.http.get("/v1/models", headers=anthropic).json()["data"]] == ["one",
                                                                                                              "two"]
        message = served.post("/v1/messages", model="two", max_tokens=9, messages=USER).json()
        assert (message["model"], message["content"][0]["text"]) == ("two", "two")
        response = served.post("/v1/responses", model="two", input="Hi").json()
        assert (response["model"], response["output"][0]["content"][0]["text"]) == ("two", "two")
        assert served.post("/tokenize", model="two", prompt="Hi").json()["count"] > 0
        assert served.post("/tokenize", model="three", prompt="Hi").status_code == 404
    assert sorted(shelf.closes) == ["one", "two"]


def test_concurrent_requests_load_a_model_once(shelf: Shelf) -> None:
    shelf.seconds = 0.3
    with serving(shelf.set("one", "two")) as served, ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(said, served, "one") for _ in range(4)]
        wait_until(lambda: shelf.loads == ["one"])
        assert served.health()[0] == 200, "the event loop waits for it"
        assert [answer.result() for answer in asked] == ["one"] * 4
    assert shelf.loads == ["one"]


def test_only_unused_models_are_unloaded_for_memory(shelf: Shelf) -> None:
    models = ModelSet((shelf.source("endless", 60, None), shelf.source("two", 60), shelf.source("three", 30)),
                      memory=100)
    with serving(models) as served:
        with served.http.stream("POST", "/v1/chat/completions", json={
                "model": "endless", "messages": USER, "stream": True, "max_tokens": 100_000}) as running:
            lines = running.iter_lines()  # closes the stream when it is forgotten
            next(lines)
            assert said(served, "three") == "three"
            busy = ask(served, "two")
            assert busy.status_code == 503 and "retry-after" in busy.headers
            assert "models_memory" in busy.json()["error"]["message"]
            assert shelf.loads == ["endless", "three"] and not shelf.closes
        served.wait_idle()
        assert said(served, "three") == "three"
        wait_until(lambda: ask(served, "two").status_code == 200)
        assert shelf.closes == ["endless"], "the one that was used last has room beside it"
        assert said(served, "three") == "three" and shelf.loads.count("three") == 1
        assert said(served, "two") == "two"


def test_a_model_that_fails_to_load_does_not_affect_others(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf.broken = {"two"}
    with serving(shelf.set("one", "two", memory=100, size=50)) as served:
        for _ in range(2):
            failed = ask(served, "two")
            assert failed.status_code == 503 and "its files are damaged" in failed.json()["error"]["message"]
        assert said(served, "one") == "one" and served.health()[0] == 200
        assert shelf.loads == ["two", "one"], "it is not tried again at once"
        shelf.broken, _ = set(), monkeypatch.setattr("deltic.server.models._FAILED_SECONDS", 0.0)
        assert said(served, "two") == "two"


def test_idle_models_are_unloaded(shelf: Shelf) -> None:
    with serving(shelf.set("one", idle_unload=0.2)) as served:
        for turn in range(2):
            assert said(served, None) == "one"
            wait_until(lambda turn=turn: len(shelf.closes) == turn + 1)  # type: ignore[misc]
            assert not served.http.get("/v1/models").json()["data"][0]["loaded"]
            assert served.http.get("/metrics").status_code == 200
    assert shelf.loads == ["one", "one"] and len(shelf.closes) == 2


def test_disconnect_while_a_model_loads(shelf: Shelf) -> None:
    shelf.seconds = 0.3
    with serving(shelf.set("one", idle_unload=0.2)) as served:
        raw = served.send("/v1/chat/completions", messages=USER)
        wait_until(lambda: bool(shelf.loads))
        raw.close()
        wait_until(lambda: shelf.closes == ["one"])
        assert said(served, "one") == "one"


def test_shutdown_waits_for_a_load(shelf: Shelf) -> None:
    shelf.seconds = 0.5
    with serving(shelf.set("one", "two")) as served:
        raw = served.send("/v1/chat/completions", messages=USER)
        wait_until(lambda: bool(shelf.loads))
    raw.close()
    assert shelf.closes == ["one"]


def test_an_unloaded_model_frees_its_memory() -> None:
    models: list[weakref.ref[Any]] = []

    def load() -> LLM:
        llm = LLM(max_context=512, memory="32MiB", threads=1)
        models.append(weakref.ref(llm.engine))
        return llm

    gc.collect()
    with serving(ModelSet((ModelSource("tiny", load),), idle_unload=0.2)) as served:
        for turn in range(2):
            assert said(served, "tiny") is not None
            wait_until(lambda turn=turn: models[turn]() is None)  # type: ignore[misc]


@pytest.mark.parametrize(("argv", "text"), [
    (["--model", "tiny"], "NAME=MODEL"), (["--model", "a=tiny", "--model", "a=tiny"], "two models"),
    (["--model", "a=/no/such"], "no directory"), (["--idle-unload", "0"], "must be a number of seconds"),
    (["--models-memory", "much"], "models_memory"), (["--models-memory", "1MiB", "--memory", "64MiB"], "models_memory"),
    (["--model", "a=tiny", "--served-name", "b"], "--served-name")])
def test_invalid_model_options_are_refused_at_start(argv: list[str], text: str,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", *argv]) == 2
    assert text in capsys.readouterr().err


def test_the_command_line_names_models(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    monkeypatch.setattr("deltic.server.app.serve", lambda models, *_, **__: found.append(models))
    assert main(["serve", "--port", "0", "--model", "a=tiny", "--model", "b=tiny", "--memory", "32MiB",
                 "--idle-unload", "60", "--max-context", "512"]) == 0
    models, = found
    assert [source.name for source in models.sources] == ["a", "b"] and models.idle_unload == 60
    assert all(32 << 20 < source.size < 64 << 20 for source in models.sources)
    with serving(models) as served:
        assert json.loads(ask(served, "b").text)["model"] == "b"


def test_packed_weights_apply_to_gguf_models_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models share their options; packed_weights=on is refused for other models."""
    file = tmp_path / "a.gguf"
    convert(open_model("tiny"), tiny_texts(), "a", file, "Q8_0", mtp="none")
    found: list[ModelSet] = []
    monkeypatch.setattr("deltic.server.app.serve", lambda models, *_, **__: found.append(models))
    for name in (str(file), "tiny"):
        assert main(["serve", "--port", "0", "--model", f"a={name}", "--model", "b=tiny", "--memory", "32MiB",
                     "--packed-weights", "on"]) == 0
    both, none = found
    kept = [source.load() for source in both.sources]
    assert [llm.runtime.options.packed_weights for llm in kept] == ["on", "auto"]
    for llm in kept:
        llm.close()
    with pytest.raises(ConfigError, match="packed_weights=on is for GGUF files"):
        none.sources[1].load()


def test_model_names_must_differ() -> None:
    with pytest.raises(ConfigError, match="two models"):
        Shelf().set("one", "one")


def test_stored_bytes_counts_one_weight_format(tmp_path: Path) -> None:
    """Only one of the formats is loaded."""
    for name, size in (("pytorch_model-00001-of-00002.bin", 70), ("pytorch_model-00002-of-00002.bin", 30),
                       ("mtp.safetensors", 9), ("training_args.bin", 1000)):
        (tmp_path / name).write_bytes(b"0" * size)
    assert stored_bytes(tmp_path) == 100
    (tmp_path / "model.safetensors").write_bytes(b"0" * 200)
    assert stored_bytes(tmp_path) == 209
