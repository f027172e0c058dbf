"""Who owns which page, slot and replay ring, and what is to be done with them: pure accounting.

    pages 0 .. N - 1, each counted once per owner:

    |<- free ->|<-------------------------------- owned -------------------------------->|
               |<- by the tree alone ->|<- by both ->|<-- by leases and snapshots alone -->|
               |   full and partial    | full pages  |  partial pages; granted, not yet    |
               |   pages of prefixes   | of prefixes |  written ones; full ones that are   |
               |                       | in use      |  not in the tree (yet)              |
               |<----- give way ------>|<------------------ do not ----------------------->|

    slots: each free, spare for a step in flight, or one owner's: a lease's (its state, and those that it emits), a
    snapshot's, a checkpoint's.
    rings: each free, or a lease's.

What is attainable for a sequence is what is free or the tree's alone. A full page never changes, so it may have many
owners; a partial one has exactly one, and is copied for whoever continues there. Copying is queued: the order of the
queue keeps it right although the units change hands at once (`operations`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from deltic.cache.block_pool import BlockPool
from deltic.cache.handles import CacheSnapshot, SequenceCache
from deltic.cache.operations import CopyPage, CopySlot, FlushDeltaLog, Operation, PoolSizes
from deltic.cache.radix_tree import PrefixTree
from deltic.params import PAGE


class BlockAccounts:
    """The ledgers, the tree that gives way when they run out, those who hold units, and the queue."""

    def __init__(self, sizes: PoolSizes) -> None:
        self.pages, self.slots = BlockPool("page", sizes.pages), BlockPool("slot", sizes.slots)
        self.delta_logs = BlockPool("replay ring", sizes.delta_logs)
        self.tree = PrefixTree(self.pages, self.slots, sizes.slot_tokens)
        self.sequences: dict[int, SequenceCache] = {}
        self.snapshots: dict[int, CacheSnapshot] = {}
        self.spares: dict[int, None] = {}
        """Slots for steps in flight to write states to that are not committed yet."""
        self.queue: list[Operation] = []

    @property
    def holders(self) -> list[SequenceCache | CacheSnapshot]:
        return [*self.sequences.values(), *self.snapshots.values()]

    def book(self, lease: SequenceCache) -> SequenceCache:
        """Enter a lease that owns its slot and pages already."""
        self.sequences[lease.slot] = lease
        return lease

    def owns(self, holder: SequenceCache | CacheSnapshot) -> bool:
        """Whether the lease or snapshot is one of these accounts and still stands."""
        return self.sequences.get(holder.slot) is holder or self.snapshots.get(holder.slot) is holder

    def expect(self, holder: SequenceCache | CacheSnapshot) -> None:
        assert self.owns(holder), "a lease or snapshot was given back before, or belongs to another cache"

    def attainable(self, pages: int, spared: Iterable[int] = ()) -> int:
        """How many pages would be free without the tree, but for the `spared` ones; only so far as `pages` asks."""
        if self.pages.free >= pages:
            return self.pages.free
        return self.pages.size - len({*spared, *(page for holder in self.holders for page in holder.pages)})

    def make_room(self, pages: int) -> bool:
        """Have the tree give up prefixes until so many pages are free, or as many as can be; True if all are."""
        wanted = min(pages, self.attainable(pages))
        while self.pages.free < wanted and self.tree.evict():
            pass
        return self.pages.free >= pages

    def take_slot(self) -> int | None:
        """Own a slot; None if even without the tree there is none."""
        while not self.slots.free and self.tree.evict():
            pass
        slot = self.slots.take()
        return None if slot is None else slot[0]

    def take_copy(self, pages: Sequence[int], done: int) -> tuple[int, list[int]] | None:
        """Own a slot, the full pages below `done`, and a copy of the partial one; None, and no change, if there is no
        slot or page for that."""
        slot = self.take_slot()
        if slot is None:
            return None
        shared = self.share_pages(pages, done)
        if shared is None:
            self.slots.release([slot])
            return None
        return slot, shared

    def share_pages(self, pages: Sequence[int], done: int) -> list[int] | None:
        """Own the full pages below `done` too, and a copy of the partial one; None, and no change, if there is no page
        for that."""
        full, rest = divmod(done, PAGE)
        self.pages.share(pages[:full])
        own = self.own_page(pages[full]) if rest else None
        if rest and own is None:
            self.pages.release(pages[:full])
            return None
        return [*pages[:full]] if own is None else [*pages[:full], own]

    def own_page(self, page: int) -> int | None:
        """Own a copy of a page; None if there is no other."""
        self.make_room(1)
        own = self.pages.take()
        if own is None:
            return None
        self.queue.append(CopyPage(page, own[0]))
        return own[0]

    def copy_state(self, source: SequenceCache | CacheSnapshot, target: int) -> None:
        """Have the state of all committed tokens in a slot, which may be the source's own."""
        if source.slot != target:
            self.queue.append(CopySlot(source.slot, target))
        if isinstance(source, SequenceCache) and source.unflushed:
            assert source.delta_log is not None
            self.queue.append(FlushDeltaLog(target, source.delta_log, source.base, source.done))

    def check(self) -> None:
        """Assert that free + held + kept is all there is, and that nobody shares a page that will change."""
        holders, leases = self.holders, self.sequences.values()
        emitting = [slot for lease in leases for slot in lease.checkpoint_slots.values()]
        self.slots.check([*(holder.slot for holder in holders), *emitting, *self.spares, *self.tree.owned_slots()])
        self.delta_logs.check(lease.delta_log for lease in leases if lease.delta_log is not None)
        owners = Counter(self.tree.owned_pages())
        for holder in holders:
            assert len(holder.pages) * PAGE >= holder.done, "a cursor stands past its pages"
            assert isinstance(holder, CacheSnapshot) or len(holder.keys) >= holder.done, "a cursor stands past its keys"
            owners.update(holder.pages)
        self.pages.check(owners.elements())
        self.tree.check()
        for holder in holders:
            changing = holder.pages[holder.done // PAGE:]
            assert all(owners[page] == 1 for page in changing), "a page that is not full is shared"
