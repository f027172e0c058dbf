"""Downloads from a hub over HTTP: what comes damaged is never used; listed, fetched and deleted with commands."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hub_cases import COMMIT, REPOSITORY, local_hub
from huggingface_hub import HfApi, constants

from deltic import LLM
from deltic.cli import main
from deltic.errors import ModelError
from deltic.loader.hub import resolve

WEIGHTS = bytes(range(256)) * 40


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def hub(cache, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with local_hub(cache, monkeypatch) as hub:
        hub.files = {"model.safetensors": WEIGHTS, "config.json": b"{}", "README.md": b"words"}
        yield hub


@pytest.fixture
def verified(monkeypatch):
    """The commits that were compared with the hub's checksums."""
    commits, verify = [], HfApi.verify_repo_checksums

    def spy(self, repository, **options):
        commits.append(options["revision"])
        return verify(self, repository, **options)
    monkeypatch.setattr(HfApi, "verify_repo_checksums", spy)
    return commits


def fetch():
    return resolve(REPOSITORY, progress=False)


def files_below(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.rglob("*") if path.is_file() or path.is_symlink())


# Checksums


def test_a_download_is_verified_once(hub, verified):
    path = fetch()
    assert (path / "model.safetensors").read_bytes() == WEIGHTS and path.name == COMMIT
    assert sorted(hub.asked) == ["config.json", "model.safetensors"] and verified == [COMMIT]
    assert fetch() == path and len(verified) == 1


def test_downloads_of_other_programs_are_verified(hub, verified):
    path = fetch()
    (path.parents[1] / ".deltic-checked").unlink()
    assert fetch() == path and len(verified) == 2 and len(hub.asked) == 2


def test_a_file_that_is_downloaded_later_is_verified(hub, verified):
    hub.files = {"a-Q8_0.gguf": WEIGHTS, "b-Q4_0.gguf": WEIGHTS[::-1]}
    resolve(f"{REPOSITORY}:Q8_0", progress=False)
    hub.sent["b-Q4_0.gguf"] = WEIGHTS
    with pytest.raises(ModelError, match=r"damaged: b-Q4_0\.gguf"):
        resolve(f"{REPOSITORY}:Q4_0", progress=False)
    assert len(verified) == 2


@pytest.mark.parametrize(("name", "kind"), [("model.safetensors", "sha256"), ("config.json", "git-sha1")])
def test_damaged_files_are_deleted_and_named(name, kind, hub, cache):
    whole = hub.files[name]
    hub.sent[name] = whole[:-1] + b"!"
    for _ in range(2):
        with pytest.raises(ModelError, match=rf"{REPOSITORY} is damaged: {name} \({kind} .*\. Damaged files are "
                                             rf"not used; `deltic pull {REPOSITORY}` fetches them again"):
            fetch()
        assert name not in files_below(cache)
    hub.sent.clear()
    assert (fetch() / name).read_bytes() == whole


def test_all_damaged_files_are_named_at_once(hub):
    hub.sent = {"model.safetensors": WEIGHTS[::-1], "config.json": b"[]"}
    with pytest.raises(ModelError, match=r"(?s)config.json.*model.safetensors|model.safetensors.*config.json"):
        fetch()


def test_a_hub_that_goes_away_before_the_verification(hub, monkeypatch):
    """The unverified copy is not used."""
    def offline(self, repository, **options):
        raise ConnectionResetError(104, "reset")
    with monkeypatch.context() as patch:
        patch.setattr(HfApi, "verify_repo_checksums", offline)
        with pytest.raises(ModelError, match="cannot be reached"):
            fetch()
    assert fetch().name == COMMIT


def test_a_corrupt_list_of_verified_commits(hub, verified):
    path = fetch()
    (path.parents[1] / ".deltic-checked").write_bytes(b"\xff\0" * 1000)
    assert fetch() == path and len(verified) == 2


# GGUF files


def test_a_gguf_file_of_a_repository(hub, cache, tmp_path, monkeypatch, caplog):
    """With what belongs to it, and nothing else; then without the hub."""
    assert main(["convert", "tiny", "tiny-Q8_0.gguf"]) == 0
    hub.files = {"README.md": b"words", "tiny-BF16.gguf": b"large", **{
        path.name: path.read_bytes() for path in tmp_path.glob("*.gguf")}}
    assert "mmproj-tiny-Q8_0.gguf" in hub.files
    with LLM(f"{REPOSITORY}:Q8_0", memory="64MiB") as llm:
        assert llm.chat("What is the capital of France?").text == "The capital of France is Paris."
        assert llm.runtime.vision is not None and llm.runtime.name == f"{REPOSITORY}:Q8_0"
    assert sorted(hub.asked) == ["mmproj-tiny-Q8_0.gguf", "tiny-Q8_0.gguf"]
    path = resolve(REPOSITORY, progress=False)
    assert path.name == "tiny-Q8_0.gguf" and path.is_file() and len(hub.asked) == 2
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in (REPOSITORY, f"{REPOSITORY}:q8_0", f"{REPOSITORY}:tiny-Q8_0.gguf"):
        assert resolve(name, progress=False) == path
    with pytest.raises(ModelError, match="not downloaded"):
        resolve(f"{REPOSITORY}:BF16", progress=False)


def test_a_damaged_gguf_file_is_named(hub, cache):
    hub.files = {"m.gguf": WEIGHTS}
    hub.sent["m.gguf"] = WEIGHTS[:-1] + b"x"
    with pytest.raises(ModelError, match=r"m\.gguf"):
        fetch()


# Commands


def command(capsys, *argv, code=0):
    assert main(list(argv)) == code
    return capsys.readouterr()


def test_pull_ls_and_rm(hub, cache, capsys):
    assert command(capsys, "ls").out == f"nothing was downloaded to {cache}\n"
    path = command(capsys, "pull", REPOSITORY).out.strip()
    assert Path(path).name == COMMIT
    head, line = command(capsys, "ls").out.splitlines()
    assert head.split() == ["model", "size", "last", "used", "revisions"]
    assert line.startswith(f"{REPOSITORY}  0.01 MB  ") and line.endswith("  main")
    listed = json.loads(command(capsys, "ls", "--json").out)
    assert listed["directory"] == str(cache)
    model, = listed["models"]
    assert model["name"] == REPOSITORY and model["bytes"] == len(WEIGHTS) + 2 and model["used"] > 1e9
    revision, = model["revisions"]
    assert revision == {"commit": COMMIT, "refs": ["main"], "bytes": len(WEIGHTS) + 2, "path": path}
    assert command(capsys, "rm", REPOSITORY, "--yes").out == f"deleted {REPOSITORY}: 0.01 MB are free again\n"
    assert files_below(cache / "models--org--name") == [] and "nothing was downloaded" in command(capsys, "ls").out


def test_rm_asks(hub, cache, capsys, monkeypatch):
    fetch()
    assert "give --yes" in command(capsys, "rm", REPOSITORY, code=2).err
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: "")
    assert "nothing was deleted" in command(capsys, "rm", REPOSITORY, code=1).out
    monkeypatch.setattr("builtins.input", lambda question: "y" if f"Delete {REPOSITORY} (0.01 MB)" in question else "")
    command(capsys, "rm", REPOSITORY)
    assert not (cache / "models--org--name").exists()


def test_rm_takes_a_branch_or_the_beginning_of_a_commit(hub, capsys):
    fetch()
    assert "no revision 'v9' here; it has main" in command(capsys, "rm", REPOSITORY, "--revision", "v9", code=2).err
    command(capsys, "rm", REPOSITORY, "--revision", COMMIT[:8], "--yes")
    fetch()
    command(capsys, "rm", REPOSITORY, "--revision", "main", "--yes")
    assert "is not among the models in" in command(capsys, "rm", REPOSITORY, "--yes", code=2).err


def test_pull_again_after_damage(hub, capsys):
    hub.sent["config.json"] = b"[]"
    assert "fetches them again" in command(capsys, "pull", REPOSITORY, code=2).err
    hub.sent.clear()
    assert (Path(command(capsys, "pull", REPOSITORY).out.strip()) / "config.json").read_bytes() == b"{}"


def test_pull_refuses_wrong_names(hub, capsys, tmp_path):
    assert "is on this machine, at" in command(capsys, "pull", "tiny", code=2).err
    assert "neither a directory here nor a repository" in command(capsys, "pull", "org/other", code=2).err
    assert "no revision 'v9'" in command(capsys, "pull", REPOSITORY, "--revision", "v9", code=2).err
