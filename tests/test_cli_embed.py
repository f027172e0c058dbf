"""`deltic embed`, `deltic rerank`, and `deltic serve` with an encoder."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from encoder_models import TEXTS, save_encoder, save_recipe

from deltic import Encoder
from deltic.cli import embed, main
from deltic.embeddings import encoder as encoder_module

LINES = [text for text in TEXTS if text] * 3


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cli")
    save_encoder(directory / "bert", "bert")
    save_recipe(directory / "bert", "mean_tokens")
    save_encoder(directory / "judge", "bert", labels=1)
    (directory / "taken.npy").mkdir()
    (directory / "texts.txt").write_text("\n".join(LINES) + "\n", encoding="utf-8")
    (directory / "texts.jsonl").write_text("".join(
        json.dumps({"text": text} if index % 2 else text) + "\n" for index, text in enumerate(LINES)), encoding="utf-8")
    return directory


@pytest.fixture(scope="module")
def wanted(place: Path) -> Any:
    with Encoder(place / "bert") as encoder:
        return {kind: encoder.encode(LINES, kind=kind) for kind in (None, "query", "passage")}


def test_vectors_in_a_file(place: Path, wanted: Any, tmp_path: Path) -> None:
    for name, more in (("texts.txt", []), ("texts.jsonl", ["--jsonl"])):
        assert main(["embed", str(place / "bert"), str(place / name), "-o", str(tmp_path / "out.npy"), *more]) == 0
        np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), wanted[None])
    assert main(["embed", str(place / "bert"), str(place / "texts.txt"), "-o", str(tmp_path / "out.npz"),
                 "--query"]) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "out.npz")["vectors"], wanted["query"])
    assert {path.name for path in tmp_path.iterdir()} == {"out.npy", "out.npz"}


def test_vectors_on_standard_output(place: Path, wanted: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["embed", str(place / "bert"), str(place / "texts.txt"), "--passage"]) == 0
    lines = capsys.readouterr().out.splitlines()
    np.testing.assert_array_equal(np.float32([json.loads(line) for line in lines]), wanted["passage"])


def test_an_interrupted_run_is_continued(place: Path, wanted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                      capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(embed, "_WINDOW", 4)
    encode, texts = encoder_module.Encoder.encode, list[str]()

    def failing(self: Encoder, window: Any, **options: Any) -> Any:
        if len(texts) >= 8:
            raise KeyboardInterrupt
        texts.extend(window)
        return encode(self, window, **options)

    argv = ["embed", str(place / "bert"), str(place / "texts.txt"), "-o", str(tmp_path / "out.npy")]
    monkeypatch.setattr(encoder_module.Encoder, "encode", failing)
    assert main(argv) == 130 and not (tmp_path / "out.npy").exists()
    texts.clear()
    monkeypatch.setattr(encoder_module.Encoder, "encode", lambda self, window, **options: (
        texts.extend(window), encode(self, window, **options))[1])
    assert main(argv) == 0 and texts == LINES[8:]
    assert "8 vectors exist already" in capsys.readouterr().err
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), wanted[None])
    assert [path.name for path in tmp_path.iterdir()] == ["out.npy"]


def test_a_part_of_another_job_is_discarded(place: Path, wanted: Any, tmp_path: Path) -> None:
    (tmp_path / "out.npy.part").write_bytes(b"\1" * 400)
    (tmp_path / "out.npy.part.json").write_text("{}")
    assert main(["embed", str(place / "bert"), str(place / "texts.txt"), "-o", str(tmp_path / "out.npy")]) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), wanted[None])


def test_one_writer_at_a_time(place: Path, wanted: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["embed", str(place / "bert"), str(place / "texts.txt"), "-o", str(tmp_path / "out.npy")]
    with (tmp_path / "out.npy.part").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert main(argv) == 2
        said = capsys.readouterr().err
        assert "out.npy is being written by another process" in said and not (tmp_path / "out.npy").exists()
    assert main(argv) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), wanted[None])


def test_a_full_disk_is_reported_by_name(place: Path, wanted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["embed", str(place / "bert"), str(place / "texts.txt"), "-o", str(tmp_path / "out.npy")]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=40))
    monkeypatch.setattr(encoder_module.Encoder, "encode", None)
    assert main(argv) == 2 and "out.npy cannot be written: it needs" in capsys.readouterr().err
    assert not list(tmp_path.iterdir()), "there is nothing to go on from"
    monkeypatch.undo()
    monkeypatch.setattr(embed, "_WINDOW", 8)
    limit, code = resource.getrlimit(resource.RLIMIT_FSIZE), 0
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limit[1]))  # some vectors of 160 bytes, not all
        code = main(argv)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    assert code == 2 and "out.npy cannot be written: File too large" in capsys.readouterr().err
    assert main(argv) == 0 and "exist already" in capsys.readouterr().err
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), wanted[None])
    assert [path.name for path in tmp_path.iterdir()] == ["out.npy"]


def test_a_part_changed_by_another_program_is_an_error(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    encode, part = encoder_module.Encoder.encode, tmp_path / "out.npy.part"

    def meddling(self: Encoder, window: Any, **options: Any) -> Any:
        part.write_bytes(b"\1" * 160)
        return encode(self, window, **options)

    monkeypatch.setattr(encoder_module.Encoder, "encode", meddling)
    assert main(["embed", str(place / "bert"), str(place / "texts.txt"), "-o", str(tmp_path / "out.npy")]) == 2
    assert f"{part} has" in capsys.readouterr().err and not (tmp_path / "out.npy").exists()


def test_rerank(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["rerank", str(place / "judge"), str(place / "texts.txt"), "--query", "w1 w9", "--top", "3"]
    with Encoder(place / "judge") as judge:
        ranked = judge.rank("w1 w9", LINES, top_n=3)
    assert main([*argv, "--json"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"index": each.index, "score": each.score, "text": LINES[each.index]} for each in ranked]
    assert main(argv) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"{ranked[0].score:.6f}\t{LINES[ranked[0].index]}"


WRONG = {
    "dimensions": (["bert", "texts.txt", "--dimensions", "99"], "dimensions must be an integer from 1 to 40"),
    "file": (["bert", "none.txt"], "argument FILE: there is no file 'none.txt'"),
    "device": (["bert", "/dev/zero", "-o", "x.npy"], "'/dev/zero' is neither a file nor a pipe"),
    "directory": (["nowhere", "texts.txt", "-o", "taken.npy"], "'taken.npy' is a directory; name a file"),
    "output": (["bert", "texts.txt", "-o", "x.csv"], "must end in"),
    "json": (["bert", "texts.txt", "--jsonl"], "line 1 is not JSON"),
    "long": (["bert", "texts.txt", "--max-length", "9", "--no-truncate"], "has 37 tokens or more"),
    "scores": (["judge", "texts.txt"], "task=embed"), "place": (["nowhere", "texts.txt"], "there is no directory")}


def test_wrong_arguments_are_explained(place: Path, capsys: pytest.CaptureFixture[str],
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    for case, (argv, message) in WRONG.items():
        assert main(["embed", f"./{argv[0]}", *argv[1:]]) == 2
        assert message in capsys.readouterr().err, case
    assert not list(place.glob("*.part*"))


def serve(monkeypatch: pytest.MonkeyPatch, client: Callable[[str, str], None], *argv: str) -> None:
    """Runs a server, calls the client with its URL and first line, and ends the server with SIGTERM."""
    lines = Queue[str]()

    class Lines(io.StringIO):
        def write(self, text: str) -> int:
            lines.put(text)
            return len(text)

    def talk() -> None:
        try:
            line = lines.get(timeout=60)
            found = re.search(r"http://[\d.:]+", line)
            assert found, line
            client(found[0], line)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(sys, "stdout", Lines())
    with ThreadPoolExecutor(1) as pool:
        talking = pool.submit(talk)
        assert main(["serve", *argv, "--port", "0"]) == 0
        talking.result()


def test_serve_an_encoder_and_another_beside_it(place: Path, wanted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def client(url: str, line: str) -> None:
        assert "bert gives vectors of 40 numbers" in line and "judge scores documents" in line
        found = httpx.post(f"{url}/v1/embeddings", json={"input": LINES[:2]}).json()["data"]
        np.testing.assert_array_equal(np.float32([each["embedding"] for each in found]), wanted[None][:2])
        scored = httpx.post(f"{url}/v1/rerank", json={"model": "judge", "query": "w1", "documents": LINES[:2]})
        assert len(scored.json()["results"]) == 2
        assert httpx.post(f"{url}/v1/chat/completions", json={}).status_code == 404
        assert httpx.get(f"{url}/ready").json() == {"status": "ready"}

    serve(monkeypatch, client, str(place / "bert"), "--embedding-model", str(place / "judge"))


def test_serve_several_chat_models_and_an_encoder_beside_them(place: Path, wanted: Any,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    def client(url: str, line: str) -> None:
        assert "one, two: the server is ready" in line
        found = httpx.post(f"{url}/v1/embeddings", json={"input": LINES[:2]}).json()["data"]
        np.testing.assert_array_equal(np.float32([each["embedding"] for each in found]), wanted[None][:2])
        asked = {"model": "two", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
        answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=60)
        assert answer.status_code == 200 and answer.json()["model"] == "two"

    serve(monkeypatch, client, "--model", "one=tiny", "--model", "two=tiny", "--memory", "32MiB", "--embedding-model",
          str(place / "bert"))


def test_two_models_of_one_name_are_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["serve", str(place / "bert"), "--embedding-model", str(place / "bert"), "--port", "0"]
    assert main(argv) == 2 and "two models have one name" in capsys.readouterr().err


def test_options_of_chat_are_refused_for_an_encoder(place: Path, capsys: pytest.CaptureFixture[str],
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place / "bert")
    for option, *given in (["--pin-prompt", "config.json"], ["--log-text", "--request-log", "log"],
                           ["--history", "template"], ["--thinking-budget", "0"], ["--strip-billing-header"]):
        assert main(["serve", str(place / "bert"), option, *given, "--port", "0"]) == 2
        assert f"{option} is for chat" in capsys.readouterr().err


MIXED = {
    "several": (["bert", "--model", "other=tiny"], "give it as --embedding-model"),
    "idle": (["tiny", "--task", "embed", "--idle-unload", "5"], "--task embed serves one MODEL"),
    "none": (["--task", "rerank"], "--task rerank serves one MODEL")}


def test_a_task_and_several_chat_models_do_not_mix(place: Path, capsys: pytest.CaptureFixture[str],
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    for case, (argv, message) in MIXED.items():
        assert main(["serve", *(f"./{each}" if each == "bert" else each for each in argv), "--port", "0"]) == 2
        assert message in capsys.readouterr().err, case
