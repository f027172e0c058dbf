"""Saved states in directories, on HTTP servers and in what fsspec opens; and the command that copies them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from test_states import names, odd_session, prompt_of

from deltic import LLM, SamplingParams
from deltic.cache.offload.directory import FullError
from deltic.cache.offload.state_manifest import LARGEST_MANIFEST, SavedState, StateError
from deltic.cache.offload.state_stores import StateDirectory, list_states, open_states, pull, push
from deltic.cli import main
from deltic.errors import ConfigError


def nothing(done: int, size: int) -> None:
    pass


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SavedState]:
    """A directory with one state."""
    store, session = tmp_path_factory.mktemp("store"), odd_session()
    session.prefill(prompt_of(40))
    return store, session.save(store, "forty")


class Handler(SimpleHTTPRequestHandler):
    """Files with PUT; `changed` replaces what is sent."""

    changed: Callable[[str, bytes], bytes] = staticmethod(lambda path, data: data)

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if path.is_dir() or not path.exists():
            return super().do_GET()
        data = self.changed(path.name, path.read_bytes())
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_PUT(self) -> None:
        size = int(self.headers["content-length"])
        Path(self.translate_path(self.path)).write_bytes(self.rfile.read(size))
        self.send_response(201)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def web(tmp_path: Path) -> Iterator[tuple[str, Path, type[Handler]]]:
    """URL, directory and handler of an HTTP server."""
    root = tmp_path / "web"
    root.mkdir()
    handler = type("Own", (Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(root)))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/", root, handler
    server.shutdown()
    thread.join()
    server.server_close()


def stores(tmp_path: Path, web: tuple[str, Path, type[Handler]]) -> dict[str, str]:
    return {"directory": str(tmp_path / "there"), "http": web[0], "file": f"file://{tmp_path}/file/deep",
            "memory": f"memory://{tmp_path.name}/states"}


@pytest.mark.parametrize("kind", ["directory", "http", "file", "memory"])
def test_a_state_goes_through_a_store(whole, tmp_path, web, kind):
    place = stores(tmp_path, web)[kind]
    store, saved = whole
    target = open_states(place)
    copied = list[tuple[int, int]]()
    assert push(StateDirectory(store), saved.id, target, lambda *done: copied.append(done)).id == saved.id
    assert copied[-1] == (saved.bytes, saved.bytes)
    again = open_states(place)
    assert again.ids() == [saved.id] and again.find(saved.id[:5]) == saved.id
    (listed, problem), = list_states(again)
    assert (listed.id, listed.name, listed.tokens, problem) == (saved.id, "forty", 40, "")
    local = StateDirectory(tmp_path / "back")
    assert pull(again, saved.id, local, nothing).bytes == saved.bytes
    assert names(local.root) == names(store)
    assert all((local.root / name).read_bytes() == (store / name).read_bytes() for name in names(store))
    assert {path.stat().st_mode & 0o777 for path in local.root.iterdir()} == {0o600}
    session = odd_session()
    assert session.load(local.root).tokens == 40
    with pytest.raises(StateError):
        pull(again, "0" * 64, StateDirectory(tmp_path / "none"), nothing)


def longer(data: bytes) -> bytes:
    return data + b"x"


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("change", [longer, flipped, lambda data: data[:-1], lambda data: b"", lambda data: b"<html>"],
                         ids=["longer", "flipped", "shorter", "empty", "page"])
@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_what_a_server_changes_does_not_arrive(whole, tmp_path, web, change, suffix):
    url, root, handler = web
    store, saved = whole
    for path in store.iterdir():
        (root / path.name).write_bytes(path.read_bytes())
    handler.changed = staticmethod(lambda name, data: change(data) if name.endswith(suffix) else data)
    local = StateDirectory(tmp_path / "back")
    with pytest.raises(StateError, match=r"was changed|than the|is not one"):
        pull(open_states(url), saved.id, local, nothing)
    assert not names(local.root)


def test_a_server_that_never_ends_is_left(whole, tmp_path, web):
    url, root, handler = web
    store, saved = whole
    for path in store.iterdir():
        (root / path.name).write_bytes(path.read_bytes())
    handler.changed = staticmethod(lambda name, data: bytes(LARGEST_MANIFEST + 9) if name.endswith("json") else data)
    with pytest.raises(StateError, match=f"more than {LARGEST_MANIFEST:,} bytes"):
        pull(open_states(url), saved.id, StateDirectory(tmp_path / "back"), nothing)


def test_what_is_there_is_not_copied_again(whole, tmp_path):
    store, saved = whole

    class Counting(StateDirectory):
        def __init__(self, place: Path) -> None:
            super().__init__(place)
            self.puts = list[str]()

        def put(self, name: str, source: Path) -> None:
            self.puts.append(name)
            super().put(name, source)

    target = Counting(tmp_path)
    push(StateDirectory(store), saved.id, target, nothing)
    assert sorted(target.puts) == sorted(names(store))
    push(StateDirectory(store), saved.id, target, nothing)
    assert target.puts[3:] == [f"{saved.id}.json"]


def test_a_damaged_state_is_not_pushed_and_is_listed_last(whole, tmp_path):
    store, saved = whole
    local = StateDirectory(tmp_path / "local")
    pull(StateDirectory(store), saved.id, local, nothing)
    item = next(local.root.glob("*.safetensors"))
    item.write_bytes(flipped(item.read_bytes()))
    with pytest.raises(StateError, match="was changed"):
        push(local, saved.id, open_states(tmp_path / "target"), nothing)
    (local.root / ("0" * 64 + ".json")).write_text("{}")
    (local.root / "notes.txt").write_text("mine")
    found = list_states(local)
    assert [(state.id, bool(problem)) for state, problem in found] == [(saved.id, False), ("0" * 64, True)]


def test_what_a_killed_writer_left_is_deleted(whole, tmp_path):
    store, saved = whole
    left, young = tmp_path / ".tmp-1-0123456789abcdef", tmp_path / ".tmp-2-0123456789abcdef"
    left.write_bytes(b"x")
    os.utime(left, (1, 1))
    young.write_bytes(b"x")
    pull(StateDirectory(store), saved.id, StateDirectory(tmp_path), nothing)
    assert names(tmp_path) == names(store) | {young.name}


def test_a_full_disk(whole, tmp_path, monkeypatch):
    store, saved = whole

    def full(*_: Any) -> None:
        raise FullError(28, "the disk is nearly full", str(tmp_path), 1)

    monkeypatch.setattr("deltic.cache.offload.state_stores.check_room", full)
    with pytest.raises(FullError):
        pull(StateDirectory(store), saved.id, StateDirectory(tmp_path / "back"), nothing)
    assert not names(tmp_path / "back")


@pytest.mark.parametrize(("place", "reason"), [
    ("nowhere://x", "neither a directory nor a place that fsspec knows"), ("s3://bucket/x", r"deltic\[states\]"),
    ("http://127.0.0.1:1", "cannot be reached"), ("http://[", "cannot be reached"),
    ("memory://never-made", "there is no memory://never-made"), ("/no/such/folder", "cannot be read")])
def test_places_that_cannot_be_used(tmp_path, place, reason):
    with pytest.raises((StateError, ConfigError), match=reason):
        open_states(place).ids()


# The command


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main([str(word) for word in ("state", *words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command(tmp_path, capsys):
    prompt, store, there, back = (tmp_path / name for name in ("prompt.txt", "store", "there", "back"))
    prompt.write_text("You answer questions about rivers. " * 8)
    code, out, err = run(capsys, "export", prompt, store, "--memory", "32MiB", "--json")
    assert code == 0, err
    saved, = json.loads(out)["states"]
    assert saved["name"] == str(prompt) and saved["exact"] is True and saved["model"] == "tiny"
    code, out, _ = run(capsys, "ls", store)
    assert code == 0 and saved["id"][:12] in out and "problem" not in out
    assert run(capsys, "push", store, f"file://{there}", "--id", saved["id"][:8])[0] == 0
    assert run(capsys, "pull", there, back)[0] == 0
    assert names(back) == names(store)
    code, out, err = run(capsys, "import", back, tmp_path / "cache", "--memory", "32MiB")
    assert code == 0 and "same" in out, err
    chat = [{"role": "system", "content": prompt.read_text()}, {"role": "user", "content": "Hello"}]
    with LLM(memory="32MiB", cache_dir=tmp_path / "cache") as llm:
        usage = llm.chat(chat, SamplingParams(max_tokens=2)).choices[0].usage
    assert usage.cached_tokens == saved["tokens"]
    (there / f"{saved['id']}.json").write_text("{}")
    code, out, _ = run(capsys, "ls", there)
    assert code == 0 and "was changed" in out


def test_prompts_of_the_command(tmp_path, capsys):
    messages = [{"role": "system", "content": "Be brief. " * 9}, {"role": "user", "content": "What is a river?"}]
    (tmp_path / "chat.json").write_text(json.dumps({"messages": messages}))
    (tmp_path / "raw.txt").write_text("Once upon a time. " * 9)
    for words in (("chat.json",), ("raw.txt", "--raw", "--name", "a tale")):
        code, out, err = run(capsys, "export", tmp_path / words[0], tmp_path / "store", *words[1:], "--json",
                             "--memory", "32MiB")
        assert code == 0, err
        assert json.loads(out)["states"][0]["tokens"] > 20
    code, out, _ = run(capsys, "ls", tmp_path / "store", "--json")
    assert {state["name"] for state in json.loads(out)["states"]} == {str(tmp_path / "chat.json"), "a tale"}


@pytest.mark.parametrize(("words", "reason"), [
    (("export", "x"), "write deltic state export SOURCE TARGET"), (("ls", "a", "b"), "write deltic state ls SOURCE"),
    (("ls", "a", "--id", "5"), "--id is not for ls"), (("push", "a", "b", "--raw"), "--raw is for export"),
    (("pull", "a", "b", "--model", "tiny"), "leave out --model"), (("ls", "a", "--memory", "1GiB"), "loads no model"),
    (("export", "none.txt", "b"), "there is no file"), (("ls", "none"), "cannot be read"),
    (("import", "none", "b"), "cannot be read"), (("import", "a", "b", "--cache-dir", "c"), "is TARGET"),
    (("export", "bad.json", "b"), "must be JSON of the form"), (("pull", "empty", "b"), "has no saved state"),
    (("push", "empty", "b", "--id", "77"), "has no saved state 77"), (("go", "a"), "choose from")])
def test_mistakes_are_named(tmp_path, capsys, monkeypatch, words, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text('{"messages": "text"}')
    (tmp_path / "empty").mkdir()
    try:
        code, _, err = run(capsys, *words)
    except SystemExit as error:
        code, err = int(str(error.code)), capsys.readouterr().err
    assert code == 2 and reason in err


def test_lists_and_copies_load_no_model(whole, tmp_path):
    """Nor torch, fsspec or an HTTP client."""
    code = f"""
import sys
from deltic.cli import main
assert main(["state", "ls", {str(whole[0])!r}]) == 0
assert main(["state", "pull", {str(whole[0])!r}, {str(tmp_path / "copy")!r}]) == 0
print(*[name for name in ("torch", "fsspec", "httpx2", "ray") if name in sys.modules])
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                           env={**os.environ, "COLUMNS": "200"})
    assert found.stdout.splitlines()[-1] == ""
