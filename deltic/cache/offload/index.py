"""The index of one tier: finds the prefixes in its store, and evicts them to keep its budget.

    root ── kv 0..812 ── kv 812..1,650 ── kv 1,650..1,702
             state        state            state

An entry is a prefix, identified by the hash of its tokens. It has the K/V since its parent entry, and usually the state
at its end. The least recently used state is evicted first; K/V stays while its entry or one below it has a state.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from deltic.cache.offload.tiers import read_item, read_prefix
from deltic.cache.offload.types import (
    ANYTHING,
    FullError,
    ItemValidator,
    Kind,
    LoadedPrefix,
    PrefixEntry,
    PrefixHash,
    PrefixSource,
    StoredItem,
    Tensors,
    TierStore,
    size_of,
)
from deltic.params import PAGE

log = logging.getLogger("deltic")

_BACKLOG = 512 << 20
"""Maximum backlog of bytes to write at which another prefix, of any length, is accepted: the next turn of a long
conversation needs its end. With a larger backlog, prefixes are skipped."""
_PAUSE = 60.0
"""Seconds between two scans of a store that other processes write to, and from an error to the next write."""
_REFRESH = 0.2
"""Minimum seconds between two scans by `refresh`, because an earlier one would find little."""
_TRIES = 4
"""Maximum number of attempts to write an item to a full store, each after deleting other items."""


@dataclass(frozen=True, slots=True, eq=False)
class PendingWrite:
    """An item that is being written to the store. evicted: total bytes that the tier had evicted before its submission.
    tries: number of earlier attempts."""

    entry: PrefixEntry
    item: StoredItem
    tensors: Tensors
    future: Future[int]
    evicted: int
    tries: int


class HostCopier(Protocol):
    """Copies tensors to the host."""

    def prepare(self) -> None:
        """Does work in advance that would delay requests later."""

    def __call__(self, tensors: Tensors) -> Callable[[], Tensors]:
        """Returns a function that waits for the tensors and returns copies on the host."""


class _Inline(Executor):
    """An executor that runs each function in `submit`."""

    def submit(self, fn: Callable[..., Any], /, *args: object, **kwargs: object) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def _submit(executor: Executor, fn: Callable[..., Any], *args: object) -> Future[Any]:
    """Submits a call. The returned future fails if the executor refuses work because the interpreter ends."""
    try:
        return executor.submit(fn, *args)
    except RuntimeError as error:
        refused: Future[Any] = Future()
        refused.set_exception(error)
        return refused


class TierIndex:
    """The index of a store, to be used by one thread. With `threads`, two further threads read and write.

    hits: number of prefixes that were loaded. hit_tokens: number of tokens that these saved.
    """

    def __init__(self, store: TierStore, threads: bool, copier: HostCopier | None = None) -> None:
        """copier: copies offered prefixes to the host."""
        self.store, self.name, self.budget = store, store.name, store.budget
        self.bytes = self.prefixes = self.evictions = 0
        self.hits = self.hit_tokens = 0
        self._copier = copier
        self._entries: dict[str, PrefixEntry] = {}
        self._root = PrefixEntry("", 0, None)
        self._others: list[StoredItem] = []  # oldest first
        self._writer: Executor = ThreadPoolExecutor(1, "deltic-cache-write") if threads else _Inline()
        self._reader: Executor = ThreadPoolExecutor(1, "deltic-cache-read") if threads else _Inline()
        self._pending: deque[PendingWrite] = deque()
        self._backlog = self._evicted = 0
        self._paused_until = 0.0
        self._warned = self._closed = False
        self._scan: tuple[float, Future[tuple[list[StoredItem], list[StoredItem]]]] | None = None
        self._deleted: set[tuple[str, str]] = set()  # items deleted since that scan began
        self._last_scan = time.monotonic()
        self._there = store.ready
        if self._there:
            self._merge(*_scan(store), 0.0)
        else:
            self._start_scan()

    @property
    def writes(self) -> list[Future[int]]:
        """The futures of items that are being written."""
        return [write.future for write in self._pending]

    def prepare(self) -> None:
        """Does work in advance that would delay requests later; waits for its end."""
        if self._copier:
            _submit(self._writer, self._copier.prepare).result()

    def find(self, tokens: Sequence[int], above: int = 0) -> PrefixEntry | None:
        """Returns the deepest entry with a state that is a prefix of `tokens` and deeper than `above`. An entry at the
        very end of `tokens` counts only with logits."""
        self._settle()
        if self._closed or not self._there:
            return None
        if not any(above < entry.done <= len(tokens) and entry.state for entry in self._entries.values()):
            return None  # saves hashing the tokens
        found = [entry for entry in self._matching(tokens) if entry.state and above < entry.done
                 and (entry.done < len(tokens) or entry.state.kind == "final")]
        return found[-1] if found else None

    def holds(self, key: str) -> bool:
        """Returns True if the tier has the state of the prefix `key`. Thread-safe."""
        entry = self._entries.get(key)
        return entry is not None and entry.state is not None

    def refresh(self) -> bool:
        """Looks for items that other processes have written since the last scan. Returns True while the scan runs; call
        it until it returns False."""
        self._settle()
        if self.store.trusted or self._closed:
            return False
        if self._scan is None and time.monotonic() > self._last_scan + _REFRESH:
            self._last_scan = time.monotonic()
            self._deleted.clear()
            self._start_scan()
        return self._scan is not None

    def offer(self, source: PrefixSource) -> None:
        """Stores a prefix if that saves more than a page. Returns without waiting for the write."""
        self._settle()
        if self._closed:
            return
        self._scan_now_and_then()
        if not self.store.writable:
            return
        done = len(source.tokens)
        path = list(self._matching(source.tokens))
        parent = path[-1] if path else self._root
        kind: Kind = "final" if source.final else "state"
        stated = [entry.done for entry in path if entry.state]
        if parent.done == done and parent.state and (parent.state.kind == kind or kind == "state"):
            self._use(parent)
            return
        saves_a_page = not stated or not done - PAGE <= stated[-1] < done
        if saves_a_page and time.monotonic() >= self._paused_until:
            self._keep(source, parent, kind)
            self._settle()

    def fetch(self, entry: PrefixEntry, validator: ItemValidator = ANYTHING) -> Future[LoadedPrefix]:
        """Starts to read a prefix. The future may fail with LostError."""
        path = entry.path
        writing = [future for part in path for future in part.writing]
        items = [part.kv for part in path if part.kv]
        assert entry.state and len(items) == len(path)
        self._use(entry)
        in_memory = self.store.trusted and all(future.done() for future in writing)
        reader = _Inline() if in_memory else self._reader
        return _submit(reader, read_prefix, partial(read_item, self.store, validator), items, entry.state, writing)

    def written(self, tokens: Sequence[int]) -> list[StoredItem]:
        """Returns the items of the deepest written prefix of `tokens`, for `adopt` in another process."""
        self._settle()
        for entry in reversed([*self._matching(tokens)]):
            usable = entry.state and (entry.done < len(tokens) or entry.state.kind == "final")
            if usable and not any(part.writing for part in entry.path):
                return [item for part in entry.path for item in part.items]
        return []

    def writing(self, tokens: Sequence[int]) -> list[Future[int]]:
        """Returns the futures of items that are being written for prefixes of `tokens`."""
        return [future for entry in self._matching(tokens) for future in entry.writing]

    def adopt(self, items: Sequence[StoredItem]) -> None:
        """Adds items that another process has written to the store, without a scan."""
        self._settle()
        adopted: list[PrefixEntry] = []
        for item in sorted(items, key=lambda item: (item.done, item.kind != "kv")) if self._there else ():
            entry, parent = self._entries.get(item.key), self._entries.get(item.parent) if item.parent else self._root
            if entry is None and item.kind == "kv" and parent and parent.done == item.start < item.done:
                entry = self._add(item.key, item.done, parent)
                entry.kv = item
                self.bytes += item.size
            elif entry and item.kind != "kv" and not (entry.state and item.kind in (entry.state.kind, "state")):
                self._drop_state(entry, prune=False)
                entry.state = item
                self.bytes += item.size
                self.prefixes += 1
            if entry:
                entry.used = max(time.time(), entry.used)  # a scan that began before this may have missed it
                adopted.append(entry)
        for entry in reversed(adopted):
            if entry.kv and not entry.needed and entry.key in self._entries:
                self.bytes -= entry.kv.size
                self._unlink(entry)
        while self.bytes > self.budget and self._evict(self._root):
            pass

    def lose(self, item: StoredItem) -> None:
        """Removes an item that cannot be read, and all items that depend on it."""
        entry = self._entries.get(item.key)
        if entry and item.kind == "kv":
            self._drop(entry)
        elif entry and entry.state and entry.state.kind == item.kind:
            self._drop_state(entry)

    def drain(self) -> bool:
        """Waits until all pending items are written, which frees their copies. Returns False if there were none."""
        self._settle()
        writes = self.writes
        wait(writes)
        self._settle()
        return bool(writes)

    def close(self) -> None:
        """Waits until all pending items are written. Afterwards the tier finds and stores nothing."""
        self._settle()
        self._closed = True
        if not self._pending:
            self.store.abandon()
        self._writer.shutdown()
        self._reader.shutdown()
        self._settle()
        self.store.close()

    def check(self) -> None:
        """Asserts that the index is consistent and within the budget."""
        assert self.bytes == sum(item.size for item in self._all_items()), "bytes are off"
        assert self.bytes <= self.budget, f"the {self.name} tier holds more than its budget"
        states = sum(entry.state is not None for entry in self._entries.values())
        assert self.prefixes == states, "a state is miscounted"
        for entry in self._entries.values():
            assert entry.kv and entry.needed, "K/V is kept that no state needs"
            assert entry.parent and entry.key in entry.parent.lengths[entry.done], "an entry hangs at the wrong parent"
            assert entry.parent is self._root or self._entries[entry.parent.key] is entry.parent, "a parent is gone"

    def _all_items(self) -> list[StoredItem]:
        return [*(item for entry in self._entries.values() for item in entry.items), *self._others]

    def _matching(self, tokens: Sequence[int]) -> Iterator[PrefixEntry]:
        """Yields the entries that are prefixes of `tokens`, ascending."""
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

    # writing

    def _keep(self, source: PrefixSource, parent: PrefixEntry, kind: Kind) -> None:
        done = len(source.tokens)
        if self._backlog > _BACKLOG:
            log.debug("the %s tier is behind with writing: a prefix of %d tokens is skipped", self.name, done)
            return
        key = PrefixHash(source.tokens).key(done)
        try:
            run = source.run(parent.done) if parent.done < done else {}
            state = source.state()
        except MemoryError:
            self._warn(f"there is no memory for a copy of {done:,} tokens; choose a smaller `memory` or "
                       "`host_memory`")
            return
        if parent.done == done:
            entry = parent
            self._drop_state(entry, prune=False)
        else:
            entry = self._add(key, done, parent)
        entry.held = True
        fits = self._make_room(size_of(run) + size_of(state), entry)
        entry.held = False
        if not fits:
            self._prune(entry)
            return
        above = entry.parent
        assert above is not None
        if run:
            entry.kv = self._write(entry, StoredItem("kv", key, above.key, above.done, done), run)
        entry.state = self._write(entry, StoredItem(kind, key, above.key, above.done, done), state)
        self.prefixes += 1
        self._use(entry, stored=False)

    def _write(self, entry: PrefixEntry, item: StoredItem, tensors: Tensors) -> StoredItem:
        item = replace(item, size=size_of(tensors))
        self.bytes += item.size
        self._submit_write(entry, item, tensors)
        return item

    def _submit_write(self, entry: PrefixEntry, item: StoredItem, tensors: Tensors, tries: int = 0) -> None:
        copied = self._copier(tensors) if self._copier else lambda: tensors
        future: Future[int] = _submit(self._writer, lambda: self.store.write(item, copied()))
        entry.writing.append(future)
        self._pending.append(PendingWrite(entry, item, tensors, future, self._evicted, tries))
        self._backlog += item.size

    def _settle(self) -> None:
        """Processes the writes and scans that have finished since the last call."""
        while self._pending and self._pending[0].future.done():
            write = self._pending.popleft()
            write.entry.writing.remove(write.future)
            self._backlog -= write.item.size
            self._note(write)
        if self._scan and self._scan[1].done():
            (began, found), self._scan = self._scan, None
            error = found.exception()
            if error is None:
                self._there = True
                self._merge(*found.result(), began)
            elif not self._there:
                self._warn(f"it cannot be used: {error}")
                self._closed = True

    def _note(self, write: PendingWrite) -> None:
        entry, item, error = write.entry, write.item, write.future.exception()
        if any((other.item.kind, other.item.key) == (item.kind, item.key) for other in self._pending):
            return  # the item was dropped and offered again: the later write counts
        wanted = self._entries.get(entry.key) is entry and item in (entry.kv, entry.state)
        if error is not None and wanted and self._evict_for(write, error):
            self._submit_write(entry, item, write.tensors, write.tries + 1)
        elif error is not None:
            self._paused_until = time.monotonic() + _PAUSE
            self._warn(f"it takes no more for now: {error}")
            self.lose(item)
            self._delete(item)  # an earlier copy, which was dropped, may have been written
        elif not wanted:
            self._delete(item)
        else:
            self._warned = False
            self._resize(entry, item, write.future.result())

    def _evict_for(self, write: PendingWrite, error: BaseException) -> bool:
        """Evicts items to make room for one that a full store has refused. Returns False if these are too few."""
        if not isinstance(error, FullError) or self._closed or write.tries + 1 >= _TRIES:
            return False
        enough, path = write.evicted + error.missing, write.entry.path
        written = [entry for entry in self._entries.values() if entry not in path and not entry.writing]
        evictable = sum(item.size for entry in written for item in entry.items)
        evictable += sum(item.size for item in self._others)
        if self._evicted + evictable < enough:
            return False
        while self._evicted < enough and self._evict(write.entry):
            pass
        return True

    def _resize(self, entry: PrefixEntry, item: StoredItem, size: int) -> None:
        """Records the size of an item's file, which is larger than its tensors."""
        exact = replace(item, size=size)
        if item.kind == "kv":
            entry.kv = exact
        else:
            entry.state = exact
        entry.used = max(time.time(), entry.used)  # a scan that began before this may have missed it
        self.bytes += size - item.size
        while self.bytes > self.budget and self._evict(entry):
            pass
        if self.bytes > self.budget:
            self._drop(entry)

    def _warn(self, reason: str) -> None:
        """Logs a warning, but only one until the next item is written, because answers are not affected."""
        if not self._warned:
            log.warning("the %s tier of the prefix cache misses something: %s", self.name, reason)
        self._warned = True

    # eviction

    def _make_room(self, size: int, spared: PrefixEntry) -> bool:
        if size > self.budget:
            self._warn(f"a prefix of {size:,} bytes is larger than the budget of {self.budget:,}")
            return False
        while self.bytes + size > self.budget:
            if not self._evict(spared):
                return False
        return True

    def _evict(self, spared: PrefixEntry) -> bool:
        """Evicts the least recently used state or item of another model. Returns False if there is none."""
        candidates = [entry for entry in self._entries.values() if entry.state and entry is not spared]
        oldest = min(candidates, key=lambda entry: entry.used, default=None)
        if self._others and (oldest is None or self._others[0].used <= oldest.used):
            self._evict_item(self._others.pop(0))
        elif oldest is not None:
            self._drop_state(oldest)
            self.evictions += 1
        else:
            return False
        return True

    def _drop_state(self, entry: PrefixEntry, prune: bool = True) -> None:
        if entry.state:
            self._evict_item(entry.state)
            entry.state = None
            self.prefixes -= 1
        if prune:
            self._prune(entry)

    def _prune(self, entry: PrefixEntry) -> None:
        """Removes an entry, then its ancestors, as long as no state needs them."""
        while entry.parent is not None and not entry.needed and entry.key in self._entries:
            parent = entry.parent
            self._remove(entry)
            entry = parent

    def _drop(self, entry: PrefixEntry) -> None:
        """Removes an entry and all entries that continue it."""
        parent, stack, doomed = entry.parent, [entry], list[PrefixEntry]()
        while stack:
            doomed.append(stack.pop())
            stack += [self._entries[key] for keys in doomed[-1].lengths.values() for key in keys]
        for each in reversed(doomed):
            self._drop_state(each, prune=False)
            self._remove(each)
        if parent:
            self._prune(parent)

    def _remove(self, entry: PrefixEntry) -> None:
        if entry.kv:
            self._evict_item(entry.kv)
        self._unlink(entry)

    def _unlink(self, entry: PrefixEntry) -> None:
        """Removes an entry without children from the index. Its items stay in the store."""
        assert entry.parent is not None
        keys = entry.parent.lengths[entry.done]
        keys.discard(entry.key)
        if not keys:
            del entry.parent.lengths[entry.done]
        del self._entries[entry.key]

    def _evict_item(self, item: StoredItem) -> None:
        self._delete(item)
        self.bytes -= item.size
        self._evicted += item.size

    def _delete(self, item: StoredItem) -> None:
        """Deletes an item from the store only, and makes a running scan ignore it."""
        if self._scan:
            self._deleted.add((item.kind, item.key))
        self.store.delete(item)

    # scans

    def _add(self, key: str, done: int, parent: PrefixEntry) -> PrefixEntry:
        entry = self._entries[key] = PrefixEntry(key, done, parent)
        parent.lengths.setdefault(done, set()).add(key)
        return entry

    def _use(self, entry: PrefixEntry, stored: bool = True) -> None:
        entry.used = max(time.time(), entry.used)
        if stored and entry.state:
            self.store.touch(entry.state)

    def _scan_now_and_then(self) -> None:
        """Starts a scan every `_PAUSE` seconds, unless no other process can write to the store."""
        now = time.monotonic()
        if not self.store.trusted and self._scan is None and now > self._last_scan + _PAUSE:
            self._last_scan = now
            self._deleted.clear()
            self._start_scan()

    def _start_scan(self) -> None:
        self._scan = time.time(), _submit(self._reader, _scan, self.store)

    def _merge(self, items: list[StoredItem], others: list[StoredItem], began: float) -> None:
        """Updates the index with the results of a scan. began: time at which the scan began."""
        items = [item for item in items if (item.kind, item.key) not in self._deleted]
        present = {(item.kind, item.key) for item in items}
        for entry in list(self._entries.values()):
            if entry.used >= began or entry.writing or self._entries.get(entry.key) is not entry:
                continue
            for item in entry.items:
                if (item.kind, item.key) not in present:
                    self.lose(item)
        self._others = list(others)
        self._add_runs(sorted((item for item in items if item.kind == "kv"), key=lambda item: item.done))
        self._add_states(sorted((item for item in items if item.kind != "kv"), key=lambda item: item.kind))
        for entry in sorted(self._entries.values(), key=lambda entry: -entry.done):
            if entry.kv and not entry.needed:
                self._set_aside(entry.kv)
                self._unlink(entry)
        self._others.sort(key=lambda item: item.used)
        self.bytes = sum(item.size for item in self._all_items())
        self.prefixes = sum(entry.state is not None for entry in self._entries.values())
        while self.bytes > self.budget and self._evict(self._root):
            pass

    def _add_runs(self, runs: list[StoredItem]) -> None:
        for item in runs:
            parent = self._entries.get(item.parent) if item.parent else self._root
            known = self._entries.get(item.key)
            if known is None and parent is not None and parent.done == item.start < item.done:
                self._add(item.key, item.done, parent).kv = item
            elif known is None or not _same(known.kv, item):
                self._set_aside(item)

    def _add_states(self, states: list[StoredItem]) -> None:
        """Adds scanned states to their entries. states: "final" ones must come before others."""
        for item in states:
            entry = self._entries.get(item.key)
            if entry and entry.done == item.done and not entry.state:
                entry.state = item
                entry.used = min(item.used, time.time())
            elif entry is None or not _same(entry.state, item):
                self._set_aside(item)

    def _set_aside(self, item: StoredItem) -> None:
        """Deletes an item that is useless without others, unless another process may be writing these now."""
        if abs(time.time() - item.used) > _PAUSE:
            self._delete(item)
        else:
            self._others.append(item)


def _scan(store: TierStore) -> tuple[list[StoredItem], list[StoredItem]]:
    return list(store.scan()), list(store.others())


def _same(known: StoredItem | None, item: StoredItem) -> bool:
    return known is not None and (known.kind, known.start, known.parent) == (item.kind, item.start, item.parent)
