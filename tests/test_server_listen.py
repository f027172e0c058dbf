"""A Unix socket's lock is there for as long as the socket, and no other file is touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltic.errors import ConfigError
from deltic.server.run import listen_unix


def names(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


def test_a_closed_unix_socket_leaves_no_files(tmp_path: Path) -> None:
    with listen_unix(tmp_path / "s"):
        assert names(tmp_path) == ["s", "s.lock"]
        with pytest.raises(ConfigError, match="another server uses it"):
            listen_unix(tmp_path / "s")
        assert names(tmp_path) == ["s", "s.lock"]
    assert names(tmp_path) == []


def test_a_refused_unix_socket_leaves_no_lock(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    for name, said in (("file", "no socket"), ("x" * 150, "too long")):
        with pytest.raises(ConfigError, match=said):
            listen_unix(tmp_path / name)
        assert names(tmp_path) == ["file"]


def test_an_existing_file_is_not_deleted_as_lock(tmp_path: Path) -> None:
    (tmp_path / "poetry.lock").write_text("precious")
    listen_unix(tmp_path / "poetry").close()
    assert names(tmp_path) == ["poetry.lock"] and (tmp_path / "poetry.lock").read_text() == "precious"


def test_a_lock_removed_by_its_owner_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.lock"
    monkeypatch.setattr("fcntl.flock", lambda file, kind: path.unlink())
    with pytest.raises(ConfigError, match="another server uses it"):
        listen_unix(tmp_path / "s")
    assert names(tmp_path) == []
