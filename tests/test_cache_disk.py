"""Prefixes in a directory: whole or refused, private, shared by processes, and never more than what is ours."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file
from support import examples

from deltic.cache.offload import directory as layout
from deltic.cache.offload.directory import CacheDirectory, ModelLabel
from deltic.cache.offload.disk import DiskRecords, DiskStore, encode
from deltic.cache.offload.types import StoredItem, TierStoreError
from deltic.errors import ConfigError

MODEL, OTHER = "ab" * 16, "cd" * 16
KEY, PARENT = "0f" * 16, "1e" * 16
ITEM = StoredItem("final", KEY, PARENT, 16, 37)
OLD = time.time() - 30 * 86400
IS_ROOT = os.geteuid() == 0


def some_tensors() -> dict[str, torch.Tensor]:
    """All dtypes; odd, empty and no dimensions; a view that is not contiguous; values that are not numbers."""
    draw = torch.Generator().manual_seed(7)
    return {"tokens": torch.arange(5), "recurrent": torch.randn(2, 3, 5, generator=draw).transpose(0, 2),
            "conv": torch.randn(3, 7, generator=draw).bfloat16(), "half": torch.randn(1, generator=draw).half(),
            "scalar": torch.tensor(float("nan")), "empty": torch.zeros(3, 0, 2).bfloat16(), "Ω \"\n": torch.zeros(2)}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Also where values are not numbers."""
    def plain(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {name: (tensor.dtype, tensor.shape, tensor.contiguous().view(-1).view(torch.uint8).tolist())
                for name, tensor in tensors.items()}
    return plain(left) == plain(right)


def named(item: StoredItem) -> tuple[Any, ...]:
    return item.kind, item.key, item.parent, item.start, item.done


@pytest.fixture
def disk(tmp_path: Path) -> DiskStore:
    return DiskStore(tmp_path, MODEL, 1 << 30, "a model")


def root(tmp_path: Path) -> Path:
    return tmp_path / "deltic-prefixes"


def file_of(tmp_path: Path, item: StoredItem = ITEM, model: str = MODEL) -> Path:
    return root(tmp_path) / f"{model}-{item.key}-{item.start}.{item.kind}.safetensors"


def put(path: Path, data: bytes = b"x", used: float | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    if used is not None:
        os.utime(path, (used, used))
    return path


def put_item(tmp_path: Path, data: bytes, item: StoredItem = ITEM) -> None:
    """Puts any bytes in the place of an item, with a row that agrees."""
    put(file_of(tmp_path, item), data)
    with CacheDirectory(tmp_path).transaction() as index:
        index.execute("INSERT OR REPLACE INTO items VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 0)",
                      (file_of(tmp_path, item).name, MODEL, item.kind, item.key, item.parent, item.start, item.done,
                       len(data), crc32(data)))


def change(tmp_path: Path, statement: str, *values: Any) -> None:
    """Changes the index behind the store's back."""
    with CacheDirectory(tmp_path).transaction() as index:
        assert index.execute(statement, values).rowcount, "no row was changed"


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


EMPTY = {"CACHEDIR.TAG", "index.sqlite3"}


# Items


def test_round_trip(disk, tmp_path):
    tensors = some_tensors()
    size = disk.write(ITEM, tensors)
    found = disk.read(ITEM)
    assert same(found, tensors)
    assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in found.values())
    (item,) = disk.scan()
    assert named(item) == named(ITEM) and item.size == size == file_of(tmp_path).stat().st_size
    assert abs(item.used - time.time()) < 60
    assert disk.others() == []
    disk.write(ITEM, tensors)
    assert len(list(disk.scan())) == 1


def test_an_item_without_tensors(disk):
    disk.write(ITEM, {})
    assert disk.read(ITEM) == {}


def test_the_files_are_safetensors(disk, tmp_path):
    tensors = some_tensors()
    disk.write(ITEM, tensors)
    assert same(load_file(file_of(tmp_path)), tensors)


def test_delete_and_touch(disk, tmp_path):
    disk.write(ITEM, {})
    change(tmp_path, "UPDATE items SET used = ?", OLD)
    disk.touch(ITEM)
    assert next(iter(disk.scan())).used > time.time() - 60
    disk.delete(ITEM)
    disk.delete(ITEM)
    assert not file_of(tmp_path).exists()
    disk.touch(ITEM)
    assert not list(disk.scan())
    with pytest.raises(TierStoreError, match=r"\.final\.safetensors is not in the index"):
        disk.read(ITEM)


def test_closing_writes_what_was_touched_and_deleted(disk, tmp_path):
    other = replace(ITEM, kind="kv")
    for item in (ITEM, other):
        disk.write(item, {})
    change(tmp_path, "UPDATE items SET used = ?", OLD)
    disk.touch(ITEM)
    disk.delete(other)
    disk.close()
    (row,) = CacheDirectory(tmp_path).rows()
    assert row.kind == "final" and row.used > time.time() - 60


def test_an_item_that_is_deleted_and_written_again_is_there(disk):
    for _ in range(3):
        disk.write(ITEM, some_tensors())
        disk.delete(ITEM)
    disk.write(ITEM, some_tensors())
    disk.close()
    assert len(list(disk.scan())) == 1 and same(disk.read(ITEM), some_tensors())


def test_a_restart_finds_what_was_kept(tmp_path):
    DiskStore(tmp_path, MODEL, 1).write(ITEM, some_tensors())
    again = DiskStore(tmp_path, MODEL, 1)
    assert [named(item) for item in again.scan()] == [named(ITEM)]
    assert same(again.read(ITEM), some_tensors())
    assert not list(DiskStore(tmp_path, OTHER, 1).scan()), "what another model kept is none of ours"


# Damage


def small() -> bytes:
    return b"".join(encode({"tokens": torch.arange(2), "conv": torch.ones(3).bfloat16()}))


def test_truncated_at_every_byte(disk, tmp_path):
    whole = small()
    put_item(tmp_path, whole)
    assert set(disk.read(ITEM)) == {"tokens", "conv"}
    for length in range(len(whole)):
        put(file_of(tmp_path), whole[:length])
        with pytest.raises(TierStoreError):
            disk.read(ITEM)
    put(file_of(tmp_path), whole + b"\0")
    with pytest.raises(TierStoreError, match="wrong length"):
        disk.read(ITEM)


def test_every_flipped_bit_is_seen(disk, tmp_path):
    whole = small()
    put_item(tmp_path, whole)
    with file_of(tmp_path).open("r+b", buffering=0) as file:
        for place, byte in enumerate(whole):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), place)
                with pytest.raises(TierStoreError):
                    disk.read(ITEM)
            os.pwrite(file.fileno(), bytes([byte]), place)
    disk.read(ITEM)


@given(st.data())
@settings(max_examples=200)
def test_random_damage_is_seen(tmp_path_factory, data):
    """Pieces overwritten, removed, doubled: refused, or the very same bytes."""
    directory = tmp_path_factory.getbasetemp() / "damage"
    disk, whole = DiskStore(directory, MODEL, 1), small()
    put_item(directory, whole)
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, len(whole)))
    damaged = whole[:start] + data.draw(st.binary(max_size=40) | st.just(2 * whole[start:end])) + whole[end:]
    put(file_of(directory), damaged)
    if damaged != whole:
        with pytest.raises(TierStoreError):
            disk.read(ITEM)


def test_an_item_under_another_name(disk, tmp_path):
    disk.write(ITEM, some_tensors())
    disk.write(replace(ITEM, start=15), {})
    shutil.copy(file_of(tmp_path), file_of(tmp_path, replace(ITEM, start=15)))
    for other in (replace(ITEM, kind="state"), replace(ITEM, key=PARENT), replace(ITEM, parent=""),
                  replace(ITEM, start=15), replace(ITEM, done=38)):
        with pytest.raises(TierStoreError, match=r"is not in the index|wrong length"):
            disk.read(other)


def test_oversized_items(disk):
    disk.write(ITEM, {"x": torch.zeros(1 << 19)})
    with pytest.raises(TierStoreError, match="at most 9 can be right"):
        disk.read(ITEM, 9)


def framed(header: Any, tail: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text + tail


def hostile() -> dict[str, bytes]:
    def tensor(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> bytes:
        return framed({"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}, bytes(4))

    return {
        "nothing": b"", "length only": (1 << 63).to_bytes(8, "little"), "all ones": b"\xff" * 64,
        "longer than the file": (100).to_bytes(8, "little") + b"{}x", "no json": framed(b"{" * 10),
        "deep json": framed(b"[" * 500_000), "huge number": framed(b'{"x":' + b"9" * 5000 + b"}"),
        "not utf-8": framed(b'{"\xff":1}'), "a list": framed([]), "text": framed({"x": "F32"}),
        "unknown dtype": tensor("F8"), "dtype is a list": tensor(["F32"]), "dtype is none": tensor(None),
        "huge shape": tensor(shape=[1 << 40], offsets=[0, 1 << 42]), "beyond 64 bits": tensor(shape=[1 << 70]),
        "empty but huge": tensor(shape=[1 << 62, 1 << 62, 0], offsets=[0, 0])[:-4],
        "huge product": tensor(shape=[1 << 32, 1 << 32, 1 << 32], offsets=[0, 1 << 98]),
        "negative": tensor(shape=[-1, -1]), "shape is a number": tensor(shape=1), "shape is text": tensor(shape="a"),
        "negative offset": tensor(offsets=[-400, 0]), "hole": tensor(offsets=[4, 8]), "no field": framed({"x": {}}),
    }


@pytest.mark.parametrize("name", hostile())
def test_hostile_files(name, disk, tmp_path):
    """Also where the checksum agrees."""
    put_item(tmp_path, hostile()[name])
    with suppress(TierStoreError):
        assert all(found.numel() in (0, 1) for found in disk.read(ITEM).values())


def test_irregular_files_ignored(disk, tmp_path):
    path = file_of(tmp_path)
    secret = put(tmp_path / "secret", small())
    for make in (path.mkdir, lambda: os.mkfifo(path), lambda: path.symlink_to(secret)):
        put_item(tmp_path, small())
        path.unlink()
        make()
        with pytest.raises(TierStoreError, match="cannot be read"):
            disk.read(ITEM)
        assert not list(disk.scan())
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


@pytest.mark.parametrize("damage", [b"no database", b"SQLite format 3\0" + bytes(4080)])
def test_damaged_index_is_recreated(damage, tmp_path, caplog):
    DiskStore(tmp_path, MODEL, 1).write(ITEM, some_tensors())
    put(root(tmp_path) / "index.sqlite3", damage)
    disk = DiskStore(tmp_path, MODEL, 1)
    assert not list(disk.scan()) and names(root(tmp_path)) == EMPTY
    disk.write(ITEM, some_tensors())
    assert same(disk.read(ITEM), some_tensors())
    assert len([record for record in caplog.records if "begins anew" in record.message]) == 1


def test_index_damaged_while_in_use(disk, tmp_path):
    disk.write(ITEM, some_tensors())
    put(root(tmp_path) / "index.sqlite3", b"no database" * 2000)
    with suppress(OSError, TierStoreError):
        disk.read(ITEM)
    disk.write(ITEM, some_tensors())
    assert same(disk.read(ITEM), some_tensors())


def test_an_index_of_a_newer_version_is_refused(tmp_path):
    DiskStore(tmp_path, MODEL, 1)
    with CacheDirectory(tmp_path).transaction() as index:
        index.execute("PRAGMA user_version = 3")
    with pytest.raises(ConfigError, match=r"its format is version 3.*name a directory"):
        DiskStore(tmp_path, MODEL, 1)


# Permissions and the directory


@pytest.fixture(params=[0o000, 0o777], ids=["umask 000", "umask 777"])
def umask(request):
    before = os.umask(request.param)
    yield
    os.umask(before)


def test_files_readable_by_owner_only(tmp_path, umask):
    disk, notes = DiskStore(tmp_path, MODEL, 1, "a model"), DiskRecords(tmp_path, MODEL)
    disk.write(ITEM, some_tensors())
    notes.put("ab", b"text")
    seen = {path: path.stat().st_mode & 0o7777 for path in (tmp_path / "deltic-prefixes", *tmp_path.rglob("*"))}
    assert {mode for path, mode in seen.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in seen.items() if path.is_file()} == {0o600}
    assert len(seen) == 4


def test_open_folders_are_closed(tmp_path):
    root(tmp_path).mkdir()
    root(tmp_path).chmod(0o777)
    DiskStore(tmp_path, MODEL, 1)
    assert root(tmp_path).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", ["file", "file above", "link", "file as folder", "link as index", "nul"])
def test_impossible_directories(kind, tmp_path):
    directory, folder = tmp_path / "d", tmp_path / "d" / "deltic-prefixes"
    (tmp_path / "elsewhere").mkdir()
    if kind.startswith("file"):
        put({"file": directory, "file above": tmp_path / "d", "file as folder": folder}[kind])
    elif kind.startswith("link"):
        path = folder if kind == "link" else folder / "index.sqlite3"
        path.parent.mkdir(parents=True)
        path.symlink_to(tmp_path / "elsewhere" / ("" if kind == "link" else "index"))
    given = {"file above": directory / "below", "nul": Path("a\0b")}.get(kind, directory)
    with pytest.raises(ConfigError, match=r"cache_dir .* cannot be used .* name a directory") as caught:
        DiskStore(given, MODEL, 1)
    assert caught.value.option == "cache_dir"
    assert not list((tmp_path / "elsewhere").iterdir())


def as_nobody(check):
    """Run a check as a user without rights; root, who may write anywhere, gives them up in a process of its own."""
    if not IS_ROOT:
        return check()
    child = os.fork()
    if not child:
        code = 1
        with suppress(BaseException):
            os.setuid(65534)
            check()
            code = 0
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return None


def test_a_directory_without_permission():
    def check():
        with pytest.raises(ConfigError, match="Permission denied"):
            DiskStore(directory, MODEL, 1)

    with tempfile.TemporaryDirectory() as directory:  # tmp_path lies where only its owner may go
        os.chmod(directory, 0o555)
        as_nobody(check)
        os.chmod(directory, 0o700)
        DiskStore(directory, MODEL, 1)


def test_a_read_only_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="not writable"):
        DiskStore(tmp_path, MODEL, 1)


def test_folder_of_another_user(tmp_path, monkeypatch):
    """In a place where all may write, another user may have made the folder in advance, to look into it."""
    root(tmp_path).mkdir(mode=0o755)

    def refuse(*args, **kwargs):
        raise PermissionError(errno.EPERM, "Operation not permitted")
    monkeypatch.setattr(Path, "chmod", refuse)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(ConfigError, match="owned by another user"):
        DiskStore(tmp_path, MODEL, 1)


def test_a_disk_without_permissions_warns(tmp_path, monkeypatch, caplog):
    root(tmp_path).mkdir(mode=0o755)

    def refuse(*args, **kwargs):
        raise PermissionError(errno.EPERM, "Operation not permitted")
    monkeypatch.setattr(Path, "chmod", refuse)
    DiskStore(tmp_path, MODEL, 1).write(ITEM, {})
    assert "does not keep permissions" in caplog.text


def test_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    DiskStore("~/cache", MODEL, 1)
    assert root(tmp_path / "cache").is_dir()


def labels(tmp_path: Path) -> list[ModelLabel]:
    return CacheDirectory(tmp_path).models()


def test_the_tag_and_the_label(disk, tmp_path):
    assert (root(tmp_path) / "CACHEDIR.TAG").read_bytes().startswith(
        b"Signature: 8a477f597d28d172789f06886806bc55\n")
    disk.write(ITEM, {})
    assert labels(tmp_path) == [ModelLabel(MODEL, "a model")]
    DiskStore(tmp_path, MODEL, 1).write(ITEM, {})
    assert labels(tmp_path) == [ModelLabel(MODEL, "a model")], "no name is no reason to forget one"
    DiskStore(tmp_path, MODEL, 1, "Größe\x1b[31m\n", "avx2\r").write(ITEM, {})
    assert labels(tmp_path) == [ModelLabel(MODEL, "Größe[31m", "avx2")]


# Foreign and left-over files


def test_others(disk, tmp_path, caplog):
    other = DiskStore(tmp_path, OTHER, 1, "other")
    disk.write(ITEM, {})
    for item in (ITEM, replace(ITEM, kind="kv")):
        other.write(item, {"x": torch.zeros(100)})
    foreign = {put(root(tmp_path) / name) for name in ("mine.txt", "weights.safetensors", "deep/er", "../user.txt")}
    change(tmp_path, "UPDATE items SET used = ? WHERE model = ?", OLD, OTHER)
    found = disk.others()
    assert {item.path for item in found} == {file_of(tmp_path, ITEM, OTHER).name,
                                             file_of(tmp_path, replace(ITEM, kind="kv"), OTHER).name}
    assert all((item.size > 400, item.used, item.key) == (True, OLD, KEY) for item in found)
    assert len([record for record in caplog.records if "2 files in" in record.message]) == 1
    caplog.clear()
    disk.others()
    assert not caplog.records
    for item in found:
        disk.delete(item)
        disk.delete(item)
    assert disk.others() == [] and len(list(disk.scan())) == 1 and not list(other.scan())
    assert all(path.exists() for path in foreign)


def test_orphaned_files_and_rows_deleted_by_scan(disk, tmp_path):
    for start in range(3):
        disk.write(replace(ITEM, start=start), {})
    file_of(tmp_path, replace(ITEM, start=0)).unlink()
    change(tmp_path, "DELETE FROM items WHERE start = 1")
    DiskStore(tmp_path, OTHER, 1).write(ITEM, {})
    change(tmp_path, "DELETE FROM items WHERE model = ?", OTHER)
    assert [item.start for item in disk.scan()] == [2] and labels(tmp_path) == [ModelLabel(MODEL, "a model")]
    assert names(root(tmp_path)) == {*EMPTY, file_of(tmp_path, replace(ITEM, start=2)).name}


def test_earlier_layout_deleted_with_one_line(tmp_path, caplog):
    old = root(tmp_path) / f"v1-{MODEL}"
    kept = {put(root(tmp_path) / "v1-UPPER" / "x"), put(root(tmp_path) / "mine.txt"), put(tmp_path / "user.txt")}
    put(old / f"37-16-{KEY}-{PARENT}.final")
    put(old / "notes" / "ab")
    put(root(tmp_path) / "weights.json")
    (root(tmp_path) / "v1-ab").symlink_to(tmp_path)
    for _ in range(2):
        DiskStore(tmp_path, MODEL, 1)
    assert all(path.exists() for path in kept)
    assert not old.exists() and not (root(tmp_path) / "weights.json").exists()
    assert len([record for record in caplog.records if "earlier version" in record.message]) == 1


def test_temporary_files_of_killed_writers_deleted(disk, tmp_path):
    for number, used in enumerate((OLD, time.time() - 5, time.time() + 3600)):
        put(root(tmp_path) / f".tmp-{number}-a", used=used)
    (root(tmp_path) / ".tmp-link").symlink_to(put(tmp_path / "user.txt", used=OLD))
    disk.scan()
    assert {path.name for path in tmp_path.rglob(".tmp-*")} == {".tmp-link"} and (tmp_path / "user.txt").exists()


WRITER = """
import sys, time
from pathlib import Path
from deltic.cache.offload.directory import write_whole
def pieces():
    yield b"1"
    print("begun", flush=True)
    sys.stdin.readline()
    yield b"2"
write_whole(Path(sys.argv[1]), pieces())
"""


@pytest.mark.parametrize("killed", [False, True])
def test_temporary_file_kept_while_its_writer_lives(killed, disk, tmp_path):
    target = root(tmp_path) / "x"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(target)], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE)
    assert writer.stdin and writer.stdout and writer.stdout.readline() == b"begun\n"
    (temporary,) = root(tmp_path).glob(".tmp-*")
    os.utime(temporary, (OLD, OLD))
    disk.scan()
    assert temporary.exists(), "it is being written, however long that takes"
    if killed:
        writer.kill()
        writer.communicate()
        disk.scan()
        assert not temporary.exists()
    else:
        writer.communicate(b"\n")
        assert target.read_bytes() == b"12"


def test_deleted_temporary_file_is_rewritten(disk, monkeypatch):
    """As where two machines share a directory, and locks do not reach from one to the other."""
    real, calls = os.replace, []

    def gone(source, target):
        calls.append(source)
        if len(calls) == 1:
            os.unlink(source)
        real(source, target)
    monkeypatch.setattr(os, "replace", gone)
    disk.write(ITEM, some_tensors())
    assert same(disk.read(ITEM), some_tensors()) and len(calls) == 2


def test_future_times(disk, tmp_path):
    disk.write(ITEM, {})
    change(tmp_path, "UPDATE items SET used = ?", float(1 << 33))
    (item,) = disk.scan()
    assert item.used == 1 << 33 and disk.read(ITEM) == {}


def test_paths_never_lead_out(disk, tmp_path):
    disk.write(ITEM, {})
    change(tmp_path, "UPDATE items SET file = '../user.txt', model = ?", OTHER)
    put(tmp_path / "user.txt")
    for item in disk.others():
        disk.delete(item)
    CacheDirectory(tmp_path).remove_unused(float("inf"))
    assert (tmp_path / "user.txt").exists()


# Full disks


def test_the_reserve(disk, tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "RESERVE", 1 << 60)
    monkeypatch.setattr(layout, "RESERVE_SHARE", 1.0)
    with pytest.raises(OSError) as caught:
        disk.write(ITEM, some_tensors())
    assert caught.value.errno == errno.ENOSPC
    assert names(root(tmp_path)) == EMPTY


def test_a_small_disk_keeps_a_small_reserve(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10_000, 0, 200))
    layout.check_room(tmp_path, 100)
    with pytest.raises(OSError):
        layout.check_room(tmp_path, 101)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("call", ["replace", "open"])
def test_errors_leave_nothing(code, call, disk, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(code, os.strerror(code))
    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(OSError) as caught:
        disk.write(ITEM, some_tensors())
    monkeypatch.undo()
    assert caught.value.errno == code and names(root(tmp_path)) == EMPTY


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no full device")
def test_a_write_that_fails_half_way(tmp_path):
    path = put(tmp_path / "x", b"old")

    def pieces():
        yield b"1" * 100_000
        assert len(list(tmp_path.iterdir())) == 2
        raise OSError(errno.ENOSPC, "full")
    with pytest.raises(OSError):
        layout.write_whole(path, pieces())
    assert path.read_bytes() == b"old" and names(tmp_path) == {"x"}


def test_a_folder_that_was_removed_comes_back(disk, tmp_path):
    notes = DiskRecords(tmp_path, MODEL)
    for _ in range(2):
        shutil.rmtree(root(tmp_path))
        assert not list(disk.scan()) and disk.others() == []
        disk.write(ITEM, some_tensors())
        notes.put("ab", b"text")
        assert same(disk.read(ITEM), some_tensors()) and notes.get("ab") == b"text"
    shutil.rmtree(root(tmp_path))
    disk.write(ITEM, some_tensors())
    assert labels(tmp_path) == [ModelLabel(MODEL, "a model")]


# Processes


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from deltic.cache.offload.disk import DiskRecords, DiskStore
from deltic.cache.offload.types import StoredItem
torch.set_num_threads(1)
directory, chance = Path(sys.argv[1]), random.Random(5)
for life in range(int(sys.argv[3])):
    child = os.fork()
    if not child:
        disk, notes = DiskStore(directory, sys.argv[2], 1), DiskRecords(directory, sys.argv[2])
        for step in range(life, 10_000):
            item = StoredItem("kv", f"{step % 7:032x}", "", 0, step % 7)
            disk.write(item, {"x": torch.full((1_000_000,), step % 7.0)})
            notes.put(f"{step % 7:x}", bytes([step % 7]) * 9000)
    time.sleep(chance.uniform(0.005, 0.2))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


def test_killed_while_writing(tmp_path):
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), MODEL, str(max(10, examples(40)))], check=True)
    disk, notes = DiskStore(tmp_path, MODEL, 1), DiskRecords(tmp_path, MODEL)
    items = list(disk.scan())
    assert items
    for item in items:
        assert disk.read(item)["x"].unique().tolist() == [item.done]
    for path in root(tmp_path).rglob(".tmp-*"):
        os.utime(path, (OLD, OLD))
    kept = {Path(item.path).name for item in disk.scan()}
    assert disk.others() == [] and names(root(tmp_path)) == {*EMPTY, *kept}
    found = [notes.get(f"{number:x}") for number in range(7)]
    assert all(data in (None, bytes([number]) * 9000) for number, data in enumerate(found)) and any(found)


CROWD = """
import random, sys, time
from pathlib import Path
import torch
from deltic.cache.offload.disk import DiskRecords, DiskStore
from deltic.cache.offload.types import StoredItem, TierStoreError
torch.set_num_threads(1)
disk, notes = DiskStore(sys.argv[1], sys.argv[2], 1), DiskRecords(sys.argv[1], sys.argv[2], 1 << 20)
chance, end, read = random.Random(int(sys.argv[3])), time.monotonic() + 0.6, 0
while time.monotonic() < end:
    number = chance.randrange(6)
    item = StoredItem("state", f"{number:032x}", "", 0, number)
    match chance.randrange(5):
        case 0: disk.write(item, {"x": torch.full((3000,), float(number))})
        case 1: disk.delete(item)
        case 2: disk.touch(item); list(disk.scan()); assert not disk.others()
        case 3:
            notes.put(f"{number:x}", bytes([number]) * 5000)
            assert notes.get(f"{number:x}") in (None, bytes([number]) * 5000)
        case 4:
            try: assert disk.read(item)["x"].unique().tolist() == [number]; read += 1
            except TierStoreError as error: assert "cannot be read" in str(error) or "index" in str(error), error
assert read > 5
"""


def test_two_processes_share_a_directory(tmp_path):
    workers = [subprocess.Popen([sys.executable, "-c", CROWD, str(tmp_path), MODEL, str(seed)]) for seed in range(2)]
    assert [worker.wait() for worker in workers] == [0, 0]
    assert not list(tmp_path.rglob(".tmp-*"))


# Notes


def test_notes(tmp_path):
    notes = DiskRecords(tmp_path, MODEL)
    for data in (b"", b"text", bytes(range(256)) * 100, b"new"):
        notes.put(KEY, data)
        assert notes.get(KEY) == DiskRecords(tmp_path, MODEL).get(KEY) == data
    assert notes.get(PARENT) is DiskRecords(tmp_path, OTHER).get(KEY) is None


def test_a_key_is_claimed_once(tmp_path):
    both = [DiskRecords(tmp_path, MODEL) for _ in range(2)]
    assert [notes.claim(KEY) for notes in (*both, *both)] == [True, False, False, False]
    assert both[1].get(KEY) is None
    both[0].put(KEY, b"text")
    assert both[1].get(KEY) == b"text" and not both[1].claim(KEY)
    assert not both[0].claim("../x")
    shutil.rmtree(root(tmp_path))
    assert both[0].claim(PARENT), "the folder is made again"
    assert stat.S_IMODE((root(tmp_path) / "index.sqlite3").stat().st_mode) == 0o600


@pytest.mark.parametrize("key", ["", "../x", "a/b", "AB", "xy", "a" * 65, "ab\n", "ab\0", "ä", "."])
def test_keys_of_notes_are_hexadecimal(key, tmp_path):
    notes = DiskRecords(tmp_path, MODEL)
    notes.put(key, b"text")
    assert notes.get(key) is None and not notes.claim(key) and not CacheDirectory(tmp_path).rows()


def test_damaged_notes(tmp_path):
    notes = DiskRecords(tmp_path, MODEL)
    whole = b"some text"
    for place in range(len(whole)):
        for damaged in (whole[:place], whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1:]):
            notes.put("ab", whole)
            change(tmp_path, "UPDATE records SET data = ?", damaged)
            assert notes.get("ab") is None
    notes.put("ab", whole)
    change(tmp_path, "UPDATE records SET key = 'cd'")
    assert notes.get("cd") is None, "it belongs to its key"


def taken(tmp_path: Path) -> int:
    return sum(row.size for row in CacheDirectory(tmp_path).rows())


def test_notes_keep_to_their_budget(tmp_path):
    budget = 64 * 4096
    all_three = [DiskRecords(tmp_path, model, budget) for model in (MODEL, MODEL, OTHER)]
    for number in range(300):
        all_three[number % 3].put(f"{number:x}", b"x" * (6000 if number % 4 else 100))
        change(tmp_path, "UPDATE records SET used = ? WHERE key = ?", OLD + number, f"{number:x}")
        assert taken(tmp_path) <= budget + 2 * budget // 8
    assert taken(tmp_path) > budget // 2
    kept = sorted(int(row.key, 16) for row in CacheDirectory(tmp_path).rows())
    assert kept == list(range(kept[0], 300)), "the oldest go"
    all_three[0].put("aaaa", bytes(budget))
    assert all_three[0].get("aaaa") is None, "too large"


def test_reading_keeps_a_note(tmp_path):
    notes = DiskRecords(tmp_path, MODEL, 16 * 4096)
    for number in range(60):
        notes.put(f"{number:x}", b"x")
        change(tmp_path, "UPDATE records SET used = ? WHERE key = ?", OLD + number, f"{number:x}")
        assert notes.get("0") == b"x"


def test_a_note_that_cannot_be_touched_is_read(tmp_path):
    notes, other = DiskRecords(tmp_path, MODEL), CacheDirectory(tmp_path)
    notes.put("ab", b"text")
    change(tmp_path, "UPDATE records SET used = ?", OLD)
    with other.read() as index:
        index.execute("BEGIN IMMEDIATE")
        with notes._directory.read() as impatient:
            impatient.execute("PRAGMA busy_timeout = 0")
        assert notes.get("ab") == b"text"
        index.execute("ROLLBACK")


def test_a_full_disk_stops_notes_with_one_warning(tmp_path, monkeypatch, caplog):
    notes = DiskRecords(tmp_path, MODEL)
    notes.put("ab", b"old")
    monkeypatch.setattr(layout, "RESERVE", 1 << 60)
    monkeypatch.setattr(layout, "RESERVE_SHARE", 1.0)
    for _ in range(3):
        notes.put("ab", b"new")
    assert notes.get("ab") == b"old" and len(caplog.records) == 1 and "nearly full" in caplog.text
    monkeypatch.undo()
    notes.put("ab", b"new")
    assert notes.get("ab") == b"new"
