"""Tiers: what a tier holds against a dictionary, faults of its store, and the hybrid cache over them (L1 to L3)."""

from __future__ import annotations

import errno
import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from reuse_cases import runtime_of, serve, usage_of
from support import examples, greedy, numbers, odd_runtime, odd_shape, reference, same_tokens
from test_cache_machine import hashes, read_kv, read_state, step, toy_cache
from test_prefix_tree import PHASES, PROMPTS, Prefix, ReuseMachine, Wanted, run_programs
from torch import Tensor

from deltic import LLM, RandomModel, SamplingParams
from deltic.cache.manager import HybridCache
from deltic.cache.offload import index as tier_index
from deltic.cache.offload.disk import DiskStore
from deltic.cache.offload.host import HostStore
from deltic.cache.offload.index import TierIndex
from deltic.cache.offload.tiers import LoadRequest
from deltic.cache.offload.types import LoadedPrefix, LostError, PrefixHash, PrefixSource, StoredItem, TierStoreError
from deltic.engine.engine import Engine
from deltic.errors import ConfigError
from deltic.params import PAGE


@pytest.fixture(autouse=True)
def only_what_matters(caplog: pytest.LogCaptureFixture) -> None:
    """Thousands of refusals are not worth a line each."""
    caplog.set_level(logging.ERROR, "deltic")


STATE_BYTES = 100
"""Of the tensors of a state of `source_of`."""


def source_of(tokens: Sequence[int], logits: bool = False) -> PrefixSource:
    """A prefix whose K/V are running hashes, and whose state is the last of them."""
    found = hashes(list(tokens))

    def run(start: int) -> dict[str, Tensor]:
        return {"tokens": torch.tensor(tokens[start:], dtype=torch.int64),
                "keys": torch.tensor(found[start:], dtype=torch.float32)}

    def state() -> dict[str, Tensor]:
        return {"recurrent": torch.full((25,), float(found[-1]))} | ({"logits": torch.ones(3)} if logits else {})
    return PrefixSource(tokens, run, state, logits)


def check_loaded(loaded: LoadedPrefix, tokens: Sequence[int]) -> None:
    found = torch.tensor(hashes(list(tokens)), dtype=torch.float32)
    assert list(loaded.tokens) == list(tokens)
    assert torch.equal(torch.cat([run["keys"] for _, run in loaded.runs]), found)
    assert bool((loaded.state["recurrent"] == found[-1]).all())


class Flaky(HostStore):
    """A store that refuses, forgets and corrupts."""

    def __init__(self, budget: int) -> None:
        super().__init__(budget)
        self.full, self.now = False, 1.0

    def write(self, item: StoredItem, tensors: Mapping[str, Tensor]) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(item, tensors)
        return item.size + 7  # a header

    def scan(self) -> Iterable[StoredItem]:
        self.now += 1
        return [replace(self.names[key], size=sum(t.numel() * t.itemsize for t in tensors.values()) + 7, used=self.now)
                for key, tensors in self._items.items()]

    @property
    def names(self) -> dict[tuple[str, str], StoredItem]:
        return {key: item for key, item in self.known.items() if key in self._items}

    known: dict[tuple[str, str], StoredItem]


class Recording(Flaky):
    """Also remembers the items' names, as a directory does, and others may write there."""

    trusted = False

    def __init__(self, budget: int) -> None:
        super().__init__(budget)
        self.known = {}

    def write(self, item: StoredItem, tensors: Mapping[str, Tensor]) -> int:
        size = super().write(item, tensors)
        self.known[item.kind, item.key] = item
        return size


class Delayed(Executor):
    """Work that is done when the test says so, in order, as by a thread that lags behind."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[Future[Any], Any]] = deque()

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.waiting.append((Future(), partial(fn, *args, **kwargs)))
        return self.waiting[-1][0]

    def work(self, count: int) -> None:
        for _ in range(min(count, len(self.waiting))):
            future, call = self.waiting.popleft()
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.work(len(self.waiting))


class TierIndexMachine(RuleBasedStateMachine):
    """Random programs over a tier and the set of prefixes that were offered to it. Writing lags behind. narrow: the
    store may not take what it was given."""

    narrow = False

    def __init__(self) -> None:
        super().__init__()
        self.offered: dict[Prefix, bool] = {}

    @initialize(budget=st.sampled_from((900, 1500, 2200, 4000, 100_000)))
    def start(self, budget: int) -> None:
        self.store = Recording(budget)
        self.open()

    def open(self) -> None:
        self.tier = TierIndex(self.store, threads=False)
        self.writer = self.tier._writer = Delayed()

    @rule(count=st.integers(1, 9))
    def write(self, count: int) -> None:
        self.writer.work(count)
        self.tier.find((77, 77))  # takes note

    @rule(tokens=PROMPTS.filter(bool), logits=st.booleans())
    def offer(self, tokens: Prefix, logits: bool) -> None:
        self.tier.offer(source_of(tokens, logits))
        self.offered[tokens] = logits or self.offered.get(tokens, False)
        if self.store.budget == 100_000 and not self.store.full and not self.writer.waiting:
            longer = (*tokens, 9)
            entry = self.tier.find(longer)
            assert entry and len(tokens) - PAGE <= entry.done <= len(tokens), "what was offered is not known"

    @precondition(lambda self: self.offered)
    @rule(picks=st.lists(st.integers(0, 99), min_size=1, max_size=5), logits=st.booleans())
    def offer_again(self, picks: list[int], logits: bool) -> None:
        """Prefixes that were given up come back while their first copies are being written or deleted."""
        for pick in picks:
            self.offer(list(self.offered)[pick % len(self.offered)], logits)

    @rule(tokens=PROMPTS, above=st.integers(0, 40))
    def fetch(self, tokens: Prefix, above: int) -> None:
        """What is found is a prefix that was offered, deeper than asked, and comes back as it was."""
        entry = self.tier.find(tokens, above)
        if entry is None:
            return
        assert above < entry.done <= len(tokens)
        self.writer.work(1 << 20)
        assert tokens[:entry.done] in self.offered
        assert entry.done < len(tokens) or self.offered[tokens], "an exact end without logits"
        try:
            check_loaded(self.tier.fetch(entry).result(), tokens[:entry.done])
        except LostError as lost:
            assert self.store.full or self.narrow, "what is known was not there"
            self.tier.lose(lost.item)

    @rule()
    def restart(self) -> None:
        self.tier.close()
        known, self.store.full = self.tier.prefixes, False
        self.open()
        assert self.tier.prefixes == known

    @rule(full=st.booleans())
    def fill(self, full: bool) -> None:
        self.store.full = full
        self.tier._paused_until = 0.0

    @precondition(lambda self: self.store._items and not self.writer.waiting)
    @rule(pick=st.integers(0, 99))
    def forget(self, pick: int) -> None:
        """Another process deletes a file; the next that would use it is told."""
        key = list(self.store._items)[pick % len(self.store._items)]
        item = self.store.known[key]
        self.store.delete(item)
        self.tier.lose(item)

    @precondition(lambda self: self.store._items and not self.writer.waiting)
    @rule(pick=st.integers(0, 99))
    def vanish(self, pick: int) -> None:
        """Another process deletes a file, and a look at the store shows it."""
        self.store.delete(self.store.known[list(self.store._items)[pick % len(self.store._items)]])
        for entry in self.tier._entries.values():
            entry.used = min(entry.used, 1.0)
        self.tier._merge(list(self.store.scan()), [], self.store.now + 1e9)

    @invariant()
    def accounts_add_up(self) -> None:
        """Budget, index and, when all is written, store agree."""
        self.tier.check()
        if self.writer.waiting:
            return
        self.tier.find((77, 77))
        if self.writer.waiting:  # what had no room is tried again
            return
        held = [item for entry in self.tier._entries.values() for item in (entry.kv, entry.state) if item]
        assert {(item.kind, item.key) for item in held} == set(self.store._items)


def test_tier_equals_a_dictionary_of_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_index, "_PAUSE", -1.0)
    run_programs(TierIndexMachine, examples(120), 40)


@pytest.mark.slow
def test_tier_equals_a_dictionary_in_thousands_of_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_index, "_PAUSE", -1.0)
    run_programs(TierIndexMachine, 2000, 50, derandomize=False)


def test_an_entry_that_gets_its_state_back_stays_while_room_is_made_for_it() -> None:
    """What goes for it is the only one that continues it."""
    tier = TierIndex(Recording(100_000), threads=False)
    first, second = tuple(range(20)), tuple(range(60))
    for tokens in (first, second):
        tier.offer(source_of(tokens))
    entry = tier.find((*first, 99))
    assert entry is not None
    tier._drop_state(entry)
    tier.budget = tier.bytes + STATE_BYTES - 1
    tier.offer(source_of(first))
    tier.check()
    assert tier.find((*second, 99)) is entry is tier.find((*first, 99))


def test_a_state_that_comes_back_has_the_name_that_it_had() -> None:
    """Else a look at the store takes it for another, and deletes it."""
    store = Recording(100_000)
    tier = TierIndex(store, threads=False)
    for tokens in (tuple(range(20)), tuple(range(60))):
        tier.offer(source_of(tokens))
        entry = tier.find((*tokens, 99))
        assert entry is not None and entry.state and entry.kv
        name = store.known["state", entry.key]
        tier._drop_state(entry, prune=False)
        tier.offer(source_of(tokens))
        assert store.known["state", entry.key] == name == replace(entry.kv, kind="state", size=name.size)


@pytest.mark.parametrize("threads", [False, True])
def test_host_memory_keeps_items_indefinitely(threads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else writes there, and it does not say what it has: no look may take that for nothing."""
    monkeypatch.setattr(tier_index, "_PAUSE", -1.0)
    tier = TierIndex(HostStore(1 << 20), threads=threads)
    for start in (0, 1000, 2000):
        tier.offer(source_of(tuple(range(start, start + 60))))
        while tier._pending or tier._scan:
            tier._settle()
    for start in (0, 1000, 2000):
        entry = tier.find((*range(start, start + 60), 7))
        assert entry is not None and entry.done == 60
    for start in (0, 1000):
        tier._drop(tier._entries[PrefixHash(tuple(range(start, start + 60))).key(60)])
    tier.check()
    assert tier.prefixes == 1 and not tier._deleted, "names of what was given up are kept for no scan"
    tier.close()


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO])
def test_a_file_that_cannot_be_read_now_stays(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, prompt = TierIndex(DiskStore(tmp_path, "model", 1 << 20), threads=False), (*range(40), 7)
    tier.offer(source_of(tuple(range(40))))
    files = sorted(tmp_path.rglob("*"))

    def refuse(path: Path) -> None:
        raise OSError(code, "not now", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("deltic.cache.offload.directory.open_regular", refuse)
        fetch = LoadRequest(prompt, 0, (tier,))
        assert fetch.poll() and fetch.loaded is None
    assert sorted(tmp_path.rglob("*")) == files
    fetch = LoadRequest(prompt, 0, (tier,))
    assert fetch.poll() and fetch.loaded and fetch.loaded.done == 40


def test_no_loads_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = TierIndex(Recording(1 << 20), threads=False)
    tier.offer(source_of(tuple(range(40))))
    monkeypatch.setattr(tier, "_reader", ThreadPoolExecutor(1))
    monkeypatch.setattr("threading.Thread.start", lambda thread: (_ for _ in ()).throw(RuntimeError("no more threads")))
    fetch = LoadRequest((*range(40), 7), 0, (tier,))
    assert fetch.poll() and fetch.loaded is None


def test_deferred_load_reports_whether_anything_exists() -> None:
    tier = TierIndex(Recording(1 << 20), threads=False)
    reader = tier._reader = Delayed()
    tier.offer(source_of(tuple(range(40))))
    nothing, something = LoadRequest((7, 8, 9), 0, (tier,)), LoadRequest((*range(40), 7), 0, (tier,))
    assert nothing.poll(begin=False) and not nothing.begun
    assert not something.poll(begin=False) and not something.begun and not reader.waiting
    assert not something.poll() and something.begun
    reader.work(1)
    assert something.poll(begin=False) and something.loaded and something.begun


def test_unwritable_items_leave_no_entry() -> None:
    store = Recording(100_000)
    tier = TierIndex(store, threads=False)
    writer = tier._writer = Delayed()
    for _ in range(2):
        tier.offer(source_of((1, 2, 3)))
        entry = tier.find((1, 2, 3, 4))
        assert entry is not None
        tier._drop(entry)
    writer.work(2)
    store.full = True
    writer.work(2)
    tier._settle()
    tier.check()
    assert not store._items and not tier._entries


def test_evicted_item_ignored_by_running_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan found a state whose entry was given up before the state was written; it is deleted, and the entry back
    without it, when the scan's result is taken up."""
    store = Recording(100_000)
    tier = TierIndex(store, threads=False)
    writer = tier._writer = Delayed()
    tier.offer(source_of(tuple(range(20))))
    writer.work(1 << 20)
    entry = tier.find((*range(20), 99))
    assert entry is not None
    tier._drop_state(entry, prune=False)
    tier.offer(source_of(tuple(range(20))))
    tier._drop_state(entry, prune=False)
    writer.work(1 << 20)
    monkeypatch.setattr(tier_index, "_PAUSE", -1.0)
    tier._deleted.clear()
    tier._scan = time.time(), tier._reader.submit(lambda: (list(store.scan()), []))  # type: ignore[arg-type, return-value]
    tier._settle()
    held = [item for entry in tier._entries.values() for item in (entry.kv, entry.state) if item]
    assert {(item.kind, item.key) for item in held} == set(store._items)


def test_evicted_and_offered_again_before_write() -> None:
    store = Recording(100_000)
    tier = TierIndex(store, threads=False)
    writer = tier._writer = Delayed()
    tier.offer(source_of((1, 2, 3)))
    entry = tier.find((1, 2, 3, 4))
    assert entry is not None
    tier._drop_state(entry)
    tier.offer(source_of((1, 2, 3)))
    writer.work(1 << 20)
    assert tier.find((1, 2, 3, 4))
    tier.check()
    found = tier.find((1, 2, 3, 4))
    assert found is not None
    check_loaded(tier.fetch(found).result(), (1, 2, 3))


def test_items_being_written_by_other_processes_kept() -> None:
    """K/V has come, its states have not: it counts, is no use yet, and is taken up with them."""
    store = Recording(100_000)
    writer = TierIndex(store, threads=False)
    for length in (20, 60):
        writer.offer(source_of(tuple(range(length))))
    states = {key: store._items.pop(key) for key in list(store._items) if key[0] == "state"}
    store.now = time.time()
    reader = TierIndex(store, threads=False)
    reader.check()
    assert reader.prefixes == 0 and len(store._items) == 2, "another's K/V is deleted"
    assert reader.bytes == sum(item.size for item in store.scan())
    store._items |= states
    reader._merge(list(store.scan()), [], time.time())
    reader.check()
    found = reader.find(tuple(range(70)))
    assert found is not None and found.done == 60
    check_loaded(reader.fetch(found).result(), tuple(range(60)))


# The hybrid cache over a tier


class TierMachine(ReuseMachine):
    """The cache's programs, in which prefixes also come back from a tier that is smaller or larger than the pools."""

    @initialize(pages=st.sampled_from((12, 6, 4, 9, 20)), slots=st.sampled_from((6, 4, 3, 8, 2)),
                budget=st.sampled_from((1 << 12, 1 << 14, 1 << 20)))
    def start(self, pages: int, slots: int, budget: int) -> None:  # type: ignore[override]
        self.cache = toy_cache(pages, slots, self.kind)
        self.cache.tiers = (TierIndex(HostStore(budget), threads=False),)

    @rule(prompt=PROMPTS, room=st.integers(0, 80))
    def admit(self, prompt: Prefix, room: int) -> None:  # type: ignore[override]
        known = self.cache.tree.cached_length(prompt)
        fetch = self.cache.start_load(prompt)
        assert fetch.poll()
        loaded = fetch.loaded.done if fetch.loaded else 0
        assert not loaded or loaded > known
        sequence = self.cache.admit(prompt, room, fetch)
        if sequence is None:
            assert room or self.loose_slots() <= 1 or self.sequences or self.kept, "an empty cache refuses"
            return
        self.sequences[sequence] = Wanted(list(prompt[:sequence.done]))
        self.sequences[sequence].emitting |= set(sequence.checkpoint_slots)
        assert tuple(sequence.tokens) == prompt[:sequence.done] and sequence.done <= max(known, loaded)
        assert sequence.source == ("host" if sequence.done > known else "")

    @rule()
    def forget_the_pools(self) -> None:
        self.cache.clear()

    @rule(parts=st.lists(PROMPTS.filter(bool), min_size=2, max_size=5))
    def converse(self, parts: list[Prefix]) -> None:
        """Turns between which the pools forget everything: each is made of what all before have left in the tier."""
        tokens: list[int] = []
        for part in parts:
            tokens += part
            fetch = self.cache.start_load(tokens)
            assert fetch.poll()
            sequence = self.cache.admit(tokens, len(tokens), fetch)
            if sequence is None:
                return
            rest = tokens[sequence.done:]
            if self.cache.reserve(sequence, len(rest)) == len(rest):
                step(self.cache, sequence, rest)
            assert read_kv(self.cache, sequence.pages, sequence.done) == hashes(tokens)[:sequence.done]
            assert not sequence.done or read_state(self.cache, sequence.slot) == hashes(tokens)[sequence.done - 1]
            self.cache.release(sequence, keep=True)
            self.cache.clear()


@pytest.mark.parametrize("looks", [1, 9])
def test_l2_a_cache_over_a_tier_equals_the_naive_model(looks: int) -> None:
    run_programs(type("Machine", (TierMachine,), {"looks": looks}), examples(80), 40)


@pytest.mark.slow
def test_l2_a_cache_over_a_tier_equals_the_naive_model_in_thousands_of_programs() -> None:
    run_programs(TierMachine, 2000, 40, derandomize=False)


class RestoresNoState(HybridCache):
    def _admit_loaded(self, fetch: LoadRequest, room: int, known: int) -> Any:
        if fetch.loaded:
            wrong = {name: tensor * 0 for name, tensor in fetch.loaded.state.items()}
            fetch.loaded = replace(fetch.loaded, state=wrong)
        return super()._admit_loaded(fetch, room, known)


class RestoresWrongRun(HybridCache):
    """The K/V of a run is that of the run before."""

    def _admit_loaded(self, fetch: LoadRequest, room: int, known: int) -> Any:
        if fetch.loaded and len(fetch.loaded.runs) > 1:
            runs = [(start, {name: tensor.roll(1, 1) for name, tensor in run.items()})
                    for start, run in fetch.loaded.runs]
            fetch.loaded = replace(fetch.loaded, runs=tuple(runs))
        return super()._admit_loaded(fetch, room, known)


@pytest.mark.parametrize("kind", [RestoresNoState, RestoresWrongRun])
def test_the_machine_notices_a_cache_that_restores_wrongly(kind: type[HybridCache]) -> None:
    with pytest.raises((AssertionError, IndexError, ValueError)):
        run_programs(type("Machine", (TierMachine,), {"kind": kind}), 300, 40, report_multiple_bugs=False,
                     phases=PHASES)


# Faults of a disk, seen from the engine


PROMPT = numbers(1, 100, 500)
OPENING = replace(greedy(PROMPT, 8), stable_prefixes=(40,))


def disk_engine(directory: Path, model: str = "model", budget: int = 1 << 24) -> Engine:
    """A process's engine over a directory."""
    tiers = [TierIndex(DiskStore(directory, model, budget), threads=True)]
    return Engine(runtime_of(odd_runtime(), batch=2, tiers=tiers))


def check_answer(engine: Engine, cached: int | None = None) -> int:
    """The answer is right whatever came from the disk; returns how much did."""
    found = serve(engine, OPENING)
    same_tokens(reference(odd_runtime(), PROMPT, 8), found[("a", 0)].tokens)
    used = usage_of(found).cached_tokens
    assert cached is None or used == cached
    engine.close()
    return used


def files_of(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.safetensors"), key=lambda path: (path.suffixes[0], path.name))


def test_a_restarted_engine_reads_nothing_again(tmp_path: Path) -> None:
    assert [check_answer(disk_engine(tmp_path)) for _ in range(3)] == [0, 100, 100]


def test_another_model_uses_nothing_and_harms_nothing(tmp_path: Path) -> None:
    check_answer(disk_engine(tmp_path))
    check_answer(disk_engine(tmp_path, "other"), cached=0)
    check_answer(disk_engine(tmp_path), cached=100)


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "swap", "empty"])
@pytest.mark.parametrize("pick", range(4))
@pytest.mark.covering
def test_l6_damaged_files_are_recomputed_and_replaced(damage: str, pick: int, tmp_path: Path,
                                                      caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "deltic")
    check_answer(disk_engine(tmp_path))
    files = files_of(tmp_path)
    assert [path.suffixes[0] for path in files] == [".final", ".kv", ".kv", ".state"]
    data = files[pick].read_bytes()
    match damage:
        case "truncate":
            files[pick].write_bytes(data[:-3])
        case "flip":
            files[pick].write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        case "remove":
            files[pick].unlink()
        case "swap":
            files[pick].write_bytes(files[pick - 1].read_bytes())
        case "empty":
            files[pick].write_bytes(b"")
    assert check_answer(disk_engine(tmp_path)) in (0, 40, 100)
    assert damage == "remove" or any("read anew" in record.message for record in caplog.records) or pick == 3
    check_answer(disk_engine(tmp_path), cached=100)


def test_a_full_disk_only_stops_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                        caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "deltic")

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(DiskStore, "write", full)
        engine = disk_engine(tmp_path)
        for seed in range(5):
            serve(engine, greedy(numbers(20 + seed, 60, 500), 5))
        check_answer(engine, cached=0)
    assert len([record for record in caplog.records if "No space left" in record.message]) == 1
    check_answer(disk_engine(tmp_path), cached=0)
    check_answer(disk_engine(tmp_path), cached=100)


def test_a_store_that_was_full_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Recording(100_000)
    tier = TierIndex(store, threads=False)
    store.full = True
    for tokens in ((1, 2, 3), (4, 5, 6)):
        tier.offer(source_of(tokens))
    store.full = False
    tier.offer(source_of((7, 8, 9)))
    assert tier.prefixes == 0, "a full store is asked again and again"
    monkeypatch.setattr(tier_index, "_PAUSE", 0.0)
    tier._paused_until = 0.0
    tier.offer(source_of((7, 8, 9)))
    assert tier.prefixes == 1


def test_two_engines_share_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_index, "_PAUSE", 0.0)
    first, second = disk_engine(tmp_path), disk_engine(tmp_path)
    serve(first, OPENING)
    first.close()
    serve(second, greedy(numbers(9, 50, 500), 3))  # looks around while it keeps this
    second.runtime.cache.tiers[0]._reader.submit(int).result()  # type: ignore[arg-type]
    serve(second, greedy(numbers(8, 50, 500), 3))
    check_answer(second, cached=100)


def test_two_engines_that_write_the_same_at_the_same_time(tmp_path: Path) -> None:
    engines = [disk_engine(tmp_path) for _ in range(2)]
    for engine in engines:
        engine.add(OPENING)
    while any(engine.has_work for engine in engines):
        for engine in engines:
            engine.step()
    for engine in engines:
        engine.close()
    check_answer(disk_engine(tmp_path), cached=100)


@pytest.mark.parametrize("shift", [-1e9, 1e9])
def test_a_clock_that_jumps_changes_no_answer(shift: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_answer(disk_engine(tmp_path))
    with monkeypatch.context() as patched:
        real = tier_index.time.time
        patched.setattr(tier_index.time, "time", lambda: real() + shift)
        check_answer(disk_engine(tmp_path), cached=100)
    check_answer(disk_engine(tmp_path), cached=100)


def test_the_budget_holds_across_restarts_and_models(tmp_path: Path) -> None:
    for round in range(4):
        engine = disk_engine(tmp_path, f"m{round % 2}", budget=400_000)
        for seed in range(6):
            serve(engine, greedy(numbers(10 * round + seed, 70, 500), 3))
            engine.check()
        engine.close()
        assert sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors")) < 401_000
    assert engine.runtime.cache.tiers[0].evictions


def test_prompts_that_arrive_together_after_a_restart_all_come_from_the_disk(tmp_path: Path) -> None:
    check_answer(disk_engine(tmp_path))
    engine = disk_engine(tmp_path)
    found = serve(engine, *(greedy((*PROMPT, *numbers(i, 9, 400)), 4, f"r{i}") for i in range(6)))
    assert [usage_of(found, f"r{i}").cached_tokens for i in range(6)] == [100] * 6
    engine.close()


def test_an_abort_while_a_tier_is_read_leaves_nothing(tmp_path: Path) -> None:
    check_answer(disk_engine(tmp_path))
    engine = disk_engine(tmp_path)
    engine.add(OPENING)
    engine.scheduler._admit()
    engine.abort("a")
    engine.step()
    engine.check()
    check_answer(engine, cached=100)


# Hostile content


def test_tensors_of_other_shapes_are_not_used() -> None:
    cache = toy_cache(8, 4)
    tier = TierIndex(HostStore(1 << 20), threads=False)
    cache.tiers = (tier,)
    good = torch.zeros((2, 20, 1, 1), dtype=torch.float64)
    state = {"recurrent": torch.zeros((3, 1, 1, 2), dtype=torch.float64),
             "conv": torch.zeros((3, 4, 1), dtype=torch.float64)}
    runs = {"short": good[:, :19], "other dtype": good.float(), "more heads": good.expand(2, 20, 3, 1)}
    for index, (name, keys) in enumerate(runs.items()):
        tokens = tuple(range(index * 100, index * 100 + 20))
        run = {"tokens": torch.tensor(tokens), "keys": keys, "values": torch.zeros((2, 20, 1, 2), dtype=torch.float64)}
        tier.offer(PrefixSource(tokens, lambda _, run=run: dict(run), lambda: dict(state)))
        fetch = cache.start_load((*tokens, 1))
        assert fetch.poll()
        sequence = cache.admit((*tokens, 1), 0, fetch)
        assert sequence is not None and sequence.done == 0, name
        cache.release(sequence)


def test_an_item_of_other_tokens_is_not_used() -> None:
    store = Recording(100_000)
    tier = TierIndex(store, threads=False)
    tier.offer(source_of((1, 2, 3)))
    key = PrefixHash((1, 2, 3)).key(3)
    store._items["kv", key]["tokens"] = torch.tensor([1, 2, 4])
    entry = tier.find((1, 2, 3, 4))
    assert entry is not None
    with pytest.raises(LostError, match="not those of its key"):
        tier.fetch(entry).result()


def test_a_missing_item_is_named() -> None:
    with pytest.raises(TierStoreError, match="not there"):
        HostStore(100).read(StoredItem("kv", "00", "", 0, 1))


# The whole way: a model, its fingerprint, its directory


def test_changed_model_of_same_name_shares_nothing(tmp_path: Path) -> None:
    """Weights of another seed, or another dtype, in the same directory."""
    def answer(seed: int, dtype: str = "float32", directory: Path | None = tmp_path) -> tuple[int, tuple[int, ...]]:
        where = {"cache_dir": str(directory)} if directory else {}
        llm = LLM(RandomModel(shape=odd_shape(), initializer_range=0.1, seed=seed), dtype=dtype, memory="8MiB",
                  threads=1, **where)
        choice = llm.generate([list(PROMPT)], SamplingParams(temperature=0.0, max_tokens=8))[0].choices[0]
        llm.close()
        return choice.usage.cached_tokens, choice.tokens

    first = answer(0)
    assert answer(1) == answer(1, directory=None) and answer(0, "bfloat16") == answer(0, "bfloat16", directory=None)
    assert answer(0) == (100, first[1]) and answer(1)[0] == 100


@pytest.mark.parametrize("option", ["cache_dir", "aot_dir"])
@pytest.mark.parametrize("below", ["", "/a/b"])
def test_a_file_is_no_directory(option: str, below: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("precious")
    with pytest.raises(ConfigError, match=rf"{option} .* is a file; name a directory") as refused:
        LLM(RandomModel(shape=odd_shape()), threads=1, **{option: f"{path}{below}"})
    assert refused.value.option == option and path.read_text() == "precious"


def test_a_directory_that_cannot_be_used_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "deltic")
    llm = LLM(RandomModel(shape=odd_shape()), dtype="float32", memory="8MiB", threads=1, cache_dir="/proc/nothing")
    assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))[0].choices[0].finish == "length"
    assert "nothing is kept on disk" in caplog.text and "cache_dir" in caplog.text
