"""One tier below the pools: which prefixes a store holds, and what goes when its budget is full.

    root ── kv 0..812 ── kv 812..1,650 ── kv 1,650..1,702
             state        state            state

An entry is a prefix by the hash of its tokens. It has the K/V since its parent entry, and most have the state at its
end. States go by last use; the K/V of an entry stays as long as an entry below needs it, and goes with the last.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from deltic.cache.offload.prefix_items import (
    ANYTHING,
    ItemValidator,
    LoadedPrefix,
    PendingWrite,
    PrefixEntry,
    PrefixSource,
    Tensors,
    read_item,
    read_prefix,
    size_of,
)
from deltic.cache.offload.types import FullError, Kind, PrefixHash, StoredItem, TierStore
from deltic.ops.memory import is_shortage
from deltic.params import PAGE

log = logging.getLogger("deltic")


class HostCopier(Protocol):
    """What takes tensors to the host."""

    def prepare(self) -> None:
        """Do before what would hold up others later."""

    def __call__(self, tensors: Tensors) -> Callable[[], Tensors]:
        """Begin; what it returns waits for them."""


_BACKLOG = 512 << 20
"""Bytes that may wait to be written while another prefix is taken, however long that is: the end of a long conversation
is what its next turn needs. With more, prefixes are skipped rather than held in memory."""
_PAUSE = 60.0
"""Seconds for which a store that takes nothing is left alone, and between two looks at what others wrote there."""
_TRIES = 4
"""How often an item is written before a store that was full, and for which items went, counts as full."""


class _Inline(Executor):
    """Does the work at once."""

    def submit(self, fn: Callable[..., Any], /, *args: object, **kwargs: object) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def _begin(executor: Executor, fn: Callable[..., Any], *args: object) -> Future[Any]:
    """The work's future, which fails where no more is taken: the interpreter ends, and nobody has closed the tier."""
    try:
        return executor.submit(fn, *args)
    except RuntimeError as error:
        refused: Future[Any] = Future()
        refused.set_exception(error)
        return refused


class TierIndex:
    """The index of a store. For one thread; what takes long happens in two of its own, if `threads`.

    hits: prefixes that came from here, hit_tokens: how many tokens they spared.
    """

    def __init__(self, store: TierStore, threads: bool, copier: HostCopier | None = None) -> None:
        """copier: copies what is offered to the host."""
        self.store, self.name, self.budget, self._copier = store, store.name, store.budget, copier
        self.bytes = self.evictions = self.hits = self.hit_tokens = self.prefixes = self._given_up = 0
        self._entries: dict[str, PrefixEntry] = {}
        self._root = PrefixEntry("", 0, None)
        self._others: list[StoredItem] = []
        self._writer: Executor = ThreadPoolExecutor(1, "deltic-cache-write") if threads else _Inline()
        self._reader: Executor = ThreadPoolExecutor(1, "deltic-cache-read") if threads else _Inline()
        self._pending: deque[PendingWrite] = deque()
        self._backlog, self._paused_until, self._complained, self._closed = 0, 0.0, False, False
        self._scan: tuple[float, Future[tuple[list[StoredItem], list[StoredItem]]]] | None = None
        self._looked, self._there = time.monotonic(), store.ready
        self._deleted: set[tuple[str, str]] = set()  # since that scan began
        if self._there:
            self._merge(*_scan(store), 0.0)
        else:
            self._begin_scan()

    def prepare(self) -> None:
        """Do before what would hold up others later; waits for it."""
        if self._copier:
            _begin(self._writer, self._copier.prepare).result()

    def find(self, tokens: Sequence[int], above: int = 0) -> PrefixEntry | None:
        """The deepest entry with a state that `tokens` begin with, if deeper than `above`; at their very end only one
        with logits."""
        self._settle()
        if self._closed or not self._there or not any(
                above < entry.done <= len(tokens) and entry.state for entry in self._entries.values()):
            return None  # nothing is hashed for it
        found = [entry for entry in self._matching(tokens) if entry.state and above < entry.done
                 and (entry.done < len(tokens) or entry.state.kind == "final")]
        return found[-1] if found else None

    def offer(self, source: PrefixSource) -> None:
        """Keep a prefix, if it is worth it; returns at once."""
        self._settle()
        if self._closed:
            return
        self._look()
        if not self.store.writable:
            return
        done, now = len(source.tokens), time.monotonic()
        path = list(self._matching(source.tokens))
        parent = path[-1] if path else self._root
        kind: Kind = "final" if source.final else "state"
        stated = [entry for entry in path if entry.state]
        if parent.done == done and parent.state and (parent.state.kind == kind or kind == "state"):
            self._use(parent)
        elif (stated and done - PAGE <= stated[-1].done < done) or now < self._paused_until:
            pass  # what lies there already spares all but a page
        else:
            self._keep(source, parent, kind)
            self._settle()

    def fetch(self, entry: PrefixEntry, door: ItemValidator = ANYTHING) -> Future[LoadedPrefix]:
        """Read a prefix; its result may be a LostError. door: what may come in."""
        path = entry.path
        writing = [future for part in path for future in part.writing]
        items = [part.kv for part in path if part.kv]
        assert entry.state and len(items) == len(path)
        self._use(entry)
        # what lies in this process takes no time
        reader = _Inline() if self.store.trusted and all(future.done() for future in writing) else self._reader
        return _begin(reader, read_prefix, partial(read_item, self.store, door), items, entry.state, writing)

    def lose(self, item: StoredItem) -> None:
        """Forget an item that cannot be read, and what depends on it."""
        entry = self._entries.get(item.key)
        if entry and item.kind == "kv":
            self._drop(entry)
        elif entry and entry.state and entry.state.kind == item.kind:
            self._drop_state(entry)

    def close(self) -> None:
        """Wait until everything that was taken is written; nothing is found or kept afterwards."""
        self._settle()
        self._closed = True
        if not self._pending:
            self.store.abandon()
        self._writer.shutdown()
        self._reader.shutdown()
        self._settle()
        self.store.close()

    def check(self) -> None:
        """Assert that the index is sound and within the budget."""
        items = [item for entry in self._entries.values() for item in (entry.kv, entry.state) if item]
        assert self.bytes == sum(item.size for item in items) + sum(item.size for item in self._others), "bytes are off"
        assert self.bytes <= self.budget, f"the {self.name} tier holds more than its budget"
        states = sum(entry.state is not None for entry in self._entries.values())
        assert self.prefixes == states, "a state is miscounted"
        for entry in self._entries.values():
            assert entry.kv and entry.needed, "K/V is kept that no state needs"
            assert entry.parent and entry.key in entry.parent.lengths[entry.done], "an entry hangs at the wrong parent"
            assert entry.parent is self._root or self._entries[entry.parent.key] is entry.parent, "a parent is gone"

    # matching

    def _matching(self, tokens: Sequence[int]) -> Iterator[PrefixEntry]:
        """The entries that `tokens` begin with, ascending."""
        prefix, lengths, seen = PrefixHash(tokens), list(self._root.lengths), 0
        heapq.heapify(lengths)
        while lengths and lengths[0] <= len(tokens):
            done = heapq.heappop(lengths)
            entry = self._entries.get(prefix.key(done)) if done > seen else None
            seen = done
            if entry is not None:
                yield entry
                for further in entry.lengths:
                    heapq.heappush(lengths, further)

    # keeping

    def _keep(self, source: PrefixSource, parent: PrefixEntry, kind: Kind) -> None:
        done = len(source.tokens)
        if self._backlog > _BACKLOG:
            log.debug("the %s tier is behind with writing: a prefix of %d tokens is skipped", self.name, done)
            return  # nothing is copied for it
        key = PrefixHash(source.tokens).key(done)
        try:
            run, state = source.run(parent.done) if parent.done < done else {}, source.state()
        except (MemoryError, RuntimeError) as error:
            if not is_shortage(error):
                raise
            self._complain(f"there is no memory for a copy of {done:,} tokens; choose a smaller `memory` or "
                           "`host_memory`")
            return
        size = size_of(run) + size_of(state)
        if parent.done == done:
            entry = parent
            self._drop_state(entry, prune=False)
        else:
            entry = self._add(key, done, parent)
        entry.held = True
        fits = self._make_room(size, entry)
        entry.held = False
        if not fits:
            self._prune(entry)
            return
        below = entry.parent
        assert below is not None
        if run:
            entry.kv = self._write(entry, StoredItem("kv", key, below.key, below.done, done), run)
        entry.state = self._write(entry, StoredItem(kind, key, below.key, below.done, done), state)
        self.prefixes += 1
        self._use(entry, stored=False)

    def _write(self, entry: PrefixEntry, item: StoredItem, tensors: Tensors) -> StoredItem:
        item = replace(item, size=size_of(tensors))
        self.bytes += item.size
        self._submit(entry, item, tensors)
        return item

    def _submit(self, entry: PrefixEntry, item: StoredItem, tensors: Tensors, tries: int = 0) -> None:
        future: Future[int] = _begin(self._writer, self._write_out, item,
                                     self._copier(tensors) if self._copier else lambda: tensors)
        entry.writing.append(future)
        self._pending.append(PendingWrite(entry, item, tensors, future, self._given_up, tries))
        self._backlog += item.size

    def _write_out(self, item: StoredItem, arrived: Callable[[], Tensors]) -> int:
        """In the writer's thread."""
        return self.store.write(item, arrived())

    def _settle(self) -> None:
        """Take note of what has been written since, and what has not."""
        while self._pending and self._pending[0].future.done():
            done = self._pending.popleft()
            done.entry.writing.remove(done.future)
            self._backlog -= done.item.size
            self._note(done)
        if self._scan and self._scan[1].done():
            (began, found), self._scan = self._scan, None
            error = found.exception()
            if error is None:
                self._there = True
                self._merge(*found.result(), began)
            elif not self._there:
                self._complain(f"it cannot be used: {error}")
                self._closed = True

    def _note(self, done: PendingWrite) -> None:
        entry, item, error = done.entry, done.item, done.future.exception()
        if any((other.item.kind, other.item.key) == (item.kind, item.key) for other in self._pending):
            return  # given up, and then taken again: what counts is that
        wanted = self._entries.get(entry.key) is entry and item in (entry.kv, entry.state)
        if error is not None and wanted and self._give_way(error, done):
            self._submit(entry, item, done.tensors, done.tries + 1)
        elif error is not None:
            self._paused_until = time.monotonic() + _PAUSE
            self._complain(f"it takes no more for now: {error}")
            self.lose(item)
            self._discard(item)  # an earlier copy, which was given up, may have been written
        elif not wanted:
            self._discard(item)  # given up before it was written
        else:
            self._complained = False
            self._resize(entry, item, done.future.result())

    def _give_way(self, error: BaseException, failed: PendingWrite) -> bool:
        """Whether older items went for one that a full store did not take."""
        if not isinstance(error, FullError) or self._closed or failed.tries + 1 >= _TRIES:
            return False
        enough, path = failed.given_up + error.missing, failed.entry.path
        there = sum(item.size for entry in self._entries.values() if entry not in path and not entry.writing
                    for item in (entry.kv, entry.state) if item) + sum(item.size for item in self._others)
        if self._given_up + there < enough:
            return False
        while self._given_up < enough and self._evict(failed.entry):
            pass
        return True

    def _resize(self, entry: PrefixEntry, item: StoredItem, size: int) -> None:
        exact = replace(item, size=size)
        entry.kv, entry.state = (exact, entry.state) if item.kind == "kv" else (entry.kv, exact)
        entry.used = max(time.time(), entry.used)  # a scan that began before this may have missed it
        self.bytes += size - item.size
        while self.bytes > self.budget and self._evict(entry):
            pass
        if self.bytes > self.budget:  # larger than its tensors alone, and than all there may be
            self._drop(entry)

    def _complain(self, reason: str) -> None:
        """Once per streak: answers are not affected."""
        if not self._complained:
            log.warning("the %s tier of the prefix cache misses something: %s", self.name, reason)
        self._complained = True

    # giving up

    def _make_room(self, size: int, spared: PrefixEntry) -> bool:
        if size > self.budget:
            self._complain(f"a prefix of {size:,} bytes is larger than the budget of {self.budget:,}")
            return False
        while self.bytes + size > self.budget:
            if not self._evict(spared):
                return False
        return True

    def _evict(self, spared: PrefixEntry) -> bool:
        """Give up what has not been used for longest."""
        candidates = [entry for entry in self._entries.values() if entry.state and entry is not spared]
        oldest = min(candidates, key=lambda entry: entry.used, default=None)
        if self._others and (oldest is None or self._others[0].used <= oldest.used):
            self._delete(self._others.pop(0))
        elif oldest is not None:
            self._drop_state(oldest)
            self.evictions += 1
        else:
            return False
        return True

    def _drop_state(self, entry: PrefixEntry, prune: bool = True) -> None:
        if entry.state:
            self._delete(entry.state)
            entry.state = None
            self.prefixes -= 1
        if prune:
            self._prune(entry)

    def _prune(self, entry: PrefixEntry) -> None:
        """Give up K/V that no state needs any more."""
        while entry.parent is not None and not entry.needed and entry.key in self._entries:
            parent = entry.parent
            self._remove(entry)
            entry = parent

    def _drop(self, entry: PrefixEntry) -> None:
        """Give up an entry and all that continue it."""
        stack, doomed = [entry], []
        while stack:
            entry = stack.pop()
            doomed.append(entry)
            stack += [self._entries[key] for keys in entry.lengths.values() for key in keys]
        for entry in reversed(doomed):
            self._drop_state(entry, prune=False)
            self._remove(entry)
        if doomed[0].parent:
            self._prune(doomed[0].parent)

    def _remove(self, entry: PrefixEntry) -> None:
        if entry.kv:
            self._delete(entry.kv)
        self._unlink(entry)

    def _unlink(self, entry: PrefixEntry) -> None:
        """Forget an entry that nothing continues; its items stay where they are."""
        assert entry.parent is not None
        keys = entry.parent.lengths[entry.done]
        keys.discard(entry.key)
        if not keys:
            del entry.parent.lengths[entry.done]
        del self._entries[entry.key]

    def _delete(self, item: StoredItem) -> None:
        self._discard(item)
        self.bytes -= item.size
        self._given_up += item.size

    def _discard(self, item: StoredItem) -> None:
        """Delete what does not count, or no more. A scan that is under way may have seen it."""
        if self._scan:
            self._deleted.add((item.kind, item.key))
        self.store.delete(item)

    # what is there

    def _add(self, key: str, done: int, parent: PrefixEntry) -> PrefixEntry:
        entry = self._entries[key] = PrefixEntry(key, done, parent)
        parent.lengths.setdefault(done, set()).add(key)
        return entry

    def _use(self, entry: PrefixEntry, stored: bool = True) -> None:
        entry.used = max(time.time(), entry.used)
        if stored and entry.state:
            self.store.touch(entry.state)

    def _look(self) -> None:
        """Now and then, see what other processes have written or deleted there, if they can."""
        now = time.monotonic()
        if not self.store.trusted and self._scan is None and now > self._looked + _PAUSE:
            self._looked = now
            self._deleted.clear()
            self._begin_scan()

    def _begin_scan(self) -> None:
        self._scan = time.time(), _begin(self._reader, _scan, self.store)

    def _merge(self, items: list[StoredItem], others: list[StoredItem], began: float) -> None:
        """Bring the index in line with what lay in the store at a time."""
        items = [item for item in items if (item.kind, item.key) not in self._deleted]
        there = {(item.kind, item.key) for item in items}
        for entry in list(self._entries.values()):
            if entry.used >= began or entry.writing or self._entries.get(entry.key) is not entry:
                continue
            assert entry.kv is not None
            for item in (entry.kv, entry.state):
                if item and (item.kind, item.key) not in there:
                    self.lose(item)
        self._others = list(others)
        self._take_up([item for item in items if item.kind == "kv"], [item for item in items if item.kind != "kv"])
        self._account()

    def _take_up(self, runs: list[StoredItem], states: list[StoredItem]) -> None:
        """Index what is new and of use."""
        for item in sorted(runs, key=lambda item: item.done):
            parent = self._entries.get(item.parent) if item.parent else self._root
            known = self._entries.get(item.key)
            if known is None and parent is not None and parent.done == item.start < item.done:
                self._add(item.key, item.done, parent).kv = item
            elif known is None or not _same(known.kv, item):
                self._set_aside(item)
        for item in sorted(states, key=lambda item: item.kind):  # "final" comes first
            entry = self._entries.get(item.key)
            if entry and entry.done == item.done and not entry.state:
                entry.state, entry.used = item, min(item.used, time.time())
            elif entry is None or not _same(entry.state, item):
                self._set_aside(item)
        for entry in sorted(self._entries.values(), key=lambda entry: -entry.done):
            if entry.kv and not entry.needed:
                self._set_aside(entry.kv)
                self._unlink(entry)

    def _set_aside(self, item: StoredItem) -> None:
        """What cannot be used, as something that belongs to it is missing, goes, unless somebody may just be writing
        that."""
        if abs(time.time() - item.used) > _PAUSE:
            self._discard(item)
        else:
            self._others.append(item)

    def _account(self) -> None:
        self._others.sort(key=lambda item: item.used)
        items = [item for entry in self._entries.values() for item in (entry.kv, entry.state) if item]
        self.bytes = sum(item.size for item in (*items, *self._others))
        self.prefixes = sum(entry.state is not None for entry in self._entries.values())
        while self.bytes > self.budget and self._evict(self._root):
            pass


def _scan(store: TierStore) -> tuple[list[StoredItem], list[StoredItem]]:
    return list(store.scan()), list(store.others())


def _same(known: StoredItem | None, item: StoredItem) -> bool:
    return known is not None and (known.kind, known.start, known.parent) == (item.kind, item.start, item.parent)
