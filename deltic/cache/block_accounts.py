"""The owners of every page, slot and state delta log.

    pages 0 .. N - 1, each counted once per owner:

    |<- free ->|<---------------------------------- owned ---------------------------------->|
               |<- by the tree alone ->|<- by both ->|<-- by sequences and snapshots alone -->|
               |   full and partial    | full pages  |   partial pages; granted, not written  |
               |   pages of prefixes   | of prefixes |   pages; full ones that are not in the |
               |                       | in use      |   tree (yet)                           |
               |<------ evictable ---->|<----------------- not evictable -------------------->|

    slots:       each is free or has one owner: a sequence (for its state and for the states that steps write for
                 checkpoints), a snapshot or a checkpoint
    delta logs:  each is free or belongs to one sequence

A full page never changes, so it may have many owners. A partial page has one owner; another owner gets a copy. A
sequence that resumes at a checkpoint uses the full pages without owning them: the tree keeps the node for it. Copies
are queued, while units change owners at once; the order of the queue keeps this correct (`operations`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, MutableSequence, Sequence
from itertools import chain
from typing import TypeVar

from deltic.cache.block_pool import BlockPool
from deltic.cache.frames import SharedUnits
from deltic.cache.handles import CacheSnapshot, PageList, SequenceCache
from deltic.cache.operations import CopyPage, CopySlot, FlushDeltaLog, MovePages, OperationQueue, PoolSizes
from deltic.cache.radix_tree import PrefixTree
from deltic.params import PAGE

Owner = TypeVar("Owner", SequenceCache, CacheSnapshot)


class BlockAccounts:
    """The pools, the prefix tree, and the registered sequences and snapshots (keyed by slot)."""

    def __init__(self, sizes: PoolSizes, queue: OperationQueue) -> None:
        self.units = sizes.units()
        self.pages, self.slots = self.units.pages, self.units.slots
        self.delta_logs = BlockPool("state delta log", sizes.delta_logs)
        self.tree = PrefixTree(self.pages, self.slots, sizes.slot_tokens)
        self.sequences: dict[int, SequenceCache] = {}
        self.snapshots: dict[int, CacheSnapshot] = {}
        self.queue = queue

    @property
    def owners(self) -> list[SequenceCache | CacheSnapshot]:
        """All sequences and snapshots."""
        return [*self.sequences.values(), *self.snapshots.values()]

    def add(self, owner: Owner) -> Owner:
        """Registers a sequence or snapshot after its units were taken from the pools."""
        if isinstance(owner, SequenceCache):
            self.sequences[owner.slot] = owner
        else:
            self.snapshots[owner.slot] = owner
        return owner

    def remove(self, owner: SequenceCache | CacheSnapshot) -> None:
        del (self.sequences if isinstance(owner, SequenceCache) else self.snapshots)[owner.slot]

    def owns(self, owner: SequenceCache | CacheSnapshot) -> bool:
        """Returns True if a sequence or snapshot belongs to these accounts and was not released."""
        return self.sequences.get(owner.slot) is owner or self.snapshots.get(owner.slot) is owner

    def check_owner(self, owner: SequenceCache | CacheSnapshot) -> None:
        assert self.owns(owner), "a sequence or snapshot was released before, or belongs to another cache"

    @property
    def held_slots(self) -> int:
        """Number of slots that sequences and snapshots own."""
        return len(self.owners) + sum(len(cache.checkpoint_slots) for cache in self.sequences.values())

    def attainable(self, pages: int, slots: int = 0, spared: Iterable[int] = (), keeping: bool = False) -> int:
        """Returns the number of pages that are free after taking `slots` slots and evicting the whole tree except
        locked checkpoints and the pages `spared`. If at least `pages` are free, the result may be too low, but not
        below `pages`. Negative if the slots do not fit. keeping: as in `make_room`."""
        free = self.units.free_pages(slots)
        if free >= pages:
            return free
        locked, owners = self.tree.locked(), self.owners
        held = self.held_slots if keeping else len(owners)
        room = self.units.room(held + len(locked) + slots)
        spared = [*spared, *chain.from_iterable(map(self.tree.path, locked))]
        least = room - len(spared) - sum(len(owner.pages) for owner in owners)  # counts shared pages several times
        if least >= pages:
            return least
        return room - len({*spared, *(page for owner in owners for page in owner.pages)})

    def make_room(self, pages: int, slots: int = 0, keeping: bool = False) -> bool:
        """Evicts prefixes until `pages` pages and `slots` slots are free; returns True if they are. If an empty tree
        would not suffice: frees what it can, or, with slots, evicts nothing. keeping: the room is for a checkpoint
        (`PrefixTree.evict`). Otherwise states not yet in the tree are dropped before what `keeping` protects."""
        wanted = min(pages, self.attainable(pages, slots, keeping=keeping))
        if slots and wanted < pages:
            return False
        while self.units.free_pages(slots) < wanted:
            if not self.tree.evict(keeping=True) and (keeping or not (self.drop_checkpoint(slots)
                                                                      or self.tree.evict())):
                break
        return self.units.free_pages(slots) >= pages

    def drop_checkpoint(self, slots: int = 0) -> bool:
        """Frees a slot reserved for a checkpoint that is not in the tree yet, of the youngest sequence that has one.
        Returns False if there is none, or if it would not help: `slots` slots are free and pages cannot use it."""
        if not isinstance(self.units, SharedUnits) and self.units.free_pages(slots) >= 0:
            return False
        for cache in reversed(self.sequences.values()):
            if cache.checkpoint_slots:
                position = min(cache.checkpoint_slots, key=lambda position: (position in cache.likely_resume, position))
                self.slots.release([cache.checkpoint_slots.pop(position)])
                return True
        return False

    def take_slot(self, held: PageList | None = None, keeping: bool = False) -> int | None:
        """Takes a slot, evicting prefixes if needed; returns None if none can be freed. Pages may move to other frames:
        then all owners, the tree and `held` (a further page list) are renumbered. keeping: as in `PrefixTree.evict`."""
        if not self.make_room(0, slots=1, keeping=keeping):
            return None
        slot, moved = self.units.take_slot()
        if moved is not None:
            self.queue.append(MovePages(tuple(moved), tuple(moved.values())))
        if moved:
            for pages in (*(owner.pages for owner in self.owners), *([] if held is None else [held])):
                pages.renumber(moved)
            self.tree.renumber(moved)
        return slot

    def forks(self, source: SequenceCache | CacheSnapshot, count: int, keys: MutableSequence[int] | None = None,
              keeping: bool = False) -> list[SequenceCache]:
        """Returns `count` new sequence caches at the source's position; an empty list if pages or slots are short. The
        forks share the full pages. keys: a list that begins with the source's keys; by default each fork gets a copy of
        them. keeping: as in `PrefixTree.evict`."""
        self.check_owner(source)
        found = list[SequenceCache]()
        for slot, pages in self.take_copies(source.pages, source.done, count, keeping):
            self.copy_state(source, slot)
            own = source.tokens if keys is None else keys
            found.append(self.add(SequenceCache(slot, pages, own, source.done, line=source.line)))
            if source.line:
                source.line.enter()
        return found

    def take_copies(self, pages: PageList, done: int, count: int = 1, keeping: bool = False
                    ) -> list[tuple[int, PageList]]:
        """Takes `count` slots, each with a page list from `share_pages`. Returns an empty list, and changes nothing, if
        slots or pages are short."""
        if not self.make_room(count * bool(done % PAGE), slots=count, keeping=keeping):
            return []
        slots = [slot for _ in range(count) if (slot := self.take_slot(pages)) is not None]
        shared = self.share_pages(pages, done, count) if len(slots) == count else []
        if not shared:
            self.slots.release(slots)
        return [*zip(slots, shared, strict=False)]

    def share_pages(self, pages: Sequence[int], done: int, count: int = 1) -> list[PageList]:
        """Adds `count` owners to the full pages below `done` and copies the partial page for each. Returns one page
        list per owner. Returns an empty list, and changes nothing, if pages for the copies are short."""
        full, rest = divmod(done, PAGE)
        shared = pages[:full]
        self.pages.share(shared, count)
        self.make_room(count * bool(rest))
        own = self.pages.take(count * bool(rest))
        if own is None:
            for _ in range(count):
                self.pages.release(shared)
            return []
        found = [PageList(shared) for _ in range(count)]
        for each, page in zip(found, own, strict=False):
            self.queue.append(CopyPage(pages[full], page))
            each.append(page)
        return found

    def release_pages(self, owner: SequenceCache | CacheSnapshot, kept: int | None = None) -> None:
        """Releases the pages of a sequence or snapshot, except the page `kept`, which the tree has taken over."""
        self.pages.release(page for page in owner.own_pages if page != kept)
        if isinstance(owner, SequenceCache) and owner.lender:
            self.tree.leave(owner.lender)
            owner.lender = None

    def own_page(self, page: int) -> int | None:
        """Takes a page for a checkpoint and queues a copy of `page` to it. Returns None if no page is free."""
        self.make_room(1, keeping=True)
        own = self.pages.take()
        if own is None:
            return None
        self.queue.append(CopyPage(page, own[0]))
        return own[0]

    def copy_state(self, source: SequenceCache | CacheSnapshot, target: int) -> None:
        """Queues a copy of the state at the cursor to a slot. For the source's own slot, only flushes its delta log."""
        if source.slot != target:
            self.queue.append(CopySlot(source.slot, target))
        if isinstance(source, SequenceCache) and source.unflushed:
            assert source.delta_log is not None
            self.queue.append(FlushDeltaLog(target, source.delta_log, source.base, source.done))

    def check(self) -> None:
        """Asserts that free, owned and kept units add up to the pools, and that no page that will change is shared."""
        owners, sequences = self.owners, self.sequences.values()
        checkpoint_slots = [slot for cache in sequences for slot in cache.checkpoint_slots.values()]
        self.slots.check([*(owner.slot for owner in owners), *checkpoint_slots, *self.tree.owned_slots()])
        self.delta_logs.check(cache.delta_log for cache in sequences if cache.delta_log is not None)
        counts = Counter(self.tree.owned_pages())
        for owner in owners:
            assert len(owner.pages) * PAGE >= owner.done, "a cursor stands past its pages"
            assert isinstance(owner, CacheSnapshot) or len(owner.keys) >= owner.done, "a cursor stands past its keys"
            counts.update(owner.own_pages)
        self.pages.check(counts.elements())
        self.tree.check()
        for owner in owners:
            changing = owner.pages[owner.done // PAGE:]
            assert all(counts[page] == 1 for page in changing), "a page that is not full is shared"


class StateSlots:
    def __init__(self, accounts: BlockAccounts, recurrent: bool) -> None:
        """recurrent: False if the model has no recurrent layers and thus needs no delta logs."""
        self._accounts, self._recurrent = accounts, recurrent

    def attach_delta_log(self, cache: SequenceCache) -> bool:
        """Gives a sequence a delta log if it has none. Returns False if it needs one and none is free."""
        if cache.delta_log is None:
            unit = self._accounts.delta_logs.take()
            cache.delta_log = unit[0] if unit else None
        return self.may_defer(cache)

    def may_defer(self, cache: SequenceCache) -> bool:
        """Returns True if a step need not write the state: the sequence has a delta log, or the model has no states."""
        return cache.delta_log is not None or not self._recurrent

    def flush(self, cache: SequenceCache) -> None:
        """Advances the state in the slot to the cursor, which empties the delta log."""
        self._accounts.copy_state(cache, cache.slot)
        cache.unflushed = 0

    def queue_flush(self, cache: SequenceCache, base: int, done: int) -> None:
        """Advances the state from `base` to `done` committed tokens. base: number of tokens that the state covers after
        the step in flight. Does not change the cursor and base of the cache: `commit` sets them."""
        assert done <= cache.done, "a state is brought to tokens that may not stay"
        if self._recurrent and base < done:
            assert cache.delta_log is not None
            self._accounts.queue.append(FlushDeltaLog(cache.slot, cache.delta_log, base, done))

    def swap(self, first: SequenceCache, second: SequenceCache) -> None:
        """Swaps the slots of two sequences, after a step wrote the first one's state into the second one's slot."""
        first.slot, second.slot = second.slot, first.slot
        self._accounts.sequences[first.slot] = first
        self._accounts.sequences[second.slot] = second
