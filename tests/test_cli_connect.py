"""`deltic connect` merges the settings of clients into their own files."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import threading
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from test_server_harness import serving, tiny

from deltic import LLM
from deltic.cli import main
from deltic.cli.connect import known_clients
from deltic.cli.parser import UsageError, replace_file
from deltic.server.models import ModelSet, ModelSource

CONTEXT = 2048


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CONFIG_HOME", "CODEX_HOME", "CLAUDE_CONFIG_DIR", "CONTINUE_GLOBAL_DIR", "LLM_USER_PATH",
                 "DELTIC_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def connect(served, home, capsys):
    def run(*argv, code=0):
        assert main(["connect", *argv, "--url", served.url]) == code
        return capsys.readouterr()
    return run


def read(path: Path):
    text = path.read_text()
    if path.suffix == ".toml":
        return tomllib.loads(text)
    return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)


FILES = {
    "opencode": {".config/opencode/opencode.json": ("provider", "deltic", "models", "tiny", "limit", "context")},
    "codex": {".codex/config.toml": ("model_context_window",)},
    "claude-code": {".claude/settings.json": ("env", "CLAUDE_CODE_MAX_CONTEXT_TOKENS")},
    "aider": {".aider.conf.yml": None, ".aider.model.metadata.json": ("openai/tiny", "max_input_tokens")},
    "continue": {".continue/config.yaml": ("models", 0, "defaultCompletionOptions", "contextLength")},
    "crush": {".config/crush/crush.json": ("providers", "deltic", "models", 0, "context_window")},
    "llm": {".config/io.datasette.llm/extra-openai-models.yaml": None},
}


def test_settings_name_server_model_and_context(connect, home, served):
    written = set()
    for client, files in FILES.items():
        connect(client, "--write")
        written |= set(files)
        assert {str(path.relative_to(home)) for path in home.rglob("*") if path.is_file()} == written
        for name, keys in files.items():
            value = read(home / name)
            assert (home / name).stat().st_mode & 0o777 == 0o600
            for key in keys or ():
                value = value[key]
            assert not keys or int(value) == CONTEXT, name
        texts = "".join((home / name).read_text() for name in files)
        assert served.url in texts and "tiny" in texts, client
        assert f"{served.url}/v1" in texts or client == "claude-code"


def test_a_model_is_loaded_to_get_its_context(home, capsys):
    """A server of several models loads them on demand."""
    def load() -> LLM:
        return LLM(threads=1, memory="16MiB", max_context=CONTEXT)

    models = ModelSet(tuple(ModelSource(name, load) for name in ("one", "two")))
    with serving(models) as server:
        for argv, name in (([], "one"), (["--model", "two"], "two")):
            assert main(["connect", "opencode", "--url", server.url, *argv]) == 0
            said = capsys.readouterr()
            assert f"loading {name}" in said.err and f'"context": {CONTEXT}' in said.out
        assert main(["connect", "opencode", "--url", server.url]) == 0
        assert "loading" not in capsys.readouterr().err


def test_every_client_is_shown_without_writing(connect, home, served):
    for client in known_clients():
        shown = connect(client)
        assert served.url in shown.out and "then run: " in shown.err
        for name in FILES.get(client, ()):
            assert f"# {home / name}\n" in shown.out
    assert not list(home.iterdir())


def test_shown_settings_equal_written_ones(connect, home):
    shown = connect("opencode").out
    connect("opencode", "--write")
    path = home / ".config/opencode/opencode.json"
    assert shown == f"# {path}\n{path.read_text()}\n"


def test_settings_are_merged_with_a_backup(connect, home):
    path = home / ".config/opencode/opencode.json"
    path.parent.mkdir(parents=True)
    before = '{"theme": "dark", "provider": {"mine": {"name": "é"}, "deltic": {"name": "old", "extra": 1}}}'
    path.write_text(before)
    path.chmod(0o640)
    said = connect("opencode", "--write")
    after = read(path)
    assert after["theme"] == "dark" and after["provider"]["mine"] == {"name": "é"}
    assert after["provider"]["deltic"]["name"] == "deltic" and after["provider"]["deltic"]["extra"] == 1
    backup = path.with_name("opencode.json.backup")
    assert backup.read_text() == before and str(backup) in said.err
    assert {other.stat().st_mode & 0o777 for other in (path, backup)} == {0o640}
    assert "has these settings already" in connect("opencode", "--write").err
    connect("opencode", "--write", "--api-key", "secret")
    assert {other.name for other in path.parent.iterdir()} == {path.name, backup.name, f"{backup.name}1"}
    assert backup.read_text() == before and "secret" in path.read_text()


def test_toml_keeps_its_comments(connect, home):
    path = home / ".codex/config.toml"
    path.parent.mkdir()
    path.write_text('# mine\nmodel = "other"  # the best\n\n[mcp_servers.x]\ncommand = "y"\n\n'
                    '[model_providers.z]\nname = "Z"\n')
    connect("codex", "--write")
    after = read(path)
    assert after["model"] == "tiny" and after["model_provider"] == "deltic"
    assert after["mcp_servers"] == {"x": {"command": "y"}} and set(after["model_providers"]) == {"z", "deltic"}
    assert "# mine" in path.read_text() and "# the best" in path.read_text()


def test_lists_of_models_are_merged_by_name(connect, home):
    path = home / ".continue/config.yaml"
    path.parent.mkdir()
    path.write_text("name: Mine  # a comment\nmodels:\n- name: other\n  model: x\n- name: deltic\n  model: old\n")
    assert "comments are only there" in connect("continue", "--write").err
    after = read(path)
    assert after["name"] == "Mine" and after["schema"] == "v1"
    assert [(model["name"], model["model"]) for model in after["models"]] == [("other", "x"), ("deltic", "tiny")]


UNREADABLE = [
    ("opencode", ".config/opencode/opencode.json", '{\n// mine\n"a": 1}'),
    ("opencode", ".config/opencode/opencode.json", "[]"),
    ("opencode", ".config/opencode/opencode.json", "[" * 100_000),
    ("codex", ".codex/config.toml", "model = \n"),
    ("codex", ".codex/config.toml", b"\xff"),
    ("aider", ".aider.conf.yml", "a: [1\n"),
    ("aider", ".aider.model.metadata.json", "{"),
    ("continue", ".continue/config.yaml", "just words"),
    ("llm", ".config/io.datasette.llm/extra-openai-models.yaml", "a: 1\n"),
]


def test_an_unreadable_file_is_left_alone(connect, home):
    for client, name, text in UNREADABLE:
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = text if isinstance(text, bytes) else text.encode()
        path.write_bytes(content)
        said = connect(client, "--write", code=2).err
        assert str(path) in said and "without --write" in said.replace("\n", " ")
        assert [other for other in home.rglob("*") if other.is_file()] == [path] and path.read_bytes() == content
        path.unlink()


def test_links_stay_links(connect, home):
    (home / "dotfiles").mkdir()
    (home / "dotfiles/settings.json").write_text("{}")
    (home / ".claude").mkdir()
    link = home / ".claude/settings.json"
    link.symlink_to(home / "dotfiles/settings.json")
    connect("claude-code", "--write")
    assert link.is_symlink() and read(link)["env"]["ANTHROPIC_MODEL"] == "tiny"


def test_folders_that_the_environment_names(connect, home, monkeypatch):
    monkeypatch.setenv("CODEX_HOME", str(home / "elsewhere"))
    connect("codex", "--write")
    assert (home / "elsewhere/config.toml").is_file()


def test_keys_reach_the_settings(home, capsys, monkeypatch):
    with serving(tiny(), api_keys={"it's": "a"}) as server:
        command = ["connect", "codex", "--url", f"{server.url}/v1"]
        assert main(command) == 2 and "wants a key: give --api-key" in capsys.readouterr().err
        monkeypatch.setenv("DELTIC_API_KEY", "it's")
        assert main(command) == 0
    out = capsys.readouterr().out
    assert 'env_key = "DELTIC_API_KEY"' in out and "export DELTIC_API_KEY='it'\"'\"'s'" in out


def test_answers_of_other_servers(home, capsys, monkeypatch):
    for answer, hint in (
            ('{"data": [{"id": "x"}]}', "to /tokenize cannot be read (KeyError)"),
            ('{"data": []}', "to /v1/models cannot be read (ValueError)"), ("<html>", "(JSONDecodeError)"),
            ("[1]", "(TypeError)"), ('{"data": [7]}', "(TypeError)")):
        opener = SimpleNamespace(open=lambda request, timeout, content=answer: io.BytesIO(content.encode()))
        monkeypatch.setattr("deltic.cli.client.build_opener", lambda proxies, opener=opener: opener)
        assert main(["connect", "opencode", "--write"]) == 2
        assert hint in capsys.readouterr().err and not list(home.iterdir())


@pytest.mark.parametrize(("answer", "hint"), [
    (b"SSH-2.0-OpenSSH_9.6\r\n", "cannot be read (BadStatusLine)"),
    (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nff\r\n{", "cannot be read (IncompleteRead)"),
    (b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100_000, "cannot be read (RecursionError)")])
def test_servers_that_do_not_speak_http(answer, hint, home, capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:
        def reply():
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        thread = threading.Thread(target=reply)
        thread.start()
        assert main(["connect", "openai", "--url", f"http://127.0.0.1:{server.getsockname()[1]}"]) == 2
        thread.join(5)
    assert hint in capsys.readouterr().err


def test_urls_and_keys_that_cannot_be_sent(home, capsys, monkeypatch):
    assert main(["connect", "openai", "--url", "http://127.0.0.1:1/a b"]) == 2
    assert "(InvalidURL): --url has to be" in capsys.readouterr().err
    assert main(["connect", "openai", "--api-key", "a\nb"]) == 2
    assert "the API key has a control character" in capsys.readouterr().err
    sent = []
    monkeypatch.setattr("deltic.cli.client.build_opener", lambda proxies: SimpleNamespace(
        open=lambda request, timeout: (sent.append(request.get_header("Authorization")), io.BytesIO(b"{}"))[1]))
    assert main(["connect", "openai", "--api-key", "5\u20ac"]) == 2
    assert sent[0].encode("latin-1").decode() == "Bearer 5\u20ac", "as UTF-8, which the server takes"


def test_a_file_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"nowhere/x\.json cannot be written: No such file"):
        replace_file(tmp_path / "nowhere" / "x.json", "{}", 0o600)


def test_servers_that_are_not_deltic(home, capsys, served):
    for arguments, hint in (
            (["--url", "http://127.0.0.1:1"], "no server answers at http://127.0.0.1:1.*start one with deltic serve"),
            (["--url", "ftp://x"], "--url: must be like http"),
            (["--url", served.url, "--model", "gpt-9"], "no model 'gpt-9': --model is one of tiny"),
            (["--url", f"{served.url}/nowhere"], "status 404: --url has to be that of a deltic server")):
        assert main(["connect", "opencode", *arguments]) == 2
        assert re.search(hint, capsys.readouterr().err)
    assert main(["connect", "openai", "--url", served.url, "--write"]) == 2
    assert "leave out --write" in capsys.readouterr().err
    assert main(["connect", "emacs"]) == 2 and os.listdir(home) == []
