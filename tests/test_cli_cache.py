"""`deltic cache` lists the contents of a cache directory, and deletes them and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from test_cache_disk import KEY, MODEL, OLD, OTHER, change, names, put, root

from deltic.cache.offload.disk import DiskRecords, DiskStore
from deltic.cache.offload.types import PrefixHash, StoredItem
from deltic.cli import main


@pytest.fixture
def filled(tmp_path):
    (tmp_path / "user").mkdir()
    put(tmp_path / "user" / "v1-ab" / "letter.txt")
    put(tmp_path / "photo.jpg")
    tokens = PrefixHash(range(40))
    first, last = tokens.key(16), tokens.key(40)
    disk = DiskStore(tmp_path, MODEL, 1, "some/model", "bfloat16, avx2")
    for item in (
        StoredItem("kv", first, "", 0, 16),
        StoredItem("kv", last, first, 16, 40),
        StoredItem("state", first, first, 16, 16),
        StoredItem("final", last, last, 40, 40),
    ):
        disk.write(item, {"x": torch.zeros(1000)})
    change(tmp_path, "UPDATE items SET used = ? WHERE key = ?", OLD, first)
    DiskStore(tmp_path, OTHER, 1).write(StoredItem("state", KEY, "", 0, 5), {})
    change(tmp_path, "UPDATE items SET used = ? WHERE model = ?", OLD - 1, OTHER)
    DiskRecords(tmp_path, MODEL).put("ab", b"text")
    return tmp_path


def command(capsys, *argv: object) -> str:
    assert main(["cache", *map(str, argv)]) == 0
    out, err = capsys.readouterr()
    assert not err
    return out


def test_ls(filled, capsys):
    head, *lines = command(capsys, "ls", filled).splitlines()
    assert head.split() == ["key", "tokens", "kind", "mib", "last", "used", "model"]
    assert [line.split()[1:3] for line in lines] == [["40", "final+kv"], ["16", "kv+state"], ["5", "state"]]
    assert lines[0].endswith("some/model (abababababab)") and lines[2].endswith("? (cdcdcdcdcdcd)")
    listed = json.loads(command(capsys, "ls", "--json", filled))
    assert listed["directory"] == str(filled)
    prefix = listed["prefixes"][1]
    assert prefix | {"bytes": 0} == {
        "key": PrefixHash(range(40)).key(16), "tokens": 16, "kinds": ["kv", "state"], "bytes": 0,
        "used": pytest.approx(OLD), "model": "some/model", "about": "bfloat16, avx2", "fingerprint": MODEL,
        "version": 2}
    assert prefix["bytes"] > 8000 and listed["prefixes"][2]["model"] is None


def test_stats(filled, capsys):
    shown = command(capsys, "stats", filled)
    assert "some/model (bfloat16, avx2, abababababab, version 2)" in shown and "disk free" in shown
    stats = json.loads(command(capsys, "stats", "--json", filled))
    first, second = stats["models"]
    assert stats["bytes"] == first["bytes"] + second["bytes"] and stats["disk_free"] > 0
    assert [first[name] for name in ("items", "prefixes", "tokens", "notes")] == [4, 2, 40, 1]
    assert (second["items"], second["oldest"], second["newest"]) == (1, pytest.approx(OLD - 1), pytest.approx(OLD - 1))


def test_clear_leaves_the_users_files(filled, capsys):
    put(root(filled) / f"{MODEL}-{KEY}-7.kv.safetensors")
    put(root(filled) / "v1-ab" / f"5-0-{KEY}-root.state")
    put(root(filled) / "weights.json")
    DiskStore(filled, "ef", 1).scan()
    assert "deleted 6 entries" in command(capsys, "clear", filled, "--yes")
    assert names(filled) == {"photo.jpg", "user", "user/v1-ab", "user/v1-ab/letter.txt"}
    assert "nothing kept" in command(capsys, "clear", filled, "--yes")


def test_clear_leaves_foreign_files(filled, capsys):
    put(root(filled) / "mine.txt")
    put(root(filled) / "v1-UPPER" / "x")
    (root(filled) / "link.safetensors").symlink_to(filled / "photo.jpg")
    command(capsys, "clear", filled, "--yes")
    assert names(root(filled)) == {"mine.txt", "v1-UPPER", "v1-UPPER/x", "link.safetensors", "CACHEDIR.TAG",
                                   "index.sqlite3"}


def test_clear_older_than(filled, capsys):
    assert "nothing kept" in command(capsys, "clear", filled, "--yes", "--older-than", 31)
    assert "deleted 3 entries" in command(capsys, "clear", filled, "--yes", "--older-than", 29)
    assert [item.done for item in DiskStore(filled, MODEL, 1).scan()] == [40, 40]
    assert not list(DiskStore(filled, OTHER, 1).scan())


def test_clear_asks(filled, capsys, monkeypatch):
    before = names(filled)
    assert main(["cache", "clear", str(filled)]) == 2
    assert "give --yes" in capsys.readouterr().err and names(filled) == before
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)

    def ended(question: str) -> str:
        raise EOFError
    for answer in (lambda question: "", lambda question: "no", ended):
        monkeypatch.setattr("builtins.input", answer)
        assert main(["cache", "clear", str(filled)]) == 1 and names(filled) == before
    monkeypatch.setattr("builtins.input", lambda question: "Y")
    assert main(["cache", "clear", str(filled)]) == 0 and not root(filled).exists()


def test_wrong_arguments_are_explained(capsys):
    for argv, words in (
            (["ls", "--yes", "."], "--yes is for clear, not for ls"), (["rm", "."], "'rm'"), (["ls"], "DIR"),
            (["clear", "--json", "."], "--json is for ls and stats"), (["clear", "--older-than", "-1", "."], "0 to"),
            (["stats", "--older-than", "0", "."], "--older-than is for clear"),
            (["ls", "/nowhere/at/all"], "there is no directory '/nowhere/at/all'")):
        assert main(["cache", *argv]) == 2
        assert words in capsys.readouterr().err, argv


def test_an_empty_directory(tmp_path, capsys):
    for action in ("ls", "stats"):
        assert command(capsys, action, tmp_path) == f"nothing kept in {tmp_path}\n"
    assert json.loads(command(capsys, "ls", tmp_path, "--json"))["prefixes"] == []
    assert json.loads(command(capsys, "stats", tmp_path, "--json"))["models"] == []
    assert not names(tmp_path)


def test_a_link_is_not_followed(filled, tmp_path_factory, capsys):
    other = tmp_path_factory.mktemp("other")
    (other / "deltic-prefixes").symlink_to(filled / "deltic-prefixes")
    assert main(["cache", "clear", "--yes", str(other)]) == 2
    assert "is a link" in capsys.readouterr().err and root(filled).exists()


def test_dates_out_of_range_can_be_shown(filled, capsys):
    for used in (float(1 << 62), -5.0, float("inf")):
        change(filled, "UPDATE items SET used = ? WHERE kind = 'final'", used)
        command(capsys, "ls", filled)
        command(capsys, "stats", filled)


def test_the_command_needs_no_torch(filled):
    code = ("import sys; from deltic.cli import main; codes = [main(['cache', action, sys.argv[1], *more])"
            " for action, *more in (['ls'], ['stats'], ['clear', '--yes'])];"
            "assert codes == [0] * 3 and not {'torch', 'safetensors'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", code, str(filled)], check=True, stdout=subprocess.DEVNULL)
