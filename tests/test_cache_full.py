"""A disk tier that is full goes on with what is new, one that can only be read is read, and neither harms a request."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis.stateful import initialize, invariant
from reuse_cases import runtime_of, serve, usage_of
from support import examples, greedy, numbers, odd_runtime, reference, same_tokens
from test_cache_tiers import Delayed, Recording, TierIndexMachine, source_of
from test_prefix_tree import run_programs
from torch import Tensor

from deltic.cache.offload import index
from deltic.cache.offload.directory import CacheDirectory, ModelLabel
from deltic.cache.offload.disk import DiskRecords, DiskStore
from deltic.cache.offload.index import TierIndex
from deltic.cache.offload.types import FullError, StoredItem
from deltic.engine.engine import Engine
from deltic.params import EngineRequest


def request_of(seed: int, length: int = 60) -> EngineRequest:
    return greedy(numbers(seed, length, 500), 3)


def disk_engine(directory: Path, budget: int = 1 << 26, model: str = "model") -> Engine:
    return Engine(
        runtime_of(odd_runtime(), batch=2, tiers=[TierIndex(DiskStore(directory, model, budget), threads=True)])
    )


def written(engine: Engine) -> None:
    """Wait until all that was kept is on the disk, or is known not to be."""
    (tier,) = engine.runtime.cache.tiers
    while tier._pending:
        with suppress(Exception):
            tier._pending[-1].future.result()
        tier._settle()


def size_of(directory: Path) -> int:
    """Bytes of the items."""
    return sum(path.stat().st_size for path in directory.rglob("*.safetensors"))


def lines_of(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if text in record.getMessage()]


@contextmanager
def small_disk(monkeypatch: pytest.MonkeyPatch, directory: Path, total: int, others: int = 0) -> Iterator[None]:
    """A disk of so many bytes, of which somebody else's files take some."""
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(
            total=total, free=max(total - others - size_of(directory), 0)))
        yield


def test_full_disk_evicts_oldest_for_new_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                         caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "deltic")
    with small_disk(monkeypatch, tmp_path, 600_000):
        engine = disk_engine(tmp_path)
        for seed in range(20, 40):
            serve(engine, request_of(seed))
            written(engine)
            engine.check()
        engine.close()
    assert 300_000 < size_of(tmp_path) < 600_000 and engine.runtime.cache.tiers[0].evictions > 5
    assert not lines_of(caplog, "misses something")
    again = disk_engine(tmp_path)
    cached = [usage_of(serve(again, request_of(seed))).cached_tokens for seed in (39, 38, 20, 21)]
    assert cached == [60, 60, 0, 0], "the newest stay, the oldest go"
    again.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_disk_full_reported_by_write_only(code: int, tmp_path: Path,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """A quota does not show before."""
    real = os.replace

    def limited(source: Path, target: Path) -> None:
        if size_of(tmp_path) > 600_000:
            raise OSError(code, os.strerror(code))
        real(source, target)

    monkeypatch.setattr(os, "replace", limited)
    engine = disk_engine(tmp_path)
    for seed in range(20, 40):
        serve(engine, request_of(seed))
        written(engine)
        engine.check()
    engine.close()
    again = disk_engine(tmp_path)
    assert usage_of(serve(again, request_of(39))).cached_tokens == 60
    again.close()


def test_no_eviction_if_other_files_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "deltic")
    engine = disk_engine(tmp_path)
    serve(engine, request_of(20))
    engine.close()
    before = size_of(tmp_path)
    with small_disk(monkeypatch, tmp_path, 10_000_000, others=12_000_000):
        engine = disk_engine(tmp_path)
        for seed in (21, 22, 23):
            request = request_of(seed)
            same_tokens(reference(odd_runtime(), request.prompt, 3), serve(engine, request)[("a", 0)].tokens)
            written(engine)
        assert usage_of(serve(engine, request_of(20))).cached_tokens == 60
        engine.close()
    assert size_of(tmp_path) == before and len(lines_of(caplog, "nearly full")) == 1


class Narrow(Recording):
    """A store that holds less than its budget, and says so when it is written to."""

    def __init__(self, capacity: int) -> None:
        super().__init__(1 << 20)
        self.capacity = capacity

    def write(self, item: StoredItem, tensors: Mapping[str, Tensor]) -> int:
        missing = self.held + item.size - self.capacity
        if missing > 0:
            raise FullError(errno.ENOSPC, "No space left on device", "", missing)
        return super().write(item, tensors)

    @property
    def held(self) -> int:
        """Bytes of tensors."""
        return sum(tensor.numel() * tensor.itemsize for kept in self._items.values() for tensor in kept.values())


@pytest.mark.parametrize("delayed", [False, True])
def test_room_is_made_for_long_prefixes_too(delayed: bool) -> None:
    store = Narrow(4000)
    tier = TierIndex(store, threads=False)
    if delayed:
        tier._writer = Delayed()
    for start in range(0, 40_000, 1000):
        tokens = tuple(range(start, start + 20 + start // 1000 * 7))
        tier.offer(source_of(tokens))
        while isinstance(tier._writer, Delayed) and tier._writer.waiting:
            tier._writer.work(1)
            tier._settle()
        tier.check()
        assert tier.find((*tokens, 1)), "what is new was not kept"
    assert tier.evictions > 20


class NarrowMachine(TierIndexMachine):
    """Random programs over a store that is full long before its budget is used up."""

    narrow = True

    @initialize(capacity=st.sampled_from((300, 900, 2200, 4000)))
    def start(self, capacity: int) -> None:
        self.store = Narrow(capacity)
        self.open()

    @invariant()
    def the_store_holds_what_it_can(self) -> None:
        assert self.store.held <= self.store.capacity


def test_a_tier_over_a_full_store_keeps_its_accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_PAUSE", -1.0)
    run_programs(NarrowMachine, examples(60), 40)


@pytest.mark.slow
def test_a_tier_over_a_full_store_keeps_its_accounts_in_thousands_of_programs(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_PAUSE", -1.0)
    run_programs(NarrowMachine, 2000, 50, derandomize=False)


def test_oversized_item_evicts_nothing() -> None:
    store = Narrow(2000)
    tier = TierIndex(store, threads=False)
    small, large = tuple(range(20)), tuple(range(1000, 2000))
    tier.offer(source_of(small))
    tier.offer(source_of(large))
    tier.check()
    assert tier.find((*small, 1)) and not tier.find((*large, 1))


def test_a_store_that_never_has_room_is_asked_a_few_times_only() -> None:
    class Liar(Recording):
        calls = 0

        def write(self, item: StoredItem, tensors: Mapping[str, Tensor]) -> int:
            self.calls += 1
            if len(self._items) > 7:
                raise FullError(errno.ENOSPC, "No space left on device", "", 1)
            return super().write(item, tensors)

        def delete(self, item: StoredItem) -> None:
            """Takes nothing back."""

    store = Liar(1 << 20)
    tier = TierIndex(store, threads=False)
    for start in range(0, 20_000, 1000):
        tier.offer(source_of(tuple(range(start, start + 20))))
    assert store.calls < 30


def test_a_shortage_of_memory_for_copies_keeps_nothing_and_harms_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "deltic")
    tier = TierIndex(Recording(100_000), threads=False)

    def refuse(start: int) -> Any:
        raise MemoryError("can't allocate memory")
    tier.offer(replace(source_of((1, 2, 3)), run=refuse))
    tier.check()
    assert tier.find((1, 2, 3, 4)) is None and "`host_memory`" in caplog.text


def test_a_shortage_while_pools_are_copied_harms_nobody(monkeypatch: pytest.MonkeyPatch,
                                                        caplog: pytest.LogCaptureFixture) -> None:
    """torch has no class of its own for it on a CPU."""
    caplog.set_level(logging.WARNING, "deltic")

    def refuse(*_: Any) -> Any:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.")
    monkeypatch.setattr("deltic.cache.item_copies._read_kv", refuse)
    engine = Engine(runtime_of(odd_runtime(), batch=2, tiers=[TierIndex(Recording(1 << 20), threads=False)]))
    request = request_of(20)
    same_tokens(reference(odd_runtime(), request.prompt, 3), serve(engine, request)[("a", 0)].tokens)
    assert not engine.runtime.cache.tiers[0].prefixes and "`host_memory`" in caplog.text
    engine.close()


def test_pending_writes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_BACKLOG", 2000)
    tier = TierIndex(Recording(1 << 20), threads=False)
    writer, copies = Delayed(), []
    tier._writer = writer

    def counted(source: Any) -> Any:
        return replace(source, run=lambda start: copies.append(start) or source.run(start))

    def offer(first: int, count: int) -> int:
        before = tier._backlog
        tier.offer(counted(source_of(tuple(range(first, first + count)))))
        return tier._backlog - before
    sizes = [offer(start, 20) for start in range(0, 50_000, 1000)]
    assert max(sizes) < 1000 and tier._backlog <= 2000 + max(sizes)
    assert 0 < len(copies) < 15, "what is skipped was copied first"
    writer.work(1 << 20)
    tier._settle()
    tier.check()
    assert tier._backlog == 0
    assert offer(60_000, 20) and offer(70_000, 900) > 5000, "a long one is skipped as little waits before it"
    assert not offer(80_000, 20)
    writer.work(1 << 20)
    tier._settle()
    assert tier.find((*range(70_000, 70_900), 1))


# A smaller budget


@pytest.mark.parametrize("foreign", [False, True])
def test_a_budget_that_was_lowered_is_kept_to_from_the_start(foreign: bool, tmp_path: Path) -> None:
    """Also where most is of another model."""
    engine = disk_engine(tmp_path, model="other" if foreign else "model")
    for seed in range(20, 30):
        serve(engine, request_of(seed))
        written(engine)
    engine.close()
    assert size_of(tmp_path) > 400_000
    engine = disk_engine(tmp_path, budget=300_000)
    engine.check()
    assert 100_000 < size_of(tmp_path) < 301_000
    assert usage_of(serve(engine, request_of(29))).cached_tokens == (0 if foreign else 60)
    engine.close()


# A directory that can only be read


def read_only(check: Callable[[], None], directory: Path) -> None:
    """Run a check as a user who may read a directory and not write to it; root, who may always, gives that up in a
    process of its own."""
    paths = [directory, *(path for path in directory.rglob("*") if path.is_dir())]
    if os.geteuid() == 0:
        for path in (directory, *directory.rglob("*")):
            os.chown(path, 65534, 65534)
    for path in paths:
        path.chmod(0o500)
    child = os.fork()
    if not child:
        code = 1
        try:
            if os.geteuid() == 0:
                os.setuid(65534)
            check()
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for path in paths:
        path.chmod(0o700)
    assert code == 0


ITEM = StoredItem("kv", "ab" * 16, "", 0, 3)


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A place that others may look into, unlike `tmp_path`."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)


def test_read_only_directory(open_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "deltic")
    directory = open_path / "kept"
    DiskStore(directory, "ab", 1 << 20, "a model").write(ITEM, {"tokens": torch.arange(3)})
    DiskRecords(directory, "ab").put("cd", b"text")

    def check() -> None:
        disk, notes = DiskStore(directory, "ab", 1 << 20, "another name"), DiskRecords(directory, "ab")
        assert not disk.writable and disk.read(ITEM)["tokens"].tolist() == [0, 1, 2] and not disk.others()
        with pytest.raises(OSError, match=r"Permission denied|Read-only"):
            disk.write(replace(ITEM, done=4), {"tokens": torch.arange(4)})
        notes.put("ef", b"text")
        assert notes.get("cd") == b"text" and notes.get("ef") is None
        disk.delete(ITEM)
        assert not list(disk.scan()), "what was given up comes back with the next look"
        assert len(lines_of(caplog, "cannot be written to")) == 1

    read_only(check, directory)
    assert CacheDirectory(directory).models() == [ModelLabel("ab", "a model")]


def test_engine_over_read_only_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                          caplog: pytest.LogCaptureFixture) -> None:
    engine = disk_engine(tmp_path)
    serve(engine, request_of(20))
    engine.close()
    caplog.set_level(logging.WARNING, "deltic")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
        for name in ("replace", "unlink", "utime", "rmdir"):
            patched.setattr(os, name, refuse_writing)
        patched.setattr(Path, "unlink", refuse_writing)
        engine = disk_engine(tmp_path)
        for seed in (20, 21, 22):
            serve(engine, request_of(seed))
            engine.check()
        assert usage_of(serve(engine, request_of(20))).cached_tokens == 60
        engine.close()
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    assert [record.getMessage().partition(" ")[2] for record in caplog.records] == [
        "cannot be written to: the prefixes in it are used, and none are added"]


def refuse_writing(*_: Any, **__: Any) -> None:
    raise OSError(errno.EROFS, "Read-only file system")
